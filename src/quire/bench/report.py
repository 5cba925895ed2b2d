"""What a run of the bench found: rows of `results.json`, tables of them as text, and what moved between two runs."""

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
from quire.bench.cases import KINDS, Case, sets_of
from quire.bench.peers import BASELINES
from quire.bench.roofline import Ceilings

QUIRE, BEST = "Quire", "best other"
Row = dict  # one case: what it is, what it needs, and `results` by peer


def provenance(device: str, commit: str | None) -> dict[str, str]:
    """Return what the numbers belong to."""
    facts = {
        "device": device,
        "quire": quire.__version__,
        "commit": commit or commit_here(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
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

    tracked = git(
        "ls-files", "--error-unmatch", Path(__file__).name
    )  # an installed package may lie in a repository of someone else's
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
        raise ValueError(
            f"{path} must be a results.json of `quire bench`, got {type(error).__name__}: {error}; give the file or its folder"
        ) from None
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
    return list(
        dict.fromkeys(
            name for row in rows for name in row["results"] if any("micros" in r["results"].get(name, {}) for r in rows)
        )
    )


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
    """Return heads and cells: Quire's time over the best other's, where a phone shows it, the floor, and µs of every peer side by side."""
    peers = peers_in(rows)
    cells = []
    for row in rows:
        times, best = times_of(row), best_other(row)
        ratio = f"{times[QUIRE] / best[1]:.2f}" if best and QUIRE in times else "–"
        cells.append(
            [
                row["case"],
                ratio,
                f"{row['floor_micros']:.1f}",
                *(f"{times[p]:.1f}" if p in times else "–" for p in peers),
            ]
        )
    return ["case", "Quire / best other", "floor", *peers], cells


def detail_table(rows: list[Row], peer: str = QUIRE) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells: what each case needs, and what one peer reaches."""
    cells = []
    for row in rows:
        r = row["results"].get(peer, {})
        need = [
            row["case"],
            f"{row['nbytes'] / 1e6:.1f}",
            f"{row['flops'] / 1e9:.1f}",
            f"{row['intensity']:.0f}",
            row["bound"],
        ]
        if "micros" in r:
            spread = (r["high"] - r["low"]) / 2 / r["micros"]
            plan = "–" if r["plan_micros"] is None else f"{r['plan_micros']:.0f}"
            cells.append([
                *need, f"{r['micros']:.1f}", f"{spread:.1%}", f"{r['bytes_per_second'] / 1e12:.2f}", f"{r['flops_per_second'] / 1e12:.0f}",
                f"{r['of_floor']:.0%}", f"{r['host_micros']:.0f}", plan, f"{r['scratch_bytes'] / 1e6:.1f}", f"{r['error']:.1e}", f"{r['of_budget']:.0%}",
            ])  # fmt: skip
        else:
            cells.append([*need, *["–"] * 10])
    heads = [
        "case",
        "MB",
        "GFLOP",
        "flop/B",
        "bound",
        "µs",
        "±",
        "TB/s",
        "TFLOP/s",
        "of ceiling",
        "host µs",
        "plan µs",
        "scratch MB",
        "error",
        "of budget",
    ]
    return heads, cells


def compiled_table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return heads and cells: what each case's kernels need on a target, as compiled."""
    cells = []
    for row in rows:
        need = [
            row["case"],
            f"{row['nbytes'] / 1e6:.1f}",
            f"{row['flops'] / 1e9:.1f}",
            f"{row['intensity']:.0f}",
            row["bound"],
            f"{row['floor_micros']:.1f}",
        ]
        for c in row.get("compiled", []) or [None]:
            if c is None:
                cells.append([*need, row.get("why", "not compiled"), *[""] * 5])
            else:
                cells.append(
                    [
                        *need,
                        c["kernel"],
                        *(str(c[name]) for name in ("registers", "spills", "shared", "occupancy")),
                        c["tile"],
                    ]
                )
            need = [""] * 6
    return [
        "case",
        "MB",
        "GFLOP",
        "flop/B",
        "bound",
        "floor µs",
        "kernel",
        "registers",
        "spilled B",
        "shared B",
        "occupancy",
        "tile",
    ], cells


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
    cells = [
        [kind, *(f"{m[p][0]:.2f} ({m[p][1]})" if p in m else "–" for p in peers)] for kind, m in means.items() if m
    ]
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
        parts.append(
            f"## Graphs captured for a range of lengths\n\n{range_line(report['graph_range'])}\n\n{table(*range_table(report['graph_range']))}"
        )
    parts.append("## Who took part\n\n" + "\n".join(f"* {name}: {told}" for name, told in report["peers"].items()))
    return "\n\n".join(parts) + "\n"


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
                    found.append(
                        {
                            "case": row["case"],
                            "peer": peer,
                            "before": a["micros"],
                            "after": math.nan,
                            "noise": noise(a),
                            "verdict": "lost",
                        }
                    )
                continue
            by, limit = b["micros"] - a["micros"], noise(a) + noise(b)
            verdict = "slower" if by > limit else "faster" if by < -limit else "same"
            found.append(
                {
                    "case": row["case"],
                    "peer": peer,
                    "before": a["micros"],
                    "after": b["micros"],
                    "noise": limit,
                    "verdict": verdict,
                }
            )
    return found
