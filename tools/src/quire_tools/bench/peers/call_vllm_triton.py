"""vLLM's Triton kernels, for pages and for latents."""

from functools import partial

import torch

from quire_tools.bench.inputs import Inputs
from quire_tools.bench.measure import Planner
from quire_tools.bench.peers.arguments import refuse, refuse_other_values, uniform_tokens, window_of


def vllm_triton_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    from vllm.v1.attention.ops.triton_unified_attention import (  # pyright: ignore[reportMissingImports]
        unified_attention,
    )

    spec, bounds = inputs.case.spec, inputs.case.bounds
    refuse(spec.kv_dtype is torch.int8, "its int8 caches have scales per token")
    refuse(spec.kv_format is not None, f"not measured on {spec.kv_format}")
    refuse_other_values(spec)
    shape = (inputs.q.shape[0], spec.num_q_heads, 16)
    segment_out = torch.empty(
        *shape, 1 << (spec.head_dim - 1).bit_length(), dtype=torch.float32, device=inputs.q.device
    )
    segment_max = torch.empty(shape, dtype=torch.float32, device=inputs.q.device)
    segment_expsum = torch.empty_like(segment_max)
    return lambda table: partial(
        unified_attention,
        inputs.q,
        inputs.cache.k,
        inputs.cache.v,
        out,
        inputs.cu_seqlens_q,
        bounds["max_query_len"],
        inputs.seq_lens,
        bounds["max_seq_len"],
        spec.softmax_scale,
        True,
        window_of(spec),
        table,
        spec.softcap or 0,
        None,
        None,
        None,
        seq_threshold_3D=128 // spec.num_kv_heads,
        num_par_softmax_segments=16,
        alibi_slopes=inputs.alibi_slopes,
        sinks=inputs.sinks,
        softmax_segm_output=segment_out,
        softmax_segm_max=segment_max,
        softmax_segm_expsum=segment_expsum,
    )


def vllm_triton_mla_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    """Call vLLM's Triton kernel for latents as its newest backend does.

    Each query becomes a separate sequence. The tables and lengths are made beforehand.
    """
    from vllm.v1.attention.ops.triton_decode_attention import (  # pyright: ignore[reportMissingImports]
        decode_attention_fwd,
    )

    spec, case, q = inputs.case.spec, inputs.case, inputs.q
    q_len = uniform_tokens(inputs).shape[1]
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    ideal = 1 << (max(1, case.bounds["max_seq_len"] // 512) - 1).bit_length()
    num_splits = min(ideal, 2 * num_sms)
    scratch = torch.empty(*q.shape[:2], num_splits, spec.head_dim_v + 1, dtype=torch.float32, device=q.device)
    lse, one = q.new_empty(q.shape[:2]), torch.ones((), device=q.device)
    before = torch.arange(1 - q_len, 1, dtype=torch.int32, device=q.device)
    seq_lens = (inputs.seq_lens[:, None] + before).flatten()
    return lambda table: partial(
        decode_attention_fwd,
        q,
        inputs.cache.k,
        inputs.cache.v,
        out,
        lse,
        table.repeat_interleave(q_len, 0),
        seq_lens,
        scratch,
        num_splits,
        spec.softmax_scale,
        case.page_size,
        k_scale=one,
        v_scale=one,
        is_mla=True,
    )
