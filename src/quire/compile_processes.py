"""Processes that help a warm-up: they compile its kernels into Triton's cache, beginning with the last one.

The warm-up compiles too, beginning with the first kernel, and loads what it finds in the cache. So it depends on no
other process: if one ends early, the warm-up compiles the rest. Processes are faster than threads, since Python's lock
lets the threads of one process compile about three kernels at a time.
"""

import contextlib
import hashlib
import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from quire.dispatch.device import DeviceProperties, device_properties
from quire.empty_launches import EmptyLaunches
from quire.kernels.launch import Launch
from quire.kernels.launcher import compile_only
from quire.launch_codec import decode, encode
from quire.triton_internals import GPUTarget, cache_folder, current_target

MOST = 8  # processes
KERNELS_EACH = 4  # at least: to start a process takes as long as some kernels


class Pickler(pickle.Pickler):
    """Pickle tensors as shapes, strides and dtypes. What they hold, and where, does not decide what is compiled."""

    def persistent_id(self, obj: Any) -> Any:
        """Return what stands for a tensor or a device; None for other objects."""
        if isinstance(obj, torch.device):
            return ()
        return (tuple(obj.shape), obj.stride(), obj.dtype) if isinstance(obj, torch.Tensor) else None


class Unpickler(pickle.Unpickler):
    """Make tensors on the CPU of what `Pickler` wrote. Nothing writes to them, so they take no memory.

    Every device is the CPU, so these processes leave the memory of the GPU to the server.
    """

    def persistent_load(self, pid: Any) -> torch.Tensor | torch.device:
        """Return the tensor or the device that `pid` stands for."""
        if not pid:
            return torch.device("cpu")
        shape, strides, dtype = pid
        return torch.empty_strided(shape, strides, dtype=dtype)


def num_helpers(num_kernels: int) -> int:
    """Return how many processes should help to compile as many kernels as are missing."""
    return max(0, min(MOST, num_cores() - 2, num_kernels // KERNELS_EACH))


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def helping(warm_up: EmptyLaunches, count: int) -> Iterator[None]:
    """Let `count` processes compile the launches of a warm-up. They end with the context.

    Where several processes warm up for the same, as tensor-parallel ranks do, the first one is helped.
    """
    parts = []
    with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):  # somebody's own kind of tensors
        parts = [pickled(warm_up, slice(-1 - i, None, -count)) for i in range(count)]
    with contextlib.ExitStack() as stack:
        if parts and stack.enter_context(first_to_lock(parts[0])):
            with contextlib.suppress(OSError):  # no further process can be started
                for part in parts:
                    stack.callback(stop, start(part))
        yield


def pickled(warm_up: EmptyLaunches, part: slice) -> bytes:
    """Return what a process needs to compile a part of the launches."""
    launches = [encode(launch) for launch in warm_up.launches[part]]
    properties = device_properties(warm_up.cache.device)
    return pickle_job((current_target(), properties, replace(warm_up, launches=()), launches))


def pickle_job(job: tuple[Any, ...]) -> bytes:
    """Return what `Unpickler` reads."""
    file = io.BytesIO()
    Pickler(file).dump(job)
    return file.getvalue()


@contextlib.contextmanager
def first_to_lock(job: bytes, waits: bool = False) -> Iterator[bool]:
    """Yield whether no other process has locked the same job, and lock it in this context.

    Args:
        job: whose lock it is.
        waits: whether to wait for the other process.
    """
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


def start(job: bytes, module: str = "quire.compile_processes", answer: Any = subprocess.DEVNULL) -> Any:
    """Start a process, a `subprocess.Popen`, in which a module does a job. It reads a file, since a pipe is too small.

    Args:
        job: what `pickle_job` returned.
        module: which does it.
        answer: a file for its output.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryFile() as file:
        file.write(job)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=file,
            stdout=answer,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=answer is not subprocess.DEVNULL,  # its own helpers can end with it
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process."""
    process.kill()
    process.wait()


def compile_launches(
    warm_up: EmptyLaunches, launches: Iterable[Launch], gpu: GPUTarget, properties: DeviceProperties
) -> None:
    """Compile launches of a warm-up. One that fails here fails in the warm-up too, which says so."""
    with compile_only("a warm-up's target", gpu, properties):
        for launch in launches:
            with contextlib.suppress(Exception):
                warm_up.attend(launch)


def main() -> None:
    """Compile the job on the standard input."""
    gpu, properties, warm_up, launches = Unpickler(sys.stdin.buffer).load()
    torch.set_num_threads(1)
    compile_launches(warm_up, map(decode, launches), gpu, properties)
    os._exit(0)  # at the end of a process that compiled Gluon, Triton 3.9's bindings print what they did not free


if __name__ == "__main__":
    main()
