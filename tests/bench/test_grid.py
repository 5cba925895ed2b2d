"""Cases drawn at random: the space that they cover, their limits, and what `quire bench run --grid` makes of them."""

import math
from dataclasses import replace

import pytest
import torch
import triton

import quire.drawn
from quire.cli import main
from quire.cli.exit_codes import INTERRUPTED
from quire.drawn import Limits
from quire_tools.bench import grid, plots, ratios, report, results
from quire_tools.bench.grid import draw
from quire_tools.bench.inputs import make_inputs
from quire_tools.bench.measure import NoResult, Peer
from quire_tools.bench.peers import PEERS
from quire_tools.bench.results import Grid, make_row
from quire_tools.bench.sample import Sample
from quire_tools.cli import bench_measure
from quire_tools.cli.bench_measure import MAX_SPENT, Patience

SMALL = Limits(num_seqs=3, queries=40, context=300, nbytes=1 << 20, flops=10**7)


def test_a_seed_and_a_number_name_a_case():
    drawn = draw(40, 1)
    assert drawn == draw(60, 1)[:40] != draw(40, 2)
    assert len({case.name for case in drawn}) == 40
    assert all(case.name.startswith(f"grid 1/{i}: ") for i, case in enumerate(drawn, start=1))


def test_the_space_is_covered():
    drawn = draw(400, 3)
    specs = [case.spec for case in drawn]
    assert {spec.head_dim for spec in specs} == {*range(16, 257, 8), 512}
    assert {spec.group_size for spec in specs} == set(range(1, 17))
    assert 0.1 < sum(spec.head_dim_v != spec.head_dim for spec in specs) / 400 < 0.3
    pages = {case.page_size for case in drawn}
    assert min(pages) == 1 and max(pages) == 1072 and len([n for n in pages if n & (n - 1)]) > 50
    queries, before = [case.query_lens for case in drawn], [case.lens[0][1] - case.lens[0][0] for case in drawn]
    assert min(map(min, queries)) == 1 and max(map(max, queries)) > 2000
    assert 0 in before and max(before) > 30_000
    assert any(len(set(case.lens)) > 1 for case in drawn) and any(len(set(case.lens)) == 1 for case in drawn)
    masks = {(s.sliding_window is not None, s.softcap is not None, s.sinks) for s in specs}
    assert len(masks) == 6
    assert {case.kind for case in drawn} == {"decode", "drafts", "prefill", "chunk", "mixed"}


def test_batches_of_models_are_drawn_as_a_server_may_have_them():
    drawn = grid.draw_served(300, 3)
    assert drawn[:40] == grid.draw_served(40, 3) != grid.draw_served(40, 4)
    assert all(case.name.startswith(f"grid models 3/{i}: ") for i, case in enumerate(drawn, start=1))
    assert {case.model for case in drawn} == set(grid.SERVED)
    assert {case.page_size for case in drawn} == {16, 32, 64, 128}
    decoding = [case for case in drawn if case.kind == "decode"]
    assert 150 < len(decoding) < 230 and all(set(case.query_lens) == {1} for case in decoding)
    assert max(len(case.lens) for case in decoding) > 200 and max(max(case.seq_lens) for case in decoding) > 20_000
    assert all(1 < max(case.query_lens) <= 6 for case in drawn if case.kind == "drafts")
    assert all(case.query_lens == case.seq_lens for case in drawn if case.kind == "prefill")
    assert all(1 in case.query_lens and max(case.query_lens) > 1 for case in drawn if case.kind == "mixed")
    for case in drawn:
        assert sum(case.seq_lens) * case.spec.bytes_per_token <= grid.MOST_BYTES


def test_batches_of_models_need_a_grid(capsys):
    for wrong in (["--models"], ["--grid", "3", "--latents", "--models"]):
        assert main(["bench", "roofline", *wrong]) == 2
        assert "--models must be given with --grid, and without --latents" in capsys.readouterr().err
    assert main(["bench", "roofline", "--grid", "3", "--seed", "4", "--models"]) == 0
    assert "grid models 4/3" in capsys.readouterr().out.replace("\n", " ")


