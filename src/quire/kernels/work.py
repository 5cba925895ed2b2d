"""What launches do: `work_of` counts items, tiles and bytes of a launch, for lengths or for the bounds of a request."""

import math
from functools import lru_cache

from quire.dispatch.config import ROWS_OF_PRODUCT, padded
from quire.dispatch.predict import Numbers, Work
from quire.dispatch.request import Request, cdiv
from quire.kernels.decoded.launch import DecodedLaunch
from quire.kernels.hopper.launch import MAX_SPLITS_OF_CUT, HopperLaunch
from quire.kernels.hopper.variants import MAX_PART_COLUMNS
from quire.kernels.launch import Launch, once
from quire.kernels.mla_hopper.launch import TILE, MLAHopperLaunch
from quire.kernels.portable.launch import PortableLaunch
from quire.kernels.portable.variants import min_partition_tiles
from quire.spec import AttentionSpec

Lens = tuple[tuple[int, int, int], ...]  # queries, keys, and how many sequences have them
WIDTHS = 64, 128, 256, 512  # columns of heads of which there are numbers
PANEL = 64  # columns of a tile of the Hopper kernel are a multiple of it
SCORES = 64  # columns that take as long as what a tile takes whatever its columns are: scores, masks, addresses
# How much three kinds of lengths count, where all sequences have as many queries.
EQUAL, UNEQUAL, SKEWED = 1.0, 0.2, 0.05
MASKED = 1.6  # instructions of a tile with masks over those without: 934 and 572 of 128 x 64 as sm80 (2026-11-29)
# Of row blocks that programs of the Hopper kernel cut: keys of one that is not, and splits if a sequence has others
# (`schedule.py`).
LEAST_KEYS, MAX_SPLITS = 512, 8
# Rows of a box that TMA brings into an SM in a µs, at most; and rows that begin at every other multiple of 16 bytes. Of
# 281 batches in all variants (NVIDIA H200, 2026-11-30).
ROWS, ODD_ROWS = 500.0, 360.0


def lens_of(request: Request) -> Lens:
    """Return the lengths of a request whose sequences all have as many keys as its bounds say.

    Of a ragged batch, as many sequences as the tokens allow have the most queries, one has the rest, and the others
    decode.
    """
    return scenarios(request)[0][1]


