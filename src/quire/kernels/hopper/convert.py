"""Tiles and queries turned into what the matrix unit is given, where a cache is quantised.

A tile of bytes becomes one of float16, which holds every fp8 and int8 number and takes one instruction for two; bfloat16 queries become float16 too, times a
power of two for each row. Where products in fp8 are allowed, queries are rounded to fp8, keys are used as they come, and tiles of values are only turned on
their side, as the matrix unit wants bytes.
"""

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
from quire.kernels.hopper.tile_scheduler import ROWS, keys_of, read_work_tile

EACH = gl.constexpr(32)  # elements that a thread converts at once


@gluon.jit
def convert(k_bytes, v_bytes, k_pipe, v_pipe, q_pipe, work_tiles, window_left, window_right):
    """Turn the tiles of bytes that are fetched into what the matrix unit is given, with one warpgroup."""
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[1]
    IN_FP8: gl.constexpr = k_pipe.tiles.dtype == k_bytes.tiles.dtype
    block_i = 0
    tile_i = 0
    block = read_work_tile(work_tiles, consumer_wait(q_pipe, block_i))
    while block.q_len > 0:
        kv_low, kv_high = keys_of(block, window_left, window_right)
        pos = block.tile * BLOCK_N
        for i in range(tile_i, tile_i + block.num_tiles):
            if not IN_FP8:
                convert_tile(k_bytes, k_pipe, i, pos, kv_low, kv_high, False)  # scores are masked
            if (pos >= kv_low) & (pos + BLOCK_N <= kv_high):
                convert_values(v_bytes, v_pipe, i, pos, kv_low, kv_high, IN_FP8, False)
            else:
                convert_values(v_bytes, v_pipe, i, pos, kv_low, kv_high, IN_FP8, True)
            pos -= BLOCK_N
        tile_i += block.num_tiles
        block_i += 1
        block = read_work_tile(work_tiles, consumer_wait(q_pipe, block_i))


@gluon.jit
def convert_values(stored, pipe, i, pos, kv_low, kv_high, IN_FP8: gl.constexpr, ZERO_UNSEEN: gl.constexpr):
    """Convert the i-th tile of values, the one way or the other."""
    if IN_FP8:
        transpose_v_tile(stored, pipe, i, pos, kv_low, kv_high, ZERO_UNSEEN)
    else:
        convert_tile(stored, pipe, i, pos, kv_low, kv_high, ZERO_UNSEEN)


@gluon.jit
def convert_tile(stored, pipe, i, pos, kv_low, kv_high, ZERO_UNSEEN: gl.constexpr):
    """Convert the i-th tile, of the keys from position `pos` on; zero the rows outside `kv_low` to `kv_high` if asked: 0 * NaN is NaN."""
    BLOCK_N: gl.constexpr = pipe.tiles.shape[1]
    HEAD_DIM: gl.constexpr = pipe.tiles.shape[2]
    STEP: gl.constexpr = EACH * 128 // HEAD_DIM  # rows at once
    LANES: gl.constexpr = HEAD_DIM // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    from_slot = consumer_wait(stored, i)
    slot = producer_acquire(pipe, i)
    for first in gl.static_range(0, BLOCK_N, STEP):
        numbers = stored.tiles.index(from_slot).slice(first, STEP).load(LAYOUT).to(pipe.tiles.dtype)
        if ZERO_UNSEEN:
            kv_pos = pos + first + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
            numbers = gl.where(((kv_pos >= kv_low) & (kv_pos < kv_high))[:, None], numbers, 0.0)
        pipe.tiles.index(slot).slice(first, STEP).store(numbers)
    producer_commit(pipe, i)
    consumer_release(stored, i)


@gluon.jit
def transpose_v_tile(stored, pipe, i, pos, kv_low, kv_high, ZERO_UNSEEN: gl.constexpr):
    """Turn the i-th tile of values in fp8 on its side: a row for each column of the values, with keys `permute_for_fp8_operand`; else as `convert_tile`."""
    BLOCK_N: gl.constexpr = stored.tiles.shape[1]
    HEAD_DIM: gl.constexpr = stored.tiles.shape[2]
    # Two columns side by side are one 16-bit element, which the shared memory's own transposition serves: a thread has keys 2n and 2n + 1 of it.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    from_slot = consumer_wait(stored, i)
    slot = producer_acquire(pipe, i)
    pairs = reinterpret(
        stored.tiles.index(from_slot), gl.int16, [BLOCK_N, HEAD_DIM // 2], gl.NVMMASharedLayout(HEAD_DIM, 16, 2)
    )
    both = pairs.permute((1, 0)).load(LAYOUT)
    if ZERO_UNSEEN:
        kv_pos = pos + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        both = gl.where(((kv_pos >= kv_low) & (kv_pos < kv_high))[None, :], both, 0)
    split: gl.constexpr = (
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;"  # low bytes of four elements, and high ones
    )
    even, odd = gl.inline_asm_elementwise(
        split, "=r,=r,r,r", [permute_for_fp8_operand(both)], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    turned = gl.join(even, odd).permute((0, 2, 1)).reshape([HEAD_DIM, BLOCK_N]).to(pipe.tiles.dtype, bitcast=True)
    pipe.tiles.index(slot).store(turned)
    producer_commit(pipe, i)
    consumer_release(stored, i)


@gluon.jit
def permute_for_fp8_operand(x):
    """Reorder columns by 16, so that the four that a thread has of them in an accumulator, two and two, are the four side by side of an operand in bytes."""
    HEIGHT: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return x.reshape([HEIGHT, COLUMNS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([HEIGHT, COLUMNS])


@gluon.jit
def to_fp8(x):
    """Round float32 to e4m3, four numbers that a thread has side by side at once: Triton takes one at a time out of the pairs that the GPU makes."""
    pack: gl.constexpr = """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"""
    return gl.inline_asm_elementwise(pack, "=r,r,r,r,r", [x], dtype=gl.int8, is_pure=True, pack=4).to(
        gl.float8e4nv, bitcast=True
    )


@gluon.jit
def quantize_queries(q, element: gl.constexpr, FIRST: gl.constexpr, PEAK: gl.constexpr, OF_SCORES: gl.constexpr):
    """Turn a warpgroup's queries, in the rows of a tile from FIRST on, into another element where they lie, each row times the power of two that brings its
    largest number to 2^PEAK or above, below twice that; return the tile, and one over those powers.
    """
    COLUMNS: gl.constexpr = q.shape[1]
    IN_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.NVMMASharedLayout(128, element.primitive_bitwidth, 2)
    numbers = q.slice(FIRST, ROWS).load(IN_ROWS).to(gl.float32)
    # Biased by 127; a row of zeros has one too, and far enough from 0 that no scale makes `shrunk` vanish: -inf * 0 is NaN.
    exponent = gl.maximum(gl.max(gl.abs(numbers), 1).to(gl.int32, bitcast=True) >> 23, 64)
    grown = ((254 + PEAK - exponent) << 23).to(gl.float32, bitcast=True)
    shrunk = ((exponent - PEAK) << 23).to(gl.float32, bitcast=True)
    tile = reinterpret(q, element, [q.shape[0] * 16 // element.primitive_bitwidth, COLUMNS], NARROW)
    tile.slice(FIRST, ROWS).store((numbers * grown[:, None]).to(element))
    fence_async_shared()
    return tile.slice(FIRST, ROWS), gl.convert_layout(shrunk, gl.SliceLayout(1, OF_SCORES))
