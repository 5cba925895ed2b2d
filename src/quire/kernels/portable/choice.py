"""Which configuration of the portable kernel serves a batch, and into how many partitions the batch is cut."""

import math
from dataclasses import replace
from functools import lru_cache

from quire.dispatch import tree
from quire.dispatch.config import CostModel, KernelConfig
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import Options, Request, cdiv
from quire.dispatch.tree import power_of_two
from quire.kernels.launch import once
from quire.kernels.portable.launch import (
    FILLED,
    FIXED_SPLIT_SIZE,
    PortableLaunch,
    loads_pairs,
    may_be_uneven,
    rounded_up,
)
from quire.spec import AttentionSpec

TALL_TILE = 16384  # most elements of scores and of an accumulator for eight warps that hold two accumulators
WIDE_TILE = 16384  # keys times columns of a tile that eight warps keep in batch-invariant plans
MOST_INVARIANT_SCRATCH = 1 << 30  # bytes
FEW_KEYS = 64  # that a query sees
MANY_ROWS, MANY_WIDE_ROWS = 64, 128  # for each SM, above which taller row blocks are faster than those of 16 rows
IDLE = 8  # programs for each row block: a device with room for that many is nearly idle
MAX_UNITS = 1 << 31  # the kernel counts units in int32


@once
def rounded(request: Request) -> tuple[int, float, int, int]:
    """Return the features of a batch that decision trees use; see `tree.rounded`. They are kept with the request."""
    bounds = request.bounds
    return tree.rounded(request.spec, request.device, bounds.max_query_len, bounds.max_seq_len, bounds.num_tokens)


def propose(request: Request, options: Options) -> tuple[PortableLaunch, str] | str:
    """Return a launch of the portable kernel and the reason; or, in words, what it does not serve."""
    return "latents" if request.spec.latent else choose(request, options)


@lru_cache(maxsize=1)
def choose(request: Request, options: Options, max_decode_queries: int = 0) -> tuple[PortableLaunch, str]:
    """Return a launch of the portable kernel, and the reason; `max_decode_queries` is of `PortableLaunch`.

    The last choice is kept: the Hopper family asks for it before the portable one does.
    """
    spec, device = request.spec, request.device
    if options.config is not None:
        config, reason = options.config, "config given by the caller"
    elif options.batch_invariant:
        config, reason = invariant_config(request)
    else:
        config, reason = tree.select(spec, device, *rounded(request))
        config = shrunk(config, request)
    costs = tree.cost_model(spec, device)
    launch = choose_partitions(request, config, costs, options, max_decode_queries)
    if options.batch_invariant and options.config is None and options.num_splits is None:
        taller = config_for_pairs(request, config)
        if taller is not None:
            in_pairs = choose_partitions(request, taller, costs, options, max_decode_queries)
            launch = replace(in_pairs, fallback=launch)
    if launch.num_partitions:
        reason += (
            f", {launch.num_partitions} partitions for each of {spec.num_kv_heads} KV heads on {device.num_sms} SMs"
        )
    return launch, reason


tree.CHOICES.append(choose)


def shrunk(config: KernelConfig, request: Request) -> KernelConfig:
    """Return a configuration with no more keys in flight than queries see, if they see few.

    Shared memory then has room for more programs. If all keys are one tile, tensor cores are nearly idle, and more row
    blocks are faster than taller ones as long as there are few. 37 sequences of 7 queries on 7 keys, 24/8 heads of 136,
    took 30.2 us with 3 stages of 64 keys, and 9.9 with one of 16 (NVIDIA H200, 2026-11-24).
    """
    keys_seen = power_of_two(request.keys_seen)
    return config if keys_seen > FEW_KEYS else for_few_keys(config, keys_seen, rounded(request)[1])


@lru_cache(maxsize=4096)
def for_few_keys(config: KernelConfig, keys_seen: int, rows_per_sm: float) -> KernelConfig:
    """Return what `shrunk` does, for queries that see few keys."""
    block_n = min(config.block_n, max(16, keys_seen))
    tiles = cdiv(keys_seen, block_n)
    config = replace(config, block_n=block_n, num_stages=min(config.num_stages, tiles))
    if tiles == 1 and rows_per_sm <= (MANY_WIDE_ROWS if config.block_d > 128 else MANY_ROWS):
        config = replace(config, block_m=16, num_warps=4, full_tile_loop=False)
    smallest = min(config.block_m, config.block_n)  # of a matrix instruction of AMD's GPUs
    return replace(config, matrix_instr_nonkdim=min(config.matrix_instr_nonkdim, smallest))


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
        has_room = config.block_n * max(config.block_d, config.block_dv) == WIDE_TILE and not device.has_mfma
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


