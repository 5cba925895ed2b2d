"""The schedule of prompts: in which order the row blocks of a batch come, and which are cut by keys; found once.

Programs take work tiles from a queue (`queue.py`). The last row blocks of a sequence come first, since they see the
most keys. Where a work tile is a large part of a program's work, the sequence with the most keys comes first. So all
programs end at about the same time.

A row block of a long sequence may see more tiles of keys than a program's share of all work. Then other programs wait
for the one that attends to it. So such sequences are cut: their last row blocks, which see the most keys, have 2, 4 or
8 splits each. The row block of a sequence that has one may have up to 32, since its partials have few rows. Each split
leaves a partial in a slot of the scratch. The last warpgroup to arrive combines the partials (`partials.py`). The host
knows bounds, not lengths. It says how many slots there are, and what does not fit is not cut.

A place of the order is a row block, or a split of one. `hopper_schedule_kernel` writes a `RowBlock` for each place.
`kernels/scheduler.py` says when they are found again.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from quire.kernels.hopper.launch import CUT_OVERHEAD

SEQS = tl.constexpr(128)  # sequences that a program looks at in one step; the first ones can be ordered and cut
PLACES = tl.constexpr(32)  # that a program finds
FIELDS = tl.constexpr(16)  # int32 of a RowBlock in memory: 64 bytes
SHARE = tl.constexpr(2)  # an order counts where a work tile is 1/SHARE of a program's work
LEAST_KEYS = tl.constexpr(512)  # a row block of at most this many keys is not cut
OVERHEAD = tl.constexpr(CUT_OVERHEAD)
NO_END = tl.constexpr(2147483647)


class RowBlock(NamedTuple):
    """A row block, or a split of one, in the order of memory."""

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
    """The lengths for which row blocks were found, and where those of now are."""

    lengths: Any  # [num_seqs, 3] int32: keys, the end of the queries, and the offset of the first one if there are any
    seq_lens: Any
    cu_seqlens_q: Any
    query_offsets: Any
    num_seqs: Any


class Sequences(NamedTuple):
    """SEQS sequences."""

    q_len: Any
    first_pos: Any
    seq_len: Any
    counts: Any  # row blocks; 0 of those that belong to the decode launch


@triton.jit
def load_sequences(lengths, first, num_seqs, max_decode_queries, block_t):
    """Return the `Sequences` from `first` on."""
    seqs = first + tl.arange(0, SEQS)
    inside = seqs < num_seqs
    q_len = tl.load(lengths.cu_seqlens_q + seqs + 1, mask=inside, other=0)
    q_len -= tl.load(lengths.cu_seqlens_q + seqs, mask=inside, other=0)
    seq_len = tl.load(lengths.seq_lens + seqs, mask=inside, other=0)
    first_pos = seq_len - q_len
    if lengths.query_offsets is not None:
        first_pos = tl.load(lengths.query_offsets + seqs, mask=inside, other=0)
    counts = tl.where(q_len > max_decode_queries, (q_len + block_t - 1) // block_t, 0)
    return Sequences(q_len, first_pos, seq_len, counts)


@triton.jit
def keys_of_band(token, q_len, first_pos, seq_len, window_left, window_right, block_t):
    """Return the first key that any row of a row block sees, and the one after the last."""
    kv_start = tl.maximum(first_pos + token - window_left, 0)
    kv_stop = tl.minimum(first_pos + tl.minimum(token + block_t, q_len) + window_right, seq_len)
    return kv_start, kv_stop


@triton.jit
def count_keys(token, s, window_left, window_right, block_t, block_n):
    """Return how many keys a row block of each of `Sequences` sees; so few that a place of the order fits 32 bits."""
    kv_start, kv_stop = keys_of_band(token, s.q_len, s.first_pos, s.seq_len, window_left, window_right, block_t)
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
    s, num_seqs, window_left, window_right, num_programs, work_tiles_each, cut_slots, may_be_mixed, block_t, block_n
):  # fmt: skip
    """Return where the places of the first SEQS sequences end, if the sequence with the most keys is the last one.

    What counts is the tiles of keys that the last row block sees. Sequences with as many stay in the batch's order.
    Where an order gains little, the batch's order stays.
    If there are slots, long sequences are cut by keys first, and each split of a row block counts as one.
    Sequences of one row block come before all others in a mixed batch, and the one of these that has the most keys is
    the first one. So `queue.py` finds the longest work tile of either kind at either end.

    Args:
        s: the first `Sequences`.
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
    seqs, counts = tl.arange(0, SEQS), s.counts
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
    lengths,  # kernels.scheduler.Lengths
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
    s = load_sequences(lengths, 0, num_seqs, max_decode_queries, block_t)
    num_places = tl.sum(s.counts, 0)
    for first in tl.range(SEQS, num_seqs, SEQS, num_stages=1):
        num_places += tl.sum(load_sequences(lengths, first, num_seqs, max_decode_queries, block_t).counts, 0)
    ends, whole, shift, slot = tl.cumsum(s.counts, 0), s.counts, s.counts * 0, s.counts * 0
    num_singles, from_back = num_seqs * 0, num_seqs * 0
    if lengths.key_begin is None:
        # Lengths may differ, and a work tile that starts last should be short.
        if (cut_slots > 0) | (num_seqs > 1) & (num_places * head_blocks > num_programs):
            before = tl.sum(s.counts, 0)
            ends, whole, shift, slot, num_singles, from_back = order_by_keys(
                s, num_seqs, window_left, window_right, num_programs, head_blocks, cut_slots, may_be_mixed, block_t,
                block_n,
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
        counts = load_sequences(lengths, first, num_seqs, max_decode_queries, block_t).counts
        more = (all_ends + tl.cumsum(counts, 0))[None, :]
        ended = more <= place[:, None]
        seq += tl.sum(ended.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(ended, more, 0), 1))
        all_ends = tl.max(more, 1)
        all_ends = tl.max(all_ends, 0)
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
    q_start = tl.load(lengths.cu_seqlens_q + seq, mask=exists, other=0)
    q_len = tl.load(lengths.cu_seqlens_q + seq + 1, mask=exists, other=0) - q_start
    seq_len = tl.load(lengths.seq_lens + seq, mask=exists, other=0)
    first_pos = seq_len - q_len
    if lengths.query_offsets is not None:
        first_pos = tl.load(lengths.query_offsets + seq, mask=exists, other=0)
    if lengths.key_begin is None:
        keys = keys_of_band(token, q_len, first_pos, seq_len, window_left, window_right, block_t)
        found = RowBlock(seq, token, q_start, q_len, first_pos, seq_len, *keys, of_place, first_slot, split, 0, 0, 0, 0)
        NUMBER: tl.constexpr = 11
    else:
        kv_start, kv_stop, full_start, full_stop, kv_low, kv_high = keys_of_intervals(
            lengths, token, q_start, q_len, seq_len, block_t, TOKENS
        )
        found = RowBlock(
            seq, token, q_start, q_len, first_pos, seq_len, kv_start, kv_stop, of_place, first_slot, split, full_start,
            full_stop, kv_low, kv_high,
        )  # fmt: skip
        NUMBER: tl.constexpr = 15
    for i in tl.static_range(NUMBER):
        tl.store(places_ptr + place * FIELDS + i, found[i], mask=exists)
