"""Variants: the few launches among which a request's is chosen, by name.

A variant is a configuration of a kernel family, and how it is used: whole row blocks, keys that are cut, or a decode
launch for short sequences. There are three to eight configurations for each kind of spec. `dispatch/predict.py` says
what each would take.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from quire.dispatch import tree
from quire.dispatch.config import HopperConfig, KernelConfig, hopper_refusal, reduced
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import Bounds, Options, Request, cdiv
from quire.dispatch.tree import ROWS_OF_WARPGROUP, padded, power_of_two, queries_of_tile
from quire.kernels.block.launch import BlockLaunch
from quire.kernels.hopper.choice import MAX_PART_COLUMNS, choose_section, most_decode_queries
from quire.kernels.hopper.launch import HopperLaunch
from quire.kernels.launch import Launch
from quire.kernels.mla.launch import MLALaunch, choose_num_partitions
from quire.kernels.mla_hopper import launch as mla_hopper
from quire.kernels.split_kv.choice import MAX_UNITS, choose_partitions, min_partition_tiles
from quire.kernels.split_kv.launch import SplitKVLaunch
from quire.spec import AttentionSpec

# Configurations of the portable kernels: rows x keys, warps, stages ("u": full tiles have a loop of their own), and
# programs of an SM. By the bytes of a cached number and the columns of a head, padded; the first that is not smaller.
PORTABLE: dict[int, dict[int, str]] = {
    1: {
        64: "16x32 w4 s1 p2, 16x128 w4 s3 p2, 16x128 w4 s3 p3, 32x128 w4 s3 p2, 64x32 w4 s3u p2, 64x128 w4 s3u p2",
        128: "16x32 w4 s1 p2, 16x64 w4 s3 p2, 16x128 w4 s3 p2, 16x128 w4 s3 p3, 32x128 w4 s3 p2, 64x32 w4 s3u p2, "
        "128x64 w8 s3u p1",
        256: "16x16 w4 s1 p2, 16x64 w4 s3 p2, 16x128 w4 s2 p2, 32x32 w4 s3u p2, 128x32 w8 s3u p1",
        512: "16x16 w4 s1 p1, 16x32 w8 s3 p1, 32x32 w8 s2u p1",
    },
    2: {
        64: "16x32 w4 s1 p2, 16x64 w4 s3 p3, 16x128 w4 s3 p2, 32x64 w4 s3 p2, 64x64 w4 s3u p2, 64x128 w4 s3u p2",
        128: "16x32 w4 s1 p2, 16x64 w4 s3 p2, 16x64 w4 s2 p3, 16x128 w4 s2 p2, 32x64 w4 s3 p2, 64x64 w4 s3u p2",
        256: "16x16 w4 s1 p2, 16x32 w4 s3 p2, 16x64 w4 s3 p1, 32x32 w4 s3 p1, 64x32 w8 s3u p1",
        512: "16x16 w4 s1 p1, 16x32 w8 s3 p1, 32x32 w8 s2u p1",
    },
    4: {
        128: "16x32 w8 s2 p1",
        512: "16x16 w8 s2 p1",
    },
}
LATENTS = {  # of the portable kernel for latents, by the bytes of a query's number
    2: "16x32 w4 s3 p1, 16x64 w8 s3 p1, 32x64 w8 s3 p1",
    4: "16x16 w8 s1 p1",
}
# Configurations of the Hopper kernel: warpgroups, keys, stages, stages of queries. By the columns of keys and values.
HOPPER = {
    (64, 64): "wg1 n64 s4 q2, wg2 n128 s4 q2",
    (128, 128): "wg1 n64 s2 q2, wg2 n128 s2 q2",
    (192, 128): "wg2 n64 s3 q2, wg2 n128 s2 q1",
    (192, 192): "wg2 n64 s3 q1, wg2 n96 s2 q1",
    (256, 256): "wg2 n64 s2 q1",
    (512, 512): "wg2 n32 s2 q1",
}
HOPPER_QUANTISED = {(64, 64): (3, 2), (128, 128): (2, 1)}  # stages, and of unconverted tiles
MOST_ROW_BLOCKS, FEW_KEYS = 32, 64  # of a sequence, unless no configuration has more rows, or keys are few
FEW_TILES = 64  # of a row block, which a program may attend to alone while the device is idle


def read_config(text: str, spec: AttentionSpec) -> KernelConfig:
    """Return the portable configuration that "16x64 w4 s3u p2" names."""
    size, warps, stages, programs = text.split()
    rows, keys = size.split("x")
    columns = padded(spec.head_dim), padded(spec.head_dim_v)
    full, depth = stages.endswith("u"), int(stages[1:].rstrip("u"))
    return KernelConfig(int(rows), int(keys), int(warps[1:]), depth, full, int(programs[1:]), *columns)


def name_of(config: KernelConfig | HopperConfig) -> str:
    """Return the name of a configuration, as the tables have it."""
    if isinstance(config, HopperConfig):
        products = " fp8" if config.fp8_mma else ""
        return f"wg{config.num_warpgroups} n{config.block_n} s{config.num_stages} q{config.num_q_stages}{products}"
    full = "u" if config.full_tile_loop else ""
    size = f"{config.block_m}x{config.block_n}"
    return f"{size} w{config.num_warps} s{config.num_stages}{full} p{config.programs_per_sm}"


def entry_of(table: dict[int, Any], number: int) -> Any:
    """Return the entry of the least key that a number does not exceed; the last one's where it exceeds all."""
    return table[min((key for key in table if key >= number), default=max(table))]


