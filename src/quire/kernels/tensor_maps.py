"""Tensor maps: TMA descriptors as the GPU reads them, kept from call to call.

Triton encodes a tensor descriptor at every launch. A tensor map is a function of the memory's address, the matrix's
shape and strides, and the format that a kernel was compiled for. So a kept map serves every tensor with the same
address, shape, strides and format, also a tensor that was allocated where another had been.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from quire.triton_internals import descriptor_formats, encode, launcher_of_tensor_maps

KEPT = 4096  # tensor maps: two to four for the cache of each layer, and those of queries


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
        """Return the kernel's arguments for a matrix: its tensor map, its shape and its strides.

        Args:
            address: of the matrix, a multiple of 16.
            shape: of the matrix.
            strides: in elements.
        """
        memory = Memory(address, self.dtype)
        descriptor = self.descriptor(memory, [*shape], [*strides], [*self.box], self.layout)
        return encode(descriptor, self.metadata)


def formats_and_launcher(compiled: Any, descriptors: Sequence[Any]) -> tuple[tuple[Format, ...], Any]:
    """Return the formats of a kernel that was launched with these descriptors, and its launcher for tensor maps.

    The launcher is Triton's. It takes what `Format.tensor_map` returns in place of the descriptors.
    """
    return _formats_and_launcher(
        compiled, tuple((type(d), d.base.dtype, tuple(d.block_shape), d.layout) for d in descriptors)
    )


@lru_cache(maxsize=256)
def _formats_and_launcher(compiled: Any, kinds: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Format, ...], Any]:
    formats = []
    for kind, of_one in zip(kinds, descriptor_formats(compiled), strict=True):
        items = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in of_one.items())
        formats.append(_format(*kind, items))
    return tuple(formats), launcher_of_tensor_maps(compiled)


@cache
def _format(descriptor: type, dtype: torch.dtype, box: tuple[int, ...], layout: Any, metadata: Any) -> Format:
    return Format(descriptor, dtype, box, layout, dict(metadata))
