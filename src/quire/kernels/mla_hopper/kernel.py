"""The MLA kernel for Hopper GPUs: absorbed attention over a cache of latents, in Gluon.

Grid: [row blocks, partitions] (`schedule.py`). A program owns 64 rows, (token, query head) pairs of one sequence, and
the KV tiles of its partition. Its output, 64 x 512 float32, fills half of an SM's registers. So two consumer
warpgroups hold half of the columns each. They share the scores as well: the even warpgroup computes those of tiles 0,
2, 4 and so on, the odd warpgroup those of tiles 1, 3, 5. Each multiplies its probabilities with its half of the
values. It hands them to the other warpgroup through shared memory, and multiplies those that the other hands over. So
the tensor cores work for one warpgroup while the other computes its softmax. The division of columns and tiles is that
of FlashMLA's "seesaw" schedule; here both warpgroups take the tiles in order, so that the even tile's place is free,
and loads, while the odd tile is multiplied. A producer warp loads halves of 256 columns by TMA, each when its place is
free.

A latent is read once: its first columns are key and value, its rope columns are key only. When the rope columns of a
tile have been multiplied, the tile's probabilities take their place in shared memory.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.hopper.pipeline import reinterpret, tma_load
from quire.kernels.mla_hopper.schedule import (
    ROWS,
    TILE,
    Costs,
    Lengths,
    find_partition,
    keys_of,
    num_tiles,
    queries_of,
)
from quire.kernels.primitives import LN2

HALF = gl.constexpr(256)  # columns of the values that a consumer warpgroup owns
QUARTER = gl.constexpr(128)  # columns that are loaded, waited for and freed together
ROPE = gl.constexpr(64)  # rope columns
PANEL = gl.constexpr(64)  # columns of a TMA box
EVEN, ODD = gl.constexpr(0), gl.constexpr(1)
# Quarters of an even and of an odd tile in the order in which they are loaded and multiplied. Both warpgroups multiply
# the values of the odd tile at the same time. So they free its quarters 0 and 2 first.
ORDER = gl.constexpr(((0, 1, 2, 3), (2, 0, 3, 1)))


class Queries(NamedTuple):
    """The two parts of the queries."""

    nope: Any  # [num_tokens, NUM_HEADS, 512]
    rope: Any  # [num_tokens, NUM_HEADS, 64]
    stride_nope_token: Any
    stride_nope_head: Any
    stride_rope_token: Any
    stride_rope_head: Any


class Outputs(NamedTuple):
    """The tensors of results, and the scratch for partials."""

    out: Any  # [num_tokens, NUM_HEADS, 512]
    lse: Any  # [num_tokens, NUM_HEADS] float32, or None
    acc: Any  # [row blocks, partitions, 2, PARTIAL_ROWS, 512] float32, not normalised
    m_i: Any  # [row blocks, partitions, 2, PARTIAL_ROWS] float32, running maximum as a base-2 exponent
    l_i: Any  # the same shape, sum of exponentials relative to m_i
    stride_out_token: Any
    stride_out_head: Any
    stride_lse: Any


class Shared(NamedTuple):
    """Shared memory and its barriers. The even warpgroup owns quarters 0 and 1 of the columns, the odd one 2 and 3."""

    q: Any  # [4, ROWS, QUARTER]: quarters of the queries
    q_rope: Any  # [1, ROWS, ROPE]
    kv: Any  # [8, TILE, QUARTER]: quarters of the even tile, then of the odd tile
    kv_rope: Any  # [2, TILE, ROPE]: rope columns of the even and of the odd tile, later their probabilities
    maximum: Any  # [2, ROWS]: of the even and of the odd warpgroup
    total: Any  # [2, ROWS]: sum of exponentials
    full: Any  # 8 barriers: the quarter has arrived
    empty: Any  # 8: the quarter may be overwritten
    q_full: Any  # both warpgroups have stored their quarters of the queries
    q_empty: Any  # both warpgroups have multiplied the queries
    p_full: Any  # 2: probabilities and maximum are stored
    total_full: Any  # both sums are stored


class Work(NamedTuple):
    """The tiles of one sequence that a program attends to."""

    seq: Any
    q_start: Any  # its first query token
    q_len: Any
    first_pos: Any  # position of its first query
    seq_len: Any
    visible: Any  # keys that the row block sees
    tile: Any  # first tile, in the sequence
    count: Any  # tiles
    starts: Any  # the first tile is the sequence's first
    ends: Any  # the last tile is the sequence's last


@gluon.jit
def work_of(lengths, partition, seq, place, row_block, causal, NUM_HEADS: gl.constexpr):
    """Return the tiles of a sequence that the partition holds, and the next sequence's place in the list.

    The sequence's own place is `place`.
    """
    q_start, q_len = queries_of(lengths, seq)
    first_pos, seq_len, visible = keys_of(lengths, seq, q_len, row_block, causal, NUM_HEADS)
    tiles = num_tiles(q_len, visible, row_block, NUM_HEADS)
    place += gl.where(tiles > 0, partition.overhead, 0)
    start = first_tile(partition, place)
    stop = gl.minimum(partition.high - place, tiles)
    work = Work(seq, q_start, q_len, first_pos, seq_len, visible, start, stop - start, start == 0, stop == tiles)
    return work, place + tiles


@gluon.jit
def first_tile(partition, place):
    """Return the first tile of a sequence that is in the partition; the sequence's tiles begin at `place`."""
    return gl.maximum(partition.low - place, 0)


