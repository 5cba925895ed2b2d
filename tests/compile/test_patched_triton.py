"""Engines replace functions of Triton's Python side: kernels name none of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PATCHED = """
import importlib, inspect, pkgutil
import torch, triton
from triton.runtime.jit import JITFunction

def plain(function):
    return lambda *args, **kwargs: function(*args, **kwargs)

def is_patched(name, value):  # what decorates kernels is used when they are imported
    return callable(value) and not inspect.isclass(value) and not name.startswith("_") and name not in DECORATORS

DECORATORS = ("jit", "constexpr_function", "autotune", "heuristics", "must_use_result")
patched = [name for name, value in vars(triton).items() if is_patched(name, value)]
assert {"next_power_of_2", "cdiv"} <= set(patched)
for name in patched:  # as SGLang does with `next_power_of_2`
    setattr(triton, name, plain(getattr(triton, name)))

import quire, quire.kernels
from quire.targets import TARGETS, Launch

modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(quire.kernels.__path__, "quire.kernels.")]
kernels = {id(f): f for m in modules for f in vars(m).values() if isinstance(f, JITFunction)}
for function in kernels.values():
    if function.__module__.startswith("quire."):
        print(function.__module__, function.__name__, flush=True)
        assert function.cache_key
spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=24)
assert Launch(spec, 8, 1, 128, 8).compile(TARGETS["sm90"])[1]
"""


@pytest.mark.extended  # SGLang's own replacements are there in tests/engines/test_sglang.py
def test_kernels_are_compiled_whatever_functions_of_triton_an_engine_replaces():
    """Triton hashes what a kernel names before it compiles it, and refuses plain functions."""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", PATCHED], capture_output=True, text=True, env=dict(os.environ), cwd=root
    )
    functions = done.stdout.splitlines()
    assert done.returncode == 0, f"{functions[-1:]}\n{done.stderr[-2000:]}"
    assert len(functions) > 300
