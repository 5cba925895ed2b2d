"""Fold the states of splits in a separate launch, after the split-KV kernel of a batch-invariant plan.

One program that folds the states of a tall row block, or of a long context, would take longer than attention itself.
The fold is in the order of splits, but each row and column of it is by itself. So programs share the rows and columns
of a row block, and a result has the bits that one program would compute.

Grid: [num_row_blocks * num_kv_heads * PARTIAL_ROWS * slices]. A program, of one warp, folds COLUMNS columns of a row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from quire.kernels.primitives import find_rows
from quire.kernels.split_kv.schedule import Schedule, find_row_block, sequence_span
from quire.kernels.states import Outputs, store_result


@triton.jit(
    do_not_specialize=["window_left", "window_right", "num_seqs", "num_partitions", "stride_lse"],
    do_not_specialize_on_alignment=["out_scale_ptr"],
)
def fold_kernel(
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM_V]
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr,  # [num_q_heads], or None
    v_scale_ptr,  # [num_kv_heads] of a quantised cache, or None
    kv,  # views.KVLayout, of which lengths, intervals and the stride of scales are used
    cu_seqlens_q,  # [num_seqs + 1] int32, or None where every sequence has one query
    scratch,  # views.Partials
    window_left, window_right, num_seqs, num_partitions, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, PARTIAL_ROWS: tl.constexpr,  # rows of a row block, and those of them that are stored
    FIXED_SPLIT: tl.constexpr,  # keys of a split
    SEQS: tl.constexpr, MORE_SEQS: tl.constexpr, INTERVALS: tl.constexpr, MORE_INTERVALS: tl.constexpr,  # of Schedule
    COLUMNS: tl.constexpr,  # of a program
    AHEAD: tl.constexpr,  # states that are loaded together
    PDL: tl.constexpr,  # programmatic dependent launch
):  # fmt: skip
    if PDL:
        gdc_wait()
    S: tl.constexpr = Schedule(GROUP, BLOCK_M, FIXED_SPLIT, SEQS, MORE_SEQS, 0, 0, 0, 0, INTERVALS, MORE_INTERVALS)
    SLICES: tl.constexpr = BLOCK_DV // COLUMNS
    pid = tl.program_id(0)
    columns = pid % SLICES * COLUMNS + tl.arange(0, COLUMNS)
    row = pid // SLICES % PARTIAL_ROWS  # of the row block
    kv_head = pid // (SLICES * PARTIAL_ROWS) % NUM_KV_HEADS
    index = pid // (SLICES * PARTIAL_ROWS * NUM_KV_HEADS)
    seq, row_block, seq_unit, num_units_of_batch, num_row_blocks = find_row_block(
        kv, cu_seqlens_q, num_seqs, index, window_left, window_right, S
    )
    if index < num_row_blocks:
        q_start, q_len, first_pos, _, _, _, num_units, _ = sequence_span(
            kv, cu_seqlens_q, seq, window_left, window_right, S
        )
        # The program that began the row block has folded its splits, into the slot of the last of them.
        size = tl.cdiv(num_units_of_batch, num_partitions)
        block_unit = seq_unit + row_block * num_units
        first, stop = (block_unit // size + 1) * size - 1, block_unit + num_units
        if (first + 1 < stop) & (row_block * BLOCK_M + row < q_len * GROUP):
            acc, m_i, l_i = fold_slots(
                scratch, first, stop, kv_head, row, columns, NUM_KV_HEADS, PARTIAL_ROWS, HEAD_DIM_V, AHEAD
            )
            v_scale = 1.0
            if v_scale_ptr is not None:
                v_scale = tl.load(v_scale_ptr + kv_head.to(tl.int64) * kv.scale_head)
            rows = find_rows(row_block * BLOCK_M + row, q_start, q_len, first_pos, kv_head, GROUP, 1)
            outputs = Outputs(out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse)
            m_i, l_i = tl.full([1], m_i, tl.float32), tl.full([1], l_i, tl.float32)
            store_result(outputs, acc[None, :], m_i, l_i, v_scale, rows, columns, HEAD_DIM_V)


@triton.jit
def fold_slots(
    scratch, first, stop, kv_head, row, columns,
    NUM_KV_HEADS: tl.constexpr, PARTIAL_ROWS: tl.constexpr, HEAD_DIM_V: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Return the fold of the states in slots `first` to `stop`, of one row, whose maximum and sum are scalars.

    States are loaded in rounds of AHEAD, a round before they are folded. The first round may have fewer, so that all
    others need no masks.
    """
    STRIDE: tl.constexpr = NUM_KV_HEADS * PARTIAL_ROWS  # of slots, in rows
    row_of_lane = kv_head * PARTIAL_ROWS + row
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
