"""The steps of paged attention: find the rows and the pages, load, and attend to one tile of keys.

Each step is a jit function; the portable kernel is a sequence of them, and of those of `states.py`, which say what
becomes of the running state.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.codes import each_of, queries_for_codes, scores_of_codes, times_block_scales, weighted_step
from quire.kernels.panels import columns_of, elements_of, is_turned, load_tile, num_panels, panel_is_full
from quire.kernels.rotate import load_rotated
from quire.kernels.states import encode, kept_step, multiply, softmax_step


class Tiling(NamedTuple):
    """Compile-time constants of row blocks and tiles of keys. The kernel builds one tuple, which is one constexpr."""

    GROUP: Any  # rows of a query token
    BLOCK_M: Any  # rows of a row block
    BLOCK_N: Any  # keys of a tile
    PAGE_SIZE: Any
    HEAD_DIM: Any
    HEAD_DIM_V: Any
    BLOCK_D: Any  # HEAD_DIM, padded to a power of two
    BLOCK_DV: Any
    K_VEC: Any  # contiguous elements of a head (vLLM's x)
    V_VEC: Any
    WIDE_OFFSETS: Any  # an offset within a page, or of a scale, may reach 2^31
    SCORE_MOD: Any  # jit function, or None
    DECODE: Any  # jit function from stored elements to numbers
    PACKED_FP8: Any  # a stored element is two numbers, or four
    TOKEN_SCALES: Any  # scales per token and head
    INPUT_PRECISION: Any
    PER_ROW_MASK: Any  # rows belong to several query tokens, which see different keys
    STRIDE_UNIT: Any  # of `views.stride_unit`
    WAIT: Any  # finish the products with values in the iteration that begins them
    NEW_TOKENS: Any  # most new tokens of a sequence; 0 where a step writes none
    ENCODE: Any  # jit function from float32 to stored elements; None if the cache is not quantised
    MOST: Any  # stored elements of a panel of a head; 0 for any number
    ROTARY_DIM: Any  # columns of a head that are rotated; None without rotation and norm
    INTERLEAVED: Any  # pairs of them are (2i, 2i + 1)
    FUNCTION: Any  # jit function of users' functions on scores and masks (`user_mods.py`), or None
    FORMAT: Any = None  # `PagedKVCache.kv_format`
    DECODE_V: Any = None  # of values, where there is a format
    IN_PTX: Any = False  # its decoders are instructions of PTX
    DECODE_SCALES: Any = None  # from words with four block scales each, where there are some
    DECODE_PLACED: Any = None  # from pairs of words, where turned products have them so


class Scoring(NamedTuple):
    """The run-time numbers that turn products into scores, and the window of keys that a query sees."""

    scale: Any  # softmax scale, times the key scale of the head
    exponent_scale: Any  # factor from the scores that `softmax_step` takes to base-2 exponents
    softcap: Any
    window_left: Any  # query position i sees keys i - window_left to i + window_right
    window_right: Any


class Rows(NamedTuple):
    """The rows of a row block. A row is a query token and a query head of one KV head."""

    token: Any  # int64, of the batch
    head: Any  # query head
    q_pos: Any  # position of the token among its sequence's keys
    owned: Any  # false for padding rows


class Sight(NamedTuple):
    """What each row of a row block sees: an interval of keys, and drafts. All is None where rows see a band."""

    begin: Any  # int32, the first key of the interval
    end: Any  # int32, the key after its last; in a tree, the first draft
    bits: Any  # int64, bit j for draft j; None without a tree
    first_draft: Any  # position of draft 0 among the keys


class Inputs(NamedTuple):
    """What a program reads, whichever row block it attends with."""

    q_ptr: Any  # [num_tokens, num_q_heads, HEAD_DIM]
    stride_q_token: Any
    stride_q_head: Any
    slopes_ptr: Any  # [num_q_heads], or None
    cache: Any  # views.CacheTensors
    new: Any  # views.NewTokens, or None
    norm_rope: Any  # views.NormRope, or None
    extras: Any  # what FUNCTION reads, from `user_mods.passed`, or None
    kv: Any  # views.KVLayout
    cu_seqlens_q: Any  # as `schedule.load_sequence` takes it, like the next
    one_each: Any
    stride_table: Any
    kv_head: Any
    scoring: Any


class Keys(NamedTuple):
    """The keys that a row block reads: those that any row of its sequence sees, or any of its own rows.

    Others may be in freed pages and hold NaN: they must not be read.
    """

    table: Any  # from `table_row`
    start: Any
    stop: Any


class RowBlock(NamedTuple):
    """A row block, as its tiles of keys need it."""

    q: Any  # from `load_queries`
    rows: Any
    sight: Any
    slopes: Any  # ALiBi slope of each row, or None
    keys: Any
    seq: Any  # the sequence
    span: Any  # the lowest and the highest position of rows, padding included, for FUNCTION, or None
    of_rows: Any  # what FUNCTION reads for each row, whatever the key, or None


@triton.jit
def in_units(stride, UNIT: tl.constexpr):
    """Return a stride that UNIT divides, so that the compiler knows that it does, and loads as much at once."""
    if UNIT == 1:
        return stride
    return stride // UNIT * UNIT


@triton.jit
def find_rows(first_row, q_start, q_len, first_pos, kv_head, GROUP: tl.constexpr, NUM_ROWS: tl.constexpr):
    """Return NUM_ROWS rows of a sequence, from its `first_row`-th on.

    The rows of a sequence are (token, query head of this KV head), flattened. K and V are loaded once for all heads of
    a group.
    """
    row = first_row + tl.arange(0, NUM_ROWS)
    owned = row < q_len * GROUP
    head = kv_head * GROUP + row % GROUP
    token = (q_start + row // GROUP).to(tl.int64)
    return Rows(token, head, first_pos + row // GROUP, owned)


@triton.jit
def load_intervals(kv, rows, first_pos, seq_len):
    """Return the first key of each row's interval and the key after its last, within the sequence.

    In a tree, intervals are of the keys before the drafts.
    """
    begin = tl.zeros_like(rows.q_pos)
    if kv.key_begin is not None:
        begin = tl.maximum(tl.load(kv.key_begin + rows.token, mask=rows.owned, other=0), 0)
    if kv.key_end is not None:
        end = tl.minimum(tl.load(kv.key_end + rows.token, mask=rows.owned, other=0), seq_len)
    else:
        end = tl.zeros_like(rows.q_pos) + tl.minimum(first_pos, seq_len)
    return begin, end


@triton.jit
def within_bounds(sight, rows, seq, seq_len, inputs, BOUNDS: tl.constexpr):
    """Return the interval of keys between a mask's bounds that each row sees: its begin and its end."""
    begin, end = BOUNDS(rows.q_pos, seq, rows.token, inputs.extras)
    if sight.begin is None:
        begin = tl.maximum(begin, tl.maximum(rows.q_pos - inputs.scoring.window_left, 0))
        end = tl.minimum(end, tl.minimum(rows.q_pos + inputs.scoring.window_right + 1, seq_len))
    else:
        begin, end = tl.maximum(begin, sight.begin), tl.minimum(end, sight.end)
    return begin, end


