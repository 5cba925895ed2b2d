"""Load vLLM or SGLang with the same requests on several attention backends, and compare the tails.

Random weights in a real model's geometry; the engine's own compilation, CUDA graphs, chunked prefill and prefix cache.
Requests arrive as a Poisson process. The length of a prompt and the number of outputs are log-normal. A share of the
requests are turns of agents: 8,000 tokens that all of them have in common, and 200 of their own.

First, more requests than the first backend can serve arrive at once. The outputs that it makes in a second, while
others still wait, are its saturation: the mean of three traces, of which one alone was 8 % off on an H200. Each load is
a share of it, and every backend gets the same requests at the same times, in each round. At a load of 1, all arrive at
once. Rounds go forwards and backwards through the backends. A table gives medians over rounds, and of the ratios to the
first backend, each of one trace. A difference counts only if it has the same sign in each round.

    python scripts/measure_tail.py --together                                     # vLLM, three backends
    python scripts/measure_tail.py --engine sglang --load 0.9                     # SGLang: fa3, triton, quire
    python scripts/measure_tail.py --backends FLASH_ATTN QUIRE --out docs/results/tail_h200
    python scripts/measure_tail.py --layers 8 --requests 100 --rounds 2           # a first look, in minutes
    python scripts/measure_tail.py --agents 1.0                                   # turns of agents alone
    VLLM_USE_V2_MODEL_RUNNER=0 python scripts/measure_tail.py --agents 1.0 \\
        --backends CUSTOM CUSTOM,disable_cascade_attn=False                       # one with an argument of its own
    python scripts/measure_tail.py --drafts 3 --acceptance 0.8 0.6 0.4            # vLLM 0.26: drafts, accepted so often
    python scripts/measure_tail.py --together --profile --span 20 --seconds 400   # short traces, as many rounds as fit
    python scripts/measure_tail.py --join mixed.json agents.json --out tail_h200  # one page and its plots, of two runs

What is measured, for each load:

* tokens: output tokens per second, until the last request has its first output; at saturation while requests wait;
* first: milliseconds from the arrival of a request to its first output, 50th and 99th percentile;
* between: milliseconds from one output of a request to its next, over all outputs of all requests, likewise;
* kernels: compiled by Triton while requests were served, which should be 0;
* memory: of the device, in MB, after the requests less before.

When the last request has its first output, those that are left are stopped: the engine would only become empty.
With `--profile`, each backend's kernels are listed at last, for 40 steps of the highest load below 1.

All engines have caches of the same size, and budgets of tokens as their servers have them. With `--together`, they are
started first, at the same time, and share the GPU; with `--apart` too, one after another, so that the seconds of their
starts can be compared. Otherwise each starts again in each round. The results are kept after each trace.
"""

import argparse
import ast
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure_vllm import MODELS, QUIRE, provenance, turns, write_config

BACKENDS = {"vllm": ["FLASH_ATTN", "TRITON_ATTN", "CUSTOM"], "sglang": ["fa3", "triton", "quire"]}
PROMPT, OUTPUTS = (400, 1.0, 8000), (150, 0.8, 1500)  # median, deviation of the logarithm, most
PREFIX, TURN = 8000, 200  # tokens that agents have in common, and those of a turn
LEAST = 5  # requests of a trace
BUDGET = 8192  # tokens of a step, as `vllm serve` has it on large GPUs
QUEUE, QUEUED = 4, 1000  # at saturation wait so many times the requests of a trace, but at most so many
SATURATED = 12.0  # seconds at most of a trace at saturation; the second half of its time is measured
SATURATIONS = 3  # traces of which the mean is the saturation
SETTLED, PROFILED = 4.0, 40  # seconds before a profile, and its steps
EMPTIED = 1.0  # seconds that SGLang gets to stop requests
WARM, WARM_RATE = 16, 4.0  # requests before anything is timed, and how many of them arrive in a second
MEASURES = {
    "tokens": "output tokens per second",
    "first_50": "ms to the first output, median",
    "first_99": "ms to the first output, 99th percentile",
    "between_50": "ms between outputs, median",
    "between_99": "ms between outputs, 99th percentile",
}
OTHERS = {"kernels": "kernels compiled in service, most of any round", "memory": "MB of memory more, most of any round"}
SAME = "engine", "model", "layers", "agents", "drafts", "acceptance"  # of runs whose loads are joined
ATTENTION = "flash", "attention", "portable_kernel", "hopper_kernel", "schedule_kernel", "combine", "reduce_segments"
WRITES = "reshape_and_cache", "write_kernel"


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    arrival: float  # seconds after the first one
    prompt: tuple[int, ...]
    num_outputs: int


