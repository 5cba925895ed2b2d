"""Addresses of tiles in shared memory, for assembly that reads them. Gluon does not tell them.

A program first stores in each KiB of its shared memory the address of that KiB, as its first word. Tiles of swizzled
rows begin at multiples of 1 KiB, so the first word of a tile is its address. `address_of` reads it before the tile is
used.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import barrier, reinterpret


@gluon.jit
def mark_shared_memory():
    """Store the address of each KiB of shared memory there, before barriers and tiles are."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    gl.inline_asm_elementwise(
        "{ .reg .b32 size; .reg .pred inside; mov.u32 size, %dynamic_smem_size; shl.b32 $0, $1, 10; "
        "setp.lt.u32 inside, $0, size; mov.u32 size, global_smem; add.u32 $0, $0, size; "
        "@inside st.shared.u32 [$0], $0; }",
        "=&r,r", [gl.arange(0, 256, EACH)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    barrier()


@gluon.jit
def address_of(tile):
    """Return the address of a marked tile."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words = reinterpret(tile, gl.int32, [tile.shape[0] * tile.shape[1] // 2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    address = gl.sum(words.index(0).load(LAYOUT), 0)
    barrier()
    return address
