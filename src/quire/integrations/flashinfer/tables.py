"""What is done with each argument of FlashInfer's functions, by its names.

After a name: "flag" marks one that must be True or False, "refused" one that must be left out, and other words are its
only values. Of one that is refused, the text is the advice of the error. `COMMON` has the names that mean the same
everywhere. The table of a family adds to it.
Names, order and defaults in the modules are those of FlashInfer 0.7.4. 0.7.2 lacks some of them.
"""

from quire.integrations.flashinfer.signatures import Table

COMMON = Table(
    """
# what is computed
num_qo_heads: query heads.
num_kv_heads: KV heads.
head_dim: width of queries, keys and values.
head_dim_qk: width of queries and keys.
head_dim_vo: width of values and outputs; `head_dim_qk` if None.
q_data_type: of queries: a dtype or its name.
kv_data_type: of the cache; `q_data_type` if None.
o_data_type: of outputs; `q_data_type` if None. float8_e4m3fn is rounded once, others from results in `q_data_type`.
data_type: stands in for `q_data_type` and `kv_data_type` where they are None.
causal (flag): whether a query sees no key after its own position. Ignored with a mask.
pos_encoding_mode (NONE, ROPE_LLAMA, ALIBI): "NONE", or "ALIBI" with the slopes of the paper (arXiv 2108.12409), where
    no query sees a later key. The lse is not served with it.
sm_scale: positive factor on the scores; the head dim to the power of -0.5 if None.
window_left: visible keys before the query's own; negative for no limit, and with a mask.
logits_soft_cap: scores become `cap * tanh(scores / cap)`; None or 0 for none.
q_scale: factor on the scores, a number; None for 1.
k_scale: factor on an fp8 cache's keys, a number or a float32 tensor.
v_scale: the same for its values.
o_scale: None or 1.
sinks: [num_qo_heads] attention sinks, natural-log logits.
fixed_split_size: if positive, make results independent of the batch, as `disable_split_kv` does.
disable_split_kv (flag): make each token's result depend on its sequence alone (`plan(batch_invariant=True)`).
# where it is
q: queries, [num_tokens, num_qo_heads, head_dim].
kv_layout (NHD, HND): "NHD" or "HND": whether tokens or heads come first.
page_size: tokens per page.
paged_kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim], or a pair of tensors without the second dimension;
    heads come before tokens in layout "HND". Without the dimension of tokens, pages have one.
indptr: [batch_size + 1], where each sequence's pages begin in `indices`.
indices: [indptr[-1]], pages in order.
last_page_len, paged_kv_last_page_len: [batch_size], keys in the last page of each sequence.
global_override_indptr_cpu: `indptr` on the host, read in its place; None to read `indptr`.
qo_indptr: [batch_size + 1], where each sequence's queries begin in `q`.
paged_kv_indptr: [batch_size + 1], where each sequence's pages begin in `paged_kv_indices`.
paged_kv_indices: [paged_kv_indptr[-1]], pages in order.
kv_indptr: [batch_size + 1], where each sequence's pages begin in `kv_indices`.
kv_indices: [kv_indptr[-1]], pages in order.
kv_len_arr: [batch_size], keys of each sequence.
seq_lens: [batch_size], keys of each sequence; they follow from the lists if None.
max_token_per_sequence: an upper bound of a sequence's queries; read from `qo_indptr` if None.
max_sequence_kv: an upper bound of a sequence's keys; read from the lists if None.
q_len_per_req: queries of each sequence, its last tokens. A wrapper for CUDA graphs has one number.
is_causal: whether a query sees no later key; by default if there are several.
out: where to write the output.
lse: where to write the lse, float32; written whether or not it is returned.
return_lse (flag): also return the lse, sinks included.
lse_base (log2, ln): "log2" or "ln".
lse_layout (NH, HN): "NH" for [num_tokens, num_qo_heads], or "HN" for its transpose.
# wrappers
self: the wrapper.
float_workspace_buffer, workspace_buffer: says on which device the wrapper works; Quire needs no memory from it.
use_cuda_graph (flag): let `plan` write into the buffers, from which captured graphs read.
paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer, indptr_buffer, indices_buffer,
    last_page_len_buffer, qo_indptr_buf, kv_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
    paged_kv_last_page_len_buf: int32, read by captured graphs: with `use_cuda_graph`, `plan` writes into it.
max_total_num_rows: with `use_cuda_graph`, the most query tokens of any `plan`; those of the first one if None.
non_blocking (flag): copy lists to the device asynchronously.
device: on which device the wrapper works.
# hints
backend (auto, fa2, fa3, cudnn, cutlass, cutile, trtllm-gen, xqa, cake, sparse, prims-ts, cute-dsl, cute-dsl-prims,
    cute-dsl-monolithic, cute-dsl-modular): the name of one of FlashInfer's backends; a hint that is ignored.
use_tensor_cores (flag): ignored; Quire chooses.
use_fp16_qk_reduction (flag): ignored; sums are float32.
uniform_q_len: ignored, a hint.
rope_scale, rope_theta: ignored, as FlashInfer does without a rotary encoding.
enable_pdl, query_layout, kv_cache_layout, multi_ctas_kv_counter_buffer, skip_all_rows_active_check, q_seq_lens_cpu,
    kv_seq_lens_cpu, is_var_seq, cute_dsl_impl, bf16q_fp8kv_transform_mode, request_order, request_order_plan,
    length_aware_schedule: ignored; Quire chooses.
# what is refused
jit_args, jit_kwargs, variant_owns_mask (refused): custom kernels are not served
args (refused): they belong to custom kernels
kv_cache_sf, use_token_head_sf (refused): Quire reads no fp4, and scales per token are in a PagedKVCache
o_sf_scale, o_sf_vec_size (refused): outputs are not fp4
scale_q, scale_k, scale_v (refused): queries are not fp8
sage_attn_sfs, num_elts_per_sage_attn_blk (refused): queries have no scales
prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr (refused): several items in one
    sequence are not served
seq_lens_q, v_indptr, o_indptr (refused): lengths follow from the lists that start with kv_indptr and qo_indptr
block_tables (refused): pages are read from indices
use_profiler, profiler_buffer (refused): Quire has no profiler of its own
skip_softmax, skip_softmax_threshold_scale_factor (refused): Quire skips no key
use_fp16_softmax (refused): Quire sums in float32
uses_spcompress (refused): Quire reads no compressed cache
window_right (refused): a query sees no key after its own position
mask (refused): queries of a sequence are causal: masks are read by BatchPrefillWithPagedKVCacheWrapper
q_cu_seq_lens (refused): the lengths are q_len_per_req
uses_shared_paged_kv_idx (refused): keys and values are in the same pages
enable_block_sparse_attention (refused): a page is read by all heads
sparse_top_k, sparse_mla_top_k, sparse_mla_top_k_lens (refused): lists of keys are not served
enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global (refused): quire.distributed shards contexts
variable_window_token_starts, variable_window_token_ends (refused): quire.intervals makes batches of intervals
kv_scale_format (refused): an fp8 cache has one scale
scale_mode, ckv_scale_arr (refused): an fp8 cache has one scale, ckv_scale
bmm1_scale_log2 (refused): say it by bmm1_scale
output_scale (refused): outputs have no scale
"""
)

