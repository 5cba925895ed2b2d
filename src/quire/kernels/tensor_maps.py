"""Tensor maps: TMA descriptors as the GPU reads them, kept from call to call.

Triton encodes a tensor descriptor at every launch. A tensor map is a function of the memory's address, the matrix's
shape and strides, and the format that a kernel was compiled for. So one that is kept serves every tensor of which these
are the same, also one that took the place of another in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.runtime.driver import driver

KEPT = 4096  # tensor maps: two for the cache of each layer, and those of queries
ENCODE: Callable[..., Any] = make_tensordesc_arg
ENCODER_ARGUMENTS = len(signature(ENCODE).parameters)  # 2 in Triton 3.6.0; 3.9.0 has one that it ignores


class Memory(NamedTuple):
    """Memory at an address. Triton's descriptors take it in place of a tensor, which they would keep alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


@dataclass(frozen=True, eq=False)
class Format:
    """What a kernel was compiled for, of one of its tensor descriptors. Equal formats are one object.

    Attributes:
        descriptor: Triton's class.
        dtype: of the elements.
        box: rows and columns that TMA loads at a time.
        layout: of the box in shared memory.
        metadata: what Triton's compiler says about it.
    """

    descriptor: Callable[..., Any]
    dtype: torch.dtype
    box: tuple[int, ...]
    layout: Any
    metadata: dict[str, Any]

    @lru_cache(maxsize=KEPT)  # noqa: B019, one cache for the formats of all kernels, which are few
    def tensor_map(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Any, ...]:
        """Return what a kernel takes for a matrix: its tensor map, its shape and its strides.

        Args:
            address: of the matrix, a multiple of 16.
            shape: of the matrix.
            strides: in elements.
        """
        memory = Memory(address, self.dtype)
        descriptor = self.descriptor(memory, [*shape], [*strides], [*self.box], self.layout)
        return tuple(ENCODE(descriptor, self.metadata, *[None] * (ENCODER_ARGUMENTS - 2)))


def formats_of(compiled: Any, descriptors: Sequence[Any]) -> tuple[Format, ...]:
    """Return the formats that a compiled kernel takes, which was launched with these descriptors."""
    formats = []
    for descriptor, metadata in zip(descriptors, compiled.metadata.tensordesc_meta, strict=True):
        items = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in metadata.items())
        box = tuple(descriptor.block_shape)
        formats.append(_format(type(descriptor), descriptor.base.dtype, box, descriptor.layout, items))
    return tuple(formats)


@cache
def _format(descriptor: type, dtype: torch.dtype, box: tuple[int, ...], layout: Any, metadata: Any) -> Format:
    return Format(descriptor, dtype, box, layout, dict(metadata))


@lru_cache(maxsize=256)
def launcher_of(compiled: Any) -> Any:
    """Return Triton's launcher of a compiled kernel, for arguments in which `tensor_map` replaced the descriptors."""
    types, metadata = {}, iter(compiled.metadata.tensordesc_meta)
    for name, kind in compiled.src.signature.items():
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = len(next(metadata)["block_size"])
            parts = ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]
            types |= {f"{name}.{i}": part for i, part in enumerate(parts)}
        else:
            types[name] = kind
    active: Any = driver.active
    return active.launcher_cls(SimpleNamespace(signature=types), compiled.metadata._replace(tensordesc_meta=None))
