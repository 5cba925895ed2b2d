"""Decision trees: data that choose the kernel, its configuration and the cost model for a spec on a device.

A tree is a JSON file with its provenance inside. `trees/generic.json` serves every device. A fitted tree, written by
`quire tune`, says for which device properties (`properties`) and for which dtypes and head dims (`covers`) it was
fitted. It is used where both match, whatever the device's name. The user's trees take precedence over the shipped ones.

Nothing is read at import. `tree_file.py` reads and checks the files.
"""

import math
from dataclasses import asdict
from functools import cache, lru_cache
from typing import Any

import torch

from quire.dispatch.config import CostModel, HopperConfig, KernelConfig, hopper_refusal, reduced
from quire.dispatch.device import DeviceProperties
from quire.dispatch.tree_file import GENERIC, constants, load_tree, shipped_trees, user_trees
from quire.spec import AttentionSpec

FINEST = 64  # the smallest rows_per_sm is 1 / FINEST
ROWS_OF_WARPGROUP = 64  # of the Hopper kernel
ROWS_OF_TILES = 64, 128  # of a work tile, with one and with two warpgroups
CHOICES: list[Any] = []  # functions that cache choices from trees, for `forget_trees`


@cache
def fitted_trees(properties: DeviceProperties) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return the trees that were fitted to a device with these properties, each with its name or path.

    The user's trees come before the shipped ones.
    """
    return tuple(
        (name, tree) for name, tree in (*user_trees(), *shipped_trees()) if are_like(tree["properties"], properties)
    )


def are_like(fitted: dict[str, Any], properties: DeviceProperties) -> bool:
    """Whether a tree's properties are those of a device. Memory may differ by a tenth, as between cards of one kind."""
    has = asdict(properties)
    memory_gbps = fitted.get("memory_gbps", has["memory_gbps"])
    is_like = 10 * abs(has["memory_gbps"] - memory_gbps) <= memory_gbps
    return is_like and fitted | {"memory_gbps": has["memory_gbps"]} == has


def forget_trees() -> None:
    """Read trees again when they are next asked for; choices made from those read so far are dropped."""
    own = user_trees, fitted_trees, choose_tree, select, prefers_hopper, cost_model, hopper_config
    for function in (*own, *CHOICES):
        function.cache_clear()


def walk(tree: Any, features: dict[str, float]) -> Any:
    """Follow `[feature, threshold, at or below, above]` nodes down to a leaf."""
    while isinstance(tree, list):
        feature, threshold, below, above = tree
        tree = below if features[feature] <= threshold else above
    return tree


def power_of_two(value: float) -> int:
    """Round up to a power of two; return 1 for numbers below it."""
    return 1 << (math.ceil(value) - 1).bit_length() if value > 1 else 1


def padded(dim: int) -> int:
    """Round a head dim up to the power of two that a tile of it has."""
    return max(16, power_of_two(dim))


def rounded(
    spec: AttentionSpec, properties: DeviceProperties, max_query_len: int, max_seq_len: int, num_tokens: int
) -> tuple[int, float, int, int]:
    """Return the features of a batch that a tree may ask for: the last four arguments of `features_of`.

    They are rounded up to powers of two, so that the number of different plans is small.
    """
    rows_per_sm = power_of_two(FINEST * num_tokens * spec.num_q_heads / properties.num_sms) / FINEST
    return (
        power_of_two(max_query_len * spec.group_size),
        rows_per_sm,
        power_of_two(max_seq_len),
        power_of_two(max_query_len),
    )


