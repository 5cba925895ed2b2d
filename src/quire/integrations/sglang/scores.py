"""A model's score mod, as SGLang 0.5.23 hands it to its Triton backend, as a function on scores."""

from functools import lru_cache
from typing import Any

import torch

import quire
from quire import UnsupportedError
from quire.integrations.sglang.refusals import INSTEAD

RELATIVE = "relative_bias_score_mod"  # Inkling's


def score_of(score_mod: Any, aux_tensors: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return the function of a spec that computes what a score mod does, and the tensors that it reads."""
    if score_mod is None:
        return None, ()
    name = getattr(score_mod, "__name__", type(score_mod).__name__)
    if name != RELATIVE:
        raise UnsupportedError(f"score_mod must be {RELATIVE}, got {name}; {INSTEAD}")
    (logits,) = aux_tensors
    return relative_bias(logits.dtype, logits.shape[2]), (logits.contiguous(),)


@lru_cache
def relative_bias(dtype: torch.dtype, extent: int) -> Any:
    """Return the function that adds a token's number for the distance of a key, where that is less than `extent`."""

    @quire.score(extras={"logits": (dtype, None, "num_q_heads", extent)})
    def biased(score: Any, q_pos: Any, kv_pos: Any, q_head: Any, token: Any, logits: Any) -> Any:
        distance = q_pos - kv_pos
        return score + torch.where((distance >= 0) & (distance < extent), logits[token, q_head, distance], 0.0)

    return biased
