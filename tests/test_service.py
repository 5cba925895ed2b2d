"""What a server does before it serves: allocate scratch for every plan within bounds, and compile all kernels."""

import dataclasses
import random
from functools import partial

import pytest
import torch

import quire
from quire.compile_ahead.launches import distinct_launches, launches_within, scratch_within
from quire.dispatch.request import Bounds, Options, Request
from quire.kernels.choose import variants
from quire.kernels.chosen_hopper.launch import least_united
from quire.kernels.launch import kernels_of
from quire.plan import decide
from quire.targets import TARGETS
from quire.testing import make_problem
from tests.extended import extended

GPU = torch.cuda.is_available()
SPEC = quire.AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=32, dtype=torch.float16)
MOST_KERNELS = 25
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


def draw_spec(draw):
    """Draw what attention computes: dense, over latents, windowed, soft-capped, with sinks, on caches of each dtype."""
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    kv_dtype = draw.choice((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)) if draw.random() < 0.25 else None
    if draw.random() < 0.1:
        fp8 = torch.float8_e4m3fn if kv_dtype else None
        num_heads = draw.choice((1, 4, 8, 16, 33, 128))
        return quire.AttentionSpec.mla(num_q_heads=num_heads, softmax_scale=0.1, dtype=dtype, kv_dtype=fp8)
    kv_heads, group = draw.choice((1, 1, 2, 4, 8, 8, 16)), draw.choice((*range(1, 17), 4, 7, 8))
    head_dim, others = draw.choice((64, 128, 128, 256, *range(16, 257, 8), 512)), {}
    if draw.random() < 0.2:
        others["sliding_window"] = log_uniform(draw, 1, 8192)
    if draw.random() < 0.2:
        others["softcap"] = draw.choice((15.0, 30.0, 50.0, 100.0))
    if draw.random() < 0.1:
        others["head_dim_v"] = draw.choice((32, 64, 128, 256, 512))
    others["sinks"] = draw.random() < 0.2
    heads = {"num_q_heads": kv_heads * group, "num_kv_heads": kv_heads, "head_dim": head_dim}
    if kv_dtype is None and dtype is not torch.float32 and head_dim % 16 == 0 and draw.random() < 0.2:
        others.pop("head_dim_v", None)  # which nvfp4 has none of
        return quire.AttentionSpec(**heads, dtype=dtype, kv_format=draw.choice(("int4", "nvfp4", "k8v4")), **others)
    return quire.AttentionSpec(**heads, dtype=dtype, kv_dtype=kv_dtype, **others)


def log_uniform(draw, low, high):
    """Draw an integer from low to high, small ones as often as large ones."""
    return min(high, int(low * ((high + 1) / low) ** draw.random()))


def draw_request(draw, spec, device, limits, kinds):
    """Draw a batch within limits: decoding, of few queries or of many, with equal numbers of them or not."""
    num_seqs = log_uniform(draw, 1, limits[0])
    queries = min(limits[1], draw.choice((1, draw.randint(1, 16), log_uniform(draw, 1, limits[1]))))
    most = min(limits[1], num_seqs * queries)
    num_tokens = draw.choice((most, min(most, queries + num_seqs - 1), draw.randint(queries, most)))
    keys = draw.choice((log_uniform(draw, 1, limits[2]), min(limits[2], queries), draw.randint(1, limits[2])))
    one_each = queries == 1 and num_tokens == num_seqs and draw.random() < 0.5
    bounds = Bounds(queries, keys, num_tokens).for_decision()
    return Request(spec, num_seqs, not one_each, bounds, device, *draw.choice(kinds))


@pytest.mark.parametrize(
    ("seed", "num_limits", "num_batches"), [(1, 16, 60), *(extended(seed, 200, 100) for seed in (101, 202, 303))]
)
def test_no_batch_within_limits_needs_a_kernel_or_scratch_that_the_limits_do_not(seed, num_limits, num_batches):
    """That holds for all variants of a batch, whichever is chosen. The extended cases look at 60,000 batches."""
    draw = random.Random(seed)
    for _ in range(num_limits):
        spec, invariant = draw_spec(draw), draw.random() < 0.15
        device = TARGETS[draw.choice(("sm90", "sm90", "sm90", "sm80", "gfx942"))].properties
        largest = draw.choice(((16, 64, 131072), (512, 16384, 131072))) if num_batches > 60 else (64, 512, 65536)
        limits = tuple(log_uniform(draw, 1, most) for most in largest)
        may_see = spec.sliding_window is None and not spec.latent and draw.random() < 0.2
        kinds = ((False, False), (True, False)) if may_see else ((False, False),)
        kernels = frozenset().union(*map(kernels_of, launches_within(spec, device, *limits, invariant, kinds)))
        enough = scratch_within(spec, device, *limits, invariant, kinds)
        for _ in range(num_batches):
            request = draw_request(draw, spec, device, limits, kinds)
            options = Options(batch_invariant=invariant)
            for launch in (decide(request, options)[0], *variants(request, options)[0].values()):
                assert kernels_of(launch) <= kernels, (limits, request, str(launch))
                assert launch.scratch_size().total <= enough, (limits, request, str(launch))


