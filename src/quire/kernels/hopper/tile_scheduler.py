"""The dynamic persistent tile scheduler: in which order the row blocks of a batch come, and what a work tile is.

Programs take work tiles from a queue (`queue.py`). The last row blocks of a sequence come first, since they see the
most keys. Where a work tile is a large part of a program's work, the sequence with the most keys comes first. So all
programs end at about the same time.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import aggregate, reinterpret
from quire.kernels.hopper.cuts import add, cut_nothing, cut_of_work_tile, cut_sequences, may_cut
from quire.kernels.hopper.work_tile import (
    WorkTile,
    keys_of_band,
    keys_of_intervals,
    split_of_cut,
    split_of_keys,
)

SEQS = gl.constexpr(128)  # sequences that the scheduler reads in one step
PART = gl.constexpr(4)  # sequences that are compared with all others in one step
SHARE = gl.constexpr(2)  # an order counts where a work tile is 1/SHARE of a program's work, in the first SEQS sequences


class Batch(NamedTuple):
    """The sequences of a launch, and which keys their queries see."""

    kv: Any  # views.KVLayout
    cu_seqlens_q: Any  # [num_seqs + 1] int32
    num_seqs: Any
    max_decode_queries: Any  # sequences with at most this many queries belong to the decode launch; 0: there is none
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
def row_blocks_of(batch, seqs, BLOCK_T: gl.constexpr):
    """Return the query tokens and the number of row blocks of sequences, of which those from `num_seqs` on have none.

    Sequences with at most `max_decode_queries` queries have no row blocks: they belong to the decode launch.
    """
    inside = seqs < batch.num_seqs
    q_stop = gl.load(batch.cu_seqlens_q + seqs + 1, mask=inside, other=0)
    q_len = q_stop - gl.load(batch.cu_seqlens_q + seqs, mask=inside, other=0)
    return q_len, gl.where(q_len > batch.max_decode_queries, (q_len + BLOCK_T - 1) // BLOCK_T, 0)


@gluon.jit
def row_block_ends(batch, first, BLOCK_T: gl.constexpr):
    """Return where the row blocks of each of SEQS sequences from `first` on end, counted from those of `first`."""
    seqs = first + gl.arange(0, SEQS, gl.BlockedLayout([SEQS // 32], [32], [gl.num_warps()], [0]))
    _, counts = row_blocks_of(batch, seqs, BLOCK_T)
    return gl.associative_scan(counts, 0, add)


@gluon.jit
def order_by_keys(
    batch, ends, memory, work_tiles_each, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, CUT_SLOTS: gl.constexpr,
    MIXED: gl.constexpr,
):  # fmt: skip
    """Return where the row blocks of the first SEQS sequences end, if the sequence with the most keys is the last one.

    What counts is the tiles of keys that the last row block sees. Sequences with as many stay in the batch's order.
    Each end is the sum of the row blocks of all sequences that do not come later, so nothing has to be moved.
    Where that gains little, the batch's order stays.
    With CUT_SLOTS, long sequences are cut by keys first, and each split of a row block counts as one (`cuts.py`).
    With MIXED, sequences of one row block come before all others in a mixed batch, and the one of these that has the
    most keys is the first one. So `queue.py` finds the longest work tile of either kind at either end.

    Args:
        batch: the sequences.
        ends: of the first SEQS sequences in the batch's order.
        memory: shared memory of [2, SEQS] int32, or of [4, SEQS] with CUT_SLOTS, which no other warp uses.
        work_tiles_each: work tiles of a row block.

    Returns:
        The ends; how many row blocks of a mixed batch belong to sequences of one row block, 0 if it is not mixed; and
        how many programs begin with these.
    """
    PAIRS: gl.constexpr = gl.BlockedLayout([SEQS // 32, PART], [32, 1], [gl.num_warps(), 1], [1, 0])
    seqs = gl.arange(0, SEQS, gl.SliceLayout(1, PAIRS))
    num_seqs, window = batch.num_seqs, (batch.window_left, batch.window_right)
    q_len, counts = row_blocks_of(batch, seqs, BLOCK_T)
    seq_len = gl.load(batch.kv.seq_lens + seqs, mask=seqs < num_seqs, other=0)
    if batch.kv.query_offsets is None:
        first_pos = seq_len - q_len
    else:
        first_pos = gl.load(batch.kv.query_offsets + seqs, mask=seqs < num_seqs, other=0)
    token = gl.maximum(counts - 1, 0) * BLOCK_T
    kv_start, kv_stop = keys_of_band(token, q_len, first_pos, seq_len, window[0], window[1], BLOCK_T)
    # So that a place fits 32 bits, where a tile has at least 64 keys.
    keys = gl.minimum(gl.maximum(kv_stop - kv_start, 0), (1 << 29) - BLOCK_N)
    tiles = (keys + BLOCK_N - 1) // BLOCK_N
    owns, singles, mixed = counts > 0, counts == 1, False
    if MIXED:
        has_prompts = gl.max(counts, 0) > 1
        if num_seqs > SEQS:  # the others are taken first
            has_prompts = num_seqs > 0
        mixed = has_prompts & (gl.max(singles.to(gl.int32), 0) > 0)
    most, least = gl.max(gl.where(owns, tiles, 0), 0), gl.min(gl.where(owns, tiles, 2147483647), 0)
    seen = counts * tiles  # by all row blocks, each with as many tiles as the last one
    if MIXED:
        first_start, first_stop = keys_of_band(0, q_len, first_pos, seq_len, window[0], window[1], BLOCK_T)
        first_keys = gl.minimum(gl.maximum(first_stop - first_start, 0), (1 << 29) - BLOCK_N)
        seen = counts * (tiles + (first_keys + BLOCK_N - 1) // BLOCK_N) // 2
    work = gl.sum(seen, 0) * work_tiles_each  # may wrap around, which costs the order and nothing else
    ordered = (most > least) & (most * SHARE * gl.num_programs(0) > work)
    if CUT_SLOTS > 0:
        # A decoding sequence that a concurrent launch serves is as much work as one row block.
        blocks = gl.maximum(counts, gl.where(q_len > 0, 1, 0))
        work = gl.sum(gl.where(owns, seen, blocks * tiles), 0) * work_tiles_each
        if may_cut(most, work, gl.sum(blocks, 0) * work_tiles_each, BLOCK_N):
            counts = cut_sequences(
                counts, tiles, first_keys, work, memory, work_tiles_each, CUT_SLOTS, BLOCK_T, BLOCK_N
            )
            ends = gl.associative_scan(gl.convert_layout(counts, ends.type.layout), 0, add)
        else:
            cut_nothing(counts, memory)
        has_more = gl.max(ends, 0) * work_tiles_each > gl.num_programs(0)
        ordered = ordered & has_more
        if MIXED:
            mixed = mixed & has_more
    num_singles, from_back = 0, 0
    if mixed:
        num_singles = gl.sum(gl.where(singles, counts, 0), 0)
        num_others = (gl.max(ends, 0) - num_singles) * work_tiles_each
        from_back = gl.minimum(num_singles * work_tiles_each, gl.num_programs(0) // 2)
        # Where two of the longest other work tiles take longer than a program's share of all work, no program has two.
        most = gl.max(gl.where(singles, 0, tiles), 0)
        if (num_seqs <= SEQS) & (num_others <= gl.num_programs(0)) & (2 * most * gl.num_programs(0) > work):
            from_back = gl.minimum(from_back, gl.num_programs(0) - num_others)
    if MIXED:
        ordered = ordered | mixed
    if ordered:
        places = tiles * SEQS + seqs  # no two are equal
        if MIXED:
            places = gl.where(singles & mixed, -1 - places, places)
        places = gl.where(owns, places, -2147483648)
        # Each sequence's end is a sum over all sequences, PART at a time: registers have no room for SEQS * SEQS.
        memory.index(0).store(places)
        memory.index(1).store(counts)
        parts = reinterpret(memory, gl.int32, [memory.shape[0] * SEQS // PART, PART], memory.layout)
        found = gl.zeros([SEQS], gl.int32, gl.SliceLayout(1, PAIRS))
        first = gl.min(gl.where(owns, seqs, SEQS), 0)  # engines have decoding sequences before prompts
        for part in range(first // PART, (gl.minimum(num_seqs, SEQS) + PART - 1) // PART):
            others = parts.index(part).load(gl.SliceLayout(0, PAIRS))
            more = parts.index(SEQS // PART + part).load(gl.SliceLayout(0, PAIRS))
            found += gl.sum(gl.where(others[None, :] <= places[:, None], more[None, :], 0), 1)
        ends = gl.convert_layout(found, ends.type.layout)
    return ends, num_singles, from_back


@gluon.jit
def count_row_blocks(batch, ends, BLOCK_T: gl.constexpr):
    """Return the number of row blocks of the batch; `ends` are those of the first SEQS sequences."""
    count = gl.max(ends, 0)
    for first in range(SEQS, batch.num_seqs, SEQS):
        count += gl.max(row_block_ends(batch, first, BLOCK_T), 0)
    return count


@gluon.jit
def keep_ends(memory, ends):
    """Keep the ends that `order_by_keys` returned in the first row of its memory, which it no longer needs."""
    memory.index(0).store(ends)


@gluon.jit
def find_row_block(batch, ends, row_block, BLOCK_T: gl.constexpr, MAY_BE_ORDERED: gl.constexpr):
    """Return the sequence that owns a row block of the batch, and that sequence's first row block.

    `ends` are those of the first SEQS sequences, if MAY_BE_ORDERED in any order.
    """
    if MAY_BE_ORDERED:
        seqs = gl.arange(0, SEQS, ends.type.layout)
        end = gl.min(gl.where(ends > row_block, ends, 2147483647), 0)
        # The first one with this end: others have no row blocks.
        seq = gl.min(gl.where(ends == end, seqs, SEQS), 0)
    else:
        seq = gl.sum((ends <= row_block).to(gl.int32), 0)
    first_row_block = gl.max(gl.where(ends <= row_block, ends, 0), 0)
    before = gl.max(ends, 0)
    for first in range(SEQS, batch.num_seqs, SEQS):
        more = before + row_block_ends(batch, first, BLOCK_T)
        seq += gl.sum((more <= row_block).to(gl.int32), 0)
        first_row_block = gl.maximum(first_row_block, gl.max(gl.where(more <= row_block, more, 0), 0))
        before = gl.max(more, 0)
    return seq, first_row_block


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
def find_work_tile(batch, ends, places, at, division, config, ENDS_ARE_KEPT: gl.constexpr):
    """Return the sequence of the work tile at a Place, the work tile, and where its keys end.

    Between them is its Range or Cut, or () of neither.
    """
    HEAD_BLOCKS: gl.constexpr = config.NUM_KV_HEADS * config.GROUP // config.HEADS
    BLOCK_T: gl.constexpr = config.BLOCK_T
    BLOCK_N: gl.constexpr = config.BLOCK_N
    PARTS: gl.constexpr = config.PARTS
    row_block, head, split, part = at.row_block, at.head, at.split, at.part
    kv = batch.kv
    if ENDS_ARE_KEPT:
        ends = places.index(0).load(ends.type.layout)  # `keep_ends`
    seq, first_row_block = find_row_block(batch, ends, row_block, BLOCK_T, kv.key_begin is None)
    q_start = gl.load(batch.cu_seqlens_q + seq)
    q_len = gl.load(batch.cu_seqlens_q + seq + 1) - q_start
    seq_len = gl.load(kv.seq_lens + seq)
    keys = ()
    if config.CUT_SLOTS > 0:
        of_row_block = head // config.HEADS * PARTS
        if PARTS > 1:
            of_row_block += part
        in_seq, keys = cut_of_work_tile(places, seq, row_block - first_row_block, of_row_block, HEAD_BLOCKS * PARTS)
        token = in_seq * BLOCK_T
    else:
        token = (row_block - first_row_block) * BLOCK_T
    if kv.query_offsets is None:
        first_pos = seq_len - q_len
    else:
        first_pos = gl.load(kv.query_offsets + seq)
    if kv.key_begin is None:
        kv_start, kv_stop = keys_of_band(
            token, q_len, first_pos, seq_len, batch.window_left, batch.window_right, BLOCK_T
        )
    else:
        kv_start, kv_stop, keys = keys_of_intervals(kv, token, q_start, q_len, seq_len, BLOCK_T)
    if config.CUT_SLOTS > 0:
        tile, num_tiles = split_of_cut(kv_start, kv_stop, keys, BLOCK_N)
    else:
        tile, num_tiles = split_of_keys(kv_start, kv_stop, split, division.num_splits, BLOCK_N)
    if config.FIXED_SPLIT > 0:  # splits are attended to from the first key to the last
        tile -= num_tiles - 1
    if PARTS > 1:
        split = split * PARTS + part
    return seq, WorkTile(head, token, q_start, q_len, first_pos, seq_len, tile, num_tiles, split), keys, kv_stop
