"""Combine the partials of a row block. The last program to arrive at the row block does it.

A partial is the state of one row block over some of its keys: acc, m_i and l_i of `primitives.py`, as float32 in the
plan's scratch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.primitives import combine


class Partial(NamedTuple):
    """Compile-time constants of partials. The kernel builds one tuple and passes it as one constexpr."""

    ROWS: Any
    HEAD_DIM_V: Any
    BLOCK_DV: Any
    COLUMNS: Any  # combined at a time
    NUM_KV_HEADS: Any
    PER_ROW_MASK: Any
    ROOM: Any  # elements of acc that the registers hold for one round of `combine_partials`


@triton.jit
def store_partial(
    scratch, acc, m_i, l_i, slot, wanted, PACKED_FP8: tl.constexpr, BLOCK_M: tl.constexpr, P: tl.constexpr
):
    """Write a state to slot `slot` of the scratch, if `wanted`."""
    offs_m = tl.arange(0, BLOCK_M)
    rows = slot * P.ROWS + offs_m
    keep = (offs_m < P.ROWS) & wanted
    tl.store(scratch.m_i + rows, m_i, mask=keep)
    tl.store(scratch.l_i + rows, l_i, mask=keep)
    ptrs = scratch.acc + rows.to(tl.int64)[:, None] * P.HEAD_DIM_V
    if PACKED_FP8:
        even, odd = acc
        offs_dv = 2 * tl.arange(0, P.BLOCK_DV // 2)
        inside = keep[:, None] & (offs_dv < P.HEAD_DIM_V)[None, :]
        tl.store(ptrs + offs_dv[None, :], even, mask=inside)
        tl.store(ptrs + (offs_dv + 1)[None, :], odd, mask=inside)
    else:
        offs_dv = tl.arange(0, P.BLOCK_DV)
        tl.store(ptrs + offs_dv[None, :], acc, mask=keep[:, None] & (offs_dv < P.HEAD_DIM_V)[None, :])


@triton.jit
def arrive_is_last(scratch, counter, num_arrivals, arrives):
    """Count this program's arrival, if it arrives; return whether it is the last of `num_arrivals`.

    The last program sees what all others wrote before they arrived. It resets the counter to 0.
    """
    tl.debug_barrier()  # the stores of all threads precede the release by one thread
    last = arrives & (tl.atomic_add(scratch.counter + counter, 1, mask=arrives, sem="acq_rel") == num_arrivals - 1)
    if last:
        tl.store(scratch.counter + counter, 0)
    return last


@triton.jit
def combine_group(scratch, first_slot, next_slot, step, num_partials, kv_head, P: tl.constexpr):
    """Combine some partials of a row block into the first of them; their slots are those of `combine_partials`."""
    rows = (first_slot * P.NUM_KV_HEADS + kv_head) * P.ROWS + tl.arange(0, P.ROWS)
    for column_group in tl.range(P.BLOCK_DV // P.COLUMNS, num_stages=1):
        columns = column_group * P.COLUMNS + tl.arange(0, P.COLUMNS)
        acc, m_i, l_i = combine_partials(scratch, first_slot, next_slot, step, num_partials, kv_head, columns, False, P)
        tl.debug_barrier()  # all threads have read the partial that is now overwritten
        ptrs = scratch.acc + rows.to(tl.int64)[:, None] * P.HEAD_DIM_V + columns[None, :]
        tl.store(ptrs, acc, mask=(columns < P.HEAD_DIM_V)[None, :])
        if column_group == P.BLOCK_DV // P.COLUMNS - 1:
            tl.store(scratch.m_i + rows, m_i)
            tl.store(scratch.l_i + rows, l_i)


@triton.jit
def combine_partials(
    scratch, first_slot, next_slot, step, num_partials, kv_head, offs_dv, LEFT_FOLD: tl.constexpr, P: tl.constexpr
):
    """Return the combined state of a row block's partials, of columns `offs_dv`, in key order.

    The first partial is in slot `first_slot`, the others are in slots from `next_slot` on in steps of `step`. With
    LEFT_FOLD they are added one by one, as batch invariance requires. Otherwise a round of partials is rescaled to one
    maximum.
    """
    # A round has as many partials as the registers can hold.
    WIDTH: tl.constexpr = max(1, min(8, P.ROOM // (P.ROWS * P.COLUMNS)))
    offs_r = tl.arange(0, P.ROWS)
    offs = offs_r[:, None] * P.HEAD_DIM_V + offs_dv[None, :]
    inside = (offs_dv < P.HEAD_DIM_V)[None, :]
    acc = tl.zeros([P.ROWS, P.COLUMNS], tl.float32)
    m_i = tl.full([P.ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([P.ROWS], tl.float32)
    for first in tl.range(0, num_partials, WIDTH, num_stages=1):
        accs, ms, ls = (), (), ()
        # All loads of a round are in flight together. They bypass L1 (.cg), since other programs wrote the partials.
        for i in tl.static_range(WIDTH):
            # Combining is bound by instructions. So all partials use one block of offsets, and the end of the last
            # round reads the last partial again with weight 0. Decode masks the load of m_i: with a select, ptxas would
            # wait for m_i before it issues the loads of acc, and a round would take two latencies. Drafts select, since
            # a mask would need registers that they lack.
            index = tl.minimum(first + i, num_partials - 1)
            slot = tl.where(index == 0, first_slot, next_slot + (index - 1) * step)
            base = (slot * P.NUM_KV_HEADS + kv_head).to(tl.int64) * P.ROWS
            if P.PER_ROW_MASK:
                other_m = tl.load(scratch.m_i + base + offs_r, cache_modifier=".cg")
                other_m = tl.where(first + i < num_partials, other_m, float("-inf"))
            else:
                present = (first + i + 0 * offs_r) < num_partials
                other_m = tl.load(scratch.m_i + base + offs_r, mask=present, other=float("-inf"), cache_modifier=".cg")
            ms = ms + (other_m,)
            ls = ls + (tl.load(scratch.l_i + base + offs_r, cache_modifier=".cg"),)
            acc_ptrs = scratch.acc + base * P.HEAD_DIM_V + offs
            accs = accs + (tl.load(acc_ptrs, mask=inside, other=0.0, cache_modifier=".cg"),)
        if LEFT_FOLD:
            for i in tl.static_range(WIDTH):
                acc, m_i, l_i = combine(acc, m_i, l_i, accs[i], ms[i], ls[i])
        else:
            m_new = m_i
            for i in tl.static_range(WIDTH):
                m_new = tl.maximum(m_new, ms[i])
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m_i - shift)
            acc, m_i, l_i = acc * alpha[:, None], m_new, l_i * alpha
            for i in tl.static_range(WIDTH):
                alpha = tl.exp2(ms[i] - shift)
                acc += accs[i] * alpha[:, None]
                l_i += ls[i] * alpha
    return acc, m_i, l_i
