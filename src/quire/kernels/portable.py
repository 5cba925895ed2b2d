"""Host code of both portable kernels, block and split-KV: their arguments, and their runner."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.config import KernelConfig
from quire.dispatch.request import MOST_NEW_TOKENS, Request, cdiv
from quire.kernels import views
from quire.kernels.launch import Runner, bind_fallback, constexprs_of, key_of, once
from quire.kernels.scratch import ScratchSize
from quire.norm_rope import QKNorm, Rope
from quire.spec import UNBOUNDED, AttentionSpec

if TYPE_CHECKING:  # it imports Triton, which a plan for the CPU must not need
    from quire.kernels.launcher import Arguments
    from quire.kernels.scheduler import Scheduler

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
REGISTERS, MOST_REGISTERS = 1 << 16, 255  # of an SM of NVIDIA's GPUs, and of a thread
FEWEST_REGISTERS = 128  # of a thread, which the kernels need whatever a configuration asks for
FOUND_NOW = 16


@dataclass(frozen=True)
class PortableLaunch(ABC):
    """A launch of one of the portable kernels.

    Attributes:
        request: the request that was decided about.
        config: the kernel's configuration.
        fallback: the launch for caches whose fp8 numbers are not loaded in pairs; None if this one serves them too.
    """

    request: Request
    config: KernelConfig
    fallback: "PortableLaunch | None" = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the kernel family."""

    @property
    def multi_block(self) -> bool:
        """Whether a sequence may have several row blocks; a program then searches for its sequence."""
        return self.request.rows_per_seq > self.config.block_m

    @property
    def window(self) -> tuple[int, int]:
        """How far a query sees, as `AttentionSpec.window` has it; in a tree, up to the last draft."""
        return (UNBOUNDED, 0) if self.request.has_tree else self.request.spec.window

    @property
    def full_tile_loop(self) -> bool:
        """Whether full tiles, of which every row sees every key, have a separate loop, without masks."""
        return self.config.full_tile_loop

    def num_row_blocks(self, num_tokens: int) -> int:
        """Return the row blocks of a batch of `num_tokens` query tokens, with one spare row block for each sequence."""
        request, block_m = self.request, self.config.block_m
        if not request.has_cu_seqlens:
            return request.num_seqs * cdiv(request.spec.group_size, block_m)
        if request.num_seqs == 0 or num_tokens == 0:
            return 0
        if not self.multi_block:
            return request.num_seqs
        return num_tokens * request.spec.group_size // block_m + request.num_seqs

    def constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs and compiler options, without those that a cache decides."""
        from quire.kernels import mods  # here, since it imports Triton, which a plan for the CPU must not need

        spec, config, device = self.request.spec, self.config, self.request.device
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages} | config.hints
        if device.supports_pdl:
            options["launch_pdl"] = True
        return {
            "NUM_KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim,
            "HEAD_DIM_V": spec.head_dim_v, "BLOCK_D": config.block_d, "BLOCK_DV": config.block_dv,
            "SCORE_MOD": mods.score_mod(spec),
            "INPUT_PRECISION": "tf32" if spec.allow_tf32 and device.native_tf32 else "ieee",
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "FULL_TILE_LOOP": self.full_tile_loop,
            "PER_ROW_MASK": self.request.bounds.max_query_len > 1, "MULTI_BLOCK": self.multi_block,
            "PDL": device.supports_pdl, "WGMMA": device.has_wgmma and spec.dtype.itemsize == 2,
        } | options  # fmt: skip

    @property
    def max_registers(self) -> int | None:
        """Most registers of a thread, if the launch loads fp8 numbers in pairs; None for any number.

        Else the compiler may take so many that fewer programs fit. What it spills is outside of the loop over tiles.
        """
        if self.name != "split_kv" or self.request.device.has_mfma or not loads_pairs(self.request.spec, self.config):
            return None
        bound = REGISTERS // (32 * self.config.num_warps * self.config.programs_per_sm) // 8 * 8
        return max(FEWEST_REGISTERS, min(MOST_REGISTERS, bound))

    def compile_keys(self) -> frozenset[Hashable]:
        """Return a key of each kernel that is launched, as `Launch.compile_keys` has it."""
        request = self.request
        absent = request.has_cu_seqlens, request.has_intervals, request.has_tree  # arguments that may be None
        return frozenset({key_of(self.name, *absent, **constexprs_of(self))})

    def with_most_partitions(self) -> "PortableLaunch":
        """Return the launch with the most partitions that one with its kernels may have, which is for scratch alone."""
        return self if self.fallback is None else replace(self, fallback=self.fallback.with_most_partitions())

    def packs_fp8(self, cache: PagedKVCache) -> bool:
        """Return whether the kernel loads fp8 numbers in pairs."""
        return loads_pairs(self.request.spec, self.config) and cache.scale_kind != "token" and views.can_pack_fp8(cache)

    def for_cache(self, cache: PagedKVCache, q: Any = None) -> "PortableLaunch":
        """Return the launch for a cache: this one, or its fallback."""
        return self if self.fallback is None or self.packs_fp8(cache) else self.fallback

    def unserved(self, cache: PagedKVCache, q: Any = None) -> str:
        """Return why the fallback serves a cache: its fp8 numbers are not loaded in pairs."""
        if cache.scale_kind == "token":
            return "scales per token and head"
        return f"{cache.layout} strides {cache.k.stride()} and {cache.v.stride()}, at which fp8 numbers form no pairs"

    @abstractmethod
    def num_programs(self, num_tokens: int) -> int:
        """Return the programs of the grid, for a batch of `num_tokens` query tokens."""

    @once
    def scratch_size(self) -> ScratchSize:
        """Return the size of the scratch for this launch or its fallback, which begin with as many counters."""
        own = self.own_scratch_size()
        return own if self.fallback is None else max(own, self.fallback.scratch_size())

    @abstractmethod
    def own_scratch_size(self) -> ScratchSize:
        """Return the size of the scratch that the launch itself needs."""

    @property
    def split_keys(self) -> int:
        """Keys of a split of a batch-invariant plan; else 0."""
        return 0

    def scheduler(self, batch: Batch) -> "Scheduler | None":
        """Return what finds the schedule of a batch; None if the kernel has none."""
        return None

    @abstractmethod
    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return the runner for a batch, with scratch in a workspace of `scratch_size` bytes."""

    def describe_config(self) -> str:
        """Describe the configuration."""
        config = self.config
        hints = "".join(f", {name} {value}" for name, value in config.hints.items())
        loops = ", full-tile loop" if self.full_tile_loop else ""
        rows = ", several row blocks a sequence" if self.multi_block else ""
        seen = "" if self.request.per_token is None else f", {self.request.per_token}"
        if not self.request.has_cu_seqlens:
            queries = "one query each"
        elif self.request.bounds.max_query_len <= 1:
            queries = "at most one query each"
        else:
            queries = "any number of queries"
        return (
            f"{config.block_m} rows × {config.block_n} keys, {config.num_warps} warps, {config.num_stages} stages"
            f"{loops}{hints}, {queries}{rows}{seen}"
        )

    def describe_fallback(self) -> str:
        """Describe the fallback, if there is one."""
        return "" if self.fallback is None else f"; fallback for fp8 numbers that do not come in pairs: {self.fallback}"


