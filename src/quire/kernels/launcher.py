"""Launch a kernel, and launch it again without Triton's binder.

Binding some fifty arguments costs Triton more time than many a launch takes on the GPU. The first launch of a plan with tensors of given strides goes
through the binder, which compiles and returns the kernel. Later launches call that kernel with the arguments in order.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from triton.runtime.driver import driver

from quire.dispatch.device import cross_compilation

LAUNCHED: set[str] = set()  # names of all kernels that this process has launched, or was about to


class CompiledLaunch(NamedTuple):
    """A compiled kernel, and those of its arguments that do not change from layer to layer."""

    kernel: Any  # triton.compiler.CompiledKernel
    device: int
    fixed: tuple


class LaunchCache:
    """The compiled launches of one plan. Kernels take first the tensors of a layer, then arguments that are fixed by the plan, then constexprs."""

    def __init__(self) -> None:
        self.compiled: dict[Hashable, CompiledLaunch] = {}

    def relaunch(self, key: Hashable, grid: tuple[int, int, int], tensors: tuple) -> bool:
        """Launch again what `launch` compiled under `key`; return False if there is nothing.

        Args:
            key: everything that decides what is compiled, beyond the plan.
            grid: programs.
            tensors: addresses, descriptors, or tuples of them, in the order of the kernel's first parameters.
        """
        found = self.compiled.get(key)
        if found is None:
            return False
        active = driver.active
        device = active.get_current_device()
        if device != found.device:
            return False
        found.kernel[grid](*tensors, *found.fixed, stream=active.get_current_stream(device))
        return True

    def launch(
        self, key: Hashable | None, kernel: Any, grid: tuple[int, int, int], tensors: tuple, fixed: tuple, meta: dict
    ) -> None:
        """Launch `kernel` through Triton's binder, and keep what it compiled under `key`, unless that is None.

        Args:
            key: as for `relaunch`.
            kernel: a jit function.
            grid: programs.
            tensors: the kernel's first arguments, which `relaunch` is given anew.
            fixed: the next ones.
            meta: constexprs and compiler options, by name.
        """
        compiled = launch(kernel, grid, (*tensors, *fixed), meta)
        if compiled is not None and key is not None:
            constants = tuple(meta.get(name) for name in kernel.arg_names[len(tensors) + len(fixed) :])
            device = driver.active.get_current_device()
            self.compiled[key] = CompiledLaunch(compiled, device, address_of(fixed) + constants)


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple, meta: dict) -> Any:
    """Launch a kernel through Triton's binder; compile it only, where `compile_for` names another device.

    Returns:
        The compiled kernel; None in Triton's interpreter and where it was only compiled.
    """
    LAUNCHED.add(kernel.__name__)
    target = cross_compilation()
    if target is None:
        return kernel[grid](*arguments, **meta)
    target.on_compile(kernel.__name__, kernel.warmup(*arguments, grid=grid, **meta), meta)
    return None


def address_of(value: Any) -> Any:
    """Return a tensor's address, the addresses of a tuple of tensors, anything else as it is."""
    if isinstance(value, tuple):
        return tuple(address_of(v) for v in value)
    return value.data_ptr() if isinstance(value, torch.Tensor) else value
