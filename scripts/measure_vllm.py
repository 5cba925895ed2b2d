"""Time vLLM end to end with several attention backends.

Random weights in a real model's geometry, with vLLM's own compilation and CUDA graphs. Three experiments; each backend
has its own process:

* latency: one request of 500 tokens; seconds until its 100th, 200th, ... output (section 7.4 of arXiv 2511.11581);
* load: a number of requests at once, prompts and outputs of unequal lengths; output tokens per second of the second of
  two runs, and seconds for all the prompts with one output each;
* prompt: one long prompt with 8 outputs; seconds, the median of three.

    python scripts/measure_vllm.py                                                # all: FLASH_ATTN, TRITON_ATTN, CUSTOM
    python scripts/measure_vllm.py --backends FLASH_ATTN CUSTOM --latency 100 1600  # two backends, one experiment
    python scripts/measure_vllm.py --models qwen2.5-7b qwen2.5-1.5b --load 8 32 128 256 --together --out qwen_h200
    python scripts/measure_vllm.py --tensor-parallel 2 --latency 100 1600           # every backend on two GPUs
    python scripts/measure_vllm.py --models deepseek-v3-rank --latency 100 1600 12800 --load 8 32 128      # latents
    python scripts/measure_vllm.py --join llama.json qwen.json --out docs/results/vllm_h200
    python scripts/measure_vllm.py --layers 4 --latency 100 --prompt 4096           # a first look: four layers

Needs vLLM and `quire` (CUSTOM is Quire up to vLLM 0.31; from 0.32 on name QUIRE in --backends), and matplotlib for the
plot. A backend that fails is left out.

The models with latent attention (MLA) are DeepSeek's without experts: every layer has the first layers' dense
feed-forward part. `deepseek-v3-rank` is what one of eight tensor-parallel GPUs has of DeepSeek-V3: 16 of 128 heads and
an eighth of the feed-forward part.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_theta": 500000.0,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "rope_theta": 10000.0,
    "max_position_embeddings": 163840,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_LITE = DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
}
# hidden size, feed-forward size, layers, query heads, KV heads, vocabulary; every head_dim is 128, but for latents
MODELS = {
    "llama-3.1-8b": (LLAMA, (4096, 14336, 32, 32, 8, 128256)),
    "qwen2.5-7b": (QWEN, (3584, 18944, 28, 28, 4, 152064)),
    "qwen2.5-1.5b": (QWEN, (1536, 8960, 28, 12, 2, 151936)),
    "deepseek-v2-lite": (DEEPSEEK_LITE, (2048, 10944, 27, 16, 16, 102400)),
    "deepseek-v3": (DEEPSEEK, (7168, 18432, 61, 128, 128, 129280)),
    "deepseek-v3-rank": (DEEPSEEK, (7168, 2304, 61, 16, 16, 129280)),
}
BACKENDS = ["FLASH_ATTN", "TRITON_ATTN", "CUSTOM"]
LATENT_BACKENDS = ["FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA", "CUSTOM"]
PROMPT = 500  # tokens of the latency experiment's prompt
LATENCY = [100, 200, 400, 800, 1600, 3200, 6400, 12800]
READY, MEASURED = "ready to measure", "measured: "
QUIRE = ("CUSTOM", "QUIRE")
EXPERIMENTS = {  # titles of tables
    "latency": f"one request, {PROMPT} tokens; seconds until output number",
    "load": "requests at once, 64 to 1,024 tokens in and out each; output tokens per second",
    "prompts": "requests at once, one output each; seconds",
    "prompt": "tokens of one prompt, 8 outputs; seconds",
}


@dataclass(frozen=True)
class Run:
    """What one process measures."""

    model: str
    backend: str
    latency: tuple[int, ...] = ()
    load: tuple[int, ...] = ()
    prompt: int = 0
    layers: int | None = None
    kv_cache_dtype: str = "auto"
    tensor_parallel: int = 1
    compiled: bool = True
    prefill: bool = True  # Quire's, where Quire decodes latents
    together: bool = False  # shares the GPU with the other backends, so it takes only the memory that it needs

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(PROMPT + max(self.latency, default=0), self.prompt + 8, 2048) + 16

    def cache_bytes(self) -> int:
        """Return the size of a cache in which no request is preempted, with a tenth to spare."""
        _, (_, _, layers, _, kv_heads, _) = MODELS[self.model]
        most = [max(sum(n + t for n, end in lengths(count) if end > t) for t in range(1024)) for count in self.load]
        num_tokens = int(1.1 * max([self.longest, *most]))
        # Each rank has all latents.
        width = 512 + 64 if is_latent(self.model) else 2 * kv_heads * 128 // self.tensor_parallel
        return num_tokens * (self.layers or layers) * width * 2


def is_latent(model: str) -> bool:
    """Whether a model has multi-head latent attention."""
    return "kv_lora_rank" in MODELS[model][0]


def lengths(count: int) -> list[tuple[int, int]]:
    """Return the tokens in and out of each of `count` requests."""
    draw = random.Random(count)
    return [(draw.randint(64, 1024), draw.randint(64, 1024)) for _ in range(count)]


def write_config(folder: str, name: str, layers: int | None) -> None:
    """Write a model's config.json; its weights are random."""
    base, sizes = MODELS[name]
    hidden, feed_forward, num_layers, heads, kv_heads, vocabulary = sizes
    config = base | {
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if layers:
        config["num_hidden_layers"] = layers
    if is_latent(name):
        config["first_k_dense_replace"] = config["num_hidden_layers"]  # no layer has experts
    Path(folder, "config.json").write_text(json.dumps(config))


def tokens(count: int, seed: int) -> dict:
    """Return a prompt of random tokens."""
    draw = random.Random(seed)
    return {"prompt_token_ids": [draw.randrange(10, 30000) for _ in range(count)]}


def start(run: Run) -> Any:
    """Return a vLLM that is ready for a run."""
    from vllm import LLM

    graphs = sorted({1, 2, 4, 8, *(n for most in run.load for n in range(16, most + 1, 16)), *run.load})
    memory = {"kv_cache_memory_bytes": run.cache_bytes(), "gpu_memory_utilization": 0.05} if run.together else {}
    uncompiled = {} if run.compiled else {"mode": 0, "cudagraph_mode": "FULL"}
    prefill = prefill_options(run.prefill) if is_latent(run.model) and run.backend in QUIRE else {}
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, run.model, run.layers)
        return LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            attention_backend=run.backend,
            max_model_len=run.longest,
            max_num_seqs=max([*run.load, 8]),
            enable_prefix_caching=False,
            kv_cache_dtype=run.kv_cache_dtype,
            seed=0,
            tensor_parallel_size=run.tensor_parallel,
            compilation_config={"cudagraph_capture_sizes": graphs, **uncompiled},
            **memory,
            **prefill,
        )