def loads_pairs(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Return whether the kernel loads fp8 numbers in pairs, if the cache can be read as 16-bit elements."""
    can = spec.kv_dtype in FP8_DTYPES and spec.dtype.itemsize == 2
    return can and min(config.block_d, config.block_dv) >= 32


class KernelRunner:
    """A launch of one kernel that is bound to a batch.

    Args:
        launch: the decision.
        batch: the sequences.
        kernel: the jit function.
        fixed: its arguments between the cache and the strides: `cu_seqlens_q`, scratch and numbers.
    """

    def __init__(self, launch: PortableLaunch, batch: Batch, kernel: Any, fixed: tuple[Any, ...]) -> None:
        from quire.kernels.launcher import Kernel

        self.decided, self.batch, self.kernel, self.fixed = launch, batch, Kernel(kernel), fixed
        self.num_tokens, self.grid = -1, (0, 1, 1)  # of the last call
        self.scheduler = launch.scheduler(batch)
        self.placed: Any = None  # the schedule that the kernel's arguments name

    def set_grid(self, num_tokens: int) -> None:
        """Keep the grid for a batch of `num_tokens` query tokens."""
        self.num_tokens, self.grid = num_tokens, (self.decided.num_programs(num_tokens), 1, 1)

    def find_schedule(self, unit: int) -> tuple[int, ...]:
        """Find the schedule of the batch if the kernel has one and it is not known, for units of so many keys.

        Returns:
            The kernel's argument that says whether it was found now: a multiple of 16, as Triton's binder asks. None
            for a kernel without a schedule.
        """
        scheduler = self.scheduler
        if scheduler is None:
            return ()
        is_new = scheduler.find(unit)
        if scheduler.tensors is not self.placed:
            self.place(scheduler)
        return (FOUND_NOW if is_new else 0,)

    def place(self, scheduler: "Scheduler") -> None:
        """Let launches read the schedule where it is now."""
        self.placed = scheduler.tensors
        assert scheduler.tensors is not None
        starts, scratch, *numbers = self.fixed
        parts, cuts = scheduler.tensors
        self.fixed = starts, scratch._replace(parts=parts, cuts=cuts), *numbers
        self.kernel.compiled.clear()  # whose arguments have the former place


class PortableRunner(KernelRunner):
    """Run a launch of a portable kernel, or its fallback, for one batch.

    Args:
        launch, batch, kernel, fixed: as `KernelRunner` has them.
        workspace: of `launch.scratch_size()` bytes, for the fallback.
    """

    def __init__(
        self,
        launch: PortableLaunch,
        batch: Batch,
        kernel: Any,
        fixed: tuple[Any, ...],
        workspace: torch.Tensor | None = None,
    ) -> None:
        super().__init__(launch, batch, kernel, fixed)
        self.workspace = workspace
        self.fallback: Any = None  # bound when it is first needed

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
    ) -> None:
        runner = self.runner_for(cache)
        if runner is not self:
            runner(q, cache, out, lse, sinks, alibi_slopes, out_scale, new, norm_rope)
            return
        if q.shape[0] != self.num_tokens:
            self.set_grid(q.shape[0])
        if self.grid[0] == 0:
            return
        found = self.find_schedule(self.unit(cache))
        tensors = q, out, out_scale, lse, sinks, alibi_slopes, cache, new
        if norm_rope is None:
            self.kernel(self.grid, (*tensors, None, *found), None, self.arguments)
        else:
            rotated, rotation = norm_rope
            self.kernel(self.grid, (*tensors, rotated, *found), rotation, partial(self.arguments, rotation=rotation))

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

    def unit(self, cache: PagedKVCache) -> int:
        """Return the keys of a unit of the schedule."""
        return self.decided.split_keys or self.block_n(cache)

    def can_append(self, cache: PagedKVCache) -> bool:
        """Return whether `append` serves a cache: each program that reads a sequence's new keys writes all of them."""
        return self.may_append and cache.scale_kind != "token"

    @cached_property
    def may_append(self) -> bool:
        """Whether `append` serves some cache."""
        request = self.decided.request
        # Elsewhere the new keys need not be among those that the queries see.
        at_the_end = self.batch.query_offsets is None and (request.has_tree or not request.has_intervals)
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
    ) -> None:
        """Normalise and rotate queries and keys, write keys and values into their slots and attend, in one launch."""
        new = views.NewTokens(k, v, slot_mapping, *k.stride()[:2], *v.stride()[:2])
        norm_rope = None if rope is None and qk_norm is None else views.norm_rope_of(rope, qk_norm)
        self(q, cache, out, lse, sinks, alibi_slopes, out_scale, new, norm_rope)

    def block_n(self, cache: PagedKVCache) -> int:
        """Return the keys of a tile: fewer where numbers are converted one at a time, which takes registers."""
        block_n = self.decided.config.block_n
        return (
            block_n
            if cache.dtype is self.decided.request.spec.dtype or self.decided.packs_fp8(cache)
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
        *found: int,
        rotation: views.Rotation = views.NO_NORM_ROPE,
    ) -> "Arguments":
        """Return the kernel's arguments."""
        from quire.kernels import mods
        from quire.kernels.launcher import Arguments

        decided, batch = self.decided, self.batch
        device = decided.request.device
        packed = self.decided.packs_fp8(cache)
        if packed:
            element, decode = torch.int16, mods.fp8x2_decoder(cache.dtype, device.native_fp8x2)
        else:
            as_bytes = not device.native_fp8 and cache.dtype in mods.SOFTWARE_DECODERS
            element = torch.uint8 if as_bytes else cache.dtype
            decode = mods.decoder(cache.dtype, device.native_fp8)
        meta = constexprs_of(decided) | {
            "K_VEC": cache.strides[0].vec_size, "V_VEC": cache.strides[1].vec_size, "PAGE_SIZE": cache.page_size,
            "WIDE_OFFSETS": cache.has_wide_offsets, "DECODE": decode, "PACKED_FP8": packed,
            "TOKEN_SCALES": cache.scale_kind == "token",
            "NEW_TOKENS": 0 if new is None else 1 if decided.request.bounds.max_query_len <= 1 else MOST_NEW_TOKENS,
            "ENCODE": None if new is None else mods.encoder(cache.dtype, device.native_fp8),
        } | rotation._asdict()  # fmt: skip
        if packed and decided.max_registers is not None:
            meta["maxnreg"] = decided.max_registers
        meta["BLOCK_N"] = self.block_n(cache)
        strides = (
            batch.page_table.stride(0),
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            0 if lse is None else lse.stride(0),
        )
        pages, layout = views.cache_tensors(cache, element), views.kv_layout(cache, batch, element)
        meta["STRIDE_UNIT"] = views.stride_unit(*layout.of_elements, *strides[1:5])
        out = views.output_tensor(out, device.native_fp8)
        found = (FOUND_NOW,) * len(found)  # to wait is never wrong, and Triton's binder is asked for one number alone
        tensors = q, out, out_scale, lse, sinks, alibi_slopes, pages, new, norm_rope, *found
        return Arguments(tensors, (layout, *self.fixed, *strides), meta)
