"""Fold the states of splits in a launch of its own, after the split-KV kernel of a batch-invariant plan.

One program that folds the states of a tall row block, or of a long context, would take longer than attention itself.
The fold is in the order of splits, but each row and column of it is by itself. So programs share the rows and columns
of a row block, and a result has the bits that one program would compute.

Grid: [num_row_blocks * num_kv_heads * PARTIAL_ROWS * slices]. A program, of one warp, folds COLUMNS columns of a row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from quire.cache import PagedKVCache
from quire.kernels import views
from quire.kernels.portable import PortableRunner
from quire.kernels.primitives import Outputs, find_rows, store_result
from quire.kernels.split_kv.launch import SplitKVLaunch
from quire.kernels.split_kv.schedule import Schedule, find_row_block, sequence_span


@triton.jit(do_not_specialize=["window_left", "window_right", "num_seqs", "num_partitions", "stride_lse"])
def fold_kernel(
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM_V]
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
            outputs = Outputs(out_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse)
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
    """Add states of a row to a state one after the other, as `primitives.combine` does."""
    for i in tl.static_range(len(ms)):
        m_new = tl.maximum(m_i, ms[i])
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, beta = tl.exp2(m_i - shift), tl.exp2(ms[i] - shift)
        acc = tl.fma(acc, alpha + tl.zeros_like(acc), accs[i] * beta)
        m_i, l_i = m_new, tl.fma(l_i, alpha, ls[i] * beta)
    return acc, m_i, l_i


class FoldingRunner(PortableRunner):
    """Run the split-KV kernel for one batch, and then the launch that folds the states of splits."""

    def __call__(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        new: views.NewTokens | None = None,
        norm_rope: tuple[views.NormRope, dict[str, Any]] | None = None,
    ) -> None:
        super().__call__(q, cache, out, lse, sinks, alibi_slopes, new, norm_rope)
        decided = self.decided
        assert isinstance(decided, SplitKVLaunch)
        grid = (decided.num_fold_programs(q.shape[0]), 1, 1)
        if grid[0] == 0:
            return
        tensors = out, lse, sinks, None if cache.scale_kind == "token" else cache.v_scale
        addresses = tuple(None if t is None else t.data_ptr() for t in tensors)
        key = None
        if not any((at or 0) % 16 for at in addresses[:3]):
            dtype, stride_lse = None if sinks is None else sinks.dtype, None if lse is None else lse.stride(0)
            key = "fold", cache.kind, out.stride(), stride_lse, dtype
            if self.launches.relaunch(key, grid, addresses):
                return
        fixed, meta = self.fold_arguments(decided, cache, out, lse)
        self.launches.launch(key, fold_kernel, grid, tensors, fixed, meta)

    def fold_arguments(
        self, decided: SplitKVLaunch, cache: PagedKVCache, out: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `fold_kernel` after the tensors of a layer, and those by name."""
        batch = self.batch
        seen = batch.key_begin, batch.key_end, batch.tree_bits
        lengths = batch.seq_lens, batch.query_offsets
        kv = views.KVLayout(None, None, *lengths, *[0] * 4, *[None] * 3, *[0] * 3, cache.scale_strides[2], *seen)
        _, scratch, _, _, *window, num_seqs, num_partitions, _ = self.fixed
        strides = out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)
        fixed = kv, batch.cu_seqlens_q, scratch, *window, num_seqs, num_partitions, *strides
        return fixed, decided.fold_constexprs()
