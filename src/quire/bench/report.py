"""What a run of the bench leaves behind: `results.json`, tables, plots, and one page of HTML that holds them all and reads well on a phone."""

import base64
import html
import json
import math
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
import triton

import quire
from quire.bench.cases import KINDS, MODELS, Case, sets_of
from quire.bench.peers import BASELINES
from quire.bench.roofline import Ceilings

QUIRE, BEST = "Quire", "best other"
Row = dict  # one case: what it is, what it needs, and `results` by peer


def provenance(device: str, commit: str | None) -> dict[str, str]:
    """Return what the numbers belong to."""
    facts = {"device": device, "quire": quire.__version__, "commit": commit or commit_here(), "torch": torch.__version__, "triton": triton.__version__}
    if torch.cuda.is_available():
        facts |= {"cuda": torch.version.cuda or f"hip {torch.version.hip}", "driver": driver()}
    return facts | {"date": time.strftime("%Y-%m-%d")}


def commit_here() -> str:
    """Return the commit that this package is checked out at."""
    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    tracked = git("ls-files", "--error-unmatch", Path(__file__).name)  # an installed package may lie in a repository of someone else's
    return (tracked and git("rev-parse", "--short", "HEAD")) or "not known"


def driver() -> str:
    """Return the version of the kernel's driver."""
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text().split() if path.exists() else []
    return next((w for w in words if w[0].isdigit() and "." in w), "not known")


def row_of(case: Case, ceilings: Ceilings, results: dict) -> Row:
    """Describe a case and what was measured."""
    q_lens, seq_lens = zip(*case.lens, strict=True)
    shape = {
        "num_seqs": len(case.lens), "num_tokens": case.num_tokens, "mean_query_len": statistics.mean(q_lens), "mean_seq_len": statistics.mean(seq_lens),
        "max_seq_len": max(seq_lens), "decode_share": case.decode_share, "uniform": case.uniform, "page_size": case.page_size, "dtype": case.dtype,
        "kv_dtype": case.kv_dtype or case.dtype,
    }  # fmt: skip
    named = {"case": case.name, "kind": case.kind, "sets": sets_of(case), "model": case.model}
    floor = ceilings.floor(case)
    results = {name: r | {"of_floor": floor / r["micros"]} if "micros" in r else r for name, r in results.items()}
    return named | shape | ceilings.of(case) | {"results": results}


def save(report: dict, folder: Path) -> None:
    """Write `results.json`; whole at any moment, so that a run that is stopped leaves what it had."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "results.json.part"
    part.write_text(json.dumps(report, indent=1))
    part.replace(folder / "results.json")


def load(path: Path) -> dict:
    """Read a `results.json`, or the one in a folder.

    Raises:
        ValueError: it is not one.
    """
    path = path / "results.json" if path.is_dir() else path
    try:
        report = json.loads(path.read_text())
        _ = report["rows"], report["provenance"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be a results.json of `quire bench`, got {type(error).__name__}: {error}; give the file or its folder") from None
    return report


def times_of(row: Row) -> dict[str, float]:
    """Return the median µs of each peer that has one."""
    return {name: r["micros"] for name, r in row["results"].items() if "micros" in r}


def best_other(row: Row) -> tuple[str, float] | None:
    """Return the fastest library that is not Quire's and reads the same pages."""
    others = {name: t for name, t in times_of(row).items() if not name.startswith(QUIRE) and name not in BASELINES}
    return min(others.items(), key=lambda item: item[1]) if others else None


def peers_in(rows: Iterable[Row]) -> list[str]:
    """Return the peers that have a time anywhere, in order."""
    return list(dict.fromkeys(name for row in rows for name in row["results"] if any("micros" in r["results"].get(name, {}) for r in rows)))


def geometric_means(rows: list[Row]) -> dict[str, tuple[float, int]]:
    """Return Quire's time over each other's, over the cases that both serve, and how many these are."""
    ratios = defaultdict(list)
    for row in rows:
        times, best = times_of(row), best_other(row)
        if QUIRE in times:
            for name, t in [*times.items(), *([(BEST, best[1])] if best else [])]:
                if name != QUIRE:
                    ratios[name].append(times[QUIRE] / t)
    return {name: (statistics.geometric_mean(values), len(values)) for name, values in ratios.items()}


