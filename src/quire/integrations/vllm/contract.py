"""What differs between the versions of vLLM that Quire serves: names, a layer's cache, MLA's prefill, collectives.

Up to 0.31 there is one name for backends of plug-ins, CUSTOM. From 0.32 on each has its own name.

Up to 0.28 a backend chooses the shape of its cache: here a page's keys, then its values, [num_pages, 2, page_size,
num_kv_heads, head_dim]. From 0.29 on vLLM chooses it: [num_pages, num_kv_heads, page_size, head_dim + head_dim_v], a
key and its value in one row, in any of six physical orders.

In 0.20 the backend of multi-head latent attention (MLA) also prefills. In 0.33 prefill has separate backends, which are
chosen separately; plug-ins have the name CUSTOM there.

In 0.33 models whose indexer chooses keys have a base class of their own for MLA. Layers of MiniMax M3 ask for no
backend, so Quire registers the model.

In 0.33 a layer's cache says whether several ranks share it, since that of a draft model may not be. The functions that
combine the results of these ranks moved from one module to another.

All of these are recognised by what vLLM has, not by its version number.
"""

import copyreg
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from packaging.version import Version

from quire import UnsupportedError
from quire.integrations import engine

SUPPORTED = (Version("0.20"), Version("0.34"))  # from, and before
BACKEND = "quire.integrations.vllm.choice.Backend"
PREFILL = "quire.integrations.vllm.prefill.QuirePrefill"
SPARSE_MLA = "vllm.model_executor.layers.attention.sparse_mla_attention"
MINIMAX_M3 = "vllm.models.minimax_m3"
MODELS = {"MiniMaxM3SparseForCausalLM": MINIMAX_M3}  # architectures whose layers ask for no backend, and their homes
TOKEN_SCALES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}  # vLLM's names
ROTATED = {"int4_per_token_head": "int4"}  # vLLM's names of what Quire calls a kv_format, over rotated heads
BLOCKED = "nvfp4"  # vLLM's and Quire's name of caches whose columns share scales in blocks
FORMATS = ROTATED | {BLOCKED: BLOCKED}
COLUMNS_OF_SCALE = 16
SIGNS = 0x9E3779B9  # the seed of the signs by which vLLM rotates
SCALE_BYTES = 4

logger = logging.getLogger(f"vllm.{__name__}")  # below vLLM's logger, so that its handlers show the messages


def load(name: str) -> Any:
    """Import a module of vLLM.

    vLLM is not installed where types are checked. This is the one place where it enters, so its types are `Any`.
    """
    return engine.load("vllm", name)


def check_version() -> None:
    """Raise UnsupportedError unless this version of vLLM is in the supported range."""
    version = Version(load("vllm").__version__)
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        raise UnsupportedError(
            f"vllm must be from {SUPPORTED[0]} to before {SUPPORTED[1]}, got {version}; install a version in that range"
        )


def register() -> None:
    """Register the backends with vLLM, by their paths alone. Calling it again changes nothing.

    It never raises, because it runs in every vLLM process of an environment that has Quire. An unsupported version is
    refused when the backend is chosen.
    """
    if not has_registry():
        logger.warning(
            "Quire serves vLLM from %s to before %s, got %s, which has no registry of attention backends",
            *SUPPORTED,
            load("vllm").__version__,
        )
        return
    backends = backend_names()
    if takes_names():
        if backend_name() not in backends.__members__:
            registry().register_backend(backend_name(), BACKEND)
            copyreg.pickle(backends, reduce_backend_name)
    elif backends.CUSTOM.is_overridden() and backends.CUSTOM.get_path() != BACKEND:
        logger.warning(
            "Quire leaves the backend CUSTOM to %s, which came first; set VLLM_PLUGINS=quire to have Quire's",
            backends.CUSTOM.get_path(),
        )
    else:
        registry().register_backend(backends.CUSTOM, BACKEND)
    if has_prefill_backends() and not prefill_registry().MLAPrefillBackendEnum.CUSTOM.is_overridden():
        prefill_registry().register_mla_prefill_backend(prefill_registry().MLAPrefillBackendEnum.CUSTOM, PREFILL)
    models = load("vllm.model_executor.models.registry").ModelRegistry
    for name, home in MODELS.items():
        if getattr(models.models.get(name), "module_name", None) == home:  # vLLM's own, and no other plug-in's
            models.register_model(name, f"quire.integrations.vllm.models:{name}")


def reduce_backend_name(name: Any) -> tuple[Any, ...]:
    """Say how to pickle a name of vLLM's enum of backends; this function is in Python's own table, `copyreg`.

    vLLM sends its configuration to new processes, which have loaded no plug-in when they read it. There an enum member
    is looked up by its value, and Quire's does not exist yet. So Quire's name is pickled as a call of
    `registered_name`, and any other name as it would be without this function.
    """
    return (registered_name, ()) if name.name == backend_name() else name.__reduce_ex__(2)


