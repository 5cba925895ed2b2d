"""The scratch of a launch, in one workspace. Plans that do not run at the same time may use the same workspace.

A workspace begins with counters, which are 0 between launches: one cache line for the Hopper kernel's tile counter, the
arrival counters of the portable kernel, and on Hopper GPUs those of the Hopper kernel. Float32 states follow.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch

from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import cdiv

TILE_COUNTER_BYTES = 128  # one cache line
MAX_PROGRAMS_PER_SM = 16  # no plan has more programs of the portable kernel, with partitions, per SM
# Bytes of the states of all splits of a batch-invariant plan, or of keys and values that are decoded once. With bounds
# that need more, plans have other launches.
MOST_STATES = 1 << 30
CUT_WARPGROUPS_PER_SM = 4  # for whose partials the Hopper kernel has slots


class ScratchSize(NamedTuple):
    """Bytes of a workspace, and of the counters at its beginning."""

    total: int = 0
    counters: int = 0


class Part:
    """A part of a workspace that a kernel takes as a tensor.

    A server makes a plan in every step, and its launches need addresses alone, unless a kernel is compiled. So the
    tensor is made when a launch goes through Triton's binder.

    Args:
        workspace: that it is a part of.
        dtype: of the tensor.
        first: its first byte.
        size: how many numbers it holds.
    """

    __slots__ = ("dtype", "first", "size", "workspace")

    def __init__(self, workspace: torch.Tensor, dtype: torch.dtype, first: int, size: int) -> None:
        self.workspace, self.dtype, self.first, self.size = workspace, dtype, first, size

    def data_ptr(self) -> int:
        """Return the address."""
        return self.workspace.data_ptr() + self.first

    def tensor(self) -> torch.Tensor:
        """Return the tensor."""
        return self.workspace[self.first : self.first + self.dtype.itemsize * self.size].view(self.dtype)


@lru_cache
def counter_bytes(device: DeviceProperties, num_programs: int) -> int:
    """Return the bytes of all counters, in full cache lines.

    There is room for the programs that have partitions, or for the most that plans have, if that is more. So the
    place of the states, whose alignment changes the compiled kernel, does not depend on the batch.
    """
    of_split_kv = 128 * cdiv(max(MAX_PROGRAMS_PER_SM * device.num_sms, num_programs), 16)
    return TILE_COUNTER_BYTES + of_split_kv + cut_counter_bytes(device)


def cut_counter_bytes(device: DeviceProperties) -> int:
    """Return the bytes of the last counters, which are the Hopper kernel's for row blocks that are cut by keys."""
    return 128 * cdiv(CUT_WARPGROUPS_PER_SM * device.num_sms, 32) if device.has_wgmma else 0


@cache
def unused(device: torch.device) -> torch.Tensor:
    """Return a workspace for launches without scratch: compiled code is the same for these and others."""
    return torch.empty(TILE_COUNTER_BYTES, dtype=torch.uint8, device=device)


def allocate(size: ScratchSize, device: torch.device) -> torch.Tensor:
    """Allocate a workspace and set its counters to 0. Launches without scratch share one, which none reads."""
    if size.total == 0:
        return unused(device)
    workspace = torch.empty(size.total, dtype=torch.uint8, device=device)
    workspace[: size.counters].zero_()
    return workspace
