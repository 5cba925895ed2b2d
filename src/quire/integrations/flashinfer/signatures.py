"""Functions with FlashInfer's parameter lists. A table says of each name whether it is served, and in which words.

A function is written with one parameter, its arguments by name. `Table.accepts` gives it FlashInfer's parameters: their
order and defaults, the check of those that are not served, and their lines of the docstring.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from quire import UnsupportedError
from quire.integrations.arguments import check_flags, is_among, shown

R = TypeVar("R")
RAISES = """
Raises:
    UnsupportedError: an argument that is not served, or a head dim, a dtype, a device or a gradient that is not.
    TypeError: an argument is of another type.
    ValueError: an argument breaks its contract, or does not fit the others or what was planned; nothing was written.
"""


class Arguments(SimpleNamespace):
    """The arguments of a call, by FlashInfer's names."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Argument:
    """What is done with an argument."""

    words: str  # its line in the docstring; of one that is refused, the advice of the error
    kind: str = "served"  # or "flag", a bool that is checked, or "refused"
    choices: tuple[str, ...] = ()  # of one that is served, the only values if there are any

    def check(self, name: str, value: Any, default: Any) -> None:
        """Raise unless a value is accepted."""
        if self.kind == "flag":
            check_flags(**{name: value})
        elif self.kind == "refused" and not is_left_out(value, default):
            raise UnsupportedError(f"{name} must be left out, got {shown(value)}; {self.words}")
        elif self.choices and not is_among(value, self.choices):
            few = len(self.choices) == 2
            wanted = " or ".join(map(repr, self.choices)) if few else f"one of {', '.join(self.choices)}"
            raise ValueError(f"{name} must be {wanted}, got {shown(value)}; {self.choices[0]!r} is usual")


class Table(dict[str, Argument]):
    """What is done with arguments, by name. The text has a line "name, name (kind): words" for each, or several.

    What a table is based on holds too; names that a function does not have do no harm.
    """

    def __init__(self, text: str, base: "Table | None" = None) -> None:
        super().__init__(base or {})
        for line in re.sub(r"\n +", " ", text).strip().splitlines():
            if not line.startswith("#"):
                found = re.fullmatch(r"([\w, ]+?)(?: \((.*?)\))?: (.*)", line)
                assert found, line
                names, kind, words = found.groups()
                if kind in (None, "flag", "refused"):
                    argument = Argument(words, kind or "served")
                else:
                    argument = Argument(words, choices=tuple(kind.split(", ")))
                self.update(dict.fromkeys(names.split(", "), argument))

    def accepts(self, parameters: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
        """Give a function, or a method, FlashInfer's parameters: its list of them, with defaults."""
        blank = eval(f"lambda {parameters}: None", {"torch": torch})  # the text is this package's own
        listed = inspect.signature(blank).parameters.values()
        entries = {p.name: self[p.name] for p in listed}
        counted = [p.name for p in listed if p.kind is p.VAR_POSITIONAL and entries[p.name].kind == "refused"]
        checked = [
            (p.name, entries[p.name], 0 if p.name in counted else p.default)
            for p in sorted(listed, key=lambda p: entries[p.name].kind != "refused")  # these first
            if entries[p.name].kind != "served" or entries[p.name].choices
        ]
        given = ", ".join(f"{name}=len({name})" if name in counted else f"{name}={name}" for name in entries)

        def decorate(body: Callable[..., R]) -> Callable[..., R]:
            def call(*args: Any) -> R:
                values = vars(args[-1])
                for name, argument, default in checked:
                    argument.check(name, values[name], default)
                return body(*args)

            first = "self, " if len(inspect.signature(body).parameters) == 2 else ""
            names_seen = {"call": call, "Arguments": Arguments, "torch": torch}
            exec(f"def {body.__name__}({first}{parameters}): return call({first}Arguments({given}))", names_seen)
            found = names_seen[body.__name__]
            found.__defaults__, found.__kwdefaults__ = blank.__defaults__, blank.__kwdefaults__  # the same objects
            found.__qualname__, found.__module__ = body.__qualname__, body.__module__
            found.__doc__ = with_arguments(inspect.cleandoc(body.__doc__ or ""), entries)
            found.table = entries
            return found

        return decorate


def is_left_out(value: object, default: object) -> bool:
    """Return whether a value says no more than its default: it is equal, or each of them stands for nothing."""
    if value is default:
        return True
    if isinstance(value, int | float | str) and type(value) is type(default):
        return value == default
    return not default and (value is None or (isinstance(value, bool | int) and not value))


def with_arguments(text: str, entries: dict[str, Argument]) -> str:
    """Return a docstring with a line for each argument before what it says of results, and one for each error."""
    lines = []
    for entry, group in groupby(entries, key=lambda name: entries[name]):
        words = f"not served; {entry.words}." if entry.kind == "refused" else entry.words
        lines.append(f"    {', '.join(group)}: {words}\n")
    before, returns, after = text.partition("\nReturns:\n")
    return f"{before.rstrip()}\n\nArgs:\n{''.join(lines)}{returns}{after}".rstrip() + f"\n{RAISES}"
