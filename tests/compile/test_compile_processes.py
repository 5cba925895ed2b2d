"""Processes that help a warm-up: what they compile is what the warm-up looks for in Triton's cache."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

import quire
from quire import targets
from quire.compile_ahead import processes
from quire.compile_ahead.empty_launches import EmptyLaunches
from quire.targets import TARGETS, compiling

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

SPEC = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16)
BOUNDS = {"max_num_seqs": 1, "max_num_tokens": 20, "max_seq_len": 20, "min_seq_len": 16, "min_query_len": 16}


def warm_up_of(kind: str) -> tuple[quire.AttentionSpec, quire.PagedKVCache, dict]:
    """Return a spec, a cache and the options of a warm-up."""
    if kind == "latents":
        spec = quire.AttentionSpec.mla(
            num_q_heads=8, kv_lora_rank=64, qk_rope_head_dim=16, softmax_scale=0.1, dtype=torch.float16
        )
        return spec, quire.PagedKVCache.from_latents(torch.zeros(4, 16, 80, dtype=torch.float16), 64), {}
    spec = replace(SPEC, kv_dtype=torch.float8_e4m3fn)
    k, v = torch.zeros(4, 16, 4, 64).to(torch.float8_e4m3fn).split(2, 2)
    cache = quire.PagedKVCache(k, v, "NHD", torch.ones(2), torch.ones(2))
    cos, sin = torch.zeros(20, 64).chunk(2, 1)
    rope = quire.Rope(cos, sin, torch.zeros(1, dtype=torch.int64))
    return spec, cache, {"append": True, "rope": rope, "qk_norm": quire.QKNorm(*torch.ones(2, 64))}


@pytest.mark.hopper
@pytest.mark.extended
@pytest.mark.parametrize("kind", ["latents", "e4m3, rotated"])
def test_a_warm_up_for_sm90_finds_what_another_process_compiled(kind, tmp_path, monkeypatch):
    """All kernels but the one that writes, which the warm-up compiles first."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spec, cache, options = warm_up_of(kind)
    jobs, found = [], {}

    def keep_job(job):
        jobs.append(job)
        raise OSError

    def note(*, src, cache_hit, **more):
        found.setdefault(cache_hit, set()).add(src.name)

    # Triton keeps kernels in memory by the device, which the stand-in for its driver names.
    with compiling(replace(TARGETS["sm90"], name=f"sm90, nothing compiled: {kind}")), monkeypatch.context() as nothing:
        nothing.setattr(targets, "inspect", lambda *compiled: None)
        nothing.setattr(processes, "num_helpers", lambda num_kernels: 1)
        nothing.setattr(processes, "start", keep_job)
        nothing.setattr(JITFunction, "_do_compile", lambda self, *arguments: SimpleNamespace())
        quire.warmup(spec, cache, **BOUNDS, **options)
    assert processes.start(jobs[0]).wait(120) == 0
    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    with compiling(replace(TARGETS["sm90"], name=f"sm90, {kind}")):
        quire.warmup(spec, cache, **BOUNDS, **options)
    write = "write_latent_kernel" if kind == "latents" else "norm_rope_kernel"
    assert found[False] == {write} and found[True] and write not in found[True]


def test_a_job_is_on_the_cpu_wherever_it_was():
    """Else each process would take memory of the GPU."""
    cache = quire.PagedKVCache(*torch.empty(2, 4, 16, 2, 64, dtype=torch.float16, device="meta"))
    job = processes.pickled((cache, torch.device("cuda", 1)))
    read, device = processes.Unpickler(io.BytesIO(job)).load()
    assert device == read.device == read.k.device == torch.device("cpu")
    assert read.strides == cache.strides and read.k.shape == cache.k.shape


def test_as_many_processes_help_as_cores_and_kernels_deserve(monkeypatch):
    for cores, kernels, count in ((2, 100, 0), (4, 100, 2), (64, 100, 8), (64, 9, 2), (64, 3, 0), (1, 100, 0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        assert processes.num_helpers(kernels) == count


def test_one_of_several_equal_warm_ups_is_helped(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    job = processes.first_to_lock
    with job(b"a") as first, job(b"a") as second, job(b"b") as other:
        assert (first, second, other) == (True, False, True)
    with job(b"a") as again:
        assert again


def test_what_cannot_be_pickled_is_compiled_without_help(monkeypatch):
    started = []
    monkeypatch.setattr(processes, "start", started.append)
    spec, cache, _ = warm_up_of("latents")
    warm_up = EmptyLaunches(spec, cache, (), False, False, {"rope": lambda: None}, False)
    with compiling(TARGETS["sm90"]), processes.helping(warm_up, 1):
        assert not started


def test_a_process_that_helps_ends_with_the_warm_up(monkeypatch):
    started = []
    monkeypatch.setattr(processes, "pickled", lambda job: b"no job")
    monkeypatch.setattr(processes, "first_to_lock", lambda job: contextlib.nullcontext(True))
    start = processes.start
    monkeypatch.setattr(processes, "start", lambda job: started.append(start(job)) or started[-1])
    spec, cache, _ = warm_up_of("latents")
    warm_up = EmptyLaunches(spec, cache, (), False, False, {}, False)
    with compiling(TARGETS["sm90"]), processes.helping(warm_up, 2):
        assert len(started) == 1
    assert started[0].returncode is not None


ORDERS = """
import sys
from quire.kernels.chosen_hopper.kernel import chosen_hopper_kernel
from quire.kernels.hopper.kernel import hopper_kernel
from quire.kernels.mla.kernel import mla_kernel
from quire.kernels.mla_hopper.kernel import mla_hopper_kernel
from quire.kernels.portable.kernel import portable_kernel
from quire.triton_internals import hash_callees
kernels = [portable_kernel, mla_kernel, hopper_kernel, mla_hopper_kernel, chosen_hopper_kernel]
for kernel in kernels[:: int(sys.argv[1])]:
    hash_callees(kernel)
print(*(kernel.cache_key for kernel in kernels))
"""


@pytest.mark.hopper
@pytest.mark.each_kind
def test_keys_in_triton_s_cache_do_not_depend_on_the_order_of_launches():
    """Before Triton 3.9 they did."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    forwards, backwards = (
        subprocess.check_output([sys.executable, "-c", ORDERS, step], text=True, env=environment).split()
        for step in ("1", "-1")
    )
    assert forwards == backwards and len(forwards) == 5
