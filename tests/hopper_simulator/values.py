"""Values of a simulated kernel: the part of Gluon's language that computes, on PyTorch tensors of a CPU.

A value has the type that Triton gives it, and wraps, truncates and rounds as that type does. Layouts are ignored: they
say which thread holds an element, not what it is.

A value knows the loads that it was computed from, those of places that TMA writes. The first operation with an effect
that takes such a value waits for the loads. A compiler may move operations without an effect.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import triton.language as tl

TORCH_DTYPES = {
    tl.int1: torch.bool, tl.int8: torch.int8, tl.uint8: torch.uint8, tl.int16: torch.int16, tl.int32: torch.int32,
    tl.int64: torch.int64, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32,
    tl.float64: torch.float64, tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2,
}  # fmt: skip
TRITON_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}  # conversions saturate


class Type:
    """What `value.type` says. Any layout equals any other."""

    layout = "any layout"


class Load:
    """A load from a place that TMA writes. It is complete when an operation with an effect has taken what it loads."""

    def __init__(self, shape: list[int]) -> None:
        self.shape = shape
        self.complete = False


def computed(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Let the results of an operation without an effect know the loads of its operands."""

    @wraps(operation)
    def compute(*args: Any, **options: Any) -> Any:
        result = operation(*args, **options)
        for x in (*args, *options.values()) if options else args:
            if isinstance(x, Value) and x.loads:
                for made in result if isinstance(result, tuple) else (result,):
                    made.loads = made.loads | x.loads
        return result

    return compute


class Value:
    """A scalar or a tensor. A pointer is the address of an element."""

    type = Type
    loads: frozenset[Load] = frozenset()  # from which the value was computed

    def __init__(self, data: torch.Tensor, dtype: tl.dtype | None = None) -> None:
        self.data = data
        self.dtype = TRITON_DTYPES[data.dtype] if dtype is None else dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def __repr__(self) -> str:
        return f"Value({self.data}, {self.dtype})"

    def take(self) -> torch.Tensor:
        """Return the numbers to an operation with an effect, which waits until they have been loaded."""
        for load in self.loads:
            load.complete = True
        return self.data

    def __bool__(self) -> bool:
        return bool(self.take().item())

    def __index__(self) -> int:
        return int(self.take().item())

    @computed
    def __getitem__(self, at: Any) -> "Value":
        return Value(self.data[at], self.dtype)

    @computed
    def __invert__(self) -> "Value":
        return Value(~self.data)

    @computed
    def __neg__(self) -> "Value":
        return Value(-self.data)

    @computed
    def reshape(self, shape: Any) -> "Value":
        return Value(self.data.reshape([int(size) for size in shape]), self.dtype)

    @computed
    def permute(self, order: Any) -> "Value":
        return Value(self.data.permute([int(i) for i in order]), self.dtype)

    @computed
    def to(self, dtype: tl.dtype, bitcast: bool = False) -> "Value":
        if bitcast:
            data = self.data
            return Value(data.contiguous().view(TORCH_DTYPES[dtype]) if dtype.is_ptr() is False else data, dtype)
        data = self.data
        if dtype in LARGEST and self.dtype != dtype:
            data = data.to(torch.float32).clamp(-LARGEST[dtype], LARGEST[dtype])
        return Value(data.to(TORCH_DTYPES[dtype]), dtype)


def value(x: Any) -> Value:
    """Return a number as a value of the type that Triton gives it."""
    if isinstance(x, Value):
        return x
    if isinstance(x, bool):
        return Value(constant(x, torch.bool))
    if isinstance(x, int):
        return Value(constant(x, torch.int32 if -(2**31) <= x < 2**31 else torch.int64))
    return Value(constant(float(x), torch.float32))


def common_dtype(a: Any, b: Any) -> tl.dtype:
    """Return the type in which an operation on `a` and `b` computes. A number takes the type of its partner."""
    if not isinstance(a, Value) or not isinstance(b, Value):
        known, number = (a, b) if isinstance(a, Value) else (b, a)
        if not isinstance(known, Value):
            return common_dtype(value(a), value(b))
        if isinstance(number, float) and not known.dtype.is_floating():
            return tl.float32
        return tl.int32 if known.dtype == tl.int1 and not isinstance(number, bool) else known.dtype
    if a.dtype == b.dtype:
        return a.dtype
    if a.dtype.is_floating() != b.dtype.is_floating():
        return a.dtype if a.dtype.is_floating() else b.dtype
    if a.dtype.primitive_bitwidth == b.dtype.primitive_bitwidth:
        assert a.dtype.is_floating(), (a.dtype, b.dtype)
        return tl.float32
    return a.dtype if a.dtype.primitive_bitwidth > b.dtype.primitive_bitwidth else b.dtype


MET: dict[tuple[Any, Any], torch.dtype] = {}  # by the dtypes of two values, or the class of a number


