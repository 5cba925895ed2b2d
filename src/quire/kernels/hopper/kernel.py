"""The Hopper kernel: prompts on Hopper GPUs, persistent and warp-specialised.

Grid: [min(num_work_tiles * num_splits, programs that the GPU holds at once)]. A program owns one work tile after the
other (`tile_scheduler.py`). Its producer warp loads queries, keys and values by TMA, page by page (`producer.py`). It
has two consumer warpgroups with 64 rows each. They take turns on the tensor cores: one computes its softmax while the
other computes products. For short contexts a program has one consumer warpgroup, and an SM holds two programs. For a
quantised cache a further warpgroup converts tiles between the producer and the consumers (`convert.py`).

This is the structure of FlashAttention-3 (arXiv 2407.08608, sections 3.1 and 3.2). Softmax and state are those of
`primitives.py`, written again in Gluon, where layouts are explicit.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.hopper.convert import convert, permute_for_fp8_operand, quantize_queries, to_fp8
from quire.kernels.hopper.gather import WARPS as GATHER_WARPS
from quire.kernels.hopper.pipeline import (
    columns_of,
    consumer_release,
    consumer_wait,
    make_pipeline,
    piece_of,
    pieces_of,
)
from quire.kernels.hopper.producer import produce
from quire.kernels.hopper.tile_scheduler import ROWS, WORDS, load_intervals, read_range, read_work_tile
from quire.kernels.primitives import LN2, LOG2E, groups_of, log2


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


class Outputs(NamedTuple):
    """The tensors of results and their strides, the sinks, and the value scales.

    The states of splits go to scratch, as float32 [num_tokens, num_q_heads, num_splits, ...].
    """

    out_ptr: Any
    lse_ptr: Any
    sinks_ptr: Any
    v_scale_ptr: Any  # [num_kv_heads] of a quantised cache, or None
    stride_out_token: Any
    stride_out_head: Any
    stride_lse: Any
    num_splits: Any


@gluon.jit
def consume(
    wg: gl.constexpr, q_pipe, k_pipe, v_pipe, published, scoring, outputs, stride_scale,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_T: gl.constexpr,
    SCORE_MOD: gl.constexpr, FIXED_SPLIT: gl.constexpr,
):  # fmt: skip
    """Attend to the loaded tiles, and write the results of each work tile. Each consumer warpgroup runs this."""
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[1]
    element: gl.constexpr = k_pipe.tiles.dtype
    FP8_MMA: gl.constexpr = element.primitive_bitwidth == 8
    DEPTH: gl.constexpr = 256 // element.primitive_bitwidth  # of one tensor-core instruction, in elements
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, DEPTH])
    rows = wg * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OF_SCORES))
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, OF_SCORES))

    work_i = 0
    tile_i = 0
    stage = consumer_wait(q_pipe, work_i)
    work = read_work_tile(published, stage)
    while work.q_len > 0:
        slopes = None
        if scoring.slopes_ptr is not None:
            slopes = gl.load(scoring.slopes_ptr + work.head + rows // BLOCK_T).to(gl.float32)
        sight = None
        if scoring.key_begin is not None:
            sight = sight_of_rows(published, stage, work, rows, scoring, BLOCK_T)
        scale = scoring.scale
        if scoring.k_scale_ptr is not None:
            scale *= gl.load(scoring.k_scale_ptr + work.head // GROUP * stride_scale)
        if element == q_pipe.tiles.dtype:
            q = ()
            for i in gl.static_range(len(pieces_of(HEAD_DIM, 16))):
                q = q + (queries_of(wg, q_pipe, stage, pieces_of(HEAD_DIM, 16)[i][0], pieces_of(HEAD_DIM, 16)[i][1]),)
        else:
            converted, inverse_scale = quantize_queries(
                q_pipe.tiles.index(stage), element, wg * ROWS, 7 if FP8_MMA else 14, OF_SCORES
            )
            q = (converted,)
            scale *= inverse_scale
        if FP8_MMA:
            acc, m_i, l_i = attend_work_tile_in_fp8(
                q[0], k_pipe, v_pipe, tile_i, rows, cols, work, sight, slopes, scale, scoring, OF_SCORES,
                layout_of_out(HEAD_DIM_V, DEPTH), BLOCK_T, SCORE_MOD,
            )  # fmt: skip
            accs = (acc,)
        elif FIXED_SPLIT > 0:
            accs, m_i, l_i = attend_work_tile_in_splits(
                q, k_pipe, v_pipe, tile_i, rows, cols, work, slopes, scale, scoring, OF_SCORES, HEAD_DIM, HEAD_DIM_V,
                BLOCK_T, SCORE_MOD, FIXED_SPLIT,
            )  # fmt: skip
        else:
            accs, m_i, l_i = attend_work_tile(
                q, k_pipe, v_pipe, tile_i, rows, cols, work, sight, slopes, scale, scoring, OF_SCORES, HEAD_DIM,
                HEAD_DIM_V, BLOCK_T, SCORE_MOD,
            )  # fmt: skip
        if scoring.key_begin is not None:  # not kept in registers meanwhile, which hold what rows see
            work = read_work_tile(published, stage)
        tile_i += work.num_tiles
        if outputs.v_scale_ptr is not None:
            accs = scaled(accs, gl.load(outputs.v_scale_ptr + work.head // GROUP * stride_scale))
        finish(wg, accs, m_i, l_i, q_pipe, work_i, work, rows, outputs, HEAD_DIM_V, BLOCK_T, FIXED_SPLIT > 0)
        work_i += 1
        stage = consumer_wait(q_pipe, work_i)
        work = read_work_tile(published, stage)


@gluon.jit
def sight_of_rows(published, stage, work, rows, scoring, BLOCK_T: gl.constexpr):
    """Return the intervals that the rows of a work tile see."""
    tokens = work.token + rows % BLOCK_T
    begin, end = load_intervals(
        scoring.key_begin, scoring.key_end, work.q_start + tokens, tokens < work.q_len, work.seq_len
    )
    keys = read_range(published, stage)
    return Sight(begin, end - 1, keys.full_start, keys.full_stop)


@gluon.constexpr_function
def layout_of_out(columns, depth):
    """Return the layout of an accumulator of the second product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, depth])


