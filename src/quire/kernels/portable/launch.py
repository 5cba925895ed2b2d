"""`PortableLaunch`: a launch of the portable kernel."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.config import CostModel, KernelConfig, power_of_two
from quire.dispatch.request import Request, cdiv
from quire.kernels import views
from quire.kernels.launch import Launch, Runner, constexprs_of, key_of, once
from quire.kernels.portable.runner import PortableRunner
from quire.kernels.scratch import TILE_COUNTER_BYTES, Part, ScratchSize, counter_bytes
from quire.spec import UNBOUNDED, AttentionSpec

if TYPE_CHECKING:  # it imports Triton, which a plan for the CPU must not need
    from quire.kernels.scheduler import Scheduler, Search

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
REGISTERS, MOST_REGISTERS = 1 << 16, 255  # of an SM of NVIDIA's GPUs, and of a thread
FEWEST_REGISTERS = 128  # of a thread, which the kernel needs whatever a configuration asks for
FIXED_SPLIT_SIZE = 256  # keys of a split of a batch-invariant plan
NEVER = 1 << 30  # tiles
INTERVALS_AT_ONCE = 8


@dataclass(frozen=True)
class PortableLaunch(Launch):
    """A launch of the portable kernel. Each program owns a partition of the batch's KV tiles, or a row block.

    Attributes:
        request: the request that was decided about.
        config: the kernel's configuration.
        costs: constants of the device.
        num_partitions: partitions for each KV head; 0 where each row block has a program.
        combine_cost: cost of a partial, in KV tiles; 0 if the number of splits does not depend on it.
        fixed_split_size: keys of a split of a batch-invariant plan; else 0.
        max_decode_queries: sequences with more queries are left to another launch; 0 if this launch serves all.
        partials_at_once: partials of a row that a program of a second launch combines at once, one of `ALIKE`; 0 where
            the programs that attend combine them.
        decode: the launch for sequences with at most `decode.max_decode_queries` queries, whose programs are the first
            ones of the same grid; or None.
        fallback: the launch for caches whose fp8 numbers are not loaded in pairs; None if this one serves them too.
    """

    request: Request
    config: KernelConfig
    costs: CostModel
    num_partitions: int = 0
    combine_cost: float = 0.0
    fixed_split_size: int = 0
    max_decode_queries: int = 0
    partials_at_once: int = field(default=0, kw_only=True)
    decode: "PortableLaunch | None" = field(default=None, kw_only=True)
    fallback: "PortableLaunch | None" = field(default=None, kw_only=True)
    kernel: ClassVar[str] = "portable"  # in `compile_keys`
    ALIKE: ClassVar[tuple[int, ...]] = (4, 64)  # partials at once

    @property
    def name(self) -> str:
        """Name of the form of the kernel."""
        return "split_kv" if self.num_partitions else "block"

    @cached_property
    def multi_block(self) -> bool:
        """Whether a sequence may have several row blocks; a program then searches for its sequence."""
        return self.request.rows_per_seq > self.config.block_m

    @cached_property
    def window(self) -> tuple[int, int]:
        """How far a query sees, as `AttentionSpec.window` has it; in a tree, up to the last draft."""
        return (UNBOUNDED, 0) if self.request.has_tree else self.request.spec.window

    @property
    def full_tile_loop(self) -> bool:
        """Whether full tiles, of which every row sees every key, have a separate loop, without masks.

        Partitions of several row blocks are short, and slower with two loops, except where arithmetic takes longer than
        memory. Those of fixed splits have one, too.
        """
        one_loop = self.fixed_split_size or (self.multi_block and not self.request.device.has_mma_sync)
        return self.config.full_tile_loop and not (self.num_partitions and one_loop)

    @cached_property
    def partial_rows(self) -> int:
        """Rows of a partial: those of the longest sequence, rounded up to a power of two to have fewer kernels."""
        bounds = self.request.bounds
        return min(self.config.block_m, power_of_two(max(1, bounds.max_query_len) * self.request.spec.group_size))

    @property
    def combined_rows(self) -> int:
        """Rows of a row block that the second launch combines: those of the longest sequence."""
        if self.fixed_split_size:
            return self.partial_rows * self.lanes // self.request.spec.num_kv_heads
        return min(self.config.block_m, self.request.rows_per_seq)

    @property
    def serves_any_rows(self) -> bool:
        """Whether one kernel serves sequences of any number of rows: if a second launch combines partials."""
        return self.has_combine_launch and not self.fixed_split_size

    @property
    def rows_between_partials(self) -> int:
        """Rows from one partial to the next."""
        return self.config.block_m if self.serves_any_rows else self.partial_rows

    @property
    def intervals_at_once(self) -> int:
        """Intervals of a sequence that a program loads in one step when it finds its partition; 0 if there are none."""
        if not self.request.has_intervals:
            return 0
        return min(INTERVALS_AT_ONCE, power_of_two(self.request.bounds.max_query_len))

    @cached_property
    def is_two_level(self) -> bool:
        """Whether the kernel can combine partials in two levels: if they are large, or if there may be many of them."""
        if self.fixed_split_size or self.has_combine_launch:
            return False
        if self.request.bounds.max_query_len > 1:
            return self.partial_rows >= 16
        return cdiv(self.request.bounds.max_seq_len, self.config.block_n) > self._two_level_min_tiles

    @property
    def has_combine_launch(self) -> bool:
        """Whether a second launch combines partials, or folds the states of splits."""
        return self.partials_at_once > 0

    def alike(self) -> "tuple[PortableLaunch, ...]":
        """Return the launches that differ in what is decided by numbers, and for which kernels are compiled."""
        if not self.has_combine_launch or self.fixed_split_size:
            return (self,)
        return tuple(replace(self, partials_at_once=number) for number in self.ALIKE)

    @cached_property
    def combine_columns(self) -> int:
        """Columns of a row that a program of the second launch combines.

        To fold, a thread takes four where states have many rows, and one where there are fewer elements than threads.
        """
        if not self.fixed_split_size:
            return min(128 if self.partials_at_once <= 4 else 32, self.config.block_dv)
        return min(32 if self.partial_rows < 16 else 128, self.config.block_dv)

    def num_combine_programs(self, num_tokens: int) -> int:
        """Return the programs of the second launch, for a batch of `num_tokens` query tokens."""
        rows = self.num_row_blocks(num_tokens) * self.request.spec.num_kv_heads * self.combined_rows
        return rows * (self.config.block_dv // self.combine_columns)

    def combine_constexprs(self) -> dict[str, Any]:
        """Return the constexprs and compiler options of the second launch."""
        spec, columns, ahead = self.request.spec, self.combine_columns, self.partials_at_once
        if self.fixed_split_size:
            ahead = 32 if columns <= 32 else 8
        return {
            "NUM_KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "HEAD_DIM_V": spec.head_dim_v,
            "BLOCK_DV": self.config.block_dv, "COLUMNS": columns, "AHEAD": ahead, "num_warps": 1,
            "STRIDE": self.lanes * self.partial_rows if self.fixed_split_size else 0,
        } | self.request.device.pdl  # fmt: skip

    @property
    def min_split_tiles(self) -> int:
        """As in `CostModel`; 0 where a second launch combines, since partials then cost little."""
        return 0 if self.has_combine_launch else self.costs.min_split_tiles

    @property
    def partitioned(self) -> "PortableLaunch | None":
        """The launch whose partitions programs own: this one, or its decode launch; None if neither has any."""
        return self if self.num_partitions else self.decode

    @property
    def loads_several(self) -> bool:
        """Whether the kernel may load several numbers in an element."""
        return self.request.spec.kv_format is not None or loads_pairs(self.request.spec, self.config)

    @property
    def max_registers(self) -> int | None:
        """Most registers of a thread with which an SM holds as many programs as are expected; None for any number.

        The compiler may take so many that fewer fit: in partitions whose elements are several numbers, and of three
        programs whose products are all mma.sync's. What it spills is outside of the loop over tiles.
        """
        config, device = self.config, self.request.device
        is_one_of_three = device.has_mma_sync and config.programs_per_sm > 2
        if device.has_mfma or not (self.num_partitions > 0 if self.loads_several else is_one_of_three):
            return None
        bound = REGISTERS // (32 * config.num_warps * config.programs_per_sm) // 8 * 8
        return max(FEWEST_REGISTERS, min(MOST_REGISTERS, bound))

    def compile_keys(self) -> frozenset[Hashable]:
        """Return a key of each kernel that is launched, as `Launch.compile_keys` has it."""
        request = self.request
        absent = request.has_intervals, request.has_tree  # arguments that may be None
        keys = {key_of(self.kernel, *absent, self.max_registers, **constexprs_of(self))}
        if (parts := self.partitioned) is not None:
            unit = parts.fixed_split_size or parts.config.block_n
            keys.add(key_of("schedule", *absent, parts.has_combine_launch, unit, **parts.schedule_constexprs()))
        if self.has_combine_launch:
            keys.add(key_of("combine_partials", **self.combine_constexprs()))
        return frozenset(keys)

    def with_most_partitions(self) -> "PortableLaunch":
        """Return the launch with the most partitions that one with its kernels may have, which is for scratch alone."""
        launch = self if self.fallback is None else replace(self, fallback=self.fallback.with_most_partitions())
        if self.decode is not None:
            launch = replace(launch, decode=self.decode.with_most_partitions())
        if not self.num_partitions or self.fixed_split_size:  # of fixed splits, states are counted
            return launch
        return replace(launch, num_partitions=max(self.num_partitions, self.most_partitions))

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

    @property
    def min_queries(self) -> int:
        """Fewest queries of a sequence that this launch serves; 0 if no other launch serves those with fewer."""
        return 0 if self.decode is None else self.decode.max_decode_queries + 1

    @property
    def most_partitions(self) -> int:
        """Most partitions that are chosen."""
        return self.capacity

    @cached_property
    def two_level_min_tiles(self) -> int:
        """KV tiles above which a sequence is cut into shorter partitions, since two levels combine its partials."""
        return self._two_level_min_tiles if self.is_two_level else NEVER

    @property
    def _two_level_min_tiles(self) -> int:
        costs = self.costs
        if self.capacity < costs.many_partitions:
            return NEVER
        if self.capacity >= 2 * costs.many_partitions and self.partial_rows < 16:
            return costs.two_level_min_tiles_small
        return costs.two_level_min_tiles

    @cached_property
    def lanes(self) -> int:
        """Programs that share a partition: one for each KV head."""
        return self.request.spec.num_kv_heads

    @cached_property
    def capacity(self) -> int:
        """Partitions whose programs the device holds at once."""
        return max(1, self.request.device.num_sms * self.config.programs_per_sm // self.lanes)

    def num_row_blocks(self, num_tokens: int) -> int:
        """Return the row blocks of a batch of `num_tokens` query tokens, with one spare row block for each sequence."""
        request, block_m = self.request, self.config.block_m
        if request.num_seqs == 0 or num_tokens == 0:
            return 0
        if request.bounds.max_query_len <= 1:
            return request.num_seqs * cdiv(request.spec.group_size, block_m)
        if not self.multi_block:
            return request.num_seqs
        return num_tokens * request.spec.group_size // block_m + request.num_seqs

    @property
    def max_units(self) -> int:
        """Most units of the batch: KV tiles, or splits of the fixed size, once for each row block."""
        unit = self.fixed_split_size or self.config.block_n
        bounds = self.request.bounds
        return self.num_row_blocks(bounds.num_tokens) * max(1, cdiv(bounds.max_seq_len, unit))

    def num_programs(self, num_tokens: int) -> int:
        """Return the programs of the grid, for a batch of `num_tokens` query tokens."""
        row_blocks = self.num_row_blocks(num_tokens)
        if row_blocks and (parts := self.partitioned) is not None:
            row_blocks = parts.num_partitions + (0 if self.num_partitions else row_blocks)
        return row_blocks * self.lanes

    def constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs and compiler options, without those that a cache decides."""
        from quire.kernels import mods, user_mods  # here, since they import Triton, which the CPU must not need

        spec, config, device = self.request.spec, self.config, self.request.device
        several = self.request.bounds.max_query_len > 1
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages} | config.hints | device.pdl
        return {
            "NUM_KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim,
            "HEAD_DIM_V": spec.head_dim_v, "BLOCK_D": config.block_d, "BLOCK_DV": config.block_dv,
            "SCORE_MOD": mods.score_mod(spec), "FUNCTION": user_mods.function_of(spec, in_ptx=device.has_ptx),
            "BOUNDS": user_mods.bounds_of(spec),
            "INPUT_PRECISION": "tf32" if spec.allow_tf32 and device.native_tf32 else "ieee",
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "FULL_TILE_LOOP": self.full_tile_loop,
            "PER_ROW_MASK": several, "MULTI_BLOCK": self.multi_block or (several and self.serves_any_rows),
            "WGMMA": device.has_wgmma and spec.dtype.itemsize == 2, "OWN_ROWS": config.has_own_rows(device),
            "FIXED_SPLIT": self.fixed_split_size, "MIN_QUERIES": self.min_queries,
        } | options | self.partition_constexprs()  # fmt: skip

    def partition_constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs that are about partitions, its own or those of the decode launch."""
        if self.decode is not None:
            config = self.decode.config
            return self.decode.partition_constexprs() | {"BESIDE_M": config.block_m, "BESIDE_N": config.block_n}
        if not self.num_partitions:
            return {}
        request, costs = self.request, self.costs
        return {
            "PARTIAL_ROWS": self.rows_between_partials, "MAX_DECODE_QUERIES": self.max_decode_queries,
            "INTERVALS": self.intervals_at_once,
            "MORE_INTERVALS": request.has_intervals and request.bounds.max_query_len > self.intervals_at_once,
            "COMBINE_LAUNCH": self.has_combine_launch,
            "TWO_LEVEL": self.is_two_level, "TWO_LEVEL_MIN_PARTIALS": costs.two_level_min_partials,
            "EARLY_EXIT_MAX_TILES": costs.early_exit_max_tiles,
            "FULL_TILE_LOOP_MIN_TILES": costs.full_tile_loop_min_tiles,
        }  # fmt: skip

    @property
    def num_cuts(self) -> int:
        """Row blocks of which a second launch may have to combine partials."""
        return self.num_row_blocks(self.request.bounds.num_tokens) if self.has_combine_launch else 0

    @property
    def rows_of_partition(self) -> tuple[int, int]:
        """Rows of a query token, and rows of what a partition is a range of: a row block, or a band of latents."""
        return self.request.spec.group_size, self.config.block_m

    @property
    def partition_costs(self) -> tuple[float, int, float, int]:
        """`schedule.Costs`."""
        return (
            self.combine_cost, self.min_split_tiles, self.costs.two_level_combine_discount, self.two_level_min_tiles
        )  # fmt: skip

    def search(self, asked: int) -> "Search":
        """Return the launch that finds the schedule, for units of so many keys."""
        from quire.kernels.schedule import CUT_FIELDS, FIELDS, schedule_kernel
        from quire.kernels.scheduler import Search

        parts, cuts = self.num_partitions, self.num_cuts
        fixed = *self.partition_costs, *self.window, self.request.num_seqs, parts, cuts
        sizes = parts * FIELDS.value, cuts * CUT_FIELDS.value
        return Search(schedule_kernel, max(parts, cuts), sizes, fixed, self.schedule_constexprs() | {"UNIT": asked})

    def schedule_constexprs(self) -> dict[str, Any]:
        """Return the constexprs and compiler options of the launch that finds the schedule, but for its unit."""
        group, block_m = self.rows_of_partition
        return {
            "GROUP": group, "BLOCK_M": block_m, "MAX_DECODE_QUERIES": self.max_decode_queries,
            "INTERVALS": self.intervals_at_once,
            "MORE_INTERVALS": constexprs_of(self).get("MORE_INTERVALS", False),
            "FIXED_SPLIT": self.fixed_split_size > 0, "num_warps": 1,
        } | self.request.device.pdl  # fmt: skip

    @once
    def scratch_size(self) -> ScratchSize:
        """Return the size of the scratch for this launch or its fallback, which begin with as many counters."""
        own = self.own_scratch_size() if self.decode is None else self.decode.scratch_size()
        return own if self.fallback is None else max(own, self.fallback.scratch_size())

    def own_scratch_size(self) -> ScratchSize:
        """Return the size of the scratch that the launch itself needs, for partials and arrival counters."""
        if not self.num_partitions:
            return ScratchSize()
        num_slots = self.max_units if self.fixed_split_size else 2 * self.num_partitions
        counters = counter_bytes(self.request.device, self.num_partitions * self.lanes)
        rows = 32 * cdiv(num_slots * self.lanes * self.rows_between_partials, 32)
        return ScratchSize(counters + 4 * rows * (self.request.spec.head_dim_v + 2), counters)

    def partials(self, workspace: torch.Tensor) -> Any:
        """Return `views.Partials`: parts of a workspace of `scratch_size` bytes for partials and arrival counters."""
        from quire.kernels.views import Partials

        (total, counters), columns = self.scratch_size(), self.request.spec.head_dim_v
        rows = (total - counters) // 4 // (columns + 2)
        m_i = Part(workspace, torch.float32, counters, rows)
        l_i = Part(workspace, torch.float32, counters + 4 * rows, rows)
        acc = Part(workspace, torch.float32, counters + 8 * rows, columns * rows)
        counter = Part(workspace, torch.int32, TILE_COUNTER_BYTES, (counters - TILE_COUNTER_BYTES) // 4)
        return Partials(acc, m_i, l_i, counter)

    def scheduler(self, batch: Batch) -> "Scheduler | None":
        """Return what finds the schedule of a batch; None without partitions."""
        from quire.kernels.scheduler import scheduler_of

        return None if self.partitioned is None else scheduler_of(self.partitioned, batch)

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return the runner for a batch, with partials in a workspace of `scratch_size` bytes."""
        from quire.kernels.portable.kernel import portable_kernel
        from quire.kernels.views import starts_of

        spec, partials, decode = self.request.spec, None, self.decode
        if self.partitioned is not None:
            assert workspace is not None
            partials = self.partials(workspace)
        num_seqs = batch.num_seqs if self.multi_block and not self.num_partitions else None
        num_beside = None if decode is None else decode.num_partitions
        numbers = spec.softmax_scale, spec.softcap or 0.0, *self.window, num_seqs, num_beside
        return PortableRunner(self, batch, portable_kernel, (*starts_of(batch), partials, *numbers), workspace)

    def describe_config(self) -> str:
        """Describe the configuration."""
        config = self.config
        hints = "".join(f", {name} {value}" for name, value in config.hints.items())
        loops = ", full-tile loop" if self.full_tile_loop else ""
        rows = ", several row blocks a sequence" if self.multi_block else ""
        seen = "" if self.request.per_token is None else f", {self.request.per_token}"
        queries = "at most one query each" if self.request.bounds.max_query_len <= 1 else "any number of queries"
        return (
            f"{config.block_m} rows × {config.block_n} keys, {config.num_warps} warps, {config.num_stages} stages"
            f"{loops}{hints}, {queries}{rows}{seen}"
        )

    def describe_fallback(self) -> str:
        """Describe the fallback, if there is one."""
        return "" if self.fallback is None else f"; fallback for fp8 numbers that do not come in pairs: {self.fallback}"

    def describe_partitions(self, lanes: str) -> str:
        """Return in words how the batch is cut; `lanes` names what each program of a partition has one of."""
        details = f"{self.num_partitions} partitions × {self.lanes} {lanes}, partials of {self.partial_rows} rows"
        if self.is_two_level:
            details += ", two-level combine"
        if self.fixed_split_size:
            details += f", batch-invariant splits of {self.fixed_split_size} keys"
        if self.has_combine_launch:
            details += ", combined in a second launch"
            details += "" if self.fixed_split_size else f", {self.partials_at_once} at once"
        if self.max_decode_queries:
            details += f", sequences of at most {self.max_decode_queries} queries"
        return details

    def __str__(self) -> str:
        decode = "" if self.decode is None else f"; decode launch: {self.decode}"
        if self.num_partitions:
            details = f"{self.describe_config()}, {self.describe_partitions('KV heads')}{decode}"
            return f"split-KV kernel: {details}{self.describe_fallback()}"
        blocks = self.num_row_blocks(self.request.bounds.num_tokens)
        splits = f", batch-invariant splits of {self.fixed_split_size} keys" if self.fixed_split_size else ""
        details = f"{blocks} row blocks × {self.lanes} KV heads{splits}{decode}{self.describe_fallback()}"
        return f"block kernel: {self.describe_config()}, {details}"


def loads_pairs(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Return whether the kernel loads fp8 numbers in pairs, if the cache can be read as 16-bit elements."""
    can = spec.kv_dtype in FP8_DTYPES and spec.dtype.itemsize == 2
    return can and min(config.block_d, config.block_dv) >= 32
