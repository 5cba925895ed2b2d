"""What adapters share: refusals of cases, and a case's queries and window as libraries take them."""

from dataclasses import replace

import torch

import quire
from quire_tools.bench.case import RECORDS
from quire_tools.bench.inputs import Inputs
from quire_tools.bench.measure import NotServed


def refuse(condition: bool, why: str) -> None:
    """Raise NotServed if a library lacks what a case needs."""
    if condition:
        raise NotServed(why)


def refuse_special_dtypes(inputs: Inputs) -> None:
    """Raise NotServed unless queries and cache have the same 16-bit dtype."""
    spec = inputs.case.spec
    dtypes = f"{spec.dtype} on {spec.kv_dtype}".replace("torch.", "")
    refuse(spec.dtype.itemsize != 2 or spec.kv_dtype != spec.dtype, f"does not serve {dtypes}")


def refuse_special_dtypes_and_scores(inputs: Inputs) -> None:
    """Raise NotServed unless queries and cache have the same 16-bit dtype, and there are neither sinks nor softcap."""
    spec = inputs.case.spec
    refuse_special_dtypes(inputs)
    refuse(spec.sinks, "does not serve sinks")
    refuse(spec.softcap is not None, "does not serve softcap")


def refuse_other_values(spec: quire.AttentionSpec) -> None:
    """Raise NotServed unless values are as wide as keys."""
    refuse(spec.head_dim_v != spec.head_dim, "does not serve values of another width")


def window_of(spec: quire.AttentionSpec) -> tuple[int, int]:
    """Return the window as FlashAttention takes it: keys to the left and right of a query's own, -1 for no limit."""
    return (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0)


def halves(q: torch.Tensor, spec: quire.AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the queries of the latents and of their rotary columns."""
    return q[..., : spec.head_dim_v], q[..., spec.head_dim_v :]


def uniform_tokens(inputs: Inputs) -> torch.Tensor:
    """Return the queries, [num_seqs, query_len, num_q_heads, head_dim]; refuse batches of several query lengths."""
    lens = set(inputs.case.query_lens)
    refuse(len(lens) > 1, "one query length per batch")
    return inputs.q.view(-1, *lens, *inputs.q.shape[1:])


def each_token_a_sequence(inputs: Inputs) -> Inputs:
    """Return inputs without chosen keys: each query token is a sequence, and its list is its pages, of one key each.

    Other inputs are returned as they are. Lists in records are refused.
    """
    case, device = inputs.case, inputs.q.device
    if case.pool is None:
        return inputs
    refuse(case.kv_dtype == RECORDS, "does not serve records")
    width = case.bounds["max_seq_len"]
    starts = torch.arange(case.num_tokens + 1, dtype=torch.int32, device=device)
    pools = [quire.PagedKVCache.from_latents(p.latents.flatten(0, 1)[:, None], p.head_dim_v) for p in inputs.pools]
    return replace(
        inputs,
        case=replace(case, lens=((1, width),) * case.num_tokens, page_size=1, pool=None),
        pools=tuple(pools),
        seq_lens=torch.full((case.num_tokens,), width, dtype=torch.int32, device=device),
        cu_seqlens_q=starts,
        cu_seqlens_k=starts * width,
    )
