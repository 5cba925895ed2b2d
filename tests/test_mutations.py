"""The suite is itself tested: in a copy of the package with one place in a kernel broken, `quire check` must fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import triton

PACKAGE = Path(__file__).parent.parent / "src" / "quire"
MUTATIONS = {
    "causal mask dropped": ("attention.py", "(kv_pos[None, :] <= q_pos[:, None] + ahead)", "(kv_pos[None, :] < 1000000)"),
    "window off by one": ("attention.py", "kv_pos[None, :] >= q_pos[:, None] - back", "kv_pos[None, :] > q_pos[:, None] - back"),
    "values not masked": ("attention.py", "tl.load(ptrs, mask=keep[:, None], other=0.0)", "tl.load(ptrs)"),
    "rescale dropped": ("primitives.py", "acc * alpha[:, None], input_precision", "acc, input_precision"),
    "denominator not rescaled": ("primitives.py", "denom = denom * alpha + tl.sum(p, 1)", "denom = denom + tl.sum(p, 1)"),
    "merge without weights": ("primitives.py", "acc * alpha[:, None] + other_acc * beta[:, None]", "acc + other_acc"),
    "sink in every split": (
        "attention.py",
        "m = tl.where(split == 0, sink, m)\n        denom = tl.where(split == 0, 1.0, denom)",
        "m = sink\n        denom += 1.0",
    ),
    "last tile forgotten": ("attention.py", "stop = tl.minimum(start + share, stop)", "stop = tl.minimum(start + share, stop - 1)"),
    "page stride ignored": ("attention.py", "kv_head * kv.k_head + page * kv.k_page", "kv_head * kv.k_head + page * kv.k_slot"),
    "slots written elsewhere": ("write.py", "position // PAGE_SIZE, position % PAGE_SIZE", "position // PAGE_SIZE, (position + 1) % PAGE_SIZE"),
}


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="mutates Triton kernels, which run on this machine only in the interpreter")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_noticed(name, tmp_path):
    file, right, wrong = MUTATIONS[name]
    copy = tmp_path / "quire"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "demo_model"))
    source = (copy / "kernels" / file).read_text()
    assert source.count(right) == 1, "the place to break has moved"
    (copy / "kernels" / file).write_text(source.replace(right, wrong))
    run = [sys.executable, "-m", "quire.cli", "check", "--json", "--dtype", "float32"]
    done = subprocess.run(run, env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}, capture_output=True, text=True)
    assert done.returncode != 0
    assert '"passed": false' in done.stdout or "InterpreterError" in done.stderr, done.stderr[-2000:]
