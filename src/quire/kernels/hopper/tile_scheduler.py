"""A block of rows, or a part of its keys: what it is, which tiles it sees, and how the warp that fetches tells the warpgroups, by a note in shared memory."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # of a warpgroup, which are all of a block or half of it
NUMBERS, WORDS = gl.constexpr(9), gl.constexpr(16)  # of a block, and the words of shared memory that they are given


class Block(NamedTuple):
    """What the warp that fetches tells those that compute of a block; without queries it is the end."""

    head: Any  # its first
    token: Any  # its first, of the sequence
    q_start: Any  # the sequence's first token, of the batch
    q_len: Any  # the sequence's queries
    first_pos: Any  # of the sequence's first query among its keys
    seq_len: Any  # the sequence's keys
    tile: Any  # the last tile of keys, which is the first to be attended to
    num_tiles: Any  # one at least
    part: Any  # of the keys that the block sees


@gluon.jit
def span(
    token,
    q_len,
    first_pos,
    seq_len,
    window_left,
    window_right,
    part,
    num_parts,
    BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Return the last tile of a part of the keys that any query of a block sees, and how many the part has, one at least: else one that nobody sees."""
    kv_start = gl.maximum(first_pos + token - window_left, 0)
    kv_stop = gl.minimum(first_pos + gl.minimum(token + BLOCK_T, q_len) + window_right, seq_len)
    start = kv_start // BLOCK_N
    stop = gl.maximum((kv_stop + BLOCK_N - 1) // BLOCK_N, start + 1)
    low = start + (stop - start) * part // num_parts
    high = start + (stop - start) * (part + 1) // num_parts
    return gl.where(high > low, high - 1, stop), gl.maximum(high - low, 1)


@gluon.jit
def keys_of(block, window_left, window_right):
    """Return the first key that any query of the block's sequence sees, and the one after the last: what else there is may be gone."""
    return block.first_pos - window_left, gl.minimum(block.first_pos + block.q_len + window_right, block.seq_len)


@gluon.jit
def publish_work_tile(work_tiles, slot, block):
    """Leave a block's numbers in shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(NUMBERS):
        work_tiles.index(slot * WORDS + i).store(gl.full([1], block[i], gl.int32, LAYOUT))


@gluon.jit
def read_work_tile(work_tiles, slot):
    """Return the block that `publish_work_tile` was given."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    numbers = ()
    for i in gl.static_range(NUMBERS):
        numbers = numbers + (gl.max(work_tiles.index(slot * WORDS + i).load(LAYOUT), 0),)
    return Block(*numbers)
