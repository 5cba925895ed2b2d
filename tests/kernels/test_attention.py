"""Attention against the reference: every feature, one and many splits, ragged lengths, poisoned memory.

On a GPU and in the interpreter (TRITON_INTERPRET=1) Triton kernels run, elsewhere the PyTorch path for CPU tensors.
"""

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire import intervals, ops
from quire.dispatch.config import KernelConfig
from quire.plan import make_plan
from quire.testing import error_budget, make_problem, owned_slots
from tests.extended import extended
from tests.pairs import each_pair

MIXED = ((1, 50), (3, 3), (7, 40), (0, 9), (1, 0), (2, 17))
HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16}
ONE_KV_HEAD = {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 16}
FEATURES = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"sliding_window": 5},
    "window of one": {"sliding_window": 1},
    "window both sides": {"causal": False, "sliding_window": 5, "sliding_window_right": 2},
    "window ahead only": {"causal": False, "sliding_window_right": 0},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "alibi bidirectional": {"alibi": True, "causal": False},
    "sinks": {"sinks": True},
    "scale": {"softmax_scale": 0.7},
    "everything": {"softcap": 3.0, "alibi": True, "sinks": True, "sliding_window": 11},
}


def splits(*numbers):
    """Parametrise `num_splits`. PyTorch has no splits and runs the first alone."""
    first, *others = numbers
    return pytest.mark.parametrize("num_splits", [first, *(pytest.param(n, marks=pytest.mark.triton) for n in others)])


@splits(1, 3)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, num_splits, solve, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS | FEATURES[feature], dtype=torch.float32)
    assert_within_budget(*solve(spec, MIXED, num_splits, page_size=5))


def full_tile_config(block_m: int = 16, block_n: int = 16) -> KernelConfig:
    return KernelConfig(
        block_m, block_n, num_warps=4, num_stages=2, full_tile_loop=True, programs_per_sm=1, block_d=16, block_dv=16
    )


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("dtype", [extended(torch.float32), torch.float16])
@pytest.mark.parametrize("feature", FEATURES)
def test_full_tiles_in_a_loop_without_masks(feature, dtype, device, assert_within_budget):
    """No tree has such a loop for float32, and for float16 only from 65 rows on.

    The rows of a block end at different keys, sequences end within tiles, and windows are longer than a block and
    several tiles.
    """
    features = dict(FEATURES[feature])
    if features.get("sliding_window") in (5, 11):
        features["sliding_window"] += 70
    heads = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 16}
    spec = quire.AttentionSpec(**heads | features, dtype=dtype)
    p = make_problem(spec, ((60, 106), (30, 170), (18, 18), (1, 90)), page_size=8, device=device)
    plan = quire.plan(spec, p.batch, **p.bounds, config=full_tile_config(32), num_splits=1)
    assert plan.kernel == "block" and plan.launch.full_tile_loop
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True))


@pytest.mark.triton
@pytest.mark.parametrize("offset", [-7, 0, 25, 200])
def test_the_loop_without_masks_ends_with_the_keys(offset, device):
    """Queries that lie past the last key, or that see keys to their right, have full tiles up to the last key only."""
    spec = quire.AttentionSpec(**HEADS, causal=False, sliding_window=150, sliding_window_right=30, dtype=torch.float32)
    p = make_problem(
        dataclasses.replace(spec, sliding_window=None, sliding_window_right=None), ((20, 90),), device=device
    )
    offsets = torch.tensor([offset], dtype=torch.int32, device=device)
    batch = dataclasses.replace(p.batch, query_offsets=offsets)
    plan = quire.plan(spec, batch, **p.bounds, config=full_tile_config(), num_splits=1)
    p = dataclasses.replace(p, spec=spec, batch=batch)
    verdict = error_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))
    assert verdict.passed, verdict