@dataclass(frozen=True)
class Asked:
    """One trace, and how it is served."""

    count: int
    rate: float  # requests a second; infinite at saturation
    agents: float
    seed: str  # no two traces that an engine serves may have the same, or their prompts are in its cache
    profile: bool = False


@dataclass(frozen=True)
class Setup:
    """What one engine is started with."""

    engine: str
    backend: str  # its name, and after commas what this engine alone is started with
    model: str
    layers: int | None
    cache: float  # GB of keys and values
    drafts: int
    acceptance: tuple[float, ...]
    longest: int
    options: dict[str, Any]  # further arguments of the engine

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.backend.split(",")[0]


class Ended(Exception):
    """The process of an engine has ended early, or has no more time."""


def log_normal(draw: random.Random, median: int, deviation: float, most: int) -> int:
    """Draw a whole number from 1 to `most`, whose logarithm is normal."""
    return max(1, min(most, round(median * math.exp(draw.gauss(0.0, deviation)))))


def trace(count: int, rate: float, agents: float, seed: str, vocabulary: int = 30000) -> list[Request]:
    """Return requests that arrive at `rate` a second, of which a share are turns of agents.

    With an infinite rate, all arrive at once. The requests of a seed differ in their arrivals alone if the rate does.
    """
    draw, times = random.Random(seed), random.Random(f"arrivals {seed}")

    def words(number: int) -> tuple[int, ...]:
        return tuple(draw.choices(range(10, vocabulary), k=number))

    common, now, found = words(PREFIX), 0.0, []
    for _ in range(count):
        is_turn = draw.random() < agents
        prompt = common + words(TURN) if is_turn else words(log_normal(draw, *PROMPT))
        found.append(Request(now, prompt, log_normal(draw, *OUTPUTS)))
        now += times.expovariate(1.0) / rate
    return found


def percentile(values: list[float], share: float) -> float:
    """Return the least value that so large a share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


Outputs = list[list[tuple[float, int]]]  # of each request: when it had how many new ones


def serve(
    engine: Any,
    requests: list[Request],
    most: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Outputs, float]:
    """Send requests to an engine that makes steps, when they arrive, until each has an output; stop the others.

    Args:
        engine: it makes steps.
        requests: in the order of their arrivals.
        most: seconds after which to stop, whoever waits.
        clock: returns seconds.
        sleep: waits for seconds.

    Returns:
        The outputs, and the seconds that they took.
    """
    outputs: Outputs = [[] for _ in requests]
    waiting, silent, began = deque(enumerate(requests)), len(requests), clock()
    while silent and (now := clock() - began) < most:
        while waiting and waiting[0][1].arrival <= now:
            engine.add(*waiting.popleft())
        if engine.is_busy():
            for number, count in engine.step():
                silent -= not outputs[number]
                outputs[number].append((clock() - began, count))
        elif waiting:
            sleep(max(0.0, waiting[0][1].arrival - now))
        else:
            raise RuntimeError(f"each request must have outputs, got none for {silent}; see the engine's log")
    seconds = clock() - began
    engine.stop()
    return outputs, seconds


def judged(requests: list[Request], outputs: Outputs, seconds: float, saturated: bool = False) -> dict[str, float]:
    """Return the measures of served requests; at saturation, those of the second half of the time.

    Raises:
        RuntimeError: a request has more outputs than it asked for.
    """
    since = seconds / 2 if saturated else 0.0
    for request, times in zip(requests, outputs, strict=True):
        if (found := sum(count for _, count in times)) > request.num_outputs:
            raise RuntimeError(f"a request must have {request.num_outputs} outputs, got {found}; see the engine's log")
    first = [1000 * (times[0][0] - r.arrival) for r, times in zip(requests, outputs, strict=True) if times]
    between = [1000 * (b[0] - a[0]) for times in outputs for a, b in pairwise(times) if b[0] > since] or [0.0]
    tokens = sum(count for times in outputs for at, count in times if at > since) / (seconds - since)
    return {
        "tokens": tokens,
        "at_once": statistics.mean(count for times in outputs for _, count in times),
        "requests": tokens / statistics.mean(r.num_outputs for r in requests),
        **{f"first_{p}": percentile(first, p / 100) for p in (50, 99)},
        **{f"between_{p}": percentile(between, p / 100) for p in (50, 99)},
    }


class Profiled:
    """An engine whose kernels are listed for some steps, once it has made steps for some seconds."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.add, self.is_busy, self.stop = engine.add, engine.is_busy, engine.stop
        self.began, self.left, self.seconds = time.perf_counter(), PROFILED, 0.0
        self.profiler: Any = None

    def step(self) -> list[tuple[int, int]]:
        """Make a step, and begin or end the list before it."""
        from torch.cuda import synchronize
        from torch.profiler import ProfilerActivity, profile

        if self.profiler is None and time.perf_counter() - self.began > SETTLED:
            self.profiler = profile(activities=[ProfilerActivity.CUDA])
            self.profiler.start()
            synchronize()
            self.since = time.perf_counter()
        found = self.engine.step()
        if self.profiler is not None and found and self.left:
            self.left -= 1
            if not self.left:
                synchronize()
                self.seconds = time.perf_counter() - self.since
                self.profiler.stop()
        return found

    def clock(self) -> float:
        """Return seconds, as if it were late once the list is complete."""
        return time.perf_counter() if self.left else math.inf

    def kernels(self) -> dict[str, Any]:
        """Return the milliseconds of a step, and those of each kernel in it."""
        if self.left:
            raise RuntimeError(
                f"a profile must have {PROFILED} steps, got {PROFILED - self.left}; ask for more requests"
            )
        of_name: dict[str, float] = {}
        for event in self.profiler.events():
            if event.device_type.name == "CUDA":
                of_name[event.name] = of_name.get(event.name, 0.0) + event.time_range.elapsed_us()
        most = sorted(of_name.items(), key=lambda pair: -pair[1])
        kernels = {name: micros / 1000 / PROFILED for name, micros in most}
        return {"step": 1000 * self.seconds / PROFILED, "kernels": kernels}


