"""The variants of the portable kernel: its configurations for a spec on a device, and how each is used.

"whole" has a program for each row block, "cut" partitions whose programs combine partials, and "joined" partitions
whose partials a second launch combines. "mixed" is whole, and has the programs of a decode launch, for sequences of few
queries, in the same grid.
`kernels/choose.py` takes the one of least predicted time.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from quire.cache_formats import FORMATS
from quire.dispatch.config import COSTS, ROWS_OF_PRODUCT, CostModel, KernelConfig, padded, reduced
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import Bounds, Options, Request, cdiv
from quire.kernels.portable.launch import FIXED_SPLIT_SIZE, NEVER, PortableLaunch, loads_pairs
from quire.kernels.scratch import MOST_STATES
from quire.spec import AttentionSpec

# Rows x keys, warps, stages ("u": full tiles have a loop of their own), programs of an SM; and the uses that were best
# somewhere on a Hopper GPU, by their first letters: of batches of one query each, after the slash of others, and after
# a second one of those that the Hopper kernel doesn't serve, where they differ. Tiles of more than 16 rows have no uses
# of the first kind, and those without uses are for GPUs on which nothing was swept.
# By the bytes of a cached number and the columns of a head, padded; the first that is not smaller.
CONFIGS: dict[int, dict[int, str]] = {
    1: {
        64: "16x64 w4 s3 p3 wj/wj, 16x128 w4 s3 p2 w/w, 16x128 w4 s3 p3 j/, 64x64 w4 s3u p2 /w/wj",
        128: "16x32 w4 s3 p3 j/, 16x64 w4 s3 p2 w/w, 16x128 w4 s3 p2 wj/wj, 16x128 w4 s3 p3 j/, 32x128 w4 s3 p2 /wj, "
        "64x32 w4 s3u p2 /w/, 64x64 w4 s3 p2 /j/j, 128x64 w8 s3u p1 //w",
        256: "16x32 w4 s3 p2 wj/wj, 16x64 w4 s3 p2 wj/wj, 16x128 w4 s2 p2 j/j, 128x32 w8 s3u p1 //wj",
        512: "16x32 w4 s3 p2 wj/wj, 16x32 w8 s3 p1 j/j, 32x32 w8 s2u p1 //w",
    },
    2: {
        64: "16x64 w4 s3 p3 wj/wj, 16x128 w4 s3 p2 wj/j, 64x64 w4 s3u p2 //wj",
        128: "16x32 w4 s3 p2 w/, 16x64 w4 s3 p2 wj/wj, 16x128 w4 s2 p2 /, 64x64 w4 s3 p2 /j/j, 128x64 w8 s3u p1 //w",
        256: "16x32 w4 s3 p2 wj/wj, 16x64 w4 s3 p1 wj/wj, 128x32 w8 s3u p1 //w",
        512: "16x32 w8 s3 p1 wj/wj, 16x16 w4 s3 p2 wj/wj, 32x32 w8 s2u p1 //w",
    },
    4: {
        128: "16x32 w8 s2 p1 wcj/wj",
        512: "16x16 w8 s2 p1 wcj/wj",
    },
}
# Below eight bits, for sequences of any number of rows.
BELOW_EIGHT_BITS = {
    64: "16x128 w4 s3 p2 wj/wj, 64x128 w4 s3u p2 /wj",
    128: "16x128 w4 s3 p2 wj/wj, 64x32 w4 s3u p2 /w, 128x64 w8 s3u p1 //w",
    256: "16x32 w4 s3 p2 wj/w, 16x128 w4 s2 p2 wj/wj, 128x32 w8 s3u p1 //w",
    512: "16x16 w4 s1 p1 w/w, 16x32 w8 s3 p1 wcj/wj, 32x32 w8 s2u p1 /wj",
}
# There, instructions are the limit, and sequences of up to 8 rows have turned products too (`panels.is_turned`).
# Programs of one warp are a multiple of four: each quarter of an SM has registers of its own.
TURNED = {
    64: "8x32 w1 s3 p16 wcj/wj, 8x64 w1 s3 p12 wcj/wj",
    128: "8x32 w1 s3 p12 wcj/wj, 8x64 w1 s3 p8 wcj/wj",
    256: "8x32 w1 s3 p8 wcj/wj",
}
# With block scales, numbers take longer, and loads may be further ahead.
IN_BLOCKS = BELOW_EIGHT_BITS | {
    64: "16x32 w4 s1 p2 w/w, 16x128 w4 s3 p2 wj/wj, 64x64 w4 s3u p2 /w, 64x128 w4 s3u p2 /wj",
    128: "16x32 w4 s1 p2 w/, 16x64 w4 s3 p2 wj/wj, 16x128 w4 s3 p2 wj/wj, 64x64 w4 s3 p2 /wj, 128x64 w8 s3u p1 //w",
}
TURNED_IN_BLOCKS = TURNED | {128: "8x32 w1 s5u p12 wcj/wj, 8x64 w1 s3 p8 wcj/wj"}


def with_turned(others: dict[int, str], turned: dict[int, str] = TURNED) -> dict[int, str]:
    """Return the configurations for numbers below eight bits, by the columns of a head."""
    return {width: f"{text}, {turned[width]}" if width in turned else text for width, text in others.items()}


CONFIGS[0] = with_turned(BELOW_EIGHT_BITS)
CONFIGS[-1] = with_turned(IN_BLOCKS, TURNED_IN_BLOCKS)
# Where all products are mma.sync's: the same of an H200 with the code for sm80, but that no kernel is for Hopper GPUs.
OF_MMA_SYNC: dict[int, dict[int, str]] = CONFIGS | {
    1: CONFIGS[1]
    | {
        64: "16x64 w4 s3 p3 wc/wc, 32x64 w4 s3u p2 /wc, 64x64 w4 s3u p2 /wj, 128x64 w4 s3u p2 /w",
        128: "16x64 w4 s3 p3 wc/wc, 32x64 w4 s3u p2 /c, 64x32 w4 s3u p2 /w, 128x32 w4 s3u p2 /wj",
        256: "16x32 w4 s3 p2 wc/wc, 32x32 w4 s3u p2 /c, 64x32 w4 s3u p2 /wc",
    },
    2: CONFIGS[2]
    | {
        64: "16x64 w4 s3 p3 wc/wc, 16x128 w4 s3 p2 wc/wc, 32x64 w4 s3u p2 /wc, 64x64 w4 s3u p3 /wcj, "
        "128x32 w4 s3u p2 /wcj, 128x64 w4 s3u p2 /wcj",
        128: "16x32 w4 s3 p3 wc/wc, 16x64 w4 s3 p2 wc/wc, 16x128 w4 s2 p2 w/, 32x64 w4 s3u p2 /wc, "
        "64x32 w4 s3u p2 /wcj, 64x64 w4 s3u p2 /wj, 128x32 w4 s3u p2 /wj",
        256: "16x32 w4 s3 p2 wc/wc, 32x32 w4 s3u p1 /wc, 64x32 w4 s2u p2 /w, 64x32 w4 s3u p1 /wcj, "
        "128x64 w8 s2u p1 /wj",
    },
}
OF_MMA_SYNC[0] = OF_MMA_SYNC[-1] = with_turned(OF_MMA_SYNC[1])
# Where products are neither wgmma's nor mma.sync's, nothing was swept: row blocks have as many rows as a sequence, up
# to so many, and longer sequences are cut if row blocks are fewer than so many for each SM.
MOST_OWN_ROWS, FILLED = 64, 0.75
# Of AMD's GPUs, which have a quarter of the shared memory.
OF_MFMA: dict[int, dict[int, str]] = CONFIGS | {
    1: CONFIGS[1] | {64: "16x32 w4 s1 p2, 16x128 w4 s3 p2, 64x32 w4 s3u p2"},
}
OF_MFMA[0] = OF_MFMA[-1] = OF_MFMA[1]
MAX_DECODE_ROWS = 16  # in a mixed batch, sequences with at most this many rows go to the decode launch
WGMMA_ROWS = 64  # of a tile, from which on wgmma multiplies
MIXED_ROWS = 64  # of a tile, and of a sequence, from which on decoding sequences may have tiles of their own
VERY_TALL = 64  # rows of partials, of which one program combines one after the other: a second launch has more
# Of batch-invariant plans: one for all batches, but for its rows.
INVARIANT = {
    1: {64: "16x128 w4 s3 p2", 128: "16x64 w4 s3 p2", 256: "16x64 w4 s3 p2", 512: "16x32 w8 s3 p1"},
    2: {64: "16x128 w4 s3 p2", 128: "16x64 w4 s3 p2", 256: "16x64 w4 s3 p2", 512: "16x32 w8 s3 p1"},
    4: {128: "16x32 w8 s2 p1", 512: "16x16 w8 s2 p2"},
}
# Bytes of shared memory, up to which batch-invariant plans have smaller tiles: of narrow heads of 8 bits, and of the
# widest ones.
SMALL, LARGE = 64 * 1024, 160 * 1024
TALL_TILE = 16384  # most elements of scores and of an accumulator for eight warps that hold two accumulators
WIDE_TILE = 16384  # keys times columns of a tile that eight warps keep in batch-invariant plans
MAX_UNITS = 1 << 31  # the kernel counts units in int32
USES = "cut", "joined"
MIN_CUT_TILES = 4  # of the longest sequence: of fewer, partitions were never more than 3 % faster on an H200


def variants(request: Request, options: Options, within: bool = False, alone: bool = True) -> dict[str, PortableLaunch]:
    """Return the launches of the portable kernel by name.

    Args:
        request: the batch.
        options: what the caller of `plan` asks for.
        within: return all that any batch may have whose numbers are of the same kind, for a warm-up.
        alone: whether the Hopper kernel has no variants for the batch.
    """
    spec, device = request.spec, request.device
    if options.batch_invariant and options.config is None:
        configs = invariant_configs(spec, device)
    else:
        configs = {} if options.config is None else {name_of(options.config): options.config}
        configs = configs or configs_of(spec, device)
    takes_all = options.config is not None or options.num_splits is not None or options.batch_invariant
    one_each = request.bounds.max_query_len <= 1
    was_swept = device.has_wgmma or device.has_mma_sync
    is_listed = not takes_all and was_swept
    listed = uses_listed(spec, device, one_each, alone) if is_listed else {}
    rows, found = request.rows_per_seq, dict[str, PortableLaunch]()
    configs = {name: config for name, config in configs.items() if may_suit(config, rows, configs, device)}
    always = {name: config for name, config in configs.items() if not listed or "w" in listed[name]}  # for any keys
    for name, config in configs.items():
        if listed and not listed[name]:  # no use of it
            continue
        if not (takes_all or was_swept) and is_short(config, rows, always):
            continue
        whole = PortableLaunch(request, config, COSTS)
        if options.batch_invariant:
            whole = replace(whole, fixed_split_size=FIXED_SPLIT_SIZE)
        loads_ahead = config.num_stages > 1 or all(each.num_stages == 1 for each in configs.values())
        offered = uses_of(whole, options.num_splits, within, loads_ahead)
        either = "cj" if len(offered) == 2 else ""  # a device that has one use with partitions has it for the other
        for use, launch in offered.items():
            if use != "whole" and not (takes_all or within or is_listed) and fills(whole):
                continue
            if listed and not set(use[0] + either * (use != "whole")) & set(listed[name]):
                continue
            if options.batch_invariant and config.block_m > 16 and loads_pairs(spec, config):
                base = next(iter(configs.values()))
                fallback = replace(launch, config=base)
                if not within and fallback.scratch_size().total > MOST_STATES:  # of more row blocks
                    fallback = replace(whole, config=base)
                launch = replace(launch, fallback=fallback)
            found[f"portable {name} {use}"] = launch
            if use == "whole" and not takes_all and (decode := decode_launch_beside(launch)) is not None:
                found[f"portable {name} mixed"] = replace(launch, decode=decode)
    return found


def may_suit(config: KernelConfig, rows: int, configs: dict[str, KernelConfig], device: DeviceProperties) -> bool:
    """Return whether a configuration may suit sequences of so many rows: unless one of fewer has as many row blocks.

    Of turned products, all rows are in one row block.
    Tiles for wgmma have at least WGMMA_ROWS, also for fewer rows. The tallest ones are for sequences that have several.
    """
    if len(configs) == 1:
        return True
    if config.block_m < ROWS_OF_PRODUCT:
        return rows <= config.block_m
    rows = max(ROWS_OF_PRODUCT, rows)
    if device.has_wgmma and config.block_m >= WGMMA_ROWS:
        return rows > (config.block_m if config.block_m > WGMMA_ROWS else 16)
    return config.block_m < 2 * rows


def is_short(config: KernelConfig, rows: int, configs: dict[str, KernelConfig]) -> bool:
    """Return whether a configuration has fewer rows than another that a sequence of so many rows fills."""
    wanted = min(rows, MOST_OWN_ROWS)
    return any(config.block_m < other.block_m <= wanted for other in configs.values())


def fills(launch: PortableLaunch) -> bool:
    """Return whether sequences of several row blocks have enough of them for the device."""
    request = launch.request
    programs = launch.num_row_blocks(request.bounds.num_tokens) * request.spec.num_kv_heads
    return launch.multi_block and programs >= FILLED * request.device.num_sms


def decode_launch_beside(launch: PortableLaunch) -> PortableLaunch | None:
    """Return the launch for sequences of few queries in the grid of one for prompts, if a batch may have both.

    A decoding sequence uses a few rows of a prompt's tile, of which mma.sync multiplies all. Its programs come first,
    one for each SM, where a program of the other kind multiplies while they load. On other targets, mixed batches are
    the Hopper kernel's, or this was not tried.
    """
    request, bounds, config = launch.request, launch.request.bounds, launch.config
    is_tall = config.block_m >= MIXED_ROWS < request.rows_per_seq
    if not (request.device.has_mma_sync and request.is_ragged and is_tall) or request.has_tree:
        return None
    of_spec = configs_of(request.spec, request.device).values()
    low = [each for each in of_spec if each.block_m <= MAX_DECODE_ROWS and each.num_warps == config.num_warps]
    if not low:
        return None
    own = min(low, key=lambda each: abs(each.programs_per_sm - config.programs_per_sm))
    own = replace(own, num_stages=config.num_stages, programs_per_sm=config.programs_per_sm)  # a kernel has one of each
    max_queries = most_decode_queries(request.spec)
    tokens = min(bounds.num_tokens, request.num_seqs * max_queries)
    request = replace(request, bounds=Bounds(max_queries, bounds.max_seq_len, tokens))
    decode, most = decode_launch(request, max_queries, config=own), request.device.num_sms // request.spec.num_kv_heads
    return replace(decode, num_partitions=max(1, min(decode.num_partitions, most)))


def most_decode_queries(spec: AttentionSpec, rows: int = MAX_DECODE_ROWS) -> int:
    """Return the most queries of a sequence that a decode launch serves, if they are to have at most so many rows."""
    return max(1, rows // spec.group_size)


def config_of_decode(spec: AttentionSpec, device: DeviceProperties) -> KernelConfig:
    """Return the configuration of fewest rows, in which a query's fit, that cuts batches of one query each."""
    listed, least = uses_listed(spec, device, True, True), min(spec.group_size, MAX_DECODE_ROWS)
    configs = configs_of(spec, device).items()
    cuts = [config for name, config in configs if config.block_m >= least and set("cj") & set(listed[name])]
    return min(cuts, key=lambda config: config.block_m)