def features_of(
    spec: AttentionSpec,
    properties: DeviceProperties,
    rows_per_seq: int,
    rows_per_sm: float,
    keys_per_seq: int,
    queries_per_seq: int,
) -> dict[str, float]:
    """Return the features that trees may ask for.

    Args:
        spec: what is computed.
        properties: of the device.
        rows_per_seq: most rows (query token, query head of one KV head) of any sequence. This and the next three are
            rounded up to powers of two.
        rows_per_sm: rows of the batch over all KV heads, per SM; below 1 for small batches.
        keys_per_seq: most keys of any sequence.
        queries_per_seq: most queries of any sequence.
    """
    block_d, block_dv = padded(spec.head_dim), padded(spec.head_dim_v)
    return {
        "rows_per_seq": rows_per_seq,
        "rows_per_sm": rows_per_sm,
        "keys_per_seq": keys_per_seq,
        "keys_per_sm": keys_per_seq * rows_per_sm / rows_per_seq,  # of all sequences and KV heads
        "queries_per_seq": queries_per_seq,
        "group_size": spec.group_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": max(block_d, block_dv),
        "head_padding": block_d - spec.head_dim + block_dv - spec.head_dim_v,
        "shared_kib": properties.shared_memory // 1024,
        "mma_sync": int(properties.has_mma_sync),
        "gbps_per_sm": properties.memory_gbps / properties.num_sms,
        "query_bytes": spec.dtype.itemsize,
        "kv_bytes": spec.kv_dtype.itemsize,
        "int8_cache": int(spec.kv_dtype is torch.int8),  # its numbers take longer to convert
    }


@cache
def choose_tree(spec: AttentionSpec, properties: DeviceProperties, section: str) -> tuple[str, Any]:
    """Return the name of the tree that serves a spec on a device, and one section of that tree.

    The sections are "attention", "mla", "hopper", "cost_model" and "mla_cost_model".
    """
    features = features_of(spec, properties, 1, 1, 1, 1)
    for name, tree in fitted_trees(properties):
        if section in tree and any(
            all(features[feature] == value for feature, value in kind.items()) for kind in tree["covers"]
        ):
            return name, tree[section]
    return GENERIC, load_tree(GENERIC)[section]


def decision(tree: Any, features: dict[str, float], section: str) -> Any:
    """Return the leaf of a fitted tree; if that leaf is "generic", the leaf of the generic tree."""
    leaf = walk(tree, features)
    return walk(load_tree(GENERIC)[section], features) if leaf == GENERIC else leaf


@cache
def select(
    spec: AttentionSpec,
    properties: DeviceProperties,
    rows_per_seq: int,
    rows_per_sm: float,
    keys_per_seq: int,
    queries_per_seq: int,
    fitted: bool = True,
) -> tuple[KernelConfig, str]:
    """Choose the configuration of the portable kernels.

    Args:
        spec: what is computed.
        properties: of the device.
        rows_per_seq: as for `features_of`.
        rows_per_sm: as for `features_of`.
        keys_per_seq: as for `features_of`.
        queries_per_seq: as for `features_of`.
        fitted: use a fitted tree if there is one; else use the generic tree.

    Returns:
        The configuration, and the tree's name and features in words.
    """
    section = "mla" if spec.latent else "attention"
    name, tree = choose_tree(spec, properties, section) if fitted else (GENERIC, load_tree(GENERIC)[section])
    features = features_of(spec, properties, rows_per_seq, rows_per_sm, keys_per_seq, queries_per_seq)
    leaf = decision(tree, features, section)
    config = KernelConfig(**leaf, block_d=padded(spec.head_dim), block_dv=padded(spec.head_dim_v))
    where = ", ".join(f"{name} {value:g}" for name, value in features.items())
    return reduced(config, spec, properties), f"{name} tree at {where}"


@cache
def prefers_hopper(
    spec: AttentionSpec,
    properties: DeviceProperties,
    rows_per_seq: int,
    rows_per_sm: float,
    keys_per_seq: int,
    queries_per_seq: int,
) -> bool:
    """Whether the Hopper kernel is expected to be faster than the portable ones, for a request that it serves.

    The arguments are those of `features_of`.
    """
    _, tree = choose_tree(spec, properties, "hopper")
    features = features_of(spec, properties, rows_per_seq, rows_per_sm, keys_per_seq, queries_per_seq)
    return decision(tree, features, "hopper")


