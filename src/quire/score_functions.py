"""Users' functions on scores and masks: `score` and `mask` read them, and `Function` is what a spec holds.

A function is written in a small part of Python that means the same on PyTorch's tensors and in Triton. It is kept as
text: numbers from outside of it are literals there, types are known, and it names nothing but its arguments and WORDS.
So the text is all that a key, a record or another process needs, and to read it runs no code.

`on_tensors` evaluates it with PyTorch. `quire.kernels.user_mods` makes jit functions of it.
"""

import ast
import builtins
import contextlib
import inspect
import math
import operator
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from quire.errors import UnsupportedError, describe

ARGUMENTS = {  # and their axes: rows are query tokens and query heads of a KV head
    "score": frozenset({"rows", "keys"}),
    "q_pos": frozenset({"rows"}),
    "kv_pos": frozenset({"keys"}),
    "q_head": frozenset({"rows"}),
    "kv_head": frozenset(),
    "seq": frozenset(),
    "token": frozenset({"rows"}),
}
OF_BOUNDS = "q_pos", "seq", "token"  # the arguments that bounds may have: all heads of a token see the same keys
WORDS = {
    "where": 3,
    "minimum": 2,
    "maximum": 2,
    "abs": 1,
    "exp": 1,
    "log": 1,
    "tanh": 1,
    "sqrt": 1,
    "float": 1,
    "int": 1,
}
OF_PYTHON = {"abs": "abs", "min": "minimum", "max": "maximum", "float": "float", "int": "int"}
OF_NUMBERS = {"exp": math.exp, "log": math.log, "tanh": math.tanh, "sqrt": math.sqrt, "minimum": min, "maximum": max}
OF_NUMBERS |= {"abs": abs, "float": float, "int": int}
OPERATORS: dict[type, tuple[str, Callable[..., Any]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.FloorDiv: ("//", operator.floordiv),
    ast.Mod: ("%", operator.mod),
    ast.Pow: ("**", operator.pow),
    ast.LShift: ("<<", operator.lshift),
    ast.RShift: (">>", operator.rshift),
    ast.BitAnd: ("&", operator.and_),
    ast.BitOr: ("|", operator.or_),
    ast.BitXor: ("^", operator.xor),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.USub: ("-", operator.neg),
    ast.UAdd: ("+", operator.pos),
    ast.Invert: ("~", operator.invert),
}
KINDS = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), "float"),
    **dict.fromkeys((torch.int32, torch.int64, torch.int8, torch.uint8), "int"),
    torch.bool: "bool",
}
NUMBER = re.compile(r"[0-9.]+(e[+-]?[0-9]+)?")
DIMS = "num_q_heads", "num_kv_heads"  # of a spec, which a shape may name
MOST_EXTRAS, MOST_DIMS = 4, 4
MOST_ELEMENTS, MOST_SIZE = (1 << 31) - 1, (1 << 27) - 1  # of an extra, and of one of its dimensions without a number
ADVICE = {  # for what a function may not have, by the class of the syntax
    ast.For: "write it without a loop; `extra[i]` reads one number for each pair of a query and a key",
    ast.While: "write it without a loop",
    ast.If: "choose by where(condition, a, b)",
    ast.IfExp: "choose by where(condition, a, b)",
    ast.BoolOp: "write & for and, | for or",
    ast.Not: "write ~ for not",
    ast.Global: "leave it out: a function only returns a value",
    ast.Nonlocal: "leave it out: a function only returns a value",
    ast.Attribute: "leave it out: a function only returns a value",
    ast.Pow: "multiply",
}


