"""FlashMLA's functions, under its names, on every target: attention over latents, all of them or those that lists name.

They serve any number of heads, lists of any width and pages of any size. A row that sees no key has out 0 and lse -inf.
Other than FlashMLA's, they need no schedule: its object carries the plan from the first layer of a step to the others.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from math import e, log2
from typing import Any

import torch

import quire
from quire import AttentionSpec, Batch, ChosenKeys, PagedKVCache, Plan, State, UnsupportedError
from quire.integrations.arguments import as_int, as_number, check_flags, check_integers, check_tensor, shown

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
]

FORMATS = {"V32": 656, "MODEL1": 584, "V4": 584, "V41": 528}  # bytes of a token by FlashMLA's `kv_format`
BYTES = torch.uint8, torch.int8, torch.float8_e4m3fn  # as what a cache of records comes
LOG2E = log2(e)
LEAST_SHARE = 1e-6  # of keys in a softmax with a sink; less is what rounding leaves of none
CHUNK = 1 << 24  # numbers that are gathered at once for `max_logits`


@dataclass
class FlashMLASchedMeta:
    """What FlashMLA keeps of a step; here, the last plan and what it was made for."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None
    planned: tuple[Any, Plan] | None = field(default=None, repr=False)


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return an object that layers of a step may share, and None; arguments are ignored, as by FlashMLA."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: torch.Tensor, num_q_tokens_per_head_k: int, h_k: int, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a schedule in the form of FlashMLA's former versions: tensors of zeros, which nothing reads."""
    return seqlens_k.new_zeros(1, 8, dtype=torch.int32), seqlens_k.new_zeros(len(seqlens_k) + 1, dtype=torch.int32)


