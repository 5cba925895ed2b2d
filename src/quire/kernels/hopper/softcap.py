"""A softcap of scores, in as few instructions as it takes.

`cap * tanh(s / cap)` is `cap - 2 cap / (exp(2 s / cap) + 1)`. The constant `cap` moves all scores of a row alike, so it
is added to the row's maximum once, after the loop over tiles. The factor `2 cap` is that of the softmax's exponents.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.states import LOG2E


@gluon.constexpr_function
def is_softcap(score_mod):
    """Return whether a score mod is the one of this file."""
    return score_mod is softcap


@gluon.jit
def softcap(scores, scale, cap):
    """Return `-1 / (exp(2 scale scores / cap) + 1)`. The capped scores are cap + 2 cap times that.

    Args:
        scores: [M, N] products.
        scale: a scalar or a column.
        cap: a scalar.
    """
    numbers = -1.0 - gl.exp2(scores * (scale * (2 * LOG2E / cap)))
    # A division would care for numbers below 2^-126, and these are at least 1.
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [numbers], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def maximum_with_cap(m_i, cap):
    """Return the running maximum of capped scores, times log2(e), from that of 2 cap times what `softcap` returns."""
    return m_i + cap * LOG2E
