"""The state of a metadata builder: plans, scratch memory, and the bounds of what is compiled ahead.

A plan is made when a layer first asks for it, so a step that replays a captured graph makes none. Plans are kept by
their bounds and by the memory that they read, which vLLM reuses from step to step. Values that vary are read on the
device, so nothing here waits for it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch

import quire
from quire import AttentionSpec, ChosenKeys, PagedKVCache, Plan
from quire.integrations.engine import LEAST_KEYS, START, rounded_up
from quire.integrations.vllm import contract

envs: Any = contract.load("vllm.envs")
ENCODER_DECODER = contract.load("vllm.v1.attention.backend").AttentionType.ENCODER_DECODER

SHARES = "kv_sharing_target_layer_name"  # an attribute of a layer that attends to another's keys
MAX_PLANS = 256  # kept by a builder
Kind = tuple[AttentionSpec, dict[str, Any]]  # a spec, and whether batches have intervals
Launch = tuple[AttentionSpec, PagedKVCache, dict[str, Any]]  # what is warmed up


class Planner:
    """A part of a builder of metadata: it makes and keeps the plans of a group of layers."""

    def keep_plans(
        self,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        max_num_tokens: int | None = None,
    ) -> None:
        """Find the bounds of plans, and how much scratch memory the largest one needs.

        Args:
            layer_names: of the group.
            vllm_config: of the engine.
            device: where.
            max_num_tokens: vLLM's bound if it is not given.
        """
        layers = vllm_config.compilation_config.static_forward_context
        # A layer that attends to another's keys comes first, so that one that writes its own takes its place.
        names = sorted(layer_names, key=lambda name: getattr(layers[name].impl, SHARES, None) is None)
        self.layers: dict[AttentionSpec, Any] = {layers[name].impl.spec: layers[name] for name in names}
        for spec in self.layers:
            say_once(spec, tuple(name for name in names if layers[name].impl.spec == spec))
        self.has_bidirectional_steps = contract.has_bidirectional_steps(vllm_config)
        kinds = [kind for spec in self.layers for kind in self.kinds(spec)]
        self.planned = {spec for spec, _ in kinds}  # the workspace is large enough for these
        self.bounds = bounds_of([layers[name].impl for name in names], vllm_config, max_num_tokens)
        self.batch_invariant: bool = self.bounds["batch_invariant"]
        kinds += [(part, {}) for spec in self.layers for part in self.parts_of(spec)]
        sizes = [quire.workspace_size(spec, **self.bounds, **has, device=device) for spec, has in kinds]
        self.workspace_size, self.workspace_device = max(sizes), device
        self.workspace: torch.Tensor | None = None
        self.plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self.warm = not warms_up(vllm_config)

    def kinds(self, spec: AttentionSpec) -> list[Kind]:
        """Return the specs of a layer's plans, and what their batches have."""
        specs = [spec, bidirectional(spec)] if self.has_bidirectional_steps and spec.causal else [spec]
        return [(planned, {}) for planned in specs]

    def parts_of(self, spec: AttentionSpec) -> list[AttentionSpec]:
        """Return the specs of the parts of a layer's plans that share prefixes; none where no step shares one."""
        return []

    def reserve_workspace(self) -> None:
        """Allocate the scratch memory, for the first step.

        Not before: vLLM 0.20 makes builders while it allocates its cache from a pool of memory whose contents are lost
        when the server sleeps. The counters in a workspace must be 0 before each launch.
        """
        if self.workspace is None and self.workspace_size:
            self.workspace = torch.zeros(self.workspace_size, dtype=torch.uint8, device=self.workspace_device)

    def compile_ahead(self, pages_of: Callable[[Any], PagedKVCache], further: Callable[[], list[str]] = list) -> None:
        """Before the first capture, compile what any step can need, so that no request waits for a compiler.

        Without graphs, or with `additional_config={"quire_warmup": False}`, kernels are compiled when they are first
        launched.

        Args:
            pages_of: returns a layer's pages.
            further: compiles what is needed besides, and returns the descriptions of it.
        """
        if self.warm:
            return
        self.warm = True
        began = time.perf_counter()
        names = []
        for spec, layer in self.layers.items():
            for planned, pages, options in self.launches(spec, layer.impl, pages_of(layer)):
                names.append(quire.warmup(planned, pages, **self.bounds, **options))
        count = sum(map(len, names)) + len(further())
        if count:
            contract.logger.info("Quire has %d kernels ready after %.1f s", count, time.perf_counter() - began)

    def launches(self, spec: AttentionSpec, impl: Any, pages: PagedKVCache) -> list[Launch]:
        """Return what a layer launches: specs, caches, and how else they are warmed up."""
        options = {"return_lse": True} if impl.need_to_return_lse_for_decode else {}
        return [(planned, pages, options | has) for planned, has in self.kinds(spec)]

    def plan_for(
        self,
        spec: AttentionSpec,
        table: torch.Tensor,  # [num_seqs, max_pages_per_seq] int32
        seq_lens: torch.Tensor,  # [num_seqs] int32
        starts: torch.Tensor | None,  # [num_seqs + 1] int32; None if every sequence has one query
        *,
        page_size: int,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        paged: bool = True,
        chosen: ChosenKeys | None = None,  # the keys that each token sees
        num_shared: int = 0,  # first keys that all sequences share, in whole pages
    ) -> Plan:
        """Return a plan: an earlier one if bounds and memory are the same.

        The bound of the keys is the next power of two, or the longest context, or the table's width, so that decoding
        does not need a new plan for every token. Those of queries are rounded as well, since no two steps with chunks
        of prompts are alike, and to decide a plan takes a millisecond. Where keys are not paged, the table says where
        those of each sequence begin.
        """
        own = max_seq_len - num_shared
        rounded = num_shared + max(LEAST_KEYS, 1 << max(0, own - 1).bit_length())
        rounded = min(rounded, max(max_seq_len, self.bounds["max_seq_len"]))
        max_seq_len = min(rounded, table.shape[1] * page_size)
        if max_query_len > 1:
            num_tokens = rounded_up(num_tokens, self.bounds["max_num_tokens"])
            max_query_len = rounded_up(max_query_len, num_tokens)
        memory = (
            table.data_ptr(),
            table.stride(0),
            seq_lens.data_ptr(),
            None if starts is None else starts.data_ptr(),
            None if chosen is None else (chosen.indices.data_ptr(), chosen.indices.shape[1:], chosen.indices.stride()),
        )
        key = spec, num_tokens, max_query_len, max_seq_len, num_shared, seq_lens.shape[0], memory
        plan = self.plans.get(key)
        if plan is None:
            plan = self.plans[key] = quire.plan(
                spec,
                quire.Batch(table, seq_lens, starts, paged=paged, chosen=chosen),
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                num_tokens=num_tokens,
                workspace=self.workspace if spec in self.planned else None,
                batch_invariant=self.batch_invariant,
                shared_prefix=num_shared or None,
            )
            if len(self.plans) > MAX_PLANS:
                self.plans.popitem(last=False)
        else:
            self.plans.move_to_end(key)
            plan.update()  # a kernel of vLLM's may have written the lengths
        return plan

    def plan_unpaged(
        self,
        spec: AttentionSpec,
        starts: torch.Tensor,  # [num_seqs + 1] int32, of queries and of keys
        seq_lens: torch.Tensor,  # [num_seqs] int32, their numbers
        *,
        num_tokens: int,
        max_query_len: int,
    ) -> Plan:
        """Return a plan for the keys of the step alone, one after the other."""
        return self.plan_for(
            spec,
            starts[:-1, None],
            seq_lens,
            starts,
            page_size=max(LEAST_KEYS, 2 * max_query_len),  # the bound is a power of two
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_query_len,
            paged=False,
        )


