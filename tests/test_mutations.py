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
    "causal mask dropped": ("primitives.py", "(kv_pos[None, :] <= q_pos[:, None] + ahead)", "(kv_pos[None, :] < 1000000)"),
    "window off by one": ("primitives.py", "kv_pos[None, :] >= q_pos[:, None] - back", "kv_pos[None, :] > q_pos[:, None] - back"),
    "values not masked": ("primitives.py", "tl.load(ptrs, mask=keep[:, None], other=0.0)", "tl.load(ptrs)"),
    "rescale dropped": ("primitives.py", "acc * alpha[:, None], input_precision", "acc, input_precision"),
    "denominator not rescaled": ("primitives.py", "denom = denom * alpha + tl.sum(p, 1)", "denom = denom + tl.sum(p, 1)"),
    "chunks added without weights": ("primitives.py", "tl.fma(denom, alpha, other_denom * beta)", "denom + other_denom"),
    "merge without weights": ("shares.py", "acc += accs[i] * alpha[:, None]", "acc += accs[i]"),
    "first partial state from the wrong slot": (
        "shares.py", "first_slot, next_slot, step, num_partials = 2 * first_share + 1,", "first_slot, next_slot, step, num_partials = 2 * first_share,",
    ),
    "a partial state forgotten": ("shares.py", "(block_unit + num_units - 1) // share - first_share + 1", "(block_unit + num_units - 1) // share - first_share"),
    "share cut short": ("shares.py", "high = tl.minimum(low + share, total)", "high = tl.minimum(low + share, total - 1)"),
    "sink forgotten": ("primitives.py", "tl.zeros_like(sink) + 1.0", "tl.zeros_like(sink)"),
    "block's last tile forgotten": ("blocks.py", "range(1, 1 + num_left + stop - full_stop)", "range(1, num_left + stop - full_stop)"),
    "odd numbers of pairs dropped": ("primitives.py", "tl.dot(q_odd, tl.trans(k_odd), tl.dot(q_even, tl.trans(k_even)))", "tl.dot(q_even, tl.trans(k_even))"),
    "page stride ignored": ("primitives.py", "kv_head * kv.k_head + page * kv.k_page", "kv_head * kv.k_head + page * kv.k_slot"),
    "slots written elsewhere": ("write.py", "position // PAGE_SIZE, position % PAGE_SIZE", "position // PAGE_SIZE, (position + 1) % PAGE_SIZE"),
}  # fmt: skip


@pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="mutates Triton kernels, which run on this machine only in the interpreter",
)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_noticed(name, tmp_path):
    file, right, wrong = MUTATIONS[name]
    copy = tmp_path / "quire"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "demo_model"))
    source = (copy / "kernels" / file).read_text()
    assert source.count(right) == 1, "the place to break has moved"
    (copy / "kernels" / file).write_text(source.replace(right, wrong))
    run = [
        sys.executable,
        "-m",
        "quire",
        "check",
        "--json",
        "--fail-fast",
        "--dtype",
        "float16" if "pairs" in name else "float32",
    ]
    done = subprocess.run(
        run,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert '"passed": false' in done.stdout or "InterpreterError" in done.stderr, done.stderr[-2000:]
