"""The GPU suite is collected only on a machine with a GPU."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="session")
def without_waiting() -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that raises RuntimeError where the host waits for the device."""

    @contextmanager
    def without_waiting() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "a prototype feature"; as an error it would leave the mode on
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return without_waiting
