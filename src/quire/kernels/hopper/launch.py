"""`HopperLaunch`: a launch of the Hopper kernel."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.config import HopperConfig, power_of_two
from quire.dispatch.request import Request, cdiv
from quire.kernels.launch import Launch, Runner, constexprs_of, key_of, once, states_at_once
from quire.kernels.portable.launch import PortableLaunch
from quire.kernels.scratch import CUT_WARPGROUPS_PER_SM, ScratchSize, counter_bytes, cut_counter_bytes
from quire.kernels.tma import has_boxes, has_pieces, matrices_of_cache, matrix_of_queries, no_matrix, page_box
from quire.spec import AttentionSpec

if TYPE_CHECKING:  # it imports Triton, which a plan for the CPU must not need
    from quire.kernels.scheduler import Search

MAX_PORTABLE_HEAD_DIM = 128  # columns of a head, beyond which the portable kernels are slow
MAX_KEYS_WITHOUT_TILE_MAPS = 1024  # that a query may see; beyond, further tensor maps are worth the time to fetch them
MAX_SPLITS_OF_CUT = 32  # of the row block of a sequence that has one; 8 of others (`schedule.py`)
SPLITS_ALIKE = 2, 3, 5, 6  # numbers of splits that stand for all others: few and many, even and odd
# With many KV heads, programs attend to sections of at least so many, one after the other. Those that run at once then
# share keys and values in the L2 cache.
SECTION_HEADS = 16
# Of larger caps, sums could overflow float32. With this one, sums over 2^17 keys with values of up to 2^38 do not.
MAX_CAP_WITHOUT_MAXIMUM = 50.0
CAPPED_SCALES = 1e-6, 1e5  # of a score over its cap, whose powers the coefficients in `softcap.py` can hold
# Rows of a box in tiles of 96 keys. Of eight, there are twelve, whose pages find no room in the producer's uniform
# registers: 485 us instead of 349 (NVIDIA H200, 2026-11-26).
MIN_BOX_OF_PIECES = 16


@dataclass(frozen=True)
class HopperLaunch(Launch):
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
        cuts: whether programs cut row blocks by keys where lengths differ.
        has_scales: whether keys and values were decoded (`kernels/decoded`), and heads may have scales.
    """

    request: Request
    config: HopperConfig
    fallback: PortableLaunch
    num_splits: int = 1
    decode: PortableLaunch | None = None
    section_heads: int | None = None
    fixed_split_size: int = 0
    column_parts: int = 1
    cuts: bool = False
    has_scales: bool = False

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "hopper"

    @property
    def max_decode_queries(self) -> int:
        """Most queries of a sequence that the decode launch serves; 0 if there is no decode launch."""
        return 0 if self.decode is None else self.decode.max_decode_queries

    @cached_property
    def heads(self) -> int:
        """Heads of a work tile."""
        return self.config.heads(self.request.spec.group_size)

    @property
    def section(self) -> int | None:
        """Blocks of query heads, of which each fills a work tile, that are attended to at a time; None for all."""
        if self.section_heads is None:
            return None
        return self.section_heads * self.request.spec.group_size // self.heads

    @cached_property
    def cut_slots(self) -> int:
        """Slots for partials of row blocks that programs cut by keys where lengths differ; 0 if none is cut."""
        request = self.request
        no_cuts = request.has_intervals or self.fixed_split_size or self.num_splits > 1 or request.num_seqs == 1
        if not self.cuts or no_cuts:
            return 0
        return CUT_WARPGROUPS_PER_SM // self.config.num_warpgroups * request.device.num_sms

    @property
    def is_mixed(self) -> bool:
        """Whether programs may take prompts and decoding sequences from either end of the queue (`queue.py`)."""
        request = self.request
        if self.cut_slots:
            return True
        orders = request.num_seqs > 1 and not request.has_intervals and not self.fixed_split_size
        return orders and self.num_splits == 1 and self.decode is None and request.is_ragged

    @cached_property
    def part_width(self) -> int:
        """Columns of the values of a work tile."""
        return width_of_part(self.request.spec, self.column_parts)

    @property
    def last_part(self) -> int | None:
        """The first column of the last part, where it begins in the part before it; else None."""
        first = self.request.spec.head_dim_v - self.part_width
        return first if first < (self.column_parts - 1) * self.part_width else None

    @property
    def cut_bytes(self) -> int:
        """Bytes of the partials of row blocks that are cut."""
        columns = cdiv(self.part_width, 64) * 64
        return 4 * 64 * self.config.num_warpgroups * self.cut_slots * (columns + 2)

    @property
    def split_rows(self) -> int:
        """Rows of the states of splits: those of a work tile for each SM, which do not depend on the bounds."""
        return 64 * self.config.num_warpgroups * self.request.device.num_sms if self.num_splits > 1 else 0

    def num_work_tiles(self, num_tokens: int) -> int:
        """Return the most work tiles, before they are split, that `num_tokens` query tokens need over all heads."""
        return count_work_tiles(self.request, self.config, num_tokens) * self.column_parts

    def num_programs(self, num_tokens: int) -> int:
        """Return the programs of the grid: the number that runs at once, or that of work tiles if it is smaller."""
        resident = self.request.device.num_sms * self.config.programs_per_sm
        most_splits = MAX_SPLITS_OF_CUT if self.cut_slots else self.num_splits
        return min(self.num_work_tiles(num_tokens) * most_splits, resident)

    @once
    def scratch_size(self) -> ScratchSize:
        """Return the size of the scratch for counters, partials, states of splits, decode launch and fallback."""
        return ScratchSize(max(self.own_bytes, self.fallback.scratch_size().total), self.counters)

    @property
    def own_bytes(self) -> int:
        """Bytes of scratch without the fallback, which runs in place of the launch."""
        return self.states_at + self.cut_bytes + 4 * self.split_rows * (self.request.spec.head_dim_v + 1)

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

    @property
    def has_warps_of_tokens(self) -> bool:
        """Whether the rows of each warp are tokens of one head, and a tile's scores are one tensor."""
        config = self.config
        tokens = config.block_t // 2 if config.apart else config.block_t
        return tokens % 16 == 0 and config.block_n in (64, 128)

    @property
    def has_room_for_runs(self) -> bool:
        """Whether shared memory holds runs of numbers, too, and scores are one tensor."""
        config, spec = self.config, self.request.spec
        columns, columns_v = (cdiv(number, 64) * 64 for number in (spec.head_dim, self.part_width))
        is_plain = not (self.fixed_split_size or config.fp8_mma or config.num_quantised_stages)
        if not is_plain or config.block_n not in (64, 128) or max(columns, columns_v) > MAX_PORTABLE_HEAD_DIM:
            return False
        rows = 64 * config.num_warpgroups
        tiles = 2 * rows * config.num_q_stages * columns + 2 * config.block_n * config.num_stages * (
            columns + columns_v
        )
        runs = rows * (2 * config.block_n + 16)
        return tiles + runs + 1024 <= self.request.device.shared_memory // config.programs_per_sm

    def constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs, without those that a cache decides."""
        from quire.kernels import mods, user_mods
        from quire.kernels.hopper import runs, windows
        from quire.kernels.hopper.softcap import capped_exponents, softcap

        spec, config, score_mod = self.request.spec, self.config, mods.score_mod(self.request.spec)
        gluon = user_mods.Gluon(self.has_warps_of_tokens, self.has_room_for_runs, windows, runs)
        function, own_runs = user_mods.hopper_functions(spec, gluon)
        # That of batch-invariant plans rounds as the portable kernels do, and that of functions returns scores.
        if score_mod is mods.scaled:
            score_mod = None  # functions scale
        elif score_mod is mods.softcap and not self.fixed_split_size and function is None:
            score_mod = capped_exponents if has_bounded_scores(spec) and not self.has_scales else softcap
        return {
            "NUM_KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim,
            "HEAD_DIM_V": self.part_width, "PARTS": self.column_parts,
            "SCORE_MOD": score_mod, "WARPGROUPS": config.num_warpgroups,
            "BLOCK_T": config.block_t, "HEADS": self.heads, "BLOCK_N": config.block_n, "STAGES": config.num_stages,
            "Q_STAGES": config.num_q_stages, "QUANTISED_STAGES": config.num_quantised_stages, "FP8_MMA": config.fp8_mma,
            "FIXED_SPLIT": self.fixed_split_size, "CUT_SLOTS": self.cut_slots, "MIXED": self.is_mixed,
            "SPLIT_BY_TOKENS": config.apart,
            "PIECES": has_pieces(spec.head_dim_v, spec.kv_dtype.itemsize), "FUNCTION": function,
            "RUNS": own_runs,
        }  # fmt: skip

    @property
    def max_places(self) -> int:
        """Most places of the order: row blocks, and splits of those that are cut."""
        request, block_t = self.request, self.config.block_t
        return count_row_blocks(request, block_t, request.bounds.num_tokens) + self.cut_slots // self.work_tiles_each

    @property
    def work_tiles_each(self) -> int:
        """Work tiles of a row block that is not cut."""
        return self.request.spec.num_q_heads // self.heads * self.column_parts * self.num_splits

    def search(self, asked: tuple[int, int]) -> "Search":
        """Return the launch that finds the schedule, for tiles of so many keys and so many programs."""
        from quire.kernels.schedule import FIELDS, PLACES, hopper_schedule_kernel
        from quire.kernels.scheduler import Search

        (block_n, num_programs), request = asked, self.request
        fixed = (
            *request.spec.window, request.num_seqs, self.max_decode_queries, num_programs, self.work_tiles_each,
            self.cut_slots, self.max_places, int(self.is_mixed), self.config.block_t, block_n,
        )  # fmt: skip
        sizes = self.max_places * FIELDS.value, 3, 3 * request.num_seqs
        return Search(
            hopper_schedule_kernel, cdiv(self.max_places, PLACES.value), sizes, fixed, self.schedule_constexprs()
        )

    def schedule_constexprs(self) -> dict[str, Any]:
        """Return the constexprs and compiler options of the launch that finds the schedule."""
        tokens = power_of_two(self.config.block_t) if self.request.has_intervals else 0
        return {"TOKENS": tokens, "PDL": True, "num_warps": 4, "launch_pdl": True}

    def compile_keys(self) -> frozenset[Hashable]:
        """Return a key of each kernel that is launched, as `Launch.compile_keys` has it."""
        absent = self.section_heads is None, self.last_part is None, self.request.has_intervals  # may be None
        # Of states, which are float32, Triton asks whether 16 divides the strides of heads.
        states = () if self.num_splits == 1 else (self.num_splits * self.request.spec.head_dim_v % 16 == 0,)
        keys = {key_of(self.name, *absent, self.is_long, *states, **constexprs_of(self))}
        keys.add(key_of("hopper_schedule", **self.schedule_constexprs()))
        if states:
            keys.add(key_of("combine", states_at_once(self.num_splits), *states))
        return frozenset(keys) if self.decode is None else frozenset(keys) | self.decode.compile_keys()

    def alike(self) -> "tuple[HopperLaunch, ...]":
        """Return the launches that differ in what is decided by numbers, and for which kernels are compiled."""
        if self.num_splits > 1:
            return tuple(replace(self, num_splits=number) for number in SPLITS_ALIKE)
        heads = self.request.spec.num_kv_heads
        sections = (None, heads) if heads > SECTION_HEADS else (None,)
        return tuple(replace(self, section_heads=number) for number in sections)

    def with_most_partitions(self) -> "HopperLaunch":
        """Return the launch with the most partitions that one with its kernels may have, which is for scratch alone."""
        decode = None if self.decode is None else self.decode.with_most_partitions()
        return replace(self, fallback=self.fallback.with_most_partitions(), decode=decode)

    @property
    def is_long(self) -> bool:
        """Whether a query may see so many keys that further tensor maps are worth the time to fetch them."""
        return self.request.keys_seen > MAX_KEYS_WITHOUT_TILE_MAPS

    def config_of(self, cache: PagedKVCache) -> HopperConfig:
        """Return the configuration, with smaller tiles where boxes are small, or where most tiles can be one box."""
        smaller = self.config.with_smaller_tiles()
        has_smaller = page_box(cache) < MIN_BOX_OF_PIECES or fits_one_box(smaller.block_n, cache)
        return smaller if has_smaller else self.config

    def boxes(self, cache: PagedKVCache) -> tuple[int, int]:
        """Return the rows of a TMA box of keys and values, and those of a second kind of box.

        The first is 0 where rows are gathered. A box of the second kind is a tile that lies in one page; it is 0 where
        that does not pay. Where rows are gathered, it pays for wide heads alone (NVIDIA H200, 2026-11-25).
        """
        block_n, box = self.config_of(cache).block_n, page_box(cache)
        if has_boxes(cache):
            even = block_n & -block_n  # a box is in one buffer
            is_box = even == block_n and fits_one_box(block_n, cache)
            return min(box, even), block_n if is_box and self.is_long else 0
        pays = is_wide(self.request.spec) and cache.dtype.itemsize == 2
        return 0, block_n if fits_one_box(block_n, cache) and pays else 0

    def for_cache(self, cache: PagedKVCache, q: Any = None) -> "HopperLaunch | PortableLaunch":
        """Return this launch, or its fallback if TMA cannot address the cache, or queries if they are given."""
        served = matrices_of_cache(cache) is not None
        if q is not None and q.shape[0]:
            served = served and matrix_of_queries(q) is not None
        return self if served else self.fallback

    def unserved(self, cache: PagedKVCache, q: Any = None) -> str:
        """Return why the fallback serves a cache or queries: what TMA cannot address."""
        if matrices_of_cache(cache) is None:
            return no_matrix(cache)
        return f"queries with strides {q.stride()} at an address of {q.data_ptr() % 16} modulo 16"

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return the runner for a batch, with scratch in a workspace of `scratch_size` bytes."""
        from quire.kernels.hopper.runner import HopperRunner

        assert workspace is not None
        return HopperRunner(self, batch, workspace)

    def __str__(self) -> str:
        fallback = f"fallback for scales per token and tensors that TMA cannot address: {self.fallback}"
        return f"{self.describe()}; {fallback}"

    def describe(self) -> str:
        """Describe the launch without its fallback."""
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
        if self.column_parts > 1:
            details += f", {self.column_parts} parts of columns"
        if self.decode is not None:
            details += f"; decode launch: {self.decode}"
        return f"Hopper kernel: {config.block_t} queries × {self.heads} heads × {config.block_n} keys, {details}"