def uses_of(
    whole: PortableLaunch, num_splits: int | None = None, within: bool = False, loads_ahead: bool = True
) -> dict[str, PortableLaunch]:
    """Return a launch that has no partitions, and those that have the same configuration and some.

    There are as many partitions as programs that the device holds, unless so short ones cost more than they save.

    Args:
        whole: the first one.
        num_splits: into how many splits the keys of a sequence are cut; chosen when None.
        within: as for `variants`.
        loads_ahead: whether tiles are in flight, without which partitions are left to other configurations.
    """
    request, costs = whole.request, whole.costs
    found = {"whole": whole} if num_splits in (None, 1) or whole.fixed_split_size else {}
    blocks, keys = whole.num_row_blocks(request.bounds.num_tokens), request.bounds.max_seq_len
    tiles, units = cdiv(keys, whole.config.block_n), whole.max_units
    uncut = max(whole.fixed_split_size, (MIN_CUT_TILES - 1) * whole.config.block_n)
    is_short = not (num_splits or whole.max_decode_queries) and keys <= uncut
    if is_short or (not within and (num_splits == 1 or blocks == 0 or units >= MAX_UNITS)):
        return found or {"whole": whole}
    for use in uses_with_partitions(whole) if loads_ahead or num_splits else ():
        partitions, cost, is_joined = (num_splits or 0) * blocks, 0.0, use == "joined"
        if not num_splits and whole.fixed_split_size:
            partitions = max(1, min(whole.capacity, units))
        elif not num_splits:
            cost = costs.combine_launch_cost if is_joined else costs.combine_cost
            cost = 0.0 if tiles <= costs.min_split_tiles else cost  # each tile has a program
            shortest = min_partition_tiles(tiles, cost, costs, NEVER if is_joined else whole.two_level_min_tiles)
            partitions = max(1, min(whole.capacity, blocks * cdiv(tiles, shortest)))
        at_once = partials_at_once(whole, partitions) if is_joined else 0
        split = replace(whole, num_partitions=partitions, combine_cost=cost, partials_at_once=at_once)
        if whole.fixed_split_size and not within and split.scratch_size().total > MOST_STATES:
            continue
        found[use] = split
    return found or {"whole": whole}


