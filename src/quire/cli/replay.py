"""`quire replay`: run a recorded call of `quire.attention` again on this machine, and judge it by the float64 oracle.

`quire.debug.record` writes the file. The tensors have the strides and shared storages of the recorded call. Numbers
that were not recorded are random, and memory that must not be read holds NaN. The file need not be trusted: nothing in
it is run as code.
"""

import argparse
from pathlib import Path

import torch

from quire.cli.arguments import CommandError
from quire.cli.status_line import StatusLine
from quire.cli.threads import one_thread
from quire.debug import Call, Replay, load, replay
from quire.debug.recording import describe_device, versions
from quire.errors import UnsupportedError

EXAMPLES = """examples:
  quire replay call.quire               # on the GPU if there is one, else through PyTorch
  quire replay call.quire --device cpu
  quire replay call.quire --replan      # with the plan that this version of Quire makes
  TRITON_INTERPRET=1 quire replay call.quire    # the Triton kernels on a CPU
"""
GIB = 1 << 30


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "replay",
        help=summary,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="what quire.debug.record has written")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda when there is a GPU"
    )
    parser.add_argument("--replan", action="store_true", help="make a plan even where the recorded launch can run")
    parser.add_argument(
        "--memory",
        type=gibibytes,
        default=4.0,
        metavar="GIB",
        help="renumber the pages of a cache that takes more than this (default: %(default)g)",
    )
    parser.set_defaults(run=run)


def gibibytes(text: str) -> float:
    """Read a size in GiB, for argparse."""
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 2**20:
        raise argparse.ArgumentTypeError(f"must be a number of GiB above 0, got {text!r}")
    return size


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 when the result is wrong, or there is none."""
    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise CommandError("--device must be cpu or auto where there is no GPU, got cuda; leave it out")
    device = "cpu" if args.device == "cpu" or not has_gpu else "cuda"
    with one_thread(device == "cpu"), StatusLine() as status:
        status("reading the file")
        try:
            call = load(args.file)
        except ValueError as error:
            raise CommandError(str(error)) from None
        for line in describe(call, args.file):
            status.say(line)
        try:
            done = replay(call, device, replan=args.replan, max_bytes=int(args.memory * GIB), on_step=status)
        except ValueError as error:
            raise CommandError(f"{args.file} must be a call that can be made again here: {error}") from None
        except (UnsupportedError, RuntimeError) as error:  # torch's, which also says so of memory that there is not
            raise CommandError(f"{args.file} cannot be replayed on {device}: {error}") from None
    print("\n".join(conclude(call, done, torch.device(device))))
    return 0 if done.passed else 1


def describe(call: Call, file: Path) -> list[str]:
    """Return a description of the recorded call, a sentence a line."""
    packages = ", ".join(f"{name} {version}" for name, version in call.versions.items())
    if call.has_contents:
        numbers = "The numbers of the queries and of the pages were recorded."
    else:
        numbers = "The numbers were not recorded: they are random here, and memory that may not be read holds NaN."
    return [
        f"{file} was recorded on {call.device.get('name', 'a device without a name')} with {packages}.",
        f"Recorded: {call.plan}",
        f"It computes {call.spec}.",
        numbers,
    ]


def conclude(call: Call, done: Replay, device: torch.device) -> list[str]:
    """Return the results of the replay, a sentence a line; the last line is the verdict."""
    here = versions()
    changed = [f"{n} {here.get(n, 'missing')}" for n, v in call.versions.items() if n != "python" and here.get(n) != v]
    lines = [f"Replayed on {describe_device(device)['name']}{', with ' if changed else ''}{', '.join(changed)}."]
    lines += [*done.notes, f"Replayed: {done.plan}"]
    if done.verdict is not None:
        verdict = done.verdict
        lse = "" if verdict.lse is None else f", and lse {verdict.lse:.0%} of its own"
        lines.append(f"The largest error of out is {verdict.error:.1e}: {verdict.out:.0%} of its budget{lse}.")
    if done.error is not None:
        return [*lines, f"FAIL: {done.error}"]
    return [*lines, "PASS: the result is right here." if done.passed else "FAIL: the result is wrong here."]
