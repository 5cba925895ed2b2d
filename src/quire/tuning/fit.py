"""Fit a small decision tree to measured times, so that what it chooses costs least over the best: regret, not classification error.

Of two configurations that take nearly the same time either will do, and a tree that minimises regret knows that. The search is greedy but for looking ahead:
at the upper levels the best few splits are each grown to the end, and the best of these trees is kept. A leaf has its price, below which a gain is noise.
A leaf may leave the choice to the generic tree, which costs nothing: what was not seen to gain stays as it was.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from quire.dispatch.config import HINTS
from quire.dispatch.tree import GENERIC, walk

MOST_LEVELS = 6
FEWEST_CASES = 3  # of a leaf
PRICE = 0.1  # of a leaf that is not the generic tree, in logarithms of regret summed over cases: 10 % on one case
BEAM = (1, 2, 2, 3, 4, 6)  # splits that are grown to the end, by the levels left below them
NOT_ASKED = {
    "group_size"
}  # tells the few models that were measured from one another, and others nothing; rows have it in them
BEARABLE = math.log(1.1)  # what a case loses beyond this counts more
STRESS = 2.0
COVERED = ("query_bytes", "kv_bytes", "head_dim", "head_padding")


@dataclass(frozen=True)
class Measured:
    """One case to fit to.

    Attributes:
        features: what a tree may ask.
        times: µs of each configuration that was right, by name.
        weight: what its regret counts.
    """

    features: dict[str, float]
    times: dict[str, float]
    weight: float = 1.0

    def regret(self, config: str) -> float:
        """Return the time of a configuration over that of the best; infinite where it was not measured."""
        return self.times.get(config, math.inf) / min(self.times.values())


class Table:
    """Costs of every configuration on every case, and the splits that tell cases apart."""

    def __init__(self, rows: Sequence[Measured]) -> None:
        self.rows = rows
        self.configs = sorted({config for row in rows for config in row.times})
        regrets = torch.tensor(
            [[row.regret(config) for config in self.configs] for row in rows], dtype=torch.float64
        ).log()
        weights = torch.tensor([[row.weight] for row in rows], dtype=torch.float64)
        self.costs = weights * (regrets + STRESS * (regrets - BEARABLE).clamp(min=0))
        self.prices = torch.tensor(
            [0.0 if config == GENERIC else PRICE for config in self.configs], dtype=torch.float64
        )
        names = sorted(rows[0].features.keys() - NOT_ASKED)
        self.values = {name: torch.tensor([row.features[name] for row in rows]) for name in names}

    def leaf(self, cases: torch.Tensor) -> tuple[float, str]:
        """Return the configuration that costs least over some cases, and its cost."""
        cost, at = (self.costs[cases].sum(0) + self.prices).min(0)
        return float(cost), self.configs[int(at)]

    def splits(self, cases: torch.Tensor) -> list[tuple[float, str, float, torch.Tensor, torch.Tensor]]:
        """Return all splits of some cases, the cheapest first, with what they cost if both sides were leaves."""
        found = []
        for name, values in self.values.items():
            here = values[cases]
            distinct = sorted(set(here.tolist()))
            for low, high in pairwise(distinct):
                threshold = max(low, math.isqrt(int(low * high)))  # features are mostly powers of two
                below, above = cases[here <= threshold], cases[here > threshold]
                if min(len(below), len(above)) >= FEWEST_CASES:
                    found.append((self.leaf(below)[0] + self.leaf(above)[0], name, threshold, below, above))
        return sorted(found, key=lambda split: split[0])

    def grow(self, cases: torch.Tensor, levels: int) -> tuple[float, list | str]:
        """Return the cheapest tree over some cases that was found, and its cost."""
        best = self.leaf(cases)
        if levels == 0 or best[0] <= PRICE:
            return best
        for _, name, threshold, below, above in self.splits(cases)[: BEAM[levels - 1]]:
            (left_cost, left), (right_cost, right) = self.grow(below, levels - 1), self.grow(above, levels - 1)
            if left_cost + right_cost < best[0]:
                best = left_cost + right_cost, left if left == right else [name, threshold, left, right]
        return best


def fit_tree(rows: Sequence[Measured], levels: int = MOST_LEVELS) -> list | str:
    """Return a tree of `[feature, threshold, at or below, above]` nodes whose leaves are names of configurations.

    Args:
        rows: the cases to fit to, each with its features and times.
        levels: questions asked at most on the way to a leaf.

    Raises:
        ValueError: there are no rows, or some cases that no feature tells apart have no configuration in common.
    """
    if not rows:
        raise ValueError("rows must hold at least one case, got none; sweep first")
    table = Table(rows)
    cost, tree = table.grow(torch.arange(len(rows)), levels)
    if not math.isfinite(cost):
        raise ValueError(
            f"rows must have configurations in common where {levels} questions do not tell them apart, got none; measure more of the space"
        )
    return tree


def within_what_was_seen(
    tree: list | str, rows: Sequence[Measured], levels: int = MOST_LEVELS, bounds: dict[str, tuple[float, float]] | None = None
) -> list | str:  # fmt: skip
    """Return a tree whose leaves serve batches like those they were fitted to, and leave the others that reach them to the generic tree.

    What is good for prompts of 128 tokens says nothing of decoding on 128 keys, nor what is good for one sequence of what is good for 32: a leaf serves single
    queries, or more, only if it was fitted to some, and per multiprocessor at most twice the rows that cases of every head_dim had.

    Args:
        tree: of `fit_tree`.
        rows: the cases it was fitted to.
        levels: questions asked at most; a leaf that would need more becomes the generic tree's.
        bounds: of features, by the questions on the way to the tree: above the first, up to the second.
    """
    bounds = bounds or {}
    if isinstance(tree, list):
        name, threshold, below, above = tree
        low, high = bounds.get(name, (0, math.inf))
        parts = (
            [row for row in rows if row.features[name] <= threshold],
            [row for row in rows if row.features[name] > threshold],
        )
        below = within_what_was_seen(below, parts[0], levels - 1, bounds | {name: (low, min(high, threshold))})
        above = within_what_was_seen(above, parts[1], levels - 1, bounds | {name: (max(low, threshold), high)})
        return below if below == above else [name, threshold, below, above]
    if tree == GENERIC:
        return tree
    questions = []  # what to ask before the leaf, and on which side it is
    single = {row.features["queries_per_seq"] == 1 for row in rows}
    low, high = bounds.get("queries_per_seq", (0, math.inf))
    if len(single) == 1 and low < 1 < high:
        questions.append(("queries_per_seq", 1, single == {True}))
    by_dim = [
        [row.features["rows_per_sm"] for row in rows if row.features["head_dim"] == dim]
        for dim in {row.features["head_dim"] for row in rows}
    ]
    most = 3 * min(map(max, by_dim))  # powers of two: anything between two and four
    if most < bounds.get("rows_per_sm", (0, math.inf))[1]:
        questions.append(("rows_per_sm", most, True))
    if len(questions) > levels:
        return GENERIC
    for name, threshold, at_or_below in questions:
        tree = [name, threshold, tree, GENERIC] if at_or_below else [name, threshold, GENERIC, tree]
    return tree


def regrets(rows: Sequence[Measured], tree: list | str) -> dict[str, float]:
    """Return the regret of a tree over some cases: geometric mean and worst."""
    each = [row.regret(walk(tree, row.features)) for row in rows]
    return {"mean": statistics.geometric_mean(each), "worst": max(each), "cases": len(each)}


def with_leaves(tree: list | str, leaves: dict) -> list | dict | str | bool:
    """Return a tree with each leaf's name replaced."""
    if isinstance(tree, list):
        name, threshold, below, above = tree
        return [name, threshold, with_leaves(below, leaves), with_leaves(above, leaves)]
    return leaves[tree]


