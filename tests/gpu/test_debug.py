"""Recorded calls and `quire doctor` on a GPU."""

import re

import pytest
import torch

import quire
from quire import debug
from quire.cli import main
from quire.testing import make_problem

SPEC = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)


def test_a_call_on_a_gpu_is_replayed_there_and_on_a_cpu(tmp_path):
    problem = make_problem(SPEC, ((1, 300), (200, 400)), device="cuda")
    plan = quire.plan(SPEC, problem.batch, **problem.bounds)
    for contents in (False, True):
        with debug.record(tmp_path / "call.quire", contents=contents):
            quire.attention(problem.q, problem.cache, plan)
        call = debug.load(tmp_path / "call.quire")
        here = debug.replay(call, "cuda")
        assert here.passed and here.notes == [] and str(plan.launch) in here.plan
        assert debug.replay(call, "cpu").passed


def test_calls_while_a_graph_is_captured_are_not_recorded(tmp_path):
    problem = make_problem(SPEC, ((1, 300),), device="cuda")
    plan = quire.plan(SPEC, problem.batch, **problem.bounds)
    quire.attention(problem.q, problem.cache, plan)  # which compiles
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="was not written"), debug.record(tmp_path / "call.quire"):
        with torch.cuda.graph(graph):
            quire.attention(problem.q, problem.cache, plan)
        graph.replay()


def test_this_machine_is_fit(capsys):
    assert main(["doctor"]) == 0, capsys.readouterr().out
    text = capsys.readouterr().out
    assert re.search(r"attention \((block|split_kv)\) in float16 \(split keys", text), text
    assert "since its predicted time is the least" in text
