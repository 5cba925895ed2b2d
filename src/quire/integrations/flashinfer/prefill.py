"""Prefill over pages under FlashInfer's names; any mix with decode is one batch."""

from quire.integrations.arguments import as_int
from quire.integrations.flashinfer.blocks import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek
from quire.integrations.flashinfer.masked import MaskedWrapper
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


class BatchPrefillWithPagedKVCacheWrapper(MaskedWrapper, PagedWrapper):
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
        self._take_masks(a)

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
        scoring = self._read_scoring_and_mask(a)
        lists, most_keys = self._read_pages(a)
        most_queries, num_rows = self._read_queries(a.qo_indptr, len(lists["seq_lens"]), a.max_token_per_sequence)
        lists["cu_seqlens_q"] = a.qo_indptr
        self._prepare_with_mask(a, scoring, (most_queries, most_keys), num_rows, **lists)

    begin_forward = plan

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
