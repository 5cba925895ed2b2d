"""What Quire uses of Triton beyond `triton.jit`, `triton.language` and Gluon, each in a function of its own.

Triton promises nothing about these names, and its versions differ in some. No other module uses them.
`tests/compile/test_triton_internals.py` tries each with every version that is served, so it says what a new version
lacks.
"""

import contextlib
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from triton import AsyncCompileMode, knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget as GPUTarget
from triton.compiler import CompiledKernel as CompiledKernel
from triton.compiler import make_backend
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import FileCacheManager, triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable, JITFunction
from triton.testing import get_dram_gbps

# Devices


def current_target() -> GPUTarget:
    """Return the target of Triton's compiler: the current GPU, or what a driver that stands in for one names."""
    active: Any = driver.active
    return active.get_current_target()


def current_device() -> int | str:
    """Return the number of the current GPU, or the name that a driver gives it that only compiles."""
    active: Any = driver.active
    return active.get_current_device()


def backend_options(target: GPUTarget, options: dict[str, Any]) -> Any:
    """Return what the compiler makes of options for a target, with defaults; it says which dtypes the target has."""
    return make_backend(target).parse_options({"arch": arch_of(target), **options})


def arch_of(target: GPUTarget) -> str:
    """Return what the compiler calls a target."""
    return f"sm{target.arch}" if target.backend == "cuda" else str(target.arch)


@contextlib.contextmanager
def lowering_for(target: GPUTarget) -> Iterator[None]:
    """Let Triton lower for a target in this context, whatever the driver names. For that, ptxas still assembles.

    From Triton 3.6 to 3.9, the passes and LLVM's optimiser get the target; LLVM writes PTX for the driver's GPU.
    """
    with knobs.runtime.scope():
        knobs.runtime.override_arch = arch_of(target)
        yield


def memory_gbps(index: int) -> int:
    """Return GB that the memory of a GPU delivers per second, by its clock and the width of its bus."""
    return round(get_dram_gbps(index))


def clock_mhz(index: int) -> int:
    """Return the MHz of a GPU's fastest clock of SMs."""
    active: Any = driver.active
    return round(active.utils.get_device_properties(index)["sm_clock_rate"] / 1e3)


class StubDriver:
    """A driver of Triton that names a target and launches nothing.

    The device is the target's name, so that Triton keeps the kernels of different targets apart.
    """

    def __init__(self, name: str, gpu: GPUTarget) -> None:
        self.name, self.gpu = name, gpu

    def get_current_target(self) -> GPUTarget:
        """Return the target of the compiler."""
        return self.gpu

    def get_current_device(self) -> str:
        """Return the target's name."""
        return self.name

    def get_current_stream(self, device: str) -> int:
        """Return the default stream."""
        return 0


@contextlib.contextmanager
def driven_by(stub: Any) -> Iterator[None]:
    """Let a driver that stands in for Triton's be the active one in this context."""
    before = driver._active
    driver.set_active(stub)
    try:
        yield
    finally:
        driver._active = before


# The folder of compiled kernels, and who listens


def interprets() -> bool:
    """Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1)."""
    return knobs.runtime.interpret


def cache_folder() -> Path:
    """Return the folder in which Triton keeps compiled kernels."""
    return Path(knobs.cache.dir)


@contextlib.contextmanager
def caching_in(folder: Path) -> Iterator[None]:
    """Let Triton keep compiled kernels in a folder in this context, whatever the environment says."""
    with knobs.cache.scope():
        knobs.cache.dir = str(folder)
        yield


def compiler_facts(target: GPUTarget, options: dict[str, Any]) -> dict[str, str]:
    """Return by name what decides, besides a kernel and its options, where Triton looks for it in its cache."""
    backend = make_backend(target)
    return {
        "Triton": triton.__version__,
        "Triton's files": hashlib.sha256(triton_key().encode()).hexdigest(),
        "compiler": backend.hash(),  # on NVIDIA's GPUs, what ptxas says of itself
        "options": backend_options(target, options).hash(),
        "environment": str(sorted(get_cache_invalidating_env_vars().items())),
    }


