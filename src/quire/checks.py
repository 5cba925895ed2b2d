"""Checks of the verbs' arguments: types, shapes, dtypes, strides and devices, which the host knows.

`cache_checks` has those of the verbs that change a cache. Nothing here reads from a device. `batch_check` checks the
contents of a batch's tensors, if they are on a CPU.

A verb that runs once per layer tests everything in one expression and looks for the reason only if that fails.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.cache_checks import check_new
from quire.dispatch.config import KernelConfig
from quire.dispatch.device import is_served_by_torch
from quire.dispatch.request import Bounds
from quire.errors import UnsupportedError, check_flag, check_integer, check_served, check_tensor, describe
from quire.norm_rope import QKNorm, Rope
from quire.norm_rope_checks import check_norm_rope
from quire.spec import QUERY_DTYPES, UNBOUNDED, AttentionSpec, dtype_names
from quire.state import State

MAX_SPLITS = 128
MAX_DRAFTS = 64  # of a sequence: bits of a word of `tree_bits`
MAX_TOKENS = (1 << 31) - 1  # of a batch: cu_seqlens_q is int32
PER_HEAD_DTYPES = (*QUERY_DTYPES, torch.float64)  # of sinks and slopes
WORKSPACE_ALIGNMENT = 16  # bytes; kernels are compiled for it


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
            and (batch.table_width is None or batch.table_width * cache.page_size >= bounds.max_seq_len)
            and (_is_per_head(sinks, first) if spec.sinks else sinks is None)
            and (_is_per_head(alibi_slopes, first) if spec.alibi else alibi_slopes is None)
            and not (first.requires_grad and torch.is_grad_enabled())
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):
        fits = False
    if not fits:
        _explain_attention(q, cache, plan, sinks, alibi_slopes)
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


def _explain_attention(q: Any, cache: Any, plan: Any, sinks: Any, alibi_slopes: Any) -> None:
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
        name = "key_begin" if batch.tree_bits is None else "tree_bits"
        raise ValueError(
            f"{name} must have an entry for each of q's {q.shape[0]} tokens, got {batch.max_tokens}; "
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
    if batch.table_width is not None and batch.table_width * cache.page_size < bounds.max_seq_len:
        raise ValueError(
            f"page_table must cover max_seq_len = {bounds.max_seq_len} keys, got {batch.table_width} pages of "
            f"{cache.page_size}; widen the table or plan with the true bound"
        )
    _check_per_head("sinks", sinks, spec.sinks, q)
    _check_per_head("alibi_slopes", alibi_slopes, spec.alibi, q)


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
    if q.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{name} must not require a gradient, got one that does; "
            "Quire has no backward pass: call it under torch.no_grad()"
        )
    return q


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


def check_cache(cache: Any, spec: AttentionSpec) -> None:
    """Raise unless a cache fits a spec."""
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"cache must be a PagedKVCache, got {describe(cache)}; wrap the layer's k and v in one")
    if cache.is_latent is not spec.latent:
        wanted, got, advice = "keys and values", "latents", "make the spec with `AttentionSpec.mla`"
        if spec.latent:
            wanted, got, advice = got, wanted, "make it with `PagedKVCache.from_latents`"
        raise ValueError(f"cache must hold {wanted} as the spec says, got {got}; {advice}")
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
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{name} must not require a gradient, got one that does; Quire has no backward pass: detach it"
        )


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
        if (out.requires_grad or lse.requires_grad) and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name} must not require a gradient, got one that does; "
                "Quire has no backward pass: call it under torch.no_grad()"
            )
    check_served("states", states[0].out.device)


def check_plan_arguments(
    spec: AttentionSpec,
    batch: Batch,
    *,
    max_query_len: int,
    max_seq_len: int,
    num_tokens: int | None,
    num_splits: int | None,
    config: KernelConfig | None,
    batch_invariant: bool,
    workspace: torch.Tensor | None,
    kernel: str | None,
    kernels: Sequence[str],
) -> tuple[Bounds, int | None]:
    """Raise unless the arguments of `plan` are sound; return the bounds and num_splits as plain integers.

    Args:
        spec, batch, max_query_len, max_seq_len, num_tokens, num_splits, config, batch_invariant, workspace, kernel:
            as for `quire.plan`.
        kernels: names that `kernel` may be.

    Returns:
        The bounds, with num_tokens `num_seqs * max_query_len` where None was given, and num_splits.
    """
    if not isinstance(spec, AttentionSpec):
        raise TypeError(f"spec must be an AttentionSpec, got {describe(spec)}; make one for the layer")
    if not isinstance(batch, Batch):
        raise TypeError(f"batch must be a Batch, got {describe(batch)}; make one from the page table and the lengths")
    check_served("batch", batch.device)
    if spec.latent and not batch.paged:
        raise UnsupportedError(
            "batch must be paged for a spec with latents, got one without pages; give it a page table"
        )
    advice = "pass an upper bound over the batch"
    max_query_len = check_integer("max_query_len", max_query_len, advice, 0, UNBOUNDED)
    max_seq_len = check_integer("max_seq_len", max_seq_len, advice, 0, UNBOUNDED)
    if num_tokens is None:
        num_tokens = min(batch.num_seqs * max_query_len, MAX_TOKENS)
    num_tokens = check_integer("num_tokens", num_tokens, advice, 0, MAX_TOKENS)
    if batch.cu_seqlens_q is None and max_query_len != 1:
        raise ValueError(
            f"max_query_len must be 1 where the batch has no cu_seqlens_q, got {max_query_len}; "
            "say in the batch which queries are whose"
        )
    if batch.max_tokens is not None:
        name = "key_begin" if batch.tree_bits is None else "tree_bits"
        check_per_token(spec, name)
        if batch.tree_bits is not None and max_query_len > MAX_DRAFTS:
            raise UnsupportedError(
                f"max_query_len must be at most {MAX_DRAFTS} where the batch has tree_bits, got {max_query_len}; "
                "a word has a bit for each draft of a sequence: put prompts into another batch"
            )
    if num_splits is not None:
        num_splits = check_integer("num_splits", num_splits, "leave it out to have it chosen", 1, MAX_SPLITS)
    if config is not None and not isinstance(config, KernelConfig):
        raise TypeError(f"config must be a KernelConfig, got {describe(config)}; leave it out to have it chosen")
    check_flag("batch_invariant", batch_invariant, "pass True for results that do not depend on the rest of the batch")
    if kernel is not None and not isinstance(kernel, str):
        raise TypeError(f"kernel must be the name of a kernel, got {describe(kernel)}; leave it out to have it chosen")
    if kernel is not None and kernel not in kernels:
        raise ValueError(f"kernel must be one of {', '.join(kernels)}, got {kernel!r}; leave it out to have it chosen")
    if workspace is not None:
        _check_workspace(workspace, batch.device)
    if is_served_by_torch(batch.device):
        for name, value in (
            ("kernel", kernel),
            ("num_splits", num_splits),
            ("config", config),
            ("batch_invariant", batch_invariant or None),
            ("workspace", workspace if workspace is not None and workspace.numel() else None),
        ):
            if value is not None:
                raise UnsupportedError(
                    f"{name} must be left out for CPU tensors, which PyTorch serves, got {describe(value)}; "
                    "plan for a GPU"
                )
    return Bounds(max_query_len, max_seq_len, num_tokens), num_splits


def check_per_token(spec: AttentionSpec, name: str) -> None:
    """Raise if the spec has a window or ALiBi that conflicts with `name`, the batch's own mask."""
    for window in ("sliding_window", "sliding_window_right"):
        if getattr(spec, window) is not None:
            by_hand = "quire.intervals.sliding_window" if name == "key_begin" else "quire.draft_trees.windowed"
            raise ValueError(
                f"{window} must be left out where the batch has {name}, got {getattr(spec, window)}; "
                f"say it by key_begin, for which there is {by_hand}"
            )
    if name == "tree_bits" and spec.alibi:
        raise UnsupportedError(
            "alibi must be False where the batch has tree_bits, got True; drafts that branch share positions"
        )


