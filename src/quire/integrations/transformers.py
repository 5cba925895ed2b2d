"""Quire as an attention implementation of Hugging Face Transformers: `use(model)`, or `attn_implementation=install()` when loading.

Scheduling, continuous batching, sampling and prefix reuse stay Transformers'. Its continuous batching hands an attention function the new keys and
values, the cache, and per sequence the list of token slots to read: a page table of page size 1. Quire writes the new tokens into their slots and
attends through that list in place, for prefill as for decode; nothing is gathered.

Sliding-window layers keep a ring of the last tokens, so that writing first would overwrite keys which a chunk's early queries still need. There the
past in the ring and the step's own tokens are two states over disjoint keys: attend to both, merge, then write.

`transformers serve` accepts only attention implementations from a fixed list of its own, so it cannot be pointed at this one; serve through
`model.init_continuous_batching` instead.
"""

import weakref
from functools import lru_cache

import torch
import transformers
from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface

import quire
from quire import AttentionSpec, Batch, PagedKVCache, Plan, UnsupportedError

SUPPORTED = (Version("5.17"), Version("5.24"))  # from, and before
FLASH_NAMES = Version("5.19")  # from here on, continuous batching takes only names that contain "flash"

_plans: dict[tuple[str, AttentionSpec], tuple[tuple, tuple, Plan]] = {}  # the current step's plans, shared by its layers
_last_plan: Plan | None = None


def install() -> str:
    """Register Quire with Transformers' attention and mask interfaces; calling it again changes nothing.

    Returns:
        The name to pass as `attn_implementation`, or to `model.set_attn_implementation`.

    Raises:
        UnsupportedError: this version of Transformers is outside the supported range.
    """
    version = Version(transformers.__version__)
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        raise UnsupportedError(f"transformers must be from {SUPPORTED[0]} to before {SUPPORTED[1]}, got {version}; install a version in that range")
    name = "quire_flash" if version >= FLASH_NAMES else "paged|quire"
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, padding_mask)
    if version >= FLASH_NAMES:
        seed_lazy_import(name)
    return name


def use(model: transformers.PreTrainedModel) -> str:
    """Install Quire and set it on a loaded model.

    Some models (gpt-oss) list the implementations whose name contains "flash" that may serve them, and replace any other without an error; Quire, which
    serves attention sinks, is added to this model's own list.

    Args:
        model: any decoder-only model that continuous batching runs.

    Returns:
        The implementation's name.

    Raises:
        UnsupportedError: this version of Transformers is outside the supported range.
    """
    name = install()
    for module in torch.nn.Module.modules(model):
        if getattr(module, "_compatible_flash_implementations", None) is not None:
            module._compatible_flash_implementations = [*module._compatible_flash_implementations, name]
    model.set_attn_implementation(name)
    return name


def last_plan() -> Plan | None:
    """Return the plan of the newest launch, to see which kernel ran."""
    return _last_plan


def seed_lazy_import(name: str) -> None:
    """Tell Transformers that the implementation `name` is loaded already.

    From 5.19 on, setting an implementation whose name contains "flash" imports a package of that name through private globals of
    `modeling_flash_attention_utils`, and offers no public way to say that the registered function is all there is. These are the globals that such
    an import would have set; the functions in them are never called, since `attention_forward` is registered under the same name.
    """
    from transformers import modeling_flash_attention_utils as lazy

    lazy._loaded_implementation = name
    lazy._flash_fn = lazy._flash_varlen_fn = lazy._flash_with_kvcache_fn = None
    lazy._pad_fn, lazy._unpad_fn = lazy._pad_input, lazy._unpad_input
    lazy._process_flash_kwargs_fn = lazy._process_with_kvcache_kwargs_fn = dict


