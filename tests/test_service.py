"""What a server does before it serves: allocate scratch for every plan within bounds, and compile all kernels."""

import dataclasses
import random
from functools import partial

import pytest
import torch

import quire
from quire.testing import make_problem
from tests.extended import extended

GPU = torch.cuda.is_available()
SPEC = quire.AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=32, dtype=torch.float16)
BOUNDS = {"max_num_seqs": 5, "max_num_tokens": 40, "max_seq_len": 900}


def batches(count, seed=0):
    """Draw lengths of batches within BOUNDS."""
    draw = random.Random(seed)
    for _ in range(count):
        num_seqs = draw.randint(1, BOUNDS["max_num_seqs"])
        queries = [draw.choice((1, 1, 1, 2, 7)) for _ in range(num_seqs)]
        yield tuple((q, max(q, draw.choice((3, 90, 600, BOUNDS["max_seq_len"])))) for q in queries)


@pytest.mark.triton
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_one_workspace_serves_every_plan_within_its_bounds(batch_invariant, device, assert_within_budget):
    num_bytes = quire.workspace_size(SPEC, **BOUNDS, device=device, batch_invariant=batch_invariant)
    assert num_bytes > 0
    workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    for lens in batches(40 if GPU else 8):
        problem = make_problem(SPEC, lens, device=device)
        plan = quire.plan(SPEC, problem.batch, **problem.bounds, workspace=workspace, batch_invariant=batch_invariant)
        assert_within_budget(problem, quire.attention(problem.q, problem.cache, plan))


@pytest.mark.triton
def test_a_workspace_serves_intervals_and_trees(device, assert_within_budget):
    size = quire.workspace_size(SPEC, **BOUNDS, device=device, intervals=True, trees=True)
    workspace = torch.zeros(size, dtype=torch.uint8, device=device)
    lens = ((3, 600), (1, 90))
    for window in (None, 50):

        def per_token(batch, num_tokens, window=window):
            words = torch.tensor([1, 3, 5, 1])
            if window is None:
                return dataclasses.replace(batch, tree_bits=words)
            return quire.draft_trees.windowed(batch, words, window)

        for made in (per_token, partial(quire.intervals.chunked_local, size=70)):
            problem = make_problem(SPEC, lens, device=device, per_token=made)
            plan = quire.plan(SPEC, problem.batch, **problem.bounds, workspace=workspace)
            assert_within_budget(problem, quire.attention(problem.q, problem.cache, plan))


def test_windows_and_intervals_are_not_warmed_up_together(device):
    spec = dataclasses.replace(SPEC, sliding_window=40)
    for flag, name in (("intervals", "key_begin"), ("trees", "tree_bits")):
        with pytest.raises(ValueError, match=f"sliding_window must be left out where the batch has {name}, got 40"):
            quire.workspace_size(spec, **BOUNDS, device=device, **{flag: True})


@pytest.mark.pytorch
def test_pytorch_needs_no_workspace(device):
    assert quire.workspace_size(SPEC, **BOUNDS, device=device) == 0
    assert quire.warmup(SPEC, quire.PagedKVCache.empty(SPEC, 2, 16, device=device), **BOUNDS) == []


@pytest.mark.triton
@pytest.mark.parametrize("seed", [1, extended(2)])
def test_every_plan_within_bounds_needs_no_more_than_the_workspace(seed, device):
    from quire.dispatch.device import device_properties
    from quire.dispatch.request import Bounds, Options, Request
    from quire.plan import decide

    draw, properties = random.Random(seed), device_properties(torch.device(device))
    wide = quire.AttentionSpec(num_q_heads=32, num_kv_heads=1, head_dim=128, dtype=torch.float16)
    for spec, invariant in ((SPEC, seed == 2), (wide, seed == 1)):
        # To enumerate the launches within limits takes seconds.
        num_seqs, num_tokens, seq_len = draw.randint(1, 300), draw.randint(1, 3000), draw.randint(1, 70000)
        bounds = {"max_num_seqs": num_seqs, "max_num_tokens": num_tokens, "max_seq_len": seq_len}
        enough = quire.workspace_size(spec, **bounds, device=device, batch_invariant=invariant)
        for _ in range(120):
            seqs, tokens = draw.randint(1, num_seqs), draw.randint(1, num_tokens)
            bounded = Bounds(draw.randint(1, tokens), draw.randint(1, seq_len), tokens)
            request = Request(spec, seqs, True, bounded, properties)
            launch, _ = decide(request, Options(batch_invariant=invariant))
            assert launch.scratch_size().total <= enough, (bounds, launch)


