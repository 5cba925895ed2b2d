"""Attention over pages for CPU tensors, in PyTorch.

Sequences with equal query lengths go together in one padded gather, so that a decode step is one call of
`scaled_dot_product_attention` for all its sequences. Prompts of more than 16 queries go one by one.
"""

from dataclasses import replace

import torch

from quire.batch import Batch, ChosenKeys
from quire.cache import PagedKVCache
from quire.checks.batch import check_chosen, check_reads, tokens_at_once
from quire.chosen import keys_of, slots_of
from quire.intervals import locate
from quire.kernels.cpu.cache_ops import store_out
from quire.kernels.cpu.formats import decode
from quire.kernels.cpu.softmax import softmax_and_lse
from quire.kernels.formats import as_bytes
from quire.score_functions import Scene, apply, bounds_of
from quire.spec import QUANTISED_DTYPES, AttentionSpec

LONGEST_GROUPED = 16  # queries; padding the keys of longer prompts would cost more than a call for each


@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def attend(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
    cache: PagedKVCache,
    spec: AttentionSpec,
    batch: Batch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    out_scale: torch.Tensor | None = None,
    extra_cache: PagedKVCache | None = None,
    *,
    extras: tuple[torch.Tensor, ...] | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
) -> None:
    """Compute attention into `out` and `lse`; `quire.attention` has checked shapes, dtypes and devices.

    Args:
        q: [num_tokens, num_q_heads, head_dim]; or the pair of its two parts, for latents.
        cache: the pages.
        spec: what to compute.
        batch: the sequences.
        out: [num_tokens, num_q_heads, head_dim_v], written where a sequence owns the token.
        lse: [num_tokens, num_q_heads] float32, which is written too; or None.
        sinks: [num_q_heads], where the spec has sinks.
        alibi_slopes: [num_q_heads], where the spec has ALiBi.
        out_scale: [1] float32 where out is float8_e4m3fn, or None.
        extra_cache: where the keys of the batch's `extra_chosen` are.
        extras: the tensors of `spec.extras`.
        max_query_len: the plan's bound on queries per sequence; None to leave it unchecked.
        max_seq_len: the plan's bound on keys per sequence; None to leave it unchecked.

    Raises:
        ValueError: lengths, offsets or page numbers are out of range; nothing was written.
    """
    if isinstance(q, tuple):
        q = torch.cat([half for half in q if half is not None], -1)
    check_reads(batch, cache, spec, num_tokens=q.shape[0], max_query_len=max_query_len, max_seq_len=max_seq_len)
    if batch.chosen is not None:
        if batch.extra_chosen is not None and extra_cache is not None:
            extra = replace(batch, chosen=batch.extra_chosen, extra_chosen=None)
            check_chosen(extra, extra_cache, causal=False, argument="extra_chosen")
        attend_chosen(q, cache, spec, batch, batch.chosen, out, lse, sinks, out_scale, extra_cache)
        return
    tables = {extra.name: tensor for extra, tensor in zip(spec.extras, extras or (), strict=True)}
    starts = batch.query_starts.tolist()
    groups: dict[tuple[int, int], list[int]] = {}
    for seq in range(batch.num_seqs):
        q_len = starts[seq + 1] - starts[seq]
        if q_len:
            groups.setdefault((q_len, 0 if q_len <= LONGEST_GROUPED else seq), []).append(seq)
    for (q_len, _), group in groups.items():
        seqs = torch.tensor(group, device=q.device)
        rows = batch.query_starts[seqs].long()[:, None] + torch.arange(q_len, device=q.device)  # [num_seqs, q_len]
        exact = out_scale is not None  # results are rounded once
        group_out, group_lse = attend_group(
            q[rows], cache, spec, batch, seqs, sinks, alibi_slopes, lse is not None, exact, tables
        )
        store_out(out, rows, group_out, out_scale)
        if lse is not None and group_lse is not None:
            lse[rows] = group_lse


