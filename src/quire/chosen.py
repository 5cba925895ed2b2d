"""Find the keys that lists name: as positions in sequences, and as slots of a cache."""

from typing import NamedTuple

import torch

from quire.batch import Batch, ChosenKeys
from quire.intervals import Tokens


class Named(NamedTuple):
    """Keys that lists name, for some query tokens. A list has `width * block_size` of them.

    Attributes:
        key: [num_tokens, num_lists, num_keys] int64, positions in the token's sequence, or slots of the cache.
        seen: bool, of the same shape: whether the token sees the key. Others may be any number.
    """

    key: torch.Tensor
    seen: torch.Tensor


def entries_of(chosen: ChosenKeys, rows: slice) -> torch.Tensor:
    """Return the entries of some lists that count, [num_tokens, num_lists, width] int32; -1 in place of all others."""
    indices, lens = chosen.indices[rows], chosen.lens
    if indices.dim() == 2:
        indices = indices[:, None]
    counts = indices >= 0
    if lens is not None:
        lens = lens[rows] if lens.dim() == 2 else lens[rows, None]
        counts = counts & (torch.arange(chosen.width, device=indices.device) < lens[..., None])
    return torch.where(counts, indices, -1)


def keys_of(chosen: ChosenKeys, tokens: Tokens, rows: slice, *, causal: bool) -> Named:
    """Return the keys that the lists of some query tokens name.

    Args:
        chosen: the lists.
        tokens: where the batch's query tokens stand.
        rows: which of them.
        causal: whether a token sees no key after itself.
    """
    entries, size = entries_of(chosen, rows), chosen.block_size
    key = entries.long()[..., None] * size + torch.arange(size, device=entries.device)
    seen = (entries >= 0)[..., None].expand(key.shape)
    if not chosen.are_slots:
        end = tokens.seq_len[rows]
        if causal:
            end = torch.minimum(end, tokens.position[rows] + 1)
        seen = seen & (key < end[:, None, None, None])
    seen = seen & tokens.owned[rows, None, None, None]
    return Named(key.flatten(2), seen.flatten(2))


def slots_of(
    named: Named, batch: Batch, tokens: Tokens, rows: slice, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the page of each key and its slot in the page, both like `named.key`; 0 where the key is not seen."""
    key = torch.where(named.seen, named.key, 0)
    page, slot = key // page_size, key % page_size
    if batch.chosen is None or not batch.chosen.are_slots:
        page = torch.where(named.seen, page_table_at(batch, tokens.seq[rows, None, None], page, named.seen), 0)
    return page, slot


def page_table_at(batch: Batch, seq: torch.Tensor, entry: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return entries of the page table by sequence and number, int64; any number where they are not wanted."""
    table = batch.page_table
    if table.numel() == 0:
        return torch.zeros_like(entry)
    if batch.cu_pages is None:
        return table[seq, torch.where(wanted, entry, 0)].long()
    return table[torch.where(wanted, batch.cu_pages[seq].long() + entry, 0)].long()
