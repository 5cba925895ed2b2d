"""The schedule of a batch: how its KV tiles are cut into partitions, found once by a small kernel.

The units of a batch are numbered sequence after sequence, and within a sequence row block after row block. A unit is
one KV tile of UNIT keys, or, with fixed splits, one split. The units are cut into equal partitions, at row blocks or
within them, as Stream-K cuts the work of a matrix product (arXiv 2301.03598).

`schedule_kernel` reads the lengths and writes a `Part` for each partition, and a `Cut` for each row block that a second
launch may have to combine. The kernels of all layers read them. `kernels/scheduler.py` says when they are found again.

Lengths may change while a schedule is in use. Which sequences and which partials a partition has follows from its
`Part` alone, so every program writes what others wait for. The result of a sequence is NaN if it is the first of a
partition and has other lengths than then, or if it is cut and has another number of units. Other sequences are served
with their lengths of now.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

SEQS = tl.constexpr(256)  # sequences that a program looks at in one step
PART_FIELDS = tl.constexpr(16)  # int32 of a Part in memory: 64 bytes
CUT_FIELDS = tl.constexpr(4)  # int32 of a Cut
TO_THE_END = tl.constexpr(2147483647)  # in the place of a row block: the last one of the sequence, whichever it is


class Units(NamedTuple):
    """Compile-time constants of units and row blocks. A kernel builds one tuple and passes it as one constexpr."""

    GROUP: Any  # rows of a query token
    BLOCK_M: Any  # rows of a row block
    UNIT: Any  # keys of a unit
    MAX_DECODE_QUERIES: Any  # sequences with more queries belong to another kernel; 0 if this kernel serves all
    INTERVALS: Any = 0  # of a sequence, that a program loads in one step; 0 where rows see a band of keys
    MORE_INTERVALS: Any = False  # a sequence may have more
    MIN_QUERIES: Any = 0  # sequences with fewer queries belong to another launch


class Costs(NamedTuple):
    """What decides how long the shortest partition is; the last three are of dispatch.config.CostModel."""

    combine_cost: Any  # of a partial, in units; 0 to cut wherever partitions are equal
    min_split_tiles: Any
    two_level_discount: Any
    two_level_min_tiles: Any


class Part(NamedTuple):
    """What one partition has, in the order of memory.

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
    last_block: Any  # TO_THE_END if the partition ends where its last sequence does
    last_unit: Any  # of the last row block, like the next
    last_units: Any
    seq_len: Any  # of `seq` when the schedule was found, like the next two: its keys are loaded without waiting for it
    q_len: Any
    first_pos: Any


class Cut(NamedTuple):
    """What a second launch combines of one row block, in the order of memory."""

    number: Any  # partials, or states of splits with the fold of the first; less than 2 if one program finished it
    first: Any  # slot
    seq: Any
    block: Any


class Sequence(NamedTuple):
    """The lengths of a sequence, or of each of a vector of sequences."""

    seq_len: Any  # keys
    q_start: Any  # its first query token of the batch
    q_len: Any  # query tokens
    first_pos: Any  # the position of its first query among its keys


@triton.jit
def load_sequence(lengths, cu_seqlens_q, seq):
    """Return the `Sequence` of a number, or of each of a vector of numbers."""
    seq_len = tl.load(lengths.seq_lens + seq)
    q_start = seq
    q_len = seq * 0 + 1
    if cu_seqlens_q is not None:
        q_start = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
    if lengths.query_offsets is None:
        first_pos = seq_len - q_len
    else:
        first_pos = tl.load(lengths.query_offsets + seq)
    return Sequence(seq_len, q_start, q_len, first_pos)


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
        kv_start = tl.maximum(first_pos - window_left, 0)
        kv_stop = tl.maximum(tl.minimum(first_pos + q_len + window_right, seq_len), 0)
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
    start, stop = seq_len * 0 + 2147483647, seq_len * 0
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
        begin = tl.load(lengths.key_begin + q_start + query, mask=query < q_len, other=2147483647)
        if lengths.key_end is None:
            start = tl.minimum(start, tl.minimum(begin, first_pos))
        else:
            end = tl.minimum(tl.load(lengths.key_end + q_start + query, mask=query < q_len, other=0), seq_len)
            seen = begin < end
            start = tl.where(seen, tl.minimum(start, begin), start)
            stop = tl.where(seen, tl.maximum(stop, end), stop)
    return start, stop


