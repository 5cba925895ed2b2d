"""`CombineRunner`: run the split-KV kernel, and then the launch that combines its partials."""

from functools import partial
from typing import Any

import torch

from quire.cache import PagedKVCache
from quire.kernels import views
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.portable import PortableRunner
from quire.kernels.scheduler import Scheduler
from quire.kernels.split_kv.combine import combine_partials_kernel
from quire.kernels.split_kv.launch import SplitKVLaunch


class CombineRunner(PortableRunner):
    """Run a launch of the split-KV kernel for one batch, and the launch that combines after it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.combine, self.combine_grid = Kernel(combine_partials_kernel), (0, 1, 1)

    def place(self, scheduler: Scheduler) -> None:
        """Let both launches read the schedule where it is now."""
        super().place(scheduler)
        self.combine.compiled.clear()

    def set_grid(self, num_tokens: int) -> None:
        """Keep both grids for a batch of `num_tokens` query tokens."""
        super().set_grid(num_tokens)
        decided = self.decided
        assert isinstance(decided, SplitKVLaunch)
        self.combine_grid = decided.num_combine_programs(min(num_tokens, decided.request.bounds.num_tokens)), 1, 1

    def __call__(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        out_scale: torch.Tensor | None = None,
        new: views.NewTokens | None = None,
        norm_rope: tuple[views.NormRope, views.Rotation] | None = None,
    ) -> None:
        super().__call__(q, cache, out, lse, sinks, alibi_slopes, out_scale, new, norm_rope)
        if self.combine_grid[0] == 0 or self.decided.for_cache(cache) is not self.decided:  # which combined its own
            return
        v_scale = None if cache.scale_kind == "token" else cache.v_scale
        arguments = partial(self.combine_arguments, cache)
        self.combine(self.combine_grid, (out, out_scale, lse, sinks, v_scale), cache.kind, arguments)

    def combine_arguments(
        self, cache: PagedKVCache, out: torch.Tensor, out_scale: Any, lse: Any, sinks: Any, v_scale: Any
    ) -> Arguments:
        """Return the arguments of `combine_partials_kernel`, of which those after the cache are the first."""
        decided = self.decided
        assert isinstance(decided, SplitKVLaunch)
        out = views.output_tensor(out, decided.request.device.native_fp8)
        strides = out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)
        rows = decided.config.block_m, decided.partial_rows
        fixed = *self.fixed[:2], *rows, cache.scale_strides[2], *strides
        return Arguments((out, out_scale, lse, sinks, v_scale), fixed, decided.combine_constexprs())
