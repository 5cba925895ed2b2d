"""What is made of results: ratios, tables in three formats, plots, the page, and the comparison of two runs."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from quire.targets import Compiled
from quire_tools.bench import ratios, report, results, tables
from quire_tools.bench.cases import cases
from quire_tools.bench.html import page, png, write
from quire_tools.bench.measure import NoResult
from quire_tools.bench.peers import NAIVE
from quire_tools.bench.plots import colours_of, plot_ratios, plot_shares, plots
from quire_tools.bench.results import make_row
from quire_tools.bench.tables import Cell, Column, Table

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PLOTS = {"roofline.png", "ratios.png", "shares.png", "length.png", "batch.png", "graph_range.png"}


def test_a_table_prints_numbers_text_and_gaps():
    columns = (
        Column[tuple]("name", lambda row: row[0]),
        Column[tuple]("a", lambda row: row[1], ".1f", is_contest=True),
        Column[tuple]("b", lambda row: row[2], ".1f", is_contest=True),
        Column[tuple]("c", lambda row: row[3], ",", is_essential=True),
    )
    table = Table(columns, [("one", 2.0, 1.0, 1000), ("two", None, 4.04, 2), ("three", None, None, None)])
    assert table.heads == ["name", "a", "b", "c"]
    assert table.lines == [
        [Cell("one", False), Cell("2.0", False), Cell("1.0", True), Cell("1,000", False)],
        [Cell("two", False), Cell("–", False), Cell("4.0", True), Cell("2", False)],
        [Cell("three", False), Cell("–", False), Cell("–", False), Cell("–", False)],
    ]
    assert tables.to_markdown(table).splitlines() == [
        "| name | a | b | c |",
        "| --- | --- | --- | --- |",
        "| one | 2.0 | 1.0 | 1,000 |",
        "| two | – | 4.0 | 2 |",
        "| three | – | – | – |",
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 250])
def test_a_narrow_terminal_shows_the_essential_columns(make_report, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(tables.to_rich(report.detail_table(make_report().rows), "detail", console))
    text = console.export_text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    heads = next(line for line in lines if "case" in line)
    assert "µs" in heads
    assert "ceiling" in text
    assert ("in the report:" in text) == (width < 250)
    assert ("GFLOP" in heads) == (width >= 80)


def test_a_line_of_the_terminal_shows_whole_numbers(make_report):
    console = Console(width=80, record=True, file=io.StringIO())
    rows = make_report().rows
    console.print(tables.to_rich(report.times_table(rows), "µs", console))
    text = console.export_text()
    assert "…" not in text
    for row in rows:
        assert f"{row.times['Quire']:.1f}" in text


@pytest.fixture(scope="module")
def written(make_report, tmp_path_factory):
    """The files of a report."""
    return write(make_report(), tmp_path_factory.mktemp("report"))


def test_a_report_is_files_that_hold_the_numbers(make_report, written):
    made, folder = make_report(), written[0].parent
    assert {path.name for path in written} == {"report.html", "results.json", "results.md"} | PLOTS
    assert written[0].name == "report.html"
    assert all(path.stat().st_size > 1000 for path in written)
    assert results.load(folder) == made
    row = next(row for row in made.rows if row.case == "decode 32x2048")
    for name in ("report.html", "results.md"):
        text = (folder / name).read_text()
        assert "decode 32x2048" in text, name
        assert f"{row.floor_micros:.1f}" in text, name
        assert f"{row.times['Quire']:.1f}" in text, name
        assert "abc1234" in text, name
        assert "1.020 of the time" in text, name
        assert "0.50 (" in text, name


def test_the_page_is_one_file_and_escapes_what_libraries_say(written):
    text = written[0].read_text()
    assert text.startswith("<!doctype html>")
    assert 'name="viewport"' in text
    assert text.count("data:image/png;base64,") == 6
    assert not re.search(r'(src|href)="(?!data:)', text)  # nothing outside itself
    assert "does not serve &lt;sinks&gt; (1 case)" in text
    assert "<sinks>" not in text


def test_both_pages_say_why_a_library_has_no_time(written):
    folder = written[0].parent
    assert "<h2>Not served</h2>" in written[0].read_text()
    _, reasons = (folder / "results.md").read_text().split("## Not served\n")
    assert "| FlashAttention 3 | does not serve &lt;sinks> | 1 |\n" in reasons


def test_the_page_marks_the_fastest_library(make_report):
    made = make_report()
    row = next(row for row in made.rows if row.case == "decode 32x2048")
    text = page(made, {})
    line = next(line for line in text.splitlines() if "<td>decode 32x2048</td><td>0.50</td>" in line)
    assert f'<td class="best">{row.times["Quire"]:.1f}</td><td>{row.times["FlashAttention 3"]:.1f}</td>' in line


def test_the_page_shows_what_was_compiled(make_report):
    made = make_report()
    kernels = [
        Compiled("hopper_kernel", 168, 0, 0, 200_000, 1, 12, "m128, n128"),
        Compiled("portable_kernel", 77, 4, 0, 1024, 3, 4, "m16, n64"),
    ]
    first, second = (replace(row, results={}) for row in made.rows[:2])
    made.rows = [replace(first, compiled=kernels), replace(second, compiled=[], why="OutOfResources: shared memory")]
    made.graph_range = []
    table = report.compiled_table(made.rows)
    texts = [[cell.text for cell in line] for line in table.lines]
    assert texts[0][0] == first.case
    assert texts[0][6:] == ["hopper_kernel", "168", "0", "200000", "1", "m128, n128"]
    assert texts[1] == [""] * 6 + ["portable_kernel", "77", "4", "1024", "3", "m16, n64"]
    assert texts[2][0] == second.case
    assert texts[2][6:] == ["OutOfResources: shared memory", "", "", "", "", ""]
    assert "portable_kernel" in page(made, {})
    assert "portable_kernel" in report.markdown(made)
    assert list(plots(made)) == ["roofline"]


def test_a_report_without_rows_is_written(make_report, tmp_path):
    made = make_report()
    made.rows = []
    write(made, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.html",
        "results.json",
        "results.md",
        "graph_range.png",
    }


def test_means_are_over_the_cases_that_both_serve(make_report):
    rows = make_report().rows
    means = report.geometric_means(rows)
    assert means["FlashAttention 3"].ratio == pytest.approx(0.5)
    assert means["FlashAttention 3"].num_cases == len(rows) - 1
    assert means["Quire, naive"].num_cases == len(rows)
    assert means[ratios.BEST] == means["FlashAttention 3"]


def test_one_sentence_says_where_the_numbers_come_from(make_report):
    text = report.describe_run(make_report())
    assert text.startswith("a made-up device, quire ")
    assert "commit abc1234" in text
    assert text.endswith("Ceilings (measured): 4.00 TB/s, 800 TFLOP/s in bf16.")


def test_axes_are_labelled_with_plain_numbers():
    rows = results.load(RESULTS / "h200.json").rows
    ratios, shares = plot_ratios(rows), plot_shares(rows)
    assert ratios is not None
    assert shares is not None
    for figure in (ratios, shares):
        figure.draw_without_rendering()
    (axis,) = ratios.axes
    assert labels(axis.xaxis) == {0.05: "0.05", 0.1: "0.1", 0.2: "0.2", 0.5: "0.5", 1: "1"}
    assert labels(shares.axes[0].yaxis) == {2: "2", 3: "3", 5: "5", 10: "10"}


def labels(axis) -> dict[float, str]:
    """Return the labels that an axis shows, by where they are."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return {round(t.get_loc(), 6): t.label1.get_text() for t in ticks if low <= t.get_loc() <= high}