@pytest.mark.slow
@splits(1, 2, 7, 32)
def test_splits_of_long_sequences(num_splits, solve, assert_within_budget):
    """Many splits of one KV head: in the interpreter, time is the number of programs."""
    spec = quire.AttentionSpec(**(ONE_KV_HEAD if num_splits == 32 else HEADS), dtype=torch.float32)
    assert_within_budget(*solve(spec, ((1, 300), (1, 129), (1, 1), (1, 0)), num_splits))


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize(
    ("lens", "heads", "num_splits", "times"),
    [
        (((1, 800),), ONE_KV_HEAD, None, 1),
        (((1, 800),), HEADS, 30, 1),
        (((1, 780), (1, 5), (1, 0)), ONE_KV_HEAD, None, 2),
        (((1, 780), (1, 5), (1, 0)), HEADS, 30, 1),
    ],
)
def test_many_states_of_single_queries(lens, heads, num_splits, times, device, assert_within_budget, combine_apart):
    """With room for many programs, partials are many and combined in two levels, where no second launch does it."""
    combine_apart(False)
    spec = quire.AttentionSpec(**heads, sinks=True, dtype=torch.float32)
    p = make_problem(spec, lens, device=device, one_query=True)
    config = KernelConfig(
        16, block_n=16, num_warps=4, num_stages=2, full_tile_loop=False, programs_per_sm=64, block_d=16, block_dv=16
    )
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=num_splits, config=config)
    assert plan.launch.is_two_level
    for _ in range(times):  # the first leaves the counters as they were
        assert_within_budget(p, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True))


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("window", [None, 450])
@pytest.mark.parametrize(
    ("block_m", "heads", "num_splits"),
    [(16, ONE_KV_HEAD, 2), (16, ONE_KV_HEAD, 40), (32, HEADS, 2), extended(32, HEADS, 40)],
)
def test_drafts_on_long_sequences(block_m, heads, num_splits, window, device, assert_within_budget):
    """Few splits are long enough for a full-tile loop, and many are combined in two levels."""
    spec = quire.AttentionSpec(**heads, sliding_window=window, dtype=torch.float32)
    p = make_problem(spec, ((5, 800), (0, 30), (4, 700)), device=device)
    config = KernelConfig(
        block_m, block_n=16, num_warps=4, num_stages=2, full_tile_loop=True, programs_per_sm=2, block_d=16, block_dv=16
    )
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=num_splits, config=config)
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.triton
@pytest.mark.parametrize("window", [None, 350])
def test_the_loop_without_masks_ends_where_the_first_draft_s_keys_end(window, device, assert_within_budget):
    """The first draft of the sequence of 403 keys lacks one key of a tile that later drafts see whole."""
    spec = quire.AttentionSpec(**ONE_KV_HEAD, sliding_window=window, dtype=torch.float32)
    p = make_problem(spec, ((5, 402), (5, 403), (5, 404)), device=device)
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=2, config=full_tile_config())
    assert plan.launch.full_tile_loop and plan.kernel == "split_kv"
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.slow
def test_more_sequences_than_a_program_looks_at_at_once(solve, assert_within_budget):
    spec = quire.AttentionSpec(**ONE_KV_HEAD, dtype=torch.float32)
    lens = tuple((1, 400 if i in (3, 258, 299) else i % 7) for i in range(300))
    assert_within_budget(*solve(spec, lens, one_query=True))


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64])
def test_group_sizes(group_size, solve, assert_within_budget):
    spec = quire.AttentionSpec(num_q_heads=group_size, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    assert_within_budget(*solve(spec, ((1, 20), (3, 9))))


@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [(16, 16), (24, 24), (40, 72), (64, 16), (80, 80), (96, 128), (192, 128), (248, 256), (256, 256)]
    + [(264, 264), (512, 512), (320, 504), (512, 64), (48, 512)],
)
def test_head_dims(dim, dim_v, solve, assert_within_budget):
    spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=dim, head_dim_v=dim_v, dtype=torch.float16)
    assert_within_budget(*solve(spec, ((1, 20), (3, 9))))


@splits(1, 3)
@pytest.mark.parametrize(
    ("feature", "kv_dtype"), [("everything", None), ("causal", torch.float8_e4m3fn), ("window", torch.int8)]
)
def test_wide_heads(feature, kv_dtype, num_splits, solve, assert_within_budget):
    """Full layers of Gemma 4 have heads of 512. The values here are narrower, and both widths are padded."""
    heads = {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 504, "head_dim_v": 328}
    spec = quire.AttentionSpec(**heads | FEATURES[feature], dtype=torch.float16, kv_dtype=kv_dtype)
    assert_within_budget(*solve(spec, ((1, 40), (12, 20), (0, 3), (1, 0)), num_splits, page_size=7))


