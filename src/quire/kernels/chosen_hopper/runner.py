"""The runner of `ChosenHopperLaunch`: pointers, scratch, and up to three launches."""

from functools import partial
from typing import Any, NamedTuple

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.kernels import views
from quire.kernels.chosen_hopper.kernel import chosen_hopper_kernel
from quire.kernels.chosen_hopper.launch import MAP_BYTES, WIDTHS, ChosenHopperLaunch, gathers, slots_of, words_of_map
from quire.kernels.chosen_hopper.unions import unite_lists_kernel
from quire.kernels.launch import Runner, bind_fallback, constexprs_of
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.mla_hopper.combine import combine_lists_kernel
from quire.kernels.mla_hopper.runner import out_strides
from quire.kernels.scratch import Part
from quire.kernels.states import LOG2E


class Unions(NamedTuple):
    """The scratch of unions, in the order of the parameters of `unite_lists_kernel`."""

    entries: Part
    counts: Part
    maps: Part


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
        self.lists = lists = views.lists_of(batch.chosen)
        self.of_lists = lists.indices, lists.list_lens, lists.width, lists.token, lists.lens_token
        self.table = (None, 0) if batch.chosen.are_slots else (batch.page_table, batch.page_table.stride(0))
        self.lengths = batch.seq_lens, batch.cu_seqlens_q, batch.query_offsets, batch.num_seqs
        self.attend, self.combine = Kernel(chosen_hopper_kernel), Kernel(combine_lists_kernel)
        self.unite, self.attend_united = Kernel(unite_lists_kernel), Kernel(chosen_hopper_kernel)
        self.fallback: Runner | None = None  # bound when it is first needed, like the next
        self.without_unions: Runner | None = None
        self.partials: views.Partials | None = None
        self.unions: Unions | None = None
        if launch.num_splits > 1:
            assert workspace is not None
            rows, first = launch.partials * launch.partial_rows, launch.scratch_size().counters
            acc = Part(workspace, torch.float32, first, rows * WIDTHS[0])
            m_i, l_i = (Part(workspace, torch.float32, first + 4 * rows * (WIDTHS[0] + i), rows) for i in range(2))
            self.partials = views.Partials(acc, m_i, l_i, None)
        if launch.union > 1:
            assert workspace is not None
            first, count = launch.scratch_size().counters, launch.num_unions(launch.request.bounds.num_tokens)
            maps = Part(workspace, torch.int32, first, MAP_BYTES // 4)
            entries = Part(workspace, torch.int32, first + MAP_BYTES, count * launch.room)
            counts = Part(workspace, torch.int32, first + MAP_BYTES + 4 * count * launch.room, count)
            self.unions = Unions(entries, counts, maps)

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
        if decided.union > 1 and not decided.has_maps(cache):
            self.without_unions = self.without_unions or decided.for_cache(cache).bind(self.batch, self.workspace)
            self.without_unions(q, cache, out, lse, sinks, alibi_slopes)
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
        if decided.union > 1:
            unions = decided.num_unions(num_tokens)
            programs = decided.unite_programs(slots_of(cache), num_tokens)
            known = self.lists.indices, num_tokens, words_of_map(slots_of(cache))
            self.unite((programs, 1, 1), known, cache.page_size, partial(self.unite_arguments, cache.page_size))
            united = 1, min(unions, decided.programs_at_once), 1
            self.attend_united(united, tensors, cache.kind, partial(self.arguments, united=True))
        self.attend(grid, tensors, cache.kind, self.arguments)
        if decided.num_splits > 1:
            self.combine(decided.combine_grid(num_tokens), (out, lse), None, self.combine_arguments)

    def arguments(self, *tensors: Any, united: bool = False) -> Arguments:
        """Return the arguments of the kernel that attends, to lists or to unions; `tensors` are the first."""
        out, lse, q_nope, q_pe, latents, *_ = tensors
        decided, spec = self.decided, self.decided.request.spec
        (table, stride_table), lengths, of_lists = self.table, self.lengths, self.of_lists
        unions, meta = (None, None), constexprs_of(decided)
        if united:
            assert self.unions is not None
            table, stride_table, of_lists = None, 0, (self.unions.entries, self.unions.counts, *[decided.room] * 2, 1)
            meta = decided.constexprs_of_unions()
        elif self.unions is not None:
            unions = self.unions.counts, decided.union
        splits, parts = None, (None, None, None)
        if self.partials is not None:
            splits, parts = decided.num_splits, self.partials[:3]
        pages = tuple(stride * latents.element_size() // 16 for stride in latents.stride()[:2])
        numbers = spec.softmax_scale * LOG2E.value, int(spec.causal), stride_table, *pages
        strides = *q_nope.stride()[:2], *q_pe.stride()[:2], *out_strides(out, lse)
        fixed = table, *lengths, *of_lists, splits, *unions, *parts, *numbers, *strides
        return Arguments(tensors, fixed, meta | {"PAGE_SIZE": latents.shape[1]})

    def unite_arguments(self, page_size: int, *known: Any) -> Arguments:
        """Return the arguments of the kernel that finds unions, of which `known` are the first."""
        assert self.unions is not None
        decided, (table, stride_table) = self.decided, self.table
        fixed = *self.unions, decided.room, table, *self.lengths, *self.of_lists[1:]
        fixed += int(decided.request.spec.causal), stride_table
        return Arguments(known, fixed, decided.unite_constexprs() | {"PAGE_SIZE": page_size})

    def combine_arguments(self, *tensors: Any) -> Arguments:
        """Return the arguments of the kernel that combines parts, of which `tensors` are the first."""
        assert self.partials is not None
        lists, batch, decided = self.lists, self.batch, self.decided
        fixed = lists.list_lens, lists.width, lists.lens_token, decided.num_splits, batch.cu_seqlens_q, batch.num_seqs
        fixed += *self.partials[:3], *out_strides(*tensors)
        return Arguments(tensors, fixed, decided.combine_constexprs())
