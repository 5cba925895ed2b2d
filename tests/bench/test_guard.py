"""`quire bench guard`: ratios to the best other library in the same run, held against floors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.cli import main
from quire_tools.bench import guard, results
from quire_tools.bench.cases import SETS
from quire_tools.bench.guard import Floor, compare, floors_of
from quire_tools.bench.measure import NoResult
from quire_tools.bench.results import make_row
from quire_tools.cli import bench_measure

DOCS = Path(__file__).parent.parent.parent / "docs/results"
OTHERS = ("Quire", "FlashAttention 3", "cuDNN", "SDPA, not paged", "Quire, naive")


@pytest.fixture
def run_of(tmp_path, make_report):
    """Return a function that writes a made-up run, and returns its path; arguments as for `make_report`."""

    def write(name: str, scale: float = 1.0, peers=OTHERS) -> Path:
        results.save(make_report(scale, peers), tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def floors(tmp_path, run_of, capsys) -> Path:
    """The floors of a made-up run, as the command writes them."""
    path = tmp_path / "floors.json"
    assert main(["bench", "floors", str(run_of("before")), str(path)]) == 0
    assert f"{path}: floors of" in capsys.readouterr().out.replace("\n", "")
    return path


IN_THE_DOCS = pytest.mark.parametrize(("name", "num_cases"), [("h200", 125), ("mla_h200", 43)])


@IN_THE_DOCS
def test_the_floors_in_the_docs_are_those_of_the_results_there(name, num_cases, tmp_path):
    made = tmp_path / "floors.json"
    assert main(["bench", "floors", str(DOCS / f"{name}.json"), str(made)]) == 0
    assert made.read_text() == (DOCS / f"{name}_floors.json").read_text(), f"make {name}_floors.json again"
    found = guard.load(DOCS / f"{name}_floors.json")
    assert len(found.cases) == num_cases and found.provenance.device == "NVIDIA H200"
    assert set(found.cases) <= {case.name for some in SETS.values() for case in some}  # what run --guard measures


@IN_THE_DOCS
def test_the_results_in_the_docs_hold_their_own_floors(name, num_cases):
    found = compare(guard.load(DOCS / f"{name}_floors.json"), results.load(DOCS / f"{name}.json").rows)
    assert {held.verdict for held in found} == {"held"} and len(found) == num_cases


def test_a_floor_is_the_other_s_time_over_quire_s(make_report):
    row = make_report(1.0, OTHERS).rows[0]
    assert {name: floor.ratio for name, floor in floors_of(row).items()} == pytest.approx(
        {"FlashAttention 3": 2.0, "cuDNN": 3.0}
    )
    assert floors_of(row)["cuDNN"].noise == pytest.approx(0.04)  # half the range of each of the two times


@pytest.mark.parametrize(("scale", "code"), [(0.7, 0), (1.0, 0), (1.05, 0), (1.08, 0), (1.1, 1), (2.0, 1)])
def test_a_ratio_below_its_floor_by_more_than_the_noise_fails(scale, code, floors, run_of, capsys, without_plots):
    """The noise of four times is 8 %, so a time may be 1 / 0.92 = 1.087 of what it was."""
    assert main(["bench", "guard", str(run_of("after", scale)), str(floors)]) == code
    text = capsys.readouterr().out
    assert ("fell" in text) == bool(code)
    total = len(guard.load(floors).cases)
    assert f"{0 if code else total} of {total} cases hold their floor" in text.replace("\n", " ")


def test_a_slower_machine_holds_its_floors(floors, make_report, make_timing):
    """All times are three times as long: the ratios are the same."""
    report = make_report(1.0, OTHERS)
    rows = []
    for row in report.rows:
        times = {name: replace(r, micros=3 * r.micros, low=3 * r.low, high=3 * r.high) for name, r in row.timed.items()}
        rows.append(replace(row, results=row.results | times))
    assert {held.verdict for held in compare(guard.load(floors), rows)} == {"held"}


def test_floors_are_compared_over_the_libraries_that_both_runs_have(floors, make_report):
    """Without the fastest, the best other is cuDNN, and its own floor counts: 3 and not 2."""
    rows = make_report(1.4, ("Quire", "none of the floors", "cuDNN")).rows
    found = compare(guard.load(floors), rows)
    assert {(held.peer, held.floor) for held in found} == {("cuDNN", 3.0)}
    assert {held.verdict for held in found} == {"fell"}
    assert compare(guard.load(floors), make_report(1.0, ("Quire", "none of the floors")).rows) == []


def test_neither_quire_s_variants_nor_libraries_without_pages_have_floors(floors):
    names = {name for some in guard.load(floors).cases.values() for name in some}
    assert names == {"FlashAttention 3", "cuDNN"}


def test_a_case_without_a_time_of_quire_s_is_lost(floors, make_report, tmp_path, capsys, without_plots):
    report = make_report(1.0, OTHERS)
    report.rows[0].results["Quire"] = NoResult("wrong: error 3")
    (held,) = [held for held in compare(guard.load(floors), report.rows) if held.verdict != "held"]
    assert held.verdict == "lost" and held.ratio is None
    results.save(report, tmp_path / "lost")
    assert main(["bench", "guard", str(tmp_path / "lost"), str(floors)]) == 1
    assert "lost" in capsys.readouterr().out


def test_libraries_that_are_absent_or_of_another_version_are_named(floors, run_of, capsys, without_plots):
    after = run_of("after", peers=("Quire", "FlashAttention 3"))
    text = (after / "results.json").read_text().replace('"FlashAttention 3": "1.0"', '"FlashAttention 3": "2.0"')
    (after / "results.json").write_text(text)
    assert main(["bench", "guard", str(after), str(floors)]) == 0
    printed = capsys.readouterr().out
    assert "FlashAttention 3 is 1.0 in the floors, and here 2.0" in printed
    assert "cuDNN is 1.0 in the floors, and here not asked for" in printed


def test_a_run_that_shares_nothing_with_the_floors_is_no_pass(floors, run_of, capsys, without_plots):
    after = run_of("after", peers=("Quire", "another library"))
    assert main(["bench", "guard", str(after), str(floors)]) == 2
    assert "FLOORS must share a case and a library with the run, got none" in capsys.readouterr().err


def test_floors_of_another_device_are_refused(run_of, capsys):
    assert main(["bench", "guard", str(run_of("after")), str(DOCS / "h200_floors.json")]) == 2
    assert "FLOORS must be those of a made-up device, got those of NVIDIA H200" in capsys.readouterr().err


@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_a_measured_run_is_held_against_its_floors(
    scale, floors, tmp_path, monkeypatch, ceilings, make_timing, capsys, without_plots
):
    """Only the cases that have a floor are measured, and the exit code is the guard's."""
    measured = []

    def measure(cases, peers, seconds, commit, folder, console, grid, earlier):
        measured.extend(case.name for case in cases)
        report = results.load(tmp_path / "before")
        times = {"Quire": make_timing(10.0 * scale), "FlashAttention 3": make_timing(20.0), "cuDNN": make_timing(30.0)}
        report.rows[:] = [make_row(case, ceilings, times) for case in cases]
        return report

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "a made-up device")
    monkeypatch.setattr(bench_measure, "measure", measure)
    arguments = ["bench", "run", "--set", "decode", "--set", "models", "--guard", str(floors)]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == (1 if scale > 1 else 0)
    assert measured and set(measured) <= guard.load(floors).cases.keys()
    assert main(["bench", "run", "--set", "models", "--guard", str(floors), "--output", str(tmp_path / "out")]) == 2
    assert "--guard must have floors of the cases that are asked for" in capsys.readouterr().err