@dataclass(frozen=True)
class Extra:
    """A read-only tensor that a function reads.

    Attributes:
        name: of the function's argument.
        dtype: of its numbers.
        shape: of each dimension its size, "num_q_heads" or "num_kv_heads" of the spec, or None for any.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str | None, ...]

    def with_size(self, size: int) -> list[int]:
        """Return the shape of a tensor that has so many numbers along each dimension without a number."""
        return [known if isinstance(known, int) else size for known in self.shape]

    def resolved(self, **sizes: int) -> "Extra":
        """Return the same with numbers for the names of dimensions."""
        return Extra(self.name, self.dtype, tuple(sizes[n] if isinstance(n, str) else n for n in self.shape))


@dataclass(frozen=True, repr=False)
class Function:
    """A function on scores or masks, made by `quire.score` or `quire.mask`. It is frozen, hashable, and can be pickled.

    Two functions of the same text and the same numbers from outside are equal, also in different processes.

    Attributes:
        kind: "score" or "mask".
        source: the function as text, with literals for numbers from outside.
        extras: the tensors that it reads, in the order of its arguments.
        bounds: the text of the function that says which keys a token sees at most; "" without one.
    """

    kind: str
    source: str
    extras: tuple[Extra, ...] = ()
    bounds: str = ""

    def __post_init__(self) -> None:
        """Read the text again: it may come from a file of anyone."""
        for text, kind in ((self.source, self.kind), *([(self.bounds, "bounds")] if self.bounds else [])):
            parsed = ast.parse(text).body
            if len(parsed) != 1 or Reader(parsed[0], kind, self.extras, {}, "text").text != text:
                raise ValueError(f"source must be what quire.{self.kind} made, got another text; decorate a function")

    @property
    def name(self) -> str:
        """Name of the function."""
        return tree_of(self.source).name

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of its arguments."""
        return tuple(argument.arg for argument in tree_of(self.source).args.args)

    def __call__(self, *values: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Evaluate the function with PyTorch, on tensors that can be broadcast.

        Args:
            *values: of its arguments, in their order.
            **named: the same by name.
        """
        names = self.arguments
        found = dict(zip(names, values, strict=False)) | named
        if len(values) > len(names) or found.keys() != set(names):
            raise TypeError(f"{self.name} must get {', '.join(names)}, got {', '.join(found)}; pass each once")
        dtype = found["score"].dtype if "score" in found else torch.float32
        return evaluate(self.source, {name: torch.as_tensor(value) for name, value in found.items()}, dtype)

    def __repr__(self) -> str:
        return f"<quire.{self.kind} {self.name}>"


def score(function: Any = None, *, extras: Mapping[str, Any] | None = None) -> Any:
    """Make a function on scores of a Python function, for `AttentionSpec(score=...)`.

    The function takes any of `score`, `q_pos`, `kv_pos`, `q_head`, `kv_head`, `seq` and `token`, by these names, and
    the names of `extras`; it returns the score that takes the place of `score`. A score is the product of a query and a
    key times the softmax scale, after the spec's softcap and ALiBi; -inf hides the key. Positions count the keys of a
    sequence, `seq` the sequences of the batch, and `token` the rows of q.

    It may assign to local names and use arithmetic, comparisons, `& | ~`, shifts, `//` and `%` of integers,
    `torch.where`, `exp`, `log`, `tanh`, `sqrt`, `abs`, `minimum` and `maximum`, `float(x)` and `int(x)`, and
    `extra[i, j]` with integers. An index out of range reads the first or the last number. Numbers from outside become
    constants: another number is another kernel.

    Args:
        function: the function.
        extras: of each tensor that it reads, the number of dimensions, or their sizes: a number, "num_q_heads",
            "num_kv_heads" or None. A dtype may come first; else it is float32. There are at most four.

    Returns:
        A `Function`; or a decorator, if `function` is left out.

    Raises:
        TypeError: what is decorated is no function whose source can be read.
        ValueError: the function has something that Triton and PyTorch don't both compute. The message names its line.

    Examples:
        >>> @quire.score(extras={"bias": ("num_q_heads", None)})
        ... def relative(score, q_pos, kv_pos, q_head, bias):
        ...     return score + bias[q_head, q_pos - kv_pos]
        >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, score=relative)
        >>> spec.extras
        (Extra(name='bias', dtype=torch.float32, shape=(4, None)),)
    """
    if function is None:
        return lambda function: score(function, extras=extras)
    return made("score", function, extras)


def mask(function: Any = None, *, extras: Mapping[str, Any] | None = None, bounds: Any = None) -> Any:
    """Make a mask of a Python function, for `AttentionSpec(mask=...)`.

    The function is as `quire.score` has it, but takes no `score`, and returns a bool: whether a query sees a key. What
    it sees is what both the mask, and the spec's window or the batch's intervals or trees say. Without `bounds`, all
    keys that these say are read, so they must be finite numbers, and as much time is spent as without a mask.

    Args:
        function: the function.
        extras: as for `quire.score`.
        bounds: a function that returns the first and the last key that a token sees at most, two integers. It takes
            `q_pos`, `seq`, `token` and `extras`. Keys outside are not seen, whatever the mask says, and tiles of keys
            that no row of a row block sees are not read.

    Returns:
        A `Function`; or a decorator, if `function` is left out.

    Raises:
        TypeError: what is decorated, or bounds, is no function whose source can be read.
        ValueError: a function has something that Triton and PyTorch don't both compute. The message names its line.

    Examples:
        >>> @quire.mask(bounds=lambda q_pos: (q_pos - 64, q_pos))
        ... def dilated(q_pos, kv_pos):
        ...     return (q_pos - kv_pos) % 4 == 0
        >>> quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, mask=dilated).mask
        <quire.mask dilated>
    """
    if function is None:
        return lambda function: mask(function, extras=extras, bounds=bounds)
    return made("mask", function, extras, bounds)


def made(kind: str, function: Any, extras: Mapping[str, Any] | None, bounds: Any = None) -> Function:
    """Return the `Function` of a Python function."""
    declared = () if extras is None else tuple(extra_of(name, value) for name, value in dict(extras).items())
    text = read(kind, function, declared)
    names = [argument.arg for argument in tree_of(text).args.args]
    within = "" if bounds is None else read("bounds", bounds, declared)
    if bounds is not None:
        names += [argument.arg for argument in tree_of(within).args.args]
    if unread := {extra.name for extra in declared} - set(names):
        raise ValueError(f"extras must be arguments of {function.__name__}, got {', '.join(sorted(unread))}; add them")
    return Function(kind, text, tuple(sorted(declared, key=lambda extra: names.index(extra.name))), within)


def extra_of(name: str, value: Any) -> Extra:
    """Return an extra as it is declared."""
    advice = 'declare it as ("num_q_heads", None), (torch.int32, None) or the number of dimensions, for instance'
    parts = (None,) * value if type(value) is int else value
    dtype, shape = torch.float32, parts
    if isinstance(parts, tuple) and parts and isinstance(parts[0], torch.dtype):
        dtype, shape = parts[0], parts[1:]
    if dtype not in KINDS:
        raise ValueError(f"extras[{name!r}] must have a dtype of {', '.join(map(str, KINDS))}, got {dtype}; cast it")
    if not isinstance(shape, tuple) or not 1 <= len(shape) <= MOST_DIMS:
        raise ValueError(f"extras[{name!r}] must have 1 to {MOST_DIMS} dimensions, got {describe(value)}; {advice}")
    for size in shape:
        if not (size is None or size in DIMS or (type(size) is int and 1 <= size <= MOST_SIZE)):
            raise ValueError(f"extras[{name!r}] must have sizes, {' or '.join(DIMS)}, got {describe(size)}; {advice}")
    return Extra(name, dtype, shape)


def read(kind: str, function: Any, extras: tuple[Extra, ...]) -> str:
    """Return a Python function as text."""
    if not isinstance(function, FunctionType):
        raise TypeError(f"{kind} must be made of a Python function, got {describe(function)}; decorate a `def`")
    try:
        lines, first = inspect.getsourcelines(function)
        node = definition_of(function, lines, kind)
    except (OSError, SyntaxError) as error:
        raise TypeError(
            f"{function.__name__} must have source that Python can read, got {error}; put it into a file"
        ) from None
    ast.increment_lineno(node, first - 1)
    scope = {**vars(builtins), **function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return Reader(node, kind, extras, scope, inspect.getsourcefile(function) or "?").text


def definition_of(function: FunctionType, lines: list[str], name: str) -> ast.stmt:
    """Return the syntax of a function; of a lambda, that of a function which returns its value, by this name."""
    if function.__name__ != "<lambda>":
        return ast.parse(textwrap.dedent("".join(lines))).body[0]
    # The lines are those of a statement. The lambda is the last one that begins before its body does.
    columns = [column for line, _, column, _ in function.__code__.co_positions() if column and line]
    text = "".join(lines)
    text = text[text.rindex("lambda", 0, max(min(columns, default=0), text.index("lambda") + 6)) :]
    for end in range(len(text), 0, -1):
        with contextlib.suppress(SyntaxError):
            found = ast.parse(text[:end], mode="eval").body
            if isinstance(found, ast.Lambda):
                body: list[ast.stmt] = [ast.Return(found.body, lineno=found.lineno)]
                return ast.FunctionDef(name, found.args, body, [], None, lineno=found.lineno)  # pyright: ignore
    raise OSError("no lambda")


class Typed(NamedTuple):
    """An expression, of which "int", "float" or "bool" it is, and over which axes it varies."""

    node: ast.expr
    kind: str
    axes: frozenset[str]

    @property
    def is_constant(self) -> bool:
        """Whether it is a literal."""
        return isinstance(self.node, ast.Constant)

    @property
    def value(self) -> Any:
        """Of a literal."""
        return self.node.value if isinstance(self.node, ast.Constant) else None


class Reader:
    """Check a function's syntax and types, and write it as text.

    Args:
        node: the function.
        kind: "score", "mask" or "bounds".
        extras: the tensors that it may read.
        scope: what names outside of it stand for.
        file: for messages.
    """

    def __init__(
        self, node: ast.stmt, kind: str, extras: tuple[Extra, ...], scope: Mapping[str, Any], file: str
    ) -> None:
        self.kind, self.scope, self.file, self.line = kind, scope, file, getattr(node, "lineno", 1)
        self.extras = {extra.name: extra for extra in extras}
        if not isinstance(node, ast.FunctionDef):
            raise ValueError(f"{kind} must be a function, got {type(node).__name__}; decorate a `def`")
        self.name, self.locals = node.name, {}
        arguments = node.args
        if arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults or arguments.posonlyargs:
            self.refuse("have plain arguments", ast.unparse(arguments), "leave out *, / and defaults")
        known = OF_BOUNDS if kind == "bounds" else [a for a in ARGUMENTS if kind == "score" or a != "score"]
        for name in [argument.arg for argument in arguments.args]:
            if name not in self.extras:
                if name not in known:
                    advice = "declare a tensor in the decorator's extras"
                    self.refuse(f"take {', '.join(known)} and declared extras", name, advice)
                is_score = name == "score"
                self.locals[name] = Typed(ast.Name(name), "float" if is_score else "int", ARGUMENTS[name])
        body = [self.statement(statement) for statement in node.body if not is_docstring(statement)]
        body = [statement for statement in body if not isinstance(statement, ast.Pass)]
        if not body or not isinstance(body[-1], ast.Return):
            self.refuse("end with a return", "none", "return the value")
        if any(isinstance(statement, ast.Return) for statement in body[:-1]):
            self.refuse("end with its only return", "several", "choose by where(condition, a, b)")
        plain = ast.arguments([], [ast.arg(argument.arg) for argument in arguments.args], None, [], [], None, [])
        made = ast.FunctionDef(node.name, plain, body, [], None, None, lineno=1)  # pyright: ignore[reportCallIssue]
        self.text = ast.unparse(ast.fix_missing_locations(made))

    def refuse(self, contract: str, got: str, advice: str) -> Any:
        """Raise ValueError, with the line."""
        where = f"in line {self.line} of {self.file}"
        raise ValueError(f"{self.name} must {contract}, got {got} {where}; {advice}")

    def statement(self, node: ast.stmt) -> ast.stmt:
        """Return a statement with what its names stand for."""
        self.line = node.lineno
        if isinstance(node, ast.Return):
            return ast.Return(self.result(node.value))
        if isinstance(node, ast.AugAssign):
            target, value = node.target, ast.copy_location(ast.BinOp(loaded(node.target), node.op, node.value), node)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.Expr):
            value = self.expression(node.value)  # which says what a call may call
            return self.refuse("assign or return", ast.unparse(value.node), "leave out what has no effect")
        else:
            got = ast.unparse(node).splitlines()[0]
            return self.refuse("assign and return only", f"`{got}`", ADVICE.get(type(node), "leave it out"))
        if not isinstance(target, ast.Name):
            return self.refuse("assign to local names", f"`{ast.unparse(target)}`", ADVICE[ast.Attribute])
        if target.id in WORDS or target.id in self.extras:
            return self.refuse("assign to names of its own", target.id, "choose another name")
        found = self.expression(value)
        self.locals[target.id] = Typed(ast.Name(target.id), found.kind, found.axes)
        if found.is_constant:  # which stands where it is used
            self.locals[target.id] = found
            return ast.Pass()
        return ast.Assign([ast.Name(target.id)], found.node)

    def result(self, node: ast.expr | None) -> ast.expr:
        """Return the value that the function returns, of the kind that it must be."""
        if self.kind == "bounds":
            if not isinstance(node, ast.Tuple) or len(node.elts) != 2:
                return self.refuse("return two integers", shown(node), "return the first key and the last")
            both = [self.expression(part) for part in node.elts]
            if any(part.kind != "int" for part in both):
                return self.refuse("return two integers", f"`{ast.unparse(node)}`", "convert with int(x)")
            return ast.Tuple([part.node for part in both])
        if node is None:
            return self.refuse("return a value", "none", "return it")
        found, wanted = self.expression(node), "float" if self.kind == "score" else "bool"
        if found.kind != wanted:
            advice = "convert with float(x)" if wanted == "float" else "compare something"
            return self.refuse(f"return a {wanted}", f"{found.kind} `{ast.unparse(node)}`", advice)
        if found.is_constant:
            return self.refuse("return what depends on its arguments", ast.unparse(node), "leave the function out")
        return found.node

    def expression(self, node: ast.expr) -> Typed:
        """Return an expression with what its names stand for, and conversions."""
        self.line = getattr(node, "lineno", self.line)
        if isinstance(node, ast.Constant):
            return self.constant(node.value, node)
        if isinstance(node, ast.Name) and node.id in self.locals:
            return self.locals[node.id]
        if isinstance(node, ast.Name | ast.Attribute):
            return self.constant(self.resolve(node), node)
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            return self.unary(node)
        if isinstance(node, ast.BinOp):
            return self.binary(node)
        if isinstance(node, ast.Compare):
            return self.comparison(node)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.Subscript):
            return self.subscript(node)
        found = type(node.op) if isinstance(node, ast.UnaryOp) else type(node)
        return self.refuse("use what Triton and PyTorch both compute", shown(node), ADVICE.get(found, "leave it out"))

    def resolve(self, node: ast.expr) -> Any:
        """Return what a name outside of the function stands for."""
        if isinstance(node, ast.Name):
            if node.id in self.extras:
                return self.refuse(f"read {node.id} by an index", node.id, f"write {node.id}[i]")
            if node.id not in self.scope:
                advice = "pass a tensor as an extra; define a number before the function"
                return self.refuse("use names that are known", node.id, advice)
            return self.scope[node.id]
        root = root_of(node)
        is_outside = root is not None and root not in self.locals
        owner = self.resolve(node.value) if isinstance(node, ast.Attribute) and is_outside else None
        if isinstance(node, ast.Attribute) and isinstance(owner, ModuleType) and hasattr(owner, node.attr):
            return getattr(owner, node.attr)
        return self.refuse("use attributes of modules alone", shown(node), "assign a number to a name before")

    def constant(self, value: Any, node: ast.expr) -> Typed:
        """Return a literal."""
        if isinstance(value, bool):
            return Typed(ast.Constant(value), "bool", frozenset())
        if isinstance(value, Integral) and not isinstance(value, torch.Tensor):
            if not -(1 << 31) <= int(value) < 1 << 31:
                return self.refuse("have integers of 32 bits", str(value), "scale it, or use a float")
            return Typed(ast.Constant(int(value)), "int", frozenset())
        if isinstance(value, Real) and not isinstance(value, torch.Tensor) and not math.isnan(value):
            return Typed(ast.Constant(float(value)), "float", frozenset())
        advice = "pass it as an extra" if isinstance(value, torch.Tensor) else "define a number before the function"
        return self.refuse("take numbers from outside", f"{shown(node)}, which is {describe(value)}", advice)

    def folded(self, node: ast.expr, function: Callable[..., Any], *values: Any) -> Typed:
        """Return what a function of literals gives."""
        try:
            return self.constant(function(*values), node)
        except (ArithmeticError, ValueError, TypeError) as error:
            if str(error).startswith(f"{self.name} must"):
                raise
            return self.refuse("compute numbers", f"{shown(node)} ({error})", "mend it")

    def unary(self, node: ast.UnaryOp) -> Typed:
        """Return -x, +x or ~x."""
        found = self.expression(node.operand)
        if isinstance(node.op, ast.Invert) != (found.kind == "bool") and found.kind != "int":
            return self.refuse(
                "negate numbers, and invert bools", shown(node), "write ~ before bools and - before numbers"
            )
        if found.is_constant:  # of False, ~ is -1
            invert = operator.not_ if found.kind == "bool" else OPERATORS[type(node.op)][1]
            return self.folded(node, invert, found.value)
        return Typed(ast.UnaryOp(node.op, found.node), found.kind, found.axes)

    def binary(self, node: ast.BinOp) -> Typed:
        """Return the value of an operator of two numbers."""
        a, b = self.expression(node.left), self.expression(node.right)
        sign, function = OPERATORS.get(type(node.op), ("@", operator.matmul))
        kinds = {a.kind, b.kind}
        if a.is_constant and b.is_constant and "bool" not in kinds:
            return self.folded(node, function, a.value, b.value)
        if sign in ("&", "|", "^") and len(kinds) == 1 and kinds <= {"int", "bool"}:
            return Typed(ast.BinOp(a.node, node.op, b.node), a.kind, a.axes | b.axes)
        if sign in ("+", "-", "*") and "bool" not in kinds:
            a, b = self.alike(a, b)
        elif sign == "/" and "bool" not in kinds:
            a, b = self.as_float(a), self.as_float(b)
        elif sign in ("//", "%", "<<", ">>") and kinds == {"int"}:
            if b.value == 0 and sign in ("//", "%"):
                return self.refuse("divide by no 0", shown(node), "mend it")
        else:
            got = f"`{ast.unparse(node)}` of {a.kind} and {b.kind}"
            advice = ADVICE.get(type(node.op), "convert with float(x) or int(x); choose by where for bools")
            return self.refuse(f"use {sign} where it is the same in Triton and PyTorch", got, advice)
        return Typed(ast.BinOp(a.node, node.op, b.node), a.kind, a.axes | b.axes)

    def comparison(self, node: ast.Compare) -> Typed:
        """Return comparisons, a chain as their conjunction."""
        found, left = None, self.expression(node.left)
        for op, right in zip(node.ops, map(self.expression, node.comparators), strict=True):
            if type(op) not in OPERATORS or "bool" in (left.kind, right.kind):
                return self.refuse("compare numbers", shown(node), "use & | ^ ~ for bools")
            a, b = self.alike(left, right)
            axes = a.axes | b.axes
            if a.is_constant and b.is_constant:
                one = self.folded(node, OPERATORS[type(op)][1], a.value, b.value)
            else:
                one = Typed(ast.Compare(a.node, [op], [b.node]), "bool", axes)
            if found is not None:
                one = Typed(ast.BinOp(found.node, ast.BitAnd(), one.node), "bool", found.axes | axes)
            found, left = one, right
        assert found is not None
        return found

    def call(self, node: ast.Call) -> Typed:
        """Return a call of one of WORDS."""
        word, called = None, node.func
        if isinstance(called, ast.Name) and called.id in self.locals:
            return self.refuse("call functions", f"{called.id}(...)", "choose another name")
        if isinstance(called, ast.Name) and called.id not in self.scope:
            word = called.id
        elif isinstance(called, ast.Name | ast.Attribute):
            function = self.resolve(called)
            name = getattr(function, "__name__", "")
            if isinstance(called, ast.Name) and getattr(builtins, called.id, None) is function:
                word = OF_PYTHON.get(called.id)
            elif getattr(torch, name, None) is function:
                word = name
            elif getattr(math, name, None) is function:
                values = [self.expression(argument) for argument in node.args]
                if all(value.is_constant for value in values):
                    return self.folded(node, function, *[value.value for value in values])
                return self.refuse("call functions of tensors", shown(node), f"call torch.{name}")
        if word not in WORDS:
            known = f"torch's {', '.join(WORDS)}".replace(", float, int", "") + ", and float and int"
            return self.refuse(f"call only {known}", shown(called), "write it with these, or leave it out")
        arguments: list[Any] = node.args
        if node.keywords or len(arguments) != WORDS[word]:
            return self.refuse(f"call {word} with {WORDS[word]} arguments", shown(node), "pass each by place")
        if word == "float" and isinstance(arguments[0], ast.Constant) and isinstance(arguments[0].value, str):
            return self.folded(node, float, arguments[0].value)  # "-inf"
        values = [self.expression(argument) for argument in arguments]
        axes = frozenset[str]().union(*(value.axes for value in values))
        if word == "where":
            condition, a, b = values
            if condition.kind != "bool":
                return self.refuse("choose by a bool", shown(node), "compare something")
            a, b = self.alike(a, b)
            if condition.is_constant:
                return a if condition.value else b
            return Typed(ast.Call(ast.Name(word), [condition.node, a.node, b.node], []), a.kind, axes)
        if any(value.kind == "bool" for value in values) and word not in ("float", "int"):
            return self.refuse(f"call {word} with numbers", shown(node), "choose by where for bools")
        if all(value.is_constant for value in values):
            return self.folded(node, OF_NUMBERS[word], *[value.value for value in values])
        if word in ("minimum", "maximum"):
            values = self.alike(*values)
        elif word in ("exp", "log", "tanh", "sqrt"):
            values = [self.as_float(values[0])]
        kind = word if word in ("float", "int") else values[0].kind
        if kind == values[0].kind == word:
            return values[0]
        return Typed(ast.Call(ast.Name(word), [value.node for value in values], []), kind, axes)

    def subscript(self, node: ast.Subscript) -> Typed:
        """Return a number of an extra."""
        extra = self.extras.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if extra is None:
            return self.refuse("read by an index only what is declared in extras", shown(node), "declare it there")
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if len(parts) != len(extra.shape) or any(isinstance(part, ast.Slice) for part in parts):
            contract = f"read {extra.name} by {len(extra.shape)} integers"
            return self.refuse(contract, shown(node), "declare as many dimensions as there are indices")
        values = [self.expression(part) for part in parts]
        if any(value.kind != "int" for value in values):
            return self.refuse(f"read {extra.name} by integers", shown(node), "convert with int(x)")
        nodes = [value.node for value in values]
        index = ast.Tuple(nodes) if len(nodes) > 1 else nodes[0]
        axes = frozenset[str]().union(*(value.axes for value in values))
        return Typed(ast.Subscript(ast.Name(extra.name), index), KINDS[extra.dtype], axes)

    def alike(self, a: Typed, b: Typed) -> tuple[Typed, Typed]:
        """Return two values of one kind: integers as floats next to a float."""
        if a.kind == b.kind:
            return a, b
        if "bool" in (a.kind, b.kind):
            return self.refuse("take two numbers, or two bools", f"{a.kind} and {b.kind}", "choose by where for bools")
        return self.as_float(a), self.as_float(b)

    def as_float(self, value: Typed) -> Typed:
        """Return a number as a float."""
        if value.kind == "float":
            return value
        if value.is_constant:
            return Typed(ast.Constant(float(value.value)), "float", frozenset())
        return Typed(ast.Call(ast.Name("float"), [value.node], []), "float", value.axes)


def is_docstring(node: ast.stmt) -> bool:
    """Return whether a statement is a text, or does nothing."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return is_text or isinstance(node, ast.Pass)


