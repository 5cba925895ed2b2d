"""Arrays whose elements carry the expression by which they were computed.

Triton's interpreter runs a kernel on NumPy arrays. Here it gets `Traced` in their place. An element has a value, as
before, and a tree: a 64-bit hash of the expression, whose leaves are elements of the tensors that the kernel was given.
Elements with equal trees are the same expression of the same leaves (but for collisions of the hash), so they have the
same bits whatever the tensors hold. No tree depends on a value of a leaf.

An element may be known: it is one number whatever the leaves are, such as the -inf of a masked score. Plain arrays are
constants, so all of their elements are known. A traced array never becomes a plain one: what NumPy would do by way of
`__array__` is an error, and so are functions that this file does not list.

Trees are equal up to these identities, each of which leaves the bits alone:

* a + b = b + a and a * b = b * a; and of two terms alone, a sum over an axis is an addition;
* x + 0 = x - 0 = x, x * 1 = x, x - x = 0, but for the sign of a zero, which is not part of a tree;
* 0 * x = 0, -inf - x = -inf and x is neither -inf nor inf, for an x that is finite;
* -inf * x = -inf for an x that is positive: the one such factor of Quire's kernels is a scale;
* max(x, -inf) = x, and maxima over an axis do not depend on its order;
* fma(x, y, z) = z where x * y = 0, and x + z where y = 1.

What they do not do: (a + b) + c is not a + (b + c). A sum over more than two terms is a function of its terms in order,
of the tile's shape, and of `Tracer.layout`, since the compiler orders it by how a tile is spread over threads.

A product of matrices is a chain of steps of 16 columns, or of one where float32 is multiplied without tensor cores: a
step is a function of the sum before it and of the pairs of its columns, in order. A pair with a factor 0 adds nothing.
"""

from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

STEP = {2: 16, 4: 1}  # columns of a step of a product, by the bytes of an operand's element
ODD = np.uint64(0x9E3779B97F4A7C15)
MIX = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
COMMUTATIVE = {"add", "multiply", "maximum", "minimum", "fmax", "fmin", "equal", "not_equal"}


def scramble(x: Any) -> Any:
    """Return a permutation of 64-bit words in which each bit depends on all bits (splitmix64's)."""
    x = (x ^ (x >> SHIFTS[0])) * MIX[0]
    x = (x ^ (x >> SHIFTS[1])) * MIX[1]
    return x ^ (x >> SHIFTS[2])


@lru_cache(maxsize=10_000)
def tag(*words: object) -> np.ndarray:
    """Return a 64-bit word for some words."""
    return np.frombuffer(blake2b(repr(words).encode(), digest_size=8).digest(), np.uint64)


@lru_cache(maxsize=100)
def weights(number: int) -> np.ndarray:
    """Return as many odd numbers: the sum of words times them depends on the words' order."""
    return scramble(np.arange(1, number + 1, dtype=np.uint64) * ODD) | np.uint64(1)


def node(name: np.ndarray, *trees: np.ndarray) -> np.ndarray:
    """Return the trees of an operation on trees, in order."""
    word = name
    for tree in trees:
        word = scramble(word * ODD + tree)
    return word.reshape(np.broadcast_shapes(*(tree.shape for tree in trees)))


