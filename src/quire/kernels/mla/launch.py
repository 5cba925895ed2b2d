"""`MLALaunch`: a launch of the portable MLA kernel, and its runner."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.config import padded, power_of_two
from quire.dispatch.request import cdiv
from quire.kernels.launch import constexprs_of
from quire.kernels.portable.launch import PortableLaunch
from quire.kernels.portable.runner import FOUND_NOW, KernelRunner, numbers_in

if TYPE_CHECKING:  # it imports Triton, which a plan for the CPU must not need
    from quire.kernels.launcher import Arguments

MAX_ROW_BLOCKS = 16  # of a band
BANDS_PER_PROGRAM = 4  # partitions per place on the device, where sequences have several bands


@dataclass(frozen=True)
class MLALaunch(PortableLaunch):
    """Each program owns one row block of a band and an equal partition of the batch's tiles.

    A band is `row_blocks` row blocks of one sequence, whose programs run side by side and read the same latents.
    """

    kernel: ClassVar[str] = "mla"

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "mla"

    @property
    def max_rows(self) -> int:
        """Most rows of a sequence, of `rounded_queries` queries each, so that there are fewer kernels."""
        return rounded_queries(self.request.bounds.max_query_len) * self.request.spec.num_q_heads

    @property
    def row_blocks(self) -> int:
        """Row blocks of a band: programs that share a partition."""
        return min(MAX_ROW_BLOCKS, cdiv(self.max_rows, self.config.block_m))

    @cached_property
    def multi_block(self) -> bool:
        """Whether a sequence may have several bands."""
        return self.max_rows > self.row_blocks * self.config.block_m

    @property
    def full_tile_loop(self) -> bool:
        """False: masks cost little next to products of this width."""
        return False

    @cached_property
    def partial_rows(self) -> int:
        """Rows of a partial, a power of two."""
        return min(self.config.block_m, power_of_two(self.max_rows))

    @cached_property
    def is_two_level(self) -> bool:
        """Whether the kernel can combine partials in two levels: if there may be many of them."""
        tiles = cdiv(self.request.bounds.max_seq_len, self.config.block_n)
        return not self.fixed_split_size and tiles > self._two_level_min_tiles

    @property
    def most_partitions(self) -> int:
        """Most partitions that are chosen.

        The first bands of a prompt see few keys. With more partitions, the last ones fill the gaps.
        """
        return self.capacity * BANDS_PER_PROGRAM if self.multi_block else self.capacity

    @cached_property
    def lanes(self) -> int:
        """Programs that share a partition: one for each row block of a band."""
        return self.row_blocks

    @property
    def rows_of_partition(self) -> tuple[int, int]:
        """Rows of a query token, and of a band."""
        return self.request.spec.num_q_heads, self.row_blocks * self.config.block_m

    def num_row_blocks(self, num_tokens: int) -> int:
        """Return the bands of a batch of `num_tokens` query tokens, with one spare band for each sequence."""
        request = self.request
        if request.num_seqs == 0 or num_tokens == 0:
            return 0
        if not self.multi_block or request.bounds.max_query_len <= 1:
            return request.num_seqs
        return num_tokens * request.spec.num_q_heads // (self.row_blocks * self.config.block_m) + request.num_seqs

    def constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs and compiler options, without those that a cache decides."""
        from quire.kernels import user_mods  # here, since it imports Triton, which a plan for the CPU must not need

        spec, config = self.request.spec, self.config
        rope = spec.qk_rope_head_dim
        drop = (
            "NUM_KV_HEADS", "GROUP", "HEAD_DIM", "HEAD_DIM_V", "BLOCK_D", "BLOCK_DV", "FULL_TILE_LOOP", "MULTI_BLOCK",
            "MAX_DECODE_QUERIES", "FULL_TILE_LOOP_MIN_TILES", "INTERVALS", "MORE_INTERVALS", "WGMMA", "OWN_ROWS",
            "MIN_QUERIES",
        )  # fmt: skip
        return {name: value for name, value in super().constexprs().items() if name not in drop} | {
            "NUM_Q_HEADS": spec.num_q_heads, "RANK": spec.kv_lora_rank, "ROPE": rope, "BLOCK_C": config.block_dv,
            "BLOCK_R": padded(rope), "ROW_BLOCKS": self.row_blocks, "MULTI_BAND": self.multi_block,
            "COMBINE_ROOM": 4096 * config.num_warps,
            "FUNCTION": user_mods.function_of(spec, with_bounds=True, in_ptx=self.request.device.has_ptx),
        }  # fmt: skip

    def column_parts(self, packed: bool) -> int:
        """Return the parts in which the columns of a latent are multiplied: two halves of fp8.

        With 16 rows, a warp has one product of 16 × 8 numbers, whose steps wait for one another; four parts have four.
        With fixed splits, parts would be joined in the loop over tiles.
        """
        if packed:
            return 2
        one_product = self.config.block_m == 16 and self.config.block_dv >= 256
        return 4 if one_product and not self.fixed_split_size else 1

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> "MLARunner":
        """Return the runner for a batch, with partials in a workspace of `scratch_size` bytes."""
        from quire.kernels.mla.kernel import mla_kernel
        from quire.kernels.views import starts_of

        assert workspace is not None
        spec = self.request.spec
        numbers = spec.softmax_scale, spec.softcap or 0.0, *spec.window
        fixed = *starts_of(batch), self.partials(workspace), *numbers
        return MLARunner(self, batch, mla_kernel, fixed)

    def __str__(self) -> str:
        return f"MLA kernel: {self.describe_config()}, {self.describe_partitions('row blocks')}"