MASKS = Table(
    """
custom_mask_buf: uint8, with `use_cuda_graph`: says that `plan` may be given a mask. Quire needs no memory from it.
    Graphs read the masks from a tensor of the wrapper, which the first `plan` allocates.
mask_indptr_buf: [batch_size + 1], given with `custom_mask_buf`; Quire needs no memory from it either.
custom_mask: [sum of qo_len * kv_len] bool, one sequence after the other: which keys each query sees. It is read back.
    With `use_cuda_graph`, it is a draft tree (at most 64 queries of a sequence, its last tokens, which see all keys
    before them). There may be more entries.
packed_custom_mask: the same in bits of uint8, as `flashinfer.quantization.segment_packbits` returns it; `custom_mask`
    is then ignored.
""",
    COMMON,
)

PREFILL = Table(
    """
block_tables (refused): lengths follow from the lists that start with kv_indptr and qo_indptr
""",
    MASKS,
)

BATCH = Table(
    """
kv_cache: [num_pages, 2, page_size, num_kv_heads, head_dim], or a pair of tensors without the second dimension; heads
    come before tokens in layout "HND". Without the dimension of tokens, pages have one.
logits_soft_cap: scores become `cap * tanh(scores / cap)`; of `run`, 0 or what was planned.
args: the sinks, [num_qo_heads], and `sm_scale`, as FlashInfer's kernel takes them.
""",
    PREFILL,
)

