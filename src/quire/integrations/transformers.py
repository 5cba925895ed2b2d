"""Quire as an attention implementation of Hugging Face Transformers.

Call `use(model)`, or pass `attn_implementation=install()` when loading.

Scheduling, continuous batching, sampling and prefix reuse stay Transformers'. Its continuous batching gives an
attention function the new keys and values, the cache, and for each sequence either the list of token slots to read (a
page table of page size 1) or, in steps that only decode on a GPU, a table of pages. Quire writes the new tokens into
their slots and attends through the list or the table in place, for prefill as for decode. Nothing is gathered.

Sliding-window layers keep a ring of the last tokens. Writing first would overwrite keys that the early queries of a
chunk still need. There the past in the ring and the step's own tokens are two states over disjoint keys: attend to
both, merge, then write.

Models with multi-head latent attention (DeepSeek-V2 and V3) expand their latents before they attend. Their keys are
wider than their values, and both are wider than `config.head_dim`, which sizes the engine's cache. `use` sets it to the
width of the keys. A value takes the first columns of its slot.

`transformers serve` from 5.17 to 5.23 accepts only the attention implementations of a fixed list and kernels of the
hub, so it cannot use Quire. Serve through `model.init_continuous_batching` instead.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
import transformers
from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface

import quire
from quire import AttentionSpec, Batch, PagedKVCache, Plan, UnsupportedError
from quire.integrations import layer_spec
from quire.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

SUPPORTED = (Version("5.17"), Version("5.24"))  # from, and before
NO_PREFIX = Version("5.19")  # from here on, names of paged implementations have no prefix `paged|`
# Transformers gives CUDA graphs and decoding by page tables to names that contain "flash" and, after it, a 2 or 3.
NAME = "quire_flash_2"


def install() -> str:
    """Register Quire with Transformers' attention and mask interfaces. Calling it again changes nothing.

    Returns:
        The name to pass as `attn_implementation`, or to `model.set_attn_implementation`.

    Raises:
        UnsupportedError: this version of Transformers is outside the supported range.
    """
    version = Version(transformers.__version__)
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        raise UnsupportedError(
            f"transformers must be from {SUPPORTED[0]} to before {SUPPORTED[1]}, got {version}; "
            "install a version in that range"
        )
    name = NAME if version >= NO_PREFIX else f"paged|{NAME}"
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, unserved_mask)
    seed_lazy_import(name)
    return name


def use(model: transformers.PreTrainedModel) -> str:
    """Install Quire and set it on a loaded model.

    Some models (gpt-oss) list the implementations with "flash" in their names that may serve them, and replace any
    other without an error. Quire serves attention sinks, so its name is added to this model's list. In a model with
    latent attention `config.head_dim` becomes the width of the keys, which continuous batching needs.

    Args:
        model: a decoder-only model that continuous batching runs.

    Returns:
        The implementation's name.

    Raises:
        UnsupportedError: this version of Transformers is outside the supported range.
    """
    name = install()
    modules: Any = torch.nn.Module.modules(model)
    for module in modules:
        listed = getattr(module, "_compatible_flash_implementations", None)
        if listed is not None and NAME not in listed:
            module._compatible_flash_implementations = [*listed, NAME]
    config: Any = model.config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None) and getattr(config, "qk_nope_head_dim", None):
        config.head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    model.set_attn_implementation(name)
    return name


def last_plan() -> Plan | None:
    """Return the plan of the newest launch, to see which kernel ran."""
    return _last_plan


def seed_lazy_import(name: str) -> None:
    """Tell Transformers that the implementation `name` is imported already, with Quire's functions as flash-attn's.

    Transformers imports or downloads a package of that name when an implementation with "flash" in its name is set, and
    has no public way to say that there is none. These private globals of `modeling_flash_attention_utils` are the ones
    that the import would have set. They hold one implementation at a time: after another flash implementation was
    loaded in the same process, call `install` (or `use`) again.
    """
    from transformers import modeling_flash_attention_utils

    lazy: Any = modeling_flash_attention_utils
    lazy._loaded_implementation = name
    lazy._flash_fn = flash_attn_func
    lazy._flash_varlen_fn = flash_attn_varlen_func
    lazy._flash_with_kvcache_fn = flash_attn_with_kvcache
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
    allow_is_bidirectional_skip: bool | None = None,  # given only for masks that are not causal
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return None if causality and windows are the whole mask; otherwise a mask that `attention_forward` refuses.

    That is the 2-D mask if there is padding or a static cache, whose unused end only a mask shows. For other masks
    (packed sequences, blocks) it is an empty tensor. Continuous batching packs sequences too, but gives their lengths.

    Raises:
        UnsupportedError: the mask is not causal.
    """
    if allow_is_bidirectional_skip is not None:
        raise UnsupportedError(
            "attention_mask must be causal, got the mask of a bidirectional model or of cross-attention; "
            "load the model with attn_implementation='sdpa'"
        )
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]
        if attention_mask.shape[1] != kv_length or not attention_mask.all():
            return attention_mask
    if isinstance(q_offset, torch.Tensor) or not allow_is_causal_skip:  # a static cache counts on the device
        return torch.empty(0, 0, 0, 0)  # Transformers passes a 4-D mask on unchanged
    return None