@pytest.mark.parametrize(
    ("spec", "limits", "batches"),
    [
        # Five to seven queries of seven query heads for each of keys, and ten to fifteen on a cache in e4m3.
        (dict(num_q_heads=28, num_kv_heads=4), (4, 8, 8192), [(3, n, 2403, 8) for n in (5, 6, 7, 8)]),
        (dict(num_q_heads=14, num_kv_heads=2), (4, 8, 8192), [(3, n, 2403, 8) for n in (5, 6, 7)]),
        (dict(num_q_heads=7, num_kv_heads=1), (4, 8, 8192), [(3, n, 2403, 8) for n in (5, 6, 7)]),
        (
            dict(num_q_heads=28, num_kv_heads=4, kv_dtype=torch.float8_e4m3fn),
            (16, 16, 40960),
            [(2, n, 12000, 16) for n in range(10, 16)],
        ),
        (dict(num_q_heads=96, num_kv_heads=8, head_dim=136), (32, 32, 512), [(21, 1, 448, 21)]),
        (
            dict(num_q_heads=104, num_kv_heads=8, head_dim=64, sliding_window=900),
            (8, 16, 9000),
            [(8, 2, 8513, 9)],
        ),
        (
            dict(num_q_heads=4, num_kv_heads=1, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, softcap=30.0),
            (64, 64, 16384),
            [(46, 1, 12422, 46)],
        ),
        # Decode is decided for 128 keys where there are 65 to 95.
        (
            dict(num_q_heads=56, num_kv_heads=8, head_dim=248, dtype=torch.float16, sliding_window=900),
            (1, 6, 95),
            [(1, 1, 80, 1)],
        ),
        # Intervals of keys.
        (
            dict(num_q_heads=20, num_kv_heads=4, head_dim=64, kv_dtype=torch.float8_e4m3fn),
            (1, 16, 1000),
            [(1, 8, 331, 8, True)],
        ),
        # Scratch that does not grow with the keys.
        (
            dict(num_q_heads=4, num_kv_heads=1, head_dim=96, dtype=torch.float32, softcap=50.0),
            (1, 1, 4096),
            [(1, 1, 3100, 1)],
        ),
        # Keys that are decoded once, which the Hopper kernel would not convert.
        (
            dict(num_q_heads=16, num_kv_heads=2, head_dim=88, dtype=torch.float16, kv_dtype=torch.float8_e5m2),
            (7, 29, 1306),
            [(2, 13, 1280, 16), (6, 25, 1258, 29)],
        ),
    ],
    ids=str,
)
def test_warmup_and_workspace_size_cover_batches_between_powers_of_two(spec, limits, batches):
    spec, device = quire.AttentionSpec(**{"head_dim": 128} | spec), TARGETS["sm90"].properties
    kinds = (False, False), (len(batches[0]) > 4, False)
    kernels = frozenset().union(*map(kernels_of, launches_within(spec, device, *limits, False, kinds)))
    enough = scratch_within(spec, device, *limits, False, kinds)
    for num_seqs, queries, keys, tokens, *intervals in batches:
        bounds = Bounds(queries, keys, tokens).for_decision()
        request = Request(spec, num_seqs, True, bounds, device, *intervals)
        for launch in (decide(request, Options())[0], *variants(request, Options())[0].values()):
            assert kernels_of(launch) <= kernels
            assert launch.scratch_size().total <= enough


def test_of_queries_the_most_need_not_have_the_most_scratch():
    """Eight queries of eight heads fill a row block, and have no decode launch; five to seven may have one."""
    spec, device = quire.AttentionSpec(num_q_heads=64, num_kv_heads=8, head_dim=56), TARGETS["sm120"].properties
    enough = scratch_within(spec, device, 6, 8, 184, False)
    for queries in range(1, 9):
        found, _ = variants(Request(spec, 6, True, Bounds(queries, 2, 8), device), Options())
        assert all(launch.scratch_size().total <= enough for launch in found.values()), queries