RAGGED = Table(
    """
kv_indptr: [batch_size + 1], where each sequence's keys begin in `k`.
seq_lens (refused): lengths follow from the lists that start with kv_indptr and qo_indptr
qo_indptr_cpu: `qo_indptr` on the host, from which lengths are read; None to read `qo_indptr`.
kv_indptr_cpu: the same of `kv_indptr`.
k: keys, [kv_indptr[-1], num_kv_heads, head_dim_qk]; heads come first in layout "HND".
v: values, [kv_indptr[-1], num_kv_heads, head_dim_vo], likewise.
""",
    MASKS,
)

SPARSE = Table(
    """
backend: the name of one of FlashInfer's backends; a hint that is ignored.
indptr: [ceil(M / R) + 1], where each row of blocks begins in `indices`; not read with `block_mask`.
indices: [indptr[-1]], columns of the blocks that are seen.
M: queries.
N: keys, a multiple of C.
R: queries of a block.
C: keys of a block.
block_mask: [num_kv_heads or num_qo_heads, ceil(M / R), N / C] bool, which blocks each KV head's queries see; of query
    heads, the first one of each group counts.
mask, packed_mask (refused): blocks are seen as a whole
causal (refused): blocks say what is seen
kv_block_lens, q2k_indices, q2k_num (refused): blocks are those of indptr and indices, or of block_mask
kv_splits, use_clc: ignored; Quire chooses.
q_scale, k_scale, v_scale (refused): queries are not fp8
k: keys, [N, num_kv_heads, head_dim].
v: values, likewise.
""",
    COMMON,
)

VARIABLE_SPARSE = Table(
    """
backend: the name of one of FlashInfer's backends; a hint that is ignored.
block_mask_map: [num_kv_heads, MB, NB] bool, which blocks of keys each block of queries sees; read on the host.
block_row_sz: [num_kv_heads, MB], queries of each block; those of a KV head are all of its queries.
block_col_sz: [num_kv_heads, NB], keys of each block, likewise. Sizes with a common divisor are read in larger pieces.
causal (refused): blocks say what is seen
q: queries, [num_qo_heads, qo_len, head_dim].
k: keys, [num_kv_heads, kv_len, head_dim].
v: values, likewise.
out: where to write the output as FlashInfer's kernel does, [num_kv_heads * qo_len, num_qo_heads / num_kv_heads,
    head_dim]; what is returned is another tensor.
lse: where to write the lse, [num_kv_heads * qo_len, num_qo_heads / num_kv_heads] float32, likewise.
""",
    COMMON,
)

