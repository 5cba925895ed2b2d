"""`SmemPipeline`: a circular buffer of shared-memory tiles between producers and consumers. It owns all barriers.

A pipeline has STAGES tiles and two barriers for each of them. `full` completes when all bytes of a TMA load have
arrived, or with `commit`. `empty` completes when every consumer has released the tile. There are spare `full`
barriers, for tiles that the producer has to change before consumers may read them. The i-th use of a pipeline is of
stage `i % STAGES`, and waits for phase `i // STAGES` of that stage's barriers.

The tiles of some pipelines are copied row by row (`gather.py`). Then `full` completes when the copies of every thread
of the producer have arrived, and there are no spare barriers.

The producer warp makes all barriers of a program ready, and the other warps wait for that (`ready`). Four warps take
some 60 ns for each barrier, since Triton 3.6 makes them wait for each other after it; one warp takes less (NVIDIA H200,
2026-11-30). Where an SM has room, this happens while the launch before this one ends. A producer that copies rows has
four warps. Its barriers are made ready before warps are specialised, since programs hung where its own warps did it.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from quire.kernels.gluon.addresses import address_of
from quire.kernels.gluon.compat import aggregate, reinterpret, tma_load

SWIZZLE_BYTES = gl.constexpr(128)  # the widest row that TMA swizzles
THREADS = gl.constexpr(128)  # of a warpgroup
SPARES = gl.constexpr(2)  # barriers of a pipeline for tiles that the producer changes


@aggregate
class SmemPipeline:
    """Tiles and their barriers.

    The extents of a buffer are powers of two. So a tile of 192 columns is in two buffers, or in three next to each
    other, and a panel of a tile of 96 rows is in three buffers.
    """

    tiles: Any  # [STAGES * buffers next to each other, rows, columns]
    more: Any  # a tuple: a buffer of the columns after those, if there are more
    full: Any
    empty: Any
    addresses: Any  # a tuple: of the first tile, and of the columns after those in `tiles`, if they are known
    STAGES: gl.constexpr
    FULLS: gl.constexpr  # barriers in `full` besides spare ones: STAGES, or twice as many (`mla_hopper/latents.py`)
    COLUMNS: gl.constexpr  # of a tile
    BYTES: gl.constexpr  # of a tile
    COPIED: gl.constexpr  # whether its rows are copied one by one
    RELEASES: gl.constexpr  # arrivals after which a tile is free

    @gluon.jit
    def make_ready(self):
        """Make the barriers ready."""
        make_ready(self.full, THREADS if self.COPIED else 1)
        make_ready(self.empty, self.RELEASES)

    @gluon.jit
    def buffers(self, stage):
        """Return the buffers of a stage's tile."""
        BUFFERS: gl.constexpr = self.tiles.shape[0] // self.STAGES
        buffers = ()
        for i in gl.static_range(BUFFERS):
            buffers = buffers + (self.tiles.index(stage * BUFFERS + i),)
        if len(self.more) > 0:
            buffers = buffers + (self.more[0].index(stage),)
        return buffers

    @gluon.jit
    def piece(self, stage, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
        """Return COLUMNS columns of a tile in shared memory, from column FIRST on."""
        WIDTH: gl.constexpr = self.tiles.shape[2]
        piece = self.buffers(stage)[FIRST // WIDTH]
        if piece.shape[1] > COLUMNS:
            piece = piece.slice(FIRST % WIDTH, COLUMNS, dim=1)
        return piece

    @gluon.jit
    def stage_of(self, i):
        """Return the stage of the i-th use."""
        return i % self.STAGES

    # What a producer does.

    @gluon.jit
    def acquire(self, i):
        """Wait until the stage of the i-th use is free, and return it."""
        # The phase before the first counts as completed, so the first STAGES uses do not wait.
        wait_at(self.empty, i % self.STAGES, i // self.STAGES + 1)
        return i % self.STAGES

    @gluon.jit
    def commit(self, i):
        """Let consumers read the i-th use, which this warpgroup filled by stores."""
        fence_async_shared()  # as in `fence_copies`
        mbarrier.arrive(self.full.index(i % self.STAGES), count=1)

    @gluon.jit
    def commit_copies(self, stage):
        """Let a stage be full when the copies that each thread of the producer has begun are complete."""
        async_copy.mbarrier_arrive(self.full.index(stage), increment_count=False)

    @gluon.jit
    def expect_tile(self, stage):
        """Let a stage be full when the bytes of its tile have been loaded by TMA."""
        if self.COPIED:  # the barrier counts all threads of the producer: all but the one that expects bytes arrive
            mbarrier.arrive(self.full.index(stage), count=32 * gl.num_warps() - 1)
        expect_bytes(self.full.index(stage), self.BYTES)

    # What consumers do.

    @gluon.jit
    def wait(self, i, condition=True):
        """Wait until the i-th use has been filled, if a condition holds, and return its stage."""
        stage = self.wait_without_fence(i, condition)
        self.fence_copies()
        return stage

    @gluon.jit
    def wait_without_fence(self, i, condition=True):
        """Do what `wait` does, for a use that `fence_copies` follows."""
        wait_at(self.full, i % self.FULLS, i // self.FULLS, condition)
        return i % self.STAGES

    @gluon.jit
    def fence_copies(self):
        """Let tensor cores, which use the async proxy, read uses that were waited for: copies use the generic one."""
        if self.COPIED:
            fence_async_shared()

    @gluon.jit
    def release(self, i):
        """Let the producer overwrite the i-th use, which this warpgroup has read. All its warps arrive together."""
        mbarrier.arrive(self.empty.index(i % self.STAGES), count=1)

    @gluon.jit
    def release_unread(self, i, RELEASES: gl.constexpr):
        """Let the producer overwrite the i-th use, of which this warpgroup reads nothing: all its RELEASES arrive."""
        mbarrier.arrive(self.empty.index(i % self.STAGES), count=RELEASES)

    @gluon.jit
    def release_operand(self, i):
        """Let the producer overwrite the i-th use, when all products of this warpgroup with it are complete.

        Each thread arrives, and no warp waits for another one. The instruction waits for the asynchronous copies of a
        thread, and consumers have none. It does not wait for loads, so tiles that are loaded need `release`.
        """
        async_copy.mbarrier_arrive(self.empty.index(i % self.STAGES), increment_count=False)


@gluon.jit
def make_pipeline(
    element: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, RELEASES: gl.constexpr,
    COPIED: gl.constexpr = False, ADDRESSED: gl.constexpr = False, IN_A_ROW: gl.constexpr = False,
):  # fmt: skip
    """Allocate a pipeline whose tiles are free after RELEASES arrivals, and copied row by row if COPIED.

    There is one arrival of each warpgroup (`release`), or one of each thread (`release_operand`).
    ADDRESSED: addresses are known. Shared memory must be marked. IN_A_ROW: a tile's panels are next to each other.
    """
    BITS: gl.constexpr = element.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(SWIZZLE_BYTES.value, COLUMNS * BITS // 8), BITS, 2)
    HEIGHT: gl.constexpr = height_of_buffer(ROWS)
    FIRST: gl.constexpr = width_of_buffer(COLUMNS, IN_A_ROW, HEIGHT < ROWS)
    BUFFERS: gl.constexpr = COLUMNS // FIRST * (ROWS // HEIGHT) if IN_A_ROW else 1
    tiles = gl.allocate_shared_memory(element, [STAGES * BUFFERS, HEIGHT, FIRST], LAYOUT)
    more = ()
    if COLUMNS > FIRST and not IN_A_ROW:
        more = (gl.allocate_shared_memory(element, [STAGES, ROWS, COLUMNS - FIRST], LAYOUT),)
    addresses = ()
    if ADDRESSED:
        addresses = (address_of(tiles.index(0)),)
        for i in gl.static_range(len(more)):
            addresses = addresses + (address_of(more[i].index(0)),)
    full = allocate_barriers(STAGES if COPIED else STAGES + SPARES)
    empty = allocate_barriers(STAGES)
    return SmemPipeline(
        tiles, more, full, empty, addresses, STAGES, STAGES, COLUMNS, ROWS * COLUMNS * BITS // 8, COPIED, RELEASES
    )


@gluon.constexpr_function
def largest_power_of_two(number):
    """Return the largest power of two that is not above a number."""
    return 1 << (number.bit_length() - 1)


@gluon.constexpr_function
def width_of_buffer(columns, in_a_row, has_lower):
    """Return the columns of a tile's first buffer: those of a panel, if others are next to it or below it."""
    widest = largest_power_of_two(columns)
    return 64 if has_lower or (in_a_row and widest < columns) else widest


@gluon.constexpr_function
def height_of_buffer(rows):
    """Return the rows of each buffer of a tile: the largest power of two that divides those of the tile."""
    return rows & -rows


@gluon.constexpr_function
def pieces_of(width, least):
    """Return the (first column, number of columns) of the pieces that products of `width` columns are made of.

    The numbers are powers of two of at least `least`, in falling order. So a piece is in one buffer, and in one of its
    panels or in whole panels.
    """
    pieces, first, left = [], 0, (width + least - 1) // least * least
    if left % 64 == 48:  # one product of 64 columns is faster than two of 32 and 16 (NVIDIA H200)
        left += 16
    while left:
        columns = 1 << (left.bit_length() - 1)
        pieces.append((first, columns))
        first, left = first + columns, left - columns
    return tuple(pieces)


@gluon.jit
def allocate_barriers(NUMBER: gl.constexpr):
    """Allocate NUMBER barriers."""
    return gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())


@gluon.jit
def allocate_barrier():
    """Allocate a barrier."""
    return gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())


@gluon.jit
def make_ready(barriers, ARRIVALS: gl.constexpr):
    """Let each of some barriers complete after ARRIVALS arrivals."""
    NUMBER: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), ARRIVALS)


@gluon.jit
def make_each_ready(barriers, ARRIVALS: gl.constexpr):
    """Do what `make_ready` does, for a tuple of barriers that have been allocated one by one."""
    for i in gl.static_range(len(barriers)):
        mbarrier.init(barriers[i], ARRIVALS)


@gluon.jit
def allocate_ready():
    """Allocate the barrier for which all but the producer wait, and make it ready."""
    ready = allocate_barrier()
    mbarrier.init(ready, 1)
    return ready


@gluon.jit
def tell_ready(ready):
    """Let the warps that `wait_ready` go on. Then wait for the launches before this one."""
    fence_async_shared()  # TMA, which uses the async proxy, arrives at barriers
    mbarrier.arrive(ready, count=1)
    gdc_wait()


@gluon.jit
def make_all_ready(pipelines, ready):
    """Make the barriers of pipelines ready, and tell it."""
    for i in gl.static_range(len(pipelines)):
        pipelines[i].make_ready()
    tell_ready(ready)


@gluon.jit
def wait_ready(ready):
    """Wait until the producer has made the barriers of a program ready, and for the launches before this one."""
    wait(ready, 0)
    gdc_wait()


@gluon.jit
def wait(barrier, phase, condition=True):
    """Wait until a barrier has completed its phase-th phase, if a condition holds."""
    mbarrier.wait(barrier, phase & 1, pred=condition)


@gluon.jit
def wait_at(barriers, stage, phase, condition=True):
    """Do what `wait` does, for one of several barriers."""
    wait(barriers.index(stage), phase, condition)


@gluon.jit
def expect_bytes(barrier, BYTES: gl.constexpr):
    """Let a barrier complete when BYTES bytes have been loaded; immediately if BYTES is 0."""
    if BYTES == 0:
        mbarrier.arrive(barrier, count=1)
    else:
        mbarrier.expect(barrier, BYTES)


@gluon.jit
def panels(tile):
    """Return a tile as its panels, one below the other, as in memory. A panel is at most SWIZZLE_BYTES wide."""
    COLUMNS: gl.constexpr = min(tile.shape[1], SWIZZLE_BYTES * 8 // tile.dtype.primitive_bitwidth)
    return reinterpret(tile, tile.dtype, [tile.shape[0] * tile.shape[1] // COLUMNS, COLUMNS], tile.layout)


@gluon.jit
def load_rows(
    desc, row, head, barrier, buffers, HEIGHT: gl.constexpr, FIRST: gl.constexpr, ROWS: gl.constexpr,
    ZEROS: gl.constexpr = 0, first_column=0,
):  # fmt: skip
    """Load ROWS rows of a head by TMA into a tile, from its row FIRST on, one load for each panel.

    Args:
        desc: of a matrix [rows, columns], or of [rows, heads, columns of a head].
        row: the first row.
        head: the head's first column in the matrix; or which head it is.
        barrier: that counts the bytes.
        buffers: of the tile.
        HEIGHT: rows of the tile.
        FIRST: the tile's row that comes first.
        ROWS: of a box.
        ZEROS: columns of zeros before those of the head.
        first_column: the head's first column to load.
    """
    EACH: gl.constexpr = buffers[0].shape[0]  # rows of a buffer
    COLUMNS: gl.constexpr = panels(buffers[0]).shape[1]
    for i in gl.static_range(len(buffers) * EACH // HEIGHT):
        buffer = buffers[i * (HEIGHT // EACH) + FIRST // EACH]
        for panel in gl.static_range(buffer.shape[1] // COLUMNS):
            column = first_column + i * buffers[0].shape[1] + panel * COLUMNS
            if len(desc.block_shape) == 2:
                rows = panels(buffer).slice(panel * EACH + FIRST % EACH, ROWS)
                tma_load(desc, [row, head + column], barrier, rows)
            else:
                boxes = reinterpret(buffer, buffer.dtype, [panels(buffer).shape[0], 1, COLUMNS], desc.layout)
                rows = boxes.slice(panel * EACH + FIRST % EACH, ROWS)
                tma_load(desc, [row, head, column - ZEROS], barrier, rows)


@gluon.jit
def wait_for_both(k_pipe, k_i, v_pipe, v_i):
    """Wait for keys and for values, with one fence if they are copied, and return their stages."""
    k_stage = k_pipe.wait_without_fence(k_i)
    return k_stage, v_pipe.wait(v_i)
