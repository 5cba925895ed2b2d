"""Turn queries and new keys in PyTorch, and write the keys and the values."""

import torch

from quire import reference
from quire.cache import PagedKVCache
from quire.kernels.cpu.cache_ops import write_kv
from quire.turn import QKNorm, Rope


@torch.no_grad()
def turn_and_write(
    q: torch.Tensor,
    turned: torch.Tensor,
    cache: PagedKVCache,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    rope: Rope | None,
    qk_norm: QKNorm | None,
) -> None:
    """Write turned queries to `turned`, and turned keys and values into the cache; `attention` has checked them."""
    turned.copy_(reference.turn(q, rope, qk_norm, torch.float32, of_keys=False))
    write_kv(reference.turn(k, rope, qk_norm, torch.float32, of_keys=True).to(k.dtype), v, cache, slot_mapping)
