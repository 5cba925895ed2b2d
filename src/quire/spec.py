"""`AttentionSpec`: what is computed, checked once.

A spec belongs to a kind of model layer: all full-attention layers of a model share one, all sliding-window layers
another. It is frozen, hashable and made of host values, so everything a launch must know about the mathematics is
decided before the first step.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from quire.errors import UnsupportedError, check_flag, check_integer, check_positive, describe

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
MAX_HEADS = 1 << 16  # models have some hundred
UNBOUNDED = 1 << 30  # a window side without a limit; larger than any position, and safe to add to one in int32


@dataclass(frozen=True, init=False)
class AttentionSpec:
    """State what attention computes: `softmax(mod(q · kᵀ · softmax_scale) restricted to the visible keys) · v`.

    Args:
        num_q_heads: query heads, a multiple of `num_kv_heads`.
        num_kv_heads: key/value heads; query head `h` reads KV head `h // group_size`.
        head_dim: width of queries and keys, a multiple of 8 from 16 to 256.
        head_dim_v: width of values and outputs, in the same range; `head_dim` when not given.
        dtype: of queries and outputs: float16, bfloat16 or float32.
        kv_dtype: of the cache: float8_e4m3fn, float8_e5m2 or int8 (with scales in the cache), or `dtype`, which it is
            when not given.
        softmax_scale: positive factor on the scores; `head_dim ** -0.5` when not given.
        causal: a query sees no key after its own position.
        sliding_window: visible keys looking back, the query's own included; None for no limit.
        sliding_window_right: visible keys looking ahead, the query's own not included; None for no limit.
            Only with `causal=False`.
        softcap: scores become `softcap * tanh(scores / softcap)`; None for none.
        alibi: add `-slope[h] * |query position - key position|` to the scores (ALiBi, arXiv 2108.12409);
            slopes go to `attention`.
        sinks: add `exp(sink[h])` to each softmax denominator, as gpt-oss does; sinks go to `attention`.
        allow_tf32: compute float32 inputs with TF32 matrix products (10-bit mantissa) instead of float32.
        allow_fp8: where the cache is float8_e4m3fn, matrix products may be in it too: queries and probabilities are
            rounded to 3-bit mantissas. Faster on long prompts where a kernel has such products (`print(plan)` says so:
            the Hopper kernel, for head_dim 128); other kernels ignore this.

    Attributes:
        cache_signature: the `PagedKVCache.signature` of a cache for this spec.

    Raises:
        TypeError: a field is of the wrong type.
        ValueError: a field is out of its range.
        UnsupportedError: a head dim or dtype that is not served.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    softmax_scale: float
    causal: bool
    sliding_window: int | None
    sliding_window_right: int | None
    softcap: float | None
    alibi: bool
    sinks: bool
    allow_tf32: bool
    allow_fp8: bool
    cache_signature: tuple[torch.dtype, int, int, int] = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        softmax_scale: float | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        sliding_window_right: int | None = None,
        softcap: float | None = None,
        alibi: bool = False,
        sinks: bool = False,
        allow_tf32: bool = False,
        allow_fp8: bool = False,
    ) -> None:
        heads_advice = "pass the heads of one tensor-parallel rank, not of the whole model"
        num_q_heads = check_integer("num_q_heads", num_q_heads, heads_advice, 1, MAX_HEADS)
        num_kv_heads = check_integer("num_kv_heads", num_kv_heads, heads_advice, 1, MAX_HEADS)
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a multiple of num_kv_heads, got {num_q_heads} and {num_kv_heads}; {heads_advice}"
            )
        head_dim = _check_head_dim("head_dim", head_dim)
        head_dim_v = head_dim if head_dim_v is None else _check_head_dim("head_dim_v", head_dim_v)
        dtype = _check_dtype("dtype", dtype, QUERY_DTYPES, "cast the queries")
        if kv_dtype is None:
            kv_dtype = dtype
        advice = "view the cache as its real dtype (engines often hand fp8 over as uint8)"
        _check_dtype("kv_dtype", kv_dtype, (dtype, *QUANTISED_DTYPES), advice)
        if softmax_scale is None:
            softmax_scale = head_dim**-0.5
        softmax_scale = check_positive("softmax_scale", softmax_scale, "leave it out for head_dim ** -0.5")
        check_flag("causal", causal, "pass False for attention in both directions")
        if sliding_window is not None:
            advice = "it counts the query's own key; leave it out for no window"
            sliding_window = check_integer("sliding_window", sliding_window, advice, 1)
        if sliding_window_right is not None:
            advice = "leave it out for no limit"
            sliding_window_right = check_integer("sliding_window_right", sliding_window_right, advice, 0)
            if causal:
                raise ValueError(
                    f"sliding_window_right must be left out where causal=True, got {sliding_window_right}; "
                    "a causal query sees nothing to its right"
                )
        if softcap is not None:
            softcap = check_positive("softcap", softcap, "leave it out for no softcap")
        check_flag("alibi", alibi, "the slopes go to `attention`")
        check_flag("sinks", sinks, "the sinks go to `attention`")
        check_flag("allow_tf32", allow_tf32, "it is a permission")
        check_flag("allow_fp8", allow_fp8, "it is a permission")
        values = {
            "num_q_heads": num_q_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
            "softmax_scale": softmax_scale,
            "causal": causal,
            "sliding_window": sliding_window,
            "sliding_window_right": sliding_window_right,
            "softcap": softcap,
            "alibi": alibi,
            "sinks": sinks,
            "allow_tf32": allow_tf32,
            "allow_fp8": allow_fp8,
            "cache_signature": (kv_dtype, num_kv_heads, head_dim, head_dim_v),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def window(self) -> tuple[int, int]:
        """How far a query sees, (window_left, window_right), its own position not counted.

        Key j is visible to position i iff i - window_left <= j <= i + window_right.
        """
        left = UNBOUNDED if self.sliding_window is None else min(self.sliding_window - 1, UNBOUNDED)
        if self.causal:
            return left, 0
        return left, UNBOUNDED if self.sliding_window_right is None else min(self.sliding_window_right, UNBOUNDED)


def dtype_names(dtypes: tuple[torch.dtype, ...]) -> str:
    """Return dtypes as a message lists them."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_head_dim(name: str, value: Any) -> int:
    advice = "pad the heads to the next multiple of 8"
    dim = check_integer(name, value, advice)
    if not 16 <= dim <= 256 or dim % 8:
        raise UnsupportedError(f"{name} must be a multiple of 8 from 16 to 256, got {describe(value)}; {advice}")
    return dim


def _check_dtype(name: str, value: Any, served: tuple[torch.dtype, ...], advice: str) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype, got {describe(value)}; pass torch.float16, for instance")
    if value not in served:
        raise UnsupportedError(f"{name} must be one of {dtype_names(served)}, got {value}; {advice}")
    return value
