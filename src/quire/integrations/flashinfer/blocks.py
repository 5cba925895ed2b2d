"""Attention in one call, by block tables or packed keys, under the names of FlashInfer's TensorRT-LLM and XQA kernels.

Each call makes a plan. The wrappers make one for all layers of a step.
"""

import torch

from quire import Batch, PagedKVCache
from quire.integrations.arguments import as_int, as_number, check_integers, check_tensor, shown
from quire.integrations.flash_attn.kvcache import multiples
from quire.integrations.flashinfer.arguments import (
    as_positive,
    as_tokens,
    check_one,
    read_cache,
    read_dtype,
    read_pages,
)
from quire.integrations.flashinfer.planned import OutAndLse, attend_once, to_device
from quire.integrations.flashinfer.signatures import Arguments
from quire.integrations.flashinfer.tables import BLOCKS, PACKED

LATENTS = (
    "query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables, seq_lens, "
    "max_seq_len, "
)


@BLOCKS.accepts(
    "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, "
    "window_left=-1, out=None, out_dtype=None, o_sf_scale=None, o_sf_vec_size=None, sinks=None, kv_layout='HND', "
    "enable_pdl=None, backend='auto', q_len_per_req=1, o_scale=1.0, mask=None, max_q_len=None, cum_seq_lens_q=None, "
    "skip_softmax_threshold_scale_factor=None, kv_cache_sf=None, uses_shared_paged_kv_idx=True, lse=None, "
    "return_lse=False, bmm1_scale_log2=None, multi_ctas_kv_counter_buffer=None, enable_block_sparse_attention=False, "
    "cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, bf16q_fp8kv_transform_mode=None, request_order=None, "
    "request_order_plan=None, sparse_top_k=0, length_aware_schedule=False"
)
def trtllm_batch_decode_with_kv_cache(a: Arguments) -> OutAndLse:
    """Attend from the last queries of each sequence to its pages; several queries are causal.

    Returns:
        out [num_tokens, num_qo_heads, head_dim], or (out, lse), the lse in base 2.
    """
    return attend_paged(a, causal=True)


@BLOCKS.accepts(
    "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0, "
    "window_left=-1, out=None, sinks=None, kv_layout='NHD', enable_pdl=None, q_len_per_req=1, o_scale=1.0, mask=None, "
    "kv_cache_sf=None, q_cu_seq_lens=None"
)
def xqa_batch_decode_with_kv_cache(a: Arguments) -> OutAndLse:
    """Attend as `trtllm_batch_decode_with_kv_cache` does, with fewer arguments and tokens before heads.

    Returns:
        out [num_tokens, num_qo_heads, head_dim].
    """
    return attend_paged(a, causal=True)


@BLOCKS.accepts(
    "query, kv_cache, workspace_buffer, block_tables, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, "
    "batch_size, cum_seq_lens_q, cum_seq_lens_kv, window_left=-1, out=None, out_dtype=None, o_sf_scale=None, "
    "o_sf_vec_size=None, kv_layout='HND', enable_pdl=None, sinks=None, kv_cache_sf=None, "
    "skip_softmax_threshold_scale_factor=None, uses_shared_paged_kv_idx=True, causal=True, lse=None, "
    "return_lse=False, multi_ctas_kv_counter_buffer=None, use_fp16_softmax=None, uses_spcompress=None, "
    "backend='trtllm-gen', window_right=-1, variable_window_token_starts=None, variable_window_token_ends=None"
)
def trtllm_batch_context_with_kv_cache(a: Arguments) -> OutAndLse:
    """Attend from the last queries of each sequence, any number of them, to its pages.

    Returns:
        out [num_tokens, num_qo_heads, head_dim], or (out, lse), the lse in base 2.
    """
    return attend_paged(a, causal=a.causal)


