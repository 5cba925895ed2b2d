"""Paged attention from its definition, in NumPy: an oracle for `quire.reference`, with which it shares no code.

It reads only the fields that a user gives to a spec, a batch and a cache. What Quire derives from them (group size,
window, page size, query starts, dequantised keys) it derives by itself. It takes one query and one head at a time.
"""

from collections.abc import Sequence

import numpy as np
import torch

import quire

Array = np.ndarray


def attention(
    q: torch.Tensor,
    cache: quire.PagedKVCache,
    batch: quire.Batch,
    spec: quire.AttentionSpec,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    dtype: type[np.floating] = np.float64,
) -> tuple[Array, Array]:
    """Attend as the definition says.

    Args:
        q: [num_tokens, num_q_heads, head_dim].
        cache: the pages.
        batch: the sequences.
        spec: what to compute.
        sinks: [num_q_heads], if the spec has sinks.
        alibi_slopes: [num_q_heads], if the spec has ALiBi.
        dtype: of the arithmetic.

    Returns:
        out [num_tokens, num_q_heads, head_dim_v] and lse [num_tokens, num_q_heads]; rows of no sequence are 0 and -inf.
    """
    queries = to_numpy(q).astype(dtype)
    sink = None if sinks is None else to_numpy(sinks).astype(dtype)
    slope = None if alibi_slopes is None else to_numpy(alibi_slopes).astype(dtype)
    num_tokens, num_q_heads, _ = queries.shape
    read = Reader(cache, batch, dtype)
    scale = dtype(spec.softmax_scale)
    out = np.zeros((num_tokens, num_q_heads, read.v.shape[-1]), dtype)
    lse = np.full((num_tokens, num_q_heads), -np.inf, dtype)
    for seq, kv_len in enumerate(to_list(batch.seq_lens)):
        begin, end = (seq, seq + 1) if batch.cu_seqlens_q is None else to_list(batch.cu_seqlens_q)[seq : seq + 2]
        first = kv_len - (end - begin) if batch.query_offsets is None else to_list(batch.query_offsets)[seq]
        for token in range(begin, end):
            position = first + token - begin
            visible = [j for j in range(kv_len) if sees(spec, batch, position, j, token, first, end - begin)]
            for head in range(num_q_heads):
                kv_head = head * spec.num_kv_heads // num_q_heads  # consecutive heads share a KV head
                keys, values = read(seq, visible, kv_head)
                scores = scale * (keys @ queries[token, head])
                if spec.softcap is not None:
                    scores = dtype(spec.softcap) * np.tanh(scores / dtype(spec.softcap))
                if slope is not None:
                    scores = scores - slope[head] * np.abs(np.array(visible, dtype) - dtype(position))
                if sink is not None:
                    scores = np.append(scores, sink[head])
                    values = np.append(values, np.zeros((1, values.shape[1]), dtype), 0)
                if len(scores) and scores.max() != -np.inf:
                    # Without its largest score, the sum of the exponentials is the same but for a factor. It is NaN if
                    # a score is NaN or +inf.
                    weights = np.exp(scores - scores.max())
                    out[token, head] = weights @ values / weights.sum()
                    lse[token, head] = scores.max() + np.log(weights.sum())
    return out, lse


def sees(
    spec: quire.AttentionSpec, batch: quire.Batch, position: int, key: int, token: int, first: int, num_queries: int
) -> bool:
    """Return whether a query sees the key at position `key`.

    The query is token `token` of the batch, at `position` of a sequence with `num_queries` queries from `first` on.
    """
    if batch.tree_bits is not None:
        if key >= first:  # a draft, or a key after the last one
            return key - first < num_queries and int(batch.tree_bits[token]) & 1 << (key - first) != 0
        return batch.key_begin is None or key >= int(batch.key_begin[token])
    if batch.key_begin is not None:
        return int(batch.key_begin[token]) <= key < int(batch.key_end[token])
    if spec.causal and key > position:
        return False
    if spec.sliding_window is not None and key <= position - spec.sliding_window:  # the query's own key counts
        return False
    return spec.sliding_window_right is None or key <= position + spec.sliding_window_right


