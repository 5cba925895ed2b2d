"""`DeviceProperties`: the limits and features that a device reports. Nothing is decided by a device's name."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

HAS_TRITON = find_spec("triton") is not None
# Triton's compiler makes one FMA of a product and a sum. It is the default until 3.9 and not from 3.10 on. It decides
# the bits of results and the speed (docs/notes/fusion.md).
COMPILER_OPTIONS = {"enable_fp_fusion": True}
# Triton's variable: a card, such as sm86, whose code it makes in place of the GPU's own. Plans follow it.
OVERRIDE = "TRITON_OVERRIDE_ARCH"
# Cards whose code newer NVIDIA GPUs run, and the bytes of shared memory that one program may use there.
OLDER_CARDS = {"sm80": 163 * 1024, "sm86": 99 * 1024, "sm89": 99 * 1024}


@dataclass(frozen=True)
class DeviceProperties:
    """The properties of a device by which a plan is decided.

    Attributes:
        num_sms: SMs (AMD: compute units).
        shared_memory: bytes that one program may use.
        native_fp8: the compiler converts float8_e4m3fn and float8_e5m2 for this target; else they are decoded in
            software.
        native_fp8x2: PTX has an instruction that converts two float8_e4m3fn to two float16.
        native_tf32: tensor cores have TF32 products.
        has_wgmma: a warpgroup of four warps multiplies tiles from shared memory (Hopper).
        supports_pdl: programmatic dependent launch: a kernel may start while the previous one in the stream drains.
        has_mfma: AMD's matrix instructions; the compiler takes their size, and waves per SIMD, as hints.
        memory_gbps: GB that memory delivers per second, by its clock and the width of its bus; 0 where that is unknown.
        clock_mhz: MHz of an SM's fastest clock; 0 where that is unknown.
    """

    num_sms: int
    shared_memory: int
    native_fp8: bool
    native_fp8x2: bool
    native_tf32: bool
    has_wgmma: bool
    supports_pdl: bool
    has_mfma: bool
    memory_gbps: int = 0
    clock_mhz: int = 0

    @property
    def alike_rows(self) -> int:
        """Most rows of tiles whose products give a row the same bits, whatever the number of rows.

        Hopper and datacenter Blackwell multiply 64 rows by other instructions than 32. On Hopper, the bits are equal.
        On Blackwell, which has as much shared memory and no wgmma, this was not tried.
        """
        return 32 if self._is_datacenter_blackwell else 128

    @property
    def has_ptx(self) -> bool:
        """Whether the target has NVIDIA's instructions."""
        return self.native_tf32 and not self.has_mfma

    @property
    def pdl(self) -> dict[str, bool]:
        """What kernels and the compiler are told of PDL, by name. Other targets' compilers do not know the option."""
        return {"PDL": True, "launch_pdl": True} if self.supports_pdl else {"PDL": False}

    @property
    def has_mma_sync(self) -> bool:
        """Whether all products of a kernel are mma.sync's, which reads registers: NVIDIA's GPUs but Hopper and B200."""
        return self.native_tf32 and not (self.has_wgmma or self.has_mfma or self._is_datacenter_blackwell)

    @property
    def _is_datacenter_blackwell(self) -> bool:
        return self.supports_pdl and not self.has_wgmma and self.shared_memory > 200 * 1024


class CrossCompilation(NamedTuple):
    """A device that this machine lacks, for which launches are compiled but not run."""

    properties: DeviceProperties
    on_compile: Callable[[str, Any, dict[str, Any]], None]  # takes the kernel's name, the compiled kernel, its options


_cross: ContextVar[CrossCompilation | None] = ContextVar("quire_cross_compilation", default=None)

# The device that plans see when Triton's interpreter runs the kernels.
INTERPRETER = DeviceProperties(
    num_sms=4,
    shared_memory=64 * 1024,
    native_fp8=False,
    native_fp8x2=False,
    native_tf32=False,
    has_wgmma=False,
    supports_pdl=False,
    has_mfma=False,
)


def cross_compilation() -> CrossCompilation | None:
    """Return the device that `compile_for` names, or None where launches run."""
    return _cross.get()


