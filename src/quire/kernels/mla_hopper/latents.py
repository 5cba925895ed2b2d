"""A pipeline of quarters of tiles, and the producer warp that loads them by TMA: for row blocks of at most 32 rows, and
for products in fp8.

A tile's rope columns arrive with its last quarter.

A warpgroup that waits for a phase of a barrier must have seen the phase before, since a barrier tells odd from even
phases only. Where two warpgroups take the tiles in turn, and three tiles fit, the tile before in a stage is the other
warpgroup's. So there are two barriers for each stage then: all tiles of a barrier are one warpgroup's.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quire.kernels.gluon.compat import aggregate, tma_load
from quire.kernels.gluon.pipeline import THREADS, SmemPipeline, allocate_barriers, make_ready
from quire.kernels.mla_hopper.memory import HALF, QUARTER, ROPE, TILE, make_scales, make_seen
from quire.kernels.mla_hopper.producer import load_first_pages, load_pages, produce_next, row_of
from quire.kernels.mla_hopper.program import first_sequence, work_of


@aggregate
class Latents:
    """The latents in shared memory. The i-th use of the pipeline is the i-th quarter that is loaded."""

    quarters: Any  # SmemPipeline of [TILE, QUARTER]
    rope: Any  # [tiles, TILE, ROPE]: rope columns, which arrive and are freed with a tile's last quarter
    seen: Any  # chosen keys: 1: lists.Seen, with a place for each tile
    raw_full: Any  # records: 1: a barrier for each stage: the quarter has arrived
    scales: Any  # records: 1: [tiles, SCALES, TILE]

    @gluon.jit
    def make_ready(self):
        """Make the barriers ready."""
        self.quarters.make_ready()
        if len(self.seen) > 0:
            make_ready(self.seen[0].full, 1)
        if len(self.raw_full) > 0:
            make_ready(self.raw_full[0], THREADS)

    @gluon.jit
    def place_of(self, i):
        """Return which tile in shared memory the one is to which the i-th quarter belongs."""
        return i // 4 % self.rope.shape[0]

    @gluon.jit
    def phase_of(self, i):
        """Return how many tiles have been there before that one."""
        return i // 4 // self.rope.shape[0]

    @gluon.jit
    def rope_of(self, i):
        """Return the rope columns of the tile to which the i-th quarter belongs."""
        return self.rope.index(self.place_of(i))


@gluon.jit
def make_latents(
    element: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, GATHERED: gl.constexpr = False,
    LISTS: gl.constexpr = False, CONVERTED: gl.constexpr = False,
):  # fmt: skip
    """Allocate memory for latents of type `element`. CONSUMERS warpgroups take tiles in turn; 1: each takes all.

    GATHERED: rows are copied one by one. LISTS: of chosen keys. CONVERTED: of records.
    """
    BITS: gl.constexpr = element.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    OF_ROPE: gl.constexpr = gl.NVMMASharedLayout(ROPE.value * BITS // 8, BITS, 2)
    TILES: gl.constexpr = (STAGES + 3) // 4  # so a tile's rope columns outlive its last quarter
    FULLS: gl.constexpr = STAGES if STAGES // 4 % CONSUMERS == 0 else STAGES * CONSUMERS
    COPIED: gl.constexpr = GATHERED and not CONVERTED
    full, empty = allocate_barriers(FULLS), allocate_barriers(STAGES)
    seen, raw_full, scales = (), (), ()
    if LISTS:
        seen = (make_seen(TILES),)
    if CONVERTED:
        raw_full, scales = (allocate_barriers(STAGES),), (make_scales(TILES),)
    tiles = gl.allocate_shared_memory(element, [STAGES, TILE, QUARTER], LAYOUT)
    rope = gl.allocate_shared_memory(element, [TILES, TILE, ROPE], OF_ROPE)
    BYTES: gl.constexpr = TILE * QUARTER * BITS // 8
    quarters = SmemPipeline(tiles, (), full, empty, (), STAGES, FULLS, QUARTER, BYTES, COPIED, 1)
    return Latents(quarters, rope, seen, raw_full, scales)


@gluon.jit
def produce_latents(s, source, program):
    """Load the latents of every tile of the partition. The producer warp runs this."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    PAGE_SIZE: gl.constexpr = program.config.PAGE_SIZE
    BOX: gl.constexpr = program.config.BOX
    row_block = program.row_block
    lane = gl.arange(0, 32, LANES)
    seq, known, first = first_sequence(program, row_block)
    pages = load_first_pages(source, program, seq, first, lane)
    n = 0
    while seq <= program.part.last_seq:
        row = row_of(source, seq)
        work = work_of(program, seq, known, first, row_block)
        pos = first * TILE
        end = pos + work.count * TILE
        stop = gl.minimum(end, work.visible)
        pages = gl.where(pos + lane * BOX < stop, pages, 0)
        while pos < end:
            rows = ()
            for i in gl.static_range(TILE // BOX):
                page = gl.sum(gl.where(lane == i, pages, 0), 0)
                rows = rows + (page * source.page_rows + (pos + i * BOX) % PAGE_SIZE,)
            pos += TILE
            pages = load_pages(row, pos + lane * BOX, stop, PAGE_SIZE)
            for i in gl.static_range(4):
                load_quarter(s.latents, source, rows, i, n + i, BOX)
            n += 4
        seq, known, first, pages = produce_next(source, program, seq, lane, row_block)


@gluon.jit
def load_quarter(latents, source, rows, QUARTER_I: gl.constexpr, i, BOX: gl.constexpr):
    """Load a quarter of a tile, the i-th of the pipeline, when its stage is free. The last one brings rope columns."""
    desc, quarters = source.kv_desc, latents.quarters
    WIDTH: gl.constexpr = desc.block_shape[1]
    COLUMNS: gl.constexpr = QUARTER + ROPE if QUARTER_I == 3 else QUARTER
    stage = quarters.acquire(i)
    full = quarters.full.index(i % quarters.FULLS)
    mbarrier.expect(full, TILE * COLUMNS * desc.dtype.primitive_bitwidth // 8)
    for box in gl.static_range(TILE // BOX):
        for part in gl.static_range(QUARTER // WIDTH):
            into = quarters.tiles.index(stage).slice(part * WIDTH, WIDTH, 1).slice(box * BOX, BOX)
            tma_load(desc, [rows[box], QUARTER_I * QUARTER + part * WIDTH], full, into)
        if QUARTER_I == 3:
            into = latents.rope_of(i).slice(box * BOX, BOX)
            if source.rope_desc is None:
                tma_load(desc, [rows[box], 2 * HALF], full, into)
            else:
                tma_load(source.rope_desc, [rows[box], 2 * HALF], full, into)
