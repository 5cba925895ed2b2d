"""Compile for GPUs that this machine lacks, and read registers, spills and shared memory from the compiled kernels.

`compiling(target)` gives plans that target's properties (`quire.dispatch.device.compile_for`) and Triton a driver that
names the target, or the GPU that runs its code (`Target.running`). Launches end after compilation. The verbs are called
as a user calls them, on small CPU tensors, so arguments, specialisation and configurations are those of a real launch.

Compiled kernels stay in Triton's cache, where a real launch on such a GPU finds them. `compile_all` fills the cache in
parallel before anything is timed.
"""

import atexit
import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import torch

import quire
from quire import triton_internals
from quire.dispatch.device import (
    OLDER_CARDS,
    OVERRIDE,
    DeviceProperties,
    card_in_place_of,
    interprets,
    older_card,
    properties_of,
)
from quire.dispatch.request import cdiv
from quire.kernels.launcher import compile_only
from quire.triton_internals import CompiledKernel, GPUTarget, cuobjdump, lowering_for

KB = 1024


@dataclass(frozen=True)
class Target:
    """A GPU as its data sheet describes it.

    Attributes:
        name: of the target.
        gpu: the target of Triton's compiler.
        num_sms: SMs (AMD: compute units).
        shared_memory: bytes that one program may use.
        memory_gbps: GB that memory delivers per second.
        clock_mhz: MHz of an SM's fastest clock.
        max_warps: warps that an SM holds at once; NVIDIA only, like the next.
        max_programs: programs that an SM holds at once.
        host: the GPU that runs its code, where that is another; see `running`.
    """

    name: str
    gpu: GPUTarget
    num_sms: int
    shared_memory: int
    memory_gbps: int
    clock_mhz: int
    max_warps: int = 0
    max_programs: int = 0
    host: "Target | None" = None

    def running(self, card: str, argument: str = "card") -> "Target":
        """Return this GPU as it runs the code of an older card, with the shared memory and features of that card.

        Args:
            card: "sm80", "sm86" or "sm89".
            argument: what named the card, for the error.

        Raises:
            ValueError: this GPU does not run that card's code.
        """
        gpu, shared_memory = older_card(card, self.gpu, self.shared_memory, argument)
        return replace(self, name=title_of(self.name, card), gpu=gpu, shared_memory=shared_memory, host=self)

    @property
    def properties(self) -> DeviceProperties:
        """The properties that a plan for this GPU sees."""
        return properties_of(self.gpu, self.num_sms, self.shared_memory, self.memory_gbps, self.clock_mhz)


def title_of(device: str, card: str | None) -> str:
    """Return a device in words, and whose code it runs where that is not its own: "sm86 code on an NVIDIA H200"."""
    article = "an" if device[:1] in set("AEFHILMNORSX") else "a"  # as the letter is said
    return device if card is None else f"{card} code on {article} {device}"


TARGETS = {
    t.name: t
    for t in (
        Target("sm80", GPUTarget("cuda", 80, 32), 108, OLDER_CARDS["sm80"], 2040, 1410, 64, 32),  # A100
        Target("sm86", GPUTarget("cuda", 86, 32), 84, OLDER_CARDS["sm86"], 696, 1740, 48, 16),  # A40
        Target("sm89", GPUTarget("cuda", 89, 32), 142, OLDER_CARDS["sm89"], 864, 2520, 48, 24),  # L40S
        Target("sm90", GPUTarget("cuda", 90, 32), 132, 227 * KB, 4800, 1980, 64, 32),  # H200; an H100 has 3350 GB/s
        Target("sm100", GPUTarget("cuda", 100, 32), 148, 227 * KB, 8000, 1965, 64, 32),  # B200
        Target("sm120", GPUTarget("cuda", 120, 32), 188, 99 * KB, 1790, 2617, 48, 24),  # RTX PRO 6000
        Target("gfx90a", GPUTarget("hip", "gfx90a", 64), 104, 64 * KB, 1600, 1700),  # MI250, one die
        Target("gfx942", GPUTarget("hip", "gfx942", 64), 304, 64 * KB, 5300, 2100),  # MI300X
        Target("gfx950", GPUTarget("hip", "gfx950", 64), 256, 160 * KB, 8000, 2400),  # MI355X
    )
}


