"""FlashInfer's wrappers for prefill, whose `plan` may be given a custom mask."""

from dataclasses import replace

import torch
from torch.nn.functional import pad

from quire import UnsupportedError
from quire.integrations.arguments import as_int, check_tensor
from quire.integrations.flashinfer.arguments import Scoring, read_scoring
from quire.integrations.flashinfer.masks import (
    MOST_QUERIES,
    check_no_window,
    read_bits,
    read_mask,
    seen_by_mask,
    words_without_mask,
)
from quire.integrations.flashinfer.planned import Wrapper
from quire.integrations.flashinfer.signatures import Arguments


class MaskedWrapper(Wrapper):
    """A wrapper whose queries may have masks, which say what is seen in place of `causal`."""

    def _take_masks(self, a: Arguments) -> None:
        """Read what the constructor takes for masks."""
        self._has_mask = False  # at the last plan
        buffers = {name: getattr(a, name) for name in ("custom_mask_buf", "mask_indptr_buf")}
        given = [name for name, x in buffers.items() if x is not None]
        for name in given:
            check_tensor(name, buffers[name], self.device, num_entries=None)
        self._takes_masks = a.use_cuda_graph and bool(given)
        for name in buffers:
            if self._takes_masks and name not in given:
                raise ValueError(f"{name} must be a tensor where {given[0]} is one, got None; pass both")

    def _read_scoring_and_mask(self, a: Arguments) -> Scoring:
        """Return how scores are made. `a.custom_mask` becomes the mask, `a.reads_masks` whether the plan reads one."""
        mask = a.custom_mask = read_mask(a.custom_mask, a.packed_custom_mask)
        if mask is not None and self._use_cuda_graph and not self._takes_masks:
            raise ValueError(
                "custom_mask_buf must be a tensor where graphs read masks, got None; make the wrapper with it"
            )
        a.reads_masks = mask is not None or self._takes_masks
        scoring = read_scoring(a, causal=a.causal or a.reads_masks)
        if a.reads_masks:
            check_no_window(scoring.window_left)
            if scoring.alibi:
                raise UnsupportedError(
                    "pos_encoding_mode must be 'NONE' where queries have masks, got 'ALIBI'; they share positions"
                )
        return scoring

    def _prepare_with_mask(
        self, a: Arguments, scoring: Scoring, bounds: tuple[int, int], num_rows: int, **lists: torch.Tensor
    ) -> None:
        """Do what `_prepare` does, with the mask that `_read_scoring_and_mask` found."""
        (most_queries, most_keys), seen, extras = bounds, {}, ()
        longest = most_queries
        if a.reads_masks:
            seen, extras = self._find_mask(a.custom_mask, lists["cu_seqlens_q"], lists["seq_lens"], a.causal)
        if extras:
            scoring = replace(scoring, causal=False, mask=read_bits)
        if "tree_bits" in seen:
            longest = min(most_queries, MOST_QUERIES)
            if self._use_cuda_graph:  # words for the most queries of any plan
                seen["tree_bits"] = pad(seen["tree_bits"], (0, most_queries - num_rows))
        self._prepare(a, scoring, (longest, most_keys), num_rows, **lists, **seen)
        self._has_mask, self._causal = a.custom_mask is not None, a.causal
        self._extras = tuple(x.to(self.device) for x in extras)

    def _find_mask(
        self, mask: torch.Tensor | None, qo_indptr: torch.Tensor, lengths: torch.Tensor, causal: bool
    ) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
        """Return what a batch has in place of a mask, a word for each query or the ends of its interval of keys; or
        the tensors that the spec's mask reads.
        """
        if lengths.is_meta:
            raise UnsupportedError("seq_lens must be on a GPU or the CPU where queries have masks, got meta; pass them")
        starts, lens = qo_indptr.tolist(), lengths.tolist()
        if mask is None:
            return {"tree_bits": words_without_mask(starts, lens, causal)}, ()
        return seen_by_mask(mask, starts, lens, trees_alone=self._use_cuda_graph)

    def _rescore(self, a: Arguments) -> None:
        self._planned()
        if self._batch.tree_bits is not None or self._batch.key_begin is not None or self._extras:
            check_no_window(as_int("window_left", a.window_left))
            if not self._has_mask and a.causal != self._causal:
                raise ValueError(
                    f"causal must be the planned {self._causal}, got {a.causal}; graphs read what was planned: plan "
                    "again"
                )
            a.causal = not self._extras  # as planned: the mask says what is seen
        super()._rescore(a)