def test_the_space_of_latents_is_covered():
    drawn = draw(400, 3, latents=True)
    assert drawn[:40] == draw(40, 3, latents=True) and drawn[0] != draw(1, 3)[0]
    assert all(case.spec.latent and case.kind == "MLA decode" and case.layout == "latents" for case in drawn)
    heads = {case.spec.num_q_heads for case in drawn}
    assert min(heads) <= 2 and max(heads) > 120 and {8, 16, 24, 32, 64} < heads and any(n % 8 for n in heads)
    assert {n for case in drawn for n in case.query_lens} == set(range(1, 9))
    pages = {case.page_size for case in drawn}
    assert min(pages) == 1 and max(pages) == 128 and any(n & (n - 1) for n in pages)
    in_e4m3 = [case for case in drawn if case.spec.kv_dtype is torch.float8_e4m3fn]
    assert 150 < len(in_e4m3) < 250 and all("e4m3" in case.name for case in in_e4m3)
    lengths = [case.seq_lens for case in drawn if len(case.lens) > 4]
    assert any(len(set(some)) == 1 for some in lengths) and any(
        some.count(min(some)) > len(some) // 2 for some in lengths
    )
    assert any(len(set(some)) > 3 for some in lengths) and max(max(some) for some in lengths) > 20_000


@pytest.mark.parametrize("latents", [False, True])
@pytest.mark.parametrize("limits", [grid.MEASURED, SMALL])
def test_a_case_is_within_its_limits(limits, latents):
    for batch in quire.drawn.draw(150, 4, limits, latents):
        case = grid.as_case(batch)
        assert len(case.lens) <= limits.num_seqs and max(case.query_lens) <= limits.queries
        assert all(0 < q <= s <= q + limits.context for q, s in case.lens)
        assert batch.nbytes <= limits.nbytes and case.flops <= limits.flops
        assert case.spec.num_q_heads <= quire.drawn.MAX_HEADS


def test_limits_leave_the_layer_but_for_its_heads():
    for large, small in zip(draw(50, 5), draw(50, 5, SMALL), strict=True):
        a, b = large.spec, small.spec
        assert (a.head_dim, a.head_dim_v, a.group_size, a.window) == (b.head_dim, b.head_dim_v, b.group_size, b.window)
        assert (a.softcap, a.sinks) == (b.softcap, b.sinks)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="bfloat16 cases, which the interpreter does not serve")
def test_inputs_of_drawn_cases_are_made_and_judged():
    cases = draw(14, 1, SMALL)
    specs = [case.spec for case in cases]
    assert {s.softcap is None for s in specs} == {s.sinks for s in specs} == {True, False}
    assert any(s.head_dim_v != s.head_dim for s in specs)
    for case in cases:
        inputs = make_inputs(case, "cpu", max_tables=2)
        out, table = inputs.empty_out(), inputs.tables[1]
        PEERS[0].adapter(inputs, out)(table)()
        sample = Sample(inputs, table)
        assert sample.judge(out).passed, case.name
        assert not sample.judge(1.1 * out).passed, case.name


@pytest.fixture
def drawn_report(make_report, make_timing, ceilings):
    """A report of 40 drawn cases: Quire takes 0.50, 0.55, ... of FlashAttention 3's time, which fails on the last."""
    rows = []
    for i, case in enumerate(draw(40, 1)):
        timings = {"Quire": make_timing(10 * (0.5 + 0.05 * i)), "FlashAttention 3": make_timing(10.0)}
        timings["vLLM Triton"] = make_timing(20.0)
        if i == 39:
            timings = {"Quire": make_timing(7.0), "FlashAttention 3": NoResult("refused"), "vLLM Triton": NoResult("x")}
        rows.append(make_row(case, ceilings, timings))
    made = make_report(peers=("Quire", "FlashAttention 3", "vLLM Triton"))
    return replace(made, rows=rows, graph_range=[], grid=Grid(40, 1))


