"""What FlashInfer's wrappers share: batches and their plans, and attention with FlashInfer's lse.

With `use_cuda_graph`, `plan` writes into the buffers that the wrapper was made with. Batches and plans are made once,
for the largest batch that the buffers hold. They are kept as long as the wrapper, since captured graphs use them.
"""

from abc import ABC, abstractmethod
from math import e, log2
from typing import Any

import torch

import quire
from quire import AttentionSpec, Batch, PagedKVCache, Plan, State
from quire.integrations.arguments import (
    as_int,
    check_flags,
    check_integers,
    check_no_overlap,
    check_tensor,
    is_among,
    shown,
)
from quire.integrations.flashinfer.arguments import (
    Pages,
    Scale,
    Scoring,
    check_backend,
    check_layout,
    check_q,
    check_q_scale,
    read_cache,
    read_pages,
    read_scoring,
    refuse,
)

LOG2E = log2(e)
LONGEST = 1 << 30  # most keys of a sequence that Quire plans for
OutAndLse = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Wrapper(ABC):
    """A batch, how it is attended to, and the plans made for it."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        **unserved: object,
    ) -> None:
        self.reset_workspace_buffer(float_workspace_buffer)
        self._kv_layout = check_layout(kv_layout)
        check_flags(use_cuda_graph=use_cuda_graph)
        check_backend(backend)
        refuse("custom kernels are not served", **unserved)
        self._use_cuda_graph = use_cuda_graph
        self._scoring: Scoring | None = None  # until `plan` was called
        self._batch: Batch
        self._bounds: tuple[int, int, int]  # of queries and keys of a sequence, and of query tokens
        self._batch_invariant = False
        self._num_rows = 0
        self._has_sinks = False  # at the last run; a plan with sinks is another one
        self._plans: dict[tuple[AttentionSpec, tuple[int, int, int], bool], Plan] = {}

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether `plan` writes into fixed buffers."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Take the device from a workspace buffer; Quire needs no memory from it."""
        if not isinstance(float_workspace_buffer, torch.Tensor):
            raise TypeError(
                f"float_workspace_buffer must be a tensor, got {shown(float_workspace_buffer)}; "
                "it says on which device the wrapper works"
            )
        self.device = float_workspace_buffer.device

    def _check_readable(self, **lists: torch.Tensor | None) -> None:
        """Raise if a list has no memory. A wrapper for CUDA graphs reads none, and only copies to its own device."""
        for name, x in lists.items():
            if x is not None and x.is_meta and not (self._use_cuda_graph and self.device.type == "meta"):
                raise quire.UnsupportedError(f"{name} must be on a GPU or the CPU, got meta; move it there")

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> OutAndLse:
        """Attend, for one layer; each wrapper has its own parameters."""

    def run_return_lse(self, *args: Any, **kwargs: Any) -> OutAndLse:
        """Return `run`'s output and the lse."""
        return self.run(*args, return_lse=True, **kwargs)

    def _prepare(
        self, scoring: Scoring, batch: Batch, bounds: tuple[int, int, int], batch_invariant: bool, num_rows: int
    ) -> None:
        """Keep what `run` needs, and make the plan. If that raises, what was planned before stays."""
        before = vars(self).copy()
        if not self._use_cuda_graph:
            self._plans = {}
        self._batch, self._bounds, self._batch_invariant = batch, bounds, batch_invariant
        try:
            self._find_plan(scoring)
        except BaseException:
            vars(self).update(before)
            raise
        self._scoring, self._num_rows = scoring, num_rows

    def _find_plan(self, scoring: Scoring) -> Plan:
        spec = scoring.spec(self._has_sinks)
        key = spec, self._bounds, self._batch_invariant
        plan = self._plans.get(key)
        if plan is None:
            queries, keys, tokens = self._bounds
            plan = quire.plan(spec, self._batch, max_query_len=queries, max_seq_len=keys, num_tokens=tokens)
            if self._batch_invariant and plan.kernel != "torch":
                plan = quire.plan(
                    spec,
                    self._batch,
                    max_query_len=queries,
                    max_seq_len=keys,
                    num_tokens=tokens,
                    batch_invariant=True,
                )
            self._plans[key] = plan
        return plan

    def _planned(self, window_left: int | None = None) -> Scoring:
        """Return the planned scoring, or raise if nothing was planned, or another window."""
        if self._scoring is None:
            raise ValueError("plan must be called before run, got no call; call it once per step")
        if window_left is not None:
            window_left = max(as_int("window_left", window_left), -1)
            if window_left != self._scoring.window_left:
                raise ValueError(
                    f"window_left must be the planned {self._scoring.window_left}, got {window_left}; plan again"
                )
        return self._scoring

    def _rescore(
        self,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        causal: bool | None = None,
    ) -> None:
        """Attend by other scores and masks from now on, as the old `forward` does."""
        old = self._planned()
        self._scoring = read_scoring(
            old.num_qo_heads,
            old.num_kv_heads,
            old.head_dim_qk,
            old.head_dim_vo,
            old.q_data_type,
            old.kv_data_type,
            None,
            sm_scale,
            old.causal if causal is None else causal,
            window_left,
            logits_soft_cap,
            pos_encoding_mode,
        )

    def _attend(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        lse_base: str = "log2",
        lse_layout: str = "NH",
    ) -> OutAndLse:
        scoring = self._planned()
        check_q(q, scoring.q_data_type, self._num_rows, scoring.num_qo_heads, scoring.head_dim_qk)
        self._has_sinks = sinks is not None
        return attend(q, cache, self._find_plan(scoring), sinks, out, lse, return_lse, lse_base, lse_layout)


