"""Combine the partials of a row block in the last program to arrive at it; `combine.py` does so in another launch.

A partial is the state of one row block over some of its keys: acc, m_i and l_i of `states.py`, as float32 in the
plan's scratch. A slot of the scratch holds a partial of each lane. Lanes are the programs that share a partition: one
for each KV head in the portable kernel, and one for each row block of a band in the MLA kernel.

A program that leaves a row block unfinished calls `store_and_arrive`. The last one then calls `store_combined`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.states import combine, store_result


class Partial(NamedTuple):
    """Compile-time constants of partials. The kernel builds one tuple and passes it as one constexpr."""

    ROWS: Any
    HEAD_DIM_V: Any
    BLOCK_DV: Any
    COLUMNS: Any  # combined at a time
    LANES: Any
    PER_ROW_MASK: Any
    ROOM: Any  # elements of acc that the registers hold for one round of `combine_partials`
    FIXED_SPLIT: Any  # slots belong to splits, which are added one by one; otherwise slots belong to partitions
    TWO_LEVEL_MIN_PARTIALS: Any  # more partials than these are combined in two levels; None for never


class Slots(NamedTuple):
    """Where a row block's partials are: in slot `first`, and in slots from `next` on in steps of `step`."""

    first: Any
    next: Any
    step: Any
    num_partials: Any