@PACKED.accepts(
    "query, key, value, workspace_buffer, seq_lens, max_q_len, max_kv_len, bmm1_scale, bmm2_scale, o_sf_scale, "
    "batch_size, window_left, cum_seq_lens_q, cum_seq_lens_kv, enable_pdl, is_causal, return_lse, "
    "attention_sinks=None, skip_softmax_threshold_scale_factor=None, out=None, lse=None, "
    "sage_attn_sfs=(None, None, None, None), num_elts_per_sage_attn_blk=(0, 0, 0, 0), backend='trtllm-gen', "
    "q_seq_lens_cpu=None, kv_seq_lens_cpu=None, use_fp16_softmax=None, uses_spcompress=None, "
    "skip_all_rows_active_check=True"
)
def trtllm_ragged_attention_deepseek(a: Arguments) -> OutAndLse:
    """Attend from the last queries of each sequence to keys that are packed one sequence after the other.

    Returns:
        out [num_tokens, num_qo_heads, head_dim_vo], or (out, lse), the lse in base 2.
    """
    k, v = as_tokens(a.key, a.value, "NHD")
    a.sinks = a.attention_sinks
    check_tensor("query", a.query, k.device, num_tokens=None, num_qo_heads=None, head_dim=None)
    entries = check_integers("cum_seq_lens_kv", a.cum_seq_lens_kv, k.device, **{"batch_size + 1": None})
    check_integers("cum_seq_lens_q", a.cum_seq_lens_q, k.device, **{"batch_size + 1": entries[0]})
    check_integers("seq_lens", a.seq_lens, None, batch_size=entries[0] - 1)
    batch = Batch.varlen(*(to_device(x, k.device, True) for x in (a.cum_seq_lens_q, a.cum_seq_lens_kv)))
    return attend_block(a, batch, PagedKVCache(k, v, "THD"), a.max_q_len, a.is_causal)


@BLOCKS.accepts(
    LATENTS + "sparse_mla_top_k=0, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, "
    "skip_softmax_threshold_scale_factor=None, enable_pdl=None, backend='auto', is_var_seq=True, "
    "uses_shared_paged_kv_idx=True, lse=None, return_lse=False, cute_dsl_impl='auto', kv_scale_format='auto', "
    "cum_seq_lens_q=None, max_q_len=None, multi_ctas_kv_counter_buffer=None, sparse_mla_top_k_lens=None, "
    "enable_dcp=False, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, use_fp16_softmax=None, "
    "return_lse_base=None"
)
def trtllm_batch_decode_with_kv_cache_mla(a: Arguments) -> OutAndLse:
    """Attend from queries with absorbed projections to pages of latents; several queries are causal.

    Returns:
        out, latents in the shape of `query` but for the width; or (out, lse [num_tokens, num_heads]).
    """
    if a.return_lse_base not in (None, "basee", "base2"):
        raise ValueError(
            f"return_lse_base must be 'basee', 'base2' or None, got {shown(a.return_lse_base)}; None is base 2"
        )
    a.lse_base = "ln" if a.return_lse_base == "basee" else "log2"
    return attend_latents(a)


@BLOCKS.accepts(LATENTS + "out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, enable_pdl=None")
def xqa_batch_decode_with_kv_cache_mla(a: Arguments) -> OutAndLse:
    """Attend as `trtllm_batch_decode_with_kv_cache_mla` does, with fewer arguments.

    Returns:
        out, latents in the shape of `query` but for the width.
    """
    return attend_latents(a)


def attend_paged(a: Arguments, causal: bool) -> OutAndLse:
    """Attend to pages of keys and values."""
    k, v = read_pages(a.kv_cache, a.kv_layout)
    check_tensor("query", a.query, k.device, num_tokens=None, num_qo_heads=None, head_dim=None)
    batch, most_queries = read_batch(a, k.device, getattr(a, "q_len_per_req", None), len(a.query))
    return attend_block(a, batch, PagedKVCache(k, v, a.kv_layout), most_queries, causal)


