"""The consumers' loops of the Hopper kernel: products and softmax of the KV tiles of a work tile.

Three are here: with one state over all tiles, with a state for each split of a batch-invariant plan, and with products
in fp8. `capped.py` has the one for scores with a softcap.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from quire.kernels.gluon.fp8 import permute_for_fp8_operand, to_fp8
from quire.kernels.gluon.pipeline import wait_for_both
from quire.kernels.hopper.lazy_max import first_softmax, maximum_and_sum, next_softmax
from quire.kernels.hopper.operands import (
    State,
    after,
    as_operands,
    depth_of,
    empty_state,
    layout_of_out,
    multiply_keys,
    multiply_values,
    no_scores,
    operands_of,
    products_of,
)
from quire.kernels.hopper.products import wide
from quire.kernels.hopper.softcap import is_softcap, maximum_with_cap
from quire.kernels.hopper.softmax import (
    copy_runs,
    masked_scores,
    scaled,
    softmax_step,
    sums_of_groups,
    total,
    with_scale,
)
from quire.kernels.hopper.work_tile import ROWS
from quire.kernels.states import groups_of

# Columns of values up to which it is faster to wait for the next keys while products run (NVIDIA H100, 2026-11-25): in
# `attend_work_tile`, and with states of splits.
NEXT_KEYS_UP_TO = gl.constexpr(64)
NEXT_KEYS_OF_SPLITS_UP_TO = gl.constexpr(128)


@gluon.jit
def first_scores(products, memory, zeros, config):
    """Return the product of queries and the first tile of keys, and release what no later product needs."""
    tile_i = products.tile_i
    scores = multiply_keys(products.q, memory.k, memory.k.wait(tile_i), zeros, config.HEAD_DIM)
    scores = after(0, scores)
    memory.k.release_operand(tile_i)
    if config.EARLY and products.work.num_tiles == 1:
        memory.q.release(products.work_i)
    return scores


@gluon.jit
def attend_work_tile(products, memory, config):
    """Return the State of a work tile's rows over its KV tiles, from the last tile to the first."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    HEAD_DIM_V: gl.constexpr = config.HEAD_DIM_V
    own, work, tile_i = products.own, products.work, products.tile_i
    k_pipe, v_pipe = memory.k, memory.v
    # The next keys are waited for while products run. Otherwise keys and values are waited for together, if they are
    # copied, and else values after the product of keys has begun. ptxas (CUDA 12.8) fails with a segmentation fault on
    # the first for tiles that are copied and products in pieces.
    NEXT_KEYS: gl.constexpr = HEAD_DIM_V <= NEXT_KEYS_UP_TO and not (v_pipe.COPIED and len(v_pipe.addresses) > 0)
    TOGETHER: gl.constexpr = v_pipe.COPIED and not NEXT_KEYS
    # Narrow heads leave registers for all columns: 4,096 tokens of 64/8 heads of 64 take 306 us in halves, and 300 in
    # whole tiles (NVIDIA H100, 2026-11-28).
    IN_HALVES: gl.constexpr = HEAD_DIM > 64
    if own.OWNED is not None:  # whatever rows without queries hold, their maxima stay
        scale = gl.where(own.rows < own.OWNED, products.scale, 0.0)
        products = with_scale(products, scale)
    zeros = no_scores(own.cols, own.OF_SCORES)
    accs, _, _ = empty_state(own.OF_SCORES, v_pipe, HEAD_DIM_V)
    NUM_ACCS: gl.constexpr = len(accs)
    IN_FLIGHT: gl.constexpr = products_of(v_pipe.addresses, accs)  # with values
    pos = work.tile * BLOCK_N
    copy_runs(pos, products, config)
    scores = first_scores(products, memory, zeros, config)
    scores, by, more = masked_scores(scores, pos, products, config, IN_HALVES)
    p, state = first_softmax(scores, by, more, v_pipe.tiles.dtype)
    stop = tile_i + work.num_tiles
    k_stage, v_stage = tile_i, tile_i
    if NEXT_KEYS:
        k_stage = k_pipe.wait(tile_i + 1, work.num_tiles > 1)
    for i in range(tile_i + 1, stop):
        pos -= BLOCK_N
        if TOGETHER:
            k_stage, v_stage = wait_for_both(k_pipe, i, v_pipe, i - 1)
        elif not NEXT_KEYS:
            k_stage = k_pipe.wait(i)
        scores = multiply_keys(products.q, k_pipe, k_stage, zeros, HEAD_DIM)
        if not TOGETHER:
            v_stage = v_pipe.wait(i - 1)
        operands = operands_of(p, v_pipe, accs, BLOCK_N)
        accs = multiply_values(operands, v_pipe, v_stage, accs, HEAD_DIM_V)
        if NEXT_KEYS:
            k_stage = k_pipe.wait_without_fence(i + 1, i + 1 < stop)
        copy_runs(pos, products, config)
        scores = after(IN_FLIGHT, scores)
        if NEXT_KEYS:
            k_pipe.fence_copies()
        k_pipe.release_operand(i)
        if config.EARLY and i == stop - 1:
            memory.q.release(products.work_i)
        # The other warpgroup's softmax overlaps these two products. Overlapping the second product with the softmax of
        # this warpgroup was slower (NVIDIA H200).
        done = warpgroup_mma_wait(0, deps=accs + operands)
        accs = done[:NUM_ACCS]
        v_pipe.release_operand(i - 1)
        scores, by, more = masked_scores(scores, pos, products, config, IN_HALVES)
        p, accs, state = next_softmax(scores, accs, state, by, more, v_pipe.tiles.dtype)
    operands = operands_of(p, v_pipe, accs, BLOCK_N)
    accs = multiply_values(operands, v_pipe, v_pipe.wait(stop - 1), accs, HEAD_DIM_V)
    done = warpgroup_mma_wait(0, deps=accs + operands)
    v_pipe.release_operand(stop - 1)
    m_i, l_i = maximum_and_sum(state, own.OF_SCORES)
    if is_softcap(config.SCORE_MOD):
        m_i = maximum_with_cap(m_i, products.scoring.softcap)
    return State(wide(done[:NUM_ACCS], HEAD_DIM_V), m_i, l_i)


