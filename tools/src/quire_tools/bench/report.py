"""Evaluate the results of a run: ratios, tables, Markdown, and what changed between two runs."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from quire.targets import TARGETS, Compiled
from quire_tools.bench.case import KINDS, Kind
from quire_tools.bench.ratios import BEST, distribution_table, ratio_to_best, worst_rows
from quire_tools.bench.results import QUIRE, Grid, RangeRow, Report, Result, Row
from quire_tools.bench.tables import Column, Table, Value, to_markdown


def peers_in(rows: Sequence[Row]) -> list[str]:
    """Return the libraries that have a time on some case, in the order of the results."""
    timed = {name for row in rows for name in row.times}
    return list(dict.fromkeys(name for row in rows for name in row.results if name in timed))


def by_kind(rows: Iterable[Row]) -> dict[Kind, list[Row]]:
    """Return the rows of each kind of batch that there is."""
    groups: dict[Kind, list[Row]] = {kind: [] for kind in KINDS}
    for row in rows:
        groups[row.kind].append(row)
    return {kind: some for kind, some in groups.items() if some}


def reasons_in(rows: Iterable[Row]) -> dict[str, Counter[str]]:
    """Return for each library the reasons why cases have no time, and how often."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        for name, why in row.reasons.items():
            found[name][why] += 1
    return found


def reasons_table(rows: Iterable[Row]) -> Table[tuple[str, str, int]]:
    """Return for each library why cases have no time, and in how many cases."""
    lines = [(name, why, count) for name, counts in reasons_in(rows).items() for why, count in counts.items()]
    heads = "library", "why it has no time", "cases"
    return Table([Column(head, lambda line, i=i: line[i]) for i, head in enumerate(heads)], lines)


@dataclass(frozen=True)
class Mean:
    """The geometric mean of Quire's time over another's.

    Attributes:
        ratio: the mean.
        num_cases: how many cases both serve.
    """

    ratio: float
    num_cases: int


def geometric_means(rows: Iterable[Row]) -> dict[str, Mean]:
    """Return the mean of Quire's time over that of every other library, and over the best other's of each case."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if QUIRE not in row.times:
            continue
        best = ratio_to_best(row)
        if best is not None:
            ratios[BEST].append(best)
        for name, micros in row.times.items():
            if name != QUIRE:
                ratios[name].append(row.times[QUIRE] / micros)
    return {name: Mean(statistics.geometric_mean(values), len(values)) for name, values in ratios.items()}


# Tables

NEED: tuple[Column[Row], ...] = (
    Column("case", lambda row: row.case),
    Column("MB", lambda row: row.nbytes / 1e6, ".1f"),
    Column("GFLOP", lambda row: row.flops / 1e9, ".1f"),
    Column("flop/B", lambda row: row.intensity, ".0f"),
    Column("bound", lambda row: row.bound),
)
FLOOR: Column[Row] = Column("floor µs", lambda row: row.floor_micros, ".1f", is_essential=True)


def needs_table(rows: Sequence[Row]) -> Table[Row]:
    """Return what each case needs, and its floor, where nothing was measured or compiled."""
    return Table((*NEED, FLOOR), rows)


def times_table(rows: Sequence[Row]) -> Table[Row]:
    """Return Quire's time over the best other's, the floor, and the time of every library in µs."""
    columns: list[Column[Row]] = [
        Column("case", lambda row: row.case),
        Column("Quire / best other", ratio_to_best, ".2f", is_essential=True),
        Column("floor", lambda row: row.floor_micros, ".1f", is_essential=True),
    ]
    columns += [time_column(name) for name in peers_in(rows)]
    return Table(columns, rows)


def time_column(name: str) -> Column[Row]:
    """Return the column of a library's times."""
    return Column(name, lambda row: row.times.get(name), ".1f", is_essential=name == QUIRE, is_contest=True)


def worst_table(rows: Sequence[Row]) -> Table[Row]:
    """Return the times of the cases where Quire loses most."""
    return times_table(worst_rows(rows))


def detail_table(rows: Sequence[Row]) -> Table[Row]:
    """Return what each case needs, and what Quire reaches."""

    def column(head: str, value: Callable[[Result], Value], spec: str, is_essential: bool = False) -> Column[Row]:
        def read(row: Row) -> Value:
            return value(row.timed[QUIRE]) if QUIRE in row.timed else None

        return Column(head, read, spec, is_essential)

    reached = (
        column("µs", lambda r: r.micros, ".1f", is_essential=True),
        column("±", lambda r: (r.high - r.low) / 2 / r.micros, ".1%"),
        column("TB/s", lambda r: r.bytes_per_second / 1e12, ".2f"),
        column("TFLOP/s", lambda r: r.flops_per_second / 1e12, ".0f"),
        column("of ceiling", lambda r: r.of_floor, ".0%", is_essential=True),
        column("host µs", lambda r: r.host_micros, ".0f"),
        column("plan µs", lambda r: r.plan_micros, ".0f"),
        column("scratch MB", lambda r: r.scratch_bytes / 1e6, ".1f"),
        column("error", lambda r: r.error, ".1e"),
        column("of budget", lambda r: r.of_budget, ".0%"),
    )
    return Table((*NEED, *reached), rows)


