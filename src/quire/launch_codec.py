"""A decided launch as a string, and back: operators of `torch.library` take numbers and strings, not objects."""

import json
from dataclasses import fields
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch


def encode(value: Any) -> str:
    """Return a frozen dataclass as JSON. Its fields are numbers, strings, dtypes, tuples and further dataclasses.

    The text is kept with the object: a server makes a plan in every step, and most objects in it are those of the step
    before, for example the spec.
    """
    text = value.__dict__.get("_encoded")
    if text is None:
        head, names = _head(type(value))
        text = head + "".join([f', "{name}": {_encode(getattr(value, name))}' for name in names]) + "}"
        object.__setattr__(value, "_encoded", text)
    return text


def encode_planned(launch: Any, max_seq_len: int) -> str:
    """Return a launch and the most keys of a plan, for which it may have been decided with more, as a string."""
    return f"{max_seq_len} {encode(launch)}"


def decode_planned(text: str) -> tuple[Any, int]:
    """Return what `encode_planned` was given."""
    max_seq_len, launch = text.split(" ", 1)
    return decode(launch), int(max_seq_len)


@cache
def _head(kind: type) -> tuple[str, tuple[str, ...]]:
    """Return how the JSON of a dataclass begins, and the names of its fields."""
    return f'{{"class": "{kind.__module__}:{kind.__qualname__}"', tuple(f.name for f in fields(kind) if f.init)


def _encode(value: Any) -> str:
    if type(value) is int:
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return encode(value)
    return json.dumps(value) if type(value) is float else _encode_plain(value)


@lru_cache(maxsize=1024, typed=True)
def _encode_plain(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return f'{{"dtype": "{str(value).removeprefix("torch.")}"}}'
    if isinstance(value, tuple):
        return f'{{"tuple": [{", ".join(map(_encode, value))}]}}'
    return json.dumps(value)


@lru_cache(maxsize=1024)
def decode(text: str) -> Any:
    """Return the dataclass that `encode` was given."""
    return json.loads(text, object_hook=_decode)


def _decode(found: dict[str, Any]) -> Any:
    if "tuple" in found:
        return tuple(found["tuple"])
    if "class" not in found:
        return getattr(torch, found["dtype"])
    module, name = found.pop("class").split(":")
    assert module.startswith("quire."), f"{module} must be a module of Quire"
    return getattr(import_module(module), name)(**found)
