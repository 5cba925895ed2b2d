"""Numbers that each row reads one after the other, from key to key backwards, as a relative bias by distance is.

A thread would load one number for each score, from as many cache lines as a warp has rows. Here each warp copies its
rows' runs of 16-bit numbers to shared memory while products of their tile run. A tile that needs them reads from there.

Copies are of 16 bytes, so a row has room for one more of them than numbers. What is not of the extra is not copied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.addresses import address_of
from quire.kernels.hopper.products import PIECE, float32_each, joined, layout_of_piece
from quire.kernels.hopper.work_tile import ROWS

EACH = gl.constexpr(PIECE.value // 2)  # registers of a thread in a piece
REGISTERS = ".reg .b32 lane, part, low, at, to, off, size; .reg .b64 block, from; .reg .pred in; .reg .b16 none, half; "
LANE = "mov.u32 lane, %laneid; and.b32 part, lane, 3; "
ARRIVED = "cp.async.wait_all; bar.warp.sync 0xffffffff; "
WAIT_TEXT = gl.constexpr("{ " + ARRIVED + " ".join(f"mov.b32 ${i}, 0;" for i in range(EACH.value)) + " }")


@gluon.constexpr_function
def pitch_of(keys):
    """Return the bytes of a row: with this number, eight rows are in different banks."""
    return 2 * keys + 16


@gluon.constexpr_function
def kib_of(keys):
    """Return the KiB of a warpgroup."""
    return ROWS.value * pitch_of(keys) // 1024


@gluon.constexpr_function
def copy_text(keys):
    """Return PTX that begins to copy. Four threads share a row.

    The operands are for each row the address of the first key's number, that of the row in shared memory, the address
    of the first number that is there, and how many bytes there are.
    """
    lines = [f"mov.b32 ${i}, 0;" for i in range(EACH.value)]
    for half in (0, 2):
        address, to, begin, size = (f"${EACH.value * i + half}" for i in range(1, 5))
        lines += [
            f"and.b64 block, {address}, -16; shl.b32 at, part, 4; cvt.u64.u32 from, at; sub.s64 block, block, from; "
            f"sub.s32 to, {to}, at; add.s32 to, to, {2 * keys}; sub.s64 from, block, {begin}; cvt.u32.u64 off, from; "
            f"add.s32 off, off, 15; add.s32 size, {size}, 15;"
        ]
        for i in range(keys // 32):
            lines += [
                f"setp.lt.u32 in, off, size; add.s32 off, off, -64; "
                f"@in cp.async.cg.shared.global [to+{-64 * i}], [block+{-64 * i}], 16;"
            ]
        last = f"[to+{-2 * keys}], [block+{-2 * keys}], 16;"
        lines += [f"setp.lt.u32 in, off, size; setp.eq.and.u32 in, part, 0, in; @in cp.async.cg.shared.global {last}"]
    return "{ " + REGISTERS + ARRIVED + LANE + " ".join(lines) + " }"


@gluon.constexpr_function
def read_text(keys, is_bfloat16):
    """Return PTX that waits for copies and reads. The operands are the first two of `copy_text`."""
    numbers, lines = keys // 2, list[str]()
    widen = "mov.b32 OUT, {none, half};" if is_bfloat16 else "cvt.f32.f16 OUT, half;"
    for half in (0, 2):
        address, to = f"${numbers + half}", f"${numbers + EACH.value + half}"
        lines += [
            f"cvt.u32.u64 low, {address}; and.b32 low, low, 15; shl.b32 at, part, 2; add.s32 to, {to}, low; "
            f"sub.s32 to, to, at; add.s32 to, to, {2 * keys};"
        ]
        for j in range(keys // 8):
            for column in range(2):
                into = widen.replace("OUT", f"${4 * j + half + column}")
                lines += [f"ld.shared.u16 half, [to+{-16 * j - 2 * column}]; {into}"]
    return "{ " + REGISTERS + ARRIVED + LANE + "mov.b16 none, 0; " + " ".join(lines) + " }"


@gluon.constexpr_function
def constraints(written, *read):
    """Return constraints of pieces that are written and read."""
    return ",".join(["=&r"] * (written * EACH.value) + [kind for kind in read for _ in range(EACH.value)])


@gluon.jit
def allocate_runs(WARPGROUPS: gl.constexpr, KEYS: gl.constexpr):
    """Allocate shared memory, which must be marked. Return it, and its address."""
    tiles = gl.allocate_shared_memory(gl.bfloat16, [WARPGROUPS * kib_of(KEYS), 8, 64], gl.NVMMASharedLayout(128, 16, 2))
    return tiles, address_of(tiles.index(0))


@gluon.jit
def rows_of_runs(runs, WG: gl.constexpr, KEYS: gl.constexpr):
    """Return the address of each row of a warpgroup in shared memory, after copies for an earlier work tile.

    A number is read there, so that it stays allocated until the last work tile.
    """
    EVERY: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [1, gl.num_warps()], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout_of_piece()))
    gl.inline_asm_elementwise(
        WAIT_TEXT, constraints(1, "r"), [as_piece(rows, gl.int32)], dtype=gl.int32, is_pure=False, pack=EACH
    )
    number = runs[0].index(WG * kib_of(KEYS)).load(EVERY)
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.bfloat16, is_pure=False, pack=2)
    return runs[1] + WG * (1024 * kib_of(KEYS)) + rows * pitch_of(KEYS)


@gluon.jit
def as_piece(x, dtype: gl.constexpr):
    """Return a number of each row, or of all, as a piece."""
    LAYOUT: gl.constexpr = layout_of_piece()
    if isinstance(x, gl.tensor) and len(x.shape) == 2:
        x = gl.convert_layout(x.to(dtype).reshape([ROWS]), gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
    elif isinstance(x, gl.tensor) and len(x.shape) == 1:
        x = x[:, None]
    return x + gl.zeros([ROWS, PIECE], dtype, LAYOUT)


@gluon.jit
def begin_copies(run, rows, KEYS: gl.constexpr):
    """Begin to copy runs to shared memory, after the warp has read what was there.

    Args:
        run: of each row, the pointers of the number of the tile's first key, and of the row's first number; and how
            many numbers a row has.
        rows: from `rows_of_runs`.
    """
    at, begin, size = run
    gl.inline_asm_elementwise(
        copy_text(KEYS), constraints(1, "l", "r", "l", "r"),
        [as_piece(at, gl.int64), as_piece(rows, gl.int32), as_piece(begin, gl.int64), as_piece(2 * size, gl.int32)],
        dtype=gl.int32, is_pure=False, pack=EACH,
    )  # fmt: skip


@gluon.jit
def read_run(copied, KEYS: gl.constexpr, IS_BFLOAT16: gl.constexpr):
    """Return what was copied of runs, [ROWS, KEYS] in float32.

    Args:
        copied: the pointer of each row's number of the tile's first key, and where rows are in shared memory.
        KEYS: of the tile.
        IS_BFLOAT16: else it is float16.
    """
    numbers = gl.inline_asm_elementwise(
        read_text(KEYS, IS_BFLOAT16), constraints(KEYS // PIECE, "l", "r"),
        [as_piece(copied[0], gl.int64), as_piece(copied[1], gl.int32)],
        dtype=float32_each(KEYS // PIECE), is_pure=False, pack=EACH,
    )  # fmt: skip
    return joined(numbers, KEYS)
