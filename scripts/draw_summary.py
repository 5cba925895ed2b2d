"""Draw the README's picture from a results.json of `quire bench`: how many times as fast as each library it runs.

    python scripts/draw_summary.py docs/results/h200_peers.json --out docs/results/h200_summary.png

`quire bench report` draws all other plots.
This one leaves out the names of the cases, so that it fits a page that is read in two minutes.
"""

import argparse
import json
from pathlib import Path
from statistics import geometric_mean, median

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

LIBRARIES = {  # name in the picture: how its names in the results begin; the fastest counts
    "cuDNN": "cuDNN",
    "FlashAttention 3": "FlashAttention 3",
    "FlashInfer": "FlashInfer",
    "vLLM's Triton kernel": "vLLM Triton",
}
COLOURS = {"decode": "#1971c2", "drafts": "#0c8599", "prefill": "#d9480f", "chunk": "#9c36b5", "mixed": "#e8a200"}


def speedups(rows: list[dict], library: str) -> list[tuple[str, float]]:
    """Return the kind of each case that both have a time for, and the library's time over Quire's."""
    found = []
    for row in rows:
        times = {name: result["micros"] for name, result in row["results"].items() if "micros" in result}
        theirs = [micros for name, micros in times.items() if name.startswith(library)]
        if theirs and "Quire" in times:
            found.append((row["kind"], min(theirs) / times["Quire"]))
    return found


def draw(report: dict) -> pyplot.Figure:
    """Return the figure: a panel for each library, a row in it for each kind of batch, a point for each case.

    Panels are one below the other and letters are large: on a phone of 360 pixels, they are 13 pixels high.
    """
    pyplot.rcParams.update({"font.size": 15, "axes.spines.top": False, "axes.spines.right": False})
    bands = {name: found for name, library in LIBRARIES.items() if (found := speedups(report["rows"], library))}
    figure, axes = pyplot.subplots(
        len(bands), 1, figsize=(5, 1.4 * len(bands) + 1.75), sharex=True, layout="constrained"
    )
    for axis, (name, found) in zip(axes, bands.items(), strict=True):
        axis.axvline(1, color="black", lw=1)
        for at, (kind, colour) in enumerate(COLOURS.items()):
            ratios = [ratio for other, ratio in found if other == kind]
            label = kind if axis is axes[0] else None
            axis.scatter(ratios, [at] * len(ratios), s=34, color=colour, alpha=0.7, lw=0, label=label, zorder=3)
        mean = geometric_mean(ratio for _, ratio in found)
        decode = median(ratio for kind, ratio in found if kind == "decode")
        slower = sum(ratio < 1 for _, ratio in found)
        axis.axvline(mean, color="black", lw=2.5, zorder=2)
        about = f"slower in {slower} of {len(found)}; median of decode {decode:.2f}×"
        axis.set_title(f"{mean:.2f}× as fast as {name}\n{about}", fontsize=15, loc="left")
        axis.set(xscale="log", ylim=(len(COLOURS) - 0.5, -0.5), yticks=[])
        axis.grid(axis="x", alpha=0.3)
        axis.minorticks_off()
    axes[-1].set_xticks([0.75, 1, 1.5, 2, 3, 5, 10, 20], ["¾", "1", "1½", "2", "3", "5", "10", "20"])
    axes[-1].set_xlim(left=0.7)
    axes[-1].set_xlabel("× as fast; right of 1, Quire is faster")
    facts = report["provenance"]
    about = f"Quire on an {facts['device']}, {facts['date']}\na point is a case, a bar the geometric mean"
    figure.suptitle(about, fontsize=15)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, markerscale=1.6, handletextpad=0.2)
    return figure


def main() -> None:
    """Read the results, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a results.json of `quire bench`")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the picture to write")
    args = parser.parse_args()
    draw(json.loads(args.results.read_text())).savefig(args.out, dpi=144)


if __name__ == "__main__":
    main()
