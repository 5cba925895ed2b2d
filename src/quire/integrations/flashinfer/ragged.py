"""Prefill over packed keys under FlashInfer's names: keys and values that are in no pages."""

import torch

from quire import Batch
from quire.integrations.arguments import as_int, check_integers
from quire.integrations.flashinfer.arguments import as_tokens, check_one, read_cache
from quire.integrations.flashinfer.masked import MaskedWrapper
from quire.integrations.flashinfer.planned import LONGEST, OutAndLse, check_buffer, check_indptr, largest
from quire.integrations.flashinfer.signatures import Arguments
from quire.integrations.flashinfer.tables import RAGGED

FORWARD = (
    "q, k, v, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, window_left=-1, "
    "logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
)


class BatchPrefillWithRaggedKVCacheWrapper(MaskedWrapper):
    """Attend from the last queries of each sequence to keys and values that are packed one sequence after the other."""

    _is_paged = False

    @RAGGED.accepts(
        "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, kv_indptr_buf=None, "
        "custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None, "
        "variant_owns_mask=False"
    )
    def __init__(self, a: Arguments) -> None:
        """Make a wrapper."""
        self._set_up(a)
        self._take_masks(a)
        if a.use_cuda_graph:
            (entries,) = check_buffer(a, "qo_indptr_buf", self.device)
            check_buffer(a, "kv_indptr_buf", self.device, entries)
            self._held = {"kv_indptr": a.kv_indptr_buf}
            lengths = torch.zeros(entries - 1, dtype=torch.int32, device=self.device)
            self._batch = Batch(a.kv_indptr_buf[:-1, None], lengths, a.qo_indptr_buf, paged=False)

    @RAGGED.accepts(
        "qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None, "
        "packed_custom_mask=None, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, "
        "window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, "
        "q_data_type='float16', kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None, "
        "token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, fixed_split_size=None, "
        "disable_split_kv=False, seq_lens=None, seq_lens_q=None, max_token_per_sequence=None, max_sequence_kv=None, "
        "v_indptr=None, o_indptr=None, qo_indptr_cpu=None, kv_indptr_cpu=None, uniform_q_len=None, "
        "use_token_head_sf=False"
    )
    def plan(self, a: Arguments) -> None:
        """Say which queries and keys each sequence has, and what is computed; once per step, for all layers.

        Lists may be on the host or on the device, int32 or int64. From a device their largest lengths are read back.
        For CUDA graphs any number of keys is planned for.
        """
        scoring = self._read_scoring_and_mask(a)
        batch_size = check_indptr("kv_indptr", a.kv_indptr)
        self._check_readable(kv_indptr=a.kv_indptr)
        starts = {}  # where lengths are read
        for name in ("qo_indptr", "kv_indptr"):
            on_host = getattr(a, f"{name}_cpu")
            starts[name] = getattr(a, name) if on_host is None else on_host
            if on_host is not None:
                check_integers(f"{name}_cpu", on_host, torch.device("cpu"), **{"batch_size + 1": batch_size + 1})
        if self._use_cuda_graph and batch_size != self._batch.num_seqs:
            raise ValueError(
                f"kv_indptr must have the {self._batch.num_seqs + 1} entries of its buffer, got {batch_size + 1}; "
                "use a wrapper for each batch size"
            )
        check_integers("qo_indptr", a.qo_indptr, None, **{"batch_size + 1": batch_size + 1})
        most_queries, num_rows = self._read_queries(starts["qo_indptr"], batch_size, a.max_token_per_sequence)
        lists = {"seq_lens": a.kv_indptr.diff(), "cu_seqlens_q": a.qo_indptr}
        if self._use_cuda_graph:
            lists, most_keys = lists | {"kv_indptr": a.kv_indptr}, LONGEST  # the keys are not known yet
        else:
            bound, lists = a.max_sequence_kv, lists | {"page_table": a.kv_indptr[:-1, None]}
            most_keys = (
                largest(starts["kv_indptr"].diff()) if bound is None else as_int("max_sequence_kv", bound, least=0)
            )
        self._prepare_with_mask(a, scoring, (most_queries, most_keys), num_rows, **lists)
        self._num_keys = 0 if self._use_cuda_graph else int(starts["kv_indptr"][-1])

    begin_forward = plan

    @RAGGED.accepts(
        "q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None, "
        "return_lse=False, lse_base='log2', lse_layout='NH', enable_pdl=None, kv_cache_sf=None, sinks=None"
    )
    def run(self, a: Arguments) -> OutAndLse:
        """Attend, for one layer. FlashInfer's own list ends before `sinks`, which are by keyword.

        Returns:
            out [qo_indptr[-1], num_qo_heads, head_dim_vo], or (out, lse).
        """
        scoring = self._planned()
        check_one("o_scale", a.o_scale)
        k, v = as_tokens(a.k, a.v, self._kv_layout)
        if len(k) < self._num_keys:
            raise ValueError(
                f"k must have the {self._num_keys} tokens that kv_indptr counts, got {len(k)}; "
                f"the layout is {self._kv_layout}"
            )
        return self._attend(a, read_cache(k, v, "THD", scoring.kv_data_type, a.k_scale, a.v_scale))

    @RAGGED.accepts(FORWARD)
    def forward(self, a: Arguments) -> OutAndLse:
        """Attend by these scores and this mask, whatever was planned; FlashInfer's old name of `run`."""
        return self._forward(a, return_lse=False)

    @RAGGED.accepts(FORWARD)
    def forward_return_lse(self, a: Arguments) -> OutAndLse:
        """Return `forward`'s output and the lse."""
        return self._forward(a, return_lse=True)
