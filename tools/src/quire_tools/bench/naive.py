"""A simple Triton kernel for paged attention, to learn from and to compare with: one program per query token and head.

The grid is [num_tokens, num_q_heads].
A program loads its query and loops over the keys that it sees, BLOCK_N at a time.
It looks up the page of each key and keeps a running softmax.
What makes it slow, and what Quire's kernels do instead:

* The heads of a group read the same keys, one program after the other. A program of `portable/` has the rows of all.
* One row is a product of a vector and a matrix, so the tensor cores are idle. They need 16 rows or more.
* A long sequence is one long loop in one program. In `portable/`, programs have equal partitions of the keys.
* The page of a key is loaded right before the key. `find_pages` runs one tile ahead.
"""

import torch
import triton
import triton.language as tl

import quire


@triton.jit
def naive_kernel(
    q_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, num_kv_heads, HEAD_DIM]
    v_ptr,  # same
    out_ptr,  # [num_tokens, num_q_heads, HEAD_DIM]
    page_table,  # [num_seqs, stride_table] int32
    seq_of,  # [num_tokens] int32, which sequence owns the token
    pos_of,  # [num_tokens] int32, the token's position among the keys of its sequence
    scale, stride_table,
    NUM_Q_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_d = tl.arange(0, BLOCK_D)
    inside = offs_d < HEAD_DIM
    at = (token * NUM_Q_HEADS + head) * HEAD_DIM + offs_d
    q = tl.load(q_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    row = page_table + tl.load(seq_of + token).to(tl.int64) * stride_table
    pos = tl.load(pos_of + token)
    m_i = float("-inf")  # running maximum
    l_i = 0.0  # running sum
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, pos + 1, BLOCK_N):
        kv_pos = start + tl.arange(0, BLOCK_N)
        seen = kv_pos <= pos
        page = tl.load(row + kv_pos // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
        offs = ((page * PAGE_SIZE + kv_pos % PAGE_SIZE) * (NUM_Q_HEADS // GROUP) + head // GROUP) * HEAD_DIM
        keep = seen[:, None] & inside[None, :]
        k = tl.load(k_ptr + offs[:, None] + offs_d[None, :], mask=keep, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + offs[:, None] + offs_d[None, :], mask=keep, other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(k * q[None, :], 1), float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 0))
        p = tl.exp(scores - m_new)
        alpha = tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p[:, None] * v, 0)
        m_i = m_new
    tl.store(out_ptr + at, (acc / l_i).to(out_ptr.dtype.element_ty), mask=inside)


def naive_attention(
    q: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
    cache: quire.PagedKVCache,
    page_table: torch.Tensor,  # [num_seqs, max_pages_per_seq] int32
    seq_of: torch.Tensor,  # [num_tokens] int32
    pos_of: torch.Tensor,  # [num_tokens] int32
    scale: float,
    out: torch.Tensor,  # like q
) -> torch.Tensor:
    """Compute causal attention with the naive kernel; q, out and the NHD cache must be contiguous.

    Args:
        q: queries, [num_tokens, num_q_heads, head_dim].
        cache: the pages.
        page_table: [num_seqs, max_pages_per_seq] int32.
        seq_of: [num_tokens] int32, the sequence of each token.
        pos_of: [num_tokens] int32, the position of each token in its sequence, which is the last key that it sees.
        scale: factor on the scores.
        out: what is written, like q.

    Returns:
        `out`.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    naive_kernel[(num_tokens, num_q_heads)](
        q, cache.k, cache.v, out, page_table, seq_of, pos_of, scale, page_table.stride(0),
        NUM_Q_HEADS=num_q_heads, GROUP=num_q_heads // cache.num_kv_heads, HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), PAGE_SIZE=cache.page_size, BLOCK_N=32,
        enable_fp_fusion=True,  # as Quire's kernels
    )  # fmt: skip
    return out


def owners(query_lens: list[int], seq_lens: list[int], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which sequence owns each query token, and its position there: two [num_tokens] int32."""
    seqs = [seq for seq, n in enumerate(query_lens) for _ in range(n)]
    positions = [s - q + i for q, s in zip(query_lens, seq_lens, strict=True) for i in range(q)]
    seq_of = torch.tensor(seqs, dtype=torch.int32, device=device)
    pos_of = torch.tensor(positions, dtype=torch.int32, device=device)
    return seq_of, pos_of
