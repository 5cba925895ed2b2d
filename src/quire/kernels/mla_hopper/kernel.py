"""The MLA kernel for Hopper GPUs: absorbed attention over a cache of latents, in Gluon.

Grid: [row blocks, partitions] (`schedule.py`). A program owns the rows of a row block, (token, query head) pairs of one
sequence, and the KV tiles of its partition, which may end inside of a sequence. Warps are specialised. A producer warp
loads quarters of a tile by TMA, each when its stage is free. Of small pages, four warps gather them (`gather.py`).
Consumer warpgroups attend.

* A row block of 64 rows has two consumers (`many_rows.py`) and `producer.py`. One more warpgroup converts fp8 latents.
* A row block of at most 32 rows has one consumer (`few_rows.py`) and `latents.py`.
* With fp8 latents and products in fp8, a row block of 64 rows has `many_rows_fp8.py` and `latents.py`.
* With fp8 latents, a row block of at most 32 rows has two consumers, which convert (`few_rows_fp8.py`), and
  `latents.py`.

A latent is read once: its first columns are key and value, its rope columns are key only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.mla_hopper.few_rows import allocate_few, consume_few
from quire.kernels.mla_hopper.few_rows_fp8 import allocate_fp8, consume_fp8
from quire.kernels.mla_hopper.gather import WARPS, Rows, gather_latents, gather_many
from quire.kernels.mla_hopper.latents import produce_latents
from quire.kernels.mla_hopper.many_rows import consume_many
from quire.kernels.mla_hopper.many_rows_fp8 import allocate_products, score, sum_values
from quire.kernels.mla_hopper.memory import EVEN, ODD, ROWS, allocate
from quire.kernels.mla_hopper.producer import convert, produce
from quire.kernels.mla_hopper.program import Config, Outputs, Program, Queries, Source
from quire.kernels.schedule import Lengths, load_latent_part


@gluon.jit(
    do_not_specialize=["is_found_now", "num_tokens", "num_partitions", "stride_table", "stride_lse", "table_width"]
)
def mla_hopper_kernel(
    out_ptr, lse_ptr, q_nope_ptr, q_rope_ptr, scale_ptr, kv_ptr,
    is_found_now,  # whether the launch before this one finds the schedule, as a number
    num_tokens,
    kv_desc, rope_desc, page_table, seq_lens, cu_seqlens_q, query_offsets, parts_ptr, acc_ptr, m_ptr, l_ptr,
    scale, causal, num_partitions, stride_table, table_width, page_rows,
    stride_row, stride_nope_token, stride_nope_head, stride_rope_token, stride_rope_head,
    stride_out_token, stride_out_head, stride_lse,
    NUM_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr, PARTIAL_ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, FP8_MMA: gl.constexpr,
):  # fmt: skip
    """Attend to row blocks of COLUMNS rows: 16, 32 or ROWS.

    FP8_MMA: with ROWS rows and fp8 latents, products are in fp8.
    """
    GATHERED: gl.constexpr = BOX == 0
    NUMBER: gl.constexpr = kv_ptr.dtype.element_ty
    FROM_FP8: gl.constexpr = NUMBER.primitive_bitwidth == 8
    row_block, index = gl.program_id(0), gl.program_id(1)
    if is_found_now:  # by the launch before this one, for which `load_latent_part` has to wait
        gdc_wait()
    part = load_latent_part(parts_ptr, row_block * num_partitions + index)
    if FP8_MMA:
        s = allocate_products(NUMBER, GATHERED)
    elif COLUMNS == ROWS:
        s = allocate(gl.float16 if FROM_FP8 else NUMBER, FROM_FP8)
    elif FROM_FP8:
        s = allocate_fp8(NUMBER, COLUMNS, GATHERED)
    else:
        s = allocate_few(NUMBER, COLUMNS, GATHERED)
    if GATHERED:
        if COLUMNS == ROWS and not FP8_MMA:
            s.make_ready(True)
        else:
            s.make_ready()
        gdc_launch_dependents()
    lengths = Lengths(seq_lens, cu_seqlens_q, query_offsets, None, None)
    queries = Queries(
        q_nope_ptr, q_rope_ptr, num_tokens, stride_nope_token, stride_nope_head, stride_rope_token, stride_rope_head
    )
    outputs = Outputs(out_ptr, lse_ptr, acc_ptr, m_ptr, l_ptr, stride_out_token, stride_out_head, stride_lse)
    config = Config(NUM_HEADS, PARTIAL_ROWS, COLUMNS, PAGE_SIZE, BOX, False, 1)
    program = Program(
        queries, outputs, lengths, part, index, num_partitions, row_block, causal > 0, scale, scale_ptr,
        config,
    )  # fmt: skip
    source = Source(kv_desc, rope_desc, page_table, stride_table, table_width, page_rows, kv_ptr, stride_row)
    EACH: gl.constexpr = 128 // NUMBER.primitive_bitwidth  # numbers that are copied at once
    slot = stride_row // EACH
    rows = Rows(kv_ptr, None, None, page_table, stride_table, page_rows * slot, slot)
    LOADERS: gl.constexpr = WARPS if GATHERED else 1
    latents = rows if GATHERED else source
    # The lists after the functions: warps and registers of all but the first.
    if COLUMNS < ROWS:
        if FROM_FP8:
            gl.warp_specialize(
                [
                    (consume_fp8, (EVEN, s, program)),
                    (consume_fp8, (ODD, s, program)),
                    (load_few, (s, latents, program)),
                ],
                [4, LOADERS], [232, 40],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [(consume_few, (s, program)), (load_few, (s, latents, program))],
                [LOADERS], [96 if GATHERED else 40],
            )  # fmt: skip
    elif FP8_MMA:
        gl.warp_specialize(
            [
                (sum_values, (EVEN, s, program)),
                (sum_values, (ODD, s, program)),
                (score, (s, program)),
                (load_few, (s, latents, program)),
            ],
            [4, 4, LOADERS], [184 if GATHERED else 192, 88 if GATHERED else 96, 56 if GATHERED else 32],
        )  # fmt: skip
    elif FROM_FP8:
        gl.warp_specialize(
            [
                (consume_many, (EVEN, s, program)),
                (consume_many, (ODD, s, program)),
                (convert, (s, source, program)),
                (load_many, (s, latents, program)),
            ],
            [4, 4, LOADERS], [200 if GATHERED else 208, 56 if GATHERED else 64, 56 if GATHERED else 32],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume_many, (EVEN, s, program)),
                (consume_many, (ODD, s, program)),
                (load_many, (s, latents, program)),
            ],
            [4, LOADERS], [232, 48 if GATHERED else 40],
        )  # fmt: skip


@gluon.jit
def load_few(s, source, program):
    """Load the latents of every tile of the partition. The producer runs this; `source` is Rows or Source."""
    if program.config.BOX == 0:
        gather_latents(s, source, program)
    else:
        s.make_ready()
        gdc_launch_dependents()
        produce_latents(s, source, program)


@gluon.jit
def load_many(s, source, program):
    """Do what `load_few` does, of row blocks of more than 32 rows whose products are in 16 bits."""
    if program.config.BOX == 0:
        gather_many(s, source, program)
    else:
        s.make_ready(False)
        gdc_launch_dependents()
        produce(s, source, program)
