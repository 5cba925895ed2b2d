"""What is done with each argument of FlashInfer's functions, by family.

Names, order and defaults in the modules are those of FlashInfer 0.7.4. 0.7.2 lacks some of them.
"""

from quire.integrations.flashinfer.signatures import Table, flag, refused, served

KERNELS = "custom kernels are not served"
NO_FP4 = "Quire reads no fp4, and scales per token are in a PagedKVCache"
LENGTHS = "lengths follow from the lists that start with kv_indptr and qo_indptr"
ITEMS = "several items in one sequence are not served"
NO_ROTARY = served("ignored, as FlashInfer does without a rotary encoding.")
CHOICE = served("ignored; Quire chooses.")
BUFFER = served("int32, read by captured graphs: with `use_cuda_graph`, `plan` writes into it.")

SCORES: Table = {
    "pos_encoding_mode": served(
        '"NONE", or "ALIBI" with the slopes of the paper (arXiv 2108.12409), where no query sees a later key. The lse '
        "is not served with it."
    ),
    "use_fp16_qk_reduction": flag("ignored; sums are float32."),
    "sm_scale": served("positive factor on the scores; the head dim to the power of -0.5 if None."),
    "window_left": served("visible keys before the query's own; negative for no limit, and with a mask."),
    "window_right": refused("a query sees no key after its own position"),
    "logits_soft_cap": served("scores become `cap * tanh(scores / cap)`; None or 0 for none."),
    "rope_scale": NO_ROTARY,
    "rope_theta": NO_ROTARY,
    "q_scale": served("factor on the scores, a number; None for 1."),
    "k_scale": served("factor on an fp8 cache's keys, a number or a float32 tensor."),
    "v_scale": served("the same for its values."),
    "o_scale": served("None or 1."),
    "backend": served("the name of one of FlashInfer's backends; a hint that is ignored."),
    "enable_pdl": CHOICE,
    "sinks": served("[num_qo_heads] attention sinks, natural-log logits."),
    "causal": flag("whether a query sees no key after its own position. Ignored with a mask."),
    "out": served("where to write the output."),
    "lse": served("where to write the lse, float32; written whether or not it is returned."),
    "return_lse": flag("also return the lse, sinks included."),
    "lse_base": served('"log2" or "ln".'),
    "lse_layout": served('"NH" for [num_tokens, num_qo_heads], or "HN" for its transpose.'),
    "args": refused("they belong to custom kernels"),
    "kv_cache_sf": refused(NO_FP4),
    "skip_softmax_threshold_scale_factor": refused("Quire skips no key"),
    "use_fp16_softmax": refused("Quire sums in float32"),
    "uses_spcompress": refused("Quire reads no compressed cache"),
    "kv_layout": served('"NHD" or "HND": whether tokens or heads come first.'),
    "q": served("queries, [num_tokens, num_qo_heads, head_dim]."),
}

WRAPPER: Table = SCORES | {
    "float_workspace_buffer": served("says on which device the wrapper works; Quire needs no memory from it."),
    "workspace_buffer": served("says on which device the wrapper works; Quire needs no memory from it."),
    "use_cuda_graph": flag("let `plan` write into the buffers, from which captured graphs read."),
    "use_tensor_cores": flag("ignored; Quire chooses."),
    "custom_mask_buf": served(
        "uint8, with `use_cuda_graph`: says that `plan` may be given a mask. Quire needs no memory from it. Graphs "
        "read the masks from a tensor of the wrapper, which the first `plan` allocates."
    ),
    "mask_indptr_buf": served("[batch_size + 1], given with `custom_mask_buf`; Quire needs no memory from it either."),
    "max_total_num_rows": served(
        "with `use_cuda_graph`, the most query tokens of any `plan`; those of the first one if None."
    ),
    "jit_args": refused(KERNELS),
    "jit_kwargs": refused(KERNELS),
    "variant_owns_mask": refused(KERNELS),
    "num_qo_heads": served("query heads."),
    "num_kv_heads": served("KV heads."),
    "head_dim": served("width of queries, keys and values."),
    "head_dim_qk": served("width of queries and keys."),
    "head_dim_vo": served("width of values and outputs; `head_dim_qk` if None."),
    "page_size": served("tokens per page."),
    "q_data_type": served("of queries: a dtype or its name."),
    "kv_data_type": served("of the cache; `q_data_type` if None."),
    "o_data_type": served(
        "of outputs; `q_data_type` if None. float8_e4m3fn is rounded once, others from results in `q_data_type`."
    ),
    "data_type": served("stands in for `q_data_type` and `kv_data_type` where they are None."),
    "non_blocking": flag("copy lists to the device asynchronously."),
    "seq_lens": served("[batch_size], keys of each sequence; they follow from the lists if None."),
    "seq_lens_q": refused(LENGTHS),
    "block_tables": refused("pages are read from indices"),
    "fixed_split_size": served("if positive, make results independent of the batch, as `disable_split_kv` does."),
    "disable_split_kv": flag("make each token's result depend on its sequence alone (`plan(batch_invariant=True)`)."),
    "use_token_head_sf": refused(NO_FP4),
    "use_profiler": refused("Quire has no profiler of its own"),
    "profiler_buffer": refused("Quire has no profiler of its own"),
}

