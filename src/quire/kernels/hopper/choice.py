"""When the Hopper kernel serves a batch, with which configuration, and into how many splits its keys are cut."""

from dataclasses import replace

from quire.dispatch import tree
from quire.dispatch.config import CostModel, HopperConfig
from quire.dispatch.request import Bounds, Options, Request, cdiv
from quire.kernels.hopper.launch import (
    CUT_OVERHEAD,
    MAX_KEYS_WITHOUT_TILE_MAPS,
    HopperLaunch,
    count_work_tiles,
    has_bounded_scores,
    is_wide,
    width_of_part,
)
from quire.kernels.portable.choice import choose as choose_portable
from quire.kernels.portable.choice import fills, has_one_split, is_tiny, rounded
from quire.kernels.portable.launch import FIXED_SPLIT_SIZE
from quire.spec import AttentionSpec

MAX_FITTED_HEAD_DIM = 256  # columns of heads on which trees were fitted
# Of wider heads: keys up to which this kernel pays only if each SM has so many rows (NVIDIA H200, 2026-11-27).
MAX_KEYS_THAT_NEED_ROWS, MIN_ROWS_PER_SM = 64, 64
# Columns of values of a work tile, and of one of a batch-invariant plan, whose consumers hold two accumulators.
MAX_PART_COLUMNS, MAX_INVARIANT_PART_COLUMNS = 256, 128
OTHER_SHARED_BYTES = 4096  # for barriers, work tiles and what threads exchange where queries keep their buffer
MAX_WIDE_PROMPT_TOKENS = 768  # of equal prompts of wide heads, beyond which tiles are as tall as for long contexts
TWO_WARPGROUP_ROWS = 128  # rows of two consumer warpgroups
PORTABLE_TILE_ROWS = 16  # of a sequence, for which the portable kernels have a tile
MAX_MEMORY_BOUND_ROWS = 32  # of a sequence, up to which the portable kernels are bound by memory
MAX_IDLE_WIDE_ROWS = 64  # the same with wide heads, if this kernel would leave SMs idle
MIN_SPLIT_CHUNK_KEYS = 512  # keys that a query of a chunk may see, from which on they are split
PARTIAL_COST_KEYS = 512  # that a row block could see while a partial is written and read
MAX_TIME_RATIO_OF_ROUNDS = 0.9  # more splits are taken if they take at most this part of the time
MAX_MEAN_DECODE_QUERIES = 32  # of a ragged batch's sequences, up to which most of them are taken to decode
# Queries of a sequence on average, up to which the warpgroups of a ragged batch have their own tokens.
MAX_MEAN_QUERIES_SPLIT_BY_TOKENS = 128
MIN_SEQS_PER_LONG_SEQ = 8  # sequences for each of the longest that a batch's tokens have room for
# Of a mixed batch on long contexts: rows of the longest sequence over the number of sequences. Up to the first number,
# programs have one warpgroup. Up to the second, there is no decode launch. Beyond, prompts may be most of the work.
MAX_ROWS_OF_ONE_WARPGROUP, MAX_ROWS_WITHOUT_DECODE_LAUNCH = 128, 256
MAX_DECODE_ROWS = 16  # in a mixed batch, sequences with at most this many rows go to the decode launch


def propose(request: Request, options: Options) -> tuple[HopperLaunch, str] | str:
    """Return a launch of the Hopper kernel and the reason; or, in words, what it does not serve or is slower at."""
    spec = request.spec
    if spec.latent:
        return "latents"
    if request.has_tree:
        return "draft trees"
    if options.config is not None or options.num_splits is not None:
        return "config or num_splits"
    if options.batch_invariant:
        return propose_invariant(request, options)
    costs = tree.cost_model(spec, request.device)
    config = choose_config(request, suits_one_warpgroup(request, costs))
    if isinstance(config, str):
        return config
    if not request.has_cu_seqlens:
        return "a batch without cu_seqlens_q"
    fallback, reason = choose_portable(request, options)
    launch = HopperLaunch(request, config, fallback, column_parts=cdiv(spec.head_dim_v, MAX_PART_COLUMNS))
    num_splits = choose_num_splits(launch, costs)
    section_heads = choose_section(launch, costs) if num_splits == 1 else None
    launch = replace(launch, num_splits=num_splits, section_heads=section_heads)
    if options.kernel is None and not is_preferred(launch, costs):
        return "batches for which the portable kernels are faster"
    return with_decode_launch(launch, costs), reason


