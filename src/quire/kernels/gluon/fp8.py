"""Operands of 8 bits, and rows scaled by powers of two so that their numbers fit a narrower type."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def split_column_pairs(pairs):
    """Split 16-bit elements, which are two adjacent columns of 8-bit numbers, into even and odd columns, as int8.

    A thread's elements are split four at a time, which are in two registers.
    """
    # `even` takes bytes 0 and 2 of each register, `odd` takes bytes 1 and 3.
    unzip: gl.constexpr = "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;"
    return gl.inline_asm_elementwise(
        unzip, "=r,=r,r,r", [pairs], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )  # fmt: skip


@gluon.jit
def permute_for_fp8_operand(x):
    """Permute each group of 16 columns.

    The four values that a thread holds in the accumulator layout become adjacent, as the 8-bit operand layout requires.
    """
    HEIGHT: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return x.reshape([HEIGHT, COLUMNS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([HEIGHT, COLUMNS])


@gluon.jit
def undo_permute_for_fp8_operand(x):
    """Return the columns in the order before `permute_for_fp8_operand`."""
    HEIGHT: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return x.reshape([HEIGHT, COLUMNS // 16, 4, 2, 2]).permute((0, 1, 3, 2, 4)).reshape([HEIGHT, COLUMNS])


@gluon.jit
def to_fp8(x):
    """Round float32 to e4m3, four adjacent numbers of a thread at once. Triton's conversion takes one at a time."""
    pack: gl.constexpr = """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"""
    return gl.inline_asm_elementwise(pack, "=r,r,r,r,r", [x], dtype=gl.int8, is_pure=True, pack=4).to(
        gl.float8e4nv, bitcast=True
    )


@gluon.jit
def peaks(panels):
    """Return the largest magnitude of each row, over panels of columns."""
    peak = gl.max(gl.abs(panels[0].to(gl.float32)), 1)
    for i in gl.static_range(1, len(panels)):
        peak = gl.maximum(peak, gl.max(gl.abs(panels[i].to(gl.float32)), 1))
    return peak


@gluon.jit
def scale_panels(panels, factor, element: gl.constexpr):
    """Multiply each row of all panels by its factor, and convert them to `element`."""
    scaled = ()
    for i in gl.static_range(len(panels)):
        scaled = scaled + ((panels[i].to(gl.float32) * factor[:, None]).to(element),)
    return scaled


@gluon.jit
def scale_of_rows(peak, PEAK: gl.constexpr):
    """Return the power of two by which each row's absolute maximum `peak` is in [2^PEAK, 2^(PEAK + 1)); its inverse."""
    # Biased by 127. At least 64, so that the inverse is not 0 for a row of zeros: -inf * 0 is NaN.
    exponent = gl.maximum(peak.to(gl.int32, bitcast=True) >> 23, 64)
    scale = ((254 + PEAK - exponent) << 23).to(gl.float32, bitcast=True)
    return scale, ((exponent - PEAK) << 23).to(gl.float32, bitcast=True)
