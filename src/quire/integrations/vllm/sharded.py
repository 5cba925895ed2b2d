"""Decode context parallelism in vLLM: each rank of a group holds a share of each context's keys, for all their heads.

vLLM says which slots of a step's new tokens are on this rank: token i of a sequence is on rank `i // interleave %
num_ranks`, and its slot is -1 elsewhere. Each rank attends with the queries of all ranks to the keys that it holds, and
vLLM combines the results, which leaves each rank its own heads.

Where each sequence has one query, the query sees every key, so the new key is written and counted like the others.
Otherwise the ranks' keys are those before the step, which every query sees. A rank has the step's own keys of its heads
whole, attends to them separately, and merges both results. Sinks belong to the second part, which each head has once.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

import quire
from quire import AttentionSpec, PagedKVCache, Plan, State, UnsupportedError
from quire.integrations.vllm import contract
from quire.integrations.vllm.plans import Kind, Launch, one_query_each, unpaged

utils: Any = contract.load("vllm.v1.attention.backends.utils")


@dataclass
class ShardedStep:
    """What a step's metadata has besides, where ranks share contexts."""

    num_tokens: int  # of all sequences, on every rank
    seq_lens: torch.Tensor  # [num_seqs] int32, keys on this rank: all, or those before the step
    max_seq_len: int
    query_lens: torch.Tensor | None  # [num_seqs] int32; None where each sequence has one query, which counts as a key
    has_context: bool  # whether any sequence has keys from before the step, on any rank


class Shares:
    """The part of a metadata builder that knows which keys this rank holds."""

    def __init__(self, group: Any, impls: list[Any], vllm_config: Any, device: torch.device) -> None:
        for impl in impls:
            check_impl(impl)
        parallel = vllm_config.parallel_config
        self.group, self.combine = group, contract.combiner_of_ranks(parallel)
        self.num_ranks, self.interleave = group.world_size, parallel.cp_kv_cache_interleave_size
        # Sinks count once, with the step's own keys.
        self.keys_apart = any(impl.spec.sinks for impl in impls)
        # Captured graphs read these in each step.
        lens = torch.zeros(2, vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)
        self.seq_lens, self.query_lens = lens

    def step(self, common: Any) -> ShardedStep:
        """Return what a step has besides; every rank takes the same decisions, since each takes part in collectives."""
        num_seqs, turn = common.num_reqs, self.interleave * self.num_ranks
        lens, query_lens = common.seq_lens[:num_seqs], None
        starts = common.query_start_loc_cpu[: num_seqs + 1]
        if self.keys_apart or not one_query_each(starts, common.max_query_len, common.num_actual_tokens):
            query_lens = self.query_lens[:num_seqs]
            torch.diff(common.query_start_loc[: num_seqs + 1], out=query_lens)
            lens = lens - query_lens
        seq_lens = self.seq_lens[:num_seqs]
        seq_lens.copy_(utils.get_dcp_local_seq_lens(lens, self.num_ranks, self.group.rank_in_group, self.interleave))
        return ShardedStep(
            num_tokens=common.num_actual_tokens,
            seq_lens=seq_lens,
            max_seq_len=-(-common.max_seq_len // turn) * self.interleave,
            query_lens=query_lens,
            has_context=has_context(common),
        )

    def attend(
        self,
        impl: Any,
        metadata: Any,
        pages: PagedKVCache,
        query: torch.Tensor,  # [num_tokens, num_heads, head_size], padding included
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_size]
        value: torch.Tensor,
        output: torch.Tensor,  # like query
    ) -> None:
        """Write the keys and values that this rank holds, and attend to those of all ranks."""
        step: ShardedStep = metadata.sharded
        query, key, value = query[: step.num_tokens], key[: step.num_tokens], value[: step.num_tokens]
        slots, output = metadata.slot_mapping[: step.num_tokens], output[: step.num_tokens]
        new = {"k": key, "v": value, "slot_mapping": slots}
        if step.query_lens is None:
            output.copy_(self.attend_to_shares(impl, metadata, pages, query, new).out)
            return
        quire.write_kv(**new, cache=pages)
        spec = of_own_keys(impl.spec, metadata.causal)
        plan = metadata.plans.get(id(spec)) or self.plan_own(metadata, spec)
        if not step.has_context:
            quire.varlen_attention(query, key, value, plan, sinks=impl.sinks, out=output)
            return
        context = self.attend_to_shares(impl, metadata, pages, query, {})
        own = quire.varlen_attention(query, key, value, plan, sinks=impl.sinks, return_lse=True)
        output.copy_(quire.merge_states([context, own]).out)

    def attend_to_shares(
        self, impl: Any, metadata: Any, pages: PagedKVCache, query: torch.Tensor, new: dict[str, Any]
    ) -> State:
        """Return this rank's heads over the keys of all ranks."""
        queries = self.group.all_gather(query.contiguous(), dim=1)
        spec = of_shares(impl.spec, self.num_ranks)
        plan = metadata.plans.get(id(spec)) or self.plan_shares(metadata, spec, pages.page_size)
        state: Any = quire.attention(queries, pages, plan, **new, return_lse=True)
        return State(*self.combine(state.out, state.lse, self.group, return_lse=True))

    def plan_shares(self, metadata: Any, spec: AttentionSpec, page_size: int) -> Plan:
        """Return a step's plan for the keys in this rank's pages."""
        step: ShardedStep = metadata.sharded
        plan = metadata.plans[id(spec)] = metadata.builder.plan_for(
            spec,
            metadata.block_table,
            step.seq_lens,
            None if metadata.one_query_each else metadata.query_start_loc,
            page_size=page_size,
            num_tokens=step.num_tokens,
            max_query_len=metadata.max_query_len,
            max_seq_len=step.max_seq_len,
        )
        return plan

    def plan_own(self, metadata: Any, spec: AttentionSpec) -> Plan:
        """Return a step's plan for its own keys, which are not paged."""
        step: ShardedStep = metadata.sharded
        plan = metadata.plans[id(spec)] = metadata.builder.plan_unpaged(
            spec,
            metadata.query_start_loc,
            step.query_lens,
            num_tokens=step.num_tokens,
            max_query_len=metadata.max_query_len,
        )
        return plan

    def kinds(self, spec: AttentionSpec) -> list[Kind]:
        """Return the specs of a layer's plans."""
        return [(of_shares(spec, self.num_ranks), {}), (of_own_keys(spec, True), {})]

    def launches(self, spec: AttentionSpec, pages: PagedKVCache) -> list[Launch]:
        """Return what a layer launches."""
        shares, own = (planned for planned, _ in self.kinds(spec))
        appends = [False] if self.keys_apart else [False, True]
        in_pages: list[Launch] = [(shares, pages, {"return_lse": True, "append": append}) for append in appends]
        return [(own, unpaged(own, pages.device), {"return_lse": some}) for some in (False, True)] + in_pages


