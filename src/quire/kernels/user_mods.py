"""Jit functions of users' functions on scores and masks (`quire.score_functions`).

The text of a function becomes a module's, whose lines Triton can read, as those of a file. It depends on nothing but
the spec's functions and heads, so a jit function has the same source and the same key in Triton's cache in all
processes.
"""

import ast
import hashlib
import linecache
import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels import mods
from quire.kernels.launcher import Plain
from quire.score_functions import ARGUMENTS, KINDS, OPERATORS, Extra, Function, axes_of, tree_of
from quire.spec import AttentionSpec

SIZE_STEP = 16  # a size is passed as a multiple of it and 3: Triton compiles for integers that are 1 or that 16 divides
OF_HEADS = {"q_head": "num_q_heads", "kv_head": "num_kv_heads"}  # arguments that are an index in range


def passed(extras: tuple[Extra, ...], tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Return what a kernel gets for a spec's extras: each tensor, and after it the sizes that the spec doesn't say."""
    found: list[Any] = []
    for extra, tensor in zip(extras, tensors, strict=True):
        found.append(tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor)
        sizes = zip(extra.shape, tensor.shape, strict=True)
        found += [Plain(SIZE_STEP * size + 3) for known, size in sizes if known is None]
    return tuple(found)


def function_of(spec: AttentionSpec, with_bounds: bool = False) -> Any:
    """Return the jit function that turns scores into those that a spec's functions make; None without functions.

    Args:
        spec: what is computed.
        with_bounds: also hide the keys outside of the mask's bounds.
    """
    if spec.score is None and spec.mask is None:
        return None
    return jit_functions(spec.score, spec.mask, spec.extras, spec.num_q_heads, spec.num_kv_heads, spec.dtype.itemsize)[
        "bounded_scores" if with_bounds and spec.mask is not None and spec.mask.bounds else "scores"
    ]


def bounds_of(spec: AttentionSpec) -> Any:
    """Return the jit function that says which keys tokens see at most; None without one."""
    if spec.mask is None or not spec.mask.bounds:
        return None
    found = jit_functions(spec.score, spec.mask, spec.extras, spec.num_q_heads, spec.num_kv_heads, spec.dtype.itemsize)
    return found["bounds"]


@triton.jit
def clamped(index, size):
    return tl.minimum(tl.maximum(index, 0), size - 1)


@triton.jit
def size_of(number):
    return number >> 4  # of SIZE_STEP


@triton.jit
def floor_divide(a, b):
    quotient = a // b  # rounded towards 0
    return tl.where(((a % b) != 0) & ((a < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def floor_modulo(a, b):
    rest = a % b  # of a's sign
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def fast_tanh(x, factor, by):
    # by * tanh(x * factor / (2 log2(e))), as in `mods.softcap`, with an absolute error of float32 near `by`.
    r = tl.rsqrt(tl.exp2(x * factor) + 1.0)
    return by - 2.0 * by * r * r


@lru_cache(maxsize=1024)
def jit_functions(
    score: Function | None, mask: Function | None, extras: tuple[Extra, ...], q_heads: int, kv_heads: int, itemsize: int
) -> dict[str, Any]:
    """Return the jit functions of a spec's functions: "scores", "bounded_scores" and "bounds", if there are bounds."""
    writer = Writer(extras, {"num_q_heads": q_heads, "num_kv_heads": kv_heads}, itemsize)
    parts = [writer.function("user_score", score.source)] if score is not None else []
    parts += [writer.function("user_mask", mask.source)] if mask is not None else []
    has_bounds = mask is not None and mask.bounds != ""
    if mask is not None and has_bounds:
        parts += [writer.function("user_bounds", mask.bounds), BOUNDS]
    parts += [combined("scores", score, mask is not None, False)]
    parts += [combined("bounded_scores", score, True, True)] if has_bounds else []
    text = "\n\n".join(parts)
    name = f"<quire functions {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    scope: dict[str, Any] = {"__name__": __name__, "triton": triton, "tl": tl, "exact_tanh": mods.tanh}
    scope |= {f.__name__: f for f in (clamped, size_of, floor_divide, floor_modulo, fast_tanh)}
    exec(compile(text, name, "exec"), scope)
    return {name: scope[name] for name in ("scores", "bounded_scores", "bounds") if name in scope}


BOUNDS = """@triton.jit
def bounds(q_pos, seq, token, extras):
    first, last = user_bounds(None, q_pos, None, None, None, seq, token.to(tl.int32), extras)
    nothing = tl.zeros_like(q_pos)
    return nothing + first, nothing + last + 1
"""


def combined(name: str, score: Function | None, has_mask: bool, with_bounds: bool) -> str:
    """Return the text of the function that kernels call, of rows [M], keys [N] and scores [M, N]."""
    token = "token[:, None].to(tl.int32)"
    arguments = f"q_pos[:, None], kv_pos[None, :], q_head[:, None], kv_head, seq, {token}, extras"
    lines = ["@triton.jit", f"def {name}(scores, q_pos, kv_pos, q_head, kv_head, seq, token, extras):"]
    if score is not None:
        changed = f"user_score(scores, {arguments})"
        if axes_of(score) != ARGUMENTS["score"]:  # of as many numbers as scores are, in Gluon too
            changed = f"tl.where(scores == scores, {changed}, scores)"
        lines.append(f"    scores = {changed}")
    if has_mask:
        lines.append(f"    visible = user_mask(None, {arguments})")
        if with_bounds:
            lines.append(f"    first, last = user_bounds(None, q_pos[:, None], None, None, None, seq, {token}, extras)")
            lines.append("    visible = visible & (kv_pos[None, :] >= first) & (kv_pos[None, :] <= last)")
        lines.append('    scores = tl.where(visible, scores, float("-inf"))')
    return "\n".join([*lines, "    return scores", ""])


class Writer:
    """Write functions for Triton.

    Args:
        extras: of the spec.
        sizes: of its heads, by name.
        itemsize: bytes of a query's number, which say how precise tanh has to be.
    """

    def __init__(self, extras: tuple[Extra, ...], sizes: dict[str, int], itemsize: int) -> None:
        self.sizes, self.is_exact, self.assigned = sizes, itemsize > 2, set[str]()
        self.extras: dict[str, tuple[Extra, str, list[str]]] = {}  # and its pointer and sizes, as text
        place = 0
        for extra in extras:
            names, first = [], place
            for size in extra.shape:
                place += size is None
                names.append(str(size) if size is not None else f"size_of(extras[{place}])")
            self.extras[extra.name] = extra, f"extras[{first}]", names
            place += 1

    def function(self, name: str, text: str) -> str:
        """Return the text of a jit function."""
        lines = ["@triton.jit", f"def {name}({', '.join(own(argument) for argument in ARGUMENTS)}, extras):"]
        assignments = [node for node in tree_of(text).body if isinstance(node, ast.Assign)]
        self.assigned = {ast.unparse(node.targets[0]) for node in assignments}
        for statement in tree_of(text).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                lines.append(f"    {own(statement.targets[0].id)} = {self.expression(statement.value)}")
            elif isinstance(statement, ast.Return) and statement.value is not None:
                lines.append(f"    return {self.expression(statement.value)}")
        return "\n".join([*lines, ""])

    def expression(self, node: ast.expr) -> str:
        """Return an expression as Triton has it."""
        of = self.expression
        if isinstance(node, ast.Constant):
            is_finite = node.value not in (float("inf"), -float("inf"))
            return f"({node.value!r})" if is_finite else f'float("{node.value!r}")'
        if isinstance(node, ast.Name):
            return own(node.id)
        if isinstance(node, ast.Tuple):
            return ", ".join(map(of, node.elts))
        if isinstance(node, ast.UnaryOp):
            return f"({OPERATORS[type(node.op)][0]}{of(node.operand)})"
        if isinstance(node, ast.Compare):
            return f"({of(node.left)} {OPERATORS[type(node.ops[0])][0]} {of(node.comparators[0])})"
        if isinstance(node, ast.BinOp):
            return self.binary(node)
        if isinstance(node, ast.Subscript):
            return self.number(node)
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "tanh" and not self.is_exact:
            return self.fast_tanh(node)
        word, arguments = node.func.id, [of(argument) for argument in node.args]
        if word in ("float", "int"):
            return f"({arguments[0]}).to(tl.{word}32)"
        if word in ("minimum", "maximum"):  # NaN stays NaN, as in PyTorch
            return f"tl.{word}({', '.join(arguments)}, propagate_nan=tl.PropagateNan.ALL)"
        return f"{'exact_tanh' if word == 'tanh' else f'tl.{word}'}({', '.join(arguments)})"

    def fast_tanh(self, node: ast.Call, by: Any = 1.0) -> str:
        """Return tanh times a number, with what its argument is multiplied by in the exponent."""
        part, factor = scaled(node.args[0])
        return f"fast_tanh({self.expression(part)}, {2 * math.log2(math.e) * factor!r}, {by!r})"

    def binary(self, node: ast.BinOp) -> str:
        """Return the value of an operator."""
        if isinstance(node.op, ast.Mult) and not self.is_exact:
            for number, call in ((node.left, node.right), (node.right, node.left)):
                if isinstance(number, ast.Constant) and isinstance(call, ast.Call) and ast.unparse(call.func) == "tanh":
                    return self.fast_tanh(call, number.value)
        a, b, sign = self.expression(node.left), self.expression(node.right), OPERATORS[type(node.op)][0]
        number: Any = node.right.value if isinstance(node.right, ast.Constant) else None
        if sign in ("//", "%"):
            if type(number) is int and number > 0 and number & (number - 1) == 0:
                return f"({a} >> {number.bit_length() - 1})" if sign == "//" else f"({a} & {number - 1})"
            return f"{'floor_divide' if sign == '//' else 'floor_modulo'}({a}, {b})"
        if sign == "/" and isinstance(number, float) and 1e-30 < abs(number) < 1e30:
            return f"({a} * {1 / number!r})"  # a division is three instructions, and no more precise
        return f"({a} {sign} {b})"

    def number(self, node: ast.Subscript) -> str:
        """Return the load of an extra's number, at the nearest index where one is out of range."""
        assert isinstance(node.value, ast.Name)
        extra, pointer, sizes = self.extras[node.value.id]
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        offset = ""
        for index, size in zip(indices, sizes, strict=True):
            name = ast.unparse(index)
            is_head = name in OF_HEADS and name not in self.assigned
            in_range = is_head and size == str(self.sizes[OF_HEADS[name]])
            place = self.expression(index) if in_range else f"clamped({self.expression(index)}, {size})"
            offset = f"({offset} * {size} + {place})" if offset else place
        loaded = f"tl.load({pointer} + {offset})"
        kind = KINDS[extra.dtype]
        return f"({loaded} != 0)" if kind == "bool" else f"{loaded}.to(tl.{kind}32)"


def scaled(node: ast.expr) -> tuple[ast.expr, float]:
    """Return what a number multiplies in a product or divides in a quotient, and the factor; else a value and 1."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.right, ast.Constant):
        return node, 1.0
    number: Any = node.right.value
    if isinstance(node.op, ast.Mult):
        return node.left, number
    return (node.left, 1 / number) if isinstance(node.op, ast.Div) and number else (node, 1.0)


def own(name: str) -> str:
    """Return a user's name as no name of Triton's can be."""
    return f"{name}_"