@cache
def say_once(spec: AttentionSpec, names: tuple[str, ...]) -> None:
    """Write into vLLM's log that layers have Quire's attention. Where no such line is, vLLM took another backend."""
    heads = f"{spec.num_q_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"
    dtype = spec.kv_format or str(spec.kv_dtype).removeprefix("torch.")
    layers = "1 layer" if len(names) == 1 else f"{len(names)} layers"
    contract.logger.info("Quire attends in %s: %s, a cache in %s", layers, heads, dtype)
    START.debug("vLLM chose Quire for %s: %s, a cache in %s", layers, heads, dtype)


@lru_cache(maxsize=1024)
def shares(
    spec: AttentionSpec, num_seqs: int, num_tokens: int, max_query_len: int, num_keys: int, device: torch.device
) -> bool:
    """Return whether sequences that begin with the same keys are predicted to take less if these are read once.

    Their own keys count as few: a plan that shares reads these too.
    """
    table = torch.empty(num_seqs, 1, dtype=torch.int32, device=device)
    starts = None if num_tokens == num_seqs else torch.empty(num_seqs + 1, dtype=torch.int32, device=device)
    lens = {"max_query_len": max_query_len, "max_seq_len": num_keys + max_query_len, "num_tokens": num_tokens}
    return quire.is_worth_sharing(spec, quire.Batch(table, table[:, 0], starts), shared_prefix=num_keys, **lens)


