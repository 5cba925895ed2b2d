"""`AttentionSpec`: what is computed, checked once.

A spec belongs to a kind of model layer (all full-attention layers of a model share one, all sliding-window layers another). It is frozen and
hashable and holds host values only, so that everything a launch needs to know about the mathematics is decided before the first step.
"""

import math
from dataclasses import dataclass

import torch

from quire.errors import UnsupportedError

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
UNBOUNDED = 1 << 30  # a window side without a limit; larger than any position, and safe to add to one in int32


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """State what attention computes: `softmax(mod(q · kᵀ · softmax_scale) restricted to the visible keys) · v`.

    Args:
        num_q_heads: query heads, a multiple of `num_kv_heads`.
        num_kv_heads: key/value heads; query head `h` reads KV head `h // group_size`.
        head_dim: width of queries and keys, a multiple of 8 from 16 to 256.
        head_dim_v: width of values and outputs, same range; `head_dim` when not given.
        dtype: of queries and outputs: float16, bfloat16 or float32.
        kv_dtype: of the cache: `dtype` when not given, or float8_e4m3fn, float8_e5m2 or int8 (with scales in the cache).
        softmax_scale: positive factor on the scores; `head_dim ** -0.5` when not given.
        causal: a query sees no key after its own position.
        sliding_window: visible keys looking back, the query's own included; None for no limit.
        sliding_window_right: visible keys looking ahead, the query's own not included; None for no limit. Only with `causal=False`.
        softcap: scores become `softcap * tanh(scores / softcap)`; None for none.
        alibi: add `-slope[h] * |query position - key position|` to the scores (ALiBi, arXiv 2108.12409); slopes go to `attention`.
        sinks: add `exp(sink[h])` to each softmax denominator, as gpt-oss does; sinks go to `attention`.
        allow_tf32: compute float32 inputs with TF32 matrix products (10-bit mantissa) instead of float32.
        allow_fp8: where the cache is float8_e4m3fn, matrix products may be in it too: queries and probabilities are rounded to 3-bit mantissas. Faster on
            long prompts where a kernel has such products (`print(plan)` says so: the Hopper kernel, for head_dim 128); the others leave this alone.

    Raises:
        ValueError: a field breaks its contract.
        UnsupportedError: a dtype that is not served.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    softmax_scale: float | None = None
    causal: bool = True
    sliding_window: int | None = None
    sliding_window_right: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    allow_tf32: bool = False
    allow_fp8: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_q_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a positive multiple of num_kv_heads, got {self.num_q_heads} and {self.num_kv_heads}; "
                "pass the heads of one tensor-parallel rank, not of the whole model"
            )
        if self.head_dim_v is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name in ("head_dim", "head_dim_v"):
            dim = getattr(self, name)
            if dim < 16 or dim > 256 or dim % 8:
                raise ValueError(
                    f"{name} must be a multiple of 8 from 16 to 256, got {dim}; pad the heads to the next multiple of 8"
                )
        if self.dtype not in QUERY_DTYPES:
            raise UnsupportedError(f"dtype must be one of {_names(QUERY_DTYPES)}, got {self.dtype}; cast the queries")
        if self.kv_dtype is None:
            object.__setattr__(self, "kv_dtype", self.dtype)
        if self.kv_dtype not in (self.dtype, *QUANTISED_DTYPES):
            raise UnsupportedError(
                f"kv_dtype must be dtype ({self.dtype}) or one of {_names(QUANTISED_DTYPES)}, got {self.kv_dtype}; "
                "view the cache as its real dtype (engines often hand fp8 over as uint8)"
            )
        if self.softmax_scale is None:
            object.__setattr__(self, "softmax_scale", self.head_dim**-0.5)
        if not (self.softmax_scale > 0 and math.isfinite(self.softmax_scale)):
            raise ValueError(
                f"softmax_scale must be positive and finite, got {self.softmax_scale}; leave it out for head_dim ** -0.5"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window must be at least 1 (it counts the query's own key), got {self.sliding_window}; leave it out for no window"
            )
        if self.sliding_window_right is not None and (self.causal or self.sliding_window_right < 0):
            raise ValueError(
                f"sliding_window_right must be at least 0 and needs causal=False, got {self.sliding_window_right} with causal={self.causal}; "
                "a causal query sees nothing to its right"
            )
        if self.softcap is not None and not (self.softcap > 0 and math.isfinite(self.softcap)):
            raise ValueError(f"softcap must be positive and finite, got {self.softcap}; leave it out for no softcap")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def window(self) -> tuple[int, int]:
        """How far a query sees, (back, ahead), its own position not counted: key j is visible to position i iff i - back <= j <= i + ahead."""
        back = UNBOUNDED if self.sliding_window is None else min(self.sliding_window - 1, UNBOUNDED)
        ahead = (
            0
            if self.causal
            else UNBOUNDED
            if self.sliding_window_right is None
            else min(self.sliding_window_right, UNBOUNDED)
        )
        return back, ahead


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
