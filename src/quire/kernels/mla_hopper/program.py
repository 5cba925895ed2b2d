"""What the warps of a program are told: of their work, of tensors, and of constants."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import aggregate
from quire.kernels.mla_hopper.schedule import Work, first_tile, keys_of, num_tiles, queries_of


class Queries(NamedTuple):
    """The two parts of the queries."""

    nope: Any  # [num_tokens, NUM_HEADS, 512]
    rope: Any  # [num_tokens, NUM_HEADS, 64]
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
    BOX: gl.constexpr  # slots of a page in one TMA load


class Program(NamedTuple):
    """What the warps of a program are told of its work."""

    queries: Any  # Queries
    outputs: Any  # Outputs
    lengths: Any  # schedule.Lengths
    partition: Any  # schedule.Partition
    index: Any  # of the partition
    num_partitions: Any
    row_block: Any
    causal: Any
    softmax_scale: Any
    scale_ptr: Any  # the factor of fp8 latents, or None
    config: Any  # Config


@gluon.jit
def work_of(program, seq, place, row_block):
    """Return the tiles of a sequence that the program's partition holds, and the next sequence's place in the list.

    The sequence's own place is `place`. A row block of few rows is the sequence's only one, 0, as the compiler then
    knows.
    """
    lengths, partition = program.lengths, program.partition
    NUM_HEADS: gl.constexpr = program.config.NUM_HEADS
    q_start, q_len = queries_of(lengths, seq)
    first_pos, seq_len, visible = keys_of(lengths, seq, q_len, row_block, program.causal, NUM_HEADS)
    tiles = num_tiles(q_len, visible, row_block, NUM_HEADS)
    place += gl.where(tiles > 0, partition.overhead, 0)
    start = first_tile(partition, place)
    stop = gl.minimum(partition.high - place, tiles)
    work = Work(seq, q_start, q_len, first_pos, seq_len, visible, start, stop - start, start == 0, stop == tiles)
    return work, place + tiles
