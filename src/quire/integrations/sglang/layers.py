"""The state of a layer: its spec, and its part of SGLang's pool as pages."""

from dataclasses import dataclass
from typing import Any

import torch

import quire
from quire import AttentionSpec, PagedKVCache, UnsupportedError
from quire.integrations import layer_spec
from quire.integrations.sglang.refusals import refuse_layer

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Layer:
    """A layer, kept from step to step."""

    spec: AttentionSpec
    address: int  # of the buffer that `pages` are a view of
    pages: PagedKVCache
    in_window_pool: bool


class Layers:
    """The layers of a model runner, each bound when it attends for the first time.

    Args:
        pool: SGLang's pool of keys and values, or of latents.
        page_size: tokens per page.
        dtype: of queries.
        use_mla: whether the pool holds latents.
        has_window_pool: whether the layers with sliding windows have a separate pool in it.
    """

    def __init__(self, pool: Any, page_size: int, dtype: torch.dtype, use_mla: bool, has_window_pool: bool) -> None:
        self.pool, self.page_size, self.dtype = pool, page_size, dtype
        self.use_mla, self.has_window_pool = use_mla, has_window_pool
        self.bound: dict[tuple[int, bool, Any], Layer] = {}  # by layer, whether it has sinks, and function on scores

    def bind(self, layer: Any, has_sinks: bool, score: Any = None) -> Layer:
        """Return a layer's spec and its pages, which are views of SGLang's pool."""
        k = self.pool.get_key_buffer(layer.layer_id)  # in every step: it waits for a cache that is being loaded
        bound = self.bound.get((layer.layer_id, has_sinks, score))
        if bound is not None and bound.address == k.data_ptr():
            return bound
        refuse_layer(layer)
        if k.dim() != 3 or (k.dtype is not self.dtype and k.dtype not in FP8_DTYPES):
            raise UnsupportedError(
                f"kv_cache must be [num_tokens, num_kv_heads, head_dim] in {self.dtype} or fp8, got {list(k.shape)} in "
                f"{k.dtype}; use --kv-cache-dtype auto, and no other layout of the pool"
            )
        window = layer.sliding_window_size
        spec = layer_spec(
            num_q_heads=layer.tp_q_head_num,
            num_kv_heads=1 if self.use_mla else layer.tp_k_head_num,
            head_dim=k.shape[-1] if self.use_mla else layer.qk_head_dim,
            head_dim_v=layer.v_head_dim,
            dtype=self.dtype,
            kv_dtype=k.dtype,
            softmax_scale=float(layer.scaling),
            sliding_window=None if window is None or window < 0 else window + 1,  # SGLang's leaves out the own key
            softcap=float(layer.logit_cap) or None,
            sinks=has_sinks,
            latent=self.use_mla,
            score=score,
        )
        in_window_pool = self.has_window_pool and self.pool.layers_mapping[layer.layer_id][1]
        pages = self.pages(layer, k, in_window_pool)
        bound = self.bound[layer.layer_id, has_sinks, score] = Layer(spec, k.data_ptr(), pages, in_window_pool)
        return bound

    def pages(self, layer: Any, k: torch.Tensor, in_window_pool: bool) -> PagedKVCache:
        """Return a layer's pool in pages."""
        size = self.page_size
        num_pages = k.shape[0] // size
        is_scaled = k.dtype in FP8_DTYPES and layer.k_scale is not None
        if self.use_mla:
            latents = k[: num_pages * size].view(num_pages, size, k.shape[-1])
            scale = as_scale(layer.k_scale, k.device) if is_scaled else None
            return PagedKVCache.from_latents(latents, layer.v_head_dim, scale=scale)
        v = self.pool.get_value_buffer(layer.layer_id)
        paged_k, paged_v = (x[: num_pages * size].view(num_pages, size, *x.shape[1:]) for x in (k, v))
        if not is_scaled:
            return PagedKVCache(paged_k, paged_v, "NHD")
        scales = as_scale(layer.k_scale, k.device), as_scale(layer.v_scale, k.device)
        return PagedKVCache(paged_k, paged_v, "NHD", *scales)


def write(k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor | None, layer: Layer, slots: torch.Tensor) -> None:
    """Write keys and values, or latents, to the pool; tokens without a slot are padding."""
    spec, pages, num_tokens = layer.spec, layer.pages, k.shape[0]
    slots = slots[:num_tokens]
    if not spec.latent:
        k, v = k.view(num_tokens, spec.num_kv_heads, -1), v.view(num_tokens, spec.num_kv_heads, -1)
        quire.write_kv(k, v, pages, slots)
        return
    latents = k.view(num_tokens, -1)
    k_pe = latents[:, spec.kv_lora_rank :] if k_rope is None else k_rope.view(num_tokens, -1)
    quire.write_latent(latents[:, : spec.kv_lora_rank], k_pe, pages, slots)


def as_scale(scale: Any, device: torch.device) -> torch.Tensor:
    """Return a scale per tensor as Quire takes it."""
    if not isinstance(scale, torch.Tensor):
        return torch.tensor([float(scale)], dtype=torch.float32, device=device)
    return scale.detach().to(device=device, dtype=torch.float32).reshape(1)
