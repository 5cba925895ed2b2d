"""`AttentionSpec`: what is computed, checked once.

A spec belongs to a kind of model layer: all full-attention layers of a model share one, all sliding-window layers
another. It is frozen, hashable and made of host values, so everything that a launch needs to know about the computation
is decided before the first step.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from quire.cache_formats import FORMATS, check_format, check_widths
from quire.errors import UnsupportedError, check_flag, check_integer, check_positive, describe
from quire.score_functions import Extra, Function, extras_of

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
QUANTISED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
LATENT_FP8_DTYPES = (torch.float8_e4m3fn,)
FORMAT_DTYPE = torch.uint8  # of caches in one of FORMATS: bytes
MAX_HEAD_DIM = 512
MAX_HEADS = (1 << 16) - 1  # programs on the second axis of a CUDA grid; models have some hundred heads
UNBOUNDED = 1 << 30  # a window side without a limit; larger than any position, and safe to add to one in int32


@dataclass(frozen=True, init=False)
class AttentionSpec:
    """State what attention computes: `softmax(mod(q · kᵀ · softmax_scale) restricted to the visible keys) · v`.

    Args:
        num_q_heads: query heads, a multiple of `num_kv_heads`.
        num_kv_heads: key/value heads; query head `h` reads KV head `h // group_size`.
        head_dim: width of queries and keys, a multiple of 8 from 16 to 512. Of latents, see `latent`.
        head_dim_v: width of values and outputs, in the same range; `head_dim` when not given.
        dtype: of queries and outputs: float16, bfloat16 or float32.
        kv_dtype: of the cache: float8_e4m3fn, float8_e5m2 or int8 (with scales in the cache), or `dtype`, which it is
            when not given.
        softmax_scale: positive factor on the scores; `head_dim ** -0.5` when not given. Latents need one. GPU kernels
            can return NaN or zeros where the magnitude of `score * log2(e)` is beyond about 2^27.
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
            rounded to 3-bit mantissas. Faster where a kernel has such products (`print(plan)` says so): the Hopper
            kernel, on long prompts with head_dim 128, and the Hopper MLA kernel, for more than 16 rows (query tokens
            × heads) of a sequence, where that is predicted to be fastest. The Hopper kernel for chosen keys multiplies
            in bfloat16, and needs this for records with more than 32 heads. Other kernels ignore it.
        latent: the cache holds one latent per token instead of keys and values: a latent is the key, and its first
            `head_dim_v` columns are the value (multi-head latent attention with absorbed projections, DeepSeek-V2,
            arXiv 2405.04434). There is one KV head. `head_dim_v` is a multiple of 16 from 16 to 512, and
            `head_dim - head_dim_v`, the rotary columns, is one from 0 to 128. `AttentionSpec.mla` names these widths.
        score: a function on scores, from `quire.score`; None for none. It gets scores after softcap and ALiBi.
        mask: a function that says which keys a query sees, from `quire.mask`; None for none. It counts in addition to
            `causal`, the window, and a batch's intervals or trees.
        kv_format: of a cache below eight bits, in place of `kv_dtype`, which is then uint8: "int4", "nvfp4" or "k8v4".
            `PagedKVCache` says what they hold. Not for latents.

    Attributes:
        cache_signature: the `PagedKVCache.signature` of a cache for this spec.
        extras: the tensors that score and mask read, which go to `attention` in this order.

    Raises:
        TypeError: a field is of the wrong type.
        ValueError: a field is out of its range.
        UnsupportedError: a head dim or dtype that is not served.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, sliding_window=1024)
        >>> spec.group_size, spec.window  # query heads per KV head; keys seen to the left and to the right
        (4, (1023, 0))
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
    latent: bool
    kv_format: str | None
    score: Function | None
    mask: Function | None
    cache_signature: tuple[torch.dtype | str, int, int, int, bool] = field(init=False, repr=False, compare=False)
    extras: tuple[Extra, ...] = field(init=False, repr=False, compare=False)

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
        latent: bool = False,
        kv_format: str | None = None,
        score: Function | None = None,
        mask: Function | None = None,
    ) -> None:
        check_flag("latent", latent, "AttentionSpec.mla makes a spec with latents")
        heads_advice = "pass the heads of one tensor-parallel rank, not of the whole model"
        num_q_heads = check_integer("num_q_heads", num_q_heads, heads_advice, 1, MAX_HEADS)
        num_kv_heads = check_integer("num_kv_heads", num_kv_heads, heads_advice, 1, MAX_HEADS)
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_q_heads must be a multiple of num_kv_heads, got {num_q_heads} and {num_kv_heads}; {heads_advice}"
            )
        if latent:
            if num_kv_heads != 1:
                raise ValueError(
                    f"num_kv_heads must be 1 where latent=True, got {num_kv_heads}; all query heads read one latent"
                )
            head_dim = check_integer("head_dim", head_dim, "it is kv_lora_rank + qk_rope_head_dim")
            head_dim_v = check_integer("head_dim_v", head_dim if head_dim_v is None else head_dim_v, "the latent rank")
            if head_dim_v > head_dim:
                raise ValueError(
                    f"head_dim_v must be at most head_dim where latent=True, got {head_dim_v} and {head_dim}; "
                    "values are the first columns of keys"
                )
            _check_latent_dims("head_dim_v", head_dim_v, "head_dim - head_dim_v", head_dim - head_dim_v)
        else:
            head_dim = _check_head_dim("head_dim", head_dim)
            head_dim_v = head_dim if head_dim_v is None else _check_head_dim("head_dim_v", head_dim_v)
        dtype = _check_dtype("dtype", dtype, QUERY_DTYPES, "cast the queries")
        check_format(kv_format)
        if kv_format is not None:
            if latent:
                raise UnsupportedError(f"kv_format must be left out where latent=True, got {kv_format!r}; use e4m3")
            if kv_dtype not in (None, FORMAT_DTYPE):
                raise ValueError(
                    f"kv_dtype must be left out with kv_format {kv_format!r}, got {describe(kv_dtype)}; it holds bytes"
                )
            check_widths(kv_format, head_dim, head_dim_v)
            kv_dtype = FORMAT_DTYPE
        else:
            kv_dtype = dtype if kv_dtype is None else kv_dtype
            advice = "view the cache as its real dtype (engines often hand fp8 over as uint8)"
            _check_dtype("kv_dtype", kv_dtype, (dtype, *(LATENT_FP8_DTYPES if latent else QUANTISED_DTYPES)), advice)
        if softmax_scale is None and latent:
            raise ValueError(
                "softmax_scale must be given where latent=True, got None; the width of a latent does not say it: "
                "pass (qk_nope_head_dim + qk_rope_head_dim) ** -0.5 of the model"
            )
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
            "latent": latent,
            "kv_format": kv_format,
            "score": score,
            "mask": mask,
            "extras": extras_of((score, mask), num_q_heads=num_q_heads, num_kv_heads=num_kv_heads),
            "cache_signature": (kv_format or kv_dtype, num_kv_heads, head_dim, head_dim_v, latent),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        """Return the hash of all fields, computed once: a server looks up choices by spec in every step."""
        found = self.__dict__.get("_hash")
        if found is None:
            found = hash(tuple(getattr(self, field.name) for field in fields(self) if field.compare))
            object.__setattr__(self, "_hash", found)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Leave out cached values: hashes differ between processes."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    @classmethod
    def mla(
        cls,
        *,
        num_q_heads: int,
        softmax_scale: float,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        **fields: Any,
    ) -> "AttentionSpec":
        """Return the spec of multi-head latent attention (MLA) with absorbed projections, in a model's own names.

        Queries have been multiplied with the up-projection of the keys. Outputs are still latents: multiply them with
        the up-projection of the values.

        Args:
            num_q_heads: query heads of this rank.
            softmax_scale: `(qk_nope_head_dim + qk_rope_head_dim) ** -0.5` of the model, times the square of mscale
                where YaRN is used.
            kv_lora_rank: columns of a latent that are the value too, a multiple of 16 from 16 to 512.
            qk_rope_head_dim: rotary columns after them, a multiple of 16 from 0 to 128.
            **fields: further fields of the spec, such as `dtype`, `kv_dtype` or `causal`.

        Returns:
            A spec with `latent=True`, one KV head, head_dim `kv_lora_rank + qk_rope_head_dim` and head_dim_v
            `kv_lora_rank`.

        Raises:
            TypeError: a field is of the wrong type.
            ValueError: a field is out of its range.
            UnsupportedError: a width or dtype that is not served.

        Examples:
            >>> spec = quire.AttentionSpec.mla(num_q_heads=128, softmax_scale=192**-0.5)
            >>> spec.head_dim, spec.head_dim_v, spec.num_kv_heads
            (576, 512, 1)
        """
        for name in ("num_kv_heads", "head_dim", "head_dim_v", "latent"):
            if name in fields:
                raise TypeError(f"{name} must be left out of mla, got {describe(fields[name])}; the widths say it")
        rank = check_integer("kv_lora_rank", kv_lora_rank, "512 is DeepSeek's")
        rope = check_integer("qk_rope_head_dim", qk_rope_head_dim, "64 is DeepSeek's")
        _check_latent_dims("kv_lora_rank", rank, "qk_rope_head_dim", rope)
        return cls(
            num_q_heads=num_q_heads,
            num_kv_heads=1,
            head_dim=rank + rope,
            head_dim_v=rank,
            softmax_scale=softmax_scale,
            latent=True,
            **fields,
        )

    @property
    def kv_lora_rank(self) -> int:
        """Columns of a latent that are the value too, where `latent`."""
        return self.head_dim_v

    @property
    def qk_rope_head_dim(self) -> int:
        """Rotary columns of a latent, where `latent`."""
        return self.head_dim - self.head_dim_v

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in the cache, for all KV heads; with the scales of a `kv_format`, and without others."""
        if self.kv_format is not None:
            k, v, _ = FORMATS[self.kv_format]
            return self.num_kv_heads * (k.bytes_of(self.head_dim) + v.bytes_of(self.head_dim_v))
        width = self.head_dim if self.latent else self.head_dim + self.head_dim_v
        return self.num_kv_heads * width * self.kv_dtype.itemsize

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def has_bounds(self) -> bool:
        """Whether the mask has bounds."""
        return self.mask is not None and self.mask.bounds != ""

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
    if not 16 <= dim <= MAX_HEAD_DIM or dim % 8:
        raise UnsupportedError(
            f"{name} must be a multiple of 8 from 16 to {MAX_HEAD_DIM}, got {describe(value)}; {advice}"
        )
    return dim


def _check_latent_dims(rank_name: str, rank: int, rope_name: str, rope: int) -> None:
    for name, dim, low, high in ((rank_name, rank, 16, 512), (rope_name, rope, 0, 128)):
        if not low <= dim <= high or dim % 16:
            raise UnsupportedError(
                f"{name} must be a multiple of 16 from {low} to {high} where latent=True, got {describe(dim)}; "
                "pad the latents"
            )


def _check_dtype(name: str, value: Any, served: tuple[torch.dtype, ...], advice: str) -> torch.dtype:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype, got {describe(value)}; pass torch.float16, for instance")
    if value not in served:
        raise UnsupportedError(f"{name} must be one of {dtype_names(served)}, got {value}; {advice}")
    return value
