"""The verbs: check, then launch.

This is the first of the two frames between a model layer and the GPU. Checks compare host numbers (shapes, dtypes, strides); nothing is read
from the device, and nothing is launched or written unless all of them pass.
"""

from collections.abc import Sequence

import torch
import triton

from quire import ops
from quire.cache import PagedKVCache
from quire.errors import UnsupportedError
from quire.kernels import combine as merge
from quire.kernels import copy, write
from quire.kernels import portable_tmp as gpu
from quire.kernels.cpu import attention as cpu_attention
from quire.kernels.cpu import cache_ops
from quire.kernels.cpu import merge as cpu_merge
from quire.kernels.hopper import launch as hopper
from quire.plan import Plan
from quire.spec import QUANTISED_DTYPES, QUERY_DTYPES
from quire.state import State


def attention(
    q: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
    cache: PagedKVCache,
    plan: Plan,
    *,
    sinks: torch.Tensor | None = None,  # [num_q_heads]
    alibi_slopes: torch.Tensor | None = None,  # [num_q_heads]
    out: torch.Tensor | State | None = None,
    return_lse: bool = False,
) -> torch.Tensor | State:
    """Attend from a batch's queries to its cached keys and values: decode, drafted tokens and (chunks of) prefill, in any mix.

    The step's own keys and values must be in the cache already (`write_kv`). Rows of `q` that no sequence owns are left as they are in `out`.

    Args:
        q: queries, [num_tokens, num_q_heads, head_dim], of the spec's dtype; any strides with a contiguous head.
        cache: the layer's pages.
        plan: how to launch, from `quire.plan`.
        sinks: [num_q_heads], natural-log logits, where the spec has sinks.
        alibi_slopes: [num_q_heads], where the spec has ALiBi.
        out: where to write: a tensor [num_tokens, num_q_heads, head_dim_v] like `q`, or a `State` to have the lse written as well.
        return_lse: return a `State` with the natural-log lse, [num_tokens, num_q_heads] float32. With sinks, it includes them.

    Returns:
        out, or `State(out, lse)` when the lse was asked for.

    Raises:
        ValueError: an argument does not fit the plan; nothing was written.
        UnsupportedError: nothing serves the request.
    """
    if torch.compiler.is_compiling():
        state = ops.attention(q, cache, plan, sinks, alibi_slopes)
        if out is None:
            return state if return_lse else state.out
        if not isinstance(out, State):
            out = State(out.copy_(state.out), state.lse)
            return out if return_lse else out.out
        return State(out.out.copy_(state.out), out.lse.copy_(state.lse))
    check(q, cache, plan, sinks, alibi_slopes)
    spec = plan.spec
    if isinstance(out, State):
        out, lse = out
        check_out("out.lse", lse, (q.shape[0], spec.num_q_heads), torch.float32, q.device)
    else:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
    if out is None:
        out = torch.empty(q.shape[0], spec.num_q_heads, spec.head_dim_v, dtype=q.dtype, device=q.device)
    else:
        check_out("out", out, (q.shape[0], spec.num_q_heads, spec.head_dim_v), q.dtype, q.device)
    if plan.kernel == "torch":
        cpu_attention.attend(q, cache, spec, plan.batch, out, lse, sinks, alibi_slopes)
    else:
        launch = {"triton": gpu.launch, "hopper": hopper.launch}[plan.kernel]
        launch(q, cache, plan, out, lse, sinks, alibi_slopes)
    return out if lse is None else State(out, lse)


def varlen_attention(
    q: torch.Tensor,  # [num_tokens_q, num_q_heads, head_dim]
    k: torch.Tensor,  # [num_tokens_k, num_kv_heads, head_dim]
    v: torch.Tensor,  # [num_tokens_k, num_kv_heads, head_dim_v]
    plan: Plan,
    **options,
) -> torch.Tensor | State:
    """Attend to keys and values that are not paged; the plan's batch is `Batch.varlen(cu_seqlens_q, cu_seqlens_k)`.

    Args:
        q: queries, [num_tokens_q, num_q_heads, head_dim].
        k: keys, [num_tokens_k, num_kv_heads, head_dim].
        v: values, [num_tokens_k, num_kv_heads, head_dim_v].
        plan: from `quire.plan`.
        **options: `sinks`, `alibi_slopes`, `out` and `return_lse`, as for `attention`.

    Returns:
        out, or `State(out, lse)`.

    Raises:
        ValueError: an argument does not fit the plan; nothing was written.
    """
    return attention(q, PagedKVCache(k, v, "THD"), plan, **options)