@triton.jit
def keys_of_rows(rows, sight, first_row, first_pos, q_len, seq_len, scoring, GROUP: tl.constexpr):
    """Return which keys the rows of a row block see.

    Returns:
        kv_start, kv_stop: the keys that any row sees; for a tree, up to the last draft.
        full_start, full_stop: the keys that every row sees.
    """
    if sight.begin is None:
        NUM_ROWS: tl.constexpr = rows.owned.shape[0]
        low_pos = first_pos + first_row // GROUP
        high_pos = first_pos + (tl.minimum(first_row + NUM_ROWS, q_len * GROUP) - 1) // GROUP
        kv_start = tl.maximum(low_pos - scoring.window_left, 0)
        kv_stop = tl.maximum(tl.minimum(high_pos + scoring.window_right + 1, seq_len), 0)
        full_start = high_pos - scoring.window_left
        full_stop = tl.minimum(low_pos + scoring.window_right + 1, seq_len)
    else:
        full_start = tl.max(tl.where(rows.owned, sight.begin, 0), 0)
        if sight.bits is None:
            seen = rows.owned & (sight.begin < sight.end)
            kv_start = tl.min(tl.where(seen, sight.begin, 2147483647), 0)
            kv_stop = tl.max(tl.where(seen, sight.end, 0), 0)
            full_end = sight.end
        else:
            # Like a causal row, a row of a tree sees the keys before the drafts, and the drafts up to the first gap.
            first = tl.minimum(sight.begin, sight.end)
            kv_start = tl.maximum(tl.min(tl.where(rows.owned, first, 2147483647), 0), 0)
            kv_stop = tl.maximum(tl.minimum(first_pos + q_len, seq_len), 0)
            full_end = tl.minimum(first_pos + trailing_ones(sight.bits), seq_len)
        full_stop = tl.min(tl.where(rows.owned, full_end, 2147483647), 0)
        kv_start = tl.minimum(kv_start, kv_stop)
    return kv_start, kv_stop, tl.maximum(full_start, 0), tl.maximum(full_stop, 0)


