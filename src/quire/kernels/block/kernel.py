"""Attention, one program per block of rows: prefill, chunks of prefill, mixed batches, and decode over short contexts.

The rows of a sequence are its (query token, query head of one KV head) pairs, flattened, so that all heads that share a KV head share its
loads whatever the group size. The grid is [num_q_blocks * num_kv_heads]: one program owns BLOCK_M rows and all the keys that they see. All lengths
are read on the device. Where rows are few and contexts long, `shares.py` serves instead.

The online softmax is that of FlashAttention-2 (arXiv 2307.08691, section 3.1).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.primitives import (
    LOG2E,
    attend_tile,
    empty_state,
    find_pages,
    join_even_odd,
    load_queries,
    store_result,
)


@triton.jit
def find_sequence(cu_seqlens_q, num_seqs, block, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the sequence that owns Q block `block`, and that sequence's first block.

    A sequence has `q_len * GROUP` rows (query token, query head of the KV head). Block `cu_seqlens_q[s] * GROUP // BLOCK_M + s` is its first:
    leaving one spare block per sequence makes this a function of the cumulative lengths alone, so that a binary search finds it.
    """
    low = 0
    high = num_seqs
    while low < high:  # the last sequence whose first block is at or before `block`
        middle = (low + high) // 2
        before = tl.load(cu_seqlens_q + middle) * GROUP // BLOCK_M + middle <= block
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    seq = low - 1
    return seq, tl.load(cu_seqlens_q + seq) * GROUP // BLOCK_M + seq


@triton.jit(do_not_specialize=["num_seqs", "stride_table", "window_left", "window_right"])
def block_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM_V]
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr,  # [num_q_heads], or None
    slopes_ptr,  # [num_q_heads], or None
    kv,  # views.PagedKV
    cu_seqlens_q,  # [num_seqs + 1] int32, or None where every sequence has one query
    scale, softcap, window_left, window_right, num_seqs,
    stride_table, stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SCORE_MOD: tl.constexpr, DECODE: tl.constexpr, PACKED_FP8: tl.constexpr, TOKEN_SCALES: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL_TILE_LOOP: tl.constexpr, SEARCH: tl.constexpr, PER_ROW_MASK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # started before the kernel window_right of it in the stream was done
        gdc_wait()
    # Which rows: a block of one sequence's (token, head) pairs.
    pid = tl.program_id(0)
    kv_head = pid % NUM_KV_HEADS
    block = pid // NUM_KV_HEADS
    first_row = 0
    seq = block
    if SEARCH and cu_seqlens_q is None:
        seq = block // tl.cdiv(GROUP, BLOCK_M)
        first_row = block % tl.cdiv(GROUP, BLOCK_M) * BLOCK_M
    elif SEARCH:
        block = (
            tl.num_programs(0) // NUM_KV_HEADS - 1 - block
        )  # late blocks of a causal prompt see the most keys: they start first
        seq, first_block = find_sequence(cu_seqlens_q, num_seqs, block, GROUP, BLOCK_M)
        first_row = (block - first_block) * BLOCK_M
    seq_len = tl.load(kv.seq_lens + seq)
    q_start = seq
    num_rows = GROUP
    if cu_seqlens_q is not None:
        q_start = tl.load(cu_seqlens_q + seq)
        num_rows = (tl.load(cu_seqlens_q + seq + 1) - q_start) * GROUP
        if first_row >= num_rows:
            return
    if kv.query_offsets is None:
        first_pos = seq_len - num_rows // GROUP
    else:
        first_pos = tl.load(kv.query_offsets + seq)
    rows = first_row + tl.arange(0, BLOCK_M)
    owned = rows < num_rows
    q_pos = first_pos + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    token = (q_start + rows // GROUP).to(tl.int64)

    # Which keys: the band that any of these rows sees.
    low_pos = first_pos + first_row // GROUP
    high_pos = first_pos + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // GROUP
    kv_start = tl.maximum(low_pos - window_left, 0)
    kv_stop = tl.maximum(tl.minimum(high_pos + window_right + 1, seq_len), 0)
    start = kv_start // BLOCK_N
    stop = tl.maximum(tl.cdiv(kv_stop, BLOCK_N), start)

    if kv.cu_pages is None:
        row = kv.page_table + seq.to(tl.int64) * stride_table
    else:
        row = kv.page_table + tl.load(kv.cu_pages + seq)

    # Tiles that every row sees join_even_odd need no masks. The rest lie on the band's two edges, and order does not matter to a softmax.
    full_start, full_stop = start, start
    if FULL_TILE_LOOP:
        full_start = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(high_pos - window_left, 0), BLOCK_N), start), stop)
        full_stop = tl.maximum(
            tl.minimum(tl.maximum(tl.minimum(low_pos + window_right + 1, seq_len), 0) // BLOCK_N, stop), full_start
        )
    tile = full_start * BLOCK_N
    page = find_pages(row, tile, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)  # on its way while the queries are loaded

    q = load_queries(q_ptr + token * stride_q_token + head * stride_q_head, owned, HEAD_DIM, BLOCK_D, PACKED_FP8)
    acc, m_i, l_i = empty_state(BLOCK_M, BLOCK_DV, PACKED_FP8)
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=owned, other=0.0).to(tl.float32)
    v_scale = 1.0
    if kv.k_scale is not None and not TOKEN_SCALES:
        scale = scale * tl.load(kv.k_scale + kv_head * kv.scale_head)
        v_scale = tl.load(kv.v_scale + kv_head * kv.scale_head)
    exponent_scale = LOG2E if SCORE_MOD is not None else scale * LOG2E

    if FULL_TILE_LOOP:
        for i in tl.range(full_start, full_stop):
            next_page = find_pages(row, (i + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
            acc, m_i, l_i = attend_tile(
                acc, m_i, l_i, q, kv, page, i * BLOCK_N, kv_head, q_pos, slopes, kv_start, kv_stop, exponent_scale, scale, softcap, window_left, window_right,
                False, PER_ROW_MASK, SCORE_MOD, DECODE, PACKED_FP8, TOKEN_SCALES, INPUT_PRECISION,
                PAGE_SIZE, BLOCK_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_VEC, V_VEC,
            )  # fmt: skip
            page = next_page
    num_left = full_start - start
    if FULL_TILE_LOOP:
        tile = tl.where(num_left > 0, start, full_stop) * BLOCK_N
        page = find_pages(row, tile, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
    for i in tl.range(1, 1 + num_left + stop - full_stop):
        next_tile = tl.where(i < num_left, start + i, full_stop + i - num_left) * BLOCK_N
        next_page = find_pages(row, next_tile, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
        acc, m_i, l_i = attend_tile(
            acc, m_i, l_i, q, kv, page, tile, kv_head, q_pos, slopes, kv_start, kv_stop, exponent_scale, scale, softcap, window_left, window_right,
            True, PER_ROW_MASK, SCORE_MOD, DECODE, PACKED_FP8, TOKEN_SCALES, INPUT_PRECISION,
            PAGE_SIZE, BLOCK_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_VEC, V_VEC,
        )  # fmt: skip
        tile, page = next_tile, next_page

    if PDL:
        gdc_launch_dependents()
    store_result(
        out_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse, join_even_odd(acc, BLOCK_M, BLOCK_DV, PACKED_FP8), m_i, l_i, v_scale,
        token, head, owned, tl.arange(0, BLOCK_DV), HEAD_DIM_V,
    )  # fmt: skip
