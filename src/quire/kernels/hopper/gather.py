"""Load tiles of keys and values row by row, where pages are too small for the boxes of TMA.

Each row of a tile may be in another page. The four warps of the producer copy rows in pieces of 16 bytes (`cp.async`)
to where TMA would put them, so consumers read the same tiles. Rows that may not be read are filled with zeros.

The producer waits for no copy. When a thread has begun its copies of a tile, it lets them arrive at the tile's barrier
as soon as they are complete, and begins those of the next tile.

Where `HopperLaunch.boxes` says so, a tile that lies in one page, and that is all visible, is one box of TMA, which can
begin at any row of a page.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from quire.kernels.hopper.pipeline import (
    buffers_of,
    bytes_of_tile,
    commit_copies,
    expect_box,
    load_rows,
    producer_acquire,
)

# This was renamed after Triton 3.6.
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

WARPS = gl.constexpr(4)  # of a producer that gathers


@gluon.constexpr_function
def layout_of_copies(tiles):
    """Return the layout in which a pipeline's tiles are copied: a thread has 16 bytes of a row.

    At most eight threads share a row. So tiles of keys and values have the same rows in a thread, whatever their width.
    """
    bits = tiles.dtype.primitive_bitwidth
    threads = min(8, tiles.shape[2] * bits // 128)
    return gl.BlockedLayout([1, 128 // bits], [32 // threads, threads], [WARPS.value, 1], [1, 0])


@gluon.jit
def load_pages_of_rows(row, pipe, pos, stop, kv_low, PAGE_SIZE: gl.constexpr):
    """Load the page of each row of a tile that begins at position `pos`; -1 for rows outside of [kv_low, stop)."""
    LAYOUT: gl.constexpr = layout_of_copies(pipe.tiles)
    kv_pos = pos + gl.arange(0, pipe.tiles.shape[1], gl.SliceLayout(1, LAYOUT))
    return gl.load(row + kv_pos // PAGE_SIZE, mask=(kv_pos >= kv_low) & (kv_pos < stop), other=-1).to(gl.int32)


@gluon.jit
def gather_tile(
    source, head, pipe, i, pages, pos, stride_page, stride_slot, stride_head,
    WIDTH: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Begin to copy a tile to the i-th use of a pipeline, once that is free.

    Args:
        source: points to head 0 in slot 0 of page 0.
        head: the KV head.
        pipe: the pipeline.
        i: the use.
        pages: of the rows; -1 for rows of zeros.
        pos: position of the first row.
        stride_page, stride_slot, stride_head: of the cache, in elements.
        WIDTH: columns of the head. Further columns of the tile are filled with zeros.
        PAGE_SIZE: slots of a page.
    """
    BLOCK_N: gl.constexpr = pipe.tiles.shape[1]
    VEC: gl.constexpr = 128 // pipe.tiles.dtype.primitive_bitwidth  # divides the strides: see `matrices_of_cache`
    LAYOUT: gl.constexpr = layout_of_copies(pipe.tiles)
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    if BLOCK_N % PAGE_SIZE == 0:
        slots = rows % PAGE_SIZE
    else:
        slots = (pos + rows) % PAGE_SIZE
    # In units of 16 bytes, int32 suffices. Multiplied by VEC, the compiler knows that they are such units.
    head_ptr = source + (head * (stride_head // VEC)).to(gl.int64) * VEC
    offsets = (pages * (stride_page // VEC) + slots * (stride_slot // VEC)).to(gl.int64) * VEC
    stage = producer_acquire(pipe, i)
    buffers = buffers_of(pipe, stage)
    for at in gl.static_range(len(buffers)):
        gather_columns(buffers[at], head_ptr, offsets, pages >= 0, at * pipe.tiles.shape[2], WIDTH, LAYOUT)
    commit_copies(pipe, stage)


@gluon.jit
def gather_columns(buffer, head_ptr, offsets, visible, FIRST: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Begin to copy columns of a head, from column FIRST on, to a buffer of a tile."""
    COLUMNS: gl.constexpr = buffer.shape[1]
    cols = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    inside = visible[:, None]
    if FIRST + COLUMNS > WIDTH:
        inside = inside & (cols < WIDTH)[None, :]
    copy_async(buffer, (head_ptr + cols)[None, :] + offsets[:, None], mask=inside)


@gluon.jit
def load_places(row, pipe, pos, stop, kv_low, PAGE_SIZE: gl.constexpr, HAS_BOXES: gl.constexpr):
    """Load the pages of the rows of a tile, which begins at position `pos`.

    Returns:
        The page of each row, as `load_pages_of_rows` does. With HAS_BOXES, whether TMA loads the tile, and its page.
    """
    if not HAS_BOXES:
        return (load_pages_of_rows(row, pipe, pos, stop, kv_low, PAGE_SIZE),)
    else:
        BLOCK_N: gl.constexpr = pipe.tiles.shape[1]
        is_box = (pos >= kv_low) & (pos + BLOCK_N <= stop) & (pos % PAGE_SIZE + BLOCK_N <= PAGE_SIZE)
        page = gl.load(row + pos // PAGE_SIZE, mask=is_box, other=0).to(gl.int32)
        pages = load_pages_of_rows(row, pipe, pos, gl.where(is_box, pos, stop), kv_low, PAGE_SIZE)
        return pages, is_box, page


@gluon.jit
def begin_tile(
    source, desc, head, pipe, i, places, pos, stride_page, stride_slot, stride_head, first_column,
    WIDTH: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Begin to load a tile to the i-th use of a pipeline, once that is free.

    Args:
        source: points to head 0 in slot 0 of page 0.
        desc: TMA descriptor whose boxes have a tile's rows, or None.
        places: what `load_places` returned.
        first_column: the head's first column to load.
    The others are those of `gather_tile`.
    """
    VEC: gl.constexpr = 128 // pipe.tiles.dtype.primitive_bitwidth
    source += first_column // VEC * VEC  # it is a multiple, as the compiler then knows
    if desc is None:
        gather_tile(source, head, pipe, i, places[0], pos, stride_page, stride_slot, stride_head, WIDTH, PAGE_SIZE)
    else:
        if places[1]:
            # The head's row and column in the TMA matrix are as in `produce`.
            row = places[2] * (stride_page // stride_slot) + head * (stride_head // stride_slot) + pos % PAGE_SIZE
            column = stride_head % stride_slot
            if len(desc.block_shape) == 3:  # heads are a dimension
                column = (column > 0).to(gl.int32)
            load_box(desc, row, head * column, first_column, pipe, i)
        else:
            gather_tile(source, head, pipe, i, places[0], pos, stride_page, stride_slot, stride_head, WIDTH, PAGE_SIZE)


@gluon.jit
def load_box(desc, row, head, first_column, pipe, i):
    """Begin to load a tile by TMA, as one box."""
    BLOCK_N: gl.constexpr = pipe.tiles.shape[1]
    stage = producer_acquire(pipe, i)
    expect_box(pipe, stage, bytes_of_tile(pipe.tiles, pipe.more, pipe.empty))
    buffers = buffers_of(pipe, stage)
    load_rows(desc, row, head, pipe.full.index(stage), buffers, BLOCK_N, 0, BLOCK_N, 0, first_column)
