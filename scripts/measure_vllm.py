"""Time vLLM end to end with several attention backends on one GPU: random weights in a real model's geometry, vLLM's own compilation and CUDA graphs.

Three experiments, each with every backend in a process of its own, one after the other:

* latency: one request of 500 tokens; seconds until its 100th, 1,600th, ... output (section 7.4 of arXiv 2511.11581);
* load: so many requests at once, prompts and outputs of unequal lengths; output tokens per second of the second of two runs;
* prompt: one long prompt with 8 outputs; seconds, the median of three.

    python scripts/measure_vllm.py                                                       # all of it, FLASH_ATTN, TRITON_ATTN and Quire
    python scripts/measure_vllm.py --backends FLASH_ATTN CUSTOM --latency 100 1600       # two backends, only this
    python scripts/measure_vllm.py --model qwen2.5-7b --load 8 32 128 256 --out docs/results/vllm_qwen_h200
    python scripts/measure_vllm.py --join fa.json quire.json --out docs/results/vllm_h200  # runs of single backends, one after the other on one machine
    python scripts/measure_vllm.py --layers 4 --latency 100 --prompt 4096                # a first look: four layers of the model

Needs vLLM with `quire` beside it (CUSTOM is Quire in 0.20; later versions call it QUIRE).
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
from pathlib import Path

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0, "head_dim": 128, "max_position_embeddings": 131072}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1000000.0, "max_position_embeddings": 32768}
MODELS = {  # hidden size, feed-forward size, layers, query heads, KV heads, vocabulary
    "llama-3.1-8b": (LLAMA, (4096, 14336, 32, 32, 8, 128256)),
    "qwen2.5-7b": (QWEN, (3584, 18944, 28, 28, 4, 152064)),
    "qwen2.5-1.5b": (QWEN, (1536, 8960, 28, 12, 2, 151936)),
}
PROMPT = 500  # tokens of the latency experiment's prompt
MARK = "measured: "


def write_config(folder: str, name: str, layers: int | None) -> None:
    """Write a model's config.json; its weights are random."""
    base, sizes = MODELS[name]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    config = base | dict(zip(names, sizes, strict=True)) | {"rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    config |= {"bos_token_id": 1, "eos_token_id": 2}
    if layers:
        config["num_hidden_layers"] = layers
    Path(folder, "config.json").write_text(json.dumps(config))


def tokens(count: int, seed: int) -> dict:
    """Return a prompt of random tokens."""
    draw = random.Random(seed)
    return {"prompt_token_ids": [draw.randrange(10, 30000) for _ in range(count)]}


def measure(args: argparse.Namespace) -> dict:
    """Run the experiments with one backend, in this process."""
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    longest = max([PROMPT + max(args.latency, default=0), args.prompt + 8, 2048]) + 16
    graphs = sorted({1, 2, 4, 8, *(n for most in args.load for n in range(16, most + 1, 16)), *args.load})
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, args.model, args.layers)
        llm = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", attention_backend=args.worker, max_model_len=longest,
            max_num_seqs=max([*args.load, 8]), enable_prefix_caching=False, kv_cache_dtype=args.kv_cache_dtype, seed=0,
            compilation_config={"cudagraph_capture_sizes": graphs} | ({"mode": 0, "cudagraph_mode": "FULL"} if args.no_compile else {}),
        )  # fmt: skip
    result = {"backend": args.worker, "start": time.perf_counter() - began, "vllm": vllm.__version__, "torch": torch.__version__}
    result["device"] = torch.cuda.get_device_name()

    def sampling(count: int) -> SamplingParams:
        return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)

    llm.generate([tokens(PROMPT, 1)], sampling(16), use_tqdm=False)
    if args.latency:
        engine, marks = llm.llm_engine, {}
        began = time.perf_counter()
        engine.add_request("latency", tokens(PROMPT, 2), sampling(max(args.latency)))
        while engine.has_unfinished_requests():
            for output in engine.step():
                done = len(output.outputs[0].token_ids)
                for point in args.latency:
                    if done >= point and point not in marks:
                        marks[point] = time.perf_counter() - began
        result["latency"] = marks
    if args.load:
        result["load"] = {}
        for count in args.load:
            draw = random.Random(count)
            lengths = [(draw.randint(64, 1024), draw.randint(64, 1024)) for _ in range(count)]
            prompts, samplings = [tokens(n, i) for i, (n, _) in enumerate(lengths)], [sampling(n) for _, n in lengths]
            for _ in range(2):
                began = time.perf_counter()
                llm.generate(prompts, samplings, use_tqdm=False)
                seconds = time.perf_counter() - began
            result["load"][count] = sum(n for _, n in lengths) / seconds
    if args.prompt:
        times = []
        for i in range(4):
            began = time.perf_counter()
            llm.generate([tokens(args.prompt, i)], sampling(8), use_tqdm=False)
            times.append(time.perf_counter() - began)
        result["prompt"] = {args.prompt: statistics.median(times[1:])}
    return result