@gluon.jit
def attend_work_tile_in_splits(products, memory, config):
    """Return the same as `attend_work_tile`, from the first tile to the last, rounded as batch-invariant plans do.

    Each split of FIXED_SPLIT keys has a state, and the result is the left fold of these, as in the portable kernels.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    HEAD_DIM_V: gl.constexpr = config.HEAD_DIM_V
    OF_SCORES: gl.constexpr = products.own.OF_SCORES
    NEXT_KEYS: gl.constexpr = HEAD_DIM_V <= NEXT_KEYS_OF_SPLITS_UP_TO
    q, work, tile_i = products.q, products.work, products.tile_i
    k_pipe, v_pipe = memory.k, memory.v
    zeros = no_scores(products.own.cols, OF_SCORES)
    accs, m_i, l_i = empty_state(OF_SCORES, v_pipe, HEAD_DIM_V)
    NUM_ACCS: gl.constexpr = len(accs)
    IN_FLIGHT: gl.constexpr = products_of(v_pipe.addresses, accs)  # with values
    split_accs, split_m, no_sums = accs, m_i, sums_of_groups(zeros[0], groups_of(BLOCK_N))
    pos = work.tile * BLOCK_N
    scores = multiply_keys(q, k_pipe, k_pipe.wait(tile_i), zeros, HEAD_DIM)
    scores = after(0, scores)
    k_pipe.release_operand(tile_i)
    p, split_m, split_l, _ = softmax_step(scores, split_m, no_sums, pos, products, config, 0.0)
    p = as_operands(p, v_pipe, accs)
    stop = tile_i + work.num_tiles
    k_stage = tile_i
    if NEXT_KEYS:
        k_stage = k_pipe.wait(tile_i + 1, work.num_tiles > 1)
    for i in range(tile_i + 1, stop):
        pos += BLOCK_N
        if not NEXT_KEYS:
            k_stage = k_pipe.wait(i)
        scores = multiply_keys(q, k_pipe, k_stage, zeros, HEAD_DIM)
        split_accs = multiply_values(p, v_pipe, v_pipe.wait(i - 1), split_accs, HEAD_DIM_V)
        if NEXT_KEYS:
            k_stage = k_pipe.wait(i + 1, i + 1 < stop)
        scores = after(IN_FLIGHT, scores)
        k_pipe.release_operand(i)
        done = warpgroup_mma_wait(0, deps=split_accs + p)
        split_accs, p = done[:NUM_ACCS], done[NUM_ACCS:]
        v_pipe.release_operand(i - 1)
        if pos % config.FIXED_SPLIT == 0:
            accs, m_i, l_i = fold_split(accs, m_i, l_i, split_accs, split_m, split_l)
            split_accs, split_m, _ = empty_state(OF_SCORES, v_pipe, HEAD_DIM_V)
            split_l = no_sums
        p, split_m, split_l, alpha = softmax_step(scores, split_m, split_l, pos, products, config, 0.0)
        split_accs = scaled(split_accs, alpha)
        p = as_operands(p, v_pipe, accs)
    split_accs = multiply_values(p, v_pipe, v_pipe.wait(stop - 1), split_accs, HEAD_DIM_V)
    done = warpgroup_mma_wait(0, deps=split_accs + p)
    v_pipe.release_operand(stop - 1)
    accs, m_i, l_i = fold_split(accs, m_i, l_i, done[:NUM_ACCS], split_m, split_l)
    return State(wide(accs, HEAD_DIM_V), m_i, l_i)


@gluon.jit
def fold_split(accs, m_i, l_i, split_accs, split_m, split_l):
    """Add the state of a split to the state of those before it, as `states.fold_split` does."""
    m_new = gl.maximum(m_i, split_m)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = gl.exp2(m_i - shift), gl.exp2(split_m - shift)
    results = ()
    for i in gl.static_range(len(accs)):
        results = results + (fold_acc(accs[i], alpha, split_accs[i], beta),)
    split_total = gl.convert_layout(total(split_l), l_i.type.layout)
    return results, m_new, gl.fma(l_i, alpha, split_total * beta)


@gluon.jit
def fold_acc(acc, alpha, split_acc, beta):
    """Return one accumulator of `fold_split`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    by, other_by = gl.convert_layout(alpha, LAYOUT)[:, None], gl.convert_layout(beta, LAYOUT)[:, None]
    return gl.fma(acc, by + gl.zeros_like(acc), split_acc * other_by)