@lru_cache(maxsize=4096)
def hopper_config(
    spec: AttentionSpec, properties: DeviceProperties, short: bool, queries: int, ragged: bool, apart: bool = False
) -> HopperConfig | str:
    """Choose the configuration of the Hopper kernel.

    The first entry of the generic tree's "hopper_configs" is taken of which all facts of "when" are equal, and those of
    "at_most" are not larger. A warpgroup has 64 rows, which `queries_of_tile` gives to queries and heads.

    Args:
        spec: what is computed.
        properties: of the device.
        short: whether contexts are short. With head_dim up to 128, a CTA then has one consumer warpgroup: less of the
            SM is idle in the prologue and epilogue of a work tile, but each KV tile is loaded twice.
        queries: as for `queries_of_tile`.
        ragged: as for `queries_of_tile`.
        apart: whether warpgroups should have their own tokens, if there are two.

    Returns:
        The configuration; or, in words, what the kernel does not serve.
    """
    if refusal := hopper_refusal(spec, properties):
        return refusal
    facts = {
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "quantised_cache": spec.kv_dtype != spec.dtype,
        "fp8_products": spec.allow_fp8 and spec.kv_dtype is torch.float8_e4m3fn,
        "short_context": short,
    }
    for entry in load_tree(GENERIC)["hopper_configs"]:
        fits = all(facts[fact] <= value for fact, value in entry.get("at_most", {}).items())
        if fits and all(facts[fact] == value for fact, value in entry["when"].items()):
            num_warpgroups = entry["config"]["num_warpgroups"]
            apart = apart and num_warpgroups == 2
            rows = ROWS_OF_WARPGROUP * num_warpgroups
            block_t = queries_of_tile(rows, spec.group_size, queries, ragged, apart)
            return HopperConfig(block_t=block_t, apart=apart, **entry["config"])
    values = f" with head_dim_v {spec.head_dim_v}" if spec.head_dim_v != spec.head_dim else ""
    return f"head_dim {spec.head_dim}{values} of a {spec.kv_dtype} cache".replace("torch.", "")


def queries_of_tile(rows: int, group_size: int, queries: int, ragged: bool, apart: bool = False) -> int:
    """Return how many query tokens a work tile has, such that a KV head's work tiles are fewest.

    A work tile has as many heads as fit next to these queries. With one head it wastes no rows on long prompts. With
    all heads of a group it wastes none on a few queries, and loads keys and values once for all heads. A ragged batch
    is taken to have equally many sequences of 1, 2, 4, 8 queries, and so on.

    Args:
        rows: of a work tile.
        group_size: query heads of a KV head.
        queries: most queries of any sequence; of ragged batches rounded up to a power of two.
        ragged: whether sequences differ in their number of queries.
        apart: whether each half of the rows has half of the queries, rather than half of the heads.
    """
    lens = [1 << i for i in range(queries.bit_length())] if ragged else [queries]

    parts = 2 if apart else 1

    def queries_with(heads: int) -> int:
        return rows // parts // heads * parts

    def work_tiles(heads: int) -> int:
        return sum(-(-n // queries_with(heads)) for n in lens) * (group_size // heads)

    # Of equal counts, the one with the most heads.
    heads = range(min(rows // parts, group_size), 0, -1)
    return queries_with(min((n for n in heads if group_size % n == 0), key=work_tiles))


@cache
def cost_model(spec: AttentionSpec, properties: DeviceProperties) -> CostModel:
    """Return the constants by which plans and kernels choose between ways to launch.

    They are the generic tree's. The tree that serves the spec may override some, and some differ for latents.
    """
    _, overrides = choose_tree(spec, properties, "mla_cost_model" if spec.latent else "cost_model")
    return CostModel(**{**constants(load_tree(GENERIC)), **constants({"cost_model": overrides})})
