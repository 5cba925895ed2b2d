"""The queue of work tiles, which programs take from both ends.

The work tiles of a prompt are bound by the tensor cores: its row blocks share keys and values, which stay in L2. Those
of a decoding sequence are bound by memory. So in a mixed batch, half of the programs take prompts from the front, and
half take sequences of one row block from the back. A program that finds no more of its kind takes the other kind.
Otherwise all programs take work tiles from the front.

One counter says how many were taken from either end, so one atomic operation takes a work tile.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FRONT_BITS = gl.constexpr(16)  # low bits of the counter: work tiles taken from the front. The others count the back's.
MOST = gl.constexpr((1 << 16) - 1)  # work tiles that 16 bits count


class Queue(NamedTuple):
    """The work tiles of a launch, of which each program has one before it takes others."""

    num_work_tiles: Any
    num_singles: Any  # the last ones, of sequences of one row block, which are bound by memory
    from_back: Any  # programs that take work tiles from the back


@gluon.jit
def make_queue(num_work_tiles, num_singles, from_back):
    """Return the queue. With more work tiles than are counted, none is taken from the back."""
    return Queue(num_work_tiles, num_singles, gl.where(num_work_tiles <= MOST, from_back, 0))


@gluon.jit
def first_work_tile(queue, MIXED: gl.constexpr):
    """Return this program's first work tile, and whether it takes others from the back.

    If it is not less than `num_work_tiles`, there is none. Without MIXED, all are taken from the front.
    """
    if not MIXED:
        return gl.program_id(0), False
    rank = gl.program_id(0) - (gl.num_programs(0) - queue.from_back)
    return gl.where(rank >= 0, queue.num_work_tiles - 1 - rank, gl.program_id(0)), rank >= 0


@gluon.jit
def take(counter, lane, wanted, backwards, MIXED: gl.constexpr):
    """Take a work tile, in the lane where `wanted` is set. Its load is in flight until `taken_work_tile` is called."""
    one = lane * 0 + 1
    if MIXED:
        one = lane * 0 + gl.where(backwards, 1 << FRONT_BITS, 1)
    return gl.atomic_add(counter + lane, one, mask=wanted, sem="relaxed")


@gluon.jit
def taken_work_tile(queue, lane, taken, backwards, MIXED: gl.constexpr):
    """Return what was taken, and whether this program still takes from the back.

    A number of `num_work_tiles` or more means that there is no more. Each program is told so once. The last one gets
    the number that `last_number` returns, and resets the counter.
    """
    number = gl.sum(gl.where(lane == 0, taken, 0), 0)
    if not MIXED:
        return gl.num_programs(0) + number, backwards
    front, back = number, 0
    if queue.from_back > 0:
        front, back = number & MOST, (number >> FRONT_BITS) & MOST
    of_front = gl.num_programs(0) - queue.from_back + front
    of_back = queue.num_work_tiles - 1 - queue.from_back - back
    work_tile = gl.where(backwards, of_back, of_front)
    number = front + back + gl.num_programs(0)
    work_tile = gl.where(number < queue.num_work_tiles, work_tile, number)
    backwards = backwards & (queue.from_back + back < queue.num_singles)
    return work_tile, backwards


@gluon.jit
def last_number(queue):
    """Return the number that the last program gets which asks for a work tile in vain."""
    return queue.num_work_tiles + gl.num_programs(0) - 1
