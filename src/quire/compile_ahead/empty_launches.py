"""`EmptyLaunches`: launch kernels for batches without keys, which compiles and loads them, and computes nothing."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.api import attention, norm_rope_and_write, write_kv, write_latent
from quire.batch import Batch, ChosenKeys
from quire.cache import PagedKVCache
from quire.dispatch.request import cdiv
from quire.kernels.launch import Launch, as_appending
from quire.plan import make_plan
from quire.spec import AttentionSpec
from quire.state import State


@dataclass(frozen=True)
class EmptyLaunches:
    """What a warm-up launches: the write kernel, and attention.

    Attributes:
        spec: what is computed.
        cache: one layer's pages, neither read nor written.
        launches: of attention.
        return_lse: whether the lse is asked for.
        append: whether attention is given new tokens, which have no slots.
        norm_rope: how new tokens are normalised and rotated, as `attention` takes it.
        out_scale: whether outputs are quantised.
        per_head_dtype: dtype of sinks and slopes; None for the spec's, and float32.
        extra_cache: of keys in a second cache, if batches name some.
    """

    spec: AttentionSpec
    cache: PagedKVCache
    launches: tuple[Launch, ...]
    return_lse: bool
    append: bool
    norm_rope: Mapping[str, Any]
    out_scale: bool
    per_head_dtype: torch.dtype | None = None
    extra_cache: PagedKVCache | None = None

    def run(self, before: Callable[[str], None] = lambda name: None) -> None:
        """Launch each kernel, after a call of `before` with its description."""
        if self.cache.layout != "THD":
            before("kernel that rotates and writes" if self.norm_rope else "write kernel")
            self.write()
        for launch in self.launches:
            before(str(launch))
            self.attend(launch)

    def new_tokens(self, num_tokens: int) -> dict[str, Any]:
        """Return new tokens without a slot, and how they are rotated, as `attention` takes them."""
        spec, device = self.spec, self.cache.device
        k = torch.zeros(num_tokens, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=device)
        v = torch.zeros(num_tokens, spec.num_kv_heads, spec.head_dim_v, dtype=spec.dtype, device=device)
        step = {"k": k, "v": v, "slot_mapping": torch.full((num_tokens,), -1, device=device), **self.norm_rope}
        if "rope" in step:
            positions = torch.zeros(num_tokens, dtype=step["rope"].positions.dtype, device=device)
            step["rope"] = step["rope"]._replace(positions=positions)
        return step

    def write(self) -> None:
        """Launch the kernel that writes, or that also normalises and rotates, for a token without a slot."""
        spec, cache, step = self.spec, self.cache, self.new_tokens(1)
        k, v, nowhere = step["k"], step["v"], step["slot_mapping"]
        if spec.latent:
            write_latent(v[:, 0], k[:, 0, spec.kv_lora_rank :], cache, nowhere)
        elif self.norm_rope:
            q = torch.zeros(1, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=cache.device)
            norm_rope_and_write(q, torch.empty_like(q), cache, k, v, nowhere, step.get("rope"), step.get("qk_norm"))
        else:
            write_kv(k, v, cache, nowhere)

    def attend(self, launch: Launch) -> None:
        """Launch attention for sequences without keys; with `append`, for a new token without a slot."""
        request, cache, device = launch.request, self.cache, self.cache.device
        spec, num_seqs = request.spec, request.num_seqs
        pages = cdiv(request.bounds.max_seq_len, cache.page_size)
        table = torch.zeros(1, pages, dtype=torch.int32, device=device).expand(num_seqs, -1)
        starts = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device) if request.has_cu_seqlens else None
        seq_lens = torch.zeros(num_seqs, dtype=torch.int32, device=device)
        num_tokens = 1 if request.has_cu_seqlens else num_seqs
        nothing, seen = torch.zeros(num_tokens, dtype=torch.int32, device=device), {}
        if request.has_tree:
            seen["tree_bits"] = nothing.long()
        if request.has_intervals:
            seen |= {"key_begin": nothing} if request.has_tree else {"key_begin": nothing, "key_end": nothing}
        if request.chosen is not None:
            seen["chosen"] = empty_lists(request.chosen, nothing)
        extra: dict[str, Any] = {}
        if request.extra_chosen is not None:
            seen["extra_chosen"] = empty_lists(request.extra_chosen, nothing)
            extra["extra_cache"] = self.extra_cache
        batch = Batch(table, seq_lens, starts, paged=cache.layout != "THD", **seen)
        plan = make_plan(spec, batch, launch, "warm-up")
        q = torch.zeros(num_tokens, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=device)
        dtype, scale = (torch.float8_e4m3fn, torch.ones(1, device=device)) if self.out_scale else (q.dtype, None)
        out = torch.empty(num_tokens, spec.num_q_heads, spec.head_dim_v, dtype=dtype, device=device)
        into = State(out, torch.empty(q.shape[:2], device=device)) if self.return_lse else out
        heads, dtype = spec.num_q_heads, self.per_head_dtype
        slopes = torch.zeros(heads, dtype=dtype or torch.float32, device=device) if spec.alibi else None
        sinks = torch.zeros(heads, dtype=dtype or spec.dtype, device=device) if spec.sinks else None
        new = self.new_tokens(num_tokens) if self.append and plan.appender(cache) is not None else {}
        extra["extras"] = tuple(torch.zeros(one.with_size(1), dtype=one.dtype, device=device) for one in spec.extras)
        attention(q, cache, plan, **new, sinks=sinks, alibi_slopes=slopes, out=into, out_scale=scale, **extra)

    def with_launches(self, planned: Iterable[Launch]) -> "EmptyLaunches":
        """Return a warm-up of those planned launches that have a kernel which none before has."""
        launches: list[Launch] = []
        found: set[Hashable] = set()
        for plan in planned:
            launch = plan.for_cache(self.cache)
            keys = {(self.append and as_appending(launch), key) for key in launch.compile_keys()}
            if not keys <= found:
                launches.append(launch)
                found |= keys
        return replace(self, launches=tuple(launches))


def empty_lists(kind: tuple[int, bool, bool, int], lens: torch.Tensor) -> ChosenKeys:
    """Return lists of a kind (`ChosenKeys.kind`) that name nothing, one for each of `lens`, which are 0."""
    block_size, are_slots, has_lens, width = kind
    lists = torch.full((lens.shape[0], width), -1, dtype=torch.int32, device=lens.device)
    return ChosenKeys(lists, lens if has_lens else None, block_size, are_slots)
