"""Exported kernels on a real GPU: a process that loads them compiles nothing, neither before it serves nor then."""

import os
import subprocess
import sys

import pytest
import torch

from quire.targets import TARGETS, card_here

SPEC = ("num_q_heads=8", "num_kv_heads=2", "head_dim=128")
SERVER = """
import triton, quire
from quire.testing import error_budget, make_problem

hits = []
triton.knobs.compilation.listener = lambda *, cache_hit, **more: hits.append(cache_hit)
spec = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
problem = make_problem(spec, ((1, 300), (1, 17), (9, 40)), device="cuda")
names = quire.warmup(spec, problem.cache, max_num_seqs=4, max_num_tokens=64, max_seq_len=512)
assert len(hits) >= len(names) > 1 and all(hits), hits
with quire.no_compilation():
    out = quire.attention(problem.q, problem.cache, quire.plan(spec, problem.batch, **problem.bounds))
assert error_budget(problem, out).passed
assert all(hits), hits
"""
MAJOR, MINOR = torch.cuda.get_device_capability()
HERE = (
    f"sm{MAJOR}{MINOR}" if torch.version.hip is None else torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]
)


@pytest.mark.parametrize("target", [None, HERE])
def test_a_process_that_loads_exported_kernels_compiles_nothing(target, tmp_path):
    """Those for a named target are compiled for the GPU that `quire.targets` describes."""
    if target is not None and (target not in TARGETS or card_here() is not None):
        pytest.skip(f"quire.targets has no {target}, or this GPU runs an older card's code")
    here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    there = [] if target is None else ["--target", target]
    limits = ["--limits", "4", "64", "512", "--page-size", "16"]
    command = [sys.executable, "-m", "quire", "warmup", "--export", tmp_path / "export", *there, *limits]
    subprocess.run([*command, "--spec", *SPEC], env=here, check=True)
    here |= {"QUIRE_KERNELS": str(tmp_path / "export"), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", SERVER], env=here, check=True)
