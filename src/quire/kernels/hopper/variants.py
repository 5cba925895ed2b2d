"""The variants of the Hopper kernel: its configurations for a spec on a device, and how each is used.

"whole" has a program for each work tile, "cut" programs that cut long sequences by keys where lengths differ, and
"split" equal splits of the keys of all work tiles. Of two warpgroups, "apart" says that each has tokens of its own:
where sequences of ragged batches are cut, and no configuration has one warpgroup.
`kernels/choose.py` takes the one of least predicted time.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from quire.dispatch.config import HopperConfig, KernelConfig, hopper_refusal
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import Bounds, Options, Request, cdiv
from quire.kernels.hopper.launch import MAX_KEYS_WITHOUT_TILE_MAPS, SECTION_HEADS, HopperLaunch, width_of_part
from quire.kernels.portable.launch import FIXED_SPLIT_SIZE, PortableLaunch
from quire.kernels.portable.variants import decode_launch, most_decode_queries
from quire.spec import AttentionSpec

# Warpgroups, keys, stages, stages of queries. By the columns of keys and values; the first that are not fewer.
CONFIGS = {
    (64, 64): "wg1 n64 s4 q2, wg2 n128 s4 q2",
    (128, 128): "wg1 n64 s2 q2, wg2 n128 s2 q2",
    (192, 128): "wg2 n64 s3 q2, wg2 n128 s2 q1",
    (192, 192): "wg2 n64 s3 q1, wg2 n96 s2 q1",
    (256, 256): "wg2 n64 s2 q1",
    (512, 512): "wg2 n32 s2 q1",
}
QUANTISED = {(64, 64): (3, 2), (128, 128): (2, 1)}  # stages, and of unconverted tiles
ROWS = 64  # of a warpgroup
# Columns of values of a work tile, and of one of a batch-invariant plan, whose consumers hold two accumulators.
MAX_PART_COLUMNS, MAX_INVARIANT_PART_COLUMNS = 256, 128
OTHER_SHARED_BYTES = 4096  # for barriers, work tiles and what threads exchange where queries keep their buffer
UNCUT_KEYS = 1024  # the most that a query may see for which keys are not cut
FEW_ROWS = 8  # of the longest sequence, up to which the portable kernel's tiles of 16 rows were always as fast
MIN_KEYS_OF_SPLIT = 128
# With more of them, launches that follow one another wait: 16 queries of heads 8/1/256 on 16,384 keys take 19.5 us with
# 66, 20.6 with 88 and 30 with 128 (NVIDIA H200, 2026-12-01).
MAX_SPLITS = 64
SECTION_TILES = 3  # of a section, for each SM, or some would be idle


def variants(
    request: Request, options: Options, fallback: PortableLaunch, within: bool = False
) -> dict[str, HopperLaunch] | str:
    """Return the launches of the Hopper kernel by name; or, in words, what it does not serve.

    Args:
        request: the batch.
        options: what the caller of `plan` asks for.
        fallback: the launch for what TMA cannot address.
        within: return all that any batch may have whose numbers are of the same kind, for a warm-up.
    """
    spec = request.spec
    if refusal := refusal_of(request, options):
        return refusal
    if options.batch_invariant:
        *_, config = configs_of(spec, request.device, False).values()  # the last one has two warpgroups
        parts = cdiv(spec.head_dim_v, MAX_INVARIANT_PART_COLUMNS)
        config = with_keys(config, fallback.config.block_n, request, parts)
        launch = HopperLaunch(request, config, fallback, fixed_split_size=FIXED_SPLIT_SIZE, column_parts=parts)
        return {f"hopper wg2 n{config.block_n}": with_decode_launch(launch, request, most_decode_queries(spec))}
    found: dict[str, HopperLaunch] = {}
    configs = configs_of(spec, request.device, request.is_ragged)
    for name, config in configs.items():
        launch = HopperLaunch(request, config, fallback, column_parts=cdiv(spec.head_dim_v, MAX_PART_COLUMNS))
        for use, each in uses_of(launch, within).items():
            if config.apart == (use == "cut") or not (config.apart or f"{name} apart" in configs):
                found[f"hopper {name} {use}"] = each
    return found


def refusal_of(request: Request, options: Options) -> str | None:
    """Return in words what the kernel does not serve; None if it serves a request."""
    spec = request.spec
    if options.kernel is None and request.rows_per_seq <= FEW_ROWS:
        return f"sequences of at most {FEW_ROWS} rows unless it is asked for"
    if request.has_tree:
        return "draft trees"
    if spec.has_bounds:
        return "a mask with bounds"
    if (spec.score is not None or spec.mask is not None) and options.batch_invariant:
        return "functions on scores or masks with batch_invariant"
    if options.config is not None or options.num_splits is not None:
        return "config or num_splits"
    if options.batch_invariant and request.has_intervals:
        return "intervals of keys with batch_invariant"
    if options.batch_invariant and spec.kv_dtype is not spec.dtype:
        return "a quantised cache with batch_invariant"
    if refusal := hopper_refusal(spec, request.device):
        return refusal
    if not request.has_cu_seqlens:
        return "a batch without cu_seqlens_q"
    return None


def uses_of(launch: HopperLaunch, within: bool) -> dict[str, HopperLaunch]:
    """Return how a configuration is used for a batch."""
    request = launch.request
    whole = replace(launch, section_heads=section_of(launch))
    cut = replace(whole, cuts=True)
    found, splits = {"whole": whole}, most_splits(launch)
    if request.keys_seen <= UNCUT_KEYS:
        return found
    may_differ = request.is_ragged or request.bounds.max_seq_len > request.bounds.max_query_len
    if cut.cut_slots and (within or may_differ):
        found["cut"] = cut
    if launch.config.num_warpgroups == 2 and (splits > 1 or within):
        found["split"] = replace(launch, num_splits=max(2, splits))
    return found


def with_decode_launch(
    launch: HopperLaunch, request: Request, max_queries: int, config: KernelConfig | None = None
) -> HopperLaunch:
    """Return a launch with a further one for those sequences of a request that have few queries, if it may have such.

    Args:
        launch: the launch.
        request: that of the launch, or of what was decoded for it.
        max_queries: most queries of these sequences.
        config: of the further one; chosen when None.
    """
    bounds = request.bounds
    if request.num_seqs == 1 or not request.is_ragged or bounds.max_query_len <= max_queries:
        return launch
    tokens = min(bounds.num_tokens, request.num_seqs * max_queries)
    decoding = replace(request, bounds=Bounds(max_queries, bounds.max_seq_len, tokens))
    return replace(launch, decode=decode_launch(decoding, max_queries, launch.fixed_split_size > 0, config))


def section_of(launch: HopperLaunch) -> int | None:
    """Return how many KV heads are attended to at a time, where keys are not split; None for all."""
    spec, request = launch.request.spec, launch.request
    tiles_of_head = launch.num_work_tiles(request.bounds.num_tokens) / spec.num_kv_heads
    if request.bounds.max_query_len <= launch.config.block_t or not tiles_of_head:
        return None
    least = max(SECTION_HEADS, SECTION_TILES * request.device.num_sms / tiles_of_head)
    for heads in range(1, spec.num_kv_heads):
        if spec.num_kv_heads % heads == 0 and heads >= least:
            return heads
    return None


def most_splits(launch: HopperLaunch) -> int:
    """Return into how many splits the keys of each work tile are cut to fill the device; 1 if it is filled already.

    With fewer splits, the longest one would have more tiles. Where lengths differ, most splits have few keys. Scratch
    has room for the states of a limited number of rows.
    """
    request, config, device = launch.request, launch.config, launch.request.device
    work_tiles = max(1, launch.num_work_tiles(request.bounds.num_tokens))
    most = min(cdiv(request.keys_seen, max(MIN_KEYS_OF_SPLIT, 2 * config.block_n)), MAX_SPLITS)
    rows = ROWS * config.num_warpgroups * device.num_sms  # of states
    room = rows // max(1, request.bounds.num_tokens * request.spec.num_q_heads * launch.column_parts)
    tiles, most = cdiv(request.keys_seen, config.block_n), max(1, min(device.num_sms // work_tiles, most, room))
    return max(1, cdiv(tiles, cdiv(tiles, most)))


@lru_cache(maxsize=4096)
def configs_of(spec: AttentionSpec, device: DeviceProperties, is_ragged: bool) -> dict[str, HopperConfig]:
    """Return the configurations for a spec, by name; none if the kernel does not serve it."""
    if hopper_refusal(spec, device):
        return {}
    group, found = spec.group_size, {}
    for name, fields in fields_of(spec).items():
        rows = ROWS * fields["num_warpgroups"]
        found[name] = HopperConfig(block_t=tokens_of_tile(rows, group, False), **fields)
        if is_ragged and fields["num_warpgroups"] == 2 and len(fields_of(spec)) == 1:
            found[f"{name} apart"] = HopperConfig(block_t=tokens_of_tile(rows, group, True), apart=True, **fields)
    return found


def fields_of(spec: AttentionSpec) -> dict[str, dict[str, Any]]:
    """Return the fields of configurations, by name, but for the tokens of a work tile."""
    widths = spec.head_dim, spec.head_dim_v
    if spec.kv_dtype is not spec.dtype:
        stages, unconverted = QUANTISED[widths]
        common: dict[str, Any] = {"num_warpgroups": 2, "block_n": 128, "num_q_stages": 2}
        found = {}
        if spec.allow_fp8 and spec.kv_dtype is torch.float8_e4m3fn and widths == (128, 128):
            # The first one, which is taken where two are predicted to take as long.
            found["wg2 n128 s3 q2 fp8"] = common | {"num_stages": 3, "num_quantised_stages": 2, "fp8_mma": True}
        converted = {"num_stages": stages, "num_quantised_stages": unconverted}
        return found | {f"wg2 n128 s{stages} q2": common | converted}
    for most, text in CONFIGS.items():
        if all(width <= limit for width, limit in zip(widths, most, strict=True)):
            names = "num_warpgroups", "block_n", "num_stages", "num_q_stages"
            return {
                words: {name: int(word.lstrip("wgnsq")) for name, word in zip(names, words.split(), strict=True)}
                for words in text.split(", ")
            }
    return {}


def tokens_of_tile(rows: int, group_size: int, apart: bool) -> int:
    """Return how many query tokens a work tile of so many rows has, next to as many heads as divide the group.

    It has the most heads of which at most a quarter of the rows is left over: keys are loaded once for all of them.

    Args:
        rows: of a work tile.
        group_size: query heads of a KV head.
        apart: whether each half of the rows has half of the tokens, rather than half of the heads.
    """
    parts = 2 if apart else 1
    own = rows // parts
    heads = max(n for n in range(1, own + 1) if group_size % n == 0 and 4 * (own // n * n) >= 3 * own)
    return own // heads * parts


def with_keys(config: HopperConfig, block_n: int, request: Request, parts: int) -> HopperConfig:
    """Return a configuration with tiles of `block_n` keys, in up to eight stages, as shared memory has room.

    Heads of 256 had two stages of 64 keys, in parts of 128 columns. With three, prompts of 4,096 take 0.95 to 0.97 of
    the time, and 512 queries on 8,192 keys 0.92 to 0.93 (NVIDIA H200, 2026-11-27).
    """
    spec = request.spec
    columns, columns_v = (cdiv(number, 64) * 64 for number in (spec.head_dim, width_of_part(spec, parts)))
    queries = 2 * 64 * config.num_warpgroups * config.num_q_stages * columns  # bytes
    room = request.device.shared_memory - OTHER_SHARED_BYTES - queries
    return replace(config, block_n=block_n, num_stages=min(8, room // (2 * block_n * (columns + columns_v))))


def key_steps(spec: AttentionSpec, device: DeviceProperties) -> set[int]:
    """Return numbers of keys after which other kernels may be launched: with further tensor maps, or that cut keys."""
    return set() if hopper_refusal(spec, device) else {MAX_KEYS_WITHOUT_TILE_MAPS, UNCUT_KEYS}
