"""Normalise and rotate heads on their way from memory to registers: RMSNorm over a head, then a rotary embedding.

All is computed in float32 and rounded once, to the dtype of the heads. Products that are added are fused by hand, and
sums are of pairs, in an order that does not depend on which thread holds which element. So every kernel that rotates a
head gets the same bits.
"""

import triton
import triton.language as tl


@triton.jit
def load_rotated(
    ptrs, inside, token, weight, norm_rope, offs_d,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Load columns of heads, rotated.

    Args:
        ptrs: [rows], where the heads begin.
        inside: [rows], which of them there are; the others are 0.
        token: [rows], the token of each.
        weight: pointer to [DIM], or None to leave the norm out.
        norm_rope: views.NormRope.
        offs_d: columns to load.
        DIM: of a head.
        BLOCK: DIM, padded to a power of two.
        ROTARY_DIM: columns that are rotated; 0 to leave the rotation out.
        INTERLEAVED: pairs are (2i, 2i + 1).
    """
    keep = inside[:, None] & (offs_d < DIM)[None, :]
    loaded = tl.load(ptrs[:, None] + offs_d[None, :], mask=keep, other=0.0)
    x = loaded.to(tl.float32)
    if weight is not None:
        scale = inverse_rms(ptrs, inside, norm_rope.eps, DIM, BLOCK)
        # A scale is not negative, so this adds 0. The compiler cannot know that. So it loads weights after the scale is
        # computed, and not into registers that are needed before.
        weight += tl.multiple_of((tl.max(scale, 0) < 0).to(tl.int32), 16)
        x = x * scale[:, None] * tl.load(weight + offs_d, mask=offs_d < DIM, other=0.0).to(tl.float32)[None, :]
    if ROTARY_DIM > 0:
        if INTERLEAVED:
            angle, is_first = offs_d // 2, offs_d % 2 == 0
            other_d = offs_d ^ 1
        else:
            HALF: tl.constexpr = ROTARY_DIM // 2
            angle, is_first = offs_d % HALF, offs_d < HALF
            other_d = (offs_d + HALF) % ROTARY_DIM
        in_pairs = inside[:, None] & (offs_d < ROTARY_DIM)[None, :]
        other = tl.load(ptrs[:, None] + other_d[None, :], mask=in_pairs, other=0.0).to(tl.float32)
        if weight is not None:
            factor = tl.load(weight + other_d, mask=offs_d < ROTARY_DIM, other=0.0).to(tl.float32)
            other = other * scale[:, None] * factor[None, :]
        position = tl.load(norm_rope.positions + token, mask=inside, other=0).to(tl.int64)
        position = tl.minimum(tl.maximum(position, 0), norm_rope.max_positions - 1)
        cos_ptrs = norm_rope.cos + (position * norm_rope.cos_row)[:, None] + angle[None, :]
        sin_ptrs = norm_rope.sin + (position * norm_rope.sin_row)[:, None] + angle[None, :]
        cos = tl.load(cos_ptrs, mask=in_pairs, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptrs, mask=in_pairs, other=0.0).to(tl.float32)
        # The first of a pair becomes x cos - other sin, the second x cos + other sin.
        rotated = tl.fma(x, cos, other * tl.where(is_first[None, :], -sin, sin))
        x = tl.where(in_pairs, rotated, x) if ROTARY_DIM < DIM else rotated
    return x.to(loaded.dtype)


@triton.jit
def inverse_rms(ptrs, inside, eps, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return 1 / sqrt(mean(x²) + eps) of each head that begins at `ptrs`."""
    offs_d = tl.arange(0, BLOCK)
    x = tl.load(ptrs[:, None] + offs_d[None, :], mask=inside[:, None] & (offs_d < DIM)[None, :], other=0.0)
    x = x.to(tl.float32)
    total = tl.fma(x, x, tl.zeros_like(x))  # not x * x, which might be fused with a sum
    for i in tl.static_range(10):
        if BLOCK >> i > 1:  # sums of two, so that their order is the same in every layout
            total = tl.sum(tl.reshape(total, [x.shape[0], BLOCK >> (i + 1), 2]), 2)
    total = tl.reshape(total, [x.shape[0]])
    zero = tl.zeros_like(total)
    mean = tl.fma(total, zero + 1.0 / DIM, zero + eps)
    root = tl.rsqrt(mean)
    # One Newton step: the error of a GPU's rsqrt is up to two units in the last place.
    return tl.fma(root, tl.fma(-0.5 * mean * root, root, zero + 0.5), root)
