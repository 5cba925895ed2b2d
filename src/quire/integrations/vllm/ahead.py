"""A layer's warm-up, begun when vLLM makes the layer.

Its kernels are then compiled while vLLM loads weights, compiles the rest of the model and measures memory. When graphs
are captured, `Planner.compile_ahead` finds them in Triton's cache. The layout of the cache is only expected here. Where
vLLM chooses another one, the kernels for that are compiled later.
"""

from typing import Any

import torch

import quire
from quire import PagedKVCache
from quire.integrations.engine import LARGE
from quire.integrations.vllm import contract
from quire.integrations.vllm.plans import SHARES, bounds_of, warms_up
from quire.integrations.vllm.spans import has_spans


def begin(impl: Any, quantised: bool) -> None:
    """Begin the warm-up of a layer, unless one like it has begun or none will follow.

    None is begun for an encoder, for a layer that shares another's keys, for scales of each token or block, and where
    ranks share contexts.

    Args:
        impl: the layer's attention.
        quantised: whether its cache is.
    """
    config = contract.current_config()
    if config is None or not torch.cuda.is_available() or not captures_steps(config) or not warms_up(config):
        return
    per_token = contract.TOKEN_SCALES.keys() | contract.FORMATS.keys()
    is_decoder = impl.spec.causal and getattr(impl, SHARES) is None and impl.kv_cache_dtype not in per_token
    page_size = config.cache_config.block_size
    if not is_decoder or not page_size or config.parallel_config.decode_context_parallel_size > 1:
        return
    pages = expected_pages(impl, page_size, quantised)
    device = torch.device("cuda", torch.cuda.current_device())
    quire.begin_warmup(impl.spec, pages, device=device, **bounds_of([impl], config), append=True)


def captures_steps(config: Any) -> bool:
    """Return whether vLLM captures whole steps, which is when kernels are compiled ahead; none with images."""
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode.has_full_cudagraphs() and not has_spans(config)


def expected_pages(impl: Any, page_size: int, quantised: bool) -> PagedKVCache:
    """Return pages like those that a layer will have, without memory."""
    row = impl.num_kv_heads * impl.head_size * impl.kv_dtype.itemsize
    cache = contract.expected_cache(
        LARGE // (page_size * row) + 1, page_size, impl.num_kv_heads, impl.head_size, impl.kv_dtype
    )
    k, v, layout = contract.keys_and_values(cache, impl.head_size)
    scale = 1.0 if quantised else None
    return PagedKVCache(k, v, layout, scale, scale)