def _check_workspace(workspace: Any, device: torch.device) -> None:
    advice = "allocate it with torch.zeros(quire.workspace_size(...), dtype=torch.uint8, device=...)"
    check_tensor("workspace", workspace, advice)
    if workspace.dtype is not torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
        raise ValueError(
            f"workspace must be uint8, contiguous and of one dimension, got {describe(workspace)} with strides "
            f"{workspace.stride()}; {advice}"
        )
    if workspace.device != device:
        raise ValueError(f"workspace must be on the batch's device {device}, got {workspace.device}; {advice}")
    if workspace.data_ptr() % WORKSPACE_ALIGNMENT:
        raise ValueError(
            f"workspace must be aligned to {WORKSPACE_ALIGNMENT} bytes, got address {workspace.data_ptr():#x}; {advice}"
        )


def check_limits(
    spec: AttentionSpec, max_num_seqs: int, max_num_tokens: int, max_seq_len: int, batch_invariant: bool
) -> tuple[int, int, int]:
    """Raise unless a server's limits are sound; return them as plain integers, in this order."""
    if not isinstance(spec, AttentionSpec):
        raise TypeError(f"spec must be an AttentionSpec, got {describe(spec)}; make one for the layer")
    check_flag("batch_invariant", batch_invariant, "say whether the plans are")
    advice = "pass the server's limit"
    return (
        check_integer("max_num_seqs", max_num_seqs, advice, 1, UNBOUNDED),
        check_integer("max_num_tokens", max_num_tokens, advice, 1, MAX_TOKENS),
        check_integer("max_seq_len", max_seq_len, advice, 1, UNBOUNDED),
    )
