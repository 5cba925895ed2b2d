"""Cases that only repeat what others show. pytest leaves them out by default; `make test-extended` runs them."""

from typing import Any

import pytest


def extended(*values: Any) -> Any:
    """Return the values of such a case, for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.extended)
