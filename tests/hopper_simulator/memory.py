"""Global and shared memory of a simulated program, with what may go wrong there.

Shared memory is bytes, and a layout says where a tile's elements are. So a tile that is written in one layout and read
in another holds what it would hold on a GPU. Of each 16 bytes it is known whether a copy to them is under way, and
which warps stored them and have not fenced yet. Of each load from a place that TMA writes, it is known whether it is
complete.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import interpreter as raw_memory
from triton.experimental.gluon import language as gl

from .values import TORCH_DTYPES, Load, Value, computed, value

UNWRITTEN = 0xFF  # NaN, whatever the type
NUMPY_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
OF_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class AccessError(Exception):
    """A kernel accesses memory where or when it must not."""


class GlobalMemory:
    """The tensors that a launch may access.

    Of each four bytes that warps stored, it is known who stored them, and when an atomic operation released them.
    """

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.stored: dict[int, np.ndarray] = {}  # by the start of a range: see `Stores`
        self.running_warps: Callable[[], Any] = lambda: None
        self.releases = 0  # so far

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    def marks(self, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the marks of a range, of each four bytes, and where those of some addresses in it are.

        A mark is 0, or the number of the warps that stored there, or less than 0: the release after that.
        """
        if addresses.size == 0:
            return None
        for start, stop in self.ranges:
            if start <= addresses.min() and addresses.max() < stop:
                if start not in self.stored:
                    self.stored[start] = np.zeros((stop - start + 3) // 4, np.int32)
                return self.stored[start], ((addresses - start) // 4).astype(np.int64)
        return None

    def check_released(self, addresses: np.ndarray) -> None:
        """Raise if these warps may not see yet what other warps of the launch stored."""
        own, found = self.running_warps(), self.marks(addresses)
        if own is None or found is None:
            return
        marks = found[0][found[1]]
        if ((marks > 0) & (marks != own.id)).any():
            raise AccessError("warps load what other warps stored and have not released")
        if (-marks > own.acquired).any():
            raise AccessError("warps load what other warps released, and have not acquired it")

    def check(self, addresses: np.ndarray, size: int) -> None:
        """Raise unless all addresses are in tensors."""
        if addresses.size == 0:
            return
        low, high = addresses.min(), addresses.max() + size
        if any(start <= low and high <= stop for start, stop in self.ranges):
            return
        inside = np.zeros(addresses.shape, bool)
        for start, stop in self.ranges:
            inside |= (addresses >= start) & (addresses + size <= stop)
        if not inside.all():
            raise AccessError(f"{(~inside).sum()} of {inside.size} addresses are outside of all tensors")

    @computed
    def load(self, pointer: Value, mask: Any = None, other: Any = None, cache_modifier: str = "") -> Value:
        element = pointer.dtype.element_ty
        dtype = TORCH_DTYPES[element]
        addresses, mask = self.where(pointer, mask)
        self.check(addresses[mask], dtype.itemsize)
        if self.stored:
            self.check_released(addresses[mask])
        bits = NUMPY_DTYPES[dtype.itemsize]
        if other is None:  # what is masked is not defined
            others = np.full(addresses.shape, -1, np.int64).astype(bits)
        else:
            number = value(other).to(element).data.contiguous()
            others = number.view(OF_BITS[dtype.itemsize]).numpy().view(bits)
            others = np.ascontiguousarray(np.broadcast_to(others, addresses.shape))
        loaded = raw_memory.load(addresses, mask, others, np.dtype(bits))
        return Value(torch.from_numpy(loaded.view(f"i{dtype.itemsize}")).view(dtype), element)

    def bytes_at(self, address: int) -> np.ndarray:
        """Return 16 bytes, of which some are of a tensor; others are as if nothing was written there."""
        addresses = address + np.arange(16, dtype=np.uint64)
        mask = np.zeros(16, bool)
        for start, stop in self.ranges:
            mask |= (addresses >= start) & (addresses < stop)
        if not mask.any():
            raise AccessError("16 bytes outside of all tensors are copied")
        return raw_memory.load(addresses, mask, np.full(16, UNWRITTEN, np.uint8), np.dtype(np.uint8))

    def store(self, pointer: Value, stored: Any, mask: Any = None) -> None:
        dtype = TORCH_DTYPES[pointer.dtype.element_ty]
        for x in (pointer, stored, mask):
            if isinstance(x, Value):
                x.take()
        addresses, mask = self.where(pointer, mask)
        self.check(addresses[mask], dtype.itemsize)
        numbers = value(stored).to(pointer.dtype.element_ty).data.expand(addresses.shape).contiguous()
        raw_memory.store(
            addresses, numbers.view(OF_BITS[dtype.itemsize]).numpy().view(NUMPY_DTYPES[dtype.itemsize]), mask
        )
        own = self.running_warps()
        if own is not None and (found := self.marks(addresses[mask])) is not None:
            found[0][found[1]] = own.id
            own.stores.append(found)

    def atomic_add(self, pointer: Value, added: Any, mask: Any = None, sem: str = "") -> Value:
        """Add to numbers. With "acq_rel", release what these warps stored before their last barrier, and acquire."""
        own = self.running_warps()
        stores, own.stores = own.stores, []  # atomic operations need no release
        addresses, where = self.where(pointer, mask)
        if (found := self.marks(addresses[where])) is not None:
            found[0][found[1]] = 0
        before = self.load(pointer, mask, 0)
        self.store(pointer, before + added, mask)
        if found is not None:
            found[0][found[1]] = 0
        own.stores = stores
        if sem == "acq_rel":
            self.releases += 1
            for marks, at in own.stores_before_barrier:
                marks[at] = -self.releases
            own.stores_before_barrier = []
            own.acquired = self.releases
        return before

    @staticmethod
    def where(pointer: Value, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the addresses, and which of them are accessed."""
        addresses = pointer.data.numpy()
        if mask is None:
            return np.array(addresses).view(np.uint64), np.ones(addresses.shape, bool)
        mask = value(mask).data.numpy()
        if mask.shape == addresses.shape:
            return np.array(addresses).view(np.uint64), np.array(mask)
        shape = np.broadcast_shapes(addresses.shape, mask.shape)
        return np.array(np.broadcast_to(addresses, shape)).view(np.uint64), np.array(np.broadcast_to(mask, shape))


class Marks:
    """A number for each 16 bytes of shared memory, mostly 0."""

    def __init__(self, size: int) -> None:
        self.numbers = np.zeros((size + 15) // 16, np.uint8)
        self.some = False  # may be other than 0

    def set(self, at: np.ndarray, number: int) -> None:
        self.numbers[at] = number
        self.some = self.some or number > 0

    def clear(self, number: int) -> None:
        if self.some:
            self.numbers[self.numbers == number] = 0
            self.some = bool(self.numbers.any())

    def any(self, at: np.ndarray) -> bool:
        return self.some and bool(self.numbers[at].any())


class Allocation:
    """Bytes of shared memory, from an address that 1024 divides."""

    def __init__(self, size: int, running_warps: Callable[[], Any], address: int) -> None:
        self.running_warps, self.address = running_warps, address
        self.bytes = torch.full(((size + 15) // 16 * 16,), UNWRITTEN, dtype=torch.uint8)
        self.lines = self.bytes.view(-1, 16)
        # Of each 16 bytes: whether a copy will write them, whether TMA has begun to write them at any time, and 1 + the
        # warps that stored them, until these fence.
        self.arriving = Marks(size)
        self.written_by_tma = Marks(size)
        self.unfenced = Marks(size)

    def mark(self) -> None:
        """Store the address of each KiB at its begin."""
        words = self.bytes.view(torch.int32)[::256]
        words.copy_(torch.arange(self.address, self.address + 1024 * len(words), 1024))


class Tile:
    """A tile in shared memory, or a part of one."""

    def __init__(
        self, allocation: Allocation, dtype: tl.dtype, shape: list[int], layout: Any, base: int = 0,
        extent: tuple[int, ...] | None = None, first: tuple[int, ...] | None = None, transposed: bool = False,
    ) -> None:  # fmt: skip
        self.allocation, self.dtype, self.shape, self.layout, self.base = allocation, dtype, shape, layout, base
        self.extent = tuple(shape) if extent is None else extent  # of the tile of which this is a part
        self.first = (0,) * len(shape) if first is None else first
        self.transposed = transposed

    @property
    def itemsize(self) -> int:
        return self.dtype.primitive_bitwidth // 8

    def part(self, **changed: Any) -> "Tile":
        return Tile(**vars(self) | changed)

    def index(self, i: Any) -> "Tile":
        i = int(i)
        if not 0 <= i < self.shape[0] or self.transposed or any(self.first):
            raise AccessError(f"index {i} of {self.shape}")
        rest = self.shape[1:]
        base = self.base + i * math.prod(rest) * self.itemsize
        return self.part(shape=rest, base=base, extent=tuple(rest), first=(0,) * len(rest))

    def slice(self, start: Any, length: Any, dim: int = 0) -> "Tile":
        start, length = int(start), int(length)
        if self.transposed or start < 0 or start + length > self.shape[dim]:
            raise AccessError(f"elements {start} to {start + length} of dimension {dim} of {self.shape}")
        shape, first = list(self.shape), list(self.first)
        shape[dim], first[dim] = length, first[dim] + start
        return self.part(shape=shape, first=tuple(first))

    def permute(self, order: Any) -> "Tile":
        assert tuple(order) == (1, 0), order
        return self.part(shape=self.shape[::-1], transposed=not self.transposed)

    def reinterpret(self, dtype: tl.dtype, shape: Any, layout: Any) -> "Tile":
        shape = [int(size) for size in shape]
        if any(self.first) or self.transposed or tuple(self.shape) != self.extent:
            raise AccessError("a part of a tile is reinterpreted")
        if math.prod(shape) * dtype.primitive_bitwidth > math.prod(self.shape) * self.dtype.primitive_bitwidth:
            raise AccessError(f"{shape} of {dtype} in a tile of {self.shape} of {self.dtype}")
        return Tile(self.allocation, dtype, shape, layout, self.base)

    def place(self) -> "Place":
        stored = self.shape[::-1] if self.transposed else self.shape
        return place_of(self.layout, self.extent, self.first, tuple(stored), self.itemsize, self.base)

    def read(self) -> torch.Tensor:
        """Return a copy of the numbers, which tensor cores or warps read."""
        place, dtype = self.place(), TORCH_DTYPES[self.dtype]
        if self.allocation.arriving.any(place.lines):
            raise AccessError(f"a tile of {self.shape} is read while it is copied")
        if place.elements is None:
            numbers = self.allocation.lines[place.order].view(dtype)
        else:
            numbers = self.allocation.bytes.view(dtype)[place.elements]
        return numbers.reshape(self.shape[::-1]).T if self.transposed else numbers.reshape(self.shape)

    def load(self, layout: Any = None) -> Value:
        loaded = Value(self.read(), self.dtype)
        if self.allocation.written_by_tma.any(self.place().lines):
            load = Load(self.shape)
            self.allocation.running_warps().loads.append(load)
            loaded.loads = frozenset((load,))
        return loaded

    def store(self, stored: Value) -> None:
        """Store numbers, by warps and not by the async proxy."""
        self.write(stored.to(self.dtype).take().expand(self.shape))
        self.allocation.unfenced.set(self.place().lines, self.allocation.running_warps().number + 1)

    def write(self, numbers: torch.Tensor) -> None:
        place, numbers = self.place(), (numbers.T if self.transposed else numbers).contiguous()
        if place.elements is None:
            self.allocation.lines[place.order] = numbers.view(torch.uint8).reshape(-1, 16)
        else:
            bits = OF_BITS[self.itemsize]
            self.allocation.bytes.view(bits)[place.elements] = numbers.view(bits).reshape(place.elements.shape)

    def check_fenced(self) -> None:
        """Raise if stores to the tile are not fenced, which the async proxy need not see."""
        if self.allocation.unfenced.any(self.place().lines):
            raise AccessError(
                f"a tile of {self.shape} was stored, and no fence came before the async proxy accesses it"
            )


class Place(NamedTuple):
    """Where the numbers of a tile are in its allocation, in whole lines of 16 bytes if that is possible."""

    order: torch.Tensor | None  # of the lines, in the order of the numbers
    elements: torch.Tensor | None  # else, of the elements
    lines: np.ndarray  # in which they are


@cache
def place_of(
    layout: Any, extent: tuple[int, ...], first: tuple[int, ...], shape: tuple[int, ...], itemsize: int, base: int
) -> Place:
    """Return where a part of a tile is: its elements from `first` on."""
    grid = np.meshgrid(*(np.arange(a, a + n) for a, n in zip(first, shape, strict=True)), indexing="ij")
    if isinstance(layout, gl.NVMMASharedLayout):
        width = layout.swizzle_byte_width
        row, column = grid[0], grid[-1]
        assert len(extent) == 2 or extent[1] == 1, extent
        panel = width // itemsize  # columns
        offset = base + column // panel * extent[0] * width + row * width + column % panel * itemsize
        offset ^= (offset >> 7 & (width // 16 - 1)) << 4  # lines of 16 bytes change places within 128 bytes
    else:
        offset = np.zeros(shape, np.int64)
        for at, size in zip(grid, extent, strict=True):
            offset = offset * size + at
        offset = base + offset * itemsize
    each = 16 // itemsize
    offset = offset.ravel()
    if offset.size % each == 0:
        starts = offset[::each]
        whole = (starts % 16 == 0).all() and (
            offset.reshape(-1, each) == starts[:, None] + np.arange(each) * itemsize
        ).all()
        if whole:
            return Place(torch.from_numpy(starts // 16), None, starts // 16)
    return Place(None, torch.from_numpy(offset // itemsize), np.unique(offset // 16))