def times_table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells: µs of every peer side by side, the floor, and Quire's time over the best other's."""
    peers = peers_in(rows)
    cells = []
    for row in rows:
        times, best = times_of(row), best_other(row)
        ratio = f"{times[QUIRE] / best[1]:.2f}" if best and QUIRE in times else "–"
        cells.append([row["case"], f"{row['floor_micros']:.1f}", *(f"{times[p]:.1f}" if p in times else "–" for p in peers), ratio])
    return ["case", "floor", *peers, "Quire / best other"], cells


def detail_table(rows: list[Row], peer: str = QUIRE) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells: what each case needs, and what one peer reaches."""
    cells = []
    for row in rows:
        r = row["results"].get(peer, {})
        need = [row["case"], f"{row['nbytes'] / 1e6:.1f}", f"{row['flops'] / 1e9:.1f}", f"{row['intensity']:.0f}", row["bound"]]
        if "micros" in r:
            spread = (r["high"] - r["low"]) / 2 / r["micros"]
            plan = "–" if r["plan_micros"] is None else f"{r['plan_micros']:.0f}"
            cells.append([
                *need, f"{r['micros']:.1f}", f"{spread:.1%}", f"{r['bytes_per_second'] / 1e12:.2f}", f"{r['flops_per_second'] / 1e12:.0f}",
                f"{r['of_floor']:.0%}", f"{r['host_micros']:.0f}", plan, f"{r['scratch_bytes'] / 1e6:.1f}", f"{r['error']:.1e}", f"{r['of_budget']:.0%}",
            ])  # fmt: skip
        else:
            cells.append([*need, *["–"] * 10])
    heads = ["case", "MB", "GFLOP", "flop/B", "bound", "µs", "±", "TB/s", "TFLOP/s", "of ceiling", "host µs", "plan µs", "scratch MB", "error", "of budget"]
    return heads, cells


def compiled_table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells: what each case's kernels need on a target, as compiled."""
    cells = []
    for row in rows:
        need = [row["case"], f"{row['nbytes'] / 1e6:.1f}", f"{row['flops'] / 1e9:.1f}", f"{row['intensity']:.0f}", row["bound"], f"{row['floor_micros']:.1f}"]
        for c in row.get("compiled", []) or [None]:
            if c is None:
                cells.append([*need, row.get("why", "not compiled"), *[""] * 5])
            else:
                cells.append([*need, c["kernel"], *(str(c[name]) for name in ("registers", "spills", "shared", "occupancy")), c["tile"]])
            need = [""] * 6
    return ["case", "MB", "GFLOP", "flop/B", "bound", "floor µs", "kernel", "registers", "spilled B", "shared B", "occupancy", "tile"], cells


def range_table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells: graphs captured for a range of lengths, replayed at one."""
    cells = [
        [str(r["num_seqs"]), *(f"{r[name]:,}" for name in ("captured_for", "seq_len")), *(f"{r[name]:.1f}" for name in ("micros", "own_micros")),
         f"{r['micros'] / r['own_micros']:.3f}"]
        for r in rows
    ]  # fmt: skip
    return ["sequences", "captured for", "keys", "µs", "captured for these keys, µs", "ratio"], cells


def by_kind(rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows of each kind of batch."""
    groups = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    return {kind: some for kind, some in groups.items() if some}


def why_not(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Return for each peer the reasons why cases have no time, and how often."""
    reasons: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        for name, r in row["results"].items():
            if "why" in r:
                reasons[name][r["why"]] += 1
    return reasons


def summary_table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells: Quire's time over each other's in geometric mean, by kind of batch, and over how many cases."""
    peers = [BEST, *(p for p in peers_in(rows) if p != QUIRE)]
    groups = {"all": rows, **by_kind(rows)}
    means = {kind: geometric_means(some) for kind, some in groups.items()}
    cells = [[kind, *(f"{m[p][0]:.2f} ({m[p][1]})" if p in m else "–" for p in peers)] for kind, m in means.items() if m]
    return ["Quire's time over", *peers], cells


def range_line(rows: list[Row]) -> str:
    """Return what graphs captured for a range of lengths lose, in a sentence."""
    ratios = [r["micros"] / r["own_micros"] for r in rows]
    mean = statistics.geometric_mean(ratios)
    return f"Graphs captured for a range of lengths take {mean:.3f} of the time of graphs for each length in geometric mean, {max(ratios):.2f} at worst."


def told_of(report: dict) -> str:
    """Return where the numbers come from, in one sentence."""
    c = report["ceilings"]
    facts = ", ".join(f"{k} {v}" if k != "device" else v for k, v in report["provenance"].items())
    return f"{facts}. Ceilings ({c['source']}): {c['bytes_per_second'] / 1e12:.2f} TB/s, {c['flops_per_second'] / 1e12:.0f} TFLOP/s in bf16."


def markdown(report: dict) -> str:
    """Return the tables as Markdown."""
    def table(heads, cells) -> str:
        return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *cells])

    parts = [f"# `quire bench`\n\n{told_of(report)}"]
    if any("compiled" in row for row in report["rows"]):
        return "\n\n".join([parts[0], table(*compiled_table(report["rows"]))]) + "\n"
    parts.append(f"Geometric means, over how many cases:\n\n{table(*summary_table(report['rows']))}")
    parts += [f"## {kind}, µs\n\n{table(*times_table(some))}" for kind, some in by_kind(report["rows"]).items()]
    parts.append(f"## Quire in detail\n\n{table(*detail_table(report['rows']))}")
    if report.get("graph_range"):
        parts.append(f"## Graphs captured for a range of lengths\n\n{range_line(report['graph_range'])}\n\n{table(*range_table(report['graph_range']))}")
    parts.append("## Who took part\n\n" + "\n".join(f"* {name}: {told}" for name, told in report["peers"].items()))
    return "\n\n".join(parts) + "\n"


