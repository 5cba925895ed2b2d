"""Tests that need a GPU: real shapes and dtypes, graphs, streams, determinism, offsets past 2^31, the command line."""

from itertools import islice

import pytest
import torch

import quire
from quire import api, cli, reference
from quire.cli.check import OTHER_CHECKS, check_all, check_feature, features
from quire.testing import error_budget, make_problem, random_norm_rope, unwritten
from tests.pairs import each_pair

LLAMA = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}
MIXED = ((1, 2000), (1, 17), (4, 700), (300, 300), (129, 1500), (1, 0), (0, 50))
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PARTS = 8


def solve(spec, lens, num_splits=None, **problem):
    p = make_problem(spec, lens, device="cuda", **problem)
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=num_splits)
    return p, plan, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)


@pytest.mark.parametrize(
    *each_pair(
        kv_dtype=[None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8],
        dtype=DTYPES,
        lens=[MIXED, ((1, 3000), (1, 1), (1, 129)), ((8, 900),) * 3],
    ),
    ids=str,
)
def test_dtypes(dtype, kv_dtype, lens):
    p, _, state = solve(
        quire.AttentionSpec(**LLAMA, dtype=dtype, kv_dtype=kv_dtype),
        lens,
        scales="token" if kv_dtype is torch.int8 else "head",
    )
    verdict = error_budget(p, state)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("extra", "num_splits"),
    [
        *(({"sliding_window": 100}, splits) for splits in (1, 5)),
        *(({"causal": False}, splits) for splits in (1, 5)),
        *(({"causal": False, "sliding_window": 77, "sliding_window_right": 30}, splits) for splits in (1, 5)),
        *(({"softcap": 20.0, "alibi": True, "sinks": True, "sliding_window": 300}, splits) for splits in (1, 5)),
        ({"softcap": 20.0}, 1),
        *(({"alibi": True}, splits) for splits in (1, 5)),
        ({"sinks": True}, 5),
        ({"head_dim": 64}, 1),
        ({"head_dim": 64, "alibi": True}, 5),
        *(({"head_dim": 256}, splits) for splits in (1, 5)),
        *(({"head_dim": 512}, splits) for splits in (1, 5)),
        ({"head_dim": 512, "kv_dtype": torch.float8_e4m3fn}, 5),
        *(({"head_dim": 320, "head_dim_v": 504, "sliding_window": 300, "sinks": True}, splits) for splits in (1, 5)),
        ({"head_dim": 224}, 5),
        ({"head_dim": 80, "head_dim_v": 96}, 1),
        *(({"num_q_heads": 64, "num_kv_heads": 1}, splits) for splits in (1, 5)),
        ({"num_q_heads": 7, "num_kv_heads": 7}, 1),
        ({"num_q_heads": 6}, 5),
    ],
    ids=str,
)
def test_features(extra, num_splits):
    p, _, state = solve(quire.AttentionSpec(**LLAMA | extra), MIXED, num_splits)
    verdict = error_budget(p, state)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("page_size", "layout"),
    [
        *((page_size, "NHD") for page_size in (16, 1072, 7808)),  # on a Hopper GPU, its kernel serves NHD and HND
        *((page_size, "HND") for page_size in (1, 528)),
        *((page_size, "HDNX") for page_size in (1, 16, 128, 528, 1072, 7808)),
    ],
)
def test_pages(page_size, layout):
    p, _, state = solve(
        quire.AttentionSpec(**LLAMA), ((1, 2000), (200, 600), (1, 3)), page_size=page_size, layout=layout
    )
    verdict = error_budget(p, state)
    assert verdict.passed, verdict


def test_tf32_only_when_asked():
    errors = {}
    for allowed in (False, True):
        p, _, state = solve(quire.AttentionSpec(**LLAMA, dtype=torch.float32, allow_tf32=allowed), ((64, 500),))
        errors[allowed] = error_budget(p, state).error
    assert errors[False] < 1e-5 < errors[True] < 1e-2