@dataclass(frozen=True)
class KernelLine:
    """A line of the table of compiled kernels.

    Attributes:
        row: the case; None in the lines after its first.
        kernel: one of its kernels; None where it has none.
        why: why it has none.
    """

    row: Row | None
    kernel: Compiled | None
    why: str = ""

    def name(self) -> str:
        """Return the kernel's name, or why there is none."""
        return self.kernel.kernel if self.kernel else self.why


def compiled_table(rows: Sequence[Row]) -> Table[KernelLine]:
    """Return what each case needs, and what its kernels compiled to."""
    lines = []
    for row in rows:
        kernels = row.compiled or []
        if not kernels:
            lines.append(KernelLine(row, None, row.why or "not compiled"))
        lines += [KernelLine(row if kernel is kernels[0] else None, kernel) for kernel in kernels]

    def of_case(column: Column[Row]) -> Column[KernelLine]:
        return Column(
            column.head, lambda line: column.value(line.row) if line.row else "", column.spec, column.is_essential
        )

    def of_kernel(head: str, value: Callable[[Compiled], Value], is_essential: bool = False) -> Column[KernelLine]:
        return Column(head, lambda line: value(line.kernel) if line.kernel else "", is_essential=is_essential)

    columns = (
        *(of_case(column) for column in NEED),
        of_case(FLOOR),
        Column("kernel", KernelLine.name),
        of_kernel("registers", lambda kernel: kernel.registers, is_essential=True),
        of_kernel("spilled B", lambda kernel: kernel.spills, is_essential=True),
        of_kernel("shared B", lambda kernel: kernel.shared),
        of_kernel("occupancy", lambda kernel: kernel.occupancy, is_essential=True),
        of_kernel("config", lambda kernel: kernel.config),
    )
    return Table(columns, lines)


def range_table(rows: Sequence[RangeRow]) -> Table[RangeRow]:
    """Return the times of graphs captured for a range of lengths and replayed at one."""
    columns: tuple[Column[RangeRow], ...] = (
        Column("sequences", lambda row: row.num_seqs),
        Column("captured for", lambda row: row.captured_for, ","),
        Column("keys", lambda row: row.seq_len, ","),
        Column("µs", lambda row: row.micros, ".1f", is_essential=True),
        Column("captured for these keys, µs", lambda row: row.own_micros, ".1f"),
        Column("ratio", lambda row: row.ratio, ".3f", is_essential=True),
    )
    return Table(columns, rows)


@dataclass(frozen=True)
class KindMeans:
    """The means over the cases of one kind, or over all."""

    kind: str
    means: dict[str, Mean]


def summary_table(rows: Sequence[Row]) -> Table[KindMeans]:
    """Return the means of Quire's time over that of every other library, by kind of batch, and over how many cases."""
    groups = {"all": rows, **by_kind(rows)}
    lines = [KindMeans(kind, means) for kind, some in groups.items() if (means := geometric_means(some))]

    def column(name: str) -> Column[KindMeans]:
        def read(line: KindMeans) -> Value:
            mean = line.means.get(name)
            return f"{mean.ratio:.2f} ({mean.num_cases})" if mean else None

        return Column(name, read, is_essential=name == BEST)

    names = [BEST, *(name for name in peers_in(rows) if name != QUIRE)]
    return Table((Column("Quire's time over", lambda line: line.kind), *map(column, names)), lines)


def describe_ranges(rows: Sequence[RangeRow]) -> str:
    """Return what graphs captured for a range of lengths lose, in a sentence."""
    ratios = [row.ratio for row in rows]
    return (
        f"Graphs captured for a range of lengths take {statistics.geometric_mean(ratios):.3f} of the time of graphs "
        f"for each length in geometric mean, {max(ratios):.2f} at worst."
    )


def describe_grid(grid: Grid) -> str:
    """Return which cases were drawn, as a heading."""
    of_space = {"latents": "over latents ", "models": "of models "}.get(grid.space, "")
    return f"{grid.count} cases {of_space}drawn at random, seed {grid.seed}"


def describe_run(report: Report) -> str:
    """Return where the numbers come from: device, versions, date and ceilings."""
    ceilings, run = report.ceilings, report.provenance
    facts = [f"{name} {value}" for name, value in asdict(run).items() if value and name not in ("device", "code")]
    words = (
        f"{', '.join([run.title, *facts])}. "
        f"Ceilings ({ceilings.source}): {ceilings.bytes_per_second / 1e12:.2f} TB/s, "
        f"{ceilings.flops_per_second / 1e12:.0f} TFLOP/s in bf16."
    )
    return words if run.code is None else f"{words} {describe_code(run.code)}"