@triton.jit
def count_units(lengths, cu_seqlens_q, first, num_seqs, window_left, window_right, U: tl.constexpr):
    """Return the units of each of SEQS sequences from `first` on, over all row blocks, and their row blocks.

    Sequences that belong to another kernel have 0 of both.
    """
    seqs = first + tl.arange(0, SEQS)
    sequences = load_sequence(lengths, cu_seqlens_q, tl.minimum(seqs, num_seqs - 1))
    _, _, _, num_units, num_blocks = span(sequences, lengths, window_left, window_right, U)
    ours = seqs < num_seqs
    if U.MAX_DECODE_QUERIES > 0:
        ours = ours & (sequences.q_len <= U.MAX_DECODE_QUERIES)
    if U.MIN_QUERIES > 0:
        ours = ours & (sequences.q_len >= U.MIN_QUERIES)
    return tl.where(ours, num_units * num_blocks, 0), tl.where(ours, num_blocks, 0)


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
    # If all sequences are equal, a slightly longer partition may end where a sequence ends: there is less to combine.
    # With whole sequences that gains little and leaves programs idle: only a part of one may be a thirty-second longer.
    shorter, longer = tl.cdiv(longest, tl.maximum(longest // size, 1)), tl.cdiv(size, longest) * longest
    even = tl.where(size < longest, shorter, longer)
    most = size + tl.maximum(costs.min_split_tiles, tl.where(2 * size <= longest, size // 32, 0))
    return tl.where((longest * num_seqs == total) & (costs.combine_cost > 0) & (even <= most), even, size)


@triton.jit
def find_unit(lengths, cu_seqlens_q, num_seqs, unit, window_left, window_right, U: tl.constexpr):
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
    for first in tl.range(0, num_seqs, SEQS, num_stages=1):
        units, _ = count_units(lengths, cu_seqlens_q, first, num_seqs, window_left, window_right, U)
        ends = end + tl.cumsum(units, 0)
        before = ends <= unit
        seq += tl.sum(before.to(tl.int32), 0)
        seq_unit = tl.maximum(seq_unit, tl.max(tl.where(before, ends, 0), 0))
        end += tl.sum(units, 0)
    seq = tl.minimum(seq, num_seqs - 1)
    sequence = load_sequence(lengths, cu_seqlens_q, seq)
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
    parts_ptr,  # [num_partitions, PART_FIELDS] int32
    cuts_ptr,  # [num_cuts, CUT_FIELDS] int32, or None without a second launch
    lengths,  # kernels.scheduler.Lengths
    combine_cost, min_split_tiles, two_level_discount, two_level_min_tiles,  # Costs
    window_left, window_right, num_seqs, num_partitions, num_cuts,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, MAX_DECODE_QUERIES: tl.constexpr,
    INTERVALS: tl.constexpr, MORE_INTERVALS: tl.constexpr, MIN_QUERIES: tl.constexpr,  # of Units
    FIXED_SPLIT: tl.constexpr,  # units are splits of a batch-invariant plan
    PDL: tl.constexpr,  # programmatic dependent launch
):  # fmt: skip
    """Find one partition, and one row block that may be cut. Grid: [max(num_partitions, num_cuts)]."""
    if PDL:  # whoever waits for this launch waits for those before it too
        gdc_wait()
    U: tl.constexpr = Units(GROUP, BLOCK_M, UNIT, MAX_DECODE_QUERIES, INTERVALS, MORE_INTERVALS, MIN_QUERIES)
    cu_seqlens_q = lengths.cu_seqlens_q
    costs = Costs(combine_cost, min_split_tiles, two_level_discount, two_level_min_tiles)
    index = tl.program_id(0)
    # Of all sequences: their units and row blocks, and those of the sequences before row block `index`.
    total, longest, num_blocks = index * 0, index * 0, index * 0
    cut_seq, cut_block, cut_unit = index * 0, index * 0, index * 0
    for first in tl.range(0, num_seqs, SEQS, num_stages=1):
        units, blocks = count_units(lengths, cu_seqlens_q, first, num_seqs, window_left, window_right, U)
        ends = num_blocks + tl.cumsum(blocks, 0)
        before = (ends <= index) & (first + tl.arange(0, SEQS) < num_seqs)
        cut_seq += tl.sum(before.to(tl.int32), 0)
        cut_block = tl.maximum(cut_block, tl.max(tl.where(before, ends, 0), 0))
        cut_unit += tl.sum(tl.where(before, units, 0), 0)
        total += tl.sum(units, 0)
        longest = tl.maximum(longest, tl.max(units, 0))
        num_blocks += tl.sum(blocks, 0)
    size = partition_size(total, longest, num_seqs, num_partitions, costs)
    if index < num_partitions:
        low = index * size
        high = tl.minimum(low + size, total)
        seq, sequence, block, first_unit, first_units, _ = find_unit(
            lengths, cu_seqlens_q, num_seqs, low, window_left, window_right, U
        )
        last_seq, _, last_block, last_unit, last_units, is_last = find_unit(
            lengths, cu_seqlens_q, num_seqs, high - 1, window_left, window_right, U
        )
        last_block = tl.where(is_last & (last_unit + last_units == high), TO_THE_END, last_block)
        part = Part(
            low, high, size, seq, block, first_unit, first_units, last_seq, last_block, last_unit, last_units,
            sequence.seq_len, sequence.q_len, sequence.first_pos,
        )  # fmt: skip
        for i in tl.static_range(len(part)):
            tl.store(parts_ptr + index * PART_FIELDS + i, part[i])
    if cuts_ptr is not None:
        if index < num_cuts:
            number, slot, seq, block = index * 0, index * 0, index * 0, index * 0
            if index < num_blocks:
                seq, block = cut_seq, index - cut_block
                sequence = load_sequence(lengths, cu_seqlens_q, seq)
                _, _, _, num_units, _ = span(sequence, lengths, window_left, window_right, U)
                unit = cut_unit + block * num_units
                first_partition = unit // size
                if FIXED_SPLIT:  # the program that begins a row block folds its splits, into the slot of the last one
                    slot = (first_partition + 1) * size - 1
                    number = unit + num_units - slot
                else:
                    slot = 2 * first_partition + 1
                    number = (unit + num_units - 1) // size - first_partition + 1
            cut = Cut(number, slot, seq, block)
            for i in tl.static_range(len(cut)):
                tl.store(cuts_ptr + index * CUT_FIELDS + i, cut[i])


@triton.jit
def load_part(parts_ptr, partition):
    """Return the `Part` of a partition."""
    at = parts_ptr + partition * PART_FIELDS
    return Part(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9), tl.load(at + 10), tl.load(at + 11),
        tl.load(at + 12), tl.load(at + 13),
    )  # fmt: skip


@triton.jit
def load_cut(cuts_ptr, index):
    """Return the `Cut` of a row block."""
    at = cuts_ptr + index * CUT_FIELDS
    return Cut(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3))


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
        ends = (block >= num_blocks) & ((seq < part.last_seq) | (part.last_block == TO_THE_END))
        block = tl.where(ends, 0, block)
        seq += ends.to(tl.int32)
    else:
        seq += 1
    return seq, block, (seq < part.last_seq) | ((seq == part.last_seq) & (block <= part.last_block))


@triton.jit
def is_as_planned(sequence, known):
    """Return whether a sequence still has the lengths with which its keys are found."""
    return (
        (sequence.seq_len == known.seq_len) & (sequence.q_len == known.q_len) & (sequence.first_pos == known.first_pos)
    )


@triton.jit
def skip_prompts(cu_seqlens_q, seq, last_seq, MAX_DECODE_QUERIES: tl.constexpr):
    """Return the first sequence from `seq` to `last_seq` that does not belong to another kernel."""
    while (seq < last_seq) & (tl.load(cu_seqlens_q + seq + 1) - tl.load(cu_seqlens_q + seq) > MAX_DECODE_QUERIES):
        seq += 1
    return seq


@triton.jit
def skip_decoding(cu_seqlens_q, seq, last_seq, MIN_QUERIES: tl.constexpr):
    """Return the first sequence from `seq` to `last_seq` that has MIN_QUERIES queries; `last_seq` if none has."""
    while (seq < last_seq) & (tl.load(cu_seqlens_q + seq + 1) - tl.load(cu_seqlens_q + seq) < MIN_QUERIES):
        seq += 1
    return seq
