"""How libraries are measured: side by side, correctness first, by replays of CUDA graphs; the cost of the host apart.

All libraries get the same tensors.
A library is timed only after a sample of its output has passed the error budget of the float64 oracle.
A library that multiplies latents in fp8 has the budget of that arithmetic.
Many calls are captured as one graph, so launch gaps do not count.
Every call has its own page table, and no two tables share a page, so a warm L2 cache helps no library.
The graphs of all libraries are replayed round-robin, so clock drift affects all of them alike.
The result is the median over the replays.

Quire has its own timing because `triton.testing.do_bench_cudagraph` neither rotates nor interleaves.
It captures repeated calls on the same inputs, which stay in the L2 cache if they fit, and times one function at a time.
"""

import importlib
import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch

import quire
from quire.bench.cases import Case, Layout
from quire.testing import Oracle, Problem, Verdict

MAX_TABLES = 256
L2_MULTIPLE = 6  # the page tables together point at this many times the bytes of the L2 cache
SAMPLE = 16  # queries at each end of a sequence that are compared with the oracle
Call = Callable[[], torch.Tensor | None]
Planner = Callable[[torch.Tensor], Call]  # from a page table to a call
Adapter = Callable[["Inputs", torch.Tensor], Planner]


class NotServed(Exception):
    """A library lacks what a case needs."""


@dataclass(frozen=True)
class Timing:
    """What was measured of one library on one case; times are in µs.

    Attributes:
        micros: median time of a call on the GPU.
        low: with `high`, the range that holds four fifths of the replays.
        high: see `low`.
        replays: how many there were.
        error: largest error of the sample against the float64 oracle.
        of_budget: that error over the error budget; of a library that multiplies latents in fp8, over `fp8_budget`.
        scratch_bytes: GPU memory that planning and calling allocate.
        host_micros: what an eager call costs the host.
        plan_micros: what planning costs the host, once per step; None where there is no planning.
        bytes_per_second: bytes that the case must move, over the time.
        flops_per_second: operations of the case, over the time.
    """

    micros: float
    low: float
    high: float
    replays: int
    error: float
    of_budget: float
    scratch_bytes: int
    host_micros: float
    plan_micros: float | None
    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class NoResult:
    """Why there is no time of a library on a case."""

    why: str


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a case: one cache, and page tables that share no page.

    Together the tables point at several times as many bytes as the L2 cache holds, unless that takes too many tables.

    Attributes:
        case: the case.
        q: queries, [num_tokens, num_q_heads, head_dim].
        cache: pages in NHD layout, filled with normal random numbers; scales are 1, of int8 1/40.
        tables: page tables, each [num_seqs, max_pages_per_seq] int32. Where keys are packed, the pages of a table are
            in order, so that a table stands for a slice of the cache.
        seq_lens: [num_seqs] int32.
        cu_seqlens_q: [num_seqs + 1] int32.
        cu_seqlens_k: the same for keys.
        sinks: [num_q_heads], or None.
    """

    case: Case
    q: torch.Tensor
    cache: quire.PagedKVCache
    tables: tuple[torch.Tensor, ...]
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    sinks: torch.Tensor | None

    def batch(self, table: torch.Tensor) -> quire.Batch:
        """Return the sequences, with one of the tables."""
        starts = None if self.case.bounds["max_query_len"] == 1 else self.cu_seqlens_q
        if self.case.packed:
            return quire.Batch.varlen(starts, self.cu_seqlens_k)
        return quire.Batch(table, self.seq_lens, starts)

    def packed(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the packed keys and values that a table stands for, [num_keys, num_kv_heads, head_dim] each."""
        first = int(table[0, 0])
        end = first + sum(self.case.seq_lens)
        return self.cache.k[first:end, 0], self.cache.v[first:end, 0]

    def empty_out(self) -> torch.Tensor:
        """Return a tensor for results, [num_tokens, num_q_heads, head_dim_v], filled with NaN."""
        spec = self.case.spec
        return self.q.new_full((self.case.num_tokens, spec.num_q_heads, spec.head_dim_v), math.nan)

    def plan(self, table: torch.Tensor, **options: Any) -> quire.Plan:
        """Plan for one of the tables; `options` are those of `quire.plan`, bounds included."""
        arguments: dict[str, Any] = {**self.case.bounds, **options}
        return quire.plan(self.case.spec, self.batch(table), **arguments)


