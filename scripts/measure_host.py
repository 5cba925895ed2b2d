"""Measure what attention costs the host: a plan, its first call, and further calls.

    python scripts/measure_host.py            # on a GPU
    python scripts/measure_host.py --no-gpu   # what an H200's host would do, on any machine with a C compiler

Without a GPU, Triton's own driver calls a libcuda that does nothing. So everything is measured but CUDA itself.

Numbers are microseconds of CPU time of the calling thread: the fastest burst of calls, and the median of all. The
fastest bursts of a busy machine are those of a quiet one.
"""

import argparse
import contextlib
import ctypes
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

import quire
from quire.dispatch.device import compile_for
from quire.targets import TARGETS

CALLS = 20  # of a burst
BURSTS = 300
STUB = """
#define CONTEXT (void *)1
int cuGetErrorString(int error, const char **text) { *text = "no GPU"; return 0; }
int cuCtxGetCurrent(void **context) { *context = CONTEXT; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = CONTEXT; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = 227 << 10; return 0; }
int cuFuncGetAttribute(int *value, int which, void *function) { *value = which ? 0 : 1024; return 0; }
int cuPointerGetAttribute(void **value, int which, void *at) { *value = at; return 0; }
"""
IGNORED = """
cuCtxGetDevice cuCtxGetLimit cuCtxSetCurrent cuCtxSetLimit cuDeviceGet cuDriverGetVersion cuFuncSetAttribute
cuFuncSetCacheConfig cuLaunchKernelEx cuModuleGetFunction cuModuleLoadData cuModuleUnload cuOccupancyMaxActiveClusters
cuPointerGetAttributes cuStreamIsCapturing cuTensorMapEncodeIm2col cuTensorMapEncodeTiled
"""
CASES = {  # sequences, queries and keys of each, query tokens; latents
    "decode": (128, 1, 2048, None, False),
    "decode, few sequences": (32, 1, 2048, None, False),
    "prompt": (1, 2048, 2048, None, False),
    "chunk on a long context": (1, 64, 16384, None, False),
    "prompts and decode": (34, 1024, 4096, 1600, False),
    "decode over latents": (32, 1, 4096, None, True),
}


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """Let Triton launch on a libcuda that does nothing, and plans see an H200."""
    from triton.backends.nvidia import driver as nvidia

    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libcuda.so.1")
        source = Path(folder, "stub.c")
        source.write_text(STUB + "".join(f"int {name}() {{ return 0; }}\n" for name in IGNORED.split()))
        flags = ["-shared", "-fPIC", "-O2", f"-Wl,-soname,{library.name}"]
        subprocess.run(["cc", *flags, source, "-o", library], check=True)
        os.environ["TRITON_LIBCUDA_PATH"] = folder
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # what Triton's modules then find by its name

        class Driver(nvidia.CudaDriver):
            def __init__(self) -> None:
                self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
                self.get_current_device = lambda: 0
                self.get_current_stream = lambda device: 0

            def get_current_target(self) -> Any:
                return TARGETS["sm90"].gpu

        driver.set_active(Driver())
        yield


def measure(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the microseconds of a call in the fastest burst, and the median."""
    call()
    times = []
    for _ in range(BURSTS):
        began = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        times.append((time.thread_time_ns() - began) / CALLS / 1000)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return min(times), statistics.median(times)


def measure_case(name: str, device: str) -> None:
    """Print a row of the table."""
    num_seqs, max_query_len, max_seq_len, num_tokens, latent = CASES[name]
    if latent:
        spec = quire.AttentionSpec.mla(num_q_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, softmax_scale=0.1)
    else:
        spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    page_size = 64 if latent else 16
    starts = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)
    # tables are wide enough for every bound below; sequences have no keys
    table = torch.zeros(num_seqs, 2 * max_seq_len // page_size, dtype=torch.int32, device=device)
    batch = quire.Batch(table, starts[1:], None if max_query_len == 1 else starts)
    bounds: dict[str, Any] = {"max_query_len": max_query_len, "num_tokens": num_tokens}
    longer = itertools.cycle(range(max_seq_len, 2 * max_seq_len - 1))  # a plan keeps 1,024 decisions
    with contextlib.nullcontext() if device == "cuda" else compile_for(TARGETS["sm90"].properties, lambda *facts: None):
        limits = {"max_num_seqs": num_seqs, "max_num_tokens": 4096, "max_seq_len": 2 * max_seq_len}
        size = quire.workspace_size(spec, **limits, device=device)
        bounds["workspace"] = torch.zeros(size, dtype=torch.uint8, device=device)
        seen = measure(lambda: quire.plan(spec, batch, max_seq_len=max_seq_len, **bounds))
        new = measure(lambda: quire.plan(spec, batch, max_seq_len=next(longer), **bounds))
        plans = [quire.plan(spec, batch, max_seq_len=max_seq_len, **bounds) for _ in range(CALLS * BURSTS + 2)]
    cache = quire.PagedKVCache.empty(spec, 4, page_size, device=device)
    q = torch.empty(plans[0].bounds.num_tokens, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=device)
    halves = (q[..., :512], q[..., 512:]) if latent else q
    out = torch.empty(*q.shape[:2], spec.head_dim_v, dtype=spec.dtype, device=device)
    plan = plans.pop()
    again = measure(lambda: quire.attention(halves, cache, plan, out=out))
    first = measure(lambda: quire.attention(halves, cache, plans.pop(), out=out))
    measured = [seen, new, first, again]
    if plan.appender(cache) is not None:
        rows = torch.empty(len(q), spec.num_kv_heads, spec.head_dim + spec.head_dim_v, dtype=spec.dtype, device=device)
        k, v = rows.split((spec.head_dim, spec.head_dim_v), -1)
        slots = torch.full((len(q),), -1, device=device)
        measured.append(measure(lambda: quire.attention(q, cache, plan, k=k, v=v, slot_mapping=slots, out=out)))
    cells = " | ".join(f"{least:.1f} ({median:.1f})" for least, median in measured)
    print(f"| {name} | {plan.kernel} | {cells} |{' - |' if len(measured) == 4 else ''}", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-gpu", action="store_true", help="with a libcuda that does nothing")
    args = parser.parse_args()
    if not args.no_gpu and not torch.cuda.is_available():
        sys.exit("no GPU here; pass --no-gpu")
    where = "a CPU, libcuda does nothing" if args.no_gpu else torch.cuda.get_device_name()
    print(f"Triton {triton.__version__}, {where}: µs of CPU time, fastest (median)\n")
    print("| case | kernel | plan, bounds seen before | plan, one key more | first call | call | call that appends |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with without_a_gpu() if args.no_gpu else contextlib.nullcontext():
        for name in CASES:
            measure_case(name, "cpu" if args.no_gpu else "cuda")
    if args.no_gpu:  # at the end of such a process, Triton's bindings print what they did not free; so it just ends
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