def propose_invariant(request: Request, options: Options) -> tuple[HopperLaunch, str] | str:
    """Return the same as `propose`, for a batch-invariant plan.

    Tiles have as many keys as those of the portable kernels, which serve the plan's other batches.
    """
    spec = request.spec
    if request.has_intervals:
        return "intervals of keys with batch_invariant"
    if spec.kv_dtype is not spec.dtype:
        return "a quantised cache with batch_invariant"
    config = choose_config(request, short=False)
    if isinstance(config, str):
        return config
    if not request.has_cu_seqlens:
        return "a batch without cu_seqlens_q"
    fallback, reason = choose_portable(request, options)
    few_rows = has_one_split(request) and not fills(request, 64 * config.num_warpgroups)
    if options.kernel is None and (fallback.name != "block" or few_rows):
        return "batches for which the portable kernels are faster"
    parts = cdiv(spec.head_dim_v, MAX_INVARIANT_PART_COLUMNS)
    config = with_keys(config, fallback.config.block_n, request, parts)
    launch = HopperLaunch(request, config, fallback, fixed_split_size=FIXED_SPLIT_SIZE, column_parts=parts)
    costs = tree.cost_model(spec, request.device)
    launch = replace(launch, section_heads=choose_section(launch, costs))
    return with_decode_launch(launch, costs, batch_invariant=True), reason


def is_preferred(launch: HopperLaunch, costs: CostModel) -> bool:
    """Return whether this launch is taken to be faster than that of the portable kernels, its fallback.

    It is if it splits the keys of sequences with equally many queries. It is not if sequences have at most
    `MAX_IDLE_WIDE_ROWS` rows of wide heads, and it leaves SMs idle. If the fallback would cut keys, this launch is

    * slower if it leaves SMs idle on many keys;
    * faster if sequences have more rows than `MAX_MEMORY_BOUND_ROWS`, and for a quantised cache, if they have rows for
      both consumer warpgroups and keys are cut here too;
    * slower for a quantised cache of narrow heads otherwise.

    The widest heads have a rule of their own for more rows than `MAX_MEMORY_BOUND_ROWS`. In all other cases the
    device's tree decides. Of a window, it is told the keys that the window shows.
    """
    request, spec = launch.request, launch.request.spec
    rows_per_seq, rows_per_sm, _, queries_per_seq = rounded(request)
    if launch.num_splits > 1 and not request.is_ragged:
        return True
    is_idle = 2 * launch.num_work_tiles(request.bounds.num_tokens) <= request.device.num_sms
    if is_idle and is_wide(spec) and not is_widest(spec) and rows_per_seq <= MAX_IDLE_WIDE_ROWS:
        return False
    if launch.fallback.name != "block":
        has_few_rows, cuts = rows_per_seq <= MAX_MEMORY_BOUND_ROWS, launch.num_splits > 1 or launch.cut_slots > 0
        few_keys = MIN_SPLIT_CHUNK_KEYS if has_few_rows else costs.short_context
        if is_idle and (has_few_rows or not cuts) and request.keys_seen > few_keys:
            return False
        if spec.kv_dtype is spec.dtype:
            if not has_few_rows:
                return True
        elif cuts and rows_per_seq >= TWO_WARPGROUP_ROWS:
            return True
        elif not is_wide(spec):
            return False
    keys = tree.power_of_two(request.keys_seen)
    if is_widest(spec) and rows_per_seq > MAX_MEMORY_BOUND_ROWS:
        return keys > MAX_KEYS_THAT_NEED_ROWS or rows_per_sm >= MIN_ROWS_PER_SM
    return tree.prefers_hopper(spec, request.device, rows_per_seq, rows_per_sm, keys, queries_per_seq)


def is_widest(spec: AttentionSpec) -> bool:
    """Return whether heads are wider than those on which trees were fitted."""
    return max(spec.head_dim, spec.head_dim_v) > MAX_FITTED_HEAD_DIM


def is_short(request: Request, costs: CostModel) -> bool:
    """Return whether contexts have at most `short_context` keys, or rows see at most half as many (a window)."""
    return request.bounds.max_seq_len <= costs.short_context or 2 * request.keys_seen <= costs.short_context


