"""What a plan with shared prefixes refuses, in the house grammar; and the operator of `torch.compile`."""

from dataclasses import replace

import pytest
import torch

import quire
from quire.dispatch.device import interprets
from quire.kernels.shared_prefix import runner
from quire.testing import error_budget
from tests.kernels.test_shared_prefix import DECODE, ONE, PAGE, SEVERAL, SPEC, TREE, attend, shared_problem

on_cpu = pytest.mark.skipif(interprets(), reason="kernels do not look at contents")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (17, "cache must have a page size that divides the 17 keys that sequences share, got 4"),
        (30, "shared_prefix must leave each sequence a key of its own within max_seq_len = 30, got 30 shared keys"),
        (-4, "shared_prefix must be from 0"),
        ("16", "shared_prefix must be a number or a list of levels, got '16'"),
        (16.0, "shared_prefix must be a number or a list of levels, got 16.0"),
        ([16], r"shared_prefix\[0\] must be a list of runs, got 16"),
        ([[16]], r"shared_prefix\[0\]\[0\] must be a pair"),
        ([[(2, 16)]], r"shared_prefix\[0\] must have runs of 5 sequences together, got 2"),
        ([[(0, 16), (5, 16)]], r"shared_prefix\[0\]\[0\]\[0\] must be from 1"),
        ([[(5, -4)]], r"shared_prefix\[0\]\[0\]\[1\] must be from 0"),
        (
            [[(3, 8), (2, 4)], [(4, 4), (1, 0)]],
            r"shared_prefix\[1\] must cut the runs of the level above it, got a run across the end of 3 sequences",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_no_plan_can_share_is_refused(given, message, device):
    problem = shared_problem(SPEC, DECODE, ONE, device=device)
    with pytest.raises((TypeError, ValueError), match=message):
        attend(problem, given)


@pytest.mark.parametrize("field", ["sliding_window", "alibi", "sliding_window_right"])
def test_specs_whose_queries_see_different_shared_keys_are_refused(field, device):
    fields = {"alibi": {"alibi": True}, "sliding_window": {"sliding_window": 9}}
    spec = replace(SPEC, **fields.get(field, {"causal": False, field: 9}))
    problem = shared_problem(SPEC, DECODE, ONE, device=device)
    with pytest.raises(quire.UnsupportedError, match="shared_prefix must be left out for a spec with"):
        quire.plan(spec, problem.batch, **problem.bounds, shared_prefix=ONE)


@pytest.mark.parametrize("batch", ["flat", "offsets", "packed"])
def test_batches_without_a_rectangular_table_are_refused(batch, device):
    problem = shared_problem(SPEC, DECODE, ONE, device=device)
    starts = torch.arange(6, dtype=torch.int32, device=device)
    given = {
        "flat": quire.Batch(problem.batch.page_table.flatten(), problem.batch.seq_lens, None, 8 * starts[:-1]),
        "offsets": replace(problem.batch, query_offsets=problem.batch.seq_lens - 1),
        "packed": quire.Batch.varlen(starts, 30 * starts),
    }[batch]
    with pytest.raises(quire.UnsupportedError, match="batch must have a rectangular page_table and no query_offsets"):
        quire.plan(SPEC, given, max_query_len=1, max_seq_len=30, shared_prefix=ONE)


@pytest.mark.parametrize("seen", ["intervals", "tree"])
def test_batches_that_say_which_keys_a_query_sees_are_refused(seen, device):
    problem = shared_problem(SPEC, DECODE, ONE, device=device)
    begin = torch.zeros(problem.batch.num_seqs, dtype=torch.int32, device=device)
    fields = {"tree_bits": begin.long()} if seen == "tree" else {"key_begin": begin, "key_end": begin + 30}
    with pytest.raises(quire.UnsupportedError, match="batch must have no intervals and no tree_bits"):
        quire.plan(SPEC, replace(problem.batch, **fields), max_query_len=1, max_seq_len=30, shared_prefix=ONE)


@pytest.mark.triton
def test_options_that_fix_the_order_of_sums_are_refused(device):
    problem = shared_problem(SPEC, DECODE, ONE, device=device)
    for options in ({"num_splits": 2}, {"batch_invariant": True}):
        with pytest.raises(quire.UnsupportedError, match=f"{next(iter(options))} must be left out with shared_prefix"):
            attend(problem, ONE, **options)


@on_cpu
def test_pages_that_are_not_shared_are_refused_on_the_cpu():
    problem = shared_problem(SPEC, DECODE, ONE, device="cpu")
    problem.batch.page_table[3, 2] = problem.batch.page_table[3, 4]
    with pytest.raises(ValueError, match=r"page_table must give sequences 0 and 3 the same pages .* in column 2"):
        attend(problem, ONE)


@on_cpu
@pytest.mark.parametrize(("seq_len", "levels"), [(16, ONE), (0, ONE), (19, TREE)])
def test_queries_among_the_shared_keys_are_refused_on_the_cpu(seq_len, levels):
    problem = shared_problem(SPEC, DECODE, levels, device="cpu")
    problem.batch.seq_lens[2] = seq_len
    out = torch.full_like(problem.q, 7.0)
    with pytest.raises(ValueError, match=f"seq_lens must hold the .* of sequence 2, got {seq_len}"):
        attend(problem, levels, out=out)
    assert (out == 7).all()


@pytest.mark.skipif(interprets(), reason="torch.compile does not go through Triton's interpreter")
def test_the_operator_runs_the_same_launches(device):
    problem = shared_problem(SPEC, DECODE, TREE, device=device)
    plan, eager = attend(problem, TREE)
    compiled = torch.compile(
        lambda q: quire.attention(q, problem.cache, plan, return_lse=True), fullgraph=True, backend="eager"
    )
    state = compiled(problem.q)
    assert error_budget(problem, state).passed
    assert torch.equal(state.out, eager.out)


def test_a_plan_of_inference_mode_serves_outside_of_it_and_with_another_default_dtype(device):
    problem = shared_problem(SPEC, DECODE, SEVERAL, device=device)
    with torch.inference_mode():
        plan = quire.plan(SPEC, problem.batch, **problem.bounds, shared_prefix=SEVERAL)
    torch.set_default_dtype(torch.float64)
    try:
        state = quire.attention(problem.q, problem.cache, plan, return_lse=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert error_budget(problem, state).passed


def test_a_cache_with_other_pages_is_served_by_the_same_plan(device):
    problem = shared_problem(SPEC, DECODE, ONE, device=device)
    plan, _ = attend(problem, ONE)
    wider = shared_problem(SPEC, DECODE, ONE, device=device, page_size=2 * PAGE)
    problem.batch.page_table[:, : wider.batch.page_table.shape[1]] = wider.batch.page_table
    assert error_budget(wider, quire.attention(wider.q, wider.cache, plan, return_lse=True)).passed


def test_numbers_that_the_device_writes():
    """In a captured graph, where a copy from the host would run again."""
    for numbers in ([], [3], [0, 0, 4, 4, 4, 0, 7]):
        found = runner.filled(numbers, torch.device("cpu"))
        assert found.dtype is torch.int32 and found.tolist() == numbers


def test_what_a_capture_makes_serves_that_graph_alone(monkeypatch, device):
    """Its numbers are written by replays, and there may be none: a capture may fail."""
    problem = shared_problem(SPEC, DECODE, ONE, device=device)
    plan = quire.plan(SPEC, problem.batch, **problem.bounds, shared_prefix=ONE)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "is_capturing", lambda device: True)
        patch.setattr(
            runner, "filled", lambda numbers, device: torch.zeros(len(numbers), dtype=torch.int32, device=device)
        )
        quire.attention(problem.q, problem.cache, plan)
    assert len(plan.runner.captured) == 1 and not plan.runner.runners
    assert error_budget(problem, quire.attention(problem.q, problem.cache, plan, return_lse=True)).passed
    assert len(plan.runner.captured) == 1 and list(plan.runner.runners) == [PAGE]
