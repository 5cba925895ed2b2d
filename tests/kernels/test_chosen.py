"""Chosen keys: rows see what lists name, wherever it is in the cache.

On a GPU and in the interpreter (TRITON_INTERPRET=1) Triton kernels run, elsewhere the PyTorch path for CPU tensors.
"""

import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch

import quire
from quire.dispatch.device import interprets
from quire.dispatch.request import Bounds, Options, Request
from quire.kernels.chosen.launch import variants
from quire.launch_codec import decode, encode
from quire.targets import TARGETS
from quire.testing import check_batch, error_budget, make_problem, random_chosen, unwritten
from tests.extended import extended
from tests.pairs import in_turn

HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16}
LENS = ((1, 60), (5, 5), (4, 70), (0, 9), (1, 0))
MLA = {"num_q_heads": 3, "softmax_scale": 0.2}
SMALL = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
E4M3 = torch.float8_e4m3fn
LISTS = {
    "one list": {"width": 12},
    "a list for each head": {"width": 12, "num_lists": 2},
    "counted": {"width": 12, "counted": True},
    "counted for each head": {"width": 12, "num_lists": 2, "counted": True},
    "regions of 8": {"width": 4, "block_size": 8},
    "blocks across pages": {"width": 3, "num_lists": 2, "block_size": 24},
    "slots": {"width": 12, "slots_of": 16},
    "blocks of slots": {"width": 5, "num_lists": 2, "block_size": 4, "slots_of": 16},
    "several tiles": {"width": 300, "num_lists": 2, "counted": True},
    "several tiles of one list": {"width": 100, "counted": True},
    "no entries": {"width": 0},
}
CACHES = {
    "pages of 1": {"page_size": 1},
    "pages of 7, HND": {"page_size": 7, "layout": "HND"},
    "vLLM's original": {"layout": "HDNX"},
    "flat table": {"flat_table": True},
    "one query": {"one_query": True},
    "e4m3, HND": {"kv_dtype": E4M3, "layout": "HND"},
    "e5m2, one scale": {"kv_dtype": torch.float8_e5m2, "scales": "tensor"},
    "int8 per token": {"kv_dtype": torch.int8, "scales": "token"},
}


def make_spec(**fields):
    return quire.AttentionSpec(**HEADS | {"dtype": torch.float32} | fields)


def choose(lists, **options):
    return {"per_token": partial(random_chosen, **LISTS[lists] | options)}


def attend(p, **options):
    return quire.attention(p.q, p.cache, quire.plan(p.spec, p.batch, **p.bounds), **p.tables | options)


@pytest.mark.parametrize(
    ("num_splits", "lists", "causal"),
    [(1, name, True) for name in LISTS if "slots" not in name] + [(3, name, False) for name in LISTS],
)
def test_rows_see_what_lists_name(solve, assert_within_budget, lists, causal, num_splits):
    lens = ((1, 310), (2, 20)) if lists == "several tiles" else LENS
    p, state = solve(make_spec(causal=causal), lens, num_splits, **choose(lists, causal=causal))
    check_batch(p.batch, p.cache, writes=False)
    assert_within_budget(p, state)


@pytest.mark.parametrize(*in_turn(dtype=[torch.float16, torch.float32], cache=[*CACHES]), ids=str)
def test_caches_of_every_kind_are_read(solve, assert_within_budget, dtype, cache):
    options, lens = dict(CACHES[cache]), LENS
    if "one_query" in options:
        lens = ((1, 60), (1, 9), (1, 0))
    kv = {"kv_dtype": options.pop("kv_dtype")} if "kv_dtype" in options else {}
    lists = "counted for each head" if dtype is torch.float16 else "regions of 8"
    p, state = solve(make_spec(dtype=dtype, sinks=True, **kv), lens, **choose(lists), **options)
    assert_within_budget(p, state)


@pytest.mark.parametrize(
    "fields",
    [
        {"sinks": True, "softcap": 2.0, "head_dim": 40, "head_dim_v": 24},
        {"dtype": torch.float16, "kv_dtype": E4M3, "num_q_heads": 34},
    ],
)
@pytest.mark.parametrize("num_splits", [2, 24])
def test_parts_of_lists_are_combined(solve, assert_within_budget, fields, num_splits):
    p, state = solve(make_spec(**fields), ((1, 310), (2, 20)), num_splits, **choose("several tiles"))
    assert_within_budget(p, state)
    out = solve(make_spec(**fields), ((1, 310), (2, 20)), num_splits, out_scale=0.02, **choose("several tiles"))
    assert_within_budget(*out)