DECODE: Table = WRAPPER | {
    "paged_kv_indptr_buffer": BUFFER,
    "paged_kv_indices_buffer": BUFFER,
    "paged_kv_last_page_len_buffer": BUFFER,
    "indptr_buffer": BUFFER,
    "indices_buffer": BUFFER,
    "last_page_len_buffer": BUFFER,
    "indptr": served("[batch_size + 1], where each sequence's pages begin in `indices`."),
    "indices": served("[indptr[-1]], pages in order."),
    "last_page_len": served("[batch_size], keys in the last page of each sequence."),
    "q_len_per_req": served("queries of each sequence, its last tokens. A wrapper for CUDA graphs has one number."),
    "is_causal": served("whether a query sees no later key; by default if there are several."),
    "global_override_indptr_cpu": served("`indptr` on the host, read in its place; None to read `indptr`."),
    "paged_kv_cache": served(
        "[num_pages, 2, page_size, num_kv_heads, head_dim], or a pair of tensors without the second dimension; heads "
        'come before tokens in layout "HND". Without the dimension of tokens, pages have one.'
    ),
}

PREFILL: Table = WRAPPER | {
    "qo_indptr_buf": BUFFER,
    "paged_kv_indptr_buf": BUFFER,
    "paged_kv_indices_buf": BUFFER,
    "paged_kv_last_page_len_buf": BUFFER,
    "qo_indptr": served("[batch_size + 1], where each sequence's queries begin in `q`."),
    "paged_kv_indptr": served("[batch_size + 1], where each sequence's pages begin in `paged_kv_indices`."),
    "paged_kv_indices": served("[paged_kv_indptr[-1]], pages in order."),
    "paged_kv_last_page_len": served("[batch_size], keys in the last page of each sequence."),
    "custom_mask": served(
        "[sum of qo_len * kv_len] bool, one sequence after the other: which keys each query sees. It is a draft tree "
        "(at most 64 queries of a sequence, its last tokens, which see all keys before them), or shows each query one "
        "interval of keys. It is read back. There may be more entries."
    ),
    "packed_custom_mask": served(
        "the same in bits of uint8, as `flashinfer.quantization.segment_packbits` returns it; `custom_mask` is then "
        "ignored."
    ),
    "prefix_len_ptr": refused(ITEMS),
    "token_pos_in_items_ptr": refused(ITEMS),
    "token_pos_in_items_len": refused(ITEMS),
    "max_item_len_ptr": refused(ITEMS),
    "block_tables": refused(LENGTHS),
    "max_token_per_sequence": served("an upper bound of a sequence's queries; read from `qo_indptr` if None."),
    "max_sequence_kv": served("an upper bound of a sequence's keys; read from the lists if None."),
    "uniform_q_len": served("ignored, a hint."),
    "paged_kv_cache": DECODE["paged_kv_cache"],
}

RAGGED: Table = PREFILL | {
    "kv_indptr_buf": BUFFER,
    "custom_mask_buf": refused("BatchPrefillWithPagedKVCacheWrapper serves masks"),
    "mask_indptr_buf": refused("BatchPrefillWithPagedKVCacheWrapper serves masks"),
    "custom_mask": refused("BatchPrefillWithPagedKVCacheWrapper serves masks"),
    "packed_custom_mask": refused("BatchPrefillWithPagedKVCacheWrapper serves masks"),
    "kv_indptr": served("[batch_size + 1], where each sequence's keys begin in `k`."),
    "seq_lens": refused(LENGTHS),
    "v_indptr": refused(LENGTHS),
    "o_indptr": refused(LENGTHS),
    "qo_indptr_cpu": served("`qo_indptr` on the host, from which lengths are read; None to read `qo_indptr`."),
    "kv_indptr_cpu": served("the same of `kv_indptr`."),
    "k": served('keys, [kv_indptr[-1], num_kv_heads, head_dim_qk]; heads come first in layout "HND".'),
    "v": served("values, [kv_indptr[-1], num_kv_heads, head_dim_vo], likewise."),
}

