"""The executable specification: attention in float64 with every feature, one sequence after the other, in PyTorch.

It is slow and it does not use Triton. Kernels, integrations and the CPU path are right when they agree with this file
within the error budget of `quire.testing`.
"""

from collections.abc import Iterator

import torch

from quire.batch import Batch, ChosenKeys
from quire.cache import PagedKVCache
from quire.norm_rope import QKNorm, Rope
from quire.score_functions import Scene, apply, bounds_of
from quire.spec import AttentionSpec
from quire.state import State

Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # k, v and slot_mapping
MOST_SCORES = 1 << 24  # at once, unless one head has more


def attention(
    q: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
    cache: PagedKVCache,
    batch: Batch,
    spec: AttentionSpec,
    *,
    sinks: torch.Tensor | None = None,  # [num_q_heads]
    alibi_slopes: torch.Tensor | None = None,  # [num_q_heads]
    extras: tuple[torch.Tensor, ...] = (),
    extra_cache: PagedKVCache | None = None,
    k: torch.Tensor | None = None,  # [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor | None = None,  # [num_tokens, num_kv_heads, head_dim_v]
    slot_mapping: torch.Tensor | None = None,  # [num_tokens] int64
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    dtype: torch.dtype = torch.float64,
    in_fp8: bool = False,
    decoded: torch.dtype | None = None,
) -> State:
    """Attend over the paged cache.

    A query that sees no key has out 0 and lse -inf; with a sink, its lse is the sink. A row of `q` without a sequence
    has out 0 and lse -inf. If a score of a query is NaN or +inf, its out and lse are NaN.

    Args:
        q: queries, [num_tokens, num_q_heads, head_dim]. Those of latents are q_nope and q_pe in one tensor.
        cache: the pages.
        batch: lengths and page table.
        spec: what to compute.
        sinks: [num_q_heads], natural-log logits, where `spec.sinks`.
        alibi_slopes: [num_q_heads], where `spec.alibi`.
        extras: the tensors of `spec.extras`.
        extra_cache: where the keys of the batch's `extra_chosen` are.
        k: keys of the queries' tokens that are read instead of what the cache has in their slots; not of latents, nor
            of a quantised cache, whose numbers are rounded.
        v: their values.
        slot_mapping: their slots; negative to leave a token out.
        rope: how queries and k are rotated.
        qk_norm: how they are normalised before.
        dtype: of the arithmetic. float64 gives the specified result; the input dtype shows the error of that precision.
        in_fp8: round queries and probabilities as matrix products in float8_e4m3fn do.
        decoded: round keys and values of the cache to this dtype.

    Returns:
        `State` with out [num_tokens, num_q_heads, head_dim_v] and lse [num_tokens, num_q_heads], both of `dtype`.
    """
    out = torch.zeros(q.shape[0], spec.num_q_heads, spec.head_dim_v, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    tables = {extra.name: tensor for extra, tensor in zip(spec.extras, extras, strict=True)}
    starts = batch.query_starts.tolist()
    offsets = None if batch.query_offsets is None else batch.query_offsets.tolist()
    exact = dtype is torch.float64  # else what is rotated is rounded to its dtype, as attention rounds it
    given, q = q.dtype, norm_rope(q, rope, qk_norm, dtype, of_keys=False)
    q = q if exact else q.to(given).to(dtype)
    step: Step | None = None
    if k is not None and v is not None and slot_mapping is not None:
        keys = norm_rope(k, rope, qk_norm, dtype, of_keys=True)
        step = keys if exact else keys.to(k.dtype).to(dtype), v.to(dtype), slot_mapping
    for seq, kv_len in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        q_len = starts[seq + 1] - starts[seq]
        first = kv_len - q_len if offsets is None else offsets[seq]
        q_pos = torch.arange(first, first + q_len, device=q.device)
        if batch.chosen is not None:
            for token, kv_heads, page, slot in chosen_slots(batch, batch.chosen, cache, spec, seq, rows, first, kv_len):
                all_keys, all_values = read(cache, page, slot, dtype, step)
                if batch.extra_chosen is not None and extra_cache is not None:
                    one = slice(token, token + 1)
                    more = chosen_slots(batch, batch.extra_chosen, extra_cache, spec, seq, one, 0, kv_len)
                    ((_, _, page, slot),) = more
                    found = zip((all_keys, all_values), read(extra_cache, page, slot, dtype, None), strict=True)
                    all_keys, all_values = map(torch.cat, found)
                for kv_head in kv_heads:
                    heads = slice(kv_head * spec.group_size, (kv_head + 1) * spec.group_size)
                    queries, keys, values = q[token, heads, None], all_keys[:, kv_head], all_values[:, kv_head]
                    scores = spec.softmax_scale * ((to_fp8(queries) if in_fp8 else queries) @ keys.T)
                    sink = None if sinks is None else sinks[heads].to(dtype)
                    results, lses = attend(capped(scores, spec), values, sink, in_fp8)
                    out[token, heads], lse[token, heads] = results[:, 0], lses[:, 0]
            continue
        visible = keys_within_bounds(batch, spec, seq, first, kv_len, tables)  # [q_len, kv_len]
        of_seq = torch.tensor(seq, device=q.device)
        # Keys that no query sees may have been freed and overwritten (a sliding window's past): they must not be read.
        needed = visible.any(0).nonzero()[:, 0] if q_len else torch.arange(0, device=q.device)
        all_keys, all_values = gather(cache, batch, seq, needed, dtype, step)
        if decoded is not None:
            all_keys, all_values = (x.to(decoded).to(dtype) for x in (all_keys, all_values))
        visible = visible[:, needed]
        for heads in head_blocks(spec, visible.numel()):
            kv_head = heads.start // spec.group_size
            queries, keys, values = q[rows, heads].transpose(0, 1), all_keys[:, kv_head], all_values[:, kv_head]
            scores = spec.softmax_scale * ((to_fp8(queries) if in_fp8 else queries) @ keys.T)  # [heads, q_len, keys]
            scores = capped(scores, spec)
            if alibi_slopes is not None:
                distances = (q_pos[:, None] - needed[None, :]).abs()
                scores = scores - alibi_slopes[heads].to(dtype)[:, None, None] * distances
            if spec.score is not None or spec.mask is not None:
                q_heads = torch.arange(heads.start, heads.stop, device=q.device)[:, None, None]
                token = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
                of_head = torch.tensor(kv_head, device=q.device)
                scene = Scene(q_pos[:, None], needed, q_heads, of_head, of_seq, token, tables)
                scores = apply(spec.score, spec.mask, scores, scene)
            scores = scores.masked_fill(~visible, float("-inf"))
            sink = None if sinks is None else sinks[heads].to(dtype)
            results, lses = attend(scores, values, sink, in_fp8)
            out[rows, heads] = results.transpose(0, 1)
            lse[rows, heads] = lses.T
    return State(out, lse)


def attend(
    scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None, in_fp8: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [heads, q_len, head_dim_v] and lse [heads, q_len] of some heads of one KV head.

    Args:
        scores: [heads, q_len, keys], -inf for what is not seen.
        values: [keys, head_dim_v].
        sinks: [heads] or None.
        in_fp8: round probabilities.
    """
    if sinks is not None:  # a sink is one more key, whose value is 0
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        values = torch.cat([values, values.new_zeros(1, values.shape[1])])
    probabilities, lse = softmax_and_lse(scores)
    return (to_fp8(probabilities) if in_fp8 else probabilities) @ values, lse


def capped(scores: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return scores as a softcap leaves them; the scores themselves without one."""
    return scores if spec.softcap is None else spec.softcap * torch.tanh(scores / spec.softcap)


def chosen_slots(
    batch: Batch,
    chosen: ChosenKeys,
    cache: PagedKVCache,
    spec: AttentionSpec,
    seq: int,
    rows: slice,
    first: int,
    kv_len: int,
) -> Iterator[tuple[int, range, torch.Tensor, torch.Tensor]]:
    """Yield what each list of a sequence's tokens names: the token, its KV heads, and the pages and slots of the keys.

    Args:
        batch: the sequences.
        chosen: the batch's lists.
        cache: the pages.
        spec: what to compute.
        seq: the sequence.
        rows: its query tokens.
        first: position of its first query.
        kv_len: its keys.
    """
    size, device = chosen.block_size, batch.device
    for token in range(rows.start, rows.stop):
        position = first + token - rows.start
        lists = chosen.indices[token].view(chosen.num_lists, chosen.width).tolist()
        for i, entries in enumerate(lists):
            if chosen.lens is not None:
                entries = entries[: int(chosen.lens[token].expand(chosen.num_lists)[i])]
            keys = [entry * size + j for entry in entries if entry >= 0 for j in range(size)]
            if not chosen.are_slots:
                end = min(kv_len, position + 1) if spec.causal else kv_len
                keys = [key for key in keys if key < end]
            keys = torch.tensor(keys, dtype=torch.int64, device=device)
            kv_heads = range(spec.num_kv_heads) if chosen.num_lists == 1 else range(i, i + 1)
            page = keys // cache.page_size if chosen.are_slots else page_of(batch, seq, keys, cache.page_size)
            yield token, kv_heads, page, keys % cache.page_size


def page_of(batch: Batch, seq: int, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the page of each position of a sequence, int64."""
    table = batch.page_table[seq] if batch.cu_pages is None else batch.page_table[int(batch.cu_pages[seq]) :]
    return table[positions // page_size].long()


def head_blocks(spec: AttentionSpec, scores_per_head: int) -> Iterator[slice]:
    """Yield the query heads that are computed at once: of one KV head, and as many as have MOST_SCORES scores."""
    most = max(1, MOST_SCORES // max(1, scores_per_head))
    for first in range(0, spec.num_q_heads, spec.group_size):
        for head in range(first, first + spec.group_size, most):
            yield slice(head, min(head + most, first + spec.group_size))


def quantise(out: torch.Tensor, out_scale: torch.Tensor) -> torch.Tensor:
    """Return what an output in float8_e4m3fn holds: `out / out_scale`, saturated, and rounded half to even.

    Args:
        out: of any floating dtype.
        out_scale: one number.
    """
    return (out / out_scale.to(out.dtype).view(())).clamp(-448, 448).to(torch.float8_e4m3fn)


def softmax_and_lse(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax over the last dimension, 0 where all scores are -inf, and the log of its denominator.

    Args:
        scores: [..., columns]; there may be no column.
    """
    least = scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    largest = torch.cat([scores, least], -1).amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(largest == float("-inf"), 0.0, largest))
    total = weights.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, weights / total), (largest + torch.log(total))[..., 0]


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3fn and back.

    Each row is first scaled by a power of two, so that its absolute maximum is in [2^7, 2^8).

    Args:
        x: [..., columns], of any floating dtype.

    Returns:
        The rounded numbers, of x's shape and dtype.
    """
    if x.numel() == 0:
        return x
    _, exponents = torch.frexp(x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30))
    scale = torch.exp2(8.0 - exponents)
    return ((x.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(x.dtype)


def keys_within_bounds(
    batch: Batch, spec: AttentionSpec, seq: int, first: int, kv_len: int, tables: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return which keys the queries of a sequence see but for a mask: those of `visible_keys` that its bounds leave.

    Args:
        batch: the sequences.
        spec: what to compute.
        seq: the sequence.
        first: position of its first query.
        kv_len: its keys.
        tables: what the mask's bounds read, by name.
    """
    start, stop = batch.query_starts[seq : seq + 2].tolist()
    visible = visible_keys(batch, spec, slice(start, stop), first, kv_len)
    q_pos, kv_pos = first + torch.arange(stop - start, device=batch.device), torch.arange(kv_len, device=batch.device)
    token = torch.arange(start, stop, device=batch.device)
    bounds = bounds_of(spec.mask, q_pos, torch.tensor(seq, device=batch.device), token, tables)
    if bounds is None:
        return visible
    return visible & (kv_pos >= bounds[0][:, None]) & (kv_pos < bounds[1][:, None])


def visible_keys(batch: Batch, spec: AttentionSpec, rows: slice, first: int, kv_len: int) -> torch.Tensor:
    """Return which keys the queries of a sequence see, [q_len, kv_len] bool.

    Args:
        batch: the sequences; intervals or trees, if it has any, replace the spec's band.
        spec: what to compute.
        rows: the sequence's query tokens.
        first: position of the first query.
        kv_len: keys of the sequence.
    """
    q_len, kv_pos = rows.stop - rows.start, torch.arange(kv_len, device=batch.device)
    if batch.tree_bits is not None:
        begin = 0 if batch.key_begin is None else batch.key_begin[rows, None]
        draft = kv_pos - first
        is_draft = (draft >= 0) & (draft < q_len)
        bits = batch.tree_bits[rows, None] >> draft.clamp(0, 63)
        return torch.where(is_draft, bits % 2 == 1, (kv_pos >= begin) & (kv_pos < first))
    if batch.key_begin is not None and batch.key_end is not None:
        return (kv_pos >= batch.key_begin[rows, None]) & (kv_pos < batch.key_end[rows, None])
    q_pos = first + torch.arange(q_len, device=batch.device)[:, None]
    window_left, window_right = spec.window
    return (kv_pos >= q_pos - window_left) & (kv_pos <= q_pos + window_right)


def gather(
    cache: PagedKVCache, batch: Batch, seq: int, positions: torch.Tensor, dtype: torch.dtype, step: Step | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a sequence's keys and values at `positions` through its page table, as `read` does."""
    page = page_of(batch, seq, positions, cache.page_size)
    return read(cache, page, positions % cache.page_size, dtype, step)


def read(
    cache: PagedKVCache, page: torch.Tensor, slot: torch.Tensor, dtype: torch.dtype, step: Step | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read keys and values, dequantised.

    Those of `step`, which are of `dtype`, are read in place of what the cache has in their slots.

    Args:
        cache: the pages.
        page: [num_keys] int64.
        slot: [num_keys] int64, in the page.
        dtype: of the result.
        step: new keys, values and their slots.

    Returns:
        k [num_keys, num_kv_heads, head_dim] and v [num_keys, num_kv_heads, head_dim_v], of `dtype`.
    """
    if cache.scale_kind == "record":
        k = decode_records(cache.layout, cache.latents, page, slot, dtype)[:, None]
        return k, k[..., : cache.head_dim_v]
    if cache.kv_format is not None:
        return decode_format(cache, page, slot, dtype)
    if cache.layout == "THD":
        k, v = cache.k[page + slot], cache.v[page + slot]
    elif cache.layout == "NHD":
        k, v = cache.k[page, slot], cache.v[page, slot]
    elif cache.layout == "HND":
        k, v = cache.k[page, :, slot], cache.v[page, :, slot]
    else:
        k, v = cache.k[page, :, :, slot].flatten(2), cache.v[page, :, :, slot]
    k, v = k.to(dtype), v.to(dtype)
    k_scale, v_scale = cache.k_scale, cache.v_scale  # [num_kv_heads], or [num_pages, page_size, num_kv_heads]
    if k_scale is not None and v_scale is not None:
        if cache.scale_kind == "token":
            k_scale, v_scale = k_scale[page, slot], v_scale[page, slot]
        k, v = k * k_scale.to(dtype)[..., None], v * v_scale.to(dtype)[..., None]
    if step is not None and step[2].numel():
        is_new, token = (page * cache.page_size + slot)[:, None].eq(step[2]).max(1)
        k[is_new], v[is_new] = step[0][token[is_new]], step[1][token[is_new]]
    return k, v


def decode_format(
    cache: PagedKVCache, page: torch.Tensor, slot: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a cache with a `kv_format`.

    A byte holds an even column in its lower half, and the odd one after it in the upper half; one of keys of k8v4 is an
    e4m3 number. Four bits of int4 are a whole number n from 0 to 15, and stand for (n - z) * s: the lowest four bits of
    a float32 scale are z, and s is the scale with 0 there. Four bits of e2m1 are a sign, two bits of an exponent, and
    one of a fraction. They stand for that number times the e4m3 scale of its 16 columns and the scale of the head.

    Args:
        cache: the pages.
        page: [num_keys] int64.
        slot: [num_keys] int64, in the page.
        dtype: of the result.

    Returns:
        k [num_keys, num_kv_heads, head_dim] and v [num_keys, num_kv_heads, head_dim_v].
    """
    name, index = cache.kv_format, (page, slot) if cache.layout == "NHD" else (page, slice(None), slot)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=dtype, device=cache.device)
    found = []
    for stored, scale, blocks in (
        (cache.k, cache.k_scale, cache.k_block_scale),
        (cache.v, cache.v_scale, cache.v_block_scale),
    ):
        assert scale is not None
        number = stored[index]
        if name == "k8v4" and stored is cache.k:
            found.append(number.view(torch.float8_e4m3fn).to(dtype) * scale[page, slot].to(dtype)[..., None])
            continue
        number = torch.stack([number & 15, number >> 4], -1).flatten(-2)
        if blocks is None:
            bits = scale[page, slot].contiguous().view(torch.int32)[..., None]
            found.append((number.to(dtype) - (bits & 15).to(dtype)) * (bits & ~15).view(torch.float32).to(dtype))
            continue
        number = torch.where(number > 7, -magnitudes[number.long() & 7], magnitudes[number.long() & 7])
        of_block = blocks.view(torch.uint8)[page, slot].contiguous().view(torch.float8_e4m3fn).to(dtype)
        found.append(number * of_block.repeat_interleave(16, -1) * scale.to(dtype)[:, None])
    return found[0], found[1]


def norm_rope(
    x: torch.Tensor, rope: Rope | None, qk_norm: QKNorm | None, dtype: torch.dtype = torch.float64, *, of_keys: bool
) -> torch.Tensor:
    """Normalise heads and rotate them.

    Args:
        x: [num_tokens, num_heads, head_dim], queries or keys.
        rope: how to rotate; None to leave it out.
        qk_norm: how to normalise; None to leave it out.
        dtype: of the arithmetic.
        of_keys: whether x is keys.

    Returns:
        Heads of `dtype`, in the shape of x.
    """
    x = x.to(dtype)
    if qk_norm is not None:
        weight = qk_norm.k_weight if of_keys else qk_norm.q_weight
        x = x / (x.square().mean(-1, keepdim=True) + float(qk_norm.eps)).sqrt() * weight.to(dtype)
    if rope is None:
        return x
    half = rope.cos.shape[1]
    row = rope.positions.long().clamp(0, rope.cos.shape[0] - 1)
    c, s = rope.cos[row].to(dtype)[:, None], rope.sin[row].to(dtype)[:, None]  # [num_tokens, 1, half]
    rotated, kept = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if rope.interleaved else rotated.split(half, -1)
    pair = a * c - b * s, b * c + a * s
    rotated = torch.stack(pair, -1).flatten(-2) if rope.interleaved else torch.cat(pair, -1)
    return torch.cat([rotated, kept], -1)


def decode_records(
    layout: str, records: torch.Tensor, page: torch.Tensor, slot: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the latents in records.

    Args:
        layout: "fp8_ds_mla", records of 656 bytes: 512 numbers in e4m3, a float32 scale for each 128 of them, 64
            numbers in bfloat16. "fp8_ds_mla_528": 512 numbers in e4m3, a byte e for the scale 2^(e - 127) of each 32.
            "fp8_ds_mla_584": a page has 448 numbers in e4m3 and 64 in bfloat16 of each token, and then 8 bytes of each
            token, of which the first 7 stand for the scales of 64 numbers each.
        records: [num_pages, page_size, bytes] uint8.
        page: [rows] int64.
        slot: [rows] int64, in the page.
        dtype: of the result.

    Returns:
        [rows, columns].
    """
    if layout == "fp8_ds_mla_584":
        data, pages = 576 * records.shape[1], records.flatten(1)
        row, byte = slot[:, None], torch.arange(576, device=slot.device)
        numbers, rope = pages[page[:, None], 576 * row + byte].split([448, 128], 1)
        scales = pages[page[:, None], data + 8 * row + byte[:7]]
    elif layout == "fp8_ds_mla_528":
        numbers, scales = records[page, slot].split([512, 16], 1)
        rope = numbers[:, :0]
    else:
        numbers, scales, rope = records[page, slot].split([512, 16, 128], 1)
    numbers = numbers.contiguous().view(torch.float8_e4m3fn).to(dtype)
    scales = scales.contiguous().view(torch.float32) if layout == "fp8_ds_mla" else 2.0 ** (scales.double() - 127)
    scales = scales.to(dtype).repeat_interleave(numbers.shape[1] // scales.shape[1], 1)
    return torch.cat([numbers * scales, rope.contiguous().view(torch.bfloat16).to(dtype)], 1)


def merge(*states: State) -> State:
    """Merge states over disjoint sets of keys, in float64.

    A state is empty where its lse is -inf, or +inf as FlashAttention writes it for a row without keys. Its weight is 0,
    whatever its out holds.

    Args:
        *states: one or more, of one shape.

    Returns:
        The state over all keys: lse = log Σ exp(lse_i), out = Σ exp(lse_i - lse) out_i.
    """
    lses = torch.stack([lse.double() for _, lse in states], -1)  # [num_tokens, num_q_heads, num_states]
    lses = torch.where(lses == float("inf"), float("-inf"), lses)
    weights, lse = softmax_and_lse(lses)
    outs = [torch.where(w == 0, 0.0, w * out) for w, (out, _) in zip(weights.split(1, -1), states, strict=True)]
    return State(torch.stack(outs).sum(0), lse)
