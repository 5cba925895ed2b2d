"""The MLA kernel against the reference: latents of any width and page, splits, bands of row blocks, records.

Widths are small in the interpreter, where every row block and tile costs seconds.
"""

import dataclasses

import pytest
import torch

import quire
from quire.dispatch.config import KernelConfig, padded, power_of_two
from quire.dispatch.device import INTERPRETER
from quire.dispatch.request import Bounds, Options, Request
from quire.kernels.mla.launch import MAX_ROW_BLOCKS, rounded_queries
from quire.kernels.mla.variants import variants
from quire.plan import decide
from quire.testing import error_budget, make_problem, owned_slots
from tests.extended import extended

pytestmark = pytest.mark.triton
MIXED = ((1, 50), (3, 3), (7, 40), (0, 9), (1, 0), (2, 17))
FP8 = torch.float8_e4m3fn
FEATURES = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"sliding_window": 5},
    "window both sides": {"causal": False, "sliding_window": 5, "sliding_window_right": 2},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "everything": {"softcap": 3.0, "alibi": True, "sinks": True, "sliding_window": 11},
}


def mla(num_q_heads=3, rank=32, rope=16, dtype=torch.float32, **fields):
    """Return a small spec with latents."""
    return quire.AttentionSpec.mla(
        num_q_heads=num_q_heads,
        softmax_scale=0.2,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        dtype=dtype,
        **fields,
    )


def small(spec: quire.AttentionSpec, block_m: int = 16, programs_per_sm: int = 2) -> KernelConfig:
    """Return a configuration of short tiles, so that short sequences have many."""
    return KernelConfig(
        block_m,
        block_n=16,
        num_warps=4,
        num_stages=2,
        full_tile_loop=False,
        programs_per_sm=programs_per_sm,
        block_d=padded(spec.head_dim),
        block_dv=padded(spec.head_dim_v),
    )


def attend(p, config=None, **options):
    """Plan with short tiles and attend; return the plan and the state."""
    plan = quire.plan(p.spec, p.batch, **p.bounds, config=config or small(p.spec), **options)
    assert plan.kernel == "mla"
    return plan, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, num_splits, device, assert_within_budget):
    p = make_problem(mla(**FEATURES[feature]), MIXED, page_size=5, device=device)
    assert_within_budget(p, attend(p, num_splits=num_splits)[1])


@pytest.mark.parametrize(("rank", "rope"), [(16, 0), (16, 16), (48, 32), (64, 48), (256, 64), (512, 64), (512, 128)])
def test_widths(rank, rope, device, assert_within_budget):
    """Widths that are no powers of two are padded; without rotary columns there is one product less."""
    p = make_problem(mla(2, rank, rope, torch.float16), ((1, 20), (3, 9)), device=device)
    assert_within_budget(p, attend(p)[1])


@pytest.mark.parametrize("page_size", [1, 2, 16, 33, 64, 528])
def test_pages(page_size, device, assert_within_budget):
    p = make_problem(mla(dtype=torch.float16), ((1, 70), (3, 20)), page_size=page_size, spare_pages=2, device=device)
    assert_within_budget(p, attend(p)[1])


@pytest.mark.parametrize("one_query", [False, True])
@pytest.mark.parametrize("num_q_heads", [1, 5, 16, 40])
def test_heads(num_q_heads, one_query, device, assert_within_budget):
    """Few heads leave rows of a block empty; many have several row blocks, which programs side by side own."""
    lens = ((1, 90), (1, 0), (1, 17)) if one_query else ((2, 90), (0, 4), (1, 17))
    p = make_problem(mla(num_q_heads), lens, one_query=one_query, device=device)
    plan, state = attend(p)
    assert plan.launch.row_blocks == -(-rounded_queries(plan.bounds.max_query_len) * num_q_heads // 16)
    assert_within_budget(p, state)


@pytest.mark.parametrize(("queries", "batch_invariant"), [(1, False), (2, True)])
def test_a_stale_schedule_gives_the_right_result_or_nan(queries, batch_invariant, device, assert_within_budget):
    """A kernel writes lengths, which the plan does not learn of: no result is one of other lengths."""
    unit = 256 if batch_invariant else 16
    before = [5 * unit, unit + 2, 3 * unit, 9]
    p = make_problem(mla(), tuple((queries, 5 * unit) for _ in before), device=device)
    options = {"batch_invariant": True} if batch_invariant else {"num_splits": 2}
    plan = quire.plan(p.spec, p.batch, **p.bounds, config=None if batch_invariant else small(p.spec), **options)
    assert plan.kernel == "mla"
    found = []
    for after in ([4 * unit + 1, *before[1:]], [*before[:2], 2 * unit, 12], [9, 3 * unit, unit + 2, 5 * unit], before):
        p.batch.seq_lens.copy_(torch.tensor(before))
        quire.attention(p.q, p.cache, plan)
        p.batch.seq_lens.data.copy_(torch.tensor(after))  # as a kernel writes: PyTorch does not count it
        stale = quire.attention(p.q, p.cache, plan, return_lse=True)
        p.batch.seq_lens.add_(0)
        right = quire.attention(p.q, p.cache, plan, return_lse=True)
        assert_within_budget(p, right)
        is_nan = stale.lse.isnan().any(1)
        assert torch.equal(stale.out.isnan().any(2).any(1), is_nan)
        torch.testing.assert_close(stale.out[~is_nan], right.out[~is_nan], rtol=1e-4, atol=1e-5)
        found.append(int(is_nan.sum()))
    assert all(found[:3]) and found[3] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "batch_invariant"), [(None, False), extended(None, True), extended(20, False), (20, True)]
)
def test_prompts_have_several_bands(window, batch_invariant, device, assert_within_budget):
    p = make_problem(mla(6, sliding_window=window), ((60, 75), (1, 3), (50, 50)), device=device)
    plan, state = attend(p, batch_invariant=batch_invariant)
    assert plan.launch.multi_block and plan.launch.row_blocks == MAX_ROW_BLOCKS
    assert_within_budget(p, state)


