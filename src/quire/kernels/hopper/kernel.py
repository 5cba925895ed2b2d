"""Attention for prompts on Hopper GPUs: warp-specialised, keys and values through the copy engine page by page.

A program has two warpgroups that compute, 64 rows each, and a warp that fetches (`produce.py`). It stays on its multiprocessor and draws one block of rows
after the other. A block (`block.py`) is BLOCK_T query tokens of a sequence times as many heads of one KV head as make 128 rows, a head's tokens side by side.
For short contexts a program has one warpgroup and half of the rows.
The warpgroups take the matrix unit in turns, one's softmax beside the other's products. For a quantised cache, a third warpgroup stands between the warp that
fetches and those that compute (`convert.py`).

The shape is that of FlashAttention-3 (arXiv 2407.08608, sections 3.1 and 3.2).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.hopper.convert import convert, permute_for_fp8_operand, quantize_queries, to_fp8
from quire.kernels.hopper.pipeline import consumer_release, consumer_wait, make_pipeline
from quire.kernels.hopper.producer import produce
from quire.kernels.hopper.tile_scheduler import ROWS, WORDS, read_work_tile
from quire.kernels.primitives import LN2, LOG2E


class Scoring(NamedTuple):
    """How products become scores, and which are seen."""

    scale: Any
    k_scale_ptr: Any  # of a quantised cache, by head
    softcap: Any
    window_left: Any
    window_right: Any
    slopes_ptr: Any


class Outputs(NamedTuple):
    """Where results go: to the caller, or as states of the parts of the keys, in float32, side by side for each row."""

    out_ptr: Any
    lse_ptr: Any
    sinks_ptr: Any
    v_scale_ptr: Any
    stride_out_token: Any
    stride_out_head: Any
    stride_lse: Any
    num_parts: Any


@gluon.jit
def attend(
    wg: gl.constexpr, q_pipe, k_pipe, v_pipe, work_tiles, scoring, outputs, stride_scale,
    GROUP: gl.constexpr, BLOCK_T: gl.constexpr, SCORE_MOD: gl.constexpr,
):  # fmt: skip
    """Attend with one warpgroup to the tiles that are fetched, and write the results of each block."""
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_pipe.tiles.shape[2]
    element: gl.constexpr = k_pipe.tiles.dtype
    IN_FP8: gl.constexpr = element.primitive_bitwidth == 8
    DEPTH: gl.constexpr = 256 // element.primitive_bitwidth  # numbers that one instruction multiplies and adds up
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, DEPTH])
    OF_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, DEPTH])
    rows = wg * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OF_SCORES))
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, OF_SCORES))

    block_i = 0
    tile_i = 0
    slot = consumer_wait(q_pipe, block_i)
    block = read_work_tile(work_tiles, slot)
    while block.q_len > 0:
        slopes = None
        if scoring.slopes_ptr is not None:
            slopes = gl.load(scoring.slopes_ptr + block.head + rows // BLOCK_T).to(gl.float32)
        scale = scoring.scale
        if scoring.k_scale_ptr is not None:
            scale *= gl.load(scoring.k_scale_ptr + block.head // GROUP * stride_scale)
        if element == q_pipe.tiles.dtype:
            q = q_pipe.tiles.index(slot).slice(wg * ROWS, ROWS)
        else:
            q, shrunk = quantize_queries(q_pipe.tiles.index(slot), element, wg * ROWS, 7 if IN_FP8 else 14, OF_SCORES)
            scale *= shrunk
        if IN_FP8:
            acc, m_i, l_i = attend_block_in_fp8(
                q,
                k_pipe,
                v_pipe,
                tile_i,
                rows,
                cols,
                block,
                slopes,
                scale,
                scoring,
                OF_SCORES,
                OF_OUT,
                BLOCK_T,
                SCORE_MOD,
            )
        else:
            acc, m_i, l_i = attend_block(
                q,
                k_pipe,
                v_pipe,
                tile_i,
                rows,
                cols,
                block,
                slopes,
                scale,
                scoring,
                OF_SCORES,
                OF_OUT,
                BLOCK_T,
                SCORE_MOD,
            )
        tile_i += block.num_tiles
        if outputs.v_scale_ptr is not None:
            acc = acc * gl.load(outputs.v_scale_ptr + block.head // GROUP * stride_scale)
        finish(wg, acc, m_i, l_i, q_pipe, block_i, block, rows, outputs, BLOCK_T)
        block_i += 1
        slot = consumer_wait(q_pipe, block_i)
        block = read_work_tile(work_tiles, slot)


@gluon.jit
def empty_state(OF_SCORES: gl.constexpr, OF_OUT: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Return the state over no keys."""
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, OF_SCORES))
    l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, OF_SCORES))
    return gl.zeros([ROWS, HEAD_DIM], gl.float32, OF_OUT), m_i, l_i


