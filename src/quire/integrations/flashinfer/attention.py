"""Two more wrappers over pages under FlashInfer's names: `BatchAttention`, and one whose `run` takes sinks."""

from dataclasses import replace

import torch

from quire.integrations.arguments import as_int, as_number, check_integers
from quire.integrations.flashinfer.arguments import as_positive
from quire.integrations.flashinfer.planned import LONGEST, OutAndLse
from quire.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.integrations.flashinfer.signatures import Arguments
from quire.integrations.flashinfer.tables import BATCH


class BatchAttention:
    """Attend from the last queries of each sequence to its pages; every result comes with its lse."""

    @BATCH.accepts("kv_layout='NHD', device='cuda'")
    def __init__(self, a: Arguments) -> None:
        """Make a wrapper."""
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device=a.device), a.kv_layout)

    @BATCH.accepts(
        "qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, "
        "page_size, causal=False, sm_scale=None, logits_soft_cap=None, q_data_type=torch.bfloat16, "
        "kv_data_type=torch.bfloat16, use_profiler=False"
    )
    def plan(self, a: Arguments) -> None:
        """Say which queries and pages each sequence has, and what is computed; once per step, for all layers."""
        page_size = as_int("page_size", a.page_size, least=1, most=LONGEST)
        check_integers("kv_len_arr", a.kv_len_arr, None, batch_size=None)
        given = vars(a).copy()
        pages = {f"paged_{name}": given.pop(name) for name in ("kv_indptr", "kv_indices")}
        lengths, _ = given.pop("kv_len_arr"), given.pop("use_profiler")
        last = (lengths - 1) % page_size + 1
        self._wrapper.plan(**pages, paged_kv_last_page_len=last, seq_lens=lengths, **given)

    @BATCH.accepts(
        "q, kv_cache, out=None, lse=None, k_scale=None, v_scale=None, logits_soft_cap=0.0, profiler_buffer=None, "
        "kv_cache_sf=None"
    )
    def run(self, a: Arguments) -> OutAndLse:
        """Attend, for one layer.

        Returns:
            out [num_tokens, num_qo_heads, head_dim_vo], and the lse [num_tokens, num_qo_heads] in base 2.
        """
        cap = as_number("logits_soft_cap", a.logits_soft_cap)
        planned = self._wrapper._planned().logits_soft_cap
        if not (cap <= 0 or cap == planned):
            raise ValueError(f"logits_soft_cap must be 0 or the planned {planned}, got {cap}; pass it to plan")
        scales = {"k_scale": a.k_scale, "v_scale": a.v_scale}
        return self._wrapper.run(a.q, a.kv_cache, out=a.out, lse=a.lse, return_lse=True, **scales)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper` whose `run` takes sinks and the softmax scale by position."""

    @BATCH.accepts(
        "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None, "
        "paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, "
        "backend='auto', pos_encoding_mode='NONE', use_fp16_qk_reduction=False, q_data_type=torch.bfloat16, "
        "kv_data_type=torch.bfloat16, head_dim_qk=128, head_dim_vo=128, window_left=-1"
    )
    def __init__(self, a: Arguments) -> None:
        """Make a wrapper. What is said of heads, dtypes and windows is what `plan` says, and ignored."""
        taken = BatchPrefillWithPagedKVCacheWrapper.__init__.table  # type: ignore[attr-defined]
        super().__init__(**{name: x for name, x in vars(a).items() if name in taken})

    @BATCH.accepts(
        "q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False, "
        "lse_base='log2', lse_layout='NH', enable_pdl=None, window_left=None, kv_cache_sf=None"
    )
    def run(self, a: Arguments) -> OutAndLse:
        """Attend, for one layer: `run(q, paged_kv_cache, sinks, sm_scale)`.

        Returns:
            out [qo_indptr[-1], num_qo_heads, head_dim_vo], or (out, lse).
        """
        if len(a.args) != 2:
            raise TypeError(f"args must be the sinks and sm_scale, got {len(a.args)} of them; pass both by position")
        sinks, sm_scale = a.args
        scale = as_positive("sm_scale", sm_scale, "it is the softmax scale")
        self._scoring = replace(self._planned(a.window_left), sm_scale=scale)
        del a.args
        return super().run(**vars(a), sinks=sinks)
