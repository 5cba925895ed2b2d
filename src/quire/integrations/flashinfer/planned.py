"""What FlashInfer's wrappers share: batches and their plans, and attention with FlashInfer's lse.

With `use_cuda_graph`, `plan` writes into the buffers that the wrapper was made with. Batches and plans are made once,
for the largest batch that the buffers hold. They are kept as long as the wrapper, since captured graphs use them.
"""

from abc import ABC, abstractmethod
from math import e, log2
from typing import Any

import torch

import quire
from quire import AttentionSpec, Batch, PagedKVCache, Plan, State, UnsupportedError
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
    Scoring,
    alibi_slopes,
    check_backend,
    check_layout,
    check_q,
    read_cache,
    read_pages,
    read_scoring,
)
from quire.integrations.flashinfer.signatures import Arguments

LOG2E = log2(e)
LONGEST = 1 << 30  # most keys of a sequence that Quire plans for
OutAndLse = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Wrapper(ABC):
    """A batch, how it is attended to, and the plans made for it."""

    def _set_up(self, a: Arguments) -> None:
        """Read what the constructors of all wrappers take."""
        self.reset_workspace_buffer(a.float_workspace_buffer)
        self._kv_layout = check_layout(a.kv_layout)
        check_backend(a.backend)
        self._use_cuda_graph: bool = a.use_cuda_graph
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
                raise UnsupportedError(f"{name} must be on a GPU or the CPU, got meta; move it there")

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

    def _rescore(self, a: Arguments) -> None:
        """Attend by other scores and masks from now on, as the old `forward` does."""
        old = self._planned()
        is_last = self._bounds[0] == 1  # so that no key is later
        self._scoring = read_scoring(a, **({"causal": old.causal} | vars(old) | vars(a) | {"is_last": is_last}))

    def _attend(self, a: Arguments, cache: PagedKVCache) -> OutAndLse:
        scoring = self._planned()
        check_q(a.q, scoring.q_data_type, self._num_rows, scoring.num_qo_heads, scoring.head_dim_qk)
        self._has_sinks = a.sinks is not None
        scoring = scoring.scaled(a.q_scale)
        return attend(a, cache, self._find_plan(scoring), scoring)


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

    def _read_cache(self, a: Arguments) -> PagedKVCache:
        """Return the cache with its scales, or raise unless it is of the planned dtype and page size."""
        k, v = read_pages(a.paged_kv_cache, self._kv_layout)
        cache = read_cache(k, v, self._kv_layout, self._planned().kv_data_type, a.k_scale, a.v_scale)
        if cache.page_size != self._page_size:
            raise ValueError(
                f"paged_kv_cache must have pages of the planned {self._page_size} tokens, got {cache.page_size}; "
                f"its layout is {self._kv_layout}"
            )
        return cache


class PrefillWrapper(Wrapper):
    """What wrappers share whose query counts vary."""

    _most_rows: int | None = None  # of a wrapper for CUDA graphs, after its first plan

    def _read_queries(self, qo_indptr: torch.Tensor, batch_size: int, max_query_len: int | None) -> tuple[int, int]:
        """Check the query counts; return the bound on them, and their sum."""
        check_integers("qo_indptr", qo_indptr, None, **{"batch_size + 1": batch_size + 1})
        self._check_readable(qo_indptr=qo_indptr)
        num_rows = int(qo_indptr[-1])
        if not self._use_cuda_graph:
            if max_query_len is None:
                return largest(qo_indptr.diff()), num_rows
            return as_int("max_token_per_sequence", max_query_len, least=0), num_rows
        if self._most_rows is not None and num_rows > self._most_rows:
            raise ValueError(
                f"qo_indptr must count at most the {self._most_rows} queries of the first plan, got {num_rows}; "
                "plan for the largest batch first, or say max_total_num_rows"
            )
        return self._most_rows or num_rows, num_rows


def attend(a: Arguments, cache: PagedKVCache, plan: Plan, scoring: Scoring) -> OutAndLse:
    """Return out, or out and the lse in FlashInfer's base and layout; both are written where the caller says.

    Of the arguments, `q` and `return_lse` are read, and if there are any, `sinks`, `out`, `lse`, `lse_base`,
    `lse_layout` and `out_scale`, which e4m3 results are divided by.
    """
    q: torch.Tensor = a.q[0] if isinstance(a.q, tuple) else a.q
    out: Any = getattr(a, "out", None)
    lse: Any = getattr(a, "lse", None)
    base, layout = getattr(a, "lse_base", "log2"), getattr(a, "lse_layout", "NH")
    for name, value, served in (("lse_base", base, ("log2", "ln")), ("lse_layout", layout, ("NH", "HN"))):
        if not is_among(value, served):
            raise ValueError(
                f"{name} must be {served[0]!r} or {served[1]!r}, got {shown(value)}; {served[0]!r} is usual"
            )
    wants_lse = a.return_lse or lse is not None
    if wants_lse and scoring.alibi:
        name, none = ("return_lse", "False") if lse is None else ("lse", "None")
        raise UnsupportedError(
            f"{name} must be {none} with ALiBi, got {shown(a.return_lse if lse is None else lse)}; FlashInfer counts "
            "distances from another position, which moves the lse alone"
        )
    if lse is not None:
        sizes = {"num_tokens": q.shape[0], "num_qo_heads": q.shape[1]}
        check_tensor("lse", lse, q.device, **(sizes if layout == "NH" else dict(reversed(sizes.items()))))
        if lse.dtype is not torch.float32:
            raise TypeError(f"lse must be float32, got {lse.dtype}; leave it out to have it allocated")
        check_no_overlap("lse", lse)
    is_e4m3 = scoring.o_data_type is torch.float8_e4m3fn
    converts = not is_e4m3 and scoring.o_data_type is not scoring.q_data_type
    if out is not None and scoring.o_data_type is not scoring.q_data_type:
        sizes = {"num_tokens": q.shape[0], "num_qo_heads": q.shape[1], "head_dim_vo": scoring.head_dim_vo}
        check_tensor("out", out, q.device, **sizes)
        if out.dtype is not scoring.o_data_type:
            raise ValueError(
                f"out must be of the planned o_data_type {scoring.o_data_type}, got {out.dtype}; "
                "leave it out to have it allocated"
            )
        check_no_overlap("out", out)
    into: Any = None if converts else out
    direct = lse if lse is not None and layout == "NH" and lse.is_contiguous() else None
    if direct is not None:
        if into is None:
            dtype = q.dtype if converts else scoring.o_data_type
            into = q.new_empty(*q.shape[:2], scoring.head_dim_vo, dtype=dtype)
        into = State(into, direct)
    scale = getattr(a, "out_scale", 1.0)
    found = quire.attention(
        a.q,
        cache,
        plan,
        sinks=getattr(a, "sinks", None),
        alibi_slopes=alibi_slopes(scoring.num_qo_heads, q.device) if scoring.alibi else None,
        out=into,
        out_scale=torch.full((1,), scale, dtype=torch.float32, device=q.device) if is_e4m3 else None,
        return_lse=wants_lse,
    )
    result, sums = found if isinstance(found, State) else (found, None)
    if converts:
        result = result.to(scoring.o_data_type) if out is None else out.copy_(result)
    if sums is None:
        return result
    sums = sums if base == "ln" else sums.mul_(LOG2E)
    if layout == "HN":
        sums = sums.t().contiguous()
    if lse is not None and direct is None:
        sums = lse.copy_(sums)
    return (result, sums) if a.return_lse else result


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
