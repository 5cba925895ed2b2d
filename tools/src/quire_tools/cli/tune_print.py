"""What `quire tune` prints and writes: a tree as text, and its times compared with the default's and the best."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from quire_tools.tuning.judge import Comparison, summarize


def describe(rows: Sequence[Comparison]) -> list[str]:
    """Return a tree's regret, as one sentence for each set of cases."""
    return [
        f"{name.replace('_', ' ')}: regret {some['mean']:.3f} in geometric mean, {some['worst']:.2f} at worst; "
        f"{some['over_default']:.3f} of the time of the default, whose regret is {some['default_mean']:.3f}"
        for name, some in summarize(rows).items()
    ]


def times_of(row: Comparison) -> list[str]:
    """Return the times of the default, of the tree's choice and of the best as text; a dash where there is none."""
    return [f"{micros:.1f}" if micros else "–" for micros in (row["default"], row["tuned"], row["best"])]


def to_markdown(rows: Sequence[Comparison], provenance: dict[str, Any]) -> str:
    """Return the times case by case, as a Markdown table."""
    facts = ", ".join(f"{name} {value}" for name, value in provenance.items() if not isinstance(value, dict))
    lines = [f"# `quire tune` on {provenance['device']}", "", f"{facts}; µs.", ""]
    lines += ["| case | held out | choice | default | tuned | best | regret |", "| --- |" + " --- |" * 6]
    for row in rows:
        cells = [row["case"], "yes" if row["held_out"] else "", row["config"], *times_of(row), f"{row['regret']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *describe(rows)]) + "\n"


def print_rows(rows: Sequence[Comparison], console: Console) -> None:
    """Print the times case by case, and the tree's regret."""
    is_wide = console.width >= 120
    heads = ["default µs", "tuned µs", "best µs", "regret"]
    table = Table(header_style="bold")
    table.add_column("case", overflow="fold")
    for head in ["configuration", *heads, "tuned / default"] if is_wide else heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row["held_out"]):
        cells = [*times_of(row), f"{row['regret']:.3f}"]
        if is_wide:
            ratio = f"{row['tuned'] / row['default']:.3f}" if row["default"] else "–"
            cells = [row["config"], *cells, ratio]
        table.add_row(f"held out: {row['case']}" if row["held_out"] else row["case"], *cells)
    console.print(table)
    for line in describe(rows):
        console.print(line, highlight=False)
