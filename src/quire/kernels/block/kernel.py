"""The block kernel: prefill, chunked prefill, mixed batches, and decode over short contexts.

Grid: [num_row_blocks * num_kv_heads]. One program owns one row block, which is BLOCK_M rows of one sequence and one KV
head, and all keys that these rows see. It reads all lengths on the device. Plans use the split-KV kernel if the row
blocks would leave the device idle.

The online softmax is that of FlashAttention-2 (arXiv 2307.08691, section 3.1).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.panels import join_pairs
from quire.kernels.primitives import (
    Scoring,
    Sight,
    Tiling,
    attend_tile,
    find_pages,
    find_rows,
    head_scales,
    in_units,
    keys_of_rows,
    load_intervals,
    load_queries,
    table_row,
    write_new,
)
from quire.kernels.states import LOG2E, Outputs, empty_state, fold_split, groups_of, store_result


@triton.jit
def find_sequence(cu_seqlens_q, num_seqs, row_block, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the sequence that owns a row block of the batch, and that sequence's first row block.

    A sequence has `q_len * GROUP` rows. With one spare row block for each sequence, the first row block of sequence s
    is number `cu_seqlens_q[s] * GROUP // BLOCK_M + s`. This needs no sum over sequences, so a binary search finds it.
    """
    low = 1  # the first sequence begins with row block 0
    high = num_seqs
    while low < high:  # the last sequence whose first row block is at or before `row_block`
        middle = (low + high) // 2
        before = tl.load(cu_seqlens_q + middle) * GROUP // BLOCK_M + middle <= row_block
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    seq = low - 1
    return seq, tl.load(cu_seqlens_q + seq) * GROUP // BLOCK_M + seq


