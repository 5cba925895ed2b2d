"""`State`: attention over a subset of the keys, and the algebra that merges subsets.

The softmax over a set of keys is determined by two numbers per query and head: the output over those keys, and the log
of the sum of their exponentials. Two states over disjoint sets merge exactly, in any order and grouping. So streaming
over tiles, splitting keys over programs, reusing a shared prefix and spreading a context over GPUs all use this merge.
"""

from typing import NamedTuple

import torch

from quire.errors import shown


class State(NamedTuple):
    """Attention over some of the keys. It holds what it is given; `merge_states` and `attention` check it.

    Attributes:
        out: [num_tokens, num_q_heads, head_dim_v], normalised over those keys; 0 where there are none.
        lse: [num_tokens, num_q_heads] float32, natural log of the sum of exponentiated scores; -inf where there are no
            keys. `merge_states` treats +inf as -inf, since flash-attn 2 writes it for a row without keys. A NaN means
            that a score was NaN, and makes the merged row NaN.

    Examples:
        >>> state = quire.State(out=torch.zeros(1, 4, 16), lse=torch.full((1, 4), -torch.inf))  # over no keys
        >>> state.out.shape, state.lse.shape
        (torch.Size([1, 4, 16]), torch.Size([1, 4]))
    """

    out: torch.Tensor
    lse: torch.Tensor

    def __repr__(self) -> str:
        return shown(self, *self._fields)