class MLARunner(KernelRunner):
    """Run a launch of the MLA kernel for one batch; q is the pair (q_nope, q_pe)."""

    def __call__(
        self,
        q: Any,
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        out_scale: torch.Tensor | None = None,
        extras: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        q_nope, q_pe = q
        if q_nope.shape[0] != self.num_tokens:
            self.set_grid(q_nope.shape[0])
        if self.grid[0] == 0:
            return
        found = self.find_schedule(self.decided.fixed_split_size or self.decided.config.block_n)
        read = None if extras is None else self.passed(extras)
        tensors = q_nope, q_pe, out, out_scale, lse, sinks, alibi_slopes, cache, read, found
        self.kernel(self.grid, tensors, None, self.arguments)
        self.launch_combine(cache, cache.k_scale if cache.scale_kind != "record" else None, out, out_scale, lse, sinks)

    def arguments(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor | None,
        out: torch.Tensor,
        out_scale: torch.Tensor | None,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        cache: PagedKVCache,
        extras: tuple[Any, ...] | None,
        is_found_now: int,
    ) -> "Arguments":
        """Return the kernel's arguments."""
        from quire.kernels import mods, views
        from quire.kernels.launcher import Arguments

        decided, batch = self.decided, self.batch
        assert isinstance(decided, MLALaunch)
        config, device, dtype = decided.config, decided.request.device, q_nope.dtype
        records = cache.scale_kind == "record"
        packed = cache.dtype in mods.FP8X2_DECODERS and dtype.itemsize == 2 and not records
        packed = packed and views.can_pack_fp8(cache) and config.block_dv >= 32
        decode = mods.decoder(cache.dtype, device.native_fp8)
        decode_rope = mods.native if records else decode
        element = cache.dtype
        if packed:
            element, decode = torch.int16, mods.fp8x2_decoder(cache.dtype, device.native_fp8x2)
        elif not device.native_fp8 and cache.dtype in mods.SOFTWARE_DECODERS:
            element = torch.uint8
        latents = views.latent_tensors(cache, element)
        if decode_rope is not mods.native and latents.rope is not None:
            latents = latents._replace(rope=latents.rope.view(torch.uint8))
        meta = constexprs_of(decided) | views.latent_constexprs(cache, latents, decided.column_parts(packed))
        meta |= {"DECODE": decode, "DECODE_ROPE": decode_rope, "PACKED_FP8": packed}
        strides = (
            batch.page_table.stride(0),
            *q_nope.stride()[:2],
            *((0, 0) if q_pe is None else q_pe.stride()[:2]),
            *out.stride()[:2],
            0 if lse is None else lse.stride(0),
        )
        out = views.output_tensor(out, device.native_fp8)
        is_found_now = FOUND_NOW  # to wait is never wrong, and Triton's binder is asked for one number alone
        extras = numbers_in(extras)
        tensors = q_nope, q_pe, out, out_scale, lse, sinks, alibi_slopes, latents, extras, is_found_now
        return Arguments(tensors, (views.latent_layout(cache, batch, latents), *self.fixed, *strides), meta)


def rounded_queries(max_query_len: int) -> int:
    """Round up to a power of two, or to three times one, so that there are few kernels."""
    three_quarters = 3 * power_of_two(max_query_len) // 4
    return three_quarters if 3 <= max_query_len <= three_quarters else power_of_two(max_query_len)
