"""Attention for prompts on Hopper GPUs: warp-specialised, keys and values through the copy engine page by page.

A program has two warpgroups that compute, 64 rows each, and a warp that fetches. It stays on its multiprocessor and draws one block of rows after the
other, late ones first since they see the most keys. A block is BLOCK_T query tokens of a sequence times as many heads of one KV head as make 128 rows,
a head's tokens side by side. The warp that fetches runs ahead, over the borders of blocks too; the warpgroups take the matrix unit in turns, one's softmax
beside the other's products.

A quantised cache's tiles arrive as bytes. A third warpgroup turns them into float16, which holds every fp8 and int8 number and takes one instruction for
two; bfloat16 queries are turned into float16 too, times a power of two for each row. Where products in fp8 are allowed, queries and probabilities are
rounded to fp8, keys are used as they come, and the third warpgroup only turns tiles of values on their side, as the matrix unit wants bytes.

The shape is that of FlashAttention-3 (arXiv 2407.08608, sections 3.1 and 3.2).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.hopper.pipeline import acquire, copy_rows, expect, fill, make_ring, panels, reinterpret, release, wait, wait_full
from quire.kernels.primitives import LN2, LOG2E

ROWS = gl.constexpr(64)  # of a warpgroup
SEQS = gl.constexpr(128)  # sequences looked at at once
EACH = gl.constexpr(32)  # elements that a thread converts at once
NUMBERS, NOTE = gl.constexpr(6), gl.constexpr(8)  # of a block, and the words of shared memory that they are given


class Block(NamedTuple):
    """What the warp that fetches tells those that compute of a block; without queries it is the end."""

    head: Any  # its first
    token: Any  # its first, of the sequence
    q_start: Any  # the sequence's first token, of the batch
    q_len: Any  # the sequence's queries
    first_pos: Any  # of the sequence's first query among its keys
    seq_len: Any  # the sequence's keys


class Scoring(NamedTuple):
    """How products become scores, and which are seen."""

    scale: Any
    k_scale_ptr: Any  # of a quantised cache, by head
    softcap: Any
    back: Any
    ahead: Any
    slopes_ptr: Any


class Outputs(NamedTuple):
    """Where results go."""

    out_ptr: Any
    lse_ptr: Any
    sinks_ptr: Any
    v_scale_ptr: Any
    stride_out_token: Any
    stride_out_head: Any
    stride_lse: Any


@gluon.jit
def span(block, back, ahead, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the last tile of keys that any query of the block sees, and how many there are, one at least."""
    kv_start = gl.maximum(block.first_pos + block.token - back, 0)
    kv_stop = gl.minimum(block.first_pos + gl.minimum(block.token + BLOCK_T, block.q_len) + ahead, block.seq_len)
    start = kv_start // BLOCK_N
    stop = gl.maximum((kv_stop + BLOCK_N - 1) // BLOCK_N, start + 1)
    return stop - 1, stop - start


@gluon.jit
def keys_of(block, back, ahead):
    """Return the first key that any query of the block's sequence sees, and the one after the last: what else there is may be gone."""
    return block.first_pos - back, gl.minimum(block.first_pos + block.q_len + ahead, block.seq_len)


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
def fetch(
    q_ring, k_ring, v_ring, notes, q_desc, k_desc, v_desc, kv, cu_seqlens_q, counter, few, num_seqs, back, ahead, stride_table, stride_q_head,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_T: gl.constexpr, PAGE_SIZE: gl.constexpr, Q_BOX: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Draw blocks until there are none, and have their queries, keys and values copied: to the rings of their bytes, where they are to be converted."""
    BLOCK_ROWS: gl.constexpr = q_ring.tiles.shape[1]
    HEADS: gl.constexpr = BLOCK_ROWS // BLOCK_T
    HEAD_BLOCKS: gl.constexpr = NUM_KV_HEADS * GROUP // HEADS
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_ring.tiles.shape[2]
    Q_BYTES: gl.constexpr = HEAD_DIM * 2  # of a row
    BYTES: gl.constexpr = HEAD_DIM * k_ring.tiles.dtype.primitive_bitwidth // 8
    CONVERTED: gl.constexpr = k_ring.tiles.dtype != q_ring.tiles.dtype
    SLOTS: gl.constexpr = v_ring.tiles.shape[0]
    ONE_WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    block_i = 0
    tile_i = 0
    edge_i = 0
    k_page, v_page = kv.k_page // kv.k_slot, kv.v_page // kv.v_slot  # in rows of the copy engine
    lane = gl.arange(0, 32, ONE_WARP)
    ends = block_ends(cu_seqlens_q, 0, num_seqs, few, BLOCK_T)
    num_blocks = count_blocks(ends, cu_seqlens_q, num_seqs, few, BLOCK_T)
    num_items = num_blocks * HEAD_BLOCKS
    item = gl.program_id(0)
    while item < num_items:
        number = num_blocks - 1 - item // HEAD_BLOCKS
        head = item % HEAD_BLOCKS * HEADS
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
        block = Block(head, token, q_start, q_len, first_pos, seq_len)
        slot = acquire(q_ring, block_i)
        write_note(notes, slot, block)
        expect(q_ring.full, slot, BLOCK_ROWS * Q_BYTES)
        for first in gl.static_range(0, BLOCK_ROWS, Q_BOX):
            at, col = q_start + token + first % BLOCK_T, (head + first // BLOCK_T) * stride_q_head
            copy_rows(q_desc, at, col, q_ring.full.index(slot), q_ring.tiles.index(slot), first, Q_BOX)

        if kv.cu_pages is None:
            row = kv.page_table + seq.to(gl.int64) * stride_table
        else:
            row = kv.page_table + gl.load(kv.cu_pages + seq)
        kv_low, kv_high = keys_of(block, back, ahead)
        offs_k, offs_v = head // GROUP * kv.k_head, head // GROUP * kv.v_head
        tile, left = span(block, back, ahead, BLOCK_T, BLOCK_N)
        while left > 0:
            pages = ()
            for first in gl.static_range(0, BLOCK_N, BOX):  # all on their way before the first is used
                pos = tile * BLOCK_N + first
                pages = pages + (gl.load(row + pos // PAGE_SIZE, mask=(pos + BOX > kv_low) & (pos < kv_high), other=0).to(gl.int32),)
            # The next block is drawn behind the last tile's page numbers: no sooner, since other programs may be done before this one.
            drawn = gl.atomic_add(counter + lane, gl.full([32], 1, gl.int32, ONE_WARP), mask=(lane == 0) & (left == 1))
            slot = acquire(k_ring, tile_i)
            expect(k_ring.full, slot, BLOCK_N * BYTES)
            k_row, k_col = offs_k // kv.k_slot, offs_k % kv.k_slot
            copy_tile(k_desc, k_ring, slot, k_ring.full.index(slot), pages, tile * BLOCK_N, k_page, k_row, k_col, PAGE_SIZE, BOX)
            slot = acquire(v_ring, tile_i)
            barrier = slot
            if not CONVERTED:
                seen = (tile * BLOCK_N >= kv_low) & (tile * BLOCK_N + BLOCK_N <= kv_high)
                barrier = gl.where(seen, slot, SLOTS)  # the spare one, where some rows must be zeroed before they are used
            expect(v_ring.full, barrier, BLOCK_N * BYTES)
            v_row, v_col = offs_v // kv.v_slot, offs_v % kv.v_slot
            copy_tile(v_desc, v_ring, slot, v_ring.full.index(barrier), pages, tile * BLOCK_N, v_page, v_row, v_col, PAGE_SIZE, BOX)
            if not CONVERTED and barrier == SLOTS:
                wait(v_ring.full, SLOTS, edge_i)
                zero_unseen(v_ring.tiles.index(slot), tile * BLOCK_N, kv_low, kv_high)
                fence_async_shared()
                expect(v_ring.full, slot, 0)
                edge_i += 1
            tile_i += 1
            tile -= 1
            left -= 1
        block_i += 1
        item = gl.num_programs(0) + gl.sum(gl.where(lane == 0, drawn, 0), 0)
    if item == num_items + gl.num_programs(0) - 1:  # the last draw of all: the counter is ready for the next launch
        gl.store(counter, 0)
    slot = acquire(q_ring, block_i)
    write_note(notes, slot, Block(0, 0, 0, 0, 0, 0))
    expect(q_ring.full, slot, 0)


@gluon.jit
def copy_tile(desc, ring, slot, barrier, pages, pos, page_rows, row, col, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr):
    """Have the keys or values from position `pos` on copied, BOX of a page at a time; a head of page 0 begins at (row, col)."""
    BLOCK_N: gl.constexpr = ring.tiles.shape[1]
    for box in gl.static_range(BLOCK_N // BOX):
        copy_rows(desc, pages[box] * page_rows + row + (pos + box * BOX) % PAGE_SIZE, col, barrier, ring.tiles.index(slot), box * BOX, BOX)


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


@gluon.jit
def convert(k_bytes, v_bytes, k_ring, v_ring, q_ring, notes, back, ahead, BLOCK_T: gl.constexpr):
    """Turn the tiles of bytes that are fetched into what the matrix unit is given, with one warpgroup."""
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[1]
    IN_FP8: gl.constexpr = k_ring.tiles.dtype == k_bytes.tiles.dtype
    block_i = 0
    tile_i = 0
    block = read_note(notes, wait_full(q_ring, block_i))
    while block.q_len > 0:
        kv_low, kv_high = keys_of(block, back, ahead)
        tile, num_tiles = span(block, back, ahead, BLOCK_T, BLOCK_N)
        for i in range(tile_i, tile_i + num_tiles):
            pos = tile * BLOCK_N
            if not IN_FP8:
                convert_tile(k_bytes, k_ring, i, pos, kv_low, kv_high, False)  # scores are masked
            if (pos >= kv_low) & (pos + BLOCK_N <= kv_high):
                convert_values(v_bytes, v_ring, i, pos, kv_low, kv_high, IN_FP8, False)
            else:
                convert_values(v_bytes, v_ring, i, pos, kv_low, kv_high, IN_FP8, True)
            tile -= 1
        tile_i += num_tiles
        block_i += 1
        block = read_note(notes, wait_full(q_ring, block_i))


@gluon.jit
def convert_values(stored, ring, i, pos, kv_low, kv_high, IN_FP8: gl.constexpr, ZERO_UNSEEN: gl.constexpr):
    if IN_FP8:
        turn_tile(stored, ring, i, pos, kv_low, kv_high, ZERO_UNSEEN)
    else:
        convert_tile(stored, ring, i, pos, kv_low, kv_high, ZERO_UNSEEN)


@gluon.jit
def convert_tile(stored, ring, i, pos, kv_low, kv_high, ZERO_UNSEEN: gl.constexpr):
    """Convert the i-th tile, of the keys from position `pos` on; zero the rows outside `kv_low` to `kv_high` if asked: 0 * NaN is NaN."""
    BLOCK_N: gl.constexpr = ring.tiles.shape[1]
    HEAD_DIM: gl.constexpr = ring.tiles.shape[2]
    STEP: gl.constexpr = EACH * 128 // HEAD_DIM  # rows at once
    LANES: gl.constexpr = HEAD_DIM // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    from_slot = wait_full(stored, i)
    slot = acquire(ring, i)
    for first in gl.static_range(0, BLOCK_N, STEP):
        numbers = stored.tiles.index(from_slot).slice(first, STEP).load(LAYOUT).to(ring.tiles.dtype)
        if ZERO_UNSEEN:
            kv_pos = pos + first + gl.arange(0, STEP, gl.SliceLayout(1, LAYOUT))
            numbers = gl.where(((kv_pos >= kv_low) & (kv_pos < kv_high))[:, None], numbers, 0.0)
        ring.tiles.index(slot).slice(first, STEP).store(numbers)
    fill(ring, i)
    release(stored, i)


@gluon.jit
def turn_tile(stored, ring, i, pos, kv_low, kv_high, ZERO_UNSEEN: gl.constexpr):
    """Turn the i-th tile of values in fp8 on its side: a row for each column of the values, with keys `in_fours`; else as `convert_tile`."""
    BLOCK_N: gl.constexpr = stored.tiles.shape[1]
    HEAD_DIM: gl.constexpr = stored.tiles.shape[2]
    # Two columns side by side are one 16-bit element, which the shared memory's own transposition serves: a thread has keys 2n and 2n + 1 of it.
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    from_slot = wait_full(stored, i)
    slot = acquire(ring, i)
    pairs = reinterpret(stored.tiles.index(from_slot), gl.int16, [BLOCK_N, HEAD_DIM // 2], gl.NVMMASharedLayout(HEAD_DIM, 16, 2))
    both = pairs.permute((1, 0)).load(LAYOUT)
    if ZERO_UNSEEN:
        kv_pos = pos + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        both = gl.where(((kv_pos >= kv_low) & (kv_pos < kv_high))[None, :], both, 0)
    split: gl.constexpr = "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;"  # low bytes of four elements, and high ones
    even, odd = gl.inline_asm_elementwise(split, "=r,=r,r,r", [in_fours(both)], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
    turned = gl.join(even, odd).permute((0, 2, 1)).reshape([HEAD_DIM, BLOCK_N]).to(ring.tiles.dtype, bitcast=True)
    ring.tiles.index(slot).store(turned)
    fill(ring, i)
    release(stored, i)


@gluon.jit
def write_note(notes, slot, block):
    """Leave a block's numbers in shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(NUMBERS):
        notes.index(slot * NOTE + i).store(gl.full([1], block[i], gl.int32, LAYOUT))


@gluon.jit
def read_note(notes, slot):
    """Return the block that `write_note` was given."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    numbers = ()
    for i in gl.static_range(NUMBERS):
        numbers = numbers + (gl.max(notes.index(slot * NOTE + i).load(LAYOUT), 0),)
    return Block(*numbers)


@gluon.jit
def attend(
    wg: gl.constexpr, q_ring, k_ring, v_ring, notes, scoring, outputs, stride_scale,
    GROUP: gl.constexpr, BLOCK_T: gl.constexpr, SCORE_MOD: gl.constexpr,
):  # fmt: skip
    """Attend with one warpgroup to the tiles that are fetched, and write the results of each block."""
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_ring.tiles.shape[2]
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OF_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OF_P: gl.constexpr = gl.DotOperandLayout(0, OF_OUT, 2)
    element: gl.constexpr = k_ring.tiles.dtype
    rows = wg * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OF_SCORES))
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, OF_SCORES))
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, OF_SCORES)

    block_i = 0
    tile_i = 0
    slot = wait_full(q_ring, block_i)
    block = read_note(notes, slot)
    while block.q_len > 0:
        tile, num_tiles = span(block, scoring.back, scoring.ahead, BLOCK_T, BLOCK_N)
        slopes = None
        if scoring.slopes_ptr is not None:
            slopes = gl.load(scoring.slopes_ptr + block.head + rows // BLOCK_T).to(gl.float32)
        scale = scoring.scale
        if scoring.k_scale_ptr is not None:
            scale *= gl.load(scoring.k_scale_ptr + block.head // GROUP * stride_scale)
        if element == q_ring.tiles.dtype:
            q = q_ring.tiles.index(slot).slice(wg * ROWS, ROWS)
        else:
            q, shrunk = narrow(q_ring.tiles.index(slot), element, wg * ROWS, 14, OF_SCORES)
            scale *= shrunk
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, OF_SCORES))
        denom = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, OF_SCORES))
        acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, OF_OUT)

        k = k_ring.tiles.index(wait_full(k_ring, tile_i))
        scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        release(k_ring, tile_i)
        p, m, denom, _ = softmax_step(scores, m, denom, tile * BLOCK_N, rows, cols, block, slopes, scale, scoring, 0.0, BLOCK_T, SCORE_MOD)
        p = gl.convert_layout(p.to(element), OF_P)
        for i in range(tile_i + 1, tile_i + num_tiles):
            tile -= 1
            k = k_ring.tiles.index(wait_full(k_ring, i))
            scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            v = v_ring.tiles.index(wait_full(v_ring, i - 1))
            acc = warpgroup_mma(p, v, acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            release(k_ring, i)
            # The other warpgroup's softmax runs beside these two products. (One's own beside the second of them was slower.)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            release(v_ring, i - 1)
            p, m, denom, alpha = softmax_step(scores, m, denom, tile * BLOCK_N, rows, cols, block, slopes, scale, scoring, 0.0, BLOCK_T, SCORE_MOD)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OF_OUT))[:, None]
            p = gl.convert_layout(p.to(element), OF_P)
        tile_i += num_tiles
        v = v_ring.tiles.index(wait_full(v_ring, tile_i - 1))
        acc = warpgroup_mma(p, v, acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        release(v_ring, tile_i - 1)
        if outputs.v_scale_ptr is not None:
            acc = acc * gl.load(outputs.v_scale_ptr + block.head // GROUP * stride_scale)
        finish(wg, acc, m, denom, q_ring, block_i, block, rows, outputs, BLOCK_T)
        block_i += 1
        slot = wait_full(q_ring, block_i)
        block = read_note(notes, slot)


@gluon.jit
def attend_in_fp8(
    wg: gl.constexpr, q_ring, k_ring, v_ring, notes, scoring, outputs, stride_scale,
    GROUP: gl.constexpr, BLOCK_T: gl.constexpr, SCORE_MOD: gl.constexpr,
):  # fmt: skip
    """Attend as `attend` does, to keys and turned values in fp8, with products in fp8.

    The matrix unit adds fp8 products up with 14 bits or so: a tile's are added to the others in float32. Products are short beside the softmax, and
    accumulators of three kinds would not fit the registers: one's own products run one after the other, the other warpgroup's softmax beside them.
    """
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[1]
    HEAD_DIM: gl.constexpr = k_ring.tiles.shape[2]
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    OF_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    OF_P: gl.constexpr = gl.DotOperandLayout(0, OF_OUT, 4)
    element: gl.constexpr = k_ring.tiles.dtype
    rows = wg * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OF_SCORES))
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, OF_SCORES))
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, OF_SCORES)
    no_out = gl.zeros([ROWS, HEAD_DIM], gl.float32, OF_OUT)

    block_i = 0
    tile_i = 0
    slot = wait_full(q_ring, block_i)
    block = read_note(notes, slot)
    while block.q_len > 0:
        tile, num_tiles = span(block, scoring.back, scoring.ahead, BLOCK_T, BLOCK_N)
        slopes = None
        if scoring.slopes_ptr is not None:
            slopes = gl.load(scoring.slopes_ptr + block.head + rows // BLOCK_T).to(gl.float32)
        q, scale = narrow(q_ring.tiles.index(slot), element, wg * ROWS, 7, OF_SCORES)
        scale *= scoring.scale
        if scoring.k_scale_ptr is not None:
            scale *= gl.load(scoring.k_scale_ptr + block.head // GROUP * stride_scale)
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, OF_SCORES))
        denom = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, OF_SCORES))
        acc = no_out
        for i in range(tile_i, tile_i + num_tiles):
            k = k_ring.tiles.index(wait_full(k_ring, i))
            scores = warpgroup_mma(q, k.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            release(k_ring, i)
            p, m, denom, alpha = softmax_step(scores, m, denom, tile * BLOCK_N, rows, cols, block, slopes, scale, scoring, 8.0, BLOCK_T, SCORE_MOD)
            p = gl.convert_layout(in_fours(p.to(element)), OF_P)
            v = v_ring.tiles.index(wait_full(v_ring, i))
            part = warpgroup_mma(p, v.permute((1, 0)), no_out, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            release(v_ring, i)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OF_OUT))[:, None] + part
            tile -= 1
        tile_i += num_tiles
        if outputs.v_scale_ptr is not None:
            acc = acc * gl.load(outputs.v_scale_ptr + block.head // GROUP * stride_scale)
        finish(wg, acc, m - 8.0, denom, q_ring, block_i, block, rows, outputs, BLOCK_T)
        block_i += 1
        slot = wait_full(q_ring, block_i)
        block = read_note(notes, slot)


@gluon.jit
def in_fours(x):
    """Reorder columns by 16, so that the four that a thread has of them in an accumulator, two and two, are the four side by side of an operand in bytes."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return x.reshape([ROWS, COLUMNS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, COLUMNS])


@gluon.jit
def narrow(q, element: gl.constexpr, FIRST: gl.constexpr, PEAK: gl.constexpr, OF_SCORES: gl.constexpr):
    """Turn a warpgroup's queries, in the rows of a tile from FIRST on, into another element where they lie, each row times the power of two that brings its
    largest number to 2^PEAK or above, below twice that; return the tile, and one over those powers.
    """
    COLUMNS: gl.constexpr = q.shape[1]
    IN_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.NVMMASharedLayout(128, element.primitive_bitwidth, 2)
    numbers = q.slice(FIRST, ROWS).load(IN_ROWS).to(gl.float32)
    exponent = gl.maximum(gl.max(gl.abs(numbers), 1).to(gl.int32, bitcast=True) >> 23, PEAK + 1)  # biased by 127
    grown = ((254 + PEAK - exponent) << 23).to(gl.float32, bitcast=True)
    shrunk = ((exponent - PEAK) << 23).to(gl.float32, bitcast=True)
    tile = reinterpret(q, element, [q.shape[0] * 16 // element.primitive_bitwidth, COLUMNS], NARROW)
    tile.slice(FIRST, ROWS).store((numbers * grown[:, None]).to(element))
    fence_async_shared()
    return tile.slice(FIRST, ROWS), gl.convert_layout(shrunk, gl.SliceLayout(1, OF_SCORES))


@gluon.jit
def by_row(factor):
    """Return a factor of a tile's rows, or one of all of them."""
    if isinstance(factor, gl.tensor) and len(factor.shape) == 1:
        factor = factor[:, None]
    return factor


@gluon.jit
def softmax_step(scores, m, denom, pos, rows, cols, block, slopes, scale, scoring, LIFT: gl.constexpr, BLOCK_T: gl.constexpr, SCORE_MOD: gl.constexpr):
    """Fold a tile of scores, of the keys from `pos` on, into the running maximum and denominator; return the probabilities times 2^LIFT first, and last the
    factor for what was accumulated before.
    """
    low_pos, high_pos = block.first_pos + block.token, block.first_pos + gl.minimum(block.token + BLOCK_T, block.q_len) - 1
    q_pos = low_pos + rows % BLOCK_T
    exponent_scale = scale * LOG2E
    if SCORE_MOD is not None:
        exponent_scale = LOG2E
        scores = SCORE_MOD(scores * by_row(scale), q_pos, pos + cols, slopes, scoring.softcap)
    # Else every row sees all of the tile.
    if (pos + scores.shape[1] > gl.minimum(low_pos + scoring.ahead + 1, block.seq_len)) | (pos < high_pos - scoring.back):
        first_col, last_col = q_pos - scoring.back - pos, gl.minimum(q_pos + scoring.ahead, block.seq_len - 1) - pos
        scores = gl.where((cols[None, :] >= first_col[:, None]) & (cols[None, :] <= last_col[:, None]), scores, float("-inf"))
    m_new = gl.maximum(m, gl.max(scores, 1) * exponent_scale)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key: -inf - -inf is NaN
    p = gl.exp2(scores * by_row(exponent_scale) - (shift - LIFT)[:, None])
    alpha = gl.exp2(m - shift)
    return p, m_new, denom * alpha + gl.sum(p, 1), alpha


@gluon.jit
def finish(wg: gl.constexpr, acc, m, denom, q_ring, block_i, block, rows, outputs, BLOCK_T: gl.constexpr):
    """Normalise a block's results and write them, by way of the shared memory of its queries, which it then releases."""
    element: gl.constexpr = q_ring.tiles.dtype
    HEAD_DIM: gl.constexpr = q_ring.tiles.shape[2]
    OF_OUT: gl.constexpr = acc.type.layout
    IN_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if outputs.sinks_ptr is not None:  # one more key, of score sink[h] and value 0
        sink = gl.load(outputs.sinks_ptr + block.head + rows // BLOCK_T).to(gl.float32) * LOG2E
        m_new = gl.maximum(m, sink)
        alpha = gl.exp2(m - m_new)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OF_OUT))[:, None]
        denom = denom * alpha + gl.exp2(sink - m_new)
        m = m_new
    seen = denom > 0.0
    safe = gl.where(seen, denom, 1.0)
    if outputs.lse_ptr is not None:
        tokens = block.token + rows % BLOCK_T
        lse = gl.where(seen, m * LN2 + gl.log(safe), float("-inf"))
        at = (block.q_start + tokens).to(gl.int64) * outputs.stride_lse + block.head + rows // BLOCK_T
        gl.store(outputs.lse_ptr + at, lse, mask=tokens < block.q_len)
    staged = q_ring.tiles.index(block_i % q_ring.empty.shape[0]).slice(wg * ROWS, ROWS)
    staged.store((acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, OF_OUT))[:, None]).to(element))
    result = staged.load(IN_ROWS)
    fence_async_shared()
    release(q_ring, block_i)
    out_rows = wg * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, IN_ROWS))
    tokens = block.token + out_rows % BLOCK_T
    offsets = (block.q_start + tokens).to(gl.int64) * outputs.stride_out_token + (block.head + out_rows // BLOCK_T) * outputs.stride_out_head
    offs_d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, IN_ROWS))
    gl.store(outputs.out_ptr + offsets[:, None] + offs_d[None, :], result, mask=(tokens < block.q_len)[:, None] & (offs_d < HEAD_DIM)[None, :])


