"""What differs between the versions of vLLM that Quire serves, in one place: the backend's name, and how a layer's cache is laid out.

Up to 0.31 there is one name for backends from outside, CUSTOM; from 0.32 on each has a name of its own. Up to 0.28 a backend says how its cache is shaped:
here a page's keys, then its values, [num_pages, 2, page_size, num_kv_heads, head_dim]. From 0.29 on vLLM shapes it,
[num_pages, num_kv_heads, page_size, head_dim + head_dim_v], a key and its value in one row, in any of six physical orders. Both are told by what vLLM has,
not by its number.
"""
# pyright: reportMissingImports=false

import logging

import torch
import vllm
from packaging.version import Version

from quire import UnsupportedError

SUPPORTED = (Version("0.20"), Version("0.34"))  # from, and before
BACKEND = "quire.integrations.vllm.backend.QuireBackend"

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's own, so that its handlers show it


def check_version() -> None:
    """Raise UnsupportedError unless this version of vLLM is in the supported range."""
    version = Version(vllm.__version__)
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        raise UnsupportedError(
            f"vllm must be from {SUPPORTED[0]} to before {SUPPORTED[1]}, got {version}; install a version in that range"
        )


def register() -> None:
    """Register the backend with vLLM, by its path alone; calling it again changes nothing.

    It never raises, as it runs in every vLLM process of an environment that has Quire: an unsupported version is refused when the backend is chosen.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        logger.warning(
            "Quire serves vLLM from %s to before %s, got %s, which has no registry of attention backends",
            *SUPPORTED,
            vllm.__version__,
        )
        return
    name = backend_name()
    if not takes_names():
        custom = AttentionBackendEnum.CUSTOM
        if custom.is_overridden() and custom.get_path() != BACKEND:
            logger.warning(
                "Quire leaves the backend CUSTOM to %s, which came first; set VLLM_PLUGINS=quire to have Quire's",
                custom.get_path(),
            )
            return
        register_backend(custom, BACKEND)
    elif name not in AttentionBackendEnum.__members__:
        register_backend(name, BACKEND)
        AttentionBackendEnum[name].__reduce_ex__ = lambda protocol: (
            registered,
            (),
        )  # by value it would be looked up before there is one


def registered():
    """Return the name as vLLM keeps it; called where vLLM hands its configuration to a process that begins anew, in which no plug-in is loaded yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register()
    return AttentionBackendEnum[backend_name()]


def backend_name() -> str:
    """Return the name by which users choose the backend."""
    return "QUIRE" if takes_names() else "CUSTOM"


def takes_names() -> bool:
    """Whether this vLLM takes backends under names of their own."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return hasattr(AttentionBackendEnum, "register")


class CacheShape:
    """How a backend says the shape of its cache, which vLLM asks up to 0.28."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache."""
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return in which order the dimensions lie in memory, all layers' caches being one tensor where asked."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if get_kv_cache_layout() == "HND":  # with layers: pages, K and V, heads, layers, slots
            return (1, 2, 4, 0, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)


def keys_and_values(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return views of a layer's keys and values, and the name of their layout."""
    if kv_cache.dim() == 5:  # CacheShape's
        return *kv_cache.unbind(1), "NHD"
    return kv_cache[..., :head_dim], kv_cache[..., head_dim:], "HND"