def uses_with_partitions(whole: PortableLaunch) -> tuple[str, ...]:
    """Return which uses a launch may have that cut its batch.

    Where the device can start a second launch early, programs combine partials only for batches of one query each, of
    which few may be cut.
    """
    if whole.max_decode_queries:  # of two launches, each has its own counters
        return USES[:1]
    if whole.fixed_split_size:
        return USES[1:] if whole.partial_rows >= VERY_TALL else USES
    device = whole.request.device
    if not device.supports_pdl:
        return USES if device.has_mma_sync and whole.partial_rows >= VERY_TALL else USES[:1]
    return USES if whole.request.bounds.max_query_len <= 1 else USES[1:]


def partials_at_once(whole: PortableLaunch, num_partitions: int) -> int:
    """Return how many partials of a row a program of the second launch combines at once, as `ALIKE` lists them.

    Partitions of whole tiles are fewer than may be, so 33 of 8 row blocks leave four partials. With eight at once in
    place of four, 8 x 1,024 took 13.8 us in place of 13.2 (32/8 heads of 128, NVIDIA H200, 2026-11-29).
    """
    partials = num_partitions // max(1, whole.num_row_blocks(whole.request.bounds.num_tokens))
    return next((most for most in whole.ALIKE if partials <= most), whole.ALIKE[-1])


