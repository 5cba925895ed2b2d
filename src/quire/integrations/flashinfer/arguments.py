"""FlashInfer's arguments, checked before anything is launched or written. What is not served is refused by name."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any

import torch

from quire import AttentionSpec, PagedKVCache, UnsupportedError
from quire.integrations import layer_spec
from quire.integrations.arguments import as_int, as_number, check_flags, check_tensor, shown
from quire.integrations.flashinfer.signatures import Arguments

LAYOUTS = {
    "NHD": {"num_pages": None, "page_size": None, "num_kv_heads": None, "head_dim": None},
    "HND": {"num_pages": None, "num_kv_heads": None, "page_size": None, "head_dim": None},
}
OUT_DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
Scale = float | torch.Tensor | None
Pages = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Scoring:
    """What attention computes, in FlashInfer's arguments, checked."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    o_data_type: torch.dtype
    sm_scale: float | None
    causal: bool
    window_left: int  # -1 for no limit
    logits_soft_cap: float  # 0 for none
    alibi: bool = False
    latent: bool = False
    mask: Any = None  # of `quire.mask`

    def spec(self, sinks: bool = False) -> AttentionSpec:
        """Return the spec, with sinks or without."""
        return layer_spec(
            num_q_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim_qk,
            head_dim_v=self.head_dim_vo,
            dtype=self.q_data_type,
            kv_dtype=self.kv_data_type,
            softmax_scale=self.sm_scale,
            causal=self.causal,
            sliding_window=None if self.window_left < 0 else self.window_left + 1,
            softcap=self.logits_soft_cap or None,
            alibi=self.alibi,
            latent=self.latent,
            mask=self.mask,
            sinks=sinks,
        )

    def scaled(self, q_scale: float | None) -> "Scoring":
        """Return the scoring whose scores have a factor more."""
        if q_scale is None:
            return self
        factor = as_positive("q_scale", q_scale)
        scale = self.head_dim_qk**-0.5 if self.sm_scale is None else self.sm_scale
        return self if factor == 1 else replace(self, sm_scale=scale * factor)


def read_scoring(a: Arguments, **changed: Any) -> Scoring:
    """Check the arguments about heads, dtypes, scores and masks; some may be given in their place, or be missing."""
    given = vars(a) | changed
    alibi = is_alibi(given.get("pos_encoding_mode", "NONE"))
    causal = given.get("causal", False)
    check_flags(causal=causal)
    num_qo_heads = as_int("num_qo_heads", given["num_qo_heads"], least=1)
    num_kv_heads = as_int("num_kv_heads", given["num_kv_heads"], least=1)
    head_dim_qk = as_int("head_dim_qk", given["head_dim_qk"], least=1)
    head_dim_vo = given.get("head_dim_vo")
    head_dim_vo = head_dim_qk if head_dim_vo is None else as_int("head_dim_vo", head_dim_vo, least=1)
    dtype = read_dtype("q_data_type", given["q_data_type"])
    kv_dtype, o_dtype = (
        dtype if given.get(name) is None else read_dtype(name, given[name]) for name in ("kv_data_type", "o_data_type")
    )
    if o_dtype is not dtype and o_dtype not in OUT_DTYPES:
        raise UnsupportedError(
            f"o_data_type must be one of {', '.join(map(str, OUT_DTYPES))}, got {o_dtype}; None for {dtype}"
        )
    sm_scale = given.get("sm_scale")
    if sm_scale is not None:
        sm_scale = as_positive("sm_scale", sm_scale, "None for head_dim_qk ** -0.5")
    window_left = max(as_int("window_left", given.get("window_left", -1)), -1)
    cap = given.get("logits_soft_cap")
    cap = 0.0 if cap is None else as_number("logits_soft_cap", cap)
    if not cap < inf:  # NaN neither
        raise ValueError(f"logits_soft_cap must be finite, got {cap}; None for none")
    if alibi and not (causal or given.get("is_last", False)):
        raise UnsupportedError(
            "causal must be True with ALiBi, got False; FlashInfer's bias of later keys grows with the distance"
        )
    if alibi and cap > 0:
        raise UnsupportedError(
            f"logits_soft_cap must be None with ALiBi, got {cap}; FlashInfer scales such scores twice"
        )
    scoring = Scoring(
        *(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, dtype, kv_dtype, o_dtype, sm_scale, causal),
        *(window_left, max(cap, 0.0), alibi, given.get("latent", False), given.get("mask")),
    )
    scoring.spec()  # which checks heads, head dims and dtypes
    return scoring


