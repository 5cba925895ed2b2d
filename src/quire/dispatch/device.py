"""`DeviceProperties`: what a device can hold and do, as it reports it itself. Nothing is decided by a device's name."""

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True)
class DeviceProperties:
    """What choices are made from.

    Attributes:
        num_sms: multiprocessors (compute units).
        shared_memory: bytes one program may use.
        native_fp8: the compiler converts float8_e4m3fn and float8_e5m2 for this target; else they are decoded in software.
        native_fp8x2: PTX has an instruction that converts two float8_e4m3fn to two float16.
        native_tf32: TF32 matrix products exist.
        warpgroups: four warps multiply together, from shared memory, which is Hopper's way alone.
        supports_pdl: a kernel may start while the one ahead of it in the stream drains, and wait for its results itself.
        mfma: AMD's matrix instructions; the compiler takes their size, and how many waves registers are shared by, as hints.
    """

    num_sms: int
    shared_memory: int
    native_fp8: bool
    native_fp8x2: bool
    native_tf32: bool
    has_wgmma: bool
    supports_pdl: bool
    has_mfma: bool


@cache
def device_properties(device: torch.device) -> DeviceProperties:
    """Read a device's properties, once per device. The CPU gives those under which Triton's interpreter runs the kernels."""
    if device.type != "cuda":
        return DeviceProperties(
            num_sms=4, shared_memory=64 * 1024, native_fp8=False, native_fp8x2=False, native_tf32=False, has_wgmma=False, supports_pdl=False, has_mfma=False
        )  # fmt: skip
    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    with torch.cuda.device(device):
        target = triton.runtime.driver.active.get_current_target()
    return properties_of(target, properties.multi_processor_count, shared_memory)


def properties_of(target, num_sms: int, shared_memory: int) -> DeviceProperties:
    """Combine what a device reports with what Triton's compiler says of its target (`triton.backends.compiler.GPUTarget`)."""
    options = triton.compiler.make_backend(target).parse_options({})
    return DeviceProperties(
        num_sms=num_sms,
        shared_memory=shared_memory,
        native_fp8={"fp8e4nv", "fp8e5"} <= set(options.supported_fp8_dtypes),
        native_fp8x2=target.backend == "cuda" and "fp8e4nv" in options.supported_fp8_dtypes,
        native_tf32="tf32" in options.allowed_dot_input_precisions,
        has_wgmma=target.backend == "cuda" and target.arch == 90,
        supports_pdl=hasattr(options, "launch_pdl") and target.arch >= 90,
        has_mfma=target.backend == "hip" and target.warp_size == 64,
    )
