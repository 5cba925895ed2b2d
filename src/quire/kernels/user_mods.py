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
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels import mods
from quire.kernels.launcher import Plain
from quire.kernels.user_tiles import Tile
from quire.score_functions import ARGUMENTS, KINDS, OPERATORS, Extra, Function, axes_of, tree_of
from quire.spec import AttentionSpec

SIZE_STEP = 16  # a size is passed as a multiple of it and 3: Triton compiles for integers that are 1 or that 16 divides
OF_ROWS = ARGUMENTS.keys() - {"score", "kv_pos"}  # arguments that do not depend on the key
OF_HEADS = {"q_head": "num_q_heads", "kv_head": "num_kv_heads"}  # arguments that are an index in range


def passed(extras: tuple[Extra, ...], tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Return what a kernel gets for a spec's extras: each tensor, and after it the sizes that the spec doesn't say."""
    found: list[Any] = []
    for extra, tensor in zip(extras, tensors, strict=True):
        found.append(tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor)
        sizes = zip(extra.shape, tensor.shape, strict=True)
        found += [Plain(SIZE_STEP * size + 3) for known, size in sizes if known is None]
    return tuple(found)


def function_of(spec: AttentionSpec, with_bounds: bool = False, in_ptx: bool = False) -> Any:
    """Return the jit function that turns scores into those that a spec's functions make; None without functions.

    Args:
        spec: what is computed.
        with_bounds: also hide the keys outside of the mask's bounds.
        in_ptx: it may have instructions of PTX: for logarithms, and to read an extra for each score. Triton would
            choose another layout for these reads, and move scores there and back through shared memory.
    """
    if spec.score is None and spec.mask is None:
        return None
    name = "bounded_scores" if with_bounds and spec.mask is not None and spec.mask.bounds else "scores"
    return functions_of(spec, in_ptx)[name]


def hopper_functions(spec: AttentionSpec, gluon: "Gluon") -> tuple[Any, Any]:
    """Return the jit functions of the Hopper kernel: of scores, and of the runs of numbers that these read, or None."""
    if spec.score is None and spec.mask is None:
        return None, None
    found = functions_of(spec, True, gluon)
    return found["scores"], found.get("runs")


def bounds_of(spec: AttentionSpec) -> Any:
    """Return the jit function that says which keys tokens see at most; None without one."""
    if spec.mask is None or not spec.mask.bounds:
        return None
    return functions_of(spec)["bounds"]


class Gluon(NamedTuple):
    """What `hopper_functions` is told of a kernel in Gluon."""

    by_warps: bool  # each warp's rows are tokens of one head
    has_runs: bool  # there is shared memory for a run of each row
    windows: Any  # modules of the kernel, whose functions are called
    runs: Any


def functions_of(spec: AttentionSpec, in_ptx: bool = False, gluon: Gluon | None = None) -> dict[str, Any]:
    """Return the jit functions of a spec's functions, for a kernel in Triton, or in Gluon, which names its layouts."""
    heads = spec.num_q_heads, spec.num_kv_heads
    return jit_functions(spec.score, spec.mask, spec.extras, *heads, spec.dtype.itemsize, in_ptx, gluon)


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
def fast_log(x):
    # An instruction, where `tl.log` and `tl.log2` are polynomials. Its absolute error between 0.5 and 2 is 2^-22.
    log = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    return log * 0.6931471805599453


@triton.jit
def fast_tanh(x, factor, by):
    # by * tanh(x * factor / (2 log2(e))), as in `mods.softcap`, with an absolute error of float32 near `by`.
    r = tl.rsqrt(tl.exp2(x * factor) + 1.0)
    return by - 2.0 * by * r * r


@triton.jit
def times(scores, scale):
    if isinstance(scale, tl.tensor) and len(scale.shape) == 1:
        return scores * scale[:, None]
    else:
        return scores * scale


def load_in_ptx(name: str, kind: str, register: str, dtype: str) -> str:
    """Return the text of a function that loads numbers, and keeps the layout of their addresses."""
    code = f'"ld.global.{kind} $0, [$1];", "={register},l", [ptrs.to(tl.int64)], dtype=tl.{dtype}'
    return f"@triton.jit\ndef {name}(ptrs):\n    return tl.inline_asm_elementwise({code}, is_pure=True, pack=1)\n"


LOADS = {  # the instruction, a register, and what that is in Triton
    torch.float32: ("b32", "r", "float32"),
    torch.float16: ("b16", "h", "float16"),
    torch.bfloat16: ("b16", "h", "bfloat16"),
    torch.int32: ("b32", "r", "int32"),
    torch.int64: ("b64", "l", "int64"),
    torch.int8: ("s8", "r", "int32"),
    torch.uint8: ("u8", "r", "int32"),
    torch.bool: ("u8", "r", "int32"),
}


@lru_cache(maxsize=1024)
def jit_functions(
    score: Function | None,
    mask: Function | None,
    extras: tuple[Extra, ...],
    q_heads: int,
    kv_heads: int,
    itemsize: int,
    in_ptx: bool,
    gluon: Gluon | None,
) -> dict[str, Any]:
    """Return the jit functions of a spec's functions.

    They are "scores"; "bounded_scores" and "bounds", if there are bounds; and for `gluon` perhaps "runs".
    """
    writer = Writer(extras, {"num_q_heads": q_heads, "num_kv_heads": kv_heads}, itemsize, in_ptx, gluon is not None)
    tile = None if score is None else Tile(writer, tree_of(score.source))
    kinds = dict.fromkeys(extra.dtype for extra in extras) if writer.loads_in_ptx else ()
    parts = [load_in_ptx(f"load_{str(dtype)[6:]}", *LOADS[dtype]) for dtype in kinds]
    parts += [] if tile is None else [writer.function("user_score", tile.tree)]
    has_runs = gluon is not None and gluon.has_runs and tile is not None and tile.is_guarded
    writer.has_runs = has_runs
    if tile is not None:
        forms = [form for form, _ in tile.forms] + ["guarded"] * has_runs
        parts += [writer.function(f"{form}_score", tile.tree, form, tile) for form in forms]
        parts += [writer.function("user_runs", tile.tree, "runs", tile), RUNS] if has_runs else []
    if tile is not None and gluon is not None and tile.addend is not None:
        parts += [writer.function("flat_addend", tile.addend, "flat", tile)] if tile.is_flat_first else []
        parts += [writer.function("user_addend", tile.addend)]
    parts += [writer.function("user_mask", tree_of(mask.source))] if mask is not None else []
    has_bounds = mask is not None and mask.bounds != ""
    if mask is not None and has_bounds:
        parts += [writer.function("user_bounds", tree_of(mask.bounds)), BOUNDS]
    loads = " ".join(f"{load}," for load in writer.of_rows.values())
    head = "@triton.jit\ndef user_rows(q_pos_, q_head_, kv_head_, seq_, token_, extras):"
    parts.append(f"{head}\n    return ({loads})\n")
    scope: dict[str, Any] = {"__name__": __name__, "triton": triton, "tl": tl, "exact_tanh": mods.tanh}
    scope |= {f.__name__: f for f in (clamped, size_of, floor_divide, floor_modulo, fast_log, fast_tanh, times)}
    if gluon is not None:
        windows, runs = gluon.windows, gluon.runs
        used = windows.of_windows, windows.each_of_windows, windows.keys_of_windows, windows.spread, runs.read_run
        scope |= {f.__name__: f for f in used}
        parts += [combined_in_gluon(score, tile, mask is not None, gluon.by_warps, has_runs)]
    else:
        parts += [combined("scores", score, tile, mask is not None, False)]
        parts += [combined("bounded_scores", score, tile, True, True)] if has_bounds else []
    text = "\n\n".join(parts)
    name = f"<quire functions {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    exec(compile(text, name, "exec"), scope)
    return {name: scope[name] for name in ("scores", "bounded_scores", "bounds", "runs") if name in scope}


LOG2E = 1.4426950408889634
TOKEN = "token[:, None].to(tl.int32)"
ARGUMENTS_OF_KERNELS = "scores, q_pos, span, pos, cols, q_head, kv_head, seq, token, extras, of_rows"
ROWS_AND_KEYS = f"q_pos[:, None], (pos + cols)[None, :], q_head[:, None], kv_head, seq, {TOKEN}, extras, of_rows"
BOUNDS = """@triton.jit
def bounds(q_pos, seq, token, extras):
    first, last = user_bounds(None, q_pos, None, None, None, seq, token.to(tl.int32), extras, ())
    nothing = tl.zeros_like(q_pos)
    return nothing + first, nothing + last + 1
"""


RUNS = f"""@triton.jit
def runs(q_pos, pos, q_head, kv_head, seq, token, extras, of_rows):
    return user_runs(
        None, q_pos[:, None], None, q_head[:, None], kv_head, seq, {TOKEN}, extras, of_rows, None, pos, None
    )
"""


def combined(name: str, score: Function | None, tile: Tile | None, has_mask: bool, with_bounds: bool) -> str:
    """Return the text of the function that kernels call, of rows [M], keys [N] and scores [M, N].

    `pos` and `cols` are the tile's first position and what each key is after it. `span` has the lowest and the highest
    position of rows, and that of the last key; it is None where they are not known. Without scores, it returns the
    numbers of extras that each row reads, whatever the key: kernels call it so before the first tile, and pass them.
    """
    lines = list[str]()
    if score is not None and tile is not None:
        lines += scores_of_forms(score, tile, tile.forms)
    lines += masked(has_mask, with_bounds) + ["return scores"]
    return with_head(f"def {name}({ARGUMENTS_OF_KERNELS}):", lines)


def combined_in_gluon(score: Function | None, tile: Tile | None, has_mask: bool, by_warps: bool, has_runs: bool) -> str:
    """Return the text of the function that the Hopper kernel calls.

    It is as `combined` has it, but takes products of queries and keys, and their scale. It returns scores, what makes
    exponents in base 2 of them, and a tuple: of what is added to these, [M], or of nothing. WHOLE: scores are of the
    whole tile. `copied` is as `read_run` takes it.
    """
    lines = [f"offset, factor = (), {LOG2E!r}"]
    if score is None or tile is None:
        lines += [f"factor = scale * {LOG2E!r}"]
    else:
        others = scores_of_forms(score, tile, tile.forms, "times(scores, scale)", has_runs)
        if tile.addend is not None and tile.is_flat_first:
            rest = scores_of_forms(score, tile, tile.forms[1:], "times(scores, scale)", has_runs)
            if by_warps and tile.is_of_distance:
                rows = "of_windows(q_pos[:, None]), keys_of_windows(pos), of_windows(q_head[:, None])"
                numbers = f"user_addend(None, {rows}, kv_head, seq, None, extras, each_of_windows(of_rows))"
                rest = [f"scores = times(scores, scale) + spread({numbers}, scores.shape[1])"]
            flat = f"flat_addend(None, {ROWS_AND_KEYS}, known, pos, cols)"
            lines += ["if WHOLE:"]
            lines += indented(
                [
                    *scalars_of(tile),
                    f"flat = {tile.forms[0][1]}",
                    f"factor = tl.where(flat, scale * {LOG2E!r}, {LOG2E!r})",
                    "by_row = (q_pos - q_pos).to(tl.float32)",
                    "if flat:",
                    f"    by_row = tl.sum({flat} + by_row[:, None], 1) * {LOG2E!r}",
                    "else:",
                    *indented(rest),
                    "offset = (by_row,)",
                ]
            )
            lines += ["else:", *indented(others)]
        else:
            lines += others
    lines += masked(has_mask, False) + ["return scores, factor, offset"]
    return with_head(f"def scores({ARGUMENTS_OF_KERNELS}, scale, WHOLE: tl.constexpr, copied):", lines)


def with_head(head: str, lines: list[str]) -> str:
    """Return the text of a function that, without scores, returns what rows read."""
    rows = f"user_rows(q_pos[:, None], q_head[:, None], kv_head, seq, {TOKEN}, extras)"
    head_lines = ["@triton.jit", head, "    if scores is None:", f"        return {rows}", "    else:"]
    return "\n".join([*head_lines, *indented(indented(lines)), ""])


def indented(lines: list[str]) -> list[str]:
    """Return lines one step further to the right."""
    return [f"    {line}" for line in lines]


def scalars_of(tile: Tile) -> list[str]:
    """Return the lines that find what forms of a tile take."""
    return ["q_low, q_high, last = span", *tile.lines, f"known = {tile.scalars}"]


def scores_of_forms(
    score: Function, tile: Tile, forms: list[tuple[str, str]], given: str = "scores", has_runs: bool = False
) -> list[str]:
    """Return the lines that change scores, by the first of some forms that serves, else by the function."""
    changed = f"user_score({given}, {ROWS_AND_KEYS})"
    if axes_of(score) != ARGUMENTS["score"]:  # of as many numbers as scores are, in Gluon too
        changed = f"tl.where(scores == scores, {changed}, scores)"
    if not forms:
        return [f"scores = {changed}"]
    lines = ["if span is None:", f"    scores = {changed}", "else:"]
    lines += indented([*scalars_of(tile), "rest = True"])
    more = ", copied" if has_runs else ""
    for form, serves in forms:
        # With few rows the kernel waits for memory, and registers of one more form cost a program on each SM.
        indent = "    "
        if form == "inside":
            lines.append(f"{indent}if scores.shape[0] > 16:")
            indent += "    "
        lines += [f"{indent}{form} = rest & {serves}", f"{indent}rest = rest & ({form} == False)"]
        lines += [f"{indent}if {form}:"]
        lines += [f"{indent}    scores = {form}_score({given}, {ROWS_AND_KEYS}, known, pos, cols{more})"]
    if has_runs:
        changed = f"guarded_score({given}, {ROWS_AND_KEYS}, known, pos, cols{more})"
    return lines + ["    if rest:", f"        scores = {changed}"]


def masked(has_mask: bool, with_bounds: bool) -> list[str]:
    """Return the lines that hide keys."""
    if not has_mask:
        return []
    lines = [f"visible = user_mask(None, {ROWS_AND_KEYS})"]
    if with_bounds:
        lines.append(f"first, last = user_bounds(None, q_pos[:, None], None, None, None, seq, {TOKEN}, extras, ())")
        lines.append("kv_pos = (pos + cols)[None, :]")
        lines.append("visible = visible & (kv_pos >= first) & (kv_pos <= last)")
    return [*lines, 'scores = tl.where(visible, scores, float("-inf"))']


class Writer:
    """Write functions for Triton.

    Args:
        extras: of the spec.
        sizes: of its heads, by name.
        itemsize: bytes of a query's number, which say how precise tanh and log have to be.
        in_ptx: as in `function_of`, as the next.
        is_gluon: see there.
    """

    def __init__(
        self, extras: tuple[Extra, ...], sizes: dict[str, int], itemsize: int, in_ptx: bool, is_gluon: bool
    ) -> None:
        self.has_runs = False  # of the function that is written
        self.in_ptx, self.loads_in_ptx, self.axes = in_ptx, in_ptx and not is_gluon, dict[str, frozenset[str]]()
        self.sizes, self.is_exact, self.assigned = sizes, itemsize > 2, set[str]()
        self.form, self.tile, self.is_at_first = "", None, False
        self.with_first = set[str]()  # names of what grows alike from key to key, whose first is known
        self.of_rows, self.is_called_for_tiles = dict[str, str](), False  # loads that do not depend on the key, by text
        self.extras: dict[str, tuple[Extra, str, list[str]]] = {}  # and its pointer and sizes, as text
        place = 0
        for extra in extras:
            names, first = [], place
            for size in extra.shape:
                place += size is None
                names.append(str(size) if size is not None else f"size_of(extras[{place}])")
            self.extras[extra.name] = extra, f"extras[{first}]", names
            place += 1

    def function(self, name: str, tree: ast.FunctionDef, form: str = "", tile: Tile | None = None) -> str:
        """Return the text of a jit function.

        Args:
            name: of the function.
            tree: the user's function.
            form: one of `tile.forms`; "guarded", which reads a run that was copied; "runs", which says where it is.
            tile: of the function, for these.
        """
        arguments = [*map(own, ARGUMENTS), "extras", "of_rows"]
        arguments += ["known", "pos", "cols", "copied=None"] if form else []
        lines = ["@triton.jit", f"def {name}({', '.join(arguments)}):"]
        self.assigned = {ast.unparse(node.targets[0]) for node in tree.body if isinstance(node, ast.Assign)}
        self.form, self.tile, self.with_first, self.axes = form, tile, {"kv_pos"}, dict(ARGUMENTS)
        self.is_called_for_tiles = name != "user_bounds"
        moving = {"kv_pos", "score"}  # which "runs" does not need
        if form in ("inside", "guarded", "runs"):
            lines.append("    first_kv_pos = pos")
        if form == "inside":
            lines.append("    near, far = (cols % 8)[None, :], (cols // 8 * 8)[None, :].to(tl.int64)")
        for statement in tree.body:
            value: ast.expr = statement.value  # pyright: ignore[reportAttributeAccessIssue]
            reads = [node for node in ast.walk(value) if isinstance(node, ast.Subscript)] if form == "runs" else []
            if reads:
                lines.append(f"    return {self.expression(reads[0])}")
                break
            if not isinstance(statement, ast.Assign):
                lines.append(f"    return {self.expression(value)}")
                break
            target = ast.unparse(statement.targets[0])
            if form in ("inside", "guarded", "runs") and tile is not None and id(statement) in tile.steady:
                lines.append(f"    first_{target} = {self.first(value)}")
                self.with_first.add(target)
            else:
                self.with_first.discard(target)
            moves = form == "runs" and tile is not None and tile.moves(value, moving)
            (moving.add if moves else moving.discard)(target)
            if not moves:
                lines.append(f"    {own(target)} = {self.expression(value)}")
            self.axes[target] = self.axes_of(value)
        self.form, self.tile = "", None
        return "\n".join([*lines, ""])

    def first(self, node: ast.expr) -> str:
        """Return the value that an expression has at the first key of the tile."""
        self.is_at_first = True
        found = self.expression(node)
        self.is_at_first = False
        return found

    def expression(self, node: ast.expr) -> str:
        """Return an expression as Triton has it."""
        of, leaf = self.expression, None if self.tile is None else self.tile.leaves.get(id(node))
        if leaf is not None and leaf.size is None and self.form != "guarded":
            return f"(known[{leaf.number}] != 0)"
        if isinstance(node, ast.Constant):
            is_finite = node.value not in (float("inf"), -float("inf"))
            return f"({node.value!r})" if is_finite else f'float("{node.value!r}")'
        if isinstance(node, ast.Name):
            return f"first_{node.id}" if self.is_at_first and node.id in self.with_first else own(node.id)
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
        return self.called(node.func.id, [of(argument) for argument in node.args])

    def called(self, word: str, arguments: list[str]) -> str:
        """Return the call of one of WORDS."""
        if word in ("float", "int"):
            return f"({arguments[0]}).to(tl.{word}32)"
        if word in ("minimum", "maximum"):  # NaN stays NaN, as in PyTorch
            return f"tl.{word}({', '.join(arguments)}, propagate_nan=tl.PropagateNan.ALL)"
        if word == "log" and self.in_ptx and not self.is_exact:
            return f"fast_log({arguments[0]})"
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
        return self.operator(node, self.expression(node.left), self.expression(node.right))

    def operator(self, node: ast.BinOp, a: str, b: str) -> str:
        """Return the value of an operator of two values."""
        sign = OPERATORS[type(node.op)][0]
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
        offset, by_key, begin, first = "", list[str](), "", ""  # what addresses of a row grow by
        for i, (index, size) in enumerate(zip(indices, sizes, strict=True)):
            leaf = None if self.tile is None else self.tile.leaves.get(id(index))
            name = ast.unparse(index)
            is_in_range = name not in self.assigned and size == str(self.sizes.get(OF_HEADS.get(name, "")))
            if leaf is not None and self.form == "flat":
                place = f"known[{leaf.number}]"
            elif leaf is not None and leaf.interval.is_exact and leaf.interval.step is not None:
                place = self.first(index)
                begin, first = f"{offset} * {size}" if offset else "0", place
                by_key = [" * ".join([str(leaf.interval.step), *sizes[i + 1 :]]), *by_key]
            elif is_in_range or (leaf is not None and leaf.interval.is_exact):
                place = self.expression(index)
            else:
                place = f"clamped({self.expression(index)}, {size})"
            offset = f"({offset} * {size} + {place})" if offset else place
        if self.form == "runs":
            return f"({pointer} + {begin}) + {first}, {pointer} + {begin}, {sizes[-1]}"
        if self.has_runs and by_key and self.form:
            return f"read_run(copied, score_.shape[1], {extra.dtype is torch.bfloat16})"
        if by_key:
            # A thread has keys that differ by multiples of 8, of which addresses differ by immediates. Without what
            # looks like a limit, the compiler would add these to the address of a row before the loop, in registers.
            step = " + ".join(by_key)
            offset = f"tl.maximum({offset} + near * ({step}), -1073741824) + far * ({step})"
        varies = frozenset({"rows", "keys"}) <= self.axes_of(node)
        load = f"load_{str(extra.dtype)[6:]}" if self.loads_in_ptx and varies else "tl.load"
        loaded = f"{load}({pointer} + {offset})"
        kind = KINDS[extra.dtype]
        found = f"({loaded} != 0)" if kind == "bool" else f"{loaded}.to(tl.{kind}32)"
        names = {part.id for index in indices for part in ast.walk(index) if isinstance(part, ast.Name)}
        if not self.is_called_for_tiles or not names <= OF_ROWS - self.assigned:
            return found
        self.of_rows.setdefault(ast.unparse(node), found)
        return f"of_rows[{list(self.of_rows).index(ast.unparse(node))}]"

    def axes_of(self, node: ast.expr) -> frozenset[str]:
        """Return the axes over which a value varies."""
        names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
        return frozenset[str]().union(*(self.axes.get(name, frozenset()) for name in names))


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
