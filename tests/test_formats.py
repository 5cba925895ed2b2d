"""Formats of a cache below eight bits: what is refused, and what goes through operators, files and pickles."""

import copy

import pytest
import torch

import quire
from quire import debug
from quire.testing import make_problem, with_tensors

FORMATS = ["int4", "nvfp4", "k8v4"]
HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.float32}


def spec_of(kv_format: str, **fields) -> quire.AttentionSpec:
    return quire.AttentionSpec(**HEADS | fields, kv_format=kv_format)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"kv_format": "int3"}, quire.UnsupportedError, "kv_format must be one of int4, nvfp4, k8v4, got 'int3'"),
        ({"kv_format": torch.int8}, TypeError, "kv_format must be the name of a format"),
        ({"kv_format": "int4", "kv_dtype": torch.int8}, ValueError, "kv_dtype must be left out with kv_format 'int4'"),
        ({"kv_format": "nvfp4", "head_dim": 24}, quire.UnsupportedError, "head_dim must be a multiple of 16"),
        ({"kv_format": "nvfp4", "head_dim_v": 48}, quire.UnsupportedError, "head_dim_v must be head_dim"),
        (
            {"kv_format": "nvfp4", "latent": True, "num_kv_heads": 1, "softmax_scale": 1.0},
            quire.UnsupportedError,
            "kv_format must be left out where latent=True",
        ),
    ],
)
def test_specs_that_no_format_serves_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        quire.AttentionSpec(**HEADS | fields)


def parts_of(kv_format: str) -> dict:
    """Return the arguments of a cache of four pages."""
    cache = quire.PagedKVCache.empty(spec_of(kv_format), 4, 8)
    return {"k": cache.k, "v": cache.v, "layout": cache.layout, **cache.scales}


@pytest.mark.parametrize(
    ("kv_format", "wrong", "error", "message"),
    [
        ("int4", {"k_scale": torch.ones(4, 8, 1)}, ValueError, "k_scale must be a number, .* = .4, 8, 2., got shape"),
        ("int4", {"k_scale": torch.ones(2), "v_scale": torch.ones(2)}, ValueError, "k_scale must be .num_pages"),
        ("int4", {"k_scale": None}, ValueError, "k_scale and v_scale must be given together"),
        ("int4", {"k_scale": None, "v_scale": None}, ValueError, "k_scale must be given for kv_format int4"),
        ("int4", {"k_scale": torch.ones(4, 8, 2).half()}, ValueError, "k_scale must be float32"),
        ("int4", {"k": torch.zeros(4, 8, 2, 16)}, ValueError, "v must have k's dtype"),
        ("int4", {"k": torch.zeros(4, 8, 3, 16, dtype=torch.uint8)}, ValueError, "v must have k's pages, slots and"),
        ("int4", {"layout": "HDNX"}, quire.UnsupportedError, "layout must be one of NHD, HND, got 'HDNX'"),
        ("int4", {"k_block_scale": torch.ones(1)}, ValueError, "k_block_scale must be left out"),
        ("nvfp4", {"k_scale": torch.ones(4, 8, 2)}, ValueError, "k_scale must be a number or .num_kv_heads."),
        ("nvfp4", {"k_block_scale": None}, TypeError, "k_block_scale must be a tensor"),
        (
            "nvfp4",
            {"v_block_scale": torch.zeros(4, 8, 2, 4).to(torch.float8_e4m3fn)},
            ValueError,
            "v_block_scale must be .num_pages, page_size, num_kv_heads, head_dim / 16. = .4, 8, 2, 2.",
        ),
        (
            "nvfp4",
            {"k": torch.zeros(4, 8, 2, 32, dtype=torch.uint8), "v": torch.zeros(4, 8, 2, 32, dtype=torch.uint8)}
            | {"k_block_scale": torch.ones(4, 8, 2, 5).to(torch.float8_e4m3fn)[..., :4]},
            ValueError,
            "k_block_scale must have strides that 4 divides, from a multiple of 4 bytes, got .80, 10, 5, 1. from 0",
        ),
        ("nvfp4", {"v_block_scale": torch.ones(4, 8, 2, 2)}, ValueError, "v_block_scale must be float8_e4m3fn"),
        (
            "nvfp4",
            {"k": torch.zeros(4, 8, 2, 12, dtype=torch.uint8)},
            quire.UnsupportedError,
            "head_dim must be a mult",
        ),
        (
            "k8v4",
            {"k": torch.zeros(4, 8, 2, 33, dtype=torch.uint8)[..., :32]},
            ValueError,
            "k must have even strides from an even byte for kv_format k8v4",
        ),
    ],
)
def test_caches_whose_parts_do_not_fit_are_refused(kv_format, wrong, error, message):
    parts = parts_of(kv_format) | wrong
    with pytest.raises(error, match=message):
        quire.PagedKVCache(parts.pop("k"), parts.pop("v"), parts.pop("layout"), **parts)


