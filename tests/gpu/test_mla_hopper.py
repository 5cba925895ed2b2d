"""The MLA kernel for Hopper GPUs against the oracle: rows, pages, splits, poison, captured graphs, repeated runs."""

import dataclasses
import random

import pytest
import torch

import quire
from quire.dispatch.device import device_properties
from quire.testing import error_budget, make_problem
from tests.growth import with_growing_scores
from tests.pairs import each_pair

if not (torch.cuda.is_available() and device_properties(torch.device("cuda")).has_wgmma):
    pytest.skip("a kernel for Hopper GPUs alone", allow_module_level=True)

FP8 = torch.float8_e4m3fn
PRODUCTS = {"kv_dtype": FP8, "allow_fp8": True}
KINDS = [(16, {}), (128, {}), (16, {"kv_dtype": FP8}), (128, {"kv_dtype": FP8}), (128, PRODUCTS)]
DTYPES = [torch.bfloat16, torch.float16]
LONG = 1 << 17  # keys; products in fp8 are for plans whose bounds are many tiles
MIXED = ((1, 2000), (1, 17), (4, 700), (1, 0), (0, 50), (2, 64), (3, 129), (1, 128))


@pytest.fixture(autouse=True)
def cut(take):
    """Let plans take variants that cut sequences, which have a second launch; tests may ask for others."""
    take("cut")


def mla(num_q_heads=16, **fields):
    return quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=192**-0.5, **fields)


