"""Running states of attention: fold in the scores of a tile, combine two states, finish one and store it.

A running state is `(acc, m_i, l_i)`: acc is the output before normalisation, m_i is the maximum of the scores as a
base-2 exponent, and l_i is the sum of exponentials relative to m_i. An empty state has m_i = -inf. The names are those
of FlashAttention-2 (arXiv 2307.08691, section 3.1).

acc is a tuple of tensors, one for each panel of the output's columns (`panels.py`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels import mods
from quire.kernels.panels import is_turned, num_panels, panel_width

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MOST_SUM = tl.constexpr(2.0**60)  # of a row over keys with which its maximum is kept; times a value, below 2^127


class Outputs(NamedTuple):
    """The tensors of results, their strides, and the sinks."""

    out_ptr: Any  # [num_tokens, num_q_heads, HEAD_DIM_V]
    out_scale_ptr: Any  # [1] float32 where out is e4m3, or None
    lse_ptr: Any  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr: Any  # [num_q_heads], or None
    stride_token: Any
    stride_head: Any
    stride_lse: Any


@triton.jit
def empty_state(
    BLOCK_M: tl.constexpr, HEAD_DIM_V: tl.constexpr, EACH: tl.constexpr, MOST: tl.constexpr, SUMS: tl.constexpr = 1
):
    """Return the state over no keys. Where a stored element is EACH = 2 numbers, panels are even and odd columns.

    A panel has at most MOST stored elements, if that is not 0.

    With SUMS > 1, l_i has that many sums for each row, of some keys each: those of `sums_of_columns`, or those of
    `sums_of_groups`, which batch-invariant plans have.
    """
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M] if SUMS == 1 else [BLOCK_M, SUMS], tl.float32)
    acc = ()
    for i in tl.static_range(num_panels(HEAD_DIM_V, EACH, BLOCK_M, MOST) * EACH):
        acc = acc + (tl.zeros([BLOCK_M, panel_width(HEAD_DIM_V, EACH, BLOCK_M, MOST, i // EACH)], tl.float32),)
    return acc, m_i, l_i


@triton.jit
def softmax_step(
    acc, m_i, l_i, scores, v, v_scale, exponent_scale, PACKED_FP8: tl.constexpr, INPUT_PRECISION: tl.constexpr
):
    """Fold one tile of scores [M, N] and values, a tuple of panels [N, width], into a running state.

    `scores * exponent_scale` are base-2 exponents.
    """
    # m_i need not be the exact maximum. 12 bits of headroom keep small float16 probabilities from vanishing.
    HEADROOM: tl.constexpr = 12 if PACKED_FP8 else 0
    m_new = tl.maximum(m_i, tl.max(scores, 1) * exponent_scale - HEADROOM)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key: -inf - -inf is NaN
    p = tl.exp2(scores * exponent_scale - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    l_i = add_sums(l_i, alpha, p)
    if v_scale is not None:
        p = p * v_scale[None, :]
    p = p.to(v[0].dtype)
    new_acc = ()
    for i in tl.static_range(len(acc)):
        new_acc = new_acc + (add_product(acc[i], alpha, p, v[i], INPUT_PRECISION),)
    return new_acc, m_new, l_i


@triton.jit
def kept_step(acc, m_i, l_i, scores, v, exponent_scale, INPUT_PRECISION: tl.constexpr):
    """Do what `softmax_step` does, but let rows keep the maxima that they have: exponents may be above 0.

    So nothing is compared and nothing rescaled. Numbers have the range of float32 here. The caller asks `is_too_large`
    afterwards.
    """
    p = tl.exp2(scores * exponent_scale - tl.where(m_i == float("-inf"), 0.0, m_i)[:, None])
    l_i = add_sums(l_i, None, p)
    p = p.to(v[0].dtype)
    new_acc = ()
    for i in tl.static_range(len(acc)):
        new_acc = new_acc + (add_product(acc[i], None, p, v[i], INPUT_PRECISION),)
    return new_acc, m_i, l_i


@triton.jit
def is_too_large(l_i):
    """Return whether any row's sum is so much above its maximum that its results may be inexact or infinite."""
    if len(l_i.shape) == 2:
        l_i = tl.max(l_i, 1)
    return tl.max(l_i, 0) > MOST_SUM