def check_impl(impl: Any) -> None:
    """Raise UnsupportedError for a layer whose keys cannot be spread over ranks."""
    must_be = {
        "attn_type": (impl.attn_type, "decoder"),
        "sliding_window": (impl.spec.sliding_window, None),  # a rank's keys are not neighbours
        "alibi_slopes": (impl.alibi_slopes, None),
        "kv_sharing_target_layer_name": (impl.kv_sharing_target_layer_name, None),  # it is not given the step's keys
    }
    for name, (value, served) in must_be.items():
        if value is not served and value != served:
            raise UnsupportedError(
                f"{name} must be {served} where ranks share contexts, got {value}; "
                "leave --decode-context-parallel-size out for this model"
            )


def has_context(common: Any) -> bool:
    """Whether any sequence of a step has earlier keys, as far as the host knows."""
    longest = common.seq_lens_cpu_upper_bound
    if longest is None:
        return True
    num_seqs = common.num_reqs
    return bool((longest[:num_seqs] > common.query_start_loc_cpu[: num_seqs + 1].diff()).any())


@cache
def of_shares(spec: AttentionSpec, num_ranks: int) -> AttentionSpec:
    """Return the spec of attention to a rank's share: the heads of all ranks, which see all of its keys."""
    return replace(spec, num_q_heads=spec.num_q_heads * num_ranks, causal=False, sinks=False)


@cache
def of_own_keys(spec: AttentionSpec, causal: bool) -> AttentionSpec:
    """Return the spec of attention to a step's own keys, which are not quantised."""
    return replace(spec, kv_dtype=spec.dtype, causal=causal)
