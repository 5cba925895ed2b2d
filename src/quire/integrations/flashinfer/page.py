"""Appending to a paged cache under FlashInfer's names. Nothing is read back from a GPU."""

import torch

import quire
from quire import PagedKVCache
from quire.integrations.arguments import as_int, check_integers, check_tensor
from quire.integrations.flashinfer.arguments import read_pages
from quire.integrations.flashinfer.planned import LONGEST, check_indptr, check_room
from quire.integrations.flashinfer.signatures import Arguments
from quire.integrations.flashinfer.tables import APPEND, LENS


@LENS.accepts("kv_indptr, kv_last_page_len, page_size")
def get_seq_lens(a: Arguments) -> torch.Tensor:
    """Return how many keys each sequence has.

    Returns:
        [batch_size].
    """
    batch_size = check_indptr("kv_indptr", a.kv_indptr)
    check_integers("kv_last_page_len", a.kv_last_page_len, a.kv_indptr.device, batch_size=batch_size)
    full_pages = (a.kv_indptr.diff() - 1).clamp(min=0)
    return full_pages * as_int("page_size", a.page_size, least=1, most=LONGEST) + a.kv_last_page_len


@LENS.accepts("append_indptr, seq_lens, nnz, batch_indices=None, positions=None")
def get_batch_indices_positions(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return of each appended token the sequence and the position in it.

    Returns:
        batch_indices and positions, [nnz] int32; -1 and 0 for padding.
    """
    batch_size, device = check_indptr("append_indptr", a.append_indptr), a.append_indptr.device
    check_integers("seq_lens", a.seq_lens, None, batch_size=batch_size)
    if a.seq_lens.is_meta and device.type != "meta":
        raise quire.UnsupportedError("seq_lens must be on a GPU or the CPU, got meta; move it there")
    nnz = as_int("nnz", a.nnz, least=0)
    rooms = a.batch_indices, a.positions
    for name, room in zip(("batch_indices", "positions"), rooms, strict=True):
        if room is not None:
            check_room(name, room, device, torch.int32, nnz=nnz)
    token = torch.arange(nnz, device=device)
    starts = a.append_indptr.long().contiguous()
    if device.type == "cpu" and bool((starts.diff() < 0).any()):
        raise ValueError(f"append_indptr must not decrease, got {starts.tolist()}; build it with cumsum")
    after = torch.searchsorted(starts[1:], token, right=True)  # how many sequences end before it
    used = after < batch_size
    position = token
    if batch_size:
        sequence = after.clamp(max=batch_size - 1)
        position = a.seq_lens.to(device)[sequence] + token - starts[sequence + 1]
    found = torch.where(used, after, -1).int(), torch.where(used, position, 0).int()
    sequences, positions = (x if room is None else room.copy_(x) for x, room in zip(found, rooms, strict=True))
    return sequences, positions


@APPEND.accepts(
    "append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len, "
    "kv_layout='NHD'"
)
def append_paged_kv_cache(a: Arguments) -> None:
    """Write new keys and values into the pages of their sequences.

    A token whose sequence is -1 is padding, and is left out. One whose position has no page raises a ValueError on a
    CPU, and is left out on a GPU.
    """
    k, v = read_pages(a.paged_kv_cache, a.kv_layout)
    cache, device = PagedKVCache(k, v, a.kv_layout), k.device
    (nnz,) = check_integers("batch_indices", a.batch_indices, device, nnz=None)
    for name in ("append_key", "append_value"):
        check_tensor(name, getattr(a, name), device, nnz=nnz, num_kv_heads=None, head_dim=None)
    slots = find_slots(a, cache)
    quire.write_kv(as_float(a.append_key, cache), as_float(a.append_value, cache), cache, slots)


@APPEND.accepts(
    "append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len"
)
def append_paged_mla_kv_cache(a: Arguments) -> None:
    """Write new latents and their rotary columns into the pages of their sequences, as `append_paged_kv_cache` does."""
    device = a.batch_indices.device if isinstance(a.batch_indices, torch.Tensor) else None
    (nnz,) = check_integers("batch_indices", a.batch_indices, device, nnz=None)
    parts = []
    for name, new, pages in (("ckv", a.append_ckv, a.ckv_cache), ("kpe", a.append_kpe, a.kpe_cache)):
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
        slots = find_slots(a, parts[0][1])
        for new, cache in parts:
            quire.write_latent(new.contiguous(), None, cache, slots)


def find_slots(a: Arguments, cache: PagedKVCache) -> torch.Tensor:
    """Return the slot of each new token, [nnz] int64: -1 for padding, and on a GPU for a token without a page."""
    batch_indices, positions, kv_indices, kv_indptr = a.batch_indices, a.positions, a.kv_indices, a.kv_indptr
    device = cache.device
    (nnz,) = check_integers("batch_indices", batch_indices, device, nnz=None)
    check_integers("positions", positions, device, nnz=nnz)
    batch_size = check_indptr("kv_indptr", kv_indptr)
    check_integers("kv_indptr", kv_indptr, device, **{"batch_size + 1": None})
    check_integers("kv_last_page_len", a.kv_last_page_len, device, batch_size=batch_size)
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
