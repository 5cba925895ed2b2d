"""Compute every headline about speed from docs/results/*.json, and write it where a page has a place for it.

    python scripts/headlines.py            # rewrite the pages
    python scripts/headlines.py --check    # exit with 1 if a page differs from the data

A headline compares Quire with the fastest other library, case by case, by the ratio "× as fast":
the other library's time over Quire's, so above 1 Quire is faster.
It counts the cases that at least one library with a kernel optimised for the card also serves.
Cases in which vLLM's portable Triton kernel is the only other library say little, and are left out.
A place in a page is everything between `<!-- headline NAME -->` and `<!-- end -->`.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from quire_tools.bench.ratios import best_other
from quire_tools.bench.results import QUIRE, Report, Row, load

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
PAGES = ("README.md", "docs/README.md", "docs/why.md", "docs/results/README.md")
NAMES = {  # how names of libraries begin, and what a headline calls them
    "FlashAttention 3": "FlashAttention 3",
    "FlashInfer": "FlashInfer",
    "FlashMLA": "FlashMLA",
    "cuDNN": "cuDNN",
    "vLLM Triton": "vLLM's Triton kernel",
}
OPTIMISED = ("FlashAttention 3", "FlashInfer", "cuDNN", "FlashMLA")  # how names of libraries begin
PLACE = re.compile(r"(<!-- headline (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def speedups(rows: Iterable[Row]) -> dict[str, float]:
    """Return by case the fastest other library's time over Quire's, where a library with an optimised kernel ran."""
    found = {}
    for row in rows:
        best = best_other(row)
        if best and QUIRE in row.times and any(name.startswith(OPTIMISED) for name in row.times):
            found[row.case] = best[1] / row.times[QUIRE]
    return found


def libraries(report: Report) -> str:
    """Return the other libraries that a report has times of."""
    names = [name for name in NAMES if any(peer.startswith(name) for row in report.rows for peer in row.times)]
    return ", ".join(NAMES[name] for name in names[:-1]) + " and " + NAMES[names[-1]]


def line(name: str, found: dict[str, float]) -> str:
    """Return a line of a headline's table: how many cases, mean, worst, and how many are slower."""
    worst = min(found, key=lambda case: found[case])
    slower = [ratio for ratio in found.values() if ratio < 1]
    return (
        f"| {name} | {len(found)} | {statistics.geometric_mean(found.values()):.2f}× "
        f"| {found[worst]:.2f}× ({worst}) | {len(slower)} |\n"
    )


def table(report: Report, kinds: dict[str, tuple[str, ...]]) -> str:
    """Return a headline: one line for each group of kinds, and one for all cases if there are several groups."""
    by_case = {row.case: row.kind for row in report.rows}
    found = speedups(report.rows)
    facts = report.provenance
    text = (
        f"| {facts.device}, {facts.date} | cases | × as fast as the fastest of {libraries(report)} | slowest case "
        "| cases in which another library is faster |\n| --- | --- | --- | --- | --- |\n"
    )
    for name, group in kinds.items():
        some = {case: ratio for case, ratio in found.items() if by_case[case] in group}
        text += line(name, some) if some else ""
    return text + (line("all", found) if len(kinds) > 1 else "")


def speed_table(report: Report) -> str:
    """Return the times of a few cases in µs; the fastest library of each case is bold."""
    rows = {row.case: row for row in report.rows}
    shown = [name for name in NAMES if any(n.startswith(name) for case in SHOWN for n in rows[case].times)]
    text = f"| batch | floor | {' | '.join([QUIRE, *(NAMES[name] for name in shown)])} |\n"
    text += f"{'| --- ' * (len(shown) + 3)}|\n"
    for case, words in SHOWN.items():
        times = rows[case].times
        fastest = {
            name: min((t for n, t in times.items() if n.startswith(name) and not n.startswith("Quire, ")), default=0.0)
            for name in (QUIRE, *shown)
        }
        best = min(time for time in fastest.values() if time)
        cells = [micros(time, is_best=time == best) for time in fastest.values()]
        text += f"| {words} | {micros(rows[case].floor_micros)} | {' | '.join(cells)} |\n"
    return text


def micros(time: float, is_best: bool = False) -> str:
    """Return a time with three digits, bold if it is the best of its row; a dash for none."""
    if not time:
        return "–"
    text = f"{time:,.0f}" if time >= 100 else f"{time:.1f}"
    return f"**{text}**" if is_best else text


def summary(*reports: tuple[str, Report, dict[str, tuple[str, ...]]]) -> str:
    """Return an item for each report, with its name after the GPU's: means by group of kinds, peers, slower cases."""
    items = []
    for name, report, kinds in reports:
        by_case = {row.case: row.kind for row in report.rows}
        found = speedups(report.rows)
        means = [
            f"{group} {'' if number else 'run '}{statistics.geometric_mean(some):.2f}×{'' if number else ' as fast'}"
            for number, (group, of) in enumerate(kinds.items())
            if (some := [ratio for case, ratio in found.items() if by_case[case] in of])
        ]
        facts = report.provenance
        items.append(
            f"* **{facts.device}{name}**: {', '.join(means)}.\n"
            f"  {len(found)} cases, {facts.date}, against {libraries(report)}.\n"
            f"  {slower(report, found)}\n"
        )
    return "".join(items)


