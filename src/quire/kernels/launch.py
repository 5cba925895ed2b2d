"""What every kernel family offers a plan: `Launch`, what was decided, and `Runner`, which launches it.

A family is a folder with a `launch.py`. Its launch class is a frozen dataclass of host values. Its runner holds what a launch keeps from call to call: the
batch, the scratch, and the launches that were compiled.
"""

from collections.abc import Hashable
from typing import Protocol

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.request import Request
from quire.kernels.scratch import ScratchSize


class Runner(Protocol):
    """Launch a decided launch; arguments were checked by `quire.attention`."""

    def __call__(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
    ) -> None: ...


class Launch(Protocol):
    """One launch, as it was decided."""

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        ...

    @property
    def request(self) -> Request:
        """What it serves."""
        ...

    def num_programs(self, num_tokens: int) -> int:
        """Return the programs of the grid, for a batch of `num_tokens` query tokens."""
        ...

    def scratch_size(self) -> ScratchSize:
        """Return the scratch that the launch needs."""
        ...

    def compile_key(self) -> Hashable:
        """Return what tells the launch's compiled kernels from those of others, for caches of one kind."""
        ...

    def for_cache(self, cache: PagedKVCache) -> "Launch":
        """Return the launch that serves a cache: this one, or its fallback."""
        ...

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return what launches it for a batch, with scratch in a workspace of `scratch_size` bytes."""
        ...

    def __str__(self) -> str:
        """Describe the launch in one line."""
        ...
