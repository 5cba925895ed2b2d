"""Checks of the arguments of `attention` and `merge_states`, and of where results go."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.checks.cache import check_cache, check_new
from quire.checks.norm_rope import check_norm_rope
from quire.dispatch.request import Bounds
from quire.errors import UnsupportedError, check_no_gradient, check_served, check_tensor, describe
from quire.norm_rope import QKNorm, Rope
from quire.score_functions import MOST_ELEMENTS, Extra
from quire.spec import QUERY_DTYPES, AttentionSpec, dtype_names
from quire.state import State

PER_HEAD_DTYPES = (*QUERY_DTYPES, torch.float64)  # of sinks and slopes


class NewTokens(NamedTuple):
    """What `attention` is given of a step's new tokens, as it is given; `check_attention` checks it."""

    k: torch.Tensor
    v: torch.Tensor | None  # None only for latents without rotary columns
    slot_mapping: torch.Tensor
    rope: Rope | None
    qk_norm: QKNorm | None


class Planned(Protocol):
    """What the checks read of a plan, which `quire.plan` makes with their help."""

    @property
    def spec(self) -> AttentionSpec: ...
    @property
    def batch(self) -> Batch: ...
    @property
    def bounds(self) -> Bounds: ...


def check_attention(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
    cache: PagedKVCache,
    plan: Planned,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    new: NewTokens | None = None,
    extras: Any = (),
) -> None:
    """Raise unless the inputs of `attention` fit together; `new` is what is given of the step's new tokens."""
    try:
        spec, batch, bounds = plan.spec, plan.batch, plan.bounds
        if isinstance(q, tuple):
            first, q_pe = q
            width, pair_fits = spec.head_dim_v, spec.latent and _is_rope(q_pe, first, spec)
        else:
            first, width, pair_fits = q, spec.head_dim, True
        num_tokens, num_heads, head_dim = first.shape
        fits = (
            pair_fits
            and num_heads == spec.num_q_heads
            and head_dim == width
            and first.dtype is spec.dtype
            and first.stride(2) == 1
            and cache.signature == spec.cache_signature
            and first.device == cache.device == batch.device
            and num_tokens <= bounds.num_tokens
            and (batch.cu_seqlens_q is not None or num_tokens >= batch.num_seqs)
            and batch.paged is (cache.layout != "THD")
            and (batch.max_tokens is None or num_tokens <= batch.max_tokens)
            and (
                batch.table_width is None
                or batch.table_width * cache.page_size >= bounds.max_seq_len
                or (batch.chosen is not None and batch.chosen.are_slots)
            )
            and (_is_per_head(sinks, first) if spec.sinks else sinks is None)
            and (_is_per_head(alibi_slopes, first) if spec.alibi else alibi_slopes is None)
            and (_are_extras(extras, spec, first.device) if spec.extras else extras == ())
            and not (first.requires_grad and torch.is_grad_enabled())
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):
        fits = False
    if not fits:
        _explain_attention(q, cache, plan, sinks, alibi_slopes, extras)
    if new is not None:
        num_tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        if new.rope is not None or new.qk_norm is not None:
            check_norm_rope(*new, cache, num_tokens)
        check_new(new.k, new.v, new.slot_mapping, cache, num_tokens)


def _is_rope(q_pe: torch.Tensor | None, q_nope: torch.Tensor, spec: AttentionSpec) -> bool:
    """Return whether the rotary queries fit; None fits where a latent has no rotary columns."""
    if q_pe is None:
        return spec.head_dim == spec.head_dim_v
    return (
        q_pe.shape == (*q_nope.shape[:2], spec.head_dim - spec.head_dim_v)
        and q_pe.dtype is q_nope.dtype
        and q_pe.stride(2) == 1
        and q_pe.device == q_nope.device
        and not (q_pe.requires_grad and torch.is_grad_enabled())
    )


def check_extra_cache(extra: Any, cache: PagedKVCache, plan: Any) -> None:
    """Raise unless `extra_cache` is there where the plan's batch has lists of its keys, and is like the cache."""
    if plan.batch.extra_chosen is None:
        raise ValueError(
            f"extra_cache must be left out where the batch has no extra_chosen, got {describe(extra)}; "
            "say in the batch which of its keys are seen"
        )
    check_like(extra, cache)


