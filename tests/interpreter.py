"""Triton's interpreter, several times faster, with the same results to the bit.

A program of a few tiles spends its time in Triton's Python, not in NumPy: in types that are made again for each value,
and in checks whose outcome nothing reads. Each function here takes one such cost away.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

Semantic = tl.semantic.TritonSemantic
REMEMBERED = 10_000  # pairs of operands: numbers are as many as tiles
OPERANDS = {tl.tensor, bool, int, float}
OPERATORS = {f"__{name}__": {} for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne", "and", "or")}


def hasten() -> None:
    """Make the interpreter of this process faster."""
    leave_out_unread_checks()
    replace_language_once_a_launch()
    call_builtins_directly()
    remember_dtypes()
    remember_shapes()
    compare_dtypes_by_name()
    unwrap_by_class()
    leave_out_checks_of_sizes()
    remember_types_of_operands()
    remember_equal_shapes()


def leave_out_unread_checks() -> None:
    """Sums and products of integers are computed again in int64, for an assertion that is off without options.debug."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def replace_language_once_a_launch() -> None:
    """Each call of a jit function replaces the builtins of `tl` again.

    Here they are replaced before a kernel's first program and restored after its last.
    """
    replace_language = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang = lambda kernel: replace_language(everything)
    interpreter.InterpretedFunction.__call__ = call


def call_builtins_directly() -> None:
    """Each call of a builtin copies its arguments to leave one out, and passes a wrapper that looks for it."""
    semantic = Semantic(interpreter.interpreter_builder)

    def replace_builtin(owner: object, name: str, builtin: Any, builder: object, scope: Any) -> None:
        function = getattr(builtin, "__wrapped__", builtin)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        shorter = owner is tl.tensor and name in OPERATORS
        scope.set_attr(owner, name, remember_operator(call, OPERATORS[name], semantic) if shorter else call)

    interpreter._patch_attr = replace_builtin


def remember_dtypes() -> None:
    """NumPy's dtype of one of Triton's is looked up in a table that each call makes again."""
    look_up, known = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype: tl.dtype) -> Any:
        scalar = dtype.scalar
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = look_up(scalar)
        return found

    interpreter._get_np_dtype = numpy_dtype


