"""FlashInfer's wrappers for CUDA graphs, captured and replayed; needs a GPU."""

import torch

import quire
from quire.integrations import flashinfer
from quire.testing import error_budget, make_problem

SPEC = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)


def page_lists(p):
    lens, size = p.batch.seq_lens, p.cache.page_size
    return p.batch.cu_pages, p.batch.page_table, torch.where(lens > 0, (lens - 1) % size + 1, 0)


def test_a_captured_decode_is_replayed_for_other_lengths_and_pages():
    held = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, 400, 3)]
    space = torch.empty(1, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(space, *held)
    problems = [
        make_problem(SPEC, [(1, n) for n in lens], flat_table=True, spare_pages=400, seed=seed, device="cuda")
        for seed, lens in enumerate(((16, 16, 16), (3000, 17, 0), (1, 900, 2000)))
    ]
    num_pages = max(p.cache.num_pages for p in problems)
    kv = torch.zeros(num_pages, 2, 16, 2, 128, dtype=torch.bfloat16, device="cuda")
    q = torch.zeros(3, 8, 128, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    for i, p in enumerate(problems):
        wrapper.plan(*(x.cpu() for x in page_lists(p)), 8, 2, 128, 16, q_data_type="bfloat16")
        q.copy_(p.q)
        kv[: p.cache.num_pages, 0], kv[: p.cache.num_pages, 1] = p.cache.k, p.cache.v
        if i == 0:
            wrapper.run(q, kv, return_lse=True)
            with torch.cuda.graph(graph):
                out, lse = wrapper.run(q, kv, return_lse=True)
        graph.replay()
        verdict = error_budget(p, quire.State(out, lse * torch.log(torch.tensor(2.0)).item()))
        assert verdict.passed, verdict


def test_a_captured_prefill_is_replayed_for_other_lengths_and_pages():
    queries, *held = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, 4, 400, 3))
    space = torch.empty(1, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", True, queries, *held)
    problems = [
        make_problem(SPEC, lens, flat_table=True, spare_pages=400, seed=seed, device="cuda")
        for seed, lens in enumerate(([(100, 100), (100, 300), (100, 100)], [(290, 3000), (1, 17), (9, 9)]))
    ]
    num_pages = max(p.cache.num_pages for p in problems)
    kv = torch.zeros(num_pages, 2, 16, 2, 128, dtype=torch.bfloat16, device="cuda")
    q = torch.zeros(300, 8, 128, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    for i, p in enumerate(problems):
        lists = p.batch.cu_seqlens_q, *page_lists(p)
        wrapper.plan(*(x.cpu() for x in lists), 8, 2, 128, 16, causal=True, q_data_type="bfloat16")
        q.copy_(p.q)
        kv[: p.cache.num_pages, 0], kv[: p.cache.num_pages, 1] = p.cache.k, p.cache.v
        if i == 0:
            wrapper.run(q, kv)
            with torch.cuda.graph(graph):
                out = wrapper.run(q, kv)
        graph.replay()
        verdict = error_budget(p, out)
        assert verdict.passed, verdict
