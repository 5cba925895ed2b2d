"""Launch the kernel that decodes, and then the Hopper kernel."""

from typing import Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache, decoded_cache
from quire.dispatch.config import padded
from quire.kernels import mods, views
from quire.kernels.decoded.kernel import decode_kernel
from quire.kernels.decoded.launch import DecodedLaunch
from quire.kernels.hopper.runner import HopperRunner
from quire.kernels.launch import bind_fallback, constexprs_of
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.portable.launch import FP8_DTYPES
from quire.kernels.scratch import Part
from quire.kernels.tma import matrix_of_queries


class DecodedRunner:
    """Run a launch that decodes, and the one that attends, for one batch.

    Args:
        launch: the decision.
        batch: the sequences.
        workspace: of `launch.scratch_size()` bytes.
    """

    def __init__(self, launch: DecodedLaunch, batch: Batch, workspace: torch.Tensor) -> None:
        self.decided, self.batch, self.workspace = launch, batch, workspace
        self.decode = Kernel(decode_kernel)
        self.fallback: Any = None  # bound when it is first needed
        spec = launch.request.spec
        heads = launch.most_seqs * launch.most_keys * spec.num_kv_heads
        self.starts = Part(workspace, torch.int32, launch.table_at, batch.num_seqs)
        self.k = Part(workspace, spec.dtype, launch.decoded_at, heads * spec.head_dim)
        self.v = Part(workspace, spec.dtype, launch.decoded_at + 2 * self.k.size, heads * spec.head_dim_v)
        k, v = (part.tensor().view(-1, spec.num_kv_heads, part.size // heads) for part in (self.k, self.v))
        self.decoded = decoded_cache(k, v)
        seen = Batch(
            self.starts.tensor()[:, None], batch.seq_lens, batch.cu_seqlens_q, query_offsets=batch.query_offsets,
            paged=False, key_begin=batch.key_begin, key_end=batch.key_end,
        )  # fmt: skip
        self.attend = HopperRunner(launch.attend, seen, workspace, batch)

    def __call__(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        out_scale: torch.Tensor | None = None,
        extras: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        if q.shape[0] == 0:
            return
        if matrix_of_queries(q) is None:
            self.fallback = self.fallback or bind_fallback(self, cache, q)
            self.fallback(q, cache, out, lse, sinks, alibi_slopes, out_scale, extras=extras)
            return
        grid = self.decided.num_decoders, 1, 1
        self.decode(grid, (cache,), None, self.arguments)
        self.attend(q, self.decoded(cache), out, lse, sinks, alibi_slopes, out_scale, extras, stored=cache)

    def arguments(self, cache: PagedKVCache) -> Arguments:
        """Return the arguments of the kernel that decodes."""
        decided, batch = self.decided, self.batch
        spec, device = decided.request.spec, decided.request.device
        element, of_cache = mods.decoding(cache, device, cache.dtype in FP8_DTYPES and views.can_pack_fp8(cache))
        layout = views.kv_layout(cache, batch, element)
        meta = constexprs_of(decided) | of_cache | {
            "BLOCK_D": padded(spec.head_dim), "BLOCK_DV": padded(spec.head_dim_v),
            "K_VEC": cache.strides[0].vec_size, "V_VEC": cache.strides[1].vec_size, "PAGE_SIZE": cache.page_size,
            "WIDE_OFFSETS": cache.has_wide_offsets, "TOKEN_SCALES": cache.scale_kind == "token",
            "STRIDE_UNIT": views.stride_unit(*layout.of_elements),
        }  # fmt: skip
        fixed = (
            self.k, self.v, self.starts, layout, batch.cu_seqlens_q, batch.num_seqs,
            decided.most_seqs, decided.most_keys, decided.attend.max_decode_queries, *spec.window,
            batch.page_table.stride(0),
        )  # fmt: skip
        return Arguments((views.cache_tensors(cache, element),), fixed, meta)
