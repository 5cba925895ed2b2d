"""Attention, each program an equal share of the batch's keys: decode and drafted tokens at any mix of lengths.

All tiles of keys of all sequences lie in one row: sequence after sequence, and in a sequence once for each of its blocks of rows. The row is cut into
equal shares, wherever the cuts fall. The grid is [num_shares * num_kv_heads]: one program owns one share for one KV head and walks it block by block. Of
a block that is cut, each program leaves a partial state in scratch, two at most (of a block it begins in the midst of, and of one it leaves unfinished),
and the last of them to finish, by an atomic counter, merges them in the order of the keys, so that results do not depend on who that is; where they are
many and large, the last of each group of neighbours merges those first. Every program computes the cuts for itself from the lengths on the device.

With CHUNK, for results that do not depend on the rest of the batch, shares are cut at multiples of CHUNK keys only, every chunk is attended to as a state
of its own, and a block is the sum of its chunks one after the other, whoever adds them up.

Equal shares of a flat row of work are those of Stream-K (arXiv 2301.03598), applied to the splits of Flash-Decoding.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.primitives import (
    LOG2E,
    attend_tile,
    empty_state,
    find_pages,
    join_even_odd,
    load_queries,
    merge,
    store_result,
)

# Of drafts, and twice as many of single queries, are merged in two steps: fewer are merged sooner by one program (NVIDIA H200, 2026-11-21).
MANY_PARTIALS = tl.constexpr(8)
SHORT_SHARE = tl.constexpr(
    8
)  # tiles; after longer ones, programs of the next kernel would crowd the multiprocessors that are done first
FEW_TILES = tl.constexpr(4)  # a block of so few tiles is faster alone than cut and merged


@triton.jit
def sequence_span(
    kv, cu_seqlens_q, seq, window_left, window_right, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr
):
    """Return of sequence `seq`, or of a vector of them, its queries, the keys that any of them sees, the first unit of UNIT keys that holds some, and
    how many units and blocks these are.

    Neither is ever 0: a row of padding costs one unit in which nothing is loaded, and has its zeros written.
    """
    seq_len = tl.load(kv.seq_lens + seq)
    q_start = seq
    q_len = seq * 0 + 1
    if cu_seqlens_q is not None:
        q_start = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
    if kv.query_offsets is None:
        first_pos = seq_len - q_len
    else:
        first_pos = tl.load(kv.query_offsets + seq)
    kv_start = tl.maximum(first_pos - window_left, 0)
    kv_stop = tl.maximum(tl.minimum(first_pos + q_len + window_right, seq_len), 0)
    first = kv_start // UNIT
    num_units = tl.maximum(tl.cdiv(kv_stop, UNIT) - first, 1)
    num_blocks = tl.maximum(tl.cdiv(q_len * GROUP, BLOCK_M), 1)
    return q_start, q_len, first_pos, kv_start, kv_stop, first, num_units, num_blocks


@triton.jit
def count_units(
    kv, cu_seqlens_q, first, num_seqs, window_left, window_right,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, SEQS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Return how many units of work (times blocks) each of the SEQS sequences from `first` on has; 0 for those of another kernel."""
    seqs = first + tl.arange(0, SEQS)
    _, q_len, _, _, _, _, num_units, num_blocks = sequence_span(
        kv, cu_seqlens_q, tl.minimum(seqs, num_seqs - 1), window_left, window_right, GROUP, BLOCK_M, UNIT
    )
    ours = seqs < num_seqs
    if FEW > 0:
        ours = ours & (q_len <= FEW)
    return tl.where(ours, num_units * num_blocks, 0)


