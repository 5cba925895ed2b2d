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
from quire.dispatch.tree import ROWS_OF_WARPGROUP, padded, power_of_two
from quire.kernels.hopper.choice import MAX_PART_COLUMNS, choose_section, most_decode_queries, propose_invariant
from quire.kernels.hopper.launch import CUT_OVERHEAD, MIN_CUT_KEYS, HopperLaunch
from quire.kernels.launch import Launch
from quire.kernels.mla import launch as mla
from quire.kernels.mla.launch import MLALaunch, choose_num_partitions
from quire.kernels.mla_hopper import launch as mla_hopper
from quire.kernels.portable.choice import (
    MAX_UNITS,
    MOST_INVARIANT_SCRATCH,
    config_for_pairs,
    invariant_config,
    min_partition_tiles,
    with_rows,
)
from quire.kernels.portable.launch import FIXED_SPLIT_SIZE, PortableLaunch
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


def kind_of(spec: AttentionSpec, batch_invariant: bool = False) -> str:
    """Return which numbers a spec's variants have: the padded widths of heads, the dtypes, and whose bits are fixed."""
    dtypes = f"{spec.dtype} {spec.kv_dtype}{' invariant' * batch_invariant}".replace("torch.", "")
    return f"latents {dtypes}" if spec.latent else f"{max(padded(spec.head_dim), padded(spec.head_dim_v))} {dtypes}"


def launches(request: Request, options: Options = Options()) -> dict[str, Launch]:  # noqa: B008
    """Return the launches among which one is chosen for a request, by name: family, configuration, and use."""
    if request.spec.latent:
        return latent_launches(request, options)
    if options.batch_invariant:
        return invariant_launches(request)
    return portable_launches(request) | hopper_launches(request)


