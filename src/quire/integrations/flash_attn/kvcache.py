"""Caches of `flash_attn_with_kvcache`: the places and the number of their tokens, and the append of new ones.

A contiguous cache is used in place. Where a row is a whole number of pages, it is pages for the kernels, so that new
tokens are written by the launch that attends. Other rows are sequences without pages.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

import quire
from quire import PagedKVCache, UnsupportedError
from quire.integrations.arguments import as_int, check_integers, check_tensor
from quire.integrations.flash_attn.arguments import Scoring

PAGE_SIZES = 16, 256  # the least and the most tokens of a page of a contiguous cache


@dataclass(frozen=True, eq=False)
class Cache:
    """A cache as the kernels read and write it."""

    pages: PagedKVCache  # read by `attention`
    slots: PagedKVCache  # the same memory, written by `write_kv`
    table: torch.Tensor  # [batch, max_blocks_per_seq]; without pages [batch, 1], the first token of each row
    capacity: int  # tokens of a sequence
    num_blocks: int  # pages; rows if contiguous
    is_contiguous: bool

    def slot_mapping(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of `positions` [batch, n], flat: -1 for a position before 0 or past the capacity."""
        page_size = self.pages.page_size
        page = self.table.gather(1, (positions // page_size).clamp(0, self.table.shape[1] - 1).long()).long()
        slot = page + positions if self.pages.layout == "THD" else page * page_size + positions % page_size
        return torch.where((positions >= 0) & (positions < self.capacity), slot, -1).flatten()


@dataclass(frozen=True, eq=False)
class NewTokens:
    """Keys and values to append."""

    k: torch.Tensor  # [batch, length, num_kv_heads, head_dim]
    v: torch.Tensor  # [batch, length, num_kv_heads, head_dim_v]
    length: int


@dataclass(frozen=True, eq=False)
class Rotary:
    """Angles of a rotary position embedding (RoPE, arXiv 2104.09864)."""

    cos: torch.Tensor  # [seqlen_ro, rotary_dim / 2]
    sin: torch.Tensor
    interleaved: bool

    @property
    def is_served(self) -> bool:
        """Whether `attention` takes these angles."""
        served = torch.float32, torch.float16, torch.bfloat16
        return self.cos.numel() > 0 and self.sin.dtype is self.cos.dtype in served

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate the first rotary_dim elements of each head by its position's angles.

        Args:
            x: [batch, seqlen, heads, head_dim].
            positions: [batch, seqlen]; those outside the table belong to tokens that are not used, and are clamped.
        """
        half = self.cos.shape[1]
        at = positions.clamp(0, self.cos.shape[0] - 1).long()
        c, s = self.cos[at].float()[:, :, None], self.sin[at].float()[:, :, None]
        rotated, kept = x[..., : 2 * half].float(), x[..., 2 * half :]
        a, b = (rotated[..., ::2], rotated[..., 1::2]) if self.interleaved else rotated.split(half, -1)
        pair = a * c - b * s, a * s + b * c
        rotated = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat([rotated.to(x.dtype), kept], -1)


def find_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> Cache:
    """Return where the sequences of `q` have their cache."""
    device, batch, head_dim = q.device, q.shape[0], q.shape[-1]
    if block_table is not None:
        if cache_batch_idx is not None or cache_leftpad is not None:
            raise ValueError(
                "cache_batch_idx and cache_leftpad must be left out with a block_table, got one; change the table"
            )
        capacity = check_pages("k_cache", "v_cache", k_cache, v_cache, head_dim, block_table, batch, device)
        pages = PagedKVCache(k_cache, v_cache)
        return Cache(pages, pages, contiguous_last(block_table), capacity, pages.num_pages, is_contiguous=False)
    rows, capacity, num_kv_heads, _ = check_tensor(
        "k_cache", k_cache, device, batch_cache=None, seqlen_cache=None, num_kv_heads=None, head_dim=head_dim
    )
    check_tensor(
        "v_cache", v_cache, device, batch_cache=rows, seqlen_cache=capacity, num_kv_heads=num_kv_heads, head_dim_v=None
    )
    for name, tensor in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
        if tensor is not None:
            check_integers(name, tensor, device, batch=batch)
    if cache_batch_idx is None and rows < batch:
        raise ValueError(
            f"k_cache must have a row for each of {batch} sequences, got {rows}; "
            "pass cache_batch_idx if sequences share rows"
        )
    viewed = as_tokens(k_cache, v_cache)
    if viewed is None:
        raise UnsupportedError(
            "k_cache and v_cache must have rows that are the same whole number of tokens apart, got strides "
            f"{k_cache.stride()} and {v_cache.stride()}; allocate both alike, or pass pages with a block_table"
        )
    tokens, row_tokens = viewed
    page_size = page_size_of_rows(row_tokens, capacity)
    if page_size and cache_leftpad is None:
        pages = PagedKVCache(tokens.k.unflatten(0, (-1, page_size)), tokens.v.unflatten(0, (-1, page_size)))
        table = pages_of_rows(row_tokens // page_size, capacity // page_size, batch, device, cache_batch_idx)
        return Cache(pages, pages, table, capacity, rows, is_contiguous=True)
    slots = PagedKVCache(tokens.k[:, None], tokens.v[:, None])  # pages of one token
    table = row_starts(tokens, row_tokens, batch, device, cache_batch_idx)
    return Cache(tokens, slots, table, capacity, rows, is_contiguous=True)


def read_new_tokens(
    k: torch.Tensor | None, v: torch.Tensor | None, cache: Cache, cache_seqlens: int | torch.Tensor | None
) -> NewTokens:
    """Check the keys and values to append."""
    if k is None or v is None:
        raise ValueError("k and v must be given together, got only one; pass the new values too")
    if cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k, got None; it says where the new keys go")
    pages, batch = cache.pages, cache.table.shape[0]
    heads, dim, dim_v = pages.num_kv_heads, pages.head_dim, pages.head_dim_v
    _, length, _, _ = check_tensor("k", k, pages.device, batch=batch, seqlen_new=None, num_kv_heads=heads, head_dim=dim)
    check_tensor("v", v, pages.device, batch=batch, seqlen_new=length, num_kv_heads=heads, head_dim_v=dim_v)
    for name, x in (("k", k), ("v", v)):
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {x.dtype}; cast it")
    if cache.table.shape[1] == 0:
        raise ValueError("block_table must have a column to append k, got none; widen it")
    return NewTokens(contiguous_last(k), contiguous_last(v), length)


def read_rotary(
    cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool, cache: Cache, new: NewTokens | None
) -> Rotary:
    """Check the angles: they reach over the cache and are no wider than a head."""
    if cos is None or sin is None or new is None:
        raise ValueError(
            "rotary_cos and rotary_sin must be given together and with k, got only some of them; "
            "rotate q yourself if nothing is appended"
        )
    device, head_dim = cache.pages.device, cache.pages.head_dim
    length, half = check_tensor("rotary_cos", cos, device, **{"seqlen_ro": None, "rotary_dim / 2": None})
    check_tensor("rotary_sin", sin, device, **{"seqlen_ro": length, "rotary_dim / 2": half})
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating-point, got {x.dtype}; cast it")
    if length < cache.capacity:
        raise ValueError(
            f"rotary_cos must have a row for each of the cache's {cache.capacity} positions, got {length}; "
            "make the table longer"
        )
    if 2 * half > head_dim:
        raise ValueError(
            f"rotary_cos must rotate at most head_dim = {head_dim} elements, got {2 * half}; "
            "it has one column for every two of them"
        )
    return Rotary(contiguous_last(cos), contiguous_last(sin), interleaved)


def read_lengths(cache_seqlens: int | torch.Tensor | None, cache: Cache, length_new: int) -> torch.Tensor:
    """Return how many keys each sequence has before the append, [batch]; negative for a padding row."""
    batch, device = cache.table.shape[0], cache.pages.device
    if isinstance(cache_seqlens, torch.Tensor):
        check_integers("cache_seqlens", cache_seqlens, device, batch=batch)
        return cache_seqlens
    length = cache.capacity if cache_seqlens is None else as_int("cache_seqlens", cache_seqlens)
    check_room(length, length_new, cache.capacity)
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def check_host_values(
    cache: Cache,
    lens_before: torch.Tensor,
    seq_lens: torch.Tensor,
    length_new: int,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
) -> None:
    """Raise unless lengths, rows and pages are in range, if they are on the host; nothing is read from a GPU."""
    if lens_before.device.type != "cpu" or len(lens_before) == 0:
        return
    check_room(int(lens_before.max()), length_new, cache.capacity)
    if not cache.is_contiguous:
        used = torch.arange(cache.table.shape[1]) * cache.pages.page_size < seq_lens[:, None]
        check_range("block_table", cache.table[used], cache.num_blocks)
    no_padding = lens_before >= 0
    if cache_batch_idx is not None:
        check_range("cache_batch_idx", cache_batch_idx[no_padding], cache.num_blocks)
    if cache_leftpad is not None:
        check_range("cache_leftpad", cache_leftpad[no_padding], cache.capacity + 1)


def check_room(length: int, length_new: int, capacity: int) -> None:
    """Raise unless the cache has room for a sequence of `length` keys and the new ones."""
    if length + length_new > capacity:
        raise ValueError(
            f"cache_seqlens must leave room for {length_new} new of {capacity} tokens, got {length}; "
            "allocate a longer cache"
        )


def check_range(name: str, x: torch.Tensor, end: int) -> None:
    """Raise unless all values, which are on the host, are from 0 to before `end`."""
    wrong = x[(x < 0) | (x >= end)]
    if len(wrong):
        raise ValueError(f"{name} must be from 0 to {end - 1}, got {int(wrong[0])}; compare it with the cache's shape")


def check_pages(
    k_name: str,
    v_name: str,
    k: torch.Tensor,
    v: torch.Tensor,
    head_dim: int,
    block_table: torch.Tensor,
    batch: int,
    device: torch.device,
) -> int:
    """Raise unless pages and table fit together; return how many keys a row of the table reaches."""
    pages, size, num_kv_heads, _ = check_tensor(
        k_name, k, device, num_blocks=None, block_size=None, num_kv_heads=None, head_dim=head_dim
    )
    check_tensor(v_name, v, device, num_blocks=pages, block_size=size, num_kv_heads=num_kv_heads, head_dim_v=None)
    return size * check_integers("block_table", block_table, device, batch=batch, max_blocks_per_seq=None)[1]


def append(
    q: torch.Tensor, new: NewTokens, rotary: Rotary | None, lens_before: torch.Tensor, cache: Cache, scoring: Scoring
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Rotate the queries and the new tokens, and write the tokens, unless `attention` can.

    Returns:
        The queries, and what `attention` is to rotate and to write: as many tokens as queries, into pages.
    """
    first, k = lens_before[:, None], new.k
    positions = first + torch.arange(new.length, device=q.device)
    slots = cache.slot_mapping(torch.where(first < 0, -1, positions))
    fused = cache.slots is cache.pages and new.length == q.shape[1]
    step: dict[str, Any] = {}
    if rotary is not None:
        # A side of the window that reaches past the whole cache does not make it a window, as in flash-attn.
        local = scoring.causal or any(0 <= side < cache.capacity for side in (scoring.left, scoring.right))
        if fused and (local or new.length == 1) and rotary.is_served:  # a query has the position of its key
            step["rope"] = quire.Rope(rotary.cos, rotary.sin, positions.flatten(), rotary.interleaved)
        else:
            k = rotary.rotate(k, positions)
            q = rotary.rotate(q, first + torch.arange(q.shape[1], device=q.device) * int(local))
    k, v = k.flatten(0, 1), new.v.flatten(0, 1)
    if fused:
        return q, step | {"k": k, "v": v, "slot_mapping": slots}
    quire.write_kv(k, v, cache.slots, slots)
    return q, {}


def as_tokens(k: torch.Tensor, v: torch.Tensor) -> tuple[PagedKVCache, int] | None:
    """View [rows, length, heads, head_dim] tensors as one run of tokens each, without a copy.

    Strides may be those of a slice, or of a transpose from [rows, heads, length, head_dim].

    Returns:
        The cache, which is not paged, and how many tokens apart rows begin; None if that is not a whole number, or not
        the same for k and v.
    """
    rows, length = k.shape[:2]
    if k.numel() == 0 or v.numel() == 0:
        return PagedKVCache(k.flatten(0, 1), v.flatten(0, 1), "THD"), length
    views, distances = [], []
    for x in (k, v):
        token = x.stride(1) if length > 1 else x.stride(0)
        row_tokens = length if rows == 1 or length == 1 else x.stride(0) // max(token, 1)
        if rows > 1 and length > 1 and row_tokens * token != x.stride(0):
            return None
        views.append(x.as_strided(((rows - 1) * row_tokens + length, *x.shape[2:]), (token, *x.stride()[2:])))
        distances.append(row_tokens)
    if distances[0] != distances[1]:
        return None
    return PagedKVCache(views[0], views[1], "THD"), distances[0]


def contiguous_last(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, copied if its last dimension is not contiguous, as flash-attn copies it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def widen(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with contiguous heads, padded with zeros to a multiple of 8 from 16 up."""
    missing = max(16, -(-x.shape[-1] // 8) * 8) - x.shape[-1]
    return pad(x, (0, missing)) if missing else contiguous_last(x)


def row_starts(
    pages: PagedKVCache, row_tokens: int, batch: int, device: torch.device, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the first token of each sequence's row, [batch, 1]. Sequence `i` has row `i` unless `rows` are given."""
    dtype = torch.int32 if pages.num_pages < 1 << 31 else torch.int64  # int32 takes fewer registers
    return (multiples(batch, row_tokens, device, dtype) if rows is None else rows.to(dtype) * row_tokens)[:, None]


def page_size_of_rows(row_tokens: int, capacity: int) -> int:
    """Return how many tokens a page may have, if rows begin `row_tokens` apart and have `capacity`; 0 if they are odd.

    It is a power of two that divides both, up to the size from which on larger pages are no faster.
    """
    least, most = PAGE_SIZES
    size = min((row_tokens | capacity) & -(row_tokens | capacity), most)
    return size if size >= least else 0


def pages_of_rows(
    row_pages: int, num_pages: int, batch: int, device: torch.device, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the first `num_pages` pages of each sequence's row, [batch, num_pages]. Rows are `row_pages` apart."""
    if rows is None:
        return torch.arange(batch * row_pages, dtype=torch.int32, device=device).view(batch, row_pages)[:, :num_pages]
    return rows.to(torch.int32)[:, None] * row_pages + torch.arange(num_pages, dtype=torch.int32, device=device)


def multiples(count: int, step: int, device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return [0, step, 2 · step, …], [count]."""
    if step == 0:
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.arange(0, count * step, step, dtype=dtype, device=device)
