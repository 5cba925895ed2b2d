"""Write new latents into their slots, quantised to the cache's dtype or packed into records.

Grid of both kernels: [num_tokens]. One program owns the latent and the rotary columns of one token. Numbers are
divided, rounded and saturated as in `write.py`, so that every device stores the same bits.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from quire.cache import PagedKVCache
from quire.dispatch.config import padded, power_of_two
from quire.dispatch.device import device_properties
from quire.kernels import mods
from quire.kernels.formats import largest, record_columns
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.write import write_head

TOKEN_SCALES = tl.constexpr(False)


@triton.jit
def write_latent_kernel(
    c_kv_ptr,  # [num_tokens, RANK]
    k_pe_ptr,  # [num_tokens, ROPE], or None
    latents,  # [num_pages, PAGE_SIZE, RANK + ROPE]
    scale_ptr,  # [1], or None
    slot_mapping,  # [num_tokens] int64
    stride_c_kv, stride_k_pe, stride_page, stride_slot,
    PAGE_SIZE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, ENCODE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(slot_mapping + token)
    if position < 0:
        return
    target = latents + position // PAGE_SIZE * stride_page + position % PAGE_SIZE * stride_slot
    write_head(
        c_kv_ptr + token * stride_c_kv, target,
        0, scale_ptr, 0, RANK, BLOCK_RANK, RANK, ENCODE, LARGEST, TOKEN_SCALES, None, None,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    if k_pe_ptr is not None:
        write_head(
            k_pe_ptr + token * stride_k_pe, target + RANK,
            0, scale_ptr, 0, ROPE, BLOCK_ROPE, ROPE, ENCODE, LARGEST, TOKEN_SCALES, None, None,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip


@triton.jit
def record_scale(peak, SMALLEST: tl.constexpr):
    # The least power of two of which 448 = 1.75 * 2**8 are at least the peak. Its bits are those of peak / 2**8,
    # rounded up to a power where the mantissa is above 1.75.
    bits = tl.maximum(peak * 0.00390625, SMALLEST).to(tl.int32, bitcast=True)
    return (bits + 0x1FFFFF) & 0x7F800000


@triton.jit
def write_record_kernel(
    c_kv_ptr,  # [num_tokens, GROUPS * GROUP]
    k_pe_ptr,  # [num_tokens, ROPE], bits of bfloat16 if ENCODE_ROPE is None; None, like `rope`, if ROPE is 0
    values,  # [num_pages, PAGE_SIZE, GROUPS * GROUP], strides in elements
    scales,  # [num_pages, PAGE_SIZE, GROUPS] float32, or uint8 for the exponents of powers of two
    rope,  # [num_pages, PAGE_SIZE, ROPE] int16, bits of bfloat16
    slot_mapping,  # [num_tokens] int64
    stride_c_kv, stride_k_pe, values_page, values_slot, scales_page, scales_slot, rope_page, rope_slot,
    PAGE_SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, ROPE: tl.constexpr, ENCODE: tl.constexpr,
    ENCODE_ROPE: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,  # GROUPS, padded to a power of two
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(slot_mapping + token)
    if position < 0:
        return
    page, slot = position // PAGE_SIZE, position % PAGE_SIZE
    offs_group = tl.arange(0, BLOCK_GROUPS)
    offs = offs_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [BLOCK_GROUPS, GROUP]
    if GROUPS == BLOCK_GROUPS:
        is_group, are_columns = None, None
        x = tl.load(c_kv_ptr + token * stride_c_kv + offs).to(tl.float32)
    else:
        is_group, are_columns = offs_group < GROUPS, (offs_group < GROUPS)[:, None]
        x = tl.load(c_kv_ptr + token * stride_c_kv + offs, mask=are_columns, other=0.0).to(tl.float32)
    peak = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0), 1)
    bits = record_scale(peak, SMALLEST)  # [BLOCK_GROUPS]
    scale = bits.to(tl.float32, bitcast=True)
    at = scales + page * scales_page + slot * scales_slot + offs_group
    if scales.dtype.element_ty == tl.uint8:
        tl.store(at, (bits >> 23).to(tl.uint8), mask=is_group)
    else:
        tl.store(at, scale, mask=is_group)
    target = values + page * values_page + slot * values_slot
    tl.store(target + offs, ENCODE(tl.div_rn(x, tl.broadcast_to(scale[:, None], BLOCK_GROUPS, GROUP))), are_columns)
    if ROPE > 0:
        offs_rope = tl.arange(0, ROPE)
        r = tl.load(k_pe_ptr + token * stride_k_pe + offs_rope)
        if ENCODE_ROPE is not None:
            r = ENCODE_ROPE(r.to(tl.float32))
        tl.store(rope + page * rope_page + slot * rope_slot + offs_rope, r)


# Of all calls of `write_latent`
WRITE, WRITE_RECORDS = Kernel(write_latent_kernel), Kernel(write_record_kernel)


def write_latent(
    c_kv: torch.Tensor, k_pe: torch.Tensor | None, cache: PagedKVCache, slot_mapping: torch.Tensor
) -> None:
    """Launch the write; `quire.write_latent` has checked the arguments, and k_pe is [num_tokens, rope] or None."""
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    kernel, parts = WRITE, (cache.latents, cache.k_scale)
    if cache.scale_kind == "record":
        kernel, parts = WRITE_RECORDS, cache.records
        c_kv, k_pe = record_columns(cache.record, c_kv, k_pe)
    tensors = c_kv, k_pe, *parts, slot_mapping
    facts = c_kv.device, cache.kind, cache.head_dim, cache.head_dim_v
    kernel((num_tokens, 1, 1), tensors, facts, partial(arguments, cache))


def arguments(cache: PagedKVCache, *tensors: Any) -> Arguments:
    """Return the kernel's arguments, of which `tensors` are the first, as bytes or bits where it takes these."""
    native_fp8 = device_properties(cache.device).native_fp8
    as_bytes = not native_fp8 and cache.dtype in mods.SOFTWARE_DECODERS
    c_kv, k_pe, target, *rest = tensors
    meta = {
        "PAGE_SIZE": cache.page_size, "ENCODE": mods.encoder(cache.dtype, native_fp8),
        "num_warps": 1,
    }  # fmt: skip
    strides = c_kv.stride(0), 0 if k_pe is None else k_pe.stride(0), *target.stride()[:2]
    target = target.view(torch.uint8) if as_bytes else target
    if cache.scale_kind == "record":
        scales, rope, slot_mapping = rest
        record, bits, is_bfloat16 = cache.record, torch.int16, k_pe is not None and k_pe.dtype is torch.bfloat16
        strides += *scales.stride()[:2], *((0, 0) if rope is None else rope.stride()[:2])
        meta |= {
            "GROUPS": record.groups, "BLOCK_GROUPS": power_of_two(record.groups), "GROUP": record.group,
            "ROPE": record.rope, "ENCODE_ROPE": None if is_bfloat16 else mods.to_bfloat16_bits,
            "SMALLEST": record.smallest_scale,
        }  # fmt: skip
        if rope is not None and k_pe is not None:
            k_pe, rope = k_pe.view(bits) if is_bfloat16 else k_pe, rope.view(bits)
        return Arguments((c_kv, k_pe, target, scales, rope, slot_mapping), strides, meta)
    rope_dim = cache.head_dim - cache.head_dim_v
    meta |= {
        "LARGEST": largest(cache.dtype), "RANK": cache.head_dim_v, "ROPE": rope_dim,
        "BLOCK_RANK": padded(cache.head_dim_v), "BLOCK_ROPE": padded(max(rope_dim, 1)),
    }  # fmt: skip
    return Arguments((c_kv, k_pe, target, *rest), strides, meta)