def portable_launches(request: Request) -> dict[str, Launch]:
    """Return the launches of the portable kernel.

    "whole" has a program for each row block, "cut" partitions whose programs combine partials, and "joined" partitions
    whose partials a second launch combines.
    """
    found: dict[str, Launch] = {}
    configs = portable_variants(request.spec, request.device)
    rows, tallest = power_of_two(request.rows_per_seq), max(config.block_m for config in configs.values())
    costs = tree.cost_model(request.spec, request.device)
    for name, config in configs.items():
        if config.block_m > max(16, rows):
            continue  # one of fewer rows has as many row blocks
        if config.block_m < min(tallest, rows // MOST_ROW_BLOCKS) and request.keys_seen > FEW_KEYS:
            continue
        if config.block_n > max(16, power_of_two(request.keys_seen)) and config.num_stages > 1:
            continue
        whole = PortableLaunch(request, config, costs)
        tiles = cdiv(min(request.bounds.max_seq_len, request.keys_seen + config.block_m), config.block_n)
        blocks = whole.num_programs(request.bounds.num_tokens)
        held = request.device.num_sms * config.programs_per_sm
        if 2 * blocks > held or tiles <= FEW_TILES:
            found[f"portable {name} whole"] = whole
        if tiles > 1 and blocks <= 4 * held:
            found |= {f"portable {name} {use}": launch for use, launch in cut_launches(whole).items()}
    return found


def cut_launches(whole: PortableLaunch, max_decode_queries: int = 0) -> dict[str, PortableLaunch]:
    """Return the launches with partitions that have the configuration of one without; none if units are too many.

    There are as many partitions as programs that the device holds, unless so short ones cost more than they save.
    """
    request, config, costs = whole.request, whole.config, whole.costs
    found: dict[str, PortableLaunch] = {}
    for use in ("cut", "joined"):
        split = replace(whole, num_partitions=1, max_decode_queries=max_decode_queries, combine_launch=use == "joined")
        blocks = split.num_row_blocks(request.bounds.num_tokens)
        can = use == "cut" or (request.device.supports_pdl and not max_decode_queries)
        if blocks == 0 or split.max_units >= MAX_UNITS or not can:
            continue
        tiles = cdiv(request.bounds.max_seq_len, config.block_n)
        cost = costs.combine_launch_cost if use == "joined" else costs.combine_cost
        if tiles <= costs.min_split_tiles:
            cost = 0.0  # each tile has a program
        split = replace(split, combine_cost=cost)
        shortest = min_partition_tiles(tiles, cost, costs, split.two_level_min_tiles)
        found[use] = replace(split, num_partitions=min(split.capacity, blocks * cdiv(tiles, shortest)))
    return found


def invariant_launches(request: Request) -> dict[str, Launch]:
    """Return the launches of a batch-invariant plan, which have the same bits: they differ in rows and in what is cut.

    Each split of the keys has a fixed size. "whole" has a program for each row block, "cut" for each partition; of
    "joined", a second launch folds the states of splits.
    """
    spec, device = request.spec, request.device
    base, _ = invariant_config(request)
    base = replace(base, block_m=16) if base.block_m > 16 else base
    configs = [base]
    for block_m in (32, 64, 128):
        if base.block_m < block_m <= min(device.alike_rows, max(16, power_of_two(request.rows_per_seq))):
            if (taller := with_rows(base, block_m, spec, device)) is not None:
                configs.append(taller)
    if (taller := config_for_pairs(request, base)) is not None:
        configs.append(taller)
    costs, found = tree.cost_model(spec, device), {}
    for config in configs:
        whole = PortableLaunch(request, config, costs, fixed_split_size=FIXED_SPLIT_SIZE)
        own = {"whole": whole}
        if 0 < whole.max_units < MAX_UNITS and request.bounds.max_seq_len > FIXED_SPLIT_SIZE:
            split = replace(whole, num_partitions=1)
            cut = replace(split, num_partitions=min(split.capacity, split.max_units), combine_launch=False)
            if cut.scratch_size().total <= MOST_INVARIANT_SCRATCH:
                own |= {"cut": cut, "joined": replace(cut, combine_launch=True)}
        for use, launch in own.items():
            fallback = found.get(f"portable {name_of(base)} {use}") if config is not base else None
            if config.full_tile_loop and spec.kv_dtype is not spec.dtype:
                launch = replace(launch, fallback=fallback)
            found[f"portable {name_of(config)} {use}"] = launch
    options = Options(batch_invariant=True, kernel="hopper")
    proposal = propose_invariant(request, options) if not hopper_refusal(spec, device) and not request.has_tree else ""
    if not isinstance(proposal, str):
        config = proposal[0].config
        found[f"hopper wg{config.num_warpgroups} n{config.block_n}"] = proposal[0]
    return found


def hopper_launches(request: Request) -> dict[str, Launch]:
    """Return the launches of the Hopper kernel.

    "whole" has a program for each work tile, "cut" programs that cut long sequences where lengths differ, "split" equal
    splits of all work tiles' keys, and "decode" a decode launch. Of two warpgroups, "apart" says that each has tokens
    of its own.
    """
    spec, found = request.spec, {}
    if request.has_tree or not request.has_cu_seqlens or request.bounds.num_tokens == 0:
        return found
    costs = tree.cost_model(spec, request.device)
    variants = hopper_variants(spec, request.device)
    fallback = fallback_of(request) if variants else None
    for name, fields in variants.items():
        assert fallback is not None
        rows = ROWS_OF_WARPGROUP * fields["num_warpgroups"]
        for apart in (False, True) if request.is_ragged and fields["num_warpgroups"] == 2 else (False,):
            block_t = tokens_of_tile(rows, spec.group_size, apart)
            config = HopperConfig(block_t=block_t, apart=apart, **fields)
            parts = cdiv(spec.head_dim_v, MAX_PART_COLUMNS)
            launch = HopperLaunch(request, config, fallback, column_parts=parts, cuts=False)
            key = f"hopper {name}{' apart' if apart else ''}"
            whole = replace(launch, section_heads=choose_section(launch, costs))
            cut = replace(whole, cuts=True)
            if not cut.cut_slots or request.keys_seen <= max(MIN_CUT_KEYS, 4 * share_of_program(launch)):
                found[f"{key} whole"] = whole
            may_differ = request.is_ragged or request.bounds.max_seq_len > request.bounds.max_query_len
            if cut.cut_slots and may_differ and request.keys_seen > MIN_CUT_KEYS:
                found[f"{key} cut"] = cut
            splits = most_splits(launch)
            if splits > 1:
                found[f"{key} split"] = replace(launch, num_splits=splits)
            if (decode := decode_launch(request)) is not None:
                found[f"{key} decode"] = replace(found.get(f"{key} cut", whole), decode=decode)
    return found


def tokens_of_tile(rows: int, group_size: int, apart: bool) -> int:
    """Return how many query tokens a work tile of so many rows has, next to as many heads as divide the group.

    It uses the most rows, and of equal numbers, that with the most heads: its keys are loaded once for all of them.
    """
    parts = 2 if apart else 1
    own = rows // parts
    heads = max((n for n in range(1, own + 1) if group_size % n == 0), key=lambda n: (own // n * n, n))
    return own // heads * parts


def share_of_program(launch: HopperLaunch) -> float:
    """Return a program's share of all keys, if each work tile sees one tile of them."""
    work_tiles = launch.num_work_tiles(launch.request.bounds.num_tokens)
    return work_tiles * (launch.config.block_n + CUT_OVERHEAD) / launch.request.device.num_sms


def fallback_of(request: Request) -> PortableLaunch:
    """Return the launch for what TMA cannot address, which few requests need."""
    launch = next(iter(portable_launches(request).values()))
    assert isinstance(launch, PortableLaunch)
    return launch


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


def decode_launch(request: Request) -> PortableLaunch | None:
    """Return the launch for sequences of few queries in a ragged batch; None where there can be none."""
    max_queries = most_decode_queries(request.spec)
    if request.num_seqs == 1 or not request.is_ragged or request.bounds.max_query_len <= max_queries:
        return None
    tokens = min(request.bounds.num_tokens, request.num_seqs * max_queries)
    decoding = replace(request, bounds=Bounds(max_queries, request.bounds.max_seq_len, tokens))
    configs = portable_variants(request.spec, request.device).values()
    config = next((config for config in configs if config.num_stages > 1), next(iter(configs)))
    whole = PortableLaunch(decoding, config, tree.cost_model(request.spec, request.device))
    return cut_launches(whole, max_queries).get("cut")


def latent_launches(request: Request, options: Options = Options()) -> dict[str, Launch]:  # noqa: B008
    """Return the launches for latents: those of the portable kernel, and of that for Hopper GPUs."""
    found: dict[str, Launch] = {}
    if request.per_token is not None:
        return found
    if options.batch_invariant:
        proposal = mla.propose(request, options)
        return {} if isinstance(proposal, str) else {f"mla {name_of(proposal[0].config)}": proposal[0]}
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
        launch = MLALaunch(request, config, costs, 1, combine_cost=costs.combine_cost)
        if launch.max_units < MAX_UNITS:
            found[f"mla {name}"] = replace(launch, num_partitions=choose_num_partitions(launch, Options()))
    return found
