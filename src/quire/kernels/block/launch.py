"""`BlockLaunch`: a launch of the block kernel."""

from dataclasses import dataclass
from typing import Any

import torch

from quire.batch import Batch
from quire.kernels.portable import PortableLaunch, PortableRunner
from quire.kernels.scratch import ScratchSize


@dataclass(frozen=True)
class BlockLaunch(PortableLaunch):
    """One program for each row block and KV head, which attends to all keys that the row block sees.

    Attributes:
        fixed_split_size: keys of a split of a batch-invariant plan; else 0.
    """

    fixed_split_size: int = 0

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "block"

    def num_programs(self, num_tokens: int) -> int:
        """Return the programs of the grid, for a batch of `num_tokens` query tokens."""
        return self.num_row_blocks(num_tokens) * self.request.spec.num_kv_heads

    def constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs and compiler options, without those that a cache decides."""
        return super().constexprs() | {"FIXED_SPLIT": self.fixed_split_size}

    def own_scratch_size(self) -> ScratchSize:
        """Return 0 bytes: no scratch is needed."""
        return ScratchSize()

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> PortableRunner:
        """Return the runner for a batch."""
        from quire.kernels.block.kernel import block_kernel

        spec = self.request.spec
        numbers = spec.softmax_scale, spec.softcap or 0.0, *self.window, batch.num_seqs
        return PortableRunner(self, batch, block_kernel, (batch.cu_seqlens_q, *numbers), workspace)

    def __str__(self) -> str:
        blocks = self.num_row_blocks(self.request.bounds.num_tokens)
        splits = f", batch-invariant splits of {self.fixed_split_size} keys" if self.fixed_split_size else ""
        details = f"{blocks} row blocks × {self.request.spec.num_kv_heads} KV heads{splits}{self.describe_fallback()}"
        return f"block kernel: {self.describe_config()}, {details}"
