"""The verbs: check, then launch.

Checks compare host numbers (shapes, dtypes, strides). They read nothing from the device. Nothing is launched or written
unless all of them pass.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch

from quire import ops
from quire.cache import PagedKVCache, packed_cache
from quire.checks import attention as checks
from quire.checks.attention import (
    NewTokens,
    check_attention,
    check_merge_states,
    check_out,
    check_out_scale,
    check_varlen,
)
from quire.checks.cache import check_copy_pages, check_write_kv, check_write_latent
from quire.dispatch.device import is_served_by_torch
from quire.errors import check_flag, describe
from quire.kernels.cpu import cache_ops
from quire.kernels.cpu import combine as cpu_combine
from quire.kernels.cpu import norm_rope as cpu_norm_rope
from quire.norm_rope import QKNorm, Rope, qk_norm_of
from quire.plan import Plan
from quire.spec import AttentionSpec
from quire.state import State

Queries = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
Extras = Sequence[torch.Tensor]  # of a spec's functions, in the order of `AttentionSpec.extras`


@overload
def attention(
    q: Queries, cache: PagedKVCache, plan: Plan, *, k: torch.Tensor | None = None, v: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None, rope: Rope | None = None, qk_norm: QKNorm | None = None,
    sinks: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None, extras: Extras = (),
    out: torch.Tensor | None = None, out_scale: torch.Tensor | None = None, return_lse: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    q: Queries, cache: PagedKVCache, plan: Plan, *, k: torch.Tensor | None = None, v: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None, rope: Rope | None = None, qk_norm: QKNorm | None = None,
    sinks: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None, extras: Extras = (),
    out: State, out_scale: torch.Tensor | None = None,
    extra_cache: PagedKVCache | None = None, return_lse: bool = False,
) -> State: ...  # fmt: skip


@overload
def attention(
    q: Queries, cache: PagedKVCache, plan: Plan, *, k: torch.Tensor | None = None, v: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None, rope: Rope | None = None, qk_norm: QKNorm | None = None,
    sinks: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None, extras: Extras = (),
    out: torch.Tensor | State | None = None, out_scale: torch.Tensor | None = None,
    extra_cache: PagedKVCache | None = None, return_lse: Literal[True],
) -> State: ...  # fmt: skip


@overload
def attention(
    q: Queries, cache: PagedKVCache, plan: Plan, *, k: torch.Tensor | None = None, v: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None, rope: Rope | None = None, qk_norm: QKNorm | None = None,
    sinks: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None, extras: Extras = (),
    out: torch.Tensor | State | None = None, out_scale: torch.Tensor | None = None,
    extra_cache: PagedKVCache | None = None, return_lse: bool = False,
) -> torch.Tensor | State: ...  # fmt: skip


def attention(
    q: Queries,  # [num_tokens, num_q_heads, head_dim], or the pair (q_nope, q_pe)
    cache: PagedKVCache,
    plan: Plan,
    *,
    k: torch.Tensor | None = None,  # [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor | None = None,  # [num_tokens, num_kv_heads, head_dim_v]
    slot_mapping: torch.Tensor | None = None,  # [num_tokens] int64
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    sinks: torch.Tensor | None = None,  # [num_q_heads]
    alibi_slopes: torch.Tensor | None = None,  # [num_q_heads]
    extras: Extras = (),
    out: torch.Tensor | State | None = None,
    out_scale: torch.Tensor | None = None,  # [1] float32
    extra_cache: PagedKVCache | None = None,
    return_lse: bool = False,
) -> torch.Tensor | State:
    """Attend from a batch's queries to its cached keys and values.

    Decode, drafted tokens and (chunked) prefill may be mixed in one batch. The keys and values of this step are in the
    cache already (`write_kv`), or they are given as `k`, `v` and `slot_mapping`. These are written first, and the
    result and the cache are, bit for bit, those of `write_kv` and then `attention`. For at most 64 sequences of at most
    16 queries, the launch that attends also writes. A launch before it writes if the kernel is Hopper's, or one for
    latents or shared prefixes, if scales are per token, and with query_offsets or with intervals but no tree. Rows of
    `out` that belong to no sequence are left as they are. There is no backward pass: q must not require a gradient, and
    none reaches other tensors.

    Args:
        q: queries, [num_tokens, num_q_heads, head_dim], of the spec's dtype; any strides with a contiguous head. For
            latents also the pair of q_nope [num_tokens, num_q_heads, kv_lora_rank] and
            q_pe [num_tokens, num_q_heads, qk_rope_head_dim], which is None where there are no rotary columns.
        cache: the layer's pages.
        plan: how to launch, from `quire.plan`.
        k: keys of q's tokens to write, [num_tokens, num_kv_heads, head_dim], as for `write_kv`; None to write nothing.
            For latents, c_kv as for `write_latent`.
        v: their values, [num_tokens, num_kv_heads, head_dim_v]. For latents, k_pe.
        slot_mapping: their slots, [num_tokens] int64, negative to leave a token out. A token's slot must be where the
            page table has its position, in a page that no other sequence reads. This is not checked; `quire.debug`
            does so when it replays a recorded call. A token of no sequence may have a slot that no sequence reads.
        rope: how the queries and `k` are rotated, as a `Rope` or a tuple of its fields; None if they are already. Not
            for latents, and only with `k`. They are computed in float32 and rounded once, to their dtypes.
        qk_norm: how they are normalised before that, as a `QKNorm` or a tuple of its fields; None if they are already.
        sinks: [num_q_heads], natural-log logits, where the spec has sinks.
        alibi_slopes: [num_q_heads], where the spec has ALiBi.
        extras: the tensors that the spec's score and mask read, contiguous, in the order of `AttentionSpec.extras`.
        out: where to write: a tensor [num_tokens, num_q_heads, head_dim_v] like `q`, or a `State`, whose lse is written
            as well.
        out_scale: a float32 tensor of one element on the device, to have out in float8_e4m3fn: `result / out_scale`,
            rounded once, half to even, and saturated at ±448; NaN stays NaN. None for an out of the queries' dtype. Not
            served by the kernel for latents on Hopper GPUs.
        extra_cache: where the keys of the batch's `extra_chosen` are: latents like those of `cache`, in pages of any
            size. None without such lists.
        return_lse: return a `State` with the natural-log lse, [num_tokens, num_q_heads] float32. With sinks, it
            includes them.

    Returns:
        out, or `State(out, lse)` when the lse was asked for.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit the plan; nothing was written, unless under `torch.compile`.
        UnsupportedError: nothing serves the request.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        >>> cache = quire.PagedKVCache.empty(spec, num_pages=8, page_size=4)
        >>> k, v = torch.randn(2, 6, 2, 16)  # 6 tokens, 2 KV heads of 16
        >>> quire.write_kv(k, v, cache, torch.tensor([12, 13, 14, 15, 20, 21]))  # into pages 3 and 5
        >>> batch = quire.Batch(torch.tensor([[3, 5]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32))
        >>> plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=6)
        >>> q = torch.randn(1, 4, 16)  # the query of the last token
        >>> quire.attention(q, cache, plan).shape
        torch.Size([1, 4, 16])
        >>> quire.attention(q, cache, plan, return_lse=True).lse.shape
        torch.Size([1, 4])

        The next step writes the seventh token, into slot 2 of page 5, and attends to it as well:

        >>> batch.seq_lens.fill_(7)
        tensor([7], dtype=torch.int32)
        >>> plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=7)
        >>> k, v = torch.randn(2, 1, 2, 16)
        >>> quire.attention(q, cache, plan, k=k, v=v, slot_mapping=torch.tensor([22])).shape
        torch.Size([1, 4, 16])
        >>> bool((cache.k[5, 2] == k[0]).all())
        True
    """
    given = k is not None or v is not None or slot_mapping is not None or rope is not None or qk_norm is not None
    new = NewTokens(k, v, slot_mapping, rope, qk_norm) if given else None  # pyright: ignore[reportArgumentType]
    # `quire.debug.record` takes its place while it records.
    check_attention(q, cache, plan, sinks, alibi_slopes, new, extras)
    if extra_cache is not None or plan.batch.extra_chosen is not None:
        checks.check_extra_cache(extra_cache, cache, plan)
    if return_lse is not False and return_lse is not True:
        check_flag("return_lse", return_lse, "say whether the lse is asked for")
    spec = plan.spec
    first = q[0] if isinstance(q, tuple) else q
    num_tokens, device, dtype = first.shape[0], first.device, first.dtype
    if out_scale is not None:
        # In a compiled program there are no addresses yet. The operator that it calls checks again.
        kernel = plan.kernel if torch.compiler.is_compiling() else plan.launch_for(cache).name
        check_out_scale(out_scale, kernel, device)
        dtype = torch.float8_e4m3fn
    if isinstance(out, State):
        out, lse = out
        check_out("out.lse", lse, (num_tokens, spec.num_q_heads), torch.float32, device)
    else:
        lse = torch.empty(first.shape[:2], dtype=torch.float32, device=device) if return_lse else None
    if out is None:
        out = torch.empty(num_tokens, spec.num_q_heads, spec.head_dim_v, dtype=dtype, device=device)
    else:
        check_out("out", out, (num_tokens, spec.num_q_heads, spec.head_dim_v), dtype, device)
    if new is not None:
        new = named(new)
        appender = None if torch.compiler.is_compiling() else plan.appender(cache)
        if appender is not None:
            read = tuple(extras) if extras else None
            appender.append(first, cache, out, lse, sinks, alibi_slopes, *new, out_scale=out_scale, extras=read)
            return out if lse is None else State(out, lse)
        if not torch.compiler.is_compiling():
            plan.check_before_write(cache, new.slot_mapping)
        if rope is None and qk_norm is None:
            write: Any = write_latent if spec.latent else write_kv
            write(new.k, new.v, cache, new.slot_mapping)
        else:
            q = torch.empty(first.shape, dtype=first.dtype, device=device)
            norm_rope_and_write(first, q, cache, *new)
    if torch.compiler.is_compiling():
        ops.attention(q, cache, plan, out, lse, sinks, alibi_slopes, out_scale, extra_cache, extras)
    elif extra_cache is not None:
        run: Any = plan.runner  # of the two that serve a second cache
        run(as_pair(q, spec), cache, out, lse, sinks, alibi_slopes, out_scale, extra_cache)
    elif spec.extras:
        run = plan.runner  # of those that serve functions
        given = as_pair(q, spec) if spec.latent else q
        run(given, cache, out, lse, sinks, alibi_slopes, out_scale, extras=tuple(extras))
    else:
        plan.runner(as_pair(q, spec) if spec.latent else q, cache, out, lse, sinks, alibi_slopes, out_scale)
    return out if lse is None else State(out, lse)


def named(new: NewTokens) -> Any:
    """Return what is given of new tokens with a `Rope` and a `QKNorm` in place of bare tuples."""
    k, v, slot_mapping, rope, qk_norm = new
    if rope is None and qk_norm is None:
        return new
    rope, qk_norm = None if rope is None else Rope(*rope), None if qk_norm is None else qk_norm_of(qk_norm)
    return NewTokens(k, v, slot_mapping, rope, qk_norm)


def norm_rope_and_write(
    q: torch.Tensor,
    rotated: torch.Tensor,
    cache: PagedKVCache,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    rope: Rope | None,
    qk_norm: QKNorm | None,
) -> None:
    """Write rotated queries to `rotated`, and rotated keys and values into their slots; `attention` checked them."""
    if torch.compiler.is_compiling():
        ops.norm_rope_and_write(q, rotated, cache, k, v, slot_mapping, rope, qk_norm)
    elif is_served_by_torch(q.device):
        cpu_norm_rope.norm_rope_and_write(q, rotated, cache, k, v, slot_mapping, rope, qk_norm)
    else:
        from quire.kernels import norm_rope

        norm_rope.norm_rope_and_write(q, rotated, cache, k, v, slot_mapping, rope, qk_norm)


def as_pair(q: Queries, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return queries to latents as the pair that runners take; the halves of one tensor are views."""
    q_nope, q_pe = q if isinstance(q, tuple) else q.split([spec.kv_lora_rank, spec.qk_rope_head_dim], -1)
    return q_nope, q_pe if spec.qk_rope_head_dim else None


