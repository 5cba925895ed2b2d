"""The MLA kernel for fp8 latents and row blocks of 64 rows, where a spec allows products in fp8.

Tensor cores multiply the latents as they are stored. There are three warpgroups.

* One computes the scores, queries times keys, and their softmax. It rounds probabilities to fp8.
* Two multiply the probabilities with the values. Each owns half of the values' columns. These are the rows of its
  products, and (token, query head) pairs the columns, as in `few_rows_fp8.py`. So the values are the operand that comes
  from registers, where they are transposed on their way from shared memory. Before a sequence's tiles they have
  registers for its queries: each loads half of the columns, and rounds them to fp8.

What goes from the first to the others is in shared memory: the probabilities of a tile, and the factor by which the
output of each row shrinks since its maximum has grown.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.kernels.gluon.compat import aggregate
from quire.kernels.gluon.fp8 import (
    peaks,
    permute_for_fp8_operand,
    scale_of_rows,
    split_column_pairs,
    to_fp8,
)
from quire.kernels.gluon.pipeline import (
    allocate_barrier,
    allocate_barriers,
    allocate_ready,
    make_each_ready,
    make_ready,
    tell_ready,
    wait,
    wait_ready,
)
from quire.kernels.mla_hopper.columns import scale_columns, store_partial, store_result
from quire.kernels.mla_hopper.fp8_operands import column_pairs, merge_columns
from quire.kernels.mla_hopper.latents import make_latents
from quire.kernels.mla_hopper.many_rows import load_queries
from quire.kernels.mla_hopper.memory import HALF, PANEL, QUARTER, ROPE, ROWS, TILE
from quire.kernels.mla_hopper.program import first_sequence, next_sequence, target_of, work_of
from quire.kernels.mla_hopper.softmax import apply_mask, finite, zero_invisible_rows

PEAK = gl.constexpr(7)  # exponent of the largest number of a row of queries in fp8
LIFT = gl.constexpr(8.0)  # probabilities are scaled by 2^8, so that small ones keep their bits
TILES = gl.constexpr(5)  # in shared memory
HANDED = gl.constexpr(2)  # tiles whose probabilities shared memory holds
OF_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.value, 32]))
OF_OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS.value, 32]))  # [columns, rows]


@aggregate
class Fp8Products:
    """Shared memory and its barriers."""

    q: Any  # [4, ROWS, QUARTER]: quarters of the queries
    q_rope: Any  # [1, ROWS, ROPE]
    peak: Any  # [2, ROWS]: absolute maxima of the queries, over the columns that each of two warpgroups loads
    latents: Any  # Latents in fp8
    p: Any  # [HANDED, ROWS, TILE]: probabilities, whose keys are permuted by `permute_for_fp8_operand`
    alpha: Any  # [HANDED, ROWS]: factor of the output of the tiles before
    maximum: Any  # [1, ROWS]: of the sequence
    total: Any  # [1, ROWS]: sum of exponentials of the sequence
    peak_full: Any  # both warpgroups have stored their `peak`
    q_full: Any  # both warpgroups have stored their half of the queries
    q_empty: Any  # the queries and `peak` have been used
    p_full: Any  # HANDED barriers: probabilities and factor are stored
    p_empty: Any  # HANDED: both warpgroups have multiplied them
    total_full: Any  # maximum and sum are stored
    total_empty: Any  # both warpgroups have read them
    ready: Any  # the other barriers are ready

    @gluon.jit
    def make_ready(self):
        """Make all barriers ready."""
        self.latents.make_ready()
        make_ready(self.p_full, 1)
        make_ready(self.p_empty, 2)
        make_each_ready((self.q_empty, self.total_full), 1)
        make_each_ready((self.peak_full, self.q_full, self.total_empty), 2)
        tell_ready(self.ready)


@gluon.jit
def allocate_products(stored: gl.constexpr, GATHERED: gl.constexpr):
    """Allocate shared memory for latents of type `stored`."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    NARROW: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    return Fp8Products(
        gl.allocate_shared_memory(stored, [4, ROWS, QUARTER], gl.NVMMASharedLayout(128, 8, 2)),
        gl.allocate_shared_memory(stored, [1, ROWS, ROPE], NARROW),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT),
        make_latents(stored, 4 * TILES, 1, GATHERED),
        gl.allocate_shared_memory(stored, [HANDED, ROWS, TILE], NARROW),
        gl.allocate_shared_memory(gl.float32, [HANDED, ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [1, ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [1, ROWS], FLAT),
        allocate_barrier(),
        allocate_barrier(),
        allocate_barrier(),
        allocate_barriers(HANDED),
        allocate_barriers(HANDED),
        allocate_barrier(),
        allocate_barrier(),
        allocate_ready(),
    )


@gluon.jit
def score(s, program):
    """Compute the probabilities of every tile of the partition. One warpgroup runs this."""
    wait_ready(s.ready)
    softmax_scale = program.softmax_scale
    if program.scale_ptr is not None:
        softmax_scale *= gl.load(program.scale_ptr)
    seq, known, first = first_sequence(program, program.row_block)
    tile, works = 0, 0
    while seq <= program.part.last_seq:
        work = work_of(program, seq, known, first, program.row_block)
        wait(s.q_full, works)
        scale = softmax_scale * scale_of_scores(s)
        m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, OF_SCORES))
        l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, OF_SCORES))
        pos = work.tile * TILE
        scores = warpgroup_mma_wait(0, deps=[multiply_keys(s, tile)])
        for _ in range(work.count - 1):
            ahead = multiply_keys(s, tile + 1)  # overlaps the softmax of this tile
            m_i, l_i = hand_over(s, program, work, scores, m_i, l_i, tile, pos, scale)
            scores = warpgroup_mma_wait(0, deps=[ahead])
            tile += 1
            pos += TILE
        mbarrier.arrive(s.q_empty, count=1)
        m_i, l_i = hand_over(s, program, work, scores, m_i, l_i, tile, pos, scale)
        tile += 1
        wait(s.total_empty, works + 1)
        s.maximum.index(0).store(m_i - LIFT)
        s.total.index(0).store(l_i)
        mbarrier.arrive(s.total_full, count=1)
        works += 1
        seq, known, first = next_sequence(program, seq, program.row_block)


