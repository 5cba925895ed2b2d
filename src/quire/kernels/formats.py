"""The range of quantised dtypes and the tensors of a page, for host code on every device. It does not import Triton."""

import torch

from quire.cache import PagedKVCache
from quire.cache_layout import Record

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
# A token with no larger magnitude gets scale 1 and is stored as zeros: its scale would not be a normal float32.
SMALLEST_PEAK = 1e-30
SMALLEST_RANGE = 1e-27  # of a head with a zero point, likewise
LARGEST_E2M1 = 6.0
SMALLEST_BLOCK_SCALE = 2.0**-9  # the least one in e4m3


def largest(dtype: torch.dtype) -> float | None:
    """Return the largest magnitude that a quantised dtype stores; None for other dtypes."""
    return LARGEST.get(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View an 8-bit tensor as uint8: neither PyTorch's indexing nor every compiler supports every 8-bit float."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def record_columns(
    record: Record, c_kv: torch.Tensor, k_pe: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the columns of new latents that records keep in e4m3, and those that they keep in bfloat16."""
    if record.rope == 0 or k_pe is not None:
        return c_kv, k_pe
    return c_kv[:, : record.coded], c_kv[:, record.coded :]  # rotary columns that are values too


def page_tensors(cache: PagedKVCache) -> list[torch.Tensor]:
    """Return the tensors that hold data of each page: keys, values, and scales per token if the cache has them.

    Latents hold both keys and values, and records also their scales.
    """
    if cache.is_latent:
        return [as_bytes(cache.k)]
    tensors = [as_bytes(cache.k), as_bytes(cache.v)]
    if cache.k_block_scale is not None and cache.v_block_scale is not None:
        tensors += [as_bytes(cache.k_block_scale), as_bytes(cache.v_block_scale)]
    elif cache.scale_kind == "token" and cache.k_scale is not None and cache.v_scale is not None:
        tensors += [cache.k_scale, cache.v_scale]
    return tensors
