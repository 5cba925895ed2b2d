"""`ChosenLaunch`: a launch of a kernel for chosen keys, and its runner."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch import tree
from quire.dispatch.config import KernelConfig
from quire.dispatch.request import Options, Request, cdiv
from quire.dispatch.tree import padded, power_of_two
from quire.kernels import views
from quire.kernels.launch import constexprs_of, key_of
from quire.kernels.scratch import ScratchSize

if TYPE_CHECKING:  # it imports Triton, which a plan for the CPU must not need
    from quire.kernels.launcher import Arguments

KEYS = 2048  # of a list, for the tree: all lists have one configuration


@dataclass(frozen=True)
class ChosenLaunch:
    """One program for each query token and block of query heads of a KV head, which gathers the keys of its list.

    Attributes:
        request: the request that was decided about.
        config: the kernel's configuration.
    """

    request: Request
    config: KernelConfig

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "chosen"

    @property
    def head_blocks(self) -> int:
        """Programs of a query token and a KV head."""
        return cdiv(self.request.spec.group_size, self.config.block_m)

    def block_n(self, cache: PagedKVCache) -> int:
        """Return the keys of a tile: fewer where numbers are converted one at a time, which takes registers."""
        block_n = self.config.block_n
        return block_n if cache.dtype is self.request.spec.dtype else max(16, block_n // 2)

    def num_programs(self, num_tokens: int) -> int:
        """Return the programs of the grid, for a batch of `num_tokens` query tokens."""
        return num_tokens * self.request.spec.num_kv_heads * self.head_blocks if self.request.num_seqs else 0

    def constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs and compiler options, without those that a cache decides."""
        from quire.kernels import mods  # here, since it imports Triton, which a plan for the CPU must not need

        spec, config, device = self.request.spec, self.config, self.request.device
        assert self.request.chosen is not None
        block_size, are_slots, _ = self.request.chosen
        if spec.latent:
            rope = spec.qk_rope_head_dim
            widths = {
                "NUM_Q_HEADS": spec.num_q_heads, "RANK": spec.kv_lora_rank, "ROPE": rope, "BLOCK_C": config.block_dv,
                "BLOCK_R": padded(rope),
            }  # fmt: skip
        else:
            widths = {
                "NUM_KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim,
                "HEAD_DIM_V": spec.head_dim_v, "BLOCK_D": config.block_d, "BLOCK_DV": config.block_dv,
            }  # fmt: skip
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages} | config.hints
        if device.supports_pdl:
            options["launch_pdl"] = True
        return widths | {
            "SCORE_MOD": mods.score_mod(spec),
            "INPUT_PRECISION": "tf32" if spec.allow_tf32 and device.native_tf32 else "ieee",
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "CAUSAL": spec.causal, "BLOCK_SIZE": block_size,
            "ARE_SLOTS": are_slots, "PDL": device.supports_pdl,
        } | options  # fmt: skip

    def scratch_size(self) -> ScratchSize:
        """Return 0 bytes: no scratch is needed."""
        return ScratchSize()

    def compile_keys(self) -> frozenset[Hashable]:
        """Return a key of each kernel that is launched, as `Launch.compile_keys` has it."""
        facts = self.request.has_cu_seqlens, self.request.has_flat_table, self.request.chosen
        return frozenset({key_of(self.name, *facts, **constexprs_of(self))})

    def with_most_partitions(self) -> "ChosenLaunch":
        """Return this launch, which needs no scratch."""
        return self

    def for_cache(self, cache: PagedKVCache, q: Any = None) -> "ChosenLaunch":
        """Return this launch, which serves every cache."""
        return self

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> "ChosenRunner":
        """Return the runner for a batch."""
        return ChosenRunner(self, batch)

    def __str__(self) -> str:
        config = self.config
        blocks = self.head_blocks * self.request.spec.num_kv_heads
        return (
            f"chosen kernel: {config.block_m} rows × {config.block_n} keys, {config.num_warps} warps, "
            f"{config.num_stages} stages, {blocks} programs for each query token"
        )