@triton.jit
def find_share(
    kv, cu_seqlens_q, num_seqs, share_id, num_shares, merge_cost, window_left, window_right,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, SEQS: tl.constexpr, MORE_SEQS: tl.constexpr, FEW: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Return the units of a share, which end at `high`, their number in every share, the sequence of the first of them, and that sequence's first unit."""
    units = count_units(kv, cu_seqlens_q, 0, num_seqs, window_left, window_right, GROUP, BLOCK_M, UNIT, SEQS, FEW)
    total, longest = tl.sum(units, 0), tl.max(units, 0)
    if MORE_SEQS:
        for first in tl.range(SEQS, num_seqs, SEQS, num_stages=1):
            more = count_units(
                kv, cu_seqlens_q, first, num_seqs, window_left, window_right, GROUP, BLOCK_M, UNIT, SEQS, FEW
            )
            total += tl.sum(more, 0)
            longest = tl.maximum(longest, tl.max(more, 0))
    # A cut costs a merge: s tiles one after the other and t / s partial states cost least together at the root of t * merge_cost.
    mean = total.to(tl.float32) / num_seqs
    cost = tl.where(mean > LONG, 0.1 * merge_cost, merge_cost)  # merged in two steps, many cost little
    shortest = tl.where((mean <= FEW_TILES) & (merge_cost > 0), mean, tl.sqrt(mean * cost))
    share = tl.maximum(tl.cdiv(total, num_shares), (shortest + 0.5).to(tl.int32))
    if FEW > 0:  # there may be none
        share, longest = tl.maximum(share, 1), tl.maximum(longest, 1)
    # Where all sequences are alike, a share a little longer may end where they do, and nothing is left to merge. (By selection: with a branch here,
    # Triton 3.9.0 keeps no loads in flight in the loop over tiles.)
    even = tl.where(
        share < longest, tl.cdiv(longest, tl.maximum(longest // share, 1)), tl.cdiv(share, longest) * longest
    )
    share = tl.where((longest * num_seqs == total) & (merge_cost > 0) & (even <= share + FEW_TILES), even, share)
    low = share_id * share
    high = tl.minimum(low + share, total)
    seq, seq_unit = find_sequence(units, 0, low)
    if MORE_SEQS:
        end = tl.sum(units, 0)
        for first in tl.range(SEQS, num_seqs, SEQS, num_stages=1):
            units = count_units(
                kv, cu_seqlens_q, first, num_seqs, window_left, window_right, GROUP, BLOCK_M, UNIT, SEQS, FEW
            )
            seqs_before, unit = find_sequence(units, end, low)
            seq += seqs_before
            seq_unit = tl.maximum(seq_unit, unit)
            end += tl.sum(units, 0)
    return low, high, share, seq, seq_unit


@triton.jit
def find_sequence(units, first_unit, unit):
    """Return how many of these sequences, whose units begin at `first_unit`, end at or before `unit`, and where the last of them ends; 0 if none does."""
    ends = first_unit + tl.cumsum(units, 0)
    before = ends <= unit
    return tl.sum(before.to(tl.int32), 0), tl.max(tl.where(before, ends, 0), 0)


@triton.jit(do_not_specialize=["num_seqs", "num_shares", "stride_table", "window_left", "window_right"])
def split_kv_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM_V]
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr,  # [num_q_heads], or None
    slopes_ptr,  # [num_q_heads], or None
    kv,  # views.PagedKV
    cu_seqlens_q,  # [num_seqs + 1] int32, or None where every sequence has one query
    scratch,  # views.Scratch
    scale, softcap, window_left, window_right, num_seqs, num_shares,
    merge_cost,  # of a partial state, in tiles; 0 to cut wherever shares are equal
    stride_table, stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SCORE_MOD: tl.constexpr, DECODE: tl.constexpr, PACKED_FP8: tl.constexpr, TOKEN_SCALES: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PER_ROW_MASK: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr,
    FULL_TILE_LOOP: tl.constexpr, SEARCH: tl.constexpr, SEQS: tl.constexpr, MORE_SEQS: tl.constexpr,
    FEW: tl.constexpr,  # sequences of more queries are left to the kernel window_right of this one in the stream; 0 where there is none
    TWO_LEVEL: tl.constexpr, LONG: tl.constexpr,  # partial states that are many are merged in two steps; the tiles beyond which they are meant to be
    CHUNK: tl.constexpr,  # keys of a unit that is a state of its own, a multiple of BLOCK_N; 0 where units are tiles
):  # fmt: skip
    if PDL and FEW == 0:  # started before the kernel window_right of it in the stream was done
        gdc_wait()
    UNIT: tl.constexpr = BLOCK_N if CHUNK == 0 else CHUNK
    share_id = tl.program_id(0) // NUM_KV_HEADS  # neighbours read the same pages, of other heads, at the same time
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    unit, high, share, seq, seq_unit = find_share(
        kv,
        cu_seqlens_q,
        num_seqs,
        share_id,
        num_shares,
        merge_cost,
        window_left,
        window_right,
        GROUP,
        BLOCK_M,
        UNIT,
        SEQS,
        MORE_SEQS,
        FEW,
        LONG,
    )
    v_scale = 1.0
    if kv.k_scale is not None and not TOKEN_SCALES:
        scale = scale * tl.load(kv.k_scale + kv_head * kv.scale_head)
        v_scale = tl.load(kv.v_scale + kv_head * kv.scale_head)
    exponent_scale = LOG2E if SCORE_MOD is not None else scale * LOG2E
    offs_m, offs_dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)

    while unit < high:  # a block, or the part of it that lies in this share
        if FEW > 0:
            while tl.load(cu_seqlens_q + seq + 1) - tl.load(cu_seqlens_q + seq) > FEW:
                seq += 1
        q_start, q_len, first_pos, kv_start, kv_stop, first, num_units, num_blocks = sequence_span(
            kv, cu_seqlens_q, seq, window_left, window_right, GROUP, BLOCK_M, UNIT
        )
        block = 0
        if SEARCH:
            block = (unit - seq_unit) // num_units
        block_unit = seq_unit + block * num_units
        here = tl.minimum(block_unit + num_units, high) - unit
        if kv.cu_pages is None:
            row = kv.page_table + seq.to(tl.int64) * stride_table
        else:
            row = kv.page_table + tl.load(kv.cu_pages + seq)
        at = first + unit - block_unit
        page = find_pages(
            row, at * UNIT, kv_start, kv_stop, PAGE_SIZE, BLOCK_N
        )  # on its way while the queries are loaded

        rows = block * BLOCK_M + offs_m
        owned = rows < q_len * GROUP
        q_pos = first_pos + rows // GROUP
        head = kv_head * GROUP + rows % GROUP
        token = (q_start + rows // GROUP).to(tl.int64)
        q = load_queries(q_ptr + token * stride_q_token + head * stride_q_head, owned, HEAD_DIM, BLOCK_D, PACKED_FP8)
        slopes = None
        if slopes_ptr is not None:
            slopes = tl.load(slopes_ptr + head, mask=owned, other=0.0).to(tl.float32)
        acc, m_i, l_i = empty_state(BLOCK_M, BLOCK_DV, PACKED_FP8)
        if CHUNK == 0:
            masked = at  # the first tile of those with masks
            if FULL_TILE_LOOP:  # most tiles of a long share are seen join_even_odd by every row
                low_pos = first_pos + block * BLOCK_M // GROUP
                high_pos = first_pos + tl.minimum((block + 1) * BLOCK_M - 1, q_len * GROUP - 1) // GROUP
                masked = tl.maximum(
                    tl.minimum(tl.minimum(low_pos + window_right + 1, kv_stop) // BLOCK_N, at + here), at
                )
                masked = tl.where((here > SHORT_SHARE) & (high_pos - window_left <= at * BLOCK_N), masked, at)
                for tile in tl.range(at, masked):
                    next_page = find_pages(row, (tile + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
                    acc, m_i, l_i = attend_tile(
                        acc, m_i, l_i, q, kv, page, tile * BLOCK_N, kv_head, q_pos, slopes, kv_start, kv_stop, exponent_scale, scale, softcap, window_left, window_right,
                        False, PER_ROW_MASK, SCORE_MOD, DECODE, PACKED_FP8, TOKEN_SCALES, INPUT_PRECISION,
                        PAGE_SIZE, BLOCK_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_VEC, V_VEC,
                    )  # fmt: skip
                    page = next_page
            for tile in tl.range(masked, at + here):
                next_page = find_pages(row, (tile + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
                acc, m_i, l_i = attend_tile(
                    acc, m_i, l_i, q, kv, page, tile * BLOCK_N, kv_head, q_pos, slopes, kv_start, kv_stop, exponent_scale, scale, softcap, window_left, window_right,
                    True, PER_ROW_MASK, SCORE_MOD, DECODE, PACKED_FP8, TOKEN_SCALES, INPUT_PRECISION,
                    PAGE_SIZE, BLOCK_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_VEC, V_VEC,
                )  # fmt: skip
                page = next_page
        else:
            # Each chunk is a state of its own. They are added up in the order of the keys, here or by who merges: the same sum, whoever does it.
            TILES: tl.constexpr = CHUNK // BLOCK_N
            last = tl.minimum((at + here) * TILES, tl.cdiv(kv_stop, BLOCK_N)) - 1
            chunk_acc, chunk_m, split_l = empty_state(BLOCK_M, BLOCK_DV, PACKED_FP8)
            for tile in tl.range(at * TILES, last + 1):
                next_page = find_pages(row, (tile + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
                chunk_acc, chunk_m, split_l = attend_tile(
                    chunk_acc, chunk_m, split_l, q, kv, page, tile * BLOCK_N, kv_head, q_pos, slopes, kv_start, kv_stop,
                    exponent_scale, scale, softcap, window_left, window_right,
                    True, PER_ROW_MASK, SCORE_MOD, DECODE, PACKED_FP8, TOKEN_SCALES, INPUT_PRECISION,
                    PAGE_SIZE, BLOCK_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_VEC, V_VEC,
                )  # fmt: skip
                page = next_page
                if ((tile + 1) % TILES == 0) | (tile == last):
                    if unit == block_unit:
                        acc, m_i, l_i = merge(acc, m_i, l_i, chunk_acc, chunk_m, split_l, PACKED_FP8)
                    else:
                        slot = (block_unit + tile // TILES - first) * NUM_KV_HEADS + kv_head
                        leave_partial(
                            scratch,
                            chunk_acc,
                            chunk_m,
                            split_l,
                            slot,
                            True,
                            PACKED_FP8,
                            HEAD_DIM_V,
                            BLOCK_M,
                            BLOCK_DV,
                            ROWS,
                        )
                    chunk_acc, chunk_m, split_l = empty_state(BLOCK_M, BLOCK_DV, PACKED_FP8)
        acc = join_even_odd(acc, BLOCK_M, BLOCK_DV, PACKED_FP8)
        if PDL:
            if (unit + here == high) & (share <= SHORT_SHARE):
                gdc_launch_dependents()
        if here == num_units:
            store_result(
                out_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse, acc, m_i, l_i, v_scale,
                token, head, owned, offs_dv, HEAD_DIM_V,
            )  # fmt: skip
        else:
            first_share = block_unit // share
            num_shares_of_block = (block_unit + num_units - 1) // share - first_share + 1
            if CHUNK == 0:
                first_slot, next_slot, step, num_partials = (
                    2 * first_share + 1,
                    2 * first_share + 2,
                    2,
                    num_shares_of_block,
                )
                slot = 2 * share_id + (share_id == first_share).to(tl.int32)
            else:
                first_slot, next_slot, step = block_unit, (first_share + 1) * share, 1
                num_partials = 1 + block_unit + num_units - next_slot
                slot = block_unit
            begun = (CHUNK == 0) | (unit == block_unit)
            leave_partial(
                scratch, acc, m_i, l_i, slot * NUM_KV_HEADS + kv_head, begun, False, HEAD_DIM_V, BLOCK_M, BLOCK_DV, ROWS
            )
            # Some columns at a time, so that a merge needs fewer registers than the loop above.
            COLUMNS: tl.constexpr = min(BLOCK_DV, 64 if ROWS > 16 else 4096 // ROWS)
            counter, num_arrivals, arrives = 2 * first_share + 1, num_shares_of_block, num_shares_of_block > 0
            if TWO_LEVEL:
                # Many states are merged in two steps, by several programs: groups of neighbours, each by the last of its own, then what these left.
                if num_partials > (MANY_PARTIALS if PER_ROW_MASK else 2 * MANY_PARTIALS):
                    group = (tl.sqrt(num_partials.to(tl.float32)) + 0.5).to(tl.int32)
                    leader = (share_id - first_share) // group * group
                    leader_slot = tl.where(leader == 0, first_slot, next_slot + (leader - 1) * step)
                    members = tl.minimum(group, num_partials - leader)
                    arrives = is_last(scratch, leader_slot * NUM_KV_HEADS + kv_head, members, num_arrivals > 0)
                    if arrives:
                        merge_group(
                            scratch, leader_slot, tl.where(leader == 0, next_slot, leader_slot + step), step, members, kv_head, PER_ROW_MASK,
                            HEAD_DIM_V, BLOCK_DV, COLUMNS, ROWS, NUM_KV_HEADS,
                        )  # fmt: skip
                    counter = next_slot
                    next_slot += (group - 1) * step
                    step *= group
                    num_partials = tl.cdiv(num_partials, group)
                    num_arrivals = num_partials
            if is_last(scratch, counter * NUM_KV_HEADS + kv_head, num_arrivals, arrives):
                kept = block * BLOCK_M + tl.arange(0, ROWS)
                kept_token, kept_head = (q_start + kept // GROUP).to(tl.int64), kv_head * GROUP + kept % GROUP
                for part in tl.range(BLOCK_DV // COLUMNS, num_stages=1):
                    columns = part * COLUMNS + tl.arange(0, COLUMNS)
                    merged_acc, merged_m, merged_l = merge_partials(
                        scratch,
                        first_slot,
                        next_slot,
                        step,
                        num_partials,
                        kv_head,
                        columns,
                        CHUNK > 0,
                        PER_ROW_MASK,
                        HEAD_DIM_V,
                        COLUMNS,
                        ROWS,
                        NUM_KV_HEADS,
                    )
                    store_result(
                        out_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse, merged_acc, merged_m, merged_l, v_scale,
                        kept_token, kept_head, kept < q_len * GROUP, columns, HEAD_DIM_V,
                    )  # fmt: skip
        unit += here
        seq_ends = unit == seq_unit + num_units * num_blocks
        seq += seq_ends.to(tl.int32)
        seq_unit = tl.where(seq_ends, unit, seq_unit)
    if (
        PDL and FEW > 0
    ):  # beside the kernel window_right of it, which had waited itself; who comes next shall find both done
        gdc_wait()


@triton.jit
def leave_partial(
    scratch, acc, m_i, l_i, slot, wanted, PACKED_FP8: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a partial state to its slot, if it is wanted there."""
    offs_m = tl.arange(0, BLOCK_M)
    rows = slot * ROWS + offs_m
    kept = (offs_m < ROWS) & wanted
    tl.store(scratch.m_i + rows, m_i, mask=kept)
    tl.store(scratch.l_i + rows, l_i, mask=kept)
    ptrs = scratch.acc + rows.to(tl.int64)[:, None] * HEAD_DIM_V
    if PACKED_FP8:
        even, odd = acc
        offs_dv = 2 * tl.arange(0, BLOCK_DV // 2)
        tl.store(ptrs + offs_dv[None, :], even, mask=kept[:, None] & (offs_dv < HEAD_DIM_V)[None, :])
        tl.store(ptrs + (offs_dv + 1)[None, :], odd, mask=kept[:, None] & (offs_dv < HEAD_DIM_V)[None, :])
    else:
        offs_dv = tl.arange(0, BLOCK_DV)
        tl.store(ptrs + offs_dv[None, :], acc, mask=kept[:, None] & (offs_dv < HEAD_DIM_V)[None, :])


@triton.jit
def is_last(scratch, counter, num_arrivals, arrives):
    """Count this program's arrival, if it arrives; return whether it is the last, so that all that was written before can be read. The counter ends at 0."""
    tl.debug_barrier()  # every thread's stores come before the one thread's consumer_release
    last = arrives & (tl.atomic_add(scratch.counter + counter, 1, mask=arrives, sem="acq_rel") == num_arrivals - 1)
    if last:
        tl.store(scratch.counter + counter, 0)
    return last


@triton.jit
def merge_group(
    scratch, first_slot, next_slot, step, num_partials, kv_head, PER_ROW_MASK: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Merge some of a block's partial states into the first of them."""
    rows = (first_slot * NUM_KV_HEADS + kv_head) * ROWS + tl.arange(0, ROWS)
    for part in tl.range(BLOCK_DV // COLUMNS, num_stages=1):
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        acc, m_i, l_i = merge_partials(
            scratch,
            first_slot,
            next_slot,
            step,
            num_partials,
            kv_head,
            columns,
            False,
            PER_ROW_MASK,
            HEAD_DIM_V,
            COLUMNS,
            ROWS,
            NUM_KV_HEADS,
        )
        tl.debug_barrier()  # every thread has read what is now replaced
        tl.store(
            scratch.acc + rows.to(tl.int64)[:, None] * HEAD_DIM_V + columns[None, :],
            acc,
            mask=(columns < HEAD_DIM_V)[None, :],
        )
        if part == BLOCK_DV // COLUMNS - 1:
            tl.store(scratch.m_i + rows, m_i)
            tl.store(scratch.l_i + rows, l_i)


@triton.jit
def merge_partials(
    scratch, first_slot, next_slot, step, num_partials, kv_head, offs_dv, ONE_BY_ONE: tl.constexpr, PER_ROW_MASK: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
):  # fmt: skip
    """Merge columns `offs_dv` of a block's partial states in the order of their keys; they lie at `first_slot`, then from `next_slot` on by `step`."""
    # As many states at a time as fit registers; with the band or many rows fewer do, or loads wait for one another (1 x 4,096, 4 drafts: 15.0 µs, not
    # 18.4; NVIDIA H200, 2026-11-21).
    WIDTH: tl.constexpr = max(
        1, min(8, (16384 if ROWS <= 16 else 8192) // (2 if PER_ROW_MASK or ROWS > 16 else 1) // (ROWS * COLUMNS))
    )
    offs_r = tl.arange(0, ROWS)
    offs = offs_r[:, None] * HEAD_DIM_V + offs_dv[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, num_partials, WIDTH, num_stages=1):
        accs, ms, ls = (), (), ()
        for i in tl.static_range(
            WIDTH
        ):  # all loads of a round are in flight together; past L1 (.cg), since other programs wrote
            # A merger is alone and busy with instructions: addresses are one number and the same offsets in all states, and after the last state comes the
            # last again, without weight, so that large loads need no mask. For single queries a mask takes its weight: a selection is made, and waited for,
            # before the loads behind it are issued, and a round takes two latencies. (For drafts the mask takes registers that there are not.)
            index = tl.minimum(first + i, num_partials - 1)
            slot = tl.where(index == 0, first_slot, next_slot + (index - 1) * step)
            at = (slot * NUM_KV_HEADS + kv_head).to(tl.int64) * ROWS
            if PER_ROW_MASK:
                other_m = tl.where(
                    first + i < num_partials, tl.load(scratch.m_i + at + offs_r, cache_modifier=".cg"), float("-inf")
                )
            else:
                present = (first + i + 0 * offs_r) < num_partials
                other_m = tl.load(scratch.m_i + at + offs_r, mask=present, other=float("-inf"), cache_modifier=".cg")
            ms = ms + (other_m,)
            ls = ls + (tl.load(scratch.l_i + at + offs_r, cache_modifier=".cg"),)
            accs = accs + (
                tl.load(
                    scratch.acc + at * HEAD_DIM_V + offs,
                    mask=(offs_dv < HEAD_DIM_V)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                ),
            )
        if ONE_BY_ONE:
            for i in tl.static_range(WIDTH):
                acc, m_i, l_i = merge(acc, m_i, l_i, accs[i], ms[i], ls[i])
        else:
            m_new = m_i
            for i in tl.static_range(WIDTH):
                m_new = tl.maximum(m_new, ms[i])
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m_i - shift)
            acc, m_i, l_i = acc * alpha[:, None], m_new, l_i * alpha
            for i in tl.static_range(WIDTH):
                alpha = tl.exp2(ms[i] - shift)
                acc += accs[i] * alpha[:, None]
                l_i += ls[i] * alpha
    return acc, m_i, l_i
