"""Checks of `rope` and `qk_norm`, by which `attention` normalises and rotates queries and new keys."""

from typing import Any

import torch

from quire.cache import PagedKVCache
from quire.errors import UnsupportedError, check_flag, check_no_gradient, check_positive, check_tensor, describe
from quire.norm_rope import QKNorm, Rope, qk_norm_of
from quire.spec import QUERY_DTYPES, dtype_names


def check_norm_rope(
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    rope: Rope | None,
    qk_norm: QKNorm | None,
    cache: PagedKVCache,
    num_tokens: int,
) -> None:
    """Raise unless `rope` and `qk_norm` fit the cache and the queries of `num_tokens` tokens."""
    try:
        fits = (
            k is not None
            and v is not None
            and slot_mapping is not None
            and not cache.is_latent
            and (rope is None or (_rope_fits(*rope, cache) and rope[2].shape[0] == num_tokens))
            and (qk_norm is None or _norm_fits(*qk_norm, cache))
        )
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        fits = False
    if not fits:
        _explain_norm_rope(k, v, slot_mapping, rope, qk_norm, cache, num_tokens)


def check_norm_rope_alone(rope: Rope | None, qk_norm: QKNorm | None, cache: PagedKVCache) -> dict[str, Any]:
    """Raise unless `rope` and `qk_norm` fit a cache; return those that there are, as `attention` takes them."""
    norm_rope: dict[str, Any] = {}
    if rope is not None:
        _refuse_latents("rope", rope, cache)
        check_rope("rope", rope, cache)
        norm_rope["rope"] = Rope(*rope)
    if qk_norm is not None:
        _refuse_latents("qk_norm", qk_norm, cache)
        check_qk_norm("qk_norm", qk_norm, cache)
        norm_rope["qk_norm"] = qk_norm_of(qk_norm)
    return norm_rope


def _refuse_latents(name: str, value: Any, cache: PagedKVCache) -> None:
    if cache.is_latent:
        raise UnsupportedError(
            f"{name} must be left out for latents, got {describe(value)}; normalise and rotate them before"
        )