@triton.jit
def add_sums(l_i, alpha, p):
    """Return the sums of each row, times its alpha, plus those of p [M, N]; l_i is as in `empty_state`."""
    if alpha is None:  # 1
        return l_i + (tl.sum(p, 1) if len(l_i.shape) == 1 else sums_of_columns(p, l_i.shape[1]))
    elif len(l_i.shape) == 1:
        return l_i * alpha + tl.sum(p, 1)
    elif l_i.shape[1] == num_sums(p.shape[0], p.shape[1]):
        return l_i * alpha[:, None] + sums_of_columns(p, l_i.shape[1])
    else:
        return tl.fma(l_i, alpha[:, None] + tl.zeros_like(l_i), sums_of_groups(p, l_i.shape[1]))


@triton.jit
def add_product(acc, alpha, p, v, INPUT_PRECISION: tl.constexpr):
    """Return acc [M, width], each row times its alpha, plus the product of p [M, N] and v [N, width].

    If the product is turned (`panels.is_turned`), v is [width, N].

    A product of float32 numbers adds one after the other. So it begins with zero: over 2,048 keys, a sum that runs on
    from tile to tile has an error of 2.8e-7, and sums of 32 keys one of 0.9e-7.
    """
    TURNED: tl.constexpr = is_turned(acc.shape[0])
    if v.dtype == tl.float32 and INPUT_PRECISION == "ieee":
        product = multiply(p, v, None, TURNED, INPUT_PRECISION)
        if alpha is None:  # 1
            return acc + product
        else:
            return tl.fma(acc, alpha[:, None] + tl.zeros_like(acc), product)
    elif alpha is None:
        return multiply(p, v, acc, TURNED, INPUT_PRECISION)
    else:
        return multiply(p, v, acc * alpha[:, None], TURNED, INPUT_PRECISION)


@triton.jit
def multiply(a, b, acc, TURNED: tl.constexpr, INPUT_PRECISION: tl.constexpr):
    """Return the product of a [M, K] and b [K, N] plus acc, which may be None. If TURNED, b is [N, K], and is left."""
    if not TURNED:
        return tl.dot(a, b, acc, input_precision=INPUT_PRECISION)
    elif acc is None:
        return tl.trans(tl.dot(b, tl.trans(a), input_precision=INPUT_PRECISION))
    else:
        return tl.trans(tl.dot(b, tl.trans(a), tl.trans(acc), input_precision=INPUT_PRECISION))


@triton.constexpr_function
def log2(n):
    """Return the exponent of a power of two."""
    return n.bit_length() - 1


@triton.constexpr_function
def num_sums(rows, columns):
    """Return how many sums of each row `sums_of_columns` makes of a tile of so many columns.

    Where four warps share the columns of 16 rows, or one warp has turned products, each of these sums is of numbers
    that one thread has. So a tile needs no exchange between threads for them, and only one between warps, for the
    maxima.
    """
    return min(8 if is_turned(rows) else 32, columns)