def check_like(extra: Any, cache: PagedKVCache) -> None:
    """Raise unless a second cache is one like the cache."""
    if not isinstance(extra, PagedKVCache):
        raise TypeError(
            f"extra_cache must be a PagedKVCache where the batch has extra_chosen, got {describe(extra)}; "
            "pass the cache that its slots are in"
        )
    if extra.signature != cache.signature or extra.layout != cache.layout:
        raise ValueError(
            f"extra_cache must have the layout, widths and dtype of cache, got {extra} and {cache}; "
            "pages may be of another size"
        )
    if extra.device != cache.device:
        raise ValueError(f"extra_cache must be on cache's device {cache.device}, got {extra.device}; move it")
    if extra.scale_kind not in ("none", "record"):
        raise UnsupportedError(
            "extra_cache must have no scale but those of records, got one for all of it; merge two calls with "
            "quire.merge_states"
        )


def _explain_attention(q: Any, cache: Any, plan: Any, sinks: Any, alibi_slopes: Any, extras: Any) -> None:
    if not isinstance(getattr(plan, "spec", None), AttentionSpec):
        check_tensor("q", q[0] if isinstance(q, tuple) and len(q) == 2 else q, "pass the queries of all sequences")
        raise TypeError(f"plan must be a Plan, got {describe(plan)}; make it with `quire.plan`")
    spec, batch, bounds = plan.spec, plan.batch, plan.bounds
    if spec.latent and isinstance(q, tuple):
        if len(q) != 2:
            raise TypeError(f"q must be a tensor or the pair (q_nope, q_pe), got {len(q)} of them; pass both")
        q_nope, q_pe = _explain_queries("q_nope", q[0], spec, spec.kv_lora_rank), q[1]
        if q_pe is not None or spec.qk_rope_head_dim:
            q_pe = _explain_queries("q_pe", q_pe, spec, spec.qk_rope_head_dim)
            if q_pe.shape[0] != q_nope.shape[0] or q_pe.device != q_nope.device:
                raise ValueError(
                    f"q_pe must have q_nope's {q_nope.shape[0]} tokens on {q_nope.device}, "
                    f"got {q_pe.shape[0]} on {q_pe.device}; pass both halves of the same queries"
                )
        q = q_nope
    else:
        _explain_queries("q", q, spec, spec.head_dim)
    check_cache(cache, spec)
    if not q.device == cache.device == batch.device:
        raise ValueError(
            f"q, cache and batch must be on one device, got {q.device}, {cache.device} and {batch.device}; "
            "move them together"
        )
    if batch.cu_seqlens_q is None and q.shape[0] < batch.num_seqs:
        raise ValueError(
            f"q must have a token for each of {batch.num_seqs} sequences, got {q.shape[0]}; "
            "a batch without cu_seqlens_q has one query each"
        )
    if q.shape[0] > bounds.num_tokens:
        raise ValueError(
            f"q must have at most the {bounds.num_tokens} tokens planned for, got {q.shape[0]}; "
            f"plan with num_tokens={q.shape[0]}"
        )
    if batch.max_tokens is not None and q.shape[0] > batch.max_tokens:
        raise ValueError(
            f"{batch.per_token} must have an entry for each of q's {q.shape[0]} tokens, got {batch.max_tokens}; "
            "give it one for each token of the step"
        )
    if batch.paged and cache.layout == "THD":
        raise ValueError(
            "cache must be paged, as the plan's batch is, got layout THD; "
            "describe sequences without pages with Batch.varlen"
        )
    if not batch.paged and cache.layout != "THD":
        raise ValueError(
            f"cache must be of layout THD, as the plan's batch has no pages, got {cache.layout}; "
            "give the batch a page table"
        )
    has_slots = batch.chosen is not None and batch.chosen.are_slots
    if not has_slots and batch.table_width is not None and batch.table_width * cache.page_size < bounds.max_seq_len:
        raise ValueError(
            f"page_table must cover max_seq_len = {bounds.max_seq_len} keys, got {batch.table_width} pages of "
            f"{cache.page_size}; widen the table or plan with the true bound"
        )
    _check_per_head("sinks", sinks, spec.sinks, q)
    _check_per_head("alibi_slopes", alibi_slopes, spec.alibi, q)
    _check_extras(extras, spec, q.device)


