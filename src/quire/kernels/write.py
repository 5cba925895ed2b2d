"""Write new keys and values into their slots, quantising on the way, and copy whole pages: the two ways a cache changes.

Grid of `write_kernel`: [num_tokens, num_kv_heads]; one program owns one head of one token, key and value. `copy_kernel` has one program for each
row of each page.
"""

import torch
import triton
import triton.language as tl

from quire.cache import PagedKVCache
from quire.kernels import mods
from quire.kernels.primitives import dim_offsets
from quire.tuning.select import padded
from quire.tuning.traits import device_traits


@triton.jit
def write_kernel(
    k_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM]
    v_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM_V]
    k_cache, v_cache, k_scale, v_scale,
    slot_mapping,  # [num_tokens] int64
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    k_page, k_slot, k_head, k_run, v_page, v_slot, v_head, v_run, scale_page, scale_slot, scale_head,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    K_RUN: tl.constexpr, V_RUN: tl.constexpr, ENCODE: tl.constexpr, LARGEST: tl.constexpr, TOKEN_SCALES: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(slot_mapping + token)
    if position < 0:
        return
    page, slot = position // PAGE_SIZE, position % PAGE_SIZE
    offs_scale = page * scale_page + slot * scale_slot + head * scale_head
    write_head(
        k_ptr + token * stride_k_token + head * stride_k_head, k_cache + page * k_page + slot * k_slot + head * k_head, k_run,
        k_scale, offs_scale, HEAD_DIM, BLOCK_D, K_RUN, ENCODE, LARGEST, TOKEN_SCALES,
    )  # fmt: skip
    write_head(
        v_ptr + token * stride_v_token + head * stride_v_head, v_cache + page * v_page + slot * v_slot + head * v_head, v_run,
        v_scale, offs_scale, HEAD_DIM_V, BLOCK_DV, V_RUN, ENCODE, LARGEST, TOKEN_SCALES,
    )  # fmt: skip


@triton.jit
def write_head(
    source, target, stride_run, scale_ptr, offs_scale,
    DIM: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, ENCODE: tl.constexpr, LARGEST: tl.constexpr, TOKEN_SCALES: tl.constexpr,
):  # fmt: skip
    offs_d = tl.arange(0, BLOCK)
    inside = offs_d < DIM
    x = tl.load(source + offs_d, mask=inside, other=0.0)
    if ENCODE is not None:
        x = x.to(tl.float32)
        if TOKEN_SCALES:
            largest = tl.max(tl.abs(x), 0)
            scale = tl.where(largest > 0, largest / LARGEST, 1.0)
            tl.store(scale_ptr + offs_scale, scale)
            x = x / scale
        elif scale_ptr is not None:
            x = x / tl.load(scale_ptr + offs_scale)
        x = ENCODE(x)
    tl.store(target + dim_offsets(offs_d, stride_run, RUN, BLOCK), x, mask=inside)


def write(k: torch.Tensor, v: torch.Tensor, cache: PagedKVCache, slot_mapping: torch.Tensor) -> None:
    """Launch the write; arguments were checked by `quire.write_kv`."""
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    native = device_traits(k.device).native_fp8
    encoder = mods.encoder(cache.dtype, native)
    as_bytes = not native and cache.dtype in mods.SOFTWARE_DECODERS
    k_cache, v_cache = (t.view(torch.uint8) if as_bytes else t for t in (cache.k, cache.v))
    ks, vs = cache.strides
    write_kernel[(num_tokens, cache.num_kv_heads)](
        k, v, k_cache, v_cache, cache.k_scale, cache.v_scale, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *ks[:4], *vs[:4], *cache.scale_strides,
        PAGE_SIZE=cache.page_size, HEAD_DIM=cache.head_dim, HEAD_DIM_V=cache.head_dim_v, BLOCK_D=padded(cache.head_dim),
        BLOCK_DV=padded(cache.head_dim_v), K_RUN=ks.run_length, V_RUN=vs.run_length, ENCODE=encoder, LARGEST=mods.largest(cache.dtype),
        TOKEN_SCALES=cache.scale_kind == "token", num_warps=1,
    )  # fmt: skip


def write_on_cpu(k: torch.Tensor, v: torch.Tensor, cache: PagedKVCache, slot_mapping: torch.Tensor) -> None:
    """Do the same to CPU tensors in PyTorch."""
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    positions = slot_mapping[kept]
    page, slot = positions // cache.page_size, positions % cache.page_size
    for x, stored, scale in ((k[kept], cache.k, cache.k_scale), (v[kept], cache.v, cache.v_scale)):
        largest = mods.largest(cache.dtype)
        if largest is not None:
            x = x.float()
            if cache.scale_kind == "token":
                peak = x.abs().amax(-1)
                scale[page, slot] = torch.where(peak > 0, peak / largest, 1.0)
                x = x / scale[page, slot][..., None]
            elif scale is not None:
                x = x / scale[:, None]
            x = (x.round() if cache.dtype is torch.int8 else x).clamp(-largest, largest)
        x = x.to(cache.dtype)
        if x.dtype.itemsize == 1:  # indexing is not implemented for every 8-bit float
            x, stored = x.view(torch.uint8), stored.view(torch.uint8)
        if cache.layout == "NHD":
            stored[page, slot] = x
        elif cache.layout == "HND":
            stored[page, :, slot] = x
        elif stored.dim() == 5:
            stored[page, :, :, slot] = x.unflatten(-1, (stored.shape[2], stored.shape[4]))
        else:
            stored[page, :, :, slot] = x


@triton.jit
def copy_kernel(
    source, target, page_pairs, source_page, source_outer, source_inner, target_page, target_outer, target_inner,
    OUTER: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one row of a page, seen as [OUTER, INNER, WIDTH]; the grid is [num_pairs, OUTER * INNER]."""
    pair, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    from_page, to_page = tl.load(page_pairs + 2 * pair).to(tl.int64), tl.load(page_pairs + 2 * pair + 1).to(tl.int64)
    if (from_page < 0) | (to_page < 0):
        return
    outer, inner = row // INNER, row % INNER
    source += from_page * source_page + outer * source_outer + inner * source_inner
    target += to_page * target_page + outer * target_outer + inner * target_inner
    for start in tl.range(0, WIDTH, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(target + offs, tl.load(source + offs, mask=offs < WIDTH), mask=offs < WIDTH)


def copy(source: torch.Tensor, target: torch.Tensor, page_pairs: torch.Tensor) -> None:
    """Copy pages between two tensors [num_pages, ...] of one device; pairs with a negative page are left out."""
    rows, targets = as_rows(source), as_rows(target)
    _, outer, inner, width = rows.shape
    copy_kernel[(page_pairs.shape[0], outer * inner)](
        rows, targets, page_pairs, *rows.stride()[:3], *targets.stride()[:3],
        OUTER=outer, INNER=inner, WIDTH=width, BLOCK=min(1024, triton.next_power_of_2(width)),
    )  # fmt: skip


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """View a cache tensor or its scales as bytes or words [num_pages, outer, inner, width] without a copy."""
    if tensor.dtype.itemsize == 1:
        tensor = tensor.view(torch.uint8)
    if tensor.dim() == 3:  # scales [num_pages, page_size, num_kv_heads], any strides
        return tensor.unsqueeze(-1)
    return tensor.flatten(3) if tensor.dim() == 5 else tensor  # [num_pages, heads, head_dim / x, page_size * x]
