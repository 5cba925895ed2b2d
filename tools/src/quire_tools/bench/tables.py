"""Tables: columns that read typed rows, and one renderer each for the terminal, Markdown and HTML.

A table is columns and rows. A column has a head and a function from a row to the value of a cell.
`to_rich` renders it for the terminal, `to_markdown` as Markdown, the macro `show` of `templates/report.html` as HTML.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    import rich.console
    import rich.table

R = TypeVar("R")
Value = float | str | None


class Cell(NamedTuple):
    """A cell: its text, and whether it is the best of its line."""

    text: str
    is_best: bool


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column.

    Attributes:
        head: its title.
        value: reads the cell of a row: a number, text, or None where there is nothing.
        spec: format specification of the numbers.
        is_essential: a narrow terminal shows it too.
        is_contest: the smallest number of a line's contest columns is the best.
    """

    head: str
    value: Callable[[R], Value]
    spec: str = ""
    is_essential: bool = False
    is_contest: bool = False

    def text(self, row: R) -> str:
        """Return the cell of a row as text."""
        value = self.value(row)
        if value is None:
            return "–"
        return value if isinstance(value, str) else format(value, self.spec)


@dataclass(frozen=True)
class Table(Generic[R]):
    """A table; the first column names the rows."""

    columns: Sequence[Column[R]]
    rows: Sequence[R]

    @property
    def heads(self) -> list[str]:
        """The titles of the columns."""
        return [column.head for column in self.columns]

    @property
    def lines(self) -> list[list[Cell]]:
        """The cells, line by line."""
        return [self._line(row) for row in self.rows]

    def _line(self, row: R) -> list[Cell]:
        numbers = {}
        for column in self.columns:
            value = column.value(row) if column.is_contest else None
            if isinstance(value, int | float):
                numbers[value] = column.text(row)
        best = numbers[min(numbers)] if numbers else None
        texts = [column.text(row) for column in self.columns]
        return [
            Cell(text, column.is_contest and text == best) for column, text in zip(self.columns, texts, strict=True)
        ]


def to_markdown(table: Table[R]) -> str:
    """Return a table as Markdown."""
    lines = [[cell.text.replace("<", "&lt;").replace("|", "\\|") for cell in line] for line in table.lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in [table.heads, ["---"] * len(table.heads), *lines])


def to_rich(table: Table[R], title: str, console: "rich.console.Console") -> "rich.table.Table":
    """Return a table for the terminal.

    If the terminal is too narrow, columns that are not essential are left out, the last ones first.
    If it is too narrow even so, the first column is wrapped.
    """
    from rich.table import Table as RichTable

    lines = [[cell.text for cell in line] for line in table.lines]
    widths = [
        max(len(text) for text in ("", *column.head.split(), *(line[i] for line in lines)))
        for i, column in enumerate(table.columns)
    ]

    def is_too_wide() -> bool:
        return 1 + sum(3 + widths[i] for i in shown) > console.width

    shown = list(range(len(widths)))
    optional = [i for i in shown[1:] if not table.columns[i].is_essential]
    while optional and is_too_wide():
        shown.remove(optional.pop())
    rest = [column.head for i, column in enumerate(table.columns) if i not in shown]
    caption = f"in the report: {', '.join(rest)}" if rest else None
    made = RichTable(title=title, title_justify="left", header_style="bold", caption=caption, caption_justify="left")
    for i in shown:
        width = widths[i] if i or not is_too_wide() else None
        made.add_column(table.columns[i].head, justify="right" if i else "left", width=width)
    for line in lines:
        made.add_row(*(line[i] for i in shown))
    return made