def make_inputs(
    case: Case, device: torch.device | str = "cuda", max_tables: int = MAX_TABLES, table_len: int = 0
) -> Inputs:
    """Fill a cache with random numbers and assign its pages to sequences, at random unless keys are packed.

    Args:
        case: the batch.
        device: where the tensors are.
        max_tables: make no more page tables than this.
        table_len: keys that each row of a table has room for, if more than the case has.
    """
    spec, device = case.spec, torch.device(device)
    generator = torch.Generator(device).manual_seed(0)
    num_shared = case.shared_prefix // case.page_size  # pages, the first of each table
    pages_per_seq = [pages - num_shared for pages in case.pages_per_seq]
    pages_per_table = num_shared + sum(pages_per_seq)
    bytes_per_call = pages_per_table * case.page_size * case.bytes_per_key
    num_tables = min(max_tables, max(2, math.ceil(L2_MULTIPLE * l2_bytes(device) / bytes_per_call)))
    cache = make_cache(case, num_tables * pages_per_table, device, generator)
    if case.packed:
        order = torch.arange(cache.num_pages, dtype=torch.int32, device=device)
    else:
        order = torch.randperm(cache.num_pages, device=device, generator=generator).to(torch.int32)
    width = max(*case.pages_per_seq, -(-table_len // case.page_size))
    tables = []
    for pages in order.split(pages_per_table):
        table = torch.zeros(len(case.lens), width, dtype=torch.int32, device=device)
        table[:, :num_shared] = pages[:num_shared]
        for row, owned in zip(table, pages[num_shared:].split(pages_per_seq), strict=True):
            row[num_shared : num_shared + len(owned)] = owned
        tables.append(table)
    starts, key_starts = (
        torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
        for lens in (case.query_lens, case.seq_lens)
    )
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
    q = torch.randn(case.num_tokens, spec.num_q_heads, spec.head_dim, device=device, generator=generator).to(spec.dtype)
    sinks = torch.randn(spec.num_q_heads, device=device, generator=generator).to(spec.dtype) if spec.sinks else None
    return Inputs(case, q, cache, tuple(tables), seq_lens, starts, key_starts, sinks)


def make_cache(case: Case, num_pages: int, device: torch.device, generator: torch.Generator) -> quire.PagedKVCache:
    """Fill pages with normal random numbers, in int8 with 40 times these, and scales of 1/40."""
    cache = quire.PagedKVCache.empty(case.spec, num_pages, case.page_size, device=device)
    is_int8 = case.spec.kv_dtype is torch.int8
    unit = 40.0 if is_int8 else 1.0
    for tensor in (cache.latents,) if cache.is_latent else (cache.k, cache.v):
        for some in tensor.split(max(1, num_pages // 16)):  # a sixteenth at a time, since random numbers are float32
            some.copy_((unit * torch.randn(some.shape, device=device, generator=generator)).clamp(-127, 127))
    return quire.PagedKVCache(cache.k, cache.v, "NHD", 1 / unit, 1 / unit) if is_int8 else cache


def l2_bytes(device: torch.device) -> int:
    """Return the size of the L2 cache; 64 MiB where torch does not know it, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)


class Sample:
    """The oracle's results for queries at both ends of some sequences.

    The sequences are the first, the last, the longest, and the one with the most queries.

    Args:
        inputs: of the case.
        table: the page table that results are made with.
    """

    def __init__(self, inputs: Inputs, table: torch.Tensor) -> None:
        case, device = inputs.case, inputs.q.device
        starts = [0, *accumulate(case.query_lens)]
        last = len(case.lens) - 1
        most_queries = max(range(last + 1), key=case.query_lens.__getitem__)
        longest = max(range(last + 1), key=case.seq_lens.__getitem__)
        seqs, rows, query_lens, seq_lens, offsets = [], [], [], [], []
        for seq in sorted({0, last, most_queries, longest}):
            q_len, seq_len = case.lens[seq]
            for begin in sorted({0, max(0, q_len - SAMPLE)}):
                end = min(q_len, begin + SAMPLE)
                seqs.append(seq)
                rows.append(torch.arange(starts[seq] + begin, starts[seq] + end, device=device))
                query_lens.append(end - begin)
                seq_lens.append(seq_len)
                offsets.append(seq_len - q_len + begin)
        self.rows = torch.cat(rows)
        batch = quire.Batch(
            table[seqs],
            inputs.seq_lens[seqs],
            torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
            query_offsets=torch.tensor(offsets, dtype=torch.int32, device=device),
        )
        q = inputs.q[self.rows]
        problem = Problem(case.spec, batch, inputs.cache, q, tuple(query_lens), tuple(seq_lens), inputs.sinks, None)
        self.oracle = Oracle(problem)

    def judge(self, out: torch.Tensor, in_fp8: bool = False) -> Verdict:
        """Judge a result: the sample must be within its error budget, and all of the result finite.

        Args:
            out: [num_tokens, num_q_heads, head_dim_v].
            in_fp8: judge by `fp8_budget`.
        """
        verdict = self.oracle.judge(out[self.rows])
        if in_fp8:
            verdict = Verdict(verdict.error / self.fp8_budget, None, verdict.error)
        return verdict if bool(out.isfinite().all()) else Verdict(math.inf, None, math.inf)

    @cached_property
    def fp8_budget(self) -> float:
        """The error budget of attention over e4m3 latents whose matrix products are in e4m3.

        Queries, and probabilities of which the largest is 1, are rounded to e4m3. As in `quire.testing`, the budget is
        twice the error of that arithmetic and of rounding the result.
        """
        problem, exact = self.oracle.problem, self.oracle.exact.out
        spec, cache, batch = problem.spec, problem.cache, problem.batch
        worst = 0.0
        for seq, (q_len, kv_len) in enumerate(zip(problem.query_lens, problem.seq_lens, strict=True)):
            rows = slice(sum(problem.query_lens[:seq]), sum(problem.query_lens[: seq + 1]))
            keys = cache.latents[batch.page_table[seq].long()].flatten(0, 1)[:kv_len].float()
            scores = spec.softmax_scale * (rounded_to_fp8(problem.q[rows]) @ keys.T)
            first = int(batch.query_offsets[seq]) if batch.query_offsets is not None else kv_len - q_len
            last = torch.arange(first, first + q_len, device=keys.device)[:, None, None]
            scores = scores.masked_fill(torch.arange(kv_len, device=keys.device) > last, -math.inf)
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            out = rounded_to_fp8(weights) @ keys[:, : spec.head_dim_v] / weights.sum(-1, keepdim=True)
            worst = max(worst, (out.double() - exact[rows]).abs().max().item())
        return 2 * (worst + torch.finfo(spec.dtype).eps * exact.abs().max().item())


def rounded_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3fn, without a scale; return float32."""
    return x.to(torch.float8_e4m3fn).float()


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """Capture calls, one after the other, as one graph, and replay it once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Return the time of one replay in µs."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def round_robin(
    timers: Mapping[str, Callable[[], float]], seconds: float, min_replays: int = 7
) -> dict[str, list[float]]:
    """Call timers round-robin and return what each returned.

    Args:
        timers: each runs once per call and returns its time.
        seconds: go on for this long.
        min_replays: call each timer at least this often, or three times if its calls take longer than `seconds` in all.
    """
    times: dict[str, list[float]] = {name: [] for name in timers}
    spent = dict.fromkeys(timers, 0.0)
    deadline = time.perf_counter() + seconds

    def is_due(name: str) -> bool:
        count = len(times[name])
        if count < 3 or time.perf_counter() < deadline:
            return True
        return count < min_replays and spent[name] < seconds

    while due := [name for name in timers if is_due(name)]:
        for name in due:
            start = time.perf_counter()
            times[name].append(timers[name]())
            spent[name] += time.perf_counter() - start
    return times


def median_and_range(times: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the ends of the range that holds four fifths of the times."""
    ordered = sorted(times)
    cut = len(ordered) // 10
    return statistics.median(ordered), ordered[cut], ordered[-1 - cut]


def host_micros(call: Callable[[], object], synchronise: Callable[[], None]) -> float:
    """Return what a call costs the host in µs: the median over calls, the GPU idle before each few of them."""
    taken = []
    synchronise()
    start = time.perf_counter()
    call()
    synchronise()
    calls = max(2, min(20, int(0.005 / (time.perf_counter() - start))))
    for _ in range(3):
        synchronise()
        for _ in range(calls):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    synchronise()
    return 1e6 * statistics.median(taken)


@dataclass(frozen=True)
class Peer:
    """A library to measure.

    Attributes:
        name: in tables and plots; the names of Quire's variants begin with "Quire".
        module: what must be importable.
        adapter: makes the calls; see `quire.bench.peers`.
        plans: there is host work per step, which is timed separately.
        package: the distribution whose version is reported; the first part of `module` when not given.
        slow: it compiles for seconds per case, so it is measured on the cases of --quick only, unless it is named.
        serves: which layouts of keys and values; it takes no part in cases of others.
        in_fp8: it multiplies fp8 latents in fp8, queries included, so its results have the budget of that arithmetic.
    """

    name: str
    module: str
    adapter: Adapter
    plans: bool = False
    package: str = ""
    slow: bool = False
    serves: tuple[Layout, ...] = ("pages",)
    in_fp8: bool = False

    def why_absent(self) -> str | None:
        """Return why it cannot be used here; None if it can."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a library built for another machine may raise anything
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else self.module}"
        return None

    def version(self) -> str:
        """Return the version that is installed."""
        module = self.module.split(".")[0]
        try:
            return importlib.metadata.version(self.package or module)
        except importlib.metadata.PackageNotFoundError:
            return str(getattr(importlib.import_module(module), "__version__", "present"))


@dataclass(frozen=True, eq=False)
class Candidate:
    """A library whose result was right: its captured graph, and what was measured before.

    Attributes:
        graph: one call for each page table.
        calls: the captured calls, kept because they own the memory that the graph uses.
        error: see `Timing`, as the others.
        of_budget: see there.
        scratch_bytes: see there.
        host_micros: see there.
        plan_micros: see there.
    """

    graph: torch.cuda.CUDAGraph
    calls: Sequence[Call]
    error: float
    of_budget: float
    scratch_bytes: int
    host_micros: float
    plan_micros: float | None

    def timing(self, case: Case, times: Sequence[float]) -> Timing:
        """Return the result, given the times of a call in each replay."""
        micros, low, high = median_and_range(times)
        return Timing(
            micros=micros,
            low=low,
            high=high,
            replays=len(times),
            error=self.error,
            of_budget=self.of_budget,
            scratch_bytes=self.scratch_bytes,
            host_micros=self.host_micros,
            plan_micros=self.plan_micros,
            bytes_per_second=case.nbytes / micros * 1e6,
            flops_per_second=case.flops / micros * 1e6,
        )


def check_and_capture(peer: Peer, inputs: Inputs, sample: Sample) -> Candidate:
    """Make a library's calls, check the result of one, and capture all.

    Raises:
        NotServed: the library lacks what the case needs, or its result is wrong.
        Exception: whatever the library raises.
    """
    device, table = inputs.q.device, inputs.tables[0]
    out = inputs.empty_out()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    plan = peer.adapter(inputs, out)
    call = plan(table)
    result = call()
    torch.cuda.synchronize()
    scratch_bytes = torch.cuda.max_memory_allocated(device) - before
    in_fp8 = peer.in_fp8 and inputs.case.spec.kv_dtype.itemsize == 1
    verdict = sample.judge(out if result is None else result.reshape(out.shape), in_fp8)
    del result
    if not verdict.passed:
        raise NotServed(f"wrong: error {verdict.error:.2g}, {verdict.out:.1f} times its budget")
    call_micros = host_micros(call, torch.cuda.synchronize)
    plan_micros = host_micros(lambda: plan(table), torch.cuda.synchronize) if peer.plans else None
    calls = [plan(t) for t in inputs.tables]
    for each in calls[:2]:
        each()
    graph = capture(calls)
    return Candidate(graph, calls, verdict.error, verdict.out, scratch_bytes, call_micros, plan_micros)


def compare(
    case: Case, peers: Sequence[Peer], seconds: float = 0.4, table_len: int = 0
) -> dict[str, Timing | NoResult]:
    """Measure a case with every library, round-robin, on the current GPU.

    Args:
        case: the batch.
        peers: the libraries.
        seconds: replay the graphs for this long.
        table_len: keys that each row of a page table has room for, if more than the case has.

    Returns:
        By name, in the order of `peers`: the timing, or why there is none.
    """
    inputs = make_inputs(case, table_len=table_len)
    sample = Sample(inputs, inputs.tables[0])
    ready: dict[str, Candidate] = {}
    results: dict[str, Timing | NoResult] = {}
    for peer in peers:
        try:
            ready[peer.name] = check_and_capture(peer, inputs, sample)
        except Exception as error:  # a library may raise anything
            results[peer.name] = NoResult(describe_error(error))
            torch.cuda.synchronize()  # raises if the error has made the device unusable for this process
    timers = {name: partial(time_of_call, candidate, len(inputs.tables)) for name, candidate in ready.items()}
    times = round_robin(timers, seconds)
    results |= {name: candidate.timing(case, times[name]) for name, candidate in ready.items()}
    return {peer.name: results[peer.name] for peer in peers}


def time_of_call(candidate: Candidate, num_calls: int) -> float:
    """Replay a candidate's graph once, and return the time of one of its calls in µs."""
    return replay(candidate.graph) / num_calls


def describe_error(error: BaseException) -> str:
    """Return an exception in one line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return first[:160] if isinstance(error, NotServed) else f"{type(error).__name__}: {first[:160]}"
