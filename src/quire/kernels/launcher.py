"""Launch a kernel, and launch it again without Triton's binder.

Triton's binder takes longer to bind some fifty arguments than a short kernel runs. The first launch of a plan with
tensors of given strides goes through the binder, which compiles and returns the kernel. Later launches call that kernel
with the arguments in order.
"""

import contextlib
import inspect
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent import futures
from types import ModuleType
from typing import Any, NamedTuple

import torch
from triton import AsyncCompileMode, knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from quire.dispatch.device import COMPILER_OPTIONS, compile_for, cross_compilation, device_properties, interprets
from quire.kernels.scratch import Part
from quire.kernels.views import Matrix

# Parameters, and fields of tuples, whose numbers kernels read or write one at a time, or by vectors of addresses. A
# server passes slices of them, so kernels are compiled for any address. Tensors of one number are such ones, too.
SCALARS = frozenset(
    (
        "page_table", "cu_pages", "seq_lens", "query_offsets", "key_begin", "key_end", "tree_bits", "cu_seqlens_q",
        "slot_mapping", "positions", "page_pairs", "k_scale", "v_scale", "k_scale_ptr", "v_scale_ptr", "sinks_ptr",
        "slopes_ptr", "lse_ptr", "lses",
    )
)  # fmt: skip
LAUNCHED: set[str] = set()  # names of all kernels that this process has launched, or was about to
SHARED: dict[Hashable, "CompiledLaunch"] = {}  # launches of all plans, by what Triton compiles for


class CompiledLaunch(NamedTuple):
    """A compiled kernel, and those of its arguments that do not change from layer to layer."""

    kernel: Any  # triton.compiler.CompiledKernel
    device: int
    fixed: tuple[Any, ...]
    formats: tuple[Any, ...]  # of tensor maps, as `tensor_maps.Format`
    run: Any  # Triton's launcher, for tensor maps in place of descriptors


class Unaligned:
    """Stands for a tensor where Triton asks what to compile for: of its type, at an address that 16 does not divide."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.device, self.nbytes = tensor.dtype, tensor.device, tensor.untyped_storage().nbytes()

    def data_ptr(self) -> int:
        """Return an address that 16 does not divide."""
        return 1

    def ptr_range(self) -> int:
        """Return how many bytes there are, for which Triton asks on AMD's GPUs."""
        return self.nbytes


PLAIN = frozenset((bool, float, str))  # types of numbers and texts, of which True is no 1
MOST_LAUNCHES = 1024  # that a cache keeps
MOST_BYTES = (1 << 31) - 1  # of a tensor that 32-bit offsets reach, for which Triton compiles for AMD's GPUs
MOST_THREADS = 4  # that compile
AGAIN = 8  # times that a compilation may end with SystemError; trees are a small part of it
LOADING = 2.0  # seconds that are enough to load a warm-up's kernels from Triton's cache


class LaunchCache:
    """The compiled launches of one plan, or of one verb.

    A kernel's parameters are first the tensors of a layer, then those that TMA loads, then arguments that the plan
    fixes, then constexprs.
    """

    def __init__(self) -> None:
        self.compiled: dict[Hashable, CompiledLaunch] = {}

    def relaunch(
        self,
        key: Hashable,
        grid: tuple[int, int, int],
        tensors: tuple[Any, ...],
        matrices: Iterable[tuple[int, Matrix]] = (),
    ) -> bool:
        """Launch the kernel that `launch` compiled under `key`; return False if there is none.

        There is none either while a profiler has hooks on Triton's launches, which only the binder calls.

        Args:
            key: everything but the plan, if there is one, on which the compiled kernel and its fixed arguments depend,
                the device of the tensors included.
            grid: number of programs along each axis.
            tensors: addresses, or tuples of them, in the order of the kernel's first parameters.
            matrices: addresses of the tensors that TMA loads, and what they are for TMA.
        """
        found = self.compiled.get(key)
        if found is None or is_observed():
            return False
        active: Any = driver.active
        device = active.get_current_device()
        if device != found.device:  # where the tensors are
            if not isinstance(device, int):  # of a driver that only compiles
                return False
            with torch.cuda.device(found.device):
                return self.relaunch(key, grid, tensors, matrices)
        for (address, matrix), into in zip(matrices, found.formats, strict=True):
            tensors += into.tensor_map(address, matrix.shape, matrix.strides)
        kernel, stream = found.kernel, active.get_current_stream(device)
        found.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *tensors, *found.fixed)
        return True

    def launch(
        self,
        key: Hashable | None,
        kernel: Any,
        grid: tuple[int, int, int],
        tensors: tuple[Any, ...],
        fixed: tuple[Any, ...],
        meta: dict[str, Any],
        descriptors: tuple[Any, ...] = (),
        boxes: tuple[Any, ...] = (),
    ) -> None:
        """Launch `kernel` through Triton's binder, and keep the compiled kernel under `key`, unless that is None.

        If another plan has launched it with arguments of the same kinds, this launch does not need the binder either.

        Args:
            key: as for `relaunch`.
            kernel: a jit function.
            grid: number of programs along each axis.
            tensors: the kernel's first arguments. `relaunch` takes those of another layer instead.
            fixed: the arguments after them and after the descriptors. Triton's binder gets tensors for those that are
                parts of a workspace.
            meta: constexprs and compiler options, by name.
            descriptors: the arguments between both, of which `relaunch` takes the matrices.
            boxes: as for `launch`.
        """
        if key is None:
            launch(kernel, grid, tensors_of((*tensors, *descriptors, *fixed)), meta, boxes)
            return
        num_arguments = len(tensors) + len(descriptors) + len(fixed)
        passed = address_of(fixed) + tuple(map(meta.get, kernel.arg_names[num_arguments:]))
        asked = without_alignment(kernel, (*tensors, *descriptors, *fixed))
        made_for = kinds_of((kernel, asked, tuple(meta.values()))), boxes, tuple(meta)
        found = SHARED.get(made_for)
        if found is not None:
            keep(self.compiled, key, found._replace(fixed=passed))
            matrices = [(d.base.data_ptr(), Matrix(tuple(d.shape), tuple(d.strides))) for d in descriptors]
            if self.relaunch(key, grid, address_of(tensors), matrices):
                return
        with on_device_of(tensors):
            compiled = launch(kernel, grid, tensors_of((*tensors, *descriptors, *fixed)), meta, boxes)
            if compiled is None:
                return
            formats, run = (), compiled.run
            if descriptors:
                from quire.kernels.tensor_maps import launcher_of  # here, since it imports the driver of NVIDIA's GPUs

                formats, run = launcher_of(compiled, descriptors)
            active: Any = driver.active
            launched = CompiledLaunch(compiled, active.get_current_device(), passed, formats, run)
        keep(self.compiled, key, launched)
        keep(SHARED, made_for, launched)