def _rope_fits(
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool, cache: PagedKVCache
) -> bool:
    rows, half = cos.shape
    return (
        rows > 0
        and 2 <= 2 * half <= cache.head_dim
        and sin.shape == cos.shape
        and cos.dtype in QUERY_DTYPES
        and sin.dtype is cos.dtype
        and cos.stride(1) == 1
        and sin.stride(1) == 1
        and positions.dim() == 1
        and (positions.dtype is torch.int64 or positions.dtype is torch.int32)
        and positions.is_contiguous()
        and (interleaved is True or interleaved is False)
        and cos.device == sin.device == positions.device == cache.device
        and not ((cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled())
    )


def _norm_fits(q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, cache: PagedKVCache) -> bool:
    return (
        type(eps) is float
        and 1e-30 < eps < 1e30
        and q_weight.shape == k_weight.shape == (cache.head_dim,)
        and q_weight.dtype in QUERY_DTYPES
        and k_weight.dtype in QUERY_DTYPES
        and q_weight.is_contiguous()
        and k_weight.is_contiguous()
        and q_weight.device == k_weight.device == cache.device
        and not ((q_weight.requires_grad or k_weight.requires_grad) and torch.is_grad_enabled())
    )


def _explain_norm_rope(
    k: Any, v: Any, slot_mapping: Any, rope: Any, qk_norm: Any, cache: PagedKVCache, num_tokens: int
) -> None:
    for name, value in (("rope", rope), ("qk_norm", qk_norm)):
        if value is None:
            continue
        _refuse_latents(name, value, cache)
        if k is None or v is None or slot_mapping is None:
            raise ValueError(
                f"{name} must be given with k, v and slot_mapping, got only some of them; it is for new tokens"
            )
    if rope is not None:
        check_rope("rope", rope, cache)
        shape = list(rope[2].shape)
        if shape != [num_tokens]:
            raise ValueError(
                f"rope.positions must have q's {num_tokens} tokens, got shape {shape}; give padding any position"
            )
    if qk_norm is not None:
        check_qk_norm("qk_norm", qk_norm, cache)


def check_rope(name: str, rope: Rope, cache: PagedKVCache) -> None:
    """Raise unless a `Rope`, or the tuple of its fields, fits a cache, whatever the number of its positions."""
    if not isinstance(rope, tuple) or len(rope) not in (3, 4):
        raise TypeError(f"{name} must be a quire.Rope, got {describe(rope)}; call Rope(cos, sin, positions)")
    cos, sin, positions, interleaved = Rope(*rope)
    check_flag(f"{name}.interleaved", interleaved, "True rotates neighbours, False the halves")
    check_tensor(f"{name}.cos", cos, "it has a row for each position")
    check_tensor(f"{name}.sin", sin, "it has a row for each position")
    check_tensor(f"{name}.positions", positions, "it has a position for each token")
    if cos.dim() != 2 or 0 in cos.shape or 2 * cos.shape[1] > cache.head_dim or cos.stride(1) != 1:
        raise ValueError(
            f"{name}.cos must be [max_positions, half] with contiguous rows and 2 * half from 2 to head_dim = "
            f"{cache.head_dim}, got {list(cos.shape)} with strides {cos.stride()}; it has a column for each pair"
        )
    if cos.dtype not in QUERY_DTYPES:
        raise ValueError(f"{name}.cos must be of dtype {dtype_names(QUERY_DTYPES)}, got {cos.dtype}; cast it")
    if sin.shape != cos.shape or sin.dtype is not cos.dtype or sin.stride(1) != 1:
        raise ValueError(
            f"{name}.sin must be like cos, {list(cos.shape)} {cos.dtype} with contiguous rows, got {list(sin.shape)} "
            f"{sin.dtype} with strides {sin.stride()}; make both alike"
        )
    if positions.dim() != 1 or positions.dtype not in (torch.int32, torch.int64) or not positions.is_contiguous():
        raise ValueError(
            f"{name}.positions must be contiguous int32 or int64 [num_tokens], got {describe(positions)} with strides "
            f"{positions.stride()}; it has a position for each token"
        )
    _check_placed({f"{name}.cos": cos, f"{name}.sin": sin, f"{name}.positions": positions}, cache)


def check_qk_norm(name: str, qk_norm: QKNorm, cache: PagedKVCache) -> None:
    """Raise unless a `QKNorm`, or the tuple of its fields, fits a cache."""
    if not isinstance(qk_norm, tuple) or len(qk_norm) not in (2, 3):
        raise TypeError(f"{name} must be a quire.QKNorm, got {describe(qk_norm)}; call QKNorm(q_weight, k_weight)")
    q_weight, k_weight, eps = QKNorm(*qk_norm)
    check_positive(f"{name}.eps", eps, "pass the model's")
    named = {f"{name}.q_weight": q_weight, f"{name}.k_weight": k_weight}
    for which, weight in named.items():
        check_tensor(which, weight, "it has a factor for each element of a head")
        if weight.shape != (cache.head_dim,) or weight.dtype not in QUERY_DTYPES or not weight.is_contiguous():
            raise ValueError(
                f"{which} must be contiguous [{cache.head_dim}] of dtype {dtype_names(QUERY_DTYPES)}, got "
                f"{describe(weight)} with strides {weight.stride()}; pass the weight of a norm over one head"
            )
    _check_placed(named, cache)


def _check_placed(tensors: dict[str, torch.Tensor], cache: PagedKVCache) -> None:
    for name, tensor in tensors.items():
        if tensor.device != cache.device:
            raise ValueError(f"{name} must be on the cache's device {cache.device}, got {tensor.device}; move it there")
        check_no_gradient(name, tensor)
