"""`Rope` and `QKNorm`: what is done to the queries and to the keys of a step before attention.

A head is normalised first and rotated then.
"""

from typing import Any, NamedTuple

import torch

from quire.errors import shown


class Rope(NamedTuple):
    """A rotary position embedding (RoPE, arXiv 2104.09864) of a step's tokens; `attention` checks it.

    The first `2 * half` elements of each head are rotated, and the others are kept. Pair i of a token has the angle
    whose cosine and sine are in column i of the row of its position.

    Attributes:
        cos: [max_positions, half], float32, float16 or bfloat16, with contiguous rows that are any number of elements
            apart. The two halves of vLLM's `cos_sin_cache` fit.
        sin: like cos.
        positions: [num_tokens] int32 or int64, a row of the table for each token. Those outside of it are clamped.
        interleaved: pairs are (2i, 2i + 1), as in GPT-J, and not (i, i + half), as in GPT-NeoX.

    Examples:
        >>> angles = torch.arange(64)[:, None] * 10000 ** -(torch.arange(8) / 8)
        >>> rope = quire.Rope(angles.cos(), angles.sin(), positions=torch.tensor([6]))
        >>> rope.cos.shape, rope.interleaved
        (torch.Size([64, 8]), False)
    """

    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor
    interleaved: bool = False

    def __repr__(self) -> str:
        return shown(self, *self._fields)


class QKNorm(NamedTuple):
    """An RMSNorm (arXiv 1910.07467) over each head of queries and keys; `attention` checks it.

    A head x becomes `x / sqrt(mean(x²) + eps) * weight`. Where a model multiplies by `1 + weight`, pass that sum.

    Attributes:
        q_weight: of queries, [head_dim], float32, float16 or bfloat16.
        k_weight: of keys, like q_weight.
        eps: positive.

    Examples:
        >>> quire.QKNorm(torch.ones(128), torch.ones(128)).eps
        1e-06
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float = 1e-6

    def __repr__(self) -> str:
        return shown(self, *self._fields)


def qk_norm_of(fields: Any) -> QKNorm:
    """Return a `QKNorm` of one or of the tuple of its fields, with a Python float as eps. It was checked."""
    q_weight, k_weight, eps = QKNorm(*fields)
    return QKNorm(q_weight, k_weight, eps if type(eps) is float else float(eps))
