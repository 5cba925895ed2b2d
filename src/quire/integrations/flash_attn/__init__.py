"""flash-attn's three functions, with flash-attn's parameters and semantics.

Names, order and defaults are those of flash-attn 2 (github.com/Dao-AILab/flash-attention, `flash_attn_interface.py`).
The keyword `s_aux` is flash-attn 3's. Causal masks and windows are aligned to the bottom right. What is not served is
refused by name. Every check runs before anything is written. Lengths, rows and page numbers are checked on a CPU; on a
GPU they are not, since nothing is read back to the host.

Differences from flash-attn 2: a row that sees no key has lse -inf, as in flash-attn 3 (2 writes +inf). Pages may have
any size. The head dim of values may differ from that of keys. There is no backward pass. Under `torch.compile` the
functions break the graph, because they make a plan: use `quire.plan` and `quire.attention` for a full graph.
"""

from typing import Any

import torch

import quire
from quire import Batch, PagedKVCache, Plan
from quire.integrations.arguments import as_int, check_flags, check_integers, check_tensor
from quire.integrations.flash_attn.arguments import Scoring, check_dropout, read_scoring
from quire.integrations.flash_attn.kvcache import (
    append,
    as_tokens,
    check_host_values,
    check_pages,
    contiguous_last,
    find_cache,
    multiples,
    read_lengths,
    read_new_tokens,
    read_rotary,
    row_starts,
    widen,
)

