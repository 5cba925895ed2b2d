"""The runner of `MLAHopperLaunch`: TMA descriptors, scratch, and two launches."""

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.kernels.hopper.runner import describe
from quire.kernels.launch import Runner, constexprs_of
from quire.kernels.launcher import LaunchCache
from quire.kernels.mla_hopper.combine import mla_combine_kernel
from quire.kernels.mla_hopper.kernel import mla_hopper_kernel
from quire.kernels.mla_hopper.launch import TILE, MLAHopperLaunch, matrix_of_latents
from quire.kernels.scratch import Part
from quire.kernels.states import LOG2E
from quire.kernels.tma import page_box


class MLAHopperRunner:
    """Run a launch of the MLA kernel for one batch; q is the pair (q_nope, q_pe).

    Args:
        launch: the decision.
        batch: the sequences.
        workspace: of `launch.scratch_size()` bytes.
    """

    def __init__(self, launch: MLAHopperLaunch, batch: Batch, workspace: torch.Tensor) -> None:
        self.decided, self.batch, self.workspace = launch, batch, workspace
        self.launches = LaunchCache()
        self.fallback: Runner | None = None  # bound when it is first needed
        size = launch.scratch_size()
        rows = 2 * launch.row_blocks * launch.num_partitions * launch.partial_rows if launch.num_partitions > 1 else 0
        width = launch.request.spec.kv_lora_rank
        acc = Part(workspace, torch.float32, size.counters, rows * width)
        m_i = Part(workspace, torch.float32, size.counters + 4 * rows * width, rows)
        l_i = Part(workspace, torch.float32, size.counters + 4 * rows * (width + 1), rows)
        numbers = batch.num_seqs, launch.num_partitions, launch.combine_cost, launch.sequence_cost
        self.lengths = batch.seq_lens, batch.cu_seqlens_q, batch.query_offsets
        self.scratch, self.numbers = (acc, m_i, l_i), numbers
        self.grid = launch.row_blocks, launch.num_partitions, 1
        self.combine_meta = launch.combine_constexprs() | {"num_warps": 4, "launch_pdl": True}
        blocks = launch.partial_rows // self.combine_meta["BLOCK_M"] * (width // self.combine_meta["COLUMNS"])
        cut = batch.num_seqs if self.combine_meta["BY_SEQUENCE"] else launch.num_partitions - 1
        self.combine_grid = cut, launch.row_blocks, blocks

    def __call__(
        self,
        q: tuple[torch.Tensor, torch.Tensor | None],
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        out_scale: torch.Tensor | None = None,  # for the fallback alone: `quire.attention` refuses others
    ) -> None:
        decided, (q_nope, q_pe) = self.decided, q
        matrix = matrix_of_latents(cache)
        if matrix is None:
            self.fallback = self.fallback or decided.fallback.bind(self.batch, self.workspace)
            self.fallback(q, cache, out, lse, sinks, alibi_slopes, out_scale)
            return
        assert q_pe is not None  # the launch serves latents with rotary columns alone
        if q_nope.shape[0] == 0 or self.batch.num_seqs == 0:
            return
        tensors = out, lse, q_nope, q_pe, cache.k_scale, cache.k
        addresses = tuple(None if t is None else t.data_ptr() for t in tensors)
        key = None
        if not any((at or 0) % 16 for at in (addresses[0], *addresses[2:4])):
            key = cache.kind, q_nope.stride(), q_pe.stride(), out.stride(), None if lse is None else lse.stride(0)
        spec = decided.request.spec
        widths = (cache.head_dim,) if cache.dtype.itemsize > 1 else (cache.head_dim, spec.qk_rope_head_dim)
        matrices = [(cache.k.data_ptr(), matrix)] * len(widths)
        if key is None or not self.launches.relaunch(("attend", key), self.grid, addresses, matrices):
            box = min(TILE, page_box(cache))
            descriptors = tuple(describe(cache.k, matrix, box, width) for width in widths)
            absent = (None,) * (2 - len(widths))
            attend_key = None if key is None else ("attend", key)
            k, table = cache.strides[0], self.batch.page_table
            scores = spec.softmax_scale * LOG2E.value, int(spec.causal)
            strides = *q_nope.stride()[:2], *q_pe.stride()[:2], *self.out_strides(out, lse)
            pages = table.stride(0), table.shape[1], k.page // k.slot, k.slot
            fixed = *absent, table, *self.lengths, *self.scratch, *scores, *self.numbers, *pages, *strides
            meta = constexprs_of(decided) | {
                "PAGE_SIZE": cache.page_size,
                "BOX": box,
                "num_warps": 4,
                "launch_pdl": True,
            }
            self.launches.launch(attend_key, mla_hopper_kernel, self.grid, tensors, fixed, meta, descriptors)
        if self.grid[1] > 1:
            self.combine(key, out, lse, addresses[:2])

    def combine(
        self, key: tuple | None, out: torch.Tensor, lse: torch.Tensor | None, addresses: tuple[int | None, ...]
    ) -> None:
        """Combine the partials of sequences that are cut."""
        combine_key = None if key is None else ("combine", key)
        if combine_key is not None and self.launches.relaunch(combine_key, self.combine_grid, addresses):
            return
        causal = int(self.decided.request.spec.causal)
        fixed = *self.lengths, *self.scratch, causal, *self.numbers, *self.out_strides(out, lse)
        self.launches.launch(combine_key, mla_combine_kernel, self.combine_grid, (out, lse), fixed, self.combine_meta)

    def out_strides(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[int, int, int]:
        """Return the strides of a token and a head of `out`, and of a token of `lse`."""
        return out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)
