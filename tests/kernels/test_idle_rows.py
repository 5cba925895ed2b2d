"""A sequence without queries owns no rows, and none of its keys is read: idle rows of engines have stale contents."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import contextlib, dataclasses, sys, torch, quire
from quire import intervals
from quire.dispatch.config import KernelConfig
from quire.dispatch.device import device_properties
from quire.testing import error_budget, make_problem

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    from tests.hopper_simulator.launch import simulated_hopper
    from tests.interpreter import hasten
    hasten()
HEADS = dict(num_q_heads=6, num_kv_heads=2, head_dim=16, dtype=torch.float32)
LENS = ((0, 40), (3, 60), (0, 50), (1, 17), (0, 0), (2, 33), (0, 64))

def trees(batch, num_tokens):
    bits = torch.tensor([1, 3, 5, 1, 1, 3], device=batch.device)
    return dataclasses.replace(batch, tree_bits=bits)

def latents(**fields):
    fields = dict(num_q_heads=3, softmax_scale=0.2, kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.float32) | fields
    return quire.AttentionSpec.mla(**fields)

SMALL = KernelConfig(16, 16, 4, 2, False, programs_per_sm=64, block_d=16, block_dv=16)
LATENT = dataclasses.replace(SMALL, block_d=64, block_dv=32)
ON_HOPPER = dict(num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)
CASES = {  # kernel, spec, what `make_problem` and `plan` get besides
    "block": ("block", HEADS, {}, dict(num_splits=1)),
    "split-KV": ("split_kv", HEADS, dict(flat_table=True), dict(num_splits=9, config=SMALL)),
    "split-KV, window": ("split_kv", HEADS | dict(sliding_window=9, sinks=True), {}, dict(num_splits=3, config=SMALL)),
    "split-KV, invariant": ("split_kv", HEADS, {}, dict(batch_invariant=True, max_seq_len=5000)),
    "split-KV, intervals": ("split_kv", HEADS, dict(per_token=intervals.causal), dict(num_splits=9, config=SMALL)),
    "split-KV, trees": ("split_kv", HEADS, dict(per_token=trees), dict(num_splits=9, config=SMALL)),
    "latents": ("mla", latents(), {}, dict(num_splits=5, config=LATENT)),
    "latents in one page": ("mla", latents(), dict(page_size=64), dict(num_splits=5, config=LATENT)),
    "latents, invariant": ("mla", latents(), {}, dict(batch_invariant=True, config=LATENT)),
    "Hopper": ("hopper", ON_HOPPER, {}, dict(kernel="hopper")),
    "Hopper, intervals": ("hopper", ON_HOPPER, dict(per_token=intervals.causal), dict(kernel="hopper")),
    "Hopper, splits": ("hopper", ON_HOPPER, {}, dict(kernel="hopper", max_seq_len=9000)),
    "latents on Hopper": (
        "mla_hopper", latents(num_q_heads=33, kv_lora_rank=512, qk_rope_head_dim=64, dtype=torch.float16),
        dict(page_size=64), dict(kernel="mla_hopper"),
    ),
}
for number, (name, (kernel, spec, made, options)) in enumerate(CASES.items()):
    spec = quire.AttentionSpec(**spec) if isinstance(spec, dict) else spec
    for_hopper = "kernel" in options
    if for_hopper and device == "cuda" and not device_properties(torch.device(device)).has_wgmma:
        continue
    for page in [(-1, 1 << 30)[number % 2]]:
        print(name, page, flush=True)
        p = make_problem(spec, LENS, device=device, **dict(page_size=8) | made)
        table = p.batch.page_table
        table[table == -1] = page
        if p.batch.cu_pages is None and "max_seq_len" in options:
            table = torch.nn.functional.pad(table, (0, options["max_seq_len"] // p.cache.page_size), value=page)
        batch = dataclasses.replace(p.batch, page_table=table)
        room = torch.full((8, spec.num_q_heads, spec.head_dim_v), 7.0, dtype=spec.dtype, device=device)
        lses = torch.full((8, spec.num_q_heads), 7.0, device=device)
        with simulated_hopper(num_sms=9) if for_hopper and device == "cpu" else contextlib.nullcontext():
            plan = quire.plan(spec, batch, **p.bounds | options)
            state = quire.attention(p.q, p.cache, plan, **p.tables, out=quire.State(room[1:7], lses[1:7]))
        assert plan.kernel == kernel, plan
        verdict = error_budget(p, state)
        assert verdict.passed, (plan, verdict)
        assert all((x[[0, 7]] == 7).all() for x in (room, lses)), (plan, "wrote outside of its rows")
"""


@pytest.mark.triton
def test_a_sequence_without_queries_owns_no_rows_and_its_pages_may_be_anywhere():
    """One process takes all cases, and names the one that it takes: to read a page that is none may end it."""
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=dict(os.environ), cwd=root
    )
    cases = done.stdout.splitlines()
    assert done.returncode == 0, f"exit status {done.returncode} at {cases[-1:]}\n{done.stderr[-2000:]}"
    assert len(cases) == 13 or torch.cuda.is_available()
