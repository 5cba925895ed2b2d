"""The Hopper kernel: prompts on Hopper GPUs, persistent and warp-specialised.

Grid: [min(num_work_tiles * most splits of one, programs that the GPU holds at once)]. A program owns one work tile
after the other (`tile_scheduler.py`). Its producer warp loads queries, keys and values by TMA, page by page
(`producer.py`). It has two consumer warpgroups with 64 rows each. They take turns on the tensor cores: one computes its
softmax while the other computes products. For short contexts or few rows a program has one consumer warpgroup, and an
SM holds two programs. For a quantised cache a further warpgroup converts tiles between the producer and the consumers
(`convert.py`).

This is the structure of FlashAttention-3 (arXiv 2407.08608, sections 3.1 and 3.2). The loops are in `attend.py`,
`ahead.py` and `capped.py`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.hopper.addresses import mark_shared_memory
from quire.kernels.hopper.ahead import attend_work_tile_ahead
from quire.kernels.hopper.attend import attend_work_tile, attend_work_tile_in_fp8, attend_work_tile_in_splits
from quire.kernels.hopper.capped import attend_capped_work_tile
from quire.kernels.hopper.convert import convert, quantize_queries
from quire.kernels.hopper.gather import WARPS as GATHER_WARPS
from quire.kernels.hopper.operands import columns_of_scores, keys_of, layout_of_out, layout_of_scores, queries_of
from quire.kernels.hopper.partials import combine_and_write, store_and_arrive
from quire.kernels.hopper.pipeline import (
    THREADS,
    consumer_release,
    consumer_wait,
    make_pipeline,
    pieces_of,
    release_unread,
)
from quire.kernels.hopper.producer import produce
from quire.kernels.hopper.products import addresses_of_queries
from quire.kernels.hopper.rescale import scaled
from quire.kernels.hopper.results import Outputs, finish, load_of_heads, tokens_of_rows
from quire.kernels.hopper.softcap import is_capped
from quire.kernels.hopper.tile_scheduler import SEQS, Batch
from quire.kernels.hopper.work_tile import ROWS, WORDS, load_intervals, read_cut, read_range, read_work_tile
from quire.kernels.primitives import in_units


class Scoring(NamedTuple):
    """The run-time numbers that turn products into scores, and the window of keys that a query sees."""

    scale: Any
    k_scale_ptr: Any  # [num_kv_heads] of a quantised cache, or None
    softcap: Any
    window_left: Any
    window_right: Any
    slopes_ptr: Any  # [num_q_heads], or None
    key_begin: Any  # [num_tokens] int32, the intervals that take the place of the window; None, like the next
    key_end: Any


class Sight(NamedTuple):
    """The intervals of keys that a warpgroup's rows see."""

    first: Any  # [ROWS] int32
    last: Any  # [ROWS] int32, less than the first of a row that sees nothing
    full_start: Any  # the keys that every row of the work tile sees
    full_stop: Any


