"""`Batch`: one step's sequences, as tensors that stay on the device.

Engines update these tensors in place from step to step; nothing here is ever read back to the host, which is what lets a captured CUDA graph
replay at any lengths and any page table that fit the buffers.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Batch:
    """Describe which queries and which pages each sequence of a step owns.

    Sequence `s` owns query tokens `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]` and the first `seq_lens[s]` keys of its pages. Its queries are the
    last of its tokens (bottom-right alignment), unless `query_offsets` says otherwise. A padding row has `seq_lens` 0; table entries past a
    sequence's end are never read and may hold anything (-1 by custom).

    Args:
        page_table: page numbers in order: [num_seqs, max_pages_per_seq] int32 (or int64) with a contiguous last dimension, or, with
            `cu_pages`, one flat run after the other: [num_entries].
        seq_lens: [num_seqs] int32, keys per sequence, the step's new tokens included.
        cu_seqlens_q: [num_seqs + 1] int32, cumulative query counts, starting at 0. Left out, every sequence has exactly one query, token `s` being
            sequence `s`'s; for pure decode this is the faster way to say so.
        cu_pages: [num_seqs + 1] or [num_seqs] int32, where each sequence's run begins in a flat `page_table`.
        query_offsets: [num_seqs] int32, position of each sequence's first query among its keys; `seq_lens - query_lens` when not given.

    Raises:
        TypeError: an argument is not an integer tensor of the dtype above.
        ValueError: shapes, strides or devices do not fit together.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_pages: torch.Tensor | None = None
    query_offsets: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.page_table.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"page_table must be int32 or int64, got {self.page_table.dtype}; convert it once, not per layer"
            )
        want_dim = 2 if self.cu_pages is None else 1
        if self.page_table.dim() != want_dim or (self.page_table.shape[-1] > 1 and self.page_table.stride(-1) != 1):
            raise ValueError(
                f"page_table must have {want_dim} dimension(s), the last contiguous, got shape {tuple(self.page_table.shape)} and strides "
                f"{self.page_table.stride()}; a flat table needs cu_pages, a rectangular one must not have it"
            )
        vectors = {"seq_lens": self.num_seqs}
        if self.cu_seqlens_q is not None:
            vectors["cu_seqlens_q"] = self.num_seqs + 1
        if self.query_offsets is not None:
            vectors["query_offsets"] = self.num_seqs
        if self.cu_pages is not None:
            vectors["cu_pages"] = min(max(self.cu_pages.shape[0], self.num_seqs), self.num_seqs + 1)
        for name, length in vectors.items():
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} must be int32, got {tensor.dtype}; convert it once per step")
            if tensor.dim() != 1 or tensor.shape[0] != length or (length > 1 and tensor.stride(0) != 1):
                raise ValueError(
                    f"{name} must be contiguous with {length} entries for {self.num_seqs} sequences, got shape {tuple(tensor.shape)}; "
                    "cu_seqlens_q has one entry more than seq_lens"
                )
            if tensor.device != self.page_table.device:
                raise ValueError(
                    f"{name} must be on page_table's device {self.page_table.device}, got {tensor.device}; move it there"
                )
        if self.cu_pages is None and self.page_table.shape[0] != self.num_seqs:
            raise ValueError(
                f"page_table must have one row per sequence, got {self.page_table.shape[0]} rows for {self.num_seqs} sequences; slice it"
            )

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch, padding rows included."""
        return self.seq_lens.shape[0] if self.seq_lens.dim() else 0

    @property
    def query_starts(self) -> torch.Tensor:
        """`cu_seqlens_q`, also where it was left out."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q
        return torch.arange(self.num_seqs + 1, dtype=torch.int32, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.page_table.device

    @classmethod
    def varlen(cls, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> "Batch":
        """Describe sequences whose keys lie one after the other, for `varlen_attention`.

        Such a sequence is one page that begins at its first token, so that the paged kernels serve it as it is.

        Args:
            cu_seqlens_q: [num_seqs + 1] int32, cumulative query counts.
            cu_seqlens_k: [num_seqs + 1] int32, cumulative key counts.
        """
        return cls(cu_seqlens_k[:-1, None], cu_seqlens_k.diff(), cu_seqlens_q)
