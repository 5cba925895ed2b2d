"""Merge partial states in PyTorch: the algebra of `quire.state`."""

from collections.abc import Sequence

import torch

from quire.state import State


def merge_states(states: Sequence[State]) -> State:
    """Merge states over disjoint keys; `quire.merge_states` has checked the arguments."""
    outs, lses = torch.stack([s.out for s in states]).float(), torch.stack([s.lse for s in states])
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse).nan_to_num(0.0)[..., None]  # no keys anywhere: -inf - -inf
    return State(torch.where(weights > 0, weights * outs, 0.0).sum(0).to(states[0].out.dtype), lse)
