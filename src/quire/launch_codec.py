"""Specs, options and launches as strings, and back, for operators of `torch.library`, files and processes."""

import json
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch

from quire.dispatch.request import Options

# Whose dataclasses a text may name: it may come from a file of anyone.
MODULES = ("quire.spec", "quire.score_functions", "quire.dispatch.", "quire.kernels.")


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


@lru_cache(maxsize=1024, typed=True)
def encode_options(options: Options) -> str:
    """Return options as a string."""
    return _encode(tuple(options))


@lru_cache(maxsize=1024)
def decode_options(text: str) -> Options:
    """Return what `encode_options` was given."""
    return Options(*decode(text))


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
    kind = vars(import_module(module)).get(name) if module.startswith(MODULES) else None
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ValueError(f"class must be a dataclass of launches, got {module}:{name}; decode what `encode` returned")
    return kind(**found)
