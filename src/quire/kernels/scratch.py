"""The scratch of a launch, in one workspace that plans may share.

First come counters, which are 0 between launches: one line for the Hopper kernel's tile counter, then those of the split-KV kernel. Float32 states follow.
"""

from typing import NamedTuple

import torch

from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import cdiv

TILE_COUNTER_BYTES = 128  # a line of the cache: what follows begins at one
MAX_PROGRAMS_PER_SM = 16  # no plan has more programs of the split-KV kernel for an SM


class ScratchSize(NamedTuple):
    """Bytes of a workspace: in all, and of its counters, which come first."""

    total: int = 0
    counters: int = 0


def counter_bytes(device: DeviceProperties, num_programs: int) -> int:
    """Return the bytes of counters for the split-KV kernel's programs, or for the most that plans have, if these are more.

    All parts are whole lines. No batch's size decides where the states begin, and so what is compiled.
    """
    return TILE_COUNTER_BYTES + 128 * cdiv(max(MAX_PROGRAMS_PER_SM * device.num_sms, num_programs), 16)


def allocate(size: ScratchSize, device: torch.device) -> torch.Tensor:
    """Allocate a workspace, its counters 0."""
    workspace = torch.empty(size.total, dtype=torch.uint8, device=device)
    workspace[: size.counters].zero_()
    return workspace