def remember_shapes() -> None:
    """Each value checks and wraps its shape again, and describes its type in words."""
    make_type, types, shapes = tl.block_type.__init__, {}, {}

    def init_block_type(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        known = types.get(key)
        if known is None:
            make_type(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
        else:
            self.shape, self.numel, self.name = known
            self.element_ty = element_ty

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        known = shapes.get(type.name)
        if known is None:
            make_tensor(self, handle, type)
            shapes[type.name] = self.shape, self.numel
        else:
            self.shape, self.numel = known

    make_tensor = tl.tensor.__init__
    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor


def compare_dtypes_by_name() -> None:
    """Comparing dtypes looks first whether one is a constant, or of another class."""
    compare = tl.dtype.__eq__

    def equal(self: Any, other: Any) -> bool:
        return self.name == other.name if other.__class__ is tl.dtype else compare(self, other)

    tl.dtype.__eq__ = equal


def unwrap_by_class() -> None:
    """Operands go through the checks for lists, tuples and constants, and most are none of them."""
    unwrap, plain = tl.core._unwrap_if_constexpr, {tl.tensor, tl.dtype, tl.pointer_type, bool, int, float, str}

    def unwrap_if_constexpr(value: Any) -> Any:
        return value if value.__class__ in plain else unwrap(value)

    tl.core._unwrap_if_constexpr = unwrap_if_constexpr


def leave_out_checks_of_sizes() -> None:
    """Each value checks that NumPy's dtype is no wider than Triton's."""

    def init_handle(self: Any, data: Any, dtype: tl.dtype) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}

    interpreter.TensorHandle.__init__ = init_handle


def remember_types_of_operands() -> None:
    """Operands of types that have met before are cast to the types that were found then, and NumPy broadcasts them.

    Triton works the types out again, and fills arrays with scalars, with numbers, and with what is broadcast.
    """
    check, known = Semantic.binary_op_type_checking_impl, {}

    def check_operands(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> tuple[tl.tensor, tl.tensor]:
        left, right = lhs.__class__, rhs.__class__
        if left not in OPERANDS or right not in OPERANDS:
            return check(self, lhs, rhs, *flags, **named)
        left = lhs.type.name if left is tl.tensor else (left, repr(lhs))
        right = rhs.type.name if right is tl.tensor else (right, repr(rhs))
        key = left, right, flags, *named.items()
        found = known.get(key)
        if found is None:
            both = check(self, lhs, rhs, *flags, **named)
            if len(known) == REMEMBERED:
                known.clear()
            known[key] = becomes(lhs, both[0]), becomes(rhs, both[1])
            return both
        return found[0](self, lhs), found[1](self, rhs)

    Semantic.binary_op_type_checking_impl = check_operands


def becomes(before: Any, after: tl.tensor) -> Callable[[Semantic, Any], tl.tensor]:
    """Return a function that does with an operand what was done with one of the same type, or the same number."""
    data, whole, scalar = after.handle.data, after.type, after.type.scalar
    if before.__class__ is not tl.tensor:
        return lambda semantic, value: tl.tensor(interpreter.TensorHandle(data, scalar), whole)
    if before.type.name == whole.name:
        return lambda semantic, value: value
    if before.type.scalar == scalar:
        return lambda semantic, value: tl.tensor(interpreter.TensorHandle(value.handle.data, scalar), whole)
    return lambda semantic, value: tl.tensor(semantic.cast(value, scalar).handle, whole)


def remember_operator(operator: Callable[..., Any], known: dict, semantic: Semantic) -> Callable[[Any, Any], Any]:
    """Return an operator that calls the interpreter's function at once, for operands of types that have met before.

    Triton looks for the function by way of two builtins and of the operands' types. What calls several functions, or
    casts operands in another way than `becomes`, goes that way each time.
    """
    builder = interpreter.interpreter_builder

    def find(lhs: tl.tensor, rhs: Any) -> tuple[Any, tuple | None]:
        """Return the result and, if it is known by now how to compute it, how."""
        checked, computed = [], []

        def noting(function: Callable[..., Any], notes: list) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = function(*args, **kwargs)
                notes.append((args, result))
                return result

            return call

        check = Semantic.binary_op_type_checking_impl
        functions = builder.binary_op, builder.create_addptr
        Semantic.binary_op_type_checking_impl = noting(check, checked)
        builder.binary_op, builder.create_addptr = (noting(function, computed) for function in functions)
        try:
            result = operator(lhs, rhs)
        finally:
            Semantic.binary_op_type_checking_impl = check
            del builder.binary_op, builder.create_addptr
        if len(checked) != 1 or len(computed) != 1 or computed[0][1] is not result.handle:
            return result, None
        (_, left, right, *_), both = checked[0]
        handles, function = computed[0][0], functions[len(computed[0][0]) == 2]
        if left is not lhs or right is not rhs or (handles[0], handles[1]) != tuple(value.handle for value in both):
            return result, None
        return result, (becomes(lhs, both[0]), becomes(rhs, both[1]), function, handles[2:], result.type)

    def call(lhs: tl.tensor, rhs: Any) -> Any:
        if rhs.__class__ is tl.constexpr:
            rhs = rhs.value
        kind = rhs.__class__
        if kind not in OPERANDS:
            return operator(lhs, rhs)
        key = (lhs.type.name, rhs.type.name) if kind is tl.tensor else (lhs.type.name, kind, repr(rhs))
        if key not in known:
            if len(known) >= REMEMBERED:
                known.clear()
            result, known[key] = find(lhs, rhs)
            return result
        found = known[key]
        if found is None:
            return operator(lhs, rhs)
        left, right, function, further, whole = found
        return tl.tensor(function(left(semantic, lhs).handle, right(semantic, rhs).handle, *further), whole)

    return call


def remember_equal_shapes() -> None:
    """Shapes are compared as tuples of Triton's, whose comparison makes further tuples."""
    broadcast, equal = Semantic.broadcast_impl_value, {}

    def broadcast_values(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        key = lhs.type.name, rhs.type.name
        if equal.get(key):
            return lhs, rhs
        both = broadcast(self, lhs, rhs)
        equal[key] = both[0] is lhs and both[1] is rhs
        return both

    Semantic.broadcast_impl_value = broadcast_values