@lru_cache(maxsize=64)
def alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """Return the slopes of ALiBi's paper (arXiv 2108.12409), [num_heads] float32.

    For a power of two they are a geometric sequence that begins with its ratio; otherwise, every second slope of the
    sequence for the next power follows those of the power before.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32).to(device)


def is_alibi(mode: str) -> bool:
    """Return whether attention is to apply ALiBi; raise if it is to rotate."""
    if mode == "ROPE_LLAMA":
        raise UnsupportedError(
            f"pos_encoding_mode must be 'NONE' or 'ALIBI', got {mode!r}; rotate q, and k before it is written to the "
            "cache"
        )
    return mode == "ALIBI"


def as_positive(name: str, value: float, advice: str = "None for none") -> float:
    """Return a positive number as a float, or raise."""
    number = as_number(name, value)
    if not 0 < number < inf:
        raise ValueError(f"{name} must be positive and finite, got {value}; {advice}")
    return number


def read_dtype(name: str, value: str | torch.dtype | None) -> torch.dtype:
    """Return a dtype that is given as one or by its name in torch, or raise."""
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype or the name of one, got {shown(value)}; for instance 'bfloat16'")
    return dtype


def read_pages(paged_kv_cache: Pages, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K's and V's pages, each [num_pages, page_size, num_kv_heads, head_dim] or with heads first.

    Without the dimension of tokens, pages have one token.
    """
    dims, token = LAYOUTS[kv_layout], -3 if kv_layout == "NHD" else -2
    if isinstance(paged_kv_cache, torch.Tensor):
        if paged_kv_cache.dim() == 4:
            paged_kv_cache = paged_kv_cache.unsqueeze(token)
        pages, *rest = dims
        check_tensor("paged_kv_cache", paged_kv_cache, None, **{pages: None, "2": 2}, **dict.fromkeys(rest))
        k, v = paged_kv_cache.unbind(1)
        return k, v
    if not isinstance(paged_kv_cache, tuple | list) or len(paged_kv_cache) != 2:
        raise TypeError(
            f"paged_kv_cache must be a tensor or a pair (k, v), got {type(paged_kv_cache).__name__}; pass both"
        )
    k, v = (
        x.unsqueeze(token) if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.dim() == 3 else x
        for x in paged_kv_cache
    )
    shape = check_tensor("paged_kv_cache[0]", k, None, **dims)
    check_tensor("paged_kv_cache[1]", v, None, **dict(zip(dims, (*shape[:3], None), strict=True)))
    return k, v


def as_tokens(k: torch.Tensor, v: torch.Tensor, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values that are not paged as [num_tokens, num_kv_heads, head_dim], or raise."""
    names = ("num_tokens", "num_kv_heads") if kv_layout == "NHD" else ("num_kv_heads", "num_tokens")
    first, second, _ = check_tensor("k", k, None, **dict.fromkeys(names), head_dim=None)
    check_tensor("v", v, k.device, **dict(zip(names, (first, second), strict=True)), head_dim_vo=None)
    return (k, v) if kv_layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))


def read_cache(
    k: torch.Tensor, v: torch.Tensor, layout: str, dtype: torch.dtype, k_scale: Scale, v_scale: Scale
) -> PagedKVCache:
    """Return a cache of the planned dtype, with its scales."""
    for name, x in (("k", k), ("v", v)):
        if x.dtype is not dtype:
            raise ValueError(
                f"{name} must be of the planned kv_data_type {dtype}, got {x.dtype}; pass its dtype to plan"
            )
    return PagedKVCache(k, v, layout, *read_scales(k_scale, v_scale, k))


def read_scales(k_scale: Scale, v_scale: Scale, k: torch.Tensor) -> tuple[Scale, Scale]:
    """Return the scales of a quantised cache as tensors, or None for both where there are none.

    A number becomes a tensor by a fill on the device: no copy from the host, so it can be captured in a graph.
    """
    scales = [None if is_one(name, x) else x for name, x in (("k_scale", k_scale), ("v_scale", v_scale))]
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if scale is not None and k.dtype.itemsize > 1:
            raise UnsupportedError(
                f"{name} must be None or 1 for a cache of {k.dtype}, got {shown(scale)}; it belongs to fp8 caches"
            )
    given = [x for x in scales if x is not None]
    if not given:
        return None, None
    like = next((x for x in given if isinstance(x, torch.Tensor)), torch.empty(1, dtype=torch.float32, device=k.device))
    filled = [x if isinstance(x, torch.Tensor) else torch.full_like(like, 1.0 if x is None else x) for x in scales]
    return filled[0], filled[1]


def is_one(name: str, scale: Scale) -> bool:
    """Return whether a scale changes nothing; raise unless it is a positive number or a tensor."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale is None
    return as_positive(name, scale) == 1


def check_one(name: str, scale: Scale) -> None:
    """Raise unless a scale is None or 1."""
    if isinstance(scale, torch.Tensor) or not is_one(name, scale):
        raise UnsupportedError(f"{name} must be None or 1, got {shown(scale)}; scale the output where it is needed")
