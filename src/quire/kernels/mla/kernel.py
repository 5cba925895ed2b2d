"""The MLA kernel: multi-query attention over latents, of which the first RANK columns are both keys and values.

A latent tile is loaded once, as two tensors: c [BLOCK_N, RANK] and the rotary columns r [BLOCK_N, ROPE]. The scores are
`q_nope cᵀ + q_pe rᵀ`, and the output is the probabilities times the same c.

Grid: [num_partitions * ROW_BLOCKS]. A band is ROW_BLOCKS row blocks of one sequence, BLOCK_M rows each. The tiles of
the batch are cut into equal partitions, sequence after sequence and band after band (`schedule.py`). Every
partition is run by ROW_BLOCKS adjacent programs, one for each row block. They run at the same time and read the same
tiles, so device memory is read once and the other reads hit L2.

Partials are those of the portable kernel, with a row block in the place of a KV head: the last program to arrive at a
row block combines its partials in key order (`portable/reduce.py`). With FIXED_SPLIT, results are batch-invariant for
the same reason as there.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels import mods
from quire.kernels.panels import load_tile
from quire.kernels.portable.reduce import Partial, store_and_arrive, store_combined, store_partial
from quire.kernels.primitives import Scoring, find_pages, find_rows, load_rows, scale_to_float16, table_row
from quire.kernels.schedule import (
    Sequence,
    Units,
    is_as_planned,
    load_part,
    load_sequence,
    next_row_block,
    span,
    units_here,
)
from quire.kernels.states import LOG2E, Outputs, add_product, combine, store_result


class LatentTiling(NamedTuple):
    """Compile-time constants of a tile of latents. The kernel builds one tuple and passes it as one constexpr."""

    BLOCK_N: Any  # keys of a tile
    PAGE_SIZE: Any
    RANK: Any  # columns that are keys and values
    ROPE: Any  # rotary columns, which are keys only; 0 for none
    BLOCK_C: Any  # RANK, padded to a power of two
    BLOCK_R: Any
    C_SLOT: Any  # stride of a slot; known to the compiler, so that addresses differ by immediates, not by registers
    ROPE_SLOT: Any
    WIDE_OFFSETS: Any  # an offset within a page may exceed 2^31
    SCORE_MOD: Any  # jit function, or None
    DECODE: Any  # jit function from stored elements to numbers
    DECODE_ROPE: Any
    PACKED_FP8: Any  # a stored element of c is two fp8 numbers
    PARTS: Any  # of the columns that are values
    CODED: Any  # parts that c holds; the rotary columns are the last one where there is one more
    SCALED: Any  # latents are records: each part in c has a scale
    POWERS: Any  # of two, in ue8m0, by which a part in c is scaled, an equal share of its columns each; 0 for none
    INPUT_PRECISION: Any
    PER_ROW_MASK: Any  # rows belong to several query tokens, which see different keys
    FUNCTION: Any  # jit function of users' functions on scores and masks (`user_mods.py`), or None


class Place(NamedTuple):
    """What FUNCTION takes of rows besides positions."""

    head: Any  # query head of each row
    seq: Any
    token: Any  # of each row
    extras: Any  # from `user_mods.passed`
    of_rows: Any  # what FUNCTION reads for each row, whatever the key, or None


@triton.jit
def attend_latents(
    acc, m_i, l_i, q, q_pe, latents, kv, page, pos, rows, slopes, kv_start, kv_stop, scoring, place, T: tl.constexpr
):
    """Fold the tile of latents that begins at position `pos` into the state.

    Args:
        acc, m_i, l_i: the running state, from `empty_parts`.
        q: from `load_query_parts`.
        q_pe: [BLOCK_M, BLOCK_R], or None.
        latents: views.LatentTensors.
        kv: views.LatentLayout.
        page: page of each key, from `find_pages`.
        pos: position of the tile's first key.
        rows: Rows.
        slopes: ALiBi slope of each row, or None.
        kv_start, kv_stop: the keys that any row of the sequence sees. Others may be in freed pages and hold NaN: they
            must not be read.
        scoring: Scoring.
        place: Place, or None.
        T: LatentTiling.
    """
    kv_pos = pos + tl.arange(0, T.BLOCK_N)
    # One comparison, unsigned, for kv_start <= kv_pos < kv_stop. The others hold NaN perhaps, and 0 * NaN is NaN.
    keep = (kv_pos - kv_start).to(tl.uint32) < tl.maximum(kv_stop - kv_start, 0).to(tl.uint32)
    page = page.to(tl.int64)  # page * stride passes 2^31
    if T.PAGE_SIZE % T.BLOCK_N == 0:
        # The tile is in one page. Offsets come from the position, which the mask needs too: offsets that are the same
        # in every tile would stay in registers.
        slot = kv_pos.to(tl.int64)
        before = tl.cast(pos % T.PAGE_SIZE - pos, tl.int64)  # slots between the page's first and position 0
    else:
        slot = kv_pos % T.PAGE_SIZE
        if T.WIDE_OFFSETS:
            slot = slot.to(tl.int64)
        before = 0
    return fold_latents(
        acc, m_i, l_i, q, q_pe, latents, kv, page, slot, before, keep, rows.q_pos, kv_pos, slopes, scoring, place, T
    )


@triton.jit
def fold_latents(
    acc,
    m_i,
    l_i,
    q,
    q_pe,
    latents,
    kv,
    page,
    slot,
    before,
    keep,
    q_pos,
    kv_pos,
    slopes,
    scoring,
    place,
    T: tl.constexpr,
):
    """Fold a tile of latents, anywhere in memory, into the state.

    Args:
        acc, m_i, l_i: the running state, from `empty_parts`.
        q: from `load_query_parts`, or what `scale_to_float16` makes of it.
        q_pe: [BLOCK_M, BLOCK_R], or None.
        latents: views.LatentTensors.
        kv: views.LatentLayout.
        page: [BLOCK_N], or one for all keys, int64.
        slot: [BLOCK_N], less `before`: slots of the page.
        before: slots between the page's first and slot 0; a number.
        keep: [BLOCK_N], which keys are read. The others hold NaN perhaps, and 0 * NaN is NaN.
        q_pos: [BLOCK_M], the position of each row; None, like the next two, for chosen keys.
        kv_pos: [BLOCK_N], the position of each key.
        slopes: ALiBi slope of each row, or None.
        scoring: Scoring.
        place: Place, or None.
        T: LatentTiling.
    """
    c_rows = tl.expand_dims(latents.c + (page * kv.c_page + before * T.C_SLOT) + slot * T.C_SLOT, 1)
    # The columns of c are multiplied in PARTS parts. Their products do not wait for one another, as the steps of one
    # product do.
    EACH: tl.constexpr = 2 if T.PACKED_FP8 else 1  # parts that a loaded tile is decoded into
    WIDTH: tl.constexpr = T.BLOCK_C // T.PARTS
    s_rows = None
    if T.SCALED or T.POWERS > 0:
        s_rows = latents.scale + (page * kv.scale_page + before * kv.scale_slot) + slot * kv.scale_slot
    # After the last part, queries may have the number by which each row was divided to be float16.
    DIVIDED: tl.constexpr = len(q) > T.CODED
    # Small probabilities times small scales vanish in float16. With float16 queries, the values are scaled.
    SCALE_V: tl.constexpr = T.SCALED and q[0].dtype == tl.float16 and not DIVIDED
    offs_c, offs_r = tl.arange(0, WIDTH), tl.arange(0, T.BLOCK_R)
    parts, scales = (), ()
    scores = tl.zeros([m_i.shape[0], T.BLOCK_N], tl.float32)
    for i in tl.static_range(T.CODED // EACH):
        columns = i * WIDTH + offs_c
        mask = keep[:, None]
        if T.RANK != T.BLOCK_C:
            mask = mask & (columns < T.RANK // EACH)[None, :]
        loaded = tl.load(c_rows + columns[None, :], mask=mask, other=0.0)
        if T.PACKED_FP8:
            even, odd = T.DECODE(loaded)
            parts = (even, odd)
            scores = tl.dot(q[0], tl.trans(even)) + tl.dot(q[1], tl.trans(odd))
        else:
            if T.POWERS == 0:
                part = T.DECODE(loaded, q[i].dtype)
            else:  # which is exact but for the smallest numbers in float16, and takes fewer registers than scales do
                powers = load_powers(s_rows + i * T.POWERS, keep, offs_c // (WIDTH // T.POWERS), T.POWERS)
                part = (T.DECODE(loaded, tl.float32) * powers).to(q[i].dtype)
            if T.POWERS > 0 or DIVIDED:
                part = decoded_once(part, offs_c)
            products = tl.dot(q[i], tl.trans(part), input_precision=T.INPUT_PRECISION)  # [BLOCK_M, BLOCK_N]
            if T.SCALED:  # stored numbers are multiplied, which is exact, and then scaled
                scale = tl.load(s_rows + i, mask=keep, other=0.0)
                products *= scale[None, :]
                if SCALE_V:
                    part = (part.to(tl.float32) * scale[:, None]).to(part.dtype)
                else:
                    scales = scales + (scale,)
                    if DIVIDED:
                        part = decoded_once(T.DECODE(loaded, tl.bfloat16), offs_c)
            parts = parts + (part,)
            scores = products if i == 0 else add_scores(scores, products, q[i].dtype, T.INPUT_PRECISION)
    if DIVIDED:
        scores = scores * q[T.CODED][:, None]
    if T.ROPE > 0:
        r_rows = tl.expand_dims(latents.rope + (page * kv.rope_page + before * T.ROPE_SLOT) + slot * T.ROPE_SLOT, 1)
        r = load_tile(r_rows + offs_r[None, :], keep[:, None], (offs_r < T.ROPE)[None, :], True, T.ROPE != T.BLOCK_R)
        r = T.DECODE_ROPE(r, q_pe.dtype)
        products = tl.dot(q_pe, tl.trans(r), input_precision=T.INPUT_PRECISION)
        scores = add_scores(scores, products, q_pe.dtype, T.INPUT_PRECISION)
        if T.CODED < T.PARTS:
            parts = parts + (r,)
    if T.SCORE_MOD is not None:
        scores = T.SCORE_MOD(scores, scoring.scale, q_pos, kv_pos, slopes, scoring.softcap)
    if T.FUNCTION is not None:
        kv_head = place.seq * 0
        scores = T.FUNCTION(
            scores, q_pos, None, 0, kv_pos, place.head, kv_head, place.seq, place.token, place.extras, place.of_rows
        )
    visible = keep[None, :]
    if T.PER_ROW_MASK:
        low, high = q_pos - scoring.window_left, q_pos + scoring.window_right
        visible = visible & (kv_pos[None, :] >= low[:, None]) & (kv_pos[None, :] <= high[:, None])
    scores = tl.where(visible, scores, float("-inf"))
    # m_i need not be the exact maximum. 12 bits of headroom keep small float16 probabilities from vanishing.
    HEADROOM: tl.constexpr = 12 if T.PACKED_FP8 else 0
    m_new = tl.maximum(m_i, tl.max(scores, 1) * scoring.exponent_scale - HEADROOM)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key: -inf - -inf is NaN
    p = tl.exp2(scores * scoring.exponent_scale - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    l_i = l_i * alpha[:, None] + p
    accs = ()
    for i in tl.static_range(T.PARTS):
        weights = p
        if T.SCALED and not SCALE_V:
            weights = p * scales[i][None, :]
        weights = weights.to(parts[i].dtype)
        accs = accs + (add_product(acc[i], alpha, weights, parts[i], T.INPUT_PRECISION),)
    return accs, m_new, l_i


@triton.jit
def add_scores(scores, products, dtype: tl.constexpr, INPUT_PRECISION: tl.constexpr):
    """Return the scores of some columns plus the products of others.

    A product of float32 numbers adds one after the other. Triton would begin it with `scores`, if this were an addition
    to it, and make one sum of all columns: one of 512 has some three times the error of eight.
    """
    if dtype == tl.float32 and INPUT_PRECISION == "ieee":
        return tl.fma(products, tl.zeros_like(products) + 1.0, scores)
    return scores + products


@triton.jit
def decoded_once(part, columns):
    """Return a tile that was decoded. `columns`, whose numbers are not negative, must not come from memory.

    Triton would move the stored numbers to where each of the two products wants them, and decode them there twice. Then
    it would not load them ahead. It does neither where a tile depends on what is no load and no constant. The condition
    is none in machine code.
    """
    return tl.where((columns >= 0)[None, :], part, 0.0)


@triton.jit
def load_powers(s_rows, keep, share, POWERS: tl.constexpr):
    """Load the powers of two by which columns are scaled, [BLOCK_N, columns] or [BLOCK_N, 1]; `share` is of columns."""
    power = mods.ue8m0(tl.load(s_rows, mask=keep, other=0))[:, None]
    for i in tl.static_range(1, POWERS):
        other = mods.ue8m0(tl.load(s_rows + i, mask=keep, other=0))[:, None]
        power = tl.where((share == i)[None, :], other, power)
    return power


@triton.jit
def load_query_parts(ptrs, owned, T: tl.constexpr):
    """Load the columns of the queries that meet c: one tensor for each part of them.

    With PACKED_FP8, return what `scale_to_float16` does of two parts, even and odd columns.
    """
    if T.PACKED_FP8:
        columns, parts = 2 * tl.arange(0, T.BLOCK_C // 2), ()
        keep = owned[:, None] & (columns < T.RANK)[None, :]
        for i in tl.static_range(2):
            parts = parts + (tl.load(ptrs[:, None] + (columns + i)[None, :], mask=keep, other=0.0),)
        return scale_to_float16(parts)
    else:
        WIDTH: tl.constexpr = T.BLOCK_C // T.PARTS
        q = ()
        for i in tl.static_range(T.CODED):
            q = q + (load_rows(ptrs + i * WIDTH, owned, T.RANK - i * WIDTH, WIDTH),)
        return q


@triton.jit
def load_rotary_queries(ptrs, pe_ptrs, owned, T: tl.constexpr):
    """Load the columns of the queries that meet rotary columns: the last ones where those are values too."""
    if T.CODED < T.PARTS:
        return load_rows(ptrs + (T.RANK - T.ROPE), owned, T.ROPE, T.BLOCK_R)
    else:
        return load_rows(pe_ptrs, owned, T.ROPE, T.BLOCK_R)


@triton.jit
def empty_parts(BLOCK_M: tl.constexpr, T: tl.constexpr):
    """Return the state over no keys as the loop holds it: acc in parts, and l_i [BLOCK_M, BLOCK_N].

    A thread adds up its own columns of l_i. To sum a row, warps would wait for one another in every tile.
    """
    acc = ()
    for _ in tl.static_range(T.PARTS):
        acc = acc + (tl.zeros([BLOCK_M, T.BLOCK_C // T.PARTS], tl.float32),)
    return acc, tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M, T.BLOCK_N], tl.float32)


@triton.jit
def join_parts(acc, m_i, l_i, BLOCK_M: tl.constexpr, T: tl.constexpr):
    """Return a state whose acc is one panel of all columns in order, and whose l_i is one number for each row."""
    l_i = tl.sum(l_i, 1)
    if T.PACKED_FP8:
        even, odd = acc
        return (tl.reshape(tl.join(even, odd), [BLOCK_M, T.BLOCK_C]),), m_i, l_i
    else:
        for _ in tl.static_range(4):  # of up to 16 parts, in pairs
            if len(acc) > 1:
                joined = ()
                for i in tl.static_range(len(acc) // 2):
                    joined = joined + (concatenate(acc[2 * i], acc[2 * i + 1], BLOCK_M),)
                acc = joined
        return acc, m_i, l_i


@triton.jit
def after(page, value, ONE_PAGE: tl.constexpr):
    """Return `value`, which is not computed before `page` is loaded: no compiler knows that pages are not negative."""
    if not ONE_PAGE:
        page = tl.max(page, 0)
    return tl.where(page < 0, -1, value)


@triton.jit
def concatenate(a, b, BLOCK_M: tl.constexpr):
    """Return the columns of two tensors of BLOCK_M rows one after the other."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [BLOCK_M, 2 * a.shape[1]])


