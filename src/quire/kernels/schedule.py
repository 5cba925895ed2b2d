"""Where keys are split: which tiles each program attends to, and which partial results are combined.

A GPU runs hundreds of programs at a time, and a batch has sequences of any lengths. If each had one program, most of
the GPU would wait for the longest. So the work is cut into pieces that take as long as each other, and a piece may end
within a sequence. What a program knows then is a state of some keys (`states.py`), a partial result. States over
disjoint keys combine exactly, so where a cut is changes the time, and of results only the order of sums.

The rows of a sequence, (query token, head) pairs, are computed in row blocks, and the keys that a row block sees in
tiles. A unit is what no cut divides: one tile, or with fixed splits one split. Say three sequences of one row block
each see 7, 1 and 4 tiles. Cut into 4 equal partitions, each has 3 of the 12 units:

    unit        0  1  2 |  3  4  5 |  6  7  8 |  9 10 11
    sequence    0  0  0 |  0  0  0 |  0  1  2 |  2  2  2
    partition      0    |     1    |     2    |     3

Partition 2 has the end of sequence 0, all of sequence 1, and the beginning of sequence 2. It writes the result of
sequence 1, and two partials. A partition p has two slots for these: 2 * p for a row block that began before it, and
2 * p + 1 for one that begins in it. So the partials of sequence 0 are in slots 1, 2 and 4, and those of sequence 2 in
slots 5 and 6. Whoever combines them finds the first slot and their number in the schedule, or from the sizes.

A schedule is found on the device, from the lengths, by a small kernel. It runs before the first of all layers
(`scheduler.py`), and writes records, which the kernels of all layers read. There are three:

* `schedule_kernel` cuts the units of a batch into equal partitions, sequence after sequence, and within a sequence row
  block after row block, as Stream-K cuts the work of a matrix product (arXiv 2301.03598). For each partition it writes
  a `Part`, and for each row block that a second launch may have to combine a `Cut`. The portable kernels read them.
* `mla_schedule_kernel` cuts the tiles of each row block alone, over all sequences. Programs of different row blocks
  have the same partitions. So those that read the same latents run at the same time, and share them in L2. Before the
  tiles of a sequence, the list has some places that stand for the time to begin a sequence. For each partition of each
  row block there is a `LatentPart`, and a `Cut` for each sequence that may have to be combined.
* `hopper_schedule_kernel` orders the row blocks of prompts. Programs take them from a queue (`hopper/queue.py`), the
  longest ones first, so that all end at about the same time. A row block that sees more tiles than a program's share
  of all work is cut by keys, into a power of two of splits: `split_of_cut` says which tiles each has. For each place of
  the order there is a `RowBlock`. The last warpgroup to arrive combines the partials (`hopper/partials.py`).

Lengths may change while a schedule is in use. Which row blocks and which partials a program has follows from its record
alone, so every program writes what others wait for. The result of a sequence is NaN if it is the first of a partition
and has other lengths than then or its queries are elsewhere, or if it is cut and has another number of units. Other
sequences are served with their lengths of now. Of an order, all results are NaN if any length is another one.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

SEQS = tl.constexpr(128)  # sequences that a program reads in one step; the first ones can be ordered and cut by keys
MORE_SEQS = tl.constexpr(256)  # the same of `schedule_kernel`
PLACES = tl.constexpr(32)  # of the order, that a program finds
FIELDS = tl.constexpr(16)  # int32 of a Part, a LatentPart or a RowBlock in memory: 64 bytes
CUT_FIELDS = tl.constexpr(4)  # int32 of a Cut
NO_END = tl.constexpr(2147483647)  # in the place of an end: the last one, whichever it is
SHARE = tl.constexpr(2)  # an order counts where a work tile is 1/SHARE of a program's work
LEAST_KEYS = tl.constexpr(512)  # a row block of at most this many keys is not cut by `hopper_schedule_kernel`
OVERHEAD = tl.constexpr(192)  # keys that a row block could see in the time that a work tile takes for other things


# What the kernels that find schedules are given.


class Lengths(NamedTuple):
    """Which queries and keys the sequences of a batch have."""

    seq_lens: Any  # [num_seqs] int32
    cu_seqlens_q: Any  # [num_seqs + 1] int32, or None if each sequence has one query
    query_offsets: Any  # [num_seqs] int32, or None for bottom-right alignment
    key_begin: Any  # [num_tokens] int32 of intervals, or None, like the next
    key_end: Any
    one_each: Any = None  # as `load_sequence` takes it


class Units(NamedTuple):
    """Compile-time constants of units and row blocks. A kernel builds one tuple and passes it as one constexpr."""

    GROUP: Any  # rows of a query token
    BLOCK_M: Any  # rows of a row block
    UNIT: Any  # keys of a unit
    MAX_DECODE_QUERIES: Any  # sequences with more queries belong to another kernel; 0 if this kernel serves all
    INTERVALS: Any = 0  # of a sequence, that a program loads in one step; 0 where rows see a band of keys
    MORE_INTERVALS: Any = False  # a sequence may have more


class Costs(NamedTuple):
    """What decides how long the shortest partition is; the last three are of dispatch.config.CostModel."""

    combine_cost: Any  # of a partial, in units; 0 to cut wherever partitions are equal
    min_split_tiles: Any
    two_level_discount: Any
    two_level_min_tiles: Any


# What they write, in the order of memory.


class Part(NamedTuple):
    """What one partition of the batch has.

    Its row blocks are those from `block` of `seq` to `last_block` of `last_seq`. All but the first and the last one are
    whole. Units are counted in the batch; those of a row block are as many as when the schedule was found.
    """

    low: Any  # its first unit
    high: Any  # its last unit and one; not above `low` if it has none
    size: Any  # units of every partition but the last
    seq: Any
    block: Any
    first_unit: Any  # of the first row block
    first_units: Any  # how many that row block has
    last_seq: Any
    last_block: Any  # NO_END if the partition ends where its last sequence does
    last_unit: Any  # of the last row block, like the next
    last_units: Any
    seq_len: Any  # of `seq` when the schedule was found, like the next three: nothing waits for what they are now
    q_start: Any
    q_len: Any
    first_pos: Any


class LatentPart(NamedTuple):
    """What one partition of a row block of latents has: nothing if `seq` is after `last_seq`.

    Every sequence belongs to a partition of each row block, also where it has no rows in the row block.
    """

    seq: Any  # its first sequence
    tile: Any  # of that sequence, the first tile that is here
    seq_len: Any  # of that sequence when the schedule was found, like the next three
    q_start: Any
    q_len: Any
    first_pos: Any
    last_seq: Any
    stop: Any  # of that sequence, the tile after the last one that is here; NO_END if the sequence ends here
    last_tiles: Any  # tiles that it had when the schedule was found, if it is cut
    size: Any  # places of a partition


class Cut(NamedTuple):
    """What a second launch combines of one row block of a sequence."""

    number: Any  # partials, or states of splits with the fold of the first; less than 2 if one program finished it
    first: Any  # slot of the first one; of latents on Hopper GPUs, its partition
    seq: Any
    block: Any


class RowBlock(NamedTuple):
    """A place of the order: a row block of a prompt, or a split of one."""

    seq: Any
    token: Any  # its first query token, counted from the sequence's first
    q_start: Any  # the sequence's first query token, in the batch
    q_len: Any
    first_pos: Any  # position of the sequence's first query among its keys
    seq_len: Any
    kv_start: Any  # the keys that any row sees
    kv_stop: Any
    shift: Any  # there are 1 << shift splits
    first_slot: Any  # of the partials of its first work tile
    split: Any  # which of the splits this is
    full_start: Any  # of intervals, like the next three: the keys that every row sees
    full_stop: Any
    kv_low: Any  # keys that are in the sequence's pages and finite: at least those that any row sees
    kv_high: Any


class Planned(NamedTuple):
    """The lengths for which row blocks were ordered, and where those of now are."""

    lengths: Any  # [num_seqs, 3] int32: keys, the end of the queries, and the offset of the first one if there are any
    seq_lens: Any
    cu_seqlens_q: Any
    query_offsets: Any
    num_seqs: Any


@triton.jit
def store_fields(at, fields, mask=None):
    """Store the fields of a record, or of each of a vector of records."""
    for i in tl.static_range(len(fields)):
        tl.store(at + i, fields[i], mask=mask)


@triton.jit
def load_fields(at, NUMBER: tl.constexpr):
    """Return the first fields of a record. The compiler leaves out loads of those that a kernel does not use."""
    fields = ()
    for i in tl.static_range(NUMBER):
        fields = fields + (tl.load(at + i),)
    return fields


@triton.jit
def load_part(parts_ptr, partition):
    """Return the `Part` of a partition."""
    return Part(*load_fields(parts_ptr + partition * FIELDS, 15))


@triton.jit
def load_latent_part(parts_ptr, index):
    """Return a `LatentPart`."""
    return LatentPart(*load_fields(parts_ptr + index * FIELDS, 10))


@triton.jit
def load_cut(cuts_ptr, index):
    """Return the `Cut` of a row block."""
    return Cut(*load_fields(cuts_ptr + index * CUT_FIELDS, 4))


# Which keys are seen.


class Sequence(NamedTuple):
    """The lengths of a sequence, or of each of a vector of sequences."""

    seq_len: Any  # keys
    q_start: Any  # its first query token of the batch
    q_len: Any  # query tokens
    first_pos: Any  # the position of its first query among its keys


@triton.jit
def load_sequence(lengths, cu_seqlens_q, seq, mask=None, one_each=None):
    """Return the `Sequence` of a number, or of each of a vector of numbers; zeros where the mask is not set."""
    other: tl.constexpr = None if mask is None else 0
    seq_len = tl.load(lengths.seq_lens + seq, mask, other)
    q_start, q_len = load_queries_of(cu_seqlens_q, seq, mask, one_each)
    if lengths.query_offsets is None:
        first_pos = seq_len - q_len
    else:
        first_pos = tl.load(lengths.query_offsets + seq, mask, other)
    return Sequence(seq_len, q_start, q_len, first_pos)


@triton.jit
def load_queries_of(cu_seqlens_q, seq, mask=None, one_each=None):
    """Return which is a sequence's first query token of the batch, and how many it has.

    Every sequence has one if `cu_seqlens_q` is None, or if the number `one_each` is not 0; then nothing is read.
    Because it is a number, one compiled kernel serves both kinds of batches. No caller gives a mask with it.
    """
    if cu_seqlens_q is None:
        return seq, seq * 0 + 1
    elif one_each is None:
        other: tl.constexpr = None if mask is None else 0
        q_start = tl.load(cu_seqlens_q + seq, mask, other)
        return q_start, tl.load(cu_seqlens_q + seq + 1, mask, other) - q_start
    else:
        is_read = seq * 0 + one_each == 0
        q_start, q_stop = tl.load(cu_seqlens_q + seq, is_read, 0), tl.load(cu_seqlens_q + seq + 1, is_read, 0)
        return tl.where(is_read, q_start, seq), tl.where(is_read, q_stop - q_start, 1)


@triton.jit
def load_lengths(lengths, seq):
    """Return the `Sequence` of a number, or of each of a vector of numbers, of `Lengths`."""
    return load_sequence(lengths, lengths.cu_seqlens_q, seq, None, lengths.one_each)


@triton.jit
def keys_of_band(sequence, token, count, window_left, window_right):
    """Return the first key that `count` query tokens see, from `token` of the sequence on, and the one after the last.

    The stop may be below the start, if they see none.
    """
    seq_len, _, q_len, first_pos = sequence
    kv_start = tl.maximum(first_pos + token - window_left, 0)
    return kv_start, tl.minimum(first_pos + tl.minimum(token + count, q_len) + window_right, seq_len)


@triton.jit
def span(sequence, lengths, window_left, window_right, U: tl.constexpr):
    """Return the keys and units of a `Sequence`.

    A sequence without queries is an idle row of an engine. Its length may be stale, and its pages may be anywhere.

    Returns:
        kv_start, kv_stop: the keys that any of its queries sees.
        first: the first unit that holds such a key.
        num_units: units of each row block; at least 1, so that zeros are written for a padding row.
        num_blocks: row blocks; at least 1.
    """
    seq_len, q_start, q_len, first_pos = sequence
    if U.INTERVALS == 0:
        kv_start, kv_stop = keys_of_band(sequence, 0, q_len, window_left, window_right)
        kv_stop = tl.maximum(kv_stop, 0)
    else:
        kv_start, kv_stop = interval_span(lengths, q_start, q_len, first_pos, seq_len, U)
    kv_stop = tl.where(q_len > 0, kv_stop, 0)
    first = kv_start // U.UNIT
    num_units = tl.maximum(tl.cdiv(kv_stop, U.UNIT) - first, 1)
    num_blocks = tl.maximum(tl.cdiv(q_len * U.GROUP, U.BLOCK_M), 1)
    return kv_start, kv_stop, first, num_units, num_blocks


@triton.jit
def interval_span(lengths, q_start, q_len, first_pos, seq_len, U: tl.constexpr):
    """Return the keys that any query of a sequence sees, or of each of a vector of sequences.

    In a tree, intervals are of the keys before the drafts, and all drafts count as seen.
    """
    start, stop = seq_len * 0 + NO_END, seq_len * 0
    if U.MORE_INTERVALS:
        longest = tl.max(q_len + tl.zeros([1], tl.int32), 0)  # of one sequence or of several
        if U.MAX_DECODE_QUERIES > 0:  # of longer sequences, which belong to another kernel, nothing is used
            longest = tl.minimum(longest, U.MAX_DECODE_QUERIES)
        for done in tl.range(0, longest, U.INTERVALS, num_stages=1):
            start, stop = add_intervals(lengths, start, stop, q_start, q_len, first_pos, seq_len, done, U)
    else:
        start, stop = add_intervals(lengths, start, stop, q_start, q_len, first_pos, seq_len, 0, U)
    if lengths.key_end is None:
        stop = tl.maximum(tl.minimum(first_pos + q_len, seq_len), 0)
    return tl.maximum(tl.minimum(start, stop), 0), stop


@triton.jit
def add_intervals(lengths, start, stop, q_start, q_len, first_pos, seq_len, done, U: tl.constexpr):
    """Return the least begin and the greatest end, with those of INTERVALS queries from the `done`-th on."""
    for i in tl.static_range(U.INTERVALS):
        query = done + i
        begin = tl.load(lengths.key_begin + q_start + query, mask=query < q_len, other=NO_END)
        if lengths.key_end is None:
            start = tl.minimum(start, tl.minimum(begin, first_pos))
        else:
            end = tl.minimum(tl.load(lengths.key_end + q_start + query, mask=query < q_len, other=0), seq_len)
            seen = begin < end
            start = tl.where(seen, tl.minimum(start, begin), start)
            stop = tl.where(seen, tl.maximum(stop, end), stop)
    return start, stop


@triton.jit
def load_intervals(lengths, token, owned, seq_len):
    """Return the first key that each query token of the batch sees, and the one after the last, within its sequence.

    A token that is not owned sees nothing.
    """
    begin = tl.maximum(tl.load(lengths.key_begin + token, mask=owned, other=0), 0)
    end = tl.load(lengths.key_end + token, mask=owned, other=0)
    return begin, tl.maximum(tl.minimum(end, seq_len), 0)


@triton.jit
def keys_of_intervals(lengths, token, q_start, q_len, seq_len, block_t, TOKENS: tl.constexpr):
    """Return the keys of row blocks whose rows see intervals, as the last six fields of `RowBlock` have them."""
    tokens = token[:, None] + tl.arange(0, TOKENS)[None, :]
    owned = tokens < tl.minimum(q_len, token + block_t)[:, None]
    begin, end = load_intervals(lengths, q_start[:, None] + tokens, owned, seq_len[:, None])
    kv_start = tl.min(tl.where(begin < end, begin, NO_END), 1)
    kv_stop = tl.max(tl.where(begin < end, end, 0), 1)
    full_start, full_stop = tl.max(begin, 1), tl.min(tl.where(owned, end, NO_END), 1)
    # The keys between those that any tokens of the sequence see are finite. With those of its first and its last token,
    # the edge of a row block that sees a part of a tile needs no zeros.
    kv_low, kv_high = kv_start, kv_stop
    for i in tl.static_range(2):
        begin, end = load_intervals(lengths, q_start + i * (q_len - 1), q_len > 0, seq_len)
        kv_low = tl.minimum(kv_low, tl.where(begin < end, begin, NO_END))
        kv_high = tl.maximum(kv_high, tl.where(begin < end, end, 0))
    return tl.minimum(kv_start, kv_stop), kv_stop, full_start, full_stop, kv_low, kv_high


@triton.jit
def visible_keys(sequence, row_block, causal, U: tl.constexpr):
    """Return how many keys of a `Sequence` of latents, or of each of a vector of sequences, its row block sees."""
    seq_len, _, q_len, first_pos = sequence
    # As `keys_of_band` has it, with additions in another order. The kernels that attend to latents compute it too.
    last_token = tl.minimum((row_block * U.BLOCK_M + U.BLOCK_M - 1) // U.GROUP, q_len - 1)
    visible = tl.where(causal, tl.minimum(first_pos + last_token + 1, seq_len), seq_len)
    return tl.maximum(visible, 0)


@triton.jit
def num_tiles(q_len, visible, row_block, U: tl.constexpr):
    """Return the tiles of a row block that exists: at least one, so that zeros are written where there are no keys."""
    return tl.where(q_len * U.GROUP > row_block * U.BLOCK_M, tl.maximum((visible + U.UNIT - 1) // U.UNIT, 1), 0)


@triton.jit
def tiles_of(sequence, row_block, causal, U: tl.constexpr):
    """Return the tiles of a row block of a `Sequence` of latents, or of each of a vector of sequences."""
    return num_tiles(sequence.q_len, visible_keys(sequence, row_block, causal, U), row_block, U)


@triton.jit
def is_as_planned(sequence, known):
    """Return whether a sequence still has the lengths with which its queries and keys are found."""
    same_keys = (sequence.seq_len == known.seq_len) & (sequence.first_pos == known.first_pos)
    return same_keys & (sequence.q_start == known.q_start) & (sequence.q_len == known.q_len)


# Where a cut is: what the kernels that find schedules share.


@triton.jit
def pass_sequences(seq, place, ends, before, AXIS: tl.constexpr = 0):
    """Count sequences that end before a place of a list.

    Args:
        seq: how many of those that came before these do.
        place: where the last of them ends.
        ends: where each of these ends.
        before: which of these do.

    Returns:
        Both for these too. So the sequence of the place is `seq`, and begins at `place`.
    """
    seq += tl.sum(before.to(tl.int32), AXIS)
    return seq, tl.maximum(place, tl.max(tl.where(before, ends, 0), AXIS))


@triton.jit
def end_with_sequences(size, longest, slack, may_change):
    """Return the size of a partition, changed so that partitions end where sequences of `longest` units do.

    Then there is less to combine. It is changed where it may be, and grows by `slack` at most.
    """
    shorter, longer = tl.cdiv(longest, tl.maximum(longest // size, 1)), tl.cdiv(size, longest) * longest
    even = tl.where(size < longest, shorter, longer)
    return tl.where(may_change & (even <= size + slack), even, size)


@triton.jit
def partitions_of(unit, num_units, size):
    """Return the first of the partitions that have some units from `unit` on, and how many there are."""
    first = unit // size
    return first, (unit + num_units - 1) // size - first + 1


# Equal partitions of the batch.


@triton.jit
def count_units(lengths, first, num_seqs, window_left, window_right, U: tl.constexpr):
    """Return which sequences of the batch MORE_SEQS from `first` on are, their units in all, and their row blocks.

    Sequences that belong to another kernel have 0 of both.
    """
    seqs = first + tl.arange(0, MORE_SEQS)
    sequences = load_lengths(lengths, tl.minimum(seqs, num_seqs - 1))
    _, _, _, num_units, num_blocks = span(sequences, lengths, window_left, window_right, U)
    ours = seqs < num_seqs
    if U.MAX_DECODE_QUERIES > 0:
        ours = ours & (sequences.q_len <= U.MAX_DECODE_QUERIES)
    return seqs < num_seqs, tl.where(ours, num_units * num_blocks, 0), tl.where(ours, num_blocks, 0)


@triton.jit
def min_partition_units(mean, costs):
    """Return the length of the shortest partition that is worth its cost, as a float, for sequences of `mean` units.

    The host computes the same; `portable.variants.min_partition_tiles` explains the formula.
    """
    discount = tl.where(mean > costs.two_level_min_tiles, costs.two_level_discount, 1.0)
    whole = (mean <= costs.min_split_tiles) & (costs.combine_cost > 0)
    return tl.where(whole, mean, tl.sqrt(mean * (discount * costs.combine_cost)))


@triton.jit
def partition_size(total, longest, num_seqs, num_partitions, costs):
    """Return the units of every partition but the last, of `total` units; the longest sequence has `longest`."""
    shortest = min_partition_units(total.to(tl.float32) / num_seqs, costs)
    size = tl.maximum(tl.cdiv(total, num_partitions), (shortest + 0.5).to(tl.int32))
    size, longest = tl.maximum(size, 1), tl.maximum(longest, 1)  # all sequences may belong to the other kernel
    # With whole sequences that gains little and leaves programs idle: only a part of one may be a thirty-second longer.
    slack = tl.maximum(costs.min_split_tiles, tl.where(2 * size <= longest, size // 32, 0))
    return end_with_sequences(size, longest, slack, (longest * num_seqs == total) & (costs.combine_cost > 0))


@triton.jit
def find_unit(lengths, num_seqs, unit, window_left, window_right, U: tl.constexpr):
    """Return where a unit of the batch is.

    Returns:
        seq: its sequence.
        sequence: the lengths of that.
        block: which of the sequence's row blocks it is in.
        block_unit: that row block's first unit.
        block_units: how many that row block has.
        is_last: whether it is the last row block of the sequence.
    """
    seq, seq_unit, end = unit * 0, unit * 0, unit * 0
    for first in tl.range(0, num_seqs, MORE_SEQS, num_stages=1):
        _, units, _ = count_units(lengths, first, num_seqs, window_left, window_right, U)
        ends = end + tl.cumsum(units, 0)
        seq, seq_unit = pass_sequences(seq, seq_unit, ends, ends <= unit)
        end += tl.sum(units, 0)
    seq = tl.minimum(seq, num_seqs - 1)
    sequence = load_lengths(lengths, seq)
    _, _, _, num_units, num_blocks = span(sequence, lengths, window_left, window_right, U)
    block = (unit - seq_unit) // num_units
    return seq, sequence, block, seq_unit + block * num_units, num_units, block == num_blocks - 1


@triton.jit(
    do_not_specialize=[
        "min_split_tiles", "two_level_min_tiles", "num_seqs", "num_partitions", "num_cuts", "window_left",
        "window_right",
    ],
)  # fmt: skip
def schedule_kernel(
    parts_ptr,  # [num_partitions, FIELDS] int32
    cuts_ptr,  # [num_cuts, CUT_FIELDS] int32, or None without a second launch
    lengths,  # Lengths
    combine_cost, min_split_tiles, two_level_discount, two_level_min_tiles,  # Costs
    window_left, window_right, num_seqs, num_partitions, num_cuts,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, MAX_DECODE_QUERIES: tl.constexpr,
    INTERVALS: tl.constexpr, MORE_INTERVALS: tl.constexpr,  # of Units
    FIXED_SPLIT: tl.constexpr,  # units are splits of a batch-invariant plan
    PDL: tl.constexpr,  # programmatic dependent launch
):  # fmt: skip
    """Find one partition, and one row block that may be cut. Grid: [max(num_partitions, num_cuts)]."""
    if PDL:  # whoever waits for this launch waits for those before it too
        gdc_wait()
    U: tl.constexpr = Units(GROUP, BLOCK_M, UNIT, MAX_DECODE_QUERIES, INTERVALS, MORE_INTERVALS)
    costs = Costs(combine_cost, min_split_tiles, two_level_discount, two_level_min_tiles)
    index = tl.program_id(0)
    # Of all sequences: their units and row blocks, and those of the sequences before row block `index`.
    total, longest, num_blocks = index * 0, index * 0, index * 0
    cut_seq, cut_block, cut_unit = index * 0, index * 0, index * 0
    for first in tl.range(0, num_seqs, MORE_SEQS, num_stages=1):
        inside, units, blocks = count_units(lengths, first, num_seqs, window_left, window_right, U)
        ends = num_blocks + tl.cumsum(blocks, 0)
        before = (ends <= index) & inside
        cut_seq, cut_block = pass_sequences(cut_seq, cut_block, ends, before)
        cut_unit += tl.sum(tl.where(before, units, 0), 0)
        total += tl.sum(units, 0)
        longest = tl.maximum(longest, tl.max(units, 0))
        num_blocks += tl.sum(blocks, 0)
    size = partition_size(total, longest, num_seqs, num_partitions, costs)
    if index < num_partitions:
        low = index * size
        high = tl.minimum(low + size, total)
        seq, sequence, block, first_unit, first_units, _ = find_unit(
            lengths, num_seqs, low, window_left, window_right, U
        )
        last_seq, _, last_block, last_unit, last_units, is_last = find_unit(
            lengths, num_seqs, high - 1, window_left, window_right, U
        )
        last_block = tl.where(is_last & (last_unit + last_units == high), NO_END, last_block)
        part = Part(
            low, high, size, seq, block, first_unit, first_units, last_seq, last_block, last_unit, last_units,
            *sequence,
        )  # fmt: skip
        store_fields(parts_ptr + index * FIELDS, part)
    if cuts_ptr is not None:
        if index < num_cuts:
            number, slot, seq, block = index * 0, index * 0, index * 0, index * 0
            if index < num_blocks:
                seq, block = cut_seq, index - cut_block
                sequence = load_lengths(lengths, seq)
                _, _, _, num_units, _ = span(sequence, lengths, window_left, window_right, U)
                unit = cut_unit + block * num_units
                first_partition, number = partitions_of(unit, num_units, size)
                slot = 2 * first_partition + 1
                if FIXED_SPLIT:  # the program that begins a row block folds its splits, into the slot of the last one
                    slot = (first_partition + 1) * size - 1
                    number = unit + num_units - slot
            store_fields(cuts_ptr + index * CUT_FIELDS, Cut(number, slot, seq, block))


@triton.jit
def units_here(part, seq, block, num_units):
    """Return which units of a row block a partition has; the row block has `num_units` now.

    Returns:
        start: the first one of the row block that is in this partition; 0 if it begins here.
        stop: the last one and one.
        block_unit: the first unit of the row block, in the batch, if it is cut.
        planned: units that the row block had when the schedule was found, if it is cut; else those of now.
        is_cut: whether other partitions have units of it.
    """
    is_first = (seq == part.seq) & (block == part.block)
    is_last = (seq == part.last_seq) & (block == part.last_block)
    block_unit = tl.where(is_last, part.last_unit, part.first_unit)
    planned = tl.where(is_last, part.last_units, part.first_units)
    start = tl.where(is_first, part.low - part.first_unit, 0)
    stop = tl.where(is_last, part.high - part.last_unit, planned)
    is_cut = (start > 0) | (stop < planned)
    planned = tl.where(is_cut, planned, num_units)
    return start, tl.where(is_cut, stop, num_units), block_unit, planned, is_cut


@triton.jit
def next_row_block(part, seq, block, num_blocks, MULTI_BLOCK: tl.constexpr):
    """Return the sequence and the row block after this one, and whether they are in the partition.

    The sequence has `num_blocks` now. Of a partition's last sequence, all row blocks up to `last_block` are met, which
    may be fewer or more than it has now: none is left out, and what a cut row block waits for is written.
    """
    if MULTI_BLOCK:
        block += 1
        ends = (block >= num_blocks) & ((seq < part.last_seq) | (part.last_block == NO_END))
        block = tl.where(ends, 0, block)
        seq += ends.to(tl.int32)
    else:
        seq += 1
    return seq, block, (seq < part.last_seq) | ((seq == part.last_seq) & (block <= part.last_block))


@triton.jit
def queries_before(cu_seqlens_q, seq, last_seq):
    """Return the queries of a sequence before `last_seq`, and 0 for `last_seq`, which may be the batch's end."""
    is_before = seq < last_seq
    stop = tl.load(cu_seqlens_q + seq + 1, mask=is_before, other=0)
    return stop - tl.load(cu_seqlens_q + seq, mask=is_before, other=0)