@gluon.jit
def consume(
    wg: gl.constexpr, q_pipe, k_pipe, v_pipe, published, scoring, outputs, stride_scale,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_T: gl.constexpr, HEADS: gl.constexpr,
    BLOCK_N: gl.constexpr, SCORE_MOD: gl.constexpr, FIXED_SPLIT: gl.constexpr, PARTS: gl.constexpr,
    KV_BOX: gl.constexpr, AHEAD: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Attend to work tiles until there are none left. Each consumer warpgroup runs this.

    With APART, each warpgroup has half of a row block's tokens. Of a decoding sequence, the second one has none.
    """
    element: gl.constexpr = k_pipe.tiles.dtype
    OF_SCORES: gl.constexpr = layout_of_scores(BLOCK_N, depth_of(element))
    FIRST_ROW: gl.constexpr = 0 if APART else wg * ROWS
    TOKENS: gl.constexpr = BLOCK_T // 2 if APART else BLOCK_T  # rows of a head
    FIRST_TOKEN: gl.constexpr = wg * TOKENS if APART else 0
    ALL_OWNED: gl.constexpr = q_pipe.tiles.shape[1] == HEADS * BLOCK_T
    OWNED: gl.constexpr = None if ALL_OWNED else HEADS * TOKENS  # rows of queries; others are not written
    RELEASES: gl.constexpr = releases_of_warpgroup(SCORE_MOD, element.primitive_bitwidth == 8)
    rows = FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, OF_SCORES))
    cols = columns_of_scores(BLOCK_N, OF_SCORES)
    work_i = 0
    tile_i = 0
    stage = consumer_wait(q_pipe, work_i)
    work = read_work_tile(published, stage, FIRST_TOKEN)
    while work.q_len > 0:
        is_idle = False
        if APART and wg == 1:
            is_idle = work.token >= work.q_len
        if is_idle:
            tile_i = pass_work_tile(q_pipe, k_pipe, v_pipe, work_i, tile_i, work.num_tiles, RELEASES)
        else:
            tile_i = consume_work_tile(
                wg, q_pipe, k_pipe, v_pipe, published, scoring, outputs, stride_scale, work, stage, work_i, tile_i,
                rows, cols, GROUP, HEAD_DIM, HEAD_DIM_V, FIRST_TOKEN, FIRST_ROW, TOKENS, OWNED, HEADS, SCORE_MOD,
                FIXED_SPLIT, PARTS, KV_BOX, AHEAD,
            )  # fmt: skip
        work_i += 1
        stage = consumer_wait(q_pipe, work_i)
        work = read_work_tile(published, stage, FIRST_TOKEN)


@gluon.jit
def consume_work_tile(
    wg: gl.constexpr, q_pipe, k_pipe, v_pipe, published, scoring, outputs, stride_scale, work, stage, work_i, tile_i,
    rows, cols, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, FIRST_TOKEN: gl.constexpr,
    FIRST_ROW: gl.constexpr, TOKENS: gl.constexpr, OWNED: gl.constexpr, HEADS: gl.constexpr, SCORE_MOD: gl.constexpr,
    FIXED_SPLIT: gl.constexpr, PARTS: gl.constexpr, KV_BOX: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Attend to the tiles of the work_i-th work tile, from the tile_i-th on, and write the results.

    Return how many tiles there were so far. The constants are those of `consume`.
    """
    WARPGROUPS: gl.constexpr = q_pipe.tiles.shape[1] // ROWS
    element: gl.constexpr = k_pipe.tiles.dtype
    FP8_MMA: gl.constexpr = element.primitive_bitwidth == 8
    OF_SCORES: gl.constexpr = layout_of_scores(keys_of(cols), depth_of(element))
    # The only buffer of queries is released after the last product, so that the next queries arrive while results are
    # written. Otherwise results are staged there, or the work tile is read once more after the loop.
    EARLY: gl.constexpr = (q_pipe.tiles.shape[0] == 1 and element.primitive_bitwidth == 16 and FIXED_SPLIT == 0) and (
        scoring.key_begin is None and outputs.out_scale_ptr is None
    )
    # Pairs of probabilities are rounded together where ptxas would swap their halves: in the first of two warpgroups,
    # and in both where row blocks are cut or values have 65 to 127 columns. Elsewhere that is slower.
    BOTH: gl.constexpr = outputs.partials is not None or (HEAD_DIM_V > 64 and HEAD_DIM_V < 128)
    PACKED: gl.constexpr = WARPGROUPS == 2 and (BOTH or wg == 0) and scoring.k_scale_ptr is None
    # Queries of narrow heads: 0.987 to 1.003 of the time in 13 cases (NVIDIA H200, 2026-11-26).
    IN_REGISTERS: gl.constexpr = HEAD_DIM <= 64 and WARPGROUPS == 2 and FIXED_SPLIT == 0 and not is_capped(SCORE_MOD)
    slopes = None
    if scoring.slopes_ptr is not None:
        slopes = load_of_heads(scoring.slopes_ptr + work.head, rows, TOKENS, OWNED)
    sight = None
    if scoring.key_begin is not None:
        sight = sight_of_rows(published, stage, work, rows, scoring, TOKENS, OWNED)
    scale = scoring.scale
    if scoring.k_scale_ptr is not None:
        scale *= gl.load(scoring.k_scale_ptr + work.head // GROUP * stride_scale)
    if len(q_pipe.addresses) > 0:
        q = addresses_of_queries(wg, q_pipe, stage)
    elif element == q_pipe.tiles.dtype:
        q = ()
        for i in gl.static_range(len(pieces_of(HEAD_DIM, 16))):
            piece = queries_of(wg, q_pipe, stage, pieces_of(HEAD_DIM, 16)[i][0], pieces_of(HEAD_DIM, 16)[i][1])
            if IN_REGISTERS:
                piece = piece.load(gl.DotOperandLayout(0, OF_SCORES, 2))
            q = q + (piece,)
    else:
        converted, inverse_scale = quantize_queries(
            q_pipe.tiles.index(stage), element, wg * ROWS, 7 if FP8_MMA else 14, OF_SCORES
        )
        q = (converted,)
        scale *= inverse_scale
    cut = ()
    if EARLY and outputs.partials is not None:
        cut = read_cut(published, stage)
    if FP8_MMA:
        acc, m_i, l_i = attend_work_tile_in_fp8(
            q[0], k_pipe, v_pipe, tile_i, rows, cols, work, sight, slopes, scale, scoring, OF_SCORES,
            layout_of_out(HEAD_DIM_V, depth_of(element)), TOKENS, SCORE_MOD,
        )  # fmt: skip
        accs = (acc,)
    elif FIXED_SPLIT > 0:
        accs, m_i, l_i = attend_work_tile_in_splits(
            q, k_pipe, v_pipe, tile_i, rows, cols, work, slopes, scale, scoring, OF_SCORES, HEAD_DIM, HEAD_DIM_V,
            TOKENS, SCORE_MOD, FIXED_SPLIT,
        )  # fmt: skip
    elif is_capped(SCORE_MOD):
        accs, m_i, l_i = attend_capped_work_tile(
            q, k_pipe, v_pipe, tile_i, rows, cols, work, sight, scale, scoring, q_pipe, work_i, OF_SCORES,
            HEAD_DIM, HEAD_DIM_V, TOKENS, SCORE_MOD, EARLY, KV_BOX, PACKED,
        )  # fmt: skip
    elif AHEAD:
        accs, m_i, l_i = attend_work_tile_ahead(
            q, k_pipe, v_pipe, tile_i, rows, cols, work, sight, slopes, scale, scoring, q_pipe, work_i, OF_SCORES,
            HEAD_DIM, HEAD_DIM_V, TOKENS, SCORE_MOD, EARLY,
        )  # fmt: skip
    else:
        accs, m_i, l_i = attend_work_tile(
            q, k_pipe, v_pipe, tile_i, rows, cols, work, sight, slopes, scale, scoring, q_pipe, work_i, OF_SCORES,
            HEAD_DIM, HEAD_DIM_V, TOKENS, SCORE_MOD, EARLY, PACKED,
        )  # fmt: skip
    if scoring.key_begin is not None:  # not kept in registers meanwhile, which hold what rows see
        work = read_work_tile(published, stage, FIRST_TOKEN)
    if outputs.v_scale_ptr is not None:
        accs = scaled(accs, gl.load(outputs.v_scale_ptr + work.head // GROUP * stride_scale))
    if outputs.partials is None:
        finish(
            wg, accs, m_i, l_i, q_pipe, work_i, work, rows, outputs, HEAD_DIM_V, FIRST_ROW, TOKENS, OWNED,
            FIXED_SPLIT > 0, PARTS, EARLY,
        )  # fmt: skip
    else:
        if not EARLY:
            cut = read_cut(published, stage)
        if cut.shift == 0:
            finish(
                wg, accs, m_i, l_i, q_pipe, work_i, work, rows, outputs, HEAD_DIM_V, FIRST_ROW, TOKENS, OWNED, False,
                PARTS, EARLY,
            )  # fmt: skip
        else:
            if not EARLY:
                consumer_release(q_pipe, work_i)
            is_last = store_and_arrive(
                outputs.partials, outputs.arrivals, cut, work, wg, accs, m_i, l_i, HEAD_DIM_V, WARPGROUPS, FIRST_ROW,
                TOKENS, OWNED,
            )  # fmt: skip
            if is_last:
                combine_and_write(outputs, cut, work, wg, HEAD_DIM_V, WARPGROUPS, FIRST_ROW, TOKENS, HEADS)
    return tile_i + work.num_tiles


@gluon.jit
def pass_work_tile(q_pipe, k_pipe, v_pipe, work_i, tile_i, num_tiles, RELEASES: gl.constexpr):
    """Release what was loaded for a work tile as it arrives, and return what `consume_work_tile` does."""
    consumer_release(q_pipe, work_i)
    for i in range(tile_i, tile_i + num_tiles):
        consumer_wait(k_pipe, i)
        release_unread(k_pipe, i, RELEASES)
        consumer_wait(v_pipe, i)
        release_unread(v_pipe, i, RELEASES)
    return tile_i + num_tiles


@gluon.jit
def sight_of_rows(published, stage, work, rows, scoring, TOKENS: gl.constexpr, OWNED: gl.constexpr):
    """Return the intervals that the rows of a work tile see."""
    tokens = tokens_of_rows(work, rows, TOKENS, OWNED)
    begin, end = load_intervals(
        scoring.key_begin, scoring.key_end, work.q_start + tokens, tokens < work.q_len, work.seq_len
    )
    keys = read_range(published, stage)
    return Sight(begin, end - 1, keys.full_start, keys.full_stop)


@gluon.constexpr_function
def depth_of(element):
    """Return the columns of one tensor-core instruction for numbers of this type."""
    return 256 // element.primitive_bitwidth


@gluon.constexpr_function
def releases_of_warpgroup(score_mod, fp8_mma):
    """Return how many arrivals of a consumer warpgroup release a tile: one, or one of each thread."""
    return 1 if is_capped(score_mod) or fp8_mma else THREADS.value


@gluon.constexpr_function
def registers_of_two(gathers, more, columns_v):
    """Return the registers of a thread of the second consumer warpgroup and of the producer."""
    if gathers:
        return [232, 48] if columns_v > 192 else [216, 72]
    return [224, 56] if more else [232, 40]


@gluon.constexpr_function
def registers_of_three(gathers, fp8_mma, intervals, cuts_narrow):
    """Return the registers of a thread of the second consumer warpgroup, of the converter and of the producer."""
    if gathers:
        return [192, 72, 56] if fp8_mma else [208, 40, 56]
    if fp8_mma:
        return [200, 72, 40]
    if intervals:
        return [216, 40, 40]
    return [208, 40, 56] if cuts_narrow else [208, 56, 40]


@gluon.jit(
    do_not_specialize_on_alignment=["num_splits", "out_scale_ptr", "stride_lse"],
    do_not_specialize=["max_decode_queries", "num_seqs", "section", "stride_table", "window_left", "window_right"],
)
def hopper_kernel(
    out_ptr,  # [num_tokens, num_q_heads, PARTS * HEAD_DIM_V], or scratch for the states of splits
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or scratch for the states of splits, or None
    sinks_ptr,  # [num_q_heads], or None
    slopes_ptr,  # [num_q_heads], or None
    k_scale_ptr, v_scale_ptr,  # [num_kv_heads] of a quantised cache, or None
    k_source, v_source,  # TMA descriptors; where KV_BOX is 0, pointers to slot 0 of page 0
    q_desc,  # TMA descriptor of boxes of HEADS heads and their rows; its type says `runner.LEAST_ROWS`
    k_tile_desc, v_tile_desc,  # TMA descriptors of boxes of BLOCK_N rows, for tiles that lie in one page, or None
    kv,  # views.KVLayout
    cu_seqlens_q,  # [num_seqs + 1] int32
    tile_counter,  # [1] int32 of `queue.py`, 0 between launches
    partials, arrivals,  # float32 scratch and int32 counters, which are 0 between launches; None without CUT_SLOTS
    scale, softcap, window_left, window_right,
    max_decode_queries,  # sequences with at most this many queries belong to the decode launch; 0 if there is none
    num_seqs, num_splits,
    section,  # blocks of heads of which all work tiles come before those of other heads; None: there is one section
    stride_table, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    PAGE_SIZE: gl.constexpr, SCORE_MOD: gl.constexpr, WARPGROUPS: gl.constexpr, BLOCK_T: gl.constexpr,
    HEADS: gl.constexpr,  # of a work tile, with BLOCK_T rows each
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    QUANTISED_STAGES: gl.constexpr, FP8_MMA: gl.constexpr,
    KV_BOX: gl.constexpr,  # slots of a page in one TMA load; 0: the rows of tiles are gathered (`gather.py`)
    FIXED_SPLIT: gl.constexpr,  # keys of a split of a batch-invariant plan, a multiple of BLOCK_N; else 0
    STRIDE_UNIT: gl.constexpr,  # of `views.stride_unit`, for the strides of out
    PARTS: gl.constexpr,  # parts of the values' columns; a work tile has one of them, of HEAD_DIM_V columns
    CUT_SLOTS: gl.constexpr,  # slots for partials of row blocks that are cut by keys; 0: none is cut
    MIXED: gl.constexpr,  # decoding sequences may be among the prompts
    APART: gl.constexpr,  # each of two warpgroups has half of a row block's tokens, else half of the rows
    AHEAD: gl.constexpr,  # keys are multiplied ahead, if they are not gathered
    PIECES: gl.constexpr,  # products with values are those of `products.py`, as all are if BLOCK_N is no power of two
):  # fmt: skip
    gdc_wait()
    # The second launch may start when an SM has room for it: the decode launch, or the combine of splits, which waits.
    if (max_decode_queries > 0) | (num_splits > 1):
        gdc_launch_dependents()
    COLUMNS: gl.constexpr = (HEAD_DIM + 63) // 64 * 64
    COLUMNS_V: gl.constexpr = (HEAD_DIM_V + 63) // 64 * 64
    IN_PIECES: gl.constexpr = BLOCK_N & (BLOCK_N - 1) != 0  # scores
    V_IN_PIECES: gl.constexpr = PIECES or IN_PIECES
    if V_IN_PIECES:
        mark_shared_memory()
    q_pipe = make_pipeline(q_desc.dtype, WARPGROUPS * ROWS, COLUMNS, Q_STAGES, WARPGROUPS, 0, IN_PIECES)
    GATHERS: gl.constexpr = KV_BOX == 0
    STORED: gl.constexpr = k_source.dtype.element_ty if GATHERS else k_source.dtype
    NUMBER: gl.constexpr = STORED if QUANTISED_STAGES == 0 or FP8_MMA else gl.float16
    PRODUCER_WARPS: gl.constexpr = GATHER_WARPS if GATHERS else 1
    COPYING_WARPS: gl.constexpr = GATHER_WARPS if GATHERS else 0
    K_COPYING_WARPS: gl.constexpr = COPYING_WARPS if QUANTISED_STAGES == 0 or FP8_MMA else 0
    V_COPYING_WARPS: gl.constexpr = COPYING_WARPS if QUANTISED_STAGES == 0 else 0
    RELEASES: gl.constexpr = WARPGROUPS * releases_of_warpgroup(SCORE_MOD, FP8_MMA)
    k_pipe = make_pipeline(NUMBER, BLOCK_N, COLUMNS, STAGES, RELEASES, K_COPYING_WARPS, IN_PIECES, IN_PIECES)
    if FP8_MMA:
        v_pipe = make_pipeline(NUMBER, COLUMNS_V, BLOCK_N, STAGES, RELEASES)
    else:
        v_pipe = make_pipeline(NUMBER, BLOCK_N, COLUMNS_V, STAGES, RELEASES, V_COPYING_WARPS, V_IN_PIECES, V_IN_PIECES)
    published = gl.allocate_shared_memory(gl.int32, [Q_STAGES * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    INTERVALS: gl.constexpr = kv.key_begin is not None
    # Consumers can spare registers for the producer, unless they have two accumulators. One of intervals needs them.
    MORE_REGISTERS: gl.constexpr = INTERVALS or FIXED_SPLIT == 0
    places = published
    if not INTERVALS:  # of sequences in the order of work tiles
        PLACES: gl.constexpr = 4 if CUT_SLOTS > 0 else 2
        places = gl.allocate_shared_memory(gl.int32, [PLACES, SEQS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    scoring = Scoring(scale, k_scale_ptr, softcap, window_left, window_right, slopes_ptr, kv.key_begin, kv.key_end)
    stride_out_token, stride_out_head = in_units(stride_out_token, STRIDE_UNIT), in_units(stride_out_head, STRIDE_UNIT)
    outputs = Outputs(
        out_ptr,
        out_scale_ptr,
        lse_ptr,
        sinks_ptr,
        v_scale_ptr,
        stride_out_token,
        stride_out_head,
        stride_lse,
        num_splits,
        partials,
        arrivals,
    )
    batch = Batch(kv, cu_seqlens_q, num_seqs, max_decode_queries, window_left, window_right)
    # The argument lists are repeated, since constexprs in a tuple stay constexprs only if the tuple is written in the
    # call of `warp_specialize`.
    if WARPGROUPS == 1:
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (
                    0, q_pipe, k_pipe, v_pipe, published, scoring, outputs, kv.scale_head, GROUP, HEAD_DIM, HEAD_DIM_V,
                    BLOCK_T, HEADS, BLOCK_N, SCORE_MOD, FIXED_SPLIT, PARTS, KV_BOX, AHEAD and not GATHERS, APART)),
                (produce, (
                    q_pipe, k_pipe, v_pipe, published, places, q_desc, k_source, v_source, k_tile_desc, v_tile_desc,
                    batch, tile_counter, num_splits, section, stride_table, NUM_KV_HEADS, GROUP,
                    HEAD_DIM, HEAD_DIM_V, BLOCK_T, HEADS, BLOCK_N, PAGE_SIZE, KV_BOX, FIXED_SPLIT > 0, PARTS, CUT_SLOTS,
                    MIXED, APART, outputs.lse_ptr, stride_lse)),
            ],
            [PRODUCER_WARPS],
            [72 if GATHERS else 56],
        )  # fmt: skip
    elif QUANTISED_STAGES == 0:
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (
                    0, q_pipe, k_pipe, v_pipe, published, scoring, outputs, kv.scale_head, GROUP, HEAD_DIM, HEAD_DIM_V,
                    BLOCK_T, HEADS, BLOCK_N, SCORE_MOD, FIXED_SPLIT, PARTS, KV_BOX, AHEAD and not GATHERS, APART)),
                (consume, (
                    1, q_pipe, k_pipe, v_pipe, published, scoring, outputs, kv.scale_head, GROUP, HEAD_DIM, HEAD_DIM_V,
                    BLOCK_T, HEADS, BLOCK_N, SCORE_MOD, FIXED_SPLIT, PARTS, KV_BOX, AHEAD and not GATHERS, APART)),
                (produce, (
                    q_pipe, k_pipe, v_pipe, published, places, q_desc, k_source, v_source, k_tile_desc, v_tile_desc,
                    batch, tile_counter, num_splits, section, stride_table, NUM_KV_HEADS, GROUP,
                    HEAD_DIM, HEAD_DIM_V, BLOCK_T, HEADS, BLOCK_N, PAGE_SIZE, KV_BOX, FIXED_SPLIT > 0, PARTS, CUT_SLOTS,
                    MIXED, APART, outputs.lse_ptr, stride_lse)),
            ],
            [4, PRODUCER_WARPS],
            registers_of_two(GATHERS, MORE_REGISTERS, HEAD_DIM_V),
        )  # fmt: skip
    else:
        k_raw = k_pipe
        if not FP8_MMA:
            k_raw = make_pipeline(STORED, BLOCK_N, COLUMNS, QUANTISED_STAGES, 1, COPYING_WARPS)
        v_raw = make_pipeline(STORED, BLOCK_N, COLUMNS_V, QUANTISED_STAGES, 1, COPYING_WARPS)
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (
                    0, q_pipe, k_pipe, v_pipe, published, scoring, outputs, kv.scale_head, GROUP, HEAD_DIM, HEAD_DIM_V,
                    BLOCK_T, HEADS, BLOCK_N, SCORE_MOD, FIXED_SPLIT, PARTS, KV_BOX, AHEAD and not GATHERS, APART)),
                (consume, (
                    1, q_pipe, k_pipe, v_pipe, published, scoring, outputs, kv.scale_head, GROUP, HEAD_DIM, HEAD_DIM_V,
                    BLOCK_T, HEADS, BLOCK_N, SCORE_MOD, FIXED_SPLIT, PARTS, KV_BOX, AHEAD and not GATHERS, APART)),
                (convert, (k_raw, v_raw, k_pipe, v_pipe, q_pipe, published, window_left, window_right, INTERVALS)),
                (produce, (
                    q_pipe, k_raw, v_raw, published, places, q_desc, k_source, v_source, k_tile_desc, v_tile_desc,
                    batch, tile_counter, num_splits, section, stride_table, NUM_KV_HEADS, GROUP,
                    HEAD_DIM, HEAD_DIM_V, BLOCK_T, HEADS, BLOCK_N, PAGE_SIZE, KV_BOX, FIXED_SPLIT > 0, PARTS, CUT_SLOTS,
                    MIXED, APART, outputs.lse_ptr, stride_lse)),
            ],
            [4, 4, PRODUCER_WARPS],
            registers_of_three(GATHERS, FP8_MMA, INTERVALS, CUT_SLOTS > 0 and HEAD_DIM_V <= 192),
        )  # fmt: skip
