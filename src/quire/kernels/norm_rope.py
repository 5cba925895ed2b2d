"""Normalise and rotate the queries and the new keys of a step, and write keys and values into their slots, in a launch.

It is for attention that does not do so itself. Grid of `norm_rope_kernel`: [num_tokens, num_kv_heads]. One program owns
the key, the value and the query heads of one token and KV head.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from quire.cache import PagedKVCache
from quire.dispatch.config import power_of_two
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.rotate import load_rotated
from quire.kernels.views import block_scales, norm_rope_of
from quire.kernels.write import describe_cache, store_head, write_head
from quire.norm_rope import QKNorm, Rope

ELEMENTS = 512  # of query heads, that a warp holds


@triton.jit
def norm_rope_kernel(
    q_ptr,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    rotated_ptr,  # like q, contiguous
    k_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM]
    v_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM_V]
    k_cache, v_cache, k_scale, v_scale,  # of PagedKVCache; scales may be None
    slot_mapping,  # [num_tokens] int64
    norm_rope,  # views.NormRope
    blocks,  # views.BlockScales, or None
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    k_page, k_slot, k_head, k_vec, v_page, v_slot, v_head, v_vec, scale_page, scale_slot, scale_head,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, padded to a power of two
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_VEC: tl.constexpr, V_VEC: tl.constexpr,
    ENCODE: tl.constexpr, LARGEST: tl.constexpr, TOKEN_SCALES: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    K_CODES: tl.constexpr, V_CODES: tl.constexpr,  # of `store_head`
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, offs_d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    q_head, owned = head * GROUP + row, row < GROUP
    q = load_rotated(
        q_ptr + token * stride_q_token + q_head * stride_q_head, owned, token + row * 0, norm_rope.q_weight, norm_rope,
        offs_d, HEAD_DIM, BLOCK_D, ROTARY_DIM, INTERLEAVED,
    )  # fmt: skip
    targets = rotated_ptr + (token * tl.num_programs(1) * GROUP + q_head) * HEAD_DIM
    tl.store(targets[:, None] + offs_d[None, :], q, mask=owned[:, None] & (offs_d < HEAD_DIM)[None, :])
    position = tl.load(slot_mapping + token)
    if position < 0:
        return
    page, slot = position // PAGE_SIZE, position % PAGE_SIZE
    offs_scale = page * scale_page + slot * scale_slot + head * scale_head
    k_block, v_block = None, None
    if blocks is not None:
        offs_block = page * blocks.page + slot * blocks.slot + head * blocks.head
        k_block, v_block = blocks.k + offs_block, blocks.v + offs_block
    zero = tl.arange(0, 1)
    k = load_rotated(
        k_ptr + token * stride_k_token + head * stride_k_head + zero, zero == 0, token + zero, norm_rope.k_weight,
        norm_rope, offs_d, HEAD_DIM, BLOCK_D, ROTARY_DIM, INTERLEAVED,
    )  # fmt: skip
    store_head(
        tl.reshape(k, [BLOCK_D]),
        k_cache + page * k_page + slot * k_slot + head * k_head,
        k_vec, k_scale, offs_scale, HEAD_DIM, BLOCK_D, K_VEC, ENCODE, LARGEST, TOKEN_SCALES, K_CODES, k_block,
    )  # fmt: skip
    write_head(
        v_ptr + token * stride_v_token + head * stride_v_head,
        v_cache + page * v_page + slot * v_slot + head * v_head,
        v_vec, v_scale, offs_scale, HEAD_DIM_V, BLOCK_DV, V_VEC, ENCODE, LARGEST, TOKEN_SCALES, V_CODES, v_block,
    )  # fmt: skip


NORM_ROPE = Kernel(norm_rope_kernel)  # of all calls of `norm_rope_and_write`


def norm_rope_and_write(
    q: torch.Tensor,
    rotated: torch.Tensor,
    cache: PagedKVCache,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    rope: Rope | None,
    qk_norm: QKNorm | None,
) -> None:
    """Write rotated queries to `rotated`, and rotated keys and values into the cache; `attention` has checked them."""
    num_tokens, num_q_heads, _ = q.shape
    if num_tokens == 0:
        return
    norm_rope, rotation = norm_rope_of(rope, qk_norm)

    def arguments(*tensors: Any) -> Arguments:
        pages, of_cache, meta = describe_cache(cache)
        group = num_q_heads // cache.num_kv_heads
        rows = power_of_two(group)
        meta |= rotation._asdict() | {"GROUP": group, "ROWS": rows}
        meta["num_warps"] = min(8, max(1, rows * meta["BLOCK_D"] // ELEMENTS))
        strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *of_cache
        return Arguments((q, rotated, k, v, *pages, slot_mapping, norm_rope, blocks), strides, meta)

    blocks = block_scales(cache)
    tensors = q, rotated, k, v, *cache.addresses[:4], slot_mapping, norm_rope, blocks
    facts = q.device, cache.kind, cache.num_kv_heads, num_q_heads, cache.head_dim, cache.head_dim_v, rotation
    NORM_ROPE((num_tokens, cache.num_kv_heads, 1), tensors, facts, arguments)
