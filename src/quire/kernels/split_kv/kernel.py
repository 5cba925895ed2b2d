"""The split-KV kernel: decode and drafted tokens, over any mix of lengths.

Grid: [num_partitions * num_kv_heads]. One program owns one partition of the batch's KV tiles (`schedule.py`), for one
KV head. It processes the partition's row blocks one after the other.

A row block inside one partition is finished by its program. For a row block that is cut, each program writes a partial
state to scratch. A program writes at most two partials: for the row block that it enters midway and for the one that it
leaves unfinished. The last program to arrive at a row block (atomic counter) combines its partials (`reduce.py`), or a
second launch combines those of all row blocks (`combine.py`). Both combine in key order, so results are deterministic.

For batch-invariant results (FIXED_SPLIT), partitions are cut only at multiples of FIXED_SPLIT keys, which are splits. A
row block is the left fold of the states of its splits, so its sum does not depend on the cut.

This is FlashDecoding (split-KV) with a Stream-K partition (arXiv 2301.03598).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.panels import columns_of, join_pairs
from quire.kernels.primitives import (
    Scoring,
    Sight,
    Tiling,
    attend_tile,
    find_pages,
    find_rows,
    head_scales,
    in_units,
    keys_of_rows,
    load_intervals,
    load_queries,
    table_row,
    write_new,
)
from quire.kernels.split_kv.reduce import Partial, slot_of_partial, store_and_arrive, store_combined, store_partial
from quire.kernels.split_kv.schedule import (
    Sequence,
    Units,
    is_as_planned,
    load_part,
    load_sequence,
    next_row_block,
    skip_prompts,
    span,
    units_here,
)
from quire.kernels.states import LOG2E, Outputs, empty_state, fold_split, groups_of, num_sums, store_result, total


@triton.jit(
    do_not_specialize=["is_found_now", "stride_table", "stride_lse", "window_left", "window_right"],
)
def split_kv_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM_V]
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr,  # [num_q_heads], or None
    slopes_ptr,  # [num_q_heads], or None
    cache,  # views.CacheTensors
    new,  # views.NewTokens, or None
    norm_rope,  # views.NormRope, or None
    is_found_now,  # whether the launch before this one finds the schedule, as a number
    kv,  # views.KVLayout
    cu_seqlens_q,  # [num_seqs + 1] int32, or None where every sequence has one query
    scratch,  # views.Partials
    scale, softcap, window_left, window_right,
    stride_table, stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WIDE_OFFSETS: tl.constexpr, SCORE_MOD: tl.constexpr, DECODE: tl.constexpr,
    PACKED_FP8: tl.constexpr, TOKEN_SCALES: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL_TILE_LOOP: tl.constexpr, PER_ROW_MASK: tl.constexpr,
    MULTI_BLOCK: tl.constexpr,  # a sequence may have several row blocks
    PDL: tl.constexpr,  # programmatic dependent launch
    WGMMA: tl.constexpr,  # of 64 rows and more, the compiler makes wgmma
    STRIDE_UNIT: tl.constexpr,  # of `views.stride_unit`
    NEW_TOKENS: tl.constexpr,  # most new tokens of a sequence; 0 without `new`
    ENCODE: tl.constexpr,  # jit function from float32 to stored elements; None if the cache is not quantised
    ROTARY_DIM: tl.constexpr,  # columns of a head that `norm_rope` rotates; None without `norm_rope`
    INTERLEAVED: tl.constexpr,  # pairs of them are (2i, 2i + 1)
    PARTIAL_ROWS: tl.constexpr,  # rows of a partial that are stored
    MAX_DECODE_QUERIES: tl.constexpr, INTERVALS: tl.constexpr, MORE_INTERVALS: tl.constexpr,  # of Units
    FIXED_SPLIT: tl.constexpr,  # keys of a split, a multiple of BLOCK_N; 0 where units are tiles
    COMBINE_LAUNCH: tl.constexpr,  # another launch combines (`combine.py`)
    TWO_LEVEL: tl.constexpr,  # many partials are combined in two levels
    TWO_LEVEL_MIN_PARTIALS: tl.constexpr, EARLY_EXIT_MAX_TILES: tl.constexpr,  # of CostModel
    FULL_TILE_LOOP_MIN_TILES: tl.constexpr,
):  # fmt: skip
    if PDL and MAX_DECODE_QUERIES == 0:  # this kernel may start before the previous one in the stream has ended
        if is_found_now:  # by the launch before this one, for which `load_part` has to wait
            gdc_wait()
    EACH: tl.constexpr = 2 if PACKED_FP8 else 1  # numbers in a stored element
    # With packed fp8, fewer programs of an SM would have registers for these sums.
    COLUMN_SUMS: tl.constexpr = FIXED_SPLIT == 0 and not PACKED_FP8
    UNIT: tl.constexpr = BLOCK_N if FIXED_SPLIT == 0 else FIXED_SPLIT
    BAND: tl.constexpr = kv.key_begin is None and kv.tree_bits is None  # rows see the band of their positions
    T: tl.constexpr = Tiling(
        BLOCK_N, PAGE_SIZE, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_VEC, V_VEC, WIDE_OFFSETS,
        SCORE_MOD, DECODE, PACKED_FP8, TOKEN_SCALES, INPUT_PRECISION, PER_ROW_MASK, STRIDE_UNIT,
        WGMMA and FIXED_SPLIT > 0 and BLOCK_M >= 64,
    )  # fmt: skip
    U: tl.constexpr = Units(GROUP, BLOCK_M, UNIT, MAX_DECODE_QUERIES, INTERVALS, MORE_INTERVALS)
    # Partials are combined a group of columns at a time, which needs fewer registers than the loop over tiles.
    COLUMNS: tl.constexpr = min(BLOCK_DV, 64 if PARTIAL_ROWS > 16 else 4096 // PARTIAL_ROWS)
    # With masks per row, or with many rows, fewer partials fit into the registers; with more, loads wait for one
    # another (1 x 4,096, 4 drafts: 15.0 µs, not 18.4; NVIDIA H200, 2026-11-21).
    ROOM: tl.constexpr = 4096 if PARTIAL_ROWS > 16 else (8192 if PER_ROW_MASK else 16384)
    MIN_PARTIALS: tl.constexpr = TWO_LEVEL_MIN_PARTIALS if PER_ROW_MASK else 2 * TWO_LEVEL_MIN_PARTIALS
    P: tl.constexpr = Partial(
        PARTIAL_ROWS, HEAD_DIM_V, BLOCK_DV, COLUMNS, NUM_KV_HEADS, PER_ROW_MASK, ROOM, FIXED_SPLIT > 0,
        MIN_PARTIALS if TWO_LEVEL else None,
    )  # fmt: skip
    partition = tl.program_id(0) // NUM_KV_HEADS  # adjacent programs read other heads of the same pages
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    part = load_part(scratch.parts, partition)
    if PDL and MAX_DECODE_QUERIES == 0:
        gdc_wait()
    scale, v_scale = head_scales(cache, kv, kv_head, scale, T)
    exponent_scale = LOG2E if SCORE_MOD is not None else scale * LOG2E
    scoring = Scoring(scale, exponent_scale, softcap, window_left, window_right)
    stride_out_token, stride_out_head = in_units(stride_out_token, STRIDE_UNIT), in_units(stride_out_head, STRIDE_UNIT)
    outputs = Outputs(out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse)

    seq, block, more = part.seq, part.block, part.low < part.high
    sequence = load_sequence(kv, cu_seqlens_q, seq)  # which the tiles of the first row block do not wait for
    known = Sequence(part.seq_len, sequence.q_start, part.q_len, part.first_pos)
    while more:  # one row block, or those of its units that are in this partition
        _, q_start, q_len, first_pos = sequence
        kv_start, kv_stop, first, num_units, _ = span(known, kv, window_left, window_right, U)
        row_block = block if MULTI_BLOCK else 0
        start, stop, block_unit, planned, is_cut = units_here(part, seq, row_block, num_units)
        num_here = stop - start
        as_planned = is_as_planned(sequence, known) & (planned == num_units)
        num_blocks = tl.cdiv(q_len * GROUP, BLOCK_M)
        next_seq, next_block, more = next_row_block(part, seq, row_block, num_blocks, MULTI_BLOCK)
        if MAX_DECODE_QUERIES > 0:
            next_seq = skip_prompts(cu_seqlens_q, next_seq, part.last_seq, MAX_DECODE_QUERIES)
        ends_early = (not more) & (COMBINE_LAUNCH | (part.size <= EARLY_EXIT_MAX_TILES))
        row = table_row(kv, seq, stride_table)
        begin = first + start  # in units of the sequence
        row_stop = kv_stop
        if BAND:  # this load is in flight while the queries are loaded
            page = find_pages(row, begin * UNIT, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
        rows = find_rows(row_block * BLOCK_M, q_start, q_len, first_pos, kv_head, GROUP, BLOCK_M)
        sight, tile_begin = Sight(None, None, None, None), begin
        if not BAND:
            bits = None
            if kv.tree_bits is not None:
                bits = tl.load(kv.tree_bits + rows.token, mask=rows.owned, other=0)
            seq_len = sequence.seq_len
            key_begin, key_end = load_intervals(kv, rows, first_pos, seq_len)
            sight = Sight(key_begin, key_end, bits, first_pos)
            # The rows of this row block may see fewer keys than those of the sequence.
            kv_start, kv_stop, seen_by_all, seen_until = keys_of_rows(
                kv, rows, key_begin, key_end, bits, first_pos, q_len, seq_len
            )
            tile_begin = tl.maximum(begin, kv_start // BLOCK_N)
            tile_end = tl.maximum(tl.minimum(begin + num_here, tl.cdiv(kv_stop, BLOCK_N)), tile_begin)
            if FIXED_SPLIT > 0:  # splits without keys have states too
                tile_begin = begin
            page = find_pages(row, tile_begin * UNIT, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
        q_ptrs = q_ptr + rows.token * in_units(stride_q_token, STRIDE_UNIT)
        q_ptrs += rows.head.to(tl.int64) * in_units(stride_q_head, STRIDE_UNIT)
        q = load_queries(
            q_ptrs, rows.owned, HEAD_DIM, BLOCK_D, PACKED_FP8, rows.token, norm_rope, ROTARY_DIM, INTERLEAVED
        )
        slopes = None
        if slopes_ptr is not None:
            slopes = tl.load(slopes_ptr + rows.head, mask=rows.owned, other=0.0).to(tl.float32)
        if new is not None:
            if (begin + num_here) * UNIT > first_pos:  # this program reads new keys, so it writes them first
                write_new(
                    new, norm_rope, cache, kv, q_start, q_len, kv_head, NEW_TOKENS, ENCODE, ROTARY_DIM, INTERLEAVED, T
                )
                tl.debug_barrier()
        acc, m_i, l_i = empty_state(BLOCK_M, HEAD_DIM_V, EACH, num_sums(BLOCK_N) if COLUMN_SUMS else 1)
        poison = tl.where(as_planned, 0.0, float("nan"))
        l_i += poison
        following = load_sequence(kv, cu_seqlens_q, tl.minimum(next_seq, part.last_seq))  # while tiles are attended to
        if FIXED_SPLIT == 0:
            masked = tile_begin  # the first tile that needs masks
            if FULL_TILE_LOOP:  # most tiles of a long partition are full: every row sees every key
                if BAND:
                    low_pos = first_pos + row_block * BLOCK_M // GROUP
                    high_pos = first_pos + tl.minimum((row_block + 1) * BLOCK_M - 1, q_len * GROUP - 1) // GROUP
                    seen_until = tl.minimum(low_pos + window_right + 1, kv_stop)
                masked = tl.minimum(seen_until // BLOCK_N, begin + num_here if BAND else tile_end)
                masked = tl.maximum(masked, tile_begin)
                if BAND:
                    seen_by_all = high_pos - window_left
                pays = (num_here > FULL_TILE_LOOP_MIN_TILES) & (seen_by_all <= tile_begin * BLOCK_N)
                masked = tl.where(pays, masked, tile_begin)
                for tile in tl.range(tile_begin, masked):
                    next_page = find_pages(row, (tile + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
                    acc, m_i, l_i = attend_tile(
                        acc, m_i, l_i, q, cache, kv, kv_head, page, tile * BLOCK_N, rows, sight, slopes, kv_start,
                        kv_stop, scoring, T, False,
                    )  # fmt: skip
                    page = next_page
            for tile in tl.range(masked, begin + num_here if BAND else tile_end):
                next_page = find_pages(row, (tile + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
                acc, m_i, l_i = attend_tile(
                    acc, m_i, l_i, q, cache, kv, kv_head, page, tile * BLOCK_N, rows, sight, slopes, kv_start, kv_stop,
                    scoring, T, True,
                )  # fmt: skip
                page = next_page
            if COLUMN_SUMS:
                l_i = tl.sum(l_i, 1)
        else:
            # Each split has a state. States are added in key order, here or by the program that combines, so the sum is
            # the same.
            TILES: tl.constexpr = FIXED_SPLIT // BLOCK_N
            last = tl.minimum((begin + num_here) * TILES, tl.cdiv(row_stop, BLOCK_N)) - 1
            SUMS: tl.constexpr = groups_of(BLOCK_N)
            split_acc, split_m, split_l = empty_state(BLOCK_M, HEAD_DIM_V, EACH, SUMS)
            split_l += poison
            for tile in tl.range(begin * TILES, last + 1):
                next_page = find_pages(row, (tile + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
                split_acc, split_m, split_l = attend_tile(
                    split_acc, split_m, split_l, q, cache, kv, kv_head, page, tile * BLOCK_N, rows, sight, slopes,
                    kv_start, kv_stop, scoring, T, True,
                )  # fmt: skip
                page = next_page
                if ((tile + 1) % TILES == 0) | (tile == last):
                    if start == 0:
                        acc, m_i, l_i = fold_split(acc, m_i, l_i, split_acc, split_m, split_l)
                    else:
                        slot = (block_unit + tile // TILES - first) * NUM_KV_HEADS + kv_head
                        split_sum, columns = total(split_l), columns_of(HEAD_DIM_V, EACH, BLOCK_M)
                        store_partial(scratch, split_acc, split_m, split_sum, columns, slot, True, BLOCK_M, P)
                    split_acc, split_m, split_l = empty_state(BLOCK_M, HEAD_DIM_V, EACH, SUMS)
                    split_l += poison
        acc, columns = join_pairs(acc, HEAD_DIM_V, EACH, BLOCK_M)
        part = load_part(scratch.parts, partition)  # read again, and so in no register while tiles are loaded
        start, stop, block_unit, planned, is_cut = units_here(part, seq, row_block, num_units)
        if PDL:
            if ends_early:
                gdc_launch_dependents()
        if not is_cut:
            store_result(outputs, acc, m_i, l_i, v_scale, rows, columns, HEAD_DIM_V)
        elif COMBINE_LAUNCH:
            left = (FIXED_SPLIT == 0) | (start == 0)  # with splits, only where the row block begins
            slot = block_unit + stop - 1 if FIXED_SPLIT > 0 else slot_of_partial(partition, start)
            store_partial(scratch, acc, m_i, l_i, columns, slot * NUM_KV_HEADS + kv_head, left, BLOCK_M, P)
        else:
            is_last, slots = store_and_arrive(
                scratch, acc, m_i, l_i, columns, partition, kv_head, start, block_unit, planned, part.size, BLOCK_M, P
            )
            if is_last:
                stored = find_rows(row_block * BLOCK_M, q_start, q_len, first_pos, kv_head, GROUP, PARTIAL_ROWS)
                store_combined(scratch, slots, kv_head, outputs, v_scale, stored, P)
        seq, block, sequence, known = next_seq, next_block, following, following
    if PDL and MAX_DECODE_QUERIES > 0:
        # This kernel runs concurrently with the Hopper kernel before it in the stream. It waits before it exits, so
        # that later kernels see both results.
        gdc_wait()
