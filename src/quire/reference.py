"""The specification, executable: attention in float64 with every feature, one sequence and one head at a time in plain PyTorch.

Nothing here is fast and nothing here knows Triton. Kernels, integrations and the CPU path are right when they agree with this page to within
the error budget of `quire.testing`.
"""

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.spec import AttentionSpec
from quire.state import State


def attention(
    q: torch.Tensor,  # [num_tokens, num_q_heads, head_dim]
    cache: PagedKVCache,
    batch: Batch,
    spec: AttentionSpec,
    *,
    sinks: torch.Tensor | None = None,  # [num_q_heads]
    alibi_slopes: torch.Tensor | None = None,  # [num_q_heads]
    dtype: torch.dtype = torch.float64,
    in_fp8: bool = False,
) -> State:
    """Attend over the paged cache; rows of `q` that no sequence owns come out as 0 with lse -inf.

    Args:
        q: queries, [num_tokens, num_q_heads, head_dim].
        cache: the pages.
        batch: lengths and page table.
        spec: what to compute.
        sinks: [num_q_heads], natural-log logits, where `spec.sinks`.
        alibi_slopes: [num_q_heads], where `spec.alibi`.
        dtype: of the arithmetic; float64 is the oracle, the input dtype shows what that precision can do.
        in_fp8: round queries and probabilities as matrix products in float8_e4m3fn take them.

    Returns:
        `State` with out [num_tokens, num_q_heads, head_dim_v] and lse [num_tokens, num_q_heads], both of `dtype`.
    """
    out = torch.zeros(q.shape[0], spec.num_q_heads, spec.head_dim_v, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    starts = batch.query_starts.tolist()
    offsets = None if batch.query_offsets is None else batch.query_offsets.tolist()
    for seq, kv_len in enumerate(batch.seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        q_len = starts[seq + 1] - starts[seq]
        first = kv_len - q_len if offsets is None else offsets[seq]
        q_pos = torch.arange(first, first + q_len, device=q.device)
        visible = visible_keys(q_pos, kv_len, spec)  # [q_len, kv_len]
        # Keys that no query sees may have been freed and overwritten (a sliding window's past): they must not be read.
        needed = visible.any(0).nonzero()[:, 0] if q_len else torch.arange(0, device=q.device)
        k, v = gather(cache, batch, seq, needed, dtype)
        visible = visible[:, needed]
        for head in range(spec.num_q_heads):
            keys, values = k[:, head // spec.group_size], v[:, head // spec.group_size]
            queries = q[rows, head].to(dtype)
            scores = spec.softmax_scale * ((to_fp8(queries) if in_fp8 else queries) @ keys.T)
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if spec.alibi:
                scores = scores - alibi_slopes[head].to(dtype) * (q_pos[:, None] - needed[None, :]).abs()
            scores = scores.masked_fill(~visible, float("-inf"))
            if spec.sinks:
                scores = torch.cat([scores, sinks[head].to(dtype).expand(q_len, 1)], 1)
                values = torch.cat([values, values.new_zeros(1, spec.head_dim_v)])
            lse[rows, head] = torch.logsumexp(scores, 1) if scores.shape[1] else float("-inf")
            probabilities = torch.exp(scores - lse[rows, head, None]).nan_to_num(
                0.0
            )  # -inf - -inf where a row sees no key
            out[rows, head] = (to_fp8(probabilities) if in_fp8 else probabilities) @ values
    return State(out, lse)


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3fn, each row times the power of two that brings its largest number to 2^7 or above, below 2^8.

    Args:
        x: [..., columns], of any floating dtype.

    Returns:
        The rounded numbers, of x's shape and dtype.
    """
    if x.numel() == 0:
        return x
    _, exponents = torch.frexp(x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30))
    grown = torch.exp2(8.0 - exponents)
    return ((x.float() * grown).to(torch.float8_e4m3fn).float() / grown).to(x.dtype)


def visible_keys(q_pos: torch.Tensor, kv_len: int, spec: AttentionSpec) -> torch.Tensor:
    """Return which keys each query sees, [len(q_pos), kv_len] bool."""
    kv_pos = torch.arange(kv_len, device=q_pos.device)
    back, ahead = spec.window
    return (kv_pos >= q_pos[:, None] - back) & (kv_pos <= q_pos[:, None] + ahead)


def gather(
    cache: PagedKVCache, batch: Batch, seq: int, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a sequence's keys and values at `positions` through its page table, dequantised.

    Returns:
        k [len(positions), num_kv_heads, head_dim] and v [len(positions), num_kv_heads, head_dim_v], of `dtype`.
    """
    if batch.cu_pages is None:
        table = batch.page_table[seq]
    else:
        table = batch.page_table[int(batch.cu_pages[seq]) :]
    page, slot = table[positions // cache.page_size].long(), positions % cache.page_size
    if cache.layout == "THD":
        k, v = cache.k[page + slot], cache.v[page + slot]
    elif cache.layout == "NHD":
        k, v = cache.k[page, slot], cache.v[page, slot]
    elif cache.layout == "HND":
        k, v = cache.k[page, :, slot], cache.v[page, :, slot]
    else:
        k, v = cache.k[page, :, :, slot].flatten(2), cache.v[page, :, :, slot]
    k, v = k.to(dtype), v.to(dtype)
    if cache.scale_kind == "head":
        k, v = k * cache.k_scale.to(dtype)[:, None], v * cache.v_scale.to(dtype)[:, None]
    elif cache.scale_kind == "token":
        k, v = k * cache.k_scale[page, slot].to(dtype)[..., None], v * cache.v_scale[page, slot].to(dtype)[..., None]
    return k, v


def merge(*states: State) -> State:
    """Merge states over disjoint key sets, in float64 (or the states' own dtype when it is wider).

    Returns:
        The state over the union: lse = log Σ exp(lse_i), out = Σ exp(lse_i - lse) out_i.
    """
    out, lse = (torch.stack([s[i].double() for s in states]) for i in (0, 1))
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - total).nan_to_num(0.0)  # all subsets empty: -inf - -inf
    return State((weights[..., None] * out).sum(0), total)
