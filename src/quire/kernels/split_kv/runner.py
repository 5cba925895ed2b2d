"""`CombineRunner`: run the split-KV kernel, and then the launch that combines its partials."""

from typing import Any

import torch

from quire.cache import PagedKVCache
from quire.kernels import views
from quire.kernels.portable import PortableRunner
from quire.kernels.split_kv.combine import combine_partials_kernel
from quire.kernels.split_kv.launch import SplitKVLaunch


class CombineRunner(PortableRunner):
    """Run a launch of the split-KV kernel for one batch, and the launch that combines after it."""

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
        norm_rope: tuple[views.NormRope, dict[str, Any]] | None = None,
    ) -> None:
        super().__call__(q, cache, out, lse, sinks, alibi_slopes, out_scale, new, norm_rope)
        decided = self.decided
        assert isinstance(decided, SplitKVLaunch)
        if decided.for_cache(cache) is not decided:  # the fallback has combined its own
            return
        grid = (decided.num_combine_programs(q.shape[0]), 1, 1)
        if grid[0] == 0:
            return
        stored = views.output_tensor(out, decided.request.device.native_fp8)
        tensors = stored, out_scale, lse, sinks, None if cache.scale_kind == "token" else cache.v_scale
        addresses = tuple(None if t is None else t.data_ptr() for t in tensors)
        key = None
        if out.data_ptr() % 16 == 0:
            dtype, stride_lse = None if sinks is None else sinks.dtype, None if lse is None else lse.stride(0)
            key = "combine", cache.kind, out.stride(), out.dtype, stride_lse, dtype
            if self.launches.relaunch(key, grid, addresses):
                return
        fixed, meta = self.combine_arguments(decided, cache, out, lse)
        meta["BLOCK_N"] = self.block_n(q, cache)
        self.launches.launch(key, combine_partials_kernel, grid, tensors, fixed, meta)

    def combine_arguments(
        self, decided: SplitKVLaunch, cache: PagedKVCache, out: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `combine_partials_kernel` after the tensors of a layer, and those by name."""
        kv = views.kv_layout(cache, self.batch, cache.dtype)
        starts, scratch, _, _, window_left, window_right, num_seqs, num_partitions, combine_cost = self.fixed
        strides = out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)
        fixed = kv, starts, scratch, window_left, window_right, num_seqs, num_partitions, combine_cost, *strides
        return fixed, decided.combine_constexprs()