@contextmanager
def compile_for(properties: DeviceProperties, on_compile: Callable[[str, Any, dict[str, Any]], None]) -> Iterator[None]:
    """Plan and compile for another device in this context. Tensors are on the CPU; kernels are compiled and not run.

    Triton's active driver must name the target. `quire.targets.compiling` sets both.
    """
    token = _cross.set(CrossCompilation(properties, on_compile))
    try:
        yield
    finally:
        _cross.reset(token)


def device_properties(device: torch.device) -> DeviceProperties:
    """Return a device's properties; those that `compile_for` names within its context."""
    cross = _cross.get()
    return _read(device) if cross is None else cross.properties


def interprets() -> bool:
    """Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1)."""
    if not HAS_TRITON:
        return False
    from quire import triton_internals

    return triton_internals.interprets()


def is_served_by_torch(device: torch.device) -> bool:
    """Whether PyTorch serves this device.

    It serves the CPU, unless Triton's interpreter runs the kernels or `compile_for` names another device.
    """
    return device.type == "cpu" and _cross.get() is None and not interprets()


@cache
def _read(device: torch.device) -> DeviceProperties:
    """Read a device's properties from its driver, once."""
    if device.type != "cuda":
        return INTERPRETER
    from quire.triton_internals import clock_mhz, current_target, memory_gbps

    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    with torch.cuda.device(device):
        target, index = current_target(), torch.cuda.current_device()
        gbps, mhz = memory_gbps(index), clock_mhz(index)
    if card := card_in_place_of(target):
        target, shared_memory = older_card(card, target, shared_memory)
    return properties_of(target, properties.multi_processor_count, shared_memory, gbps, mhz)


def card_in_place_of(target: Any) -> str | None:
    """Return the card whose code Triton makes for a GPU in place of the GPU's own; None if it makes the GPU's own.

    The first compilation of a process decides it: what Triton and plans keep in memory is not kept by it. Where sm121
    gets the code of sm120, its kin, plans are the GPU's own.
    """
    card = os.environ.get(OVERRIDE)
    if not card or target.backend != "cuda":
        return None
    is_kin = card not in OLDER_CARDS and card[:-1] == f"sm{target.arch // 10}"
    return None if is_kin or card == f"sm{target.arch}" else card


def older_card(card: str, target: Any, shared_memory: int, argument: str = OVERRIDE) -> tuple[Any, int]:
    """Return the compiler's target, and the shared memory of a program, of a card whose code a GPU runs.

    Args:
        card: a key of OLDER_CARDS.
        target: of the GPU that runs the code.
        shared_memory: bytes that one program may use on that GPU.
        argument: what named the card.

    Raises:
        ValueError: the GPU does not run that card's code.
    """
    older = OLDER_CARDS if target.backend == "cuda" else {}
    runs = [name for name, most in older.items() if int(name[2:]) < target.arch and most <= shared_memory]
    if card not in runs:
        gpu = f"sm{target.arch}" if target.backend == "cuda" else target.arch
        contract = f"be one of {', '.join(runs)}" if runs else "be left out"
        raise ValueError(
            f"{argument} must {contract} on a GPU of {gpu}, got {card}, whose code that GPU does not run; "
            "without it, the GPU runs its own code"
        )
    return replace(target, arch=int(card[2:])), OLDER_CARDS[card]


def properties_of(
    target: Any, num_sms: int, shared_memory: int, memory_gbps: int = 0, clock_mhz: int = 0
) -> DeviceProperties:
    """Combine what a device reports with what Triton's compiler says of its target.

    Args:
        target: triton.backends.compiler.GPUTarget.
        num_sms: of the device.
        shared_memory: bytes that one program may use.
        memory_gbps: GB that memory delivers per second.
        clock_mhz: MHz of an SM's fastest clock.
    """
    from quire.triton_internals import backend_options

    options = backend_options(target, COMPILER_OPTIONS)
    return DeviceProperties(
        num_sms=num_sms,
        shared_memory=shared_memory,
        native_fp8={"fp8e4nv", "fp8e5"} <= set(options.supported_fp8_dtypes),
        native_fp8x2=target.backend == "cuda" and "fp8e4nv" in options.supported_fp8_dtypes,
        native_tf32="tf32" in options.allowed_dot_input_precisions,
        has_wgmma=target.backend == "cuda" and target.arch == 90,
        supports_pdl=hasattr(options, "launch_pdl") and target.arch >= 90,
        has_mfma=target.backend == "hip" and target.warp_size == 64,
        memory_gbps=memory_gbps,
        clock_mhz=clock_mhz,
    )