def root_of(node: ast.expr) -> str | None:
    """Return the name that an expression is, or is an attribute of; None for other expressions."""
    if isinstance(node, ast.Attribute):
        return root_of(node.value)
    return node.id if isinstance(node, ast.Name) else None


def loaded(node: ast.expr) -> ast.expr:
    """Return the target of an assignment as a value."""
    return ast.copy_location(ast.Name(node.id), node) if isinstance(node, ast.Name) else node


def shown(node: ast.AST | None) -> str:
    """Return syntax in a few words."""
    text = "nothing" if node is None else f"`{' '.join(ast.unparse(node).split())}`"
    return text if len(text) <= 60 else f"{text[:60]}…`"


@lru_cache(maxsize=256)
def tree_of(text: str) -> ast.FunctionDef:
    """Return the syntax of a function's text."""
    (tree,) = ast.parse(text).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


@lru_cache(maxsize=256)
def axes_of(function: Function) -> frozenset[str]:
    """Return the axes over which a function's value varies."""
    reader = Reader(tree_of(function.source), function.kind, function.extras, {}, "text")
    (value,) = [node.value for node in tree_of(function.source).body if isinstance(node, ast.Return)]
    assert value is not None
    return reader.expression(value).axes


def extras_of(functions: tuple[Any, Any], **sizes: int) -> tuple[Extra, ...]:
    """Return the tensors that a spec's functions read, by name in the order of arguments, those of the score first.

    Raises:
        TypeError: one is no function.
        ValueError: they declare a name differently.
        UnsupportedError: there are more than four.
    """
    found: dict[str, Extra] = {}
    for kind, function in zip(("score", "mask"), functions, strict=True):
        if function is None:
            continue
        if not isinstance(function, Function) or function.kind != kind:
            advice = f"decorate a function with quire.{kind}"
            raise TypeError(f"{kind} must be made by quire.{kind}, got {describe(function)}; {advice}")
        for extra in function.extras:
            extra = extra.resolved(**sizes)
            if found.setdefault(extra.name, extra) != extra:
                raise ValueError(
                    f"extras must be declared alike by score and mask, got {found[extra.name]} and {extra}; "
                    "give them two names"
                )
    if len(found) > MOST_EXTRAS:
        raise UnsupportedError(
            f"extras must be at most {MOST_EXTRAS}, got {len(found)}: {', '.join(found)}; put some into one tensor"
        )
    return tuple(found.values())


