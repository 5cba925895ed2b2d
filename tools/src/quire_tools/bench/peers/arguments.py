"""What adapters share: refusals of cases, and a case's queries and window as libraries take them."""

import torch

import quire
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
