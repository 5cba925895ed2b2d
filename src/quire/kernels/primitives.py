"""The steps of paged attention: find the sequence, find the page, one online-softmax step, merge partial states, finish.

Each is a jit function that reads as its formula; `attention.py` strings them together. A running state is `(acc, m, denom)`: acc not
normalised, m the maximum of the scores in base-2 exponents, denom the sum of exponentials relative to m. An empty state has m = -inf.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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
def softmax_step(acc, m, denom, scores, v, v_scale, exponent_scale, INPUT_PRECISION: tl.constexpr):
    """Fold one tile of scores [M, N] and values [N, DV] into a running state; `scores * exponent_scale` are base-2 exponents."""
    m_new = tl.maximum(m, tl.max(scores, 1) * exponent_scale)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key: -inf - -inf is NaN
    p = tl.exp2(scores * exponent_scale - shift[:, None])
    alpha = tl.exp2(m - shift)
    denom = denom * alpha + tl.sum(p, 1)
    if v_scale is not None:
        p = p * v_scale[None, :]
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=INPUT_PRECISION)
    return acc, m_new, denom


@triton.jit
def merge(acc, m, denom, other_acc, other_m, other_denom):
    """Join two states over disjoint keys: rescale both to the shared maximum and add."""
    m_new = tl.maximum(m, other_m)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = tl.exp2(m - shift), tl.exp2(other_m - shift)
    return acc * alpha[:, None] + other_acc * beta[:, None], m_new, denom * alpha + other_denom * beta


@triton.jit
def finish(acc, m, denom):
    """Normalise a state: return (out, lse), 0 and -inf where no key was seen."""
    seen = denom > 0.0
    safe = tl.where(seen, denom, 1.0)
    inverse = 1.0 / safe
    inverse += inverse * (1.0 - safe * inverse)  # a Newton step, since `/` on a GPU is good to two units in the last place
    out = acc * inverse[:, None]
    lse = tl.where(seen, m * LN2 + tl.log(safe), float("-inf"))
    return out, lse
