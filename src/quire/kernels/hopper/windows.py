"""Numbers of the distance between a query and a key: computed once for each distance of a warp, then spread.

A warp has sixteen tokens of a head, so its rows have few distances to a tile's keys: 143 to 128 of them. Thread i of
window k has the number of distance `first - 24 k - 15 + i`, `first` being that of the warp's first row and the tile's
first key. A thread's scores of eight columns have fifteen distances at most among its warp's threads, and a window has
those of three times eight columns. So each score needs one shuffle, where it would need the function.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.products import PIECE, float32_each, joined, layout_of_piece
from quire.kernels.hopper.work_tile import ROWS

IN_WARP = gl.constexpr(16)  # rows


@gluon.constexpr_function
def spread_text(keys):
    """Return PTX that moves numbers of windows to scores.

    The operands are the scores' numbers, the windows in a piece, and in another one the thread that has the number of
    a thread's first row and first column, in the window that begins with the eight columns.
    """
    numbers, each = keys // 2, PIECE.value // 2
    lines = [".reg .b32 at<6>;"]
    for i in range(3):
        lines += [f"add.s32 at{2 * i + b}, ${numbers + each}, {8 * i - b};" for b in range(2)]
    for n in range(numbers):
        blocks, half, column = n // 4, n // 2 % 2, n % 2
        window, place = divmod(blocks - half + 1, 3)
        source = f"${numbers + window}, at{2 * (2 - place) + column}"
        lines.append(f"shfl.sync.idx.b32 ${n}, {source}, 0x1f, 0xffffffff;")
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def spread_constraints(keys):
    """Return the constraints of `spread_text`."""
    each = PIECE.value // 2
    return ",".join(["=&f"] * (keys // 2) + ["f"] * each + ["r"] * each)


@gluon.jit
def rows_and_columns():
    """Return the rows and the columns of a piece."""
    LAYOUT: gl.constexpr = layout_of_piece()
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    return rows, gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def keys_of_windows(pos):
    """Return the position that a key has, at each place of the windows, if the query is the row's."""
    rows, columns = rows_and_columns()
    window = columns // 8 * 4 + rows % IN_WARP // 8 * 2 + columns % 2
    thread = rows % 8 * 4 + columns % 8 // 2
    return pos + rows % IN_WARP + 24 * window + 15 - thread


@gluon.jit
def of_windows(x):
    """Return numbers of rows, [ROWS, 1], for windows; a number of all rows as it is."""
    if isinstance(x, gl.tensor) and len(x.shape) == 2:
        LAYOUT: gl.constexpr = gl.SliceLayout(1, layout_of_piece())
        return gl.convert_layout(x.reshape([ROWS]), LAYOUT, assert_trivial=True)[:, None]
    else:
        return x


@gluon.jit
def each_of_windows(several):
    """Return a tuple of such numbers for windows."""
    results = ()
    for i in gl.static_range(len(several)):
        results = results + (of_windows(several[i]),)
    return results


@gluon.jit
def spread(numbers, KEYS: gl.constexpr):
    """Return the numbers of windows at the places of scores, [ROWS, KEYS]."""
    LAYOUT: gl.constexpr = layout_of_piece()
    rows, columns = rows_and_columns()
    thread = rows % 8 - columns % 8 // 2 * 2 + 7
    numbers = numbers.to(gl.float32) + gl.zeros([ROWS, PIECE], gl.float32, LAYOUT)
    parts = gl.inline_asm_elementwise(
        spread_text(KEYS), spread_constraints(KEYS), (numbers, thread), dtype=float32_each(KEYS // PIECE),
        is_pure=False, pack=PIECE // 2,
    )  # fmt: skip
    return joined(parts, KEYS)
