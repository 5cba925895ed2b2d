"""The dynamic persistent tile scheduler: which part of the launch's work a work tile of the queue is.

`schedule.py` finds the row blocks of a batch and their order once, and the programs of all layers read them.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import aggregate
from quire.kernels.hopper.schedule import FIELDS
from quire.kernels.hopper.work_tile import Cut, Range, WorkTile, split_of_cut, split_of_keys


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
def find_work_tile(batch, at, division, config):
    """Return the sequence of the work tile at a Place, the work tile, and where its keys end.

    Between them is its Range or Cut, or () of neither.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    PARTS: gl.constexpr = config.PARTS
    head, split = at.head, at.split
    found = batch.places + at.row_block * FIELDS
    seq, token, q_start, q_len = gl.load(found), gl.load(found + 1), gl.load(found + 2), gl.load(found + 3)
    first_pos, seq_len = gl.load(found + 4), gl.load(found + 5)
    kv_start, kv_stop = gl.load(found + 6), gl.load(found + 7)
    keys = ()
    if config.CUT_SLOTS > 0:
        of_row_block = head // config.HEADS * PARTS
        if PARTS > 1:
            of_row_block += at.part
        shift = gl.load(found + 8)
        keys = Cut(shift, gl.load(found + 9) + (of_row_block << shift), gl.load(found + 10))
        tile, num_tiles = split_of_cut(kv_start, kv_stop, keys, BLOCK_N)
    else:
        if config.INTERVALS:
            keys = Range(gl.load(found + 11), gl.load(found + 12), gl.load(found + 13), gl.load(found + 14))
        tile, num_tiles = split_of_keys(kv_start, kv_stop, split, division.num_splits, BLOCK_N)
    if config.FIXED_SPLIT > 0:  # splits are attended to from the first key to the last
        tile -= num_tiles - 1
    if PARTS > 1:
        split = split * PARTS + at.part
    return seq, WorkTile(head, token, q_start, q_len, first_pos, seq_len, tile, num_tiles, split), keys, kv_stop
