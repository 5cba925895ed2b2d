"""How many threads PyTorch uses on the CPU for the small tensors of the commands."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLE = "OMP_NUM_THREADS"  # by which users choose a number


@contextmanager
def one_thread(is_wanted: bool) -> Iterator[None]:
    """Let PyTorch use one thread in the context, if that is wanted and the user has not chosen a number.

    Several threads gain nothing on small tensors. On a busy machine they wait for each other: `quire check` took ten
    times as long with two threads as with one (two cores, 2026-11-25).
    """
    threads = torch.get_num_threads()
    if is_wanted and VARIABLE not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