def keep(launches: dict[Hashable, CompiledLaunch], key: Hashable, launched: CompiledLaunch) -> None:
    """Keep a launch under a key, and at most MOST_LAUNCHES of them."""
    if len(launches) >= MOST_LAUNCHES:
        launches.clear()
    launches[key] = launched


def kinds_of(value: Any) -> Hashable:
    """Return all that Triton may compile for of an argument, or of a tuple of them: of numbers, their values."""
    kind = type(value)
    if kind is int or value is None:
        return value
    if kind in PLAIN:
        return kind, value
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
    if callable(value):  # a jit function: to hash it is to hash its source, which `hash_callees` does in an order
        return id(value)
    return kind, value


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
        return kernel[grid](*arguments, **COMPILER_OPTIONS, **meta)
    with on_device_of(arguments):
        compiled = kernel.warmup(*without_alignment(kernel, arguments), grid=grid, **COMPILER_OPTIONS, **meta)
        if target is not None:
            target.on_compile(kernel.__name__, compiled, meta)
            return None
        if boxes:
            from quire.kernels.tensor_maps import set_boxes

            set_boxes(compiled, boxes)
        compiled[(*grid, 1, 1)[:3]](*arguments, *map(meta.get, kernel.arg_names[len(arguments) :]))
        return compiled


def without_alignment(kernel: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a kernel's first arguments with an `Unaligned` for each of its SCALARS."""

    def asked(name: str, value: Any) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(asked, value._fields, value))  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(value, torch.Tensor) and (name in SCALARS or value.numel() == 1):
            return Unaligned(value)
        return value

    return tuple(map(asked, kernel.arg_names, arguments))


def on_device_of(arguments: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the device of the arguments' first tensor is the current one: Triton launches there."""
    device = next((value.device for value in arguments if isinstance(value, torch.Tensor)), None)
    return torch.cuda.device(device) if device is not None and device.type == "cuda" else contextlib.nullcontext()


def hash_callees(function: Any, callers: tuple[Any, ...] = ()) -> None:
    """Hash what a jit function calls before the function itself, which Triton does from 3.9 on.

    Before, the hash also depends on which functions were hashed earlier. A process that launches kernels in another
    order then does not find them in Triton's cache, and compiles them again.
    """
    if getattr(function, "hash", "") is not None or function in callers:  # one of the interpreter has no hash
        return
    code, scope = function.fn.__code__, inspect.getclosurevars(function.fn)
    for value in (*scope.globals.values(), *scope.nonlocals.values()):
        names = code.co_names if isinstance(value, ModuleType) else ()
        for called in (value, *(getattr(value, name, None) for name in names)):
            if isinstance(called, JITFunction) and not called.__module__.startswith("triton."):
                hash_callees(called, (*callers, function))
    _ = function.cache_key


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
        Threads(min(MOST_THREADS, os.cpu_count() or 1)) as threads,
        AsyncCompileMode(threads) as mode,
        compile_for(device_properties(device), lambda *compiled: None),
    ):
        yield lambda: len(futures.wait(mode.raw_futures, LOADING).not_done)


class Threads(futures.ThreadPoolExecutor):
    """Threads that compile.

    Python 3.11 counts the depth of syntax trees for all threads together. If two make trees at once, one may end with
    SystemError. It then compiles again.
    """

    def submit(self, compile_one: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Compile in a thread."""

        def compile_again() -> Any:
            for _ in range(AGAIN):
                with contextlib.suppress(SystemError):
                    return compile_one(*args, **kwargs)
            return compile_one(*args, **kwargs)

        return super().submit(compile_again)


def is_observed() -> bool:
    """Whether a hook on Triton's launches is set, for example by its profiler."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


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
