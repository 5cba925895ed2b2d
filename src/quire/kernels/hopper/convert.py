"""Convert queries, and the tiles of a quantised cache, to operands of tensor cores.

fp8 and int8 tiles become float16, which represents their numbers exactly; one instruction converts two. bfloat16
queries become float16 too, scaled by a power of two for each row. For fp8 products, queries are rounded to fp8, keys
are used as they are stored, and tiles of values are transposed, since 8-bit operands need contiguous keys.

Results of an output in e4m3 are divided by its scale and rounded here too.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from quire.kernels.hopper.pipeline import (
    consumer_release,
    consumer_wait,
    producer_acquire,
    producer_commit,
    reinterpret,
)
from quire.kernels.hopper.work_tile import ROWS, read_range, read_work_tile, visible_keys

ELEMENTS_PER_THREAD = gl.constexpr(32)  # that are converted at once


@gluon.jit
def convert(k_raw, v_raw, k_pipe, v_pipe, q_pipe, published, window_left, window_right, INTERVALS: gl.constexpr):
    """Convert the raw tiles that the producer warp loads. One warpgroup runs this."""
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[1]
    FP8_MMA: gl.constexpr = k_pipe.tiles.dtype == k_raw.tiles.dtype
    work_i = 0
    tile_i = 0
    stage = consumer_wait(q_pipe, work_i)
    work = read_work_tile(published, stage)
    while work.q_len > 0:
        if INTERVALS:
            keys = read_range(published, stage)
            kv_low, kv_high = keys.kv_low, keys.kv_high
        else:
            kv_low, kv_high = visible_keys(work, window_left, window_right)
        pos = work.tile * BLOCK_N
        for i in range(tile_i, tile_i + work.num_tiles):
            if not FP8_MMA:
                convert_tile(k_raw, k_pipe, i, pos, kv_low, kv_high, False)  # scores are masked
            if (pos >= kv_low) & (pos + BLOCK_N <= kv_high):
                convert_values(v_raw, v_pipe, i, pos, kv_low, kv_high, FP8_MMA, False)
            else:
                convert_values(v_raw, v_pipe, i, pos, kv_low, kv_high, FP8_MMA, True)
            pos -= BLOCK_N
        tile_i += work.num_tiles
        work_i += 1
        stage = consumer_wait(q_pipe, work_i)
        work = read_work_tile(published, stage)


@gluon.jit
def convert_values(stored, pipe, i, pos, kv_low, kv_high, FP8_MMA: gl.constexpr, ZERO_INVISIBLE: gl.constexpr):
    """Convert the i-th tile of values, or transpose it for fp8 products."""
    if FP8_MMA:
        transpose_v_tile(stored, pipe, i, pos, kv_low, kv_high, ZERO_INVISIBLE)
    else:
        convert_tile(stored, pipe, i, pos, kv_low, kv_high, ZERO_INVISIBLE)


@gluon.jit
def convert_tile(stored, pipe, i, pos, kv_low, kv_high, ZERO_INVISIBLE: gl.constexpr):
    """Convert the i-th tile, which begins at position `pos`.

    With ZERO_INVISIBLE, rows outside [kv_low, kv_high) are zeroed. They may hold NaN, and 0 * NaN is NaN.
    """
    BLOCK_N: gl.constexpr = pipe.tiles.shape[1]
    HEAD_DIM: gl.constexpr = pipe.tiles.shape[2]
    STEP: gl.constexpr = ELEMENTS_PER_THREAD * 128 // HEAD_DIM  # rows at once
    LANES: gl.constexpr = HEAD_DIM // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    from_stage = consumer_wait(stored, i)
    stage = producer_acquire(pipe, i)
    for first in gl.static_range(0, BLOCK_N, STEP):
        numbers = stored.tiles.index(from_stage).slice(first, STEP).load(LAYOUT).to(pipe.tiles.dtype)
        if ZERO_INVISIBLE:
            kv_pos = pos + first + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
            numbers = gl.where(((kv_pos >= kv_low) & (kv_pos < kv_high))[:, None], numbers, 0.0)
        pipe.tiles.index(stage).slice(first, STEP).store(numbers)
    producer_commit(pipe, i)
    consumer_release(stored, i)


@gluon.jit
def transpose_v_tile(stored, pipe, i, pos, kv_low, kv_high, ZERO_INVISIBLE: gl.constexpr):
    """Transpose the i-th tile of fp8 values.

    Its keys are permuted by `permute_for_fp8_operand`. Rows are zeroed as in `convert_tile`.
    """
    BLOCK_N: gl.constexpr = stored.tiles.shape[1]
    HEAD_DIM: gl.constexpr = stored.tiles.shape[2]
    # Two adjacent columns are one 16-bit element. ldmatrix transposes these: a thread has those of keys 2n and 2n + 1.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    from_stage = consumer_wait(stored, i)
    stage = producer_acquire(pipe, i)
    as_int16 = reinterpret(
        stored.tiles.index(from_stage), gl.int16, [BLOCK_N, HEAD_DIM // 2], gl.NVMMASharedLayout(HEAD_DIM, 16, 2)
    )
    both = as_int16.permute((1, 0)).load(LAYOUT)
    if ZERO_INVISIBLE:
        kv_pos = pos + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        both = gl.where(((kv_pos >= kv_low) & (kv_pos < kv_high))[None, :], both, 0)
    even, odd = split_column_pairs(permute_for_fp8_operand(both))
    transposed = gl.join(even, odd).permute((0, 2, 1)).reshape([HEAD_DIM, BLOCK_N]).to(pipe.tiles.dtype, bitcast=True)
    pipe.tiles.index(stage).store(transposed)
    producer_commit(pipe, i)
    consumer_release(stored, i)


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
def quantize_results(x, scale):
    """Return what `states.as_stored` stores of results in float32, bit for bit, without its division of each number."""
    if not ((scale > 2.0**-64) & (scale < 2.0**64)):
        factor, scale = usual_scale(scale)
        x *= factor
    return to_fp8(quotient(x, scale))


@gluon.jit
def usual_scale(scale):
    """Return the factor of results that replaces a scale by a positive one between 2^-64 and 2^64, and that one.

    The factor is a power of two, so it changes no digit. Of 0, infinity and NaN it is the inverse.
    """
    size = gl.abs(scale)
    factor = gl.where(size < 1.0, 2.0**100, 2.0**-100)
    factor = gl.where((size > 2.0**-64) & (size < 2.0**64), 1.0, factor)
    factor = gl.where(scale < 0.0, -factor, factor)
    is_number = (size > 0.0) & (size < float("inf"))
    return gl.where(is_number, factor, 1.0 / scale), gl.where(is_number, scale * factor, 1.0)


@gluon.jit
def quotient(x, divisor):
    """Return x / divisor in float32, so near to it that e4m3 of both is the same.

    The product with the inverse is off by up to 1.5 units in the last place. Product × divisor - x is a float32 number,
    and corrects it. With each of the 2^23 mantissas of a divisor, the result is on the side of each middle between two
    e4m3 numbers where the rounded quotient is (the nine float32 numbers around each were tried). The product is bounded
    by 512, since the excess of an infinite one would be NaN.
    """
    # The assembly keeps the steps of a number together. Each step over all numbers needs more registers than there are.
    steps: gl.constexpr = """{ .reg .f32 product, excess; mul.rn.f32 product, $1, $3;
        min.NaN.xorsign.abs.f32 product, product, 0f44000000; neg.f32 excess, $1;
        fma.rn.f32 excess, product, $2, excess; neg.f32 excess, excess; fma.rn.f32 $0, excess, $3, product; }"""
    inverse = tl.div_rn(1.0, divisor)
    return gl.inline_asm_elementwise(steps, "=f,f,f,f", [x, divisor, inverse], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def quantize_queries(q, element: gl.constexpr, FIRST: gl.constexpr, PEAK: gl.constexpr, OF_SCORES: gl.constexpr):
    """Convert a warpgroup's queries, rows from FIRST on, to `element` in place.

    Each row is scaled by a power of two, so that its absolute maximum is in [2^PEAK, 2^(PEAK + 1)).

    Returns:
        The tile and the inverse scales.
    """
    COLUMNS: gl.constexpr = q.shape[1]
    IN_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    TILE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, element.primitive_bitwidth, 2)
    numbers = q.slice(FIRST, ROWS).load(IN_ROWS).to(gl.float32)
    scale, inverse_scale = scale_of_rows(gl.max(gl.abs(numbers), 1), PEAK)
    tile = reinterpret(q, element, [q.shape[0] * 16 // element.primitive_bitwidth, COLUMNS], TILE_LAYOUT)
    tile.slice(FIRST, ROWS).store((numbers * scale[:, None]).to(element))
    fence_async_shared()
    return tile.slice(FIRST, ROWS), gl.convert_layout(inverse_scale, gl.SliceLayout(1, OF_SCORES))


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
