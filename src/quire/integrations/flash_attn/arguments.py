"""Checks of arguments under flash-attn's names, before anything is launched or written.

A tensor that comes from a device is checked by what the host knows of it: type, shape, dtype and device.
"""

import operator
from dataclasses import dataclass
from numbers import Real

import torch

from quire import AttentionSpec, UnsupportedError
from quire.integrations import layer_spec

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Scoring:
    """flash-attn's arguments about scores and masks, checked."""

    softmax_scale: float
    causal: bool
    left: int  # negative for no limit, as is `right`
    right: int
    softcap: float  # 0 for none
    alibi_slopes: torch.Tensor | None
    s_aux: torch.Tensor | None

    def spec(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionSpec:
        """Return the spec for these tensors, which have heads and head dims last."""
        right = 0 if self.causal else self.right
        return layer_spec(
            num_q_heads=q.shape[-2],
            num_kv_heads=k.shape[-2],
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            dtype=q.dtype,
            kv_dtype=k.dtype,
            softmax_scale=self.softmax_scale,
            causal=right == 0,
            sliding_window=None if self.left < 0 else self.left + 1,
            sliding_window_right=right if right > 0 else None,
            softcap=self.softcap or None,
            alibi=self.alibi_slopes is not None,
            sinks=self.s_aux is not None,
        )


def read_scoring(
    q: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    s_aux: torch.Tensor | None,
) -> Scoring:
    """Check the arguments about scores and masks; `q` has its heads and its head_dim, before any padding, last."""
    num_q_heads, head_dim = q.shape[-2:]
    if head_dim == 0:
        raise ValueError("q must have a head_dim of at least 1, got 0; see flash-attn's shapes in the docstring")
    try:
        left, right = (as_int("window_size", side) for side in window_size)
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size must be two integers (left, right), got {shown(window_size)}; a negative one for no limit"
        ) from None
    scale = head_dim**-0.5 if softmax_scale is None else as_number("softmax_scale", softmax_scale)
    cap = as_number("softcap", softcap)
    if not cap >= 0:  # NaN too
        raise ValueError(f"softcap must be at least 0, got {softcap}; 0 for none")
    if isinstance(alibi_slopes, torch.Tensor) and alibi_slopes.dim() == 2:
        raise UnsupportedError(
            f"alibi_slopes must be [num_q_heads], got {list(alibi_slopes.shape)}; slopes per sequence are not served"
        )
    for name, tensor in (("alibi_slopes", alibi_slopes), ("s_aux", s_aux)):
        if tensor is not None:
            check_tensor(name, tensor, q.device, num_q_heads=num_q_heads)
            if tensor.dtype not in FLOATS:
                raise TypeError(f"{name} must be float32 or another float, got {tensor.dtype}; cast it")
    slopes, sinks = (None if x is None else x.contiguous() for x in (alibi_slopes, s_aux))
    return Scoring(scale, causal, left, right, cap, slopes, sinks)


def check_dropout(dropout_p: float) -> None:
    """Raise unless there is none."""
    if as_number("dropout_p", dropout_p) != 0:
        raise UnsupportedError(f"dropout_p must be 0, got {dropout_p}; Quire serves inference")


def check_flags(**flags: bool) -> None:
    """Raise unless all are bools."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {shown(value)}; convert it with bool()")


def as_number(name: str, value: float) -> float:
    """Return a number of the host as a float, or raise."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {shown(value)}; convert it with float()")
    return float(value)


def as_int(name: str, value: int | torch.Tensor, least: int | None = None, most: int | None = None) -> int:
    """Return an integer, or raise. A tensor of one integer is accepted: Transformers passes such bounds at times."""
    try:
        if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {shown(value)}; convert it with int()") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}; see the docstring")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, got {number}; see the docstring")
    return number


def shown(value: object) -> str:
    """Return a value as an error shows it; a tensor by its shape, which does not wait for a device."""
    return f"a tensor {list(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else repr(value)


def check_tensor(name: str, x: torch.Tensor, device: torch.device | None, **dims: int | None) -> torch.Size:
    """Return the shape of `x`, or raise unless it is a tensor of these dimensions on `device` that needs no gradient.

    None stands for any size, and for any device.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}; see flash-attn's shapes in the docstring")
    if x.dim() != len(dims) or any(want not in (None, got) for got, want in zip(x.shape, dims.values(), strict=True)):
        wanted = ", ".join(dim if size is None else f"{dim} = {size}" for dim, size in dims.items())
        raise ValueError(f"{name} must be [{wanted}], got {list(x.shape)}; see flash-attn's shapes in the docstring")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on q's device {device}, got {x.device}; move it there")
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{name} must not require a gradient, got one that does; Quire has no backward pass: "
            "call it under torch.no_grad()"
        )
    return x.shape


def check_integers(name: str, x: torch.Tensor, device: torch.device, **dims: int | None) -> torch.Size:
    """Return the shape of `x`, or raise unless `check_tensor` passes and its dtype is int32 or int64."""
    shape = check_tensor(name, x, device, **dims)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32, got {x.dtype}; convert it")
    return shape
