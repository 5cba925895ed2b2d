"""`Scheduler`: when the schedule of a batch is found, and where it is kept."""

from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from quire.batch import Batch
from quire.kernels.capture import capture_id, current_stream
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.split_kv.schedule import CUT_FIELDS, PART_FIELDS, Lengths, schedule_kernel

if TYPE_CHECKING:
    from quire.kernels.split_kv.launch import SplitKVLaunch

# By the launch, the stream on which plans are made, and the lengths: a schedule keeps all of them alive.
SCHEDULERS: WeakValueDictionary[tuple[Any, ...], "Scheduler"] = WeakValueDictionary()


class Scheduler:
    """The schedule of a batch, which the launches of all layers share, and those of all plans for the same lengths.

    It is found by a kernel before the first of these launches, and again before the next one after PyTorch has written
    to the lengths. The first launch in a captured graph finds it in the graph, so each replay does. Its memory is then
    the graph's: the plan need not outlive the graph.

    Args:
        launch: the decision.
        batch: the sequences.
    """

    def __init__(self, launch: "SplitKVLaunch", batch: Batch) -> None:
        self.launch, self.cu_seqlens_q = launch, batch.cu_seqlens_q
        self.lengths = Lengths(batch.seq_lens, batch.query_offsets, batch.key_begin, batch.key_end)
        self.read = [t for t in (*self.lengths, batch.cu_seqlens_q) if t is not None]
        self.has_versions = not any(t.is_inference() for t in self.read)
        self.kernel = Kernel(schedule_kernel)
        self.found: tuple[Any, ...] = ()  # for which units, in which capture, and versions of what was read
        self.tensors: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def find(self, unit: int) -> bool:
        """Find the schedule unless it is known; return whether it was not.

        Args:
            unit: keys of a unit.
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
        programs = max(self.launch.num_partitions, self.launch.num_cuts), 1, 1
        self.kernel(
            programs, (*self.tensors, self.lengths, self.cu_seqlens_q), unit, lambda *t: self.arguments(unit, t)
        )
        self.found = wanted
        return True

    def allocate(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return memory for the `Part` of each partition, and for the `Cut` of each row block if a launch combines."""
        parts, cuts = self.launch.num_partitions, self.launch.num_cuts
        memory = torch.empty(parts * PART_FIELDS.value + cuts * CUT_FIELDS.value, dtype=torch.int32, device=device)
        return memory, memory[parts * PART_FIELDS.value :] if cuts else None

    def arguments(self, unit: int, tensors: tuple[Any, ...]) -> Arguments:
        """Return the kernel's arguments."""
        launch = self.launch
        of_partitions = launch.request.num_seqs, launch.num_partitions, launch.num_cuts
        fixed = *launch.partition_costs, *launch.window, *of_partitions
        return Arguments(tensors, fixed, launch.schedule_constexprs() | {"UNIT": unit})


def scheduler_of(launch: "SplitKVLaunch", batch: Batch) -> Scheduler:
    """Return the schedule that plans of this launch for these lengths share."""
    lengths = batch.seq_lens, batch.cu_seqlens_q, batch.query_offsets, batch.key_begin, batch.key_end
    key = id(launch), current_stream(batch.seq_lens.device), *map(id, lengths)
    found = SCHEDULERS.get(key)
    if found is None:
        found = SCHEDULERS[key] = Scheduler(launch, batch)
    return found
