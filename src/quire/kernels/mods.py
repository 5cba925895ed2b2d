"""Score mods and decoders: features as small jit functions that a plan hands to the kernel.

A score mod turns products of queries and keys, and the softmax scale, into scores. A decoder turns stored cache
elements into numbers; an encoder does the reverse. An fp8x2 decoder turns one 16-bit element into two fp8 numbers as
float16, which represents them exactly. So an fp8 cache reaches the tensor cores with half the instructions.

Visibility needs no mod. Causal, bidirectional and windowed attention are all `q_pos - window_left <= kv_pos <= q_pos +
window_right`, with two run-time numbers.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from quire.cache import PagedKVCache
from quire.cache_formats import Format
from quire.dispatch.device import DeviceProperties
from quire.kernels import formats
from quire.spec import AttentionSpec


@triton.jit
def tanh(x):
    # The interpreter lacks libdevice's tanh. Near 0, where 1 - e cancels, the series is exact to float32.
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))  # exp(-2|x|)
    large = (1.0 - e) / (1.0 + e)
    x2 = x * x
    small = tl.abs(x) * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    y = tl.where(x2 < 0.0625, small, large)
    return tl.where(x < 0, -y, y)


@triton.jit
def scaled(scores, scale, q_pos, kv_pos, slopes, cap):
    return scores * scale


@triton.jit
def softcap_in_float32(scores, scale, q_pos, kv_pos, slopes, cap):
    return cap * tanh(scores * scale / cap)


@triton.jit
def softcap(scores, scale, q_pos, kv_pos, slopes, cap):
    # tanh(x) = 1 - 2 / (exp(2x) + 1), whose absolute error is that of float32 near 1. So exponentials err by about
    # cap * 2^-22, which is far less than 16-bit probabilities do. A reciprocal of rsqrt needs no care of its range.
    r = tl.rsqrt(tl.exp2(scores * (scale * (2.8853900817779268 / cap))) + 1.0)
    return cap - 2.0 * cap * r * r


@triton.jit
def alibi(scores, scale, q_pos, kv_pos, slopes, cap):
    return scores * scale - slopes[:, None] * tl.abs(q_pos[:, None] - kv_pos[None, :]).to(tl.float32)


@triton.jit
def softcap_alibi_in_float32(scores, scale, q_pos, kv_pos, slopes, cap):
    capped = softcap_in_float32(scores, scale, q_pos, kv_pos, slopes, cap)
    return alibi(capped, 1.0, q_pos, kv_pos, slopes, cap)


@triton.jit
def softcap_alibi(scores, scale, q_pos, kv_pos, slopes, cap):
    return alibi(softcap(scores, scale, q_pos, kv_pos, slopes, cap), 1.0, q_pos, kv_pos, slopes, cap)


@triton.jit
def native(x, dtype: tl.constexpr):
    return x.to(dtype)


@triton.jit
def e4m3_in_software(x, dtype: tl.constexpr):
    # Move sign, exponent and mantissa to their places in float16, subnormals included. The exponent biases differ by 8:
    # multiply by 2^8, which is exact.
    bits = x.to(tl.uint16)
    magnitude = bits & 0x7F
    half = (((bits & 0x80) << 8) | (magnitude << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), half).to(dtype)


@triton.jit
def e5m2_in_software(x, dtype: tl.constexpr):
    return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)  # float16's upper byte


@triton.jit
def ue8m0(x):
    return (x.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3x2(x):
    # One instruction turns two bytes into two float16. It is written for each of them, and ptxas keeps one.
    # Triton 3.8 computes an operation with two results twice, in two layouts.
    even: tl.constexpr = "{ .reg .b32 both; .reg .b16 odd; cvt.rn.f16x2.e4m3x2 both, $1; mov.b32 {$0, odd}, both; }"
    odd: tl.constexpr = "{ .reg .b32 both; .reg .b16 even; cvt.rn.f16x2.e4m3x2 both, $1; mov.b32 {even, $0}, both; }"
    return (
        tl.inline_asm_elementwise(even, "=h,h", [x], dtype=tl.float16, is_pure=True, pack=1),
        tl.inline_asm_elementwise(odd, "=h,h", [x], dtype=tl.float16, is_pure=True, pack=1),
    )


@triton.jit
def e4m3x2_in_software(x):
    # Like `e4m3_in_software`, for two numbers in 16 bits. The largest is 448, so 2^8 times it is exact in float16.
    bits = x.to(tl.uint16, bitcast=True)
    even, odd = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7), (bits & 0x8000) | ((bits & 0x7F00) >> 1)
    even = tl.where((bits & 0x7F) == 0x7F, 0x7E00, even).to(tl.uint16)
    odd = tl.where((bits & 0x7F00) == 0x7F00, 0x7E00, odd).to(tl.uint16)
    return even.to(tl.float16, bitcast=True) * 256.0, odd.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def e5m2x2(x):
    bits = x.to(tl.uint16, bitcast=True)
    return (bits << 8).to(tl.float16, bitcast=True), (bits & 0xFF00).to(tl.float16, bitcast=True)


@triton.jit
def int4x4(x):
    # Of two elements in a register. Four bits that stay in place are a subnormal float16.
    a: tl.constexpr = "and.b32 $0, $1, 0x000F000F;"
    b: tl.constexpr = "and.b32 $0, $1, 0x00F000F0;"
    c: tl.constexpr = "{ .reg .b32 t; shr.b32 t, $1, 8; and.b32 $0, t, 0x000F000F; }"
    d: tl.constexpr = "{ .reg .b32 t; shr.b32 t, $1, 8; and.b32 $0, t, 0x00F000F0; }"
    return (
        tl.inline_asm_elementwise(a, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2),
        tl.inline_asm_elementwise(b, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2),
        tl.inline_asm_elementwise(c, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2),
        tl.inline_asm_elementwise(d, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2),
    )


@triton.jit
def int4x4_in_software(x):
    bits = x.to(tl.uint16, bitcast=True)
    return (
        (bits & 15).to(tl.float16), ((bits >> 4) & 15).to(tl.float16),
        ((bits >> 8) & 15).to(tl.float16), (bits >> 12).to(tl.float16),
    )  # fmt: skip


@triton.jit
def e2m1x4(x):
    # A sign, and then two bits of exponent and one of fraction where float16 has its last two and its first. Two shifts
    # and two masks move them in all four bytes at once, those of even columns or those of odd ones. A byte is the upper
    # half of a float16.
    a: tl.constexpr = """{
        .reg .b32 n; and.b32 n, $1, 0x0F0F0F0F; mad.lo.u32 n, n, 18, 0xF0F0F0F1;
        prmt.b32 n, n, 0, 0x2404; and.b32 $0, n, 0x8E008E00; }"""
    b: tl.constexpr = """{
        .reg .b32 s, m;
        shr.b32 m, $1, 3; and.b32 m, m, 0x0E0E0E0E; lop3.b32 s, $1, 0x80808080, m, 0xEA;
        prmt.b32 $0, s, 0, 0x2404; }"""
    c: tl.constexpr = """{
        .reg .b32 n; and.b32 n, $1, 0x0F0F0F0F; mad.lo.u32 n, n, 18, 0xF0F0F0F1; and.b32 $0, n, 0x8E008E00; }"""
    d: tl.constexpr = """{
        .reg .b32 s, m;
        shr.b32 m, $1, 3; and.b32 m, m, 0x0E0E0E0E; lop3.b32 s, $1, 0x80808080, m, 0xEA;
        and.b32 $0, s, 0xFF00FF00; }"""
    return (
        tl.inline_asm_elementwise(a, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2),
        tl.inline_asm_elementwise(b, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2),
        tl.inline_asm_elementwise(c, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2),
        tl.inline_asm_elementwise(d, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2),
    )


@triton.jit
def e2m1x4_in_software(x):
    bits = x.to(tl.uint16, bitcast=True)
    return e2m1(bits), e2m1(bits >> 4), e2m1(bits >> 8), e2m1(bits >> 12)


@triton.jit
def e2m1(bits):
    """Return the numbers in the lowest four bits, in float16."""
    half = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True)
    return (half.to(tl.float32) * 16384.0).to(tl.float16)


@triton.jit
def byte_of_words(words, shift):
    """Return the e4m3 number in the byte of a word that begins at bit `shift`."""
    asm: tl.constexpr = """{
        .reg .b32 a, b; .reg .b16 both;
        shr.u32 a, $1, $3; shr.u32 b, $2, $4; prmt.b32 a, a, b, 0x0040; cvt.u16.u32 both, a;
        cvt.rn.f16x2.e4m3x2 $0, both; }"""
    return tl.inline_asm_elementwise(asm, "=r,r,r,r,r", [words, shift], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def byte_of_words_in_software(words, shift):
    return e4m3_in_software((words >> shift) & 0xFF, tl.float16)


@triton.jit
def byte_of_pair(low, high, place):
    """Return the e4m3 number in the byte of two words that the lowest three bits of `place` name."""
    asm: tl.constexpr = """{
        .reg .b32 a, b; .reg .b16 both;
        prmt.b32 a, $1, $3, $5; prmt.b32 b, $2, $4, $6; prmt.b32 a, a, b, 0x0040; cvt.u16.u32 both, a;
        cvt.rn.f16x2.e4m3x2 $0, both; }"""
    args = low, high, place
    return tl.inline_asm_elementwise(asm, "=r,r,r,r,r,r,r", args, dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def byte_of_pair_in_software(low, high, place):
    return e4m3_in_software((tl.where((place & 4) == 0, low, high) >> ((place & 3) * 8)) & 0xFF, tl.float16)


@triton.jit
def to_e4m3(x):
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def to_e5m2(x):
    return tl.clamp(x, -57344.0, 57344.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e5)


@triton.jit
def to_int8(x):
    # Half to even: after adding 1.5 * 2^23 there are no fraction bits, so the addition rounds.
    rounded = (tl.minimum(tl.maximum(x, -127.0), 127.0) + 12582912.0) - 12582912.0
    return tl.where(x != x, 0.0, rounded).to(tl.int8)


@triton.jit
def to_e4m3_in_software(x):
    return to_fp8_bits(x, 3, 7, 448.0, 0x7F)


@triton.jit
def to_e5m2_in_software(x):
    return to_fp8_bits(x, 2, 15, 57344.0, 0x7F)


@triton.jit
def to_fp8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, NAN: tl.constexpr):
    """Round float32 to an 8-bit float, half to even, saturating; return its bits as uint8."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    # Normal: drop mantissa bits of float32. The rounding addition may carry into the exponent, which is right.
    DROP: tl.constexpr = 23 - MANTISSA
    wide = magnitude.to(tl.uint32, bitcast=True)
    rounded = (wide + ((1 << (DROP - 1)) - 1) + ((wide >> DROP) & 1)) >> DROP
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # Subnormal: a multiple of the smallest step. Adding 2^23 steps leaves their number, rounded, in the low bits.
    SHIFT: tl.constexpr = 1 << (BIAS - 1 + MANTISSA)
    count = ((magnitude * SHIFT + 8388608.0).to(tl.uint32, bitcast=True)) & 0xFF
    code = tl.where(magnitude * (1 << (BIAS - 1)) < 1.0, count, normal)
    return (sign | tl.where(x != x, NAN, code)).to(tl.uint8)


