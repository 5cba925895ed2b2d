"""What several tests of kernels use."""

import pytest

from quire.dispatch.tree import forget_trees


@pytest.fixture
def combine_apart(monkeypatch):
    """Return a function that says whether a second launch combines; launches that were decided before are forgotten."""
    from quire.kernels.portable.launch import PortableLaunch  # other tests need no Triton

    def combine_apart(apart: bool) -> None:
        monkeypatch.setattr(
            PortableLaunch, "has_combine_launch", property(lambda launch: apart and launch.num_partitions > 0)
        )
        forget_trees()

    yield combine_apart
    forget_trees()