@lru_cache(maxsize=1024)
def portable_variants(spec: AttentionSpec, device: DeviceProperties) -> dict[str, KernelConfig]:
    """Return the configurations of the portable kernels for a spec on a device, by name, as shared memory has room."""
    if spec.latent:
        text = entry_of(LATENTS, spec.dtype.itemsize)
    else:
        of_width = entry_of(PORTABLE, max(spec.kv_dtype.itemsize, 4 if spec.dtype.itemsize == 4 else 1))
        text = entry_of(of_width, max(padded(spec.head_dim), padded(spec.head_dim_v)))
    configs = [reduced(read_config(words, spec), spec, device) for words in text.split(", ")]
    return {name_of(config): config for config in configs}


@lru_cache(maxsize=1024)
def hopper_variants(spec: AttentionSpec, device: DeviceProperties) -> dict[str, dict[str, Any]]:
    """Return the configurations of the Hopper kernel for a spec, without the queries of a work tile; none if unserved.

    Those follow from a batch (`queries_of_tile`).
    """
    if hopper_refusal(spec, device):
        return {}
    widths = spec.head_dim, spec.head_dim_v
    if spec.kv_dtype is not spec.dtype:
        if widths not in HOPPER_QUANTISED:
            return {}
        stages, unconverted = HOPPER_QUANTISED[widths]
        common: dict[str, Any] = {"num_warpgroups": 2, "block_n": 128, "num_q_stages": 2}
        found = [{**common, "num_stages": stages, "num_quantised_stages": unconverted}]
        if spec.allow_fp8 and spec.kv_dtype is torch.float8_e4m3fn and widths == (128, 128):
            found.append({**common, "num_stages": 3, "num_quantised_stages": 2, "fp8_mma": True})
        return {name_of(HopperConfig(block_t=1, **fields)): fields for fields in found}
    for most, text in HOPPER.items():
        if all(width <= limit for width, limit in zip(widths, most, strict=True)):
            names = "num_warpgroups", "block_n", "num_stages", "num_q_stages"
            return {
                words: {name: int(word.lstrip("wgnsq")) for name, word in zip(names, words.split(), strict=True)}
                for words in text.split(", ")
            }
    return {}


def kind_of(spec: AttentionSpec) -> str:
    """Return which numbers a spec's variants have: the widths of heads, padded, and the dtypes."""
    dtypes = f"{spec.dtype} {spec.kv_dtype}".replace("torch.", "")
    return f"latents {dtypes}" if spec.latent else f"{max(padded(spec.head_dim), padded(spec.head_dim_v))} {dtypes}"


def launches(request: Request) -> dict[str, Launch]:
    """Return the launches among which one is chosen for a request, by name: family, configuration, and use."""
    if request.spec.latent:
        return latent_launches(request)
    return portable_launches(request) | hopper_launches(request)


