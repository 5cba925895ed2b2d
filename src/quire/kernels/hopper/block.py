"""A block of rows: what it is, which tiles of keys it sees, and how the warp that fetches tells the warpgroups, by a note in shared memory."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # of a warpgroup, which are all of a block or half of it
NUMBERS, NOTE = gl.constexpr(6), gl.constexpr(8)  # of a block, and the words of shared memory that they are given


class Block(NamedTuple):
    """What the warp that fetches tells those that compute of a block; without queries it is the end."""

    head: Any  # its first
    token: Any  # its first, of the sequence
    q_start: Any  # the sequence's first token, of the batch
    q_len: Any  # the sequence's queries
    first_pos: Any  # of the sequence's first query among its keys
    seq_len: Any  # the sequence's keys


@gluon.jit
def span(block, back, ahead, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the last tile of keys that any query of the block sees, and how many there are, one at least."""
    kv_start = gl.maximum(block.first_pos + block.token - back, 0)
    kv_stop = gl.minimum(block.first_pos + gl.minimum(block.token + BLOCK_T, block.q_len) + ahead, block.seq_len)
    start = kv_start // BLOCK_N
    stop = gl.maximum((kv_stop + BLOCK_N - 1) // BLOCK_N, start + 1)
    return stop - 1, stop - start


@gluon.jit
def keys_of(block, back, ahead):
    """Return the first key that any query of the block's sequence sees, and the one after the last: what else there is may be gone."""
    return block.first_pos - back, gl.minimum(block.first_pos + block.q_len + ahead, block.seq_len)


@gluon.jit
def write_note(notes, slot, block):
    """Leave a block's numbers in shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(NUMBERS):
        notes.index(slot * NOTE + i).store(gl.full([1], block[i], gl.int32, LAYOUT))


@gluon.jit
def read_note(notes, slot):
    """Return the block that `write_note` was given."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    numbers = ()
    for i in gl.static_range(NUMBERS):
        numbers = numbers + (gl.max(notes.index(slot * NOTE + i).load(LAYOUT), 0),)
    return Block(*numbers)
