"""The schedule of the MLA kernel: which KV tiles a program owns, found from the lengths on the device.

The rows of a sequence, (token, query head) pairs, are cut into row blocks of ROWS rows. All programs of one row block
share its work over all sequences: the KV tiles of the batch form one list, sequence after sequence, which is cut into
equal partitions. Before the tiles of a sequence, the list has some places that stand for the time to begin a sequence.
Programs of different row blocks have the same partitions. So those that read the same latents run at the same time, and
share them in L2.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.mla_hopper import launch

ROWS, TILE = gl.constexpr(launch.ROWS), gl.constexpr(launch.TILE)
SEQS = gl.constexpr(128)  # sequences that a program reads in one step


class Lengths(NamedTuple):
    """What says how many queries and keys each sequence has."""

    seq_lens: Any  # [num_seqs] int32
    cu_seqlens_q: Any  # [num_seqs + 1] int32, or None if each sequence has one query
    query_offsets: Any  # [num_seqs] int32, or None for bottom-right alignment
    num_seqs: Any


class Costs(NamedTuple):
    """What a cut and a sequence cost, in the time of tiles."""

    combine: Any  # c of a partial: t tiles in partitions of s tiles take s + c * t / s, which is least at sqrt(c * t)
    sequence: Any  # of beginning a sequence, where sequences differ


class Partition(NamedTuple):
    """A part of the list of the batch."""

    low: Any  # its first place in the list
    high: Any  # the place after its last
    size: Any  # places of every partition but the last
    overhead: Any  # places before the tiles of each sequence
    seq: Any  # the sequence at place `low`
    first: Any  # that sequence's first place


@gluon.jit
def queries_of(lengths, seq):
    """Return the first query token and the number of queries of a sequence, or of each of a vector of sequences."""
    if lengths.cu_seqlens_q is None:
        return seq, seq * 0 + 1
    else:
        q_start = gl.load(lengths.cu_seqlens_q + seq)
        return q_start, gl.load(lengths.cu_seqlens_q + seq + 1) - q_start


@gluon.jit
def keys_of(lengths, seq, q_len, row_block, causal, NUM_HEADS: gl.constexpr):
    """Return the position of a sequence's first query, its keys, and how many of them its row block sees."""
    seq_len = gl.load(lengths.seq_lens + seq)
    if lengths.query_offsets is None:
        first_pos = seq_len - q_len
    else:
        first_pos = gl.load(lengths.query_offsets + seq)
    last_token = gl.minimum((row_block * ROWS + ROWS - 1) // NUM_HEADS, q_len - 1)
    visible = gl.where(causal, gl.minimum(first_pos + last_token + 1, seq_len), seq_len)
    return first_pos, seq_len, gl.maximum(visible, 0)


@gluon.jit
def num_tiles(q_len, visible, row_block, NUM_HEADS: gl.constexpr):
    """Return the tiles of a row block that exists: at least one, so that zeros are written where there are no keys."""
    return gl.where(q_len * NUM_HEADS > row_block * ROWS, gl.maximum((visible + TILE - 1) // TILE, 1), 0)


@gluon.jit
def tiles_of_sequences(lengths, first, row_block, causal, NUM_HEADS: gl.constexpr):
    """Return the tiles of each of SEQS sequences from `first` on."""
    # Every warp holds all sequences, so that sums over them need no barrier between warps.
    LAYOUT: gl.constexpr = gl.BlockedLayout([SEQS // 32], [32], [4], [0])
    seqs = first + gl.arange(0, SEQS, LAYOUT)
    inside = gl.minimum(seqs, lengths.num_seqs - 1)
    _, q_len = queries_of(lengths, inside)
    _, _, visible = keys_of(lengths, inside, q_len, row_block, causal, NUM_HEADS)
    return gl.where(seqs < lengths.num_seqs, num_tiles(q_len, visible, row_block, NUM_HEADS), 0)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def find_sequence(tiles, start, tile):
    """Return how many of these sequences end at or before `tile`, and where the last of those ends; 0 if none does.

    The sequences' tiles begin at `start`.
    """
    ends = start + gl.associative_scan(tiles, 0, add)
    before = ends <= tile
    return gl.sum(before.to(gl.int32), 0), gl.max(gl.where(before, ends, 0), 0)


@gluon.jit
def partition_size(lengths, tiles, num_partitions, costs, row_block, causal, NUM_HEADS: gl.constexpr):
    """Return the places of every partition but the last, of all, and before the tiles of each sequence.

    Args:
        tiles: those of the first SEQS sequences.
        costs: Costs.
    """
    total, longest, count = gl.sum(tiles, 0), gl.max(tiles, 0), gl.sum((tiles > 0).to(gl.int32), 0)
    for first in range(SEQS, lengths.num_seqs, SEQS):
        more = tiles_of_sequences(lengths, first, row_block, causal, NUM_HEADS)
        total += gl.sum(more, 0)
        longest = gl.maximum(longest, gl.max(more, 0))
        count += gl.sum((more > 0).to(gl.int32), 0)
    shortest = gl.maximum((gl.sqrt(total.to(gl.float32) * costs.combine) + 0.5).to(gl.int32), 1)
    all_equal = longest * count == total
    overhead = gl.where(all_equal, 0, costs.sequence)
    total += overhead * count
    size = gl.maximum((total + num_partitions - 1) // num_partitions, shortest)
    # If all sequences are equal, a partition that ends where a sequence ends leaves less to combine.
    longest = gl.maximum(longest, 1)
    splits = gl.maximum(longest // size, 1)
    shorter, longer = (longest + splits - 1) // splits, (size + longest - 1) // longest * longest
    even = gl.where(size < longest, shorter, longer)
    return gl.where(all_equal & (even <= size + 1), even, size), total, overhead


@gluon.jit
def find_partition(lengths, index, num_partitions, costs, row_block, causal, NUM_HEADS: gl.constexpr):
    """Return the `index`-th of at most `num_partitions` partitions."""
    tiles = tiles_of_sequences(lengths, 0, row_block, causal, NUM_HEADS)
    size, total, overhead = partition_size(lengths, tiles, num_partitions, costs, row_block, causal, NUM_HEADS)
    low = index * size
    tiles = gl.where(tiles > 0, tiles + overhead, 0)
    seq, first_place = find_sequence(tiles, 0, low)
    start = gl.sum(tiles, 0)
    for first in range(SEQS, lengths.num_seqs, SEQS):
        tiles = tiles_of_sequences(lengths, first, row_block, causal, NUM_HEADS)
        tiles = gl.where(tiles > 0, tiles + overhead, 0)
        seqs_before, end = find_sequence(tiles, start, low)
        seq += seqs_before
        first_place = gl.maximum(first_place, end)
        start += gl.sum(tiles, 0)
    return Partition(low, gl.minimum(low + size, total), size, overhead, seq, first_place)


class Work(NamedTuple):
    """The tiles of one sequence that a program attends to."""

    seq: Any
    q_start: Any  # its first query token
    q_len: Any
    first_pos: Any  # position of its first query
    seq_len: Any
    visible: Any  # keys that the row block sees
    tile: Any  # first tile, in the sequence
    count: Any  # tiles
    starts: Any  # the first tile is the sequence's first
    ends: Any  # the last tile is the sequence's last


@gluon.jit
def first_tile(partition, place):
    """Return the first tile of a sequence that is in the partition; the sequence's tiles begin at `place`."""
    return gl.maximum(partition.low - place, 0)
