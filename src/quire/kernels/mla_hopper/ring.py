"""A ring of quarters of tiles, and the producer warp that loads them by TMA: for row blocks of at most 32 rows, and for
products in fp8.

The n-th quarter that is loaded takes place n % PLACES of the ring. A tile's rope columns arrive with its last quarter.

A warpgroup that waits for a phase of a barrier must have seen the phase before, since a barrier tells odd from even
phases only. Where two warpgroups take the tiles in turn, and three tiles fit, the tile before in a place is the other
warpgroup's. So there are two barriers for each place then: all tiles of a barrier are one warpgroup's.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quire.kernels.hopper.pipeline import tma_load
from quire.kernels.mla_hopper.memory import HALF, QUARTER, ROPE, wait
from quire.kernels.mla_hopper.producer import load_pages
from quire.kernels.mla_hopper.schedule import TILE, first_tile, work_of


class Ring(NamedTuple):
    """Places for quarters of tiles. A barrier's i-th phase belongs to its i-th use."""

    quarters: Any  # [places, TILE, QUARTER]
    rope: Any  # [tiles, TILE, ROPE]: rope columns, which arrive and are freed with a tile's last quarter
    full: Any  # a barrier for each place, or two: the quarter may be read
    empty: Any  # a barrier for each place: the quarter may be overwritten


@gluon.jit
def allocate_ring(element: gl.constexpr, PLACES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocate a ring of latents of type `element`. CONSUMERS warpgroups take its tiles in turn; 1: each takes all."""
    BITS: gl.constexpr = element.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, BITS, 2)
    OF_ROPE: gl.constexpr = gl.NVMMASharedLayout(ROPE.value * BITS // 8, BITS, 2)
    TILES: gl.constexpr = (PLACES + 3) // 4  # so a tile's rope columns outlive its last quarter
    OWN: gl.constexpr = 1 if PLACES // 4 % CONSUMERS == 0 else CONSUMERS  # barriers of a place
    full = gl.allocate_shared_memory(gl.int64, [OWN * PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(OWN * PLACES):
        mbarrier.init(full.index(i), 1)
    for i in gl.static_range(PLACES):
        mbarrier.init(empty.index(i), 1)
    quarters = gl.allocate_shared_memory(element, [PLACES, TILE, QUARTER], LAYOUT)
    rope = gl.allocate_shared_memory(element, [TILES, TILE, ROPE], OF_ROPE)
    return Ring(quarters, rope, full, empty)


@gluon.jit
def place_of(ring, n):
    """Return the place of the n-th quarter, and which use of the place that is."""
    PLACES: gl.constexpr = ring.empty.shape[0]
    return n % PLACES, n // PLACES


@gluon.jit
def full_of(ring, n):
    """Return the barrier that completes when the n-th quarter has arrived, and which use of it that is."""
    BARRIERS: gl.constexpr = ring.full.shape[0]
    return ring.full.index(n % BARRIERS), n // BARRIERS


@gluon.jit
def rope_of(ring, n):
    """Return the rope columns of the tile to which the n-th quarter belongs."""
    return ring.rope.index(n // 4 % ring.rope.shape[0])


@gluon.jit
def wait_for_quarter(ring, n):
    """Wait until the n-th quarter has arrived, and return its place."""
    full, use = full_of(ring, n)
    wait(full, use)
    return place_of(ring, n)[0]


@gluon.jit
def produce_ring(ring, source, program, NUM_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr):
    """Load the latents of every tile of the partition. The producer warp runs this."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    partition = program.partition
    lane = gl.arange(0, 32, LANES)
    seq, place = partition.seq, partition.first
    n = 0
    while place < partition.high:
        row = source.page_table + seq.to(gl.int64) * source.stride_table
        # These page numbers are loaded before the length of the sequence is known, so only the table bounds them.
        pos = first_tile(partition, place + partition.overhead) * TILE
        pages = load_pages(row, pos + lane * BOX, source.table_width * PAGE_SIZE, PAGE_SIZE)
        work, next_place = work_of(program.lengths, partition, seq, place, program.row_block, program.causal, NUM_HEADS)
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
                load_quarter(ring, source, rows, i, n + i, BOX)
            n += 4
        seq += 1
        place = next_place


@gluon.jit
def load_quarter(ring, source, rows, QUARTER_I: gl.constexpr, n, BOX: gl.constexpr):
    """Load a quarter of a tile, the n-th of the ring, when its place is free. The last one brings the rope columns."""
    desc = source.kv_desc
    WIDTH: gl.constexpr = desc.block_shape[1]
    COLUMNS: gl.constexpr = QUARTER + ROPE if QUARTER_I == 3 else QUARTER
    place, use = place_of(ring, n)
    full = full_of(ring, n)[0]
    wait(ring.empty.index(place), use + 1)
    mbarrier.expect(full, TILE * COLUMNS * desc.dtype.primitive_bitwidth // 8)
    for box in gl.static_range(TILE // BOX):
        for i in gl.static_range(QUARTER // WIDTH):
            into = ring.quarters.index(place).slice(i * WIDTH, WIDTH, 1).slice(box * BOX, BOX)
            tma_load(desc, [rows[box], QUARTER_I * QUARTER + i * WIDTH], full, into)
        if QUARTER_I == 3:
            into = rope_of(ring, n).slice(box * BOX, BOX)
            if source.rope_desc is None:
                tma_load(desc, [rows[box], 2 * HALF], full, into)
            else:
                tma_load(source.rope_desc, [rows[box], 2 * HALF], full, into)
