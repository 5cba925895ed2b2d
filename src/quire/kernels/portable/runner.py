"""Run launches of the portable kernel, and those of the MLA kernel, which have the same kind of schedule."""

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.cache_formats import FORMATS
from quire.dispatch.request import MOST_NEW_TOKENS
from quire.kernels import views
from quire.kernels.launch import bind_fallback, constexprs_of
from quire.norm_rope import QKNorm, Rope

if TYPE_CHECKING:  # it imports Triton, which a plan for the CPU must not need
    from quire.kernels.launcher import Arguments
    from quire.kernels.portable.launch import PortableLaunch
    from quire.kernels.scheduler import Scheduler

FOUND_NOW = 16


class KernelRunner:
    """A launch of one kernel that is bound to a batch.

    Args:
        launch: the decision.
        batch: the sequences.
        kernel: the jit function.
        fixed: its arguments between the cache and the strides: `cu_seqlens_q`, `one_each`, scratch and numbers.
    """

    def __init__(self, launch: "PortableLaunch", batch: Batch, kernel: Any, fixed: tuple[Any, ...]) -> None:
        from quire.kernels.launcher import Kernel

        self.decided, self.batch, self.kernel, self.fixed = launch, batch, Kernel(kernel), fixed
        self.num_tokens, self.grid = -1, (0, 1, 1)  # of the last call
        self.scheduler = launch.scheduler(batch)
        self.placed: Any = None  # the schedule that the kernel's arguments name
        self.combine: Any = None  # launches `combine_partials_kernel`
        if launch.has_combine_launch:
            from quire.kernels.portable.combine import combine_partials_kernel

            self.combine = Kernel(combine_partials_kernel)

    def set_grid(self, num_tokens: int) -> None:
        """Keep the grids for a batch of `num_tokens` query tokens."""
        self.num_tokens, self.grid = num_tokens, (self.decided.num_programs(num_tokens), 1, 1)
        if self.combine is not None:
            num_tokens = min(num_tokens, self.decided.request.bounds.num_tokens)
            self.combine_grid = self.decided.num_combine_programs(num_tokens), 1, 1

    def find_schedule(self, unit: int) -> int | None:
        """Find the schedule of the batch if the kernel has one and it is not known, for units of so many keys.

        Returns:
            The kernel's argument that says whether it was found now: a multiple of 16, as Triton's binder asks. None
            for a kernel without a schedule.
        """
        scheduler = self.scheduler
        if scheduler is None:
            return None
        is_new = scheduler.find(unit)
        if scheduler.tensors is not self.placed:
            self.place(scheduler)
        return FOUND_NOW if is_new else 0

    def passed(self, extras: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Return what the kernel gets for the tensors that the spec's functions read."""
        from quire.kernels.user_mods import passed

        return passed(self.decided.request.spec.extras, extras)

    def place(self, scheduler: "Scheduler") -> None:
        """Let both launches read the schedule where it is now."""
        self.placed = scheduler.tensors
        assert scheduler.tensors is not None
        starts, one_each, scratch, *numbers = self.fixed
        parts, cuts = scheduler.tensors
        self.fixed = starts, one_each, scratch._replace(parts=parts, cuts=cuts), *numbers
        self.kernel.compiled.clear()  # whose arguments have the former place
        if self.combine is not None:
            self.combine.compiled.clear()

    def launch_combine(self, cache: PagedKVCache, v_scale: Any, *outputs: torch.Tensor | None) -> None:
        """Launch what combines partials, if a second launch does; `outputs` are out, its scale, lse and sinks."""
        if self.combine is not None:
            tensors = *outputs, v_scale
            self.combine(self.combine_grid, tensors, cache.kind, partial(self.combine_arguments, cache))

    def combine_arguments(
        self, cache: PagedKVCache, out: torch.Tensor, out_scale: Any, lse: Any, sinks: Any, v_scale: Any
    ) -> "Arguments":
        """Return the arguments of `combine_partials_kernel`, of which those after the cache are the first."""
        from quire.kernels.launcher import Arguments

        decided = self.decided
        out = views.output_tensor(out, decided.request.device.native_fp8)
        strides = out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0)
        rows = decided.rows_of_partition[1], decided.combined_rows
        fixed = *self.fixed[:3], *rows, cache.scale_strides[2], *strides
        return Arguments((out, out_scale, lse, sinks, v_scale), fixed, decided.combine_constexprs())


