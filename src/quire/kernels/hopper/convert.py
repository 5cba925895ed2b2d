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

from quire.kernels.gluon.compat import reinterpret
from quire.kernels.gluon.fp8 import permute_for_fp8_operand, scale_of_rows, split_column_pairs, to_fp8
from quire.kernels.gluon.pipeline import wait_ready
from quire.kernels.hopper.work_tile import ROWS, read_range, read_work_tile, visible_keys

ELEMENTS_PER_THREAD = gl.constexpr(32)  # that are converted at once


@gluon.jit
def convert(stored, memory, batch, config):
    """Convert the raw tiles that the producer warp loads. One warpgroup runs this.

    Args:
        stored: the pipelines of keys and values as the cache holds them.
        memory: the pipelines from which consumers read.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    FP8_MMA: gl.constexpr = memory.k.tiles.dtype == stored.k.tiles.dtype
    work_i = 0
    tile_i = 0
    wait_ready(memory.ready)
    stage = memory.q.wait(work_i)
    work = read_work_tile(memory.published, stage)
    while work.q_len > 0:
        if config.INTERVALS:
            keys = read_range(memory.published, stage)
            kv_low, kv_high = keys.kv_low, keys.kv_high
        else:
            kv_low, kv_high = visible_keys(work, batch.window_left, batch.window_right)
        pos = work.tile * BLOCK_N
        for i in range(tile_i, tile_i + work.num_tiles):
            if not FP8_MMA:
                convert_tile(stored.k, memory.k, i, pos, kv_low, kv_high, False)  # scores are masked
            # The usual tile is seen whole, and its values are converted without a comparison for each row.
            if (pos >= kv_low) & (pos + BLOCK_N <= kv_high):
                convert_values(stored.v, memory.v, i, pos, kv_low, kv_high, FP8_MMA, False)
            else:
                convert_values(stored.v, memory.v, i, pos, kv_low, kv_high, FP8_MMA, True)
            pos -= BLOCK_N
        tile_i += work.num_tiles
        work_i += 1
        stage = memory.q.wait(work_i)
        work = read_work_tile(memory.published, stage)


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
    from_stage = stored.wait(i)
    stage = pipe.acquire(i)
    for first in gl.static_range(0, BLOCK_N, STEP):
        numbers = stored.tiles.index(from_stage).slice(first, STEP).load(LAYOUT).to(pipe.tiles.dtype)
        if ZERO_INVISIBLE:
            kv_pos = pos + first + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
            numbers = gl.where(((kv_pos >= kv_low) & (kv_pos < kv_high))[:, None], numbers, 0.0)
        pipe.tiles.index(stage).slice(first, STEP).store(numbers)
    pipe.commit(i)
    stored.release(i)


@gluon.jit
def transpose_v_tile(stored, pipe, i, pos, kv_low, kv_high, ZERO_INVISIBLE: gl.constexpr):
    """Transpose the i-th tile of fp8 values.

    Its keys are permuted by `permute_for_fp8_operand`. Rows are zeroed as in `convert_tile`.
    """
    BLOCK_N: gl.constexpr = stored.tiles.shape[1]
    HEAD_DIM: gl.constexpr = stored.tiles.shape[2]
    # Two adjacent columns are one 16-bit element. ldmatrix transposes these: a thread has those of keys 2n and 2n + 1.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    from_stage = stored.wait(i)
    stage = pipe.acquire(i)
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
    pipe.commit(i)
    stored.release(i)


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