@pytest.mark.parametrize(
    "fields",
    [
        {"softcap": 2.0, "sinks": True},
        {"head_dim": 40, "head_dim_v": 24},
        {"num_q_heads": 34},
        {"num_q_heads": 40, "num_kv_heads": 2, "head_dim": 256},
    ],
)
def test_heads_of_every_kind_attend(solve, assert_within_budget, fields):
    p, state = solve(make_spec(**fields), ((1, 60), (3, 9)), **choose("a list for each head"))
    assert_within_budget(p, state)


LATENTS = [  # by default, each with one kind of lists
    (SMALL | {"dtype": torch.float32}, "NHD", "slots"),
    ({"qk_rope_head_dim": 0, "kv_lora_rank": 48, "dtype": torch.float16}, "NHD", "several tiles of one list"),
    (SMALL | {"dtype": torch.float16, "kv_dtype": E4M3}, "NHD", "slots"),
    ({"dtype": torch.float16, "kv_dtype": E4M3, "num_q_heads": 18}, "fp8_ds_mla", "slots"),
    ({"dtype": torch.float32, "kv_dtype": E4M3}, "fp8_ds_mla", "several tiles of one list"),
    ({"dtype": torch.float16, "kv_dtype": E4M3, "num_q_heads": 18, "qk_rope_head_dim": 0}, "fp8_ds_mla_584", "slots"),
    ({"dtype": torch.float32, "kv_dtype": E4M3, "qk_rope_head_dim": 0}, "fp8_ds_mla_528", "slots"),
]
OTHER = {"slots": "several tiles of one list", "several tiles of one list": "slots"}


@pytest.mark.parametrize(
    ("fields", "layout", "lists"), LATENTS + [extended(*case[:2], OTHER[case[2]]) for case in LATENTS]
)
def test_latents_are_read(device, options, assert_within_budget, fields, layout, lists):
    spec = replace(quire.AttentionSpec.mla(**MLA | fields), causal=lists != "slots", sinks=True, softcap=5.0)
    p = make_problem(spec, ((1, 60), (3, 9), (1, 0)), layout=layout, device=device, **choose(lists, causal=spec.causal))
    whole, cut = (quire.plan(spec, p.batch, **p.bounds, **options(num_splits=splits)) for splits in (1, 2))
    assert_within_budget(p, quire.attention(p.halves, p.cache, whole, **p.tables, return_lse=True))
    assert_within_budget(p, quire.attention(p.q, p.cache, cut, **p.tables))


@pytest.mark.skipif(interprets(), reason="the interpreter has no bfloat16")
@pytest.mark.parametrize("cache", ["pages of 7, HND", "e4m3, HND"])
def test_rows_in_bfloat16_are_read(solve, assert_within_budget, cache):
    options = dict(CACHES[cache])
    kv = {"kv_dtype": options.pop("kv_dtype")} if "kv_dtype" in options else {}
    p, state = solve(make_spec(dtype=torch.bfloat16, **kv), LENS, **choose("a list for each head"), **options)
    assert_within_budget(p, state)


def test_a_row_without_keys_has_out_0_and_lse_minus_infinity(solve):
    p, _ = solve(make_spec(), ((2, 20), (1, 0)), **choose("one list"))
    p.batch.chosen.indices.fill_(-5)
    p.batch.chosen.indices[2, :2] = torch.tensor([3, -1])  # of a padding row
    state = attend(p, return_lse=True)
    assert not state.out.any() and bool((state.lse == -torch.inf).all())


def test_rows_of_no_sequence_are_left_as_they_are(solve):
    for one_query in (False, True):
        lens = ((1, 20), (1, 7), (1, 9)) if one_query else ((1, 20), (0, 4), (3, 30))
        p, state = solve(make_spec(), lens, one_query=one_query, **choose("one list"))
        q = torch.cat([p.q, p.q])
        chosen = replace(p.batch.chosen, indices=p.batch.chosen.indices.repeat(2, 1))
        plan = quire.plan(p.spec, replace(p.batch, chosen=chosen), **p.bounds | {"num_tokens": q.shape[0]})
        out = torch.full_like(q, 7.0)
        quire.attention(q, p.cache, plan, out=out)
        assert bool((out[len(p.q) :] == 7).all()) and torch.equal(out[: len(p.q)], state.out)


