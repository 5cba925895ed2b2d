"""`quire warmup`: compile the kernels of a server, and export them, so that its start compiles nothing.

It compiles for the GPU of this machine, or for another one (`--target`), which needs no GPU. DIR gets a folder for the
Triton that is installed and the target, and a later run for other layers adds to it. `quire.warmup(..., kernels=DIR)`
loads it, and so does each warm-up of a server, of vLLM and of SGLang, where the variable QUIRE_KERNELS names it.
"""

import argparse
import ast
import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

import quire
from quire.cache_layout import LATENT_LAYOUTS, PAGED_LAYOUTS
from quire.cli.arguments import CommandError, require_packages, triton_package, whole_number
from quire.cli.status_line import StatusLine
from quire.compile_ahead import exported
from quire.dispatch.device import interprets

EXAMPLES = """examples:
  quire warmup --export kernels --limits 64 16384 16384 --spec num_q_heads=32 num_kv_heads=8 head_dim=128   # this GPU
  quire warmup --export kernels --target gfx942 --limits 64 8192 32768 --spec num_q_heads=8 num_kv_heads=1 head_dim=64
  QUIRE_KERNELS=kernels python server.py  # which then compiles nothing
"""
LARGE = 1 << 31  # bytes of a cache, as servers have it: on AMD's GPUs, kernels for smaller ones differ
LAYOUTS = tuple(dict.fromkeys([*PAGED_LAYOUTS, *LATENT_LAYOUTS]))
OPTIONS = "append", "batch_invariant", "intervals", "out_scale", "return_lse", "trees"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "warmup",
        help=summary,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--export", type=Path, required=True, metavar="DIR", help="the folder to write to")
    add("--target", metavar="NAME", help="such as sm90 or gfx942, as quire.targets names it (default: this GPU)")
    add("--spec", nargs="+", required=True, metavar="NAME=VALUE", help="arguments of quire.AttentionSpec")
    limits = "SEQS", "TOKENS", "KEYS"
    add("--limits", nargs=3, type=whole_number(1), required=True, metavar=limits, help="most of a batch; of a sequence")
    add(
        "--min-seq-len",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="least max_seq_len of a plan (default: 1; engines have 64)",
    )
    add("--page-size", type=whole_number(1), default=16, metavar="N", help="tokens per page (default: %(default)s)")
    add(
        "--layout",
        choices=LAYOUTS,
        default="NHD",
        metavar="NAME",
        help="of the pages: %(choices)s (default: %(default)s)",
    )
    add("--options", nargs="+", default=[], choices=OPTIONS, metavar="NAME", help=", ".join(OPTIONS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    require_packages("warmup", triton_package(), "triton")
    if interprets():
        raise CommandError("TRITON_INTERPRET must be unset to compile, got 1; unset it")
    from quire.triton_internals import caching_in, current_target

    spec = spec_of(args.spec)
    most = zip(("max_num_seqs", "max_num_tokens", "max_seq_len"), args.limits, strict=True)
    options: dict[str, Any] = {**dict(most), "min_seq_len": args.min_seq_len, **dict.fromkeys(args.options, True)}
    os.environ.pop(exported.VARIABLE, None)  # what it names is not exported too
    with contextlib.ExitStack() as stack, StatusLine() as status:
        stack.enter_context(caching_in(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        device = stack.enter_context(compiling_for(args.target))
        target, made_for = current_target(), []
        with contextlib.suppress(*exported.UNFIT):  # none yet, or what another version exported
            made_for += exported.load_for(args.export, target).get("made for", [])
        try:
            names = quire.warmup(spec, pages(spec, args, target, device), **options, progress=status)
        except (TypeError, ValueError, quire.UnsupportedError) as error:
            raise CommandError(str(error)) from None
        words = f"{spec}, pages of {args.page_size} in {args.layout}, {options}"
        status("writing")
        here, count, size = exported.write(args.export, target, [*dict.fromkeys([*made_for, words])])
        status.say(f"{here}: {count} kernels, {size / 1e6:.2f} MB, of which this warm-up has {len(names)} launches")
    return 0


def compiling_for(name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which launches are compiled for a target; it yields the device of their tensors."""
    from quire.kernels.launcher import compile_only
    from quire.targets import TARGETS

    if name is None and torch.cuda.is_available():
        return contextlib.nullcontext("cuda")
    if name not in TARGETS:
        where = "" if name is None else " or left out for this machine's GPU"
        raise CommandError(f"--target must be one of {', '.join(TARGETS)}{where}, got {name}; name the server's GPU")
    target = TARGETS[name]

    @contextlib.contextmanager
    def cross():
        with compile_only(target.name, target.gpu, target.properties):
            yield "cpu"

    return cross()


def spec_of(words: list[str]) -> quire.AttentionSpec:
    """Return the spec that the arguments of --spec describe."""
    values: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        dtype = getattr(torch, text, None)
        if name == "kv_format":  # some names are those of dtypes
            values[name] = text
            continue
        try:
            values[name] = dtype if isinstance(dtype, torch.dtype) else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise CommandError(f"--spec must have NAME=VALUE, got {word!r}; for instance head_dim=128") from None
    try:
        return quire.AttentionSpec(**values)
    except (TypeError, ValueError, quire.UnsupportedError) as error:
        raise CommandError(f"--spec must be a spec: {error}") from None


def pages(spec: quire.AttentionSpec, args: argparse.Namespace, target: Any, device: str) -> quire.PagedKVCache:
    """Return a cache as a server has it. On the CPU, memory that nothing writes to is not taken."""
    row = spec.bytes_per_token // (1 if spec.latent else 2)
    num_pages = 4 if target.backend == "cuda" else LARGE // (args.page_size * row) + 1
    return quire.PagedKVCache.empty(spec, num_pages, args.page_size, layout=args.layout, device=device)
