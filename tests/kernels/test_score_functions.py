"""Users' functions on scores and masks in every kernel that serves them, against the oracle.

On a GPU and in the interpreter (TRITON_INTERPRET=1) Triton kernels run, elsewhere the PyTorch path for CPU tensors.
"""

import ast
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire import draft_trees, intervals
from quire.dispatch.config import KernelConfig
from quire.score_functions import Extra, Function, Reader
from quire.testing import error_budget, make_problem, unwritten
from tests import score_functions as functions
from tests.score_functions import FUNCTIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16}
LATENTS = {"num_kv_heads": 1, "head_dim": 48, "head_dim_v": 32, "softmax_scale": 0.2, "latent": True, "num_q_heads": 6}
MIXED = ((1, 50), (3, 3), (7, 40), (0, 9), (1, 0), (2, 17))


@pytest.mark.parametrize("num_splits", [1, pytest.param(3, marks=pytest.mark.triton)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function, num_splits, solve, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS | FUNCTIONS[function], dtype=torch.float32)
    assert_within_budget(*solve(spec, MIXED, num_splits, page_size=5))


@pytest.mark.parametrize("num_splits", [1, pytest.param(3, marks=pytest.mark.triton)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_on_latents(function, num_splits, solve, assert_within_budget):
    spec = quire.AttentionSpec(**LATENTS | FUNCTIONS[function], dtype=torch.float32)
    assert_within_budget(*solve(spec, MIXED, num_splits, page_size=5))


TAKEN = {  # of how the keys of a batch are cut: words of the variant, and lengths
    "whole": (("whole",), MIXED),
    "cut": (("cut",), ((1, 300), (1, 5), (1, 0))),
    "joined": (("joined",), ((1, 300), (1, 5), (1, 0))),
    "cut drafts": (("cut",), ((3, 300), (1, 40), (0, 9), (2, 170))),
    "several row blocks": (("whole",), ((40, 90), (33, 33))),
}


@pytest.mark.triton
@pytest.mark.parametrize("use", TAKEN)
def test_functions_in_every_use_of_the_kernel(use, solve, assert_within_budget, take):
    words, lens = TAKEN[use]
    take(*words)
    features = {"score": functions.relative, "mask": functions.dilated, "sinks": True}
    spec = quire.AttentionSpec(**HEADS | features, dtype=torch.float16)
    assert_within_budget(*solve(spec, lens))


@pytest.mark.triton
@pytest.mark.parametrize("features", [{"score": functions.relative}, {"mask": functions.dilated}], ids=str)
def test_functions_in_a_loop_without_masks(features, device, assert_within_budget):
    """A mask hides keys of tiles that every row sees whole but for it."""
    spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=16, dtype=torch.float32, **features)
    config = KernelConfig(
        32, 16, num_warps=4, num_stages=2, full_tile_loop=True, programs_per_sm=1, block_d=16, block_dv=16
    )
    p = make_problem(spec, ((60, 106), (30, 170), (18, 18), (1, 90)), page_size=8, device=device)
    plan = quire.plan(spec, p.batch, **p.bounds, config=config, num_splits=1)
    assert plan.launch.full_tile_loop
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True))


@pytest.mark.triton
@pytest.mark.parametrize("function", ["relative bias", "400 distances", "T5", "scores of -inf"])
@pytest.mark.parametrize("sides", [{}, {"causal": False}], ids=str)
def test_functions_of_distances_from_near_to_far(function, sides, solve, assert_within_budget):
    """Tiles of keys take a short form of the function where their distances say so."""
    spec = quire.AttentionSpec(**HEADS | FUNCTIONS[function] | sides, dtype=torch.float32)
    assert_within_budget(*solve(spec, ((40, 700), (70, 130), (1, 600), (2, 33))))


CACHES = {
    "e4m3": ({"kv_dtype": torch.float8_e4m3fn, "head_dim": 64}, {}),
    "e5m2 per token": ({"kv_dtype": torch.float8_e5m2}, {"scales": "token"}),
    "int8": ({"kv_dtype": torch.int8}, {"scales": "tensor", "layout": "HND"}),
    **{name: ({"kv_format": name, "head_dim": 64}, {}) for name in ("int4", "nvfp4", "k8v4")},
    "HDNX": ({}, {"layout": "HDNX"}),
    "pages of 1, flat": ({}, {"page_size": 1, "flat_table": True}),
    "latents in e4m3": (LATENTS | {"kv_dtype": torch.float8_e4m3fn}, {}),
    "records": (
        LATENTS | {"kv_dtype": torch.float8_e4m3fn, "head_dim": 576, "head_dim_v": 512},
        {"layout": "fp8_ds_mla", "page_size": 64},
    ),
}


