"""Paged attention in one file: decode, prompts and chunks of prompts, from nothing, in plain Triton.

A server keeps the keys and values of its sequences in pages. This file computes attention over such pages, in bfloat16
or float16, causal, with grouped query heads (GQA). It has two kernels: `attend_kernel` does the work, and
`combine_kernel` joins what programs found that shared the keys of one sequence. Read it from top to bottom.

    python examples/one_file.py     # a check against float64, and on a GPU a table of times

Without a GPU, Triton's interpreter runs the kernels on CPU tensors, line by line: set a breakpoint and look.
Words: a *program* is what Triton launches many of (CUDA's thread block). An *SM* is a core that runs programs; an H200
has 132. A *row* is one query head of one token. A *tile* is BLOCK_N keys of one sequence.
"""

import argparse
import math
import os
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton asks when a kernel is defined

import triton
import triton.language as tl
from triton.testing import do_bench_cudagraph

MAX_SPLIT_ROWS = tl.constexpr(1024)  # sequences of more rows have work for many programs, so their keys are not split


# ---- The loop over tiles of keys ----
@triton.jit
def load_pages(table_row, key, table_width, PAGE_SIZE: tl.constexpr):
    """Return the page of each key, [BLOCK_N]. Beyond the sequence it is any page, and no key is loaded from it."""
    return tl.load(table_row + tl.minimum(key // PAGE_SIZE, table_width - 1))


@triton.jit
def attend_tiles(
    acc, largest, total, page, begin, end,  # the state, the pages of the first tile, and the keys to go through
    q, positions, seq_len, exponent_scale, k_ptr, v_ptr, table_row, table_width, kv_head,
    MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend to keys `begin` to `end`, a tile at a time, and return the state and the pages of the tile after them.

    The state of a row is (acc, largest, total): the weighted sum of values, the largest score, and the sum of weights.

    **The online softmax.** softmax needs the largest of all scores before it can take the first exponential. But if
    weights were taken relative to a smaller maximum m than the true one m', they are all wrong by the same factor,
    2^(m - m'). So a tile is enough: take its scores, see whether the maximum grew, correct what was summed so far by
    that factor, and add the tile. No row of scores is ever stored.

    **exp2.** The hardware has 2^x, not e^x. e^(scale * s) is 2^(scale * log2(e) * s), so the host multiplies the
    softmax scale by log2(e), once, and one fused multiply-add per score makes the exponent.

    **Pages.** Key i of a sequence is in slot i % PAGE_SIZE of page table[i // PAGE_SIZE]. To load a key takes two trips
    to memory, one after the other: its page, then the key. So the pages of the next tile are loaded while this one is
    computed. Triton's software pipeline (`num_stages`) then sees loads of K and V whose addresses are known early, and
    keeps several tiles in flight; with the page loaded right before the key, every tile would wait for both trips.
    """
    dims = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    for first in tl.range(begin, end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        next_page = load_pages(table_row, key + BLOCK_N, table_width, PAGE_SIZE)
        # A page is [PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM]. A large cache has more elements than an int32 can count.
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        offsets = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]  # [BLOCK_N, HEAD_DIM]
        # What lies after the sequence may be NaN, and 0 * NaN is NaN, so it must not be read.
        exists = (key < seq_len)[:, None] if MASKED else None
        k = tl.load(k_ptr + offsets, mask=exists, other=0.0 if MASKED else None)
        v = tl.load(v_ptr + offsets, mask=exists, other=0.0 if MASKED else None)

        scores = tl.dot(q, tl.trans(k))  # [BLOCK_M, BLOCK_N], float32
        if MASKED:  # causal: a token sees the keys up to its own position
            scores = tl.where(key[None, :] <= positions[:, None], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1) * exponent_scale)
        weights = tl.exp2(scores * exponent_scale - new_largest[:, None])
        correction = tl.exp2(largest - new_largest)
        total = total * correction + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None])
        largest, page = new_largest, next_page
    return acc, largest, total, page


# ---- Which rows and which keys a program has ----
@triton.jit
def is_split(seq_len, q_len, split_keys, GROUP: tl.constexpr):
    """Whether the keys of a sequence are split over programs. Both kernels ask, so that they agree."""
    return tl.where(q_len * GROUP <= MAX_SPLIT_ROWS, seq_len, 0) > split_keys


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_width"])
def attend_kernel(
    q_ptr,  # [num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM]
    k_ptr, v_ptr,  # [num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM]
    out_ptr,  # as q_ptr
    partial_out_ptr,  # [num_splits, num_tokens, NUM_KV_HEADS * GROUP, HEAD_DIM] float32, or None: no keys are split
    partial_lse_ptr,  # [num_splits, num_tokens, NUM_KV_HEADS * GROUP] float32, or None
    page_table_ptr,  # [num_seqs, table_width] int32
    seq_lens_ptr,  # [num_seqs] int32: keys of each sequence, those of its queries included
    cu_seqlens_q_ptr,  # [num_seqs + 1] int32: where each sequence's queries begin; None: each has one query
    exponent_scale, num_seqs, num_tokens, table_width,
    split_keys,  # keys of a split, a multiple of BLOCK_N
    SEQS: tl.constexpr,  # num_seqs, rounded up to a power of two
    GROUP: tl.constexpr,  # query heads that share a KV head
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, FULL_TILES: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one sequence and KV head, and one split of their keys.
    Grid: [NUM_KV_HEADS, row blocks, splits]. Programs of one page's heads are neighbours, as the heads are in memory.
    """
    kv_head, split = tl.program_id(0), tl.program_id(2)

    # **GQA rows are the M of the product.** A GPU multiplies matrices some fifteen times as fast as it sums single
    # rows, but one decoding token is one row. The GROUP query heads that share a KV head read the same keys, and so do
    # neighbouring tokens of a prompt. So (token, head of the group) is a row, and BLOCK_M rows share each key that is
    # loaded. For decode, most of 16 rows may be empty; that costs nothing, since decode waits for memory.
    if cu_seqlens_q_ptr is None:
        seq = tl.program_id(1)
        q_start, q_len, first_row = seq, 1, 0
    else:
        # A sequence has q_len * GROUP rows. Give each a spare row block, and the first block of sequence s is number
        # cu_seqlens_q[s] * GROUP // BLOCK_M + s, with no sum over sequences. The last blocks of a causal prompt see the
        # most keys, so they start first: what is left at the end is short.
        block = tl.num_programs(1) - 1 - tl.program_id(1)
        s = tl.arange(0, SEQS)
        first_block = tl.load(cu_seqlens_q_ptr + s, mask=s < num_seqs, other=0) * GROUP // BLOCK_M + s
        seq = tl.sum(((first_block <= block) & (s < num_seqs)).to(tl.int32), 0) - 1
        q_start = tl.load(cu_seqlens_q_ptr + seq)
        q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
        first_row = (block - (q_start * GROUP // BLOCK_M + seq)) * BLOCK_M
        if first_row >= q_len * GROUP:
            return
    seq_len = tl.load(seq_lens_ptr + seq)
    row = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    exists = token < q_len
    first_position = seq_len - q_len  # of the sequence's first query: a chunk of a prompt has keys before it
    positions = first_position + token

    # **Why split.** Eight KV heads of one decoding sequence are eight programs, and 124 of 132 SMs would be idle. A
    # softmax over some of the keys can be corrected later, as one over the first tiles can. So each program takes
    # split_keys of the keys and stores its state, and `combine_kernel` joins them. This is flash-decoding.
    begin = split * split_keys
    end = tl.minimum(first_position + tl.cdiv(first_row + BLOCK_M, GROUP), seq_len)
    if partial_out_ptr is not None:
        stores_partial = is_split(seq_len, q_len, split_keys, GROUP)
        if stores_partial:
            end = tl.minimum(begin + split_keys, end)
        if (split > 0) & (~stores_partial | (begin >= end)):
            return

    table_row = page_table_ptr + seq.to(tl.int64) * table_width
    page = load_pages(table_row, begin + tl.arange(0, BLOCK_N), table_width, PAGE_SIZE)
    dims = tl.arange(0, HEAD_DIM)
    rows = (q_start + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head  # [BLOCK_M]
    q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + dims[None, :], mask=exists[:, None], other=0.0)

    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    largest = tl.full([BLOCK_M], -1e38, tl.float32)  # not -inf: a row that sees no key yet would have inf - inf
    total = tl.zeros([BLOCK_M], tl.float32)
    # **Full tiles without masks.** Every row sees every key up to the block's first position. These tiles need no
    # comparison of keys with positions, and their loads no masks. Of a long prompt that is nearly all tiles. For
    # decode, which waits for memory, masks are free, and one loop drains the pipeline once.
    full_end = (first_position + first_row // GROUP + 1) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(0 if FULL_TILES else 1, 2):
        stop = end if masked else tl.maximum(tl.minimum(full_end, end), begin)
        acc, largest, total, page = attend_tiles(
            acc, largest, total, page, begin, stop,
            q, positions, seq_len, exponent_scale, k_ptr, v_ptr, table_row, table_width, kv_head,
            masked, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, BLOCK_N,
        )  # fmt: skip
        begin = stop

    total = tl.where(total > 0, total, 1.0)  # rows without keys: 0, not NaN
    acc = acc / total[:, None]
    offsets = rows[:, None] * HEAD_DIM + dims[None, :]
    if partial_out_ptr is not None:
        # **Why the log-sum-exp.** A finished part is (out, lse): out = acc / total, and lse = log2 of the sum of
        # 2^score over its keys. That is all another part has to know: it weighs 2^lse. One number takes the place of
        # two, and unlike a sum of exponentials it cannot overflow.
        at = split.to(tl.int64) * num_tokens * (NUM_KV_HEADS * GROUP)
        in_part = token < tl.where(stores_partial, q_len, 0)
        tl.store(partial_out_ptr + at * HEAD_DIM + offsets, acc, mask=in_part[:, None])
        tl.store(partial_lse_ptr + at + rows, largest + tl.log2(total), mask=in_part)
        exists = token < tl.where(stores_partial, 0, q_len)
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=exists[:, None])


# ---- Joining the splits ----
@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def combine_kernel(
    partial_out_ptr, partial_lse_ptr, out_ptr, seq_lens_ptr, cu_seqlens_q_ptr,  # as in `attend_kernel`
    num_seqs, num_tokens, split_keys,
    SEQS: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """One program: one token and query head, whose splits it takes SPLITS at a time. Grid: [num_tokens, query heads].
    It is the online softmax again: the score of a split is its lse, and its value is its output. The order is that of
    the keys, whichever program was ready first, so the result is the same bit for bit each time.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    if cu_seqlens_q_ptr is None:
        seq, q_start, q_len = token, token, 1
    else:
        s = tl.arange(0, SEQS)
        starts = tl.load(cu_seqlens_q_ptr + s, mask=s < num_seqs, other=0)
        seq = tl.sum(((starts <= token) & (s < num_seqs)).to(tl.int32), 0) - 1
        q_start = tl.load(cu_seqlens_q_ptr + seq)
        q_len = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    seq_len = tl.load(seq_lens_ptr + seq)
    if not is_split(seq_len, q_len, split_keys, GROUP):
        return
    num_splits = tl.cdiv(seq_len - q_len + token - q_start + 1, split_keys)  # those in which this token sees a key
    row = token.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    dims = tl.arange(0, HEAD_DIM)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    largest, total = -1e38, 0.0
    for first in tl.range(0, num_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)  # [SPLITS]
        at = split.to(tl.int64) * num_tokens * (NUM_KV_HEADS * GROUP) + row
        lse = tl.load(partial_lse_ptr + at, mask=split < num_splits, other=float("-inf"))
        parts = tl.load(
            partial_out_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=(split < num_splits)[:, None], other=0.0
        )  # [SPLITS, HEAD_DIM]
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        weights = tl.exp2(lse - new_largest)
        correction = tl.exp2(largest - new_largest)
        total = total * correction + tl.sum(weights, 0)
        acc = acc * correction + tl.sum(weights[:, None] * parts, 0)
        largest = new_largest
    tl.store(out_ptr + row * HEAD_DIM + dims, (acc / total).to(out_ptr.dtype.element_ty))


# ---- The host ----
class Batch(NamedTuple):
    """Sequences, as a server knows them: the lengths are on the device, and bounds of them on the host."""

    page_table: torch.Tensor  # [num_seqs, table_width] int32
    seq_lens: torch.Tensor  # [num_seqs] int32, queries included
    cu_seqlens_q: torch.Tensor | None  # [num_seqs + 1] int32, or None: each sequence has one query
    max_query_len: int
    max_seq_len: int


def device_of(tensor: torch.Tensor) -> tuple[int, int, bool]:
    """Return the SMs of a GPU, the bytes of shared memory of a program, and whether it is a Hopper GPU."""
    if tensor.device.type != "cuda":  # in the interpreter
        return 4, 64 << 10, False
    of = torch.cuda.get_device_properties(tensor.device)
    is_hopper = torch.version.hip is None and of.major == 9
    return of.multi_processor_count, getattr(of, "shared_memory_per_block_optin", 64 << 10), is_hopper


def choose_tile(q: torch.Tensor, num_kv_heads: int, batch: Batch) -> dict[str, int]:
    """Choose tiles, warps and stages, by the rows of the longest sequence and of the average one.

    Decode waits for memory, so what counts is how many bytes are on their way: 4.8 TB/s times 0.8 us of latency is
    4 MB, 29 KB for each SM of an H200. A tile of 64 keys and values is 32 KB, and two are in flight in each program.
    Prompts wait for tensor cores, which multiply 64 rows in four warps of a Hopper GPU. 128 rows halve what is loaded.
    """
    (_, shared_memory, is_hopper), (num_tokens, num_q_heads, head_dim) = device_of(q), q.shape
    group = num_q_heads // num_kv_heads
    if batch.max_query_len * group <= 16:
        block_m, block_n, num_warps, num_stages = 16, 64, 4, 3
    elif not is_hopper:
        block_m, block_n, num_warps, num_stages = 64, 32, 4, 2
    elif num_tokens * group <= 256 * len(batch.seq_lens):
        block_m, block_n, num_warps, num_stages = 64, 64, 4, 3
    else:
        block_m, block_n, num_warps, num_stages = (128, 64, 4, 3) if head_dim <= 64 else (128, 128, 8, 3)
    while 2 * head_dim * (block_m + 2 * num_stages * block_n) > shared_memory and block_n > 16:  # queries, keys, values
        block_n //= 2
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages}


def choose_split(q: torch.Tensor, num_kv_heads: int, batch: Batch, tile: dict[str, int]) -> int:
    """Return the keys of a split, a multiple of BLOCK_N; at least `max_seq_len` where no keys are split.

    With few programs, SMs are idle. With too many, each has little to do for what it takes to start and to store a
    part. So there are as many as run at once, of 256 keys or more. Where decode has that many without splits, a
    program takes 1,024 keys at most: lengths may differ, and a long one would be waited for at the end.
    """
    num_seqs, rows = len(batch.seq_lens), batch.max_query_len * q.shape[1] // num_kv_heads
    if rows > MAX_SPLIT_ROWS.value and len(q) == num_seqs * batch.max_query_len:  # no sequence has few rows
        return batch.max_seq_len
    programs = num_seqs * num_kv_heads * triton.cdiv(min(rows, MAX_SPLIT_ROWS.value), tile["BLOCK_M"])
    at_once = device_of(q)[0] * 8 // tile["num_warps"]
    is_full = programs >= at_once and tile["BLOCK_M"] == 16
    keys = 1024 if is_full else triton.cdiv(batch.max_seq_len, max(1, at_once // programs))
    return max(256, triton.cdiv(keys, tile["BLOCK_N"]) * tile["BLOCK_N"])


def attention(
    q: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]: the queries of all sequences, one after the other
    k_pages: torch.Tensor, v_pages: torch.Tensor,  # [num_pages, page_size, num_kv_heads, head_dim]
    batch: Batch, tile: dict[str, int] | None = None, split_keys: int | None = None,  # in place of what is chosen
) -> torch.Tensor:  # fmt: skip
    """Return causal attention, as q. Nothing is read back from the device, so a CUDA graph can capture the call."""
    (num_tokens, num_q_heads, head_dim), (_, page_size, num_kv_heads, _) = q.shape, k_pages.shape
    if num_q_heads % num_kv_heads or not all(t.is_contiguous() for t in (q, k_pages, v_pages, batch.page_table)):
        raise ValueError("q, pages and page table must be contiguous, and num_q_heads a multiple of num_kv_heads")
    (num_seqs, table_width), is_decode = batch.page_table.shape, batch.cu_seqlens_q is None
    group = num_q_heads // num_kv_heads
    tile = tile or choose_tile(q, num_kv_heads, batch)
    split_keys = split_keys or choose_split(q, num_kv_heads, batch, tile)
    num_splits = triton.cdiv(batch.max_seq_len, split_keys)
    row_blocks = num_seqs if is_decode else num_tokens * group // tile["BLOCK_M"] + num_seqs

    out, partial_out, partial_lse = torch.empty_like(q), None, None
    if num_splits > 1:
        partial_out = torch.empty(num_splits, *q.shape, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(num_splits, *q.shape[:2], dtype=torch.float32, device=q.device)
    constants = {"GROUP": group, "NUM_KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "enable_fp_fusion": True}
    constants["SEQS"] = 1 if is_decode else triton.next_power_of_2(num_seqs)
    attend_kernel[num_kv_heads, row_blocks, num_splits](
        q, k_pages, v_pages, out, partial_out, partial_lse, batch.page_table, batch.seq_lens, batch.cu_seqlens_q,
        head_dim**-0.5 * math.log2(math.e), num_seqs, num_tokens, table_width, split_keys,
        PAGE_SIZE=page_size, FULL_TILES=batch.max_query_len > 1, **constants, **tile,
    )  # fmt: skip
    if num_splits > 1:
        combine_kernel[num_tokens, num_q_heads](
            partial_out, partial_lse, out, batch.seq_lens, batch.cu_seqlens_q, num_seqs, num_tokens, split_keys,
            SPLITS=16, num_warps=2, **constants,
        )  # fmt: skip
    return out


# ---- The check ----
class Problem(NamedTuple):
    """Inputs of `attention`, and the lengths on the host."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    batches: list[Batch]  # of the same lengths, each on other pages
    lens: list[tuple[int, int]]  # queries and keys of each sequence


def make_problem(
    lens: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype, copies: int = 1
) -> Problem:
    """Fill pages of 16 tokens with random numbers, and hand them to the sequences in random order."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_q_heads, num_kv_heads, head_dim = heads
    query_lens, seq_lens = zip(*lens, strict=True)
    pages, int32, batches = [triton.cdiv(n, 16) for n in seq_lens], {"dtype": torch.int32, "device": device}, []
    order = torch.randperm(copies * sum(pages), **int32)
    starts = torch.tensor([0, *accumulate(query_lens)], **int32) if max(query_lens) > 1 else None
    for numbers in order.split(sum(pages)):
        table = torch.zeros(len(lens), max(pages), **int32)
        for row, owned in zip(table, numbers.split(pages), strict=True):
            row[: len(owned)] = owned
        batches.append(Batch(table, torch.tensor(seq_lens, **int32), starts, max(query_lens), max(seq_lens)))
    shapes = (sum(query_lens), num_q_heads, head_dim), *[(len(order), 16, num_kv_heads, head_dim)] * 2
    return Problem(*(torch.randn(shape, device=device, dtype=dtype) for shape in shapes), batches, lens)


def reference(problem: Problem) -> torch.Tensor:
    """Compute the formula in float64, softmax(q k^T / sqrt(head_dim)) v, one sequence at a time."""
    parts, group = [], problem.q.shape[1] // problem.k_pages.shape[2]
    queries = problem.q.double().split([n for n, _ in problem.lens])
    for q, (_, seq_len), row in zip(queries, problem.lens, problem.batches[0].page_table.long(), strict=True):
        both = (pages[row].flatten(0, 1)[:seq_len] for pages in (problem.k_pages, problem.v_pages))
        k, v = (of_keys.double().repeat_interleave(group, 1) for of_keys in both)  # [keys, num_q_heads, head_dim]
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1 + len(k) - len(q))  # keys after the query's position
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v))
    return torch.cat(parts)


def check(dtype: torch.dtype) -> None:
    """Compare with the reference, and print the largest errors.

    Weights and results are rounded to the dtype, each by at most half a unit in the last place. So an error is at most
    one unit of the largest value; what float32 adds is far smaller.
    """
    heads, long = ((32, 8, 128), 9000) if torch.cuda.is_available() else ((4, 2, 16), 700)  # the interpreter is slow
    for name, lens in {
        "decode, one sequence, split": [(1, long)],
        "decode, ragged": [(1, n) for n in (1, 15, 16, 257, long // 2)],
        "a prompt": [(long // 6, long // 6)],
        "chunks, and decoding sequences": [(1, 300), (9, 400), (40, 40), (1, 1), (33, long)],
    }.items():
        problem = make_problem(lens, heads, dtype)
        largest = problem.v_pages.abs().max().item()
        for (_, seq_len), table_row in zip(lens, problem.batches[0].page_table, strict=True):
            if seq_len % 16:  # what lies after a sequence must not be read
                for pages in (problem.k_pages, problem.v_pages):
                    pages[table_row[seq_len // 16], seq_len % 16 :] = math.nan
        out = attention(problem.q, problem.k_pages, problem.v_pages, problem.batches[0])
        error, bound = (out.double() - reference(problem)).abs().max().item(), torch.finfo(dtype).eps * largest
        assert error <= bound, f"{name}: the error is {error:.1e}, more than {bound:.1e}"
        print(f"{name:32} error {error:.1e}, at most {bound:.1e}")


# ---- The times ----
def ragged(count: int, low: int, high: int, seed: int) -> list[int]:
    return torch.randint(low, high + 1, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


ROWS = {  # of README's table: queries and keys of each sequence
    "decode, 1 sequence of 128 keys": [(1, 128)],
    "decode, 8 x 1,024": [(1, 1024)] * 8,
    "decode, 64 sequences of 16 to 4,096": [(1, n) for n in ragged(64, 16, 4096, 1)],
    "decode, 128 x 4,096": [(1, 4096)] * 128,
    "decode, 256 x 1,024": [(1, 1024)] * 256,
    "decode, 1 x 131,072": [(1, 131072)],
    "prefill, 2,048 tokens": [(2048, 2048)],
    "prefill, 8,192": [(8192, 8192)],
    "prefill, 4,096, head_dim 64": [(4096, 4096)],
    "chunk of 64 tokens on 16,384 keys": [(64, 16384)],
    "32 decoding sequences and 2 prompts": [(1, n) for n in ragged(32, 512, 4096, 15)]
    + [(n, n) for n in ragged(2, 64, 1024, 15)],
}
Call = Callable[[Batch], object] | None


def sdpa(p: Problem) -> Call:
    """PyTorch's attention, on contiguous copies of the pages, of sequences of one length, without chunks."""
    q_len, seq_len = p.lens[0]
    if len(set(p.lens)) > 1 or 1 < q_len < seq_len:
        return None
    copies = {}
    for batch in p.batches:
        both = (pages[batch.page_table.long()].flatten(1, 2)[:, :seq_len] for pages in (p.k_pages, p.v_pages))
        copies[id(batch)] = [of_keys.transpose(1, 2).contiguous() for of_keys in both]
    q = p.q.unflatten(0, (len(p.lens), q_len)).transpose(1, 2)
    options = {"is_causal": q_len > 1, "enable_gqa": True}
    return lambda batch: torch.nn.functional.scaled_dot_product_attention(q, *copies[id(batch)], **options)


def flash_attention_3(p: Problem) -> Call:
    """FlashAttention 3 as vLLM ships it. What it does once per step is not timed."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata
    except ImportError:
        return None
    b, (_, num_q_heads, head_dim), num_seqs = p.batches[0], p.q.shape, len(p.lens)
    starts = torch.tensor([0, *accumulate(n for n, _ in p.lens)], dtype=torch.int32, device=p.q.device)
    both = {"max_seqlen_q": b.max_query_len, "max_seqlen_k": b.max_seq_len, "cu_seqlens_q": starts, "causal": True}
    metadata = get_scheduler_metadata(
        batch_size=num_seqs, num_heads_q=num_q_heads, num_heads_kv=p.k_pages.shape[2], headdim=head_dim, **both,
        cache_seqlens=b.seq_lens, qkv_dtype=p.q.dtype, page_size=p.k_pages.shape[1], window_size=(-1, -1), num_splits=0,
    )  # fmt: skip
    both |= {"seqused_k": b.seq_lens, "softmax_scale": head_dim**-0.5, "window_size": [-1, -1], "fa_version": 3}
    both |= {"scheduler_metadata": metadata, "out": torch.empty_like(p.q)}
    return lambda batch: flash_attn_varlen_func(p.q, p.k_pages, p.v_pages, block_table=batch.page_table, **both)


def with_quire(p: Problem) -> Call:
    try:
        import quire
    except ImportError:
        return None
    heads = {"num_q_heads": p.q.shape[1], "num_kv_heads": p.k_pages.shape[2], "head_dim": p.q.shape[2]}
    spec = quire.AttentionSpec(**heads, dtype=p.q.dtype)
    cache, plans = quire.PagedKVCache(p.k_pages, p.v_pages, "NHD"), {}
    for b in p.batches:
        bounds = {"max_query_len": b.max_query_len, "max_seq_len": b.max_seq_len, "num_tokens": len(p.q)}
        plans[id(b)] = quire.plan(spec, quire.Batch(b.page_table, b.seq_lens, b.cu_seqlens_q), **bounds)
    return lambda batch: quire.attention(p.q, cache, plans[id(batch)])


def time_us(call: Callable[[Batch], object], batches: list[Batch]) -> float:
    """Return the median time of a call in us: of a CUDA graph of calls, each on other pages, so that L2 has none."""
    return 1e3 * do_bench_cudagraph(lambda: [call(b) for b in batches], return_mode="median") / len(batches)


def print_times(dtype: torch.dtype) -> None:
    """Print the times of every row, and of what else is installed."""
    calls = {"this file": lambda p: lambda batch: attention(p.q, p.k_pages, p.v_pages, batch)}
    calls |= {"PyTorch, copies": sdpa, "FlashAttention 3": flash_attention_3, "Quire": with_quire}
    print(f"\n{f'us, {torch.cuda.get_device_name()}':36}", *(f"{name:>16}" for name in calls))
    for name, lens in ROWS.items():
        heads = (32, 8, 64 if "head_dim 64" in name else 128)
        copies = 300_000_000 // (4 * heads[1] * heads[2] * sum(n for _, n in lens))  # several times as large as L2
        problem = make_problem(lens, heads, dtype, min(128, max(2, copies)))
        found = [make(problem) for make in calls.values()]
        times = ("-" if call is None else f"{time_us(call, problem.batches):.1f}" for call in found)
        print(f"{name:36}", *(f"{time:>16}" for time in times), flush=True)


def main() -> None:
    """Check, and print times where there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    dtypes = ("bfloat16", "float16") if torch.cuda.is_available() else ("float16",)  # what the interpreter has
    parser.add_argument("--dtype", choices=dtypes, default=dtypes[0], help="of queries, keys and values")
    parser.add_argument("--check", action="store_true", help="check, and measure nothing")
    args = parser.parse_args()
    check(getattr(torch, args.dtype))
    if torch.cuda.is_available() and not args.check:
        print_times(getattr(torch, args.dtype))


if __name__ == "__main__":
    main()
