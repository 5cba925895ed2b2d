"""Draw the figures of docs/shared_prefix.md and docs/distributed.md: who reads which keys, from Quire's own plans.

    python scripts/draw_states.py

Nothing needs a GPU.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import quire

ROOT = Path(__file__).parent.parent
COLOURS = ("#1971c2", "#d9480f", "#2f9e44", "#9c36b5", "#e8a200", "#0c8599")
WIDTH = 7.2  # inches
PAGE = 4


def bar(axis: Axes, left: float, top: float, width: float, height: float, colour: str) -> None:
    """Draw keys `left` to `left + width` of rows `top` to `top + height`, in pages."""
    for page in range(int(left), int(left + width), PAGE):
        cells = min(PAGE, left + width - page)
        axis.add_patch(Rectangle((page + 0.3, top + 0.08), cells - 0.6, height - 0.16, color=colour, lw=0))


def shared_prefix() -> Figure:
    """Return the keys that each launch of a plan reads, without and with shared prefixes."""
    seq_lens, levels = [34, 30, 37, 33, 26, 31], [[(6, 12)], [(4, 12), (2, 8)]]
    table = torch.zeros(len(seq_lens), 10, dtype=torch.int32)
    spec = quire.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    batch = quire.Batch(table, torch.tensor(seq_lens, dtype=torch.int32))
    plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=37, shared_prefix=levels)
    figure, axes = pyplot.subplots(1, 2, figsize=(WIDTH, 2.5), layout="constrained", sharey=True)
    flat, shared = axes
    for row, length in enumerate(seq_lens):
        bar(flat, 0, row, length, 1, COLOURS[5])
    ends = [0] * len(seq_lens)
    for i, level in enumerate(levels):
        row = 0
        for num_seqs, num_keys in level:
            bar(shared, ends[row], row, num_keys, num_seqs, COLOURS[i])
            ends[row : row + num_seqs] = [ends[row] + num_keys] * num_seqs
            row += num_seqs
    for row, length in enumerate(seq_lens):
        bar(shared, ends[row], row, length - ends[row], 1, COLOURS[5])
    total = sum(seq_lens)
    flat.set_title(f"flat plan: {total} keys are read", loc="left", fontsize=10)
    shared.set_title(f"shared_prefix: {total - plan.saved_keys} keys are read", loc="left", fontsize=10)
    flat.set(ylabel="sequence", yticks=[i + 0.5 for i in range(len(seq_lens))], yticklabels=range(len(seq_lens)))
    for axis in axes:
        axis.set(xlim=(0, 40), ylim=(len(seq_lens), 0), xlabel="position of the key", xticks=range(0, 41, 8))
    return figure


FIGURES = {f.__name__: f for f in (shared_prefix,)}


def main() -> None:
    """Write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/figures", metavar="FOLDER", help="where")
    folder = parser.parse_args().output
    style = {
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "quire",
        "svg.fonttype": "none",
    }
    with pyplot.rc_context(style):
        for name, draw in FIGURES.items():
            draw().savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close("all")


if __name__ == "__main__":
    main()
