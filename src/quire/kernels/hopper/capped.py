"""The consumers' loop of the Hopper kernel for soft-capped scores: a softmax without a running maximum.

A softcap bounds the exponents, to ±72 in base 2 with a cap of 50. Numbers of 8 bits of exponent hold that without a
maximum to subtract. So there is no maximum to find, accumulators are never rescaled, and rows are summed once, at the
end. The softmax of a tile is independent of the product of the values before, and overlaps it.

What is left is to compute exponents of scores. With x a scaled score divided by the cap, `cap * log2(e) * tanh(x)` is

* a polynomial where abs(x) is at most SMALL;
* elsewhere `cap * log2(e) * (1 - 2 / (exp(2 x) + 1))`, with two special functions, of which an SM computes 16 in a
  cycle.

A warp whose scores in a tile are all small skips the second form. That changes no bit.
"""

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from quire.kernels.hopper.attend import by_row, empty_state, hide_unseen, multiply_keys, multiply_values, total
from quire.kernels.hopper.pipeline import consumer_release, consumer_wait, pieces_of
from quire.kernels.hopper.tile_scheduler import ROWS
from quire.kernels.states import LOG2E, log2

LARGEST_CAP = 50.0  # whose exponents leave room in bfloat16 for sums over all keys and for values up to 2^38
SMALL = 0.5  # the largest abs(x) of the polynomial
# Of x, x^3, x^5 and x^7 in tanh(x): a minimax fit for abs(x) <= SMALL, with an error of at most 1.3e-7.
COEFFICIENTS = (0.99999767629104286, -0.3332065563065047, 0.13145149691582684, -0.04337259215984544)


def in_ptx(number):
    """Return a number as PTX writes a float32."""
    return "0f" + struct.pack(">f", number).hex().upper()


# PTX, in which X stands for a score, ROW for the first or second row of a thread, FACTOR for what makes x of the row's
# scores, CAP for cap * log2(e), and CHAIN for one of four independent maxima: two of the first row, two of the second.
REGISTERS = (
    ".reg .pred small; .reg .f32 a, b, cap, twice, square, power, limit<2>, factor<2>, largest<4>; "
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
    "setp.le.and.f32 small, largest2, limit1, small; vote.sync.all.pred small, small, 0xffffffff;"
)
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
    """Return whether a score mod is the one of this file."""
    return score_mod is capped_exponents


@gluon.constexpr_function
def for_rows(numbers, text):
    """Return PTX for both rows of a thread. Scores alternate between them by twos, and so do the factors."""
    text = text.replace("CAP", f"${3 * numbers}")
    return " ".join([text.replace("FACTOR", f"${2 * (numbers + row)}").replace("ROW", f"{row}") for row in range(2)])


@gluon.constexpr_function
def for_scores(numbers, text):
    """Return PTX for each of a thread's scores."""
    in_turn = [text.replace("X", f"${i}").replace("CHAIN", f"{i % 4}") for i in range(numbers)]
    return " ".join([in_turn[i].replace("ROW", f"{i // 2 % 2}") for i in range(numbers)])


@gluon.constexpr_function
def exponents_of(numbers):
    """Return PTX that replaces a thread's scores by exponents. As many factors follow the scores, and then the cap."""
    return (
        f"{{ {REGISTERS} {for_rows(numbers, OF_A_ROW)} "
        f"{NO_MAXIMA} {for_scores(numbers, MAXIMA)} {ALL_ARE_SMALL} @!small bra.uni EITHER; "
        f"{for_scores(numbers, BY_POLYNOMIAL)} bra.uni DONE; EITHER: {for_scores(numbers, BY_EITHER)} DONE: }}"
    )


@gluon.constexpr_function
def constraints_of(numbers):
    """Return the constraints of that PTX, which changes scores in place."""
    return ",".join(["=f"] * numbers + [str(i) for i in range(numbers)] + ["f"] * (2 * numbers))


