"""The bench on a real GPU: right results are timed, wrong ones are reported."""

import os
import subprocess
import sys

import pytest
import torch

from quire.cli import main
from quire.dispatch.device import OVERRIDE, device_properties
from quire.targets import Launch, compile_all, current_target, this_gpu
from quire_tools.bench.case import RECORDS, Case, Pool
from quire_tools.bench.ceilings import measure_ceilings
from quire_tools.bench.measure import NoResult, Timing, compare
from quire_tools.bench.peers import PEERS, Peer, quire_calls
from quire_tools.bench.results import load


def test_right_results_are_timed_and_wrong_ones_reported():
    def wrong(inputs, out):
        plan = quire_calls(inputs, out)

        def made(table):
            call = plan(table)
            return lambda: call().mul_(1.1)

        return made

    case = Case("small", "decode", ((1, 300),) * 4)
    ours = [p for p in PEERS if p.module in ("quire", "torch") and "Flex" not in p.name and case.layout in p.serves]
    results = compare(case, [*ours, Peer("wrong", "quire", wrong)], seconds=0.05)
    wrong_result = results.pop("wrong")
    assert isinstance(wrong_result, NoResult)
    assert "times its budget" in wrong_result.why
    for name, timing in results.items():
        assert isinstance(timing, Timing), (name, timing)
        assert 0 < timing.low <= timing.micros <= timing.high, name
        assert timing.host_micros > 0, name
        assert timing.of_budget <= 1, name
    quire = results["Quire"]
    assert quire.scratch_bytes > 0
    assert quire.plan_micros > 0


@pytest.mark.parametrize(
    "case",
    [
        Case("latents", "MLA decode", ((1, 300),) * 4, "MLA, 16 heads", 64),
        Case("drafts", "MLA decode", ((2, 300),) * 4, "MLA, 128 heads", 64),
        Case("long fp8 latents", "MLA decode", ((1, 9000),) * 32, "MLA, 128 heads", 64, kv_dtype="float8_e4m3fn"),
        Case("expanded", "MLA prefill", ((300, 300), (20, 100)), "MLA, 16 heads, expanded", 1, packed=True),
        Case("lists", "chosen decode", ((1, 300),) * 4, "MLA, 16 heads", 64, pool=Pool(4096)),
        Case(
            "lists in records",
            "chosen decode",
            ((1, 300),) * 4,
            "MLA, 128 heads",
            64,
            kv_dtype=RECORDS,
            pool=Pool(4096),
        ),
        Case("a prompt's lists", "chosen prefill", ((1200, 300),), "MLA, 16 heads", 64, pool=Pool(4096, 0.75)),
    ],
    ids=lambda case: case.name,
)
def test_latents_and_what_is_expanded_from_them_are_timed(case):
    ours = [peer for peer in PEERS if peer.name.startswith("Quire") and case.layout in peer.serves]
    results = compare(case, ours, seconds=0.05)
    is_multiplied_in_fp8 = case.name == "long fp8 latents" and device_properties(torch.device("cuda")).has_wgmma
    if case.layout == "latents" and not is_multiplied_in_fp8:
        assert results.pop("Quire, fp8 products") == NoResult("has no products in fp8 for it")
    for name, timing in results.items():
        assert isinstance(timing, Timing), (name, timing)
        assert timing.of_budget <= 1, name


def test_an_older_card_whose_code_runs_here_is_named_by_the_checks_and_the_report(tmp_path):
    """The variable decides at the first compilation of a process, so each command has a process of its own."""
    try:
        title = this_gpu().running("sm86").name
    except ValueError as error:
        pytest.skip(str(error))
    assert title in command("check", "--as", "sm86", "--dtype", "bfloat16", "--grid", "3")
    wanted = "--only", "decode 1x4096", "--seconds", "0.05", "--output", str(tmp_path)
    command("bench", "run", "--as", "sm86", *wanted)
    report = load(tmp_path)
    assert report.provenance.title == title and "Hopper" in report.peers["cuDNN"]
    assert "Quire" in report.rows[0].times and "SDPA, not paged" in report.rows[0].times
    assert title in (tmp_path / "results.md").read_text()


def command(*arguments):
    """Run the command in a process of its own, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != OVERRIDE}
    done = subprocess.run(
        [sys.executable, "-m", "quire", *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_drawn_cases_are_right_and_measured(tmp_path):
    assert main(["check", "--grid", "6", "--seed", "3"]) == 0
    assert main(["check", "--grid", "12", "--seed", "3", "--latents"]) == 0
    wanted = ["--peers", "Quire,SDPA", "--seconds", "0.05", "--output", str(tmp_path)]
    assert main(["bench", "run", "--grid", "2", "--seed", "3", *wanted]) == 0
    assert len(load(tmp_path).rows) == 2


def test_ceilings_are_plausible():
    found = measure_ceilings()
    assert found.source == "measured"
    assert 1e11 < found.bytes_per_second < 2e13
    assert 1e13 < found.flops_per_second < 1e16


def test_what_was_compiled_beforehand_is_not_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = Case("small", "decode", ((1, 300),) * 4)
    launch = Launch(case.spec, 4, **case.bounds)
    target = current_target()
    assert target.properties == device_properties(torch.device("cuda", torch.cuda.current_device()))
    ((_, words, compiled),) = compile_all([launch], target)
    assert compiled, words
    before = kernels_in(tmp_path)
    assert len(before) == len(compiled)
    compare(case, [PEERS[0]], seconds=0.01)
    assert kernels_in(tmp_path) == before


def kernels_in(cache):
    """Return the keys of kernels in a cache of Triton, which also keeps the launchers that a process builds."""
    return {path.parent.name for path in cache.glob("*/*.json")}
