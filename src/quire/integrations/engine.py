"""What integrations of engines share: how an engine is imported, bounds, and a logger."""

import importlib
import logging
from typing import Any

from quire.version import packages_of

START = logging.getLogger("quire.start")  # which `QUIRE_LOG=all` shows (`quire.log`)
LEAST_KEYS = 64  # for which a plan is made: with plans for fewer, a quarter more kernels are compiled ahead
LARGE = 1 << 31  # bytes of a cache, as servers have it: on AMD's GPUs, kernels for smaller ones differ


def rounded_up(number: int, most: int) -> int:
    """Return the next number of three binary digits and zeros, or `most` if that comes first."""
    step = 1 << max(0, number.bit_length() - 3)
    return max(number, min(most, -(-number // step) * step))


def load(engine: str, name: str) -> Any:
    """Import a module of an engine; raise ModuleNotFoundError with advice if the engine is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != engine:
            raise
        raise ModuleNotFoundError(
            f"quire.integrations.{engine} needs {engine}, which is not installed; pip install {packages_of(engine)}",
            name=engine,
        ) from None