@triton.jit
def sums_of_columns(p, SUMS: tl.constexpr):
    """Return sums of the columns of p that are a multiple of SUMS apart, [M, SUMS]."""
    for _ in tl.static_range(log2(p.shape[1] // SUMS)):
        p = tl.sum(tl.reshape(p, [p.shape[0], 2, p.shape[1] // 2]), 1)
    return p


@triton.constexpr_function
def groups_of(columns):
    """Return how many groups `sums_of_groups` makes of a tile's columns."""
    return min(4, columns // 8)


@triton.jit
def sums_of_groups(p, SUMS: tl.constexpr):
    """Return sums over groups of the columns of p, [M, SUMS].

    Each addition has two terms. So the bits do not depend on how the compiler spreads p over threads, as those of
    `tl.sum` do. Column n is in group n // 8 % SUMS, so that a warp has a group to itself where warps share the columns.
    """
    p = sums_of_columns(p, 8 * SUMS)
    for _ in tl.static_range(3):
        p = tl.sum(tl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]), 2)
    return p


@triton.jit
def total(sums):
    """Return the sum of each row's sums, [M, SUMS]; the order does not depend on the layout."""
    for _ in tl.static_range(log2(sums.shape[1])):
        sums = tl.sum(tl.reshape(sums, [sums.shape[0], sums.shape[1] // 2, 2]), 2)
    return tl.reshape(sums, [sums.shape[0]])


@triton.jit
def combine(acc, m_i, l_i, other_acc, other_m, other_l):
    """Combine two states over disjoint keys: rescale both to the larger maximum and add."""
    m_new = tl.maximum(m_i, other_m)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = tl.exp2(m_i - shift), tl.exp2(other_m - shift)
    # An explicit fma, so that all kernels round alike, whatever the compiler fuses around it.
    l_i = tl.fma(l_i, alpha, other_l * beta)
    new_acc = ()
    for i in tl.static_range(len(acc)):
        alphas = alpha[:, None] + tl.zeros_like(acc[i])
        new_acc = new_acc + (tl.fma(acc[i], alphas, other_acc[i] * beta[:, None]),)
    return new_acc, m_new, l_i


@triton.jit
def combine_at_once(acc, m_i, l_i, accs, ms, ls):
    """Combine a state of one row, [columns], with the states `accs`, [number, columns], of which empty ones are 0.

    All are rescaled to one maximum.
    """
    m_new = tl.maximum(m_i, tl.max(ms, 0))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, betas = tl.exp2(m_i - shift), tl.exp2(ms - shift)
    return acc * alpha + tl.sum(accs * betas[:, None], 0), m_new, l_i * alpha + tl.sum(ls * betas, 0)


@triton.jit
def fold_split(acc, m_i, l_i, split_acc, split_m, split_l):
    """Add the state of a split to the state of those before it. Batch-invariant results are such left folds."""
    return combine(acc, m_i, l_i, split_acc, split_m, total(split_l))


@triton.jit
def finish(acc, m_i, l_i, ONE_ZERO: tl.constexpr):
    """Normalise a state: return (out, lse), 0 and -inf where no key was seen, NaN where a score was.

    out is a tuple of panels, as acc is. ONE_ZERO: -0 becomes 0. States over no keys make it so too, and a launch of a
    batch-invariant plan may have added some or none.
    """
    empty = l_i == 0.0
    safe = tl.where(empty, 1.0, l_i)
    inverse = 1.0 / safe
    # One Newton step: the error of `/` on a GPU is up to two units in the last place.
    inverse = tl.fma(inverse, tl.fma(-safe, inverse, tl.zeros_like(safe) + 1.0), inverse)
    out = ()
    for i in tl.static_range(len(acc)):
        if ONE_ZERO:
            zeros = tl.zeros_like(acc[i])
            out = out + (tl.fma(acc[i], inverse[:, None] + zeros, zeros),)
        else:
            out = out + (acc[i] * inverse[:, None],)
    lse = tl.where(empty, float("-inf"), tl.fma(m_i, tl.zeros_like(m_i) + LN2, tl.log(safe)))
    return out, lse


@triton.jit
def encode(x, scale, ENCODE: tl.constexpr):
    """Return numbers as a quantised cache stores them."""
    x = x.to(tl.float32)
    if scale is not None:
        x = tl.div_rn(x, scale)
    return ENCODE(x)


@triton.jit
def as_stored(out, out_scale_ptr, element: tl.constexpr):
    """Return results as the output holds them. With a scale, they are quantised to e4m3, whose bits may be uint8."""
    if out_scale_ptr is None:
        return out.to(element)
    elif element == tl.uint8:
        return encode(out, tl.load(out_scale_ptr), mods.to_e4m3_in_software)
    else:
        return encode(out, tl.load(out_scale_ptr), mods.to_e4m3)


@triton.jit
def store_result(
    outputs, acc, m_i, l_i, v_scale, rows, columns, HEAD_DIM_V: tl.constexpr, ONE_ZERO: tl.constexpr = False
):  # fmt: skip
    """Finish a state and write its rows to `outputs`; `columns` are those that each panel of acc holds."""
    if outputs.sinks_ptr is not None:  # one more key, of score sink[h] and value 0
        sink = tl.load(outputs.sinks_ptr + rows.head, mask=rows.owned, other=0.0).to(tl.float32) * LOG2E
        zeros = ()
        for i in tl.static_range(len(acc)):
            zeros = zeros + (tl.zeros_like(acc[i]),)
        acc, m_i, l_i = combine(acc, m_i, l_i, zeros, sink, tl.zeros_like(sink) + 1.0)
    out, lse = finish(acc, m_i, l_i, ONE_ZERO)
    ptrs = outputs.out_ptr + (rows.token * outputs.stride_token + rows.head.to(tl.int64) * outputs.stride_head)[:, None]
    for i in tl.static_range(len(out)):
        stored = as_stored(out[i] * v_scale, outputs.out_scale_ptr, outputs.out_ptr.dtype.element_ty)
        inside = rows.owned[:, None] & (columns[i] < HEAD_DIM_V)[None, :]
        tl.store(ptrs + columns[i][None, :], stored, mask=inside)
    if outputs.lse_ptr is not None:
        tl.store(outputs.lse_ptr + rows.token * outputs.stride_lse + rows.head, lse, mask=rows.owned)
