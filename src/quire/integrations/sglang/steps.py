"""The state of a step: page tables and lengths, in memory that is kept from step to step, and the plans made for it.

SGLang numbers slots of single tokens: `req_to_token[request, position]` is a slot. A page table is every page_size-th
entry of such a row, divided by the size. Each step copies it once into the backend's buffer, since plans and captured
graphs need the table at the same address in every step.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import quire
from quire import AttentionSpec, Batch, Plan
from quire.integrations.engine import LEAST_KEYS, rounded_up
from quire.integrations.sglang.trees import Trees

MAX_PLANS = 256  # kept by a backend, besides those of captured graphs


@dataclass
class Step:
    """One forward pass, as all its layers see it."""

    num_tokens: int  # rows of queries that belong to a request
    max_query_len: int
    max_seq_len: int
    starts: torch.Tensor | None  # [num_seqs + 1] int32; None if every request has one query
    seq_lens: torch.Tensor  # [num_seqs] int32, with the step's own tokens
    table: torch.Tensor  # [num_seqs, max_pages_per_seq] int32, of the pool of full attention
    window_table: torch.Tensor | None  # the same of the pool of sliding windows, where there is one
    window_slots: torch.Tensor | None  # [num_tokens] int64, where that pool writes
    trees: Trees | None = None  # of drafts that branch
    captured: bool = False
    plans: dict[tuple[int, bool], Plan] = field(default_factory=dict)  # by the spec's id, and whether by window_table

    def batch(self, sliding_window: int | None, *, in_window_pool: bool) -> Batch:
        """Return the requests, as layers with a window or without one see them."""
        table = self.window_table if in_window_pool and self.window_table is not None else self.table
        batch = Batch(table, self.seq_lens, self.starts)
        return batch if self.trees is None else self.trees.seen(batch, self.num_tokens, sliding_window)


class StepMemory:
    """Memory that steps use one after the other. Eager steps enlarge it; a graph's has its size from the start."""

    def __init__(self, device: torch.device | str, has_window_pool: bool) -> None:
        self.device, self.has_window_pool = device, has_window_pool
        self.reserve(0, 0, 0)

    def reserve(self, num_seqs: int, num_entries: int, num_tokens: int) -> bool:
        """Make room, and return whether memory moved. Sizes are powers of two, so it seldom does."""
        have = getattr(self, "sizes", (-1, -1, -1))
        want = num_seqs, num_entries, num_tokens
        if all(w <= h for w, h in zip(want, have, strict=True)):
            return False
        seqs, entries, tokens = self.sizes = tuple(
            max(h, 1 << max(0, w - 1).bit_length()) for w, h in zip(want, have, strict=True)
        )

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.seq_lens, self.starts, self.table = zeros(seqs), zeros(seqs + 1), zeros(entries)
        self.window_table = zeros(entries) if self.has_window_pool else None
        self.window_slots = zeros(tokens, torch.int64) if self.has_window_pool else None
        self.trees = Trees(zeros(tokens, torch.int64))
        return True


def fill_table(
    table: torch.Tensor,  # [num_seqs, max_pages_per_seq] int32, written
    req_to_token: torch.Tensor,  # [num_requests, max_context_len] int32
    requests: torch.Tensor,  # [num_seqs], rows of req_to_token
    max_seq_len: int,
    page_size: int,
    mapping: torch.Tensor | None,  # slots of the other pool, by slot
) -> None:
    """Write the page numbers of each request's first `max_seq_len` tokens."""
    slots = req_to_token[:, :max_seq_len:page_size]
    pages = table[:, : slots.shape[1]]
    torch.index_select(slots, 0, requests, out=pages)
    if mapping is not None:
        pages.copy_(mapping[pages.long()])
    if page_size > 1:
        torch.div(pages, page_size, rounding_mode="floor", out=pages)


def with_trees(spec: AttentionSpec) -> tuple[AttentionSpec, dict[str, Any]]:
    """Return a layer's spec for batches of trees, which say the window, and what these batches have."""
    return replace(spec, sliding_window=None), {"trees": True, "intervals": spec.sliding_window is not None}