@pytest.mark.parametrize(
    ("lens", "batch_invariant"),
    [
        (((1, 2048),) * 32, False),
        *((((1, 20000), (1, 5000)), invariant) for invariant in (False, True)),
        *((((70, 6000),), invariant) for invariant in (False, True)),
    ],
)
def test_long_contexts_in_float32(lens, batch_invariant):
    """Products of float32 numbers add one key after the other; a sum over all keys of a sequence would be wrong."""
    p = make_problem(quire.AttentionSpec(**LLAMA, dtype=torch.float32), lens, device="cuda")
    plan = quire.plan(p.spec, p.batch, **p.bounds, batch_invariant=batch_invariant)
    verdict = error_budget(p, quire.attention(p.q, p.cache, plan))
    assert verdict.out < 0.7, verdict


@pytest.mark.parametrize("query_len", [1, 4, 40])
def test_a_captured_graph_serves_all_lengths_and_tables_within_its_bounds(query_len):
    spec = quire.AttentionSpec(**LLAMA)
    big = make_problem(spec, ((query_len, 2048),) * 3, device="cuda")
    plan = quire.plan(spec, big.batch, **big.bounds)
    state = quire.State(torch.empty_like(big.q), torch.empty(big.q.shape[:2], device="cuda"))
    quire.attention(big.q, big.cache, plan, out=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.attention(big.q, big.cache, plan, out=state)
    table = big.batch.page_table.clone()
    for lens in ((query_len, 64, 65), (0, 127, 2048), (128, 129, 0), (1000, 1024, 1025), (2048, 2047, 1)):
        big.batch.seq_lens.copy_(torch.tensor(lens))
        big.batch.page_table.copy_(table[torch.randperm(3)])
        state.out.fill_(float("nan"))
        graph.replay()
        verdict = error_budget(big, state)
        assert verdict.passed, (lens, verdict)


@pytest.mark.parametrize(
    *each_pair(
        lens=[((1, 2048), (1, 300)), ((5, 2048), (3, 300)), ((200, 300), (64, 64))],
        how=[{}, {"rotary_dim": 64, "interleaved": True, "qk_norm": False}],
        kv_dtype=[None, torch.float8_e4m3fn],
    ),
    ids=str,
)
def test_a_captured_graph_rotates_writes_and_attends(how, lens, kv_dtype):
    """The bits are those of a launch that rotates and writes, and of attention; positions and tokens change."""
    spec = quire.AttentionSpec(**LLAMA, kv_dtype=kv_dtype)
    p = make_problem(spec, lens, device="cuda")
    plan = quire.plan(spec, p.batch, **p.bounds)
    cache, new = unwritten(p)
    new |= {name: new[name].to(p.q.dtype) for name in "kv"}
    how = random_norm_rope(p, **{"rotary_dim": 128, "qk_norm": True} | how)
    twin = quire.PagedKVCache(cache.k.clone(), cache.v.clone(), cache.layout, cache.k_scale, cache.v_scale)
    quire.attention(p.q, cache, plan, **new, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quire.attention(p.q, cache, plan, **new, **how)
    rotated = torch.empty_like(p.q)
    for seed in range(3):
        torch.manual_seed(seed)
        for tensor in (p.q, new["k"], new["v"]):
            tensor.normal_()
        how["rope"].positions.random_(0, how["rope"].cos.shape[0])
        graph.replay()
        api.norm_rope_and_write(p.q, rotated, twin, *new.values(), how["rope"], how.get("qk_norm"))
        assert torch.equal(out, quire.attention(rotated, twin, plan))
        for a, b in ((cache.k, twin.k), (cache.v, twin.v)):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    exact = reference.norm_rope(p.q, how["rope"], how.get("qk_norm"), of_keys=False)
    assert (rotated.double() - exact).abs().max() <= torch.finfo(rotated.dtype).eps * exact.abs().max()


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("query_len", [1, 5])
def test_a_captured_graph_writes_new_tokens_and_attends_to_them(query_len, kv_dtype):
    """The bits are those of a write and a call without new tokens, at all lengths, over tables that change."""
    spec = quire.AttentionSpec(**LLAMA, kv_dtype=kv_dtype)
    p = make_problem(spec, ((query_len, 2048), (query_len, 300), (query_len, 1100)), device="cuda")
    plan = quire.plan(spec, p.batch, **p.bounds)
    assert plan.appender(p.cache) is not None
    amplitude = 40 if kv_dtype is torch.int8 else 1
    k, v = ((amplitude * torch.randn(pages.shape, device="cuda")).to(pages.dtype) for pages in (p.cache.k, p.cache.v))
    scales = p.cache.k_scale, p.cache.v_scale
    caches = [quire.PagedKVCache(k.clone(), v.clone(), "NHD", *scales) for _ in range(2)]
    slots = unwritten(p)[1]["slot_mapping"]
    fused = torch.randn(3 * query_len, 4, 128, device="cuda").to(p.q.dtype)
    k, v = fused.split(2, 1)
    states = [quire.State(torch.empty_like(p.q), torch.empty(p.q.shape[:2], device="cuda")) for _ in range(2)]

    def append():
        quire.attention(p.q, caches[1], plan, k=k, v=v, slot_mapping=slots, out=states[1])

    append()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append()
    pairs = torch.arange(caches[0].num_pages, device="cuda")[:, None].repeat(1, 2)
    quire.copy_pages(caches[0], caches[1], pairs)  # as they were before the calls above
    for lens in ((2048, 300, 1100), (query_len, 64, 65), (128, 129, 17), (1000, 160, 1025), (2047, 299, 16)):
        p.batch.seq_lens.copy_(torch.tensor(lens))
        slots.copy_(unwritten(p)[1]["slot_mapping"])
        fused.normal_()
        quire.write_kv(k, v, caches[0], slots)
        quire.attention(p.q, caches[0], plan, out=states[0])
        for _ in range(20):
            graph.replay()
        assert torch.equal(states[0].out, states[1].out) and torch.equal(states[0].lse, states[1].lse), lens
        for a, b in ((caches[0].k, caches[1].k), (caches[0].v, caches[1].v)):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), lens


def test_runs_are_bitwise_equal():
    p, plan, first = solve(quire.AttentionSpec(**LLAMA), ((1, 5000), (1, 300), (1, 64)), num_splits=16)
    for _ in range(50):
        again = quire.attention(p.q, p.cache, plan, return_lse=True)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


def test_two_plans_on_two_streams():
    problems = [solve(quire.AttentionSpec(**LLAMA), ((1, 4000), (1, 900)), num_splits=8, seed=seed) for seed in (1, 2)]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(100):
        outs = []
        for (p, plan, _), stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                outs.append(quire.attention(p.q, p.cache, plan))
    torch.cuda.synchronize()
    for (_, _, expected), out in zip(problems, outs, strict=True):
        assert torch.equal(out, expected.out)


def test_nothing_waits_for_the_device(without_waiting):
    p, plan, _ = solve(quire.AttentionSpec(**LLAMA), ((1, 700), (5, 90)))
    k, slots = torch.randn(6, 2, 128, dtype=torch.bfloat16, device="cuda"), torch.full((6,), -1, device="cuda")
    quire.write_kv(k, k, p.cache, slots)
    pairs = torch.tensor([[1, 2]], device="cuda")
    states = [quire.attention(p.q, p.cache, plan, return_lse=True)] * 3
    quire.merge_states(states)
    quire.copy_pages(p.cache, p.cache, pairs)
    torch.cuda.synchronize()
    with without_waiting():
        quire.write_kv(k, k, p.cache, slots)
        quire.attention(p.q, p.cache, quire.plan(p.spec, p.batch, **p.bounds))
        quire.merge_states(states)
        quire.copy_pages(p.cache, p.cache, pairs)


def test_page_offsets_past_two_to_the_31():
    spec = quire.AttentionSpec(**LLAMA)
    num_pages = 2**31 // (16 * 2 * 128) + 64
    cache = quire.PagedKVCache.empty(spec, num_pages, 16, device="cuda")
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    small = make_problem(spec, ((1, 60), (3, 40)), device="cuda")
    table = small.batch.page_table + (num_pages - small.cache.num_pages)
    for pool, pages in ((cache.k, small.cache.k), (cache.v, small.cache.v)):
        pool[-pages.shape[0] :] = pages
    batch = quire.Batch(table, small.batch.seq_lens, small.batch.cu_seqlens_q)
    assert error_budget(small, quire.attention(small.q, cache, quire.plan(spec, batch, **small.bounds))).passed
    k = torch.ones(1, 2, 128, dtype=torch.bfloat16, device="cuda")
    quire.write_kv(k, k, cache, torch.tensor([num_pages * 16 - 1], device="cuda"))
    assert (cache.k[-1, -1] == 1).all()
    quire.copy_pages(cache, cache, torch.tensor([[num_pages - 1, 5]], device="cuda"))
    assert torch.equal(cache.v[5].view(torch.int16), cache.v[-1].view(torch.int16))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_quantised_writes_are_the_nearest(kv_dtype):
    spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=64, kv_dtype=kv_dtype)
    cache = quire.PagedKVCache.empty(spec, 8, 16, device="cuda")
    cache = quire.PagedKVCache(cache.k, cache.v, "NHD", 0.02, 0.5)
    x = 3 * torch.randn(128, 2, 64, device="cuda")
    quire.write_kv(x, x, cache, torch.arange(128, device="cuda"))
    largest = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}[kv_dtype]
    for tensor, scale in ((cache.k, 0.02), (cache.v, 0.5)):
        y = (x / torch.tensor(scale, device="cuda")).clamp(-largest, largest)
        expected = (y.round() if kv_dtype is torch.int8 else y).to(kv_dtype)
        assert torch.equal(tensor.flatten(0, 1).view(torch.uint8), expected.view(torch.uint8))


