"""Write, copy and swap pages of a cache in PyTorch, to the same bits as the Triton kernels."""

import torch

from quire.cache import PagedKVCache
from quire.kernels.cpu.formats import encode
from quire.kernels.formats import SMALLEST_PEAK, as_bytes, largest, page_tensors, record_columns


@torch.no_grad()
def write_kv(k: torch.Tensor, v: torch.Tensor, cache: PagedKVCache, slot_mapping: torch.Tensor) -> None:
    """Store new keys and values in their slots; `quire.write_kv` has checked shapes, dtypes and devices.

    Raises:
        ValueError: a slot is outside the pool; nothing was written.
    """
    kept, page, slot = find_slots(cache, slot_mapping)
    if cache.kv_format is not None:
        write_format(k[kept].float(), v[kept].float(), cache, page, slot)
        return
    limit = largest(cache.dtype)
    for x, stored, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        x = x[kept]
        if limit is not None:
            x = x.float()
            if scale is not None and cache.scale_kind == "token":
                peak = torch.where(x.isfinite(), x.abs(), 0.0).amax(-1)
                fresh = torch.where(peak > SMALLEST_PEAK, peak / limit, 1.0)
                scale[page, slot] = fresh
                x = x / fresh[..., None]
            elif scale is not None:
                x = x / scale[:, None]
        x, stored = as_bytes(saturated(x, cache.dtype)), as_bytes(stored)
        if cache.layout == "NHD":
            stored[page, slot] = x
        elif cache.layout == "HND":
            stored[page, :, slot] = x
        elif stored.dim() == 5:
            stored[page, :, :, slot] = x.unflatten(-1, (stored.shape[2], stored.shape[4]))
        else:
            stored[page, :, :, slot] = x


def write_format(k: torch.Tensor, v: torch.Tensor, cache: PagedKVCache, page: torch.Tensor, slot: torch.Tensor) -> None:
    """Store new keys and values in the slots of a cache with a `kv_format`."""
    index = (page, slot) if cache.layout == "NHD" else (page, slice(None), slot)
    for x, codes, stored, scale, blocks in (
        (k, cache.form.k, cache.k, cache.k_scale, cache.k_block_scale),
        (v, cache.form.v, cache.v, cache.v_scale, cache.v_block_scale),
    ):
        assert scale is not None
        stored[index], fresh, of_blocks = encode(x, codes, scale)
        if fresh is not None:
            scale[page, slot] = fresh
        if blocks is not None and of_blocks is not None:
            as_bytes(blocks)[page, slot] = as_bytes(of_blocks)


@torch.no_grad()
def write_latent(
    c_kv: torch.Tensor, k_pe: torch.Tensor | None, cache: PagedKVCache, slot_mapping: torch.Tensor
) -> None:
    """Store new latents in their slots; `quire.write_latent` has checked the arguments.

    Raises:
        ValueError: a slot is outside the pool; nothing was written.
    """
    kept, page, slot = find_slots(cache, slot_mapping)
    c_kv = c_kv[kept]
    if cache.scale_kind == "record":
        values, scales, rope = cache.records
        coded, k_pe = record_columns(cache.record, c_kv, None if k_pe is None else k_pe[kept])
        groups = coded.float().unflatten(-1, (scales.shape[-1], -1))
        peaks = torch.where(groups.isfinite(), groups.abs(), 0.0).amax(-1)
        bits = record_scale(peaks, cache.record.smallest_scale)
        scale = bits.view(torch.float32)
        as_bytes(values)[page, slot] = as_bytes(saturated(groups / scale[..., None], cache.dtype).flatten(-2))
        scales[page, slot] = scale if scales.dtype is torch.float32 else (bits >> 23).to(torch.uint8)
        if rope is not None and k_pe is not None:
            rope[page, slot] = k_pe.to(rope.dtype)
        return
    x = c_kv if k_pe is None else torch.cat([c_kv, k_pe[kept]], -1)
    if cache.k_scale is not None:
        x = x.float() / cache.k_scale
    as_bytes(cache.latents)[page, slot] = as_bytes(saturated(x, cache.dtype))


