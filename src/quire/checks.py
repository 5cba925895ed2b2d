"""What the verbs ask of their arguments: shapes, dtypes, strides and devices, all of which the host knows.

Nothing here reads from a device. A check that fails names the argument, its contract and the value.
"""

from collections.abc import Sequence

import torch

from quire.cache import PagedKVCache
from quire.errors import UnsupportedError
from quire.plan import Plan
from quire.spec import QUANTISED_DTYPES, QUERY_DTYPES
from quire.state import State


def check_attention(
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
    if q.shape[0] > plan.bounds.num_tokens:
        raise ValueError(
            f"q must have at most the {plan.bounds.num_tokens} tokens planned for, got {q.shape[0]}; plan with num_tokens={q.shape[0]}"
        )
    if batch.cu_pages is None and batch.page_table.shape[1] * cache.page_size < plan.bounds.max_seq_len:
        raise ValueError(
            f"page_table must cover max_seq_len = {plan.bounds.max_seq_len} keys, got {batch.page_table.shape[1]} pages of {cache.page_size}; "
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


def check_write_kv(k: torch.Tensor, v: torch.Tensor, cache: PagedKVCache, slot_mapping: torch.Tensor) -> None:
    """Raise unless the arguments of `write_kv` fit together."""
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


def check_copy_pages(src: PagedKVCache, dst: PagedKVCache, page_pairs: torch.Tensor) -> None:
    """Raise unless the arguments of `copy_pages` fit together."""
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


def check_merge_states(states: Sequence[State]) -> None:
    """Raise unless states can be merged."""
    if not states:
        raise ValueError("states must hold at least one state, got none; an empty set of keys has out 0 and lse -inf")
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
