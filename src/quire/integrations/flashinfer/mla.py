"""Latents under FlashInfer's names: multi-head latent attention (MLA) with absorbed projections."""

from typing import Any

import torch

from quire import PagedKVCache
from quire.integrations.arguments import as_int, as_number, check_tensor, shown
from quire.integrations.flashinfer.arguments import check_one, read_scoring
from quire.integrations.flashinfer.blocks import (
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from quire.integrations.flashinfer.planned import OutAndLse, PagedWrapper
from quire.integrations.flashinfer.signatures import Arguments
from quire.integrations.flashinfer.tables import MLA

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
]


class BatchMLAPagedAttentionWrapper(PagedWrapper):
    """Attend from queries with absorbed projections to pages of latents, in any mix of prompts and decode."""

    _lists = "kv_indptr", "kv_indices", "kv_len_arr"

    @MLA.accepts(
        "float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None, "
        "kv_len_arr=None, backend='auto'"
    )
    def __init__(self, a: Arguments) -> None:
        """Make a wrapper."""
        self._set_up(a)
        self._keep_buffers(a)

    @MLA.accepts(
        "qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None, head_dim_ckv=None, "
        "head_dim_kpe=None, page_size=None, causal=None, sm_scale=None, q_data_type=None, kv_data_type=None, "
        "use_profiler=False, *, metadata=None, cum_seq_lens_q=None, block_tables=None, seq_lens=None, max_q_len=None, "
        "query_layout=None, kv_cache_layout=None, lse_mode='none', output_dtype=None, output_scale='none', "
        "scale_mode='default', skip_softmax=False, enable_pdl=None, use_sinks=False"
    )
    def plan(self, a: Arguments) -> None:
        """Say which queries and pages each sequence has, and what is computed; once per step, for all layers."""
        rank, rope = as_int("head_dim_ckv", a.head_dim_ckv, least=1), as_int("head_dim_kpe", a.head_dim_kpe, least=0)
        as_number("sm_scale", a.sm_scale)
        widths = {"num_qo_heads": a.num_heads, "num_kv_heads": 1, "head_dim_qk": rank + rope, "head_dim_vo": rank}
        scoring = read_scoring(a, latent=True, o_data_type=a.output_dtype, **widths)
        lists, most_keys = self._read_pages(a)
        most_queries, num_rows = self._read_queries(a.qo_indptr, len(a.kv_len_arr), a.max_q_len)
        self._prepare(a, scoring, (most_queries, most_keys), num_rows, cu_seqlens_q=a.qo_indptr, **lists)

    @MLA.accepts(
        "q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, lse=None, return_lse=False, "
        "profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False, o_scale=None, *, query=None, "
        "kv_cache=None, ckv_scale=None, ckv_scale_arr=None, kpe_scale=None, sinks=None, "
        "skip_softmax_threshold_scale_factor=None, bmm1_scale=None, bmm2_scale=None"
    )
    def run(self, a: Arguments) -> OutAndLse:
        """Attend, for one layer.

        Returns:
            out [num_tokens, num_heads, head_dim_ckv], latents; or (out, lse), the lse in base 2.
        """
        scoring = self._planned()
        check_one("o_scale", a.o_scale)
        rank, rope = scoring.head_dim_vo, scoring.head_dim_qk - scoring.head_dim_vo
        q_nope, q_pe = pair_of("query", a.query, ("q_nope", a.q_nope), ("q_pe", a.q_pe), rank)
        ckv, kpe = pair_of("kv_cache", a.kv_cache, ("ckv_cache", a.ckv_cache), ("kpe_cache", a.kpe_cache), rank)
        sizes = {"num_tokens": self._num_rows, "num_heads": scoring.num_qo_heads}
        check_tensor("q_nope", q_nope, None, **sizes, head_dim_ckv=rank)
        check_tensor("q_pe", q_pe, q_nope.device, **sizes, head_dim_kpe=rope)
        for name, x, dtype in (("q_nope", q_nope, scoring.q_data_type), ("ckv_cache", ckv, scoring.kv_data_type)):
            if isinstance(x, torch.Tensor) and x.dtype is not dtype:
                raise ValueError(f"{name} must be of the planned dtype {dtype}, got {x.dtype}; pass its dtype to plan")
        latents = latents_of(ckv, kpe, self._page_size, rank, rope)
        if a.kpe_scale is not None and a.kpe_scale is not a.ckv_scale and a.kpe_scale != a.ckv_scale:
            raise ValueError(f"kpe_scale must be ckv_scale, got {shown(a.kpe_scale)}; an fp8 cache has one scale")
        cache = PagedKVCache.from_latents(latents, rank, scale=a.ckv_scale)
        a.q, a.lse_base = (q_nope, q_pe if rope else None), "ln" if a.return_lse_base_on_e else "log2"
        return self._attend(a, cache)


def pair_of(
    name: str, both: Any, first: tuple[str, Any], second: tuple[str, Any], rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both parts of queries or of a cache, which are given as two arguments, as a pair or as one tensor."""
    given = [part for part, value in (first, second) if value is not None]
    if both is None:
        for part, value in (first, second):
            if value is None:
                raise ValueError(f"{part} must be a tensor, got None; or pass {name}")
        return first[1], second[1]
    if given:
        raise ValueError(f"{given[0]} must be left out where {name} is given, got both; pass one of them")
    if isinstance(both, torch.Tensor) and both.dim():
        return both[..., :rank], both[..., rank:]
    if not isinstance(both, tuple | list) or len(both) != 2:
        raise TypeError(f"{name} must be a tensor or a pair of tensors, got {type(both).__name__}; pass both parts")
    return both[0], both[1]


def latents_of(ckv: torch.Tensor, kpe: torch.Tensor, page_size: int, rank: int, rope: int) -> torch.Tensor:
    """Return [num_pages, page_size, rank + rope], of which both parts are columns, without a copy."""
    num_pages, *_ = check_tensor("ckv_cache", ckv, None, num_pages=None, page_size=page_size, head_dim_ckv=rank)
    check_tensor("kpe_cache", kpe, ckv.device, num_pages=num_pages, page_size=page_size, head_dim_kpe=rope)
    follows = (
        ckv.untyped_storage().data_ptr() == kpe.untyped_storage().data_ptr()
        and ckv.dtype is kpe.dtype
        and ckv.stride() == kpe.stride()
        and ckv.stride(2) == 1
        and kpe.storage_offset() == ckv.storage_offset() + rank
    )
    if rope and not follows:
        raise ValueError(
            f"kpe_cache must be the columns after ckv_cache in one tensor [num_pages, page_size, {rank + rope}], got "
            "another tensor; allocate one and pass cache[..., :head_dim_ckv] and cache[..., head_dim_ckv:]"
        )
    return ckv.as_strided((num_pages, page_size, rank + rope), ckv.stride())
