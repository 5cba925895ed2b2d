"""Attention over the pages for CPU tensors, in PyTorch: what a plan chooses where Triton has no driver.

Sequences with equal query lengths go together in one padded gather, so that a step of decoding is one call of
`scaled_dot_product_attention` however many sequences it has; unequal prompts go one by one.
"""

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.spec import AttentionSpec


def attend(
    q: torch.Tensor,
    cache: PagedKVCache,
    spec: AttentionSpec,
    batch: Batch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> None:
    """Compute what the kernels would; arguments were checked by `quire.attention`."""
    query_starts = batch.query_starts
    starts = query_starts.tolist()
    groups: dict[tuple[int, int], list[int]] = {}
    for seq in range(batch.num_seqs):
        q_len = starts[seq + 1] - starts[seq]
        if q_len:  # short ones together; a long prompt alone, since padding its keys would cost more than a call
            groups.setdefault((q_len, 0 if q_len <= 16 else seq), []).append(seq)
    for (q_len, _), seqs in groups.items():
        index = torch.tensor(seqs)
        rows = query_starts[index].long()[:, None] + torch.arange(q_len)  # [num_seqs, q_len]
        part_out, part_lse = attend_group(
            q[rows], cache, spec, batch, index, q_len, sinks, alibi_slopes, lse is not None
        )
        out[rows] = part_out.to(out.dtype)
        if lse is not None:
            lse[rows] = part_lse


def attend_group(q, cache, spec, batch, index, q_len, sinks, alibi_slopes, want_lse):
    """Attend for sequences `index`, which have `q_len` queries each.

    Args:
        q: [num_seqs, q_len, num_q_heads, head_dim].

    Returns:
        out [num_seqs, q_len, num_q_heads, head_dim_v] and, where wanted, lse [num_seqs, q_len, num_q_heads] float32.
    """
    seq_lens = batch.seq_lens[index].long()
    first = seq_lens - q_len if batch.query_offsets is None else batch.query_offsets[index].long()
    q_pos = first[:, None] + torch.arange(q_len)
    window_left, window_right = spec.window
    low = int((first - window_left).clamp(min=0).min())
    high = max(low, int(torch.minimum(seq_lens, first + q_len + window_right).max()))
    kv_pos = torch.arange(low, high)
    visible = (
        (kv_pos >= q_pos[..., None] - window_left)
        & (kv_pos <= q_pos[..., None] + window_right)
        & (kv_pos < seq_lens[:, None, None])
    )
    k, v = gather(
        cache, batch, index, kv_pos, visible.any(1)
    )  # keys that no query sees come out as 0: they may hold anything

    plain = spec.softcap is None and not (spec.alibi or spec.sinks or want_lse)
    q, k, v, mask = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visible[:, None]
    if plain and high > low:
        k, v = k.to(q.dtype), v.to(q.dtype)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=spec.softmax_scale, enable_gqa=True
        )
        return torch.where(mask.any(-1, keepdim=True), out, 0.0).transpose(1, 2), None

    q = q.float().unflatten(
        1, (spec.num_kv_heads, spec.group_size)
    )  # [num_seqs, num_kv_heads, group_size, q_len, head_dim]
    k, v = k.float()[:, :, None], v.float()[:, :, None]
    scores = q @ k.transpose(-1, -2) * spec.softmax_scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.alibi:
        distance = (q_pos[..., None] - kv_pos).abs()[:, None, None]
        scores = scores - alibi_slopes.float().view(1, spec.num_kv_heads, spec.group_size, 1, 1) * distance
    scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    if spec.sinks:
        sink = sinks.float().view(1, spec.num_kv_heads, spec.group_size, 1, 1).expand(*scores.shape[:-1], 1)
        lse = torch.logsumexp(torch.cat([scores, sink], -1), -1, keepdim=True)
    else:
        lse = (
            torch.logsumexp(scores, -1, keepdim=True)
            if high > low
            else scores.new_full((*scores.shape[:-1], 1), float("-inf"))
        )
    out = torch.exp(scores - lse).nan_to_num(0.0) @ v  # a row that sees nothing: -inf - -inf
    return out.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2)[..., 0].transpose(1, 2)


def gather(cache: PagedKVCache, batch: Batch, index: torch.Tensor, kv_pos: torch.Tensor, needed: torch.Tensor):
    """Read keys and values at positions `kv_pos` [num_keys] of sequences `index`, dequantised; 0 where not `needed` [num_seqs, num_keys].

    Returns:
        k [num_seqs, num_keys, num_kv_heads, head_dim] and v likewise.
    """
    entry = kv_pos // cache.page_size
    if batch.cu_pages is None:
        table = batch.page_table[index][:, entry.clamp(max=batch.page_table.shape[1] - 1)]
    else:
        flat = (batch.cu_pages[index].long()[:, None] + entry).clamp(max=max(batch.page_table.shape[0] - 1, 0))
        table = batch.page_table[flat] if batch.page_table.shape[0] else torch.zeros_like(flat)
    page = torch.where(needed, table.long(), 0)
    slot = torch.where(needed, kv_pos % cache.page_size, 0)
    k, v = cache.k, cache.v
    if k.dtype.itemsize == 1:  # indexing is not implemented for every 8-bit float
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    if cache.layout == "THD":
        token = page + slot
        k, v = k[token], v[token]
    elif cache.layout == "NHD":
        k, v = k[page, slot], v[page, slot]
    elif cache.layout == "HND":
        k, v = k[page, :, slot], v[page, :, slot]
    else:
        k, v = k[page, :, :, slot].flatten(3), v[page, :, :, slot]
    if cache.dtype.itemsize == 1:
        k, v = k.view(cache.dtype).float(), v.view(cache.dtype).float()
        if cache.scale_kind == "token":
            k, v = k * cache.k_scale[page, slot][..., None], v * cache.v_scale[page, slot][..., None]
        elif cache.scale_kind == "head":
            k, v = k * cache.k_scale[:, None], v * cache.v_scale[:, None]
    unread = ~needed[..., None, None]
    return k.masked_fill(unread, 0.0), v.masked_fill(unread, 0.0)
