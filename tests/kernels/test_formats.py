"""Caches below eight bits: int4, nvfp4 and K8V4, by the kernels with TRITON_INTERPRET=1, by PyTorch without."""

import dataclasses

import pytest
import torch

import quire
from quire import reference
from quire.dispatch.config import KernelConfig
from quire.kernels.cpu import formats as in_torch
from quire.testing import error_budget, make_problem, unwritten, with_tensors

FORMATS = ["int4", "nvfp4", "k8v4"]
HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 32}
MIXED = ((1, 50), (3, 3), (7, 40), (0, 9), (1, 0), (2, 17))
FEATURES = {
    "softcap": {"softcap": 2.0},
    "everything": {"softcap": 3.0, "alibi": True, "sinks": True, "sliding_window": 11},
}


@pytest.mark.parametrize(
    "num_splits", [1, pytest.param(3, marks=pytest.mark.triton), pytest.param(None, marks=pytest.mark.triton)]
)
@pytest.mark.parametrize(("layout", "dtype"), [("NHD", torch.float32), ("HND", torch.float16)])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_attention_is_that_of_the_numbers(kv_format, layout, dtype, num_splits, solve, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS, kv_format=kv_format, dtype=dtype)
    assert_within_budget(*solve(spec, MIXED, num_splits, page_size=5, layout=layout))


