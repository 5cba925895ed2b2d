"""Runs of an older card's code: their titles, their libraries, and what they are not compared with."""

import os
from dataclasses import replace

import pytest
import torch

from quire import targets
from quire.cli import main
from quire.dispatch.device import OVERRIDE
from quire.targets import TARGETS
from quire_tools.bench import guard, html, plots, report, results
from quire_tools.bench.measure import Peer
from quire_tools.bench.peers import PEERS
from quire_tools.cli import bench_measure

DEVICE = "NVIDIA H200"
TITLE = "sm86 code on an NVIDIA H200"
LEFT_OUT = {
    *("Quire, fp8 products", "FlashMLA", "FlashMLA in vLLM", "FlashAttention 3", "FlashInfer fa3", "cuDNN"),
    "FlexAttention, not paged",
}

SWEEP = ["tune", "sweep", "--output", "x.jsonl"]


@pytest.fixture
def run_on(make_report):
    """Return a function that makes up the report of a run of a card's code."""

    def run(card, scale=1.0):
        made = make_report(scale)
        made.provenance = replace(made.provenance, device=DEVICE, code=card)
        return made

    return run


@pytest.fixture
def on_hopper(monkeypatch, ceilings):
    """Let commands find an H200, on which nothing is measured."""
    monkeypatch.setenv(OVERRIDE, "")  # and put it back afterwards
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *index: DEVICE)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)
    monkeypatch.setattr(results, "driver_version", lambda: "none")
    monkeypatch.setattr(targets, "this_gpu", lambda: replace(TARGETS["sm90"], name=DEVICE))
    monkeypatch.setattr(targets.triton_internals, "current_target", lambda: TARGETS["sm90"].gpu)
    monkeypatch.setattr(bench_measure, "compile_all", lambda *args: ())
    monkeypatch.setattr(bench_measure, "measure_ceilings", lambda: replace(ceilings, device=DEVICE))


def test_every_title_says_whose_code_ran_where(run_on):
    made = run_on("sm86")
    made.grid = results.Grid(40, 7)
    text = report.markdown(made)
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert len(headings) > 6
    assert all(line.endswith(f": {TITLE}") for line in headings if line != "## Libraries"), headings
    assert "No time is one of an sm86 card." in text and "99 KB of shared memory" in text
    page = html.page(made, {"ratios": b""})
    titles = [part.split("</h2>")[0] for part in page.split("<h2>")[1:]]
    assert f"<title>quire bench: {TITLE}</title>" in page and f"<h1>quire bench: {TITLE}</h1>" in page
    others = {"Libraries", "Not served", "Heads"}
    assert len(titles) > 7 and all(title.endswith(f": {TITLE}") for title in titles if title not in others), titles


def test_every_plot_says_whose_code_ran_where(run_on):
    made = run_on("sm86")
    drawn = plots.plots(made)
    assert {figure.get_suptitle() for figure in drawn.values()} == {TITLE} and len(drawn) > 3
    assert {figure.get_suptitle() for figure in plots.plots(run_on(None)).values()} == {""}


def test_a_run_of_the_device_s_own_code_has_no_such_title(run_on):
    text = report.markdown(run_on(None))
    assert "code on" not in text and "No time is one of" not in text


def test_the_file_of_results_says_whose_code_ran(run_on, tmp_path):
    results.save(run_on("sm89"), tmp_path)
    assert '"code": "sm89"' in (tmp_path / results.FILE_NAME).read_text()
    assert results.load(tmp_path).provenance.title == "sm89 code on an NVIDIA H200"


@pytest.mark.parametrize("cards", [("sm86", None), (None, "sm86"), ("sm80", "sm86")], ids=str)
def test_runs_of_different_code_are_not_compared(cards, run_on, tmp_path, capsys):
    paths = []
    for i, card in enumerate(cards):
        results.save(run_on(card), tmp_path / str(i))
        paths.append(str(tmp_path / str(i)))
    assert main(["bench", "compare", *paths]) == 2
    error = capsys.readouterr().err
    assert "BEFORE and AFTER must have run the code of one card" in error and "the same --as" in error
    assert main(["bench", "floors", paths[0], str(tmp_path / "floors.json")]) == 0
    assert guard.load(tmp_path / "floors.json").provenance.code == cards[0]
    assert main(["bench", "guard", paths[1], str(tmp_path / "floors.json")]) == 2
    assert "FLOORS must be those of" in capsys.readouterr().err


