"""The space that `quire tune` sweeps: the configurations that are legal for a spec on a device."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from quire.dispatch.config import KernelConfig
from quire.dispatch.device import DeviceProperties
from quire.dispatch.tree import padded
from quire.spec import AttentionSpec

BLOCK_M = (16, 32, 64, 128)
BLOCK_N = (16, 32, 64, 128, 256)
NUM_WARPS = (2, 4, 8)
NUM_STAGES = (1, 2, 3, 4)
PROGRAMS_PER_SM = (1, 2, 3, 4)
MAX_VALUES_PER_THREAD = 160  # of accumulators and scores; the rest of a thread's 255 registers hold everything else
MAX_SPLIT_ROWS = 64  # sequences of at most so many rows (decode, drafts) have their keys split between programs
LARGE_SHARED_MEMORY = 128 * 1024  # bytes
SIMDS_PER_CU = 4  # AMD


def legal_configs(
    spec: AttentionSpec, properties: DeviceProperties, rows_per_seq: int, quick: bool = False
) -> Iterator[KernelConfig]:
    """Go through the configurations that are legal for a spec on a device.

    A block has no more rows than a sequence. The tiles in flight fit the shared memory, for all programs that an SM is
    expected to hold at once. A thread's accumulators and scores fit its registers; whether the compiler spills is known
    only after compilation. Latents of a sequence are always split between programs.

    Args:
        spec: what is computed.
        properties: of the device.
        rows_per_seq: most rows of any sequence: (query token, query head of one KV head) pairs.
        quick: go through the usual winners only, and leave AMD's hints to the compiler.
    """
    block_d, block_dv = padded(spec.head_dim), padded(spec.head_dim_v)
    splits_keys = spec.latent or rows_per_seq <= MAX_SPLIT_ROWS
    wide_rows = 32 if spec.latent else 128  # of blocks for which eight warps usually win
    block_ns, warps, stages, programs = ranges(properties, rows_per_seq, splits_keys, quick)
    for block_m, block_n, num_warps, num_stages, full_tile_loop, programs_per_sm in product(
        BLOCK_M, block_ns, warps, stages, (False, True), programs
    ):
        config = KernelConfig(
            block_m, block_n, num_warps, num_stages, full_tile_loop, programs_per_sm, block_d, block_dv
        )
        num_threads = (64 if properties.has_mfma else 32) * num_warps
        if (
            config.shared_memory(spec, properties) * programs_per_sm > properties.shared_memory
            or block_m * (block_dv + block_n) // num_threads > MAX_VALUES_PER_THREAD
            or block_m > max(16, rows_per_seq)
            or (full_tile_loop and splits_keys)
        ):
            continue
        if not quick:
            yield from hinted(config, properties)
        elif (num_warps == 8) == (block_m >= wide_rows) and (
            # Prompts: a full-tile loop with as many stages as fit, and one loop with masks with fewer.
            splits_keys or full_tile_loop == (num_stages == max_stages(config, spec, properties))
        ):
            yield config


def ranges(
    properties: DeviceProperties, rows_per_seq: int, splits_keys: bool, quick: bool
) -> tuple[tuple[int, ...], ...]:
    """Return the values of block_n, num_warps, num_stages and programs_per_sm that are tried."""
    if quick:
        programs = PROGRAMS_PER_SM[:3] if splits_keys else PROGRAMS_PER_SM[:1]
        return BLOCK_N[1:4], NUM_WARPS[1:], NUM_STAGES[1:3], programs
    large = properties.shared_memory >= LARGE_SHARED_MEMORY
    stages = NUM_STAGES[1:] if large else NUM_STAGES
    if not splits_keys:  # prompts are bound by arithmetic, which more programs per SM only divide
        return BLOCK_N[1:4], NUM_WARPS[1:], stages, PROGRAMS_PER_SM[:2]
    programs = PROGRAMS_PER_SM if rows_per_seq <= 16 else PROGRAMS_PER_SM[:3]
    return BLOCK_N[1:] if large else BLOCK_N, NUM_WARPS, stages, programs


def max_stages(config: KernelConfig, spec: AttentionSpec, properties: DeviceProperties) -> int:
    """Return how many stages of a configuration fit the shared memory, up to three."""
    for num_stages in (3, 2):
        per_program = replace(config, num_stages=num_stages).shared_memory(spec, properties)
        if per_program * config.programs_per_sm <= properties.shared_memory:
            return num_stages
    return 1


def hinted(config: KernelConfig, properties: DeviceProperties) -> Iterator[KernelConfig]:
    """Go through a configuration with each hint that the target's compiler may be given: none, and on AMD two more.

    One asks for registers for as many waves per SIMD as the expected programs come to. The other asks for 16 × 16
    matrix instructions; the compiler's own choice is the largest that fit.
    """
    yield config
    waves, rest = divmod(config.num_warps * config.programs_per_sm, SIMDS_PER_CU)
    if properties.has_mfma and waves and not rest:
        yield replace(config, waves_per_eu=waves)
    if properties.has_mfma and config.block_m > 16:
        yield replace(config, matrix_instr_nonkdim=16)