def test_scratch_does_not_grow_with_sequences_and_lengths(device):
    def size(seqs, length):
        return quire.workspace_size(SPEC, max_num_seqs=seqs, max_num_tokens=1024, max_seq_len=length, device=device)

    assert size(256, 1 << 17) == size(64, 1 << 14)


@pytest.mark.triton
def test_a_workspace_that_does_not_serve_is_refused(device):
    problem = make_problem(SPEC, ((1, 900),), device=device)
    for workspace in (torch.zeros(8, dtype=torch.uint8, device=device), torch.zeros(1 << 20, device=device)):
        with pytest.raises(ValueError, match=r"workspace must be (contiguous )?uint8"):
            quire.plan(SPEC, problem.batch, **problem.bounds, workspace=workspace)


@pytest.mark.parametrize("bounds", [{"max_num_seqs": 0}, {"max_num_tokens": 0}, {"max_seq_len": -1}])
def test_bounds_are_checked(bounds, device):
    with pytest.raises(ValueError, match="must be from 1 to"):
        quire.workspace_size(SPEC, **BOUNDS | bounds, device=device)
    with pytest.raises(ValueError, match="must be from 1 to"):
        quire.warmup(SPEC, quire.PagedKVCache.empty(SPEC, 2, 16, device=device), **BOUNDS | bounds)


@pytest.mark.triton
def test_warmup_reads_and_writes_nothing_in_the_cache(device):
    cache = quire.PagedKVCache.empty(SPEC, 2, 16, device=device)
    cache.k.fill_(7), cache.v.fill_(7)
    reported: list[str] = []
    names = quire.warmup(SPEC, cache, **BOUNDS, progress=reported.append)
    assert names and names == reported
    assert len(set(names)) == len(names)
    assert (cache.k == 7).all() and (cache.v == 7).all()


@pytest.mark.skipif(not GPU, reason="nothing is compiled without a GPU")
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_nothing_compiles_after_warmup(batch_invariant):
    spec = quire.AttentionSpec(
        num_q_heads=12, num_kv_heads=2, head_dim=64, softcap=31.0 + batch_invariant
    )  # of no other test
    bounds = {"max_num_seqs": 40, "max_num_tokens": 600, "max_seq_len": 5000}
    problem = make_problem(spec, ((1, 3000), (1, 17), (4, 700)), device="cuda")
    plan = quire.plan(spec, problem.batch, **problem.bounds, batch_invariant=batch_invariant)
    with quire.no_compilation(), pytest.raises(RuntimeError, match="must not be compiled in service"):
        quire.attention(problem.q, problem.cache, plan)
    quire.warmup(spec, problem.cache, **bounds, batch_invariant=batch_invariant)
    draw = random.Random(2)
    with quire.no_compilation():
        for _ in range(60):
            num_seqs = draw.randint(1, 40)
            queries = (
                [1] * num_seqs if draw.random() < 0.4 else [draw.choice((1, 1, 3, 9, 15)) for _ in range(num_seqs)]
            )
            lens = tuple((q, draw.randint(q, draw.choice((100, 5000)))) for q in queries)
            problem = make_problem(spec, lens, device="cuda", one_query=max(queries) == 1 and draw.random() < 0.5)
            plan = quire.plan(spec, problem.batch, **problem.bounds, batch_invariant=batch_invariant)
            quire.attention(problem.q, problem.cache, plan)