def is_cached(key: str, name: str) -> bool:
    """Return whether the folder `key` of Triton's cache has a file: of a kernel, with what makes Triton find it."""
    manager = cache_manager(key)
    if name.endswith(".so"):
        return manager.get_file(name) is not None
    return name in (manager.get_group(f"{Path(name).stem}.json") or {})


def put_into_cache(key: str, files: dict[str, bytes]) -> None:
    """Put files into the folder `key` of Triton's cache: a library, or the code and the metadata of a kernel."""
    manager = cache_manager(key)
    paths = {name: manager.put(content, name) for name, content in files.items()}
    for name in paths:
        if name.endswith(".json"):
            manager.put_group(name, paths)


def cache_manager(key: str) -> Any:
    """Return what reads and writes the folder `key` of Triton's cache."""
    return (knobs.cache.manager_class or FileCacheManager)(key)


@contextlib.contextmanager
def before_loading(call: Callable[[str], None]) -> Iterator[None]:
    """Call a function in this context with the name of each kernel that is about to be loaded."""
    hooks = knobs.runtime.kernel_load_start_hook

    def told(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        call(name)

    hooks.add(told)
    try:
        yield
    finally:
        hooks.remove(told)


@contextlib.contextmanager
def told_of_compilations(kernel: Any, call: Callable[[bool], None]) -> Iterator[None]:
    """Call a function in this context when Triton has compiled a jit function: whether the cache on disk had it."""
    before = knobs.compilation.listener

    def told(**facts: Any) -> None:
        if facts["src"].fn is kernel:
            call(facts["cache_hit"])
        if before is not None:
            before(**facts)

    knobs.compilation.listener = told
    try:
        yield
    finally:
        knobs.compilation.listener = before


def is_observed() -> bool:
    """Whether a hook on launches is set, for example by Triton's profiler."""
    runtime = knobs.runtime
    try:
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:  # one is a function, or None, in place of a chain of hooks
        return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def proton_records() -> bool:
    """Return whether Proton, Triton's profiler, records."""
    from triton.profiler.flags import flags  # here, since it loads the library of CUDA's profiler

    return flags.profiling_on


# Compiling


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


def parameters(kernel: Any) -> list[str]:
    """Return the names of a jit function's parameters."""
    return kernel.arg_names


def compiled_for(kernel: Any, arguments: tuple[Any, ...], grid: tuple[int, ...], options: dict[str, Any]) -> Any:
    """Return the kernel that Triton compiles, or has compiled, for arguments; within `compiling_in`, one to come."""
    return kernel.warmup(*arguments, grid=grid, **options)


def hash_callees(function: Any, callers: tuple[Any, ...] = ()) -> None:
    """Hash what a jit function calls, methods of aggregates too, before the function itself: Triton does from 3.9 on.

    Before, the hash also depends on which functions were hashed earlier. A process that launches kernels in another
    order then does not find them in Triton's cache, and compiles them again.
    """
    if getattr(function, "hash", "") is not None or function in callers:  # one of the interpreter has no hash
        return
    code, scope = function.fn.__code__, inspect.getclosurevars(function.fn)
    for value in (*scope.globals.values(), *scope.nonlocals.values()):
        names = code.co_names if isinstance(value, ModuleType) else getattr(value, "methods", ())  # of an aggregate
        for called in (value, *(getattr(value, name, None) for name in names)):
            if isinstance(called, JITFunction) and not called.__module__.startswith("triton."):
                hash_callees(called, (*callers, function))
    _ = function.cache_key


PARSING = threading.RLock()
PARSERS: list[Any] = []  # Triton's own method, once for each context in which threads parse in turn


@contextlib.contextmanager
def parsing_in_turn() -> Iterator[None]:
    """Let one thread at a time make the syntax tree of a jit function.

    Python 3.11 counts the depth of the trees of all threads together, and may end one of two with SystemError.
    Triton has no other place for a lock. Its method is back as soon as the last of these contexts ends.
    """
    function_class: Any = JITFunction

    def parse_alone(function: Any) -> Any:
        with PARSING:
            return parse(function)

    with PARSING:
        parse = PARSERS[0] if PARSERS else function_class.parse
        PARSERS.append(parse)
        function_class.parse = parse_alone
    try:
        yield
    finally:
        with PARSING:
            PARSERS.pop()
            if not PARSERS:
                function_class.parse = parse


@contextlib.contextmanager
def compiling_in(executor: futures.Executor) -> Iterator[Callable[[float], int]]:
    """Compile in an executor in this context, and wait at its end.

    Yields:
        A function that waits for so many seconds and returns how many kernels are still missing.
    """
    try:
        with parsing_in_turn(), AsyncCompileMode(executor) as mode:
            yield lambda seconds: len(futures.wait(mode.raw_futures, seconds).not_done)
    finally:
        active_mode.set(None)  # Triton 3.6 leaves it where a kernel failed, and later ones would go to this executor


def cuobjdump() -> Path:
    """Return NVIDIA's tool that reads compiled kernels, which comes with Triton."""
    return Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


# Launching


def launch_bound(compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    """Launch a compiled kernel as Triton's binder does; hooks are called."""
    compiled[(*grid, 1, 1)[:3]](*arguments)


def launcher_of(compiled: Any) -> Any:
    """Return Triton's launcher of a kernel, which is loaded now if it was not before."""
    return compiled.run


def launch_again(compiled: Any, run: Any, grid: tuple[int, int, int], device: Any, arguments: Sequence[Any]) -> bool:
    """Launch a kernel that was launched before: by its launcher, without metadata for hooks, which there must not be.

    Args:
        compiled: the kernel.
        run: its launcher.
        grid: number of programs along each axis.
        device: on which it was launched before.
        arguments: of all parameters, addresses in place of tensors.

    Returns:
        Whether it was launched. It was not if another device is the current one, or a hook is set.
    """
    active: Any = driver.active
    if is_observed() or active.get_current_device() != device:
        return False
    stream = active.get_current_stream(device)
    run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    return True


# Tensor descriptors of NVIDIA's GPUs, which a kernel gets as tensor maps


def descriptor_formats(compiled: Any) -> tuple[dict[str, Any], ...]:
    """Return what the compiler says about each tensor descriptor of a kernel."""
    return tuple(compiled.metadata.tensordesc_meta or ())


def set_boxes(compiled: Any, boxes: tuple[tuple[int, ...] | None, ...]) -> None:
    """Let TMA load other boxes than a kernel was compiled for, before its first launch.

    A kernel gives TMA the place of a box alone; its extents are in the tensor map. So they need be no powers of two.

    Args:
        compiled: the kernel.
        boxes: the extents of each tensor descriptor's boxes, or None for those that it was compiled for.
    """
    changed = [
        of_one if box is None else {**of_one, "block_size": [*box]}
        for of_one, box in zip(descriptor_formats(compiled), boxes, strict=True)
    ]
    compiled.metadata = compiled.metadata._replace(tensordesc_meta=changed)


def encode(descriptor: Any, of_one: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a kernel gets for a tensor descriptor: a tensor map, a shape and strides.

    Args:
        descriptor: the descriptor.
        of_one: what `descriptor_formats` returns of it.
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg  # here, since a build for AMD's GPUs may lack it

    others = make_tensordesc_arg.__code__.co_argcount - 2  # none in Triton 3.6.0; 3.9.0 has one that it ignores
    return tuple(make_tensordesc_arg(descriptor, of_one, *[None] * others))


def launcher_of_tensor_maps(compiled: Any) -> Any:
    """Return Triton's launcher of a kernel that takes what `encode` returns in place of tensor descriptors."""
    types, ranks = {}, iter([len(of_one["block_size"]) for of_one in descriptor_formats(compiled)])
    for name, kind in compiled.src.signature.items():
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = next(ranks)
            parts = ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]
            types |= {f"{name}.{i}": part for i, part in enumerate(parts)}
        else:
            types[name] = kind
    active: Any = driver.active
    return active.launcher_cls(SimpleNamespace(signature=types), compiled.metadata._replace(tensordesc_meta=None))


# Aggregates


def jit_methods(cls: type) -> list[str]:
    """Return the names of a class's methods that kernels call."""
    return [name for name, method in vars(cls).items() if isinstance(method, JITCallable)]