def suits_one_warpgroup(request: Request, costs: CostModel) -> bool:
    """Return whether a program should have one consumer warpgroup, where it may.

    It should on short contexts, or if its rows have room for all rows of a sequence. Chunks should if their row blocks
    see no more keys than a short context has, but not if the rounds of two warpgroups have fewer keys.
    """
    if is_wide(request.spec):
        return is_short(request, costs)
    if request.is_ragged:  # most sequences have fewer rows than the one with the most
        return is_short(request, costs) or rounded(request)[0] <= TWO_WARPGROUP_ROWS
    if request.rows_per_seq <= TWO_WARPGROUP_ROWS // 2 or is_capped_and_narrow(request.spec):
        return True
    flat, tall = choose_config(request, short=True), choose_config(request, short=False)
    if isinstance(flat, str) or isinstance(tall, str) or not is_chunk(request):
        return is_short(request, costs)
    if min(request.bounds.max_seq_len, request.keys_seen + flat.block_t) > costs.short_context:
        return False
    return keys_of_rounds(request, flat) <= keys_of_rounds(request, tall)


def keys_of_rounds(request: Request, config: HopperConfig) -> int:
    """Return how many keys a program multiplies in all its rounds, if a chunk's row blocks see equally many.

    Keys count in whole tiles. With heads of 32 in groups of 13, a window of 21 and 112 chunks of 102, two warpgroups
    take 21 rounds of 128 keys, and one takes 23 of 64: 95.8 and 48.3 us (NVIDIA H200, 2026-11-28).
    """
    work_tiles = count_work_tiles(request, config, request.bounds.num_tokens)
    rounds = cdiv(work_tiles, request.device.num_sms * config.programs_per_sm)
    keys = min(request.bounds.max_seq_len, request.keys_seen + config.block_t - 1)
    return rounds * cdiv(keys, config.block_n) * config.block_n


def is_capped_and_narrow(spec: AttentionSpec) -> bool:
    """Return whether scores take the loop of `capped.py`, and heads are so narrow that one warpgroup is faster.

    Measured with heads of 64 on up to 4,096 keys (NVIDIA H100, 2026-11-25).
    """
    from quire.kernels import mods

    is_narrow = max(spec.head_dim, spec.head_dim_v) <= 64
    return is_narrow and mods.score_mod(spec) is mods.softcap and has_bounded_scores(spec)


def is_chunk(request: Request) -> bool:
    """Return whether sequences have equally many queries, and at least three times as many keys before them."""
    return not request.is_ragged and request.bounds.max_seq_len >= 4 * request.bounds.max_query_len


def choose_config(request: Request, short: bool) -> HopperConfig | str:
    """Return the configuration for a batch; or, in words, what the kernel does not serve."""
    queries, ragged = max(1, request.bounds.max_query_len), request.is_ragged
    if is_wide(request.spec) and not ragged and min(request.keys_seen, queries) > MAX_WIDE_PROMPT_TOKENS:
        short = False
    queries = tree.power_of_two(queries) if ragged else queries
    apart = ragged and has_few_queries(request)
    config = tree.hopper_config(request.spec, request.device, short, queries, ragged, apart)
    if isinstance(config, str) or suits_large_tiles(request, config):
        return config
    return config.with_smaller_tiles(more_stages=request.rows_per_seq > TWO_WARPGROUP_ROWS)


def suits_large_tiles(request: Request, config: HopperConfig) -> bool:
    """Return whether tiles of wide heads should have 96 keys instead of 64.

    They should if several row blocks read the same keys, so that they rarely wait for memory, and if there are so many
    keys that those of the last tile, which no query sees, count for little. Otherwise such tiles took 1 to 10 % longer
    (NVIDIA H200, 2026-11-26), and up to 44 % where keys are split (NVIDIA H100, 2026-11-27).
    """
    has_keys = request.keys_seen > MAX_KEYS_WITHOUT_TILE_MAPS and request.rows_per_seq > TWO_WARPGROUP_ROWS
    is_split = 2 * count_work_tiles(request, config, request.bounds.num_tokens) <= request.device.num_sms
    return has_keys and not (request.is_ragged or request.spec.softcap or is_split)


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