@gluon.jit
def attend_block(
    q, k_pipe, v_pipe, tile_i, rows, cols, block, slopes, scale, scoring,
    OF_SCORES: gl.constexpr, OF_OUT: gl.constexpr, BLOCK_T: gl.constexpr, SCORE_MOD: gl.constexpr,
):  # fmt: skip
    """Return the state of a block's rows over its tiles of keys, from the last down, which is the tile_i-th use of the rings."""
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[1]
    OF_P: gl.constexpr = gl.DotOperandLayout(0, OF_OUT, 2)
    element: gl.constexpr = k_pipe.tiles.dtype
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, OF_SCORES)
    acc, m_i, l_i = empty_state(OF_SCORES, OF_OUT, k_pipe.tiles.shape[2])
    pos = block.tile * BLOCK_N
    k = k_pipe.tiles.index(consumer_wait(k_pipe, tile_i))
    scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    consumer_release(k_pipe, tile_i)
    p, m_i, l_i, _ = softmax_step(
        scores, m_i, l_i, pos, rows, cols, block, slopes, scale, scoring, 0.0, BLOCK_T, SCORE_MOD
    )
    p = gl.convert_layout(p.to(element), OF_P)
    for i in range(tile_i + 1, tile_i + block.num_tiles):
        pos -= BLOCK_N
        k = k_pipe.tiles.index(consumer_wait(k_pipe, i))
        scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        v = v_pipe.tiles.index(consumer_wait(v_pipe, i - 1))
        acc = warpgroup_mma(p, v, acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        consumer_release(k_pipe, i)
        # The other warpgroup's softmax runs beside these two products. (One's own beside the second of them was slower.)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        consumer_release(v_pipe, i - 1)
        p, m_i, l_i, alpha = softmax_step(
            scores, m_i, l_i, pos, rows, cols, block, slopes, scale, scoring, 0.0, BLOCK_T, SCORE_MOD
        )
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OF_OUT))[:, None]
        p = gl.convert_layout(p.to(element), OF_P)
    last = tile_i + block.num_tiles - 1
    v = v_pipe.tiles.index(consumer_wait(v_pipe, last))
    acc = warpgroup_mma(p, v, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=[acc, p])
    consumer_release(v_pipe, last)
    return acc, m_i, l_i


@gluon.jit
def attend_block_in_fp8(
    q, k_pipe, v_pipe, tile_i, rows, cols, block, slopes, scale, scoring,
    OF_SCORES: gl.constexpr, OF_OUT: gl.constexpr, BLOCK_T: gl.constexpr, SCORE_MOD: gl.constexpr,
):  # fmt: skip
    """As `attend_block`, with products in fp8 of keys as they come and of values on their side.

    The matrix unit adds fp8 products up with 14 bits or so: a tile's are added to the others in float32. Products are short beside the softmax, and
    accumulators of three kinds would not fit the registers: one's own products run one after the other, the other warpgroup's softmax beside them.
    """
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[1]
    OF_P: gl.constexpr = gl.DotOperandLayout(0, OF_OUT, 4)
    LIFT: gl.constexpr = 8.0  # probabilities are at most 2^8, so that small ones keep their bits
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, OF_SCORES)
    no_out, m_i, l_i = empty_state(OF_SCORES, OF_OUT, k_pipe.tiles.shape[2])
    acc = no_out
    pos = block.tile * BLOCK_N
    for i in range(tile_i, tile_i + block.num_tiles):
        k = k_pipe.tiles.index(consumer_wait(k_pipe, i))
        scores = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        consumer_release(k_pipe, i)
        p, m_i, l_i, alpha = softmax_step(
            scores, m_i, l_i, pos, rows, cols, block, slopes, scale, scoring, LIFT, BLOCK_T, SCORE_MOD
        )
        p = gl.convert_layout(to_fp8(permute_for_fp8_operand(p)), OF_P)
        v = v_pipe.tiles.index(consumer_wait(v_pipe, i))
        part = warpgroup_mma(p, v.permute((1, 0)), no_out, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        consumer_release(v_pipe, i)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OF_OUT))[:, None] + part
        pos -= BLOCK_N
    return acc, m_i - LIFT, l_i


