"""Checks of arguments that `quire bench` and `quire tune` share."""

import argparse
import math
import os
import tempfile
from pathlib import Path

from quire.cli.arguments import TOOLS, CommandError, require_packages, triton_package


def require(command: str, *packages: str) -> None:
    """Raise CommandError unless Triton and the packages that a command needs can be imported; say what to install."""
    require_packages(command, f"{triton_package()} (wheels are for Linux and Windows)", "triton")
    require_packages(command, TOOLS, *packages)


def positive_seconds(text: str) -> float:
    """Read a number of seconds, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds


def check_folder(name: str, folder: Path) -> None:
    """Make a folder if it is not there; raise CommandError unless files can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        reason = "not a folder" if is_file else error.strerror
        raise CommandError(
            f"{name} must be a folder that can be written, got {folder} ({reason}); name another"
        ) from None


def check_file(name: str, file: Path) -> None:
    """Make the folder of a file if it is not there; raise CommandError unless the file can be written."""
    if file.is_dir():
        raise CommandError(
            f"{name} must be a file that can be written, got {file}, which is a folder; name a file in it"
        )
    if file.exists() and not os.access(file, os.W_OK):
        raise CommandError(f"{name} must be a file that can be written, got {file}, which is read-only; name another")
    check_folder(f"the folder of {name}", file.parent)
