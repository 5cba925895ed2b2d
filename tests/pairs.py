"""Pairwise designs: few combinations of parameters in which all pairs of values occur."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def each_pair(**axes: Sequence[Any]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Return names and cases for `pytest.mark.parametrize`: every pair of values of two axes occurs in some case.

    Each case is, of all combinations, the first one of those with the most pairs that no case before it has.
    """
    pairs = {
        case: set(combinations(enumerate(case), 2))
        for case in product(*(range(len(values)) for values in axes.values()))
    }
    missing = set().union(*pairs.values())
    cases = []
    while missing:
        best = max(pairs, key=lambda case: len(pairs[case] & missing))
        missing -= pairs[best]
        cases.append(tuple(values[i] for values, i in zip(axes.values(), best, strict=True)))
    return tuple(axes), cases
