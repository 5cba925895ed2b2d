"""CPU tensors outside of the interpreter, which PyTorch serves: what can go wrong there, and in no kernel."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quire
from quire.dispatch.device import is_served_by_torch
from quire.testing import Oracle, error_budget, make_problem

pytestmark = pytest.mark.skipif(
    not is_served_by_torch(torch.device("cpu")), reason="in Triton's interpreter the kernels serve CPU tensors"
)

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
LENS = ((1, 20), (3, 9), (1, 0), (18, 40))
FEATURES = {
    "plain": {},
    "float16": {"dtype": torch.float16},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0},
    "ALiBi": {"alibi": True},
    "int8": {"kv_dtype": torch.int8},
    "fp8": {"kv_dtype": torch.float8_e4m3fn, "dtype": torch.bfloat16},
}


def int32(*entries):
    return torch.tensor(entries, dtype=torch.int32)


def make_spec(**fields):
    return quire.AttentionSpec(**HEADS | {"dtype": torch.float32} | fields)


def attend(p, **options):
    plan = quire.plan(p.spec, p.batch, **p.bounds)
    return quire.attention(p.q, p.cache, plan, **p.tables | options)


def same(a, b):
    return torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0))


def test_the_cpu_path_needs_no_triton():
    """Triton is on Linux alone. `quire` itself is left out: what it imports is the business of `test_public_api.py`."""
    root = Path(quire.__file__).parent
    script = f"""
