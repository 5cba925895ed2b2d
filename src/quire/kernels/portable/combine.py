"""The second launch: it combines the partials of row blocks after the portable kernel.

One program that combines many partials, or tall ones, may take as long as attention itself. Here many programs share
the rows and columns of a row block. They read which row block it is while the portable kernel ends.

The states of batch-invariant splits are folded in key order. Each row and column of the fold is by itself, so a result
has the bits that one program would compute.

Grid: [num_row_blocks * num_kv_heads * partial_rows * slices]. A program combines COLUMNS columns of a row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from quire.kernels.primitives import find_rows
from quire.kernels.schedule import load_cut, load_queries_of
from quire.kernels.states import Outputs, combine_at_once, store_result

FEW = tl.constexpr(16)  # partials of a row, up to which a program makes room for no more


@triton.jit(
    do_not_specialize=["one_each", "block_m", "partial_rows", "stride_scale", "stride_lse"],
)
def combine_partials_kernel(
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM_V]
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr,  # [num_q_heads], or None
    v_scale_ptr,  # [num_kv_heads] of a quantised cache, or None
    cu_seqlens_q, one_each,  # as `load_sequence` takes them
    scratch,  # views.Partials
    block_m, partial_rows,  # rows of a row block, and the most of them that a sequence has
    stride_scale, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    STRIDE: tl.constexpr,  # rows from slot to slot, if states of splits are folded; 0 if partials are combined
    COLUMNS: tl.constexpr,  # of a program
    AHEAD: tl.constexpr,  # states that are loaded together; FEW, if it is less and a row has no more
    PDL: tl.constexpr,  # programmatic dependent launch
):  # fmt: skip
    SLICES: tl.constexpr = BLOCK_DV // COLUMNS
    pid = tl.program_id(0)
    if PDL:  # whoever waits for this launch waits for the portable kernel too
        if pid == 0:
            gdc_wait()
    columns = pid % SLICES * COLUMNS + tl.arange(0, COLUMNS)
    row = pid // SLICES % partial_rows  # of the row block
    of_all = pid // SLICES // partial_rows
    kv_head, index = of_all % NUM_KV_HEADS, of_all // NUM_KV_HEADS
    cut = load_cut(scratch.cuts, index)
    # The queries are in flight while partials are loaded, also of rows that the sequence has not. With numbers that are
    # not below 0, the branch waits for all of a cut at once.
    q_start, q_len = load_queries_of(cu_seqlens_q, cut.seq, None, one_each)
    is_cut = (cut.number > 1) & (cut.first >= 0) & (cut.block >= 0)
    if STRIDE > 0:  # a proof follows each state that is read back to where it was written
        is_cut = is_cut & (cut.block * block_m + row < q_len * GROUP)
    if is_cut:
        if PDL:
            gdc_wait()
        if STRIDE > 0:
            acc, m_i, l_i = fold_slots(
                scratch, cut.first, cut.first + cut.number, kv_head, row, columns, NUM_KV_HEADS, STRIDE,
                HEAD_DIM_V, AHEAD,
            )  # fmt: skip
        elif AHEAD > FEW:
            if cut.number > FEW:
                acc, m_i, l_i = combine_slots(
                    scratch, cut, kv_head, row, columns, block_m, NUM_KV_HEADS, HEAD_DIM_V, AHEAD
                )
            else:
                acc, m_i, l_i = combine_slots(
                    scratch, cut, kv_head, row, columns, block_m, NUM_KV_HEADS, HEAD_DIM_V, FEW
                )
        else:
            acc, m_i, l_i = combine_slots(scratch, cut, kv_head, row, columns, block_m, NUM_KV_HEADS, HEAD_DIM_V, AHEAD)
        v_scale = 1.0
        if v_scale_ptr is not None:
            v_scale = tl.load(v_scale_ptr + kv_head.to(tl.int64) * stride_scale)
        rows = find_rows(cut.block * block_m + row, q_start, q_len, 0, kv_head, GROUP, 1)
        outputs = Outputs(out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse)
        m_i, l_i = tl.full([1], m_i, tl.float32), tl.full([1], l_i, tl.float32)
        store_result(outputs, (acc[None, :],), m_i, l_i, v_scale, rows, (columns,), HEAD_DIM_V, STRIDE > 0)


@triton.jit
def combine_slots(
    scratch, cut, kv_head, row, columns, block_m,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return the combined state of a row's partials, whose maximum and sum are scalars.

    The partials, of `block_m` rows each, are in the cut's first slot and in every second slot from the next on. AHEAD
    of them are rescaled to one maximum at a time.
    """
    acc, m_i, l_i = tl.zeros(columns.shape, tl.float32), float("-inf"), 0.0
    inside = (columns < HEAD_DIM_V)[None, :]
    for done in tl.range(0, cut.number, AHEAD, num_stages=1):
        i = done + tl.arange(0, AHEAD)
        present = i < cut.number
        slot = cut.first + tl.where(i == 0, 0, 2 * i - 1)
        at = (slot.to(tl.int64) * NUM_KV_HEADS + kv_head) * block_m + row
        other_m = tl.load(scratch.m_i + at, mask=present, other=float("-inf"), cache_modifier=".cg")
        other_l = tl.load(scratch.l_i + at, mask=present, other=0.0, cache_modifier=".cg")
        acc_ptrs = scratch.acc + (at * HEAD_DIM_V)[:, None] + columns[None, :]
        other_acc = tl.load(acc_ptrs, mask=present[:, None] & inside, other=0.0, cache_modifier=".cg")
        acc, m_i, l_i = combine_at_once(acc, m_i, l_i, other_acc, other_m, other_l)
    return acc, m_i, l_i