class Plans:
    """The plans of a backend, by their bounds and by the memory that they read, and the scratch memory of each spec."""

    def __init__(self, max_num_seqs: int, max_seq_len: int, device: Any, batch_invariant: bool) -> None:
        self.max_num_seqs, self.max_seq_len, self.max_num_tokens = max_num_seqs, max_seq_len, 8192
        self.device, self.batch_invariant = device, batch_invariant
        self.kept: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self.workspaces: dict[tuple[Any, ...], torch.Tensor | None] = {}  # by spec and kinds of batches

    def bounds(self) -> dict[str, Any]:
        """Return the bounds within which plans are made, as `workspace_size` and `warmup` take them."""
        return {
            "max_num_seqs": self.max_num_seqs,
            "max_num_tokens": self.max_num_tokens,
            "max_seq_len": self.max_seq_len,
            "min_seq_len": min(LEAST_KEYS, self.max_seq_len),
            "batch_invariant": self.batch_invariant,
        }

    def workspace(
        self, spec: AttentionSpec, num_seqs: int, num_tokens: int, max_seq_len: int, seen: dict[str, Any]
    ) -> torch.Tensor | None:
        """Return scratch memory for a plan. A larger step than any before gets new memory, and so do later plans."""
        if num_tokens > self.max_num_tokens or num_seqs > self.max_num_seqs or max_seq_len > self.max_seq_len:
            if num_tokens > self.max_num_tokens:
                self.max_num_tokens = 1 << (num_tokens - 1).bit_length()
            self.max_num_seqs = max(self.max_num_seqs, num_seqs)
            self.max_seq_len = max(self.max_seq_len, max_seq_len)
            self.workspaces.clear()
            self.kept.clear()
        key = spec, *seen.values()
        if key not in self.workspaces:
            size = quire.workspace_size(spec, **self.bounds(), **seen, device=self.device)
            self.workspaces[key] = torch.zeros(size, dtype=torch.uint8, device=self.device) if size else None
        return self.workspaces[key]

    def plan(self, spec: AttentionSpec, step: Step, num_tokens: int, *, in_window_pool: bool) -> Plan:
        """Return the step's plan for a kind of layer; an earlier one if bounds and memory are the same.

        Bounds of queries are rounded up: no two steps with prompts are alike, and to decide a plan takes a millisecond.
        """
        plan = step.plans.get((id(spec), in_window_pool))
        if plan is not None:
            return plan
        batch = step.batch(spec.sliding_window, in_window_pool=in_window_pool)
        computed, seen = (spec, {}) if step.trees is None else with_trees(spec)
        addresses = tuple(
            x.data_ptr() for x in (batch.page_table, batch.seq_lens, batch.tree_bits, batch.key_begin) if x is not None
        )
        shape = batch.page_table.stride(0), batch.page_table.shape, step.starts is None
        max_query_len = step.max_query_len
        if max_query_len > 1 and not step.captured:
            num_tokens = rounded_up(num_tokens, self.max_num_tokens)
            max_query_len = rounded_up(max_query_len, min(num_tokens, step.max_seq_len))
        key = spec, num_tokens, max_query_len, step.max_seq_len, addresses, shape, step.captured
        plan = self.kept.get(key)
        if plan is None:
            workspace = self.workspace(computed, step.seq_lens.shape[0], num_tokens, step.max_seq_len, seen)
            plan = quire.plan(
                computed,
                batch,
                max_query_len=max_query_len,
                max_seq_len=step.max_seq_len,
                num_tokens=num_tokens,
                workspace=workspace,
                batch_invariant=self.batch_invariant,
            )
            if not step.captured:  # a captured step is kept itself
                self.kept[key] = plan
                if len(self.kept) > MAX_PLANS:
                    self.kept.popitem(last=False)
        else:
            self.kept.move_to_end(key)
        step.plans[id(spec), in_window_pool] = plan
        return plan
