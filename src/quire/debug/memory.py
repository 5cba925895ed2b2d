"""The memory layout of tensors: describe it as JSON, and allocate tensors with it on another machine.

Tensors that share a storage share one again. Gaps, strides and addresses modulo ALIGNMENT are kept. The ends of a
storage that no tensor of the call covers are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

ALIGNMENT = 256  # bytes: at least what any kernel asks of an address
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}


@dataclass(frozen=True)
class Place:
    """The place of a tensor in memory.

    Attributes:
        dtype: a key of DTYPES.
        shape: of the tensor.
        strides: in elements.
        storage: which storage; tensors with the same number share it.
        offset: bytes from the beginning of the kept part of the storage to the first element.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: int
    offset: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for numbers in (self.shape, self.strides, (self.storage, self.offset)):
            if not all(type(n) is int and 0 <= n < 2**62 for n in numbers):
                raise ValueError(f"shapes, strides and offsets must be integers of at least 0, got {numbers}")
        if len(self.shape) != len(self.strides) or len(self.shape) > 8:
            raise ValueError(f"strides must be as many as the dimensions, got {self.strides} for {self.shape}")
        if self.offset % self.itemsize:
            raise ValueError(f"offset must be a multiple of {self.itemsize} for {self.dtype}, got {self.offset}")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def end(self) -> int:
        """The first byte of the storage after the tensor."""
        if 0 in self.shape:
            return self.offset
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return self.offset + (last + 1) * self.itemsize

    def with_length(self, length: int) -> "Place":
        """Return this place with another length of the first dimension."""
        return replace(self, shape=(length, *self.shape[1:]))


def describe(tensors: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    """Return the places of tensors in memory."""
    storages: dict[tuple[str, int], list[str]] = {}
    for name, tensor in tensors.items():
        storages.setdefault((str(tensor.device), tensor.untyped_storage().data_ptr()), []).append(name)
    places = {}
    for number, names in enumerate(storages.values()):
        first = min((tensors[name].data_ptr() for name in names if tensors[name].numel()), default=0)
        first -= first % ALIGNMENT
        for name in names:
            tensor = tensors[name]
            offset = tensor.data_ptr() - first if tensor.numel() else 0
            dtype = str(tensor.dtype).removeprefix("torch.")
            places[name] = Place(dtype, tuple(tensor.shape), tensor.stride(), number, offset)
    return {name: places[name] for name in tensors}


def sizes(places: Mapping[str, Place]) -> dict[int, int]:
    """Return the bytes of each storage."""
    found: dict[int, int] = {}
    for place in places.values():
        found[place.storage] = max(found.get(place.storage, 0), place.end)
    return found


def allocate(places: Mapping[str, Place], device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate storages and return the tensors in them; every byte is 255, which is NaN in all floating dtypes."""
    storages: dict[int, tuple[Any, int]] = {}
    for number, size in sizes(places).items():
        buffer = torch.full((size + ALIGNMENT,), 255, dtype=torch.uint8, device=device)
        storages[number] = buffer.untyped_storage(), -buffer.data_ptr() % ALIGNMENT
    made = {}
    for name, place in places.items():
        storage, aligned = storages[place.storage]
        empty = torch.empty(0, dtype=DTYPES[place.dtype], device=device)
        made[name] = empty.set_(storage, (aligned + place.offset) // place.itemsize, place.shape, place.strides)
    return made


def write(tensor: torch.Tensor, numbers: torch.Tensor, units: torch.Tensor | None = None) -> None:
    """Copy numbers into a tensor, whose elements may share addresses where a stride is 0.

    Args:
        tensor: changed in place.
        numbers: of the tensor's shape, but for the first dimension where there are `units`.
        units: [n] int64, on the tensor's device: `numbers[i]` is for `tensor[units[i]]`. All of it if None.
    """
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, numbers = tensor.narrow(dim, 0, 1), numbers[(slice(None),) * dim + (slice(1),)]
            units = units[:1] * 0 if units is not None and dim == 0 else units
    if units is None:
        tensor.copy_(numbers)
    else:
        indexed(tensor)[units] = indexed(numbers)


def indexed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or its bytes: PyTorch indexes not every 8-bit float."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
