"""Combine normalised states over disjoint keys: the algebra of `quire.state`, for any number of states in one launch.

Grid of `combine_kernel`: [num_tokens, num_q_heads]. One program owns one token and query head, over all states.
`quire.merge_states` launches it, and the Hopper kernel's runner does, to combine splits.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from quire.dispatch.config import padded
from quire.kernels.launch import states_at_once
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.states import LOG2E, as_stored, combine_at_once, finish
from quire.state import State

NUMBERS_OF_A_WARP = 2048  # of the states that a program reads at once


@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "num_states",
        "stride_lses_state",
        "stride_lses_token",
        "stride_lses_head",
        "stride_lse",
    ],
)
def combine_kernel(
    outs,  # [num_states, num_tokens, num_q_heads, HEAD_DIM_V]
    lses,  # [num_states, num_tokens, num_q_heads] float32
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM_V]
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or None
    cu_seqlens_q,  # [num_seqs + 1] int32, or None if every token has a sequence
    num_seqs, num_states,
    stride_state, stride_token, stride_head, stride_lses_state, stride_lses_token, stride_lses_head,
    stride_out_token, stride_out_head, stride_lse,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    if cu_seqlens_q is not None:
        if token >= tl.load(cu_seqlens_q + num_seqs):  # the token belongs to no sequence
            return
    offs_dv, one = tl.arange(0, BLOCK_DV), tl.arange(0, 1)
    acc, m_i, l_i = tl.zeros([BLOCK_DV], tl.float32), float("-inf"), 0.0
    lses += token * stride_lses_token + head * stride_lses_head
    outs += token * stride_token + head * stride_head
    for first in tl.range(0, num_states, AT_ONCE, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        i = (first + tl.arange(0, AT_ONCE)).to(tl.int64)
        # A state over no keys has weight 0, whatever its out holds. Its lse is -inf, or +inf from flash-attn.
        other_lse = tl.load(lses + i * stride_lses_state, mask=i < num_states, other=float("-inf"))
        empty = tl.abs(other_lse) == float("inf")
        out_ptrs = outs + (i * stride_state)[:, None] + offs_dv[None, :]
        # States are read at the same time as their lses, also those that turn out to have no keys.
        other = tl.load(out_ptrs, mask=(i < num_states)[:, None] & (offs_dv < HEAD_DIM_V)[None, :], other=0.0)
        other = tl.where(empty[:, None], 0.0, other.to(tl.float32))
        # A normalised state is (acc, m_i, l_i) = (out, lse, 1); without keys its sum is 0.
        other_m = tl.where(empty, float("-inf"), other_lse * LOG2E)
        acc, m_i, l_i = combine_at_once(acc, m_i, l_i, other, other_m, tl.where(empty, 0.0, 1.0))
    m_i, l_i = tl.full([1], m_i, tl.float32), tl.full([1], l_i, tl.float32)
    out, lse = finish((acc[None, :],), m_i, l_i, False)  # pyright: ignore[reportArgumentType]
    ptrs = out_ptr + token * stride_out_token + head * stride_out_head + one[:, None] + offs_dv[None, :]
    result = as_stored(out[0], out_scale_ptr, out_ptr.dtype.element_ty)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(ptrs, result, mask=(offs_dv < HEAD_DIM_V)[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + token * stride_lse + head + one, lse)


MERGE = Kernel(combine_kernel)  # of all calls of `merge_states`


def merge_states(states: Sequence[State]) -> State:
    """Launch `combine_kernel`; `quire.merge_states` has checked the arguments."""
    outs, lses = stack([s.out for s in states]), stack([s.lse for s in states])
    out, lse = outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])
    if out.numel() == 0:
        return State(out, lse)
    facts = outs.device, len(states), out.shape[1:]
    MERGE((lse.shape[0], lse.shape[1], 1), (outs, lses, out, None, lse), facts, arguments)
    return State(out, lse)


def arguments(
    outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, out_scale: None, lse: torch.Tensor
) -> Arguments:
    """Return the kernel's arguments where every token has a sequence."""
    fixed, meta = combine_arguments(outs, lses, out.stride(), lse)
    return Arguments((outs, lses, out, out_scale, lse), (None, 0, *fixed), meta)


def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return tensors of one shape as one: where they lie if that is at equal distances in one memory, else copied.

    What a collective receives lies so.
    """
    first = tensors[0]
    begin, strides = first.storage_offset(), first.stride()
    distance = tensors[1].storage_offset() - begin if len(tensors) > 1 else 0
    memory = first.untyped_storage().data_ptr()
    if distance >= 0 and strides[-1] == 1:
        if all(
            x.storage_offset() == begin + i * distance
            and x.stride() == strides
            and x.untyped_storage().data_ptr() == memory
            for i, x in enumerate(tensors)
        ):
            return first.as_strided((len(tensors), *first.shape), (distance, *strides), begin)
    return torch.stack(tensors)


def combine_arguments(
    outs: torch.Tensor, lses: torch.Tensor, out_strides: tuple[int, ...], lse: torch.Tensor | None
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the kernel's arguments after `num_seqs`, and those by name.

    Args:
        outs: [num_states, num_tokens, num_q_heads, head_dim_v].
        lses: [num_states, num_tokens, num_q_heads].
        out_strides: strides of the result's out.
        lse: the result's lse, or None.
    """
    dim = outs.shape[3]
    strides = (*outs.stride()[:3], *lses.stride(), *out_strides[:2], 0 if lse is None else lse.stride(0))
    at_once = states_at_once(len(outs))
    num_warps = max(1, at_once * padded(dim) // NUMBERS_OF_A_WARP)
    meta = {
        "HEAD_DIM_V": dim, "BLOCK_DV": padded(dim), "AT_ONCE": at_once, "PDL": False, "num_warps": num_warps,
    }  # fmt: skip
    return (len(outs), *strides), meta
