"""`Batch`: one step's sequences, as tensors that stay on the device.

Engines update these tensors in place from step to step. Quire never reads them back from a GPU, so a captured CUDA
graph can be replayed with any lengths and any page table that fit the buffers.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from quire.errors import check_flag, check_tensor, describe


@dataclass(frozen=True, eq=False)
class Batch:
    """Describe which queries and which pages each sequence of a step owns.

    Sequence `s` owns query tokens `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]` and the first `seq_lens[s]` keys of its
    pages. Its queries are the last of its tokens (bottom-right alignment), unless `query_offsets` says otherwise.
    A padding row has `seq_lens` 0. Table entries past a sequence's end are never read and may hold anything
    (-1 by custom).

    Args:
        page_table: page numbers in order: [num_seqs, max_pages_per_seq] int32 (or int64) with a contiguous last
            dimension, or, with `cu_pages`, the rows of all sequences concatenated: [num_entries].
        seq_lens: [num_seqs] int32, keys per sequence, the step's new tokens included.
        cu_seqlens_q: [num_seqs + 1] int32, cumulative query counts, starting at 0. Left out, every sequence has exactly
            one query, and token `s` is sequence `s`'s; for pure decode this is faster.
        cu_pages: [num_seqs + 1] or [num_seqs] int32, where each sequence's pages begin in a flat `page_table`.
        query_offsets: [num_seqs] int32, position of each sequence's first query among its keys;
            `seq_lens - query_lens` when not given.
        paged: False for a cache of layout "THD" (`Batch.varlen`): `page_table` is [num_seqs, 1] and holds the token at
            which each sequence's keys begin.

    Attributes:
        num_seqs: sequences in the batch, padding rows included.
        table_width: entries of a row of `page_table`; None where it is flat.
        device: where the tensors are.

    Raises:
        TypeError: an argument is not a tensor of the dtype above.
        ValueError: shapes, strides or devices do not fit together.

    Examples:
        >>> table = torch.tensor([[3, 5], [1, -1]], dtype=torch.int32)  # two pages, and one
        >>> seq_lens = torch.tensor([20, 7], dtype=torch.int32)
        >>> quire.Batch(table, seq_lens).query_starts.tolist()  # both decode: a query each
        [0, 1, 2]
        >>> starts = torch.tensor([0, 20, 21], dtype=torch.int32)
        >>> quire.Batch(table, seq_lens, starts).num_seqs  # a prompt of 20 tokens, and a decoding sequence
        2
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_pages: torch.Tensor | None = None
    query_offsets: torch.Tensor | None = None
    paged: bool = True
    num_seqs: int = field(init=False, repr=False)
    table_width: int | None = field(init=False, repr=False)
    device: torch.device = field(init=False, repr=False)

    def __post_init__(self) -> None:
        table = check_tensor("page_table", self.page_table, "pages are allocated by the engine or a PageAllocator")
        if table.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"page_table must be int32 or int64, got {table.dtype}; convert it once, not per layer")
        num_dims = 2 if self.cu_pages is None else 1
        if table.dim() != num_dims or not (table.shape[-1] <= 1 or table.stride(-1) == 1 or table.is_contiguous()):
            raise ValueError(
                f"page_table must have {num_dims} dimension(s), the last contiguous, got shape {tuple(table.shape)} "
                f"and strides {table.stride()}; a flat table needs cu_pages, a rectangular one must not have it"
            )
        num_seqs = check_vector("seq_lens", self.seq_lens).shape[0]
        lengths: dict[str, tuple[int, ...]] = {"seq_lens": (num_seqs,)}
        if self.cu_seqlens_q is not None:
            lengths["cu_seqlens_q"] = (num_seqs + 1,)
        if self.query_offsets is not None:
            lengths["query_offsets"] = (num_seqs,)
        if self.cu_pages is not None:
            lengths["cu_pages"] = num_seqs, num_seqs + 1
        for name, served in lengths.items():
            vector = check_vector(name, getattr(self, name))
            if vector.shape[0] not in served:
                raise ValueError(
                    f"{name} must have {' or '.join(map(str, served))} entries for {num_seqs} sequences, "
                    f"got {vector.shape[0]}; seq_lens has one entry per sequence"
                )
            if vector.device != table.device:
                raise ValueError(f"{name} must be on page_table's device {table.device}, got {vector.device}; move it")
        if self.cu_pages is None and table.shape[0] != num_seqs:
            raise ValueError(
                f"page_table must have one row per sequence, got {table.shape[0]} rows for {num_seqs} sequences; "
                "slice it"
            )
        check_flag("paged", self.paged, "Batch.varlen describes sequences without pages")
        if not self.paged and (self.cu_pages is not None or table.shape[1] != 1):
            raise ValueError(
                f"page_table must be [num_seqs, 1] where paged=False, got shape {tuple(table.shape)}; "
                "it holds the token at which each sequence begins"
            )
        object.__setattr__(self, "num_seqs", num_seqs)
        object.__setattr__(self, "table_width", table.shape[1] if self.cu_pages is None else None)
        object.__setattr__(self, "device", table.device)

    @property
    def query_starts(self) -> torch.Tensor:
        """`cu_seqlens_q`, also where it was left out."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q
        return torch.arange(self.num_seqs + 1, dtype=torch.int32, device=self.device)

    @classmethod
    def varlen(cls, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor) -> "Batch":
        """Describe sequences whose keys are concatenated, for `varlen_attention`.

        Each sequence is one page that begins at its first token, so the paged kernels serve it unchanged.

        Args:
            cu_seqlens_q: [num_seqs + 1] int32, cumulative query counts; None where every sequence has one query.
            cu_seqlens_k: [num_seqs + 1] int32, cumulative key counts.

        Raises:
            TypeError: an argument is not an int32 tensor.
            ValueError: shapes, strides or devices do not fit together.

        Examples:
            >>> starts = torch.tensor([0, 20, 27], dtype=torch.int32)  # two prompts, of 20 and 7 tokens
            >>> quire.Batch.varlen(starts, starts).seq_lens.tolist()
            [20, 7]
        """
        if check_vector("cu_seqlens_k", cu_seqlens_k).shape[0] == 0:
            raise ValueError("cu_seqlens_k must begin with 0, got no entries; it has one entry more than sequences")
        return cls(cu_seqlens_k[:-1, None], cu_seqlens_k.diff(), cu_seqlens_q, paged=False)


def check_vector(name: str, value: Any) -> torch.Tensor:
    """Return a tensor, or raise unless it is contiguous int32 of one dimension."""
    vector = check_tensor(name, value, "build it once per step")
    if vector.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {vector.dtype}; convert it once per step")
    if vector.dim() != 1 or not vector.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous with one dimension, got {describe(vector)} "
            f"with strides {vector.stride()}; flatten it"
        )
    return vector
