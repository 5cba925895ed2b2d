"""The kernels of `quire.indexer`: logits of multi-query indexers, scores of blocks, and the positions of top scores.

They are plain: one program for a tile of keys, or for a row. Numbers in e4m3 are multiplied as float16, which holds
them exactly.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from quire.dispatch.config import padded, power_of_two
from quire.dispatch.device import device_properties
from quire.dispatch.request import cdiv
from quire.kernels import mods
from quire.kernels.launcher import launch

BLOCK_N, TOKENS = 64, 16  # keys of a tile, and query tokens that a program multiplies it with
MOST_HEADS = 64  # that are multiplied at once
ROWS = 16  # of a program that scores blocks
COLUMNS = 2048  # of a row that are looked at at once
BITS = 8  # of a score in each pass of `top_k_kernel`


@triton.jit
def load_keys(ptrs, keep, DIM: tl.constexpr, BLOCK_D: tl.constexpr, DECODE: tl.constexpr, COMPUTE: tl.constexpr):
    """Load rows of keys, [number, BLOCK_D], with 0 in place of those that are not kept."""
    offs = tl.arange(0, BLOCK_D)
    return DECODE(
        tl.load(ptrs[:, None] + offs[None, :], mask=keep[:, None] & (offs < DIM)[None, :], other=0.0), COMPUTE
    )


@triton.jit
def sum_over_heads(
    k, q_ptr, w_ptr, stride_head, NUM_HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr,
    DECODE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Return the sum over heads of a token of weight * relu(q k), for each key."""
    total = tl.zeros([k.shape[0]], tl.float32)
    for first in tl.static_range(0, NUM_HEADS, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        q = load_keys(q_ptr + head * stride_head, head < NUM_HEADS, DIM, k.shape[1], DECODE, COMPUTE)
        weight = tl.load(w_ptr + head, mask=head < NUM_HEADS, other=0.0).to(tl.float32)
        products = tl.dot(k, tl.trans(q), input_precision="ieee")
        total += tl.sum(tl.maximum(products, 0.0) * weight[None, :], 1)
    return total


@triton.jit(do_not_specialize=["num_tokens", "tokens_each", "num_columns"])
def mqa_logits_kernel(
    q_ptr,  # [num_tokens, NUM_HEADS, DIM]
    k_ptr,  # keys: row n at n * stride_k, or slot s of page p at p * stride_page + s * stride_k
    scale_ptr,  # float32, or None: of key n at n, or of slot s of page p at p * scale_page + s
    w_ptr,  # [num_tokens, NUM_HEADS]
    begin_ptr,  # [num_tokens] int32, the first key of a token; None for 0
    end_ptr,  # int32, the key after the last one, of each token, or with LAST_ENDS of each group's last token
    table_ptr,  # [groups, pages] int32; None without pages
    out_ptr,  # [num_tokens, num_columns] float32
    num_tokens, tokens_each, num_columns, stride_q, stride_head, stride_k, stride_page, scale_page, stride_w,
    stride_table, stride_out,
    NUM_HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, DECODE: tl.constexpr, COMPUTE: tl.constexpr, LAST_ENDS: tl.constexpr,
    FROM_BEGIN: tl.constexpr,  # column 0 of a row is the first key of its token, else key 0
    CLEAN: tl.constexpr,  # columns without a key are written too, -inf
):  # fmt: skip
    """A group of `tokens_each` tokens has the same keys; one program multiplies a tile of them with its tokens."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    first = group * tokens_each
    last = tl.minimum(first + tokens_each, num_tokens)
    k = tl.zeros([BLOCK, BLOCK_D], COMPUTE)
    scale = tl.zeros([BLOCK], tl.float32) + 1.0
    if not FROM_BEGIN:
        if table_ptr is None:
            keep, row = column < num_columns, column.to(tl.int64)
            offset, scale_at = row * stride_k, row
        else:
            most = 0  # the key after the last one of any token
            if LAST_ENDS:
                most = tl.load(end_ptr + group)
            else:
                for token in range(first, last):
                    most = tl.maximum(most, tl.load(end_ptr + token))
            keep = column < most
            page = tl.load(table_ptr + group.to(tl.int64) * stride_table + column // PAGE_SIZE, mask=keep, other=0)
            page, slot = page.to(tl.int64), column % PAGE_SIZE
            offset, scale_at = page * stride_page + slot * stride_k, page * scale_page + slot
        k = load_keys(k_ptr + offset, keep, DIM, BLOCK_D, DECODE, COMPUTE)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + scale_at, mask=keep, other=0.0)
    for token in range(first, last):
        begin = 0
        if begin_ptr is not None:
            begin = tl.maximum(tl.load(begin_ptr + token), 0)
        if LAST_ENDS:
            end = tl.load(end_ptr + group) - tokens_each + 1 + token - first
        else:
            end = tl.load(end_ptr + token)
        at = tl.cast(token, tl.int64)
        key = column
        if FROM_BEGIN:
            key = begin + column
        seen = (key >= begin) & (key < end)
        if tl.max(seen.to(tl.int32), 0) > 0:
            if FROM_BEGIN:
                row = key.to(tl.int64)
                k = load_keys(k_ptr + row * stride_k, seen, DIM, BLOCK_D, DECODE, COMPUTE)
                if scale_ptr is not None:
                    scale = tl.load(scale_ptr + row, mask=seen, other=0.0)
            total = sum_over_heads(
                k, q_ptr + at * stride_q, w_ptr + at * stride_w, stride_head, NUM_HEADS, BLOCK_H, DIM, DECODE, COMPUTE
            )
            result = tl.where(seen, total * scale, float("-inf"))
            tl.store(out_ptr + at * stride_out + column, result, mask=column < num_columns)
        elif CLEAN:
            nothing = tl.full([BLOCK], float("-inf"), tl.float32)
            tl.store(out_ptr + at * stride_out + column, nothing, mask=column < num_columns)


@triton.jit(do_not_specialize=["row_blocks"])
def block_scores_kernel(
    q_ptr,  # [num_tokens, NUM_HEADS, DIM]
    k_ptr,  # [pages, PAGE_SIZE, DIM]
    table_ptr, cu_seqlens_q, seq_lens,  # of the batch; cu_seqlens_q is None where every sequence has one query
    out_ptr,  # [NUM_HEADS, num_tokens, blocks] float32
    row_blocks, stride_q, stride_head, stride_page, stride_slot, stride_table, stride_out_head, stride_out,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # SIZE, padded to a power of two
    PAGE_SIZE: tl.constexpr, DECODE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_M rows (token, head) of a sequence and one block of its keys."""
    seq, row_block, block = tl.program_id(0) // row_blocks, tl.program_id(0) % row_blocks, tl.program_id(1)
    q_start, q_len = seq, 1
    if cu_seqlens_q is not None:
        q_start = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - q_start
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    if row_block * BLOCK_M >= q_len * NUM_HEADS:
        return
    seq_len = tl.load(seq_lens + seq)
    owned = row < q_len * NUM_HEADS
    token, head = (q_start + row // NUM_HEADS).to(tl.int64), row % NUM_HEADS
    position = seq_len - q_len + row // NUM_HEADS
    n = tl.arange(0, BLOCK_SIZE)
    key = block * SIZE + n
    keep = (n < SIZE) & (key < seq_len)
    page = tl.load(table_ptr + seq.to(tl.int64) * stride_table + key // PAGE_SIZE, mask=keep, other=0).to(tl.int64)
    k_ptrs = k_ptr + page * stride_page + key % PAGE_SIZE * stride_slot
    k = load_keys(k_ptrs, keep, DIM, BLOCK_D, DECODE, COMPUTE)
    q = load_keys(q_ptr + token * stride_q + head * stride_head, owned, DIM, BLOCK_D, DECODE, COMPUTE)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    seen = keep[None, :] & (key[None, :] <= position[:, None])
    best = tl.max(tl.where(seen, scores, float("-inf")), 1)
    tl.store(out_ptr + head.to(tl.int64) * stride_out_head + token * stride_out + block, best, mask=owned)


@triton.jit
def load_sortable(scores_ptr, column, begin, end):
    """Return scores as uint32 numbers in their order; 0, the least, for what is no candidate: -inf, NaN and others."""
    x = tl.load(scores_ptr + column, mask=(column >= begin) & (column < end), other=float("-inf")).to(tl.float32)
    bits = x.to(tl.uint32, bitcast=True)
    bits = tl.where(bits == 0x80000000, 0, bits)  # -0.0 is 0.0
    ordered = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where((x > float("-inf")) & (x == x), ordered, 0)


@triton.jit
def digits_of(x, known, STEP: tl.constexpr, BITS: tl.constexpr):
    """Return digit STEP of numbers whose digits before it are `known`; 1 << BITS of others."""
    SHIFT: tl.constexpr = 32 - BITS * (STEP + 1)
    digit = ((x >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
    if STEP > 0:
        digit = tl.where((x >> (SHIFT + BITS)) == known, digit, 1 << BITS)
    return digit


@triton.jit(do_not_specialize=["num_columns", "k"])
def top_k_kernel(
    scores_ptr,  # [rows, num_columns]
    begin_ptr, end_ptr,  # [rows] int32, the candidates of each row; None for all
    out_ptr,  # [rows, k] int32
    num_columns, k, stride_scores, stride_out,
    BLOCK: tl.constexpr, BITS: tl.constexpr, BLOCK_K: tl.constexpr, FROM_BEGIN: tl.constexpr,
):  # fmt: skip
    """One program finds the k-th largest score of a row, BITS bits in each pass, and writes the columns of the top."""
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * stride_scores
    out_ptr += row * stride_out
    begin, end = 0, num_columns
    if begin_ptr is not None:
        begin = tl.maximum(tl.load(begin_ptr + row), 0)
    if end_ptr is not None:
        end = tl.minimum(tl.load(end_ptr + row), num_columns)
    low = begin // BLOCK * BLOCK
    BINS: tl.constexpr = 1 << BITS
    bins = tl.arange(0, 2 * BINS)  # those from BINS on count what does not begin with the bits that are known
    known = tl.zeros([1], tl.uint32)  # the first bits of the k-th largest score
    wanted = tl.zeros([1], tl.int32) + k  # of the scores that begin with them
    for step in tl.static_range(32 // BITS):
        counts = tl.zeros([2 * BINS], tl.int32)
        for first in range(low, end, BLOCK):
            x = load_sortable(scores_ptr, first + tl.arange(0, BLOCK), begin, end)
            counts += tl.histogram(digits_of(x, known, step, BITS), 2 * BINS)
        counts = tl.where(bins < BINS, counts, 0)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # scores with a larger digit
        digit = tl.sum(((bins < BINS) & (above >= wanted)).to(tl.int32), 0)
        digit = tl.minimum(digit, BINS - 1)
        wanted -= tl.sum(tl.where(bins == digit, above, 0), 0)
        known = (known << BITS) | digit.to(tl.uint32)
    # All larger scores, and as many equal ones as are wanted, from the first column on. 0 is no candidate.
    written, equal = tl.zeros([1], tl.int32), tl.zeros([1], tl.int32)
    for first in range(low, end, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = load_sortable(scores_ptr, column, begin, end)
        same = (x == known) & (x > 0)
        number = equal + tl.cumsum(same.to(tl.int32), 0)
        taken = (x > known) | (same & (number <= wanted))
        place = written + tl.cumsum(taken.to(tl.int32), 0) - 1
        position = column
        if FROM_BEGIN:
            position = column - begin
        tl.store(out_ptr + place, position, mask=taken & (place < k))
        written += tl.sum(taken.to(tl.int32), 0)
        equal += tl.sum(same.to(tl.int32), 0)
    offs = tl.arange(0, BLOCK_K)
    for first in range(0, k, BLOCK_K):
        rest = first + offs
        tl.store(out_ptr + rest, tl.full([BLOCK_K], -1, tl.int32), mask=(rest >= written) & (rest < k))


def products_of(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return queries and keys as kernels read them, and the constexprs that say how they are multiplied."""
    native = device_properties(q.device).native_fp8
    quantised = q.dtype in mods.SOFTWARE_DECODERS
    compute = (
        tl.float16 if quantised else {torch.float32: tl.float32, torch.float16: tl.float16}.get(q.dtype, tl.bfloat16)
    )
    meta = {"DECODE": mods.decoder(q.dtype, native), "COMPUTE": compute}
    if quantised and not native:
        q, k = q.view(torch.uint8), k.view(torch.uint8)
    return q, k, meta


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: torch.Tensor | None,
    weights: torch.Tensor,
    begin: torch.Tensor | None,
    end: torch.Tensor,
    table: torch.Tensor | None,
    out: torch.Tensor,
    *,
    tokens_each: int,
    page: tuple[int, int, int] = (0, 0, 0),
    from_begin: bool = False,
    clean: bool = True,
) -> None:
    """Launch `mqa_logits_kernel`; `quire.indexer` has checked the arguments.

    Args:
        q, k, scale, weights, begin, end, table, out: as the kernel takes them.
        tokens_each: tokens of a group, which have the same keys.
        page: tokens of a page, and the strides of pages of k and of scales.
        from_begin, clean: as the kernel takes them.
    """
    num_tokens, num_heads, dim = q.shape
    size, stride_page, scale_page = page
    q, k, products = products_of(q, k)
    meta = products | {
        "NUM_HEADS": num_heads, "BLOCK_H": min(MOST_HEADS, max(16, power_of_two(num_heads))), "DIM": dim,
        "BLOCK_D": max(16, padded(dim)), "BLOCK": BLOCK_N, "PAGE_SIZE": size, "FROM_BEGIN": from_begin, "CLEAN": clean,
        "LAST_ENDS": end.shape[0] * tokens_each == num_tokens and tokens_each > 1 and table is not None,
        "num_warps": 4,
    }  # fmt: skip
    tensors = q, k, scale, weights, begin, end, table, out
    numbers = num_tokens, tokens_each, out.shape[1], *q.stride()[:2], k.stride(-2), stride_page, scale_page
    strides = weights.stride(0), 0 if table is None else table.stride(0), out.stride(0)
    grid = cdiv(out.shape[1], BLOCK_N), cdiv(num_tokens, tokens_each)
    launch(mqa_logits_kernel, grid, (*tensors, *numbers, *strides), meta)


def block_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    block_size: int,
    max_query_len: int,
) -> None:
    """Launch `block_scores_kernel`; `quire.indexer` has checked the arguments."""
    _, num_heads, dim = q.shape
    row_blocks = cdiv(max_query_len * num_heads, ROWS)
    q, keys, products = products_of(q, keys)
    meta = products | {
        "NUM_HEADS": num_heads, "DIM": dim, "BLOCK_D": max(16, padded(dim)), "BLOCK_M": ROWS, "SIZE": block_size,
        "BLOCK_SIZE": max(16, power_of_two(block_size)), "PAGE_SIZE": keys.shape[1], "num_warps": 4,
    }  # fmt: skip
    strides = *q.stride()[:2], *keys.stride()[:2], table.stride(0), *out.stride()[:2]
    grid = seq_lens.shape[0] * row_blocks, out.shape[2]
    launch(block_scores_kernel, grid, (q, keys, table, cu_seqlens_q, seq_lens, out, row_blocks, *strides), meta)


def top_k(
    scores: torch.Tensor, begin: torch.Tensor | None, end: torch.Tensor | None, out: torch.Tensor, *, from_begin: bool
) -> None:
    """Launch `top_k_kernel`; `quire.indexer` has checked the arguments."""
    rows, columns = scores.shape
    meta = {"BLOCK": COLUMNS, "BITS": BITS, "BLOCK_K": 512, "FROM_BEGIN": from_begin, "num_warps": 8}
    numbers = columns, out.shape[1], scores.stride(0), out.stride(0)
    launch(top_k_kernel, (rows,), (scores, begin, end, out, *numbers), meta)
