"""Time vLLM end to end with several attention backends.

Random weights in a real model's geometry, with vLLM's own compilation and CUDA graphs. Each backend has its own
process. Experiments:

* latency: one request of 500 tokens; seconds until its 100th, 200th, ... output (section 7.4 of arXiv 2511.11581);
* load: a number of requests at once, prompts and outputs of unequal lengths; output tokens per second of the second of
  two runs, and seconds for all the prompts with one output each;
* prompt: one long prompt with 8 outputs; seconds, the median of three;
* context: a number of requests at once, all with long contexts; milliseconds for one output of each;
* greedy: outputs and their log probabilities after prompts of eight lengths, which backends should have in common. The
  weights have to be large enough that attention matters (`--weights`), which vLLM's own random weights are not.

    python scripts/measure_vllm.py                                                # all: FLASH_ATTN, TRITON_ATTN, CUSTOM
    python scripts/measure_vllm.py --backends FLASH_ATTN CUSTOM --latency 100 1600  # two backends, one experiment
    python scripts/measure_vllm.py --models qwen2.5-7b qwen2.5-1.5b --load 8 32 128 256 --together --out qwen_h200
    python scripts/measure_vllm.py --backends FLASH_ATTN CUSTOM --rounds 3 --latency 400 --load 32  # medians of three
    python scripts/measure_vllm.py --backends FLASH_ATTN CUSTOM --batch-invariant --rounds 3 --latency 400 --load 32
    python scripts/measure_vllm.py --tensor-parallel 2 --latency 100 1600           # every backend on two GPUs
    python scripts/measure_vllm.py --models deepseek-v3-rank --latency 100 1600 12800 --load 8 32 128      # latents
    python scripts/measure_vllm.py --join llama.json qwen.json --out docs/results/vllm_h200
    python scripts/measure_vllm.py --layers 4 --latency 100 --prompt 4096           # a first look: four layers
    python scripts/measure_vllm.py --models one-kv-head --tensor-parallel 2 --dcp 2 --backends FLASH_ATTN CUSTOM \\
        --weights 2 --context 1 16 --greedy 32 --workspace 256                      # contexts shared by two GPUs

Needs vLLM and `quire` (CUSTOM is Quire up to vLLM 0.31; from 0.32 on name QUIRE in --backends), and matplotlib for the
plot.

Each point is kept when it is measured. A backend that measured nothing is left out. One that ended after some of its
points keeps these, whether it failed or `--limit` came. Its columns say "stopped early", and its `ended` in the JSON
file is false.

With `--rounds`, each round measures every backend: the first forwards, the second backwards, and so on. The results are
medians. `each_round` in the JSON file has the values of all rounds. A backend starts in each round; with `--together`
it starts once. The seconds that starting takes depend on what compilers have kept on disk.

The models with latent attention (MLA) are DeepSeek's without experts: every layer has the first layers' dense
feed-forward part. `deepseek-v3-rank` is what one of eight tensor-parallel GPUs has of DeepSeek-V3: 16 of 128 heads and
an eighth of the feed-forward part.

`one-kv-head` is for decode context parallelism, which vLLM has where there are more GPUs than KV heads. There,
FLASH_ATTN of vLLM 0.20.2 stops at the first prompt: its warm-up allocates a workspace for a few tokens only, and locks
it. `--workspace` lets it find a larger one.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
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
    "one-kv-head": (LLAMA, (2048, 8192, 16, 32, 1, 32000)),
    "deepseek-v2-lite": (DEEPSEEK_LITE, (2048, 10944, 27, 16, 16, 102400)),
    "deepseek-v3": (DEEPSEEK, (7168, 18432, 61, 128, 128, 129280)),
    "deepseek-v3-rank": (DEEPSEEK, (7168, 2304, 61, 16, 16, 129280)),
}
BACKENDS = ["FLASH_ATTN", "TRITON_ATTN", "CUSTOM"]
LATENT_BACKENDS = ["FLASH_ATTN_MLA", "FLASHMLA", "TRITON_MLA", "CUSTOM"]
PROMPT = 500  # tokens of the latency experiment's prompt
KEYS = 60000  # of each request of the context experiment
STEPS = 64  # of the context experiment that are timed
LATENCY = [100, 200, 400, 800, 1600, 3200, 6400, 12800]
READY, MEASURED = "ready to measure", "measured: "
QUIRE = ("CUSTOM", "QUIRE")
EXPERIMENTS = {  # titles of tables
    "latency": f"one request, {PROMPT} tokens; seconds until output number",
    "load": "requests at once, 64 to 1,024 tokens in and out each; output tokens per second",
    "prompts": "requests at once, one output each; seconds",
    "prompt": "tokens of one prompt, 8 outputs; seconds",
    "context": "requests at once with long contexts; ms for an output of each",
}


@dataclass(frozen=True)
class Run:
    """What one process measures."""

    model: str
    backend: str
    latency: tuple[int, ...] = ()
    load: tuple[int, ...] = ()
    prompt: int = 0
    context: tuple[int, ...] = ()
    greedy: int = 0  # outputs of each prompt
    keys: int = KEYS  # of the context experiment, and of the longest greedy prompt
    layers: int | None = None
    weights: float = 0.0  # of which standard deviation a layer's outputs are; 0 for vLLM's own random weights
    kv_cache_dtype: str = "auto"
    tensor_parallel: int = 1
    dcp: int = 1  # GPUs that share each context
    workspace: int = 0  # MB that vLLM's own backends find allocated
    compiled: bool = True
    warm: bool = True  # Quire compiles its kernels before the first request
    prefill: bool = True  # Quire's, where Quire decodes latents
    together: bool = False  # shares the GPU with the other backends, so it takes only the memory that it needs
    batch_invariant: bool = False  # VLLM_BATCH_INVARIANT
    rounds: int = 1  # in which it is measured

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        contexts = self.keys + self.context_outputs(max(self.context)) if self.context else 0
        greedy = self.keys + self.greedy if self.greedy else 0
        return max(PROMPT + max(self.latency, default=0), self.prompt + 8, contexts, greedy, 2048) + 16

    def context_outputs(self, count: int) -> int:
        """Return the most outputs of a request with a long context; the first ones begin while others are read."""
        return STEPS + 2 * count * (1 + self.keys // 4096)

    def greedy_lengths(self) -> list[int]:
        """Return the lengths of the prompts whose outputs are compared."""
        return [max(1, self.keys >> i) for i in range(8)]

    def cache_bytes(self) -> int:
        """Return the size of a cache in which no request is preempted, with a tenth to spare."""
        _, (_, _, layers, _, kv_heads, _) = MODELS[self.model]
        most = [max(sum(n + t for n, end in lengths(count) if end > t) for t in range(1024)) for count in self.load]
        most += [count * (self.keys + self.context_outputs(count)) for count in self.context]
        most.append(sum(n + self.greedy for n in self.greedy_lengths()) if self.greedy else 0)
        num_tokens = int(1.1 * max([self.longest, *most])) // self.dcp
        # Each rank has all latents.
        width = 512 + 64 if is_latent(self.model) else 2 * max(1, kv_heads // self.tensor_parallel) * 128
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


def write_weights(folder: str, name: str, layers: int | None, spread: float) -> None:
    """Write weights of a Llama with which outputs depend on the whole context.

    Each layer's outputs have the standard deviation `spread`, so that softmax chooses among keys. Drawing numbers takes
    seconds, so a layer has those of the first one in other places.
    """
    import torch
    from safetensors.torch import save_file

    hidden, feed_forward, num_layers, heads, kv_heads, vocabulary = MODELS[name][1]
    generator = torch.Generator().manual_seed(0)
    torch.set_num_threads(1)  # vLLM forks its workers, and OpenMP's threads do not outlive that

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(std).to(torch.bfloat16)

    inner, spread_of_hidden = heads * 128, spread / hidden**0.5
    matrices = {
        "self_attn.q_proj": normal(inner, hidden, spread_of_hidden),
        "self_attn.k_proj": normal(kv_heads * 128, hidden, spread_of_hidden),
        "self_attn.v_proj": normal(kv_heads * 128, hidden, spread_of_hidden),
        "self_attn.o_proj": normal(hidden, inner, spread / inner**0.5),
        "mlp.gate_proj": normal(feed_forward, hidden, spread_of_hidden),
        "mlp.up_proj": normal(feed_forward, hidden, spread_of_hidden),
        "mlp.down_proj": normal(hidden, feed_forward, spread / feed_forward**0.5),
    }
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": normal(vocabulary, hidden, 1.0),
        "lm_head.weight": normal(vocabulary, hidden, spread_of_hidden),
        "model.norm.weight": ones.clone(),
    }
    for i in range(layers or num_layers):
        layer = f"model.layers.{i}."
        weights |= {f"{layer}{part}.weight": x.roll((17 * i, 29 * i), (0, 1)) for part, x in matrices.items()}
        weights |= {f"{layer}{part}.weight": ones.clone() for part in ("input_layernorm", "post_attention_layernorm")}
    save_file(weights, Path(folder, "model.safetensors"), {"format": "pt"})


def tokens(count: int, seed: int, vocabulary: int = 30000) -> dict:
    """Return a prompt of random tokens."""
    draw = random.Random(seed)
    return {"prompt_token_ids": [draw.randrange(10, min(30000, vocabulary)) for _ in range(count)]}


def start(run: Run) -> Any:
    """Return a vLLM that is ready for a run."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, run.model, run.layers)
        if run.weights:
            write_weights(folder, run.model, run.layers, run.weights)
        return LLM(model=folder, **options(run))