def registered_name() -> Any:
    """Register the backend, and return the member of vLLM's enum that names it."""
    register()
    return backend_names()[backend_name()]


def backend_name() -> str:
    """Return the name by which users choose the backend."""
    return "QUIRE" if takes_names() else "CUSTOM"


def is_chosen(vllm_config: Any) -> bool:
    """Whether the user chose Quire."""
    return getattr(vllm_config.attention_config.backend, "name", None) == backend_name()


def takes_names() -> bool:
    """Whether this vLLM accepts new names of backends."""
    return hasattr(backend_names(), "register")


def has_registry() -> bool:
    """Whether this vLLM has a registry of attention backends."""
    try:
        return hasattr(registry(), "register_backend")
    except ImportError:
        return False


def registry() -> Any:
    """Return vLLM's registry of attention backends."""
    return load("vllm.v1.attention.backends.registry")


def prefill_registry() -> Any:
    """Return vLLM's registry of backends for the prefill of MLA."""
    return load("vllm.v1.attention.backends.mla.prefill.registry")


def has_prefill_backends() -> bool:
    """Whether this vLLM has backends for the prefill of MLA."""
    try:
        return hasattr(prefill_registry(), "register_mla_prefill_backend")
    except ImportError:
        return False


def has_sparse_mla() -> bool:
    """Whether this vLLM has a base class for MLA whose indexer chooses keys, with one method for the attention."""
    try:
        return hasattr(load(SPARSE_MLA).SparseMLACommonImpl, "_forward_mqa_kernel")
    except (AttributeError, ImportError):
        return False


def backend_names() -> Any:
    """Return vLLM's enum of backends."""
    return registry().AttentionBackendEnum


def bytes_with_scale(name: str, head_size: int) -> int:
    """Return the bytes of a head and of its scales; 0 where vLLM's name is of a cache that holds none."""
    if name == BLOCKED:
        return head_size // 2 + head_size // COLUMNS_OF_SCALE
    if name in ROTATED:
        return head_size // 2 + SCALE_BYTES
    return head_size + SCALE_BYTES if name in TOKEN_SCALES else 0


class CacheShape:
    """The shape of a layer's cache: vLLM up to 0.28 asks a backend for it, and later for the bytes of a row.

    With scales per token and head, a head's numbers are followed by their scale in float32. A page of nvfp4 is the
    numbers of all its keys, their block scales, the numbers of the values and theirs.
    """

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache."""
        row = bytes_with_scale(cache_dtype_str, head_size) or head_size
        return num_blocks, 2, block_size, num_kv_heads, row

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec of a layer's cache with the bytes of a key and its value in it."""
        name = spec.kv_quant_mode.name.lower()
        key, value = (bytes_with_scale(name, size) for size in (spec.head_size, spec.head_size_v))
        if spec.state_content_bytes is not None or not key:
            return spec
        if name == BLOCKED:  # keys and values are in rows of their own, as vLLM's backend for such caches has them
            return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=key)
        return replace(spec, state_content_bytes=key + value)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the physical order of the dimensions; with a dimension of layers if all caches are one tensor."""
        if load("vllm.v1.attention.backends.utils").get_kv_cache_layout() == "HND":
            # With layers: pages, K and V, heads, layers, slots.
            return (1, 2, 4, 0, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)


def expected_cache(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a layer's cache as vLLM lays it out unless it is told otherwise, without memory."""
    if hasattr(load("vllm.v1.attention.backend").AttentionBackend, "supported_kv_cache_layouts"):
        return torch.empty(num_pages, page_size, num_kv_heads, 2 * head_dim, dtype=dtype, device="meta").transpose(1, 2)
    shape = CacheShape.get_kv_cache_shape(num_pages, page_size, num_kv_heads, head_dim)
    order = CacheShape.get_kv_cache_stride_order()
    physical = torch.empty([shape[axis] for axis in order], dtype=dtype, device="meta")
    return physical.permute([order.index(axis) for axis in range(len(order))])


def current_config() -> Any:
    """Return vLLM's configuration while it makes a model; else None."""
    return load("vllm.config.vllm").get_current_vllm_config_or_none()


def has_bidirectional_steps(vllm_config: Any) -> bool:
    """Return whether a model has steps that are not causal, as those that draft whole blocks do.

    Newer vLLM says so of each model; 0.20 has one kind of such drafts.
    """
    attention: Any = getattr(vllm_config, "attention_config", None)
    if hasattr(attention, "use_non_causal"):
        return bool(attention.use_non_causal)
    return getattr(getattr(vllm_config, "speculative_config", None), "method", None) == "dflash"


