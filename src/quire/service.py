"""What a server does before its first request: find how much scratch its plans need, and compile their kernels.

A plan is chosen from a batch's bounds, mostly rounded up to powers of two. So there is a small number of launches
within given bounds, and they can be enumerated. `workspace_size` returns the largest scratch among them. `warmup`
compiles each of them once. `no_compilation` raises if a launch was not covered.
"""

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from quire import early_warmup
from quire.cache import PagedKVCache
from quire.checks import MAX_DRAFTS, check_cache, check_limits, check_per_token
from quire.dispatch import tree
from quire.dispatch.config import CostModel
from quire.dispatch.device import HAS_TRITON, DeviceProperties, device_properties, interprets, is_served_by_torch
from quire.dispatch.request import Bounds, Options, Request, cdiv
from quire.empty_launches import EmptyLaunches
from quire.errors import check_device, check_flag, check_integer, describe
from quire.kernels.hopper.choice import most_decode_queries, splits_in_rounds
from quire.kernels.hopper.launch import rounds_of_splits
from quire.kernels.launch import Launch
from quire.kernels.portable import has_few_new_tokens
from quire.norm_rope import QKNorm, Rope
from quire.norm_rope_checks import check_norm_rope_alone
from quire.plan import decide
from quire.spec import AttentionSpec

WHERE = "leave it out for the current GPU, or the CPU where there is none"
SHORTEST = "pass the least max_seq_len of a plan"
MANY_KEYS = 1 << 20  # with which splits cost little
MOST_EXACT = 256  # queries; up to here, each number of queries is looked at


def workspace_size(
    spec: AttentionSpec,
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    min_seq_len: int = 1,
    device: torch.device | str | None = None,
    batch_invariant: bool = False,
    intervals: bool = False,
    trees: bool = False,
) -> int:
    """Return how many bytes of scratch are enough for every plan of every batch within the bounds.

    Args:
        spec: what is computed.
        max_num_seqs: most sequences of a batch.
        max_num_tokens: most query tokens of a batch.
        max_seq_len: most keys of a sequence.
        min_seq_len: least `max_seq_len` of a plan.
        device: where; the current GPU when not given, or the CPU where there is none.
        batch_invariant: whether the plans are.
        intervals: whether batches may have `key_begin`.
        trees: whether batches may have `tree_bits`.

    Returns:
        Bytes, for `plan(..., workspace=torch.zeros(bytes, dtype=torch.uint8, device=device))`. Without batch_invariant
        they depend on the device and the spec, hardly on the bounds. 0 where PyTorch serves the device.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a bound is out of range.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> quire.workspace_size(spec, max_num_seqs=64, max_num_tokens=8192, max_seq_len=16384, device="cpu")
        0
    """
    where = check_device("device", device, WHERE) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits = check_limits(spec, max_num_seqs, max_num_tokens, max_seq_len, batch_invariant)
    shortest = check_integer("min_seq_len", min_seq_len, SHORTEST, 1, limits[2])
    per_token = kinds_of_batches(spec, intervals, trees)
    if is_served_by_torch(where):
        return 0
    launches = distinct_launches(spec, device_properties(where), *limits, batch_invariant, per_token, 1, shortest)
    return max(launch.scratch_size().total for launch in launches)


