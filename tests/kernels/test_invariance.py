"""What `batch_invariant=True` promises: a token's result depends on its own sequence alone, bit for bit."""

import math
from dataclasses import replace

import pytest
import torch

import quire
from quire.dispatch.device import device_properties
from quire.testing import make_problem
from tests.extended import extended, some_extended

pytestmark = [pytest.mark.one_triton, pytest.mark.usefixtures("rows_by_themselves")]
GPU = torch.cuda.is_available()
SCALE = 8 if GPU else 1  # the interpreter is too slow for the lengths of a GPU
# On a GPU, kernels of test_hopper.py serve them.
HEADS = {"num_q_heads": 8 if GPU else 4, "num_kv_heads": 2, "head_dim": 64 if GPU else 16}
FEATURES = [
    {},
    {"sliding_window": 150 * SCALE},
    {"sinks": True, "softcap": 20.0},
    {"kv_dtype": torch.float8_e4m3fn, "head_dim": 64},
    {"alibi": True},
]


def attend(spec, problem, lens, num_splits=None):
    """Attend with the last `q_len` of each sequence's queries, at the lengths given; return the state."""
    rows, starts = [], problem.batch.query_starts.tolist()
    for seq, (q_len, kv_len) in enumerate(lens):
        first = starts[seq] + kv_len - q_len - (problem.seq_lens[seq] - (starts[seq + 1] - starts[seq]))
        rows += range(first, first + q_len)
    device = problem.q.device
    cu = torch.tensor([0, *(q for q, _ in lens)], device=device).cumsum(0).to(torch.int32)
    lengths = torch.tensor([kv for _, kv in lens], dtype=torch.int32, device=device)
    batch = quire.Batch(problem.batch.page_table[: len(lens)], lengths, cu)
    bounds = {"max_query_len": max(q for q, _ in lens), "max_seq_len": max(kv for _, kv in lens)}
    plan = quire.plan(spec, batch, **bounds, num_splits=num_splits, batch_invariant=True)
    return quire.attention(problem.q[rows], problem.cache, plan, **problem.tables, return_lse=True)


def equal(a, b):
    return torch.equal(a.out, b.out) and torch.equal(a.lse, b.lse)


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("features", [*FEATURES[:2], *map(extended, FEATURES[2:])], ids=str)
def test_the_rest_of_the_batch_and_the_cuts_change_nothing(features, device):
    spec = quire.AttentionSpec(**HEADS | features, dtype=torch.float16)
    length = 1300 * SCALE
    problem = make_problem(spec, ((1, length), (1, 700), (1, 40), (1, 1100 * SCALE)), device=device)
    alone = attend(spec, problem, ((1, length),))
    assert equal(alone, attend(spec, problem, ((1, length),), num_splits=1))
    assert equal(alone, attend(spec, problem, ((1, length),), num_splits=3))
    for others in (((1, 700),), ((1, 700), (1, 40), (1, 1100 * SCALE))):
        together = attend(spec, problem, ((1, length), *others))
        assert equal(alone, quire.State(together.out[:1], together.lse[:1])), others


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("features", [extended(FEATURES[0]), FEATURES[1], *map(extended, FEATURES[2:5])], ids=str)
def test_how_a_prompt_is_split_changes_nothing(features, device, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS | features, dtype=torch.float16)
    length, queries = 1100 * SCALE, 40  # 80 rows: tiles of 16 to 128 rows
    problem = make_problem(spec, ((queries, length),), device=device)
    whole = attend(spec, problem, ((queries, length),))
    assert_within_budget(problem, whole)
    assert equal(whole, attend(spec, problem, ((queries, length),), num_splits=1))  # one program for each row block
    for sizes in ((1, 3, 36), (10, 30), (17, 23)):
        at, parts = length - queries, []
        for size in sizes:
            at += size
            parts.append(attend(spec, problem, ((size, at),)))
        joined = quire.State(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))
        assert equal(whole, joined), sizes


def with_odd_starts(cache):
    """Return a copy of a cache whose heads begin at odd elements, so that fp8 numbers cannot be loaded in pairs."""
    tensors = []
    for tensor in (cache.k, cache.v):
        storage = torch.zeros(tensor.numel() + 1, dtype=torch.uint8, device=tensor.device)
        storage[1:] = tensor.view(torch.uint8).flatten()
        tensors.append(storage[1:].view(tensor.dtype).view(tensor.shape))
    return replace(cache, k=tensors[0], v=tensors[1])


