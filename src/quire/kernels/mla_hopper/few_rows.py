"""The MLA kernel for row blocks of at most 32 rows: shared memory, producer, converter and consumer.

A tensor-core instruction of a warpgroup has 64 rows. With 16 query heads, three quarters of them would multiply
nothing. So keys and values are the rows here, and (token, query head) pairs the columns: the scores of a tile are
[64 keys, COLUMNS], and the output is [512, COLUMNS], transposed. One warpgroup holds all of it, and reads half of the
shared memory for a tile that two warpgroups of `many_rows.py` read.

Queries are small here, so there is room for two and a half tiles. Their quarters form a ring: the n-th quarter that is
loaded takes place n % PLACES. fp8 latents arrive in a ring of raw quarters. A warpgroup converts them into the other.
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

from quire.kernels.hopper.convert import peaks, scale_of_rows, scale_panels
from quire.kernels.hopper.pipeline import tma_load
from quire.kernels.mla_hopper.memory import HALF, PANEL, QUARTER, ROPE, wait
from quire.kernels.mla_hopper.producer import load_pages
from quire.kernels.mla_hopper.schedule import TILE, first_tile, queries_of, work_of
from quire.kernels.mla_hopper.softmax import finite, zero_invisible_rows
from quire.kernels.primitives import LN2


class Ring(NamedTuple):
    """Places for quarters of tiles. A place's i-th phase of each barrier belongs to its i-th use."""

    quarters: Any  # [places, TILE, QUARTER]
    rope: Any  # [tiles, TILE, ROPE]: rope columns, which arrive and are freed with a tile's last quarter
    full: Any  # a barrier for each place: the quarter may be read
    empty: Any  # a barrier for each place: the quarter may be overwritten


class FewShared(NamedTuple):
    """Shared memory."""

    q: Any  # [4, COLUMNS, QUARTER]: quarters of the queries
    q_rope: Any  # [1, COLUMNS, ROPE]
    p: Any  # [TILE, COLUMNS]: probabilities
    ring: Any  # Ring of operands of tensor cores
    raw: Any  # Ring of fp8 latents, or an empty tuple


@gluon.jit
def allocate_few(element: gl.constexpr, raw_element: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate shared memory for operands of type `element`, and for raw latents if they have another type."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(2 * COLUMNS, 16, 2)
    q = gl.allocate_shared_memory(element, [4, COLUMNS, QUARTER], WIDE)
    q_rope = gl.allocate_shared_memory(element, [1, COLUMNS, ROPE], WIDE)
    p = gl.allocate_shared_memory(element, [TILE, COLUMNS], NARROW)
    if raw_element == element:
        ring = allocate_ring(element, 11 if COLUMNS == 16 else 10, 3, WIDE, WIDE)
        return FewShared(q, q_rope, p, ring, ())
    else:
        raw = allocate_ring(
            raw_element, 5 if COLUMNS == 16 else 4, 2, gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(64, 8, 2)
        )
        return FewShared(q, q_rope, p, allocate_ring(element, 8, 2, WIDE, WIDE), raw)


@gluon.jit
def allocate_ring(
    element: gl.constexpr, PLACES: gl.constexpr, TILES: gl.constexpr, LAYOUT: gl.constexpr, OF_ROPE: gl.constexpr
):
    """Allocate a ring. A tile's rope columns must outlive its last quarter: PLACES <= 4 * TILES."""
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 1)
    quarters = gl.allocate_shared_memory(element, [PLACES, TILE, QUARTER], LAYOUT)
    rope = gl.allocate_shared_memory(element, [TILES, TILE, ROPE], OF_ROPE)
    return Ring(quarters, rope, full, empty)


@gluon.jit
def place_of(ring, n):
    """Return the place of the n-th quarter, and which use of the place that is."""
    PLACES: gl.constexpr = ring.full.shape[0]
    return n % PLACES, n // PLACES