class Drafter:
    """What vLLM asks for drafts: each is the last token. Which ones are accepted doesn't depend on them."""

    def __init__(self, config: Any) -> None:
        self.count = config.speculative_config.num_speculative_tokens

    def propose(self, sampled: list[list[int]], *others: Any, **options: Any) -> list[list[int]]:
        """Return as many drafts as may be for each request that has a new token."""
        return [self.count * tokens[-1:] for tokens in sampled]

    def load_model(self, model: Any) -> None:
        """Load nothing, as vLLM may ask."""


class VLLM:
    """vLLM, in this process: requests come in between its steps."""

    def __init__(self, setup: Setup, folder: str) -> None:
        from vllm import LLM

        options: dict[str, Any] = {}
        if setup.drafts:
            options["speculative_config"] = {
                "method": "custom_class",
                "model": "measure_tail.Drafter",
                "num_speculative_tokens": setup.drafts,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": list(setup.acceptance),
            }
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend=setup.name,
            max_model_len=setup.longest,
            max_num_batched_tokens=BUDGET,
            kv_cache_memory_bytes=int(setup.cache * 1e9),
            gpu_memory_utilization=0.05,  # of which the cache is no part
            enable_prefix_caching=True,
            seed=0,
            **options | setup.options,
        )
        self.engine = llm.llm_engine
        self.unfinished: set[str] = set()

    def is_busy(self) -> bool:
        """Whether a request is not finished."""
        return self.engine.has_unfinished_requests()

    def add(self, number: int, request: Request) -> None:
        """Hand a request over."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=request.num_outputs,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(str(number), {"prompt_token_ids": list(request.prompt)}, sampling)
        self.unfinished.add(str(number))

    def step(self) -> list[tuple[int, int]]:
        """Make a step; return which requests have how many new outputs."""
        found = []
        for output in self.engine.step():
            (own,) = output.outputs
            if output.finished:
                self.unfinished.remove(output.request_id)
                if own.finish_reason != "length":
                    raise RuntimeError(f"a request must end by its length, got {own.finish_reason}; see vLLM's log")
            if own.token_ids:
                found.append((int(output.request_id), len(own.token_ids)))
        return found

    def stop(self) -> None:
        """Stop the requests that are not finished."""
        self.engine.abort_request(list(self.unfinished))
        self.unfinished.clear()

    def serve(self, requests: list[Request], most: float = math.inf) -> tuple[Outputs, float]:
        """Return when each request had how many new outputs, and the seconds of all."""
        return serve(self, requests, most)

    def profile(self, requests: list[Request], most: float) -> dict[str, Any]:
        """Return the milliseconds of each kernel in a step."""
        profiled = Profiled(self)
        serve(profiled, requests, most, profiled.clock)
        return profiled.kernels()


class SGLang:
    """SGLang's engine, whose scheduler has a process of its own: a task waits for each request's outputs."""

    def __init__(self, setup: Setup, folder: str) -> None:
        import sglang

        if setup.drafts:
            raise SystemExit("--drafts must be left out with --engine sglang; vLLM alone takes a pattern of acceptance")
        _, (_, _, layers, _, kv_heads, _) = MODELS[setup.model]
        self.engine = sglang.Engine(
            model_path=folder,
            max_total_tokens=int(setup.cache * 1e9 / ((setup.layers or layers) * 2 * kv_heads * 128 * 2)),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend=setup.name,
            context_length=setup.longest,
            random_seed=0,
            log_level="error",
            **setup.options,
        )

    def serve(self, requests: list[Request], most: float = math.inf) -> tuple[Outputs, float]:
        """Return when each request had how many new outputs, and the seconds of all."""
        return asyncio.get_event_loop().run_until_complete(self.serve_all(requests, most))

    async def serve_all(self, requests: list[Request], most: float) -> tuple[Outputs, float]:
        """Start a task for each request; wait for `most` seconds until each has an output, and stop the others."""
        outputs: Outputs = [[] for _ in requests]
        began, all_begun = time.perf_counter(), asyncio.Event()

        async def one(request: Request, times: list[tuple[float, int]]) -> None:
            await asyncio.sleep(max(0.0, request.arrival - (time.perf_counter() - began)))
            sampling = {"max_new_tokens": request.num_outputs, "temperature": 0.0, "ignore_eos": True}
            stream = await self.engine.async_generate(
                input_ids=list(request.prompt), sampling_params=sampling, stream=True
            )
            done = 0
            async for chunk in stream:
                count = chunk["meta_info"]["completion_tokens"] - done
                if count > 0:
                    times.append((time.perf_counter() - began, count))
                    done += count
                    if all(outputs):
                        all_begun.set()

        tasks = [asyncio.create_task(one(*pair)) for pair in zip(requests, outputs, strict=True)]
        everything = asyncio.gather(*tasks)
        await asyncio.wait(
            [everything, waited := asyncio.create_task(all_begun.wait())],
            timeout=None if math.isinf(most) else most,
            return_when=asyncio.FIRST_COMPLETED,
        )
        seconds = time.perf_counter() - began
        if everything.done():
            everything.result()  # raises what a task raised
        self.engine.tokenizer_manager.abort_request(abort_all=True)
        await asyncio.sleep(EMPTIED)
        waited.cancel()
        everything.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [[pair for pair in times if pair[0] <= seconds] for times in outputs], seconds

    def profile(self, requests: list[Request], most: float) -> dict[str, Any]:
        """Refuse: the steps are those of another process."""
        raise RuntimeError("--profile must be left out with --engine sglang; vLLM's steps alone are in this process")


def compiled_kernels() -> int:
    """Return how many kernels are in Triton's cache, and in Inductor's if it has one of its own."""
    folders = {Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache"}
    folders |= {
        Path(os.environ[name]) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR") if name in os.environ
    }
    return len({path for folder in folders for path in folder.rglob("*.cubin")})


def used_memory() -> float:
    """Return the MB of the GPU's memory that are in use."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def work(setup: Setup, pipe: Any) -> None:
    """Be the process of an engine: start it, then serve each trace that comes through the pipe."""
    began = time.perf_counter()
    own = str(Path.home() / ".cache" / "measure_tail" / setup.backend)  # no backend finds what another one has compiled
    os.environ.update(VLLM_CACHE_ROOT=own, TRITON_HOME=own)
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, setup.model, setup.layers)
        engine = {"vllm": VLLM, "sglang": SGLang}[setup.engine](setup, folder)
        engine.serve(trace(WARM, WARM_RATE, 0.5, "warm"))
        pipe.send(time.perf_counter() - began)
        while (asked := pipe.recv()) is not None:
            requests = trace(asked.count, asked.rate, asked.agents, asked.seed)
            if asked.profile:
                pipe.send(profile_of(engine, requests))
                continue
            kernels, memory, saturated = compiled_kernels(), used_memory(), math.isinf(asked.rate)
            outputs, seconds = engine.serve(requests, SATURATED if saturated else math.inf)
            found = judged(requests, outputs, seconds, saturated)
            found |= {"count": asked.count, "kernels": compiled_kernels() - kernels}
            pipe.send(found | {"memory": used_memory() - memory})


