"""`attention` with the step's keys and values gives the bits of `write_kv` and then `attention`, and the same cache."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire.dispatch.device import is_served_by_torch
from quire.testing import Problem, make_problem, unwritten
from tests.extended import some_extended

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.float16}
LATENTS = {"num_kv_heads": 1, "head_dim": 48, "head_dim_v": 32, "softmax_scale": 0.2, "latent": True}
E4M3, E5M2 = {"kv_dtype": torch.float8_e4m3fn}, {"kv_dtype": torch.float8_e5m2}
MIXED = ((60, 106), (1, 9), (33, 33))


def copy_of(cache: quire.PagedKVCache) -> quire.PagedKVCache:
    """Return a cache with the same numbers in other memory."""
    if cache.is_latent:
        return quire.PagedKVCache.from_latents(cache.latents.clone(), cache.head_dim_v, scale=cache.k_scale)
    scales = (None if scale is None else scale.clone() for scale in (cache.k_scale, cache.v_scale))
    return quire.PagedKVCache(cache.k.clone(), cache.v.clone(), cache.layout, *scales)


def bits_of(cache: quire.PagedKVCache) -> list[torch.Tensor]:
    """Return the bytes of a cache and of its scales."""
    tensors = [cache.latents] if cache.is_latent else [cache.k, cache.v, cache.k_scale, cache.v_scale]
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors if tensor is not None]


def random_like(new: dict[str, Any]) -> dict[str, Any]:
    """Return other new keys and values for the same slots, as slices of one tensor, as of a fused projection."""
    k, v = new["k"], new["v"]
    wide = torch.randn(*k.shape[:-1], k.shape[-1] + v.shape[-1], device=k.device).to(k.dtype)
    return {"k": wide[..., : k.shape[-1]], "v": wide[..., k.shape[-1] :], "slot_mapping": new["slot_mapping"]}


def check(p: Problem, plan: quire.Plan, new: dict[str, Any]) -> None:
    """Compare both ways to take a step."""
    before, _ = unwritten(p)
    written, appended = copy_of(before), copy_of(before)
    write = quire.write_latent if p.spec.latent else quire.write_kv
    write(new["k"], new["v"], written, new["slot_mapping"])
    out, lse = torch.zeros(*p.q.shape[:2], p.spec.head_dim_v).to(p.q), torch.zeros(p.q.shape[:2]).to(p.q.device)
    expected = quire.attention(p.q, written, plan, **p.tables, out=quire.State(out.clone(), lse.clone()))
    found = quire.attention(p.q, appended, plan, **new, **p.tables, out=quire.State(out, lse))
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)
    for a, b in zip(bits_of(appended), bits_of(written), strict=True):
        assert torch.equal(a, b)


def solve(features: dict[str, Any], lens: Any, options: dict[str, Any], **problem: Any) -> tuple[Problem, quire.Plan]:
    """Return a problem and its plan."""
    spec = quire.AttentionSpec(**HEADS | features)
    p = make_problem(spec, lens, **problem)
    return p, quire.plan(spec, p.batch, **p.bounds, **options)


IN_ONE_LAUNCH: dict[str, tuple[dict, tuple, dict, dict]] = {  # spec, lengths, options of the plan, of the problem
    "decode": ({}, ((1, 9), (1, 40), (1, 1), (1, 0), (1, 64)), {}, {"page_size": 4}),
    "one query each": ({}, ((1, 9), (1, 40), (1, 0)), {}, {"one_query": True}),
    "split keys": ({}, ((1, 300), (1, 40), (1, 256)), {"num_splits": 3}, {"layout": "HND"}),
    "drafts": ({}, ((3, 9), (1, 40), (4, 4), (0, 12), (4, 2), (2, 64)), {}, {"page_size": 4}),
    "drafts, cut": ({}, ((5, 258), (8, 130), (3, 66), (1, 65)), {"num_splits": 4}, {}),
    "several row blocks": ({"num_q_heads": 34}, ((9, 40), (1, 5), (2, 2)), {}, {}),
    "several row blocks, cut": ({"num_q_heads": 34}, ((5, 258), (8, 130), (2, 2)), {"num_splits": 4}, {}),
    "sliding window": ({"sliding_window": 20}, ((1, 300), (3, 40), (1, 256)), {"num_splits": 2}, {}),
    "bidirectional": ({"causal": False, "sliding_window_right": 3}, ((4, 40), (8, 200)), {"num_splits": 2}, {}),
    "batch-invariant": ({}, ((1, 600), (5, 540), (1, 40)), {"batch_invariant": True}, {}),
    "sinks, softcap and ALiBi": ({"sinks": True, "softcap": 5.0, "alibi": True}, ((2, 90), (1, 30)), {}, {}),
    "a flat table": ({}, ((2, 9), (1, 40)), {}, {"page_size": 1, "flat_table": True}),
    "vLLM's original layout": ({}, ((2, 90), (1, 40)), {"num_splits": 2}, {"layout": "HDNX"}),
    "values of another width": ({"head_dim": 40, "head_dim_v": 24}, ((2, 90), (1, 40)), {}, {}),
    "e4m3": (E4M3, ((1, 40), (3, 9)), {}, {"scales": "head"}),
    "e4m3, split keys": (E4M3, ((1, 300), (3, 90)), {"num_splits": 3}, {"layout": "HND"}),
    "e4m3, one scale, float32": (E4M3 | {"dtype": torch.float32}, ((1, 40), (3, 9)), {}, {"scales": "tensor"}),
    "e5m2, vLLM's original layout": (E5M2, ((1, 40), (3, 9)), {}, {"layout": "HDNX"}),
    "int8": ({"kv_dtype": torch.int8}, ((1, 300), (3, 90)), {"num_splits": 3}, {}),
}  # fmt: skip
IN_TWO_LAUNCHES: dict[str, tuple[dict, tuple, dict, dict]] = {
    "prompts": ({}, MIXED, {}, {}),
    "scales per token": ({"kv_dtype": torch.int8}, ((1, 40), (3, 9)), {}, {"scales": "token"}),
    "latents": (LATENTS, ((1, 40), (3, 9)), {}, {}),
    "e4m3 latents": (LATENTS | E4M3, ((1, 40), (3, 9)), {}, {}),
}


def trees(batch: quire.Batch, num_tokens: int) -> quire.Batch:
    """Return the batch with a chain of drafts for each sequence."""
    words = [(2 << i) - 1 for count in batch.query_starts.diff().tolist() for i in range(count)]
    return replace(batch, tree_bits=torch.tensor(words, device=batch.seq_lens.device))


REPEATING = "several row blocks, cut", "split keys", "e4m3", "bidirectional"  # what other cases have one by one
SLOW = "drafts, cut", "several row blocks, cut", "batch-invariant", "prompts"


@pytest.mark.parametrize("name", some_extended([*IN_ONE_LAUNCH, *IN_TWO_LAUNCHES], REPEATING, SLOW))
def test_a_step_that_appends_is_a_write_and_a_step(name, device, options):
    features, lens, chosen, problem = (IN_ONE_LAUNCH | IN_TWO_LAUNCHES)[name]
    p, plan = solve(features, lens, options(**chosen), **problem, device=device)
    cache, new = unwritten(p)
    in_one_launch = name in IN_ONE_LAUNCH and not is_served_by_torch(torch.device(device))
    assert (plan.appender(cache) is not None) == in_one_launch
    check(p, plan, new)
    if not p.spec.latent:
        check(p, plan, random_like(new))


@pytest.mark.triton
def test_where_new_keys_need_not_be_seen_a_launch_before_writes_them(device):
    lens = ((1, 300), (3, 90), (2, 2))
    offsets = torch.tensor([100, 20, 0], dtype=torch.int32, device=device)
    for per_token, in_one_launch in (
        (lambda batch, n: quire.intervals.sliding_window(batch, n, 30), False),
        (lambda batch, n: quire.intervals.sliding_window(trees(batch, n), n, 30), False),
        (trees, True),
        (lambda batch, n: quire.draft_trees.windowed(batch, trees(batch, n).tree_bits, 30), True),
        (lambda batch, n: replace(batch, query_offsets=offsets.to(batch.device)), False),
    ):
        for num_splits in (None, 3):
            p, _ = solve({}, lens, {}, device=device)
            p = replace(p, batch=per_token(p.batch, p.q.shape[0]))
            plan = quire.plan(p.spec, p.batch, **p.bounds, num_splits=num_splits)
            assert (plan.appender(p.cache) is not None) == in_one_launch
            check(p, plan, random_like(unwritten(p)[1]))


def test_tokens_without_a_slot_are_left_out(device):
    p, plan = solve({}, ((2, 40), (3, 9)), {}, page_size=4, device=device)
    _, new = unwritten(p)
    new = random_like(new)
    new["slot_mapping"][torch.tensor([0, 4])] = -1
    written, appended = copy_of(p.cache), copy_of(p.cache)
    quire.write_kv(new["k"], new["v"], written, new["slot_mapping"])
    assert torch.equal(quire.attention(p.q, appended, plan, **new), quire.attention(p.q, written, plan))
    for a, b in zip(bits_of(appended), bits_of(written), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("levels", [None, 32, [[(2, 16)], [(1, 0), (1, 16)]]])
def test_a_shared_page_is_never_written(levels, device):
    """Two samples of one prompt share two pages, and each writes into its own."""
    p, _ = solve({}, ((1, 40), (2, 45)), {}, device=device)
    p.batch.page_table[1, :2] = p.batch.page_table[0, :2]
    plan = quire.plan(p.spec, p.batch, **p.bounds, shared_prefix=levels)
    new = random_like(unwritten(p)[1])
    cache = copy_of(p.cache)
    check(p, plan, new)
    quire.attention(p.q, cache, plan, **new)
    own = p.batch.page_table[:, 2].tolist()
    for found, before in zip(bits_of(cache), bits_of(p.cache), strict=True):
        changed = (found != before).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert changed == sorted(own)


@pytest.mark.triton
def test_lengths_and_slots_may_change_under_a_plan(device):
    """As a captured graph sees them: the bounds are those of the longest step."""
    p, plan = solve({}, ((1, 300), (1, 200), (1, 290)), {"num_splits": 3}, one_query=True, device=device)
    p = replace(p, cache=quire.PagedKVCache(p.cache.k.nan_to_num(), p.cache.v.nan_to_num()))
    written, appended = copy_of(p.cache), copy_of(p.cache)
    for lens in ((17, 16, 1), (18, 17, 2), (0, 64, 3), (300, 65, 208)):
        p.batch.seq_lens.copy_(torch.tensor(lens))
        new = random_like(unwritten(p)[1])
        quire.write_kv(new["k"], new["v"], written, new["slot_mapping"])
        assert torch.equal(quire.attention(p.q, appended, plan, **new), quire.attention(p.q, written, plan))
        assert all(torch.equal(a, b) for a, b in zip(bits_of(appended), bits_of(written), strict=True))


@pytest.mark.triton
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float16)])
def test_new_keys_and_values_of_any_dtype_go_into_a_quantised_cache(dtypes, device):
    p, plan = solve(E4M3, ((1, 300), (3, 90)), {"num_splits": 2}, device=device)
    new = random_like(unwritten(p)[1])
    check(p, plan, new | {"k": new["k"].to(dtypes[0]), "v": new["v"].to(dtypes[1])})


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_whole_space(device, options, data):
    draw = data.draw
    kv_heads, causal = draw(st.integers(1, 2)), draw(st.booleans())
    features = {
        "num_q_heads": kv_heads * draw(st.integers(1, 9)),
        "num_kv_heads": kv_heads,
        "head_dim": 8 * draw(st.integers(2, 10)),
        "head_dim_v": 8 * draw(st.integers(2, 10)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float16])),
        "kv_dtype": draw(st.sampled_from([None, None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])),
        "causal": causal,
        "sliding_window": draw(st.none() | st.integers(1, 40)),
        "sliding_window_right": None if causal else draw(st.none() | st.integers(0, 20)),
        "sinks": draw(st.booleans()),
    }
    lens = draw(st.lists(st.tuples(st.integers(0, 18), st.integers(0, 90)), min_size=1, max_size=5))
    layout = draw(st.sampled_from(["NHD", "HND", "HDNX"]))
    if layout == "HDNX" and features["head_dim"] % 16:
        layout = "NHD"
    problem = {
        "page_size": draw(st.integers(1, 40)),
        "layout": layout,
        "flat_table": draw(st.booleans()),
        "scales": draw(st.sampled_from(["tensor", "head", "token"])),
        "seed": draw(st.integers(0, 99)),
    }
    num_splits = draw(st.none() | st.integers(1, 6))
    p, plan = solve(features, lens, options(num_splits=num_splits), **problem, device=device)
    check(p, plan, random_like(unwritten(p)[1]))
