"""The space that `quire tune` sweeps: which configurations are legal for a spec on a device."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from quire.dispatch.config import KernelConfig
from quire.dispatch.device import DeviceProperties
from quire.spec import AttentionSpec

ROWS, KEYS, WARPS, STAGES, PROGRAMS = (16, 32, 64, 128), (16, 32, 64, 128, 256), (2, 4, 8), (1, 2, 3, 4), (1, 2, 3, 4)
NUMBERS_PER_THREAD = 160  # of accumulators and scores, beside which 255 registers leave room for the rest
FEW_ROWS = 64  # of decode and drafts, whose keys are split between programs
SIMDS = 4  # of AMD's compute units


def tiles(
    spec: AttentionSpec,
    properties: DeviceProperties,
    rows_per_seq: int,
    block_d: int,
    block_dv: int,
    quick: bool = False,
) -> Iterator[KernelConfig]:
    """Go through the configurations that are legal for a spec on a device, for batches whose sequences have up to `rows_per_seq` rows.

    A block has no more rows than a sequence; what is in flight fits the shared memory, of all programs that a multiprocessor is expected to hold at once;
    and a thread's part of the accumulators and scores fits its registers. What a compiler makes of it is seen only afterwards.

    Args:
        spec: what is computed.
        properties: of the device.
        rows_per_seq: most rows of any sequence.
        block_d: head_dim, padded.
        block_dv: head_dim_v, padded.
        quick: only those that are usual winners, AMD's hints left to the compiler.
    """
    few, roomy = rows_per_seq <= FEW_ROWS, properties.shared_memory >= 128 * 1024
    if quick:
        keys, warps, stages, programs = KEYS[1:4], WARPS[1:], STAGES[1:3], PROGRAMS[:3] if few else PROGRAMS[:1]
    else:
        stages = STAGES[1:] if roomy else STAGES
        if few:
            keys, warps, programs = KEYS[1:] if roomy else KEYS, WARPS, PROGRAMS if rows_per_seq <= 16 else PROGRAMS[:3]
        else:  # arithmetic is the limit: more programs would only share it
            keys, warps, programs = KEYS[1:4], WARPS[1:], PROGRAMS[:2]
    for block_m, block_n, num_warps, num_stages, unmasked, per_sm in product(
        ROWS, keys, warps, stages, (False, True), programs
    ):
        tile = KernelConfig(block_m, block_n, num_warps, num_stages, unmasked, per_sm, block_d, block_dv)
        fits = tile.shared_memory(spec) * per_sm <= properties.shared_memory
        held = block_m * (block_dv + block_n) // ((64 if properties.has_mfma else 32) * num_warps) <= NUMBERS_PER_THREAD
        if not (fits and held and block_m <= max(16, rows_per_seq)) or (unmasked and few):
            continue
        if not quick:
            yield from hinted(tile, properties)
        elif (num_warps == 8) == (block_m == 128) and (
            few or unmasked == (num_stages == deepest(tile, spec, properties))
        ):
            yield tile


def deepest(tile: KernelConfig, spec: AttentionSpec, properties: DeviceProperties) -> int:
    """Return how many stages of a tile fit, up to three."""
    return next(
        (
            n
            for n in (3, 2)
            if replace(tile, num_stages=n).shared_memory(spec) * tile.programs_per_sm <= properties.shared_memory
        ),
        1,
    )


def hinted(tile: KernelConfig, properties: DeviceProperties) -> Iterator[KernelConfig]:
    """Go through what the target's compiler may be told about a tile: nothing; on AMD also to have as many waves on a SIMD as the programs that are expected
    come to, or to take smaller matrix instructions than the largest that fit, which are its own choice.
    """
    waves, rest = divmod(tile.num_warps * tile.programs_per_sm, SIMDS)
    yield tile
    if properties.has_mfma and waves and not rest:
        yield replace(tile, waves_per_eu=waves)
    if properties.has_mfma and tile.block_m > 16:
        yield replace(tile, matrix_instr_nonkdim=16)