def test_ratios_are_summed_up_by_quantiles(drawn_report):
    best, fa3, triton = ratios.distributions(drawn_report.rows)
    assert (best.name, fa3.name, triton.name) == (ratios.BEST, "FlashAttention 3", "vLLM Triton")
    expected = [0.5 + 0.05 * i for i in range(39)]
    assert best.ratios == fa3.ratios == pytest.approx(expected)
    assert triton.ratios == pytest.approx([ratio / 2 for ratio in expected])
    assert best.mean == pytest.approx(math.prod(expected) ** (1 / 39))
    assert [best.quantile(share) for share in (0, 0.5, 1)] == pytest.approx([0.5, 1.45, 2.4])
    assert best.quantile(0.25) == pytest.approx(0.5 + 0.05 * 9.5)
    assert best.at_most_1 == pytest.approx(11 / 39)
    assert [row.case for row in ratios.worst_rows(drawn_report.rows)] == [c.name for c in draw(39, 1)[:18:-1]]


def test_a_report_of_a_grid_has_its_distribution_and_its_worst_cases(drawn_report, tmp_path, capsys):
    results.save(drawn_report, tmp_path)
    loaded = results.load(tmp_path)
    assert loaded == drawn_report and loaded.grid == Grid(40, 1)
    assert loaded.rows[0].layer == draw(1, 1)[0].layer
    text = report.markdown(loaded)
    assert "## 40 cases drawn at random, seed 1" in text and "## The worst of them, µs" in text
    assert "| best other | 39 |" in text
    figure = plots.plots(loaded)["distribution"]
    assert [line.get_label() for line in figure.axes[0].get_lines()][:3] == [
        "best other",
        "FlashAttention 3",
        "vLLM Triton",
    ]
    assert "distribution" not in plots.plots(replace(loaded, grid=None))
    assert main(["bench", "report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "the worst cases" in printed and "geometric" in printed
    page = (tmp_path / "report.html").read_text()
    assert "40 cases drawn at random, seed 1" in page and "The worst of them" in page


@pytest.fixture
def on_a_gpu(monkeypatch, ceilings):
    """Return a function that lets the command measure with a stand-in for `compare`."""

    def install(compare) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(results, "driver_version", lambda: "none")
        monkeypatch.setattr(bench_measure, "compare", compare)
        monkeypatch.setattr(bench_measure, "measure_ceilings", lambda: ceilings)
        monkeypatch.setattr(bench_measure, "compile_all", lambda *args: ())
        monkeypatch.setattr(bench_measure, "current_target", lambda: None)

    return install


@pytest.mark.usefixtures("without_plots")
def test_a_grid_is_measured_next_to_the_other_libraries(tmp_path, on_a_gpu, make_timing, capsys):
    asked = []

    def compare(case, peers, seconds, taken):
        asked.append((case.name, [peer.name for peer in peers], seconds))
        return {peer.name: make_timing(10.0) for peer in peers}

    on_a_gpu(compare)
    assert main(["bench", "run", "--grid", "3", "--seed", "1", "--seconds", "0.3", "--output", str(tmp_path)]) == 0
    assert [name for name, _, _ in asked] == [case.name for case in draw(3, 1)]
    loaded = results.load(tmp_path)
    assert loaded.grid == Grid(3, 1) and len(loaded.rows) == 3
    for _, peers, seconds in asked:
        assert seconds == 0.3 and peers[0] == "Quire"
        assert not [name for name in peers[1:] if name.startswith("Quire")]
    asked.clear()
    wanted = ["--peers", "Quire", "--only", "grid 1/2:"]
    assert main(["bench", "run", "--grid", "3", "--seed", "1", *wanted, "--output", str(tmp_path)]) == 0
    ((name, peers, seconds),) = asked
    assert name == draw(3, 1)[1].name and seconds == 0.15
    assert "Quire, batch-invariant" in peers


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), INTERRUPTED), (RuntimeError("CUDA error: an illegal access"), 1)]
)
def test_a_grid_that_is_stopped_keeps_what_it_has(error, code, tmp_path, on_a_gpu, make_timing, capsys):
    third = draw(3, 1)[2].name

    def compare(case, peers, seconds, taken):
        if case.name == third:
            raise error
        return {peer.name: make_timing(10.0) for peer in peers}

    on_a_gpu(compare)
    assert main(["bench", "run", "--grid", "5", "--seed", "1", "--output", str(tmp_path)]) == code
    printed = capsys.readouterr().out
    assert f"stopped after 2 of 5; they are in {tmp_path / 'results.json'}" in printed
    assert ("CUDA error" in printed) == (code == 1)
    assert len(results.load(tmp_path).rows) == 2
    if code == 1:
        assert results.load(tmp_path).stopped == f"{third}: RuntimeError: CUDA error: an illegal access"
    assert (tmp_path / "report.html").exists() == (code == 1)