def test_runs_of_the_same_code_are_compared(run_on, tmp_path, capsys):
    for name, scale in (("a", 1.0), ("b", 1.5)):
        results.save(run_on("sm86", scale), tmp_path / name)
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "slower" in capsys.readouterr().out


def test_libraries_for_hopper_gpus_take_no_part():
    assert {peer.name for peer in PEERS if peer.for_hopper} == LEFT_OUT
    (peer,) = (peer for peer in PEERS if peer.name == "FlashAttention 3")
    assert peer.why_absent("sm86") == "its kernels are for Hopper GPUs, and this run is of sm86 code"


@pytest.mark.usefixtures("on_hopper", "without_plots")
def test_bench_measures_an_older_card_s_code(tmp_path, make_timing, monkeypatch, capsys):
    asked = []

    def compare(case, peers, seconds):
        asked.append({peer.name for peer in peers})
        return {peer.name: make_timing(10.0) for peer in peers}

    monkeypatch.setattr(bench_measure, "compare", compare)
    monkeypatch.setattr(bench_measure, "current_target", lambda: None)
    absent = Peer.why_absent
    monkeypatch.setattr(Peer, "why_absent", lambda peer, card: absent(peer, card) if peer.for_hopper else None)
    monkeypatch.setattr(Peer, "version", lambda peer: "1.0")
    arguments = ["bench", "run", "--only", "decode 1x4096", "--output", str(tmp_path)]
    assert main([*arguments, "--as", "sm86"]) == 0
    assert os.environ[OVERRIDE] == "sm86"  # as Triton reads it, in this process and those that it starts
    assert not asked[0] & LEFT_OUT
    mma_sync = {"Quire", "FlashAttention 2", "FlashInfer fa2", "FlashInfer XQA", "FlashInfer BatchAttention"}
    assert asked[0] >= mma_sync | {"vLLM Triton", "SDPA, not paged"}
    found = results.load(tmp_path)
    assert found.provenance.title == TITLE and "Hopper" in found.peers["cuDNN"]
    assert f"µs: {TITLE}" in " ".join(capsys.readouterr().out.split())
    os.environ[OVERRIDE] = ""
    assert main([*arguments, "--continue"]) == 2
    assert f"--continue must go on with a run on {DEVICE}, got one on {TITLE}" in capsys.readouterr().err


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    "command", [["bench", "run"], ["bench", "graphs"], ["check"], ["tune", "sweep", "--output", "x.jsonl"]], ids=str
)
def test_a_card_whose_code_the_gpu_does_not_run_is_refused(command, capsys):
    assert main([*command, "--as", "sm120"]) == 2
    assert "--as must be one of sm80, sm86, sm89 on a GPU of sm90, got sm120" in capsys.readouterr().err
    assert os.environ[OVERRIDE] == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["check"], SWEEP], ids=str)
def test_without_a_gpu_no_card_s_code_runs(command, capsys):
    assert main([*command, "--as", "sm86"]) == 2
    assert "--as must have a GPU that runs the code, got none" in capsys.readouterr().err


def test_the_roofline_needs_no_gpu_that_runs_the_code(tmp_path, monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(bench_measure, "compile_all", lambda launches, target: compiled.append(target) or ())
    arguments = ["bench", "roofline", "--only", "decode 1x4096", "--output", str(tmp_path), "--as"]
    assert main([*arguments, "sm86"]) == 0
    assert compiled[0].gpu == TARGETS["sm86"].gpu and compiled[0].host.gpu == TARGETS["sm90"].gpu
    assert "sm86 code on an H200" in (tmp_path / "results.md").read_text()
    assert main([*arguments, "sm120"]) == 2
    assert "--as must be one of sm80, sm86, sm89" in capsys.readouterr().err
