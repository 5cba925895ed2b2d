"""The warp that fetches: draws one block of rows after the other, late ones first since they see the most keys, and has the copy engine bring their queries,
keys and values page by page. It runs window_right of the warpgroups that compute, over the borders of blocks too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from quire.kernels.hopper.pipeline import copy_rows, expect_bytes, panels, producer_acquire, wait
from quire.kernels.hopper.tile_scheduler import Block, keys_of, publish_work_tile, span

SEQS = gl.constexpr(128)  # sequences looked at at once


@gluon.jit
def produce(
    q_pipe, k_pipe, v_pipe, work_tiles, q_desc, k_desc, v_desc, kv, cu_seqlens_q, counter, few, num_seqs, num_parts, window_left, window_right, stride_table, stride_q_head,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_T: gl.constexpr, PAGE_SIZE: gl.constexpr, Q_BOX: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Draw blocks until there are none, and have their queries, keys and values copied: to the rings of their bytes, where they are to be converted."""
    BLOCK_ROWS: gl.constexpr = q_pipe.tiles.shape[1]
    HEADS: gl.constexpr = BLOCK_ROWS // BLOCK_T
    HEAD_BLOCKS: gl.constexpr = NUM_KV_HEADS * GROUP // HEADS
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_pipe.tiles.shape[2]
    Q_BYTES: gl.constexpr = HEAD_DIM * 2  # of a row
    BYTES: gl.constexpr = HEAD_DIM * k_pipe.tiles.dtype.primitive_bitwidth // 8
    CONVERTED: gl.constexpr = k_pipe.tiles.dtype != q_pipe.tiles.dtype
    SLOTS: gl.constexpr = v_pipe.tiles.shape[0]
    ONE_WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    block_i = 0
    tile_i = 0
    edge_i = 0
    k_page, v_page = kv.k_page // kv.k_slot, kv.v_page // kv.v_slot  # in rows of the copy engine
    k_row, k_col = kv.k_head // kv.k_slot, kv.k_head % kv.k_slot  # one of them is 0
    v_row, v_col = kv.v_head // kv.v_slot, kv.v_head % kv.v_slot
    lane = gl.arange(0, 32, ONE_WARP)
    ends = block_ends(cu_seqlens_q, 0, num_seqs, few, BLOCK_T)
    num_blocks = count_blocks(ends, cu_seqlens_q, num_seqs, few, BLOCK_T)
    num_items = num_blocks * HEAD_BLOCKS * num_parts
    item = gl.program_id(0)
    while item < num_items:
        number = num_blocks - 1 - item // (HEAD_BLOCKS * num_parts)
        head = item % HEAD_BLOCKS * HEADS
        part = item // HEAD_BLOCKS % num_parts
        seq, first_block = find_block(ends, number, cu_seqlens_q, num_seqs, few, BLOCK_T)
        q_start = gl.load(cu_seqlens_q + seq)
        q_len = gl.load(cu_seqlens_q + seq + 1) - q_start
        seq_len = gl.load(kv.seq_lens + seq)
        token = (number - first_block) * BLOCK_T
        drawn = gl.zeros([32], gl.int32, ONE_WARP)
        if kv.query_offsets is None:
            first_pos = seq_len - q_len
        else:
            first_pos = gl.load(kv.query_offsets + seq)
        tile, left = span(
            token, q_len, first_pos, seq_len, window_left, window_right, part, num_parts, BLOCK_T, BLOCK_N
        )
        block = Block(head, token, q_start, q_len, first_pos, seq_len, tile, left, part)
        if kv.cu_pages is None:
            row = kv.page_table + seq.to(gl.int64) * stride_table
        else:
            row = kv.page_table + gl.load(kv.cu_pages + seq)
        kv_low, kv_high = keys_of(block, window_left, window_right)
        pages = pages_of(row, tile * BLOCK_N + lane * BOX, tile * BLOCK_N + BLOCK_N, kv_low, kv_high, PAGE_SIZE, BOX)
        slot = producer_acquire(q_pipe, block_i)
        publish_work_tile(work_tiles, slot, block)
        expect_bytes(q_pipe.full, slot, BLOCK_ROWS * Q_BYTES)
        for first in gl.static_range(0, BLOCK_ROWS, Q_BOX):
            at, col = q_start + token + first % BLOCK_T, (head + first // BLOCK_T) * stride_q_head
            copy_rows(q_desc, at, col, q_pipe.full.index(slot), q_pipe.tiles.index(slot), first, Q_BOX)

        kv_head = head // GROUP
        while left > 0:
            here = ()
            for i in gl.static_range(BLOCK_N // BOX):
                here = here + (gl.sum(gl.where(lane == i, pages, 0), 0),)
            # The next tile's are on their way while this one's are used. So is the next block, no sooner: other programs may be done before this one.
            pos = (tile - 1) * BLOCK_N
            pages = pages_of(
                row, pos + lane * BOX, gl.where(left > 1, pos + BLOCK_N, pos), kv_low, kv_high, PAGE_SIZE, BOX
            )
            drawn = gl.atomic_add(
                counter + lane, gl.full([32], 1, gl.int32, ONE_WARP), mask=(lane == 0) & (left == 1), sem="relaxed"
            )
            slot = producer_acquire(k_pipe, tile_i)
            expect_bytes(k_pipe.full, slot, BLOCK_N * BYTES)
            copy_tile(
                k_desc,
                k_pipe,
                slot,
                k_pipe.full.index(slot),
                here,
                tile * BLOCK_N,
                k_page,
                kv_head * k_row,
                kv_head * k_col,
                PAGE_SIZE,
                BOX,
            )
            slot = producer_acquire(v_pipe, tile_i)
            barrier = slot
            if not CONVERTED:
                seen = (tile * BLOCK_N >= kv_low) & (tile * BLOCK_N + BLOCK_N <= kv_high)
                barrier = gl.where(
                    seen, slot, SLOTS
                )  # the spare one, where some rows must be zeroed before they are used
            expect_bytes(v_pipe.full, barrier, BLOCK_N * BYTES)
            copy_tile(
                v_desc,
                v_pipe,
                slot,
                v_pipe.full.index(barrier),
                here,
                tile * BLOCK_N,
                v_page,
                kv_head * v_row,
                kv_head * v_col,
                PAGE_SIZE,
                BOX,
            )
            if not CONVERTED and barrier == SLOTS:
                wait(v_pipe.full, SLOTS, edge_i)
                zero_unseen(v_pipe.tiles.index(slot), tile * BLOCK_N, kv_low, kv_high)
                fence_async_shared()
                expect_bytes(v_pipe.full, slot, 0)
                edge_i += 1
            tile_i += 1
            tile -= 1
            left -= 1
        block_i += 1
        item = gl.num_programs(0) + gl.sum(gl.where(lane == 0, drawn, 0), 0)
    if item == num_items + gl.num_programs(0) - 1:  # the last draw of all: the counter is ready for the next launch
        gl.store(counter, 0)
    slot = producer_acquire(q_pipe, block_i)
    publish_work_tile(work_tiles, slot, Block(0, 0, 0, 0, 0, 0, 0, 0, 0))
    expect_bytes(q_pipe.full, slot, 0)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def block_ends(cu_seqlens_q, first, num_seqs, few, BLOCK_T: gl.constexpr):
    """Return of SEQS sequences from `first` on where the blocks of each end, if they are laid side by side; sequences of at most `few` queries have none."""
    seqs = first + gl.arange(0, SEQS, gl.BlockedLayout([SEQS // 32], [32], [1], [0]))
    here = seqs < num_seqs
    q_len = gl.load(cu_seqlens_q + seqs + 1, mask=here, other=0) - gl.load(cu_seqlens_q + seqs, mask=here, other=0)
    return gl.associative_scan(gl.where(q_len > few, (q_len + BLOCK_T - 1) // BLOCK_T, 0), 0, add)


@gluon.jit
def count_blocks(ends, cu_seqlens_q, num_seqs, few, BLOCK_T: gl.constexpr):
    """Return how many blocks the batch has; `ends` are the first SEQS sequences' block ends."""
    number = gl.max(ends, 0)
    for first in range(SEQS, num_seqs, SEQS):
        number += gl.max(block_ends(cu_seqlens_q, first, num_seqs, few, BLOCK_T), 0)
    return number


@gluon.jit
def find_block(ends, number, cu_seqlens_q, num_seqs, few, BLOCK_T: gl.constexpr):
    """Return the sequence that owns a block, by the block's number in the batch, and that sequence's first block."""
    seq = gl.sum((ends <= number).to(gl.int32), 0)
    first_block = gl.max(gl.where(ends <= number, ends, 0), 0)
    before = gl.max(ends, 0)
    for first in range(SEQS, num_seqs, SEQS):
        more = before + block_ends(cu_seqlens_q, first, num_seqs, few, BLOCK_T)
        seq += gl.sum((more <= number).to(gl.int32), 0)
        first_block = gl.maximum(first_block, gl.max(gl.where(more <= number, more, 0), 0))
        before = gl.max(more, 0)
    return seq, first_block


@gluon.jit
def pages_of(row, pos, stop, kv_low, kv_high, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr):
    """Load the pages of the boxes that begin at positions `pos`, before `stop`, and hold keys from `kv_low` on and before `kv_high`."""
    return gl.load(row + pos // PAGE_SIZE, mask=(pos < stop) & (pos + BOX > kv_low) & (pos < kv_high), other=0).to(
        gl.int32
    )


@gluon.jit
def copy_tile(desc, pipe, slot, barrier, pages, pos, page_rows, row, col, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr):
    """Have the keys or values from position `pos` on copied, BOX of a page at a time; a head of page 0 begins at (row, col)."""
    BLOCK_N: gl.constexpr = pipe.tiles.shape[1]
    for box in gl.static_range(BLOCK_N // BOX):
        copy_rows(
            desc,
            pages[box] * page_rows + row + (pos + box * BOX) % PAGE_SIZE,
            col,
            barrier,
            pipe.tiles.index(slot),
            box * BOX,
            BOX,
        )


@gluon.jit
def zero_unseen(values, pos, kv_low, kv_high):
    """Zero the rows of a tile of values, from position `pos` on, that no query of the sequence sees and that may hold anything: 0 * NaN is NaN."""
    BLOCK_N: gl.constexpr = values.shape[0]
    PANELS: gl.constexpr = values.shape[1] // panels(values).shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for first in gl.static_range(0, BLOCK_N, 8):
        if (pos + first < kv_low) | (pos + first + 8 > kv_high):
            kv_pos = pos + first + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
            seen = ((kv_pos >= kv_low) & (kv_pos < kv_high))[:, None]
            for panel in gl.static_range(PANELS):
                some = panels(values).slice(panel * BLOCK_N + first, 8)
                some.store(gl.where(seen, some.load(LAYOUT), 0.0))
