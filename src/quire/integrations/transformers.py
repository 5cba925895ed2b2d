"""Quire as an attention implementation of Hugging Face Transformers: `use(model)`, or `attn_implementation=install()` when loading.

Scheduling, continuous batching, sampling and prefix reuse stay Transformers'. Its continuous batching hands an attention function the new keys and
values, the cache, and per sequence either the list of token slots to read, which is a page table of page size 1, or, in steps that only decode on a
GPU, a table of pages. Quire writes the new tokens into their slots and attends through that table in place, for prefill as for decode; nothing is
gathered.

Sliding-window layers keep a ring of the last tokens, so that writing first would overwrite keys which a chunk's early queries still need. There the
past in the ring and the step's own tokens are two states over disjoint keys: attend to both, merge, then write.

`transformers serve` accepts only the attention implementations of a fixed list of its own and kernels of the hub, from 5.17 to 5.23, so it cannot be
pointed at this one; serve through `model.init_continuous_batching` instead.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import transformers
from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface

import quire
from quire import AttentionSpec, Batch, PagedKVCache, Plan, UnsupportedError
from quire.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

SUPPORTED = (Version("5.17"), Version("5.24"))  # from, and before
NO_PREFIX = Version("5.19")  # from here on, names of paged implementations have no prefix `paged|`
NAME = (
    "quire_flash_2"  # CUDA graphs and decoding by page tables are for names that contain "flash", and after it a 2 or 3
)


def install() -> str:
    """Register Quire with Transformers' attention and mask interfaces; calling it again changes nothing.

    Returns:
        The name to pass as `attn_implementation`, or to `model.set_attn_implementation`.

    Raises:
        UnsupportedError: this version of Transformers is outside the supported range.
    """
    version = Version(transformers.__version__)
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        raise UnsupportedError(
            f"transformers must be from {SUPPORTED[0]} to before {SUPPORTED[1]}, got {version}; install a version in that range"
        )
    name = NAME if version >= NO_PREFIX else f"paged|{NAME}"
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, unserved_mask)
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
        listed = getattr(module, "_compatible_flash_implementations", None)
        if listed is not None and NAME not in listed:
            module._compatible_flash_implementations = [*listed, NAME]
    model.set_attn_implementation(name)
    return name


def last_plan() -> Plan | None:
    """Return the plan of the newest launch, to see which kernel ran."""
    return _last_plan


def seed_lazy_import(name: str) -> None:
    """Tell Transformers that the implementation `name` is imported already, and that flash-attn's three functions are Quire's.

    Setting an implementation whose name contains "flash" makes Transformers import, or download, a package of that name, and there is no public way
    to say that there is none. These private globals of `modeling_flash_attention_utils` are the ones that such an import would have set. They hold
    one implementation at a time: after loading another flash implementation in the same process, call `install` (or `use`) again.
    """
    from transformers import modeling_flash_attention_utils as lazy

    lazy._loaded_implementation = name
    lazy._flash_fn, lazy._flash_varlen_fn, lazy._flash_with_kvcache_fn = (
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
    )
    lazy._pad_fn, lazy._unpad_fn = lazy._pad_input, lazy._unpad_input
    lazy._process_flash_kwargs_fn = lazy._lazy_define_process_function(flash_attn_varlen_func)
    if hasattr(lazy, "_process_with_kvcache_kwargs_fn"):  # from 5.19
        lazy._process_with_kvcache_kwargs_fn = lazy._lazy_define_process_function(flash_attn_with_kvcache)


def unserved_mask(
    *,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    attention_mask: torch.Tensor | None = None,  # [batch, num_tokens] bool, False for padding
    allow_is_causal_skip: bool = True,
    **kwargs,
) -> torch.Tensor | None:
    """Return None where causality and windows, which the kernels know themselves, are the whole mask; else something for `attention_forward` to refuse.

    That is the 2-D mask where there is padding or a static cache, whose unused end only a mask tells, and an empty tensor for other masks: packed
    sequences, blocks. Continuous batching packs sequences too, but tells their lengths.
    """
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]
        if attention_mask.shape[1] != kv_length or not attention_mask.all():
            return attention_mask
    if isinstance(q_offset, torch.Tensor) or not allow_is_causal_skip:  # static caches count on the device
        return torch.empty(0, 0, 0, 0)  # Transformers passes on what has four dimensions as it is
    return None


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
    is_causal: bool | None = None,
    cache=None,
    **step,
) -> tuple[torch.Tensor, None]:
    """Attend as Transformers' attention interface asks; see `transformers.AttentionInterface`.

    Returns:
        out [batch, num_queries, num_q_heads, head_dim], and None for the weights.

    Raises:
        UnsupportedError: dropout, or, outside continuous batching, padding, a static cache or a mask of another kind.
    """
    if dropout:
        raise UnsupportedError(f"dropout must be 0, got {dropout}; Quire serves inference: call model.eval()")
    if cache is None and attention_mask is not None:
        raise UnsupportedError(
            "attention_mask must be None (causal or sliding-window attention without padding), got a padded batch, a static cache or packed sequences; "
            "generate by continuous batching (`model.generate_batch`), or without `cache_implementation` and prompts of one length at a time"
        )
    engine = None if cache is None else engine_of(cache)
    layer = None if engine is None else engine.layer(cache, module.layer_idx)
    window = sliding_window if sliding_window or layer is None else layer.window
    spec = layer_spec(
        query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], query.dtype, scaling or getattr(module, "scaling", None), softcap,
        window, s_aux is not None, getattr(module, "is_causal", True) if is_causal is None else is_causal,
    )  # fmt: skip
    if layer is None:
        return contiguous_attention(query, key, value, spec, s_aux), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attend = (
        attend_by_pages
        if step["block_table"] is not None
        else attend_by_slots
        if layer.window is None
        else attend_with_ring
    )
    return attend(q, k, v, spec, s_aux, engine, layer, step).unsqueeze(0), None


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


# Continuous batching: each of the three takes q [num_tokens, num_q_heads, head_dim], k, v of the step's tokens, writes these, and returns
# out [num_tokens, num_q_heads, head_dim].


def attend_by_pages(q, k, v, spec: AttentionSpec, sinks, engine: "Engine", layer: "Layer", step: dict) -> torch.Tensor:
    """Decode one token per sequence through a table of pages; the engine tells no slots to write, so they are derived."""
    planned = engine.planned("pages", spec, layer, step, q.shape[0])
    quire.write_kv(k, v, layer.pages, planned.slots)
    return quire.attention(q, layer.pages, planned.plan, sinks=sinks)


def attend_by_slots(q, k, v, spec: AttentionSpec, sinks, engine: "Engine", layer: "Layer", step: dict) -> torch.Tensor:
    """Write, then attend to past and new tokens alike through the list of their slots, any mix of prefill, chunks of it and decode."""
    quire.write_kv(k, v, layer.slots, step["write_index"][layer.group])
    if step["read_index"][layer.group].numel() == 0:  # no sequence has a past: the new tokens are all there is
        return quire.varlen_attention(q, k, v, engine.planned("new", spec, layer, step, q.shape[0]).plan, sinks=sinks)
    return quire.attention(q, layer.slots, engine.planned("all", spec, layer, step, q.shape[0]).plan, sinks=sinks)


def attend_with_ring(q, k, v, spec: AttentionSpec, sinks, engine: "Engine", layer: "Layer", step: dict) -> torch.Tensor:
    """Attend to the past in a sliding window's ring and to the new tokens, merge, and only then let these overwrite the past."""
    new = quire.varlen_attention(
        q, k, v, engine.planned("new", spec, layer, step, q.shape[0]).plan, sinks=sinks, return_lse=True
    )
    if step["read_index"][layer.group].numel() > 0:
        no_sinks = layer_spec(  # a sink enters a softmax once
            spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim_v, spec.dtype, spec.softmax_scale, spec.softcap, spec.sliding_window,
            False, spec.causal,
        )  # fmt: skip
        past = quire.attention(
            q, layer.slots, engine.planned("past", no_sinks, layer, step, q.shape[0]).plan, return_lse=True
        )
        new = quire.merge_states([past, new])
    quire.write_kv(k, v, layer.slots, step["write_index"][layer.group])
    return new.out


