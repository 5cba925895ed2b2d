"""`SmemPipeline`: a circular buffer of shared-memory tiles between producers and consumers. It owns all barriers.

A pipeline has STAGES tiles and two barriers for each of them. `full` completes when all bytes of a TMA load have
arrived, or with `producer_commit`. `empty` completes when every consumer has released the tile. There is one spare
`full` barrier, for a tile that the producer has to change before consumers may read it. The i-th use of a pipeline is
of stage `i % STAGES`, and waits for phase `i // STAGES` of that stage's barriers.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

# These were renamed after Triton 3.6.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

SWIZZLE_BYTES = gl.constexpr(128)  # the widest row that TMA swizzles


class SmemPipeline(NamedTuple):
    """Tiles [STAGES, rows, columns] and their barriers."""

    tiles: Any
    full: Any
    empty: Any


@gluon.jit
def make_pipeline(
    element: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Allocate a pipeline whose tiles are released by CONSUMERS warpgroups."""
    BITS: gl.constexpr = element.primitive_bitwidth
    tiles = gl.allocate_shared_memory(
        element, [STAGES, ROWS, COLUMNS], gl.NVMMASharedLayout(min(SWIZZLE_BYTES.value, COLUMNS * BITS // 8), BITS, 2)
    )
    return SmemPipeline(tiles, make_barriers(STAGES + 1, 1), make_barriers(STAGES, CONSUMERS))


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate NUMBER barriers that complete after ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), ARRIVALS)
    return barriers


@gluon.jit
def wait(barriers, stage, phase):
    """Wait until a barrier has completed its phase-th phase."""
    mbarrier.wait(barriers.index(stage), phase & 1)


@gluon.jit
def producer_acquire(pipe, i):
    """Wait until the stage of the i-th use is free, and return it."""
    STAGES: gl.constexpr = pipe.empty.shape[0]
    wait(pipe.empty, i % STAGES, i // STAGES + 1)  # the phase before the first counts as completed
    return i % STAGES


@gluon.jit
def expect_bytes(barriers, stage, BYTES: gl.constexpr):
    """Let a barrier complete when BYTES bytes have been loaded; immediately if BYTES is 0."""
    if BYTES == 0:
        mbarrier.arrive(barriers.index(stage), count=1)
    else:
        mbarrier.expect(barriers.index(stage), BYTES)


@gluon.jit
def panels(tile):
    """Return a tile as its panels, one below the other, as in memory. A panel is at most SWIZZLE_BYTES wide."""
    COLUMNS: gl.constexpr = min(tile.shape[1], SWIZZLE_BYTES * 8 // tile.dtype.primitive_bitwidth)
    return reinterpret(tile, tile.dtype, [tile.shape[0] * tile.shape[1] // COLUMNS, COLUMNS], tile.layout)


@gluon.jit
def load_rows(desc, row, col, barrier, tile, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Load ROWS rows of a matrix by TMA into a tile, from its row FIRST on, one load for each panel."""
    COLUMNS: gl.constexpr = panels(tile).shape[1]
    for panel in gl.static_range(tile.shape[1] // COLUMNS):
        tma_load(desc, [row, col + panel * COLUMNS], barrier, panels(tile).slice(panel * tile.shape[0] + FIRST, ROWS))


@gluon.jit
def consumer_wait(pipe, i):
    """Wait until the i-th use has been filled, and return its stage."""
    STAGES: gl.constexpr = pipe.empty.shape[0]
    wait(pipe.full, i % STAGES, i // STAGES)
    return i % STAGES


@gluon.jit
def producer_commit(pipe, i):
    """Let consumers read the i-th use, which this warpgroup filled by stores."""
    fence_async_shared()  # tensor cores access shared memory by the async proxy, stores by the generic one
    mbarrier.arrive(pipe.full.index(i % pipe.empty.shape[0]), count=1)


@gluon.jit
def consumer_release(pipe, i):
    """Let the producer overwrite the i-th use, which this warpgroup has read."""
    mbarrier.arrive(pipe.empty.index(i % pipe.empty.shape[0]), count=1)
