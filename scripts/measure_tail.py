"""Load vLLM or SGLang with the same requests on several attention backends, and compare the tails.

Random weights in a real model's geometry; the engine's own compilation, CUDA graphs, chunked prefill and prefix cache.
Requests arrive as a Poisson process. The length of a prompt and the number of outputs are log-normal. A share of the
requests are turns of agents: 8,000 tokens that all of them have in common, and 200 of their own.

First, all requests of a shorter trace arrive at once on the first backend. The requests that it ends in a second are
its saturation. Then each load is a share of it, and every backend gets the same requests at the same times, in each
round. Rounds go forwards and backwards through the backends. A table gives medians over rounds, and how far rounds are
apart: a smaller difference between backends doesn't count.

    python scripts/measure_tail.py --together                                     # vLLM, three backends
    python scripts/measure_tail.py --engine sglang --load 0.9                     # SGLang: fa3, triton, quire
    python scripts/measure_tail.py --backends FLASH_ATTN QUIRE --out docs/results/tail_h200
    python scripts/measure_tail.py --layers 8 --requests 100 --rounds 2           # a first look, in minutes
    python scripts/measure_tail.py --agents 1.0                                   # turns of agents alone
    python scripts/measure_tail.py --drafts 3 --acceptance 0.8 0.6 0.4            # vLLM: drafts, accepted so often
    python scripts/measure_tail.py --join tail_h200.json --out tail_h200          # write the tables and the plot again

What is measured, for each load:

* tokens: output tokens per second, from the first arrival to the last output;
* first: milliseconds from the arrival of a request to its first output, 50th and 99th percentile;
* between: milliseconds from one output of a request to its next, over all outputs of all requests, likewise;
* kernels: compiled by Triton while requests were served, which should be 0;
* memory: of the device, in MB, after the requests less before.

All engines have caches of the same size. With `--together`, they are started first and share the GPU; otherwise each
starts again in each round.
"""

import argparse
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
SHORT = 5  # the trace that finds the saturation has a fifth of the requests
WARM = 16  # requests before anything is timed
MEASURES = {
    "tokens": "output tokens per second",
    "first_50": "ms to the first output, median",
    "first_99": "ms to the first output, 99th percentile",
    "between_50": "ms between outputs, median",
    "between_99": "ms between outputs, 99th percentile",
}
OTHERS = {"kernels": "kernels compiled in service, most of any round", "memory": "MB of memory more, most of any round"}


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    arrival: float  # seconds after the first one
    prompt: tuple[int, ...]
    num_outputs: int


@dataclass(frozen=True)
class Setup:
    """What one engine is started with."""

    engine: str
    backend: str
    model: str
    layers: int | None
    cache: float  # GB of keys and values
    drafts: int
    acceptance: tuple[float, ...]
    longest: int


def log_normal(draw: random.Random, median: int, deviation: float, most: int) -> int:
    """Draw a whole number from 1 to `most`, whose logarithm is normal."""
    return max(1, min(most, round(median * math.exp(draw.gauss(0.0, deviation)))))


def trace(count: int, rate: float, agents: float, seed: int, vocabulary: int = 30000) -> list[Request]:
    """Return requests that arrive at `rate` a second, of which a share are turns of agents.

    With an infinite rate, all arrive at once. The requests of a seed differ in their arrivals alone if the rate does.
    """
    draw, times = random.Random(seed), random.Random(seed + 1)

    def words(number: int) -> tuple[int, ...]:
        return tuple(draw.randrange(10, vocabulary) for _ in range(number))

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


