"""Standard output that works with any encoding, and with readers that close the pipe early."""

import io
import os
import sys


def allow_any_encoding() -> None:
    """Print "?" in place of characters that the encoding of the terminal lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def discard_output() -> None:
    """Write further output to nowhere.

    Python flushes standard output at exit. After a BrokenPipeError that would fail again, with a message.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