@overload
def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, extras: Extras = (), out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None, return_lse: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, extras: Extras = (), out: State,
    out_scale: torch.Tensor | None = None, return_lse: bool = False,
) -> State: ...  # fmt: skip


@overload
def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, extras: Extras = (), out: torch.Tensor | State | None = None,
    out_scale: torch.Tensor | None = None, return_lse: Literal[True],
) -> State: ...  # fmt: skip


@overload
def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, extras: Extras = (), out: torch.Tensor | State | None = None,
    out_scale: torch.Tensor | None = None, return_lse: bool = False,
) -> torch.Tensor | State: ...  # fmt: skip


def varlen_attention(
    q: torch.Tensor,  # [num_tokens_q, num_q_heads, head_dim]
    k: torch.Tensor,  # [num_tokens_k, num_kv_heads, head_dim]
    v: torch.Tensor,  # [num_tokens_k, num_kv_heads, head_dim_v]
    plan: Plan,
    *,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    extras: Extras = (),
    out: torch.Tensor | State | None = None,
    out_scale: torch.Tensor | None = None,  # [1] float32
    return_lse: bool = False,
) -> torch.Tensor | State:
    """Attend to keys and values that are not paged; the plan's batch is `Batch.varlen(cu_seqlens_q, cu_seqlens_k)`.

    Args:
        q: queries, [num_tokens_q, num_q_heads, head_dim].
        k: keys, [num_tokens_k, num_kv_heads, head_dim].
        v: values, [num_tokens_k, num_kv_heads, head_dim_v].
        plan: from `quire.plan`.
        sinks: as for `attention`.
        alibi_slopes: as for `attention`.
        extras: as for `attention`.
        out: as for `attention`.
        out_scale: as for `attention`.
        return_lse: as for `attention`.

    Returns:
        out, or `State(out, lse)`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit the plan; nothing was written.
        UnsupportedError: the plan is for latents, which are always paged.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        >>> starts = torch.tensor([0, 20, 27], dtype=torch.int32)  # two prompts, of 20 and 7 tokens
        >>> plan = quire.plan(spec, quire.Batch.varlen(starts, starts), max_query_len=20, max_seq_len=20, num_tokens=27)
        >>> q, (k, v) = torch.randn(27, 4, 16), torch.randn(2, 27, 2, 16)
        >>> quire.varlen_attention(q, k, v, plan).shape
        torch.Size([27, 4, 16])
    """
    check_varlen(plan)
    cache = packed_cache(k, v)
    per_layer: Any = {"sinks": sinks, "alibi_slopes": alibi_slopes, "extras": extras}
    return attention(q, cache, plan, **per_layer, out=out, out_scale=out_scale, return_lse=return_lse)


