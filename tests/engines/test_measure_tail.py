"""Traces, measures, tables and the plot of `scripts/measure_tail.py`. Measuring itself needs an engine and a GPU."""

import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path

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
    """An engine whose step takes a second and gives each request an output."""

    def __init__(self) -> None:
        self.now, self.left = 0.0, {}

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
        found = [(number, 1) for number in self.left]
        self.left = {number: left - 1 for number, left in self.left.items() if left > 1}
        return found


def test_a_trace_is_the_same_for_all_backends_and_its_arrivals_alone_follow_the_rate(script):
    slow, fast = script.trace(200, 2.0, 0.3, seed=7), script.trace(200, 4.0, 0.3, seed=7)
    assert slow == script.trace(200, 2.0, 0.3, seed=7) != script.trace(200, 2.0, 0.3, seed=8)
    assert [(r.prompt, r.num_outputs) for r in slow] == [(r.prompt, r.num_outputs) for r in fast]
    assert [r.arrival for r in fast] == pytest.approx([r.arrival / 2 for r in slow])
    assert slow[-1].arrival == pytest.approx(100, rel=0.25)
    assert {r.arrival for r in script.trace(20, math.inf, 0.3, seed=7)} == {0.0}


def test_agents_have_their_first_tokens_in_common_and_others_do_not(script):
    requests = script.trace(100, 1.0, 0.4, seed=1)
    turns = [r.prompt for r in requests if len(r.prompt) == script.PREFIX + script.TURN]
    others = [r.prompt for r in requests if len(r.prompt) != script.PREFIX + script.TURN]
    assert len({p[: script.PREFIX] for p in turns}) == 1 and len({p[script.PREFIX :] for p in turns}) == len(turns)
    assert len(turns) == pytest.approx(40, abs=15) and len({p[:8] for p in others}) == len(others)
    assert statistics.median(map(len, others)) == pytest.approx(script.PROMPT[0], rel=0.5)
    assert max(r.num_outputs for r in requests) <= script.OUTPUTS[2]


def test_requests_are_sent_when_they_arrive_and_their_waiting_counts(script):
    engine = Steps()
    requests = [script.Request(0.0, (1,), 3), script.Request(0.5, (1,), 2), script.Request(20.0, (1,), 2)]
    outputs = script.serve(engine, requests, engine.clock, engine.sleep)
    assert outputs == [[(1.0, 1), (2.0, 1), (3.0, 1)], [(2.0, 1), (3.0, 1)], [(21.0, 1), (22.0, 1)]]
    found = script.judged(requests, outputs)
    assert found["first_50"] == 1000.0 and found["first_99"] == 1500.0
    assert found["between_50"] == found["between_99"] == 1000.0
    assert found["tokens"] == pytest.approx(7 / 22) and found["requests"] == pytest.approx(3 / 22)


def test_a_request_without_all_of_its_outputs_is_an_error(script):
    with pytest.raises(RuntimeError, match="must have 3 outputs, got 2"):
        script.judged([script.Request(0.0, (1,), 3)], [[(1.0, 1), (2.0, 1)]])


@pytest.mark.parametrize("share, value", [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_a_value_that_was_measured(script, share, value):
    assert script.percentile(list(range(100, 0, -1)), share) == value


def measured(**values: list[float]) -> list[dict[str, float]]:
    names = ("tokens", "first_50", "first_99", "between_50", "between_99", "kernels", "memory")
    count = len(next(iter(values.values())))
    return [{name: values.get(name, [1.0] * count)[i] for name in names} for i in range(count)]


@pytest.fixture
def result(script) -> dict:
    loads = {
        "0.5": {
            "FLASH_ATTN": measured(tokens=[100.0, 101.0, 102.0], between_99=[10.0, 20.0, 15.0]),
            "CUSTOM": measured(tokens=[110.0, 111.0, 112.0], between_99=[12.0, 13.0, 14.0], kernels=[0, 3, 0]),
        }
    }
    asked = {
        "engine": "vllm", "model": "llama-3.1-8b", "layers": None, "requests": 1000, "rounds": 3, "agents": 0.3,
        "drafts": 0, "acceptance": [],
    }  # fmt: skip
    where = {"device": "a device", "torch": "2.11.0", "version": "0.26.0", "saturation": 4.0}
    return where | {"asked": asked, "loads": loads, "starts": {"FLASH_ATTN": [50.0], "CUSTOM": [40.0]}}


def test_a_difference_within_the_rounds_is_in_brackets(script, result):
    cells = {words: own for _, words, own in script.rows_of(result)}
    assert cells[script.MEASURES["tokens"]] == ["101", "111, 1.099"]
    assert cells[script.MEASURES["between_99"]] == ["15.0", "13.0 (0.867)"]
    assert cells[script.OTHERS["kernels"]] == ["1", "3"]


def test_the_page_says_what_was_served_and_the_plot_has_a_line_for_each_backend(script, result, tmp_path):
    page = script.markdown(ABOUT | {"notes": ["A note."]}, result, "tail.png")
    for words in ("vllm 0.26.0", "Saturation is 4.00", "30% of them turns of agents", "| 50% |", "A note."):
        assert words in page
    figure = script.draw(result)
    assert [len(axis.containers) for axis in figure.axes] == [2, 2, 2]
    figure.savefig(tmp_path / "tail.png")


def test_the_page_is_written_again_from_its_numbers(script, result, tmp_path, monkeypatch, capsys):
    kept = tmp_path / "tail.json"
    kept.write_text(json.dumps({"about": ABOUT, "result": result}))
    monkeypatch.setattr(sys, "argv", ["measure_tail.py", "--join", str(kept)])
    script.main()
    assert "# The tail of a loaded server: vllm" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, error",
    [
        (["--load", "1.5"], "shares between 0 and 1"),
        (["--requests", "1"], "must be at least"),
        (["--drafts", "2", "--acceptance", "0.5"], "a number for each of 2 drafts"),
    ],
)
def test_options_out_of_range_are_refused(script, words, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["measure_tail.py", *words])
    with pytest.raises(SystemExit):
        script.main()
    assert error in capsys.readouterr().err