def test_a_cache_of_another_format_is_refused_before_anything_is_written():
    p = make_problem(spec_of("int4"), ((1, 10),))
    out = torch.full((1, 4, 32), 7.0)
    plan = quire.plan(spec_of("nvfp4"), p.batch, **p.bounds)
    with pytest.raises(ValueError, match="cache must have the spec's kv_format nvfp4, got int4"):
        quire.attention(p.q, p.cache, plan, out=out)
    plain = quire.AttentionSpec(**HEADS)
    with pytest.raises(ValueError, match="cache must have the spec's kv_format None, got int4"):
        quire.attention(p.q, p.cache, quire.plan(plain, p.batch, **p.bounds), out=out)
    assert (out == 7.0).all()


def test_new_tokens_of_a_wrong_width_or_dtype_are_refused_before_anything_is_written():
    cache = make_problem(spec_of("int4"), ((1, 10),)).cache
    kept = with_tensors(cache, torch.clone)
    slots = torch.zeros(1, dtype=torch.int64)
    for k, message in (
        (torch.zeros(1, 2, 16), r"k must be \[num_tokens, 2, 32\]"),
        (torch.zeros(1, 2, 32, dtype=torch.uint8), "k must be of the cache's dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            quire.write_kv(k, torch.zeros(1, 2, 32), cache, slots)
    assert torch.equal(cache.k, kept.k) and torch.equal(cache.v, kept.v)


def test_pages_are_not_copied_between_formats():
    src, dst = (quire.PagedKVCache.empty(spec_of(kv_format), 2, 8) for kv_format in ("int4", "nvfp4"))
    with pytest.raises(ValueError, match="got format nvfp4 for int4"):
        quire.copy_pages(src, dst, torch.tensor([[0, 1]]))


@pytest.mark.parametrize(("kv_format", "nbytes"), [("int4", 136), ("nvfp4", 144), ("k8v4", 200)])
def test_a_token_takes_the_bytes_of_its_tensors(kv_format, nbytes):
    spec = spec_of(kv_format, head_dim=128)
    assert spec.bytes_per_token == 2 * nbytes
    cache = quire.PagedKVCache.empty(spec, 3, 8)
    tensors = [x for x in (cache.k, cache.v, *cache.scale_tensors) if x.dim() > 1 and x.stride(-1)]
    assert sum(x.nbytes for x in tensors) == 3 * 8 * spec.bytes_per_token


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_copied_cache_is_the_same(kv_format):
    cache = make_problem(spec_of(kv_format), ((1, 10),)).cache
    again = copy.deepcopy(cache)
    assert again.signature == cache.signature and again.kv_format == kv_format
    assert torch.equal(again.k, cache.k) and len(again.scale_tensors) == len(cache.scale_tensors)


@pytest.mark.parametrize("contents", [False, True])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_recorded_call_is_replayed(kv_format, contents, tmp_path):
    p = make_problem(spec_of(kv_format), ((1, 20), (3, 9)))
    plan = quire.plan(p.spec, p.batch, **p.bounds)
    with debug.record(tmp_path / "call.quire", contents=contents):
        quire.attention(p.q, p.cache, plan)
    replay = debug.replay(debug.load(tmp_path / "call.quire"))
    assert replay.passed, replay


@pytest.mark.parametrize("kv_format", FORMATS)
def test_operators_carry_the_format(kv_format):
    """As `torch.compile` calls them."""
    p = make_problem(spec_of(kv_format), ((1, 20), (3, 9)))
    plan = quire.plan(p.spec, p.batch, **p.bounds)
    wanted, out = quire.attention(p.q, p.cache, plan), torch.zeros(4, 4, 32)
    quire.ops.attention(p.q, p.cache, plan, out, None, None, None, None)
    assert torch.equal(out, wanted)
    eager, through = with_tensors(p.cache, torch.clone), with_tensors(p.cache, torch.clone)
    k, v = torch.randn(2, 3, 2, 32)
    slots = torch.tensor([5, 6, 7])
    quire.write_kv(k, v, eager, slots)
    quire.ops.write_kv(k, v, through, slots)
    for a, b in zip(
        (eager.k, eager.v, *eager.scale_tensors), (through.k, through.v, *through.scale_tensors), strict=True
    ):
        assert torch.equal(
            a.nan_to_num() if a.dtype is torch.float32 else a.view(torch.uint8),
            b.nan_to_num() if b.dtype is torch.float32 else b.view(torch.uint8),
        )