@pytest.mark.triton
def test_wide_heads_in_a_batch_invariant_plan(device, assert_within_budget):
    spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=512, dtype=torch.float16)
    p = make_problem(spec, ((1, 300), (3, 20)), device=device)
    plan = quire.plan(spec, p.batch, **p.bounds, batch_invariant=True)
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 33, 128, 528, 672, 1072, 7808])
@pytest.mark.parametrize("layout", ["NHD", "HND", "HDNX"])
def test_pages_and_layouts(page_size, layout, solve, assert_within_budget):
    spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.float16)
    assert_within_budget(*solve(spec, ((1, 70), (3, 20)), page_size=page_size, layout=layout, spare_pages=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    *each_pair(
        scales=["tensor", "head", "token"],
        kv_dtype=[torch.float8_e4m3fn, torch.float8_e5m2, torch.int8],
        dtype=[torch.float16, torch.float32],
    ),
    ids=str,
)
def test_quantised_caches(dtype, kv_dtype, scales, solve, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS, dtype=dtype, kv_dtype=kv_dtype)
    assert_within_budget(*solve(spec, MIXED, 2, page_size=5, scales=scales))


@splits(1, 3)
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_in_pairs(kv_dtype, num_splits, solve, assert_within_budget):
    """From head_dim 32 on, 16-bit queries read two numbers at a time, unless scales are per token."""
    spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=40, dtype=torch.float16, kv_dtype=kv_dtype)
    assert_within_budget(*solve(spec, ((1, 70), (3, 20), (1, 0)), num_splits))


def test_a_step_that_was_decided_for_more_keys_crosses_the_operator(device, assert_within_budget):
    """The table has room for the plan's own bound alone."""
    p = make_problem(quire.AttentionSpec(**HEADS, dtype=torch.float16), ((1, 130), (1, 70)), page_size=5, device=device)
    batch = dataclasses.replace(p.batch, page_table=p.batch.page_table[:, :26])
    plan = quire.plan(p.spec, batch, **p.bounds)
    decided = plan.launch.request.bounds.max_seq_len
    assert (plan.bounds.max_seq_len, decided) == (130, 130 if plan.kernel == "torch" else 192)
    out, lse = torch.empty_like(p.q), torch.empty(p.q.shape[:2], device=device)
    ops.attention(p.q, p.cache, plan, out, lse, None, None, None)
    assert_within_budget(p, quire.State(out, lse))


