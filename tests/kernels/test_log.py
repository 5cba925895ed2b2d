"""Decisions are logged once each, where a logger was asked for; launches have ranges under a profiler alone."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import quire
from quire import log
from quire.dispatch.device import device_properties
from quire.dispatch.request import Bounds, Options, Request
from quire.kernels import launcher, ranges, times, tma
from quire.kernels.portable.runner import PortableRunner
from quire.plan import decide
from quire.targets import TARGETS
from quire.testing import Problem, make_problem
from tests.extended import extended
from tests.kernels.test_invariance import with_odd_starts

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "dtype": torch.float16}
LENS = ((1, 20), (1, 9))
PROGRAM = """
import logging, sys, torch, quire
spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
def plan(num_seqs, spec=spec):
    batch = quire.Batch(torch.zeros(num_seqs, 2, dtype=torch.int32), torch.ones(num_seqs, dtype=torch.int32))
    return quire.plan(spec, batch, max_query_len=1, max_seq_len=8)
quiet = logging.StreamHandler(sys.stdout)
quiet.setLevel(logging.WARNING)
logging.getLogger().addHandler(quiet)
plan(3), plan(3)
logging.getLogger().removeHandler(quiet)
logging.basicConfig(stream=sys.stdout, format="application: %(message)s")
plan(3, quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=16, dtype=torch.float32))
"""


@pytest.fixture
def lines(monkeypatch, caplog):
    """Let all of Quire's loggers speak, as if nothing had been said, and return a function that returns new lines."""
    monkeypatch.setattr(log, "SAID", {})
    caplog.set_level(logging.DEBUG, logger="quire")

    def new() -> list[str]:
        found = [f"{record.name}: {record.getMessage()}" for record in caplog.records]
        caplog.clear()
        return found

    return new


@pytest.fixture
def untimed(monkeypatch):
    monkeypatch.setattr(times, "TIMED", {})


def small(device: str, lens=LENS, **spec) -> Problem:
    return make_problem(quire.AttentionSpec(**HEADS | {"head_dim": 16} | spec), lens, device=device)


def plan_for(problem: Problem, **options) -> quire.Plan:
    return quire.plan(problem.spec, problem.batch, **problem.bounds, **options)


def test_a_decision_is_said_once_with_what_was_asked_and_why(device, lines):
    problem = small(device, sliding_window=7)
    plan = plan_for(problem)
    (line,) = [line for line in lines() if line.startswith("quire.plan")]
    asked = "2 sequences, at most 1 query and 20 keys each, 4/2/16 float16, sliding_window=7"
    assert line.startswith(f"quire.plan: {asked} -> {plan.launch}; {plan.reason}")
    assert (plan.kernel != "torch") == ("; hopper does not serve " in line)  # a row for each sequence
    plan_for(problem)  # the next step's
    assert not lines()
    plan_for(small(device))
    assert len(lines()) == 1


@pytest.mark.triton
def test_options_of_a_plan_are_said(device, lines):
    plan_for(small(device), num_splits=2)
    assert " num_splits=2 -> split-KV kernel" in lines()[0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"head_dim": 32, "head_dim_v": 16, "causal": False, "sinks": True}, "4/2/32/16 float16, not causal, sinks"),
        ({"head_dim": 32, "kv_dtype": torch.int8, "alibi": True}, "4/2/32 float16, a cache in int8, alibi"),
    ],
)
def test_a_spec_in_words_says_what_is_not_usual(spec, words):
    assert log.words_of(quire.AttentionSpec(**HEADS | spec)) == words


def test_latents_in_words_have_the_widths_of_a_slot():
    assert log.words_of(quire.AttentionSpec.mla(num_q_heads=8, softmax_scale=1.0)) == (
        "8 heads on latents of 512+64 bfloat16"
    )


def test_nothing_is_said_while_no_logger_is_on(device, caplog):
    assert not any(map(log.is_on, (log.PLAN, log.LAUNCH, log.START)))
    problem = small(device)
    quire.attention(problem.q, problem.cache, plan_for(problem))
    assert not caplog.records


def test_what_was_said_is_remembered_within_a_bound(lines, monkeypatch):
    monkeypatch.setattr(log, "MOST_SAID", 2)
    for line in ("one", "two", "two", "three", "one"):
        log.say_once(log.START, line)
    assert lines() == [f"quire.start: {line}" for line in ("one", "two", "three", "one")]
    assert len(log.SAID) == 2


