"""The consumer of the MLA kernel for row blocks of at most 32 rows, and its shared memory.

A tensor-core instruction of a warpgroup has 64 rows. With 16 query heads, three quarters of them would multiply
nothing. So keys and values are the rows here, and (token, query head) pairs the columns: the scores of a tile are
[64 keys, COLUMNS], and the output is [512, COLUMNS], transposed. One warpgroup holds all of it, and reads half of the
shared memory for a tile that two warpgroups of `many_rows.py` read.

Queries are small here, so there is room for at least two and a half tiles, whose quarters have one pipeline
(`latents.py`).
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.gluon.compat import aggregate
from quire.kernels.gluon.pipeline import allocate_ready, tell_ready, wait_ready
from quire.kernels.mla_hopper.columns import (
    apply_mask,
    load_queries,
    probabilities,
    scale_columns,
    store_partial,
    store_result,
)
from quire.kernels.mla_hopper.latents import make_latents
from quire.kernels.mla_hopper.lists import without_unseen
from quire.kernels.mla_hopper.memory import QUARTER, ROPE, TILE, scales_of
from quire.kernels.mla_hopper.program import first_sequence, next_sequence, slot_of, target_of, work_of
from quire.kernels.mla_hopper.softmax import finite, zero_invisible_rows


@aggregate
class FewShared:
    """Shared memory."""

    q: Any  # [4, COLUMNS, QUARTER]: quarters of the queries
    q_rope: Any  # [1, COLUMNS, ROPE]
    p: Any  # [1, TILE, COLUMNS]: probabilities; of records, 4 of them, with the scales of the quarters
    latents: Any  # Latents
    ready: Any  # the barriers are ready

    @gluon.jit
    def make_ready(self):
        """Make all barriers ready."""
        self.latents.make_ready()
        tell_ready(self.ready)


@gluon.constexpr_function
def stages_of(columns, converted):
    """Return the quarters of tiles for which there is room."""
    if converted:
        return 10 if columns == 16 else 8
    return 11 if columns == 16 else 10


@gluon.jit
def allocate_few(
    element: gl.constexpr, COLUMNS: gl.constexpr, GATHERED: gl.constexpr, LISTS: gl.constexpr = False,
    CONVERTED: gl.constexpr = False,
):  # fmt: skip
    """Allocate shared memory for operands of type `element`. GATHERED, LISTS, CONVERTED: as for `make_latents`."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return FewShared(
        gl.allocate_shared_memory(element, [4, COLUMNS, QUARTER], WIDE),
        gl.allocate_shared_memory(element, [1, COLUMNS, ROPE], WIDE),
        gl.allocate_shared_memory(
            element, [4 if CONVERTED else 1, TILE, COLUMNS], gl.NVMMASharedLayout(2 * COLUMNS, 16, 2)
        ),
        make_latents(element, stages_of(COLUMNS, CONVERTED), 1, GATHERED, LISTS, CONVERTED),
        allocate_ready(),
    )


@gluon.jit
def consume_few(s, program):
    """Attend to every tile of the partition and write the results. The consumer warpgroup runs this."""
    wait_ready(s.ready)
    last_seq = program.part.last_seq
    seq, known, first = first_sequence(program, program.row_block)
    n = 0
    AHEAD: gl.constexpr = program.config.COLUMNS == 16  # with 32 columns, registers hold only the output
    quarters = load_queries(program, known, seq <= last_seq, 0, 3, True)
    while seq <= last_seq:
        if not AHEAD:
            quarters = load_queries(program, known, True, 0, 3, True)
        work = work_of(program, seq, known, first, program.row_block)
        target = target_of(program, seq, known, work)
        store_queries(s, quarters)
        acc, m_i, l_i = attend(s, program, work, n)
        n += 4 * work.count
        l_i += target.poison
        finished = seq
        seq, known, first = next_sequence(program, seq, program.row_block)
        if AHEAD:  # the next sequence's queries are on their way while this one's results are written
            quarters = load_queries(program, known, seq <= last_seq, 0, 3, True)
        if work.starts & work.ends:
            acc = scale_columns(acc, 1.0 / gl.where(l_i == 0.0, 1.0, l_i))
            store_result(program, target, program.row_block * program.config.COLUMNS, acc, 0, m_i, l_i)
        else:
            store_partial(program, slot_of(program, finished, work, program.row_block), acc, 0, m_i, l_i)


@gluon.jit
def store_queries(s, quarters):
    """Store the queries to shared memory."""
    for i in gl.static_range(4):
        s.q.index(i).store(quarters[i])
    s.q_rope.index(0).store(quarters[4])
    fence_async_shared()