def warmup(
    spec: AttentionSpec,
    cache: PagedKVCache,
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    min_query_len: int = 1,
    min_seq_len: int = 1,
    batch_invariant: bool = False,
    intervals: bool = False,
    trees: bool = False,
    return_lse: bool = False,
    out_scale: bool = False,
    append: bool = False,
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[str]:
    """Compile and load the write kernel and every attention kernel that batches within the bounds can need.

    Kernels are compiled several at a time, by threads and by further processes, and stay in Triton's cache.

    Queries and outputs are expected to be contiguous, or strided in multiples of 16 elements, as slices of a fused
    projection are. Page tables are expected to be rectangular and int32. Batches with and without `cu_seqlens_q` are
    both covered.

    Args:
        spec: what is computed.
        cache: one layer's pages; its layout, strides and scales decide what is compiled. It is neither read nor
            written.
        max_num_seqs: most sequences of a batch.
        max_num_tokens: most query tokens of a batch.
        max_seq_len: most keys of a sequence.
        min_query_len: fewest queries of a batch's longest sequence. A server that runs decodes and prompts in batches
            of their own needs fewer kernels for the prompts.
        min_seq_len: least `max_seq_len` of a plan. A server that plans for at least 64 keys, however short its
            sequences are, needs a quarter fewer kernels.
        batch_invariant: whether the plans are.
        intervals: whether batches may have `key_begin`, and with `trees`, both.
        trees: whether batches may have `tree_bits`.
        return_lse: whether the lse is asked for.
        out_scale: whether `quire.attention` is given one. A launch that quantises its output is another kernel.
        append: whether `quire.attention` is given the step's keys and values. A launch that writes them is another
            kernel than one that does not. A server that makes both kinds of calls warms up for each.
        rope: as `quire.attention` is given it, but for positions, which may be any number; only with `append`. The
            dtypes, the strides and the width of its tables decide what is compiled.
        qk_norm: as `quire.attention` is given it; only with `append`.
        progress: called with the description of each launch before it is compiled, for instance `print`.

    Returns:
        The descriptions of what was compiled.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a bound is out of range.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> cache = quire.PagedKVCache.empty(spec, num_pages=64, page_size=16, device="cpu")
        >>> quire.warmup(spec, cache, max_num_seqs=64, max_num_tokens=8192, max_seq_len=16384)  # none on a CPU
        []
    """
    ranges = check_ranges(
        spec, max_num_seqs, max_num_tokens, max_seq_len, min_query_len, min_seq_len, batch_invariant, intervals, trees
    )
    check_what_launches(spec, cache, return_lse, out_scale, append)
    for name, value in (("rope", rope), ("qk_norm", qk_norm)):
        if value is not None and not append:
            raise ValueError(f"append must be True with {name}, got False; {name} is for new tokens")
    norm_rope: dict[str, Any] = check_norm_rope_alone(rope, qk_norm, cache)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function, got {describe(progress)}; pass print, for instance")
    device = cache.device
    if is_served_by_torch(device):
        return []
    from quire.compile_processes import helping, num_helpers
    from quire.kernels.launcher import compile_together

    bounds = spec, device_properties(device), *ranges
    blank = EmptyLaunches(spec, cache, (), return_lse, append, norm_rope, out_scale)
    warm_up = with_launches(blank, distinct_launches(*bounds))
    names: list[str] = []

    def report(name: str) -> None:
        names.append(name)
        if progress:
            progress(name)

    with early_warmup.finished(bounds):
        with contextlib.ExitStack() as helpers, compile_together(device) as num_missing:
            warm_up.run(report)
            helpers.enter_context(helping(warm_up, num_helpers(num_missing())))
        warm_up.run()  # which loads them
    return names


def begin_warmup(
    spec: AttentionSpec,
    cache: PagedKVCache,
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    min_query_len: int = 1,
    min_seq_len: int = 1,
    device: torch.device | str | None = None,
    batch_invariant: bool = False,
    intervals: bool = False,
    trees: bool = False,
    return_lse: bool = False,
    out_scale: bool = False,
    append: bool = False,
) -> None:
    """Start processes that compile the kernels of a later `warmup`. The cache need not exist yet.

    A server calls this before it loads weights. It calls `warmup` with the same arguments when its cache exists.
    `warmup` waits for the processes and compiles what is missing. Processes that still run end with the server.

    Args:
        spec: what is computed.
        cache: like the one to come, but for its device and its number of pages; it is neither read nor written. On the
            device "meta" it takes no memory.
        max_num_seqs: most sequences of a batch. This and what follows are as for `warmup`.
        max_num_tokens: most query tokens of a batch.
        max_seq_len: most keys of a sequence.
        min_query_len: fewest queries of a batch's longest sequence.
        min_seq_len: least `max_seq_len` of a plan.
        device: of the cache to come; the current GPU when not given, or the CPU where there is none.
        batch_invariant: whether the plans are.
        intervals: whether batches may have `key_begin`.
        trees: whether batches may have `tree_bits`.
        return_lse: whether the lse is asked for.
        out_scale: whether `quire.attention` is given one.
        append: whether `quire.attention` is given the step's keys and values.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a bound is out of range.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> cache = quire.PagedKVCache.empty(spec, num_pages=64, page_size=16, device="cpu")
        >>> limits = {"max_num_seqs": 64, "max_num_tokens": 8192, "max_seq_len": 16384}
        >>> quire.begin_warmup(spec, cache, device="cpu", **limits)  # nothing to compile on a CPU
    """
    where = check_device("device", device, WHERE) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranges = check_ranges(
        spec, max_num_seqs, max_num_tokens, max_seq_len, min_query_len, min_seq_len, batch_invariant, intervals, trees
    )
    check_what_launches(spec, cache, return_lse, out_scale, append)
    if where.type in ("cpu", "cuda") and not interprets() and not is_served_by_torch(where):
        blank = EmptyLaunches(spec, cache, (), return_lse, append, {}, out_scale)
        early_warmup.begin(blank, (spec, device_properties(where), *ranges), where)


def check_ranges(
    spec: AttentionSpec,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    min_query_len: int,
    min_seq_len: int,
    batch_invariant: bool,
    intervals: bool,
    trees: bool,
) -> tuple[Any, ...]:
    """Check the bounds of a warm-up; return the arguments of `distinct_launches` after the device's properties."""
    limits = check_limits(spec, max_num_seqs, max_num_tokens, max_seq_len, batch_invariant)
    advice = "pass the fewest queries of a batch's longest sequence"
    least = check_integer("min_query_len", min_query_len, advice, 1, limits[1])
    shortest = check_integer("min_seq_len", min_seq_len, SHORTEST, 1, limits[2])
    return *limits, batch_invariant, kinds_of_batches(spec, intervals, trees), least, shortest


def check_what_launches(
    spec: AttentionSpec, cache: PagedKVCache, return_lse: bool, out_scale: bool, append: bool
) -> None:
    """Check what else decides which kernels a warm-up compiles."""
    check_cache(cache, spec)
    check_flag("return_lse", return_lse, "say whether the lse is asked for")
    check_flag("out_scale", out_scale, "say whether attention is given one")
    check_flag("append", append, "say whether attention is given the step's keys and values")


def with_launches(blank: EmptyLaunches, planned: Iterable[Launch]) -> EmptyLaunches:
    """Return a warm-up of planned launches, once for each kernel."""
    launches: dict[Hashable, Launch] = {}
    for plan in planned:
        launch = plan.for_cache(blank.cache)
        launches.setdefault((launch.compile_key(), blank.append and has_few_new_tokens(launch.request)), launch)
    return replace(blank, launches=tuple(launches.values()))


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    """Raise if a Quire kernel is compiled, or loaded from Triton's cache, in this context. Use it after `warmup`.

    Raises:
        RuntimeError: a kernel was compiled or loaded.

    Examples:
        >>> with quire.no_compilation():
        ...     pass  # serve
    """
    if not HAS_TRITON:
        yield
        return
    from triton import knobs

    from quire.kernels.launcher import LAUNCHED

    hooks = knobs.runtime.kernel_load_start_hook

    def refuse(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        if name in LAUNCHED:
            raise RuntimeError(
                f"{name} must not be compiled in service, got a launch that warmup did not cover; widen its bounds"
            )

    hooks.add(refuse)
    try:
        yield
    finally:
        hooks.remove(refuse)


@lru_cache(maxsize=16)
def distinct_launches(*bounds: Any) -> tuple[Launch, ...]:
    """Return the launches of `launches_within`, once for each set of kernels and size of scratch.

    They are kept: a server asks for its workspace, and later warms up.
    """
    if early := early_warmup.found(bounds):
        return early
    found: dict[Hashable, Launch] = {}
    for launch in launches_within(*bounds):
        fallback = getattr(launch, "fallback", None)
        keys = launch.compile_key(), None if fallback is None else fallback.compile_key()
        kind = *keys, has_few_new_tokens(launch.request), launch.scratch_size().total
        found.setdefault(kind, launch)
    return tuple(found.values())


tree.CHOICES.append(distinct_launches)


def launches_within(
    spec: AttentionSpec,
    device: DeviceProperties,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    batch_invariant: bool,
    per_token: Sequence[tuple[bool, bool]] = ((False, False),),
    min_query_len: int = 1,
    min_seq_len: int = 1,
) -> Iterator[Launch]:
    """Enumerate the launches of all batches within the bounds, once for each set of bounds that plans distinguish.

    `per_token` says of each kind of batches whether it has intervals and trees.
    """
    options, costs = Options(batch_invariant=batch_invariant), tree.cost_model(spec, device)
    group_size = 0 if spec.latent else spec.group_size
    lens = query_lens(max_num_tokens, spec.num_q_heads, group_size, device.num_sms, rounds_of_splits(spec.head_dim_v))
    lens = [queries for queries in lens if queries >= min_query_len]
    seq_lens = sorted(n for n in {min_seq_len, *powers(max_seq_len)} if n >= min_seq_len)
    limits = [n for n in two_level_limits(costs) if min_seq_len <= n <= max_seq_len]
    with_limits = sorted({*seq_lens, *limits})
    for num_seqs, max_query_len, num_tokens in sizes(max_num_seqs, max_num_tokens, lens):
        one_query_each = max_query_len == 1 and num_tokens >= num_seqs
        # Only partials of one query, and of latents, are combined in two levels or not by the number of keys.
        has_limits = spec.latent or max_query_len == 1 or most_decode_queries(spec) == 1
        for seq_len in with_limits if has_limits else seq_lens:
            bounds = Bounds(max_query_len, seq_len, num_tokens).for_decision()
            for has_cu_seqlens in (False, True) if one_query_each else (True,):
                for has_intervals, has_tree in per_token:
                    if has_tree and max_query_len > MAX_DRAFTS:
                        continue
                    kind = Request(spec, num_seqs, has_cu_seqlens, bounds, device, has_intervals, has_tree)
                    yield decide(kind, options)[0]


def sizes(max_num_seqs: int, max_num_tokens: int, lens: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Enumerate `num_seqs`, `max_query_len` and `num_tokens` of batches within the bounds, as plans distinguish them.

    Plans distinguish sequences with equal numbers of queries from others, and up to 32 and 256 sequences from more.
    `lens` are what `query_lens` returns.
    """
    for num_seqs in sorted({min(n, max_num_seqs) for n in (33, 257, *powers(max_num_seqs))}):
        for max_query_len in lens:
            equal = num_seqs * max_query_len
            for num_tokens in sorted({*powers(max_num_tokens), min(equal - 1, max_num_tokens)}):
                if num_tokens >= max_query_len:
                    yield num_seqs, max_query_len, num_tokens


def two_level_limits(costs: CostModel) -> list[int]:
    """Return the most keys of a sequence whose partials are combined in one level, for tiles of each length."""
    limits = costs.two_level_min_tiles, costs.two_level_min_tiles_small
    return [tiles * block_n for tiles in limits for block_n in (16, 32, 64, 128, 256)]


def kinds_of_batches(spec: AttentionSpec, intervals: bool, trees: bool) -> tuple[tuple[bool, bool], ...]:
    """Return of each kind of batches whether it has intervals and trees; the first has neither."""
    check_flag("intervals", intervals, "say whether batches may have them")
    check_flag("trees", trees, "say whether batches may have them")
    kinds = tuple(itertools.product((False, True)[: 1 + intervals], (False, True)[: 1 + trees]))
    for has_intervals, has_tree in kinds:
        if has_intervals or has_tree:
            check_per_token(spec, "tree_bits" if has_tree else "key_begin")
    return kinds


@lru_cache
def query_lens(limit: int, num_q_heads: int, group_size: int, num_sms: int, rounds: int) -> list[int]:
    """Return numbers of queries up to a limit, each of which stands for all that plans treat like it.

    Powers of two are such numbers. For latents, whose `group_size` is 0 here, so are three times them. For other heads
    there is a further one between two powers wherever one of these changes: the rows, rounded up to a power of two; the
    queries of a work tile of the Hopper kernel, and whether they fill it; whether half of the SMs are idle; and whether
    programs take splits in rounds, of which there are `rounds` at most.
    """
    found = powers(limit)
    if group_size == 0:
        return sorted({*found, *(3 * n for n in powers(limit) if 3 * n < limit)})

    def kind(queries: int) -> list[int]:
        most, tall = tree.power_of_two(queries), max(tree.ROWS_OF_TILES)  # rows
        equal = {rows: tree.queries_of_tile(rows, group_size, queries, ragged=False) for rows in tree.ROWS_OF_TILES}
        ragged = {rows: tree.queries_of_tile(rows, group_size, most, ragged=True) for rows in tree.ROWS_OF_TILES}
        apart = tree.queries_of_tile(tall, group_size, most, ragged=True, apart=True)
        tiles = [*equal.items(), *ragged.items(), (tall, apart)]
        work_tiles = [cdiv(queries, size) * max(1, num_q_heads // (rows // size)) for rows, size in tiles]
        is_idle = [2 * number <= num_sms for number in work_tiles]
        number = work_tiles[tiles.index((tall, equal[tall]))]
        in_rounds = splits_in_rounds(number, num_sms, MANY_KEYS, 1, rounds * num_sms // number) > 1
        sizes = [size for _, size in tiles]
        fills = [queries >= size for size in sizes]
        return [tree.power_of_two(queries * group_size), *sizes, *fills, *is_idle, in_rounds]

    further: set[int] = set()
    for low, high in itertools.pairwise(found):
        known = [kind(high)]
        more_rows = [rows // group_size + 1 for rows in powers(high * group_size)]
        step = 1 if high <= MOST_EXACT else 8
        for queries in (*more_rows, *range(low + step, high, step)):
            if low < queries < high and kind(queries) not in known:
                known.append(kind(queries))
                further.add(queries)
    return sorted({*found, *further})


def powers(limit: int) -> list[int]:
    """Return the powers of two below a limit, and the limit."""
    return [1 << i for i in range(limit.bit_length()) if 1 << i < limit] + [limit]
