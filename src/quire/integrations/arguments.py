"""Checks of arguments under other libraries' names, before anything is launched or written.

A tensor that comes from a device is checked by what the host knows of it: type, shape, dtype and device.
"""

import operator
from numbers import Real

import torch

from quire import UnsupportedError

LARGEST = (1 << 63) - 1  # integer that fits into a tensor


def check_flags(**flags: bool) -> None:
    """Raise unless all are bools."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {shown(value)}; convert it with bool()")


def as_number(name: str, value: float) -> float:
    """Return a number of the host as a float, or raise."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {shown(value)}; convert it with float()")
    try:
        return float(value)
    except OverflowError:  # an int with hundreds of digits
        raise ValueError(f"{name} must fit into a float, got {shown(value)}; see the docstring") from None


def as_int(name: str, value: int | torch.Tensor, least: int | None = None, most: int = LARGEST) -> int:
    """Return an integer, or raise. A tensor of one integer is accepted: Transformers passes such bounds at times."""
    try:
        if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {shown(value)}; convert it with int()") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {shown(number)}; see the docstring")
    if number > most:
        raise ValueError(f"{name} must be at most {most}, got {shown(number)}; see the docstring")
    return number


def shown(value: object) -> str:
    """Return a value as an error shows it: short, and a tensor by its shape, which does not wait for a device."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_tensor(name: str, x: torch.Tensor, device: torch.device | None, **dims: int | None) -> torch.Size:
    """Return the shape of `x`, or raise unless it is a tensor of these dimensions on `device` that needs no gradient.

    None stands for any size, and for any device.
    """
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.is_nested or x.is_quantized:
        kind = f"a {x.layout} tensor of {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a tensor with strides, got {kind}; see the shapes in the docstring")
    if x.dim() != len(dims) or any(want not in (None, got) for got, want in zip(x.shape, dims.values(), strict=True)):
        wanted = ", ".join(dim if size is None else f"{dim} = {size}" for dim, size in dims.items())
        raise ValueError(f"{name} must be [{wanted}], got {list(x.shape)}; see the shapes in the docstring")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}; move it there")
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{name} must not require a gradient, got one that does; Quire has no backward pass: "
            "call it under torch.no_grad()"
        )
    return x.shape


def check_no_overlap(name: str, x: torch.Tensor) -> None:
    """Raise if two elements of a tensor to be written may have one address."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < reach:
            raise ValueError(
                f"{name} must have memory for every element, got strides {x.stride()}; copy it with contiguous()"
            )
        reach += stride * (size - 1)


def is_among(value: object, words: tuple[str, ...]) -> bool:
    """Return whether a value is one of some words. An array is none, and its `==` is no bool."""
    return isinstance(value, str) and value in words


def check_integers(name: str, x: torch.Tensor, device: torch.device | None, **dims: int | None) -> torch.Size:
    """Return the shape of `x`, or raise unless `check_tensor` passes and its dtype is int32 or int64."""
    shape = check_tensor(name, x, device, **dims)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32, got {x.dtype}; convert it")
    return shape