@triton.jit(
    do_not_specialize=["num_seqs", "stride_table", "stride_lse", "window_left", "window_right"],
)
def block_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM_V]
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr,  # [num_q_heads], or None
    slopes_ptr,  # [num_q_heads], or None
    cache,  # views.CacheTensors
    new,  # views.NewTokens, or None
    norm_rope,  # views.NormRope, or None
    kv,  # views.KVLayout
    cu_seqlens_q,  # [num_seqs + 1] int32, or None where every sequence has one query
    scale, softcap, window_left, window_right, num_seqs,
    stride_table, stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WIDE_OFFSETS: tl.constexpr, SCORE_MOD: tl.constexpr, DECODE: tl.constexpr,
    PACKED_FP8: tl.constexpr, TOKEN_SCALES: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL_TILE_LOOP: tl.constexpr, PER_ROW_MASK: tl.constexpr,
    MULTI_BLOCK: tl.constexpr,  # a sequence may have several row blocks
    PDL: tl.constexpr,  # programmatic dependent launch
    WGMMA: tl.constexpr,  # of 64 rows and more, the compiler makes wgmma
    STRIDE_UNIT: tl.constexpr,  # of `views.stride_unit`
    NEW_TOKENS: tl.constexpr,  # most new tokens of a sequence; 0 without `new`
    ENCODE: tl.constexpr,  # jit function from float32 to stored elements; None if the cache is not quantised
    ROTARY_DIM: tl.constexpr,  # columns of a head that `norm_rope` rotates; None without `norm_rope`
    INTERLEAVED: tl.constexpr,  # pairs of them are (2i, 2i + 1)
    FIXED_SPLIT: tl.constexpr,  # keys of a split, a multiple of BLOCK_N; 0 where the keys are not split
):  # fmt: skip
    if PDL:  # this kernel may start before the previous one in the stream has ended
        gdc_wait()
    EACH: tl.constexpr = 2 if PACKED_FP8 else 1  # numbers in a stored element
    T: tl.constexpr = Tiling(
        BLOCK_N, PAGE_SIZE, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_VEC, V_VEC, WIDE_OFFSETS,
        SCORE_MOD, DECODE, PACKED_FP8, TOKEN_SCALES, INPUT_PRECISION, PER_ROW_MASK, STRIDE_UNIT,
        WGMMA and FIXED_SPLIT > 0 and BLOCK_M >= 64,
    )  # fmt: skip
    # The rows of this program: one row block of one sequence.
    pid = tl.program_id(0)
    kv_head = pid % NUM_KV_HEADS
    seq = pid // NUM_KV_HEADS
    row_block = 0
    if MULTI_BLOCK and cu_seqlens_q is None:
        row_block = seq % tl.cdiv(GROUP, BLOCK_M)
        seq = seq // tl.cdiv(GROUP, BLOCK_M)
    elif MULTI_BLOCK:
        # The last row blocks of a causal prompt see the most keys, so they start first.
        from_end = tl.num_programs(0) // NUM_KV_HEADS - 1 - seq
        seq, first_block = find_sequence(cu_seqlens_q, num_seqs, from_end, GROUP, BLOCK_M)
        row_block = from_end - first_block
    first_row = row_block * BLOCK_M
    seq_len = tl.load(kv.seq_lens + seq)
    q_start = seq
    q_len = 1
    if cu_seqlens_q is not None:
        q_start = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
        if first_row >= q_len * GROUP:
            return
    if kv.query_offsets is None:
        first_pos = seq_len - q_len
    else:
        first_pos = tl.load(kv.query_offsets + seq)
    rows = find_rows(first_row, q_start, q_len, first_pos, kv_head, GROUP, BLOCK_M)

    # The keys of this program: those that any of its rows sees, and those that all see.
    sight = Sight(None, None, None, None)
    if kv.key_begin is None and kv.tree_bits is None:
        low_pos = first_pos + first_row // GROUP
        high_pos = first_pos + (tl.minimum(first_row + BLOCK_M, q_len * GROUP) - 1) // GROUP
        kv_start = tl.maximum(low_pos - window_left, 0)
        kv_stop = tl.maximum(tl.minimum(high_pos + window_right + 1, seq_len), 0)
    else:
        bits = None
        if kv.tree_bits is not None:
            bits = tl.load(kv.tree_bits + rows.token, mask=rows.owned, other=0)
        begin, end = load_intervals(kv, rows, first_pos, seq_len)
        sight = Sight(begin, end, bits, first_pos)
        kv_start, kv_stop, seen_by_all, seen_until = keys_of_rows(kv, rows, begin, end, bits, first_pos, q_len, seq_len)
    start = kv_start // BLOCK_N
    stop = tl.maximum(tl.cdiv(kv_stop, BLOCK_N), start)
    row = table_row(kv, seq, stride_table)

    # Every row sees every key of a full tile, so full tiles need no masks. The other tiles are at the two edges. A
    # softmax may take tiles in any order.
    full_start, full_stop = start, start
    if FULL_TILE_LOOP:
        if sight.begin is None:
            seen_by_all = high_pos - window_left
        full_start = tl.cdiv(tl.maximum(seen_by_all, 0), BLOCK_N)
        full_start = tl.minimum(tl.maximum(full_start, start), stop)
        if sight.begin is None:
            seen_until = tl.minimum(low_pos + window_right + 1, seq_len)
        full_stop = tl.maximum(seen_until, 0) // BLOCK_N
        full_stop = tl.maximum(tl.minimum(full_stop, stop), full_start)
    pos = (full_start if FIXED_SPLIT == 0 else start) * BLOCK_N
    page = find_pages(row, pos, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)  # in flight while the queries are loaded

    q_ptrs = q_ptr + rows.token * in_units(stride_q_token, STRIDE_UNIT)
    q_ptrs += rows.head.to(tl.int64) * in_units(stride_q_head, STRIDE_UNIT)
    q = load_queries(q_ptrs, rows.owned, HEAD_DIM, BLOCK_D, PACKED_FP8, rows.token, norm_rope, ROTARY_DIM, INTERLEAVED)
    acc, m_i, l_i = empty_state(BLOCK_M, HEAD_DIM_V, EACH)
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + rows.head, mask=rows.owned, other=0.0).to(tl.float32)
    if new is not None:  # this program reads the new keys, so it writes them first
        write_new(new, norm_rope, cache, kv, q_start, q_len, kv_head, NEW_TOKENS, ENCODE, ROTARY_DIM, INTERLEAVED, T)
        tl.debug_barrier()
    scale, v_scale = head_scales(cache, kv, kv_head, scale, T)
    exponent_scale = LOG2E if SCORE_MOD is not None else scale * LOG2E
    scoring = Scoring(scale, exponent_scale, softcap, window_left, window_right)

    if FIXED_SPLIT == 0:
        if FULL_TILE_LOOP:
            for tile in tl.range(full_start, full_stop):
                next_page = find_pages(row, (tile + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
                acc, m_i, l_i = attend_tile(
                    acc, m_i, l_i, q, cache, kv, kv_head, page, tile * BLOCK_N, rows, sight, slopes, kv_start, kv_stop,
                    scoring, T, False,
                )  # fmt: skip
                page = next_page
        num_before = full_start - start
        if FULL_TILE_LOOP:
            pos = tl.where(num_before > 0, start, full_stop) * BLOCK_N
            page = find_pages(row, pos, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
        for i in tl.range(1, 1 + num_before + stop - full_stop):
            next_pos = tl.where(i < num_before, start + i, full_stop + i - num_before) * BLOCK_N
            next_page = find_pages(row, next_pos, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
            acc, m_i, l_i = attend_tile(
                acc, m_i, l_i, q, cache, kv, kv_head, page, pos, rows, sight, slopes, kv_start, kv_stop, scoring, T,
                True,
            )  # fmt: skip
            pos, page = next_pos, next_page
    else:
        # Tiles are taken in order, and each split has a state, as in the split-KV kernel.
        TILES: tl.constexpr = FIXED_SPLIT // BLOCK_N
        SUMS: tl.constexpr = groups_of(BLOCK_N)
        split_acc, split_m, split_l = empty_state(BLOCK_M, HEAD_DIM_V, EACH, SUMS)
        masked = start
        if FULL_TILE_LOOP:
            masked = tl.where(full_start == start, full_stop, start)
            for tile in tl.range(start, masked):
                next_page = find_pages(row, (tile + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
                split_acc, split_m, split_l = attend_tile(
                    split_acc, split_m, split_l, q, cache, kv, kv_head, page, tile * BLOCK_N, rows, sight, slopes,
                    kv_start, kv_stop, scoring, T, False,
                )  # fmt: skip
                page = next_page
                if (tile + 1) % TILES == 0:
                    acc, m_i, l_i = fold_split(acc, m_i, l_i, split_acc, split_m, split_l)
                    split_acc, split_m, split_l = empty_state(BLOCK_M, HEAD_DIM_V, EACH, SUMS)
        for tile in tl.range(masked, stop):
            next_page = find_pages(row, (tile + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
            split_acc, split_m, split_l = attend_tile(
                split_acc, split_m, split_l, q, cache, kv, kv_head, page, tile * BLOCK_N, rows, sight, slopes,
                kv_start, kv_stop, scoring, T, True,
            )  # fmt: skip
            page = next_page
            if (tile + 1) % TILES == 0:
                acc, m_i, l_i = fold_split(acc, m_i, l_i, split_acc, split_m, split_l)
                split_acc, split_m, split_l = empty_state(BLOCK_M, HEAD_DIM_V, EACH, SUMS)
        # The last split may be shorter. To fold a state over no keys changes nothing.
        acc, m_i, l_i = fold_split(acc, m_i, l_i, split_acc, split_m, split_l)

    if PDL:
        gdc_launch_dependents()
    stride_out_token, stride_out_head = in_units(stride_out_token, STRIDE_UNIT), in_units(stride_out_head, STRIDE_UNIT)
    outputs = Outputs(out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse)
    acc, columns = join_pairs(acc, HEAD_DIM_V, EACH, BLOCK_M)
    store_result(outputs, acc, m_i, l_i, v_scale, rows, columns, HEAD_DIM_V)
