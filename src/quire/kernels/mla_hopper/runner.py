"""The runner of `MLAHopperLaunch`: TMA descriptors, scratch, and one launch, or two if sequences are cut."""

from functools import partial
from typing import Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.kernels.hopper.runner import describe
from quire.kernels.launch import Runner, bind_fallback, constexprs_of
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.mla_hopper.combine import mla_combine_kernel
from quire.kernels.mla_hopper.kernel import mla_hopper_kernel
from quire.kernels.mla_hopper.launch import TILE, MLAHopperLaunch, is_gathered, matrix_of_latents
from quire.kernels.portable.runner import FOUND_NOW
from quire.kernels.scheduler import scheduler_of
from quire.kernels.scratch import Part
from quire.kernels.states import LOG2E
from quire.kernels.tma import page_box
from quire.kernels.views import Matrix


class MLAHopperRunner:
    """Run a launch of the MLA kernel for one batch; q is the pair (q_nope, q_pe).

    Args:
        launch: the decision.
        batch: the sequences.
        workspace: of `launch.scratch_size()` bytes.
    """

    def __init__(self, launch: MLAHopperLaunch, batch: Batch, workspace: torch.Tensor) -> None:
        self.decided, self.batch, self.workspace = launch, batch, workspace
        self.attend, self.combine = Kernel(mla_hopper_kernel), Kernel(mla_combine_kernel)
        self.fallback: Runner | None = None  # bound when it is first needed
        size = launch.scratch_size()
        rows = 2 * launch.row_blocks * launch.num_partitions * launch.partial_rows if launch.num_partitions > 1 else 0
        width = launch.request.spec.kv_lora_rank
        acc = Part(workspace, torch.float32, size.counters, rows * width)
        m_i = Part(workspace, torch.float32, size.counters + 4 * rows * width, rows)
        l_i = Part(workspace, torch.float32, size.counters + 4 * rows * (width + 1), rows)
        self.lengths = batch.seq_lens, batch.cu_seqlens_q, batch.query_offsets
        self.scratch = acc, m_i, l_i
        self.scheduler = scheduler_of(launch, batch)
        self.placed: Any = None  # the schedule that the launches' arguments name
        self.grid = launch.row_blocks, launch.num_partitions, 1
        self.combine_meta = launch.combine_constexprs() | {"num_warps": 4, "launch_pdl": True}
        blocks = launch.partial_rows // self.combine_meta["BLOCK_M"] * (width // self.combine_meta["COLUMNS"])
        self.combine_grid = launch.num_cuts, launch.row_blocks, blocks

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
            self.fallback = self.fallback or bind_fallback(self, cache)
            self.fallback(q, cache, out, lse, sinks, alibi_slopes, out_scale)
            return
        assert q_pe is not None  # the launch serves latents with rotary columns alone
        if q_nope.shape[0] == 0 or self.batch.num_seqs == 0:
            return
        spec = decided.request.spec
        widths: tuple[int, ...] = () if is_gathered(cache) else (cache.head_dim, spec.qk_rope_head_dim)
        widths = widths[:1] if cache.dtype.itemsize > 1 else widths
        is_new = self.scheduler.find(None)
        if self.scheduler.tensors is not self.placed:
            self.placed = self.scheduler.tensors
            self.attend.compiled.clear()  # whose arguments have the former place
            self.combine.compiled.clear()
        numbers = FOUND_NOW if is_new else 0, q_nope.shape[0]
        tensors = out, lse, q_nope, q_pe, cache.k_scale, cache.k, *numbers
        arguments = partial(self.arguments, cache, matrix, widths)
        self.attend(self.grid, tensors, cache.kind, arguments, [(cache.k.data_ptr(), matrix)] * len(widths))
        if self.grid[1] > 1 and not decided.whole:  # sequences are cut
            self.combine(self.combine_grid, (out, lse), None, self.combine_arguments)

    def arguments(self, cache: PagedKVCache, matrix: Matrix, widths: tuple[int, ...], *tensors: Any) -> Arguments:
        """Return the arguments of the kernel that attends, of which `tensors` are the first."""
        out, lse, q_nope, q_pe, *latents, _, num_tokens = tensors
        # To wait is never wrong, and Triton's binder is asked for one number alone.
        tensors = out, lse, q_nope, q_pe, *latents, FOUND_NOW, num_tokens
        spec, box = self.decided.request.spec, 0 if is_gathered(cache) else min(TILE, page_box(cache))
        descriptors = tuple(describe(cache.k, matrix, box, width) for width in widths)
        absent = (None,) * (2 - len(widths))
        k, table = cache.strides[0], self.batch.page_table
        scores = spec.softmax_scale * LOG2E.value, int(spec.causal)
        strides = *q_nope.stride()[:2], *q_pe.stride()[:2], *out_strides(out, lse)
        pages = table.stride(0), table.shape[1], k.page // k.slot, k.slot
        parts, _ = self.placed
        numbers = *scores, self.decided.num_partitions, *pages, *strides
        fixed = *absent, table, *self.lengths, parts, *self.scratch, *numbers
        of_cache = {"PAGE_SIZE": cache.page_size, "BOX": box, "num_warps": 4, "launch_pdl": True}
        return Arguments(tensors, fixed, constexprs_of(self.decided) | of_cache, descriptors)

    def combine_arguments(self, out: torch.Tensor, lse: torch.Tensor | None) -> Arguments:
        """Return the arguments of the kernel that combines the partials of sequences that are cut."""
        _, cuts = self.placed
        numbers = self.decided.num_partitions, *out_strides(out, lse)
        fixed = self.batch.cu_seqlens_q, cuts, *self.scratch, *numbers
        return Arguments((out, lse), fixed, self.combine_meta)


def out_strides(out: torch.Tensor, lse: torch.Tensor | None) -> tuple[int, int, int]:
    """Return the strides of a token and a head of `out`, and of a token of `lse`."""
    return out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)
