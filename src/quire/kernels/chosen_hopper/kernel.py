"""The kernel of chosen keys over latents for Hopper GPUs, in Gluon: the consumers of `mla_hopper` over gathered rows.

Grid: [row blocks, programs]. A program owns a row block of query heads, and every so many-th item: a query token and a
part of its list, or some tokens and the union of their lists (`mla_hopper/lists.py`). A row block of 64 rows has two
consumers (`mla_hopper/many_rows.py`), one of at most 32 has one (`mla_hopper/few_rows.py`). Four warps gather
(`mla_hopper/gather.py`), and more convert records.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from quire.kernels.mla_hopper.few_rows import allocate_few, consume_few
from quire.kernels.mla_hopper.gather import (
    WARPS,
    Rows,
    convert_latents,
    convert_many,
    gather_latents,
    gather_many,
)
from quire.kernels.mla_hopper.lists import Items, TokenLists
from quire.kernels.mla_hopper.many_rows import consume_many
from quire.kernels.mla_hopper.memory import EVEN, ODD, ROWS, allocate
from quire.kernels.mla_hopper.program import Config, Outputs, Program, Queries
from quire.kernels.schedule import Lengths

NUMBERS = (  # which change from layer to layer and step to step: kernels are the same for all of them
    "num_tokens", "num_splits", "num_seqs", "width", "stride_list", "stride_lens", "stride_table", "stride_page",
    "stride_slot", "stride_lse", "causal", "num_united",
)  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)
def chosen_hopper_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, 512]
    lse_ptr,  # [num_tokens, NUM_HEADS] float32, or None
    q_nope_ptr,  # [num_tokens, NUM_HEADS, 512]
    q_rope_ptr,  # [num_tokens, NUM_HEADS, 64]
    latents_ptr, rope_ptr, record_scales_ptr,  # of `gather.Rows`
    num_tokens,
    page_table,  # None where entries are slots
    seq_lens, cu_seqlens_q, query_offsets, num_seqs,
    indices, list_lens, width, stride_list, stride_lens,  # of `lists.TokenLists`, like the next
    num_splits,
    unions, num_united,  # of `lists.TokenLists`
    acc_ptr, m_ptr, l_ptr,  # partials of parts: None where lists are whole
    scale,
    causal,  # whether a token sees no key after itself, as a number
    stride_table, stride_page, stride_slot,
    stride_nope_token, stride_nope_head, stride_rope_token, stride_rope_head,
    stride_out_token, stride_out_head, stride_lse,
    NUM_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, PARTIAL_ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    UNION: gl.constexpr,  # query tokens of an item
):  # fmt: skip
    RECORDS: gl.constexpr = rope_ptr is not None
    STORED: gl.constexpr = latents_ptr.dtype.element_ty
    NUMBER: gl.constexpr = q_nope_ptr.dtype.element_ty
    row_block, index = gl.program_id(0), gl.program_id(1)
    if COLUMNS < ROWS:  # a token has one
        row_block = index * 0
        s = allocate_few(NUMBER, COLUMNS, True, True, RECORDS)
        s.make_ready()
    else:
        s = allocate(NUMBER, RECORDS, True)
        s.make_ready(True)
    gdc_launch_dependents()
    owned = num_tokens
    if cu_seqlens_q is None:
        owned = gl.minimum(owned, num_seqs)
    else:
        owned = gl.minimum(owned, gl.load(cu_seqlens_q + num_seqs))
    items = (owned + UNION - 1) // UNION
    if num_splits is not None:
        items *= num_splits
    queries = Queries(
        q_nope_ptr, q_rope_ptr, num_tokens, stride_nope_token, stride_nope_head, stride_rope_token, stride_rope_head
    )
    outputs = Outputs(out_ptr, lse_ptr, acc_ptr, m_ptr, l_ptr, stride_out_token, stride_out_head, stride_lse)
    lengths = Lengths(seq_lens, cu_seqlens_q, query_offsets, None, None)
    config = Config(NUM_HEADS, PARTIAL_ROWS, COLUMNS, PAGE_SIZE, 0, True, UNION)
    lists = TokenLists(indices, list_lens, width, stride_list, stride_lens, num_splits, unions, num_united)
    program = Program(
        queries, outputs, lengths, Items(items - 1, owned), index, gl.num_programs(1), row_block, causal > 0, scale,
        None, config, lists,
    )  # fmt: skip
    rows = Rows(latents_ptr, rope_ptr, record_scales_ptr, page_table, stride_table, stride_page, stride_slot, num_seqs)
    # The lists after the functions: warps and registers of all but the first.
    if COLUMNS < ROWS:
        if RECORDS:
            gl.warp_specialize(
                [
                    (consume_few, (s, program)),
                    (convert_latents, (EVEN, s, STORED, program)),
                    (convert_latents, (ODD, s, STORED, program)),
                    (gather_latents, (s, rows, program)),
                ],
                [4, 4, WARPS], [88, 88, 88],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [(consume_few, (s, program)), (gather_latents, (s, rows, program))], [WARPS], [96]
            )  # fmt: skip
    elif RECORDS:
        gl.warp_specialize(
            [
                (consume_many, (EVEN, s, program)),
                (consume_many, (ODD, s, program)),
                (convert_many, (s, STORED, program)),
                (gather_many, (s, rows, program)),
            ],
            [4, 4, WARPS], [200, 56, 56],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume_many, (EVEN, s, program)),
                (consume_many, (ODD, s, program)),
                (gather_many, (s, rows, program)),
            ],
            [4, WARPS], [232, 48],
        )  # fmt: skip