def decode_launch(
    request: Request, max_decode_queries: int, batch_invariant: bool = False, config: KernelConfig | None = None
) -> PortableLaunch:
    """Return the launch for sequences of few queries, next to one for the others."""
    if config is None:
        of_spec = (invariant_configs if batch_invariant else configs_of)(request.spec, request.device).values()
        config = next((config for config in of_spec if config.num_stages > 1), next(iter(of_spec)))
    fixed_split_size = FIXED_SPLIT_SIZE if batch_invariant else 0
    whole = PortableLaunch(request, config, COSTS, 0, 0.0, fixed_split_size, max_decode_queries)
    return uses_of(whole, within=True)["cut"]


@lru_cache(maxsize=1024)
def configs_of(spec: AttentionSpec, device: DeviceProperties) -> dict[str, KernelConfig]:
    """Return the configurations for a spec on a device, by name, as shared memory has room."""
    listed = [read_config(words, spec) for words in entries_of(spec, device)]
    configs = [reduced(config, spec, device) for config in listed]
    # What was reduced is left out where another one of as many rows was not, and is as good at loading ahead.
    fits = [(c.block_m, c.num_stages > 1) for c in configs if c in listed]
    configs = [c for c in configs if c in listed or not {(c.block_m, True), (c.block_m, c.num_stages > 1)} & {*fits}]
    if device.has_mma_sync:  # or where any other was not
        configs = [c for c in configs if c in listed] or configs
    return {name_of(config): config for config in configs}


