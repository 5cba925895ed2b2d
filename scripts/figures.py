"""What the scripts that draw the documentation's figures share: colours, sizes, and how figures are written."""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
COLOURS = ("#1971c2", "#d9480f", "#2f9e44", "#9c36b5", "#e8a200", "#0c8599")
GREY = "#dee2e6"
WIDTH = 7.2  # inches
STYLE = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "quire",
    "svg.fonttype": "none",
}


def write(description: str | None, *draw: Callable[[], Figure]) -> None:
    """Write each function's figure as an SVG file of its name, into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/figures", metavar="FOLDER", help="where")
    folder = parser.parse_args().output
    with pyplot.rc_context(STYLE):
        for function in draw:
            function().savefig(folder / f"{function.__name__}.svg", metadata={"Date": None})
            pyplot.close("all")
