"""What crosses a launch together: flat NamedTuples of tensors and strides.

They stay flat, since a tuple inside a tuple fails to compile in loops when one of its ints is specialised to 1 (Triton 3.6.0).
"""

from typing import Any, NamedTuple

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache, Strides


class PagedKV(NamedTuple):
    """A cache and the table through which sequences reach it."""

    k: Any  # element (page, slot, head, dim) at page * k_page + slot * k_slot + head * k_head + dim // k_vec_size * k_vec + dim % k_vec_size
    v: Any
    k_scale: Any  # element (page, slot, head) likewise, or None
    v_scale: Any
    page_table: Any  # row of sequence s at s * stride_table, or at cu_pages[s]
    cu_pages: Any
    seq_lens: Any  # [num_seqs] int32
    query_offsets: Any  # [num_seqs] int32, or None for bottom-right alignment
    k_page: int
    k_slot: int
    k_head: int
    k_vec: int
    v_page: int | None  # None, with the next two, where v lies as k does: its offsets need not be computed again
    v_slot: int | None
    v_head: int | None
    v_vec: int
    scale_page: int
    scale_slot: int
    scale_head: int


class Scratch(NamedTuple):
    """Partial states of blocks that are cut, and the counters by which the last program of each knows that it is the last.

    A share has two slots: the first for the block in whose midst it begins, the second for the one that it leaves unfinished. Where chunks are states of
    their own, each chunk has one. Of the Hopper kernel's blocks the states lie as [tokens, num_q_heads, num_parts], acc normalised and m_i the lse.
    """

    acc: Any  # [num_slots, num_kv_heads, rows, head_dim_v] float32, not normalised
    m_i: Any  # [num_slots, num_kv_heads, rows] float32, running maximum in base-2 exponents
    l_i: Any  # same shape, sum of exponentials relative to m_i
    counter: Any  # [2 * num_shares, num_kv_heads] int32, 0 between launches; arrivals count at the slot of a partial state that is waited for


def paged_kv(cache: PagedKVCache, batch: Batch, element: torch.dtype) -> PagedKV:
    """Assemble the view; its elements are those of `element`: the cache's own dtype, its bytes, or pairs of them."""
    ks, vs = cache.strides
    k, v = (cache.k, cache.v) if element is cache.dtype else (cache.k.view(element), cache.v.view(element))
    if element.itemsize > cache.dtype.itemsize:
        ks, vs = (Strides(*(stride // 2 for stride in s)) for s in (ks, vs))
    v_strides = (None, None, None) if vs[:3] == ks[:3] else vs[:3]
    return PagedKV(
        k, v, cache.k_scale, cache.v_scale, batch.page_table, batch.cu_pages, batch.seq_lens, batch.query_offsets,
        ks.page, ks.slot, ks.head, ks.run, *v_strides, vs.run, *cache.scale_strides,
    )  # fmt: skip


def can_pack_fp8(cache: PagedKVCache) -> bool:
    """Whether the elements of every head lie side by side and can be read two by two."""
    return cache.layout != "HDNX" and all(
        tensor.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in tensor.stride()[:-1])
        for tensor in (cache.k, cache.v)
    )
