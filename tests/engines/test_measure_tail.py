"""Traces, measures, tables and the plot of `scripts/measure_tail.py`. Measuring itself needs an engine and a GPU."""

import importlib.util
import json
import math
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/measure_tail.py"
ABOUT = {"date": "2026-11-29", "commit": "abc", "python": "3.12", "triton": "3.6.0", "driver": "580"}


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPT.parent))
    found = importlib.util.spec_from_file_location("measure_tail", SCRIPT)
    module = sys.modules["measure_tail"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))
    del sys.modules["measure_tail"], sys.modules["measure_vllm"]


class Steps:
    """An engine whose step takes a second and gives each of at most `most` requests an output."""

    def __init__(self, most: float = math.inf) -> None:
        self.now, self.left, self.most, self.stopped = 0.0, {}, most, None

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def is_busy(self) -> bool:
        return bool(self.left)

    def add(self, number, request) -> None:
        self.left[number] = request.num_outputs

    def step(self):
        self.now += 1.0
        found = [(number, 1) for number in list(self.left)[: min(len(self.left), self.most)]]
        for number, count in found:
            self.left[number] -= count
            if not self.left[number]:
                del self.left[number]
        return found

    def stop(self) -> None:
        self.stopped, self.left = sorted(self.left), {}


def test_a_trace_is_the_same_for_all_backends_and_its_arrivals_alone_follow_the_rate(script):
    slow, fast = script.trace(200, 2.0, 0.3, "a"), script.trace(200, 4.0, 0.3, "a")
    assert slow == script.trace(200, 2.0, 0.3, "a") != script.trace(200, 2.0, 0.3, "b")
    assert [(r.prompt, r.num_outputs) for r in slow] == [(r.prompt, r.num_outputs) for r in fast]
    assert [r.arrival for r in fast] == pytest.approx([r.arrival / 2 for r in slow])
    assert slow[-1].arrival == pytest.approx(100, rel=0.25)
    assert {r.arrival for r in script.trace(20, math.inf, 0.3, "a")} == {0.0}


def test_agents_have_their_first_tokens_in_common_and_others_do_not(script):
    requests = script.trace(100, 1.0, 0.4, "a")
    turns = [r.prompt for r in requests if len(r.prompt) == script.PREFIX + script.TURN]
    others = [r.prompt for r in requests if len(r.prompt) != script.PREFIX + script.TURN]
    assert len({p[: script.PREFIX] for p in turns}) == 1 and len({p[script.PREFIX :] for p in turns}) == len(turns)
    assert len(turns) == pytest.approx(40, abs=15) and len({p[:8] for p in others}) == len(others)
    assert statistics.median(map(len, others)) == pytest.approx(script.PROMPT[0], rel=0.5)
    assert max(r.num_outputs for r in requests) <= script.OUTPUTS[2]


def test_requests_are_sent_when_they_arrive_and_their_waiting_counts_until_each_has_an_output(script):
    engine = Steps()
    requests = [script.Request(0.0, (1,), 3), script.Request(0.5, (1,), 2), script.Request(20.0, (1,), 2)]
    outputs, seconds = script.serve(engine, requests, math.inf, engine.clock, engine.sleep)
    assert outputs == [[(1.0, 1), (2.0, 1), (3.0, 1)], [(2.0, 1), (3.0, 1)], [(21.0, 1)]]
    assert seconds == 21.0 and engine.stopped == [2]
    found = script.judged(requests, outputs, seconds)
    assert found["first_50"] == 1000.0 and found["first_99"] == 1500.0
    assert found["between_50"] == found["between_99"] == 1000.0
    assert found["tokens"] == pytest.approx(6 / 21) and found["at_once"] == 1.0


def test_at_saturation_the_second_half_of_the_time_counts_and_requests_still_wait(script):
    engine = Steps(most=2)
    requests = [script.Request(0.0, (1,), 4) for _ in range(50)]
    outputs, seconds = script.serve(engine, requests, 10.0, engine.clock, engine.sleep)
    assert seconds == 10.0 and engine.stopped == list(range(4, 50))
    found = script.judged(requests, outputs, seconds, saturated=True)
    assert found["tokens"] == 2.0 and found["requests"] == 0.5


def test_a_request_with_more_or_no_outputs_is_an_error(script):
    with pytest.raises(RuntimeError, match="must have 3 outputs, got 4"):
        script.judged([script.Request(0.0, (1,), 3)], [[(1.0, 2), (2.0, 2)]], 2.0)
    engine = Steps()
    engine.add = lambda number, request: None
    with pytest.raises(RuntimeError, match="each request must have outputs"):
        script.serve(engine, [script.Request(0.0, (1,), 3)], math.inf, engine.clock, engine.sleep)