@pytest.mark.parametrize("cache", CACHES)
def test_functions_over_every_kind_of_cache(cache, solve, assert_within_budget):
    fields, problem = CACHES[cache]
    features = {"score": functions.relative, "mask": functions.same_document}
    spec = quire.AttentionSpec(**HEADS | fields | features, dtype=torch.float16)
    lens = ((1, 40), (3, 20)) if cache == "records" else MIXED
    assert_within_budget(*solve(spec, lens, **problem))


def trees(batch, num_tokens):
    words = draft_trees.from_parents(torch.tensor([-1, 0, 0, 1, 2, 4, 3]))
    return replace(batch, tree_bits=torch.cat([words[:n] for n in batch.query_starts.diff().tolist()]))


@pytest.mark.parametrize("num_splits", [1, pytest.param(3, marks=pytest.mark.triton)])
@pytest.mark.parametrize("function", ["all at once", "bounds that read", "documents"])
def test_a_mask_counts_in_addition_to_intervals(function, num_splits, solve, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS | FUNCTIONS[function], dtype=torch.float32)
    chunks = partial(intervals.chunked_local, size=12)
    assert_within_budget(*solve(spec, MIXED, num_splits, page_size=5, per_token=chunks))


@pytest.mark.parametrize("num_splits", [1, pytest.param(3, marks=pytest.mark.triton)])
def test_a_mask_counts_in_addition_to_a_draft_tree(num_splits, solve, assert_within_budget):
    features = {"score": functions.relative, "mask": functions.same_document}
    spec = quire.AttentionSpec(**HEADS | features, dtype=torch.float32)
    assert_within_budget(*solve(spec, ((7, 130), (4, 20), (1, 77)), num_splits, per_token=trees))


@pytest.mark.parametrize(
    "sides", [{"causal": False}, {"causal": False, "sliding_window": 7, "sliding_window_right": 2}], ids=str
)
def test_bounds_count_in_addition_to_a_window(sides, solve, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS | FUNCTIONS["bounds that read"] | sides, dtype=torch.float32)
    assert_within_budget(*solve(spec, MIXED))


@pytest.mark.parametrize("num_splits", [1, pytest.param(2, marks=pytest.mark.triton)])
@pytest.mark.parametrize("heads", [HEADS, LATENTS], ids=["keys and values", "latents"])
def test_rows_that_see_nothing_have_lse_of_minus_infinity(heads, num_splits, solve, assert_within_budget):
    for function in ({"mask": functions.nothing_for_odd}, {"score": functions.minus_infinity_for_odd}):
        p, state = solve(quire.AttentionSpec(**heads | function, dtype=torch.float32), ((4, 40), (1, 33)), num_splits)
        odd = torch.tensor([36, 37, 38, 39, 32])[:, None].expand(5, 6) % 2 == 1
        assert (state.lse[odd.to(state.lse.device)] == float("-inf")).all()
        assert (state.out[odd.to(state.lse.device)] == 0).all()
        assert_within_budget(p, state)


def test_a_step_that_appends(device, assert_within_budget):
    """A program that reads new keys writes them first, also where a mask's bounds leave them to no program."""
    for features in ({"score": functions.relative}, {"mask": functions.dilated}, {"mask": functions.far_behind}):
        spec = quire.AttentionSpec(**HEADS | features, dtype=torch.float32)
        problem = make_problem(replace(spec, mask=None), ((3, 130), (1, 40), (4, 20)), device=device)
        problem = replace(problem, spec=spec)
        cache, new = unwritten(problem)
        plan = quire.plan(spec, problem.batch, **problem.bounds)
        assert_within_budget(problem, quire.attention(problem.q, cache, plan, **new, **problem.tables, return_lse=True))
        assert torch.equal(cache.k.nan_to_num(), problem.cache.k.nan_to_num())


def test_what_bounds_exclude_is_not_read(device):
    """Keys before a mask's bounds hold NaN (`make_problem`); what the mask hides between them is read."""
    spec = quire.AttentionSpec(**HEADS, mask=functions.dilated, dtype=torch.float32)
    p = make_problem(spec, ((1, 300), (5, 130)), device=device)
    assert p.cache.k[p.batch.page_table[0, 0].item()].isnan().all()
    plan = quire.plan(spec, p.batch, **p.bounds)
    assert not quire.attention(p.q, p.cache, plan).isnan().any()


