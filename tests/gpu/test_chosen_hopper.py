"""The kernel of chosen keys for Hopper GPUs against the oracle: heads, records, parts, graphs, repeated runs."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

import quire
from quire.dispatch.device import device_properties
from quire.testing import error_budget, make_problem, random_chosen

if not (torch.cuda.is_available() and device_properties(torch.device("cuda")).has_wgmma):
    pytest.skip("a kernel for Hopper GPUs alone", allow_module_level=True)

DECODE = ((1, 5000), (1, 2000), (1, 40), (1, 0), (1, 3000))
MIXED = ((1, 3000), (7, 700), (0, 50), (1, 0), (130, 400))
RECORDS = {"kv_dtype": torch.float8_e4m3fn}


def mla(num_q_heads=16, **fields):
    return quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=192**-0.5, **fields)


def of_records(num_q_heads, **fields):
    return mla(num_q_heads, **RECORDS | {"allow_fp8": num_q_heads > 32} | fields)


def solve(spec, lens, lists, num_splits=None, **problem):
    choose = partial(random_chosen, **{"causal": spec.causal} | lists)
    layout = "NHD" if spec.kv_dtype is spec.dtype else "fp8_ds_mla"
    p = make_problem(spec, lens, device="cuda", per_token=choose, **{"layout": layout, "page_size": 64} | problem)
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=num_splits)
    assert plan.kernel == "chosen_hopper" and plan.launch_for(p.cache) is plan.launch, plan
    return p, plan, quire.attention(p.q, p.cache, plan, return_lse=True)


def assert_right(*args, **options):
    p, plan, state = solve(*args, **options)
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)


@pytest.mark.parametrize("num_q_heads", [1, 8, 16, 24, 32, 40, 64, 100, 128])
@pytest.mark.parametrize("make", [mla, of_records])
def test_heads_and_records(make, num_q_heads):
    assert_right(make(num_q_heads), DECODE, {"width": 2048}, one_query=True)
    assert_right(make(num_q_heads), MIXED, {"width": 300, "counted": True})


@pytest.mark.parametrize("num_splits", [1, 2, 5, 32])
@pytest.mark.parametrize("spec", [mla(16), mla(128), of_records(16), of_records(128)], ids=str)
def test_parts_of_lists_of_slots(spec, num_splits):
    spec = replace(spec, causal=False)
    assert_right(spec, DECODE, {"width": 1000, "slots_of": 64, "counted": True}, num_splits, one_query=True)
    assert_right(spec, MIXED, {"width": 512, "slots_of": 64}, num_splits)


@pytest.mark.parametrize("page_size", [1, 16, 48, 528])
@pytest.mark.parametrize("num_q_heads", [16, 64])
def test_pages(num_q_heads, page_size):
    assert_right(mla(num_q_heads, dtype=torch.float16), MIXED, {"width": 200}, page_size=page_size)


@pytest.mark.parametrize("spec", [mla(16), mla(128), of_records(16), of_records(128)], ids=str)
def test_a_captured_graph_reads_the_lists_and_lengths_of_each_replay(spec):
    p, plan, _ = solve(spec, DECODE, {"width": 2048, "counted": True}, one_query=True)
    state = quire.State(torch.empty_like(p.q[..., :512]), torch.empty(p.q.shape[:2], device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.attention(p.q, p.cache, plan, out=state)
    for part in p.cache.records if p.cache.scale_kind == "record" else (p.cache.latents,):
        part.copy_(part.float().nan_to_num(nan=0.5))
    chosen = p.batch.chosen
    there = quire.Batch(page_table=p.batch.page_table.cpu(), seq_lens=p.batch.seq_lens.cpu())
    for seed in range(1, 6):
        drawn = random_chosen(there, 5, width=2048, counted=True, seed=seed)
        chosen.indices.copy_(drawn.chosen.indices)
        chosen.lens.copy_(drawn.chosen.lens)
        if seed == 5:
            chosen.lens.zero_()
        graph.replay()
        verdict = error_budget(p, state)
        assert verdict.passed, (seed, verdict)
    assert not state.out.any()


@pytest.mark.parametrize("spec", [mla(16), mla(128), of_records(16), of_records(128)], ids=str)
def test_runs_are_bitwise_equal(spec):
    p, plan, first = solve(spec, DECODE, {"width": 2048}, one_query=True)
    for _ in range(100):
        state = quire.attention(p.q, p.cache, plan, return_lse=True)
        assert torch.equal(state.out, first.out) and torch.equal(state.lse, first.lse)


@pytest.mark.parametrize("spec", [mla(16), mla(128)], ids=str)
def test_a_token_has_the_same_bits_in_every_batch_invariant_batch(spec):
    choose = partial(random_chosen, width=700)
    p = make_problem(spec, ((300, 900),), device="cuda", per_token=choose, page_size=64)
    plan = quire.plan(spec, p.batch, **p.bounds, batch_invariant=True)
    assert plan.kernel == "chosen_hopper"
    whole = quire.attention(p.q, p.cache, plan)
    last = quire.ChosenKeys(p.batch.chosen.indices[-3:])
    starts = torch.tensor([0, 3], dtype=torch.int32, device="cuda")
    batch = replace(p.batch, cu_seqlens_q=starts, chosen=last)
    few = quire.plan(spec, batch, max_query_len=3, max_seq_len=900, batch_invariant=True)
    assert torch.equal(quire.attention(p.q[-3:], p.cache, few), whole[-3:])


UNITED = [mla(16), mla(8), mla(32), mla(24), of_records(16, allow_fp8=True)]


def of_prompts(spec, shared, **options):
    lists = {"width": 400, "shared": shared} | ({} if spec.causal else {"slots_of": 64})
    p, plan, state = solve(spec, ((1200, 3000), (1, 50), (0, 9), (900, 2000)), lists, **options)
    assert plan.launch.union > 1
    return p, plan, state, plan.runner.unions.counts.tensor()[: plan.launch.num_unions(2101)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", UNITED, ids=str)
def test_prompts_attend_to_unions_where_tokens_have_keys_in_common(spec, causal):
    spec = replace(spec, causal=causal)
    for shared in (0.8, 0.0):
        p, plan, state, counts = of_prompts(spec, shared)
        verdict = error_budget(p, state)
        assert verdict.passed, (plan, verdict)
        assert (counts > 0).all() if shared else (counts < 0).any(), counts


@pytest.mark.parametrize("spec", UNITED, ids=str)
def test_unions_of_a_captured_graph_are_those_of_each_replay(spec):
    p, plan, first, _ = of_prompts(spec, 0.8)
    state = quire.State(torch.empty_like(first.out), torch.empty_like(first.lse))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.attention(p.q, p.cache, plan, out=state)
    lists = p.batch.chosen.indices.clone()
    for change in (lists.roll(1, 1), torch.where(lists % 3 == 0, -1, lists), lists):
        p.batch.chosen.indices.copy_(change)
        for _ in range(10):
            graph.replay()
        verdict = error_budget(p, state)
        assert verdict.passed, verdict
    assert torch.equal(state.out, first.out) and torch.equal(state.lse, first.lse)


@pytest.mark.parametrize("seed", range(12))
def test_whole_space(seed):
    draw = random.Random(seed)
    spec = draw.choice([mla, of_records])(draw.choice([1, 12, 16, 20, 32, 33, 64, 96, 128]), causal=draw.random() < 0.5)
    lens = [(draw.choice([1, 1, 3, 90]), draw.choice([100, 700, 2500])) for _ in range(draw.randint(1, 30))]
    lists = {"width": draw.choice([1, 63, 64, 65, 640, 2048]), "counted": draw.random() < 0.5}
    if not spec.causal:
        lists["slots_of"] = 64
    assert_right(spec, lens, lists, draw.choice([None, None, 1, 3, 8]), seed=seed)