def serve(
    engine: Any,
    requests: list[Request],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> list[list[tuple[float, int]]]:
    """Send requests to an engine that makes steps, when they arrive. Return when each had how many new outputs."""
    outputs: list[list[tuple[float, int]]] = [[] for _ in requests]
    waiting, began = deque(enumerate(requests)), clock()
    while waiting or engine.is_busy():
        while waiting and waiting[0][1].arrival <= clock() - began:
            engine.add(*waiting.popleft())
        if engine.is_busy():
            for number, count in engine.step():
                outputs[number].append((clock() - began, count))
        elif waiting:
            sleep(max(0.0, waiting[0][1].arrival - (clock() - began)))
    return outputs


def judged(requests: list[Request], outputs: list[list[tuple[float, int]]]) -> dict[str, float]:
    """Return the measures of served requests.

    Raises:
        RuntimeError: a request has another number of outputs than it asked for.
    """
    for request, times in zip(requests, outputs, strict=True):
        if (found := sum(count for _, count in times)) != request.num_outputs:
            raise RuntimeError(f"a request must have {request.num_outputs} outputs, got {found}; see the engine's log")
    first = [1000 * (times[0][0] - r.arrival) for r, times in zip(requests, outputs, strict=True)]
    between = [1000 * (b[0] - a[0]) for times in outputs for a, b in pairwise(times)] or [0.0]
    seconds = max(times[-1][0] for times in outputs) - requests[0].arrival
    return {
        "tokens": sum(r.num_outputs for r in requests) / seconds,
        "requests": len(requests) / seconds,
        **{f"first_{p}": percentile(first, p / 100) for p in (50, 99)},
        **{f"between_{p}": percentile(between, p / 100) for p in (50, 99)},
    }


class VLLM:
    """vLLM, in this process: requests come in between its steps."""

    def __init__(self, setup: Setup, folder: str) -> None:
        from vllm import LLM

        options: dict[str, Any] = {}
        if setup.drafts:
            options["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": setup.drafts,
                "prompt_lookup_min": 1,
                "prompt_lookup_max": 2,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": list(setup.acceptance),
            }
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend=setup.backend,
            max_model_len=setup.longest,
            kv_cache_memory_bytes=int(setup.cache * 1e9),
            gpu_memory_utilization=0.05,  # of which the cache is no part
            enable_prefix_caching=True,
            seed=0,
            **options,
        )
        self.engine = llm.llm_engine

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

    def step(self) -> list[tuple[int, int]]:
        """Make a step; return which requests have how many new outputs."""
        found = [(int(output.request_id), len(output.outputs[0].token_ids)) for output in self.engine.step()]
        return [(number, count) for number, count in found if count]

    def serve(self, requests: list[Request]) -> list[list[tuple[float, int]]]:
        """Return when each request had how many new outputs."""
        return serve(self, requests)


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
            attention_backend=setup.backend,
            context_length=setup.longest,
            random_seed=0,
            log_level="error",
        )

    def serve(self, requests: list[Request]) -> list[list[tuple[float, int]]]:
        """Return when each request had how many new outputs."""
        return asyncio.get_event_loop().run_until_complete(self.serve_all(requests))

    async def serve_all(self, requests: list[Request]) -> list[list[tuple[float, int]]]:
        """Start a task for each request, and wait for all."""
        began = time.perf_counter()

        async def one(request: Request) -> list[tuple[float, int]]:
            await asyncio.sleep(max(0.0, request.arrival - (time.perf_counter() - began)))
            sampling = {"max_new_tokens": request.num_outputs, "temperature": 0.0, "ignore_eos": True}
            stream = await self.engine.async_generate(
                input_ids=list(request.prompt), sampling_params=sampling, stream=True
            )
            times, done = [], 0
            async for chunk in stream:
                count = chunk["meta_info"]["completion_tokens"] - done
                if count > 0:
                    times.append((time.perf_counter() - began, count))
                    done += count
            return times

        return list(await asyncio.gather(*map(one, requests)))


def compiled_kernels() -> int:
    """Return how many kernels are in Triton's cache, and in Inductor's if it has one of its own."""
    folders = {os.environ.get("TRITON_CACHE_DIR"), os.environ.get("TORCHINDUCTOR_CACHE_DIR")}
    default = Path.home() / ".triton" / "cache"
    return sum(len(list(Path(folder or default).rglob("*.cubin"))) for folder in folders)


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
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, setup.model, setup.layers)
        engine = {"vllm": VLLM, "sglang": SGLang}[setup.engine](setup, folder)
        engine.serve(trace(WARM, math.inf, 0.5, seed=99))
        pipe.send(time.perf_counter() - began)
        while (asked := pipe.recv()) is not None:
            requests = trace(*asked)
            kernels, memory = compiled_kernels(), used_memory()
            found = judged(requests, engine.serve(requests))
            pipe.send(found | {"kernels": compiled_kernels() - kernels, "memory": used_memory() - memory})


class Engine:
    """The process of an engine, which is started when it is first asked for something."""

    def __init__(self, setup: Setup, say: Callable[[str], None]) -> None:
        self.setup, self.say = setup, say
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

    def ask(self, *asked: Any) -> dict[str, float]:
        """Return the measures of a trace.

        Raises:
            SystemExit: the process ended.
        """
        self.begin()
        try:
            if not self.is_ready:
                self.starts.append(self.pipe.recv())
                self.is_ready = True
            self.pipe.send(asked)
            return self.pipe.recv()
        except (EOFError, OSError):
            sys.exit(f"{self.setup.backend} ended before it had measured everything; its output is above")

    def end(self) -> None:
        """End the process, if it is running."""
        if self.process is not None:
            with contextlib.suppress(OSError):
                self.pipe.send(None)
            self.process.join(30)
            self.process.kill()
            self.process = None


