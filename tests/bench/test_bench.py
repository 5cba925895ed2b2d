"""The method, the reports and the command, as far as they need no GPU."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from PIL import Image
from rich.console import Console

import quire
from quire.bench import measure, report
from quire.bench.cases import Case, cases
from quire.bench.html import write
from quire.bench.peers import NAIVE, PEERS, Peer
from quire.bench.plots import colours
from quire.bench.roofline import DATA_SHEETS, Ceilings, from_data_sheet
from quire.cli import bench as command
from quire.cli import main
from quire.targets import TARGETS

CEILINGS = Ceilings("a made-up device", 4e12, 800e12, "measured")


def result(micros: float, spread: float = 0.02) -> dict:
    return {
        "micros": micros, "low": micros * (1 - spread), "high": micros * (1 + spread), "replays": 9, "host_micros": 12.0, "plan_micros": None,
        "scratch_bytes": 4e6, "error": 1e-3, "of_budget": 0.4, "bytes_per_second": 1e12, "flops_per_second": 1e13,
    }  # fmt: skip


def made_up(scale: float = 1.0, names=("Quire", "FlashAttention 3", "Quire, naive")) -> dict:
    """A report with times that nobody measured."""
    rows = []
    for i, case in enumerate(cases(["decode", "share", "batch", "prefill"])):
        results = {
            name: result((CEILINGS.floor(case) + 3) * (1 + j) * (scale if name == "Quire" else 1))
            for j, name in enumerate(names)
        }
        if i == 3:
            results["FlashAttention 3"] = {"why": "does not serve <sinks>"}
        rows.append(report.row_of(case, CEILINGS, results))
    ranges = [
        {"num_seqs": 1, "captured_for": 4096, "seq_len": n, "micros": 10.0, "own_micros": 9.8} for n in (128, 512, 2048)
    ]
    facts = report.provenance(CEILINGS.device, "abc1234")
    return {
        "provenance": facts,
        "ceilings": CEILINGS.as_dict(),
        "peers": dict.fromkeys(names, "1.0"),
        "rows": rows,
        "graph_range": ranges,
    }


def test_a_floor_is_bytes_or_flops_whichever_takes_longer():
    decode, prompt = Case("d", "decode", ((1, 4096),)), Case("p", "prefill", ((8192, 8192),))
    assert CEILINGS.bound(decode) == "memory" and CEILINGS.floor(decode) == pytest.approx(1e6 * decode.nbytes / 4e12)
    assert CEILINGS.bound(prompt) == "compute" and CEILINGS.floor(prompt) == pytest.approx(1e6 * prompt.flops / 800e12)
    assert {target for target, *_ in DATA_SHEETS.values()} == set(TARGETS)
    assert all(from_data_sheet(name).source == "data sheet" for name in DATA_SHEETS)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="tables as on a GPU, which the interpreter walks slowly")
def test_a_sample_is_held_against_the_oracle():
    case = Case("small", "mixed", ((1, 70), (40, 90), (3, 200)), model="gpt-oss-120b, local", dtype="float32")
    inputs = measure.make_inputs(case, "cpu")
    assert len({int(page) for table in inputs.tables for row in table for page in row if page}) > 0
    table, sample = inputs.tables[1], measure.Sample(inputs, inputs.tables[1])
    out = quire.attention(inputs.q, inputs.cache, inputs.plan(table), sinks=inputs.sinks)
    assert sample.judge(out).passed
    assert not measure.Sample(inputs, inputs.tables[0]).judge(out).passed
    for token in (0, 1, 40, 41, 43):  # ends of sequences
        wrong = out.clone()
        wrong[token] *= 1.001
        assert not sample.judge(wrong).passed
    out[20] = float("nan")
    assert not sample.judge(out).passed


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter has no bfloat16")
def test_every_kind_of_case_is_laid_out_and_judged():
    kinds = {
        (c.dtype, c.kv_dtype, c.spec.sinks, c.spec.sliding_window, c.page_size): c
        for c in sorted(cases(), key=lambda c: -c.spec.num_q_heads)
    }
    assert len(kinds) > 10
    for case in kinds.values():
        small = replace(case, lens=((2, 150),))
        inputs = measure.make_inputs(small, "cpu")
        out = quire.attention(inputs.q, inputs.cache, inputs.plan(inputs.tables[0]), sinks=inputs.sinks)
        sample = measure.Sample(inputs, inputs.tables[0])
        assert sample.judge(out).passed and not sample.judge(out * 1.2).passed, case


def test_tables_share_no_page():
    inputs = measure.make_inputs(Case("small", "decode", ((1, 70), (1, 33))), "cpu", table_len=500)
    pages = [int(p) for table in inputs.tables for row, n in zip(table, (5, 3), strict=True) for p in row[:n]]
    assert len(pages) == len(set(pages)) == inputs.cache.num_pages and inputs.tables[0].shape[1] == 32


def test_replays_are_in_turn_and_summed_up():
    order = []
    timers = {name: lambda name=name, at=at: order.append(name) or at for name, at in (("a", 3.0), ("b", 5.0))}
    times = measure.in_turn(timers, seconds=0.01, least=10)
    assert order[:20] == ["a", "b"] * 10 and set(times["a"]) == {3.0} and len(times["b"]) >= 10
    slow = measure.in_turn(timers | {"slow": lambda: time.sleep(0.02) or 7.0}, seconds=0.01, least=10)
    assert slow["slow"] == [7.0] * 3 and len(slow["a"]) >= 10
    assert measure.summary([1.0] + [2.0] * 8 + [90.0]) == {"micros": 2.0, "low": 2.0, "high": 2.0, "replays": 10}


def test_peers_are_reported_absent_with_the_reason():
    assert [p.name for p in PEERS if p.module == "quire" and p.absent() is None and p.version() == quire.__version__]
    assert "quire_that_nobody_wrote" in Peer("none", "quire_that_nobody_wrote", lambda inputs, out: None).absent()


def test_a_report_is_files_that_hold_the_numbers(tmp_path):
    found = made_up()
    written = write(found, tmp_path)
    names = {path.name for path in written}
    assert {
        "report.html",
        "results.json",
        "results.md",
        "roofline.png",
        "ratios.png",
        "shares.png",
        "length.png",
        "batch.png",
        "graph_range.png",
    } == names
    assert all(path.stat().st_size > 1000 for path in written)
    assert report.load(tmp_path) == json.loads(json.dumps(found))
    page = (tmp_path / "report.html").read_text()
    assert 'name="viewport"' in page and page.count("data:image/png;base64,") == 6
    assert not re.search(r'(src|href)="(?!data:)', page)  # nothing outside itself
    assert "does not serve &lt;sinks&gt;" in page and "<sinks>" not in page
    row = next(r for r in found["rows"] if r["case"] == "decode 32x2048")
    for text in (page, (tmp_path / "results.md").read_text()):
        assert (
            "decode 32x2048" in text
            and f"{row['floor_micros']:.1f}" in text
            and f"{row['results']['Quire']['micros']:.1f}" in text
        )
        assert "abc1234" in text and "1.020 of the time" in text and "0.50 (" in text
    assert row["results"]["Quire"]["of_floor"] == pytest.approx(row["floor_micros"] / row["results"]["Quire"]["micros"])
    assert "graph_range" in found and report.geometric_means(found["rows"])["FlashAttention 3"][0] == pytest.approx(0.5)


def test_libraries_keep_their_colours_in_pictures(tmp_path):
    """A picture has few colours, so that phones load it: that of a library with two points must not become another's."""
    found = report.load(Path(__file__).parents[2] / "docs" / "results" / "h200.json")
    write(found, tmp_path)
    picture = Image.open(tmp_path / "shares.png").convert("RGB")
    pixels = {color for _, color in picture.getcolors(1 << 16)}
    seen = report.peers_in([row for row in found["rows"] if "share" in row["sets"]])
    for peer, tint in colours(report.peers_in(found["rows"])).items():
        rgb = [int(tint[i : i + 2], 16) for i in (1, 3, 5)]
        nearest = min(sum(abs(a - b) for a, b in zip(rgb, pixel, strict=True)) for pixel in pixels)
        assert nearest <= 6 or peer not in seen or peer == NAIVE, (peer, tint, nearest)


