"""The steps of paged attention: find the pages, attend to one tile of keys, merge partial states, finish.

Each is a jit function that reads as its formula; `blocks.py` and `shares.py` string them together. A running state is `(acc, m_i, l_i)`: acc not
normalised, m_i the maximum of the scores in base-2 exponents, l_i the sum of exponentials relative to m_i. An empty state has m_i = -inf.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_pages(row, tile, kv_start, kv_stop, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page of each key of the tile that begins at position `tile`; 0 outside [kv_start, kv_stop). `row` points at the table row.

    Kernels call this one tile window_right, so that the loads of K and V never wait behind it.
    """
    if PAGE_SIZE % BLOCK_N == 0:  # the tile lies in one page
        return tl.load(row + tile // PAGE_SIZE, mask=tile < kv_stop, other=0)
    else:
        kv_pos = tile + tl.arange(0, BLOCK_N)
        return tl.load(row + kv_pos // PAGE_SIZE, mask=(kv_pos >= kv_start) & (kv_pos < kv_stop), other=0)


@triton.jit
def dim_offsets(offs_d, stride_vec, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Return where the elements of a head lie, which come in runs of VEC side by side."""
    if VEC * 2 > BLOCK:  # a head is contiguous
        return offs_d
    return offs_d // VEC * stride_vec + offs_d % VEC


@triton.jit
def load_queries(ptrs, owned, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PACKED_FP8: tl.constexpr):
    """Load the queries of a block, whose rows begin at `ptrs`; with PACKED_FP8 their even and odd dims as float16, and the power of two they were divided by."""
    if PACKED_FP8:
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
def empty_state(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED_FP8: tl.constexpr):
    """Return the state over no keys; with PACKED_FP8 its acc is two, of the even and the odd columns."""
    m_i, l_i = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if PACKED_FP8:
        return (
            (tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32), tl.zeros([BLOCK_M, BLOCK_DV // 2], tl.float32)),
            m_i,
            l_i,
        )
    else:
        return tl.zeros([BLOCK_M, BLOCK_DV], tl.float32), m_i, l_i


@triton.jit
def join_even_odd(acc, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, PACKED_FP8: tl.constexpr):
    """Return acc as one, its columns in order."""
    if PACKED_FP8:
        even, odd = acc
        return tl.reshape(tl.join(even, odd), [BLOCK_M, BLOCK_DV])
    else:
        return acc


@triton.jit
def attend_tile(
    acc, m_i, l_i, q, kv, page, tile, kv_head, q_pos, slopes, kv_start, kv_stop, exponent_scale, scale, softcap, window_left, window_right,
    MASKED: tl.constexpr, PER_ROW_MASK: tl.constexpr, SCORE_MOD: tl.constexpr, DECODE: tl.constexpr, PACKED_FP8: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr,
):  # fmt: skip
    """Load the tile of keys that begins at position `tile` and fold it into the state; without masks where every row sees every key."""
    kv_pos = tile + tl.arange(0, BLOCK_N)
    # Keys that no row sees may lie in pages that were freed or never written. They must not be read: 0 * NaN is NaN.
    keep = (kv_pos >= kv_start) & (kv_pos < kv_stop)
    slot = (
        tl.arange(0, BLOCK_N) if BLOCK_N % PAGE_SIZE == 0 else kv_pos
    ) % PAGE_SIZE  # the former is the same in every tile
    EACH: tl.constexpr = 2 if PACKED_FP8 else 1  # numbers in a stored element
    offs_d, offs_dv = tl.arange(0, BLOCK_D // EACH), tl.arange(0, BLOCK_DV // EACH)
    page = page.to(tl.int64)  # page * stride passes 2^31
    offs_k = slot * kv.k_slot + kv_head * kv.k_head + page * kv.k_page
    offs_v = offs_k
    if kv.v_page is not None:
        offs_v = slot * kv.v_slot + kv_head * kv.v_head + page * kv.v_page
    k_ptrs = kv.k + offs_k[:, None] + dim_offsets(offs_d, kv.k_vec, K_VEC, BLOCK_D // EACH)[None, :]
    v_ptrs = kv.v + offs_v[:, None] + dim_offsets(offs_dv, kv.v_vec, V_VEC, BLOCK_DV // EACH)[None, :]
    k = load_tile(k_ptrs, keep, offs_d, MASKED, HEAD_DIM // EACH, BLOCK_D // EACH)
    v = load_tile(v_ptrs, keep, offs_dv, MASKED, HEAD_DIM_V // EACH, BLOCK_DV // EACH)
    if PACKED_FP8:
        q_even, q_odd, q_scale = q
        k_even, k_odd = DECODE(k)
        v = DECODE(v)
        scores = (
            tl.dot(q_odd, tl.trans(k_odd), tl.dot(q_even, tl.trans(k_even))) * q_scale[:, None]
        )  # [BLOCK_M, BLOCK_N]
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
        if PER_ROW_MASK:  # rows of several query tokens, which see different keys
            visible = (
                visible
                & (kv_pos[None, :] >= q_pos[:, None] - window_left)
                & (kv_pos[None, :] <= q_pos[:, None] + window_right)
            )
        scores = tl.where(visible, scores, float("-inf"))
    return softmax_step(acc, m_i, l_i, scores, v, v_scale, exponent_scale, PACKED_FP8, INPUT_PRECISION)


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
def softmax_step(
    acc, m_i, l_i, scores, v, v_scale, exponent_scale, PACKED_FP8: tl.constexpr, INPUT_PRECISION: tl.constexpr
):
    """Fold one tile of scores [M, N] and values [N, DV] into a running state; `scores * exponent_scale` are base-2 exponents."""
    # Any m_i near the maximum will do. With float16 probabilities, one below it keeps those of long tails from vanishing: at most 2^12, not 1.
    HEADROOM: tl.constexpr = 12 if PACKED_FP8 else 0
    m_new = tl.maximum(m_i, tl.max(scores, 1) * exponent_scale - HEADROOM)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key: -inf - -inf is NaN
    p = tl.exp2(scores * exponent_scale - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    l_i = l_i * alpha + tl.sum(p, 1)
    if v_scale is not None:
        p = p * v_scale[None, :]
    if PACKED_FP8:
        even, odd = acc
        v_even, v_odd = v
        p = p.to(tl.float16)
        return (tl.dot(p, v_even, even * alpha[:, None]), tl.dot(p, v_odd, odd * alpha[:, None])), m_new, l_i
    else:
        return tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=INPUT_PRECISION), m_new, l_i


@triton.jit
def merge(acc, m_i, l_i, other_acc, other_m, other_l, PACKED_FP8: tl.constexpr = False):
    """Join two states over disjoint keys: rescale both to the shared maximum and add."""
    m_new = tl.maximum(m_i, other_m)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = tl.exp2(m_i - shift), tl.exp2(other_m - shift)
    # Fused by hand, so that every kernel rounds alike, whatever the compiler makes of the rest.
    l_i = tl.fma(l_i, alpha, other_l * beta)
    if PACKED_FP8:
        even, odd = acc
        other_even, other_odd = other_acc
        return (weighted_sum(even, alpha, other_even, beta), weighted_sum(odd, alpha, other_odd, beta)), m_new, l_i
    else:
        return weighted_sum(acc, alpha, other_acc, beta), m_new, l_i


@triton.jit
def weighted_sum(acc, alpha, other, beta):
    return tl.fma(acc, alpha[:, None] + tl.zeros_like(acc), other * beta[:, None])


@triton.jit
def finish(acc, m_i, l_i):
    """Normalise a state: return (out, lse), 0 and -inf where no key was seen."""
    seen = l_i > 0.0
    safe = tl.where(seen, l_i, 1.0)
    inverse = 1.0 / safe  # and a Newton step, since `/` on a GPU is good to two units in the last place
    inverse = tl.fma(inverse, tl.fma(-safe, inverse, tl.zeros_like(safe) + 1.0), inverse)
    out = acc * inverse[:, None]
    lse = tl.where(seen, tl.fma(m_i, tl.zeros_like(m_i) + LN2, tl.log(safe)), float("-inf"))
    return out, lse


@triton.jit
def store_result(
    out_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse, acc, m_i, l_i, v_scale,
    token, head, owned, offs_dv, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """Finish a state and write columns `offs_dv` of its rows; `token` is int64."""
    if sinks_ptr is not None:  # one more key, of score sink[h] and value 0
        sink = tl.load(sinks_ptr + head, mask=owned, other=0.0).to(tl.float32) * LOG2E
        acc, m_i, l_i = merge(acc, m_i, l_i, tl.zeros_like(acc), sink, tl.zeros_like(sink) + 1.0)
    out, lse = finish(acc, m_i, l_i)
    ptrs = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + offs_dv[None, :]
    tl.store(ptrs, (out * v_scale).to(out_ptr.dtype.element_ty), mask=owned[:, None] & (offs_dv < HEAD_DIM_V)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + token * stride_lse + head, lse, mask=owned)
