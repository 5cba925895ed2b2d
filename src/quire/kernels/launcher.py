"""Launch a kernel, and launch it again without Triton's binder.

Triton's binder takes longer to bind some fifty arguments than a short kernel runs. The first launch of a plan with
tensors of given kinds goes through the binder, which compiles and returns the kernel. Later launches call that kernel
with the arguments in order.
"""

import contextlib
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire import log
from quire.cache import PagedKVCache
from quire.dispatch.device import (
    COMPILER_OPTIONS,
    DeviceProperties,
    compile_for,
    cross_compilation,
    device_properties,
    interprets,
)
from quire.kernels.scratch import Part
from quire.kernels.tensor_maps import formats_and_launcher
from quire.kernels.views import Matrix
from quire.triton_internals import (
    GPUTarget,
    StubDriver,
    Unaligned,
    compiled_for,
    compiling_in,
    current_device,
    driven_by,
    hash_callees,
    is_observed,
    launch_again,
    launch_bound,
    launcher_of,
    parameters,
    set_boxes,
    told_of_compilations,
)

# Parameters, and fields of tuples, whose numbers kernels read or write one at a time, or by vectors of addresses. A
# server passes slices of them, so kernels are compiled for any address. Tensors of one number are such ones, too.
SCALARS = frozenset(
    (
        "page_table", "cu_pages", "seq_lens", "query_offsets", "key_begin", "key_end", "tree_bits", "cu_seqlens_q",
        "slot_mapping", "positions", "page_pairs", "k_scale", "v_scale", "k_scale_ptr", "v_scale_ptr", "sinks_ptr",
        "slopes_ptr", "lse_ptr", "lses", "indices", "list_lens", "extra_indices",
        "extra_lens",
    )
)  # fmt: skip


class Plain(int):
    """A number that decides nothing about what is compiled: neither 1 nor a multiple of 16."""


LAUNCHED: set[str] = set()  # names of all kernels that this process has launched, or was about to
SHARED: dict[Hashable, "CompiledLaunch"] = {}  # launches of all plans, by what Triton compiles for
MOST_LAUNCHES = 1024  # that a cache keeps
MOST_BYTES = (1 << 31) - 1  # of a tensor that 32-bit offsets reach, for which Triton compiles for AMD's GPUs
MOST_THREADS = 4  # that compile
LOADING = 2.0  # seconds that are enough to load a warm-up's kernels from Triton's cache


class CompiledLaunch(NamedTuple):
    """A compiled kernel, and those of its arguments that do not change from layer to layer."""

    kernel: Any  # triton.compiler.CompiledKernel
    device: int | str
    fixed: tuple[Any, ...]
    formats: tuple[Any, ...]  # of tensor maps, as `tensor_maps.Format`
    run: Any  # Triton's launcher, for tensor maps in place of descriptors


class Arguments(NamedTuple):
    """The arguments of a kernel, in the order of its parameters: tensors, descriptors, fixed, and then those by name.

    Attributes:
        tensors: of a layer.
        fixed: what the plan and the kinds of the tensors fix. Triton's binder gets tensors for those that are parts of
            a workspace.
        meta: constexprs and compiler options.
        descriptors: of tensors that TMA loads.
        boxes: as for `launch`.
    """

    tensors: tuple[Any, ...]
    fixed: tuple[Any, ...]
    meta: dict[str, Any]
    descriptors: tuple[Any, ...] = ()
    boxes: tuple[Any, ...] = ()


