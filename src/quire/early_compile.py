"""The process of a warm-up that begins early: it finds the launches within a server's bounds, and compiles them."""

import io
import os
import sys
from typing import Any

import torch

from quire.compile_processes import Unpickler, compile_launches, first_to_lock, num_cores
from quire.dispatch.device import DeviceProperties
from quire.early_warmup import END
from quire.empty_launches import EmptyLaunches
from quire.kernels.launcher import compile_only
from quire.launch_codec import encode
from quire.service import distinct_launches, with_launches

MOST, SPARED = 12, 4  # processes that compile at once, and cores that are left to the server
SLOWEST_FIRST = "hopper", "mla_hopper", "split_kv", "mla", "block"  # kernel families


def main() -> None:
    """Find and compile the launches of the job on the standard input; write them to the standard output."""
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
            with first_to_lock(b"an early warm-up", waits=True):  # one kind of layer after the other
                compile_all(with_launches(blank, launches), target, bounds[1])
    if not first:
        with first_to_lock(job, waits=True):  # until another rank has compiled the same
            pass


def compile_all(warm_up: EmptyLaunches, target: Any, properties: DeviceProperties) -> None:
    """Compile the kernels of a warm-up in processes, which take one after the other, the longest first."""
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
    if warm_up.cache.layout != "THD":
        with compile_only("a warm-up's target", target, properties):
            warm_up.write()
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
