"""`HopperLaunch`: a launch of the Hopper kernel, and the choice of when to use it."""

from collections.abc import Hashable
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch import tree
from quire.dispatch.config import CostModel, HopperConfig
from quire.dispatch.request import Bounds, Options, Request, cdiv
from quire.kernels.hopper.tma import has_boxes, matrices_of_cache, page_box
from quire.kernels.launch import Runner, once
from quire.kernels.portable import PortableLaunch
from quire.kernels.scratch import CUT_WARPGROUPS_PER_SM, ScratchSize, counter_bytes, cut_counter_bytes
from quire.kernels.split_kv.choice import choose as choose_portable
from quire.kernels.split_kv.choice import fills, has_one_split, is_tiny, rounded
from quire.kernels.split_kv.launch import FIXED_SPLIT_SIZE, SplitKVLaunch
from quire.spec import AttentionSpec

WIDEST_PART = 128  # columns of values of a batch-invariant work tile, whose consumers hold two accumulators
WIDE = 128  # columns of a head, beyond which the portable kernels are slow
TALL_WIDE = 768  # queries and keys of equal prompts of wide heads, beyond which tiles are as tall as for long contexts
LONG = 1024  # keys that a query may see, beyond which further tensor maps are worth the time to fetch them
CUT_FROM = 1024  # keys that a query may see, from which on row blocks of a ragged batch may be cut
MOST_SPLITS_OF_CUT = 32  # as in `cuts.py`
CUT_OVERHEAD = 192  # keys, as in `cuts.py`
TALL = 128  # rows of two consumer warpgroups
FEW_ROWS = 16  # of a sequence, for which the portable kernels have a tile
SOME_ROWS = 32  # of a sequence, up to which the portable kernels load keys as fast as they come
NARROW = 32  # columns of a head, which the portable kernels do not pad to 64
MOST_OF_OTHERS = 32  # queries on average, up to which most sequences of a ragged batch are taken to be decoding
MAX_DECODE_ROWS = 16  # in a mixed batch, sequences with at most this many rows go to the decode launch


