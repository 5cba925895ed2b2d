"""`State`: attention over a subset of the keys, and the algebra that joins subsets.

The softmax over a set of keys is determined by two numbers per query and head: the output over those keys, and the log of the sum of their
exponentials. Two states over disjoint sets merge exactly, in any order and any tree, so that streaming over tiles, splitting the keys over
programs, reusing a shared prefix and spreading a context over GPUs are one algorithm under different parentheses.
"""

from typing import NamedTuple

import torch


class State(NamedTuple):
    """Attention over some of the keys.

    Attributes:
        out: [num_tokens, num_q_heads, head_dim_v], normalised over those keys; 0 where there are none.
        lse: [num_tokens, num_q_heads] float32, natural log of the sum of exponentiated scores; -inf where there are none.
    """

    out: torch.Tensor
    lse: torch.Tensor
