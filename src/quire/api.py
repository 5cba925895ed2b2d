"""The verbs: check, then launch.

This is the first of the two frames between a model layer and the GPU. Checks compare host numbers (shapes, dtypes, strides); nothing is read
from the device, and nothing is launched or written unless all of them pass.
"""

import torch

from quire.cache import PagedKVCache
from quire.errors import UnsupportedError
from quire.plan import Plan
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
    launchers(plan.kernel)(q, cache, plan, out, lse, sinks, alibi_slopes)
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


def launchers(kernel: str):
    """Return the launch function of a kernel family."""
    if kernel == "torch":
        from quire.kernels.cpu import launch
    else:
        from quire.kernels.attention import launch
    return launch


def check(q: torch.Tensor, cache: PagedKVCache, plan: Plan, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None) -> None:
    """Raise unless the inputs of `attention` fit together."""
    spec, batch = plan.spec, plan.batch
    if q.shape[1:] != (spec.num_q_heads, spec.head_dim) or q.dim() != 3:
        raise ValueError(f"q must be [num_tokens, {spec.num_q_heads}, {spec.head_dim}] as the spec says, got {tuple(q.shape)}; reshape it")
    if q.dtype != spec.dtype or q.stride(-1) != 1:
        raise ValueError(f"q must be {spec.dtype} with a contiguous head, got {q.dtype} with strides {q.stride()}; cast it, or make a spec for it")
    if cache.dtype != spec.kv_dtype:
        raise ValueError(f"cache must be of the spec's kv_dtype {spec.kv_dtype}, got {cache.dtype}; make the spec with that kv_dtype")
    if (cache.num_kv_heads, cache.head_dim, cache.head_dim_v) != (spec.num_kv_heads, spec.head_dim, spec.head_dim_v):
        raise ValueError(
            f"cache must have {spec.num_kv_heads} heads of {spec.head_dim} (values {spec.head_dim_v}) as the spec says, got "
            f"{cache.num_kv_heads} of {cache.head_dim} (values {cache.head_dim_v}); check its layout, {cache.layout}"
        )
    if not q.device == cache.device == batch.device:
        raise ValueError(f"q, cache and batch must be on one device, got {q.device}, {cache.device} and {batch.device}; move them together")
    if q.shape[0] > plan.num_tokens:
        raise ValueError(f"q must have at most the {plan.num_tokens} tokens planned for, got {q.shape[0]}; plan with num_tokens={q.shape[0]}")
    if batch.cu_pages is None and batch.page_table.shape[1] * cache.page_size < plan.max_seq_len:
        raise ValueError(
            f"page_table must cover max_seq_len = {plan.max_seq_len} keys, got {batch.page_table.shape[1]} pages of {cache.page_size}; "
            "widen the table or plan with the true bound"
        )
    for name, tensor, wanted in (("sinks", sinks, spec.sinks), ("alibi_slopes", alibi_slopes, spec.alibi)):
        if (tensor is not None) != wanted:
            raise ValueError(f"{name} must be given exactly when the spec has it, got {'one' if wanted is False else 'none'}; set it in the spec too")
        if tensor is not None and (tensor.shape != (spec.num_q_heads,) or tensor.device != q.device or not tensor.is_contiguous()):
            raise ValueError(
                f"{name} must be contiguous [num_q_heads] = [{spec.num_q_heads}] on {q.device}, got {tuple(tensor.shape)} on {tensor.device}; "
                "slice it to this rank's heads"
            )
    if q.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError("q must not require a gradient: Quire serves inference and has no backward pass; call it under torch.no_grad()")


def check_out(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless an output buffer fits."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be {list(shape)} {dtype} on {device} with a contiguous last dimension, got {list(tensor.shape)} {tensor.dtype} on "
            f"{tensor.device} with strides {tensor.stride()}; allocate it so"
        )
