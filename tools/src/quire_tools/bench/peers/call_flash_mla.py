"""FlashMLA, as SGLang and as vLLM package it."""

from functools import partial
from typing import Any

import torch

from quire_tools.bench.inputs import Inputs
from quire_tools.bench.measure import Call, Planner
from quire_tools.bench.peers.arguments import refuse, uniform_tokens


def flash_mla_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    """Call FlashMLA as SGLang ships it; it takes fp8 latents with fp8 queries, which are converted beforehand."""
    from flash_mla import flash_mla_with_kvcache, get_mla_decoding_metadata  # pyright: ignore[reportMissingImports]
    from flash_mla.flash_mla_interface import FlashMLASchedMeta  # pyright: ignore[reportMissingImports]

    spec = inputs.case.spec
    q = uniform_tokens(inputs)
    is_fp8 = spec.kv_dtype != spec.dtype
    options: dict[str, Any] = {"is_fp8_kvcache": is_fp8, "use_legacy": True}  # the new kernels are for Blackwell GPUs
    scales: dict[str, torch.Tensor] = {}
    if is_fp8:
        q, one = q.to(spec.kv_dtype), torch.ones(1, device=q.device)
        scales = {"descale_q": one, "descale_k": one}

    def plan(table: torch.Tensor) -> Call:
        metadata, num_splits = get_mla_decoding_metadata(
            inputs.seq_lens, q.shape[1] * spec.num_q_heads, spec.num_kv_heads, **options
        )
        schedule = FlashMLASchedMeta(tile_scheduler_metadata=metadata, num_splits=num_splits)
        call = partial(
            flash_mla_with_kvcache,
            q,
            inputs.cache.k,
            table,
            inputs.seq_lens,
            spec.head_dim_v,
            schedule,
            softmax_scale=spec.softmax_scale,
            causal=True,
            **options,
            **scales,
        )
        return lambda: call()[0]  # and not the lse

    return plan


def vllm_flash_mla_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    from vllm.third_party.flashmla.flash_mla_interface import (  # pyright: ignore[reportMissingImports]
        flash_mla_with_kvcache,
        get_mla_metadata,
    )

    spec = inputs.case.spec
    refuse(spec.kv_dtype != spec.dtype, "fp8 latents only by other functions")
    q = uniform_tokens(inputs)
    shaped = out.view(*q.shape[:3], spec.head_dim_v)

    def plan(table: torch.Tensor) -> Call:
        schedule, _ = get_mla_metadata()
        call = partial(
            flash_mla_with_kvcache,
            q,
            inputs.cache.k,
            table,
            inputs.seq_lens,
            spec.head_dim_v,
            schedule,
            softmax_scale=spec.softmax_scale,
            causal=True,
            out=shaped,
        )
        call()  # which makes the schedule
        return lambda: call()[0]

    return plan
