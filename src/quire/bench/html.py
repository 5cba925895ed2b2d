"""The report as files: `results.json`, Markdown, plots, and one page of HTML that holds them all and reads well on a phone."""

import base64
import html
import math
from io import BytesIO
from pathlib import Path

from quire.bench.cases import MODELS
from quire.bench.plots import close_figures, plots
from quire.bench.report import (
    by_kind,
    compiled_table,
    detail_table,
    markdown,
    range_line,
    range_table,
    save,
    summary_table,
    times_table,
    told_of,
    why_not,
)

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; color: #212529; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
img { max-width: min(100%, 38rem); height: auto; display: block; margin: 0.5rem auto; }
.wide { overflow-x: auto; -webkit-overflow-scrolling: touch; border: 1px solid #dee2e6; border-radius: 6px; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e9ecef; }
th { background: #f1f3f5; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { position: sticky; left: 0; background: #f8f9fa; text-align: left; }
@media (max-width: 40rem) { th:first-child, td:first-child { white-space: normal; min-width: 8.5rem; } }
td.best { font-weight: 700; } .dim { color: #5c677d; font-size: 0.9rem; }
"""
PALETTE = 255  # colours of a plot
CAPTIONS = {  # title, and what there is to see
    "roofline": (
        "Roofline",
        "Every case under the two ceilings. Left of the ridge memory is the limit, right of it arithmetic.",
    ),
    "ratios": (
        "Case by case",
        "Quire's time over each other library's: left of the line Quire is faster. The worst cases are at the bottom.",
    ),
    "shares": (
        "By composition",
        "Batches that prefill, mix and decode: it is there that libraries differ, more than by length.",
    ),
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
        parts.append(
            f'{table(heads, cells)}<p class="dim">Geometric means, and over how many cases. Below 1 Quire is faster.</p>'
        )
    for name, image in images.items():
        title, caption = CAPTIONS[name]
        source = base64.b64encode(image).decode()
        parts.append(
            f'<h2>{e(title)}</h2><p class="dim">{e(caption)}</p><img alt="{e(caption)}" src="data:image/png;base64,{source}">'
        )
    if any("compiled" in row for row in rows):
        parts.append(f"<h2>What each case needs, and what its kernels compile to</h2>{table(*compiled_table(rows))}")
    else:
        for kind, some in by_kind(rows).items():
            heads, cells = times_table(some)
            parts.append(f"<h2>{e(kind)}, µs</h2>{table(heads, cells, range(3, len(heads)))}")
        parts.append(f"<h2>Quire in detail</h2>{table(*detail_table(rows))}")
        parts.append('<p class="dim">±: half the range of four fifths of the replays. Host and plan: one eager call, and what is decided once per step. '
                     "Error: the largest against the float64 oracle, and its part of the budget that the precision of the inputs allows.</p>")  # fmt: skip
    if report.get("graph_range"):
        told = e(range_line(report["graph_range"]))
        parts.append(
            f"<h2>Graphs captured for a range of lengths</h2><p>{told}</p>{table(*range_table(report['graph_range']))}"
        )
    heads = "".join(
        f"<li>{e(name)}: {m.num_q_heads} query heads over {m.num_kv_heads} of {m.head_dim}</li>"
        for name, m in MODELS.items()
    )
    parts.append(
        "<h2>Who took part</h2><ul>"
        + "".join(f"<li>{e(name)}: {e(told)}</li>" for name, told in report["peers"].items())
        + "</ul>"
    )
    gaps = "".join(
        f"<li>{e(name)}: {e(why)} ({n} case{'s' * (n != 1)})</li>"
        for name, some in why_not(rows).items()
        for why, n in some.items()
    )
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
    from PIL import Image  # which matplotlib needs

    images = {}
    for name, figure in plots(report).items():
        path = folder / f"{name}.png"
        figure.savefig(drawn := BytesIO(), dpi=160)
        # A third of the size. (Median cut, the default, merges a rare colour with its neighbour.)
        Image.open(drawn).convert("RGB").quantize(PALETTE, Image.Quantize.FASTOCTREE).save(path, optimize=True)
        images[name] = path.read_bytes()
    close_figures()
    (folder / "report.html").write_text(page(report, images))
    return [
        folder / "report.html",
        folder / "results.json",
        folder / "results.md",
        *(folder / f"{name}.png" for name in images),
    ]
