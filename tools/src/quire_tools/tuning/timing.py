"""Time the variants of a case: each is planned, compared with the others, captured, and replayed in turn.

A graph has as many calls as a model has layers, or some models: each call has a cache of its own, so that keys are not
in the L2 cache, and the launch that finds a schedule counts once for all layers of a model.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import quire
from quire.dispatch.device import DeviceProperties, device_properties
from quire.dispatch.request import Options
from quire.kernels.choose import variants
from quire.kernels.launch import Launch
from quire.kernels.portable.launch import PortableLaunch
from quire.plan import make_plan
from quire_tools.bench.measure import describe_error
from quire_tools.tuning.drawn import DrawnCase

HALF = " half"
LAYERS = 32
ROTATED_BYTES = 256 << 20  # of all caches together: several times what the L2 cache holds
MAX_CACHES = 96
MAX_GRAPH_MICROS = 8000.0
SAMPLES, ROUNDS = 3, 2
HOPELESS = 4.0  # times the best one's time: of these, the first rough time is kept


def candidates(case: DrawnCase, device: DeviceProperties) -> dict[str, Launch]:
    """Return what is timed for a case: its variants, those of its fallback, and one of them with half the partitions.

    The partitions tell what an item costs apart from a tile. Launches that decode are left out: their numbers are those
    of 16-bit caches.
    """
    request, options = case.request(device), Options(batch_invariant=case.batch_invariant)
    of_fallback = options._replace(kernel="mla" if case.spec.latent else "portable")
    found = {**variants(request, options)[0], **variants(request, of_fallback)[0]}
    found = {name: launch for name, launch in found.items() if launch.name != "decoded"}
    cut = [name for name, launch in found.items() if isinstance(launch, PortableLaunch) and launch.num_partitions > 3]
    if cut:
        name = cut[len(case.name) % len(cut)]
        launch = found[name]
        assert isinstance(launch, PortableLaunch)
        found[f"{name}{HALF}"] = replace(launch, num_partitions=launch.num_partitions // 2)
    return found


def empty_batch(case: DrawnCase, device: torch.device) -> quire.Batch:
    """Return a batch with the shapes of a case, for a compilation."""
    width = max(-(-s // case.page_size) for _, s in case.lens)
    table = torch.zeros(len(case.lens), width, dtype=torch.int32, device=device)
    lens = torch.zeros(len(case.lens), dtype=torch.int32, device=device)
    starts = None
    if case.bounds.max_query_len > 1:
        starts = torch.zeros(len(case.lens) + 1, dtype=torch.int32, device=device)
    return quire.Batch(table, lens, starts)


def compile_variant(case: DrawnCase, name: str, target: Any) -> tuple[float, list[dict[str, Any]] | str]:
    """Compile a variant of a case for a target; return the seconds, and what it compiled to or the error in words."""
    from quire.targets import compiling

    begun, spec = time.perf_counter(), case.spec
    try:
        with compiling(target) as compiled:
            batch = empty_batch(case, torch.device("cpu"))
            launch = candidates(case, target.properties)[name]
            plan = make_plan(spec, batch, launch, "swept", bounds=case.bounds)
            q = torch.empty(case.bounds.num_tokens, spec.num_q_heads, spec.head_dim, dtype=spec.dtype)
            sinks = torch.zeros(spec.num_q_heads, dtype=spec.dtype) if spec.sinks else None
            quire.attention(q, quire.PagedKVCache.empty(spec, 4, case.page_size), plan, sinks=sinks)
    except Exception as error:  # Triton's compiler raises many kinds
        return time.perf_counter() - begun, describe_error(error)
    found = [
        {"kernel": c.kernel, "registers": c.registers, "spills": c.spills, "shared": c.shared, "held": c.occupancy}
        for c in compiled
    ]
    return time.perf_counter() - begun, found


@dataclass
class Ready:
    """A variant that can be timed: the replay of some calls."""

    replay: Callable[[], object]
    calls: int
    rough: float  # µs of a call
    error: float  # largest difference from the first variant's result, over the largest number of that
    owned: list[Any]  # what the graph uses
    micros: list[float]


class Session:
    """The tensors of a case on a device, and what was timed there.

    Args:
        case: the batch.
        device: a GPU; or the CPU, where Triton's interpreter runs kernels and calls are timed by the clock.
    """

    def __init__(self, case: DrawnCase, device: torch.device) -> None:
        self.case, self.device = case, device
        spec, page = case.spec, case.page_size
        self.is_gpu = device.type == "cuda"
        generator = torch.Generator(device).manual_seed(0)
        pages = [-(-s // page) for _, s in case.lens]
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        order, at = torch.randperm(sum(pages)).to(torch.int32), 0
        for row, count in zip(table, pages, strict=True):
            row[:count] = order[at : at + count]
            at += count
        starts = [0]
        for q, _ in case.lens:
            starts.append(starts[-1] + q)
        lens = torch.tensor([s for _, s in case.lens], dtype=torch.int32, device=device)
        cu_seqlens_q = None
        if case.bounds.max_query_len > 1:
            cu_seqlens_q = torch.tensor(starts, dtype=torch.int32, device=device)
        self.batch = quire.Batch(table.to(device), lens, cu_seqlens_q)
        count = max(2, min(MAX_CACHES, -(-ROTATED_BYTES // case.nbytes))) if self.is_gpu else 1
        self.caches = []
        for _ in range(count):
            cache = quire.PagedKVCache.empty(spec, sum(pages), page, device=device)
            for tensor in (cache.latents,) if spec.latent else (cache.k, cache.v):
                if spec.kv_format is not None:
                    tensor.random_(0, 64, generator=generator)
                elif tensor.dtype.itemsize == 1:
                    tensor.copy_(torch.randn(tensor.shape, device=device, generator=generator, dtype=torch.bfloat16))
                else:
                    tensor.normal_(generator=generator)
            for scale in cache.scale_tensors if spec.kv_format is not None else ():
                scale.fill_(0.05)
            self.caches.append(cache)
        shape = case.bounds.num_tokens, spec.num_q_heads, spec.head_dim
        self.q = torch.randn(shape, device=device, generator=generator).to(spec.dtype)
        self.out = self.q.new_empty(*shape[:2], spec.head_dim_v)
        self.sinks = torch.randn(spec.num_q_heads, device=device).to(spec.dtype) if spec.sinks else None
        self.expected: torch.Tensor | None = None
        self.largest = 0.0
        self.ready: dict[str, Ready] = {}
        self.wrong: dict[str, str] = {}
        self.rough: dict[str, float] = {}
        self.launches: dict[str, Launch] = candidates(case, device_properties(device))

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def elapsed(self, run: Callable[[], object]) -> float:
        """Return the µs that the device takes for something."""
        if not self.is_gpu:
            begun = time.perf_counter()
            run()
            return 1e6 * (time.perf_counter() - begun)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return 1e3 * start.elapsed_time(stop)

    def prepare(self, name: str) -> None:
        """Make a variant ready to be timed, or keep what is wrong with it."""
        try:
            self._prepare(name)
        except Exception as error:  # Triton raises many kinds
            self.wrong[name] = describe_error(error)
            self.synchronise()  # raises if this process has lost the device

    def _prepare(self, name: str) -> None:
        plan = make_plan(self.case.spec, self.batch, self.launches[name], "swept", bounds=self.case.bounds)
        self.out.fill_(float("nan"))

        def call(i: int) -> None:
            quire.attention(self.q, self.caches[i % len(self.caches)], plan, sinks=self.sinks, out=self.out)

        call(0)
        result = self.out.float()
        if self.expected is None:
            self.expected, self.largest = result, max(1e-6, float(result.abs().max()))
        error = float((result - self.expected).abs().max()) / self.largest
        if not error < (0.3 if self.case.spec.kv_dtype.itemsize == 1 else 0.1):
            self.wrong[name] = f"differs by {error:.3g} of the largest number"
            return
        call(1)
        rough = min(self.elapsed(lambda: [call(i) for i in range(3)]) / 3 for _ in range(2))
        self.rough[name] = rough
        if rough > HOPELESS * min(self.rough.values()) and rough > 200:  # a call takes the host some 20 µs
            return
        caches = len(self.caches)
        calls = LAYERS * -(-caches // LAYERS)
        calls = max(2, min(calls, int(MAX_GRAPH_MICROS / rough))) if self.is_gpu else 1
        owned: list[Any] = [plan]

        def run() -> None:
            for i in range(calls):
                if i % LAYERS == 0:
                    plan.update()  # the schedule is found again
                call(i)

        replay: Callable[[], object] = run
        if self.is_gpu:
            graph = torch.cuda.CUDAGraph()
            with captured(graph):
                run()
            owned.append(graph)
            replay = graph.replay
            replay()
        self.ready[name] = Ready(replay, calls, rough, error, owned, [])

    def time_all(self, millis: float) -> None:
        """Time each variant that is ready for some ms in all, in turn."""
        for _ in range(ROUNDS):
            for ready in self.ready.values():
                replays = max(1, int(1000 * millis / (ROUNDS * SAMPLES) / (ready.calls * ready.rough)))
                for _ in range(SAMPLES if self.is_gpu else 1):
                    taken = self.elapsed(partial(repeat, ready.replay, replays))
                    ready.micros.append(taken / (replays * ready.calls))
                ready.rough = statistics.median(ready.micros)

    def times(self) -> dict[str, dict[str, Any]]:
        """Return what was timed, by variant."""
        found: dict[str, dict[str, Any]] = {}
        for name, launch in self.launches.items():
            if name in self.wrong:
                found[name] = {"wrong": self.wrong[name]}
            elif name in self.ready:
                micros = sorted(self.ready[name].micros)
                found[name] = {
                    "micros": round(statistics.median(micros), 3),
                    "low": round(micros[0], 3),
                    "high": round(micros[-1], 3),
                    "error": float(f"{self.ready[name].error:.2g}"),
                }
            elif name in self.rough:
                found[name] = {"rough": round(self.rough[name], 1)}
            if name in found and hasattr(launch, "num_partitions"):
                found[name]["partitions"] = launch.num_partitions  # pyright: ignore[reportAttributeAccessIssue]
        return found


def repeat(run: Callable[[], object], count: int) -> None:
    """Run something so many times."""
    for _ in range(count):
        run()


@contextmanager
def captured(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture what is launched. `torch.cuda.graph` also collects garbage, which takes longer than to time a variant."""
    torch.cuda.synchronize()
    stream = side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)


_streams: list[torch.cuda.Stream] = []


def side_stream() -> torch.cuda.Stream:
    """Return the stream of captures."""
    if not _streams:
        _streams.append(torch.cuda.Stream())
        gc.disable()  # a collection in a capture would free what is being captured
        gc.freeze()
    return _streams[0]
