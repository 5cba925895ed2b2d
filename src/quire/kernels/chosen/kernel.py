"""The kernels of chosen keys, one for keys and values and one for latents.

Grid: [num_tokens * num_kv_heads * head blocks]. One program owns one query token and BLOCK_M query heads of a KV head.
It reads the token's list BLOCK_N keys at a time, finds their pages and gathers them. So a result depends on its token
and its list alone, and on nothing else in the batch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.mla.kernel import LatentTiling, empty_parts, join_parts, load_query_parts
from quire.kernels.panels import columns_of
from quire.kernels.primitives import (
    Inputs,
    Rows,
    Scoring,
    Tiling,
    decode_panels,
    head_scales,
    in_units,
    load_heads,
    load_queries,
    load_rows,
    load_tile,
    table_row,
)
from quire.kernels.states import LOG2E, Outputs, add_product, empty_state, softmax_step, store_result


class Place(NamedTuple):
    """The list of one program's query token and KV head, and what of it counts. It is flat, as `views` says why."""

    entries: Any  # pointer to the token's list
    count: Any  # entries of it
    table: Any  # pointer to the first page number of the token's sequence
    end: Any  # keys of the sequence from here on are not seen


@triton.jit
def find_place(
    kv, lists, cu_seqlens_q, num_seqs, stride_table, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Return the rows of this program, their KV head and list, and whether a sequence owns their token."""
    BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    kv_head = pid // BLOCKS % NUM_KV_HEADS
    token = pid // (BLOCKS * NUM_KV_HEADS)
    seq = tl.minimum(token, num_seqs - 1)
    q_start, q_len, owned = seq, 1, token < num_seqs
    if cu_seqlens_q is not None:
        low, high = 1, num_seqs
        while low < high:  # the last sequence that begins at or before the token
            middle = (low + high) // 2
            before = tl.load(cu_seqlens_q + middle) <= token
            low = tl.where(before, middle + 1, low)
            high = tl.where(before, high, middle)
        seq = low - 1
        q_start = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
        owned = token < q_start + q_len
    seq_len = tl.load(kv.seq_lens + seq)
    if kv.query_offsets is None:
        position = seq_len - q_len + token - q_start
    else:
        position = tl.load(kv.query_offsets + seq) + token - q_start
    end = seq_len
    if CAUSAL:
        end = tl.minimum(end, position + 1)
    row = pid % BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    at = token.to(tl.int64)
    rows = Rows(tl.zeros_like(row) + at, kv_head * GROUP + row, tl.zeros_like(row) + position, row < GROUP)
    far_head = kv_head.to(tl.int64)
    entries = lists.indices + at * lists.token + far_head * lists.head
    count = lists.width
    if lists.list_lens is not None:
        count = tl.minimum(tl.load(lists.list_lens + at * lists.lens_token + far_head * lists.lens_head), count)
    return rows, kv_head, Place(entries, count, table_row(kv, seq, stride_table), end), owned


@triton.jit
def find_keys(
    place, pos, PAGE_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ARE_SLOTS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the page of each key of the tile that begins with key `pos` of the list, its slot, and if it is seen."""
    n = pos + tl.arange(0, BLOCK_N)
    entry = tl.load(place.entries + n // BLOCK_SIZE, mask=n // BLOCK_SIZE < place.count, other=-1)
    key = entry
    if BLOCK_SIZE > 1:
        key = entry.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
    keep = entry >= 0
    if not ARE_SLOTS:
        keep = keep & (key < place.end)
    key = tl.where(keep, key, 0).to(tl.int32)
    page = key // PAGE_SIZE
    if not ARE_SLOTS:
        page = tl.load(place.table + page, mask=keep, other=0)
    return page.to(tl.int64), key % PAGE_SIZE, keep  # page * stride passes 2^31


@triton.jit
def attend_keys(acc, m_i, l_i, q, cache, kv, kv_head, page, slot, keep, scoring, T: tl.constexpr):
    """Fold a tile of keys and values, anywhere in the cache, into the state.

    Args:
        acc, m_i, l_i: the running state.
        q: from `load_queries`.
        cache: views.CacheTensors.
        kv: views.KVLayout.
        kv_head: KV head.
        page, slot, keep: from `find_keys`.
        scoring: Scoring.
        T: Tiling.
    """
    if T.WIDE_OFFSETS:
        slot, kv_head = slot.to(tl.int64), kv_head.to(tl.int64)
    offs_k = slot * in_units(kv.k_slot, T.STRIDE_UNIT) + page * in_units(kv.k_page, T.STRIDE_UNIT)
    offs_k += kv_head * in_units(kv.k_head, T.STRIDE_UNIT)
    offs_v = offs_k
    if kv.v_page is not None:
        offs_v = slot * in_units(kv.v_slot, T.STRIDE_UNIT) + page * in_units(kv.v_page, T.STRIDE_UNIT)
        offs_v += kv_head * in_units(kv.v_head, T.STRIDE_UNIT)
    k_rows, v_rows = (cache.k + offs_k)[:, None], (cache.v + offs_v)[:, None]
    ROWS: tl.constexpr = m_i.shape[0]
    k = load_heads(k_rows, kv.k_vec, keep, True, T.HEAD_DIM, 1, ROWS, T.BLOCK_D, T.K_VEC, T.WIDE_OFFSETS)
    v = load_heads(v_rows, kv.v_vec, keep, True, T.HEAD_DIM_V, 1, ROWS, T.BLOCK_DV, T.V_VEC, T.WIDE_OFFSETS)
    # Small probabilities times small scales vanish in float16. With float16 queries, the values are scaled.
    SCALE_V: tl.constexpr = T.TOKEN_SCALES and q[0].dtype == tl.float16
    k = decode_panels(k, q[0].dtype, T)
    v = decode_panels(v, tl.float32 if SCALE_V else q[0].dtype, T)
    scores = tl.dot(q[0], tl.trans(k[0]), input_precision=T.INPUT_PRECISION)  # [BLOCK_M, BLOCK_N]
    for i in tl.static_range(1, len(k)):
        scores = tl.dot(q[i], tl.trans(k[i]), scores, input_precision=T.INPUT_PRECISION)
    v_scale = None
    if T.TOKEN_SCALES:
        offs_scale = slot * kv.scale_slot + kv_head * kv.scale_head + page * kv.scale_page
        scores *= tl.load(cache.k_scale + offs_scale, mask=keep, other=0.0)[None, :]
        v_scale = tl.load(cache.v_scale + offs_scale, mask=keep, other=0.0)
        if SCALE_V:
            scaled = ()
            for i in tl.static_range(len(v)):
                scaled = scaled + ((v[i] * v_scale[:, None]).to(q[0].dtype),)
            v, v_scale = scaled, None
    if T.SCORE_MOD is not None:
        scores = T.SCORE_MOD(scores, scoring.scale, None, None, None, scoring.softcap)
    scores = tl.where(keep[None, :], scores, float("-inf"))
    return softmax_step(acc, m_i, l_i, scores, v, v_scale, scoring.exponent_scale, False, T.INPUT_PRECISION)


@triton.jit
def attend_rows_of_latents(acc, m_i, l_i, q, q_pe, latents, kv, page, slot, keep, scoring, T: tl.constexpr):
    """Fold a tile of latents, anywhere in the cache, into the state.

    Args:
        acc, m_i, l_i: the running state, from `empty_parts`.
        q: from `load_query_parts`.
        q_pe: [BLOCK_M, BLOCK_R], or None.
        latents: views.LatentTensors.
        kv: views.LatentLayout.
        page, slot, keep: from `find_keys`.
        scoring: Scoring.
        T: LatentTiling.
    """
    if T.WIDE_OFFSETS:
        slot = slot.to(tl.int64)
    c_rows = (latents.c + page * kv.c_page + slot * T.C_SLOT)[:, None]
    SCALE_V: tl.constexpr = T.SCALED and q[0].dtype == tl.float16
    WIDTH: tl.constexpr = T.BLOCK_C // T.PARTS
    parts, scales = (), ()
    scores = tl.zeros([m_i.shape[0], T.BLOCK_N], tl.float32)
    for i in tl.static_range(T.PARTS):
        columns = i * WIDTH + tl.arange(0, WIDTH)
        mask = keep[:, None]
        if T.RANK != T.BLOCK_C:
            mask = mask & (columns < T.RANK)[None, :]
        part = T.DECODE(tl.load(c_rows + columns[None, :], mask=mask, other=0.0), q[i].dtype)
        products = tl.dot(q[i], tl.trans(part), input_precision=T.INPUT_PRECISION)  # [BLOCK_M, BLOCK_N]
        if T.SCALED:  # stored numbers are multiplied, which is exact, and then scaled
            s_rows = latents.scale + page * kv.scale_page + slot * kv.scale_slot
            scale = tl.load(s_rows + i, mask=keep, other=0.0)
            products *= scale[None, :]
            if SCALE_V:
                part = (part.to(tl.float32) * scale[:, None]).to(part.dtype)
            else:
                scales = scales + (scale,)
        parts = parts + (part,)
        scores += products
    if T.ROPE > 0:
        offs_r = tl.arange(0, T.BLOCK_R)
        r_rows = (latents.rope + page * kv.rope_page + slot * T.ROPE_SLOT)[:, None]
        r = load_tile(r_rows + offs_r[None, :], keep, offs_r, True, T.ROPE, T.ROPE == T.BLOCK_R)
        scores += tl.dot(q_pe, tl.trans(T.DECODE_ROPE(r, q_pe.dtype)), input_precision=T.INPUT_PRECISION)
    if T.SCORE_MOD is not None:
        scores = T.SCORE_MOD(scores, scoring.scale, None, None, None, scoring.softcap)
    scores = tl.where(keep[None, :], scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, 1) * scoring.exponent_scale)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key: -inf - -inf is NaN
    p = tl.exp2(scores * scoring.exponent_scale - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    l_i = l_i * alpha[:, None] + p
    accs = ()
    for i in tl.static_range(T.PARTS):
        weights = p
        if T.SCALED and not SCALE_V:
            weights = p * scales[i][None, :]
        accs = accs + (add_product(acc[i], alpha, weights.to(parts[i].dtype), parts[i], T.INPUT_PRECISION),)
    return accs, m_new, l_i


@triton.jit(do_not_specialize=["num_seqs", "stride_table", "stride_lse"])
def chosen_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM_V]
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr,  # [num_q_heads], or None
    cache,  # views.CacheTensors
    kv,  # views.KVLayout
    lists,  # views.Lists
    cu_seqlens_q,  # [num_seqs + 1] int32, or None where every sequence has one query
    scale, softcap, num_seqs,
    stride_table, stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WIDE_OFFSETS: tl.constexpr, SCORE_MOD: tl.constexpr, DECODE: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,  # a token sees no key after itself
    BLOCK_SIZE: tl.constexpr,  # keys that an entry names
    ARE_SLOTS: tl.constexpr,  # entries name slots
    STRIDE_UNIT: tl.constexpr,  # of `views.stride_unit`
    PDL: tl.constexpr,  # programmatic dependent launch
):  # fmt: skip
    if PDL:  # this kernel may start before the previous one in the stream has ended
        gdc_wait()
    T: tl.constexpr = Tiling(
        GROUP, BLOCK_M, BLOCK_N, PAGE_SIZE, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_VEC, V_VEC, WIDE_OFFSETS,
        SCORE_MOD, DECODE, False, TOKEN_SCALES, INPUT_PRECISION, False, STRIDE_UNIT, False, 0, None, None, False,
    )  # fmt: skip
    rows, kv_head, place, owned = find_place(
        kv, lists, cu_seqlens_q, num_seqs, stride_table, NUM_KV_HEADS, GROUP, BLOCK_M, CAUSAL
    )
    if not owned:
        return
    scale, v_scale = head_scales(cache, kv, kv_head, scale, T)
    scoring = Scoring(scale, LOG2E if SCORE_MOD is not None else scale * LOG2E, softcap, 0, 0)
    inputs = Inputs(
        q_ptr, stride_q_token, stride_q_head, None, cache, None, None, kv, cu_seqlens_q, stride_table, kv_head, scoring
    )
    q = load_queries(inputs, rows, T)
    acc, m_i, l_i = empty_state(BLOCK_M, HEAD_DIM_V, 1)
    for pos in tl.range(0, place.count * BLOCK_SIZE, BLOCK_N):
        page, slot, keep = find_keys(place, pos, PAGE_SIZE, BLOCK_SIZE, ARE_SLOTS, BLOCK_N)
        acc, m_i, l_i = attend_keys(acc, m_i, l_i, q, cache, kv, kv_head, page, slot, keep, scoring, T)
    if PDL:
        gdc_launch_dependents()
    stride_out_token, stride_out_head = in_units(stride_out_token, STRIDE_UNIT), in_units(stride_out_head, STRIDE_UNIT)
    outputs = Outputs(out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse)
    store_result(outputs, acc, m_i, l_i, v_scale, rows, columns_of(HEAD_DIM_V, 1, BLOCK_M), HEAD_DIM_V)


