"""What cases do to scores: fields of a spec, and the tensors that these read, by name.

Softcap and ALiBi are there twice: built in, and written as functions (`quire.score`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import quire

CAP = 30.0
EXTENT = 1024  # distances that Inkling's layers have numbers for


@quire.score
def softcap(score: Any) -> Any:
    return CAP * torch.tanh(score / CAP)


@quire.score(extras={"slopes": ("num_q_heads",)})
def alibi(score: Any, q_pos: Any, kv_pos: Any, q_head: Any, slopes: Any) -> Any:
    return score - slopes[q_head] * abs(q_pos - kv_pos)


@quire.score(extras={"logits": (torch.bfloat16, None, "num_q_heads", EXTENT)})
def relative(score: Any, q_pos: Any, kv_pos: Any, q_head: Any, token: Any, logits: Any) -> Any:
    distance = q_pos - kv_pos
    return score + torch.where((distance >= 0) & (distance < EXTENT), logits[token, q_head, distance], 0.0)


@quire.score(extras={"table": (32, "num_q_heads")})
def buckets(score: Any, q_pos: Any, kv_pos: Any, q_head: Any, table: Any) -> Any:
    distance = max(q_pos - kv_pos, 0)
    far = 16 + int(torch.log(max(distance, 1) / 16) / math.log(128 / 16) * 16)
    bucket = torch.where(distance < 16, distance, min(far, 31))
    return score + table[bucket, q_head]


def slopes_of(num_q_heads: int) -> torch.Tensor:
    """Return the slopes that ALiBi has for so many heads, a power of two."""
    return torch.exp2(-8.0 * (1 + torch.arange(num_q_heads)) / num_q_heads)


@dataclass(frozen=True)
class Scores:
    """What a case does to scores.

    Attributes:
        fields: of `AttentionSpec`.
        extras: makes the tensors of `spec.extras`, of the numbers of tokens and heads and a function that makes random
            tensors.
        per_token: the first dimension of the extras is that of the queries.
    """

    fields: Mapping[str, Any]
    extras: Callable[[int, int, Callable[..., torch.Tensor]], tuple[torch.Tensor, ...]] = field(
        default=lambda tokens, heads, random: ()
    )
    per_token: bool = False


SCORES = {
    "softcap": Scores({"softcap": CAP}),
    "softcap as a function": Scores({"score": softcap}),
    "ALiBi": Scores({"alibi": True}),
    "ALiBi as a function": Scores({"score": alibi}, lambda tokens, heads, random: (slopes_of(heads),)),
    "relative bias": Scores(
        {"score": relative}, lambda tokens, heads, random: (random(tokens, heads, EXTENT, dtype=torch.bfloat16),), True
    ),
    "T5 buckets": Scores({"score": buckets}, lambda tokens, heads, random: (random(32, heads),)),
}