def current_target() -> Target:
    """Return the current GPU as a target; as it runs the code of an older card, where Triton makes that.

    Raises:
        ValueError: TRITON_OVERRIDE_ARCH names a card whose code this GPU does not run.
    """
    here, card = this_gpu(), card_here()
    return here if card is None else here.running(card, OVERRIDE)


def card_here() -> str | None:
    """Return the card whose code Triton makes for the current GPU in place of its own (TRITON_OVERRIDE_ARCH)."""
    return card_in_place_of(triton_internals.current_target()) if os.environ.get(OVERRIDE) else None


def title_here() -> str:
    """Return the current GPU in words, and whose code it runs where that is not its own."""
    return title_of(torch.cuda.get_device_name(), card_here())


def this_gpu() -> Target:
    """Return the current GPU as a target that runs its own code."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = triton_internals.current_target()
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    max_warps = properties.max_threads_per_multi_processor // gpu.warp_size
    index = torch.cuda.current_device()
    speeds = triton_internals.memory_gbps(index), triton_internals.clock_mhz(index)
    return Target(properties.name, gpu, properties.multi_processor_count, shared_memory, *speeds, max_warps, 32)


@dataclass(frozen=True)
class Compiled:
    """The resources of a compiled kernel.

    Attributes:
        kernel: its name.
        registers: per thread (AMD: vector registers, accumulation registers included).
        spills: bytes of registers spilled to memory, per thread.
        scalar_spills: AMD: scalar registers that were spilled to lanes of vector registers, not to memory.
        shared: bytes of shared memory per program.
        occupancy: programs that an SM holds at once (AMD: waves per SIMD).
        num_warps: warps per program.
        config: the configuration, in words.
    """

    kernel: str
    registers: int
    spills: int
    scalar_spills: int
    shared: int
    occupancy: int
    num_warps: int
    config: str


@contextlib.contextmanager
def compiling(target: Target) -> Iterator[list[Compiled]]:
    """Compile every launch in this context for `target`, without running it, and collect the compiled kernels.

    Raises:
        RuntimeError: Triton's interpreter is on, which compiles nothing.
    """
    if interprets():
        raise RuntimeError("TRITON_INTERPRET must be unset to compile, got 1; start the process without it")
    collected: list[Compiled] = []

    def on_compile(name: str, kernel: CompiledKernel, options: dict[str, Any]) -> None:
        collected.append(inspect(name, kernel, target, options))

    driven = target.host or target
    # Where nothing names another card, Triton lowers for the target as it does in processes that help to compile.
    overrides = target.host is not None or bool(os.environ.get(OVERRIDE))
    lowering = lowering_for(target.gpu) if overrides else contextlib.nullcontext()
    with lowering, compile_only(target.name, driven.gpu, target.properties, on_compile):
        yield collected


def inspect(name: str, kernel: CompiledKernel, target: Target, options: dict[str, Any]) -> Compiled:
    """Return the resources of a compiled kernel."""
    words = "rows", "keys", "warpgroups", "warps", "stages"
    names = "BLOCK_M", "BLOCK_N", "WARPGROUPS", "num_warps", "num_stages"
    config = [f"{options[name]} {word}" for name, word in zip(names, words, strict=True) if options.get(name)]
    if options.get("FULL_TILE_LOOP"):
        config.append("full-tile loop")
    metadata: Any = kernel.metadata
    read = inspect_nvidia if target.gpu.backend == "cuda" else inspect_amd
    registers, spills, scalar_spills, occupancy = read(kernel, target)
    return Compiled(
        name, registers, spills, scalar_spills, metadata.shared, occupancy, metadata.num_warps, ", ".join(config)
    )


def inspect_nvidia(kernel: CompiledKernel, target: Target) -> tuple[int, int, int, int]:
    """Return registers, spilled bytes, 0 scalar spills and occupancy of a kernel for an NVIDIA GPU."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [cuobjdump(), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    metadata: Any = kernel.metadata
    target = target.host or target  # whose SMs hold the programs
    registers_of_warp = 256 * cdiv(32 * usage["REG"], 256)
    occupancy = min(
        65536 // registers_of_warp // metadata.num_warps,
        target.max_warps // metadata.num_warps,
        target.max_programs,
        (target.shared_memory + KB) // (metadata.shared + KB),
    )
    return usage["REG"], usage["STACK"] + usage["LOCAL"], 0, occupancy


