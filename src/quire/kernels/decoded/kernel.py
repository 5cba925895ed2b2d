"""Decode the keys and values of a batch's prompts into scratch, once for all row blocks.

Programs take turns over tiles of keys of one KV head, of all sequences. What a tile holds beyond the keys that queries
see is neither read nor written.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.codes import each_of, has_zero, scale_and_zero, times_block_scales, unit
from quire.kernels.panels import join_pairs
from quire.kernels.primitives import decode_panels, in_units, load_heads, table_row
from quire.kernels.schedule import SEQS, keys_of_band, load_sequence


class Decoding(NamedTuple):
    """Compile-time constants of tiles that are decoded, as `codes.py` and `primitives.py` name them."""

    BLOCK_N: Any  # keys of a tile
    BLOCK_M: Any  # the same: rows by which panels are chosen
    MOST: Any
    PAGE_SIZE: Any
    WIDE_OFFSETS: Any
    STRIDE_UNIT: Any
    TOKEN_SCALES: Any
    PACKED_FP8: Any
    FORMAT: Any
    IN_PTX: Any
    DECODE_SCALES: Any
    DECODE_PLACED: Any


@triton.jit(
    do_not_specialize=[
        "num_seqs", "most_seqs", "most_keys", "max_decode_queries", "window_left", "window_right", "stride_table",
    ]
)  # fmt: skip
def decode_kernel(
    cache,  # views.CacheTensors or views.BlockedCacheTensors
    k_ptr, v_ptr,  # [most_seqs * most_keys, NUM_KV_HEADS, HEAD_DIM or HEAD_DIM_V]
    starts_ptr,  # [num_seqs] int32: the first token of each sequence there
    kv,  # views.KVLayout
    cu_seqlens_q,
    num_seqs, most_seqs, most_keys, max_decode_queries, window_left, window_right, stride_table,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr, STRIDE_UNIT: tl.constexpr, TOKEN_SCALES: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr, DECODE: tl.constexpr, PACKED_FP8: tl.constexpr, FORMAT: tl.constexpr = None,
    DECODE_V: tl.constexpr = None, IN_PTX: tl.constexpr = False, DECODE_SCALES: tl.constexpr = None,
    DECODE_PLACED: tl.constexpr = None,
):  # fmt: skip
    """Decode the keys and values that queries of sequences of more than `max_decode_queries` see. Any grid serves."""
    if PDL:
        gdc_wait()  # also for what reads the scratch in a launch before this one
        gdc_launch_dependents()
    T: tl.constexpr = Decoding(
        BLOCK_N, BLOCK_N, 0, PAGE_SIZE, WIDE_OFFSETS, STRIDE_UNIT, TOKEN_SCALES, PACKED_FP8, FORMAT, IN_PTX,
        DECODE_SCALES, DECODE_PLACED,
    )  # fmt: skip
    program, step = tl.program_id(0), tl.num_programs(0)
    index = tl.arange(0, SEQS)
    turn = program  # of this program, among the tiles of these sequences
    before = num_seqs * 0  # sequences with room
    for first in tl.range(0, num_seqs, SEQS, num_stages=1):
        seqs = first + index
        s = load_sequence(kv, cu_seqlens_q, seqs, seqs < num_seqs)
        if kv.key_begin is None:
            starts, stops = keys_of_band(s, 0, s.q_len, window_left, window_right)
        else:
            starts, stops = s.seq_len * 0, s.seq_len
        ours = (s.q_len > max_decode_queries).to(tl.int32)
        places = before + tl.cumsum(ours, 0) - ours  # of a sequence's keys
        before += tl.sum(ours, 0)
        has_room = (ours > 0) & (places < most_seqs)  # which all have whose lengths are within bounds
        stops = tl.where(has_room, tl.minimum(stops, most_keys), 0)
        tiles = tl.maximum((stops + BLOCK_N - 1) // BLOCK_N - starts // BLOCK_N, 0) * NUM_KV_HEADS
        ends = tl.cumsum(tiles, 0)
        total = tl.sum(tiles, 0)
        if program == 0:
            tl.store(starts_ptr + seqs, places * most_keys, has_room)
        while turn < total:
            owner = index == tl.sum((ends <= turn).to(tl.int32), 0)
            start, stop = tl.sum(tl.where(owner, starts, 0), 0), tl.sum(tl.where(owner, stops, 0), 0)
            seq, end = tl.sum(tl.where(owner, seqs, 0), 0), tl.sum(tl.where(owner, ends, 0), 0)
            place = tl.sum(tl.where(owner, places, 0), 0).to(tl.int64)
            row = table_row(kv, seq, stride_table)
            last = (stop + BLOCK_N - 1) // BLOCK_N
            while turn < end:
                after = end - 1 - turn  # tiles of heads up to the last one of the sequence
                kv_pos = (last - 1 - after // NUM_KV_HEADS) * BLOCK_N + tl.arange(0, BLOCK_N)
                kv_head = NUM_KV_HEADS - 1 - after % NUM_KV_HEADS
                keep = (kv_pos >= start) & (kv_pos < stop)
                decode_tile(
                    cache, kv, row, kv_pos, keep, kv_head, k_ptr, v_ptr, place * most_keys, NUM_KV_HEADS,
                    HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_VEC, V_VEC, DECODE,
                    DECODE if FORMAT is None else DECODE_V, T,
                )  # fmt: skip
                turn += step
        turn -= total


@triton.jit
def decode_tile(
    cache, kv, row, kv_pos, keep, kv_head, k_ptr, v_ptr, first,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr, DECODE: tl.constexpr, DECODE_V: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Decode those keys and values of a tile that `keep` names, of one KV head.

    `row` is from `table_row`, and `first` the token of `k_ptr` and `v_ptr` at which the sequence begins.
    """
    page = tl.load(row + kv_pos // T.PAGE_SIZE, mask=keep, other=0).to(tl.int64)
    slot = kv_pos % T.PAGE_SIZE
    if T.WIDE_OFFSETS:
        slot, kv_head = slot.to(tl.int64), kv_head.to(tl.int64)
    k_ptrs = cache.k + offsets_of(page, slot, kv_head, kv.k_page, kv.k_slot, kv.k_head, T)
    if kv.v_page is None:
        v_ptrs = cache.v + offsets_of(page, slot, kv_head, kv.k_page, kv.k_slot, kv.k_head, T)
    else:
        v_ptrs = cache.v + offsets_of(page, slot, kv_head, kv.v_page, kv.v_slot, kv.v_head, T)
    EACH_K: tl.constexpr = each_of(T.FORMAT, T.PACKED_FP8, True)
    EACH_V: tl.constexpr = each_of(T.FORMAT, T.PACKED_FP8, False)
    k = load_heads(
        k_ptrs[:, None], kv.k_vec, keep, True, HEAD_DIM, EACH_K, T.BLOCK_N, T.MOST, BLOCK_D, K_VEC, T.WIDE_OFFSETS
    )
    v = load_heads(
        v_ptrs[:, None], kv.v_vec, keep, True, HEAD_DIM_V, EACH_V, T.BLOCK_N, T.MOST, BLOCK_DV, V_VEC, T.WIDE_OFFSETS
    )
    k_scale, v_scale = 1.0, 1.0
    if T.TOKEN_SCALES:
        offs_scale = slot * kv.scale_slot + kv_head * kv.scale_head + page * kv.scale_page
        k_scale = tl.load(cache.k_scale + offs_scale, mask=keep, other=0.0)
        v_scale = tl.load(cache.v_scale + offs_scale, mask=keep, other=0.0)
    k, v = decode_panels(k, tl.float32, DECODE, T), decode_panels(v, tl.float32, DECODE_V, T)
    if T.DECODE_SCALES is not None:
        offs_block = slot * kv.block_slot + kv_head * kv.block_head + page * kv.block_page
        k = times_block_scales(k, cache.k_block + offs_block, None, keep, True, HEAD_DIM, T, False)
        v = times_block_scales(v, cache.v_block + offs_block, None, keep, True, HEAD_DIM_V, T, False)
    at = (first + kv_pos) * NUM_KV_HEADS + kv_head
    store_heads(k, k_scale, k_ptr + at * HEAD_DIM, keep, HEAD_DIM, EACH_K, True, T)
    store_heads(v, v_scale, v_ptr + at * HEAD_DIM_V, keep, HEAD_DIM_V, EACH_V, False, T)


@triton.jit
def offsets_of(page, slot, kv_head, stride_page, stride_slot, stride_head, T: tl.constexpr):
    """Return the offsets of heads in a cache."""
    within = slot * in_units(stride_slot, T.STRIDE_UNIT) + kv_head * in_units(stride_head, T.STRIDE_UNIT)
    return within + page * in_units(stride_page, T.STRIDE_UNIT)


@triton.jit
def store_heads(
    numbers, scale, ptrs, keep, DIM: tl.constexpr, EACH: tl.constexpr, OF_KEYS: tl.constexpr, T: tl.constexpr
):
    """Store panels of numbers, times the scales of tokens if there are some, at `ptrs` [BLOCK_N]."""
    DTYPE: tl.constexpr = ptrs.dtype.element_ty
    panels = ()
    for i in tl.static_range(len(numbers)):
        number, UNIT = numbers[i], unit(T.FORMAT, T.IN_PTX, OF_KEYS, i)
        if not T.TOKEN_SCALES:
            number = number * UNIT
        elif has_zero(T.FORMAT, OF_KEYS):  # both products are exact, so this rounds as (number - zero) * scale does
            of_token, zero = scale_and_zero(scale)
            number = number * (of_token * UNIT)[:, None] - (of_token * zero)[:, None]
        else:
            number = number * scale[:, None]
        if T.TOKEN_SCALES and tl.float16 == DTYPE:
            number = tl.clamp(number, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        panels = panels + (number.to(DTYPE),)
    joined, columns = join_pairs(panels, DIM, EACH, T.BLOCK_N, T.MOST)
    for i in tl.static_range(len(joined)):
        tl.store(ptrs[:, None] + columns[i][None, :], joined[i], mask=keep[:, None] & (columns[i] < DIM)[None, :])