def options(run: Run) -> dict[str, Any]:
    """Return vLLM's options for a run."""
    loads = run.load + run.context
    graphs = sorted({1, 2, 4, 8, *(n for most in loads for n in range(16, most + 1, 16)), *loads})
    memory = {"kv_cache_memory_bytes": run.cache_bytes(), "gpu_memory_utilization": 0.05} if run.together else {}
    uncompiled = {} if run.compiled else {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    ours = run.backend in QUIRE
    chosen: dict[str, Any] = prefill_options(run.prefill) if is_latent(run.model) and ours else {}
    if ours and not run.warm:
        chosen["additional_config"] = chosen.get("additional_config", {}) | {"quire_warmup": False}
    if run.dcp > 1:
        chosen["decode_context_parallel_size"] = run.dcp
    return {
        "load_format": "auto" if run.weights else "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "attention_backend": run.backend,
        "max_model_len": run.longest,
        "max_num_seqs": max([*loads, 8]),
        "enable_prefix_caching": False,
        "kv_cache_dtype": run.kv_cache_dtype,
        "seed": 0,
        "tensor_parallel_size": run.tensor_parallel,
        "compilation_config": {"cudagraph_capture_sizes": graphs, **uncompiled},
        **memory,
        **chosen,
    }


def prefill_options(quires: bool) -> dict[str, Any]:
    """Return vLLM's options for Quire's prefill of latent attention, or for vLLM's."""
    from vllm.config import AttentionConfig

    if hasattr(AttentionConfig, "mla_prefill_backend"):  # chosen apart, and vLLM's if it is not
        return {"attention_config": {"mla_prefill_backend": "CUSTOM"}} if quires else {}
    return {"additional_config": {"quire_prefill": quires}}


def measure(run: Run, llm: Any) -> Iterator[dict[str, Any]]:
    """Run the experiments; after each point, return the times or tokens per second so far, and greedy tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def sampling(count: int, **options) -> SamplingParams:
        return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False, **options)

    def seconds(prompts: list[dict], counts: list[int]) -> float:
        began = time.perf_counter()
        llm.generate(prompts, [sampling(n) for n in counts], use_tqdm=False)
        return time.perf_counter() - began

    result: dict[str, Any] = {}
    vocabulary = MODELS[run.model][1][5]
    seconds([tokens(PROMPT, 1, vocabulary)], [16])
    if run.greedy:
        prompts = [tokens(n, i, vocabulary) for i, n in enumerate(run.greedy_lengths())]
        found = [r.outputs[0] for r in llm.generate(prompts, sampling(run.greedy, logprobs=1), use_tqdm=False)]
        result["tokens"] = [list(output.token_ids) for output in found]
        result["logprobs"] = [
            [of[token].logprob for token, of in zip(output.token_ids, output.logprobs, strict=True)] for output in found
        ]
    for count in run.context:
        prompts = [tokens(run.keys, i, vocabulary) for i in range(count)]
        sampled = sampling(run.context_outputs(count), output_kind=RequestOutputKind.DELTA)
        result.setdefault("context", {})[str(count)] = milliseconds(llm.llm_engine, prompts, sampled)
        yield result
    if run.latency:
        engine, marks, done = llm.llm_engine, {}, 0
        sampled = sampling(max(run.latency), output_kind=RequestOutputKind.DELTA)
        began = time.perf_counter()
        engine.add_request("latency", tokens(PROMPT, 2), sampled)
        while engine.has_unfinished_requests():
            for output in engine.step():
                done += len(output.outputs[0].token_ids)
                passed = time.perf_counter() - began
                reached = {str(n): passed for n in run.latency if done >= n and str(n) not in marks}
                if reached:
                    marks |= reached
                    yield result | {"latency": marks}
        result["latency"] = marks
    for count in run.load:
        outputs = [n for _, n in lengths(count)]
        prompts = [tokens(n, i) for i, (n, _) in enumerate(lengths(count))]
        times = [seconds(prompts, outputs) for _ in range(2)]
        result.setdefault("load", {})[str(count)] = sum(outputs) / times[1]
        result.setdefault("prompts", {})[str(count)] = seconds(prompts, [1] * count)
        yield result
    if run.prompt:
        times = [seconds([tokens(run.prompt, i)], [8]) for i in range(4)]
        result["prompt"] = {str(run.prompt): statistics.median(times[1:])}
    yield result


def milliseconds(engine: Any, prompts: list[dict], sampled: Any) -> float:
    """Return the time of a step in which all requests decode."""
    done = {f"{len(prompts)} at once, {i}": 0 for i in range(len(prompts))}
    for name, prompt in zip(done, prompts, strict=True):
        engine.add_request(name, prompt, sampled)

    def until(least: int) -> None:
        while min(done.values()) < least and engine.has_unfinished_requests():
            for output in engine.step():
                done[output.request_id] += len(output.outputs[0].token_ids)

    until(4)
    first, began = min(done.values()), time.perf_counter()
    until(first + STEPS)
    passed = time.perf_counter() - began
    engine.abort_request(list(done))
    while engine.has_unfinished_requests():
        engine.step()
    return 1000 * passed / STEPS


def work(run: Run) -> None:
    """Run in a process of its own: start, print READY, and measure after each line on stdin."""
    began = time.perf_counter()
    llm = start(run)
    print(READY, flush=True)
    began = time.perf_counter() - began
    import torch
    import vllm

    about = {
        "start": began,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }
    what = {name: value for name, value in asdict(run).items() if name not in EXPERIMENTS}
    while sys.stdin.readline():
        result: dict[str, Any] = {}
        for result in measure(run, llm):
            print(MEASURED + json.dumps(what | about | result | {"ended": False}), flush=True)
        print(MEASURED + json.dumps(what | about | result | {"ended": True}), flush=True)


def write_workspace_plugin(folder: Path, megabytes: int) -> None:
    """Write a plug-in of vLLM, which each of its processes loads, that allocates the workspace when it is made."""
    (folder / "measured_workspace.py").write_text(
        f"""
import torch
from vllm.v1.worker.workspace import WorkspaceManager

make = WorkspaceManager.__init__


def make_large(self, device, *args, **options):
    make(self, device, *args, **options)
    self._current_workspaces = [
        torch.empty({megabytes} << 20, dtype=torch.uint8, device=device) for _ in self._current_workspaces
    ]


def register():
    WorkspaceManager.__init__ = make_large
"""
    )
    about = folder / "measured_workspace-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: measured-workspace\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nworkspace = measured_workspace:register\n")


class Process:
    """A run's process, and what it wrote."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lines: list[str] = []
        command = [sys.executable, __file__, "--worker", json.dumps(asdict(run))]
        environment = os.environ | {"VLLM_BATCH_INVARIANT": str(int(run.batch_invariant))}
        self.plugin = tempfile.TemporaryDirectory()
        if run.workspace and run.backend not in QUIRE:
            write_workspace_plugin(Path(self.plugin.name), run.workspace)
            paths = filter(None, [self.plugin.name, os.environ.get("PYTHONPATH")])
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
        )

    def until(self, mark: str) -> str | None:
        """Return the rest of the next whole line that begins with the mark; None if the process ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(mark) and line.endswith("\n"):
                return line.removeprefix(mark)
        return None

    def kill(self) -> None:
        """End it, and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, and let go of what it held."""
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.plugin.cleanup()

    def measure(self) -> dict[str, Any] | None:
        """Make it measure once. Return what it measured, which is `ended` if that is all; None if that is nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        last = None
        while (line := self.until(MEASURED)) is not None:
            with contextlib.suppress(json.JSONDecodeError):  # another process wrote into the line
                last = json.loads(line)
                if last["ended"]:
                    break
        return last

    def finish(self) -> None:
        """Wait for its end, and say if that is no success."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.lines += self.process.stdout
        if self.process.wait():
            print("".join(self.lines)[-4000:], file=sys.stderr)
            print(f"{self.run.backend} did not end with {self.run.model}; its output is above", file=sys.stderr)

    @property
    def is_finished(self) -> bool:
        """Whether `finish` has seen its end."""
        return self.process.returncode is not None


def measure_all(runs: list[Run], limit: float | None = None) -> list[dict[str, Any]]:
    """Return the results of all runs that measured something, within a number of seconds.

    Runs are timed one at a time. Those that share the GPU start at the same time, wait for their turn, and stay for all
    rounds. Others start in each round.
    """
    began, processes, late = time.perf_counter(), list[Process](), threading.Event()
    rounds = max(run.rounds for run in runs)
    results: list[list[dict[str, Any]]] = [[] for _ in runs]

    def say(run: Run, text: str) -> None:
        print(f"[{time.perf_counter() - began:5.1f} s] {run.model}, {run.backend}: {text}", file=sys.stderr, flush=True)

    def started(run: Run) -> Process:
        processes.append(Process(run))
        say(run, "starts")
        if late.is_set():
            processes[-1].kill()
        return processes[-1]

    def end() -> None:
        late.set()
        for process in processes:
            process.kill()

    timer = threading.Timer(limit or threading.TIMEOUT_MAX, end)
    timer.daemon = True
    timer.start()
    try:
        together = [started(run) if run.together else None for run in runs]
        for process in filter(None, together):
            if process.until(READY) is not None:
                say(process.run, "is ready")
        for number, i in turns(len(runs), rounds):
            run, process = runs[i], together[i]
            if process.is_finished if process else late.is_set():
                continue
            process = process or started(run)
            result = process.measure()
            ended = result is not None and result["ended"]
            of_rounds = f" in round {number + 1} of {rounds}" if rounds > 1 else ""
            say(run, ("is measured" if ended else "stopped early" if result else "failed") + of_rounds)
            if result:
                results[i].append(result)
                print(json.dumps(result), flush=True)
            if not ended or not run.together or number == rounds - 1:
                process.finish()
    finally:
        timer.cancel()
        for process in processes:
            process.close()
    return merged(results, rounds)


def merged(results: list[list[dict[str, Any]]], rounds: int) -> list[dict[str, Any]]:
    """Return one result of each run that measured something; say how many measured everything, unless all did."""
    found = [medians(of_run, rounds) for of_run in results if of_run]
    ended = sum(r["ended"] for r in found)
    if ended < len(results):
        early = f"; {len(found) - ended} stopped early" if ended < len(found) else ""
        print(f"{ended} of {len(results)} runs were measured{early}", file=sys.stderr)
    return found


def turns(num_runs: int, rounds: int) -> Iterator[tuple[int, int]]:
    """Return (round, run) in the order in which to measure: forwards, backwards, forwards, and so on."""
    for number in range(rounds):
        yield from ((number, i) for i in (reversed(range(num_runs)) if number % 2 else range(num_runs)))


def medians(results: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Return what a run measured in its rounds as one result: medians, and under `each_round` the values themselves."""
    merged = {name: value for r in reversed(results) for name, value in r.items()}
    merged["ended"] = len(results) == rounds and all(r["ended"] for r in results)
    if rounds == 1:
        return merged
    starts = [r["start"] for r in results]
    merged |= {"start": statistics.median(starts), "each_round": {"start": starts}}
    for name in EXPERIMENTS:
        values: dict[str, list[float]] = {}
        for point, value in (item for r in results for item in r.get(name, {}).items()):
            values.setdefault(point, []).append(value)
        if values:
            merged[name] = {point: statistics.median(of_point) for point, of_point in values.items()}
            merged["each_round"][name] = values
    return merged


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
        shared = f", contexts shared by {r['dcp']}" if r.get("dcp", 1) > 1 else ""
        keys = f", contexts of {r['keys']:,}" if r.get("context") else ""
        invariant = ", VLLM_BATCH_INVARIANT=1" if r.get("batch_invariant") else ""
        rounds = f", medians of {r['rounds']} rounds" if rounds_of(r) > 1 else ""
        title = f"{r['model']}, {layers} layers{cache}{compiled}{gpus}{shared}{keys}{invariant}{rounds}"
        groups.setdefault(title, []).append(r)
    return groups