def numbers_in(extras: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Return extras as Triton's binder takes them, which asks for the class of a number."""
    return None if extras is None else tuple(int(part) if isinstance(part, int) else part for part in extras)


class PortableRunner(KernelRunner):
    """Run a launch of the portable kernel, or its fallback, for one batch; then the launch that combines, if any.

    Args:
        launch, batch, kernel, fixed: as `KernelRunner` has them.
        workspace: of `launch.scratch_size()` bytes, for the fallback.
    """

    def __init__(
        self,
        launch: "PortableLaunch",
        batch: Batch,
        kernel: Any,
        fixed: tuple[Any, ...],
        workspace: torch.Tensor | None = None,
    ) -> None:
        super().__init__(launch, batch, kernel, fixed)
        self.workspace = workspace
        self.fallback: Any = None  # bound when it is first needed
        kv_format = launch.request.spec.kv_format
        has_blocks = kv_format is not None and FORMATS[kv_format].has_blocks
        self.places = views.places_of_scales(batch.device) if has_blocks else None

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
        extras: tuple[Any, ...] | None = None,
    ) -> None:
        runner = self.runner_for(cache)
        if runner is not self:
            runner(q, cache, out, lse, sinks, alibi_slopes, out_scale, new, norm_rope, extras)
            return
        if q.shape[0] != self.num_tokens:
            self.set_grid(q.shape[0])
        if self.grid[0] == 0:
            return
        found = self.find_schedule(self.unit(cache))
        rotated, rotation = norm_rope or (None, None)
        arguments = self.arguments if rotation is None else partial(self.arguments, rotation=rotation)
        read = None if extras is None else self.passed(extras)
        tensors = q, out, out_scale, lse, sinks, alibi_slopes, cache, new, rotated, read, found
        self.kernel(self.grid, tensors, rotation, arguments)
        v_scale = None if cache.scale_kind == "token" else cache.v_scale
        self.launch_combine(cache, v_scale, out, out_scale, lse, sinks)

    def runner_for(self, cache: PagedKVCache) -> "PortableRunner":
        """Return the runner of the launch that serves a cache: this one, or the fallback's."""
        if self.decided.fallback is None or self.decided.packs_fp8(cache):
            return self
        self.fallback = self.fallback or bind_fallback(self, cache)
        return self.fallback

    def prepare(self, cache: PagedKVCache) -> None:
        """Find the schedule now: a launch between this and the next call need not wait for it."""
        runner = self.runner_for(cache)
        runner.find_schedule(runner.unit(cache))

    def can_append(self, cache: PagedKVCache) -> bool:
        """Return whether `append` serves a cache: each program that reads a sequence's new keys writes all of them."""
        return self.may_append and cache.scale_kind != "token" and cache.kv_format is None

    @cached_property
    def may_append(self) -> bool:
        """Whether `append` serves some cache."""
        request = self.decided.request
        # Elsewhere the new keys need not be among those that the queries see.
        has_ends = (request.has_intervals and not request.has_tree) or request.spec.has_bounds
        at_the_end = self.batch.query_offsets is None and not has_ends
        return at_the_end and request.has_few_new_tokens

    def append(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor,
        slot_mapping: torch.Tensor,
        rope: Rope | None,
        qk_norm: QKNorm | None,
        out_scale: torch.Tensor | None = None,
        extras: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        """Normalise and rotate queries and keys, write keys and values into their slots and attend, in one launch."""
        new = views.NewTokens(k, v, slot_mapping, *k.stride()[:2], *v.stride()[:2])
        norm_rope = None if rope is None and qk_norm is None else views.norm_rope_of(rope, qk_norm)
        self(q, cache, out, lse, sinks, alibi_slopes, out_scale, new, norm_rope, extras)

    def unit(self, cache: PagedKVCache) -> int:
        """Return the keys of a unit of partitions."""
        parts = self.decided.partitioned or self.decided
        return parts.fixed_split_size or self.keys_of_tile(parts.config.block_n, cache)

    def keys_of_tile(self, block_n: int, cache: PagedKVCache) -> int:
        """Return the keys of a tile: fewer where numbers are converted one at a time, which takes registers."""
        return (
            block_n
            if cache.dtype is self.decided.request.spec.dtype or cache.kv_format or self.decided.packs_fp8(cache)
            else max(16, block_n // 2)
        )

    def arguments(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        out_scale: torch.Tensor | None,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        cache: PagedKVCache,
        new: views.NewTokens | None,
        norm_rope: views.NormRope | None,
        extras: tuple[Any, ...] | None,
        is_found_now: int | None,
        rotation: views.Rotation = views.NO_NORM_ROPE,
    ) -> "Arguments":
        """Return the kernel's arguments."""
        from quire.kernels import mods
        from quire.kernels.launcher import Arguments

        decided, batch = self.decided, self.batch
        device = decided.request.device
        element, of_cache = mods.decoding(cache, device, self.decided.packs_fp8(cache))
        meta = constexprs_of(decided) | {
            "K_VEC": cache.strides[0].vec_size, "V_VEC": cache.strides[1].vec_size, "PAGE_SIZE": cache.page_size,
            "WIDE_OFFSETS": cache.has_wide_offsets, "TOKEN_SCALES": cache.scale_kind == "token",
            "NEW_TOKENS": 0 if new is None else 1 if decided.request.bounds.max_query_len <= 1 else MOST_NEW_TOKENS,
            "ENCODE": None if new is None else mods.encoder(cache.dtype, device.native_fp8),
        } | rotation._asdict() | of_cache  # fmt: skip
        if decided.max_registers is not None and of_cache["PACKED_FP8"] == decided.loads_several:
            meta["maxnreg"] = decided.max_registers
        for name in {"BLOCK_N", "BESIDE_N"} & meta.keys():
            meta[name] = self.keys_of_tile(meta[name], cache)
        strides = (
            batch.page_table.stride(0),
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            0 if lse is None else lse.stride(0),
        )
        pages = views.cache_tensors(cache, element)
        layout = views.kv_layout(cache, batch, element)._replace(places=self.places)
        meta["STRIDE_UNIT"] = views.stride_unit(*layout.of_elements, *strides[1:5])
        out = views.output_tensor(out, device.native_fp8)
        if is_found_now is not None:
            is_found_now = FOUND_NOW  # to wait is never wrong, and Triton's binder is asked for one number alone
        extras = numbers_in(extras)
        tensors = q, out, out_scale, lse, sinks, alibi_slopes, pages, new, norm_rope, extras, is_found_now
        return Arguments(tensors, (layout, *self.fixed, *strides), meta)
