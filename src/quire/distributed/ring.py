"""Prompts over several GPUs: each rank holds a share of the tokens, and keys and values go around a ring.

A prompt is cut into `2 * world_size` chunks, and rank r holds chunks r and `2 * world_size - 1 - r`, an early one and a
late one. So causal attention is the same work on every rank and in every step (zig-zag). In a step, a rank attends to
the keys of one rank while it receives those of the next (Ring Attention, arXiv 2310.01889). Each step is
causal over the rank's own share, or whole: no launch masks parts of a share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

import quire
from quire.distributed.arguments import (
    Group,
    as_device,
    check_int,
    check_sinks,
    check_spec,
    is_plain,
    merge,
    process_group,
    shown,
    write_sinks,
)


@dataclass(frozen=True, eq=False, repr=False)
class RingPlan:
    """How prompts go round a ring: made by `plan_ring`, once per step, and shared by all layers.

    Attributes:
        spec: what is computed.
        group: the ranks of the ring.
        tokens: [num_tokens] int64, which tokens of the concatenated prompts this rank holds, in the order of its share.
        num_tokens: of each rank's share.
        late: [num_late] int64, the rows of this rank's share that are in late chunks.
        plans: of each step, for the keys of rank `(rank - step) % world_size`.
    """

    spec: quire.AttentionSpec
    group: dist.ProcessGroup
    tokens: torch.Tensor
    num_tokens: tuple[int, ...]
    late: torch.Tensor
    plans: tuple[quire.Plan, ...]


def plan_ring(
    spec: quire.AttentionSpec, seq_lens: Sequence[int], *, group: Group = None, device: torch.device | str | None = None
) -> RingPlan:
    """Decide which tokens of whole prompts each rank holds, and how each step is launched.

    Args:
        spec: what is computed: causal or not, without windows, ALiBi or sinks.
        seq_lens: tokens of each prompt, numbers of the host, the same on every rank.
        group: process group or one-dimensional device mesh; the default group when not given.
        device: where the tokens will be; the current GPU when not given, or the CPU where there is none.

    Returns:
        The plan. `plan.tokens` says which tokens of the concatenated prompts are this rank's.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a length is out of range.
        UnsupportedError: a window, ALiBi or sinks in the spec, or latents.
        RuntimeError: torch.distributed was not initialised.
    """
    members = process_group(group)
    check_spec("spec", spec)
    if spec.latent:
        raise quire.UnsupportedError(
            "spec must be of keys and values in a ring, got one of latents; expand the latents"
        )
    if isinstance(seq_lens, str) or not isinstance(seq_lens, Sequence) or not seq_lens:
        raise TypeError(f"seq_lens must be a list of integers, got {shown(seq_lens)}; pass the length of each prompt")
    lens = [check_int(f"seq_lens[{i}]", n, 0) for i, n in enumerate(seq_lens)]
    where = as_device(device)
    size, rank = dist.get_world_size(members), dist.get_rank(members)
    shares = [[chunk_pair(n, r, size) for n in lens] for r in range(size)]
    starts = [0, *accumulate(lens)][:-1]
    mine = shares[rank]
    tokens = [
        torch.arange(start + low, start + high) for start, pair in zip(starts, mine, strict=True) for low, high in pair
    ]
    late, row = [], 0
    for early_chunk, late_chunk in mine:
        row += length(early_chunk)
        late.append(torch.arange(row, row + length(late_chunk)))
        row += length(late_chunk)
    plans = tuple(plan_step(spec, rank, (rank - step) % size, shares, where) for step in range(size))
    num_tokens = tuple(sum(map(length, [chunk for pair in share for chunk in pair])) for share in shares)
    return RingPlan(spec, members, torch.cat(tokens).to(where), num_tokens, torch.cat(late).to(where), plans)


def chunk_pair(num_tokens: int, rank: int, world_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the early and the late chunk of a prompt that a rank holds, each as (first token, end)."""
    ends = [num_tokens * i // (2 * world_size) for i in range(2 * world_size + 1)]
    mirror = 2 * world_size - 1 - rank
    return (ends[rank], ends[rank + 1]), (ends[mirror], ends[mirror + 1])


def length(chunk: tuple[int, int]) -> int:
    """Return how many tokens a chunk has."""
    return chunk[1] - chunk[0]


def plan_step(
    spec: quire.AttentionSpec,
    rank: int,
    source: int,
    shares: list[list[tuple[tuple[int, int], tuple[int, int]]]],
    device: torch.device,
) -> quire.Plan:
    """Plan for a rank's queries and another rank's keys.

    All queries see a whole early chunk of a lower rank. Late queries alone see both chunks of a higher rank. Over its
    own keys, a rank is causal, since a share is in the order of positions.
    """
    queries, keys = shares[rank], shares[source]
    whole_keys = [length(early) + length(late) for early, late in keys]
    key_lens, query_lens = whole_keys, [length(early) + length(late) for early, late in queries]
    if spec.causal and source < rank:
        key_lens = [length(early) for early, _ in keys]
    elif spec.causal and source > rank:
        query_lens = [length(late) for _, late in queries]
    step_spec = spec if source == rank else without_order(spec)

    def int32(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32).to(device)

    first_keys = int32([0, *accumulate(whole_keys)][:-1])[:, None]
    batch = quire.Batch(first_keys, int32(key_lens), int32([0, *accumulate(query_lens)]), paged=False)
    return quire.plan(
        step_spec, batch, max_query_len=max(query_lens), max_seq_len=max(key_lens), num_tokens=sum(query_lens)
    )


def without_order(spec: quire.AttentionSpec) -> quire.AttentionSpec:
    """Return a spec whose queries see all keys that they are given."""
    return replace(spec, causal=False)


def ring_attention(
    q: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim_v]
    plan: RingPlan,
    *,
    sinks: torch.Tensor | None = None,
) -> quire.State:
    """Attend from this rank's tokens to the tokens of all ranks.

    Args:
        q: queries of this rank's tokens, [num_tokens, num_q_heads, head_dim], in the order of `plan.tokens`.
        k: their keys, [num_tokens, num_kv_heads, head_dim].
        v: their values, [num_tokens, num_kv_heads, head_dim_v].
        plan: from `plan_ring`.
        sinks: [num_q_heads], natural-log logits, or None; the same on every rank. They count once.

    Returns:
        The state of this rank's tokens over all keys that they see.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit the plan.
    """
    if not isinstance(plan, RingPlan):
        raise TypeError(f"plan must be a RingPlan, got {shown(plan)}; make it with `quire.distributed.plan_ring`")
    rank, size = dist.get_rank(plan.group), dist.get_world_size(plan.group)
    spec, num_tokens = plan.spec, plan.num_tokens[rank]
    widths = {"q": (spec.num_q_heads, spec.head_dim), "k": (spec.num_kv_heads, spec.head_dim)}
    widths["v"] = (spec.num_kv_heads, spec.head_dim_v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_share(name, tensor, (num_tokens, *widths[name]), plan.tokens.device)
    check_sinks(sinks, spec.num_q_heads, q.device)
    keys, num_states = (k.contiguous(), v.contiguous()), size if sinks is None else size + 1  # sinks are a state too
    outs = q.new_empty(num_states, num_tokens, spec.num_q_heads, spec.head_dim_v)
    lses = torch.empty(outs.shape[:3], dtype=torch.float32, device=q.device)
    states = [quire.State(*pair) for pair in zip(outs, lses, strict=True)]
    for step, step_plan in enumerate(plan.plans):
        pending, following = send_on(keys, step, rank, plan) if step + 1 < size else ([], keys)
        attend(q, keys, step_plan, states[step], plan.late if spec.causal and (rank - step) % size > rank else None)
        for work in pending:
            work.wait()
        keys = following
    if sinks is not None:
        write_sinks(states[size], sinks)
    return merge(states)


def attend(
    q: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    plan: quire.Plan,
    state: quire.State,
    late: torch.Tensor | None,
) -> None:
    """Write the state of this rank's rows over one rank's keys; with `late`, only those rows see any of them."""
    if late is None:
        quire.varlen_attention(q, *keys, plan, out=state)
        return
    state.lse.fill_(float("-inf"))  # such rows have no weight, whatever their out holds
    found = quire.varlen_attention(q[late], *keys, plan, return_lse=True)
    state.out[late], state.lse[late] = found


def send_on(
    keys: tuple[torch.Tensor, torch.Tensor], step: int, rank: int, plan: RingPlan
) -> tuple[list[Any], tuple[torch.Tensor, torch.Tensor]]:
    """Begin to send keys and values to the next rank, and to receive those of the rank before.

    Returns:
        What to wait for, and the tensors that are filled by then.
    """
    size = dist.get_world_size(plan.group)
    num_tokens = plan.num_tokens[(rank - step - 1) % size]
    following = tuple(x.new_empty(num_tokens, *x.shape[1:]) for x in keys)
    next_rank, last_rank = (dist.get_global_rank(plan.group, (rank + by) % size) for by in (1, -1))
    ops = [dist.P2POp(dist.isend, x, next_rank, plan.group) for x in keys]
    ops += [dist.P2POp(dist.irecv, x, last_rank, plan.group) for x in following]
    return dist.batch_isend_irecv(ops), (following[0], following[1])


def check_share(name: str, tensor: Any, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise unless a tensor is this rank's share; what else it must be, `attention` checks."""
    if not is_plain(tensor):
        raise TypeError(
            f"{name} must be a tensor with strides, got {shown(tensor)}; pass the rows `plan.tokens` of the whole"
        )
    if tensor.shape != shape or tensor.device.type != device.type:
        raise ValueError(
            f"{name} must be {list(shape)} on {device}, got {shown(tensor)}; pass the rows `plan.tokens` of the whole"
        )