CASCADE: Table = WRAPPER | {
    "num_levels": served("how many levels there are."),
    "qo_indptr_buf_arr": served("of each level [batch_size + 1] int32, read by captured graphs."),
    "paged_kv_indptr_buf_arr": served("of each level [batch_size + 1] int32."),
    "paged_kv_indices_buf_arr": served("of each level [max_num_indices] int32."),
    "paged_kv_last_page_len_buf_arr": served("of each level [batch_size] int32."),
    "qo_indptr_arr": served("of each level [batch_size + 1], where the queries of each of its sequences begin."),
    "paged_kv_indptr_arr": served("of each level, where each sequence's pages begin."),
    "paged_kv_indices_arr": served("of each level, pages in order."),
    "paged_kv_last_page_len": served("of each level [batch_size], keys in the last page of each sequence."),
    "causal": flag("whether queries see no later key, at the last level."),
    "window_left": served("as FlashInfer has it: at each level, counted from the end of that level's keys."),
    "paged_kv_cache": DECODE["paged_kv_cache"],
}

SINGLE: Table = WRAPPER | {
    "q": served("[num_qo_heads, head_dim], or [qo_len, num_qo_heads, head_dim] of the last tokens."),
    "k": served('[kv_len, num_kv_heads, head_dim]; in layout "HND" heads come first.'),
    "v": served("[kv_len, num_kv_heads, head_dim_vo], likewise."),
    "scale_q": refused("queries are not fp8"),
    "scale_k": refused("queries are not fp8"),
    "scale_v": refused("queries are not fp8"),
    "o_dtype": served("of the output; q's if None."),
    "custom_mask": served("[qo_len, kv_len] bool, or flat: as in `BatchPrefillWithPagedKVCacheWrapper.plan`."),
    "packed_custom_mask": served(
        'the same in bits of uint8, as `flashinfer.quantization.packbits` returns it with bitorder="little".'
    ),
}

MLA: Table = WRAPPER | {
    "qo_indptr": served("[batch_size + 1], where each sequence's queries begin; of the constructor, a buffer."),
    "kv_indptr": served("[batch_size + 1], where each sequence's pages begin in `kv_indices`; likewise."),
    "kv_indices": served("[kv_indptr[-1]], pages in order; likewise."),
    "kv_len_arr": served("[batch_size], keys of each sequence; likewise."),
    "num_heads": served("query heads."),
    "head_dim_ckv": served("columns of a latent, which are the value too."),
    "head_dim_kpe": served("rotary columns."),
    "causal": served("whether a query sees no key after its own position."),
    "sm_scale": served("positive factor on the scores."),
    "metadata": refused("pass qo_indptr, kv_indptr, kv_indices and kv_len_arr"),
    "cum_seq_lens_q": refused("pass qo_indptr"),
    "block_tables": refused("pass kv_indptr and kv_indices"),
    "seq_lens": refused("pass kv_len_arr"),
    "max_q_len": served("an upper bound of a sequence's queries; read from `qo_indptr` if None."),
    "query_layout": CHOICE,
    "kv_cache_layout": CHOICE,
    "lse_mode": served("ignored; `run` says what it returns."),
    "output_dtype": served("of outputs; `q_data_type` if None."),
    "output_scale": refused("outputs have no scale"),
    "scale_mode": refused("an fp8 cache has one scale, ckv_scale"),
    "skip_softmax": refused("Quire skips no key"),
    "use_sinks": flag("ignored; `run` takes them or not."),
    "q_nope": served("queries of the latents, [num_tokens, num_heads, head_dim_ckv]."),
    "q_pe": served("their rotary columns, rotated, [num_tokens, num_heads, head_dim_kpe]."),
    "ckv_cache": served("[num_pages, page_size, head_dim_ckv]: with `kpe_cache`, neighbouring columns of one tensor."),
    "kpe_cache": served("[num_pages, page_size, head_dim_kpe], the columns after those of `ckv_cache`."),
    "query": served("in place of both: a pair, or a tensor [num_tokens, num_heads, head_dim_ckv + head_dim_kpe]."),
    "kv_cache": served("in place of both: a pair, or a tensor [num_pages, page_size, head_dim_ckv + head_dim_kpe]."),
    "kv_len": refused("plan says the lengths"),
    "page_table": refused("plan says the pages"),
    "return_lse_base_on_e": flag("the lse is a natural logarithm."),
    "ckv_scale": served("factor on an fp8 cache's numbers; None for 1."),
    "ckv_scale_arr": refused("an fp8 cache has one scale, ckv_scale"),
    "kpe_scale": served("None or `ckv_scale`."),
    "bmm1_scale": refused("say it by sm_scale"),
    "bmm2_scale": refused("scale the output where it is needed"),
}