def prefill_options(quires: bool) -> dict[str, Any]:
    """Return vLLM's options for Quire's prefill of latent attention, or for vLLM's."""
    from vllm.config import AttentionConfig

    if hasattr(AttentionConfig, "mla_prefill_backend"):  # chosen apart, and vLLM's if it is not
        return {"attention_config": {"mla_prefill_backend": "CUSTOM"}} if quires else {}
    return {"additional_config": {"quire_prefill": quires}}


def measure(run: Run, llm: Any) -> dict[str, Any]:
    """Run the experiments; return the seconds or tokens per second of each, by point."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def sampling(count: int, **options) -> SamplingParams:
        return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False, **options)

    def seconds(prompts: list[dict], counts: list[int]) -> float:
        began = time.perf_counter()
        llm.generate(prompts, [sampling(n) for n in counts], use_tqdm=False)
        return time.perf_counter() - began

    result: dict[str, Any] = {}
    seconds([tokens(PROMPT, 1)], [16])
    if run.latency:
        engine, marks, done = llm.llm_engine, {}, 0
        sampled = sampling(max(run.latency), output_kind=RequestOutputKind.DELTA)
        began = time.perf_counter()
        engine.add_request("latency", tokens(PROMPT, 2), sampled)
        while engine.has_unfinished_requests():
            for output in engine.step():
                done += len(output.outputs[0].token_ids)
                passed = time.perf_counter() - began
                marks |= {str(n): passed for n in run.latency if done >= n and str(n) not in marks}
        result["latency"] = marks
    for count in run.load:
        outputs = [n for _, n in lengths(count)]
        prompts = [tokens(n, i) for i, (n, _) in enumerate(lengths(count))]
        times = [seconds(prompts, outputs) for _ in range(2)]
        result.setdefault("load", {})[str(count)] = sum(outputs) / times[1]
        result.setdefault("prompts", {})[str(count)] = seconds(prompts, [1] * count)
    if run.prompt:
        times = [seconds([tokens(run.prompt, i)], [8]) for i in range(4)]
        result["prompt"] = {str(run.prompt): statistics.median(times[1:])}
    return result


def work(run: Run) -> None:
    """Run in a process of its own: start, print READY, and measure after a line on stdin."""
    began = time.perf_counter()
    llm = start(run)
    print(READY, flush=True)
    began = time.perf_counter() - began
    sys.stdin.readline()
    import torch
    import vllm

    about = {
        "start": began,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }
    what = {name: value for name, value in asdict(run).items() if name not in EXPERIMENTS}
    print(MEASURED + json.dumps(what | about | measure(run, llm)), flush=True)


class Process:
    """A run's process, and what it wrote."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lines: list[str] = []
        command = [sys.executable, __file__, "--worker", json.dumps(asdict(run))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def until(self, mark: str) -> str | None:
        """Return the rest of the next line that begins with the mark; None if the process ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(mark):
                return line.removeprefix(mark)
        return None

    def result(self) -> dict[str, Any] | None:
        """Make it measure, and wait for its end."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        line = self.until(MEASURED)
        self.until("the end")
        self.process.wait()
        if line is None:
            print("".join(self.lines)[-4000:], file=sys.stderr)
            print(f"{self.run.backend} failed with {self.run.model}; its output is above", file=sys.stderr)
        return None if line is None else json.loads(line)


def measure_all(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the results of all runs that succeed.

    Runs are timed one at a time. Those that share the GPU start at the same time and wait for their turn.
    """
    started = [Process(run) if run.together else None for run in runs]
    for process in filter(None, started):
        process.until(READY)
    results = []
    for run, process in zip(runs, started, strict=True):
        result = (process or Process(run)).result()
        if result:
            results.append(result)
            print(json.dumps(result), flush=True)
    return results


def provenance(commit: str | None) -> dict[str, Any]:
    """Return what a reader needs to run the same again."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or output_of("git", "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        "triton": version("triton"),
        "driver": output_of(*query).split("\n")[0],
    }


def output_of(*command: str) -> str:
    """Return what a command prints, or nothing if there is no such command."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:
        return ""


def groups_of(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each table, by its title."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        layers = r["layers"] or MODELS[r["model"]][1][2]
        cache = f", {r['kv_cache_dtype']} cache" if r["kv_cache_dtype"] != "auto" else ""
        compiled = "" if r["compiled"] else ", not compiled"
        gpus = f", {r['tensor_parallel']} GPUs" if r["tensor_parallel"] > 1 else ""
        groups.setdefault(f"{r['model']}, {layers} layers{cache}{compiled}{gpus}", []).append(r)
    return groups


def speed(experiment: str, value: float, base: float) -> float:
    """Return the speed of a value relative to another."""
    return value / base if experiment == "load" else base / value


def markdown(about: dict[str, Any], results: list[dict[str, Any]], plot: str | None = None) -> str:
    """Return the results as tables; in brackets the speed relative to the first backend."""
    first = results[0]
    start = "started together and timed one after the other" if first["together"] else "one after the other"
    lines = [
        f"# vLLM {first['vllm']} end to end",
        "",
        f"{first['device']}, driver {about['driver']}, torch {first['torch']}, Triton {about['triton']}, "
        f"Quire {about['commit']}, {about['date']}.",
        "Random bfloat16 weights and, unless a title says otherwise, a bfloat16 cache.",
        "vLLM's default compilation and graphs, no prefix caching.",
        "CUSTOM is Quire.",
        "In brackets: speed relative to the first column.",
        "Latencies are of one run, load of the second of two, a single prompt the median of three.",
        f"Each backend has its own process; those of a table ran on one machine, {start}.",
        "",
    ]
    for note in about.get("notes", []):
        lines += [note, ""]
    lines += [f"![Speed against length and load]({plot})", ""] if plot else []
    for title, group in groups_of(results).items():
        lines += [f"## {title}", ""]
        for name, what in EXPERIMENTS.items():
            measured = [r for r in group if r.get(name)]
            if not measured:
                continue
            backends = " | ".join(
                r["backend"] + ("" if r.get("prefill", True) else ", vLLM's prefill") for r in measured
            )
            lines += [f"| {what} | {backends} |", "| --- |" + " --- |" * len(measured)]
            for point, base in measured[0][name].items():
                cells = [cell(name, r[name].get(point), base, r is measured[0]) for r in measured]
                lines.append(f"| {int(point):,} | " + " | ".join(cells) + " |")
            lines.append("")
    return "\n".join(lines)


def cell(experiment: str, value: float | None, base: float, is_base: bool) -> str:
    """Return a cell of a table: the value and, in brackets, its speed relative to `base`."""
    if value is None:
        return ""
    text = f"{value:,.0f}" if experiment == "load" else f"{value:.3f}"
    return text if is_base else f"{text} ({100 * speed(experiment, value, base):.1f} %)"


def draw(results: list[dict[str, Any]]) -> Any:
    """Return a figure, or None if there is nothing to compare.

    For each model: speed by output length, relative to the first backend, and tokens per second by load.
    """
    from quire.bench.plots import COLOURS, add_legend, panels

    wanted = []
    for title, group in groups_of(results).items():
        measured = [r for r in group if len(r.get("latency", {})) > 1]
        wanted += [(title, "latency", measured)] if len(measured) > 1 else []
        measured = [r for r in group if r.get("load")]
        wanted += [(title, "load", measured)] if measured and len(measured[0]["load"]) > 1 else []
    if not wanted:
        return None
    others = dict.fromkeys(r["backend"] for r in results if r["backend"] not in QUIRE)
    tints = dict(zip(others, COLOURS[1:], strict=False)) | dict.fromkeys(QUIRE, COLOURS[0])
    figure, axes = panels(len(wanted), 3.0)
    for axis, (title, name, measured) in zip(axes, wanted, strict=True):
        base = measured[0][name]
        if name == "latency":
            for r in measured:
                points = [(int(p), 100 * speed(name, v, base[p])) for p, v in r[name].items()]
                ours = r["backend"] in QUIRE
                style = {"color": tints[r["backend"]], "marker": "o", "ms": 3.5, "lw": 2.2 if ours else 1.1}
                axis.plot(*zip(*points, strict=True), **style, label=label(r["backend"]))
            axis.set(
                xscale="log",
                xlabel=f"outputs of one request of {PROMPT} tokens",
                ylabel=f"% of {measured[0]['backend']}'s speed",
            )
            axis.set_xticks([int(p) for p in base], [f"{int(p):,}" for p in base])
            axis.minorticks_off()
        else:
            width = 0.8 / len(measured)
            at_point = {p: [r["backend"] for r in measured if p in r[name]] for p in base}
            for r in measured:
                at = [
                    i + width * (backends.index(r["backend"]) - (len(backends) - 1) / 2)
                    for i, (p, backends) in enumerate(at_point.items())
                    if p in r[name]
                ]
                bars = axis.bar(at, list(r[name].values()), width, color=tints[r["backend"]], label=label(r["backend"]))
                if r is not measured[0]:
                    shown = [f"{100 * speed(name, v, base[p]):.1f}" for p, v in r[name].items()]
                    axis.bar_label(bars, shown, fontsize=7, padding=1)
            note = f"\nabove bars: % of {measured[0]['backend']}" if len(measured) > 1 else ""
            axis.set(xlabel=f"requests at once, 64 to 1,024 tokens in and out{note}", ylabel="output tokens per second")
            axis.set_axisbelow(True)
            axis.set_xticks(range(len(base)), list(base))
            axis.grid(axis="x", visible=False)
            axis.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
        axis.set_title(title)
    add_legend(figure)
    return figure


def label(backend: str) -> str:
    """Return a backend's name in a legend."""
    return "Quire" if backend in QUIRE else backend


def join(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of several invocations as if they were one."""
    by_name: dict[tuple[Any, ...], dict[str, Any]] = {}
    names = ("model", "layers", "kv_cache_dtype", "tensor_parallel", "compiled", "prefill", "backend")
    for r in results:
        known = by_name.setdefault(tuple(r.get(name, True) for name in names), r)
        for name in EXPERIMENTS:
            if name in r:
                known[name] = known.get(name, {}) | r[name]
    return list(by_name.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["llama-3.1-8b"])
    parser.add_argument("--layers", type=int, help="number of the model's layers to keep")
    parser.add_argument(
        "--backends",
        nargs="+",
        help=f"default {' '.join(BACKENDS)}, and {' '.join(LATENT_BACKENDS)} for models with latent attention",
    )
    parser.add_argument(
        "--latency",
        nargs="*",
        type=int,
        help="output numbers to time; default 100, 200, 400, ... 12800 if no experiment is named",
    )
    parser.add_argument("--load", nargs="*", type=int, help="requests at once; default 8 32 128 256")
    parser.add_argument("--prompt", type=int, help="tokens of the long prompt; default 15000")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or fp8")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share each model")
    parser.add_argument(
        "--no-compile", action="store_true", help="no torch.compile: starts faster, but is not what is served"
    )
    parser.add_argument(
        "--vllm-prefill", action="store_true", help="in models with latent attention, Quire leaves prefill to vLLM"
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="start all backends at the same time on one GPU, which has to hold them all; they are timed one by one",
    )
    parser.add_argument("--out", help="path of the results without its ending; .json, .md and .png are written")
    parser.add_argument("--commit", help="Quire's commit, where there is no repository to ask")
    parser.add_argument("--note", action="append", default=[], help="a paragraph to keep with the results")
    parser.add_argument("--join", nargs="+", help="measure nothing; make one result of these .json files")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if args.worker:
        work(Run(**json.loads(args.worker)))
        return
    if args.latency is None and args.load is None and args.prompt is None:
        args.latency, args.load, args.prompt = LATENCY, [8, 32, 128, 256], 15000
    if args.join:
        parts = [json.loads(Path(path).read_text()) for path in args.join]
        about, results = parts[0]["about"], join([r for part in parts for r in part["results"]])
    else:
        runs = [
            Run(
                model=model,
                backend=backend,
                latency=tuple(args.latency or ()),
                load=tuple(args.load or ()),
                prompt=args.prompt or 0,
                layers=args.layers,
                kv_cache_dtype=args.kv_cache_dtype,
                tensor_parallel=args.tensor_parallel,
                compiled=not args.no_compile,
                prefill=not (args.vllm_prefill and backend in QUIRE),
                together=args.together,
            )
            for model in args.models
            for backend in args.backends or (LATENT_BACKENDS if is_latent(model) else BACKENDS)
        ]
        about, results = provenance(args.commit), measure_all(runs)
        if not results:
            sys.exit("no backend could be measured; their output is above")
    about["notes"] = about.get("notes", []) + args.note
    figure = draw(results) if args.out else None
    text = markdown(about, results, figure and f"{Path(args.out).name}.png")
    print(text)
    if args.out:
        Path(f"{args.out}.json").write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
        Path(f"{args.out}.md").write_text(text + "\n")
        if figure:
            figure.savefig(f"{args.out}.png", dpi=150)


if __name__ == "__main__":
    main()