def measure(args: argparse.Namespace, engines: list[Engine], say: Callable[[str], None]) -> dict[str, Any]:
    """Return the saturation, and for each load and backend the measures of each round."""
    try:
        if args.together:
            for engine in engines:
                engine.ask(WARM, math.inf, args.agents, 98)
        saturation = args.rate or engines[0].ask(args.requests // SHORT, math.inf, args.agents, args.seed)["requests"]
        say(f"saturation: {saturation:.2f} requests a second")
        found: dict[str, dict[str, list[dict[str, float]]]] = {str(load): {} for load in args.load}
        for number, i in turns(len(engines), args.rounds):
            for load in args.load:
                of_round = engines[i].ask(args.requests, load * saturation, args.agents, args.seed + 10 * number)
                backend = engines[i].setup.backend
                found[str(load)].setdefault(backend, []).append(of_round)
                text = ", ".join(f"{of_round[name]:.1f} {words}" for name, words in MEASURES.items())
                say(f"round {number + 1} of {args.rounds}, {load:.0%}, {backend}: {text}")
            if not args.together:
                engines[i].end()
    finally:
        for engine in engines:
            engine.end()
    return {"saturation": saturation, "loads": found, "starts": {e.setup.backend: e.starts for e in engines}}


def spread(values: list[float]) -> float:
    """Return how far the values of rounds are apart, over their median."""
    return (max(values) - min(values)) / statistics.median(values) if statistics.median(values) else 0.0


def rows_of(result: dict[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Return for each load and measure a cell for each backend: the median, and the ratio to the first one's.

    A ratio is in brackets if rounds of either backend are as far apart as the backends.
    """
    for load, backends in result["loads"].items():
        (_, base), *_ = backends.items()
        for name, words in MEASURES.items():
            cells = []
            for rounds in backends.values():
                own, of_base = ([of_round[name] for of_round in each] for each in (rounds, base))
                median, first = statistics.median(own), statistics.median(of_base)
                text = f"{median:,.0f}" if name == "tokens" else f"{median:,.1f}"
                if rounds is not base and first:
                    ratio = median / first
                    counts = abs(ratio - 1) > max(spread(own), spread(of_base))
                    text += f", {ratio:.3f}" if counts else f" ({ratio:.3f})"
                cells.append(text)
            yield load, words, cells
        for name, words in OTHERS.items():
            yield load, words, [f"{max(of_round[name] for of_round in rounds):,.0f}" for rounds in backends.values()]


def markdown(about: dict[str, Any], result: dict[str, Any], plot: str | None) -> str:
    """Return the results as a page."""
    asked = result["asked"]
    backends = list(next(iter(result["loads"].values())))
    layers = asked["layers"] or MODELS[asked["model"]][1][2]
    drafts = f", {asked['drafts']} drafts accepted at {asked['acceptance']}" if asked["drafts"] else ""
    lines = [
        f"# The tail of a loaded server: {asked['engine']}",
        "",
        f"{result['device']}, driver {about['driver']}, torch {result['torch']}, Triton {about['triton']}, "
        f"{asked['engine']} {result['version']}, Quire {about['commit']}, {about['date']}.",
        f"{asked['model']}'s geometry with {layers} layers, random bfloat16 weights{drafts}.",
        f"{asked['requests']:,} requests a trace, {asked['agents']:.0%} of them turns of agents "
        f"({PREFIX:,} tokens in common, {TURN} of their own), the others with log-normal prompts "
        f"(median {PROMPT[0]}, at most {PROMPT[2]:,}); outputs with a median of {OUTPUTS[0]}.",
        f"Saturation is {result['saturation']:.2f} requests a second, of {backends[0]}; loads are shares of it.",
        f"Medians of {asked['rounds']} rounds. After a comma, the ratio to {backends[0]}; "
        "in brackets if rounds are as far apart. CUSTOM is Quire.",
        "[How it is measured](../../scripts/measure_tail.py).",
        "",
    ]
    lines += [f"![Tokens per second and tails by load]({plot})", ""] if plot else []
    lines += [f"| load | | {' | '.join(backends)} |", "| --- |" + " --- |" * (len(backends) + 1)]
    lines += [f"| {float(load):.0%} | {words} | {' | '.join(cells)} |" for load, words, cells in rows_of(result)]
    starts = [f"{statistics.median(result['starts'][name]):.1f}" for name in backends]
    lines += [f"| | seconds to start, and to serve {WARM} requests | {' | '.join(starts)} |", ""]
    for note in about.get("notes", []):
        lines += [note, ""]
    return "\n".join(lines)


def draw(result: dict[str, Any]) -> Any:
    """Return a figure: tokens per second and both tails by load, with bars from the least round to the most."""
    from quire_tools.bench.plots import COLOURS, add_legend, panels

    shown = [name for name in MEASURES if not name.endswith("50")]
    figure, axes = panels(len(shown), 3.0)
    backends = list(next(iter(result["loads"].values())))
    others = [name for name in backends if name not in (*QUIRE, "quire")]
    tints = dict(zip(others, COLOURS[1:], strict=False))
    for axis, name in zip(axes, shown, strict=True):
        for backend in backends:
            ours = backend not in others
            values = [[of_round[name] for of_round in of_load[backend]] for of_load in result["loads"].values()]
            middle = [statistics.median(of_load) for of_load in values]
            errors = [
                [m - min(v) for m, v in zip(middle, values, strict=True)],
                [max(v) - m for m, v in zip(middle, values, strict=True)],
            ]
            style = {"color": tints.get(backend, COLOURS[0]), "marker": "o", "ms": 3.5, "lw": 2.2 if ours else 1.1}
            label = "Quire" if ours else backend
            loads = [100 * float(load) for load in result["loads"]]
            axis.errorbar(loads, middle, errors, capsize=2, **style, label=label)
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
    parser.add_argument("--load", nargs="+", type=float, default=[0.5, 0.75, 0.9], help="shares of the saturation")
    parser.add_argument("--rate", type=float, help="the saturation in requests a second, if it is known")
    parser.add_argument("--requests", type=int, default=1000, help="of a trace; default 1000")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--agents", type=float, default=0.3, help="share of requests that are turns of agents")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that are drafted in a step; vLLM alone")
    parser.add_argument("--acceptance", nargs="+", type=float, help="how often each draft is accepted, at most 1.0")
    parser.add_argument("--seed", type=int, default=0, help="of the traces; each round has another one")
    parser.add_argument("--together", action="store_true", help="start all engines first, on one GPU")
    parser.add_argument("--cache", type=float, default=20.0, help="GB of keys and values of an engine; default 20")
    parser.add_argument("--out", help="path of the results without its ending; .json, .md and .png are written")
    parser.add_argument("--commit", help="Quire's commit, where there is no repository to ask")
    parser.add_argument("--note", action="append", default=[], help="a paragraph to keep with the results")
    parser.add_argument("--join", metavar="FILE.json", help="measure nothing; write the page of this file again")
    args = parser.parse_args()
    for name, least in (("requests", SHORT), ("rounds", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if not all(0 < load < 1 for load in args.load):
        parser.error(f"--load must be shares between 0 and 1, got {args.load}")
    args.acceptance = args.acceptance or [0.8**i for i in range(1, args.drafts + 1)]
    if len(args.acceptance) != args.drafts:
        parser.error(f"--acceptance must have a number for each of {args.drafts} drafts, got {args.acceptance}")
    if args.join:
        kept = json.loads(Path(args.join).read_text())
        about, result = kept["about"], kept["result"]
    elif importlib.util.find_spec(args.engine) is None:
        sys.exit(f"{args.engine} is not installed here; see docs/{args.engine}.md")
    else:
        about, result = provenance(args.commit), run(args)
    about["notes"] = about.get("notes", []) + args.note
    figure = draw(result) if args.out else None
    text = markdown(about, result, args.out and f"{Path(args.out).name}.png")
    print(text)
    if figure:
        Path(f"{args.out}.json").write_text(json.dumps({"about": about, "result": result}, indent=1) + "\n")
        Path(f"{args.out}.md").write_text(text)
        figure.savefig(f"{args.out}.png", dpi=150)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was asked, where it ran, and what was measured."""
    import torch

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    backends = args.backends or BACKENDS[args.engine]
    longest = PREFIX + TURN + OUTPUTS[2] + 16 + args.drafts
    common = (args.model, args.layers, args.cache, args.drafts, tuple(args.acceptance), longest)
    setups = [Setup(args.engine, backend, *common) for backend in backends]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    names = "engine", "model", "layers", "requests", "rounds", "agents", "drafts", "acceptance", "seed", "together"
    where = {"device": device, "torch": torch.__version__, "version": importlib.metadata.version(args.engine)}
    asked = {name: getattr(args, name) for name in names} | {"setups": [asdict(setup) for setup in setups]}
    return where | {"asked": asked} | measure(args, [Engine(setup, say) for setup in setups], say)


if __name__ == "__main__":
    main()
