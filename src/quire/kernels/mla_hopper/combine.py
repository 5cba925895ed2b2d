"""Combine the partials of sequences that partitions cut.

Grid: [cuts, row blocks, blocks of rows and columns]. A batch with few sequences has a `Cut` for each of them. A batch
with many has one for each boundary between two partitions, since at most that many sequences are cut. Lists of chosen
keys are all cut, and have a place in the grid each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.gluon.softmax import lse_of_rows
from quire.kernels.mla_hopper.lists import TokenLists, count_of
from quire.kernels.mla_hopper.memory import TILE
from quire.kernels.mla_hopper.program import Outputs
from quire.kernels.schedule import load_cut

WIDTH = gl.constexpr(512)  # columns of the values


@gluon.jit(do_not_specialize=["num_partitions", "stride_lse"])
def mla_combine_kernel(
    out_ptr, lse_ptr, cu_seqlens_q, cuts_ptr, acc_ptr, m_ptr, l_ptr,
    num_partitions, stride_out_token, stride_out_head, stride_lse,
    NUM_HEADS: gl.constexpr, PARTIAL_ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    row_block = gl.program_id(1)
    # The schedule and the lengths are older than the attention kernel, which still runs.
    cut = load_cut(cuts_ptr, row_block * gl.num_programs(0) + gl.program_id(0))
    q_start, q_len = cut.seq, 1
    if cu_seqlens_q is not None:
        q_start = gl.load(cu_seqlens_q + cut.seq)
        q_len = gl.load(cu_seqlens_q + cut.seq + 1) - q_start
    gdc_wait()  # by every program: the kernel after this one must not overtake the attention kernel
    if cut.number > 1:
        outputs = Outputs(out_ptr, lse_ptr, acc_ptr, m_ptr, l_ptr, stride_out_token, stride_out_head, stride_lse)
        base = (row_block * num_partitions + cut.first) * 2
        combine_partials(
            outputs, cut.number, base, q_start, q_len, row_block, False,
            NUM_HEADS, PARTIAL_ROWS, BLOCK_M, PARTS, COLUMNS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["width", "stride_lens", "num_splits", "num_seqs", "stride_lse"])
def combine_lists_kernel(
    out_ptr, lse_ptr,
    list_lens, width, stride_lens,  # of `lists.TokenLists`, like the next
    num_splits,
    cu_seqlens_q, num_seqs,
    acc_ptr, m_ptr, l_ptr, stride_out_token, stride_out_head, stride_lse,
    NUM_HEADS: gl.constexpr, PARTIAL_ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Combine the partials of the parts of each list that have tiles. Of a list without entries, write zeros."""
    gdc_launch_dependents()
    token, row_block = gl.program_id(0), gl.program_id(1)
    tokens = token * 0 + num_seqs
    if cu_seqlens_q is not None:
        tokens = gl.load(cu_seqlens_q + num_seqs)
    lists = TokenLists(out_ptr, list_lens, width, 0, stride_lens, num_splits)
    tiles = (count_of(lists, token) + TILE - 1) // TILE
    size = gl.maximum((tiles + num_splits - 1) // num_splits, 1)
    gdc_wait()  # as above
    if token < tokens:
        outputs = Outputs(out_ptr, lse_ptr, acc_ptr, m_ptr, l_ptr, stride_out_token, stride_out_head, stride_lse)
        base, number = token.to(gl.int64) * num_splits * gl.num_programs(1) + row_block, (tiles + size - 1) // size
        combine_partials(
            outputs, number, base, token, 1, row_block, True, NUM_HEADS, PARTIAL_ROWS, BLOCK_M, PARTS, COLUMNS
        )


@gluon.jit
def combine_partials(
    outputs, number, base, q_start, q_len, row_block, OF_LIST: gl.constexpr,
    NUM_HEADS: gl.constexpr, PARTIAL_ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Combine `number` partials of some rows and columns of a row block, the first of which is in slot `base`."""
    # A thread holds all partials of its columns, so that sums over partials need no exchange.
    WARPS: gl.constexpr = 4 // BLOCK_M  # that share a row
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, PARTS, min(4, COLUMNS // (32 * WARPS))], [1, 1, 32], [BLOCK_M, 1, WARPS], [2, 1, 0]
    )
    OF_WEIGHTS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    block, column = gl.program_id(2) % (PARTIAL_ROWS // BLOCK_M), gl.program_id(2) // (PARTIAL_ROWS // BLOCK_M)
    block, column = block * BLOCK_M, column * COLUMNS
    if (row_block * PARTIAL_ROWS + block) // NUM_HEADS < q_len:
        rows = block + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OF_WEIGHTS))[:, None]
        parts = gl.arange(0, PARTS, gl.SliceLayout(0, OF_WEIGHTS))[None, :]
        cols = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :]
        m = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, OF_WEIGHTS))
        total = gl.zeros([BLOCK_M, PARTS], gl.float32, OF_WEIGHTS)
        acc = gl.zeros([BLOCK_M, PARTS, COLUMNS], gl.float32, LAYOUT)
        for i in range(0, number, PARTS):
            part = i + parts
            inside = (part < number) & (rows >= 0)
            if OF_LIST:
                slots = (base + part * gl.num_programs(1)) * PARTIAL_ROWS + rows
            else:  # a sequence's first partial is in the second place of its partition, the others are in the first
                slots = (base + part * 2 + (part == 0).to(gl.int32)) * PARTIAL_ROWS + rows
            m_i = gl.load(outputs.m_i + slots, mask=inside, other=float("-inf"))
            l_i = gl.load(outputs.l_i + slots, mask=inside, other=0.0)
            ptrs = outputs.acc + slots.to(gl.int64)[:, :, None] * WIDTH + cols[:, None, :]
            partials = gl.load(ptrs, mask=inside[:, :, None], other=0.0)
            m_new = gl.maximum(m, gl.max(m_i, 1))
            shift = gl.where(m_new == float("-inf"), 0.0, m_new)
            alpha, weight = gl.exp2(m - shift), gl.exp2(m_i - shift[:, None])
            total = total * alpha[:, None] + weight * l_i
            acc = acc * alpha[:, None][:, :, None] + weight[:, :, None] * partials
            m = m_new
        sums = gl.sum(total, 1)
        empty = sums == 0.0
        safe = gl.where(empty, 1.0, sums)
        acc = gl.sum(acc, 1)
        OF_ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        out = acc / gl.convert_layout(safe, OF_ROWS)[:, None]
        local = row_block * PARTIAL_ROWS + block + gl.arange(0, BLOCK_M, OF_ROWS)
        token = local // NUM_HEADS
        offsets = (q_start + token).to(gl.int64) * outputs.stride_out_token
        offsets += (local % NUM_HEADS).to(gl.int64) * outputs.stride_out_head
        cols = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, acc.type.layout))
        gl.store(
            outputs.out + offsets[:, None] + cols[None, :], out.to(outputs.out.dtype.element_ty),
            mask=(token < q_len)[:, None],
        )  # fmt: skip
        if outputs.lse is not None:
            if column == 0:
                lse = lse_of_rows(m, sums)
                of_lse = row_block * PARTIAL_ROWS + block + gl.arange(0, BLOCK_M, lse.type.layout)
                lse_token = of_lse // NUM_HEADS
                lse_offsets = (q_start + lse_token).to(gl.int64) * outputs.stride_lse + of_lse % NUM_HEADS
                gl.store(outputs.lse + lse_offsets, lse, mask=lse_token < q_len)
