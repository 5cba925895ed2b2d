"""What is the same for all of a tile of keys in a user's function on scores, as text for `user_mods`.

An index or a condition that depends on positions lies in an interval, whose ends depend on those of the tile's rows and
keys. A few scalar instructions find them. Where they say so, a shorter form of the function takes the tile:

* flat: each index and condition is the same for all of the tile, as a bucket for far keys is. So an extra is read once
  for each row, or once.
* inside: no index is out of range, and each condition is the same for all of the tile. So an index is not clamped, and
  the addresses of a row differ by constants.
"""

import ast
import re
from typing import Any, NamedTuple, Protocol

import torch

MOST_POSITION = 1 << 26  # of which intervals are found; no sum of a few overflows
MOST_INTEGER = (1 << 31) - 1
RISING = "exp", "log", "sqrt", "tanh"


class Writer(Protocol):
    """What writes expressions for Triton, and knows the text of each extra's pointer and sizes."""

    extras: dict[str, tuple[Any, str, list[str]]]

    def expression(self, node: ast.expr) -> str:
        """Return an expression."""
        ...

    def operator(self, node: ast.BinOp, a: str, b: str) -> str:
        """Return the value of an operator of two values."""
        ...

    def called(self, word: str, arguments: list[str]) -> str:
        """Return the call of a word."""
        ...


class Interval(NamedTuple):
    """Text of the ends of an interval, which has both. Those of a condition are 0 and 1, as integers."""

    low: str
    high: str
    bound: float  # of the magnitude of an integer; 0 of others
    is_exact: bool = True  # an integer that comes of integers only
    step: int | None = 0  # what an integer grows by from key to key; None where that differs


class Leaf(NamedTuple):
    """An index or a condition that depends on the key."""

    number: int  # among the scalars that a short form is handed
    interval: Interval
    size: str | None  # of the dimension that it is an index of; None of a condition