def softcap_of(function: Function) -> float | None:
    """Return the cap of a function that is `cap * torch.tanh(score / cap)`; None of others."""
    (statement, *others) = tree_of(function.source).body
    if others or not isinstance(statement, ast.Return) or function.arguments != ("score",):
        return None
    found = re.fullmatch(r"(.+) \* tanh\(score / (.+)\)|tanh\(score / (.+)\) \* (.+)", ast.unparse(statement)[7:])
    caps = [] if found is None else [float(text) for text in found.groups() if text and NUMBER.fullmatch(text)]
    return caps[0] if len(caps) == 2 and caps[0] == caps[1] > 0 else None


def largest_number(function: Function | None) -> float:
    """Return the largest magnitude of a function's finite literals, at least 1."""
    nodes = () if function is None else ast.walk(tree_of(function.source))
    values = [node.value for node in nodes if isinstance(node, ast.Constant)]
    numbers = [abs(float(value)) for value in values if isinstance(value, int | float)]
    return max([1.0, *(number for number in numbers if math.isfinite(number))])


# On tensors


class Scene(NamedTuple):
    """Where scores are, as tensors that can be broadcast to them, and what functions read."""

    q_pos: torch.Tensor
    kv_pos: torch.Tensor
    q_head: torch.Tensor
    kv_head: torch.Tensor
    seq: torch.Tensor
    token: torch.Tensor
    extras: Mapping[str, torch.Tensor]


