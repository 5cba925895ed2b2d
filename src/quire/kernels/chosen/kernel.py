"""The kernels of chosen keys: one for keys and values, one for latents, and one that combines the parts of lists.

Grid: [num_tokens * num_splits * num_kv_heads * head blocks]. One program owns one query token, BLOCK_M query heads of a
KV head, and one part of the token's list. It reads its part BLOCK_N keys at a time, finds their pages and gathers them.
Entries are read two tiles ahead, and pages one tile ahead: while a tile is multiplied, the loads of the next one have
all addresses. So the rows that are in flight are those of `num_stages`.

The tiles of a list are cut into equal parts on the device, from the length that the list has now: each layer has other
lists. Without parts, a result depends on its token and its list alone, and on nothing else in the batch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.mla.kernel import (
    LatentTiling,
    empty_parts,
    fold_latents,
    join_parts,
    load_query_parts,
    load_rotary_queries,
)
from quire.kernels.panels import columns_of
from quire.kernels.portable.reduce import Partial, store_partial
from quire.kernels.primitives import (
    Inputs,
    Rows,
    Scoring,
    Tiling,
    decode_panels,
    head_scales,
    in_units,
    load_heads,
    load_queries,
    scale_to_float16,
    table_row,
)
from quire.kernels.states import LOG2E, Outputs, combine_at_once, empty_state, softmax_step, store_result
from quire.kernels.views import Lists

NUMBERS = (  # which change from layer to layer and step to step: kernels are the same for all of them
    "width", "stride_list", "stride_list_head", "stride_lens", "stride_lens_head", "extra_width", "extra_list",
    "extra_lens_token", "num_seqs", "num_splits", "stride_table", "stride_scale", "stride_lse",
)  # fmt: skip


ONCE = tl.constexpr(4)  # columns of entries, of which the first one counts


class Place(NamedTuple):
    """The list of one query token and KV head, and what of it counts. It is flat, as `views` says why."""

    entries: Any  # pointer to the token's list
    count: Any  # entries of it
    table: Any  # pointer to the first page number of the token's sequence; None for slots
    end: Any  # keys of the sequence from here on are not seen


class Naming(NamedTuple):
    """Compile-time constants of what entries name. The kernel builds one tuple, which is one constexpr."""

    BLOCK_N: Any  # keys of a tile
    PAGE_SIZE: Any
    BLOCK_SIZE: Any  # keys that an entry names
    ARE_SLOTS: Any  # entries name slots


@triton.jit
def program_of(num_splits, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the query token, the part of its list, the KV head and the head block of this program.

    Programs of one token and one part are next to each other, and read the same keys if heads share a list.
    """
    BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    kv_head = pid // BLOCKS % NUM_KV_HEADS
    token = pid // (BLOCKS * NUM_KV_HEADS)
    split = token * 0
    if num_splits is not None:
        split = token % num_splits
        token = token // num_splits
    return token, split, kv_head, pid % BLOCKS