@gluon.jit
def rope_of(ring, n):
    """Return the rope columns of the tile to which the n-th quarter belongs."""
    return ring.rope.index(n // 4 % ring.rope.shape[0])


@gluon.jit
def produce_few(s, source, program, NUM_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr):
    """Load the latents of every tile of the partition. The producer warp runs this."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    partition = program.partition
    lane = gl.arange(0, 32, LANES)
    seq, place = partition.seq, partition.first
    n = 0
    while place < partition.high:
        row = source.page_table + seq.to(gl.int64) * source.stride_table
        # These page numbers are loaded before the length of the sequence is known, so only the table bounds them.
        pos = first_tile(partition, place + partition.overhead) * TILE
        pages = load_pages(row, pos + lane * BOX, source.table_width * PAGE_SIZE, PAGE_SIZE)
        work, next_place = work_of(program.lengths, partition, seq, place, 0, program.causal, NUM_HEADS)
        end = pos + work.count * TILE
        stop = gl.minimum(end, work.visible)
        pages = gl.where(pos + lane * BOX < stop, pages, 0)
        while pos < end:
            rows = ()
            for i in gl.static_range(TILE // BOX):
                page = gl.sum(gl.where(lane == i, pages, 0), 0)
                rows = rows + (page * source.page_rows + (pos + i * BOX) % PAGE_SIZE,)
            pos += TILE
            pages = load_pages(row, pos + lane * BOX, stop, PAGE_SIZE)
            for i in gl.static_range(4):
                if len(s.raw) == 0:
                    load_quarter(s.ring, source.kv_desc, source.kv_desc, rows, i, n + i, BOX)
                else:
                    load_quarter(s.raw, source.kv_desc, source.rope_desc, rows, i, n + i, BOX)
            n += 4
        seq += 1
        place = next_place


@gluon.jit
def load_quarter(ring, desc, rope_desc, rows, QUARTER_I: gl.constexpr, n, BOX: gl.constexpr):
    """Load a quarter of a tile, the n-th of the ring, when its place is free. The last one brings the rope columns."""
    WIDTH: gl.constexpr = desc.block_shape[1]
    COLUMNS: gl.constexpr = QUARTER + ROPE if QUARTER_I == 3 else QUARTER
    place, use = place_of(ring, n)
    full = ring.full.index(place)
    wait(ring.empty.index(place), use + 1)
    mbarrier.expect(full, TILE * COLUMNS * desc.dtype.primitive_bitwidth // 8)
    for box in gl.static_range(TILE // BOX):
        for i in gl.static_range(QUARTER // WIDTH):
            into = ring.quarters.index(place).slice(i * WIDTH, WIDTH, 1).slice(box * BOX, BOX)
            tma_load(desc, [rows[box], QUARTER_I * QUARTER + i * WIDTH], full, into)
        if QUARTER_I == 3:
            tma_load(rope_desc, [rows[box], 2 * HALF], full, rope_of(ring, n).slice(box * BOX, BOX))


@gluon.jit
def convert_few(s, program, NUM_HEADS: gl.constexpr):
    """Convert the latents of every tile of the partition. One warpgroup runs this."""
    partition = program.partition
    seq, place = partition.seq, partition.first
    n = 0
    while place < partition.high:
        work, next_place = work_of(program.lengths, partition, seq, place, 0, program.causal, NUM_HEADS)
        for _ in range(work.count):
            for i in gl.static_range(4):
                convert_quarter(s, i, n + i)
            n += 4
        seq += 1
        place = next_place


@gluon.jit
def convert_quarter(s, QUARTER_I: gl.constexpr, n):
    """Convert a quarter of a tile, the n-th of both rings."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    raw_place, raw_use = place_of(s.raw, n)
    place, use = place_of(s.ring, n)
    wait(s.raw.full.index(raw_place), raw_use)
    wait(s.ring.empty.index(place), use + 1)
    s.ring.quarters.index(place).store(s.raw.quarters.index(raw_place).load(WIDE).to(s.q.dtype))
    if QUARTER_I == 3:
        rope_of(s.ring, n).store(rope_of(s.raw, n).load(NARROW).to(s.q.dtype))
    fence_async_shared()  # tensor cores read shared memory by the async proxy, stores write by the generic one
    mbarrier.arrive(s.raw.empty.index(raw_place), count=1)
    mbarrier.arrive(s.ring.full.index(place), count=1)


@gluon.jit
def consume_few(s, program, NUM_HEADS: gl.constexpr, PARTIAL_ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Attend to every tile of the partition and write the results. The consumer warpgroup runs this."""
    partition, lengths, outputs = program.partition, program.lengths, program.outputs
    softmax_scale = program.softmax_scale
    if program.scale_ptr is not None:
        softmax_scale *= gl.load(program.scale_ptr)
    seq, place = partition.seq, partition.first
    n = 0
    AHEAD: gl.constexpr = COLUMNS == 16  # with 32 columns, registers hold only the output
    panels = load_queries(program.queries, lengths, seq, place < partition.high, NUM_HEADS, COLUMNS)
    while place < partition.high:
        if not AHEAD:
            panels = load_queries(program.queries, lengths, seq, True, NUM_HEADS, COLUMNS)
        work, next_place = work_of(lengths, partition, seq, place, 0, program.causal, NUM_HEADS)
        scale = store_queries(s, panels, softmax_scale, COLUMNS)
        acc, m_i, l_i = attend(s, work, n, program.causal, scale, NUM_HEADS, COLUMNS)
        seq += 1
        if AHEAD:  # the next sequence's queries are on their way while this one's results are written
            panels = load_queries(program.queries, lengths, seq, next_place < partition.high, NUM_HEADS, COLUMNS)
        if work.count > 0:
            n += 4 * work.count
            if program.scale_ptr is not None:
                acc = scale_columns(acc, gl.full(m_i.shape, gl.load(program.scale_ptr), gl.float32, m_i.type.layout))
            if work.starts & work.ends:
                store_result(acc, m_i, l_i, outputs, work, NUM_HEADS, COLUMNS)
            else:
                slot = (program.index * 2 + work.starts.to(gl.int32)).to(gl.int64)
                store_partial(acc, m_i, l_i, outputs, slot, PARTIAL_ROWS, COLUMNS)
        place = next_place


@gluon.jit
def load_queries(queries, lengths, seq, wanted, NUM_HEADS: gl.constexpr, COLUMNS: gl.constexpr):
    """Load all queries of a sequence, [COLUMNS, 576], in panels. Unless they are wanted, load nothing."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_start, q_len = queries_of(lengths, gl.minimum(seq, lengths.num_seqs - 1))
    rows = gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
    token, head = rows // NUM_HEADS, rows % NUM_HEADS
    owned = (wanted & (token < q_len))[:, None]
    token = (q_start + token).to(gl.int64)
    cols = gl.arange(0, PANEL, gl.SliceLayout(0, LAYOUT))[None, :]
    nope = token * queries.stride_nope_token + head.to(gl.int64) * queries.stride_nope_head
    rope = token * queries.stride_rope_token + head.to(gl.int64) * queries.stride_rope_head
    panels = ()
    for panel in gl.static_range(2 * HALF // PANEL):
        panels = panels + (gl.load(queries.nope + nope[:, None] + (panel * PANEL + cols), mask=owned, other=0.0),)
    return panels + (gl.load(queries.rope + rope[:, None] + cols, mask=owned, other=0.0),)


@gluon.jit
def store_queries(s, panels, softmax_scale, COLUMNS: gl.constexpr):
    """Store the queries to shared memory.

    With fp8 latents, queries become float16. Each row is scaled by a power of two, so that none overflows.

    Returns:
        The factor of scores, or of each column's scores.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    scale = softmax_scale
    if len(s.raw) > 0:
        factor, inverse = scale_of_rows(peaks(panels), 14)
        scale = softmax_scale * gl.convert_layout(inverse, gl.SliceLayout(0, LAYOUT))
        panels = scale_panels(panels, factor, s.q.dtype)
    for panel in gl.static_range(2 * HALF // PANEL):
        s.q.index(panel * PANEL // QUARTER).slice(panel * PANEL % QUARTER, PANEL, 1).store(panels[panel])
    s.q_rope.index(0).store(panels[2 * HALF // PANEL])
    fence_async_shared()
    return scale


@gluon.jit
def attend(s, work, n, causal, scale, NUM_HEADS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the state over the tiles of one sequence: the output in quarters, the maximum, the sum.

    Args:
        n: which quarter of the ring the first one is.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    acc = ()
    for _ in gl.static_range(4):
        acc = acc + (gl.zeros([QUARTER, COLUMNS], gl.float32, LAYOUT),)
    m_i = gl.full([COLUMNS], float("-inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
    sums = gl.zeros([TILE, COLUMNS], gl.float32, LAYOUT)  # of each thread's keys, added up at the end
    pos = work.tile * TILE
    for i in range(work.count):
        acc, m_i, sums = attend_to_tile(s, acc, m_i, sums, work, n + 4 * i, pos, causal, scale, NUM_HEADS, COLUMNS)
        pos += TILE
    return acc, m_i, gl.sum(sums, 0)


@gluon.jit
def attend_to_tile(
    s, acc, m_i, sums, work, n, pos, causal, scale, NUM_HEADS: gl.constexpr, COLUMNS: gl.constexpr
):  # fmt: skip
    """Fold a tile, which begins at position `pos`, into the state; free its quarters when they have been multiplied."""
    LAYOUT: gl.constexpr = sums.type.layout
    ring = s.ring
    zero = (
        n >> 30
    )  # The compiler cannot know that this is 0. So it computes descriptors of queries here and keeps none.
    scores = gl.zeros([TILE, COLUMNS], gl.float32, LAYOUT)
    for i in gl.static_range(4):
        place, use = place_of(ring, n + i)
        wait(ring.full.index(place), use)
        queries = s.q.index(zero + i).permute((1, 0))
        scores = warpgroup_mma(ring.quarters.index(place), queries, scores, use_acc=i > 0, is_async=True)
    scores = warpgroup_mma(rope_of(ring, n), s.q_rope.index(zero).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    scores = mask_scores(scores, pos, work, causal, NUM_HEADS)
    if pos + TILE > work.visible:
        for i in gl.static_range(4):
            zero_invisible_rows(ring.quarters.index(place_of(ring, n + i)[0]), pos, work.visible)
    m_new = gl.maximum(m_i, gl.max(scores, 0) * scale)
    shift = finite(m_new)
    if len(scale.shape) > 0:
        p = gl.exp2(scores * scale[None, :] - shift[None, :])
    else:
        p = gl.exp2(scores * scale - shift[None, :])
    alpha = gl.exp2(m_i - shift)
    sums = sums * alpha[None, :] + p
    s.p.store(p.to(s.p.dtype))
    fence_async_shared()
    acc = scale_columns(acc, alpha)
    products = ()
    for i in gl.static_range(4):
        values = ring.quarters.index(place_of(ring, n + i)[0]).permute((1, 0))
        products = products + (warpgroup_mma(values, s.p, acc[i], is_async=True),)
    acc = ()
    for i in gl.static_range(4):
        acc = acc + (warpgroup_mma_wait(3 - i, deps=[products[i]]),)
        mbarrier.arrive(ring.empty.index(place_of(ring, n + i)[0]), count=1)
    return acc, m_new, sums


@gluon.jit
def mask_scores(scores, pos, work, causal, NUM_HEADS: gl.constexpr):
    """Set scores of invisible keys to -inf, in a tile that begins at position `pos`."""
    LAYOUT: gl.constexpr = scores.type.layout
    if pos + TILE > gl.where(causal, gl.minimum(work.first_pos + 1, work.seq_len), work.seq_len):
        token = gl.arange(0, scores.shape[1], gl.SliceLayout(0, LAYOUT)) // NUM_HEADS
        last = gl.minimum(gl.where(causal, work.first_pos + token, work.seq_len - 1), work.seq_len - 1) - pos
        keys = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
        scores = gl.where(keys[:, None] <= last[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def scale_columns(acc, factor):
    """Multiply each column of all quarters by its factor."""
    scaled = ()
    for i in gl.static_range(4):
        scaled = scaled + (acc[i] * factor[None, :],)
    return scaled


@gluon.jit
def store_result(acc, m_i, l_i, outputs, work, NUM_HEADS: gl.constexpr, COLUMNS: gl.constexpr):
    """Normalise and write the results of a sequence that no partition cuts."""
    LAYOUT: gl.constexpr = acc[0].type.layout
    empty = l_i == 0.0
    safe = gl.where(empty, 1.0, l_i)
    acc = scale_columns(acc, 1.0 / safe)
    element: gl.constexpr = outputs.out.dtype.element_ty
    rows = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    token, head = rows // NUM_HEADS, rows % NUM_HEADS
    offsets = (work.q_start + token).to(gl.int64) * outputs.stride_out_token
    offsets += head.to(gl.int64) * outputs.stride_out_head
    cols = gl.arange(0, QUARTER, gl.SliceLayout(1, LAYOUT))
    for i in gl.static_range(4):
        into = outputs.out + offsets[None, :] + (i * QUARTER + cols)[:, None]
        gl.store(into, acc[i].to(element), mask=(token < work.q_len)[None, :])
    if outputs.lse is not None:
        lse = gl.where(empty, float("-inf"), m_i * LN2 + gl.log(safe))
        offsets = (work.q_start + token).to(gl.int64) * outputs.stride_lse + head
        gl.store(outputs.lse + offsets, lse, mask=token < work.q_len)


@gluon.jit
def store_partial(acc, m_i, l_i, outputs, slot, PARTIAL_ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Write a partial, not normalised."""
    LAYOUT: gl.constexpr = acc[0].type.layout
    rows = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    cols = gl.arange(0, QUARTER, gl.SliceLayout(1, LAYOUT))
    into = outputs.acc + slot * (PARTIAL_ROWS * 2 * HALF) + rows[None, :] * (2 * HALF) + cols[:, None]
    for i in gl.static_range(4):
        gl.store(into + i * QUARTER, acc[i], mask=(rows < PARTIAL_ROWS)[None, :])
    gl.store(outputs.m_i + slot * PARTIAL_ROWS + rows, m_i, mask=rows < PARTIAL_ROWS)
    gl.store(outputs.l_i + slot * PARTIAL_ROWS + rows, l_i, mask=rows < PARTIAL_ROWS)