class ChosenRunner:
    """Run a launch of a kernel for chosen keys for one batch; q is the pair (q_nope, q_pe) for latents.

    Args:
        launch: the decision.
        batch: the sequences.
    """

    def __init__(self, launch: ChosenLaunch, batch: Batch) -> None:
        from quire.kernels.chosen.kernel import chosen_kernel, chosen_latents_kernel
        from quire.kernels.launcher import Kernel

        spec = launch.request.spec
        assert batch.chosen is not None
        self.decided, self.batch, self.lists = launch, batch, views.lists_of(batch.chosen)
        self.kernel = Kernel(chosen_latents_kernel if spec.latent else chosen_kernel)
        self.numbers = batch.cu_seqlens_q, spec.softmax_scale, spec.softcap or 0.0, batch.num_seqs

    def __call__(
        self,
        q: Any,
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        out_scale: torch.Tensor | None = None,
    ) -> None:
        queries = q if isinstance(q, tuple) else (q,)
        grid = self.decided.num_programs(queries[0].shape[0]), 1, 1
        if grid[0]:
            arguments = self.arguments_of_latents if self.decided.request.spec.latent else self.arguments
            self.kernel(grid, (*queries, out, out_scale, lse, sinks, cache), None, arguments)

    def arguments(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        out_scale: torch.Tensor | None,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        cache: PagedKVCache,
    ) -> "Arguments":
        """Return the arguments of the kernel for keys and values."""
        from quire.kernels import mods
        from quire.kernels.launcher import Arguments

        decided, device = self.decided, self.decided.request.device
        as_bytes = not device.native_fp8 and cache.dtype in mods.SOFTWARE_DECODERS
        element = torch.uint8 if as_bytes else cache.dtype
        pages, layout = views.cache_tensors(cache, element), views.kv_layout(cache, self.batch, element)
        strides = *q.stride()[:2], *out.stride()[:2]
        meta = constexprs_of(decided) | {
            "BLOCK_N": decided.block_n(cache), "PAGE_SIZE": cache.page_size, "K_VEC": cache.strides[0].vec_size,
            "V_VEC": cache.strides[1].vec_size,
            "WIDE_OFFSETS": cache.has_wide_offsets, "DECODE": mods.decoder(cache.dtype, device.native_fp8),
            "TOKEN_SCALES": cache.scale_kind == "token",
            "STRIDE_UNIT": views.stride_unit(*layout.of_elements, *strides),
        }  # fmt: skip
        tensors = q, views.output_tensor(out, device.native_fp8), out_scale, lse, sinks, pages
        return Arguments(tensors, (layout, *self.fixed(lse, *strides)), meta)

    def arguments_of_latents(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor | None,
        out: torch.Tensor,
        out_scale: torch.Tensor | None,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        cache: PagedKVCache,
    ) -> "Arguments":
        """Return the arguments of the kernel for latents."""
        from quire.kernels import mods
        from quire.kernels.launcher import Arguments

        decided, device = self.decided, self.decided.request.device
        records = cache.scale_kind == "record"
        decode = mods.decoder(cache.dtype, device.native_fp8)
        decode_rope = mods.native if records else decode
        as_bytes = not device.native_fp8 and cache.dtype in mods.SOFTWARE_DECODERS
        latents = views.latent_tensors(cache, torch.uint8 if as_bytes else cache.dtype)
        if decode_rope is not mods.native and latents.rope is not None:
            latents = latents._replace(rope=latents.rope.view(torch.uint8))
        meta = constexprs_of(decided) | {
            "BLOCK_N": decided.block_n(cache), "PAGE_SIZE": cache.page_size, "C_SLOT": latents.c.stride(1),
            "ROPE_SLOT": 0 if latents.rope is None else latents.rope.stride(1),
            "WIDE_OFFSETS": cache.has_wide_offsets, "DECODE": decode, "DECODE_ROPE": decode_rope,
            "SCALED": records, "PARTS": 4 if records else 1,
        }  # fmt: skip
        layout = views.latent_layout(cache, self.batch, latents)
        strides = *q_nope.stride()[:2], *((0, 0) if q_pe is None else q_pe.stride()[:2]), *out.stride()[:2]
        tensors = q_nope, q_pe, views.output_tensor(out, device.native_fp8), out_scale, lse, sinks, latents
        return Arguments(tensors, (layout, *self.fixed(lse, *strides)), meta)

    def fixed(self, lse: torch.Tensor | None, *strides: int) -> tuple[Any, ...]:
        """Return the arguments of both kernels between the layout and the constexprs."""
        table = self.batch.page_table.stride(0)
        return self.lists, *self.numbers, table, *strides, 0 if lse is None else lse.stride(0)


def propose(request: Request, options: Options) -> tuple[ChosenLaunch, str] | str:
    """Return a launch of a kernel for chosen keys and the reason; or, in words, what it does not serve."""
    if request.chosen is None:
        return "batches without chosen keys"
    if options.config is not None or options.num_splits is not None:
        return "config or num_splits"
    spec = request.spec
    # One configuration for all batches: a result depends on its token and its list alone.
    config, reason = tree.select(spec, request.device, power_of_two(spec.group_size), 1, KEYS, 1, fitted=False)
    return ChosenLaunch(request, config), reason