def width_of_part(spec: AttentionSpec, parts: int) -> int:
    """Return the columns of each of so many parts of a head's values: whole panels of TMA, or all columns."""
    return spec.head_dim_v if parts == 1 else 64 * cdiv(spec.head_dim_v, 64 * parts)


def fits_one_box(keys: int, cache: PagedKVCache) -> bool:
    """Return whether most tiles of so many keys lie in one page, and have more rows than a box of the first kind."""
    return page_box(cache) < keys <= cache.page_size // 2


def has_bounded_scores(spec: AttentionSpec) -> bool:
    """Return whether a softcap bounds scores so that the softmax needs no maximum (`capped.py`)."""
    least, most = CAPPED_SCALES
    cap = spec.softcap or 0.0
    has_range = spec.kv_dtype == torch.bfloat16 and 0 < cap <= MAX_CAP_WITHOUT_MAXIMUM
    return has_range and least <= abs(spec.softmax_scale) / cap <= most


def is_wide(spec: AttentionSpec) -> bool:
    """Return whether the portable kernels pad heads to 256 columns or more, which makes them slow."""
    return max(spec.head_dim, spec.head_dim_v) > MAX_PORTABLE_HEAD_DIM


def count_work_tiles(request: Request, config: HopperConfig, num_tokens: int) -> int:
    """Return the most work tiles that `num_tokens` query tokens need over all heads."""
    if num_tokens == 0:
        return 0
    heads = config.heads(request.spec.group_size)
    return count_row_blocks(request, config.block_t, num_tokens) * (request.spec.num_q_heads // heads)


def count_row_blocks(request: Request, block_t: int, num_tokens: int) -> int:
    """Return the most row blocks of `block_t` tokens of a sequence that `num_tokens` query tokens need."""
    by_sequence = request.num_seqs * cdiv(request.bounds.max_query_len, block_t)
    return min(num_tokens // block_t + request.num_seqs, by_sequence)
