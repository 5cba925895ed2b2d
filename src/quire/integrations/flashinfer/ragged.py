"""Prefill over packed keys under FlashInfer's names: keys and values that are in no pages."""

import torch

from quire import Batch
from quire.integrations.arguments import as_int, check_integers
from quire.integrations.flashinfer.arguments import as_tokens, check_one, read_cache, read_scoring
from quire.integrations.flashinfer.planned import (
    LONGEST,
    OutAndLse,
    PrefillWrapper,
    check_buffer,
    check_indptr,
    is_batch_invariant,
    largest,
    to_device,
)
from quire.integrations.flashinfer.signatures import Arguments, accepts
from quire.integrations.flashinfer.tables import RAGGED

FORWARD = (
    "q, k, v, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, window_left=-1, "
    "logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
)


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Attend from the last queries of each sequence to keys and values that are packed one sequence after the other."""

    @accepts(
        "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, kv_indptr_buf=None, "
        "custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None, "
        "variant_owns_mask=False",
        RAGGED,
    )
    def __init__(self, a: Arguments) -> None:
        """Make a wrapper.

        Raises:
            UnsupportedError: a custom kernel or a custom mask.
            TypeError: an argument is of another type.
            ValueError: an unknown layout or backend, or buffers that are missing or do not fit together.
        """
        self._set_up(a)
        if a.use_cuda_graph:
            (entries,) = check_buffer("qo_indptr_buf", a.qo_indptr_buf, self.device)
            check_buffer("kv_indptr_buf", a.kv_indptr_buf, self.device, entries)
            self._kv_starts: torch.Tensor = a.kv_indptr_buf
            lengths = torch.zeros(entries - 1, dtype=torch.int32, device=self.device)
            self._batch = Batch(self._kv_starts[:-1, None], lengths, a.qo_indptr_buf, paged=False)

    @accepts(
        "qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None, "
        "packed_custom_mask=None, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, "
        "window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, "
        "q_data_type='float16', kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None, "
        "token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, fixed_split_size=None, "
        "disable_split_kv=False, seq_lens=None, seq_lens_q=None, max_token_per_sequence=None, max_sequence_kv=None, "
        "v_indptr=None, o_indptr=None, qo_indptr_cpu=None, kv_indptr_cpu=None, uniform_q_len=None, "
        "use_token_head_sf=False",
        RAGGED,
    )
    def plan(self, a: Arguments) -> None:
        """Say which queries and keys each sequence has, and what is computed; once per step, for all layers.

        Lists may be on the host or on the device, int32 or int64. From a device their largest lengths are read back.
        For CUDA graphs any number of keys is planned for.

        Raises:
            UnsupportedError: an argument that is not served, or a head dim or dtype.
            TypeError: an argument is of another type.
            ValueError: an argument breaks its contract, or does not fit the buffers; none of them was written.
        """
        scoring = read_scoring(a)
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
                f"kv_indptr must have the {len(self._kv_starts)} entries of its buffer, got {batch_size + 1}; "
                "use a wrapper for each batch size"
            )
        check_integers("qo_indptr", a.qo_indptr, None, **{"batch_size + 1": batch_size + 1})
        most_queries, num_rows = self._read_queries(starts["qo_indptr"], batch_size, a.max_token_per_sequence)
        most_keys = LONGEST  # the keys are not known yet
        if not self._use_cuda_graph:
            given = a.max_sequence_kv
            most_keys = (
                largest(starts["kv_indptr"].diff()) if given is None else as_int("max_sequence_kv", given, least=0)
            )
        invariant = is_batch_invariant(a.fixed_split_size, a.disable_split_kv)
        if self._use_cuda_graph:
            self._prepare(scoring, self._batch, (most_queries, most_keys, most_queries), invariant, num_rows)
            assert self._batch.cu_seqlens_q is not None
            self._batch.cu_seqlens_q.copy_(a.qo_indptr, non_blocking=a.non_blocking)
            self._kv_starts.copy_(a.kv_indptr, non_blocking=a.non_blocking)
            self._batch.seq_lens.copy_(a.kv_indptr.diff(), non_blocking=a.non_blocking)
            self._most_rows = most_queries
        else:
            batch = Batch.varlen(*(to_device(x, self.device, a.non_blocking) for x in (a.qo_indptr, a.kv_indptr)))
            self._prepare(scoring, batch, (most_queries, most_keys, num_rows), invariant, num_rows)
        self._num_keys = None if self._use_cuda_graph else int(starts["kv_indptr"][-1])

    begin_forward = plan

    @accepts(
        "q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None, "
        "return_lse=False, lse_base='log2', lse_layout='NH', enable_pdl=None, kv_cache_sf=None, sinks=None",
        RAGGED,
    )
    def run(self, a: Arguments) -> OutAndLse:
        """Attend, for one layer. FlashInfer's own list ends before `sinks`, which are by keyword.

        Returns:
            out [qo_indptr[-1], num_qo_heads, head_dim_vo], or (out, lse).

        Raises:
            UnsupportedError: an argument that is not served.
            TypeError: an argument is of another type.
            ValueError: an argument does not fit what was planned, or nothing was; nothing was written.
        """
        scoring = self._planned()
        check_one("o_scale", a.o_scale)
        k, v = as_tokens(a.k, a.v, self._kv_layout)
        if self._num_keys is not None and len(k) < self._num_keys:
            raise ValueError(
                f"k must have the {self._num_keys} tokens that kv_indptr counts, got {len(k)}; "
                f"the layout is {self._kv_layout}"
            )
        return self._attend(a, read_cache(k, v, "THD", scoring.kv_data_type, a.k_scale, a.v_scale))

    @accepts(FORWARD, RAGGED)
    def forward(self, a: Arguments) -> OutAndLse:
        """Attend by these scores and this mask, whatever was planned; FlashInfer's old name of `run`."""
        self._rescore(a)
        return self.run(a.q, a.k, a.v)

    @accepts(FORWARD, RAGGED)
    def forward_return_lse(self, a: Arguments) -> OutAndLse:
        """Return `forward`'s output and the lse."""
        self._rescore(a)
        return self.run(a.q, a.k, a.v, return_lse=True)
