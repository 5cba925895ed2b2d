"""The schedule of the split-KV kernel: each program finds the KV tiles that it owns from the lengths on the device.

The units of a batch are numbered sequence after sequence, and within a sequence row block after row block. A unit is
one KV tile of BLOCK_N keys, or, with fixed splits, one split of FIXED_SPLIT keys. The units are cut into equal
partitions, at row blocks or within them, as Stream-K cuts the work of a matrix product (arXiv 2301.03598).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Schedule(NamedTuple):
    """Compile-time constants of the schedule. The kernel builds one tuple and passes it as one constexpr."""

    GROUP: Any
    BLOCK_M: Any
    UNIT: Any  # keys of a unit
    SEQS: Any  # sequences that a program looks at in one step
    MORE_SEQS: Any  # the batch may have more than SEQS
    MAX_DECODE_QUERIES: Any  # sequences with more queries belong to another kernel; 0 if this kernel serves all
    MIN_SPLIT_TILES: Any  # like the next two, of dispatch.config.CostModel
    TWO_LEVEL_DISCOUNT: Any
    TWO_LEVEL_MIN_TILES: Any
    INTERVALS: Any = 0  # of a sequence, that a program loads in one step; 0 where rows see a band of keys
    MORE_INTERVALS: Any = False  # a sequence may have more


@triton.jit
def sequence_span(kv, cu_seqlens_q, seq, window_left, window_right, S: tl.constexpr):
    """Return the queries, keys and units of a sequence, or of each of a vector of sequences.

    A sequence without queries is an idle row of an engine. Its length may be stale, and its pages may be anywhere.

    Returns:
        q_start: its first query token of the batch.
        q_len: its query tokens.
        first_pos: the position of its first query among its keys.
        kv_start, kv_stop: the keys that any of its queries sees.
        first: the first unit that holds such a key.
        num_units: units of each row block; at least 1, so that zeros are written for a padding row.
        num_blocks: row blocks; at least 1.
    """
    seq_len = tl.load(kv.seq_lens + seq)
    q_start = seq
    q_len = seq * 0 + 1
    if cu_seqlens_q is not None:
        q_start = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
    if kv.query_offsets is None:
        first_pos = seq_len - q_len
    else:
        first_pos = tl.load(kv.query_offsets + seq)
    if S.INTERVALS == 0:
        kv_start = tl.maximum(first_pos - window_left, 0)
        kv_stop = tl.maximum(tl.minimum(first_pos + q_len + window_right, seq_len), 0)
    else:
        kv_start, kv_stop = interval_span(kv, q_start, q_len, first_pos, seq_len, S)
    kv_stop = tl.where(q_len > 0, kv_stop, 0)
    first = kv_start // S.UNIT
    num_units = tl.maximum(tl.cdiv(kv_stop, S.UNIT) - first, 1)
    num_blocks = tl.maximum(tl.cdiv(q_len * S.GROUP, S.BLOCK_M), 1)
    return q_start, q_len, first_pos, kv_start, kv_stop, first, num_units, num_blocks


@triton.jit
def interval_span(kv, q_start, q_len, first_pos, seq_len, S: tl.constexpr):
    """Return the keys that any query of a sequence sees, or of each of a vector of sequences.

    In a tree, intervals are of the keys before the drafts, and all drafts count as seen.
    """
    start, stop = seq_len * 0 + 2147483647, seq_len * 0
    if S.MORE_INTERVALS:
        longest = tl.max(q_len + tl.zeros([1], tl.int32), 0)  # of one sequence or of several
        if S.MAX_DECODE_QUERIES > 0:  # of longer sequences, which belong to another kernel, nothing is used
            longest = tl.minimum(longest, S.MAX_DECODE_QUERIES)
        for done in tl.range(0, longest, S.INTERVALS, num_stages=1):
            start, stop = add_intervals(kv, start, stop, q_start, q_len, first_pos, seq_len, done, S)
    else:
        start, stop = add_intervals(kv, start, stop, q_start, q_len, first_pos, seq_len, 0, S)
    if kv.key_end is None:
        stop = tl.maximum(tl.minimum(first_pos + q_len, seq_len), 0)
    return tl.maximum(tl.minimum(start, stop), 0), stop


@triton.jit
def add_intervals(kv, start, stop, q_start, q_len, first_pos, seq_len, done, S: tl.constexpr):
    """Return the least begin and the greatest end, with those of INTERVALS queries from the `done`-th on."""
    for i in tl.static_range(S.INTERVALS):
        query = done + i
        begin = tl.load(kv.key_begin + q_start + query, mask=query < q_len, other=2147483647)
        if kv.key_end is None:
            start = tl.minimum(start, tl.minimum(begin, first_pos))
        else:
            end = tl.minimum(tl.load(kv.key_end + q_start + query, mask=query < q_len, other=0), seq_len)
            seen = begin < end
            start = tl.where(seen, tl.minimum(start, begin), start)
            stop = tl.where(seen, tl.maximum(stop, end), stop)
    return start, stop


@triton.jit
def count_units(kv, cu_seqlens_q, first, num_seqs, window_left, window_right, S: tl.constexpr):
    """Return the units of each of SEQS sequences from `first` on, over all row blocks.

    Sequences that belong to another kernel have 0.
    """
    seqs = first + tl.arange(0, S.SEQS)
    _, q_len, _, _, _, _, num_units, num_blocks = sequence_span(
        kv, cu_seqlens_q, tl.minimum(seqs, num_seqs - 1), window_left, window_right, S
    )
    ours = seqs < num_seqs
    if S.MAX_DECODE_QUERIES > 0:
        ours = ours & (q_len <= S.MAX_DECODE_QUERIES)
    return tl.where(ours, num_units * num_blocks, 0)


@triton.jit
def min_partition_units(mean, combine_cost, S: tl.constexpr):
    """Return the length of the shortest partition that is worth its cost, as a float, for sequences of `mean` units.

    The host computes the same; `split_kv.choice.min_partition_tiles` explains the formula.
    """
    cost = tl.where(mean > S.TWO_LEVEL_MIN_TILES, S.TWO_LEVEL_DISCOUNT * combine_cost, combine_cost)
    return tl.where((mean <= S.MIN_SPLIT_TILES) & (combine_cost > 0), mean, tl.sqrt(mean * cost))


@triton.jit
def partition_size(total, longest, num_seqs, num_partitions, combine_cost, S: tl.constexpr):
    """Return the units of every partition but the last, of `total` units; the longest sequence has `longest`."""
    shortest = min_partition_units(total.to(tl.float32) / num_seqs, combine_cost, S)
    size = tl.maximum(tl.cdiv(total, num_partitions), (shortest + 0.5).to(tl.int32))
    if S.MAX_DECODE_QUERIES > 0:  # all sequences may belong to the other kernel
        size, longest = tl.maximum(size, 1), tl.maximum(longest, 1)
    # If all sequences are equal, a slightly longer partition may end where a sequence ends: there is less to combine.
    # With whole sequences that gains little and leaves programs idle: only a part of one may be a thirty-second longer.
    # This is a select, not a branch: with a branch, Triton 3.9.0 keeps no loads in flight in the loop over tiles.
    shorter, longer = tl.cdiv(longest, tl.maximum(longest // size, 1)), tl.cdiv(size, longest) * longest
    even = tl.where(size < longest, shorter, longer)
    most = size + tl.maximum(S.MIN_SPLIT_TILES, tl.where(2 * size <= longest, size // 32, 0))
    return tl.where((longest * num_seqs == total) & (combine_cost > 0) & (even <= most), even, size)


@triton.jit
def find_partition(
    kv, cu_seqlens_q, num_seqs, partition, num_partitions, combine_cost, window_left, window_right, S: tl.constexpr
):
    """Return the units of a partition.

    Returns:
        low, high: its units, high not included.
        size: units of every partition but the last.
        seq: the sequence of unit `low`.
        seq_unit: that sequence's first unit.
    """
    units = count_units(kv, cu_seqlens_q, 0, num_seqs, window_left, window_right, S)
    total, longest = tl.sum(units, 0), tl.max(units, 0)
    if S.MORE_SEQS:
        for first in tl.range(S.SEQS, num_seqs, S.SEQS, num_stages=1):
            more = count_units(kv, cu_seqlens_q, first, num_seqs, window_left, window_right, S)
            total += tl.sum(more, 0)
            longest = tl.maximum(longest, tl.max(more, 0))
    size = partition_size(total, longest, num_seqs, num_partitions, combine_cost, S)
    low = partition * size
    high = tl.minimum(low + size, total)
    seq, seq_unit = find_sequence(units, 0, low)
    if S.MORE_SEQS:
        end = tl.sum(units, 0)
        for first in tl.range(S.SEQS, num_seqs, S.SEQS, num_stages=1):
            units = count_units(kv, cu_seqlens_q, first, num_seqs, window_left, window_right, S)
            seqs_before, unit = find_sequence(units, end, low)
            seq += seqs_before
            seq_unit = tl.maximum(seq_unit, unit)
            end += tl.sum(units, 0)
    return low, high, size, seq, seq_unit


@triton.jit
def find_sequence(units, first_unit, unit):
    """Return how many of these sequences end at or before `unit`, and where the last of those ends; 0 if none does.

    The sequences' units begin at `first_unit`.
    """
    ends = first_unit + tl.cumsum(units, 0)
    before = ends <= unit
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)


@triton.jit
def find_row_block(kv, cu_seqlens_q, num_seqs, index, window_left, window_right, S: tl.constexpr):
    """Return where the `index`-th row block of the batch is.

    Returns:
        seq: its sequence.
        row_block: which of the sequence's row blocks it is.
        seq_unit: that sequence's first unit.
        num_units: units of the batch.
        longest: most units of a sequence.
        num_row_blocks: row blocks of the batch.
    """
    seq, first_block, seq_unit = index * 0, index * 0, index * 0
    num_units, longest, num_row_blocks = index * 0, index * 0, index * 0
    for first in tl.range(0, num_seqs if S.MORE_SEQS else 1, S.SEQS, num_stages=1):
        seqs = first + tl.arange(0, S.SEQS)
        _, _, _, _, _, _, units, blocks = sequence_span(
            kv, cu_seqlens_q, tl.minimum(seqs, num_seqs - 1), window_left, window_right, S
        )
        blocks = tl.where(seqs < num_seqs, blocks, 0)
        ends = num_row_blocks + tl.cumsum(blocks, 0)
        before = ends <= index
        seq += tl.sum(before.to(tl.int32), 0)
        first_block = tl.maximum(first_block, tl.max(tl.where(before, ends, 0), 0))
        seq_unit += tl.sum(tl.where(before, units * blocks, 0), 0)
        num_units += tl.sum(units * blocks, 0)
        longest = tl.maximum(longest, tl.max(units * blocks, 0))
        num_row_blocks += tl.sum(blocks, 0)
    return seq, index - first_block, seq_unit, num_units, longest, num_row_blocks