@triton.jit
def fold_slots(
    scratch, first, stop, kv_head, row, columns,
    NUM_KV_HEADS: tl.constexpr, STRIDE: tl.constexpr, HEAD_DIM_V: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return the fold of the states in slots `first` to `stop`, of one row, whose maximum and sum are scalars.

    States are loaded in rounds of AHEAD, a round before they are folded. The first round may have fewer, so that all
    others need no masks.
    """
    row_of_lane = kv_head * (STRIDE // NUM_KV_HEADS) + row
    num_first = (stop - first - 1) % AHEAD + 1
    at = tl.cast(first, tl.int64) * STRIDE + row_of_lane
    acc, m_i, l_i = tl.zeros(columns.shape, tl.float32), float("-inf"), 0.0
    accs, ms, ls = load_states(scratch, at, num_first, columns, STRIDE, HEAD_DIM_V, AHEAD, True)
    for slot in tl.range(first + num_first, stop, AHEAD, num_stages=1):
        at = tl.cast(slot, tl.int64) * STRIDE + row_of_lane
        next_accs, next_ms, next_ls = load_states(scratch, at, AHEAD, columns, STRIDE, HEAD_DIM_V, AHEAD, False)
        acc, m_i, l_i = fold_states(acc, m_i, l_i, accs, ms, ls)
        accs, ms, ls = next_accs, next_ms, next_ls
    return fold_states(acc, m_i, l_i, accs, ms, ls)


@triton.jit
def load_states(
    scratch, at, number, columns,
    STRIDE: tl.constexpr, HEAD_DIM_V: tl.constexpr, AHEAD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load AHEAD states of a row, the first of which is row `at` of the scratch.

    With MASKED, those after the `number`-th are states over no keys.
    """
    accs, ms, ls = (), (), ()
    m_ptr, l_ptr, acc_ptrs = scratch.m_i + at, scratch.l_i + at, scratch.acc + at * HEAD_DIM_V + columns
    inside = columns < HEAD_DIM_V
    for i in tl.static_range(AHEAD):
        if MASKED:
            present = number > i
            held = inside & (number + 0 * columns > i)
            ms = ms + (tl.load(m_ptr + i * STRIDE, mask=present, other=float("-inf")),)
            ls = ls + (tl.load(l_ptr + i * STRIDE, mask=present, other=0.0),)
            accs = accs + (tl.load(acc_ptrs + i * STRIDE * HEAD_DIM_V, mask=held, other=0.0),)
        else:
            ms = ms + (tl.load(m_ptr + i * STRIDE),)
            ls = ls + (tl.load(l_ptr + i * STRIDE),)
            accs = accs + (tl.load(acc_ptrs + i * STRIDE * HEAD_DIM_V, mask=inside, other=0.0),)
    return accs, ms, ls


@triton.jit
def fold_states(acc, m_i, l_i, accs, ms, ls):
    """Add states of a row to a state one after the other, as `states.combine` does."""
    for i in tl.static_range(len(ms)):
        m_new = tl.maximum(m_i, ms[i])
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, beta = tl.exp2(m_i - shift), tl.exp2(ms[i] - shift)
        acc = tl.fma(acc, alpha + tl.zeros_like(acc), accs[i] * beta)
        m_i, l_i = m_new, tl.fma(l_i, alpha, ls[i] * beta)
    return acc, m_i, l_i
