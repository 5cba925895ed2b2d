"""A plan with shared prefixes gives what a flat plan gives, within the error budget, and reads fewer keys."""

from dataclasses import replace

import pytest
import torch

import quire
from quire.kernels.shared_prefix.runner import rows_of_table
from quire.launch_codec import decode, encode
from quire.testing import Oracle, check_batch, error_budget, make_problem, owned_slots, poison

pytestmark = pytest.mark.one_triton

PAGE = 4
SPEC = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float32)
DECODE = ((1, 21), (1, 17), (1, 30), (1, 22), (1, 18))
ONE = 16
SEVERAL = [[(3, 8), (2, 12)]]
TREE = [[(5, 8)], [(2, 8), (1, 0), (2, 4)], [(1, 0), (1, 0), (1, 12), (2, 4)]]
LATENTS = quire.AttentionSpec.mla(
    num_q_heads=16, softmax_scale=0.1, kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.float32
)


def shared_problem(spec, lens, levels, *, device, page_size=PAGE, **options):
    """Return a problem whose page table gives the runs of each level the same pages; pages left over hold NaN."""
    problem = make_problem(spec, lens, device=device, page_size=page_size, **options)
    table, ends = problem.batch.page_table, [0] * len(lens)
    levels = [[(len(lens), levels)]] if isinstance(levels, int) else levels
    for level in levels:
        first = 0
        for num_seqs, num_keys in level:
            begin, end = ends[first] // page_size, (ends[first] + num_keys) // page_size
            table[first : first + num_seqs, begin:end] = table[first, begin:end].clone()
            ends[first : first + num_seqs] = [ends[first] + num_keys] * num_seqs
            first += num_seqs
    poison(problem.cache, owned_slots(problem.batch, problem.cache, spec))
    return problem


def attend(problem, levels, out=None, **options):
    plan = quire.plan(problem.spec, problem.batch, **problem.bounds, shared_prefix=levels, **options)
    return plan, quire.attention(problem.q, problem.cache, plan, **problem.tables, return_lse=True, out=out)


@pytest.mark.parametrize("levels", [ONE, SEVERAL, TREE], ids=["all", "runs", "three levels"])
@pytest.mark.parametrize("one_query", [True, False])
def test_shared_prefixes_give_what_a_flat_plan_gives(levels, one_query, device):
    problem = shared_problem(SPEC, DECODE, levels, device=device, one_query=one_query)
    oracle = Oracle(problem)
    plan, state = attend(problem, levels)
    assert plan.kernel == "shared_prefix"
    assert oracle.judge(state).passed
    assert oracle.judge(attend(problem, None)[1]).passed


@pytest.mark.parametrize(
    "features",
    [
        {"sinks": True},
        {"softcap": 5.0},
        {"causal": False},
        {"num_q_heads": 6, "head_dim": 48, "head_dim_v": 24},
        {"dtype": torch.float16, "kv_dtype": torch.float8_e4m3fn},
        {"dtype": torch.float16, "kv_dtype": torch.int8},
    ],
    ids=str,
)
def test_every_feature_of_a_flat_plan(features, device):
    problem = shared_problem(replace(SPEC, **features), DECODE, SEVERAL, device=device)
    assert error_budget(problem, attend(problem, SEVERAL)[1]).passed


@pytest.mark.parametrize("layout", ["NHD", "HND", "HDNX"])
def test_every_layout_and_scales_per_token(layout, device):
    spec = replace(SPEC, dtype=torch.float16, kv_dtype=torch.int8)
    problem = shared_problem(spec, DECODE, ONE, device=device, layout=layout, scales="token", page_size=8)
    assert error_budget(problem, attend(problem, ONE)[1]).passed


@pytest.mark.parametrize("pair", [False, True])
def test_latents(pair, device):
    levels = [[(2, 8), (1, 0)]]
    problem = shared_problem(LATENTS, DECODE[:3], levels, device=device)
    plan = quire.plan(LATENTS, problem.batch, **problem.bounds, shared_prefix=levels)
    q = problem.halves if pair else problem.q
    assert error_budget(problem, quire.attention(q, problem.cache, plan, return_lse=True)).passed


def test_drafts_and_chunks_attend_causally_after_the_prefix(device):
    lens = ((3, 21), (1, 17), (0, 0), (14, 30), (2, 20))
    problem = shared_problem(SPEC, lens, [[(2, 16), (1, 0), (2, 12)]], device=device)
    assert error_budget(problem, attend(problem, [[(2, 16), (1, 0), (2, 12)]])[1]).passed


def test_a_row_without_keys_in_a_run_that_shares_none_sees_nothing(device):
    levels = [[(2, 16), (1, 0)]]
    problem = shared_problem(SPEC, ((1, 21), (1, 17), (1, 0)), levels, device=device, one_query=True)
    state = attend(problem, levels)[1]
    assert error_budget(problem, state).passed
    assert (state.out[2] == 0).all() and (state.lse[2] == float("-inf")).all()