@pytest.mark.parametrize("right", [None, extended(7)])
def test_queries_of_a_prompt_see_keys_ahead_of_their_row_block(right, device, assert_within_budget):
    p = make_problem(mla(5, causal=False, sliding_window_right=right), ((20, 70),), device=device)
    assert_within_budget(p, attend(p)[1])


@pytest.mark.slow
@pytest.mark.parametrize(("num_splits", "heads"), [extended(None, 3), extended(None, 20), extended(30, 3), (30, 20)])
def test_many_partials_are_combined_in_two_levels(num_splits, heads, device, assert_within_budget):
    p = make_problem(mla(heads, sinks=True), ((1, 900), (1, 5), (1, 0)), one_query=True, device=device)
    config = small(p.spec, programs_per_sm=64)
    request = Request(p.spec, 3, False, Bounds(1, 4096, 3), INTERPRETER)
    assert all(launch.is_two_level for launch in variants(request, Options(config=config)).values())
    plan = quire.plan(p.spec, p.batch, max_query_len=1, max_seq_len=900, num_splits=num_splits, config=config)
    plan_launch = dataclasses.replace(plan.launch, costs=dataclasses.replace(plan.launch.costs, two_level_min_tiles=8))
    assert plan_launch.is_two_level
    plan = quire.plan.__globals__["make_plan"](p.spec, p.batch, plan_launch, "a test", bounds=plan.bounds)
    for _ in range(2):  # the first leaves the counters as they were
        assert_within_budget(p, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_fp8_latents_with_one_scale(num_splits, dtype, device, assert_within_budget):
    p = make_problem(mla(5, 48, 16, dtype, kv_dtype=FP8), MIXED, page_size=5, scales="tensor", device=device)
    assert_within_budget(p, attend(p, num_splits=num_splits)[1])


@pytest.mark.parametrize(
    ("layout", "rope", "dtype", "batch_invariant"),
    [
        ("fp8_ds_mla_584", 0, torch.float16, True),
        ("fp8_ds_mla", 64, torch.float32, False),
        ("fp8_ds_mla_528", 0, torch.float16, False),
        *(extended(layout, 0, torch.float32, True) for layout in ("fp8_ds_mla_584", "fp8_ds_mla_528")),
        *(extended("fp8_ds_mla", 64, torch.float16, batch_invariant) for batch_invariant in (False, True)),
    ],
)
def test_records_with_scales_of_their_own(layout, rope, dtype, batch_invariant, device, assert_within_budget):
    spec = mla(3, 512, rope, dtype, kv_dtype=FP8)
    p = make_problem(spec, ((1, 50), (2, 20)), page_size=4, layout=layout, device=device)
    assert_within_budget(p, attend(p, batch_invariant=batch_invariant)[1])


@pytest.mark.slow
@pytest.mark.parametrize("amplitude", [1e-3, 1e-5])
def test_small_values_survive_the_scales_of_records(amplitude, device, assert_within_budget):
    """float16 cannot hold probabilities times small scales."""
    p = make_problem(
        mla(3, 512, 64, torch.float16, kv_dtype=FP8), ((1, 50),), page_size=4, layout="fp8_ds_mla", device=device
    )
    slots = owned_slots(p.batch, p.cache).flatten().nonzero()[:, 0]
    c_kv, k_pe = (torch.randn(len(slots), n, generator=torch.Generator().manual_seed(n)).to(device) for n in (512, 64))
    quire.write_latent((c_kv * amplitude).half(), k_pe.half(), p.cache, slots)
    assert_within_budget(p, attend(p)[1])


@pytest.mark.slow
def test_batch_invariant_results_do_not_depend_on_the_batch(device, assert_within_budget):
    """Sequences alone, in a batch, and with other bounds have the same bits; long ones have several splits."""
    lens = ((1, 600), (5, 540), (1, 40), (1, 0))
    p = make_problem(mla(5, 16, 16), lens, device=device)
    _, whole = attend(p, batch_invariant=True)
    assert_within_budget(p, whole)
    first = 0
    for i, (q_len, seq_len) in enumerate(lens):
        rows = slice(first, first + q_len)
        starts = torch.tensor([0, q_len], dtype=torch.int32, device=device)
        batch = quire.Batch(p.batch.page_table[i : i + 1], p.batch.seq_lens[i : i + 1], starts)
        plan = quire.plan(
            p.spec, batch, max_query_len=q_len + 3, max_seq_len=seq_len, config=small(p.spec), batch_invariant=True
        )
        alone = quire.attention(p.q[rows], p.cache, plan, return_lse=True)
        assert torch.equal(alone.out, whole.out[rows]) and torch.equal(alone.lse, whole.lse[rows])
        first += q_len


def test_halves_of_the_queries_may_be_two_tensors(device):
    """The pair need not be views of one tensor, and their strides may differ."""
    p = make_problem(mla(4), ((2, 40), (1, 9)), device=device)
    plan, together = attend(p)
    q_nope = p.q[..., :32].transpose(0, 1).contiguous().transpose(0, 1)
    q_pe = torch.stack([p.q[..., 32:]] * 2, 2)[:, :, 1]
    apart = quire.attention((q_nope, q_pe), p.cache, plan, return_lse=True)
    assert torch.equal(apart.out, together.out) and torch.equal(apart.lse, together.lse)


def test_lengths_may_change_under_a_plan(device, assert_within_budget):
    """A plan for the longest lengths serves every shorter one: what a captured graph relies on."""
    big = make_problem(mla(20), ((1, 200), (1, 180), (1, 90)), one_query=True, device=device)
    plan, _ = attend(big)
    for lens in ((1, 2, 3), (64, 0, 33), (0, 0, 0), (129, 128, 1)):
        big.batch.seq_lens.copy_(torch.tensor(lens))
        assert_within_budget(big, quire.attention(big.q, big.cache, plan, return_lse=True))


def test_outputs_go_where_they_are_told_and_nowhere_else(device, assert_within_budget):
    p = make_problem(mla(6, 16, 16), ((1, 20), (2, 9)), device=device)
    plan = quire.plan(p.spec, p.batch, **{**p.bounds, "num_tokens": 5}, config=small(p.spec))
    wide = torch.full((5, 8, 20), 7.0, device=device)
    lse = torch.full((5, 6), 7.0, device=device)
    q = torch.cat([p.q, torch.full((2, 6, 32), float("nan"), device=device)])  # two rows that no sequence owns
    state = quire.attention(q, p.cache, plan, out=quire.State(wide[:, 1:7, :16], lse))
    assert_within_budget(p, quire.State(state.out[:3], state.lse[:3]))
    wide[:3, 1:7, :16] = lse[:3] = 7.0
    assert (wide == 7).all() and (lse == 7).all()


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, in the interpreter
def test_a_query_of_nan_gives_nan(device):
    p = make_problem(mla(6), ((4, 70), (1, 90), (1, 0)), device=device)
    plan, expected = attend(p)
    q = p.q.clone()
    q[1, 2, 3], q[4, :, 40] = float("nan"), float("nan")
    found = quire.attention(q, p.cache, plan, return_lse=True)
    wrong = torch.zeros(6, 6, dtype=torch.bool, device=device)
    wrong[1, 2] = wrong[4] = True
    assert found.out[wrong].isnan().all() and found.lse[wrong].isnan().all()
    assert torch.equal(found.out[~wrong], expected.out[~wrong]) and torch.equal(found.lse[~wrong], expected.lse[~wrong])


def test_runs_are_bitwise_equal(device):
    p = make_problem(mla(20), ((1, 300), (1, 40)), one_query=True, device=device)
    plan, first = attend(p, num_splits=6)
    second = quire.attention(p.q, p.cache, plan, return_lse=True)
    assert torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)


