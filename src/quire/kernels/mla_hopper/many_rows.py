"""The consumers of the MLA kernel for row blocks of 64 rows: two warpgroups that share scores and output.

The output of 64 rows, 64 x 512 float32, fills half of an SM's registers. So two consumer warpgroups hold half of the
columns each. They share the scores as well: the even warpgroup computes those of tiles 0, 2, 4 and so on, the odd
warpgroup those of tiles 1, 3, 5. Each multiplies its probabilities with its half of the values. It hands them to the
other warpgroup through shared memory, and multiplies those that the other hands over. So the tensor cores work for one
warpgroup while the other computes its softmax. The division of columns and tiles is that of FlashMLA's "seesaw"
schedule. Here both warpgroups take the tiles in order, so that the even tile's stages are free while the odd tile is
multiplied.

When the rope columns of a tile have been multiplied, the tile's probabilities take their place in shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.gluon.compat import reinterpret
from quire.kernels.gluon.fp8 import peaks, scale_of_rows, scale_panels
from quire.kernels.gluon.pipeline import wait, wait_ready
from quire.kernels.gluon.softmax import lse_of_rows
from quire.kernels.mla_hopper.lists import without_unseen
from quire.kernels.mla_hopper.memory import EVEN, HALF, ODD, ORDER, PANEL, QUARTER, ROWS, TILE
from quire.kernels.mla_hopper.program import first_sequence, next_sequence, slot_of, target_of, work_of
from quire.kernels.mla_hopper.rescale import raised, rescaled
from quire.kernels.mla_hopper.softmax import apply_mask, finite, zero_invisible_rows


@gluon.jit
def consume_many(PARITY: gl.constexpr, s, program):
    """Attend to every tile of the partition and write the results. Each consumer warpgroup runs this."""
    wait_ready(s.ready)
    row_block = program.row_block
    scale_ptr, softmax_scale = program.scale_ptr, program.softmax_scale
    if scale_ptr is not None:
        softmax_scale *= gl.load(scale_ptr)
    seq, known, first = first_sequence(program, row_block)
    uses, odd_uses, works = 0, 0, 0
    while seq <= program.part.last_seq:
        # The compiler cannot know that this is 0. So it computes addresses here and keeps none of them in registers,
        # of which the loop over tiles has none to spare.
        zero = seq >> 30
        panels = load_queries(PARITY, program, known, row_block + zero)
        work = work_of(program, seq, known, first, row_block)
        target = target_of(program, seq, known, work)
        scale = store_queries(PARITY, s, panels, works, softmax_scale)
        if PARITY == EVEN:
            acc, m_i, l_i = attend_even(s, program, work, uses, odd_uses, scale)
        else:
            acc, m_i, l_i = attend_odd(s, program, work, uses, odd_uses, scale)
        uses += (work.count + 1) // 2
        odd_uses += work.count // 2
        s.total.index(PARITY).store(l_i)
        mbarrier.arrive(s.total_full, count=1)
        wait(s.total_full, works)
        l_i += s.total.index(1 - PARITY).load(l_i.type.layout) + target.poison
        if scale_ptr is not None:
            acc = scale_rows(acc, gl.full(m_i.shape, gl.load(scale_ptr), gl.float32, m_i.type.layout))
        if work.starts & work.ends:
            store_result(PARITY, s, program, target, row_block + zero, acc, m_i, l_i)
        else:
            slot = slot_of(program, seq, work, row_block + zero)
            store_partial(PARITY, program, slot, acc, m_i, l_i)
        works += 1
        seq, known, first = next_sequence(program, seq, row_block)


@gluon.jit
def load_queries(PARITY: gl.constexpr, program, known, row_block):
    """Load half of the columns of a row block of queries, in panels. The even warpgroup also loads the rope columns."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    NUM_HEADS: gl.constexpr = program.config.NUM_HEADS
    queries = program.queries
    rows = row_block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token, head = rows // NUM_HEADS, rows % NUM_HEADS
    owned = ((token < known.q_len) & (known.q_start + token < queries.num_tokens))[:, None]
    token = (known.q_start + token).to(gl.int64)
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
def store_queries(PARITY: gl.constexpr, s, panels, works, softmax_scale):
    """Store the queries to shared memory, and wait for the other warpgroup's.

    With fp8 latents, queries become float16. Each row is scaled by a power of two, so that none overflows.

    Returns:
        The factor of scores, or of each row's scores.
    """
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    wait(s.q_empty, works + 1)
    scale = softmax_scale
    if len(s.peak_full) > 0:
        peak = peaks(panels)
        s.maximum.index(PARITY).store(peak)
        mbarrier.arrive(s.peak_full[0], count=1)
        wait(s.peak_full[0], works)
        peak = gl.maximum(peak, s.maximum.index(1 - PARITY).load(peak.type.layout))
        factor, inverse = scale_of_rows(peak, 14)
        scale = softmax_scale * gl.convert_layout(inverse, gl.SliceLayout(1, OF_SCORES))
        panels = scale_panels(panels, factor, s.q.dtype)
    for panel in gl.static_range(HALF // PANEL):
        quarter = s.q.index(PARITY * 2 + panel * PANEL // QUARTER)
        quarter.slice(panel * PANEL % QUARTER, PANEL, 1).store(panels[panel])
    if PARITY == EVEN:
        s.q_rope.index(0).store(panels[HALF // PANEL])
    fence_async_shared()
    mbarrier.arrive(s.q_full, count=1)
    wait(s.q_full, works)
    return scale


@gluon.jit
def multiply_keys(PARITY: gl.constexpr, s, program, use, zero):
    """Return the products of the queries with this warpgroup's next tile of keys."""
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    COPIED: gl.constexpr = program.config.BOX == 0 and len(s.raw_full) == 0
    scores = gl.zeros([ROWS, TILE], gl.float32, OF_SCORES)
    for i in gl.static_range(4):
        wait(s.full[PARITY * 4 + ORDER[PARITY][i]], use)
        if COPIED:
            fence_async_shared()  # rows were copied by the generic proxy
        keys = s.kv.index(zero + PARITY * 4 + ORDER[PARITY][i]).permute((1, 0))
        scores = warpgroup_mma(s.q.index(zero + ORDER[PARITY][i]), keys, scores, use_acc=i > 0, is_async=True)
    rope = s.kv_rope.index(zero + PARITY).permute((1, 0))
    scores = warpgroup_mma(s.q_rope.index(zero), rope, scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def multiply_values(SIDE: gl.constexpr, PARITY: gl.constexpr, s, p, acc, zero):
    """Begin to multiply probabilities with the columns of a tile that warpgroup SIDE owns."""
    left, right = acc
    left = warpgroup_mma(p, s.kv.index(zero + PARITY * 4 + SIDE * 2), left, is_async=True)
    right = warpgroup_mma(p, s.kv.index(zero + PARITY * 4 + SIDE * 2 + 1), right, is_async=True)
    return left, right


@gluon.jit
def finish_values(SIDE: gl.constexpr, PARITY: gl.constexpr, s, acc):
    """Wait for what `multiply_values` began, and free each quarter when it has been multiplied."""
    return finish_right(SIDE, PARITY, s, finish_left(SIDE, PARITY, s, acc))


@gluon.jit
def finish_left(SIDE: gl.constexpr, PARITY: gl.constexpr, s, acc):
    """Wait for the left quarter of what `multiply_values` began, and free it."""
    left, right = acc
    left = warpgroup_mma_wait(1, deps=[left])
    mbarrier.arrive(s.empty[PARITY * 4 + SIDE * 2], count=1)
    return left, right


@gluon.jit
def finish_right(SIDE: gl.constexpr, PARITY: gl.constexpr, s, acc):
    """Wait for the right quarter, and free it."""
    left, right = acc
    right = warpgroup_mma_wait(0, deps=[right])
    mbarrier.arrive(s.empty[PARITY * 4 + SIDE * 2 + 1], count=1)
    return left, right


@gluon.jit
def without_invisible(PARITY: gl.constexpr, s, program, work, scores, use, zero, pos):
    """Set scores of invisible keys to -inf, in a tile that begins at position `pos`.

    The values of keys that no query of the row block sees become zeros, which those of lists already are.
    """
    if program.config.LISTS:
        scores = without_unseen(scores, s.seen[0], PARITY, use, 1, program.config)
    else:
        scores = apply_mask(scores, pos, work, program)
        if pos + TILE > work.visible:
            for i in gl.static_range(4):
                zero_invisible_rows(s.kv.index(zero + PARITY * 4 + i), pos, work.visible)
    return scores


@gluon.jit
def probabilities(scores, scale, m_i):
    """Return exponentials of the scores, relative to the maximum of their row; `scale` is a number or one per row."""
    if len(scale.shape) > 0:
        return gl.exp2(scores * scale[:, None] - finite(m_i)[:, None])
    else:
        return gl.exp2(scores * scale - finite(m_i)[:, None])


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
def attend_even(s, program, work, use, odd_use, scale):
    """Return the state of the left columns; the sum is that of the even tiles."""
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OF_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 16])
    acc, m_i, l_i = empty_state(OF_SCORES, OF_OUT)
    pos = work.tile * TILE
    for i in range(work.count // 2):
        zero = (use + i) >> 30
        acc, m_even, l_i = attend_to_own_even_tile(s, program, work, acc, m_i, l_i, use + i, pos, zero, scale, OF_OUT)
        acc = finish_values(EVEN, EVEN, s, acc)
        wait(s.p_full[ODD], odd_use + i)
        m_i = s.maximum.index(ODD).load(gl.SliceLayout(1, OF_SCORES))
        beta = gl.exp2(m_even - finite(m_i))
        l_i *= beta
        acc = multiply_values(EVEN, ODD, s, s.kv_rope.index(zero + ODD), rescaled(acc, beta), zero)
        acc = finish_values(EVEN, ODD, s, acc)
        pos += 2 * TILE
    if work.count % 2 > 0:  # the last tile is even
        zero = (use + work.count) >> 30
        acc, m_i, l_i = attend_to_own_even_tile(
            s, program, work, acc, m_i, l_i, use + work.count // 2, pos, zero, scale, OF_OUT
        )
        acc = finish_values(EVEN, EVEN, s, acc)
    mbarrier.arrive(s.q_empty, count=1)
    return acc, m_i, l_i


@gluon.jit
def attend_to_own_even_tile(s, program, work, acc, m_i, l_i, use, pos, zero, scale, OF_OUT: gl.constexpr):
    """Compute the probabilities of an even tile, hand them over, and begin to multiply them with the left columns."""
    scores = multiply_keys(EVEN, s, program, use, zero)
    scores = without_invisible(EVEN, s, program, work, scores, use, zero, pos)
    m_even = raised(m_i, gl.max(scores, 1) * scale)
    p = probabilities(scores, scale, m_even)
    hand_over(EVEN, s, p, m_even)
    alpha = gl.exp2(m_i - finite(m_even))
    l_i = l_i * alpha + gl.sum(p, 1)
    own = gl.convert_layout(p.to(s.q.dtype), gl.DotOperandLayout(0, OF_OUT, 2))
    return multiply_values(EVEN, EVEN, s, own, rescaled(acc, alpha), zero), m_even, l_i


@gluon.jit
def attend_odd(s, program, work, use, odd_use, scale):
    """Return the state of the right columns; the sum is that of the odd tiles."""
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OF_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 16])
    acc, m_i, l_i = empty_state(OF_SCORES, OF_OUT)
    pos = work.tile * TILE
    for i in range(work.count // 2):
        zero = (use + i) >> 30
        scores = multiply_keys(ODD, s, program, odd_use + i, zero)
        scores = without_invisible(ODD, s, program, work, scores, odd_use + i, zero, pos + TILE)
        highest = gl.max(scores, 1) * scale
        # The softmax of this tile overlaps the product of the even one.
        acc, m_even, alpha = attend_to_even_tile(acc, m_i, s, use + i, zero, OF_SCORES)
        m_i = raised(m_even, highest)
        p = probabilities(scores, scale, m_i)
        acc = finish_left(ODD, EVEN, s, acc)
        hand_over(ODD, s, p, m_i)
        acc = finish_right(ODD, EVEN, s, acc)
        beta = gl.exp2(m_even - finite(m_i))
        l_i = l_i * (alpha * beta) + gl.sum(p, 1)
        own = gl.convert_layout(p.to(s.q.dtype), gl.DotOperandLayout(0, OF_OUT, 2))
        acc = multiply_values(ODD, ODD, s, own, rescaled(acc, beta), zero)
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
    acc = multiply_values(ODD, EVEN, s, s.kv_rope.index(zero + EVEN), rescaled(acc, alpha), zero)
    return acc, m_even, alpha


@gluon.jit
def store_result(PARITY: gl.constexpr, s, program, target, row_block, acc, m_i, l_i):
    """Normalise and write this warpgroup's columns.

    They are staged in the place of its queries, which both warpgroups have multiplied: whole rows reach memory faster
    than the fragments of an accumulator.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    NUM_HEADS: gl.constexpr = program.config.NUM_HEADS
    outputs = program.outputs
    empty = l_i == 0.0
    safe = gl.where(empty, 1.0, l_i)
    quarters = scale_rows(acc, 1.0 / safe)
    element: gl.constexpr = outputs.out.dtype.element_ty
    for i in gl.static_range(2):
        place = s.q.index(PARITY * 2 + i)
        reinterpret(place, element, place.shape, place.layout).store(quarters[i].to(element))
    for i in gl.static_range(2):
        cols = PARITY * HALF + i * QUARTER + gl.arange(0, QUARTER, gl.SliceLayout(0, LAYOUT))[None, :]
        for first in gl.static_range(0, ROWS, 32):
            rows = row_block * ROWS + first + gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
            token = rows // NUM_HEADS
            offsets = (target.q_start + token).to(gl.int64) * outputs.stride_out_token
            offsets += (rows % NUM_HEADS).to(gl.int64) * outputs.stride_out_head
            place = s.q.index(PARITY * 2 + i)
            values = reinterpret(place, element, place.shape, place.layout).slice(first, 32).load(LAYOUT)
            gl.store(outputs.out + offsets[:, None] + cols, values, mask=(token < target.q_len)[:, None])
    if PARITY == EVEN:
        if outputs.lse is not None:
            rows = row_block * ROWS + gl.arange(0, ROWS, l_i.type.layout)
            token = rows // NUM_HEADS
            lse = lse_of_rows(m_i, l_i)
            offsets = (target.q_start + token).to(gl.int64) * outputs.stride_lse + rows % NUM_HEADS
            gl.store(outputs.lse + offsets, lse, mask=token < target.q_len)


@gluon.jit
def store_partial(PARITY: gl.constexpr, program, slot, acc, m_i, l_i):
    """Write this warpgroup's columns of a partial, not normalised."""
    OF_OUT: gl.constexpr = acc[0].type.layout
    PARTIAL_ROWS: gl.constexpr = program.config.PARTIAL_ROWS
    outputs = program.outputs
    if outputs.acc is not None:
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, OF_OUT))
        cols = PARITY * HALF + gl.arange(0, QUARTER, gl.SliceLayout(0, OF_OUT))[None, :]
        into = outputs.acc + slot * (PARTIAL_ROWS * 2 * HALF) + rows[:, None] * (2 * HALF) + cols
        for i in gl.static_range(2):
            gl.store(into + i * QUARTER, acc[i], mask=(rows < PARTIAL_ROWS)[:, None])
        if PARITY == EVEN:
            rows = gl.arange(0, ROWS, l_i.type.layout)
            gl.store(outputs.m_i + slot * PARTIAL_ROWS + rows, m_i, mask=rows < PARTIAL_ROWS)
            gl.store(outputs.l_i + slot * PARTIAL_ROWS + rows, l_i, mask=rows < PARTIAL_ROWS)
