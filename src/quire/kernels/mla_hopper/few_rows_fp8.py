"""The consumers of the MLA kernel for fp8 latents and row blocks of at most 32 rows.

Tensor cores take a tile of latents from registers, where it has just become float16 (`fp8_operands.py`). Such an
operand has 64 rows. So keys and values are the rows of all products here, and (token, query head) pairs their columns,
as in `few_rows.py`.

A warpgroup that converts a tile, multiplies it and computes its softmax leaves the tensor cores idle half of the time.
So there are two: the even warpgroup attends to tiles 0, 2, 4 and so on of a sequence, the odd warpgroup to tiles 1, 3,
5. At the end of the sequence each hands half of its output to the other, merges the other half and writes it.
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
from quire.kernels.gluon.fp8 import peaks, scale_of_rows, scale_panels
from quire.kernels.gluon.pipeline import allocate_barrier, allocate_ready, make_each_ready, tell_ready, wait, wait_ready
from quire.kernels.mla_hopper.columns import (
    apply_mask,
    load_queries,
    probabilities,
    scale_columns,
    store_partial,
    store_result,
)
from quire.kernels.mla_hopper.fp8_operands import key_operands, merge_columns, query_operands, value_operands
from quire.kernels.mla_hopper.latents import make_latents
from quire.kernels.mla_hopper.memory import EVEN, QUARTER, ROPE, TILE
from quire.kernels.mla_hopper.program import first_sequence, next_sequence, slot_of, target_of, work_of
from quire.kernels.mla_hopper.softmax import finite, zero_invisible_rows


@aggregate
class Fp8Shared:
    """Shared memory and its barriers."""

    q: Any  # [8, COLUMNS, QUARTER / 2]: two operands for each quarter of the queries
    q_rope: Any  # [2, COLUMNS, ROPE / 2]: two operands
    p: Any  # [2, TILE, COLUMNS]: probabilities of each warpgroup's tile
    latents: Any  # Latents in fp8
    peak: Any  # [2, COLUMNS]: absolute maximum of the queries, of the columns that each warpgroup loads
    output: Any  # [8, QUARTER / 2, COLUMNS]: what the other warpgroup merges; even and odd columns of each quarter
    maximum: Any  # [2, COLUMNS]: of each warpgroup's tiles
    total: Any  # [2, COLUMNS]: sum of exponentials of each warpgroup's tiles
    peak_full: Any  # both warpgroups have stored their `peak`
    q_full: Any  # both warpgroups have stored their quarters of the queries
    q_empty: Any  # both warpgroups have multiplied the queries
    output_full: Any  # both warpgroups have stored their output, maximum and total
    output_empty: Any  # both warpgroups have read the other's
    ready: Any  # the other barriers are ready

    @gluon.jit
    def make_ready(self):
        """Make all barriers ready."""
        self.latents.make_ready()
        make_each_ready((self.peak_full, self.q_full, self.q_empty, self.output_full, self.output_empty), 2)
        tell_ready(self.ready)


@gluon.jit
def allocate_fp8(stored: gl.constexpr, COLUMNS: gl.constexpr, GATHERED: gl.constexpr):
    """Allocate shared memory for latents of type `stored`. GATHERED: as for `make_latents`."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Fp8Shared(
        gl.allocate_shared_memory(gl.float16, [8, COLUMNS, QUARTER // 2], gl.NVMMASharedLayout(128, 16, 2)),
        gl.allocate_shared_memory(gl.float16, [2, COLUMNS, ROPE // 2], gl.NVMMASharedLayout(64, 16, 2)),
        gl.allocate_shared_memory(gl.float16, [2, TILE, COLUMNS], gl.NVMMASharedLayout(2 * COLUMNS, 16, 2)),
        make_latents(stored, 16 if COLUMNS == 16 else 12, 2, GATHERED),
        gl.allocate_shared_memory(gl.float32, [2, COLUMNS], FLAT),
        gl.allocate_shared_memory(gl.float32, [8, QUARTER // 2, COLUMNS], gl.NVMMASharedLayout(4 * COLUMNS, 32, 2)),
        gl.allocate_shared_memory(gl.float32, [2, COLUMNS], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, COLUMNS], FLAT),
        allocate_barrier(),
        allocate_barrier(),
        allocate_barrier(),
        allocate_barrier(),
        allocate_barrier(),
        allocate_ready(),
    )


@gluon.jit
def consume_fp8(PARITY: gl.constexpr, s, program):
    """Attend to every other tile of the partition and write half of the results. Both warpgroups run this."""
    wait_ready(s.ready)
    if program.scale_ptr is None:
        latent_scale = 1.0
    else:
        latent_scale = gl.load(program.scale_ptr)
    softmax_scale = program.softmax_scale * latent_scale
    seq, known, first = first_sequence(program, program.row_block)
    n, works = 0, 0
    while seq <= program.part.last_seq:
        quarters = load_queries(program, known, True, PARITY * 2, PARITY * 2 + 1, PARITY == EVEN)
        work = work_of(program, seq, known, first, program.row_block)
        target = target_of(program, seq, known, work)
        # Poisoned scores poison the output and its sum. They need no register while tiles are attended to.
        scale = store_queries(PARITY, s, quarters, works, softmax_scale + target.poison)
        acc, m_i, l_i = attend(PARITY, s, program, work, n, scale)
        mbarrier.arrive(s.q_empty, count=1)
        acc, m_i, l_i = merge_other(PARITY, s, acc, m_i, l_i, works)
        if work.starts & work.ends:
            results = merge_quarters(scale_columns(acc, latent_scale / gl.where(l_i == 0.0, 1.0, l_i)))
            store_result(program, target, program.row_block * program.config.COLUMNS, results, PARITY * 2, m_i, l_i)
        else:
            results = merge_quarters(scale_columns(acc, gl.zeros_like(l_i) + latent_scale))
            slot = slot_of(program, seq, work, program.row_block)
            store_partial(program, slot, results, PARITY * 2, m_i, l_i)
        n += 4 * work.count
        works += 1
        seq, known, first = next_sequence(program, seq, program.row_block)


@gluon.jit
def store_queries(PARITY: gl.constexpr, s, quarters, works, softmax_scale):
    """Store the queries to shared memory as float16, and wait for the other warpgroup's.

    Each row is scaled by a power of two, so that none overflows.

    Returns:
        The factor of each column's scores.
    """
    COLUMNS: gl.constexpr = s.q.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    wait(s.q_empty, works + 1)
    peak = peaks(quarters)
    s.peak.index(PARITY).store(peak)
    mbarrier.arrive(s.peak_full, count=1)
    wait(s.peak_full, works)
    peak = gl.maximum(peak, s.peak.index(1 - PARITY).load(peak.type.layout))
    factor, inverse = scale_of_rows(peak, 14)
    quarters = scale_panels(quarters, factor, gl.float16)
    for i in gl.static_range(2):
        first, second = query_operands(quarters[i])
        s.q.index(PARITY * 4 + i * 2).store(first)
        s.q.index(PARITY * 4 + i * 2 + 1).store(second)
    if PARITY == EVEN:
        first, second = query_operands(quarters[2])
        s.q_rope.index(0).store(first)
        s.q_rope.index(1).store(second)
    fence_async_shared()
    mbarrier.arrive(s.q_full, count=1)
    wait(s.q_full, works)
    return softmax_scale * gl.convert_layout(inverse, gl.SliceLayout(0, LAYOUT))


@gluon.jit
def attend(PARITY: gl.constexpr, s, program, work, n, scale):
    """Return the state over this warpgroup's tiles of a sequence: the output, the maximum, the sum.

    The output is in even and odd columns of each quarter.

    Args:
        n: which use of the pipeline the first quarter is.
    """
    COLUMNS: gl.constexpr = program.config.COLUMNS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    acc = ()
    for _ in gl.static_range(8):
        acc = acc + (gl.zeros([QUARTER // 2, COLUMNS], gl.float32, LAYOUT),)
    m_i = gl.full([COLUMNS], float("-inf"), gl.float32, gl.SliceLayout(0, LAYOUT))
    sums = gl.zeros([TILE, COLUMNS], gl.float32, LAYOUT)  # of each thread's keys, added up at the end
    for i in range(PARITY, work.count, 2):
        pos = (work.tile + i) * TILE
        scores = apply_mask(multiply_keys(s, n + 4 * i), pos, work, program)
        m_new = gl.maximum(m_i, gl.max(scores, 0) * scale)
        p = probabilities(scores, scale, finite(m_new))
        alpha = gl.exp2(m_i - finite(m_new))
        s.p.index(PARITY).store(p.to(gl.float16))
        fence_async_shared()
        sums = sums * alpha[None, :] + p
        acc = multiply_values(s, scale_columns(acc, alpha), s.p.index(PARITY), n + 4 * i, pos, work.visible)
        m_i = m_new
    return acc, m_i, gl.sum(sums, 0)


@gluon.jit
def multiply_keys(s, n):
    """Return the products of a tile's keys with the queries; its first quarter is the n-th use of the pipeline."""
    COLUMNS: gl.constexpr = s.q.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    # The compiler cannot know that this is 0. So it computes descriptors of queries here and keeps none.
    zero = n >> 30
    scores = gl.zeros([TILE, COLUMNS], gl.float32, LAYOUT)
    for i in gl.static_range(4):
        stage = s.latents.quarters.wait(n + i)
        first, second = key_operands(s.latents.quarters.tiles.index(stage), OPERAND)
        scores = multiply_pair(first, second, s.q, zero + 2 * i, scores)
    first, second = key_operands(s.latents.rope_of(n), OPERAND)
    scores = multiply_pair(first, second, s.q_rope, zero, scores)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def multiply_pair(first, second, q, at, scores):
    """Begin to multiply both operands of some keys with their queries; wait for those before, or for all of 32 rows."""
    scores = warpgroup_mma(first, q.index(at).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma(second, q.index(at + 1).permute((1, 0)), scores, is_async=True)
    return warpgroup_mma_wait(2 if q.shape[1] == 16 else 0, deps=[scores])


@gluon.jit
def multiply_values(s, acc, p, n, pos, visible):
    """Add the products of a tile's values with the probabilities; free its quarters, of which the n-th is the first."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    products, pending = (), ()
    for i in gl.static_range(4):
        quarter = s.latents.quarters.tiles.index(s.latents.quarters.stage_of(n + i))
        if pos + TILE > visible:
            zero_invisible_rows(quarter, pos, visible)
            fence_async_shared()  # TMA overwrites what was zeroed
        even, odd = value_operands(quarter, OPERAND)
        even = warpgroup_mma(even, p, acc[2 * i], is_async=True)
        odd = warpgroup_mma(odd, p, acc[2 * i + 1], is_async=True)
        # After the products, which wait for the loads: TMA may overwrite a stage before a load in flight has read it.
        s.latents.quarters.release(n + i)
        if i > 0:
            products = products + warpgroup_mma_wait(2, deps=pending)
        pending = (even, odd)
        if p.shape[1] == 32 and i < 3:  # registers for the operands of one quarter
            pending = warpgroup_mma_wait(0, deps=pending)
    return products + warpgroup_mma_wait(0, deps=pending)


@gluon.jit
def merge_other(PARITY: gl.constexpr, s, acc, m_i, l_i, works):
    """Return this warpgroup's half of the output, merged with the other's, and the maximum and sum of both."""
    wait(s.output_empty, works + 1)
    s.maximum.index(PARITY).store(m_i)
    s.total.index(PARITY).store(l_i)
    OTHERS: gl.constexpr = (1 - PARITY) * 4
    for i in gl.static_range(OTHERS, OTHERS + 4):
        s.output.index(i).store(acc[i])
    mbarrier.arrive(s.output_full, count=1)
    wait(s.output_full, works)
    m_other = s.maximum.index(1 - PARITY).load(m_i.type.layout)
    m_new = gl.maximum(m_i, m_other)
    own, other = gl.exp2(m_i - finite(m_new)), gl.exp2(m_other - finite(m_new))
    l_i = l_i * own + s.total.index(1 - PARITY).load(m_i.type.layout) * other
    merged = ()
    for i in gl.static_range(4):
        added = s.output.index(PARITY * 4 + i).load(acc[0].type.layout)
        merged = merged + (acc[PARITY * 4 + i] * own[None, :] + added * other[None, :],)
    mbarrier.arrive(s.output_empty, count=1)
    return merged, m_new, l_i


@gluon.jit
def merge_quarters(acc):
    """Return the output in quarters."""
    return merge_columns(acc[0], acc[1]), merge_columns(acc[2], acc[3])
