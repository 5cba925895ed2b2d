"""`ChosenLaunch`: a launch of a kernel for chosen keys, and its runner."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.config import KernelConfig, padded, power_of_two, reduced
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import Options, Request, cdiv
from quire.kernels import views
from quire.kernels.launch import Launch, constexprs_of, key_of
from quire.kernels.portable.variants import entry_of, read_config
from quire.kernels.scratch import Part, ScratchSize, counter_bytes

if TYPE_CHECKING:  # it imports Triton, which a plan for the CPU must not need
    from quire.kernels.launcher import Arguments

# Rows x keys, warps, stages and programs of an SM: for up to 16, 32, 64 and more query heads of a KV head. By the
# bytes of a cached number and the columns of a head, padded; the first that is not smaller.
HALVES = "16x32 w8 s3 p1, 32x32 w8 s2 p1"
CONFIGS = {
    1: {
        64: "16x128 w4 s3 p3, 32x128 w4 s3 p2, 64x64 w4 s3 p2, 64x128 w4 s3 p2",
        128: "16x128 w4 s3 p3, 32x128 w4 s3 p2, 64x64 w4 s3 p2, 128x64 w8 s3 p1",
        256: "16x64 w4 s3 p2, 16x64 w4 s3 p2, 16x64 w4 s3 p2, 32x32 w4 s3 p2",
        512: HALVES,
    },
    2: {
        64: "16x128 w4 s3 p2, 64x64 w4 s3 p2, 64x64 w4 s3 p2, 64x128 w4 s3 p2",
        128: "16x64 w4 s3 p2, 64x64 w4 s3 p2, 64x64 w4 s3 p2, 128x64 w8 s3 p1",
        256: "16x64 w4 s3 p1, 16x64 w4 s3 p1, 16x64 w4 s3 p1, 64x32 w8 s3 p1",
        512: HALVES,
    },
    4: {128: "16x32 w8 s2 p1", 512: "16x16 w8 s2 p1"},
}
OF_MMA_SYNC = {  # where all products are mma.sync's; elsewhere as above
    1: CONFIGS[1]
    | {
        64: "16x128 w4 s3 p2, 32x128 w4 s3 p2, 64x64 w4 s3 p2, 64x128 w4 s3 p2",
        128: "16x64 w4 s3 p3, 32x128 w4 s3 p2, 64x64 w4 s3 p2, 128x64 w8 s3 p1",
    },
    2: CONFIGS[2]
    | {
        64: "16x128 w4 s3 p2, 32x64 w4 s3 p2, 64x64 w4 s3 p2, 128x64 w4 s3 p2",
        128: "16x64 w4 s3 p2, 32x64 w4 s3 p2, 64x64 w4 s3 p2",
    },
    4: CONFIGS[4],
}
# Of latents, for up to 16 query heads and for more: by kibibytes of shared memory.
OF_LATENTS = {
    64: "16x32 w4 s2 p1", 99: "16x32 w4 s3 p1", 160: "16x64 w4 s2 p1", 163: "16x32 w4 s3 p1, 32x64 w8 s2 p1",
    256: "16x64 w8 s3 p1, 32x64 w8 s3 p1",
}  # fmt: skip
MOST_WAVES = 4  # of programs that have parts of lists
START, COMBINE = 1.0, 1.0  # what a program costs before its first tile, and the second launch, in tiles
ROWS_OF_WGMMA, FEW_KEYS = 64, 32
COMBINED = 1024  # numbers that a warp of the second launch loads at once
AHEAD = 16


@dataclass(frozen=True)
class ChosenLaunch(Launch):
    """One program for each query token, block of query heads of a KV head, and part of its list, which gathers keys.

    Attributes:
        request: the request that was decided about.
        config: the kernel's configuration.
        num_splits: parts into which each list is cut, whatever its length is. A second launch combines them.
    """

    request: Request
    config: KernelConfig
    num_splits: int = 1

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "chosen"

    @property
    def head_blocks(self) -> int:
        """Programs of a query token, a KV head and a part of its list."""
        return cdiv(self.request.spec.group_size, self.config.block_m)

    @property
    def partial_rows(self) -> int:
        """Rows of a partial that are stored."""
        return min(self.config.block_m, power_of_two(self.request.spec.group_size))

    def block_n(self, cache: PagedKVCache) -> int:
        """Return the keys of a tile: fewer where keys and values are converted one at a time, which takes registers."""
        block_n = self.config.block_n
        return block_n if cache.dtype is self.request.spec.dtype or cache.is_latent else max(16, block_n // 2)

    def num_programs(self, num_tokens: int) -> int:
        """Return the programs of the grid, for a batch of `num_tokens` query tokens."""
        if not self.request.num_seqs:
            return 0
        return num_tokens * self.num_splits * self.request.spec.num_kv_heads * self.head_blocks

    def constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs and compiler options, without those that a cache decides."""
        from quire.kernels import mods  # here, since it imports Triton, which a plan for the CPU must not need

        spec, config, device = self.request.spec, self.config, self.request.device
        assert self.request.chosen is not None
        block_size, are_slots, *_ = self.request.chosen
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
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages} | config.hints | device.pdl
        return widths | {
            "SCORE_MOD": mods.score_mod(spec),
            "INPUT_PRECISION": "tf32" if spec.allow_tf32 and device.native_tf32 else "ieee",
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "CAUSAL": spec.causal, "BLOCK_SIZE": block_size,
            "ARE_SLOTS": are_slots, "PARTIAL_ROWS": self.partial_rows,
        } | options  # fmt: skip

    def combine_constexprs(self) -> dict[str, Any]:
        """Return the constexprs and compiler options of the second launch, but for BLOCK_N."""
        spec, of_kernel = self.request.spec, constexprs_of(self)
        columns = min(COMBINED // AHEAD, self.config.block_dv)
        return {name: of_kernel[name] for name in ("BLOCK_M", "BLOCK_SIZE", "PARTIAL_ROWS")} | {
            "NUM_KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "HEAD_DIM_V": spec.head_dim_v,
            "BLOCK_DV": self.config.block_dv, "COLUMNS": columns, "AHEAD": AHEAD, "num_warps": 1,
        } | self.request.device.pdl  # fmt: skip

    def num_combine_programs(self, num_tokens: int) -> int:
        """Return the programs of the second launch."""
        columns = self.combine_constexprs()["COLUMNS"]
        return num_tokens * self.request.spec.num_q_heads * (self.config.block_dv // columns)

    @property
    def num_slots(self) -> int:
        """Partials for which there is room: as many as any batch has for which the number of parts is chosen."""
        wanted = self.num_programs(self.request.bounds.num_tokens)
        return max(wanted, most_programs(self.config, self.request.device)) if self.num_splits > 1 else 0

    def scratch_size(self) -> ScratchSize:
        """Return the size of the scratch for partials, after the counters of other kernels."""
        if not (rows := self.num_slots * self.partial_rows):
            return ScratchSize()
        counters = counter_bytes(self.request.device, 0)
        return ScratchSize(counters + 4 * rows * (self.request.spec.head_dim_v + 2), counters)

    def partials(self, workspace: torch.Tensor) -> views.Partials:
        """Return the parts of a workspace of `scratch_size` bytes."""
        rows, columns = self.num_slots * self.partial_rows, self.request.spec.head_dim_v
        first = self.scratch_size().counters
        m_i, l_i = (Part(workspace, torch.float32, first + 4 * i * rows, rows) for i in range(2))
        return views.Partials(Part(workspace, torch.float32, first + 8 * rows, rows * columns), m_i, l_i, None)

    def compile_keys(self) -> frozenset[Hashable]:
        """Return a key of each kernel that is launched, as `Launch.compile_keys` has it."""
        assert self.request.chosen is not None
        extra = self.request.extra_chosen
        facts = self.request.has_cu_seqlens, self.request.has_flat_table, self.request.chosen[:3], self.num_splits > 1
        facts += (extra and extra[:3],)
        keys = {key_of(self.name, *facts, **constexprs_of(self))}
        if self.num_splits > 1:
            keys.add(key_of("combine_chosen", *facts, **self.combine_constexprs()))
        return frozenset(keys)

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> "ChosenRunner":
        """Return the runner for a batch."""
        return ChosenRunner(self, batch, workspace)

    def __str__(self) -> str:
        config = self.config
        blocks = self.head_blocks * self.request.spec.num_kv_heads
        parts = f" × {self.num_splits} parts of its list" if self.num_splits > 1 else ""
        return (
            f"chosen kernel: {config.block_m} rows × {config.block_n} keys, {config.num_warps} warps, "
            f"{config.num_stages} stages, {blocks} programs for each query token{parts}"
        )


class ChosenRunner:
    """Run a launch of a kernel for chosen keys for one batch; q is the pair (q_nope, q_pe) for latents.

    Args:
        launch: the decision.
        batch: the sequences.
        workspace: of `launch.scratch_size()` bytes.
    """

    def __init__(self, launch: ChosenLaunch, batch: Batch, workspace: torch.Tensor | None) -> None:
        from quire.kernels.chosen.kernel import chosen_kernel, chosen_latents_kernel, combine_chosen_kernel
        from quire.kernels.launcher import Kernel

        spec = launch.request.spec
        assert batch.chosen is not None
        self.decided, self.batch, self.lists = launch, batch, views.lists_of(batch.chosen)
        self.kernel = Kernel(chosen_latents_kernel if spec.latent else chosen_kernel)
        self.combine = Kernel(combine_chosen_kernel) if launch.num_splits > 1 else None
        self.parts: tuple[Any, ...] = (None, None)
        if self.combine is not None:
            assert workspace is not None
            self.parts = launch.partials(workspace), launch.num_splits
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
        extra_cache: PagedKVCache | None = None,
    ) -> None:
        queries = q if isinstance(q, tuple) else (q,)
        decided, num_tokens = self.decided, queries[0].shape[0]
        grid = decided.num_programs(num_tokens), 1, 1
        if not grid[0]:
            return
        if decided.request.spec.latent:
            tensors = *queries, out, out_scale, lse, sinks, cache, extra_cache
            self.kernel(grid, tensors, None, self.arguments_of_latents)
        else:
            self.kernel(grid, (*queries, out, out_scale, lse, sinks, cache), None, self.arguments)
        if self.combine is not None:
            v_scale = None if cache.scale_kind in ("token", "record") else cache.v_scale
            tensors, block_n = (out, out_scale, lse, sinks, v_scale), decided.block_n(cache)
            stride_scale = cache.scale_strides[2]

            def combine_arguments(*given: Any) -> "Arguments":
                return self.arguments_of_combine(block_n, stride_scale, *given)

            self.combine((decided.num_combine_programs(num_tokens), 1, 1), tensors, cache.kind, combine_arguments)

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
        return Arguments(tensors, (layout, *self.lists, *self.fixed(lse, *strides)), meta)

    def arguments_of_latents(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor | None,
        out: torch.Tensor,
        out_scale: torch.Tensor | None,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        cache: PagedKVCache,
        extra_cache: PagedKVCache | None,
    ) -> "Arguments":
        """Return the arguments of the kernel for latents."""
        from quire.kernels import mods
        from quire.kernels.launcher import Arguments

        decided, device = self.decided, self.decided.request.device
        records = cache.scale_kind == "record"
        decode = mods.decoder(cache.dtype, device.native_fp8)
        decode_rope = mods.native if records else decode
        as_bytes = not device.native_fp8 and cache.dtype in mods.SOFTWARE_DECODERS

        def tensors_of(stored: PagedKVCache) -> views.LatentTensors:
            parts = views.latent_tensors(stored, torch.uint8 if as_bytes else stored.dtype)
            if decode_rope is not mods.native and parts.rope is not None:
                return parts._replace(rope=parts.rope.view(torch.uint8))
            return parts

        latents = tensors_of(cache)
        extra, extra_layout, sizes = None, None, (0, 0, 0)
        if extra_cache is not None:
            extra = tensors_of(extra_cache)
            extra_layout = views.latent_layout(extra_cache, self.batch, extra)
            sizes = extra_cache.page_size, extra.c.stride(1), 0 if extra.rope is None else extra.rope.stride(1)
        wide = cache.has_wide_offsets or (extra_cache is not None and extra_cache.has_wide_offsets)
        meta = constexprs_of(decided) | views.latent_constexprs(cache, latents, 1) | {
            "BLOCK_N": decided.block_n(cache), "WIDE_OFFSETS": wide,
            "EXTRA_PAGE_SIZE": sizes[0], "EXTRA_C_SLOT": sizes[1], "EXTRA_ROPE_SLOT": sizes[2],
            "EXTRA_SIZE": self.extra_size, "DECODE": decode, "DECODE_ROPE": decode_rope,
        }  # fmt: skip
        layout = views.latent_layout(cache, self.batch, latents)
        strides = *q_nope.stride()[:2], *((0, 0) if q_pe is None else q_pe.stride()[:2]), *out.stride()[:2]
        tensors = q_nope, q_pe, views.output_tensor(out, device.native_fp8), out_scale, lse, sinks, latents, extra
        lists = *self.lists, extra_layout, *self.extra_lists
        return Arguments(tensors, (layout, *lists, *self.fixed(lse, *strides)), meta)

    @property
    def extra_lists(self) -> tuple[Any, ...]:
        """The lists of keys in a second cache, as the kernel for latents takes them."""
        if self.batch.extra_chosen is None:
            return None, None, 0, 0, 0
        lists = views.lists_of(self.batch.extra_chosen)
        return lists.indices, lists.list_lens, lists.width, lists.token, lists.lens_token

    @property
    def extra_size(self) -> int:
        """Keys that an entry of these lists names; 0 without any."""
        return 0 if self.batch.extra_chosen is None else self.batch.extra_chosen.block_size

    def fixed(self, lse: torch.Tensor | None, *strides: int) -> tuple[Any, ...]:
        """Return the arguments of both kernels between the lists and the constexprs."""
        table = self.batch.page_table.stride(0)
        return *self.parts, *self.numbers, table, *strides, 0 if lse is None else lse.stride(0)

    def arguments_of_combine(
        self,
        block_n: int,
        stride_scale: int,
        out: torch.Tensor,
        out_scale: torch.Tensor | None,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> "Arguments":
        """Return the arguments of the kernel that combines."""
        from quire.kernels.launcher import Arguments

        decided, strides = self.decided, (*out.stride()[:2], 0 if lse is None else lse.stride(0))
        tensors = views.output_tensor(out, decided.request.device.native_fp8), out_scale, lse, sinks, v_scale
        _, extra_lens, extra_width, _, extra_lens_token = self.extra_lists
        lists = *self.lists, extra_lens, extra_width, extra_lens_token
        fixed = *lists, *self.parts, self.batch.cu_seqlens_q, self.batch.num_seqs, stride_scale, *strides
        return Arguments(
            tensors, fixed, decided.combine_constexprs() | {"BLOCK_N": block_n, "EXTRA_SIZE": self.extra_size}
        )


def variants(request: Request, options: Options, within: bool = False) -> dict[str, ChosenLaunch] | str:
    """Return the launch of a kernel for chosen keys by name; or, in words, what it does not serve.

    Args:
        request: the batch.
        options: what the caller of `plan` asks for.
        within: return all that any batch with as many queries may have, for a warm-up.
    """
    if request.spec.kv_format is not None:
        return f"caches in {request.spec.kv_format}"
    if options.config is not None:
        return "config"
    whole = ChosenLaunch(request, config_of(request))
    if options.num_splits is not None:
        return {"chosen": replace(whole, num_splits=options.num_splits)}
    if options.batch_invariant:  # a part's end would depend on how many tokens there are
        return {"chosen": whole}
    if not within:
        return {"chosen": replace(whole, num_splits=choose_num_splits(whole))}
    bounds = request.bounds
    if whole.num_programs(bounds.max_query_len) > most_programs(whole.config, request.device):
        return {"chosen": whole}
    few = replace(request, bounds=replace(bounds, num_tokens=bounds.max_query_len))
    return {"chosen": whole, "chosen split": replace(whole, request=few, num_splits=2)}


def config_of(request: Request) -> KernelConfig:
    """Return the configuration for all batches of a spec, so that results do not depend on the batch.

    Each block of heads gathers the keys again. So a block of latents has 64 heads where wgmma multiplies them. What is
    carried and converted takes registers: with more than 16 heads, a tile has fewer keys, and more tiles are in flight.
    """
    spec, device = request.spec, request.device
    rows, is_wide, kib = power_of_two(spec.group_size), spec.dtype.itemsize == 4, device.shared_memory // 1024
    if spec.latent:
        text = entry_of(OF_LATENTS, kib)
        if device.has_mfma and spec.kv_dtype.itemsize == 1:
            text = "16x16 w4 s2 p1"
        text = "16x16 w8 s1 p1" if is_wide else text
    else:
        size = spec.kv_dtype.itemsize
        of_width = (OF_MMA_SYNC if device.has_mma_sync or (device.has_mfma and size == 1) else CONFIGS)[
            4 if is_wide else size
        ]
        width = max(padded(spec.head_dim), padded(spec.head_dim_v), 512 * (is_wide and size == 1))
        text = entry_of(of_width, width)
        if width > 256 and not is_wide and kib <= 160:
            text = "16x16 w4 s2 p2, 32x16 w8 s2 p1" if 64 < kib <= 99 else "16x16 w4 s2 p1, 32x16 w4 s2 p1"
    listed = text.split(", ")
    place = sum(rows > most for most in (16, 32, 64))
    config = reduced(read_config(listed[min(place, len(listed) - 1)], spec), spec, device)
    if spec.latent and config.block_n >= FEW_KEYS and not device.has_mfma:
        config = replace(config, num_warps=8)
    if spec.latent and config.block_m > 16 and config.block_n > FEW_KEYS:
        few = replace(config, block_n=FEW_KEYS, num_stages=config.num_stages + 1)
        tall = device.has_wgmma and rows >= ROWS_OF_WGMMA
        is_plain = spec.kv_dtype is spec.dtype and request.extra_chosen is None
        if tall and is_plain:
            config = replace(config, block_m=ROWS_OF_WGMMA, num_stages=2)
        else:
            config = replace(few, block_m=ROWS_OF_WGMMA, num_stages=3) if tall else few
    return config


def most_programs(config: KernelConfig, device: DeviceProperties) -> int:
    """Return the most programs that have parts of lists."""
    return MOST_WAVES * device.num_sms * config.programs_per_sm


def choose_num_splits(launch: ChosenLaunch) -> int:
    """Return into how many parts each list is cut: those that are expected to take the least time.

    A wave of programs takes as long as a part has tiles. Partials are written and read again.
    """
    request, config = launch.request, launch.config
    spec, device = request.spec, request.device
    assert request.chosen is not None
    lists = [kind for kind in (request.chosen, request.extra_chosen) if kind is not None]
    tiles = sum(cdiv(width * block_size, config.block_n) for block_size, _, _, width in lists)
    whole = replace(launch, num_splits=1).num_programs(max(1, request.bounds.num_tokens))
    capacity = device.num_sms * config.programs_per_sm
    tile_bytes = config.block_n * spec.kv_dtype.itemsize * (spec.head_dim + (0 if spec.latent else spec.head_dim_v))
    partial = 2 * 4 * launch.partial_rows * spec.head_dim_v / tile_bytes / capacity  # tiles, for each program

    def cost(splits: int) -> float:
        programs = whole * splits
        combine = COMBINE + programs * partial if splits > 1 else 0.0
        return cdiv(programs, capacity) * (START + cdiv(tiles, splits)) + combine

    most = min(tiles, most_programs(config, device) // max(1, whole))
    return min(range(1, most + 1), key=cost, default=1)