def test_libraries_keep_their_colours_in_pictures():
    """A picture has few colours, so that it is small. The colour of a library with two points must stay its own."""
    rows = results.load(RESULTS / "h200.json").rows
    figure = plot_shares(rows)
    assert figure is not None
    picture = Image.open(io.BytesIO(png(figure))).convert("RGB")
    pixels = {colour for _, colour in picture.getcolors(1 << 16) or ()}
    shown = set(report.peers_in([row for row in rows if "share" in row.sets])) - {NAIVE}
    assert len(shown) > 5
    for peer, colour in colours_of(report.peers_in(rows)).items():
        if peer in shown:
            rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
            nearest = min(sum(abs(a - b) for a, b in zip(rgb, pixel, strict=True)) for pixel in pixels)
            assert nearest <= 6, (peer, colour, nearest)


def test_latents_have_their_own_panels_and_heads(make_report, make_timing, ceilings):
    made = make_report()
    made.rows = [make_row(case, ceilings, {"Quire": make_timing(9.0)}) for case in cases(["mla", "mla_prefill"])]
    figure = plots(made)["length"]
    titles = {axis.get_title() for axis in figure.axes} - {""}
    assert titles == {
        f"MLA decode, 1 sequence (MLA, {heads} heads{dtype})"
        for heads in (16, 128)
        for dtype in ("", ", float8_e4m3fn")
    }
    text = page(made, {})
    assert "MLA, 16 heads: 16 query heads over a latent of 576, values of 512" in text
    assert "MLA, 128 heads, expanded: 128 query heads over 128 of 192, values of 128" in text
    assert "Llama-3-8B: 32 query heads over 8 of 128<" in text


