"""A consumer warpgroup takes one work tile after the other, attends to the tiles that are loaded for it, and writes.

The loops over tiles are in `attend.py` and `capped.py`. `results.py` normalises and writes; where the keys
of a row block are cut, `partials.py` does.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.attend import attend_work_tile, attend_work_tile_in_fp8, attend_work_tile_in_splits
from quire.kernels.hopper.capped import attend_capped_work_tile
from quire.kernels.hopper.convert import quantize_queries
from quire.kernels.hopper.operands import columns_of_scores, keys_of, layout_of_out, layout_of_scores, queries_of
from quire.kernels.hopper.partials import combine_and_write, store_and_arrive
from quire.kernels.hopper.pipeline import THREADS, consumer_release, consumer_wait, pieces_of, release_unread
from quire.kernels.hopper.products import addresses_of_queries
from quire.kernels.hopper.results import computed_here, finish, load_of_heads, tokens_of_rows
from quire.kernels.hopper.softcap import is_capped
from quire.kernels.hopper.softmax import scaled
from quire.kernels.hopper.work_tile import ROWS, load_intervals, read_cut, read_range, read_work_tile


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
    KV_BOX: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Attend to work tiles until there are none left. Each consumer warpgroup runs this.

    With APART, each warpgroup has half of a row block's tokens, from FIRST_TOKEN on. Of a decoding sequence, the second
    one has none. Otherwise they share tokens, and this one has the rows of the work tile from FIRST_ROW on.
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
                FIXED_SPLIT, PARTS, KV_BOX,
            )  # fmt: skip
        work_i += 1
        stage = consumer_wait(q_pipe, work_i)
        work = read_work_tile(published, stage, FIRST_TOKEN)


@gluon.jit
def consume_work_tile(
    wg: gl.constexpr, q_pipe, k_pipe, v_pipe, published, scoring, outputs, stride_scale, work, stage, work_i, tile_i,
    rows, cols, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, FIRST_TOKEN: gl.constexpr,
    FIRST_ROW: gl.constexpr, TOKENS: gl.constexpr, OWNED: gl.constexpr, HEADS: gl.constexpr, SCORE_MOD: gl.constexpr,
    FIXED_SPLIT: gl.constexpr, PARTS: gl.constexpr, KV_BOX: gl.constexpr,
):  # fmt: skip
    """Attend to the tiles of the work_i-th work tile, from the tile_i-th on, and write the results.

    Return how many tiles there were so far. The constants are those of `consume`.
    """
    WARPGROUPS: gl.constexpr = q_pipe.tiles.shape[1] // ROWS
    element: gl.constexpr = k_pipe.tiles.dtype
    FP8_MMA: gl.constexpr = element.primitive_bitwidth == 8
    OF_SCORES: gl.constexpr = layout_of_scores(keys_of(cols), depth_of(element))
    # The only buffer of queries is released after the last product, so that the next queries arrive while results are
    # written. Otherwise results are staged there, or the work tile is read once more after the loop. With the widest
    # heads, there is no other shared memory left, through which threads would exchange results.
    EARLY: gl.constexpr = (q_pipe.tiles.shape[0] == 1 and element.primitive_bitwidth == 16 and FIXED_SPLIT == 0) and (
        scoring.key_begin is None and outputs.out_scale_ptr is None and HEAD_DIM <= 256
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
    else:
        if OWNED is not None:  # whatever rows without queries hold, their maxima stay
            scale = gl.where(rows < OWNED, scale, 0.0)
        accs, m_i, l_i = attend_work_tile(
            q, k_pipe, v_pipe, tile_i, rows, cols, work, sight, slopes, scale, scoring, q_pipe, work_i, OF_SCORES,
            HEAD_DIM, HEAD_DIM_V, TOKENS, SCORE_MOD, EARLY,
        )  # fmt: skip
    if scoring.key_begin is not None or outputs.out_scale_ptr is not None:  # registers are scarce in the loop
        work, rows = read_work_tile(published, stage, FIRST_TOKEN), computed_here(rows)
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
                combine_and_write(outputs, cut, work, wg, HEAD_DIM_V, WARPGROUPS, FIRST_ROW, TOKENS, HEADS, PARTS)
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