def test_a_report_is_written_again_from_its_numbers(tmp_path, capsys):
    report.save(made_up(), tmp_path / "a")
    assert main(["bench", "--report", str(tmp_path / "a" / "results.json"), "--output", str(tmp_path / "b")]) == 0
    assert (
        "report.html" in capsys.readouterr().out
        and (tmp_path / "b" / "ratios.png").exists()
        and not (tmp_path / "a" / "report.html").exists()
    )
    assert main(["bench", "--report", str(tmp_path / "a")]) == 0 and (tmp_path / "a" / "report.html").exists()
    assert report.load(tmp_path / "a") == report.load(tmp_path / "b")


def as_with_a_gpu(monkeypatch, compare) -> None:
    """Let the command measure by `compare`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(report, "driver", lambda: "none")
    for name, stand_in in {
        "compare": compare,
        "measure_ceilings": lambda: CEILINGS,
        "compile_all": lambda *args: (),
        "current_target": lambda: None,
    }.items():
        monkeypatch.setattr(command, name, stand_in)


def test_slow_peers_take_part_where_it_is_quick_or_they_are_named(tmp_path, monkeypatch):
    asked = {}

    def compare(case, peers, seconds):
        asked[case.name] = [peer.name for peer in peers]
        return {peer.name: result(10.0) for peer in peers}

    as_with_a_gpu(monkeypatch, compare)
    arguments = ["bench", "--set", "decode", "--output", str(tmp_path)]
    assert main(arguments) == 0
    flex, slow = "FlexAttention, not paged", [peer.name for peer in PEERS if peer.slow]
    assert (
        slow == [flex]
        and flex in asked["decode 1x4096"]
        and flex not in asked["decode 1x1024"]
        and "SDPA, not paged" in asked["decode 1x1024"]
    )
    rows = {row["case"]: row["results"] for row in report.load(tmp_path)["rows"]}
    assert "micros" in rows["decode 1x4096"][flex] and "some cases only" in rows["decode 1x1024"][flex]["why"]
    assert main([*arguments, "--peers", "Quire,Flex"]) == 0 and flex in asked["decode 1x1024"]


def test_a_bench_that_is_stopped_reports_what_it_has(tmp_path, monkeypatch, capsys):
    def compare(case, peers, seconds):
        if case.name == "decode 8x128":
            raise KeyboardInterrupt
        return {peer.name: result(10.0) for peer in peers}

    as_with_a_gpu(monkeypatch, compare)
    assert main(["bench", "--set", "decode", "--output", str(tmp_path)]) == 0
    assert "this is the report of 7 of 29 cases" in capsys.readouterr().out
    assert len(report.load(tmp_path)["rows"]) == 7 and (tmp_path / "report.html").exists()


def test_the_naive_kernel_is_no_other_library():
    row = report.row_of(
        cases(["decode"])[0],
        CEILINGS,
        {"Quire": result(9.0), "Quire, naive": result(2.0), "SDPA, not paged": result(1.0)},
    )
    assert report.best_other(row) is None
    row["results"]["vLLM Triton"] = result(5.0)
    assert report.best_other(row) == ("vLLM Triton", 5.0)


@pytest.mark.parametrize(
    ("scale", "code", "word"), [(1.0, 0, "0 slower"), (1.03, 0, "0 slower"), (1.2, 1, "slower"), (0.8, 0, "faster")]
)
def test_comparing_two_runs(tmp_path, capsys, scale, code, word):
    for name, report_of in (("a", made_up()), ("b", made_up(scale))):
        report.save(report_of, tmp_path / name)
    assert main(["bench", "--compare", str(tmp_path / "a"), str(tmp_path / "b" / "results.json")]) == code
    text = capsys.readouterr().out
    assert word in text and "other libraries on the same cases: 1.000" in text


def test_a_case_that_was_lost_is_no_pass(tmp_path):
    before, after = made_up(), made_up()
    after["rows"][0]["results"]["Quire"] = {"why": "wrong: error 3"}
    for name, some in (("a", before), ("b", after)):
        report.save(some, tmp_path / name)
    assert main(["bench", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1


@pytest.mark.parametrize("content", [None, "[]", "{}", "not json"])
def test_what_is_no_report_is_refused(tmp_path, capsys, content):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    assert main(["bench", "--compare", str(path), str(path)]) == 2
    assert "must be a results.json of `quire bench`" in capsys.readouterr().err


def test_without_a_gpu_it_tells_the_roofline(tmp_path, capsys):
    assert main(["bench", "--device", "MI300X", "--quick", "--no-compile", "--output", str(tmp_path)]) == 0
    text, found = capsys.readouterr().out, report.load(tmp_path)
    assert "5.30 TB/s" in text and len(found["rows"]) == 12 and (tmp_path / "roofline.png").exists()
    assert {row["bound"] for row in found["rows"]} == {"memory", "compute"}


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
def test_without_a_gpu_it_tells_what_kernels_need(tmp_path):
    assert main(["bench", "--device", "A100", "--only", "decode 1x4096 12", "--output", str(tmp_path)]) == 0
    row = report.load(tmp_path)["rows"][0]
    (compiled,) = row["compiled"]
    assert (
        compiled["kernel"] == "split_kv_kernel"
        and compiled["registers"] > 32
        and compiled["spills"] == 0
        and compiled["occupancy"] >= 1
    )
    assert "shares" in row["plan"] and str(compiled["registers"]) in (tmp_path / "report.html").read_text()


def test_fields_of_a_tile_are_named():
    assert command.fields("block_n=128,num_warps=8") == {"block_n": 128, "num_warps": 8}
    for text in ("block_k=3", "block_n", "block_n=many"):
        with pytest.raises(SystemExit) as leaving:
            main(["bench", "--config", text])
        assert leaving.value.code == 2


def test_graphs_for_a_range_are_measured_beside_graphs_for_each_length(monkeypatch):
    asked = []

    def compare(case, peers, seconds, table_len):
        asked.append((case.name, table_len))
        return {"own": result(10.0), "range": result(10.4)}

    monkeypatch.setattr(command, "compare", compare)
    console = Console(quiet=True)
    with command.bar(console) as progress:
        rows = list(command.capture_ranges(0.1, progress, console))
    assert ("decode 32x2048", 16384) in asked and all(row["seq_len"] <= row["captured_for"] for row in rows)
    assert report.range_line(rows).startswith("Graphs captured for a range of lengths take 1.040 of the time")
    monkeypatch.setattr(command, "compare", lambda *args, **kwargs: {"own": result(10.0), "range": {"why": "wrong"}})
    with command.bar(console) as progress, pytest.raises(RuntimeError, match="must be right to be timed"):
        next(command.capture_ranges(0.1, progress, console))


@pytest.mark.parametrize("arguments", [["--only", "no such case"], ["--trace", "/nowhere"]])
def test_bad_arguments_are_told(arguments, capsys):
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err


def test_cases_are_listed(capsys):
    assert main(["bench", "--list", "--set", "models"]) == 0
    assert "gpt-oss-120b" in capsys.readouterr().out


def test_bad_results_of_our_own_leave_with_1(tmp_path, monkeypatch):
    found = made_up()
    found["rows"][2]["results"]["Quire"] = {"why": "wrong: error 0.1, 3.0 times its budget"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "measure", lambda *args: found)
    monkeypatch.setattr(report, "driver", lambda: "none")
    assert main(["bench", "--quick", "--output", str(tmp_path)]) == 1