class Layer(NamedTuple):
    """Where one model layer's keys and values lie in the engine's cache."""

    group: int  # index of the layer's lists and tables among those of a step
    window: int | None  # tokens in its ring, or None where all are kept
    pages: PagedKVCache  # in the engine's pages
    slots: PagedKVCache  # the same memory, in pages of one token


class Planned(NamedTuple):
    """A plan, and what of a step it was made for."""

    plan: Plan
    slots: torch.Tensor | None  # [num_seqs] int64, where each sequence's new token goes, in a step by page table
    tensors: tuple[torch.Tensor, ...]
    facts: tuple


@dataclass
class Engine:
    """What is kept of one engine cache, for as long as it lives: its layers, and the current step's plans, which layers share."""

    layers: dict[int, Layer] = field(default_factory=dict)
    plans: dict[tuple[str, int, AttentionSpec], Planned] = field(default_factory=dict)

    def layer(self, cache, index: int) -> Layer:
        """Return where layer `index` lies."""
        if index not in self.layers:
            self.layers[index] = find_layer(cache, index)
        return self.layers[index]

    def planned(self, part: str, spec: AttentionSpec, layer: Layer, step: dict, num_tokens: int) -> Planned:
        """Return the plan for a part of the keys ("pages", "all", "new" or "past"), made once per step.

        A step is told by the identity of its tensors, which are held, so that no other can take their place. A graph capture is a step of its own:
        what is derived from the lengths has to be derived inside the graph, or its replays would see the lengths of the capture.
        """
        layer_type = "full_attention" if layer.window is None else "sliding_attention"
        cu_q, cu_k = step["cu_seq_lens_q"], of_type(step["cu_seq_lens_k"], layer_type)
        table = step["block_table"] if part == "pages" else step["read_index"][layer.group]
        tensors = (table, cu_q, cu_k)
        q_len, k_len = (
            step[f"max_length_{x}"] if f"max_length_{x}" in step else step[f"max_seqlen_{x}"] for x in "qk"
        )  # renamed in 5.19
        k_len = of_type(k_len, layer_type)
        capturing = cu_q.is_cuda and torch.cuda.is_current_stream_capturing()
        facts = (q_len, k_len, num_tokens, capturing)
        key = (part, layer.group, spec)
        held = self.plans.get(key)
        if held is not None and held.facts == facts and all(a is b for a, b in zip(held.tensors, tensors, strict=True)):
            remember(held.plan)
            return held
        q_len, slots = min(q_len, num_tokens), None
        if part == "pages":  # here the engine's bounds are 1 whatever the lengths are
            table, seq_lens = table[layer.group], cu_k.diff()
            q_len, k_len = 1, table.shape[1] * layer.pages.page_size
            slots = new_slots(table, seq_lens, layer.pages.page_size)
            batch = Batch(table, seq_lens)  # one query each
        elif part == "all":
            batch = Batch(table, cu_k.diff(), cu_q, cu_pages=cu_k)
        elif part == "new":
            k_len, batch = q_len, Batch.varlen(cu_q, cu_q)
        else:
            past_lens = cu_k.diff() - cu_q.diff()
            batch = Batch(table, past_lens, cu_q, cu_pages=cu_k, query_offsets=past_lens)
        plan = quire.plan(spec, batch, max_query_len=q_len, max_seq_len=k_len, num_tokens=num_tokens)
        self.plans[key] = Planned(remember(plan), slots, tensors, facts)
        return self.plans[key]