@pytest.mark.usefixtures("without_plots")
def test_a_run_is_continued(tmp_path, on_a_gpu, make_timing, monkeypatch, capsys):
    asked = []

    def compare(case, peers, seconds, taken):
        asked.append(case.name)
        return {peer.name: make_timing(10.0) for peer in peers}

    on_a_gpu(compare)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "a made-up device")
    again = ["bench", "run", "--seed", "1", "--continue", "--output", str(tmp_path)]
    assert main([*again, "--grid", "2"]) == 0  # there is nothing yet
    assert main([*again, "--grid", "4"]) == 0
    assert asked == [case.name for case in draw(4, 1)] == [row.case for row in results.load(tmp_path).rows]
    assert results.load(tmp_path).grid == Grid(4, 1)
    assert main([*again, "--grid", "4", "--seed", "2"]) == 2
    assert "--continue must go on with a run of the same seed, got 1 there and 2 here" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "another device")
    assert main([*again, "--grid", "4"]) == 2
    assert "--continue must go on with a run on another device, got one on a made-up device" in capsys.readouterr().err
    assert len(asked) == 4


@pytest.mark.usefixtures("without_plots")
def test_a_case_that_fails_has_its_reason_and_the_others_are_measured(tmp_path, on_a_gpu, make_timing, monkeypatch):
    def compare(case, peers, seconds, taken):
        if case.name.startswith("grid 1/2:"):
            raise RuntimeError("not this one")
        return {peer.name: make_timing(10.0) for peer in peers}

    on_a_gpu(compare)
    monkeypatch.setattr(bench_measure, "is_usable", lambda: True)
    assert main(["bench", "run", "--grid", "3", "--seed", "1", "--output", str(tmp_path)]) == 1
    loaded = results.load(tmp_path)
    assert [row.reasons.get("Quire") for row in loaded.rows] == [None, "RuntimeError: not this one", None]
    assert loaded.stopped is None


def test_a_library_that_compiles_for_long_is_left_out_of_further_widths(make_timing, monkeypatch, ceilings):
    case, other = (replace(c, name=c.name) for c in draw(2, 1))
    slow = Peer("FlashInfer fa2", "flashinfer", PEERS[0].adapter)
    seconds = {slow.name: MAX_SPENT + 1, "Quire": 2 * MAX_SPENT}

    def compare(case, peers, seconds_each, taken):
        taken |= {peer.name: seconds[peer.name] for peer in peers}
        return {peer.name: make_timing(10.0) for peer in peers}

    monkeypatch.setattr(bench_measure, "compare", compare)
    patience = Patience()
    peers = [PEERS[0], slow]
    for measured, is_served in ((case, True), (case, True), (other, False)):
        row = bench_measure.measure_case(measured, peers, 0.1, ceilings, patience)
        assert "Quire" in row.times
        assert (slow.name in row.times) == is_served
    assert "left out of further widths" in row.reasons[slow.name]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seed", "1"],
        ["--grid", "0"],
        ["--grid", "many"],
        ["--grid", "3", "--seed", "-1"],
        ["--grid", "3", "--quick"],
        ["--grid", "3", "--set", "decode"],
    ],
)
def test_bad_arguments_are_refused(arguments, capsys):
    try:
        code = main(["bench", "run", *arguments])
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    error = capsys.readouterr().err
    assert "--grid" in error or "--seed" in error


def test_a_grid_is_listed(capsys):
    assert main(["bench", "list", "--grid", "4", "--seed", "7"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [f"grid 7/{i}" for i in range(1, 5)]