@gluon.jit
def softmax_step(
    scores,
    m_i,
    l_i,
    pos,
    rows,
    cols,
    block,
    slopes,
    scale,
    scoring,
    LIFT: gl.constexpr,
    BLOCK_T: gl.constexpr,
    SCORE_MOD: gl.constexpr,
):
    """Fold a tile of scores, of the keys from `pos` on, into the running maximum and denominator; return the probabilities times 2^LIFT first, and last the
    factor for what was accumulated before.
    """
    low_pos, high_pos = (
        block.first_pos + block.token,
        block.first_pos + gl.minimum(block.token + BLOCK_T, block.q_len) - 1,
    )
    q_pos = low_pos + rows % BLOCK_T
    exponent_scale = scale * LOG2E
    if SCORE_MOD is not None:
        exponent_scale = LOG2E
        scores = SCORE_MOD(scores * by_row(scale), q_pos, pos + cols, slopes, scoring.softcap)
    # Else every row sees all of the tile.
    if (pos + scores.shape[1] > gl.minimum(low_pos + scoring.window_right + 1, block.seq_len)) | (
        pos < high_pos - scoring.window_left
    ):
        first_col, last_col = (
            q_pos - scoring.window_left - pos,
            gl.minimum(q_pos + scoring.window_right, block.seq_len - 1) - pos,
        )
        scores = gl.where(
            (cols[None, :] >= first_col[:, None]) & (cols[None, :] <= last_col[:, None]), scores, float("-inf")
        )
    m_new = gl.maximum(m_i, gl.max(scores, 1) * exponent_scale)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key: -inf - -inf is NaN
    p = gl.exp2(scores * by_row(exponent_scale) - (shift - LIFT)[:, None])
    alpha = gl.exp2(m_i - shift)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def by_row(factor):
    """Return a factor of a tile's rows, or one of all of them."""
    if isinstance(factor, gl.tensor) and len(factor.shape) == 1:
        factor = factor[:, None]
    return factor


@gluon.jit
def finish(wg: gl.constexpr, acc, m_i, l_i, q_pipe, block_i, block, rows, outputs, BLOCK_T: gl.constexpr):
    """Normalise a block's results and write them, by way of the shared memory of its queries, which it then releases; states of parts as they lie."""
    element: gl.constexpr = q_pipe.tiles.dtype
    STATES: gl.constexpr = outputs.out_ptr.dtype.element_ty != element
    HEAD_DIM: gl.constexpr = q_pipe.tiles.shape[2]
    OF_OUT: gl.constexpr = acc.type.layout
    IN_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if outputs.sinks_ptr is not None:  # one more key, of score sink[h] and value 0
        if block.part == 0:
            sink = gl.load(outputs.sinks_ptr + block.head + rows // BLOCK_T).to(gl.float32) * LOG2E
            m_new = gl.maximum(m_i, sink)
            alpha = gl.exp2(m_i - m_new)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OF_OUT))[:, None]
            l_i = l_i * alpha + gl.exp2(sink - m_new)
            m_i = m_new
    seen = l_i > 0.0
    safe = gl.where(seen, l_i, 1.0)
    if outputs.lse_ptr is not None:
        tokens = block.token + rows % BLOCK_T
        lse = gl.where(seen, m_i * LN2 + gl.log(safe), float("-inf"))
        at = (
            (block.q_start + tokens).to(gl.int64) * outputs.stride_lse
            + (block.head + rows // BLOCK_T) * outputs.num_parts
            + block.part
        )
        gl.store(outputs.lse_ptr + at, lse, mask=tokens < block.q_len)
    result = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, OF_OUT))[:, None]
    if not STATES:
        staged = q_pipe.tiles.index(block_i % q_pipe.empty.shape[0]).slice(wg * ROWS, ROWS)
        staged.store(result.to(element))
        result = staged.load(IN_ROWS)
        fence_async_shared()
    consumer_release(q_pipe, block_i)
    LAYOUT: gl.constexpr = result.type.layout
    out_rows = wg * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    tokens = block.token + out_rows % BLOCK_T
    offsets = (block.q_start + tokens).to(gl.int64) * outputs.stride_out_token + (
        block.head + out_rows // BLOCK_T
    ) * outputs.stride_out_head
    offsets += block.part * HEAD_DIM
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT))
    gl.store(
        outputs.out_ptr + offsets[:, None] + offs_d[None, :],
        result,
        mask=(tokens < block.q_len)[:, None] & (offs_d < HEAD_DIM)[None, :],
    )