@triton.jit
def skip_prompts(cu_seqlens_q, seq, last_seq, MAX_DECODE_QUERIES: tl.constexpr):
    """Return the first sequence from `seq` to `last_seq` that does not belong to another kernel."""
    while queries_before(cu_seqlens_q, seq, last_seq) > MAX_DECODE_QUERIES:
        seq += 1
    return seq


# Equal partitions of each row block, for latents on Hopper GPUs.


@triton.jit
def tiles_of_sequences(lengths, first, num_seqs, row_block, causal, U: tl.constexpr):
    """Return the tiles of each of SEQS sequences from `first` on."""
    seqs = first + tl.arange(0, SEQS)
    sequences = load_lengths(lengths, tl.minimum(seqs, num_seqs - 1))
    return tl.where(seqs < num_seqs, tiles_of(sequences, row_block, causal, U), 0)


@triton.jit
def latent_partition_size(total, longest, count, num_partitions, combine_cost, sequence_cost):
    """Return the places of every partition but the last, of all, and before the tiles of each sequence.

    Args:
        total: tiles of all sequences.
        longest: tiles of the longest one.
        count: sequences with tiles.
        num_partitions: most partitions.
        combine_cost: c of a partial: t tiles in partitions of s tiles take s + c * t / s, least at sqrt(c * t).
        sequence_cost: time to begin a sequence, in tiles, where sequences differ.
    """
    shortest = tl.maximum((tl.sqrt(total.to(tl.float32) * combine_cost) + 0.5).to(tl.int32), 1)
    shortest = tl.minimum(shortest, tl.maximum(longest, 1))  # a whole sequence has no partial
    all_equal = longest * count == total
    overhead = tl.where(all_equal, 0, sequence_cost)
    total += overhead * count
    size = tl.maximum(tl.cdiv(total, num_partitions), shortest)
    return end_with_sequences(size, tl.maximum(longest, 1), 1, all_equal), total, overhead


