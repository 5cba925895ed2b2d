"""What the kernels of `quire.indexer` compute, in PyTorch, for CPU tensors."""

import torch


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: torch.Tensor | None,
    weights: torch.Tensor,
    begin: torch.Tensor | None,
    end: torch.Tensor,
    out: torch.Tensor,
    *,
    from_begin: bool = False,
) -> None:
    """Write logits of tokens that share keys, -inf where a token has no key.

    Args:
        q: [num_tokens, num_heads, dim].
        k: [num_keys, dim].
        scale: [num_keys] or None.
        weights: [num_tokens, num_heads].
        begin: [num_tokens], the first key of each token; None for 0.
        end: [num_tokens], the key after its last one.
        out: [num_tokens, columns] float32.
        from_begin: whether column 0 is a token's first key, rather than key 0.
    """
    key = torch.arange(out.shape[1], device=q.device).expand(out.shape)
    first = torch.zeros_like(end) if begin is None else begin.clamp(min=0)
    if from_begin:
        key = key + first[:, None]
    seen = (key >= first[:, None]) & (key < end[:, None])
    key = torch.where(seen, key, 0)
    if k.shape[0] == 0:
        out.fill_(float("-inf"))
        return
    for token in range(q.shape[0]):
        rows = k[key[token]].float() if k.dtype.itemsize > 1 else k.view(torch.uint8)[key[token]].view(k.dtype).float()
        products = (q[token].float() @ rows.T).relu() * weights[token].float()[:, None]
        total = products.sum(0) if scale is None else products.sum(0) * scale[key[token]]
        out[token] = total.masked_fill(~seen[token], float("-inf"))


def block_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    block_size: int,
    max_query_len: int,
) -> None:
    """Write the largest product of each query and a key of each block that it sees, -inf where it sees none."""
    out.fill_(float("-inf"))
    starts = range(seq_lens.shape[0] + 1) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for seq, length in enumerate(seq_lens.tolist()):
        first, last = starts[seq], starts[seq + 1]
        pages = table[seq, : -(-length // keys.shape[1])].long()
        stored = keys.view(torch.uint8)[pages].view(keys.dtype) if keys.dtype.itemsize == 1 else keys[pages]
        k = stored.flatten(0, 1)[:length].float()
        for token in range(first, last):
            visible = k[: max(0, length - (last - token) + 1)]
            scores = q[token].float() @ visible.T  # [num_heads, keys]
            for block, part in enumerate(scores.split(block_size, 1)):
                if part.shape[1]:
                    out[:, token, block] = part.amax(1)


def top_k(
    scores: torch.Tensor, begin: torch.Tensor | None, end: torch.Tensor | None, out: torch.Tensor, *, from_begin: bool
) -> None:
    """Write the columns of each row's largest scores in order, -1 after them; of equal scores, the first columns."""
    columns = torch.arange(scores.shape[1], device=scores.device)
    keep = ~scores.isnan() & (scores > float("-inf"))
    first = torch.zeros(scores.shape[0], dtype=torch.int64) if begin is None else begin.clamp(min=0).long()
    keep &= columns >= first[:, None]
    if end is not None:
        keep &= columns < end[:, None]
    out.fill_(-1)
    best = scores.float().masked_fill(~keep, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    for row, found in enumerate(best):
        chosen = found[: min(out.shape[1], int(keep[row].sum()))].sort().values
        out[row, : len(chosen)] = (chosen - (first[row] if from_begin else 0)).int()