class PagedWrapper(Wrapper):
    """A wrapper whose keys are in pages: FlashInfer's three lists are Quire's flat page table.

    `paged_kv_indptr` is `cu_pages`, `paged_kv_indices` is `page_table`, and the third gives `seq_lens`.
    """

    _prefix = ""  # of the names of the lists, in error messages
    _page_size = 0

    def _keep_buffers(
        self, suffix: str, indptr: torch.Tensor | None, indices: torch.Tensor | None, last_page_len: torch.Tensor | None
    ) -> None:
        """Check and keep the buffers of a wrapper for CUDA graphs."""
        (entries,) = check_buffer(f"paged_kv_last_page_len_{suffix}", last_page_len, self.device)
        check_buffer(f"paged_kv_indptr_{suffix}", indptr, self.device, entries + 1)
        check_buffer(f"paged_kv_indices_{suffix}", indices, self.device)
        assert indptr is not None and indices is not None and last_page_len is not None  # checked
        self._page_buffers = indptr, indices, last_page_len
        self._seq_lens = torch.zeros_like(last_page_len)  # read by the kernels in its place

    def _read_pages(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
        seq_lens: torch.Tensor | None,
        max_seq_len: int | None = None,
    ) -> tuple[torch.Tensor, int]:
        """Check the lists; return the lengths of sequences, where the lists are, and the bound on them."""
        batch_size = check_indptr(f"{self._prefix}indptr", indptr)
        (num_indices,) = check_integers(f"{self._prefix}indices", indices, None, **{"indptr[-1]": None})
        check_integers(f"{self._prefix}last_page_len", last_page_len, None, batch_size=batch_size)
        if seq_lens is not None:
            check_integers("seq_lens", seq_lens, None, batch_size=batch_size)
        lists = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        self._check_readable(**{self._prefix + name: x for name, x in lists.items()}, seq_lens=seq_lens)
        if seq_lens is None:
            seq_lens = count_keys(indptr, last_page_len, page_size)
        if not self._use_cuda_graph:
            if max_seq_len is None:
                return seq_lens, largest(seq_lens)
            return seq_lens, as_int("max_sequence_kv", max_seq_len, least=0)
        _, held, lasts = self._page_buffers
        if batch_size != len(lasts):
            raise ValueError(
                f"{self._prefix}last_page_len must have the {len(lasts)} entries of its buffer, got {batch_size}; "
                "use a wrapper for each batch size"
            )
        if num_indices > len(held):
            raise ValueError(
                f"{self._prefix}indices must have at most the {len(held)} entries of its buffer, got {num_indices}; "
                "allocate a longer buffer"
            )
        return seq_lens, min(len(held) * page_size, LONGEST)

    def _write_buffers(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        seq_lens: torch.Tensor,
        non_blocking: bool,
    ) -> None:
        """Update what captured graphs read."""
        starts, pages, lasts = self._page_buffers
        for buffer, x in (
            (starts, indptr),
            (pages[: len(indices)], indices),
            (lasts, last_page_len),
            (self._seq_lens, seq_lens),
        ):
            buffer.copy_(x, non_blocking=non_blocking)

    def _read_cache(self, paged_kv_cache: Pages, q_scale: Scale, k_scale: Scale, v_scale: Scale) -> PagedKVCache:
        """Return the cache with its scales, or raise unless it is of the planned dtype and page size."""
        check_q_scale(q_scale)
        k, v = read_pages(paged_kv_cache, self._kv_layout)
        cache = read_cache(k, v, self._kv_layout, self._planned().kv_data_type, k_scale, v_scale)
        if cache.page_size != self._page_size:
            raise ValueError(
                f"paged_kv_cache must have pages of the planned {self._page_size} tokens, got {cache.page_size}; "
                f"its layout is {self._kv_layout}"
            )
        return cache