def attention_forward(
    module: Any,  # torch.nn.Module; under continuous batching it has a `layer_idx`
    query: torch.Tensor,  # [batch, num_q_heads, num_queries, head_dim]; batch is 1 under continuous batching
    key: torch.Tensor,  # [batch, num_kv_heads, num_keys, head_dim]; under continuous batching the new tokens only
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **step: Any,
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
            "attention_mask must be None (causal or sliding-window attention without padding), got padding, a static "
            "cache, packed sequences or another mask; generate by continuous batching (`model.generate_batch`), or "
            "without `cache_implementation` and with prompts of one length at a time"
        )
    engine = None if cache is None else engine_of(cache)
    layer = None if engine is None else engine.layer(cache, module.layer_idx, key.shape[-1], value.shape[-1])
    spec = layer_spec(
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[-1],
        head_dim_v=value.shape[-1],
        dtype=query.dtype,
        softmax_scale=scaling or getattr(module, "scaling", None),
        causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        sliding_window=sliding_window if sliding_window or layer is None else layer.window,
        softcap=softcap,
        sinks=s_aux is not None,
    )
    if engine is None or layer is None:
        return contiguous_attention(query, key, value, spec, s_aux), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    current = Step.of(step, layer, num_tokens=q.shape[0])
    attend = attend_with_ring
    if current.by_pages:
        attend = attend_by_pages
    elif layer.window is None:
        attend = attend_by_slots
    return attend(q, k, v, Call(spec, s_aux, engine, layer, current)).unsqueeze(0), None


def contiguous_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attend in an ordinary forward pass, to keys and values as they are; the queries are the last of the tokens."""
    (num_seqs, _, q_len, _), kv_len = query.shape, key.shape[2]
    cu_q = torch.arange(0, (num_seqs + 1) * q_len, q_len, dtype=torch.int32, device=query.device)
    cu_k = torch.arange(0, (num_seqs + 1) * kv_len, kv_len, dtype=torch.int32, device=query.device)
    plan = remember(quire.plan(spec, Batch.varlen(cu_q, cu_k), max_query_len=q_len, max_seq_len=kv_len))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    return quire.varlen_attention(q, k, v, plan, sinks=sinks).unflatten(0, (num_seqs, q_len))


class Layer(NamedTuple):
    """Where one model layer's keys and values are in the engine's cache."""

    group: int  # index of the layer's lists and tables among those of a step
    window: int | None  # tokens in its ring, or None if all are kept
    pages: PagedKVCache  # in the engine's pages
    slots: PagedKVCache  # the same memory, in pages of one token


class Step(NamedTuple):
    """One step as the engine describes it to the layers of one group."""

    cu_q: torch.Tensor  # [num_seqs + 1] int32, cumulative query counts
    cu_k: torch.Tensor  # [num_seqs + 1] int32, cumulative key counts
    table: torch.Tensor  # by pages [groups, num_seqs, max_pages] int32; otherwise this group's slots to read, flat
    write_slots: torch.Tensor  # [num_tokens] int64; not used by pages
    max_query_len: int
    max_seq_len: int
    num_tokens: int
    by_pages: bool  # a step that only decodes, with a table of pages
    capturing: bool  # into a CUDA graph

    @classmethod
    def of(cls, step: dict[str, Any], layer: Layer, num_tokens: int) -> "Step":
        """Read the keyword arguments that the engine passes to an attention function."""
        layer_type = "full_attention" if layer.window is None else "sliding_attention"
        by_pages = step["block_table"] is not None
        names = ("max_length_q", "max_length_k") if "max_length_q" in step else ("max_seqlen_q", "max_seqlen_k")  # 5.19
        max_query_len, max_seq_len = (step[name] for name in names)
        cu_q: torch.Tensor = step["cu_seq_lens_q"]
        return cls(
            cu_q=cu_q,
            cu_k=of_type(step["cu_seq_lens_k"], layer_type),
            table=step["block_table"] if by_pages else step["read_index"][layer.group],
            write_slots=step["write_index"][layer.group],
            max_query_len=min(max_query_len, num_tokens),
            max_seq_len=of_type(max_seq_len, layer_type),
            num_tokens=num_tokens,
            by_pages=by_pages,
            capturing=cu_q.is_cuda and torch.cuda.is_current_stream_capturing(),
        )

    def is_same(self, other: "Step") -> bool:
        """Whether both describe one step: the same tensor objects and equal numbers.

        A step keeps its tensors alive, so that no later one can have their identity. A graph capture is another step:
        what follows from the lengths must be computed inside the graph, or its replays would use the capture's lengths.
        """
        return all(a is b if isinstance(a, torch.Tensor) else a == b for a, b in zip(self, other, strict=True))


# The keys that a plan is for. All layers of a group share a step's plan.


class Part(Protocol):
    """A part of the keys of a step, planned."""

    @property
    def plan(self) -> Plan: ...

    @classmethod
    def of(cls, spec: AttentionSpec, layer: Layer, step: Step) -> Self: ...


@dataclass(frozen=True, eq=False)
class PagedKeys:
    """All keys of a step that decodes one token per sequence, by the engine's table of pages."""

    plan: Plan
    slots: torch.Tensor  # [num_seqs] int64, where each sequence's new token goes

    @classmethod
    def of(cls, spec: AttentionSpec, layer: Layer, step: Step) -> Self:
        """Plan from the table's width: the engine's bounds are 1 here, whatever the lengths are."""
        table, seq_lens, page_size = step.table[layer.group], step.cu_k.diff(), layer.pages.page_size
        max_seq_len = table.shape[1] * page_size
        plan = quire.plan(
            spec, Batch(table, seq_lens), max_query_len=1, max_seq_len=max_seq_len, num_tokens=step.num_tokens
        )
        return cls(plan, new_slots(table, seq_lens, page_size))


