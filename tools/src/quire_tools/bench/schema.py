"""Convert dataclasses to JSON and back, with checks of types, to read and write `results.json`."""

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false", types.NoneType: "null"}


def to_json(value: Any) -> Any:
    """Return a value as something that `json.dumps` takes; a field that has its default value is left out."""
    if is_dataclass(value):
        pairs = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: to_json(item) for field, item in pairs if not is_default(field, item)}
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    return value


def is_default(field: Field[Any], value: Any) -> bool:
    """Return whether a value is the field's default."""
    return value == (field.default_factory() if field.default_factory is not MISSING else field.default)


def from_json(kind: Any, data: Any, where: str) -> Any:
    """Build a value of a type from parsed JSON.

    Args:
        kind: a dataclass, list[...], dict[str, ...], a Literal, int, float, str, bool, None, or a union of these.
        data: what `json.loads` returned.
        where: the path of `data` in the file, for messages.

    Returns:
        The value. Numbers stay as they are: an int may stand for a float.

    Raises:
        ValueError: a key is unknown or missing, or a value is not of its type; numbers must be finite and at least 0.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return from_json(choose_member(arguments, data), data, where)
    if is_dataclass(kind):
        return dataclass_from_json(kind, data, where)
    if origin is list and isinstance(data, list):
        return [from_json(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data)]
    if origin is dict and isinstance(data, dict):
        return {key: from_json(arguments[1], item, f"{where}[{key!r}]") for key, item in data.items()}
    if not is_scalar_of(kind, data):
        raise ValueError(f"{where} must be {describe_type(kind)}, got {shorten(data)}")
    return data


def dataclass_from_json(kind: Any, data: Any, where: str) -> Any:
    """Build a dataclass from a JSON object; see `from_json`."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} must be an object, got {shorten(data)}")
    known = {field.name: field for field in fields(kind)}
    for name, field in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where} must have the key {name!r}, got {shorten(list(data))}")
    for name in data:
        if name not in known:
            raise ValueError(f"{where} must have no keys but {', '.join(known)}, got {name!r}")
    hints = get_type_hints(kind)
    values = {name: from_json(hints[name], item, f"{where}.{name}") for name, item in data.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def choose_member(members: tuple[Any, ...], data: Any) -> Any:
    """Return the member of a union that fits data: the scalar that it is, or the dataclass with most of its keys."""
    for member in members:
        if is_scalar_of(member, data):
            return member
    keys = set(data) if isinstance(data, dict) else set()

    def shared_keys(member: Any) -> int:
        return len(keys & {field.name for field in fields(member)}) if is_dataclass(member) else -1

    return max(members, key=shared_keys)


def is_scalar_of(kind: Any, data: Any) -> bool:
    """Return whether data is a scalar of a type."""
    if get_origin(kind) is Literal:
        return data in get_args(kind)
    if kind in (int, float):
        return is_number(kind, data)
    return kind in NAMES and isinstance(data, kind)


def is_number(kind: type[int] | type[float], data: Any) -> bool:
    """Return whether data is a finite number of at least 0; an int is a float too, if it is not too large."""
    if isinstance(data, bool) or not isinstance(data, int | kind):
        return False
    return 0 <= data < 2**63 if isinstance(data, int) else math.isfinite(data) and data >= 0


def describe_type(kind: Any) -> str:
    """Name a type for a message."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if kind in (int, float):
        return f"{NAMES[kind]} of at least 0"
    return NAMES.get(kind, "an array" if get_origin(kind) is list else "an object")


def require_positive(**numbers: float) -> None:
    """Raise unless all numbers are larger than 0."""
    for name, number in numbers.items():
        if number <= 0:
            raise ValueError(f"{name} must be larger than 0, got {number}")


def shorten(data: Any) -> str:
    """Return data as text that fits a message."""
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."