def attend(
    q: torch.Tensor,
    cache: PagedKVCache,
    plan: Plan,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    lse_base: str = "log2",
    lse_layout: str = "NH",
) -> OutAndLse:
    """Return out, or out and the lse in FlashInfer's base and layout; both are written where the caller says."""
    check_flags(return_lse=return_lse)
    for name, value, served in (("lse_base", lse_base, ("log2", "ln")), ("lse_layout", lse_layout, ("NH", "HN"))):
        if not is_among(value, served):
            raise ValueError(
                f"{name} must be {served[0]!r} or {served[1]!r}, got {shown(value)}; {served[0]!r} is usual"
            )
    if not return_lse:
        return quire.attention(q, cache, plan, sinks=sinks, out=out)
    if lse is not None:
        sizes = {"num_tokens": q.shape[0], "num_qo_heads": q.shape[1]}
        check_tensor("lse", lse, q.device, **(sizes if lse_layout == "NH" else dict(reversed(sizes.items()))))
        if lse.dtype is not torch.float32:
            raise TypeError(f"lse must be float32, got {lse.dtype}; leave it out to have it allocated")
        check_no_overlap("lse", lse)
    if lse is not None and lse_layout == "NH" and lse.is_contiguous():
        if out is None:
            out = q.new_empty(*q.shape[:2], plan.spec.head_dim_v)
        state = quire.attention(q, cache, plan, sinks=sinks, out=State(out, lse))
        lse = None
    else:
        state = quire.attention(q, cache, plan, sinks=sinks, out=out, return_lse=True)
    found = state.lse if lse_base == "ln" else state.lse.mul_(LOG2E)
    if lse_layout == "HN":
        found = found.t().contiguous()
    return state.out, found if lse is None else lse.copy_(found)


def check_indptr(name: str, indptr: torch.Tensor) -> int:
    """Return the number of sequences, or raise unless there is an entry more."""
    (entries,) = check_integers(name, indptr, None, **{"batch_size + 1": None})
    if entries == 0:
        raise ValueError(f"{name} must have batch_size + 1 entries, got none; it begins with 0")
    return entries - 1


def check_buffer(
    name: str, buffer: torch.Tensor | None, device: torch.device, entries: int | None = None
) -> torch.Size:
    """Return the shape of a buffer for CUDA graphs, or raise unless kernels can read it."""
    if buffer is None:
        raise ValueError(f"{name} must be a tensor where use_cuda_graph=True, got None; graphs read from it")
    shape = check_integers(name, buffer, device, entries=entries)
    if buffer.dtype is not torch.int32 or not buffer.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous int32, got {buffer.dtype} with strides {buffer.stride()}; graphs read from it"
        )
    return shape


def count_keys(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return how many keys each sequence has: 0 without a page, whatever `last_page_len` says."""
    pages = indptr.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len.to(pages.device), 0)


def largest(lengths: torch.Tensor) -> int:
    """Return the largest of the lengths, 0 if there are none; FlashInfer's `plan` reads them back as well."""
    return int(lengths.max()) if len(lengths) else 0


def is_batch_invariant(fixed_split_size: int | None, disable_split_kv: bool) -> bool:
    """Return whether FlashInfer's arguments ask for results that do not depend on the rest of the batch."""
    check_flags(disable_split_kv=disable_split_kv)
    return disable_split_kv or (fixed_split_size is not None and as_int("fixed_split_size", fixed_split_size) > 0)


def to_device(x: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
    """Return contiguous int32 on the device."""
    return x.to(device, torch.int32, non_blocking=non_blocking).contiguous()
