"""A work tile: what a program attends to at a time, which keys that are, and how its warps learn of it.

A row block is BLOCK_T query tokens of one sequence. A work tile is a row block, as many heads of one KV head as fill
the program's rows, and one split of the visible keys. Of wide values, it has one part of the columns. The rows of a
head follow those of the head before it. With SPLIT_BY_TOKENS, this holds for each of two consumer warpgroups, which
has half of the tokens, of all these heads. So the second one may skip a work tile that has few tokens, as a decoding
sequence has.

The producer warp publishes the fields of a work tile in shared memory, where the consumer warpgroups read them. With
intervals of keys, it also publishes the `Range`. So all warps of a program agree on which tiles there are, and which of
them need masks.

After the work tiles is a number for each consumer warpgroup, which is added to the sums of its rows: NaN if the row
blocks were found for other lengths than those of now.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # rows of a consumer warpgroup
SEQS = gl.constexpr(128)  # sequences that are compared in one step
NAN = gl.constexpr(0x7FC00000)
WORK_FIELDS = gl.constexpr(9)  # fields of WorkTile
WORDS = gl.constexpr(16)  # 32-bit words of shared memory for a WorkTile, and for a Range or a Cut after it; and a seq


class WorkTile(NamedTuple):
    """A work tile. One with q_len 0 means that there are no more."""

    head: Any  # its first query head
    token: Any  # its first query token, counted from the sequence's first
    q_start: Any  # the sequence's first query token, in the batch
    q_len: Any  # the sequence's query tokens
    first_pos: Any  # position of the sequence's first query among its keys
    seq_len: Any  # the sequence's keys
    tile: Any  # the KV tile that is attended to first: the last one, or in a batch-invariant plan the first one
    num_tiles: Any  # at least 1
    split: Any  # which split of the visible keys, times the parts of the values' columns, plus which part


class Range(NamedTuple):
    """The keys that matter to a row block whose rows see intervals. Where rows see a band, positions say the same."""

    full_start: Any  # the keys that every row sees
    full_stop: Any
    kv_low: Any  # keys that are in the sequence's pages and finite: at least those that any row sees
    kv_high: Any


class Cut(NamedTuple):
    """How the row block of a work tile is cut by keys."""

    shift: Any  # there are 1 << shift splits of the row block; one if it is whole
    first_slot: Any  # of the partials of the row block's heads that the work tile has
    split: Any  # which of them this work tile is


@gluon.jit
def publish_poison(published, wg: gl.constexpr, planned, Q_STAGES: gl.constexpr):
    """Compare the lengths of all sequences with those that row blocks were found for, and write NaN if they differ."""
    EVERY_WARP: gl.constexpr = gl.BlockedLayout([SEQS // 32], [32], [gl.num_warps()], [0])  # holds all
    i = gl.arange(0, SEQS, EVERY_WARP)
    differ = i != i
    for first in range(0, planned.num_seqs, SEQS):
        seqs = first + i
        inside = seqs < planned.num_seqs
        was = planned.lengths + 3 * seqs
        differ |= gl.load(planned.seq_lens + seqs, inside, 0) != gl.load(was, inside, 0)
        differ |= gl.load(planned.cu_seqlens_q + seqs + 1, inside, 0) != gl.load(was + 1, inside, 0)
        if planned.query_offsets is not None:
            differ |= gl.load(planned.query_offsets + seqs, inside, 0) != gl.load(was + 2, inside, 0)
    word = gl.where(gl.max(differ.to(gl.int32), 0) > 0, NAN, 0)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    published.index(Q_STAGES * WORDS + wg).store(gl.full([1], word, gl.int32, LAYOUT))


@gluon.jit
def read_poison(published, wg: gl.constexpr, Q_STAGES: gl.constexpr):
    """Return the number that `publish_poison` wrote."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    word = gl.max(published.index(Q_STAGES * WORDS + wg).load(LAYOUT), 0)
    return word.to(gl.float32, bitcast=True)


@gluon.jit
def visible_keys(work, window_left, window_right):
    """Return the first key that any query of the sequence sees, and the one after the last.

    Other keys may be in freed pages. With intervals, the Range says which.
    """
    return work.first_pos - window_left, gl.minimum(work.first_pos + work.q_len + window_right, work.seq_len)


@gluon.jit
def publish_work_tile(published, stage, work, more):
    """Write a work tile's fields to shared memory, and those of its Range or its Cut, or () of neither."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(WORK_FIELDS):
        published.index(stage * WORDS + i).store(gl.full([1], work[i], gl.int32, LAYOUT))
    for i in gl.static_range(len(more)):
        published.index(stage * WORDS + WORK_FIELDS + i).store(gl.full([1], more[i], gl.int32, LAYOUT))


@gluon.jit
def publish_seq(published, stage, seq):
    """Write the sequence of a work tile to shared memory, for users' functions."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    published.index(stage * WORDS + WORDS - 1).store(gl.full([1], seq, gl.int32, LAYOUT))


@gluon.jit
def read_seq(published, stage):
    """Return the sequence that `publish_seq` wrote."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(published.index(stage * WORDS + WORDS - 1).load(LAYOUT), 0)


@gluon.jit
def read_work_tile(published, stage, FIRST_TOKEN: gl.constexpr = 0):
    """Return the work tile that `publish_work_tile` wrote, without the tokens before FIRST_TOKEN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    fields = ()
    for i in gl.static_range(WORK_FIELDS):
        fields = fields + (gl.max(published.index(stage * WORDS + i).load(LAYOUT), 0),)
    return WorkTile(fields[0], fields[1] + FIRST_TOKEN, *fields[2:])


@gluon.jit
def read_range(published, stage):
    """Return the Range that `publish_work_tile` wrote."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    fields = ()
    for i in gl.static_range(4):
        fields = fields + (gl.max(published.index(stage * WORDS + WORK_FIELDS + i).load(LAYOUT), 0),)
    return Range(*fields)


@gluon.jit
def read_cut(published, stage):
    """Return the Cut that `publish_work_tile` wrote."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    fields = ()
    for i in gl.static_range(3):
        fields = fields + (gl.max(published.index(stage * WORDS + WORK_FIELDS + i).load(LAYOUT), 0),)
    return Cut(*fields)