# Plots

COLOURS = ("#d9480f", "#1971c2", "#2f9e44", "#9c36b5", "#e8a200", "#0c8599", "#c2255c", "#5c677d", "#74b816", "#845ef7", "#868e96")
KIND_COLOURS = dict(zip(KINDS, COLOURS, strict=False))


def colours(peers: Iterable[str]) -> dict[str, str]:
    """Give each peer a colour: Quire always the first."""
    others = [p for p in peers if p != QUIRE]
    return {QUIRE: COLOURS[0]} | {p: COLOURS[1 + i % (len(COLOURS) - 1)] for i, p in enumerate(others)}


def panels(count: int, height: float = 3.4):
    """Return a figure of panels under one another, as a phone shows them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = pyplot.subplots(count, 1, figsize=(6.4, height * count), squeeze=False, layout="constrained")
    return figure, axes[:, 0]


def plot_roofline(report: dict):
    """Every case as a point under the two ceilings: Quire by kind of batch, the best other beside it."""
    c, rows = report["ceilings"], report["rows"]
    figure, (axis,) = panels(1, 4.6)
    low, high = min(r["intensity"] for r in rows) / 2, max(r["intensity"] for r in rows) * 2
    ridge = c["flops_per_second"] / c["bytes_per_second"]
    high = max(high, 2 * ridge)
    axis.plot([low, ridge, high], [low * c["bytes_per_second"] / 1e12, c["flops_per_second"] / 1e12, c["flops_per_second"] / 1e12], color="black", lw=1.5)
    middle = math.sqrt(low * ridge)
    at = (middle, middle * c["bytes_per_second"] / 1e12)
    axis.annotate(f"{c['bytes_per_second'] / 1e12:.1f} TB/s", at, xytext=(-6, 4), textcoords="offset points", ha="right")
    axis.annotate(f"{c['flops_per_second'] / 1e12:.0f} TFLOP/s", (high, c["flops_per_second"] / 1e12), xytext=(-4, 4), textcoords="offset points", ha="right")
    measured = False
    for kind, some in by_kind(rows).items():
        others = [(r["intensity"], r["flops"] / best[1] / 1e6) for r in some if (best := best_other(r))]
        ours = [(r["intensity"], r["flops"] / t / 1e6) for r in some if (t := times_of(r).get(QUIRE))]
        measured = measured or bool(ours)
        if others:
            axis.scatter(*zip(*others, strict=True), s=34, facecolors="none", edgecolors=KIND_COLOURS[kind], linewidths=0.8)
        points = ours or [(r["intensity"], r["flops"] / r["floor_micros"] / 1e6) for r in some]
        axis.scatter(*zip(*points, strict=True), s=16, color=KIND_COLOURS[kind], label=kind, zorder=3)
    axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    axis.set_title("Roofline: Quire (filled), the best other (rings)" if measured else "Roofline: where each case could be at best")
    axis.legend(loc="lower right")
    return figure


def lines(axis, rows: list[Row], x: str, tints: dict[str, str], over_floor: bool = False) -> None:
    """Draw one line per peer over a row's `x`: µs, or time over the floor."""
    rows = sorted(rows, key=lambda r: r[x])
    if not over_floor:
        axis.plot([r[x] for r in rows], [r["floor_micros"] for r in rows], color="black", ls=":", lw=1.2, label="floor")
    for peer, tint in tints.items():
        points = [(r[x], t / (r["floor_micros"] if over_floor else 1)) for r in rows if (t := times_of(r).get(peer)) is not None]
        if points:
            ours = peer == QUIRE
            axis.plot(*zip(*points, strict=True), color=tint, marker="o", ms=3.5, lw=2.2 if ours else 1.1, zorder=3 if ours else 2, label=peer)


