"""Steps of vLLM whose tokens see keys of their own: images that are seen in both directions, and mixed batches.

In models with bidirectional prefixes, the tokens of an image see all of it, and what causal ones see.

vLLM has the ranges of each request's images on the host. A step has intervals only if a query is in one of them. Other
steps have the plans that they would have without images. A range becomes the interval of keys that its tokens see.

Newer vLLM may say of each request whether it is causal, for drafts that are made a block at a time.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

import quire
from quire import AttentionSpec, Batch


def scheduled_spans(
    ranges: dict[int, list[tuple[int, int]]],  # by request: first and last positions
    query_start_loc: torch.Tensor,  # [num_seqs + 1] int32, on the host
    seq_lens: torch.Tensor | None,  # [num_seqs] int32, on the host: at least the real ones, and exact for prompts
) -> list[tuple[int, int, int]]:
    """Return sequence, first position, and position after the last, of the ranges with queries in a step."""
    found = []
    starts = query_start_loc.tolist()
    for seq, of_seq in ranges.items():
        num_queries = starts[seq + 1] - starts[seq]
        end = None if seq_lens is None else int(seq_lens[seq])
        for first, last in of_seq:
            if first < last and num_queries and (end is None or first < end <= last + num_queries):
                found.append((seq, first, last + 1))
    return found


def see_spans(
    batch: Batch, num_tokens: int, rows: list[tuple[int, int, int]], sliding_window: int | None, clamp: bool
) -> Batch:
    """Return a batch with intervals for spans; with `clamp`, a token does not see what is before its window."""
    spans = torch.tensor(rows, dtype=torch.int32).to(batch.device, non_blocking=True)
    window = {"sliding_window": sliding_window, "within_window": clamp}
    return quire.intervals.bidirectional_spans(batch, num_tokens, spans, **window)


def see_by_sequence(batch: Batch, num_tokens: int, causal: torch.Tensor, sliding_window: int | None) -> Batch:
    """Return a batch with intervals for which a sequence is causal, or its tokens see all of it.

    Args:
        batch: the sequences.
        num_tokens: of the step.
        causal: [num_seqs] int32, of each sequence; not 0 for causal ones.
        sliding_window: of the layer. In a sequence that is not causal it reaches as far ahead as back.
    """
    prefix_lens = torch.where(causal[: batch.num_seqs].bool(), 0, batch.seq_lens)
    seen = quire.intervals.prefix_lm(batch, num_tokens, prefix_lens)
    if sliding_window is None:
        return seen
    window = quire.intervals.sliding_window(batch, num_tokens, sliding_window, right=sliding_window - 1)
    assert seen.key_end is not None and window.key_end is not None
    return replace(window, key_end=torch.minimum(seen.key_end, window.key_end))


@cache
def without_window(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of a layer whose windows are in the intervals."""
    return replace(spec, sliding_window=None)


def has_spans(vllm_config: Any) -> bool:
    """Whether the model's images are seen in both directions."""
    return bool(getattr(getattr(vllm_config, "model_config", None), "is_mm_prefix_lm", False))
