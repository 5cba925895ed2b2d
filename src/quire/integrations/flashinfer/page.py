"""Appending to a paged cache under FlashInfer's names. Nothing is read back from a GPU."""

import torch

import quire
from quire import PagedKVCache
from quire.integrations.arguments import as_int, check_integers, check_no_overlap, check_tensor
from quire.integrations.flashinfer.arguments import Pages, check_layout, read_pages
from quire.integrations.flashinfer.planned import LONGEST, check_indptr


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return how many keys each sequence has.

    Args:
        kv_indptr: [batch_size + 1], where each sequence's pages begin.
        kv_last_page_len: [batch_size], keys in the last page of each sequence; 0 where it has no page.
        page_size: tokens per page.

    Returns:
        [batch_size].

    Raises:
        TypeError: an argument is of another type.
        ValueError: shapes do not fit together, or page_size is not positive.
    """
    batch_size = check_indptr("kv_indptr", kv_indptr)
    check_integers("kv_last_page_len", kv_last_page_len, kv_indptr.device, batch_size=batch_size)
    full_pages = (kv_indptr.diff() - 1).clamp(min=0)
    return full_pages * as_int("page_size", page_size, least=1, most=LONGEST) + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of each appended token the sequence and the position in it.

    Args:
        append_indptr: [batch_size + 1], where each sequence's new tokens begin.
        seq_lens: [batch_size], keys of each sequence, new ones included.
        nnz: how many tokens the results have; those past `append_indptr[-1]` are padding.
        batch_indices: [nnz] int32, where to write the sequences; allocated if None.
        positions: [nnz] int32, where to write the positions; allocated if None.

    Returns:
        batch_indices and positions, [nnz] int32; -1 and 0 for padding.

    Raises:
        TypeError: an argument is of another type.
        ValueError: shapes or devices do not fit together.
    """
    batch_size, device = check_indptr("append_indptr", append_indptr), append_indptr.device
    check_integers("seq_lens", seq_lens, None, batch_size=batch_size)
    if seq_lens.is_meta and device.type != "meta":
        raise quire.UnsupportedError("seq_lens must be on a GPU or the CPU, got meta; move it there")
    nnz = as_int("nnz", nnz, least=0)
    for name, x in (("batch_indices", batch_indices), ("positions", positions)):
        if x is not None:
            check_tensor(name, x, device, nnz=nnz)
            if x.dtype is not torch.int32:
                raise TypeError(f"{name} must be int32, got {x.dtype}; leave it out to have it allocated")
            check_no_overlap(name, x)
    token = torch.arange(nnz, device=device)
    starts = append_indptr.long().contiguous()
    if device.type == "cpu" and bool((starts.diff() < 0).any()):
        raise ValueError(f"append_indptr must not decrease, got {starts.tolist()}; build it with cumsum")
    after = torch.searchsorted(starts[1:], token, right=True)  # how many sequences end before it
    used = after < batch_size
    position = token
    if batch_size:
        sequence = after.clamp(max=batch_size - 1)
        position = seq_lens.to(device)[sequence] + token - starts[sequence + 1]
    found = torch.where(used, after, -1).int(), torch.where(used, position, 0).int()
    if batch_indices is not None:
        batch_indices.copy_(found[0])
    if positions is not None:
        positions.copy_(found[1])
    return found[0] if batch_indices is None else batch_indices, found[1] if positions is None else positions


