"""The verbs as `torch.library` operators, for `torch.compile(fullgraph=True)`. Eager calls do not use them.

An operator takes tensors, numbers and strings. The functions here take caches, batches, plans and states apart and call
the operator. The operator builds them again and calls the verb, which `register` gave it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire import log
from quire.batch import Batch, ChosenKeys
from quire.cache import PagedKVCache
from quire.dispatch.request import Bounds
from quire.errors import describe
from quire.launch_codec import decode
from quire.norm_rope import QKNorm, Rope
from quire.plan import Asked, Plan, plan_again
from quire.state import State

LIBRARY = torch.library.Library("quire", "DEF")
LIBRARY.define(
    "attention(Tensor q, Tensor? q_pe, Tensor k, Tensor? v, Tensor? k_scale, Tensor? v_scale, "
    "Tensor? k_block_scale, Tensor? v_block_scale, str layout, "
    "Tensor page_table, Tensor seq_lens, Tensor? cu_seqlens_q, Tensor? cu_pages, Tensor? query_offsets, "
    "Tensor? key_begin, Tensor? key_end, Tensor? tree_bits, Tensor? chosen, Tensor? chosen_lens, int chosen_size, "
    "bool chosen_are_slots, Tensor? extra_chosen, Tensor? extra_lens, int extra_size, Tensor? extra_latents, "
    "Tensor? sinks, Tensor? alibi_slopes, Tensor[] extras, "
    "Tensor? out_scale, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!) workspace, str spec, str options, "
    "SymInt[] shared_prefix, SymInt max_query_len, SymInt max_seq_len, SymInt num_tokens) -> ()"
)
LIBRARY.define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k_scale, Tensor? v_scale, "
    "Tensor(c!)? k_token_scale, Tensor(d!)? v_token_scale, str layout, str? kv_format, "
    "Tensor(e!)? k_block_scale, Tensor(f!)? v_block_scale, Tensor slot_mapping) -> ()"
)
LIBRARY.define(
    "write_latent(Tensor c_kv, Tensor? k_pe, Tensor(a!) latents, int kv_lora_rank, Tensor? scale, "
    "Tensor slot_mapping) -> ()"
)
LIBRARY.define(
    "norm_rope_and_write(Tensor q, Tensor k, Tensor v, Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor? k_scale, Tensor? v_scale, Tensor(c!)? k_token_scale, Tensor(d!)? v_token_scale, str layout, "
    "str? kv_format, Tensor(e!)? k_block_scale, Tensor(f!)? v_block_scale, "
    "Tensor? cos, Tensor? sin, Tensor? positions, bool interleaved, Tensor? q_weight, Tensor? k_weight, float eps, "
    "Tensor(g!) rotated) -> ()"
)
LIBRARY.define("merge_states(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)")


def attention(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
    cache: PagedKVCache,
    plan: Plan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    extra_cache: PagedKVCache | None = None,
    extras: Sequence[torch.Tensor] = (),
) -> None:
    """Call the operator `quire::attention`, which writes `out` and `lse`. Latents cross it as k, without v.

    Raises:
        TypeError: the plan is not from `quire.plan`.
    """
    batch, bounds, asked = plan.batch, plan.bounds, plan.asked
    if asked is None:
        raise TypeError(f"plan must be from `quire.plan` under torch.compile, got {describe(plan)}; call it eagerly")
    q, q_pe = q if isinstance(q, tuple) else (q, None)
    chosen, extra = batch.chosen, batch.extra_chosen
    lists, more = (None, None, 1, False), (None, None, 1, None)
    if chosen is not None:
        lists = chosen.indices, chosen.lens, chosen.block_size, chosen.are_slots
    if extra is not None and extra_cache is not None:
        more = extra.indices, extra.lens, extra.block_size, extra_cache.latents
    pages = (cache.latents, None) if cache.is_latent else (cache.k, cache.v)
    torch.ops.quire.attention(
        q,
        q_pe,
        *pages,
        cache.k_scale,
        None if cache.is_latent else cache.v_scale,
        cache.k_block_scale,
        cache.v_block_scale,
        cache.layout,
        batch.page_table,
        batch.seq_lens,
        batch.cu_seqlens_q,
        batch.cu_pages,
        batch.query_offsets,
        batch.key_begin,
        batch.key_end,
        batch.tree_bits,
        *lists,
        *more,
        sinks,
        alibi_slopes,
        [*extras],
        out_scale,
        out,
        lse,
        plan.memory,
        *asked,
        bounds.max_query_len,
        bounds.max_seq_len,
        bounds.num_tokens,
    )


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: PagedKVCache, slot_mapping: torch.Tensor) -> None:
    """Call the operator `quire::write_kv`."""
    torch.ops.quire.write_kv(k, v, *parts_of(cache), slot_mapping)


def parts_of(cache: PagedKVCache) -> tuple[Any, ...]:
    """Return what makes a cache that is written: scales that are read come before those per token, which are written.

    `cache_of` makes the cache of it again.
    """
    scales = cache.k_scale, cache.v_scale
    scales = (None, None, *scales) if cache.scale_kind == "token" else (*scales, None, None)
    return cache.k, cache.v, *scales, cache.layout, cache.kv_format, cache.k_block_scale, cache.v_block_scale


def cache_of(
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    k_token_scale: torch.Tensor | None,
    v_token_scale: torch.Tensor | None,
    layout: str,
    kv_format: str | None,
    k_block_scale: torch.Tensor | None,
    v_block_scale: torch.Tensor | None,
) -> PagedKVCache:
    """Return the cache of what `parts_of` returned."""
    scales = (k_scale, v_scale) if k_token_scale is None else (k_token_scale, v_token_scale)
    blocks = {"k_block_scale": k_block_scale, "v_block_scale": v_block_scale}
    return PagedKVCache(k, v, layout, *scales, kv_format=kv_format, **blocks)


def norm_rope_and_write(
    q: torch.Tensor,
    rotated: torch.Tensor,
    cache: PagedKVCache,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    rope: Rope | None,
    qk_norm: QKNorm | None,
) -> None:
    """Call the operator `quire::norm_rope_and_write`, which writes `rotated`, keys and values."""
    rotation = (None, None, None, False) if rope is None else rope
    norm = (None, None, 1.0) if qk_norm is None else qk_norm
    torch.ops.quire.norm_rope_and_write(q, k, v, slot_mapping, *parts_of(cache), *rotation, *norm, rotated)


def write_latent(
    c_kv: torch.Tensor, k_pe: torch.Tensor | None, cache: PagedKVCache, slot_mapping: torch.Tensor
) -> None:
    """Call the operator `quire::write_latent`."""
    torch.ops.quire.write_latent(c_kv, k_pe, cache.latents, cache.head_dim_v, cache.k_scale, slot_mapping)


def merge_states(states: Sequence[State]) -> State:
    """Call the operator `quire::merge_states`."""
    return State(*torch.ops.quire.merge_states([s.out for s in states], [s.lse for s in states]))


def register(
    attention_verb: Callable[..., Any],
    write_kv_verb: Callable[..., Any],
    write_latent_verb: Callable[..., Any],
    merge_states_verb: Callable[..., State],
    norm_rope_and_write_step: Callable[..., None],
) -> None:
    """Implement the operators by the eager verbs. `quire.api` calls this once."""

    def attention_impl(
        q: torch.Tensor,
        q_pe: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        k_block_scale: torch.Tensor | None,
        v_block_scale: torch.Tensor | None,
        layout: str,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None,
        cu_pages: torch.Tensor | None,
        query_offsets: torch.Tensor | None,
        key_begin: torch.Tensor | None,
        key_end: torch.Tensor | None,
        tree_bits: torch.Tensor | None,
        chosen: torch.Tensor | None,
        chosen_lens: torch.Tensor | None,
        chosen_size: int,
        chosen_are_slots: bool,
        extra_chosen: torch.Tensor | None,
        extra_lens: torch.Tensor | None,
        extra_size: int,
        extra_latents: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        extras: list[torch.Tensor],
        out_scale: torch.Tensor | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        workspace: torch.Tensor,
        spec: str,
        options: str,
        shared_prefix: list[int],
        max_query_len: int,
        max_seq_len: int,
        num_tokens: int,
    ) -> None:
        lengths = page_table, seq_lens, cu_seqlens_q, cu_pages, query_offsets, layout != "THD"
        lists = None if chosen is None else ChosenKeys(chosen, chosen_lens, chosen_size, chosen_are_slots)
        extra = None if extra_chosen is None else ChosenKeys(extra_chosen, extra_lens, extra_size, are_slots=True)
        batch = Batch(*lengths, key_begin, key_end, tree_bits, lists, extra)
        bounds, asked = Bounds(max_query_len, max_seq_len, num_tokens), Asked(spec, options, tuple(shared_prefix))
        plan = plan_again(batch, bounds, asked, workspace)
        if v is None:
            cache = PagedKVCache.from_latents(k, plan.spec.kv_lora_rank, scale=k_scale)
        else:
            blocks = {"k_block_scale": k_block_scale, "v_block_scale": v_block_scale}
            cache = PagedKVCache(k, v, layout, k_scale, v_scale, kv_format=plan.spec.kv_format, **blocks)
        into = out if lse is None else State(out, lse)
        per_head: dict[str, Any] = {"sinks": sinks, "alibi_slopes": alibi_slopes, "extras": tuple(extras)}
        queries = q if q_pe is None else (q, q_pe)
        if extra_latents is not None:
            per_head["extra_cache"] = PagedKVCache.from_latents(extra_latents, plan.spec.kv_lora_rank)
        attention_verb(queries, cache, plan, **per_head, out=into, out_scale=out_scale)

    def write_kv_impl(k: torch.Tensor, v: torch.Tensor, *parts: Any) -> None:
        *of_cache, slot_mapping = parts
        write_kv_verb(k, v, cache_of(*of_cache), slot_mapping)

    def write_latent_impl(
        c_kv: torch.Tensor,
        k_pe: torch.Tensor | None,
        latents: torch.Tensor,
        kv_lora_rank: int,
        scale: torch.Tensor | None,
        slot_mapping: torch.Tensor,
    ) -> None:
        write_latent_verb(c_kv, k_pe, PagedKVCache.from_latents(latents, kv_lora_rank, scale=scale), slot_mapping)

    def merge_states_impl(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = merge_states_verb([State(*s) for s in zip(outs, lses, strict=True)])
        return out, lse

    def norm_rope_and_write_impl(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor, *parts: Any
    ) -> None:
        *of_cache, cos, sin, positions, interleaved, q_weight, k_weight, eps, rotated = parts
        rope = qk_norm = None
        if cos is not None:
            rope = Rope(cos, sin, positions, interleaved)
        if q_weight is not None:
            qk_norm = QKNorm(q_weight, k_weight, eps)
        norm_rope_and_write_step(q, rotated, cache_of(*of_cache), k, v, slot_mapping, rope, qk_norm)

    for key in ("CPU", "CUDA"):
        LIBRARY.impl("norm_rope_and_write", norm_rope_and_write_impl, key)
        LIBRARY.impl("attention", attention_impl, key)
        LIBRARY.impl("write_kv", write_kv_impl, key)
        LIBRARY.impl("write_latent", write_latent_impl, key)
        LIBRARY.impl("merge_states", merge_states_impl, key)


def merge_states_fake(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors like the results."""
    contiguous = torch.contiguous_format
    return torch.empty_like(outs[0], memory_format=contiguous), torch.empty_like(lses[0], memory_format=contiguous)


def attention_fake(*arguments: Any) -> None:
    """Return nothing, as the operator. `torch.compile` asks when it traces a program, not when it runs it."""
    if log.is_on(log.START):
        spec = decode(arguments[-6])
        log.say_once(log.START, f"torch.compile traced quire::attention for {log.words_of(spec)}")


torch.library.register_fake("quire::attention", attention_fake)
torch.library.register_fake("quire::write_kv", lambda *arguments: None)
torch.library.register_fake("quire::norm_rope_and_write", lambda *arguments: None)
torch.library.register_fake("quire::write_latent", lambda *arguments: None)
torch.library.register_fake("quire::merge_states", merge_states_fake)