def rounds_of(result: dict[str, Any]) -> int:
    """Return in how many rounds a result was to be measured; older results do not say that it is one."""
    return result.get("rounds", 1)


def columns_of(results: list[dict[str, Any]]) -> str:
    """Return the headings of columns."""
    return " | ".join(
        r["backend"]
        + ("" if r.get("prefill", True) else ", vLLM's prefill")
        + ("" if r.get("ended", True) else ", stopped early")
        for r in results
    )


def points_of(experiment: str, results: list[dict[str, Any]]) -> list[str]:
    """Return the points that any of the results has, in order."""
    return sorted({point for r in results for point in r[experiment]}, key=int)


def speed(experiment: str, value: float, base: float) -> float:
    """Return the speed of a value relative to another."""
    return value / base if experiment == "load" else base / value


def markdown(about: dict[str, Any], results: list[dict[str, Any]], plot: str | None = None) -> str:
    """Return the results as tables; in brackets the speed relative to the first backend."""
    first = results[0]
    start = "started together and timed one after the other" if first["together"] else "one after the other"
    rounds = ["Each round measured every backend, in alternating order."] if max(map(rounds_of, results)) > 1 else []
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
        *rounds,
        "Starting takes longer where compilers have kept nothing on disk.",
        "",
    ]
    for note in about.get("notes", []):
        lines += [note, ""]
    lines += [f"![Speed against length and load]({plot})", ""] if plot else []
    for title, group in groups_of(results).items():
        lines += [f"## {title}", "", *starting(group)]
        for name, what in EXPERIMENTS.items():
            measured = [r for r in group if r.get(name)]
            if not measured:
                continue
            lines += [f"| {what} | {columns_of(measured)} |", "| --- |" + " --- |" * len(measured)]
            for point in points_of(name, measured):
                base = measured[0][name].get(point)
                cells = [cell(name, r[name].get(point), base, r is measured[0]) for r in measured]
                lines.append(f"| {int(point):,} | " + " | ".join(cells) + " |")
            lines.append("")
        lines += in_common([r for r in group if r.get("tokens")])
    return "\n".join(lines)


