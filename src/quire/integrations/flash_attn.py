"""flash-attn's three functions, with its parameter lists and semantics, served by Quire.

Names and defaults are those of flash-attn 2 (github.com/Dao-AILab/flash-attention, `flash_attn_interface.py`); `s_aux`, from version 3, is added as a
keyword. Causal masks and windows are aligned to the bottom right. What is not served is refused by name, before anything is written. Lengths on the
device stay there.

Differences: a row that sees no key has lse -inf, as in flash-attn 3 (2 writes +inf); pages may have any size, and head dims of values may differ from
those of keys; there is no backward pass.

A contiguous cache is a page table of its own: each row is a run of tokens, one page that begins at its first token.
"""

import torch
from torch.nn.functional import pad

import quire
from quire import AttentionSpec, Batch, PagedKVCache, UnsupportedError

WIDEST = 256  # head dim


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
        q: [batch, seqlen_q, num_q_heads, head_dim]; a head_dim that is no multiple of 8 is padded.
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
        UnsupportedError: dropout, slopes per sequence, a gradient, or a head dim or dtype that is not served.
        ValueError: shapes do not fit together.
    """
    refuse_dropout(dropout_p)
    batch, seqlen_q, _, head_dim = fit("q", q, batch=None, seqlen_q=None, num_q_heads=None, head_dim=None)
    _, seqlen_k, num_kv_heads, _ = fit("k", k, batch=batch, seqlen_k=None, num_kv_heads=None, head_dim=head_dim)
    *_, head_dim_v = fit("v", v, batch=batch, seqlen_k=seqlen_k, num_kv_heads=num_kv_heads, head_dim_v=None)
    q, k, v = widen(q), widen(k), widen(v)
    spec = make_spec(q, k, v, head_dim, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    pages, apart = as_tokens(k, v) or as_tokens(k.contiguous(), v.contiguous())
    keys = Batch(
        row_starts(pages, apart, batch, q.device),
        torch.full((batch,), seqlen_k, dtype=torch.int32, device=q.device),
        None if seqlen_q == 1 else multiples(batch + 1, seqlen_q, q.device),
        paged=False,
    )
    plan = quire.plan(spec, keys, max_query_len=seqlen_q, max_seq_len=seqlen_k)
    out, lse = attend(q.flatten(0, 1), pages, plan, alibi_slopes, s_aux, return_attn_probs)
    out = out.unflatten(0, (batch, seqlen_q))[..., :head_dim_v]
    return (out, lse.unflatten(0, (batch, seqlen_q)).transpose(1, 2).contiguous(), None) if return_attn_probs else out


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
        max_seqlen_q: most queries of a sequence, or more.
        max_seqlen_k: most keys of a sequence, or more.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, s_aux: as for `flash_attn_func`.
        return_attn_probs: also return the lse, and None in the place of the probabilities.
        block_table: [batch, max_blocks_per_seq] int32, pages of each sequence.

    Returns:
        out [total_q, num_q_heads, head_dim_v], or (out, lse [num_q_heads, total_q], None).

    Raises:
        UnsupportedError: dropout, slopes per sequence, a gradient, or a head dim or dtype that is not served.
        ValueError: shapes do not fit together.
    """
    refuse_dropout(dropout_p)
    max_seqlen_q, max_seqlen_k = (
        int(max_seqlen_q),
        int(max_seqlen_k),
    )  # Transformers passes tensors of no dimension at times
    total_q, _, head_dim = fit("q", q, total_q=None, num_q_heads=None, head_dim=None)
    (starts,) = fit("cu_seqlens_q", cu_seqlens_q, starts=None)
    fit("cu_seqlens_k", cu_seqlens_k, starts=starts)
    if block_table is None:
        total_k, num_kv_heads, _ = fit("k", k, total_k=None, num_kv_heads=None, head_dim=head_dim)
        *_, head_dim_v = fit("v", v, total_k=total_k, num_kv_heads=num_kv_heads, head_dim_v=None)
        q, k, v = widen(q), widen(k), widen(v)
        pages, batch = PagedKVCache(k, v, "THD"), Batch.varlen(cu_seqlens_q, cu_seqlens_k)
    else:
        q = contiguous_last(q)
        capacity = check_pages("k", "v", k, v, head_dim, block_table, starts - 1)
        max_seqlen_k, head_dim_v = min(max_seqlen_k, capacity), v.shape[-1]
        pages, batch = PagedKVCache(k, v), Batch(contiguous_last(block_table), cu_seqlens_k.diff(), cu_seqlens_q)
    spec = make_spec(q, k, v, head_dim, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    plan = quire.plan(spec, batch, max_query_len=max_seqlen_q, max_seq_len=max_seqlen_k, num_tokens=total_q)
    out, lse = attend(q, pages, plan, alibi_slopes, s_aux, return_attn_probs)
    out = out[..., :head_dim_v]
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
        rotary_cos: [seqlen_ro, rotary_dim / 2], seqlen_ro no less than the cache is long; rotates `k` at its positions, and `q` at its own (all at
            `cache_seqlens` when neither causal nor windowed).
        rotary_sin: likewise.
        cache_seqlens: keys in the cache before the append, left padding included: [batch] int32 or a number; the whole cache when not given. A
            negative entry marks a padding row: nothing is written for it and its output is 0. What does not fit into the cache is left out.
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
        UnsupportedError: slopes per sequence, a gradient, a cache whose rows are no whole number of tokens apart, or a head dim or dtype that is not
            served; nothing was written.
        ValueError: arguments do not fit together; nothing was written.
    """
    device = q.device
    batch, seqlen_q, _, head_dim = fit("q", q, batch=None, seqlen_q=None, num_q_heads=None, head_dim=None)
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together, got only one; pass the new values too")
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise ValueError(
            "rotary_cos and rotary_sin must be given together and with k, got part of them; rotate q yourself where nothing is appended"
        )
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k, got None; it says where the new keys go")

    # Where the cache is: `table` has each sequence's pages, `slots` is the same memory as `write_kv` counts it.
    if block_table is not None:
        if cache_batch_idx is not None or cache_leftpad is not None:
            raise ValueError(
                "cache_batch_idx and cache_leftpad must be left out with a block_table, got one; put the row into the table"
            )
        capacity = check_pages("k_cache", "v_cache", k_cache, v_cache, head_dim, block_table, batch)
        pages = slots = PagedKVCache(k_cache, v_cache)
        table, page_size = contiguous_last(block_table), k_cache.shape[1]
    else:
        rows, capacity, num_kv_heads, _ = fit(
            "k_cache", k_cache, batch_cache=None, seqlen_cache=None, num_kv_heads=None, head_dim=head_dim
        )
        fit("v_cache", v_cache, batch_cache=rows, seqlen_cache=capacity, num_kv_heads=num_kv_heads, head_dim_v=None)
        for name, tensor in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
            if tensor is not None:
                fit(name, tensor, batch=batch)
        if cache_batch_idx is None and rows < batch:
            raise ValueError(
                f"k_cache must have a row for each of {batch} sequences, got {rows}; pass cache_batch_idx where sequences share rows"
            )
        viewed = as_tokens(k_cache, v_cache)
        if viewed is None:
            raise UnsupportedError(
                "k_cache and v_cache must have rows that lie the same whole number of tokens apart, got strides "
                f"{k_cache.stride()} and {v_cache.stride()}; allocate both alike, or pass pages with a block_table"
            )
        pages, apart = viewed
        slots = PagedKVCache(pages.k[:, None], pages.v[:, None])  # a token is a page
        table = row_starts(pages, apart, batch, device, cache_batch_idx)
        page_size = None

    seqlen_new = 0
    if k is not None:
        _, seqlen_new, _, _ = fit(
            "k", k, batch=batch, seqlen_new=None, num_kv_heads=pages.num_kv_heads, head_dim=head_dim
        )
        fit("v", v, batch=batch, seqlen_new=seqlen_new, num_kv_heads=pages.num_kv_heads, head_dim_v=pages.head_dim_v)
        k, v = contiguous_last(k), contiguous_last(v)
    q = contiguous_last(q)
    if isinstance(cache_seqlens, torch.Tensor):
        fit("cache_seqlens", cache_seqlens, batch=batch)
    else:
        cache_seqlens = capacity if cache_seqlens is None else int(cache_seqlens)
        if cache_seqlens + seqlen_new > capacity:
            raise ValueError(
                f"cache_seqlens must leave room for {seqlen_new} new of {capacity} tokens, got {cache_seqlens}; allocate a longer cache"
            )
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    seq_lens = cache_seqlens.clamp(0, capacity)
    if k is not None:
        seq_lens = torch.where(cache_seqlens < 0, 0, cache_seqlens + seqlen_new).clamp(max=capacity)

    first_token = table
    if cache_leftpad is not None:  # the sequence begins later in its row
        first_token, seq_lens = table + cache_leftpad[:, None], (seq_lens - cache_leftpad).clamp(min=0)
    keys = Batch(
        first_token,
        seq_lens.to(torch.int32),
        None if seqlen_q == 1 else multiples(batch + 1, seqlen_q, device),
        paged=block_table is not None,
    )
    spec = make_spec(
        q, k_cache, v_cache, head_dim, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, k, v
    )
    if not 0 <= num_splits <= 128:
        raise ValueError(f"num_splits must be from 1 to 128, or 0 to have it chosen, got {num_splits}")
    splits = None if num_splits == 0 or device.type == "cpu" else num_splits  # a hint; PyTorch does not split keys
    plan = quire.plan(spec, keys, max_query_len=seqlen_q, max_seq_len=capacity, num_splits=splits)

    if k is not None:
        positions = cache_seqlens[:, None] + torch.arange(seqlen_new, device=device)
        if rotary_cos is not None:
            check_rotary(rotary_cos, rotary_sin, capacity, head_dim)
            k = rotate(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
            # flash-attn drops sides of a window that reach past the whole cache before it asks whether there is one.
            local = causal or any(0 <= side < capacity for side in window_size)
            q_positions = cache_seqlens[:, None] + torch.arange(seqlen_q, device=device) * int(local)
            q = rotate(q, rotary_cos, rotary_sin, q_positions, rotary_interleaved)
        if page_size is None:
            slot = table + positions
        else:
            entry = (positions // page_size).clamp(0, max(table.shape[1] - 1, 0))
            slot = table.gather(1, entry).long() * page_size + positions % page_size
        slot = torch.where((cache_seqlens[:, None] >= 0) & (positions < capacity), slot, -1)
        quire.write_kv(k.flatten(0, 1), v.flatten(0, 1), slots, slot.flatten().long())
    out, lse = attend(q.flatten(0, 1), pages, plan, alibi_slopes, s_aux, return_softmax_lse)
    out = out.unflatten(0, (batch, seqlen_q))
    return (out, lse.unflatten(0, (batch, seqlen_q)).transpose(1, 2).contiguous()) if return_softmax_lse else out


def refuse_dropout(dropout_p: float) -> None:
    """Raise unless there is none."""
    if dropout_p:
        raise UnsupportedError(f"dropout_p must be 0, got {dropout_p}; Quire serves inference")


def fit(name: str, x: torch.Tensor, **dims: int | None) -> torch.Size:
    """Return the shape of `x`, or raise unless it has these dimensions; None for any size."""
    if x.dim() != len(dims) or any(want not in (None, got) for got, want in zip(x.shape, dims.values(), strict=True)):
        wanted = ", ".join(dim if size is None else f"{dim} = {size}" for dim, size in dims.items())
        raise ValueError(f"{name} must be [{wanted}], got {list(x.shape)}; see flash-attn's shapes in the docstring")
    return x.shape


def check_pages(
    k_name: str, v_name: str, k: torch.Tensor, v: torch.Tensor, head_dim: int, block_table: torch.Tensor, batch: int
) -> int:
    """Raise unless pages and table fit together; return how many keys a row of the table reaches."""
    pages, size, num_kv_heads, _ = fit(
        k_name, k, num_blocks=None, block_size=None, num_kv_heads=None, head_dim=head_dim
    )
    fit(v_name, v, num_blocks=pages, block_size=size, num_kv_heads=num_kv_heads, head_dim_v=None)
    return size * fit("block_table", block_table, batch=batch, max_blocks_per_seq=None)[1]


def check_rotary(cos: torch.Tensor, sin: torch.Tensor, capacity: int, head_dim: int) -> None:
    """Raise unless the angles reach over the cache and are no wider than a head."""
    length, half = fit("rotary_cos", cos, **{"seqlen_ro": None, "rotary_dim / 2": None})
    fit("rotary_sin", sin, **{"seqlen_ro": length, "rotary_dim / 2": half})
    if length < capacity:
        raise ValueError(
            f"rotary_cos must have an entry for each of the cache's {capacity} positions, got {length}; make the table longer"
        )
    if 2 * half > head_dim:
        raise ValueError(
            f"rotary_cos must rotate at most head_dim = {head_dim} elements, got {2 * half}; it has one column for every two of them"
        )


def make_spec(
    q, k, v, head_dim, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, *others: torch.Tensor | None
) -> AttentionSpec:
    """Translate flash-attn's arguments. `head_dim` is the one before padding, `others` are tensors that must not want a gradient either."""
    for name, tensor in (("alibi_slopes", alibi_slopes), ("s_aux", s_aux)):
        if tensor is None:
            continue
        if name == "alibi_slopes" and tensor.dim() == 2:
            raise UnsupportedError(
                f"alibi_slopes must be [num_q_heads], got {tuple(tensor.shape)}; slopes per sequence are not served"
            )
        if tensor.shape != (q.shape[-2],) or tensor.device != q.device or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous [num_q_heads] = [{q.shape[-2]}] on {q.device}, got {tuple(tensor.shape)} on {tensor.device}; "
                "slice it to this rank's heads"
            )
    for name, tensor in (("q and k", q), ("v", v)):
        if not 16 <= tensor.shape[-1] <= WIDEST or tensor.shape[-1] % 8:
            raise UnsupportedError(
                f"head dims must be multiples of 8 from 16 to {WIDEST} in pages and caches, and at most {WIDEST} elsewhere, "
                f"got {tensor.shape[-1]} in {name}; pad them"
            )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, *others)):
        raise UnsupportedError(
            "q, k and v must not require a gradient, got one that does; Quire has no backward pass: call it under torch.no_grad()"
        )
    devices = [str(x.device) for x in (q, k, v, *others) if x is not None]
    if len(set(devices)) > 1:
        raise ValueError(f"q, k and v must be on one device, got {', '.join(devices)}; move them together")
    left, right = window_size
    if causal:
        right = 0
    return AttentionSpec(
        num_q_heads=q.shape[-2], num_kv_heads=k.shape[-2], head_dim=q.shape[-1], head_dim_v=v.shape[-1], dtype=q.dtype, kv_dtype=k.dtype,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale, causal=right == 0, sliding_window=None if left < 0 else left + 1,
        sliding_window_right=right if right > 0 else None, softcap=softcap if softcap > 0 else None, alibi=alibi_slopes is not None,
        sinks=s_aux is not None,
    )  # fmt: skip