def profile_of(engine: Any, requests: list[Request]) -> dict[str, Any] | None:
    """Return a profile; None if there is none, which must not end the engine."""
    try:
        return engine.profile(requests, 2 * SETTLED)
    except Exception:
        traceback.print_exc()
        engine.stop()
        return None


class Engine:
    """The process of an engine, which is started when it is first asked for something."""

    def __init__(self, setup: Setup, say: Callable[[str], None], until: float = math.inf) -> None:
        self.setup, self.say, self.until = setup, say, until
        self.process: Any = None
        self.starts: list[float] = []

    def begin(self) -> None:
        """Start the process, unless it is running."""
        if self.process is None:
            self.say(f"{self.setup.backend} starts")
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=work, args=(self.setup, theirs))
            self.process.start()
            theirs.close()
            self.is_ready = False

    def wait(self) -> None:
        """Wait until the process is ready.

        Raises:
            Ended: the process ended, or the time did.
        """
        self.begin()
        if not self.is_ready:
            self.starts.append(self.receive())
            self.say(f"{self.setup.backend} is ready after {self.starts[-1]:.1f} s")
            self.is_ready = True

    def ask(self, asked: Asked) -> dict[str, Any]:
        """Return the measures of a trace, or a profile.

        Raises:
            Ended: the process ended, or the time did.
        """
        self.wait()
        with contextlib.suppress(OSError):
            self.pipe.send(asked)
        return self.receive()

    def receive(self) -> Any:
        """Return what the process sends until the time ends."""
        left = None if math.isinf(self.until) else max(0.0, self.until - time.perf_counter())
        try:
            if not self.pipe.poll(left):
                raise Ended(f"{self.setup.backend} had no answer when the time ended")
            return self.pipe.recv()
        except (EOFError, OSError):
            raise Ended(f"{self.setup.backend} ended early; its output is above") from None

    def leave(self) -> None:
        """Tell the process to end, if it is running."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.pipe.send(None)

    def end(self) -> None:
        """End the process, if it is running."""
        self.leave()
        if self.process is not None:
            self.process.join(5)
            self.process.kill()
            self.process = None


def measure(
    args: argparse.Namespace, engines: list[Engine], say: Callable[[str], None], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return the saturation, and for each load and backend the measures of each round.

    A backend that ends early is left out from then on. No trace begins that would end too late.

    Args:
        args: the options.
        engines: those of the backends.
        say: prints a line.
        keep: keeps what has been measured so far.
    """
    began, late, left = time.perf_counter(), 0.0, list(engines)
    found: dict[str, Any] = {"saturation": args.rate, "loads": {}, "profiles": {}, "starts": {}}
    below = [load for load in args.load if load < 1]

    def asked_at(load: float) -> tuple[int, float]:
        if load == 1:
            return min(QUEUE * args.requests, max(args.requests, QUEUED)), math.inf
        rate = load * found["saturation"]
        return int(max(LEAST, min(args.requests, (args.span or math.inf) * rate))), rate

    def ask(engine: Engine, load: float, part: str, profile: bool = False) -> dict[str, Any] | None:
        if engine not in left:
            return None
        count, rate = asked_at(load)
        try:
            return engine.ask(Asked(count, rate, args.agents, f"{args.seed} {part} {load}", profile))
        except Ended as error:
            say(str(error))
            left.remove(engine)
            return None

    def kept() -> None:
        found["starts"] = {engine.setup.backend: engine.starts for engine in engines if engine.starts}
        keep(found)

    try:
        for engine in engines if args.together else []:
            engine.begin()
            if args.apart:
                with contextlib.suppress(Ended):
                    engine.wait()
        for engine in engines if args.together else []:
            try:
                engine.wait()
            except Ended as error:
                say(str(error))
                left.remove(engine)
        kept()
        if not found["saturation"]:
            for engine in engines:
                firsts = [ask(engine, 1.0, f"first {i}") for i in range(SATURATIONS)]
                if rates := [of_first["requests"] for of_first in firsts if of_first is not None]:
                    found["saturation"] = statistics.mean(rates)
                    break
            else:
                sys.exit("no backend could be measured; their output is above")
        kept()
        say(f"saturation: {found['saturation']:.2f} requests a second")
        for number, i in turns(len(engines), args.rounds):
            for load in args.load:
                at, (count, rate) = time.perf_counter(), asked_at(load)
                expected = SATURATED if load == 1 else count / rate
                of_profiles = 2 * SETTLED * len(left) if args.profile and below else 0.0
                if at - began + expected + late + of_profiles > args.seconds:
                    say(f"no time for {load:.0%}, {engines[i].setup.backend} in {args.seconds:.0f} s")
                    continue
                if (of_round := ask(engines[i], load, f"round {number}")) is None:
                    continue
                late = max(late, time.perf_counter() - at - expected)
                backend = engines[i].setup.backend
                found["loads"].setdefault(str(load), {}).setdefault(backend, []).append(of_round)
                text = ", ".join(f"{of_round[name]:.1f} {words}" for name, words in shown(load).items())
                say(f"round {number + 1} of {args.rounds}, {load:.0%}, {backend}: {text}")
                kept()
            if not args.together:
                engines[i].end()
        for engine in engines if args.profile and below else []:
            if (profile := ask(engine, max(below), "profile", profile=True)) is not None:
                found["profiles"][engine.setup.backend] = profile
                say(f"{engine.setup.backend}: {described(profile)}")
                kept()
            if not args.together:
                engine.end()
    finally:
        for engine in engines:
            engine.leave()
        for engine in engines:
            engine.end()
    return found