@triton.jit
def find_rows_of_token(token, kv_head, block, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the rows of a head block."""
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    nothing = tl.zeros_like(row)
    return Rows(nothing + token.to(tl.int64), kv_head * GROUP + row, nothing, row < GROUP)


@triton.jit
def find_sequence(kv, cu_seqlens_q, token, num_seqs, CAUSAL: tl.constexpr):
    """Return a token's sequence, the first key of it that the token may not see, and whether a sequence owns it."""
    seq = tl.minimum(token, num_seqs - 1)
    q_start, q_len, owned = seq, 1, token < num_seqs
    if cu_seqlens_q is not None:
        low, high = 1, num_seqs
        while low < high:  # the last sequence that begins at or before the token
            middle = (low + high) // 2
            before = tl.load(cu_seqlens_q + middle) <= token
            low = tl.where(before, middle + 1, low)
            high = tl.where(before, high, middle)
        seq = low - 1
        q_start = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
        owned = token < q_start + q_len
    seq_len = tl.load(kv.seq_lens + seq)
    if kv.query_offsets is None:
        position = seq_len - q_len + token - q_start
    else:
        position = tl.load(kv.query_offsets + seq) + token - q_start
    end = seq_len
    if CAUSAL:
        end = tl.minimum(end, position + 1)
    return seq, end, owned


@triton.jit
def is_owned(cu_seqlens_q, token, num_seqs):
    """Return whether a sequence owns a token."""
    if cu_seqlens_q is None:
        return token < num_seqs
    else:
        return token < tl.load(cu_seqlens_q + num_seqs)


@triton.jit
def count_of(lists, token, kv_head):
    """Return how many entries of a token's list count."""
    if lists.list_lens is None:
        return lists.width
    else:
        at = token.to(tl.int64) * lists.lens_token + kv_head.to(tl.int64) * lists.lens_head
        return tl.minimum(tl.load(lists.list_lens + at), lists.width)


@triton.jit
def tiles_of_extra(lens, width, stride_lens, token, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the tiles of a token's list of keys in a second cache; 0 if SIZE is."""
    if SIZE == 0:
        return token * 0
    elif lens is None:
        return tl.cdiv(width * SIZE, BLOCK_N) + token * 0
    else:
        count = tl.minimum(tl.load(lens + token.to(tl.int64) * stride_lens), width)
        return tl.cdiv(count * SIZE, BLOCK_N)


@triton.jit
def entries_of(lists, token, kv_head):
    """Return a pointer to a token's list."""
    return lists.indices + token.to(tl.int64) * lists.token + kv_head.to(tl.int64) * lists.head


@triton.jit
def part_of(num_tiles, split, num_splits):
    """Return the first of a list's tiles that is in a part of it, and the one after its last."""
    if num_splits is None:
        return num_tiles * 0, num_tiles
    else:
        size = tl.cdiv(num_tiles, num_splits)
        return tl.minimum(split * size, num_tiles), tl.minimum((split + 1) * size, num_tiles)


@triton.jit
def load_entries(place, tile, N: tl.constexpr):
    """Return the entry of each key of a tile, -1 after the list's end: the first of ONCE columns, others hold -1."""
    n = (tile * N.BLOCK_N + tl.arange(0, N.BLOCK_N))[:, None] + tl.zeros([1, ONCE], tl.int32)
    is_first = (tl.arange(0, ONCE) == 0)[None, :]
    return tl.load(place.entries + n // N.BLOCK_SIZE, mask=(n // N.BLOCK_SIZE < place.count) & is_first, other=-1)


@triton.jit
def find_keys(place, entry, tile, N: tl.constexpr):
    """Return where each key of a tile is, `page * PAGE_SIZE + slot`, -1 if it is not seen.

    `entry` is from `load_entries`. All threads that load a part of a key's row need its place. Triton would compute it
    in each of them, which takes most of the loop's instructions. It does not so through a reduction: with as many
    columns as there are threads for a key, each place is computed once.
    """
    key = entry
    if N.BLOCK_SIZE > 1:
        of_block = (tile * N.BLOCK_N + tl.arange(0, N.BLOCK_N)) % N.BLOCK_SIZE
        key = entry.to(tl.int64) * N.BLOCK_SIZE + of_block[:, None]
    keep = entry >= 0
    if not N.ARE_SLOTS:
        keep = keep & (key < place.end)
    key = tl.where(keep, key, 0).to(tl.int32)
    if not N.ARE_SLOTS:
        page = tl.load(place.table + key // N.PAGE_SIZE, mask=keep, other=0).to(tl.int32)
        key = page * N.PAGE_SIZE + key % N.PAGE_SIZE
    return tl.max(tl.where(keep, key, -1), 1)


@triton.jit
def attend_keys(acc, m_i, l_i, q, cache, kv, kv_head, at, scoring, T: tl.constexpr):
    """Fold a tile of keys and values, anywhere in the cache, into the state.

    Args:
        acc, m_i, l_i: the running state.
        q: from `load_queries`.
        cache: views.CacheTensors.
        kv: views.KVLayout.
        kv_head: KV head.
        at: from `find_keys`.
        scoring: Scoring.
        T: Tiling.
    """
    keep, slot = at >= 0, at % T.PAGE_SIZE
    page = (at // T.PAGE_SIZE).to(tl.int64)  # page * stride passes 2^31
    if T.WIDE_OFFSETS:
        slot, kv_head = slot.to(tl.int64), kv_head.to(tl.int64)
    offs_k = slot * in_units(kv.k_slot, T.STRIDE_UNIT) + page * in_units(kv.k_page, T.STRIDE_UNIT)
    offs_k += kv_head * in_units(kv.k_head, T.STRIDE_UNIT)
    offs_v = offs_k
    if kv.v_page is not None:
        offs_v = slot * in_units(kv.v_slot, T.STRIDE_UNIT) + page * in_units(kv.v_page, T.STRIDE_UNIT)
        offs_v += kv_head * in_units(kv.v_head, T.STRIDE_UNIT)
    k_rows, v_rows = (cache.k + offs_k)[:, None], (cache.v + offs_v)[:, None]
    ROWS: tl.constexpr = m_i.shape[0]
    k = load_heads(k_rows, kv.k_vec, keep, True, T.HEAD_DIM, 1, ROWS, T.MOST, T.BLOCK_D, T.K_VEC, T.WIDE_OFFSETS)
    v = load_heads(v_rows, kv.v_vec, keep, True, T.HEAD_DIM_V, 1, ROWS, T.MOST, T.BLOCK_DV, T.V_VEC, T.WIDE_OFFSETS)
    # Small probabilities times small scales vanish in float16. With float16 queries, the values are scaled.
    SCALE_V: tl.constexpr = T.TOKEN_SCALES and q[0].dtype == tl.float16
    k = decode_panels(k, q[0].dtype, T.DECODE, T)
    v = decode_panels(v, tl.float32 if SCALE_V else q[0].dtype, T.DECODE, T)
    scores = tl.dot(q[0], tl.trans(k[0]), input_precision=T.INPUT_PRECISION)  # [BLOCK_M, BLOCK_N]
    for i in tl.static_range(1, len(k)):
        scores = tl.dot(q[i], tl.trans(k[i]), scores, input_precision=T.INPUT_PRECISION)
    v_scale = None
    if T.TOKEN_SCALES:
        offs_scale = slot * kv.scale_slot + kv_head * kv.scale_head + page * kv.scale_page
        scores *= tl.load(cache.k_scale + offs_scale, mask=keep, other=0.0)[None, :]
        v_scale = tl.load(cache.v_scale + offs_scale, mask=keep, other=0.0)
        if SCALE_V:
            scaled = ()
            for i in tl.static_range(len(v)):
                scaled = scaled + ((v[i] * v_scale[:, None]).to(q[0].dtype),)
            v, v_scale = scaled, None
    if T.SCORE_MOD is not None:
        scores = T.SCORE_MOD(scores, scoring.scale, None, None, None, scoring.softcap)
    scores = tl.where(keep[None, :], scores, float("-inf"))
    return softmax_step(acc, m_i, l_i, scores, v, v_scale, scoring.exponent_scale, False, T.INPUT_PRECISION)


@triton.jit
def attend_rows_of_latents(acc, m_i, l_i, q, q_pe, latents, kv, at, scoring, T: tl.constexpr):
    """Fold a tile of latents, anywhere in the cache, into the state.

    Args:
        acc, m_i, l_i: the running state, from `empty_parts`.
        q: from `load_query_parts`, or what `scale_to_float16` makes of it.
        q_pe: [BLOCK_M, BLOCK_R], or None.
        latents: views.LatentTensors.
        kv: views.LatentLayout.
        at: from `find_keys`.
        scoring: Scoring.
        T: LatentTiling.
    """
    keep, slot = at >= 0, at % T.PAGE_SIZE
    page = (at // T.PAGE_SIZE).to(tl.int64)  # page * stride passes 2^31
    if T.WIDE_OFFSETS:
        slot = slot.to(tl.int64)
    return fold_latents(acc, m_i, l_i, q, q_pe, latents, kv, page, slot, 0, keep, None, None, None, scoring, None, T)


@triton.jit
def attend_list(acc, m_i, l_i, q, q_pe, latents, kv, place, start, stop, scoring, T: tl.constexpr, N: tl.constexpr):
    """Fold the tiles `start` to `stop` of a list into the state; the arguments are those of `attend_rows_of_latents`.

    Args:
        acc, m_i, l_i, q, q_pe, latents, kv: see there.
        place: Place.
        start, stop: the first tile, and the one after the last.
        scoring, T: see there.
        N: Naming.
    """
    at = find_keys(place, load_entries(place, start, N), start, N)
    ahead = load_entries(place, start + 1, N)
    for tile in tl.range(start, stop):
        following = find_keys(place, ahead, tile + 1, N)
        ahead = load_entries(place, tile + 2, N)
        acc, m_i, l_i = attend_rows_of_latents(acc, m_i, l_i, q, q_pe, latents, kv, at, scoring, T)
        at = following
    return acc, m_i, l_i


@triton.jit(do_not_specialize=NUMBERS)
def chosen_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM_V]
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr,  # [num_q_heads], or None
    cache,  # views.CacheTensors
    kv,  # views.KVLayout
    indices, list_lens, width, stride_list, stride_list_head, stride_lens, stride_lens_head,  # those of views.Lists
    scratch,  # views.Partials; None, like the next, where lists are not cut
    num_splits,
    cu_seqlens_q,  # [num_seqs + 1] int32, or None where every sequence has one query
    scale, softcap, num_seqs,
    stride_table, stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WIDE_OFFSETS: tl.constexpr, SCORE_MOD: tl.constexpr, DECODE: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,  # a token sees no key after itself
    BLOCK_SIZE: tl.constexpr,  # keys that an entry names
    ARE_SLOTS: tl.constexpr,  # entries name slots
    STRIDE_UNIT: tl.constexpr,  # of `views.stride_unit`
    PDL: tl.constexpr,  # programmatic dependent launch
    PARTIAL_ROWS: tl.constexpr,  # rows of a partial that are stored
):  # fmt: skip
    if PDL:  # this kernel may start before the previous one in the stream has ended
        gdc_wait()
    T: tl.constexpr = Tiling(
        GROUP, BLOCK_M, BLOCK_N, PAGE_SIZE, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_VEC, V_VEC, WIDE_OFFSETS,
        SCORE_MOD, DECODE, False, TOKEN_SCALES, INPUT_PRECISION, False, STRIDE_UNIT, False, 0, None, 0, None, False,
        None,
    )  # fmt: skip
    N: tl.constexpr = Naming(BLOCK_N, PAGE_SIZE, BLOCK_SIZE, ARE_SLOTS)
    token, split, kv_head, block = program_of(num_splits, NUM_KV_HEADS, GROUP, BLOCK_M)
    seq, end, owned = find_sequence(kv, cu_seqlens_q, token, num_seqs, CAUSAL)
    if not owned:
        return
    lists = Lists(indices, list_lens, width, stride_list, stride_list_head, stride_lens, stride_lens_head)
    count = count_of(lists, token, kv_head)
    start, stop = part_of(tl.cdiv(count * BLOCK_SIZE, BLOCK_N), split, num_splits)
    place = Place(entries_of(lists, token, kv_head), count, table_row(kv, seq, stride_table), end)
    at = find_keys(place, load_entries(place, start, N), start, N)
    ahead = load_entries(place, start + 1, N)
    rows = find_rows_of_token(token, kv_head, block, GROUP, BLOCK_M)
    scale, v_scale = head_scales(cache, kv, kv_head, scale, T)
    scoring = Scoring(scale, LOG2E if SCORE_MOD is not None else scale * LOG2E, softcap, 0, 0)
    inputs = Inputs(
        q_ptr, stride_q_token, stride_q_head, None, cache, None, None, None, kv, cu_seqlens_q, None, stride_table,
        kv_head, scoring,
    )  # fmt: skip
    q = load_queries(inputs, rows, T)
    acc, m_i, l_i = empty_state(BLOCK_M, HEAD_DIM_V, 1, T.MOST)
    for tile in tl.range(start, stop):
        following = find_keys(place, ahead, tile + 1, N)
        ahead = load_entries(place, tile + 2, N)
        acc, m_i, l_i = attend_keys(acc, m_i, l_i, q, cache, kv, kv_head, at, scoring, T)
        at = following
    if PDL:
        gdc_launch_dependents()
    columns = columns_of(HEAD_DIM_V, 1, BLOCK_M, T.MOST)
    if num_splits is None:
        stride_out_token, stride_out_head = (
            in_units(stride_out_token, STRIDE_UNIT),
            in_units(stride_out_head, STRIDE_UNIT),
        )
        outputs = Outputs(out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse)
        store_result(outputs, acc, m_i, l_i, v_scale, rows, columns, HEAD_DIM_V)
    else:
        P: tl.constexpr = Partial(PARTIAL_ROWS, HEAD_DIM_V, BLOCK_DV, 0, 1, False, 0, False, None)
        store_partial(scratch, acc, m_i, l_i, columns, tl.program_id(0), True, BLOCK_M, P)


@triton.jit(do_not_specialize=NUMBERS)
def chosen_latents_kernel(
    q_ptr,  # [num_tokens, num_q_heads, RANK]
    q_pe_ptr,  # [num_tokens, num_q_heads, ROPE]; None without rotary columns, and where they are values too
    out_ptr,  # [num_tokens, num_q_heads, RANK]
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    sinks_ptr,  # [num_q_heads], or None
    latents,  # views.LatentTensors
    extra,  # views.LatentTensors of a second cache, or None
    kv,  # views.LatentLayout
    indices, list_lens, width, stride_list, stride_list_head, stride_lens, stride_lens_head,  # those of views.Lists
    extra_kv,  # views.LatentLayout of the second cache; None, like the next two, without one
    extra_indices, extra_lens, extra_width, extra_list, extra_lens_token,  # its lists
    scratch,  # views.Partials; None, like the next, where lists are not cut
    num_splits,
    cu_seqlens_q,  # [num_seqs + 1] int32, or None where every sequence has one query
    scale, softcap, num_seqs,
    stride_table, stride_q_token, stride_q_head, stride_pe_token, stride_pe_head, stride_out_token, stride_out_head,
    stride_lse,
    NUM_Q_HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE_SIZE: tl.constexpr, C_SLOT: tl.constexpr, ROPE_SLOT: tl.constexpr, WIDE_OFFSETS: tl.constexpr,
    SCORE_MOD: tl.constexpr, DECODE: tl.constexpr, DECODE_ROPE: tl.constexpr, PARTS: tl.constexpr,
    CODED: tl.constexpr, SCALED: tl.constexpr, POWERS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_SIZE: tl.constexpr, ARE_SLOTS: tl.constexpr, PDL: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    EXTRA_PAGE_SIZE: tl.constexpr, EXTRA_C_SLOT: tl.constexpr, EXTRA_ROPE_SLOT: tl.constexpr,  # of the second cache
    EXTRA_SIZE: tl.constexpr,  # keys that an entry of its lists names; 0 without one
):  # fmt: skip
    if PDL:  # this kernel may start before the previous one in the stream has ended
        gdc_wait()
    T: tl.constexpr = LatentTiling(
        BLOCK_N, PAGE_SIZE, RANK, ROPE, BLOCK_C, BLOCK_R, C_SLOT, ROPE_SLOT, WIDE_OFFSETS, SCORE_MOD, DECODE,
        DECODE_ROPE, False, PARTS, CODED, SCALED, POWERS, INPUT_PRECISION, False, None,
    )  # fmt: skip
    N: tl.constexpr = Naming(BLOCK_N, PAGE_SIZE, BLOCK_SIZE, ARE_SLOTS)
    token, split, kv_head, block = program_of(num_splits, 1, NUM_Q_HEADS, BLOCK_M)
    seq, end, owned = find_sequence(kv, cu_seqlens_q, token, num_seqs, CAUSAL)
    if not owned:
        return
    lists = Lists(indices, list_lens, width, stride_list, stride_list_head, stride_lens, stride_lens_head)
    count = count_of(lists, token, kv_head)
    num_tiles = tl.cdiv(count * BLOCK_SIZE, BLOCK_N)
    start, stop = part_of(
        num_tiles + tiles_of_extra(extra_lens, extra_width, extra_lens_token, token, EXTRA_SIZE, BLOCK_N),
        split,
        num_splits,
    )
    place = Place(entries_of(lists, token, kv_head), count, table_row(kv, seq, stride_table), end)
    rows = find_rows_of_token(token, kv_head, block, NUM_Q_HEADS, BLOCK_M)
    head = rows.head.to(tl.int64)
    q_ptrs, pe_ptrs, q_pe = q_ptr + rows.token * stride_q_token + head * stride_q_head, None, None
    q = load_query_parts(q_ptrs, rows.owned, T)
    if q_pe_ptr is not None:
        pe_ptrs = q_pe_ptr + rows.token * stride_pe_token + head * stride_pe_head
    if ROPE > 0:
        q_pe = load_rotary_queries(q_ptrs, pe_ptrs, rows.owned, T)
    # Numbers in e4m3 become float16 with fewer instructions than bfloat16. More rows have no registers for it.
    if SCALED and BLOCK_M < 64 and q_ptr.dtype.element_ty == tl.bfloat16:
        q = scale_to_float16(q)
    v_scale = 1.0
    if latents.scale is not None and not SCALED and POWERS == 0:
        v_scale = tl.load(latents.scale)
        scale = scale * v_scale
    scoring = Scoring(scale, LOG2E if SCORE_MOD is not None else scale * LOG2E, softcap, 0, 0)
    acc, m_i, l_i = empty_parts(BLOCK_M, T)
    first, last = tl.minimum(start, num_tiles), tl.minimum(stop, num_tiles)
    acc, m_i, l_i = attend_list(acc, m_i, l_i, q, q_pe, latents, kv, place, first, last, scoring, T, N)
    if EXTRA_SIZE > 0:
        E: tl.constexpr = LatentTiling(
            BLOCK_N, EXTRA_PAGE_SIZE, RANK, ROPE, BLOCK_C, BLOCK_R, EXTRA_C_SLOT, EXTRA_ROPE_SLOT, WIDE_OFFSETS,
            SCORE_MOD, DECODE, DECODE_ROPE, False, PARTS, CODED, SCALED, POWERS, INPUT_PRECISION, False, None,
        )  # fmt: skip
        M: tl.constexpr = Naming(BLOCK_N, EXTRA_PAGE_SIZE, EXTRA_SIZE, True)
        more = Lists(extra_indices, extra_lens, extra_width, extra_list, 0, extra_lens_token, 0)
        place = Place(entries_of(more, token, kv_head), count_of(more, token, kv_head), None, end)
        first, last = tl.maximum(start - num_tiles, 0), tl.maximum(stop - num_tiles, 0)
        acc, m_i, l_i = attend_list(acc, m_i, l_i, q, q_pe, extra, extra_kv, place, first, last, scoring, E, M)
    acc, m_i, l_i = join_parts(acc, m_i, l_i, BLOCK_M, T)
    if PDL:
        gdc_launch_dependents()
    columns = (tl.arange(0, BLOCK_C),)
    if num_splits is None:
        outputs = Outputs(out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse)
        store_result(outputs, acc, m_i, l_i, v_scale, rows, columns, RANK)
    else:
        P: tl.constexpr = Partial(PARTIAL_ROWS, RANK, BLOCK_C, 0, 1, False, 0, False, None)
        store_partial(scratch, acc, m_i, l_i, columns, tl.program_id(0), True, BLOCK_M, P)


@triton.jit(do_not_specialize=NUMBERS)
def combine_chosen_kernel(
    out_ptr, out_scale_ptr, lse_ptr, sinks_ptr,  # as of the kernels above, like what has their names
    v_scale_ptr,  # one float32 for each KV head, or None
    indices, list_lens, width, stride_list, stride_list_head, stride_lens, stride_lens_head,
    extra_lens, extra_width, extra_lens_token,
    scratch, num_splits, cu_seqlens_q, num_seqs,
    stride_scale, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, PARTIAL_ROWS: tl.constexpr,
    EXTRA_SIZE: tl.constexpr, PDL: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a row that a program combines
    AHEAD: tl.constexpr,  # partials that are loaded at once
):  # fmt: skip
    """Combine the partials of a query token's parts, a row and COLUMNS of its columns in each program."""
    if PDL:
        gdc_wait()
    GROUPS: tl.constexpr = BLOCK_DV // COLUMNS
    BLOCKS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    pid = tl.program_id(0)
    columns = pid % GROUPS * COLUMNS + tl.arange(0, COLUMNS)
    head = pid // GROUPS % (NUM_KV_HEADS * GROUP)
    token = pid // (GROUPS * NUM_KV_HEADS * GROUP)
    if not is_owned(cu_seqlens_q, token, num_seqs):
        return
    kv_head, row = head // GROUP, head % GROUP
    lists = Lists(indices, list_lens, width, stride_list, stride_list_head, stride_lens, stride_lens_head)
    num_tiles = tl.cdiv(count_of(lists, token, kv_head) * BLOCK_SIZE, BLOCK_N)
    num_tiles += tiles_of_extra(extra_lens, extra_width, extra_lens_token, token, EXTRA_SIZE, BLOCK_N)
    num_partials = tl.cdiv(num_tiles, tl.maximum(tl.cdiv(num_tiles, num_splits), 1))
    first = ((token * num_splits) * NUM_KV_HEADS + kv_head) * BLOCKS + row // BLOCK_M
    acc, m_i, l_i = tl.zeros([COLUMNS], tl.float32), float("-inf"), 0.0
    inside = (columns < HEAD_DIM_V)[None, :]
    for done in tl.range(0, num_partials, AHEAD, num_stages=1):
        i = done + tl.arange(0, AHEAD)
        present = i < num_partials
        at = (first + i * (NUM_KV_HEADS * BLOCKS)).to(tl.int64) * PARTIAL_ROWS + row % BLOCK_M
        other_m = tl.load(scratch.m_i + at, mask=present, other=float("-inf"))
        other_l = tl.load(scratch.l_i + at, mask=present, other=0.0)
        ptrs = scratch.acc + (at * HEAD_DIM_V)[:, None] + columns[None, :]
        other_acc = tl.load(ptrs, mask=present[:, None] & inside, other=0.0)
        acc, m_i, l_i = combine_at_once(acc, m_i, l_i, other_acc, other_m, other_l)
    if PDL:
        gdc_launch_dependents()
    v_scale = 1.0
    if v_scale_ptr is not None:
        v_scale = tl.load(v_scale_ptr + kv_head.to(tl.int64) * stride_scale)
    none = tl.arange(0, 1)
    rows = Rows(none + token.to(tl.int64), none + head, none, none == 0)
    outputs = Outputs(out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, stride_out_token, stride_out_head, stride_lse)
    m_i, l_i = tl.full([1], m_i, tl.float32), tl.full([1], l_i, tl.float32)
    store_result(outputs, (acc[None, :],), m_i, l_i, v_scale, rows, (columns,), HEAD_DIM_V)
