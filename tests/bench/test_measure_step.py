"""`scripts/measure_step.py` in its tiny mode, and what it does before it times."""

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

import quire
from quire.dispatch.device import compile_for
from quire.targets import TARGETS

SCRIPT = Path(__file__).parents[2] / "scripts/measure_step.py"
INTERPRETED = triton.knobs.runtime.interpret


@pytest.fixture(scope="module")
def script():
    found = importlib.util.spec_from_file_location("measure_step", SCRIPT)
    module = sys.modules["measure_step"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    yield module
    del sys.modules["measure_step"]


def test_the_tiny_mode_prints_a_row_for_each_case(script, capsys):
    script.main(["--tiny", "--seconds", "0", "--commit", "abc"])
    said = capsys.readouterr().out
    rows = re.findall(r"^\| ((?:decode|prefill) \S+) \| ([\d.,| ]+) \|$", said, re.MULTILINE)
    on_a_cpu = not (INTERPRETED or torch.cuda.is_available())
    expected = [case.name for name in script.TABLES for case in script.TABLES[name].tiny]
    if on_a_cpu:
        expected = [case.name for name in ("new-tokens", "e4m3-output") for case in script.TABLES[name].tiny]
    assert [name for name, _ in rows] == expected
    assert all(float(cell.replace(",", "")) > 0 for _, cells in rows for cell in cells.split(" | "))
    assert [len(cells.split(" | ")) for _, cells in rows] == ([4, 4, 3] if on_a_cpu else [4, 4, 3, 3, 3])
    assert ("batch-invariant: PyTorch has no such plans" in said) == on_a_cpu
    assert "Quire abc" in said


def test_a_wrong_result_is_not_timed(script):
    table = script.TABLES["new-tokens"]

    def wrong(inputs):
        calls = table.columns(inputs)
        return calls | {"one call": [lambda: 1.01 * calls["one call"][0]()]}

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with pytest.raises(SystemExit, match="one call: wrong"):
        script.measure(replace(table, columns=wrong), table.tiny[0], device, 0)


@pytest.mark.skipif(INTERPRETED, reason="plans for a GPU")
def test_every_case_has_a_plan_on_hopper_gpus_and_new_tokens_one_launch(script):
    for name, table in script.TABLES.items():
        for case in table.cases:
            zeros = torch.zeros(len(case.lens), max(case.pages_per_seq), dtype=torch.int32)
            starts = None if case.bounds["max_query_len"] == 1 else torch.zeros(len(case.lens) + 1, dtype=torch.int32)
            batch = quire.Batch(zeros, zeros[:, 0].contiguous(), starts)
            with compile_for(TARGETS["sm90"].properties, lambda *facts: None):
                for options in ({}, {"batch_invariant": True})[: 2 if name == "batch-invariant" else 1]:
                    plan = quire.plan(case.spec, batch, **case.bounds, **options)
                    cache = quire.PagedKVCache.empty(case.spec, 4, case.page_size)
                    assert name != "new-tokens" or plan.appender(cache) is not None, case.name


def test_without_a_gpu_the_script_says_what_to_pass(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU here; pass --tiny"):
        script.main([])
