"""A history of runs says which cases became slower."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/keep_history.py"
RUN = ROOT / "docs/results/h200.json"
keep_history = runpy.run_path(str(SCRIPT))
HERE = {"device": "GPU", "code": None}


def runs(*micros: float, **facts: str) -> list[dict]:
    return [HERE | facts | {"micros": {"case": time}} for time in micros]


@pytest.mark.parametrize(
    ("before", "now", "is_slower"),
    [
        ((10.0, 10.2, 9.9), 10.6, True),
        ((10.0, 10.2, 9.9), 10.25, False),  # within 3 %
        ((10.0, 10.8, 9.9), 10.7, False),  # it took longer before
        ((10.0, 10.0), 12.0, False),  # two runs say too little
        ((9.0, *[12.0] * 7), 12.1, False),  # only the last seven count
        ((*[12.0] * 4, *[10.0] * 7), 11.0, True),
    ],
)
def test_a_case_became_slower_if_it_takes_longer_than_in_each_run_before_and_than_the_median(before, now, is_slower):
    found = keep_history["verdicts"](runs(*before), runs(now)[0])
    assert [sentence.partition(" µs")[0] for sentence in found] == [f"case takes {now:.4g}"] * is_slower


def test_only_runs_of_the_same_device_are_compared():
    assert not keep_history["verdicts"](runs(1.0, 1.0, 1.0, device="another"), runs(9.0)[0])
    assert not keep_history["verdicts"](runs(1.0, 1.0, 1.0, code="A100"), runs(9.0)[0])


def test_a_case_that_lost_its_time_is_named():
    assert keep_history["verdicts"](runs(1.0), HERE | {"micros": {}}) == ["case has no time"]


def test_a_run_is_added_to_the_file_and_a_slower_one_leaves_with_1(tmp_path, monkeypatch, capsys):
    history = tmp_path / "history.json"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(RUN), str(history)])
    for number in (1, 2, 3):
        with pytest.raises(SystemExit) as left:
            keep_history["main"]()
        assert not left.value.code and len(json.loads(history.read_text())) == number
    kept = json.loads(history.read_text())
    assert kept[0]["device"] == "NVIDIA H200" and len(kept[0]["micros"]) > 40
    case = next(iter(kept[0]["micros"]))
    for run in kept:
        run["micros"][case] /= 2
    history.write_text(json.dumps(kept))
    with pytest.raises(SystemExit) as left:
        keep_history["main"]()
    assert left.value.code == 1 and capsys.readouterr().out.splitlines()[-1].startswith(f"{case} takes ")
    assert len(json.loads(history.read_text())) == 4
