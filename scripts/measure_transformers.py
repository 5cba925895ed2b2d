"""Time Transformers' continuous batching with several attention implementations, Quire's among them.

Random weights in Llama-3.1-8B's geometry; nothing is downloaded. A load is a number of requests of equal length that
arrive at once, with greedy sampling, through `model.generate_batch`. Each implementation runs each load twice, with
different prompts. The first run warms up: it allocates the cache, captures the graphs and compiles kernels. The second
run is reported: generated tokens, divided by the time from the first request's arrival to the last one's end, by the
engine's own clock.

    python scripts/measure_transformers.py --output transformers_h200.json          # all that are installed, on one GPU
    python scripts/measure_transformers.py --implementations quire sdpa --load 32x500+256
    python scripts/measure_transformers.py --tiny                                   # a small model on a CPU: seconds

Needs Transformers in Quire's range (`pip install '.[transformers]'` in the clone). No run starts after `--seconds`.
"""

import argparse
import gc
import json
import logging
import platform
import random
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from quire.integrations import transformers as quire_transformers

LLAMA: dict[str, Any] = {  # Llama-3.1-8B's sizes
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
}
NO_PREFIX = Version("5.19")  # from here on only eager's name has the prefix `paged|`
FLASH = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}  # package of each


@dataclass(frozen=True)
class Load:
    """Requests that arrive at once."""

    requests: int
    prompt: int  # tokens of each prompt
    new: int  # tokens that each request generates

    @classmethod
    def parse(cls, text: str) -> "Load":
        """Read REQUESTSxPROMPT+NEW, as in 32x500+256."""
        found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
        if not found or "0" in found.groups():
            raise argparse.ArgumentTypeError(f"load must be REQUESTSxPROMPT+NEW, as 32x500+256, got {text!r}")
        return cls(*map(int, found.groups()))

    @property
    def tokens(self) -> int:
        """Tokens that all requests generate."""
        return self.requests * self.new

    def __str__(self) -> str:
        return f"{self.requests} x ({self.prompt} + {self.new})"

    def prompts(self, seed: int, vocab_size: int) -> list[list[int]]:
        """Return random prompts."""
        draw = random.Random(seed)
        return [[draw.randrange(3, vocab_size) for _ in range(self.prompt)] for _ in range(self.requests)]