@gluon.jit
def make_barrier(ARRIVALS: gl.constexpr):
    """Allocate a barrier that completes after ARRIVALS arrivals."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, ARRIVALS)
    return barrier


@gluon.jit
def make_barriers(NUMBER: gl.constexpr):
    """Allocate barriers that complete after one arrival."""
    barriers = ()
    for i in gl.static_range(NUMBER):
        barriers = barriers + (make_barrier(1),)
    return barriers


@gluon.jit
def wait(barrier, phase):
    """Wait until a barrier has completed its phase-th phase."""
    mbarrier.wait(barrier, phase & 1)


@gluon.jit
def produce(
    s, kv_desc, page_table, lengths, partition, row_block, causal, stride_table, table_width, page_rows,
    NUM_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Load the latents of every tile of the partition. The producer warp runs this."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, LANES)
    seq, place = partition.seq, partition.first
    uses, odd_uses = 0, 0
    while place < partition.high:
        row = page_table + seq.to(gl.int64) * stride_table
        # These page numbers are loaded before the length of the sequence is known, so only the table bounds them.
        pos = first_tile(partition, place + partition.overhead) * TILE
        pages = load_pages(row, pos + lane * BOX, table_width * PAGE_SIZE, PAGE_SIZE)
        work, next_place = work_of(lengths, partition, seq, place, row_block, causal, NUM_HEADS)
        stop = gl.minimum(pos + work.count * TILE, work.visible)
        pages = gl.where(pos + lane * BOX < stop, pages, 0)
        end = pos + work.count * TILE
        while pos < end:
            rows = ()
            for i in gl.static_range(2 * TILE // BOX):
                page = gl.sum(gl.where(lane == i, pages, 0), 0)
                rows = rows + (page * page_rows + (pos + i * BOX) % PAGE_SIZE,)
            pages = load_pages(row, pos + 2 * TILE + lane * BOX, stop, PAGE_SIZE)
            has_odd = pos + TILE < end
            for i in gl.static_range(4):
                load_quarter(s, kv_desc, rows, EVEN, ORDER[EVEN][i], uses, BOX)
            if has_odd:
                for i in gl.static_range(4):
                    load_quarter(s, kv_desc, rows, ODD, ORDER[ODD][i], odd_uses, BOX)
                odd_uses += 1
            uses += 1
            pos += 2 * TILE
        seq += 1
        place = next_place


@gluon.jit
def load_pages(row, pos, stop, PAGE_SIZE: gl.constexpr):
    """Load the page numbers of boxes at positions `pos`. Boxes that begin at `stop` or later come from page 0."""
    return gl.load(row + pos // PAGE_SIZE, mask=pos < stop, other=0).to(gl.int32)


@gluon.jit
def load_quarter(s, kv_desc, rows, PARITY: gl.constexpr, QUARTER_I: gl.constexpr, use, BOX: gl.constexpr):
    """Load one quarter of a tile when its place is free. The quarter that is multiplied last brings the rope columns."""
    I: gl.constexpr = PARITY * 4 + QUARTER_I
    WITH_ROPE: gl.constexpr = QUARTER_I == ORDER[PARITY][3]
    wait(s.empty[I], use + 1)
    mbarrier.expect(s.full[I], TILE * (QUARTER + ROPE if WITH_ROPE else QUARTER) * 2)
    for box in gl.static_range(TILE // BOX):
        row = rows[PARITY * (TILE // BOX) + box]
        for panel in gl.static_range(QUARTER // PANEL):
            into = s.kv.index(I).slice(panel * PANEL, PANEL, 1).slice(box * BOX, BOX)
            tma_load(kv_desc, [row, QUARTER_I * QUARTER + panel * PANEL], s.full[I], into)
        if WITH_ROPE:
            tma_load(kv_desc, [row, 2 * HALF], s.full[I], s.kv_rope.index(PARITY).slice(box * BOX, BOX))


@gluon.jit
def consume(
    PARITY: gl.constexpr, s, queries, outputs, lengths, partition, partition_index, num_partitions, row_block, causal,
    scale, NUM_HEADS: gl.constexpr, PARTIAL_ROWS: gl.constexpr,
):  # fmt: skip
    """Attend to every tile of the partition and write the results. Each consumer warpgroup runs this."""
    seq, place = partition.seq, partition.first
    uses, odd_uses, works = 0, 0, 0
    while place < partition.high:
        # The compiler cannot know that this is 0. So it computes addresses here and keeps none of them in registers,
        # of which the loop over tiles has none to spare.
        zero = seq >> 30
        panels = load_queries(PARITY, queries, lengths, seq, row_block + zero, NUM_HEADS)
        work, next_place = work_of(lengths, partition, seq, place, row_block, causal, NUM_HEADS)
        if work.count > 0:
            store_queries(PARITY, s, panels, works)
            if PARITY == EVEN:
                acc, m_i, l_i = attend_even(s, work, uses, odd_uses, row_block, causal, scale, NUM_HEADS)
            else:
                acc, m_i, l_i = attend_odd(s, work, uses, odd_uses, row_block, causal, scale, NUM_HEADS)
            uses += (work.count + 1) // 2
            odd_uses += work.count // 2
            s.total.index(PARITY).store(l_i)
            mbarrier.arrive(s.total_full, count=1)
            wait(s.total_full, works)
            l_i += s.total.index(1 - PARITY).load(l_i.type.layout)
            if work.starts & work.ends:
                store_result(PARITY, s, acc, m_i, l_i, outputs, work, row_block + zero, NUM_HEADS)
            else:
                slot = ((row_block + zero) * num_partitions + partition_index) * 2 + work.starts.to(gl.int32)
                store_partial(PARITY, acc, m_i, l_i, outputs, slot, PARTIAL_ROWS)
            works += 1
        seq += 1
        place = next_place


@gluon.jit
def load_queries(PARITY: gl.constexpr, queries, lengths, seq, row_block, NUM_HEADS: gl.constexpr):
    """Load half of the columns of a row block of queries, in panels. The even warpgroup also loads the rope columns."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_start, q_len = queries_of(lengths, seq)
    rows = row_block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token, head = rows // NUM_HEADS, rows % NUM_HEADS
    owned = (token < q_len)[:, None]
    token = (q_start + token).to(gl.int64)
    cols = gl.arange(0, PANEL, gl.SliceLayout(0, LAYOUT))[None, :]
    nope = token * queries.stride_nope_token + head.to(gl.int64) * queries.stride_nope_head
    nope = queries.nope + nope[:, None] + (PARITY * HALF + cols)
    panels = ()
    for panel in gl.static_range(HALF // PANEL):
        panels = panels + (gl.load(nope + panel * PANEL, mask=owned, other=0.0),)
    if PARITY == EVEN:
        rope = token * queries.stride_rope_token + head.to(gl.int64) * queries.stride_rope_head
        panels = panels + (gl.load(queries.rope + rope[:, None] + cols, mask=owned, other=0.0),)
    return panels


@gluon.jit
def store_queries(PARITY: gl.constexpr, s, panels, works):
    """Store the queries to shared memory, and wait for the other warpgroup's."""
    wait(s.q_empty, works + 1)
    for panel in gl.static_range(HALF // PANEL):
        quarter = s.q.index(PARITY * 2 + panel * PANEL // QUARTER)
        quarter.slice(panel * PANEL % QUARTER, PANEL, 1).store(panels[panel])
    if PARITY == EVEN:
        s.q_rope.index(0).store(panels[HALF // PANEL])
    fence_async_shared()
    mbarrier.arrive(s.q_full, count=1)
    wait(s.q_full, works)


@gluon.jit
def multiply_keys(PARITY: gl.constexpr, s, use, zero):
    """Return the products of the queries with this warpgroup's next tile of keys."""
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    scores = gl.zeros([ROWS, TILE], gl.float32, OF_SCORES)
    for i in gl.static_range(4):
        wait(s.full[PARITY * 4 + ORDER[PARITY][i]], use)
        keys = s.kv.index(zero + PARITY * 4 + ORDER[PARITY][i]).permute((1, 0))
        scores = warpgroup_mma(s.q.index(zero + ORDER[PARITY][i]), keys, scores, use_acc=i > 0, is_async=True)
    rope = s.kv_rope.index(zero + PARITY).permute((1, 0))
    scores = warpgroup_mma(s.q_rope.index(zero), rope, scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def multiply_values(SIDE: gl.constexpr, PARITY: gl.constexpr, s, p, acc, zero):
    """Begin to multiply probabilities with this warpgroup's columns of a tile."""
    left, right = acc
    left = warpgroup_mma(p, s.kv.index(zero + PARITY * 4 + SIDE * 2), left, is_async=True)
    right = warpgroup_mma(p, s.kv.index(zero + PARITY * 4 + SIDE * 2 + 1), right, is_async=True)
    return left, right


@gluon.jit
def finish_values(SIDE: gl.constexpr, PARITY: gl.constexpr, s, acc):
    """Wait for what `multiply_values` began, and free each quarter when it has been multiplied."""
    left, right = acc
    left = warpgroup_mma_wait(1, deps=[left])
    mbarrier.arrive(s.empty[PARITY * 4 + SIDE * 2], count=1)
    right = warpgroup_mma_wait(0, deps=[right])
    mbarrier.arrive(s.empty[PARITY * 4 + SIDE * 2 + 1], count=1)
    return left, right


@gluon.jit
def mask_scores(scores, pos, work, row_block, causal, NUM_HEADS: gl.constexpr):
    """Set scores of invisible keys to -inf, in a tile that begins at position `pos`."""
    LAYOUT: gl.constexpr = scores.type.layout
    low_token = row_block * ROWS // NUM_HEADS
    if pos + TILE > gl.where(causal, gl.minimum(work.first_pos + low_token + 1, work.seq_len), work.seq_len):
        rows = row_block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        last = gl.where(causal, work.first_pos + rows // NUM_HEADS, work.seq_len - 1)
        last = gl.minimum(last, work.seq_len - 1) - pos
        cols = gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(cols[None, :] <= last[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def zero_invisible_rows(PARITY: gl.constexpr, s, zero, pos, visible):
    """Zero the values of a tile that no row of the row block sees. They may hold NaN, and 0 * NaN is NaN.

    The tile is taken as panels of 32-bit words. The swizzle of TMA moves a row's words within the row only.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    WORDS: gl.constexpr = PANEL // 2
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if pos + TILE > visible:
        rows = pos + gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
        for quarter in gl.static_range(4):
            tile = s.kv.index(zero + PARITY * 4 + quarter)
            words = reinterpret(tile, gl.int32, [QUARTER // PANEL * TILE, WORDS], PLAIN)
            for panel in gl.static_range(QUARTER // PANEL):
                panel_words = words.slice(panel * TILE, TILE)
                panel_words.store(gl.where((rows < visible)[:, None], panel_words.load(LAYOUT), 0))


@gluon.jit
def finite(m_i):
    """Return a maximum; 0 for a row that has seen no key, since -inf - -inf is NaN."""
    return gl.where(m_i == float("-inf"), 0.0, m_i)


@gluon.jit
def scale_rows(acc, factor):
    """Multiply each row of both quarters by its factor."""
    left, right = acc
    factor = gl.convert_layout(factor, gl.SliceLayout(1, left.type.layout))[:, None]
    return left * factor, right * factor


@gluon.jit
def empty_state(OF_SCORES: gl.constexpr, OF_OUT: gl.constexpr):
    """Return the state over no keys, of two quarters of the columns."""
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, OF_SCORES))
    l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, OF_SCORES))
    left, right = gl.zeros([ROWS, QUARTER], gl.float32, OF_OUT), gl.zeros([ROWS, QUARTER], gl.float32, OF_OUT)
    return (left, right), m_i, l_i


@gluon.jit
def hand_over(PARITY: gl.constexpr, s, p, m_i):
    """Give the other warpgroup the probabilities of a tile, and the maximum that they are relative to."""
    s.kv_rope.index(PARITY).store(p.to(s.q.dtype))
    s.maximum.index(PARITY).store(m_i)
    fence_async_shared()
    mbarrier.arrive(s.p_full[PARITY], count=1)


@gluon.jit
def attend_even(s, work, use, odd_use, row_block, causal, scale, NUM_HEADS: gl.constexpr):
    """Return the state of the left columns; the sum is that of the even tiles."""
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OF_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 16])
    acc, m_i, l_i = empty_state(OF_SCORES, OF_OUT)
    pos = work.tile * TILE
    for i in range(work.count // 2):
        zero = (use + i) >> 30
        acc, m_even, l_i = attend_to_own_even_tile(
            acc, m_i, l_i, s, work, use + i, pos, zero, row_block, causal, scale, OF_OUT, NUM_HEADS
        )
        wait(s.p_full[ODD], odd_use + i)
        m_i = s.maximum.index(ODD).load(gl.SliceLayout(1, OF_SCORES))
        beta = gl.exp2(m_even - finite(m_i))
        l_i *= beta
        acc = finish_values(EVEN, EVEN, s, acc)
        acc = multiply_values(EVEN, ODD, s, s.kv_rope.index(zero + ODD), scale_rows(acc, beta), zero)
        acc = finish_values(EVEN, ODD, s, acc)
        pos += 2 * TILE
    if work.count % 2 > 0:  # the last tile is even
        zero = (use + work.count) >> 30
        acc, m_i, l_i = attend_to_own_even_tile(
            acc, m_i, l_i, s, work, use + work.count // 2, pos, zero, row_block, causal, scale, OF_OUT, NUM_HEADS
        )
        acc = finish_values(EVEN, EVEN, s, acc)
    mbarrier.arrive(s.q_empty, count=1)
    return acc, m_i, l_i


@gluon.jit
def attend_to_own_even_tile(
    acc, m_i, l_i, s, work, use, pos, zero, row_block, causal, scale, OF_OUT: gl.constexpr, NUM_HEADS: gl.constexpr
):  # fmt: skip
    """Compute the probabilities of an even tile, hand them over, and begin to multiply them with the left columns."""
    scores = multiply_keys(EVEN, s, use, zero)
    scores = mask_scores(scores, pos, work, row_block, causal, NUM_HEADS)
    zero_invisible_rows(EVEN, s, zero, pos, work.visible)
    m_even = gl.maximum(m_i, gl.max(scores, 1) * scale)
    p = gl.exp2(scores * scale - finite(m_even)[:, None])
    hand_over(EVEN, s, p, m_even)
    alpha = gl.exp2(m_i - finite(m_even))
    l_i = l_i * alpha + gl.sum(p, 1)
    own = gl.convert_layout(p.to(s.q.dtype), gl.DotOperandLayout(0, OF_OUT, 2))
    return multiply_values(EVEN, EVEN, s, own, scale_rows(acc, alpha), zero), m_even, l_i


@gluon.jit
def attend_odd(s, work, use, odd_use, row_block, causal, scale, NUM_HEADS: gl.constexpr):
    """Return the state of the right columns; the sum is that of the odd tiles."""
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OF_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 16])
    acc, m_i, l_i = empty_state(OF_SCORES, OF_OUT)
    pos = work.tile * TILE
    for i in range(work.count // 2):
        zero = (use + i) >> 30
        scores = multiply_keys(ODD, s, odd_use + i, zero)
        scores = mask_scores(scores, pos + TILE, work, row_block, causal, NUM_HEADS)
        zero_invisible_rows(ODD, s, zero, pos + TILE, work.visible)
        highest = gl.max(scores, 1) * scale
        # The softmax of this tile overlaps the product of the even one.
        acc, m_even, alpha = attend_to_even_tile(acc, m_i, s, use + i, zero, OF_SCORES)
        m_i = gl.maximum(m_even, highest)
        p = gl.exp2(scores * scale - finite(m_i)[:, None])
        hand_over(ODD, s, p, m_i)
        beta = gl.exp2(m_even - finite(m_i))
        l_i = l_i * (alpha * beta) + gl.sum(p, 1)
        own = gl.convert_layout(p.to(s.q.dtype), gl.DotOperandLayout(0, OF_OUT, 2))
        acc = finish_values(ODD, EVEN, s, acc)
        acc = multiply_values(ODD, ODD, s, own, scale_rows(acc, beta), zero)
        acc = finish_values(ODD, ODD, s, acc)
        pos += 2 * TILE
    if work.count % 2 > 0:  # the last tile is even
        zero = (use + work.count) >> 30
        acc, m_i, alpha = attend_to_even_tile(acc, m_i, s, use + work.count // 2, zero, OF_SCORES)
        l_i *= alpha
        acc = finish_values(ODD, EVEN, s, acc)
    mbarrier.arrive(s.q_empty, count=1)
    return acc, m_i, l_i


@gluon.jit
def attend_to_even_tile(acc, m_i, s, use, zero, OF_SCORES: gl.constexpr):
    """Begin to multiply the even tile's probabilities with the right columns. Return its maximum and factor as well."""
    wait(s.p_full[EVEN], use)
    m_even = s.maximum.index(EVEN).load(gl.SliceLayout(1, OF_SCORES))
    alpha = gl.exp2(m_i - finite(m_even))
    acc = multiply_values(ODD, EVEN, s, s.kv_rope.index(zero + EVEN), scale_rows(acc, alpha), zero)
    return acc, m_even, alpha


@gluon.jit
def store_result(PARITY: gl.constexpr, s, acc, m_i, l_i, outputs, work, row_block, NUM_HEADS: gl.constexpr):
    """Normalise and write this warpgroup's columns.

    They are staged in the place of its queries, which both warpgroups have multiplied: whole rows reach memory faster
    than the fragments of an accumulator.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    empty = l_i == 0.0
    safe = gl.where(empty, 1.0, l_i)
    quarters = scale_rows(acc, 1.0 / safe)
    for i in gl.static_range(2):
        s.q.index(PARITY * 2 + i).store(quarters[i].to(s.q.dtype))
    for i in gl.static_range(2):
        cols = PARITY * HALF + i * QUARTER + gl.arange(0, QUARTER, gl.SliceLayout(0, LAYOUT))[None, :]
        for first in gl.static_range(0, ROWS, 32):
            rows = row_block * ROWS + first + gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
            token = rows // NUM_HEADS
            offsets = (work.q_start + token).to(gl.int64) * outputs.stride_out_token
            offsets += (rows % NUM_HEADS).to(gl.int64) * outputs.stride_out_head
            values = s.q.index(PARITY * 2 + i).slice(first, 32).load(LAYOUT)
            gl.store(outputs.out + offsets[:, None] + cols, values, mask=(token < work.q_len)[:, None])
    if PARITY == EVEN:
        if outputs.lse is not None:
            rows = row_block * ROWS + gl.arange(0, ROWS, l_i.type.layout)
            token = rows // NUM_HEADS
            lse = gl.where(empty, float("-inf"), m_i * LN2 + gl.log(safe))
            offsets = (work.q_start + token).to(gl.int64) * outputs.stride_lse + rows % NUM_HEADS
            gl.store(outputs.lse + offsets, lse, mask=token < work.q_len)


@gluon.jit
def store_partial(PARITY: gl.constexpr, acc, m_i, l_i, outputs, slot, PARTIAL_ROWS: gl.constexpr):
    """Write this warpgroup's columns of a partial, not normalised."""
    OF_OUT: gl.constexpr = acc[0].type.layout
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, OF_OUT))
    cols = PARITY * HALF + gl.arange(0, QUARTER, gl.SliceLayout(0, OF_OUT))[None, :]
    into = outputs.acc + slot.to(gl.int64) * (PARTIAL_ROWS * 2 * HALF) + rows[:, None] * (2 * HALF) + cols
    for i in gl.static_range(2):
        gl.store(into + i * QUARTER, acc[i], mask=(rows < PARTIAL_ROWS)[:, None])
    if PARITY == EVEN:
        rows = gl.arange(0, ROWS, l_i.type.layout)
        gl.store(outputs.m_i + slot * PARTIAL_ROWS + rows, m_i, mask=rows < PARTIAL_ROWS)
        gl.store(outputs.l_i + slot * PARTIAL_ROWS + rows, l_i, mask=rows < PARTIAL_ROWS)


@gluon.jit(do_not_specialize=["num_seqs", "num_partitions", "sequence_cost", "stride_table", "table_width"])
def mla_hopper_kernel(
    out_ptr, lse_ptr, q_nope_ptr, q_rope_ptr, kv_desc,
    page_table, seq_lens, cu_seqlens_q, query_offsets, acc_ptr, m_ptr, l_ptr,
    scale, causal, num_seqs, num_partitions, combine_cost, sequence_cost, stride_table, table_width, page_rows,
    stride_nope_token, stride_nope_head, stride_rope_token, stride_rope_head,
    stride_out_token, stride_out_head, stride_lse,
    NUM_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr, PARTIAL_ROWS: gl.constexpr,
):  # fmt: skip
    element: gl.constexpr = kv_desc.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s = Shared(
        gl.allocate_shared_memory(element, [4, ROWS, QUARTER], WIDE),
        gl.allocate_shared_memory(element, [1, ROWS, ROPE], WIDE),
        gl.allocate_shared_memory(element, [8, TILE, QUARTER], WIDE),
        gl.allocate_shared_memory(element, [2, TILE, ROPE], WIDE),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT),
        make_barriers(8),
        make_barriers(8),
        make_barrier(2),
        make_barrier(2),
        make_barriers(2),
        make_barrier(2),
    )  # fmt: skip
    fence_async_shared()
    gdc_wait()
    gdc_launch_dependents()
    row_block, index = gl.program_id(0), gl.program_id(1)
    lengths = Lengths(seq_lens, cu_seqlens_q, query_offsets, num_seqs)
    costs = Costs(combine_cost, sequence_cost)
    partition = find_partition(lengths, index, num_partitions, costs, row_block, causal > 0, NUM_HEADS)
    queries = Queries(q_nope_ptr, q_rope_ptr, stride_nope_token, stride_nope_head, stride_rope_token, stride_rope_head)
    outputs = Outputs(out_ptr, lse_ptr, acc_ptr, m_ptr, l_ptr, stride_out_token, stride_out_head, stride_lse)
    gl.warp_specialize(
        [
            (consume, (
                EVEN, s, queries, outputs, lengths, partition, index, num_partitions, row_block, causal > 0, scale,
                NUM_HEADS, PARTIAL_ROWS)),
            (consume, (
                ODD, s, queries, outputs, lengths, partition, index, num_partitions, row_block, causal > 0, scale,
                NUM_HEADS, PARTIAL_ROWS)),
            (produce, (
                s, kv_desc, page_table, lengths, partition, row_block, causal > 0, stride_table, table_width, page_rows,
                NUM_HEADS, PAGE_SIZE, BOX)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
