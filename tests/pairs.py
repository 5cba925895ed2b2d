"""Designs: few combinations of parameters in which all pairs of values occur, or all values."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


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


def in_turn(**axes: Sequence[Any]) -> tuple[tuple[str, ...], list[Any]]:
    """Return names and all cases for `pytest.mark.parametrize`. By default, each value of each axis occurs.

    The i-th case of these has the i-th value of every axis, and the first again after the last. Others are extended.
    """
    longest = max(map(len, axes.values()))
    by_default = {tuple(i % len(values) for values in axes.values()) for i in range(longest)}
    cases = []
    for case in product(*(range(len(values)) for values in axes.values())):
        found = (values[i] for values, i in zip(axes.values(), case, strict=True))
        cases.append(pytest.param(*found, marks=[] if case in by_default else pytest.mark.extended))
    return tuple(axes), cases