CASCADE = Table(
    """
num_levels: how many levels there are.
qo_indptr_buf_arr: of each level [batch_size + 1] int32, read by captured graphs.
paged_kv_indptr_buf_arr: of each level [batch_size + 1] int32.
paged_kv_indices_buf_arr: of each level [max_num_indices] int32.
paged_kv_last_page_len_buf_arr: of each level [batch_size] int32.
qo_indptr_arr: of each level [batch_size + 1], where the queries of each of its sequences begin.
paged_kv_indptr_arr: of each level, where each sequence's pages begin.
paged_kv_indices_arr: of each level, pages in order.
paged_kv_last_page_len: of each level [batch_size], keys in the last page of each sequence.
causal (flag): whether queries see no later key, at the last level.
window_left: as FlashInfer has it: at each level, counted from the end of that level's keys.
""",
    COMMON,
)

STATES = Table(
    """
v_a: the output over the first keys, [seq_len, num_heads, head_dim].
s_a: its lse in base 2, [seq_len, num_heads]; -inf where a row saw no key.
v_b, v_other: the output over the other keys.
s_b, s_other: its lse in base 2.
v: the output to update, [seq_len, num_heads, head_dim].
s: its lse in base 2, [seq_len, num_heads], to update.
mask: [seq_len] bool, the rows to merge; all if None.
"""
)

SEVERAL_STATES = Table(
    """
v: the outputs, [seq_len, num_states, num_heads, head_dim].
s: their lse in base 2, [seq_len, num_states, num_heads].
"""
)

APPEND = Table(
    """
append_key: new keys, [nnz, num_kv_heads, head_dim], of the cache's dtype; floats are rounded to an fp8 cache.
append_value: new values, likewise.
append_ckv: new latents, [nnz, head_dim_ckv], of the cache's dtype; floats are rounded to an fp8 cache.
append_kpe: their rotary columns, rotated, [nnz, head_dim_kpe].
batch_indices: [nnz], the sequence of each, from `get_batch_indices_positions`.
positions: [nnz], the position of each in its sequence.
paged_kv_cache: a tensor [num_pages, 2, page_size, num_kv_heads, head_dim] or a pair (k, v), changed in place.
ckv_cache: [num_pages, page_size, head_dim_ckv], changed in place; None to leave latents out.
kpe_cache: [num_pages, page_size, head_dim_kpe], changed in place; None to leave columns out.
kv_indptr: [batch_size + 1], where each sequence's pages begin.
kv_indices: [kv_indptr[-1]], pages in order, new tokens included.
kv_last_page_len: [batch_size], keys in the last page of each sequence; positions say the same.
""",
    COMMON,
)

LENS = Table(
    """
kv_indptr: [batch_size + 1], where each sequence's pages begin.
kv_last_page_len: [batch_size], keys in the last page of each sequence; 0 where it has no page.
append_indptr: [batch_size + 1], where each sequence's new tokens begin.
seq_lens: [batch_size], keys of each sequence, new ones included.
nnz: how many tokens the results have; those past `append_indptr[-1]` are padding.
batch_indices: [nnz] int32, where to write the sequences; allocated if None.
positions: [nnz] int32, where to write the positions; allocated if None.
""",
    COMMON,
)

SINGLE = Table(
    """
q: [num_qo_heads, head_dim], or [qo_len, num_qo_heads, head_dim] of the last tokens.
k: [kv_len, num_kv_heads, head_dim]; in layout "HND" heads come first.
v: [kv_len, num_kv_heads, head_dim_vo], likewise.
o_dtype: of the output; q's if None.
custom_mask: [qo_len, kv_len] bool, or flat: as in `BatchPrefillWithPagedKVCacheWrapper.plan`.
packed_custom_mask: the same in bits of uint8, as `flashinfer.quantization.packbits` returns it with bitorder="little".
""",
    COMMON,
)

