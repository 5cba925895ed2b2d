"""Names of Gluon that changed after Triton 3.6, and aggregates with one constructor for all Tritons."""

from typing import Any, TypeVar

import triton.language.core as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from quire.triton_internals import jit_methods


def either(module: Any, name: str, older: str) -> Any:
    """Return what a module calls by a name, or by that of Triton 3.6."""
    return getattr(module, name, None) or getattr(module, older)


barrier = either(gl, "barrier", "thread_barrier")
reinterpret = either(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
tma_load = either(tma, "async_load", "async_copy_global_to_shared")
copy_async = either(async_copy, "async_load", "async_copy_global_to_shared")
_aggregate = getattr(gluon, "aggregate", None) or tl._aggregate

Class = TypeVar("Class", bound=type)


def aggregate(cls: Class) -> Class:
    """Let a class be a value of kernels, whose fields keep their types wherever it goes, and whose methods are jit.

    A field of a tuple that is kept in a variable becomes a tensor if it is a number. Here it stays a constant.
    The constructor takes the fields by position or by name. Triton before 3.8 has none.
    """
    fields = dict(cls.__annotations__)

    def init(self: Any, *values: Any, **named: Any) -> None:
        given = dict(zip(fields, values, strict=False)) | named
        for name in fields:
            setattr(self, name, as_field(given[name]))

    vars(init)["__triton_builtin__"] = True  # it has no code that a kernel's key would have to know
    cls.__init__ = init
    # Triton checks that a field is of the type that it is said to have. None is of no type of Triton's.
    cls.__annotations__ = {
        name: gl.constexpr if kind is gl.constexpr else tl.base_value for name, kind in fields.items()
    }
    made: Any = _aggregate(cls)
    made.fields = [*fields]
    made.methods = jit_methods(cls)
    return made


def as_field(value: Any) -> Any:
    """Return a value as a field of an aggregate: a number, a type, a function or None becomes a constant."""
    if isinstance(value, tl.base_value):
        return value
    return tl.tuple(value) if isinstance(value, tuple) else gl.constexpr(value)