class Kernel:
    """A kernel as one plan, or one verb, launches it, and its compiled launches.

    Args:
        function: a jit function.
    """

    __slots__ = ("compiled", "function")

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: dict[Hashable, CompiledLaunch] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Any, ...],
        facts: Hashable,
        arguments: Callable[..., Arguments],
        matrices: Iterable[tuple[int, Matrix]] = (),
    ) -> None:
        """Launch the kernel.

        Args:
            grid: number of programs along each axis.
            tensors: of a layer, in the order of the kernel's first parameters: a tensor, a cache, a NamedTuple of
                tensors and numbers, None, or the address of a tensor whose dtype and strides `facts` decide.
            facts: on what else the compiled kernel and its fixed arguments depend, besides the plan if there is one.
                Where there is none, the device of the tensors is such a fact.
            arguments: returns all arguments. It is called with `tensors` if they are the first ones of their kinds.
            matrices: addresses of the tensors that TMA loads, and what they are for TMA.
        """
        addresses: list[Any] = []
        kinds: list[Hashable] = [facts]  # of a tensor: whether 16 divides its address, its dtype and its strides
        for tensor in tensors:
            if tensor is None:
                addresses.append(None)
                kinds.append(None)
            elif (kind := type(tensor)) is int:
                addresses.append(tensor)
                kinds.append(not tensor & 15)
            elif kind is PagedKVCache:
                at = tensor.addresses
                addresses.append(at)
                kinds += not at[0] & 15, not (at[1] or 0) & 15, tensor.kind  # scales are read one at a time
            elif kind is Tensor or not isinstance(tensor, tuple):
                at = tensor.data_ptr()
                addresses.append(at)
                kinds += not at & 15, tensor.dtype, tensor.stride()
            else:
                at, of_parts = addresses_and_kinds(tensor)
                addresses.append(at)
                kinds += of_parts
        key = tuple(kinds)
        if not self.relaunch(key, grid, addresses, matrices):
            self.launch(key, grid, arguments(*tensors))

    def relaunch(
        self,
        key: Hashable,
        grid: tuple[int, int, int],
        addresses: list[Any],
        matrices: Iterable[tuple[int, Matrix]] = (),
    ) -> bool:
        """Launch what `launch` compiled under `key`; return False if there is nothing.

        There is nothing either while a profiler has hooks on Triton's launches, which only the binder calls.

        Args:
            key: the kinds of the tensors, and the facts.
            grid: as for the call, like `matrices`.
            addresses: of the tensors, or tuples of them; this function appends to them.
            matrices: see `grid`.
        """
        found = self.compiled.get(key)
        if found is None:
            return False
        if found.formats:
            for (address, matrix), into in zip(matrices, found.formats, strict=True):
                addresses += into.tensor_map(address, matrix.shape, matrix.strides)
        addresses += found.fixed
        if launch_again(found.kernel, found.run, grid, found.device, addresses):
            return True
        if is_observed() or not isinstance(current_device(), int):  # or the driver only compiles
            return False
        with torch.cuda.device(found.device):  # where the tensors are
            return launch_again(found.kernel, found.run, grid, found.device, addresses)

    def launch(self, key: Hashable, grid: tuple[int, int, int], arguments: Arguments) -> None:
        """Launch the kernel through Triton's binder, and keep what it compiles under `key`.

        If another plan has launched it with arguments of the same kinds, this launch does not need the binder either.
        Where kernels are only compiled, it is not launched: the schedule that it would read was not found either.
        """
        kernel, (tensors, fixed, meta, descriptors, boxes) = self.function, arguments
        positional = *tensors, *descriptors, *fixed
        passed = address_of(fixed) + tuple(map(meta.get, parameters(kernel)[len(positional) :]))
        asked = without_alignment(kernel, positional)
        # Functions by their ids: to hash one is to hash its source, which `hash_callees` does in an order.
        constants = [id(value) if callable(value) else value for value in meta.values()]
        made_for = id(kernel), kinds_of(asked), boxes, *meta, *map(type, meta.values()), *constants  # True is no 1
        found = SHARED.get(made_for)
        if found is not None and cross_compilation() is None:
            keep(self.compiled, key, found._replace(fixed=passed))
            matrices = [(d.base.data_ptr(), Matrix(tuple(d.shape), tuple(d.strides))) for d in descriptors]
            if self.relaunch(key, grid, [*address_of(tensors)], matrices):
                return
        with on_device_of(tensors):
            compiled = launch(kernel, grid, tensors_of(positional), meta, boxes)
            if compiled is None:
                return
            formats, run = formats_and_launcher(compiled, descriptors) if descriptors else ((), launcher_of(compiled))
            launched = CompiledLaunch(compiled, current_device(), passed, formats, run)
        keep(self.compiled, key, launched)
        keep(SHARED, made_for, launched)


def keep(launches: dict[Hashable, CompiledLaunch], key: Hashable, launched: CompiledLaunch) -> None:
    """Keep a launch under a key, and at most MOST_LAUNCHES of them."""
    if len(launches) >= MOST_LAUNCHES:
        launches.clear()
    launches[key] = launched


def addresses_and_kinds(parts: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Hashable]]:
    """Return a tuple of tensors and numbers with addresses in place of tensors, and what a kernel is compiled for.

    Strides are among the numbers. Triton compiles for no value of a float.
    """
    addresses, kinds = [], []
    for part in parts:
        if part is None or (kind := type(part)) is int:
            addresses.append(part)
            kinds.append(part)
        elif kind is float:
            addresses.append(part)
        elif kind is Plain:
            addresses.append(int(part))
        else:
            at = part.data_ptr()
            addresses.append(at)
            kinds += not at & 15, part.dtype
    return tuple(addresses), kinds


