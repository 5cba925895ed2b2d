"""`quire check --grid`: drawn cases against the oracle, on what this machine has."""

import json
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

import quire
from quire import targets
from quire.cli import check_grid, main
from quire.cli.exit_codes import INTERRUPTED
from quire.targets import TARGETS, Launch, compiling
from quire_tools.bench.grid import draw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = triton.knobs.runtime.interpret


def test_drawn_cases_pass_here_and_are_those_of_the_bench(capsys):
    assert main(["check", "--grid", "6", "--seed", "1", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert [line["feature"].split(":")[0] for line in lines] == [f"grid 1/{i}" for i in range(1, 7)]
    assert all(line["passed"] and line["why"] is None and 0 < line["over_budget"] <= 1 for line in lines)
    assert len({line["dtype"] for line in lines}) == 2
    heads = [case.model.split("/")[2] for case in draw(6, 1)]
    assert [line["feature"].split(", ")[1].split("/")[2] for line in lines] == heads


def test_drawn_cases_over_latents_pass_here_and_are_those_of_the_bench(capsys):
    assert main(["check", "--grid", "6", "--seed", "1", "--latents", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert all(line["passed"] and line["why"] is None and 0 < line["over_budget"] <= 1 for line in lines)
    heads = [case.model for case in draw(6, 1, latents=True)]
    assert [line["feature"].split(", ")[1] for line in lines] == heads


def test_a_dtype_may_be_named(capsys):
    assert main(["check", "--grid", "2", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(" float32 ") == 2 and "2 passed, 0 failed" in printed


def test_a_case_that_raises_has_failed_and_the_others_are_checked(capsys, monkeypatch):
    right = check_grid.check_case

    def check_case(case, device):
        if case.name.startswith("grid 2/2:"):
            raise RuntimeError("the compiler gave up\nand said more")
        return right(case, device)

    monkeypatch.setattr(check_grid, "check_case", check_case)
    assert main(["check", "--grid", "3", "--seed", "2"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL: RuntimeError: the compiler gave up\n" in printed and "2 passed, 1 failed" in printed
    assert main(["check", "--grid", "3", "--seed", "2", "--json"]) == 1
    assert [line["why"] for line in json.loads(capsys.readouterr().out)] == [
        None,
        "RuntimeError: the compiler gave up",
        None,
    ]


def test_a_wrong_result_fails(monkeypatch):
    right = check_grid.attention
    monkeypatch.setattr(check_grid, "attention", lambda q, *args, **options: right(q * 1.05, *args, **options))
    assert main(["check", "--grid", "3", "--seed", "1", "--json"]) == 1


def test_an_interrupt_prints_what_was_checked(capsys, monkeypatch):
    right = check_grid.check_case

    def check_case(case, device):
        if case.name.startswith("grid 1/3:"):
            raise KeyboardInterrupt
        return right(case, device)

    monkeypatch.setattr(check_grid, "check_case", check_case)
    assert main(["check", "--grid", "5", "--seed", "1"]) == INTERRUPTED
    captured = capsys.readouterr()
    assert "2 passed, 0 failed" in captured.out and captured.err.startswith("interrupted after 2 of 5")


@pytest.mark.parametrize("arguments", [["--seed", "3"], ["--grid", "0"], ["--grid", "2", "--seed", "x"]])
def test_bad_arguments_leave_with_2(arguments, capsys):
    try:
        code = main(["check", *arguments])
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2 and "--" in capsys.readouterr().err


@pytest.mark.skipif(INTERPRETED, reason="compiles nothing under Triton's interpreter")
def test_what_a_drawn_case_launches_is_compiled_beforehand(monkeypatch):
    """Otherwise a grid compiles on one core. The compiler is replaced by what counts the calls of it."""
    compiled = []

    def take_stand_in(self, key, signature, device, *others, **more):
        compiled.append(key)
        return self.device_caches[device][0].setdefault(key, SimpleNamespace())

    monkeypatch.setattr(JITFunction, "_do_compile", take_stand_in)
    monkeypatch.setattr(targets, "inspect", lambda name, *args: name)
    launches = []
    monkeypatch.setattr(targets, "compile_all", lambda some, target: launches.extend(some) or iter(some))
    monkeypatch.setattr(targets, "current_target", lambda: None)
    cases = check_grid.draw_problems(16, 1, torch.device("cpu"), [torch.bfloat16, torch.float16])
    assert list(check_grid.compile_all(cases)) == list(range(17)) and len(launches) == 16
    for launch, case in zip(launches, cases, strict=True):
        assert isinstance(launch, Launch)
        with compiling(TARGETS["sm90"]):
            launch.compile(TARGETS["sm90"])
            before = len(compiled)
            problem = check_grid.problem_of(case, torch.device("cpu"))
            plan = check_grid.plan_for(problem)
            quire.attention(problem.q, problem.cache, plan, **problem.tables, return_lse=True)
        assert before and len(compiled) == before, case.name
