"""How things are measured: side by side, correctness first, CUDA-graph replays that rotate over distinct pages, medians; host cost apart.

All peers get the same tensors. Nobody's time is told before a sample of its results has met the error budget of the float64 oracle. Each is captured as one
graph of many calls, every call with a page table of its own that shares no page with the others', so that neither launch gaps nor a warm L2 cache flatter
anyone. The graphs are replayed in turn, so that a clock that changes changes for all.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

import quire
from quire.bench.cases import Case
from quire.testing import Oracle, Problem, Verdict

MOST_TABLES = 256
SAMPLE = 16  # queries at either end of a sequence that are held against the oracle
Call = Callable[[], torch.Tensor | None]


class NotServed(Exception):
    """What a library lacks for a case."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """A case's tensors: one cache, and page tables that share no page, several times the L2 cache in all.

    Attributes:
        case: what they are for.
        q: queries, [num_tokens, num_q_heads, head_dim].
        cache: pages in NHD layout, filled with normal numbers; scales are 1, of int8 1/40.
        tables: page tables, each [num_seqs, max_pages_per_seq] int32.
        seq_lens: [num_seqs] int32.
        cu_seqlens_q: [num_seqs + 1] int32.
        sinks: [num_q_heads], or None.
    """

    case: Case
    q: torch.Tensor
    cache: quire.PagedKVCache
    tables: tuple[torch.Tensor, ...]
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    sinks: torch.Tensor | None

    def batch(self, table: torch.Tensor) -> quire.Batch:
        """The sequences, with one of the tables."""
        return quire.Batch(table, self.seq_lens, None if self.case.bounds["max_query_len"] == 1 else self.cu_seqlens_q)

    def plan(self, table: torch.Tensor, **options) -> quire.Plan:
        """Plan for one of the tables."""
        return quire.plan(self.case.spec, self.batch(table), **self.case.bounds | options)


def make_inputs(
    case: Case, device: torch.device | str = "cuda", most_tables: int = MOST_TABLES, table_len: int = 0
) -> Inputs:
    """Fill a cache with random numbers and deal its pages out at random.

    Args:
        case: the batch.
        device: where.
        most_tables: make no more page tables than this.
        table_len: keys that a table shall have room for, if more than the case has.
    """
    spec, device = case.spec, torch.device(device)
    generator = torch.Generator(device).manual_seed(0)
    pages_of = [-(-s // case.page_size) for _, s in case.lens]
    bytes_per_call = sum(pages_of) * case.page_size * spec.num_kv_heads * 2 * spec.head_dim * spec.kv_dtype.itemsize
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20) if device.type == "cuda" else 0
    rotations = min(most_tables, max(2, math.ceil(6 * l2 / bytes_per_call)))
    num_pages = rotations * sum(pages_of)
    cache = quire.PagedKVCache.empty(spec, num_pages, case.page_size, device=device)
    unit = 40.0 if spec.kv_dtype is torch.int8 else 1.0
    for tensor in (cache.k, cache.v):
        for part in tensor.split(max(1, num_pages // 16)):
            part.copy_((unit * torch.randn(part.shape, device=device, generator=generator)).clamp(-127, 127))
    if spec.kv_dtype is torch.int8:
        cache = quire.PagedKVCache(cache.k, cache.v, "NHD", 1 / unit, 1 / unit)
    order = torch.randperm(num_pages, device=device, generator=generator).to(torch.int32)
    width, tables = max(*pages_of, -(-table_len // case.page_size)), []
    for r in range(rotations):
        table = torch.zeros(len(case.lens), width, dtype=torch.int32, device=device)
        begin = r * sum(pages_of)
        for row, n in zip(table, pages_of, strict=True):
            row[:n] = order[begin : begin + n]
            begin += n
        tables.append(table)
    cu = torch.tensor([0, *accumulate(q for q, _ in case.lens)], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([s for _, s in case.lens], dtype=torch.int32, device=device)
    q = torch.randn(case.num_tokens, spec.num_q_heads, spec.head_dim, device=device, generator=generator).to(spec.dtype)
    sinks = torch.randn(spec.num_q_heads, device=device, generator=generator).to(spec.dtype) if spec.sinks else None
    return Inputs(case, q, cache, tuple(tables), seq_lens, cu, sinks)


class Sample:
    """What queries at both ends of some sequences should come out as: of the first, the last, the longest, and that of most queries.

    Args:
        inputs: of the case.
        table: the page table that results are made with.
    """

    def __init__(self, inputs: Inputs, table: torch.Tensor) -> None:
        case, device = inputs.case, inputs.q.device
        every, starts = range(len(case.lens)), [0, *accumulate(q for q, _ in case.lens)]
        seqs, rows, lens = [], [], []
        for seq in sorted(
            {0, every[-1], max(every, key=lambda i: case.lens[i][0]), max(every, key=lambda i: case.lens[i][1])}
        ):
            q_len, seq_len = case.lens[seq]
            for first in sorted({0, max(0, q_len - SAMPLE)}):
                last = min(q_len, first + SAMPLE)
                seqs.append(seq)
                rows.append(torch.arange(starts[seq] + first, starts[seq] + last, device=device))
                lens.append((last - first, seq_len, seq_len - q_len + first))
        self.rows = torch.cat(rows)
        q_lens, seq_lens, offsets = zip(*lens, strict=True)
        numbers = torch.tensor([[0, *accumulate(q_lens)], [*offsets, 0]], dtype=torch.int32, device=device)
        batch = quire.Batch(table[seqs], inputs.seq_lens[seqs], numbers[0], query_offsets=numbers[1, :-1])
        self.oracle = Oracle(
            Problem(case.spec, batch, inputs.cache, inputs.q[self.rows], q_lens, seq_lens, inputs.sinks, None)
        )

    def judge(self, out: torch.Tensor) -> Verdict:
        """Judge a result: the sample by its error budget, all of it by being finite."""
        verdict = self.oracle.judge(out[self.rows])
        return verdict if bool(out.isfinite().all()) else Verdict(float("inf"), None, float("inf"))


def capture(calls: list[Call]) -> torch.cuda.CUDAGraph:
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


def in_turn(timers: dict[str, Callable[[], float]], seconds: float, least: int = 7) -> dict[str, list[float]]:
    """Call timers in turn for so long, each at least `least` times, but for those so slow that three calls take longer; return what each returned."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    taken = dict.fromkeys(timers, 0.0)
    deadline = time.perf_counter() + seconds

    def wants(name: str) -> bool:
        count = len(times[name])
        return count < 3 or (count < least and taken[name] < seconds) or time.perf_counter() < deadline

    while waiting := [name for name in timers if wants(name)]:
        for name in waiting:
            begun = time.perf_counter()
            times[name].append(timers[name]())
            taken[name] += time.perf_counter() - begun
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Return the median in µs and the range that holds four fifths of the replays."""
    ordered = sorted(times)
    cut = len(ordered) // 10
    return {
        "micros": statistics.median(ordered),
        "low": ordered[cut],
        "high": ordered[-1 - cut],
        "replays": len(ordered),
    }


def host_micros(call: Callable[[], object], synchronise: Callable[[], None]) -> float:
    """Return what a call costs the host in µs: the median over calls, the GPU idle before each few of them."""
    taken = []
    synchronise()
    begun = time.perf_counter()
    call()
    synchronise()
    times = max(2, min(20, int(0.005 / (time.perf_counter() - begun))))
    for _ in range(3):
        synchronise()
        for _ in range(times):
            begun = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begun)
    synchronise()
    return 1e6 * statistics.median(taken)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A peer that has passed: its graph, and what was found on the way."""

    graph: torch.cuda.CUDAGraph
    keep: list
    found: dict