@gluon.jit
def queries_of(wg: gl.constexpr, q_pipe, stage, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Return COLUMNS columns of a warpgroup's queries in shared memory, from column FIRST on."""
    return piece_of(q_pipe, stage, FIRST, COLUMNS).slice(wg * ROWS, ROWS)


@gluon.jit
def scaled(accs, factor):
    """Multiply accumulators by a scalar, or by a factor per row."""
    results = ()
    for i in gl.static_range(len(accs)):
        by = factor
        if isinstance(factor, gl.tensor) and len(factor.shape) == 1:
            by = gl.convert_layout(factor, gl.SliceLayout(1, accs[i].type.layout))[:, None]
        results = results + (accs[i] * by,)
    return results


@gluon.jit
def empty_state(OF_SCORES: gl.constexpr, HEAD_DIM_V: gl.constexpr, DEPTH: gl.constexpr):
    """Return the state over no keys. There is an accumulator for each piece of the values' columns."""
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, OF_SCORES))
    l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, OF_SCORES))
    accs = ()
    for i in gl.static_range(len(pieces_of(HEAD_DIM_V, 64))):
        accs = accs + (empty_acc(pieces_of(HEAD_DIM_V, 64)[i][1], DEPTH),)
    return accs, m_i, l_i


@gluon.jit
def empty_acc(COLUMNS: gl.constexpr, DEPTH: gl.constexpr):
    """Return an accumulator of zeros."""
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout_of_out(COLUMNS, DEPTH))


@gluon.jit
def multiply_keys(q, k_pipe, stage, zeros, HEAD_DIM: gl.constexpr):
    """Begin the product of queries and a tile of keys."""
    scores = zeros
    for i in gl.static_range(len(q)):
        k = piece_of(k_pipe, stage, pieces_of(HEAD_DIM, 16)[i][0], pieces_of(HEAD_DIM, 16)[i][1])
        scores = warpgroup_mma(q[i], k.permute((1, 0)), scores, use_acc=i > 0, is_async=True)
    return scores


