"""The documentation site, without building it: its navigation, its links, and the pages that scripts write."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import triton

import quire
import quire.debug
import quire.testing
from quire.integrations import flashinfer
from tests.extended import extended

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
HOOKS = runpy.run_path(str(ROOT / "scripts/site_hooks.py"))
NAVIGATION = re.findall(r"[ -]([\w/]+\.md)\b", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1])
MAY_BE_MISSING = {"sglang.md", "flashinfer.md"}  # the site leaves them out while they do not exist


def test_the_navigation_has_every_page_once_and_no_other():
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | set(HOOKS["OUTSIDE"])
    assert len(NAVIGATION) == len(set(NAVIGATION))
    assert set(NAVIGATION) - MAY_BE_MISSING == pages - MAY_BE_MISSING


def test_the_navigation_leaves_out_pages_that_do_not_exist():
    entries = [{"Here": "tour.md"}, {"Gone": "gone.md"}, {"Part": ["gone.md"]}, {"Part": ["gone.md", "DESIGN.md"]}]
    assert HOOKS["existing"](entries, DOCS) == [{"Here": "tour.md"}, {"Part": ["DESIGN.md"]}]


@pytest.mark.parametrize(
    ("page", "link", "path", "shown_by"),
    [
        ("tour.md", "../src/quire/plan.py", "src/quire/plan.py", "source/src/quire/plan.py.md"),
        ("results/README.md", "../../README.md", "README.md", "README.md"),
        ("notes/hopper.md", "../../DESIGN.md", "DESIGN.md", "DESIGN.md"),
        ("DESIGN.md", "docs/mla.md", "docs/mla.md", "mla.md"),
        ("DESIGN.md", "CONTRIBUTING.md", "CONTRIBUTING.md", "CONTRIBUTING.md"),
    ],
)
def test_a_link_into_the_repository_becomes_a_link_within_the_site(page, link, path, shown_by):
    assert HOOKS["in_repository"](link, page) == path
    assert HOOKS["page_of"](path) == shown_by


@pytest.mark.parametrize(("page", "link"), [("tour.md", "usage.md"), ("DESIGN.md", "https://example.org/")])
def test_other_links_stay_as_they_are(page, link):
    assert HOOKS["in_repository"](link, page) is None


def test_code_is_searched_for_no_links():
    assert HOOKS["linked"]("[a](../src/quire/plan.py)\n```\n[b](../src/quire/api.py)\n```\n", "tour.md") == [
        "src/quire/plan.py"
    ]


def test_the_support_matrix_is_what_the_code_answers():
    if triton.knobs.runtime.interpret:
        pytest.skip("Triton's interpreter serves no bfloat16, so plans answer otherwise")
    page = runpy.run_path(str(ROOT / "scripts/write_support.py"))["page"]()
    assert page == (DOCS / "support.md").read_text(encoding="utf-8"), "run python scripts/write_support.py"


def test_flashinfer_s_arguments_are_what_the_tables_say():
    page = runpy.run_path(str(ROOT / "scripts/write_flashinfer.py"))["page"]()
    assert page == (DOCS / "flashinfer_arguments.md").read_text(encoding="utf-8"), "run scripts/write_flashinfer.py"


def test_the_reference_has_every_public_name():
    named = set(
        re.findall(r"^::: ([\w.]+)$", "".join(p.read_text() for p in (DOCS / "api").glob("*.md")), re.MULTILINE)
    )
    missing = {f"quire.{name}" for name in quire.__all__} - named - {"quire.plan"}
    for module in (quire.testing, quire.debug, flashinfer):
        missing |= (
            {f"{module.__name__}.{name}" for name in module.__all__} - named - {"quire.debug.Call"}
        )  # load returns it
    assert not missing
    assert "quire.plan.plan" in named  # `quire.plan` is the module too


FIGURES = {
    "draw_tour.py": ["tour.md", "intervals.md"],
    "draw_states.py": ["shared_prefix.md", "distributed.md"],
    "measure_formats.py": ["quantise.md"],
}  # a script, and the pages that show them


def shown(pages: list[str]) -> set[str]:
    return set(re.findall(r"\(figures/(\w+\.svg)\)", "".join((DOCS / page).read_text("utf-8") for page in pages)))


@pytest.mark.parametrize("script", [extended("draw_tour.py"), "draw_states.py"])
def test_figures_can_be_drawn_again(script, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    # In a process of its own: the interpreter is chosen when Triton is imported.
    subprocess.run([sys.executable, "-W", "ignore", ROOT / "scripts" / script, "--output", tmp_path], check=True)
    assert {path.name for path in tmp_path.iterdir()} == shown(FIGURES[script])


def test_every_figure_is_shown():
    assert {path.name for path in (DOCS / "figures").iterdir()} == shown(
        [page for pages in FIGURES.values() for page in pages]
    )


TOUR = {  # what a row's second cell has, and a column: the case, and the library (None: the floor)
    ("naive", 0): ("decode 1x4096", "Quire, naive"),
    ("naive", 1): ("decode 32x2048", "Quire, naive"),
    ("naive", 2): ("prefill 2048", "Quire, naive"),
    ("with partitions", 0): ("decode 1x4096", "Quire"),
    ("with partitions", 1): ("decode 32x2048", "Quire"),
    ("hopper_kernel", 2): ("prefill 2048", "Quire"),
    ("fp8 cache", 1): ("decode 32x2048 fp8", "Quire"),
    ("floor", 0): ("decode 1x4096", None),
    ("floor", 1): ("decode 32x2048", None),
    ("floor", 2): ("prefill 2048", None),
}


def test_the_notebook_is_the_tour():
    written = runpy.run_path(str(ROOT / "scripts/write_tour.py"))["notebook"]((DOCS / "tour.md").read_text("utf-8"))
    assert written == (DOCS / "tour.ipynb").read_text(encoding="utf-8"), "run python scripts/write_tour.py"


def test_the_notebook_runs():
    """Its cells run one after the other in the notebook's folder, in a process whose Triton was not imported yet."""
    found = json.loads((DOCS / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n\n".join("".join(cell["source"]) for cell in found if cell["cell_type"] == "code")
    done = subprocess.run([sys.executable, "-c", code], cwd=DOCS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Plan(3 sequences" in done.stdout


def test_the_tour_says_what_was_measured():
    measured = {row["case"]: row for row in json.loads((DOCS / "results/h200.json").read_text())["rows"]}
    table = [line.split("|") for line in (DOCS / "tour.md").read_text(encoding="utf-8").splitlines() if "|" in line]
    for (name, column), (case, library) in TOUR.items():
        cell = next(row[4 + column] for row in table if name in row[2]).strip().replace(",", "")
        row = measured[case]
        micros = row["floor_micros"] if library is None else row["results"][library]["micros"]
        assert float(cell) == pytest.approx(micros, abs=0.5001 * 10 ** -len(cell.partition(".")[2])), (name, case)


def test_the_tour_says_how_fast_the_one_file_is():
    micros = json.loads((DOCS / "results/one_file_h200.json").read_text(encoding="utf-8"))["micros"]
    shares: dict[bool, list[float]] = {True: [], False: []}
    for name, times in micros.items():
        shares[name.startswith("decode")].append(times["FlashAttention 3"] / times["this file"])
    decode, prompts = (f"{min(of):.2f}× to {max(of):.2f}×" for of in (shares[True], shares[False]))
    sentence = f"decode runs {decode} as fast as FlashAttention 3, and prompts and chunks {prompts}"
    assert sentence in (DOCS / "tour.md").read_text(encoding="utf-8")
