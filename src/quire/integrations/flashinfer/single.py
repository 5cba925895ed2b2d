"""One sequence, whose keys are one tensor, under FlashInfer's names."""

import torch

import quire
from quire import Batch
from quire.integrations.arguments import check_flags, check_tensor
from quire.integrations.flash_attn.kvcache import multiples
from quire.integrations.flashinfer.arguments import (
    Scale,
    Scoring,
    as_tokens,
    check_backend,
    check_layout,
    check_q_scale,
    read_cache,
    read_scoring,
    refuse,
)
from quire.integrations.flashinfer.masks import check_no_window, read_mask, words_of_mask
from quire.integrations.flashinfer.planned import OutAndLse, attend


def single_decode_with_kv_cache(
    q: torch.Tensor,  # [num_qo_heads, head_dim]
    k: torch.Tensor,  # [kv_len, num_kv_heads, head_dim]
    v: torch.Tensor,  # [kv_len, num_kv_heads, head_dim_vo]
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> OutAndLse:
    """Attend from one query, the last token, to the keys of its sequence.

    Args:
        q: [num_qo_heads, head_dim].
        k: [kv_len, num_kv_heads, head_dim]; in layout "HND" heads come first.
        v: [kv_len, num_kv_heads, head_dim_vo], likewise.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE".
        use_tensor_cores: ignored; Quire chooses.
        q_scale: None or 1.
        k_scale: factor on fp8 keys, a number or a float32 tensor.
        v_scale: the same for values.
        window_left: visible keys before the query's own; negative for no limit.
        logits_soft_cap: scores become `cap * tanh(scores / cap)`; None or 0 for none.
        sm_scale: positive factor on the scores; `head_dim ** -0.5` if None.
        rope_scale, rope_theta: ignored, as FlashInfer does without a position encoding.
        return_lse: also return the lse, in base 2.

    Returns:
        out [num_qo_heads, head_dim_vo], or (out, lse [num_qo_heads] float32).

    Raises:
        UnsupportedError: a position encoding, a gradient, or a head dim or dtype that is not served.
        TypeError: an argument is of another type.
        ValueError: an argument breaks its contract, or shapes do not fit together.
    """
    check_tensor("q", q, None, num_qo_heads=None, head_dim=None)
    check_flags(use_tensor_cores=use_tensor_cores)
    check_q_scale(q_scale)
    scoring, k, v = read_one(q, k, v, kv_layout, pos_encoding_mode, sm_scale, False, window_left, logits_soft_cap, None)
    found = attend_one(q[None], k, v, scoring, k_scale, v_scale, return_lse)
    return found[0] if isinstance(found, torch.Tensor) else (found[0][0], found[1][0])


def single_prefill_with_kv_cache(
    q: torch.Tensor,  # [qo_len, num_qo_heads, head_dim]
    k: torch.Tensor,  # [kv_len, num_kv_heads, head_dim]
    v: torch.Tensor,  # [kv_len, num_kv_heads, head_dim_vo]
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: object = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
) -> OutAndLse:
    """Attend from the last `qo_len` tokens of a sequence to its keys.

    Args:
        q: [qo_len, num_qo_heads, head_dim].
        k: [kv_len, num_kv_heads, head_dim]; in layout "HND" heads come first.
        v: [kv_len, num_kv_heads, head_dim_vo], likewise.
        scale_q, scale_k, scale_v: of fp8 queries, not served.
        o_dtype: must be q's.
        custom_mask: [qo_len, kv_len] bool, or flat: which keys each query sees. There are at most 64 queries, which see
            all keys before them: the mask is a draft tree. It is read back.
        packed_custom_mask: the same in bits of uint8, as `flashinfer.quantization.packbits` returns it with
            bitorder="little"; `custom_mask` is then ignored.
        causal: a query sees no key after its own position; ignored with a mask.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE".
        use_fp16_qk_reduction: ignored; sums are float32.
        sm_scale: positive factor on the scores; `head_dim ** -0.5` if None.
        window_left: visible keys before the query's own; negative for no limit, and with a mask.
        logits_soft_cap: scores become `cap * tanh(scores / cap)`; None or 0 for none.
        rope_scale, rope_theta: ignored, as FlashInfer does without a position encoding.
        backend: "auto".
        return_lse: also return the lse, in base 2.
        kv_cache_sf: not served.
        k_scale: factor on fp8 keys, a number or a float32 tensor.
        v_scale: the same for values.

    Returns:
        out [qo_len, num_qo_heads, head_dim_vo], or (out, lse [qo_len, num_qo_heads] float32).

    Raises:
        UnsupportedError: a mask that is no draft tree or comes with a window, a position encoding, a backend, a
            gradient, or a head dim or dtype that is not served.
        TypeError: an argument is of another type.
        ValueError: an argument breaks its contract, or shapes do not fit together.
    """
    refuse("queries are not fp8", scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
    refuse("Quire reads no fp4", kv_cache_sf=kv_cache_sf)
    check_backend(backend)
    check_flags(use_fp16_qk_reduction=use_fp16_qk_reduction)
    check_tensor("q", q, None, qo_len=None, num_qo_heads=None, head_dim=None)
    scoring, k, v = read_one(
        q, k, v, kv_layout, pos_encoding_mode, sm_scale, causal, window_left, logits_soft_cap, o_dtype
    )
    if isinstance(custom_mask, torch.Tensor) and custom_mask.dim() == 2:
        check_tensor("custom_mask", custom_mask, None, qo_len=len(q), kv_len=len(k))
        custom_mask = custom_mask.flatten()
    mask = read_mask(custom_mask, packed_custom_mask)
    if mask is None:
        return attend_one(q, k, v, scoring, k_scale, v_scale, return_lse)
    check_no_window(scoring.window_left)
    words = words_of_mask(mask, [0, len(q)], [len(k)]).to(q.device)
    return attend_one(q, k, v, scoring, k_scale, v_scale, return_lse, words)


def read_one(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str,
    pos_encoding_mode: str,
    sm_scale: float | None,
    causal: bool,
    window_left: int,
    logits_soft_cap: float | None,
    o_dtype: torch.dtype | None,
) -> tuple[Scoring, torch.Tensor, torch.Tensor]:
    """Check what both functions take; return keys and values with tokens first."""
    k, v = as_tokens(k, v, check_layout(kv_layout))
    scoring = read_scoring(
        q.shape[-2],
        k.shape[1],
        q.shape[-1],
        v.shape[2],
        q.dtype,
        k.dtype,
        o_dtype,
        sm_scale,
        causal,
        window_left,
        logits_soft_cap,
        pos_encoding_mode,
    )
    return scoring, k, v


def attend_one(
    q: torch.Tensor,  # [qo_len, num_qo_heads, head_dim]
    k: torch.Tensor,  # [kv_len, num_kv_heads, head_dim]
    v: torch.Tensor,
    scoring: Scoring,
    k_scale: Scale,
    v_scale: Scale,
    return_lse: bool,
    tree_bits: torch.Tensor | None = None,
) -> OutAndLse:
    """Attend over a batch of one sequence, without copying anything from the host."""
    cache = read_cache(k, v, "THD", k.dtype, k_scale, v_scale)
    qo_len, kv_len, device = len(q), len(k), q.device
    start = torch.zeros(1, 1, dtype=torch.int32, device=device)
    seq_lens = torch.full((1,), kv_len, dtype=torch.int32, device=device)
    batch = Batch(
        start, seq_lens, None if qo_len == 1 else multiples(2, qo_len, device), paged=False, tree_bits=tree_bits
    )
    plan = quire.plan(scoring.spec(), batch, max_query_len=qo_len, max_seq_len=kv_len)
    return attend(q, cache, plan, None, None, None, return_lse)