def test_the_naive_kernel_is_no_other_library(ceilings, make_timing):
    timings = {"Quire": make_timing(9.0), NAIVE: make_timing(2.0), "SDPA, not paged": make_timing(1.0)}
    row = make_row(cases(["decode"])[0], ceilings, timings)
    assert ratios.best_other(row) is None
    row = make_row(cases(["decode"])[0], ceilings, timings | {"vLLM Triton": make_timing(5.0)})
    assert ratios.best_other(row) == ("vLLM Triton", 5.0)
    assert ratios.ratio_to_best(row) == pytest.approx(9 / 5)


@pytest.mark.parametrize(
    ("scale", "verdict"), [(1.0, "same"), (1.03, "same"), (1.2, "slower"), (0.97, "same"), (0.8, "faster")]
)
def test_a_change_is_what_the_noise_of_both_runs_does_not_explain(make_report, scale, verdict):
    before, after = make_report(), make_report(scale)
    found = report.changes(before, after)
    assert {change.verdict for change in found if change.peer == "Quire"} == {verdict}
    assert {change.verdict for change in found if change.peer != "Quire"} == {"same"}
    assert len(found) == sum(len(row.times) for row in before.rows)
    shown = report.changes_table(found).rows
    assert len(shown) == (0 if verdict == "same" else len(before.rows))


def test_a_result_that_is_missing_now_is_lost(make_report):
    before, after = make_report(), make_report(1.2)
    row = after.rows[0]
    after.rows[0] = replace(row, results=row.results | {"Quire": NoResult("wrong: error 3")})
    found = report.changes(before, after)
    (lost,) = (change for change in found if change.verdict == "lost")
    assert (lost.case, lost.peer, lost.after, lost.ratio) == (row.case, "Quire", None, None)
    lines = report.changes_table(found).lines
    assert [cell.text for cell in lines[0]][:2] == [row.case, "Quire"]
    assert [cell.text for cell in lines[0]][3:5] == ["–", "–"]


def test_cases_and_libraries_of_one_run_only_do_not_count(make_report):
    before, after = make_report(), make_report()
    before.rows = before.rows[:5]
    after.rows = after.rows[2:]
    assert {change.case for change in report.changes(before, after)} == {row.case for row in after.rows[:3]}
