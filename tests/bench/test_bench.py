"""The command, as far as it needs no GPU."""

import io
import itertools
from pathlib import Path

import pytest
import torch
import triton
from rich.console import Console

from quire.cli import main
from quire.cli.exit_codes import INTERRUPTED
from quire_tools.bench import ratios, report, results
from quire_tools.bench.measure import NoResult, Peer
from quire_tools.bench.peers import PEERS
from quire_tools.cli import bench_choice, bench_measure
from quire_tools.cli.progress import progress_bar


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


def test_a_report_is_written_again_from_its_numbers(make_report, tmp_path, capsys):
    first, second = tmp_path / "a", tmp_path / "b"
    results.save(make_report(), first)
    assert main(["bench", "report", str(first / "results.json"), "--output", str(second)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert (second / "ratios.png").exists()
    assert not (first / "report.html").exists()
    assert results.load(first) == results.load(second)


@pytest.mark.usefixtures("without_plots")
def test_slow_peers_take_part_where_it_is_quick_or_they_are_named(tmp_path, on_a_gpu, make_timing):
    asked = {}

    def compare(case, peers, seconds):
        asked[case.name] = [peer.name for peer in peers]
        return {peer.name: make_timing(10.0) for peer in peers}

    on_a_gpu(compare)
    arguments = ["bench", "run", "--set", "decode", "--output", str(tmp_path)]
    assert main(arguments) == 0
    flex = "FlexAttention, not paged"
    assert [peer.name for peer in PEERS if peer.slow] == [flex]
    assert flex in asked["decode 1x4096"]
    assert flex not in asked["decode 1x1024"]
    assert "SDPA, not paged" in asked["decode 1x1024"]
    rows = {row.case: row for row in results.load(tmp_path).rows}
    assert flex in rows["decode 1x4096"].times
    assert "some cases only" in rows["decode 1x1024"].reasons[flex]
    assert main([*arguments, "--peers", "Quire,Flex"]) == 0
    assert flex in asked["decode 1x1024"]


@pytest.mark.usefixtures("without_plots")
def test_only_libraries_that_serve_its_keys_take_part_in_a_case(tmp_path, on_a_gpu, make_timing, monkeypatch):
    asked = {}

    def compare(case, peers, seconds):
        asked[case.name] = {peer.name for peer in peers}
        return {peer.name: make_timing(9.0 if peer.name == "FlashMLA" else 10.0) for peer in peers}

    on_a_gpu(compare)
    monkeypatch.setattr(Peer, "why_absent", lambda peer, card: None)
    monkeypatch.setattr(Peer, "version", lambda peer: "1.0")
    arguments = ["bench", "run", "--set", "mla", "--set", "mla_prefill", "--set", "length", "--output", str(tmp_path)]
    assert main(arguments) == 0
    assert asked["MLA 1x1024 h16"] == asked["MLA 1x1024 h16 fp8"]
    assert asked["MLA 1x1024 h16"] >= {"Quire", "Quire, portable", "FlashMLA", "FlashAttention 3", "vLLM Triton MLA"}
    assert asked["MLA prefill 2048 h16"] == {"Quire", "FlashAttention 3", "FlashInfer fa2", "FlashInfer fa3"}
    assert not asked["decode 1x256"] & {"Quire, portable", "FlashMLA"}
    rows = {row.case: row for row in results.load(tmp_path).rows}
    assert not rows["MLA 1x1024 h16"].reasons
    assert ratios.best_other(rows["MLA 1x1024 h16"]) == ("FlashMLA", 9.0)
    assert {row.kind for name, row in rows.items() if name.startswith("MLA")} == {"MLA decode", "MLA prefill"}
    text = (tmp_path / "results.md").read_text()
    tables = {part.split(", µs")[0]: part for part in text.split("\n## ")}
    assert "SDPA" in tables["decode"] and "FlashMLA" not in tables["decode"]
    assert "FlashMLA" in tables["MLA decode"] and "SDPA" not in tables["MLA decode"]
    assert "| MLA 1x1024 h16 | 1.11 |" in tables["MLA decode"]


@pytest.mark.usefixtures("without_plots")
def test_what_quire_and_its_variants_launch_is_compiled_beforehand(tmp_path, on_a_gpu, make_timing, monkeypatch):
    on_a_gpu(lambda case, peers, seconds: {peer.name: make_timing(10.0) for peer in peers})
    compiled = []
    monkeypatch.setattr(bench_measure, "compile_all", lambda launches, target: compiled.extend(launches) or ())
    sets = ["--set", "mla", "--set", "decode", "--set", "mla_prefill"]
    assert main(["bench", "run", *sets, "--peers", "Quire", "--output", str(tmp_path)]) == 0
    assert len(set(compiled)) == len(compiled)
    by_layout = {"pages": set(), "latents": set(), "packed": set()}
    for launch in compiled:
        layout = "latents" if launch.spec.latent else "pages"
        by_layout["packed" if launch.packed else layout].add(launch.options)
    invariant, portable = (("batch_invariant", True),), (("kernel", "mla"),)
    assert by_layout == {"pages": {(), invariant}, "latents": {(), invariant, portable}, "packed": {()}}
    compiled.clear()
    assert main(["bench", "run", *sets, "--peers", "SDPA", "--output", str(tmp_path)]) == 0
    assert not compiled


@pytest.mark.usefixtures("without_plots")
def test_configurations_are_timed_as_peers(tmp_path, on_a_gpu, make_timing):
    asked = []

    def compare(case, peers, seconds):
        asked.append([peer.name for peer in peers])
        return {peer.name: make_timing(10.0) for peer in peers}

    on_a_gpu(compare)
    arguments = ["bench", "run", "--only", "decode 1x4096", "--peers", "Quire", "--output", str(tmp_path)]
    assert main([*arguments, "--config", "block_n=128", "--config", "block_n=32,num_stages=4"]) == 0
    assert "Quire block_n=128" in asked[0]
    assert "Quire block_n=32 num_stages=4" in asked[0]


@pytest.mark.usefixtures("without_plots")
def test_a_bench_that_is_stopped_keeps_what_it_has(tmp_path, on_a_gpu, make_timing, capsys):
    def compare(case, peers, seconds):
        if case.name == "decode 8x128":
            raise KeyboardInterrupt
        return {peer.name: make_timing(10.0) for peer in peers}

    on_a_gpu(compare)
    assert main(["bench", "run", "--set", "decode", "--output", str(tmp_path)]) == INTERRUPTED
    captured = capsys.readouterr()
    assert f"stopped after 7 of 29; they are in {tmp_path / 'results.json'}" in captured.out
    assert captured.err.endswith("measuring, 0 of 29 done\ninterrupted\n")
    assert len(results.load(tmp_path).rows) == 7
    assert not (tmp_path / "report.html").exists()
    assert main(["bench", "report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()


def test_graphs_that_are_stopped_are_kept(tmp_path, on_a_gpu, make_timing, monkeypatch, capsys):
    calls = []

    def compare(case, peers, seconds, table_len):
        calls.append(case)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return {"own": make_timing(10.0), "range": make_timing(10.4)}

    on_a_gpu(compare)
    assert main(["bench", "graphs", "--output", str(tmp_path)]) == INTERRUPTED
    assert "stopped after 3 of" in capsys.readouterr().out
    assert len(results.load(tmp_path).graph_range) == 3


def test_compilations_that_are_stopped_are_kept(tmp_path, monkeypatch, capsys):
    def compile_some(launches, target):
        yield launches[0], "a plan", []
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_measure, "compile_all", compile_some)
    assert main(["bench", "roofline", "--device", "A100", "--quick", "--output", str(tmp_path)]) == INTERRUPTED
    assert "stopped after 1 of 12" in capsys.readouterr().out
    assert [row.why for row in results.load(tmp_path).rows].count("a plan") == 1


@pytest.mark.parametrize(
    ("scale", "code", "word"), [(1.0, 0, "0 slower"), (1.03, 0, "0 slower"), (1.2, 1, "slower"), (0.8, 0, "faster")]
)
def test_comparing_two_runs(make_report, tmp_path, capsys, scale, code, word):
    results.save(make_report(), tmp_path / "a")
    results.save(make_report(scale), tmp_path / "b")
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b" / "results.json")]) == code
    text = capsys.readouterr().out
    assert word in text
    assert "other libraries on the same cases: 1.000" in text


def test_a_case_that_was_lost_is_no_pass(make_report, tmp_path):
    results.save(make_report(), tmp_path / "a")
    after = make_report()
    after.rows[0].results["Quire"] = NoResult("wrong: error 3")
    results.save(after, tmp_path / "b")
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1


@pytest.mark.parametrize(("command", "name"), [("report", "RUN"), ("compare", "BEFORE"), ("guard", "RUN")])
@pytest.mark.parametrize("content", [None, "[]", "{}", "not json", '{"rows": 3, "provenance": []}'])
def test_what_is_no_report_is_refused(tmp_path, capsys, content, command, name):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    assert main(["bench", command, *[str(path)] * (1 if command == "report" else 2)]) == 2
    error = capsys.readouterr().err
    if content is None:
        words = f"{name} must be a results.json of `quire bench`, or its folder, got {path}, which is not there"
        assert error == f"{words}; name another\n"
    else:
        assert f"{path} must be a results.json of `quire bench`" in error


def test_a_folder_without_results_is_named(tmp_path, capsys):
    assert main(["bench", "report", str(tmp_path)]) == 2
    assert f"got {tmp_path}, which has no results.json; name another" in capsys.readouterr().err


# A run into a folder that has one


ONE_CASE = ["bench", "run", "--only", "decode 256x1024", "--set", "decode", "--peers", "Quire"]


def times_in(path: Path) -> list[float]:
    """Return the times of Quire in the results at a path."""
    return [row.times["Quire"] for row in results.load(path).rows]


@pytest.mark.usefixtures("without_plots")
def test_a_new_run_keeps_the_results_of_earlier_ones(tmp_path, on_a_gpu, make_timing, capsys):
    for i in range(3):
        on_a_gpu(lambda case, peers, seconds, i=i: {peer.name: make_timing(10.0 + i) for peer in peers})
        assert main([*ONE_CASE, "--output", str(tmp_path)]) == 0
    assert [times_in(tmp_path / name) for name in ("results.1.json", "results.2.json", "results.json")] == [
        [10.0], [11.0], [12.0]
    ]  # fmt: skip
    words = f"{tmp_path} has an earlier run of 1 case: its results.json is now results.2.json. --continue would go on"
    assert words in capsys.readouterr().out


@pytest.mark.usefixtures("without_plots")
def test_a_run_that_is_stopped_before_its_first_case_leaves_the_earlier_one(tmp_path, on_a_gpu, make_timing, capsys):
    def interrupt(*args):
        raise KeyboardInterrupt

    on_a_gpu(lambda case, peers, seconds: {peer.name: make_timing(10.0) for peer in peers})
    assert main([*ONE_CASE, "--output", str(tmp_path)]) == 0
    on_a_gpu(interrupt)
    assert main([*ONE_CASE, "--output", str(tmp_path)]) == INTERRUPTED
    assert times_in(tmp_path) == [10.0] and not (tmp_path / "results.1.json").exists()
    assert "There are no new results: results.1.json is results.json again." in capsys.readouterr().out


@pytest.mark.usefixtures("without_plots")
def test_a_report_of_other_results_keeps_those_of_its_folder(make_report, tmp_path, capsys):
    first, second = make_report(), make_report(1.5)
    results.save(first, tmp_path / "a")
    results.save(second, tmp_path / "b")
    arguments = ["bench", "report", str(tmp_path / "a"), "--output", str(tmp_path / "b")]
    assert main(arguments) == 0
    assert results.load(tmp_path / "b") == first and results.load(tmp_path / "b/results.1.json") == second
    assert main(arguments) == 0
    assert not (tmp_path / "b/results.2.json").exists()


@pytest.mark.usefixtures("without_plots")
def test_results_without_times_are_not_kept(tmp_path):
    arguments = ["bench", "roofline", "--device", "A100", "--quick", "--no-compile", "--output", str(tmp_path)]
    assert main(arguments) == main([*arguments, "--only", "decode"]) == 0
    assert not (tmp_path / "results.1.json").exists()


@pytest.mark.usefixtures("without_plots")
def test_results_that_cannot_be_read_are_kept(tmp_path, capsys):
    (tmp_path / "results.json").write_text("of another version")
    assert main(["bench", "roofline", "--device", "A100", "--quick", "--no-compile", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "results.1.json").read_text() == "of another version"
    assert f"{tmp_path} has an earlier run: its results.json is now results.1.json" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["run", "graphs"])
def test_without_a_gpu_nothing_is_measured(command, tmp_path, capsys):
    assert main(["bench", command, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"quire bench {command} must have a GPU to measure, got none; quire bench roofline says" in error
    assert not (tmp_path / "out").exists()


# Progress


def test_where_the_output_is_no_terminal_there_is_a_line_for_every_ten_steps(capsys):
    with progress_bar(Console(quiet=True)) as progress:
        task = progress.add_task("measuring", total=25)
        for _ in range(25):
            progress.update(task, description="a case")
            progress.advance(task)
    done = capsys.readouterr().err.splitlines()
    assert done == [f"measuring, {count} of 25 done" for count in (0, 10, 20, 25)]


def test_a_long_task_has_a_hundred_lines(capsys):
    with progress_bar(Console(quiet=True)) as progress:
        task = progress.add_task("measuring", total=5000)
        for _ in range(1250):
            progress.update(task, advance=4, description="a case")
    assert len(capsys.readouterr().err.splitlines()) == 101


def test_on_a_terminal_there_is_a_bar_and_no_line(capsys):
    with progress_bar(Console(file=io.StringIO(), force_terminal=True)) as progress:
        progress.advance(progress.add_task("measuring", total=1))
    assert capsys.readouterr().err == ""


def test_without_a_gpu_the_roofline_is_reported(tmp_path, capsys):
    assert main(["bench", "roofline", "--device", "MI300X", "--quick", "--no-compile", "--output", str(tmp_path)]) == 0
    found = results.load(tmp_path)
    printed = capsys.readouterr().out
    assert "5.30 TB/s" in printed and "ceiling" not in printed.replace("Ceilings", "")
    assert len(found.rows) == 12
    assert {row.bound for row in found.rows} == {"memory", "compute"}
    for name in ("results.md", "report.html"):
        page = (tmp_path / name).read_text(encoding="utf-8")
        assert "floor µs" in page and "of ceiling" not in page
        assert all(f"{row.floor_micros:.1f}" in text for row in found.rows for text in (page, printed))
    assert (tmp_path / "roofline.png").exists()


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
def test_without_a_gpu_what_kernels_need_is_reported(tmp_path):
    assert main(["bench", "roofline", "--device", "A100", "--only", "decode 1x4096 12", "--output", str(tmp_path)]) == 0
    row = results.load(tmp_path).rows[0]
    assert row.compiled is not None
    schedule, kernel = row.compiled
    assert (schedule.kernel, kernel.kernel) == ("schedule_kernel", "portable_kernel")
    assert kernel.registers > 32
    assert kernel.spills == 0
    assert kernel.occupancy >= 1
    assert row.plan is not None
    assert str(kernel.registers) in (tmp_path / "report.html").read_text()


def test_fields_of_a_configuration_are_named():
    assert bench_choice.config_fields("block_n=128,num_warps=8") == {"block_n": 128, "num_warps": 8}
    for text in ("block_k=3", "block_n", "block_n=many"):
        with pytest.raises(SystemExit) as leaving:
            main(["bench", "run", "--config", text])
        assert leaving.value.code == 2, text


def test_graphs_for_a_range_are_measured_and_graphs_for_each_length(monkeypatch, make_timing):
    asked = []

    def compare(case, peers, seconds, table_len):
        asked.append((case.name, table_len))
        return {"own": make_timing(10.0), "range": make_timing(10.4)}

    monkeypatch.setattr(bench_measure, "compare", compare)
    console = Console(quiet=True)
    with progress_bar(console) as progress:
        rows = list(bench_measure.capture_ranges(0.1, progress, console))
    assert ("decode 32x2048", 16384) in asked
    assert all(row.seq_len <= row.captured_for for row in rows)
    assert report.describe_ranges(rows).startswith("Graphs captured for a range of lengths take 1.040 of the time")


def test_graphs_whose_results_are_wrong_are_not_timed(monkeypatch, make_timing):
    found = {"own": make_timing(10.0), "range": NoResult("wrong")}
    monkeypatch.setattr(bench_measure, "compare", lambda *args, **kwargs: found)
    console = Console(quiet=True)
    with progress_bar(console) as progress, pytest.raises(RuntimeError, match="must be right to be timed"):
        next(bench_measure.capture_ranges(0.1, progress, console))


@pytest.mark.parametrize("command", ["run", "list", "roofline"])
@pytest.mark.parametrize("arguments", [["--only", "no such case"], ["--trace", "/nowhere"]])
def test_bad_arguments_are_refused(command, arguments, capsys):
    assert main(["bench", command, *arguments]) == 2
    assert f"{arguments[0]} must be" in capsys.readouterr().err


SOURCES = (["--quick"], ["--set", "decode"], ["--trace", "requests.csv"], ["--grid", "3"])


@pytest.mark.parametrize("some", [*itertools.combinations(SOURCES, 2)], ids=lambda some: " ".join(o[0] for o in some))
def test_cases_have_one_source(some, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["bench", "list", *some[0], *some[1]])
    assert leaving.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_bench_alone_says_what_its_commands_are(capsys):
    assert main(["bench"]) == 2
    printed = capsys.readouterr().out
    for command in ("run", "graphs", "roofline", "list", "report", "compare", "floors", "guard"):
        assert f"\n    {command} " in printed


def test_cases_are_listed(capsys):
    assert main(["bench", "list", "--set", "models"]) == 0
    assert "gpt-oss-120b" in capsys.readouterr().out


@pytest.mark.usefixtures("without_plots")
def test_bad_results_of_our_own_leave_with_1(make_report, tmp_path, monkeypatch, capsys):
    found = make_report()
    found.rows[2].results["Quire"] = NoResult("wrong: error 0.1, 3.0 times its budget")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_measure, "measure", lambda *args: found)
    assert main(["bench", "run", "--quick", "--output", str(tmp_path)]) == 1
    assert f"Quire has no time for {found.rows[2].case}: wrong: error 0.1" in capsys.readouterr().out
