"""Checks of arguments that several commands share."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable

import torch

from quire.dispatch.device import OVERRIDE

TOOLS = ". ./tools (in a clone of Quire)"  # brings the commands `bench` and `tune`, and the packages that they need


def triton_package() -> str:
    """Return the package that brings Triton to this system. It has wheels for Linux and Windows."""
    return "triton-windows" if sys.platform == "win32" else "triton"


class CommandError(Exception):
    """Why a command cannot do its work: an argument that breaks its contract, a package that is missing.

    The message goes to standard error, and the exit code is 2.
    """


def require_packages(command: str, advice: str, *packages: str) -> None:
    """Raise CommandError unless the packages that a command needs can be imported; say what to install.

    Args:
        command: name of the command.
        advice: what to install, as arguments for pip.
        packages: names to import.
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            reason = "which is not installed" if isinstance(error, ModuleNotFoundError) else f"got {error}"
            raise CommandError(
                f"quire {command} needs {error.name or package}, {reason}; pip install {advice}"
            ) from None


def add_grid(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup",
    what: str,
    sources: "argparse._MutuallyExclusiveGroup | None" = None,
) -> None:
    """Add --grid, --seed and --latents, which draw cases at random; `what` is done with them.

    Args:
        parser: what they are added to.
        what: a verb.
        sources: the options of which only one may be given, if --grid is one of several.
    """
    (sources or parser).add_argument(
        "--grid",
        type=whole_number(1),
        metavar="N",
        help=f"{what} N cases drawn at random instead: widths, groups, pages, lengths, windows, softcap, sinks",
    )
    parser.add_argument(
        "--seed", type=whole_number(0), metavar="S", help="with --grid: which cases are drawn (default: 0)"
    )
    parser.add_argument(
        "--latents", action="store_true", help="with --grid: cases over latents (MLA): heads, queries, lengths, pages"
    )


def check_seed(args: argparse.Namespace) -> None:
    """Raise CommandError if there is a seed without a grid, or latents without one."""
    if args.seed is not None and args.grid is None:
        raise CommandError(f"--seed must be given with --grid, got {args.seed} alone; add --grid N")
    if args.latents and args.grid is None:
        raise CommandError("--latents must be given with --grid; add --grid N")


def add_card(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Add --as, which names an older card whose code runs here."""
    parser.add_argument(
        "--as",
        dest="card",
        metavar="CARD",
        help="compile for an older card (sm80, sm86 or sm89) and run its code on this GPU; no time is that card's",
    )


def run_code_of(card: str | None) -> None:
    """Let this process, and those that it starts, compile for an older card, if there is one, and run its code here.

    Nothing may have been planned or compiled before.

    Raises:
        CommandError: there is no GPU, or it does not run that card's code.
    """
    if card is None:
        return
    if not torch.cuda.is_available():
        raise CommandError(
            "--as must have a GPU that runs the code, got none; quire bench roofline --as compiles it without one"
        )
    from quire.targets import this_gpu

    try:
        this_gpu().running(card, "--as")
    except ValueError as error:
        raise CommandError(str(error)) from None
    os.environ[OVERRIDE] = card


def whole_number(least: int) -> Callable[[str], int]:
    """Return what reads a whole number of at least `least`, for argparse."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least}, got {text!r}")
        return int(text)

    return read