def solve(spec, lens, **problem):
    p = make_problem(spec, lens, device="cuda", **problem)
    batch, bounds = p.batch, p.bounds
    if spec.allow_fp8:
        table = torch.nn.functional.pad(batch.page_table, (0, LONG // p.cache.page_size))
        batch, bounds = dataclasses.replace(batch, page_table=table), bounds | {"max_seq_len": LONG}
    plan = quire.plan(spec, batch, **bounds, kernel="mla_hopper")
    assert plan.kernel == "mla_hopper" and plan.launch.fp8_mma == (spec.allow_fp8 and plan.launch.columns == 64), plan
    return p, plan, quire.attention(p.q, p.cache, plan, return_lse=True)


def assert_right(spec, lens, **problem):
    p, plan, state = solve(spec, lens, **problem)
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)


@pytest.mark.parametrize(*each_pair(num_q_heads=[1, 16, 40, 64, 128], causal=[True, False], dtype=DTYPES), ids=str)
def test_heads(num_q_heads, causal, dtype):
    assert_right(mla(num_q_heads, causal=causal, dtype=dtype), MIXED, page_size=64)


@pytest.mark.parametrize(("num_q_heads", "fields"), [*KINDS, (24, PRODUCTS)], ids=str)
@pytest.mark.parametrize("lens", [MIXED, ((1, 64),) * 300, ((1, 90), (1, 1), (1, 200)) * 40], ids=len)
def test_whole_sequences(num_q_heads, fields, lens, take):
    take("whole", *(["fp8"] if fields.get("allow_fp8") else []))
    p, plan, state = solve(mla(num_q_heads, **fields), lens, page_size=64)
    assert plan.launch.whole and error_budget(p, state).passed


def test_products_in_fp8_of_row_blocks_that_are_not_full(take):
    take("fp8", "cut")
    for num_q_heads in (17, 24, 32):
        p, plan, state = solve(mla(num_q_heads, **PRODUCTS), ((1, 3000), (1, 64), (1, 700)), page_size=64)
        assert plan.launch.fp8_mma and error_budget(p, state).passed


@pytest.mark.parametrize("falling", [True, False])
@pytest.mark.parametrize("num_q_heads", [16, 40, 128])
def test_scores_that_grow_from_tile_to_tile(num_q_heads, falling):
    """Bits of a row do not depend on the other rows of its warp, which may have to be rescaled."""
    p, plan, _ = solve(mla(num_q_heads), ((1, 2000), (1, 130), (1, 900)), page_size=64, one_query=True)
    with_growing_scores(p, falling)
    first = quire.attention(p.q, p.cache, plan, return_lse=True)
    verdict = error_budget(p, first)
    assert verdict.passed, (plan, verdict)
    p.q[:, 5] *= -7.0
    again = quire.attention(p.q, p.cache, plan, return_lse=True)
    others = [head for head in range(num_q_heads) if head != 5]
    assert torch.equal(first.out[:, others], again.out[:, others])
    assert torch.equal(first.lse[:, others], again.lse[:, others])
    assert not torch.equal(first.lse[:, 5], again.lse[:, 5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_latents_of_one_head(dtype):
    assert_right(mla(1, dtype=dtype, kv_dtype=FP8), MIXED, page_size=64)


@pytest.mark.parametrize(*each_pair(num_q_heads=[16, 40, 64, 128], causal=[True, False], dtype=DTYPES), ids=str)
def test_fp8_latents_and_products_in_fp8(num_q_heads, causal, dtype):
    """Sequences with more than 32 rows have such products: among these are some of 4 queries with 16 heads."""
    spec = mla(num_q_heads, causal=causal, dtype=dtype, **PRODUCTS)
    p, plan, state = solve(spec, MIXED, page_size=64)
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)
    strict_spec = dataclasses.replace(spec, allow_fp8=False)
    strict_plan = quire.plan(strict_spec, p.batch, **p.bounds, kernel="mla_hopper")
    strict = quire.attention(p.q, p.cache, strict_plan, return_lse=True)
    verdict = error_budget(dataclasses.replace(p, spec=strict_spec), strict)
    assert verdict.passed, (strict_plan, verdict)
    assert not torch.equal(state.out, strict.out)


def test_sums_of_products_in_fp8_are_float32():
    """The average of equal values over many keys is that value. Sums in the tensor cores would be too small."""
    p, plan, _ = solve(mla(128, **PRODUCTS), ((1, 30000),), one_query=True, page_size=64)
    p.cache.latents.fill_(1.0)
    out = quire.attention(p.q * 0, p.cache, plan)
    torch.testing.assert_close(out, p.cache.k_scale.to(out.dtype).expand_as(out), atol=0, rtol=8e-3)


@pytest.mark.parametrize(("num_q_heads", "allow_fp8"), [(16, False), (128, False), (128, True)])
def test_fp8_latents_without_a_scale(num_q_heads, allow_fp8):
    """They are those of a scale of 1, bit for bit."""
    p, plan, _ = solve(mla(num_q_heads, kv_dtype=FP8, allow_fp8=allow_fp8), MIXED, page_size=64)
    states = []
    for scale in (None, torch.ones((), device="cuda")):
        cache = quire.PagedKVCache.from_latents(p.cache.latents, 512, scale=scale)
        states.append(quire.attention(p.q, cache, plan, return_lse=True))
    assert torch.equal(states[0].out, states[1].out) and torch.equal(states[0].lse, states[1].lse)


@pytest.mark.parametrize("spec", [mla(kv_dtype=FP8), mla(128, **PRODUCTS)], ids=["16 heads", "fp8 products"])
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e-4, 300.0])
def test_queries_of_any_size_beside_fp8_latents(factor, spec):
    """They become float16, or fp8, within the kernel, scaled row by row."""
    p, plan, _ = solve(spec, MIXED, page_size=64)
    p.q[::2] *= factor
    p.q[1::3, ::2] *= factor
    verdict = error_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("spec", "page_size"),
    [
        *((mla(), page_size) for page_size in (8, 16, 48, 64, 128, 528)),
        *((mla(heads), page_size) for heads in (16, 24, 128) for page_size in (1, 12, 83)),
        *((mla(heads, kv_dtype=FP8), page_size) for heads in (16, 24, 128) for page_size in (1, 12)),
        *((mla(128, **PRODUCTS), page_size) for page_size in (1, 12)),
        *((mla(kv_dtype=FP8), page_size) for page_size in (8, 64, 528)),
        *((mla(128, **PRODUCTS), page_size) for page_size in (16, 64, 128)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"{value.num_q_heads} heads, {value.kv_dtype}",
)
def test_pages(page_size, spec):
    assert_right(spec, MIXED, page_size=page_size)


@pytest.mark.parametrize(("num_q_heads", "fields"), KINDS)
@pytest.mark.parametrize(
    "lens",
    [
        ((1, 1),),
        ((1, 64),),
        ((1, 65),),
        ((1, 127),),
        ((1, 9000),),
        ((1, 4096),) * 3,
        tuple((1, 37 * i % 900) for i in range(300)),
        tuple((1, 64) for i in range(140)),
        tuple((1, 5000 if i == 70 else 3) for i in range(140)),
    ],
    ids=lambda lens: f"{len(lens)} of {lens[0][1]}",
)
def test_lengths(lens, num_q_heads, fields):
    """Whole sequences, sequences that are cut, and more sequences than one step of the scheduler reads."""
    assert_right(mla(num_q_heads, **fields), lens, one_query=True, page_size=64)


def test_prompts():
    """The absorbed path serves prompts as well: more row blocks than a program has partitions."""
    assert_right(mla(16), ((300, 700), (1, 90), (65, 65)), page_size=64)


def test_records_go_to_the_portable_kernel():
    assert_right(mla(kv_dtype=FP8), MIXED, page_size=64, layout="fp8_ds_mla")


def test_a_flat_table_goes_to_the_portable_kernel():
    """By default; a plan that asks for this kernel is refused."""
    p = make_problem(mla(), MIXED, flat_table=True, device="cuda")
    plan = quire.plan(p.spec, p.batch, **p.bounds)
    verdict = error_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))
    assert plan.kernel == "mla" and verdict.passed, (plan, verdict)
    with pytest.raises(quire.UnsupportedError, match="got 'mla_hopper', which does not serve flat page tables"):
        quire.plan(p.spec, p.batch, **p.bounds, kernel="mla_hopper")


