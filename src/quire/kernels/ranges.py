"""Named ranges around the launches of a plan that is made while a profiler is on.

A plan has them if PyTorch's profiler records when it is made, or in a process that Nsight Systems started, or with
`QUIRE_NVTX=1`. No other plan's calls know of them.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.profiler import record_function

from quire.cache import PagedKVCache
from quire.kernels.launch import Runner
from quire.kernels.portable.runner import PortableRunner

VARIABLE = "QUIRE_NVTX"
# Whether ranges are NVTX's too. Nsight Systems sets the second variable in the processes that it starts.
NVTX = os.environ.get(VARIABLE) == "1" or "NSYS_PROFILING_SESSION_ID" in os.environ


class InRange:
    """Runs a plan's runner in a range.

    Args:
        runner: of the plan.
        name: of the range.
    """

    def __init__(self, runner: Any, name: str) -> None:
        self.runner, self.name = runner, name

    def __call__(self, *arguments: Any, **options: Any) -> None:
        with named(self.name):
            self.runner(*arguments, **options)


class AppenderInRange(InRange, PortableRunner):
    """Runs a runner in a range that may also append."""

    def can_append(self, cache: PagedKVCache) -> bool:
        """Return whether the runner can append."""
        return self.runner.can_append(cache)

    def append(self, *arguments: Any, **options: Any) -> None:
        """Append and attend in a range."""
        with named(self.name):
            self.runner.append(*arguments, **options)


def in_range(runner: Runner, name: str) -> Runner:
    """Return a runner that runs another one in a range of this name."""
    return (AppenderInRange if isinstance(runner, PortableRunner) else InRange)(runner, name)


@contextmanager
def named(name: str) -> Iterator[None]:
    """Enter a range of PyTorch's profiler, and of NVTX where a GPU is profiled."""
    nvtx = NVTX and torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