@triton.jit
def store_and_arrive(
    scratch, acc, m_i, l_i, columns, partition, lane, start, block_unit, num_units, size,
    BLOCK_M: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Write this program's partial of a row block and count its arrival.

    With FIXED_SPLIT, a row block's later splits are stored already. Only the program that begins it has a state left.

    Args:
        scratch: views.Partials.
        acc, m_i, l_i: the state over this program's units of the row block.
        columns: those that each panel of acc holds.
        partition, lane: of this program.
        start: the first unit of the row block that is in this partition; 0 if it begins here.
        block_unit: the first unit of the row block, in the batch.
        num_units: units of the row block.
        size: units of a partition.
        BLOCK_M: rows of the state.
        P: Partial.

    Returns:
        is_last: whether all programs of the row block have arrived, and this one combines what they wrote.
        slots: Slots.
    """
    first_partition = block_unit // size
    num_arrivals = (block_unit + num_units - 1) // size - first_partition + 1
    if P.FIXED_SPLIT:
        first_slot, next_slot, step = block_unit, (first_partition + 1) * size, 1
        num_partials = 1 + block_unit + num_units - next_slot
        slot = block_unit
    else:
        first_slot, next_slot, step = 2 * first_partition + 1, 2 * first_partition + 2, 2
        num_partials = num_arrivals
        slot = slot_of_partial(partition, start)
    begun = (not P.FIXED_SPLIT) | (start == 0)
    store_partial(scratch, acc, m_i, l_i, columns, slot * P.LANES + lane, begun, BLOCK_M, P)
    counter, arrives = 2 * first_partition + 1, num_arrivals > 0
    if P.TWO_LEVEL_MIN_PARTIALS is not None:
        # First level: the last program to arrive in a group of adjacent partials combines them into the first. Second
        # level: the last program to arrive combines the first partials of all groups.
        if num_partials > P.TWO_LEVEL_MIN_PARTIALS:
            group = (tl.sqrt(num_partials.to(tl.float32)) + 0.5).to(tl.int32)
            leader = (partition - first_partition) // group * group
            leader_slot = tl.where(leader == 0, first_slot, next_slot + (leader - 1) * step)
            members = tl.minimum(group, num_partials - leader)
            arrives = arrive_is_last(scratch, leader_slot * P.LANES + lane, members, num_arrivals > 0)
            if arrives:
                after_leader = tl.where(leader == 0, next_slot, leader_slot + step)
                combine_group(scratch, Slots(leader_slot, after_leader, step, members), lane, P)
            counter = next_slot
            next_slot += (group - 1) * step
            step *= group
            num_partials = tl.cdiv(num_partials, group)
            num_arrivals = num_partials
    is_last = arrive_is_last(scratch, counter * P.LANES + lane, num_arrivals, arrives)
    return is_last, Slots(first_slot, next_slot, step, num_partials)


@triton.jit
def slot_of_partial(partition, start):
    """Return where a partition's partial of a row block is; a partition may end one row block and begin another."""
    return 2 * partition + (start == 0).to(tl.int32)


@triton.jit
def store_combined(scratch, slots, lane, outputs, v_scale, rows, P: tl.constexpr):
    """Combine a row block's partials, a group of columns at a time, and write its result; `rows` are P.ROWS rows."""
    for column_group in tl.range(P.BLOCK_DV // P.COLUMNS, num_stages=1):
        columns = column_group * P.COLUMNS + tl.arange(0, P.COLUMNS)
        acc, m_i, l_i = combine_partials(scratch, slots, lane, columns, P)
        store_result(outputs, (acc,), m_i, l_i, v_scale, rows, (columns,), P.HEAD_DIM_V, P.FIXED_SPLIT)


@triton.jit
def store_partial(scratch, acc, m_i, l_i, columns, slot, wanted, BLOCK_M: tl.constexpr, P: tl.constexpr):
    """Write a state to slot `slot` of the scratch, if `wanted`; `columns` are those that each panel of acc holds."""
    offs_m = tl.arange(0, BLOCK_M)
    rows = slot * P.ROWS + offs_m
    keep = (offs_m < P.ROWS) & wanted
    tl.store(scratch.m_i + rows, m_i, mask=keep)
    tl.store(scratch.l_i + rows, l_i, mask=keep)
    ptrs = scratch.acc + rows.to(tl.int64)[:, None] * P.HEAD_DIM_V
    for i in tl.static_range(len(acc)):
        tl.store(ptrs + columns[i][None, :], acc[i], mask=keep[:, None] & (columns[i] < P.HEAD_DIM_V)[None, :])


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
def combine_group(scratch, slots, lane, P: tl.constexpr):
    """Combine some partials of a row block into the first of them."""
    rows = (slots.first * P.LANES + lane) * P.ROWS + tl.arange(0, P.ROWS)
    for column_group in tl.range(P.BLOCK_DV // P.COLUMNS, num_stages=1):
        columns = column_group * P.COLUMNS + tl.arange(0, P.COLUMNS)
        acc, m_i, l_i = combine_partials(scratch, slots, lane, columns, P)
        tl.debug_barrier()  # all threads have read the partial that is now overwritten
        ptrs = scratch.acc + rows.to(tl.int64)[:, None] * P.HEAD_DIM_V + columns[None, :]
        tl.store(ptrs, acc, mask=(columns < P.HEAD_DIM_V)[None, :])
        if column_group == P.BLOCK_DV // P.COLUMNS - 1:
            tl.store(scratch.m_i + rows, m_i)
            tl.store(scratch.l_i + rows, l_i)


@triton.jit
def combine_partials(scratch, slots, lane, offs_dv, P: tl.constexpr):
    """Return the combined state of a row block's partials, of columns `offs_dv`, in key order.

    With FIXED_SPLIT they are added one by one, as batch invariance requires. Otherwise a round of partials is rescaled
    to one maximum.
    """
    # A round has as many partials as the registers can hold.
    WIDTH: tl.constexpr = max(1, min(8, P.ROOM // (P.ROWS * P.COLUMNS)))
    offs_r = tl.arange(0, P.ROWS)
    offs = offs_r[:, None] * P.HEAD_DIM_V + offs_dv[None, :]
    inside = (offs_dv < P.HEAD_DIM_V)[None, :]
    acc = tl.zeros([P.ROWS, P.COLUMNS], tl.float32)
    m_i = tl.full([P.ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([P.ROWS], tl.float32)
    for first in tl.range(0, slots.num_partials, WIDTH, num_stages=1):
        accs, ms, ls = (), (), ()
        # All loads of a round are in flight together. They bypass L1 (.cg), since other programs wrote the partials.
        for i in tl.static_range(WIDTH):
            # Combining is bound by instructions. So all partials use one block of offsets, and the end of the last
            # round reads the last partial again with weight 0. Decode masks the load of m_i: with a select, ptxas would
            # wait for m_i before it issues the loads of acc, and a round would take two latencies. Drafts select, since
            # a mask would need registers that they lack.
            index = tl.minimum(first + i, slots.num_partials - 1)
            slot = tl.where(index == 0, slots.first, slots.next + (index - 1) * slots.step)
            base = (slot * P.LANES + lane).to(tl.int64) * P.ROWS
            if P.PER_ROW_MASK:
                other_m = tl.load(scratch.m_i + base + offs_r, cache_modifier=".cg")
                other_m = tl.where(first + i < slots.num_partials, other_m, float("-inf"))
            else:
                present = (first + i + 0 * offs_r) < slots.num_partials
                other_m = tl.load(scratch.m_i + base + offs_r, mask=present, other=float("-inf"), cache_modifier=".cg")
            ms = ms + (other_m,)
            ls = ls + (tl.load(scratch.l_i + base + offs_r, cache_modifier=".cg"),)
            acc_ptrs = scratch.acc + base * P.HEAD_DIM_V + offs
            accs = accs + (tl.load(acc_ptrs, mask=inside, other=0.0, cache_modifier=".cg"),)
        if P.FIXED_SPLIT:
            for i in tl.static_range(WIDTH):
                panels, m_i, l_i = combine((acc,), m_i, l_i, (accs[i],), ms[i], ls[i])
                acc = panels[0]
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
