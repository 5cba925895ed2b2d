"""Outputs in float8_e4m3fn: a result is computed in float32, divided by the scale, and rounded once.

Queries of float32 have results of float32, so what a plain call returns says each bit of what is stored.
"""

from dataclasses import replace

import pytest
import torch

import quire
from quire import intervals, reference
from quire.testing import Problem, error_budget, make_problem, unwritten
from tests.extended import extended, some_extended

E4M3 = torch.float8_e4m3fn
MIXED = ((1, 50), (3, 3), (7, 40), (0, 9), (1, 0), (2, 17))
LONG = ((1, 300), (1, 5), (3, 200), (1, 0))
HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
LATENTS = {"num_kv_heads": 1, "head_dim": 48, "head_dim_v": 32, "softmax_scale": 0.2, "latent": True}
EVERYTHING = {"softcap": 3.0, "alibi": True, "sinks": True, "sliding_window": 11}
SATURATES, SUBNORMAL = 5e-4, 20.0  # scales: results beyond 448 of them, and below 2^-6 of them


def scaled(problem: Problem, scale: float) -> Problem:
    """Return the problem of an output in e4m3."""
    return replace(problem, out_scale=torch.tensor([scale], device=problem.q.device))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def assert_rounded_once(problem: Problem, plan: quire.Plan, *scales: float) -> None:
    """Compare outputs with the rounded output of a plain call, bit for bit; problem.q must be float32."""
    plain = quire.attention(problem.q, problem.cache, plan, **problem.tables, return_lse=True)
    for scale in scales:
        p = scaled(problem, scale)
        found = quire.attention(p.q, p.cache, plan, **p.tables, out_scale=p.out_scale, return_lse=True)
        assert found.out.dtype is E4M3
        assert torch.equal(bits(found.out), bits(reference.quantise(plain.out, p.out_scale)))
        assert torch.equal(found.lse, plain.lse)
        assert error_budget(p, found).passed


PLANS = {  # fields of the spec, lengths, options of the plan, of the problem
    "block": ({}, MIXED, {"num_splits": 1}, {}),
    "block, everything": (EVERYTHING, MIXED, {"num_splits": 1}, {"page_size": 5}),
    "one pass of split keys": ({}, ((1, 50), (1, 3)), {"num_splits": 2}, {"one_query": True}),
    "split keys": ({}, LONG, {"num_splits": 4}, {}),
    "split keys, everything": (EVERYTHING | {"sliding_window": 90}, LONG, {"num_splits": 4}, {}),
    "values of another width": ({"head_dim_v": 24}, LONG, {"num_splits": 3}, {}),
    "int8, scales per head": ({"kv_dtype": torch.int8}, LONG, {"num_splits": 3}, {}),
    "e4m3, scales per token": ({"kv_dtype": E4M3}, MIXED, {"num_splits": 1}, {"scales": "token"}),
    "intervals": ({}, MIXED, {"num_splits": 1}, {"per_token": intervals.causal}),
    "intervals, split keys": ({}, LONG, {"num_splits": 3}, {"per_token": intervals.causal}),
    "batch-invariant": ({}, ((1, 300), (20, 40)), {"batch_invariant": True}, {}),
    "latents": (LATENTS, MIXED, {}, {}),
    "latents, split keys": (LATENTS, LONG, {"num_splits": 3}, {}),
}


# Others have "split keys" and more, and other dtypes of the cache.
REPEATING = "split keys", "int8, scales per head", "values of another width", "intervals, split keys"


@pytest.mark.parametrize("case", some_extended(PLANS, REPEATING, [x for x in PLANS if "everything" not in x]))
def test_a_float32_result_is_rounded_once(case, device, options):
    fields, lens, plan_options, of_problem = PLANS[case]
    problem = make_problem(quire.AttentionSpec(**HEADS | fields), lens, **of_problem, device=device)
    plan = quire.plan(problem.spec, problem.batch, **problem.bounds, **options(**plan_options))
    assert_rounded_once(problem, plan, SATURATES, 0.013, SUBNORMAL)


