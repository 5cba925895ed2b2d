"""The process that compiles for a warm-up, in forks of itself, which need not import anything again.

Its job (`processes.Job`) names the launches, or the bounds within which it finds them; then it writes them to its
standard output, and compiles those that take longest first.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from quire.compile_ahead.launches import distinct_launches
from quire.compile_ahead.processes import END, Job, Unpickler, first_to_lock
from quire.kernels.launcher import compile_only
from quire.launch_codec import decode, encode

# Kernel families:
SLOWEST_FIRST = "decoded", "hopper", "mla_hopper", "chosen_hopper", "split_kv", "mla", "chosen", "block"


def main() -> None:
    """Do the job on the standard input."""
    text = sys.stdin.buffer.read()
    job: Job = Unpickler(io.BytesIO(text)).load()
    torch.set_num_threads(1)
    if job.launches is not None:
        compile_all(job, [partial(job.warm_up.attend, decode(launch)) for launch in job.launches])
        return
    os.nice(5)  # the server comes first
    launches = distinct_launches(*job.bounds)
    for launch in launches:
        sys.stdout.buffer.write(encode(launch).encode() + b"\n")
    sys.stdout.buffer.write(END)
    sys.stdout.buffer.flush()
    with first_to_lock(text) as first:  # of tensor-parallel ranks
        if first:
            with first_to_lock(b"an early warm-up", waits=True):  # one kind of layer after the other
                warm_up = job.warm_up.with_launches(launches)
                slowest_first = sorted(warm_up.launches, key=lambda launch: SLOWEST_FIRST.index(launch.name))
                write = [] if warm_up.cache.layout == "THD" else [warm_up.write]
                compile_all(job, [*write, *(partial(warm_up.attend, launch) for launch in slowest_first)])
    if not first:
        with first_to_lock(text, waits=True):  # until another rank has compiled the same
            pass


def compile_all(job: Job, empty_launches: Sequence[Callable[[], None]]) -> None:
    """Make launches that only compile, in forks, which take one after the other.

    One that fails here fails in the warm-up too, which says so.
    """
    queue, fill = os.pipe()
    os.write(fill, b"".join(i.to_bytes(2, "big") for i in range(len(empty_launches))))
    os.close(fill)
    pids = []
    for _ in range(job.num_forks):
        pid = os.fork()  # of a process with one thread and no GPU
        if pid == 0:
            with compile_only("a warm-up's target", job.target, job.properties):
                for i in iter(lambda: os.read(queue, 2), b""):
                    with contextlib.suppress(Exception):
                        empty_launches[int.from_bytes(i, "big")]()
            os._exit(0)  # at its end, after Gluon, Triton 3.9's bindings print what they did not free
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
