"""The consumer of the MLA kernel for row blocks of at most 32 rows.

A tensor-core instruction of a warpgroup has 64 rows. With 16 query heads, three quarters of them would multiply
nothing. So keys and values are the rows here, and (token, query head) pairs the columns: the scores of a tile are
[64 keys, COLUMNS], and the output is [512, COLUMNS], transposed. One warpgroup holds all of it, and reads half of the
shared memory for a tile that two warpgroups of `kernel.py` read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.hopper.convert import scale_of_rows
from quire.kernels.mla_hopper.memory import EVEN, HALF, ODD, ORDER, PANEL, QUARTER, wait
from quire.kernels.mla_hopper.schedule import TILE, queries_of, work_of
from quire.kernels.mla_hopper.softmax import finite, zero_invisible_rows
from quire.kernels.primitives import LN2


@gluon.jit
def consume_few(s, program, NUM_HEADS: gl.constexpr, PARTIAL_ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Attend to every tile of the partition and write the results. The consumer warpgroup runs this."""
    partition, lengths, outputs = program.partition, program.lengths, program.outputs
    softmax_scale = program.softmax_scale
    if program.scale_ptr is not None:
        softmax_scale *= gl.load(program.scale_ptr)
    seq, place = partition.seq, partition.first
    uses, odd_uses = 0, 0
    while place < partition.high:
        panels = load_queries(program.queries, lengths, seq, NUM_HEADS, COLUMNS)
        work, next_place = work_of(lengths, partition, seq, place, 0, program.causal, NUM_HEADS)
        if work.count > 0:
            scale = store_queries(s, panels, softmax_scale, COLUMNS)
            acc, m_i, l_i = attend(s, work, uses, odd_uses, program.causal, scale, NUM_HEADS, COLUMNS)
            uses += (work.count + 1) // 2
            odd_uses += work.count // 2
            if program.scale_ptr is not None:
                acc = scale_columns(acc, gl.full(m_i.shape, gl.load(program.scale_ptr), gl.float32, m_i.type.layout))
            if work.starts & work.ends:
                store_result(acc, m_i, l_i, outputs, work, NUM_HEADS, COLUMNS)
            else:
                slot = (program.index * 2 + work.starts.to(gl.int32)).to(gl.int64)
                store_partial(acc, m_i, l_i, outputs, slot, PARTIAL_ROWS, COLUMNS)
        seq += 1
        place = next_place


@gluon.jit
def load_queries(queries, lengths, seq, NUM_HEADS: gl.constexpr, COLUMNS: gl.constexpr):
    """Load all queries of a sequence, [COLUMNS, 576], in panels."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    q_start, q_len = queries_of(lengths, seq)
    rows = gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
    token, head = rows // NUM_HEADS, rows % NUM_HEADS
    owned = (token < q_len)[:, None]
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
    if len(s.raw_full) > 0:
        peak = gl.max(gl.abs(panels[0].to(gl.float32)), 1)
        for i in gl.static_range(1, len(panels)):
            peak = gl.maximum(peak, gl.max(gl.abs(panels[i].to(gl.float32)), 1))
        factor, inverse = scale_of_rows(peak, 14)
        scale = softmax_scale * gl.convert_layout(inverse, gl.SliceLayout(0, LAYOUT))
        scaled = ()
        for i in gl.static_range(len(panels)):
            scaled = scaled + ((panels[i].to(gl.float32) * factor[:, None]).to(s.q.dtype),)
        panels = scaled
    for panel in gl.static_range(2 * HALF // PANEL):
        s.q.index(panel * PANEL // QUARTER).slice(panel * PANEL % QUARTER, PANEL, 1).store(panels[panel])
    s.q_rope.index(0).store(panels[2 * HALF // PANEL])
    fence_async_shared()
    return scale


@gluon.jit
def attend(s, work, use, odd_use, causal, scale, NUM_HEADS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return the state over the tiles of one sequence: the output in quarters, the maximum, the sum."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    acc = ()
    for _ in gl.static_range(4):
        acc = acc + (gl.zeros([QUARTER, COLUMNS], gl.float32, LAYOUT),)
    m_i = gl.full([COLUMNS], float("-inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
    sums = gl.zeros([TILE, COLUMNS], gl.float32, LAYOUT)  # of each thread's keys, added up at the end
    pos = work.tile * TILE
    for i in range(work.count // 2):
        acc, m_i, sums = attend_to_tile(EVEN, s, acc, m_i, sums, work, use + i, pos, causal, scale, NUM_HEADS, COLUMNS)
        acc, m_i, sums = attend_to_tile(
            ODD, s, acc, m_i, sums, work, odd_use + i, pos + TILE, causal, scale, NUM_HEADS, COLUMNS
        )
        pos += 2 * TILE
    if work.count % 2 > 0:
        last = use + work.count // 2
        acc, m_i, sums = attend_to_tile(EVEN, s, acc, m_i, sums, work, last, pos, causal, scale, NUM_HEADS, COLUMNS)
    return acc, m_i, gl.sum(sums, 0)


@gluon.jit
def attend_to_tile(
    PARITY: gl.constexpr, s, acc, m_i, sums, work, use, pos, causal, scale, NUM_HEADS: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Fold a tile, which begins at position `pos`, into the state; free its quarters when they have been multiplied."""
    LAYOUT: gl.constexpr = sums.type.layout
    # The compiler cannot know that this is 0. So it computes descriptors of shared memory here and keeps none.
    zero = use >> 30
    scores = gl.zeros([TILE, COLUMNS], gl.float32, LAYOUT)
    for i in gl.static_range(4):
        wait(s.full[PARITY * 4 + ORDER[PARITY][i]], use)
        keys = s.kv.index(zero + PARITY * 4 + ORDER[PARITY][i])
        queries = s.q.index(zero + ORDER[PARITY][i]).permute((1, 0))
        scores = warpgroup_mma(keys, queries, scores, use_acc=i > 0, is_async=True)
    scores = warpgroup_mma(s.kv_rope.index(zero + PARITY), s.q_rope.index(zero).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    scores = mask_scores(scores, pos, work, causal, NUM_HEADS)
    zero_invisible_rows(PARITY, s, zero, pos, work.visible)
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
        values = s.kv.index(zero + PARITY * 4 + ORDER[PARITY][i]).permute((1, 0))
        products = products + (warpgroup_mma(values, s.p, acc[ORDER[PARITY][i]], is_async=True),)
    acc = ()
    for i in gl.static_range(4):
        acc = acc + (warpgroup_mma_wait(3 - i, deps=[products[i]]),)
        mbarrier.arrive(s.empty[PARITY * 4 + ORDER[PARITY][i]], count=1)
    return in_order(PARITY, acc), m_new, sums


@gluon.jit
def in_order(PARITY: gl.constexpr, acc):
    """Return quarters in the order of their columns, from the order in which they were multiplied."""
    if PARITY == EVEN:
        return acc
    else:
        return acc[1], acc[3], acc[0], acc[2]


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
