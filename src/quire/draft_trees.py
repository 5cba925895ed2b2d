"""Make the words of draft trees: `tree_bits` of a `Batch`, from what drafters and engines hold.

A word is int64: bit j says that a draft sees draft j, the j-th query of its sequence. It has the bits of the draft
itself and of its ancestors. Nothing here waits for the device, but for `from_flashinfer`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.batch import Batch, check_vector
from quire.errors import UnsupportedError, check_integer, check_served, check_tensor, describe
from quire.intervals import LARGEST, check_on_device, locate

__all__ = ["depths", "from_flashinfer", "from_mask", "from_parents", "from_words", "windowed"]

MAX_DRAFTS = 64  # of a sequence: bits of a word of `tree_bits`
WORDS = (torch.uint8, torch.uint16, torch.uint32, torch.int32, torch.int64)


def from_parents(parents: torch.Tensor) -> torch.Tensor:
    """Return the words of trees that are given by the parent of each draft, as EAGLE has them.

    Args:
        parents: [..., num_drafts] int32 or int64: which draft is the parent; -1 for one that follows the context. A
            parent may come before or after its child.

    Returns:
        [..., num_drafts] int64. For a batch, `flatten()` those of all sequences, or `repeat` those of one tree.

    Raises:
        TypeError: parents isn't a tensor of integers.
        ValueError: it has no dimension.
        UnsupportedError: there are more than 64 drafts.

    Examples:
        >>> words = quire.draft_trees.from_parents(torch.tensor([-1, 0, 0, 1]))  # 1 and 2 branch off
        >>> [f"{word:04b}" for word in words.tolist()]
        ['0001', '0011', '0101', '1011']
    """
    check_tensor("parents", parents, "pass the parent of each draft")
    if parents.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"parents must be int32 or int64, got {parents.dtype}; -1 is a draft without a parent")
    if parents.dim() == 0:
        raise ValueError(f"parents must be [..., num_drafts], got {describe(parents)}; pass the drafts of a sequence")
    num_drafts = check_num_drafts("parents", parents.shape[-1])
    own = torch.ones((), dtype=torch.int64, device=parents.device) << torch.arange(num_drafts, device=parents.device)
    bits = own.expand(parents.shape).clone()
    ancestor = parents.long()  # of each draft, 1, 2, 4, ... generations back
    for _ in range(num_drafts.bit_length()):
        is_draft = (ancestor >= 0) & (ancestor < num_drafts)
        at = torch.where(is_draft, ancestor, 0)
        bits = bits | torch.where(is_draft, bits.gather(-1, at), 0)
        ancestor = torch.where(is_draft, ancestor.gather(-1, at), -1)
    return bits


def from_mask(mask: torch.Tensor, num_drafts: int) -> torch.Tensor:
    """Return the words of masks among drafts, as SGLang's QLEN_ONLY has them.

    Args:
        mask: bool, [num_seqs, num_drafts, num_drafts] or flat: whether a draft sees another.
        num_drafts: drafts of each sequence.

    Returns:
        [num_seqs * num_drafts] int64.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the mask does not hold whole trees.
        UnsupportedError: there are more than 64 drafts.

    Examples:
        >>> chains = torch.ones(2, 3, 3, dtype=torch.bool).tril()  # of two sequences
        >>> quire.draft_trees.from_mask(chains, 3).tolist()
        [1, 3, 7, 1, 3, 7]
    """
    num_drafts = check_num_drafts("num_drafts", num_drafts)
    check_tensor("mask", mask, "pass the mask among the drafts")
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {mask.dtype}; words are for `from_words`")
    square = num_drafts * num_drafts
    if mask.numel() % square or (mask.dim() != 1 and mask.shape[-2:] != (num_drafts, num_drafts)):
        raise ValueError(
            f"mask must be [num_seqs, {num_drafts}, {num_drafts}] or flat, got {describe(mask)}; "
            "it has no columns of the context"
        )
    shifts = torch.arange(num_drafts, device=mask.device)
    return (mask.reshape(-1, num_drafts).long() << shifts).sum(1)


def from_words(words: torch.Tensor) -> torch.Tensor:
    """Return words of 8, 16 or 32 bits as words of 64, as SGLang's QLEN_ONLY_BITPACKING has them.

    Args:
        words: [num_seqs * num_drafts] uint8, uint16, uint32, int32 or int64; bit j for draft j.

    Returns:
        [num_seqs * num_drafts] int64.

    Raises:
        TypeError: words isn't a tensor of one of these dtypes.

    Examples:
        >>> quire.draft_trees.from_words(torch.tensor([1, 3, 255], dtype=torch.uint8)).tolist()
        [1, 3, 255]
    """
    check_tensor("words", words, "pass a word for each draft")
    if words.dtype not in WORDS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in WORDS)
        raise TypeError(f"words must be {names}, got {words.dtype}; bool masks are for `from_mask`")
    wide = words.long().flatten()
    return wide & 0xFFFFFFFF if words.dtype is torch.int32 else wide.clone()


def from_flashinfer(packed_custom_mask: torch.Tensor, qo_lens: Sequence[int], kv_lens: Sequence[int]) -> torch.Tensor:
    """Return the words of FlashInfer's packed masks, if they hide nothing of the context.

    This copies the mask to the host and waits for it.

    Args:
        packed_custom_mask: uint8, the bits [qo_len, kv_len] of each sequence, the lowest first, filled up to whole
            bytes, one sequence after the other.
        qo_lens: drafts of each sequence.
        kv_lens: keys of each sequence, drafts included.

    Returns:
        [num_tokens] int64, on the mask's device.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the lengths do not fit together.
        UnsupportedError: a sequence has more than 64 drafts; or the mask hides a key of the context, and so is a
            general mask, which is not served.

    Examples:
        >>> mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]])  # 2 keys of context; 2 drafts, which follow it
        >>> packed = (mask.flatten() << torch.arange(8)).sum(0, keepdim=True, dtype=torch.uint8)
        >>> quire.draft_trees.from_flashinfer(packed, [2], [4]).tolist()
        [1, 2]
    """
    check_tensor("packed_custom_mask", packed_custom_mask, "pass what `packbits` returns")
    if packed_custom_mask.dtype != torch.uint8 or packed_custom_mask.dim() != 1:
        raise TypeError(
            f"packed_custom_mask must be uint8 of one dimension, got {describe(packed_custom_mask)}; "
            "pass what `packbits` returns"
        )
    check_served("packed_custom_mask", packed_custom_mask.device)
    for name, lens in (("qo_lens", qo_lens), ("kv_lens", kv_lens)):
        if not isinstance(lens, list | tuple):
            raise TypeError(f"{name} must be a list, got {describe(lens)}; pass the lengths on the host")
    if len(qo_lens) != len(kv_lens):
        raise ValueError(
            f"kv_lens must have qo_lens' {len(qo_lens)} entries, got {len(kv_lens)}; one for each sequence"
        )
    packed, words, at = packed_custom_mask.cpu(), [torch.zeros(0, dtype=torch.int64, device="cpu")], 0
    for seq, (num_drafts, kv_len) in enumerate(zip(qo_lens, kv_lens, strict=True)):
        num_drafts = check_num_drafts(f"qo_lens[{seq}]", num_drafts, least=0)
        kv_len = check_integer(f"kv_lens[{seq}]", kv_len, "drafts count too", num_drafts, LARGEST)
        size = -(-num_drafts * kv_len // 8)
        if at + size > packed.shape[0]:
            raise ValueError(
                f"packed_custom_mask must have {at + size} bytes for the first {seq + 1} sequences, "
                f"got {packed.shape[0]}; a sequence has qo_len * kv_len bits, in whole bytes"
            )
        bits = packed[at : at + size, None].int() >> torch.arange(8, device="cpu") & 1
        mask = bits.flatten()[: num_drafts * kv_len].view(num_drafts, kv_len).bool()
        context, drafts = mask[:, : kv_len - num_drafts], mask[:, kv_len - num_drafts :]
        if not bool(context.all()):
            row, key = (~context).nonzero()[0].tolist()
            raise UnsupportedError(
                f"packed_custom_mask must be 1 before the drafts, got 0 for key {key} and draft {row} of sequence "
                f"{seq}; a general dense mask is not served: say what is seen by key_begin"
            )
        words.append((drafts.long() << torch.arange(num_drafts, device="cpu")).sum(1))
        at += size
    return torch.cat(words).to(packed_custom_mask.device)


def depths(tree_bits: torch.Tensor) -> torch.Tensor:
    """Return how many ancestors each draft has: its position is that of the first draft plus this.

    Args:
        tree_bits: [...] int64.

    Returns:
        [...] int64; -1 for an empty word.

    Raises:
        TypeError: tree_bits is no int64 tensor.

    Examples:
        >>> quire.draft_trees.depths(torch.tensor([0b0001, 0b0011, 0b0101, 0b1011])).tolist()
        [0, 1, 1, 2]
    """
    check_tensor("tree_bits", tree_bits, "pass the words of the drafts")
    if tree_bits.dtype != torch.int64:
        raise TypeError(f"tree_bits must be int64, got {tree_bits.dtype}; `from_words` converts them")
    return bits_of(tree_bits).sum(-1) - 1


def windowed(batch: Batch, tree_bits: torch.Tensor, sliding_window: int) -> Batch:
    """Return the batch with a tree in which a draft sees a window of its own path: of depths, not of flat positions.

    Drafts that branch share positions. So a window counts from a draft's depth: it begins `sliding_window - 1` keys
    before `first draft + depth`, and ancestors that are farther away are not seen.

    Args:
        batch: the sequences.
        tree_bits: [num_tokens] int64, the words of all drafts, with their own bits and their ancestors'.
        sliding_window: keys that are seen, the draft's own included.

    Returns:
        The batch with `key_begin` and `tree_bits`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of range, or a shape or device does not fit.

    Examples:
        >>> starts, seq_lens = torch.tensor([0, 3]).int(), torch.tensor([9]).int()
        >>> batch = quire.Batch(torch.zeros(1, 1).int(), seq_lens, starts)
        >>> words = quire.draft_trees.from_parents(torch.tensor([-1, 0, 0]))  # siblings: both at position 7
        >>> quire.draft_trees.windowed(batch, words, 4).key_begin.tolist()
        [3, 4, 4]
    """
    size = check_integer("sliding_window", sliding_window, "it counts the draft's own key", 1, LARGEST)
    words = check_vector("tree_bits", tree_bits, torch.int64)
    tokens = locate(batch, words.shape[0])
    check_on_device("tree_bits", words, batch)
    depth = depths(words)
    begin = tokens.position - tokens.query + depth + 1 - size
    begin = torch.where(tokens.owned, torch.minimum(begin.clamp(min=0), tokens.seq_len), 0)
    draft = torch.arange(MAX_DRAFTS, device=words.device)
    token_of = (torch.arange(words.shape[0], device=words.device) - tokens.query)[:, None] + draft
    away = depth[:, None] - depth[token_of.clamp(0, max(0, words.shape[0] - 1))] if words.shape[0] else token_of
    kept = ((bits_of(words) * (away < size)) << draft).sum(-1)
    return replace(batch, key_begin=begin.int(), key_end=None, tree_bits=kept)


def bits_of(words: torch.Tensor) -> torch.Tensor:
    """Return the bits of int64 words, the lowest first, [..., 64] of 0 and 1."""
    return words[..., None] >> torch.arange(MAX_DRAFTS, device=words.device) & 1


def check_num_drafts(name: str, value: Any, least: int = 1) -> int:
    """Return a number of drafts, or raise unless a word has a bit for each."""
    value = check_integer(name, value, "it counts the drafts of a sequence", least)
    if value > MAX_DRAFTS:
        raise UnsupportedError(f"{name} must be at most {MAX_DRAFTS} drafts, got {value}; a word has a bit for each")
    return value
