"""Write, copy and swap pages of a cache in PyTorch. What is stored is equal, bit by bit, to what the Triton kernels store."""

import torch

from quire.cache import PagedKVCache
from quire.kernels.formats import SMALLEST_PEAK, as_bytes, largest, page_tensors


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: PagedKVCache, slot_mapping: torch.Tensor) -> None:
    """Store new keys and values in their slots, quantised as the cache is; `quire.write_kv` has checked the arguments."""
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    positions = slot_mapping[kept]
    page, slot = positions // cache.page_size, positions % cache.page_size
    limit = largest(cache.dtype)
    for x, stored, scale in ((k, cache.k, cache.k_scale), (v, cache.v, cache.v_scale)):
        x = x.detach()[kept]  # a cache is no part of a graph, as it is none on a GPU
        if limit is not None:
            x = x.float()
            if cache.scale_kind == "token":
                peak = torch.where(x.isfinite(), x.abs(), 0.0).amax(-1)
                fresh = torch.where(peak > SMALLEST_PEAK, peak / limit, 1.0)
                scale[page, slot] = fresh
                x = x / fresh[..., None]
            elif scale is not None:
                x = x / scale[:, None]
            x = (x.round().nan_to_num(0.0) if cache.dtype is torch.int8 else x).clamp(-limit, limit)
        x, stored = as_bytes(x.to(cache.dtype)), as_bytes(stored)
        if cache.layout == "NHD":
            stored[page, slot] = x
        elif cache.layout == "HND":
            stored[page, :, slot] = x
        elif stored.dim() == 5:
            stored[page, :, :, slot] = x.unflatten(-1, (stored.shape[2], stored.shape[4]))
        else:
            stored[page, :, :, slot] = x


def copy_pages(src: PagedKVCache, dst: PagedKVCache, page_pairs: torch.Tensor) -> None:
    """Copy whole pages within host memory; `quire.copy_pages` has checked the arguments."""
    from_page, to_page = page_pairs[(page_pairs >= 0).all(1)].long().unbind(1)
    for source, target in zip(page_tensors(src), page_tensors(dst), strict=True):
        target[to_page] = source[from_page]


def swap_pages(src: PagedKVCache, dst: PagedKVCache, page_pairs: torch.Tensor) -> None:
    """Copy whole pages between two devices, one by one: nothing is staged, each copy reads or writes the (pinned) page itself."""
    pairs = [pair for pair in page_pairs.tolist() if min(pair) >= 0]
    for source, target in zip(page_tensors(src), page_tensors(dst), strict=True):
        for from_page, to_page in pairs:
            target[to_page].copy_(source[from_page], non_blocking=True)
