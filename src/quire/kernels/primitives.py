"""The steps of paged attention: find the pages, attend to one tile of keys, merge partial states, finish.

Each is a jit function that reads as its formula; `blocks.py` and `shares.py` string them together. A running state is `(acc, m, denom)`: acc not
normalised, m the maximum of the scores in base-2 exponents, denom the sum of exponentials relative to m. An empty state has m = -inf.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_pages(row, tile, kv_start, kv_stop, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page of each key of the tile that begins at position `tile`; 0 outside [kv_start, kv_stop). `row` points at the table row.

    Kernels call this one tile ahead, so that the loads of K and V never wait behind it.
    """
    if PAGE_SIZE % BLOCK_N == 0:  # the tile lies in one page
        return tl.load(row + tile // PAGE_SIZE, mask=tile < kv_stop, other=0)
    else:
        kv_pos = tile + tl.arange(0, BLOCK_N)
        return tl.load(row + kv_pos // PAGE_SIZE, mask=(kv_pos >= kv_start) & (kv_pos < kv_stop), other=0)


@triton.jit
def dim_offsets(offs_d, stride_run, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """Return where the elements of a head lie, which come in runs of RUN side by side."""
    if RUN * 2 > BLOCK:  # a head is contiguous
        return offs_d
    return offs_d // RUN * stride_run + offs_d % RUN


@triton.jit
def load_queries(ptrs, owned, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAIRS: tl.constexpr):
    """Load the queries of a block, whose rows begin at `ptrs`; with PAIRS their even and odd dims as float16, and the power of two they were divided by."""
    if PAIRS:
        offs_d = 2 * tl.arange(0, BLOCK_D // 2)
        keep = owned[:, None] & (offs_d < HEAD_DIM)[None, :]
        even = tl.load(ptrs[:, None] + offs_d[None, :], mask=keep, other=0.0).to(tl.float32)
        odd = tl.load(ptrs[:, None] + (offs_d + 1)[None, :], mask=keep, other=0.0).to(tl.float32)
        # The largest of a row goes to 2^13, so that those down to 2^-27 of it are exact in float16.
        peak = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
        exponent = tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 14)
        down = ((267 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^(13 - e), e = exponent - 127
        up = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
        return (even * down[:, None]).to(tl.float16), (odd * down[:, None]).to(tl.float16), up
    else:
        offs_d = tl.arange(0, BLOCK_D)
        return tl.load(ptrs[:, None] + offs_d[None, :], mask=owned[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, PAIRS: tl.constexpr):
    """Return the state over no keys; with PAIRS its acc is two, of the even and the odd columns."""
    m, denom = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if PAIRS:
        return (tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32), tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)), m, denom
    else:
        return tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), m, denom


@triton.jit
def whole(acc, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, PAIRS: tl.constexpr):
    """Return acc as one, its columns in order."""
    if PAIRS:
        even, odd = acc
        return tl.reshape(tl.join(even, odd), [BLOCK_M, BLOCK_DV])
    else:
        return acc


@triton.jit
def attend_tile(
    acc, m, denom, q, kv, page, tile, kv_head, q_pos, slopes, kv_start, kv_stop, exponent_scale, scale, softcap, back, ahead,
    MASKED: tl.constexpr, BAND: tl.constexpr, SCORE_MOD: tl.constexpr, DECODE: tl.constexpr, PAIRS: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_RUN: tl.constexpr, V_RUN: tl.constexpr,
):  # fmt: skip
    """Load the tile of keys that begins at position `tile` and fold it into the state; without masks where every row sees every key."""
    kv_pos = tile + tl.arange(0, BLOCK_N)
    # Keys that no row sees may lie in pages that were freed or never written. They must not be read: 0 * NaN is NaN.
    keep = (kv_pos >= kv_start) & (kv_pos < kv_stop)
    slot = (tl.arange(0, BLOCK_N) if BLOCK_N % PAGE_SIZE == 0 else kv_pos) % PAGE_SIZE  # the former is the same in every tile
    EACH: tl.constexpr = 2 if PAIRS else 1  # numbers in a stored element
    offs_d, offs_dv = tl.arange(0, BLOCK_D // EACH), tl.arange(0, BLOCK_DV // EACH)
    page = page.to(tl.int64)  # page * stride passes 2^31
    offs_k = slot * kv.k_slot + kv_head * kv.k_head + page * kv.k_page
    offs_v = offs_k
    if kv.v_page is not None:
        offs_v = slot * kv.v_slot + kv_head * kv.v_head + page * kv.v_page
    k_ptrs = kv.k + offs_k[:, None] + dim_offsets(offs_d, kv.k_run, K_RUN, BLOCK_D // EACH)[None, :]
    v_ptrs = kv.v + offs_v[:, None] + dim_offsets(offs_dv, kv.v_run, V_RUN, BLOCK_DV // EACH)[None, :]
    k = load_tile(k_ptrs, keep, offs_d, MASKED, HEAD_DIM // EACH, BLOCK_D // EACH)
    v = load_tile(v_ptrs, keep, offs_dv, MASKED, HEAD_DIM_V // EACH, BLOCK_DV // EACH)
    if PAIRS:
        q_even, q_odd, q_scale = q
        k_even, k_odd = DECODE(k)
        v = DECODE(v)
        scores = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q_even, tl.trans(k_even))) * q_scale[:, None]  # [BLOCK_M, BLOCK_N]
    else:
        v = DECODE(v, q.dtype)
        scores = tl.dot(q, tl.trans(DECODE(k, q.dtype)), input_precision=INPUT_PRECISION)  # [BLOCK_M, BLOCK_N]
    v_scale = None
    if TOKEN_SCALES:
        offs_scale = page * kv.scale_page + slot * kv.scale_slot + kv_head * kv.scale_head
        scores *= tl.load(kv.k_scale + offs_scale, mask=keep, other=0.0)[None, :]
        v_scale = tl.load(kv.v_scale + offs_scale, mask=keep, other=0.0)
    if SCORE_MOD is not None:
        scores = SCORE_MOD(scores * scale, q_pos, kv_pos, slopes, softcap)
    if MASKED:
        visible = keep[None, :]
        if BAND:  # rows of several query tokens, which see different keys
            visible = visible & (kv_pos[None, :] >= q_pos[:, None] - back) & (kv_pos[None, :] <= q_pos[:, None] + ahead)
        scores = tl.where(visible, scores, float("-inf"))
    return softmax_step(acc, m, denom, scores, v, v_scale, exponent_scale, PAIRS, INPUT_PRECISION)


@triton.jit
def load_tile(ptrs, keep, offs_d, MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    if MASKED and DIM == BLOCK:
        return tl.load(ptrs, mask=keep[:, None], other=0.0)
    if MASKED:
        return tl.load(ptrs, mask=keep[:, None] & (offs_d < DIM)[None, :], other=0.0)
    if DIM == BLOCK:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(offs_d < DIM)[None, :], other=0.0)


@triton.jit
def softmax_step(acc, m, denom, scores, v, v_scale, exponent_scale, PAIRS: tl.constexpr, INPUT_PRECISION: tl.constexpr):
    """Fold one tile of scores [M, N] and values [N, DV] into a running state; `scores * exponent_scale` are base-2 exponents."""
    # Any m near the maximum will do. With float16 probabilities, one below it keeps those of long tails from vanishing: at most 2^12, not 1.
    HEADROOM: tl.constexpr = 12 if PAIRS else 0
    m_new = tl.maximum(m, tl.max(scores, 1) * exponent_scale - HEADROOM)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key: -inf - -inf is NaN
    p = tl.exp2(scores * exponent_scale - shift[:, None])
    alpha = tl.exp2(m - shift)
    denom = denom * alpha + tl.sum(p, 1)
    if v_scale is not None:
        p = p * v_scale[None, :]
    if PAIRS:
        even, odd = acc
        v_even, v_odd = v
        p = p.to(tl.float16)
        return (tl.dot(p, v_even, even * alpha[:, None]), tl.dot(p, v_odd, odd * alpha[:, None])), m_new, denom
    else:
        return tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=INPUT_PRECISION), m_new, denom


@triton.jit
def merge(acc, m, denom, other_acc, other_m, other_denom, PAIRS: tl.constexpr = False):
    """Join two states over disjoint keys: rescale both to the shared maximum and add."""
    m_new = tl.maximum(m, other_m)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = tl.exp2(m - shift), tl.exp2(other_m - shift)
    # Fused by hand, so that every kernel rounds alike, whatever the compiler makes of the rest.
    denom = tl.fma(denom, alpha, other_denom * beta)
    if PAIRS:
        even, odd = acc
        other_even, other_odd = other_acc
        return (weighted_sum(even, alpha, other_even, beta), weighted_sum(odd, alpha, other_odd, beta)), m_new, denom
    else:
        return weighted_sum(acc, alpha, other_acc, beta), m_new, denom


@triton.jit
def weighted_sum(acc, alpha, other, beta):
    return tl.fma(acc, alpha[:, None] + tl.zeros_like(acc), other * beta[:, None])


@triton.jit
def finish(acc, m, denom):
    """Normalise a state: return (out, lse), 0 and -inf where no key was seen."""
    seen = denom > 0.0
    safe = tl.where(seen, denom, 1.0)
    inverse = 1.0 / safe  # and a Newton step, since `/` on a GPU is good to two units in the last place
    inverse = tl.fma(inverse, tl.fma(-safe, inverse, tl.zeros_like(safe) + 1.0), inverse)
    out = acc * inverse[:, None]
    lse = tl.where(seen, tl.fma(m, tl.zeros_like(m) + LN2, tl.log(safe)), float("-inf"))
    return out, lse


@triton.jit
def store_result(
    out_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse, acc, m, denom, v_scale,
    token, head, owned, offs_dv, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """Finish a state and write columns `offs_dv` of its rows; `token` is int64."""
    if sinks_ptr is not None:  # one more key, of score sink[h] and value 0
        sink = tl.load(sinks_ptr + head, mask=owned, other=0.0).to(tl.float32) * LOG2E
        acc, m, denom = merge(acc, m, denom, tl.zeros_like(acc), sink, tl.zeros_like(sink) + 1.0)
    out, lse = finish(acc, m, denom)
    ptrs = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + offs_dv[None, :]
    tl.store(ptrs, (out * v_scale).to(out_ptr.dtype.element_ty), mask=owned[:, None] & (offs_dv < HEAD_DIM_V)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + token * stride_lse + head, lse, mask=owned)