import sys, types
sys.modules["triton"] = None
package = types.ModuleType("quire")
package.__path__ = [{str(root)!r}]
sys.modules["quire"] = package
from quire.kernels.cpu import attention, cache_ops, combine, launch
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("feature", FEATURES)
def test_autocast_changes_nothing(feature):
    p = make_problem(make_spec(**FEATURES[feature]), LENS)
    states = [attend(p, return_lse=True), attend(p, return_lse=True)]
    k, v, slots = p.q[:2, :2].contiguous(), p.q[2:4, :2].contiguous(), torch.tensor([3, 7])
    caches = [quire.PagedKVCache.empty(p.spec, 2, 4) for _ in "ab"]

    def step(cache):
        quire.write_kv(k, v, cache, slots)
        return attend(p), *attend(p, return_lse=True), *quire.merge_states(states), cache.k.float()[0, 3]

    expected = step(caches[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = step(caches[1])
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("of", ["sinks", "alibi_slopes", "k", "v", "k_scale"])
def test_a_result_has_no_graph(of, return_lse):
    """Sinks are an `nn.Parameter` in many models; a kernel's result has no graph either."""
    kv_dtype = torch.float8_e4m3fn if of == "k_scale" else None
    p = make_problem(make_spec(sinks=of == "sinks", alibi=of == "alibi_slopes", kv_dtype=kv_dtype), LENS)
    c = p.cache
    options = {}
    if of in ("sinks", "alibi_slopes"):
        options[of] = torch.nn.Parameter(p.tables[of])
    elif of == "k_scale":
        scale = torch.ones(2, requires_grad=True)
        c = quire.PagedKVCache(c.k, c.v, "NHD", scale, scale)
    else:
        c = quire.PagedKVCache(*(t.clone().requires_grad_(name == of) for name, t in (("k", c.k), ("v", c.v))))
    plan = quire.plan(p.spec, p.batch, **p.bounds)
    result = quire.attention(p.q, c, plan, **p.tables | options, return_lse=return_lse)
    assert not any(t.requires_grad for t in (result if return_lse else [result]))


def test_written_keys_have_no_graph():
    p = make_problem(make_spec(), LENS)
    k, v = (torch.randn(2, 2, 16, requires_grad=True) for _ in "kv")
    quire.write_kv(k, v, p.cache, torch.tensor([3, 7]))
    assert not p.cache.k.requires_grad and not p.cache.v.requires_grad


LATENTS = {  # dtype of queries and of the cache, layout, rank and rotary columns
    "float32": (torch.float32, None, "NHD", 512, 64),
    "bfloat16": (torch.bfloat16, None, "NHD", 512, 64),
    "float16": (torch.float16, None, "NHD", 256, 64),
    "no rotary columns": (torch.float32, None, "NHD", 64, 0),
    "odd widths": (torch.float32, None, "NHD", 48, 112),
    "e4m3": (torch.float16, torch.float8_e4m3fn, "NHD", 32, 16),
    "records": (torch.bfloat16, torch.float8_e4m3fn, "fp8_ds_mla", 512, 64),
    "records of 584 bytes": (torch.bfloat16, torch.float8_e4m3fn, "fp8_ds_mla_584", 512, 0),
    "records of 528 bytes": (torch.float16, torch.float8_e4m3fn, "fp8_ds_mla_528", 512, 0),
}


@pytest.mark.parametrize(
    "features", [{}, {"sinks": True, "softcap": 3.0}, {"sliding_window": 6}, {"causal": False}], ids=str
)
@pytest.mark.parametrize("kind", LATENTS)
def test_latents(kind, features):
    """Queries as one tensor and as two, which give the same bits, with and without the lse; pages of an odd size."""
    dtype, kv_dtype, layout, rank, rope = LATENTS[kind]
    widths = {"kv_lora_rank": rank, "qk_rope_head_dim": rope}
    spec = quire.AttentionSpec.mla(
        num_q_heads=3, softmax_scale=0.06, **widths, dtype=dtype, kv_dtype=kv_dtype, **features
    )
    p = make_problem(spec, LENS, page_size=7, layout=layout)
    oracle, plan = Oracle(p), quire.plan(p.spec, p.batch, **p.bounds)
    state = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    assert oracle.judge(state).passed, oracle.judge(state)
    pair = tuple(half.clone() for half in p.halves) if rope else (p.q, None)
    assert torch.equal(quire.attention(pair, p.cache, plan, **p.tables), state.out)
    assert plan.kernel == "torch"


def test_a_long_prompt_over_latents():
    spec = quire.AttentionSpec.mla(num_q_heads=2, softmax_scale=0.1, kv_lora_rank=32, dtype=torch.float32)
    p = make_problem(spec, ((40, 90), (1, 33)), page_size=1, flat_table=True)
    plan = quire.plan(spec, p.batch, **p.bounds)
    verdict = error_budget(p, quire.attention(p.halves, p.cache, plan, return_lse=True))
    assert verdict.passed, verdict


def test_wide_states_are_merged():
    """Outputs over latents are as wide as these: 512 columns."""
    spec = quire.AttentionSpec.mla(num_q_heads=2, softmax_scale=0.05, dtype=torch.float32)
    p = make_problem(spec, ((1, 24),), page_size=8)
    b, cuts = p.batch, ((0, 1), (1, 3))
    states = []
    for begin, end in cuts:
        keys = torch.full((1,), 8 * (end - begin), dtype=torch.int32)
        part = quire.Batch(b.page_table[:, begin:end], keys, b.cu_seqlens_q, query_offsets=int32(23 - 8 * begin))
        plan = quire.plan(spec, part, max_query_len=1, max_seq_len=8 * (end - begin))
        states.append(quire.attention(p.halves, p.cache, plan, return_lse=True))
    verdict = error_budget(p, quire.merge_states(states))
    assert verdict.passed, verdict


def test_a_default_device_is_no_matter():
    """Model loaders call under `torch.device("meta")`, or make a GPU the default."""
    p = make_problem(make_spec(sinks=True), LENS)
    expected = attend(p, return_lse=True)
    plan = quire.plan(p.spec, p.batch, **p.bounds)
    with torch.device("meta"):
        found = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize("fields", [*FEATURES.values(), {"kv_format": "nvfp4"}], ids=str)
def test_a_default_dtype_is_no_matter(fields):
    """Engines make a model's layers with that of its weights."""
    p = make_problem(make_spec(**fields), LENS)
    expected = attend(p, return_lse=True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = attend(p, return_lse=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.out.dtype is expected.out.dtype and torch.equal(found.out, expected.out)
    assert found.lse.dtype is expected.lse.dtype and torch.equal(found.lse, expected.lse)


def with_table(p, row, column, page):
    table = p.batch.page_table.clone()
    table[row, column] = page
    return quire.Batch(table, p.batch.seq_lens, p.batch.cu_seqlens_q)


OUT_OF_RANGE = {
    "a page past the pool": lambda p: with_table(p, 0, 1, p.cache.num_pages),
    "a page of -1": lambda p: with_table(p, 0, 0, -1),
    "more keys than the table has": lambda p: quire.Batch(p.batch.page_table, int32(20, 49, 0), p.batch.cu_seqlens_q),
    "more keys than planned for": lambda p: quire.Batch(p.batch.page_table, int32(21, 9, 0), p.batch.cu_seqlens_q),
    "fewer keys than none": lambda p: quire.Batch(p.batch.page_table, int32(20, -9, 0), p.batch.cu_seqlens_q),
    "more queries than q has": lambda p: quire.Batch(p.batch.page_table, p.batch.seq_lens, int32(0, 1, 4, 6)),
    "more queries than planned for": lambda p: quire.Batch(p.batch.page_table, p.batch.seq_lens, int32(0, 0, 4, 5)),
    "fewer queries than none": lambda p: quire.Batch(p.batch.page_table, p.batch.seq_lens, int32(0, 3, 1, 5)),
    "queries that do not begin at 0": lambda p: quire.Batch(p.batch.page_table, p.batch.seq_lens, int32(1, 2, 4, 5)),
    "a run past the flat table": lambda p: quire.Batch(
        p.batch.page_table.flatten(), p.batch.seq_lens, p.batch.cu_seqlens_q, int32(0, 6, 0)
    ),
    "a run before the flat table": lambda p: quire.Batch(
        p.batch.page_table.flatten(), p.batch.seq_lens, p.batch.cu_seqlens_q, int32(-1, 2, 0)
    ),
}


@pytest.mark.parametrize("case", OUT_OF_RANGE)
def test_contents_out_of_range_are_found_before_anything_is_written(case):
    p = make_problem(make_spec(), ((1, 20), (3, 9), (1, 0)))
    batch = OUT_OF_RANGE[case](p)
    plan = quire.plan(p.spec, batch, **p.bounds)
    out = quire.State(torch.full((5, 4, 16), 7.0), torch.full((5, 4), 7.0))
    with pytest.raises(ValueError, match=r"must .*, got .*; "):
        quire.attention(p.q, p.cache, plan, out=out)
    assert (out.out == 7).all() and (out.lse == 7).all()


@pytest.mark.parametrize("cu_seqlens_k", [(0, 5, 12), (-1, 5, 11), (0, 7, 3)])
def test_keys_that_are_not_there_are_found(cu_seqlens_k):
    q, k, v = (torch.randn(n, 2, 16) for n in (2, 11, 11))
    spec = make_spec(num_q_heads=2)
    plan = quire.plan(spec, quire.Batch.varlen(int32(0, 1, 2), int32(*cu_seqlens_k)), max_query_len=1, max_seq_len=12)
    with pytest.raises(ValueError, match=r"must .*, got .*; "):
        quire.varlen_attention(q, k, v, plan)


def test_table_entries_that_no_query_sees_may_be_junk():
    """Past a sequence's end, and before its window."""
    p = make_problem(make_spec(sliding_window=5), ((1, 90), (3, 40)))
    expected = attend(p)
    p.batch.page_table[0, :5] = p.cache.num_pages + 3
    p.batch.page_table[1, 3:] = -5
    assert torch.equal(attend(p), expected)


@pytest.mark.parametrize("scales", ["head", "token"])
def test_a_slot_past_the_pool_leaves_the_cache_as_it_was(scales):
    p = make_problem(make_spec(kv_dtype=torch.int8), LENS, scales=scales)
    c = p.cache
    before = [t.clone() for t in (c.k, c.v, c.k_scale, c.v_scale)]
    k, v = torch.randn(2, 3, 2, 16)
    slots = torch.tensor([16, -1, c.num_pages * c.page_size])
    with pytest.raises(ValueError, match=r"slot_mapping must hold .*, got .*; "):
        quire.write_kv(k, v, c, slots)
    assert all(same(a, b) for a, b in zip(before, (c.k, c.v, c.k_scale, c.v_scale), strict=True))


@pytest.mark.parametrize(("layout", "rope"), [("NHD", 64), ("fp8_ds_mla", 64), ("fp8_ds_mla_584", 0)])
def test_a_slot_past_the_pool_leaves_latents_as_they_were(layout, rope):
    spec = quire.AttentionSpec.mla(
        num_q_heads=2, softmax_scale=0.1, kv_dtype=torch.float8_e4m3fn, qk_rope_head_dim=rope
    )
    cache = make_problem(spec, LENS, layout=layout).cache
    before = cache.latents.view(torch.uint8).clone()
    slots = torch.tensor([16, -1, cache.num_pages * cache.page_size])
    with pytest.raises(ValueError, match=r"slot_mapping must hold .*, got .*; "):
        quire.write_latent(torch.randn(3, 512), torch.randn(3, rope) if rope else None, cache, slots)
    assert torch.equal(cache.latents.view(torch.uint8), before)


@pytest.mark.parametrize("pairs", [[[1, 2], [3, 4]], [[4, 1], [0, 2]], [[0, 3], [1, 3]]], ids=str)
def test_a_page_past_the_pool_or_written_twice_leaves_the_cache_as_it_was(pairs):
    cache = quire.PagedKVCache(torch.randn(4, 8, 2, 16), torch.randn(4, 8, 2, 16))
    before = cache.k.clone(), cache.v.clone()
    with pytest.raises(ValueError, match=r"page_pairs must .*, got .*; "):
        quire.copy_pages(cache, cache, torch.tensor(pairs))
    assert torch.equal(cache.k, before[0]) and torch.equal(cache.v, before[1])
