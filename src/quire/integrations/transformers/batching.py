"""Continuous batching of Transformers: where a step's keys are, what is planned for them, and attention to them.

A step reads its keys in one of three ways. Steps that only decode have a table of pages. Other steps have lists of
token slots. Sliding-window layers have a ring of slots, whose keys and the step's own keys are attended to separately.
All layers of a group share a step's plans.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from typing import Any, NamedTuple, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import quire
from quire import AttentionSpec, Batch, PagedKVCache, Plan, UnsupportedError

CACHE = "quire_cache"  # attribute of new keys: the cache that the step's keys are in


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
    """The state kept with an engine's cache, as long as it lives: its layers, and of the current step what was done."""

    layers: dict[int, Layer] = field(default_factory=dict)
    parts: dict[tuple[type[Part], int, AttentionSpec], tuple[Step, Any]] = field(default_factory=dict)
    attended: dict[int, Step] = field(default_factory=dict)  # by layer, the newest step

    def layer(self, cache: Any, index: int, num_kv_heads: int, head_dim: int, head_dim_v: int) -> Layer:
        """Return where layer `index` is."""
        if index not in self.layers:
            self.layers[index] = find_layer(cache, index, num_kv_heads, head_dim, head_dim_v)
        return self.layers[index]

    def begin(self, index: int, step: Step) -> None:
        """Note that layer `index` attends in a step; raise if it did before, with keys that would be overwritten."""
        before = self.attended.get(index)
        if before is not None and before.is_same(step):
            raise UnsupportedError(
                f"a layer must attend once in a step, got layer {index} twice: its keys and values have one place in "
                "the cache; generate by model.generate"
            )
        self.attended[index] = step

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


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Write a step's keys and values, and attend.

    Args:
        q: [num_tokens, num_q_heads, head_dim], of the step's tokens.
        k: [num_tokens, num_kv_heads, head_dim], of the same tokens.
        v: [num_tokens, num_kv_heads, head_dim_v], of the same tokens.
        call: the layer and the step.

    Returns:
        out [num_tokens, num_q_heads, head_dim_v].
    """
    if call.step.by_pages:
        return attend_by_pages(q, k, v, call)
    if call.layer.window is None:
        return attend_by_slots(q, k, v, call)
    return attend_with_ring(q, k, v, call)


def attend_by_pages(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Decode one token per sequence through a table of pages. The engine gives no slots to write: the table does."""
    keys = call.keys(PagedKeys)
    return quire.attention(q, call.layer.pages, keys.plan, k=k, v=v, slot_mapping=keys.slots, sinks=call.sinks)


def attend_by_slots(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> torch.Tensor:
    """Write, then attend to past and new tokens through the list of their slots: any mix of prefill and decode."""
    slots, into = call.step.write_slots, call.layer.slots
    if call.step.table.numel() == 0:  # no sequence has a past: the new tokens are all the keys
        quire.write_kv(k, v, into, slots)
        return quire.varlen_attention(q, k, v, call.keys(NewKeys).plan, sinks=call.sinks)
    return quire.attention(q, into, call.keys(AllKeys).plan, k=k, v=v, slot_mapping=slots, sinks=call.sinks)


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


def take_updates(name: str) -> None:
    """Let the cache's `update` pass the cache on to attention, in models whose implementation is `name`.

    From 5.24 on, a layer calls `update` with its new keys and values, and then attention with what it returns and with
    `kwargs`. Before, the cache is in `kwargs` already, and only attention functions of Transformers call `update`.
    A layer that attends to the keys of an earlier one (Gemma 3n), or gives no `kwargs` (GPT-NeoX), finds the cache on
    the keys.
    """
    engine_cache: Any = PagedAttentionCache
    update = engine_cache.update
    if vars(update).get("passes_on") == name:
        return

    @wraps(update)
    def pass_on(
        self: Any, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config._attn_implementation != name:
            return update(self, key_states, value_states, layer_idx, kwargs)
        setattr(key_states, CACHE, self)
        if kwargs is not None:
            kwargs["cache"] = self
        return key_states, value_states

    vars(pass_on)["passes_on"] = name
    engine_cache.update = pass_on


def find_layer(cache: Any, index: int, num_kv_heads: int, head_dim: int, head_dim_v: int) -> Layer:
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
    if k.shape[-1] < max(head_dim, head_dim_v):
        raise UnsupportedError(
            f"config.head_dim must be at least the width of keys, {head_dim}, and of values, {head_dim_v}, since "
            f"continuous batching sizes its cache by it, got {k.shape[-1]}; call "
            "quire.integrations.transformers.use(model), which sets it for latents, or generate by model.generate"
        )
    if k.shape[1] != num_kv_heads:
        raise UnsupportedError(
            f"config.num_key_value_heads must be the number of heads of keys that a layer attends to, {num_kv_heads}, "
            f"since continuous batching sizes its cache by it, got {k.shape[1]}; generate by model.generate"
        )
    k, v = k[..., :head_dim], v[..., :head_dim_v]
    pages = PagedKVCache(k.unflatten(0, (-1, page_size)), v.unflatten(0, (-1, page_size)))
    return Layer(group, window, pages, PagedKVCache(k[:, None], v[:, None]))


def engine_of(cache: Any) -> Engine:
    """Return the `Engine` of a cache, made at first use."""
    if cache not in _engines:
        _engines[cache] = Engine()
    return _engines[cache]


def of_type(value: Any, layer_type: str) -> Any:
    """Return a layer type's entry if the engine gives one for each type."""
    return value[layer_type] if isinstance(value, dict) else value


def last_plan() -> Plan | None:
    """Return the plan of the newest launch, to see which kernel ran."""
    return _last_plan


def remember(plan: Plan) -> Plan:
    """Keep the newest plan for `last_plan`."""
    global _last_plan
    _last_plan = plan
    return plan


_engines: WeakKeyDictionary[Any, Engine] = WeakKeyDictionary()  # by the engine's cache
_last_plan: Plan | None = None