def name_lines(figure) -> None:
    """Put one legend for all panels below them."""
    named = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3, fontsize=8)


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
    """Time against length or batch, a panel for each value of the other."""
    groups = sweeps(rows, x, ("kind", "model", "page_size", "dtype", "kv_dtype", fixed))
    groups = {k: v for k, v in groups.items() if k[0] == "decode" or fixed == "num_seqs"}
    if not groups:
        return None
    figure, axes = panels(len(groups))
    tints = colours(peers_in(rows))
    for axis, (key, some) in zip(axes, sorted(groups.items(), key=lambda g: (g[0][0], g[0][-1])), strict=True):
        kind, model, *_, value = key
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="µs")
        axis.set_xticks(values := sorted(row[x] for row in some), map(short, values))
        axis.minorticks_off()
        what = f"{value:,.0f} sequence{'s' * (value != 1)}" if fixed == "num_seqs" else f"{value:,.0f} keys each"
        axis.set_title(f"{kind}, {what} ({model})")
        lines(axis, some, x, tints)
    name_lines(figure)
    return figure


def plot_shares(rows: list[Row]):
    """Time over the floor against the share of sequences that decode: composition is what libraries differ by."""
    groups = defaultdict(list)
    for row in rows:
        if "share" in row["sets"] and row["results"]:
            groups[row["num_seqs"], "log-normal" in row["case"]].append(row)
    groups = {key: some for key, some in groups.items() if len(some) >= 2}
    if not groups:
        return None
    figure, axes = panels(len(groups))
    tints = colours(peers_in(rows))
    for axis, ((num_seqs, unequal), some) in zip(axes, sorted(groups.items()), strict=True):
        lines(axis, some, "decode_share", tints, over_floor=True)
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
    figure, (axis,) = panels(1, max(2.5, 0.19 * len(rows) + 1.2))
    rows = sorted(rows, key=lambda r: times_of(r)[QUIRE] / best_other(r)[1], reverse=True)
    for peer, tint in tints.items():
        points = [(times_of(r)[QUIRE] / times_of(r)[peer], i) for i, r in enumerate(rows) if peer in times_of(r)]
        if points:
            axis.scatter(*zip(*points, strict=True), s=14, color=tint, label=peer, zorder=3)
    axis.axvline(1, color="black", lw=1)
    axis.set(xscale="log", xlabel="Quire's time over theirs (left of the line: Quire is faster)", ylim=(-1, len(rows)))
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
        axis.plot([r["seq_len"] for r in some], [r["micros"] / r["own_micros"] for r in some], marker="o", ms=3.5, label=f"{num_seqs} × up to {bound:,}")
    axis.axhline(1, color="black", lw=1)
    axis.set(xscale="log", xlabel="keys of each sequence at replay", ylabel="time over that of a graph for these keys")
    axis.set_xticks(values := sorted({r["seq_len"] for r in rows}), map(short, values))
    axis.minorticks_off()
    axis.set_title("Graphs captured for a range of lengths")
    axis.legend(fontsize=8)
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


STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; color: #212529; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
img { max-width: 100%; height: auto; display: block; margin: 0.5rem auto; }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; border: 1px solid #dee2e6; border-radius: 6px; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e9ecef; }
th { background: #f1f3f5; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { position: sticky; left: 0; background: #f8f9fa; text-align: left; }
@media (max-width: 40rem) { th:first-child, td:first-child { white-space: normal; min-width: 8.5rem; } }
td.best { font-weight: 700; } .dim { color: #5c677d; font-size: 0.9rem; }
"""
CAPTIONS = {  # title, and what there is to see
    "roofline": ("Roofline", "Every case under the two ceilings. Left of the ridge memory is the limit, right of it arithmetic."),
    "ratios": ("Case by case", "Quire's time over each other library's, the worst cases at the bottom."),
    "shares": ("By composition", "Batches that prefill, mix and decode: it is there that libraries differ, more than by length."),
    "length": ("By length", "Against the keys of each sequence."),
    "batch": ("By batch", "Against the number of sequences."),
    "graph_range": ("By range", "One captured graph for many lengths, against a graph for each."),
}


def page(report: dict, images: dict[str, bytes]) -> str:
    """Return the whole report as one HTML page with no links to anything outside it."""
    e = html.escape

    def table(heads: list[str], cells: list[list[str]], times: range = range(0)) -> str:
        def value(text: str) -> float:
            return float(text) if text not in ("–", "") else math.inf

        body = []
        for line in cells:
            best = min((value(line[i]) for i in times), default=math.inf)
            marks = [' class="best"' if i in times and value(t) == best != math.inf else "" for i, t in enumerate(line)]
            body.append("<tr>" + "".join(f"<td{m}>{e(t)}</td>" for m, t in zip(marks, line, strict=True)) + "</tr>")
        return f'<div class="wide"><table><thead><tr>{"".join(f"<th>{e(h)}</th>" for h in heads)}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'

    rows, parts = report["rows"], []
    parts.append(f'<h1>quire bench: {e(report["provenance"]["device"])}</h1><p class="dim">{e(told_of(report))}</p>')
    heads, cells = summary_table(rows)
    if cells:
        parts.append(f'{table(heads, cells)}<p class="dim">Geometric means, and over how many cases. Below 1 Quire is faster.</p>')
    for name, image in images.items():
        title, caption = CAPTIONS[name]
        source = base64.b64encode(image).decode()
        parts.append(f'<h2>{e(title)}</h2><p class="dim">{e(caption)}</p><img alt="{e(caption)}" src="data:image/png;base64,{source}">')
    if any("compiled" in row for row in rows):
        parts.append(f"<h2>What each case needs, and what its kernels compile to</h2>{table(*compiled_table(rows))}")
    else:
        for kind, some in by_kind(rows).items():
            heads, cells = times_table(some)
            parts.append(f"<h2>{e(kind)}, µs</h2>{table(heads, cells, range(2, len(heads) - 1))}")
        parts.append(f"<h2>Quire in detail</h2>{table(*detail_table(rows))}")
        parts.append('<p class="dim">±: half the range of four fifths of the replays. Host and plan: one eager call, and what is decided once per step. '
                     "Error: the largest against the float64 oracle, and its part of the budget that the precision of the inputs allows.</p>")  # fmt: skip
    if report.get("graph_range"):
        told = e(range_line(report["graph_range"]))
        parts.append(f"<h2>Graphs captured for a range of lengths</h2><p>{told}</p>{table(*range_table(report['graph_range']))}")
    heads = "".join(f"<li>{e(name)}: {m.num_q_heads} query heads over {m.num_kv_heads} of {m.head_dim}</li>" for name, m in MODELS.items())
    parts.append("<h2>Who took part</h2><ul>" + "".join(f"<li>{e(name)}: {e(told)}</li>" for name, told in report["peers"].items()) + "</ul>")
    gaps = "".join(f"<li>{e(name)}: {e(why)} ({n} case{'s' * (n != 1)})</li>" for name, some in why_not(rows).items() for why, n in some.items())
    parts.append(f"<h2>Not served</h2><ul>{gaps}</ul>" if gaps else "")
    parts.append(f"<h2>Heads</h2><ul>{heads}</ul>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>quire bench: {e(report['provenance']['device'])}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def write(report: dict, folder: Path) -> list[Path]:
    """Write `results.json`, `results.md`, the plots as PNG, and `report.html`; return what was written."""
    save(report, folder)
    (folder / "results.md").write_text(markdown(report))
    images = {}
    for name, figure in plots(report).items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=140)
        images[name] = path.read_bytes()
    close_figures()
    (folder / "report.html").write_text(page(report, images))
    return [folder / "report.html", folder / "results.json", folder / "results.md", *(folder / f"{name}.png" for name in images)]


def close_figures() -> None:
    from matplotlib import pyplot

    pyplot.close("all")


# Two runs

LEAST_NOISE = 0.01  # of a median: what clocks and placement move between two runs of the same code


def noise(result: dict) -> float:
    """Return by how many µs the median of another run may differ: half the range of four fifths of the replays, or 1 %."""
    return max((result["high"] - result["low"]) / 2, LEAST_NOISE * result["micros"])


def changes(before: dict, after: dict) -> list[dict]:
    """Return for every case and peer of both runs: the two medians, the noise of both, and whether it is "slower", "faster" or the "same"."""
    old, found = {row["case"]: row["results"] for row in before["rows"]}, []
    for row in after["rows"]:
        for peer, b in row["results"].items():
            a = old.get(row["case"], {}).get(peer, {})
            if "micros" not in a or "micros" not in b:
                if "micros" in a:
                    found.append({"case": row["case"], "peer": peer, "before": a["micros"], "after": math.nan, "noise": noise(a), "verdict": "lost"})
                continue
            by, limit = b["micros"] - a["micros"], noise(a) + noise(b)
            verdict = "slower" if by > limit else "faster" if by < -limit else "same"
            found.append({"case": row["case"], "peer": peer, "before": a["micros"], "after": b["micros"], "noise": limit, "verdict": verdict})
    return found
