"""Checks of a cache, and of the arguments of the verbs that change one: `write_kv`, `write_latent`, `copy_pages`."""

from typing import Any

import torch

from quire.cache import PagedKVCache
from quire.cache_formats import FORMATS
from quire.errors import DEVICES, UnsupportedError, check_no_gradient, check_served, check_tensor, describe
from quire.spec import QUANTISED_DTYPES, QUERY_DTYPES, AttentionSpec, dtype_names

Part = tuple[torch.Tensor, list[tuple[int, ...]], str]  # of new tokens, the shapes that fit it, and these in words


def check_is_cache(name: str, cache: Any, advice: str = "wrap the layer's k and v in one") -> None:
    """Raise unless a value is a cache."""
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"{name} must be a PagedKVCache, got {describe(cache)}; {advice}")


def check_cache(cache: Any, spec: AttentionSpec) -> None:
    """Raise unless a cache fits a spec."""
    check_is_cache("cache", cache)
    if cache.is_latent is not spec.latent:
        wanted, got, advice = "keys and values", "latents", "make the spec with `AttentionSpec.mla`"
        if spec.latent:
            wanted, got, advice = got, wanted, "make it with `PagedKVCache.from_latents`"
        raise ValueError(f"cache must hold {wanted} as the spec says, got {got}; {advice}")
    if cache.kv_format != spec.kv_format:
        raise ValueError(
            f"cache must have the spec's kv_format {spec.kv_format}, got {cache.kv_format}; make the spec with that one"
        )
    if cache.dtype is not spec.kv_dtype:
        raise ValueError(
            f"cache must be of the spec's kv_dtype {spec.kv_dtype}, got {cache.dtype}; make the spec with that kv_dtype"
        )
    if cache.signature != spec.cache_signature:
        raise ValueError(
            f"cache must have {spec.num_kv_heads} heads of {spec.head_dim} (values {spec.head_dim_v}) as the spec says,"
            f" got {cache.num_kv_heads} of {cache.head_dim} (values {cache.head_dim_v}); "
            f"check its layout, {cache.layout}"
        )


def check_write_kv(k: torch.Tensor, v: torch.Tensor, cache: PagedKVCache, slot_mapping: torch.Tensor) -> None:
    """Raise unless the arguments of `write_kv` fit together."""
    try:
        dtype, num_heads, head_dim, head_dim_v, is_latent = cache.signature
        num_tokens = k.shape[0]
        fits = (
            k.shape == (num_tokens, num_heads, head_dim)
            and v.shape == (num_tokens, num_heads, head_dim_v)
            and k.stride(2) == 1
            and v.stride(2) == 1
            and ((k.dtype is dtype and v.dtype is dtype) or _is_encodable(k, v, dtype))
            and _is_slot_mapping(slot_mapping, num_tokens)
            and k.device == v.device == cache.device == slot_mapping.device
            and cache.layout != "THD"
            and not is_latent
            and not cache.is_expanded
            and not ((cache.k.requires_grad or cache.v.requires_grad) and torch.is_grad_enabled())
            and cache.device.type in DEVICES
        )
    except (AttributeError, IndexError, RuntimeError, TypeError):
        fits = False
    if not fits:
        _explain_write_kv(k, v, cache, slot_mapping)


def _is_encodable(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype | str) -> bool:
    return (dtype in QUANTISED_DTYPES or dtype in FORMATS) and k.dtype in QUERY_DTYPES and v.dtype in QUERY_DTYPES


def _is_slot_mapping(slot_mapping: torch.Tensor, num_tokens: int) -> bool:
    return (
        slot_mapping.dtype is torch.int64
        and slot_mapping.dim() == 1
        and slot_mapping.shape[0] <= num_tokens
        and slot_mapping.is_contiguous()
    )


