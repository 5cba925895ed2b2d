"""Quire's own errors, and the checks of single values that every noun and verb shares.

A broken contract raises `ValueError` or `TypeError`, worded `<argument> must <contract>, got <value>; <what to do>`.
The two classes below are for requests that are sound and still cannot be met.
"""

import math
from numbers import Integral, Real
from typing import Any

import torch

DEVICES = ("cpu", "cuda")
LARGEST = (1 << 63) - 1  # integer; larger ones do not fit into a tensor


class UnsupportedError(NotImplementedError):
    """A valid request that Quire does not serve; the message says what was asked and what is supported."""


class OutOfPagesError(RuntimeError):
    """The page pool has too few free pages; nothing was changed."""


def describe(value: Any) -> str:
    """Return a value as an error message names it: short, and with its type where that is not plain."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_nested:
            return f"a nested {dtype} tensor"
        layout = "" if value.layout is torch.strided else f"{str(value.layout).removeprefix('torch.')} "
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"a {layout}{dtype} tensor of shape {list(value.shape)}{where}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 40 else f"{text[:40]}…"
    return f"a value of type {type(value).__name__}"


def shown(value: Any, *names: str) -> str:
    """Return an object and attributes of it that are not None, without reading its tensors, which waits for a GPU."""
    fields = ((name, getattr(value, name)) for name in names)
    return f"{type(value).__name__}({', '.join(f'{name}={describe(x)}' for name, x in fields if x is not None)})"


def check_integer(name: str, value: Any, advice: str, low: int | None = None, high: int = LARGEST) -> int:
    """Return an integer as an `int`, or raise unless it is one from `low` to `high`; bools and tensors are none."""
    if type(value) is not int:
        if isinstance(value, bool | torch.Tensor) or not isinstance(value, Integral):
            raise TypeError(f"{name} must be an integer, got {describe(value)}; {advice}")
        value = int(value)
    if value > high or (low is not None and value < low):
        contract = f"at most {high}" if low is None else f"from {low} to {high}"
        if value <= high == LARGEST:
            contract = f"at least {low}"
        raise ValueError(f"{name} must be {contract}, got {describe(value)}; {advice}")
    return value


def check_positive(name: str, value: Any, advice: str) -> float:
    """Return a number as a `float`, or raise unless it is positive and finite, also when rounded to float32."""
    if isinstance(value, bool | torch.Tensor) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {describe(value)}; {advice}")
    try:
        number = float(value)
    except OverflowError:  # an int with hundreds of digits
        number = math.inf
    limits = torch.finfo(torch.float32)
    if not limits.tiny <= number <= limits.max:  # NaN neither
        raise ValueError(f"{name} must be positive and finite in float32, got {describe(value)}; {advice}")
    return number


def check_flag(name: str, value: Any, advice: str) -> bool:
    """Return a flag, or raise unless it is True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name} must be True or False, got {describe(value)}; {advice}")
    return value


def has_strides(value: Any) -> bool:
    """Return whether a value is a tensor with strides, which a sparse, a nested and a quantised one are not."""
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return is_strided and not value.is_nested and not value.is_quantized


def check_tensor(name: str, value: Any, advice: str) -> torch.Tensor:
    """Return a tensor, or raise unless it is one with strides (not a list, an array, or a sparse or nested tensor)."""
    if not has_strides(value):
        raise TypeError(f"{name} must be a tensor with strides, got {describe(value)}; {advice}")
    return value


def check_device(name: str, value: Any, advice: str) -> torch.device | None:
    """Return a device, None for None, or raise unless it is one that this machine has."""
    if value is None:
        return None
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError, ValueError):
        error = ValueError if isinstance(value, str | int) and not isinstance(value, bool) else TypeError
        raise error(f"{name} must be a device of this machine, got {describe(value)}; {advice}") from None
    backend = getattr(torch, device.type, None)
    if device.type not in ("cpu", "meta") and not (backend is not None and backend.is_available()):
        raise UnsupportedError(f"{name} must be a device of this machine, got {device}; {advice}")
    return device


def check_served(name: str, device: torch.device) -> None:
    """Raise unless Quire serves tensors on a device."""
    if device.type not in DEVICES:
        raise UnsupportedError(f"{name} must be on a GPU or the CPU, got {device}; move it there")


def check_no_gradient(
    name: str, *tensors: torch.Tensor, got: str = "one that does", advice: str = "call it under torch.no_grad()"
) -> None:
    """Raise if a gradient through tensors is asked for."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UnsupportedError(f"{name} must not require a gradient, got {got}; Quire has no backward pass: {advice}")
