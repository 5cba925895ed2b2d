"""The report as files: `results.json`, Markdown, plots, and one page of HTML with all of them.

The page is `templates/report.html`. It loads nothing from elsewhere, and is readable on a phone.
"""

import base64
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import jinja2
from matplotlib.figure import Figure
from PIL import Image  # which matplotlib needs

from quire_tools.bench import ratios, results
from quire_tools.bench import report as reports
from quire_tools.bench.case import MODELS
from quire_tools.bench.plots import plots
from quire_tools.bench.results import Report

PALETTE = 255  # colours of a plot
CAPTIONS = {  # by name of the plot: its title, and what it shows
    "roofline": (
        "Roofline",
        "Every case under the two ceilings. Left of the ridge memory is the limit, right of it arithmetic.",
    ),
    "ratios": (
        "Case by case",
        "Quire's time over each other library's: left of the line Quire is faster. The worst cases are at the bottom.",
    ),
    "distribution": (
        "Distribution",
        "On which share of the drawn cases Quire's time over theirs is at most so much. Left of 1 Quire is faster.",
    ),
    "shares": (
        "By composition",
        "Prompts only, a mix, and decode only. Libraries differ by composition more than by length.",
    ),
    "length": ("By length", "Times over the number of keys of each sequence."),
    "batch": ("By batch", "Times over the number of sequences."),
    "graph_range": ("By range", "One captured graph for many lengths, compared with a graph for each."),
}


class Picture(NamedTuple):
    """A plot in the page.

    Attributes:
        title: above it.
        caption: what it shows.
        data: the PNG file in base64.
    """

    title: str
    caption: str
    data: str


def page(report: Report, images: Mapping[str, bytes]) -> str:
    """Return the whole report as one HTML page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = report.rows
    return environment.get_template("report.html").render(
        device=report.provenance.title,
        run=reports.titled(report, ""),
        description=reports.describe_run(report),
        summary=reports.summary_table(rows),
        grid=reports.describe_grid(report.grid) if report.grid else "",
        distribution=ratios.distribution_table(rows),
        worst=reports.worst_table(rows),
        pictures=[Picture(*CAPTIONS[name], base64.b64encode(image).decode()) for name, image in images.items()],
        compiled=reports.compiled_table(rows) if reports.was_compiled(report) else None,
        needs=None if reports.peers_in(rows) else reports.needs_table(rows),
        times={kind: reports.times_table(some) for kind, some in reports.by_kind(rows).items()},
        detail=reports.detail_table(rows),
        ranges=reports.range_table(report.graph_range),
        ranges_description=reports.describe_ranges(report.graph_range) if report.graph_range else "",
        peers=report.peers,
        reasons=reports.reasons_in(rows),
        models=MODELS,
    )


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG file with a palette, which is a third of the size."""
    drawn, packed = BytesIO(), BytesIO()
    figure.savefig(drawn, dpi=160)
    # The default, median cut, merges a rare colour with its neighbour.
    image = Image.open(drawn).convert("RGB").quantize(PALETTE, Image.Quantize.FASTOCTREE)
    image.save(packed, format="PNG", optimize=True)
    return packed.getvalue()


def write(report: Report, folder: Path) -> list[Path]:
    """Write `results.json`, `results.md`, the plots as PNG, and `report.html`; return their paths, the page first."""
    results.save(report, folder)
    images = {name: png(figure) for name, figure in plots(report).items()}
    files = {"results.md": reports.markdown(report).encode()}
    files |= {f"{name}.png": image for name, image in images.items()}
    files["report.html"] = page(report, images).encode()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in ("report.html", results.FILE_NAME, "results.md", *(f"{n}.png" for n in images))]
