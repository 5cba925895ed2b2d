"""The plots of a report: a roofline with every case as a point, ratios, and times over what varies.

Panels are one below the other, so that a plot is readable on a phone.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from quire_tools.bench.case import KINDS
from quire_tools.bench.peers import BASELINES, NAIVE
from quire_tools.bench.ratios import BEST, best_other, distributions, ratio_to_best
from quire_tools.bench.report import by_kind, peers_in
from quire_tools.bench.results import QUIRE, RangeRow, Report, Row, is_ours
from quire_tools.bench.roofline import Ceilings

COLOURS = (
    "#d9480f",
    "#1971c2",
    "#2f9e44",
    "#9c36b5",
    "#e8a200",
    "#0c8599",
    "#c2255c",
    "#5c677d",
    "#74b816",
    "#845ef7",
    "#6d3200",
    "#868e96",
    "#1864ab",
    "#087f5b",
    "#f783ac",
)
KIND_COLOURS = dict(zip(KINDS, COLOURS, strict=False))
STYLE: dict[Any, Any] = {"axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}
Dimension = Literal["max_seq_len", "num_seqs"]


def colours_of(peers: Iterable[str]) -> dict[str, str]:
    """Give each library a colour, Quire always the first."""
    others = [name for name in peers if name != QUIRE]
    return {QUIRE: COLOURS[0]} | {name: COLOURS[1 + i % (len(COLOURS) - 1)] for i, name in enumerate(others)}


def panels(
    count: int, height: float = 3.0, height_ratios: Sequence[float] | None = None
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with panels one below the other, and their axes.

    Args:
        count: how many.
        height: of each in inches, on average.
        height_ratios: of the panels to each other; all the same when not given.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, height * count), layout="constrained")
        axes = figure.subplots(count, 1, squeeze=False, height_ratios=height_ratios)
    return figure, axes[:, 0].tolist()


def plot_roofline(report: Report) -> Figure | None:
    """Draw every case as a point under the two ceilings: Quire by kind of batch, and the best other library."""
    ceilings, rows = report.ceilings, report.rows
    if not rows:
        return None
    figure, (axis,) = panels(1, 4.2)
    draw_ceilings(axis, ceilings, min(row.intensity for row in rows) / 2, max(row.intensity for row in rows) * 2)
    is_measured = any(QUIRE in row.times for row in rows)
    for kind, some in by_kind(rows).items():
        others = [(row.intensity, row.flops / best[1] / 1e6) for row in some if (best := best_other(row))]
        ours = [(row.intensity, row.flops / row.times[QUIRE] / 1e6) for row in some if QUIRE in row.times]
        at_best = [(row.intensity, row.flops / row.floor_micros / 1e6) for row in some]
        colour = KIND_COLOURS[kind]
        if others:
            axis.scatter(*zip(*others, strict=True), s=34, facecolors="none", edgecolors=colour, linewidths=0.8)
        axis.scatter(*zip(*(ours or at_best), strict=True), s=16, color=colour, label=kind, zorder=3)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    if is_measured:
        axis.set_title("Roofline: Quire (filled), the best other (rings)")
    else:
        axis.set_title("Roofline: where each case could be at best")
    axis.legend(loc="lower right")
    return figure


def draw_ceilings(axis: Axes, ceilings: Ceilings, low: float, high: float) -> None:
    """Draw the two ceilings from `low` to `high` operations per byte, or beyond the ridge."""
    read, compute, ridge = ceilings.bytes_per_second / 1e12, ceilings.flops_per_second / 1e12, ceilings.ridge
    low, high = min(low, ridge / 2), max(high, 2 * ridge)
    axis.plot([low, ridge, high], [low * read, compute, compute], color="black", lw=1.5)
    middle = math.sqrt(low * ridge)
    label: dict[str, Any] = {"textcoords": "offset points", "ha": "right"}
    axis.annotate(f"{read:.1f} TB/s", (middle, middle * read), xytext=(-6, 4), **label)
    axis.annotate(f"{compute:.0f} TFLOP/s", (high, compute), xytext=(-4, 4), **label)


def draw_lines(
    axis: Axes,
    rows: Iterable[Row],
    x: Callable[[Row], float],
    colours: dict[str, str],
    unit: Callable[[Row], float | None] = lambda row: 1,
) -> None:
    """Draw one line for each library.

    Args:
        axis: where.
        rows: the cases.
        x: where a case is on the x axis.
        colours: of the libraries.
        unit: what a case's times are divided by, 1 µs when not given; cases for which this is None are left out.
    """
    units = {row.case: unit(row) for row in rows}
    rows = sorted((row for row in rows if units[row.case]), key=x)
    for name, colour in colours.items():
        points = [(x(row), row.times[name] / (units[row.case] or 1)) for row in rows if name in row.times]
        if points:
            is_ours = name == QUIRE
            width, zorder = (2.2, 3) if is_ours else (1.1, 2)
            axis.plot(*zip(*points, strict=True), color=colour, marker="o", ms=3.5, lw=width, zorder=zorder, label=name)


def add_legend(figure: Figure) -> None:
    """Put one legend for all panels below them."""
    handles = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, fontsize=7)


def abbreviate(number: float) -> str:
    """Return a number with "k" for 1,024."""
    return f"{number / 1024:g}k" if number >= 1024 and number % 1024 == 0 else f"{number:g}"


class Sweep(NamedTuple):
    """What the cases of one panel share; groups are in this order."""

    kind: str
    model: str
    page_size: int
    dtype: str
    kv_dtype: str
    fixed: float  # the dimension that does not vary


def sweeps(rows: Iterable[Row], x: Dimension, fixed: Dimension) -> dict[Sweep, list[Row]]:
    """Return groups of three and more uniform cases that differ in one dimension only, in its order."""
    groups: dict[Sweep, dict[float, Row]] = defaultdict(dict)
    for row in rows:
        is_swept = row.decode_share == 1 or (row.kind == "prefill" and fixed == "num_seqs")
        if is_swept and row.uniform and row.results:
            key = Sweep(row.kind, row.model, row.page_size, row.dtype, row.kv_dtype, getattr(row, fixed))
            groups[key][getattr(row, x)] = row
    return {key: [some[at] for at in sorted(some)] for key, some in groups.items() if len(some) >= 3}


def plot_sweep(rows: Sequence[Row], x: Dimension, fixed: Dimension, label: str) -> Figure | None:
    """Draw time over length or batch size, a panel for each value of the other.

    Below each panel is one of the same times over Quire's, which shows differences that are too small for the first.
    """
    groups = sorted(sweeps(rows, x, fixed).items(), key=lambda group: (group[0].kind, group[0].fixed))
    if not groups:
        return None
    figure, axes = panels(2 * len(groups), 2.3, height_ratios=[2, 1] * len(groups))
    colours = colours_of(peers_in(rows))

    def at(row: Row) -> float:
        return getattr(row, x)

    for axis, strip, (key, some) in zip(axes[::2], axes[1::2], groups, strict=True):
        for each in (axis, strip):
            each.set(xscale="log", yscale="log")
            each.set_xticks([at(row) for row in some], [abbreviate(at(row)) for row in some])
            each.minorticks_off()
        held = f"{key.fixed:,.0f} keys each"
        if fixed == "num_seqs":
            held = f"{key.fixed:,.0f} sequence{'s' * (key.fixed != 1)}"
        dtype = "" if key.kv_dtype == key.dtype else f", {key.kv_dtype}"
        axis.set(ylabel="µs", title=f"{key.kind}, {held} ({key.model}{dtype})")
        floors = [row.floor_micros for row in some]
        axis.plot([at(row) for row in some], floors, color="black", ls=":", lw=1.2, label="floor")
        draw_lines(axis, some, at, colours)
        draw_lines(strip, some, at, colours, unit=lambda row: row.times.get(QUIRE))
        strip.set(xlabel=label, ylabel="over Quire's", ylim=(0.7, 3))
        strip.set_yticks([0.7, 1, 1.5, 2, 3], ["0.7", "1", "1.5", "2", "3"])
    add_legend(figure)
    return figure


def plot_shares(rows: Sequence[Row]) -> Figure | None:
    """Draw time over the floor against the share of sequences that decode, which is what libraries differ by most.

    The naive kernel is left out: it would double the height of the axis.
    """
    by_shape: dict[tuple[int, bool], list[Row]] = defaultdict(list)
    for row in rows:
        if "share" in row.sets and row.results:
            by_shape[row.num_seqs, "log-normal" in row.case].append(row)
    groups = [(shape, some) for shape, some in sorted(by_shape.items()) if len(some) >= 2]
    if not groups:
        return None
    figure, axes = panels(len(groups))
    colours = {name: colour for name, colour in colours_of(peers_in(rows)).items() if name != NAIVE}
    for axis, ((num_seqs, is_unequal), some) in zip(axes, groups, strict=True):
        draw_lines(axis, some, lambda row: row.decode_share, colours, unit=lambda row: row.floor_micros)
        axis.set(xlabel="share of sequences that decode", ylabel="time over the floor", yscale="log")
        axis.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
        label_log_axis(axis.yaxis, (2, 3, 5))
        axis.set_title(f"{num_seqs} sequences, {'log-normal' if is_unequal else 'equal'} lengths")
    add_legend(figure)
    return figure


def label_log_axis(axis: XAxis | YAxis, multiples: Sequence[float]) -> None:
    """Label a logarithmic axis with plain numbers, at the powers of ten and at these multiples of them."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(LogLocator(subs=multiples))
    axis.set_minor_formatter("{x:g}")


