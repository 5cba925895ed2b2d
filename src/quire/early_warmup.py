"""A warm-up that begins early: while a server loads weights, a process finds its launches and compiles them.

A server knows the bounds of its batches, and how its caches will be laid out, long before it has caches. `begin` starts
a process that does what `quire.warmup` does, but for loading. `found` returns the launches that it has found.
`wait` waits until they are compiled. Nothing depends on the process: if it ends early, or was told of another cache,
the warm-up does what is left.
"""

import atexit
import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Hashable
from typing import IO, Any, NamedTuple

import torch

from quire.dispatch.device import DeviceProperties
from quire.empty_launches import EmptyLaunches
from quire.kernels.launch import Launch
from quire.launch_codec import decode, encode

LONGEST = 120.0  # seconds to wait for a process
END = b"end\n"  # of what a process has found
MOST, SPARED = 12, 4  # processes that compile at once, and cores that are left to the server
SLOWEST_FIRST = "hopper", "split_kv", "block", "mla_hopper", "mla"  # kernel families


class Begun(NamedTuple):
    """A process, and the file to which it writes the launches that it has found."""

    process: subprocess.Popen[bytes]
    answer: IO[bytes]


BEGUN: dict[Hashable, Begun] = {}  # by the arguments of `service.distinct_launches`


def begin(blank: EmptyLaunches, bounds: tuple[Any, ...], device: torch.device) -> None:
    """Start the process of a warm-up, unless it was started before or cannot be.

    Args:
        blank: a warm-up without launches. Its cache may be on the CPU.
        bounds: the arguments of `service.distinct_launches`.
        device: of the cache to come.
    """
    from triton.runtime.driver import driver

    from quire.compile_processes import pickle_job, start

    if bounds in BEGUN:
        return
    active: Any = driver.active
    with contextlib.suppress(OSError, pickle.PicklingError, TypeError, AttributeError):
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            target = active.get_current_target()
        job = pickle_job((target, blank, bounds))
        answer = tempfile.TemporaryFile()  # noqa: SIM115, `wait` closes it
        BEGUN[bounds] = Begun(start(job, "quire.early_warmup", answer), answer)
        atexit.register(kill, BEGUN[bounds].process)


def found(bounds: tuple[Any, ...]) -> tuple[Launch, ...] | None:
    """Return the launches that a process has found; None if there is none, or it has not found all of them yet."""
    if bounds not in BEGUN:
        return None
    file = BEGUN[bounds].answer.fileno()
    *lines, last = os.pread(file, os.fstat(file).st_size, 0).splitlines(keepends=True) or [b""]
    return tuple(decode(line.decode()) for line in lines) if last == END else None


def wait(bounds: tuple[Any, ...]) -> None:
    """Wait until a process has compiled its launches, and forget it."""
    begun = BEGUN.pop(bounds, None)
    if begun is None:
        return
    begun.answer.close()
    try:
        begun.process.wait(LONGEST)
    except subprocess.TimeoutExpired:
        kill(begun.process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and those that help it, which are its process group."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    """Find and compile the launches of the job on the standard input; write them to the standard output."""
    from quire.compile_processes import Unpickler, first_to_lock
    from quire.service import distinct_launches, with_launches

    os.nice(5)  # the server comes first
    job = sys.stdin.buffer.read()
    target, blank, bounds = Unpickler(io.BytesIO(job)).load()
    torch.set_num_threads(1)
    launches = distinct_launches(*bounds)
    for launch in launches:
        sys.stdout.buffer.write(encode(launch).encode() + b"\n")
    sys.stdout.buffer.write(END)
    sys.stdout.buffer.flush()
    with first_to_lock(job) as first:  # of tensor-parallel ranks
        if first:
            compile_all(with_launches(blank, launches), target, bounds[1])


def compile_all(warm_up: EmptyLaunches, target: Any, properties: DeviceProperties) -> None:
    """Compile the kernels of a warm-up in processes, which take one after the other, the longest first."""
    from quire.compile_processes import compile_launches, num_cores
    from quire.kernels.stub_driver import compile_only

    launches = sorted(warm_up.launches, key=lambda launch: SLOWEST_FIRST.index(launch.name))
    queue, fill = os.pipe()
    os.write(fill, b"".join(i.to_bytes(2, "big") for i in range(len(launches))))
    os.close(fill)
    pids = []
    for _ in range(min(MOST, max(1, num_cores() - SPARED))):
        pid = os.fork()  # of a process with one thread and no GPU: it need not import anything again
        if pid == 0:
            taken = iter(lambda: os.read(queue, 2), b"")
            compile_launches(warm_up, (launches[int.from_bytes(i, "big")] for i in taken), target, properties)
            os._exit(0)
        pids.append(pid)
    with compile_only("a warm-up's target", target, properties):
        warm_up.write()
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
