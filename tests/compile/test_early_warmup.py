"""A warm-up that begins early: what its process finds and compiles is what the later warm-up would."""

import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import quire
from quire import targets
from quire.compile_ahead import processes
from quire.compile_ahead.empty_launches import EmptyLaunches
from quire.compile_ahead.launches import distinct_launches
from quire.compile_ahead.processes import Begun, Job
from quire.compile_ahead.worker import SLOWEST_FIRST
from quire.targets import TARGETS, compiling

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

SPEC = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16)
BOUNDS = {"max_num_seqs": 1, "max_num_tokens": 1, "max_seq_len": 64, "min_seq_len": 64}


@pytest.fixture(autouse=True)
def nothing_begun(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(processes, "BEGUN", {})
    distinct_launches.cache_clear()
    yield
    for begun in processes.BEGUN.values():
        processes.kill(begun.process)
        begun.answer.close()
    distinct_launches.cache_clear()


def pages(num_pages: int, device: str = "cpu") -> quire.PagedKVCache:
    return quire.PagedKVCache(*torch.empty(2, num_pages, 16, 2, 64, dtype=torch.float16, device=device))


@pytest.mark.hopper
def test_a_warm_up_for_sm90_finds_what_was_compiled_early(monkeypatch, tmp_path):
    """The folder of Triton's cache may change in between: Inductor sets it when it makes its first kernel."""
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **more: hits.append(cache_hit))
    with compiling(replace(TARGETS["sm90"], name="sm90, early")):
        for _ in range(2):  # the second one is not begun
            quire.begin_warmup(SPEC, pages(9, "meta"), device="cpu", **BOUNDS, append=True)
        [(bounds, begun)] = processes.BEGUN.items()
        assert begun.process.wait(120) == 0
        found = processes.found(bounds)
        assert found and distinct_launches(*bounds) is not None
        assert not hits
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "inductor"))
        names = quire.warmup(SPEC, pages(4), **BOUNDS, append=True)
        assert triton.knobs.cache.dir == str(tmp_path / "inductor") and not [*tmp_path.glob("inductor/**/*.cubin")]
        assert not processes.BEGUN
        distinct_launches.cache_clear()
        assert distinct_launches(*bounds) == found  # by this process now
    assert len(names) > 1 and hits and all(hits)


def test_a_process_that_ends_early_is_not_missed(monkeypatch):
    monkeypatch.setattr(targets, "inspect", lambda *compiled: None)
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, *arguments: SimpleNamespace())
    with compiling(replace(TARGETS["sm90"], name="sm90, ended early")):
        quire.begin_warmup(SPEC, pages(9), device="cpu", **BOUNDS, append=True)
        [(bounds, begun)] = processes.BEGUN.items()
        processes.kill(begun.process)
        assert begun.process.returncode == -signal.SIGKILL and processes.found(bounds) is None
        assert quire.warmup(SPEC, pages(4), **BOUNDS, append=True) and not processes.BEGUN


def test_a_server_has_a_few_processes_that_compile(monkeypatch):
    started = []
    monkeypatch.setattr(processes, "start", lambda *job: started.append(job) or subprocess.Popen(["true"]))
    with compiling(replace(TARGETS["sm90"], name="sm90, many kinds")):
        for queries in range(1, 9):
            quire.begin_warmup(SPEC, pages(9), device="cpu", **BOUNDS | {"max_num_seqs": queries})
    assert len(started) == processes.MOST_BEGUN


def test_of_two_equal_processes_one_compiles_and_the_other_one_waits(tmp_path):
    with compiling(replace(TARGETS["sm90"], name="sm90, ranks")):
        blank = EmptyLaunches(SPEC, pages(9, "meta"), (), False, True, {}, False)
        bounds = SPEC, TARGETS["sm90"].properties, 1, 1, 64, False, ((False, False),), 1, 64
        job = processes.pickled(Job(driver.active.get_current_target(), bounds[1], blank, None, bounds, 1))
    with processes.first_to_lock(job):
        answer = tempfile.TemporaryFile()  # noqa: SIM115, `finished` closes it
        process = processes.start(job, answer)
        processes.BEGUN[bounds] = Begun(process, answer, str(tmp_path))
        while processes.found(bounds) is None:
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(0.5)
        assert process.poll() is None
    with processes.finished(bounds):
        pass
    assert process.returncode == 0 and not [*tmp_path.rglob("*.cubin")]


def test_the_process_knows_the_families_of_chosen_keys():
    """It orders launches by family before it compiles the first one."""
    spec = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.1)
    kind = False, False, False, (1, False, False, 64), None
    found = distinct_launches(spec, TARGETS["sm90"].properties, 1, 1, 64, False, (kind,), 1, 64)
    assert {launch.name for launch in found} == {"chosen", "chosen_hopper"} <= {*SLOWEST_FIRST}


def test_an_answer_counts_when_it_is_complete():
    answer = tempfile.TemporaryFile()  # noqa: SIM115, `finished` closes it
    processes.BEGUN["bounds"] = Begun(subprocess.Popen(["true"]), answer, "")
    assert processes.found("other bounds") is None
    for written, found in ((b"", None), (b"end", None), (b"\n", ())):
        answer.write(written)
        answer.flush()
        assert processes.found("bounds") == found
    with processes.finished("bounds"):
        pass
    assert answer.closed and not processes.BEGUN


STARTS_ANOTHER = """
import subprocess, sys, time
sleep = "import time; time.sleep(60)"
subprocess.Popen([sys.executable, "-c", sleep])
print(flush=True)
time.sleep(60)
"""


def test_a_process_that_takes_too_long_ends_with_its_helpers(monkeypatch):
    monkeypatch.setattr(processes, "LONGEST", 0.01)
    start = [sys.executable, "-c", STARTS_ANOTHER]
    with subprocess.Popen(start, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        processes.BEGUN["bounds"] = Begun(process, tempfile.TemporaryFile(), "")  # noqa: SIM115, `finished` closes it
        began = time.monotonic()
        with processes.finished("bounds"):
            pass
        assert process.returncode == -signal.SIGKILL
        assert process.stdout.read() == b""  # which both processes held open
    assert time.monotonic() - began < 30