def covered(rows: Sequence[Measured]) -> list[dict[str, float]]:
    """Return the dtypes and head dims that the cases have, together."""
    return [dict(kind) for kind in dict.fromkeys(tuple((name, row.features[name]) for name in COVERED) for row in rows)]


def explain(tree, indent: str = "") -> str:
    """Return a tree as text that a person reads."""
    if not isinstance(tree, list):
        return f"{indent}{leaf_in_words(tree)}\n"
    feature, threshold, below, above = tree
    inner = indent + "  "
    return f"{indent}{feature} up to {threshold}:\n{explain(below, inner)}{indent}{feature} above {threshold}:\n{explain(above, inner)}"


def leaf_in_words(leaf) -> str:
    """Return what a leaf decides."""
    if leaf == GENERIC:
        return "as the generic tree says"
    if isinstance(leaf, bool):
        return "the Hopper kernel" if leaf else "the portable kernels"
    loops = ", a loop without masks" if leaf["full_tile_loop"] else ""
    per_sm = leaf["programs_per_sm"]
    hints = "".join(f", {hint} {leaf[hint]}" for hint in HINTS if leaf.get(hint))
    words = f"{leaf['block_m']} rows × {leaf['block_n']} keys, {leaf['num_warps']} warps, {leaf['num_stages']} stages{loops}{hints}"
    return f"{words}, split for {per_sm} program{'s' * (per_sm != 1)} per multiprocessor"
