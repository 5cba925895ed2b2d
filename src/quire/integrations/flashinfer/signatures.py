"""Functions with FlashInfer's parameter lists. A table says of each name whether it is served, and in which words.

A function is written with one parameter, its arguments by name. `accepts` gives it FlashInfer's parameters: their order
and defaults, the check of those that are not served, and their lines of the docstring.
"""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from quire import UnsupportedError
from quire.integrations.arguments import check_flags, shown

R = TypeVar("R")


class Arguments(SimpleNamespace):
    """The arguments of a call, by FlashInfer's names."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Argument:
    """What is done with an argument."""

    words: str  # its line in the docstring; of one that is refused, the advice of the error
    kind: str = "served"  # or "flag", a bool that is checked, or "refused"


Table = dict[str, Argument]


def served(words: str) -> Argument:
    """Return an argument that is read, or of which the words say that it is ignored."""
    return Argument(words)


def flag(words: str) -> Argument:
    """Return one that must be True or False."""
    return Argument(words, "flag")


def refused(advice: str) -> Argument:
    """Return one that must be left out."""
    return Argument(advice, "refused")


def accepts(parameters: str, table: Table) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a function, or a method, FlashInfer's parameters.

    Args:
        parameters: FlashInfer's list of them, with defaults.
        table: what is done with each; more names do no harm.
    """
    names, variadic = names_of(parameters)
    entries = {name: table[name] for name in names}

    def decorate(body: Callable[..., R]) -> Callable[..., R]:
        is_method = len(inspect.signature(body).parameters) == 2
        first = "self, " if is_method else ""
        given = ", ".join(
            f"{name}=len({name})" if name == variadic and entries[name].kind == "refused" else f"{name}={name}"
            for name in names
        )
        source = f"def {body.__name__}({first}{parameters}): return call({first}Arguments({given}))"
        flags = [name for name, entry in entries.items() if entry.kind == "flag"]
        unserved = [(name, entry.words) for name, entry in entries.items() if entry.kind == "refused"]

        def call(*args: Any) -> R:
            values = vars(args[-1])
            for name, advice in unserved:
                if values[name] is not defaults.get(name):
                    refuse(advice, defaults.get(name), **{name: values[name]})
            check_flags(**{name: values[name] for name in flags})
            return body(*args)

        names_seen = {"call": call, "Arguments": Arguments, "torch": torch}
        exec(source, names_seen)  # the text is this package's own
        found = names_seen[body.__name__]
        defaults = {p.name: p.default for p in inspect.signature(found).parameters.values() if p.name != variadic}
        found.__qualname__, found.__module__ = body.__qualname__, body.__module__
        found.__doc__ = with_arguments(inspect.cleandoc(body.__doc__ or ""), entries)
        found.table = entries
        return found

    return decorate


def names_of(parameters: str) -> tuple[list[str], str | None]:
    """Return the names in a parameter list, and which of them takes further positional arguments."""
    args = ast.parse(f"lambda {parameters}: 0", mode="eval").body.args  # type: ignore[attr-defined]
    variadic = [args.vararg.arg] if args.vararg else []
    return [*(x.arg for x in args.args), *variadic, *(x.arg for x in args.kwonlyargs)], args.vararg and args.vararg.arg


def refuse(advice: str, default: object = None, **arguments: object) -> None:
    """Raise if one of these arguments, which are not served, is anything but its default or, as that, nothing."""
    for name, value in arguments.items():
        if value is default or (not default and (value is None or (isinstance(value, bool | int) and not value))):
            continue
        if isinstance(value, int | float | str) and type(value) is type(default) and value == default:
            continue
        raise UnsupportedError(f"{name} must be left out, got {shown(value)}; {advice}")


def with_arguments(text: str, entries: Table) -> str:
    """Return a docstring with a line for each argument, before what it says of results and errors."""
    lines = []
    for entry, group in groupby(entries, key=lambda name: entries[name]):
        words = f"not served; {entry.words}." if entry.kind == "refused" else entry.words
        lines.append(f"    {', '.join(group)}: {words}\n")
    before, at, after = text.partition("\nReturns:\n")
    if not at:
        before, at, after = text.partition("\nRaises:\n")
    return before.rstrip() + "\n\nArgs:\n" + "".join(lines) + at + after
