"""The consumers' loop of the Hopper kernel for soft-capped scores: a softmax without a running maximum.

A softcap bounds the exponents, to ±72 in base 2 with a cap of 50. bfloat16 and float32 hold 2^72 and 2^-72, so no
maximum is subtracted. There is none to find, accumulators are never rescaled, and rows are summed once, at the end. The
softmax of a tile does not need the product with the previous tile's values, and may overlap it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from quire.kernels.hopper.operands import (
    State,
    after,
    as_operands,
    empty_state,
    multiply_keys,
    multiply_values,
    no_scores,
    products_of,
)
from quire.kernels.hopper.products import wide
from quire.kernels.hopper.softcap import capped_exponents, limit_of_squares
from quire.kernels.hopper.softmax import apply_mask, total
from quire.kernels.states import log2


@gluon.jit
def probabilities(scores, pos, products, limit):
    """Return the probabilities of the tile that begins at position `pos`, relative to an exponent of 0."""
    exponents = capped_exponents(scores, products.scale, products.scoring.softcap, limit)
    exponents = apply_mask(exponents, pos, products, False, True)
    p = ()
    for i in gl.static_range(len(exponents)):
        p = p + (gl.exp2(exponents[i]),)
    return p


@gluon.jit
def sum_of_pieces(p):
    """Return the sum of a tile's pieces, number by number."""
    numbers = p[0]
    for i in gl.static_range(1, len(p)):
        numbers += p[i]
    return numbers


@gluon.jit
def sums_of_threads(p):
    """Return the sum of each thread's probabilities in a row, [M, 4]. A row of a piece belongs to four threads."""
    p = sum_of_pieces(p)
    for _ in gl.static_range(log2(p.shape[1] // 8)):
        p = gl.sum(p.reshape([p.shape[0], 2, p.shape[1] // 2]), 1)
    return gl.sum(p.reshape([p.shape[0], 4, 2]), 2)


@gluon.jit
def end_of_values(accs, p, v_pipe, i):
    """Wait for the product of probabilities and the i-th tile of values, and release that tile."""
    done = warpgroup_mma_wait(0, deps=accs + p)
    v_pipe.release(i)
    return done[: len(accs)], done[len(accs) :]


@gluon.jit
def attend_capped_work_tile(products, memory, config, PACKED: gl.constexpr):
    """Return what `attend_work_tile` does, for capped scores. PACKED: as in `rounded`."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    HEAD_DIM: gl.constexpr = config.HEAD_DIM
    HEAD_DIM_V: gl.constexpr = config.HEAD_DIM_V
    # A tile's softmax overlaps this warpgroup's product with the previous tile's values. Wide rows that are gathered
    # arrive slowly, and an overlap would free values later.
    OVERLAPS: gl.constexpr = config.KV_BOX > 0 or HEAD_DIM_V <= 192
    OF_SCORES: gl.constexpr = products.own.OF_SCORES
    q, num_tiles, tile_i = products.q, products.work.num_tiles, products.tile_i
    k_pipe, v_pipe = memory.k, memory.v
    own = products.own
    limit = limit_of_squares(products.scale, products.scoring.softcap, own.rows, own.OWNED)
    zeros = no_scores(own.cols, OF_SCORES)
    accs, _, _ = empty_state(OF_SCORES, v_pipe, HEAD_DIM_V)
    IN_FLIGHT: gl.constexpr = products_of(v_pipe.addresses, accs)  # with values
    pos = products.work.tile * BLOCK_N
    scores = multiply_keys(q, k_pipe, k_pipe.wait(tile_i), zeros, HEAD_DIM)
    scores = after(0, scores)
    k_pipe.release(tile_i)
    if config.EARLY and num_tiles == 1:
        memory.q.release(products.work_i)
    numbers = probabilities(scores, pos, products, limit)
    sums = sums_of_threads(numbers)
    p = as_operands(numbers, v_pipe, accs, PACKED)
    for i in range(tile_i + 1, tile_i + num_tiles):
        pos -= BLOCK_N
        scores = multiply_keys(q, k_pipe, k_pipe.wait(i), zeros, HEAD_DIM)
        accs = multiply_values(p, v_pipe, v_pipe.wait(i - 1), accs, HEAD_DIM_V)
        scores = after(IN_FLIGHT, scores)
        k_pipe.release(i)
        if config.EARLY and i == tile_i + num_tiles - 1:
            memory.q.release(products.work_i)
        if not OVERLAPS:
            accs, p = end_of_values(accs, p, v_pipe, i - 1)
        numbers = probabilities(scores, pos, products, limit)
        sums += sums_of_threads(numbers)
        if OVERLAPS:
            accs, p = end_of_values(accs, p, v_pipe, i - 1)
        p = as_operands(numbers, v_pipe, accs, PACKED)
    last = tile_i + num_tiles - 1
    accs = multiply_values(p, v_pipe, v_pipe.wait(last), accs, HEAD_DIM_V)
    l_i = gl.convert_layout(total(sums), gl.SliceLayout(1, OF_SCORES))
    accs, p = end_of_values(accs, p, v_pipe, last)
    return State(wide(accs, HEAD_DIM_V), gl.where(l_i == 0.0, float("-inf"), 0.0), l_i)