@dataclass(frozen=True)
class Result:
    """What one implementation did with one load."""

    implementation: str
    load: Load
    tokens: int  # generated in a run
    seconds: float  # of the second run, from the first request's arrival to the last one's end
    call_seconds: float  # of the second call of generate_batch, with start and stop of the engine's thread
    first_call_seconds: float  # of the first call, which warms up
    kernel: str | None  # Quire's, of the newest plan

    @property
    def speed(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds


LOADS = (Load(32, 500, 256), Load(128, 500, 128))
TINY_LOADS = (Load(3, 20, 6), Load(5, 12, 4))


def make_model(sizes: dict[str, Any], dtype: torch.dtype, device: str) -> transformers.PreTrainedModel:
    """Return a Llama model with random weights."""
    config = LlamaConfig(
        **sizes, max_position_embeddings=8192, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=None, pad_token_id=0
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def installed() -> list[str]:
    """Return the implementations that can run here, Quire first."""
    from importlib.util import find_spec

    flash = [name for name, package in FLASH.items() if torch.cuda.is_available() and find_spec(package)]
    return ["quire", *flash, "sdpa", "eager"]


def use(model: transformers.PreTrainedModel, implementation: str) -> None:
    """Set an attention implementation, under its name in this version of Transformers."""
    if implementation == "quire":
        quire_transformers.use(model)
        return
    prefixed = Version(transformers.__version__) < NO_PREFIX or implementation == "eager"
    model.set_attn_implementation(f"paged|{implementation}" if prefixed else implementation)


def no_switch() -> dict[str, Any]:
    """Return the option that keeps sdpa and eager from being replaced by flash-attn, if this version has it."""
    name = "auto_switch_to_flash"
    return {name: False} if name in ContinuousBatchingConfig.__dataclass_fields__ else {}


def run(model: Any, load: Load, seed: int, options: dict[str, Any]) -> tuple[float, float]:
    """Run a load once; return the seconds that its requests took, and those of the whole call."""
    generation = GenerationConfig(max_new_tokens=load.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = load.prompts(seed, model.config.vocab_size)
    began = time.perf_counter()
    results = model.generate_batch(
        prompts,
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**options),
        persistent_manager=True,  # the next run finds cache and graphs ready
    ).values()
    call_seconds = time.perf_counter() - began
    tokens = sum(len(result.generated_tokens) for result in results)
    if tokens != load.tokens:
        raise RuntimeError(f"the engine generated {tokens} tokens of {load.tokens}; its log is above")
    ends, begins = (result.lifespan[1] for result in results), (result.created_time for result in results)
    return max(ends) - min(begins), call_seconds


def measure(model: Any, implementation: str, load: Load, options: dict[str, Any]) -> Result:
    """Run a load twice, and report the second run."""
    use(model, implementation)
    try:
        _, first_call_seconds = run(model, load, 1, options)
        seconds, call_seconds = run(model, load, 2, options)
        plan = quire_transformers.last_plan() if implementation == "quire" else None
        kernel = None if plan is None else plan.kernel
        return Result(implementation, load, load.tokens, seconds, call_seconds, first_call_seconds, kernel)
    finally:
        model.destroy_cached_continuous_batching_manager()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def provenance(sizes: dict[str, Any], dtype: torch.dtype, device: str, commit: str | None) -> dict[str, Any]:
    """Return what a reader needs to run the same again."""
    if commit is None:
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or device,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "dtype": str(dtype).removeprefix("torch."),
        "model": sizes,
    }


def table(results: list[Result]) -> str:
    """Return tokens per second by load and implementation, as Markdown; in brackets Quire's multiple of it."""
    names = list(dict.fromkeys(r.implementation for r in results))
    by_load: dict[Load, dict[str, Result]] = {}
    for result in results:
        by_load.setdefault(result.load, {})[result.implementation] = result
    lines = ["| requests x (prompt + new), tokens/s | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for load, row in by_load.items():
        quire, cells = row.get("quire"), []
        for name in names:
            result = row.get(name)
            cell = "" if result is None else f"{result.speed:,.0f}"
            if result is not None and quire is not None and name != "quire":
                cell += f" ({quire.speed / result.speed:.1f}x)"
            cells.append(cell)
        lines.append(f"| {load} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("quire", *FLASH, "sdpa", "eager")
    loads = " ".join(f"{load.requests}x{load.prompt}+{load.new}" for load in LOADS)
    parser.add_argument("--implementations", nargs="+", choices=names, help="default: all that are installed")
    parser.add_argument("--load", nargs="+", type=Load.parse, help=f"REQUESTSxPROMPT+NEW; default: {loads}")
    parser.add_argument("--layers", type=int, help="number of the model's layers to keep")
    parser.add_argument(
        "--seconds", type=float, default=200.0, help="start no load later than this (default: %(default)s)"
    )
    parser.add_argument("--tiny", action="store_true", help="a small float32 model, small loads, on a CPU if no GPU")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--commit", help="Quire's commit, if there is no repository to ask")
    args = parser.parse_args(arguments)
    if not args.seconds >= 0:  # NaN too
        parser.error(f"--seconds must be at least 0, got {args.seconds}")
    if args.layers is not None and args.layers < 1:
        parser.error(f"--layers must be at least 1, got {args.layers}")
    if args.output:
        try:
            args.output.open("a").close()
        except OSError as error:
            parser.error(f"--output must be a file that can be written, got {args.output}: {error.strerror}")
    began = time.perf_counter()
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # it warns of each persistent manager
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        sys.exit("this model needs a GPU; on a CPU use --tiny")
    sizes, dtype, options = dict(LLAMA), torch.bfloat16, no_switch()
    if args.tiny:
        sizes, dtype, options = dict(TINY), torch.float32, options | {"num_blocks": 8, "max_batch_tokens": 128}
    if args.layers:
        sizes["num_hidden_layers"] = args.layers

    def say(text: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {text}", flush=True)

    say(f"building the model on {device}")
    model = make_model(sizes, dtype, device)
    results: list[Result] = []
    for load in args.load or (TINY_LOADS if args.tiny else LOADS):
        for implementation in args.implementations or installed():
            if time.perf_counter() - began > args.seconds:
                say(f"{implementation}, {load}: left out, {args.seconds:.0f} s have passed")
                continue
            say(f"{implementation}, {load}")
            try:
                results.append(measure(model, implementation, load, options))
            except (RuntimeError, ImportError, ValueError) as error:
                say(f"failed: {error}")
                continue
            last = results[-1]
            say(f"{last.speed:,.0f} tokens/s in {last.seconds:.2f} s; first call {last.first_call_seconds:.1f} s")
    if not results:
        sys.exit("no implementation could be measured; the reasons are above")
    print(table(results))
    if args.output:
        rows = [asdict(r) | {"tokens_per_second": r.speed} for r in results]
        about = provenance(sizes, dtype, device, args.commit)
        args.output.write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")
        say(f"wrote {args.output}")


if __name__ == "__main__":
    main()