@overload
def union_attention(
    q: Queries, cache: PagedKVCache, plans: Sequence[Plan], *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, extras: Extras = (), return_lse: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def union_attention(
    q: Queries, cache: PagedKVCache, plans: Sequence[Plan], *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, extras: Extras = (), return_lse: Literal[True],
) -> State: ...  # fmt: skip


@overload
def union_attention(
    q: Queries, cache: PagedKVCache, plans: Sequence[Plan], *, sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, extras: Extras = (), return_lse: bool = False,
) -> torch.Tensor | State: ...  # fmt: skip


def union_attention(
    q: Queries,  # [num_tokens, num_q_heads, head_dim], or the pair (q_nope, q_pe)
    cache: PagedKVCache,
    plans: Sequence[Plan],
    *,
    sinks: torch.Tensor | None = None,  # [num_q_heads]
    alibi_slopes: torch.Tensor | None = None,  # [num_q_heads]
    extras: Extras = (),
    return_lse: bool = False,
) -> torch.Tensor | State:
    """Attend to the union of several disjoint sets of keys, such as a prefix and a window.

    This is `attention` for each plan, and `merge_states`. A key that two plans see counts twice.

    Args:
        q: queries, as for `attention`.
        cache: the layer's pages.
        plans: one for each set of keys, from `quire.plan`. Their specs are equal, except that only the first may have
            sinks, which count once. `quire.intervals.prefix_and_window` makes two batches for them.
        sinks: [num_q_heads], natural-log logits, where the first plan's spec has sinks.
        alibi_slopes: [num_q_heads], where the specs have ALiBi.
        extras: as for `attention`.
        return_lse: return a `State` with the natural-log lse over all keys, [num_tokens, num_q_heads] float32.

    Returns:
        A new out, [num_tokens, num_q_heads, head_dim_v], or `State(out, lse)` when the lse was asked for. Rows that
        belong to no sequence hold anything.

    Raises:
        TypeError: an argument is of another type.
        ValueError: there is no plan, specs differ, or an argument does not fit a plan.
        UnsupportedError: nothing serves the request.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        >>> cache = quire.PagedKVCache.empty(spec, num_pages=2, page_size=4)
        >>> k, v = torch.randn(2, 8, 2, 16)
        >>> quire.write_kv(k, v, cache, torch.arange(8))
        >>> batch = quire.Batch(torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([8], dtype=torch.int32))
        >>> both = quire.intervals.prefix_and_window(batch, 1, prefix=1, size=4)  # keys 0, 4, 5, 6 and 7
        >>> plans = [quire.plan(spec, b, max_query_len=1, max_seq_len=8) for b in both]
        >>> quire.union_attention(torch.randn(1, 4, 16), cache, plans).shape
        torch.Size([1, 4, 16])
    """
    check_union(plans)
    check_flag("return_lse", return_lse, "say whether the lse is asked for")
    for plan in plans:  # all of them before anything is launched; `quire.debug.record` counts the calls below
        checks.check_attention(q, cache, plan, sinks if plan.spec.sinks else None, alibi_slopes, extras=extras)
    if sinks is not None and not plans[0].spec.sinks:
        checks.check_attention(q, cache, plans[0], sinks, alibi_slopes, extras=extras)
    per_layer: Any = {"alibi_slopes": alibi_slopes, "extras": extras, "return_lse": True}
    states = [attention(q, cache, p, sinks=sinks if p.spec.sinks else None, **per_layer) for p in plans]
    state = merge_states(states)
    return state if return_lse else state.out


def write_kv(
    k: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim_v]
    cache: PagedKVCache,
    slot_mapping: torch.Tensor,  # [num_tokens] int64
) -> None:
    """Write new keys and values into their slots; quantise them if the cache is fp8 or int8.

    Stored values are `x / scale`, rounded half to even and saturated at ±448 (e4m3), ±57,344 (e5m2) or ±127 (int8). NaN
    stays NaN in fp8 and becomes 0 in int8. Scales per tensor or per head are read from the cache; without scales they
    are 1. Scales per token and head are computed and written too: the largest finite magnitude over the largest value
    of the dtype, or 1 for a token of zeros.

    Args:
        k: new keys, [num_tokens, num_kv_heads, head_dim]; any strides with a contiguous head.
        v: new values, [num_tokens, num_kv_heads, head_dim_v].
        cache: the layer's pages, changed in place.
        slot_mapping: [num_tokens] int64, `page * page_size + slot` of each token; negative to leave a token out. It may
            be shorter than `k`. The further tokens of `k` are then padding. Its numbers are checked on a CPU alone: on
            a GPU that would wait for the device, and a slot past the last page is memory out of bounds.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit the cache; nothing was written.
        UnsupportedError: the cache is not paged.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        >>> cache = quire.PagedKVCache.empty(spec, num_pages=8, page_size=4)
        >>> k = v = torch.ones(3, 2, 16)
        >>> quire.write_kv(k, v, cache, torch.tensor([12, 13, -1]))  # page 3; the last is left out
        >>> cache.k[3, :2].unique().tolist()
        [1.0]
    """
    check_write_kv(k, v, cache, slot_mapping)
    if torch.compiler.is_compiling():
        ops.write_kv(k, v, cache, slot_mapping)
    elif is_served_by_torch(k.device):
        cache_ops.write_kv(k, v, cache, slot_mapping)
    else:
        from quire.kernels import write

        write.write_kv(k, v, cache, slot_mapping)