@triton.jit(do_not_specialize=["sequence_cost", "by_sequence", "whole", "num_seqs", "num_partitions", "num_cuts"])
def mla_schedule_kernel(
    parts_ptr,  # [row blocks, num_partitions, FIELDS] int32
    cuts_ptr,  # [row blocks, num_cuts, CUT_FIELDS] int32
    lengths,  # Lengths
    combine_cost, sequence_cost,  # as `latent_partition_size` takes them
    causal,
    by_sequence,  # whether there is a cut for each sequence, or for each partition: of the sequence that its end cuts
    whole,  # whether no sequence is cut: each is of the partition in which it begins
    num_seqs, num_partitions, num_cuts,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,  # of Units
    PDL: tl.constexpr,  # programmatic dependent launch
):  # fmt: skip
    """Find a partition of a row block, and a sequence that may be cut. Grid: [row blocks * max(partitions, cuts)]."""
    if PDL:  # whoever waits for this launch waits for those before it too
        gdc_wait()
    U: tl.constexpr = Units(GROUP, BLOCK_M, UNIT, 0)
    each = tl.maximum(num_partitions, num_cuts)
    row_block, index = tl.program_id(0) // each, tl.program_id(0) % each
    causal = causal > 0
    total, longest, count = index * 0, index * 0, index * 0
    for first in tl.range(0, num_seqs, SEQS, num_stages=1):
        tiles = tiles_of_sequences(lengths, first, num_seqs, row_block, causal, U)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
        count += tl.sum((tiles > 0).to(tl.int32), 0)
    size, total, overhead = latent_partition_size(total, longest, count, num_partitions, combine_cost, sequence_cost)
    low = tl.minimum(index * size, total)
    high = tl.minimum(low + size, total)
    # The sequences at both places, where they begin, and where sequence `index` begins.
    seq, place, end_seq, end_place, own_place, end = index * 0, index * 0, index * 0, index * 0, index * 0, index * 0
    for first in tl.range(0, num_seqs, SEQS, num_stages=1):
        tiles = tiles_of_sequences(lengths, first, num_seqs, row_block, causal, U)
        places = tl.where(tiles > 0, tiles + overhead, 0)
        ends = end + tl.cumsum(places, 0)
        seq, place = pass_sequences(seq, place, ends, ends <= low)
        end_seq, end_place = pass_sequences(end_seq, end_place, ends, ends <= high)
        own_place += tl.sum(tl.where(first + tl.arange(0, SEQS) < index, places, 0), 0)
        end += tl.sum(places, 0)
    seq, end_seq = tl.minimum(seq, num_seqs), tl.minimum(end_seq, num_seqs)
    seq += ((whole > 0) & (low > place)).to(tl.int32)
    seq = tl.where(index == 0, 0, seq)  # no sequence without rows is left out
    stop = tl.where(whole > 0, 0, high - (end_place + overhead))
    last = load_lengths(lengths, tl.minimum(end_seq, num_seqs - 1))
    last_tiles = tiles_of(last, row_block, causal, U)
    is_cut = stop > 0
    if index < num_partitions:
        last_seq = tl.where(is_cut | ((whole > 0) & (high > end_place)), end_seq, end_seq - 1)
        is_empty = seq > last_seq
        last_seq = tl.where(is_empty, num_seqs - 1, last_seq)
        seq = tl.where(is_empty, num_seqs, seq)
        sequence = load_lengths(lengths, tl.minimum(seq, num_seqs - 1))
        tile = tl.where(whole > 0, 0, tl.maximum(low - (place + overhead), 0))
        part = LatentPart(
            seq, tile, sequence.seq_len, sequence.q_start, sequence.q_len, sequence.first_pos,
            last_seq, tl.where(is_cut, stop, NO_END), last_tiles, size,
        )  # fmt: skip
        store_fields(parts_ptr + (row_block * num_partitions + index) * FIELDS, part)
    if index < num_cuts:
        cut_seq, cut_place, may_be_cut = end_seq, end_place, is_cut
        if by_sequence:
            cut_seq, cut_place, may_be_cut = index, own_place, index < num_seqs
            own = load_lengths(lengths, tl.minimum(index, num_seqs - 1))
            last_tiles = tiles_of(own, row_block, causal, U)
        first_partition, number = partitions_of(cut_place + overhead, last_tiles, size)
        may_be_cut = may_be_cut & ((by_sequence > 0) | (first_partition == index)) & (last_tiles > 0)
        cut = Cut(tl.where(may_be_cut, number, 0), first_partition, tl.minimum(cut_seq, num_seqs - 1), row_block)
        store_fields(cuts_ptr + (row_block * num_cuts + index) * CUT_FIELDS, cut)