@pytest.mark.slow
@pytest.mark.parametrize("amplitude", [1e-2, *map(extended, (1e-3, 1e-4)), 1e-5])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_small_values_survive_scales_per_token(kv_dtype, amplitude, device, assert_within_budget):
    """float16 cannot hold probabilities times small scales."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float16, kv_dtype=kv_dtype)
    p = make_problem(spec, ((1, 60), (3, 20)), scales="token", device=device)  # a written token costs a program
    slots = owned_slots(p.batch, p.cache).flatten().nonzero()[:, 0]
    k, v = torch.randn(2, len(slots), 2, 16, generator=torch.Generator().manual_seed(0)).to(device)
    quire.write_kv(k, v * amplitude, p.cache, slots)
    plan = quire.plan(spec, p.batch, **p.bounds)
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.parametrize("page_size", [4, 64])
@splits(1, 3)
def test_table_entries_that_no_query_sees_may_be_junk(num_splits, page_size, device, options, assert_within_budget):
    """Pages before every query's window were freed, and a row of the table may be longer than the sequence."""
    spec = quire.AttentionSpec(**HEADS, sliding_window=20, dtype=torch.float32)
    p = make_problem(spec, ((1, 300), (3, 150)), page_size=page_size, device=device)
    plan = quire.plan(spec, p.batch, **p.bounds, **options(num_splits=num_splits))
    expected = quire.attention(p.q, p.cache, plan, return_lse=True)
    table = p.batch.page_table
    for row, q_len, seq_len in zip(table, p.query_lens, p.seq_lens, strict=True):
        row[: max(0, seq_len - q_len - 19) // page_size] = -(1 << 30)
        row[-(-seq_len // page_size) :] = 1 << 30
    found = quire.attention(p.q, p.cache, plan, return_lse=True)
    assert_within_budget(p, found)
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, in the interpreter
@splits(1, 3)
@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_of_nan_gives_nan(sinks, num_splits, device, options, assert_within_budget):
    """out and lse of a query of NaN are NaN; no other query changes, and a query that sees no key is empty."""
    spec = quire.AttentionSpec(**HEADS, sinks=sinks, dtype=torch.float32)
    p = make_problem(spec, ((4, 70), (1, 90), (1, 0)), device=device)
    plan = quire.plan(spec, p.batch, **p.bounds, **options(num_splits=num_splits))
    expected = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    q = p.q.clone()
    q[1, 2, 3], q[4], q[5] = float("nan"), float("nan"), float("nan")
    found = quire.attention(q, p.cache, plan, **p.tables, return_lse=True)
    wrong = torch.zeros(6, 6, dtype=torch.bool, device=device)
    wrong[1, 2] = wrong[4] = True
    assert found.out[wrong].isnan().all() and found.lse[wrong].isnan().all()
    assert torch.equal(found.out[~wrong], expected.out[~wrong]) and torch.equal(found.lse[~wrong], expected.lse[~wrong])


@pytest.mark.slow
@splits(3)
@pytest.mark.parametrize(
    ("group_size", "feature"),
    [
        *((3, feature) for feature in FEATURES),
        *((group_size, feature) for group_size in (1, 40) for feature in ("causal", "window", "everything")),
    ],
)  # 40: several blocks of rows for one token
def test_one_query_each(group_size, feature, num_splits, solve, assert_within_budget):
    spec = quire.AttentionSpec(
        num_q_heads=2 * group_size, num_kv_heads=2, head_dim=16, **FEATURES[feature], dtype=torch.float32
    )
    assert_within_budget(*solve(spec, ((1, 40), (1, 0), (1, 1), (1, 17)), num_splits, page_size=5, one_query=True))


def test_flat_table(solve, assert_within_budget):
    assert_within_budget(
        *solve(quire.AttentionSpec(**HEADS, dtype=torch.float32), MIXED, 2, page_size=4, flat_table=True)
    )


def test_varlen(device):
    spec = quire.AttentionSpec(**HEADS, head_dim_v=24, dtype=torch.float32)
    torch.manual_seed(0)
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32, device=device) for c in ((0, 3, 3, 10), (0, 40, 45, 52)))
    q, k, v = (torch.randn(*shape, device=device) for shape in ((10, 6, 16), (52, 2, 16), (52, 2, 24)))
    k[40:45] = v[40:45] = float("nan")  # of a sequence without queries
    plan = quire.plan(spec, quire.Batch.varlen(cu_q, cu_k), max_query_len=7, max_seq_len=40)
    out = quire.varlen_attention(q, k, v, plan)
    for (a, b), (c, d) in (((0, 3), (0, 40)), ((3, 10), (45, 52))):
        keys, values = k[c:d].repeat_interleave(3, 1), v[c:d].repeat_interleave(3, 1)
        visible = torch.ones(b - a, d - c, dtype=torch.bool, device=device).tril((d - c) - (b - a))
        scores = (torch.einsum("qhd,khd->hqk", q[a:b], keys) / 4).masked_fill(~visible, float("-inf"))
        torch.testing.assert_close(out[a:b], torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))


