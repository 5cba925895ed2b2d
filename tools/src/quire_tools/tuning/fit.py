"""Fit a small decision tree to measured times, so that its choices lose least against the best.

The fit minimises regret, not classification error: if two configurations take nearly the same time, either is good. The
search is greedy with look-ahead: at the upper levels the best few splits are each grown to the end, and the best of
these trees is kept. Each leaf has a price, so a gain below it counts as noise. A leaf may leave the choice to the
generic tree at no price, so choices without a measured gain stay as they were.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from quire.dispatch.config import HINTS
from quire.dispatch.tree import walk
from quire.dispatch.tree_file import GENERIC

MAX_LEVELS = 6
MIN_CASES = 3  # of a leaf
LEAF_PRICE = 0.1  # of a leaf other than the generic tree, in log regret summed over cases: 10 % on one case
BEAM = (1, 2, 2, 3, 4, 6)  # splits that are grown to the end, by the levels that are left below them
IGNORED = {"group_size"}  # would let the tree memorise the few models measured; already part of rows_per_seq
TOLERABLE = math.log(1.1)  # a case's loss beyond this counts more
PENALTY = 2.0  # added to the weight of a loss beyond TOLERABLE
COVERED = ("query_bytes", "kv_bytes", "head_dim", "head_padding")
Tree = list[Any] | str  # nodes [feature, threshold, at or below, above]; leaves are names of configurations


@dataclass(frozen=True)
class Measured:
    """One case to fit to.

    Attributes:
        features: what a tree may ask for.
        times: µs by configuration, of those whose results were right.
        weight: of its regret in the sum.
    """

    features: dict[str, float]
    times: dict[str, float]
    weight: float = 1.0

    def regret(self, config: str) -> float:
        """Return the time of a configuration over that of the best; infinite if it was not measured."""
        return self.times.get(config, math.inf) / min(self.times.values())


class CostTable:
    """The cost of every configuration on every case, and the splits that separate cases."""

    def __init__(self, rows: Sequence[Measured]) -> None:
        self.configs = sorted({config for row in rows for config in row.times})
        regrets = torch.tensor([[row.regret(config) for config in self.configs] for row in rows], dtype=torch.float64)
        losses = regrets.log()
        weights = torch.tensor([[row.weight] for row in rows], dtype=torch.float64)
        self.costs = weights * (losses + PENALTY * (losses - TOLERABLE).clamp(min=0))
        prices = [0.0 if config == GENERIC else LEAF_PRICE for config in self.configs]
        self.prices = torch.tensor(prices, dtype=torch.float64)
        names = sorted(rows[0].features.keys() - IGNORED)
        self.values = {name: torch.tensor([row.features[name] for row in rows]) for name in names}

    def leaf(self, cases: torch.Tensor) -> tuple[float, str]:
        """Return the configuration that costs least over some cases, and its cost."""
        cost, at = (self.costs[cases].sum(0) + self.prices).min(0)
        return float(cost), self.configs[int(at)]

    def splits(self, cases: torch.Tensor) -> list[tuple[float, str, float, torch.Tensor, torch.Tensor]]:
        """Return all splits of some cases, the cheapest first, with what they would cost if both sides were leaves."""
        found = []
        for name, values in self.values.items():
            here = values[cases]
            distinct = sorted(set(here.tolist()))
            for low, high in pairwise(distinct):
                threshold = max(low, math.isqrt(int(low * high)))  # features are mostly powers of two
                below, above = cases[here <= threshold], cases[here > threshold]
                if min(len(below), len(above)) >= MIN_CASES:
                    found.append((self.leaf(below)[0] + self.leaf(above)[0], name, threshold, below, above))
        return sorted(found, key=lambda split: split[0])

    def grow(self, cases: torch.Tensor, levels: int) -> tuple[float, Tree]:
        """Return the cheapest tree over some cases that was found, and its cost."""
        cost, tree = self.leaf(cases)
        best: tuple[float, Tree] = cost, tree
        if levels == 0 or cost <= LEAF_PRICE:
            return best
        for _, name, threshold, below, above in self.splits(cases)[: BEAM[levels - 1]]:
            below_cost, below_tree = self.grow(below, levels - 1)
            above_cost, above_tree = self.grow(above, levels - 1)
            if below_cost + above_cost < best[0]:
                is_same = below_tree == above_tree
                best = below_cost + above_cost, below_tree if is_same else [name, threshold, below_tree, above_tree]
        return best


def fit_tree(rows: Sequence[Measured], levels: int = MAX_LEVELS) -> Tree:
    """Return a tree of `[feature, threshold, at or below, above]` nodes whose leaves are names of configurations.

    Args:
        rows: the cases to fit to, each with its features and times.
        levels: most questions on the way to a leaf.

    Raises:
        ValueError: there are no rows, or cases that no feature separates have no configuration in common.
    """
    if not rows:
        raise ValueError("rows must hold at least one case, got none; sweep first")
    cost, tree = CostTable(rows).grow(torch.arange(len(rows)), levels)
    if not math.isfinite(cost):
        raise ValueError(
            f"rows must have configurations in common where {levels} questions do not separate them, got none; "
            "measure more of the space"
        )
    return tree


def limit_to_measured(
    tree: Tree,
    rows: Sequence[Measured],
    levels: int = MAX_LEVELS,
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> Tree:
    """Return a tree whose leaves serve only batches like those that they were fitted to.

    Leaves do not extrapolate. A leaf fitted only to single-query cases serves only those, a leaf fitted to none of them
    serves none, and no leaf serves more than twice the rows per SM that it was fitted to for every head_dim. Other
    batches use the generic tree.

    Args:
        tree: of `fit_tree`.
        rows: the cases it was fitted to.
        levels: most questions; a leaf that would need more becomes the generic tree's.
        bounds: of features, by the questions on the way to the tree: above the first, up to the second.
    """
    bounds = bounds or {}
    if isinstance(tree, list):
        name, threshold, below, above = tree
        low, high = bounds.get(name, (0, math.inf))
        rows_below = [row for row in rows if row.features[name] <= threshold]
        rows_above = [row for row in rows if row.features[name] > threshold]
        bounds_below = {**bounds, name: (low, min(high, threshold))}
        bounds_above = {**bounds, name: (max(low, threshold), high)}
        below = limit_to_measured(below, rows_below, levels - 1, bounds_below)
        above = limit_to_measured(above, rows_above, levels - 1, bounds_above)
        return below if below == above else [name, threshold, below, above]
    if tree == GENERIC:
        return tree
    questions = []  # to ask before the leaf, each with the side that the leaf is on
    is_single = {row.features["queries_per_seq"] == 1 for row in rows}
    low, high = bounds.get("queries_per_seq", (0, math.inf))
    if len(is_single) == 1 and low < 1 < high:
        questions.append(("queries_per_seq", 1, is_single == {True}))
    rows_by_dim: dict[float, list[float]] = {}
    for row in rows:
        rows_by_dim.setdefault(row.features["head_dim"], []).append(row.features["rows_per_sm"])
    most = 3 * min(max(values) for values in rows_by_dim.values())  # powers of two: anything between two and four
    if most < bounds.get("rows_per_sm", (0, math.inf))[1]:
        questions.append(("rows_per_sm", most, True))
    if len(questions) > levels:
        return GENERIC
    for name, threshold, at_or_below in questions:
        tree = [name, threshold, tree, GENERIC] if at_or_below else [name, threshold, GENERIC, tree]
    return tree


def regrets(rows: Sequence[Measured], tree: Tree) -> dict[str, float]:
    """Return the regret of a tree over some cases: geometric mean and worst."""
    each = [row.regret(walk(tree, row.features)) for row in rows]
    return {"mean": statistics.geometric_mean(each), "worst": max(each), "cases": len(each)}


def replace_leaves(tree: Tree, leaves: Mapping[str, Any]) -> Any:
    """Return a tree with each leaf's name replaced by its configuration."""
    if isinstance(tree, list):
        name, threshold, below, above = tree
        return [name, threshold, replace_leaves(below, leaves), replace_leaves(above, leaves)]
    return leaves[tree]