def starting(results: list[dict[str, Any]]) -> list[str]:
    """Return a table of how long backends took to start."""
    return [
        f"| starting; seconds | {columns_of(results)} |",
        "| --- |" + " --- |" * len(results),
        "| until ready | " + " | ".join(f"{r['start']:.1f}" for r in results) + " |",
        "",
    ]


def in_common(results: list[dict[str, Any]]) -> list[str]:
    """Return a table of the greedy tokens that backends have in common with the first, or nothing."""
    if len(results) < 2:
        return []
    first = results[0]
    count = sum(map(len, first["tokens"]))
    lines = [
        f"| greedy tokens | in common with {first['backend']} | before the first difference | of log probabilities |"
    ]
    lines.append("| --- | --- | --- | --- |")
    for r in results[1:]:
        same = before = 0
        worst = 0.0
        for ours, theirs, a, b in zip(r["tokens"], first["tokens"], r["logprobs"], first["logprobs"], strict=True):
            equal = [x == y for x, y in zip(ours, theirs, strict=True)]
            until = equal.index(False) if False in equal else len(equal)
            same, before = same + sum(equal), before + until
            worst = max([worst, *(abs(x - y) for x, y in zip(a[:until], b[:until], strict=True))])
        lines.append(f"| {r['backend']} | {same:,} of {count:,} | {before:,} | at most {worst:.3f} |")
    return [
        *lines,
        "",
        "After a difference, a request's tokens are those of another text.",
        "The last column is the largest difference of log probabilities before.",
        "",
    ]


