"""Lists of chosen keys in place of a schedule: what a program attends to, and which entries of a tile are seen.

The work of a program is a row of items. An item is one query token and one part of its list. A part is cut on the
device from the length that the list has now, since each layer has other lists. An item stands where a sequence of a
partition does, and the list where its keys do, so the consumers are those of dense latents. Only these differ:

* Items go to programs in turn, and each whole list or part has a place of its own for its result.
* No position says whether a key is seen. The producer, which reads the entries, stores a flag for each key of a tile.
  The rows of keys that are not seen are zeros.
* Where neighbouring tokens have keys in common, an item may be a union: a list of the keys of UNION tokens, each with
  the tokens whose lists name it (`chosen_hopper/unions.py`). A key's flag then has a bit for each of these tokens.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from quire.kernels.gluon.pipeline import wait_at
from quire.kernels.mla_hopper.memory import TILE
from quire.kernels.schedule import Sequence


class TokenLists(NamedTuple):
    """The lists of a batch's query tokens, one for all heads."""

    entries: Any  # [num_tokens, width] int32
    lens: Any  # [num_tokens] int32, or None where all entries count
    width: Any
    stride: Any
    stride_lens: Any
    num_splits: Any  # parts of a list; None: each is whole
    unions: Any = None  # [unions] int32: the items are tokens of those for which it is negative; None: all tokens
    num_united: Any = None  # query tokens of each


class Items(NamedTuple):
    """The items of a batch, in place of a `schedule.LatentPart`."""

    last_seq: Any  # the last item
    num_tokens: Any  # query tokens


@gluon.jit
def key_of(entries, UNION: gl.constexpr):
    """Return the keys of entries, which have a bit for each of UNION tokens, if that is more than one."""
    if UNION > 1:
        return entries >> UNION
    else:
        return entries


@gluon.jit
def hand_over_flags(seen, place, entries, UNION: gl.constexpr):
    """Let consumers read which tokens see each key of a tile. No token sees one whose entry is negative."""
    ALL: gl.constexpr = (1 << UNION) - 1
    flags = (entries >= 0).to(gl.int32)
    if UNION > 1:
        flags = gl.where(entries >= 0, entries & ALL, 0)
    seen.flags.index(place).store(flags + (gl.min(flags, 0) // ALL << UNION))
    mbarrier.arrive(seen.full.index(place), count=1)


@gluon.jit
def without_unseen(scores, seen, place, phase, DIM: gl.constexpr, C):
    """Set scores of keys that are not seen to -inf. Keys are along dimension DIM of the scores. C is a Config."""
    FIRST: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    wait_at(seen.full, place, phase)
    flags = seen.flags.index(place)
    if gl.sum(flags.slice(0, 1).load(FIRST), 0) < 1 << C.UNION:
        is_seen = flags.load(gl.SliceLayout(1 - DIM, scores.type.layout))
        token = gl.arange(0, scores.shape[1 - DIM], gl.SliceLayout(DIM, scores.type.layout)) // C.NUM_HEADS
        if DIM == 0:
            is_seen, token = is_seen[:, None], token[None, :]
        else:
            is_seen, token = is_seen[None, :], token[:, None]
        if C.UNION > 1:
            is_seen = is_seen >> token & 1
        scores = gl.where(is_seen > 0, scores, float("-inf"))
    return scores


@gluon.jit
def first_item(program):
    """Return of the program's first item what `program.first_sequence` returns of a sequence."""
    return with_keys(program, program.index)


@gluon.jit
def next_item(program, item):
    """Return of the program's next item what `program.first_sequence` returns of a sequence."""
    return with_keys(program, item + program.num_partitions)


@gluon.jit
def with_keys(program, item):
    """Return what `first_sequence` does, of the first of the program's items from `item` on that is not empty.

    A whole list is an item also where it has no entries, for its zeros have to be written. A part is not. Tokens of
    which there is no union are items of another launch.
    """
    if program.config.UNION > 1 or program.lists.unions is not None:
        while (item <= program.part.last_seq) & is_left_out(program, item):
            item += program.num_partitions
    known = find_list(program, item)
    first, count = tiles_of_part(program, item, known)
    if program.lists.num_splits is not None:
        while (item <= program.part.last_seq) & (count == 0):
            item += program.num_partitions
            known = find_list(program, item)
            first, count = tiles_of_part(program, item, known)
    return item, known, first


@gluon.jit
def is_left_out(program, item):
    """Return whether another launch has an item that is not after the last one."""
    lists, item = program.lists, gl.maximum(gl.minimum(item, program.part.last_seq), 0)
    if lists.unions is not None:
        return gl.load(lists.unions + item // lists.num_united) >= 0
    else:
        return gl.load(lists.lens + item) < 0


@gluon.jit
def find_list(program, item):
    """Return an item's list as a `Sequence` of its query tokens, or any list's if the item is after the last one."""
    lists, UNION = program.lists, program.config.UNION
    item = gl.maximum(gl.minimum(item, program.part.last_seq), 0)
    if lists.num_splits is not None:
        item = item // lists.num_splits
    token = item * UNION
    num_tokens = gl.minimum(program.part.num_tokens - token, UNION)
    return Sequence(count_of(lists, item), token, num_tokens, token * 0)


@gluon.jit
def count_of(lists, token):
    """Return how many entries of a token's list count."""
    count = token * 0 + lists.width
    if lists.lens is not None:
        count = gl.minimum(gl.load(lists.lens + token.to(gl.int64) * lists.stride_lens), count)
    return gl.maximum(count, 0)


@gluon.jit
def tiles_of_part(program, item, known):
    """Return the first of a list's tiles that an item has, and how many."""
    num_splits = program.lists.num_splits
    tiles = (known.seq_len + TILE - 1) // TILE
    if num_splits is None:
        return item * 0, gl.maximum(tiles, 1)
    else:
        size = (tiles + num_splits - 1) // num_splits
        first = gl.minimum(item % num_splits * size, tiles)
        return first, gl.minimum(size, tiles - first)