def test_a_fallback_with_more_row_blocks_has_no_more_scratch_than_any_launch():
    """Batch-invariant, on fp8 numbers that come in pairs or, in tiles of fewer rows, do not."""
    fields = {"dtype": torch.float16, "kv_dtype": torch.float8_e5m2, "sliding_window": 51, "softcap": 50.0}
    spec = quire.AttentionSpec(num_q_heads=128, num_kv_heads=16, head_dim=184, **fields)
    device, options = TARGETS["sm90"].properties, Options(batch_invariant=True)
    enough = scratch_within(spec, device, 9, 30, 124440, True)
    found, _ = variants(Request(spec, 7, True, Bounds(4, 98414, 28), device), options)
    assert len(found) > 2
    assert all(launch.scratch_size().total <= enough for launch in found.values())


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
    bounds = {"max_num_seqs": 16, "max_num_tokens": 128, "max_seq_len": 5000}
    problem = make_problem(spec, ((1, 3000), (1, 17), (4, 700)), device="cuda")
    plan = quire.plan(spec, problem.batch, **problem.bounds, batch_invariant=batch_invariant)
    with quire.no_compilation(), pytest.raises(RuntimeError, match="must not be compiled in service"):
        quire.attention(problem.q, problem.cache, plan)
    quire.warmup(spec, problem.cache, **bounds, batch_invariant=batch_invariant)
    draw = random.Random(2)
    with quire.no_compilation():
        for _ in range(60):
            num_seqs = draw.randint(1, 16)
            queries = [1] * num_seqs
            if draw.random() < 0.6:
                queries = [draw.choice((1, 1, 3, 9, 15)) for _ in range(draw.randint(1, 8))]
            lens = tuple((q, draw.randint(q, draw.choice((100, 5000)))) for q in queries)
            problem = make_problem(spec, lens, device="cuda", one_query=max(queries) == 1 and draw.random() < 0.5)
            plan = quire.plan(spec, problem.batch, **problem.bounds, batch_invariant=batch_invariant)
            quire.attention(problem.q, problem.cache, plan)


def test_states_of_odd_and_even_numbers_of_splits_are_warmed_up():
    """Where 16 does not divide the width of values, Triton compiles kernels of other strides for either."""
    spec, device = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=72), TARGETS["sm90"].properties
    splits = {
        launch.num_splits for launch in launches_within(spec, device, 1, 64, 20000, False) if launch.name == "hopper"
    }
    assert {n % 2 for n in splits if 1 < n <= 4} == {n % 2 for n in splits if n > 4} == {0, 1}


@pytest.mark.skipif(GPU, reason="the device need not be here")
def test_a_workspace_of_the_size_that_limits_need_serves_scratch_that_does_not_grow_with_keys(monkeypatch):
    """Of one query on 3,100 keys, more scratch is needed than on 2,048, 3,072 and 4,096."""
    from quire.compile_ahead import verbs

    monkeypatch.setattr(verbs, "is_served_by_torch", lambda device: False)
    monkeypatch.setattr(verbs, "device_properties", lambda device: TARGETS["sm90"].properties)
    spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=96, dtype=torch.float32, softcap=50.0)
    limits = {"max_num_seqs": 1, "max_num_tokens": 1, "max_seq_len": 4096}
    enough = quire.workspace_size(spec, **limits, device="cpu")
    for keys in range(64, 4097, 64):
        launch, _ = decide(Request(spec, 1, True, Bounds(1, keys, 1), TARGETS["sm90"].properties), Options())
        assert launch.scratch_size().total <= enough, keys


def test_a_warm_up_has_few_kernels():
    """Of a layer like those of Llama 3, on a Hopper GPU."""
    spec, device = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128), TARGETS["sm90"].properties
    launches = distinct_launches(spec, device, 64, 16384, 16384, False)
    assert len(frozenset().union(*(launch.compile_keys() for launch in launches))) <= MOST_KERNELS


@pytest.mark.parametrize("num_q_heads", [4, 16, 24, 32, 64])
def test_a_warmup_has_unions_of_lists_from_the_first_tokens_on_that_have_them(num_q_heads):
    """Also where limits allow one prompt that is no longer."""
    spec, device = quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=0.1), TARGETS["sm90"].properties
    least, lists = least_united(spec, device), (False, False, False, (1, False, False, 64), None)
    for tokens in (least - 1, least):
        found = launches_within(spec, device, 1, tokens, 4096, False, (lists,))
        assert any(getattr(launch, "union", 1) > 1 for launch in found) == (tokens == least and num_q_heads <= 32)
