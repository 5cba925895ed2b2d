"""The dynamic persistent tile scheduler: which part of the launch's work a work tile of the queue is.

`schedule.py` finds the row blocks of a batch and their order once, and the programs of all layers read them.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import aggregate
from quire.kernels.hopper.work_tile import Cut, Range, WorkTile
from quire.kernels.schedule import FIELDS, split_of_cut, split_of_keys


class Batch(NamedTuple):
    """The sequences of a launch, and which keys their queries see."""

    kv: Any  # views.KVLayout
    places: Any  # [max_places, FIELDS] int32, `schedule.RowBlock`
    summary: Any  # [3] int32: how many places there are, and the last two fields of `queue.Queue`
    window_left: Any
    window_right: Any


@aggregate
class Division:
    """How the row blocks of a launch are divided into work tiles, and what programs take these from."""

    tile_counter: Any  # [1] int32 of `queue.py`, 0 between launches
    num_splits: Any  # of the keys of a row block; a constant if there is one
    section: Any  # blocks of heads of which all work tiles come before those of other heads; None: there is one section
    stride_table: Any  # of the page table, from sequence to sequence
    last_part: Any  # the first column of the last of PARTS parts, where it begins in the one before it; else None
    lse_ptr: Any  # as in Outputs: an empty split says so in its lse
    stride_lse: Any


class Place(NamedTuple):
    """What part of the launch's work a work tile is."""

    row_block: Any  # of the batch
    head: Any  # the first query head
    split: Any  # of the visible keys
    part: Any  # of the values' columns


@gluon.jit
def place_of_work_tile(index, num_row_blocks, num_singles, division, config):
    """Return the Place of the queue's index-th work tile.

    Row blocks of `num_singles` sequences of one row block are the first ones of the batch, and the last of the queue.
    With sections of heads, all work tiles of a section's other row blocks come before those of the next section.
    """
    HEAD_BLOCKS: gl.constexpr = config.NUM_KV_HEADS * config.GROUP // config.HEADS
    HEADS: gl.constexpr = config.HEADS
    PARTS: gl.constexpr = config.PARTS
    num_splits, section = division.num_splits, division.section
    part = index % PARTS
    if PARTS > 1:  # adjacent work tiles have the same queries and keys
        index = index // PARTS
    row_block = num_row_blocks - 1 - index // (HEAD_BLOCKS * num_splits)
    head = index % HEAD_BLOCKS * HEADS
    split = index // HEAD_BLOCKS % num_splits
    if section is not None:
        num_others = num_row_blocks
        if config.MIXED:
            num_others -= num_singles
        if not config.MIXED or index < num_others * HEAD_BLOCKS:
            in_section = index % (num_others * section)
            row_block = num_row_blocks - 1 - in_section // section
            head = (index // (num_others * section) * section + in_section % section) * HEADS
    return Place(row_block, head, split, part)


@gluon.jit
def address_of(batch, at):
    """Return where the row block at a Place is. `find_work_tile` takes that too, and waits for its loads."""
    return batch.places + at.row_block * FIELDS


@gluon.jit
def load_row_block(batch, index, num_row_blocks, num_singles, division, config):
    """Begin to load the row block of the queue's index-th work tile: a field in each lane of the first ones.

    It is in flight until `find_work_tile` is called, as what `queue.take` returns is.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, 32 * gl.num_warps(), LAYOUT)
    at = place_of_work_tile(index, num_row_blocks, num_singles, division, config)
    exists = (at.row_block >= 0) & (at.row_block < num_row_blocks)
    return gl.load(address_of(batch, at) + lane, mask=exists & (lane < FIELDS), other=0)


@gluon.jit
def field_of(row_block, i: gl.constexpr):
    """Return the i-th field of a RowBlock, of what `load_row_block` or `address_of` returned."""
    if row_block.dtype.is_ptr():
        return gl.load(row_block + i)
    else:
        lane = gl.arange(0, row_block.shape[0], row_block.type.layout)
        return gl.sum(gl.where(lane == i, row_block, 0), 0)


@gluon.jit
def find_work_tile(row_block, at, division, config):
    """Return the sequence of the work tile at a Place, the work tile, and where its keys end.

    Between them is its Range or Cut, or () of neither.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    PARTS: gl.constexpr = config.PARTS
    head, split = at.head, at.split
    seq, token, q_start = field_of(row_block, 0), field_of(row_block, 1), field_of(row_block, 2)
    q_len, first_pos, seq_len = field_of(row_block, 3), field_of(row_block, 4), field_of(row_block, 5)
    kv_start, kv_stop = field_of(row_block, 6), field_of(row_block, 7)
    keys = ()
    if config.CUT_SLOTS > 0:
        of_row_block = head // config.HEADS * PARTS
        if PARTS > 1:
            of_row_block += at.part
        shift = field_of(row_block, 8)
        keys = Cut(shift, field_of(row_block, 9) + (of_row_block << shift), field_of(row_block, 10))
        tile, num_tiles = split_of_cut(kv_start, kv_stop, keys, BLOCK_N)
    else:
        if config.INTERVALS:
            full = field_of(row_block, 11), field_of(row_block, 12)
            keys = Range(*full, field_of(row_block, 13), field_of(row_block, 14))
        tile, num_tiles = split_of_keys(kv_start, kv_stop, split, division.num_splits, BLOCK_N)
    if config.FIXED_SPLIT > 0:  # splits are attended to from the first key to the last
        tile -= num_tiles - 1
    if PARTS > 1:
        split = split * PARTS + at.part
    return seq, WorkTile(head, token, q_start, q_len, first_pos, seq_len, tile, num_tiles, split), keys, kv_stop