@gluon.jit
def attend(s, program, work, n):
    """Return the state over the tiles of one sequence: the output in quarters, the maximum, the sum.

    Args:
        n: which use of the pipeline the first quarter is.
    """
    COLUMNS: gl.constexpr = program.config.COLUMNS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    acc = ()
    for _ in gl.static_range(4):
        acc = acc + (gl.zeros([QUARTER, COLUMNS], gl.float32, LAYOUT),)
    m_i = gl.full([COLUMNS], float("-inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
    sums = gl.zeros([TILE, COLUMNS], gl.float32, LAYOUT)  # of each thread's keys, added up at the end
    pos = work.tile * TILE
    for i in range(work.count):
        acc, m_i, sums = attend_to_tile(s, program, work, acc, m_i, sums, n + 4 * i, pos)
        pos += TILE
    return acc, m_i, gl.sum(sums, 0)


@gluon.jit
def attend_to_tile(s, program, work, acc, m_i, sums, n, pos):
    """Fold a tile, which begins at position `pos`, into the state; free its quarters when they have been multiplied."""
    LAYOUT: gl.constexpr = sums.type.layout
    COLUMNS: gl.constexpr = sums.shape[1]
    latents, scale = s.latents, program.softmax_scale
    # The compiler cannot know that this is 0. So it computes descriptors of queries here and keeps none.
    zero = n >> 30
    scales = ()
    if len(latents.scales) > 0:
        scores, scales = multiply_records(s, n, zero, LAYOUT)
    else:
        scores = gl.zeros([TILE, COLUMNS], gl.float32, LAYOUT)
        for i in gl.static_range(4):
            stage = latents.quarters.wait(n + i)
            queries = s.q.index(zero + i).permute((1, 0))
            scores = warpgroup_mma(latents.quarters.tiles.index(stage), queries, scores, use_acc=i > 0, is_async=True)
        scores = warpgroup_mma(latents.rope_of(n), s.q_rope.index(zero).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
    if program.config.LISTS:
        scores = without_unseen(scores, latents.seen[0], latents.place_of(n), latents.phase_of(n), 0, program.config)
    else:
        scores = apply_mask(scores, pos, work, program)
        if pos + TILE > work.visible:
            for i in gl.static_range(4):
                zero_invisible_rows(latents.quarters.tiles.index(latents.quarters.stage_of(n + i)), pos, work.visible)
    m_new = gl.maximum(m_i, gl.max(scores, 0) * scale)
    shift = finite(m_new)
    p = probabilities(scores, scale, shift)
    alpha = gl.exp2(m_i - shift)
    sums = sums * alpha[None, :] + p
    if len(scales) > 0:
        for i in gl.static_range(4):
            s.p.index(i).store((p * scales[i][:, None]).to(s.p.dtype))
    else:
        s.p.index(0).store(p.to(s.p.dtype))
    fence_async_shared()
    acc = scale_columns(acc, alpha)
    products = ()
    for i in gl.static_range(4):
        values = latents.quarters.tiles.index(latents.quarters.stage_of(n + i)).permute((1, 0))
        weights = s.p.index(i if len(scales) > 0 else 0)
        products = products + (warpgroup_mma(values, weights, acc[i], is_async=True),)
    acc = ()
    for i in gl.static_range(4):
        acc = acc + (warpgroup_mma_wait(3 - i, deps=[products[i]]),)
        latents.quarters.release(n + i)
    return acc, m_new, sums


@gluon.jit
def multiply_records(s, n, zero, LAYOUT: gl.constexpr):
    """Return the products of a tile's keys with the queries, and the scales of each quarter of a key.

    The scales are those of products, whose operands are exact.
    """
    COLUMNS: gl.constexpr = s.q.shape[1]
    latents = s.latents
    of_tile = latents.scales[0].index(latents.place_of(n))
    products, scales = (), ()
    for i in gl.static_range(4):
        keys = latents.quarters.tiles.index(latents.quarters.wait(n + i))
        queries, nothing = s.q.index(zero + i).permute((1, 0)), gl.zeros([TILE, COLUMNS], gl.float32, LAYOUT)
        scale = scales_of(of_tile, i).load(gl.SliceLayout(1, LAYOUT))
        product = warpgroup_mma(keys, queries, nothing, use_acc=False, is_async=True)
        if COLUMNS == 32:  # registers have no room for all products
            product = warpgroup_mma_wait(0, deps=[product]) * scale[:, None]
            products = (product if i == 0 else products[0] + product,)
        else:
            products = products + (product,)
        scales = scales + (scale,)
    scores = gl.zeros([TILE, COLUMNS], gl.float32, LAYOUT)
    queries = s.q_rope.index(zero).permute((1, 0))
    scores = warpgroup_mma(latents.rope_of(n), queries, scores, use_acc=False, is_async=True)
    if COLUMNS == 32:
        scores = warpgroup_mma_wait(0, deps=[scores]) + products[0]
    else:
        finished = warpgroup_mma_wait(0, deps=(scores,) + products)
        scores = finished[0]
        for i in gl.static_range(4):
            scores += finished[1 + i] * scales[i][:, None]
    return scores, scales