@triton.jit(do_not_specialize=["num_seqs", "stride_table", "stride_lse"])
def chosen_latents_kernel(
    q_ptr,  # [num_tokens, num_q_heads, RANK]
    q_pe_ptr,  # [num_tokens, num_q_heads, ROPE], or None
    out_ptr,  # [num_tokens, num_q_heads, RANK]
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr,  # [num_q_heads], or None
    latents,  # views.LatentTensors
    kv,  # views.LatentLayout
    lists,  # views.Lists
    cu_seqlens_q,  # [num_seqs + 1] int32, or None where every sequence has one query
    scale, softcap, num_seqs,
    stride_table, stride_q_token, stride_q_head, stride_pe_token, stride_pe_head, stride_out_token, stride_out_head,
    stride_lse,
    NUM_Q_HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr, C_SLOT: tl.constexpr, ROPE_SLOT: tl.constexpr, WIDE_OFFSETS: tl.constexpr,
    SCORE_MOD: tl.constexpr, DECODE: tl.constexpr, DECODE_ROPE: tl.constexpr, PARTS: tl.constexpr,
    SCALED: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_SIZE: tl.constexpr, ARE_SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # this kernel may start before the previous one in the stream has ended
        gdc_wait()
    T: tl.constexpr = LatentTiling(
        BLOCK_N, PAGE_SIZE, RANK, ROPE, BLOCK_C, BLOCK_R, C_SLOT, ROPE_SLOT, WIDE_OFFSETS, SCORE_MOD, DECODE,
        DECODE_ROPE, False, PARTS, SCALED, INPUT_PRECISION, False,
    )  # fmt: skip
    rows, _, place, owned = find_place(kv, lists, cu_seqlens_q, num_seqs, stride_table, 1, NUM_Q_HEADS, BLOCK_M, CAUSAL)
    if not owned:
        return
    head = rows.head.to(tl.int64)
    q = load_query_parts(q_ptr + rows.token * stride_q_token + head * stride_q_head, rows.owned, T)
    q_pe = None
    if ROPE > 0:
        q_pe = load_rows(q_pe_ptr + rows.token * stride_pe_token + head * stride_pe_head, rows.owned, ROPE, BLOCK_R)
    v_scale = 1.0
    if latents.scale is not None and not SCALED:
        v_scale = tl.load(latents.scale)
        scale = scale * v_scale
    scoring = Scoring(scale, LOG2E if SCORE_MOD is not None else scale * LOG2E, softcap, 0, 0)
    acc, m_i, l_i = empty_parts(BLOCK_M, T)
    for pos in tl.range(0, place.count * BLOCK_SIZE, BLOCK_N):
        page, slot, keep = find_keys(place, pos, PAGE_SIZE, BLOCK_SIZE, ARE_SLOTS, BLOCK_N)
        acc, m_i, l_i = attend_rows_of_latents(acc, m_i, l_i, q, q_pe, latents, kv, page, slot, keep, scoring, T)
    acc, m_i, l_i = join_parts(acc, m_i, l_i, BLOCK_M, T)
    if PDL:
        gdc_launch_dependents()
    outputs = Outputs(out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse)
    store_result(outputs, acc, m_i, l_i, v_scale, rows, (tl.arange(0, BLOCK_C),), RANK)
