"""Copy whole pages, with their scales per token, within a device or between devices.

Grid of `copy_kernel`: [num_pairs * TILES]; one program copies BLOCK elements of one page, at the same places of K, V and their scales, in one launch.
A page is seen as four dimensions of any strides, neighbours that lie side by side merged into one: an ordinary page is a single run of memory.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire.cache import PagedKVCache
from quire.kernels.formats import page_tensors
from quire.kernels.launcher import launch


class Part(NamedTuple):
    """One tensor of a page, in both caches; the innermost of its dimensions has stride 1."""

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
    k, v, k_scale, v_scale,  # Parts; scales may be None
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
    copy_tile(v, from_page, to_page, offs, V_SHAPE)
    if k_scale is not None:
        copy_tile(k_scale, from_page, to_page, offs, SCALE_SHAPE)
        copy_tile(v_scale, from_page, to_page, offs, SCALE_SHAPE)


@triton.jit
def copy_tile(part, from_page, to_page, offs, SHAPE: tl.constexpr):
    inside = offs < SHAPE[0] * SHAPE[1] * SHAPE[2] * SHAPE[3]
    i0 = (offs // (SHAPE[1] * SHAPE[2] * SHAPE[3])).to(tl.int64)
    i1 = (offs // (SHAPE[2] * SHAPE[3]) % SHAPE[1]).to(tl.int64)
    i2 = (offs // SHAPE[3] % SHAPE[2]).to(tl.int64)
    i3 = offs % SHAPE[3]
    source = (
        part.source + from_page * part.source_page + (i0 * part.source_0 + i1 * part.source_1 + i2 * part.source_2 + i3)
    )
    target = (
        part.target + to_page * part.target_page + (i0 * part.target_0 + i1 * part.target_1 + i2 * part.target_2 + i3)
    )
    tl.store(target, tl.load(source, mask=inside), mask=inside)


def copy_pages(src: PagedKVCache, dst: PagedKVCache, page_pairs: torch.Tensor) -> None:
    """Launch the copy within one device; arguments were checked by `quire.copy_pages`."""
    pairs = zip(page_tensors(src), page_tensors(dst), strict=True)
    (k, k_shape), (v, v_shape), *scales = (make_part(*tensors) for tensors in pairs)
    (k_scale, scale_shape), (v_scale, _) = scales or [(None, None)] * 2
    elements = max(a * b * c * d for a, b, c, d in (k_shape, v_shape))  # scales are fewer
    block = min(2048, triton.next_power_of_2(elements))
    tiles = triton.cdiv(elements, block)
    meta = {"K_SHAPE": k_shape, "V_SHAPE": v_shape, "SCALE_SHAPE": scale_shape, "TILES": tiles, "BLOCK": block}
    launch(copy_kernel, (page_pairs.shape[0] * tiles,), (k, v, k_scale, v_scale, page_pairs), meta)


def make_part(source: torch.Tensor, target: torch.Tensor) -> tuple[Part, tuple[int, int, int, int]]:
    """Return a tensor pair's view for the launch, and its page's shape."""
    extents = [e for e in zip(source.shape[1:], source.stride()[1:], target.stride()[1:], strict=True) if e[0] > 1]
    extents.sort(key=lambda e: (e[1:] == (1, 1), -e[1]))
    dims: list[tuple[int, int, int]] = []  # (extent, stride in source, stride in target), outermost first
    for size, step, target_step in extents:
        if dims and dims[-1][1:] == (size * step, size * target_step):
            size *= dims.pop()[0]
        dims.append((size, step, target_step))
    if not dims or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))
    dims = [(1, 0, 0)] * (4 - len(dims)) + dims
    (*steps, _), (*target_steps, _) = ([dim[i] for dim in dims] for i in (1, 2))
    return Part(source, target, source.stride(0), *steps, target.stride(0), *target_steps), tuple(
        dim[0] for dim in dims
    )
