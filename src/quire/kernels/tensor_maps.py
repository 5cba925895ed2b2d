"""Tensor maps: TMA descriptors as the GPU reads them, kept from call to call.

Triton encodes a tensor descriptor at every launch. A tensor map is a function of the memory's address, the matrix's
shape and strides, and the format that a kernel was compiled for. So a kept map serves every tensor with the same
address, shape, strides and format, also a tensor that was allocated where another had been.
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

KEPT = 4096  # tensor maps: two to four for the cache of each layer, and those of queries
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
        """Return the kernel's arguments for a matrix: its tensor map, its shape and its strides.

        Args:
            address: of the matrix, a multiple of 16.
            shape: of the matrix.
            strides: in elements.
        """
        memory = Memory(address, self.dtype)
        descriptor = self.descriptor(memory, [*shape], [*strides], [*self.box], self.layout)
        return tuple(ENCODE(descriptor, self.metadata, *[None] * (ENCODER_ARGUMENTS - 2)))


def set_boxes(compiled: Any, boxes: Sequence[tuple[int, ...] | None]) -> None:
    """Let TMA load other boxes than a kernel was compiled for, before its first launch.

    A kernel gives TMA the place of a box alone; its extents are in the tensor map. So they need be no powers of two.

    Args:
        compiled: the kernel.
        boxes: the extents of each tensor descriptor's boxes, or None for those that it was compiled for.
    """
    metadata, kinds = compiled.metadata, compiled.metadata.tensordesc_meta
    changed = [
        of_one if box is None else {**of_one, "block_size": [*box]} for of_one, box in zip(kinds, boxes, strict=True)
    ]
    compiled.metadata = metadata._replace(tensordesc_meta=changed)


def launcher_of(compiled: Any, descriptors: Sequence[Any]) -> tuple[tuple[Format, ...], Any]:
    """Return the formats of a kernel that was launched with these descriptors, and its launcher for tensor maps.

    The launcher is Triton's. It takes what `Format.tensor_map` returns in place of the descriptors.
    """
    return _launcher_of(compiled, tuple((type(d), d.base.dtype, tuple(d.block_shape), d.layout) for d in descriptors))


@lru_cache(maxsize=256)
def _launcher_of(compiled: Any, kinds: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Format, ...], Any]:
    formats, metadata = [], compiled.metadata
    for kind, of_one in zip(kinds, metadata.tensordesc_meta, strict=True):
        items = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in of_one.items())
        formats.append(_format(*kind, items))
    types, ranks = {}, iter([len(of_one["block_size"]) for of_one in metadata.tensordesc_meta])
    for name, kind in compiled.src.signature.items():
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = next(ranks)
            parts = ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]
            types |= {f"{name}.{i}": part for i, part in enumerate(parts)}
        else:
            types[name] = kind
    active: Any = driver.active
    run = active.launcher_cls(SimpleNamespace(signature=types), metadata._replace(tensordesc_meta=None))
    return tuple(formats), run


@cache
def _format(descriptor: type, dtype: torch.dtype, box: tuple[int, ...], layout: Any, metadata: Any) -> Format:
    return Format(descriptor, dtype, box, layout, dict(metadata))