def leaves(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the trees of a tensor's elements."""
    return node(tag("leaf", name), np.arange(int(np.prod(shape)), dtype=np.uint64).reshape(shape))


def constants(values: np.ndarray) -> np.ndarray:
    """Return the trees of known numbers, by dtype and bits; of a zero without its sign."""
    values = values + values.dtype.type(0) if values.dtype.kind == "f" else values
    bits = values.view(f"uint{8 * values.itemsize}") if values.dtype != bool else values
    return node(tag("known", values.dtype.str), bits.astype(np.uint64))


class Traced(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of elements with trees.

    Args:
        values: the array.
        trees: uint64, of the same shape; of known elements, anything.
        known: which elements are numbers whatever the leaves are.
    """

    __slots__ = ("known", "trees", "values")

    def __init__(self, values: np.ndarray, trees: np.ndarray, known: np.ndarray) -> None:
        shape = np.shape(values)
        if any(type(each) is not np.ndarray or each.shape != shape for each in (values, trees, known)):
            raise TypeError(f"an element has no tree: {values!r}, {trees!r}, {known!r}")
        self.values, self.known = values, known
        self.trees = np.where(known, constants(values), trees) if known.any() else trees

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a traced array must not become a plain one, which has no trees")

    def __bool__(self) -> bool:
        if not self.known.all():
            raise TypeError("control flow depends on numbers of a tensor")
        return bool(self.values)

    def __repr__(self) -> str:
        return f"Traced({self.values!r})"

    # What the interpreter reads of an array.
    @property
    def dtype(self) -> Any:
        return self.values.dtype

    @property
    def itemsize(self) -> int:
        return self.values.itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def ndim(self) -> int:
        return self.values.ndim

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> "Traced":
        """Return the elements in other places."""
        return Traced(move(self.values), move(self.trees), move(self.known))

    def reshape(self, *shape: Any) -> "Traced":
        return self.moved(lambda x: x.reshape(*shape))

    def __getitem__(self, index: Any) -> "Traced":
        return self.moved(lambda x: np.asarray(x[index]))

    def astype(self, dtype: Any) -> "Traced":
        """Round, or convert."""
        dtype = np.dtype(dtype)
        if dtype == self.dtype:
            return self
        return Traced(self.values.astype(dtype), node(tag("astype", self.dtype.str, dtype.str), self.trees), self.known)

    def view(self, dtype: Any) -> "Traced":
        """Take the bits for numbers of another type, of the same size."""
        dtype = np.dtype(dtype)
        assert dtype.itemsize == self.itemsize
        return Traced(self.values.view(dtype), node(tag("view", self.dtype.str, dtype.str), self.trees), self.known)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> "Traced":
        if method != "__call__" or options or ufunc.nout != 1 or ufunc.signature is not None:
            raise TypeError(f"{ufunc.__name__}.{method} is not traced")
        # NumPy takes a number for one of the other operand's dtype.
        dtype = next(x.dtype for x in inputs if isinstance(x, Traced))
        return apply(ufunc, *(traced(np.asarray(x, dtype) if isinstance(x, int | float) else x) for x in inputs))

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if function not in FUNCTIONS:
            raise TypeError(f"{function.__name__} is not traced")
        return FUNCTIONS[function](*args, **options)


def traced(x: Any) -> Traced:
    """Return an array as a traced one; a plain one is of constants."""
    if isinstance(x, Traced):
        return x
    x = np.asarray(x)
    if x.dtype == object:
        raise TypeError(f"{x!r} is no array of numbers")
    return Traced(x, np.zeros(x.shape, np.uint64), np.ones(x.shape, bool))


def apply(ufunc: np.ufunc, *inputs: Traced) -> Traced:
    """Return the elementwise operation on traced arrays."""
    with np.errstate(all="ignore"):
        values = np.asarray(ufunc(*(x.values for x in inputs)))
    name, shape = ufunc.__name__, values.shape
    trees = [np.broadcast_to(x.trees, shape) for x in inputs]
    known = [np.broadcast_to(x.known, shape) for x in inputs]
    of_all = known[0] & known[1] if len(inputs) == 2 else known[0].copy()
    ordered = [np.minimum(*trees), np.maximum(*trees)] if name in COMMUTATIVE else trees
    result = node(tag(name, values.dtype.str), *ordered)
    if name in RULES and inputs[0].dtype.kind == "f" and not of_all.all():
        result, values, of_all = result.copy(), values.copy(), of_all.copy()
        operands = [np.broadcast_to(x.values, shape) for x in inputs]
        RULES[name](Operation(values, result, of_all, operands, trees, known))
    return Traced(values, result, of_all)


class Operation:
    """An operation whose result may be one of its operands, or known."""

    def __init__(self, values: Any, result: Any, known: Any, operands: Any, trees: Any, of_operands: Any) -> None:
        self.values, self.result, self.known = values, result, known
        self.operands, self.trees, self.of_operands = operands, trees, of_operands

    def holds(self, i: int, number: float) -> np.ndarray:
        """Return where operand i is known to be a number, and the other is not known."""
        return self.of_operands[i] & (self.operands[i] == number) & ~self.of_operands[1 - i]

    def takes(self, i: int, where: np.ndarray) -> None:
        """Let the result be operand i in some places."""
        self.result[where] = self.trees[i][where]

    def becomes(self, number: Any, where: np.ndarray) -> None:
        """Let the result be a number in some places."""
        self.values[where] = number
        self.known |= where


def add(o: Operation) -> None:
    for i in (0, 1):
        o.takes(1 - i, o.holds(i, 0))


def subtract(o: Operation) -> None:
    o.takes(0, o.holds(1, 0))
    o.becomes(-np.inf, o.holds(0, -np.inf))
    o.becomes(0, ~o.known & (o.trees[0] == o.trees[1]))


def multiply(o: Operation) -> None:
    for i in (0, 1):
        o.takes(1 - i, o.holds(i, 1))
        o.becomes(0, o.holds(i, 0))
        o.becomes(-np.inf, o.holds(i, -np.inf))


def maximum(o: Operation) -> None:
    for i in (0, 1):
        o.takes(1 - i, o.holds(i, -np.inf))


def equal(o: Operation) -> None:
    for i in (0, 1):
        o.becomes(False, o.holds(i, -np.inf) | o.holds(i, np.inf))


RULES = {"add": add, "subtract": subtract, "multiply": multiply, "maximum": maximum, "fmax": maximum, "equal": equal}


def where(condition: Any, a: Any, b: Any) -> Traced:
    """Select; where the condition is not known, the tree has the condition and both operands."""
    c, a, b = traced(condition), traced(a), traced(b)
    values = np.where(c.values, a.values, b.values)
    a, b = a.astype(values.dtype), b.astype(values.dtype)
    either = node(tag("where"), *np.broadcast_arrays(c.trees, a.trees, b.trees))
    trees = np.where(c.known, np.where(c.values, a.trees, b.trees), np.where(a.trees == b.trees, a.trees, either))
    known = np.where(c.known, np.where(c.values, a.known, b.known), a.known & b.known & (a.trees == b.trees))
    return Traced(values, trees, known)


def fma(x: Any, y: Any, z: Any, values: np.ndarray) -> Traced:
    """Return x * y + z, rounded once, whose values are given."""
    x, y, z = (
        Traced(*(np.broadcast_to(p, values.shape).copy() for p in (e.values, e.trees, e.known))) for e in (x, y, z)
    )
    product, one = x * y, (y.known & (y.values == 1)) | (x.known & (x.values == 1))
    plain = product.known & (product.values == 0) | one
    trees = node(tag("fma", values.dtype.str), np.minimum(x.trees, y.trees), np.maximum(x.trees, y.trees), z.trees)
    sums = product + z
    known = np.where(plain, sums.known, x.known & y.known & z.known)
    return Traced(values, np.where(plain, sums.trees, trees), known)


def dot(a: Any, b: Any, acc: Any, values: np.ndarray) -> Traced:
    """Return the product of [M, K] and [K, N], added to acc [M, N], whose values are given."""
    a, b, acc = traced(a), traced(b), traced(acc)
    step = STEP[a.itemsize]
    size, trees, known = a.shape[1], acc.trees, acc.known
    zero_a, zero_b = a.known & (a.values == 0), b.known & (b.values == 0)
    name = tag("step", step, a.dtype.str, acc.dtype.str)
    for first in range(0, size, step):
        part = slice(first, first + step)
        pairs = node(tag("pair"), a.trees[:, part, None], b.trees[None, part, :])
        pairs *= weights(step)[None, : pairs.shape[1], None]
        adds = ~(zero_a[:, part, None] | zero_b[None, part, :])
        sums = np.where(adds, pairs, np.uint64(0)).sum(1)
        changes = adds.any(1)
        trees, known = np.where(changes, node(name, trees, sums), trees), known & ~changes
    return Traced(values, trees, known)


def total(x: Any, axis: int | None = None, keepdims: bool = False) -> Traced:
    """Return the sum over an axis. One of two terms is an addition; for others, see the module."""
    assert axis is not None
    first = x[(slice(None),) * axis + (0,)]
    if x.shape[axis] <= 2:
        whole = first if x.shape[axis] == 1 else first + x[(slice(None),) * axis + (1,)]
    else:
        values, known = np.sum(x.values, axis=axis), x.known.all(axis)
        terms = np.moveaxis(x.trees, axis, -1) * weights(x.shape[axis])
        whole = Traced(np.asarray(values), node(tag("sum", x.shape, axis, LAYOUT[0]), terms.sum(-1)), known)
    return whole.moved(lambda y: np.expand_dims(y, axis)) if keepdims else whole


LAYOUT: list[object] = [None]  # what the order of longer sums depends on, but for the tile's shape


def largest(x: Any, axis: int | None = None, keepdims: bool = False) -> Traced:
    """Return the maximum over an axis, of those elements that are not -inf; the order does not matter."""
    assert axis is not None and x.dtype.kind == "f"
    values, counts = np.max(x.values, axis=axis), ~(x.known & (x.values == -np.inf))
    terms = np.where(counts, scramble(x.trees), np.uint64(0)).sum(axis)
    whole = Traced(np.asarray(values), node(tag("max"), terms), x.known.all(axis))
    return whole.moved(lambda y: np.expand_dims(y, axis)) if keepdims else whole


def moving(function: Callable[..., np.ndarray]) -> Callable[..., Traced]:
    """Return a function that moves elements."""
    return lambda x, *args, **options: x.moved(lambda y: function(y, *args, **options))


def joining(function: Callable[..., np.ndarray]) -> Callable[..., Traced]:
    """Return a function that makes one array of several."""

    def join(parts: Any, *args: Any, **options: Any) -> Traced:
        whole = [traced(part) for part in parts]
        return Traced(
            *(function([getattr(x, n) for x in whole], *args, **options) for n in ("values", "trees", "known"))
        )

    return join


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.where: where,
    np.sum: total,
    np.nanmax: largest,
    np.broadcast_to: moving(np.broadcast_to),
    np.expand_dims: moving(np.expand_dims),
    np.transpose: moving(np.transpose),
    np.stack: joining(np.stack),
    np.concatenate: joining(np.concatenate),
}
