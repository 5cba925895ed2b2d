"""Decode with each sequence's keys spread over the ranks of a group (decode context parallelism).

Token i of a sequence is on rank `i // interleave % world_size`. Every rank attends with the same queries to the keys
that it holds. Its state is exact over these keys, so the states of all ranks merge into attention over all keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import quire
from quire.distributed.arguments import (
    Group,
    check_int,
    check_lens,
    check_sinks,
    check_spec,
    is_plain,
    merge,
    process_group,
    shown,
    write_sinks,
)

ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name since torch 2.13
ALIGNMENT = 64  # bytes, of what each rank sends: kernels are compiled for strides that are multiples of 16 elements


@dataclass(frozen=True)
class ContextShard:
    """Say which keys of a sequence a rank holds: token i is on rank `i // interleave % world_size`.

    A rank stores its tokens without gaps in its own pages: cache, page table and lengths do not depend on other ranks.

    Args:
        rank: of this process, from 0 to world_size - 1.
        world_size: ranks that share each context, at least 1.
        interleave: neighbouring tokens on a rank, at least 1; the page size to share whole pages.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is out of range.

    Examples:
        >>> from quire.distributed import ContextShard
        >>> shard = ContextShard(rank=1, world_size=2, interleave=4)  # tokens 4 to 7, 12 to 15, ...
        >>> shard.num_keys(torch.tensor([3, 6, 16], dtype=torch.int32)).tolist()
        [0, 2, 8]
    """

    rank: int
    world_size: int
    interleave: int = 1

    def __post_init__(self) -> None:
        size = check_int("world_size", self.world_size, 1)
        rank, interleave = check_int("rank", self.rank, 0, size - 1), check_int("interleave", self.interleave, 1)
        for name, value in (("world_size", size), ("rank", rank), ("interleave", interleave)):
            object.__setattr__(self, name, value)

    def num_keys(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """Return how many of the first `seq_lens` tokens of each sequence this rank holds; nothing waits for a GPU.

        Args:
            seq_lens: tokens of whole sequences, int32 or int64, of any shape; negative numbers count as 0.

        Raises:
            TypeError: seq_lens isn't a tensor of integers.
        """
        lens = check_lens("seq_lens", seq_lens).clamp(min=0)
        size, turn = self.interleave, self.interleave * self.world_size
        whole = lens.long()  # a turn may be longer than int32 counts
        return (whole // turn * size + (whole % turn - self.rank * size).clamp(0, size)).to(lens.dtype)

    def slot_mapping(self, positions: torch.Tensor, page_table: torch.Tensor, page_size: int) -> torch.Tensor:
        """Return the slots of new tokens in this rank's cache, for `quire.write_kv`; -1 for those of other ranks.

        Args:
            positions: [num_tokens] int32 or int64, of each token in its whole sequence; negative to leave one out.
            page_table: [num_tokens, max_pages] int32 or int64, of each token the row of its sequence on this rank.
            page_size: tokens per page.

        Returns:
            [num_tokens] int64.

        Raises:
            TypeError: an argument is of another type.
            ValueError: shapes or devices do not fit together. On a CPU also if a position has no page.
        """
        positions = check_lens("positions", positions).long()
        table = check_lens("page_table", page_table)
        page_size = check_int("page_size", page_size, 1)
        if positions.dim() != 1 or table.dim() != 2 or len(table) != len(positions):
            raise ValueError(
                f"page_table must be [num_tokens, max_pages] for positions of shape {list(positions.shape)}, "
                f"got {list(table.shape)}; give it a row for each token"
            )
        if table.device != positions.device:
            raise ValueError(
                f"page_table must be on {positions.device} as positions are, got {table.device}; move it there"
            )
        run = positions // self.interleave
        local = run // self.world_size * self.interleave + positions % self.interleave
        held = (run % self.world_size == self.rank) & (positions >= 0)
        entry = torch.where(held, local // page_size, 0)
        if table.device.type == "cpu" and bool((entry >= table.shape[1]).any()):
            raise ValueError(
                f"page_table must have {int(entry.max()) + 1} pages of {page_size} tokens for these positions, "
                f"got {table.shape[1]}; allocate the pages first"
            )
        pages = table.gather(1, entry[:, None])[:, 0].long()
        return torch.where(held, pages * page_size + local % page_size, -1)

    def batch(self, page_table: torch.Tensor, seq_lens: torch.Tensor, num_queries: int = 1) -> quire.Batch:
        """Return the batch of this rank's keys, for queries that are the last of their sequences.

        Each query is a separate row, which ends at the last of this rank's keys that it sees. So drafts are causal
        whatever the interleave.

        Args:
            page_table: [num_seqs, max_pages] int32 or int64, this rank's pages of each sequence.
            seq_lens: [num_seqs] int32, tokens of whole sequences, the step's new ones included.
            num_queries: queries of each sequence, at least 1.

        Returns:
            A batch of `num_seqs * num_queries` rows with one query each, to be planned with max_query_len 1. Its
            tensors are new, so it is made in each step, or inside a captured graph.

        Raises:
            TypeError: an argument is of another type.
            ValueError: shapes do not fit together.
        """
        lens = check_lens("seq_lens", seq_lens, (torch.int32,))
        num_queries = check_int("num_queries", num_queries, 1)
        if num_queries == 1:
            return quire.Batch(page_table, self.num_keys(lens))
        table = check_lens("page_table", page_table)
        if lens.dim() != 1 or table.dim() != 2:
            raise ValueError(
                f"page_table must be [num_seqs, max_pages] for seq_lens of shape {list(lens.shape)}, "
                f"got {list(table.shape)}; give it a row for each sequence"
            )
        ends = lens[:, None] - torch.arange(num_queries - 1, -1, -1, dtype=torch.int32, device=lens.device)
        return quire.Batch(table.repeat_interleave(num_queries, 0), self.num_keys(ends).flatten())


def sharded_attention(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
    cache: quire.PagedKVCache,
    plan: quire.Plan,
    *,
    sinks: torch.Tensor | None = None,
    group: Group = None,
    scatter_heads: bool = False,
) -> quire.State:
    """Attend to a context whose keys are spread over the ranks of a group.

    Every rank calls it with the same queries and with its own cache and plan.

    Args:
        q: the queries, as for `quire.attention`, the same on every rank.
        cache: this rank's pages.
        plan: of `ContextShard.batch`, or of any batch of this rank's keys whose queries see all of them. Its spec has
            no window, ALiBi or sinks, and either max_query_len is 1 or the spec is not causal.
        sinks: [num_q_heads], natural-log logits, or None; the same on every rank. They count once.
        group: process group or one-dimensional device mesh; the default group when not given.
        scatter_heads: return only this rank's heads, by one all-to-all, instead of all heads on every rank, by one
            all-gather. num_q_heads must be a multiple of the number of ranks.

    Returns:
        The state over all keys, with all heads, or with heads `rank * n` to `(rank + 1) * n` of `n = num_q_heads //
        world_size`. A query that no rank has a key for has out 0 and lse -inf, and so has a token of no sequence.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit.
        UnsupportedError: a window, ALiBi or sinks in the spec.
        RuntimeError: torch.distributed was not initialised.
    """
    members = process_group(group)
    if not isinstance(plan, quire.Plan):
        raise TypeError(f"plan must be a Plan, got {shown(plan)}; make it with `quire.plan`")
    check_spec("plan.spec", plan.spec)
    if plan.spec.causal and plan.bounds.max_query_len > 1:
        raise ValueError(
            f"plan must have max_query_len 1 where its spec is causal, got {plan.bounds.max_query_len}; "
            "ContextShard.batch makes a row of each query"
        )
    first = q[0] if isinstance(q, tuple) else q
    if not isinstance(first, torch.Tensor) or first.dim() != 3:
        raise ValueError(f"q must be [num_tokens, num_q_heads, head_dim], got {shown(first)}; reshape it")
    check_scatter(scatter_heads, plan.spec.num_q_heads, dist.get_world_size(members))
    check_sinks(sinks, plan.spec.num_q_heads, first.device)
    shape = (first.shape[0], plan.spec.num_q_heads, plan.spec.head_dim_v)
    sent = torch.empty(packed_bytes(shape, first.dtype), dtype=torch.uint8, device=first.device)
    state = unpack(sent, shape, first.dtype)
    if plan.batch.cu_seqlens_q is not None or shape[0] > plan.batch.num_seqs:
        state.lse.fill_(float("-inf"))  # of rows of no sequence, which attention leaves as they are
    quire.attention(q, cache, plan, out=state)
    return merge_packed(sent, shape, first.dtype, sinks, members, scatter_heads)


def merge_over_ranks(
    state: quire.State, *, sinks: torch.Tensor | None = None, group: Group = None, scatter_heads: bool = False
) -> quire.State:
    """Merge the states of all ranks of a group, over disjoint keys, in one collective.

    Args:
        state: this rank's: out [num_tokens, num_q_heads, head_dim_v] and lse [num_tokens, num_q_heads] float32, of one
            shape and dtype on all ranks. A rank without keys has lse -inf.
        sinks: as for `sharded_attention`.
        group: as for `sharded_attention`.
        scatter_heads: as for `sharded_attention`.

    Returns:
        As of `sharded_attention`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit.
        RuntimeError: torch.distributed was not initialised.
    """
    members = process_group(group)
    if not isinstance(state, quire.State):
        raise TypeError(f"state must be a State, got {shown(state)}; call attention with return_lse=True")
    out, lse = state
    if not is_plain(out) or not is_plain(lse):
        raise TypeError(f"state must hold two tensors with strides, got {shown(out)} and {shown(lse)}; see quire.State")
    if out.dim() != 3 or lse.shape != out.shape[:2]:
        raise ValueError(
            f"state.lse must be [num_tokens, num_q_heads] of an out [num_tokens, num_q_heads, head_dim_v], "
            f"got {list(lse.shape)} and {list(out.shape)}; see quire.State"
        )
    quire.merge_states([quire.State(out[:0], lse[:0])])  # which checks dtypes, devices and gradients
    num_heads = out.shape[1]
    check_scatter(scatter_heads, num_heads, dist.get_world_size(members))
    check_sinks(sinks, num_heads, out.device)
    sent = torch.empty(packed_bytes(out.shape, out.dtype), dtype=torch.uint8, device=out.device)
    packed = unpack(sent, out.shape, out.dtype)
    packed.out.copy_(out)
    packed.lse.copy_(lse)
    return merge_packed(sent, out.shape, out.dtype, sinks, members, scatter_heads)


def check_scatter(scatter_heads: Any, num_heads: int, world_size: int) -> None:
    """Raise unless heads can be scattered, if that is asked for."""
    if scatter_heads is not True and scatter_heads is not False:
        raise TypeError(f"scatter_heads must be True or False, got {shown(scatter_heads)}; say which heads come back")
    if scatter_heads and num_heads % world_size:
        raise ValueError(
            f"scatter_heads must be False for {num_heads} query heads on {world_size} ranks, got True; "
            "each rank would get another number of heads"
        )


def merge_packed(
    sent: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    sinks: torch.Tensor | None,
    group: dist.ProcessGroup,
    scatter_heads: bool,
) -> quire.State:
    """Merge the packed states of all ranks, in one collective."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    scatter_heads = scatter_heads and size > 1
    if scatter_heads:
        state, num_heads = unpack(sent, shape, dtype), shape[1] // size
        shape = (shape[0], num_heads, shape[2])
        sent = torch.empty(size, packed_bytes(shape, dtype), dtype=torch.uint8, device=sent.device)
        for into, whole in zip(unpack(sent, shape, dtype), state, strict=True):
            into.copy_(whole.unflatten(1, (size, num_heads)).transpose(0, 1))
        sinks = sinks if sinks is None else sinks[rank * num_heads : (rank + 1) * num_heads]
    num_states = size if sinks is None else size + 1  # sinks are a state too
    received = torch.empty(num_states, packed_bytes(shape, dtype), dtype=torch.uint8, device=sent.device)
    exchange = dist.all_to_all_single if scatter_heads else ALL_GATHER
    exchange(received[:size].flatten(), sent.flatten(), group=group)
    states = [quire.State(*pair) for pair in zip(*unpack(received, shape, dtype), strict=True)]
    if sinks is not None:
        write_sinks(states[size], sinks)
    return merge(states)


def packed_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a state of this shape in one buffer: its out and its lse, at least one ALIGNMENT."""
    num_rows = shape[0] * shape[1]
    return max(1, -(-(lse_at(shape, dtype) + 4 * num_rows) // ALIGNMENT)) * ALIGNMENT


def lse_at(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the byte at which the lse of a packed state begins: the first multiple of 4 after its out."""
    return -(-shape[0] * shape[1] * shape[2] * dtype.itemsize // 4) * 4


def unpack(buffer: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> quire.State:
    """Return the state in a buffer of `packed_bytes`, or the states in its rows, as views."""
    num_rows, several, begin = shape[0] * shape[1], buffer.shape[:-1], lse_at(shape, dtype)
    out = buffer.view(dtype)[..., : num_rows * shape[2]].view(*several, *shape)
    return quire.State(out, buffer[..., begin : begin + 4 * num_rows].view(torch.float32).view(*several, *shape[:2]))
