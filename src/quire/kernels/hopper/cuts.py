"""Which row blocks are cut by keys in a batch of sequences of different lengths. Every program decides the same.

A row block of a long sequence may see more tiles of keys than a program's share of all work. Then other programs wait
for the one that attends to it. So the producer warp cuts such sequences, from the lengths on the device: the last row
blocks, which see the most keys, have 2, 4 or 8 splits each. The row block of a sequence that has one may have up to 32,
since its partials have few rows. Each split is a work tile, and leaves a partial in a slot of the scratch. The last
warpgroup to arrive combines the partials (`partials.py`).

The host knows bounds, not lengths. It says how many slots there are, and what does not fit is not cut.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import reinterpret
from quire.kernels.hopper.launch import CUT_OVERHEAD

LEAST_KEYS = gl.constexpr(512)  # a row block of at most this many keys is not cut
OVERHEAD = gl.constexpr(CUT_OVERHEAD)
SHIFT_BITS = gl.constexpr(3)  # of a word of a sequence, which say how many splits its row blocks have


class Cut(NamedTuple):
    """How the row block of a work tile is cut."""

    shift: Any  # there are 1 << shift splits of the row block; one if it is whole
    first_slot: Any  # of the partials of the row block's heads that the work tile has
    split: Any  # which of them this work tile is


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def may_cut(most, work, work_tiles, BLOCK_N: gl.constexpr):
    """Return whether cuts gain more than they cost. They cost as much as LEAST_KEYS keys of a row block, roughly.

    Args:
        most: tiles of keys that the longest row block sees.
        work: tiles of all work tiles, roughly. A wrong number costs time and nothing else.
        work_tiles: their number. Each one takes as long as OVERHEAD keys besides.
    """
    return (most - LEAST_KEYS // BLOCK_N) * gl.num_programs(0) > work + work_tiles * (OVERHEAD // BLOCK_N)


@gluon.jit
def cut_nothing(counts, memory):
    """Keep in `memory`, as `cut_sequences` does, that all row blocks of sequences, `counts` of each, are whole."""
    memory.index(2).store(counts << SHIFT_BITS)
    memory.index(3).store(counts)


@gluon.jit
def cut_sequences(
    counts, tiles, first_keys, work, memory, work_tiles_each, CUT_SLOTS: gl.constexpr, BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Decide which of some sequences are cut, and return how many row blocks and splits of row blocks each one has.

    Splits are as short as a program's share of all work, if the keys of a sequence suffice for that many.

    Args:
        counts: row blocks of the sequences.
        tiles: tiles of keys that the last row block of each one sees.
        first_keys: keys that the first row block of each one sees.
        work: tiles of all work tiles, roughly.
        memory: shared memory of [4, sequences] int32. Its last two rows keep what `cut_of_work_tile` looks up.
        work_tiles_each: work tiles of a row block that is not cut.
        CUT_SLOTS: slots for partials.
    """
    IN_ORDER: gl.constexpr = gl.BlockedLayout([counts.shape[0] // 32], [32], [gl.num_warps()], [0])
    # A split shorter than LEAST_KEYS takes longer to combine than it saves.
    share = gl.maximum(work // gl.num_programs(0), LEAST_KEYS // BLOCK_N)
    shift = gl.where(tiles > share, 1, 0) + gl.where(tiles > 2 * share, 1, 0) + gl.where(tiles > 4 * share, 1, 0)
    longer = gl.where(tiles > 8 * share, 1, 0) + gl.where(tiles > 16 * share, 1, 0)
    shift += gl.where(counts == 1, longer, 0)  # whose partials are small
    # Row blocks that see less than this share, or half as much as the last one, stay whole. In a causal prompt, each
    # row block sees BLOCK_T keys more than the one before.
    least = gl.minimum(gl.maximum(share, tiles // 2), tiles)
    whole = (least * BLOCK_N - first_keys) // BLOCK_T + 1
    whole = gl.maximum(gl.minimum(gl.where(first_keys > least * BLOCK_N, 0, whole), counts - 1), 0)
    num_cut = counts - whole
    # No product of more than CUT_SLOTS row blocks is taken, which might wrap around.
    shift = gl.where((counts > 0) & (num_cut <= CUT_SLOTS), shift, 0)
    num_cut = gl.where(shift > 0, num_cut, 0)
    needed = gl.convert_layout((num_cut << shift) * work_tiles_each, IN_ORDER)
    needed = gl.where(needed <= CUT_SLOTS, needed, 0)  # so that no sum of them wraps around
    stop = gl.convert_layout(gl.associative_scan(needed, 0, add), counts.type.layout)
    needed = gl.convert_layout(needed, counts.type.layout)
    fits = (needed > 0) & (stop <= CUT_SLOTS)
    shift, num_cut = gl.where(fits, shift, 0), gl.where(fits, num_cut, 0)
    memory.index(2).store(((counts - num_cut) << SHIFT_BITS) | shift)
    memory.index(3).store(stop - needed)
    return counts + (num_cut << shift) - num_cut


@gluon.jit
def cut_of_work_tile(memory, seq, index, head_block, HEAD_BLOCKS: gl.constexpr):
    """Return the row block of a work tile within its sequence, and the Cut.

    Args:
        memory: that `cut_sequences` wrote.
        seq: the sequence.
        index: of the row block or split of a row block, among those of the sequence. Whole row blocks come first.
        head_block: which of the row block's HEAD_BLOCKS work tiles it is.
    """
    NUM_SEQS: gl.constexpr = memory.shape[1]
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words = reinterpret(memory, gl.int32, [4 * NUM_SEQS, 1], memory.layout)
    known = gl.minimum(seq, NUM_SEQS - 1)
    word = gl.max(words.index(2 * NUM_SEQS + known).load(ONE), 0)
    slot = gl.max(words.index(3 * NUM_SEQS + known).load(ONE), 0)
    whole, shift = word >> SHIFT_BITS, word & ((1 << SHIFT_BITS) - 1)
    in_cut = index - whole
    is_cut = (in_cut >= 0) & (seq < NUM_SEQS)
    in_cut, shift = gl.where(is_cut, in_cut, 0), gl.where(is_cut, shift, 0)
    row_block = gl.where(is_cut, whole + (in_cut >> shift), index)
    first_slot = slot + (((in_cut >> shift) * HEAD_BLOCKS + head_block) << shift)
    return row_block, Cut(shift, first_slot, in_cut & ((1 << shift) - 1))