def test_query_offsets_move_the_queries(device):
    """Offset queries see what the same queries see at the end of a longer sequence whose tail is theirs."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32, sliding_window=6)
    p = make_problem(spec, ((4, 20),), device=device)
    whole = quire.attention(p.q, p.cache, quire.plan(spec, p.batch, **p.bounds), return_lse=True)
    states = []
    for seq_len, first_page in ((16, 0), (4, 1)):  # the past, then the queries' own page
        lens, offsets = torch.tensor([[seq_len], [16 - 16 * first_page]], dtype=torch.int32, device=device)
        table = p.batch.page_table[:, first_page:].contiguous()
        batch = quire.Batch(table, lens, p.batch.cu_seqlens_q, query_offsets=offsets)
        plan = quire.plan(spec, batch, max_query_len=4, max_seq_len=seq_len)
        states.append(quire.attention(p.q, p.cache, plan, return_lse=True))
    merged = quire.merge_states(states)
    torch.testing.assert_close(merged.out, whole.out)
    torch.testing.assert_close(merged.lse, whole.lse)


def test_empty_sequences_and_masked_rows(solve):
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)
    # The first of three queries of a sequence of two keys sees none.
    _, state = solve(spec, ((1, 0), (3, 2), (0, 0)), 2)
    assert (state.out[:2] == 0).all() and (state.lse[:2] == float("-inf")).all()
    assert state.lse[2:].isfinite().all()


@pytest.mark.parametrize("lens", [(), ((0, 0),), ((0, 5), (0, 0))])
def test_nothing_to_do(lens, device):
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)
    batch = quire.Batch(
        torch.full((len(lens), 1), -1, dtype=torch.int32, device=device),
        torch.zeros(len(lens), dtype=torch.int32, device=device),
        torch.zeros(len(lens) + 1, dtype=torch.int32, device=device),
    )
    plan = quire.plan(spec, batch, max_query_len=0, max_seq_len=0)
    cache = quire.PagedKVCache.empty(spec, 2, 4, device=device)
    out = quire.attention(torch.empty(0, 6, 16, device=device), cache, plan)
    assert out.shape == (0, 6, 16)


def test_lengths_may_change_under_a_plan(device, options, assert_within_budget):
    """A plan made for the longest lengths serves every shorter one: what a captured graph relies on."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)
    big = make_problem(spec, ((1, 200), (1, 180), (1, 90)), device=device)
    plan = quire.plan(spec, big.batch, **big.bounds, **options(num_splits=4))
    for lens in ((1, 2, 3), (64, 0, 33), (200, 180, 90), (0, 0, 0), (129, 128, 1)):
        big.batch.seq_lens.copy_(torch.tensor(lens))
        assert_within_budget(big, quire.attention(big.q, big.cache, plan, return_lse=True))


def test_outputs_go_where_they_are_told_and_nowhere_else(device, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)
    p = make_problem(spec, ((1, 20), (2, 9)), device=device)
    plan = quire.plan(spec, p.batch, **{**p.bounds, "num_tokens": 5})
    wide = torch.full((5, 8, 20), 7.0, device=device)
    lse = torch.full((5, 6), 7.0, device=device)
    padding = torch.full((2, 6, 16), float("nan"), device=device)  # two rows that no sequence owns
    q = torch.cat([p.q, padding])
    state = quire.attention(q, p.cache, plan, out=quire.State(wide[:, 1:7, :16], lse))
    assert state.out.data_ptr() == wide[:, 1:7].data_ptr()
    assert_within_budget(p, quire.State(state.out[:3], state.lse[:3]))
    wide[:3, 1:7, :16] = lse[:3] = 7.0
    assert (wide == 7).all() and (lse == 7).all()