def attend_latents(a: Arguments) -> OutAndLse:
    """Attend to pages of latents."""
    rank = as_int("kv_lora_rank", a.kv_lora_rank, least=1)
    width = rank + as_int("qk_rope_head_dim", a.qk_rope_head_dim, least=0)
    query, latents, starts = a.query, a.kv_cache, getattr(a, "cum_seq_lens_q", None)
    if isinstance(latents, torch.Tensor) and latents.dim() == 4 and latents.shape[1] == 1:
        latents = latents.squeeze(1)
    check_tensor("kv_cache", latents, None, num_pages=None, page_size=None, width=width)
    shape = {"num_tokens": None} if starts is not None else {"batch_size": None, "q_len": None}
    *tokens, heads, _ = check_tensor("query", query, latents.device, **shape, num_heads=None, width=width)
    a.query = query.flatten(0, -3)
    batch, most_queries = read_batch(a, latents.device, None if starts is not None else tokens[1], len(a.query))
    out = a.out
    if out is not None:
        sizes = dict(zip(shape, tokens, strict=True)) | {"num_heads": heads, "kv_lora_rank": rank}
        check_tensor("out", out, query.device, **sizes)
        a.out = out.view(-1, heads, rank)
    found = attend_block(a, batch, PagedKVCache.from_latents(latents, rank), most_queries, causal=True)
    result, lse = found if isinstance(found, tuple) else (found, None)
    result = result.view(*tokens, heads, rank) if out is None else out
    return result if lse is None else (result, lse)


def read_batch(a: Arguments, device: torch.device, q_len: int | None, num_tokens: int) -> tuple[Batch, int]:
    """Return the batch of block tables, and the bound on a sequence's queries."""
    (batch_size,) = check_integers("seq_lens", a.seq_lens, device, batch_size=None)
    check_integers("block_tables", a.block_tables, device, batch_size=batch_size, max_pages=None)
    starts = getattr(a, "cum_seq_lens_q", None)
    if starts is None:
        most_queries = as_int("q_len_per_req", 1 if q_len is None else q_len, least=1)
        if num_tokens != batch_size * most_queries:
            raise ValueError(
                f"query must have q_len_per_req = {most_queries} rows for each of {batch_size} sequences, got "
                f"{num_tokens}; pass cum_seq_lens_q where they differ"
            )
        starts = None if most_queries == 1 else multiples(batch_size + 1, most_queries, device)
    else:
        check_integers("cum_seq_lens_q", starts, device, **{"batch_size + 1": batch_size + 1})
        most_queries = as_int("max_q_len", a.max_q_len, least=0)
        starts = to_device(starts, device, True)
    return Batch(to_device(a.block_tables, device, True), to_device(a.seq_lens, device, True), starts), most_queries


def attend_block(a: Arguments, batch: Batch, cache: PagedKVCache, most_queries: int, causal: bool) -> OutAndLse:
    """Attend to a cache, whose scales are in the arguments."""
    a.q = a.query
    if hasattr(a, "batch_size") and as_int("batch_size", a.batch_size) != batch.num_seqs:
        raise ValueError(f"batch_size must be the {batch.num_seqs} of the lists, got {a.batch_size}; check them")
    if isinstance(a.sinks, list | tuple) and len(a.sinks) == 1:
        a.sinks = a.sinks[0]
    o_dtype = getattr(a, "out_dtype", None)
    if o_dtype is None:
        o_dtype = a.out.dtype if isinstance(a.out, torch.Tensor) else a.q.dtype
    o_dtype, sm_scale = read_dtype("out_dtype", o_dtype), as_number("bmm1_scale", a.bmm1_scale)
    scale = as_positive("bmm2_scale", a.bmm2_scale, "1 for none")
    if o_dtype is torch.float8_e4m3fn:
        a.out_scale, scale = 1 / scale, 1.0
    if cache.is_latent or cache.dtype.itemsize > 1:
        check_one("bmm2_scale", scale)
    else:
        cache = read_cache(cache.k, cache.v, cache.layout, cache.dtype, None, scale)
    bound = "max_kv_len" if hasattr(a, "max_kv_len") else "max_seq_len"
    bounds = as_int("max_q_len", most_queries, least=0), as_int(bound, getattr(a, bound), least=0)
    return attend_once(a, batch, cache, *bounds, causal=causal, sm_scale=sm_scale, o_data_type=o_dtype)
