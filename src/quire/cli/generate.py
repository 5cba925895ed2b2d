"""`quire generate`: continue several prompts in one continuously batched run of a Hugging Face model through Quire.

The engine is Transformers'. The command loads a model, feeds the prompts, shows the tokens as they come, and compares
them with those of eager attention.
"""

import argparse
import logging
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.cli.arguments import CommandError, require_packages
from quire.cli.threads import one_thread
from quire.version import packages_of

if TYPE_CHECKING:  # imported when the command runs
    from rich.console import Console
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from quire.cli.generate_engine import CausalLM

EXAMPLES = """examples:
  quire generate                        # the demo model and a few prompts; needs an editable install of a clone
  quire generate --model src/quire/demo_model     # the same after any install, in the clone's folder
  quire generate --prompt 'def main(' --max-new-tokens 200
  quire generate --model ./Llama-3.2-1B --prompt 'Once upon a time' --prompt 'The capital of France is' --dtype bfloat16
"""
PROMPTS = (
    'def read_lines(path):\n    """',
    "import os\nimport sys\n\n\nclass ",
    "    for key, value in ",
    'def quote(s, safe="/"):\n    """Replace special characters in string using the %xx escape.\n\n    ',
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def __repr__(self):\n        return ",
)
DEMO_MODEL = Path(__file__).parent.parent / "demo_model"  # in a clone; a wheel has none
MIN_PAGE_SIZE, MAX_PAGE_SIZE = 4, 1024  # Transformers takes no smaller pages; larger ones would only waste memory
HUB_SECONDS = 10.0  # for the hub's first answer
SMALL_MODEL = 20_000_000  # parameters, up to which the matrices are too small to be shared among CPU threads


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "generate",
        help=summary,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", help="checkpoint folder or hub name; if left out, the demo model, which an editable install has"
    )
    parser.add_argument("--prompt", action="append", help="text to continue; may be repeated")
    parser.add_argument(
        "--max-new-tokens", type=int, default=96, help="tokens to generate per prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default), above 0 samples"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of weights and cache (default: %(default)s)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda when there is a GPU"
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page of the cache (default: %(default)s)")
    parser.add_argument("--no-compare", action="store_true", help="skip the second run with eager attention")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 when the tokens differ from those of eager attention."""
    check_numbers(args)
    prompts: list[str] = args.prompt or [*PROMPTS]
    check_text(prompts)
    require_packages("generate", packages_of("transformers"), "transformers", "rich", "psutil")

    from quire.cli.console import CommandConsole

    console = CommandConsole()
    with console.status("loading the model"):
        silence_transformers()
        model, tokenizer = load(args.model, args.dtype, args.device)
    token_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    check_lengths(token_ids, args.max_new_tokens, model)
    is_small = model.device.type == "cpu" and model.num_parameters() <= SMALL_MODEL
    with one_thread(is_small):
        return generate(model, tokenizer, prompts, token_ids, args, console)


def check_numbers(args: argparse.Namespace) -> None:
    """Raise CommandError for a number out of range, or for a GPU that is not there."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device must be cpu or auto where there is no GPU, got cuda; leave it out")
    if args.max_new_tokens < 1:
        raise CommandError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}; ask for more")
    if not 0 <= args.temperature < math.inf:
        raise CommandError(
            f"--temperature must be a number from 0 up, got {args.temperature}; 0 takes the likeliest token"
        )
    if not MIN_PAGE_SIZE <= args.page_size <= MAX_PAGE_SIZE:
        raise CommandError(
            f"--page-size must be from {MIN_PAGE_SIZE} to {MAX_PAGE_SIZE}, got {args.page_size}; 16 serves every model"
        )


def check_text(prompts: list[str]) -> None:
    """Raise CommandError for a prompt of bytes that are no text."""
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:  # Python smuggles bytes that it cannot decode as lone surrogates
            raise CommandError(f"--prompt must be valid UTF-8, got {os.fsencode(prompt)!r}; give some text") from None


def check_lengths(token_ids: list[list[int]], max_new_tokens: int, model: "CausalLM") -> None:
    """Raise CommandError for an empty prompt, or one that leaves too little room among the model's positions."""
    if not all(token_ids):
        raise CommandError("--prompt must have at least one token, got none; give some text")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None:
        return
    longest = max(map(len, token_ids))
    if longest >= limit:
        raise CommandError(
            f"--prompt must have fewer tokens than the model's {limit} positions, got {longest}; shorten it"
        )
    if longest + max_new_tokens > limit:
        raise CommandError(
            f"--max-new-tokens must be at most {limit - longest}, since the model has {limit} positions and the "
            f"longest prompt {longest} tokens, got {max_new_tokens}; ask for fewer"
        )


def silence_transformers() -> None:
    """Keep Transformers from logging, with tracebacks, what the command reports itself."""
    import transformers

    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