BLOCKS: Table = SCORES | {
    "query": served("[num_tokens, num_qo_heads, head_dim]; of latents, [batch_size, q_len, num_heads, width]."),
    "key": served("[num_keys, num_kv_heads, head_dim], one sequence after the other."),
    "value": served("[num_keys, num_kv_heads, head_dim_vo], likewise."),
    "kv_cache": served(
        "[num_pages, 2, num_kv_heads, page_size, head_dim], or a pair of tensors without the second dimension; tokens "
        'come before heads in layout "NHD". Of latents, [num_pages, page_size, width] or [num_pages, 1, page_size, '
        "width]."
    ),
    "workspace_buffer": served("ignored; Quire needs no memory from it."),
    "block_tables": served("[batch_size, max_pages] int32, pages of each sequence in order."),
    "seq_lens": served("[batch_size] int32, keys of each sequence."),
    "max_seq_len": served("an upper bound of `seq_lens`."),
    "max_kv_len": served("an upper bound of `seq_lens`."),
    "max_q_len": served("an upper bound of a sequence's queries."),
    "batch_size": served("how many sequences there are."),
    "bmm1_scale": served("factor on the scores, a number: of q, k and the softmax together."),
    "bmm2_scale": served("factor on the output: 1, but for an fp8 cache or output. A number."),
    "out_dtype": served("of the output; that of `out`, or else of `query`, if None."),
    "o_sf_scale": refused("outputs are not fp4"),
    "o_sf_vec_size": refused("outputs are not fp4"),
    "o_scale": refused("bmm2_scale scales e4m3 outputs"),
    "q_len_per_req": served("queries of each sequence, where `cum_seq_lens_q` is None."),
    "cum_seq_lens_q": served("[batch_size + 1] int32, where each sequence's queries begin; with `max_q_len`."),
    "q_cu_seq_lens": refused("the lengths are q_len_per_req"),
    "cum_seq_lens_kv": served(
        "[batch_size + 1] int32, where each sequence's keys begin; ignored where keys are paged."
    ),
    "is_causal": flag("whether a query sees no key after its own position."),
    "mask": refused("queries of a sequence are causal: masks are read by BatchPrefillWithPagedKVCacheWrapper"),
    "attention_sinks": SCORES["sinks"],
    "sinks": served("[num_qo_heads] attention sinks, natural-log logits; or a list of one such tensor."),
    "uses_shared_paged_kv_idx": refused("keys and values are in the same pages"),
    "bmm1_scale_log2": refused("say it by bmm1_scale"),
    "multi_ctas_kv_counter_buffer": CHOICE,
    "skip_all_rows_active_check": CHOICE,
    "q_seq_lens_cpu": CHOICE,
    "kv_seq_lens_cpu": CHOICE,
    "is_var_seq": CHOICE,
    "cute_dsl_impl": CHOICE,
    "kv_scale_format": refused("an fp8 cache has one scale"),
    "enable_block_sparse_attention": refused("a page is read by all heads"),
    "sparse_top_k": refused("lists of keys are not served"),
    "sparse_mla_top_k": refused("lists of keys are not served"),
    "sparse_mla_top_k_lens": refused("lists of keys are not served"),
    "enable_dcp": refused("quire.distributed shards contexts"),
    "cp_world": refused("quire.distributed shards contexts"),
    "cp_rank": refused("quire.distributed shards contexts"),
    "causal_seqlens_kv_global": refused("quire.distributed shards contexts"),
    "bf16q_fp8kv_transform_mode": CHOICE,
    "request_order": CHOICE,
    "request_order_plan": CHOICE,
    "length_aware_schedule": CHOICE,
    "sage_attn_sfs": refused("queries have no scales"),
    "num_elts_per_sage_attn_blk": refused("queries have no scales"),
    "window_right": refused("a query sees no key after its own position"),
    "variable_window_token_starts": refused("quire.intervals makes batches of intervals"),
    "variable_window_token_ends": refused("quire.intervals makes batches of intervals"),
    "qk_nope_head_dim": served("ignored; it went into `bmm1_scale`."),
    "kv_lora_rank": served("columns of a latent, which are the value too."),
    "qk_rope_head_dim": served("rotary columns after them."),
    "lse": served("where to write the lse, [num_tokens, num_qo_heads] float32; written whether or not it is returned."),
    "return_lse_base": served('"basee" for natural logarithms, "base2" or None for base 2.'),
}

BATCH: Table = PREFILL | {
    "device": served("on which device the wrapper works."),
    "kv_indptr": served("[batch_size + 1], where each sequence's pages begin in `kv_indices`."),
    "kv_indices": served("[kv_indptr[-1]], pages in order."),
    "kv_len_arr": served("[batch_size], keys of each sequence."),
    "kv_cache": PREFILL["paged_kv_cache"],
    "logits_soft_cap": served("scores become `cap * tanh(scores / cap)`; of `run`, 0 or what was planned."),
    "args": served("the sinks, [num_qo_heads], and `sm_scale`, as FlashInfer's kernel takes them."),
}
