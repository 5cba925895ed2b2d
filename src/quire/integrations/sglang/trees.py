"""SGLang's masks of drafts as the words of `quire.draft_trees`, made on the device.

SGLang says by a mask which drafts see one another, in one of three layouts, and a step does not say in which:
`FULL_MASK`, a row of bools over the context and the drafts; `QLEN_ONLY`, a row over the drafts; `QLEN_ONLY_BITPACKING`,
a word for each draft. The number of the mask's entries tells them apart, since the context of a request has a token at
least. A buffer that is kept for the largest batch has more entries than the batch needs; SGLang gets such a buffer
from `contract.verify_mask`, and the backend knows it by its address.
"""

from dataclasses import replace
from typing import Any

import torch

from quire import Batch, draft_trees


def has_mask(drafts: Any) -> bool:
    """Return whether a verify's mask is read: that of a chain is not, since a chain is causal.

    Drafts that have no `topk` are those of n-grams, which branch with any breadth.

    Args:
        drafts: SGLang's `spec_info`.
    """
    if getattr(drafts, "custom_mask", None) is None:
        return False
    topk = getattr(drafts, "topk", None)
    return topk is None or topk > 1


class Trees:
    """What the drafts of a step see, in memory that steps use one after the other.

    Args:
        words: [max_num_tokens] int64, the memory.
    """

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words
        self.windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by size: the first key and the words

    def fill(self, batch: Batch, num_tokens: int) -> None:
        """Write what the drafts see through each window, after their words were written."""
        for size, (key_begin, seen) in self.windows.items():
            windowed = draft_trees.windowed(batch, self.words[:num_tokens], size)
            assert windowed.key_begin is not None and windowed.tree_bits is not None
            key_begin[:num_tokens], seen[:num_tokens] = windowed.key_begin, windowed.tree_bits

    def seen(self, batch: Batch, num_tokens: int, sliding_window: int | None) -> Batch:
        """Return the batch with its trees, through a window of each draft's own path if there is one."""
        if sliding_window is None:
            return replace(batch, tree_bits=self.words[:num_tokens])
        if sliding_window not in self.windows:
            self.windows[sliding_window] = self.words.int(), self.words.clone()
            self.fill(batch, num_tokens)
        key_begin, words = (x[:num_tokens] for x in self.windows[sliding_window])
        return replace(batch, key_begin=key_begin, tree_bits=words)


def fill_words(
    words: torch.Tensor,  # [num_seqs * num_drafts] int64, written
    drafts: Any,  # SGLang's `spec_info`
    prefix_lens: torch.Tensor,  # [num_seqs], keys before the drafts
    num_drafts: int,
    is_buffer: bool,  # whether the mask is a QLEN_ONLY buffer for the largest batch
) -> None:
    """Write the words of a batch's drafts.

    The rows of a graph that no request has may get any words: they name only the row's own drafts.
    """
    mask = drafts.custom_mask
    if mask.numel() == 0:  # of a rank without requests
        return
    num_rows = words.shape[0]  # with the rows that pad a graph, for which SGLang makes no mask
    tokens = drafts.draft_token
    described = num_rows if tokens is None else min(num_rows, tokens.numel())
    if mask.dtype != torch.bool and mask.numel() == described:
        words[:described] = draft_trees.from_words(mask)
        return
    if is_buffer or mask.numel() == described * num_drafts:
        among = mask[: described * num_drafts]
    else:
        among = last_columns(mask, prefix_lens[: described // num_drafts], num_drafts)
    words[:described] = draft_trees.from_mask(among.bool(), num_drafts)


def last_columns(mask: torch.Tensor, prefix_lens: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """Return the columns of the drafts of a FULL_MASK, flat; where they are follows from lengths on the device."""
    prefix_lens = prefix_lens.long()
    widths = prefix_lens + num_drafts
    first = (widths.cumsum(0) - widths) * num_drafts + prefix_lens
    draft = torch.arange(num_drafts, device=mask.device)
    at = first[:, None, None] + draft[:, None] * widths[:, None, None] + draft
    return mask[at.flatten().clamp(max=mask.shape[0] - 1)]