def test_the_trees_plan_every_dtype(device, assert_within_budget):
    for dtype, kv_dtype in ((torch.float16, None), (torch.float16, FP8), (torch.float32, None)):
        p = make_problem(mla(4, 32, 16, dtype, kv_dtype=kv_dtype), ((1, 40), (2, 30)), scales="tensor", device=device)
        plan = quire.plan(p.spec, p.batch, **p.bounds)
        verdict = error_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))
        assert plan.kernel == "mla" and verdict.passed, (dtype, kv_dtype, verdict)


def test_no_family_takes_what_is_another_s():
    latent = Request(mla(), 4, True, Bounds(1, 100, 4), INTERPRETER)
    dense = quire.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=32)
    assert decide(latent, Options())[0].name == "mla"
    assert decide(dataclasses.replace(latent, spec=dense), Options())[0].name != "mla"
    with pytest.raises(quire.UnsupportedError, match="which does not serve keys and values that aren't latents"):
        decide(dataclasses.replace(latent, spec=dense), Options(kernel="mla"))
    with pytest.raises(quire.UnsupportedError, match="which does not serve latents"):
        decide(latent, Options(kernel="portable"))


def test_queries_are_rounded_to_few_numbers():
    assert [rounded_queries(n) for n in range(10)] == [1, 1, 2, 3, 4, 6, 6, 8, 8, 12]
    for n in range(1, 300):
        assert n <= rounded_queries(n) <= power_of_two(n)
        assert rounded_queries(rounded_queries(n)) == rounded_queries(n)
