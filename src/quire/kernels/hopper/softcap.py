"""Softcaps, in as few instructions as they take: `cap * tanh(x)`, where x is a scaled score divided by the cap.

`softcap` is `cap - 2 cap / (exp(2 x) + 1)`. The constant `cap` moves all scores of a row alike, so it is added to the
row's maximum once, after the loop over tiles. The factor `2 cap` is that of the softmax's exponents.

`capped_exponents` is for the loop that needs no maximum (`capped.py`). It is

* a polynomial where abs(x) is at most SMALL;
* elsewhere the formula above, with two special functions, of which an SM computes 16 in a cycle.

A warp skips the second form for a GROUP of scores that are all small. That changes no bit. Where few scores are large,
their group is computed by code that is not in the instruction cache, so a group is as small as its branch is cheap.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.products import float32_each
from quire.kernels.states import LOG2E

SMALL = gl.constexpr(0.285)  # the largest abs(x) of the polynomial
# Of x, x^3 and x^5 in tanh(x): a minimax fit for abs(x) <= SMALL, with an error of at most 1.2e-7. A lse has room for
# ten times that at most, so a larger SMALL needs a fourth coefficient.
COEFFICIENTS = (0.9999970458644307, -0.33303948268577604, 0.1259831465500068)
OF_X = gl.constexpr(COEFFICIENTS[0])
GROUP = gl.constexpr(32)  # of a thread's scores


def in_ptx(number):
    """Return a number as PTX writes a float32."""
    return "0f" + struct.pack(">f", number).hex().upper()


# PTX, in which X stands for a score, SQ for its square, ROW for the first or second row of a thread, FACTOR for what
# makes x of scores, CAP for cap * log2(e), and LIMIT for the square of the largest score of the row that is small.
# Squares are compared as integers, of which an instruction takes the maximum of three; NaN is large.
REGISTERS = (
    ".reg .pred low, small; .reg .f32 a, b, twice, factor, square, power, c<3>, limit<2>, s<64>; "
    ".reg .b32 largest<2>, bits;"
)
CONSTANTS = (
    f"mul.f32 factor, FACTOR, {in_ptx(2 * LOG2E.value)}; mul.f32 square, FACTOR, FACTOR; mul.f32 power, FACTOR, CAP; "
    + " ".join(f"mul.f32 c{i}, power, {in_ptx(c)}; mul.f32 power, power, square;" for i, c in enumerate(COEFFICIENTS))
    + f" mul.f32 twice, WHOLE, {in_ptx(-2.0)}; mov.b32 limit0, LIMIT0; mov.b32 limit1, LIMIT1;"
)
NO_SQUARES = "mov.b32 largest0, 0; mov.b32 largest1, 0;"
SQUARE = "mul.f32 SQ, X, X; mov.b32 bits, SQ; max.s32 largestROW, largestROW, bits;"
ALL_ARE_SMALL = (
    "setp.le.s32 low, largest0, LIMIT0; setp.le.and.s32 low, largest1, LIMIT1, low; "
    "vote.sync.all.pred small, low, 0xffffffff;"
)
POLYNOMIAL = "fma.rn.f32 b, SQ, c2, c1; fma.rn.f32 b, SQ, b, c0; mul.f32 X, X, b;"
# A score that is large is replaced by one whose polynomial is what the formula says, if its square is taken for 0. A
# division would care for numbers below 2^-126, and these are at least 1.
FORMULA = (
    "setp.le.f32 low, SQ, limitROW; mul.f32 a, X, factor; ex2.approx.ftz.f32 a, a; "
    f"add.f32 a, a, {in_ptx(1.0)}; rcp.approx.ftz.f32 a, a; fma.rn.f32 a, a, twice, WHOLE; selp.f32 X, X, a, low; "
    f"selp.f32 SQ, SQ, {in_ptx(0.0)}, low;"
)


@gluon.constexpr_function
def is_capped(score_mod):
    """Return whether a score mod is `capped_exponents`."""
    return score_mod is capped_exponents


@gluon.constexpr_function
def for_scores(some, text):
    """Return PTX for some of a thread's scores. They alternate between its rows by twos."""
    return " ".join([text.replace("X", f"${i}").replace("SQ", f"s{i}").replace("ROW", f"{i // 2 % 2}") for i in some])


@gluon.constexpr_function
def with_operands(numbers, each, text):
    """Return PTX with the operands that follow a thread's scores: factors, caps and limits, `each` of each."""
    for i, name in enumerate(("FACTOR", "CAP", "WHOLE", "LIMIT0")):
        text = text.replace(name, f"${2 * numbers + each * i}")
    return text.replace("LIMIT1", f"${2 * numbers + 3 * each + 2}")


@gluon.constexpr_function
def exponents_of(numbers, each):
    """Return PTX that replaces a thread's scores by exponents; what follows them is in `with_operands`."""
    lines, size = [REGISTERS, CONSTANTS], GROUP.value
    groups = [range(first, min(first + size, numbers)) for first in range(0, numbers, size)]
    for i, group in enumerate(groups):
        lines += [NO_SQUARES, for_scores(group, SQUARE), ALL_ARE_SMALL, f"@!small bra.uni LARGE{i};"]
        lines += [f"SMALL{i}:", for_scores(group, POLYNOMIAL)]
    lines.append("bra.uni DONE;")
    for i, group in enumerate(groups):
        lines += [f"LARGE{i}:", for_scores(group, FORMULA), f"bra.uni SMALL{i};"]
    return with_operands(numbers, each, "{ " + " ".join([*lines, "DONE: }"]))


@gluon.constexpr_function
def constraints_of(numbers, each):
    """Return the constraints of that PTX, which changes scores in place."""
    return ",".join(["=f"] * numbers + [str(i) for i in range(numbers)] + ["f"] * (3 * each) + ["r"] * each)


@gluon.jit
def capped_exponents(scores, scale, cap, limit):
    """Return `cap * log2(e) * tanh(scale * scores / cap)`.

    Args:
        scores: a tuple of products [M, N].
        scale: a scalar.
        cap: a scalar.
        limit: what `limit_of_squares` returns, a scalar or a column.
    """
    EACH: gl.constexpr = min(64, scores[0].shape[1] // 2)  # of a thread, of one tensor
    NUMBERS: gl.constexpr = EACH * len(scores)
    return gl.inline_asm_elementwise(
        exponents_of(NUMBERS, EACH), constraints_of(NUMBERS, EACH),
        scores + (scale / cap, cap * LOG2E, cap / (scale * OF_X), limit),
        dtype=float32_each(len(scores)), is_pure=False, pack=EACH,
    )  # fmt: skip


@gluon.jit
def limit_of_squares(scale, cap, rows, OWNED: gl.constexpr):
    """Return the bits of the square of the largest score that is small.

    Rows from OWNED on, if it isn't None, have no queries. Whatever they hold is small.
    """
    largest = SMALL * cap / scale
    bits = (largest * largest).to(gl.int32, bitcast=True)
    if OWNED is not None:
        bits = gl.where(rows < OWNED, bits, 0x7FFFFFFF)[:, None]
    return bits


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
