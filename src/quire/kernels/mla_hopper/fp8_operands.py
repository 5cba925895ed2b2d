"""fp8 latents as operands of tensor cores: converted to float16 in registers, on their way from shared memory.

A product takes one of its two operands from registers. Here that is the tile of latents, as keys or as values. So no
float16 number of the latents is ever stored. float16 represents every e4m3 number exactly.

A warpgroup reads two adjacent columns as one 16-bit element, so that ldmatrix can load and transpose them. A thread's
32-bit register then has four numbers: of keys, columns 4n to 4n + 3 of one latent; of values, columns 2n and 2n + 1 of
two latents. They become two operands. Which columns these hold is the same for all threads, so queries are stored, and
results are written, in the same order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import reinterpret


@gluon.jit
def key_operands(quarter, OPERAND: gl.constexpr):
    """Load keys, [keys, columns] of fp8, as two operands: columns 0 and 1 of every four, and columns 2 and 3."""
    convert: gl.constexpr = """{ .reg .b16 low, high; mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"""
    pairs = column_pairs(quarter).load(OPERAND)
    return gl.inline_asm_elementwise(
        convert, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )  # fmt: skip


@gluon.jit
def value_operands(quarter, OPERAND: gl.constexpr):
    """Load values, [keys, columns] of fp8, as two transposed operands: even columns, and odd columns."""
    convert: gl.constexpr = """{ .reg .b16 even, odd; .reg .b32 both; prmt.b32 both, $2, 0, 0x3120;
        mov.b32 {even, odd}, both; cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd; }"""
    pairs = column_pairs(quarter).permute((1, 0)).load(OPERAND)
    return gl.inline_asm_elementwise(
        convert, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )  # fmt: skip


@gluon.jit
def column_pairs(numbers):
    """Return fp8 numbers in shared memory, [rows, columns], as 16-bit elements, [rows, columns / 2]."""
    BYTES: gl.constexpr = numbers.shape[1]
    return reinterpret(numbers, gl.int16, [numbers.shape[0], BYTES // 2], gl.NVMMASharedLayout(BYTES, 16, 2))


@gluon.jit
def query_operands(q):
    """Split queries, [rows, columns], into the columns that belong to each operand of `key_operands`."""
    ROWS: gl.constexpr = q.shape[0]
    COLUMNS: gl.constexpr = q.shape[1]
    first, second = gl.split(q.reshape([ROWS, COLUMNS // 4, 2, 2]).permute((0, 1, 3, 2)))
    return first.reshape([ROWS, COLUMNS // 2]), second.reshape([ROWS, COLUMNS // 2])


@gluon.jit
def merge_columns(even, odd):
    """Return results, [columns, rows], from those of the operands of `value_operands`."""
    return gl.join(even, odd).permute((0, 2, 1)).reshape([2 * even.shape[0], even.shape[1]])
