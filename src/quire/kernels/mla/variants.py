"""The variants of the portable kernel for latents: its configurations for a spec on a device.

Partitions of the batch's tiles fill the device. `kernels/choose.py` takes the variant of least predicted time.
"""

from dataclasses import replace
from functools import lru_cache

from quire.dispatch.config import LATENT_COSTS, KernelConfig, reduced
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import Options, Request, cdiv
from quire.kernels.mla.launch import MLALaunch
from quire.kernels.portable.launch import FIXED_SPLIT_SIZE
from quire.kernels.portable.variants import MAX_UNITS, entry_of, min_partition_tiles, name_of, read_config
from quire.spec import AttentionSpec

# Rows x keys, warps, stages, and programs of an SM, by the bytes of a query's number.
CONFIGS = {2: "16x32 w4 s3 p1, 16x64 w8 s3 p1, 32x64 w8 s3 p1", 4: "16x16 w8 s1 p1"}
INVARIANT = {2: "16x64 w8 s3 p1", 4: "16x16 w8 s1 p1"}
SMALL, SMALL_INVARIANT = 163 * 1024, "16x32 w4 s3 p1"  # bytes of shared memory, and the configuration up to so many


def variants(request: Request, options: Options, within: bool = False) -> dict[str, MLALaunch] | str:
    """Return the launches of the portable kernel for latents by name; or, in words, what it does not serve.

    Args:
        request: the batch.
        options: what the caller of `plan` asks for.
        within: return all that any batch may have whose numbers are of the same kind, for a warm-up.
    """
    spec, device = request.spec, request.device
    if request.per_token is not None:
        return request.per_token
    if options.config is not None:
        configs = {name_of(options.config): options.config}
    else:
        configs = configs_of(spec, device, options.batch_invariant)
    found: dict[str, MLALaunch] = {}
    for name, config in configs.items():
        if config.block_m >= 2 * max(16, request.rows_per_seq) and len(configs) > 1:
            continue  # a configuration of fewer rows has as many row blocks
        chosen = options.num_splits is None and not options.batch_invariant
        launch = MLALaunch(
            request,
            config,
            LATENT_COSTS,
            num_partitions=1,
            combine_cost=LATENT_COSTS.combine_cost if chosen else 0.0,
            fixed_split_size=FIXED_SPLIT_SIZE if options.batch_invariant else 0,
            partials_at_once=int(options.batch_invariant),
        )
        if launch.max_units >= MAX_UNITS and not within:
            return f"{launch.max_units} tiles"
        found[f"mla {name}"] = replace(launch, num_partitions=num_partitions_of(launch, options))
    return found


def num_partitions_of(launch: MLALaunch, options: Options) -> int:
    """Return into how many partitions a batch is cut."""
    num_bands = launch.num_row_blocks(launch.request.bounds.num_tokens)
    if options.num_splits is not None:
        return max(1, options.num_splits * num_bands)
    capacity = launch.most_partitions
    if options.batch_invariant:
        return max(1, min(capacity, launch.max_units))
    tiles = max(1, cdiv(launch.request.bounds.max_seq_len, launch.config.block_n))
    shortest = min_partition_tiles(tiles, launch.combine_cost, launch.costs, launch.two_level_min_tiles)
    return max(1, min(capacity, num_bands * cdiv(tiles, shortest)))


@lru_cache(maxsize=1024)
def configs_of(spec: AttentionSpec, device: DeviceProperties, batch_invariant: bool) -> dict[str, KernelConfig]:
    """Return the configurations for a spec on a device, by name, as shared memory has room.

    Batch-invariant plans have one for all batches. They store the state of a split in the loop over tiles, through
    shared memory.
    """
    text = entry_of(INVARIANT if batch_invariant else CONFIGS, spec.dtype.itemsize)
    if batch_invariant and spec.dtype.itemsize == 2 and device.shared_memory <= SMALL:
        text = SMALL_INVARIANT
    configs = [reduced(read_config(words, spec), spec, device) for words in text.split(", ")]
    if batch_invariant:
        configs = [with_room_for_a_state(config, spec, device) for config in configs]
    return {name_of(config): config for config in configs}


def with_room_for_a_state(config: KernelConfig, spec: AttentionSpec, device: DeviceProperties) -> KernelConfig:
    """Return a configuration with shared memory left for a state."""
    state = 4 * config.block_m * config.block_dv
    while config.num_stages > 2 and config.shared_memory(spec, device) + state > device.shared_memory:
        config = replace(config, num_stages=config.num_stages - 1)
    if config.block_n > 16 and config.shared_memory(spec, device) + state > device.shared_memory:
        config = replace(config, block_n=config.block_n // 2)
    return config


def key_steps(spec: AttentionSpec, device: DeviceProperties) -> set[int]:
    """Return numbers of keys after which other kernels may be launched: those of two levels."""
    tiles = LATENT_COSTS.two_level_min_tiles, LATENT_COSTS.two_level_min_tiles_small
    configs = *configs_of(spec, device, False).values(), *configs_of(spec, device, True).values()
    return {count * config.block_n for count in tiles for config in configs}
