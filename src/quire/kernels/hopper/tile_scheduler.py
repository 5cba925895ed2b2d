"""The dynamic persistent tile scheduler: which work tile a program takes next.

A row block is BLOCK_T query tokens of one sequence. A work tile is a row block, as many heads of one KV head as fill
the program's rows, and one split of the visible keys. Programs take work tiles from a queue (`queue.py`). The last row
blocks of a sequence come first, since they see the most keys. Where a work tile is a large part of a program's work,
the sequence with the most keys comes first. So all programs end at about the same time. The producer warp publishes the
fields of a work tile in shared memory, where the consumer warpgroups read them. With intervals of keys, it also
publishes the `Range`. So all warps of a program agree on which tiles there are, and which of them need masks.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.cuts import Cut, add, cut_nothing, cut_sequences, may_cut
from quire.kernels.hopper.pipeline import reinterpret

ROWS = gl.constexpr(64)  # rows of a consumer warpgroup
SEQS = gl.constexpr(128)  # sequences that the scheduler reads in one step
PART = gl.constexpr(4)  # sequences that are compared with all others in one step
SHARE = gl.constexpr(2)  # an order counts where a work tile is 1/SHARE of a program's work, in the first SEQS sequences
FIELDS = gl.constexpr(9)  # fields of WorkTile
WORDS = gl.constexpr(16)  # 32-bit words of shared memory for a WorkTile, and for a Range or a Cut after it


class WorkTile(NamedTuple):
    """A work tile. One with q_len 0 means that there are no more."""

    head: Any  # its first query head
    token: Any  # its first query token, counted from the sequence's first
    q_start: Any  # the sequence's first query token, in the batch
    q_len: Any  # the sequence's query tokens
    first_pos: Any  # position of the sequence's first query among its keys
    seq_len: Any  # the sequence's keys
    tile: Any  # the KV tile that is attended to first: the last one, or in a batch-invariant plan the first one
    num_tiles: Any  # at least 1
    split: Any  # which split of the visible keys; in a batch-invariant plan, which part of the values' columns


class Range(NamedTuple):
    """The keys that matter to a row block whose rows see intervals. Where rows see a band, positions say the same."""

    full_start: Any  # the keys that every row sees
    full_stop: Any
    kv_low: Any  # keys that are in the sequence's pages and finite: at least those that any row sees
    kv_high: Any


@gluon.constexpr_function
def power_of_two(number):
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()


@gluon.jit
def keys_of_band(token, q_len, first_pos, seq_len, window_left, window_right, BLOCK_T: gl.constexpr):
    """Return the first key that any row of a row block sees, and the one after the last."""
    kv_start = gl.maximum(first_pos + token - window_left, 0)
    kv_stop = gl.minimum(first_pos + gl.minimum(token + BLOCK_T, q_len) + window_right, seq_len)
    return kv_start, kv_stop


@gluon.jit
def load_intervals(key_begin, key_end, token, owned, seq_len):
    """Return the first key that each query token of the batch sees, and the one after the last, within its sequence.

    A token that is not owned sees nothing.
    """
    begin = gl.maximum(gl.load(key_begin + token, mask=owned, other=0), 0)
    end = gl.load(key_end + token, mask=owned, other=0)
    return begin, gl.maximum(gl.minimum(end, seq_len), 0)


@gluon.jit
def keys_of_intervals(kv, token, q_start, q_len, seq_len, BLOCK_T: gl.constexpr):
    """Return what `keys_of_band` does, and the Range, of a row block whose rows see intervals."""
    tokens = token + gl.arange(0, power_of_two(BLOCK_T), gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    owned = tokens < gl.minimum(q_len, token + BLOCK_T)
    begin, end = load_intervals(kv.key_begin, kv.key_end, q_start + tokens, owned, seq_len)
    kv_start = gl.min(gl.where(begin < end, begin, 2147483647), 0)
    kv_stop = gl.max(gl.where(begin < end, end, 0), 0)
    full_start, full_stop = gl.max(begin, 0), gl.min(gl.where(owned, end, 2147483647), 0)
    # The keys between those that any tokens of the sequence see are finite. With those of its first and its last token,
    # the edge of a row block that sees a part of a tile needs no zeros.
    first_begin, first_end = load_intervals(kv.key_begin, kv.key_end, q_start, q_len > 0, seq_len)
    last_begin, last_end = load_intervals(kv.key_begin, kv.key_end, q_start + q_len - 1, q_len > 0, seq_len)
    kv_low, kv_high = kv_start, kv_stop
    kv_low = gl.minimum(kv_low, gl.where(first_begin < first_end, first_begin, 2147483647))
    kv_high = gl.maximum(kv_high, gl.where(first_begin < first_end, first_end, 0))
    kv_low = gl.minimum(kv_low, gl.where(last_begin < last_end, last_begin, 2147483647))
    kv_high = gl.maximum(kv_high, gl.where(last_begin < last_end, last_end, 0))
    return gl.minimum(kv_start, kv_stop), kv_stop, Range(full_start, full_stop, kv_low, kv_high)


@gluon.jit
def tiles_of_keys(kv_start, kv_stop, BLOCK_N: gl.constexpr):
    """Return the first of the tiles that a row block sees, and the one after the last. There is at least one."""
    start = kv_start // BLOCK_N
    return start, gl.maximum((kv_stop + BLOCK_N - 1) // BLOCK_N, start + 1)


@gluon.jit
def last_and_number(low, high, stop):
    """Return the last of the tiles from `low` to `high`, and how many there are.

    If there are none, it is one that no row sees, from `stop`.
    """
    return gl.where(high > low, high - 1, stop), gl.maximum(high - low, 1)


@gluon.jit
def split_of_keys(kv_start, kv_stop, split, num_splits, BLOCK_N: gl.constexpr):
    """Return (last tile, number of tiles) of a split of the keys that a row block sees."""
    start, stop = tiles_of_keys(kv_start, kv_stop, BLOCK_N)
    low = start + (stop - start) * split // num_splits
    high = start + (stop - start) * (split + 1) // num_splits
    return last_and_number(low, high, stop)


@gluon.jit
def split_of_cut(kv_start, kv_stop, cut, BLOCK_N: gl.constexpr):
    """Return the same as `split_of_keys`, for a row block that is cut. This takes no division."""
    start, stop = tiles_of_keys(kv_start, kv_stop, BLOCK_N)
    low = start + ((stop - start) * cut.split >> cut.shift)
    high = start + ((stop - start) * (cut.split + 1) >> cut.shift)
    return last_and_number(low, high, stop)


@gluon.jit
def visible_keys(work, window_left, window_right):
    """Return the first key that any query of the sequence sees, and the one after the last.

    Other keys may be in freed pages. With intervals, the Range says which.
    """
    return work.first_pos - window_left, gl.minimum(work.first_pos + work.q_len + window_right, work.seq_len)


@gluon.jit
def row_blocks_of(seqs, cu_seqlens_q, num_seqs, max_decode_queries, BLOCK_T: gl.constexpr):
    """Return the query tokens and the number of row blocks of sequences, of which those from `num_seqs` on have none.

    Sequences with at most `max_decode_queries` queries have no row blocks: they belong to the decode launch.
    """
    inside = seqs < num_seqs
    q_stop = gl.load(cu_seqlens_q + seqs + 1, mask=inside, other=0)
    q_len = q_stop - gl.load(cu_seqlens_q + seqs, mask=inside, other=0)
    return q_len, gl.where(q_len > max_decode_queries, (q_len + BLOCK_T - 1) // BLOCK_T, 0)


@gluon.jit
def row_block_ends(cu_seqlens_q, first, num_seqs, max_decode_queries, BLOCK_T: gl.constexpr):
    """Return where the row blocks of each of SEQS sequences from `first` on end, counted from those of `first`."""
    seqs = first + gl.arange(0, SEQS, gl.BlockedLayout([SEQS // 32], [32], [gl.num_warps()], [0]))
    _, counts = row_blocks_of(seqs, cu_seqlens_q, num_seqs, max_decode_queries, BLOCK_T)
    return gl.associative_scan(counts, 0, add)


@gluon.jit
def order_by_keys(
    ends, memory, kv, cu_seqlens_q, num_seqs, max_decode_queries, window_left, window_right, work_tiles_each,
    BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, CUT_SLOTS: gl.constexpr = 0,
):  # fmt: skip
    """Return where the row blocks of the first SEQS sequences end, if the sequence with the most keys is the last one.

    What counts is the tiles of keys that the last row block sees. Sequences with as many stay in the batch's order.
    Each end is the sum of the row blocks of all sequences that do not come later, so nothing has to be moved.
    Where that gains little, the batch's order stays.
    With CUT_SLOTS, long sequences are cut by keys first, and each split of a row block counts as one (`cuts.py`).
    In a mixed batch, sequences of one row block come before all others, and of these, that with the most keys is the
    first one. So `queue.py` finds the longest work tile of either kind at either end.

    Args:
        ends: of the first SEQS sequences in the batch's order.
        memory: shared memory of [2, SEQS] int32, or of [4, SEQS] with CUT_SLOTS, which no other warp uses.
        work_tiles_each: work tiles of a row block.

    Returns:
        The ends; how many row blocks of a mixed batch belong to sequences of one row block, 0 if it is not mixed; and
        how many programs begin with these.
    """
    PAIRS: gl.constexpr = gl.BlockedLayout([SEQS // 32, PART], [32, 1], [gl.num_warps(), 1], [1, 0])
    seqs = gl.arange(0, SEQS, gl.SliceLayout(1, PAIRS))
    q_len, counts = row_blocks_of(seqs, cu_seqlens_q, num_seqs, max_decode_queries, BLOCK_T)
    seq_len = gl.load(kv.seq_lens + seqs, mask=seqs < num_seqs, other=0)
    if kv.query_offsets is None:
        first_pos = seq_len - q_len
    else:
        first_pos = gl.load(kv.query_offsets + seqs, mask=seqs < num_seqs, other=0)
    token = gl.maximum(counts - 1, 0) * BLOCK_T
    kv_start, kv_stop = keys_of_band(token, q_len, first_pos, seq_len, window_left, window_right, BLOCK_T)
    # So that a place fits 32 bits, where a tile has at least 64 keys.
    keys = gl.minimum(gl.maximum(kv_stop - kv_start, 0), (1 << 29) - BLOCK_N)
    tiles = (keys + BLOCK_N - 1) // BLOCK_N
    owns, streams = counts > 0, counts == 1
    has_prompts = gl.max(counts, 0) > 1
    if num_seqs > SEQS:  # the others are taken first
        has_prompts = num_seqs > 0
    mixed = has_prompts & (gl.max(streams.to(gl.int32), 0) > 0)
    most, least = gl.max(gl.where(owns, tiles, 0), 0), gl.min(gl.where(owns, tiles, 2147483647), 0)
    work = gl.sum(counts * tiles, 0) * work_tiles_each  # may wrap around, which costs the order and nothing else
    ordered = (most > least) & (most * SHARE * gl.num_programs(0) > work)
    if CUT_SLOTS > 0:
        # A decoding sequence that a concurrent launch serves is as much work as one row block.
        blocks = gl.maximum(counts, gl.where(q_len > 0, 1, 0))
        work = gl.sum(blocks * tiles, 0) * work_tiles_each
        if may_cut(most, work, gl.sum(blocks, 0) * work_tiles_each, BLOCK_N):
            first_start, first_stop = keys_of_band(0, q_len, first_pos, seq_len, window_left, window_right, BLOCK_T)
            first_keys = gl.minimum(gl.maximum(first_stop - first_start, 0), (1 << 30) - BLOCK_N)
            counts = cut_sequences(
                counts, tiles, first_keys, work, memory, work_tiles_each, CUT_SLOTS, BLOCK_T, BLOCK_N
            )
            ends = gl.associative_scan(gl.convert_layout(counts, ends.type.layout), 0, add)
        else:
            cut_nothing(counts, memory)
        has_more = gl.max(ends, 0) * work_tiles_each > gl.num_programs(0)
        ordered, mixed = ordered & has_more, mixed & has_more
    num_streams, from_back = 0, 0
    if mixed:
        num_streams = gl.sum(gl.where(streams, counts, 0), 0)
        num_others = (gl.max(ends, 0) - num_streams) * work_tiles_each
        from_back = gl.minimum(num_streams * work_tiles_each, gl.num_programs(0) // 2)
        # Where two of the longest other work tiles take longer than a program's share of all work, no program has two.
        most = gl.max(gl.where(streams, 0, tiles), 0)
        if (num_seqs <= SEQS) & (num_others <= gl.num_programs(0)) & (2 * most * gl.num_programs(0) > work):
            from_back = gl.minimum(from_back, gl.num_programs(0) - num_others)
    if ordered | mixed:
        places = tiles * SEQS + seqs  # no two are equal
        places = gl.where(owns, gl.where(streams & mixed, -1 - places, places), -2147483648)
        memory.index(0).store(places)
        memory.index(1).store(counts)
        parts = reinterpret(memory, gl.int32, [2 * SEQS // PART, PART], memory.layout)
        found = gl.zeros([SEQS], gl.int32, gl.SliceLayout(1, PAIRS))
        first = gl.min(gl.where(owns, seqs, SEQS), 0)  # engines have decoding sequences before prompts
        for part in range(first // PART, (gl.minimum(num_seqs, SEQS) + PART - 1) // PART):
            others = parts.index(part).load(gl.SliceLayout(0, PAIRS))
            more = parts.index(SEQS // PART + part).load(gl.SliceLayout(0, PAIRS))
            found += gl.sum(gl.where(others[None, :] <= places[:, None], more[None, :], 0), 1)
        ends = gl.convert_layout(found, ends.type.layout)
    return ends, num_streams, from_back


@gluon.jit
def count_row_blocks(ends, cu_seqlens_q, num_seqs, max_decode_queries, BLOCK_T: gl.constexpr):
    """Return the number of row blocks of the batch; `ends` are those of the first SEQS sequences."""
    count = gl.max(ends, 0)
    for first in range(SEQS, num_seqs, SEQS):
        count += gl.max(row_block_ends(cu_seqlens_q, first, num_seqs, max_decode_queries, BLOCK_T), 0)
    return count


@gluon.jit
def find_row_block(
    ends, row_block, cu_seqlens_q, num_seqs, max_decode_queries, BLOCK_T: gl.constexpr, MAY_BE_ORDERED: gl.constexpr
):
    """Return the sequence that owns a row block of the batch, and that sequence's first row block.

    `ends` are those of the first SEQS sequences, if MAY_BE_ORDERED in any order.
    """
    if MAY_BE_ORDERED:
        seqs = gl.arange(0, SEQS, ends.type.layout)
        end = gl.min(gl.where(ends > row_block, ends, 2147483647), 0)
        # The first one with this end: others have no row blocks.
        seq = gl.min(gl.where(ends == end, seqs, SEQS), 0)
    else:
        seq = gl.sum((ends <= row_block).to(gl.int32), 0)
    first_row_block = gl.max(gl.where(ends <= row_block, ends, 0), 0)
    before = gl.max(ends, 0)
    for first in range(SEQS, num_seqs, SEQS):
        more = before + row_block_ends(cu_seqlens_q, first, num_seqs, max_decode_queries, BLOCK_T)
        seq += gl.sum((more <= row_block).to(gl.int32), 0)
        first_row_block = gl.maximum(first_row_block, gl.max(gl.where(more <= row_block, more, 0), 0))
        before = gl.max(more, 0)
    return seq, first_row_block


@gluon.jit
def publish_work_tile(published, stage, work, more):
    """Write a work tile's fields to shared memory, and those of its Range or its Cut, or () of neither."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(FIELDS):
        published.index(stage * WORDS + i).store(gl.full([1], work[i], gl.int32, LAYOUT))
    for i in gl.static_range(len(more)):
        published.index(stage * WORDS + FIELDS + i).store(gl.full([1], more[i], gl.int32, LAYOUT))


@gluon.jit
def read_work_tile(published, stage):
    """Return the work tile that `publish_work_tile` wrote."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    fields = ()
    for i in gl.static_range(FIELDS):
        fields = fields + (gl.max(published.index(stage * WORDS + i).load(LAYOUT), 0),)
    return WorkTile(*fields)


@gluon.jit
def read_range(published, stage):
    """Return the Range that `publish_work_tile` wrote."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    fields = ()
    for i in gl.static_range(4):
        fields = fields + (gl.max(published.index(stage * WORDS + FIELDS + i).load(LAYOUT), 0),)
    return Range(*fields)


@gluon.jit
def read_cut(published, stage):
    """Return the Cut that `publish_work_tile` wrote."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    fields = ()
    for i in gl.static_range(3):
        fields = fields + (gl.max(published.index(stage * WORDS + FIELDS + i).load(LAYOUT), 0),)
    return Cut(*fields)
