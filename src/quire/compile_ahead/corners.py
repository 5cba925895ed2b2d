"""Where it is decided which kernels there are: at a grid of batch sizes, which a warm-up can look at one by one.

How many splits a launch has is decided for the exact bounds of a batch. Which kernels it has may depend on them too:
one number of tokens leaves SMs idle, and the next does not. `plan.decide` therefore takes a launch only if points of
the grid around the batch, its `corners`, need the same kernels and as much scratch; else it takes that of the upper
corner, whose bounds the batch does not exceed. So whatever the rules are, the launches at `points` have all kernels of
batches within limits, and the most scratch.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

from quire.dispatch.config import heads_that_fit
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import MOST_NEW_TOKENS, MOST_SEQS_TO_APPEND, Bounds, Request, cdiv
from quire.dispatch.tree import ROWS_OF_TILES, queries_of_tile
from quire.kernels.hopper.choice import splits_in_rounds
from quire.kernels.hopper.launch import rounds_of_splits
from quire.spec import AttentionSpec

LARGEST = 1 << 31  # of any number of a batch
MANY_KEYS = 1 << 20  # with which splits cost little
POWERS = [1 << i for i in range(32)]
KEYS = sorted({*POWERS, *(3 * power for power in POWERS[:-2])})
NUM_SEQS = sorted({*POWERS, MOST_SEQS_TO_APPEND + 1})


def corners(request: Request) -> list[Request]:
    """Return the points of the grid around a request, the upper one first; the request itself if it is one of them."""
    bounds = request.bounds
    lens, tokens = around(query_lens(request.spec), bounds.max_query_len), around(POWERS, bounds.num_tokens)
    found: list[Request | None] = []
    for num_seqs in around(NUM_SEQS, request.num_seqs):
        of_kind: Sequence[int] = []
        if not request.is_ragged:
            tokens = [LARGEST]
            if among := last_of_kinds(request.spec, request.device, num_seqs, lens[-1], lens[0]):
                kind = kind_of_tiles(request.spec, request.device, max(1, request.num_seqs), bounds.max_query_len)
                of_kind = [queries for other, queries in among.items() if other == kind]
        is_upper = [queries for queries in of_kind if queries >= bounds.max_query_len]
        sizes = product([*is_upper, *lens, *of_kind], around(KEYS, bounds.max_seq_len), tokens)
        found += (point(request, num_seqs, *size) for size in sizes)
    return list(dict.fromkeys(corner for corner in found if corner is not None))


def points(
    spec: AttentionSpec,
    device: DeviceProperties,
    limits: Bounds,
    max_num_seqs: int,
    per_token: Sequence[tuple[Any, ...]],
    min_query_len: int,
    min_seq_len: int,
) -> Iterator[Request]:
    """Enumerate the corners of all batches within limits, and a few more.

    Args:
        spec: what is computed.
        device: the device's properties.
        limits: most queries of a sequence, most keys of a sequence, and most tokens.
        max_num_seqs: most sequences.
        per_token: of each kind of batches, whether it has intervals and trees; or also a flat table, and the kind of
            its chosen keys.
        min_query_len: fewest queries of a batch's longest sequence.
        min_seq_len: fewest keys of a batch's longest sequence.
    """
    lens = between(query_lens(spec), min_query_len, min(limits.max_query_len, limits.num_tokens))
    seqs, tokens = between(NUM_SEQS, 1, max_num_seqs), between(POWERS, 1, limits.num_tokens)
    cells = list(pairwise(lens))
    kinds = {n: {q for cell in cells for q in last_of_kinds(spec, device, n, *cell).values()} for n in seqs}
    sizes = [(num_seqs, queries, LARGEST) for num_seqs in seqs for queries in {*lens, *kinds[num_seqs]}]
    # Of an upper corner, a batch has more than half as many sequences, and of more than half as many queries.
    least = {size: (size[0] // 2 + 1) * (size[1] // 2 + 1) for size in sizes}
    sizes = [size for size in sizes if size[0] * size[1] <= tokens[-1] or least[size] <= limits.num_tokens]
    sizes += [size for size in product(seqs, lens, tokens) if size[2] < size[0] * size[1]]
    keys_of_seq = between(KEYS, min_seq_len, limits.max_seq_len)
    for (num_seqs, queries, num_tokens), keys in product(sorted(sizes), keys_of_seq):
        one_each = queries == 1 and num_tokens == LARGEST
        for has_cu_seqlens in (False, True) if one_each else (True,):
            for kind in per_token:
                request = Request(spec, num_seqs, has_cu_seqlens, limits, device, *kind)
                if (found := point(request, num_seqs, queries, keys, num_tokens)) is not None:
                    yield found


def point(request: Request, num_seqs: int, queries: int, keys: int, num_tokens: int) -> Request | None:
    """Return a request with other numbers; None if the longest sequence alone has more tokens."""
    if num_tokens < queries:
        return None
    bounds = Bounds(queries, keys, min(num_tokens, num_seqs * queries))
    return replace(request, num_seqs=num_seqs, bounds=bounds.for_decision())


@lru_cache
def query_lens(spec: AttentionSpec) -> list[int]:
    """Return the numbers of queries of the grid.

    Between two of them, neither queries nor rows pass a power of two, nor queries of latents three times one
    (`mla.launch.rounded_queries`).
    """
    rows = {power // spec.group_size for power in POWERS if power >= spec.group_size}
    return sorted({*POWERS, MOST_NEW_TOKENS + 1, *rows, *(3 * power for power in POWERS[:-2] if spec.latent)})


def around(grid: Sequence[int], number: int) -> Sequence[int]:
    """Return the numbers of a grid next to another number, the larger one first; the number itself if it is one."""
    above = bisect_left(grid, max(1, number))
    return grid[above : above + 1] if grid[above] <= number else [grid[above], *grid[max(0, above - 1) : above]]


def between(grid: Sequence[int], least: int, most: int) -> Sequence[int]:
    """Return the numbers of a grid next to all numbers from `least` to `most`."""
    first, last = around(grid, least)[-1], around(grid, most)[0]
    return [number for number in grid if first <= number <= last]


def kind_of_tiles(spec: AttentionSpec, device: DeviceProperties, num_seqs: int, queries: int) -> tuple[int, ...]:
    """Return what the Hopper kernel's rules ask of equal sequences, besides powers of two.

    These are the queries of a work tile, with one and with two warpgroups, and whether programs take splits in rounds.
    """
    _, tall = tiles = tiles_of_equal(spec.group_size, queries)
    heads = heads_that_fit(ROWS_OF_TILES[-1], tall, spec.group_size)
    work_tiles, rounds = num_seqs * cdiv(queries, tall) * spec.num_q_heads // heads, rounds_of_splits(spec.head_dim_v)
    most = rounds * device.num_sms // work_tiles
    return *tiles, splits_in_rounds(work_tiles, device.num_sms, MANY_KEYS, 1, most) > 1


@lru_cache(maxsize=1 << 16)
def tiles_of_equal(group_size: int, queries: int) -> tuple[int, ...]:
    """Return the queries of a work tile of equal sequences, with one and with two warpgroups."""
    return tuple(queries_of_tile(rows, group_size, queries, ragged=False) for rows in ROWS_OF_TILES)


@lru_cache(maxsize=4096)
def last_of_kinds(
    spec: AttentionSpec, device: DeviceProperties, num_seqs: int, low: int, high: int
) -> dict[tuple[int, ...], int]:
    """Return for each kind of tiles the largest number of queries above `low`, up to `high`; none for other kernels.

    The kind changes only after a multiple of the queries of some tile.
    """
    if low == high or not device.has_wgmma or spec.latent:
        return {}
    tiles = {rows // n for rows in ROWS_OF_TILES for n in range(1, rows + 1) if spec.group_size % n == 0}
    ends = {n for tile in tiles for n in range(low // tile * tile + tile, high, tile)} | {high}
    return {kind_of_tiles(spec, device, num_seqs, n): n for n in sorted(ends)}