def scenarios(request: Request) -> list[tuple[float, Lens]]:
    """Return lengths that a batch may have whose bounds alone are known, and how much each counts.

    All sequences may have as many keys as the bounds say; or one, some have half as many, and most an eighth; or one,
    and the others few.

    Of a ragged batch there are up to three. First, as many sequences as the tokens allow have the most queries, one
    has the rest, and the others decode; all have the most keys. Second, one has the most queries, and the others share
    the other tokens. Third, prompts have no keys before them, one decoding sequence has the most keys, and the others
    an eighth.
    """
    bounds, num_seqs = request.bounds, request.num_seqs
    queries, keys, tokens = bounds.max_query_len, bounds.max_seq_len, bounds.num_tokens
    if num_seqs == 1:
        return [(1.0, ((min(queries, tokens), keys, 1),))]
    if request.is_ragged:
        own, others = max(1, (tokens - queries) // (num_seqs - 1)), num_seqs - 1
        long = max(1, min(num_seqs, round((tokens - num_seqs) / max(1, queries - 1))))  # if others have one query each
        decoding = max(0, num_seqs - long - 1)
        rest = max(1, min(queries, tokens - long * queries - decoding))  # of a shorter chunk
        found = [
            (1.0, ((queries, keys, long), (rest, keys, num_seqs - long - decoding), (1, keys, decoding))),
            (1.0, ((queries, max(queries, keys // 4), 1), (own, keys, 1), (own, max(own, keys // 4), others - 1))),
        ]  # fmt: skip
        if decoding:
            prompts = (queries, queries, long), (rest, rest, num_seqs - long - decoding)
            found.append((1.0, (*prompts, (1, keys, 1), (1, max(1, keys // 8), decoding - 1))))
    else:
        some, most = max(1, num_seqs // 4), num_seqs - 1 - max(1, num_seqs // 4)
        half, eighth, few = (max(queries, keys // part) for part in (2, 8, 32))
        found: list[tuple[float, Lens]] = [(EQUAL, ((queries, keys, num_seqs),))]
        if few < keys:
            found.append((UNEQUAL, ((queries, keys, 1), (queries, half, some), (queries, eighth, most))))
            found.append((SKEWED, ((queries, keys, 1), (queries, few, num_seqs - 1))))
    return [(share, tuple(each for each in lens if each[2] > 0)) for share, lens in found]


@lru_cache(maxsize=4096)
def tiles_of_sequence(
    window: tuple[int, int], queries: int, keys: int, block: float, block_n: int
) -> tuple[int, float, float]:
    """Return how many row blocks a sequence has, the tiles of them all, and the most tiles that one of them sees.

    Args:
        window: how far a query sees, as `AttentionSpec.window` has it.
        queries, keys: of the sequence.
        block: query tokens of a row block; a fraction if a row block may begin between two heads of a token.
        block_n: keys of a tile.
    """
    left, right = window
    blocks = max(1, math.ceil(round(queries / block, 9)))
    before = keys - queries
    most = min(keys, left + right + min(math.ceil(block), queries))
    if right or blocks == 1:  # each row block sees as many keys
        tiles = units_of_band(left + right, min(math.ceil(block), queries), keys, block_n)
        return blocks, float(blocks * tiles), float(tiles)
    # Row block i sees before + (i + 1) * block keys, or those of the window; half a tile more, on average, and a whole
    # one where the first key isn't the sequence's.
    first = min(before + block, most)
    grows = min(blocks, (most - first) / block)  # row blocks that see fewer keys than the window has
    share = grows / blocks if most < keys else 1.0
    seen = share * (first + most) / 2 + (1 - share) * most
    return blocks, blocks * (seen / block_n + 1 - share / 2), float(cdiv(most, block_n) + (most < keys))


def units_of_band(before: int, queries: int, keys: int, unit: int) -> int:
    """Return how many units hold a key that the last queries of a sequence see, each with `before` keys before it."""
    return max(1, cdiv(keys, unit) - max(0, keys - queries - before) // unit)


@lru_cache(maxsize=8)
def bytes_of(spec: AttentionSpec, lens: Lens) -> float:
    """Return the bytes that must be moved: visible keys and values once, queries and outputs."""
    left, right = spec.window
    keys = sum(min(s, left + right + q) * count for q, s, count in lens)
    tokens = sum(q * count for q, _, count in lens)
    rows = tokens * spec.num_q_heads * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    return float(keys * spec.bytes_per_token + rows)


def decoded_bytes(launch: DecodedLaunch, lens: Lens) -> float:
    """Return the bytes that are read and written to decode the keys and values of sequences of some lengths."""
    (left, right), least = launch.request.spec.window, launch.attend.max_decode_queries
    keys = sum(min(s, left + right + q) * count for q, s, count in lens if q > least)
    return float(keys * (launch.request.spec.bytes_per_token + launch.attend.request.spec.bytes_per_token))


def work_of(launch: Launch, lens: Lens) -> Work:
    """Return what a launch does for sequences of some lengths."""
    if isinstance(launch, MLAHopperLaunch):
        return work_of_latents(launch, lens)
    if isinstance(launch, HopperLaunch):
        return work_of_hopper(launch, lens)._replace(width=width_of(launch))
    assert isinstance(launch, PortableLaunch), launch
    if launch.decode is not None:
        lens = tuple(found for found in lens if found[0] >= launch.min_queries) or lens[:1]
    work = work_of_partitions(launch, lens) if launch.num_partitions else work_of_blocks(launch, lens)
    return work if launch.request.spec.latent else work._replace(width=width_of(launch))


@lru_cache(maxsize=1024)
def columns_of_kind(spec: AttentionSpec) -> int:
    """Return the columns of the widest heads that share a spec's numbers: the least of `WIDTHS` that fits."""
    width = max(padded(spec.head_dim), padded(spec.head_dim_v))
    return next((most for most in WIDTHS if width <= most), WIDTHS[-1])


@once
def width_of(launch: HopperLaunch | PortableLaunch) -> float:
    """Return the time of a tile of keys and values, over that of heads for which its kind has numbers."""
    spec = launch.request.spec
    most = columns_of_kind(spec)
    if isinstance(launch, PortableLaunch):
        return (SCORES + launch.config.block_d + launch.config.block_dv) / (SCORES + 2 * most)
    panels = cdiv(spec.head_dim, PANEL) + cdiv(launch.part_width, PANEL)
    return (SCORES + panels * PANEL) / (SCORES + most + min(most, MAX_PART_COLUMNS))


def row_blocks(launch: PortableLaunch, lens: Lens) -> tuple[int, float, float]:
    """Return the row blocks of a KV head, the tiles of all, and the most of any."""
    spec, config = launch.request.spec, launch.config
    tokens, blocks, tiles, longest = config.block_m / spec.group_size, 0, 0.0, 0.0
    for queries, keys, count in lens:
        number, of_seq, most = tiles_of_sequence(spec.window, queries, keys, tokens, config.block_n)
        blocks, tiles, longest = blocks + number * count, tiles + of_seq * count, max(longest, most)
    return blocks, tiles, longest


def work_of_blocks(launch: PortableLaunch, lens: Lens) -> Work:
    """Return the work of the portable kernel without partitions: each row block is an item."""
    request, heads = launch.request, launch.request.spec.num_kv_heads
    blocks, tiles, longest = row_blocks(launch, lens)
    sms = request.device.num_sms
    slots = sms * launch.config.programs_per_sm
    return Work(slots, sms, blocks * heads, blocks * heads, tiles * heads, longest, bytes_of(request.spec, lens))


def units_of(launch: PortableLaunch, lens: Lens) -> list[tuple[int, int, int]]:
    """Return, of each of some lengths, the units of a row block, its sequences' row blocks, and how many sequences.

    As the schedule counts them: of tiles, or of splits of the fixed size, and all row blocks of a sequence alike.
    """
    group, rows = launch.rows_of_partition
    unit, found = launch.fixed_split_size or launch.config.block_n, []
    for queries, keys, count in lens:
        units = units_of_band(launch.window[0], queries, keys, unit)
        found.append((units, max(1, cdiv(queries * group, rows)), count))
    return found


def size_of_partition(launch: PortableLaunch, each: list[tuple[int, int, int]], total: int) -> int:
    """Return the units of a partition, as `schedule.partition_size` finds them."""
    costs, num_seqs = launch.costs, sum(count for *_, count in each)
    longest = max(units * blocks for units, blocks, _ in each)
    shortest = min_partition_tiles(total / num_seqs, launch.combine_cost, costs, launch.two_level_min_tiles)
    size = max(cdiv(total, launch.num_partitions), shortest)
    if longest * num_seqs != total or not launch.combine_cost:
        return size
    even = cdiv(longest, longest // size) if size < longest else cdiv(size, longest) * longest
    most = size + max(launch.min_split_tiles, size // 32 if 2 * size <= longest else 0)
    return even if even <= most else size


def work_of_partitions(launch: PortableLaunch, lens: Lens) -> Work:
    """Return the work of partitions, also of latents: programs share the units of all row blocks."""
    request, lanes, spec, config = launch.request, launch.lanes, launch.request.spec, launch.config
    each = units_of(launch, lens)
    blocks = sum(number * count for _, number, count in each)
    total = sum(units * number * count for units, number, count in each)
    size, longest = size_of_partition(launch, each, total), max(units for units, *_ in each)
    programs = cdiv(total, size)
    if all(units == longest for units, *_ in each):  # row blocks that begin where a partition does are begun once
        begun = programs + blocks - cdiv(blocks, size // math.gcd(size, longest))
    else:
        begun = programs + max(0.0, total / usual_of(each) - 1)
    most = size if begun > programs else min(longest, size)
    inside = begun - blocks if longest <= size else programs  # partitions that begin or end inside of a row block
    partials = longest / size if longest > size else 2.0 if inside > 0.5 else 1.0 if launch.has_combine_launch else 0.0
    of_all = 2.0 * max(0.0, inside)
    if launch.fixed_split_size:  # each split of a row block has a partial
        partials, of_all = float(longest), float(total)
    tiles = (launch.fixed_split_size or config.block_n) / config.block_n  # of a unit
    partial_bytes = of_all * lanes * launch.partial_rows * 4 * (spec.head_dim_v + 2)
    return Work(
        request.device.num_sms * config.programs_per_sm, request.device.num_sms, programs * lanes, begun * lanes,
        total * tiles * lanes, most * tiles, bytes_of(spec, lens), partials, partial_bytes,
    )  # fmt: skip


def usual_of(each: list[tuple[int, int, int]]) -> int:
    """Return the units of the usual row block: half of all row blocks have no more."""
    half, usual = sum(blocks * count for _, blocks, count in each) / 2, 1
    for units, blocks, count in sorted(each):
        usual, half = units, half - blocks * count
        if half <= 0:
            break
    return usual


def work_of_hopper(launch: HopperLaunch, lens: Lens) -> Work:
    """Return the work of the Hopper kernel: work tiles, splits of them, and none of what a decode launch serves."""
    request, config, spec = launch.request, launch.config, launch.request.spec
    if launch.decode is not None:
        lens = tuple(found for found in lens if found[0] > launch.max_decode_queries) or lens[:1]
    parts = spec.num_q_heads // launch.heads * launch.column_parts
    items, tiles, longest = 0, 0.0, 0.0
    for queries, keys, count in lens:
        blocks, of_seq, most = tiles_of_sequence(spec.window, queries, keys, config.block_t, config.block_n)
        items, tiles, longest = items + blocks * count, tiles + of_seq * count, max(longest, most)
    sms, loads = request.device.num_sms, micros_of_loads(launch)
    slots, nbytes = sms * config.programs_per_sm, bytes_of(spec, lens)
    items, tiles = items * parts, tiles * parts
    if (splits := launch.num_splits) > 1:
        rows = sum(q * count for q, _, count in lens) * spec.num_q_heads * splits
        partial_bytes, items = 4 * rows * (spec.head_dim_v + 1), items * splits
        return Work(slots, sms, items, items, tiles, longest / splits, nbytes, splits, partial_bytes, loads)
    if not launch.cut_slots:
        return Work(slots, sms, items, items, tiles, longest, nbytes, loads=loads)
    items, longest, most_splits, used = splits_of_cuts(launch, lens, max(1, int(tiles / slots)), parts)
    items *= parts
    if most_splits == 1:
        return Work(slots, sms, items, items, tiles, longest, nbytes, loads=loads)
    partial_bytes = 4 * 64 * config.num_warpgroups * used * (launch.part_width + 2)
    return Work(slots, sms, items, items, tiles, longest, nbytes, most_splits, partial_bytes, loads)


@once
def micros_of_loads(launch: HopperLaunch) -> float:
    """Return the µs that TMA takes at least to bring a tile of keys and values into an SM."""
    spec, found = launch.request.spec, 0.0
    for columns in (spec.head_dim, launch.part_width):
        nbytes = columns * spec.kv_dtype.itemsize  # of a row, which comes in boxes of up to 128 bytes
        found += cdiv(nbytes, 128) / (ODD_ROWS if nbytes % 32 else ROWS)
    return launch.config.block_n * found


def splits_of_cuts(launch: HopperLaunch, lens: Lens, share: int, parts: int) -> tuple[int, float, int, int]:
    """Return what programs cut, as `schedule.cut_sequences` decides it.

    Args:
        launch: that cuts.
        lens: of the batch.
        share: tiles of a program, if all have as many.
        parts: work tiles of a row block.

    Returns:
        The row blocks or splits of them, tiles of the longest, splits of a row block that has the most, and slots.
    """
    config, slots = launch.config, launch.cut_slots
    share, items, longest, most_splits, used = max(share, LEAST_KEYS // config.block_n), 0, 0.0, 1, 0
    for queries, keys, count in lens:
        blocks, _, most = tiles_of_sequence(launch.request.spec.window, queries, keys, config.block_t, config.block_n)
        splits, limit, whole, least = 1, MAX_SPLITS_OF_CUT if blocks == 1 else MAX_SPLITS, 0, max(share, most // 2)
        while splits < limit and most > splits * share:
            splits *= 2
        first = keys - queries + config.block_t  # keys that the first row block sees
        if first <= least * config.block_n:
            whole = min(blocks - 1, int(least * config.block_n - first) // config.block_t + 1)
        needed = (blocks - whole) * splits * parts
        fit = min(count, slots // needed) if splits > 1 else 0
        slots = max(0, slots - count * needed) if splits > 1 else slots
        items += fit * (whole + (blocks - whole) * splits) + (count - fit) * blocks
        longest = max(longest, most if fit < count else max(most / splits, least if whole else 0.0))
        most_splits, used = max(most_splits, splits if fit else 1), used + fit * needed
    return items, longest, most_splits, used


def work_of_latents(launch: MLAHopperLaunch, lens: Lens) -> Work:
    """Return the work of the kernel for latents on Hopper GPUs: programs of a row block share the tiles.

    The sizes are those of `schedule.latent_partition_size`.
    """
    request, spec, parts = launch.request, launch.request.spec, launch.num_partitions
    each = [(max(1, cdiv(keys, TILE)), count) for _, keys, count in lens]
    tiles, count, longest = sum(t * n for t, n in each), sum(n for _, n in each), max(t for t, _ in each)
    blocks = sum(max(1, cdiv(q * spec.num_q_heads, launch.columns)) * n for q, _, n in lens) / count
    sms, nbytes, all_equal = request.device.num_sms, bytes_of(spec, lens), longest * count == tiles
    if launch.whole and all_equal:  # a program has the sequences that begin in its partition
        each_has = cdiv(cdiv(tiles, parts), longest)
        programs = blocks * cdiv(count, each_has)
        return Work(sms, sms, programs, blocks * count, tiles * blocks, each_has * longest, nbytes)
    if launch.whole:
        programs = min(count, parts)
        most = min(tiles, max(longest, tiles / programs + longest / 2))
        return Work(sms, sms, blocks * programs, blocks * count, tiles * blocks, most, nbytes)
    shortest = min(max(1, int(math.sqrt(tiles * launch.combine_cost) + 0.5)), longest)
    if all_equal:
        size = max(cdiv(tiles, parts), shortest)
        even = cdiv(longest, longest // size) if size < longest else cdiv(size, longest) * longest
        size = even if even <= size + 1 else size
        programs, most = cdiv(tiles, size), float(min(size, tiles))
        begun: float = programs + count - cdiv(count, size // math.gcd(size, longest))
    else:
        places = tiles + launch.sequence_cost * count
        size = max(cdiv(places, parts), shortest)
        programs = cdiv(places, size)
        most = min(size, max(longest, tiles / programs))
        begun = count + (programs - 1) * tiles / places
    cuts = begun - count  # ends of partitions inside of sequences
    partials = longest / size if longest > size else 2.0 if cuts > 0.5 else 0.0
    rows = 2 * blocks * cuts * launch.partial_rows if partials else 0.0
    return Work(
        sms, sms, blocks * programs, blocks * begun, tiles * blocks, most, nbytes, partials,
        rows * 4 * (spec.kv_lora_rank + 2),
    )  # fmt: skip


def guess(launch: Launch) -> Numbers:
    """Return numbers of a launch of which nothing was measured: floors of bytes and products, and usual latencies.

    Like measured numbers, they are of the widest heads of their kind (`columns_of_kind`).
    """
    request, spec = launch.request, launch.request.spec
    device, size = request.device, request.spec.dtype.itemsize
    rows, keys = 64, TILE
    columns = padded(spec.head_dim) + padded(spec.head_dim_v) if spec.latent else 2 * columns_of_kind(spec)
    if isinstance(launch, HopperLaunch):
        rows, keys = 64 * launch.config.num_warpgroups, launch.config.block_n
    elif isinstance(launch, PortableLaunch):
        rows, keys = launch.config.block_m, launch.config.block_n
    masks_all = isinstance(launch, PortableLaunch) and rows > ROWS_OF_PRODUCT and not launch.config.full_tile_loop
    per_micro = 3e6 if device.has_wgmma else 1.5e6  # products of an SM
    if isinstance(launch, HopperLaunch | MLAHopperLaunch):
        per_micro = 5e6
    sm_tile = 2 * rows * keys * columns / per_micro * (4 if size == 4 else 1)
    if masks_all:
        sm_tile *= MASKED
    if spec.kv_dtype is not spec.dtype:  # numbers are converted
        sm_tile += keys * columns / 32_000
    megabyte = 1048576 / (900 * (device.memory_gbps or 36 * device.num_sms))
    return Numbers(3.0, 0.8, 0.35 + sm_tile, sm_tile, megabyte, 1.0, 0.05, megabyte)
