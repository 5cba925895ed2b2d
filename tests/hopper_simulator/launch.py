"""Run Gluon kernels on a CPU: their Python functions, with simulated values, memory and warps in place of Gluon's."""

import contextlib
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass
from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from quire.dispatch import device
from quire.kernels import launcher
from quire.kernels.gluon import compat

from . import values
from .assembly import inline_asm_elementwise
from .memory import GlobalMemory, Tile
from .program import Machine, Program
from .values import TRITON_DTYPES, Value, value

AT_A_TIME = 4  # programs
DTYPES = (
    "int1", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float8e4nv", "float8e5",
    "pointer_type",
)  # fmt: skip
HOPPER = partial(
    device.DeviceProperties,
    shared_memory=232448,
    native_fp8=False,
    native_fp8x2=False,
    native_tf32=False,
    has_wgmma=True,
    supports_pdl=False,
    has_mfma=False,
)


class Descriptor:
    """A TMA descriptor of a matrix."""

    def __init__(self, descriptor: TensorDescriptor, box: tuple[int, ...] | None) -> None:
        base = descriptor.base
        self.numbers = torch.empty(0, dtype=base.dtype).set_(base.untyped_storage())
        self.shape, self.strides, self.origin = descriptor.shape, descriptor.strides, base.storage_offset()
        self.block_shape, self.layout = descriptor.block_shape, descriptor.layout
        self.extents = descriptor.block_shape if box is None else [*box]  # what TMA loads
        self.dtype = TRITON_DTYPES[base.dtype]

    def box(self, first: list[int]) -> torch.Tensor:
        """Return a box. What is outside of the matrix is 0."""
        sizes = zip(first, self.extents, self.shape, strict=True)
        if all(start >= 0 and start + size <= extent for start, size, extent in sizes):
            origin = self.origin + sum(start * stride for start, stride in zip(first, self.strides, strict=True))
            return torch.as_strided(self.numbers, self.extents, self.strides, origin)
        offset, inside = torch.tensor(self.origin), torch.tensor(True)
        for start, size, extent, stride in zip(first, self.extents, self.shape, self.strides, strict=True):
            at = torch.arange(start, start + size)
            offset = offset[..., None] + at * stride
            inside = inside[..., None] & (at >= 0) & (at < extent)
        return torch.where(inside, self.numbers[torch.where(inside, offset, self.origin)].float(), 0).to(
            self.numbers.dtype
        )


def language(machine: Machine) -> types.SimpleNamespace:
    """Return what kernels know as `gl`, and as `tl`."""
    names = {name: getattr(tl, name) for name in DTYPES}
    return types.SimpleNamespace(
        **names,
        constexpr=lambda x: x, static_range=range, tensor=Value, shared_memory_descriptor=Tile,
        NVMMASharedLayout=gl.NVMMASharedLayout, SwizzledSharedLayout=any_layout, BlockedLayout=any_layout,
        SliceLayout=any_layout, NVMMADistributedLayout=any_layout, DotOperandLayout=any_layout,
        DistributedLinearLayout=any_layout,
        program_id=machine.program_id, num_programs=machine.num_programs, num_warps=machine.num_warps,
        warp_specialize=machine.warp_specialize, allocate_shared_memory=machine.allocate_shared_memory,
        load=machine.memory.load, store=machine.memory.store, atomic_add=machine.atomic_add,
        inline_asm_elementwise=partial(inline_asm_elementwise, machine),
        arange=values.arange, full=values.full, zeros=values.zeros, zeros_like=values.zeros_like,
        where=values.where, fma=values.fma, join=values.join, split=values.split,
        convert_layout=values.convert_layout, associative_scan=values.scan_of,
        sum=values.sum_of, max=values.max_of, min=values.min_of,
        clamp=values.clamp, div_rn=values.divide, PropagateNan=tl.PropagateNan,
        maximum=values.of_two(values.larger, torch.maximum), minimum=values.of_two(values.smaller, torch.minimum),
        exp=values.by_element(torch.exp),
        exp2=values.by_element(torch.exp2), log=values.by_element(torch.log), abs=values.by_element(torch.abs),
        sqrt=values.by_element(torch.sqrt), rsqrt=values.by_element(torch.rsqrt),
    )  # fmt: skip


def any_layout(*args: Any, **kwargs: Any) -> str:
    return values.Type.layout


def simulated(machine: Machine) -> list[tuple[Any, Any]]:
    """Return the objects that kernels refer to, with what takes their place."""
    simulated_language = language(machine)
    barriers = types.SimpleNamespace(
        init=machine.init, expect=machine.expect, arrive=machine.arrive_at, wait=machine.wait,
        MBarrierLayout=any_layout,
    )  # fmt: skip
    copies = types.SimpleNamespace(mbarrier_arrive=machine.arrive_after_copies)
    return [
        (gl, simulated_language), (tl, simulated_language), (hopper.mbarrier, barriers),
        (compat.async_copy, copies), (compat.copy_async, machine.copy_async),
        (compat.tma_load, machine.tma_load), (compat.reinterpret, Tile.reinterpret),
        (compat.barrier, machine.barrier),
        (hopper.fence_async_shared, machine.fence_async_shared), (hopper.warpgroup_mma, machine.warpgroup_mma),
        (hopper.warpgroup_mma_wait, machine.warpgroup_mma_wait),
        (cuda.gdc_wait, lambda: None), (cuda.gdc_launch_dependents, lambda: None),
    ]  # fmt: skip


