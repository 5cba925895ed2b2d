"""One sequence, whose keys are one tensor, under FlashInfer's names."""

from typing import Any

import torch

from quire import Batch, UnsupportedError
from quire.integrations.arguments import as_int, check_tensor
from quire.integrations.flash_attn.kvcache import multiples
from quire.integrations.flashinfer.arguments import as_tokens, read_cache
from quire.integrations.flashinfer.masks import check_no_window, read_bits, read_mask, seen_by_mask
from quire.integrations.flashinfer.planned import OutAndLse, attend_once
from quire.integrations.flashinfer.signatures import Arguments
from quire.integrations.flashinfer.tables import SINGLE


@SINGLE.accepts(
    "q, k, v, kv_layout='NHD', pos_encoding_mode='NONE', use_tensor_cores=False, q_scale=None, k_scale=None, "
    "v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, "
    "return_lse=False"
)
def single_decode_with_kv_cache(a: Arguments) -> OutAndLse:
    """Attend from one query, the last token, to the keys of its sequence.

    Returns:
        out [num_qo_heads, head_dim_vo], or (out, lse [num_qo_heads] float32 in base 2).
    """
    check_tensor("q", a.q, None, num_qo_heads=None, head_dim=None)
    a.q = a.q[None]
    found = attend_one(a, is_last=True)
    return found[0] if isinstance(found, torch.Tensor) else (found[0][0], found[1][0])


@SINGLE.accepts(
    "q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None, "
    "causal=False, kv_layout='NHD', pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, "
    "window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, backend='auto', return_lse=False, "
    "kv_cache_sf=None, k_scale=None, v_scale=None"
)
def single_prefill_with_kv_cache(a: Arguments) -> OutAndLse:
    """Attend from the last `qo_len` tokens of a sequence to its keys.

    Returns:
        out [qo_len, num_qo_heads, head_dim_vo], or (out, lse [qo_len, num_qo_heads] float32 in base 2).
    """
    check_tensor("q", a.q, None, qo_len=None, num_qo_heads=None, head_dim=None)
    return attend_one(a, o_data_type=a.o_dtype)


def attend_one(a: Arguments, **changed: Any) -> OutAndLse:
    """Attend over a batch of one sequence, without copying anything from the host but a mask."""
    k, v = as_tokens(a.k, a.v, a.kv_layout)
    qo_len, kv_len, device = len(a.q), len(k), a.q.device
    seen, extras = find_mask(a, qo_len, kv_len) if hasattr(a, "custom_mask") else ({}, ())
    if extras:
        changed |= {"causal": False, "mask": read_bits}
    seen = {name: x.to(device) for name, x in seen.items()}
    batch = Batch(
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.full((1,), kv_len, dtype=torch.int32, device=device),
        None if qo_len == 1 else multiples(2, qo_len, device),
        paged=False,
        key_begin=seen.get("key_begin"),
        key_end=seen.get("key_end"),
        tree_bits=seen.get("tree_bits"),
    )
    cache = read_cache(k, v, "THD", k.dtype, a.k_scale, a.v_scale)
    return attend_once(a, batch, cache, qo_len, kv_len, tuple(x.to(device) for x in extras), **changed)


def find_mask(a: Arguments, qo_len: int, kv_len: int) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return what the batch has in place of a mask, as `BatchPrefillWithPagedKVCacheWrapper` does."""
    custom_mask = a.custom_mask
    if isinstance(custom_mask, torch.Tensor) and custom_mask.dim() == 2:
        check_tensor("custom_mask", custom_mask, None, qo_len=qo_len, kv_len=kv_len)
        custom_mask = custom_mask.flatten()
    mask = read_mask(custom_mask, a.packed_custom_mask)
    if mask is None:
        return {}, ()
    check_no_window(as_int("window_left", a.window_left))
    if a.pos_encoding_mode == "ALIBI":
        raise UnsupportedError("pos_encoding_mode must be 'NONE' with a mask, got 'ALIBI'; queries share positions")
    return seen_by_mask(mask, [0, qo_len], [kv_len])
