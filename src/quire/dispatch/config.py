"""`KernelConfig` and `HopperConfig`: the configurations of a launch, and what they cost in shared memory."""

from dataclasses import asdict, dataclass, replace

import torch

from quire.dispatch.device import DeviceProperties
from quire.spec import AttentionSpec

HINTS = "waves_per_eu", "matrix_instr_nonkdim"
MIN_TMA_BOX = 8  # rows of a page that the copy engine moves at once; it swizzles eight rows together


@dataclass(frozen=True)
class HopperConfig:
    """One configuration of the Hopper kernel for prompts.

    Attributes:
        num_warpgroups: warpgroups of a program that compute, 64 rows of a block each.
        block_t: query tokens of a block, which has as many heads of one KV head as fill its rows.
        block_n: keys of one tile.
        num_stages: tiles of keys, and of values, in flight or in use.
        num_blocks: blocks whose queries are in shared memory at once.
        num_byte_stages: tiles of a quantised cache's keys, and of its values, that are in shared memory before they are converted; else 0.
        in_fp8: whether products are in fp8: the keys' tiles are used as they are.
    """

    num_warpgroups: int
    block_t: int
    block_n: int
    num_stages: int
    num_blocks: int
    num_byte_stages: int = 0
    in_fp8: bool = False

    @property
    def heads(self) -> int:
        """Heads of a block."""
        return 64 * self.num_warpgroups // self.block_t

    @property
    def programs_per_sm(self) -> int:
        """Programs that a multiprocessor holds at once."""
        return 3 - self.num_warpgroups


# By head_dim: block_n, num_stages, num_blocks. Two warpgroups have all 227 KiB of shared memory, one has half of it.
LONG_CONFIGS = {64: (128, 4, 2), 128: (128, 2, 2), 256: (64, 2, 1)}
SHORT_CONFIGS = {64: (64, 4, 2), 128: (64, 2, 2)}
FP8_CONFIGS = {128: (128, 3, 2, 2)}  # of products in fp8
QUANTISED_CONFIGS = {64: (128, 3, 2, 2), 128: (128, 2, 2, 1)}  # of quantised caches, with num_byte_stages last


def hopper_config(spec: AttentionSpec, properties: DeviceProperties, short: bool) -> HopperConfig | str:
    """Return the configuration of the Hopper kernel that serves a spec, or why none does.

    For `short` contexts programs are of one warpgroup: less is left idle where blocks begin and end, and more bytes are copied.
    """
    if not properties.has_wgmma:
        return "not a Hopper GPU"
    if spec.dtype.itemsize != 2:
        return f"{spec.dtype} queries"
    quantised = spec.kv_dtype is not spec.dtype
    if spec.head_dim != spec.head_dim_v or spec.head_dim not in (QUANTISED_CONFIGS if quantised else LONG_CONFIGS):
        return f"head_dim {spec.head_dim}, {spec.head_dim_v} of a {spec.kv_dtype} cache".replace("torch.", "")
    in_fp8 = spec.allow_fp8 and spec.kv_dtype is torch.float8_e4m3fn and spec.head_dim in FP8_CONFIGS
    tiles = (
        FP8_CONFIGS
        if in_fp8
        else QUANTISED_CONFIGS
        if quantised
        else SHORT_CONFIGS
        if short and spec.head_dim in SHORT_CONFIGS
        else LONG_CONFIGS
    )
    num_warpgroups = 1 if tiles is SHORT_CONFIGS else 2
    heads = min(spec.group_size & -spec.group_size, 8 * num_warpgroups)  # of a block, a power of two
    return replace(HopperConfig(num_warpgroups, 64 * num_warpgroups // heads, *tiles[spec.head_dim]), in_fp8=in_fp8)


@dataclass(frozen=True)
class KernelConfig:
    """One configuration of the attention kernel.

    Attributes:
        block_m: rows (query token, query head) of one program; a power of two from 16.
        block_n: keys of one tile; a power of two from 16, unrelated to the page size.
        num_warps: warps of one program.
        num_stages: tiles in flight, this one included.
        full_tile_loop: treat tiles that every row sees whole in a loop without masks. Pays where arithmetic is the limit; where memory is, one
            loop keeps the loads of the last tile in flight.
        programs_per_sm: programs that one multiprocessor is expected to hold at once; how many the keys are split for.
        block_d: head_dim, padded to a power of two.
        block_dv: head_dim_v, padded to a power of two.
        waves_per_eu: AMD: waves that a SIMD shall hold at once, for which the compiler saves registers; 0 leaves it to the compiler, as does the next.
        matrix_instr_nonkdim: AMD: rows and columns of a matrix instruction, 16 or 32.
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

    @property
    def leaf(self) -> dict:
        """What a decision tree says of it: all but what the spec decides, or is left to the compiler."""
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in ("block_d", "block_dv") and (value or name not in HINTS)
        }

    @property
    def hints(self) -> dict[str, int]:
        """What the compiler of one target is told by name, and no other knows."""
        return {name: getattr(self, name) for name in HINTS if getattr(self, name)}

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Return an upper bound of the bytes of shared memory this tile needs: the queries, and K and V tiles in flight."""
        kv_tile = self.block_n * (self.block_d * spec.kv_dtype.itemsize + self.block_dv * spec.kv_dtype.itemsize)
        return self.block_m * self.block_d * spec.dtype.itemsize + self.num_stages * kv_tile


def fit(tile: KernelConfig, spec: AttentionSpec, properties: DeviceProperties) -> KernelConfig:
    """Return `tile`, or the nearest smaller one whose shared memory fits the device: fewer stages first (down to two), then shorter tiles, then one
    stage, then fewer rows. A 16 × 16 tile of one stage always fits.
    """
    smaller = (
        lambda t: replace(t, num_stages=t.num_stages - 1) if t.num_stages > 2 else t,
        lambda t: replace(t, block_n=t.block_n // 2) if t.block_n > 32 else t,
        lambda t: replace(t, num_stages=1),
        lambda t: replace(t, block_m=t.block_m // 2) if t.block_m > 16 else t,
        lambda t: replace(t, block_n=16),
    )
    for shrink in smaller:
        while tile.shared_memory(spec) > properties.shared_memory and shrink(tile) != tile:
            tile = shrink(tile)
    return tile
