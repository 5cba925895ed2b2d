"""The portable MLA kernel against the oracle: rows, dtypes, pages, splits, poison, captured graphs, repeated runs."""

import pytest
import torch

import quire
from quire.testing import error_budget, make_problem

MIXED = ((1, 2000), (1, 17), (4, 700), (1, 0), (0, 50), (2, 64), (3, 129), (1, 128))
FP8 = torch.float8_e4m3fn


def mla(num_q_heads=16, **fields):
    return quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=192**-0.5, **fields)


def solve(spec, lens, options=None, **problem):
    p = make_problem(spec, lens, device="cuda", **problem)
    plan = quire.plan(spec, p.batch, **p.bounds, kernel="mla", **options or {})
    return p, plan, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)


def assert_right(spec, lens, options=None, **problem):
    p, plan, state = solve(spec, lens, options, **problem)
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)


@pytest.mark.parametrize("num_q_heads", [1, 16, 40, 128])
def test_heads(num_q_heads):
    assert_right(mla(num_q_heads), MIXED, page_size=64)


@pytest.mark.parametrize("page_size", [1, 48, 64, 528])
def test_pages(page_size):
    assert_right(mla(), MIXED, page_size=page_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_dtypes(dtype, kv_dtype):
    assert_right(mla(dtype=dtype, kv_dtype=kv_dtype), MIXED, page_size=64, scales="tensor")


@pytest.mark.parametrize("num_q_heads", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_records(dtype, num_q_heads):
    assert_right(mla(num_q_heads, dtype=dtype, kv_dtype=FP8), MIXED, page_size=64, layout="fp8_ds_mla")


@pytest.mark.parametrize(
    "fields",
    [
        {"causal": False},
        {"sliding_window": 300},
        {"softcap": 3.0, "alibi": True, "sinks": True, "sliding_window": 300},
        {"kv_lora_rank": 256},
        {"qk_rope_head_dim": 0},
        {"kv_lora_rank": 320, "qk_rope_head_dim": 48},
    ],
    ids=str,
)
def test_features(fields):
    assert_right(mla(**fields), MIXED, page_size=64)


@pytest.mark.parametrize("num_q_heads", [16, 128])
@pytest.mark.parametrize("lens", [((1, 1),), ((1, 20000),), ((1, 4096),) * 3, ((1, 9000), (1, 5), (1, 0))], ids=str)
def test_lengths(lens, num_q_heads):
    assert_right(mla(num_q_heads), lens, page_size=64, one_query=True)


def test_more_sequences_than_a_program_looks_at_at_once():
    assert_right(mla(), tuple((1, 37 * i % 900) for i in range(300)), page_size=64, one_query=True)


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"num_splits": 3}], ids=str)
def test_prompts(options):
    assert_right(mla(), ((300, 900), (64, 64), (1, 500)), options, page_size=64)


@pytest.mark.parametrize("num_q_heads", [16, 128])
def test_a_captured_graph_serves_all_lengths_within_its_bounds(num_q_heads):
    p, plan, _ = solve(mla(num_q_heads), ((1, 3000), (1, 2000), (1, 900)), page_size=64, one_query=True)
    state = quire.State(torch.empty_like(p.q[..., :512]), torch.empty(p.q.shape[:2], device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.attention(p.q, p.cache, plan, out=state)
    for lens in ((1, 2, 3), (64, 0, 33), (0, 0, 0), (3000, 2000, 900), (2999, 128, 65)):
        p.batch.seq_lens.copy_(torch.tensor(lens))
        graph.replay()
        verdict = error_budget(p, state)
        assert verdict.passed, (lens, verdict)


@pytest.mark.parametrize("fields", [{}, {"num_q_heads": 128}, {"kv_dtype": FP8}], ids=str)
def test_runs_are_bitwise_equal(fields):
    p, plan, first = solve(mla(**fields), ((1, 5000), (2, 700), (1, 64)), page_size=64, scales="tensor")
    for _ in range(200):
        state = quire.attention(p.q, p.cache, plan, return_lse=True)
        assert torch.equal(state.out, first.out) and torch.equal(state.lse, first.lse)
