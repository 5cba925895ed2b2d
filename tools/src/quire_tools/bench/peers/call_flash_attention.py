"""FlashAttention 2 and 3, as vLLM packages them."""

from functools import partial
from typing import Any

import torch

from quire_tools.bench.inputs import Inputs
from quire_tools.bench.measure import Call, Planner
from quire_tools.bench.peers.arguments import each_token_a_sequence, halves, refuse, refuse_other_values, window_of


def flash_attention_calls(inputs: Inputs, out: torch.Tensor, version: int) -> Planner:
    from vllm.vllm_flash_attn import (  # pyright: ignore[reportMissingImports]
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    inputs = each_token_a_sequence(inputs)
    spec, case, bounds = inputs.case.spec, inputs.case, inputs.case.bounds
    refuse(spec.kv_dtype != spec.dtype, "fp8 caches only with fp8 queries")
    refuse(spec.sinks and version < 3, "does not serve sinks")
    if version < 3:
        refuse_other_values(spec)
    metadata = None
    query: dict[str, Any] = {"q": inputs.q}
    if spec.latent:  # the rotary columns are q and k, the latents v; q_v are the queries of the latents
        q_nope, q_pe = halves(inputs.q, spec)
        query = {"q": q_pe, "q_v": q_nope}

    def keys_of(table: torch.Tensor) -> dict[str, Any]:
        if case.packed:
            k, v = inputs.packed(table)
            return {"k": k, "v": v, "cu_seqlens_k": inputs.cu_seqlens_k}
        cache = inputs.cache_of(table)
        k = cache.k[..., spec.head_dim_v :] if spec.latent else cache.k
        return {"k": k, "v": cache.v, "seqused_k": inputs.seq_lens, "block_table": table}

    def plan(table: torch.Tensor) -> Call:
        nonlocal metadata
        if version == 3 and not case.packed:
            metadata = get_scheduler_metadata(
                batch_size=len(case.lens),
                max_seqlen_q=bounds["max_query_len"],
                max_seqlen_k=bounds["max_seq_len"],
                num_heads_q=spec.num_q_heads,
                num_heads_kv=spec.num_kv_heads,
                headdim=query["q"].shape[-1],
                headdim_v=spec.head_dim_v,
                cache_seqlens=inputs.seq_lens,
                qkv_dtype=spec.dtype,
                cu_seqlens_q=inputs.cu_seqlens_q,
                page_size=case.page_size,
                causal=True,
                window_size=window_of(spec),
                has_softcap=spec.softcap is not None,
                num_splits=0,
            )
        return partial(
            flash_attn_varlen_func,
            **query,
            **keys_of(table),
            max_seqlen_q=bounds["max_query_len"],
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_k=bounds["max_seq_len"],
            softmax_scale=spec.softmax_scale,
            causal=True,
            window_size=list(window_of(spec)),
            softcap=spec.softcap or 0.0,
            out=out,
            scheduler_metadata=metadata,
            num_splits=0,
            fa_version=version,
            s_aux=inputs.sinks,
        )

    return plan
