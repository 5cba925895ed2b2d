"""The producer warp takes one work tile after the other and loads its queries, keys and values by TMA, page by page.

Where pages are too small for TMA, the producer has four warps, which gather keys and values row by row (`gather.py`).

It loads as soon as a pipeline has a free stage, also for the next work tile while consumers still process this one.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from quire.kernels.gluon.compat import aggregate, reinterpret
from quire.kernels.gluon.pipeline import SPARES, SWIZZLE_BYTES, expect_bytes, load_rows, make_all_ready, wait_at
from quire.kernels.hopper.gather import begin_tile, load_places
from quire.kernels.hopper.queue import first_work_tile, last_number, make_queue, take, taken_work_tile
from quire.kernels.hopper.tile_scheduler import address_of, find_work_tile, load_row_block, place_of_work_tile
from quire.kernels.hopper.work_tile import ROWS, WorkTile, publish_seq, publish_work_tile, visible_keys
from quire.kernels.panels import power_of_two


class Sources(NamedTuple):
    """What queries, keys and values are loaded from. `hopper_kernel` says what each is."""

    q_desc: Any
    k_source: Any
    v_source: Any
    k_tile_desc: Any
    v_tile_desc: Any


@aggregate
class Stored:
    """The keys or the values as the cache stores them, and the pipeline that they are loaded to."""

    pipe: Any  # SmemPipeline
    source: Any  # TMA descriptor, or where rows are gathered a pointer to head 0 in slot 0 of page 0
    tile_desc: Any  # TMA descriptor of boxes of a tile's rows, or None
    stride_page: Any
    stride_slot: Any
    stride_head: Any
    page_rows: Any  # rows of the TMA matrix from page to page
    head_rows: Any  # rows of the TMA matrix from head to head, or 0
    head_columns: Any  # columns from head to head, or 0
    WIDTH: gl.constexpr  # columns of a head
    ZEROS: gl.constexpr  # columns of zeros before those of a head: `zeros_before`
    AS_ROWS: gl.constexpr  # boxes are told by their rows: `find_boxes`


class Visible(NamedTuple):
    """The keys that any query of the sequence sees: [low, high). Others may be in freed pages."""

    low: Any
    high: Any


@gluon.constexpr_function
def zeros_before(columns, first):
    """Return how many columns of zeros come before those of queries and keys; none if a head's columns come first.

    TMA is slow where it fills a part of 32 bytes with zeros, and less slow if that comes first: 8 x 512 with heads of
    24 takes 44 us instead of 47, and 4,096 with heads of 88 229 instead of 233 (NVIDIA H100, 2026-11-26).
    Batch-invariant plans add products in the order of the portable kernels, which have no such columns.
    """
    return 0 if first else columns % 16


@gluon.jit
def produce(memory, pipelines, sources, batch, division, config):
    """Take work tiles until there are none left, and load their queries, keys and values. The producer runs this.

    First it makes the barriers of the pipelines ready, if it is one warp.

    Tiles of a quantised cache go to pipelines of raw bytes, from which `convert` reads.
    The KV tiles of a work tile are loaded from the last to the first, or with FIXED_SPLIT from the first to the last.
    Where there are splits, one without keys is not handed to consumers.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    PARTS: gl.constexpr = config.PARTS
    MIXED: gl.constexpr = config.MIXED
    STEP: gl.constexpr = 1 if config.FIXED_SPLIT > 0 else -1
    KV_BOX: gl.constexpr = config.KV_BOX
    GATHERS: gl.constexpr = KV_BOX == 0
    HEAD_BLOCKS: gl.constexpr = config.NUM_KV_HEADS * config.GROUP // config.HEADS
    CONVERTED: gl.constexpr = memory.k.tiles.dtype != memory.q.tiles.dtype
    HAS_EDGES: gl.constexpr = not GATHERS and not CONVERTED  # rows that may not be read are zeroed
    SPLITS: gl.constexpr = isinstance(division.num_splits, gl.tensor)  # one split is a constexpr
    MANY_NUMBERS: gl.constexpr = MIXED or (SPLITS and not config.INTERVALS)  # of a work tile: few registers are left
    FEW_REGISTERS: gl.constexpr = MANY_NUMBERS and HAS_EDGES
    # The only buffer of queries becomes free late, so the next work tile's first keys are loaded before its queries.
    KEYS_FIRST: gl.constexpr = memory.q.STAGES == 1
    THREADS: gl.constexpr = 32 * gl.num_warps()
    ONE_EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ZEROS: gl.constexpr = zeros_before(config.HEAD_DIM, GATHERS or CONVERTED or config.FIXED_SPLIT > 0)
    if not GATHERS:
        make_all_ready(pipelines, memory.ready)
    kv = batch.kv
    work_i = 0
    tile_i = 0
    edge_i = 0
    k_page, v_page = kv.k_page // kv.k_slot, kv.v_page // kv.v_slot  # in rows of the TMA matrix
    k_row, k_col = kv.k_head // kv.k_slot, kv.k_head % kv.k_slot  # one of them is 0
    v_row, v_col = kv.v_head // kv.v_slot, kv.v_head % kv.v_slot
    if not GATHERS:
        if len(sources.k_source.block_shape) == 3:  # heads are a dimension
            k_col = (k_col > 0).to(gl.int32)
        if len(sources.v_source.block_shape) == 3:
            v_col = (v_col > 0).to(gl.int32)
    k = Stored(
        memory.k, sources.k_source, sources.k_tile_desc, kv.k_page, kv.k_slot, kv.k_head, k_page, k_row, k_col,
        config.HEAD_DIM, ZEROS, FEW_REGISTERS,
    )  # fmt: skip
    v = Stored(
        memory.v, sources.v_source, sources.v_tile_desc, kv.v_page, kv.v_slot, kv.v_head, v_page, v_row, v_col,
        config.HEAD_DIM_V, 0, FEW_REGISTERS,
    )  # fmt: skip
    lane = gl.arange(0, THREADS, ONE_EACH)
    num_row_blocks = gl.load(batch.summary)
    num_singles, from_back = gl.load(batch.summary + 1), gl.load(batch.summary + 2)
    num_work_tiles = num_row_blocks * HEAD_BLOCKS * division.num_splits
    if PARTS > 1:
        num_work_tiles *= PARTS
    queue = make_queue(num_work_tiles, num_singles * HEAD_BLOCKS * PARTS * division.num_splits, from_back)
    index, backwards = first_work_tile(queue, MIXED)
    row_block = load_row_block(batch, index, num_row_blocks, num_singles, division, config)
    while index < num_work_tiles:
        at = place_of_work_tile(index, num_row_blocks, num_singles, division, config)
        found = address_of(batch, at) if MANY_NUMBERS else row_block
        seq, work, keys, kv_stop = find_work_tile(found, at, division, config)
        first_value = 0  # column
        if PARTS > 1:
            first_value = at.part * config.HEAD_DIM_V
            if division.last_part is not None:
                first_value = gl.minimum(first_value, division.last_part)
        tile, left = work.tile, work.num_tiles
        taken = gl.zeros([THREADS], gl.int32, ONE_EACH)
        # In int64: a table of many long rows has more than 2^31 numbers.
        if kv.cu_pages is None:
            row = kv.page_table + seq.to(gl.int64) * division.stride_table
        else:
            row = kv.page_table + gl.load(kv.cu_pages + seq)
        if not config.INTERVALS:
            kv_low, kv_high = visible_keys(work, batch.window_left, batch.window_right)
        else:
            kv_low, kv_high = keys.kv_low, keys.kv_high
        visible = Visible(kv_low, kv_high)
        kv_head = at.head // config.GROUP
        pos = tile * BLOCK_N
        if GATHERS:
            pages = load_places(row, k, pos, kv_high, kv_low, config.PAGE_SIZE)
        else:
            pages = load_page_numbers(row, pos + lane * KV_BOX, pos + BLOCK_N, visible, config)
        if SPLITS and (pos >= kv_stop) & (at.split < division.num_splits - 1):  # the last split adds sinks
            # Consumers would write as much as for a split with keys. So they are not told of this one.
            store_empty(division, at.split, work, config)
            taken = take(division.tile_counter, lane, lane == 0, backwards, MIXED)
            if not MANY_NUMBERS:
                following, _ = taken_work_tile(queue, lane, taken, backwards, MIXED)
                row_block = load_row_block(batch, following, num_row_blocks, num_singles, division, config)
            left = left * 0  # a tensor, as in the other branch
        else:
            if KEYS_FIRST and work_i > 0:
                load_keys(k, kv_head, tile_i, find_boxes(k, kv_head, pages, lane, pos, config), pos, visible, config)
            stage = memory.q.acquire(work_i)
            publish_work_tile(memory.published, stage, work, keys)
            if config.FUNCTION is not None:
                publish_seq(memory.published, stage, seq)
            load_queries(memory.q, stage, sources.q_desc, work, config, ZEROS)
            work_i += 1

        waits = left < 0  # whether `finish_edge` has to hand over the last tile of values
        while left > 0:
            of_tile = pages
            boxes = find_boxes(k, kv_head, of_tile, lane, tile * BLOCK_N, config)
            # Prefetch the next tile's page numbers. Take the next work tile only during the last tile, so that an idle
            # program can take it first.
            pos = (tile + STEP) * BLOCK_N
            stop = gl.where(left > 1, pos + BLOCK_N, pos)
            if GATHERS:
                pages = load_places(row, k, pos, gl.minimum(stop, kv_high), kv_low, config.PAGE_SIZE)
            else:
                pages = load_page_numbers(row, pos + lane * KV_BOX, stop, visible, config)
            taken = take(division.tile_counter, lane, (lane == 0) & (left == 1), backwards, MIXED)
            if not KEYS_FIRST or (left < work.num_tiles) | (work_i == 1):
                load_keys(k, kv_head, tile_i, boxes, tile * BLOCK_N, visible, config)
            if not MANY_NUMBERS:
                if left == 1:  # what was taken is here by now; its row block will be when the values have a stage
                    following, _ = taken_work_tile(queue, lane, taken, backwards, MIXED)
                    row_block = load_row_block(batch, following, num_row_blocks, num_singles, division, config)
            if GATHERS:
                begin_tile(v, kv_head, tile_i, boxes, tile * BLOCK_N, first_value, config.PAGE_SIZE)
            else:
                if FEW_REGISTERS:  # boxes are those of keys
                    boxes = find_boxes(v, kv_head, of_tile, lane, tile * BLOCK_N, config)
                barrier = tile_i % memory.v.STAGES
                if HAS_EDGES:  # 0 * NaN is NaN, so a row that may not be read must not reach a product
                    # A tile with invisible rows completes a spare barrier, and `finish_edge` hands it over.
                    all_visible = (tile * BLOCK_N >= kv_low) & (tile * BLOCK_N + BLOCK_N <= kv_high)
                    spare = spare_barrier(memory.v, edge_i + gl.where(waits, 1, 0))
                    barrier = gl.where(all_visible, barrier, spare)
                stage = memory.v.acquire(tile_i)
                full = memory.v.full.index(barrier)
                expect_bytes(full, memory.v.BYTES)
                at_head = first_row_of(v, kv_head)
                load_kv_tile(v, at_head, stage, full, boxes, tile * BLOCK_N, visible, config, first_value)
                if HAS_EDGES:
                    last_pos = (tile - STEP) * BLOCK_N
                    edge_i = finish_edge(memory.v, tile_i - 1, waits, last_pos, visible, edge_i, config)
                    waits = barrier != stage
            tile_i += 1
            tile += STEP
            left -= 1
        if HAS_EDGES:
            last_pos = (tile - STEP) * BLOCK_N
            edge_i = finish_edge(memory.v, tile_i - 1, waits, last_pos, visible, edge_i, config)
        index, backwards = taken_work_tile(queue, lane, taken, backwards, MIXED)
    if index == last_number(queue):  # the last program resets the counter for the next launch
        gl.store(division.tile_counter, 0)
    # A work tile without queries says that there are no more, and completes the barrier without a load.
    stage = memory.q.acquire(work_i)
    publish_work_tile(memory.published, stage, WorkTile(0, 0, 0, 0, 0, 0, 0, 0, 0), ())
    expect_bytes(memory.q.full.index(stage), 0)