def write_kv(
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim_v]
    cache: PagedKVCache,
    slot_mapping: torch.Tensor,  # [num_tokens] int64
) -> None:
    """Write new keys and values into their slots, quantising on the way where the cache is fp8 or int8.

    Stored values are `x / scale`, rounded half to even and saturated at ±448 (e4m3), ±57,344 (e5m2) or ±127 (int8); NaN stays NaN, and is 0 in int8.
    Scales per tensor or per head are used as they are, and are 1 where the cache has none; scales per token and head are computed (largest finite
    magnitude over the largest stored value; 1 for a token of zeros) and written too.

    Args:
        k: new keys, [num_tokens, num_kv_heads, head_dim]; any strides with a contiguous head.
        v: new values, [num_tokens, num_kv_heads, head_dim_v].
        cache: the layer's pages, changed in place.
        slot_mapping: [num_tokens] int64, `page * page_size + slot` of each token; negative to leave a token out. May be shorter than `k`, whose
            further tokens are then padding.

    Raises:
        ValueError: an argument does not fit the cache; nothing was written.
        UnsupportedError: the cache is not paged.
    """
    if torch.compiler.is_compiling():
        return ops.write_kv(k, v, cache, slot_mapping)
    if cache.layout == "THD":
        raise UnsupportedError("cache must be paged to be written by slot, got layout THD; index its tensors instead")
    for name, x, dim in (("k", k, cache.head_dim), ("v", v, cache.head_dim_v)):
        if x.dim() != 3 or x.shape != (k.shape[0], cache.num_kv_heads, dim) or x.stride(-1) != 1:
            raise ValueError(
                f"{name} must be [num_tokens, {cache.num_kv_heads}, {dim}] with a contiguous head, got {tuple(x.shape)} with strides {x.stride()}; "
                "reshape it as the cache"
            )
        if x.dtype not in QUERY_DTYPES or (cache.dtype not in QUANTISED_DTYPES and x.dtype != cache.dtype):
            raise ValueError(
                f"{name} must be of the cache's dtype {cache.dtype} (float16, bfloat16 or float32 for a quantised one), got {x.dtype}; cast it"
            )
    if (
        slot_mapping.dtype != torch.int64
        or slot_mapping.dim() != 1
        or slot_mapping.shape[0] > k.shape[0]
        or not slot_mapping.is_contiguous()
    ):
        raise ValueError(
            f"slot_mapping must be contiguous int64 [num_tokens] with at most {k.shape[0]} entries, got {slot_mapping.dtype} "
            f"{tuple(slot_mapping.shape)}; one slot per token of k"
        )
    if not k.device == v.device == cache.device == slot_mapping.device:
        raise ValueError(
            f"k, v, cache and slot_mapping must be on one device, got {k.device}, {v.device}, {cache.device} and {slot_mapping.device}; move them together"
        )
    if in_torch(k.device):
        cache_ops.write_kv(k, v, cache, slot_mapping)
    else:
        write.write(k, v, cache, slot_mapping)


def copy_pages(
    src: PagedKVCache,
    dst: PagedKVCache,
    page_pairs: torch.Tensor,  # [num_pairs, 2] int32 or int64
) -> None:
    """Copy whole pages, with their scales per token: copy on write within a cache, or swapping to and from a cache in host memory.

    Swapping is asynchronous where the host's cache is pinned (`tensor.pin_memory()`): synchronise before reading it on the host. Give it `page_pairs`
    on the host, and a copy within a GPU on that GPU: elsewhere they are moved first, and waited for.

    Args:
        src: cache to read.
        dst: cache to write, of the same layout, dtype and page shape; may be `src`. No page may be written twice, or read and written.
        page_pairs: [num_pairs, 2] (source page, destination page), on any device; pairs with a negative page are left out.

    Raises:
        ValueError: the caches differ in layout, dtype or page shape, or page_pairs is not such a tensor; nothing was written.
        UnsupportedError: the caches are not paged.
    """
    if src.layout == "THD":
        raise UnsupportedError("src must be paged to be copied by page, got layout THD; copy its tensors instead")
    if (src.layout, src.dtype, src.k.shape[1:], src.v.shape[1:], src.scale_kind) != (
        dst.layout,
        dst.dtype,
        dst.k.shape[1:],
        dst.v.shape[1:],
        dst.scale_kind,
    ):
        raise ValueError(
            f"dst must have src's layout, dtype, page shape and kind of scales, got {dst.layout} {dst.dtype} {tuple(dst.k.shape[1:])} and "
            f"{tuple(dst.v.shape[1:])} {dst.scale_kind} for {src.layout} {src.dtype} {tuple(src.k.shape[1:])} and {tuple(src.v.shape[1:])} "
            f"{src.scale_kind}; allocate both alike"
        )
    if (
        page_pairs.dim() != 2
        or page_pairs.shape[1] != 2
        or page_pairs.dtype not in (torch.int32, torch.int64)
        or not page_pairs.is_contiguous()
    ):
        raise ValueError(
            f"page_pairs must be contiguous [num_pairs, 2] int32 or int64, got {page_pairs.dtype} {tuple(page_pairs.shape)}; stack two columns"
        )
    if page_pairs.shape[0] == 0:
        return
    if src.device != dst.device:
        cache_ops.swap_pages(src, dst, page_pairs)
    elif in_torch(src.device):
        cache_ops.copy_pages(src, dst, page_pairs.to(src.device))
    else:
        copy.copy(src, dst, page_pairs.to(src.device))