def provenance(args: argparse.Namespace) -> dict:
    """Return what a reader needs to run the same again."""

    def said(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
        except OSError:
            return ""

    from importlib.metadata import version

    return {
        "date": time.strftime("%Y-%m-%d"), "commit": args.commit or said("git", "rev-parse", "--short", "HEAD"), "python": platform.python_version(),
        "triton": version("triton"), "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "model": args.model, "layers": args.layers or MODELS[args.model][1][2], "kv_cache_dtype": args.kv_cache_dtype,
        "compilation": "none" if args.no_compile else "vLLM's default",
    }  # fmt: skip


def markdown(about: dict, results: list[dict]) -> str:
    """Return the results as tables; in brackets the speed relative to the first backend."""
    first = results[0]
    lines = [f"# vLLM {first['vllm']} end to end", ""]
    lines += [f"{first['device']}, driver {about['driver']}, torch {first['torch']}, Triton {about['triton']}, Quire {about['commit']}, {about['date']}."]
    lines += [f"{about['model']}, {about['layers']} layers, random bfloat16 weights, KV cache {about['kv_cache_dtype']}; compilation: {about['compilation']}."]
    lines += ["CUSTOM is Quire. In brackets: speed relative to the first column. Latencies are of one run, load of the second of two, prompts the median of"]
    lines += ["three; each backend in a process of its own, one after the other on one machine.", ""]
    titles = {
        "latency": f"one request, {PROMPT} tokens; seconds until output number",
        "load": "requests at once, 64 to 1,024 tokens in and out each; output tokens per second",
        "prompt": "one prompt of so many tokens, 8 outputs; seconds",
    }
    for name, title in titles.items():
        if not first.get(name):
            continue
        lines += [f"| {title} | " + " | ".join(r["backend"] for r in results) + " |", "| --- |" + " --- |" * len(results)]
        for point in first[name]:
            cells = []
            for r in results:
                value, base = r[name][point], first[name][point]
                speed = value / base if name == "load" else base / value
                cells.append(f"{value:,.0f}" if name == "load" else f"{value:.3f}")
                cells[-1] += "" if r is first else f" ({100 * speed:.1f} %)"
            lines.append(f"| {int(point):,} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def join(results: list[dict], more: list[dict]) -> list[dict]:
    """Return results with those of other runs, experiment by experiment, backend by backend."""
    by_name = {r["backend"]: r for r in results}
    for r in more:
        known = by_name.setdefault(r["backend"], r)
        for name in ("latency", "load", "prompt"):
            known[name] = known.get(name, {}) | r.get(name, {})
    return list(by_name.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="only so many of the model's layers")
    parser.add_argument("--backends", nargs="+", default=["FLASH_ATTN", "TRITON_ATTN", "CUSTOM"])
    parser.add_argument("--latency", nargs="*", type=int, help="output numbers to time; default 100 1600 12800 if no experiment is named")
    parser.add_argument("--load", nargs="*", type=int, help="requests at once; default 32")
    parser.add_argument("--prompt", type=int, help="tokens of the long prompt; default 15000")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or fp8")
    parser.add_argument("--no-compile", action="store_true", help="no torch.compile: starts faster, but is not what is served")
    parser.add_argument("--out", help="path of the results without its ending; .json and .md are written")
    parser.add_argument("--commit", help="Quire's commit, where there is no repository to ask")
    parser.add_argument("--join", nargs="+", help="measure nothing; make one result of these .json files, which are one backend's each")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.latency is None and args.load is None and args.prompt is None:
        args.latency, args.load, args.prompt = [100, 1600, 12800], [32], 15000
    args.latency, args.load, args.prompt = args.latency or [], args.load or [], args.prompt or 0
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if args.worker:
        print(MARK + json.dumps(measure(args)), flush=True)
        return
    about, results = ({}, []) if args.join else (provenance(args), [])
    for path in args.join or []:
        part = json.loads(Path(path).read_text())
        about = part["about"]
        results = join(results, part["results"])
    for backend in [] if args.join else args.backends:
        process = subprocess.run([sys.executable, *sys.argv, "--worker", backend], stdout=subprocess.PIPE, text=True)
        lines = [line.removeprefix(MARK) for line in process.stdout.splitlines() if line.startswith(MARK)]
        if process.returncode or not lines:
            print(process.stdout[-4000:])
            sys.exit(f"{backend} failed; its output is above")
        results.append(json.loads(lines[-1]))
        print(json.dumps(results[-1]), flush=True)
    text = markdown(about, results)
    print(text)
    if args.out:
        Path(f"{args.out}.json").write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
        Path(f"{args.out}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
