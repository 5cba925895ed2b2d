"""`quire generate`: continue several prompts as one continuously batched run of a Hugging Face model through Quire.

The engine is Transformers'; this file loads a model, feeds the prompts, shows the tokens as they come, and compares them with eager attention.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources

PROMPTS = (
    'def read_lines(path):\n    """',
    "import os\nimport sys\n\n\nclass ",
    "    for key, value in ",
    'def quote(s, safe="/"):\n    """Replace special characters in string using the %xx escape.\n\n    ',
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def __repr__(self):\n        return ",
)
SMALL = 20_000_000  # parameters of a model whose matrices are too small to be shared among CPU threads
EXAMPLES = """examples:
  quire generate                                             # the embedded model, a few prompts of its kind
  quire generate --prompt 'def main(' --max-new-tokens 200
  quire generate --model ./Llama-3.2-1B --prompt 'Once upon a time' --prompt 'The capital of France is' --dtype bfloat16
"""


def add_parser(subparsers) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "generate", help="continue prompts with a Hugging Face model", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--model", help="checkpoint folder or hub name; the embedded model when not given")
    parser.add_argument("--prompt", action="append", help="text to continue; may be repeated")
    parser.add_argument(
        "--max-new-tokens", type=int, default=96, help="tokens to write per prompt (default: %(default)s)"
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
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda when there is one"
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page of the cache (default: %(default)s)")
    parser.add_argument("--no-compare", action="store_true", help="skip the second run with eager attention")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return its exit code: 1 when the tokens differ from eager attention's."""
    try:
        import transformers
        from rich.console import Console
    except ImportError as error:
        print(
            f"quire generate needs {error.name}, which is not installed; pip install 'quire[transformers]'",
            file=sys.stderr,
        )
        return 2
    import torch

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console()
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    for option, wrong, contract in (
        ("--device", device == "cuda" and not torch.cuda.is_available(), "cpu or auto where there is no GPU"),
        ("--max-new-tokens", args.max_new_tokens < 1, "at least 1"),
        ("--temperature", not args.temperature >= 0, "at least 0"),
        ("--page-size", args.page_size < 4, "at least 4, the least that Transformers takes"),
    ):
        if wrong:
            print(f"{option} must be {contract}, got {getattr(args, option[2:].replace('-', '_'))}", file=sys.stderr)
            return 2
    folder = args.model or str(resources.files("quire") / "demo_model")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = (
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
            .to(device)
            .eval()
        )
    except (OSError, ValueError) as error:
        print(f"--model must be a checkpoint that Transformers loads, got {folder!r}: {error}", file=sys.stderr)
        return 2
    prompts = args.prompt or list(PROMPTS)
    inputs = [tokenizer(p)["input_ids"] for p in prompts]
    empty = [p for p, ids in zip(prompts, inputs, strict=True) if not ids]
    if empty:
        print("--prompt must hold at least one token, got none; give some text", file=sys.stderr)
        return 2
    with cpu_threads(model):
        return generate(model, tokenizer, prompts, inputs, args, console)


@contextmanager
def cpu_threads(model) -> Iterator[None]:
    """Run a small model on the CPU in one thread: several would mostly wait for each other, most of all beside other programs."""
    import torch

    threads = torch.get_num_threads()
    if model.device.type == "cpu" and model.num_parameters() < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def generate(model, tokenizer, prompts, inputs, args, console) -> int:
    """Generate, print, compare; return the exit code."""
    from quire import UnsupportedError
    from quire.integrations import transformers as hook

    try:
        name = hook.use(model)
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 2
    console.print(
        f"{args.model or 'embedded model'} on {model.device} in {args.dtype}, {len(prompts)} prompts, attention {name!r}",
        style="dim",
    )
    begun = time.perf_counter()
    try:
        written = stream(model, tokenizer, prompts, inputs, args, console)
    except EngineError as error:
        print(f"the engine stopped: {error}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - begun
    for prompt, tokens in zip(prompts, written, strict=True):
        console.rule()
        console.print(prompt, style="bold", end="", markup=False, highlight=False, soft_wrap=True)
        console.print(tokenizer.decode(tokens, skip_special_tokens=True), markup=False, highlight=False, soft_wrap=True)
    console.rule()
    total = sum(map(len, written))
    console.print(f"{total} tokens in {seconds:.1f} s: {total / seconds:.0f} tokens/s", highlight=False)
    console.print(repr(hook.last_plan()), markup=False, highlight=False, soft_wrap=True)
    if args.no_compare or args.temperature > 0:
        return 0
    return compare(model, inputs, written, args, console)


class EngineError(RuntimeError):
    """Transformers' continuous batching gave up."""


def generation_config(args: argparse.Namespace, model):
    """Return how tokens are chosen; where they end is the model's own."""
    from transformers import GenerationConfig

    eos, pad = model.generation_config.eos_token_id, model.generation_config.pad_token_id
    how = {"do_sample": True, "temperature": args.temperature} if args.temperature > 0 else {"do_sample": False}
    return GenerationConfig(
        max_new_tokens=args.max_new_tokens, eos_token_id=eos, pad_token_id=0 if pad is None else pad, **how
    )


def stream(model, tokenizer, prompts, inputs, args, console) -> list[list[int]]:
    """Generate all prompts in one continuously batched run, showing tokens as they come; return each prompt's new tokens."""
    from rich.console import Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    pages = [-(-(len(ids) + args.max_new_tokens) // args.page_size) + 1 for ids in inputs]
    page_size = (
        "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
    )  # renamed in 5.18
    if model.device.type == "cuda":
        by_device = {"max_blocks_per_request": max(pages)}  # how wide the page table is that a GPU decodes by
    else:
        by_device = {
            "use_cuda_graph": False,
            "use_async_batching": False,
        }  # or Transformers would try, where there is a GPU beside the CPU in use
    config = ContinuousBatchingConfig(
        **{page_size: args.page_size}, num_blocks=2 * sum(pages) + 8, max_batch_tokens=512, **by_device
    )
    progress = Progress(TextColumn("tokens"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
    task = progress.add_task("", total=args.max_new_tokens * len(inputs))
    written: dict[str, list[int]] = {}
    finished: set[str] = set()
    shown = [0] * len(inputs)  # characters already printed, where there is no terminal

    def view() -> Group:
        lines = []
        for prompt, tokens in zip(prompts, written.values(), strict=False):
            text = (prompt + tokenizer.decode(tokens, skip_special_tokens=True)).splitlines() or [""]
            lines.append(Text(text[-1], overflow="ellipsis", no_wrap=True, style="dim" if not tokens else ""))
        return Group(*lines, progress)

    with (
        model.continuous_batching_context_manager(
            generation_config(args, model), continuous_batching_config=config, warmup=False
        ) as manager,
        Live(view(), console=console, refresh_per_second=12, transient=True) as live,
    ):
        ids = manager.add_requests(inputs, max_new_tokens=args.max_new_tokens, streaming=True)
        written.update((i, []) for i in ids)
        while len(finished) < len(ids):
            result = manager.get_result(timeout=0.5)
            if result is None:
                if not manager.is_running():
                    raise EngineError("not all prompts were finished; what it said is above")
                continue
            if result.error:
                raise EngineError(result.error)
            written[result.request_id] = list(result.generated_tokens)
            if result.is_finished():
                finished.add(result.request_id)
            progress.update(task, completed=sum(map(len, written.values())))
            if console.is_terminal:
                live.update(view())
            else:
                print_new_lines(
                    tokenizer, ids.index(result.request_id), written[result.request_id], shown, result.is_finished()
                )
    return [written[i] for i in ids]


def print_new_lines(tokenizer, index: int, tokens: list[int], shown: list[int], finished: bool) -> None:
    """Print the lines that a prompt's text has completed, marked with the prompt's number."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    end = len(text) if finished else text.rfind("\n") + 1
    for line in text[shown[index] : end].splitlines():
        print(f"[{index}] {line}", flush=True)
    shown[index] = max(end, shown[index])


def compare(model, inputs, written, args, console) -> int:
    """Generate again with eager attention, one prompt at a time; say whether the tokens are equal."""
    import torch
    from rich.progress import track

    model.set_attn_implementation("eager")
    different = []
    for i, ids in enumerate(track(inputs, "eager attention", console=console, transient=True)):
        prompt = torch.tensor([ids], device=model.device)
        config = generation_config(args, model)
        eager = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)[
            0, len(ids) :
        ].tolist()
        if eager != written[i]:
            different.append(
                (
                    i,
                    next(
                        (n for n, (a, b) in enumerate(zip(eager, written[i], strict=False)) if a != b),
                        min(len(eager), len(written[i])),
                    ),
                )
            )
    if not different:
        console.print("[green]equal[/green] to the same model with eager attention, token for token")
        return 0
    for i, n in different:
        console.print(
            f"[red]different[/red] from eager attention: prompt {i} from token {n} on; in half precision near ties may round apart"
        )
    return 1
