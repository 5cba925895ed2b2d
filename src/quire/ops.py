"""The verbs as `torch.library` operators, so that `torch.compile(fullgraph=True)` sees them whole. The eager path does not come here.

An operator takes tensors and numbers only, so the nouns are taken apart on the way in and put together again inside, where the ordinary verb runs.
"""

from dataclasses import astuple, replace
from functools import lru_cache

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.config import HopperConfig, KernelConfig
from quire.dispatch.device import device_properties
from quire.plan import Plan, with_scratch
from quire.spec import AttentionSpec
from quire.state import State

LIBRARY = torch.library.Library("quire", "DEF")
LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, str layout, "
    "Tensor page_table, Tensor seq_lens, Tensor? cu_seqlens_q, Tensor? cu_pages, Tensor? query_offsets, Tensor? sinks, Tensor? alibi_slopes, "
    "Tensor(a!)? workspace, "
    "int head_dim_v, float softmax_scale, bool causal, int? sliding_window, int? sliding_window_right, float? softcap, bool allow_tf32, bool allow_fp8, "
    "str kernel, int max_query_len, int max_seq_len, int num_tokens, int num_shares, float merge_cost, int chunk, "
    "int[] tile, int[] fast, int[] beside) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k_scale, Tensor? v_scale, "
    "Tensor(c!)? k_token_scale, Tensor(d!)? v_token_scale, str layout, Tensor slot_mapping) -> ()"
)
LIBRARY.define("merge_states(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)")


def attention(q, cache: PagedKVCache, plan: Plan, sinks, alibi_slopes) -> State:
    """Call the operator `quire::attention`."""
    spec, batch = plan.spec, plan.batch
    tile = [] if plan.tile is None else numbers(plan.tile)
    fast = [] if plan.fast is None else [plan.num_parts, *numbers(plan.fast)]
    num_shares = (plan.instead or plan).num_shares
    beside = (
        []
        if plan.beside is None
        else [plan.few, plan.beside.num_tokens, plan.beside.num_shares, *numbers(plan.beside.tile)]
    )
    out, lse = torch.ops.quire.attention(
        q, cache.k, cache.v, cache.k_scale, cache.v_scale, cache.layout,
        batch.page_table, batch.seq_lens, batch.cu_seqlens_q, batch.cu_pages, batch.query_offsets, sinks, alibi_slopes, plan.workspace,
        spec.head_dim_v, spec.softmax_scale, spec.causal, spec.sliding_window, spec.sliding_window_right, spec.softcap, spec.allow_tf32, spec.allow_fp8,
        plan.kernel, plan.max_query_len, plan.max_seq_len, plan.num_tokens, num_shares, plan.merge_cost, plan.chunk, tile, fast, beside,
    )  # fmt: skip
    return State(out, lse)


def numbers(tile: KernelConfig | HopperConfig) -> list[int]:
    """Return a tile as an operator takes it."""
    return [int(value) for value in astuple(tile)]


def write_kv(k, v, cache: PagedKVCache, slot_mapping) -> None:
    """Call the operator `quire::write_kv`. Scales per token are written, others only read."""
    scales = (cache.k_scale, cache.v_scale)
    per_token = scales[0] is not None and scales[0].dim() == 3
    torch.ops.quire.write_kv(
        k,
        v,
        cache.k,
        cache.v,
        *((None, None, *scales) if per_token else (*scales, None, None)),
        cache.layout,
        slot_mapping,
    )


def merge_states(states) -> State:
    """Call the operator `quire::merge_states`."""
    return State(*torch.ops.quire.merge_states([s.out for s in states], [s.lse for s in states]))


@lru_cache(maxsize=256)
def make_spec(*fields) -> AttentionSpec:
    """Return the spec of an operator's arguments, checked once."""
    names = ("num_q_heads", "num_kv_heads", "head_dim", "head_dim_v", "dtype", "kv_dtype", "softmax_scale", "causal", "sliding_window",
             "sliding_window_right", "softcap", "alibi", "sinks", "allow_tf32", "allow_fp8")  # fmt: skip
    return AttentionSpec(**dict(zip(names, fields, strict=True)))


