"""DeepGEMM's functions for indexers, under its names, on every target: `quire.indexer` computes them.

Scales in e8m0 and queries in four bits, which DeepGEMM takes on Blackwell GPUs, are refused. On these too, weights and
results are float32.
"""

from typing import Any

import torch

from quire import UnsupportedError, indexer

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """Return logits of queries [num_tokens, num_heads, dim] for keys of a step; see `quire.indexer.mqa_logits`.

    Args:
        q: queries in float8_e4m3fn.
        kv: keys in float8_e4m3fn and their float32 scales.
        weights: [num_tokens, num_heads] float32.
        cu_seq_len_k_start: [num_tokens] int32, the first key of each token.
        cu_seq_len_k_end: [num_tokens] int32, the key after its last one.
        clean_logits: whether other columns are -inf; they are, whatever it says.
        max_seqlen_k: if positive, have so many columns, from each token's first key on.

    Returns:
        float32, [num_tokens, num_keys], or [num_tokens, max_seqlen_k].
    """
    k, scale = kv
    columns = max_seqlen_k or None
    ends = cu_seq_len_k_start, cu_seq_len_k_end
    return indexer.mqa_logits(q, k, scale, weights, *ends, num_columns=columns)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    fused_kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return logits of queries [num_seqs, queries, num_heads, dim] for keys in pages.

    See `quire.indexer.paged_mqa_logits`.

    Args:
        q: queries in float8_e4m3fn.
        fused_kv_cache: [num_blocks, block_size, 1, dim + 4] uint8.
        weights: [num_seqs * queries, num_heads] float32.
        context_lens: [num_seqs] or [num_seqs, queries] int32.
        block_table: [num_seqs, max_blocks] int32.
        schedule_meta: not used.
        max_context_len: columns of the result.
        clean_logits: whether columns after a query's keys are -inf.
        indices: the sequence of each row of q, which then has one query each.

    Returns:
        float32, [num_seqs * queries, max_context_len].
    """
    if indices is not None:
        block_table = block_table[indices.long()]
    return indexer.paged_mqa_logits(
        q, fused_kv_cache, weights, context_lens, block_table, max_context_len, clean=clean_logits
    )


def fp8_fp4_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """Return what `fp8_mqa_logits` does; q is the pair of queries and None, as their scales are in the weights."""
    return fp8_mqa_logits(queries_of(q), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k=max_seqlen_k)


def fp8_fp4_paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    fused_kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `fp8_paged_mqa_logits` does; q is the pair of queries and None."""
    tables = context_lens, block_table, schedule_meta, max_context_len
    return fp8_paged_mqa_logits(queries_of(q), fused_kv_cache, weights, *tables, indices=indices)


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_size: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a schedule of the size that DeepGEMM's has; nothing reads it."""
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def queries_of(q: Any) -> torch.Tensor:
    """Return the queries of a pair without scales, or raise."""
    values, scale = q
    if scale is not None:
        raise UnsupportedError(
            "q must have no scales of its own, got some; fold them into weights, as on GPUs before Blackwell"
        )
    return values
