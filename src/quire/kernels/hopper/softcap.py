"""A softcap of scores, four at a time, since special functions bound the softmax where scores are capped.

`cap * tanh(s / cap)` is `cap - 2 cap / (exp(2 s / cap) + 1)`. The constant `cap` moves all scores of a row alike, so it
is added to the row's maximum once, after the loop over tiles. What remains for each score is an exponential and a
reciprocal. With the exponential of the softmax, these are three special functions, and an SM computes 16 in a cycle. So
four reciprocals come from one, of the product of the four numbers.
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

    A NaN makes the other scores of its group NaN too. A group has four keys of one row.

    Args:
        scores: [M, N] products, in the accumulator layout. A thread has adjacent columns c and c + 1 of two rows, then
            columns c + 8 and c + 9.
        scale: a scalar or a column.
        cap: a scalar.
    """
    # Where exp2(x) is 2^30, tanh is 1 in float32. So the product of four such numbers is at most 2^120.
    four: gl.constexpr = """{ .reg .f32 a<8>, ab, cd, r;
        min.NaN.f32 a0, $8, 0f41F00000; min.NaN.f32 a1, $9, 0f41F00000; min.NaN.f32 a2, $10, 0f41F00000;
        min.NaN.f32 a3, $11, 0f41F00000; min.NaN.f32 a4, $12, 0f41F00000; min.NaN.f32 a5, $13, 0f41F00000;
        min.NaN.f32 a6, $14, 0f41F00000; min.NaN.f32 a7, $15, 0f41F00000;
        ex2.approx.ftz.f32 a0, a0; ex2.approx.ftz.f32 a1, a1; ex2.approx.ftz.f32 a2, a2; ex2.approx.ftz.f32 a3, a3;
        ex2.approx.ftz.f32 a4, a4; ex2.approx.ftz.f32 a5, a5; ex2.approx.ftz.f32 a6, a6; ex2.approx.ftz.f32 a7, a7;
        add.f32 a0, a0, 0f3F800000; add.f32 a1, a1, 0f3F800000; add.f32 a2, a2, 0f3F800000; add.f32 a3, a3, 0f3F800000;
        add.f32 a4, a4, 0f3F800000; add.f32 a5, a5, 0f3F800000; add.f32 a6, a6, 0f3F800000; add.f32 a7, a7, 0f3F800000;
        mul.f32 ab, a0, a1; mul.f32 cd, a4, a5; mul.f32 r, ab, cd; neg.f32 r, r; rcp.approx.ftz.f32 r, r;
        mul.f32 cd, r, cd; mul.f32 ab, r, ab;
        mul.f32 $0, cd, a1; mul.f32 $1, cd, a0; mul.f32 $4, ab, a5; mul.f32 $5, ab, a4;
        mul.f32 ab, a2, a3; mul.f32 cd, a6, a7; mul.f32 r, ab, cd; neg.f32 r, r; rcp.approx.ftz.f32 r, r;
        mul.f32 cd, r, cd; mul.f32 ab, r, ab;
        mul.f32 $2, cd, a3; mul.f32 $3, cd, a2; mul.f32 $6, ab, a7; mul.f32 $7, ab, a6; }"""
    registers: gl.constexpr = "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f"
    exponents = scores * (scale * (2 * LOG2E / cap))
    return gl.inline_asm_elementwise(four, registers, [exponents], dtype=gl.float32, is_pure=True, pack=8)


@gluon.jit
def maximum_with_cap(m_i, cap):
    """Return the running maximum of capped scores, times log2(e), from that of 2 cap times what `softcap` returns."""
    return m_i + cap * LOG2E