@gluon.jit
def multiply_values(p, v_pipe, stage, accs, HEAD_DIM_V: gl.constexpr):
    """Begin to add the product of probabilities and a tile of values to the accumulators."""
    results = ()
    for i in gl.static_range(len(accs)):
        v = piece_of(v_pipe, stage, pieces_of(HEAD_DIM_V, 64)[i][0], pieces_of(HEAD_DIM_V, 64)[i][1])
        operand = p
        if i > 0:  # the same registers
            operand = gl.convert_layout(p, gl.DotOperandLayout(0, accs[i].type.layout, 2))
        results = results + (warpgroup_mma(operand, v, accs[i], is_async=True),)
    return results


@gluon.jit
def attend_work_tile(
    q, k_pipe, v_pipe, tile_i, rows, cols, work, sight, slopes, scale, scoring,
    OF_SCORES: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_T: gl.constexpr,
    SCORE_MOD: gl.constexpr,
):  # fmt: skip
    """Return the state of a work tile's rows over its KV tiles, from the last tile to the first.

    The first tile that is used is the tile_i-th of the pipelines.
    """
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[1]
    NUM_ACCS: gl.constexpr = len(pieces_of(HEAD_DIM_V, 64))
    element: gl.constexpr = k_pipe.tiles.dtype
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, OF_SCORES)
    accs, m_i, l_i = empty_state(OF_SCORES, HEAD_DIM_V, 16)
    OF_P: gl.constexpr = gl.DotOperandLayout(0, accs[0].type.layout, 2)
    pos = work.tile * BLOCK_N
    scores = multiply_keys(q, k_pipe, consumer_wait(k_pipe, tile_i), zeros, HEAD_DIM)
    scores = warpgroup_mma_wait(0, deps=[scores])
    consumer_release(k_pipe, tile_i)
    p, m_i, l_i, _ = softmax_step(
        scores, m_i, l_i, pos, rows, cols, work, sight, slopes, scale, scoring, 0.0, BLOCK_T, SCORE_MOD
    )
    p = gl.convert_layout(p.to(element), OF_P)
    for i in range(tile_i + 1, tile_i + work.num_tiles):
        pos -= BLOCK_N
        scores = multiply_keys(q, k_pipe, consumer_wait(k_pipe, i), zeros, HEAD_DIM)
        accs = multiply_values(p, v_pipe, consumer_wait(v_pipe, i - 1), accs, HEAD_DIM_V)
        scores = warpgroup_mma_wait(NUM_ACCS, deps=[scores])
        consumer_release(k_pipe, i)
        # The other warpgroup's softmax overlaps these two products. Overlapping the second product with the softmax of
        # this warpgroup was slower (NVIDIA H200).
        done = warpgroup_mma_wait(0, deps=accs + (p,))
        accs, p = done[:NUM_ACCS], done[NUM_ACCS]
        consumer_release(v_pipe, i - 1)
        p, m_i, l_i, alpha = softmax_step(
            scores, m_i, l_i, pos, rows, cols, work, sight, slopes, scale, scoring, 0.0, BLOCK_T, SCORE_MOD
        )
        accs = scaled(accs, alpha)
        p = gl.convert_layout(p.to(element), OF_P)
    last = tile_i + work.num_tiles - 1
    accs = multiply_values(p, v_pipe, consumer_wait(v_pipe, last), accs, HEAD_DIM_V)
    done = warpgroup_mma_wait(0, deps=accs + (p,))
    consumer_release(v_pipe, last)
    return done[:NUM_ACCS], m_i, l_i


