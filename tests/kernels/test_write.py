"""Writing keys and values by slot, and quantising them: by the kernel with TRITON_INTERPRET=1, by PyTorch without."""

import pytest
import torch

import quire
from quire.kernels import formats

LAYOUTS = ["NHD", "HND", "HDNX"]
QUANTISED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
PAGES, SIZE, HEADS, DIM, DIM_V = 4, 5, 2, 16, 24


def random_memory(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return memory of any content, NaN included."""
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def make_memory(dtype: torch.dtype, layout: str, strides: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return all the memory, and k and v in it: in two tensors, in halves of a row, or among the pages of layers."""
    if layout == "HDNX":
        x = 16 // dtype.itemsize
        k_shape, v_shape = (PAGES, HEADS, DIM // x, SIZE, x), (PAGES, HEADS, DIM_V, SIZE)
    else:
        middle = (SIZE, HEADS) if layout == "NHD" else (HEADS, SIZE)
        k_shape, v_shape = (PAGES, *middle, DIM), (PAGES, *middle, DIM_V)
    if strides == "plain":
        memory = [random_memory(dtype, *k_shape), random_memory(dtype, *v_shape)]
        return memory, *memory
    if strides == "one row" and layout != "HDNX":
        memory = random_memory(dtype, *k_shape[:3], DIM + DIM_V)
        return [memory], memory[..., :DIM], memory[..., DIM:]
    if strides == "one row":  # runs lie apart, and values have strides of their own
        memory = [random_memory(dtype, *k_shape[:4], 2 * k_shape[4]), random_memory(dtype, *v_shape[:3], SIZE + 3)]
        return memory, memory[0][..., k_shape[4] :], memory[1][..., 1 : SIZE + 1]
    memory = [random_memory(dtype, PAGES, 3, *k_shape[1:]), random_memory(dtype, 2, PAGES, *v_shape[1:])]
    return memory, memory[0][:, 1], memory[1][1]


def put(tensor: torch.Tensor, layout: str, slot: int, x: torch.Tensor) -> None:
    """Store one token's x, [num_kv_heads, head_dim], the plain way."""
    page, slot = divmod(slot, SIZE)
    if layout == "HDNX":
        tensor[page, :, :, slot] = x.reshape(tensor[page, :, :, slot].shape)
    elif layout == "HND":
        tensor[page, :, slot] = x
    else:
        tensor[page, slot] = x


def quantise(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round half to even and saturate; PyTorch converts larger numbers to NaN or infinity, or to anything in int8."""
    x = x.clamp(-formats.LARGEST[dtype], formats.LARGEST[dtype])
    return (x.round().nan_to_num(0.0) if dtype is torch.int8 else x).to(dtype)


def check_write(memory, k_cache, v_cache, layout, x, slots, scales=None) -> None:
    """Write, and compare all of the memory with the same tokens put one by one."""
    token_scales = scales is not None and scales[0].dim() == 3
    cache = quire.PagedKVCache(k_cache, v_cache, layout, *(scales or (None, None)))
    watched = memory + [s for s in scales or () if isinstance(s, torch.Tensor)]
    kept = [t.clone() for t in watched]
    quire.write_kv(*x, cache, slots)
    written = [t.clone() for t in watched]
    for tensor, old in zip(watched, kept, strict=True):
        tensor.copy_(old)
    for i, (tensor, new) in enumerate(zip((k_cache, v_cache), x, strict=True)):
        stored = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            value = new[token]
            if tensor.dtype in QUANTISED:
                value = value.float()
                if token_scales:
                    peak = value.abs().amax(-1)
                    scales[i][slot // SIZE, slot % SIZE] = torch.where(
                        peak > 0, peak / formats.LARGEST[tensor.dtype], 1.0
                    )
                    value = value / scales[i][slot // SIZE, slot % SIZE][:, None]
                elif scales is not None:
                    value = value / scales[i].view(-1, 1)
                value = quantise(value, tensor.dtype).view(torch.uint8)
            put(stored, layout, slot, value)
    assert all(same_bits(got, expected) for got, expected in zip(written, watched, strict=True))


def fused_projection(dtype: torch.dtype, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v as slices of one tensor [num_tokens, heads, q and k and v]."""
    qkv = torch.randn(num_tokens, HEADS, 8 + DIM + DIM_V).to(dtype)
    return qkv[..., 8 : 8 + DIM], qkv[..., 8 + DIM :]


SLOTS = torch.tensor([7, -1, 19, 0, -5, 6])  # of 8 tokens: two are left out, and two more are padding


@pytest.mark.parametrize("strides", ["plain", "one row", "interleaved"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_slots_are_written_and_all_else_is_kept(dtype, layout, strides):
    torch.manual_seed(0)
    check_write(*make_memory(dtype, layout, strides), layout, fused_projection(dtype, 8), SLOTS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["none", "tensor", "head", "token", "token, other strides"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_quantised_values_are_the_nearest(kv_dtype, dtype, kind, layout):
    torch.manual_seed(0)
    k, v = fused_projection(dtype, 8)
    k *= 30
    k[0, 0, 0] = 6e4  # saturates
    v[2] = 0.0
    scales = {
        "none": None,
        "tensor": (torch.tensor([0.07]), torch.tensor([0.011])),
        "head": (torch.tensor([0.03, 0.5]), torch.tensor([0.2, 0.01])),
        "token": (random_memory(torch.float32, PAGES, SIZE, HEADS), random_memory(torch.float32, PAGES, SIZE, HEADS)),
        "token, other strides": tuple(
            random_memory(torch.float32, HEADS, PAGES, SIZE).permute(1, 2, 0) for _ in range(2)
        ),
    }[kind]
    strides = ("plain", "one row", "interleaved")[QUANTISED.index(kv_dtype)]
    check_write(*make_memory(kv_dtype, layout, strides), layout, (k, v), SLOTS, scales)


@pytest.mark.parametrize("size", [1, 3, 8, 528])
def test_pages_of_any_size(size):
    k = torch.randn(5, 1, 16)
    cache = quire.PagedKVCache(torch.zeros(3, size, 1, 16), torch.zeros(3, size, 1, 16))
    slots = torch.tensor([size, -1, 3 * size - 1, 0, -1])
    quire.write_kv(k, -k, cache, slots)
    expected = torch.zeros(3 * size, 1, 16)
    expected[slots[[0, 2, 3]]] = k[[0, 2, 3]]
    assert torch.equal(cache.k.flatten(0, 1), expected) and torch.equal(cache.v.flatten(0, 1), -expected)


@pytest.mark.parametrize("slots", [[], [-1, -1, -7]])
def test_nothing_to_write(slots):
    memory, k_cache, v_cache = make_memory(torch.float32, "NHD", "plain")
    check_write(
        memory, k_cache, v_cache, "NHD", fused_projection(torch.float32, 3), torch.tensor(slots, dtype=torch.int64)
    )


def write_all(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantise any number of values by writing them as 4 heads of 256; return what was stored."""
    heads = torch.nn.functional.pad(x, (0, -len(x) % 1024)).view(-1, 4, 256)
    cache = quire.PagedKVCache(
        *(torch.zeros(1, heads.shape[0], 4, 256, dtype=torch.uint8).view(dtype) for _ in range(2))
    )
    quire.write_kv(heads, heads, cache, torch.arange(heads.shape[0]))
    return cache.k.flatten()[: len(x)]


def check_rounding(x: torch.Tensor, dtype: torch.dtype) -> None:
    got, expected = write_all(x, dtype), quantise(x.float(), dtype)
    nan = x.isnan() if dtype.is_floating_point else torch.zeros_like(x, dtype=torch.bool)
    assert got.float()[nan].isnan().all()
    assert torch.equal(got.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])


@pytest.mark.parametrize("dtype", QUANTISED)
def test_every_float16_is_rounded_to_the_nearest(dtype):
    check_rounding(torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16), dtype)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_ties_subnormals_and_any_bits_of_float32(dtype):
    """Every value that can be stored, every midpoint, their neighbours in float32, NaN, infinities, and random bits."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()].unique()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    up, down = (points.nextafter(torch.tensor(end)) for end in (float("inf"), -float("inf")))
    torch.manual_seed(0)
    edges = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-45, -1e-45, 0.0, -0.0])
    check_rounding(torch.cat([points, up, down, edges, random_memory(torch.float32, 20000)]), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_token_s_scale_minds_neither_what_is_not_finite_nor_what_is_next_to_nothing(dtype):
    scales = torch.zeros(1, 3, 1), torch.zeros(1, 3, 1)
    cache = quire.PagedKVCache(*(torch.zeros(1, 3, 1, 16).to(dtype) for _ in range(2)), "NHD", *scales)
    x = torch.zeros(3, 1, 16)
    x[0, 0, :3] = torch.tensor([float("nan"), 2.0, -1.0])
    x[1, 0, :3] = torch.tensor([-float("inf"), 0.5, 0.0])
    x[2, 0, :2] = torch.tensor([1e-44, -1e-38])
    quire.write_kv(x, x, cache, torch.arange(3))
    largest = formats.LARGEST[dtype]
    assert torch.equal(scales[0][0, :, 0], torch.tensor([2.0 / largest, 0.5 / largest, 1.0])) and torch.equal(*scales)
    stored = cache.k[0, :, 0].float()
    assert stored[0, 0].isnan() if dtype.is_floating_point else stored[0, 0] == 0
    assert stored[0, 1] == largest and stored[1, :3].tolist() == [-largest, largest, 0.0]
    assert (stored[2] == 0).all()


def test_a_cache_stays_out_of_gradients():
    cache = quire.PagedKVCache(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16))
    x = torch.randn(1, 1, 16, requires_grad=True)
    quire.write_kv(x, x, cache, torch.tensor([1]))
    assert not cache.k.requires_grad and torch.equal(cache.k[0, 1], x[0].detach())


def test_bad_input_is_refused_before_anything_is_written():
    memory, k_cache, v_cache = make_memory(torch.float32, "NHD", "plain")
    cache, before = quire.PagedKVCache(k_cache, v_cache), [t.clone() for t in memory]
    k, v, slots = torch.randn(2, 2, 16), torch.randn(2, 2, 24), torch.tensor([0, 1])
    for arguments, message in (
        ((k[..., :8], v, slots), "k must be"),
        ((k[0], v, slots), "k must be"),
        ((torch.randn(2, 2, 32)[..., ::2], v, slots), "k must be .* contiguous head"),
        ((k, v[:, :1], slots), "v must be"),
        ((k, torch.cat([v, v]), slots), "k and v must have one number of tokens, got 2 and 4"),
        ((k.half(), v.half(), slots), "k must be of the cache's dtype"),
        ((k, v.half(), slots), "v must be of the cache's dtype"),
        ((k, v, slots.int()), "slot_mapping must be"),
        ((k, v, slots[:, None]), "slot_mapping must be"),
        ((k, v, torch.tensor([0, 1, 2])), "slot_mapping must be"),
        ((k, v, torch.tensor([0, 9, 1, 9])[::2]), "slot_mapping must be contiguous"),
        ((k, v, slots.to("meta")), "must be on one device"),
    ):
        with pytest.raises(ValueError, match=message):
            quire.write_kv(arguments[0], arguments[1], cache, arguments[2])
    with pytest.raises(ValueError, match="k must be of the cache's dtype"):
        quire.write_kv(
            k.double(), v.double(), quire.PagedKVCache(k_cache.to(torch.int8), v_cache.to(torch.int8)), slots
        )
    with pytest.raises(quire.UnsupportedError, match="paged"):
        quire.write_kv(k, v, quire.PagedKVCache(k, v, "THD"), slots)
    assert all(same_bits(a, b) for a, b in zip(memory, before, strict=True))
