"""SGLang's Triton kernels, which take a function on scores and a tensor since 0.5.23."""

from functools import partial
from itertools import accumulate
from typing import Any

import torch

from quire_tools.bench.inputs import Inputs
from quire_tools.bench.measure import Call, Planner
from quire_tools.bench.peers.arguments import refuse, refuse_other_values, refuse_special_dtypes

MOST_SPLITS = 8  # of a sequence, as its server has it by default


def sglang_triton_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    """Call its kernel for decode where all sequences have one query, else that for prompts and chunks.

    The latter gets the keys and values of the queries' tokens as contiguous copies, as a layer has them.
    """
    from sglang.kernels.ops.attention.score_mod import (  # pyright: ignore[reportMissingImports]
        relative_bias_score_mod,
    )

    spec, case = inputs.case.spec, inputs.case
    refuse_special_dtypes(inputs)
    refuse_other_values(spec)
    refuse(spec.sliding_window is not None, "not measured with windows")
    options: dict[str, Any] = {"logit_cap": spec.softcap or 0.0, "sinks": inputs.sinks}
    if case.scores == "relative bias":
        options |= {"score_mod": relative_bias_score_mod, "aux_tensors": list(inputs.extras)}
    k, v = inputs.cache.k.flatten(0, 1), inputs.cache.v.flatten(0, 1)
    return (decode_calls if case.bounds["max_query_len"] == 1 else extend_calls)(inputs, out, k, v, options)


def decode_calls(
    inputs: Inputs, out: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> Planner:
    from sglang.kernels.ops.attention.decode_attention import (  # pyright: ignore[reportMissingImports]
        decode_attention_fwd,
    )
    from sglang.kernels.ops.attention.metadata import (  # pyright: ignore[reportMissingImports]
        get_num_kv_splits_triton,
    )

    spec, device, num_seqs = inputs.case.spec, inputs.q.device, len(inputs.case.lens)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    splits = torch.empty(num_seqs, dtype=torch.int32, device=device)
    heads = spec.num_q_heads, spec.num_kv_heads
    get_num_kv_splits_triton[(1,)](
        splits, inputs.seq_lens, num_seqs, 1, *heads, MOST_SPLITS, num_sms,
        MAX_NUM_SEQ=max(256, 1 << (num_seqs - 1).bit_length()),
    )  # fmt: skip
    parts = torch.empty(*inputs.q.shape[:2], MOST_SPLITS, spec.head_dim_v, dtype=torch.float32, device=device)
    lse = torch.empty(*inputs.q.shape[:2], MOST_SPLITS, dtype=torch.float32, device=device)
    scratch = parts, lse, splits, MOST_SPLITS

    def plan(table: torch.Tensor) -> Call:
        slots = slots_of(inputs, table, inputs.case.seq_lens)
        scale = spec.softmax_scale, 1.0, 1.0
        arguments = inputs.q, k, v, out, inputs.cu_seqlens_k, slots, *scratch, *scale
        return partial(decode_attention_fwd, *arguments, **options)

    return plan


def extend_calls(
    inputs: Inputs, out: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> Planner:
    from sglang.kernels.ops.attention.extend_attention import (  # pyright: ignore[reportMissingImports]
        extend_attention_fwd,
    )

    case = inputs.case
    before = [seq_len - q_len for q_len, seq_len in case.lens]
    starts = torch.tensor([0, *accumulate(before)], dtype=torch.int32, device=inputs.q.device)

    def plan(table: torch.Tensor) -> Call:
        own = slots_of(inputs, table, case.seq_lens, before)
        arguments = inputs.q, k[own], v[own], out, k, v, inputs.cu_seqlens_q, starts, slots_of(inputs, table, before)
        mask = None, True, None, case.bounds["max_query_len"], 1.0, 1.0
        return partial(extend_attention_fwd, *arguments, *mask, sm_scale=case.spec.softmax_scale, **options)

    return plan


def slots_of(inputs: Inputs, table: torch.Tensor, ends: list[int], begins: list[int] | None = None) -> torch.Tensor:
    """Return the slots of some keys of each sequence, one sequence after the other."""
    size, found = inputs.case.page_size, []
    for row, begin, end in zip(table.long(), begins or [0] * len(ends), ends, strict=True):
        slots = size * row[:, None] + torch.arange(size, device=table.device)
        found.append(slots.flatten()[begin:end])
    return torch.cat(found)
