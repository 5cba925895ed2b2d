"""The two products of the Hopper kernel, their operands and their accumulators.

Products are Gluon's, or those of `products.py` where Gluon has none of that size.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from quire.kernels.gluon.pipeline import pieces_of
from quire.kernels.hopper.products import PIECE, add_product, begin_scores, joined, layout_of_piece, num_pieces, pieces
from quire.kernels.hopper.work_tile import ROWS


class State(NamedTuple):
    """The state of a warpgroup's rows over some keys, as in `states.py`."""

    accs: Any  # a tuple of accumulators, one for each piece of the values' columns
    m_i: Any  # [ROWS] float32: maximum, as a base-2 exponent
    l_i: Any  # [ROWS] float32: sum of exponentials relative to it


@gluon.constexpr_function
def depth_of(element):
    """Return the columns of one tensor-core instruction for numbers of this type."""
    return 256 // element.primitive_bitwidth


@gluon.constexpr_function
def layout_of_out(columns, depth):
    """Return the layout of an accumulator of the second product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, depth])


@gluon.constexpr_function
def layout_of_scores(keys, depth):
    """Return the layout of the scores of tiles of so many keys, or of their pieces if that is no power of two."""
    if keys & (keys - 1):
        return layout_of_piece()
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, depth])


@gluon.jit
def columns_of_scores(KEYS: gl.constexpr, OF_SCORES: gl.constexpr):
    """Return the columns of each tensor of a tile's scores."""
    COLUMNS: gl.constexpr = PIECE if KEYS & (KEYS - 1) else KEYS
    columns = ()
    for i in gl.static_range(KEYS // COLUMNS):
        columns = columns + (i * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, OF_SCORES)),)
    return columns


@gluon.jit
def no_scores(cols, OF_SCORES: gl.constexpr):
    """Return scores of 0 of a tile with columns `cols`."""
    scores = ()
    for i in gl.static_range(len(cols)):
        scores = scores + (gl.zeros([ROWS, cols[i].shape[0]], gl.float32, OF_SCORES),)
    return scores


@gluon.constexpr_function
def keys_of(cols):
    """Return how many keys the tiles with these columns have."""
    return len(cols) * cols[0].shape[0]


@gluon.jit
def queries_of(wg: gl.constexpr, q_pipe, stage, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Return COLUMNS columns of a warpgroup's queries in shared memory, from column FIRST on."""
    return q_pipe.piece(stage, FIRST, COLUMNS).slice(wg * ROWS, ROWS)


@gluon.constexpr_function
def columns_of_accs(columns, in_pieces):
    """Return the columns of each accumulator of products with values of so many columns."""
    if in_pieces:
        return (PIECE.value,) * num_pieces(columns)
    return tuple(piece[1] for piece in pieces_of(columns, 64))


@gluon.jit
def empty_acc(COLUMNS: gl.constexpr, DEPTH: gl.constexpr):
    """Return an accumulator of zeros."""
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout_of_out(COLUMNS, DEPTH))


@gluon.jit
def empty_state(OF_SCORES: gl.constexpr, v_pipe, HEAD_DIM_V: gl.constexpr):
    """Return the state over no keys. There is an accumulator for each piece of the values' columns."""
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, OF_SCORES))
    l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, OF_SCORES))
    COLUMNS: gl.constexpr = columns_of_accs(HEAD_DIM_V, len(v_pipe.addresses) > 0)
    accs = ()
    for i in gl.static_range(len(COLUMNS)):
        accs = accs + (empty_acc(COLUMNS[i], depth_of(v_pipe.tiles.dtype)),)
    return accs, m_i, l_i


@gluon.jit
def multiply_keys(q, k_pipe, stage, zeros, HEAD_DIM: gl.constexpr):
    """Begin the product of queries and a tile of keys. It is a tuple of tensors like `zeros`."""
    if len(k_pipe.addresses) > 0:
        return begin_scores(q, k_pipe, stage, k_pipe.tiles.dtype, len(zeros) * PIECE, HEAD_DIM)
    else:
        scores = zeros[0]
        for i in gl.static_range(len(q)):
            k = k_pipe.piece(stage, pieces_of(HEAD_DIM, 16)[i][0], pieces_of(HEAD_DIM, 16)[i][1])
            scores = warpgroup_mma(q[i], k.permute((1, 0)), scores, use_acc=i > 0, is_async=True)
        return (scores,)


