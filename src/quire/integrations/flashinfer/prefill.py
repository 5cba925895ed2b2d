"""Prefill over pages under FlashInfer's names; any mix with decode is one batch."""

from dataclasses import replace

import torch
from torch.nn.functional import pad

from quire import UnsupportedError
from quire.integrations.arguments import as_int, check_tensor
from quire.integrations.flashinfer.arguments import read_scoring
from quire.integrations.flashinfer.blocks import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek
from quire.integrations.flashinfer.masks import (
    MOST_QUERIES,
    check_no_window,
    read_bits,
    read_mask,
    seen_by_mask,
    words_without_mask,
)
from quire.integrations.flashinfer.planned import OutAndLse, PagedWrapper
from quire.integrations.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from quire.integrations.flashinfer.signatures import Arguments
from quire.integrations.flashinfer.single import single_prefill_with_kv_cache
from quire.integrations.flashinfer.tables import PREFILL

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_ragged_attention_deepseek",
]
FORWARD = (
    "q, paged_kv_cache, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, k_scale=None, "
    "v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
)


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attend from the last queries of each sequence, any number of them, to its pages."""

    _lists = "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"
    _buffers = "{}_buf"

    @PREFILL.accepts(
        "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None, "
        "paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, "
        "backend='auto', jit_args=None, jit_kwargs=None, variant_owns_mask=False, max_total_num_rows=None"
    )
    def __init__(self, a: Arguments) -> None:
        """Make a wrapper."""
        self._set_up(a)
        if a.max_total_num_rows is not None:
            self._most_rows = as_int("max_total_num_rows", a.max_total_num_rows, least=0)
            if not a.use_cuda_graph:
                raise ValueError(
                    f"max_total_num_rows must be None without use_cuda_graph, got {self._most_rows}; plan reads it"
                )
        self._keep_buffers(a)
        self._has_mask = False  # at the last plan
        buffers = {name: getattr(a, name) for name in ("custom_mask_buf", "mask_indptr_buf")}
        given = [name for name, x in buffers.items() if x is not None]
        for name in given:
            check_tensor(name, buffers[name], self.device, num_entries=None)
        self._takes_masks = a.use_cuda_graph and bool(given)
        for name in buffers:
            if self._takes_masks and name not in given:
                raise ValueError(f"{name} must be a tensor where {given[0]} is one, got None; pass both")

    @PREFILL.accepts(
        "qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, "
        "head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, "
        "pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, "
        "rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, o_data_type=None, "
        "non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, "
        "max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, "
        "max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False, uniform_q_len=None, "
        "use_token_head_sf=False"
    )
    def plan(self, a: Arguments) -> None:
        """Say which queries and pages each sequence has, and what is computed; once per step, for all layers.

        Lists may be on the host or on the device, int32 or int64. From a device their largest lengths are read back.
        """
        mask = read_mask(a.custom_mask, a.packed_custom_mask)
        if mask is not None and self._use_cuda_graph and not self._takes_masks:
            raise ValueError(
                "custom_mask_buf must be a tensor where graphs read masks, got None; make the wrapper with it"
            )
        reads_masks = mask is not None or self._takes_masks
        scoring = read_scoring(a, causal=a.causal or reads_masks)  # masks say what is seen in its place
        if reads_masks:
            check_no_window(scoring.window_left)
            if scoring.alibi:
                raise UnsupportedError(
                    "pos_encoding_mode must be 'NONE' where queries have masks, got 'ALIBI'; they share positions"
                )
        lists, most_keys = self._read_pages(a)
        lengths = lists["seq_lens"]
        most_queries, num_rows = self._read_queries(a.qo_indptr, len(lengths), a.max_token_per_sequence)
        seen, extras, longest = {}, (), most_queries
        if reads_masks:
            seen, extras = self._find_mask(mask, a.qo_indptr, lengths, a.causal)
        if extras:
            scoring = replace(scoring, causal=False, mask=read_bits)
        if "tree_bits" in seen:
            longest = min(most_queries, MOST_QUERIES)
            if self._use_cuda_graph:  # words for the most queries of any plan
                seen["tree_bits"] = pad(seen["tree_bits"], (0, most_queries - num_rows))
        self._prepare(a, scoring, (longest, most_keys), num_rows, **lists, cu_seqlens_q=a.qo_indptr, **seen)
        self._has_mask, self._causal = mask is not None, a.causal
        self._extras = tuple(x.to(self.device) for x in extras)

    begin_forward = plan

    def _find_mask(
        self, mask: torch.Tensor | None, qo_indptr: torch.Tensor, lengths: torch.Tensor, causal: bool
    ) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Return what a batch has in place of a mask, a word for each query or the ends of its interval of keys; or
        the tensors that the spec's mask reads.
        """
        if lengths.is_meta:
            raise UnsupportedError("seq_lens must be on a GPU or the CPU where queries have masks, got meta; pass them")
        starts, lens = qo_indptr.tolist(), lengths.tolist()
        if mask is None:
            return {"tree_bits": words_without_mask(starts, lens, causal)}, ()
        return seen_by_mask(mask, starts, lens, trees_alone=self._use_cuda_graph)

    def _rescore(self, a: Arguments) -> None:
        self._planned()
        if self._batch.tree_bits is not None or self._batch.key_begin is not None or self._extras:
            check_no_window(as_int("window_left", a.window_left))
            if not self._has_mask and a.causal != self._causal:
                raise ValueError(
                    f"causal must be the planned {self._causal}, got {a.causal}; graphs read what was planned: plan "
                    "again"
                )
            a.causal = not self._extras  # as planned: the mask says what is seen
        super()._rescore(a)

    @PREFILL.accepts(
        "q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False, "
        "lse_base='log2', lse_layout='NH', enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, "
        "skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None"
    )
    def run(self, a: Arguments) -> OutAndLse:
        """Attend, for one layer. `window_left` must be what was planned.

        Returns:
            out [qo_indptr[-1], num_qo_heads, head_dim_vo], or (out, lse).
        """
        self._planned(a.window_left)
        return self._attend(a, self._read_cache(a))

    @PREFILL.accepts(FORWARD)
    def forward(self, a: Arguments) -> OutAndLse:
        """Attend by these scores and this `causal`, whatever was planned; FlashInfer's old name of `run`.

        After a plan with a mask, the mask counts, and `causal` is ignored.
        """
        return self._forward(a, return_lse=False)

    @PREFILL.accepts(FORWARD)
    def forward_return_lse(self, a: Arguments) -> OutAndLse:
        """Return `forward`'s output and the lse."""
        return self._forward(a, return_lse=True)