@dataclass(frozen=True)
class HopperLaunch:
    """A persistent, warp-specialised kernel for prompts.

    It may be followed by a second launch, which serves decoding sequences or combines splits.

    Attributes:
        request: the request that was decided about.
        config: the kernel's configuration.
        fallback: the launch for scales per token and for tensors that TMA cannot address.
        num_splits: number of splits of the keys of each work tile; a second launch combines them if it is not 1.
        decode: the launch for sequences with at most `max_decode_queries` queries, which runs concurrently; or None.
        section_heads: KV heads that are attended to at a time; None for all.
        fixed_split_size: keys of a split of a batch-invariant plan; else 0.
        column_parts: parts of the columns of values. A work tile has one of them, so scores are computed for each.
    """

    request: Request
    config: HopperConfig
    fallback: PortableLaunch
    num_splits: int = 1
    decode: SplitKVLaunch | None = None
    section_heads: int | None = None
    fixed_split_size: int = 0
    column_parts: int = 1

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "hopper"

    @property
    def max_decode_queries(self) -> int:
        """Most queries of a sequence that the decode launch serves; 0 if there is no decode launch."""
        return 0 if self.decode is None else self.decode.max_decode_queries

    @property
    def heads(self) -> int:
        """Heads of a work tile."""
        return self.config.heads(self.request.spec.group_size)

    @property
    def section(self) -> int | None:
        """Blocks of query heads, of which each fills a work tile, that are attended to at a time; None for all."""
        if self.section_heads is None:
            return None
        return self.section_heads * self.request.spec.group_size // self.heads

    @property
    def cut_slots(self) -> int:
        """Slots for partials of row blocks that programs cut by keys where lengths differ; 0 if none is cut.

        Two sequences have equal lengths if there are as many tokens as bounds allow, and no keys before queries. What
        is decided depends on powers of two of the bounds alone.
        """
        request, bounds = self.request, self.request.bounds
        may_differ = tree.power_of_two(bounds.max_seq_len) > tree.power_of_two(bounds.max_query_len)
        may_differ = may_differ or is_ragged(request)
        no_cuts = request.has_intervals or self.fixed_split_size or self.num_splits > 1
        if request.num_seqs == 1 or not may_differ or no_cuts:
            return 0
        # A program's share of all work, if each row block sees one tile. The last one of a sequence is half full.
        row_blocks = cdiv(tree.power_of_two(bounds.num_tokens), self.config.block_t)
        row_blocks += tree.power_of_two(request.num_seqs) // 2
        work_tiles = row_blocks * (request.spec.num_q_heads // self.heads)
        share = work_tiles * (self.config.block_n + CUT_OVERHEAD) // request.device.num_sms
        if tree.power_of_two(request.keys_seen) <= max(CUT_FROM, share):
            return 0
        return CUT_WARPGROUPS_PER_SM // self.config.num_warpgroups * request.device.num_sms

    @property
    def is_mixed(self) -> bool:
        """Whether programs may take prompts and decoding sequences from either end of the queue (`queue.py`)."""
        request = self.request
        if self.cut_slots:
            return True
        orders = request.num_seqs > 1 and not request.has_intervals and not self.fixed_split_size
        return orders and self.num_splits == 1 and self.decode is None and is_ragged(request)

    @property
    def cut_bytes(self) -> int:
        """Bytes of the partials of row blocks that are cut."""
        columns = cdiv(self.request.spec.head_dim_v, 64) * 64
        return 4 * 64 * self.config.num_warpgroups * self.cut_slots * (columns + 2)

    @property
    def split_rows(self) -> int:
        """Rows of the states of splits: those of the work tiles that run at once, which do not depend on the bounds."""
        return 64 * self.config.num_warpgroups * self.request.device.num_sms if self.num_splits > 1 else 0

    def num_work_tiles(self, num_tokens: int) -> int:
        """Return the most work tiles, before they are split, that `num_tokens` query tokens need over all heads."""
        return count_work_tiles(self.request, self.config, num_tokens) * self.column_parts

    def num_programs(self, num_tokens: int) -> int:
        """Return the programs of the grid: the number that runs at once, or that of work tiles if it is smaller."""
        resident = self.request.device.num_sms * self.config.programs_per_sm
        most_splits = MOST_SPLITS_OF_CUT if self.cut_slots else self.num_splits
        return min(self.num_work_tiles(num_tokens) * most_splits, resident)

    @once
    def scratch_size(self) -> ScratchSize:
        """Return the size of the scratch for counters, partials, states of splits, decode launch and fallback."""
        fallback, counters, states_at = self.fallback.scratch_size(), self.counters, self.states_at
        states = self.cut_bytes + 4 * self.split_rows * (self.request.spec.head_dim_v + 1)
        return ScratchSize(max(states_at + states, fallback.total), counters)

    @property
    def counters(self) -> int:
        """Bytes of all counters."""
        decode = ScratchSize() if self.decode is None else self.decode.scratch_size()
        return max(counter_bytes(self.request.device, 0), decode.counters, self.fallback.scratch_size().counters)

    @property
    def states_at(self) -> int:
        """Byte of the workspace where this launch's own states begin: after those of the concurrent decode launch."""
        decode = 0 if self.decode is None else self.decode.scratch_size().total
        return max(self.counters, 128 * cdiv(decode, 128))

    @property
    def arrivals_at(self) -> int:
        """Byte of the workspace where the counters of arrivals begin. No decode launch uses these."""
        return self.counters - cut_counter_bytes(self.request.device)

    def constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs, without those that a cache decides."""
        from quire.kernels import mods
        from quire.kernels.hopper.softcap import capped_exponents, is_bounded, softcap

        spec, config = self.request.spec, self.config
        score_mod = mods.score_mod(spec)
        if score_mod is mods.softcap and not self.fixed_split_size:  # which rounds as the portable kernels do
            score_mod = capped_exponents if is_bounded(spec) else softcap
        return {
            "NUM_KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim,
            "HEAD_DIM_V": spec.head_dim_v // self.column_parts, "PARTS": self.column_parts,
            "SCORE_MOD": score_mod, "WARPGROUPS": config.num_warpgroups,
            "BLOCK_T": config.block_t, "HEADS": self.heads, "BLOCK_N": config.block_n, "STAGES": config.num_stages,
            "Q_STAGES": config.num_q_stages, "QUANTISED_STAGES": config.num_quantised_stages, "FP8_MMA": config.fp8_mma,
            "FIXED_SPLIT": self.fixed_split_size, "CUT_SLOTS": self.cut_slots, "MIXED": self.is_mixed,
        }  # fmt: skip

    def compile_key(self) -> Hashable:
        """Return a key that differs between launches whose compiled kernels differ, for caches of one kind."""
        decode = None if self.decode is None else self.decode.compile_key()
        return (
            self.name,
            self.num_splits > 1,
            self.section_heads is None,
            self.request.has_intervals,  # arguments that may be None
            self.is_long,
            decode,
            *sorted(self.constexprs().items(), key=lambda item: item[0]),
        )

    @property
    def is_long(self) -> bool:
        """Whether a query may see so many keys that further tensor maps are worth the time to fetch them."""
        return self.request.keys_seen > LONG

    def boxes(self, cache: PagedKVCache) -> tuple[int, int]:
        """Return the rows of a TMA box of keys and values, and those of a second kind of box.

        The first is 0 where rows are gathered. A box of the second kind is a tile that lies in one page; it is 0 where
        that does not pay. Where rows are gathered, it pays for wide heads alone (NVIDIA H200, 2026-11-25).
        """
        block_n, box = self.config.block_n, page_box(cache)
        most_lie_in_one_page = box < block_n <= cache.page_size // 2
        if has_boxes(cache):
            return min(box, block_n), block_n if most_lie_in_one_page and self.is_long else 0
        pays = is_wide(self.request.spec) and cache.dtype.itemsize == 2
        return 0, block_n if most_lie_in_one_page and pays else 0

    def for_cache(self, cache: PagedKVCache) -> "HopperLaunch | PortableLaunch":
        """Return this launch, or its fallback if TMA cannot address the cache."""
        return self.fallback if matrices_of_cache(cache) is None else self

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return the runner for a batch, with scratch in a workspace of `scratch_size` bytes."""
        from quire.kernels.hopper.runner import HopperRunner

        assert workspace is not None
        return HopperRunner(self, batch, workspace)

    def __str__(self) -> str:
        config = self.config
        details = f"{config.num_stages} stages, {self.num_work_tiles(self.request.bounds.num_tokens)} work tiles"
        if config.fp8_mma:
            details += ", products in fp8"
        if self.request.has_intervals:
            details += f", {self.request.per_token}"
        if self.num_splits > 1:
            details += f", num_splits {self.num_splits}"
        if self.cut_slots:
            details += f", long sequences cut by keys, {self.cut_slots} slots"
        if self.fixed_split_size:
            details += f", batch-invariant splits of {self.fixed_split_size} keys"
            details += f", {self.column_parts} parts of columns" if self.column_parts > 1 else ""
        if self.decode is not None:
            details += f"; decode launch: {self.decode}"
        return (
            f"Hopper kernel: {config.block_t} queries × {self.heads} heads × {config.block_n} keys, {details}; "
            f"fallback for scales per token and tensors that TMA cannot address: {self.fallback}"
        )


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
    launch = HopperLaunch(request, config, fallback)
    launch = replace(launch, num_splits=choose_num_splits(launch, costs))
    launch = replace(launch, section_heads=choose_section(launch, costs))
    if options.kernel is None and not cuts_instead(launch):
        is_cut = fallback.name != "block" and not is_wide(spec)
        if is_cut or not prefers_hopper(request):
            return "batches for which the portable kernels are faster"
    return with_decode_launch(launch, costs), reason


def propose_invariant(request: Request, options: Options) -> tuple[HopperLaunch, str] | str:
    """Return the same as `propose`, for a batch-invariant plan.

    Tiles have as many keys as those of the portable kernels, which serve the plan's other batches.
    """
    spec = request.spec
    if request.has_intervals:
        return "intervals of keys with batch_invariant"
    parts = cdiv(spec.head_dim_v, WIDEST_PART)
    if spec.kv_dtype is not spec.dtype:
        return "a quantised cache with batch_invariant"
    if parts > 1 and spec.head_dim_v % (64 * parts):  # 64 columns are a panel of TMA
        return f"values of {spec.head_dim_v} numbers with batch_invariant"
    config = choose_config(request, short=False)
    if isinstance(config, str):
        return config
    if not request.has_cu_seqlens:
        return "a batch without cu_seqlens_q"
    fallback, reason = choose_portable(request, options)
    few_rows = has_one_split(request) and not fills(request, 64 * config.num_warpgroups)
    if options.kernel is None and (fallback.name != "block" or few_rows):
        return "batches for which the portable kernels are faster"
    config, costs = with_keys(config, fallback.config.block_n, spec, parts), tree.cost_model(spec, request.device)
    launch = HopperLaunch(request, config, fallback, fixed_split_size=FIXED_SPLIT_SIZE, column_parts=parts)
    launch = replace(launch, section_heads=choose_section(launch, costs))
    return with_decode_launch(launch, costs, batch_invariant=True), reason


def prefers_hopper(request: Request) -> bool:
    """Return whether the device's tree prefers this kernel. Of a window, the tree is told the keys that it shows."""
    rows_per_seq, rows_per_sm, _, queries_per_seq = rounded(request)
    keys = tree.power_of_two(request.keys_seen)
    return tree.prefers_hopper(request.spec, request.device, rows_per_seq, rows_per_sm, keys, queries_per_seq)


def cuts_instead(launch: HopperLaunch) -> bool:
    """Return whether this launch cuts keys, and not the portable kernels.

    It does if sequences have equally many queries. If not, rows must fill its tiles, and heads its 64 columns: tensor
    cores multiply 128 rows here, and at most 64 there. Which kernel is faster without cuts says nothing about such
    batches.
    """
    if launch.num_splits > 1 and not is_ragged(launch.request):
        return True
    rows_per_seq = rounded(launch.request)[0]
    cuts = launch.num_splits > 1 or launch.cut_slots > 0
    fills_tiles = rows_per_seq >= TALL and launch.request.spec.head_dim > NARROW
    return cuts and launch.fallback.name != "block" and fills_tiles


def is_ragged(request: Request) -> bool:
    """Return whether sequences must differ in their numbers of queries. Some may then have one query."""
    return request.bounds.num_tokens < request.num_seqs * request.bounds.max_query_len


def is_wide(spec: AttentionSpec) -> bool:
    """Return whether the portable kernels pad heads to 256 columns or more, which makes them slow."""
    return max(spec.head_dim, spec.head_dim_v) > WIDE


def is_short(request: Request, costs: CostModel) -> bool:
    """Return whether a row block attends to few keys. Of a prompt, it attends to a half on average."""
    return request.bounds.max_seq_len <= costs.short_context or 2 * request.keys_seen <= costs.short_context


def suits_one_warpgroup(request: Request, costs: CostModel) -> bool:
    """Return whether a program should have one consumer warpgroup, where it may.

    It should on short contexts, or if its rows have room for all rows of a sequence. Chunks on short contexts should
    have two if they then take fewer rounds of programs, or if so few programs run that it pays to split their keys.
    """
    if is_ragged(request) or is_wide(request.spec):
        return is_short(request, costs)
    if request.rows_per_seq <= TALL // 2:
        return True
    flat, tall = choose_config(request, short=True), choose_config(request, short=False)
    if isinstance(flat, str) or isinstance(tall, str) or not is_short(request, costs) or not is_chunk(request):
        return is_short(request, costs)
    num_tokens, num_sms = request.bounds.num_tokens, request.device.num_sms
    tiles, tall_tiles = count_work_tiles(request, flat, num_tokens), count_work_tiles(request, tall, num_tokens)
    rounds, tall_rounds = cdiv(tiles, num_sms * flat.programs_per_sm), cdiv(tall_tiles, num_sms * tall.programs_per_sm)
    return tall_rounds >= rounds and 4 * tall_tiles > num_sms


def is_chunk(request: Request) -> bool:
    """Return whether sequences have equally many queries, and at least three times as many keys before them."""
    return not is_ragged(request) and request.bounds.max_seq_len >= 4 * request.bounds.max_query_len


def count_work_tiles(request: Request, config: HopperConfig, num_tokens: int) -> int:
    """Return the most work tiles that `num_tokens` query tokens need over all heads."""
    if num_tokens == 0:
        return 0
    bounds, block_t, heads = request.bounds, config.block_t, config.heads(request.spec.group_size)
    blocks = min(num_tokens // block_t + request.num_seqs, request.num_seqs * cdiv(bounds.max_query_len, block_t))
    return blocks * (request.spec.num_q_heads // heads)


def choose_config(request: Request, short: bool) -> HopperConfig | str:
    """Return the configuration for a batch; or, in words, what the kernel does not serve."""
    queries, ragged = max(1, request.bounds.max_query_len), is_ragged(request)
    if is_wide(request.spec) and not ragged and min(request.keys_seen, queries) > TALL_WIDE:
        short = False
    queries = tree.power_of_two(queries) if ragged else queries
    return tree.hopper_config(request.spec, request.device, short, queries, ragged)


def with_keys(config: HopperConfig, block_n: int, spec: AttentionSpec, parts: int) -> HopperConfig:
    """Return a configuration with tiles of `block_n` keys, with as many bytes in all stages."""
    before = config.block_n * (spec.head_dim + spec.head_dim_v)
    after = block_n * (spec.head_dim + spec.head_dim_v // parts)
    return replace(config, block_n=block_n, num_stages=max(2, config.num_stages * before // after))


def choose_num_splits(launch: HopperLaunch, costs: CostModel) -> int:
    """Return into how many splits the keys of each work tile are cut.

    1, unless the work tiles would leave half of the device idle. Where lengths may differ, most splits have few keys.
    So there are as many splits as their states have room. With more work tiles, programs cut (`cuts.py`).
    """
    request, config, device = launch.request, launch.config, launch.request.device
    num_work_tiles = launch.num_work_tiles(request.bounds.num_tokens)
    if is_wide(request.spec):
        suits = request.rows_per_seq > FEW_ROWS and 2 * request.keys_seen > costs.short_context
    else:
        has_rows = request.rows_per_seq > SOME_ROWS and not is_ragged(request)
        fills_tile = 8 * request.bounds.max_query_len >= 7 * config.block_t
        has_keys = not is_short(request, costs) or (is_chunk(request) and config.num_warpgroups == 2)
        suits = (has_rows or fills_tile) and has_keys
    if not suits or num_work_tiles == 0 or 2 * num_work_tiles > device.num_sms:
        return 1
    most = request.keys_seen // (costs.hopper_min_tiles_per_split * config.block_n)
    splits = device.num_sms // num_work_tiles
    if is_ragged(request):
        rows = 64 * config.num_warpgroups * device.num_sms
        splits = rows // (request.bounds.num_tokens * request.spec.num_q_heads)
    return max(1, min(splits, most, costs.hopper_max_splits))


def choose_section(launch: HopperLaunch, costs: CostModel) -> int | None:
    """Return how many KV heads are attended to at a time; None for all."""
    spec, request = launch.request.spec, launch.request
    tiles_of_head = launch.num_work_tiles(request.bounds.num_tokens) / spec.num_kv_heads
    if launch.num_splits > 1 or request.bounds.max_query_len <= launch.config.block_t or not tiles_of_head:
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
    max_queries = max(1, MAX_DECODE_ROWS // request.spec.group_size)
    may_decode = request.num_seqs > 1 and is_ragged(request) and launch.num_splits == 1
    if not may_decode or bounds.max_query_len <= max_queries:
        return launch
    if not launch.fixed_split_size:
        # The longest contexts may be those of decoding sequences. Prompts then have short contexts.
        short = bounds.max_query_len <= 2 * costs.short_context and bounds.max_seq_len <= 4 * costs.short_context
        short = short and not may_be_chunks(request)
        config = choose_config(request, short or is_short(request, costs))
        assert isinstance(config, HopperConfig)
        launch = replace(launch, config=config)
    if serves_decoding(launch, costs):
        return launch
    num_tokens = min(bounds.num_tokens, request.num_seqs * max_queries)
    decoding = replace(request, bounds=Bounds(max_queries, bounds.max_seq_len, num_tokens))
    decode, _ = choose_portable(decoding, Options(batch_invariant=batch_invariant))
    if not isinstance(decode, SplitKVLaunch) or (not batch_invariant and is_tiny(decode, request.num_seqs)):
        return launch
    return replace(launch, decode=replace(decode, max_decode_queries=max_queries))


def may_be_chunks(request: Request) -> bool:
    """Return whether most sequences of a ragged batch seem to be chunks on long contexts.

    Contexts are much longer than the most queries, and sequences other than that with the most queries have too many
    of them for most to be decoding. Powers of two decide.
    """
    queries, keys, num_tokens = (tree.power_of_two(bound) for bound in astuple(request.bounds))
    return num_tokens > MOST_OF_OTHERS * tree.power_of_two(request.num_seqs) + queries and keys > 4 * queries


def serves_decoding(launch: HopperLaunch, costs: CostModel) -> bool:
    """Return whether the launch itself serves decoding sequences in a mixed batch.

    Its programs then take prompts and decoding sequences from either end of the queue (`queue.py`). That is slower than
    a decode launch in these cases:

    * a program multiplies 128 rows by the keys of long contexts, which takes longer than to load them;
    * tiles are converted, which takes longer than to load them;
    * several work tiles of a decoding sequence load the same keys, each for some of its heads;
    * keys of long sequences are not cut, since rows see intervals or the plan is batch-invariant.
    """
    request, spec = launch.request, launch.request.spec
    loads_fast = launch.config.num_warpgroups == 1 or request.bounds.max_seq_len <= 4 * costs.short_context
    if is_wide(spec) and spec.head_dim != tree.padded(spec.head_dim):
        loads_fast = True  # the portable kernels multiply more columns than there are
    loads_once = launch.heads == spec.group_size and spec.kv_dtype is spec.dtype
    return loads_fast and loads_once and not (launch.fixed_split_size or request.has_intervals)
