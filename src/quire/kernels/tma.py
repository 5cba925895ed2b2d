"""Tensors as matrices that TMA addresses.

A cache is one matrix if its heads are contiguous and the slot stride divides the page stride and, in HND, the head
stride. Its rows are a slot's stride apart. Element (page, slot, head, dim) has row and column

    divmod(page * page_stride + slot * slot_stride + head * head_stride, slot_stride)

with dim added to the column. This holds for NHD, for HND, for keys and values in one tensor, and for sequences that are
not paged.
"""

from functools import lru_cache

import torch

from quire.cache import PagedKVCache
from quire.dispatch.config import MIN_TMA_BOX
from quire.kernels.views import Matrix

MAX_COORDINATE = 1 << 31  # TMA coordinates are int32
# Rows of a page in one TMA load, below which 16-bit rows are faster one by one: with pages of 8, 4,096 tokens took 224
# us so and 363 in boxes (32/8 heads of 128, NVIDIA H200, 2026-11-28).
MIN_FAST_BOX_ROWS = 16


def matrix_of(
    tensor: torch.Tensor, extents: tuple[int, int, int, int], strides: tuple[int, int, int], ends_at_head: bool = True
) -> Matrix | None:
    """Return a tensor as a matrix; None if TMA cannot address it.

    Args:
        tensor: queries, keys or values.
        extents: pages, slots of a page, heads, elements of a head.
        strides: of pages, slots and heads, in elements.
        ends_at_head: a box has zeros behind the end of a head, else what follows in memory.
    """
    return None if tensor.data_ptr() % 16 else _matrix_of(tensor.itemsize, extents, strides, ends_at_head)


@lru_cache(maxsize=4096)
def _matrix_of(
    itemsize: int, extents: tuple[int, int, int, int], strides: tuple[int, int, int], ends_at_head: bool
) -> Matrix | None:
    (num_pages, page_size, num_heads, dim), (page, slot, head) = extents, strides
    if num_heads == 1:
        head = 0
    if slot == 0 or slot * itemsize % 16 or num_pages * page_size * num_heads == 0:
        return None
    if has_heads(dim) and head * itemsize % 16:
        return None
    if page % slot or (head > slot and head % slot) or (head < slot and (num_heads - 1) * head + dim > slot):
        return None
    last = (num_pages - 1) * page + (page_size - 1) * slot + (num_heads - 1) * head
    num_columns = dim if head >= slot else (num_heads - 1) * head + dim
    if last // slot + 1 >= MAX_COORDINATE or num_columns >= MAX_COORDINATE:
        return None
    num_rows = last // slot + 1
    if not (ends_at_head and has_heads(dim)):
        return Matrix((num_rows, num_columns), (slot, 1))
    heads, head = (num_heads, head) if 0 < head < slot else (1, slot)
    return Matrix((num_rows, heads, dim), (slot, head, 1))


def has_heads(head_dim: int) -> bool:
    """Whether heads are a dimension of a descriptor, since their last panel is not full."""
    return head_dim % 64 != 0


def has_pieces(head_dim_v: int, itemsize: int) -> bool:
    """Whether products with values are those of `products.py`, which read no column behind the end of a head."""
    return itemsize == 2 and head_dim_v & (head_dim_v - 1) != 0


def matrix_of_queries(q: torch.Tensor) -> Matrix | None:
    """Return queries as a matrix of the dimensions head, token and column; None if TMA cannot address them.

    Args:
        q: [num_tokens, num_q_heads, head_dim].
    """
    num_tokens, num_q_heads, head_dim = q.shape
    token, head, _ = q.stride()
    if num_q_heads == 1:
        head = token
    if num_tokens == 0 or 0 in (token, head) or (q.data_ptr() | token * q.itemsize | head * q.itemsize) % 16:
        return None
    return Matrix((num_q_heads, num_tokens, head_dim), (head, token, 1))


def matrices_of_cache(cache: PagedKVCache) -> tuple[Matrix, Matrix] | None:
    """Return a cache's keys and values as matrices.

    Returns:
        None if the Hopper kernel does not serve the cache: scales per token, or strides that make no matrix.
    """
    if cache.scale_kind == "token":
        return None
    (ks, vs), (k_extents, v_extents) = cache.strides, cache.extents
    if ks.vec_size != k_extents[3] or vs.vec_size != v_extents[3]:
        return None
    k = matrix_of(cache.k, k_extents, ks[:3])
    # Where TMA fills zeros slowly (`producer.zeros_before`), boxes of values have none, if products do not read them.
    ends_at_head = v_extents[3] % 16 == 0 or not has_pieces(v_extents[3], cache.dtype.itemsize)
    v = matrix_of(cache.v, v_extents, vs[:3], ends_at_head)
    if k is None or v is None:
        return None
    return (k, v) if page_box(cache) >= MIN_TMA_BOX or has_pieces_of_16_bytes(cache) else None


def no_matrix(cache: PagedKVCache) -> str:
    """Return, in words, why a cache's pages are no matrices that TMA addresses, for a line that is logged."""
    if cache.scale_kind == "token":
        return "scales per token and head"
    tensors = {"latents": cache.k} if cache.is_latent else {"k": cache.k, "v": cache.v}
    for (name, tensor), extents, strides in zip(tensors.items(), cache.extents, cache.strides, strict=False):
        if tensor.data_ptr() % 16:
            return f"{name} at an address that 16 does not divide"
        if strides.vec_size != extents[3] or matrix_of(tensor, extents, strides[:3]) is None:
            return f"{name} with shape {tuple(tensor.shape)} and strides {tensor.stride()}, layout {cache.layout}"
    return f"pages of {cache.page_size}"


def has_boxes(cache: PagedKVCache) -> bool:
    """Whether TMA loads several rows of a page at once; rows are gathered one by one if not."""
    box = page_box(cache)
    if MIN_TMA_BOX <= box < MIN_FAST_BOX_ROWS:
        return cache.dtype.itemsize == 1 or not has_pieces_of_16_bytes(cache)
    return box >= MIN_FAST_BOX_ROWS


def has_pieces_of_16_bytes(cache: PagedKVCache) -> bool:
    """Whether rows can be copied in pieces of 16 bytes, which are counted in int32."""
    size, pages = cache.dtype.itemsize, cache.extents[0][0]
    for strides in cache.strides:
        if any(stride * size % 16 for stride in strides[:3]) or pages * strides.page * size // 16 >= MAX_COORDINATE:
            return False
    return True


def page_box(cache: PagedKVCache) -> int:
    """Return the most rows of a TMA box: the largest power of two that divides the page size."""
    return cache.page_size & -cache.page_size
