"""Walk a decision tree to a tile. The trees are data (`trees/*.json`), with their provenance inside.

A tree that was fitted says on which properties (`properties`) and for which dtypes and head dims (`covers`); it is used where both are those at hand, whatever
the device is called. A user's own, written by `quire tune` to USER_TREES, comes before those that are shipped; `generic.json` serves all the rest.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path

from quire.dispatch.config import KernelConfig, fit
from quire.dispatch.device import DeviceProperties
from quire.spec import AttentionSpec

GENERIC = "generic"  # a leaf of a fitted tree that leaves the choice to the generic one
FINEST = 64  # rows_per_sm begins at its reciprocal
USER_TREES = Path.home() / ".config" / "quire" / "trees"


@cache
def load_tree(name: str) -> dict:
    """Read a shipped tree."""
    return json.loads(resources.files("quire.dispatch").joinpath(f"trees/{name}.json").read_text())


@cache
def fitted_trees(properties: DeviceProperties) -> tuple[tuple[str, dict], ...]:
    """Return the trees that were fitted on a device with these properties, the user's before the shipped, each with its name. Read once per process.

    Raises:
        ValueError: one of the user's is not a tree.
    """
    return tuple((name, tree) for name, tree in every_tree() if tree.get("properties") == asdict(properties))


def every_tree() -> Iterator[tuple[str, dict]]:
    """Go through the user's trees, then the shipped ones, by name."""
    for path in sorted(USER_TREES.glob("*.json")):
        try:
            tree = json.loads(path.read_text())
            if not isinstance(tree, dict) or not {"properties", "covers", "attention"} <= tree.keys():
                raise ValueError("it lacks properties, covers or attention")
        except ValueError as error:
            raise ValueError(
                f"{path} must be a tree that `quire tune` wrote, got {error}; run it again, or move the file away"
            ) from None
        yield str(path), tree
    for path in sorted(resources.files("quire.dispatch").joinpath("trees").iterdir(), key=lambda p: p.name):
        if path.name.endswith(".json"):
            yield path.name.removesuffix(".json"), load_tree(path.name.removesuffix(".json"))


def walk(tree, features: dict[str, float]):
    """Follow `[feature, threshold, at or below, above]` nodes down to a leaf."""
    while isinstance(tree, list):
        feature, threshold, below, above = tree
        tree = below if features[feature] <= threshold else above
    return tree


def power_of_two(value: float) -> int:
    """Round up to a power of two."""
    return 1 << max(0, int(-(-value // 1)) - 1).bit_length()


def rounded(
    spec: AttentionSpec, properties: DeviceProperties, max_query_len: int, max_seq_len: int, num_tokens: int
) -> tuple[int, float, int, int]:
    """Return what of a batch a tree may look at, rounded up to powers of two so that plans are few: the last four arguments of `features_of`."""
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
        rows_per_seq: most (query token, query head of one KV head) rows of any sequence, rounded up to a power of two, as are the next three.
        rows_per_sm: rows of the whole batch over all KV heads, per multiprocessor; of few sequences, a fraction.
        keys_per_seq: most keys of any sequence.
        queries_per_seq: most queries of any sequence.
    """
    block_d, block_dv = padded(spec.head_dim), padded(spec.head_dim_v)
    return {
        "rows_per_seq": rows_per_seq,
        "rows_per_sm": rows_per_sm,
        "keys_per_seq": keys_per_seq,
        "queries_per_seq": queries_per_seq,
        "group_size": spec.group_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": max(block_d, block_dv),
        "head_padding": block_d - spec.head_dim + block_dv - spec.head_dim_v,
        "shared_kib": properties.shared_memory // 1024,
        "query_bytes": spec.dtype.itemsize,
        "kv_bytes": spec.kv_dtype.itemsize,
    }


@cache
def choose_tree(spec: AttentionSpec, properties: DeviceProperties, part: str) -> tuple[str, object]:
    """Return the name and the part ("attention" or "hopper") of the tree that serves a spec on a device."""
    features = features_of(spec, properties, 1, 1, 1, 1)
    for name, tree in fitted_trees(properties):
        if part in tree and any(
            all(features[feature] == value for feature, value in kind.items()) for kind in tree["covers"]
        ):
            return name, tree[part]
    return GENERIC, load_tree(GENERIC)[part]


def decision(tree, features: dict[str, float], part: str):
    """Return what a fitted tree decides, or the generic one where that leaves it to it."""
    leaf = walk(tree, features)
    return walk(load_tree(GENERIC)[part], features) if leaf == GENERIC else leaf


@cache
def select(
    spec: AttentionSpec, properties: DeviceProperties, rows_per_seq: int, rows_per_sm: float, keys_per_seq: int, queries_per_seq: int, fitted: bool = True
) -> tuple[KernelConfig, str]:  # fmt: skip
    """Choose a tile.

    Args:
        spec: what is computed.
        properties: of the device.
        rows_per_seq: as for `features_of`, and so the next three.
        rows_per_sm: see there.
        keys_per_seq: see there.
        queries_per_seq: see there.
        fitted: whether a fitted tree may choose; else the generic one does.

    Returns:
        The tile, and the tree's name and features as words.
    """
    name, tree = choose_tree(spec, properties, "attention") if fitted else (GENERIC, load_tree(GENERIC)["attention"])
    features = features_of(spec, properties, rows_per_seq, rows_per_sm, keys_per_seq, queries_per_seq)
    leaf = decision(tree, features, "attention")
    tile = fit(KernelConfig(**leaf, block_d=padded(spec.head_dim), block_dv=padded(spec.head_dim_v)), spec, properties)
    return tile, f"{name} tree at " + ", ".join(f"{name} {value:g}" for name, value in features.items())


@cache
def prefers_hopper(
    spec: AttentionSpec,
    properties: DeviceProperties,
    rows_per_seq: int,
    rows_per_sm: float,
    keys_per_seq: int,
    queries_per_seq: int,
) -> bool:
    """Whether the Hopper kernel is the faster one, where it serves; the arguments are those of `features_of`."""
    _, tree = choose_tree(spec, properties, "hopper")
    return decision(
        tree, features_of(spec, properties, rows_per_seq, rows_per_sm, keys_per_seq, queries_per_seq), "hopper"
    )


def padded(dim: int) -> int:
    """Round a head dim up to the power of two that a tile has."""
    return max(16, 1 << (dim - 1).bit_length())