def apply(score: Function | None, mask: Function | None, scores: torch.Tensor, scene: Scene) -> torch.Tensor:
    """Return scores as a spec's functions leave them: -inf for what the mask hides."""
    values = {**scene.extras, **{name: getattr(scene, name) for name in ARGUMENTS if name != "score"}}
    if score is not None:
        scores = evaluate(score.source, values | {"score": scores}, scores.dtype).broadcast_to(scores.shape)
    if mask is not None:
        visible = evaluate(mask.source, values, scores.dtype)
        scores = torch.where(visible, scores, float("-inf"))
    return scores


def bounds_of(
    mask: Function | None,
    q_pos: torch.Tensor,
    seq: torch.Tensor,
    token: torch.Tensor,
    extras: Mapping[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the first key that each token sees at most, and the one after the last; None without bounds."""
    if mask is None or not mask.bounds:
        return None
    found = evaluate(mask.bounds, {**extras, "q_pos": q_pos, "seq": seq, "token": token}, torch.float32)
    first, last = (torch.as_tensor(value, device=q_pos.device).broadcast_to(q_pos.shape) for value in found)
    return first, last + 1


def evaluate(text: str, values: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """Return the value of a function's text.

    Args:
        text: of a `Function`.
        values: of its arguments, by name; there may be others.
        dtype: of its floats.
    """
    known: dict[str, Any] = dict(values)
    for statement in tree_of(text).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            known[statement.targets[0].id] = value_of(statement.value, known, dtype)
        elif isinstance(statement, ast.Return) and statement.value is not None:
            return value_of(statement.value, known, dtype)
    raise AssertionError(text)


def value_of(node: ast.expr, known: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the value of an expression: a tensor, a number, or a tuple of them."""

    def of(part: ast.expr) -> Any:
        return value_of(part, known, dtype)

    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return known[node.id]
    if isinstance(node, ast.Tuple):
        return tuple(map(of, node.elts))
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)][1](of(node.operand))
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)][1](of(node.left), of(node.right))
    if isinstance(node, ast.Compare):
        return OPERATORS[type(node.ops[0])][1](of(node.left), of(node.comparators[0]))
    if isinstance(node, ast.Subscript):
        return number_of(of(node.value), of(node.slice), dtype)
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    word, arguments = node.func.id, [of(argument) for argument in node.args]
    if word in ("float", "int"):
        return arguments[0].to(dtype if word == "float" else torch.int64)
    if word in ("minimum", "maximum"):
        device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
        arguments = [torch.as_tensor(a, device=device) for a in arguments]
        kinds = [a.dtype for a in arguments if a.dim()] or [a.dtype for a in arguments]
        arguments = [a.to(kinds[0]) for a in arguments]
    if word == "where" and all(isinstance(a, float) for a in arguments[1:]):  # of which torch makes float32
        arguments[1] = torch.tensor(arguments[1], dtype=dtype, device=arguments[0].device)
    return getattr(torch, word)(*arguments)


def number_of(extra: torch.Tensor, index: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of an extra, at the nearest index where one is out of range."""
    indices = index if isinstance(index, tuple) else (index,)
    places = [
        torch.as_tensor(i, device=extra.device).clamp(0, size - 1) for i, size in zip(indices, extra.shape, strict=True)
    ]
    found = extra[tuple(torch.broadcast_tensors(*places))]
    kind = KINDS.get(found.dtype, "float")
    return found if kind == "bool" else found.to(dtype if kind == "float" else torch.int64)
