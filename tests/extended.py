"""Cases that only repeat what others show. pytest leaves them out by default; `make test-extended` runs them."""

from collections.abc import Iterable
from typing import Any

import pytest


def extended(*values: Any) -> Any:
    """Return the values of such a case, for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.extended)


def some_extended(names: Iterable[str], repeating: Iterable[str]) -> list[Any]:
    """Return names for `pytest.mark.parametrize`. Those of cases that repeat others are extended cases."""
    names, repeating = list(names), set(repeating)
    assert repeating < set(names), repeating - set(names)
    return [extended(name) if name in repeating else name for name in names]
