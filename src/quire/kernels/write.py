"""Write new keys and values into their slots, quantised to the cache's dtype.

Grid of `write_kernel`: [num_tokens, num_kv_heads]. One program owns the key and the value of one token and KV head. It
stores `x / scale`, divided, rounded (half to even) and saturated exactly as PyTorch does it in float32, so that every
device stores the same bits.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from quire.cache import PagedKVCache
from quire.dispatch.config import padded
from quire.dispatch.device import device_properties
from quire.kernels import mods
from quire.kernels.codes import store_codes
from quire.kernels.formats import largest
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.primitives import dim_offsets
from quire.kernels.views import block_scales


@triton.jit
def write_kernel(
    k_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM]
    v_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM_V]
    k_cache, v_cache, k_scale, v_scale,  # of PagedKVCache; scales may be None
    slot_mapping,  # [num_tokens] int64
    blocks,  # views.BlockScales, or None
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    k_page, k_slot, k_head, k_vec, v_page, v_slot, v_head, v_vec, scale_page, scale_slot, scale_head,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr,
    ENCODE: tl.constexpr, LARGEST: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    K_CODES: tl.constexpr, V_CODES: tl.constexpr,  # of `store_head`
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    position = tl.load(slot_mapping + token)
    if position < 0:
        return
    page, slot = position // PAGE_SIZE, position % PAGE_SIZE
    offs_scale = page * scale_page + slot * scale_slot + head * scale_head
    k_block, v_block = None, None
    if blocks is not None:
        offs_block = page * blocks.page + slot * blocks.slot + head * blocks.head
        k_block, v_block = blocks.k + offs_block, blocks.v + offs_block
    write_head(
        k_ptr + token * stride_k_token + head * stride_k_head,
        k_cache + page * k_page + slot * k_slot + head * k_head,
        k_vec, k_scale, offs_scale, HEAD_DIM, BLOCK_D, K_VEC, ENCODE, LARGEST, TOKEN_SCALES, K_CODES, k_block,
    )  # fmt: skip
    write_head(
        v_ptr + token * stride_v_token + head * stride_v_head,
        v_cache + page * v_page + slot * v_slot + head * v_head,
        v_vec, v_scale, offs_scale, HEAD_DIM_V, BLOCK_DV, V_VEC, ENCODE, LARGEST, TOKEN_SCALES, V_CODES, v_block,
    )  # fmt: skip


@triton.jit
def write_head(
    source, target, stride_vec, scale_ptr, offs_scale,
    DIM: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr, ENCODE: tl.constexpr, LARGEST: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, CODES: tl.constexpr, block_ptr,
):  # fmt: skip
    """Write one head of a key or value from `source`."""
    offs_d = tl.arange(0, BLOCK)
    x = tl.load(source + offs_d, mask=offs_d < DIM, other=0.0)
    store_head(
        x, target, stride_vec, scale_ptr, offs_scale, DIM, BLOCK, VEC, ENCODE, LARGEST, TOKEN_SCALES, CODES, block_ptr
    )  # fmt: skip


@triton.jit
def store_head(
    x, target, stride_vec, scale_ptr, offs_scale,
    DIM: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr, ENCODE: tl.constexpr, LARGEST: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, CODES: tl.constexpr, block_ptr,
):  # fmt: skip
    """Store the elements of one head, and its scale if scales are per token; with CODES, as `store_codes` does."""
    offs_d = tl.arange(0, BLOCK)
    inside = offs_d < DIM
    if CODES is not None:
        store_codes(x, target, scale_ptr, offs_scale, block_ptr, DIM, BLOCK, CODES)
    else:
        if ENCODE is not None:
            x = x.to(tl.float32)
            if TOKEN_SCALES:
                peak = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0), 0)
                scale = tl.where(peak > mods.SMALLEST_PEAK, tl.div_rn(peak, LARGEST), 1.0)
                tl.store(scale_ptr + offs_scale, scale)
                x = tl.div_rn(x, scale)
            elif scale_ptr is not None:
                x = tl.div_rn(x, tl.load(scale_ptr + offs_scale))
            x = ENCODE(x)
        tl.store(target + dim_offsets(offs_d.to(tl.int64), stride_vec, VEC, BLOCK), x, mask=inside)


WRITE = Kernel(write_kernel)  # of all calls of `write_kv`


def write_kv(k: torch.Tensor, v: torch.Tensor, cache: PagedKVCache, slot_mapping: torch.Tensor) -> None:
    """Launch the write; `quire.write_kv` has checked the arguments."""
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return

    tensors = k, v, *cache.addresses[:4], slot_mapping, block_scales(cache)
    facts = k.device, cache.kind, cache.num_kv_heads, cache.head_dim, cache.head_dim_v
    WRITE((num_tokens, cache.num_kv_heads, 1), tensors, facts, partial(arguments, cache))


def arguments(cache: PagedKVCache, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Arguments:
    """Return the kernel's arguments; the last of the others are `slot_mapping` and block scales."""
    pages, of_cache, meta = describe_cache(cache)
    strides = k.stride(0), k.stride(1), v.stride(0), v.stride(1), *of_cache
    return Arguments((k, v, *pages, *others[-2:]), strides, meta | {"num_warps": 1})


def describe_cache(cache: PagedKVCache) -> tuple[tuple[Any, ...], tuple[int, ...], dict[str, Any]]:
    """Return the tensors of a cache to write, their strides, and the constexprs that depend on the cache."""
    native = device_properties(cache.device).native_fp8
    as_bytes = not native and cache.dtype in mods.SOFTWARE_DECODERS
    k_cache, v_cache = (t.view(torch.uint8) if as_bytes else t for t in (cache.k, cache.v))
    ks, vs = cache.strides
    meta = {
        "PAGE_SIZE": cache.page_size, "HEAD_DIM": cache.head_dim, "HEAD_DIM_V": cache.head_dim_v,
        "BLOCK_D": padded(cache.head_dim), "BLOCK_DV": padded(cache.head_dim_v), "K_VEC": ks.vec_size,
        "V_VEC": vs.vec_size, "ENCODE": mods.encoder(cache.dtype, native), "LARGEST": largest(cache.dtype),
        "TOKEN_SCALES": cache.scale_kind == "token", "K_CODES": None, "V_CODES": None,
    }  # fmt: skip
    if cache.kv_format is not None:  # bytes, whatever the target has
        form = cache.form
        meta["K_CODES"], meta["V_CODES"] = (None if x.name == "e4m3" else x.name for x in (form.k, form.v))
        meta |= {"ENCODE": mods.to_e4m3_in_software, "LARGEST": largest(torch.float8_e4m3fn)}
    return (k_cache, v_cache, cache.k_scale, cache.v_scale), (*ks[:4], *vs[:4], *cache.scale_strides), meta