def new_slots(table: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the slot of each sequence's last token, -1 for a padding row, without asking the device for anything."""
    last = (seq_lens - 1).clamp(min=0).long()
    page = table.gather(1, (last // page_size)[:, None])[:, 0].long()
    return torch.where(seq_lens > 0, page * page_size + last % page_size, -1)


def find_layer(cache, index: int) -> Layer:
    """Read off the engine's cache where a layer lies; there is no public accessor that serves sliding layers too."""
    if hasattr(cache, "layer_to_allocator"):  # from 5.18
        allocator = cache.layer_to_allocator[index]
        group, window, page_size = (
            allocator.index,
            getattr(allocator, "sliding_window", None),
            allocator.tokens_per_page,
        )
        k, v = allocator._kv_token_views[index]  # [num_slots, num_kv_heads, head_dim]
        k = k[: v.shape[0]]  # they are two offsets into one buffer, keys first
    else:
        group, position = cache.layer_index_to_group_indices[index]
        window, page_size = cache.sliding_windows[index], cache.block_size
        window = None if window == 1 else window
        k, v = cache.key_cache[position], cache.value_cache[position]
    return Layer(
        group,
        window,
        PagedKVCache(k.unflatten(0, (-1, page_size)), v.unflatten(0, (-1, page_size))),
        PagedKVCache(k[:, None], v[:, None]),
    )


def engine_of(cache) -> Engine:
    """Return what is kept of an engine's cache."""
    if cache not in _engines:
        _engines[cache] = Engine()
    return _engines[cache]


def of_type(value, layer_type: str):
    """Pick a layer type's entry where the engine gives one for each."""
    return value[layer_type] if isinstance(value, dict) else value


def remember(plan: Plan) -> Plan:
    """Keep the newest plan for `last_plan`."""
    global _last_plan
    _last_plan = plan
    return plan


_engines: WeakKeyDictionary = WeakKeyDictionary()  # cache → Engine
_last_plan: Plan | None = None