def choose_num_splits(launch: HopperLaunch, costs: CostModel) -> int:
    """Return into how many splits the keys of each work tile are cut.

    There is one, unless work tiles leave half of the device idle, or chunks leave programs idle in their last round.
    Where lengths may differ, most splits have few keys. So there are as many splits as their states have room. With
    more work tiles, programs cut (`cuts.py`).
    """
    request, config, device = launch.request, launch.config, launch.request.device
    num_work_tiles = launch.num_work_tiles(request.bounds.num_tokens)
    if is_wide(request.spec):
        few_rows = MAX_MEMORY_BOUND_ROWS if is_widest(request.spec) else PORTABLE_TILE_ROWS
        suits = request.rows_per_seq > few_rows and 2 * request.keys_seen > costs.short_context
    else:
        has_rows = request.rows_per_seq > MAX_MEMORY_BOUND_ROWS and not request.is_ragged
        fills_tile = 8 * request.bounds.max_query_len >= 7 * config.block_t
        has_keys = not is_short(request, costs) or (is_chunk(request) and request.keys_seen >= MIN_SPLIT_CHUNK_KEYS)
        suits = (has_rows or fills_tile) and has_keys
    if not suits or num_work_tiles == 0 or (request.is_ragged and 2 * num_work_tiles > device.num_sms):
        return 1
    most = min(cdiv(request.keys_seen, costs.hopper_min_tiles_per_split * config.block_n), costs.hopper_max_splits)
    splits = device.num_sms // num_work_tiles
    if request.is_ragged:
        rows = 64 * config.num_warpgroups * device.num_sms
        splits = rows // (request.bounds.num_tokens * request.spec.num_q_heads * launch.column_parts)
    splits = max(1, min(splits, most))
    if is_chunk(request) and launch.rounds_of_splits > 1:
        most = min(most, launch.rounds_of_splits * device.num_sms // num_work_tiles)
        return splits_in_rounds(num_work_tiles, device.num_sms, request.keys_seen, splits, most)
    return splits


def splits_in_rounds(num_work_tiles: int, num_sms: int, keys: int, splits: int, most: int) -> int:
    """Return how many splits of equal work tiles take the least time, if each program takes one split in a round.

    Args:
        num_work_tiles: work tiles before they are split.
        num_sms: the number of programs.
        keys: keys that a work tile sees.
        splits: the least number of splits, which is kept if more gain little.
        most: the largest number of splits.
    """

    def keys_in_time(number: int) -> float:
        cost = CUT_OVERHEAD + (PARTIAL_COST_KEYS if number > 1 else 0)
        return cdiv(num_work_tiles * number, num_sms) * (keys / number + cost)

    best = min(range(splits, most + 1), key=keys_in_time, default=splits)
    return best if keys_in_time(best) <= MAX_TIME_RATIO_OF_ROUNDS * keys_in_time(splits) else splits


def choose_section(launch: HopperLaunch, costs: CostModel) -> int | None:
    """Return how many KV heads are attended to at a time, where keys are not split; None for all."""
    spec, request = launch.request.spec, launch.request
    tiles_of_head = launch.num_work_tiles(request.bounds.num_tokens) / spec.num_kv_heads
    if request.bounds.max_query_len <= launch.config.block_t or not tiles_of_head:
        return None
    least = max(costs.hopper_section_heads, costs.hopper_section_tiles * request.device.num_sms / tiles_of_head)
    for heads in range(1, spec.num_kv_heads):
        if spec.num_kv_heads % heads == 0 and heads >= least:
            return heads
    return None


def with_decode_launch(launch: HopperLaunch, costs: CostModel, batch_invariant: bool = False) -> HopperLaunch:
    """Return the launch for a batch that may mix decoding sequences with prompts, maybe with a decode launch.

    The host knows the number of tokens, not the length of each sequence. Lengths must differ if there are fewer tokens
    than `num_seqs * max_query_len`.
    """
    request, bounds = launch.request, launch.request.bounds
    max_queries = most_decode_queries(request.spec)
    may_decode = request.num_seqs > 1 and request.is_ragged and launch.num_splits == 1
    if not may_decode or bounds.max_query_len <= max_queries:
        return launch
    if not launch.fixed_split_size:
        config = choose_config(request, loads_more(request, costs) or suits_one_warpgroup(request, costs))
        assert isinstance(config, HopperConfig)
        launch = replace(launch, config=config)
    if serves_decoding(launch, costs):
        return launch
    num_tokens = min(bounds.num_tokens, request.num_seqs * max_queries)
    decoding = replace(request, bounds=Bounds(max_queries, bounds.max_seq_len, num_tokens))
    decode, _ = choose_portable(decoding, Options(batch_invariant=batch_invariant), max_queries)
    if not decode.num_partitions or (not batch_invariant and is_tiny(decode, request.num_seqs)):
        return launch
    return replace(launch, decode=decode)


def most_decode_queries(spec: AttentionSpec) -> int:
    """Return the most queries of a sequence that a decode launch serves."""
    return max(1, MAX_DECODE_ROWS // spec.group_size)


def loads_more(request: Request, costs: CostModel) -> bool:
    """Return whether a ragged batch is taken to load more than it multiplies, because most of its sequences decode.

    Its programs then have one consumer warpgroup. The host does not know whose contexts are long: those of decoding
    sequences, or those of chunks, which two warpgroups serve faster. So on long contexts, most sequences must have few
    queries for this, and the longest one must have few rows for each sequence.
    """
    bounds = request.bounds
    if bounds.max_query_len > 2 * costs.short_context:
        return False
    if bounds.max_seq_len <= 4 * costs.short_context:
        return not may_be_chunks(request)
    queries, num_tokens = tree.power_of_two(bounds.max_query_len), tree.power_of_two(bounds.num_tokens)
    few_queries = MIN_SEQS_PER_LONG_SEQ * num_tokens <= queries * tree.power_of_two(request.num_seqs)
    few_rows = rows_for_each(request) <= MAX_ROWS_OF_ONE_WARPGROUP
    return few_queries and few_rows and bounds.max_seq_len <= 16 * costs.short_context


def has_few_queries(request: Request) -> bool:
    """Return whether sequences have few queries on average, as where many of them decode."""
    num_tokens, num_seqs = tree.power_of_two(request.bounds.num_tokens), tree.power_of_two(request.num_seqs)
    return num_tokens <= MAX_MEAN_QUERIES_SPLIT_BY_TOKENS * num_seqs


def rows_for_each(request: Request) -> float:
    """Return the rows of the longest sequence over the number of sequences, with powers of two of both bounds."""
    queries = tree.power_of_two(request.bounds.max_query_len)
    return queries * request.spec.group_size / tree.power_of_two(request.num_seqs)


def may_be_chunks(request: Request) -> bool:
    """Return whether most sequences of a ragged batch seem to be chunks on long contexts.

    They do if there are more than four times as many keys as queries, and if the sequences besides the longest have
    more than MAX_MEAN_DECODE_QUERIES queries on average. All numbers are rounded up to powers of two first.
    """
    bounds = request.bounds
    queries, num_tokens = tree.power_of_two(bounds.max_query_len), tree.power_of_two(bounds.num_tokens)
    others = MAX_MEAN_DECODE_QUERIES * tree.power_of_two(request.num_seqs)
    return num_tokens > others + queries and tree.power_of_two(bounds.max_seq_len) > 4 * queries


def serves_decoding(launch: HopperLaunch, costs: CostModel) -> bool:
    """Return whether the launch itself serves decoding sequences in a mixed batch.

    Its programs then take prompts and decoding sequences from either end of the queue (`queue.py`). That is slower than
    a decode launch in these cases:

    * contexts are long, and prompts have so many rows that they may be nearly all of the work;
    * tiles are converted, which takes longer than to load them;
    * several work tiles of a decoding sequence load the same keys, each for some of its heads;
    * keys of long sequences are not cut, since rows see intervals or the plan is batch-invariant.
    """
    request, spec = launch.request, launch.request.spec
    is_balanced = launch.config.num_warpgroups == 1 or request.bounds.max_seq_len <= 4 * costs.short_context
    is_balanced = is_balanced or rows_for_each(request) <= MAX_ROWS_WITHOUT_DECODE_LAUNCH
    if is_wide(spec) and spec.head_dim != tree.padded(spec.head_dim):
        is_balanced = True  # the portable kernels multiply more columns than there are
    loads_once = launch.heads == spec.group_size and spec.kv_dtype is spec.dtype
    return is_balanced and loads_once and not (launch.fixed_split_size or request.has_intervals)