def shown(load: float) -> dict[str, str]:
    """Return the measures that a load has: at saturation, requests wait for their first output as long as it lasts."""
    return {name: words for name, words in MEASURES.items() if load < 1 or not name.startswith("first")}


def parts(profile: dict[str, Any]) -> dict[str, float]:
    """Return the milliseconds of a step: attention's, those that write keys, other kernels', and when none ran."""
    found = {"attention": 0.0, "writes": 0.0, "others": 0.0}
    for name, ms in profile["kernels"].items():
        is_write = any(word in name for word in WRITES)
        is_attention = any(word in name.lower() for word in ATTENTION)
        found["writes" if is_write else "attention" if is_attention else "others"] += ms
    return found | {"idle": max(0.0, profile["step"] - sum(found.values()))}


def described(profile: dict[str, Any]) -> str:
    """Return the parts of a step in words."""
    return f"{profile['step']:.2f} ms a step: " + ", ".join(f"{ms:.2f} {part}" for part, ms in parts(profile).items())


def rows_of(result: dict[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Return for each load and measure a cell for each backend: the median, and that of the ratios to the first one.

    A ratio is in brackets if not all rounds have it on one side of 1, or if there is a single round.
    """
    backends = backends_of(result)
    for load, rounds_of in sorted(result["loads"].items(), key=lambda pair: float(pair[0])):
        base = rounds_of.get(backends[0], [])
        for name, words in shown(float(load)).items():
            cells = []
            for backend in backends:
                own, of_base = ([of_round[name] for of_round in each] for each in (rounds_of.get(backend, []), base))
                if not own:
                    cells.append("not measured")
                    continue
                median = statistics.median(own)
                text = f"{median:,.0f}" if name == "tokens" else f"{median:,.1f}"
                ratios = [mine / theirs for mine, theirs in zip(own, of_base, strict=False) if theirs]
                if backend != backends[0] and ratios:
                    ratio, counts = statistics.median(ratios), len(ratios) > 1 and not min(ratios) <= 1 <= max(ratios)
                    text += f", {ratio:.3f}" if counts else f" ({ratio:.3f})"
                cells.append(text)
            yield load, words, cells
        for name, words in OTHERS.items():
            most = [max((r[name] for r in rounds_of.get(backend, [])), default=0.0) for backend in backends]
            yield load, words, [f"{value:,.0f}" for value in most]


def backends_of(result: dict[str, Any]) -> list[str]:
    """Return the backends that were measured, in the order in which they were asked for."""
    measured = {backend for rounds_of in result["loads"].values() for backend in rounds_of}
    return [setup["backend"] for setup in result["asked"]["setups"] if setup["backend"] in measured]


def title(asked: dict[str, Any]) -> str:
    """Return what was served in a few words."""
    agents = {0.0: "no agents", 1.0: "agents alone"}.get(asked["agents"], f"{asked['agents']:.0%} agents")
    drafts = f", {asked['drafts']} drafts" if asked["drafts"] else ""
    return f"{asked['engine']}, {agents}{drafts}"


def join(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results with the loads of runs that served the same in one."""
    joined: dict[str, dict[str, Any]] = {}
    for result in results:
        name = json.dumps({key: value for key, value in result["asked"].items() if key in SAME})
        known = joined.setdefault(name, result)
        if known is not result:
            longer = max(known, result, key=lambda r: len(r["asked"]["setups"]))
            joined[name] = longer | {
                "loads": known["loads"] | result["loads"],
                "profiles": known["profiles"] | result["profiles"],
                "apart": known["apart"] | result["apart"],
                "saturation": [*as_list(known["saturation"]), *as_list(result["saturation"])],
            }
    return list(joined.values())


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and something else as a list's only element."""
    return value if isinstance(value, list) else [value]


def markdown(about: dict[str, Any], results: list[dict[str, Any]], plots: list[str]) -> str:
    """Return the results as a page."""
    first = results[0]
    engines = ", ".join(dict.fromkeys(f"{r['asked']['engine']} {r['version']}" for r in results))
    lines = [
        "# The tail of a loaded server",
        "",
        f"{first['device']}, driver {about['driver']}, torch {first['torch']}, Triton {about['triton']}, "
        f"{engines}, Quire {about['commit']}, {about['date']}.",
        f"Requests arrive as a Poisson process, and outputs have a median length of {OUTPUTS[0]}.",
        f"Turns of agents have {PREFIX:,} tokens in common and {TURN} of their own. "
        f"Other prompts are log-normal, with a median of {PROMPT[0]} and at most {PROMPT[2]:,}.",
        "Loads are shares of the first backend's saturation; at 100 %, requests always wait.",
        "Each round has another trace, which all backends serve. After a comma is the median of the rounds' ratios to "
        "the first backend;",
        "in brackets if the rounds don't agree which backend is better. CUSTOM is Quire.",
        "[How it is measured](../../scripts/measure_tail.py).",
        "",
    ]
    for i, result in enumerate(results):
        asked, backends = result["asked"], backends_of(result)
        layers = asked["layers"] or MODELS[asked["model"]][1][2]
        rounds = [len(each) for of_load in result["loads"].values() for each in of_load.values()] or [0]
        span = f", but at most those of {asked['span']:.0f} s" if asked["span"] else ""
        counts = f"{min(rounds)} to {max(rounds)}" if min(rounds) < max(rounds) else str(max(rounds))
        rates = " and ".join(f"{rate:.2f}" for rate in as_list(result["saturation"]))
        drafts = (
            f" {asked['drafts']} drafts after each token, accepted at {asked['acceptance']}." if asked["drafts"] else ""
        )
        lines += [
            f"## {title(asked)}",
            "",
            f"{asked['model']}'s geometry with {layers} layers, random bfloat16 weights.",
            f"{asked['requests']:,} requests a trace{span}, {asked['agents']:.0%} of them turns of agents.{drafts} "
            f"Saturation is {rates} requests a second. Medians of {counts} round{'s' * (max(rounds) != 1)}.",
            "",
        ]
        lines += [f"![Tokens per second and tails by load]({plots[i]})", ""] if plots else []
        lines += [f"| load | | {' | '.join(backends)} |", "| --- |" + " --- |" * (len(backends) + 1)]
        lines += [f"| {float(load):.0%} | {words} | {' | '.join(cells)} |" for load, words, cells in rows_of(result)]
        if starts := result["apart"]:
            cells = [f"{statistics.median(starts[name]):.1f}" if name in starts else "" for name in backends]
            lines.append(f"| | seconds to start, and to serve {WARM} requests | {' | '.join(cells)} |")
        lines.append("")
        if profiles := {name: parts(profile) for name, profile in result["profiles"].items()}:
            load = max((load for load in map(float, result["loads"]) if load < 1), default=0.0)
            lines += [
                f"A step at {load:.0%}, ms:",
                "",
                f"| | {' | '.join(profiles)} |",
                "| --- |" + " --- |" * len(profiles),
            ]
            for part in next(iter(profiles.values())):
                lines.append(f"| {part} | {' | '.join(f'{of[part]:.2f}' for of in profiles.values())} |")
            lines.append("")
    for note in about.get("notes", []):
        lines += [note, ""]
    return "\n".join(lines)


def draw(result: dict[str, Any]) -> Any:
    """Return a figure: tokens per second and both tails by load, with bars from the least round to the most."""
    from quire_tools.bench.plots import COLOURS, add_legend, panels

    names = [name for name in MEASURES if not name.endswith("50")]
    figure, axes = panels(len(names), 3.0)
    backends = backends_of(result)
    others = [name for name in backends if name.split(",")[0] not in (*QUIRE, "quire")]
    tints = dict(zip(others, COLOURS[1:], strict=False))
    for axis, name in zip(axes, names, strict=True):
        for backend in backends:
            ours = backend not in others
            of_load = sorted(
                (float(load), [of_round[name] for of_round in rounds_of[backend]])
                for load, rounds_of in result["loads"].items()
                if backend in rounds_of and name in shown(float(load))
            )
            middle = [statistics.median(values) for _, values in of_load]
            errors = [
                [m - min(values) for m, (_, values) in zip(middle, of_load, strict=True)],
                [max(values) - m for m, (_, values) in zip(middle, of_load, strict=True)],
            ]
            style = {"color": tints.get(backend, COLOURS[0]), "marker": "o", "ms": 3.5, "lw": 2.2 if ours else 1.1}
            label, style["ls"] = backend, "--" if "," in backend else "-"
            if ours:
                label = ",".join(["Quire", *backend.split(",")[1:]])
            axis.errorbar([100 * load for load, _ in of_load], middle, errors, capsize=2, **style, label=label)
        axis.set(xlabel="load, % of saturation", title=MEASURES[name])
        axis.set_ylim(bottom=0)
    add_legend(figure)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=BACKENDS, default="vllm")
    parser.add_argument("--backends", nargs="+", help="default FLASH_ATTN TRITON_ATTN CUSTOM, or fa3 triton quire")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="number of the model's layers to keep")
    parser.add_argument(
        "--load",
        nargs="+",
        type=float,
        default=[0.5, 0.75, 0.9, 1.0],
        help="shares of the saturation; 1 is all at once",
    )
    parser.add_argument("--rate", type=float, help="the saturation in requests a second, if it is known")
    parser.add_argument("--requests", type=int, default=1000, help="of a trace; default 1000")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--span", type=float, help="seconds of a trace, which then has fewer requests")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no trace that would take longer")
    parser.add_argument("--agents", type=float, default=0.3, help="share of requests that are turns of agents")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that are drafted in a step; newer vLLM alone")
    parser.add_argument("--acceptance", nargs="+", type=float, help="how often each draft is accepted, at most 1.0")
    parser.add_argument("--seed", type=int, default=0, help="of the traces; each round and load has another one")
    parser.add_argument("--together", action="store_true", help="start all engines first, on one GPU")
    parser.add_argument("--apart", action="store_true", help="with --together, start them one after another")
    parser.add_argument("--profile", action="store_true", help="list the kernels of some steps; vLLM alone")
    parser.add_argument("--cache", type=float, default=20.0, help="GB of keys and values of an engine; default 20")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="a further argument of the engine"
    )
    parser.add_argument("--out", help="path of the results without its ending; .json, .md and .png are written")
    parser.add_argument("--commit", help="Quire's commit, where there is no repository to ask")
    parser.add_argument("--note", action="append", default=[], help="a paragraph to keep with the results")
    parser.add_argument("--join", nargs="+", metavar="FILE.json", help="measure nothing; make one page of these files")
    args = parser.parse_args()
    for name, least in (("requests", LEAST), ("rounds", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if not all(0 < load <= 1 for load in args.load):
        parser.error(f"--load must be shares above 0 and up to 1, got {args.load}")
    if args.profile and args.engine != "vllm":
        parser.error("--profile must be left out with --engine sglang, whose steps are another process's")
    args.acceptance = args.acceptance or [0.8**i for i in range(1, args.drafts + 1)]
    if len(args.acceptance) != args.drafts:
        parser.error(f"--acceptance must have a number for each of {args.drafts} drafts, got {args.acceptance}")
    if args.join:
        files = [json.loads(Path(path).read_text()) for path in args.join]
        about, results = files[0]["about"], join([result for file in files for result in file["results"]])
    elif importlib.util.find_spec(args.engine) is None:
        sys.exit(f"{args.engine} is not installed here; see docs/{args.engine}.md")
    else:
        about = provenance(args.commit)
        results = [run(args, lambda result: keep(args.out, about, [result]))]
    about["notes"] = about.get("notes", []) + args.note
    keep(args.out, about, results)
    plots = [f"{args.out}{f'-{i + 1}' if i else ''}.png" for i in range(len(results))] if args.out else []
    text = markdown(about, results, [Path(plot).name for plot in plots])
    print(text)
    if args.out:
        Path(f"{args.out}.md").write_text(text)
    for result, plot in zip(results, plots, strict=False):
        draw(result).savefig(plot, dpi=150)


def option(words: str) -> tuple[str, Any]:
    """Return the name and the value of an argument in words, such as NAME=1 or NAME=text."""
    name, _, text = words.partition("=")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text


def keep(out: str | None, about: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Write the results as JSON, if they are to be kept."""
    if out:
        Path(f"{out}.json").write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


def run(args: argparse.Namespace, keep_result: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return what was asked, where it ran, and what was measured."""
    import torch

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    backends = args.backends or BACKENDS[args.engine]
    longest = PREFIX + TURN + OUTPUTS[2] + 16 + args.drafts
    options = dict(map(option, args.option))
    common = (args.model, args.layers, args.cache, args.drafts, tuple(args.acceptance), longest)
    setups = [
        Setup(args.engine, backend, *common, options | dict(map(option, backend.split(",")[1:])))
        for backend in backends
    ]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    names = (*SAME, "requests", "span", "rounds", "seed", "together", "apart")
    where = {"device": device, "torch": torch.__version__, "version": importlib.metadata.version(args.engine)}
    where["asked"] = {name: getattr(args, name) for name in names} | {"setups": [asdict(setup) for setup in setups]}
    alone = args.apart or not args.together  # starts at the same time can't be compared

    def whole(found: dict[str, Any]) -> dict[str, Any]:
        return where | found | {"apart": found["starts"] if alone else {}}

    engines = [Engine(setup, say, began + args.seconds) for setup in setups]
    return whole(measure(args, engines, say, lambda found: keep_result(whole(found))))


if __name__ == "__main__":
    main()
