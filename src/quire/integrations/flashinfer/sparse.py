"""Blocks of keys for blocks of queries under FlashInfer's names."""

from dataclasses import replace
from math import gcd

import torch

from quire import Batch, ChosenKeys
from quire.integrations.arguments import as_int, check_integers, check_tensor
from quire.integrations.flashinfer.arguments import as_tokens, read_cache, read_scoring
from quire.integrations.flashinfer.planned import OutAndLse, Wrapper, check_indptr, largest
from quire.integrations.flashinfer.signatures import Arguments
from quire.integrations.flashinfer.tables import SPARSE, VARIABLE_SPARSE

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]


class BlockSparseAttentionWrapper(Wrapper):
    """Attend from blocks of R queries to the blocks of C keys that a block-sparse matrix has in their row."""

    @SPARSE.accepts("float_workspace_buffer, backend='auto'")
    def __init__(self, a: Arguments) -> None:
        """Make a wrapper."""
        a.use_cuda_graph = False
        self._set_up(a)
        self._num_keys = 0

    @SPARSE.accepts(
        "indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, mask=None, packed_mask=None, causal=False, "
        "pos_encoding_mode='NONE', use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None, q_data_type='float16', kv_data_type=None, o_data_type='float16', non_blocking=True, "
        "block_mask=None, kv_block_lens=None, q2k_indices=None, q2k_num=None, kv_splits=None, use_clc=None, "
        "q_scale=None, k_scale=None, v_scale=None"
    )
    def plan(self, a: Arguments) -> None:
        """Say which blocks of keys each block of queries sees, and what is computed; once for all layers."""
        rows, keys = as_int("M", a.M, least=0), as_int("N", a.N, least=1)
        size, self_size = as_int("C", a.C, least=1), as_int("R", a.R, least=1)
        if keys % size:
            raise ValueError(f"N must be a multiple of C = {size}, got {keys}; pad the keys")
        scoring = read_scoring(a, head_dim_qk=a.head_dim)
        row_blocks, blocks = -(-rows // self_size), keys // size
        if a.block_mask is None:
            lists, lens = lists_of_rows(a.indptr, a.indices, row_blocks, blocks)
        else:
            lists, lens = lists_of_mask(a.block_mask, a.num_kv_heads, row_blocks, blocks)
        lists, lens = (x.repeat_interleave(self_size, 0)[:rows].to(self.device) for x in (lists, lens))
        nothing = torch.zeros(rows, dtype=torch.int32, device=self.device)  # blocks are slots, without a page table
        chosen = ChosenKeys(lists.int().contiguous(), lens.int().contiguous(), block_size=size, are_slots=True)
        before = vars(self).copy()
        try:
            self._batch, self._plans = Batch(nothing[:, None], nothing, chosen=chosen), {}
            self._bounds, self._num_rows, self._page_size, self._num_keys = (1, 1, rows), rows, size, keys
            self._find_plan(scoring)
        except BaseException:
            vars(self).update(before)
            raise
        self._scoring = scoring

    begin_forward = plan

    @SPARSE.accepts(
        "q, k, v, scale_q=None, scale_k=None, scale_v=None, out=None, lse=None, return_lse=False, enable_pdl=None"
    )
    def run(self, a: Arguments) -> OutAndLse:
        """Attend, for one layer.

        Returns:
            out [M, num_qo_heads, head_dim], or (out, lse).
        """
        scoring = self._planned()
        k, v = as_tokens(a.k, a.v, "NHD")
        if len(k) != self._num_keys:
            raise ValueError(f"k must have the planned N = {self._num_keys} tokens, got {len(k)}; plan for them")
        k, v = (x.unflatten(0, (-1, self._page_size)) for x in (k, v))
        a.q_scale = a.sinks = None
        return self._attend(a, read_cache(k, v, "NHD", scoring.kv_data_type, None, None))


class VariableBlockSparseAttentionWrapper(Wrapper):
    """Attend from blocks of queries to blocks of keys of any sizes, which each KV head has of its own.

    Each block of queries of a KV head is a sequence, whose pages are pieces of the blocks that it sees: so a block's
    keys are read once for all of its queries. A page has as many keys as divide the sizes of all blocks of keys.
    """

    @VARIABLE_SPARSE.accepts("float_workspace_buffer, backend='auto'")
    def __init__(self, a: Arguments) -> None:
        """Make a wrapper."""
        a.use_cuda_graph = False
        self._set_up(a)
        self._sizes = 0, 0, 0  # KV heads, queries and keys

    @VARIABLE_SPARSE.accepts(
        "block_mask_map, block_row_sz, block_col_sz, num_qo_heads, num_kv_heads, head_dim, causal=False, "
        "pos_encoding_mode='NONE', use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None, non_blocking=True, q_data_type='float16', kv_data_type=None"
    )
    def plan(self, a: Arguments) -> None:
        """Say which blocks of keys each block of queries sees, and what is computed; once for all layers."""
        scoring = read_scoring(a, head_dim_qk=a.head_dim)
        heads = scoring.num_kv_heads
        scoring = replace(scoring, num_qo_heads=scoring.num_qo_heads // heads, num_kv_heads=1)
        _, num_rows, num_columns = check_tensor(
            "block_mask_map", a.block_mask_map, None, num_kv_heads=heads, MB=None, NB=None
        )
        queries, rows = read_sizes("block_row_sz", a.block_row_sz, num_kv_heads=heads, MB=num_rows)
        keys, columns = read_sizes("block_col_sz", a.block_col_sz, num_kv_heads=heads, NB=num_columns)
        if keys == 0:
            raise ValueError("block_col_sz must count a key or more, got 0; there is nothing to attend to")
        a.page_size = gcd(*columns.flatten().tolist())
        pages, counts = pages_of_blocks(a.block_mask_map.cpu() != 0, columns // a.page_size)
        starts, cu_pages = (torch.nn.functional.pad(x.flatten().cumsum(0), (1, 0)) for x in (rows, counts))
        lists = {"page_table": pages, "seq_lens": counts * a.page_size, "cu_pages": cu_pages, "cu_seqlens_q": starts}
        self._prepare(a, scoring, (largest(rows.flatten()), largest(lists["seq_lens"])), heads * queries, **lists)
        self._sizes = heads, queries, keys

    begin_forward = plan

    @VARIABLE_SPARSE.accepts("q, k, v, out=None, lse=None, return_lse=False, enable_pdl=None")
    def run(self, a: Arguments) -> OutAndLse:
        """Attend, for one layer.

        Returns:
            out [num_qo_heads, qo_len, head_dim], or (out, lse [num_qo_heads, qo_len]); new tensors, also with `out`.
        """
        scoring, (heads, queries, keys) = self._planned(), self._sizes
        group, dim = scoring.num_qo_heads, scoring.head_dim_qk
        check_tensor("q", a.q, None, num_qo_heads=heads * group, qo_len=queries, head_dim=dim)
        for name in ("k", "v"):
            check_tensor(name, getattr(a, name), a.q.device, num_kv_heads=heads, kv_len=keys, head_dim=dim)
        k, v = (x.reshape(-1, self._page_size, 1, dim) for x in (a.k, a.v))
        a.q = a.q.unflatten(0, (heads, group)).transpose(1, 2).reshape(-1, group, dim)
        a.q_scale = a.sinks = None
        found = self._attend(a, read_cache(k, v, "NHD", scoring.kv_data_type, None, None))
        parts = found if isinstance(found, tuple) else (found,)
        out, *lse = (x.unflatten(0, (heads, queries)).transpose(1, 2).flatten(0, 1).contiguous() for x in parts)
        return (out, lse[0]) if lse else out

    @VARIABLE_SPARSE.accepts(
        "q, k, v, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, "
        "rope_scale=None, rope_theta=None"
    )
    def forward(self, a: Arguments) -> OutAndLse:
        """Attend by these scores, whatever was planned; FlashInfer's old name of `run`."""
        return self._forward(a, return_lse=False)


def read_sizes(name: str, sizes: torch.Tensor, **dims: int) -> tuple[int, torch.Tensor]:
    """Return the sum of each KV head's blocks, which must be the same, and their sizes on the host, int64."""
    check_integers(name, sizes, None, **dims)
    sizes = sizes.cpu().long()
    sums = sizes.sum(1)
    if bool((sizes < 0).any()) or bool((sums != sums[0]).any()):
        raise ValueError(
            f"{name} must be at least 0 and have the same sum for each KV head, got {sizes.tolist()}; a head's blocks "
            "are all of its tokens"
        )
    return int(sums[0]), sizes


def pages_of_blocks(mask: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of each row of blocks, one row after the other, and how many each row has.

    Args:
        mask: [num_heads, rows, columns] bool, the blocks that are seen.
        sizes: [num_heads, columns] int64, in pages; those of a head follow those of the head before.
    """
    head, _, column = mask.nonzero(as_tuple=True)
    count = sizes[head, column]
    first = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)[head, column]
    before = count.cumsum(0) - count
    pages = (first - before).repeat_interleave(count) + torch.arange(int(count.sum()))
    return pages, (mask * sizes[:, None]).sum(-1).flatten()


def lists_of_rows(
    indptr: torch.Tensor, indices: torch.Tensor, row_blocks: int, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the list of each row of a block-sparse matrix, [row_blocks, 1, width], and its length, on the host."""
    if check_indptr("indptr", indptr) != row_blocks:
        raise ValueError(
            f"indptr must have ceil(M / R) + 1 = {row_blocks + 1} entries, got {len(indptr)}; one is for each row"
        )
    check_integers("indices", indices, None, **{"indptr[-1]": None})
    starts, entries = indptr.cpu().long(), indices.cpu().long()
    if entries.numel() and not 0 <= int(entries.min()) <= int(entries.max()) < blocks:
        raise ValueError(
            f"indices must be from 0 to N / C - 1 = {blocks - 1}, got {entries.tolist()}; they are columns"
        )
    lens = starts.diff()
    lists = torch.full((row_blocks, 1, int(lens.max()) if row_blocks else 0), -1)
    row = torch.arange(row_blocks).repeat_interleave(lens)
    lists[row, 0, torch.arange(len(row)) - starts[row]] = entries[: len(row)]
    return lists, lens[:, None]


def lists_of_mask(
    mask: torch.Tensor, num_kv_heads: int, row_blocks: int, blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lists of each KV head, [row_blocks, num_kv_heads, width], and their lengths, on the mask's device."""
    heads, *_ = check_tensor("block_mask", mask, None, num_heads=None, MB=row_blocks, NB=blocks)
    if heads % num_kv_heads:
        raise ValueError(f"block_mask must have num_kv_heads or num_qo_heads heads, got {heads}; see the docstring")
    mask = mask.bool()[:: heads // num_kv_heads].transpose(0, 1)  # of query heads, the first one of each group
    lens = mask.sum(-1)
    width = int(lens.max()) if lens.numel() else 0
    order = torch.argsort(mask.logical_not().byte(), dim=-1, stable=True)[..., :width]
    return torch.where(torch.arange(width, device=mask.device) < lens[..., None], order, -1), lens