@gluon.jit
def attend_work_tile_in_splits(
    q, k_pipe, v_pipe, tile_i, rows, cols, work, slopes, scale, scoring,
    OF_SCORES: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_T: gl.constexpr,
    SCORE_MOD: gl.constexpr, FIXED_SPLIT: gl.constexpr,
):  # fmt: skip
    """Return the same as `attend_work_tile`, from the first tile to the last, rounded as batch-invariant plans do.

    Each split of FIXED_SPLIT keys has a state, and the result is the left fold of these, as in the portable kernels.
    """
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[1]
    NUM_ACCS: gl.constexpr = len(pieces_of(HEAD_DIM_V, 64))
    element: gl.constexpr = k_pipe.tiles.dtype
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, OF_SCORES)
    accs, m_i, l_i = empty_state(OF_SCORES, HEAD_DIM_V, 16)
    OF_P: gl.constexpr = gl.DotOperandLayout(0, accs[0].type.layout, 2)
    split_accs, split_m, no_sums = accs, m_i, sums_of_groups(zeros, groups_of(BLOCK_N))
    pos = work.tile * BLOCK_N
    scores = multiply_keys(q, k_pipe, consumer_wait(k_pipe, tile_i), zeros, HEAD_DIM)
    scores = warpgroup_mma_wait(0, deps=[scores])
    consumer_release(k_pipe, tile_i)
    p, split_m, split_l, _ = softmax_step(
        scores, split_m, no_sums, pos, rows, cols, work, None, slopes, scale, scoring, 0.0, BLOCK_T, SCORE_MOD
    )
    p = gl.convert_layout(p.to(element), OF_P)
    for i in range(tile_i + 1, tile_i + work.num_tiles):
        pos += BLOCK_N
        scores = multiply_keys(q, k_pipe, consumer_wait(k_pipe, i), zeros, HEAD_DIM)
        split_accs = multiply_values(p, v_pipe, consumer_wait(v_pipe, i - 1), split_accs, HEAD_DIM_V)
        scores = warpgroup_mma_wait(NUM_ACCS, deps=[scores])
        consumer_release(k_pipe, i)
        done = warpgroup_mma_wait(0, deps=split_accs + (p,))
        split_accs, p = done[:NUM_ACCS], done[NUM_ACCS]
        consumer_release(v_pipe, i - 1)
        if pos % FIXED_SPLIT == 0:
            accs, m_i, l_i = fold_split(accs, m_i, l_i, split_accs, split_m, split_l)
            split_accs, split_m, _ = empty_state(OF_SCORES, HEAD_DIM_V, 16)
            split_l = no_sums
        p, split_m, split_l, alpha = softmax_step(
            scores, split_m, split_l, pos, rows, cols, work, None, slopes, scale, scoring, 0.0, BLOCK_T, SCORE_MOD
        )
        split_accs = scaled(split_accs, alpha)
        p = gl.convert_layout(p.to(element), OF_P)
    last = tile_i + work.num_tiles - 1
    split_accs = multiply_values(p, v_pipe, consumer_wait(v_pipe, last), split_accs, HEAD_DIM_V)
    done = warpgroup_mma_wait(0, deps=split_accs + (p,))
    consumer_release(v_pipe, last)
    return fold_split(accs, m_i, l_i, done[:NUM_ACCS], split_m, split_l)


@gluon.jit
def fold_split(accs, m_i, l_i, split_accs, split_m, split_l):
    """Add the state of a split to the state of those before it, as `primitives.fold_split` does."""
    m_new = gl.maximum(m_i, split_m)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = gl.exp2(m_i - shift), gl.exp2(split_m - shift)
    results = ()
    for i in gl.static_range(len(accs)):
        LAYOUT: gl.constexpr = gl.SliceLayout(1, accs[i].type.layout)
        by, other_by = gl.convert_layout(alpha, LAYOUT)[:, None], gl.convert_layout(beta, LAYOUT)[:, None]
        results = results + (gl.fma(accs[i], by + gl.zeros_like(accs[i]), split_accs[i] * other_by),)
    split_total = gl.convert_layout(total(split_l), l_i.type.layout)
    return results, m_new, gl.fma(l_i, alpha, split_total * beta)


