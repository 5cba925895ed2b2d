"""Score mods and decoders: features as small jit functions that a plan hands to the kernel.

A score mod turns scaled scores into scores; a decoder turns stored cache elements into numbers. Which keys are visible needs no mod: causal,
bidirectional and windows on either side are one band `q_pos - back <= kv_pos <= q_pos + ahead`, two run-time numbers.
"""

import torch
import triton
import triton.language as tl

from quire.spec import AttentionSpec


@triton.jit
def tanh(x):
    # Without libdevice, which the interpreter lacks. Near 0, where 1 - e cancels, the series is exact to float32.
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))  # exp(-2|x|)
    large = (1.0 - e) / (1.0 + e)
    x2 = x * x
    small = tl.abs(x) * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    y = tl.where(x2 < 0.0625, small, large)
    return tl.where(x < 0, -y, y)


@triton.jit
def softcap(scores, q_pos, kv_pos, slopes, cap):
    return cap * tanh(scores / cap)


@triton.jit
def alibi(scores, q_pos, kv_pos, slopes, cap):
    return scores - slopes[:, None] * tl.abs(q_pos[:, None] - kv_pos[None, :]).to(tl.float32)


@triton.jit
def softcap_alibi(scores, q_pos, kv_pos, slopes, cap):
    return alibi(softcap(scores, q_pos, kv_pos, slopes, cap), q_pos, kv_pos, slopes, cap)


@triton.jit
def native(x, dtype: tl.constexpr):
    return x.to(dtype)


@triton.jit
def e4m3_in_software(x, dtype: tl.constexpr):
    # Sign to the top, exponent and mantissa in place of float16's, subnormals included; the exponent bias differs by 8: times 2^8, exact.
    bits = x.to(tl.uint16)
    magnitude = bits & 0x7F
    half = (((bits & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), half).to(dtype)


@triton.jit
def e5m2_in_software(x, dtype: tl.constexpr):
    return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)  # float16's upper byte


SCORE_MODS = {(False, False): None, (True, False): softcap, (False, True): alibi, (True, True): softcap_alibi}
SOFTWARE_DECODERS = {torch.float8_e4m3fn: e4m3_in_software, torch.float8_e5m2: e5m2_in_software}


def score_mod(spec: AttentionSpec):
    """Return the score mod of a spec, or None."""
    return SCORE_MODS[spec.softcap is not None, spec.alibi]


def decoder(dtype: torch.dtype, native_fp8: bool):
    """Return the function that turns stored elements of `dtype` into numbers; in software where the target has no such type."""
    return native if native_fp8 or dtype not in SOFTWARE_DECODERS else SOFTWARE_DECODERS[dtype]
