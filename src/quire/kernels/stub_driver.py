"""Triton's driver in a process that compiles and launches nothing: it names the target of the compiler."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from quire.dispatch.device import DeviceProperties, compile_for


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
    before = driver._active
    stub: Any = StubDriver(name, gpu)
    driver.set_active(stub)
    try:
        with compile_for(properties, on_compile):
            yield
    finally:
        driver._active = before
