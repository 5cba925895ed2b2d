"""The runner of `ChosenHopperLaunch`: pointers, scratch, and two launches."""

from typing import Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.kernels import views
from quire.kernels.chosen_hopper.kernel import chosen_hopper_kernel
from quire.kernels.chosen_hopper.launch import WIDTHS, ChosenHopperLaunch, gathers
from quire.kernels.launch import Runner, bind_fallback, constexprs_of
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.mla_hopper.combine import combine_lists_kernel
from quire.kernels.mla_hopper.runner import out_strides
from quire.kernels.scratch import Part
from quire.kernels.states import LOG2E


class ChosenHopperRunner:
    """Run a launch of the kernel for one batch; q is the pair (q_nope, q_pe).

    Args:
        launch: the decision.
        batch: the sequences.
        workspace: of `launch.scratch_size()` bytes; None if there are none.
    """

    def __init__(self, launch: ChosenHopperLaunch, batch: Batch, workspace: torch.Tensor | None) -> None:
        assert batch.chosen is not None
        self.decided, self.batch, self.workspace = launch, batch, workspace
        self.lists = views.lists_of(batch.chosen)
        self.attend, self.combine = Kernel(chosen_hopper_kernel), Kernel(combine_lists_kernel)
        self.fallback: Runner | None = None  # bound when it is first needed
        self.partials: views.Partials | None = None
        if launch.num_splits > 1:
            assert workspace is not None
            rows, first = launch.partials * launch.partial_rows, launch.scratch_size().counters
            acc = Part(workspace, torch.float32, first, rows * WIDTHS[0])
            m_i, l_i = (Part(workspace, torch.float32, first + 4 * rows * (WIDTHS[0] + i), rows) for i in range(2))
            self.partials = views.Partials(acc, m_i, l_i, None)

    def __call__(
        self,
        q: tuple[torch.Tensor, torch.Tensor | None],
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        out_scale: torch.Tensor | None = None,
        extra_cache: PagedKVCache | None = None,  # None: the launch serves one cache alone
    ) -> None:
        decided, (q_nope, q_pe) = self.decided, q
        if out_scale is not None or not gathers(cache):
            self.fallback = self.fallback or bind_fallback(self, cache)
            self.fallback(q, cache, out, lse, sinks, alibi_slopes, out_scale)
            return
        num_tokens = q_nope.shape[0]
        grid = decided.row_blocks, decided.programs_of_row_block(num_tokens), 1
        if not grid[1]:
            return
        rope, scales = None, None
        latents = cache.latents
        if cache.scale_kind == "record":
            latents, scales, rope = cache.records
        tensors = out, lse, q_nope, q_pe, latents, rope, scales, num_tokens
        self.attend(grid, tensors, cache.kind, self.arguments)
        if decided.num_splits > 1:
            self.combine(decided.combine_grid(num_tokens), (out, lse), None, self.combine_arguments)

    def arguments(self, *tensors: Any) -> Arguments:
        """Return the arguments of the kernel that attends, of which `tensors` are the first."""
        out, lse, q_nope, q_pe, latents, *_ = tensors
        batch, lists, spec = self.batch, self.lists, self.decided.request.spec
        assert batch.chosen is not None
        table, stride_table = (None, 0) if batch.chosen.are_slots else (batch.page_table, batch.page_table.stride(0))
        lengths = batch.seq_lens, batch.cu_seqlens_q, batch.query_offsets, batch.num_seqs
        of_lists = lists.indices, lists.list_lens, lists.width, lists.token, lists.lens_token
        parts = (None, None, None, None)
        if self.partials is not None:
            parts = self.decided.num_splits, *self.partials[:3]
        pages = tuple(stride * latents.element_size() // 16 for stride in latents.stride()[:2])
        numbers = spec.softmax_scale * LOG2E.value, int(spec.causal), stride_table, *pages
        strides = *q_nope.stride()[:2], *q_pe.stride()[:2], *out_strides(out, lse)
        meta = constexprs_of(self.decided) | {"PAGE_SIZE": latents.shape[1]}
        return Arguments(tensors, (table, *lengths, *of_lists, *parts, *numbers, *strides), meta)

    def combine_arguments(self, *tensors: Any) -> Arguments:
        """Return the arguments of the kernel that combines parts, of which `tensors` are the first."""
        assert self.partials is not None
        lists, batch, decided = self.lists, self.batch, self.decided
        fixed = lists.list_lens, lists.width, lists.lens_token, decided.num_splits, batch.cu_seqlens_q, batch.num_seqs
        fixed += *self.partials[:3], *out_strides(*tensors)
        return Arguments(tensors, fixed, decided.combine_constexprs())
