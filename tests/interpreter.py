"""Triton's interpreter, several times faster, with the same results to the bit.

A program of a few tiles spends its time in Triton's Python, not in NumPy: in types that are made again for each value,
and in checks whose outcome nothing reads. Each function here takes one such cost away.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Make the interpreter of this process faster."""
    leave_out_unread_checks()
    replace_language_once_a_launch()
    call_builtins_directly()
    remember_dtypes()
    remember_shapes()


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
    semantic = tl.semantic.TritonSemantic(interpreter.interpreter_builder)

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
        sizes = tuple(type.shape) if type.is_block() else ()
        known = shapes.get(sizes)
        if known is None:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        else:
            self.shape, self.numel = known

    make_tensor = tl.tensor.__init__
    tl.block_type.__init__ = init_block_type
    tl.tensor.__init__ = init_tensor
