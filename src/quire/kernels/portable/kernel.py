"""The portable kernel: attention over pages, of any mix of lengths, in one of two forms.

Without partitions, one program owns one row block, which is BLOCK_M rows of one sequence and one KV head, and all keys
that these rows see. Grid: [num_row_blocks * num_kv_heads]. With partitions, one program owns one partition of the
batch's KV tiles (`schedule.py`), for one KV head, and processes its row blocks one after the other. Grid:
[num_partitions * num_kv_heads].

A row block inside one partition is finished by its program. Of one that is cut, each program writes a partial state to
scratch: at most two, for the row block that it enters midway and the one that it leaves unfinished. The last program to
arrive at a row block combines its partials (`reduce.py`), or a second launch does (`combine.py`), in key order.

For batch-invariant results (FIXED_SPLIT), partitions are cut only at multiples of FIXED_SPLIT keys, which are splits. A
row block is the left fold of the states of its splits, so its sum does not depend on the cut.

The online softmax is that of FlashAttention-2 (arXiv 2307.08691, section 3.1). Partitions are FlashDecoding (split-KV)
with the work division of Stream-K (arXiv 2301.03598).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.codes import each_of, empty_sums, finish_codes
from quire.kernels.panels import columns_of, is_turned, join_pairs
from quire.kernels.portable.reduce import Partial, slot_of_partial, store_and_arrive, store_combined, store_partial
from quire.kernels.primitives import (
    Inputs,
    Keys,
    RowBlock,
    Rows,
    Scoring,
    Sight,
    Tiling,
    attend_tile,
    find_rows,
    head_scales,
    in_units,
    keys_of_rows,
    load_intervals,
    load_queries,
    pages_of_tile,
    table_row,
    within_bounds,
    write_new,
)
from quire.kernels.schedule import (
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
from quire.kernels.states import (
    LOG2E,
    Outputs,
    empty_state,
    fold_split,
    groups_of,
    is_too_large,
    num_sums,
    store_result,
    total,
)

# Numbers of which Triton compiles no kernel for 1, nor for those that 16 divides.
VARY = "is_found_now", "one_each", "num_seqs", "num_beside", "stride_table", "stride_lse", "window_left", "window_right"


class Form(NamedTuple):
    """Compile-time constants of the form of the kernel, of its loops over tiles, and of its partitions."""

    PARTITIONED: Any
    FULL_TILE_LOOP: Any  # full tiles, of which every row sees every key, have a loop of their own
    FULL_TILE_LOOP_MIN_TILES: Any  # of CostModel, where there are partitions
    FIXED_SPLIT: Any  # keys of a split, a multiple of BLOCK_N; 0 where the keys are not split
    SUMS: Any  # of each row, as `empty_state` has them
    BOUNDS: Any  # jit function of a mask's bounds, or None
    KEEPS: Any  # rows keep their maxima in full tiles, as `kept_step` says
    IN_ORDER: Any  # tiles come in the order of keys
    MULTI_BLOCK: Any  # as `portable_kernel` has it, like the next
    COMBINE_LAUNCH: Any
    EARLY_EXIT_MAX_TILES: Any
    PDL: Any


class Share(NamedTuple):
    """What a partition has of a row block, and what becomes of it."""

    kv_start: Any  # the first key that any row of the sequence sees, like the next
    kv_stop: Any
    start: Any  # the first tile of the sequence that is in the partition
    stop: Any
    poison: Any  # 0, or NaN where the schedule is stale
    next_seq: Any  # sequence of the next row block
    scratch: Any  # for states of splits: of those of a row block that begins in another partition
    begins_here: Any
    first_slot: Any  # of the sequence's first split


@triton.jit
def find_row_block(
    cu_seqlens_q, num_seqs, index, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    SEVERAL: tl.constexpr,
):  # fmt: skip
    """Return the sequence of row block `index` of the batch, from the last one on, and which of the sequence's it is.

    Without SEVERAL, sequences have at most one query, and all as many row blocks. With it, a sequence has
    `q_len * GROUP` rows. With one spare row block for each sequence, the first row block of sequence s is number
    `cu_seqlens_q[s] * GROUP // BLOCK_M + s`. This needs no sum over sequences, so a binary search finds it.
    """
    if not SEVERAL:
        return index // tl.cdiv(GROUP, BLOCK_M), index % tl.cdiv(GROUP, BLOCK_M)
    else:
        index = tl.num_programs(0) // NUM_KV_HEADS - 1 - index  # the last ones of a causal prompt see the most keys
        low = 1  # the first sequence begins with row block 0
        high = num_seqs
        while low < high:  # the last sequence whose first row block is at or before this one
            middle = (low + high) // 2
            before = tl.load(cu_seqlens_q + middle) * GROUP // BLOCK_M + middle <= index
            low = tl.where(before, middle + 1, low)
            high = tl.where(before, high, middle)
        seq = low - 1
        return seq, index - (tl.load(cu_seqlens_q + seq) * GROUP // BLOCK_M + seq)


@triton.jit
def attend(inputs, seq, sequence, known, row_block, share, T: tl.constexpr, F: tl.constexpr, P: tl.constexpr):
    """Attend with row block `row_block` of a sequence; or with what a partition has of it, `share`, which else is None.

    Until results are stored, nothing waits for the lengths of now, `sequence`, where a schedule has them: `known`.

    Returns:
        rows: Rows, by the lengths of now.
        following: Sequence of the next row block, of a partition.
        acc, columns: what the rows have of values, and which columns each panel of it holds.
        m_i, l_i: the rest of the state over the keys that the rows see, or over those of them in the partition.
    """
    seq_len, q_start, q_len, first_pos = known
    if not T.PER_ROW_MASK:  # a sequence has one query, as the compiler may know, or neither a query nor keys
        seq_len, q_start = tl.where(q_len > 0, seq_len, 0), tl.where(q_len > 0, q_start, 0)
        q_len = 1
    kv, first_row = inputs.kv, row_block * T.BLOCK_M
    rows = find_rows(first_row, q_start, q_len, first_pos, inputs.kv_head, T.GROUP, T.BLOCK_M)
    sight = Sight(None, None, None, None)
    if kv.key_begin is not None or kv.tree_bits is not None:
        bits = None
        if kv.tree_bits is not None:
            bits = tl.load(kv.tree_bits + rows.token, mask=rows.owned, other=0)
        sight = Sight(*load_intervals(kv, rows, first_pos, seq_len), bits, first_pos)
    if F.BOUNDS is not None:
        sight = Sight(*within_bounds(sight, rows, seq, seq_len, inputs, F.BOUNDS), None, first_pos)
    kv_start, kv_stop, full_from, full_to = keys_of_rows(
        rows, sight, first_row, first_pos, q_len, seq_len, inputs.scoring, T.GROUP
    )
    start = kv_start // T.BLOCK_N
    stop = tl.maximum(tl.cdiv(kv_stop, T.BLOCK_N), start)
    if F.PARTITIONED:
        if sight.begin is None:  # those of the sequence are known earlier
            kv_start, kv_stop, start, stop = share.kv_start, share.kv_stop, share.start, share.stop
        elif F.FIXED_SPLIT > 0:  # splits without keys have states too
            start, stop = share.start, share.stop
        else:
            start = tl.maximum(share.start, start)
            stop = tl.maximum(tl.minimum(share.stop, stop), start)
    keys = Keys(table_row(kv, seq, inputs.stride_table), kv_start, kv_stop)

    # Every row sees every key of a full tile, so full tiles need no masks. The other tiles are at the two edges. A
    # softmax may take tiles in any order, and then full tiles come first, or last if rows then keep their maxima. A
    # fold of splits may not, nor does a program that has partitions: they have a full-tile loop if the first tiles are
    # full.
    full_start, full_stop = start, start
    if F.FULL_TILE_LOOP:
        full_start = tl.minimum(tl.maximum(tl.cdiv(full_from, T.BLOCK_N), start), stop)
        full_stop = tl.maximum(tl.minimum(full_to // T.BLOCK_N, stop), full_start)
        if F.KEEPS:  # each row has a maximum from tiles at the one end or the other, or else from the first full one
            has_after = (full_stop < stop) & (full_to > full_stop * T.BLOCK_N)
            has_before = (full_start > start) & (full_from < full_start * T.BLOCK_N)
            full_start = tl.where(has_after | has_before, full_start, tl.minimum(full_start + 1, full_stop))
        if F.IN_ORDER or F.PARTITIONED:
            pays = (full_start == start) | (not F.IN_ORDER)
            if F.PARTITIONED:  # most tiles of a long partition are full
                pays = pays & (stop - start > F.FULL_TILE_LOOP_MIN_TILES)
            full_start = tl.where(pays, full_start, start)
            full_stop = tl.where(pays, full_stop, start)
    first = full_start
    if F.KEEPS:
        first = tl.where(full_start > start, start, full_stop)
    page = pages_of_tile(keys, first, T)  # in flight while the queries are loaded

    q = load_queries(inputs, rows, T)
    slopes = None
    if inputs.slopes_ptr is not None:
        slopes = tl.load(inputs.slopes_ptr + rows.head, mask=rows.owned, other=0.0).to(tl.float32)
    if inputs.new is not None:
        # This program reads new keys, so it writes them first.
        if not F.PARTITIONED or stop * T.BLOCK_N > sequence.first_pos:
            write_new(inputs, sequence.q_start, sequence.q_len, T)
            tl.debug_barrier()
    span, of_rows = None, None
    if T.FUNCTION is not None:
        of_rows = T.FUNCTION(
            None, rows.q_pos, None, None, None, rows.head, inputs.kv_head, seq, rows.token, inputs.extras, None
        )
    if T.FUNCTION is not None and F.FIXED_SPLIT == 0:  # the forms of a function may differ in the last bit
        low_pos = first_pos + first_row // T.GROUP
        span = low_pos, low_pos + (T.GROUP - 1 + T.BLOCK_M - 1) // T.GROUP
    block = RowBlock(q, rows, sight, slopes, keys, seq, span, of_rows)
    following, poison = sequence, 0.0
    if F.PARTITIONED:
        # In flight while tiles are attended to.
        following = load_sequence(kv, inputs.cu_seqlens_q, share.next_seq, None, inputs.one_each)
        poison = share.poison
    acc, m_i, l_i = no_keys(poison, T, F)
    tiles = start, stop, full_start, full_stop
    if not F.KEEPS:
        FIRST: tl.constexpr = 0 if F.FULL_TILE_LOOP else 1
        acc, m_i, l_i = attend_tiles(acc, m_i, l_i, page, tiles, poison, block, inputs, share, FIRST, 2, T, F, P)
    else:
        again = start <= stop
        while again:
            tiles = start, stop, full_start, full_stop
            acc, m_i, l_i = no_keys(poison, T, F)
            acc, m_i, l_i = attend_tiles(acc, m_i, l_i, page, tiles, poison, block, inputs, share, 1, 2, T, F, P)
            again = full_start < full_stop
            if again:
                page = pages_of_tile(keys, full_start, T)
                acc, m_i, l_i = attend_tiles(acc, m_i, l_i, page, tiles, poison, block, inputs, share, 0, 1, T, F, P)
                again = is_too_large(l_i)
                full_start, full_stop = start, start  # once more, if need be, without a full tile
                page = pages_of_tile(keys, start, T)
    if T.FORMAT is not None and F.FIXED_SPLIT == 0:
        acc = finish_codes(acc, T)
    if F.SUMS > 1 and F.FIXED_SPLIT == 0:
        l_i = tl.sum(l_i, 1)
    acc, columns = join_pairs(acc, T.HEAD_DIM_V, each_of(T.FORMAT, T.PACKED_FP8, False), T.BLOCK_M, T.MOST)
    return rows_of_now(sequence, row_block, inputs.kv_head, T), following, acc, columns, m_i, l_i


@triton.jit
def rows_of_now(sequence, row_block, kv_head, T: tl.constexpr):
    """Return the rows of a row block. None is owned by a sequence without queries."""
    _, q_start, q_len, first_pos = sequence
    if T.PER_ROW_MASK:
        return find_rows(row_block * T.BLOCK_M, q_start, q_len, first_pos, kv_head, T.GROUP, T.BLOCK_M)
    else:
        rows = find_rows(row_block * T.BLOCK_M, q_start, 1, first_pos, kv_head, T.GROUP, T.BLOCK_M)
        # The interpreter of Triton 3.9 makes no mask of a vector and a number.
        return Rows(rows.token, rows.head, rows.q_pos, rows.owned & (q_len + 0 * rows.head > 0))


@triton.jit
def no_keys(poison, T: tl.constexpr, F: tl.constexpr):
    """Return the state over no keys; its sums begin with `poison`."""
    acc, m_i, l_i = empty_state(T.BLOCK_M, T.HEAD_DIM_V, each_of(T.FORMAT, T.PACKED_FP8, False), T.MOST, F.SUMS)
    if T.FORMAT is not None:
        acc = empty_sums(acc, l_i, T)
    return acc, m_i, l_i + poison


@triton.jit
def attend_tiles(
    acc, m_i, l_i, page, tiles, poison, block, inputs, share, FIRST: tl.constexpr, LAST: tl.constexpr, T: tl.constexpr,
    F: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Fold tiles into a state: full ones if FIRST is 0, and those with masks if LAST is 2.

    `page` has the page of each key of the first tile. `tiles` are the first tile of the row block, the one after its
    last, and the same of full ones. Sums begin with `poison`.
    """
    start, stop, full_start, full_stop = tiles
    keys = block.keys
    if F.FIXED_SPLIT > 0:
        # Each split has a state. States are added in key order, here or by who combines, so the sum is the same.
        EACH: tl.constexpr = each_of(T.FORMAT, T.PACKED_FP8, False)
        whole_acc, whole_m, whole_l = empty_state(T.BLOCK_M, T.HEAD_DIM_V, EACH, T.MOST)
        whole_l += poison
    for masked in tl.static_range(FIRST, LAST):
        num_before = full_start - start
        tile, begin, end = full_start, full_start, full_stop
        if masked and F.IN_ORDER:
            begin, end = full_stop, stop
        elif masked:  # tiles at the one end, then those at the other
            begin, end = 1, 1 + num_before + stop - full_stop
            tile = tl.where(num_before > 0, start, full_stop)
        if masked and FIRST == 0 and not F.IN_ORDER:  # the second loop
            page = pages_of_tile(keys, tile, T)
        for i in tl.range(begin, end):
            if masked and not F.IN_ORDER:
                next_tile = tl.where(i < num_before, start + i, full_stop + i - num_before)
            else:  # i - 1, carried from the iteration before, would make Triton give up its pipeline
                tile, next_tile = i, i + 1
            if is_turned(T.BLOCK_M):  # one warp would wait for a page to carry, and Triton loads this one ahead
                page = pages_of_tile(keys, tile, T)
                next_page = page
            elif masked or F.IN_ORDER:
                next_page = pages_of_tile(keys, next_tile, T)
            else:  # of another full tile, or of this one
                next_page = pages_of_tile(Keys(keys.table, None, None), tl.minimum(next_tile, end - 1), T)
            acc, m_i, l_i = attend_tile(
                acc, m_i, l_i, page, tile * T.BLOCK_N, block, inputs, T, masked, F.KEEPS and not masked
            )
            if F.FIXED_SPLIT > 0:
                TILES: tl.constexpr = F.FIXED_SPLIT // T.BLOCK_N
                if ((tile + 1) % TILES == 0) | (tile == stop - 1):
                    if T.FORMAT is not None:
                        acc = finish_codes(acc, T)
                    if not F.PARTITIONED or share.begins_here:
                        whole_acc, whole_m, whole_l = fold_split(whole_acc, whole_m, whole_l, acc, m_i, l_i)
                    else:
                        slot = (share.first_slot + tile // TILES) * P.LANES + inputs.kv_head
                        columns = columns_of(T.HEAD_DIM_V, EACH, T.BLOCK_M, T.MOST)
                        store_partial(share.scratch, acc, m_i, total(l_i), columns, slot, True, T.BLOCK_M, P)
                    acc, m_i, l_i = no_keys(poison, T, F)
            tile, page = next_tile, next_page
    if F.FIXED_SPLIT > 0:
        return whole_acc, whole_m, whole_l
    else:
        return acc, m_i, l_i


@triton.jit
def attend_partition(
    inputs, outputs, scratch, v_scale, index, part, T: tl.constexpr, F: tl.constexpr, U: tl.constexpr, P: tl.constexpr
):
    """Attend with the row blocks of partition `index`, and store their results or partials."""
    kv, kv_head, scoring = inputs.kv, inputs.kv_head, inputs.scoring
    TILES: tl.constexpr = U.UNIT // T.BLOCK_N
    seq, block, more = part.seq, part.block, part.low < part.high
    # Which the queries and the tiles of the first row block do not wait for.
    sequence = load_sequence(kv, inputs.cu_seqlens_q, seq, None, inputs.one_each)
    known = Sequence(part.seq_len, part.q_start, part.q_len, part.first_pos)
    while more:  # one row block, or those of its units that are in this partition
        kv_start, kv_stop, first, num_units, _ = span(known, kv, scoring.window_left, scoring.window_right, U)
        row_block = block if F.MULTI_BLOCK else 0
        start, stop, block_unit, planned, is_cut = units_here(part, seq, row_block, num_units)
        as_planned = is_as_planned(sequence, known) & (planned == num_units)
        num_blocks = tl.cdiv(sequence.q_len * T.GROUP, T.BLOCK_M)
        next_seq, next_block, more = next_row_block(part, seq, row_block, num_blocks, F.MULTI_BLOCK)
        if U.MAX_DECODE_QUERIES > 0:
            next_seq = skip_prompts(inputs.cu_seqlens_q, next_seq, part.last_seq, U.MAX_DECODE_QUERIES)
        ends_early = (not more) & (F.COMBINE_LAUNCH | (part.size <= F.EARLY_EXIT_MAX_TILES))
        stop_tile = (first + stop) * TILES
        if F.FIXED_SPLIT > 0:
            stop_tile = tl.minimum(stop_tile, tl.cdiv(kv_stop, T.BLOCK_N))
        share = Share(
            kv_start, kv_stop, (first + start) * TILES, stop_tile, tl.where(as_planned, 0.0, float("nan")),
            tl.minimum(next_seq, part.last_seq), scratch, start == 0, block_unit - first,
        )  # fmt: skip
        rows, following, acc, columns, m_i, l_i = attend(inputs, seq, sequence, known, row_block, share, T, F, P)
        part = load_part(scratch.parts, index)  # read again, and so in no register while tiles are loaded
        start, stop, block_unit, planned, is_cut = units_here(part, seq, row_block, num_units)
        if F.PDL:
            if ends_early:
                gdc_launch_dependents()
        if not is_cut:
            store_result(outputs, acc, m_i, l_i, v_scale, rows, columns, T.HEAD_DIM_V, F.FIXED_SPLIT > 0)
        elif F.COMBINE_LAUNCH:
            left = (F.FIXED_SPLIT == 0) | (start == 0)  # with splits, only where the row block begins
            slot = block_unit + stop - 1 if F.FIXED_SPLIT > 0 else slot_of_partial(index, start)
            slot = slot * P.LANES + kv_head
            store_partial(scratch, acc, m_i, l_i, columns, slot, rows.owned & left, T.BLOCK_M, P)
        else:
            is_last, slots = store_and_arrive(
                scratch, acc, m_i, l_i, columns, index, kv_head, start, block_unit, planned, part.size, T.BLOCK_M, P
            )
            if is_last:
                _, q_start, q_len, first_pos = sequence
                stored = find_rows(row_block * T.BLOCK_M, q_start, q_len, first_pos, kv_head, T.GROUP, P.ROWS)
                store_combined(scratch, slots, kv_head, outputs, v_scale, stored, P)
        seq, block, sequence, known = next_seq, next_block, following, following


@triton.jit(do_not_specialize=VARY)
def portable_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM_V]
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr,  # [num_q_heads], or None
    slopes_ptr,  # [num_q_heads], or None
    cache,  # views.CacheTensors
    new,  # views.NewTokens, or None
    norm_rope,  # views.NormRope, or None
    extras,  # of FUNCTION, from `user_mods.passed`, or None
    is_found_now,  # whether the launch before this one finds the schedule, as a number; None without partitions
    kv,  # views.KVLayout
    cu_seqlens_q, one_each,  # as `load_sequence` takes them
    scratch,  # views.Partials, or None without partitions
    scale, softcap, window_left, window_right,
    num_seqs,  # where row blocks are searched for, or None
    num_beside,  # partitions next to row blocks, or None
    stride_table, stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WIDE_OFFSETS: tl.constexpr, SCORE_MOD: tl.constexpr, DECODE: tl.constexpr,
    PACKED_FP8: tl.constexpr, TOKEN_SCALES: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FULL_TILE_LOOP: tl.constexpr, PER_ROW_MASK: tl.constexpr,
    MULTI_BLOCK: tl.constexpr,  # a sequence may have several row blocks
    PDL: tl.constexpr,  # programmatic dependent launch
    WGMMA: tl.constexpr,  # of 64 rows and more, the compiler makes wgmma
    OWN_ROWS: tl.constexpr,  # it makes mma.sync, and each warp has rows of its own
    STRIDE_UNIT: tl.constexpr, NEW_TOKENS: tl.constexpr, ENCODE: tl.constexpr,  # of Tiling, like the next
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, FUNCTION: tl.constexpr,
    FIXED_SPLIT: tl.constexpr, BOUNDS: tl.constexpr,  # of Form
    MIN_QUERIES: tl.constexpr,  # sequences with fewer belong to partitions next to row blocks
    # Of partitions alone:
    PARTIAL_ROWS: tl.constexpr = 0,  # rows from one partial to the next
    MAX_DECODE_QUERIES: tl.constexpr = 0, INTERVALS: tl.constexpr = 0, MORE_INTERVALS: tl.constexpr = False,  # of Units
    COMBINE_LAUNCH: tl.constexpr = False,  # another launch combines (`combine.py`)
    TWO_LEVEL: tl.constexpr = False,  # many partials are combined in two levels
    TWO_LEVEL_MIN_PARTIALS: tl.constexpr = 0, EARLY_EXIT_MAX_TILES: tl.constexpr = 0,  # of CostModel
    FULL_TILE_LOOP_MIN_TILES: tl.constexpr = 0,
    # Of Tiling:
    FORMAT: tl.constexpr = None, DECODE_V: tl.constexpr = None, IN_PTX: tl.constexpr = False,
    DECODE_SCALES: tl.constexpr = None,
    DECODE_PLACED: tl.constexpr = None,
    BESIDE_M: tl.constexpr = 0, BESIDE_N: tl.constexpr = 0,  # rows and keys of tiles of partitions next to row blocks
):  # fmt: skip
    HAS_PARTS: tl.constexpr = is_found_now is not None
    BESIDE: tl.constexpr = BESIDE_M > 0
    PARTITIONED: tl.constexpr = HAS_PARTS and not BESIDE
    AFTER: tl.constexpr = MAX_DECODE_QUERIES > 0 and not BESIDE  # of the launch before, with which this one runs
    T: tl.constexpr = Tiling(
        GROUP, BLOCK_M, BLOCK_N, PAGE_SIZE, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_VEC, V_VEC, WIDE_OFFSETS,
        SCORE_MOD, DECODE, PACKED_FP8, TOKEN_SCALES, INPUT_PRECISION, PER_ROW_MASK, STRIDE_UNIT,
        WGMMA and FIXED_SPLIT > 0 and BLOCK_M >= 64, NEW_TOKENS, ENCODE, BLOCK_M if OWN_ROWS else 0,
        ROTARY_DIM, INTERLEAVED, FUNCTION, FORMAT, DECODE_V, IN_PTX, DECODE_SCALES,
        DECODE_PLACED,
    )  # fmt: skip
    # With packed fp8, fewer programs of an SM would have registers for sums of columns, unless products are turned. A
    # warp adds those of its own rows without others.
    HAS_SUMS: tl.constexpr = PARTITIONED and (is_turned(BLOCK_M) or not (PACKED_FP8 or OWN_ROWS))
    COLUMN_SUMS: tl.constexpr = num_sums(BLOCK_M, BLOCK_N) if HAS_SUMS else 1
    # Probabilities in float16 may not be above 2^16. Of scores with biases, first ones may be far below others. Where
    # sequences have one row block, memory is the limit, and two loops load less ahead than one. On other targets, this
    # was not measured, and registers are spilled.
    IS_BARE: tl.constexpr = SCORE_MOD is None and FUNCTION is None and not (PACKED_FP8 or TOKEN_SCALES)
    IS_TALL: tl.constexpr = FULL_TILE_LOOP and MULTI_BLOCK and (OWN_ROWS or WGMMA)
    KEEPS: tl.constexpr = IS_TALL and FIXED_SPLIT == 0 and IS_BARE and q_ptr.dtype.element_ty != tl.float16
    IN_ORDER: tl.constexpr = (PARTITIONED and not KEEPS) or FIXED_SPLIT > 0
    F: tl.constexpr = Form(
        PARTITIONED, FULL_TILE_LOOP, FULL_TILE_LOOP_MIN_TILES, FIXED_SPLIT,
        groups_of(BLOCK_N) if FIXED_SPLIT > 0 else COLUMN_SUMS, BOUNDS, KEEPS, IN_ORDER, MULTI_BLOCK, COMBINE_LAUNCH,
        EARLY_EXIT_MAX_TILES, PDL,
    )  # fmt: skip
    index = tl.program_id(0) // NUM_KV_HEADS  # adjacent programs read other heads of the same pages
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    if PARTITIONED:
        if PDL and not AFTER:
            if is_found_now:  # by the launch before this one, for which `load_part` has to wait
                gdc_wait()
        part = load_part(scratch.parts, index)
    if PDL and not AFTER:  # this kernel may start before the previous one in the stream has ended
        gdc_wait()
    scale, v_scale = head_scales(cache, kv, kv_head, scale, T)
    exponent_scale = LOG2E if SCORE_MOD is not None else scale * LOG2E
    scoring = Scoring(scale, exponent_scale, softcap, window_left, window_right)
    inputs = Inputs(
        q_ptr, stride_q_token, stride_q_head, slopes_ptr, cache, new, norm_rope, extras, kv, cu_seqlens_q, one_each,
        stride_table, kv_head, scoring,
    )  # fmt: skip
    stride_out_token, stride_out_head = in_units(stride_out_token, STRIDE_UNIT), in_units(stride_out_head, STRIDE_UNIT)
    outputs = Outputs(out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse)

    if HAS_PARTS:
        # Row blocks of partitions next to others have tiles of their own.
        ROWS: tl.constexpr = BESIDE_M if BESIDE else BLOCK_M
        UNIT: tl.constexpr = BESIDE_N if BESIDE else FIXED_SPLIT if FIXED_SPLIT > 0 else BLOCK_N
        U: tl.constexpr = Units(GROUP, ROWS, UNIT, MAX_DECODE_QUERIES, INTERVALS, MORE_INTERVALS)
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
        if PARTITIONED:
            attend_partition(inputs, outputs, scratch, v_scale, index, part, T, F, U, P)
            if AFTER and PDL:
                # This kernel runs concurrently with the Hopper kernel before it in the stream. It waits before it
                # exits, so that later kernels see both results.
                gdc_wait()
        else:
            TB: tl.constexpr = Tiling(
                GROUP, BESIDE_M, BESIDE_N, PAGE_SIZE, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_VEC, V_VEC,
                WIDE_OFFSETS, SCORE_MOD, DECODE, PACKED_FP8, TOKEN_SCALES, INPUT_PRECISION, PER_ROW_MASK, STRIDE_UNIT,
                False, NEW_TOKENS, ENCODE, 0, ROTARY_DIM, INTERLEAVED, FUNCTION, FORMAT, DECODE_V, IN_PTX,
                DECODE_SCALES,
                DECODE_PLACED,
            )  # fmt: skip
            FB: tl.constexpr = Form(
                True, False, FULL_TILE_LOOP_MIN_TILES, 0, 1 if PACKED_FP8 else num_sums(BESIDE_M, BESIDE_N), BOUNDS,
                False, True, GROUP > BESIDE_M, False, EARLY_EXIT_MAX_TILES, PDL,
            )  # fmt: skip
            if index < num_beside:
                part = load_part(scratch.parts, index)
                attend_partition(inputs, outputs, scratch, v_scale, index, part, TB, FB, U, P)
                return
    if not PARTITIONED:
        seq, row_block = index - num_beside if BESIDE else index, 0
        if MULTI_BLOCK:
            seq, row_block = find_row_block(cu_seqlens_q, num_seqs, index, NUM_KV_HEADS, GROUP, BLOCK_M, PER_ROW_MASK)
        sequence = load_sequence(kv, cu_seqlens_q, seq, None, one_each)
        if PER_ROW_MASK:
            if row_block * BLOCK_M >= sequence.q_len * GROUP:
                return
        if MIN_QUERIES > 0:
            if sequence.q_len < MIN_QUERIES:
                return
        rows, _, acc, columns, m_i, l_i = attend(inputs, seq, sequence, sequence, row_block, None, T, F, None)
        if PDL:
            gdc_launch_dependents()
        store_result(outputs, acc, m_i, l_i, v_scale, rows, columns, HEAD_DIM_V, FIXED_SPLIT > 0)
