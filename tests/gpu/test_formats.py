"""Caches below eight bits on a GPU: attention, writes, captured graphs, recorded calls."""

from dataclasses import replace

import pytest
import torch

import quire
from quire import debug
from quire.cache_formats import FORMATS
from quire.dispatch.device import device_properties
from quire.testing import error_budget, make_problem, unwritten, with_tensors
from tests.pairs import each_pair

LLAMA = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}
LENS = [
    ((1, 2000), (1, 17), (4, 700), (300, 300), (129, 1500), (1, 0), (0, 50)),
    ((1, 3000), (1, 1), (1, 129)),
    ((2, 900), (1, 2900)),
    ((8, 900),) * 3,
    ((700, 1100), (33, 90)),
]
HEADS = [{}, {"head_dim": 64}, {"head_dim": 256}, {"num_q_heads": 14}, {"softcap": 20.0, "sinks": True, "alibi": True}]


@pytest.mark.parametrize(
    *each_pair(
        kv_format=list(FORMATS),
        lens=LENS,
        heads=HEADS,
        dtype=[torch.bfloat16, torch.float16, torch.float32],
        pages=[(16, "NHD"), (64, "HND"), (7, "NHD")],
    ),
    ids=str,
)
def test_attention_is_that_of_the_numbers(kv_format, lens, heads, dtype, pages):
    spec = quire.AttentionSpec(**LLAMA | heads, kv_format=kv_format, dtype=dtype)
    p = make_problem(spec, lens, page_size=pages[0], layout=pages[1], device="cuda")
    for options in ({}, {"num_splits": 3}, {"batch_invariant": True}):
        plan = quire.plan(spec, p.batch, **p.bounds, **options)
        verdict = error_budget(p, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True))
        assert verdict.passed, (verdict, plan)


@pytest.mark.skipif(not device_properties(torch.device("cuda")).has_wgmma, reason="a launch for Hopper GPUs")
@pytest.mark.parametrize(
    *each_pair(
        stored=[
            *({"kv_format": name} for name in FORMATS),
            *({"kv_dtype": dtype} for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)),
        ],
        lens=[LENS[0], LENS[4]],
        heads=[*HEADS, {"sliding_window": 200}, {"head_dim": 80}, {"head_dim": 192, "head_dim_v": 128}],
        dtype=[torch.bfloat16, torch.float16],
        pages=[(16, "NHD"), (528, "HND"), (1, "NHD")],
        scales=["head", "token"],
    ),
    ids=str,
)
def test_prompts_are_decoded_once(stored, lens, heads, dtype, pages, scales):
    """In one graph for all lengths. Scratch holds NaN at first, and then what another step left there."""
    if stored.get("kv_format") == "nvfp4":
        heads = {name: number for name, number in heads.items() if name != "head_dim_v"}
    spec = quire.AttentionSpec(**LLAMA | heads | stored, dtype=dtype)
    p = make_problem(spec, lens, page_size=pages[0], layout=pages[1], scales=scales, device="cuda")
    plan = quire.plan(spec, p.batch, **p.bounds, kernel="decoded")
    plan.memory[plan.launch.scratch_size().counters :] = 255
    first = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    verdict = error_budget(p, first)
    assert verdict.passed, (verdict, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    fewer = 0 if spec.sliding_window else 11  # keys; those before a window are poisoned
    shorter = [max(q_len, kv_len - fewer) if kv_len else 0 for q_len, kv_len in lens]
    p.batch.seq_lens.copy_(torch.tensor(shorter))
    graph.replay()
    verdict = error_budget(replace(p, seq_lens=tuple(shorter)), state)
    assert verdict.passed, (verdict, plan)
    p.batch.seq_lens.copy_(torch.tensor([kv_len for _, kv_len in lens]))
    graph.replay()
    assert torch.equal(state.out, first.out) and torch.equal(state.lse, first.lse)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_captured_graph_writes_new_tokens_and_attends_to_them(kv_format):
    """The bits are those of a write and a call without new tokens, at all lengths."""
    spec = quire.AttentionSpec(**LLAMA, kv_format=kv_format)
    p = make_problem(spec, ((1, 2048), (1, 300), (1, 1100)), device="cuda")
    plan = quire.plan(spec, p.batch, **p.bounds)
    twin, k, v = with_tensors(p.cache, torch.clone), *torch.randn(2, 3, 2, 128, device="cuda").to(p.q.dtype)
    slots = unwritten(p)[1]["slot_mapping"]
    quire.attention(p.q, p.cache, plan, k=k, v=v, slot_mapping=slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = quire.attention(p.q, p.cache, plan, k=k, v=v, slot_mapping=slots, return_lse=True)
    quire.write_kv(k, v, twin, slots)
    for lens in ((2048, 300, 1100), (1, 64, 65), (128, 129, 17), (2047, 299, 16)):
        p.batch.seq_lens.copy_(torch.tensor(lens))
        slots.copy_(unwritten(p)[1]["slot_mapping"])
        k.normal_()
        v.normal_()
        graph.replay()
        quire.write_kv(k, v, twin, slots)
        expected = quire.attention(p.q, twin, plan, return_lse=True)
        assert torch.equal(state.out, expected.out) and torch.equal(state.lse, expected.lse), lens
        for mine, other in zip(tensors_of(p.cache), tensors_of(twin), strict=True):
            assert torch.equal(mine, other), lens


def tensors_of(cache: quire.PagedKVCache) -> list[torch.Tensor]:
    """Return the bytes of a cache's tensors."""
    tensors = (cache.k, cache.v, *cache.scale_tensors)
    return [x.contiguous().view(torch.uint8) for x in tensors]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_writes_are_those_of_a_cpu(kv_format):
    spec = quire.AttentionSpec(**LLAMA, kv_format=kv_format)
    x = 3 * torch.randn(2, 128, 2, 128).bfloat16()
    caches = [quire.PagedKVCache.empty(spec, 8, 16, device=device) for device in ("cpu", "cuda")]
    for cache in caches:
        quire.write_kv(*x.to(cache.device), cache, torch.arange(128, device=cache.device))
    for mine, other in zip(*map(tensors_of, caches), strict=True):
        assert torch.equal(mine, other.cpu())


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_call_on_a_gpu_is_replayed_there_and_on_a_cpu(kv_format, tmp_path):
    spec = quire.AttentionSpec(**LLAMA, kv_format=kv_format)
    problem = make_problem(spec, ((1, 300), (200, 400)), device="cuda")
    plan = quire.plan(spec, problem.batch, **problem.bounds)
    for contents in (False, True):
        with debug.record(tmp_path / "call.quire", contents=contents):
            quire.attention(problem.q, problem.cache, plan)
        call = debug.load(tmp_path / "call.quire")
        assert debug.replay(call, "cuda").passed and debug.replay(call, "cpu").passed
