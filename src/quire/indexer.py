"""What models compute before they choose keys: logits of an indexer, scores of blocks, and the top of them.

These functions let a model with chosen keys run on every target. They are plain Triton, and PyTorch for CPU tensors.
`quire.integrations.deep_gemm` has them under DeepGEMM's names.
"""

from typing import Any

import torch

from quire.batch import Batch
from quire.dispatch.device import is_served_by_torch
from quire.dispatch.request import cdiv
from quire.errors import UnsupportedError, check_flag, check_integer, check_tensor, describe
from quire.kernels.cpu import indexer as by_torch

__all__ = ["block_scores", "mqa_logits", "paged_mqa_logits", "top_k"]

DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)
SCALE_BYTES = 4  # of a key in a page of `paged_mqa_logits`
TOKENS = 16  # that a program multiplies a tile of keys with
MOST_COLUMNS = (1 << 31) - 1


def mqa_logits(
    q: torch.Tensor,  # [num_tokens, num_heads, dim]
    k: torch.Tensor,  # [num_keys, dim]
    k_scale: torch.Tensor | None,  # [num_keys] float32
    weights: torch.Tensor,  # [num_tokens, num_heads]
    begin: torch.Tensor,  # [num_tokens] int32
    end: torch.Tensor,  # [num_tokens] int32
    *,
    num_columns: int | None = None,
) -> torch.Tensor:
    """Return the indexer's logits: the sum over heads of `weight * relu(q · k) * k_scale`.

    Args:
        q: queries, [num_tokens, num_heads, dim], in float8_e4m3fn, bfloat16, float16 or float32. A scale of q belongs
            into `weights`.
        k: keys of all sequences, [num_keys, dim], of q's dtype.
        k_scale: [num_keys] or [num_keys, 1] float32, not negative; None for 1.
        weights: [num_tokens, num_heads], float32 or 16 bits.
        begin: [num_tokens] int32, the first key of each token.
        end: [num_tokens] int32, the key after its last one.
        num_columns: have so many columns, of which column 0 of a row is its token's first key. When not given, columns
            are all keys.

    Returns:
        float32, [num_tokens, num_keys] or [num_tokens, num_columns], -inf for keys that a token does not have.

    Raises:
        TypeError: an argument is of another type.
        ValueError: arguments do not fit together.

    Examples:
        >>> q, k, weights = torch.randn(2, 4, 16), torch.randn(5, 16), torch.rand(2, 4)
        >>> begin, end = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
        >>> quire.indexer.mqa_logits(q, k, None, weights, begin, end).isinf().int().tolist()
        [[0, 0, 0, 1, 1], [1, 0, 0, 0, 0]]
    """
    num_tokens, _, dim = check_queries(q)
    check_like_queries("k", k, q, (None, dim))
    scale = None if k_scale is None else check_numbers("k_scale", k_scale, q, k.shape[0], torch.float32)
    check_weights(weights, q)
    first = check_numbers("begin", begin, q, num_tokens, torch.int32)
    columns = k.shape[0]
    last = check_numbers("end", end, q, num_tokens, torch.int32).clamp(max=columns)
    if num_columns is not None:
        columns = check_integer("num_columns", num_columns, "pass the most keys of a token", 0, MOST_COLUMNS)
    out = torch.empty(num_tokens, columns, dtype=torch.float32, device=q.device)
    from_begin = num_columns is not None
    if out.numel() == 0:
        return out
    if is_served_by_torch(q.device):
        by_torch.mqa_logits(q, k, scale, weights, first, last, out, from_begin=from_begin)
    else:
        from quire.kernels import indexer

        indexer.mqa_logits(q, k, scale, weights, first, last, None, out, tokens_each=TOKENS, from_begin=from_begin)
    return out