def slower(report: Report, found: dict[str, float]) -> str:
    """Return in how many cases another library is faster: where they are few, which, and otherwise the slowest."""
    rows = {row.case: row for row in report.rows}
    cases = sorted((case for case, ratio in found.items() if ratio < 1), key=lambda case: found[case])
    if not cases:
        return "No other library is faster in any."
    count = f"Another library is faster in {len(cases)} of them"
    if len(cases) > FEW:
        return f"{count}; in the slowest ({cases[0]}), Quire runs {found[cases[0]]:.2f}× as fast."
    named = []
    for case in cases:
        best = best_other(rows[case])
        assert best is not None
        named.append(f"{case} ({best[0]} {micros(best[1])} µs, Quire {micros(rows[case].times[QUIRE])} µs)")
    return f"{count}: {' and '.join(named)}."


def losses(*reports: Report) -> str:
    """Return a table of the cases in which another library is faster, by report and ratio."""
    text = "| case | GPU | fastest other library | its time, µs | Quire, µs | × as fast |\n"
    text += f"{'| --- ' * 6}|\n"
    for report in reports:
        rows = {row.case: row for row in report.rows}
        for case, ratio in sorted(speedups(report.rows).items(), key=lambda found: found[1]):
            best = best_other(rows[case])
            if ratio < 1 and best:
                times = f"{micros(best[1])} | {micros(rows[case].times[QUIRE])}"
                device = report.provenance.device.split()[1]
                text += f"| {case} | {device}, {report.provenance.date} | {best[0]} | {times} | {ratio:.2f}× |\n"
    return text


def copies(report: Report) -> str:
    """Return where a library that is given contiguous copies, so that no mean counts it, is faster than Quire."""
    both = {row.case: row.times[COPIES] / row.times[QUIRE] for row in report.rows if COPIES in row.times}
    faster = [ratio for ratio in both.values() if ratio < 1]
    worst = min(both, key=lambda case: both[case])
    kinds = sorted({row.kind for row in report.rows if both.get(row.case, 1) < 1})
    return (
        f"It's faster than Quire in {len(faster)} of {len(both)} cases, all of {' or '.join(kinds)}. "
        f"In the slowest ({worst}), Quire runs {both[worst]:.2f}× as fast.\n"
    )


def invariant(report: Report) -> str:
    """Return what batch-invariant plans cost, as a sentence."""
    words = []
    for name, group in DENSE.items():
        ratios = [
            row.times[INVARIANT] / row.times[QUIRE]
            for row in report.rows
            if row.kind in group and {QUIRE, INVARIANT} <= row.times.keys()
        ]
        take = "" if words else " then take"
        words.append(f"{name}{take} {statistics.geometric_mean(ratios):.2f}× as long ({max(ratios):.1f}× at most)")
    return f"On an {report.provenance.device}, {', '.join(words[:-1])} and {words[-1]}.\n"


FEW = 2  # slower cases that a headline names
COPIES = "SDPA, not paged"
INVARIANT = "Quire, batch-invariant"
SHOWN = {  # by case what README calls it
    "decode 1x128": "decode, 1 sequence of 128 keys",
    "decode 8x1024": "decode, 8 × 1,024",
    "decode 64 of 16 to 4096": "decode, 64 sequences of 16 to 4,096",
    "decode 128x4096": "decode, 128 × 4,096",
    "decode 256x1024": "decode, 256 × 1,024",
    "decode 1x131072": "decode, 1 × 131,072",
    "prefill 2048": "prefill, 2,048 tokens",
    "prefill 8192": "prefill, 8,192",
    "prefill 4096 32/8/64": "prefill, 4,096, head_dim 64",
    "chunk 64 on 16384": "chunk of 64 tokens on 16,384 keys",
    "mixed 32 decoding + 2 prompts": "32 decoding sequences and 2 prompts",
}
DENSE = {
    "decode and drafts": ("decode", "drafts"),
    "prompts and chunks": ("prefill", "chunk"),
    "mixed batches": ("mixed",),
}
LATENTS = {"decode batches": ("MLA decode",), "prompts": ("MLA prefill",)}
HEADLINES: dict[str, Callable[[], str]] = {
    "speed": lambda: speed_table(load(RESULTS / "h200_peers.json")),
    "summary": lambda: summary(
        ("", load(RESULTS / "h200_peers.json"), DENSE),
        ("", load(RESULTS / "h100.json"), DENSE),
        (", latents (MLA)", load(RESULTS / "mla_h200.json"), LATENTS),
    ),
    "losses": lambda: losses(*(load(RESULTS / f"{name}.json") for name in ("h200_peers", "h200", "h100"))),
    "peers": lambda: table(load(RESULTS / "h200_peers.json"), DENSE),
    "copies": lambda: copies(load(RESULTS / "h200_peers.json")),
    "invariant": lambda: invariant(load(RESULTS / "h200.json")),
    "h200": lambda: table(load(RESULTS / "h200.json"), DENSE),
    "h100": lambda: table(load(RESULTS / "h100.json"), DENSE),
    "grid": lambda: table(load(RESULTS / "grid_h200.json"), DENSE),
    "mla": lambda: table(load(RESULTS / "mla_h200.json"), LATENTS),
}


def rewritten(text: str) -> str:
    """Return a page with every headline computed again."""
    return PLACE.sub(lambda place: place[1] + HEADLINES[place[2]]() + place[4], text)


def main() -> int:
    """Rewrite the pages, or compare them with the data; return how many differ from it, where only compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page differs")
    check = parser.parse_args().check
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        new = rewritten(text)
        if new != text:
            stale.append(page)
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'differ from docs/results' if check else 'rewrote'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
