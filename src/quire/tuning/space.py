"""`Tile`: the legal configurations of a launch, stated once, with what they cost in shared memory."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

import torch

from quire.spec import AttentionSpec
from quire.tuning.traits import Traits

HINTS = "waves_per_eu", "matrix_instr_nonkdim"
SMALLEST_BOX = 8  # rows of a page that the copy engine moves at once; it swizzles eight rows together


@dataclass(frozen=True)
class FastTile:
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
FAST_TILES = {64: (128, 4, 2), 128: (128, 2, 2), 256: (64, 2, 1)}
SHORT_TILES = {64: (64, 4, 2), 128: (64, 2, 2)}
FP8_TILES = {128: (128, 3, 2, 2)}  # of products in fp8
BYTE_TILES = {64: (128, 3, 2, 2), 128: (128, 2, 2, 1)}  # of quantised caches, with num_byte_stages last


def fast_tile(spec: AttentionSpec, traits: Traits, short: bool) -> FastTile | str:
    """Return the configuration of the Hopper kernel that serves a spec, or why none does.

    For `short` contexts programs are of one warpgroup: less is left idle where blocks begin and end, and more bytes are copied.
    """
    if not traits.warpgroups:
        return "not a Hopper GPU"
    if spec.dtype.itemsize != 2:
        return f"{spec.dtype} queries"
    quantised = spec.kv_dtype is not spec.dtype
    if spec.head_dim != spec.head_dim_v or spec.head_dim not in (BYTE_TILES if quantised else FAST_TILES):
        return f"head_dim {spec.head_dim}, {spec.head_dim_v} of a {spec.kv_dtype} cache".replace("torch.", "")
    in_fp8 = spec.allow_fp8 and spec.kv_dtype is torch.float8_e4m3fn and spec.head_dim in FP8_TILES
    tiles = FP8_TILES if in_fp8 else BYTE_TILES if quantised else SHORT_TILES if short and spec.head_dim in SHORT_TILES else FAST_TILES
    num_warpgroups = 1 if tiles is SHORT_TILES else 2
    heads = min(spec.group_size & -spec.group_size, 8 * num_warpgroups)  # of a block, a power of two
    return replace(FastTile(num_warpgroups, 64 * num_warpgroups // heads, *tiles[spec.head_dim]), in_fp8=in_fp8)


@dataclass(frozen=True)
class Tile:
    """One configuration of the attention kernel.

    Attributes:
        block_m: rows (query token, query head) of one program; a power of two from 16.
        block_n: keys of one tile; a power of two from 16, unrelated to the page size.
        num_warps: warps of one program.
        num_stages: tiles in flight, this one included.
        unmasked_loop: treat tiles that every row sees whole in a loop without masks. Pays where arithmetic is the limit; where memory is, one
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
    unmasked_loop: bool
    programs_per_sm: int
    block_d: int
    block_dv: int
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0

    @property
    def leaf(self) -> dict:
        """What a decision tree says of it: all but what the spec decides, or is left to the compiler."""
        return {name: value for name, value in asdict(self).items() if name not in ("block_d", "block_dv") and (value or name not in HINTS)}

    @property
    def hints(self) -> dict[str, int]:
        """What the compiler of one target is told by name, and no other knows."""
        return {name: getattr(self, name) for name in HINTS if getattr(self, name)}

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Return an upper bound of the bytes of shared memory this tile needs: the queries, and K and V tiles in flight."""
        kv_tile = self.block_n * (self.block_d * spec.kv_dtype.itemsize + self.block_dv * spec.kv_dtype.itemsize)
        return self.block_m * self.block_d * spec.dtype.itemsize + self.num_stages * kv_tile


ROWS, KEYS, WARPS, STAGES, PROGRAMS = (16, 32, 64, 128), (16, 32, 64, 128, 256), (2, 4, 8), (1, 2, 3, 4), (1, 2, 3, 4)
NUMBERS_PER_THREAD = 160  # of accumulators and scores, beside which 255 registers leave room for the rest
FEW_ROWS = 64  # of decode and drafts, whose keys are split between programs
SIMDS = 4  # of AMD's compute units


def tiles(spec: AttentionSpec, traits: Traits, rows_per_seq: int, block_d: int, block_dv: int, quick: bool = False) -> Iterator[Tile]:
    """Go through the configurations that are legal for a spec on a device, for batches whose sequences have up to `rows_per_seq` rows.

    A block has no more rows than a sequence; what is in flight fits the shared memory, of all programs that a multiprocessor is expected to hold at once;
    and a thread's part of the accumulators and scores fits its registers. What a compiler makes of it is seen only afterwards.

    Args:
        spec: what is computed.
        traits: of the device.
        rows_per_seq: most rows of any sequence.
        block_d: head_dim, padded.
        block_dv: head_dim_v, padded.
        quick: only those that are usual winners, AMD's hints left to the compiler.
    """
    few, roomy = rows_per_seq <= FEW_ROWS, traits.shared_memory >= 128 * 1024
    if quick:
        keys, warps, stages, programs = KEYS[1:4], WARPS[1:], STAGES[1:3], PROGRAMS[:3] if few else PROGRAMS[:1]
    else:
        stages = STAGES[1:] if roomy else STAGES
        if few:
            keys, warps, programs = KEYS[1:] if roomy else KEYS, WARPS, PROGRAMS if rows_per_seq <= 16 else PROGRAMS[:3]
        else:  # arithmetic is the limit: more programs would only share it
            keys, warps, programs = KEYS[1:4], WARPS[1:], PROGRAMS[:2]
    for block_m, block_n, num_warps, num_stages, unmasked, per_sm in product(ROWS, keys, warps, stages, (False, True), programs):
        tile = Tile(block_m, block_n, num_warps, num_stages, unmasked, per_sm, block_d, block_dv)
        fits = tile.shared_memory(spec) * per_sm <= traits.shared_memory
        held = block_m * (block_dv + block_n) // ((64 if traits.mfma else 32) * num_warps) <= NUMBERS_PER_THREAD
        if not (fits and held and block_m <= max(16, rows_per_seq)) or (unmasked and few):
            continue
        if not quick:
            yield from hinted(tile, traits)
        elif (num_warps == 8) == (block_m == 128) and (few or unmasked == (num_stages == deepest(tile, spec, traits))):
            yield tile


def deepest(tile: Tile, spec: AttentionSpec, traits: Traits) -> int:
    """Return how many stages of a tile fit, up to three."""
    return next((n for n in (3, 2) if replace(tile, num_stages=n).shared_memory(spec) * tile.programs_per_sm <= traits.shared_memory), 1)


def hinted(tile: Tile, traits: Traits) -> Iterator[Tile]:
    """Go through what the target's compiler may be told about a tile: nothing; on AMD also to have as many waves on a SIMD as the programs that are expected
    come to, or to take smaller matrix instructions than the largest that fit, which are its own choice.
    """
    waves, rest = divmod(tile.num_warps * tile.programs_per_sm, SIMDS)
    yield tile
    if traits.mfma and waves and not rest:
        yield replace(tile, waves_per_eu=waves)
    if traits.mfma and tile.block_m > 16:
        yield replace(tile, matrix_instr_nonkdim=16)


def fit(tile: Tile, spec: AttentionSpec, traits: Traits) -> Tile:
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
        while tile.shared_memory(spec) > traits.shared_memory and shrink(tile) != tile:
            tile = shrink(tile)
    return tile
