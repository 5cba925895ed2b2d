"""Decode the keys and values of a batch's prompts into scratch, once for all row blocks, and attend to them.

Programs take turns over tiles of keys of one KV head, of all sequences. What a tile holds beyond the keys that queries
see is neither read nor written.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.batch import Batch
from quire.cache import PagedKVCache, decoded_cache
from quire.dispatch.config import padded
from quire.kernels import mods, views
from quire.kernels.codes import each_of, has_zero, scale_and_zero, times_block_scales, unit
from quire.kernels.hopper.decoded import DecodedLaunch
from quire.kernels.hopper.runner import HopperRunner
from quire.kernels.launch import bind_fallback, constexprs_of
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.panels import join_pairs
from quire.kernels.portable.launch import FP8_DTYPES
from quire.kernels.primitives import decode_panels, in_units, load_heads, table_row
from quire.kernels.schedule import SEQS, keys_of_band, load_sequence
from quire.kernels.scratch import Part
from quire.kernels.tma import matrix_of_queries


class Decoding(NamedTuple):
    """Compile-time constants of tiles that are decoded, as the functions of `codes.py` and `primitives.py` name them."""

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


@triton.jit(do_not_specialize=["num_seqs", "most_keys", "max_decode_queries", "window_left", "window_right"])
def decode_kernel(
    cache,  # views.CacheTensors or views.BlockedCacheTensors
    k_ptr, v_ptr,  # [num_seqs * most_keys, NUM_KV_HEADS, HEAD_DIM or HEAD_DIM_V]
    starts_ptr,  # [num_seqs] int32: the first token of each sequence there
    kv,  # views.KVLayout
    cu_seqlens_q,
    num_seqs, most_keys, max_decode_queries, window_left, window_right, stride_table,
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
    for first in tl.range(0, num_seqs, SEQS, num_stages=1):
        seqs = first + index
        s = load_sequence(kv, cu_seqlens_q, seqs, seqs < num_seqs)
        if kv.key_begin is None:
            starts, stops = keys_of_band(s, 0, s.q_len, window_left, window_right)
        else:
            starts, stops = s.seq_len * 0, s.seq_len
        tiles = tl.maximum((stops + BLOCK_N - 1) // BLOCK_N - starts // BLOCK_N, 0) * NUM_KV_HEADS
        tiles = tl.where(s.q_len > max_decode_queries, tiles, 0)
        ends = tl.cumsum(tiles, 0)
        total = tl.sum(tiles, 0)
        if program == 0:
            tl.store(starts_ptr + seqs, seqs * most_keys, seqs < num_seqs)
        while turn < total:
            owner = index == tl.sum((ends <= turn).to(tl.int32), 0)
            start, stop = tl.sum(tl.where(owner, starts, 0), 0), tl.sum(tl.where(owner, stops, 0), 0)
            own = turn - tl.sum(tl.where(owner, ends - tiles, 0), 0)
            seq = tl.sum(tl.where(owner, seqs, 0), 0)
            kv_pos = (start // BLOCK_N + own // NUM_KV_HEADS) * BLOCK_N + tl.arange(0, BLOCK_N)
            kv_head = own % NUM_KV_HEADS
            keep = (kv_pos >= start) & (kv_pos < stop)
            row = table_row(kv, seq, stride_table)
            page = tl.load(row + kv_pos // PAGE_SIZE, mask=keep, other=0).to(tl.int64)
            slot = kv_pos % PAGE_SIZE
            if WIDE_OFFSETS:
                slot, kv_head = slot.to(tl.int64), kv_head.to(tl.int64)
            offs_scale = slot * kv.scale_slot + kv_head * kv.scale_head + page * kv.scale_page
            k_blocks, v_blocks = None, None
            if DECODE_SCALES is not None:
                offs_block = slot * kv.block_slot + kv_head * kv.block_head + page * kv.block_page
                k_blocks, v_blocks = cache.k_block + offs_block, cache.v_block + offs_block
            offs_k = offsets_of(page, slot, kv_head, kv.k_page, kv.k_slot, kv.k_head, STRIDE_UNIT)
            offs_v = offs_k
            if kv.v_page is not None:
                offs_v = offsets_of(page, slot, kv_head, kv.v_page, kv.v_slot, kv.v_head, STRIDE_UNIT)
            token = (seq.to(tl.int64) * most_keys + kv_pos) * NUM_KV_HEADS + kv_head
            decode_heads(
                cache.k + offs_k, kv.k_vec, k_ptr + token * HEAD_DIM, cache.k_scale, offs_scale, k_blocks, keep,
                HEAD_DIM, BLOCK_D, K_VEC, True, DECODE, T,
            )  # fmt: skip
            decode_heads(
                cache.v + offs_v, kv.v_vec, v_ptr + token * HEAD_DIM_V, cache.v_scale, offs_scale, v_blocks, keep,
                HEAD_DIM_V, BLOCK_DV, V_VEC, False, DECODE if FORMAT is None else DECODE_V, T,
            )  # fmt: skip
            turn += step
        turn -= total


@triton.jit
def offsets_of(page, slot, kv_head, stride_page, stride_slot, stride_head, UNIT: tl.constexpr):
    """Return the offsets of heads in a cache."""
    return slot * in_units(stride_slot, UNIT) + kv_head * in_units(stride_head, UNIT) + page * in_units(stride_page, UNIT)


@triton.jit
def decode_heads(
    stored_ptrs, stride_vec, ptrs, scale_ptr, offs_scale, blocks, keep,
    DIM: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr, OF_KEYS: tl.constexpr, DECODE: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Decode the heads of a tile that begin at `stored_ptrs`, and write them to `ptrs`, [BLOCK_N] both.

    `blocks` points to block scales, or is None.
    """
    EACH: tl.constexpr = each_of(T.FORMAT, T.PACKED_FP8, OF_KEYS)
    DTYPE: tl.constexpr = ptrs.dtype.element_ty
    stored = load_heads(
        stored_ptrs[:, None], stride_vec, keep, True, DIM, EACH, T.BLOCK_N, T.MOST, BLOCK, VEC, T.WIDE_OFFSETS
    )
    numbers = decode_panels(stored, tl.float32, DECODE, T)
    if blocks is not None:
        numbers = times_block_scales(numbers, blocks, None, keep, True, DIM, T, False)
    panels = ()
    for i in tl.static_range(len(numbers)):
        number = numbers[i] * unit(T.FORMAT, T.IN_PTX, OF_KEYS, i)
        if T.TOKEN_SCALES:
            scale = tl.load(scale_ptr + offs_scale, mask=keep, other=0.0)
            if has_zero(T.FORMAT, OF_KEYS):
                of_token, zero = scale_and_zero(scale)
                number = (number - zero[:, None]) * of_token[:, None]
            else:
                number = number * scale[:, None]
            if DTYPE == tl.float16:
                number = tl.clamp(number, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        panels = panels + (number.to(DTYPE),)
    joined, columns = join_pairs(panels, DIM, EACH, T.BLOCK_N, T.MOST)
    for i in tl.static_range(len(joined)):
        tl.store(ptrs[:, None] + columns[i][None, :], joined[i], mask=keep[:, None] & (columns[i] < DIM)[None, :])


class DecodedRunner:
    """Run a launch that decodes, and the one that attends, for one batch.

    Args:
        launch: the decision.
        batch: the sequences.
        workspace: of `launch.scratch_size()` bytes.
    """

    def __init__(self, launch: DecodedLaunch, batch: Batch, workspace: torch.Tensor) -> None:
        self.decided, self.batch, self.workspace = launch, batch, workspace
        self.decode, self.fallback = Kernel(decode_kernel), None
        spec, num_seqs, most = launch.request.spec, batch.num_seqs, launch.request.bounds.max_seq_len
        self.starts = Part(workspace, torch.int32, launch.table_at, num_seqs)
        sizes = tuple(num_seqs * most * spec.num_kv_heads * width for width in (spec.head_dim, spec.head_dim_v))
        self.k = Part(workspace, spec.dtype, launch.decoded_at, sizes[0])
        self.v = Part(workspace, spec.dtype, launch.decoded_at + 2 * sizes[0], sizes[1])
        k, v = (part.tensor().view(num_seqs * most, spec.num_kv_heads, -1) for part in (self.k, self.v))
        self.decoded = decoded_cache(k, v)
        seen = Batch(
            self.starts.tensor()[:, None], batch.seq_lens, batch.cu_seqlens_q, query_offsets=batch.query_offsets,
            paged=False, key_begin=batch.key_begin, key_end=batch.key_end,
        )  # fmt: skip
        self.attend = HopperRunner(launch.attend, seen, workspace, batch)

    def __call__(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        out_scale: torch.Tensor | None = None,
        extras: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        if q.shape[0] == 0:
            return
        if matrix_of_queries(q) is None:
            self.fallback = self.fallback or bind_fallback(self, cache, q)
            self.fallback(q, cache, out, lse, sinks, alibi_slopes, out_scale, extras=extras)
            return
        grid = self.decided.num_decoders, 1, 1
        self.decode(grid, (cache,), None, self.arguments)
        self.attend(q, self.decoded(cache), out, lse, sinks, alibi_slopes, out_scale, extras, stored=cache)

    def arguments(self, cache: PagedKVCache) -> Arguments:
        """Return the arguments of the kernel that decodes."""
        decided, batch = self.decided, self.batch
        spec, device = decided.request.spec, decided.request.device
        element, of_cache = mods.decoding(cache, device, cache.dtype in FP8_DTYPES and views.can_pack_fp8(cache))
        layout = views.kv_layout(cache, batch, element)
        meta = constexprs_of(decided) | of_cache | {
            "BLOCK_D": padded(spec.head_dim), "BLOCK_DV": padded(spec.head_dim_v),
            "K_VEC": cache.strides[0].vec_size, "V_VEC": cache.strides[1].vec_size, "PAGE_SIZE": cache.page_size,
            "WIDE_OFFSETS": cache.has_wide_offsets, "TOKEN_SCALES": cache.scale_kind == "token",
            "STRIDE_UNIT": views.stride_unit(*layout.of_elements),
        }  # fmt: skip
        fixed = (
            self.k, self.v, self.starts, layout, batch.cu_seqlens_q, batch.num_seqs,
            decided.request.bounds.max_seq_len, decided.attend.max_decode_queries, *spec.window,
            batch.page_table.stride(0),
        )  # fmt: skip
        return Arguments((views.cache_tensors(cache, element),), fixed, meta)