def write_latent(
    c_kv: torch.Tensor,  # [num_tokens, kv_lora_rank]
    k_pe: torch.Tensor | None,  # [num_tokens, qk_rope_head_dim]
    cache: PagedKVCache,
    slot_mapping: torch.Tensor,  # [num_tokens] int64
) -> None:
    """Write new latents and their rotary columns into their slots, in one launch; quantise them if the cache is fp8.

    In an e4m3 cache, stored values are `x / scale`, rounded half to even and saturated at ±448; NaN stays NaN. In
    vLLM's "fp8_ds_mla" records, the scale of each 128 columns of a latent is the least power of two that is no less
    than their largest finite magnitude over 448, and at least 2^-13, as in vLLM 0.33. So are those of "fp8_ds_mla_584"
    and "fp8_ds_mla_528", for each 64 and 32 columns and at least 2^-22. Rotary columns are rounded to bfloat16; those
    of "fp8_ds_mla_584" are the last 64 of `c_kv`.

    Args:
        c_kv: new latents, normalised, [num_tokens, kv_lora_rank]; any strides with a contiguous last dimension.
        k_pe: their rotary columns, rotated, [num_tokens, qk_rope_head_dim] or [num_tokens, 1, qk_rope_head_dim]; None
            where the cache has none.
        cache: the layer's latents, changed in place.
        slot_mapping: [num_tokens] int64, `page * page_size + slot` of each token; negative to leave a token out. It may
            be shorter than `c_kv`. The further tokens of `c_kv` are then padding. Its numbers are checked on a CPU
            alone: on a GPU that would wait for the device, and a slot past the last page is memory out of bounds.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit the cache; nothing was written.
        UnsupportedError: the cache requires a gradient, or its device is not served.

    Examples:
        >>> spec = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=192**-0.5, dtype=torch.float32)
        >>> cache = quire.PagedKVCache.empty(spec, num_pages=8, page_size=4)
        >>> quire.write_latent(torch.ones(1, 512), torch.zeros(1, 64), cache, torch.tensor([13]))  # slot 1 of page 3
        >>> cache.latents[3, 1].sum().item()
        512.0
    """
    check_write_latent(c_kv, k_pe, cache, slot_mapping)
    if torch.compiler.is_compiling():
        ops.write_latent(c_kv, k_pe, cache, slot_mapping)
        return
    if k_pe is not None:
        k_pe = None if k_pe.shape[-1] == 0 else k_pe.flatten(1)
    if is_served_by_torch(c_kv.device):
        cache_ops.write_latent(c_kv, k_pe, cache, slot_mapping)
    else:
        from quire.kernels import write_latent

        write_latent.write_latent(c_kv, k_pe, cache, slot_mapping)


