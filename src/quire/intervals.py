"""Make the intervals of keys that query tokens see: `key_begin` and `key_end` of a `Batch`.

Each function returns the batch with both, [num_tokens] int32. They are computed on the batch's device from its lengths,
without waiting for it. A batch of a captured graph keeps its tensors: copy the new numbers into them in each step,
`batch.key_begin.copy_(quire.intervals.causal(batch, num_tokens).key_begin)`.

A row without a sequence, as captured graphs have them, sees nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from quire.batch import Batch, check_vector
from quire.errors import check_flag, check_integer, check_tensor, describe

__all__ = [
    "bidirectional_spans",
    "block_causal",
    "causal",
    "chunked_local",
    "documents",
    "prefix_and_window",
    "prefix_lm",
    "sliding_window",
]

LARGEST = (1 << 31) - 1
APART = 1 << 32  # positions, of which each is less than LARGEST from 0


class Tokens(NamedTuple):
    """The query tokens of a batch.

    Attributes:
        seq: the sequence of each, [num_tokens] int64.
        query: its number among the queries of the sequence, [num_tokens] int64.
        position: its position among the keys of the sequence, [num_tokens] int64.
        seq_len: keys of its sequence, [num_tokens] int64.
        owned: whether a sequence owns it, [num_tokens] bool; else the numbers mean nothing.
    """

    seq: torch.Tensor
    query: torch.Tensor
    position: torch.Tensor
    seq_len: torch.Tensor
    owned: torch.Tensor


def causal(batch: Batch, num_tokens: int) -> Batch:
    """Return the batch with intervals for which each token sees the keys up to its own.

    Args:
        batch: the sequences.
        num_tokens: query tokens of the step, or of the graph.

    Returns:
        The batch with `key_begin` and `key_end`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of range.

    Examples:
        >>> starts, seq_lens = torch.tensor([0, 3, 4]).int(), torch.tensor([3, 9]).int()
        >>> batch = quire.Batch(torch.zeros(2, 1).int(), seq_lens, starts)  # a prompt of 3, and a 9th token
        >>> quire.intervals.causal(batch, 4).key_end.tolist()
        [1, 2, 3, 9]
    """
    tokens = locate(batch, num_tokens)
    return with_intervals(batch, tokens, torch.zeros_like(tokens.position), tokens.position + 1)


def sliding_window(batch: Batch, num_tokens: int, size: int, right: int = 0) -> Batch:
    """Return the batch with intervals for which each token sees the last keys up to its own, and some ahead.

    Args:
        batch: the sequences.
        num_tokens: query tokens of the step, or of the graph.
        size: keys that are seen, the token's own included; `AttentionSpec.sliding_window`.
        right: keys ahead that are seen; `AttentionSpec.sliding_window_right`.

    Returns:
        The batch with `key_begin` and `key_end`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of range.

    Examples:
        >>> starts, seq_lens = torch.tensor([0, 3]).int(), torch.tensor([9]).int()
        >>> batch = quire.Batch(torch.zeros(1, 1).int(), seq_lens, starts)  # tokens 6, 7 and 8
        >>> quire.intervals.sliding_window(batch, 3, 4).key_begin.tolist()
        [3, 4, 5]
    """
    size = check_integer("size", size, "it counts the token's own key", 1, LARGEST)
    right = check_integer("right", right, "leave it out for none", 0, LARGEST)
    tokens = locate(batch, num_tokens)
    return with_intervals(batch, tokens, tokens.position + 1 - size, tokens.position + 1 + right)


def prefix_and_window(batch: Batch, num_tokens: int, prefix: int, size: int) -> tuple[Batch, Batch]:
    """Return two batches, for which each token sees the first keys, and the last keys up to its own.

    No key is in both: `quire.union_attention` takes a plan for each. A token whose window reaches into the prefix sees
    its keys up to its own in the first batch, and those after the prefix in the second.

    Args:
        batch: the sequences.
        num_tokens: query tokens of the step, or of the graph.
        prefix: keys at the beginning of a sequence that every later token sees ("attention sinks").
        size: keys that are seen looking back, the token's own included.

    Returns:
        The batch with `key_begin` and `key_end` of the prefix, and that with those of the window.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of range.

    Examples:
        >>> starts, seq_lens = torch.tensor([0, 3]).int(), torch.tensor([9]).int()
        >>> batch = quire.Batch(torch.zeros(1, 1).int(), seq_lens, starts)  # tokens 6, 7 and 8
        >>> first, window = quire.intervals.prefix_and_window(batch, 3, prefix=2, size=4)
        >>> first.key_end.tolist(), window.key_begin.tolist(), window.key_end.tolist()
        ([2, 2, 2], [3, 4, 5], [7, 8, 9])
    """
    prefix = check_integer("prefix", prefix, "it counts the first keys that every token sees", 1, LARGEST)
    size = check_integer("size", size, "it counts the token's own key", 1, LARGEST)
    tokens = locate(batch, num_tokens)
    end = tokens.position + 1
    first = with_intervals(batch, tokens, torch.zeros_like(end), end.clamp(max=prefix))
    return first, with_intervals(batch, tokens, (end - size).clamp(min=prefix), end)


def chunked_local(batch: Batch, num_tokens: int, size: int) -> Batch:
    """Return the batch with intervals for which each token sees its own chunk of the sequence, up to its own key.

    This is the local attention of Llama 4.

    Args:
        batch: the sequences.
        num_tokens: query tokens of the step, or of the graph.
        size: tokens of a chunk.

    Returns:
        The batch with `key_begin` and `key_end`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of range.

    Examples:
        >>> starts, seq_lens = torch.tensor([0, 3]).int(), torch.tensor([9]).int()
        >>> batch = quire.Batch(torch.zeros(1, 1).int(), seq_lens, starts)  # tokens 6, 7 and 8
        >>> quire.intervals.chunked_local(batch, 3, 4).key_begin.tolist()
        [4, 4, 8]
    """
    size = check_integer("size", size, "it counts the tokens of a chunk", 1, LARGEST)
    tokens = locate(batch, num_tokens)
    return with_intervals(batch, tokens, tokens.position // size * size, tokens.position + 1)


def block_causal(batch: Batch, num_tokens: int, size: int) -> Batch:
    """Return the batch with intervals for which each token sees its own block whole, and all blocks before it.

    Models that denoise a block at a time attend like this.

    Args:
        batch: the sequences.
        num_tokens: query tokens of the step, or of the graph.
        size: tokens of a block.

    Returns:
        The batch with `key_begin` and `key_end`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of range.

    Examples:
        >>> starts, seq_lens = torch.tensor([0, 3]).int(), torch.tensor([9]).int()
        >>> batch = quire.Batch(torch.zeros(1, 1).int(), seq_lens, starts)  # tokens 6, 7 and 8
        >>> quire.intervals.block_causal(batch, 3, 4).key_end.tolist()
        [8, 8, 9]
    """
    size = check_integer("size", size, "it counts the tokens of a block", 1, LARGEST)
    tokens = locate(batch, num_tokens)
    return with_intervals(batch, tokens, torch.zeros_like(tokens.position), (tokens.position // size + 1) * size)


def prefix_lm(batch: Batch, num_tokens: int, prefix_lens: torch.Tensor) -> Batch:
    """Return the batch with intervals for which the tokens of a prefix see all of it, and later tokens are causal.

    Args:
        batch: the sequences.
        num_tokens: query tokens of the step, or of the graph.
        prefix_lens: [num_seqs] int32, tokens of each sequence's prefix; 0 for a causal sequence, and the sequence's
            length for one that is seen in both directions.

    Returns:
        The batch with `key_begin` and `key_end`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of range, or a shape or device does not fit.

    Examples:
        >>> starts, seq_lens = torch.tensor([0, 4]).int(), torch.tensor([4]).int()
        >>> batch = quire.Batch(torch.zeros(1, 1).int(), seq_lens, starts)
        >>> quire.intervals.prefix_lm(batch, 4, torch.tensor([3]).int()).key_end.tolist()
        [3, 3, 3, 4]
    """
    tokens = locate(batch, num_tokens)
    check_on_device("prefix_lens", check_vector("prefix_lens", prefix_lens), batch)
    if prefix_lens.shape[0] != batch.num_seqs:
        raise ValueError(
            f"prefix_lens must have {batch.num_seqs} entries, got {prefix_lens.shape[0]}; one for each sequence"
        )
    end = tokens.position + 1
    if batch.num_seqs:
        end = torch.maximum(end, prefix_lens[tokens.seq].long())
    return with_intervals(batch, tokens, torch.zeros_like(end), end)


def bidirectional_spans(
    batch: Batch,
    num_tokens: int,
    spans: torch.Tensor,
    *,
    sliding_window: int | None = None,
    within_window: bool = False,
) -> Batch:
    """Return the batch with intervals for which the tokens of a span see all of it, and what causal tokens see.

    The images of multimodal models are such spans.

    Args:
        batch: the sequences.
        num_tokens: query tokens of the step, or of the graph.
        spans: [num_spans, 3] int32: sequence, first position, and position after the last. A row of which the sequence
            is -1 is padding. Spans of a sequence do not overlap.
        sliding_window: keys that a token sees looking back, its own included; None for no limit. A token of a span
            sees the whole span all the same, as in Gemma 3.
        within_window: a token of a span sees nothing before its window either, as in Gemma 4.

    Returns:
        The batch with `key_begin` and `key_end`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of range, or a shape or device does not fit.

    Examples:
        >>> starts, seq_lens = torch.tensor([0, 6]).int(), torch.tensor([6]).int()
        >>> batch = quire.Batch(torch.zeros(1, 1).int(), seq_lens, starts)
        >>> spans = torch.tensor([[0, 1, 4]]).int()  # an image at positions 1, 2 and 3
        >>> quire.intervals.bidirectional_spans(batch, 6, spans).key_end.tolist()
        [1, 4, 4, 4, 5, 6]
    """
    if sliding_window is not None:
        sliding_window = check_integer("sliding_window", sliding_window, "leave it out for no window", 1, LARGEST)
    check_flag("within_window", within_window, "say whether a window hides the beginning of a long span")
    tokens = locate(batch, num_tokens)
    check_tensor("spans", spans, "it has a row for each span")
    if spans.dtype != torch.int32:
        raise TypeError(f"spans must be int32, got {spans.dtype}; convert it once per step")
    if spans.dim() != 2 or spans.shape[1] != 3:
        raise ValueError(f"spans must be [num_spans, 3], got {describe(spans)}; a row is sequence, first and stop")
    check_on_device("spans", spans, batch)
    position = tokens.position
    begin = torch.zeros_like(position) if sliding_window is None else position + 1 - sliding_window
    end = position + 1
    if spans.shape[0]:
        # One line of positions for all sequences. A token's span is that which ends last of those that begin before it.
        seq, first, stop = spans.long().unbind(1)
        first, order = (seq * APART + first).sort()
        stop, which = (seq * APART + stop)[order].cummax(0)
        at = tokens.seq * APART + position
        before = torch.searchsorted(first, at, right=True)
        span = (before - 1).clamp(min=0)
        inside = (before > 0) & (at < stop[span])
        end = torch.where(inside, stop[span] - at + position, end)
        if sliding_window is None or not within_window:
            begin = torch.minimum(begin, torch.where(inside, first[which[span]] - at + position, begin))
    return with_intervals(batch, tokens, begin, end)


def documents(batch: Batch, num_tokens: int, cu_seqlens: torch.Tensor, *, causal: bool = True) -> Batch:
    """Return the batch with intervals for which each token sees the keys of its own document alone.

    Args:
        batch: the sequences, into which documents are packed.
        num_tokens: query tokens of the step, or of the graph.
        cu_seqlens: [num_documents + 1] int32, where documents begin among the keys of all sequences, one sequence after
            the other; the first is 0. A document may be empty.
        causal: whether a token sees no key after its own.

    Returns:
        The batch with `key_begin` and `key_end`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a number is out of range, or a shape or device does not fit.

    Examples:
        >>> starts = torch.tensor([0, 6]).int()  # one sequence of 6 tokens
        >>> batch = quire.Batch.varlen(starts, starts)
        >>> packed = quire.intervals.documents(batch, 6, torch.tensor([0, 2, 6]).int())
        >>> packed.key_begin.tolist(), packed.key_end.tolist()
        ([0, 0, 2, 2, 2, 2], [1, 2, 3, 4, 5, 6])
    """
    check_flag("causal", causal, "pass False for documents in both directions")
    tokens = locate(batch, num_tokens)
    check_on_device("cu_seqlens", check_vector("cu_seqlens", cu_seqlens), batch)
    if cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must have at least 2 entries, got {cu_seqlens.shape[0]}; the first is 0")
    if batch.num_seqs == 0:
        return with_intervals(batch, tokens, tokens.position, tokens.position)
    before = (batch.seq_lens.cumsum(0) - batch.seq_lens)[tokens.seq]  # keys of earlier sequences
    key = (before + tokens.position).int()
    document = (torch.searchsorted(cu_seqlens, key, right=True) - 1).clamp(0, cu_seqlens.shape[0] - 2)
    owned = tokens.owned & (key >= cu_seqlens[document]) & (key < cu_seqlens[document + 1])
    begin, end = cu_seqlens[document].long() - before, cu_seqlens[document + 1].long() - before
    if causal:
        end = torch.minimum(end, tokens.position + 1)
    return with_intervals(batch, tokens._replace(owned=owned), begin, end)


def locate(batch: Any, num_tokens: Any) -> Tokens:
    """Return the sequence of each query token of a batch, and its position among that sequence's keys."""
    if not isinstance(batch, Batch):
        raise TypeError(f"batch must be a Batch, got {describe(batch)}; make one from the page table and the lengths")
    advice = "pass the rows of q"
    num_tokens = check_integer("num_tokens", num_tokens, advice, 0, LARGEST)
    if batch.cu_seqlens_q is None and num_tokens < batch.num_seqs:
        raise ValueError(
            f"num_tokens must be at least {batch.num_seqs}, got {num_tokens}; "
            "a batch without cu_seqlens_q has one query for each sequence"
        )
    token = torch.arange(num_tokens, dtype=torch.int32, device=batch.device)
    if batch.num_seqs == 0:
        nothing = torch.zeros_like(token, dtype=torch.int64)
        return Tokens(nothing, nothing, nothing, nothing, token < 0)
    starts = batch.query_starts
    seq = torch.searchsorted(starts, token, right=True) - 1
    owned = (seq >= 0) & (seq < batch.num_seqs)
    seq = seq.clamp(0, batch.num_seqs - 1)
    query, seq_len = token - starts[seq].long(), batch.seq_lens[seq].long()
    if batch.query_offsets is None:
        first = seq_len - starts.diff()[seq]
    else:
        first = batch.query_offsets[seq].long()
    return Tokens(seq, query, first + query, seq_len, owned)


def with_intervals(batch: Batch, tokens: Tokens, begin: torch.Tensor, end: torch.Tensor) -> Batch:
    """Return the batch with intervals, cut to their sequences; [0, 0) for a token of no sequence."""
    limit = torch.where(tokens.owned, tokens.seq_len, 0)
    end = torch.minimum(end.clamp(min=0), limit)
    begin = torch.minimum(begin.clamp(min=0), limit)
    return replace(batch, key_begin=begin.int(), key_end=end.int(), tree_bits=None)


def check_on_device(name: str, tensor: torch.Tensor, batch: Batch) -> None:
    """Raise unless a tensor is where the batch is."""
    if tensor.device != batch.device:
        raise ValueError(f"{name} must be on the batch's device {batch.device}, got {tensor.device}; move it")