@pytest.mark.parametrize("batch_invariant", [False, pytest.param(True, marks=pytest.mark.triton)])
@pytest.mark.parametrize("heads", [HEADS, LATENTS], ids=["keys and values", "latents"])
def test_keys_that_no_row_sees_are_not_read(heads, batch_invariant, device, assert_within_budget):
    """They hold NaN: those of bounds without a key, and those of a row's bounds that are not in its own window."""
    empty = {"mask": functions.own_interval}, (torch.tensor([0, 40, 7, 3]), torch.tensor([0, 46, 7, 2]))
    apart = {"mask": functions.far_behind, "sliding_window": 5}, ()
    for features, extras in (empty, apart):
        spec = quire.AttentionSpec(**heads | features, dtype=torch.float32)
        extras = tuple(extra.int() for extra in extras)
        p = make_problem(spec, ((2, 48), (2, 60)), extras=extras, page_size=4, device=device)
        plan = quire.plan(spec, p.batch, **p.bounds, batch_invariant=batch_invariant)
        assert_within_budget(p, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_choice_of_two_numbers(dtype, device, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS, score=functions.two_numbers, dtype=dtype)
    p = make_problem(spec, ((3, 50), (1, 17)), device=device)
    plan = quire.plan(spec, p.batch, **p.bounds)
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


def test_an_index_out_of_range_reads_the_nearest_number(solve, assert_within_budget):
    """Memory around the table holds NaN."""
    spec = quire.AttentionSpec(**HEADS, score=functions.relative, dtype=torch.float32)
    memory = torch.full((40,), float("nan"))
    memory[9:27] = torch.randn(18)
    p, state = solve(spec, ((1, 90), (5, 5)), extras=(memory[9:27].view(6, 3),))
    assert_within_budget(p, state)


@pytest.mark.one_triton
@pytest.mark.triton
@pytest.mark.usefixtures("rows_by_themselves")
@pytest.mark.parametrize("heads", [HEADS, LATENTS], ids=["keys and values", "latents"])
def test_batch_invariant_plans_give_the_same_bits(heads, device):
    features = {"score": functions.relative, "mask": functions.from_first}
    spec = quire.AttentionSpec(**heads | features, dtype=torch.float16)
    p = make_problem(spec, ((1, 700), (1, 40), (1, 300)), device=device)
    bounds = {"max_query_len": 1, "max_seq_len": 700}

    def attend(count, **options):
        batch = quire.Batch(p.batch.page_table[:count], p.batch.seq_lens[:count])
        plan = quire.plan(spec, batch, **bounds, batch_invariant=True, **options)
        return quire.attention(p.q[:count], p.cache, plan, **p.tables, return_lse=True)

    alone = attend(1)
    for other in (attend(1, num_splits=1), attend(1, num_splits=3), attend(3)):
        assert torch.equal(alone.out, other.out[:1]) and torch.equal(alone.lse, other.lse[:1])


@pytest.mark.triton
@pytest.mark.parametrize("name", ["softcap", "ALiBi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_built_in_mods_written_as_functions_agree_with_them(name, dtype, device):
    """Both are within the budget of the one problem."""
    given = {"softcap": {"softcap": functions.CAP}, "ALiBi": {"alibi": True}}[name]
    spec = quire.AttentionSpec(**HEADS, **given, dtype=dtype)
    p = make_problem(spec, MIXED, device=device)
    own = quire.AttentionSpec(**HEADS, **FUNCTIONS[name], dtype=dtype)
    plan = quire.plan(own, p.batch, **p.bounds)
    extras = () if p.alibi_slopes is None else (p.alibi_slopes,)
    verdict = error_budget(p, quire.attention(p.q, p.cache, plan, extras=extras, return_lse=True))
    assert verdict.passed, verdict


def canonical(kind, source, extras):
    return Reader(ast.parse(source).body[0], kind, extras, {}, "text").text


WORDS = st.sampled_from(["score", "float(q_pos)", "bias[q_head, q_pos - kv_pos]", "0.5", "float(seq + kv_head)"])
FLOATS = st.recursive(
    WORDS,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("+-"), inner),
        st.builds("{}({}, {})".format, st.sampled_from(["minimum", "maximum"]), inner, inner),
        st.builds("tanh({} / 3.0)".format, inner),
        st.builds("abs({})".format, inner),
        st.builds("log(abs({}) + 1.0)".format, inner),
        st.builds("sqrt(abs({}))".format, inner),
        st.builds(
            "where((kv_pos {} q_pos) % {} < 2, {}, {})".format, st.sampled_from("+-"), st.integers(2, 9), inner, inner
        ),
        st.builds(
            "where((kv_pos // {} & 1 == 0) ^ (q_head >> 1 == 1), {}, {})".format, st.integers(1, 9), inner, inner
        ),
        st.builds("where(~({} < {}), {}, 0.25)".format, inner, inner, inner),
    ),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None)
@given(text=FLOATS, seed=st.integers(0, 99))
def test_random_functions(text, seed):
    """Of a comparison of scores, an error may choose another side, so its sides are nearly alike in the average."""
    source = f"def drawn(score, q_pos, kv_pos, q_head, kv_head, seq, bias):\n    return 0.1 * {text} + score"
    extra = Extra("bias", torch.float32, ("num_q_heads", None))
    function = Function("score", canonical("score", source, (extra,)), (extra,))
    spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=16, score=function, dtype=torch.float32)
    p = make_problem(spec, ((3, 20), (1, 9)), seed=seed, device=DEVICE)
    plan = quire.plan(spec, p.batch, **p.bounds)
    verdict = error_budget(p, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True))
    assert verdict.passed, (verdict, text)