def plot_ratios(rows: Sequence[Row]) -> Figure | None:
    """Draw Quire's time over each other library's, case by case."""
    ratios = {row.case: ratio for row in rows if (ratio := ratio_to_best(row)) is not None}
    rows = sorted((row for row in rows if row.case in ratios), key=lambda row: ratios[row.case], reverse=True)
    if not rows:
        return None
    figure, (axis,) = panels(1, max(2.5, 0.17 * len(rows) + 1.2))
    for name, colour in colours_of(peers_in(rows)).items():
        if is_ours(name) or name in BASELINES:
            continue
        points = [(row.times[QUIRE] / row.times[name], i) for i, row in enumerate(rows) if name in row.times]
        if points:
            axis.scatter(*zip(*points, strict=True), s=14, color=colour, label=name, zorder=3)
    axis.axvline(1, color="black", lw=1)
    axis.set(xscale="log", xlabel="Quire's time over theirs", ylim=(-1, len(rows)))
    axis.set_yticks(range(len(rows)), [row.case for row in rows], fontsize=7)
    label_log_axis(axis.xaxis, (2, 5))
    add_legend(figure)
    return figure


def plot_distribution(report: Report) -> Figure | None:
    """Draw for each other library the share of the cases on which Quire's time over theirs is at most a ratio."""
    found = [d for d in distributions(report.rows) if not is_ours(d.name) and d.name not in BASELINES]
    if report.grid is None or not found:
        return None
    figure, (axis,) = panels(1, 3.6)
    colours = {BEST: "black"} | colours_of(peers_in(report.rows))
    for each in found:
        shares = [(i + 1) / len(each.ratios) for i in range(len(each.ratios))]
        width = 2.2 if each.name == BEST else 1.1
        axis.step(each.ratios, shares, where="post", color=colours[each.name], lw=width, label=each.name)
    axis.axvline(1, color="black", lw=1)
    axis.set(xscale="log", xlabel="Quire's time over theirs", ylabel="share of the cases", ylim=(0, 1))
    label_log_axis(axis.xaxis, (2, 5))
    add_legend(figure)
    return figure


