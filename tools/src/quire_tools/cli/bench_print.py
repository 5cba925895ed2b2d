"""What `quire bench` prints: cases, results, and what changed between two runs."""

import statistics
from collections import Counter
from collections.abc import Iterable

from rich.console import Console

from quire.cli.arguments import CommandError
from quire_tools.bench import guard as floors
from quire_tools.bench import report as tables
from quire_tools.bench.case import Case
from quire_tools.bench.guard import Guard
from quire_tools.bench.ratios import distribution_table
from quire_tools.bench.results import Report, Row, is_ours
from quire_tools.bench.tables import to_rich


def print_cases(cases: Iterable[Case], console: Console) -> None:
    """Print what each case is and needs."""
    for case in cases:
        spec = case.spec
        heads = f"{spec.num_q_heads}/{spec.num_kv_heads}/{spec.head_dim}"
        shape = f"{len(case.lens)} sequences, {case.num_tokens} queries, {heads}"
        needs = f"{case.nbytes / 1e6:.1f} MB, {case.flops / 1e9:.1f} GFLOP"
        console.print(f"{case.name:44} {shape}, {needs}", highlight=False, markup=False, soft_wrap=True)


def print_row(row: Row, console: Console) -> None:
    """Print a case as one line: the time of each library, and a dash where it has none."""
    times = "  ".join(f"{name} {row.times[name]:.1f}" if name in row.times else f"{name} –" for name in row.results)
    console.print(f"{row.case:34} floor {row.floor_micros:.1f}  {times}", highlight=False, markup=False, soft_wrap=True)


def print_report(report: Report, console: Console) -> None:
    """Print the tables of a report, and where its numbers come from."""
    rows = report.rows
    if tables.was_compiled(report):
        title = f"{report.provenance.title}, from its data sheet and compiled kernels"
        console.print(to_rich(tables.compiled_table(rows), title, console))
    elif report.grid is not None and tables.peers_in(rows):
        print_distribution(report, console)
    elif tables.peers_in(rows):
        console.print(to_rich(tables.times_table(rows), tables.titled(report, "µs"), console))
        console.print(to_rich(tables.detail_table(rows), tables.titled(report, "Quire in detail"), console))
    elif rows:
        console.print(to_rich(tables.needs_table(rows), f"{report.provenance.title}, from its data sheet", console))
    if report.graph_range:
        table = tables.range_table(report.graph_range)
        title = tables.titled(report, "graphs captured for a range of lengths")
        console.print(to_rich(table, title, console))
        console.print(tables.describe_ranges(report.graph_range), highlight=False)
    summary = tables.summary_table(rows)
    if summary.rows:
        title = tables.titled(report, "geometric means, over how many cases")
        console.print(to_rich(summary, title, console))
    console.print(tables.describe_run(report), highlight=False, markup=False, style="dim")


def print_distribution(report: Report, console: Console) -> None:
    """Print how the ratios of a grid are distributed, and its worst cases."""
    title = tables.titled(report, "Quire's time over theirs")
    console.print(to_rich(distribution_table(report.rows), title, console))
    worst = tables.worst_table(report.rows)
    if worst.rows:
        console.print(to_rich(worst, tables.titled(report, "the worst cases, µs"), console))


def print_changes(before: Report, after: Report, console: Console) -> int:
    """Print what changed between two runs by more than their noise.

    Returns:
        The exit code: 1 if a case of Quire's became slower or has no result any more.
    """
    if before.provenance.code != after.provenance.code:
        raise CommandError(
            "BEFORE and AFTER must have run the code of one card, got "
            f"{before.provenance.title} and {after.provenance.title}; measure both with the same --as"
        )
    changes = tables.changes(before, after)
    ours = [change for change in changes if is_ours(change.peer)]
    if not ours:
        raise CommandError("BEFORE and AFTER must share cases that Quire was timed on, got none; run the same sets")
    for name in ("device", "driver", "torch", "triton"):
        a, b = getattr(before.provenance, name), getattr(after.provenance, name)
        if a != b:
            console.print(f"the runs differ in {name}: {a} and {b}", style="bold", markup=False)
    table = tables.changes_table(ours)
    if table.rows:
        console.print(to_rich(table, "changes", console))
    counts = Counter(change.verdict for change in ours)
    words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("slower", "lost", "faster", "same"))
    console.print(f"{words} (by more than the noise of both runs)")
    others = [change.ratio for change in changes if change.ratio is not None and not is_ours(change.peer)]
    if others:
        mean = statistics.geometric_mean(others)
        words = f"other libraries on the same cases: {mean:.3f} of their time before, which is what the machine changed"
        console.print(words, highlight=False)
    return 1 if counts["slower"] or counts["lost"] else 0


def print_guard(guard: Guard, report: Report, console: Console) -> int:
    """Print which cases of a run do not hold their floor.

    Returns:
        The exit code: 1 if one does not.
    """
    found = floors.compare(guard, report.rows)
    if not found:
        raise CommandError(
            "FLOORS must share a case and a library with the run, got none; install a library that has floors: "
            f"{', '.join(guard.peers)}"
        )
    for name, version in guard.peers.items():
        here = report.peers.get(name, "not asked for")
        if here != version:
            words = f"{name} is {version} in the floors, and here {here}"
            console.print(words, style="dim", highlight=False, markup=False, soft_wrap=True)
    table = floors.fallen_table(found)
    if table.rows:
        console.print(to_rich(table, "below their floors", console))
    unheld = len(report.rows) - len(found)
    held = len(found) - len(table.rows)
    words = f"{held} of {len(found)} cases hold their floor, the ratio to the best other library in the same run"
    if unheld:
        words += f"; cases without a floor against a library of this run: {unheld}"
    console.print(words, style="" if not table.rows else "bold", highlight=False, soft_wrap=True)
    return 1 if table.rows else 0