def copy_pages(
    src: PagedKVCache,
    dst: PagedKVCache,
    page_pairs: torch.Tensor,  # [num_pairs, 2] int32 or int64
) -> None:
    """Copy pages, with their scales per token, within a cache or between two.

    Use it for copy on write, or to swap pages to and from a cache in host memory. Swapping is asynchronous if the
    host's cache is pinned (`tensor.pin_memory()`): synchronise before reading it on the host. Pass `page_pairs` on the
    host for a swap, and on the GPU for a copy within that GPU. Otherwise they are moved there first, which waits for
    the device.

    The numbers in `page_pairs` are checked on a CPU and for a swap. For a copy within a GPU they are not, since the
    check would wait for the device: a page that is none is memory out of bounds, and one that is written twice, or
    read and written, holds a mixture.

    Args:
        src: cache to read.
        dst: cache to write, of the same layout, dtype and page shape, and with equal scales per tensor or head, which
            are not compared; may be `src`. No page may be written twice, or read and written.
        page_pairs: [num_pairs, 2] (source page, destination page), int32 or int64, on any device; pairs with a negative
            page are left out.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the caches differ in layout, dtype or page shape, page_pairs has another shape or dtype, or, where
            they are checked, numbers that are not allowed; nothing was written.
        UnsupportedError: the caches are not paged.

    Examples:
        >>> cache = quire.PagedKVCache(torch.ones(8, 4, 2, 16), torch.ones(8, 4, 2, 16))
        >>> cache.k[5] = 7
        >>> quire.copy_pages(cache, cache, torch.tensor([[5, 2]]))  # page 5 to page 2
        >>> cache.k[2].unique().item(), cache.v[2].unique().item()
        (7.0, 1.0)
    """
    check_copy_pages(src, dst, page_pairs)
    if page_pairs.shape[0] == 0:
        return
    if src.device != dst.device:
        cache_ops.swap_pages(src, dst, page_pairs)
    elif is_served_by_torch(src.device):
        cache_ops.copy_pages(src, dst, page_pairs.to(src.device))
    else:
        from quire.kernels import copy

        copy.copy_pages(src, dst, page_pairs.to(src.device))