@pytest.mark.triton
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("kv_format", [*FORMATS, "e4m3", "int8", None])
def test_fewer_rows_than_a_product_has(kv_format, num_splits, device, assert_within_budget):
    of_dtype = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
    cache = {"kv_format": kv_format} if kv_format in FORMATS else {"kv_dtype": of_dtype.get(kv_format)}
    for features in ({}, FEATURES["everything"]):
        spec = quire.AttentionSpec(**HEADS | {"head_dim": 64} | features, dtype=torch.float16, **cache)
        scales = "token" if kv_format == "int8" else "head"
        p = make_problem(spec, ((2, 90), (1, 33), (0, 9), (1, 0), (2, 70)), scales=scales, device=device)
        config = KernelConfig(8, 32, 1, 3, False, 8, block_d=64, block_dv=64)
        plan = quire.plan(spec, p.batch, **p.bounds, num_splits=num_splits, config=config)
        assert_within_budget(p, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kv_format", FORMATS)
def test_features(kv_format, feature, solve, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS | FEATURES[feature], kv_format=kv_format, dtype=torch.float16)
    assert_within_budget(*solve(spec, MIXED, 1, page_size=16))


@pytest.mark.parametrize(
    ("kv_format", "widths"),
    [("int4", (40, 24)), ("k8v4", (24, 40)), ("nvfp4", (48, 48)), ("int4", (16, 16)), ("nvfp4", (16, 16))],
)
def test_widths_that_are_no_powers_of_two(kv_format, widths, solve, assert_within_budget):
    head_dim, head_dim_v = widths
    spec = quire.AttentionSpec(
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        kv_format=kv_format,
        dtype=torch.float16,
    )
    assert_within_budget(*solve(spec, ((1, 40), (12, 20)), 1, page_size=7))


@pytest.mark.triton
@pytest.mark.parametrize("kv_format", FORMATS)
def test_batch_invariant_bits_do_not_depend_on_the_batch(kv_format, device):
    spec = quire.AttentionSpec(**HEADS, kv_format=kv_format, dtype=torch.float16)
    p = make_problem(spec, ((2, 300), (1, 40)), device=device)
    results = []
    for batch, q in ((p.batch, p.q), (alone(p.batch), p.q[:2])):
        bounds = {"max_query_len": 2, "max_seq_len": 300, "num_tokens": q.shape[0]}
        plan = quire.plan(spec, batch, **bounds, batch_invariant=True)
        results.append(quire.attention(q, p.cache, plan, return_lse=True))
    assert torch.equal(results[0].out[:2], results[1].out) and torch.equal(results[0].lse[:2], results[1].lse)
    assert error_budget(p, results[0]).passed


def alone(batch: quire.Batch) -> quire.Batch:
    """Return the batch of the first sequence."""
    return quire.Batch(batch.page_table[:1], batch.seq_lens[:1], batch.cu_seqlens_q[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kv_format", ["int4", "k8v4"])
def test_scales_of_values_may_differ_by_any_factor(kv_format, dtype, device, options, assert_within_budget):
    """Also those that are 0: their keys count, with values of 0."""
    spec = quire.AttentionSpec(**HEADS, kv_format=kv_format, dtype=dtype)
    p = make_problem(spec, ((1, 60), (5, 30)), device=device)
    factors = 2.0 ** torch.randint(-60, 9, p.cache.v_scale.shape, generator=torch.Generator().manual_seed(1))
    factors[torch.rand(factors.shape, generator=torch.Generator().manual_seed(2)) < 0.1] = 0.0
    zero = p.cache.v_scale.view(torch.int32) & 15
    p.cache.v_scale.mul_(factors.to(device))
    p.cache.v_scale.view(torch.int32).copy_(p.cache.v_scale.view(torch.int32) & ~15 | zero)
    plan = quire.plan(spec, p.batch, **p.bounds, **options())
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


def test_a_scale_that_is_nan_shows(device, options):
    spec = quire.AttentionSpec(**HEADS, kv_format="int4", dtype=torch.float16)
    p = make_problem(spec, ((1, 20),), device=device)
    p.cache.v_scale[p.batch.page_table[0, 0], 3] = float("nan")
    plan = quire.plan(spec, p.batch, **p.bounds, **options())
    assert quire.attention(p.q, p.cache, plan).isnan().all()


PAGES, SIZE = 4, 5
SLOTS = torch.tensor([7, -1, 19, 0, -5, 6])  # of 8 tokens: two are left out, and two more are padding


def random_cache(spec: quire.AttentionSpec, layout: str, device: str) -> quire.PagedKVCache:
    """Return a cache of random bytes."""
    cache = quire.PagedKVCache.empty(spec, PAGES, SIZE, layout=layout, device=device)
    generator = torch.Generator().manual_seed(0)

    def filled(x: torch.Tensor) -> torch.Tensor:
        if x.stride(-1) == 0:
            return (0.5 + torch.rand(spec.num_kv_heads, generator=generator)).to(device)
        return (
            torch.randint(0, 256, (x.nbytes,), dtype=torch.uint8, generator=generator)
            .view(x.dtype)
            .view(x.shape)
            .to(device)
        )

    return with_tensors(cache, filled)


@pytest.mark.parametrize(
    ("layout", "dtype", "head_dim"), [("NHD", torch.float32, 64), ("HND", torch.float16, 48)]
)  # a head of 48 is padded with zeros
@pytest.mark.parametrize("kv_format", FORMATS)
def test_written_numbers_are_the_nearest_and_all_else_is_kept(kv_format, layout, dtype, head_dim, device):
    spec = quire.AttentionSpec(**HEADS | {"head_dim": head_dim}, kv_format=kv_format, dtype=dtype)
    cache = random_cache(spec, layout, device)
    before = with_tensors(cache, torch.clone)
    x = 3 * torch.randn(2, 8, 2, head_dim, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    x[0, 0] += 9  # all are positive
    x[1, 2] = 0.0
    x[0, 3, 0, 5] = 1000.0
    quire.write_kv(*x, cache, SLOTS.to(device))
    tokens = (SLOTS >= 0).nonzero()[:, 0]
    page, slot = SLOTS[tokens].to(device) // SIZE, SLOTS[tokens].to(device) % SIZE
    stored = reference.read(cache, page, slot, torch.float64)
    for wanted, got, codes in zip(x[:, tokens.to(device)].double(), stored, (cache.form.k, cache.form.v), strict=True):
        if codes.name == "e4m3":
            step = wanted.abs() / 16 + wanted.abs().amax(-1, keepdim=True) / 448 / 512
        elif codes.group:  # steps of e2m1 are 2 at most, of a scale that is rounded by at most 1/16
            groups = wanted.unflatten(-1, (-1, 16))
            step = (groups.abs().amax(-1, keepdim=True) / 6 * 1.07).expand_as(groups).flatten(-2)
        else:
            step = (wanted.clamp(min=0).amax(-1) - wanted.clamp(max=0).amin(-1))[..., None] / 15 * 0.501
        assert ((got - wanted).abs() <= step + 1e-12).all()
    kept = torch.ones(PAGES, SIZE, dtype=torch.bool, device=device)
    kept[page, slot] = False
    for new, old in zip(tensors_of(cache), tensors_of(before), strict=True):
        at = kept if new.shape[1] == SIZE else kept[:, None].expand(new.shape[:3])
        assert torch.equal(new.view(torch.uint8)[at], old.view(torch.uint8)[at])


def tensors_of(cache: quire.PagedKVCache) -> list[torch.Tensor]:
    """Return a cache's tensors of pages; scales of 32 bits with a dimension for their bytes."""
    of_pages = [x for x in (cache.k, cache.v, *cache.scale_tensors) if x.dim() > 1]
    return [x[..., None] if x.dtype is torch.float32 else x for x in of_pages]


@pytest.mark.triton
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("kv_format", FORMATS)
def test_kernels_write_the_bits_that_pytorch_writes(kv_format, rotated, device):
    spec = quire.AttentionSpec(**HEADS | {"head_dim": 48}, kv_format=kv_format, dtype=torch.float16)
    cache = random_cache(spec, "NHD", device)
    x = torch.randn(2, 8, 2, 48, generator=torch.Generator().manual_seed(3)).half()
    x[0, 0, 0, 1], x[0, 2, 1, 7], x[1, 3, 0, 3], x[1, 5] = float("nan"), float("inf"), -float("inf"), 1e-7
    q = torch.zeros(8, 6, 48, dtype=torch.float16, device=device)
    slots = torch.cat([SLOTS, torch.tensor([-1, 11])]).to(device)
    page, slot = slots[slots >= 0] // SIZE, slots[slots >= 0] % SIZE
    if rotated:  # by no angle, which makes NaN of infinity
        x[0] = x[0].nan_to_num(0.0, 9.0, -9.0)
        from quire.kernels.norm_rope import norm_rope_and_write

        angles = torch.zeros(1, 24, device=device)
        rope = quire.Rope(angles.cos(), angles.sin(), torch.zeros(8, dtype=torch.int64, device=device), False)
        norm_rope_and_write(q, torch.empty_like(q), cache, *x.to(device), slots, rope, None)
    else:
        quire.write_kv(*x.to(device), cache, slots)
    for own, codes, stored, scale, blocks in (
        (x[0], cache.form.k, cache.k, cache.k_scale, cache.k_block_scale),
        (x[1], cache.form.v, cache.v, cache.v_scale, cache.v_block_scale),
    ):
        codes_of, fresh, of_blocks = in_torch.encode(own[slots.cpu() >= 0].float(), codes, scale.cpu())
        assert torch.equal(stored[page, slot].cpu(), codes_of)
        if fresh is not None:
            assert torch.equal(scale[page, slot].cpu().view(torch.int32), fresh.view(torch.int32))
        if of_blocks is not None:
            assert torch.equal(blocks.view(torch.uint8)[page, slot].cpu(), of_blocks.view(torch.uint8))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_new_tokens_are_written_and_attended_to(kv_format, device, options, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS, kv_format=kv_format, dtype=torch.float16)
    p = make_problem(spec, ((1, 40), (4, 20)), device=device)
    cache, new = unwritten(p)
    plan = quire.plan(spec, p.batch, **p.bounds, **options())
    assert_within_budget(p, quire.attention(p.q, cache, plan, **new, return_lse=True))


def in_one_tensor(cache: quire.PagedKVCache) -> quire.PagedKVCache:
    """Return a copy in the memory of vLLM: of each slot and head, a key, its scale, a value and its scale."""
    widths = cache.k.shape[3], 4, cache.v.shape[3], 4
    memory = torch.zeros(*cache.k.shape[:3], sum(widths), dtype=torch.uint8, device=cache.device)
    k, k_scale, v, v_scale = memory.split(widths, 3)
    k.copy_(cache.k)
    v.copy_(cache.v)
    scales = [part.view(torch.float32)[..., 0] for part in (k_scale, v_scale)]
    for mine, other in zip(scales, (cache.k_scale, cache.v_scale), strict=True):
        mine.view(torch.int32).copy_(other.view(torch.int32))
    return quire.PagedKVCache(k, v, "NHD", *scales, kv_format=cache.kv_format)


@pytest.mark.parametrize("kv_format", ["int4", "k8v4"])
def test_scales_may_lie_between_keys_and_values_as_in_vllm(kv_format, device, options, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS, kv_format=kv_format, dtype=torch.float16)
    p = make_problem(spec, ((1, 40), (4, 20)), device=device)
    p = dataclasses.replace(p, cache=in_one_tensor(p.cache))
    plan = quire.plan(spec, p.batch, **p.bounds, **options())
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


def test_block_scales_may_follow_the_numbers_of_a_page_as_in_vllm(device, options, assert_within_budget):
    """A page is the keys of all heads, their block scales, the values and theirs."""
    spec = quire.AttentionSpec(**HEADS, kv_format="nvfp4", dtype=torch.float16)
    p = make_problem(spec, ((1, 40), (4, 20)), layout="HND", device=device)
    cache = p.cache
    scales = [x.view(torch.uint8).transpose(1, 2) for x in (cache.k_block_scale, cache.v_block_scale)]
    parts = [cache.k, scales[0], cache.v, scales[1]]
    memory = torch.cat([part.flatten(1) for part in parts], 1)
    k, k_block, v, v_block = (
        part.unflatten(1, like.shape[1:])
        for part, like in zip(memory.split([part[0].numel() for part in parts], 1), parts, strict=True)
    )
    blocks = {"k_block_scale": k_block.transpose(1, 2), "v_block_scale": v_block.transpose(1, 2)}
    p = dataclasses.replace(
        p, cache=quire.PagedKVCache(k, v, "HND", cache.k_scale, cache.v_scale, kv_format="nvfp4", **blocks)
    )
    plan = quire.plan(spec, p.batch, **p.bounds, **options())
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.parametrize("kv_format", FORMATS)
def test_pages_are_copied_with_their_scales(kv_format, device):
    spec = quire.AttentionSpec(**HEADS, kv_format=kv_format, dtype=torch.float16)
    cache = random_cache(spec, "NHD", device)
    quire.copy_pages(cache, cache, torch.tensor([[0, 3]], device=device))
    for x in tensors_of(cache):
        assert torch.equal(x[0].view(torch.uint8), x[3].view(torch.uint8))