MAX_SPLITS = 128  # flash-attn's limit, and Quire's

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: torch.Tensor,  # [batch, seqlen_q, num_q_heads, head_dim]
    k: torch.Tensor,  # [batch, seqlen_k, num_kv_heads, head_dim]
    v: torch.Tensor,  # [batch, seqlen_k, num_kv_heads, head_dim_v]
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Attend over a batch of equally long sequences.

    Args:
        q: [batch, seqlen_q, num_q_heads, head_dim]; a head_dim that is not a multiple of 8 is padded.
        k: [batch, seqlen_k, num_kv_heads, head_dim].
        v: [batch, seqlen_k, num_kv_heads, head_dim_v].
        dropout_p: must be 0.
        softmax_scale: positive factor on the scores; `head_dim ** -0.5` if None.
        causal: mask the keys after the query's position, bottom-right aligned.
        window_size: (left, right), visible keys before and after the query's position, as two integers or a tensor of
            two; negative for no limit.
        softcap: scores become `softcap * tanh(scores / softcap)`; 0 for none.
        alibi_slopes: [num_q_heads] float32.
        deterministic: ignored; results are always deterministic.
        return_attn_probs: also return the lse, and None in place of the probabilities.
        s_aux: [num_q_heads] attention sinks, natural-log logits.

    Returns:
        out [batch, seqlen_q, num_q_heads, head_dim_v], or (out, lse [batch, num_q_heads, seqlen_q] float32, None).

    Raises:
        UnsupportedError: dropout, slopes per sequence, a gradient, or a head dim or dtype that is not served.
        TypeError: an argument is not a tensor, a number or a bool where it must be one.
        ValueError: an argument breaks its contract, or shapes do not fit together.
    """
    check_dropout(dropout_p)
    check_flags(causal=causal, return_attn_probs=return_attn_probs)
    batch, seqlen_q, _, head_dim = check_tensor(
        "q", q, None, batch=None, seqlen_q=None, num_q_heads=None, head_dim=None
    )
    device = q.device
    _, seqlen_k, num_kv_heads, _ = check_tensor(
        "k", k, device, batch=batch, seqlen_k=None, num_kv_heads=None, head_dim=head_dim
    )
    *_, head_dim_v = check_tensor(
        "v", v, device, batch=batch, seqlen_k=seqlen_k, num_kv_heads=num_kv_heads, head_dim_v=None
    )
    scoring = read_scoring(q, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    q, k, v = widen(q), widen(k), widen(v)
    viewed = as_tokens(k, v) or as_tokens(k.contiguous(), v.contiguous())
    assert viewed is not None  # contiguous tensors can be viewed so
    pages, row_tokens = viewed
    keys = Batch(
        row_starts(pages, row_tokens, batch, device),
        torch.full((batch,), seqlen_k, dtype=torch.int32, device=device),
        None if seqlen_q == 1 else multiples(batch + 1, seqlen_q, device),
        paged=False,
    )
    plan = quire.plan(scoring.spec(q, k, v), keys, max_query_len=seqlen_q, max_seq_len=seqlen_k)
    out, lse = attend(q.flatten(0, 1), pages, plan, scoring, return_attn_probs)
    out = out.unflatten(0, (batch, seqlen_q))[..., :head_dim_v]
    return out if lse is None else (out, by_sequence(lse, batch, seqlen_q), None)


def flash_attn_varlen_func(
    q: torch.Tensor,  # [total_q, num_q_heads, head_dim]
    k: torch.Tensor,  # [total_k, num_kv_heads, head_dim], or pages with a block_table
    v: torch.Tensor,  # [total_k, num_kv_heads, head_dim_v], or pages
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Attend over sequences of different lengths, packed one after the other.

    Args:
        q: [total_q, num_q_heads, head_dim].
        k: [total_k, num_kv_heads, head_dim], or [num_blocks, block_size, num_kv_heads, head_dim] with a `block_table`.
        v: [total_k, num_kv_heads, head_dim_v], or [num_blocks, block_size, num_kv_heads, head_dim_v].
        cu_seqlens_q: [batch + 1] int32, cumulative query counts.
        cu_seqlens_k: [batch + 1] int32, cumulative key counts.
        max_seqlen_q: an upper bound of a sequence's queries.
        max_seqlen_k: an upper bound of a sequence's keys.
        dropout_p, softmax_scale, causal, window_size, softcap: as in `flash_attn_func`.
        alibi_slopes, deterministic, s_aux: as in `flash_attn_func`.
        return_attn_probs: also return the lse, and None in place of the probabilities.
        block_table: [batch, max_blocks_per_seq] int32, the pages of each sequence.

    Returns:
        out [total_q, num_q_heads, head_dim_v], or (out, lse [num_q_heads, total_q] float32, None).

    Raises:
        UnsupportedError: dropout, slopes per sequence, a gradient, or a head dim or dtype that is not served.
        TypeError: an argument is not a tensor, a number or a bool where it must be one.
        ValueError: an argument breaks its contract, or shapes do not fit together. On a CPU also if a sequence has more
            keys than its pages hold.
    """
    check_dropout(dropout_p)
    check_flags(causal=causal, return_attn_probs=return_attn_probs)
    max_seqlen_q = as_int("max_seqlen_q", max_seqlen_q, least=0)
    max_seqlen_k = as_int("max_seqlen_k", max_seqlen_k, least=0)
    total_q, _, head_dim = check_tensor("q", q, None, total_q=None, num_q_heads=None, head_dim=None)
    device = q.device
    (num_starts,) = check_integers("cu_seqlens_q", cu_seqlens_q, device, **{"batch + 1": None})
    if num_starts == 0:
        raise ValueError("cu_seqlens_q must have batch + 1 entries, got none; it begins with 0")
    check_integers("cu_seqlens_k", cu_seqlens_k, device, **{"batch + 1": num_starts})
    scoring = read_scoring(q, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    if block_table is None:
        total_k, num_kv_heads, _ = check_tensor("k", k, device, total_k=None, num_kv_heads=None, head_dim=head_dim)
        *_, head_dim_v = check_tensor("v", v, device, total_k=total_k, num_kv_heads=num_kv_heads, head_dim_v=None)
        q, k, v = widen(q), widen(k), widen(v)
        pages, batch = PagedKVCache(k, v, "THD"), Batch.varlen(cu_seqlens_q, cu_seqlens_k)
    else:
        q = contiguous_last(q)
        capacity = check_pages("k", "v", k, v, head_dim, block_table, num_starts - 1, device)
        max_seqlen_k, head_dim_v, seq_lens = min(max_seqlen_k, capacity), v.shape[-1], cu_seqlens_k.diff()
        if seq_lens.device.type == "cpu" and len(seq_lens) and (longest := int(seq_lens.max())) > capacity:
            raise ValueError(
                f"cu_seqlens_k must give a sequence at most {capacity} keys, which its pages hold, got {longest}; "
                "widen the block_table"
            )
        pages, batch = PagedKVCache(k, v), Batch(contiguous_last(block_table), seq_lens, cu_seqlens_q)
    plan = quire.plan(
        scoring.spec(q, k, v), batch, max_query_len=max_seqlen_q, max_seq_len=max_seqlen_k, num_tokens=total_q
    )
    out, lse = attend(q, pages, plan, scoring, return_attn_probs)
    out = out[..., :head_dim_v]
    return out if lse is None else (out, lse.t().contiguous(), None)


def flash_attn_with_kvcache(
    q: torch.Tensor,  # [batch, seqlen_q, num_q_heads, head_dim]
    k_cache: torch.Tensor,  # [batch_cache, seqlen_cache, num_kv_heads, head_dim], or pages with a block_table
    v_cache: torch.Tensor,  # [batch_cache, seqlen_cache, num_kv_heads, head_dim_v], or pages
    k: torch.Tensor | None = None,  # [batch, seqlen_new, num_kv_heads, head_dim]
    v: torch.Tensor | None = None,  # [batch, seqlen_new, num_kv_heads, head_dim_v]
    rotary_cos: torch.Tensor | None = None,  # [seqlen_ro, rotary_dim / 2]
    rotary_sin: torch.Tensor | None = None,  # [seqlen_ro, rotary_dim / 2]
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append new keys and values to a cache in place, then attend to it.

    Args:
        q: [batch, seqlen_q, num_q_heads, head_dim].
        k_cache: [batch_cache, seqlen_cache, num_kv_heads, head_dim], or
            [num_blocks, block_size, num_kv_heads, head_dim] with a `block_table`.
        v_cache: the same for values, of head_dim_v.
        k: new keys [batch, seqlen_new, num_kv_heads, head_dim], written from position `cache_seqlens` on.
        v: new values [batch, seqlen_new, num_kv_heads, head_dim_v].
        rotary_cos: [seqlen_ro, rotary_dim / 2], with seqlen_ro at least the length of the cache. Each new key is
            rotated by its position, and each query by its own; by `cache_seqlens` if neither causal nor windowed.
        rotary_sin: [seqlen_ro, rotary_dim / 2].
        cache_seqlens: keys in the cache before the append, left padding included: [batch] int32, or one number for all;
            the whole cache if None. A negative entry marks a padding row: nothing is written for it, its output is 0
            and its lse -inf. On a GPU keys that do not fit into the cache are left out.
        cache_batch_idx: [batch] int32, the row of the cache that each sequence has; not with a `block_table`.
        cache_leftpad: [batch] int32, where each sequence begins in its row; not with a `block_table`.
        block_table: [batch, max_blocks_per_seq] int32, the pages of each sequence.
        softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux: as in `flash_attn_func`.
        rotary_interleaved: rotate neighbours (2i, 2i + 1) instead of halves (i, i + rotary_dim / 2).
        num_splits: how many splits of the keys to attend to in parallel, from 1 to 128; 0 to have it chosen. On a CPU
            there are none.
        return_softmax_lse: also return the lse.

    Returns:
        out [batch, seqlen_q, num_q_heads, head_dim_v], or (out, lse [batch, num_q_heads, seqlen_q] float32).

    Raises:
        UnsupportedError: slopes per sequence, a gradient, a cache whose rows are not a whole number of tokens apart, or
            a head dim or dtype that is not served; nothing was written.
        TypeError: an argument is not a tensor, a number or a bool where it must be one; nothing was written.
        ValueError: an argument breaks its contract, or arguments do not fit together; nothing was written. On a CPU
            also if a length, a row or a page is out of range.
    """
    check_flags(causal=causal, rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    num_splits = as_int("num_splits", num_splits, least=0, most=MAX_SPLITS)
    batch, seqlen_q, *_ = check_tensor("q", q, None, batch=None, seqlen_q=None, num_q_heads=None, head_dim=None)
    scoring = read_scoring(q, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    cache = find_cache(q, k_cache, v_cache, cache_batch_idx, cache_leftpad, block_table)
    new = None if k is None and v is None else read_new_tokens(k, v, cache, cache_seqlens)
    rotary = None
    if rotary_cos is not None or rotary_sin is not None:
        rotary = read_rotary(rotary_cos, rotary_sin, rotary_interleaved, cache, new)
    length_new = 0 if new is None else new.length
    lens_before = read_lengths(cache_seqlens, cache, length_new)
    seq_lens = torch.where(lens_before < 0, 0, lens_before + length_new).clamp(max=cache.capacity)
    check_host_values(cache, lens_before, seq_lens, length_new, cache_batch_idx, cache_leftpad)

    first_page = cache.table
    if cache_leftpad is not None:  # sequences begin later in their rows
        first_page, seq_lens = first_page + cache_leftpad[:, None], (seq_lens - cache_leftpad).clamp(min=0)
    starts = None if seqlen_q == 1 else multiples(batch + 1, seqlen_q, q.device)
    keys = Batch(first_page, seq_lens.to(torch.int32), starts, paged=cache.pages.layout != "THD")
    spec, capacity = scoring.spec(q, k_cache, v_cache), cache.capacity
    plan = quire.plan(spec, keys, max_query_len=seqlen_q, max_seq_len=capacity)
    if num_splits and plan.kernel != "torch":
        plan = quire.plan(spec, keys, max_query_len=seqlen_q, max_seq_len=capacity, num_splits=num_splits)

    step: dict[str, Any] = {}
    if new is not None:
        q, step = append(q, new, rotary, lens_before, cache, scoring)
    out, lse = attend(contiguous_last(q).flatten(0, 1), cache.pages, plan, scoring, return_softmax_lse, **step)
    out = out.unflatten(0, (batch, seqlen_q))
    return out if lse is None else (out, by_sequence(lse, batch, seqlen_q))


def attend(
    q: torch.Tensor, pages: PagedKVCache, plan: Plan, scoring: Scoring, want_lse: bool, **new: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and, if wanted, the lse, both by token; `new` is what to rotate and to write, if any."""
    more: dict[str, Any] = {"sinks": scoring.s_aux, "alibi_slopes": scoring.alibi_slopes, **new}
    result: Any = quire.attention(q, pages, plan, **more, return_lse=want_lse)
    return (result.out, result.lse) if want_lse else (result, None)


def by_sequence(lse: torch.Tensor, batch: int, seqlen_q: int) -> torch.Tensor:
    """Return an lse [tokens, heads] as flash-attn does: [batch, heads, seqlen_q]."""
    return lse.unflatten(0, (batch, seqlen_q)).transpose(1, 2).contiguous()