def describe_code(card: str) -> str:
    """Return what it means that an older card's code ran on a device."""
    shared_kib = TARGETS[card].shared_memory // 1024
    return (
        f"Triton lowered Quire's kernels, and those of other libraries in Triton, as for {card}; ptxas assembled them "
        f"for this device. Quire's plans had {card}'s features and {shared_kib} KB of shared memory; other libraries "
        f"were not held to that. The ceilings are those of this device. No time is one of an {card} card."
    )


def titled(report: Report, words: str) -> str:
    """Return a heading, and whose code ran where that was not the device's own."""
    return words if report.provenance.code is None else f"{words}: {report.provenance.title}"


def was_compiled(report: Report) -> bool:
    """Return whether kernels were compiled instead of measured."""
    return any(row.compiled is not None for row in report.rows)


def markdown(report: Report) -> str:
    """Return the tables as Markdown."""
    rows = report.rows
    parts = [f"# {titled(report, '`quire bench`')}\n\n{describe_run(report)}"]
    if was_compiled(report):
        parts.append(to_markdown(compiled_table(rows)))
        return "\n\n".join(parts) + "\n"
    if peers_in(rows):
        parts.append(f"Geometric means, over how many cases:\n\n{to_markdown(summary_table(rows))}")
        tables: dict[str, Table[Any]] = {}
        if report.grid is not None:
            tables[describe_grid(report.grid)] = distribution_table(rows)
            tables["The worst of them, µs"] = worst_table(rows)
        tables |= {f"{kind}, µs": times_table(some) for kind, some in by_kind(rows).items()}
        tables["Quire in detail"] = detail_table(rows)
        parts += [f"## {titled(report, words)}\n\n{to_markdown(table)}" for words, table in tables.items()]
    elif rows:
        parts.append(f"## {titled(report, 'What each case needs')}\n\n{to_markdown(needs_table(rows))}")
    if report.graph_range:
        heading = titled(report, "Graphs captured for a range of lengths")
        parts.append(f"## {heading}\n\n{describe_ranges(report.graph_range)}")
        parts.append(to_markdown(range_table(report.graph_range)))
    if report.peers:
        parts.append("## Libraries\n\n" + "\n".join(f"* {name}: {state}" for name, state in report.peers.items()))
    if any(row.reasons for row in rows):
        parts.append(f"## {titled(report, 'Not served')}\n\n{to_markdown(reasons_table(rows))}")
    return "\n\n".join(parts) + "\n"


# Two runs

MIN_NOISE = 0.01  # of a median: how much clocks and placement move it between two runs of the same code
Verdict = Literal["slower", "faster", "same", "lost"]


@dataclass(frozen=True)
class Change:
    """How a library's time on a case changed between two runs.

    Attributes:
        case: name of the case.
        peer: name of the library.
        before: median of the first run in µs.
        after: median of the second run in µs; None where it has no time there.
        noise: how far the medians of two runs of the same code may differ, in µs.
    """

    case: str
    peer: str
    before: float
    after: float | None
    noise: float

    @property
    def ratio(self) -> float | None:
        """The time after over the time before."""
        return None if self.after is None else self.after / self.before

    @property
    def verdict(self) -> Verdict:
        """The direction of a change that is larger than the noise, else "same"; "lost" if a time is missing now."""
        if self.after is None:
            return "lost"
        if abs(self.after - self.before) <= self.noise:
            return "same"
        return "slower" if self.after > self.before else "faster"


def noise(result: Result) -> float:
    """Return by how many µs the median of another run may differ.

    That is half the range that holds four fifths of the replays, and at least 1 % of the median.
    """
    return max((result.high - result.low) / 2, MIN_NOISE * result.micros)


def changes(before: Report, after: Report) -> list[Change]:
    """Return the changes of every case and library that has a time in the first run and is in both."""
    old = {row.case: row.timed for row in before.rows}
    found = []
    for row in after.rows:
        for peer in row.results:
            a, b = old.get(row.case, {}).get(peer), row.timed.get(peer)
            if a and b:
                found.append(Change(row.case, peer, a.micros, b.micros, noise(a) + noise(b)))
            elif a:
                found.append(Change(row.case, peer, a.micros, None, noise(a)))
    return found


def changes_table(found: Iterable[Change]) -> Table[Change]:
    """Return the changes that are larger than the noise, the worst first."""

    def badness(change: Change) -> float:
        return float("inf") if change.ratio is None else change.ratio

    columns: tuple[Column[Change], ...] = (
        Column("case", lambda change: change.case),
        Column("library", lambda change: change.peer, is_essential=True),
        Column("before µs", lambda change: change.before, ".1f"),
        Column("after µs", lambda change: change.after, ".1f"),
        Column("ratio", lambda change: change.ratio, ".3f", is_essential=True),
        Column("±", lambda change: change.noise / change.before, ".1%"),
        Column("", lambda change: change.verdict, is_essential=True),
    )
    return Table(columns, sorted((c for c in found if c.verdict != "same"), key=badness, reverse=True))
