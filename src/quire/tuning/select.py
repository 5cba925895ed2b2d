"""Walk a decision tree to a tile. The trees are data (`trees/*.json`), with their provenance inside."""

import json
from functools import cache
from importlib import resources

from quire.spec import AttentionSpec
from quire.tuning.space import Tile, fit
from quire.tuning.traits import Traits


@cache
def load_tree(name: str) -> dict:
    """Read a shipped tree."""
    return json.loads(resources.files("quire.tuning").joinpath(f"trees/{name}.json").read_text())


def walk(tree: list | dict, features: dict[str, float]) -> dict:
    """Follow `[feature, threshold, at or below, above]` nodes down to a leaf."""
    while isinstance(tree, list):
        feature, threshold, below, above = tree
        tree = below if features[feature] <= threshold else above
    return tree


@cache
def select(spec: AttentionSpec, traits: Traits, rows_per_seq: int, rows_per_sm: int, keys_per_seq: int) -> tuple[Tile, str]:
    """Choose a tile.

    Args:
        spec: what is computed.
        traits: of the device.
        rows_per_seq: most (query token, query head of one KV head) rows of any sequence, rounded up to a power of two by the caller.
        rows_per_sm: rows of the whole batch over all KV heads, per multiprocessor, rounded likewise.
        keys_per_seq: most keys of any sequence, rounded likewise.

    Returns:
        The tile, and the tree's name and features as words.
    """
    block_d, block_dv = padded(spec.head_dim), padded(spec.head_dim_v)
    features = {
        "rows_per_seq": rows_per_seq,
        "rows_per_sm": rows_per_sm,
        "keys_per_seq": keys_per_seq,
        "head_dim": max(block_d, block_dv),
        "head_padding": block_d - spec.head_dim + block_dv - spec.head_dim_v,
        "shared_kib": traits.shared_memory // 1024,
        "query_bytes": spec.dtype.itemsize,
        "kv_bytes": spec.kv_dtype.itemsize,
    }
    leaf = walk(load_tree("generic")["attention"], features)
    tile = fit(Tile(**leaf, block_d=block_d, block_dv=block_dv), spec, traits)
    return tile, "generic tree at " + ", ".join(f"{name} {value}" for name, value in features.items())


def padded(dim: int) -> int:
    """Round a head dim up to the power of two that a tile has."""
    return max(16, 1 << (dim - 1).bit_length())