BAD = {
    "missing": None,
    "empty": "",
    "text": "nothing of the kind",
    "a list": "[1, 2]",
    "an object": "{}",
    "nested": "[" * 100_000,
    "results of a run": (DOCS / "h200_peers.json").read_text(),
    "no cases": json.dumps(json.loads((DOCS / "h200_floors.json").read_text()) | {"cases": {}}),
    "a case without floors": json.dumps(json.loads((DOCS / "h200_floors.json").read_text()) | {"cases": {"a": {}}}),
    "a ratio that is text": (DOCS / "h200_floors.json").read_text().replace('"ratio": ', '"ratio": "x", "y": ', 1),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_files_of_another_kind_are_refused(content, tmp_path, run_of, capsys):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    assert main(["bench", "guard", str(run_of("after")), str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"{path} must hold the floors that `quire bench floors` writes")
    assert captured.err.count("\n") == 1 and captured.out == ""


def test_a_floor_of_nothing_is_refused():
    with pytest.raises(ValueError, match="ratio must be larger than 0"):
        Floor(0.0, 0.01)


def test_a_run_without_other_libraries_has_no_floors(run_of, tmp_path, capsys):
    path = tmp_path / "floors.json"
    assert main(["bench", "floors", str(run_of("alone", peers=("Quire",))), str(path)]) == 2
    assert "the run must have times of Quire and of other libraries, got none" in capsys.readouterr().err
    assert not path.exists()
    assert main(["bench", "floors", str(tmp_path / "gone"), str(path)]) == 2
    assert main(["bench", "floors", str(run_of("after")), str(tmp_path)]) == 2
    assert "FILE must be a file that can be written" in capsys.readouterr().err


@pytest.mark.parametrize("content", [BAD["missing"], BAD["text"]], ids=["missing", "text"])
def test_a_run_reads_its_floors_before_anything_else(content, tmp_path, capsys):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    assert main(["bench", "run", "--guard", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"{path} must hold the floors that `quire bench floors` writes")


@pytest.mark.parametrize("source", [["--grid", "3"], ["--trace", "requests.csv"]], ids=lambda source: source[0])
def test_cases_of_no_set_have_no_floor(source, floors, tmp_path, monkeypatch, capsys):
    (tmp_path / "requests.csv").write_text("100,10\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "a made-up device")
    assert main(["bench", "run", "--guard", str(floors), *source]) == 2
    assert "--guard must have floors of the cases that are asked for, got none" in capsys.readouterr().err