@gluon.jit
def capped_exponents(scores, scale, cap):
    """Return `cap * log2(e) * tanh(scale * scores / cap)`.

    Args:
        scores: [M, N] products.
        scale: a scalar or a column.
        cap: a scalar.
    """
    NUMBERS: gl.constexpr = min(64, scores.shape[1] // 2)  # of a thread
    return gl.inline_asm_elementwise(
        exponents_of(NUMBERS), constraints_of(NUMBERS), [scores, scale / cap, cap * LOG2E], dtype=gl.float32,
        is_pure=False, pack=NUMBERS,
    )  # fmt: skip


@gluon.jit
def probabilities(scores, pos, rows, cols, work, sight, scale, scoring, BLOCK_T: gl.constexpr, SCORE_MOD: gl.constexpr):
    """Return the probabilities of the tile that begins at position `pos`, relative to an exponent of 0."""
    exponents = SCORE_MOD(scores, by_row(scale), scoring.softcap)
    return gl.exp2(hide_unseen(exponents, pos, rows, cols, work, sight, scoring, BLOCK_T))


@gluon.jit
def sums_of_threads(p):
    """Return the sum of each thread's probabilities in a row, [M, 4]. A row of p [M, N] belongs to four threads."""
    for _ in gl.static_range(log2(p.shape[1] // 8)):
        p = gl.sum(p.reshape([p.shape[0], 2, p.shape[1] // 2]), 1)
    return gl.sum(p.reshape([p.shape[0], 4, 2]), 2)


@gluon.jit
def end_of_values(accs, p, v_pipe, i):
    """Wait for the product of probabilities and the i-th tile of values, and release that tile."""
    done = warpgroup_mma_wait(0, deps=accs + (p,))
    consumer_release(v_pipe, i)
    return done[: len(accs)], done[len(accs)]


@gluon.jit
def attend_capped_work_tile(
    q, k_pipe, v_pipe, tile_i, rows, cols, work, sight, scale, scoring, q_pipe, work_i,
    OF_SCORES: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_T: gl.constexpr,
    SCORE_MOD: gl.constexpr, EARLY: gl.constexpr, KV_BOX: gl.constexpr,
):  # fmt: skip
    """Return what `attend_work_tile` does, for capped scores.

    A tile's softmax overlaps this warpgroup's product of the values before, unless that is slower (NVIDIA H200): where
    tiles take long to load, since values are free later; and where registers for two tiles of probabilities are short.
    """
    NUM_ACCS: gl.constexpr = len(pieces_of(HEAD_DIM_V, 64))
    OVERLAPS: gl.constexpr = KV_BOX >= 16 and (k_pipe.tiles.shape[1] <= 64 or HEAD_DIM_V <= 64)
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[1]
    element: gl.constexpr = k_pipe.tiles.dtype
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, OF_SCORES)
    accs, _, _ = empty_state(OF_SCORES, HEAD_DIM_V, 16)
    OF_P: gl.constexpr = gl.DotOperandLayout(0, accs[0].type.layout, 2)
    pos = work.tile * BLOCK_N
    scores = multiply_keys(q, k_pipe, consumer_wait(k_pipe, tile_i), zeros, HEAD_DIM)
    scores = warpgroup_mma_wait(0, deps=[scores])
    consumer_release(k_pipe, tile_i)
    if EARLY and work.num_tiles == 1:
        consumer_release(q_pipe, work_i)
    numbers = probabilities(scores, pos, rows, cols, work, sight, scale, scoring, BLOCK_T, SCORE_MOD)
    sums = sums_of_threads(numbers)
    p = gl.convert_layout(numbers.to(element), OF_P)
    for i in range(tile_i + 1, tile_i + work.num_tiles):
        pos -= BLOCK_N
        scores = multiply_keys(q, k_pipe, consumer_wait(k_pipe, i), zeros, HEAD_DIM)
        accs = multiply_values(p, v_pipe, consumer_wait(v_pipe, i - 1), accs, HEAD_DIM_V)
        scores = warpgroup_mma_wait(NUM_ACCS, deps=[scores])
        consumer_release(k_pipe, i)
        if EARLY and i == tile_i + work.num_tiles - 1:
            consumer_release(q_pipe, work_i)
        if not OVERLAPS:
            accs, p = end_of_values(accs, p, v_pipe, i - 1)
        numbers = probabilities(scores, pos, rows, cols, work, sight, scale, scoring, BLOCK_T, SCORE_MOD)
        sums += sums_of_threads(numbers)
        if OVERLAPS:
            accs, p = end_of_values(accs, p, v_pipe, i - 1)
        p = gl.convert_layout(numbers.to(element), OF_P)
    last = tile_i + work.num_tiles - 1
    accs = multiply_values(p, v_pipe, consumer_wait(v_pipe, last), accs, HEAD_DIM_V)
    l_i = gl.convert_layout(total(sums), gl.SliceLayout(1, OF_SCORES))
    accs, p = end_of_values(accs, p, v_pipe, last)
    return accs, gl.where(l_i == 0.0, float("-inf"), 0.0), l_i
