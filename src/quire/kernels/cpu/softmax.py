"""The softmax and the log of its denominator, as attention and merging states need them."""

import torch


def softmax_and_lse(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities over the last dimension, which add up to 1, and their lse, without that dimension.

    The exponentials are divided by their sum. `exp(scores - lse)` would not add up to 1 at large scores: at 46,341 a
    float32 lse is rounded to 1/256. A row that is empty or all -inf has probabilities 0 and lse -inf. A row that holds
    NaN or +inf has NaN for both.
    """
    shape = (*scores.shape[:-1], 1)
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full(shape, float("-inf"))
    top = top.masked_fill(top == float("-inf"), 0.0)
    p = torch.exp(scores - top)
    total = p.sum(-1, keepdim=True)
    return (p / total).masked_fill(total == 0, 0.0), (top + torch.log(total))[..., 0]
