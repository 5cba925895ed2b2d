"""`KernelConfig` and `HopperConfig`: the configurations of a launch, and what they cost in shared memory.

`CostModel` holds measured constants of the schedule of partitions. Each kernel family lists its configurations in
`variants.py`, and `kernels/choose.py` chooses among them.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import cache

from quire.dispatch.device import DeviceProperties
from quire.spec import AttentionSpec

HINTS = "waves_per_eu", "matrix_instr_nonkdim"
HOPPER_QUANTISED = (64, 64), (128, 128)  # columns of keys and values of a quantised cache that the Hopper kernel serves
ROWS_OF_PRODUCT = 16  # of mma.sync
LEAST_OWN_ROWS = 64  # of a row block, whose warps have rows of their own
OF_SUMS = 256  # bytes of shared memory, through which warps say whether a sum is too large
MIN_TMA_BOX = 8  # least rows of a page in one TMA load, as the layouts of swizzled tiles have


@dataclass(frozen=True)
class HopperConfig:
    """One configuration of the Hopper kernel for prompts.

    Attributes:
        num_warpgroups: consumer warpgroups of a CTA; each owns 64 rows of a work tile.
        block_t: query tokens of a work tile. As many heads of one KV head as fit share its rows.
        block_n: keys of one tile.
        num_stages: stages of the pipelines of K and V tiles, at least 2: the producer may load a tile before it hands
            over the one before.
        num_q_stages: stages of the pipeline of queries.
        num_quantised_stages: stages of the pipelines of unconverted K and V tiles of a quantised cache; else 0.
        fp8_mma: whether products are in fp8. K tiles are then used as they are stored.
        apart: whether each of two warpgroups has half of a work tile's tokens, of all its heads, not half of its rows.
            The second one then skips work tiles that have few tokens, as those of decoding sequences.
    """

    num_warpgroups: int
    block_t: int
    block_n: int
    num_stages: int
    num_q_stages: int
    num_quantised_stages: int = 0
    fp8_mma: bool = False
    apart: bool = False

    def __post_init__(self) -> None:
        require_int("num_warpgroups", self.num_warpgroups, 1, 2)
        require_int("block_t", self.block_t, 1, 64 * self.num_warpgroups)
        require_int("block_n", self.block_n, 16, 256, multiple_of=16)
        require_int("num_stages", self.num_stages, 2)
        require_int("num_q_stages", self.num_q_stages, 1)
        require_int("num_quantised_stages", self.num_quantised_stages, 0)
        if self.apart and (self.num_warpgroups != 2 or self.block_t % 2):
            raise ValueError(
                f"apart must be False with num_warpgroups {self.num_warpgroups} and block_t {self.block_t}; "
                "two warpgroups share an even number of tokens"
            )
        if self.fp8_mma not in (False, True):
            raise ValueError(f"fp8_mma must be a bool, got {self.fp8_mma!r}; pass True or False")
        if self.num_quantised_stages and self.num_warpgroups != 2:
            raise ValueError(
                f"num_warpgroups must be 2 where num_quantised_stages is not 0, got {self.num_warpgroups}; "
                "a quantised cache needs two warpgroups that compute and a third that converts"
            )
        if self.fp8_mma and not self.num_quantised_stages:
            raise ValueError(
                "num_quantised_stages must be at least 1 where fp8_mma is True, got 0; pass how many tiles to buffer"
            )

    def heads(self, group_size: int) -> int:
        """Return how many heads of one KV head a work tile has: the most that fit and that divide the group."""
        return heads_that_fit(64 * self.num_warpgroups, self.block_t, group_size)

    def with_smaller_tiles(self) -> "HopperConfig":
        """Return this configuration with a power of two of keys in a tile, and as many bytes in all stages."""
        block_n = largest_power_of_two(self.block_n)
        if block_n == self.block_n:  # asked of each layer
            return self
        return replace(self, block_n=block_n, num_stages=self.num_stages * self.block_n // block_n)

    @property
    def programs_per_sm(self) -> int:
        """CTAs that an SM holds at once."""
        return 3 - self.num_warpgroups


@cache
def heads_that_fit(rows: int, block_t: int, group_size: int) -> int:
    """Return how many heads of `block_t` rows each fit, if they are to divide the group."""
    return max(heads for heads in range(1, rows // block_t + 1) if group_size % heads == 0)


def hopper_refusal(spec: AttentionSpec, properties: DeviceProperties) -> str | None:
    """Return why no configuration of the Hopper kernel serves a spec on a device; None if one does."""
    if not properties.has_wgmma:
        return "GPUs other than Hopper"
    if spec.dtype.itemsize != 2:
        return f"{spec.dtype} queries".removeprefix("torch.")
    if spec.kv_format is not None:
        return f"caches in {spec.kv_format}"
    if spec.kv_dtype is not spec.dtype and (spec.head_dim, spec.head_dim_v) not in HOPPER_QUANTISED:
        values = f" with head_dim_v {spec.head_dim_v}" if spec.head_dim_v != spec.head_dim else ""
        return f"head_dim {spec.head_dim}{values} of a {spec.kv_dtype} cache".replace("torch.", "")
    return None


@dataclass(frozen=True)
class KernelConfig:
    """One configuration of the portable kernel.

    Attributes:
        block_m: rows (query token, query head) of one program; a power of two from 8. Products of fewer than 16 are
            turned (`kernels/panels.py`).
        block_n: keys of one tile; a power of two from 16, unrelated to the page size.
        num_warps: warps of one program.
        num_stages: tiles in flight, the current one included.
        full_tile_loop: process full tiles, of which every row sees every key, in a separate loop, without masks.
            This is faster where arithmetic is the limit. Where memory is the limit, one loop is faster, since it keeps
            the loads of the next tile in flight from the first tile to the last.
        programs_per_sm: programs that one SM is expected to hold at once. Partitions are as many.
        block_d: head_dim, padded to a power of two.
        block_dv: head_dim_v, padded to a power of two.
        waves_per_eu: AMD: waves that a SIMD must hold at once, for which the compiler saves registers; 0 leaves it to
            the compiler.
        matrix_instr_nonkdim: AMD: rows and columns of a matrix instruction, 16 or 32; 0 leaves it to the compiler.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    full_tile_loop: bool
    programs_per_sm: int
    block_d: int
    block_dv: int
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0

    def __post_init__(self) -> None:
        require_int("block_m", self.block_m, 8, power_of_two=True)
        for name in ("block_n", "block_d", "block_dv"):
            require_int(name, getattr(self, name), 16, power_of_two=True)
        require_int("num_warps", self.num_warps, 1, 32, power_of_two=True)
        require_int("num_stages", self.num_stages, 1)
        require_int("programs_per_sm", self.programs_per_sm, 1)
        require_int("waves_per_eu", self.waves_per_eu, 0)
        if not isinstance(self.full_tile_loop, bool):
            raise ValueError(f"full_tile_loop must be a bool, got {self.full_tile_loop!r}; pass True or False")
        if self.matrix_instr_nonkdim not in (0, 16, 32):
            raise ValueError(
                f"matrix_instr_nonkdim must be 0, 16 or 32, got {self.matrix_instr_nonkdim!r}; "
                "0 leaves it to the compiler"
            )

    @property
    def hints(self) -> dict[str, int]:
        """Options that the compiler for AMD GPUs takes and others do not, by name."""
        return {name: getattr(self, name) for name in HINTS if getattr(self, name)}

    def has_own_rows(self, properties: DeviceProperties) -> bool:
        """Whether each warp multiplies rows of its own by mma.sync, not some columns of all rows."""
        return properties.has_mma_sync and self.block_m >= max(LEAST_OWN_ROWS, ROWS_OF_PRODUCT * self.num_warps)

    def shared_memory(self, spec: AttentionSpec, properties: DeviceProperties) -> int:
        """Return an upper bound of the bytes of shared memory, for the queries and all K and V tiles in flight.

        mma.sync multiplies registers: the tile that is multiplied is no longer in shared memory. Page numbers may be
        there, whether a sum is too large, and probabilities where warps share the columns of few rows.
        """
        if spec.latent:
            return self._latent_shared_memory(spec, properties)
        kv_tile = self.block_n * (self.block_d * spec.kv_dtype.itemsize + self.block_dv * spec.kv_dtype.itemsize)
        num_bytes = self.block_m * self.block_d * spec.dtype.itemsize + self.num_stages * kv_tile
        if properties.has_mma_sync and spec.dtype.itemsize == 2 and self.num_stages > 1:
            num_bytes += 4 * (self.num_stages - 1) * self.block_n - kv_tile + OF_SUMS
            if not self.has_own_rows(properties):
                num_bytes += self.block_m * self.block_n * spec.dtype.itemsize
        return num_bytes

    def _latent_shared_memory(self, spec: AttentionSpec, properties: DeviceProperties) -> int:
        """Return the bytes for queries, latent tiles and probabilities; keys and values are the same bytes.

        One tile is not in flight while it is multiplied, except by wgmma, which reads it in shared memory. A quantised
        tile is converted into a further one.
        """
        width = self.block_dv + spec.qk_rope_head_dim
        tiles = max(1, self.num_stages - (self.block_m < 64 or properties.has_mma_sync)) * spec.kv_dtype.itemsize
        if spec.kv_dtype is not spec.dtype:
            tiles += spec.dtype.itemsize
        return (
            width * (self.block_m * spec.dtype.itemsize + self.block_n * tiles)
            + spec.dtype.itemsize * self.block_m * self.block_n
        )


