"""Copy pages, with their scales per token, within a device.

Grid of `copy_kernel`: [num_pairs * TILES]. One program owns BLOCK elements of one page, at the same places of K, of V
and of their scales. A page is addressed by four dimensions of any strides. Adjacent dimensions that are contiguous
become one, so that an ordinary page is one range of memory.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.cache import PagedKVCache
from quire.dispatch.config import power_of_two
from quire.dispatch.request import cdiv
from quire.kernels.formats import page_tensors
from quire.kernels.launcher import launch


class PageTensor(NamedTuple):
    """A tensor in both caches, by pages; the innermost of a page's four dimensions has stride 1."""

    source: Any
    target: Any
    source_page: int
    source_0: int
    source_1: int
    source_2: int
    target_page: int
    target_0: int
    target_1: int
    target_2: int


@triton.jit
def copy_kernel(
    k, v, k_scale, v_scale,  # PageTensor; v is None for latents, scales may be None
    page_pairs,  # [num_pairs, 2], (source page, destination page)
    K_SHAPE: tl.constexpr, V_SHAPE: tl.constexpr, SCALE_SHAPE: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    from_page = tl.load(page_pairs + 2 * pair).to(tl.int64)
    to_page = tl.load(page_pairs + 2 * pair + 1).to(tl.int64)
    if (from_page < 0) | (to_page < 0):
        return
    offs = tile * BLOCK + tl.arange(0, BLOCK)
    copy_tile(k, from_page, to_page, offs, K_SHAPE)
    if v is not None:
        copy_tile(v, from_page, to_page, offs, V_SHAPE)
    if k_scale is not None:
        copy_tile(k_scale, from_page, to_page, offs, SCALE_SHAPE)
        copy_tile(v_scale, from_page, to_page, offs, SCALE_SHAPE)


@triton.jit
def copy_tile(t, from_page, to_page, offs, SHAPE: tl.constexpr):
    """Copy elements `offs` of a page of PageTensor `t`."""
    inside = offs < SHAPE[0] * SHAPE[1] * SHAPE[2] * SHAPE[3]
    i0 = (offs // (SHAPE[1] * SHAPE[2] * SHAPE[3])).to(tl.int64)
    i1 = (offs // (SHAPE[2] * SHAPE[3]) % SHAPE[1]).to(tl.int64)
    i2 = (offs // SHAPE[3] % SHAPE[2]).to(tl.int64)
    i3 = offs % SHAPE[3]
    source = t.source + from_page * t.source_page + (i0 * t.source_0 + i1 * t.source_1 + i2 * t.source_2 + i3)
    target = t.target + to_page * t.target_page + (i0 * t.target_0 + i1 * t.target_1 + i2 * t.target_2 + i3)
    tl.store(target, tl.load(source, mask=inside), mask=inside)


def copy_pages(src: PagedKVCache, dst: PagedKVCache, page_pairs: torch.Tensor) -> None:
    """Launch the copy within one device; `quire.copy_pages` has checked the arguments."""
    pairs = zip(page_tensors(src), page_tensors(dst), strict=True)
    tensors: list[tuple[Any, Any]] = [make_page_tensor(*pair) for pair in pairs]
    elements = max(math.prod(shape) for _, shape in tensors)
    (k, k_shape), (v, v_shape), (k_scale, scale_shape), (v_scale, _) = tensors + [(None, None)] * (4 - len(tensors))
    block = min(2048, power_of_two(elements))
    tiles = cdiv(elements, block)
    meta = {"K_SHAPE": k_shape, "V_SHAPE": v_shape, "SCALE_SHAPE": scale_shape, "TILES": tiles, "BLOCK": block}
    launch(copy_kernel, (page_pairs.shape[0] * tiles,), (k, v, k_scale, v_scale, page_pairs), meta)


def make_page_tensor(source: torch.Tensor, target: torch.Tensor) -> tuple[PageTensor, tuple[int, int, int, int]]:
    """Return a tensor of both caches for the launch, and the shape of its pages."""
    extents = [e for e in zip(source.shape[1:], source.stride()[1:], target.stride()[1:], strict=True) if e[0] > 1]
    extents.sort(key=lambda e: (e[1:] == (1, 1), -e[1]))
    dims: list[tuple[int, int, int]] = []  # (extent, stride in source, stride in target), outermost first
    for size, step, target_step in extents:
        if dims and dims[-1][1:] == (size * step, size * target_step):
            size *= dims.pop()[0]
        dims.append((size, step, target_step))
    if not dims or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))
    a, b, c, d = [(1, 0, 0)] * (4 - len(dims)) + dims
    strides = source.stride(0), a[1], b[1], c[1], target.stride(0), a[2], b[2], c[2]
    return PageTensor(source, target, *strides), (a[0], b[0], c[0], d[0])
