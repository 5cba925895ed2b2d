"""Normalise and rotate queries and new keys in PyTorch, and write the keys and the values."""

import torch

from quire import reference
from quire.cache import PagedKVCache
from quire.kernels.cpu.cache_ops import write_kv
from quire.norm_rope import QKNorm, Rope


@torch.no_grad()
def norm_rope_and_write(
    q: torch.Tensor,
    rotated: torch.Tensor,
    cache: PagedKVCache,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    rope: Rope | None,
    qk_norm: QKNorm | None,
) -> None:
    """Write rotated queries to `rotated`, and rotated keys and values into the cache; `attention` has checked them."""
    rotated.copy_(reference.norm_rope(q, rope, qk_norm, torch.float32, of_keys=False))
    write_kv(reference.norm_rope(k, rope, qk_norm, torch.float32, of_keys=True).to(k.dtype), v, cache, slot_mapping)