# An order of row blocks, of which some are cut by keys.
#
# The last row blocks of a sequence come first, since they see the most keys. Where a work tile is a large part of a
# program's work, the sequence with the most keys comes first. Where a row block sees more tiles than a program's share,
# other programs would wait for the one that attends to it: the last row blocks of such sequences have 2, 4 or 8 splits.
# That of a sequence with one row block has up to 32, since its partials have few rows. The host knows bounds, not
# lengths. It says how many slots there are, and what does not fit is not cut.


@triton.jit
def load_prompts(lengths, first, num_seqs, max_decode_queries, block_t):
    """Return SEQS sequences from `first` on, and the row blocks of each: 0 of those of the decode launch."""
    seqs = first + tl.arange(0, SEQS)
    sequences = load_sequence(lengths, lengths.cu_seqlens_q, seqs, seqs < num_seqs)
    return sequences, tl.where(sequences.q_len > max_decode_queries, tl.cdiv(sequences.q_len, block_t), 0)


@triton.jit
def count_keys(token, s, window_left, window_right, block_t, block_n):
    """Return how many keys a row block of each `Sequence` sees; so few that a place of the order fits 32 bits."""
    kv_start, kv_stop = keys_of_band(s, token, block_t, window_left, window_right)
    return tl.minimum(tl.maximum(kv_stop - kv_start, 0), (1 << 29) - block_n)