def _explain_queries(name: str, q: Any, spec: AttentionSpec, width: int) -> torch.Tensor:
    check_tensor(name, q, "pass the queries of all sequences")
    if q.dim() != 3 or q.shape[1:] != (spec.num_q_heads, width):
        raise ValueError(
            f"{name} must be [num_tokens, {spec.num_q_heads}, {width}] as the spec says, got {list(q.shape)}; "
            "reshape it"
        )
    if q.dtype is not spec.dtype:
        raise ValueError(f"{name} must be {spec.dtype}, got {q.dtype}; cast it, or make a spec for it")
    if q.stride(2) != 1 and not q.is_contiguous():
        raise ValueError(
            f"{name} must have a contiguous head, got strides {q.stride()}; copy it with `{name}.contiguous()`"
        )
    check_no_gradient(name, q)
    return q


def _are_extras(extras: Any, spec: AttentionSpec, device: torch.device) -> bool:
    return len(extras) == len(spec.extras) and all(map(_is_extra, extras, spec.extras, [device] * len(extras)))


def _is_extra(tensor: torch.Tensor, extra: Extra, device: torch.device) -> bool:
    return (
        tensor.dtype is extra.dtype
        and tensor.device == device
        and tensor.dim() == len(extra.shape)
        and all(size == known or known is None for size, known in zip(tensor.shape, extra.shape, strict=True))
        and 0 < tensor.numel() <= MOST_ELEMENTS
        and tensor.is_contiguous()
    )


def _check_extras(extras: Any, spec: AttentionSpec, device: torch.device) -> None:
    names = ", ".join(extra.name for extra in spec.extras) or "nothing"
    if not isinstance(extras, list | tuple) or len(extras) != len(spec.extras):
        got = len(extras) if isinstance(extras, list | tuple) else describe(extras)
        raise ValueError(f"extras must be a tuple of {names}, as the spec's functions read, got {got}; pass each once")
    for extra, tensor in zip(spec.extras, extras, strict=True):
        check_tensor(f"extras: {extra.name}", tensor, "the spec's functions read it")
        if not _is_extra(tensor, extra, device):
            sizes = ", ".join("any" if size is None else str(size) for size in extra.shape)
            raise ValueError(
                f"extras: {extra.name} must be contiguous {extra.dtype} [{sizes}] on {device} with at least one and "
                f"fewer than 2^31 numbers, got {describe(tensor)} with strides {tensor.stride()}; mend it, or declare "
                "it otherwise"
            )


def _is_per_head(tensor: torch.Tensor | None, q: torch.Tensor) -> bool:
    return (
        tensor is not None
        and tensor.shape == q.shape[1:2]
        and tensor.dtype in PER_HEAD_DTYPES
        and tensor.device == q.device
        and tensor.is_contiguous()
    )


def _check_per_head(name: str, tensor: Any, wanted: bool, q: torch.Tensor) -> None:
    if (tensor is not None) != wanted:
        raise ValueError(
            f"{name} must be given exactly when the spec has it, got {'none' if wanted else 'one'}; "
            "set it in the spec too"
        )
    if tensor is None:
        return
    num_heads = q.shape[1]
    check_tensor(name, tensor, "it has one entry per query head")
    if tensor.dtype not in PER_HEAD_DTYPES:
        raise ValueError(f"{name} must be of dtype {dtype_names(PER_HEAD_DTYPES)}, got {tensor.dtype}; cast it")
    if not _is_per_head(tensor, q):
        raise ValueError(
            f"{name} must be contiguous [num_q_heads] = [{num_heads}] on {q.device}, got {list(tensor.shape)} with "
            f"strides {tensor.stride()} on {tensor.device}; slice it to this rank's heads"
        )


