"""Processes that compile for a warm-up, into Triton's cache, where the warm-up finds the kernels and loads them.

`helping` starts one when a warm-up finds kernels missing. It begins with the last launch, and the warm-up compiles too,
beginning with the first. Processes are faster than threads, since Python's lock lets the threads of one process compile
about three kernels at a time. `begin` starts one earlier, while a server loads weights: the server knows the bounds of
its batches, and the strides of its caches, long before it has caches. `found` returns the launches that this process
has found, and `finished` waits until they are compiled.

Nothing depends on a process (`worker.py`): if one ends early, or was told of another cache, the warm-up does what is
left.
"""

import atexit
import contextlib
import hashlib
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from quire.compile_ahead.empty_launches import EmptyLaunches
from quire.dispatch.device import DeviceProperties, device_properties
from quire.kernels.launch import Launch
from quire.launch_codec import decode, encode

MOST_HELPERS, KERNELS_EACH = 8, 4  # at least so many kernels each: to start one takes as long as some kernels
MOST_EARLY, SPARED = 12, 4  # compile at once, and cores that are left to the server
MOST_BEGUN = 4  # processes of a server; each imports PyTorch
LONGEST = 120.0  # seconds to wait for a process
END = b"end\n"  # of what a process has found


class Job(NamedTuple):
    """What a process does.

    Attributes:
        target: of Triton's compiler.
        properties: of the device.
        warm_up: how it launches.
        launches: what it compiles, each encoded, in order; None to find them.
        bounds: the arguments of `launches.distinct_launches`, by which it finds them.
        num_forks: that compile at once.
    """

    target: Any
    properties: DeviceProperties
    warm_up: EmptyLaunches
    launches: list[str] | None
    bounds: tuple[Any, ...]
    num_forks: int


class Pickler(pickle.Pickler):
    """Pickle tensors as shapes, strides and dtypes. What they hold, and where, does not decide what is compiled."""

    def persistent_id(self, obj: Any) -> Any:
        """Return what stands for a tensor or a device; None for other objects."""
        if isinstance(obj, torch.device):
            return ()
        return (tuple(obj.shape), obj.stride(), obj.dtype) if isinstance(obj, torch.Tensor) else None


class Unpickler(pickle.Unpickler):
    """Make tensors on the CPU of what `Pickler` wrote. Nothing writes to them, so they take no memory.

    Every device is the CPU, so the process leaves the memory of the GPU to the server.
    """

    def persistent_load(self, pid: Any) -> torch.Tensor | torch.device:
        """Return the tensor or the device that `pid` stands for."""
        if not pid:
            return torch.device("cpu")
        shape, strides, dtype = pid
        return torch.empty_strided(shape, strides, dtype=dtype)


def pickled(job: Any) -> bytes:
    """Return what `Unpickler` reads; nothing where that cannot be, as of somebody's own kind of tensors."""
    file = io.BytesIO()
    with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):
        Pickler(file).dump(job)
        return file.getvalue()
    return b""


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_helpers(num_kernels: int) -> int:
    """Return how many forks should help to compile as many kernels as are missing."""
    return max(0, min(MOST_HELPERS, num_cores() - 2, num_kernels // KERNELS_EACH))


def target_of(device: torch.device) -> Any:
    """Return the target of Triton's compiler for a device."""
    from quire.triton_internals import current_target

    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return current_target()


@contextlib.contextmanager
def helping(warm_up: EmptyLaunches, count: int) -> Iterator[None]:
    """Let a process with `count` forks compile the launches of a warm-up, the last one first. It ends with the context.

    Where several processes warm up for the same, as tensor-parallel ranks do, the first one is helped.
    """
    job = b""
    if count:
        device, launches = warm_up.cache.device, [encode(launch) for launch in reversed(warm_up.launches)]
        blank = replace(warm_up, launches=())
        job = pickled(Job(target_of(device), device_properties(device), blank, launches, (), count))
    with contextlib.ExitStack() as stack:
        if job and stack.enter_context(first_to_lock(job)):
            with contextlib.suppress(OSError):  # no further process can be started
                stack.callback(kill, start(job))
        yield


@contextlib.contextmanager
def first_to_lock(job: bytes, waits: bool = False) -> Iterator[bool]:
    """Yield whether no other process has locked the same job, and lock it in this context.

    Args:
        job: whose lock it is.
        waits: whether to wait for the other process.
    """
    from quire.triton_internals import cache_folder

    path = cache_folder() / f"quire-{hashlib.sha256(job).hexdigest()[:16]}.lock"
    with contextlib.ExitStack() as stack:
        try:
            import fcntl  # which Windows lacks

            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("ab")), fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except (ImportError, OSError):
            yield False
        else:
            yield True


def start(job: bytes, answer: Any = subprocess.DEVNULL) -> "subprocess.Popen[bytes]":
    """Start a process that does a job, as the leader of a group. It reads a file, since a pipe is too small.

    Args:
        job: what `pickled` returned.
        answer: a file for its output.
    """
    from quire.triton_internals import cache_folder

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(cache_folder())}
    with tempfile.TemporaryFile() as file:
        file.write(job)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.compile_ahead.worker"],
            stdin=file,
            stdout=answer,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )


def kill(process: "subprocess.Popen[bytes]") -> None:
    """End a process that still runs, and its forks, which are in its group."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Begun(NamedTuple):
    """A process, the file to which it writes the launches that it has found, and the folder of Triton's cache."""

    process: "subprocess.Popen[bytes]"
    answer: IO[bytes]
    folder: Path


BEGUN: dict[Hashable, Begun] = {}  # by the arguments of `launches.distinct_launches`


def begin(blank: EmptyLaunches, bounds: tuple[Any, ...], device: torch.device) -> None:
    """Start the process of a warm-up early, unless it was started before or cannot be, or there are many.

    Args:
        blank: a warm-up without launches. Its cache may be on the CPU.
        bounds: the arguments of `launches.distinct_launches`.
        device: of the cache to come.
    """
    from quire.triton_internals import cache_folder

    if bounds in BEGUN or len(BEGUN) >= MOST_BEGUN:
        return
    count = min(MOST_EARLY, max(1, num_cores() - SPARED))
    with contextlib.suppress(OSError):
        if job := pickled(Job(target_of(device), bounds[1], blank, None, bounds, count)):
            answer = tempfile.TemporaryFile()  # noqa: SIM115, `finished` closes it
            BEGUN[bounds] = Begun(start(job, answer), answer, cache_folder())
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
