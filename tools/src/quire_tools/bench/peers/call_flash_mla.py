"""FlashMLA, as SGLang and as vLLM package it."""

from functools import partial
from typing import Any

import torch

from quire_tools.bench.case import RECORDS
from quire_tools.bench.inputs import Inputs
from quire_tools.bench.measure import Call, Planner
from quire_tools.bench.peers.arguments import refuse, uniform_tokens

SPARSE_HEADS = 64  # its kernels for lists serve this many, or twice as many


def flash_mla_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    """Call FlashMLA as SGLang ships it; it takes fp8 latents with fp8 queries, which are converted beforehand."""
    from flash_mla import flash_mla_with_kvcache, get_mla_decoding_metadata  # pyright: ignore[reportMissingImports]
    from flash_mla.flash_mla_interface import FlashMLASchedMeta  # pyright: ignore[reportMissingImports]

    if inputs.case.pool is not None:
        return flash_mla_sparse_calls(inputs)
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


def flash_mla_sparse_calls(inputs: Inputs) -> Planner:
    """Call FlashMLA's kernels for lists: that for prompts where latents are in 16 bits, that for decode with records.

    They serve 64 or 128 heads, so queries are padded beforehand, and the results of the padding are dropped.
    """
    from flash_mla.flash_mla_interface import (  # pyright: ignore[reportMissingImports]
        FlashMLASchedMeta,
        flash_mla_sparse_fwd,
        flash_mla_with_kvcache,
    )

    spec = inputs.case.spec
    q = torch.nn.functional.pad(inputs.q, (0, 0, 0, -spec.num_q_heads % SPARSE_HEADS))

    def plan(table: torch.Tensor) -> Call:
        cache, lists = inputs.cache_of(table), table[:, None]
        if inputs.case.kv_dtype == RECORDS:
            call = partial(
                flash_mla_with_kvcache,
                q[:, None],
                cache.k,
                None,
                None,
                spec.head_dim_v,
                FlashMLASchedMeta(),
                softmax_scale=spec.softmax_scale,
                is_fp8_kvcache=True,
                indices=lists,
                use_legacy=True,
            )
            call()  # which makes the schedule
        else:
            call = partial(
                flash_mla_sparse_fwd,
                q,
                cache.k.flatten(0, 1),
                lists,
                spec.softmax_scale,
                spec.head_dim_v,
                use_legacy=True,
                return_log2_lse=False,  # nor the lse
            )
        return lambda: call()[0][..., : spec.num_q_heads, :]

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