def _explain_write_kv(k: Any, v: Any, cache: Any, slot_mapping: Any) -> None:
    check_is_cache("cache", cache)
    if cache.layout == "THD":
        raise UnsupportedError("cache must be paged to be written by slot, got layout THD; index its tensors instead")
    if cache.is_latent:
        raise ValueError("cache must hold keys and values, got latents; call `write_latent`")
    check_tensor("k", k, "pass the step's new keys")
    check_tensor("v", v, "pass the step's new values")
    parts: dict[str, Part] = {}
    for name, x, dim in (("k", k, cache.head_dim), ("v", v, cache.head_dim_v)):
        wanted = f"[num_tokens, {cache.num_kv_heads}, {dim}] with a contiguous head"
        parts[name] = x, [(*k.shape[:1], cache.num_kv_heads, dim)], wanted
    _explain_new(parts, cache, slot_mapping)


def _explain_new(parts: dict[str, Part], cache: PagedKVCache, slot_mapping: Any) -> None:
    """Raise what is wrong with new tokens, whose tensors `parts` has by name."""
    of, (first, *_) = next(iter(parts.items()))
    check_tensor("slot_mapping", slot_mapping, f"it has one slot per token of {of}")
    counts = [x.shape[0] if x.dim() in map(len, shapes) else None for x, shapes, _ in parts.values()]
    if None not in counts and len(set(counts)) > 1:
        raise ValueError(
            f"{' and '.join(parts)} must have one number of tokens, got {' and '.join(map(str, counts))}; "
            "pass those of one step"
        )
    for name, (x, shapes, wanted) in parts.items():
        if x.shape not in shapes or (x.stride(-1) != 1 and not x.is_contiguous()):
            raise ValueError(
                f"{name} must be {wanted}, got {list(x.shape)} with strides {x.stride()}; reshape it as the cache"
            )
        is_quantised = cache.dtype in QUANTISED_DTYPES or cache.kv_format is not None
        served = QUERY_DTYPES if is_quantised else (cache.dtype,)
        if x.dtype not in served:
            raise ValueError(
                f"{name} must be of the cache's dtype {cache.dtype} ({dtype_names(QUERY_DTYPES)} for a quantised one), "
                f"got {x.dtype}; cast it"
            )
    if not _is_slot_mapping(slot_mapping, first.shape[0]):
        raise ValueError(
            f"slot_mapping must be contiguous int64 with one dimension and at most {of}'s {first.shape[0]} entries, "
            f"got {describe(slot_mapping)} with strides {slot_mapping.stride()}; it has one slot per token of {of}"
        )
    devices = [x.device for x in (*(x for x, *_ in parts.values()), cache, slot_mapping)]
    if len(set(devices)) > 1:
        raise ValueError(
            f"{', '.join(parts)}, cache and slot_mapping must be on one device, got {', '.join(map(str, devices))}; "
            "move them together"
        )
    _check_writable("cache", cache)
    check_served("cache", cache.device)


def check_new(
    k: torch.Tensor, v: torch.Tensor | None, slot_mapping: torch.Tensor, cache: PagedKVCache, num_tokens: int
) -> None:
    """Raise unless the keys and values that `attention` is to write fit its cache and its `num_tokens` queries."""
    if cache.is_latent:
        check_write_latent(k, v, cache, slot_mapping)
    else:
        for name, x in (("k", k), ("v", v), ("slot_mapping", slot_mapping)):
            check_tensor(name, x, "pass k, v and slot_mapping together, or none of them")
        check_write_kv(k, v, cache, slot_mapping)  # pyright: ignore[reportArgumentType]
    if not k.shape[0] == slot_mapping.shape[0] == num_tokens:
        raise ValueError(
            f"k and slot_mapping must have q's {num_tokens} tokens, got {k.shape[0]} and {slot_mapping.shape[0]}; "
            "give padding a negative slot"
        )