def reduced(config: KernelConfig, spec: AttentionSpec, properties: DeviceProperties) -> KernelConfig:
    """Return `config`, or the nearest smaller one that fits the device's shared memory.

    The order is: fewer stages, down to two; shorter tiles; one stage; fewer rows. 16 rows × 16 keys with one stage
    always fit.
    """
    steps = (
        lambda c: replace(c, num_stages=c.num_stages - 1) if c.num_stages > 2 else c,
        lambda c: replace(c, block_n=c.block_n // 2) if c.block_n > 32 else c,
        lambda c: replace(c, num_stages=1),
        lambda c: replace(c, block_m=c.block_m // 2) if c.block_m > 16 else c,
        lambda c: replace(c, block_n=16),
    )
    for step in steps:
        while config.shared_memory(spec, properties) > properties.shared_memory and step(config) != config:
            config = step(config)
    return config


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Constants, measured on one GPU, by which kernels with partitions cut a batch by its lengths.

    They change the speed of a result and the order of its sums, nothing else.

    A tile is `KernelConfig.block_n` keys of one sequence. A partition is what one program of the portable kernel
    attends to. A partial is the state that a program leaves of a block of rows that other programs attend to as well.
    Combining reduces a block's partials to its result.

    Attributes:
        combine_cost: time to combine one partial, in units of the time to attend to one tile. More splits shorten the
            loop over tiles and add partials; this constant decides where the sum of both is least.
        combine_launch_cost: the same where another launch combines: its programs share the partials of a block.
        two_level_combine_discount: factor on `combine_cost` for sequences so long that their partials are combined in
            two levels, by several programs at once.
        min_split_tiles: a sequence of at most this many tiles is not split. Partitions may also be this many tiles
            longer, if they then end where equal sequences do; a thirty-second of their length in any launch.
        early_exit_max_tiles: a program whose partition has at most this many tiles lets the next kernel in the stream
            start before it combines (programmatic dependent launch). After longer partitions, the next kernel's
            programs would take the SMs that finish first.
        full_tile_loop_min_tiles: a program that has partitions has a full-tile loop only where it has more than this
            many tiles of a block.
        two_level_min_partials: a block's partials are combined in two levels if there are more of them than this; for
            blocks of a single query, than twice this.
        many_partitions: sequences count as long only where the device holds at least this many programs per KV head at
            once.
        two_level_min_tiles: sequences of more tiles than this count as long: their partials are expected to be combined
            in two levels, so they are split further. Single-query plans without long sequences have one level.
        two_level_min_tiles_small: the same limit where the device holds at least `2 * many_partitions` programs per
            KV head and a partial has fewer than 16 rows.
    """

    combine_cost: float
    combine_launch_cost: float
    two_level_combine_discount: float
    min_split_tiles: int
    early_exit_max_tiles: int
    full_tile_loop_min_tiles: int
    two_level_min_partials: int
    many_partitions: int
    two_level_min_tiles: int
    two_level_min_tiles_small: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                require_int(field.name, value, 0)
            elif not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
                raise ValueError(f"{field.name} must be a finite number from 0, got {value!r}; pass a measured ratio")


def power_of_two(value: float) -> int:
    """Round up to a power of two; return 1 for numbers below it."""
    return 1 << (math.ceil(value) - 1).bit_length() if value > 1 else 1


def padded(dim: int) -> int:
    """Round a head dim up to the power of two that a tile of it has."""
    return max(16, power_of_two(dim))


def largest_power_of_two(number: int) -> int:
    """Return the largest power of two that is not above a number."""
    return 1 << (number.bit_length() - 1)


def require_int(
    name: str, value: object, least: int, most: int | None = None, power_of_two: bool = False, multiple_of: int = 1
) -> None:
    """Raise ValueError unless `value` is an int within the limits, and a power of two or a multiple where asked."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= (most or value):
        if value % multiple_of == 0 and (not power_of_two or value & (value - 1) == 0):
            return
    kind = "an int" if multiple_of == 1 else f"a multiple of {multiple_of}"
    kind = "a power of two" if power_of_two else kind
    limits = f"from {least} to {most}" if most else f"of at least {least}"
    raise ValueError(f"{name} must be {kind} {limits}, got {value!r}; pass one within these limits")


# Measured on an NVIDIA H200, and used on every device.
COSTS = CostModel(
    combine_cost=0.29,  # 2026-11-20: combining eight partials takes 1.5 us, one tile 0.65
    # 2026-11-26: one sequence of 2,048 to 32,768 keys, heads 16/1, 64/4 and 32/8; of 16/1 on 8,192 keys, 64 partials
    # took 7.7 us, 32 9.2 and 128 9.3.
    combine_launch_cost=0.02,
    two_level_combine_discount=0.1,  # 2026-11-21: 15 to 37 % less time for one sequence of 16,384 and 65,536 keys
    min_split_tiles=4,
    early_exit_max_tiles=8,
    # 2026-11-21: 32 and 64 queries on 65,536 keys from 145 to 116 and from 247 to 196 us; 3 us more where partitions
    # are short.
    full_tile_loop_min_tiles=8,
    two_level_min_partials=8,  # 2026-11-21: two levels for fewer than nine partials cost 1.6 us at 8 x 1,024
    many_partitions=64,  # 2026-11-21: of 33 partitions for each of 8 KV heads, two levels cost 1.1 us at 4,096 keys
    two_level_min_tiles=96,  # 2026-11-21: below some 3,072 keys, code of the second level costs 0.1 to 0.4 us
    two_level_min_tiles_small=48,  # the same for 2 KV heads and fewer
)
# 2026-11-22: 8,192 keys of one sequence took 22 us with two levels and 41 with one, 16 heads.
LATENT_COSTS = replace(COSTS, many_partitions=16)
