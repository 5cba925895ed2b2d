"""Checks of arguments that several commands share."""

import argparse
import importlib
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from quire.version import packages_of


def triton_package() -> str:
    """Return the package that brings Triton to this system. It has wheels for Linux and Windows."""
    return "triton-windows" if sys.platform == "win32" else "triton"


class CommandError(Exception):
    """Why a command cannot do its work: an argument that breaks its contract, a package that is missing.

    The message goes to standard error, and the exit code is 2.
    """


def require_packages(command: str, extra: str, *packages: str) -> None:
    """Raise CommandError unless the packages that a command needs can be imported; say what to install.

    Args:
        command: name of the command.
        extra: name of the extra of Quire that has the packages.
        packages: names to import.
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            reason = "which is not installed" if isinstance(error, ModuleNotFoundError) else f"got {error}"
            raise CommandError(
                f"quire {command} needs {error.name or package}, {reason}; pip install {packages_of(extra)}"
            ) from None


def positive_seconds(text: str) -> float:
    """Read a number of seconds, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds


def add_grid(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", what: str) -> None:
    """Add --grid and --seed, which draw cases at random; `what` is done with them."""
    parser.add_argument(
        "--grid",
        type=whole_number(1),
        metavar="N",
        help=f"{what} N cases drawn at random instead: widths, groups, pages, lengths, windows, softcap, sinks",
    )
    parser.add_argument(
        "--seed", type=whole_number(0), metavar="S", help="with --grid: which cases are drawn (default: 0)"
    )


def check_seed(args: argparse.Namespace) -> None:
    """Raise CommandError if there is a seed without a grid."""
    if args.seed is not None and args.grid is None:
        raise CommandError(f"--seed must be given with --grid, got {args.seed} alone; add --grid N")


def whole_number(least: int) -> Callable[[str], int]:
    """Return what reads a whole number of at least `least`, for argparse."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least}, got {text!r}")
        return int(text)

    return read


def check_folder(option: str, folder: Path) -> None:
    """Make a folder if it is not there; raise CommandError unless files can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "not a folder" if is_file else error.strerror
        raise CommandError(
            f"{option} must be a folder that can be written, got {folder} ({reason}); name another"
        ) from None


def check_file(option: str, file: Path) -> None:
    """Make the folder of a file if it is not there; raise CommandError unless the file can be written."""
    if file.is_dir():
        raise CommandError(
            f"{option} must be a file that can be written, got {file}, which is a folder; name a file in it"
        )
    if file.exists() and not os.access(file, os.W_OK):
        raise CommandError(f"{option} must be a file that can be written, got {file}, which is read-only; name another")
    check_folder(f"the folder of {option}", file.parent)
