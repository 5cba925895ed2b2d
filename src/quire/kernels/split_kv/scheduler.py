"""`Scheduler`: when the schedule of a batch is found, and where it is kept."""

from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from quire.batch import Batch
from quire.kernels.capture import capture_id, current_stream
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.split_kv.schedule import CUT_FIELDS, PART_FIELDS, Lengths

# By the launch, the stream on which plans are made, and the lengths: a schedule keeps all of them alive.
SCHEDULERS: WeakValueDictionary[tuple[Any, ...], "Scheduler"] = WeakValueDictionary()


class ScheduleLaunch(NamedTuple):
    """A launch that finds a schedule. Its kernel writes parts and cuts, and reads `Lengths` and `cu_seqlens_q`."""

    kernel: Any  # jit function
    grid: tuple[int, int, int]
    num_parts: int  # records of PART_FIELDS int32
    num_cuts: int  # records of CUT_FIELDS int32; 0 if no launch combines
    numbers: tuple[Any, ...]  # the kernel's arguments after the lengths
    constexprs: dict[str, Any]  # and compiler options, but for the unit


class Scheduler:
    """The schedule of a batch, which the launches of all layers share, and those of all plans for the same lengths.

    It is found by a kernel before the first of these launches, and again before the next one after PyTorch has written
    to the lengths. The first launch in a captured graph finds it in the graph, so each replay does. Its memory is then
    the graph's: the plan need not outlive the graph.

    Args:
        launch: the decision, which has a `schedule_launch`.
        batch: the sequences.
    """

    def __init__(self, launch: Any, batch: Batch) -> None:
        self.decided, self.cu_seqlens_q = launch, batch.cu_seqlens_q  # `SCHEDULERS` knows the decision by its id
        self.launch: ScheduleLaunch = launch.schedule_launch()
        self.lengths = Lengths(batch.seq_lens, batch.query_offsets, batch.key_begin, batch.key_end)
        self.read = [t for t in (*self.lengths, batch.cu_seqlens_q) if t is not None]
        self.has_versions = not any(t.is_inference() for t in self.read)
        self.kernel = Kernel(self.launch.kernel)
        self.found: tuple[Any, ...] = ()  # for which units, in which capture, and versions of what was read
        self.tensors: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def find(self, unit: int | None = None) -> bool:
        """Find the schedule unless it is known; return whether it was not.

        Args:
            unit: keys of a unit, if the kernel asks.
        """
        device = self.lengths.seq_lens.device
        capture = capture_id(device)
        # An inference tensor does not count what is written to it.
        versions = (t._version for t in self.read) if self.has_versions else (object(),)
        wanted = unit, capture, *versions
        if wanted == self.found:
            return False
        if self.tensors is None or wanted[:2] != self.found[:2]:
            self.tensors = self.allocate(device)
        assert self.tensors is not None
        tensors = *self.tensors, self.lengths, self.cu_seqlens_q
        self.kernel(self.launch.grid, tensors, unit, lambda *t: self.arguments(unit, t))
        self.found = wanted
        return True

    def allocate(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return memory for parts, and for cuts if there are some."""
        parts, cuts = self.launch.num_parts * PART_FIELDS.value, self.launch.num_cuts * CUT_FIELDS.value
        memory = torch.empty(parts + cuts, dtype=torch.int32, device=device)
        return memory, memory[parts:] if cuts else None

    def arguments(self, unit: int | None, tensors: tuple[Any, ...]) -> Arguments:
        """Return the kernel's arguments."""
        of_unit = {} if unit is None else {"UNIT": unit}
        return Arguments(tensors, self.launch.numbers, self.launch.constexprs | of_unit)


def scheduler_of(launch: Any, batch: Batch) -> Scheduler:
    """Return the schedule that plans of this launch for these lengths share."""
    lengths = batch.seq_lens, batch.cu_seqlens_q, batch.query_offsets, batch.key_begin, batch.key_end
    key = id(launch), current_stream(batch.seq_lens.device), *map(id, lengths)
    found = SCHEDULERS.get(key)
    if found is None:
        found = SCHEDULERS[key] = Scheduler(launch, batch)
    return found
