"""Shared prefixes on a GPU: real sizes, captured graphs, no waiting for the device, and the time that they save."""

from statistics import median

import pytest
import torch

import quire
from quire.targets import card_here
from quire.testing import Oracle, error_budget
from tests.kernels.test_shared_prefix import shared_problem

LLAMA = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
LATENTS = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=192**-0.5)
LENS = tuple((1, 2048 + 16 * i + 5) for i in range(24))
RUNS = [[(24, 1024)], [(8, 1024), (12, 512), (4, 0)]]


@pytest.mark.parametrize("levels", [2048, RUNS, [[(8, 2048), (8, 2048), (8, 1024)]]], ids=["all", "runs", "equal runs"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_large_batches(levels, kv_dtype):
    spec = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128, sinks=True, kv_dtype=kv_dtype)
    problem = shared_problem(spec, LENS, levels, device="cuda", page_size=16, one_query=True)
    oracle = Oracle(problem)
    for shared_prefix in (levels, None):
        plan = quire.plan(spec, problem.batch, **problem.bounds, shared_prefix=shared_prefix)
        state = quire.attention(problem.q, problem.cache, plan, **problem.tables, return_lse=True)
        assert oracle.judge(state).passed, (plan, oracle.judge(state))


def test_chunks_and_latents():
    lens = ((40, 3000), (200, 2500), (1, 2100), (1, 2049))
    problem = shared_problem(LLAMA, lens, 2048, device="cuda", page_size=16)
    plan = quire.plan(LLAMA, problem.batch, **problem.bounds, shared_prefix=2048)
    assert error_budget(problem, quire.attention(problem.q, problem.cache, plan, return_lse=True)).passed
    problem = shared_problem(LATENTS, LENS, 2048, device="cuda", page_size=64, one_query=True)
    plan = quire.plan(LATENTS, problem.batch, **problem.bounds, shared_prefix=2048)
    assert error_budget(problem, quire.attention(problem.q, problem.cache, plan, return_lse=True)).passed


@pytest.mark.parametrize("levels", [1024, RUNS], ids=["all", "runs"])
def test_a_captured_graph_follows_lengths_and_pages(levels):
    problem = shared_problem(LLAMA, LENS, levels, device="cuda", page_size=16, one_query=True)
    later = shared_problem(LLAMA, [(1, n - 4) for _, n in LENS], levels, device="cuda", page_size=16, seed=1)
    plan = quire.plan(LLAMA, problem.batch, **problem.bounds, shared_prefix=levels)
    q, k, v = problem.q.clone(), problem.cache.k, problem.cache.v
    out = quire.State(torch.empty_like(q), torch.empty(q.shape[:2], device="cuda"))
    quire.attention(q, problem.cache, plan, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.attention(q, problem.cache, plan, out=out)
    graph.replay()
    assert error_budget(problem, out).passed
    problem.batch.page_table[:, : later.batch.page_table.shape[1]] = later.batch.page_table
    problem.batch.seq_lens.copy_(later.batch.seq_lens)
    for mine, new in ((q, later.q), (k, later.cache.k), (v, later.cache.v)):
        mine[: len(new)].copy_(new)
    graph.replay()
    assert error_budget(later, out).passed


def test_a_step_never_waits_for_the_device(without_waiting):
    problem = shared_problem(LLAMA, LENS, RUNS, device="cuda", page_size=16)
    with without_waiting():
        for _ in range(2):
            plan = quire.plan(LLAMA, problem.batch, **problem.bounds, shared_prefix=RUNS)
            state = quire.attention(problem.q, problem.cache, plan, return_lse=True)
    assert error_budget(problem, state).passed


@pytest.mark.skipif(card_here() is not None, reason="the goal is one for the GPU's own code")
def test_64_samples_of_a_prompt_take_a_third_of_the_time():
    """The goal is 0.35 of the flat plan's time; see docs/shared_prefix.md."""
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    cache = quire.PagedKVCache.empty(spec, 512 + 64 * 16, 16, device="cuda")
    cache.k.normal_(), cache.v.normal_()
    own = torch.arange(512, 512 + 64 * 16, dtype=torch.int32, device="cuda").view(64, 16)
    table = torch.cat([torch.arange(512, dtype=torch.int32, device="cuda").expand(64, -1), own], 1)
    batch = quire.Batch(table, torch.full((64,), 8448, dtype=torch.int32, device="cuda"))
    q = torch.randn(64, 32, 128, dtype=torch.bfloat16, device="cuda")
    micros = {}
    for shared_prefix in (None, 8192):
        plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=8448, shared_prefix=shared_prefix)
        quire.attention(q, cache, plan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(8):
                quire.attention(q, cache, plan)
        times = []
        for _ in range(20):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end) / 8)
        micros[shared_prefix] = median(times)
    print(f"flat {micros[None]:.1f} µs, shared {micros[8192]:.1f} µs")
    assert micros[8192] <= 0.35 * micros[None], micros
