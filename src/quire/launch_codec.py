"""A decided launch as a string, and back: operators of `torch.library` take numbers and strings, not objects."""

import json
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch


@lru_cache(maxsize=1024)
def encode(value: Any) -> str:
    """Return a frozen dataclass as JSON. Its fields are numbers, strings, dtypes and further dataclasses.

    A value that several launches contain, for example the spec, is encoded once.
    """
    stored = [field.name for field in fields(value) if field.init]
    values = ", ".join(f"{json.dumps(name)}: {_encode(getattr(value, name))}" for name in stored)
    kind = type(value)
    return f'{{"class": "{kind.__module__}:{kind.__qualname__}", {values}}}'


def _encode(value: Any) -> str:
    if is_dataclass(value):
        return encode(value)
    if isinstance(value, torch.dtype):
        return f'{{"dtype": "{str(value).removeprefix("torch.")}"}}'
    return json.dumps(value)


@lru_cache(maxsize=1024)
def decode(text: str) -> Any:
    """Return the dataclass that `encode` was given."""
    return json.loads(text, object_hook=_decode)


def _decode(found: dict[str, Any]) -> Any:
    if "class" not in found:
        return getattr(torch, found["dtype"])
    module, name = found.pop("class").split(":")
    assert module.startswith("quire."), f"{module} must be a module of Quire"
    return getattr(import_module(module), name)(**found)
