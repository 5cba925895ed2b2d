"""flash-attn's three functions, with its parameter lists and semantics, served by Quire.

Names and defaults are those of flash-attn 2 (github.com/Dao-AILab/flash-attention, `flash_attn_interface.py`); `s_aux`, from version 3, is added as a
keyword. Causal masks and windows are aligned to the bottom right. What is not served is refused by name. Lengths on the device stay there.

A contiguous cache is a page table of its own: sequence `i` is one page that begins at its first token.
"""

import torch

import quire
from quire import AttentionSpec, Batch, PagedKVCache, UnsupportedError


def flash_attn_func(
    q: torch.Tensor,  # [batch, seqlen_q, num_q_heads, head_dim]
    k: torch.Tensor,  # [batch, seqlen_k, num_kv_heads, head_dim]
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
):
    """Attend over a batch of equally long sequences.

    Args:
        q: [batch, seqlen_q, num_q_heads, head_dim].
        k: [batch, seqlen_k, num_kv_heads, head_dim].
        v: [batch, seqlen_k, num_kv_heads, head_dim_v].
        dropout_p: must be 0.
        softmax_scale: `head_dim ** -0.5` when not given.
        causal: bottom-right aligned.
        window_size: (left, right) keys beside the query's own; -1 for no limit.
        softcap: 0 for none.
        alibi_slopes: [num_q_heads].
        deterministic: results always are.
        return_attn_probs: also return the lse, and None in the place of the probabilities.
        s_aux: [num_q_heads] attention sinks.

    Returns:
        out [batch, seqlen_q, num_q_heads, head_dim_v], or (out, lse [batch, num_q_heads, seqlen_q], None).

    Raises:
        UnsupportedError: dropout, or slopes per sequence.
        ValueError: shapes do not fit together.
    """
    (batch, seqlen_q, num_q_heads, _), seqlen_k = q.shape, k.shape[1]
    spec = make_spec(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, dropout_p)
    described = Batch.varlen(starts(batch, seqlen_q, q.device), starts(batch, seqlen_k, q.device))
    plan = quire.plan(spec, described, max_query_len=seqlen_q, max_seq_len=seqlen_k)
    out, lse = quire.varlen_attention(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), plan, sinks=s_aux, alibi_slopes=alibi_slopes, return_lse=True
    )  # fmt: skip
    out = out.view(batch, seqlen_q, num_q_heads, -1)
    return (out, lse.view(batch, seqlen_q, num_q_heads).transpose(1, 2).contiguous(), None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: torch.Tensor,  # [total_q, num_q_heads, head_dim]
    k: torch.Tensor,  # [total_k, num_kv_heads, head_dim], or pages with a block_table
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,  # [batch + 1] int32
    cu_seqlens_k: torch.Tensor,  # [batch + 1] int32
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,  # [batch, max_blocks_per_seq] int32
    *,
    s_aux: torch.Tensor | None = None,
):
    """Attend over sequences of different lengths, packed one after the other.

    Args:
        q: [total_q, num_q_heads, head_dim].
        k: [total_k, num_kv_heads, head_dim], or [num_blocks, block_size, num_kv_heads, head_dim] with a `block_table`.
        v: likewise.
        cu_seqlens_q: [batch + 1] int32, cumulative query counts.
        cu_seqlens_k: [batch + 1] int32, cumulative key counts.
        max_seqlen_q: most queries of a sequence.
        max_seqlen_k: most keys of a sequence.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, s_aux: as for `flash_attn_func`.
        return_attn_probs: also return the lse, and None in the place of the probabilities.
        block_table: [batch, max_blocks_per_seq] int32, pages of each sequence.

    Returns:
        out [total_q, num_q_heads, head_dim_v], or (out, lse [num_q_heads, total_q], None).

    Raises:
        UnsupportedError: dropout, or slopes per sequence.
        ValueError: shapes do not fit together.
    """
    spec = make_spec(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, dropout_p)
    bounds = {"max_query_len": max_seqlen_q, "max_seq_len": max_seqlen_k, "num_tokens": q.shape[0]}
    tables = {"sinks": s_aux, "alibi_slopes": alibi_slopes, "return_lse": True}
    if block_table is None:
        out, lse = quire.varlen_attention(q, k, v, quire.plan(spec, Batch.varlen(cu_seqlens_q, cu_seqlens_k), **bounds), **tables)
    else:
        plan = quire.plan(spec, Batch(block_table, cu_seqlens_k.diff(), cu_seqlens_q), **bounds)
        out, lse = quire.attention(q, PagedKVCache(k, v), plan, **tables)
    return (out, lse.t().contiguous(), None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: torch.Tensor,  # [batch, seqlen_q, num_q_heads, head_dim]
    k_cache: torch.Tensor,  # [batch_cache, seqlen_cache, num_kv_heads, head_dim], or pages with a block_table
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,  # [batch, seqlen_new, num_kv_heads, head_dim]
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,  # [seqlen_ro, rotary_dim / 2]
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,  # [batch] int32, before the append
    cache_batch_idx: torch.Tensor | None = None,  # [batch] int32
    cache_leftpad: torch.Tensor | None = None,  # [batch] int32
    block_table: torch.Tensor | None = None,  # [batch, max_blocks_per_seq] int32
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: torch.Tensor | None = None,
):
    """Append new keys and values to a cache in place, then attend to it.

    Args:
        q: [batch, seqlen_q, num_q_heads, head_dim].
        k_cache: [batch_cache, seqlen_cache, num_kv_heads, head_dim], or [num_blocks, block_size, num_kv_heads, head_dim] with a `block_table`.
        v_cache: likewise.
        k: new keys [batch, seqlen_new, num_kv_heads, head_dim], written from position `cache_seqlens` on.
        v: new values.
        rotary_cos: [seqlen_ro, rotary_dim / 2]; rotates `k` at its positions, and `q` at its own (all at `cache_seqlens` when neither causal nor windowed).
        rotary_sin: likewise.
        cache_seqlens: keys in the cache before the append, [batch] int32 or a number; the whole cache when not given. A negative entry marks a padding
            row: nothing is written for it and its output is 0.
        cache_batch_idx: [batch], which row of the cache each sequence has; not with a `block_table`.
        cache_leftpad: [batch] int32, where each sequence begins in its row; not with a `block_table`.
        block_table: [batch, max_blocks_per_seq] int32.
        softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux: as for `flash_attn_func`.
        rotary_interleaved: rotate neighbours (2i, 2i + 1) instead of halves (i, i + rotary_dim / 2).
        num_splits: 0 to have it chosen.
        return_softmax_lse: also return the lse.

    Returns:
        out [batch, seqlen_q, num_q_heads, head_dim_v], or (out, lse [batch, num_q_heads, seqlen_q]).

    Raises:
        UnsupportedError: slopes per sequence.
        ValueError: arguments do not fit together.
    """
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together, got only one; pass the new values too")
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise ValueError("rotary_cos and rotary_sin must be given together and with k, got part of them; rotate q yourself where nothing is appended")
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise ValueError("cache_batch_idx and cache_leftpad must be left out with a block_table, got one; put the row into the table")
    (batch, seqlen_q, num_q_heads, _), device = q.shape, q.device
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if cache_seqlens is None:
        cache_seqlens = capacity if k is None else capacity - k.shape[1]
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    spec = make_spec(q, k_cache, v_cache, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, 0.0)

    if rotary_cos is not None:
        steps = torch.arange(k.shape[1], device=device)
        k = rotate(k, rotary_cos, rotary_sin, cache_seqlens[:, None] + steps, rotary_interleaved)
        local = causal or tuple(window_size) != (-1, -1)
        q = rotate(q, rotary_cos, rotary_sin, cache_seqlens[:, None] + torch.arange(seqlen_q, device=device) * int(local), rotary_interleaved)
    seq_lens = cache_seqlens
    table = block_table
    pages = PagedKVCache(k_cache, v_cache)
    if block_table is None:
        table = (torch.arange(batch, device=device) if cache_batch_idx is None else cache_batch_idx).to(torch.int32)[:, None]
    if k is not None:
        seq_lens = torch.where(cache_seqlens < 0, 0, cache_seqlens + k.shape[1]).to(torch.int32)
        positions = cache_seqlens[:, None].long() + torch.arange(k.shape[1], device=device)
        entries = (positions // k_cache.shape[1]).clamp(0, table.shape[1] - 1)
        slots = table.gather(1, entries).long() * k_cache.shape[1] + positions % k_cache.shape[1]
        slots = torch.where((positions >= 0) & (positions < capacity) & (cache_seqlens[:, None] >= 0), slots, -1)
        quire.write_kv(k.flatten(0, 1), v.flatten(0, 1), pages, slots.flatten().contiguous())
    seq_lens = seq_lens.clamp(min=0).to(torch.int32)
    if cache_leftpad is not None:
        # Left padding moves where a sequence begins: see the cache as tokens, of which each sequence is a run.
        table = (table[:, 0] * k_cache.shape[1] + cache_leftpad).to(torch.int32)[:, None]
        pages = PagedKVCache(k_cache.flatten(0, 1), v_cache.flatten(0, 1), "THD")
        seq_lens = (seq_lens - cache_leftpad).clamp(min=0).to(torch.int32)
    plan = quire.plan(
        spec, Batch(table, seq_lens, starts(batch, seqlen_q, device)), max_query_len=seqlen_q, max_seq_len=capacity, num_splits=num_splits or None
    )
    # Rows of a padding sequence are 0, since it has no keys.
    out, lse = quire.attention(q.flatten(0, 1), pages, plan, sinks=s_aux, alibi_slopes=alibi_slopes, return_lse=True)
    out = out.view(batch, seqlen_q, num_q_heads, -1)
    return (out, lse.view(batch, seqlen_q, num_q_heads).transpose(1, 2).contiguous()) if return_softmax_lse else out


def make_spec(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, dropout_p) -> AttentionSpec:
    """Translate flash-attn's arguments."""
    if dropout_p:
        raise UnsupportedError(f"dropout_p must be 0, got {dropout_p}; Quire serves inference")
    if alibi_slopes is not None and alibi_slopes.dim() != 1:
        raise UnsupportedError(f"alibi_slopes must be [num_q_heads], got {tuple(alibi_slopes.shape)}; slopes per sequence are not served")
    left, right = window_size
    if causal:
        right = 0
    return AttentionSpec(
        num_q_heads=q.shape[-2], num_kv_heads=k.shape[-2], head_dim=q.shape[-1], head_dim_v=v.shape[-1], dtype=q.dtype, kv_dtype=k.dtype,
        softmax_scale=softmax_scale, causal=right == 0, sliding_window=None if left < 0 else left + 1,
        sliding_window_right=right if right > 0 else None, softcap=softcap or None, alibi=alibi_slopes is not None, sinks=sinks is not None,
    )  # fmt: skip


def starts(batch: int, length: int, device: torch.device) -> torch.Tensor:
    """Return cumulative lengths of equally long sequences, [batch + 1] int32."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate the first `2 * cos.shape[1]` elements of each head by its position's angles (RoPE, arXiv 2104.09864).

    Args:
        x: [batch, seqlen, heads, head_dim].
        cos: [seqlen_ro, rotary_dim / 2].
        sin: likewise.
        positions: [batch, seqlen], clamped to the table.
        interleaved: pairs are neighbours, else halves.
    """
    half = cos.shape[1]
    at = positions.clamp(0, cos.shape[0] - 1).long()
    c, s = cos[at].float()[:, :, None], sin[at].float()[:, :, None]
    turned, kept = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, -1)
    pair = a * c - b * s, a * s + b * c
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), kept], -1)


__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