def cell(experiment: str, value: float | None, base: float | None, is_base: bool) -> str:
    """Return a cell of a table: the value and, in brackets, its speed relative to `base`."""
    if value is None:
        return ""
    text = f"{value:,.0f}" if experiment == "load" else f"{value:.3f}"
    return text if is_base or base is None else f"{text} ({100 * speed(experiment, value, base):.1f} %)"


def draw(results: list[dict[str, Any]]) -> Any:
    """Return a figure, or None if there is nothing to compare.

    For each model: speed by output length, relative to the first backend, and tokens per second by load.
    """
    from quire_tools.bench.plots import COLOURS, add_legend, panels

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
                points = [(int(p), 100 * speed(name, v, base[p])) for p, v in r[name].items() if p in base]
                ours = r["backend"] in QUIRE
                style = {"color": tints[r["backend"]], "marker": "o", "ms": 3.5, "lw": 2.2 if ours else 1.1}
                axis.plot([p for p, _ in points], [v for _, v in points], **style, label=label(r["backend"]))
            axis.set(
                xscale="log",
                xlabel=f"outputs of one request of {PROMPT} tokens",
                ylabel=f"% of {measured[0]['backend']}'s speed",
            )
            axis.set_xticks([int(p) for p in base], [f"{int(p):,}" for p in base])
            axis.minorticks_off()
        else:
            width = 0.8 / len(measured)
            at_point = {p: [r["backend"] for r in measured if p in r[name]] for p in points_of(name, measured)}
            for r in measured:
                at = [
                    i + width * (backends.index(r["backend"]) - (len(backends) - 1) / 2)
                    for i, (p, backends) in enumerate(at_point.items())
                    if p in r[name]
                ]
                bars = axis.bar(
                    at,
                    [r[name][p] for p in at_point if p in r[name]],
                    width,
                    color=tints[r["backend"]],
                    label=label(r["backend"]),
                )
                if r is not measured[0]:
                    of_base = {p: f"{100 * speed(name, v, base[p]):.1f}" for p, v in r[name].items() if p in base}
                    shown = [of_base.get(p, "") for p in at_point if p in r[name]]
                    axis.bar_label(bars, shown, fontsize=7, padding=1)
            note = f"\nabove bars: % of {measured[0]['backend']}" if len(measured) > 1 else ""
            axis.set(xlabel=f"requests at once, 64 to 1,024 tokens in and out{note}", ylabel="output tokens per second")
            axis.set_axisbelow(True)
            axis.set_xticks(range(len(at_point)), list(at_point))
            axis.grid(axis="x", visible=False)
            axis.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
        axis.set_title(textwrap.fill(title, 50))
    add_legend(figure)
    return figure