def test_queries_may_come_in_two_parts_of_any_strides():
    p, plan, expected = solve(mla(), MIXED, page_size=64)
    nope, rope = p.q[..., :512], p.q[..., 512:]
    by_head = nope.transpose(0, 1).contiguous().transpose(0, 1), rope.contiguous()
    state = quire.attention(by_head, p.cache, plan, return_lse=True)
    assert torch.equal(state.out, expected.out) and torch.equal(state.lse, expected.lse)
    assert torch.equal(quire.attention((nope, rope), p.cache, plan), expected.out)


@pytest.mark.parametrize(("num_q_heads", "fields"), KINDS)
def test_a_captured_graph_serves_all_lengths_and_tables_within_its_bounds(num_q_heads, fields, take):
    take("fp8")
    spec = mla(num_q_heads, **fields)
    big = make_problem(spec, ((1, 3000),) * 5, one_query=True, page_size=64, device="cuda")
    plan = quire.plan(spec, big.batch, **big.bounds)
    assert plan.kernel == "mla_hopper" and plan.launch.fp8_mma == spec.allow_fp8
    state = quire.State(torch.empty_like(big.q[..., :512]), torch.empty(big.q.shape[:2], device="cuda"))
    quire.attention(big.q, big.cache, plan, out=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.attention(big.q, big.cache, plan, out=state)
    table = big.batch.page_table.clone()
    for lens in ((1, 64, 65, 3000, 2999), (0, 127, 2048, 1, 0), (3000,) * 5, (0,) * 5, (640, 1280, 64, 64, 64)):
        big.batch.seq_lens.copy_(torch.tensor(lens))
        big.batch.page_table.copy_(table[torch.randperm(5)])
        state.out.fill_(float("nan"))
        graph.replay()
        verdict = error_budget(big, state)
        assert verdict.passed, (lens, verdict)


@pytest.mark.parametrize(("num_q_heads", "fields"), KINDS)
def test_runs_are_bitwise_equal(num_q_heads, fields):
    p, plan, first = solve(mla(num_q_heads, **fields), MIXED + ((1, 30000),), page_size=64)
    for _ in range(200):
        again = quire.attention(p.q, p.cache, plan, return_lse=True)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": torch.float32}, "float32"),
        ({"sliding_window": 9}, "windows"),
        ({"softcap": 9.0}, "softcap"),
        ({"kv_lora_rank": 256}, "512"),
    ],
)
def test_what_it_does_not_serve_is_named(options, words):
    p = make_problem(mla(**options), ((1, 200),), device="cuda")
    with pytest.raises(quire.UnsupportedError, match=words):
        quire.plan(p.spec, p.batch, **p.bounds, kernel="mla_hopper")
    assert quire.plan(p.spec, p.batch, **p.bounds).kernel == "mla"


@pytest.mark.parametrize("seed", range(8))  # a test for each: each compiles a kernel, and processes share them
def test_whole_space(seed):
    draw = random.Random(seed)
    spec = mla(draw.randint(1, 130), causal=draw.choice([True, False]), kv_dtype=draw.choice([None, FP8]))
    page_size = draw.choice([16, 64, 80])
    for _ in range(3):
        lens = [(draw.randint(0, 5), draw.choice([0, *draw.sample(range(1500), 5)])) for _ in range(draw.randint(1, 9))]
        lens = [(min(q, s) if spec.causal else q, s) for q, s in lens]
        assert_right(spec, lens, page_size=page_size, seed=seed)
