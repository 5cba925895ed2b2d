"""Combine partial states in PyTorch: the algebra of `quire.state`."""

from collections.abc import Sequence

import torch

from quire.kernels.cpu.softmax import softmax_and_lse
from quire.state import State


@torch.no_grad()
def merge_states(states: Sequence[State], dtype: torch.dtype | None = None) -> State:
    """Combine states over disjoint keys; `quire.merge_states` has checked the arguments.

    A state is empty where its lse is -inf, or +inf as FlashAttention writes it for a row without keys. Its weight is 0,
    whatever its out holds. A NaN lse makes the result NaN. The result's out is of `dtype`, or of that of the states.
    """
    lses = torch.stack([state.lse for state in states], -1)  # [num_tokens, num_q_heads, num_states]
    weights, lse = softmax_and_lse(lses.masked_fill(lses == float("inf"), float("-inf")))
    out = torch.zeros(states[0].out.shape, dtype=torch.float32, device=lse.device)
    for weight, state in zip(weights.unbind(-1), states, strict=True):
        out += torch.where(weight[..., None] == 0, 0.0, weight[..., None] * state.out.float())
    return State(out.to(dtype or states[0].out.dtype), lse)