def label(backend: str) -> str:
    """Return a backend's name in a legend."""
    return "Quire" if backend in QUIRE else backend


def join(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of several invocations as if they were one."""
    by_name: dict[tuple[Any, ...], dict[str, Any]] = {}
    names = ("model", "layers", "kv_cache_dtype", "tensor_parallel", "compiled", "prefill", "backend", "dcp", "keys")
    for r in results:
        of_run = (r.get(name, getattr(Run, name, None)) for name in (*names, "batch_invariant", "rounds"))
        known = by_name.setdefault(tuple(of_run), r)
        for name in filter(r.__contains__, EXPERIMENTS):
            known[name] = known.get(name, {}) | r[name]
            if "each_round" in r:
                known["each_round"][name] = known["each_round"].get(name, {}) | r["each_round"][name]
        known |= {name: r[name] for name in ("tokens", "logprobs") if name in r}
        known["ended"] = known.get("ended", True) and r.get("ended", True)
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
    parser.add_argument("--context", nargs="+", type=int, help="requests at once with long contexts; no default")
    parser.add_argument("--greedy", type=int, default=0, help="outputs of each greedy prompt; default none")
    parser.add_argument("--keys", type=int, default=KEYS, help=f"of long contexts; default {KEYS}")
    parser.add_argument(
        "--weights",
        type=float,
        default=0.0,
        metavar="STD",
        help="write random weights, in which a layer's outputs have this standard deviation; 2 is enough; Llama alone",
    )
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or fp8")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share each model")
    parser.add_argument("--dcp", type=int, default=1, help="of these GPUs, how many share each context")
    parser.add_argument(
        "--workspace", type=int, default=0, metavar="MB", help="that vLLM's own backends find allocated; default none"
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="no torch.compile: starts faster, but is not what is served"
    )
    parser.add_argument(
        "--no-warmup", action="store_true", help="Quire compiles kernels when they are first launched: starts faster"
    )
    parser.add_argument(
        "--vllm-prefill", action="store_true", help="in models with latent attention, Quire leaves prefill to vLLM"
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="start all backends at the same time on one GPU, which has to hold them all; they are timed one by one",
    )
    parser.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="measure every backend N times, in turns; report medians"
    )
    parser.add_argument(
        "--batch-invariant", action="store_true", help="measure with VLLM_BATCH_INVARIANT=1, and otherwise with 0"
    )
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end what runs after this time; default none")
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
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    if args.weights and any(MODELS[model][0] is not LLAMA for model in args.models):
        parser.error("--weights must be left out for models other than Llama; their weights are vLLM's")
    asked = args.latency is not None or args.load is not None or args.prompt is not None or args.context or args.greedy
    if not asked:
        args.latency, args.load, args.prompt = LATENCY, [8, 32, 128, 256], 15000
    if args.join:
        parts = [json.loads(Path(path).read_text()) for path in args.join]
        about, results = parts[0]["about"], join([r for part in parts for r in part["results"]])
    elif importlib.util.find_spec("vllm") is None:
        sys.exit("vLLM is not installed here; pip install '.[vllm]' in the clone")
    else:
        runs = [
            Run(
                model=model,
                backend=backend,
                latency=tuple(args.latency or ()),
                load=tuple(args.load or ()),
                prompt=args.prompt or 0,
                context=tuple(args.context or ()),
                greedy=args.greedy,
                keys=args.keys,
                layers=args.layers,
                weights=args.weights,
                kv_cache_dtype=args.kv_cache_dtype,
                tensor_parallel=args.tensor_parallel,
                dcp=args.dcp,
                workspace=args.workspace,
                compiled=not args.no_compile,
                warm=not args.no_warmup,
                prefill=not (args.vllm_prefill and backend in QUIRE),
                together=args.together,
                batch_invariant=args.batch_invariant,
                rounds=args.rounds,
            )
            for model in args.models
            for backend in args.backends or (LATENT_BACKENDS if is_latent(model) else BACKENDS)
        ]
        about, results = provenance(args.commit), measure_all(runs, args.limit)
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