@pytest.mark.pytorch
@pytest.mark.parametrize(("wanted", "speak"), [extended("", 0), ("plan", 1), ("launch", 0), extended("all", 1)])
def test_the_variable_writes_to_standard_error_what_no_application_takes(wanted, speak):
    environment = os.environ | {"QUIRE_LOG": wanted, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    own, of_application = done.stderr.splitlines(), done.stdout.splitlines()
    assert len(own) == len(of_application) == speak
    assert all(
        line.startswith("quire.plan: 3 sequences, at most 1 query and 8 keys each, 4/2/16 float32") for line in own
    )
    assert all(line.startswith("application: 3 sequences") and "8/2/16" in line for line in of_application)


def test_an_unknown_value_of_the_variable_is_named_in_a_warning():
    with pytest.warns(UserWarning, match="QUIRE_LOG must be plan, launch or all, got 'everything'"):
        log.show("everything")


@pytest.mark.triton
def test_a_launch_names_its_kernel_and_grid(device, lines):
    launcher.SHARED.clear()  # what tests before launched
    problem = small(device)
    plan = plan_for(problem)
    lines()
    for _ in range(2):
        quire.attention(problem.q, problem.cache, plan)
    (line,) = lines()
    assert line.startswith("quire.launch: ") and f"_kernel, grid {plan.launch.num_programs(2)} × 1 × 1, " in line


@pytest.mark.triton
def test_a_fallback_says_which_strides_are_to_blame(device, lines, take):
    take("32x64" if device == "cpu" else "64x128")
    # As many sequences as fill the device: with fewer row blocks, tiles are not taller, and need no fallback.
    lens = ((40, 60),) * (100 if device == "cuda" else 1)
    problem = small(device, lens, num_q_heads=8, kv_dtype=torch.float8_e4m3fn, head_dim=64)
    odd = replace(problem, cache=with_odd_starts(problem.cache))
    for _ in range(2):  # steps
        plan = plan_for(problem, batch_invariant=True)
        for cache in (problem.cache, odd.cache, odd.cache):
            quire.attention(problem.q, cache, plan)
    found = [line for line in lines() if "in place of" in line]
    if device == "cuda" and not device_properties(problem.q.device).has_wgmma:
        assert plan.launch.fallback is None and not found  # no tile is taller there
        return
    (line,) = found
    named = f"{plan.launch.fallback.name} in place of {plan.launch.name}, which does not serve NHD strides"
    assert named in line and str(odd.cache.k.stride()) in line


@pytest.mark.triton
def test_a_warm_up_says_how_many_kernels_it_launched_and_times_none(device, lines, untimed):
    problem = small(device)
    names = quire.warmup(problem.spec, problem.cache, max_num_seqs=1, max_num_tokens=1, max_seq_len=16)
    line = next(line for line in lines() if line.startswith("quire.start: "))
    assert line.startswith(f"quire.start: warm-up of 4/2/16 float16: {len(names)} launches in ")
    assert names and not times.TIMED  # its sequences have no keys


@pytest.mark.pytorch
def test_an_operator_is_said_when_it_is_traced(device, lines):
    problem = small(device)
    plan = plan_for(problem)
    lines()
    attend = torch.compile(lambda q: quire.attention(q, problem.cache, plan), backend="eager", fullgraph=True)
    for _ in range(2):
        attend(problem.q)
    assert [line for line in lines() if line.startswith("quire.start")] == [
        "quire.start: torch.compile traced quire::attention for 4/2/16 float16"
    ]


def hopper_launch(spec: quire.AttentionSpec, kernel: str):
    request = Request(spec, 1, True, Bounds(64, 64, 64), TARGETS["sm90"].properties)
    return decide(request, Options(kernel=kernel))[0]


@pytest.mark.parametrize(
    ("strides", "offset", "page_size", "per_token", "reason"),
    [
        ((2048, 128, 64, 1), 0, 16, True, "scales per token and head"),
        ((512, 32, 16, 1), 1, 16, False, "k at an address that 16 does not divide"),
        ((288, 36, 16, 1), 0, 8, False, "k with shape (2, 8, 2, 16) and strides (288, 36, 16, 1), layout NHD"),
        ((272, 136, 68, 1), 0, 2, False, "pages of 2"),
    ],
)
def test_a_fallback_of_the_hopper_kernel_says_what_tma_cannot_address(strides, offset, page_size, per_token, reason):
    dim = 64 if per_token or page_size == 2 else 16
    dtype = torch.int8 if per_token else torch.float16
    x = torch.zeros(4096, dtype=dtype).as_strided((2, page_size, 2, dim), strides, offset)
    scales = torch.ones(2, page_size, 2) if per_token else None
    cache = quire.PagedKVCache(x, x, "NHD", scales, scales)
    launch = hopper_launch(quire.AttentionSpec(**HEADS | {"head_dim": dim}, kv_dtype=dtype), "hopper")
    assert launch.for_cache(cache) is launch.fallback and tma.matrices_of_cache(cache) is None
    assert launch.unserved(cache) == reason


def test_a_fallback_for_queries_names_their_strides():
    x = torch.zeros(2, 16, 2, 64, dtype=torch.float16)
    launch, q = hopper_launch(quire.AttentionSpec(**HEADS | {"head_dim": 64}), "hopper"), torch.zeros(65, 4, 68)
    q, cache = q.half()[:, :, :64], quire.PagedKVCache(x, x)
    assert launch.for_cache(cache, q) is launch.fallback
    assert (
        launch.unserved(cache, q) == f"queries with strides (272, 68, 1) at an address of {q.data_ptr() % 16} modulo 16"
    )


def test_a_fallback_of_the_kernel_for_latents_says_why():
    """It serves pages of two, whose rows are gathered, but no records, and nothing that TMA cannot address."""
    unaligned = torch.zeros(2 * 64 * 576 + 4, dtype=torch.bfloat16)[4:].view(2, 64, 576)
    for kv_dtype, cache, reason in (
        (None, quire.PagedKVCache.from_latents(unaligned, 512), "latents at an address that 16 does not divide"),
        (torch.float8_e4m3fn, None, "records of vLLM's fp8_ds_mla"),
    ):
        spec = quire.AttentionSpec.mla(num_q_heads=128, softmax_scale=1.0, kv_dtype=kv_dtype)
        cache = cache or quire.PagedKVCache.empty(spec, 2, 64, layout="fp8_ds_mla")
        launch = hopper_launch(spec, "mla_hopper")
        assert launch.for_cache(cache) is launch.fallback
        assert launch.unserved(cache) == reason
    small_pages = quire.PagedKVCache.empty(replace(spec, kv_dtype=torch.bfloat16), 2, 2)
    assert launch.for_cache(small_pages) is launch


def test_launches_have_ranges_in_plans_of_a_profiler_alone(device):
    problem = small(device)
    before = plan_for(problem)
    # Without `acc_events`, PyTorch 2.10 and 2.11 warn that another cycle would clear the events of the only one.
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        quire.attention(problem.q, problem.cache, before)
        plan = plan_for(problem)
        out = quire.attention(problem.q, problem.cache, plan)
    assert isinstance(plan.runner, ranges.Within) and not isinstance(before.runner, ranges.Within)
    assert not isinstance(plan_for(problem).runner, ranges.Within)
    found = [(event.name) for event in recorded.events() if event.name.startswith("quire ")]
    assert found == [f"quire {plan.kernel}: 2 sequences, at most 1 query and 20 keys each"]
    assert torch.equal(out, quire.attention(problem.q, problem.cache, before))


def test_a_launch_within_a_context_still_writes_new_tokens(device):
    problem = small(device)
    new = {"k": problem.cache.k[0, :2].clone(), "v": problem.cache.v[0, :2].clone()}
    new["slot_mapping"] = torch.full((2,), -1, device=device)
    plan = plan_for(problem)
    ranged = replace(plan, runner=ranges.within(plan.runner, nullcontext))
    served = isinstance(plan.runner, PortableRunner)
    assert (ranged.appender(problem.cache) is not None) == (plan.appender(problem.cache) is not None) == served
    outs = [quire.attention(problem.q, problem.cache, some, **new) for some in (plan, ranged)]
    assert torch.equal(*outs)


def test_ranges_are_those_of_nvtx_where_a_gpu_is_profiled(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))

    def fail() -> None:
        calls.append("launch")
        raise InterruptedError

    for nvtx in (False, True):
        monkeypatch.setattr(ranges, "NVTX", nvtx)
        with pytest.raises(InterruptedError):
            ranges.in_range(fail, "quire")()  # pyright: ignore[reportArgumentType]
    assert calls == ["launch", "quire", "launch", "end"]