def test_swapping_to_pinned_host_memory_and_back():
    p, plan, expected = solve(quire.AttentionSpec(**LLAMA), ((1, 100), (1, 50)))
    host = quire.PagedKVCache(*(torch.zeros(t.shape, dtype=t.dtype, pin_memory=True) for t in (p.cache.k, p.cache.v)))
    pages = torch.arange(p.cache.num_pages)
    pairs = torch.stack([pages, pages.flip(0)], 1)
    quire.copy_pages(p.cache, host, pairs)
    torch.cuda.synchronize()
    p.cache.k.zero_()
    p.cache.v.zero_()
    quire.copy_pages(host, p.cache, pairs.flip(1).contiguous())
    assert torch.equal(quire.attention(p.q, p.cache, plan), expected.out)


def test_compiled_is_eager():
    p, plan, expected = solve(quire.AttentionSpec(**LLAMA), ((1, 3000), (1, 50)))
    assert plan.workspace is not None
    compiled = torch.compile(lambda q: quire.attention(q * 1, p.cache, plan) + 0, fullgraph=True)
    assert torch.equal(compiled(p.q), expected.out)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_check_passes(dtype, part):
    """All in bfloat16, a quarter in another dtype. A check compiles a kernel or two, and processes share the parts."""
    device = torch.device("cuda")
    checked = features(device, dtype)
    if dtype is not torch.bfloat16:
        checked = checked[DTYPES.index(dtype) :: 8]
    checks = [check_feature(feature, device, dtype) for feature in checked[part::PARTS]]
    if part == 0:
        checks += islice(check_all(device, [dtype]), OTHER_CHECKS)
    assert checks and all(check.passed for check in checks), checks


def test_generated_tokens_are_those_of_eager_attention(capsys):
    assert cli.main(["generate", "--max-new-tokens", "64"]) == 0  # float32: token for token equal to eager attention
    assert "equal" in capsys.readouterr().out
