"""Blocks of keys for blocks of queries under FlashInfer's names."""

import torch

from quire import Batch, ChosenKeys
from quire.integrations.arguments import as_int, check_integers, check_tensor
from quire.integrations.flashinfer.arguments import as_tokens, read_cache, read_scoring
from quire.integrations.flashinfer.planned import OutAndLse, Wrapper, check_indptr
from quire.integrations.flashinfer.signatures import Arguments
from quire.integrations.flashinfer.tables import SPARSE

__all__ = ["BlockSparseAttentionWrapper"]


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