def flash_mla_with_kvcache(
    q: torch.Tensor,  # [batch_size, seq_len_q, num_heads_q, head_dim]
    k_cache: torch.Tensor,  # [num_blocks, page_block_size, 1, head_dim or bytes]
    block_table: torch.Tensor | None,  # [batch_size, max_num_blocks_per_seq]
    cache_seqlens: torch.Tensor | None,  # [batch_size]
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None = None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,  # [batch_size, seq_len_q, topk]
    attn_sink: torch.Tensor | None = None,  # [num_heads_q]
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,  # [batch_size, seq_len_q, extra_topk]
    topk_length: torch.Tensor | None = None,  # [batch_size]
    extra_topk_length: torch.Tensor | None = None,  # [batch_size]
    out: torch.Tensor | None = None,  # [batch_size, seq_len_q, num_heads_q, head_dim_v]
    *,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from a few query tokens of each sequence to pages of latents: to those that `indices` name, or to all.

    Args:
        q: queries in float16, bfloat16 or float32; for dense fp8, also float8_e4m3fn with `descale_q`.
        k_cache: latents of one head, of q's dtype or in float8_e4m3fn with `descale_k`; or records in bytes: 656 of
            DeepSeek V3.2, 584 of V4 or 528 of V4.1 (`quire.PagedKVCache.from_latents`).
        block_table: int32 page numbers; ignored where there are `indices`.
        cache_seqlens: int32, keys of each sequence; ignored where there are `indices`.
        head_dim_v: columns of a latent that are the value too.
        tile_scheduler_metadata: from `get_mla_metadata`; layers that share it and the tensors of lists or tables share
            a plan. Tensors are ignored.
        num_splits: ignored.
        softmax_scale: head_dim ** -0.5 if None.
        causal: of dense attention: a query sees no key after itself, and the last query is the last key.
        is_fp8_kvcache: ignored: the cache's dtype and bytes say what it is.
        indices: int32 slots, `page * page_block_size + slot`; -1 for none, anywhere.
        attn_sink: float32 logits, by which out is scaled: exp(lse) / (exp(lse) + exp(attn_sink)).
        extra_k_cache: a second cache of the same format, in pages of any size.
        extra_indices_in_kvcache: slots of it that are attended to as well.
        topk_length: int32, how many of the first entries count.
        extra_topk_length: the same for the second list.
        out: where to write.
        enable_batch_invariant: results of a sequence do not depend on the others.
        use_legacy: with records of 528 bytes, refused: FlashMLA's former kernels take scales at the end of a page.
        kv_format: FlashMLA's name of the records, "V32", "MODEL1" or "V41"; None to tell them by their bytes.
        descale_q: float32 factor of queries in fp8.
        descale_k: float32 factor of latents in fp8.

    Returns:
        out [batch_size, seq_len_q, num_heads_q, head_dim_v], and the natural-log lse [batch_size, num_heads_q,
        seq_len_q] float32, without the sink. Where a sink is larger than the lse by d, the lse errs by 1e-7 · exp(d),
        and it is -inf if d is 14 or more.

    Raises:
        TypeError: an argument is of another type.
        ValueError: arguments do not fit together.
        UnsupportedError: a format that is not served.

    Examples:
        >>> q, k_cache = torch.randn(2, 1, 16, 576), torch.randn(8, 64, 1, 576)
        >>> lists = torch.tensor([[[5, 300, -1]], [[7, -1, -1]]], dtype=torch.int32)
        >>> metadata, _ = flash_mla.get_mla_metadata()
        >>> out, lse = flash_mla.flash_mla_with_kvcache(q, k_cache, None, None, 512, metadata, indices=lists)
        >>> out.shape, lse.shape
        (torch.Size([2, 1, 16, 512]), torch.Size([2, 16, 1]))
    """
    size, length, heads, head_dim = check_tensor(
        "q", q, None, batch=None, seq_len_q=None, num_heads=None, head_dim=None
    )
    if indices is None:
        refuse_lists(attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length)
    elif causal:
        raise ValueError("causal must be False where there are indices, got True; lists say what is seen")
    if q.dtype is torch.float8_e4m3fn:
        q = (q.float() if descale_q is None else q.float() * descale_q).to(torch.bfloat16)
    cache = latents_of("k_cache", k_cache, head_dim_v, kv_format, use_legacy, descale_k)
    extra = None
    if extra_k_cache is not None:
        extra = latents_of("extra_k_cache", extra_k_cache, head_dim_v, kv_format, use_legacy, descale_k)
    if indices is None:
        tensors = block_table, cache_seqlens
    else:
        tensors = indices, topk_length, extra_indices_in_kvcache, extra_topk_length
    scale = head_dim**-0.5 if softmax_scale is None else as_number("softmax_scale", softmax_scale)
    spec = spec_of(heads, scale, cache, q.dtype, attn_sink is not None, causal)
    meta = tile_scheduler_metadata if isinstance(tile_scheduler_metadata, FlashMLASchedMeta) else FlashMLASchedMeta()
    key = spec, (size, length), cache.page_size, enable_batch_invariant, *(facts_of(x) for x in tensors)
    if meta.planned is None or meta.planned[0] != key:
        check_flags(causal=causal, enable_batch_invariant=enable_batch_invariant)
        if indices is None:
            batch, most = dense_batch(block_table, cache_seqlens, (size, length), cache.page_size)
        else:
            batch, most = sparse_batch(tensors, (size, length), q.device), 1
        plan = quire.plan(
            spec,
            batch,
            max_query_len=length if indices is None else 1,
            max_seq_len=most,
            num_tokens=size * length,
            batch_invariant=enable_batch_invariant,
        )
        meta.planned = None if are_copies(batch, tensors) else (key, plan)
    else:
        plan = meta.planned[1]
    rows = None if out is None else out.view(size * length, heads, cache.head_dim_v)
    state = attend(q.flatten(0, 1), cache, plan, attn_sink, rows, extra)
    shape = size, length, heads
    return state.out.view(*shape, cache.head_dim_v) if out is None else out, state.lse.view(shape).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,  # [s_q, h_q, d_qk]
    kv: torch.Tensor,  # [s_kv, 1, d_qk]
    indices: torch.Tensor,  # [s_q, 1, topk]
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,  # [h_q]
    topk_length: torch.Tensor | None = None,  # [s_q]
    out: torch.Tensor | None = None,  # [s_q, h_q, d_v]
    *,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Attend from the tokens of prompts to the latents that each one's list names.

    Args:
        q: queries in float16, bfloat16 or float32.
        kv: latents of one head, of q's dtype.
        indices: int32 rows of `kv`; those below 0 and from `s_kv` on name nothing.
        sm_scale: of the products.
        d_v: columns of a latent that are the value too.
        attn_sink: float32 logits, by which out is scaled: exp(lse) / (exp(lse) + exp(attn_sink)).
        topk_length: int32, how many of the first entries of a list count.
        out: where to write.
        use_legacy: ignored.
        return_log2_lse: True for max_logits and lse in base 2, None for natural ones, False for neither.
        return_max_logits: compute `max_logits`, in a pass of its own. No engine reads it.

    Returns:
        out [s_q, h_q, d_v]; max_logits [s_q, h_q] float32, the largest scaled product of each row, or None; and the lse
        [s_q, h_q] float32, without the sink, as of `flash_mla_with_kvcache`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: arguments do not fit together.

    Examples:
        >>> q, kv = torch.randn(3, 8, 576), torch.randn(100, 1, 576)
        >>> lists = torch.tensor([[[4, 7]], [[9, -1]], [[200, 3]]], dtype=torch.int32)
        >>> out, _, lse = flash_mla.flash_mla_sparse_fwd(q, kv, lists, 192**-0.5)
        >>> out.shape, lse.shape
        (torch.Size([3, 8, 512]), torch.Size([3, 8]))
    """
    num_tokens, heads, head_dim = check_tensor("q", q, None, s_q=None, h_q=None, d_qk=None)
    num_keys, *_ = check_tensor("kv", kv, q.device, s_kv=None, h_kv=1, d_qk=head_dim)
    check_integers("indices", indices, q.device, s_q=num_tokens, h_kv=1, topk=None)
    check_flags(return_max_logits=return_max_logits)
    lists = torch.where(indices < num_keys, indices, -1)
    cache = PagedKVCache.from_latents(kv, as_int("d_v", d_v, least=1))
    spec = spec_of(heads, as_number("sm_scale", sm_scale), cache, q.dtype, attn_sink is not None, causal=False)
    chosen = lists_of("indices", lists, "topk_length", topk_length, (num_tokens, 1))
    starts = torch.zeros(2, dtype=torch.int32, device=q.device)  # one prompt: lists of its tokens may be united
    starts[1] = num_tokens
    batch = Batch(starts[:1, None], starts[:1], starts, chosen=chosen)
    plan = quire.plan(spec, batch, max_query_len=num_tokens, max_seq_len=1, num_tokens=num_tokens)
    state = attend(q, cache, plan, attn_sink, out, None)
    if return_log2_lse is False:
        return state.out, None, None
    unit = LOG2E if return_log2_lse else 1.0
    largest = max_logits(q, kv[:, 0], lists[:, 0], topk_length) * (sm_scale * unit) if return_max_logits else None
    return state.out, largest, state.lse * LOG2E if return_log2_lse else state.lse


def attend(
    q: torch.Tensor,
    cache: PagedKVCache,
    plan: Plan,
    attn_sink: torch.Tensor | None,
    out: torch.Tensor | None,
    extra: PagedKVCache | None,
) -> State:
    """Attend; return out and the lse without the sink."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if out is None:
        out = torch.empty(*q.shape[:2], cache.head_dim_v, dtype=q.dtype, device=q.device)
    quire.attention(q, cache, plan, sinks=attn_sink, out=State(out, lse), extra_cache=extra)
    if attn_sink is not None:  # the lse of attention includes it; both are -inf where there is neither key nor sink
        share = -torch.expm1(torch.nan_to_num(attn_sink - lse, nan=float("-inf"), neginf=float("-inf")))
        lse += torch.where(share > LEAST_SHARE, share, 0.0).log()
    return State(out, lse)


def latents_of(
    name: str, k_cache: torch.Tensor, rank: int, kv_format: str | None, use_legacy: bool, descale: torch.Tensor | None
) -> PagedKVCache:
    """Return a cache of latents, or of records in bytes."""
    *_, width = check_tensor(name, k_cache, None, num_blocks=None, page_block_size=None, num_heads_k=1, head_dim=None)
    latents, scale = k_cache[:, :, 0], None
    if k_cache.dtype in BYTES and width in FORMATS.values():
        if kv_format is not None and FORMATS.get(kv_format) != width:
            raise UnsupportedError(
                f"kv_format must be one of {', '.join(FORMATS)} and fit {width} bytes of a token, got "
                f"{shown(kv_format)}; other formats are not served"
            )
        if use_legacy and width == FORMATS["V41"] and kv_format is None:
            raise UnsupportedError(
                f"{name} must have the scales of 528-byte records after each token's columns, got use_legacy=True, "
                "which says that they follow a page's; keep the interleaved form"
            )
        latents = latents.view(torch.uint8)
    elif k_cache.dtype is torch.float8_e4m3fn:
        scale = 1.0 if descale is None else descale
    return PagedKVCache.from_latents(latents, as_int("head_dim_v", rank, least=1), scale=scale)


@lru_cache(maxsize=64)
def _spec_of(heads: int, scale: float, facts: tuple[Any, ...], dtype: torch.dtype, sinks: bool, causal: bool) -> Any:
    kv_dtype, _, head_dim, rank, _ = facts
    return AttentionSpec(
        num_q_heads=heads, num_kv_heads=1, head_dim=head_dim, head_dim_v=rank, softmax_scale=scale, latent=True,
        dtype=dtype, kv_dtype=kv_dtype, sinks=sinks, causal=causal, allow_fp8=kv_dtype is torch.float8_e4m3fn,
    )  # fmt: skip


def spec_of(
    heads: int, scale: float, cache: PagedKVCache, dtype: torch.dtype, sinks: bool, causal: bool
) -> AttentionSpec:
    """Return the spec of attention over a cache of latents, whose e4m3 is rounded where FlashMLA rounds it."""
    return _spec_of(heads, scale, cache.signature, dtype, sinks, causal)


def dense_batch(
    table: torch.Tensor | None, seq_lens: torch.Tensor | None, shape: tuple[int, int], page_size: int
) -> tuple[Batch, int]:
    """Return a batch of sequences with equally many queries, and the most keys that one may have."""
    size, length = shape
    for name, x in (("block_table", table), ("cache_seqlens", seq_lens)):
        if x is None:
            raise TypeError(
                f"{name} must be a tensor where there are no indices, got None; pass the pages to attend to"
            )
    assert table is not None and seq_lens is not None
    starts = None
    if length != 1:
        starts = torch.arange(0, (size + 1) * length, length, dtype=torch.int32, device=seq_lens.device)[: size + 1]
    return Batch(table, seq_lens, starts), max(1, table.shape[1] * page_size)


def sparse_batch(tensors: tuple[torch.Tensor | None, ...], shape: tuple[int, int], device: torch.device) -> Batch:
    """Return a batch in which each query token is a sequence, with its list of slots, and perhaps a second one."""
    indices, lens, extra, extra_lens = tensors
    assert indices is not None
    nothing = torch.zeros(shape[0] * shape[1], dtype=torch.int32, device=device)  # which slots need not
    chosen = lists_of("indices", indices, "topk_length", lens, shape)
    more = None
    if extra is not None:
        more = lists_of("extra_indices_in_kvcache", extra, "extra_topk_length", extra_lens, shape)
    return Batch(nothing[:, None], nothing, chosen=chosen, extra_chosen=more)


def lists_of(
    name: str, indices: torch.Tensor, lens_name: str, lens: torch.Tensor | None, shape: tuple[int, int]
) -> ChosenKeys:
    """Return the lists of all query tokens."""
    size, length = shape
    *_, width = check_integers(name, indices, None, batch=size, seq_len_q=length, topk=None)
    if lens is not None:
        check_integers(lens_name, lens, indices.device, batch=size)
        lens = lens if length == 1 else lens[:, None].expand(size, length).flatten()
    return ChosenKeys(indices.reshape(size * length, width), lens, are_slots=True)


def are_copies(batch: Batch, tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Return whether lists or their lengths are not those that were given, whose memory is written again."""
    kept = [lists and (lists.indices, lists.lens) for lists in (batch.chosen, batch.extra_chosen)]
    return any(
        mine is not None and given is not None and mine.data_ptr() != given.data_ptr()
        for both, pair in zip(kept, (tensors[:2], tensors[2:]), strict=True)
        for mine, given in zip(both or (), pair, strict=False)
    )


def refuse_lists(*given: Any) -> None:
    """Raise where something belongs to lists, and there are none."""
    names = "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"
    for name, value in zip(names, given, strict=True):
        if value is not None:
            raise ValueError(
                f"{name} must be left out where there are no indices, got {shown(value)}; pass indices too"
            )


def facts_of(x: Any) -> Any:
    """Return what a plan depends on of a tensor. While the plan keeps hold of its memory, it is not another's."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device


def max_logits(q: torch.Tensor, kv: torch.Tensor, lists: torch.Tensor, lens: torch.Tensor | None) -> torch.Tensor:
    """Return the largest product of each query with the keys of its list, [num_tokens, num_heads] float32."""
    seen = lists >= 0
    if lens is not None:
        seen = seen & (torch.arange(lists.shape[1], device=lists.device) < lens[:, None])
    found = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    if not lists.shape[1]:
        return found
    step = max(1, CHUNK // (lists.shape[1] * kv.shape[1]))
    for begin in range(0, len(q), step):
        some = slice(begin, begin + step)
        keys = kv[torch.where(seen[some], lists[some], 0).long()].float()
        products = (q[some].float() @ keys.mT).masked_fill(~seen[some, None], float("-inf"))
        found[some] = products.amax(-1)
    return found
