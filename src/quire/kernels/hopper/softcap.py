"""Softcaps, in as few instructions as they take: `cap * tanh(x)`, where x is a scaled score divided by the cap.

`softcap` is `cap - 2 cap / (exp(2 x) + 1)`. The constant `cap` moves all scores of a row alike, so it is added to the
row's maximum once, after the loop over tiles. The factor `2 cap` is that of the softmax's exponents.

`capped_exponents` is for the loop that needs no maximum (`capped.py`). It is

* a polynomial where abs(x) is at most SMALL;
* elsewhere the formula above, with two special functions, of which an SM computes 16 in a cycle.

A warp whose scores in a tile are all small skips the second form. That changes no bit.
"""

import os
import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.products import float32_each
from quire.kernels.states import LOG2E

SMALL = 0.285  # the largest abs(x) of the polynomial
# Of x, x^3 and x^5 in tanh(x): a minimax fit for abs(x) <= SMALL, with an error of at most 1.2e-7. A lse has room for
# ten times that at most, so a larger SMALL needs a fourth coefficient.
COEFFICIENTS = (0.9999970458644307, -0.33303948268577604, 0.1259831465500068)
if os.environ.get("QV_P4"):
    SMALL, COEFFICIENTS = 0.43, (0.99999926, -0.33327892, 0.13224981, -0.04583346)


def in_ptx(number):
    """Return a number as PTX writes a float32."""
    return "0f" + struct.pack(">f", number).hex().upper()


GROUP = gl.constexpr(int(os.environ.get("QV_GROUP", "16")))  # scores of a thread

# PTX, in which X stands for a score, ROW for the first or second row of a thread, FACTOR for what makes x of the row's
# scores, CAP for cap * log2(e), CHAIN for one of four independent maxima: two of the first row, two of the second, and
# GROUP for some of the scores.
REGISTERS = (
    ".reg .pred small, small<64>; .reg .f32 a, b, cap, twice, square, power, limit<2>, factor<2>, largest<4>; "
    ".reg .f32 c0_<2>, c1_<2>, c2_<2>, c3_<2>;"
)
OF_A_ROW = (
    f"mov.f32 cap, CAP; mul.f32 twice, cap, {in_ptx(-2.0)}; mul.f32 factorROW, FACTOR, {in_ptx(2 * LOG2E.value)}; "
    f"abs.f32 a, FACTOR; rcp.approx.ftz.f32 a, a; mul.f32 limitROW, a, {in_ptx(SMALL)}; "
    "mul.f32 square, FACTOR, FACTOR; mul.f32 power, FACTOR, cap; "
) + " ".join(f"mul.f32 c{i}_ROW, power, {in_ptx(c)}; mul.f32 power, power, square;" for i, c in enumerate(COEFFICIENTS))
NO_MAXIMA = " ".join(f"mov.f32 largest{i}, {in_ptx(0.0)};" for i in range(4))
MAXIMA = "abs.f32 a, X; max.f32 largestCHAIN, largestCHAIN, a;"
ALL_ARE_SMALL = (
    "max.f32 largest0, largest0, largest1; max.f32 largest2, largest2, largest3; setp.le.f32 small, largest0, limit0; "
    "setp.le.and.f32 small, largest2, limit1, small;"
)
POLYNOMIAL = "mul.f32 a, X, X; fma.rn.f32 b, a, c2_ROW, c1_ROW; fma.rn.f32 b, a, b, c0_ROW; mul.f32 b, X, b;"
if len(COEFFICIENTS) == 4:
    POLYNOMIAL = (
        "mul.f32 a, X, X; fma.rn.f32 b, a, c3_ROW, c2_ROW; fma.rn.f32 b, a, b, c1_ROW; fma.rn.f32 b, a, b, c0_ROW; "
        "mul.f32 b, X, b;"
    )
BY_POLYNOMIAL = f"{POLYNOMIAL} mov.f32 X, b;"
BY_EITHER = (  # a division would care for numbers below 2^-126, and these are at least 1
    f"{POLYNOMIAL} abs.f32 a, X; setp.le.f32 small, a, limitROW; mul.f32 a, X, factorROW; ex2.approx.ftz.f32 a, a; "
    f"add.f32 a, a, {in_ptx(1.0)}; rcp.approx.ftz.f32 a, a; fma.rn.f32 a, a, twice, cap; selp.f32 X, b, a, small;"
)


@gluon.constexpr_function
def is_capped(score_mod):
    """Return whether a score mod is `capped_exponents`."""
    return score_mod is capped_exponents


@gluon.constexpr_function
def for_rows(numbers, each, text):
    """Return PTX for both rows of a thread. Scores alternate between them by twos, and so do the factors."""
    text = text.replace("CAP", f"${2 * numbers + each}")
    return " ".join([text.replace("FACTOR", f"${2 * (numbers + row)}").replace("ROW", f"{row}") for row in range(2)])


@gluon.constexpr_function
def for_scores(some, text):
    """Return PTX for some of a thread's scores."""
    in_turn = [text.replace("X", f"${i}").replace("CHAIN", f"{i % 4}").replace("ROW", f"{i // 2 % 2}") for i in some]
    return " ".join(in_turn)


