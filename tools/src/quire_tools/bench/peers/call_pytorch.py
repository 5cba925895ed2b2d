"""PyTorch's SDPA and FlexAttention. They read no pages, so they get contiguous copies of keys and values."""

from typing import Any

import torch

from quire_tools.bench.inputs import Inputs
from quire_tools.bench.measure import Call, Planner
from quire_tools.bench.peers.arguments import refuse, refuse_special_dtypes_and_scores


def sdpa_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    q, q_len, seq_len = uniform_queries(inputs)
    spec = inputs.case.spec
    refuse(spec.sliding_window is not None, "does not serve windows")
    options: dict[str, Any] = {"scale": spec.softmax_scale, "enable_gqa": True}
    if q_len == seq_len:
        options["is_causal"] = True
    elif q_len > 1:
        options["attn_mask"] = causal_lower_right(q_len, seq_len)

    def plan(table: torch.Tensor) -> Call:
        k, v = contiguous_kv(inputs, table)
        return lambda: scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return plan


def flex_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, q_len, seq_len = uniform_queries(inputs)
    spec = inputs.case.spec
    before, window = seq_len - q_len, spec.sliding_window or seq_len
    mask = None
    if q_len > 1 or window < seq_len:

        def is_visible(
            batch: torch.Tensor, head: torch.Tensor, q_index: torch.Tensor, kv_index: torch.Tensor
        ) -> torch.Tensor:
            return (kv_index <= q_index + before) & (kv_index > q_index + before - window)

        mask = create_block_mask(is_visible, None, None, q_len, seq_len, device=inputs.q.device.type)
    compiled = torch.compile(flex_attention, dynamic=False)

    def plan(table: torch.Tensor) -> Call:
        k, v = contiguous_kv(inputs, table)
        return lambda: compiled(q, k, v, block_mask=mask, scale=spec.softmax_scale, enable_gqa=True).transpose(1, 2)

    return plan


def uniform_queries(inputs: Inputs) -> tuple[torch.Tensor, int, int]:
    """Return the queries, [num_seqs, num_q_heads, query_len, head_dim], and both lengths; refuse other batches."""
    refuse_special_dtypes_and_scores(inputs)
    refuse(not inputs.case.uniform, "one length per batch, keys not paged")
    q_len, seq_len = inputs.case.lens[0]
    return inputs.q.view(-1, q_len, *inputs.q.shape[1:]).transpose(1, 2), q_len, seq_len


def contiguous_kv(inputs: Inputs, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of sequences of one length, [num_seqs, num_kv_heads, seq_len, head_dim] each."""
    seq_len = inputs.case.lens[0][1]

    def gather(cache: torch.Tensor) -> torch.Tensor:
        return cache[table.long()].flatten(1, 2)[:, :seq_len].transpose(1, 2).contiguous()

    return gather(inputs.cache.k), gather(inputs.cache.v)