@pytest.mark.triton
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, extended(torch.float8_e5m2)])
def test_fp8_numbers_in_pairs_have_taller_tiles_and_others_a_fallback(kv_dtype, device, assert_within_budget, take):
    take("32x64" if not GPU else "64x128")
    spec = quire.AttentionSpec(**HEADS | {"head_dim": 64, "kv_dtype": kv_dtype}, dtype=torch.float16)
    lens = ((40, 600 * SCALE),) * (100 if GPU else 1)  # as many row blocks as the device holds
    paired = make_problem(spec, lens, device=device)
    single = replace(paired, cache=with_odd_starts(paired.cache))
    plan = quire.plan(spec, paired.batch, **paired.bounds, batch_invariant=True)
    if GPU and not device_properties(plan.batch.seq_lens.device).has_wgmma:
        assert plan.launch.config.block_m == 16 and plan.launch.fallback is None  # the one configuration there
        return
    assert plan.launch.config.block_m > plan.launch.fallback.config.block_m == 16
    assert str(plan.launch.fallback) in str(plan)
    for problem, launch in ((single, plan.launch.fallback), (paired, plan.launch), (single, plan.launch.fallback)):
        assert plan.launch.for_cache(problem.cache) is launch
        state = quire.attention(problem.q, problem.cache, plan, return_lse=True)
        assert plan.runner.fallback is not None  # from the first call on
        assert_within_budget(problem, state)
        last = attend(spec, problem, ((1, lens[0][1]),))  # 16 rows
        assert torch.equal(last.out[0], state.out[lens[0][0] - 1]) and torch.equal(
            last.lse[0], state.lse[lens[0][0] - 1]
        )


@pytest.mark.triton
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8, torch.float8_e4m3fn])
def test_layouts_have_the_same_bits_unless_fp8_numbers_come_in_pairs_in_one_alone(kv_dtype, device):
    spec = quire.AttentionSpec(**HEADS | {"head_dim": 32}, dtype=torch.float16, kv_dtype=kv_dtype)
    p = make_problem(spec, ((1, 300), (3, 50)), device=device)
    k, v, scales = p.cache.k, p.cache.v, (p.cache.k_scale, p.cache.v_scale)
    vectors = k.unflatten(-1, (-1, 16 // k.itemsize)).permute(0, 2, 3, 1, 4)
    by_heads = quire.PagedKVCache(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), "HND", *scales)
    by_vectors = quire.PagedKVCache(vectors.contiguous(), v.permute(0, 2, 3, 1).contiguous(), "HDNX", *scales)
    plan = quire.plan(spec, p.batch, **p.bounds, batch_invariant=True)
    found = [quire.attention(p.q, cache, plan, return_lse=True) for cache in (p.cache, by_heads, by_vectors)]
    assert equal(found[0], found[1])
    assert equal(found[0], found[2]) == (kv_dtype is not torch.float8_e4m3fn)


FOLDED = {
    "decode": ({}, ((1, 20), (1, 0), (1, 300), (1, 1100))),
    "padding rows and columns": ({"num_q_heads": 6, "head_dim": 24}, ((1, 900), (3, 700))),
    "window, sinks": ({"sliding_window": 400, "sinks": True}, ((9, 900), (1, 500))),
    "scales per head": ({"kv_dtype": torch.int8}, ((1, 600), (20, 800))),
    "scales per token": ({"kv_dtype": torch.int8}, ((1, 600), (2, 800)), {"scales": "token"}),
    "intervals": ({}, ((3, 600), (1, 300)), {"per_token": quire.intervals.causal}),
    "several rounds": ({"head_dim": 64}, ((9, 2700), (1, 10), (1, 10), (1, 10))),
}


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("case", some_extended(FOLDED, FOLDED.keys() - {"window, sinks", "scales per token"}))
def test_which_launch_folds_states_changes_nothing(case, take, device):
    features, lens, *options = FOLDED[case]
    spec = quire.AttentionSpec(**HEADS | features, dtype=torch.float16)
    problem = make_problem(spec, lens, **(options[0] if options else {}), device=device)
    states = []
    for use in ("joined", "cut"):
        take(use)
        plan = quire.plan(spec, problem.batch, **problem.bounds, num_splits=3, batch_invariant=True)
        assert plan.launch.num_partitions and plan.launch.has_combine_launch == (use == "joined")
        states.append(quire.attention(problem.q, problem.cache, plan, **problem.tables, return_lse=True))
    assert equal(*states)


@pytest.mark.triton
def test_a_zero_has_one_sign(device):
    """A sum that is less than the least number becomes -0, and 0 once a split without keys is added to it."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float16)
    problem = make_problem(spec, ((600, 600),), device=device)
    last = 511  # of the second split, whose tile of queries goes on into the third one
    exponents, values = torch.full((600,), -20.0), torch.zeros(600)
    exponents[0], exponents[last], values[1:256] = 0, 120, -(2.0**-24)
    page = problem.batch.page_table[0].long().repeat_interleave(16)[:600]
    slot = torch.arange(600, device=device) % 16
    key = exponents / (spec.head_dim * spec.softmax_scale * math.log2(math.e))
    problem.cache.k[page, slot] = key.to(device, torch.float16)[:, None, None]
    problem.cache.v[page, slot] = values.to(device, torch.float16)[:, None, None]
    problem.q.fill_(1)
    for queries, end, num_splits in ((1, 512, 1), (1, 512, 2), (20, 525, 1)):
        out = attend(spec, problem, ((queries, end),), num_splits).out[last - (end - queries)]
        assert not out.any() and not out.signbit().any(), (queries, end, num_splits)


@pytest.mark.pytorch
def test_pytorch_refuses_what_it_cannot_promise(device):
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float16)
    problem = make_problem(spec, ((1, 20),), device=device)
    with pytest.raises(quire.UnsupportedError, match="batch_invariant must be left out"):
        quire.plan(spec, problem.batch, **problem.bounds, batch_invariant=True)