def attention_impl(
    q, k, v, k_scale, v_scale, layout, page_table, seq_lens, cu_seqlens_q, cu_pages, query_offsets, sinks, alibi_slopes, workspace,
    head_dim_v, softmax_scale, causal, sliding_window, sliding_window_right, softcap, allow_tf32, allow_fp8,
    kernel, max_query_len, max_seq_len, num_tokens, num_shares, merge_cost, chunk, tile, fast, beside,
):  # fmt: skip
    """Put the nouns together and run the verb."""
    from quire import api

    cache = PagedKVCache(k, v, layout, k_scale, v_scale)
    spec = make_spec(
        q.shape[1], cache.num_kv_heads, q.shape[2], head_dim_v, q.dtype, k.dtype, softmax_scale, causal, sliding_window, sliding_window_right,
        softcap, alibi_slopes is not None, sinks is not None, allow_tf32, allow_fp8,
    )  # fmt: skip
    batch = Batch(page_table, seq_lens, cu_seqlens_q, cu_pages, query_offsets)
    tile = KernelConfig(*tile[:4], bool(tile[4]), *tile[5:]) if tile else None
    properties = device_properties(q.device)
    plan = Plan(
        spec,
        batch,
        kernel,
        max_query_len,
        max_seq_len,
        num_tokens,
        properties,
        tile,
        num_shares,
        None,
        "compiled",
        merge_cost,
        chunk,
    )
    if fast:
        num_parts, *fast = fast
        instead = replace(plan, kernel="triton", prepared={}) if num_parts > 1 else None
        plan = replace(plan, num_shares=0, fast=HopperConfig(*fast), num_parts=num_parts, instead=instead, prepared={})
    if beside:
        few, few_tokens, num_shares, *tile = beside
        tile = KernelConfig(*tile[:4], bool(tile[4]), *tile[5:])
        second = Plan(
            spec, batch, "triton", few, max_seq_len, few_tokens, properties, tile, num_shares, None, "compiled", few=few
        )
        plan = replace(plan, beside=second, few=few)
    plan = with_scratch(plan, workspace)
    return tuple(api.attention(q, cache, plan, sinks=sinks, alibi_slopes=alibi_slopes, return_lse=True))


def attention_fake(q, *arguments):
    """Say what comes out."""
    head_dim_v = arguments[13]
    return q.new_empty(q.shape[0], q.shape[1], head_dim_v), q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


def write_kv_impl(k, v, k_cache, v_cache, k_scale, v_scale, k_token_scale, v_token_scale, layout, slot_mapping):
    """Put the cache together and run the verb."""
    from quire import api

    scales = (k_scale, v_scale) if k_token_scale is None else (k_token_scale, v_token_scale)
    api.write_kv(k, v, PagedKVCache(k_cache, v_cache, layout, *scales), slot_mapping)


def merge_states_impl(outs, lses):
    """Put the states together and run the verb."""
    from quire import api

    return tuple(api.merge_states([State(*s) for s in zip(outs, lses, strict=True)]))


def merge_states_fake(outs, lses):
    """Say what comes out."""
    return torch.empty_like(outs[0], memory_format=torch.contiguous_format), torch.empty_like(
        lses[0], memory_format=torch.contiguous_format
    )


for key in ("CPU", "CUDA"):
    LIBRARY.impl("attention", attention_impl, key)
    LIBRARY.impl("write_kv", write_kv_impl, key)
    LIBRARY.impl("merge_states", merge_states_impl, key)
torch.library.register_fake("quire::attention", attention_fake)
torch.library.register_fake("quire::write_kv", lambda *arguments: None)
torch.library.register_fake("quire::merge_states", merge_states_fake)
