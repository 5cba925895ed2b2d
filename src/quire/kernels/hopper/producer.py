"""The producer warp takes one work tile after the other and loads its queries, keys and values by TMA, page by page.

Where pages are too small for TMA, the producer has four warps, which gather keys and values row by row (`gather.py`).

It loads as soon as a pipeline has a free stage, also for the next work tile while consumers still process this one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from quire.kernels.hopper.addresses import reinterpret
from quire.kernels.hopper.gather import begin_tile, load_places
from quire.kernels.hopper.pipeline import (
    SPARES,
    SWIZZLE_BYTES,
    buffers_of,
    bytes_of_tile,
    columns_of,
    expect_bytes,
    load_rows,
    producer_acquire,
    wait,
)
from quire.kernels.hopper.queue import first_work_tile, last_number, make_queue, take, taken_work_tile
from quire.kernels.hopper.tile_scheduler import (
    count_row_blocks,
    find_work_tile,
    keep_ends,
    order_by_keys,
    place_of_work_tile,
    row_block_ends,
)
from quire.kernels.hopper.work_tile import ROWS, WorkTile, publish_work_tile, visible_keys
from quire.kernels.panels import power_of_two


@gluon.constexpr_function
def zeros_before(columns, first):
    """Return how many columns of zeros come before those of queries and keys; none if a head's columns come first.

    TMA is slow where it fills a part of 32 bytes with zeros, and less slow if that comes first: 8 x 512 with heads of
    24 takes 44 us instead of 47, and 4,096 with heads of 88 229 instead of 233 (NVIDIA H100, 2026-11-26).
    Batch-invariant plans add products in the order of the portable kernels, which have no such columns.
    """
    return 0 if first else columns % 16


@gluon.jit
def produce(
    q_pipe, k_pipe, v_pipe, published, places, q_desc, k_source, v_source, k_tile_desc, v_tile_desc, batch,
    tile_counter, num_splits, section, stride_table, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_T: gl.constexpr, HEADS: gl.constexpr, BLOCK_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr, KV_BOX: gl.constexpr, FIRST_TO_LAST: gl.constexpr, PARTS: gl.constexpr,
    CUT_SLOTS: gl.constexpr, MIXED: gl.constexpr, APART: gl.constexpr, last_part, lse_ptr, stride_lse,
):  # fmt: skip
    """Take work tiles until there are none left, and load their queries, keys and values. The producer runs this.

    Tiles of a quantised cache go to pipelines of raw bytes, from which `convert` reads.
    The KV tiles of a work tile are loaded from the last to the first, unless FIRST_TO_LAST.
    With PARTS > 1, a work tile has one of PARTS parts of the values' columns, each of HEAD_DIM_V columns. If the last
    part begins in the one before it, it does so at column `last_part`.
    With CUT_SLOTS, row blocks of long sequences are cut by keys. With MIXED, work tiles are taken from both ends.
    With APART, each of two warpgroups has half of a row block's tokens.
    Where there are splits, one without keys is not handed to consumers.
    """
    STEP: gl.constexpr = 1 if FIRST_TO_LAST else -1
    GATHERS: gl.constexpr = KV_BOX == 0
    HAS_BOXES: gl.constexpr = GATHERS and k_tile_desc is not None
    HEAD_BLOCKS: gl.constexpr = NUM_KV_HEADS * GROUP // HEADS
    V_BYTES: gl.constexpr = bytes_of_tile(v_pipe.tiles, v_pipe.more, v_pipe.empty)
    Q_NUMBERS: gl.constexpr = HEADS * BLOCK_T * columns_of(q_pipe.tiles, q_pipe.more)
    Q_ROWS: gl.constexpr = q_pipe.tiles.shape[1]
    CONVERTED: gl.constexpr = k_pipe.tiles.dtype != q_pipe.tiles.dtype
    HAS_EDGES: gl.constexpr = not GATHERS and not CONVERTED  # rows that may not be read are zeroed
    SPLITS: gl.constexpr = isinstance(num_splits, gl.tensor)  # one split is a constexpr
    # Few registers are left. Only where rows see a band is there memory for ends.
    FEW_REGISTERS: gl.constexpr = (MIXED or (SPLITS and batch.kv.key_begin is None)) and HAS_EDGES
    # The only buffer of queries becomes free late, so the next work tile's first keys are loaded before its queries.
    KEYS_FIRST: gl.constexpr = q_pipe.tiles.shape[0] == 1
    LEAST_ROWS: gl.constexpr = q_desc.block_shape[0]
    THREADS: gl.constexpr = 32 * gl.num_warps()
    ONE_EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ZEROS: gl.constexpr = zeros_before(HEAD_DIM, GATHERS or CONVERTED or FIRST_TO_LAST)
    kv = batch.kv
    work_i = 0
    tile_i = 0
    edge_i = 0
    k_page, v_page = kv.k_page // kv.k_slot, kv.v_page // kv.v_slot  # in rows of the TMA matrix
    k_row, k_col = kv.k_head // kv.k_slot, kv.k_head % kv.k_slot  # one of them is 0
    v_row, v_col = kv.v_head // kv.v_slot, kv.v_head % kv.v_slot
    if not GATHERS:
        if len(k_source.block_shape) == 3:  # heads are a dimension
            k_col = (k_col > 0).to(gl.int32)
        if len(v_source.block_shape) == 3:
            v_col = (v_col > 0).to(gl.int32)
    lane = gl.arange(0, THREADS, ONE_EACH)
    ends = row_block_ends(batch, 0, BLOCK_T)
    num_singles, from_back = 0, 0
    if CUT_SLOTS > 0:
        ends, num_singles, from_back = order_by_keys(
            batch, ends, places, HEAD_BLOCKS * PARTS, BLOCK_T, BLOCK_N, CUT_SLOTS, MIXED
        )
    num_row_blocks = count_row_blocks(batch, ends, BLOCK_T)
    num_work_tiles = num_row_blocks * HEAD_BLOCKS * num_splits
    if PARTS > 1:
        num_work_tiles *= PARTS
    # Lengths may differ, and a work tile that starts last should be short.
    if kv.key_begin is None and CUT_SLOTS == 0 and (batch.num_seqs > 1) & (num_work_tiles > gl.num_programs(0)):
        ends, num_singles, from_back = order_by_keys(
            batch, ends, places, HEAD_BLOCKS * PARTS * num_splits, BLOCK_T, BLOCK_N, 0, MIXED
        )
    if FEW_REGISTERS:
        keep_ends(places, ends)
    queue = make_queue(num_work_tiles, num_singles * HEAD_BLOCKS * PARTS * num_splits, from_back)
    index, backwards = first_work_tile(queue, MIXED)
    while index < num_work_tiles:
        row_block, head, split, part = place_of_work_tile(
            index, num_row_blocks, num_singles, section, num_splits, HEAD_BLOCKS, HEADS, PARTS, MIXED
        )
        seq, work, keys, kv_stop = find_work_tile(
            batch, ends, places, row_block, head, split, part, num_splits, HEAD_BLOCKS, HEADS, BLOCK_T, BLOCK_N,
            FIRST_TO_LAST, PARTS, CUT_SLOTS, FEW_REGISTERS,
        )  # fmt: skip
        first_value = 0  # column
        if PARTS > 1:
            first_value = part * HEAD_DIM_V
            if last_part is not None:
                first_value = gl.minimum(first_value, last_part)
        tile, left = work.tile, work.num_tiles
        taken = gl.zeros([THREADS], gl.int32, ONE_EACH)
        if kv.cu_pages is None:
            row = kv.page_table + seq.to(gl.int64) * stride_table
        else:
            row = kv.page_table + gl.load(kv.cu_pages + seq)
        if kv.key_begin is None:
            kv_low, kv_high = visible_keys(work, batch.window_left, batch.window_right)
        else:
            kv_low, kv_high = keys.kv_low, keys.kv_high
        kv_head = head // GROUP
        pos = tile * BLOCK_N
        if GATHERS:
            pages = load_places(row, k_pipe, pos, kv_high, kv_low, PAGE_SIZE, HAS_BOXES)
        else:
            pages = load_page_numbers(row, pos + lane * KV_BOX, pos + BLOCK_N, kv_low, kv_high, PAGE_SIZE, KV_BOX)
        if SPLITS and (pos >= kv_stop) & (split < num_splits - 1):  # the last split adds sinks
            store_empty(lse_ptr, stride_lse, num_splits, split, work, BLOCK_T, HEADS)
            taken = take(tile_counter, lane, lane == 0, backwards, MIXED)
            left = left * 0
        else:
            if KEYS_FIRST and work_i > 0:
                if GATHERS:
                    begin_tile(
                        k_source, k_tile_desc, kv_head, k_pipe, tile_i, pages, pos, kv.k_page, kv.k_slot, kv.k_head, 0,
                        HEAD_DIM, PAGE_SIZE,
                    )  # fmt: skip
                else:
                    boxes = find_boxes(
                        pages, lane, pos, k_page, kv_head * k_row, BLOCK_N, PAGE_SIZE, KV_BOX, FEW_REGISTERS
                    )
                    load_keys(
                        k_source, k_tile_desc, k_pipe, tile_i, boxes, pos, kv_low, kv_high, k_page, kv_head * k_row,
                        kv_head * k_col, BLOCK_N, PAGE_SIZE, KV_BOX, FEW_REGISTERS, ZEROS,
                    )  # fmt: skip
            stage = producer_acquire(q_pipe, work_i)
            publish_work_tile(published, stage, work, keys)
            expect_bytes(q_pipe.full, stage, Q_NUMBERS * q_pipe.tiles.dtype.primitive_bitwidth // 8)
            loaded = q_pipe.full.index(stage)
            buffers = buffers_of(q_pipe, stage)
            load_rows(q_desc, head, work.q_start + work.token, loaded, buffers, Q_ROWS, 0, LEAST_ROWS, ZEROS)
            if APART:
                token = work.q_start + work.token + BLOCK_T // 2
                load_rows(q_desc, head, token, loaded, buffers, Q_ROWS, ROWS, LEAST_ROWS, ZEROS)
            work_i += 1

        waits = left < 0  # whether `finish_edge` has to hand over the last tile of values
        while left > 0:
            of_tile = pages
            if not GATHERS:
                boxes = find_boxes(
                    pages, lane, tile * BLOCK_N, k_page, kv_head * k_row, BLOCK_N, PAGE_SIZE, KV_BOX, FEW_REGISTERS
                )
            # Prefetch the next tile's page numbers. Take the next work tile only during the last tile, so that an idle
            # program can take it first.
            pos = (tile + STEP) * BLOCK_N
            stop = gl.where(left > 1, pos + BLOCK_N, pos)
            if GATHERS:
                pages = load_places(row, k_pipe, pos, gl.minimum(stop, kv_high), kv_low, PAGE_SIZE, HAS_BOXES)
            else:
                pages = load_page_numbers(row, pos + lane * KV_BOX, stop, kv_low, kv_high, PAGE_SIZE, KV_BOX)
            taken = take(tile_counter, lane, (lane == 0) & (left == 1), backwards, MIXED)
            if GATHERS:
                if not KEYS_FIRST or (left < work.num_tiles) | (work_i == 1):
                    begin_tile(
                        k_source, k_tile_desc, kv_head, k_pipe, tile_i, of_tile, tile * BLOCK_N,
                        kv.k_page, kv.k_slot, kv.k_head, 0, HEAD_DIM, PAGE_SIZE,
                    )  # fmt: skip
                begin_tile(
                    v_source, v_tile_desc, kv_head, v_pipe, tile_i, of_tile, tile * BLOCK_N,
                    kv.v_page, kv.v_slot, kv.v_head, first_value, HEAD_DIM_V, PAGE_SIZE,
                )  # fmt: skip
            else:
                if not KEYS_FIRST or (left < work.num_tiles) | (work_i == 1):
                    load_keys(
                        k_source, k_tile_desc, k_pipe, tile_i, boxes, tile * BLOCK_N, kv_low, kv_high, k_page,
                        kv_head * k_row, kv_head * k_col, BLOCK_N, PAGE_SIZE, KV_BOX, FEW_REGISTERS, ZEROS,
                    )  # fmt: skip
                if FEW_REGISTERS:
                    boxes = find_boxes(
                        of_tile, lane, tile * BLOCK_N, v_page, kv_head * v_row, BLOCK_N, PAGE_SIZE, KV_BOX,
                        FEW_REGISTERS,
                    )  # fmt: skip
                barrier = tile_i % v_pipe.empty.shape[0]
                if HAS_EDGES:
                    # A tile with invisible rows completes a spare barrier, and `finish_edge` hands it over.
                    all_visible = (tile * BLOCK_N >= kv_low) & (tile * BLOCK_N + BLOCK_N <= kv_high)
                    spare = spare_barrier(v_pipe.empty, edge_i + gl.where(waits, 1, 0))
                    barrier = gl.where(all_visible, barrier, spare)
                stage = producer_acquire(v_pipe, tile_i)
                expect_bytes(v_pipe.full, barrier, V_BYTES)
                load_kv_tile(
                    v_source, v_tile_desc, v_pipe, stage, v_pipe.full.index(barrier), boxes, tile * BLOCK_N,
                    kv_low, kv_high, v_page, kv_head * v_row, kv_head * v_col, BLOCK_N, PAGE_SIZE, KV_BOX,
                    FEW_REGISTERS, 0, first_value,
                )  # fmt: skip
                if HAS_EDGES:
                    last_pos = (tile - STEP) * BLOCK_N
                    edge_i = finish_edge(v_pipe, tile_i - 1, waits, last_pos, kv_low, kv_high, edge_i, BLOCK_N)
                    waits = barrier != stage
            tile_i += 1
            tile += STEP
            left -= 1
        if HAS_EDGES:
            last_pos = (tile - STEP) * BLOCK_N
            edge_i = finish_edge(v_pipe, tile_i - 1, waits, last_pos, kv_low, kv_high, edge_i, BLOCK_N)
        index, backwards = taken_work_tile(queue, lane, taken, backwards, MIXED)
    if index == last_number(queue):  # the last program resets the counter for the next launch
        gl.store(tile_counter, 0)
    stage = producer_acquire(q_pipe, work_i)
    publish_work_tile(published, stage, WorkTile(0, 0, 0, 0, 0, 0, 0, 0, 0), ())
    expect_bytes(q_pipe.full, stage, 0)


@gluon.jit
def load_keys(
    k_source, k_tile_desc, k_pipe, tile_i, boxes, pos, kv_low, kv_high, page_rows, row, col, BLOCK_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr, KV_BOX: gl.constexpr, AS_ROWS: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """Load the keys from position `pos` on, the tile_i-th tile of the pipeline."""
    stage = producer_acquire(k_pipe, tile_i)
    expect_bytes(k_pipe.full, stage, bytes_of_tile(k_pipe.tiles, k_pipe.more, k_pipe.empty))
    load_kv_tile(
        k_source, k_tile_desc, k_pipe, stage, k_pipe.full.index(stage), boxes, pos, kv_low, kv_high, page_rows, row,
        col, BLOCK_N, PAGE_SIZE, KV_BOX, AS_ROWS, ZEROS,
    )  # fmt: skip


@gluon.jit
def find_boxes(
    pages, lane, pos, page_rows, row, BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr, KV_BOX: gl.constexpr,
    AS_ROWS: gl.constexpr,
):  # fmt: skip
    """Return where the boxes of the tile at position `pos` are, from the lanes, each of which has the page of a box.

    Each box is told by its page; with AS_ROWS, by its row of the TMA matrix. That is known for keys or for values
    alone, but takes fewer registers of a warp. The other arguments are those of `load_kv_tile`.
    """
    numbers = pages
    if AS_ROWS:
        numbers = pages * page_rows + row + (pos + lane * KV_BOX) % PAGE_SIZE
    boxes = ()
    for box in gl.static_range(BLOCK_N // KV_BOX):
        boxes = boxes + (gl.sum(gl.where(lane == box, numbers, 0), 0),)
    return boxes


@gluon.jit
def row_of_box(
    boxes, box: gl.constexpr, pos, page_rows, row, PAGE_SIZE: gl.constexpr, KV_BOX: gl.constexpr, AS_ROWS: gl.constexpr
):
    """Return the row of the TMA matrix at which one of the boxes that `find_boxes` returned begins."""
    if AS_ROWS:
        return boxes[box]
    else:
        return boxes[box] * page_rows + row + (pos + box * KV_BOX) % PAGE_SIZE


@gluon.jit
def store_empty(lse_ptr, stride_lse, num_splits, split, work, BLOCK_T: gl.constexpr, HEADS: gl.constexpr):
    """Store the state of a work tile whose split has no keys. Its lse says that, and its out is not read."""
    ROWS: gl.constexpr = power_of_two(HEADS * BLOCK_T)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = gl.arange(0, ROWS, LAYOUT)
    tokens = work.token + rows % BLOCK_T
    offsets = (work.q_start + tokens).to(gl.int64) * stride_lse + (work.head + rows // BLOCK_T) * num_splits + split
    lse = gl.full([ROWS], float("-inf"), gl.float32, LAYOUT)
    gl.store(lse_ptr + offsets, lse, mask=(tokens < work.q_len) & (rows < HEADS * BLOCK_T))


@gluon.jit
def load_page_numbers(row, pos, stop, kv_low, kv_high, PAGE_SIZE: gl.constexpr, KV_BOX: gl.constexpr):
    """Load the pages of the boxes at positions `pos` that begin before `stop` and hold a key from [kv_low, kv_high)."""
    inside = (pos < stop) & (pos + KV_BOX > kv_low) & (pos < kv_high)
    return gl.load(row + pos // PAGE_SIZE, mask=inside, other=0).to(gl.int32)


@gluon.jit
def load_kv_tile(
    desc, tile_desc, pipe, stage, barrier, boxes, pos, kv_low, kv_high, page_rows, row, col, BLOCK_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr, KV_BOX: gl.constexpr, AS_ROWS: gl.constexpr, ZEROS: gl.constexpr = 0, first_column=0,
):  # fmt: skip
    """Load a tile of keys or values from position `pos` on, one box of KV_BOX slots of a page at a time.

    `boxes` are those of `find_boxes`. The head of page 0 begins at (row, col) of the TMA matrix. With `tile_desc`, one
    box loads the tile if it lies in one page and the sequence sees all of its keys.
    """
    buffers = buffers_of(pipe, stage)
    is_box = False
    if tile_desc is not None:
        is_box = (pos >= kv_low) & (pos + BLOCK_N <= kv_high) & (pos % PAGE_SIZE + BLOCK_N <= PAGE_SIZE)
        if is_box:
            box_row = row_of_box(boxes, 0, pos, page_rows, row, PAGE_SIZE, KV_BOX, AS_ROWS)
            load_rows(tile_desc, box_row, col, barrier, buffers, BLOCK_N, 0, BLOCK_N, ZEROS, first_column)
    if not is_box:
        for box in gl.static_range(BLOCK_N // KV_BOX):
            box_row = row_of_box(boxes, box, pos, page_rows, row, PAGE_SIZE, KV_BOX, AS_ROWS)
            load_rows(desc, box_row, col, barrier, buffers, BLOCK_N, box * KV_BOX, KV_BOX, ZEROS, first_column)


@gluon.jit
def spare_barrier(empty, edge_i):
    """Return which barrier the edge_i-th tile with invisible rows completes. At most SPARES are on their way."""
    return empty.shape[0] + edge_i % SPARES


@gluon.jit
def finish_edge(v_pipe, i, waits, pos, kv_low, kv_high, edge_i, BLOCK_N: gl.constexpr):
    """Hand the i-th tile of values to consumers, if it has rows that no query of the sequence sees.

    Such rows are zeroed: they may hold NaN, and 0 * NaN is NaN. That takes time, so the next tile is loaded first.

    Args:
        v_pipe: the pipeline of values.
        i: the use of the pipeline.
        waits: whether it has such rows. Otherwise consumers have it already.
        pos: position of its first row.
        kv_low, kv_high: keys that queries see are in [kv_low, kv_high).
        edge_i: how many such tiles came before.

    Returns:
        How many there were.
    """
    if waits:
        wait(v_pipe.full, spare_barrier(v_pipe.empty, edge_i), edge_i // SPARES)
        stage = i % v_pipe.empty.shape[0]
        zero_rows(v_pipe, stage, kv_low - pos, kv_high - pos, BLOCK_N)
        fence_async_shared()
        expect_bytes(v_pipe.full, stage, 0)
        edge_i += 1
    return edge_i


@gluon.jit
def zero_rows(pipe, stage, seen_from, seen_to, BLOCK_N: gl.constexpr):
    """Zero the rows of a stage's tile before `seen_from`, and from `seen_to` on.

    A tile is a row of groups: eight rows of one panel each, here of words of two numbers. A program runs this a few
    times, so it is a short loop.
    """
    WORDS: gl.constexpr = SWIZZLE_BYTES // 4  # of a row
    GROUPS: gl.constexpr = pipe.tiles.shape[0] * pipe.tiles.shape[1] * pipe.tiles.shape[2] // (2 * 8 * WORDS)
    EACH: gl.constexpr = GROUPS // pipe.empty.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    STORED: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE_BYTES.value, 32, 2)
    groups = reinterpret(pipe.tiles, gl.int32, [GROUPS, 8, WORDS], STORED)
    zeros = gl.zeros([8, WORDS], gl.int32, LAYOUT)
    # The first groups may all be visible. Besides, a loop whose length is not known is not unrolled.
    begin = gl.where(seen_from > 0, 0, gl.maximum(seen_to, 0) // 8)
    for i in range(begin, EACH):
        row = 8 * i % BLOCK_N
        group = groups.index(stage * EACH + i)
        if (row + 8 <= seen_from) | (row >= seen_to):
            group.store(zeros)
        elif (row < seen_from) | (row + 8 > seen_to):
            rows = row + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
            seen = (rows >= seen_from) & (rows < seen_to)
            group.store(gl.where(seen[:, None], group.load(LAYOUT), zeros))