@gluon.jit
def attend_work_tile_in_fp8(products, memory, config):
    """Return the same as `attend_work_tile`, with fp8 products of the stored keys and the transposed values.

    Tensor cores accumulate fp8 products with about 14 bits, so the products of each tile are added to acc in float32.
    Products take little time compared with the softmax, and registers cannot hold three accumulators. So the two
    products of a warpgroup run one after the other, and overlap the other warpgroup's softmax.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    OF_SCORES: gl.constexpr = products.own.OF_SCORES
    OF_OUT: gl.constexpr = layout_of_out(config.HEAD_DIM_V, depth_of(memory.k.tiles.dtype))
    OF_P: gl.constexpr = gl.DotOperandLayout(0, OF_OUT, 4)
    LIFT: gl.constexpr = 8.0  # probabilities are scaled by 2^8, so that small ones keep their bits
    work, tile_i = products.work, products.tile_i
    k_pipe, v_pipe = memory.k, memory.v
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, OF_SCORES)
    empty, m_i, l_i = empty_state(OF_SCORES, v_pipe, k_pipe.COLUMNS)
    no_out = empty[0]
    acc = no_out
    pos = work.tile * BLOCK_N
    for i in range(tile_i, tile_i + work.num_tiles):
        k = k_pipe.tiles.index(k_pipe.wait(i))
        scores = warpgroup_mma(products.q[0], k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        k_pipe.release(i)
        p, m_i, l_i, alpha = softmax_step((scores,), m_i, l_i, pos, products, config, LIFT)
        p = gl.convert_layout(to_fp8(permute_for_fp8_operand(p[0])), OF_P)
        v = v_pipe.tiles.index(v_pipe.wait(i))
        product = warpgroup_mma(p, v.permute((1, 0)), no_out, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        v_pipe.release(i)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OF_OUT))[:, None] + product
        pos -= BLOCK_N
    m_i -= LIFT
    if is_softcap(config.SCORE_MOD):
        m_i = maximum_with_cap(m_i, products.scoring.softcap)
    return State((acc,), m_i, l_i)