def plot_range(rows: Sequence[RangeRow]) -> Figure | None:
    """Draw the loss of a graph captured for a range of lengths, at each length."""
    if not rows:
        return None
    figure, (axis,) = panels(1)
    groups: dict[tuple[int, int], list[RangeRow]] = defaultdict(list)
    for row in rows:
        groups[row.num_seqs, row.captured_for].append(row)
    for (num_seqs, bound), some in groups.items():
        label = f"{num_seqs} × up to {bound:,}"
        axis.plot([row.seq_len for row in some], [row.ratio for row in some], marker="o", ms=3.5, label=label)
    axis.axhline(1, color="black", lw=1)
    axis.set(xscale="log", xlabel="keys of each sequence at replay", ylabel="over a graph for these keys")
    lengths = sorted({row.seq_len for row in rows})
    axis.set_xticks(lengths, [abbreviate(length) for length in lengths])
    axis.minorticks_off()
    axis.set_title("Graphs captured for a range of lengths")
    add_legend(figure)
    return figure


def plots(report: Report) -> dict[str, Figure]:
    """Return the figures that the cases allow, by file name."""
    rows = report.rows
    figures = {
        "roofline": plot_roofline(report),
        "distribution": plot_distribution(report),
        "ratios": plot_ratios(rows),
        "shares": plot_shares(rows),
        "length": plot_sweep(rows, "max_seq_len", "num_seqs", "keys of each sequence"),
        "batch": plot_sweep(rows, "num_seqs", "max_seq_len", "sequences"),
        "graph_range": plot_range(report.graph_range),
    }
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    if report.provenance.code is not None:
        for figure in drawn.values():
            figure.suptitle(report.provenance.title)
    return drawn