@gluon.jit(
    do_not_specialize_on_alignment=["num_parts", "stride_lse"],
    do_not_specialize=["few", "num_seqs", "stride_table", "window_left", "window_right"],
)
def hopper_kernel(
    out_ptr, lse_ptr, sinks_ptr, slopes_ptr, k_scale_ptr, v_scale_ptr, q_desc, k_desc, v_desc, kv, cu_seqlens_q, counter,
    scale, softcap, window_left, window_right, few, num_seqs, num_parts, stride_table, stride_q_head, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, SCORE_MOD: gl.constexpr,
    WARPGROUPS: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr, BYTE_STAGES: gl.constexpr,
    IN_FP8: gl.constexpr, BOX: gl.constexpr, Q_BOX: gl.constexpr,
):  # fmt: skip
    gdc_wait()
    if (
        (few > 0) | (num_parts > 1)
    ):  # what comes second may begin wherever there is room: sequences of few queries, or the merge of parts, which waits
        gdc_launch_dependents()
    q_pipe = make_pipeline(q_desc.dtype, WARPGROUPS * ROWS, HEAD_DIM, BLOCKS, WARPGROUPS)
    NUMBER: gl.constexpr = k_desc.dtype if BYTE_STAGES == 0 or IN_FP8 else gl.float16
    k_pipe = make_pipeline(NUMBER, BLOCK_N, HEAD_DIM, STAGES, WARPGROUPS)
    if IN_FP8:
        v_pipe = make_pipeline(NUMBER, HEAD_DIM, BLOCK_N, STAGES, WARPGROUPS)
    else:
        v_pipe = make_pipeline(NUMBER, BLOCK_N, HEAD_DIM, STAGES, WARPGROUPS)
    work_tiles = gl.allocate_shared_memory(gl.int32, [BLOCKS * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    scoring = Scoring(scale, k_scale_ptr, softcap, window_left, window_right, slopes_ptr)
    outputs = Outputs(
        out_ptr, lse_ptr, sinks_ptr, v_scale_ptr, stride_out_token, stride_out_head, stride_lse, num_parts
    )
    if WARPGROUPS == 1:
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (0, q_pipe, k_pipe, v_pipe, work_tiles, scoring, outputs, kv.scale_head, GROUP, BLOCK_T, SCORE_MOD)),
                (produce, (q_pipe, k_pipe, v_pipe, work_tiles, q_desc, k_desc, v_desc, kv, cu_seqlens_q, counter, few, num_seqs, num_parts, window_left,
                         window_right, stride_table, stride_q_head, NUM_KV_HEADS, GROUP, BLOCK_T, PAGE_SIZE, Q_BOX, BOX)),
            ],
            [1],
            [40],
        )  # fmt: skip
    elif BYTE_STAGES == 0:
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (0, q_pipe, k_pipe, v_pipe, work_tiles, scoring, outputs, kv.scale_head, GROUP, BLOCK_T, SCORE_MOD)),
                (attend, (1, q_pipe, k_pipe, v_pipe, work_tiles, scoring, outputs, kv.scale_head, GROUP, BLOCK_T, SCORE_MOD)),
                (produce, (q_pipe, k_pipe, v_pipe, work_tiles, q_desc, k_desc, v_desc, kv, cu_seqlens_q, counter, few, num_seqs, num_parts, window_left,
                         window_right, stride_table, stride_q_head, NUM_KV_HEADS, GROUP, BLOCK_T, PAGE_SIZE, Q_BOX, BOX)),
            ],
            [4, 1],
            [232, 40],  # registers of each thread of the second and of the third
        )  # fmt: skip
    else:
        k_bytes = k_pipe
        if not IN_FP8:
            k_bytes = make_pipeline(k_desc.dtype, BLOCK_N, HEAD_DIM, BYTE_STAGES, 1)
        v_bytes = make_pipeline(v_desc.dtype, BLOCK_N, HEAD_DIM, BYTE_STAGES, 1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (0, q_pipe, k_pipe, v_pipe, work_tiles, scoring, outputs, kv.scale_head, GROUP, BLOCK_T, SCORE_MOD)),
                (attend, (1, q_pipe, k_pipe, v_pipe, work_tiles, scoring, outputs, kv.scale_head, GROUP, BLOCK_T, SCORE_MOD)),
                (convert, (k_bytes, v_bytes, k_pipe, v_pipe, q_pipe, work_tiles, window_left, window_right)),
                (produce, (q_pipe, k_bytes, v_bytes, work_tiles, q_desc, k_desc, v_desc, kv, cu_seqlens_q, counter, few, num_seqs, num_parts, window_left,
                         window_right, stride_table, stride_q_head, NUM_KV_HEADS, GROUP, BLOCK_T, PAGE_SIZE, Q_BOX, BOX)),
            ],
            [4, 4, 1],
            [200, 72, 40] if IN_FP8 else [208, 56, 40],
        )  # fmt: skip