def test_proton_has_scopes_where_it_records(device, monkeypatch):
    problem, scopes = small(device), []

    class Profiler(ModuleType):
        @staticmethod
        @contextmanager
        def scope(name: str) -> Iterator[None]:
            scopes.append(name)
            yield
            scopes.append("end")

    monkeypatch.setitem(sys.modules, ranges.PROTON, Profiler(ranges.PROTON))
    for records in (False, True):
        monkeypatch.setattr(ranges, "proton_records", lambda records=records: records)
        plan = plan_for(problem)
        quire.attention(problem.q, problem.cache, plan)
        assert scopes == [f"quire {plan.kernel}: 2 sequences, at most 1 query and 20 keys each", "end"] * records


def times_said(lines: list[str]) -> list[str]:
    return [line.removeprefix("quire.launch: ") for line in lines if " µs, the least of " in line]


def test_what_a_decision_takes_is_said_once_after_a_few_calls(device, lines, untimed, monkeypatch):
    monkeypatch.setattr(quire.Plan, "predicted_us", None, raising=False)
    problem = small(device)
    for calls in (times.CALLS, 1):
        plan = plan_for(problem)  # the next step's goes on where the last one ended
        assert not times_said(lines())
        for _ in range(calls):
            quire.attention(problem.q, problem.cache, plan)
    if device == "cuda":
        torch.cuda.synchronize()
        plan_for(problem)  # asks the events
    (line,) = times_said(lines())
    asked = "2 sequences, at most 1 query and 20 keys each, 4/2/16 float16"
    assert re.fullmatch(rf"{re.escape(f'{asked} -> {plan.launch}')}: [\d.,e-]+ µs, the least of 5 calls", line)
    assert not isinstance(plan_for(problem).runner, ranges.Within) and not times.TIMED


