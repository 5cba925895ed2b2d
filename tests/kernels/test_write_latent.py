"""Writing latents by slot, quantised or as records: by the kernels with TRITON_INTERPRET=1, by PyTorch without."""

import pytest
import torch

import quire

E4M3 = torch.float8_e4m3fn
PAGES, SIZE, RANK, ROPE = 4, 5, 32, 16
SLOTS = torch.tensor([7, -1, 19, 0, -5, 6])  # of 8 tokens: two are left out, and two more are padding
WRITTEN = [(token, slot) for token, slot in enumerate(SLOTS.tolist()) if slot >= 0]


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def new_tokens(dtype: torch.dtype, rank: int, rope: int, dims: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return c_kv and k_pe of 8 tokens as slices of one projection, of which they are neither the first column."""
    both = 3 * torch.randn(8, 8 + rank + rope).to(dtype)
    c_kv, k_pe = both[:, 8 : 8 + rank], both[:, 8 + rank :]
    return c_kv, k_pe[:, None] if dims == 3 else k_pe


def memory_of(dtype: torch.dtype, width: int, strides: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory of any bytes, and latents [PAGES, SIZE, width] in it: all of it, or among those of three layers."""
    middle = {"plain": (SIZE,), "interleaved": (3, SIZE)}[strides]
    memory = random_bytes(PAGES, *middle, width * dtype.itemsize)
    return memory, (memory if strides == "plain" else memory[:, 1]).view(dtype)


def quantised(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    return (x.float() / scale).clamp(-448, 448).to(E4M3)


@pytest.mark.parametrize("strides", ["plain", "interleaved"])
@pytest.mark.parametrize("rope", [ROPE, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_slots_are_written_and_all_else_is_kept(dtype, rope, strides):
    torch.manual_seed(0)
    memory, latents = memory_of(dtype, RANK + rope, strides)
    c_kv, k_pe = new_tokens(dtype, RANK, rope)
    kept, expected = memory.clone(), memory.clone()
    cache = quire.PagedKVCache.from_latents(latents, RANK)
    quire.write_latent(c_kv, k_pe if rope else None, cache, SLOTS)
    stored = (expected if strides == "plain" else expected[:, 1]).view(dtype)
    for token, slot in WRITTEN:
        stored[slot // SIZE, slot % SIZE] = torch.cat([c_kv[token], k_pe[token]])
    assert torch.equal(memory, expected) and not torch.equal(memory, kept)


@pytest.mark.parametrize("scale", [None, 0.07, "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fp8_latents_are_the_nearest(dtype, scale):
    torch.manual_seed(0)
    memory, latents = memory_of(E4M3, RANK + ROPE, "interleaved")
    c_kv, k_pe = new_tokens(dtype, RANK, ROPE, dims=3)
    c_kv[0, 0], c_kv[2, 3], k_pe[3, 0, 1] = 6e4, float("nan"), -float("inf")  # saturate, but for NaN
    factor = torch.tensor(0.011) if scale == "tensor" else scale
    expected = memory.clone()
    quire.write_latent(c_kv, k_pe, quire.PagedKVCache.from_latents(latents, RANK, scale=factor), SLOTS)
    for token, slot in WRITTEN:
        x = quantised(torch.cat([c_kv[token], k_pe[token, 0]]), 1.0 if factor is None else factor)
        expected[slot // SIZE, 1, slot % SIZE] = x.view(torch.uint8)
    assert latents[0, 0].float().isnan().sum() == 0 and latents[3, 4, 3].float().isnan()
    nan = latents.float().isnan()
    assert torch.equal(memory[:, 1][~nan], expected[:, 1][~nan])
    assert torch.equal(memory[:, ::2], expected[:, ::2])


def grouped(c_kv: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return groups of a latent's columns, and the largest finite magnitude of each."""
    groups = c_kv.float().view(-1, size)
    return groups, groups.abs().nan_to_num(0.0, 0.0, 0.0).amax(1).double()


def record(c_kv: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
    """Return a token's record, [656] uint8, as vLLM 0.33 defines it: scales are rounded up to powers of two."""
    groups, peaks = grouped(c_kv, 128)
    scales = torch.exp2((peaks / 448).clamp(min=1e-4).log2().ceil()).float()
    parts = quantised(groups, scales[:, None]), scales, k_pe.to(torch.bfloat16)
    return torch.cat([part.flatten().view(torch.uint8) for part in parts])


def powers(c_kv: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a latent's columns in e4m3, and the exponents of the powers of two of groups, as in vLLM 0.33."""
    groups, peaks = grouped(c_kv, size)
    exponents = (peaks.clamp(min=1e-4) / 448).log2().ceil()
    return quantised(groups, torch.exp2(exponents).float()[:, None]).flatten(), (exponents + 127).to(torch.uint8)


@pytest.mark.parametrize("strides", ["plain", "interleaved"])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_records_are_those_of_vllm(dtype, dims, strides):
    torch.manual_seed(0)
    memory, records = memory_of(torch.uint8, 656, strides)
    c_kv, k_pe = new_tokens(dtype, 512, 64, dims)
    c_kv[2, :128] = 0  # the least scale
    c_kv[3, 5], c_kv[3, 6] = float("inf"), -float("inf")  # saturate, and do not count
    expected = memory.clone()
    quire.write_latent(c_kv, k_pe, quire.PagedKVCache.from_latents(records, 512), SLOTS)
    stored = expected if strides == "plain" else expected[:, 1]
    for token, slot in WRITTEN:
        stored[slot // SIZE, slot % SIZE] = record(c_kv[token], k_pe[token].flatten())
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_records_of_deepseek_v4_have_the_scales_of_a_page_after_its_columns(dtype):
    torch.manual_seed(0)
    memory = random_bytes(PAGES, -(-SIZE * 584 // 576) * 576)
    c_kv, _ = new_tokens(dtype, 512, 0)
    c_kv[2, :64] = 0  # the least scale
    c_kv[3, 5], c_kv[3, 6] = float("inf"), -float("inf")
    expected = memory.clone()
    records = memory[:, : SIZE * 584].unflatten(1, (SIZE, 584))
    quire.write_latent(c_kv, None, quire.PagedKVCache.from_latents(records, 512), SLOTS)
    for token, slot in WRITTEN:
        page, row = expected[slot // SIZE], slot % SIZE
        numbers, scales = powers(c_kv[token, :448].contiguous(), 64)
        page[576 * row : 576 * row + 448] = numbers.view(torch.uint8)
        page[576 * row + 448 : 576 * row + 576] = c_kv[token, 448:].to(torch.bfloat16).view(torch.uint8)
        page[576 * SIZE + 8 * row :][:7] = scales
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_records_of_deepseek_v4_1_have_scales_of_32_columns(dtype):
    torch.manual_seed(0)
    memory, records = memory_of(torch.uint8, 528, "interleaved")
    c_kv, _ = new_tokens(dtype, 512, 0)
    c_kv[2, :32] = 0
    expected = memory.clone()
    quire.write_latent(c_kv, None, quire.PagedKVCache.from_latents(records, 512), SLOTS)
    for token, slot in WRITTEN:
        numbers, scales = powers(c_kv[token].contiguous(), 32)
        expected[slot // SIZE, 1, slot % SIZE] = torch.cat([numbers.view(torch.uint8), scales])
    assert torch.equal(memory, expected)


def test_scales_of_records_are_powers_of_two_of_which_448_hold_the_peak():
    """At each power, with the peak on it and to both sides: of the power, and of 448 times it."""
    powers = torch.exp2(torch.arange(-126, 128).double())
    exact = torch.cat([powers, 448 * powers[powers < 2.0**119]]).float()
    peaks = torch.stack([exact, exact.nextafter(torch.tensor(0.0)), exact.nextafter(torch.tensor(torch.inf))]).flatten()
    peaks = peaks[: len(peaks) // 4 * 4].view(-1, 4)
    c_kv = torch.zeros(len(peaks), 4, 128)
    c_kv[:, :, 7] = -peaks
    cache = quire.PagedKVCache.from_latents(torch.zeros(1, len(peaks), 656, dtype=torch.uint8), 512)
    quire.write_latent(c_kv.flatten(1), torch.zeros(len(peaks), 64), cache, torch.arange(len(peaks)))
    scales = cache.records.scales[0].double()
    mantissas, _ = torch.frexp(scales)
    assert (mantissas == 0.5).all() and (scales >= 2.0**-13).all()
    assert (448 * scales >= peaks).all() and ((224 * scales < peaks) | (scales == 2.0**-13)).all()


@pytest.mark.slow
def test_rotary_columns_of_records_are_rounded_half_to_even():
    """Every bfloat16 with a fraction of 0, 1/4, 1/2 and 3/4 of its last bit, subnormals and infinities included."""
    high = torch.arange(-(2**15), 2**15, 7, dtype=torch.int32)[: 9344 // 64 * 64]
    for fraction in (0x0000, 0x4000, 0x8000, 0xC000):
        k_pe = ((high << 16) | fraction).view(torch.float32).view(-1, 64)
        cache = quire.PagedKVCache.from_latents(torch.zeros(1, len(k_pe), 656, dtype=torch.uint8), 512)
        quire.write_latent(torch.zeros(len(k_pe), 512), k_pe, cache, torch.arange(len(k_pe)))
        stored, expected = cache.records.rope[0], k_pe.to(torch.bfloat16)
        nan = k_pe.isnan()
        assert stored[nan].isnan().all() and torch.equal(
            stored[~nan].view(torch.int16), expected[~nan].view(torch.int16)
        )


def test_bfloat16_is_copied_into_records_as_it_is():
    k_pe = random_bytes(3, 128).view(torch.bfloat16)  # any bits, NaN included
    cache = quire.PagedKVCache.from_latents(torch.zeros(1, 3, 656, dtype=torch.uint8), 512)
    quire.write_latent(torch.zeros(3, 512), k_pe, cache, torch.tensor([2, 0, 1]))
    assert same_bits(cache.records.rope[0, [2, 0, 1]], k_pe)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_pages_of_any_size(size):
    c_kv, k_pe = torch.randn(5, RANK), torch.randn(5, ROPE)
    cache = quire.PagedKVCache.from_latents(torch.zeros(3, size, RANK + ROPE), RANK)
    slots = torch.tensor([size, -1, 3 * size - 1, 0, -1])
    quire.write_latent(c_kv, k_pe, cache, slots)
    expected = torch.zeros(3 * size, RANK + ROPE)
    expected[slots[[0, 2, 3]]] = torch.cat([c_kv, k_pe], 1)[[0, 2, 3]]
    assert torch.equal(cache.latents.flatten(0, 1), expected)
    assert torch.equal(cache.k[:, :, 0], cache.latents) and torch.equal(cache.v[:, :, 0], cache.latents[..., :RANK])


@pytest.mark.parametrize("slots", [[], [-1, -1, -7]])
def test_nothing_to_write(slots):
    memory, latents = memory_of(torch.float32, RANK + ROPE, "plain")
    kept = memory.clone()
    cache = quire.PagedKVCache.from_latents(latents, RANK)
    quire.write_latent(*new_tokens(torch.float32, RANK, ROPE), cache, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(memory, kept)


def test_a_cache_stays_out_of_gradients():
    cache = quire.PagedKVCache.from_latents(torch.zeros(1, 2, RANK), RANK)
    c_kv = torch.randn(1, RANK, requires_grad=True)
    quire.write_latent(c_kv, None, cache, torch.tensor([1]))
    assert not cache.latents.requires_grad and torch.equal(cache.latents[0, 1], c_kv[0].detach())


def test_bad_input_is_refused_before_anything_is_written():
    memory, latents = memory_of(torch.float32, RANK + ROPE, "plain")
    kept = memory.clone()
    cache = quire.PagedKVCache.from_latents(latents, RANK)
    c_kv, k_pe, slots = torch.randn(2, RANK), torch.randn(2, ROPE), torch.tensor([0, 1])
    for c, r, s, message in (
        (c_kv[:, :16], k_pe, slots, r"c_kv must be \[2, 32\]"),
        (c_kv[:, None], k_pe, slots, "c_kv must be"),
        (torch.randn(2, 2 * RANK)[:, ::2], k_pe, slots, "c_kv must be .* contiguous"),
        (c_kv, k_pe[:, :8], slots, r"k_pe must be \[2, 16\] or \[2, 1, 16\]"),
        (c_kv, k_pe[:1], slots, "c_kv and k_pe must have one number of tokens, got 2 and 1"),
        (c_kv[:1], k_pe, slots, "c_kv and k_pe must have one number of tokens, got 1 and 2"),
        (c_kv, k_pe[:, None, None], slots, "k_pe must be"),
        (c_kv.half(), k_pe, slots, "c_kv must be of the cache's dtype"),
        (c_kv, k_pe.half(), slots, "k_pe must be of the cache's dtype"),
        (c_kv, k_pe, slots.int(), "slot_mapping must be"),
        (c_kv, k_pe, torch.tensor([0, 1, 2]), "slot_mapping must be .* at most c_kv's 2 entries"),
        (c_kv, k_pe.to("meta"), slots, "must be on one device, got cpu, meta, cpu, cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            quire.write_latent(c, r, cache, s)
    with pytest.raises(TypeError, match=r"k_pe must be a tensor .*, got None; latents of this cache have 16 rotary"):
        quire.write_latent(c_kv, None, cache, slots)
    keys = quire.PagedKVCache(torch.zeros(1, 2, 1, 48), torch.zeros(1, 2, 1, 32))
    with pytest.raises(ValueError, match="cache must hold latents, got keys and values; call `write_kv`"):
        quire.write_latent(c_kv, k_pe, keys, slots)
    with pytest.raises(ValueError, match="cache must hold keys and values, got latents; call `write_latent`"):
        quire.write_kv(torch.randn(2, 1, 48), torch.randn(2, 1, 32), cache, slots)
    expanded = quire.PagedKVCache.from_latents(torch.zeros(1, 5, 48).expand(4, 5, 48), RANK)
    with pytest.raises(ValueError, match="cache must have memory for every slot to be written"):
        quire.write_latent(c_kv, k_pe, expanded, slots)
    assert torch.equal(memory, kept)


@pytest.mark.parametrize(("layout", "rope"), [("NHD", 64), ("fp8_ds_mla", 64), ("fp8_ds_mla_584", 0)])
def test_pages_of_latents_are_copied(layout, rope):
    """Once: keys and values are the same bytes."""
    spec = quire.AttentionSpec.mla(num_q_heads=2, softmax_scale=0.1, kv_dtype=E4M3, qk_rope_head_dim=rope)
    src, dst = (quire.PagedKVCache.empty(spec, 4, 3, layout=layout) for _ in range(2))
    for cache in (src, dst):
        cache.latents.view(torch.uint8).copy_(random_bytes(*cache.latents.shape))
    expected = dst.latents.view(torch.uint8).clone()
    expected[[3, 1]] = src.latents.view(torch.uint8)[[0, 2]]
    quire.copy_pages(src, dst, torch.tensor([[0, 3], [-1, 0], [2, 1]]))
    assert torch.equal(dst.latents.view(torch.uint8), expected)


def test_latents_are_not_copied_into_keys():
    latents = torch.zeros(2, 3, 48)
    keys = quire.PagedKVCache(latents[:, :, None], latents[:, :, None, :32])
    with pytest.raises(ValueError, match=r"dst must have src's .*, got latents False for True"):
        quire.copy_pages(quire.PagedKVCache.from_latents(latents, 32), keys, torch.tensor([[0, 1]]))