def kinds_of(value: Any) -> Hashable:
    """Return all that Triton may compile for of an argument, or of a tuple of them: of integers, their values."""
    kind = type(value)
    if kind is int or value is None:
        return value
    if kind is float:  # Triton compiles for no value of it
        return kind
    if isinstance(value, tuple):
        return tuple(map(kinds_of, value))
    if isinstance(value, torch.Tensor):
        return value.device, value.dtype, value.data_ptr() % 16 == 0, value.untyped_storage().nbytes() <= MOST_BYTES
    if isinstance(value, Unaligned):
        return value.device, value.dtype, value.nbytes <= MOST_BYTES
    if isinstance(value, Part):
        return kinds_of(value.workspace), value.dtype, value.first % 16
    if hasattr(value, "block_shape"):  # a descriptor
        return kind, value.base.dtype, tuple(value.block_shape), value.layout
    return kind, value  # True is no 1


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], meta: dict[str, Any], boxes: tuple[Any, ...] = ()
) -> Any:
    """Launch a kernel through Triton's binder, where its tensors are; if `compile_for` names a device, only compile it.

    Args:
        kernel: a jit function.
        grid: number of programs along each axis.
        arguments: that come first.
        meta: constexprs and compiler options, by name.
        boxes: of each descriptor, the extents that TMA loads at a time, or None for those of the descriptor. Triton
            compiles for powers of two alone.

    Returns:
        The compiled kernel; None in Triton's interpreter, or if it was only compiled.
    """
    LAUNCHED.add(kernel.__name__)
    for function in (kernel, *meta.values()):  # constexprs may be functions
        hash_callees(function)
    target = cross_compilation()
    if target is None and interprets():
        if log.is_on(log.LAUNCH):
            log.say_once(log.LAUNCH, f"{kernel.__name__}, grid {shown_grid(grid)}, in Triton's interpreter")
        return kernel[grid](*arguments, **COMPILER_OPTIONS, **meta)
    with on_device_of(arguments):
        compile_for_these = log_compilation if target is None and log.is_on(log.LAUNCH) else compiled_for
        compiled = compile_for_these(kernel, without_alignment(kernel, arguments), grid, COMPILER_OPTIONS | meta)
        if target is not None:
            target.on_compile(kernel.__name__, compiled, meta)
            return None
        if boxes:
            set_boxes(compiled, boxes)
        named = map(meta.get, parameters(kernel)[len(arguments) :])
        launch_bound(compiled, grid, (*arguments, *named))
        return compiled


def log_compilation(kernel: Any, arguments: tuple[Any, ...], grid: tuple[int, ...], options: dict[str, Any]) -> Any:
    """Return what `compiled_for` returns, and say whether the kernel was compiled for it, and how long that took."""
    began, found = time.perf_counter(), []
    with told_of_compilations(kernel, found.append):
        compiled = compiled_for(kernel, arguments, grid, options)
    seconds = time.perf_counter() - began
    how = "loaded before" if not found else f"{'from the cache' if found[0] else 'compiled'} in {seconds:.2f} s"
    line = f"{kernel.__name__}, grid {shown_grid(grid)}, {how}"
    log.say_once(log.LAUNCH, line, (kernel.__name__, compiled.hash))
    return compiled


def shown_grid(grid: tuple[int, ...]) -> str:
    """Describe a grid."""
    return " × ".join(map(str, grid))


def without_alignment(kernel: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a kernel's first arguments with an `Unaligned` for each of its SCALARS."""

    def asked(name: str, value: Any) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(asked, value._fields, value))  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(value, tuple) and name == "extras":
            return tuple(Unaligned(part) if isinstance(part, torch.Tensor) else part for part in value)
        if isinstance(value, torch.Tensor) and (name in SCALARS or value.numel() == 1):
            return Unaligned(value)
        return value

    return tuple(map(asked, parameters(kernel), arguments))


def on_device_of(arguments: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the device of the arguments' first tensor is the current one: Triton launches there."""
    device = next((value.device for value in arguments if isinstance(value, torch.Tensor)), None)
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def compile_together(device: torch.device) -> Iterator[Callable[[], int]]:
    """Compile what is launched in this context, several kernels at a time, and launch nothing.

    Triton holds Python's lock for about a third of a compilation, so more threads than a few gain little.

    Yields:
        A function that returns how many kernels are missing. It waits for those that Triton's cache has.
    """
    if interprets():
        yield lambda: 0
        return
    with (
        futures.ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads,
        compiling_in(threads) as num_missing,
        compile_for(device_properties(device), lambda *compiled: None),
    ):
        yield lambda: num_missing(LOADING)


@contextlib.contextmanager
def compile_only(
    name: str,
    gpu: GPUTarget,
    properties: DeviceProperties,
    on_compile: Callable[[str, Any, dict[str, Any]], None] = lambda *compiled: None,
) -> Iterator[None]:
    """Compile every launch in this context for a target, without running it; tensors are on the CPU.

    Args:
        name: of the target.
        gpu: the target of Triton's compiler.
        properties: those that plans see.
        on_compile: as `compile_for` takes it.
    """
    with driven_by(StubDriver(name, gpu)), compile_for(properties, on_compile):
        yield


def address_of(value: Any) -> Any:
    """Return the address of a tensor, the addresses of a tuple's tensors, or any other value unchanged."""
    if type(value) is int or value is None:
        return value
    if isinstance(value, tuple):
        return tuple(map(address_of, value))
    return value.data_ptr() if isinstance(value, torch.Tensor | Part) else value


def tensors_of(value: Any) -> Any:
    """Return an argument with tensors in place of parts of a workspace."""
    if isinstance(value, tuple):
        made = map(tensors_of, value)
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return value.tensor() if isinstance(value, Part) else value