def test_calls_of_other_bounds_are_not_timed_with_those_of_a_decision(device, lines, untimed):
    plans = [plan_for(small(device, lens)) for lens in (LENS, ((1, 18), (1, 9)))]
    assert f"{plans[0].launch}" == f"{plans[1].launch}" and len(times.TIMED) == 1
    assert [isinstance(plan.runner, ranges.Within) for plan in plans] == [True, False]


def test_a_time_that_a_plan_predicts_is_said_with_the_decision_and_one_that_it_does_not_is_not(
    device, lines, monkeypatch
):
    for heads, time in ((4, None), (8, 12.345)):
        monkeypatch.setattr(quire.Plan, "predicted_us", time, raising=False)
        plan_for(small(device, num_q_heads=heads))
        assert lines()[0].endswith("; 12.3 µs predicted") == (time is not None)


class Event:
    """Stands in for an event of a GPU. Times are given, first the two of a first call."""

    times = iter(())
    over = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        assert stream == "the stream of cuda:1"
        self.ms = next(Event.times)

    def query(self) -> bool:
        return Event.over

    def elapsed_time(self, end: "Event") -> float:
        return end.ms - self.ms


def test_events_time_calls_outside_of_captures_and_are_asked_once_they_are_over(lines, untimed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", "the stream of {}".format)
    took = [(0, 0.001), (1, 1.5), (2, 2.012), (3, 3.5), (4, 4.5), (5, 5.5)]
    monkeypatch.setattr(Event, "times", iter([time for pair in took for time in pair]))
    timing = times.TIMED["decision"] = times.Timing("decision", "words", 9.0, torch.device("cuda:1"))

    def call(capturing: bool, over: bool) -> list[str]:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        monkeypatch.setattr(Event, "over", over)
        with timing.call():
            pass
        return lines()

    for _ in range(times.CALLS + 2):  # the last is not timed any more
        assert not call(capturing=False, over=False)
        assert not call(capturing=True, over=True)
    assert call(capturing=False, over=True) == ["quire.launch: words: 12 µs, the least of 5 calls, 9 predicted"]
    assert not call(capturing=False, over=True) and not times.TIMED


def test_decisions_that_are_timed_at_a_time_are_bounded(device, lines, untimed, monkeypatch):
    monkeypatch.setattr(times, "MOST", 2)
    plans = [plan_for(small(device, num_q_heads=heads)) for heads in (2, 4, 6)]
    assert [spec.num_q_heads for spec, _ in times.TIMED] == [4, 6] and len(plans) == 3


@pytest.mark.pytorch
def test_lines_in_the_documentation_are_those_that_are_said(lines, untimed):
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text("utf-8")
    block = page.split("$ QUIRE_LOG=all python server.py\n")[1].split("```")[0]
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    problem = make_problem(spec, [(1, 9)] * 4, page_size=16)
    quire.warmup(spec, problem.cache, max_num_seqs=4, max_num_tokens=64, max_seq_len=4096)
    table = torch.nn.functional.pad(problem.batch.page_table, (0, 255))
    plan = quire.plan(spec, replace(problem.batch, page_table=table), max_query_len=1, max_seq_len=4096)
    for _ in range(times.CALLS + 1):
        quire.attention(problem.q, problem.cache, plan)
    said = lines()

    def shape(line: str) -> str:
        return re.sub(r"[\d.,e-]+ (?=µs|s\b)", "TIME ", line)

    assert [*map(shape, block.splitlines())] == [*map(shape, said)]


def test_times_have_three_digits_or_all_before_the_point():
    assert [*map(log.micros, (0.1234, 12.345, 123.4, 615221.0))] == ["0.123", "12.3", "123", "615,221"]