def attend(q, pages, plan, alibi_slopes, s_aux, want_lse) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and, where wanted, the lse, both by token."""
    result = quire.attention(q, pages, plan, sinks=s_aux, alibi_slopes=alibi_slopes, return_lse=want_lse)
    return (result.out, result.lse) if want_lse else (result, None)


def as_tokens(k: torch.Tensor, v: torch.Tensor) -> tuple[PagedKVCache, int] | None:
    """See [rows, length, heads, head_dim] tensors as runs of tokens, without a copy.

    Strides may be those of a slice or of a transpose from [rows, heads, length, head_dim].

    Returns:
        The cache, which is not paged, and how many tokens apart rows begin; None where that is no whole number, or not the same for both.
    """
    rows, length = k.shape[:2]
    if k.numel() == 0 or v.numel() == 0:
        return PagedKVCache(k.flatten(0, 1), v.flatten(0, 1), "THD"), length
    views, distances = [], []
    for x in (k, v):
        token = x.stride(1) if length > 1 else x.stride(0)
        apart = length if rows == 1 or length == 1 else x.stride(0) // max(token, 1)
        if rows > 1 and length > 1 and apart * token != x.stride(0):
            return None
        views.append(x.as_strided(((rows - 1) * apart + length, *x.shape[2:]), (token, *x.stride()[2:])))
        distances.append(apart)
    return (PagedKVCache(*views, "THD"), distances[0]) if distances[0] == distances[1] else None


def contiguous_last(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, copied if its last dimension is not contiguous, as flash-attn copies it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def widen(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with contiguous heads, padded with zeros to a multiple of 8 from 16 up."""
    missing = max(16, -(-x.shape[-1] // 8) * 8) - x.shape[-1]
    return pad(x, (0, missing)) if missing else contiguous_last(x)


def row_starts(
    pages: PagedKVCache, apart: int, batch: int, device: torch.device, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the token at which each sequence's row begins, [batch, 1]; row `i` for sequence `i` where `rows` are not given."""
    dtype = torch.int32 if pages.num_pages < 1 << 31 else torch.int64  # the narrower takes fewer registers
    return (multiples(batch, apart, device, dtype) if rows is None else rows.to(dtype) * apart)[:, None]


def multiples(count: int, step: int, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return [0, step, 2 · step, …], [count]."""
    if step == 0:
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.arange(0, count * step, step, dtype=dtype, device=device)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotate the first `2 * cos.shape[1]` elements of each head by its position's angles (RoPE, arXiv 2104.09864).

    Args:
        x: [batch, seqlen, heads, head_dim].
        cos: [seqlen_ro, rotary_dim / 2].
        sin: likewise.
        positions: [batch, seqlen], clamped to the table: those of padding rows are -1, and what does not fit into the cache is not written.
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
