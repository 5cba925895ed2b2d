"""Attention to chosen keys on a GPU against the oracle: sizes of models, captured graphs, repeated runs, no waiting."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import quire
from quire.testing import error_budget, make_problem, random_chosen

FP8 = torch.float8_e4m3fn
DECODE = ((1, 5000), (1, 2000), (1, 40), (1, 0), (1, 3000))
MIXED = ((1, 3000), (7, 700), (0, 50), (1, 0), (130, 400))


def mla(num_q_heads=16, **fields):
    return quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=192**-0.5, **fields)


def solve(spec, lens, lists, layout="NHD", page_size=64, **problem):
    lists = {"causal": spec.causal} | lists
    choose = partial(random_chosen, **lists)
    p = make_problem(spec, lens, device="cuda", per_token=choose, layout=layout, page_size=page_size, **problem)
    plan = quire.plan(spec, p.batch, **p.bounds)
    return p, plan, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)


def assert_right(*args, **options):
    p, plan, state = solve(*args, **options)
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)


@pytest.mark.parametrize("num_q_heads", [1, 16, 64, 128])
@pytest.mark.parametrize("layout", ["NHD", "fp8_ds_mla"])
def test_deepseek_v3_2_decodes(num_q_heads, layout):
    spec = mla(num_q_heads, kv_dtype=None if layout == "NHD" else FP8)
    assert_right(spec, DECODE, {"width": 2048}, layout, one_query=True)


@pytest.mark.parametrize("layout", ["NHD", "fp8_ds_mla"])
def test_slots_of_latents_are_read_for_drafts_and_prompts(layout):
    spec = replace(mla(16, kv_dtype=None if layout == "NHD" else FP8), causal=False)
    assert_right(spec, MIXED, {"width": 512, "slots_of": 64, "counted": True}, layout)


@pytest.mark.parametrize("num_q_heads", [1, 16, 64, 128])
@pytest.mark.parametrize("layout", ["fp8_ds_mla_584", "fp8_ds_mla_528"])
def test_records_of_deepseek_v4_are_read(num_q_heads, layout):
    """In bfloat16, which the interpreter does not compute."""
    spec = replace(mla(num_q_heads, qk_rope_head_dim=0, kv_dtype=FP8, sinks=True), causal=False)
    for lens in (DECODE, MIXED):
        assert_right(spec, lens, {"width": 640, "slots_of": 64, "counted": True}, layout, one_query=lens is DECODE)


@pytest.mark.parametrize("rank", [512, 448])
def test_latents_of_other_widths_are_read(rank):
    assert_right(mla(64, kv_lora_rank=rank, qk_rope_head_dim=512 - rank, sinks=True), MIXED, {"width": 300})


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("group", [4, 16])
def test_minimax_m3_reads_blocks(group, kv_dtype):
    spec = quire.AttentionSpec(num_q_heads=4 * group, num_kv_heads=4, head_dim=128, kv_dtype=kv_dtype)
    assert_right(spec, DECODE, {"width": 16, "num_lists": 4, "block_size": 128}, "HND", page_size=128, one_query=True)
    assert_right(spec, MIXED, {"width": 4, "num_lists": 4, "block_size": 128}, "HND", page_size=128)


@pytest.mark.parametrize("head_dim", [192, 256])
def test_step5_and_qwen4_read_regions_and_counted_lists(head_dim):
    spec = quire.AttentionSpec(num_q_heads=24, num_kv_heads=2, head_dim=head_dim)
    assert_right(spec, MIXED, {"width": 64, "num_lists": 2, "block_size": 8, "counted": True}, page_size=16)


@pytest.mark.parametrize("num_q_heads", [16, 128])
def test_a_captured_graph_reads_the_lists_and_lengths_of_each_replay(num_q_heads):
    p, plan, _ = solve(mla(num_q_heads), DECODE, {"width": 2048, "counted": True}, one_query=True)
    state = quire.State(torch.empty_like(p.q[..., :512]), torch.empty(p.q.shape[:2], device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.attention(p.q, p.cache, plan, out=state)
    p.cache.latents.nan_to_num_(nan=0.5)
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


@pytest.mark.parametrize("layout", ["NHD", "fp8_ds_mla"])
def test_runs_are_bitwise_equal(layout):
    spec = mla(16, kv_dtype=None if layout == "NHD" else FP8)
    p, plan, first = solve(spec, DECODE, {"width": 2048}, layout, one_query=True)
    for _ in range(100):
        state = quire.attention(p.q, p.cache, plan, return_lse=True)
        assert torch.equal(state.out, first.out) and torch.equal(state.lse, first.lse)


def test_the_host_does_not_wait(without_waiting):
    p, _, _ = solve(mla(16), DECODE, {"width": 512}, one_query=True)
    with without_waiting():
        plan = quire.plan(p.spec, p.batch, **p.bounds)
        quire.attention(p.q, p.cache, plan)


@pytest.mark.parametrize("num_q_heads", [16, 64, 128])
@pytest.mark.parametrize("layout", ["NHD", "fp8_ds_mla_584"])
def test_deepseek_v4_attends_to_a_window_and_to_compressed_keys(num_q_heads, layout):
    kv_dtype = None if layout == "NHD" else FP8
    spec = replace(mla(num_q_heads, qk_rope_head_dim=0, kv_dtype=kv_dtype, sinks=True), causal=False)
    for lens in (DECODE, MIXED):
        one_query = lens is DECODE
        p, _, _ = solve(spec, lens, {"width": 128, "slots_of": 64}, layout, one_query=one_query)
        other, _, _ = solve(
            spec, lens, {"width": 700, "slots_of": 16, "counted": True}, layout, page_size=16, one_query=one_query
        )
        p = replace(p, batch=replace(p.batch, extra_chosen=other.batch.chosen), extra_cache=other.cache)
        plan = quire.plan(spec, p.batch, **p.bounds)
        verdict = error_budget(p, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True))
        assert verdict.passed, (plan, verdict)
