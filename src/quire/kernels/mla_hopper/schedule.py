"""The schedule of the MLA kernel: which KV tiles a program owns, found once by a small kernel.

The rows of a sequence, (token, query head) pairs, are cut into row blocks of ROWS rows. All programs of one row block
share its work over all sequences: the KV tiles of the batch form one list, sequence after sequence, which is cut into
equal partitions. Before the tiles of a sequence, the list has some places that stand for the time to begin a sequence.
Programs of different row blocks have the same partitions. So those that read the same latents run at the same time, and
share them in L2.

`mla_schedule_kernel` reads the lengths and writes a `Part` for each partition of each row block, and a `Cut` for each
sequence that may have to be combined. The kernels of all layers read them; `kernels/scheduler.py` says when the
schedule is found again.

Lengths may change while a schedule is in use. Every sequence belongs to a partition of each row block, also where it
has no rows in the row block. Of the first sequence of a partition, the tiles and queries are those of then; of the last
one, if it is cut, the number of tiles. The result of such a sequence is NaN if that has changed. Others are served with
their lengths of now. Producer and consumers walk the same tiles, since all follow from the part and from the lengths.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from quire.kernels.mla_hopper import launch
from quire.kernels.portable.schedule import CUT_FIELDS, PART_FIELDS, TO_THE_END, load_sequence

ROWS, TILE = tl.constexpr(launch.ROWS), tl.constexpr(launch.TILE)
SEQS = tl.constexpr(128)  # sequences that a program reads in one step


class Costs(NamedTuple):
    """What a cut and a sequence cost, in the time of tiles."""

    combine: Any  # c of a partial: t tiles in partitions of s tiles take s + c * t / s, which is least at sqrt(c * t)
    sequence: Any  # of beginning a sequence, where sequences differ


class Part(NamedTuple):
    """What one partition of a row block has, in the order of memory: nothing if `seq` is after `last_seq`."""

    seq: Any  # its first sequence
    tile: Any  # of that sequence, the first tile that is here
    seq_len: Any  # of that sequence when the schedule was found, like the next three
    q_start: Any
    q_len: Any
    first_pos: Any
    last_seq: Any
    stop: Any  # of that sequence, the tile after the last one that is here; TO_THE_END if the sequence ends here
    last_tiles: Any  # tiles that it had when the schedule was found, if it is cut
    size: Any  # places of a partition


class Cut(NamedTuple):
    """What the second launch combines of a sequence in a row block, in the order of memory."""

    number: Any  # partials; less than 2 if there is nothing to combine
    first: Any  # the partition of the first one
    seq: Any


@triton.jit
def visible_keys(sequence, row_block, causal, NUM_HEADS: tl.constexpr):
    """Return how many keys of a `Sequence`, or of each of a vector of sequences, its row block sees."""
    seq_len, _, q_len, first_pos = sequence
    last_token = tl.minimum((row_block * ROWS + ROWS - 1) // NUM_HEADS, q_len - 1)
    visible = tl.where(causal, tl.minimum(first_pos + last_token + 1, seq_len), seq_len)
    return tl.maximum(visible, 0)


@triton.jit
def num_tiles(q_len, visible, row_block, NUM_HEADS: tl.constexpr):
    """Return the tiles of a row block that exists: at least one, so that zeros are written where there are no keys."""
    return tl.where(q_len * NUM_HEADS > row_block * ROWS, tl.maximum((visible + TILE - 1) // TILE, 1), 0)


@triton.jit
def tiles_of(sequence, row_block, causal, NUM_HEADS: tl.constexpr):
    """Return the tiles of a `Sequence`, or of each of a vector of sequences."""
    visible = visible_keys(sequence, row_block, causal, NUM_HEADS)
    return num_tiles(sequence.q_len, visible, row_block, NUM_HEADS)


@triton.jit
def tiles_of_sequences(lengths, cu_seqlens_q, first, num_seqs, row_block, causal, NUM_HEADS: tl.constexpr):
    """Return the tiles of each of SEQS sequences from `first` on."""
    seqs = first + tl.arange(0, SEQS)
    sequences = load_sequence(lengths, cu_seqlens_q, tl.minimum(seqs, num_seqs - 1))
    return tl.where(seqs < num_seqs, tiles_of(sequences, row_block, causal, NUM_HEADS), 0)


@triton.jit
def partition_size(total, longest, count, num_partitions, costs):
    """Return the places of every partition but the last, of all, and before the tiles of each sequence.

    Args:
        total: tiles of all sequences.
        longest: tiles of the longest one.
        count: sequences with tiles.
        num_partitions: most partitions.
        costs: Costs.
    """
    shortest = tl.maximum((tl.sqrt(total.to(tl.float32) * costs.combine) + 0.5).to(tl.int32), 1)
    all_equal = longest * count == total
    overhead = tl.where(all_equal, 0, costs.sequence)
    total += overhead * count
    size = tl.maximum((total + num_partitions - 1) // num_partitions, shortest)
    # If all sequences are equal, a partition that ends where a sequence ends leaves less to combine.
    longest = tl.maximum(longest, 1)
    splits = tl.maximum(longest // size, 1)
    shorter, longer = (longest + splits - 1) // splits, (size + longest - 1) // longest * longest
    even = tl.where(size < longest, shorter, longer)
    return tl.where(all_equal & (even <= size + 1), even, size), total, overhead


@triton.jit
def count_before(seq, place, ends, at):
    """Return how many sequences end at or before place `at`, and where the last of those ends.

    `seq` and `place` are those of the sequences before these, which end at `ends`.
    """
    before = ends <= at
    return seq + tl.sum(before.to(tl.int32), 0), tl.maximum(place, tl.max(tl.where(before, ends, 0), 0))


@triton.jit(do_not_specialize=["sequence_cost", "by_sequence", "num_seqs", "num_partitions", "num_cuts"])
def mla_schedule_kernel(
    parts_ptr,  # [row blocks, num_partitions, PART_FIELDS] int32
    cuts_ptr,  # [row blocks, num_cuts, CUT_FIELDS] int32
    lengths,  # scheduler.Lengths
    combine_cost, sequence_cost,  # Costs
    causal,
    by_sequence,  # whether there is a cut for each sequence, or for each partition: of the sequence that its end cuts
    num_seqs, num_partitions, num_cuts,
    NUM_HEADS: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch
):  # fmt: skip
    """Find a partition of a row block, and a sequence that may be cut. Grid: [row blocks * max(partitions, cuts)]."""
    if PDL:  # whoever waits for this launch waits for those before it too
        gdc_wait()
    each = tl.maximum(num_partitions, num_cuts)
    cu_seqlens_q = lengths.cu_seqlens_q
    row_block, index = tl.program_id(0) // each, tl.program_id(0) % each
    causal = causal > 0
    total, longest, count = index * 0, index * 0, index * 0
    for first in tl.range(0, num_seqs, SEQS, num_stages=1):
        tiles = tiles_of_sequences(lengths, cu_seqlens_q, first, num_seqs, row_block, causal, NUM_HEADS)
        total += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tiles, 0))
        count += tl.sum((tiles > 0).to(tl.int32), 0)
    size, total, overhead = partition_size(total, longest, count, num_partitions, Costs(combine_cost, sequence_cost))
    low = tl.minimum(index * size, total)
    high = tl.minimum(low + size, total)
    # The sequences at both places, where they begin, and where sequence `index` begins.
    seq, place, end_seq, end_place, own_place, end = index * 0, index * 0, index * 0, index * 0, index * 0, index * 0
    for first in tl.range(0, num_seqs, SEQS, num_stages=1):
        tiles = tiles_of_sequences(lengths, cu_seqlens_q, first, num_seqs, row_block, causal, NUM_HEADS)
        places = tl.where(tiles > 0, tiles + overhead, 0)
        ends = end + tl.cumsum(places, 0)
        seq, place = count_before(seq, place, ends, low)
        end_seq, end_place = count_before(end_seq, end_place, ends, high)
        own_place += tl.sum(tl.where(first + tl.arange(0, SEQS) < index, places, 0), 0)
        end += tl.sum(places, 0)
    seq, end_seq = tl.minimum(seq, num_seqs), tl.minimum(end_seq, num_seqs)
    seq = tl.where(index == 0, 0, seq)  # no sequence without rows is left out
    stop = high - (end_place + overhead)
    last = load_sequence(lengths, cu_seqlens_q, tl.minimum(end_seq, num_seqs - 1))
    last_tiles = tiles_of(last, row_block, causal, NUM_HEADS)
    is_cut = stop > 0
    if index < num_partitions:
        last_seq = tl.where(is_cut, end_seq, end_seq - 1)
        is_empty = seq > last_seq
        last_seq = tl.where(is_empty, num_seqs - 1, last_seq)
        seq = tl.where(is_empty, num_seqs, seq)
        sequence = load_sequence(lengths, cu_seqlens_q, tl.minimum(seq, num_seqs - 1))
        part = Part(
            seq, tl.maximum(low - (place + overhead), 0), sequence.seq_len, sequence.q_start, sequence.q_len,
            sequence.first_pos, last_seq, tl.where(is_cut, stop, TO_THE_END), last_tiles, size,
        )  # fmt: skip
        for i in tl.static_range(len(part)):
            tl.store(parts_ptr + (row_block * num_partitions + index) * PART_FIELDS + i, part[i])
    if index < num_cuts:
        cut_seq, cut_place, may_be_cut = end_seq, end_place, is_cut
        if by_sequence:
            cut_seq, cut_place, may_be_cut = index, own_place, index < num_seqs
            own = load_sequence(lengths, cu_seqlens_q, tl.minimum(index, num_seqs - 1))
            last_tiles = tiles_of(own, row_block, causal, NUM_HEADS)
        cut_place += overhead
        first_partition = cut_place // size
        may_be_cut = may_be_cut & ((by_sequence > 0) | (first_partition == index)) & (last_tiles > 0)
        number = tl.where(may_be_cut, (cut_place + last_tiles - 1) // size - first_partition + 1, 0)
        cut = Cut(number, first_partition, tl.minimum(cut_seq, num_seqs - 1))
        for i in tl.static_range(len(cut)):
            tl.store(cuts_ptr + (row_block * num_cuts + index) * CUT_FIELDS + i, cut[i])


@triton.jit
def load_mla_part(parts_ptr, index):
    """Return a `Part`."""
    at = parts_ptr + index * PART_FIELDS
    return Part(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9),
    )  # fmt: skip


@triton.jit
def load_mla_cut(cuts_ptr, index):
    """Return a `Cut`."""
    at = cuts_ptr + index * CUT_FIELDS
    return Cut(tl.load(at), tl.load(at + 1), tl.load(at + 2))
