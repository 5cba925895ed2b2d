"""The bench's plots: a roofline with every case as a point, and times against what varies, one panel under another as a phone shows them."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

from quire.bench.cases import KINDS
from quire.bench.peers import BASELINES, NAIVE
from quire.bench.report import QUIRE, Row, best_other, by_kind, peers_in, times_of

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
    "#868e96",
)
KIND_COLOURS = dict(zip(KINDS, COLOURS, strict=False))


def colours(peers: Iterable[str]) -> dict[str, str]:
    """Give each peer a colour: Quire always the first."""
    others = [p for p in peers if p != QUIRE]
    return {QUIRE: COLOURS[0]} | {p: COLOURS[1 + i % (len(COLOURS) - 1)] for i, p in enumerate(others)}


def panels(count: int, height: float = 3.0, strips: bool = False):
    """Return a figure of panels under one another, as a phone shows them, and their axes; with `strips`, every second one is low."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}
    )
    ratios = {"height_ratios": [2, 1] * (count // 2)} if strips else None
    figure, axes = pyplot.subplots(
        count, 1, figsize=(5.2, height * count), squeeze=False, layout="constrained", gridspec_kw=ratios
    )
    return figure, axes[:, 0]


def plot_roofline(report: dict):
    """Every case as a point under the two ceilings: Quire by kind of batch, the best other beside it."""
    c, rows = report["ceilings"], report["rows"]
    figure, (axis,) = panels(1, 4.2)
    low, high = min(r["intensity"] for r in rows) / 2, max(r["intensity"] for r in rows) * 2
    ridge = c["flops_per_second"] / c["bytes_per_second"]
    high = max(high, 2 * ridge)
    axis.plot(
        [low, ridge, high],
        [low * c["bytes_per_second"] / 1e12, c["flops_per_second"] / 1e12, c["flops_per_second"] / 1e12],
        color="black",
        lw=1.5,
    )
    middle = math.sqrt(low * ridge)
    at = (middle, middle * c["bytes_per_second"] / 1e12)
    axis.annotate(
        f"{c['bytes_per_second'] / 1e12:.1f} TB/s", at, xytext=(-6, 4), textcoords="offset points", ha="right"
    )
    axis.annotate(
        f"{c['flops_per_second'] / 1e12:.0f} TFLOP/s",
        (high, c["flops_per_second"] / 1e12),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
    )
    measured = False
    for kind, some in by_kind(rows).items():
        others = [(r["intensity"], r["flops"] / best[1] / 1e6) for r in some if (best := best_other(r))]
        ours = [(r["intensity"], r["flops"] / t / 1e6) for r in some if (t := times_of(r).get(QUIRE))]
        measured = measured or bool(ours)
        if others:
            axis.scatter(
                *zip(*others, strict=True), s=34, facecolors="none", edgecolors=KIND_COLOURS[kind], linewidths=0.8
            )
        points = ours or [(r["intensity"], r["flops"] / r["floor_micros"] / 1e6) for r in some]
        axis.scatter(*zip(*points, strict=True), s=16, color=KIND_COLOURS[kind], label=kind, zorder=3)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axis.set_title(
        "Roofline: Quire (filled), the best other (rings)" if measured else "Roofline: where each case could be at best"
    )
    axis.legend(loc="lower right")
    return figure


def lines(
    axis, rows: list[Row], x: str, tints: dict[str, str], over: Callable[[Row], float | None] = lambda row: 1
) -> None:
    """Draw one line per peer over a row's `x`: its µs over what `over` says of the row, which is left out where that is nothing."""
    rows = sorted((r for r in rows if over(r)), key=lambda r: r[x])
    for peer, tint in tints.items():
        points = [(r[x], t / over(r)) for r in rows if (t := times_of(r).get(peer)) is not None]
        if points:
            ours = peer == QUIRE
            axis.plot(
                *zip(*points, strict=True),
                color=tint,
                marker="o",
                ms=3.5,
                lw=2.2 if ours else 1.1,
                zorder=3 if ours else 2,
                label=peer,
            )


def name_lines(figure) -> None:
    """Put one legend for all panels below them."""
    named = {
        label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3, fontsize=7)


def short(number: float) -> str:
    """Return a power of two as people write it."""
    return f"{number / 1024:g}k" if number >= 1024 and number % 1024 == 0 else f"{number:g}"


def sweeps(rows: list[Row], x: str, same: tuple[str, ...]) -> dict[tuple, list[Row]]:
    """Return groups of uniform rows that differ in `x` alone, of three rows and more."""
    groups = defaultdict(dict)
    for row in rows:
        if row["uniform"] and row["kind"] in ("decode", "prefill") and row["results"]:
            groups[tuple(row[name] for name in same)][row[x]] = row
    return {key: list(some.values()) for key, some in groups.items() if len(some) >= 3}


def plot_sweep(rows: list[Row], x: str, fixed: str, label: str):
    """Time against length or batch, a panel for each value of the other; below it the same times over Quire's, which µs hardly tell apart."""
    groups = sweeps(rows, x, ("kind", "model", "page_size", "dtype", "kv_dtype", fixed))
    groups = {k: v for k, v in groups.items() if k[0] == "decode" or fixed == "num_seqs"}
    if not groups:
        return None
    figure, axes = panels(2 * len(groups), 2.3, strips=True)
    tints = colours(peers_in(rows))
    for axis, strip, (key, some) in zip(
        axes[::2], axes[1::2], sorted(groups.items(), key=lambda g: (g[0][0], g[0][-1])), strict=True
    ):
        kind, model, *_, value = key
        some = sorted(some, key=lambda r: r[x])
        for each in (axis, strip):
            each.set(xscale="log", yscale="log")
            each.set_xticks([row[x] for row in some], [short(row[x]) for row in some])
            each.minorticks_off()
        what = f"{value:,.0f} sequence{'s' * (value != 1)}" if fixed == "num_seqs" else f"{value:,.0f} keys each"
        axis.set(ylabel="µs", title=f"{kind}, {what} ({model})")
        axis.plot([r[x] for r in some], [r["floor_micros"] for r in some], color="black", ls=":", lw=1.2, label="floor")
        lines(axis, some, x, tints)
        lines(strip, some, x, tints, over=lambda row: times_of(row).get(QUIRE))
        strip.set(xlabel=label, ylabel="over Quire's", ylim=(0.7, 3))
        strip.set_yticks([0.7, 1, 1.5, 2, 3], ["0.7", "1", "1.5", "2", "3"])
    name_lines(figure)
    return figure


def plot_shares(rows: list[Row]):
    """Time over the floor against the share of sequences that decode: composition is what libraries differ by. All but the naive kernel, which is far off."""
    groups = defaultdict(list)
    for row in rows:
        if "share" in row["sets"] and row["results"]:
            groups[row["num_seqs"], "log-normal" in row["case"]].append(row)
    groups = {key: some for key, some in groups.items() if len(some) >= 2}
    if not groups:
        return None
    figure, axes = panels(len(groups))
    tints = {peer: tint for peer, tint in colours(peers_in(rows)).items() if peer != NAIVE}
    for axis, ((num_seqs, unequal), some) in zip(axes, sorted(groups.items()), strict=True):
        lines(axis, some, "decode_share", tints, over=lambda row: row["floor_micros"])
        axis.set(xlabel="share of sequences that decode", ylabel="time over the floor", yscale="log")
        axis.set_xticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
        axis.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        axis.yaxis.set_minor_formatter(lambda v, _: f"{v:g}" if str(v)[0] in "235" else "")
        axis.set_title(f"{num_seqs} sequences, {'log-normal' if unequal else 'equal'} lengths")
    name_lines(figure)
    return figure


def plot_ratios(rows: list[Row]):
    """Quire's time over each other's, case by case."""
    rows = [r for r in rows if best_other(r) and QUIRE in times_of(r)]
    if not rows:
        return None
    tints = {p: c for p, c in colours(peers_in(rows)).items() if not p.startswith(QUIRE) and p not in BASELINES}
    figure, (axis,) = panels(1, max(2.5, 0.17 * len(rows) + 1.2))
    rows = sorted(rows, key=lambda r: times_of(r)[QUIRE] / best_other(r)[1], reverse=True)
    for peer, tint in tints.items():
        points = [(times_of(r)[QUIRE] / times_of(r)[peer], i) for i, r in enumerate(rows) if peer in times_of(r)]
        if points:
            axis.scatter(*zip(*points, strict=True), s=14, color=tint, label=peer, zorder=3)
    axis.axvline(1, color="black", lw=1)
    axis.set(xscale="log", xlabel="Quire's time over theirs", ylim=(-1, len(rows)))
    axis.set_yticks(range(len(rows)), [r["case"] for r in rows], fontsize=7)
    axis.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    axis.xaxis.set_minor_formatter(lambda v, _: f"{v:g}" if str(v).lstrip("0.")[:1] in "25" else "")
    name_lines(figure)
    return figure


def plot_range(rows: list[Row]):
    """What a graph captured for a range of lengths loses at each."""
    if not rows:
        return None
    figure, (axis,) = panels(1)
    groups = defaultdict(list)
    for r in rows:
        groups[r["num_seqs"], r["captured_for"]].append(r)
    for (num_seqs, bound), some in groups.items():
        axis.plot(
            [r["seq_len"] for r in some],
            [r["micros"] / r["own_micros"] for r in some],
            marker="o",
            ms=3.5,
            label=f"{num_seqs} × up to {bound:,}",
        )
    axis.axhline(1, color="black", lw=1)
    axis.set(xscale="log", xlabel="keys of each sequence at replay", ylabel="over a graph for these keys")
    axis.set_xticks(values := sorted({r["seq_len"] for r in rows}), map(short, values))
    axis.minorticks_off()
    axis.set_title("Graphs captured for a range of lengths")
    name_lines(figure)
    return figure


def plots(report: dict) -> dict:
    """Return the figures by file name, those that the cases give."""
    rows = report["rows"]
    figures = {
        "roofline": plot_roofline(report) if rows else None,
        "ratios": plot_ratios(rows),
        "shares": plot_shares(rows),
        "length": plot_sweep(rows, "max_seq_len", "num_seqs", "keys of each sequence"),
        "batch": plot_sweep(rows, "num_seqs", "max_seq_len", "sequences"),
        "graph_range": plot_range(report.get("graph_range", [])),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def close_figures() -> None:
    from matplotlib import pyplot

    pyplot.close("all")