def one_query_each(query_start_loc_cpu: torch.Tensor, max_query_len: int, num_tokens: int) -> bool:
    """Return whether token i is the only query of sequence i, so that counts of queries are not needed.

    Padding comes last: sequences without a query, and tokens of no sequence.

    Args:
        query_start_loc_cpu: [num_seqs + 1] int32, on the host; all 0 where a capture counts tokens only.
        max_query_len: most queries of a sequence.
        num_tokens: of the step, padding included.
    """
    num_seqs = query_start_loc_cpu.shape[0] - 1
    if max_query_len != 1 or num_tokens != num_seqs:
        return False
    count = int(query_start_loc_cpu[-1])
    return int(query_start_loc_cpu[count]) == count  # the first sequences have all of the queries


@cache
def bidirectional(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of the same layer in a step that is not causal. A window then reaches as far ahead as back."""
    ahead = None if spec.sliding_window is None else spec.sliding_window - 1
    return replace(spec, causal=False, sliding_window_right=ahead)


def warms_up(vllm_config: Any) -> bool:
    """Return whether kernels are compiled before the first capture, unless the user says otherwise."""
    extra = vllm_config.additional_config
    return not isinstance(extra, dict) or extra.get("quire_warmup", True)


def bounds_of(impls: list[Any], vllm_config: Any, max_num_tokens: int | None = None) -> dict[str, Any]:
    """Return the bounds of the plans of some layers, as `quire.warmup` takes them."""
    longest = longest_context(impls, vllm_config)
    return {
        "max_num_seqs": vllm_config.scheduler_config.max_num_seqs,
        "max_num_tokens": max_num_tokens or vllm_config.scheduler_config.max_num_batched_tokens,
        "max_seq_len": longest,
        "min_seq_len": min(LEAST_KEYS, longest),
        "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT),
    }


def longest_context(impls: list[Any], vllm_config: Any) -> int:
    """Return the most keys of a sequence: those of the model's context, or of an encoder if layers attend to one."""
    longest = vllm_config.model_config.max_model_len
    if not any(getattr(impl, "attn_type", None) == ENCODER_DECODER for impl in impls):
        return longest
    of_encoder = getattr(vllm_config.scheduler_config, "max_num_encoder_input_tokens", 0) or 0
    positions = getattr(getattr(vllm_config.model_config, "hf_config", None), "max_source_positions", 0) or 0
    return max(longest, of_encoder, positions)


def unpaged(spec: AttentionSpec, device: torch.device) -> PagedKVCache:
    """Return a cache of one token, for the compilation of what attends to keys that are not paged."""
    k, v = torch.empty(2, 1, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=device)
    return PagedKVCache(k, v, "THD")
