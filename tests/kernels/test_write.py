"""Writing keys and values by slot, quantising on the way; copying pages. Valid with and without TRITON_INTERPRET=1."""

import pytest
import torch

import quire
from quire.kernels import mods

LAYOUTS = ["NHD", "HND", "HDNX"]


def as_slots(cache: quire.PagedKVCache, tensor: torch.Tensor) -> torch.Tensor:
    """View a cache tensor as [num_pages, page_size, num_kv_heads, head_dim]."""
    if cache.layout == "NHD":
        return tensor
    if cache.layout == "HND":
        return tensor.transpose(1, 2)
    return tensor.permute(0, 3, 1, 2, 4).flatten(3) if tensor.dim() == 5 else tensor.permute(0, 3, 1, 2)


def make_cache(dtype=torch.float32, layout="NHD", pages=4, size=5, kv_dtype=None, dim_v=24):
    spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=16, head_dim_v=dim_v, dtype=dtype, kv_dtype=kv_dtype)
    cache = quire.PagedKVCache.empty(spec, pages, size, layout=layout)
    for tensor in (cache.k, cache.v):
        tensor.view(torch.uint8).fill_(17)
    return cache


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_slots_are_written_and_others_kept(layout, dtype):
    cache = make_cache(dtype, layout)
    before = cache.k.clone(), cache.v.clone()
    fused = torch.randn(6, 2, 40).to(dtype)
    k, v = fused[..., :16], fused[..., 16:]  # slices of one projection
    slots = torch.tensor([7, -1, 19, 0, -5])  # the sixth token is padding
    quire.write_kv(k, v, cache, slots)
    for tensor, old, new in ((cache.k, before[0], k), (cache.v, before[1], v)):
        got, old = as_slots(cache, tensor).flatten(0, 1), as_slots(cache, old).flatten(0, 1).clone()
        old[slots[slots >= 0]] = new[:5][slots >= 0]
        assert torch.equal(got.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scales", ["none", "head", "token"])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_quantised_values_are_the_nearest(kv_dtype, scales, layout):
    cache = make_cache(layout=layout, kv_dtype=kv_dtype)
    largest = mods.LARGEST[kv_dtype]
    if scales == "none":
        cache = quire.PagedKVCache(cache.k, cache.v, layout)
    if scales == "head":
        cache = quire.PagedKVCache(cache.k, cache.v, layout, torch.tensor([0.03, 0.5]), torch.tensor([0.2, 0.01]))
    if scales == "token":
        cache = quire.PagedKVCache(cache.k, cache.v, layout, torch.zeros(4, 5, 2), torch.zeros(4, 5, 2))
    torch.manual_seed(0)
    k, v = torch.randn(3, 2, 16) * 30, torch.randn(3, 2, 24)
    k[0, 0, 0] = 1e6  # saturates
    v[1] = 0.0
    slots = torch.tensor([3, 12, 8])
    quire.write_kv(k, v, cache, slots)
    for name, x in (("k", k), ("v", v)):
        scale = getattr(cache, f"{name}_scale")
        if scales == "token":
            scale = scale.flatten(0, 1)[slots]
            peak = x.abs().amax(-1)
            torch.testing.assert_close(scale, torch.where(peak > 0, peak / largest, 1.0))
            x = x / scale[..., None]
        elif scales == "head":
            x = x / scale[:, None]
        x = x.clamp(-largest, largest)
        expected = (x.round() if kv_dtype is torch.int8 else x).to(kv_dtype)
        got = as_slots(cache, getattr(cache, name)).flatten(0, 1).view(torch.uint8)[slots]
        assert torch.equal(got, expected.view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rounding_to_fp8_at_every_tie_and_subnormal(kv_dtype):
    """Every representable value, every midpoint between neighbours, and what lies just beside them."""
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype).float()
    values = codes[codes.isfinite()].unique()
    middles = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), torch.tensor([1e9, -1e9, 1e-30])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 32)).view(-1, 2, 16)
    spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.float32, kv_dtype=kv_dtype)
    cache = quire.PagedKVCache.empty(spec, 1, x.shape[0])
    quire.write_kv(x, x, cache, torch.arange(x.shape[0]))
    largest = mods.LARGEST[kv_dtype]
    assert torch.equal(cache.k[0].view(torch.uint8), x.clamp(-largest, largest).to(kv_dtype).view(torch.uint8))


def test_nan_stays_nan_in_fp8():
    cache = make_cache(kv_dtype=torch.float8_e4m3fn)
    quire.write_kv(torch.full((1, 2, 16), float("nan")), torch.full((1, 2, 24), float("nan")), cache, torch.tensor([2]))
    assert cache.k[0, 2].float().isnan().all() and cache.v[0, 2].float().isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_pages_are_copied_within_and_between_caches(layout, kv_dtype):
    src, dst = make_cache(layout=layout, kv_dtype=kv_dtype), make_cache(layout=layout, kv_dtype=kv_dtype, pages=6)
    if kv_dtype is not None:
        src, dst = (quire.PagedKVCache(c.k, c.v, layout, torch.randn(c.num_pages, 5, 2), torch.randn(c.num_pages, 5, 2)) for c in (src, dst))
    for tensor in (src.k, src.v):
        tensor.view(torch.uint8).random_()
    kept = dst.k.clone()
    quire.copy_pages(src, dst, torch.tensor([[1, 5], [3, 0], [-1, 2], [2, -1]], dtype=torch.int32))
    names = ("k", "v") if kv_dtype is None else ("k", "v", "k_scale", "v_scale")
    for name in names:
        a, b = (t.contiguous().view(torch.uint8) for t in (getattr(src, name), getattr(dst, name)))
        assert torch.equal(b[5], a[1]) and torch.equal(b[0], a[3])
    assert torch.equal(dst.k[1:5].contiguous().view(torch.uint8), kept[1:5].contiguous().view(torch.uint8))
    quire.copy_pages(src, src, torch.tensor([[0, 2]]))
    assert torch.equal(src.v[2].contiguous().view(torch.uint8), src.v[0].contiguous().view(torch.uint8))


def test_bad_input_is_refused_before_anything_is_written():
    cache = make_cache()
    before = cache.k.clone()
    k, v, slots = torch.randn(2, 2, 16), torch.randn(2, 2, 24), torch.tensor([0, 1])
    for arguments, message in (
        ((k[..., :8], v, slots), "k must be"),
        ((k, v[:, :1], slots), "v must be"),
        ((k.half(), v.half(), slots), "k must be of the cache's dtype"),
        ((k, v, slots.int()), "slot_mapping must be"),
        ((k, v, torch.tensor([0, 1, 2])), "slot_mapping must be"),
    ):
        with pytest.raises(ValueError, match=message):
            quire.write_kv(arguments[0], arguments[1], cache, arguments[2])
    with pytest.raises(quire.UnsupportedError, match="paged"):
        quire.write_kv(k, v, quire.PagedKVCache(k, v, "THD"), slots)
    with pytest.raises(ValueError, match="dst must have src's layout"):
        quire.copy_pages(cache, make_cache(size=4), torch.tensor([[0, 0]]))
    with pytest.raises(ValueError, match="page_pairs must be"):
        quire.copy_pages(cache, cache, torch.tensor([0, 1]))
    assert torch.equal(cache.k, before)