def padding_mask(*args, attention_mask: torch.Tensor | None = None, **kwargs) -> torch.Tensor | None:
    """Pass on the 2-D padding mask where there is padding, and None where there is none: the kernels know causality and windows themselves."""
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [batch, num_q_heads, num_queries, head_dim]; batch is 1 under continuous batching
    key: torch.Tensor,  # [batch, num_kv_heads, num_keys, head_dim], under continuous batching the new tokens only
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cache=None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attend as Transformers' attention interface asks; see `transformers.AttentionInterface`.

    Returns:
        out [batch, num_queries, num_q_heads, head_dim], and None for the weights.

    Raises:
        UnsupportedError: padded batches or dropout.
    """
    if attention_mask is not None:
        raise UnsupportedError(
            "attention_mask must be None (no padding), got a padded batch; generate with continuous batching (`model.generate_batch`), or one prompt "
            "at a time, or with prompts of one length"
        )
    if dropout:
        raise UnsupportedError(f"dropout must be 0, got {dropout}; Quire serves inference: call model.eval()")
    window = sliding_window or getattr(module, "sliding_window", None)
    spec = layer_spec(
        query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], query.dtype, scaling or getattr(module, "scaling", None),
        softcap, window, s_aux is not None, bool(kwargs["is_causal"] if kwargs.get("is_causal") is not None else getattr(module, "is_causal", True)),
    )  # fmt: skip
    if cache is None:
        return contiguous_attention(query, key, value, spec, s_aux), None
    return paged_attention(module, query, key, value, spec, s_aux, cache, kwargs).unsqueeze(0), None


@lru_cache(maxsize=256)
def layer_spec(q_heads, kv_heads, dim, dim_v, dtype, scale, softcap, window, sinks, causal) -> AttentionSpec:
    """Return the spec of a kind of layer."""
    return AttentionSpec(
        num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=dim, head_dim_v=dim_v, dtype=dtype, softmax_scale=scale, softcap=softcap,
        sliding_window=window, sinks=sinks, causal=causal,
    )  # fmt: skip


def contiguous_attention(query, key, value, spec: AttentionSpec, sinks) -> torch.Tensor:
    """Attend in an ordinary forward pass, keys and values as they come; the queries are the last of the tokens."""
    (num_seqs, _, q_len, _), kv_len = query.shape, key.shape[2]
    cu_q = torch.arange(0, (num_seqs + 1) * q_len, q_len, dtype=torch.int32, device=query.device)
    cu_k = torch.arange(0, (num_seqs + 1) * kv_len, kv_len, dtype=torch.int32, device=query.device)
    plan = remember(quire.plan(spec, Batch.varlen(cu_q, cu_k), max_query_len=q_len, max_seq_len=kv_len))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return quire.varlen_attention(q, k, v, plan, sinks=sinks).unflatten(0, (num_seqs, q_len))


def paged_attention(module, query, key, value, spec: AttentionSpec, sinks, cache, step: dict) -> torch.Tensor:
    """Write a continuous batch's new tokens and attend to all of them.

    Returns:
        out [num_tokens, num_q_heads, head_dim].
    """
    group, layer_type, k_tokens, v_tokens = layer_cache(cache, module.layer_idx)
    pages = PagedKVCache(k_tokens[:, None], v_tokens[:, None])  # a slot is a page of one token
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    read, write = step["read_index"][group], step["write_index"][group]
    cu_q, cu_k = step["cu_seq_lens_q"], by_type(step["cu_seq_lens_k"], layer_type)
    longest = {
        "max_query_len": max(step.get("max_seqlen_q", 0), step.get("max_length_q", 0)),
        "max_seq_len": by_type(step["max_seqlen_k"] if "max_seqlen_k" in step else step["max_length_k"], layer_type),
        "num_tokens": q.shape[0],
    }
    longest["max_query_len"] = min(longest["max_query_len"], q.shape[0])
    if read.numel() == 0:  # no sequence has a past: the new tokens are all there is
        plan = step_plan("new", spec, longest, read, cu_q, cu_k)
        out = quire.varlen_attention(q, k, v, plan, sinks=sinks)
        quire.write_kv(k, v, pages, write)
        return out
    if layer_type != "sliding_attention":
        quire.write_kv(k, v, pages, write)
        return quire.attention(q, pages, step_plan("all", spec, longest, read, cu_q, cu_k), sinks=sinks)
    no_sinks = layer_spec(
        spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim_v, spec.dtype, spec.softmax_scale, spec.softcap, spec.sliding_window, False, True
    )  # a sink enters a softmax once
    past = quire.attention(q, pages, step_plan("past", no_sinks, longest, read, cu_q, cu_k), return_lse=True)
    new = quire.varlen_attention(q, k, v, step_plan("new", spec, longest, read, cu_q, cu_q), sinks=sinks, return_lse=True)
    quire.write_kv(k, v, pages, write)
    return quire.merge_states([past, new]).out


def layer_cache(cache, layer: int) -> tuple[int, str, torch.Tensor, torch.Tensor]:
    """Return a layer's group, its type, and its keys and values by token slot, [num_slots, num_kv_heads, head_dim]."""
    if hasattr(cache, "layer_to_allocator"):  # 5.23; it has no public accessor that serves sliding layers too
        allocator = cache.layer_to_allocator[layer]
        k, v = allocator._kv_token_views[layer]
        num_slots = min(k.shape[0], v.shape[0])  # they are two offsets into one buffer
        return allocator.index, allocator.layer_type, k[:num_slots], v[:num_slots]
    group, index = cache.layer_index_to_group_indices[layer]
    layer_type = "full_attention" if cache.sliding_windows[layer] == 1 else "sliding_attention"
    return group, layer_type, cache.key_cache[index], cache.value_cache[index]


def by_type(value, layer_type: str):
    """Pick a layer type's entry where the engine gives one for each."""
    return value[layer_type] if isinstance(value, dict) else value


def step_plan(part: str, spec: AttentionSpec, longest: dict[str, int], read: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor) -> Plan:
    """Return the plan for a part of the keys ("all", "new" or "past"), made once per step and shared by the layers that agree on everything.

    The step is told by the identity of its tensors, weakly held. A graph capture is a step of its own: what is derived from the lengths has to be
    derived inside the graph, or its replays would see the lengths of the capture.
    """
    tensors, capturing = (read, cu_q, cu_k), cu_q.is_cuda and torch.cuda.is_current_stream_capturing()
    facts = (*longest.values(), capturing)
    held = _plans.get((part, spec))
    if held is not None and held[0] == facts and all(ref() is tensor for ref, tensor in zip(held[1], tensors, strict=True)):
        return remember(held[2])
    if part == "new":
        batch = Batch.varlen(cu_q, cu_k)
    elif part == "all":
        batch = Batch(read, cu_k.diff(), cu_q, cu_pages=cu_k)
    else:
        past_lens = cu_k.diff() - cu_q.diff()
        batch = Batch(read, past_lens, cu_q, cu_pages=cu_k, query_offsets=past_lens)
    plan = quire.plan(spec, batch, **longest)
    _plans[part, spec] = (facts, tuple(map(weakref.ref, tensors)), plan)
    return remember(plan)


def remember(plan: Plan) -> Plan:
    """Keep the newest plan for `last_plan`."""
    global _last_plan
    _last_plan = plan
    return plan