@gluon.jit
def load_queries(pipe, stage, desc, work, config, ZEROS: gl.constexpr):
    """Begin to load a work tile's queries. With SPLIT_BY_TOKENS, each of two warpgroups has half of its tokens."""
    LEAST_ROWS: gl.constexpr = desc.block_shape[0]
    Q_ROWS: gl.constexpr = pipe.tiles.shape[1]
    NUMBERS: gl.constexpr = config.HEADS * config.BLOCK_T * pipe.COLUMNS
    expect_bytes(pipe.full.index(stage), NUMBERS * pipe.tiles.dtype.primitive_bitwidth // 8)
    loaded = pipe.full.index(stage)
    buffers = pipe.buffers(stage)
    load_rows(desc, work.head, work.q_start + work.token, loaded, buffers, Q_ROWS, 0, LEAST_ROWS, ZEROS)
    if config.SPLIT_BY_TOKENS:
        token = work.q_start + work.token + config.BLOCK_T // 2
        load_rows(desc, work.head, token, loaded, buffers, Q_ROWS, ROWS, LEAST_ROWS, ZEROS)


@gluon.jit
def load_keys(k, head, i, boxes, pos, visible, config):
    """Load the keys of a head from position `pos` on, the i-th tile of the pipeline."""
    if config.KV_BOX == 0:
        begin_tile(k, head, i, boxes, pos, 0, config.PAGE_SIZE)
    else:
        at = first_row_of(k, head)
        stage = k.pipe.acquire(i)
        k.pipe.expect_tile(stage)
        load_kv_tile(k, at, stage, k.pipe.full.index(stage), boxes, pos, visible, config)


@gluon.jit
def find_boxes(stored, head, pages, lane, pos, config):
    """Return where the boxes of the tile at position `pos` are, from the lanes, each of which has the page of a box.

    Each box is told by its page; with AS_ROWS, by its row of the TMA matrix. That is known for keys or for values
    alone, but takes fewer registers of a warp. Where rows are gathered, the pages stay as `load_places` returned them.
    """
    if config.KV_BOX == 0:
        return pages
    else:
        numbers = pages
        if stored.AS_ROWS:
            first_row = first_row_of(stored, head)[0]
            numbers = pages * stored.page_rows + first_row + (pos + lane * config.KV_BOX) % config.PAGE_SIZE
        boxes = ()
        for box in gl.static_range(config.BLOCK_N // config.KV_BOX):
            boxes = boxes + (gl.sum(gl.where(lane == box, numbers, 0), 0),)
        return boxes


@gluon.jit
def first_row_of(stored, head):
    """Return the row and the column of the TMA matrix at which a head of page 0 begins."""
    return head * stored.head_rows, head * stored.head_columns


@gluon.jit
def row_of_box(stored, at, boxes, BOX: gl.constexpr, pos, config):
    """Return the row of the TMA matrix at which one of the boxes that `find_boxes` returned begins."""
    if stored.AS_ROWS:
        return boxes[BOX]
    else:
        return boxes[BOX] * stored.page_rows + at[0] + (pos + BOX * config.KV_BOX) % config.PAGE_SIZE


@gluon.jit
def store_empty(division, split, work, config):
    """Store the state of a work tile whose split has no keys. Its lse says that, and its out is not read."""
    BLOCK_T: gl.constexpr = config.BLOCK_T
    NUM_ROWS: gl.constexpr = config.HEADS * BLOCK_T
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = gl.arange(0, power_of_two(NUM_ROWS), LAYOUT)
    tokens = work.token + rows % BLOCK_T
    offsets = (work.q_start + tokens).to(gl.int64) * division.stride_lse
    offsets = offsets + (work.head + rows // BLOCK_T) * division.num_splits + split
    lse = gl.full([power_of_two(NUM_ROWS)], float("-inf"), gl.float32, LAYOUT)
    gl.store(division.lse_ptr + offsets, lse, mask=(tokens < work.q_len) & (rows < NUM_ROWS))


@gluon.jit
def load_page_numbers(row, pos, stop, visible, config):
    """Load the pages of the boxes at positions `pos` that begin before `stop` and hold a visible key."""
    inside = (pos < stop) & (pos + config.KV_BOX > visible.low) & (pos < visible.high)
    return gl.load(row + pos // config.PAGE_SIZE, mask=inside, other=0).to(gl.int32)


@gluon.jit
def load_kv_tile(stored, at, stage, barrier, boxes, pos, visible, config, first_column=0):
    """Load a tile of keys or values from position `pos` on, one box of KV_BOX slots of a page at a time.

    `at` is what `first_row_of` returns, and `boxes` are those of `find_boxes`. With `tile_desc`, one box loads the tile
    if it lies in one page and the sequence sees all of its keys.
    """
    BLOCK_N: gl.constexpr = config.BLOCK_N
    PAGE_SIZE: gl.constexpr = config.PAGE_SIZE
    KV_BOX: gl.constexpr = config.KV_BOX
    buffers = stored.pipe.buffers(stage)
    is_box = False
    if stored.tile_desc is not None:
        is_box = (pos >= visible.low) & (pos + BLOCK_N <= visible.high) & (pos % PAGE_SIZE + BLOCK_N <= PAGE_SIZE)
        if is_box:
            row = row_of_box(stored, at, boxes, 0, pos, config)
            load_rows(
                stored.tile_desc, row, at[1], barrier, buffers, BLOCK_N, 0, BLOCK_N, stored.ZEROS, first_column
            )  # fmt: skip
    if not is_box:
        for box in gl.static_range(BLOCK_N // KV_BOX):
            row = row_of_box(stored, at, boxes, box, pos, config)
            load_rows(
                stored.source, row, at[1], barrier, buffers, BLOCK_N, box * KV_BOX, KV_BOX, stored.ZEROS, first_column
            )  # fmt: skip


@gluon.jit
def spare_barrier(v_pipe, edge_i):
    """Return which barrier the edge_i-th tile with invisible rows completes. At most SPARES are on their way."""
    return v_pipe.STAGES + edge_i % SPARES


@gluon.jit
def finish_edge(v_pipe, i, waits, pos, visible, edge_i, config):
    """Hand the i-th tile of values to consumers, if it has rows that no query of the sequence sees.

    Such rows are zeroed: they may hold NaN, and 0 * NaN is NaN. That takes time, so the next tile is loaded first.

    Args:
        v_pipe: the pipeline of values.
        i: the use of the pipeline.
        waits: whether it has such rows. Otherwise consumers have it already.
        pos: position of its first row.
        visible: the keys that queries see.
        edge_i: how many such tiles came before.

    Returns:
        How many there were.
    """
    if waits:
        wait_at(v_pipe.full, spare_barrier(v_pipe, edge_i), edge_i // SPARES)
        stage = i % v_pipe.STAGES
        zero_rows(v_pipe, stage, visible.low - pos, visible.high - pos, config.BLOCK_N)
        fence_async_shared()  # consumers read by the async proxy what was stored by the generic one
        expect_bytes(v_pipe.full.index(stage), 0)
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
    EACH: gl.constexpr = GROUPS // pipe.STAGES
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