def merge_states(states: Sequence[State]) -> State:
    """Merge states over disjoint sets of keys into the state over all of them, exactly.

    Order and grouping do not matter but for rounding: `merge_states([a, b, c])` is `merge_states([a, merge_states([b, c])])`.

    Args:
        states: one or more; all with out [num_tokens, num_q_heads, head_dim_v] of one dtype and lse [num_tokens, num_q_heads] float32.

    Returns:
        A new state: lse = log Σ exp(lse_i), out = Σ exp(lse_i - lse) out_i, summed in float32.

    Raises:
        ValueError: there is none, or shapes, dtypes or devices differ.
    """
    if not states:
        raise ValueError("states must hold at least one state, got none; an empty set of keys has out 0 and lse -inf")
    if torch.compiler.is_compiling():
        return ops.merge_states(states)
    first = states[0].out
    for i, (out, lse) in enumerate(states):
        if out.shape != first.shape or out.dtype != first.dtype or out.dim() != 3 or out.device != first.device:
            raise ValueError(
                f"states[{i}].out must be like states[0].out {tuple(first.shape)} {first.dtype}, got {tuple(out.shape)} {out.dtype}; cast it"
            )
        if lse.shape != out.shape[:2] or lse.dtype != torch.float32 or lse.device != out.device:
            raise ValueError(
                f"states[{i}].lse must be float32 {tuple(out.shape[:2])} on {out.device}, got {lse.dtype} {tuple(lse.shape)}; see State"
            )
    return cpu_merge.merge_states(states) if in_torch(first.device) else merge.merge(states)


def in_torch(device: torch.device) -> bool:
    """Whether PyTorch serves this device: CPU tensors, unless Triton's interpreter runs."""
    return device.type == "cpu" and not triton.knobs.runtime.interpret


def check(
    q: torch.Tensor, cache: PagedKVCache, plan: Plan, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None
) -> None:
    """Raise unless the inputs of `attention` fit together."""
    spec, batch = plan.spec, plan.batch
    if q.shape[1:] != (spec.num_q_heads, spec.head_dim) or q.dim() != 3:
        raise ValueError(
            f"q must be [num_tokens, {spec.num_q_heads}, {spec.head_dim}] as the spec says, got {tuple(q.shape)}; reshape it"
        )
    if q.dtype != spec.dtype or q.stride(-1) != 1:
        raise ValueError(
            f"q must be {spec.dtype} with a contiguous head, got {q.dtype} with strides {q.stride()}; cast it, or make a spec for it"
        )
    if cache.dtype != spec.kv_dtype:
        raise ValueError(
            f"cache must be of the spec's kv_dtype {spec.kv_dtype}, got {cache.dtype}; make the spec with that kv_dtype"
        )
    if (cache.num_kv_heads, cache.head_dim, cache.head_dim_v) != (spec.num_kv_heads, spec.head_dim, spec.head_dim_v):
        raise ValueError(
            f"cache must have {spec.num_kv_heads} heads of {spec.head_dim} (values {spec.head_dim_v}) as the spec says, got "
            f"{cache.num_kv_heads} of {cache.head_dim} (values {cache.head_dim_v}); check its layout, {cache.layout}"
        )
    if not q.device == cache.device == batch.device:
        raise ValueError(
            f"q, cache and batch must be on one device, got {q.device}, {cache.device} and {batch.device}; move them together"
        )
    if batch.cu_seqlens_q is None and q.shape[0] < batch.num_seqs:
        raise ValueError(
            f"q must have a token for each of {batch.num_seqs} sequences, got {q.shape[0]}; a batch without cu_seqlens_q has one query each"
        )
    if q.shape[0] > plan.num_tokens:
        raise ValueError(
            f"q must have at most the {plan.num_tokens} tokens planned for, got {q.shape[0]}; plan with num_tokens={q.shape[0]}"
        )
    if batch.cu_pages is None and batch.page_table.shape[1] * cache.page_size < plan.max_seq_len:
        raise ValueError(
            f"page_table must cover max_seq_len = {plan.max_seq_len} keys, got {batch.page_table.shape[1]} pages of {cache.page_size}; "
            "widen the table or plan with the true bound"
        )
    for name, tensor, wanted in (("sinks", sinks, spec.sinks), ("alibi_slopes", alibi_slopes, spec.alibi)):
        if (tensor is not None) != wanted:
            raise ValueError(
                f"{name} must be given exactly when the spec has it, got {'one' if wanted is False else 'none'}; set it in the spec too"
            )
        if tensor is not None and (
            tensor.shape != (spec.num_q_heads,) or tensor.device != q.device or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be contiguous [num_q_heads] = [{spec.num_q_heads}] on {q.device}, got {tuple(tensor.shape)} on {tensor.device}; "
                "slice it to this rank's heads"
            )
    if q.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            "q must not require a gradient: Quire serves inference and has no backward pass; call it under torch.no_grad()"
        )


def check_out(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless an output buffer fits."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be {list(shape)} {dtype} on {device} with a contiguous last dimension, got {list(tensor.shape)} {tensor.dtype} on "
            f"{tensor.device} with strides {tensor.stride()}; allocate it so"
        )