def config_for_pairs(request: Request, config: KernelConfig) -> KernelConfig | None:
    """Return a configuration with more rows for fp8 numbers that are loaded in pairs; None if it would not be faster.

    It is faster if the device has a row block for each program that it holds, so that none need be cut. With 64 rows, a
    prompt of 4,096 took 600 us instead of 1,393, and 64 queries on 8,192 would have taken 185 instead of 121 (32/8
    heads of 128). With 32 rows × 128 keys, one of 2,048 would have taken 466 instead of 413 (64/8 heads of 64; NVIDIA
    H100, 2026-11-28).
    """
    spec, device = request.spec, request.device
    if not loads_pairs(spec, config) or device.has_mfma:
        return None
    for block_m in (64, 32):
        if block_m == 64 and device.has_wgmma:
            has_room = block_m * max(config.block_dv, config.block_n) <= TALL_TILE
        else:
            has_room = block_m * config.block_dv <= TALL_TILE // 4 and config.block_n <= 64
        is_taller = config.block_m < block_m < 2 * request.rows_per_seq and block_m <= device.alike_rows
        if is_taller and has_room and fills(request, block_m, config.programs_per_sm):
            return replace(config, block_m=block_m, full_tile_loop=True)
    return None


def has_one_split(request: Request) -> bool:
    """Return whether no sequence of a batch-invariant plan has more than one split."""
    return power_of_two(request.bounds.max_seq_len) <= FIXED_SPLIT_SIZE


def fills(request: Request, block_m: int, programs_per_sm: int = 1) -> bool:
    """Return whether row blocks of `block_m` rows fill most of the device, with so many on each SM."""
    rows = power_of_two(request.bounds.num_tokens) * request.spec.group_size
    return cdiv(rows, block_m) * request.spec.num_kv_heads >= FILLED * request.device.num_sms * programs_per_sm


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
    request: Request, config: KernelConfig, costs: CostModel, options: Options, max_decode_queries: int = 0
) -> PortableLaunch:
    """Decide into how many partitions a batch is cut, per KV head; 0 if each row block has a program.

    Args:
        request: the batch.
        config: the kernel's configuration.
        costs: constants of the device.
        options: the caller's `num_splits` and `batch_invariant`.
        max_decode_queries: of `PortableLaunch`.
    """
    fixed_split_size = FIXED_SPLIT_SIZE if options.batch_invariant else 0
    whole = PortableLaunch(request, config, costs, fixed_split_size=fixed_split_size)
    num_blocks = whole.num_row_blocks(request.bounds.num_tokens)
    if num_blocks == 0:
        return whole
    split = replace(whole, num_partitions=1, max_decode_queries=max_decode_queries)
    combine_cost = 0.0
    if options.batch_invariant:
        wanted = options.num_splits * num_blocks if options.num_splits else split.capacity
        num_partitions = min(wanted, split.max_units)
        one_each = split.multi_block and has_one_split(request)
        if options.num_splits is None and (one_each or not invariant_cuts_pay(split)):
            num_partitions = 0
    elif options.num_splits is not None:
        num_partitions = options.num_splits * num_blocks if options.num_splits > 1 else 0
    elif is_tiny(split, num_blocks):
        num_partitions = num_blocks * cdiv(split.request.bounds.max_seq_len, split.config.block_n)
    else:
        combine_cost = costs.combine_launch_cost if split.has_combine_launch else costs.combine_cost
        num_partitions = partitions_that_pay(split, num_blocks, combine_cost)
    if num_partitions == 0 or split.max_units >= MAX_UNITS:
        return whole
    return replace(split, num_partitions=num_partitions, combine_cost=combine_cost)


def invariant_cuts_pay(split: PortableLaunch) -> bool:
    """Return whether a batch-invariant plan cuts row blocks: if they are few, and the scratch is not too large.

    Every split of every row block may have a state in the scratch.
    """
    request = rounded_up(split.request)
    rows = request.bounds.num_tokens * request.spec.group_size
    if split.multi_block and 2 * cdiv(rows, split.config.block_m) > split.capacity:
        return False
    return replace(split, request=request).scratch_size().total <= MOST_INVARIANT_SCRATCH


def is_tiny(split: PortableLaunch, num_blocks: int) -> bool:
    """Return whether so few sequences of so few keys decode that each KV tile should have a program.

    Of 256 keys, 1 sequence takes 5.3 us so and 7.3 whole, 4 take 6.7 and 7.5, 8 take as long (NVIDIA H200, 2026-11-23).
    Two tiles are faster whole.
    """
    bounds = split.request.bounds
    tiles = cdiv(bounds.max_seq_len, split.config.block_n)
    is_short = 2 < tiles <= split.costs.min_split_tiles
    return is_short and bounds.max_query_len == 1 and IDLE * num_blocks <= split.capacity


def partitions_that_pay(split: PortableLaunch, num_blocks: int, combine_cost: float) -> int:
    """Return how many partitions fill the device; 0 to leave row blocks uncut.

    If sequences have several row blocks, they are cut only if the row blocks would leave half of the device idle, or if
    one sequence may keep a program busy for long: an uncut row block reads no more keys than it sees.
    """
    request, config = split.request, split.config
    keys = request.bounds.max_seq_len
    if split.multi_block:
        keys = min(keys, request.keys_seen + config.block_m // request.spec.group_size)
        if not request.is_ragged:  # no row block is a spare one
            num_blocks = request.num_seqs * cdiv(request.rows_per_seq, config.block_m)
    tiles = cdiv(keys, config.block_n)
    keeps_busy = split.multi_block and 2 * num_blocks > split.capacity and not may_be_uneven(request)
    if tiles <= split.costs.min_split_tiles or keeps_busy:
        return 0
    shortest = min_partition_tiles(tiles, combine_cost, split.costs, split.two_level_min_tiles)
    return min(split.capacity, num_blocks * cdiv(tiles, shortest))


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
