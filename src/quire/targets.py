"""GPUs that are not here: what they hold, and what Quire's launches need there, read from what was compiled. No GPU needed.

`compiling(target)` gives plans that target's properties (`quire.dispatch.device.compile_for`) and Triton a driver that names the target. Launches end after
compilation. The verbs are called as a user calls them, on small CPU tensors: arguments, specialisation and configurations are those of a real launch. What is
compiled so goes to Triton's cache, where a real launch on such a GPU finds it: `compile_all` fills it with all cores before anything is timed.
"""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

import quire
from quire.dispatch.device import DeviceProperties, compile_for, interprets, properties_of
from quire.dispatch.request import cdiv

KB = 1024


@dataclass(frozen=True)
class Target:
    """A GPU as its data sheet describes it; for occupancy, what one multiprocessor holds."""

    name: str
    gpu: GPUTarget
    num_sms: int
    shared_memory: int  # bytes one program may use
    max_warps: int = 0
    max_programs: int = 0

    @property
    def properties(self) -> DeviceProperties:
        return properties_of(self.gpu, self.num_sms, self.shared_memory)


TARGETS = {
    t.name: t
    for t in (
        Target("sm80", GPUTarget("cuda", 80, 32), 108, 163 * KB, 64, 32),  # A100
        Target("sm86", GPUTarget("cuda", 86, 32), 84, 99 * KB, 48, 16),  # A40
        Target("sm89", GPUTarget("cuda", 89, 32), 142, 99 * KB, 48, 24),  # L40S
        Target("sm90", GPUTarget("cuda", 90, 32), 132, 227 * KB, 64, 32),  # H100, H200
        Target("sm100", GPUTarget("cuda", 100, 32), 148, 227 * KB, 64, 32),  # B200
        Target("sm120", GPUTarget("cuda", 120, 32), 188, 99 * KB, 48, 24),  # RTX PRO 6000
        Target("gfx90a", GPUTarget("hip", "gfx90a", 64), 104, 64 * KB),  # MI250, one die
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 304, 64 * KB),  # MI300X
        Target("gfx950", GPUTarget("hip", "gfx950", 64), 256, 160 * KB),  # MI355X
    )
}


def current_target() -> Target:
    """Describe the GPU that is here as a target."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = driver.active.get_current_target()
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    max_warps = properties.max_threads_per_multi_processor // gpu.warp_size
    return Target(f"{properties.name}, here", gpu, properties.multi_processor_count, shared_memory, max_warps, 32)


@dataclass(frozen=True)
class Compiled:
    """What one launch compiled to.

    Attributes:
        kernel: its name.
        registers: per thread (AMD: vector registers, accumulation registers included).
        spills: bytes of registers spilled to memory, per thread.
        scalar_spills: AMD's scalar registers that were parked in lanes of vector registers, without touching memory.
        shared: bytes of shared memory per program.
        occupancy: programs that one multiprocessor holds at once (AMD: waves per SIMD).
        num_warps: warps per program.
        tile: the configuration, in words.
    """

    kernel: str
    registers: int
    spills: int
    scalar_spills: int
    shared: int
    occupancy: int
    num_warps: int
    tile: str


class StubDriver:
    """Stand in for a GPU driver up to the launch. Each target is a device of its own, so that compiled kernels are kept apart."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target.gpu

    def get_current_device(self) -> str:
        return self.target.name

    def get_current_stream(self, device: str) -> int:
        return 0


@contextlib.contextmanager
def compiling(target: Target) -> Iterator[list[Compiled]]:
    """Compile what is launched in this context for `target`, and collect it.

    Raises:
        RuntimeError: Triton's interpreter is on: its kernels cannot be compiled.
    """
    if interprets():
        raise RuntimeError("TRITON_INTERPRET must be unset to compile, got 1; start the process without it")
    collected: list[Compiled] = []

    def on_compile(name: str, kernel: CompiledKernel, options: dict[str, Any]) -> None:
        collected.append(inspect(name, kernel, target, options))

    before = driver._active
    driver.set_active(StubDriver(target))
    try:
        with compile_for(target.properties, on_compile):
            yield collected
    finally:
        driver._active = before