def prepare(peer, inputs: Inputs, sample: Sample) -> Prepared:
    """Make a peer's calls, check one, and capture all.

    Raises:
        NotServed: the library lacks what the case asks for, or its result is wrong.
        Exception: whatever the library raises.
    """
    device, table = inputs.q.device, inputs.tables[0]
    out = torch.full_like(inputs.q, float("nan"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    plan = peer.prepare(inputs, out)
    call = plan(table)
    result = call()
    torch.cuda.synchronize()
    scratch = torch.cuda.max_memory_allocated(device) - before
    result = out if result is None else result.reshape(out.shape)
    verdict = sample.judge(result)
    del result
    if not verdict.passed:
        raise NotServed(f"wrong: error {verdict.error:.2g}, {verdict.out:.1f} times its budget")
    found = {"error": verdict.error, "of_budget": verdict.out, "scratch_bytes": scratch}
    found["host_micros"] = host_micros(call, torch.cuda.synchronize)
    found["plan_micros"] = host_micros(lambda: plan(table), torch.cuda.synchronize) if peer.plans else None
    calls = [plan(t) for t in inputs.tables]
    for each in calls[:2]:
        each()
    return Prepared(capture(calls), calls, found)


def compare(case: Case, peers: list, seconds: float = 0.4, table_len: int = 0) -> dict[str, dict]:
    """Measure a case with every peer, in turn, on the current GPU; page tables have room for `table_len` keys.

    Returns:
        For each peer its `summary` with `bytes_per_second`, `flops_per_second`, `host_micros`, `plan_micros`, `scratch_bytes`, `error` and `of_budget`;
        or `why` there is no time.
    """
    inputs = make_inputs(case, table_len=table_len)
    sample, ready, results = Sample(inputs, inputs.tables[0]), {}, {}
    for peer in peers:
        try:
            ready[peer.name] = prepare(peer, inputs, sample)
        except Exception as error:  # libraries raise what they like
            results[peer.name] = {"why": told(error)}
            torch.cuda.synchronize()  # raises where the device is lost to this process
    timers = {name: (lambda graph=p.graph: replay(graph) / len(inputs.tables)) for name, p in ready.items()}
    times = in_turn(timers, seconds)
    for name, p in ready.items():
        found = summary(times[name]) | p.found
        results[name] = found | {
            "bytes_per_second": case.nbytes / found["micros"] * 1e6,
            "flops_per_second": case.flops / found["micros"] * 1e6,
        }
    del ready, timers
    return {peer.name: results[peer.name] for peer in peers}


def told(error: BaseException) -> str:
    """Return an exception in one line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return first[:160] if isinstance(error, NotServed) else f"{type(error).__name__}: {first[:160]}"
