"""Unions of the lists of neighbouring query tokens, so that keys which they have in common are gathered once.

A prompt's neighbouring tokens choose much the same keys, and gathering rows is what attention to lists costs. So the
lists of UNION tokens become one list of slots. An entry is `slot << UNION`, with bit i set where token i's list names
the slot. `chosen_hopper_kernel` attends to it with the rows of all these tokens in one row block.

A program has a bitmap of all slots of the cache, MAP_BITS each: which tokens of its union have named one. Token by
token, it sets the bits of a list's slots, and appends those that had none. Then it reads each slot's bits, and clears
them. Where lists add more than NEW sixteenths of their entries, attending to each is faster. There is no union then.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.chosen.kernel import find_sequence
from quire.kernels.chosen_hopper import launch
from quire.kernels.schedule import Lengths

MAP_BITS = tl.constexpr(launch.MOST_UNITED)  # of a slot, one for each token of a union
SLOTS_OF_WORD = tl.constexpr(launch.SLOTS_OF_WORD)
NEW = tl.constexpr(launch.NEW)
NUMBERS = (
    "num_words", "room", "num_tokens", "num_seqs", "width", "stride_list", "stride_lens", "stride_table", "causal",
)  # fmt: skip


class Lists(NamedTuple):
    """The lists of a batch, and what says which slots their entries name."""

    indices: Any  # with the next four, what `lists.TokenLists` begins with
    lens: Any
    width: Any
    stride: Any
    stride_lens: Any
    page_table: Any  # None where entries are slots
    stride_table: Any
    kv: Any  # schedule.Lengths
    num_seqs: Any
    causal: Any


@triton.jit(do_not_specialize=NUMBERS)
def unite_lists_kernel(
    indices,
    num_tokens,
    num_words,  # of a bitmap
    entries_ptr,  # [unions, room] int32
    counts_ptr,  # [unions] int32: entries of a union, -1 where there is none
    maps_ptr,  # [programs, num_words] int32
    room,
    page_table, seq_lens, cu_seqlens_q, query_offsets, num_seqs,
    list_lens, width, stride_list, stride_lens,
    causal,  # whether a token sees no key after itself, as a number
    stride_table,
    PAGE_SIZE: tl.constexpr, UNION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    ALL: tl.constexpr = (1 << UNION) - 1
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv = Lengths(seq_lens, cu_seqlens_q, query_offsets, None, None)
    lists = Lists(
        indices, list_lens, width, stride_list, stride_lens, page_table, stride_table, kv, num_seqs, causal
    )  # fmt: skip
    bits = maps_ptr + tl.program_id(0).to(tl.int64) * num_words
    i = tl.arange(0, BLOCK)
    for first in range(0, num_words, BLOCK):
        tl.store(bits + first + i, 0, mask=first + i < num_words)
    tokens = tl.minimum(num_tokens, tl.load(cu_seqlens_q + num_seqs))
    union = tl.program_id(0)
    while union * UNION < tokens:
        entries = entries_ptr + union.to(tl.int64) * room
        token, last = union * UNION, tl.minimum(union * UNION + UNION, tokens)
        count, most, bit = union * 0, union * 0, 1
        while (token < last) & (count <= most):
            tl.debug_barrier()  # all bits are cleared, or those of the token before are set
            length, table, end = find_list(lists, token)
            for first in range(0, length, BLOCK):
                slots = load_slots(lists, table, end, token, first + i, length, PAGE_SIZE)
                words, shift = place_of(bits, slots)
                before = tl.atomic_or(words, bit << shift, mask=slots >= 0, sem="relaxed") >> shift & ALL
                is_new = (slots >= 0) & (before == 0)
                tl.store(entries + count + tl.cumsum(is_new.to(tl.int32), 0) - 1, slots, mask=is_new)
                count += tl.sum(is_new.to(tl.int32))
            most += tl.where(bit == 1, length, length * NEW // 16)
            bit *= 2
            token += 1
        tl.debug_barrier()
        for first in range(0, count, BLOCK):
            slots = tl.load(entries + first + i, mask=first + i < count, other=-1)
            words, shift = place_of(bits, slots)
            before = tl.atomic_and(words, ~(ALL << shift), mask=slots >= 0, sem="relaxed") >> shift & ALL
            tl.store(entries + first + i, slots << UNION | before, mask=first + i < count)
        tl.store(counts_ptr + union, tl.where(count <= most, count, -1))
        union += tl.num_programs(0)


@triton.jit
def find_list(lists, token):
    """Return the length of a token's list, its sequence's pages, and where the keys end that it may see."""
    length = token * 0 + lists.width
    if lists.lens is not None:
        length = tl.minimum(tl.load(lists.lens + token.to(tl.int64) * lists.stride_lens), length)
    if lists.page_table is None:
        return length, lists.indices, length
    else:
        seq, end, _ = find_sequence(lists.kv, lists.kv.cu_seqlens_q, token, lists.num_seqs, True)
        end = tl.where(lists.causal > 0, end, tl.load(lists.kv.seq_lens + seq))
        return length, lists.page_table + seq.to(tl.int64) * lists.stride_table, end


@triton.jit
def load_slots(lists, table, end, token, i, length, PAGE_SIZE: tl.constexpr):
    """Load entries of a token's list, as slots; negative after its end, and where it may not see what they name."""
    slots = tl.load(lists.indices + token.to(tl.int64) * lists.stride + i, mask=i < length, other=-1)
    if lists.page_table is not None:
        seen = (slots >= 0) & (slots < end)
        pages = tl.load(table + slots // PAGE_SIZE, mask=seen, other=0).to(tl.int32)
        slots = tl.where(seen, pages * PAGE_SIZE + slots % PAGE_SIZE, -1)
    return slots


@triton.jit
def place_of(bits, slots):
    """Return the words that have slots' bits, and where these bits begin."""
    slots = tl.maximum(slots, 0)
    return bits + slots // SLOTS_OF_WORD, slots % SLOTS_OF_WORD * MAP_BITS