@triton.jit
def round_even(x):
    """Round to whole numbers, half to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_e2m1(x):
    """Round float32 to e2m1, half to even, saturating; NaN becomes 0. Return four bits of each."""
    magnitude = tl.where(x == x, tl.minimum(tl.abs(x), 6.0), 0.0)
    step = tl.where(magnitude < 2.0, 2.0, tl.where(magnitude < 4.0, 1.0, 0.5))
    before = tl.where(magnitude < 2.0, 0.0, tl.where(magnitude < 4.0, 2.0, 4.0))
    number = (round_even(magnitude * step) + before).to(tl.int32)
    return tl.where((x < 0.0) & (number > 0), number | 8, number)


@triton.jit
def to_bfloat16_bits(x):
    # Half to even. The rounding addition may carry into the exponent, which is right. The interpreter truncates.
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.int16, bitcast=True)


LARGEST_CAP = 256.0  # of `softcap`
SCORE_MODS = {  # by the tanh of a softcap, and whether there is ALiBi
    (None, False): None,
    (None, True): alibi,
    ("float32", False): softcap_in_float32,
    ("float32", True): softcap_alibi_in_float32,
    ("16 bits", False): softcap,
    ("16 bits", True): softcap_alibi,
}
SOFTWARE_DECODERS = {torch.float8_e4m3fn: e4m3_in_software, torch.float8_e5m2: e5m2_in_software}
FP8X2_DECODERS = {torch.float8_e4m3fn: (e4m3x2_in_software, e4m3x2), torch.float8_e5m2: (e5m2x2, e5m2x2)}
SOFTWARE_ENCODERS = {torch.float8_e4m3fn: to_e4m3_in_software, torch.float8_e5m2: to_e5m2_in_software}
ENCODERS = {torch.float8_e4m3fn: to_e4m3, torch.float8_e5m2: to_e5m2, torch.int8: to_int8}
CODES_DECODERS = {"int4": (int4x4_in_software, int4x4), "e2m1": (e2m1x4_in_software, e2m1x4)}
SMALLEST_PEAK = tl.constexpr(formats.SMALLEST_PEAK)


def score_mod(spec: AttentionSpec) -> Any:
    """Return the score mod of a spec, or None."""
    if spec.softcap is None:
        return SCORE_MODS[None, spec.alibi] or (scaled if spec.score is not None else None)
    is_exact = spec.dtype.itemsize > 2 or spec.softcap > LARGEST_CAP
    return SCORE_MODS["float32" if is_exact else "16 bits", spec.alibi]


def decoder(dtype: torch.dtype, native_fp8: bool) -> Any:
    """Return the decoder for `dtype`; in software if the target lacks the type."""
    return native if native_fp8 or dtype not in SOFTWARE_DECODERS else SOFTWARE_DECODERS[dtype]


def fp8x2_decoder(dtype: torch.dtype, native_fp8x2: bool) -> Any:
    """Return the decoder for 16-bit elements that hold two numbers of `dtype`."""
    return FP8X2_DECODERS[dtype][native_fp8x2]


def decoders_of_format(form: Format, device: DeviceProperties) -> tuple[Any, Any, Any, Any]:
    """Return the decoders of keys and of values, from 16-bit elements, and two of block scales, or None.

    The second one is for `codes.placed_scales`, where each number's scale is decoded: not in integer arithmetic of PTX.
    """

    def decoder_of(name: str) -> Any:
        if name == "e4m3":
            return fp8x2_decoder(torch.float8_e4m3fn, device.native_fp8x2)
        return CODES_DECODERS[name][device.has_ptx]

    of_scales = placed = None
    if form.has_blocks:
        of_scales = (byte_of_words_in_software, byte_of_words)[device.native_fp8x2]
        in_software = None if device.has_ptx else byte_of_pair_in_software
        placed = byte_of_pair if device.native_fp8x2 else in_software
    return decoder_of(form.k.name), decoder_of(form.v.name), of_scales, placed


def decoding(cache: PagedKVCache, device: DeviceProperties, packs_fp8: bool) -> tuple[torch.dtype, dict[str, Any]]:
    """Return as what a kernel loads the elements of a cache, and constexprs that say how it decodes them.

    Args:
        cache: the cache.
        device: the device's properties.
        packs_fp8: whether fp8 numbers are loaded in pairs.
    """
    if cache.kv_format is not None:
        decode, decode_v, of_scales, placed = decoders_of_format(cache.form, device)
        meta = {"DECODE": decode, "PACKED_FP8": True, "FORMAT": cache.kv_format, "DECODE_V": decode_v}
        return torch.int16, meta | {"IN_PTX": device.has_ptx, "DECODE_SCALES": of_scales, "DECODE_PLACED": placed}
    if packs_fp8:
        return torch.int16, {"DECODE": fp8x2_decoder(cache.dtype, device.native_fp8x2), "PACKED_FP8": True}
    as_bytes = not device.native_fp8 and cache.dtype in SOFTWARE_DECODERS
    element = torch.uint8 if as_bytes else cache.dtype
    return element, {"DECODE": decoder(cache.dtype, device.native_fp8), "PACKED_FP8": False}


def encoder(dtype: torch.dtype, native_fp8: bool) -> Any:
    """Return the encoder from float32 to `dtype`; None if `dtype` is not quantised."""
    return ENCODERS.get(dtype) if native_fp8 or dtype not in SOFTWARE_ENCODERS else SOFTWARE_ENCODERS[dtype]