def test_the_scales_of_these_tests_saturate_and_reach_subnormal_numbers(device):
    problem = make_problem(quire.AttentionSpec(**HEADS), MIXED, device=device)
    plan = quire.plan(problem.spec, problem.batch, **problem.bounds)
    largest, smallest = (
        quire.attention(problem.q, problem.cache, plan, out_scale=torch.tensor([s], device=device)).float().abs()
        for s in (SATURATES, SUBNORMAL)
    )
    assert (largest == 448).any() and (largest < 448).any()
    assert ((smallest > 0) & (smallest < 2.0**-6)).any() and (smallest >= 2.0**-6).any()


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 40},
        {"head_dim": 40, "kv_dtype": E4M3},
        {"kv_dtype": torch.int8, "sinks": True},
        LATENTS,
        LATENTS | {"kv_dtype": E4M3},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_splits", [1, pytest.param(3, marks=pytest.mark.triton)])
def test_16_bit_queries_are_within_budget(fields, num_splits, device, options):
    spec = quire.AttentionSpec(**HEADS | fields | {"dtype": torch.float16})
    problem = scaled(make_problem(spec, LONG, device=device), 0.01)
    plan = quire.plan(spec, problem.batch, **problem.bounds, **options(num_splits=num_splits))
    out_scale = problem.out_scale
    state = quire.attention(problem.q, problem.cache, plan, **problem.tables, out_scale=out_scale, return_lse=True)
    assert error_budget(problem, state).passed
    wrong = (state.out.float() * 1.13).to(E4M3)  # one step of 3 bits
    assert not error_budget(problem, wrong).passed and not error_budget(problem, state.out.float()).passed


def test_results_are_not_rounded_to_16_bits_first(device):
    """The mean of both values is below the middle of 1.125 and 1.25. In float16 it would be that middle."""
    spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.float16)
    cache = quire.PagedKVCache(*torch.zeros(2, 1, 4, 2, 16, dtype=torch.float16, device=device))
    cache.v[0, 0], cache.v[0, 1] = 1.1875, 1.1875 - 2.0**-10
    assert (cache.v[0, :2].float().mean(0).half().to(E4M3).float() == 1.25).all()
    one_page, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    plan = quire.plan(spec, quire.Batch(one_page.to(device), lens.to(device)), max_query_len=1, max_seq_len=2)
    q = torch.zeros(1, 2, 16, dtype=torch.float16, device=device)
    for return_lse in (False, True):
        out = quire.attention(q, cache, plan, out_scale=torch.ones(1, device=device), return_lse=return_lse)
        assert ((out.out if return_lse else out).float() == 1.125).all()


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("case", [extended("decode"), "drafts"])
def test_the_launch_that_folds_states_quantises(case, device, take):
    take("joined")
    lens = ((1, 20), (1, 0), (1, 600)) if case == "decode" else ((3, 600), (1, 300))
    problem = make_problem(quire.AttentionSpec(**HEADS, sinks=True), lens, device=device)
    plan = quire.plan(problem.spec, problem.batch, **problem.bounds, num_splits=3, batch_invariant=True)
    assert plan.launch.has_combine_launch
    assert_rounded_once(problem, plan, 0.013)


def test_a_step_that_writes_its_tokens_quantises_too(device):
    problem = scaled(make_problem(quire.AttentionSpec(**HEADS), ((1, 50), (3, 9), (1, 0)), device=device), 0.013)
    cache, new = unwritten(problem)
    plan = quire.plan(problem.spec, problem.batch, **problem.bounds)
    out_scale = problem.out_scale
    found = quire.attention(problem.q, cache, plan, **new, out_scale=out_scale)
    again = quire.attention(problem.q, problem.cache, plan, out_scale=out_scale)
    assert torch.equal(bits(found), bits(again)) and error_budget(problem, found).passed