def portable_launches(request: Request) -> dict[str, Launch]:
    """Return the launches of the block and split-KV kernels: "whole" and "cut"."""
    found: dict[str, Launch] = {}
    configs = portable_variants(request.spec, request.device)
    rows, tallest = power_of_two(request.rows_per_seq), max(config.block_m for config in configs.values())
    for name, config in configs.items():
        if config.block_m > max(16, rows):
            continue  # one of fewer rows has as many row blocks
        if config.block_m < min(tallest, rows // MOST_ROW_BLOCKS) and request.keys_seen > FEW_KEYS:
            continue
        if config.block_n > max(16, power_of_two(request.keys_seen)) and config.num_stages > 1:
            continue
        whole, cut = BlockLaunch(request, config), cut_launch(request, config)
        tiles = cdiv(min(request.bounds.max_seq_len, request.keys_seen + config.block_m), config.block_n)
        blocks = whole.num_programs(request.bounds.num_tokens)
        is_filled = 2 * blocks > request.device.num_sms * config.programs_per_sm
        if is_filled or tiles <= FEW_TILES:
            found[f"portable {name} whole"] = whole
        if tiles > 1 and cut is not None and blocks <= 4 * request.device.num_sms * config.programs_per_sm:
            found[f"portable {name} cut"] = cut
    return found


def cut_launch(request: Request, config: KernelConfig) -> SplitKVLaunch | None:
    """Return the launch of the split-KV kernel with a configuration; None if there are too many units to count.

    It has as many partitions as programs that the device holds, unless so short ones cost more than they save.
    """
    costs = tree.cost_model(request.spec, request.device)
    split = SplitKVLaunch(request, config, 1, costs)
    blocks = split.num_row_blocks(request.bounds.num_tokens)
    if blocks == 0 or split.max_units >= MAX_UNITS:
        return None
    cost = costs.combine_launch_cost if split.has_combine_launch else costs.combine_cost
    split = replace(split, combine_cost=cost)
    tiles = cdiv(request.bounds.max_seq_len, config.block_n)
    shortest = min_partition_tiles(tiles, cost, costs, split.two_level_min_tiles)
    return replace(split, num_partitions=min(split.capacity, blocks * cdiv(tiles, shortest)))


def hopper_launches(request: Request) -> dict[str, Launch]:
    """Return the launches of the Hopper kernel: "whole", "cut", and "decode", with a decode launch.

    Of two warpgroups, "apart" says that each has tokens of its own.
    """
    spec, found = request.spec, {}
    if request.has_tree or not request.has_cu_seqlens or request.bounds.num_tokens == 0:
        return found
    costs = tree.cost_model(spec, request.device)
    queries = max(1, request.bounds.max_query_len)
    queries = power_of_two(queries) if request.is_ragged else queries
    fallback = fallback_of(request)
    for name, fields in hopper_variants(spec, request.device).items():
        rows = ROWS_OF_WARPGROUP * fields["num_warpgroups"]
        for apart in (False, True) if request.is_ragged and fields["num_warpgroups"] == 2 else (False,):
            block_t = queries_of_tile(rows, spec.group_size, queries, request.is_ragged, apart)
            config = HopperConfig(block_t=block_t, apart=apart, **fields)
            parts = cdiv(spec.head_dim_v, MAX_PART_COLUMNS)
            launch = HopperLaunch(request, config, fallback, column_parts=parts)
            key = f"hopper {name}{' apart' if apart else ''}"
            found[f"{key} whole"] = whole = replace(launch, section_heads=choose_section(launch, costs))
            splits = most_splits(launch)
            if splits > 1:
                found[f"{key} cut"] = replace(launch, num_splits=splits)
            if (decode := decode_launch(request)) is not None:
                found[f"{key} decode"] = replace(whole, decode=decode)
    return found


def fallback_of(request: Request) -> BlockLaunch | SplitKVLaunch:
    """Return the launch for what TMA cannot address, which few requests need."""
    config = next(iter(portable_launches(request).values()))
    assert isinstance(config, BlockLaunch | SplitKVLaunch)
    return config


def most_splits(launch: HopperLaunch) -> int:
    """Return into how many splits the keys of each work tile are cut to fill the device; 1 if it is filled already."""
    request, config, device = launch.request, launch.config, launch.request.device
    work_tiles = launch.num_work_tiles(request.bounds.num_tokens)
    costs = tree.cost_model(request.spec, device)
    least = costs.hopper_min_tiles_per_split * config.block_n
    most = min(cdiv(request.keys_seen, least), costs.hopper_max_splits)
    rows = ROWS_OF_WARPGROUP * config.num_warpgroups * device.num_sms  # of states
    room = rows // (request.bounds.num_tokens * request.spec.num_q_heads * launch.column_parts)
    return max(1, min(device.num_sms // max(1, work_tiles), most, room))


def decode_launch(request: Request) -> SplitKVLaunch | None:
    """Return the launch for sequences of few queries in a ragged batch; None where there can be none."""
    max_queries = most_decode_queries(request.spec)
    if request.num_seqs == 1 or not request.is_ragged or request.bounds.max_query_len <= max_queries:
        return None
    tokens = min(request.bounds.num_tokens, request.num_seqs * max_queries)
    bounds = Bounds(max_queries, request.bounds.max_seq_len, tokens)
    decoding = replace(request, bounds=bounds)
    config, _ = tree.select(
        request.spec,
        request.device,
        *tree.rounded(request.spec, request.device, max_queries, bounds.max_seq_len, tokens),
    )
    costs = tree.cost_model(request.spec, request.device)
    launch = choose_partitions(decoding, config, costs, Options(), max_queries)
    return launch if isinstance(launch, SplitKVLaunch) else None


def latent_launches(request: Request) -> dict[str, Launch]:
    """Return the launches for latents: those of the portable kernel, and of that for Hopper GPUs."""
    found: dict[str, Launch] = {}
    if request.per_token is not None:
        return found
    costs = tree.cost_model(request.spec, request.device)
    proposal = mla_hopper.propose(request, Options())
    if not isinstance(proposal, str):
        launch, _ = proposal
        found["mla_hopper"] = replace(launch, fp8_mma=False)
        if mla_hopper.can_multiply_in_fp8(request):
            found["mla_hopper fp8"] = replace(launch, fp8_mma=True)
    for name, config in portable_variants(request.spec, request.device).items():
        if config.block_m > max(16, power_of_two(request.rows_per_seq)):
            continue
        launch = MLALaunch(request, config, 1, costs, combine_cost=costs.combine_cost)
        if launch.max_units < MAX_UNITS:
            found[f"mla {name}"] = replace(launch, num_partitions=choose_num_partitions(launch, Options()))
    return found
