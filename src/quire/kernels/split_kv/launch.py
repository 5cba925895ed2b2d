"""`SplitKVLaunch`: a launch of the split-KV kernel."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from quire.batch import Batch
from quire.dispatch.config import CostModel
from quire.dispatch.request import Request, cdiv
from quire.dispatch.tree import power_of_two
from quire.kernels.launch import Runner, constexprs_of, key_of
from quire.kernels.portable import PortableLaunch, PortableRunner
from quire.kernels.scratch import TILE_COUNTER_BYTES, Part, ScratchSize, counter_bytes

if TYPE_CHECKING:  # it imports Triton, which a plan for the CPU must not need
    from quire.kernels.scheduler import Scheduler, Search

FIXED_SPLIT_SIZE = 256  # keys of a split of a batch-invariant plan
NEVER = 1 << 30  # tiles
# Partials of a mean row block from which on a second launch combines them: with one query, and with drafts.
COMBINE_LAUNCH_FROM, DRAFTS_COMBINE_LAUNCH_FROM = 2, 4
TALL = 8  # rows of a partial: four of them take 5.5 us, and 6.3 without a second launch (NVIDIA H200, 2026-11-26)
MOST_AT_ONCE = 64  # partials of a row
PARTIALS_OF_FEW_BLOCKS = 8  # of a row block where sequences have several, which are cut if half of the device idles
LONG_CONTEXT, KEYS_FOR_EACH_QUERY = 8192, 64  # least keys of a sequence that may keep one program busy for long
FOLD_LAUNCH_FROM = 512  # rows of all states of a row block, from which on a second launch folds them
FILLED = 0.75  # row blocks of all KV heads for each SM, from which on the device counts as filled
INTERVALS_AT_ONCE = 8


@dataclass(frozen=True)
class SplitKVLaunch(PortableLaunch):
    """Each program owns an equal partition of the batch's KV tiles, for one KV head.

    Attributes:
        num_partitions: partitions for each KV head.
        costs: constants of the device.
        combine_cost: cost of a partial, in KV tiles; 0 if the number of splits does not depend on it.
        fixed_split_size: keys of a split of a batch-invariant plan; else 0.
        max_decode_queries: sequences with more queries are left to another launch; 0 if this launch serves all.
    """

    num_partitions: int
    costs: CostModel
    combine_cost: float = 0.0
    fixed_split_size: int = 0
    max_decode_queries: int = 0

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "split_kv"

    @property
    def full_tile_loop(self) -> bool:
        """Whether there is a full-tile loop.

        Only with one row block per sequence: partitions of several row blocks are short, and slower with two loops.
        """
        return self.config.full_tile_loop and not self.multi_block

    @property
    def partial_rows(self) -> int:
        """Rows of a partial: those of the longest sequence, rounded up to a power of two to have fewer kernels."""
        bounds = self.request.bounds
        return min(self.config.block_m, power_of_two(max(1, bounds.max_query_len) * self.request.spec.group_size))

    @property
    def intervals_at_once(self) -> int:
        """Intervals of a sequence that a program loads in one step when it finds its partition; 0 if there are none."""
        if not self.request.has_intervals:
            return 0
        return min(INTERVALS_AT_ONCE, power_of_two(self.request.bounds.max_query_len))

    @property
    def is_two_level(self) -> bool:
        """Whether the kernel can combine partials in two levels: if they are large, or if there may be many of them."""
        if self.fixed_split_size or self.has_combine_launch:
            return False
        if self.request.bounds.max_query_len > 1:
            return self.partial_rows >= 16
        return cdiv(self.request.bounds.max_seq_len, self.config.block_n) > self._two_level_min_tiles

    @cached_property
    def has_combine_launch(self) -> bool:
        """Whether a second launch combines partials, or folds the states of splits.

        It does if there are so few row blocks for the device that most are cut. Else other programs attend while one
        combines. Of very few partials with few rows, a program combines all in the time that a second launch takes.
        """
        if self.max_decode_queries:  # concurrent with the Hopper kernel
            return False
        if not self.fixed_split_size:
            bounds = self.request.bounds
            tiles = cdiv(power_of_two(bounds.max_seq_len), self.config.block_n)
            pays = tiles > self.costs.min_split_tiles or self.partial_rows >= TALL
            least = COMBINE_LAUNCH_FROM if bounds.max_query_len == 1 else DRAFTS_COMBINE_LAUNCH_FROM
            return pays and self.mean_partials >= least and self.request.device.supports_pdl
        request = rounded_up(self.request)
        splits = cdiv(request.bounds.max_seq_len, self.fixed_split_size)
        row_blocks = replace(self, request=request).num_row_blocks(request.bounds.num_tokens)
        few = row_blocks * request.spec.num_kv_heads < FILLED * request.device.num_sms
        return few and splits * self.partial_rows >= FOLD_LAUNCH_FROM

    @cached_property
    def mean_partials(self) -> int:
        """Partials of a mean row block, if all programs that the device holds attend.

        Numbers are rounded to powers of two, so that `service.launches_within` meets what depends on them. Where
        sequences have several row blocks, it is a guess.
        """
        bounds = self.request.bounds
        if self.multi_block:
            partials = 1 if may_be_uneven(self.request) else PARTIALS_OF_FEW_BLOCKS
        else:
            tokens, queries = power_of_two(bounds.num_tokens), power_of_two(bounds.max_query_len)
            # A sequence has a row block, also one without queries, or with fewer of them than the longest one.
            row_blocks = max(cdiv(tokens, queries), power_of_two(self.request.num_seqs) // 2)
            partials = self.capacity // row_blocks
        return min(cdiv(power_of_two(bounds.max_seq_len), self.config.block_n), partials)

    @property
    def partials_at_once(self) -> int:
        """Partials of a row that a program of the second launch combines at once."""
        return min(MOST_AT_ONCE, max(4, power_of_two(self.mean_partials)))

    @cached_property
    def combine_columns(self) -> int:
        """Columns of a row that a program of the second launch combines.

        To fold, a thread takes four where states have many rows, and one where there are fewer elements than threads.
        """
        if not self.fixed_split_size:
            at_once = self.partials_at_once  # of which a warp holds 1,024 numbers, or 2,048 where there are many
            return min(128 if at_once <= 8 else 64 if at_once <= 32 else 32, self.config.block_dv)
        return min(32 if self.partial_rows < 16 else 128, self.config.block_dv)

    def num_combine_programs(self, num_tokens: int) -> int:
        """Return the programs of the second launch, for a batch of `num_tokens` query tokens."""
        rows = self.num_row_blocks(num_tokens) * self.request.spec.num_kv_heads * self.partial_rows
        return rows * (self.config.block_dv // self.combine_columns)

    def combine_constexprs(self) -> dict[str, Any]:
        """Return the constexprs and compiler options of the second launch."""
        names = "NUM_KV_HEADS", "GROUP", "HEAD_DIM_V", "BLOCK_DV", "PDL"
        of_kernel, columns = constexprs_of(self), self.combine_columns
        ahead = self.partials_at_once
        if self.fixed_split_size:
            ahead = 32 if columns <= 32 else 8
        options = {"launch_pdl": True} if of_kernel["PDL"] else {}
        return {name: of_kernel[name] for name in names} | {
            "COLUMNS": columns, "AHEAD": ahead, "num_warps": 1,
            "STRIDE": self.lanes * self.partial_rows if self.fixed_split_size else 0,
        } | options  # fmt: skip

    @property
    def min_split_tiles(self) -> int:
        """As in `CostModel`; 0 where a second launch combines, since partials then cost little."""
        return 0 if self.has_combine_launch else self.costs.min_split_tiles

    def compile_keys(self) -> frozenset[Hashable]:
        """Return a key of each kernel that is launched, as `Launch.compile_keys` has it."""
        request = self.request
        absent = request.has_cu_seqlens, request.has_intervals, request.has_tree, self.has_combine_launch
        own = super().compile_keys() | {key_of("schedule", *absent, **self.schedule_constexprs())}
        if not self.has_combine_launch:
            return own
        return own | {key_of("combine_partials", request.has_cu_seqlens, **self.combine_constexprs())}

    def with_most_partitions(self) -> "PortableLaunch":
        """Return the launch with the most partitions that one with its kernels may have, which is for scratch alone."""
        launch = super().with_most_partitions()
        assert isinstance(launch, SplitKVLaunch)
        most = 0 if self.fixed_split_size else self.most_partitions  # of those, states are counted
        return replace(launch, num_partitions=max(self.num_partitions, most))

    @property
    def most_partitions(self) -> int:
        """Most partitions that are chosen."""
        return self.capacity

    @property
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

    @property
    def lanes(self) -> int:
        """Programs that share a partition: one for each KV head."""
        return self.request.spec.num_kv_heads

    @property
    def capacity(self) -> int:
        """Partitions whose programs the device holds at once."""
        return max(1, self.request.device.num_sms * self.config.programs_per_sm // self.lanes)

    @property
    def max_units(self) -> int:
        """Most units of the batch: KV tiles, or splits of the fixed size, once for each row block."""
        unit = self.fixed_split_size or self.config.block_n
        bounds = self.request.bounds
        return self.num_row_blocks(bounds.num_tokens) * max(1, cdiv(bounds.max_seq_len, unit))

    def num_programs(self, num_tokens: int) -> int:
        """Return the programs of the grid, for a batch of `num_tokens` query tokens."""
        return self.num_partitions * self.lanes if self.num_row_blocks(num_tokens) else 0

    def constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs and compiler options, without those that a cache decides."""
        costs = self.costs
        return super().constexprs() | {
            "PARTIAL_ROWS": self.partial_rows, "MAX_DECODE_QUERIES": self.max_decode_queries,
            "INTERVALS": self.intervals_at_once,
            "MORE_INTERVALS": self.request.has_intervals and self.request.bounds.max_query_len > self.intervals_at_once,
            "FIXED_SPLIT": self.fixed_split_size, "COMBINE_LAUNCH": self.has_combine_launch,
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
        from quire.kernels.scheduler import Search
        from quire.kernels.split_kv.schedule import CUT_FIELDS, PART_FIELDS, schedule_kernel

        parts, cuts = self.num_partitions, self.num_cuts
        fixed = *self.partition_costs, *self.window, self.request.num_seqs, parts, cuts
        sizes = parts * PART_FIELDS.value, cuts * CUT_FIELDS.value
        return Search(schedule_kernel, max(parts, cuts), sizes, fixed, self.schedule_constexprs() | {"UNIT": asked})

    def schedule_constexprs(self) -> dict[str, Any]:
        """Return the constexprs and compiler options of the launch that finds the schedule, but for its unit."""
        group, block_m = self.rows_of_partition
        of_kernel = constexprs_of(self)
        options = {"launch_pdl": True} if of_kernel["PDL"] else {}
        return {
            "GROUP": group, "BLOCK_M": block_m, "MAX_DECODE_QUERIES": self.max_decode_queries,
            "INTERVALS": self.intervals_at_once, "MORE_INTERVALS": of_kernel.get("MORE_INTERVALS", False),
            "FIXED_SPLIT": self.fixed_split_size > 0, "PDL": of_kernel["PDL"], "num_warps": 1,
        } | options  # fmt: skip

    def own_scratch_size(self) -> ScratchSize:
        """Return the size of the scratch for partials and arrival counters."""
        num_slots = self.max_units if self.fixed_split_size else 2 * self.num_partitions
        counters = counter_bytes(self.request.device, self.num_partitions * self.lanes)
        rows = 32 * cdiv(num_slots * self.lanes * self.partial_rows, 32)
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

    @property
    def split_keys(self) -> int:
        """Keys of a split of a batch-invariant plan; else 0."""
        return self.fixed_split_size

    def scheduler(self, batch: Batch) -> "Scheduler":
        """Return what finds the schedule of a batch."""
        from quire.kernels.scheduler import scheduler_of

        return scheduler_of(self, batch)

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return the runner for a batch, with partials in a workspace of `scratch_size` bytes."""
        from quire.kernels.split_kv.kernel import split_kv_kernel

        assert workspace is not None
        spec = self.request.spec
        numbers = spec.softmax_scale, spec.softcap or 0.0, *self.window
        fixed = batch.cu_seqlens_q, self.partials(workspace), *numbers
        if self.has_combine_launch:
            from quire.kernels.split_kv.runner import CombineRunner

            return CombineRunner(self, batch, split_kv_kernel, fixed, workspace)
        return PortableRunner(self, batch, split_kv_kernel, fixed, workspace)

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
        details = f"{self.describe_config()}, {self.describe_partitions('KV heads')}"
        return f"split-KV kernel: {details}{self.describe_fallback()}"


def may_be_uneven(request: Request) -> bool:
    """Return whether one sequence of a ragged batch may have few queries and very many keys, and most others few keys.

    Keys are rounded up to a power of two first, as queries are.

    58 sequences of up to 155 queries on up to 42,161 keys, 10/2 heads of 24, took 157 us cut and 638 not; 50 of up to
    13 on up to 2,532, 128/8 heads of 184, 207 cut, and 123 by the Hopper kernel (NVIDIA H200, 2026-11-23).
    """
    bounds = request.bounds
    least = max(LONG_CONTEXT, KEYS_FOR_EACH_QUERY * power_of_two(bounds.max_query_len))
    return request.is_ragged and power_of_two(request.keys_seen) >= least


def rounded_up(request: Request) -> Request:
    """Return a request whose numbers are powers of two, so that `service.launches_within` meets what is decided of it.

    The queries of a sequence are left as they are: the configuration depends on them, and its rows are such powers.
    """
    bounds = replace(
        request.bounds,
        max_seq_len=power_of_two(request.bounds.max_seq_len),
        num_tokens=power_of_two(request.bounds.num_tokens),
    )
    return replace(request, num_seqs=power_of_two(request.num_seqs), bounds=bounds)