@gluon.jit
def scale_of_scores(s):
    """Return the inverse of each row's scale in `store_queries`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, OF_SCORES)
    return scale_of_rows(gl.maximum(s.peak.index(0).load(LAYOUT), s.peak.index(1).load(LAYOUT)), PEAK)[1]


@gluon.jit
def multiply_keys(s, tile):
    """Begin the product of the queries and a tile of keys, each quarter when it has arrived."""
    # The compiler cannot know that this is 0. So it computes descriptors of queries here and keeps none.
    zero = tile >> 30
    scores = gl.zeros([ROWS, TILE], gl.float32, OF_SCORES)
    for i in gl.static_range(4):
        keys = s.latents.quarters.tiles.index(s.latents.quarters.wait(4 * tile + i)).permute((1, 0))
        scores = warpgroup_mma(s.q.index(zero + i), keys, scores, use_acc=i > 0, is_async=True)
    rope = s.latents.rope_of(4 * tile).permute((1, 0))
    return warpgroup_mma(s.q_rope.index(zero), rope, scores, is_async=True)


@gluon.jit
def hand_over(s, program, work, scores, m_i, l_i, tile, pos, scale):
    """Store the probabilities of a tile, which begins at position `pos`, for the warpgroups that multiply them.

    Returns:
        The maximum and the sum of exponentials of the tiles up to this one.
    """
    scores = apply_mask(scores, pos, work, program)
    m_new = gl.maximum(m_i, gl.max(scores, 1) * scale)
    shift = finite(m_new)
    p = gl.exp2(scores * scale[:, None] - (shift - LIFT)[:, None])
    alpha = gl.exp2(m_i - shift)
    stage, use = tile % HANDED, tile // HANDED
    wait(s.p_empty.index(stage), use + 1)
    s.p.index(stage).store(to_fp8(permute_for_fp8_operand(p)))
    s.alpha.index(stage).store(alpha)
    fence_async_shared()
    mbarrier.arrive(s.p_full.index(stage), count=1)
    return m_new, l_i * alpha + gl.sum(p, 1)


@gluon.jit
def sum_values(SIDE: gl.constexpr, s, program):
    """Multiply probabilities with half of the columns of every tile, and write the results. Two warpgroups run this."""
    wait_ready(s.ready)
    row_block = program.row_block
    seq, known, first = first_sequence(program, row_block)
    tile, works = 0, 0
    while seq <= program.part.last_seq:
        # As in `many_rows.py`: the compiler cannot know that this is 0, so it keeps no addresses in registers.
        panels = load_queries(SIDE, program, known, row_block + (seq >> 30))
        work = work_of(program, seq, known, first, row_block)
        target = target_of(program, seq, known, work)
        store_queries(SIDE, s, panels, works)
        acc = ()
        for _ in gl.static_range(4):
            acc = acc + (gl.zeros([QUARTER // 2, ROWS], gl.float32, OF_OUT),)
        pos = work.tile * TILE
        for _ in range(work.count):
            acc = add_tile(SIDE, s, acc, tile, pos, work.visible)
            tile += 1
            pos += TILE
        wait(s.total_full, works)
        m_i = s.maximum.index(0).load(gl.SliceLayout(0, OF_OUT))
        l_i = s.total.index(0).load(gl.SliceLayout(0, OF_OUT)) + target.poison
        mbarrier.arrive(s.total_empty, count=1)
        factor = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, OF_OUT))
        if program.scale_ptr is not None:
            factor *= gl.load(program.scale_ptr)
        whole = work.starts & work.ends
        factor = gl.where(whole, factor / gl.where(l_i == 0.0, 1.0, l_i), factor)
        slot = (row_block * program.num_partitions + program.index) * 2 + work.starts.to(gl.int32)
        for i in gl.static_range(2):
            even, odd = scale_columns((acc[2 * i], acc[2 * i + 1]), factor)
            results = (merge_columns(even, odd),)
            if whole:
                store_result(program, target, row_block * ROWS, results, 2 * SIDE + i, m_i, l_i)
            else:
                store_partial(program, slot.to(gl.int64), results, 2 * SIDE + i, m_i, l_i)
        works += 1
        seq, known, first = next_sequence(program, seq, row_block)


@gluon.jit
def store_queries(SIDE: gl.constexpr, s, panels, works):
    """Store half of a row block of queries to shared memory in fp8; SIDE 0 also the rope columns.

    Each row is scaled by a power of two, so that its absolute maximum is in [2^PEAK, 2^(PEAK + 1)).
    """
    wait(s.q_empty, works + 1)
    peak = peaks(panels)
    s.peak.index(SIDE).store(peak)
    mbarrier.arrive(s.peak_full, count=1)
    wait(s.peak_full, works)
    factor, _ = scale_of_rows(gl.maximum(peak, s.peak.index(1 - SIDE).load(peak.type.layout)), PEAK)
    for i in gl.static_range(len(panels)):
        panel = to_fp8(panels[i].to(gl.float32) * factor[:, None])
        if i < HALF // PANEL:
            quarter = s.q.index(2 * SIDE + i * PANEL // QUARTER)
            quarter.slice(i * PANEL % QUARTER, PANEL, 1).store(panel)
        else:
            s.q_rope.index(0).store(panel)
    fence_async_shared()
    mbarrier.arrive(s.q_full, count=1)


@gluon.jit
def add_tile(SIDE: gl.constexpr, s, acc, tile, pos, visible):
    """Add the products of a tile's values, of which this warpgroup owns two quarters, and its probabilities.

    Tensor cores accumulate fp8 products with about 14 bits, so the products of each tile are added to acc in float32.
    acc is in even and odd columns of each quarter.

    A quarter is freed after a product has taken what was loaded of it. A load that no instruction has waited for may
    read after TMA has overwritten its stage.
    """
    stage, use = tile % HANDED, tile // HANDED
    results = ()
    for i in gl.static_range(2):
        even, odd = value_operands(s, tile, 2 * SIDE + i, pos, visible)
        if i == 0:
            wait(s.p_full.index(stage), use)  # the keys have been multiplied
        even = add_product(s, even, acc[2 * i], stage)
        s.latents.quarters.release(4 * tile + 2 * SIDE + i)
        results = results + (even, add_product(s, odd, acc[2 * i + 1], stage))
    mbarrier.arrive(s.p_empty.index(stage), count=1)
    return results


@gluon.jit
def add_product(s, values, acc, stage):
    """Return alpha * acc, plus the product of values and probabilities.

    The sum is volatile assembly. Otherwise the compiler moves it behind the other products of the tile, and registers
    hold one.
    """
    p = s.p.index(stage).permute((1, 0))
    product = warpgroup_mma(values, p, gl.zeros_like(acc), use_acc=False, is_async=True)
    product = warpgroup_mma_wait(0, deps=[product])
    alpha = s.alpha.index(stage).load(gl.SliceLayout(0, OF_OUT))
    fma: gl.constexpr = "fma.rn.f32 $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(
        fma, "=f,f,f,f", [acc, alpha[None, :], product], dtype=gl.float32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def value_operands(s, tile, QUARTER_I: gl.constexpr, pos, visible):
    """Load a quarter of a tile as two operands, its even and its odd columns.

    The keys are permuted by `permute_for_fp8_operand`. The four of one column that a product takes from a register
    become adjacent elements of a thread first, so that each byte moves once.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OF_OUT, 4)
    stage = s.latents.quarters.wait(4 * tile + QUARTER_I)
    if pos + TILE > visible:
        wait(s.p_full.index(tile % HANDED), tile // HANDED)  # the keys have been multiplied
        zero_invisible_rows(s.latents.quarters.tiles.index(stage), pos, visible)
        fence_async_shared()  # TMA overwrites what was zeroed
    pairs = column_pairs(s.latents.quarters.tiles.index(stage)).permute((1, 0)).load(LAYOUT)
    even, odd = split_column_pairs(gl.convert_layout(permute_for_fp8_operand(pairs), OPERAND))
    return even.to(s.q.dtype, bitcast=True), odd.to(s.q.dtype, bitcast=True)
