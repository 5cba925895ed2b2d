"""Paged attention in one launch: decode, drafted tokens, prefill and chunks of prefill, mixed as they come.

The rows of a sequence are its (query token, query head of one KV head) pairs, flattened, so that all heads that share a KV head share its
loads whatever the group size. The grid is [num_q_blocks * num_kv_heads, num_splits]: one program owns BLOCK_M rows and one share of the keys
that they see. Where keys are shared out, each program leaves a partial state in scratch, and the last one of a block to finish merges them, in
split order, so that results do not depend on who that is. All lengths are read on the device.

The online softmax is that of FlashAttention-2 (arXiv 2307.08691, section 3.1), the split and merge that of Flash-Decoding.
"""

import torch
import triton
import triton.language as tl

from quire.cache import PagedKVCache
from quire.kernels import mods, views
from quire.kernels.primitives import LOG2E, dim_offsets, find_pages, find_sequence, finish, merge, softmax_step
from quire.plan import Plan


@triton.jit
def attend_tile(
    acc, m, denom, q, kv, page, tile, kv_head, q_pos, slopes, kv_start, kv_stop, exponent_scale, scale, softcap, back, ahead,
    MASKED: tl.constexpr, BAND: tl.constexpr, SCORE_MOD: tl.constexpr, DECODE: tl.constexpr, TOKEN_SCALES: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_RUN: tl.constexpr, V_RUN: tl.constexpr,
):  # fmt: skip
    """Load the tile of keys that begins at position `tile` and fold it into the state; without masks where every row sees every key."""
    kv_pos = tile + tl.arange(0, BLOCK_N)
    # Keys that no row sees may lie in pages that were freed or never written. They must not be read: 0 * NaN is NaN.
    keep = (kv_pos >= kv_start) & (kv_pos < kv_stop)
    slot = (tl.arange(0, BLOCK_N) if BLOCK_N % PAGE_SIZE == 0 else kv_pos) % PAGE_SIZE  # the former is the same in every tile
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    page = page.to(tl.int64)  # page * stride passes 2^31
    offs_k = slot * kv.k_slot + kv_head * kv.k_head + page * kv.k_page
    offs_v = offs_k
    if kv.v_page is not None:
        offs_v = slot * kv.v_slot + kv_head * kv.v_head + page * kv.v_page
    k_ptrs = kv.k + offs_k[:, None] + dim_offsets(offs_d, kv.k_run, K_RUN, BLOCK_D)[None, :]
    v_ptrs = kv.v + offs_v[:, None] + dim_offsets(offs_dv, kv.v_run, V_RUN, BLOCK_DV)[None, :]
    k = DECODE(load_tile(k_ptrs, keep, offs_d, MASKED, HEAD_DIM, BLOCK_D), q.dtype)
    v = DECODE(load_tile(v_ptrs, keep, offs_dv, MASKED, HEAD_DIM_V, BLOCK_DV), q.dtype)

    scores = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)  # [BLOCK_M, BLOCK_N]
    v_scale = None
    if TOKEN_SCALES:
        offs_scale = page * kv.scale_page + slot * kv.scale_slot + kv_head * kv.scale_head
        scores *= tl.load(kv.k_scale + offs_scale, mask=keep, other=0.0)[None, :]
        v_scale = tl.load(kv.v_scale + offs_scale, mask=keep, other=0.0)
    if SCORE_MOD is not None:
        scores = SCORE_MOD(scores * scale, q_pos, kv_pos, slopes, softcap)
    if MASKED:
        visible = keep[None, :]
        if BAND:  # rows of several query tokens, which see different keys
            visible = visible & (kv_pos[None, :] >= q_pos[:, None] - back) & (kv_pos[None, :] <= q_pos[:, None] + ahead)
        scores = tl.where(visible, scores, float("-inf"))
    return softmax_step(acc, m, denom, scores, v, v_scale, exponent_scale, INPUT_PRECISION)


@triton.jit
def load_tile(ptrs, keep, offs_d, MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    if MASKED and DIM == BLOCK:
        return tl.load(ptrs, mask=keep[:, None], other=0.0)
    if MASKED:
        return tl.load(ptrs, mask=keep[:, None] & (offs_d < DIM)[None, :], other=0.0)
    if DIM == BLOCK:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(offs_d < DIM)[None, :], other=0.0)


