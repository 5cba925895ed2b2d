"""Copying pages: by the kernel with TRITON_INTERPRET=1, by PyTorch without."""

from unittest import mock

import pytest
import torch

import quire
from quire.kernels import copy
from quire.kernels.cpu import cache_ops

SIZE, HEADS, DIM, DIM_V = 5, 2, 16, 24
PAIRS = [[1, 5], [3, 0], [-1, 2], [2, -1], [1, 3]]


def random_memory(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).squeeze(-1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def make_cache(pages: int, dtype=torch.float16, layout="NHD", strides="plain", scales=False) -> quire.PagedKVCache:
    """Return a cache of random bits.

    Its strides are those of a contiguous cache, of a slice of longer rows, of one layer among others ("interleaved"),
    or of heads and slots in the other order ("transposed").
    """
    middle = {"NHD": (SIZE, HEADS), "HND": (HEADS, SIZE)}.get(layout)
    if layout == "HDNX":
        x = 16 // dtype.itemsize
        shapes = (HEADS, DIM // x, SIZE, x), (HEADS, DIM_V, SIZE)
    else:
        shapes = (*middle, DIM), (*middle, DIM_V)
    if strides == "plain":
        k, v = (random_memory(dtype, pages, *shape) for shape in shapes)
    elif strides == "longer rows":
        k, v = (random_memory(dtype, pages, *shape[:-1], shape[-1] + 3)[..., 2:-1] for shape in shapes)
    elif strides == "interleaved":
        k, v = (random_memory(dtype, pages, 3, *shape)[:, 1] for shape in shapes)
    else:
        k, v = (random_memory(dtype, pages, shape[1], shape[0], *shape[2:]).transpose(1, 2) for shape in shapes)
    token_scales = [random_memory(torch.float32, HEADS, pages, SIZE).permute(1, 2, 0) for _ in range(2 * scales)]
    if strides == "plain":
        token_scales = [s.contiguous() for s in token_scales]
    return quire.PagedKVCache(k, v, layout, *token_scales)


def check_copy(src: quire.PagedKVCache, dst: quire.PagedKVCache, page_pairs: torch.Tensor) -> None:
    """Copy, and compare every page of dst, and all memory around it, with pages assigned one by one."""
    names = ("k", "v", "k_scale", "v_scale") if src.scale_kind == "token" else ("k", "v")
    expected = {name: as_bytes(getattr(dst, name)).clone() for name in names}
    memory = {
        name: as_bytes(torch.tensor([], dtype=getattr(dst, name).dtype).set_(getattr(dst, name).untyped_storage()))
        for name in names
    }
    around = {name: tensor.clone() for name, tensor in memory.items()}
    sources = {name: as_bytes(getattr(src, name)).clone() for name in names}
    quire.copy_pages(src, dst, page_pairs)
    for name in names:
        for source, target in page_pairs.tolist():
            if source >= 0 and target >= 0:
                expected[name][target] = sources[name][source]
        tensor = getattr(dst, name)
        assert torch.equal(as_bytes(tensor), expected[name]), name
        written = torch.zeros(memory[name].shape, dtype=torch.bool).view(-1, tensor.dtype.itemsize)
        for target in [t for s, t in page_pairs.tolist() if s >= 0 and t >= 0]:
            page = torch.arange(written.shape[0]).as_strided(
                tensor[target].shape, tensor[target].stride(), tensor[target].storage_offset()
            )
            written[page.flatten()] = True
        assert torch.equal(memory[name][~written.flatten()], around[name][~written.flatten()]), name


@pytest.mark.parametrize("strides", ["plain", "longer rows", "interleaved", "transposed"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "HDNX"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8])
def test_pages_and_their_scales_are_copied_and_nothing_else(dtype, layout, strides):
    torch.manual_seed(0)
    src, dst = (
        make_cache(pages, dtype, layout, s, scales=dtype.itemsize == 1) for pages, s in ((4, "plain"), (6, strides))
    )
    check_copy(src, dst, torch.tensor(PAIRS, dtype=torch.int32))
    check_copy(dst, src, torch.tensor([[4, 0], [0, 3]]))


def test_a_negative_destination_is_not_a_page_before_the_first():
    """Here there is such a page."""
    k, v = (random_memory(torch.float16, 8, SIZE, HEADS, dim)[2:] for dim in (DIM, DIM_V))
    check_copy(make_cache(4), quire.PagedKVCache(k, v), torch.tensor([[1, 5], [2, -1]]))


def test_copy_on_write_within_a_cache():
    cache = make_cache(6, torch.int8, scales=True)
    check_copy(cache, cache, torch.tensor([[0, 2], [0, 3], [1, 5]]))


@pytest.mark.parametrize("size", [1, 7, 300])
@pytest.mark.parametrize("layout", ["NHD", "HDNX"])
def test_pages_of_any_size(size, layout):
    """One slot, whose dimension has no stride to speak of; and more elements than one program copies."""
    spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    caches = []
    for _ in range(2):
        cache = quire.PagedKVCache.empty(spec, 3, size, layout=layout)
        cache.k.normal_()
        cache.v.normal_()
        caches.append(cache)
    check_copy(*caches, torch.tensor([[0, 2], [2, 1]]))


def test_scales_that_belong_to_heads_stay():
    src, dst = (
        quire.PagedKVCache(c.k, c.v, "NHD", s, s)
        for c, s in ((make_cache(2, torch.int8), 2.0), (make_cache(2, torch.int8), 3.0))
    )
    check_copy(src, dst, torch.tensor([[0, 1]]))
    assert (dst.k_scale == 3.0).all()


def test_swapping_skips_what_a_copy_skips():
    """Between two devices each page is copied by itself; here both are the CPU."""
    src, dst = (
        make_cache(4, torch.float8_e5m2, scales=True),
        make_cache(6, torch.float8_e5m2, strides="interleaved", scales=True),
    )
    swap = cache_ops.swap_pages
    with mock.patch.object(copy, "copy_pages", swap), mock.patch.object(cache_ops, "copy_pages", swap):
        check_copy(src, dst, torch.tensor(PAIRS))


def test_an_ordinary_page_is_one_run_of_memory():
    cache = make_cache(4)
    part, shape = copy.make_page_tensor(cache.k, cache.k)
    assert shape == (1, 1, 1, SIZE * HEADS * DIM) and part.source_page == SIZE * HEADS * DIM
    rows = make_cache(4, strides="longer rows")
    assert copy.make_page_tensor(rows.k, rows.k)[1] == (1, 1, SIZE * HEADS, DIM)
    assert copy.make_page_tensor(cache.k, make_cache(4, strides="transposed").k)[1] == (1, SIZE, HEADS, DIM)


def test_bad_input_is_refused_before_anything_is_written():
    cache, pairs = make_cache(4), torch.tensor([[0, 1]])
    before = as_bytes(cache.k).clone()
    other_size = quire.PagedKVCache(cache.k[:, :4], cache.v[:, :4])
    other_width = quire.PagedKVCache(cache.k, cache.v[..., :8])
    int8, scaled = make_cache(4, torch.int8), make_cache(4, torch.int8, scales=True)
    wrong_pairs = [
        (src, cache) for src in (other_size, other_width, make_cache(4, torch.float32), make_cache(4, layout="HND"))
    ] + [(int8, scaled)]
    for src, dst in wrong_pairs:
        with pytest.raises(ValueError, match="dst must have src's layout"):
            quire.copy_pages(src, dst, pairs)
    for wrong in (torch.tensor([0, 1]), torch.tensor([[0, 1, 2]]), pairs.float(), torch.tensor([[0, 1], [2, 3]]).T):
        with pytest.raises(ValueError, match="page_pairs must be"):
            quire.copy_pages(cache, cache, wrong)
    flat = quire.PagedKVCache(torch.randn(5, 1, 16), torch.randn(5, 1, 16), "THD")
    with pytest.raises(quire.UnsupportedError, match="src must be paged"):
        quire.copy_pages(flat, flat, pairs)
    quire.copy_pages(cache, cache, torch.empty(0, 2, dtype=torch.int32))
    assert torch.equal(as_bytes(cache.k), before)