@gluon.jit
def multiply_values(p, v_pipe, stage, accs, HEAD_DIM_V: gl.constexpr):
    """Begin to add the product of probabilities and a tile of values to the accumulators."""
    if len(v_pipe.addresses) > 0:
        return add_product(p, v_pipe, stage, accs, HEAD_DIM_V)
    else:
        results = ()
        for i in gl.static_range(len(accs)):
            v = v_pipe.piece(stage, pieces_of(HEAD_DIM_V, 64)[i][0], pieces_of(HEAD_DIM_V, 64)[i][1])
            operand = p[0]
            if i > 0:  # the same registers
                operand = gl.convert_layout(p[0], gl.DotOperandLayout(0, accs[i].type.layout, 2))
            results = results + (warpgroup_mma(operand, v, accs[i], is_async=True),)
        return results


@gluon.constexpr_function
def products_of(addresses, accs):
    """Return how many products `multiply_values` begins: one for each accumulator, or one for all pieces."""
    return 1 if len(addresses) > 0 else len(accs)


@gluon.constexpr_function
def twice(element):
    """Return a type twice."""
    return (element, element)


@gluon.jit
def unpacked(p, element: gl.constexpr, KEYS: gl.constexpr):
    """Return packed probabilities of KEYS keys in pieces.

    This comes right before a product. Between loop iterations, the compiler would move each half of a register.
    """
    results = ()
    for i in gl.static_range(len(p)):
        results = results + gl.inline_asm_elementwise(
            "mov.b32 $0, $8; mov.b32 $1, $9; mov.b32 $2, $10; mov.b32 $3, $11; "
            "mov.b32 $4, $12; mov.b32 $5, $13; mov.b32 $6, $14; mov.b32 $7, $15;",
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [p[i]], dtype=twice(element), is_pure=True, pack=PIECE // 2,
        )  # fmt: skip
    return results[: KEYS // PIECE]


@gluon.jit
def operands_of(p, v_pipe, accs, KEYS: gl.constexpr):
    """Return packed probabilities of KEYS keys (`lazy_max.py`) as the operands of `multiply_values`."""
    parts = unpacked(p, v_pipe.tiles.dtype, KEYS)
    if len(v_pipe.addresses) > 0:
        return parts
    else:
        return (gl.convert_layout(joined(parts, KEYS), gl.DotOperandLayout(0, accs[0].type.layout, 2)),)


@gluon.jit
def as_operands(p, v_pipe, accs, PACKED: gl.constexpr = False):
    """Return probabilities as the operands of `multiply_values`, of the type of values. PACKED: as in `rounded`."""
    operands = ()
    for i in gl.static_range(len(p)):
        numbers = rounded(p[i], v_pipe.tiles.dtype, PACKED)
        if len(v_pipe.addresses) > 0:
            operands = operands + pieces(numbers)
        else:
            operands = operands + (gl.convert_layout(numbers, gl.DotOperandLayout(0, accs[0].type.layout, 2)),)
    return operands


@gluon.jit
def rounded(p, element: gl.constexpr, PACKED: gl.constexpr):
    """Round probabilities to the type of values.

    PACKED: by an instruction that rounds two neighbours into one register, in the order that tensor cores want. Left to
    itself, ptxas takes the other order in some kernels and swaps all halves before a product. In others it is faster.
    """
    if not PACKED:
        return p.to(element)
    elif element == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def after(IN_FLIGHT: gl.constexpr, tensors):
    """Wait until at most IN_FLIGHT products have not ended, and return tensors that are those of ended ones."""
    if len(tensors) > 1:
        return warpgroup_mma_wait(IN_FLIGHT, deps=tensors)
    else:
        return (warpgroup_mma_wait(IN_FLIGHT, deps=tensors),)