def inspect(name: str, kernel, target: Target, options: dict) -> Compiled:
    """Read a compiled kernel's needs."""
    names = {
        "BLOCK_M": "m",
        "BLOCK_N": "n",
        "num_warps": "warps ",
        "num_stages": "stages ",
        "WARPGROUPS": "warpgroups ",
    }
    tile = ", ".join(
        f"{short}{options[name]}" for name, short in names.items() if options.get(name)
    ) + ", two loops" * options.get("FULL_TILE_LOOP", False)
    read = inspect_nvidia if target.gpu.backend == "cuda" else inspect_amd
    registers, spills, scalar_spills, occupancy = read(kernel, target)
    return Compiled(
        name, registers, spills, scalar_spills, kernel.metadata.shared, occupancy, kernel.metadata.num_warps, tile
    )


def inspect_nvidia(kernel, target: Target) -> tuple[int, int, int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    per_warp = -(-usage["REG"] * 32 // 256) * 256
    held = min(
        65536 // per_warp // warps,
        target.max_warps // warps,
        target.max_programs,
        (target.shared_memory + KB) // (shared + KB),
    )
    return usage["REG"], usage["STACK"] + usage["LOCAL"], 0, held


def inspect_amd(kernel, target: Target) -> tuple[int, int, int, int]:
    text = kernel.asm["amdgcn"]

    def number(pattern: str) -> int:
        return int(re.search(pattern + r":\s*(\d+)", text)[1])

    # The private segment is no measure: parking scalar registers in vector lanes reserves 36 bytes of it that nothing touches.
    return (
        number(r"; TotalNumVgprs"),
        4 * number(r"\.vgpr_spill_count"),
        number(r"\.sgpr_spill_count"),
        number(r"; Occupancy"),
    )


@dataclass(frozen=True)
class Launch:
    """A launch of `quire.attention` to compile.

    Attributes:
        spec: what is computed.
        num_seqs: sequences.
        max_query_len: most queries of any; 1 where every sequence has one.
        max_seq_len: most keys of any.
        num_tokens: query tokens of the batch.
        page_size: tokens per page.
        options: further arguments of `quire.plan`.
    """

    spec: quire.AttentionSpec
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    num_tokens: int
    page_size: int = 16
    options: tuple[tuple[str, object], ...] = ()

    def compile(self, target: Target) -> tuple[quire.Plan, list[Compiled]]:
        """Compile it, and return its plan and what was compiled."""
        with compiling(target) as compiled:
            starts = None if self.max_query_len == 1 else torch.zeros(self.num_seqs + 1, dtype=torch.int32)
            table = torch.zeros(self.num_seqs, cdiv(self.max_seq_len, self.page_size), dtype=torch.int32)
            batch = quire.Batch(table, torch.zeros(self.num_seqs, dtype=torch.int32), starts)
            bounds: dict[str, Any] = {
                "max_query_len": self.max_query_len, "max_seq_len": self.max_seq_len, "num_tokens": self.num_tokens,
            }  # fmt: skip
            plan = quire.plan(self.spec, batch, **bounds, **dict(self.options))
            spec = self.spec
            q = torch.empty(self.num_tokens, spec.num_q_heads, spec.head_dim, dtype=spec.dtype)
            sinks = torch.zeros(spec.num_q_heads, dtype=spec.dtype) if spec.sinks else None
            slopes = torch.zeros(spec.num_q_heads) if spec.alibi else None
            cache = quire.PagedKVCache.empty(spec, 4, self.page_size)
            quire.attention(q, cache, plan, sinks=sinks, alibi_slopes=slopes)
        return plan, compiled


def compile_all(launches: Sequence[Launch], target: Target) -> Iterator[tuple[Launch, str, list[Compiled]]]:
    """Compile launches in processes of their own, as many as there are cores; yield each when it is done, with its plan in words, or why it failed.

    What was compiled is left in Triton's cache.
    """
    with ProcessPoolExecutor(
        min(len(launches), os.cpu_count() or 1) or 1, multiprocessing.get_context("spawn"), _prepare_process
    ) as pool:
        try:
            waiting = {pool.submit(_compile, launch, target): launch for launch in launches}
            for done in as_completed(waiting):
                yield waiting[done], *done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _prepare_process() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it stops it


def _compile(launch: Launch, target: Target) -> tuple[str, list[Compiled]]:
    try:
        plan, compiled = launch.compile(target)
    except Exception as error:  # Triton's compiler raises many kinds
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}", []
    return repr(plan), compiled