@pytest.mark.triton
def test_runs_are_bitwise_equal(device):
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)
    p = make_problem(spec, ((1, 300), (1, 40)), device=device)
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=6)
    first, second = (quire.attention(p.q, p.cache, plan, return_lse=True) for _ in range(2))
    assert torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_whole_space(solve, assert_within_budget, data):
    """In the interpreter it takes seconds: 12 examples are few for a space of 17 dimensions."""
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    causal = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.float16]))
    spec = quire.AttentionSpec(
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=8 * draw(st.integers(2, 10)),
        head_dim_v=8 * draw(st.integers(2, 10)),
        dtype=dtype,
        kv_dtype=draw(st.sampled_from([None, None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])),
        causal=causal,
        sliding_window=draw(st.none() | st.integers(1, 40)),
        sliding_window_right=None if causal else draw(st.none() | st.integers(0, 20)),
        softcap=draw(st.none() | st.floats(1, 50)),
        alibi=draw(st.booleans()),
        sinks=draw(st.booleans()),
    )
    lens = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 90)), min_size=1, max_size=5))
    layout = draw(st.sampled_from(["NHD", "HND", "HDNX"]))
    if layout == "HDNX" and spec.head_dim % (16 // spec.kv_dtype.itemsize):
        layout = "NHD"
    problem = solve(
        spec,
        lens,
        draw(st.none() | st.integers(1, 6)),
        page_size=draw(st.integers(1, 40)),
        layout=layout,
        flat_table=draw(st.booleans()),
        scales=draw(st.sampled_from(["tensor", "head", "token"])),
        seed=draw(st.integers(0, 99)),
        out_scale=draw(st.none() | st.sampled_from([1e-3, 0.02, 5.0])),
    )
    assert_within_budget(*problem)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("lens", "most", "per_token"),
    [
        (((1, 400), (30, 60), (40, 40), (2, 300), (1, 0), (9, 9), (1, 5)), 3, None),
        (((30, 60), (40, 40)), 3, None),
        (((3, 700), (20, 30)), 3, None),
        (((1, 400), (30, 60), (2, 300), (1, 0), (9, 9)), 3, partial(intervals.chunked_local, size=40)),
        (((1, 400), (30, 60), (11, 300), (12, 80)), 11, partial(intervals.chunked_local, size=40)),
    ],
)
def test_a_decode_launch_leaves_the_other_sequences_alone(lens, most, per_token, device):
    """The second launch of a Hopper plan, here without the first."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)
    p = make_problem(spec, lens, device=device, per_token=per_token)
    n = min(most * len(lens), p.q.shape[0])
    plan = quire.plan(spec, p.batch, max_query_len=most, max_seq_len=700, num_tokens=n, num_splits=3)
    decode = dataclasses.replace(plan.launch, max_decode_queries=most)
    plan = make_plan(spec, p.batch, decode, "a test")
    out, lse = torch.full_like(p.q, 7.0), torch.full(p.q.shape[:2], 7.0, device=device)
    if device == "cuda":
        torch.cuda.synchronize()  # such a launch waits for nothing before its end
    plan.runner(p.q, p.cache, out, lse, None, None)
    whole = quire.attention(p.q, p.cache, quire.plan(spec, p.batch, **p.bounds), return_lse=True)
    served = torch.cat([torch.full((q,), q <= most) for q, _ in lens]).to(device)
    torch.testing.assert_close(out[served], whole.out[served])
    torch.testing.assert_close(lse[served], whole.lse[served])
    assert (out[~served] == 7).all() and (lse[~served] == 7).all()


@pytest.mark.parametrize("return_lse", [False, True])
def test_probabilities_add_up_to_one_at_large_scores(return_lse, device):
    """Scores of -46,341, where the lse is rounded to 1/256. All values are 1, and so is every mean of them."""
    q, k, v = (torch.full((n, 1, 128), x, device=device) for n, x in ((3, 64.0), (7, -64.0), (7, 1.0)))
    spec = quire.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=128, dtype=torch.float32)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (3, 7))
    plan = quire.plan(spec, quire.Batch.varlen(cu_q, cu_k), max_query_len=3, max_seq_len=7)
    result = quire.varlen_attention(q, k, v, plan, return_lse=return_lse)
    torch.testing.assert_close(result.out if return_lse else result, torch.ones(3, 1, 128, device=device))


@pytest.mark.slow
@pytest.mark.parametrize(
    *each_pair(
        bad=[float("nan"), float("inf")], feature=["causal", "window", "softcap", "alibi", "sinks"], num_splits=[1, 3]
    )
)
def test_a_query_that_is_not_finite_does_not_look_empty(bad, feature, num_splits, device, options):
    """An lse of -inf would say that the query saw no key. Infinite queries have infinite scores, but for softcap."""
    spec = quire.AttentionSpec(**HEADS | FEATURES[feature], dtype=torch.float32)
    p = make_problem(spec, MIXED, page_size=5, device=device)  # as in `test_features`, whose kernels serve it
    plan = quire.plan(spec, p.batch, **p.bounds, **options(num_splits=num_splits))
    expected = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    p.q[[0, 2, 11]] = bad  # of three sequences; the last of these queries sees no key
    found = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    if bad != bad:
        assert found.out[[0, 2]].isnan().all()
        assert found.lse[[0, 2]].isnan().all()
        if feature == "causal":
            assert quire.attention(p.q, p.cache, plan, **p.tables)[[0, 2]].isnan().all()
    elif feature != "softcap":
        assert not found.lse[[0, 2]].isfinite().any()
    others = [token for token in range(14) if token not in (0, 2)]
    assert torch.equal(found.out[others], expected.out[others])
    assert torch.equal(found.lse[others], expected.lse[others])


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("amplitude", [1.0, *map(extended, (1e-3, 1e-4)), 1e-5])
def test_small_scales_per_token_do_not_vanish(amplitude, kv_dtype, device, assert_within_budget):
    """float16 queries: a probability times a scale of 1e-5 would be a subnormal float16."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float16, kv_dtype=kv_dtype)
    p = make_problem(spec, MIXED, scales="token", device=device)
    p.cache.v_scale.mul_(amplitude)
    plan = quire.plan(spec, p.batch, **p.bounds)
    assert_within_budget(p, quire.attention(p.q, p.cache, plan))
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))
