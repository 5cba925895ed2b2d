"""`Scheduler`: when the schedule of a batch is found, and where it is kept.

A schedule says what each program of a launch attends to. A kernel of the launch's family finds it from the lengths on
the device, and the launches of all layers read it (`schedule.py`).
"""

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch

from quire.batch import Batch
from quire.kernels.capture import capture_id, current_stream
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.schedule import Lengths
from quire.kernels.views import starts_of

# By the launch, the stream on which plans are made, and the lengths: a schedule keeps all of them alive.
SCHEDULERS: WeakValueDictionary[tuple[Any, ...], "Scheduler"] = WeakValueDictionary()


class Search(NamedTuple):
    """The launch that finds a schedule. The arguments of its kernel are int32 tensors, Lengths, and `fixed`."""

    kernel: Any  # jit function
    num_programs: int
    sizes: tuple[int, ...]  # numbers of each tensor; None takes the place of one without any
    fixed: tuple[Any, ...]
    meta: dict[str, Any]  # constexprs and compiler options


class Scheduled(Protocol):
    """A launch with a schedule."""

    def search(self, asked: Any) -> Search:
        """Return the launch that finds the schedule; `asked` is what else it depends on, such as a cache."""
        ...


class Scheduler:
    """The schedule of a batch, which the launches of all layers share, and those of all plans for the same lengths.

    It is found before the first of these launches, and again before the next one after PyTorch has written to the
    lengths. The first launch in a captured graph finds it in the graph, so each replay does. Its memory is then the
    graph's: the plan need not outlive the graph.

    Args:
        launch: the decision.
        batch: the sequences.
    """

    def __init__(self, launch: Scheduled, batch: Batch) -> None:
        self.launch, self.lengths = launch, lengths_of(batch)
        self.device = batch.device
        self.read = [each for each in self.lengths if isinstance(each, torch.Tensor)]
        self.has_versions = not any(tensor.is_inference() for tensor in self.read)
        self.kernel: Kernel | None = None
        self.found: tuple[Any, ...] = ()  # what was asked, in which capture, and versions of what was read
        self.tensors: tuple[torch.Tensor | None, ...] | None = None

    def find(self, asked: Hashable) -> bool:
        """Find the schedule unless it is known; return whether it was not.

        Args:
            asked: as `Scheduled.search` takes it.
        """
        wanted = asked, capture_id(self.device), *self.versions()
        if wanted == self.found:
            return False
        search = self.launch.search(asked)
        if self.tensors is None or wanted[:2] != self.found[:2]:
            memory = torch.empty(sum(search.sizes), dtype=torch.int32, device=self.device)
            parts = memory.split(search.sizes)
            self.tensors = tuple(part if size else None for part, size in zip(parts, search.sizes, strict=True))
        self.kernel = self.kernel or Kernel(search.kernel)
        grid, tensors = (search.num_programs, 1, 1), (*self.tensors, self.lengths)
        self.kernel(grid, tensors, asked, lambda *given: Arguments(given, search.fixed, search.meta))
        self.found = wanted
        return True

    def versions(self) -> list[object]:
        """Return how often PyTorch wrote to each of the lengths. An inference tensor does not count what is written."""
        return [tensor._version for tensor in self.read] if self.has_versions else [object()]

    def forget(self) -> None:
        """Let the schedule be found again, in the memory where it is."""
        self.found = self.found[:2]

    def is_stale(self) -> bool:
        """Find the schedule again if the next launch would not; return whether it is another one. Waits for the GPU."""
        if self.tensors is None or list(self.found[2:]) != self.versions():
            return False
        known = [tensor.clone() for tensor in self.tensors if tensor is not None]
        self.forget()
        self.find(self.found[0])
        found = (tensor for tensor in self.tensors if tensor is not None)
        return not all(map(torch.equal, known, found))


def lengths_of(batch: Batch) -> Lengths:
    """Return the lengths that a batch has."""
    starts, one_each = starts_of(batch)
    return Lengths(batch.seq_lens, starts, batch.query_offsets, batch.key_begin, batch.key_end, one_each)


def scheduler_of(launch: Scheduled, batch: Batch) -> Scheduler:
    """Return the schedule that plans of this launch for these lengths share."""
    key = id(launch), current_stream(batch.seq_lens.device), *map(id, lengths_of(batch))
    found = SCHEDULERS.get(key)
    if found is None:
        found = SCHEDULERS[key] = Scheduler(launch, batch)
    found.forget()  # for a new plan, as a kernel may have written to the lengths, which PyTorch does not count
    return found


def schedulers_for(batch: Batch) -> list[Scheduler]:
    """Return all schedules for a batch's lengths."""
    return [scheduler for scheduler in list(SCHEDULERS.values()) if scheduler.lengths.seq_lens is batch.seq_lens]