def record_scale(peaks: torch.Tensor, smallest: float) -> torch.Tensor:
    """Return the least powers of two of which 448 = 1.75 * 2^8 are at least these float32 magnitudes, as in kernels.

    They are returned as the bits of float32.
    """
    bits = (peaks / 256).clamp(min=smallest).view(torch.int32)
    return (bits + 0x1FFFFF) & 0x7F800000


def find_slots(cache: PagedKVCache, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which tokens are written, and the page and the slot of each.

    Raises:
        ValueError: a slot is outside the pool.
    """
    num_slots = cache.num_pages * cache.page_size
    if slot_mapping.numel() and int(slot_mapping.max()) >= num_slots:
        token = int(slot_mapping.argmax())
        raise ValueError(
            f"slot_mapping must hold slots below num_pages * page_size = {num_slots}, got {int(slot_mapping[token])} "
            f"for token {token}; allocate its page first"
        )
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    positions = slot_mapping[kept]
    return kept, positions // cache.page_size, positions % cache.page_size


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in the dtype of a cache: if it is quantised, rounded half to even and saturated."""
    limit = largest(dtype)
    if limit is not None:
        x = x.float()
        x = (x.round().nan_to_num(0.0) if dtype is torch.int8 else x).clamp(-limit, limit)
    return x.to(dtype)


def store_out(out: torch.Tensor, rows: torch.Tensor | slice, x: torch.Tensor, out_scale: torch.Tensor | None) -> None:
    """Store results in some rows of an output; with `out_scale`, as e4m3, with the bits that kernels store."""
    if out_scale is not None:
        x = x.float() / out_scale.view(())
    as_bytes(out)[rows] = as_bytes(saturated(x, out.dtype))


@torch.no_grad()
def copy_pages(src: PagedKVCache, dst: PagedKVCache, page_pairs: torch.Tensor) -> None:
    """Copy pages within host memory; `quire.copy_pages` has checked shapes, dtypes and devices.

    Raises:
        ValueError: a page is outside its pool, or is written twice; nothing was written.
    """
    from_page, to_page = check_pairs(src, dst, page_pairs).unbind(1)
    for source, target in zip(page_tensors(src), page_tensors(dst), strict=True):
        target[to_page] = source[from_page]


@torch.no_grad()
def swap_pages(src: PagedKVCache, dst: PagedKVCache, page_pairs: torch.Tensor) -> None:
    """Copy pages between two devices; `quire.copy_pages` has checked shapes, dtypes and devices.

    Each page is copied by one call, from or to the (pinned) page itself, so that nothing is staged.

    Raises:
        ValueError: a page is outside its pool, or is written twice; nothing was written.
    """
    pairs = check_pairs(src, dst, page_pairs.cpu()).tolist()
    for source, target in zip(page_tensors(src), page_tensors(dst), strict=True):
        for from_page, to_page in pairs:
            target[to_page].copy_(source[from_page], non_blocking=True)


def check_pairs(src: PagedKVCache, dst: PagedKVCache, page_pairs: torch.Tensor) -> torch.Tensor:
    """Return the pairs without a negative page, [num_pairs, 2] int64, or raise where one cannot be copied."""
    pairs = page_pairs[(page_pairs >= 0).all(1)].long()
    for name, column, cache in (("source", pairs[:, 0], src), ("destination", pairs[:, 1], dst)):
        if column.numel() and int(column.max()) >= cache.num_pages:
            raise ValueError(
                f"page_pairs must hold {name} pages below {cache.num_pages}, got {int(column.max())}; "
                "allocate the page first"
            )
    written, times = pairs[:, 1].unique(return_counts=True)
    if bool((times > 1).any()):
        raise ValueError(
            f"page_pairs must write each page once, got page {int(written[times > 1][0])} {int(times.max())} times; "
            "pass one pair for each destination"
        )
    if src.k.data_ptr() == dst.k.data_ptr():
        both = written[torch.isin(written, pairs[:, 0])]
        if both.numel():
            raise ValueError(
                f"page_pairs must not read and write a page, got page {int(both[0])} as both; copy in two calls"
            )
    return pairs
