"""Run jitted kernels in Triton's interpreter on traced arrays (`arrays.py`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.proof import arrays
from tests.proof.arrays import Traced, node, tag, traced

Builder, TensorHandle = interpreter.InterpreterBuilder, cast(Any, interpreter.TensorHandle)


class Region:
    """Memory whose elements have trees.

    Args:
        tensor: of elements that follow one another.
        trees: of its elements; none has one if they are left out.
    """

    def __init__(self, tensor: torch.Tensor, trees: np.ndarray | None = None) -> None:
        assert tensor.is_contiguous()
        self.tensor = tensor  # keeps the memory
        self.start, self.itemsize = tensor.data_ptr(), tensor.itemsize
        self.stop = self.start + tensor.numel() * self.itemsize
        self.has = np.full(tensor.numel(), trees is not None)  # which elements have trees
        self.trees = np.zeros(tensor.numel(), np.uint64) if trees is None else trees.reshape(-1).copy()
        self.known = np.zeros(tensor.numel(), bool)

    def places(self, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Return the numbers of the elements at addresses."""
        offsets = addresses - np.uint64(self.start)
        if (addresses < self.start).any() or (addresses + itemsize > self.stop).any() or (offsets % itemsize).any():
            raise TypeError("one load or store is of several tensors, or of parts of elements")
        return (offsets // self.itemsize).astype(np.int64)

    def read(self, addresses: np.ndarray, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the trees of elements, or of pairs of elements, and which are known."""
        at, count = self.places(addresses, itemsize), itemsize // self.itemsize
        if count not in (1, 2) or not all(self.has[at + i].all() for i in range(count)):
            raise TypeError("memory is read whose elements have no trees")
        if count == 1:
            return self.trees[at], self.known[at]
        return node(tag("pair of elements"), self.trees[at], self.trees[at + 1]), np.zeros(at.shape, bool)

    def write(self, addresses: np.ndarray, value: Traced) -> None:
        """Keep the trees of what is stored."""
        if value.itemsize != self.itemsize:
            raise TypeError(f"elements of {value.itemsize} bytes are stored over some of {self.itemsize}")
        at = self.places(addresses, self.itemsize)
        self.trees[at], self.known[at], self.has[at] = value.trees.reshape(-1), value.known.reshape(-1), True

    def read_all(self) -> np.ndarray:
        """Return the trees of all elements, in the tensor's shape."""
        assert self.has.all(), "an element was never written"
        return self.trees.reshape(self.tensor.shape)


class Tracer:
    """The memory of launches whose trees are traced."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def add(self, tensor: torch.Tensor, trees: np.ndarray | None = None) -> Region:
        """Let a tensor's elements have trees, from now on or when they are written."""
        self.regions.append(Region(tensor, trees))
        return self.regions[-1]

    def find(self, addresses: np.ndarray) -> Region | None:
        """Return the region of some addresses, by the first one."""
        if addresses.size == 0:
            return None
        first = int(addresses[0])
        return next((region for region in self.regions if region.start <= first < region.stop), None)

    def load(self, ptrs: Any, mask: Any, loaded: Any) -> Any:
        """Return what was loaded, with trees."""
        plain(ptrs, mask, loaded)
        active = np.broadcast_to(mask.data, ptrs.data.shape)
        addresses = ptrs.data[active]
        region = self.find(addresses)
        if region is None:
            if loaded.data.dtype.kind == "f" and active.any():
                raise TypeError("numbers are read from a tensor whose elements have no trees")
            return loaded
        trees, known = np.zeros(ptrs.data.shape, np.uint64), np.ones(ptrs.data.shape, bool)
        trees[active], known[active] = region.read(addresses, loaded.data.itemsize)
        return TensorHandle(Traced(loaded.data, trees, known), loaded.dtype)

    def store(self, ptrs: Any, value: Any, mask: Any) -> Any:
        """Keep the trees of what is about to be stored, and return its values."""
        plain(ptrs, mask)
        x = value.data
        active = np.broadcast_to(mask.data, ptrs.data.shape)
        region = self.find(ptrs.data[active])
        if region is not None:
            region.write(ptrs.data[active], traced(x).moved(lambda y: np.broadcast_to(y, ptrs.data.shape)[active]))
        elif isinstance(x, Traced) and active.any():
            raise TypeError("traced numbers are stored to a tensor whose elements have no trees")
        return TensorHandle(x.values, value.dtype) if isinstance(x, Traced) else value

    @contextmanager
    def tracing(self, layout: object) -> Iterator[None]:
        """Trace what kernels compute in this context; `layout` says on what the order of long sums depends."""
        hooks = {
            "create_masked_load": lambda real: load(self, real),
            "create_masked_store": lambda real: store(self, real),
            "create_dot": dot,
            "create_fma": fma,
            "create_splat": splat,
            "create_unsplat": unsplat,
        }
        with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
            patch.setattr(arrays, "LAYOUT", [layout])
            for name, hook in hooks.items():
                patch.setattr(Builder, name, hook(getattr(Builder, name)))
            yield


def plain(*handles: Any) -> None:
    """Fail where an address, a mask, or a number from memory has a tree."""
    if any(isinstance(handle.data, Traced) for handle in handles):
        raise TypeError("addresses or masks depend on numbers of a tensor")


def load(tracer: Tracer, real: Any) -> Any:
    return lambda builder, ptrs, mask, *rest: tracer.load(ptrs, mask, real(builder, ptrs, mask, *rest))


def store(tracer: Tracer, real: Any) -> Any:
    return lambda builder, ptrs, value, mask, *rest: real(builder, ptrs, tracer.store(ptrs, value, mask), mask, *rest)


def untraced(handle: Any) -> Any:
    return TensorHandle(traced(handle.data).values, handle.dtype)


def dot(real: Any) -> Any:
    def create_dot(builder: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        of_a, of_b = (traced(x.data).values.astype(np.float32) for x in (a, b))
        values = np.einsum("ik,kj->ij", of_a, of_b) + untraced(acc).data
        return TensorHandle(arrays.dot(a.data, b.data, acc.data, values), acc.dtype.scalar)

    return create_dot


def fma(real: Any) -> Any:
    def create_fma(builder: Any, *operands: Any) -> Any:
        found, (x, y, z) = real(builder, *map(untraced, operands)), operands
        return TensorHandle(arrays.fma(traced(x.data), traced(y.data), traced(z.data), found.data), found.dtype)

    return create_fma


def splat(real: Any) -> Any:
    def create_splat(builder: Any, type: Any, x: Any) -> Any:
        if not isinstance(x.data, Traced):
            return real(builder, type, x)
        return TensorHandle(x.data.moved(lambda y: np.broadcast_to(y.reshape(-1)[0], type.shape)), x.dtype.scalar)

    return create_splat


def unsplat(real: Any) -> Any:
    def create_unsplat(builder: Any, x: Any) -> Any:
        return TensorHandle(x.data.reshape(-1)[:1], x.dtype.scalar)

    return create_unsplat
