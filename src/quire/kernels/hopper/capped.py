"""The consumers' loop of the Hopper kernel for soft-capped scores: a softmax without a running maximum.

A softcap bounds the exponents, to ±72 in base 2 with a cap of 50. bfloat16 and float32 hold 2^72 and 2^-72, so no
maximum is subtracted. There is none to find, accumulators are never rescaled, and rows are summed once, at the end. The
softmax of a tile does not need the product with the previous tile's values, and may overlap it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from quire.kernels.hopper.operands import (
    after,
    as_operands,
    empty_state,
    keys_of,
    multiply_keys,
    multiply_values,
    no_scores,
    products_of,
)
from quire.kernels.hopper.pipeline import consumer_release, consumer_wait
from quire.kernels.hopper.products import wide
from quire.kernels.hopper.softmax import by_row, hide_unseen, total
from quire.kernels.states import log2


@gluon.jit
def probabilities(scores, pos, rows, cols, work, sight, scale, scoring, TOKENS: gl.constexpr, SCORE_MOD: gl.constexpr):
    """Return the probabilities of the tile that begins at position `pos`, relative to an exponent of 0."""
    exponents = hide_unseen(
        SCORE_MOD(scores, by_row(scale), scoring.softcap), pos, rows, cols, work, sight, scoring, TOKENS, False
    )
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
    consumer_release(v_pipe, i)
    return done[: len(accs)], done[len(accs) :]


@gluon.jit
def attend_capped_work_tile(
    q, k_pipe, v_pipe, tile_i, rows, cols, work, sight, scale, scoring, q_pipe, work_i,
    OF_SCORES: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, TOKENS: gl.constexpr,
    SCORE_MOD: gl.constexpr, EARLY: gl.constexpr, KV_BOX: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Return what `attend_work_tile` does, for capped scores.

    A tile's softmax overlaps this warpgroup's product with the previous tile's values, unless wide rows are gathered.
    They arrive slowly, and an overlap frees values later.
    """
    BLOCK_N: gl.constexpr = keys_of(cols)
    OVERLAPS: gl.constexpr = KV_BOX > 0 or HEAD_DIM_V <= 192
    zeros = no_scores(cols, OF_SCORES)
    accs, _, _ = empty_state(OF_SCORES, v_pipe, HEAD_DIM_V)
    IN_FLIGHT: gl.constexpr = products_of(v_pipe.addresses, accs)  # with values
    pos = work.tile * BLOCK_N
    scores = multiply_keys(q, k_pipe, consumer_wait(k_pipe, tile_i), zeros, HEAD_DIM)
    scores = after(0, scores)
    consumer_release(k_pipe, tile_i)
    if EARLY and work.num_tiles == 1:
        consumer_release(q_pipe, work_i)
    numbers = probabilities(scores, pos, rows, cols, work, sight, scale, scoring, TOKENS, SCORE_MOD)
    sums = sums_of_threads(numbers)
    p = as_operands(numbers, v_pipe, accs, PACKED)
    for i in range(tile_i + 1, tile_i + work.num_tiles):
        pos -= BLOCK_N
        scores = multiply_keys(q, k_pipe, consumer_wait(k_pipe, i), zeros, HEAD_DIM)
        accs = multiply_values(p, v_pipe, consumer_wait(v_pipe, i - 1), accs, HEAD_DIM_V)
        scores = after(IN_FLIGHT, scores)
        consumer_release(k_pipe, i)
        if EARLY and i == tile_i + work.num_tiles - 1:
            consumer_release(q_pipe, work_i)
        if not OVERLAPS:
            accs, p = end_of_values(accs, p, v_pipe, i - 1)
        numbers = probabilities(scores, pos, rows, cols, work, sight, scale, scoring, TOKENS, SCORE_MOD)
        sums += sums_of_threads(numbers)
        if OVERLAPS:
            accs, p = end_of_values(accs, p, v_pipe, i - 1)
        p = as_operands(numbers, v_pipe, accs, PACKED)
    last = tile_i + work.num_tiles - 1
    accs = multiply_values(p, v_pipe, consumer_wait(v_pipe, last), accs, HEAD_DIM_V)
    l_i = gl.convert_layout(total(sums), gl.SliceLayout(1, OF_SCORES))
    accs, p = end_of_values(accs, p, v_pipe, last)
    return wide(accs, HEAD_DIM_V), gl.where(l_i == 0.0, float("-inf"), 0.0), l_i
