"""The consumers' loop of the Hopper kernel that multiplies the next keys during the softmax.

So the tensor cores have work of a warpgroup while it computes exponentials. Two tiles of scores are in registers.

ptxas waits for products where code branches. So masks and waits for tiles, which branch, come before the product of the
next keys. From there to the end of a tile, the code does not branch.

`HopperLaunch.multiplies_ahead` says where this is faster than `attend_work_tile`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from quire.kernels.hopper.attend import first_scores
from quire.kernels.hopper.operands import as_operands, empty_state, keys_of, multiply_keys, multiply_values, no_scores
from quire.kernels.hopper.pipeline import consumer_release, consumer_wait, release_operand
from quire.kernels.hopper.products import wide
from quire.kernels.hopper.rescale import scaled
from quire.kernels.hopper.softcap import is_softcap, maximum_with_cap
from quire.kernels.hopper.softmax import new_maximum, probabilities, softmax_step


@gluon.jit
def attend_work_tile_ahead(
    q, k_pipe, v_pipe, tile_i, rows, cols, work, sight, slopes, scale, scoring, q_pipe, work_i,
    OF_SCORES: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, TOKENS: gl.constexpr,
    SCORE_MOD: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Return what `attend_work_tile` does."""
    BLOCK_N: gl.constexpr = keys_of(cols)
    zeros = no_scores(cols, OF_SCORES)
    accs, m_i, l_i = empty_state(OF_SCORES, v_pipe, HEAD_DIM_V)
    NUM_ACCS: gl.constexpr = len(accs)
    pos = work.tile * BLOCK_N
    last = tile_i + work.num_tiles - 1
    scores = first_scores(q, k_pipe, tile_i, zeros, work, q_pipe, work_i, HEAD_DIM, EARLY)
    for i in range(tile_i, last):
        scores, exponent_scale, m_i, shift, alpha = new_maximum(
            scores, m_i, pos, rows, cols, work, sight, slopes, scale, scoring, TOKENS, SCORE_MOD
        )
        k_stage = consumer_wait(k_pipe, i + 1)
        v_stage = consumer_wait(v_pipe, i)
        next_scores = multiply_keys(q, k_pipe, k_stage, zeros, HEAD_DIM)
        accs = scaled(accs, alpha)
        p, l_i = probabilities(scores, l_i, exponent_scale, shift, alpha, 0.0)
        p = as_operands(p, v_pipe, accs)
        accs = multiply_values(p, v_pipe, v_stage, accs, HEAD_DIM_V)
        done = warpgroup_mma_wait(0, deps=next_scores + accs + p)
        scores, accs = done[: len(cols)], done[len(cols) : len(cols) + NUM_ACCS]
        release_operand(k_pipe, i + 1)
        release_operand(v_pipe, i)
        if EARLY and i == last - 1:
            consumer_release(q_pipe, work_i)
        pos -= BLOCK_N
    p, m_i, l_i, alpha = softmax_step(
        scores, m_i, l_i, pos, rows, cols, work, sight, slopes, scale, scoring, 0.0, TOKENS, SCORE_MOD
    )
    p = as_operands(p, v_pipe, accs)
    accs = multiply_values(p, v_pipe, consumer_wait(v_pipe, last), scaled(accs, alpha), HEAD_DIM_V)
    done = warpgroup_mma_wait(0, deps=accs + p)
    release_operand(v_pipe, last)
    if is_softcap(SCORE_MOD):
        m_i = maximum_with_cap(m_i, scoring.softcap)
    return wide(done[:NUM_ACCS], HEAD_DIM_V), m_i, l_i
