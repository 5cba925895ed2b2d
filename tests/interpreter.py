"""Triton's interpreter, several times faster, with the same results to the bit.

A program of a few tiles spends its time in Triton's Python, not in NumPy: in types that are made again for each value,
and in checks whose outcome nothing reads. Each function here takes one such cost away.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

Semantic = tl.semantic.TritonSemantic
REMEMBERED = 10_000  # pairs of operands: numbers are as many as tiles


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

        scope.set_attr(owner, name, call)

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
    check, known, operands = Semantic.binary_op_type_checking_impl, {}, {tl.tensor, bool, int, float}

    def becomes(before: Any, after: tl.tensor) -> Any:
        """Return a function that does with an operand what was done with one of the same type, or the same number."""
        data, whole, scalar = after.handle.data, after.type, after.type.scalar
        if before.__class__ is not tl.tensor:
            return lambda semantic, value: tl.tensor(interpreter.TensorHandle(data, scalar), whole)
        if before.type.name == whole.name:
            return lambda semantic, value: value
        if before.type.scalar == scalar:
            return lambda semantic, value: tl.tensor(interpreter.TensorHandle(value.handle.data, scalar), whole)
        return lambda semantic, value: tl.tensor(semantic.cast(value, scalar).handle, whole)

    def check_operands(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> tuple[tl.tensor, tl.tensor]:
        left, right = lhs.__class__, rhs.__class__
        if left not in operands or right not in operands:
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
