"""The softmax of a tile relative to a maximum that rarely changes.

With a running maximum, the exponentials of a tile wait for its maximum: a chain of 31 instructions and two shuffles.
Here they are relative to the maximum of earlier tiles, and nothing computes the tile's own. Each thread adds its
probabilities of a row. If a sum exceeds LIMIT, the warp raises the row's maximum to that of the tile, rescales the
row's accumulators and sum, and computes the tile's probabilities again. This happens in few tiles. Whether a row's
maximum is raised depends on that row alone.

FlashDecoding++ (arXiv 2311.01282, section 3) subtracts a number that is chosen before all tiles, and computes a row
again where an exponential overflows.

All of this is one block of assembly, since warps branch differently. Its tensors have PIECE columns (`products.py`).
One of them is the state of the rows: of a thread's eight registers, the first four are maximum and sum of its first
row, and those of its second row. The sums are the thread's own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.products import PIECE, joined, layout_of_piece, pieces
from quire.kernels.hopper.softcap import in_ptx
from quire.kernels.hopper.softmax import LOWEST
from quire.kernels.hopper.work_tile import ROWS

LIMIT = 2.0**14  # of a thread's probabilities in a row of a tile, which float16 holds

# PTX, in which X stands for a score, I for its number, CHAIN for one of four chains, two of each of a thread's rows,
# and ROW for the row. For the row, SCALE makes exponents of scores, MAX is the maximum, and SUM the sum.
REGISTERS = (
    ".reg .pred some, fresh, raises<2>; .reg .f32 away<2>, sum<4>, all<2>, top<4>, highest<2>, other, alpha<2>, e<128>;"
)
BEGIN = "neg.f32 awayROW, MAX;"
BEGIN_WITH_OFFSET = "sub.f32 awayROW, OFFSET, MAX;"
EXPONENTIAL = "fma.rn.f32 eI, X, SCALE, awayROW; ex2.approx.ftz.f32 eI, eI;"
TOTAL = "add.f32 all0, sum0, sum1; add.f32 all1, sum2, sum3;"
ANY_EXCEEDS = (
    f"max.f32 other, all0, all1; setp.gt.and.f32 some, other, {in_ptx(LIMIT)}, fresh; "
    "vote.sync.any.pred some, some, 0xffffffff;"
)
LARGEST_OF_QUAD = " ".join(  # of the four threads that share a row
    f"shfl.sync.bfly.b32 other, NAME, {distance}, 0x1f, 0xffffffff; max.f32 NAME, NAME, other;" for distance in (1, 2)
)
ROW_EXCEEDS = f"{LARGEST_OF_QUAD.replace('NAME', 'allROW')} setp.gt.f32 raisesROW, allROW, {in_ptx(LIMIT)};"
HIGHEST = f"{LARGEST_OF_QUAD.replace('NAME', 'highestROW')} mul.f32 highestROW, highestROW, SCALE; "
HIGHEST_WITH_OFFSET = HIGHEST.replace("mul.f32", "fma.rn.f32").replace("SCALE", "SCALE, OFFSET")
RAISE_FROM_NONE = "max.f32 MAX, MAX, highestROW;"
RAISE = (
    "max.f32 highestROW, highestROW, MAX; selp.f32 highestROW, highestROW, MAX, raisesROW; "
    "sub.f32 alphaROW, MAX, highestROW; ex2.approx.ftz.f32 alphaROW, alphaROW; mov.f32 MAX, highestROW; "
    "mul.f32 SUM, SUM, alphaROW;"
)
ADD = "add.f32 SUM, SUM, allROW;"
TRUE, FALSE = (f"{in_ptx(x)}, {in_ptx(0.0)}" for x in (1.0, -1.0))


@gluon.constexpr_function
def packed_pieces(keys):
    """Return in how many pieces of 32-bit registers the probabilities of a tile are, two 16-bit numbers in each."""
    return (keys // PIECE.value + 1) // 2


@gluon.constexpr_function
def first_registers(keys, sums):
    """Return the first register of accumulators, state, scores and scale in the assembly; probabilities are before.

    Accumulators and state are changed in place, and listed once more as inputs, after the scores.
    """
    accs = packed_pieces(keys) * PIECE.value // 2
    state = accs + sums
    scores = state + PIECE.value // 2
    return accs, state, scores, scores + keys // 2 + sums + PIECE.value // 2


@gluon.constexpr_function
def of_row(keys, sums, row, text):
    """Return PTX for the first or the second row of a thread."""
    _, state, _, scale = first_registers(keys, sums)
    maximum, total, factor = f"${state + 2 * row}", f"${state + 2 * row + 1}", f"${scale + 2 * row}"
    text = text.replace("ROW", f"{row}").replace("MAX", maximum).replace("SUM", total).replace("SCALE", factor)
    return text.replace("OFFSET", f"${scale + 2 * row + 1}")


@gluon.constexpr_function
def for_rows(keys, sums, text):
    """Return PTX for both rows of a thread."""
    return of_row(keys, sums, 0, text) + " " + of_row(keys, sums, 1, text)


@gluon.constexpr_function
def for_scores(keys, sums, first_of_chain, text):
    """Return PTX for each of a thread's scores: `first_of_chain` for the first four, else `text`."""
    scores = first_registers(keys, sums)[2]
    lines = []
    for i in range(keys // 2):  # two of the first row, two of the second, and so on
        line = (first_of_chain if i < 4 else text).replace("CHAIN", f"{i % 4}")
        lines.append(of_row(keys, sums, i // 2 % 2, line.replace("X", f"${scores + i}").replace("I", f"{i}")))
    return " ".join(lines)


@gluon.constexpr_function
def probabilities_text(keys, sums, element, has_offset):
    """Return PTX for the probabilities of a tile, in pairs, and for their sums."""
    accs = first_registers(keys, sums)[0]
    name = "bf16x2" if element == gl.bfloat16 else "f16x2"
    exponentials = for_scores(
        keys, sums, f"{EXPONENTIAL} mov.f32 sumCHAIN, eI;", f"{EXPONENTIAL} add.f32 sumCHAIN, sumCHAIN, eI;"
    )
    pairs = " ".join([f"cvt.rn.{name}.f32 ${i}, e{2 * i + 1}, e{2 * i};" for i in range(keys // 4)])
    unused = " ".join([f"mov.b32 ${i}, 0;" for i in range(keys // 4, accs)])
    begin = BEGIN_WITH_OFFSET if has_offset else BEGIN
    return f"{for_rows(keys, sums, begin)} {exponentials} {pairs} {unused} {TOTAL}"


@gluon.constexpr_function
def highest_text(keys, sums, has_offset):
    """Return PTX for the highest exponents of a tile's rows."""
    chains = for_scores(keys, sums, "mov.f32 topCHAIN, X;", "max.f32 topCHAIN, topCHAIN, X;")
    both = "max.f32 highest0, top0, top1; max.f32 highest1, top2, top3;"
    return f"{chains} {both} {for_rows(keys, sums, HIGHEST_WITH_OFFSET if has_offset else HIGHEST)}"


@gluon.constexpr_function
def first_text(keys, element, has_offset):
    """Return PTX for the first tile of a work tile, before which there is no maximum."""
    raises = f"{highest_text(keys, 0, has_offset)} {for_rows(keys, 0, RAISE_FROM_NONE)}"
    return f"{{ {REGISTERS} {raises} {probabilities_text(keys, 0, element, has_offset)} {for_rows(keys, 0, ADD)} }}"


@gluon.constexpr_function
def next_text(keys, sums, element, has_offset):
    """Return PTX for a later tile. A maximum is raised once at most, so that no scores can keep a warp here."""
    accs = first_registers(keys, sums)[0]
    rescale = " ".join([f"mul.f32 ${accs + i}, ${accs + i}, alpha{i // 2 % 2};" for i in range(sums)])
    return (
        f"{{ {REGISTERS} setp.gt.f32 fresh, {TRUE}; AGAIN: {probabilities_text(keys, sums, element, has_offset)} "
        f"{ANY_EXCEEDS} @!some bra.uni DONE; {for_rows(keys, sums, ROW_EXCEEDS)} "
        f"{highest_text(keys, sums, has_offset)} {for_rows(keys, sums, RAISE)} {rescale} setp.gt.f32 fresh, {FALSE}; "
        f"bra.uni AGAIN; DONE: {for_rows(keys, sums, ADD)} }}"
    )


@gluon.constexpr_function
def constraints_of(keys, sums):
    """Return the constraints of that PTX."""
    accs, _, scores, _ = first_registers(keys, sums)
    in_place = [str(i) for i in range(accs, scores)]
    return ",".join(
        ["=&r"] * accs + ["=&f"] * len(in_place) + ["f"] * (keys // 2) + in_place + ["f"] * (PIECE.value // 2)
    )


@gluon.constexpr_function
def types_of(keys, num_accs):
    """Return the types of what that PTX writes."""
    return (gl.int32,) * packed_pieces(keys) + (gl.float32,) * (num_accs + 1)


@gluon.jit
def in_pieces(tensors):
    """Return tensors next to each other in pieces."""
    results = ()
    for i in gl.static_range(len(tensors)):
        results = results + pieces(tensors[i])
    return results


@gluon.jit
def joined_like(parts, tensors):
    """Return pieces as tensors with as many columns as others."""
    results = ()
    for i in gl.static_range(len(tensors)):
        results = results + (joined(parts[: tensors[i].shape[1] // PIECE], tensors[i].shape[1]),)
        parts = parts[tensors[i].shape[1] // PIECE :]
    return results


@gluon.jit
def in_piece(factor):
    """Return a factor per row, or for all rows, as a piece."""
    LAYOUT: gl.constexpr = layout_of_piece()
    if isinstance(factor, gl.tensor) and len(factor.shape) == 1:
        factor = gl.convert_layout(factor, gl.SliceLayout(1, LAYOUT))[:, None]
        return factor + gl.zeros([ROWS, PIECE], gl.float32, LAYOUT)
    else:
        return gl.full([ROWS, PIECE], factor, gl.float32, LAYOUT)


@gluon.jit
def scale_and_offset(exponent_scale, offset):
    """Return what makes exponents of scores, as a piece: of each row a factor, and the offset if there is one."""
    scale = in_piece(exponent_scale)
    if len(offset) > 0:
        columns = gl.arange(0, PIECE, gl.SliceLayout(0, layout_of_piece()))
        scale = gl.where((columns % 2 == 0)[None, :], scale, in_piece(offset[0]))
    return scale


@gluon.jit
def first_softmax(scores, exponent_scale, offset, element: gl.constexpr):
    """Begin the state of the rows with their first tile. Return its probabilities and the state as `next_softmax` does.

    Args:
        scores: of the tile, -inf where a row does not see a key.
        exponent_scale: what makes exponents in base 2 of scores, for all rows or for each.
        offset: what is added to these exponents, of each row, as a tuple; () for nothing.
        element: type of the probabilities.
    """
    LAYOUT: gl.constexpr = layout_of_piece()
    columns = gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT))
    state = gl.zeros([ROWS, PIECE], gl.float32, LAYOUT) + gl.where(columns % 2 == 0, LOWEST, 0.0)[None, :]
    numbers = in_pieces(scores)
    KEYS: gl.constexpr = len(numbers) * PIECE
    results = gl.inline_asm_elementwise(
        first_text(KEYS, element, len(offset) > 0), constraints_of(KEYS, 0),
        numbers + (state, scale_and_offset(exponent_scale, offset)),
        dtype=types_of(KEYS, 0), is_pure=False, pack=PIECE // 2,
    )  # fmt: skip
    return results[: len(results) - 1], results[len(results) - 1]


@gluon.jit
def next_softmax(scores, accs, state, exponent_scale, offset, element: gl.constexpr):
    """Add a tile to the state of the rows.

    Returns:
        The probabilities in packed pieces, for `operands_of`. The accumulators, relative to the new maxima. The state.
    """
    numbers, parts = in_pieces(scores), in_pieces(accs)
    KEYS: gl.constexpr = len(numbers) * PIECE
    SUMS: gl.constexpr = len(parts) * PIECE // 2
    results = gl.inline_asm_elementwise(
        next_text(KEYS, SUMS, element, len(offset) > 0), constraints_of(KEYS, SUMS),
        numbers + parts + (state, scale_and_offset(exponent_scale, offset)),
        dtype=types_of(KEYS, len(parts)), is_pure=False, pack=PIECE // 2,
    )  # fmt: skip
    PACKED: gl.constexpr = packed_pieces(KEYS)
    parts = results[PACKED : len(results) - 1]
    return results[:PACKED], joined_like(parts, accs), results[len(results) - 1]


@gluon.jit
def maximum_and_sum(state, OF_SCORES: gl.constexpr):
    """Return the maximum and the sum of each row of a state. Of a row that has seen no key, they are -inf and 0."""
    maxima, sums = gl.split(state.reshape([ROWS, PIECE // 2, 2]))
    m_i, l_i = gl.max(maxima, 1), gl.sum(sums, 1)
    m_i = gl.where(l_i == 0.0, float("-inf"), m_i)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, OF_SCORES)
    return gl.convert_layout(m_i, LAYOUT), gl.convert_layout(l_i, LAYOUT)