def check_varlen(plan: Any) -> None:
    """Raise if a plan is for latents, which are always paged."""
    if getattr(getattr(plan, "spec", None), "latent", False):
        raise UnsupportedError("plan must be for keys and values, got one for latents; call `attention` with pages")


def check_out(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless an output buffer fits."""
    try:
        fits = (
            tensor.shape == shape
            and tensor.dtype is dtype
            and tensor.device == device
            and tensor.is_contiguous()
            and not tensor.requires_grad
        )
    except (AttributeError, RuntimeError, TypeError):
        fits = False
    if not fits:
        _explain_out(name, tensor, shape, dtype, device)


def check_out_scale(out_scale: Any, kernel: str, device: torch.device) -> None:
    """Raise unless a plan's kernel quantises its output, and the scale fits."""
    if kernel == "mla_hopper":
        raise UnsupportedError(
            "out_scale must be left out for the kernel mla_hopper, which does not quantise its output, got "
            f"{describe(out_scale)}; plan with kernel='mla', or quantise out afterwards"
        )
    check_tensor("out_scale", out_scale, "leave it out for an out of the queries' dtype")
    if out_scale.dtype is not torch.float32 or out_scale.numel() != 1 or out_scale.device != device:
        raise ValueError(
            f"out_scale must be one float32 number on {device}, got {describe(out_scale)}; "
            "scales for blocks, tokens or heads are not served"
        )


def _explain_out(name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    check_tensor(name, tensor, "leave it out to have it allocated")
    if tensor.shape != shape or tensor.dtype is not dtype or tensor.device != device:
        advice = "leave it out to have it allocated"
        if tensor.dtype is torch.float8_e4m3fn is not dtype:
            advice = "pass out_scale to have it quantised"
        raise ValueError(
            f"{name} must be {list(shape)} {dtype} on {device}, got {list(tensor.shape)} {tensor.dtype} on "
            f"{tensor.device}; {advice}"
        )
    if not tensor.is_contiguous() and (tensor.stride(-1) != 1 or _overlaps(tensor)):
        raise ValueError(
            f"{name} must have a contiguous last dimension and rows that do not overlap, "
            f"got strides {tensor.stride()}; leave it out to have it allocated"
        )
    check_no_gradient(name, tensor, advice="detach it")


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether two elements may have one address."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def check_merge_states(states: Sequence[State]) -> None:
    """Raise unless states can be merged."""
    if isinstance(states, State) or not isinstance(states, list | tuple):
        raise TypeError(f"states must be a list of states, got {describe(states)}; put a single state in a list")
    if not states:
        raise ValueError("states must hold at least one state, got none; an empty set of keys has out 0 and lse -inf")
    for i, state in enumerate(states):
        name = f"states[{i}]"
        if not isinstance(state, State):
            raise TypeError(f"{name} must be a State, got {describe(state)}; call State(out, lse)")
        out, lse = state
        check_tensor(f"{name}.out", out, "attention returns it with return_lse=True")
        check_tensor(f"{name}.lse", lse, "attention returns it with return_lse=True")
        if out.dim() != 3:
            raise ValueError(
                f"{name}.out must be [num_tokens, num_q_heads, head_dim_v], got {list(out.shape)}; see State"
            )
        if out.dtype not in QUERY_DTYPES:
            raise UnsupportedError(f"{name}.out must be of dtype {dtype_names(QUERY_DTYPES)}, got {out.dtype}; cast it")
        first = states[0].out
        if out.shape != first.shape or out.dtype is not first.dtype or out.device != first.device:
            raise ValueError(
                f"{name}.out must be like states[0].out, {list(first.shape)} {first.dtype} on {first.device}, "
                f"got {list(out.shape)} {out.dtype} on {out.device}; cast or move it"
            )
        if lse.shape != out.shape[:2] or lse.dtype is not torch.float32 or lse.device != out.device:
            raise ValueError(
                f"{name}.lse must be {list(out.shape[:2])} torch.float32 on {out.device}, "
                f"got {list(lse.shape)} {lse.dtype} on {lse.device}; see State"
            )
        check_no_gradient(name, out, lse)
    check_served("states", states[0].out.device)