def check_write_latent(
    c_kv: torch.Tensor, k_pe: torch.Tensor | None, cache: PagedKVCache, slot_mapping: torch.Tensor
) -> None:
    """Raise unless the arguments of `write_latent` fit together."""
    try:
        dtype, _, head_dim, rank, is_latent = cache.signature
        num_tokens, rope_dim = c_kv.shape[0], head_dim - rank
        rope = c_kv.new_empty(num_tokens, 0) if k_pe is None else k_pe
        fits = (
            is_latent
            and c_kv.shape == (num_tokens, rank)
            and c_kv.stride(1) == 1
            and rope.shape in ((num_tokens, rope_dim), (num_tokens, 1, rope_dim))
            and (rope_dim == 0 or rope.stride(-1) == 1)
            and ((c_kv.dtype is dtype and rope.dtype is dtype) or _is_encodable(c_kv, rope, dtype))
            and _is_slot_mapping(slot_mapping, num_tokens)
            and c_kv.device == rope.device == cache.device == slot_mapping.device
            and not cache.is_expanded
            and not (cache.latents.requires_grad and torch.is_grad_enabled())
            and cache.device.type in DEVICES
        )
    except (AttributeError, IndexError, RuntimeError, TypeError):
        fits = False
    if not fits:
        _explain_write_latent(c_kv, k_pe, cache, slot_mapping)


def _explain_write_latent(c_kv: Any, k_pe: Any, cache: Any, slot_mapping: Any) -> None:
    check_is_cache("cache", cache, "make it from the layer's latents")
    if not cache.is_latent:
        raise ValueError("cache must hold latents, got keys and values; call `write_kv`")
    check_tensor("c_kv", c_kv, "pass the step's new latents")
    rank, rope_dim = cache.head_dim_v, cache.head_dim - cache.head_dim_v
    last = "with a contiguous last dimension"
    n = c_kv.shape[0] if c_kv.dim() else 0
    parts: dict[str, Part] = {"c_kv": (c_kv, [(n, rank)], f"[{n}, {rank}] {last}")}
    if rope_dim or k_pe is not None:
        check_tensor("k_pe", k_pe, f"latents of this cache have {rope_dim} rotary columns")
        parts["k_pe"] = k_pe, [(n, rope_dim), (n, 1, rope_dim)], f"[{n}, {rope_dim}] or [{n}, 1, {rope_dim}] {last}"
    _explain_new(parts, cache, slot_mapping)


def _check_writable(name: str, cache: PagedKVCache) -> None:
    if cache.is_expanded:
        raise ValueError(
            f"{name} must have memory for every slot to be written, got strides {cache.k.stride()} and "
            f"{cache.v.stride()}, or scales that are expanded; allocate it with `PagedKVCache.empty`"
        )
    check_no_gradient(name, cache.k, cache.v, got="k or v that does", advice="detach them")


def check_copy_pages(src: PagedKVCache, dst: PagedKVCache, page_pairs: torch.Tensor) -> None:
    """Raise unless the arguments of `copy_pages` fit together."""
    for name, cache in (("src", src), ("dst", dst)):
        check_is_cache(name, cache)
        if cache.layout == "THD":
            raise UnsupportedError(
                f"{name} must be paged to be copied by page, got layout THD; copy its tensors instead"
            )
        check_served(name, cache.device)
    _check_writable("dst", dst)
    for fact, wanted, got in (
        ("format", src.kv_format, dst.kv_format),
        ("layout", src.layout, dst.layout),
        ("latents", src.is_latent, dst.is_latent),
        ("dtype", src.dtype, dst.dtype),
        ("page shape", (*src.k.shape[1:], *src.v.shape[1:]), (*dst.k.shape[1:], *dst.v.shape[1:])),
        ("kind of scales", src.scale_kind, dst.scale_kind),
    ):
        if wanted != got:
            raise ValueError(
                f"dst must have src's layout, dtype, page shape and kind of scales, got {fact} {got} for {wanted}; "
                "allocate both alike"
            )
    check_tensor("page_pairs", page_pairs, "stack a column of sources and one of destinations")
    if (
        page_pairs.dim() != 2
        or page_pairs.shape[1] != 2
        or page_pairs.dtype not in (torch.int32, torch.int64)
        or not page_pairs.is_contiguous()
    ):
        raise ValueError(
            f"page_pairs must be contiguous int32 or int64 [num_pairs, 2], got {describe(page_pairs)} with strides "
            f"{page_pairs.stride()}; stack a column of sources and one of destinations"
        )
    check_served("page_pairs", page_pairs.device)