def merge(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Merge attention over disjoint sets of keys.

    Args:
        outs: of each set, [num_tokens, num_q_heads, head_dim_v].
        lses: of each set, [num_tokens, num_q_heads]; -inf or +inf where it holds no key.

    Returns:
        out and lse over all keys.
    """
    out, lse = np.zeros_like(outs[0], np.float64), np.full_like(lses[0], -np.inf, np.float64)
    for row in np.ndindex(*lse.shape):
        parts = [(o[row].astype(np.float64), np.float64(s[row])) for o, s in zip(outs, lses, strict=True)]
        parts = [(o, s) for o, s in parts if not np.isinf(s)]
        if parts:
            largest = max((s for _, s in parts), key=lambda s: np.inf if np.isnan(s) else s)
            total = sum(np.exp(s - largest) for _, s in parts)
            out[row] = sum(np.exp(s - largest) / total * o for o, s in parts)
            lse[row] = largest + np.log(total)
    return out, lse


class Reader:
    """Reads keys and values through the page table, dequantised.

    Args:
        cache: the pages.
        batch: the sequences.
        dtype: of the result.
    """

    def __init__(self, cache: quire.PagedKVCache, batch: quire.Batch, dtype: type[np.floating]) -> None:
        if cache.layout.startswith("fp8_ds_mla"):
            self.k = decode_records(cache.latents.numpy(), cache.layout)[:, :, None]
            self.v = self.k[..., :512]
        else:
            self.k, self.v = by_slot(to_numpy(cache.k), cache.layout), by_slot(to_numpy(cache.v), cache.layout)
        self.dtype, self.paged = dtype, cache.layout != "THD"
        self.scales = [None if s is None else to_numpy(torch.as_tensor(s)) for s in (cache.k_scale, cache.v_scale)]
        self.table = batch.page_table.tolist()
        self.runs = None if batch.cu_pages is None else batch.cu_pages.tolist()

    def __call__(self, seq: int, positions: Sequence[int], head: int) -> tuple[Array, Array]:
        """Return a head's keys [len(positions), head_dim] and values [len(positions), head_dim_v]."""
        keys = np.zeros((len(positions), self.k.shape[-1]), self.dtype)
        values = np.zeros((len(positions), self.v.shape[-1]), self.dtype)
        for i, position in enumerate(positions):
            page, slot = self.find(seq, position)
            for rows, stored, scale in ((keys, self.k, self.scales[0]), (values, self.v, self.scales[1])):
                rows[i] = stored[page, slot, head].astype(self.dtype)
                if scale is not None and scale.ndim == 3:  # a scale for each token and head
                    rows[i] *= self.dtype(scale[page, slot, head])
                elif scale is not None:
                    rows[i] *= self.dtype(scale[head] if scale.size > 1 else scale.item())
        return keys, values

    def find(self, seq: int, position: int) -> tuple[int, int]:
        """Return the page and the slot of a sequence's token."""
        if not self.paged:  # the table's only entry is the sequence's first token
            return self.table[seq][0] + position, 0
        entry, slot = divmod(position, self.k.shape[1])
        page = self.table[seq][entry] if self.runs is None else self.table[self.runs[seq] + entry]
        return page, slot


def by_slot(stored: Array, layout: str) -> Array:
    """Return a cache tensor as [num_pages, page_size, num_kv_heads, head_dim]; without pages, as pages of one token."""
    if layout == "NHD":
        return stored
    if layout == "HND":
        return stored.swapaxes(1, 2)
    if layout == "THD":
        return stored[:, None]
    if stored.ndim == 4:  # values of HDNX: [num_pages, num_kv_heads, head_dim, page_size]
        return stored.transpose(0, 3, 1, 2)
    pages, heads, runs, slots, x = stored.shape  # keys of HDNX, runs of x elements
    return stored.transpose(0, 3, 1, 2, 4).reshape(pages, slots, heads, runs * x)


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return a tensor's numbers as float64; 8-bit and bfloat16 floats are decoded from their bits."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.float8_e4m3fn:
        return E4M3[tensor.view(torch.uint8).numpy()]
    if tensor.dtype is torch.float8_e5m2:
        return E5M2[tensor.view(torch.uint8).numpy()]
    if tensor.dtype is torch.bfloat16:  # the upper half of a float32
        bits = tensor.view(torch.uint16).numpy().astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    return tensor.numpy().astype(np.float64)


def decode_records(records: Array, layout: str) -> Array:
    """Return the latents [num_pages, page_size, columns] in bytes [num_pages, page_size, bytes].

    Those of vLLM's "fp8_ds_mla" are 512 numbers in e4m3, a float32 factor for each 128 of these, and 64 numbers in
    bfloat16. Factors of the other two layouts are powers of two, of which a byte holds the exponent plus 127.
    "fp8_ds_mla_528" has 512 numbers in e4m3 and a factor for each 32. A page of "fp8_ds_mla_584" has 448 numbers in
    e4m3 and 64 in bfloat16 of each token, and then a row of 8 bytes of each token: 7 factors and one without meaning.
    """
    if layout == "fp8_ds_mla_528":
        return E4M3[records[..., :512]] * np.exp2(records[..., 512:] - 127.0).repeat(32, -1)
    if layout == "fp8_ds_mla_584":
        num_pages, page_size, _ = records.shape
        pages = records.reshape(num_pages, page_size * 584)
        rows = pages[:, : page_size * 576].reshape(num_pages, page_size, 576)
        factors = np.exp2(pages[:, page_size * 576 :].reshape(num_pages, page_size, 8)[..., :7] - 127.0)
        coded, rope, size = rows[..., :448], rows[..., 448:], 64
    else:
        factors = np.ascontiguousarray(records[..., 512:528]).view(np.float32).astype(np.float64)
        coded, rope, size = records[..., :512], records[..., 528:], 128
    rope = np.ascontiguousarray(rope).view(np.uint16).astype(np.uint32) << 16
    return np.concatenate([E4M3[coded] * factors.repeat(size, -1), rope.view(np.float32).astype(np.float64)], -1)


def to_list(tensor: torch.Tensor) -> list[int]:
    """Return the entries of a vector of integers."""
    return [int(entry) for entry in tensor.tolist()]


def decode_float8(exponent_bits: int, has_infinity: bool) -> Array:
    """Return the number that each of the 256 codes of an 8-bit float stands for.

    Args:
        exponent_bits: of the 7 bits after the sign; the others are the mantissa.
        has_infinity: the largest exponent holds infinity and NaN, as in IEEE 754. Otherwise the largest code is NaN.
    """
    mantissa_bits, bias = 7 - exponent_bits, 2 ** (exponent_bits - 1) - 1
    numbers = np.zeros(256)
    for code in range(256):
        exponent, mantissa = (code & 127) >> mantissa_bits, code & 2**mantissa_bits - 1
        number = (mantissa / 2**mantissa_bits + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
        if has_infinity and exponent == 2**exponent_bits - 1:
            number = np.nan if mantissa else np.inf
        elif not has_infinity and code & 127 == 127:
            number = np.nan
        numbers[code] = number if code < 128 else -number
    return numbers


E4M3, E5M2 = decode_float8(4, has_infinity=False), decode_float8(5, has_infinity=True)