def append_paged_kv_cache(
    append_key: torch.Tensor,  # [nnz, num_kv_heads, head_dim]
    append_value: torch.Tensor,  # [nnz, num_kv_heads, head_dim]
    batch_indices: torch.Tensor,  # [nnz]
    positions: torch.Tensor,  # [nnz]
    paged_kv_cache: Pages,
    kv_indices: torch.Tensor,  # [kv_indptr[-1]]
    kv_indptr: torch.Tensor,  # [batch_size + 1]
    kv_last_page_len: torch.Tensor,  # [batch_size]
    kv_layout: str = "NHD",
) -> None:
    """Write new keys and values into the pages of their sequences.

    A token whose sequence is -1 is padding, and is left out. On a GPU so is one whose position has no page.

    Args:
        append_key: new keys, [nnz, num_kv_heads, head_dim], of the cache's dtype; floats are rounded to an fp8 cache.
        append_value: new values, likewise.
        batch_indices: [nnz], the sequence of each, from `get_batch_indices_positions`.
        positions: [nnz], the position of each in its sequence.
        paged_kv_cache: a tensor [num_pages, 2, page_size, num_kv_heads, head_dim] or a pair (k, v), changed in place.
        kv_indices: [kv_indptr[-1]], pages in order, new tokens included.
        kv_indptr: [batch_size + 1], where each sequence's pages begin.
        kv_last_page_len: [batch_size], keys in the last page of each sequence; positions say the same.
        kv_layout: "NHD" or "HND".

    Raises:
        UnsupportedError: a dtype or a gradient that is not served; nothing was written.
        TypeError: an argument is of another type; nothing was written.
        ValueError: shapes, dtypes or devices do not fit together; nothing was written. On a CPU also if a token has no
            page.
    """
    k, v = read_pages(paged_kv_cache, check_layout(kv_layout))
    cache, device = PagedKVCache(k, v, kv_layout), k.device
    (nnz,) = check_integers("batch_indices", batch_indices, device, nnz=None)
    check_tensor("append_key", append_key, device, nnz=nnz, num_kv_heads=None, head_dim=None)
    check_tensor("append_value", append_value, device, nnz=nnz, num_kv_heads=None, head_dim=None)
    slots = find_slots(cache, batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    quire.write_kv(as_float(append_key, cache), as_float(append_value, cache), cache, slots)


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,  # [nnz, head_dim_ckv]
    append_kpe: torch.Tensor,  # [nnz, head_dim_kpe]
    batch_indices: torch.Tensor,  # [nnz]
    positions: torch.Tensor,  # [nnz]
    ckv_cache: torch.Tensor | None,
    kpe_cache: torch.Tensor | None,
    kv_indices: torch.Tensor,  # [kv_indptr[-1]]
    kv_indptr: torch.Tensor,  # [batch_size + 1]
    kv_last_page_len: torch.Tensor,  # [batch_size]
) -> None:
    """Write new latents and their rotary columns into the pages of their sequences.

    Args:
        append_ckv: new latents, [nnz, head_dim_ckv], of the cache's dtype; floats are rounded to an fp8 cache.
        append_kpe: their rotary columns, rotated, [nnz, head_dim_kpe].
        batch_indices: [nnz], the sequence of each, as in `append_paged_kv_cache`.
        positions: [nnz], the position of each in its sequence.
        ckv_cache: [num_pages, page_size, head_dim_ckv], changed in place; None to leave latents out.
        kpe_cache: [num_pages, page_size, head_dim_kpe], changed in place; None to leave rotary columns out.
        kv_indices: [kv_indptr[-1]], pages in order, new tokens included.
        kv_indptr: [batch_size + 1], where each sequence's pages begin.
        kv_last_page_len: [batch_size], keys in the last page of each sequence; positions say the same.

    Raises:
        UnsupportedError: a dtype or a gradient that is not served.
        TypeError: an argument is of another type; nothing was written.
        ValueError: shapes, dtypes or devices do not fit together; nothing was written. On a CPU also if a token has no
            page.
    """
    device = batch_indices.device if isinstance(batch_indices, torch.Tensor) else None
    (nnz,) = check_integers("batch_indices", batch_indices, device, nnz=None)
    parts = []
    for name, new, pages in (("ckv", append_ckv, ckv_cache), ("kpe", append_kpe, kpe_cache)):
        if pages is None:
            continue
        *_, width = check_tensor(f"{name}_cache", pages, device, num_pages=None, page_size=None, head_dim=None)
        check_tensor(f"append_{name}", new, device, nnz=nnz, **{f"head_dim_{name}": width})
        if pages.dtype is torch.uint8:
            raise quire.UnsupportedError(
                f"{name}_cache must be of the latents' dtype, got {pages.dtype}; quire.write_latent writes records"
            )
        cache = PagedKVCache.from_latents(pages, width)
        if parts and (cache.num_pages, cache.page_size) != (parts[0][1].num_pages, parts[0][1].page_size):
            raise ValueError(
                f"kpe_cache must have ckv_cache's pages, [{parts[0][1].num_pages}, {parts[0][1].page_size}], got "
                f"{list(pages.shape)}; a token has one slot in both"
            )
        if not new.is_floating_point() or (new.dtype.itemsize == 1 and new.dtype is not cache.dtype):
            raise TypeError(f"append_{name} must be of the cache's dtype {cache.dtype}, got {new.dtype}; convert it")
        parts.append((as_float(new, cache), cache))
    if parts:
        slots = find_slots(parts[0][1], batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
        for new, cache in parts:
            quire.write_latent(new.contiguous(), None, cache, slots)


def find_slots(
    cache: PagedKVCache,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> torch.Tensor:
    """Return the slot of each new token, [nnz] int64: -1 for padding, and on a GPU for a token without a page."""
    device = cache.device
    (nnz,) = check_integers("batch_indices", batch_indices, device, nnz=None)
    check_integers("positions", positions, device, nnz=nnz)
    batch_size = check_indptr("kv_indptr", kv_indptr)
    check_integers("kv_indptr", kv_indptr, device, **{"batch_size + 1": None})
    check_integers("kv_last_page_len", kv_last_page_len, device, batch_size=batch_size)
    (num_indices,) = check_integers("kv_indices", kv_indices, device, **{"kv_indptr[-1]": None})
    sequence, position = batch_indices.long(), positions.long()
    padding = sequence < 0
    if batch_size and num_indices:
        held = (sequence < batch_size) & (position >= 0)
        sequence = sequence.clamp(0, batch_size - 1)
        entry = kv_indptr[sequence].long() + position // cache.page_size
        held &= entry < kv_indptr[sequence + 1]
        held &= entry < num_indices
        page = kv_indices[entry.clamp(0, num_indices - 1)].long()
        held &= (page >= 0) & (page < cache.num_pages)
        slots = torch.where(held & ~padding, page * cache.page_size + position % cache.page_size, -1)
    else:
        held, slots = torch.zeros_like(padding), torch.full_like(sequence, -1)
    if device.type == "cpu" and not bool((held | padding).all()):
        token = int((~(held | padding)).nonzero()[0])
        raise ValueError(
            f"positions must have pages in kv_indices, got {int(positions[token])} of sequence "
            f"{int(batch_indices[token])} for token {token}; allocate its page first"
        )
    return slots


def as_float(x: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
    """Return numbers that `write_kv` takes: those of an fp8 cache's own dtype as float16, which holds them exactly."""
    return x.half() if x.dtype is cache.dtype and x.dtype.itemsize == 1 else x
