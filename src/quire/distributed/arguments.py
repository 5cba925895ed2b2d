"""Checks of the arguments of this package's functions: groups, specs, sinks and states."""

from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import quire

Group = dist.ProcessGroup | DeviceMesh | None


def shown(value: Any) -> str:
    """Return a value as an error message names it."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return f"a nested {value.dtype} tensor"
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor of shape {list(value.shape)} on {value.device}"
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to print thousands of digits
        return f"an integer of {value.bit_length()} bits"
    text = repr(value) if value is None or isinstance(value, bool | int | float | str) else ""
    return text if 0 < len(text) <= 40 else f"a value of type {type(value).__name__}"


def check_int(name: str, value: Any, low: int, high: int = (1 << 31) - 1) -> int:
    """Return a plain integer from `low` to `high`, or raise."""
    if isinstance(value, bool | torch.Tensor) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {shown(value)}; pass a number of the host")
    value = int(value)
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {shown(value)}; pass a number in this range")
    return value


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor with strides: none that is sparse, nested or quantised."""
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return is_strided and not value.is_nested and not value.is_quantized


def check_lens(name: str, value: Any, dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int64)) -> torch.Tensor:
    """Return a tensor of integers with strides, or raise."""
    if not is_plain(value):
        raise TypeError(f"{name} must be a tensor of integers, got {shown(value)}; keep it on the device")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be int32 or int64, got {value.dtype}; convert it once per step")
    return value


def as_device(device: Any) -> torch.device:
    """Return a device; the current GPU for None, or the CPU where there is none. Raise if it is none."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(device, torch.device | str):
        raise TypeError(f"device must be a torch.device or the name of one, got {shown(device)}; for instance 'cuda'")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be the name of a device, got {shown(device)}; for instance 'cuda'") from None
    backend = getattr(torch, found.type, None)
    if found.type != "cpu" and not (backend is not None and backend.is_available()):
        raise quire.UnsupportedError(f"device must be one of this machine, got {found}; leave it out")
    return found


def process_group(group: Any) -> dist.ProcessGroup:
    """Return the process group of a group, a mesh of one dimension, or the default group for None.

    Raises:
        TypeError: the group is none of these.
        ValueError: the mesh has several dimensions, or this process is not in the group.
        RuntimeError: torch.distributed was not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "group must be one of torch.distributed, got a process in which it is not initialised; "
            "call torch.distributed.init_process_group first"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a mesh of one dimension, got {group.ndim}; take one of them by its name")
        group = group.get_group()
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a process group, a device mesh or None, got {shown(group)}; see torch.distributed"
        )
    if dist.get_rank(group) < 0:
        raise ValueError("group must hold this process, got a group of others; call only the ranks of the group")
    return group


def check_spec(name: str, spec: Any) -> None:
    """Raise unless a spec's queries see all keys before them: a share of the keys has no window."""
    if not isinstance(spec, quire.AttentionSpec):
        raise TypeError(f"{name} must be an AttentionSpec, got {shown(spec)}; make one for the layer")
    for field in ("sliding_window", "sliding_window_right"):
        if getattr(spec, field) is not None:
            raise quire.UnsupportedError(
                f"{name} must have no {field} over ranks, got {getattr(spec, field)}; "
                "a window is short: keep its keys on one rank"
            )
    if spec.alibi:
        raise quire.UnsupportedError(f"{name} must have no ALiBi over ranks, got one; a rank does not know positions")
    for field in ("score", "mask"):
        if getattr(spec, field) is not None:
            raise quire.UnsupportedError(
                f"{name} must have no {field} over ranks, got {getattr(spec, field)}; a rank does not know positions"
            )
    if spec.sinks:
        raise quire.UnsupportedError(
            f"{name} must have sinks=False over ranks, got True; pass the sinks here, where they count once"
        )


def check_sinks(sinks: Any, num_heads: int, device: torch.device) -> None:
    """Raise unless sinks are None or fit, and need no gradient."""
    if sinks is None:
        return
    if not is_plain(sinks):
        raise TypeError(f"sinks must be a tensor with strides, got {shown(sinks)}; it has one entry per query head")
    if sinks.shape != (num_heads,) or not sinks.is_floating_point() or sinks.device != device:
        raise ValueError(
            f"sinks must be [num_q_heads] = [{num_heads}] floating-point numbers on {device}, got {shown(sinks)}; "
            "slice them to the heads of q"
        )
    if sinks.requires_grad and torch.is_grad_enabled():
        raise quire.UnsupportedError(
            "sinks must not require a gradient, got a tensor that does; "
            "Quire has no backward pass: call it under torch.no_grad()"
        )


def write_sinks(state: quire.State, sinks: torch.Tensor) -> None:
    """Write the state of sinks: each is one more key, whose value is 0."""
    state.out.zero_()
    state.lse.copy_(sinks.expand_as(state.lse))


def merge(states: list[quire.State]) -> quire.State:
    """Merge states over disjoint keys. Those that are rows of one tensor are not copied before."""
    return states[0] if len(states) == 1 else quire.merge_states(states)