@triton.jit(
    do_not_specialize=["is_found_now", "one_each", "stride_table", "stride_lse", "window_left", "window_right"],
)
def mla_kernel(
    q_ptr,  # [num_tokens, num_q_heads, RANK]
    q_pe_ptr,  # [num_tokens, num_q_heads, ROPE]; None without rotary columns, and where they are values too
    out_ptr,  # [num_tokens, num_q_heads, RANK]
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr,  # [num_q_heads], or None
    slopes_ptr,  # [num_q_heads], or None
    latents,  # views.LatentTensors
    extras,  # of FUNCTION, from `user_mods.passed`, or None
    is_found_now,  # whether the launch before this one finds the schedule, as a number
    kv,  # views.LatentLayout
    cu_seqlens_q, one_each,  # as `load_sequence` takes them
    scratch,  # views.Partials
    scale, softcap, window_left, window_right,
    stride_table, stride_q_token, stride_q_head, stride_pe_token, stride_pe_head, stride_out_token, stride_out_head,
    stride_lse,
    NUM_Q_HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr, C_SLOT: tl.constexpr, ROPE_SLOT: tl.constexpr, WIDE_OFFSETS: tl.constexpr,
    SCORE_MOD: tl.constexpr, DECODE: tl.constexpr, DECODE_ROPE: tl.constexpr, PACKED_FP8: tl.constexpr,
    PARTS: tl.constexpr, CODED: tl.constexpr, SCALED: tl.constexpr, POWERS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PER_ROW_MASK: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,  # of a band
    MULTI_BAND: tl.constexpr,  # a sequence may have several bands
    PDL: tl.constexpr,  # programmatic dependent launch
    PARTIAL_ROWS: tl.constexpr,  # rows of a partial that are stored
    FIXED_SPLIT: tl.constexpr,  # keys of a split, a multiple of BLOCK_N; 0 where units are tiles
    TWO_LEVEL: tl.constexpr,  # many partials are combined in two levels
    TWO_LEVEL_MIN_PARTIALS: tl.constexpr, EARLY_EXIT_MAX_TILES: tl.constexpr,  # of CostModel
    COMBINE_ROOM: tl.constexpr,  # of Partial
    FUNCTION: tl.constexpr,  # of LatentTiling
    BOUNDS: tl.constexpr,  # jit function of a mask's bounds, or None
    COMBINE_LAUNCH: tl.constexpr,  # another launch folds the states of splits (`portable/combine.py`)
):  # fmt: skip
    if PDL:  # this kernel may start before the previous one in the stream has ended
        if is_found_now:  # by the launch before this one, for which `load_part` has to wait
            gdc_wait()
    UNIT: tl.constexpr = BLOCK_N if FIXED_SPLIT == 0 else FIXED_SPLIT
    T: tl.constexpr = LatentTiling(
        BLOCK_N, PAGE_SIZE, RANK, ROPE, BLOCK_C, BLOCK_R, C_SLOT, ROPE_SLOT, WIDE_OFFSETS, SCORE_MOD, DECODE,
        DECODE_ROPE, PACKED_FP8, PARTS, CODED, SCALED, POWERS, INPUT_PRECISION, PER_ROW_MASK, FUNCTION,
    )  # fmt: skip
    U: tl.constexpr = Units(NUM_Q_HEADS, BLOCK_M * ROW_BLOCKS, UNIT, 0)
    # Partials are combined a group of columns at a time, as many partials in a round as the registers hold. In two
    # levels there are few at each, so a round of four takes more columns: 8,192 keys of one sequence and 128 heads took
    # 29.3 µs, not 35.4. In one level a round of eight is better: 8 x 4,096 and 16 heads took 27.1 µs, not 36.1 (NVIDIA
    # H200, 2026-11-22).
    COLUMNS: tl.constexpr = min(BLOCK_C, max(16, COMBINE_ROOM // ((4 if TWO_LEVEL else 8) * PARTIAL_ROWS)))
    P: tl.constexpr = Partial(
        PARTIAL_ROWS, RANK, BLOCK_C, COLUMNS, ROW_BLOCKS, PER_ROW_MASK, COMBINE_ROOM, FIXED_SPLIT > 0,
        TWO_LEVEL_MIN_PARTIALS if TWO_LEVEL else None,
    )  # fmt: skip
    partition = tl.program_id(0) // ROW_BLOCKS
    row_block = tl.program_id(0) % ROW_BLOCKS
    part = load_part(scratch.parts, partition)
    if PDL:
        gdc_wait()
    v_scale = 1.0
    if latents.scale is not None and not SCALED and POWERS == 0:
        v_scale = tl.load(latents.scale)
        scale = scale * v_scale
    exponent_scale = LOG2E if SCORE_MOD is not None else scale * LOG2E
    scoring = Scoring(scale, exponent_scale, softcap, window_left, window_right)
    outputs = Outputs(out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse)
    columns = (tl.arange(0, BLOCK_C),)

    seq, block, more = part.seq, part.block, part.low < part.high
    # Which the queries and the tiles of the first band do not wait for.
    sequence = load_sequence(kv, cu_seqlens_q, seq, None, one_each)
    known = Sequence(part.seq_len, part.q_start, part.q_len, part.first_pos)
    while more:  # one band, or those of its units that are in this partition
        _, q_start, q_len, first_pos = known
        kv_start, kv_stop, first, num_units, _ = span(known, kv, window_left, window_right, U)
        band = block if MULTI_BAND else 0
        low, high, band_unit, planned, is_cut = units_here(part, seq, band, num_units)
        poison = tl.where(is_as_planned(sequence, known) & (planned == num_units), 0.0, float("nan"))
        num_bands = tl.cdiv(sequence.q_len * NUM_Q_HEADS, BLOCK_M * ROW_BLOCKS)
        next_seq, next_block, more = next_row_block(part, seq, band, num_bands, MULTI_BAND)
        ends_early = (not more) & (COMBINE_LAUNCH | (part.size <= EARLY_EXIT_MAX_TILES))
        first_row = (band * ROW_BLOCKS + row_block) * BLOCK_M
        start, stop = first + low, first + high  # in units of the sequence
        if PER_ROW_MASK and FIXED_SPLIT == 0:  # tiles that no row of this row block sees are left out
            num_rows = q_len * NUM_Q_HEADS
            low_pos = first_pos + first_row // NUM_Q_HEADS
            high_pos = first_pos + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // NUM_Q_HEADS
            start = tl.maximum(start, tl.maximum(low_pos - window_left, 0) // BLOCK_N)
            stop = tl.minimum(stop, tl.cdiv(tl.maximum(high_pos + window_right + 1, 0), BLOCK_N))
            stop = tl.where(first_row < num_rows, stop, start)
        last_key = kv_stop
        if BOUNDS is not None:  # FUNCTION hides the others of these keys from each row
            bounded = find_rows(first_row, q_start, q_len, first_pos, 0, NUM_Q_HEADS, BLOCK_M)
            begin, end = BOUNDS(bounded.q_pos, seq, bounded.token, extras)
            begin = tl.maximum(begin, tl.maximum(bounded.q_pos - window_left, kv_start))
            end = tl.minimum(end, tl.minimum(bounded.q_pos + window_right + 1, kv_stop))
            sees = bounded.owned & (begin < end)
            kv_stop = tl.max(tl.where(sees, end, 0), 0)
            kv_start = tl.minimum(tl.min(tl.where(sees, begin, 2147483647), 0), kv_stop)
            if FIXED_SPLIT == 0:  # splits without keys have states too
                start = tl.maximum(start, kv_start // BLOCK_N)
                stop = tl.minimum(stop, tl.cdiv(kv_stop, BLOCK_N))
        table = table_row(kv, seq, stride_table)
        # This load is in flight while the queries are loaded.
        page = find_pages(table, start * UNIT, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
        rows = find_rows(first_row, q_start, q_len, first_pos, 0, NUM_Q_HEADS, BLOCK_M)
        head = rows.head.to(tl.int64)
        q_ptrs = q_ptr + rows.token * stride_q_token + head * stride_q_head
        q = load_query_parts(q_ptrs, rows.owned, T)
        pe_ptrs, q_pe = None, None
        if q_pe_ptr is not None:
            pe_ptrs = q_pe_ptr + rows.token * stride_pe_token + head * stride_pe_head
        if ROPE > 0:
            q_pe = load_rotary_queries(q_ptrs, pe_ptrs, rows.owned, T)
        slopes = None
        if slopes_ptr is not None:
            slopes = tl.load(slopes_ptr + rows.head, mask=rows.owned, other=0.0).to(tl.float32)
        of_rows = None
        if FUNCTION is not None:
            of_rows = FUNCTION(None, rows.q_pos, None, None, None, rows.head, seq * 0, seq, rows.token, extras, None)
        place = Place(rows.head, seq, rows.token, extras, of_rows)
        # In flight while tiles are attended to.
        following = load_sequence(kv, cu_seqlens_q, tl.minimum(next_seq, part.last_seq), None, one_each)
        if FIXED_SPLIT == 0:
            acc, m_i, l_i = empty_parts(BLOCK_M, T)
            for tile in tl.range(start, stop):
                next_page = find_pages(table, (tile + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
                acc, m_i, l_i = attend_latents(
                    acc, m_i, l_i, q, q_pe, latents, kv, page, tile * BLOCK_N, rows, slopes, kv_start, kv_stop,
                    scoring, place, T,
                )  # fmt: skip
                page = next_page
            acc, m_i, l_i = join_parts(acc, m_i, l_i, BLOCK_M, T)
            l_i += poison
        else:
            # Each split has a state. States are added in key order, here or by the program that combines, so the sum is
            # the same.
            TILES: tl.constexpr = FIXED_SPLIT // BLOCK_N
            last = tl.minimum(stop * TILES, tl.cdiv(last_key, BLOCK_N)) - 1
            acc, m_i, l_i = join_parts(*empty_parts(BLOCK_M, T), BLOCK_M, T)
            l_i += poison
            split_acc, split_m, split_l = empty_parts(BLOCK_M, T)
            for tile in tl.range(start * TILES, last + 1):
                next_page = find_pages(table, (tile + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
                split_acc, split_m, split_l = attend_latents(
                    split_acc, split_m, split_l, q, q_pe, latents, kv, page, tile * BLOCK_N, rows, slopes, kv_start,
                    kv_stop, scoring, place, T,
                )  # fmt: skip
                page = next_page
                if ((tile + 1) % TILES == 0) | (tile == last):
                    joined, joined_m, joined_l = join_parts(split_acc, split_m, split_l, BLOCK_M, T)
                    joined_l += poison
                    if low == 0:
                        acc, m_i, l_i = combine(acc, m_i, l_i, joined, joined_m, joined_l)
                    else:
                        slot = (band_unit + tile // TILES - first) * ROW_BLOCKS + row_block
                        store_partial(scratch, joined, joined_m, joined_l, columns, slot, True, BLOCK_M, P)
                    split_acc, split_m, split_l = empty_parts(BLOCK_M, T)
        # What the compiler knows of the rows would stay in registers through the loop. So they are computed again.
        first_row = after(page, first_row, PAGE_SIZE % BLOCK_N == 0)
        _, q_start, q_len, first_pos = sequence
        rows = find_rows(first_row, q_start, q_len, first_pos, 0, NUM_Q_HEADS, BLOCK_M)
        if PDL:
            if ends_early:
                gdc_launch_dependents()
        if not is_cut:
            store_result(outputs, acc, m_i, l_i, v_scale, rows, columns, RANK, FIXED_SPLIT > 0)
        elif COMBINE_LAUNCH:
            left = (FIXED_SPLIT == 0) | (low == 0)  # later splits are stored already
            slot = (band_unit + high - 1) * ROW_BLOCKS + row_block
            store_partial(scratch, acc, m_i, l_i, columns, slot, rows.owned & left, BLOCK_M, P)
        else:
            is_last, slots = store_and_arrive(
                scratch, acc, m_i, l_i, columns, partition, row_block, low, band_unit, planned, part.size, BLOCK_M, P
            )
            if is_last:
                stored = find_rows(first_row, q_start, q_len, first_pos, 0, NUM_Q_HEADS, PARTIAL_ROWS)
                store_combined(scratch, slots, row_block, outputs, v_scale, stored, P)
        seq, block, sequence, known = next_seq, next_block, following, following
        if more:  # read again, and so in no register while tiles are loaded
            part = load_part(scratch.parts, partition)