@triton.jit
def trailing_ones(x):
    """Return how many of the lowest bits of int64 words are 1, without a gap."""
    lowest_zero = ~x & (x + 1)  # 0 where all bits are 1
    count = tl.zeros_like(x).to(tl.int32)
    rest = (lowest_zero - 1).to(tl.uint64, bitcast=True)  # the ones; all of them where there is no zero
    for i in tl.static_range(6):  # of the next 32, 16, ... 1 bits, all are 1 or none counts
        passes = (rest & ((1 << (32 >> i)) - 1)) == ((1 << (32 >> i)) - 1)
        count += tl.where(passes, 32 >> i, 0)
        rest = tl.where(passes, rest >> (32 >> i), rest)
    return count + (rest & 1).to(tl.int32)


@triton.jit
def row_sees(sight, kv_pos):
    """Return which of the keys at positions `kv_pos` each row sees, [BLOCK_M, BLOCK_N]."""
    visible = (kv_pos[None, :] >= sight.begin[:, None]) & (kv_pos[None, :] < sight.end[:, None])
    if sight.bits is not None:
        draft = kv_pos - sight.first_draft
        one = tl.where((draft >= 0) & (draft < 64), tl.full(draft.shape, 1, tl.int64), 0)
        bit = one << tl.minimum(tl.maximum(draft, 0), 63).to(tl.int64)
        visible = visible | ((sight.bits[:, None] & bit[None, :]) != 0)
    return visible


@triton.jit
def head_scales(cache, kv, kv_head, scale, T: tl.constexpr):
    """Return the softmax scale times the key scale of a KV head, and its value scale."""
    v_scale = 1.0
    if cache.k_scale is not None and not T.TOKEN_SCALES:
        if T.WIDE_OFFSETS:
            kv_head = kv_head.to(tl.int64)
        scale = scale * tl.load(cache.k_scale + kv_head * kv.scale_head)
        v_scale = tl.load(cache.v_scale + kv_head * kv.scale_head)
    return scale, v_scale


@triton.jit
def table_row(kv, seq, stride_table):
    """Return a pointer to the first page number of a sequence."""
    if kv.cu_pages is None:
        return kv.page_table + seq.to(tl.int64) * stride_table
    else:
        return kv.page_table + tl.load(kv.cu_pages + seq)


