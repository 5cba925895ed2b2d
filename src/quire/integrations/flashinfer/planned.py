"""What FlashInfer's wrappers share: batches and their plans, and attention with FlashInfer's lse.

With `use_cuda_graph`, `plan` writes into the buffers that the wrapper was made with. Batches and plans are made once,
for the largest batch that the buffers hold. They are kept as long as the wrapper, since captured graphs use them.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from math import e, log2
from typing import Any

import torch

import quire
from quire import AttentionSpec, Batch, PagedKVCache, Plan, State, UnsupportedError
from quire.integrations.arguments import as_int, check_integers, check_no_overlap, check_tensor, shown
from quire.integrations.flashinfer.arguments import Scoring, alibi_slopes, read_cache, read_pages, read_scoring
from quire.integrations.flashinfer.signatures import Arguments

LOG2E = log2(e)
LONGEST = 1 << 30  # most keys of a sequence that Quire plans for
TAKEN_BY_RUN = "q", "k", "v", "paged_kv_cache", "q_scale", "k_scale", "v_scale"  # of what `forward` takes
OutAndLse = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Wrapper(ABC):
    """A batch, how it is attended to, and the plans made for it.

    `plan` of a wrapper reads its lists and calls `_prepare`, which calls `quire.plan`. `run` reads its tensors and
    calls `_attend`, which calls `quire.attention`.
    """

    _is_paged = True

    def _set_up(self, a: Arguments) -> None:
        """Read what the constructors of all wrappers take."""
        self.reset_workspace_buffer(a.float_workspace_buffer)
        self._kv_layout: str = getattr(a, "kv_layout", "NHD")
        self._use_cuda_graph: bool = a.use_cuda_graph
        self._scoring: Scoring | None = None  # until `plan` was called
        self._batch: Batch  # of a wrapper for CUDA graphs, its buffers
        self._held: dict[str, torch.Tensor] = {}  # buffers that the batch does not have
        self._bounds: tuple[int, int, int]  # of queries and keys of a sequence, and of query tokens
        self._most_rows: int | None = None  # of a wrapper for CUDA graphs, after its first plan
        self._batch_invariant = False
        self._num_rows = 0
        self._page_size = 0
        self._has_sinks = False  # at the last run; a plan with sinks is another one
        self._extras: tuple[torch.Tensor, ...] = ()  # that the planned mask reads
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

    def _forward(self, a: Arguments, return_lse: bool) -> OutAndLse:
        """Attend by other scores and masks than were planned, from now on; `run` takes what else there is."""
        self._rescore(a)
        given = {name: x for name, x in vars(a).items() if name in TAKEN_BY_RUN}
        return self.run(**given, return_lse=return_lse)

    def _rescore(self, a: Arguments) -> None:
        old = self._planned()
        is_last = self._bounds[0] == 1  # so that no key is later
        self._scoring = read_scoring(a, **({"causal": old.causal} | vars(old) | vars(a) | {"is_last": is_last}))

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

    def _prepare(
        self, a: Arguments, scoring: Scoring, bounds: tuple[int, int], num_rows: int, **lists: torch.Tensor
    ) -> None:
        """Make the plan, and keep what `run` needs. If that raises, what was planned before stays.

        The lists are named as `Batch` has them. With CUDA graphs the batch is made of buffers, and at last the lists
        are written there. A list that has no buffer gets one at the first plan.
        """
        splits, non_blocking = getattr(a, "fixed_split_size", None), getattr(a, "non_blocking", True)
        has_fixed_splits = splits is not None and as_int("fixed_split_size", splits) > 0
        before = vars(self).copy()
        try:
            fields: dict[str, Any] = {
                name: to_device(x, self.device, non_blocking, torch.int64 if name == "tree_bits" else torch.int32)
                for name, x in lists.items()
                if self._buffer(name) is None
            }
            if not self._use_cuda_graph:
                self._batch, self._plans = Batch(**fields, paged=self._is_paged), {}
            else:
                self._batch = replace(self._batch, **fields) if fields else self._batch
                self._most_rows = num_rows if self._most_rows is None else self._most_rows
            self._bounds = *bounds, num_rows if self._most_rows is None else self._most_rows
            self._batch_invariant = has_fixed_splits or getattr(a, "disable_split_kv", False)
            self._num_rows, self._page_size = num_rows, getattr(a, "page_size", 0)
            self._find_plan(scoring)
        except BaseException:
            vars(self).update(before)
            raise
        self._scoring = scoring
        for name, x in lists.items() if self._use_cuda_graph else ():
            buffer = self._buffer(name)
            assert buffer is not None  # after the first plan
            buffer[: len(x)].copy_(x, non_blocking=non_blocking)

    def _buffer(self, name: str) -> torch.Tensor | None:
        """Return what captured graphs read a list from, if there are any."""
        return self._held.get(name, getattr(self._batch, name, None)) if self._use_cuda_graph else None

    def _find_plan(self, scoring: Scoring) -> Plan:
        spec = scoring.spec(self._has_sinks)
        key = spec, self._bounds, self._batch_invariant
        if key not in self._plans:
            names = "max_query_len", "max_seq_len", "num_tokens"
            bounds = dict(zip(names, self._bounds, strict=True))
            plan = quire.plan(spec, self._batch, **bounds)
            if self._batch_invariant and plan.kernel != "torch":
                plan = quire.plan(spec, self._batch, **bounds, batch_invariant=True)
            self._plans[key] = plan
        return self._plans[key]

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

    def _attend(self, a: Arguments, cache: PagedKVCache) -> OutAndLse:
        scoring = self._planned()
        if not scoring.latent:
            rows, dtype = {"num_tokens": self._num_rows, "num_qo_heads": scoring.num_qo_heads}, scoring.q_data_type
            check_tensor("q", a.q, None, **rows, head_dim=scoring.head_dim_qk)
            if a.q.dtype is not dtype:
                raise ValueError(
                    f"q must be of the planned q_data_type {dtype}, got {a.q.dtype}; pass its dtype to plan"
                )
            scoring = scoring.scaled(a.q_scale)
        self._has_sinks = a.sinks is not None
        return attend(a, cache, self._find_plan(scoring), scoring, self._extras)


class PagedWrapper(Wrapper):
    """A wrapper whose keys are in pages: FlashInfer's three lists are Quire's flat page table.

    The first is `cu_pages`, the second `page_table`. The third, `last_page_len`, gives `seq_lens`; latents have those.
    """

    _lists = "indptr", "indices", "last_page_len"
    _buffers = "{}"  # how the buffers of lists are named

    def _keep_buffers(self, a: Arguments) -> None:
        """Check and keep the buffers of a wrapper for CUDA graphs."""
        if not self._use_cuda_graph:
            return
        starts, pages, lens = (self._buffers.format(name) for name in self._lists)
        (batch_size,) = check_buffer(a, lens, self.device)
        check_buffer(a, starts, self.device, batch_size + 1)
        check_buffer(a, pages, self.device)
        queries = self._buffers.format("qo_indptr")
        if hasattr(a, queries):
            check_buffer(a, queries, self.device, batch_size + 1)
        lengths = getattr(a, lens)
        if "last_page_len" in lens:
            self._held, lengths = {"last_page_len": lengths}, torch.zeros_like(lengths)
        self._batch = Batch(getattr(a, pages), lengths, getattr(a, queries, None), getattr(a, starts))

    def _read_pages(self, a: Arguments) -> tuple[dict[str, torch.Tensor], int]:
        """Check the lists; return them as `Batch` names them, and the bound on the lengths of sequences."""
        a.page_size = as_int("page_size", a.page_size, least=1, most=LONGEST)
        given: dict[str, Any] = {name: getattr(a, name) for name in self._lists}
        (starts_name, starts), (pages_name, pages), (lens_name, lengths) = given.items()
        batch_size = check_indptr(starts_name, starts)
        (num_pages,) = check_integers(pages_name, pages, None, **{f"{starts_name.removeprefix('paged_kv_')}[-1]": None})
        check_integers(lens_name, lengths, None, batch_size=batch_size)
        if a.seq_lens is not None:
            check_integers("seq_lens", a.seq_lens, None, batch_size=batch_size)
        self._check_readable(**given, seq_lens=a.seq_lens)
        lists: dict[str, Any] = {"page_table": pages, "seq_lens": lengths, "cu_pages": starts}
        if a.seq_lens is not None:
            lists["seq_lens"] = a.seq_lens
        elif "last_page_len" in lens_name:
            lists["seq_lens"] = count_keys(starts, lengths, a.page_size)
        if not self._use_cuda_graph:
            bound = getattr(a, "max_sequence_kv", None)
            most_keys = largest(lists["seq_lens"]) if bound is None else as_int("max_sequence_kv", bound, least=0)
            return lists, most_keys
        held, most_pages = self._batch.num_seqs, len(self._batch.page_table)
        if batch_size != held:
            raise ValueError(
                f"{lens_name} must have the {held} entries of its buffer, got {batch_size}; use a wrapper for each "
                "batch size"
            )
        if num_pages > most_pages:
            raise ValueError(
                f"{pages_name} must have at most the {most_pages} entries of its buffer, got {num_pages}; allocate a "
                "longer buffer"
            )
        lists.update(dict.fromkeys(self._held, lengths))
        return lists, min(most_pages * a.page_size, LONGEST)

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


def attend_once(
    a: Arguments,
    batch: Batch,
    cache: PagedKVCache,
    most_queries: int,
    most_keys: int,
    extras: tuple[torch.Tensor, ...] = (),
    **changed: Any,
) -> OutAndLse:
    """Plan and attend; what the arguments do not say of heads and dtypes, `q` and the cache do."""
    q = a.q
    heads = {"num_qo_heads": q.shape[-2], "num_kv_heads": cache.num_kv_heads, "latent": cache.is_latent}
    widths = {"head_dim_qk": q.shape[-1], "head_dim_vo": cache.head_dim_v}
    dtypes = {"q_data_type": q.dtype, "kv_data_type": cache.dtype}
    scoring = read_scoring(a, **heads, **widths, **dtypes, **changed).scaled(getattr(a, "q_scale", None))
    spec = scoring.spec(getattr(a, "sinks", None) is not None)
    plan = quire.plan(spec, batch, max_query_len=most_queries, max_seq_len=most_keys, num_tokens=len(q))
    return attend(a, cache, plan, scoring, extras)


def attend(
    a: Arguments, cache: PagedKVCache, plan: Plan, scoring: Scoring, extras: tuple[torch.Tensor, ...] = ()
) -> OutAndLse:
    """Return out, or out and the lse in FlashInfer's base and layout; both are written where the caller says.

    Of the arguments, `q` is read, and if there are any, `return_lse`, `sinks`, `out`, `lse`, `lse_base`, `lse_layout`
    and `out_scale`, which e4m3 results are divided by.
    """
    q: torch.Tensor = a.q[0] if isinstance(a.q, tuple) else a.q
    out: Any = getattr(a, "out", None)
    lse: Any = getattr(a, "lse", None)
    is_heads_first = getattr(a, "lse_layout", "NH") == "HN"
    returns_lse = getattr(a, "return_lse", False)
    wants_lse = returns_lse or lse is not None
    if wants_lse and scoring.alibi:
        name, none = ("return_lse", "False") if lse is None else ("lse", "None")
        raise UnsupportedError(
            f"{name} must be {none} with ALiBi, got {shown(returns_lse if lse is None else lse)}; FlashInfer counts "
            "distances from another position, which moves the lse alone"
        )
    sizes = {"num_tokens": q.shape[0], "num_qo_heads": q.shape[1]}
    if lse is not None:
        check_room("lse", lse, q.device, torch.float32, **dict(reversed(sizes.items())) if is_heads_first else sizes)
    is_e4m3 = scoring.o_data_type is torch.float8_e4m3fn
    converts = not is_e4m3 and scoring.o_data_type is not scoring.q_data_type
    if out is not None and scoring.o_data_type is not scoring.q_data_type:
        check_tensor("out", out, q.device, **sizes, head_dim_vo=scoring.head_dim_vo)
        if out.dtype is not scoring.o_data_type:
            raise ValueError(
                f"out must be of the planned o_data_type {scoring.o_data_type}, got {out.dtype}; "
                "leave it out to have it allocated"
            )
        check_no_overlap("out", out)
    into: Any = None if converts else out
    direct = lse if lse is not None and not is_heads_first and lse.is_contiguous() else None
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
        extras=extras,
        out=into,
        out_scale=torch.full((1,), scale, dtype=torch.float32, device=q.device) if is_e4m3 else None,
        return_lse=wants_lse,
    )
    result, sums = found if isinstance(found, State) else (found, None)
    if converts:
        result = result.to(scoring.o_data_type) if out is None else out.copy_(result)
    if sums is None:
        return result
    sums = sums if getattr(a, "lse_base", "log2") == "ln" else sums.mul_(LOG2E)
    if is_heads_first:
        sums = sums.t().contiguous()
    if lse is not None and direct is None:
        sums = lse.copy_(sums)
    return (result, sums) if returns_lse else result


def check_room(name: str, x: torch.Tensor, device: torch.device, dtype: torch.dtype, **dims: int) -> None:
    """Raise unless results of a dtype can be written to a tensor."""
    check_tensor(name, x, device, **dims)
    if x.dtype is not dtype:
        raise TypeError(
            f"{name} must be {str(dtype).removeprefix('torch.')}, got {x.dtype}; leave it out to have it allocated"
        )
    check_no_overlap(name, x)


def check_indptr(name: str, indptr: torch.Tensor) -> int:
    """Return the number of sequences, or raise unless there is an entry more."""
    (entries,) = check_integers(name, indptr, None, **{"batch_size + 1": None})
    if entries == 0:
        raise ValueError(f"{name} must have batch_size + 1 entries, got none; it begins with 0")
    return entries - 1


def check_buffer(a: Arguments, name: str, device: torch.device, entries: int | None = None) -> torch.Size:
    """Return the shape of a buffer for CUDA graphs, or raise unless kernels can read it."""
    buffer = getattr(a, name)
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


def to_device(
    x: torch.Tensor, device: torch.device, non_blocking: bool, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """Return a contiguous tensor on the device."""
    return x.to(device, dtype, non_blocking=non_blocking).contiguous()
