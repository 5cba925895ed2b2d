"""What launches do: `work_of` counts items, tiles and bytes of a launch, for lengths or for the bounds of a request."""

import math
from functools import lru_cache

from quire.dispatch.config import padded
from quire.dispatch.predict import Numbers, Work
from quire.dispatch.request import Request, cdiv
from quire.kernels.hopper.launch import HopperLaunch
from quire.kernels.launch import Launch
from quire.kernels.mla_hopper.launch import TILE, MLAHopperLaunch
from quire.kernels.portable.launch import PortableLaunch
from quire.spec import AttentionSpec

Lens = tuple[tuple[int, int, int], ...]  # queries, keys, and how many sequences have them
EQUAL, RAGGED, SKEWED = 1.0, 0.25, 0.1  # how much scenarios count
MIN_KEYS_OF_CUT = 512  # of a split of a row block that programs of the Hopper kernel cut
MAX_CUT_SPLITS, MAX_CUT_SPLITS_ALONE = 8, 32  # of such a row block, and of a sequence's only one


def lens_of(request: Request) -> Lens:
    """Return the lengths of a request whose sequences all have as many keys as its bounds say.

    Of a ragged batch, as many sequences as may have the most queries, and the others share the rest.
    """
    return scenarios(request)[0][1]


def scenarios(request: Request) -> list[tuple[float, Lens]]:
    """Return lengths that a batch may have whose bounds alone are known, and how much each counts.

    All sequences may have as many keys as the bounds say; or one, some have half as many, and most an eighth; or one,
    and the others few. Of a ragged batch, one sequence may be a prompt or a chunk of one, or all but those that decode.
    """
    bounds, num_seqs = request.bounds, request.num_seqs
    queries, keys, tokens = bounds.max_query_len, bounds.max_seq_len, bounds.num_tokens
    if num_seqs == 1:
        return [(1.0, ((min(queries, tokens), keys, 1),))]
    if request.is_ragged:
        own, others = max(1, (tokens - queries) // (num_seqs - 1)), num_seqs - 1
        long = max(1, min(num_seqs, round((tokens - num_seqs) / max(1, queries - 1))))  # if others have one query each
        rest = max(1, (tokens - long * queries) // max(1, num_seqs - long))
        found = [
            (EQUAL, ((queries, keys, long), (rest, keys, num_seqs - long))),
            (RAGGED, ((queries, max(queries, keys // 4), 1), (own, keys, 1), (own, max(own, keys // 4), others - 1))),
            (SKEWED, ((queries, keys, 1), (own, max(own, keys // 16), others))),
        ]
    else:
        some, most = max(1, num_seqs // 4), num_seqs - 1 - max(1, num_seqs // 4)
        half, eighth, few = (max(queries, keys // part) for part in (2, 8, 32))
        found: list[tuple[float, Lens]] = [(EQUAL, ((queries, keys, num_seqs),))]
        if few < keys:
            found.append((RAGGED, ((queries, keys, 1), (queries, half, some), (queries, eighth, most))))
            found.append((SKEWED, ((queries, keys, 1), (queries, few, num_seqs - 1))))
    return [(share, tuple(each for each in lens if each[2] > 0)) for share, lens in found]


@lru_cache(maxsize=4096)
def tiles_of_sequence(
    window: tuple[int, int], queries: int, keys: int, block: int, block_n: int
) -> tuple[int, float, float]:
    """Return a sequence's row blocks of so many tokens, the tiles of all, and those of the one that sees the most."""
    left, right = window
    blocks = max(1, cdiv(queries, block))
    before = keys - queries
    most = min(keys, left + right + min(block, queries))
    if right or blocks == 1:  # each row block sees as many keys
        tiles = cdiv(most, block_n)
        return blocks, float(blocks * tiles), float(tiles)
    # Row block i sees before + (i + 1) * block keys, or those of the window; half a tile more, on average.
    first = min(before + block, most)
    seen = (first + most) / 2
    if first < most < keys:  # the first ones see fewer keys than the window has
        grows = (most - first) / block
        seen = (grows * seen + (blocks - grows) * most) / blocks if grows < blocks else seen
    return blocks, blocks * (seen / block_n + 0.5), float(cdiv(most, block_n))


@lru_cache(maxsize=8)
def bytes_of(spec: AttentionSpec, lens: Lens) -> float:
    """Return the bytes that must be moved: visible keys and values once, queries and outputs."""
    left, right = spec.window
    width = spec.head_dim if spec.latent else spec.head_dim + spec.head_dim_v
    keys = sum(min(s, left + right + q) * count for q, s, count in lens)
    tokens = sum(q * count for q, _, count in lens)
    rows = tokens * spec.num_q_heads * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    return float(keys * spec.num_kv_heads * width * spec.kv_dtype.itemsize + rows)


def work_of(launch: Launch, lens: Lens) -> Work:
    """Return what a launch does for sequences of some lengths."""
    if isinstance(launch, HopperLaunch):
        return work_of_hopper(launch, lens)
    if isinstance(launch, MLAHopperLaunch):
        return work_of_latents(launch, lens)
    assert isinstance(launch, PortableLaunch), launch
    return work_of_partitions(launch, lens) if launch.num_partitions else work_of_blocks(launch, lens)


def row_blocks(launch: PortableLaunch, lens: Lens) -> tuple[int, float, float, float]:
    """Return the row blocks of a KV head, or the bands of latents; the tiles of all; the most of any; and a median."""
    spec, config = launch.request.spec, launch.config
    group, rows = launch.rows_of_partition
    block_n = config.block_n
    blocks, tiles, longest = 0, 0.0, 0.0
    each: list[tuple[float, int]] = []
    for queries, keys, count in lens:
        number, of_seq, most = tiles_of_sequence(spec.window, queries, keys, max(1, rows // group), block_n)
        each.append((of_seq / number, number * count))
        parts = 1 if group <= rows else cdiv(group, rows)  # row blocks of a query's heads
        blocks, tiles, longest = blocks + number * parts * count, tiles + of_seq * parts * count, max(longest, most)
    each.sort()
    half, median = sum(number for _, number in each) / 2, 0.0
    for of_block, number in each:
        median, half = of_block, half - number
        if half <= 0:
            break
    return blocks, tiles, longest, median


def work_of_blocks(launch: PortableLaunch, lens: Lens) -> Work:
    """Return the work of the portable kernel without partitions: each row block is an item."""
    request, heads = launch.request, launch.request.spec.num_kv_heads
    if launch.decode is not None:
        lens = tuple(found for found in lens if found[0] >= launch.min_queries) or lens[:1]
    blocks, tiles, longest, _ = row_blocks(launch, lens)
    sms = request.device.num_sms
    slots = sms * launch.config.programs_per_sm
    return Work(slots, sms, blocks * heads, blocks * heads, tiles * heads, longest, bytes_of(request.spec, lens))


def work_of_partitions(launch: PortableLaunch, lens: Lens) -> Work:
    """Return the work of partitions, also of latents: programs share the tiles of all row blocks."""
    request, lanes, spec = launch.request, launch.lanes, launch.request.spec
    blocks, tiles, longest, median = row_blocks(launch, lens)
    sms, parts = request.device.num_sms, launch.num_partitions
    share = float(max(1, math.ceil(tiles / parts)))
    programs = min(parts, max(blocks, tiles), math.ceil(tiles / share))
    begun = max(1.0, (tiles / max(1.0, median) + programs - 1) / programs)  # row blocks of the usual length
    partials = longest / share if longest > share else 0.0
    of_all = 2 * programs if partials else 0.0
    if launch.fixed_split_size:  # each split of a row block has a partial
        unit = launch.fixed_split_size / launch.config.block_n
        partials, of_all = longest / unit, tiles / unit
    partial_bytes = of_all * lanes * launch.partial_rows * 4 * (spec.head_dim_v + 2)
    slots = sms * launch.config.programs_per_sm
    most = min(longest, share) if begun <= 1 else share
    nbytes, programs = bytes_of(spec, lens), programs * lanes
    return Work(slots, sms, programs, programs * begun, tiles * lanes, most, nbytes, partials, partial_bytes)


def work_of_hopper(launch: HopperLaunch, lens: Lens) -> Work:
    """Return the work of the Hopper kernel: work tiles, splits of them, and none of what a decode launch serves."""
    request, config, spec = launch.request, launch.config, launch.request.spec
    if launch.decode is not None:
        lens = tuple(found for found in lens if found[0] > launch.max_decode_queries) or lens[:1]
    parts = spec.num_q_heads // launch.heads * launch.column_parts
    items, tiles, longest = 0, 0.0, 0.0
    seen: list[tuple[int, float]] = []  # row blocks of a sequence, and the tiles of its longest one
    for queries, keys, count in lens:
        blocks, of_seq, most = tiles_of_sequence(spec.window, queries, keys, config.block_t, config.block_n)
        items, tiles, longest = items + blocks * count, tiles + of_seq * count, max(longest, most)
        seen.append((blocks, most))
    sms = request.device.num_sms
    slots, nbytes = sms * config.programs_per_sm, bytes_of(spec, lens)
    items, tiles = items * parts, tiles * parts
    if (splits := launch.num_splits) > 1:
        rows = sum(q * count for q, _, count in lens) * spec.num_q_heads * splits
        partial_bytes = 4 * rows * (spec.head_dim_v + 1)
        return Work(slots, sms, items * splits, items * splits, tiles, longest / splits, nbytes, splits, partial_bytes)
    if not launch.cut_slots:
        return Work(slots, sms, items, items, tiles, longest, nbytes)
    share, uncut, most_splits = max(tiles / slots, MIN_KEYS_OF_CUT / config.block_n), 0.0, 1.0
    for blocks, most in seen:
        limit = MAX_CUT_SPLITS_ALONE if blocks == 1 else MAX_CUT_SPLITS
        splits = max(1.0, min(limit, most / share))
        uncut, most_splits = max(uncut, most / splits), max(most_splits, splits)
    if most_splits == 1:
        return Work(slots, sms, items, items, tiles, longest, nbytes)
    rows = 64 * config.num_warpgroups * min(launch.cut_slots, items * most_splits)
    partial_bytes = 4 * rows * (launch.part_width + 2)
    items *= most_splits
    return Work(slots, sms, items, items, tiles, uncut, nbytes, most_splits, partial_bytes)


def work_of_latents(launch: MLAHopperLaunch, lens: Lens) -> Work:
    """Return the work of the kernel for latents on Hopper GPUs: programs of a row block share the tiles."""
    request, spec = launch.request, launch.request.spec
    tiles, blocks, longest, num_seqs = 0.0, launch.row_blocks, 0.0, 0
    for _, keys, count in lens:
        of_seq = cdiv(keys, TILE)
        tiles, longest, num_seqs = tiles + of_seq * count, max(longest, of_seq), num_seqs + count
    sms, parts = request.device.num_sms, launch.num_partitions
    share = max(1.0, tiles / parts)
    programs = min(parts, tiles)
    partials = longest / share
    rows = 2 * blocks * programs * launch.partial_rows if partials > 1 else 0
    partial_bytes = rows * 4 * (spec.kv_lora_rank + 2)
    begun = max(1.0, (num_seqs + programs) / programs - 1)
    programs, nbytes = blocks * programs, bytes_of(spec, lens)
    return Work(
        sms, sms, programs, programs * begun, tiles * blocks, share, nbytes, partials if partials > 1 else 0,
        partial_bytes,
    )  # fmt: skip


def guess(launch: Launch) -> Numbers:
    """Return numbers of a launch of which nothing was measured: floors of bytes and products, and usual latencies."""
    request, spec = launch.request, launch.request.spec
    device, size = request.device, request.spec.dtype.itemsize
    rows, keys, columns = 64, TILE, padded(spec.head_dim) + padded(spec.head_dim_v)
    if isinstance(launch, HopperLaunch):
        rows, keys = 64 * launch.config.num_warpgroups, launch.config.block_n
    elif isinstance(launch, PortableLaunch):
        rows, keys = launch.config.block_m, launch.config.block_n
    per_micro = 3e6 if device.has_wgmma else 1.5e6  # products of an SM
    if isinstance(launch, HopperLaunch | MLAHopperLaunch):
        per_micro = 5e6
    sm_tile = 2 * rows * keys * columns / per_micro * (4 if size == 4 else 1)
    if spec.kv_dtype is not spec.dtype:  # numbers are converted
        sm_tile += keys * columns / 32_000
    megabyte = 1048576 / (900 * (device.memory_gbps or 36 * device.num_sms))
    return Numbers(3.0, 0.8, 0.35 + sm_tile, sm_tile, megabyte, 1.0, 0.05, megabyte)