MLA = Table(
    """
qo_indptr: [batch_size + 1], where each sequence's queries begin; of the constructor, a buffer.
kv_indptr: [batch_size + 1], where each sequence's pages begin in `kv_indices`; likewise.
kv_indices: [kv_indptr[-1]], pages in order; likewise.
kv_len_arr: [batch_size], keys of each sequence; likewise.
num_heads: query heads.
head_dim_ckv: columns of a latent, which are the value too.
head_dim_kpe: rotary columns.
causal: whether a query sees no key after its own position.
sm_scale: positive factor on the scores.
metadata (refused): pass qo_indptr, kv_indptr, kv_indices and kv_len_arr
cum_seq_lens_q (refused): pass qo_indptr
block_tables (refused): pass kv_indptr and kv_indices
seq_lens (refused): pass kv_len_arr
max_q_len: an upper bound of a sequence's queries; read from `qo_indptr` if None.
lse_mode: ignored; `run` says what it returns.
output_dtype: of outputs; `q_data_type` if None.
use_sinks (flag): ignored; `run` takes them or not.
q_nope: queries of the latents, [num_tokens, num_heads, head_dim_ckv].
q_pe: their rotary columns, rotated, [num_tokens, num_heads, head_dim_kpe].
ckv_cache: [num_pages, page_size, head_dim_ckv]: with `kpe_cache`, neighbouring columns of one tensor.
kpe_cache: [num_pages, page_size, head_dim_kpe], the columns after those of `ckv_cache`.
query: in place of both: a pair, or a tensor [num_tokens, num_heads, head_dim_ckv + head_dim_kpe].
kv_cache: in place of both: a pair, or a tensor [num_pages, page_size, head_dim_ckv + head_dim_kpe].
kv_len (refused): plan says the lengths
page_table (refused): plan says the pages
return_lse_base_on_e (flag): the lse is a natural logarithm.
ckv_scale: factor on an fp8 cache's numbers; None for 1.
kpe_scale: None or `ckv_scale`.
bmm1_scale (refused): say it by sm_scale
bmm2_scale (refused): scale the output where it is needed
""",
    COMMON,
)

BLOCKS = Table(
    """
query: [num_tokens, num_qo_heads, head_dim]; of latents, [batch_size, q_len, num_heads, width].
key: [num_keys, num_kv_heads, head_dim], one sequence after the other.
value: [num_keys, num_kv_heads, head_dim_vo], likewise.
kv_cache: [num_pages, 2, num_kv_heads, page_size, head_dim], or a pair of tensors without the second dimension; tokens
    come before heads in layout "NHD". Of latents, [num_pages, page_size, width] or [num_pages, 1, page_size, width].
workspace_buffer: ignored; Quire needs no memory from it.
block_tables: [batch_size, max_pages] int32, pages of each sequence in order.
seq_lens: [batch_size] int32, keys of each sequence.
max_seq_len, max_kv_len: an upper bound of `seq_lens`.
max_q_len: an upper bound of a sequence's queries.
batch_size: how many sequences there are.
bmm1_scale: factor on the scores, a number: of q, k and the softmax together.
bmm2_scale: factor on the output: 1, but for an fp8 cache or output. A number.
out_dtype: of the output; that of `out`, or else of `query`, if None.
o_scale (refused): bmm2_scale scales e4m3 outputs
q_len_per_req: queries of each sequence, where `cum_seq_lens_q` is None.
cum_seq_lens_q: [batch_size + 1] int32, where each sequence's queries begin; with `max_q_len`.
cum_seq_lens_kv: [batch_size + 1] int32, where each sequence's keys begin; ignored where keys are paged.
is_causal (flag): whether a query sees no key after its own position.
attention_sinks: [num_qo_heads] attention sinks, natural-log logits.
sinks: [num_qo_heads] attention sinks, natural-log logits; or a list of one such tensor.
qk_nope_head_dim: ignored; it went into `bmm1_scale`.
kv_lora_rank: columns of a latent, which are the value too.
qk_rope_head_dim: rotary columns after them.
lse: where to write the lse, [num_tokens, num_qo_heads] float32; written whether or not it is returned.
return_lse_base: "basee" for natural logarithms, "base2" or None for base 2.
""",
    COMMON,
)

PACKED = Table("o_sf_scale: ignored; Quire needs no memory from it.", BLOCKS)
