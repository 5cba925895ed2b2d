"""Products with values of any number of columns, by the tensor-core instruction that has as many.

The extents of Gluon's tensors are powers of two, so its product of 96 columns is one of 128. The instruction itself
takes any multiple of 8. Here it is written as assembly. The accumulators of a tile are tensors of PIECE columns, whose
registers, one piece after the other, are those of the instruction. The probabilities are split in pieces likewise.

The instruction needs the address of the values in shared memory (`addresses.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.pipeline import bytes_of_row, pieces_of
from quire.kernels.hopper.work_tile import ROWS

PIECE = gl.constexpr(16)  # columns of an accumulator; keys of one instruction


@gluon.constexpr_function
def num_pieces(columns):
    """Return how many accumulators so many columns have."""
    return (columns + PIECE.value - 1) // PIECE.value


@gluon.constexpr_function
def layout_of_piece():
    """Return the layout of an accumulator, and of as many probabilities."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE.value, 16])


@gluon.constexpr_function
def product_text(columns, keys, element):
    """Return PTX that begins to add the product of probabilities and values to accumulators, in place.

    The operands are the accumulators, 64 rows of whole pieces; they once more; the probabilities, 64 rows of `keys`;
    and the address of the values, `keys` rows in panels of 64 columns.
    """
    sums, numbers = num_pieces(columns) * PIECE.value // 2, keys // 4  # registers of a thread
    name = "bf16" if element == gl.bfloat16 else "f16"
    accs = ", ".join(f"${i}" for i in range(columns // 2))
    # In units of 16 bytes: between panels, between rows of eight; then that 128 bytes of a row are swizzled.
    descriptor = (keys * 128 // 16) << 16 | (1024 // 16) << 32 | 1 << 62
    lines = [
        ".reg .b32 at; .reg .b64 values; .reg .pred adds; setp.eq.u32 adds, 0, 0;",
        f"bfe.u32 at, ${2 * sums + numbers}, 4, 14; cvt.u64.u32 values, at; or.b64 values, values, {descriptor};",
        "wgmma.fence.sync.aligned;",
    ]
    for i in range(keys // 16):
        p = ", ".join(f"${2 * sums + 4 * i + j}" for j in range(4))
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{name}.{name} {{{accs}}}, {{{p}}}, values, adds, "
            "1, 1, 1;"
        )
        if i < keys // 16 - 1:
            lines.append(f"add.s64 values, values, {16 * 128 // 16};")
    return "{ " + " ".join(lines) + " wgmma.commit_group.sync.aligned; }"


@gluon.constexpr_function
def product_constraints(columns, keys):
    """Return the constraints of `product_text`."""
    each = PIECE.value // 2
    sums = num_pieces(columns) * each
    operands = ["=f"] * sums + [str(i) for i in range(sums)] + ["r"] * (keys // 4) + ["r"] * each
    return ",".join(operands)


@gluon.constexpr_function
def float32_each(number):
    """Return a type for each accumulator."""
    return (gl.float32,) * number


@gluon.jit
def halves(x):
    """Return the left and the right half of the columns of x. A thread has the same columns in both."""
    x = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1])
    return gl.split(x)


@gluon.jit
def pieces(x):
    """Return the columns of x in tensors of PIECE columns."""
    LAYOUT: gl.constexpr = layout_of_piece()
    if x.shape[1] == PIECE:
        return (gl.convert_layout(x, LAYOUT, assert_trivial=True),)
    else:
        left, right = halves(x)
        return pieces(left) + pieces(right)


@gluon.jit
def joined(parts, COLUMNS: gl.constexpr):
    """Return pieces next to each other as a tensor of COLUMNS columns, a power of two. Zeros are behind the last."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    if len(parts) == 0:
        return gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    elif COLUMNS == PIECE:
        return parts[0]
    else:
        HALF: gl.constexpr = COLUMNS // 2 // PIECE
        both = gl.join(joined(parts[:HALF], COLUMNS // 2), joined(parts[HALF:], COLUMNS // 2))
        both = both.permute([0, 2, 1]).reshape([ROWS, COLUMNS])
        return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def add_product(p, v_pipe, stage, accs, HEAD_DIM_V: gl.constexpr):
    """Begin to add the product of probabilities and a tile of values to accumulators."""
    KEYS: gl.constexpr = v_pipe.tiles.shape[1]
    BYTES: gl.constexpr = KEYS * bytes_of_row(v_pipe.tiles, v_pipe.more, v_pipe.empty)  # of a tile
    at = gl.full([ROWS, PIECE], v_pipe.address[0] + stage * BYTES, gl.int32, layout_of_piece())
    return gl.inline_asm_elementwise(
        product_text(HEAD_DIM_V, KEYS, p[0].dtype), product_constraints(HEAD_DIM_V, KEYS),
        accs + p + (at,), dtype=float32_each(len(accs)), is_pure=False, pack=PIECE // 2,
    )  # fmt: skip


@gluon.jit
def wide(accs, HEAD_DIM_V: gl.constexpr):
    """Return accumulators as those of `pieces_of(HEAD_DIM_V, 64)`."""
    if accs[0].shape[1] > PIECE:
        return accs
    else:
        results = ()
        for i in gl.static_range(len(pieces_of(HEAD_DIM_V, 64))):
            results = results + (joined_from(accs, pieces_of(HEAD_DIM_V, 64)[i][0], pieces_of(HEAD_DIM_V, 64)[i][1]),)
        return results


@gluon.jit
def joined_from(accs, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Return COLUMNS columns of accumulators in pieces, from column FIRST on."""
    return joined(accs[FIRST // PIECE : (FIRST + COLUMNS) // PIECE], COLUMNS)