def operands(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both operands in the type in which they meet. This is called for each operation, so it is one function."""
    x, y = (a.data if isinstance(a, Value) else None), (b.data if isinstance(b, Value) else None)
    kinds = (a.__class__ if x is None else x.dtype), (b.__class__ if y is None else y.dtype)
    dtype = MET.get(kinds)
    if dtype is None:
        dtype = TORCH_DTYPES[common_dtype(a, b)]
        # An int64 may be a pointer, and the type of two numbers depends on their size.
        if torch.int64 not in kinds and (x is not None or y is not None):
            MET[kinds] = dtype
    if x is None:
        x = constant(a, dtype)
    elif kinds[0] is not dtype:
        x = x.to(dtype)
    if y is None:
        y = constant(b, dtype)
    elif kinds[1] is not dtype:
        y = y.to(dtype)
    return x, y


def as_dtype(x: Any, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(x, Value):
        return constant(x, dtype)
    return x.data if x.data.dtype == dtype else x.data.to(dtype)


@cache
def constant(x: float, dtype: torch.dtype) -> torch.Tensor:
    """Return a number. No operation changes it."""
    return torch.tensor(x, dtype=dtype)


def of_two(
    operation: Callable[..., torch.Tensor], with_nan: Callable[..., torch.Tensor] | None = None
) -> Callable[..., Value]:
    """Return an operation on two operands, in the type in which they meet; `with_nan` if NaN is to stay NaN."""

    def compute(a: Any, b: Any, propagate_nan: Any = None) -> Value:
        chosen = with_nan if with_nan is not None and propagate_nan is tl.PropagateNan.ALL else operation
        result = Value(chosen(*operands(a, b)))
        if isinstance(a, Value) and a.loads:
            result.loads = a.loads
        if isinstance(b, Value) and b.loads:
            result.loads = result.loads | b.loads
        return result

    return compute


def is_pointer(x: Any) -> bool:
    return isinstance(x, Value) and x.data.dtype is torch.int64 and x.dtype.is_ptr()


def add(a: Any, b: Any) -> Value:
    if is_pointer(b):
        return advance(b, a)
    return advance(a, b) if is_pointer(a) else sum_of_two(a, b)


@computed
def advance(pointer: Value, elements: Any) -> Value:
    size = pointer.dtype.element_ty.primitive_bitwidth // 8
    return Value(pointer.data + value(elements).data.to(torch.int64) * size, pointer.dtype)


@computed
def divide(a: Any, b: Any) -> Value:
    dtype = common_dtype(a, b)
    dtype = TORCH_DTYPES[dtype if dtype.is_floating() else tl.float32]
    return Value(torch.div(as_dtype(a, dtype), as_dtype(b, dtype)))


sum_of_two = of_two(torch.add)


def whole_quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, b, rounding_mode="trunc")  # as C does, where Python rounds down


OPERATIONS = {
    "add": add,
    "truediv": divide,
    "sub": of_two(torch.sub),
    "mul": of_two(torch.mul),
    "floordiv": of_two(whole_quotient),
    "mod": of_two(torch.fmod),
    "and": of_two(torch.bitwise_and),
    "or": of_two(torch.bitwise_or),
    "xor": of_two(torch.bitwise_xor),
    "lshift": of_two(torch.bitwise_left_shift),
    "rshift": of_two(torch.bitwise_right_shift),
    "lt": of_two(torch.lt),
    "le": of_two(torch.le),
    "gt": of_two(torch.gt),
    "ge": of_two(torch.ge),
    "eq": of_two(torch.eq),
    "ne": of_two(torch.ne),
}


def give_operators() -> None:
    """Give values the operators of Python."""
    for name, operation in OPERATIONS.items():
        setattr(Value, f"__{name}__", operation)
        if name not in ("lt", "le", "gt", "ge", "eq", "ne"):
            setattr(Value, f"__r{name}__", lambda b, a, operation=operation: operation(a, b))


give_operators()


def by_element(operation: Callable[..., torch.Tensor]) -> Callable[[Any], Value]:
    return computed(lambda x: Value(operation(value(x).data)))


@computed
def where(condition: Any, a: Any, b: Any) -> Value:
    a, b = operands(a, b)
    return Value(torch.where(value(condition).data, a, b))


@computed
def fma(a: Any, b: Any, c: Any) -> Value:
    a, b, c = (value(x).data.to(torch.float64) for x in (a, b, c))
    return Value((a * b + c).to(torch.float32))


@computed
def clamp(x: Value, low: float, high: float, propagate_nan: Any = None) -> Value:
    assert propagate_nan is tl.PropagateNan.ALL, propagate_nan
    return Value(x.data.clamp(low, high))  # NaN stays NaN


def larger(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.fmax(a, b)  # of a number and NaN, the number


def smaller(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.fmin(a, b)


@computed
def sum_of(x: Value, axis: int) -> Value:
    data = x.data.to(torch.int32) if x.dtype == tl.int1 else x.data
    return Value(data.sum(axis, dtype=data.dtype))


@computed
def max_of(x: Value, axis: int) -> Value:
    data = x.data
    if data.dtype.is_floating_point:
        data = torch.where(data.isnan(), -torch.inf, data)
    return Value(data.amax(axis))


@computed
def min_of(x: Value, axis: int) -> Value:
    data = x.data
    if data.dtype.is_floating_point:
        data = torch.where(data.isnan(), torch.inf, data)
    return Value(data.amin(axis))


@computed
def scan_of(x: Value, axis: int, combine: Any) -> Value:
    assert combine.__name__ == "add", combine
    return Value(x.data.cumsum(axis, dtype=x.data.dtype))


@computed
def full(shape: Any, number: Any, dtype: tl.dtype, layout: Any = None) -> Value:
    data = value(number).data.to(TORCH_DTYPES[dtype]).reshape(())
    return Value(data.expand([int(size) for size in shape]).clone(), dtype)


def zeros(shape: Any, dtype: tl.dtype, layout: Any = None) -> Value:
    return full(shape, 0, dtype)


def zeros_like(x: Value) -> Value:
    return Value(torch.zeros_like(x.data), x.dtype)


def arange(start: int, stop: int, layout: Any = None) -> Value:
    return Value(torch.arange(int(start), int(stop), dtype=torch.int32))


@computed
def join(a: Value, b: Value) -> Value:
    return Value(torch.stack((a.data, b.data), -1), a.dtype)


@computed
def split(x: Value) -> tuple[Value, Value]:
    return Value(x.data[..., 0], x.dtype), Value(x.data[..., 1], x.dtype)


@computed
def convert_layout(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return Value(x.data, x.dtype)