def test_keys_that_are_not_paged(device):
    spec = quire.AttentionSpec(**HEADS)
    starts = torch.tensor([0, 7, 12], dtype=torch.int32, device=device)
    q, (k, v) = torch.randn(12, 6, 16, device=device), torch.randn(2, 12, 2, 16, device=device)
    plan = quire.plan(spec, quire.Batch.varlen(starts, starts), max_query_len=7, max_seq_len=7, num_tokens=12)
    scale = torch.full((1, 1), 0.02, device=device)
    found = quire.varlen_attention(q, k, v, plan, out_scale=scale)
    assert torch.equal(bits(found), bits(reference.quantise(quire.varlen_attention(q, k, v, plan), scale)))


def test_the_last_merge_of_shared_prefixes_quantises(device):
    """States of levels have the queries' dtype, as in a plain call."""
    problem = make_problem(quire.AttentionSpec(**HEADS), ((1, 21), (2, 18), (1, 30)), page_size=4, device=device)
    problem.batch.page_table[:, :4] = problem.batch.page_table[:1, :4].clone()
    plan = quire.plan(problem.spec, problem.batch, **problem.bounds, shared_prefix=16)
    assert_rounded_once(problem, plan, 0.013)


def test_infinite_results_saturate_and_nan_stays(device):
    """Each sequence has one key, whose value is its result; as `write_kv` stores them."""
    spec = quire.AttentionSpec(**HEADS)
    cache = quire.PagedKVCache(*torch.zeros(2, 6, 1, 2, 16, device=device))
    values = torch.tensor([0.0, float("inf"), -float("inf"), float("nan"), 3e38, -1e-30], device=device)
    cache.v.copy_(values[:, None, None, None])
    pages = torch.arange(6, dtype=torch.int32, device=device)[:, None]
    lens = torch.ones(6, dtype=torch.int32, device=device)
    plan = quire.plan(spec, quire.Batch(pages, lens), max_query_len=1, max_seq_len=1)
    q, out_scale = torch.zeros(6, 6, 16, device=device), torch.tensor(0.5, device=device)
    found = quire.attention(q, cache, plan, out_scale=out_scale).float()
    expected = torch.tensor([0.0, 448.0, -448.0, float("nan"), 448.0, 0.0], device=device)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)[:, None, None].expand_as(found))
    stored = quire.PagedKVCache.empty(replace(spec, kv_dtype=E4M3), 6, 1, device=device)
    quire.write_kv(cache.k[:, 0], cache.v[:, 0] / out_scale, stored, torch.arange(6, device=device))
    assert torch.equal(bits(found[:, 0].to(E4M3)), bits(stored.v[:, 0, 0]))


def test_outputs_go_where_they_are_told_and_nowhere_else(device):
    problem = scaled(make_problem(quire.AttentionSpec(**HEADS), ((1, 20), (2, 9)), device=device), 0.013)
    plan = quire.plan(problem.spec, problem.batch, **{**problem.bounds, "num_tokens": 5})
    wide = torch.full((5, 8, 20), 7.0, device=device).to(E4M3)
    lse = torch.full((5, 6), 7.0, device=device)
    q = torch.cat([problem.q, torch.full((2, 6, 16), float("nan"), device=device)])  # two rows of no sequence
    into = quire.State(wide[:, 1:7, :16], lse)
    state = quire.attention(q, problem.cache, plan, out=into, out_scale=problem.out_scale)
    assert state.out.data_ptr() == wide[:, 1:7].data_ptr()
    assert error_budget(problem, quire.State(state.out[:3], state.lse[:3])).passed
    bits_of_wide = wide.view(torch.uint8)
    bits_of_wide[:3, 1:7, :16] = torch.full((1,), 7.0).to(E4M3).view(torch.uint8).to(device)
    assert (wide.float() == 7).all() and (lse[3:] == 7).all()