@dataclass(frozen=True, eq=False)
class AllKeys:
    """The past and the step's own keys, by the list of their slots."""

    plan: Plan

    @classmethod
    def of(cls, spec: AttentionSpec, layer: Layer, step: Step) -> Self:
        """Plan for a page table of page size 1."""
        batch = Batch(step.table, step.cu_k.diff(), step.cu_q, cu_pages=step.cu_k)
        return cls(make_plan(spec, batch, step, step.max_seq_len))


@dataclass(frozen=True, eq=False)
class NewKeys:
    """The step's own keys, as the layer computed them."""

    plan: Plan

    @classmethod
    def of(cls, spec: AttentionSpec, layer: Layer, step: Step) -> Self:
        """Plan for keys that are not paged."""
        return cls(make_plan(spec, Batch.varlen(step.cu_q, step.cu_q), step, step.max_query_len))


@dataclass(frozen=True, eq=False)
class PastKeys:
    """The keys in a sliding window's ring, without the step's own, by the list of their slots."""

    plan: Plan

    @classmethod
    def of(cls, spec: AttentionSpec, layer: Layer, step: Step) -> Self:
        """Plan for queries that come after all of these keys."""
        past_lens = step.cu_k.diff() - step.cu_q.diff()
        batch = Batch(step.table, past_lens, step.cu_q, cu_pages=step.cu_k, query_offsets=past_lens)
        return cls(make_plan(spec, batch, step, step.max_seq_len))


def make_plan(spec: AttentionSpec, batch: Batch, step: Step, max_seq_len: int) -> Plan:
    """Return a plan for a step's queries."""
    return quire.plan(
        spec, batch, max_query_len=step.max_query_len, max_seq_len=max_seq_len, num_tokens=step.num_tokens
    )


P = TypeVar("P", bound=Part)


@dataclass
class Engine:
    """What is kept of an engine's cache, for as long as it lives: its layers, and the current step's plans."""

    layers: dict[int, Layer] = field(default_factory=dict)
    parts: dict[tuple[type[Part], int, AttentionSpec], tuple[Step, Any]] = field(default_factory=dict)

    def layer(self, cache: Any, index: int, head_dim: int, head_dim_v: int) -> Layer:
        """Return where layer `index` is."""
        if index not in self.layers:
            self.layers[index] = find_layer(cache, index, head_dim, head_dim_v)
        return self.layers[index]

    def part(self, kind: type[P], spec: AttentionSpec, layer: Layer, step: Step) -> P:
        """Return a part of the keys, planned once per step."""
        key = (kind, layer.group, spec)
        held = self.parts.get(key)
        if held is None or not held[0].is_same(step):
            held = self.parts[key] = (step, kind.of(spec, layer, step))
        part: P = held[1]
        remember(part.plan)
        return part


