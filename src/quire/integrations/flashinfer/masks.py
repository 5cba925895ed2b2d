"""FlashInfer's custom masks, as what a batch has for them: the words of draft trees, or the ends of intervals of keys.

Of other masks, a function of the spec reads the bits.
"""

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad

import quire
from quire import UnsupportedError, draft_trees
from quire.integrations.arguments import check_tensor

MOST_QUERIES = 64  # of a sequence: bits of a word


def read_mask(custom_mask: torch.Tensor | None, packed_custom_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mask that counts, bool or packed as uint8, or None without one; packed wins, as in FlashInfer."""
    for name, mask, dtype in (
        ("custom_mask", custom_mask, torch.bool),
        ("packed_custom_mask", packed_custom_mask, torch.uint8),
    ):
        if mask is None:
            continue
        check_tensor(name, mask, None, num_entries=None)
        if mask.dtype is not dtype:
            raise TypeError(f"{name} must be {dtype}, got {mask.dtype}; 1 marks a key that is seen")
        if mask.is_meta:
            raise UnsupportedError(f"{name} must be on a GPU or the CPU, got meta; move it there")
    return custom_mask if packed_custom_mask is None else packed_custom_mask


@quire.mask(extras={"bits": (torch.bool, None), "first": (torch.int32, None)})
def read_bits(token: Any, kv_pos: Any, bits: Any, first: Any) -> Any:
    """Return a mask's bit of a query, whose bits begin at `first`, for a key."""
    return bits[first[token] + kv_pos]


def seen_by_mask(
    mask: torch.Tensor, qo_indptr: list[int], kv_lens: list[int], trees_alone: bool = False
) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return what a batch has in place of a mask, or the tensors that `read_bits` reads. This waits for the device."""
    try:
        return {"tree_bits": words_of_mask(mask, qo_indptr, kv_lens)}, ()
    except UnsupportedError:
        rows = None if trees_alone else rows_of_mask(mask, qo_indptr, kv_lens)
        if rows is None:
            raise
        ends = intervals_of_mask(rows)
        if ends is not None:
            return dict(zip(("key_begin", "key_end"), ends, strict=True)), ()
        bits = torch.cat([*(row.flatten() for row in rows), torch.zeros(1, dtype=torch.bool, device=mask.device)])
        sizes = [row.shape[1] for row in rows for _ in range(row.shape[0])]
        first = torch.tensor([0, *sizes[:-1]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return {}, (bits, first.to(bits.device))


def rows_of_mask(mask: torch.Tensor, qo_indptr: list[int], kv_lens: list[int]) -> list[torch.Tensor] | None:
    """Return the mask of each sequence, [qo_len, kv_len] bool; None if it is too short or a length negative."""
    bit, found = 0, []
    for queries, keys in zip((end - begin for begin, end in pairwise(qo_indptr)), kv_lens, strict=True):
        size = queries * keys
        if mask.dtype is torch.bool:
            flat = mask[bit : bit + size]
            bit += size
        else:  # whole bytes for each sequence, the lowest bit first
            packed = mask[bit : bit + (size + 7) // 8]
            flat = (packed[:, None] >> torch.arange(8, device=mask.device)).flatten()[:size] & 1
            bit += (size + 7) // 8
        if len(flat) < size or keys < 0:
            return None
        found.append(flat.view(queries, keys).bool())
    return found


def intervals_of_mask(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the first key that each query sees and the one after its last, [num_tokens] int32; None if a query sees
    keys with others between them.

    A query that sees no key has an empty interval.
    """
    begins, ends = [], []
    for row in rows:
        seen, keys = row.int(), row.shape[1]
        count = seen.sum(1)
        if keys:
            begin, end = seen.argmax(1), keys - seen.flip(1).argmax(1)
            begin, end = torch.where(count > 0, begin, 0), torch.where(count > 0, end, 0)
        else:
            begin = end = count
        if not bool((end - begin == count).all()):
            return None
        begins.append(begin)
        ends.append(end)
    none = torch.zeros(0, dtype=torch.int64, device=rows[0].device if rows else None)
    return torch.cat([none, *begins]).int(), torch.cat([none, *ends]).int()


def words_of_mask(mask: torch.Tensor, qo_indptr: list[int], kv_lens: list[int]) -> torch.Tensor:
    """Return a word for each query, [qo_indptr[-1]] int64 on the mask's device. This waits for the device.

    A sequence without keys is a padding row. It has no bits in the mask, and its words are 0.
    """
    qo_lens = count_queries(qo_indptr)
    name = "custom_mask" if mask.dtype is torch.bool else "packed_custom_mask"
    for seq, (queries, keys) in enumerate(zip(qo_lens, kv_lens, strict=True)):
        if keys < queries and keys:
            raise UnsupportedError(
                f"{name} must be of sequences with a key for each query, got {queries} queries and {keys} keys "
                f"of sequence {seq}; the queries are the last tokens"
            )
    drafts = [queries if keys else 0 for queries, keys in zip(qo_lens, kv_lens, strict=True)]
    packed = mask
    if mask.dtype is torch.bool:
        sizes = [queries * keys for queries, keys in zip(drafts, kv_lens, strict=True)]
        if len(mask) < sum(sizes):
            raise ValueError(
                f"custom_mask must have {sum(sizes)} entries, got {len(mask)}; a sequence has qo_len * kv_len of them"
            )
        packed = pack(mask, sizes)
    words = draft_trees.from_flashinfer(packed, drafts, kv_lens)
    return spread(words, qo_lens, kv_lens)


def words_without_mask(qo_indptr: list[int], kv_lens: list[int], causal: bool) -> torch.Tensor:
    """Return the words by which queries see what they see without a mask, for a graph that reads words."""
    qo_lens, words = count_queries(qo_indptr), [torch.zeros(0, dtype=torch.int64)]
    for queries, keys in zip(qo_lens, kv_lens, strict=True):
        if queries and keys:
            seen = torch.ones(queries, queries, dtype=torch.bool)
            words.append(draft_trees.from_mask(seen.tril() if causal else seen, queries))
    return spread(torch.cat(words), qo_lens, kv_lens)


def count_queries(qo_indptr: list[int]) -> list[int]:
    """Return the queries of each sequence, or raise unless each row of `q` has a word, with a bit for each query."""
    qo_lens = [end - begin for begin, end in pairwise(qo_indptr)]
    if qo_indptr[0] != 0 or min(qo_lens, default=0) < 0:
        raise ValueError(
            f"qo_indptr must begin with 0 and not decrease where queries have masks, got "
            f"{qo_indptr[:8]}; it says where the queries of each sequence begin"
        )
    if max(qo_lens, default=0) > MOST_QUERIES:
        raise UnsupportedError(
            f"qo_indptr must count at most {MOST_QUERIES} queries of a sequence where queries have masks, got "
            f"{max(qo_lens)}; a word of a draft tree has a bit for each. "
            "Longer masks must show each query one interval of keys"
        )
    return qo_lens


def spread(words: torch.Tensor, qo_lens: list[int], kv_lens: list[int]) -> torch.Tensor:
    """Return the words with a 0 for each query of a padding row."""
    if len(words) == sum(qo_lens):
        return words
    queries, keys = torch.tensor(qo_lens, dtype=torch.int64), torch.tensor(kv_lens, dtype=torch.int64)
    spread = words.new_zeros(int(queries.sum()))
    spread[(keys > 0).repeat_interleave(queries).to(words.device)] = words
    return spread


def pack(mask: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return the bits of each sequence, the lowest first, filled to whole bytes; each has a size in bits."""
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    parts = [pad(part.byte(), (0, -len(part) % 8)) for part in mask[: sum(sizes)].split(sizes)]
    bits = torch.cat([mask.new_zeros(0, dtype=torch.uint8), *parts])
    return (bits.view(-1, 8) << places).sum(1, dtype=torch.uint8)


def check_no_window(window_left: int) -> None:
    """Raise unless every query sees the whole context: a window of a tree would count depths."""
    if window_left >= 0:
        raise UnsupportedError(
            f"window_left must be -1 where queries have masks, got {window_left}; "
            "quire.draft_trees.windowed makes a batch with both"
        )
