"""What becomes of a stale schedule of the MLA kernel for Hopper GPUs.

The kernel that finds it runs in Triton's interpreter. Those that read it run in the simulator, which raises if all
warps wait.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import quire
from quire.dispatch.device import interprets
from quire.dispatch.request import cdiv
from quire.testing import error_budget, make_problem

if not interprets():
    pytest.skip("the kernel of the schedule runs in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")


from quire.kernels import scheduler as scheduling
from tests.hopper_simulator.launch import simulated_hopper

pytestmark = [pytest.mark.one_triton, pytest.mark.triton]

UNWRITTEN = 77.0


E4M3 = {"kv_dtype": torch.float8_e4m3fn}
KINDS = {
    "16 rows": (8, {}, "narrow"),
    "32 fp8 rows": (16, E4M3, "narrow"),
    "32 of many rows": (40, {}, "narrow"),
    "32 of many fp8 rows": (40, E4M3, "narrow"),
    "64 rows": (40, {}, "wide"),
    "64 fp8 rows": (40, E4M3, "wide"),
    "products in fp8": (40, E4M3 | {"allow_fp8": True}, "fp8"),
}
ROWS = {"narrow": 32, "wide": 64, "fp8": 64}  # of a row block


def set_unseen(tensor: torch.Tensor, values: Any) -> None:
    """Write to a tensor as kernels do: its version stays."""
    version = tensor._version
    tensor.data.copy_(torch.as_tensor(values))
    assert tensor._version == version


def assert_right_or_nan(p: Any, plan: Any, seed: int) -> tuple[int, int]:
    """Attend with a stale schedule and with a new one. Return how many rows of the first are NaN, and how many right.

    Rows that are not written keep what memory had, which is not right.
    """
    held = quire.State(torch.full((len(p.q), p.spec.num_q_heads, 512), UNWRITTEN, dtype=p.spec.dtype),
                       torch.full((len(p.q), p.spec.num_q_heads), UNWRITTEN))  # fmt: skip
    with simulated_hopper(seed):
        state = quire.attention(p.q, p.cache, plan, out=held)
        for lengths in (p.batch.seq_lens, p.batch.cu_seqlens_q):
            if lengths is not None:
                lengths.add_(0)  # which PyTorch counts
        right = quire.attention(p.q, p.cache, plan, return_lse=True)
    assert error_budget(p, right).passed
    is_nan = state.lse.isnan()
    assert torch.equal(state.out.isnan().any(2), is_nan) and torch.equal(state.out.isnan().all(2), is_nan)
    tolerance = 0.05 if p.spec.allow_fp8 else 4e-3
    for found, expected in ((state.out, right.out), (state.lse, right.lse)):
        torch.testing.assert_close(found[~is_nan], expected[~is_nan], rtol=tolerance, atol=tolerance)
    return int(is_nan.sum()), int((~is_nan).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("queries", "how"), [(1, "cut"), (2, "cut"), (1, "whole")])
def test_a_stale_schedule_over_latents_gives_the_right_result_or_nan(kind, queries, how, take):
    """Sequences grow, shrink, become empty, and take turns; producers and consumers walk the same tiles."""
    num_heads, fields, variant = KINDS[kind]
    take(variant, how)
    spec = quire.AttentionSpec.mla(num_q_heads=num_heads, softmax_scale=0.07, dtype=torch.float16, **fields)
    lens = np.array([400, 20, 180, 64, 130])
    p = make_problem(spec, ((queries, 400),) * len(lens), page_size=64, one_query=queries == 1)
    bounds = p.bounds | {"max_seq_len": 20000 if spec.allow_fp8 else 400}
    batch = dataclasses.replace(p.batch, page_table=torch.nn.functional.pad(p.batch.page_table, (0, 400)))
    p = dataclasses.replace(p, batch=batch)
    with simulated_hopper(num_sms=3 * cdiv(num_heads * queries, ROWS[variant])):
        plan = quire.plan(spec, batch, **bounds, kernel="mla_hopper")
    assert plan.launch.num_partitions == 3 and plan.launch.fp8_mma == spec.allow_fp8
    random, rows = np.random.default_rng(queries), np.zeros(2, int)
    for i in range(2):
        p.batch.seq_lens.copy_(torch.tensor(random.permutation(lens)))
        with simulated_hopper(i):
            quire.attention(p.q, p.cache, plan)
        changed = random.permutation(lens) * (random.random(len(lens)) < 0.8)
        set_unseen(p.batch.seq_lens, np.maximum(changed, queries).astype(np.int32))
        rows += assert_right_or_nan(p, plan, i)
    assert rows.all()


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(
            (kind, "cut")
            for kind in ("16 rows", "32 of many rows", "32 of many fp8 rows", "64 rows", "products in fp8")
        ),
        ("64 rows", "whole"),
    ],
)
def test_queries_over_latents_may_move_between_sequences_under_a_schedule(kind, how, take):
    """Into row blocks that sequences did not have, at the beginning of the batch, in its middle, and at its end."""
    num_heads, fields, variant = KINDS[kind]
    take(variant, how)
    spec = quire.AttentionSpec.mla(num_q_heads=num_heads, softmax_scale=0.07, dtype=torch.float16, **fields)
    p = make_problem(spec, ((1, 90), (3, 150), (1, 70), (1, 40), (2, 100)), page_size=64)
    p.batch.cu_seqlens_q.copy_(torch.tensor((0, 1, 5, 5, 6, 8)))
    if spec.allow_fp8:
        batch = dataclasses.replace(p.batch, page_table=torch.nn.functional.pad(p.batch.page_table, (0, 400)))
        p = dataclasses.replace(p, batch=batch)
    bounds = p.bounds | {"max_query_len": 5, "max_seq_len": 20000 if spec.allow_fp8 else 150}
    with simulated_hopper(num_sms=3 * cdiv(num_heads * 5, ROWS[variant])):
        plan = quire.plan(spec, p.batch, **bounds, kernel="mla_hopper")
    assert plan.launch.fp8_mma == spec.allow_fp8
    with simulated_hopper():
        quire.attention(p.q, p.cache, plan)
    rows = np.zeros(2, int)
    for ends in ((4, 5, 6, 7, 8), (1, 1, 4, 4, 8), (0, 2, 2, 7, 8), (1, 5, 5, 6, 8)):
        set_unseen(p.batch.cu_seqlens_q, (0, *ends))
        rows += assert_right_or_nan(p, plan, ends[0])
    assert rows.all()


def test_a_schedule_of_more_queries_reads_none_beyond_those_of_now():
    spec = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.07, dtype=torch.float16)
    p = make_problem(spec, ((2, 150), (2, 150)), page_size=64)
    with simulated_hopper(num_sms=2):
        plan = quire.plan(spec, p.batch, **p.bounds, kernel="mla_hopper")
        quire.attention(p.q, p.cache, plan)
    set_unseen(p.batch.cu_seqlens_q, (0, 1, 2))
    memory = torch.empty(2 * 16 * 576, dtype=torch.float16)  # the simulator knows where its storage ends
    fewer = dataclasses.replace(p, q=memory.view(2, 16, 576).copy_(p.q[:2]))
    with simulated_hopper():
        state = quire.attention(fewer.q, p.cache, plan, return_lse=True)
    assert state.lse.isnan().all()


def test_the_schedule_of_latents_is_found_once_and_again_after_a_write(monkeypatch):
    spec = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.07, dtype=torch.float16)
    p = make_problem(spec, ((1, 300), (1, 40)), page_size=64, one_query=True)
    with simulated_hopper(num_sms=3):
        plan = quire.plan(spec, p.batch, **p.bounds, kernel="mla_hopper")
    launches, kernel = [], scheduling.Kernel

    def counted(function: Any) -> Any:
        launch = kernel(function)
        return lambda *arguments: (launches.append(arguments), launch(*arguments))

    monkeypatch.setattr(scheduling, "Kernel", counted)
    for writes, expected in ((False, 1), (False, 1), (True, 2), (False, 2)):
        if writes:
            p.batch.seq_lens.copy_(torch.tensor([250, 10]))
        with simulated_hopper():
            assert error_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True)).passed
        assert len(launches) == expected