class Call(NamedTuple):
    """One layer's attention in one step of continuous batching."""

    spec: AttentionSpec
    sinks: torch.Tensor | None
    engine: Engine
    layer: Layer
    step: Step

    def keys(self, kind: type[P]) -> P:
        """Return a part of the keys."""
        return self.engine.part(kind, self.spec, self.layer, self.step)


# Each of the three takes q [num_tokens, num_q_heads, head_dim] and k, v of the step's tokens, writes k and v, and
# returns out [num_tokens, num_q_heads, head_dim].


def attend_by_pages(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Decode one token per sequence through a table of pages. The engine gives no slots to write: the table does."""
    keys = call.keys(PagedKeys)
    quire.write_kv(k, v, call.layer.pages, keys.slots)
    return quire.attention(q, call.layer.pages, keys.plan, sinks=call.sinks)


def attend_by_slots(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Write, then attend to past and new tokens through the list of their slots: any mix of prefill and decode."""
    quire.write_kv(k, v, call.layer.slots, call.step.write_slots)
    if call.step.table.numel() == 0:  # no sequence has a past: the new tokens are all the keys
        return quire.varlen_attention(q, k, v, call.keys(NewKeys).plan, sinks=call.sinks)
    return quire.attention(q, call.layer.slots, call.keys(AllKeys).plan, sinks=call.sinks)


def attend_with_ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Attend to the past in a ring and to the new tokens, merge, and then overwrite the past with the new tokens."""
    new = quire.varlen_attention(q, k, v, call.keys(NewKeys).plan, sinks=call.sinks, return_lse=True)
    if call.step.table.numel() > 0:
        past = call._replace(spec=without_sinks(call.spec)).keys(PastKeys)
        new = quire.merge_states([quire.attention(q, call.layer.slots, past.plan, return_lse=True), new])
    quire.write_kv(k, v, call.layer.slots, call.step.write_slots)
    return new.out


@lru_cache(maxsize=256)
def without_sinks(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec for a part of the keys whose state is merged with one that has the sinks."""
    return replace(spec, sinks=False)


def new_slots(table: torch.Tensor, seq_lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the slot of each sequence's last token, -1 for a padding row, without asking the device for anything."""
    last = (seq_lens - 1).clamp(min=0).long()
    page = table.gather(1, (last // page_size)[:, None])[:, 0].long()
    return torch.where(seq_lens > 0, page * page_size + last % page_size, -1)


def find_layer(cache: Any, index: int, head_dim: int, head_dim_v: int) -> Layer:
    """Read from the engine's cache where a layer is. No public accessor serves sliding-window layers too."""
    if hasattr(cache, "layer_to_allocator"):  # from 5.18
        allocator = cache.layer_to_allocator[index]
        group, page_size = allocator.index, allocator.tokens_per_page
        window = getattr(allocator, "sliding_window", None)
        k, v = allocator._kv_token_views[index]  # [num_slots, num_kv_heads, head_dim]
        k = k[: v.shape[0]]  # two offsets into one buffer, keys first
    else:
        group, position = cache.layer_index_to_group_indices[index]
        window, page_size = cache.sliding_windows[index], cache.block_size
        window = None if window == 1 else window
        k, v = cache.key_cache[position], cache.value_cache[position]
    if k.shape[-1] != head_dim or v.shape[-1] < head_dim_v:
        raise UnsupportedError(
            f"config.head_dim must be the width of keys in the cache, {head_dim}, got {k.shape[-1]}; "
            "call quire.integrations.transformers.use(model)"
        )
    v = v[..., :head_dim_v]
    pages = PagedKVCache(k.unflatten(0, (-1, page_size)), v.unflatten(0, (-1, page_size)))
    return Layer(group, window, pages, PagedKVCache(k[:, None], v[:, None]))


def engine_of(cache: Any) -> Engine:
    """Return what is kept of an engine's cache."""
    if cache not in _engines:
        _engines[cache] = Engine()
    return _engines[cache]


def of_type(value: Any, layer_type: str) -> Any:
    """Return a layer type's entry if the engine gives one for each type."""
    return value[layer_type] if isinstance(value, dict) else value


def remember(plan: Plan) -> Plan:
    """Keep the newest plan for `last_plan`."""
    global _last_plan
    _last_plan = plan
    return plan


_engines: WeakKeyDictionary[Any, Engine] = WeakKeyDictionary()  # by the engine's cache
_last_plan: Plan | None = None
