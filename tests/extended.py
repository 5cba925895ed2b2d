"""Cases that only repeat what others show. pytest leaves them out by default; `make test-extended` runs them."""

from collections.abc import Iterable
from typing import Any

import pytest


def extended(*values: Any) -> Any:
    """Return the values of such a case, for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.extended)


def slow(*values: Any) -> Any:
    """Return the values of a slow case, for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def each_kind(*values: Any) -> Any:
    """Return the values of a case of a kind of kernel that other Tritons compile too, for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.each_kind)


def some_extended(names: Iterable[str], repeating: Iterable[str], are_slow: Iterable[str] = ()) -> list[Any]:
    """Return names for `pytest.mark.parametrize`. Those of cases that repeat others are extended cases."""
    names, repeating, are_slow = list(names), set(repeating), set(are_slow)
    assert repeating | are_slow < set(names), (repeating | are_slow) - set(names)
    marks = ((pytest.mark.extended, repeating), (pytest.mark.slow, are_slow))
    return [pytest.param(name, marks=[mark for mark, marked in marks if name in marked]) for name in names]