def paged_mqa_logits(
    q: torch.Tensor,  # [num_seqs, queries, num_heads, dim]
    cache: torch.Tensor,  # [num_pages, page_size, dim + 4] uint8
    weights: torch.Tensor,  # [num_seqs * queries, num_heads]
    seq_lens: torch.Tensor,  # [num_seqs] or [num_seqs, queries] int32
    page_table: torch.Tensor,  # [num_seqs, max_pages] int32
    num_columns: int,
    *,
    clean: bool = True,
) -> torch.Tensor:
    """Return the indexer's logits for keys in pages, as `mqa_logits` computes them.

    A page holds `page_size` keys in float8_e4m3fn, and after all of them their float32 scales: DeepGEMM's layout.

    Args:
        q: queries, [num_seqs, queries, num_heads, dim], in float8_e4m3fn.
        cache: uint8, [num_pages, page_size, dim + 4] or [num_pages, page_size, 1, dim + 4]. Pages are contiguous, and
            may be apart.
        weights: [num_seqs * queries, num_heads], float32 or 16 bits.
        seq_lens: int32, [num_seqs], keys of each sequence, of which the queries are the last; or
            [num_seqs, queries], how many keys each query sees.
        page_table: [num_seqs, max_pages] int32.
        num_columns: columns of the result, at least the most keys of a sequence.
        clean: whether columns after a query's keys are -inf. If not, they may hold anything.

    Returns:
        float32, [num_seqs * queries, num_columns]; column 0 is the sequence's first key.

    Raises:
        TypeError: an argument is of another type.
        ValueError: arguments do not fit together.

    Examples:
        >>> q, cache = torch.zeros(2, 1, 4, 16).to(torch.float8_e4m3fn), torch.zeros(3, 8, 20, dtype=torch.uint8)
        >>> lens, table = torch.tensor([3, 9], dtype=torch.int32), torch.tensor([[0, 0], [1, 2]], dtype=torch.int32)
        >>> quire.indexer.paged_mqa_logits(q, cache, torch.ones(2, 4), lens, table, 10).isinf().sum(1).tolist()
        [7, 1]
    """
    if check_tensor("q", q, "pass the indexer's queries").dim() != 4 or q.dtype is not torch.float8_e4m3fn:
        raise ValueError(
            f"q must be [num_seqs, queries, num_heads, dim] in float8_e4m3fn, got {describe(q)}; quantise it as the "
            "cache is"
        )
    num_seqs, queries, num_heads, dim = q.shape
    rows = q.reshape(num_seqs * queries, num_heads, dim)
    check_queries(rows)
    pages = check_pages(cache, dim)
    check_weights(weights, rows)
    lens = check_tensor("seq_lens", seq_lens, "pass how many keys each sequence has")
    if lens.dtype is not torch.int32 or lens.shape not in ((num_seqs,), (num_seqs, 1), (num_seqs, queries)):
        raise ValueError(
            f"seq_lens must be int32, [{num_seqs}] or [{num_seqs}, {queries}], got {describe(seq_lens)}; give each "
            "sequence or query one"
        )
    table = check_table(page_table, num_seqs)
    columns = check_integer("num_columns", num_columns, "pass the most keys of a sequence", 0, MOST_COLUMNS)
    check_flag("clean", clean, "say whether the columns after a query's keys are read")
    out = torch.empty(num_seqs * queries, columns, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    lens, page_size = lens.reshape(-1), cache.shape[1]
    if is_served_by_torch(q.device):
        if lens.shape[0] != num_seqs * queries:
            lens = (lens[:, None] - queries + 1 + torch.arange(queries)).reshape(-1)
        for seq in range(num_seqs):
            group, entries = slice(seq * queries, (seq + 1) * queries), table[seq].long()
            most = max(0, min(int(lens[group].max()), columns))
            read = pages[entries[: cdiv(most, page_size)]]
            k = read[:, : page_size * dim].reshape(-1, dim).view(q.dtype)
            scale = read[:, page_size * dim :].contiguous().view(torch.float32).reshape(-1)
            end = lens[group].clamp(max=columns)
            by_torch.mqa_logits(rows[group], k, scale, weights[group], None, end, out[group])
    else:
        from quire.kernels import indexer

        page = page_size, pages.stride(0), pages.stride(0) // SCALE_BYTES
        k = pages[:, : page_size * dim].view(q.dtype).unflatten(1, (page_size, dim))
        scale = pages[:, page_size * dim :].view(torch.float32)
        options = {"tokens_each": queries, "page": page, "clean": clean}
        indexer.mqa_logits(rows, k, scale, weights, None, lens, table, out, **options)
    return out


def block_scores(
    q: torch.Tensor,  # [num_tokens, num_heads, dim]
    keys: torch.Tensor,  # [num_pages, page_size, dim]
    batch: Batch,
    *,
    block_size: int,
    max_query_len: int,
    max_seq_len: int,
) -> torch.Tensor:
    """Return the largest product of each query with a key of each block that it sees, as MiniMax M3 scores blocks.

    A query sees the keys of its sequence up to its own position.

    Args:
        q: queries, [num_tokens, num_heads, dim], in bfloat16, float16, float32 or float8_e4m3fn.
        keys: one index key for all heads, [num_pages, page_size, dim], of q's dtype.
        batch: the sequences, with a rectangular page table.
        block_size: keys of a block, a multiple of 1 up to 1,024; block b holds keys b * block_size and on.
        max_query_len: most queries of a sequence.
        max_seq_len: most keys of a sequence.

    Returns:
        float32, [num_heads, num_tokens, blocks], with blocks for `max_seq_len` keys; -inf where a query sees none.
        Rows of no sequence hold anything.

    Raises:
        TypeError: an argument is of another type.
        ValueError: arguments do not fit together.
        UnsupportedError: the batch has query offsets or a flat page table.

    Examples:
        >>> batch = quire.Batch(torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32))
        >>> q, keys = torch.randn(1, 2, 16), torch.randn(2, 4, 16)
        >>> quire.indexer.block_scores(q, keys, batch, block_size=4, max_query_len=1, max_seq_len=8).shape
        torch.Size([2, 1, 2])
    """
    num_tokens, num_heads, dim = check_queries(q)
    check_like_queries("keys", keys, q, (None, None, dim))
    if not isinstance(batch, Batch):
        raise TypeError(f"batch must be a Batch, got {describe(batch)}; describe the sequences with quire.Batch")
    if batch.query_offsets is not None or batch.cu_pages is not None or not batch.paged:
        raise UnsupportedError(
            "batch must have a rectangular page table and no query_offsets, got another one; pass the step's own table"
        )
    size = check_integer("block_size", block_size, "pass the keys of a block", 1, 1024)
    queries = check_integer("max_query_len", max_query_len, "pass the most queries of a sequence", 0, MOST_COLUMNS)
    most = check_integer("max_seq_len", max_seq_len, "pass the most keys of a sequence", 0, MOST_COLUMNS)
    out = torch.empty(num_heads, num_tokens, cdiv(most, size), dtype=torch.float32, device=q.device)
    if out.numel() == 0 or batch.num_seqs == 0 or queries == 0:
        return out
    run: Any = by_torch.block_scores
    if not is_served_by_torch(q.device):
        from quire.kernels import indexer

        run = indexer.block_scores
    lengths = batch.page_table, batch.cu_seqlens_q, batch.seq_lens
    run(q, keys, *lengths, out, block_size=size, max_query_len=queries)
    return out


def top_k(
    scores: torch.Tensor,  # [rows, columns]
    k: int,
    *,
    begin: torch.Tensor | None = None,  # [rows] int32
    end: torch.Tensor | None = None,  # [rows] int32
    from_begin: bool = False,
) -> torch.Tensor:
    """Return the columns of each row's k largest scores, in order of columns: lists for `ChosenKeys`.

    The result is exact, and the same in every run: of equal scores, the first columns are taken. -inf and NaN are no
    candidates.

    Args:
        scores: [rows, columns], float32, bfloat16 or float16, with contiguous rows.
        k: how many to take; any number, such as 512 or 2,048.
        begin: [rows] int32, the first candidate of each row; 0 when not given.
        end: [rows] int32, the column after the last one; all columns when not given.
        from_begin: count columns from each row's `begin`, rather than from 0.

    Returns:
        int32, [rows, k]; -1 after the last one where a row has fewer candidates.

    Raises:
        TypeError: an argument is of another type.
        ValueError: arguments do not fit together.

    Examples:
        >>> quire.indexer.top_k(torch.tensor([[0.5, 3.0, 0.5, -1.0]]), 2).tolist()
        [[0, 1]]
    """
    check_tensor("scores", scores, "pass the indexer's scores")
    served = torch.float32, torch.bfloat16, torch.float16
    if scores.dim() != 2 or scores.dtype not in served or (scores.shape[1] > 1 and scores.stride(1) != 1):
        raise ValueError(
            f"scores must be [rows, columns] in float32, bfloat16 or float16 with contiguous rows, got "
            f"{describe(scores)}; flatten and convert them"
        )
    number = check_integer("k", k, "pass how many columns to take", 0, MOST_COLUMNS)
    ends = [
        None if x is None else check_numbers(name, x, scores, scores.shape[0], torch.int32)
        for name, x in (("begin", begin), ("end", end))
    ]
    check_flag("from_begin", from_begin, "say whether columns are counted from begin")
    out = torch.empty(scores.shape[0], number, dtype=torch.int32, device=scores.device)
    if out.numel() == 0:
        return out
    run: Any = by_torch.top_k
    if not is_served_by_torch(scores.device):
        from quire.kernels import indexer

        run = indexer.top_k
    run(scores, *ends, out, from_begin=from_begin)
    return out


def check_queries(q: Any) -> tuple[int, int, int]:
    """Return the sizes of queries, or raise."""
    check_tensor("q", q, "pass the indexer's queries")
    if q.dim() != 3 or q.dtype not in DTYPES or q.stride(2) != 1:
        raise ValueError(
            f"q must be [num_tokens, num_heads, dim] in float8_e4m3fn, bfloat16, float16 or float32 with contiguous "
            f"heads, got {describe(q)}; reshape or convert it"
        )
    return q.shape[0], q.shape[1], q.shape[2]


def check_like_queries(name: str, k: Any, q: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise unless keys have a shape, in which None is any size, and the dtype and device of the queries."""
    check_tensor(name, k, "pass the indexer's keys")
    fits = k.dim() == len(shape) and all(want in (None, got) for want, got in zip(shape, k.shape, strict=True))
    if not fits or k.dtype is not q.dtype or k.device != q.device or k.stride(-1) != 1:
        raise ValueError(
            f"{name} must be of q's dtype {q.dtype} and device, with contiguous rows of {shape[-1]}, "
            f"got {describe(k)}; store keys as q is"
        )


def check_numbers(name: str, x: Any, like: torch.Tensor, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a vector of `number` contiguous numbers on the device of `like`, or raise."""
    check_tensor(name, x, "pass one number for each")
    if x.dtype is not dtype or x.numel() != number or x.device != like.device:
        raise ValueError(
            f"{name} must be {number} numbers of {dtype} on {like.device}, got {describe(x)}; give each row one"
        )
    return x.reshape(-1).contiguous()


def check_weights(weights: Any, q: torch.Tensor) -> None:
    """Raise unless weights are those of the queries' heads."""
    check_tensor("weights", weights, "pass one for each query and head")
    floats = torch.float32, torch.bfloat16, torch.float16
    if weights.shape != q.shape[:2] or weights.dtype not in floats or weights.device != q.device:
        raise ValueError(
            f"weights must be {list(q.shape[:2])} in float32 or 16 bits on {q.device}, got {describe(weights)}; give "
            "each query and head one"
        )
    if weights.shape[1] > 1 and weights.stride(1) != 1:
        raise ValueError(f"weights must have contiguous rows, got strides {weights.stride()}; copy them")


def check_pages(cache: Any, dim: int) -> torch.Tensor:
    """Return a cache of keys and scales as [num_pages, bytes of a page], or raise."""
    check_tensor("cache", cache, "pass the indexer's cache")
    if cache.dim() == 4 and cache.shape[2] == 1:
        cache = cache[:, :, 0]
    if cache.dim() != 3 or cache.dtype is not torch.uint8 or cache.shape[2] != dim + SCALE_BYTES:
        raise ValueError(
            f"cache must be uint8, [num_pages, page_size, {dim + SCALE_BYTES}], got {describe(cache)}; a key of {dim} "
            "has a float32 scale"
        )
    bytes_of_page = cache.shape[1] * cache.shape[2]
    whole = cache.stride()[1:] == (cache.shape[2], 1)
    if (
        not whole
        or cache.stride(0) % SCALE_BYTES
        or cache.data_ptr() % SCALE_BYTES
        or cache.shape[1] * dim % SCALE_BYTES
    ):
        raise ValueError(
            f"cache must have contiguous pages at multiples of {SCALE_BYTES} bytes, got strides {cache.stride()}; "
            "allocate it as DeepGEMM does"
        )
    return cache.as_strided((cache.shape[0], bytes_of_page), (cache.stride(0), 1))


def check_table(table: Any, num_seqs: int) -> torch.Tensor:
    """Return a rectangular page table, or raise."""
    check_tensor("page_table", table, "pass the pages of each sequence")
    if table.dtype is not torch.int32 or table.dim() != 2 or table.shape[0] != num_seqs:
        raise ValueError(
            f"page_table must be int32, [{num_seqs}, max_pages], got {describe(table)}; give each sequence a row"
        )
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError(f"page_table must have contiguous rows, got strides {table.stride()}; copy it")
    return table
