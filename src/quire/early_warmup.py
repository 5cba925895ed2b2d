"""A warm-up that begins early: while a server loads weights, a process finds its launches and compiles them.

A server knows the bounds of its batches, and the strides of its caches, long before it has caches. `begin` starts a
process (`early_compile.py`) that does what `quire.warmup` does, but for loading. `found` returns the launches that it
has found. `finished` waits until they are compiled, and lets the warm-up find them. Nothing depends on the process: if
it ends early, or was told of another cache, the warm-up does what is left.
"""

import atexit
import contextlib
import os
import pickle
import signal
import subprocess
import tempfile
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from quire.empty_launches import EmptyLaunches
from quire.kernels.launch import Launch
from quire.launch_codec import decode

MOST = 4  # processes of a server; each imports PyTorch
LONGEST = 120.0  # seconds to wait for a process
END = b"end\n"  # of what a process has found


class Begun(NamedTuple):
    """A process, the file to which it writes the launches that it has found, and the folder of Triton's cache."""

    process: subprocess.Popen[bytes]
    answer: IO[bytes]
    folder: Path


BEGUN: dict[Hashable, Begun] = {}  # by the arguments of `service.distinct_launches`


def begin(blank: EmptyLaunches, bounds: tuple[Any, ...], device: torch.device) -> None:
    """Start the process of a warm-up, unless it was started before or cannot be, or there are many.

    Args:
        blank: a warm-up without launches. Its cache may be on the CPU.
        bounds: the arguments of `service.distinct_launches`.
        device: of the cache to come.
    """
    from quire.compile_processes import pickle_job, start
    from quire.triton_internals import cache_folder, current_target

    if bounds in BEGUN or len(BEGUN) >= MOST:
        return
    with contextlib.suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            target = current_target()
        job = pickle_job((target, blank, bounds))
        answer = tempfile.TemporaryFile()  # noqa: SIM115, `wait` closes it
        BEGUN[bounds] = Begun(start(job, "quire.early_compile", answer), answer, cache_folder())
        atexit.register(kill, BEGUN[bounds].process)


def found(bounds: tuple[Any, ...]) -> tuple[Launch, ...] | None:
    """Return the launches that a process has found; None if there is none, or it has not found all of them yet."""
    if bounds not in BEGUN:
        return None
    file = BEGUN[bounds].answer.fileno()
    *lines, last = os.pread(file, os.fstat(file).st_size, 0).splitlines(keepends=True) or [b""]
    return tuple(decode(line.decode()) for line in lines) if last == END else None


@contextlib.contextmanager
def finished(bounds: tuple[Any, ...]) -> Iterator[None]:
    """Wait until a process has compiled its launches, and forget it. In this context, Triton's cache is its own.

    The environment may name another folder by then: PyTorch's Inductor sets TRITON_CACHE_DIR when it makes its first
    kernel, unless the user has set it.
    """
    begun = BEGUN.pop(bounds, None)
    if begun is None:
        yield
        return
    from quire.triton_internals import caching_in

    begun.answer.close()
    try:
        begun.process.wait(LONGEST)
    except subprocess.TimeoutExpired:
        kill(begun.process)
    with caching_in(begun.folder):
        yield


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and those that help it, which are its process group."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
