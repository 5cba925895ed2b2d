"""What the warps of a program are told: of their work, of tensors, and of constants."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import aggregate
from quire.kernels.mla_hopper.lists import first_item, next_item, tiles_of_part
from quire.kernels.mla_hopper.memory import TILE
from quire.kernels.schedule import (
    NO_END,
    SEQS,
    Sequence,
    Units,
    is_as_planned,
    load_sequence,
    num_tiles,
    visible_keys,
)


class Queries(NamedTuple):
    """The two parts of the queries."""

    nope: Any  # [num_tokens, NUM_HEADS, 512]
    rope: Any  # [num_tokens, NUM_HEADS, 64]
    num_tokens: Any
    stride_nope_token: Any
    stride_nope_head: Any
    stride_rope_token: Any
    stride_rope_head: Any


class Outputs(NamedTuple):
    """The tensors of results, and the scratch for partials."""

    out: Any  # [num_tokens, NUM_HEADS, 512]
    lse: Any  # [num_tokens, NUM_HEADS] float32, or None
    acc: Any  # [row blocks, partitions, 2, PARTIAL_ROWS, 512] float32, not normalised
    m_i: Any  # [row blocks, partitions, 2, PARTIAL_ROWS] float32, running maximum as a base-2 exponent
    l_i: Any  # the same shape, sum of exponentials relative to m_i
    stride_out_token: Any
    stride_out_head: Any
    stride_lse: Any


class Source(NamedTuple):
    """Where the latents are."""

    kv_desc: Any  # of columns as wide as a panel, or as a quarter if the latents are fp8
    rope_desc: Any  # fp8 latents: of the rope columns
    page_table: Any
    stride_table: Any
    table_width: Any
    page_rows: Any  # rows of `kv_desc` from page to page
    kv_ptr: Any  # the same latents: slot 0 of page 0
    stride_row: Any  # from slot to slot


@aggregate
class Config:
    """The constants of a compiled kernel."""

    NUM_HEADS: gl.constexpr  # query heads
    PARTIAL_ROWS: gl.constexpr  # rows of a partial
    COLUMNS: gl.constexpr  # rows of a row block: columns of products, if there are at most 32
    PAGE_SIZE: gl.constexpr
    BOX: gl.constexpr  # slots of a page in one TMA load; 0 where rows are gathered
    LISTS: gl.constexpr  # whether lists take the place of a schedule
    UNION: gl.constexpr  # query tokens of an item of lists; 1 without them


class Program(NamedTuple):
    """What the warps of a program are told of its work."""

    queries: Any  # Queries
    outputs: Any  # Outputs
    lengths: Any  # schedule.Lengths
    part: Any  # schedule.LatentPart
    index: Any  # of the partition
    num_partitions: Any  # or programs that items go to in turn
    row_block: Any
    causal: Any
    softmax_scale: Any
    scale_ptr: Any  # the factor of fp8 latents, or None
    config: Any  # Config
    lists: Any = None  # lists.TokenLists, with Config.LISTS: then a sequence is an item, and `part` is lists.Items


class Work(NamedTuple):
    """The tiles of one sequence that a program attends to."""

    first_pos: Any  # position of its first query
    seq_len: Any
    visible: Any  # keys that the row block sees
    tile: Any  # first tile, in the sequence
    count: Any  # tiles; at least one
    starts: Any  # the first tile is the sequence's first
    ends: Any  # the last tile is the sequence's last
    as_planned: Any  # the sequence has as many tiles as in the schedule, or is not cut here


class Target(NamedTuple):
    """Where a sequence's results go: to where its queries are now, which may not be where the schedule has them."""

    q_start: Any  # its first query token
    q_len: Any
    poison: Any  # added to sums of exponentials, or to a scale: NaN if the schedule has other lengths, else 0


@gluon.jit
def first_sequence(program, row_block):
    """Return the first sequence of the partition that has rows in the row block.

    Returns:
        seq: its number; after the partition's last if there is none.
        known: its `Sequence` of the schedule.
        tile: its first tile that the partition holds.
    """
    if program.config.LISTS:
        return first_item(program)
    else:
        part = program.part
        q_start, q_len = part.seq, part.seq * 0 + 1
        if program.lengths.cu_seqlens_q is not None:
            q_start, q_len = part.q_start, part.q_len
        first_pos = part.seq_len - q_len
        if program.lengths.query_offsets is not None:
            first_pos = part.first_pos
        seq, known = with_rows(program, part.seq, Sequence(part.seq_len, q_start, q_len, first_pos), row_block)
        return seq, known, part.tile


