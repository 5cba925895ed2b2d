"""flash-attn's arguments about scores and masks, checked before anything is launched or written."""

from dataclasses import dataclass

import torch

from quire import AttentionSpec, UnsupportedError
from quire.integrations import layer_spec
from quire.integrations.arguments import as_int, as_number, check_tensor, shown

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Scoring:
    """flash-attn's arguments about scores and masks, checked."""

    softmax_scale: float
    causal: bool
    left: int  # negative for no limit, as is `right`
    right: int
    softcap: float  # 0 for none
    alibi_slopes: torch.Tensor | None
    s_aux: torch.Tensor | None

    def spec(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionSpec:
        """Return the spec for these tensors, which have heads and head dims last."""
        right = 0 if self.causal else self.right
        return layer_spec(
            num_q_heads=q.shape[-2],
            num_kv_heads=k.shape[-2],
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            dtype=q.dtype,
            kv_dtype=k.dtype,
            softmax_scale=self.softmax_scale,
            causal=right == 0,
            sliding_window=None if self.left < 0 else self.left + 1,
            sliding_window_right=right if right > 0 else None,
            softcap=self.softcap or None,
            alibi=self.alibi_slopes is not None,
            sinks=self.s_aux is not None,
        )


def read_scoring(
    q: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    s_aux: torch.Tensor | None,
) -> Scoring:
    """Check the arguments about scores and masks; `q` has its heads and its head_dim, before any padding, last."""
    num_q_heads, head_dim = q.shape[-2:]
    if head_dim == 0:
        raise ValueError("q must have a head_dim of at least 1, got 0; see the shapes in the docstring")
    try:
        left, right = (as_int("window_size", side) for side in window_size)
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size must be two integers (left, right), got {shown(window_size)}; a negative one for no limit"
        ) from None
    scale = head_dim**-0.5 if softmax_scale is None else as_number("softmax_scale", softmax_scale)
    cap = as_number("softcap", softcap)
    if not cap >= 0:  # NaN too
        raise ValueError(f"softcap must be at least 0, got {softcap}; 0 for none")
    if isinstance(alibi_slopes, torch.Tensor) and alibi_slopes.dim() == 2 and not alibi_slopes.is_nested:
        raise UnsupportedError(
            f"alibi_slopes must be [num_q_heads], got {list(alibi_slopes.shape)}; slopes per sequence are not served"
        )
    for name, tensor in (("alibi_slopes", alibi_slopes), ("s_aux", s_aux)):
        if tensor is not None:
            check_tensor(name, tensor, q.device, num_q_heads=num_q_heads)
            if tensor.dtype not in FLOATS:
                raise TypeError(f"{name} must be float32 or another float, got {tensor.dtype}; cast it")
    slopes, sinks = (None if x is None else x.contiguous() for x in (alibi_slopes, s_aux))
    return Scoring(scale, causal, left, right, cap, slopes, sinks)


def check_dropout(dropout_p: float) -> None:
    """Raise unless there is none."""
    if as_number("dropout_p", dropout_p) != 0:
        raise UnsupportedError(f"dropout_p must be 0, got {dropout_p}; Quire serves inference")
