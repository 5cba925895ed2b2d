"""`Traits`: what a device can hold and do, as it reports it itself. Nothing is decided by a device's name."""

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True)
class Traits:
    """What choices are made from.

    Attributes:
        num_sms: multiprocessors (compute units).
        shared_memory: bytes one program may use.
        native_fp8: the compiler converts float8_e4m3fn and float8_e5m2 for this target; else they are decoded in software.
        native_pairs: PTX has an instruction that converts two float8_e4m3fn to two float16.
        native_tf32: TF32 matrix products exist.
        warpgroups: four warps multiply together, from shared memory, which is Hopper's way alone.
        dependent_launch: a kernel may start while the one ahead of it in the stream drains, and wait for its results itself.
        mfma: AMD's matrix instructions; the compiler takes their size, and how many waves registers are shared by, as hints.
    """

    num_sms: int
    shared_memory: int
    native_fp8: bool
    native_pairs: bool
    native_tf32: bool
    warpgroups: bool
    dependent_launch: bool
    mfma: bool


@cache
def device_traits(device: torch.device) -> Traits:
    """Read a device's traits, once per device. The CPU gives those under which Triton's interpreter runs the kernels."""
    if device.type != "cuda":
        return Traits(
            num_sms=4, shared_memory=64 * 1024, native_fp8=False, native_pairs=False, native_tf32=False, warpgroups=False, dependent_launch=False, mfma=False
        )  # fmt: skip
    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    with torch.cuda.device(device):
        target = triton.runtime.driver.active.get_current_target()
    return traits_of(target, properties.multi_processor_count, shared_memory)


def traits_of(target, num_sms: int, shared_memory: int) -> Traits:
    """Combine what a device reports with what Triton's compiler says of its target (`triton.backends.compiler.GPUTarget`)."""
    options = triton.compiler.make_backend(target).parse_options({})
    return Traits(
        num_sms=num_sms,
        shared_memory=shared_memory,
        native_fp8={"fp8e4nv", "fp8e5"} <= set(options.supported_fp8_dtypes),
        native_pairs=target.backend == "cuda" and "fp8e4nv" in options.supported_fp8_dtypes,
        native_tf32="tf32" in options.allowed_dot_input_precisions,
        warpgroups=target.backend == "cuda" and target.arch == 90,
        dependent_launch=hasattr(options, "launch_pdl") and target.arch >= 90,
        mfma=target.backend == "hip" and target.warp_size == 64,
    )