def asks_about_prefixes(vllm_config: Any) -> bool:
    """Return whether vLLM, up to 0.28, asks the backend if a step whose requests share a prefix reads it once.

    The user asks for that with `--no-disable-cascade-attn`. The newer model runner never does so.
    """
    builder = load("vllm.v1.attention.backend").AttentionMetadataBuilder
    off = getattr(getattr(vllm_config, "model_config", None), "disable_cascade_attn", True)
    return hasattr(builder, "use_cascade_attention") and not off


def context_group(kv_cache_spec: Any) -> Any:
    """Return the group of ranks that share each context (decode context parallelism); None if each holds it whole."""
    if not getattr(kv_cache_spec, "dcp_sharded", True):
        return None
    try:
        group = load("vllm.distributed.parallel_state").get_dcp_group()
    except AssertionError:  # no group was made
        return None
    return group if group.world_size > 1 else None


def combiner_of_ranks(parallel_config: Any) -> Callable[..., Any]:
    """Return vLLM's function that combines the results of ranks over different keys, and leaves each its own heads."""
    name, old = "cp_lse_ag_out_rs", "common"
    if parallel_config.dcp_comm_backend == "a2a":
        name, old = "dcp_a2a_lse_reduce", "dcp_alltoall"
    try:
        module = load("vllm.v1.attention.ops.dcp")
    except ImportError:
        module = load(f"vllm.v1.attention.ops.{old}")
    return getattr(module, name)


def keys_and_values(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return views of a layer's keys and values, and the name of their layout."""
    keys, values, layout = rows(kv_cache)
    return keys[..., :head_dim], values[..., :head_dim], layout


def dense_pages(
    kv_cache: torch.Tensor, num_kv_heads: int, numbers: int, by_slots: bool | None = None
) -> tuple[torch.Tensor, ...] | None:
    """Return views of pages that hold all keys, then their scales, then all values and their scales; None if not dense.

    Each view is [num_pages, page_size, num_kv_heads, bytes]. A row of either side is `numbers` bytes and its scales.
    Within a page, slots are outside of heads if `by_slots` is true, inside if it is false, or as the cache has them.
    """
    pages = kv_cache.view(torch.uint8)
    page_size = pages.shape[2]
    if pages.dim() == 5:  # CacheShape's: [num_pages, 2, page_size, num_kv_heads, row]
        slot, head = pages.stride(2), pages.stride(3)
    else:  # [num_pages, heads, page_size, row], of keys and values, or of each
        head, slot = pages.stride(1), pages.stride(2)
    side = math.prod(pages.shape[1:]) // 2
    if (
        sum((size - 1) * stride for size, stride in zip(pages.shape[1:], pages.stride()[1:], strict=True))
        != 2 * side - 1
    ):
        return None
    if by_slots is None:
        by_slots = slot >= head

    def view(first: int, width: int) -> torch.Tensor:
        inner = (num_kv_heads * width, width) if by_slots else (width, page_size * width)
        shape = len(pages), page_size, num_kv_heads, width
        return pages.as_strided(shape, (pages.stride(0), *inner, 1), pages.storage_offset() + first)

    rows = page_size * num_kv_heads
    k, v = view(0, numbers), view(side, numbers)
    scales = (view(first + rows * numbers, side // rows - numbers) for first in (0, side))
    return k, v, *scales


def rotation(width: int, like: torch.Tensor) -> torch.Tensor:
    """Return the matrix by which vLLM multiplies heads before it stores them in four bits: signs, and Hadamard's.

    It is not normalised: times its transpose, it is the largest power of two that divides the width. Of a width that is
    no power of two, it has a block for each such part.
    """
    block = width & -width
    generator = torch.Generator(device="cpu").manual_seed(SIGNS)
    signs = 2.0 * torch.bernoulli(torch.full((block,), 0.5, device="cpu"), generator=generator) - 1.0
    matrix = torch.ones(1, 1, device="cpu")
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[signs[:, None] * matrix] * (width // block)).to(like.device, like.dtype)


def scales_of_tokens(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the scales of keys and values, [num_pages, page_size, num_kv_heads] float32."""
    keys, values, layout = rows(kv_cache)
    scales = (x[..., head_dim:].view(torch.float32)[..., 0] for x in (keys, values))
    k_scale, v_scale = (x if layout == "NHD" else x.transpose(1, 2) for x in scales)
    return k_scale, v_scale


def rows(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return views of what a layer's cache has of keys and of values, and the name of their layout."""
    if kv_cache.dim() == 5:  # CacheShape's
        return kv_cache[:, 0], kv_cache[:, 1], "NHD"
    keys, values = kv_cache.chunk(2, -1)
    return keys, values, "HND"
