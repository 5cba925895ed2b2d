"""Named ranges around the launches of a plan that is made while a profiler is on.

A plan has them if PyTorch's profiler or Triton's Proton records when it is made, or in a process that Nsight Systems
started, or with `QUIRE_NVTX=1`. No other plan's calls know of them.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler
from torch.autograd.profiler import record_function

from quire.cache import PagedKVCache
from quire.kernels.launch import Runner
from quire.kernels.portable.runner import PortableRunner

VARIABLE = "QUIRE_NVTX"
# Whether ranges are NVTX's too. Nsight Systems sets the second variable in the processes that it starts.
NVTX = os.environ.get(VARIABLE) == "1" or "NSYS_PROFILING_SESSION_ID" in os.environ
PROTON = "triton.profiler"  # imported by the program that is profiled


class Within:
    """Runs a plan's runner within a context.

    Args:
        runner: of the plan.
        context: returns the context of a call.
    """

    def __init__(self, runner: Any, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.runner, self.context = runner, context

    def __call__(self, *arguments: Any, **options: Any) -> None:
        with self.context():
            self.runner(*arguments, **options)


class AppenderWithin(Within, PortableRunner):
    """Runs a runner within a context that may also append."""

    def can_append(self, cache: PagedKVCache) -> bool:
        """Return whether the runner can append."""
        return self.runner.can_append(cache)

    def append(self, *arguments: Any, **options: Any) -> None:
        """Append and attend within the context."""
        with self.context():
            self.runner.append(*arguments, **options)


def within(runner: Runner, context: Callable[[], AbstractContextManager[Any]]) -> Runner:
    """Return a runner that runs another one within contexts."""
    return (AppenderWithin if isinstance(runner, PortableRunner) else Within)(runner, context)


def in_range(runner: Runner, name: str) -> Runner:
    """Return a runner that runs another one in a range of this name."""
    return within(runner, partial(named, name))


def are_on() -> bool:
    """Return whether a plan that is made now has ranges."""
    return NVTX or profiler._is_profiler_enabled or (PROTON in sys.modules and proton_records())


def proton_records() -> bool:
    """Return whether Proton records, which the program has imported."""
    from quire.triton_internals import proton_records  # here, since it imports Triton

    return proton_records()


@contextmanager
def named(name: str) -> Iterator[None]:
    """Enter a range of PyTorch's profiler and Proton's scope, or NVTX's range where a GPU is profiled.

    Proton shows NVTX's ranges as scopes.
    """
    nvtx = NVTX and torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with (
            nullcontext() if nvtx or PROTON not in sys.modules else sys.modules[PROTON].scope(name),
            record_function(name),
        ):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
