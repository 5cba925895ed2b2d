"""What launches do: `work_of` counts items, tiles and bytes of a launch, for lengths or for the bounds of a request."""

from collections.abc import Sequence

from quire.dispatch.predict import Work
from quire.dispatch.request import Request, cdiv
from quire.kernels.hopper.launch import HopperLaunch
from quire.kernels.launch import Launch
from quire.kernels.mla_hopper.launch import TILE, MLAHopperLaunch
from quire.kernels.portable.launch import PortableLaunch
from quire.spec import AttentionSpec

Lens = Sequence[tuple[int, int, int]]  # queries, keys, and how many sequences have them
MAX_CUT_SPLITS, MAX_CUT_SPLITS_ALONE = 8, 32  # of a row block of the Hopper kernel, and of a sequence's only one


def lens_of(request: Request) -> Lens:
    """Return the lengths that a request is taken to have: those of its bounds.

    Of a ragged batch, one sequence has the most queries, and the others share the rest.
    """
    bounds, num_seqs = request.bounds, request.num_seqs
    queries, keys, tokens = bounds.max_query_len, bounds.max_seq_len, bounds.num_tokens
    if not request.is_ragged or num_seqs == 1:
        return ((min(queries, tokens), keys, num_seqs),)
    others = max(0, tokens - queries) // (num_seqs - 1)
    return (queries, keys, 1), (max(1, others), keys, num_seqs - 1)


def tiles_of_sequence(
    spec: AttentionSpec, queries: int, keys: int, block: int, block_n: int
) -> tuple[int, float, float]:
    """Return a sequence's row blocks of so many tokens, the tiles of all, and those of the one that sees the most."""
    left, right = spec.window
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


def bytes_of(spec: AttentionSpec, lens: Lens) -> float:
    """Return the bytes that must be moved: visible keys and values once, queries and outputs."""
    width = spec.head_dim if spec.latent else spec.head_dim + spec.head_dim_v
    keys = sum(min(s, spec.window[0] + spec.window[1] + q) * count for q, s, count in lens)
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


def row_blocks(launch: PortableLaunch, lens: Lens) -> tuple[int, float, float]:
    """Return the row blocks of a KV head, or the bands of latents; the tiles of all; and the most tiles of any."""
    spec, config = launch.request.spec, launch.config
    group, rows = launch.rows_of_partition
    block_n = config.block_n
    blocks, tiles, longest = 0, 0.0, 0.0
    for queries, keys, count in lens:
        number, of_seq, most = tiles_of_sequence(spec, queries, keys, max(1, rows // group), block_n)
        parts = 1 if group <= rows else cdiv(group, rows)  # row blocks of a query's heads
        blocks, tiles, longest = blocks + number * parts * count, tiles + of_seq * parts * count, max(longest, most)
    return blocks, tiles, longest


def work_of_blocks(launch: PortableLaunch, lens: Lens) -> Work:
    """Return the work of the portable kernel without partitions: each row block is an item."""
    request, heads = launch.request, launch.request.spec.num_kv_heads
    blocks, tiles, longest = row_blocks(launch, lens)
    sms = request.device.num_sms
    slots = sms * launch.config.programs_per_sm
    return Work(slots, sms, blocks * heads, blocks * heads, tiles * heads, longest, bytes_of(request.spec, lens))


def work_of_partitions(launch: PortableLaunch, lens: Lens) -> Work:
    """Return the work of partitions, also of latents: programs share the tiles of all row blocks."""
    request, lanes, spec = launch.request, launch.lanes, launch.request.spec
    blocks, tiles, longest = row_blocks(launch, lens)
    sms, parts = request.device.num_sms, launch.num_partitions
    share = max(1.0, tiles / parts)
    programs = min(parts, max(blocks, tiles))
    begun = max(1.0, (blocks + programs) / programs - 1)  # row blocks that a program begins
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
        lens = [found for found in lens if found[0] > launch.max_decode_queries] or lens[:1]
    parts = spec.num_q_heads // launch.heads * launch.column_parts
    items, tiles, longest = 0, 0.0, 0.0
    for queries, keys, count in lens:
        blocks, of_seq, most = tiles_of_sequence(spec, queries, keys, config.block_t, config.block_n)
        items, tiles, longest = items + blocks * count, tiles + of_seq * count, max(longest, most)
    sms = request.device.num_sms
    slots = sms * config.programs_per_sm
    nbytes, splits, cut = bytes_of(spec, lens), launch.num_splits, 0.0
    items, tiles = items * parts, tiles * parts
    if splits > 1:
        rows = sum(q * count for q, _, count in lens) * spec.num_q_heads * splits
        partial_bytes = 4 * rows * (spec.head_dim_v + 1)
        return Work(slots, sms, items * splits, items * splits, tiles, longest / splits, nbytes, splits, partial_bytes)
    if launch.cut_slots:
        share = max(tiles / slots, 512 / config.block_n)
        cut = min(MAX_CUT_SPLITS, longest / share)
    if cut > 1:
        longest /= cut
        partial_bytes = 4 * 64 * config.num_warpgroups * min(launch.cut_slots, items * cut) * (launch.part_width + 2)
        return Work(slots, sms, items, items, tiles, longest, nbytes, cut, partial_bytes)
    return Work(slots, sms, items, items, tiles, longest, nbytes)


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