@gluon.constexpr_function
def exponents_of(numbers, each):
    """Return PTX that replaces a thread's scores by exponents. `each` factors follow the scores, and then the cap."""
    size = min(GROUP.value, numbers)
    groups = [range(first, first + size) for first in range(0, numbers, size)]
    lines = [REGISTERS, for_rows(numbers, each, OF_A_ROW)]
    for i, group in enumerate(groups):
        lines += [NO_MAXIMA, for_scores(group, MAXIMA), ALL_ARE_SMALL, f"vote.sync.all.pred small{i}, small, 0xffffffff;"]
    for i, group in enumerate(groups):
        lines += [f"@!small{i} bra.uni LARGE{i};", for_scores(group, BY_POLYNOMIAL), f"NEXT{i}:"]
    lines.append("bra.uni DONE;")
    for i, group in enumerate(groups):  # elsewhere, since this is rare, and what a warp passes by is fetched
        lines += [f"LARGE{i}:", for_scores(group, BY_EITHER), f"bra.uni NEXT{i};"]
    return "{ " + " ".join([*lines, "DONE: }"])


SQUARES = gl.constexpr(os.environ.get("QV_SQUARES", "0") == "1")
AHEAD = gl.constexpr(int(os.environ.get("QV_AHEAD", "1")))
REGISTERS2 = (
    ".reg .pred small, both, small<64>; .reg .f32 a, b, cap, twice, square, power, one, limit<2>, factor<2>, s<64>; "
    ".reg .f32 c0_<2>, c1_<2>, c2_<2>; .reg .b32 largest<2>, most<2>, bits;"
)
OF_A_ROW2 = (
    f"mov.f32 cap, CAP; mul.f32 twice, cap, {in_ptx(-2.0)}; mul.f32 factorROW, FACTOR, {in_ptx(2 * LOG2E.value)}; "
    f"abs.f32 a, FACTOR; rcp.approx.ftz.f32 b, a; mul.f32 one, a, b; mul.f32 a, b, {in_ptx(SMALL)}; mul.f32 a, a, a; "
    "mul.f32 limitROW, a, one; mov.b32 mostROW, limitROW; mul.f32 square, FACTOR, FACTOR; mul.f32 power, FACTOR, cap; "
) + " ".join(f"mul.f32 c{i}_ROW, power, {in_ptx(c)}; mul.f32 power, power, square;" for i, c in enumerate(COEFFICIENTS))
MAXIMA2 = "mul.f32 sI, X, X; mov.b32 bits, sI; max.s32 largestROW, largestROW, bits;"
VOTE2 = "setp.le.s32 small, largest0, most0; setp.le.s32 both, largest1, most1; and.pred small, small, both; "
POLY2 = "fma.rn.f32 b, sI, c2_ROW, c1_ROW; fma.rn.f32 b, sI, b, c0_ROW; mul.f32 X, X, b;"
EITHER2 = (
    "fma.rn.f32 b, sI, c2_ROW, c1_ROW; fma.rn.f32 b, sI, b, c0_ROW; mul.f32 b, X, b; setp.le.f32 small, sI, limitROW; "
    f"mul.f32 a, X, factorROW; ex2.approx.ftz.f32 a, a; add.f32 a, a, {in_ptx(1.0)}; rcp.approx.ftz.f32 a, a; "
    "fma.rn.f32 a, a, twice, cap; selp.f32 X, b, a, small;"
)


@gluon.constexpr_function
def scores2(some, text):
    in_turn = [text.replace("X", f"${i}").replace("sI", f"s{i}").replace("ROW", f"{i // 2 % 2}") for i in some]
    return " ".join(in_turn)


@gluon.constexpr_function
def exponents_by_squares(numbers, each):
    size = min(GROUP.value, numbers)
    groups = [range(first, first + size) for first in range(0, numbers, size)]
    lines = [REGISTERS2, for_rows(numbers, each, OF_A_ROW2)]

    for step in range(len(groups) + AHEAD.value):
        if step < len(groups):
            lines += ["mov.b32 largest0, 0; mov.b32 largest1, 0;", scores2(groups[step], MAXIMA2), VOTE2]
            lines.append(f"vote.sync.all.pred small{step}, small, 0xffffffff;")
        i = step - AHEAD.value
        if i >= 0:
            lines += [f"@!small{i} bra.uni LARGE{i};", scores2(groups[i], POLY2), f"NEXT{i}:"]
    lines.append("bra.uni DONE;")
    for i, group in enumerate(groups):
        lines += [f"LARGE{i}:", scores2(group, EITHER2), f"bra.uni NEXT{i};"]
    return "{ " + " ".join([*lines, "DONE: }"])


@gluon.constexpr_function
def constraints_of(numbers, each):
    """Return the constraints of that PTX, which changes scores in place."""
    return ",".join(["=f"] * numbers + [str(i) for i in range(numbers)] + ["f"] * (2 * each))


@gluon.jit
def capped_exponents(scores, scale, cap):
    """Return `cap * log2(e) * tanh(scale * scores / cap)`.

    Args:
        scores: a tuple of products [M, N].
        scale: a scalar or a column.
        cap: a scalar.
    """
    EACH: gl.constexpr = min(64, scores[0].shape[1] // 2)  # of a thread, of one tensor
    NUMBERS: gl.constexpr = EACH * len(scores)
    return gl.inline_asm_elementwise(
        exponents_by_squares(NUMBERS, EACH) if SQUARES else exponents_of(NUMBERS, EACH), constraints_of(NUMBERS, EACH), scores + (scale / cap, cap * LOG2E),
        dtype=float32_each(len(scores)), is_pure=False, pack=EACH,
    )  # fmt: skip


@gluon.constexpr_function
def is_softcap(score_mod):
    """Return whether a score mod is `softcap`."""
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
