"""What several tests of kernels use."""

import pytest


@pytest.fixture
def combine_apart(monkeypatch, take):
    """Return a function that says whether a second launch combines; launches that were decided before are forgotten."""
    from quire.kernels.portable import variants

    def combine_apart(apart: bool) -> None:
        monkeypatch.setattr(variants, "uses_with_partitions", lambda *given: ("joined" if apart else "cut",))
        take("joined" if apart else "cut")

    return combine_apart