@pytest.mark.parametrize("one_query", [True, False])
def test_rows_of_no_sequence_are_left_as_they_are(one_query, device):
    problem = shared_problem(SPEC, DECODE, ONE, device=device, one_query=one_query)
    q = torch.cat([problem.q, torch.full_like(problem.q[:3], float("nan"))])
    out = quire.State(torch.full_like(q, 7.0), torch.full(q.shape[:2], 7.0, device=device))
    plan = quire.plan(SPEC, problem.batch, max_query_len=1, max_seq_len=30, num_tokens=8, shared_prefix=ONE)
    quire.attention(q, problem.cache, plan, out=out)
    assert error_budget(problem, quire.State(out.out[:5], out.lse[:5])).passed
    assert (out.out[5:] == 7).all() and (out.lse[5:] == 7).all()


@pytest.mark.parametrize("levels", [ONE, TREE], ids=["all", "three levels"])
def test_a_plan_reads_lengths_and_pages_that_were_changed_in_place(levels, device):
    """As an engine changes them between the replays of a captured graph."""
    problem = shared_problem(SPEC, DECODE, levels, device=device)
    plan, _ = attend(problem, levels)
    later = shared_problem(SPEC, ((1, 17), (1, 29), (1, 21), (1, 30), (1, 20)), levels, device=device, seed=1)
    width = later.batch.page_table.shape[1]
    problem.batch.page_table[:, :width] = later.batch.page_table
    problem.batch.seq_lens.copy_(later.batch.seq_lens)
    assert error_budget(later, quire.attention(later.q, later.cache, plan, return_lse=True)).passed


def test_query_starts_that_were_changed_in_place(device):
    lens, levels = ((3, 21), (1, 17), (2, 30)), [[(2, 16), (1, 8)]]
    problem = shared_problem(SPEC, lens, levels, device=device)
    plan, _ = attend(problem, levels)
    later = shared_problem(SPEC, ((1, 21), (3, 19), (2, 30)), levels, device=device, seed=1)
    for name in ("page_table", "seq_lens", "cu_seqlens_q"):
        getattr(problem.batch, name).copy_(getattr(later.batch, name))
    assert error_budget(later, quire.attention(later.q, later.cache, plan, return_lse=True)).passed


@pytest.mark.parametrize("levels", [ONE, SEVERAL, TREE], ids=["all", "runs", "three levels"])
def test_the_saved_keys_are_those_that_the_launches_do_not_read(levels, device):
    """Each launch reads the keys of its batch once; the shared pages are in one batch only."""
    problem = shared_problem(SPEC, DECODE, levels, device=device)
    plan, _ = attend(problem, levels)
    read = sum(int(part.seq_lens.sum()) for part in plan.runner.batches(PAGE))
    assert int(problem.batch.seq_lens.sum()) - read == plan.saved_keys > 0
    assert f"{plan.saved_keys:,} keys not read again" in str(plan)


def test_equally_spaced_runs_read_views_of_the_rectangular_table(device):
    """The MLA kernel for Hopper GPUs does not read flat tables."""
    levels = [[(2, 8), (2, 8)]]
    problem = shared_problem(SPEC, DECODE[:4], levels, device=device)
    plan, state = attend(problem, levels)
    assert error_budget(problem, state).passed
    assert rows_of_table(problem.batch, [0, 2], [0, 0])[1] is None
    assert rows_of_table(problem.batch, [0, 1], [0, 1])[1] is not None
    assert rows_of_table(problem.batch, [0, 1, 3], [0, 0, 0])[1] is not None


def test_a_table_that_is_a_slice_of_a_wider_one(device):
    problem = shared_problem(SPEC, DECODE, SEVERAL, device=device)
    wide = torch.full((9, 20), -1, dtype=torch.int32, device=device)
    wide[2:7, 3:11] = problem.batch.page_table
    problem = replace(problem, batch=replace(problem.batch, page_table=wide[2:7, 3:11]))
    assert error_budget(problem, attend(problem, SEVERAL)[1]).passed


def test_nothing_shared_is_a_flat_plan(device):
    problem = make_problem(SPEC, DECODE, device=device, page_size=PAGE)
    for nothing in (0, [], [[(5, 0)]], [[(2, 0), (3, 0)], [(1, 0), (1, 0), (3, 0)]]):
        plan = quire.plan(SPEC, problem.batch, **problem.bounds, shared_prefix=nothing)
        assert plan.kernel != "shared_prefix" and plan.saved_keys == 0


def test_a_launch_survives_its_encoding(device):
    problem = shared_problem(SPEC, DECODE, TREE, device=device)
    plan, _ = attend(problem, TREE)
    launch = decode(encode(plan.launch))
    assert launch == plan.launch and hash(launch) == hash(plan.launch)


def test_a_workspace_within_the_server_s_bounds_is_enough(device, options):
    problem = shared_problem(SPEC, DECODE, TREE, device=device)
    size = quire.workspace_size(SPEC, max_num_seqs=5, max_num_tokens=5, max_seq_len=32, device=device)
    workspace = torch.zeros(size, dtype=torch.uint8, device=device)
    assert error_budget(problem, attend(problem, TREE, **options(workspace=workspace))[1]).passed


def test_check_batch_allows_shared_pages(device):
    problem = shared_problem(SPEC, DECODE, TREE, device=device)
    check_batch(problem.batch, problem.cache)