@gluon.jit(do_not_specialize=["few", "num_seqs", "stride_table", "back", "ahead"])
def prefill_kernel(
    out_ptr, lse_ptr, sinks_ptr, slopes_ptr, k_scale_ptr, v_scale_ptr, q_desc, k_desc, v_desc, kv, cu_seqlens_q, counter,
    scale, softcap, back, ahead, few, num_seqs, stride_table, stride_q_head, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr, SCORE_MOD: gl.constexpr,
    WARPGROUPS: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BLOCKS: gl.constexpr, BYTE_STAGES: gl.constexpr,
    IN_FP8: gl.constexpr, BOX: gl.constexpr, Q_BOX: gl.constexpr,
):  # fmt: skip
    gdc_wait()
    if few > 0:  # the kernel that serves sequences of so few queries may begin wherever there is room
        gdc_launch_dependents()
    q_ring = make_ring(q_desc.dtype, WARPGROUPS * ROWS, HEAD_DIM, BLOCKS, WARPGROUPS)
    NUMBER: gl.constexpr = k_desc.dtype if BYTE_STAGES == 0 or IN_FP8 else gl.float16
    k_ring = make_ring(NUMBER, BLOCK_N, HEAD_DIM, STAGES, WARPGROUPS)
    if IN_FP8:
        v_ring = make_ring(NUMBER, HEAD_DIM, BLOCK_N, STAGES, WARPGROUPS)
    else:
        v_ring = make_ring(NUMBER, BLOCK_N, HEAD_DIM, STAGES, WARPGROUPS)
    notes = gl.allocate_shared_memory(gl.int32, [BLOCKS * NOTE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    scoring = Scoring(scale, k_scale_ptr, softcap, back, ahead, slopes_ptr)
    outputs = Outputs(out_ptr, lse_ptr, sinks_ptr, v_scale_ptr, stride_out_token, stride_out_head, stride_lse)
    if WARPGROUPS == 1:
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (0, q_ring, k_ring, v_ring, notes, scoring, outputs, kv.scale_head, GROUP, BLOCK_T, SCORE_MOD)),
                (fetch, (q_ring, k_ring, v_ring, notes, q_desc, k_desc, v_desc, kv, cu_seqlens_q, counter, few, num_seqs, back,
                         ahead, stride_table, stride_q_head, NUM_KV_HEADS, GROUP, BLOCK_T, PAGE_SIZE, Q_BOX, BOX)),
            ],
            [1],
            [40],
        )  # fmt: skip
    elif BYTE_STAGES == 0:
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (0, q_ring, k_ring, v_ring, notes, scoring, outputs, kv.scale_head, GROUP, BLOCK_T, SCORE_MOD)),
                (attend, (1, q_ring, k_ring, v_ring, notes, scoring, outputs, kv.scale_head, GROUP, BLOCK_T, SCORE_MOD)),
                (fetch, (q_ring, k_ring, v_ring, notes, q_desc, k_desc, v_desc, kv, cu_seqlens_q, counter, few, num_seqs, back,
                         ahead, stride_table, stride_q_head, NUM_KV_HEADS, GROUP, BLOCK_T, PAGE_SIZE, Q_BOX, BOX)),
            ],
            [4, 1],
            [232, 40],  # registers of each thread of the second and of the third
        )  # fmt: skip
    elif IN_FP8:
        v_bytes = make_ring(v_desc.dtype, BLOCK_N, HEAD_DIM, BYTE_STAGES, 1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend_in_fp8, (0, q_ring, k_ring, v_ring, notes, scoring, outputs, kv.scale_head, GROUP, BLOCK_T, SCORE_MOD)),
                (attend_in_fp8, (1, q_ring, k_ring, v_ring, notes, scoring, outputs, kv.scale_head, GROUP, BLOCK_T, SCORE_MOD)),
                (convert, (k_ring, v_bytes, k_ring, v_ring, q_ring, notes, back, ahead, BLOCK_T)),
                (fetch, (q_ring, k_ring, v_bytes, notes, q_desc, k_desc, v_desc, kv, cu_seqlens_q, counter, few, num_seqs, back,
                         ahead, stride_table, stride_q_head, NUM_KV_HEADS, GROUP, BLOCK_T, PAGE_SIZE, Q_BOX, BOX)),
            ],
            [4, 4, 1],
            [200, 72, 40],
        )  # fmt: skip
    else:
        k_bytes = make_ring(k_desc.dtype, BLOCK_N, HEAD_DIM, BYTE_STAGES, 1)
        v_bytes = make_ring(v_desc.dtype, BLOCK_N, HEAD_DIM, BYTE_STAGES, 1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (attend, (0, q_ring, k_ring, v_ring, notes, scoring, outputs, kv.scale_head, GROUP, BLOCK_T, SCORE_MOD)),
                (attend, (1, q_ring, k_ring, v_ring, notes, scoring, outputs, kv.scale_head, GROUP, BLOCK_T, SCORE_MOD)),
                (convert, (k_bytes, v_bytes, k_ring, v_ring, q_ring, notes, back, ahead, BLOCK_T)),
                (fetch, (q_ring, k_bytes, v_bytes, notes, q_desc, k_desc, v_desc, kv, cu_seqlens_q, counter, few, num_seqs, back,
                         ahead, stride_table, stride_q_head, NUM_KV_HEADS, GROUP, BLOCK_T, PAGE_SIZE, Q_BOX, BOX)),
            ],
            [4, 4, 1],
            [208, 56, 40],
        )  # fmt: skip
