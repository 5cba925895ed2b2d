"""The runner of `MLAHopperLaunch`: TMA descriptors, scratch, and two launches."""

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.kernels.hopper.runner import describe
from quire.kernels.hopper.tma import page_box
from quire.kernels.launcher import LaunchCache
from quire.kernels.mla_hopper.combine import mla_combine_kernel
from quire.kernels.mla_hopper.kernel import mla_hopper_kernel
from quire.kernels.mla_hopper.launch import MLAHopperLaunch, matrix_of_latents
from quire.kernels.primitives import LOG2E

TILE = 64  # keys of a tile, as schedule.TILE


class MLAHopperRunner:
    """Run a launch of the MLA kernel for one batch; q is the pair (q_nope, q_pe).

    Args:
        launch: the decision.
        batch: the sequences.
        workspace: of `launch.scratch_size()` bytes.
    """

    def __init__(self, launch: MLAHopperLaunch, batch: Batch, workspace: torch.Tensor) -> None:
        self.decided, self.batch = launch, batch
        self.launches = LaunchCache()
        self.fallback = launch.fallback.bind(batch, workspace)
        size = launch.scratch_size()
        rows = 2 * launch.row_blocks * launch.num_partitions * launch.partial_rows if launch.num_partitions > 1 else 0
        width = launch.request.spec.kv_lora_rank
        states = workspace[size.counters : size.counters + 4 * rows * (width + 2)].view(torch.float32)
        acc, m_i, l_i = states.split((rows * width, rows, rows))
        numbers = batch.num_seqs, launch.num_partitions, launch.combine_cost, launch.sequence_cost
        self.lengths = batch.seq_lens, batch.cu_seqlens_q, batch.query_offsets
        self.scratch, self.numbers = (acc, m_i, l_i), numbers

    def __call__(
        self,
        q: tuple[torch.Tensor, torch.Tensor | None],
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
    ) -> None:
        decided, (q_nope, q_pe) = self.decided, q
        matrix = matrix_of_latents(cache)
        if matrix is None or self.batch.cu_pages is not None or q_pe is None:
            self.fallback(q, cache, out, lse, sinks, alibi_slopes)
            return
        if decided.num_programs(q_nope.shape[0]) == 0:
            return
        box = min(TILE, page_box(cache))
        descriptors = describe(cache.k, matrix, box, cache.head_dim), None
        if cache.dtype.itemsize == 1:
            descriptors = descriptors[0], describe(cache.k, matrix, box, decided.request.spec.qk_rope_head_dim)
        tensors = out, lse, q_nope, q_pe, cache.k_scale
        addresses = tuple(None if t is None else t.data_ptr() for t in tensors)
        key = None
        if not any((at or 0) % 16 for at in addresses[:4]):
            key = cache.kind, q_nope.stride(), q_pe.stride(), out.stride(), None if lse is None else lse.stride(0)
        grid = (decided.row_blocks, decided.num_partitions, 1)
        if key is None or not self.launches.relaunch(("attend", key), grid, (*addresses, *descriptors)):
            attend_key = None if key is None else ("attend", key)
            k, spec, table = cache.strides[0], decided.request.spec, self.batch.page_table
            scores = spec.softmax_scale * LOG2E.value, int(spec.causal)
            strides = *q_nope.stride()[:2], *q_pe.stride()[:2], *self.out_strides(out, lse)
            pages = table.stride(0), table.shape[1], k.page // k.slot
            fixed = table, *self.lengths, *self.scratch, *scores, *self.numbers, *pages, *strides
            meta = decided.constexprs() | {"PAGE_SIZE": cache.page_size, "BOX": box, "num_warps": 4, "launch_pdl": True}
            self.launches.launch(attend_key, mla_hopper_kernel, grid, (*tensors, *descriptors), fixed, meta)
        if decided.num_partitions > 1:
            self.combine(key, out, lse, addresses[:2])

    def combine(
        self, key: tuple | None, out: torch.Tensor, lse: torch.Tensor | None, addresses: tuple[int | None, ...]
    ) -> None:
        """Combine the partials of sequences that are cut."""
        decided = self.decided
        meta = decided.combine_constexprs()
        blocks = decided.partial_rows // meta["BLOCK_M"] * (decided.request.spec.kv_lora_rank // meta["COLUMNS"])
        cut = decided.request.num_seqs if meta["BY_SEQUENCE"] else decided.num_partitions - 1
        grid = (cut, decided.row_blocks, blocks)
        combine_key = None if key is None else ("combine", key)
        if combine_key is not None and self.launches.relaunch(combine_key, grid, addresses):
            return
        causal = int(decided.request.spec.causal)
        fixed = *self.lengths, *self.scratch, causal, *self.numbers, *self.out_strides(out, lse)
        meta |= {"num_warps": 4, "launch_pdl": True}
        self.launches.launch(combine_key, mla_combine_kernel, grid, (out, lse), fixed, meta)

    def out_strides(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[int, int, int]:
        """Return the strides of a token and a head of `out`, and of a token of `lse`."""
        return out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)