def attend_chosen(
    q: torch.Tensor,
    cache: PagedKVCache,
    spec: AttentionSpec,
    batch: Batch,
    chosen: ChosenKeys,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    extra_cache: PagedKVCache | None,
) -> None:
    """Attend to the keys that the batch's lists name; the arguments are those of `attend`."""
    num_tokens, num_lists = int(batch.query_starts[-1]), chosen.num_lists
    tokens, group_size = locate(batch, num_tokens), spec.group_size
    numbers = chosen.width * chosen.block_size * spec.num_kv_heads * spec.head_dim  # of the keys of a token
    for first in range(0, num_tokens, step := tokens_at_once(numbers)):
        rows = slice(first, min(first + step, num_tokens))
        named = keys_of(chosen, tokens, rows, causal=spec.causal)
        page, slot = slots_of(named, batch, tokens, rows, cache.page_size)  # [num_tokens, num_lists, num_keys]
        results, lses = [], []
        for i in range(num_lists):  # of all KV heads, or of one
            kv_heads = slice(i, i + 1) if num_lists > 1 else slice(0, spec.num_kv_heads)
            heads = slice(kv_heads.start * group_size, kv_heads.stop * group_size)
            seen = named.seen[:, i]
            k, v = read(cache, page[:, i], slot[:, i], seen, kv_heads)
            if batch.extra_chosen is not None and extra_cache is not None:
                more = keys_of(batch.extra_chosen, tokens, rows, causal=False)
                key, size = torch.where(more.seen, more.key, 0)[:, 0], extra_cache.page_size
                found = read(extra_cache, key // size, key % size, more.seen[:, 0], kv_heads)
                k, v = torch.cat([k, found[0]], 1), torch.cat([v, found[1]], 1)
                seen = torch.cat([seen, more.seen[:, 0]], 1)
            k, v = k.float().transpose(1, 2), v.float().transpose(1, 2)  # [num_tokens, KV heads, num_keys, head_dim]
            grouped = q[rows, heads].float().unflatten(1, (-1, group_size))
            scores = grouped @ k.transpose(-1, -2) * spec.softmax_scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
            if sinks is not None:  # a sink is one more key, whose value is 0
                sink = sinks[heads].float().view(-1, group_size, 1).expand(*scores.shape[:-1], 1)
                scores = torch.cat([scores, sink], -1)
            p, part = softmax_and_lse(scores)
            results.append((p[..., : k.shape[2]] @ v).flatten(1, 2))
            lses.append(part.flatten(1, 2))
        store_out(out, rows, torch.cat(results, 1), out_scale)
        if lse is not None:
            lse[rows] = torch.cat(lses, 1)


def attend_group(
    q: torch.Tensor,
    cache: PagedKVCache,
    spec: AttentionSpec,
    batch: Batch,
    seqs: torch.Tensor,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    want_lse: bool,
    exact: bool,
    tables: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend for sequences with equal query lengths.

    Args:
        q: [num_seqs, q_len, num_q_heads, head_dim].
        cache: the pages.
        spec: what to compute.
        batch: all sequences of the step.
        seqs: [num_seqs] int64, which of them these are.
        sinks: [num_q_heads] or None.
        alibi_slopes: [num_q_heads] or None.
        want_lse: whether the caller needs the lse.
        exact: compute out in float32 whatever the dtype is.
        tables: what the spec's functions read, by name.

    Returns:
        out [num_seqs, q_len, num_q_heads, head_dim_v], and lse [num_seqs, q_len, num_q_heads] float32 or None.
    """
    q_len, num_q_heads = q.shape[1:3]
    q_pos, kv_pos, visible = visible_keys(spec, batch, seqs, q_len, tables)
    k, v = gather(cache, batch, seqs, kv_pos, visible.any(1))
    q, k, v, mask = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visible[:, None]

    # `scaled_dot_product_attention` copies keys for each query head, of which latents have many.
    is_plain = not (spec.latent or spec.sinks or spec.alibi or spec.softcap is not None or spec.score or spec.mask)
    if is_plain and not want_lse and mask.shape[-1]:
        # Dequantised numbers may be too small for float16: a quantised cache is computed in float32.
        is_quantised = cache.dtype in QUANTISED_DTYPES or cache.kv_format is not None
        dtype = torch.float32 if exact or is_quantised else q.dtype
        out = torch.nn.functional.scaled_dot_product_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=mask, scale=spec.softmax_scale, enable_gqa=True
        )
        return torch.where(mask.any(-1, keepdim=True), out, 0.0).transpose(1, 2), None

    grouped = (spec.num_kv_heads, num_q_heads // spec.num_kv_heads)
    q = q.float().unflatten(1, grouped)  # [num_seqs, num_kv_heads, group_size, q_len, head_dim]
    k, v = k.float(), v.float()  # [num_seqs, num_kv_heads, num_keys, head_dim]
    scores = (q.flatten(2, 3) @ k.transpose(-1, -2) * spec.softmax_scale).unflatten(2, (-1, q_len))
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if alibi_slopes is not None:
        distance = (q_pos[..., None] - kv_pos).abs()[:, None, None]
        scores = scores - alibi_slopes.float().view(*grouped, 1, 1) * distance
    if spec.score is not None or spec.mask is not None:
        heads = torch.arange(num_q_heads, device=q.device).view(*grouped, 1, 1)
        token = batch.query_starts[seqs].long()[:, None] + torch.arange(q_len, device=q.device)
        of_seqs = seqs.view(-1, 1, 1, 1, 1), token[:, None, None, :, None], tables
        scene = Scene(q_pos[:, None, None, :, None], kv_pos, heads, heads[:, :1] // grouped[1], *of_seqs)
        scores = apply(spec.score, spec.mask, scores, scene)
    scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    if sinks is not None:  # a sink is one more key, whose value is 0
        sink = sinks.float().view(*grouped, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    p, lse = softmax_and_lse(scores)
    out = (p[..., : kv_pos.shape[0]].flatten(2, 3) @ v).unflatten(2, (-1, q_len))
    return out.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2).transpose(1, 2)


def visible_keys(
    spec: AttentionSpec, batch: Batch, seqs: torch.Tensor, q_len: int, tables: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what sequences of `q_len` queries each see.

    Returns:
        q_pos [num_seqs, q_len], the queries' positions; kv_pos [num_keys], the positions that any query may see; and
        visible [num_seqs, q_len, num_keys] bool, which of these each query sees.
    """
    seq_lens = batch.seq_lens[seqs].long()[:, None]
    first = seq_lens - q_len if batch.query_offsets is None else batch.query_offsets[seqs].long()[:, None]
    query = torch.arange(q_len, device=first.device)
    q_pos, token = first + query, batch.query_starts[seqs].long()[:, None] + query  # [num_seqs, q_len]
    window_left, window_right = spec.window
    begin, end = q_pos - window_left, q_pos + window_right + 1
    if batch.max_tokens is not None:
        begin = torch.zeros_like(q_pos) if batch.key_begin is None else batch.key_begin[token].long()
        end = first.expand_as(q_pos) if batch.key_end is None else batch.key_end[token].long()
    if (bounds := bounds_of(spec.mask, q_pos, seqs[:, None], token, tables)) is not None:
        begin, end = torch.maximum(begin, bounds[0]), torch.minimum(end, bounds[1])
    begin, end = begin.clamp(min=0), torch.minimum(end, seq_lens)
    sees = begin < end
    begins, ends = begin[sees], end[sees]
    if batch.tree_bits is not None:  # drafts are seen too
        begins, ends = torch.minimum(begin, first).clamp(min=0), torch.minimum(first + q_len, seq_lens)
    low, high = (int(begins.min()), int(ends.max())) if begins.numel() else (0, 0)
    kv_pos = torch.arange(low, max(low, high), device=first.device)
    visible = (kv_pos >= begin[..., None]) & (kv_pos < end[..., None])
    if batch.tree_bits is not None:
        draft = (kv_pos - first)[:, None]  # [num_seqs, 1, num_keys]
        is_draft = (draft >= 0) & (draft < q_len) & (kv_pos < seq_lens[..., None])
        visible |= is_draft & ((batch.tree_bits[token][..., None] >> draft.clamp(0, 63)) & 1 > 0)
    return q_pos, kv_pos, visible


def gather(
    cache: PagedKVCache, batch: Batch, seqs: torch.Tensor, kv_pos: torch.Tensor, needed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read keys and values through the page table, dequantised.

    Args:
        cache: the pages.
        batch: all sequences of the step.
        seqs: [num_seqs] int64, the sequences to read.
        kv_pos: [num_keys] int64, the positions to read.
        needed: [num_seqs, num_keys] bool; the others may hold anything and come out as 0.

    Returns:
        k [num_seqs, num_keys, num_kv_heads, head_dim] and v [num_seqs, num_keys, num_kv_heads, head_dim_v].
    """
    entry = kv_pos // cache.page_size
    if batch.cu_pages is None:
        table = batch.page_table[seqs][:, entry.clamp(max=batch.page_table.shape[1] - 1)]
    else:
        index = batch.cu_pages[seqs].long()[:, None] + entry
        table = batch.page_table[torch.where(needed, index, 0)] if batch.page_table.shape[0] else index
    page = torch.where(needed, table.long(), 0)
    slot = torch.where(needed, kv_pos % cache.page_size, 0)
    return read(cache, page, slot, needed)


def read(
    cache: PagedKVCache, page: torch.Tensor, slot: torch.Tensor, needed: torch.Tensor, heads: slice = slice(None)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read keys and values, dequantised.

    Args:
        cache: the pages.
        page: [num_seqs, num_keys] int64.
        slot: [num_seqs, num_keys] int64, in the page.
        needed: [num_seqs, num_keys] bool; the others may hold anything and come out as 0.
        heads: KV heads.

    Returns:
        k [num_seqs, num_keys, heads, head_dim] and v [num_seqs, num_keys, heads, head_dim_v].
    """
    if cache.scale_kind == "record":
        values, scales, *rope = (part[page, slot] for part in cache.records if part is not None)
        if scales.dtype is torch.uint8:  # exponents of powers of two
            scales = (scales.int() << 23).view(torch.float32)
        values = values.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
        k = torch.cat([values.flatten(-2), *(part.float() for part in rope)], -1)
        k = k.masked_fill(~needed[..., None], 0.0)[:, :, None]
        return k, k[..., : cache.head_dim_v]
    if cache.kv_format is not None:
        k, v = decode(cache, page, slot, heads)
        return k.masked_fill(~needed[..., None, None], 0.0), v.masked_fill(~needed[..., None, None], 0.0)
    k, v = as_bytes(cache.k), as_bytes(cache.v)
    if cache.layout == "THD":
        k, v = k[page + slot, heads], v[page + slot, heads]
    elif cache.layout == "NHD":
        k, v = k[page, slot, heads], v[page, slot, heads]
    elif cache.layout == "HND":
        k, v = k[page, heads, slot], v[page, heads, slot]
    else:
        k, v = k[page, heads, :, slot].flatten(3), v[page, heads, :, slot]
    if cache.dtype in QUANTISED_DTYPES:
        k, v = k.view(cache.dtype).float(), v.view(cache.dtype).float()
    k_scale, v_scale = cache.k_scale, cache.v_scale
    if k_scale is not None and v_scale is not None:
        if cache.scale_kind == "token":
            k_scale, v_scale = k_scale[page, slot], v_scale[page, slot]
        k_scale, v_scale = k_scale[..., heads], v_scale[..., heads]
        k, v = k * k_scale[..., None], v * v_scale[..., None]
    unread = ~needed[..., None, None]
    return k.masked_fill(unread, 0.0), v.masked_fill(unread, 0.0)