@gluon.jit
def next_sequence(program, seq, row_block):
    """Return of the next sequence that has rows in the row block what `first_sequence` returns, with its lengths."""
    if program.config.LISTS:
        return next_item(program, seq)
    else:
        seq, known = with_rows(program, seq + 1, load_within(program, seq + 1), row_block)
        return seq, known, seq * 0


@gluon.jit
def load_within(program, seq):
    """Return the `Sequence` of a number, or of the partition's last sequence if that is less."""
    return load_sequence(program.lengths, program.lengths.cu_seqlens_q, gl.minimum(seq, program.part.last_seq))


@gluon.jit
def with_rows(program, seq, known, row_block):
    """Return the first sequence from `seq` on that has rows in the row block, or one after the partition's last.

    `known` is the `Sequence` of `seq`.
    """
    if program.lengths.cu_seqlens_q is not None:
        if known.q_len * program.config.NUM_HEADS <= row_block * program.config.COLUMNS:
            seq = skip_without_rows(program, seq, row_block)
            known = load_within(program, seq)
    return seq, known


@gluon.jit
def skip_without_rows(program, seq, row_block):
    """Return the first sequence from `seq` on that has rows in the row block, of which it reads SEQS at once."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([SEQS // 32], [32], [gl.num_warps()], [0])  # every warp holds all
    last_seq = program.part.last_seq
    i = gl.arange(0, SEQS, LAYOUT)
    found = seq * 0 + SEQS
    while (seq <= last_seq) & (found == SEQS):
        starts = program.lengths.cu_seqlens_q + gl.minimum(seq + i, last_seq)
        q_len = gl.load(starts + 1) - gl.load(starts)
        has_rows = (seq + i <= last_seq) & (q_len * program.config.NUM_HEADS > row_block * program.config.COLUMNS)
        found = gl.min(gl.where(has_rows, i, SEQS), 0)
        seq += found
    return seq


@gluon.jit
def work_of(program, seq, known, tile, row_block):
    """Return the `Work` of a sequence, whose `Sequence` is `known`, from `tile` on."""
    if program.config.LISTS:
        count, is_whole = tiles_of_part(program, seq, known)[1], seq >= 0
        if program.lists.num_splits is not None:
            is_whole = seq < 0
        return Work(known.first_pos, known.seq_len, known.seq_len, tile, count, is_whole, is_whole, seq >= 0)
    else:
        part = program.part
        U: gl.constexpr = Units(program.config.NUM_HEADS, program.config.COLUMNS, TILE, 0)
        visible = visible_keys(known, row_block, program.causal, U)
        tiles = num_tiles(known.q_len, visible, row_block, U)
        is_cut = (seq == part.last_seq) & (part.stop != NO_END)
        count = gl.where(is_cut, part.stop, tiles) - tile
        as_planned = (tiles == part.last_tiles) | (not is_cut)
        return Work(known.first_pos, known.seq_len, visible, tile, count, tile == 0, not is_cut, as_planned)


@gluon.jit
def target_of(program, seq, known, work):
    """Return the `Target` of a sequence, whose `Sequence` is `known`."""
    if program.config.LISTS:
        return Target(known.q_start, known.q_len, 0.0)
    else:
        now = load_sequence(program.lengths, program.lengths.cu_seqlens_q, seq)
        as_planned = work.as_planned & is_as_planned(now, known)
        return Target(now.q_start, now.q_len, gl.where(as_planned, 0.0, float("nan")))


@gluon.jit
def slot_of(program, seq, work, row_block):
    """Return where the partial of a sequence goes: each partition has two places, and each part of a list has one."""
    if program.config.LISTS:
        return seq.to(gl.int64) * gl.num_programs(0) + row_block
    else:
        slot = (row_block * program.num_partitions + program.index) * 2 + work.starts.to(gl.int32)
        return slot.to(gl.int64)