def test_strided_lists_and_a_column_of_counts_are_read_where_they_are(solve):
    p, state = solve(make_spec(), LENS, **choose("counted for each head"))
    chosen = p.batch.chosen
    heads_first = torch.cat([chosen.indices, chosen.lens[..., None]], -1).transpose(0, 1).contiguous()
    views = quire.ChosenKeys(heads_first.transpose(0, 1)[..., :-1], heads_first.transpose(0, 1)[..., -1])
    assert views.indices.data_ptr() == heads_first.data_ptr()
    assert torch.equal(attend(replace(p, batch=replace(p.batch, chosen=views))), state.out)


def test_queries_stand_where_offsets_say(solve, assert_within_budget):
    p, _ = solve(make_spec(), ((4, 40), (2, 20)), **choose("one list", causal=False))
    offsets = torch.tensor([3, 18], dtype=torch.int32, device=p.q.device)
    p = replace(p, batch=replace(p.batch, query_offsets=offsets))
    for stored in (p.cache.k, p.cache.v):
        stored.nan_to_num_(nan=0.5)
    assert_within_budget(p, attend(p, return_lse=True))


def test_new_tokens_are_written_before_lists_are_read(solve, assert_within_budget):
    p, _ = solve(make_spec(), ((1, 60), (4, 40)), **choose("one list", width=60))
    cache, new = unwritten(p)
    assert_within_budget(p, attend(replace(p, cache=cache), **new))


def test_an_output_in_e4m3_is_rounded_once(solve, assert_within_budget):
    p, state = solve(make_spec(), LENS, out_scale=0.02, **choose("a list for each head"))
    assert_within_budget(p, state)


def with_a_second_cache(p, page_size, layout, **lists):
    """Return a problem with further keys, in another cache with pages of another size."""
    lens = tuple((q_len, 70) for q_len in p.query_lens)
    lists = {"width": 20, "causal": False, "slots_of": page_size} | lists
    other = make_problem(
        p.spec, lens, page_size=page_size, layout=layout, device=p.q.device, per_token=partial(random_chosen, **lists)
    )
    batch = replace(p.batch, extra_chosen=other.batch.chosen)
    return replace(p, batch=batch, extra_cache=other.cache)


TWO_CACHES = ["several tiles of one list", "slots", "no entries"]


@pytest.mark.parametrize(
    *in_turn(
        lists=TWO_CACHES,
        kind=[
            (SMALL | {"dtype": torch.float32}, "NHD", {"counted": True, "width": 130}),
            (SMALL | {"dtype": torch.float16}, "NHD", {"block_size": 4}),
            ({"qk_rope_head_dim": 0, "kv_lora_rank": 48, "dtype": torch.float16}, "NHD", {"width": 0}),
            (SMALL | {"dtype": torch.float16, "kv_dtype": E4M3}, "NHD", {}),
            ({"dtype": torch.float16, "kv_dtype": E4M3}, "fp8_ds_mla", {"width": 64}),
            ({"dtype": torch.float32, "kv_dtype": E4M3, "qk_rope_head_dim": 0}, "fp8_ds_mla_584", {"counted": True}),
            ({"dtype": torch.float16, "kv_dtype": E4M3, "qk_rope_head_dim": 0}, "fp8_ds_mla_528", {}),
        ],
    ),
    ids=str,
)
def test_two_lists_share_one_softmax_over_two_caches(device, options, assert_within_budget, kind, lists):
    """DeepSeek V4: a window in one cache, and compressed keys in another."""
    fields, layout, more = kind
    spec = replace(quire.AttentionSpec.mla(**MLA | fields), causal=lists != "slots", sinks=True)
    lens = ((1, 60), (3, 9), (1, 0))
    p = make_problem(spec, lens, layout=layout, device=device, **choose(lists, causal=spec.causal))
    if p.cache.k_scale is not None and layout == "NHD":
        p = replace(p, cache=quire.PagedKVCache.from_latents(p.cache.latents, spec.kv_lora_rank))
    p = with_a_second_cache(p, 4, layout, **more)
    if p.extra_cache.k_scale is not None and layout == "NHD":
        p = replace(p, extra_cache=quire.PagedKVCache.from_latents(p.extra_cache.latents, spec.kv_lora_rank))
    for num_splits in (1, 3):
        plan = quire.plan(spec, p.batch, **p.bounds, **options(num_splits=num_splits))
        assert_within_budget(p, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True))


