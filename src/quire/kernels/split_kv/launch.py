"""`SplitKVLaunch`: a launch of the split-KV kernel, and the choice of how many partitions a batch is cut into."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from quire.batch import Batch
from quire.dispatch import tree
from quire.dispatch.config import CostModel, KernelConfig
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import Options, Request, cdiv
from quire.dispatch.tree import power_of_two
from quire.kernels.block.launch import BlockLaunch
from quire.kernels.launch import Runner, once
from quire.kernels.portable import PortableLaunch, PortableRunner
from quire.kernels.scratch import TILE_COUNTER_BYTES, ScratchSize, counter_bytes
from quire.spec import AttentionSpec

FIXED_SPLIT_SIZE = 256  # keys of a split of a batch-invariant plan
NEVER = 1 << 30  # tiles
TALL_TILE = 16384  # most elements of scores and of an accumulator for eight warps that hold two accumulators
MOST_INVARIANT_SCRATCH = 1 << 30  # bytes
FOLD_APART_FROM = 512  # rows of all states of a row block, from which another launch folds them
FILLED = 0.75  # of the SMs have a row block of a KV head
KEYS_OF_WIDE_VALUES = 64  # of a tile of eight warps, where values are wider than 128
INTERVALS_AT_ONCE = 8
LONG_CONTEXT, KEYS_FOR_EACH_QUERY = 8192, 64  # least keys of a sequence that may keep one program busy for long
IDLE = 8  # programs that a device has room for, for each row block, where it is nearly idle
MAX_UNITS = 1 << 31  # the kernel counts units in int32


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
    def seqs_at_once(self) -> int:
        """Sequences that a program looks at in one step when it finds its partition."""
        return 32 if self.request.num_seqs <= 32 else 256

    @property
    def intervals_at_once(self) -> int:
        """Intervals of a sequence that a program loads in one step when it finds its partition; 0 if there are none."""
        if not self.request.has_intervals:
            return 0
        return min(INTERVALS_AT_ONCE, power_of_two(max(1, self.request.bounds.max_query_len)))

    @property
    def is_two_level(self) -> bool:
        """Whether the kernel can combine partials in two levels: if they are large, or if there may be many of them."""
        if self.fixed_split_size:
            return False
        if self.request.bounds.max_query_len > 1:
            return self.partial_rows >= 16
        return cdiv(self.request.bounds.max_seq_len, self.config.block_n) > self._two_level_min_tiles

    @property
    def folds_apart(self) -> bool:
        """Whether a second launch folds the states of splits.

        It does if one program would take long to fold those of a row block, and if there are too few row blocks for the
        device. Else other programs attend while one folds.
        """
        if not self.fixed_split_size or self.max_decode_queries:  # the latter is concurrent with the Hopper kernel
            return False
        request = rounded_up(self.request)
        splits = cdiv(request.bounds.max_seq_len, self.fixed_split_size)
        row_blocks = replace(self, request=request).num_row_blocks(request.bounds.num_tokens)
        few = row_blocks * request.spec.num_kv_heads < FILLED * request.device.num_sms
        return few and splits * self.partial_rows >= FOLD_APART_FROM

    @property
    def fold_columns(self) -> int:
        """Columns of a row that a program of the second launch folds.

        A thread takes four where states have many rows, and one where there are fewer elements than threads.
        """
        return min(32 if self.partial_rows < 16 else 128, self.config.block_dv)

    def num_fold_programs(self, num_tokens: int) -> int:
        """Return the programs of the launch that folds, for a batch of `num_tokens` query tokens."""
        rows = self.num_row_blocks(num_tokens) * self.request.spec.num_kv_heads * self.partial_rows
        return rows * (self.config.block_dv // self.fold_columns)

    def fold_constexprs(self) -> dict[str, Any]:
        """Return the constexprs and compiler options of the kernel that folds."""
        names = (
            "NUM_KV_HEADS", "GROUP", "HEAD_DIM_V", "BLOCK_DV", "BLOCK_M", "PARTIAL_ROWS", "FIXED_SPLIT", "SEQS",
            "MORE_SEQS", "INTERVALS", "MORE_INTERVALS", "PDL",
        )  # fmt: skip
        of_kernel, columns = self.constexprs(), self.fold_columns
        options = {"launch_pdl": True} if of_kernel["PDL"] else {}
        return {name: of_kernel[name] for name in names} | {
            "COLUMNS": columns, "AHEAD": 32 if columns <= 32 else 8, "num_warps": 1,
        } | options  # fmt: skip

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
    def capacity(self) -> int:
        """Programs that the device holds at once, for each KV head."""
        return max(1, self.request.device.num_sms * self.config.programs_per_sm // self.request.spec.num_kv_heads)

    @property
    def max_units(self) -> int:
        """Most units of the batch: KV tiles, or splits of the fixed size, once for each row block."""
        unit = self.fixed_split_size or self.config.block_n
        bounds = self.request.bounds
        return self.num_row_blocks(bounds.num_tokens) * max(1, cdiv(bounds.max_seq_len, unit))

    def num_programs(self, num_tokens: int) -> int:
        """Return the programs of the grid, for a batch of `num_tokens` query tokens."""
        if self.num_row_blocks(num_tokens) == 0:
            return 0
        return self.num_partitions * self.request.spec.num_kv_heads

    def constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs and compiler options, without those that a cache decides."""
        costs = self.costs
        return super().constexprs() | {
            "PARTIAL_ROWS": self.partial_rows, "SEQS": self.seqs_at_once,
            "MORE_SEQS": self.request.num_seqs > self.seqs_at_once, "MAX_DECODE_QUERIES": self.max_decode_queries,
            "INTERVALS": self.intervals_at_once,
            "MORE_INTERVALS": self.request.has_intervals and self.request.bounds.max_query_len > self.intervals_at_once,
            "FIXED_SPLIT": self.fixed_split_size, "FOLDS_APART": self.folds_apart, "TWO_LEVEL": self.is_two_level,
            "MIN_SPLIT_TILES": costs.min_split_tiles, "TWO_LEVEL_DISCOUNT": costs.two_level_combine_discount,
            "TWO_LEVEL_MIN_TILES": self.two_level_min_tiles, "TWO_LEVEL_MIN_PARTIALS": costs.two_level_min_partials,
            "EARLY_EXIT_MAX_TILES": costs.early_exit_max_tiles,
            "FULL_TILE_LOOP_MIN_TILES": costs.full_tile_loop_min_tiles,
        }  # fmt: skip

    @once
    def scratch_size(self) -> ScratchSize:
        """Return the size of the scratch for partials and arrival counters."""
        spec = self.request.spec
        num_slots = self.max_units if self.fixed_split_size else 2 * self.num_partitions
        counters = counter_bytes(self.request.device, self.num_partitions * spec.num_kv_heads)
        rows = 32 * cdiv(num_slots * spec.num_kv_heads * self.partial_rows, 32)
        return ScratchSize(counters + 4 * rows * (spec.head_dim_v + 2), counters)

    def partials(self, workspace: torch.Tensor) -> Any:
        """Return `views.Partials`: the partials and the arrival counters in a workspace of `scratch_size` bytes."""
        from quire.kernels.views import Partials

        total, counters = self.scratch_size()
        states = workspace[counters:total].view(torch.float32)
        rows = states.numel() // (self.request.spec.head_dim_v + 2)
        counter = workspace[TILE_COUNTER_BYTES:counters].view(torch.int32)
        return Partials(states[2 * rows :], states[:rows], states[rows : 2 * rows], counter)

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return the runner for a batch, with partials in a workspace of `scratch_size` bytes."""
        from quire.kernels.split_kv.kernel import split_kv_kernel

        assert workspace is not None
        spec = self.request.spec
        numbers = spec.softmax_scale, spec.softcap or 0.0, *self.window, batch.num_seqs
        fixed = batch.cu_seqlens_q, self.partials(workspace), *numbers, self.num_partitions, self.combine_cost
        if self.folds_apart:
            from quire.kernels.split_kv.runner import FoldingRunner

            return FoldingRunner(self, batch, split_kv_kernel, fixed)
        return PortableRunner(self, batch, split_kv_kernel, fixed)

    def describe_partitions(self, lanes: str) -> str:
        """Return in words how the batch is cut; `lanes` are the programs that share a partition."""
        details = f"{self.num_partitions} partitions × {lanes}, partials of {self.partial_rows} rows"
        if self.is_two_level:
            details += ", two-level combine"
        if self.request.num_seqs > self.seqs_at_once:
            details += f", more than {self.seqs_at_once} sequences"
        if self.fixed_split_size:
            details += f", batch-invariant splits of {self.fixed_split_size} keys"
            details += ", folded in a second launch" if self.folds_apart else ""
        if self.max_decode_queries:
            details += f", sequences of at most {self.max_decode_queries} queries"
        return details

    def __str__(self) -> str:
        lanes = f"{self.request.spec.num_kv_heads} KV heads"
        return f"split-KV kernel: {self.describe_config()}, {self.describe_partitions(lanes)}"


def rounded(request: Request) -> tuple[int, float, int, int]:
    """Return the features of a batch that decision trees use; see `tree.rounded`."""
    bounds = request.bounds
    return tree.rounded(request.spec, request.device, bounds.max_query_len, bounds.max_seq_len, bounds.num_tokens)


def propose(request: Request, options: Options) -> tuple[SplitKVLaunch | BlockLaunch, str] | str:
    """Return a launch of one of the portable kernels and the reason; or, in words, what they do not serve."""
    return "latents" if request.spec.latent else choose(request, options)


def choose(request: Request, options: Options) -> tuple[SplitKVLaunch | BlockLaunch, str]:
    """Return a launch of one of the portable kernels, and the reason."""
    spec, device = request.spec, request.device
    if options.config is not None:
        config, reason = options.config, "config given by the caller"
    elif options.batch_invariant:
        config, reason = invariant_config(request)
    else:
        config, reason = tree.select(spec, device, *rounded(request))
    launch = choose_partitions(request, config, tree.cost_model(spec, device), options)
    if isinstance(launch, SplitKVLaunch):
        reason += (
            f", {launch.num_partitions} partitions for each of {spec.num_kv_heads} KV heads on {device.num_sms} SMs"
        )
    return launch, reason


def invariant_config(request: Request) -> tuple[KernelConfig, str]:
    """Return the configuration of a batch-invariant plan, and the reason.

    Tiles of as many keys serve all batches. Of two tiles that differ in rows alone, tensor cores and the kernels round
    a row alike, on devices of which that is known.
    """
    spec, device = request.spec, request.device
    # A fitted tree would choose different tiles for different batches.
    config, reason = tree.select(spec, device, power_of_two(spec.group_size), 1, FIXED_SPLIT_SIZE, 1, fitted=False)
    if config.block_dv > 128:  # there are two accumulators, one of the row block and one of the split
        wide = replace(config, num_warps=8, programs_per_sm=1)
        has_room = config.block_n == KEYS_OF_WIDE_VALUES and not device.has_mfma
        if has_room and with_rows(wide, 32, spec, device) is not None:
            config = wide
        else:
            config = replace(config, block_n=max(16, config.block_n // 2), programs_per_sm=2)
    if device.has_mfma:
        config = replace(config, matrix_instr_nonkdim=16)  # else the compiler takes larger instructions for more rows
    for block_m in (32, 64, 128):
        if has_one_split(request) and not fills(request, block_m):
            break  # each row block has few keys, and none is cut: more of them are faster than taller ones
        if config.block_m < min(block_m, request.rows_per_seq) and block_m <= device.alike_rows:
            config = with_rows(config, block_m, spec, device) or config
    return config, reason


def rounded_up(request: Request) -> Request:
    """Return a request whose numbers are powers of two, so that `service.launches_within` meets what is decided of it.

    The queries of a sequence are left as they are: the configuration depends on them, and its rows are such powers.
    """
    bounds = replace(
        request.bounds,
        max_seq_len=power_of_two(max(1, request.bounds.max_seq_len)),
        num_tokens=power_of_two(max(1, request.bounds.num_tokens)),
    )
    return replace(request, num_seqs=power_of_two(request.num_seqs), bounds=bounds)


def has_one_split(request: Request) -> bool:
    """Return whether no sequence of a batch-invariant plan has more than one split."""
    return power_of_two(max(1, request.bounds.max_seq_len)) <= FIXED_SPLIT_SIZE


def fills(request: Request, block_m: int) -> bool:
    """Return whether row blocks of `block_m` rows fill most of the device."""
    rows = power_of_two(max(1, request.bounds.num_tokens)) * request.spec.group_size
    return cdiv(rows, block_m) * request.spec.num_kv_heads >= FILLED * request.device.num_sms


@lru_cache(maxsize=4096)
def with_rows(config: KernelConfig, block_m: int, spec: AttentionSpec, device: DeviceProperties) -> KernelConfig | None:
    """Return a configuration with more rows and tiles of as many keys; None if registers or shared memory are short."""
    if spec.kv_dtype is not spec.dtype:
        return None  # of 8-bit elements, the compiler multiplies other ones together where there are more rows
    # mma.sync takes both operands from registers, wgmma at most one.
    most = TALL_TILE if device.has_wgmma or device.has_mfma else TALL_TILE // 2
    if block_m * max(config.block_dv, config.block_n) > most:
        return None
    taller = replace(config, block_m=block_m, full_tile_loop=True)
    if block_m > 32:
        taller = replace(taller, num_warps=8, programs_per_sm=1)
    room = device.shared_memory - 4 * block_m * config.block_dv  # the state of a split is stored through shared memory
    while taller.num_stages > 2 and taller.shared_memory(spec) > room:
        taller = replace(taller, num_stages=taller.num_stages - 1)
    return taller if taller.shared_memory(spec) <= room else None


def choose_partitions(
    request: Request, config: KernelConfig, costs: CostModel, options: Options
) -> SplitKVLaunch | BlockLaunch:
    """Decide into how many partitions a batch is cut, per KV head; if it is not cut, return a `BlockLaunch`.

    Args:
        request: the batch.
        config: the kernel's configuration.
        costs: constants of the device.
        options: the caller's `num_splits` and `batch_invariant`.
    """
    fixed_split_size = FIXED_SPLIT_SIZE if options.batch_invariant else 0
    block = BlockLaunch(request, config, fixed_split_size)
    num_blocks = block.num_row_blocks(request.bounds.num_tokens)
    if num_blocks == 0:
        return block
    split = SplitKVLaunch(
        request,
        config,
        1,
        costs,
        combine_cost=costs.combine_cost if options.num_splits is None and not options.batch_invariant else 0.0,
        fixed_split_size=fixed_split_size,
    )
    if options.batch_invariant:
        wanted = options.num_splits * num_blocks if options.num_splits else split.capacity
        num_partitions = min(wanted, split.max_units)
        one_each = split.multi_block and has_one_split(request)
        if options.num_splits is None and (one_each or not invariant_cuts_pay(split)):
            num_partitions = 0
    elif options.num_splits is not None:
        num_partitions = options.num_splits * num_blocks if options.num_splits > 1 else 0
    elif is_tiny(split, num_blocks):
        split = replace(split, combine_cost=0.0)
        num_partitions = num_blocks * cdiv(split.request.bounds.max_seq_len, split.config.block_n)
    else:
        num_partitions = partitions_that_pay(split, num_blocks)
    if num_partitions == 0 or split.max_units >= MAX_UNITS:
        return block
    return replace(split, num_partitions=num_partitions)


def invariant_cuts_pay(split: SplitKVLaunch) -> bool:
    """Return whether a batch-invariant plan cuts row blocks: if they are few, and the scratch is not too large.

    Every split of every row block may have a state in the scratch.
    """
    request = rounded_up(split.request)
    rows = request.bounds.num_tokens * request.spec.group_size
    if split.multi_block and 2 * cdiv(rows, split.config.block_m) > split.capacity:
        return False
    return replace(split, request=request).scratch_size().total <= MOST_INVARIANT_SCRATCH


def is_tiny(split: SplitKVLaunch, num_blocks: int) -> bool:
    """Return whether so few sequences of so few keys decode that each KV tile should have a program.

    Of 256 keys, 1 sequence takes 5.3 us so and 7.3 whole, 4 take 6.7 and 7.5, 8 take as long (NVIDIA H200, 2026-11-23).
    Two tiles are faster whole.
    """
    bounds = split.request.bounds
    tiles = cdiv(bounds.max_seq_len, split.config.block_n)
    is_short = 2 < tiles <= split.costs.min_split_tiles
    return is_short and bounds.max_query_len == 1 and IDLE * num_blocks <= split.capacity


def partitions_that_pay(split: SplitKVLaunch, num_blocks: int) -> int:
    """Return how many partitions fill the device; 0 to leave row blocks uncut.

    If sequences have several row blocks, they are cut only if the row blocks would leave half of the device idle, or if
    one sequence may keep a program busy for long: an uncut row block reads no more keys than it sees.
    """
    tiles = cdiv(split.request.bounds.max_seq_len, split.config.block_n)
    fills = split.multi_block and 2 * num_blocks > split.capacity and not may_be_uneven(split.request)
    if tiles <= split.costs.min_split_tiles or fills:
        return 0
    shortest = min_partition_tiles(tiles, split.combine_cost, split.costs, split.two_level_min_tiles)
    return min(split.capacity, num_blocks * cdiv(tiles, shortest))


def may_be_uneven(request: Request) -> bool:
    """Return whether one sequence of a ragged batch may have few queries and very many keys, and most others few keys.

    58 sequences of up to 155 queries on up to 42,161 keys, 10/2 heads of 24, took 157 us cut and 638 not; 50 of up to
    13 on up to 2,532, 128/8 heads of 184, 207 cut, and 123 by the Hopper kernel (NVIDIA H200, 2026-11-23).
    """
    bounds = request.bounds
    is_ragged = bounds.num_tokens < request.num_seqs * bounds.max_query_len
    least = max(LONG_CONTEXT, KEYS_FOR_EACH_QUERY * power_of_two(bounds.max_query_len))
    return is_ragged and request.keys_seen >= least


def min_partition_tiles(mean: float, combine_cost: float, costs: CostModel, two_level_min_tiles: int) -> int:
    """Return the length of the shortest partition that is worth its cost, for sequences of `mean` tiles.

    A sequence of t tiles in partitions of s tiles takes the time of s tiles, and of combining t / s partials. The sum
    s + combine_cost * t / s is least at s = sqrt(t * combine_cost). Partials that are combined in two levels cost less.
    Very short sequences are not cut.

    The kernel computes the same from the mean length on the device (`schedule.min_partition_units`).
    """
    if mean <= costs.min_split_tiles and combine_cost > 0:
        shortest = mean
    else:
        cost = costs.two_level_combine_discount * combine_cost if mean > two_level_min_tiles else combine_cost
        shortest = math.sqrt(mean * cost)
    return max(1, int(shortest + 0.5))