class Functions:
    """Python functions of kernels, which refer to simulated objects."""

    def __init__(self, machine: Machine) -> None:
        self.replaced = {id(original): replacement for original, replacement in simulated(machine)}
        self.made: dict[int, Any] = {}

    def simulated(self, known: Any) -> Any:
        """Return what a kernel's name stands for."""
        if id(known) in self.replaced:
            return self.replaced[id(known)]
        if isinstance(known, gl.constexpr | tl.constexpr):
            return constant(known.value)
        if isinstance(known, types.ModuleType) and known.__name__.startswith("quire."):
            return Names(self, vars(known))
        if getattr(known, "__triton_aggregate__", False):
            return self.aggregate(known)
        original = getattr(known, "fn", None)
        if isinstance(original, types.FunctionType):
            return self.function(original)
        return known

    def aggregate(self, original: type) -> type:
        """Return a class with the fields and the simulated methods of an aggregate."""
        if id(original) not in self.made:
            names: Any = original.fields
            methods = {name: self.simulated(vars(original)[name]) for name in original.methods}
            self.made[id(original)] = make_dataclass(original.__name__, names, namespace=methods, eq=False)
        return self.made[id(original)]

    def function(self, original: types.FunctionType) -> Callable[..., Any]:
        """Return a function with simulated globals, which are found when they are first used."""
        if id(original) not in self.made:
            names = Globals(self, original.__globals__)
            made = types.FunctionType(original.__code__, names, original.__name__, original.__defaults__)
            self.made[id(original)] = made
        return self.made[id(original)]


class Names:
    """A module whose functions are simulated."""

    def __init__(self, functions: Functions, original: dict[str, Any]) -> None:
        self.functions, self.original = functions, original

    def __getattr__(self, name: str) -> Any:
        return self.functions.simulated(self.original[name])


class Globals(dict):
    """The globals of a module of kernels, simulated."""

    def __init__(self, functions: Functions, original: dict[str, Any]) -> None:
        super().__init__({"__builtins__": original["__builtins__"]})
        self.functions, self.original = functions, original

    def __missing__(self, name: str) -> Any:
        self[name] = self.functions.simulated(self.original[name])
        return self[name]


def constant(known: Any) -> Any:
    """Return the value of a constexpr, with itself as the attribute `value`."""
    if known is None or isinstance(known, bool) or not isinstance(known, int | float | tuple):
        return known
    return CONSTANTS[type(known)](known)


CONSTANTS = {t: type(t.__name__, (t,), {"value": property(lambda self: self)}) for t in (int, float, tuple)}


def argument(given: Any, memory: GlobalMemory, box: tuple[int, ...] | None = None) -> Any:
    """Return an argument of a launch as the kernel sees it."""
    if isinstance(given, torch.Tensor):
        memory.add(given)
        return Value(torch.tensor(given.data_ptr()), tl.pointer_type(TRITON_DTYPES[given.dtype]))
    if isinstance(given, TensorDescriptor):
        memory.add(given.base)
        return Descriptor(given, box)
    if isinstance(given, tuple):
        parts = [argument(part, memory) for part in given]
        return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
    return given if given is None else value(given)


def simulate(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: dict[str, Any], boxes: tuple[Any, ...],
    seed: int,
) -> None:  # fmt: skip
    """Run a launch of a Gluon kernel."""
    memory = GlobalMemory()
    machine = Machine(seed, grid, memory)
    functions = Functions(machine)
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | meta
    # A compiler knows an argument of 1, unless the kernel says that it must not.
    ones = {
        p.name for p in kernel.params if type(given[p.name]) is int and given[p.name] == 1 and not p.do_not_specialize
    }
    fixed = {p.name for p in kernel.params if p.is_constexpr} | ones
    descriptors = [name for name in kernel.arg_names if isinstance(given[name], TensorDescriptor)]
    box_of = dict(zip(descriptors, boxes or [None] * len(descriptors), strict=True))
    bound = [
        functions.simulated(given[name]) if name in fixed else argument(given[name], memory, box_of.get(name))
        for name in kernel.arg_names
    ]  # fmt: skip
    run = functions.function(kernel.fn)
    ids = list(itertools.product(*(range(extent) for extent in reversed(grid))))
    if len(ids) > AT_A_TIME:  # programs begin in any order
        random.Random(seed).shuffle(ids)
    for first in range(0, len(ids), AT_A_TIME):
        programs = [Program(machine, at[::-1]) for at in ids[first : first + AT_A_TIME]]
        machine.run([(program, lambda: run(*bound)) for program in programs])


@contextlib.contextmanager
def simulated_hopper(seed: int = 0, num_sms: int = 6) -> Iterator[list[str]]:
    """Let plans for tensors on a CPU take a Hopper GPU's kernels, of which those in Gluon are simulated.

    Others run in Triton's interpreter. Yields the names of the kernels that were simulated.
    """
    launch, simulated_names = launcher.launch, []

    def launch_simulated(
        kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: dict[str, Any],
        boxes: tuple[Any, ...] = (),
    ) -> Any:  # fmt: skip
        if not isinstance(kernel, gluon._runtime.GluonJITFunction):
            overlapping = {"PDL": False, "launch_pdl": False}  # each kernel begins when the one before has ended
            return launch(
                kernel, grid, arguments, meta | {name: overlapping[name] for name in overlapping if name in meta}
            )
        simulated_names.append(kernel.__name__)
        return simulate(kernel, grid, arguments, meta, boxes, seed)

    properties = HOPPER(num_sms=num_sms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "launch", launch_simulated)
        patch.setattr(device, "_read", lambda _: properties)
        patch.setattr(sys.modules["quire.plan"], "interprets", lambda: False)  # which refuses bfloat16
        yield simulated_names