def test_two_lists_of_one_cache_are_merged(solve, assert_within_budget):
    spec = make_spec(sinks=True)
    p, _ = solve(spec, LENS, **choose("one list", width=30))
    halves = [replace(p.batch.chosen, indices=part) for part in p.batch.chosen.indices.split([11, 19], 1)]
    specs = spec, replace(spec, sinks=False)
    plans = [
        quire.plan(spec, replace(p.batch, chosen=half), **p.bounds) for spec, half in zip(specs, halves, strict=True)
    ]
    assert_within_budget(p, quire.union_attention(p.q, p.cache, plans, sinks=p.sinks, return_lse=True))


def test_a_result_depends_on_its_token_and_its_list_alone(solve, rows_by_themselves):
    p, state = solve(make_spec(), ((3, 60), (5, 9)), **choose("one list"))
    batch, chosen = p.batch, p.batch.chosen
    alone = replace(
        batch,
        page_table=batch.page_table[:1],
        seq_lens=batch.seq_lens[:1],
        cu_seqlens_q=batch.cu_seqlens_q[:2],
        chosen=replace(chosen, indices=chosen.indices[:3]),
    )
    plan = quire.plan(p.spec, alone, max_query_len=3, max_seq_len=60)
    found = quire.attention(p.q[:3], p.cache, plan, return_lse=True)
    assert error_budget(p, state).passed
    torch.testing.assert_close(found.out, state.out[:3])


@pytest.mark.triton
def test_lists_are_cut_where_programs_would_be_few():
    spec = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.1)
    device = TARGETS["sm90"].properties
    cut = {}
    for num_tokens in (1, 8, 32, 64, 128, 1024):
        for invariant in (False, True):
            bounds = Bounds(1, 32768, num_tokens)
            request = Request(spec, num_tokens, False, bounds, device, chosen=(1, True, False, 2048))
            launch = variants(request, Options(batch_invariant=invariant))["chosen"]
            cut[num_tokens, invariant] = launch.num_splits
            assert launch.scratch_size().total == (0 if launch.num_splits == 1 else scratch_of_cut_lists(launch))
    assert [cut[n, False] for n in (1, 8, 32, 64, 128, 1024)] == [32, 16, 4, 2, 1, 1]
    assert all(cut[n, True] == 1 for n in (1, 8, 1024))


def scratch_of_cut_lists(launch):
    """Return the size of the scratch, which is the same for all numbers of parts: one workspace serves all batches."""
    return replace(launch, num_splits=2).scratch_size().total


def test_a_plan_with_lists_is_copied(solve):
    p, state = solve(make_spec(), ((1, 60), (3, 9)), **choose("counted"))
    plan = pickle.loads(pickle.dumps(quire.plan(p.spec, p.batch, **p.bounds)))
    assert torch.equal(quire.attention(p.q, p.cache, plan), state.out)


def test_lists_and_lengths_are_read_at_each_launch(solve, assert_within_budget):
    p, _ = solve(make_spec(), ((1, 60), (3, 9)), **choose("counted for each head"))
    plan = quire.plan(p.spec, p.batch, **p.bounds)
    quire.attention(p.q, p.cache, plan)
    other = make_problem(p.spec, ((1, 60), (3, 9)), **choose("counted for each head", seed=1)).batch.chosen
    p.batch.chosen.indices.copy_(other.indices)
    p.batch.chosen.lens.copy_(other.lens)
    for stored in (p.cache.k, p.cache.v):
        stored.nan_to_num_(nan=0.5)
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.triton
def test_a_plan_names_the_kernel(solve):
    p, _ = solve(make_spec(), ((1, 20),), **choose("one list"))
    for options in ({}, {"kernel": "chosen"}, {"batch_invariant": True}):
        plan = quire.plan(p.spec, p.batch, **p.bounds, **options)
        assert plan.kernel == "chosen" and plan.workspace is None
        assert "chosen keys; chosen kernel: 16 rows" in str(plan)
        assert decode(encode(plan.launch)) == plan.launch
    plan = quire.plan(p.spec, p.batch, **p.bounds, num_splits=2)
    assert "2 programs for each query token × 2 parts of its list" in str(plan) and plan.workspace is not None
    flat = replace(p.batch, chosen=None)
    with pytest.raises(quire.UnsupportedError, match="got 'chosen', which does not serve batches without chosen keys"):
        quire.plan(p.spec, flat, **p.bounds, kernel="chosen")