@triton.jit
def store_result(
    out_ptr, lse_ptr, stride_out_token, stride_out_head, stride_lse, acc, m, denom, v_scale,
    token, head, owned, offs_dv, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """Finish a state and write columns `offs_dv` of its rows; `token` is int64."""
    out, lse = finish(acc, m, denom)
    ptrs = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + offs_dv[None, :]
    tl.store(ptrs, (out * v_scale).to(out_ptr.dtype.element_ty), mask=owned[:, None] & (offs_dv < HEAD_DIM_V)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + token * stride_lse + head, lse, mask=owned)


@triton.jit(do_not_specialize=["num_seqs", "stride_table", "back", "ahead"])
def attention_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM_V]
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    kv,  # views.PagedKV
    scratch,  # views.Scratch, or None when one program sees all of a block's keys
    cu_seqlens_q,  # [num_seqs + 1] int32, or None where every sequence has one query
    sinks_ptr,  # [num_q_heads], or None
    slopes_ptr,  # [num_q_heads], or None
    scale, softcap, back, ahead, num_seqs,
    stride_table, stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_RUN: tl.constexpr, V_RUN: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SCORE_MOD: tl.constexpr, DECODE: tl.constexpr, TOKEN_SCALES: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNMASKED_LOOP: tl.constexpr, SEARCH: tl.constexpr, BAND: tl.constexpr, SPLIT_ROWS: tl.constexpr,
):  # fmt: skip
    # Which rows: a block of one sequence's (token, head) pairs.
    pid = tl.program_id(0)
    kv_head = pid % NUM_KV_HEADS
    block = pid // NUM_KV_HEADS
    first_row = 0
    seq = block
    if SEARCH and cu_seqlens_q is None:
        seq = block // tl.cdiv(GROUP, BLOCK_M)
        first_row = block % tl.cdiv(GROUP, BLOCK_M) * BLOCK_M
    elif SEARCH:
        block = tl.num_programs(0) // NUM_KV_HEADS - 1 - block  # late blocks of a causal prompt see the most keys: they start first
        seq, first_block = find_sequence(cu_seqlens_q, num_seqs, block, GROUP, BLOCK_M)
        first_row = (block - first_block) * BLOCK_M
    seq_len = tl.load(kv.seq_lens + seq)
    q_start = seq
    num_rows = GROUP
    if cu_seqlens_q is not None:
        q_start = tl.load(cu_seqlens_q + seq)
        num_rows = (tl.load(cu_seqlens_q + seq + 1) - q_start) * GROUP
        if first_row >= num_rows:
            return
    if kv.query_offsets is None:
        first_pos = seq_len - num_rows // GROUP
    else:
        first_pos = tl.load(kv.query_offsets + seq)
    rows = first_row + tl.arange(0, BLOCK_M)
    owned = rows < num_rows
    q_pos = first_pos + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    token = (q_start + rows // GROUP).to(tl.int64)

    # Which keys: the band that any of these rows sees, then this program's share of its tiles.
    low_pos = first_pos + first_row // GROUP
    high_pos = first_pos + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // GROUP
    kv_start = tl.maximum(low_pos - back, 0)
    kv_stop = tl.maximum(tl.minimum(high_pos + ahead + 1, seq_len), 0)
    start = kv_start // BLOCK_N
    stop = tl.maximum(tl.cdiv(kv_stop, BLOCK_N), start)
    active_splits = 1
    split = tl.program_id(1)
    if SPLIT_ROWS > 0:
        share = tl.maximum(tl.cdiv(stop - start, tl.num_programs(1)), 1)
        active_splits = tl.maximum(tl.cdiv(stop - start, share), 1)
        if split >= active_splits:
            return
        start += split * share
        stop = tl.minimum(start + share, stop)

    if kv.cu_pages is None:
        row = kv.page_table + seq.to(tl.int64) * stride_table
    else:
        row = kv.page_table + tl.load(kv.cu_pages + seq)

    # Tiles that every row sees whole need no masks. The rest lie on the band's two edges, and order does not matter to a softmax.
    full_start, full_stop = start, start
    if UNMASKED_LOOP:
        full_start = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(high_pos - back, 0), BLOCK_N), start), stop)
        full_stop = tl.maximum(tl.minimum(tl.maximum(tl.minimum(low_pos + ahead + 1, seq_len), 0) // BLOCK_N, stop), full_start)
    tile = full_start * BLOCK_N
    page = find_pages(row, tile, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)  # on its way while the queries are loaded

    offs_d = tl.arange(0, BLOCK_D)
    q_ptrs = q_ptr + (token * stride_q_token + head * stride_q_head)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=owned[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    denom = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # a key of score sink[h] and value 0, seen by the first split
        sink = tl.load(sinks_ptr + head, mask=owned, other=0.0).to(tl.float32) * LOG2E
        m = tl.where(split == 0, sink, m)
        denom = tl.where(split == 0, 1.0, denom)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    slopes = None
    if slopes_ptr is not None:
        slopes = tl.load(slopes_ptr + head, mask=owned, other=0.0).to(tl.float32)
    v_scale = 1.0
    if kv.k_scale is not None and not TOKEN_SCALES:
        scale = scale * tl.load(kv.k_scale + kv_head * kv.scale_head)
        v_scale = tl.load(kv.v_scale + kv_head * kv.scale_head)
    exponent_scale = LOG2E if SCORE_MOD is not None else scale * LOG2E

    if UNMASKED_LOOP:
        for i in tl.range(full_start, full_stop):
            next_page = find_pages(row, (i + 1) * BLOCK_N, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
            acc, m, denom = attend_tile(
                acc, m, denom, q, kv, page, i * BLOCK_N, kv_head, q_pos, slopes, kv_start, kv_stop, exponent_scale, scale, softcap, back, ahead,
                False, BAND, SCORE_MOD, DECODE, TOKEN_SCALES, INPUT_PRECISION,
                PAGE_SIZE, BLOCK_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_RUN, V_RUN,
            )  # fmt: skip
            page = next_page
    num_left = full_start - start
    if UNMASKED_LOOP:
        tile = tl.where(num_left > 0, start, full_stop) * BLOCK_N
        page = find_pages(row, tile, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
    for i in tl.range(1, 1 + num_left + stop - full_stop):
        next_tile = tl.where(i < num_left, start + i, full_stop + i - num_left) * BLOCK_N
        next_page = find_pages(row, next_tile, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
        acc, m, denom = attend_tile(
            acc, m, denom, q, kv, page, tile, kv_head, q_pos, slopes, kv_start, kv_stop, exponent_scale, scale, softcap, back, ahead,
            True, BAND, SCORE_MOD, DECODE, TOKEN_SCALES, INPUT_PRECISION,
            PAGE_SIZE, BLOCK_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, K_RUN, V_RUN,
        )  # fmt: skip
        tile, page = next_tile, next_page

    if active_splits == 1:
        store_result(
            out_ptr, lse_ptr, stride_out_token, stride_out_head, stride_lse, acc, m, denom, v_scale,
            token, head, owned, tl.arange(0, BLOCK_DV), HEAD_DIM_V,
        )  # fmt: skip
    if SPLIT_ROWS > 0:
        if active_splits > 1:
            slab = (pid * tl.num_programs(1)).to(tl.int64)
            if leave_partial(scratch, acc, m, denom, pid, slab + split, active_splits, HEAD_DIM_V, BLOCK_M, BLOCK_DV, SPLIT_ROWS):
                kept = first_row + tl.arange(0, SPLIT_ROWS)
                kept_token, kept_head = (q_start + kept // GROUP).to(tl.int64), kv_head * GROUP + kept % GROUP
                # Some columns at a time, so that a merge needs fewer registers than the loop above.
                COLUMNS: tl.constexpr = min(BLOCK_DV, max(32, 4096 // SPLIT_ROWS))
                for first_column in tl.static_range(0, BLOCK_DV, COLUMNS):
                    offs_dv = first_column + tl.arange(0, COLUMNS)
                    merged_acc, merged_m, merged_denom = merge_partials(scratch, slab, active_splits, offs_dv, HEAD_DIM_V, COLUMNS, SPLIT_ROWS)
                    store_result(
                        out_ptr, lse_ptr, stride_out_token, stride_out_head, stride_lse, merged_acc, merged_m, merged_denom, v_scale,
                        kept_token, kept_head, kept < num_rows, offs_dv, HEAD_DIM_V,
                    )  # fmt: skip


@triton.jit
def leave_partial(
    scratch, acc, m, denom, pid, slot, active_splits,
    HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a partial state to its slot; return whether all of the block's have now been written. The counter is left at 0."""
    offs_m, offs_dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
    rows = slot * ROWS + offs_m
    tl.store(scratch.m + rows, m, mask=offs_m < ROWS)
    tl.store(scratch.denom + rows, denom, mask=offs_m < ROWS)
    tl.store(scratch.acc + rows[:, None] * HEAD_DIM_V + offs_dv[None, :], acc, mask=(offs_m < ROWS)[:, None] & (offs_dv < HEAD_DIM_V)[None, :])
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    last = tl.atomic_add(scratch.counter + pid, 1, sem="acq_rel") == active_splits - 1
    if last:
        tl.store(scratch.counter + pid, 0)
    return last


@triton.jit
def merge_partials(scratch, slab, active_splits, offs_dv, HEAD_DIM_V: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Merge columns `offs_dv` of a block's partial states in split order, as many states at a time as fit registers."""
    WIDTH: tl.constexpr = max(1, min(8, 16384 // (ROWS * COLUMNS)))
    offs_r = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    denom = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, active_splits, WIDTH, num_stages=1):
        accs, ms, denoms = (), (), ()
        for i in tl.static_range(WIDTH):  # all loads of a round are in flight together; past L1 (.cg), since other programs wrote
            present = (first + i + tl.zeros_like(offs_r)) < active_splits
            rows = (slab + first + i) * ROWS + offs_r
            ms = ms + (tl.load(scratch.m + rows, mask=present, other=float("-inf"), cache_modifier=".cg"),)
            denoms = denoms + (tl.load(scratch.denom + rows, mask=present, other=0.0, cache_modifier=".cg"),)
            ptrs = scratch.acc + rows[:, None] * HEAD_DIM_V + offs_dv[None, :]
            accs = accs + (tl.load(ptrs, mask=present[:, None] & (offs_dv < HEAD_DIM_V)[None, :], other=0.0, cache_modifier=".cg"),)
        for i in tl.static_range(WIDTH):
            acc, m, denom = merge(acc, m, denom, accs[i], ms[i], denoms[i])
    return acc, m, denom


def launch(
    q: torch.Tensor,
    cache: PagedKVCache,
    plan: Plan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> None:
    """Launch the kernel as `plan` says; arguments were checked by `quire.attention`."""
    spec, batch, tile = plan.spec, plan.batch, plan.tile
    num_blocks = plan.num_q_blocks(q.shape[0])
    if num_blocks == 0:
        return
    k_strides, v_strides = cache.strides
    as_bytes = not plan.traits.native_fp8 and cache.dtype in mods.SOFTWARE_DECODERS
    attention_kernel[(num_blocks * spec.num_kv_heads, plan.num_splits)](
        q, out, lse, views.paged_kv(cache, batch, as_bytes), plan.scratch, batch.cu_seqlens_q, sinks, alibi_slopes,
        spec.softmax_scale, spec.softcap or 0.0, *spec.window, batch.num_seqs,
        batch.page_table.stride(0), q.stride(0), q.stride(1), out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads, GROUP=spec.group_size, HEAD_DIM=spec.head_dim, HEAD_DIM_V=spec.head_dim_v,
        BLOCK_D=tile.block_d, BLOCK_DV=tile.block_dv, K_RUN=k_strides.run_length, V_RUN=v_strides.run_length, PAGE_SIZE=cache.page_size,
        SCORE_MOD=mods.score_mod(spec), DECODE=mods.decoder(cache.dtype, plan.traits.native_fp8), TOKEN_SCALES=cache.scale_kind == "token",
        INPUT_PRECISION="tf32" if spec.allow_tf32 and plan.traits.native_tf32 else "ieee",
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, UNMASKED_LOOP=tile.unmasked_loop, SEARCH=plan.search, BAND=plan.max_query_len > 1,
        SPLIT_ROWS=plan.split_rows, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


