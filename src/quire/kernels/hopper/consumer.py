"""A consumer warpgroup takes one work tile after the other, attends to the tiles that are loaded for it, and writes.

The loops over tiles are in `attend.py` and `capped.py`. `results.py` normalises and writes; where the keys
of a row block are cut, `partials.py` does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.pipeline import pieces_of, wait_ready
from quire.kernels.hopper.attend import attend_work_tile, attend_work_tile_in_fp8, attend_work_tile_in_splits
from quire.kernels.hopper.capped import attend_capped_work_tile
from quire.kernels.hopper.config import rows_of_warpgroup
from quire.kernels.hopper.convert import quantize_queries
from quire.kernels.hopper.operands import State, queries_of
from quire.kernels.hopper.partials import combine_and_write, store_and_arrive
from quire.kernels.hopper.products import addresses_of_queries
from quire.kernels.hopper.results import finish
from quire.kernels.hopper.runs import rows_of_runs
from quire.kernels.hopper.softcap import is_capped
from quire.kernels.hopper.softmax import Products, Sight, arguments_of_rows, scaled
from quire.kernels.hopper.work_tile import (
    ROWS,
    publish_poison,
    read_cut,
    read_poison,
    read_range,
    read_seq,
    read_work_tile,
)
from quire.kernels.schedule import load_intervals


@gluon.jit
def consume(WG: gl.constexpr, memory, planned, scoring, outputs, config):
    """Attend to work tiles until there are none left. Each consumer warpgroup runs this."""
    publish_poison(memory.published, WG, planned, config.Q_STAGES)  # while the first tiles are loaded
    own = rows_of_warpgroup(WG, memory, config)
    work_i = 0
    tile_i = 0
    wait_ready(memory.ready)
    stage = memory.q.wait(work_i)
    work = read_work_tile(memory.published, stage, own.FIRST_TOKEN)
    while work.q_len > 0:
        is_idle = False
        if config.SPLIT_BY_TOKENS and WG == 1:
            is_idle = work.token >= work.q_len
        if is_idle:
            tile_i = pass_work_tile(memory, work_i, tile_i, work.num_tiles, config)
        else:
            tile_i = consume_work_tile(own, memory, work, stage, work_i, tile_i, scoring, outputs, config)
        work_i += 1
        stage = memory.q.wait(work_i)
        work = read_work_tile(memory.published, stage, own.FIRST_TOKEN)


@gluon.jit
def consume_work_tile(own, memory, work, stage, work_i, tile_i, scoring, outputs, config):
    """Attend to the tiles of the work_i-th work tile, from the tile_i-th on, and write the results.

    Return how many tiles there were so far.
    """
    products = begin_work_tile(own, memory, work, stage, work_i, tile_i, scoring, outputs, config)
    cut = ()
    if config.EARLY and config.CUT_SLOTS > 0:  # the next work tile replaces it once queries are released
        cut = read_cut(memory.published, stage)
    if memory.k.tiles.dtype.primitive_bitwidth == 8:
        state = attend_work_tile_in_fp8(products, memory, config)
    elif config.FIXED_SPLIT > 0:
        state = attend_work_tile_in_splits(products, memory, config)
    elif is_capped(config.SCORE_MOD):
        # ptxas would swap the halves of rounded pairs in the first of two warpgroups, and in both where row blocks are
        # cut or values have 65 to 127 columns. There an instruction rounds pairs; elsewhere that is slower.
        BOTH: gl.constexpr = config.CUT_SLOTS > 0 or (config.HEAD_DIM_V > 64 and config.HEAD_DIM_V < 128)
        PACKED: gl.constexpr = config.WARPGROUPS == 2 and (BOTH or own.WG == 0) and scoring.k_scale_ptr is None
        state = attend_capped_work_tile(products, memory, config, PACKED)
    else:
        state = attend_work_tile(products, memory, config)
    if config.INTERVALS or outputs.out_scale_ptr is not None:  # registers are scarce in the loop
        work, own = read_work_tile(memory.published, stage, own.FIRST_TOKEN), own.computed_here()
    state = State(state.accs, state.m_i, state.l_i + read_poison(memory.published, own.WG, config.Q_STAGES))
    if outputs.v_scale_ptr is not None:
        v_scale = gl.load(outputs.v_scale_ptr + work.head // config.GROUP * outputs.stride_scale)
        state = State(scaled(state.accs, v_scale), state.m_i, state.l_i)
    if config.CUT_SLOTS == 0:
        finish(state, own, memory, work, work_i, outputs, config)
    else:
        if not config.EARLY:
            cut = read_cut(memory.published, stage)
        if cut.shift == 0:
            finish(state, own, memory, work, work_i, outputs, config)
        else:
            if not config.EARLY:
                memory.q.release(work_i)
            if store_and_arrive(state, own, work, cut, outputs, config):
                combine_and_write(own, work, cut, outputs, config)
    return tile_i + work.num_tiles


@gluon.jit
def begin_work_tile(own, memory, work, stage, work_i, tile_i, scoring, outputs, config):
    """Return the work tile's Products, with its queries as operands."""
    element: gl.constexpr = memory.k.tiles.dtype
    # Queries of narrow heads: 0.987 to 1.003 of the time in 13 cases (NVIDIA H200, 2026-11-26).
    IN_REGISTERS: gl.constexpr = (config.HEAD_DIM <= 64 and config.WARPGROUPS == 2) and (
        config.FIXED_SPLIT == 0 and not is_capped(config.SCORE_MOD)
    )
    slopes = None
    if scoring.slopes_ptr is not None:
        slopes = own.load_of_heads(scoring.slopes_ptr + work.head)
    sight = None
    if config.INTERVALS:
        sight = sight_of_rows(memory.published, stage, work, own, scoring)
    seq, of_rows, run_rows = None, None, None
    if config.RUNS is not None:
        run_rows = rows_of_runs(memory.runs, own.WG, config.BLOCK_N)
    if config.FUNCTION is not None:
        seq = read_seq(memory.published, stage)
        q_pos, q_head, token = arguments_of_rows(own, work, config)
        kv_head = work.head // config.GROUP
        of_rows = config.FUNCTION(
            None, q_pos, None, None, None, q_head, kv_head, seq, token, scoring.extras, None, None, False, ()
        )
    scale = scoring.scale
    if scoring.k_scale_ptr is not None:
        scale *= gl.load(scoring.k_scale_ptr + work.head // config.GROUP * outputs.stride_scale)
    if len(memory.q.addresses) > 0:
        q = addresses_of_queries(own.WG, memory.q, stage)
    elif element == memory.q.tiles.dtype:
        q = ()
        PIECES: gl.constexpr = pieces_of(config.HEAD_DIM, 16)
        for i in gl.static_range(len(PIECES)):
            piece = queries_of(own.WG, memory.q, stage, PIECES[i][0], PIECES[i][1])
            if IN_REGISTERS:
                piece = piece.load(gl.DotOperandLayout(0, own.OF_SCORES, 2))
            q = q + (piece,)
    else:
        PEAK: gl.constexpr = 7 if element.primitive_bitwidth == 8 else 14  # of e4m3, or of float16
        converted, inverse_scale = quantize_queries(
            memory.q.tiles.index(stage), element, own.WG * ROWS, PEAK, own.OF_SCORES
        )
        q = (converted,)
        scale *= inverse_scale
    return Products(q, work, own, scoring, scale, slopes, sight, seq, of_rows, run_rows, work_i, tile_i)


@gluon.jit
def pass_work_tile(memory, work_i, tile_i, num_tiles, config):
    """Release what was loaded for a work tile as it arrives, and return what `consume_work_tile` does."""
    memory.q.release(work_i)
    for i in range(tile_i, tile_i + num_tiles):
        memory.k.wait(i)
        memory.k.release_unread(i, config.RELEASES)
        memory.v.wait(i)
        memory.v.release_unread(i, config.RELEASES)
    return tile_i + num_tiles


@gluon.jit
def sight_of_rows(published, stage, work, own, scoring):
    """Return the intervals that the rows of a work tile see."""
    tokens = own.tokens_of(work, own.rows)
    begin, end = load_intervals(scoring, work.q_start + tokens, tokens < work.q_len, work.seq_len)
    keys = read_range(published, stage)
    return Sight(begin, end - 1, keys.full_start, keys.full_stop)
