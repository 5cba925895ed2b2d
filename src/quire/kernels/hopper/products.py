"""Products of any number of columns, by the tensor-core instruction that has as many.

The extents of Gluon's tensors are powers of two, so its product of 96 columns is one of 128. The instruction itself
takes any multiple of 8. Here it is written as assembly, for values of such widths, and for tiles of as many keys. A
product is in tensors of PIECE columns, whose registers, one piece after the other, are those of the instruction. The
probabilities are split in pieces likewise.

The instruction needs the addresses of its operands in shared memory (`addresses.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.pipeline import pieces_of
from quire.kernels.hopper.work_tile import ROWS

PIECE = gl.constexpr(16)  # columns of a piece; keys of one product with values, columns of one with keys


@gluon.constexpr_function
def num_pieces(columns):
    """Return how many pieces so many columns are in."""
    return (columns + PIECE.value - 1) // PIECE.value


@gluon.constexpr_function
def layout_of_piece():
    """Return the layout of a piece: of an accumulator, of scores, and of as many probabilities."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE.value, 16])


@gluon.constexpr_function
def descriptor_of(between_panels):
    """Return the descriptor of a matrix at address 0, with so many bytes between its panels of 64 columns.

    The numbers of bytes are in units of 16: between panels, and between rows of eight. Rows of 128 bytes are swizzled.
    Only instructions for values read the first number: those for queries and keys stay in one panel.
    """
    return (between_panels // 16) << 16 | (1024 // 16) << 32 | 1 << 62


@gluon.constexpr_function
def scores_text(keys, columns, q_panels, element):
    """Return PTX that begins a product of queries and keys.

    The operands are the scores, 64 rows of whole pieces; for each panel of 64 columns the address of the 64 rows of
    queries; and the address of the keys, `keys` rows in panels.
    """
    numbers, each = num_pieces(keys) * PIECE.value // 2, PIECE.value // 2  # registers of a thread
    name = "bf16" if element == gl.bfloat16 else "f16"
    scores = ", ".join(f"${i}" for i in range(keys // 2))
    lines = [
        ".reg .b32 at; .reg .b64 keys, queries<4>; .reg .pred begins, adds; "
        "setp.ne.u32 begins, 0, 0; setp.eq.u32 adds, 0, 0;"
    ]
    names = [f"queries{i}" for i in range(q_panels)] + ["keys"]
    for i, operand in enumerate(names):
        lines.append(
            f"bfe.u32 at, ${numbers + each * i}, 4, 14; cvt.u64.u32 {operand}, at; "
            f"or.b64 {operand}, {operand}, {descriptor_of(16)};"
        )
    lines.append("wgmma.fence.sync.aligned;")
    for i in range((columns + 15) // 16):
        if i > 0:
            in_panel = i % 4 > 0
            if in_panel:
                lines.append(f"add.s64 queries{i // 4}, queries{i // 4}, {16 * 2 // 16};")
            lines.append(f"add.s64 keys, keys, {(16 * 2 if in_panel else keys * 128 - 48 * 2) // 16};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.{name}.{name} {{{scores}}}, queries{i // 4}, keys, "
            f"{'adds' if i else 'begins'}, 1, 1, 0, 0;"
        )
    return "{ " + " ".join(lines) + " wgmma.commit_group.sync.aligned; }"


@gluon.constexpr_function
def scores_constraints(keys, q_panels):
    """Return the constraints of `scores_text`."""
    each = PIECE.value // 2
    return ",".join(["=f"] * num_pieces(keys) * each + ["r"] * each * (q_panels + 1))


@gluon.constexpr_function
def product_text(columns, keys, element):
    """Return PTX that begins to add the product of probabilities and values to accumulators, in place.

    The operands are the accumulators, 64 rows of whole pieces; they once more; the probabilities, 64 rows of `keys`;
    and the address of the values, `keys` rows in panels of 64 columns.
    """
    sums, numbers = num_pieces(columns) * PIECE.value // 2, keys // 4  # registers of a thread
    name = "bf16" if element == gl.bfloat16 else "f16"
    accs = ", ".join(f"${i}" for i in range(columns // 2))
    descriptor = descriptor_of(keys * 128)
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
def address_operand(address):
    """Return an address as an operand of a product, whose threads pass as many registers of it as of a piece."""
    return gl.full([ROWS, PIECE], address, gl.int32, layout_of_piece())


@gluon.jit
def addresses_of_queries(wg: gl.constexpr, q_pipe, stage):
    """Return the address of each panel of a warpgroup's queries, as operands."""
    addresses = addresses_of_panels(wg, q_pipe.addresses[0], stage, q_pipe.tiles)
    for i in gl.static_range(len(q_pipe.more)):
        addresses = addresses + addresses_of_panels(wg, q_pipe.addresses[i + 1], stage, q_pipe.more[i])
    return addresses


@gluon.jit
def addresses_of_panels(wg: gl.constexpr, address, stage, tiles):
    """Return those of the panels in one buffer, of which the first stage has an address."""
    PANELS: gl.constexpr = tiles.shape[2] // 64
    addresses = ()
    for i in gl.static_range(PANELS):
        rows = (stage * PANELS + i) * tiles.shape[1] + wg * ROWS
        addresses = addresses + (address_operand(address + rows * 128),)
    return addresses


@gluon.jit
def begin_scores(q, k_pipe, stage, element: gl.constexpr, KEYS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Begin the product of queries, by the addresses of their panels, and a tile of KEYS keys. Return it in pieces."""
    at = address_operand(k_pipe.addresses[0] + stage * k_pipe.BYTES)
    return gl.inline_asm_elementwise(
        scores_text(KEYS, HEAD_DIM, len(q), element), scores_constraints(KEYS, len(q)),
        q + (at,), dtype=float32_each(num_pieces(KEYS)), is_pure=False, pack=PIECE // 2,
    )  # fmt: skip


@gluon.jit
def add_product(p, v_pipe, stage, accs, HEAD_DIM_V: gl.constexpr):
    """Begin to add the product of probabilities and a tile of values to accumulators."""
    KEYS: gl.constexpr = len(p) * PIECE
    at = address_operand(v_pipe.addresses[0] + stage * v_pipe.BYTES)
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
