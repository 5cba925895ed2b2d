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

from quire.kernels.gluon.compat import copy_async
from quire.kernels.gluon.pipeline import load_rows

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
def gather_tile(stored, source, head, i, pages, pos, PAGE_SIZE: gl.constexpr):
    """Begin to copy a tile to the i-th use of a pipeline, once that is free.

    Args:
        stored: the keys or values, a `producer.Stored`.
        source: points to the first column to load of head 0 in slot 0 of page 0.
        head: the KV head.
        i: the use.
        pages: of the rows; -1 for rows of zeros.
        pos: position of the first row.
        PAGE_SIZE: slots of a page.

    Columns of the tile behind those of the head are filled with zeros.
    """
    pipe = stored.pipe
    BLOCK_N: gl.constexpr = pipe.tiles.shape[1]
    VEC: gl.constexpr = 128 // pipe.tiles.dtype.primitive_bitwidth  # divides the strides: see `matrices_of_cache`
    LAYOUT: gl.constexpr = layout_of_copies(pipe.tiles)
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
    if BLOCK_N % PAGE_SIZE == 0:
        slots = rows % PAGE_SIZE
    else:
        slots = (pos + rows) % PAGE_SIZE
    # In units of 16 bytes, int32 suffices. Multiplied by VEC, the compiler knows that they are such units.
    head_ptr = source + (head * (stored.stride_head // VEC)).to(gl.int64) * VEC
    offsets = (pages * (stored.stride_page // VEC) + slots * (stored.stride_slot // VEC)).to(gl.int64) * VEC
    stage = pipe.acquire(i)
    buffers = pipe.buffers(stage)
    for at in gl.static_range(len(buffers)):
        gather_columns(buffers[at], head_ptr, offsets, pages >= 0, at * pipe.tiles.shape[2], stored.WIDTH, LAYOUT)
    pipe.commit_copies(stage)


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
def load_places(row, stored, pos, stop, kv_low, PAGE_SIZE: gl.constexpr):
    """Load the pages of the rows of a tile, which begins at position `pos`.

    Returns:
        The page of each row, as `load_pages_of_rows` does. With `tile_desc`, whether TMA loads the tile, and its page.
    """
    pipe = stored.pipe
    if stored.tile_desc is None:
        return (load_pages_of_rows(row, pipe, pos, stop, kv_low, PAGE_SIZE),)
    else:
        BLOCK_N: gl.constexpr = pipe.tiles.shape[1]
        is_box = (pos >= kv_low) & (pos + BLOCK_N <= stop) & (pos % PAGE_SIZE + BLOCK_N <= PAGE_SIZE)
        page = gl.load(row + pos // PAGE_SIZE, mask=is_box, other=0).to(gl.int32)
        pages = load_pages_of_rows(row, pipe, pos, gl.where(is_box, pos, stop), kv_low, PAGE_SIZE)
        return pages, is_box, page


@gluon.jit
def begin_tile(stored, head, i, places, pos, first_column, PAGE_SIZE: gl.constexpr):
    """Begin to load a tile to the i-th use of a pipeline, once that is free.

    Args:
        places: what `load_places` returned.
        first_column: the head's first column to load.
    The others are those of `gather_tile`.
    """
    VEC: gl.constexpr = 128 // stored.pipe.tiles.dtype.primitive_bitwidth
    source = stored.source + first_column // VEC * VEC  # it is a multiple, as the compiler then knows
    if stored.tile_desc is None:
        gather_tile(stored, source, head, i, places[0], pos, PAGE_SIZE)
    else:
        if places[1]:
            # The head's row and column in the TMA matrix are as in `produce`.
            row = places[2] * (stored.stride_page // stored.stride_slot)
            row = row + head * (stored.stride_head // stored.stride_slot) + pos % PAGE_SIZE
            column = stored.stride_head % stored.stride_slot
            if len(stored.tile_desc.block_shape) == 3:  # heads are a dimension
                column = (column > 0).to(gl.int32)
            load_box(stored, row, head * column, first_column, i)
        else:
            gather_tile(stored, source, head, i, places[0], pos, PAGE_SIZE)


@gluon.jit
def load_box(stored, row, head, first_column, i):
    """Begin to load a tile by TMA, as one box."""
    pipe = stored.pipe
    BLOCK_N: gl.constexpr = pipe.tiles.shape[1]
    stage = pipe.acquire(i)
    pipe.expect_tile(stage)
    buffers = pipe.buffers(stage)
    load_rows(stored.tile_desc, row, head, pipe.full.index(stage), buffers, BLOCK_N, 0, BLOCK_N, 0, first_column)