@gluon.jit
def sums_of_groups(p, SUMS: gl.constexpr):
    """Return sums over groups of the columns of p [M, N], as `primitives.sums_of_groups` does."""
    for _ in gl.static_range(log2(p.shape[1] // (8 * SUMS))):
        p = gl.sum(p.reshape([p.shape[0], 2, p.shape[1] // 2]), 1)
    for _ in gl.static_range(3):
        p = gl.sum(p.reshape([p.shape[0], p.shape[1] // 2, 2]), 2)
    return p


@gluon.jit
def total(sums):
    """Return the sum of each row's sums, as `primitives.total` does."""
    for _ in gl.static_range(log2(sums.shape[1])):
        sums = gl.sum(sums.reshape([sums.shape[0], sums.shape[1] // 2, 2]), 2)
    return sums.reshape([sums.shape[0]])


@gluon.jit
def attend_work_tile_in_fp8(
    q, k_pipe, v_pipe, tile_i, rows, cols, work, sight, slopes, scale, scoring,
    OF_SCORES: gl.constexpr, OF_OUT: gl.constexpr, BLOCK_T: gl.constexpr, SCORE_MOD: gl.constexpr,
):  # fmt: skip
    """Return the same as `attend_work_tile`, with fp8 products of the stored keys and the transposed values.

    Tensor cores accumulate fp8 products with about 14 bits, so the products of each tile are added to acc in float32.
    Products take little time compared with the softmax, and registers cannot hold three accumulators. So the two
    products of a warpgroup run one after the other, and overlap the other warpgroup's softmax.
    """
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[1]
    OF_P: gl.constexpr = gl.DotOperandLayout(0, OF_OUT, 4)
    LIFT: gl.constexpr = 8.0  # probabilities are scaled by 2^8, so that small ones keep their bits
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, OF_SCORES)
    empty, m_i, l_i = empty_state(OF_SCORES, k_pipe.tiles.shape[2], 32)
    no_out = empty[0]
    acc = no_out
    pos = work.tile * BLOCK_N
    for i in range(tile_i, tile_i + work.num_tiles):
        k = k_pipe.tiles.index(consumer_wait(k_pipe, i))
        scores = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        consumer_release(k_pipe, i)
        p, m_i, l_i, alpha = softmax_step(
            scores, m_i, l_i, pos, rows, cols, work, sight, slopes, scale, scoring, LIFT, BLOCK_T, SCORE_MOD
        )
        p = gl.convert_layout(to_fp8(permute_for_fp8_operand(p)), OF_P)
        v = v_pipe.tiles.index(consumer_wait(v_pipe, i))
        product = warpgroup_mma(p, v.permute((1, 0)), no_out, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        consumer_release(v_pipe, i)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OF_OUT))[:, None] + product
        pos -= BLOCK_N
    return acc, m_i - LIFT, l_i


@gluon.jit
def softmax_step(
    scores, m_i, l_i, pos, rows, cols, work, sight, slopes, scale, scoring,
    LIFT: gl.constexpr, BLOCK_T: gl.constexpr, SCORE_MOD: gl.constexpr,
):  # fmt: skip
    """Fold the scores of the tile that begins at position `pos` into the running maximum and sum.

    Returns:
        p: the probabilities, times 2^LIFT.
        m_i, l_i: the new maximum and sum.
        alpha: the factor for acc.
    """
    low_pos = work.first_pos + work.token
    high_pos = work.first_pos + gl.minimum(work.token + BLOCK_T, work.q_len) - 1
    q_pos = low_pos + rows % BLOCK_T
    exponent_scale = scale * LOG2E
    if SCORE_MOD is not None:
        exponent_scale = LOG2E
        scores = SCORE_MOD(scores * by_row(scale), q_pos, pos + cols, slopes, scoring.softcap)
    if sight is None:
        is_past_right = pos + scores.shape[1] > gl.minimum(low_pos + scoring.window_right + 1, work.seq_len)
        is_partial = is_past_right | (pos < high_pos - scoring.window_left)
    else:
        is_partial = (pos + scores.shape[1] > sight.full_stop) | (pos < sight.full_start)
    if is_partial:  # else every row sees every key of the tile
        if sight is None:
            first_col = q_pos - scoring.window_left - pos
            last_col = gl.minimum(q_pos + scoring.window_right, work.seq_len - 1) - pos
        else:
            first_col, last_col = sight.first - pos, sight.last - pos
        visible = (cols[None, :] >= first_col[:, None]) & (cols[None, :] <= last_col[:, None])
        scores = gl.where(visible, scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * exponent_scale)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key: -inf - -inf is NaN
    p = gl.exp2(scores * by_row(exponent_scale) - (shift - LIFT)[:, None])
    alpha = gl.exp2(m_i - shift)
    if len(l_i.shape) == 1:
        l_i = l_i * alpha + gl.sum(p, 1)
    else:
        by = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None]
        l_i = gl.fma(l_i, by + gl.zeros_like(l_i), sums_of_groups(p, l_i.shape[1]))
    return p, m_new, l_i, alpha


@gluon.jit
def by_row(factor):
    """Return a factor per row as a column; return a scalar factor unchanged."""
    if isinstance(factor, gl.tensor) and len(factor.shape) == 1:
        factor = factor[:, None]
    return factor


@gluon.jit
def finish(
    wg: gl.constexpr, accs, m_i, l_i, q_pipe, work_i, work, rows, outputs, HEAD_DIM_V: gl.constexpr,
    BLOCK_T: gl.constexpr, INVARIANT: gl.constexpr,
):  # fmt: skip
    """Normalise a work tile's results and write them.

    Results are staged in the shared memory of the work tile's queries, if that is wide enough, and it is then released.
    States of splits are written from registers.
    """
    element: gl.constexpr = q_pipe.tiles.dtype
    IS_SPLIT: gl.constexpr = outputs.out_ptr.dtype.element_ty != element
    STAGED: gl.constexpr = not IS_SPLIT and columns_of(q_pipe.tiles, q_pipe.more) >= HEAD_DIM_V
    IN_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if outputs.sinks_ptr is not None:  # one more key, of score sink[h] and value 0
        if work.split == 0:
            sink = gl.load(outputs.sinks_ptr + work.head + rows // BLOCK_T).to(gl.float32) * LOG2E
            m_new = gl.maximum(m_i, sink)
            alpha = gl.exp2(m_i - m_new)
            accs = scaled(accs, alpha)
            l_i = l_i * alpha + gl.exp2(sink - m_new)
            m_i = m_new
    empty = l_i == 0.0
    safe = gl.where(empty, 1.0, l_i)
    if outputs.lse_ptr is not None:
        tokens = work.token + rows % BLOCK_T
        lse = gl.where(empty, float("-inf"), m_i * LN2 + gl.log(safe))
        offsets = (work.q_start + tokens).to(gl.int64) * outputs.stride_lse
        offsets += (work.head + rows // BLOCK_T) * outputs.num_splits + work.split
        gl.store(outputs.lse_ptr + offsets, lse, mask=tokens < work.q_len)
    inverse = 1.0 / safe
    if INVARIANT:  # as `primitives.finish` does
        inverse = gl.fma(inverse, gl.fma(-safe, inverse, gl.zeros_like(safe) + 1.0), inverse)
    results = scaled(accs, inverse)
    if STAGED:
        stage = work_i % q_pipe.empty.shape[0]
        loaded = ()
        for i in gl.static_range(len(accs)):
            staged = queries_of(wg, q_pipe, stage, pieces_of(HEAD_DIM_V, 64)[i][0], pieces_of(HEAD_DIM_V, 64)[i][1])
            staged.store(results[i].to(element))
            loaded = loaded + (staged.load(IN_ROWS),)
        results = loaded
        fence_async_shared()
    consumer_release(q_pipe, work_i)
    for i in gl.static_range(len(accs)):
        write_out(wg, results[i], work, outputs, pieces_of(HEAD_DIM_V, 64)[i][0], HEAD_DIM_V, BLOCK_T)


@gluon.jit
def write_out(
    wg: gl.constexpr, result, work, outputs, FIRST: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_T: gl.constexpr
):
    """Write a work tile's results for the columns from FIRST on."""
    LAYOUT: gl.constexpr = result.type.layout
    out_rows = wg * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    tokens = work.token + out_rows % BLOCK_T
    offsets = (work.q_start + tokens).to(gl.int64) * outputs.stride_out_token
    offsets += (work.head + out_rows // BLOCK_T).to(gl.int64) * outputs.stride_out_head
    offsets += work.split * HEAD_DIM_V
    offs_d = FIRST + gl.arange(0, result.shape[1], gl.SliceLayout(0, LAYOUT))
    inside = (tokens < work.q_len)[:, None] & (offs_d < HEAD_DIM_V)[None, :]
    gl.store(
        outputs.out_ptr + offsets[:, None] + offs_d[None, :], result.to(outputs.out_ptr.dtype.element_ty), mask=inside
    )


@gluon.jit(
    do_not_specialize_on_alignment=["num_splits", "stride_lse"],
    do_not_specialize=["max_decode_queries", "num_seqs", "section", "stride_table", "window_left", "window_right"],
)
def hopper_kernel(
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM], or scratch for the states of splits
    lse_ptr,  # [num_tokens, num_q_heads] float32, or scratch for the states of splits, or None
    sinks_ptr,  # [num_q_heads], or None
    slopes_ptr,  # [num_q_heads], or None
    k_scale_ptr, v_scale_ptr,  # [num_kv_heads] of a quantised cache, or None
    k_source, v_source,  # TMA descriptors; where KV_BOX is 0, pointers to slot 0 of page 0
    q_desc,  # TMA descriptor
    kv,  # views.KVLayout
    cu_seqlens_q,  # [num_seqs + 1] int32
    tile_counter,  # [1] int32, 0 between launches
    scale, softcap, window_left, window_right,
    max_decode_queries,  # sequences with at most this many queries belong to the decode launch; 0 if there is none
    num_seqs, num_splits,
    section,  # blocks of heads of which all work tiles come before those of other heads; None: there is one section
    stride_table, stride_q_head, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    PAGE_SIZE: gl.constexpr, SCORE_MOD: gl.constexpr, WARPGROUPS: gl.constexpr, BLOCK_T: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    QUANTISED_STAGES: gl.constexpr, FP8_MMA: gl.constexpr,
    KV_BOX: gl.constexpr,  # slots of a page in one TMA load; 0: the rows of tiles are gathered (`gather.py`)
    Q_BOX: gl.constexpr,
    FIXED_SPLIT: gl.constexpr,  # keys of a split of a batch-invariant plan, a multiple of BLOCK_N; else 0
):  # fmt: skip
    gdc_wait()
    # The second launch may start when an SM has room for it: the decode launch, or the combine of splits, which waits.
    if (max_decode_queries > 0) | (num_splits > 1):
        gdc_launch_dependents()
    COLUMNS: gl.constexpr = (HEAD_DIM + 63) // 64 * 64
    COLUMNS_V: gl.constexpr = (HEAD_DIM_V + 63) // 64 * 64
    q_pipe = make_pipeline(q_desc.dtype, WARPGROUPS * ROWS, COLUMNS, Q_STAGES, WARPGROUPS)
    GATHERS: gl.constexpr = KV_BOX == 0
    STORED: gl.constexpr = k_source.dtype.element_ty if GATHERS else k_source.dtype
    NUMBER: gl.constexpr = STORED if QUANTISED_STAGES == 0 or FP8_MMA else gl.float16
    PRODUCER_WARPS: gl.constexpr = GATHER_WARPS if GATHERS else 1
    k_pipe = make_pipeline(NUMBER, BLOCK_N, COLUMNS, STAGES, WARPGROUPS)
    if FP8_MMA:
        v_pipe = make_pipeline(NUMBER, COLUMNS_V, BLOCK_N, STAGES, WARPGROUPS)
    else:
        v_pipe = make_pipeline(NUMBER, BLOCK_N, COLUMNS_V, STAGES, WARPGROUPS)
    published = gl.allocate_shared_memory(gl.int32, [Q_STAGES * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    INTERVALS: gl.constexpr = kv.key_begin is not None
    scoring = Scoring(scale, k_scale_ptr, softcap, window_left, window_right, slopes_ptr, kv.key_begin, kv.key_end)
    outputs = Outputs(
        out_ptr, lse_ptr, sinks_ptr, v_scale_ptr, stride_out_token, stride_out_head, stride_lse, num_splits
    )
    # The argument lists are repeated, since constexprs in a tuple stay constexprs only if the tuple is written in the
    # call of `warp_specialize`.
    if WARPGROUPS == 1:
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (
                    0, q_pipe, k_pipe, v_pipe, published, scoring, outputs, kv.scale_head, GROUP, HEAD_DIM, HEAD_DIM_V,
                    BLOCK_T, SCORE_MOD, FIXED_SPLIT)),
                (produce, (
                    q_pipe, k_pipe, v_pipe, published, q_desc, k_source, v_source, kv, cu_seqlens_q, tile_counter,
                    max_decode_queries, num_seqs, num_splits, section, window_left, window_right, stride_table,
                    stride_q_head, NUM_KV_HEADS, GROUP, HEAD_DIM, HEAD_DIM_V, BLOCK_T, PAGE_SIZE, Q_BOX, KV_BOX,
                    FIXED_SPLIT > 0)),
            ],
            [PRODUCER_WARPS],
            [72 if GATHERS else 56 if INTERVALS else 40],
        )  # fmt: skip
    elif QUANTISED_STAGES == 0:
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (
                    0, q_pipe, k_pipe, v_pipe, published, scoring, outputs, kv.scale_head, GROUP, HEAD_DIM, HEAD_DIM_V,
                    BLOCK_T, SCORE_MOD, FIXED_SPLIT)),
                (consume, (
                    1, q_pipe, k_pipe, v_pipe, published, scoring, outputs, kv.scale_head, GROUP, HEAD_DIM, HEAD_DIM_V,
                    BLOCK_T, SCORE_MOD, FIXED_SPLIT)),
                (produce, (
                    q_pipe, k_pipe, v_pipe, published, q_desc, k_source, v_source, kv, cu_seqlens_q, tile_counter,
                    max_decode_queries, num_seqs, num_splits, section, window_left, window_right, stride_table,
                    stride_q_head, NUM_KV_HEADS, GROUP, HEAD_DIM, HEAD_DIM_V, BLOCK_T, PAGE_SIZE, Q_BOX, KV_BOX,
                    FIXED_SPLIT > 0)),
            ],
            [4, PRODUCER_WARPS],
            # Registers per thread of the second and the third function. A producer that loads intervals needs more.
            [216, 72] if GATHERS else [224, 56] if INTERVALS else [232, 40],
        )  # fmt: skip
    else:
        k_raw = k_pipe
        if not FP8_MMA:
            k_raw = make_pipeline(STORED, BLOCK_N, COLUMNS, QUANTISED_STAGES, 1)
        v_raw = make_pipeline(STORED, BLOCK_N, COLUMNS_V, QUANTISED_STAGES, 1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (
                    0, q_pipe, k_pipe, v_pipe, published, scoring, outputs, kv.scale_head, GROUP, HEAD_DIM, HEAD_DIM_V,
                    BLOCK_T, SCORE_MOD, FIXED_SPLIT)),
                (consume, (
                    1, q_pipe, k_pipe, v_pipe, published, scoring, outputs, kv.scale_head, GROUP, HEAD_DIM, HEAD_DIM_V,
                    BLOCK_T, SCORE_MOD, FIXED_SPLIT)),
                (convert, (k_raw, v_raw, k_pipe, v_pipe, q_pipe, published, window_left, window_right, INTERVALS)),
                (produce, (
                    q_pipe, k_raw, v_raw, published, q_desc, k_source, v_source, kv, cu_seqlens_q, tile_counter,
                    max_decode_queries, num_seqs, num_splits, section, window_left, window_right, stride_table,
                    stride_q_head, NUM_KV_HEADS, GROUP, HEAD_DIM, HEAD_DIM_V, BLOCK_T, PAGE_SIZE, Q_BOX, KV_BOX,
                    FIXED_SPLIT > 0)),
            ],
            [4, 4, PRODUCER_WARPS],
            ([192, 72, 56] if FP8_MMA else [208, 40, 56])
            if GATHERS
            else ([200, 72, 40] if FP8_MMA else [216, 40, 40] if INTERVALS else [208, 56, 40]),
        )  # fmt: skip