class Tile:
    """What a tile says of a function's indices and conditions.

    Args:
        writer: of the function.
        tree: of the function.
    """

    def __init__(self, writer: Writer, tree: ast.FunctionDef) -> None:
        self.writer, self.tree, self.leaves, self.names = writer, tree, dict[int, Leaf](), dict[str, str]()
        self.steady = set[int]()  # assignments of what grows alike from key to key
        self.known: dict[str, Interval | None] = {
            "q_pos": Interval("q_low", "q_high", MOST_POSITION),
            "kv_pos": Interval("pos", "last", MOST_POSITION, step=1),
        }
        self.moving = {"kv_pos", "score"}  # names of what depends on the key
        self.can_be_flat, of_scores = True, {"score"}
        self.addend: ast.FunctionDef | None = None  # the function without the score, if that is a number plus it
        for statement in tree.body:
            value: ast.expr = statement.value  # pyright: ignore[reportAttributeAccessIssue]
            found = self.interval(value)
            if found is None:
                self.look(value)
            if not isinstance(statement, ast.Assign):  # without the score, it has no shape of its own in a flat form
                self.can_be_flat &= self.moves(value, of_scores)
                if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add | ast.Sub) and "score" in of_scores:
                    score, other = value.left, value.right
                    if isinstance(value.op, ast.Add) and not is_name(score, "score"):
                        score, other = other, score
                    if is_name(score, "score") and not self.moves(other, of_scores):
                        other = other if isinstance(value.op, ast.Add) else ast.UnaryOp(ast.USub(), other)
                        self.addend = ast.FunctionDef(
                            tree.name, tree.args, [*tree.body[:-1], ast.Return(other)], [], None
                        )  # pyright: ignore[reportCallIssue]
                break
            name = ast.unparse(statement.targets[0])
            if found is not None and found.step is not None and self.moves(value):
                self.steady.add(id(statement))
            self.known[name] = found
            for names in (self.moving, of_scores):
                (names.add if self.moves(value, names) else names.discard)(name)

    @property
    def is_of_distance(self) -> bool:
        """Whether the function adds to the score a number that depends on both positions' distance and the head."""
        return self.addend is not None and len(self.leaves) > 0 and all(map(depends_on_distance, self.addend.body))

    @property
    def is_guarded(self) -> bool:
        """Whether the only index of an extra that moves goes back from key to key, where it is in range."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.Subscript)]
        return len(found) == 1 and self.is_read_in_range(found[0])

    def is_read_in_range(self, node: ast.Subscript) -> bool:
        """Whether it is so of 16-bit floats, by the last index, and a number is used where that is in range."""
        assert isinstance(node.value, ast.Name)
        extra, _, sizes = self.writer.extras[node.value.id]
        *others, index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        leaf = self.leaves.get(id(index))
        is_known = extra.dtype in (torch.bfloat16, torch.float16) and sizes[-1].isdigit()
        if not is_known or any(map(self.moves, others)):
            return False
        if leaf is None or not leaf.interval.is_exact or leaf.interval.step != -1:
            return False
        text, wheres = ast.unparse(index), [n for n in ast.walk(self.tree) if isinstance(n, ast.Call)]
        wheres = [call for call in wheres if ast.unparse(call.func) == "where" and call.args[1] is node]
        return any({f"{text} >= 0", f"{text} < {sizes[-1]}"} <= set(conditions(call.args[0])) for call in wheres)

    @property
    def is_flat_first(self) -> bool:
        """Whether there is a flat form, which is the first one."""
        return self.can_be_flat and len(self.leaves) > 0

    @property
    def forms(self) -> list[tuple[str, str]]:
        """The names of short forms, and when they serve."""
        found, leaves = list[tuple[str, str]](), self.leaves.values()
        guard = f"(q_high < {MOST_POSITION}) & (last < {MOST_POSITION})"
        if self.is_flat_first:
            found.append(("flat", " & ".join([guard, *(f"({low} == {high})" for low, high in map(self.ends, leaves))])))
        if any(leaf.size is not None and leaf.interval.is_exact for leaf in leaves):
            parts = [guard]
            for _, (low, high, _, is_exact, _), size in leaves:
                if size is None:
                    parts.append(f"({low} == {high})")
                elif is_exact:
                    parts.append(f"({low} >= 0) & ({high} < {size})")
            found.append(("inside", " & ".join(parts)))
        return found

    @property
    def lines(self) -> list[str]:
        """The assignments to scalars that `forms` and `scalars` name."""
        found, wanted = list[str](), " ".join([self.scalars, *(serves for _, serves in self.forms)])
        for text, name in reversed(self.names.items()):
            if re.search(rf"\b{name}\b", wanted):
                found.append(f"{name} = {text}")
                wanted += f" {text}"
        return found[::-1]

    @property
    def scalars(self) -> str:
        """The scalars that a short form is handed, as a tuple."""
        return f"({''.join(f'{self.ends(leaf)[0]}, ' for leaf in self.leaves.values())})"

    def ends(self, leaf: Leaf) -> tuple[str, str]:
        """Return the ends of the interval of a condition, or of an index in range."""
        low, high = leaf.interval[:2]
        if leaf.size is None:
            return low, high
        return f"clamped({low}, {leaf.size})", f"clamped({high}, {leaf.size})"

    def moves(self, node: ast.expr, names: set[str] | None = None) -> bool:
        """Whether a value depends on the key, or on some names."""
        names = self.moving if names is None else names
        return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))

    def look(self, node: ast.expr) -> None:
        """Note the indices and conditions within an expression."""
        if isinstance(node, ast.Subscript):
            assert isinstance(node.value, ast.Name)
            _, _, sizes = self.writer.extras[node.value.id]
            indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            for index, size in zip(indices, sizes, strict=True):
                self.note(index, size)
            return
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "where":
            self.note(node.args[0], None)
            parts: list[ast.AST] = list(node.args[1:])
        else:
            parts = list(ast.iter_child_nodes(node))
        for part in parts:
            if isinstance(part, ast.expr):
                self.look(part)

    def note(self, node: ast.expr, size: str | None) -> None:
        """Note an index or a condition, if it depends on the key."""
        if not self.moves(node):
            return
        found = self.interval(node)
        if found is None:
            self.can_be_flat = False
            if size is None:
                self.look(node)
        else:
            self.leaves[id(node)] = Leaf(len(self.leaves), found, size)

    def named(self, text: str) -> str:
        """Return a name for a scalar."""
        return self.names.setdefault(text, f"t{len(self.names)}")

    def interval(self, node: ast.expr) -> Interval | None:
        """Return the interval in which a value is for all rows and keys of a tile; None where that is not known."""
        found = self.unnamed(node)
        if found is None or not found.bound <= MOST_INTEGER:
            return None
        if isinstance(node, ast.Name | ast.Constant):
            return found
        return found._replace(low=self.named(found.low), high=self.named(found.high))

    def unnamed(self, node: ast.expr) -> Interval | None:
        """Return the interval of a value, with expressions for its ends."""
        if isinstance(node, ast.Constant):
            text = self.writer.expression(node) if not isinstance(node.value, bool) else str(int(node.value))
            return Interval(text, text, abs(node.value) if type(node.value) is int else 0)
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.UnaryOp):
            return self.unary(node)
        if isinstance(node, ast.BinOp):
            return self.binary(node)
        if isinstance(node, ast.Compare):
            return self.comparison(node)
        if isinstance(node, ast.Call):
            return self.call(node)
        return None

    def unary(self, node: ast.UnaryOp) -> Interval | None:
        a = self.interval(node.operand)
        if a is None or not isinstance(node.op, ast.USub):
            return None
        return a._replace(low=f"-{a.high}", high=f"-{a.low}", step=None if a.step is None else -a.step)

    def binary(self, node: ast.BinOp) -> Interval | None:
        a, b = self.interval(node.left), self.interval(node.right)
        if a is None or b is None:
            return None
        exact, steps = a.is_exact and b.is_exact, None if a.step is None or b.step is None else (a.step, b.step)
        if isinstance(node.op, ast.Add):
            step = None if steps is None else steps[0] + steps[1]
            return Interval(f"{a.low} + {b.low}", f"{a.high} + {b.high}", a.bound + b.bound, exact, step)
        if isinstance(node.op, ast.Sub):
            step = None if steps is None else steps[0] - steps[1]
            return Interval(f"{a.low} - {b.high}", f"{a.high} - {b.low}", a.bound + b.bound, exact, step)
        if isinstance(node.op, ast.BitAnd | ast.BitOr) and self.is_condition(node.left):
            sign = "&" if isinstance(node.op, ast.BitAnd) else "|"
            return Interval(f"{a.low} {sign} {b.low}", f"{a.high} {sign} {b.high}", 1, step=None)
        number = node.right.value if isinstance(node.right, ast.Constant) else None
        if not isinstance(number, int | float) or number == 0:
            return None
        if isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv | ast.RShift):
            low, high = (self.writer.operator(node, end, b.low) for end in (a.low, a.high))
            if number < 0:
                low, high = high, low
            bound = a.bound * max(1.0, abs(number)) if isinstance(node.op, ast.Mult) else a.bound
            return Interval(low, high, bound, exact, None)
        return None

    def is_condition(self, node: ast.expr) -> bool:
        """Whether a value is a condition, not a number."""
        if isinstance(node, ast.BinOp):
            return self.is_condition(node.left)
        return isinstance(node, ast.Compare)

    def comparison(self, node: ast.Compare) -> Interval | None:
        a, b = self.interval(node.left), self.interval(node.comparators[0])
        if a is None or b is None:
            return None
        op, exact = node.ops[0], a.is_exact and b.is_exact
        if isinstance(op, ast.Gt | ast.GtE):
            a, b = b, a
        if isinstance(op, ast.Lt | ast.Gt):
            always, perhaps = f"{a.high} < {b.low}", f"{a.low} < {b.high}"
        elif isinstance(op, ast.LtE | ast.GtE):
            always, perhaps = f"{a.high} <= {b.low}", f"{a.low} <= {b.high}"
        else:
            return None
        return Interval(f"({always}).to(tl.int32)", f"({perhaps}).to(tl.int32)", 1, exact, None)

    def call(self, node: ast.Call) -> Interval | None:
        word, parts = ast.unparse(node.func), [self.interval(argument) for argument in node.args]
        if any(part is None for part in parts):
            return None
        first, *others = [part for part in parts if part is not None]
        exact = all(part.is_exact for part in (first, *others))
        bound = max(part.bound for part in (first, *others))
        if word == "where":
            a, b = others
            low, high = (
                f"tl.where({first.low} != 0, {x}, tl.where({first.high} == 0, {y}, tl.{least}({x}, {y})))"
                for x, y, least in ((a.low, b.low, "minimum"), (a.high, b.high, "maximum"))
            )
            return Interval(low, high, bound, exact, None)
        if word in ("minimum", "maximum"):
            (b,) = others
            return Interval(
                f"tl.{word}({first.low}, {b.low})", f"tl.{word}({first.high}, {b.high})", bound, exact, None
            )
        if word == "abs":
            low = f"tl.maximum(tl.maximum({first.low}, -{first.high}), 0)"
            return Interval(low, f"tl.maximum(-{first.low}, {first.high})", bound, exact, None)
        if word in ("float", "int", *RISING):
            low, high = (self.writer.called(word, [end]) for end in first[:2])
            return Interval(low, high, MOST_POSITION if word == "int" else 0, False, None)
        return None


def conditions(node: ast.expr) -> list[str]:
    """Return the text of conditions that must all be true."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return conditions(node.left) + conditions(node.right)
    return [ast.unparse(node)]


def is_name(node: ast.expr, name: str) -> bool:
    """Whether an expression is a name."""
    return isinstance(node, ast.Name) and node.id == name


def depends_on_distance(node: ast.AST) -> bool:
    """Whether positions are in no other expression than their difference, and no number is of a token."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        pair = {ast.unparse(node.left), ast.unparse(node.right)}
        if pair == {"q_pos", "kv_pos"}:
            return True
    if isinstance(node, ast.Name) and node.id in ("q_pos", "kv_pos", "token"):
        return False
    return all(map(depends_on_distance, ast.iter_child_nodes(node)))