@lru_cache(maxsize=1024)
def uses_listed(spec: AttentionSpec, device: DeviceProperties, one_each: bool, alone: bool) -> dict[str, str]:
    """Return the first letters of the uses of each configuration, by its name.

    Args:
        spec: what is computed.
        device: the device's properties.
        one_each: whether sequences have one query each.
        alone: whether the Hopper kernel has no variants for the batch.
    """
    found: dict[str, str] = {}
    for words in entries_of(spec, device):
        config, uses = reduced(read_config(words, spec), spec, device), words.split()[-1].split("/")
        found[name_of(config)] = uses[0] if one_each and config.block_m <= 16 else uses[-1 if alone else 1]
    return found


def entries_of(spec: AttentionSpec, device: DeviceProperties) -> list[str]:
    """Return what is listed for a spec on a device."""
    table = OF_MMA_SYNC if device.has_mma_sync else OF_MFMA if device.has_mfma else CONFIGS
    of_width = entry_of(table, bytes_of_number(spec))
    return entry_of(of_width, max(padded(spec.head_dim), padded(spec.head_dim_v))).split(", ")


@lru_cache(maxsize=1024)
def invariant_configs(spec: AttentionSpec, device: DeviceProperties) -> dict[str, KernelConfig]:
    """Return the configurations of batch-invariant plans, by name.

    Tiles of as many keys serve all batches. Of two tiles that differ in rows alone, tensor cores and the kernels round
    a row alike, on devices of which that is known.
    """
    width = max(padded(spec.head_dim), padded(spec.head_dim_v))
    of_width = entry_of(INVARIANT, bytes_of_number(spec))
    text = entry_of(of_width, width)
    if width > 256 and spec.dtype.itemsize == 2 and device.shared_memory <= LARGE:
        text = "16x16 w4 s2 p2"
    if width <= 64 and spec.kv_dtype.itemsize == 1 and device.shared_memory <= SMALL:
        text = "16x64 w4 s3 p2"
    config = reduced(read_config(text, spec), spec, device)
    if config.block_dv > 128:  # there are two accumulators, one of the row block and one of the split
        wide = replace(config, num_warps=8, programs_per_sm=1)
        has_room = config.block_n * max(config.block_d, config.block_dv) == WIDE_TILE and not device.has_mfma
        if has_room and with_rows(wide, 32, spec, device) is not None:
            config = wide
        else:
            config = replace(config, block_n=max(16, config.block_n // 2), programs_per_sm=2)
    if device.has_mfma:
        config = replace(config, matrix_instr_nonkdim=16)  # else the compiler takes larger instructions for more rows
    found = {name_of(config): config}
    for block_m in (32, 64, 128):
        taller = with_rows(config, block_m, spec, device) or with_pairs(config, block_m, spec, device)
        if taller is not None and block_m <= device.alike_rows:
            found[name_of(taller)] = taller
    return found


def with_rows(config: KernelConfig, block_m: int, spec: AttentionSpec, device: DeviceProperties) -> KernelConfig | None:
    """Return a configuration with more rows and tiles of as many keys; None if registers or shared memory are short."""
    if spec.kv_dtype is not spec.dtype:
        return None  # of 8-bit elements, the compiler multiplies other ones together where there are more rows
    # mma.sync takes both operands from registers, wgmma at most one.
    most = TALL_TILE if device.has_wgmma or device.has_mfma else TALL_TILE // 2
    if block_m * max(config.block_dv, config.block_n) > most:
        return None
    taller = replace(config, block_m=block_m, full_tile_loop=True)
    if block_m > (64 if device.has_mma_sync else 32):  # of mma.sync, a warp has 16 rows
        taller = replace(taller, num_warps=8, programs_per_sm=1)
    room = device.shared_memory - 4 * block_m * config.block_dv  # the state of a split is stored through shared memory
    while taller.num_stages > 2 and taller.shared_memory(spec, device) > room:
        taller = replace(taller, num_stages=taller.num_stages - 1)
    return taller if taller.shared_memory(spec, device) <= room else None


def with_pairs(
    config: KernelConfig, block_m: int, spec: AttentionSpec, device: DeviceProperties
) -> KernelConfig | None:
    """Return a configuration with more rows for fp8 numbers that are loaded in pairs; None if it has none.

    With 64 rows, a prompt of 4,096 took 600 us instead of 1,393, 32/8 heads of 128. With 32 rows x 128 keys, one of
    2,048 would have taken 466 instead of 413 (64/8 heads of 64; NVIDIA H100, 2026-11-28).
    """
    if not loads_pairs(spec, config) or device.has_mfma or block_m > 64:
        return None
    if block_m == 64 and device.has_wgmma:
        has_room = block_m * max(config.block_dv, config.block_n) <= TALL_TILE
    else:
        has_room = block_m * config.block_dv <= TALL_TILE // 4 and config.block_n <= 64
    return replace(config, block_m=block_m, full_tile_loop=True) if has_room else None


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


def read_config(text: str, spec: AttentionSpec) -> KernelConfig:
    """Return the configuration that "16x64 w4 s3u p2" names."""
    size, warps, stages, programs = text.split()[:4]
    rows, keys = size.split("x")
    columns = padded(spec.head_dim), padded(spec.head_dim_v)
    full, depth = stages.endswith("u"), int(stages[1:].rstrip("u"))
    return KernelConfig(int(rows), int(keys), int(warps[1:]), depth, full, int(programs[1:]), *columns)


def name_of(config: KernelConfig) -> str:
    """Return the name of a configuration, as the tables have it."""
    full = "u" if config.full_tile_loop else ""
    size = f"{config.block_m}x{config.block_n}"
    return f"{size} w{config.num_warps} s{config.num_stages}{full} p{config.programs_per_sm}"


def bytes_of_number(spec: AttentionSpec) -> int:
    """Return the whole bytes of a cached number, 0 below eight bits, -1 with block scales; or those of float32."""
    if spec.dtype.itemsize == 4 or spec.kv_format is None:
        return 4 if spec.dtype.itemsize == 4 else spec.kv_dtype.itemsize
    return -1 if FORMATS[spec.kv_format].has_blocks else 0


def entry_of(table: dict[int, Any], number: int) -> Any:
    """Return the entry of the least key that a number does not exceed; the last one's where it exceeds all."""
    return table[min((key for key in table if key >= number), default=max(table))]


def key_steps(spec: AttentionSpec, device: DeviceProperties) -> set[int]:
    """Return numbers of keys after which other kernels may be launched: partitions, and those of two levels."""
    tiles = COSTS.two_level_min_tiles, COSTS.two_level_min_tiles_small, MIN_CUT_TILES - 1
    configs = *configs_of(spec, device).values(), *invariant_configs(spec, device).values()
    sizes = {config.block_n for config in configs}
    return {count * size for count in tiles for size in sizes} | {FIXED_SPLIT_SIZE}
