"""`TorchLaunch`: attention in PyTorch, for CPU tensors."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.request import Options, Request
from quire.kernels.cpu.attention import attend
from quire.kernels.launch import Launch, Runner


@dataclass(frozen=True)
class TorchLaunch(Launch):
    """Attention in vectorised PyTorch. Triton has no driver for CPUs.

    Attributes:
        request: the request that was decided about.
    """

    request: Request

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "torch"

    def compile_keys(self) -> frozenset[Hashable]:
        """Return no key: nothing is compiled."""
        return frozenset()

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return the function that computes attention for a batch."""
        spec, bounds = self.request.spec, self.request.bounds

        def run(
            q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
            cache: PagedKVCache,
            out: torch.Tensor,
            lse: torch.Tensor | None,
            sinks: torch.Tensor | None,
            alibi_slopes: torch.Tensor | None,
            out_scale: torch.Tensor | None = None,
            extra_cache: PagedKVCache | None = None,
            extras: tuple[torch.Tensor, ...] | None = None,
        ) -> None:
            attend(
                q,
                cache,
                spec,
                batch,
                out,
                lse,
                sinks,
                alibi_slopes,
                out_scale,
                extra_cache,
                extras=extras,
                max_query_len=bounds.max_query_len,
                max_seq_len=bounds.max_seq_len,
            )

        return run

    def __str__(self) -> str:
        return "PyTorch"


def propose(request: Request, options: Options) -> tuple[TorchLaunch, str]:
    """Return the launch and the reason."""
    return TorchLaunch(request), "CPU tensors; Triton has no driver for CPUs"