@triton.jit
def tiles_in(keys: tl.constexpr, block_n):
    """Return how many whole tiles some keys are. The interpreter of Triton 3.8 divides no constant by a tensor."""
    return (block_n * 0 + keys) // block_n


@triton.jit
def cut_sequences(
    counts, tiles, first_keys, work, num_programs, work_tiles_each, cut_slots, block_t, block_n
):  # fmt: skip
    """Decide which of some sequences are cut. Splits are as short as a program's share of all work, if keys suffice.

    Args:
        counts: row blocks of the sequences.
        tiles: tiles of keys that the last row block of each one sees.
        first_keys: keys that the first row block of each one sees.
        work: tiles of all work tiles, roughly.
        num_programs: of the launch that attends.
        work_tiles_each: work tiles of a row block that is not cut.
        cut_slots: slots for partials.
        block_t, block_n: query tokens of a row block, and keys of a tile.

    Returns:
        whole: row blocks that stay whole, which are the first ones.
        shift: 1 << shift splits of each other one.
        slot: of the first partial.
    """
    # A split shorter than LEAST_KEYS takes longer to combine than it saves.
    share = tl.maximum(work // num_programs, tiles_in(LEAST_KEYS, block_n))
    shift = (tiles > share).to(tl.int32) + (tiles > 2 * share).to(tl.int32) + (tiles > 4 * share).to(tl.int32)
    longer = (tiles > 8 * share).to(tl.int32) + (tiles > 16 * share).to(tl.int32)
    shift += tl.where(counts == 1, longer, 0)  # whose partials are small
    # Row blocks that see less than this share, or half as much as the last one, stay whole. In a causal prompt, each
    # row block sees block_t keys more than the one before.
    least = tl.minimum(tl.maximum(share, tiles // 2), tiles)
    whole = (least * block_n - first_keys) // block_t + 1
    whole = tl.maximum(tl.minimum(tl.where(first_keys > least * block_n, 0, whole), counts - 1), 0)
    num_cut = counts - whole
    # No product of more than cut_slots row blocks is taken, which might wrap around.
    shift = tl.where((counts > 0) & (num_cut <= cut_slots), shift, 0)
    num_cut = tl.where(shift > 0, num_cut, 0)
    needed = (num_cut << shift) * work_tiles_each
    needed = tl.where(needed <= cut_slots, needed, 0)  # so that no sum of them wraps around
    stop = tl.cumsum(needed, 0)
    fits = (needed > 0) & (stop <= cut_slots)
    shift, num_cut = tl.where(fits, shift, 0), tl.where(fits, num_cut, 0)
    return counts - num_cut, shift, stop - needed


@triton.jit
def order_by_keys(
    s, counts, num_seqs, window_left, window_right, num_programs, work_tiles_each, cut_slots, may_be_mixed, block_t,
    block_n,
):  # fmt: skip
    """Return where the places of the first SEQS sequences end, if the sequence with the most keys is the last one.

    What counts is the tiles of keys that the last row block sees. Sequences with as many stay in the batch's order.
    Where an order gains little, the batch's order stays.
    If there are slots, long sequences are cut by keys first, and each split of a row block counts as one.
    Sequences of one row block come before all others in a mixed batch, and the one of these that has the most keys is
    the first one. So `queue.py` finds the longest work tile of either kind at either end.

    Args:
        s: the first SEQS of them, a `Sequence`.
        counts: row blocks of each.
        num_seqs: of the batch.
        window_left, window_right: how far a query sees.
        num_programs: of the launch that attends.
        work_tiles_each: work tiles of a row block.
        cut_slots: slots for partials.
        may_be_mixed: whether decoding sequences may be among the prompts.
        block_t, block_n: query tokens of a row block, and keys of a tile.

    Returns:
        ends: of each sequence's places.
        whole, shift, slot: as `cut_sequences` returns them.
        num_singles: places of a mixed batch that belong to sequences of one row block; 0 if it is not mixed.
        from_back: how many programs begin with these.
    """
    seqs = tl.arange(0, SEQS)
    token = tl.maximum(counts - 1, 0) * block_t
    tiles = (count_keys(token, s, window_left, window_right, block_t, block_n) + block_n - 1) // block_n
    owns, singles = counts > 0, counts == 1
    has_prompts = (tl.max(counts, 0) > 1) | (num_seqs > SEQS)  # the others are taken first
    mixed = (may_be_mixed > 0) & has_prompts & (tl.max(singles.to(tl.int32), 0) > 0)
    most, least = tl.max(tl.where(owns, tiles, 0), 0), tl.min(tl.where(owns, tiles, NO_END), 0)
    # Seen by all row blocks: each has as many tiles as the last one, or in a mixed batch as the mean of first and last.
    first_keys = count_keys(token * 0, s, window_left, window_right, block_t, block_n)
    first_tiles = tl.where(may_be_mixed > 0, (first_keys + block_n - 1) // block_n, tiles)
    seen = counts * (tiles + first_tiles) // 2
    work = tl.sum(seen, 0) * work_tiles_each  # may wrap around, which costs the order and nothing else
    ordered = (most > least) & (most * SHARE * num_programs > work)
    whole, shift, slot = counts, counts * 0, counts * 0
    if cut_slots > 0:
        # A decoding sequence that a concurrent launch serves is as much work as one row block.
        blocks = tl.maximum(counts, (s.q_len > 0).to(tl.int32))
        work = tl.sum(tl.where(owns, seen, blocks * tiles), 0) * work_tiles_each
        # Cuts cost as much as LEAST_KEYS keys of a row block, roughly. A work tile takes as long as OVERHEAD keys more.
        num_work_tiles = tl.sum(blocks, 0) * work_tiles_each
        if (most - tiles_in(LEAST_KEYS, block_n)) * num_programs > work + num_work_tiles * tiles_in(OVERHEAD, block_n):
            whole, shift, slot = cut_sequences(
                counts, tiles, first_keys, work, num_programs, work_tiles_each, cut_slots, block_t, block_n
            )
            counts = whole + ((counts - whole) << shift)
        has_more = tl.sum(counts, 0) * work_tiles_each > num_programs
        ordered, mixed = ordered & has_more, mixed & has_more
    num_singles, from_back = num_seqs * 0, num_seqs * 0
    if mixed:
        num_singles = tl.sum(tl.where(singles, counts, 0), 0)
        num_others = (tl.sum(counts, 0) - num_singles) * work_tiles_each
        from_back = tl.minimum(num_singles * work_tiles_each, num_programs // 2)
        # Where two of the longest other work tiles take longer than a program's share of all work, no program has two.
        most = tl.max(tl.where(singles, 0, tiles), 0)
        if (num_seqs <= SEQS) & (num_others <= num_programs) & (2 * most * num_programs > work):
            from_back = tl.minimum(from_back, num_programs - num_others)
        ordered = num_seqs > 0
    ends = tl.cumsum(counts, 0)
    if ordered:
        rank = tiles * SEQS + seqs  # no two are equal
        rank = tl.where(singles & mixed, -1 - rank, rank)
        rank = tl.where(owns, rank, -2147483648)
        # Each end is the sum of the places of all sequences that do not come later, so nothing has to be moved.
        not_later = rank[None, :] <= rank[:, None]
        ends = tl.sum(tl.where(not_later, counts[None, :], 0), 1)
    return ends, whole, shift, slot, num_singles, from_back


@triton.jit(
    do_not_specialize=[
        "window_left", "window_right", "num_seqs", "max_decode_queries", "num_programs", "head_blocks", "cut_slots",
        "max_places", "may_be_mixed", "block_t", "block_n",
    ],
)  # fmt: skip
def hopper_schedule_kernel(
    places_ptr,  # [max_places, FIELDS] int32
    summary_ptr,  # [3] int32: places of the batch, and what `order_by_keys` returns last
    planned_ptr,  # of Planned
    lengths,  # Lengths
    window_left, window_right, num_seqs,
    max_decode_queries,  # sequences with at most this many queries belong to the decode launch; 0 if there is none
    num_programs,  # of the launch that attends
    head_blocks,  # work tiles of a row block that is not cut: blocks of heads, times parts of columns, times splits
    cut_slots,  # for partials of row blocks that are cut
    max_places,
    may_be_mixed,  # whether decoding sequences may be among the prompts
    block_t, block_n,  # query tokens of a row block, and keys of a tile
    TOKENS: tl.constexpr,  # of intervals: `block_t`, or the next power of two
    PDL: tl.constexpr,  # programmatic dependent launch
):  # fmt: skip
    """Find PLACES places of the order. Grid: [cdiv(max_places, PLACES)]."""
    if PDL:  # whoever waits for this launch waits for those before it too
        gdc_wait()
    s, counts = load_prompts(lengths, 0, num_seqs, max_decode_queries, block_t)
    num_places = tl.sum(counts, 0)
    for first in tl.range(SEQS, num_seqs, SEQS, num_stages=1):
        num_places += tl.sum(load_prompts(lengths, first, num_seqs, max_decode_queries, block_t)[1], 0)
    ends, whole, shift, slot = tl.cumsum(counts, 0), counts, counts * 0, counts * 0
    num_singles, from_back = num_seqs * 0, num_seqs * 0
    if lengths.key_begin is None:
        # Lengths may differ, and a work tile that starts last should be short.
        if (cut_slots > 0) | (num_seqs > 1) & (num_places * head_blocks > num_programs):
            before = tl.sum(counts, 0)
            ends, whole, shift, slot, num_singles, from_back = order_by_keys(
                s, counts, num_seqs, window_left, window_right, num_programs, head_blocks, cut_slots, may_be_mixed,
                block_t, block_n,
            )  # fmt: skip
            num_places += tl.max(ends, 0) - before
    if tl.program_id(0) == 0:
        tl.store(summary_ptr, num_places)
        tl.store(summary_ptr + 1, num_singles)
        tl.store(summary_ptr + 2, from_back)
        for first in tl.range(0, num_seqs, SEQS, num_stages=1):
            seqs = first + tl.arange(0, SEQS)
            inside, planned = seqs < num_seqs, planned_ptr + 3 * seqs
            tl.store(planned, tl.load(lengths.seq_lens + seqs, inside), inside)
            tl.store(planned + 1, tl.load(lengths.cu_seqlens_q + seqs + 1, inside), inside)
            if lengths.query_offsets is not None:
                tl.store(planned + 2, tl.load(lengths.query_offsets + seqs, inside), inside)

    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    ended = ends[None, :] <= place[:, None]
    seqs = tl.arange(0, SEQS)[None, :]
    end = tl.min(tl.where(ended, NO_END, ends[None, :]), 1)
    # The first one with this end: others have no row blocks.
    seq = tl.min(tl.where(ends[None, :] == end[:, None], seqs, SEQS), 1)
    before = tl.max(tl.where(ended, ends[None, :], 0), 1)
    all_ends = tl.max(ends, 0)
    for first in tl.range(SEQS, num_seqs, SEQS, num_stages=1):
        _, counts = load_prompts(lengths, first, num_seqs, max_decode_queries, block_t)
        more = all_ends + tl.cumsum(counts, 0)
        seq, before = pass_sequences(seq, before, more[None, :], more[None, :] <= place[:, None], 1)
        all_ends = tl.max(more, 0)
    in_seq = place - before
    split = in_seq * 0
    first_slot, of_place = in_seq * 0, in_seq * 0
    if cut_slots > 0:
        owner = seqs == seq[:, None]
        first_cut = tl.sum(tl.where(owner, whole[None, :], 0), 1)
        of_place = tl.sum(tl.where(owner, shift[None, :], 0), 1)
        in_cut = in_seq - first_cut
        is_cut = (in_cut >= 0) & (seq < SEQS)
        in_cut, of_place = tl.where(is_cut, in_cut, 0), tl.where(is_cut, of_place, 0)
        of_slots = tl.sum(tl.where(owner, slot[None, :], 0), 1)
        first_slot = of_slots + (((in_cut >> of_place) * head_blocks) << of_place)
        split = in_cut & ((1 << of_place) - 1)
        in_seq = tl.where(is_cut, first_cut + (in_cut >> of_place), in_seq)
    exists = place < tl.minimum(num_places, max_places)
    token = in_seq * block_t
    found = load_sequence(lengths, lengths.cu_seqlens_q, seq, exists)
    if lengths.key_begin is None:
        keys = keys_of_band(found, token, block_t, window_left, window_right)
    else:
        keys = keys_of_intervals(lengths, token, found.q_start, found.q_len, found.seq_len, block_t, TOKENS)
    # The fields of a RowBlock.
    of_sequence = (seq, token, found.q_start, found.q_len, found.first_pos, found.seq_len)
    row_block = of_sequence + keys[:2] + (of_place, first_slot, split) + keys[2:]
    store_fields(places_ptr + place * FIELDS, row_block, exists)


@triton.jit
def tiles_of_keys(kv_start, kv_stop, BLOCK_N: tl.constexpr):
    """Return the first of the tiles that a row block sees, and the one after the last. There is at least one."""
    start = kv_start // BLOCK_N
    return start, tl.maximum((kv_stop + BLOCK_N - 1) // BLOCK_N, start + 1)


@triton.jit
def last_and_count(low, high, stop):
    """Return the last of the tiles from `low` to `high`, and how many there are.

    An empty range gives one tile, `stop`, of which no row sees a key.
    """
    return tl.where(high > low, high - 1, stop), tl.maximum(high - low, 1)


@triton.jit
def split_of_keys(kv_start, kv_stop, split, num_splits, BLOCK_N: tl.constexpr):
    """Return (last tile, number of tiles) of a split of the keys that a row block sees."""
    start, stop = tiles_of_keys(kv_start, kv_stop, BLOCK_N)
    low = start + (stop - start) * split // num_splits
    high = start + (stop - start) * (split + 1) // num_splits
    return last_and_count(low, high, stop)


@triton.jit
def split_of_cut(kv_start, kv_stop, cut, BLOCK_N: tl.constexpr):
    """Return the same as `split_of_keys`, for a row block that is cut (`work_tile.Cut`). This takes no division."""
    start, stop = tiles_of_keys(kv_start, kv_stop, BLOCK_N)
    low = start + ((stop - start) * cut.split >> cut.shift)
    high = start + ((stop - start) * (cut.split + 1) >> cut.shift)
    return last_and_count(low, high, stop)
