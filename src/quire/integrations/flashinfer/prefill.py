"""Prefill over pages under FlashInfer's names; any mix with decode is one batch."""

from dataclasses import replace

import torch

from quire import Batch, UnsupportedError
from quire.integrations.arguments import as_int, check_flags, check_integers, check_tensor
from quire.integrations.flashinfer.arguments import (
    Pages,
    Scale,
    read_scoring,
    refuse,
)
from quire.integrations.flashinfer.masks import (
    MOST_QUERIES,
    check_no_window,
    read_mask,
    words_of_mask,
    words_without_mask,
)
from quire.integrations.flashinfer.planned import (
    LONGEST,
    OutAndLse,
    PagedWrapper,
    Wrapper,
    check_buffer,
    is_batch_invariant,
    largest,
    to_device,
)

LENGTHS = "lengths follow from the lists that start with kv_indptr and qo_indptr"


class PrefillWrapper(Wrapper):
    """What both prefill wrappers share: query counts that vary."""

    _most_rows: int | None = None  # of a wrapper for CUDA graphs, after its first plan

    def _read_queries(self, qo_indptr: torch.Tensor, batch_size: int, max_query_len: int | None) -> tuple[int, int]:
        """Check the query counts; return the bound on them, and their sum."""
        check_integers("qo_indptr", qo_indptr, None, **{"batch_size + 1": batch_size + 1})
        self._check_readable(qo_indptr=qo_indptr)
        num_rows = int(qo_indptr[-1])
        if not self._use_cuda_graph:
            if max_query_len is None:
                return largest(qo_indptr.diff()), num_rows
            return as_int("max_token_per_sequence", max_query_len, least=0), num_rows
        if self._most_rows is not None and num_rows > self._most_rows:
            raise ValueError(
                f"qo_indptr must count at most the {self._most_rows} queries of the first plan, got {num_rows}; "
                "plan for the largest batch first"
            )
        return self._most_rows or num_rows, num_rows