class Engine:
    """In place of the process of an engine: it has measures, and ends at a trace if it is to."""

    def __init__(self, script, backend: str, ends_at: int = 99) -> None:
        self.setup, self.starts, self.asked = SimpleNamespace(backend=backend), [], []
        self.script, self.ends_at = script, ends_at

    def begin(self) -> None:
        pass

    leave = end = begin

    def wait(self) -> None:
        self.starts.append(40.0)

    def ask(self, asked):
        self.asked.append(asked)
        if len(self.asked) == self.ends_at:
            raise self.script.Ended("it ended")
        if asked.profile:
            return {"step": 10.0, "kernels": {"flash_fwd": 4.0, "gemm": 5.0}}
        return dict.fromkeys((*self.script.MEASURES, "requests", "kernels", "memory", "at_once"), 8.0)


def measure(script, engines: list[Engine], **options):
    args = {
        "rate": None, "requests": 100, "agents": 0.3, "seed": 0, "load": [0.5, 1.0], "together": True, "apart": False,
        "profile": True, "rounds": 2, "seconds": math.inf, "span": None,
    }  # fmt: skip
    kept, lines = [], []
    found = script.measure(SimpleNamespace(**args | options), engines, lines.append, lambda f: kept.append(str(f)))
    assert kept[-1] == str(found)
    return found, lines


def test_every_backend_serves_each_trace_once_and_no_engine_sees_a_prompt_twice(script):
    engines = [Engine(script, "FLASH_ATTN"), Engine(script, "CUSTOM")]
    found, _ = measure(script, engines)
    assert found["saturation"] == 8.0 and list(found["profiles"]) == ["FLASH_ATTN", "CUSTOM"]
    assert {load: [len(each) for each in of.values()] for load, of in found["loads"].items()} == {
        "0.5": [2, 2], "1.0": [2, 2],
    }  # fmt: skip
    ours, theirs = engines[1].asked, engines[0].asked[script.SATURATIONS :]  # the first one finds the saturation
    assert sorted(map(str, ours)) == sorted(map(str, theirs))
    assert all(len({asked.seed for asked in engine.asked}) == len(engine.asked) for engine in engines)
    assert {asked.rate for asked in ours} == {4.0, math.inf}


def test_a_backend_that_ends_early_keeps_its_results_and_the_others_go_on(script):
    engines = [Engine(script, "FLASH_ATTN", ends_at=5), Engine(script, "CUSTOM")]
    found, lines = measure(script, engines)
    assert [len(of) for of in found["loads"]["0.5"].values()] == [1, 2]
    assert list(found["loads"]["1.0"]) == ["CUSTOM"] and "it ended" in lines


@pytest.mark.parametrize("seconds, loads", [(5.0, []), (11.0, ["0.5"]), (50.0, ["0.5", "1.0"])])
def test_no_trace_begins_that_would_end_too_late(seconds, loads, script):
    """At half of 8 requests a second, 40 requests take 10 s; at saturation, a trace takes 12."""
    found, lines = measure(script, [Engine(script, "CUSTOM")], seconds=seconds, requests=40, profile=False, rounds=1)
    assert list(found["loads"]) == loads and any("no time for 100%, CUSTOM" in line for line in lines) == (
        len(loads) < 2
    )
    assert found["starts"] == {"CUSTOM": [40.0]}


def test_a_trace_has_the_requests_of_its_seconds_and_time_is_kept_for_profiles(script):
    (engine,) = engines = [Engine(script, "CUSTOM")]
    found, _ = measure(script, engines, span=5.0, load=[0.5], seconds=12.0, rounds=1)
    assert not found["loads"] and list(found["profiles"]) == ["CUSTOM"]
    assert [asked.count for asked in engine.asked] == [400, 400, 400, 20]  # at saturation, and the profile's


def test_an_engine_without_an_answer_ends_with_the_time(script):
    engine = script.Engine(SimpleNamespace(backend="CUSTOM"), print, until=time.perf_counter() + 0.1)
    engine.pipe, theirs = multiprocessing.Pipe()
    theirs.send("an answer")
    assert engine.receive() == "an answer"
    with pytest.raises(script.Ended, match="no answer when the time ended"):
        engine.receive()
    theirs.close()
    with pytest.raises(script.Ended, match="ended early"):
        engine.receive()


def test_a_profile_parts_a_step_into_attention_writes_other_kernels_and_idle_time(script):
    kernels = {
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90>": 3.0, "kernel_unified_attention": 1.0,
        "hopper_schedule_kernel": 0.5, "reshape_and_cache_flash_kernel": 0.25, "nvjet_tst_gemm": 4.0,
    }  # fmt: skip
    parts = script.parts({"step": 10.0, "kernels": kernels})
    assert parts == {"attention": 4.5, "writes": 0.25, "others": 4.0, "idle": 1.25}


@pytest.mark.parametrize("share, value", [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_a_value_that_was_measured(script, share, value):
    assert script.percentile(list(range(100, 0, -1)), share) == value


def measured(**values: list[float]) -> list[dict[str, float]]:
    names = ("tokens", "first_50", "first_99", "between_50", "between_99", "kernels", "memory")
    count = len(next(iter(values.values())))
    return [{name: values.get(name, [1.0] * count)[i] for name in names} for i in range(count)]


def served(script, loads: dict[str, dict], **asked) -> dict:
    setups = [{"backend": "FLASH_ATTN"}, {"backend": "CUSTOM"}]
    given = {
        "engine": "vllm", "model": "llama-3.1-8b", "layers": None, "requests": 1000, "span": None, "rounds": 3,
        "agents": 0.3, "drafts": 0, "acceptance": [], "setups": setups,
    }  # fmt: skip
    where = {"device": "a device", "torch": "2.11.0", "version": "0.26.0", "saturation": 4.0, "profiles": {}}
    return where | {"asked": given | asked, "loads": loads, "starts": {}, "apart": {}}


@pytest.fixture
def result(script) -> dict:
    low = {
        "FLASH_ATTN": measured(tokens=[100.0, 101.0, 102.0], between_99=[10.0, 20.0, 15.0]),
        "CUSTOM": measured(tokens=[110.0, 111.0, 112.0], between_99=[12.0, 13.0, 14.0], kernels=[0, 3, 0]),
    }
    found = served(script, {"0.5": low, "1.0": {"CUSTOM": measured(tokens=[9.0])}})
    found["profiles"] = {"CUSTOM": {"step": 10.0, "kernels": {"hopper_kernel": 4.0}}}
    return found | {"apart": {"FLASH_ATTN": [50.0], "CUSTOM": [40.0]}}


def test_a_difference_on_which_rounds_do_not_agree_is_in_brackets(script, result):
    cells = {(load, words): own for load, words, own in script.rows_of(result)}
    assert cells["0.5", script.MEASURES["tokens"]] == ["101", "111, 1.099"]
    assert cells["0.5", script.MEASURES["between_99"]] == ["15.0", "13.0 (0.933)"]
    assert cells["0.5", script.OTHERS["kernels"]] == ["1", "3"]
    assert cells["1.0", script.MEASURES["tokens"]] == ["not measured", "9"]
    assert ("1.0", script.MEASURES["first_99"]) not in cells


def test_the_page_says_what_was_served_and_the_plot_has_a_line_for_each_backend(script, result, tmp_path):
    page = script.markdown(ABOUT | {"notes": ["A note."]}, [result], ["tail.png"])
    for words in ("vllm 0.26.0", "Saturation is 4.00", "30% of them turns of agents", "| 50% |", "A note."):
        assert words in page
    assert "| 50.0 | 40.0 |" in page and "| attention | 4.00 |" in page and "Medians of 1 to 3 rounds" in page
    figure = script.draw(result)
    assert [len(axis.containers) for axis in figure.axes] == [2, 2, 2]
    figure.savefig(tmp_path / "tail.png")


def test_runs_that_served_the_same_are_joined_and_others_have_a_section_and_a_plot_each(
    script, result, tmp_path, monkeypatch, capsys
):
    paths = []
    high = {"0.9": {"FLASH_ATTN": measured(tokens=[8.0]), "CUSTOM": measured(tokens=[9.0])}}
    for i, each in enumerate([result, served(script, high) | {"saturation": 5.0}, served(script, high, agents=1.0)]):
        paths.append(tmp_path / f"{i}.json")
        paths[-1].write_text(json.dumps({"about": ABOUT, "results": [each]}))
    out = tmp_path / "tail"
    monkeypatch.setattr(sys, "argv", ["measure_tail.py", "--join", *map(str, paths), "--out", str(out)])
    script.main()
    page = capsys.readouterr().out
    assert page.count("## ") == 2 and "## vllm, agents alone" in page and "Saturation is 4.00 and 5.00" in page
    assert page.index("| 50% |") < page.index("| 90% |") < page.index("| 100% |") < page.index("agents alone")
    assert "(tail.png)" in page and "(tail-2.png)" in page
    assert {path.name for path in tmp_path.iterdir()} >= {"tail.md", "tail.json", "tail.png", "tail-2.png"}
    assert len(json.loads(out.with_suffix(".json").read_text())["results"]) == 2


def test_an_argument_of_the_engine_is_a_number_if_it_is_one_and_text_otherwise(script):
    words = "max_num_seqs=64", "sampling_backend=pytorch", "disable_cuda_graph=True"
    assert dict(map(script.option, words)) == {
        "max_num_seqs": 64, "sampling_backend": "pytorch", "disable_cuda_graph": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    "words, error",
    [
        (["--load", "1.5"], "shares above 0 and up to 1"),
        (["--requests", "1"], "must be at least"),
        (["--engine", "sglang", "--profile"], "must be left out with --engine sglang"),
        (["--drafts", "2", "--acceptance", "0.5"], "a number for each of 2 drafts"),
    ],
)
def test_options_out_of_range_are_refused(script, words, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["measure_tail.py", *words])
    with pytest.raises(SystemExit):
        script.main()
    assert error in capsys.readouterr().err
