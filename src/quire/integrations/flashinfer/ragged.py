"""Prefill over packed keys under FlashInfer's names: keys and values that are in no pages."""

import torch

from quire import Batch
from quire.integrations.arguments import as_int, check_flags
from quire.integrations.flashinfer.arguments import (
    Scale,
    as_tokens,
    check_q_scale,
    read_cache,
    read_scoring,
    refuse,
)
from quire.integrations.flashinfer.planned import (
    LONGEST,
    OutAndLse,
    check_buffer,
    check_indptr,
    is_batch_invariant,
    largest,
    to_device,
)
from quire.integrations.flashinfer.prefill import LENGTHS, PrefillWrapper, refuse_items

NO_MASKS = "BatchPrefillWithPagedKVCacheWrapper serves masks, those that are draft trees"


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Attend from the last queries of each sequence to keys and values that are packed one sequence after the other.

    Args:
        float_workspace_buffer: says on which device the wrapper works; Quire needs no memory from it.
        kv_layout: "NHD" for keys [num_tokens, num_kv_heads, head_dim], "HND" for heads first.
        use_cuda_graph: let `plan` write into the two buffers, from which captured graphs read. The first plan has the
            most queries.
        qo_indptr_buf: [batch_size + 1] int32.
        kv_indptr_buf: [batch_size + 1] int32.
        custom_mask_buf, mask_indptr_buf: not served.
        backend: "auto".
        jit_args, jit_kwargs, variant_owns_mask: not served.

    Raises:
        UnsupportedError: another backend, a custom kernel or a custom mask.
        TypeError: an argument is of another type.
        ValueError: an unknown layout, or buffers that are missing or do not fit together.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list | None = None,
        jit_kwargs: dict | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        refuse(NO_MASKS, custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            backend,
            jit_args=jit_args,
            jit_kwargs=jit_kwargs,
            variant_owns_mask=variant_owns_mask,
        )
        if use_cuda_graph:
            (entries,) = check_buffer("qo_indptr_buf", qo_indptr_buf, self.device)
            check_buffer("kv_indptr_buf", kv_indptr_buf, self.device, entries)
            assert kv_indptr_buf is not None  # checked
            self._kv_starts = kv_indptr_buf
            lengths = torch.zeros(entries - 1, dtype=torch.int32, device=self.device)
            self._batch = Batch(kv_indptr_buf[:-1, None], lengths, qo_indptr_buf, paged=False)

    def plan(
        self,
        qo_indptr: torch.Tensor,  # [batch_size + 1]
        kv_indptr: torch.Tensor,  # [batch_size + 1]
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Say which queries and keys each sequence has, and what is computed.

        Args:
            qo_indptr: [batch_size + 1], where each sequence's queries begin in `q`.
            kv_indptr: [batch_size + 1], where each sequence's keys begin in `k`, and its values in `v`.
            seq_lens, seq_lens_q, v_indptr, o_indptr: not served; the two lists say the same.
            custom_mask, packed_custom_mask: not served.
            num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, causal,
                pos_encoding_mode, use_fp16_qk_reduction, window_left, logits_soft_cap, sm_scale, rope_scale,
                rope_theta, q_data_type, kv_data_type, o_data_type, non_blocking, prefix_len_ptr,
                token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, fixed_split_size, disable_split_kv,
                max_token_per_sequence, max_sequence_kv, uniform_q_len: as in `BatchPrefillWithPagedKVCacheWrapper`.

        Raises:
            UnsupportedError: a custom mask, a position encoding, or a head dim or dtype that is not served.
            TypeError: an argument is of another type.
            ValueError: an argument breaks its contract, or does not fit the buffers; none of them was written.
        """
        refuse(NO_MASKS, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)
        refuse_items(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        refuse(LENGTHS, seq_lens=seq_lens, seq_lens_q=seq_lens_q, v_indptr=v_indptr, o_indptr=o_indptr)
        check_flags(non_blocking=non_blocking, use_fp16_qk_reduction=use_fp16_qk_reduction)
        scoring = read_scoring(
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo,
            q_data_type,
            kv_data_type,
            o_data_type,
            sm_scale,
            causal,
            window_left,
            logits_soft_cap,
            pos_encoding_mode,
        )
        batch_size = check_indptr("kv_indptr", kv_indptr)
        self._check_readable(kv_indptr=kv_indptr)
        lengths = kv_indptr.diff()
        if self._use_cuda_graph and batch_size != self._batch.num_seqs:
            raise ValueError(
                f"kv_indptr must have the {len(self._kv_starts)} entries of its buffer, got {batch_size + 1}; "
                "use a wrapper for each batch size"
            )
        most_queries, num_rows = self._read_queries(qo_indptr, batch_size, max_token_per_sequence)
        most_keys = LONGEST  # the keys are not known yet
        if not self._use_cuda_graph:
            given = max_sequence_kv
            most_keys = largest(lengths) if given is None else as_int("max_sequence_kv", given, least=0)
        invariant = is_batch_invariant(fixed_split_size, disable_split_kv)
        if self._use_cuda_graph:
            self._prepare(scoring, self._batch, (most_queries, most_keys, most_queries), invariant, num_rows)
            assert self._batch.cu_seqlens_q is not None
            self._batch.cu_seqlens_q.copy_(qo_indptr, non_blocking=non_blocking)
            self._kv_starts.copy_(kv_indptr, non_blocking=non_blocking)
            self._batch.seq_lens.copy_(lengths, non_blocking=non_blocking)
            self._most_rows = most_queries
        else:
            queries, starts = (to_device(x, self.device, non_blocking) for x in (qo_indptr, kv_indptr))
            batch = Batch.varlen(queries, starts)
            self._prepare(scoring, batch, (most_queries, most_keys, num_rows), invariant, num_rows)
        self._num_keys = None if self._use_cuda_graph else int(kv_indptr[-1])

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,  # [qo_indptr[-1], num_qo_heads, head_dim_qk]
        k: torch.Tensor,  # [kv_indptr[-1], num_kv_heads, head_dim_qk]
        v: torch.Tensor,  # [kv_indptr[-1], num_kv_heads, head_dim_vo]
        *args: object,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: object = None,
    ) -> OutAndLse:
        """Attend, for one layer.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim_qk].
            k: [kv_indptr[-1], num_kv_heads, head_dim_qk]; in layout "HND" heads come first.
            v: [kv_indptr[-1], num_kv_heads, head_dim_vo], likewise.
            *args: arguments of custom kernels, not served.
            q_scale, o_scale: None or 1.
            k_scale: factor on fp8 keys, a number or a float32 tensor.
            v_scale: the same for values.
            out, lse, return_lse, lse_base, lse_layout, enable_pdl: as in `BatchPrefillWithPagedKVCacheWrapper`.
            kv_cache_sf: not served.

        Returns:
            out [qo_indptr[-1], num_qo_heads, head_dim_vo], or (out, lse).

        Raises:
            UnsupportedError: an argument that is not served.
            TypeError: an argument is of another type.
            ValueError: an argument does not fit what was planned, or nothing was; nothing was written.
        """
        scoring = self._planned()
        refuse("they belong to custom kernels", args=len(args))
        refuse("Quire reads no fp4", kv_cache_sf=kv_cache_sf)
        check_q_scale(q_scale, o_scale=o_scale)
        k, v = as_tokens(k, v, self._kv_layout)
        if self._num_keys is not None and len(k) < self._num_keys:
            raise ValueError(
                f"k must have the {self._num_keys} tokens that kv_indptr counts, got {len(k)}; "
                f"the layout is {self._kv_layout}"
            )
        cache = read_cache(k, v, "THD", scoring.kv_data_type, k_scale, v_scale)
        return self._attend(q, cache, None, out, lse, return_lse, lse_base, lse_layout)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> OutAndLse:
        """Attend by these scores and this mask, whatever was planned; FlashInfer's old name of `run`."""
        check_flags(causal=causal)
        self._rescore(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, causal)
        return self.run(q, k, v)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> OutAndLse:
        """Return `forward`'s output and the lse."""
        check_flags(causal=causal)
        self._rescore(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, causal)
        return self.run(q, k, v, return_lse=True)
