"""Cases that only repeat what others show. pytest leaves them out by default; `make test-extended` runs them."""

from collections.abc import Iterable
from typing import Any

import pytest
import triton

OLDEST = "3.6.0"  # the oldest Triton that is served
OF_ENGINES = "3.8.0"  # the Triton of the newest engines that are served
# By default, these two compile each kind of kernel for Hopper GPUs, and the newest Triton does not: it takes more time,
# and engines run with them.
OF_TRITONS_IN_USE = triton.__version__ in (OLDEST, OF_ENGINES)


def extended(*values: Any) -> Any:
    """Return the values of such a case, for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.extended)


def slow(*values: Any) -> Any:
    """Return the values of a slow case, for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def each_kind(*values: Any) -> Any:
    """Return the values of a case of a kind of kernel, for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=[pytest.mark.each_kind, *([] if OF_TRITONS_IN_USE else [pytest.mark.extended])])


def of_tritons_in_use(test: Any) -> Any:
    """Mark a test of kinds of kernels, as `each_kind` marks a case."""
    test = pytest.mark.each_kind(test)
    return test if OF_TRITONS_IN_USE else pytest.mark.extended(test)


def some_extended(names: Iterable[str], repeating: Iterable[str], are_slow: Iterable[str] = ()) -> list[Any]:
    """Return names for `pytest.mark.parametrize`. Those of cases that repeat others are extended cases."""
    names, repeating, are_slow = list(names), set(repeating), set(are_slow)
    assert repeating | are_slow < set(names), (repeating | are_slow) - set(names)
    marks = ((pytest.mark.extended, repeating), (pytest.mark.slow, are_slow))
    return [pytest.param(name, marks=[mark for mark, marked in marks if name in marked]) for name in names]