@triton.jit
def find_pages(row, pos, kv_start, kv_stop, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page of each key of the tile that begins at position `pos`; 0 outside [kv_start, kv_stop).

    `row` is from `table_row`. Kernels call this for the next tile, so that the loads of K and V do not wait for it.
    Of a full tile, kv_start and kv_stop are None.
    """
    if kv_start is None:
        return tl.load(row + (pos if PAGE_SIZE % BLOCK_N == 0 else pos + tl.arange(0, BLOCK_N)) // PAGE_SIZE)
    elif PAGE_SIZE % BLOCK_N == 0:  # the tile is in one page
        return tl.load(row + pos // PAGE_SIZE, mask=pos < kv_stop, other=0)
    else:
        kv_pos = pos + tl.arange(0, BLOCK_N)
        return tl.load(row + kv_pos // PAGE_SIZE, mask=(kv_pos >= kv_start) & (kv_pos < kv_stop), other=0)


@triton.jit
def pages_of_tile(keys, tile, T: tl.constexpr):
    """Return what `find_pages` does of a tile, by its number."""
    return find_pages(keys.table, tile * T.BLOCK_N, keys.start, keys.stop, T.PAGE_SIZE, T.BLOCK_N)


@triton.jit
def dim_offsets(offs_d, stride_vec, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of a head's elements, which are stored as vectors of VEC contiguous elements."""
    if VEC * 2 > BLOCK:  # a head is contiguous
        return offs_d
    return offs_d // VEC * stride_vec + offs_d % VEC


@triton.jit
def load_queries(inputs, rows, T: tl.constexpr):
    """Load the queries of a row block; with `norm_rope`, rotate them by their tokens.

    They are a tuple of panels. With PACKED_FP8, it is what `scale_to_float16` returns of even and odd columns; with a
    format, what `queries_for_codes` makes of that.
    """
    ptrs = inputs.q_ptr + rows.token * in_units(inputs.stride_q_token, T.STRIDE_UNIT)
    ptrs += rows.head.to(tl.int64) * in_units(inputs.stride_q_head, T.STRIDE_UNIT)
    EACH: tl.constexpr = each_of(T.FORMAT, T.PACKED_FP8, True)
    columns, q = columns_of(T.HEAD_DIM, EACH, T.BLOCK_M, T.MOST), ()
    for i in tl.static_range(len(columns)):
        if T.ROTARY_DIM is None:
            keep = rows.owned[:, None] & (columns[i] < T.HEAD_DIM)[None, :]
            q = q + (tl.load(ptrs[:, None] + columns[i][None, :], mask=keep, other=0.0),)
        else:
            q = q + (
                load_rotated(
                    ptrs, rows.owned, rows.token, inputs.norm_rope.q_weight, inputs.norm_rope, columns[i], T.HEAD_DIM,
                    T.BLOCK_D, T.ROTARY_DIM, T.INTERLEAVED,
                ),
            )  # fmt: skip
    if T.PACKED_FP8 and q[0].dtype != tl.float32:
        q = scale_to_float16(q)
    if T.FORMAT is not None:
        q = queries_for_codes(q, len(columns), T)
    return q


@triton.jit
def scale_to_float16(q):
    """Return panels of queries in float16, and after the last the power of two by which each row was divided."""
    peak = tl.max(tl.abs(q[0].to(tl.float32)), 1)
    for i in tl.static_range(1, len(q)):
        peak = tl.maximum(peak, tl.max(tl.abs(q[i].to(tl.float32)), 1))
    # The largest magnitude of a row becomes 2^13 or more. Magnitudes down to 2^-27 of it are then exact in float16.
    exponent = tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 14)
    down = ((267 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^(13 - e), e = exponent - 127
    up = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
    scaled = ()
    for i in tl.static_range(len(q)):
        scaled = scaled + ((q[i].to(tl.float32) * down[:, None]).to(tl.float16),)
    return scaled + (up,)


@triton.jit
def attend_tile(
    acc, m_i, l_i, page, pos, block, inputs, T: tl.constexpr, MASKED: tl.constexpr, KEPT: tl.constexpr = False
):
    """Fold the tile of keys that begins at position `pos` into the state.

    Args:
        acc, m_i, l_i: the running state.
        page: page of each key, from `find_pages`.
        pos: position of the tile's first key.
        block: RowBlock.
        inputs: Inputs.
        T: Tiling.
        MASKED: false where every row sees every key of the tile.
        KEPT: rows keep their maxima, as `kept_step` says.
    """
    q, rows, sight, slopes, keys, seq, _, of_rows = block
    cache, kv, kv_head, scoring = inputs.cache, inputs.kv, inputs.kv_head, inputs.scoring
    kv_pos = pos + tl.arange(0, T.BLOCK_N)
    keep = (kv_pos >= keys.start) & (kv_pos < keys.stop)  # 0 * NaN is NaN
    if T.BLOCK_N % T.PAGE_SIZE == 0:
        slot = tl.arange(0, T.BLOCK_N) % T.PAGE_SIZE  # the same in every tile
    else:
        slot = kv_pos % T.PAGE_SIZE
    EACH_K: tl.constexpr = each_of(T.FORMAT, T.PACKED_FP8, True)  # numbers in a stored element
    EACH_V: tl.constexpr = each_of(T.FORMAT, T.PACKED_FP8, False)
    page = page.to(tl.int64)  # page * stride passes 2^31
    if T.WIDE_OFFSETS:
        slot, kv_head = slot.to(tl.int64), kv_head.to(tl.int64)
    offs_head = kv_head * in_units(kv.k_head, T.STRIDE_UNIT)
    k_head, v_head = cache.k + offs_head, cache.v + offs_head  # the same in every tile
    offs_k = slot * in_units(kv.k_slot, T.STRIDE_UNIT) + page * in_units(kv.k_page, T.STRIDE_UNIT)
    offs_v = offs_k
    if kv.v_page is not None:
        v_head = cache.v + kv_head * in_units(kv.v_head, T.STRIDE_UNIT)
        offs_v = slot * in_units(kv.v_slot, T.STRIDE_UNIT) + page * in_units(kv.v_page, T.STRIDE_UNIT)
    k_rows, v_rows = k_head + offs_k[:, None], v_head + offs_v[:, None]
    ROWS: tl.constexpr = rows.owned.shape[0]
    TURNED: tl.constexpr = is_turned(ROWS)
    k = load_heads(k_rows, kv.k_vec, keep, MASKED, T.HEAD_DIM, EACH_K, ROWS, T.MOST, T.BLOCK_D, T.K_VEC, T.WIDE_OFFSETS)
    v = load_heads(
        v_rows, kv.v_vec, keep, MASKED, T.HEAD_DIM_V, EACH_V, ROWS, T.MOST, T.BLOCK_DV, T.V_VEC, T.WIDE_OFFSETS, TURNED
    )
    # Small probabilities times small scales vanish in float16. With float16 queries, the values are scaled.
    SCALE_V: tl.constexpr = T.TOKEN_SCALES and q[0].dtype == tl.float16 and T.FORMAT is None
    V_DTYPE: tl.constexpr = tl.float32 if SCALE_V else q[0].dtype
    DECODE_V: tl.constexpr = T.DECODE if T.FORMAT is None else T.DECODE_V
    HAS_BLOCKS: tl.constexpr = T.DECODE_SCALES is not None
    k = decode_panels(k, q[0].dtype, T.DECODE, T)
    if HAS_BLOCKS:
        offs_block = slot * kv.block_slot + kv_head * kv.block_head + page * kv.block_page
        places = None
        if TURNED and T.DECODE_PLACED is not None:
            places = kv.places + tl.minimum(pos, 0)  # plus 0, which the compiler cannot know: a load of this loop
        k = times_block_scales(k, cache.k_block + offs_block, places, keep, MASKED, T.HEAD_DIM, T, False)
    if not TURNED:
        v = decode_panels(v, V_DTYPE, DECODE_V, T)
        if HAS_BLOCKS:
            v = times_block_scales(v, cache.v_block + offs_block, places, keep, MASKED, T.HEAD_DIM_V, T, False)
    scores = None  # [BLOCK_M, BLOCK_N]
    for i in tl.static_range(len(k)):
        scores = multiply(q[i], k[i] if TURNED else tl.trans(k[i]), scores, TURNED, T.INPUT_PRECISION)
    if TURNED:  # after that product, both pass through the same shared memory, where wgmma might still read keys
        v = decode_panels(v, V_DTYPE, DECODE_V, T)
        if HAS_BLOCKS:
            v = times_block_scales(v, cache.v_block + offs_block, places, keep, MASKED, T.HEAD_DIM_V, T, True)
    if T.PACKED_FP8:
        scores = scores * q[len(k)][:, None]
    v_scale = None
    if T.TOKEN_SCALES:
        offs_scale = slot * kv.scale_slot + kv_head * kv.scale_head + page * kv.scale_page
        k_scale = load_tile(cache.k_scale + offs_scale, keep, None, MASKED, False)
        if T.FORMAT is None:
            scores *= k_scale[None, :]
        else:
            scores = scores_of_codes(scores, q[len(k) + 1], k_scale, T)
        v_scale = load_tile(cache.v_scale + offs_scale, keep, None, MASKED, False)
        if SCALE_V:
            scaled = ()
            for i in tl.static_range(len(v)):
                of_numbers = v_scale[None, :] if TURNED else v_scale[:, None]
                scaled = scaled + ((v[i] * of_numbers).to(q[0].dtype),)
            v, v_scale = scaled, None
    if T.SCORE_MOD is not None:
        scores = T.SCORE_MOD(scores, scoring.scale, rows.q_pos, kv_pos, slopes, scoring.softcap)
    if T.FUNCTION is not None:
        span = None
        if block.span is not None:
            span = block.span[0], block.span[1], pos + T.BLOCK_N - 1
        cols = tl.arange(0, T.BLOCK_N)
        scores = T.FUNCTION(
            scores, rows.q_pos, span, pos, cols, rows.head, inputs.kv_head, seq, rows.token, inputs.extras, of_rows
        )
    if MASKED:
        visible = keep[None, :]
        if sight.begin is not None:
            if T.PER_ROW_MASK or sight.bits is not None:
                visible = visible & row_sees(sight, kv_pos)
        elif T.PER_ROW_MASK:
            first, last = rows.q_pos - scoring.window_left, rows.q_pos + scoring.window_right
            visible = visible & (kv_pos[None, :] >= first[:, None]) & (kv_pos[None, :] <= last[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    if T.FORMAT is not None and T.TOKEN_SCALES:
        acc, m_i, l_i = weighted_step(acc, m_i, l_i, scores, v, v_scale, scoring.exponent_scale, T.INPUT_PRECISION)
    elif KEPT:
        acc, m_i, l_i = kept_step(acc, m_i, l_i, scores, v, scoring.exponent_scale, T.INPUT_PRECISION)
    else:
        acc, m_i, l_i = softmax_step(
            acc, m_i, l_i, scores, v, v_scale, scoring.exponent_scale, T.PACKED_FP8, T.INPUT_PRECISION
        )
    if T.WAIT:
        waited = ()
        for i in tl.static_range(len(acc)):
            waited = waited + (wait_for(acc[i]),)
        acc = waited
    return acc, m_i, l_i


@triton.jit
def wait_for(acc):
    """Return the accumulator of a product, for which Triton then waits in this iteration of a loop.

    If only a branch uses it, Triton waits for wgmma in the next iteration, and ptxas makes every wgmma of the kernel
    wait for the one before it (C7515). The move is a use outside of the branch, and the compiler removes it.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], tl.float32, is_pure=True, pack=1)


@triton.jit
def write_new(inputs, first, count, T: tl.constexpr):
    """Write the keys and values of `count` tokens from the `first`-th on into their slots, for one KV head.

    With `norm_rope`, the keys are rotated. The bytes are those of `write_kv`. The caller reads them after a barrier.
    """
    new, norm_rope, cache, kv = inputs.new, inputs.norm_rope, inputs.cache, inputs.kv
    i = tl.arange(0, T.NEW_TOKENS)
    # A token's number is not negative, so this adds 0. The compiler cannot know that. So it computes addresses again
    # for each sequence, and does not keep them in registers.
    kv_head = (inputs.kv_head + tl.minimum(first, 0)).to(tl.int64)
    token = (first + i).to(tl.int64)
    position = tl.load(new.slot_mapping + token, mask=i < count, other=-1)
    k_ptrs = new.k + token * new.k_token + kv_head * new.k_head
    if T.ROTARY_DIM is None:
        k = load_rows(k_ptrs, i < count, T.HEAD_DIM, T.BLOCK_D)
    else:
        k = load_rotated(
            k_ptrs, i < count, token, norm_rope.k_weight, norm_rope, tl.arange(0, T.BLOCK_D), T.HEAD_DIM, T.BLOCK_D,
            T.ROTARY_DIM, T.INTERLEAVED,
        )  # fmt: skip
    v = load_rows(new.v + token * new.v_token + kv_head * new.v_head, i < count, T.HEAD_DIM_V, T.BLOCK_DV)
    if T.ENCODE is not None:
        k_scale, v_scale = None, None
        if cache.k_scale is not None:
            k_scale = tl.load(cache.k_scale + kv_head * kv.scale_head)
            v_scale = tl.load(cache.v_scale + kv_head * kv.scale_head)
        k, v = encode(k, k_scale, T.ENCODE), encode(v, v_scale, T.ENCODE)
    page, slot = position // T.PAGE_SIZE, position % T.PAGE_SIZE
    k_rows = cache.k + page * kv.k_page + slot * kv.k_slot + kv_head * kv.k_head
    if kv.v_page is None:
        v_rows = cache.v + page * kv.k_page + slot * kv.k_slot + kv_head * kv.k_head
    else:
        v_rows = cache.v + page * kv.v_page + slot * kv.v_slot + kv_head * kv.v_head
    store_rows(k, k_rows, position >= 0, kv.k_vec, T.K_VEC, T.HEAD_DIM, T.BLOCK_D, T.PACKED_FP8)
    store_rows(v, v_rows, position >= 0, kv.v_vec, T.V_VEC, T.HEAD_DIM_V, T.BLOCK_DV, T.PACKED_FP8)


@triton.jit
def load_rows(ptrs, inside, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Load the heads that begin at `ptrs`."""
    offs_d = tl.arange(0, BLOCK)
    return tl.load(ptrs[:, None] + offs_d[None, :], mask=inside[:, None] & (offs_d < DIM)[None, :], other=0.0)


@triton.jit
def store_rows(
    x, ptrs, inside, stride_vec, VEC: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PACKED_FP8: tl.constexpr
):
    """Store the stored elements of heads that begin at `ptrs`."""
    offs_d = tl.arange(0, BLOCK)
    if PACKED_FP8:  # pointers are to two numbers, which are stored one by one
        ptrs, x = ptrs.to(tl.pointer_type(tl.uint8), bitcast=True), x.to(tl.uint8, bitcast=True)
    offs = dim_offsets(offs_d.to(tl.int64), stride_vec, VEC, BLOCK)
    tl.store(ptrs[:, None] + offs[None, :], x, mask=inside[:, None] & (offs_d < DIM)[None, :])


@triton.jit
def load_heads(
    ptrs, stride_vec, keep, MASKED: tl.constexpr, DIM: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr,
    MOST: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr, WIDE_OFFSETS: tl.constexpr,
    TURNED: tl.constexpr = False,
):  # fmt: skip
    """Load the panels of the heads that begin at `ptrs` [BLOCK_N, 1], for row blocks of ROWS rows.

    If TURNED, rows of panels are columns of heads. They are loaded so, since `ldmatrix` transposes what it reads.
    """
    panels = ()
    for i in tl.static_range(num_panels(DIM, EACH, ROWS, MOST)):
        offs_d = elements_of(DIM, EACH, ROWS, MOST, i)
        if WIDE_OFFSETS:
            offs_d = offs_d.to(tl.int64)
        at = ptrs + dim_offsets(offs_d, stride_vec, VEC, BLOCK // EACH)[None, :]
        inside = offs_d < DIM // EACH
        if TURNED:
            tile = load_tile(
                tl.trans(at), inside[:, None], keep[None, :], not panel_is_full(DIM, EACH, ROWS, MOST, i), MASKED
            )
        else:
            tile = load_tile(
                at, keep[:, None], inside[None, :], MASKED, not panel_is_full(DIM, EACH, ROWS, MOST, i)
            )  # fmt: skip
        panels = panels + (tile,)
    return panels


@triton.jit
def decode_panels(stored, dtype: tl.constexpr, DECODE: tl.constexpr, T: tl.constexpr):
    """Return panels of numbers; of pairs, even and odd columns."""
    numbers = ()
    for i in tl.static_range(len(stored)):
        if T.PACKED_FP8:
            found = DECODE(stored[i])
            for j in tl.static_range(len(found)):
                numbers = numbers + (found[j].to(dtype),)
        else:
            numbers = numbers + (DECODE(stored[i], dtype),)
    return numbers
