"""Measure libraries side by side: correctness first, then replays of CUDA graphs, and separately the cost of the host.

All libraries get the same tensors.
A library is timed only after a sample of its output has passed the error budget of the float64 oracle.
A library that multiplies latents in fp8 has the budget of that arithmetic.
At least as many calls as a model has layers are captured as one graph, so launch gaps do not count, and what a library
does once per step, such as to find a schedule, counts once.
Each call has another page table than the one before. No two tables share a page, and all come in turn, so a warm L2
cache helps no library. Where query tokens choose keys, tables are their lists, and each has a pool of its own.
The graphs of all libraries are replayed round-robin, so clock drift affects all of them alike.
The order is another one in each round, so what runs before a library affects all of them alike too.
The result is the median over the replays.

Quire has its own timing because `triton.testing.do_bench_cudagraph` neither rotates nor interleaves.
It captures repeated calls on the same inputs, which stay in the L2 cache if they fit, and times one function at a time.
"""

import importlib
import importlib.metadata
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quire_tools.bench.case import RECORDS, Case, Layout
from quire_tools.bench.inputs import Inputs, make_inputs
from quire_tools.bench.sample import Sample

LAYERS = 32  # of a model; a captured graph has as many calls, unless that takes longer than
MOST_MICROS = 10_000.0

Call = Callable[[], torch.Tensor | None]
Planner = Callable[[torch.Tensor], Call]  # from a page table to a call
Adapter = Callable[[Inputs, torch.Tensor], Planner]


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

    The order of a round is random. In a fixed order, whatever came after the naive kernel took 6 to 8 % longer (decode
    of 1 x 131,072; NVIDIA H100, 2026-11-28).

    Args:
        timers: each runs once per call and returns its time.
        seconds: go on for this long.
        min_replays: call each timer at least this often, or three times if its calls take longer than `seconds` in all.
    """
    times: dict[str, list[float]] = {name: [] for name in timers}
    spent = dict.fromkeys(timers, 0.0)
    deadline = time.perf_counter() + seconds
    shuffle = random.Random(0).shuffle

    def is_due(name: str) -> bool:
        count = len(times[name])
        if count < 3 or time.perf_counter() < deadline:
            return True
        return count < min_replays and spent[name] < seconds

    while due := [name for name in timers if is_due(name)]:
        shuffle(due)
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
    """Return the host time of a call in µs: the median over calls, with the GPU idle before each few of them."""
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
        adapter: makes the calls; see `quire_tools.bench.peers`.
        plans: there is host work per step, which is timed separately.
        package: the distribution whose version is reported; the first part of `module` when not given.
        slow: it compiles for seconds per case, so it is measured on the cases of --quick only, unless it is named.
        serves: which layouts of keys and values; it takes no part in cases of others.
        in_fp8: it multiplies fp8 latents in fp8, queries included, so its results have the budget of that arithmetic.
            None does with records.
        for_hopper: its kernels, or its configurations of them, are for Hopper GPUs; it takes no part where an older
            card's code runs.
        scores: which functions on scores it serves, and whether ALiBi, of `bench.scores`. Adapters refuse softcaps.
    """

    name: str
    module: str
    adapter: Adapter
    plans: bool = False
    package: str = ""
    slow: bool = False
    serves: tuple[Layout, ...] = ("pages",)
    in_fp8: bool = False
    for_hopper: bool = False
    scores: tuple[str, ...] = ()

    def why_absent(self, card: str | None = None) -> str | None:
        """Return why it cannot be used here; None if it can. `card` is an older card whose code runs here."""
        if card is not None and self.for_hopper:
            return f"its kernels are for Hopper GPUs, and this run is of {card} code"
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
        graph: some calls for each page table.
        num_calls: how many in all.
        calls: the captured calls, kept because they own the memory that the graph uses.
        error: see `Timing`, as the others.
        of_budget: see there.
        scratch_bytes: see there.
        host_micros: see there.
        plan_micros: see there.
    """

    graph: torch.cuda.CUDAGraph
    num_calls: int
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
    device, table, spec = inputs.q.device, inputs.tables[0], inputs.case.spec
    if (spec.score is not None or spec.alibi) and inputs.case.scores not in peer.scores:
        raise NotServed(f"does not serve {inputs.case.scores}")
    out = inputs.empty_out()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    plan = peer.adapter(inputs, out)
    call = plan(table)
    result = call()
    torch.cuda.synchronize()
    scratch_bytes = torch.cuda.max_memory_allocated(device) - before
    in_fp8 = peer.in_fp8 and spec.kv_dtype.itemsize == 1 and inputs.case.kv_dtype != RECORDS
    verdict = sample.judge(out if result is None else result.reshape(out.shape), in_fp8)
    del result
    if not verdict.passed:
        raise NotServed(f"wrong: error {verdict.error:.2g}, {verdict.out:.1f} times its budget")
    call_micros = host_micros(call, torch.cuda.synchronize)
    plan_micros = host_micros(lambda: plan(table), torch.cuda.synchronize) if peer.plans else None
    calls = [plan(t) for t in inputs.tables]
    for each in calls[:2]:
        each()
    graph, rounds = capture(calls), 1
    wanted = min(-(-LAYERS // len(calls)), int(MOST_MICROS / replay(graph)))
    if wanted > 1:
        graph, rounds = capture([*calls] * wanted), wanted
    return Candidate(
        graph, rounds * len(calls), calls, verdict.error, verdict.out, scratch_bytes, call_micros, plan_micros
    )


def compare(
    case: Case,
    peers: Sequence[Peer],
    seconds: float = 0.4,
    table_len: int = 0,
    taken: dict[str, float] | None = None,
) -> dict[str, Timing | NoResult]:
    """Measure a case with every library, round-robin, on the current GPU.

    Args:
        case: the batch.
        peers: the libraries.
        seconds: replay the graphs for this long.
        table_len: keys that each row of a page table has room for, if more than the case has.
        taken: gets the seconds that each library took until it could be timed.

    Returns:
        By name, in the order of `peers`: the timing, or why there is none.
    """
    inputs = make_inputs(case, table_len=table_len)
    sample = Sample(inputs, inputs.tables[0])
    ready: dict[str, Candidate] = {}
    results: dict[str, Timing | NoResult] = {}
    for peer in peers:
        begun = time.perf_counter()
        try:
            ready[peer.name] = check_and_capture(peer, inputs, sample)
        except Exception as error:  # a library may raise anything
            results[peer.name] = NoResult(describe_error(error))
            torch.cuda.synchronize()  # raises if the error has made the device unusable for this process
        if taken is not None:
            taken[peer.name] = time.perf_counter() - begun
    timers = {name: partial(time_of_call, candidate) for name, candidate in ready.items()}
    times = round_robin(timers, seconds)
    results |= {name: candidate.timing(case, times[name]) for name, candidate in ready.items()}
    return {peer.name: results[peer.name] for peer in peers}


def time_of_call(candidate: Candidate) -> float:
    """Replay a candidate's graph once, and return the time of one of its calls in µs."""
    return replay(candidate.graph) / candidate.num_calls


def describe_error(error: BaseException) -> str:
    """Return an exception in one line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return first[:160] if isinstance(error, NotServed) else f"{type(error).__name__}: {first[:160]}"