def covers_of(rows: Sequence[Measured]) -> list[dict[str, float]]:
    """Return the combinations of dtypes and head dims that the cases have."""
    return [dict(kind) for kind in dict.fromkeys(tuple((name, row.features[name]) for name in COVERED) for row in rows)]


def explain(tree: Any, indent: str = "") -> str:
    """Return a tree as text."""
    if not isinstance(tree, list):
        return f"{indent}{describe_leaf(tree)}\n"
    feature, threshold, below, above = tree
    inner = indent + "  "
    return (
        f"{indent}{feature} up to {threshold}:\n{explain(below, inner)}"
        f"{indent}{feature} above {threshold}:\n{explain(above, inner)}"
    )


def describe_leaf(leaf: Any) -> str:
    """Return a leaf's decision, in words."""
    if leaf == GENERIC:
        return "the generic tree's choice"
    if isinstance(leaf, bool):
        return "the Hopper kernel" if leaf else "the portable kernels"
    loop = ", full-tile loop" if leaf["full_tile_loop"] else ""
    hints = "".join(f", {hint} {leaf[hint]}" for hint in HINTS if leaf.get(hint))
    programs = f"{leaf['programs_per_sm']} program{'s' * (leaf['programs_per_sm'] != 1)}"
    stages = f"{leaf['num_stages']} stage{'s' * (leaf['num_stages'] != 1)}"
    size = f"{leaf['block_m']} rows × {leaf['block_n']} keys, {leaf['num_warps']} warps, {stages}"
    return f"{size}{loop}{hints}, split for {programs} per SM"