class BatchPrefillWithPagedKVCacheWrapper(PrefillWrapper, PagedWrapper):
    """Attend from the last queries of each sequence, any number of them, to its pages.

    Args:
        float_workspace_buffer: says on which device the wrapper works; Quire needs no memory from it.
        kv_layout: "NHD" or "HND".
        use_cuda_graph: let `plan` write into the four buffers, from which captured graphs read. The first plan has the
            most queries.
        qo_indptr_buf: [batch_size + 1] int32.
        paged_kv_indptr_buf: [batch_size + 1] int32.
        paged_kv_indices_buf: [max_num_indices] int32.
        paged_kv_last_page_len_buf: [batch_size] int32.
        custom_mask_buf: uint8, with `use_cuda_graph`: says that `plan` may be given a mask. Quire needs no memory from
            it. Graphs read the masks from a tensor of the wrapper, which the first `plan` allocates.
        mask_indptr_buf: [batch_size + 1], given with `custom_mask_buf`; Quire needs no memory from it either.
        backend: "auto".
        jit_args, jit_kwargs, variant_owns_mask: not served.

    Raises:
        UnsupportedError: another backend or a custom kernel.
        TypeError: an argument is of another type.
        ValueError: an unknown layout, or buffers that are missing or do not fit together.
    """

    _prefix = "paged_kv_"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list | None = None,
        jit_kwargs: dict | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
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
            self._keep_buffers("buf", paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
            starts, pages, _ = self._page_buffers
            check_buffer("qo_indptr_buf", qo_indptr_buf, self.device, len(starts))
            self._batch = Batch(pages, self._seq_lens, qo_indptr_buf, starts)
        self._has_mask = False  # at the last plan
        self._takes_masks = self._check_mask_buffers(custom_mask_buf, mask_indptr_buf)

    def _check_mask_buffers(self, custom_mask_buf: torch.Tensor | None, mask_indptr_buf: torch.Tensor | None) -> bool:
        """Return whether graphs are to read masks, or raise unless there are both buffers or none."""
        buffers = {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf}
        given = {name: x for name, x in buffers.items() if x is not None}
        for name, x in given.items():
            check_tensor(name, x, self.device, num_entries=None)
        if not self._use_cuda_graph or not given:
            return False
        for name in buffers:
            if name not in given:
                raise ValueError(f"{name} must be a tensor where {next(iter(given))} is one, got None; pass both")
        return True

    def plan(
        self,
        qo_indptr: torch.Tensor,  # [batch_size + 1]
        paged_kv_indptr: torch.Tensor,  # [batch_size + 1]
        paged_kv_indices: torch.Tensor,  # [paged_kv_indptr[-1]]
        paged_kv_last_page_len: torch.Tensor,  # [batch_size]
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
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
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Say which queries and pages each sequence has, and what is computed; once per step, for all layers.

        Lists may be on the host or on the device, int32 or int64. From a device their largest lengths are read back.

        Args:
            qo_indptr: [batch_size + 1], where each sequence's queries begin in `q`.
            paged_kv_indptr: [batch_size + 1], where each sequence's pages begin in `paged_kv_indices`.
            paged_kv_indices: [paged_kv_indptr[-1]], pages in order.
            paged_kv_last_page_len: [batch_size], keys in the last page of each sequence.
            num_qo_heads: query heads.
            num_kv_heads: KV heads.
            head_dim_qk: width of queries and keys.
            page_size: tokens per page.
            head_dim_vo: width of values and outputs; `head_dim_qk` if None.
            custom_mask: [sum of qo_len * kv_len] bool, one sequence after the other: which keys each query sees. A
                sequence with keys has at most 64 queries, its last tokens, which see all keys before them: the mask
                is a draft tree. It is read back. There may be more entries.
            packed_custom_mask: the same in bits of uint8, as `flashinfer.quantization.segment_packbits` returns it;
                `custom_mask` is then ignored.
            causal: a query sees no key after its own position; its sequence's queries are its last tokens. Ignored
                with a mask.
            pos_encoding_mode: "NONE".
            use_fp16_qk_reduction: ignored; sums are float32.
            sm_scale: positive factor on the scores; `head_dim_qk ** -0.5` if None.
            window_left: visible keys before the query's own; negative for no limit, and with a mask.
            logits_soft_cap: scores become `cap * tanh(scores / cap)`; None or 0 for none.
            rope_scale, rope_theta: ignored, as FlashInfer does without a position encoding.
            q_data_type: of queries: a dtype or its name.
            kv_data_type: of the cache; `q_data_type` if None.
            o_data_type: of outputs; must be `q_data_type`.
            non_blocking: copy lists to the device asynchronously.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr: not served.
            seq_lens: [batch_size], keys of each sequence; they follow from the lists if None.
            seq_lens_q, block_tables: not served; the lists say the same.
            max_token_per_sequence: an upper bound of a sequence's queries; read from `qo_indptr` if None.
            max_sequence_kv: an upper bound of a sequence's keys; read from the lists if None.
            fixed_split_size: if positive, make results independent of the batch, as `disable_split_kv` does.
            disable_split_kv: make each token's result depend on its sequence alone (`plan(batch_invariant=True)`).
            uniform_q_len: ignored, a hint.

        Raises:
            UnsupportedError: a mask that is no draft tree or comes with a window, a position encoding, or a head dim or
                dtype that is not served.
            TypeError: an argument is of another type.
            ValueError: an argument breaks its contract, or does not fit the buffers; none of them was written.
        """
        refuse_items(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        refuse(LENGTHS, seq_lens_q=seq_lens_q, block_tables=block_tables)
        check_flags(causal=causal, non_blocking=non_blocking, use_fp16_qk_reduction=use_fp16_qk_reduction)
        mask = read_mask(custom_mask, packed_custom_mask)
        if mask is not None and self._use_cuda_graph and not self._takes_masks:
            raise ValueError(
                "custom_mask_buf must be a tensor where graphs read masks, got None; make the wrapper with it"
            )
        reads_words = mask is not None or self._takes_masks
        scoring = read_scoring(
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo,
            q_data_type,
            kv_data_type,
            o_data_type,
            sm_scale,
            causal or reads_words,  # which say what is seen in its place
            window_left,
            logits_soft_cap,
            pos_encoding_mode,
        )
        if reads_words:
            check_no_window(scoring.window_left)
        page_size = as_int("page_size", page_size, least=1, most=LONGEST)
        lists = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        lengths, most_keys = self._read_pages(*lists, page_size, seq_lens, max_sequence_kv)
        most_queries, num_rows = self._read_queries(qo_indptr, len(lengths), max_token_per_sequence)
        invariant = is_batch_invariant(fixed_split_size, disable_split_kv)
        words = self._find_words(mask, qo_indptr, lengths, causal) if reads_words else None
        longest = most_queries if words is None else min(most_queries, MOST_QUERIES)
        if self._use_cuda_graph:
            batch = self._batch
            if words is not None and self._most_rows is None:
                batch = replace(batch, tree_bits=torch.zeros(most_queries, dtype=torch.int64, device=self.device))
            self._prepare(scoring, batch, (longest, most_keys, most_queries), invariant, num_rows)
            self._write_buffers(*lists, lengths, non_blocking)
            assert batch.cu_seqlens_q is not None
            batch.cu_seqlens_q.copy_(qo_indptr, non_blocking=non_blocking)
            if words is not None:
                assert batch.tree_bits is not None
                batch.tree_bits[:num_rows].copy_(words, non_blocking=non_blocking)
            self._most_rows = most_queries
        else:
            starts, pages, lengths, queries = (
                to_device(x, self.device, non_blocking) for x in (paged_kv_indptr, paged_kv_indices, lengths, qo_indptr)
            )
            if words is not None:
                words = words.to(self.device, non_blocking=non_blocking)
            batch = Batch(pages, lengths, queries, starts, tree_bits=words)
            self._prepare(scoring, batch, (longest, most_keys, num_rows), invariant, num_rows)
        self._has_mask = mask is not None
        self._causal = causal
        self._page_size = page_size

    begin_forward = plan

    def _find_words(
        self, mask: torch.Tensor | None, qo_indptr: torch.Tensor, lengths: torch.Tensor, causal: bool
    ) -> torch.Tensor:
        """Return a word for each query: which of its sequence's queries it sees."""
        if lengths.is_meta:
            raise UnsupportedError("seq_lens must be on a GPU or the CPU where queries have masks, got meta; pass them")
        starts, lens = qo_indptr.tolist(), lengths.tolist()
        return words_without_mask(starts, lens, causal) if mask is None else words_of_mask(mask, starts, lens)

    def _rescore(
        self,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        causal: bool | None = None,
    ) -> None:
        self._planned()
        if self._batch.tree_bits is not None:
            check_no_window(as_int("window_left", window_left))
            if not self._has_mask and causal != self._causal:
                raise ValueError(
                    f"causal must be the planned {self._causal}, got {causal}; graphs read what was planned: plan again"
                )
            causal = None  # as planned: the words say what is seen
        super()._rescore(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, causal)

    def run(
        self,
        q: torch.Tensor,  # [qo_indptr[-1], num_qo_heads, head_dim_qk]
        paged_kv_cache: Pages,
        *args: object,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: object = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> OutAndLse:
        """Attend, for one layer.

        Args:
            q: [qo_indptr[-1], num_qo_heads, head_dim_qk].
            paged_kv_cache: a tensor [num_pages, 2, page_size, num_kv_heads, head_dim], or a pair of tensors without the
                second dimension; in layout "HND" heads come before the tokens of a page.
            *args: arguments of custom kernels, not served.
            q_scale: None or 1.
            k_scale: factor on an fp8 cache's keys, a number or a float32 tensor.
            v_scale: the same for values.
            out: where to write the output.
            lse: where to write the lse, float32, of the layout below.
            return_lse: also return the lse, sinks included.
            lse_base: "log2" or "ln".
            lse_layout: "NH" for [qo_indptr[-1], num_qo_heads], or "HN" for its transpose.
            enable_pdl: ignored; Quire chooses.
            window_left: must be what was planned.
            sinks: [num_qo_heads] attention sinks, natural-log logits.
            kv_cache_sf, skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress: not served.

        Returns:
            out [qo_indptr[-1], num_qo_heads, head_dim_vo], or (out, lse).

        Raises:
            UnsupportedError: an argument that is not served.
            TypeError: an argument is of another type.
            ValueError: an argument does not fit what was planned, or nothing was; nothing was written.
        """
        self._planned(window_left)
        refuse("they belong to custom kernels", args=len(args))
        refuse(
            "Quire skips no key, reads no fp4 and sums in float32",
            kv_cache_sf=kv_cache_sf,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress,
        )
        cache = self._read_cache(paged_kv_cache, q_scale, k_scale, v_scale)
        return self._attend(q, cache, sinks, out, lse, return_lse, lse_base, lse_layout)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pages,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> OutAndLse:
        """Attend by these scores and this `causal`, whatever was planned; FlashInfer's old name of `run`.

        After a plan with a mask, the mask counts, and `causal` is ignored.
        """
        check_flags(causal=causal)
        self._rescore(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, causal)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pages,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> OutAndLse:
        """Return `forward`'s output and the lse."""
        check_flags(causal=causal)
        self._rescore(pos_encoding_mode, window_left, logits_soft_cap, sm_scale, causal)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)


def refuse_items(
    prefix_len_ptr: torch.Tensor | None,
    token_pos_in_items_ptr: torch.Tensor | None,
    token_pos_in_items_len: int,
    max_item_len_ptr: torch.Tensor | None,
) -> None:
    """Raise if several items are to be scored in one sequence."""
    refuse(
        "several items in one sequence are not served",
        prefix_len_ptr=prefix_len_ptr,
        token_pos_in_items_ptr=token_pos_in_items_ptr,
        token_pos_in_items_len=token_pos_in_items_len,
        max_item_len_ptr=max_item_len_ptr,
    )