def inspect_amd(kernel: CompiledKernel, target: Target) -> tuple[int, int, int, int]:
    """Return registers, spilled bytes, scalar spills and occupancy of a kernel for an AMD GPU."""
    text = kernel.asm["amdgcn"]

    def number(pattern: str) -> int:
        found = re.search(pattern + r":\s*(\d+)", text)
        assert found is not None, f"{pattern} must be in the assembly"
        return int(found[1])

    # The size of the private segment is no measure of spills: 36 bytes of it are reserved, and not used, if scalar
    # registers are spilled to vector lanes.
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
        packed: whether it is a launch of `quire.varlen_attention`, whose keys are not paged.
        return_lse: whether the lse is asked for.
        width: entries of the list of slots that each query token has; 0 where it has none.
        layout: of a cache that is paged.
        options: further arguments of `quire.plan`, as pairs of name and value.
    """

    spec: quire.AttentionSpec
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    num_tokens: int
    page_size: int = 16
    packed: bool = False
    return_lse: bool = False
    width: int = 0
    layout: str = "NHD"
    options: tuple[tuple[str, Any], ...] = ()

    def compile(self, target: Target) -> tuple[quire.Plan, list[Compiled]]:
        """Compile the launch; return its plan and the compiled kernels."""
        with compiling(target) as compiled:
            starts = None if self.max_query_len == 1 else torch.zeros(self.num_seqs + 1, dtype=torch.int32)
            table = torch.zeros(self.num_seqs, cdiv(self.max_seq_len, self.page_size), dtype=torch.int32)
            batch = quire.Batch(table, torch.zeros(self.num_seqs, dtype=torch.int32), starts)
            if self.width:
                lists = torch.zeros(self.num_tokens, self.width, dtype=torch.int32)
                batch = replace(batch, chosen=quire.ChosenKeys(lists, are_slots=True))
            if self.packed:
                batch = quire.Batch.varlen(starts, torch.zeros(self.num_seqs + 1, dtype=torch.int32))
            spec, options = self.spec, dict(self.options)
            plan = quire.plan(
                spec,
                batch,
                max_query_len=self.max_query_len,
                max_seq_len=self.max_seq_len,
                num_tokens=self.num_tokens,
                **options,
            )
            q = torch.empty(self.num_tokens, spec.num_q_heads, spec.head_dim, dtype=spec.dtype)
            sinks = torch.zeros(spec.num_q_heads, dtype=spec.dtype) if spec.sinks else None
            slopes = torch.zeros(spec.num_q_heads) if spec.alibi else None
            extras = tuple(torch.zeros(extra.with_size(1), dtype=extra.dtype) for extra in spec.extras)
            options = {"sinks": sinks, "alibi_slopes": slopes, "extras": extras, "return_lse": self.return_lse}
            cache = quire.PagedKVCache.empty(spec, 4, self.page_size, layout=self.layout)
            if self.packed:
                quire.varlen_attention(q, cache.k.flatten(0, 1), cache.v.flatten(0, 1), plan, **options)
            else:
                quire.attention(q, cache, plan, **options)
        return plan, compiled


def compile_all(launches: Sequence[Launch], target: Target) -> Iterator[tuple[Launch, str, list[Compiled]]]:
    """Compile launches in parallel, with one process per core. The compiled kernels stay in Triton's cache.

    Yields:
        Each launch when it is done, with its plan in words and its compiled kernels; or with the error in words and an
        empty list.
    """
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(
        min(len(launches), os.cpu_count() or 1) or 1, multiprocessing.get_context("spawn"), _prepare_process
    ) as pool:
        try:
            waiting = {pool.submit(_compile, launch, target): launch for launch in launches}
            for done in as_completed(waiting):
                yield waiting[done], *done.result()
        except BaseException:  # an interrupt does not wait until the compilations that are under way end
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def _prepare_process() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process stops this one
    # At the end of a process that compiled Gluon, Triton 3.9's bindings print what they did not free. So it just ends.
    atexit.register(os._exit, 0)


def _compile(launch: Launch, target: Target) -> tuple[str, list[Compiled]]:
    try:
        plan, compiled = launch.compile(target)
    except Exception as error:  # Triton's compiler raises many kinds
        return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}", []
    return repr(plan), compiled
