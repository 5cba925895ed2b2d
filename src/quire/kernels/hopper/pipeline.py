"""Rings of shared-memory buffers, filled by the copy engine or a warpgroup and used by warpgroups: the only place that touches barriers.

A pipe has SLOTS tiles and two barriers for each: `full`, which completes when all bytes of a copy have landed (or with `producer_commit`), and `empty`, at which every
consumer arrives when it is done. One more `full` is spare, for a copy that somebody has to look at before it is handed on. The i-th use of a pipe is of slot
`i % SLOTS`, and waits for the phase of that slot's barriers that `i // SLOTS` says.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# Renamed after Triton 3.6.
copy_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

LINE = gl.constexpr(128)  # bytes of a row that the copy engine swizzles together, at most


class SmemPipeline(NamedTuple):
    """Tiles [SLOTS, rows, columns] and their barriers."""

    tiles: Any
    full: Any
    empty: Any


@gluon.jit
def make_pipeline(
    element: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SLOTS: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Allocate a pipe of tiles, which as many warpgroups as CONSUMERS use."""
    BITS: gl.constexpr = element.primitive_bitwidth
    tiles = gl.allocate_shared_memory(
        element, [SLOTS, ROWS, COLUMNS], gl.NVMMASharedLayout(min(LINE.value, COLUMNS * BITS // 8), BITS, 2)
    )
    return SmemPipeline(tiles, make_barriers(SLOTS + 1, 1), make_barriers(SLOTS, CONSUMERS))


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate barriers that complete after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), ARRIVALS)
    return barriers


@gluon.jit
def wait(barriers, slot, phase):
    """Wait until a barrier has completed its phase-th phase."""
    mbarrier.wait(barriers.index(slot), phase & 1)


@gluon.jit
def producer_acquire(pipe, i):
    """Wait until the slot of the i-th use is free, and return it."""
    SLOTS: gl.constexpr = pipe.empty.shape[0]
    wait(pipe.empty, i % SLOTS, i // SLOTS + 1)  # the phase before the first counts as completed
    return i % SLOTS


@gluon.jit
def expect_bytes(barriers, slot, BYTES: gl.constexpr):
    """Let a barrier complete when so many bytes have been copied; at once if none are to come."""
    if BYTES == 0:
        mbarrier.arrive(barriers.index(slot), count=1)
    else:
        mbarrier.expect_bytes(barriers.index(slot), BYTES)


@gluon.jit
def panels(tile):
    """Return a tile's panels of columns, a line wide, one below the other, as they lie in memory."""
    COLUMNS: gl.constexpr = min(tile.shape[1], LINE * 8 // tile.dtype.primitive_bitwidth)
    return reinterpret(tile, tile.dtype, [tile.shape[0] * tile.shape[1] // COLUMNS, COLUMNS], tile.layout)


@gluon.jit
def copy_rows(desc, row, col, barrier, tile, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Have ROWS rows of a tensor copied to rows from FIRST on of a tile, every panel of its columns on its own."""
    COLUMNS: gl.constexpr = panels(tile).shape[1]
    for panel in gl.static_range(tile.shape[1] // COLUMNS):
        copy_box(desc, [row, col + panel * COLUMNS], barrier, panels(tile).slice(panel * tile.shape[0] + FIRST, ROWS))


@gluon.jit
def consumer_wait(pipe, i):
    """Wait until the i-th use has been filled, and return its slot."""
    SLOTS: gl.constexpr = pipe.empty.shape[0]
    wait(pipe.full, i % SLOTS, i // SLOTS)
    return i % SLOTS


@gluon.jit
def producer_commit(pipe, i):
    """Say that the i-th use has been filled, by stores of this warpgroup."""
    fence_async_shared()  # the matrix unit reads past the path that stores take
    mbarrier.arrive(pipe.full.index(i % pipe.empty.shape[0]), count=1)


@gluon.jit
def consumer_release(pipe, i):
    """Say that this warpgroup is done with the i-th use."""
    mbarrier.arrive(pipe.empty.index(i % pipe.empty.shape[0]), count=1)