def merge_states(states: Sequence[State]) -> State:
    """Merge states over disjoint sets of keys into the state over all of them, exactly.

    Order and grouping change the rounding only: `merge_states([a, b, c])` is `merge_states([a, merge_states([b, c])])`.
    States at equal distances in one memory, such as rows of one tensor, are read where they are. Others are copied.

    Args:
        states: one or more. All have out [num_tokens, num_q_heads, head_dim_v] of one dtype (float16, bfloat16 or
            float32) and lse [num_tokens, num_q_heads] float32. An lse of -inf says that a row saw no key; so does +inf,
            which flash-attn writes there.

    Returns:
        A new state: lse = log Σ exp(lse_i), out = Σ exp(lse_i - lse) out_i, summed in float32.

    Raises:
        TypeError: an argument is of another type.
        ValueError: there is none, or shapes, dtypes or devices differ.

    Examples:
        >>> one = quire.State(torch.full((1, 1, 2), 1.0), torch.zeros(1, 1))
        >>> three = quire.State(torch.full((1, 1, 2), 3.0), torch.zeros(1, 1))
        >>> merged = quire.merge_states([one, three])  # equal weights
        >>> merged.out.tolist(), round(merged.lse.item(), 4)  # log(exp(0) + exp(0))
        ([[[2.0, 2.0]]], 0.6931)
    """
    check_merge_states(states)
    if torch.compiler.is_compiling():
        return ops.merge_states(states)
    if is_served_by_torch(states[0].out.device):
        return cpu_combine.merge_states(states)
    from quire.kernels import combine

    return combine.merge_states(states)


def check_union(plans: Sequence[Plan]) -> None:
    """Raise unless plans are of the same spec, of which only the first has sinks."""
    if not isinstance(plans, list | tuple):
        raise TypeError(f"plans must be a list of plans, got {describe(plans)}; call attention for a single one")
    if not plans:
        raise ValueError("plans must hold at least one plan, got none; make one for each set of keys")
    for i, plan in enumerate(plans):
        if not isinstance(plan, Plan):
            raise TypeError(f"plans[{i}] must be a Plan, got {describe(plan)}; call quire.plan")
        if i and plan.spec.sinks:
            raise ValueError(f"plans[{i}] must have a spec without sinks, got one with sinks; they count in plans[0]")
        if replace(plan.spec, sinks=plans[0].spec.sinks) != plans[0].spec:
            raise ValueError(f"plans[{i}] must have the spec of plans[0], got {plan.spec}; only sinks may differ")


ops.register(attention, write_kv, write_latent, merge_states, norm_rope_and_write)