def load(name: str | None, dtype: str, device: str) -> "tuple[CausalLM, PreTrainedTokenizerBase]":
    """Load a model and its tokenizer; those of the demo model where `name` is None."""
    import transformers

    if name == "":
        raise CommandError("--model must be a checkpoint folder or a hub name, got ''; leave it out for the demo model")
    if name is None and not DEMO_MODEL.is_dir():
        raise CommandError(
            "--model must be given where Quire was installed from a wheel, got nothing: the demo model is in Quire's "
            "repository; name its folder src/quire/demo_model (in the clone: quire generate --model "
            "src/quire/demo_model), or another checkpoint or hub model"
        )
    if name is not None and is_path(name) and not Path(name).exists():
        raise CommandError(
            f"--model must be a checkpoint that Transformers loads, got {name!r}, which is not there; "
            "name a folder or a model of the hub"
        )
    if name is not None and not Path(name).exists():
        check_hub(name)
    folder = str(DEMO_MODEL) if name is None else name
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model: CausalLM = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        return model.to(device).eval(), tokenizer
    except Exception as error:  # safetensors and tokenizers have exceptions of their own, without a common base
        raise CommandError(
            f"--model must be a checkpoint that Transformers loads, got {folder!r}: {error}; see that it is complete"
        ) from None


def check_hub(name: str) -> None:
    """Raise CommandError unless the hub, or its cache here, has a model. Transformers would ask for a minute."""
    import huggingface_hub

    try:
        if not isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)
    except Exception as error:  # of the hub, of its client, and of the client's client
        raise CommandError(
            f"--model must be a folder here or a model of the hub, got {name!r}: {error}; see its name and the network"
        ) from None


def is_path(name: str) -> bool:
    """Return whether a name can only be a path: names of the hub are `model` or `owner/model`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def generate(
    model: "CausalLM",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: list[str],
    token_ids: list[list[int]],
    args: argparse.Namespace,
    console: "Console",
) -> int:
    """Generate, print and compare; return the exit code."""
    from quire import UnsupportedError
    from quire.cli.generate_engine import EngineError, generation_config, stream
    from quire.integrations import transformers as integration

    try:
        implementation = integration.use(model)
    except UnsupportedError as error:
        raise CommandError(str(error)) from None
    name = args.model or "demo model"
    console.print(
        f"{name} on {model.device} in {args.dtype}, {len(prompts)} prompts, attention {implementation!r}",
        style="dim",
        markup=False,
    )
    config = generation_config(model, args.max_new_tokens, args.temperature)

    def keep(tokens: list[list[int]]) -> None:
        if console.is_terminal:  # else every line was printed when it was complete
            print_texts(tokenizer, prompts, tokens, console)

    begun = time.perf_counter()
    try:
        generated = stream(model, tokenizer, prompts, token_ids, config, args.page_size, console, keep)
    except EngineError as error:
        raise CommandError(f"the engine stopped: {error}") from None
    seconds = time.perf_counter() - begun
    print_texts(tokenizer, prompts, generated, console)
    total = sum(map(len, generated))
    console.print(f"{total} tokens in {seconds:.1f} s: {total / seconds:.0f} tokens/s", highlight=False)
    console.print(str(integration.last_plan()), markup=False, highlight=False, soft_wrap=True)
    if args.no_compare or args.temperature > 0:
        return 0
    return compare(model, token_ids, generated, config, console)


def print_texts(
    tokenizer: "PreTrainedTokenizerBase", prompts: list[str], generated: list[list[int]], console: "Console"
) -> None:
    """Print each prompt with the text that continues it."""
    for prompt, tokens in zip(prompts, generated, strict=True):
        console.rule()
        console.print(prompt, style="bold", end="", markup=False, highlight=False, soft_wrap=True)
        console.print(tokenizer.decode(tokens, skip_special_tokens=True), markup=False, highlight=False, soft_wrap=True)
    console.rule()


def compare(
    model: "CausalLM",
    token_ids: list[list[int]],
    generated: list[list[int]],
    config: "GenerationConfig",
    console: "Console",
) -> int:
    """Generate again with eager attention, one prompt at a time; print where tokens differ, return the exit code."""
    from rich.progress import track

    model.set_attn_implementation("eager")
    different = []
    for i, ids in enumerate(track(token_ids, "eager attention", console=console, transient=True)):
        prompt = torch.tensor([ids], device=model.device)
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
        expected = out[0, len(ids) :].tolist()
        if expected != generated[i]:
            different.append((i, first_difference(expected, generated[i])))
    if not different:
        console.print("[green]equal[/green] to the same model with eager attention, token for token")
        return 0
    for i, position in different:
        console.print(
            f"[red]different[/red] from eager attention: prompt {i} from token {position} on; "
            "in half precision, near ties may round differently"
        )
    return 1


def first_difference(a: list[int], b: list[int]) -> int:
    """Return the first position at which two lists differ."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
