"""Draw the README's picture from a results.json of `quire bench`: how much faster Quire is than each library.

    python scripts/draw_summary.py docs/results/h200.json --out docs/results/h200_summary.png

`quire bench --report` draws all other plots.
This one leaves out the names of the cases, so that it fits a page that is read in two minutes.
"""

import argparse
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

LIBRARIES = {  # name in the picture: names in the results, of which the fastest counts
    "FlashAttention 3": ("FlashAttention 3",),
    "FlashInfer": ("FlashInfer fa2", "FlashInfer fa3"),
    "vLLM's Triton kernel": ("vLLM Triton",),
}
COLOURS = {"decode": "#1971c2", "drafts": "#0c8599", "prefill": "#d9480f", "chunk": "#9c36b5", "mixed": "#e8a200"}


def speedups(rows: list[dict], names: tuple[str, ...]) -> list[tuple[str, float]]:
    """Return the kind of each case that both have a time for, and the library's time over Quire's."""
    found = []
    for row in rows:
        times = {name: result["micros"] for name, result in row["results"].items() if "micros" in result}
        theirs = [times[name] for name in names if name in times]
        if theirs and "Quire" in times:
            found.append((row["kind"], min(theirs) / times["Quire"]))
    return found


def draw(report: dict) -> pyplot.Figure:
    """Return the figure: a band for each library, a row in it for each kind of batch, a point for each case."""
    pyplot.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, axis = pyplot.subplots(figsize=(8.3, 3.4), layout="constrained")
    axis.axvline(1, color="black", lw=1)
    for band, names in enumerate(LIBRARIES.values()):
        found = speedups(report["rows"], names)
        for at, (kind, colour) in enumerate(COLOURS.items()):
            ratios = [ratio for other, ratio in found if other == kind]
            heights = [band - 0.3 + 0.15 * at] * len(ratios)
            axis.scatter(
                ratios, heights, s=16, color=colour, alpha=0.75, lw=0, label=kind if band == 0 else None, zorder=3
            )
        mean = math.exp(sum(math.log(ratio) for _, ratio in found) / len(found))
        axis.plot([mean, mean], [band - 0.4, band + 0.4], color="black", lw=2.5, zorder=2)
        axis.annotate(f"{mean:.2f}×", (mean, band - 0.42), ha="left", va="bottom", fontweight="bold")
        if band:
            axis.axhline(band - 0.5, color="0.85", lw=0.8)
    axis.set(
        xscale="log",
        ylim=(len(LIBRARIES) - 0.5, -0.62),
        xlabel="time of the library / time of Quire (to the right of 1, Quire is faster)",
    )
    axis.set_xticks([0.75, 1, 1.5, 2, 3, 5, 10, 20], ["0.75", "1", "1.5", "2", "3", "5", "10", "20"])
    axis.minorticks_off()
    axis.grid(axis="x", alpha=0.3)
    axis.set_yticks(
        range(len(LIBRARIES)),
        [f"{name}\n({len(speedups(report['rows'], names))} cases)" for name, names in LIBRARIES.items()],
    )
    axis.tick_params(axis="y", length=0)
    facts = report["provenance"]
    axis.set_title(
        f"{facts['device']}, {facts['date']}: one point per case, bars are geometric means", fontsize=10, loc="left"
    )
    axis.legend(loc="upper right", fontsize=9, framealpha=1)
    return figure


def main() -> None:
    """Read the results, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a results.json of `quire bench`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the picture to write")
    args = parser.parse_args()
    draw(json.loads(args.results.read_text())).savefig(args.out, dpi=130)


if __name__ == "__main__":
    main()
