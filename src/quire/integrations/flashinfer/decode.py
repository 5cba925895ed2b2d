"""Decode under FlashInfer's names: one query, or a few, for each sequence."""

import torch

from quire import Batch
from quire.integrations.arguments import as_int, check_flags
from quire.integrations.flash_attn.kvcache import multiples
from quire.integrations.flashinfer.arguments import (
    Pages,
    Scale,
    read_scoring,
    refuse,
)
from quire.integrations.flashinfer.planned import LONGEST, OutAndLse, PagedWrapper, is_batch_invariant, to_device


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attend from the last query of each sequence, or its last `q_len_per_req`, to its pages.

    Args:
        float_workspace_buffer: says on which device the wrapper works; Quire needs no memory from it.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: let `plan` write into the three buffers, from which captured graphs read.
        use_tensor_cores: ignored; Quire chooses.
        paged_kv_indptr_buffer: [batch_size + 1] int32.
        paged_kv_indices_buffer: [max_num_indices] int32.
        paged_kv_last_page_len_buffer: [batch_size] int32.
        backend: "auto".
        jit_args: not served.

    Raises:
        UnsupportedError: another backend, or a custom kernel.
        TypeError: an argument is of another type.
        ValueError: an unknown layout, or buffers that are missing or do not fit together.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args=jit_args)
        check_flags(use_tensor_cores=use_tensor_cores)
        self._use_tensor_cores = use_tensor_cores
        self._q_len_per_req: int | None = None  # until `plan` was called
        if use_cuda_graph:
            self._keep_buffers("buffer", paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    @property
    def use_tensor_cores(self) -> bool:
        """What the wrapper was made with."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,  # [batch_size + 1]
        indices: torch.Tensor,  # [indptr[-1]]
        last_page_len: torch.Tensor,  # [batch_size]
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
    ) -> None:
        """Say which pages each sequence has, and what is computed; once per step, for all layers.

        Lists may be on the host or on the device, int32 or int64. From a device their largest length is read back, but
        for CUDA graphs, where the buffers are the bound.

        Args:
            indptr: [batch_size + 1], where each sequence's pages begin in `indices`.
            indices: [indptr[-1]], pages in order.
            last_page_len: [batch_size], keys in the last page of each sequence.
            num_qo_heads: query heads.
            num_kv_heads: KV heads.
            head_dim: width of queries, keys and values.
            page_size: tokens per page.
            pos_encoding_mode: "NONE".
            window_left: visible keys before the query's own; negative for no limit.
            logits_soft_cap: scores become `cap * tanh(scores / cap)`; None or 0 for none.
            q_data_type: of queries: a dtype or its name.
            kv_data_type: of the cache; `q_data_type` if None.
            o_data_type: of outputs; must be `q_data_type`.
            data_type: stands in for `q_data_type` and `kv_data_type` where they are None.
            sm_scale: positive factor on the scores; `head_dim ** -0.5` if None.
            rope_scale, rope_theta: ignored, as FlashInfer does without a position encoding.
            non_blocking: copy lists to the device asynchronously.
            block_tables: not served; pages are read from `indices`.
            seq_lens: [batch_size], keys of each sequence; they follow from the lists if None.
            fixed_split_size: if positive, make results independent of the batch, as `disable_split_kv` does.
            disable_split_kv: make each token's result depend on its sequence alone (`plan(batch_invariant=True)`).
            q_len_per_req: queries of each sequence; its last tokens. A wrapper for CUDA graphs has one.
            window_right: 0.
            is_causal: whether a query sees no later key; by default if there are several.

        Raises:
            UnsupportedError: a position encoding, a window to the right, or a head dim or dtype that is not served.
            TypeError: an argument is of another type.
            ValueError: an argument breaks its contract, or does not fit the buffers; none of them was written.
        """
        refuse("pages are read from indices", block_tables=block_tables)
        refuse("a query sees no key after its own position", window_right=window_right)
        check_flags(non_blocking=non_blocking)
        q_len = as_int("q_len_per_req", q_len_per_req, least=1)
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        scoring = read_scoring(
            num_qo_heads,
            num_kv_heads,
            head_dim,
            None,
            q_data_type,
            kv_data_type,
            o_data_type,
            sm_scale,
            q_len > 1 if is_causal is None else is_causal,
            window_left,
            logits_soft_cap,
            pos_encoding_mode,
        )
        page_size = as_int("page_size", page_size, least=1, most=LONGEST)
        seq_lens, most_keys = self._read_pages(indptr, indices, last_page_len, page_size, seq_lens)
        invariant = is_batch_invariant(fixed_split_size, disable_split_kv)
        batch_size = len(last_page_len)
        num_tokens = batch_size * q_len
        if self._use_cuda_graph:
            if self._q_len_per_req not in (None, q_len):
                raise ValueError(
                    f"q_len_per_req must be {self._q_len_per_req} as at the first plan, got {q_len}; "
                    "use a wrapper for each"
                )
            starts, pages, _ = self._page_buffers
            if self._q_len_per_req is None:
                self._batch = Batch(pages, self._seq_lens, self._query_starts(batch_size, q_len), starts)
            self._prepare(scoring, self._batch, (q_len, most_keys, num_tokens), invariant, num_tokens)
            self._write_buffers(indptr, indices, last_page_len, seq_lens, non_blocking)
        else:
            starts, pages, lengths = (to_device(x, self.device, non_blocking) for x in (indptr, indices, seq_lens))
            batch = Batch(pages, lengths, self._query_starts(batch_size, q_len), starts)
            self._prepare(scoring, batch, (q_len, most_keys, num_tokens), invariant, num_tokens)
        self._q_len_per_req, self._page_size = q_len, page_size

    begin_forward = plan

    def _query_starts(self, batch_size: int, q_len: int) -> torch.Tensor | None:
        return None if q_len == 1 else multiples(batch_size + 1, q_len, self.device)

    def run(
        self,
        q: torch.Tensor,  # [batch_size * q_len_per_req, num_qo_heads, head_dim]
        paged_kv_cache: Pages,
        *args: object,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: object = None,
    ) -> OutAndLse:
        """Attend, for one layer.

        Args:
            q: [batch_size * q_len_per_req, num_qo_heads, head_dim].
            paged_kv_cache: a tensor [num_pages, 2, page_size, num_kv_heads, head_dim], or a pair of tensors without the
                second dimension; in layout "HND" heads come before the tokens of a page.
            *args: arguments of custom kernels, not served.
            q_scale: None or 1.
            k_scale: factor on an fp8 cache's keys, a number or a float32 tensor.
            v_scale: the same for values.
            out: where to write the output.
            lse: where to write the lse, [batch_size * q_len_per_req, num_qo_heads] float32.
            return_lse: also return the lse, in base 2, sinks included.
            enable_pdl: ignored; Quire chooses.
            window_left: must be what was planned.
            sinks: [num_qo_heads] attention sinks, natural-log logits.
            q_len_per_req: must be what was planned.
            skip_softmax_threshold_scale_factor, kv_cache_sf: not served.

        Returns:
            out like `q`, or (out, lse).

        Raises:
            UnsupportedError: an argument that is not served.
            TypeError: an argument is of another type.
            ValueError: an argument does not fit what was planned, or nothing was; nothing was written.
        """
        self._planned(window_left)
        refuse("they belong to custom kernels", args=len(args))
        refuse(
            "Quire skips no key and reads no fp4",
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            kv_cache_sf=kv_cache_sf,
        )
        if q_len_per_req is not None and as_int("q_len_per_req", q_len_per_req) != self._q_len_per_req:
            raise ValueError(
                f"q_len_per_req must be the planned {self._q_len_per_req}, got {q_len_per_req}; pass it to plan"
            )
        cache = self._read_cache(paged_kv_cache, q_scale, k_scale, v_scale)
        return self._attend(q, cache, sinks, out, lse, return_lse)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pages,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> OutAndLse:
        """Attend by these scores and this window, whatever was planned; FlashInfer's old name of `run`."""
        self._rescore(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pages,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> OutAndLse:
        """Return `forward`'s output and the lse."""
        self._rescore(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with `use_cuda_graph=True`."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )
