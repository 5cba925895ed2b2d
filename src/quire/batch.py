"""`Batch`: one step's sequences, as tensors that stay on the device.

Engines update these tensors in place from step to step. Quire never reads them back from a GPU, so a captured CUDA
graph can be replayed with any lengths and any page table that fit the buffers.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from quire.errors import UnsupportedError, check_flag, check_integer, check_tensor, describe, shown

MOST_POSITIONS = (1 << 31) - 1  # of a sequence, or slots of a cache: indices are int32


@dataclass(frozen=True, eq=False, repr=False)
class ChosenKeys:
    """Name the keys that each query token sees, for models that choose them: `Batch(chosen=...)`.

    Entry `e` of a token's list names the keys `e * block_size` to `(e + 1) * block_size - 1`: one token, a region or a
    block. They are positions in the token's sequence, which the page table maps to slots, or slots themselves. Order
    means nothing. A token sees what its list names and no more; a token whose list is empty has out 0, and lse -inf or
    its sink. Keys after a sequence's end are left out. So are keys after the token itself if the spec is causal, as in
    the token's own block.

    Args:
        indices: int32, [num_tokens, width], one list for all heads, or [num_tokens, num_kv_heads, width], a list for
            each KV head; of [num_tokens, 1, width], the list is for all heads. The last dimension is contiguous, the
            others have any strides. A negative entry names nothing, wherever it stands. No other entry may repeat.
        lens: int32, [num_tokens], or [num_tokens, num_kv_heads] like the lists: how many of a list's first entries
            count. The others are never read. Any strides, so the last column of a matrix will do. None if all count.
        block_size: keys that an entry names.
        are_slots: whether entries name slots of the cache, `page * page_size + slot` (over `block_size`). The page
            table and `seq_lens` are then not used, all slots that are named must be in the cache, and the spec must not
            be causal.

    Attributes:
        num_tokens: lists, or rows of lists, one for each query token; there may be more than tokens.
        num_lists: lists of a token: 1, or one for each KV head.
        width: most entries of a list.

    Raises:
        TypeError: an argument is of another type or dtype.
        ValueError: shapes, strides or devices do not fit together.

    Examples:
        >>> lists = torch.tensor([[0, 7, -1], [3, 2, 6]], dtype=torch.int32)  # of two tokens
        >>> quire.ChosenKeys(lists).num_lists
        1
        >>> blocks = torch.zeros(2, 8, 16, dtype=torch.int32)  # of 2 tokens, a list of 16 blocks for each of 8 KV heads
        >>> quire.ChosenKeys(blocks, block_size=128).width
        16
        >>> counted = torch.tensor([[4, 9, 0, 2], [5, 0, 0, 1]], dtype=torch.int32)  # the last column counts
        >>> quire.ChosenKeys(counted[:, :-1], counted[:, -1]).lens.tolist()
        [2, 1]
    """

    indices: torch.Tensor
    lens: torch.Tensor | None = None
    block_size: int = 1
    are_slots: bool = False
    num_tokens: int = field(init=False)
    num_lists: int = field(init=False)
    width: int = field(init=False)

    def __post_init__(self) -> None:
        indices = check_tensor("indices", self.indices, "pass the lists that the indexer wrote")
        if indices.dtype is not torch.int32:
            raise TypeError(f"indices must be int32, got {indices.dtype}; convert them once for all layers")
        if indices.dim() not in (2, 3) or (indices.dim() == 3 and indices.shape[1] == 0):
            raise ValueError(
                f"indices must be [num_tokens, width] or [num_tokens, num_kv_heads, width], got {describe(indices)}; "
                "transpose lists that have the heads first"
            )
        if indices.shape[-1] > 1 and indices.stride(-1) != 1:
            raise ValueError(
                f"indices must have a contiguous last dimension, got strides {indices.stride()}; copy them once"
            )
        num_tokens, num_lists = indices.shape[0], indices.shape[1] if indices.dim() == 3 else 1
        if self.lens is not None:
            lens = check_tensor("lens", self.lens, "pass how many entries of each list count")
            if lens.dtype is not torch.int32:
                raise TypeError(f"lens must be int32, got {lens.dtype}; convert them once for all layers")
            served = [(num_tokens,), (num_tokens, num_lists)] if indices.dim() == 3 else [(num_tokens,)]
            if lens.shape not in served:
                raise ValueError(
                    f"lens must be {' or '.join(str(list(shape)) for shape in served)}, as there are lists, "
                    f"got {list(lens.shape)}; give each list one"
                )
            if lens.device != indices.device:
                raise ValueError(f"lens must be on indices' device {indices.device}, got {lens.device}; move them")
        advice = "1 for lists of tokens"
        size = check_integer("block_size", self.block_size, advice, 1, MOST_POSITIONS)
        check_flag("are_slots", self.are_slots, "say whether entries are slots of the cache")
        values = {"block_size": size, "num_tokens": num_tokens, "num_lists": num_lists, "width": indices.shape[-1]}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def kind(self) -> tuple[int, bool, bool, int]:
        """What a launch is decided for: `block_size`, `are_slots`, whether there are `lens`, and `width`."""
        return self.block_size, self.are_slots, self.lens is not None, self.width

    def __repr__(self) -> str:
        return shown(self, *(field.name for field in fields(self) if field.init))

    def __str__(self) -> str:
        what = "tokens" if self.block_size == 1 else f"blocks of {self.block_size}"
        return f"lists of at most {self.width} {what}{', as slots' if self.are_slots else ''}"


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """Describe which queries and which pages each sequence of a step owns.

    Sequence `s` owns query tokens `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]` and the first `seq_lens[s]` keys of its
    pages. Its queries are the last of its tokens (bottom-right alignment), unless `query_offsets` says otherwise.
    A padding row has `seq_lens` 0. Table entries past a sequence's end are never read and may hold anything
    (-1 by custom), and so may all entries of a sequence without queries.

    Args:
        page_table: page numbers in order: [num_seqs, max_pages_per_seq] int32 (or int64) with a contiguous last
            dimension, or, with `cu_pages`, the rows of all sequences concatenated: [num_entries].
        seq_lens: [num_seqs] int32, keys per sequence, the step's new tokens included.
        cu_seqlens_q: [num_seqs + 1] int32, cumulative query counts, starting at 0. Left out, every sequence has exactly
            one query, and token `s` is sequence `s`'s; for pure decode this is a little faster.
        cu_pages: [num_seqs + 1] or [num_seqs] int32, where each sequence's pages begin in a flat `page_table`.
        query_offsets: [num_seqs] int32, position of each sequence's first query among its keys;
            `seq_lens - query_lens` when not given.
        paged: False for a cache of layout "THD" (`Batch.varlen`): `page_table` is [num_seqs, 1] and holds the token at
            which each sequence's keys begin.
        key_begin: [num_tokens] int32, the first key that each query token sees, as a position in its sequence. With
            `key_end`, it takes the place of the spec's `causal` (`quire.intervals` makes both). There may be more
            entries than tokens.
        key_end: [num_tokens] int32, the key after the last one. A token with `key_begin >= key_end` sees none. What
            is outside of the sequence is left out. All keys of a sequence from the least `key_begin` to the greatest
            `key_end` must be in its pages and finite, whether or not a token sees them.
        tree_bits: [num_tokens] int64, for drafts that branch: bit j says that the token sees draft j, the j-th query
            of its sequence. It sees all keys before the drafts too, or those from `key_begin` on, where a model has
            a window. A token's own bit is not implied. All drafts must be in the pages and finite. A sequence has at
            most 64. `quire.draft_trees` makes the words.
        chosen: `ChosenKeys`, for models that choose the keys that each query token sees. A list takes the place of
            intervals, trees and windows. Only keys that are named must be in the pages and finite.
        extra_chosen: lists of further keys in a second cache, which `attention` takes as `extra_cache`. Both lists of a
            token share one softmax, as the window and the compressed keys of DeepSeek V4 do. Its entries are slots,
            and the spec is of latents.

    Attributes:
        num_seqs: sequences in the batch, padding rows included.
        table_width: entries of a row of `page_table`; None where it is flat.
        device: where the tensors are.
        max_tokens: entries of `key_begin` or `tree_bits`, or lists of `chosen`; None without them.
        per_token: which of these the batch has, by name; None without them.

    Raises:
        TypeError: an argument is not a tensor of the dtype above.
        ValueError: shapes, strides or devices do not fit together.
        UnsupportedError: chosen keys without pages.

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
    key_begin: torch.Tensor | None = None
    key_end: torch.Tensor | None = None
    tree_bits: torch.Tensor | None = None
    chosen: ChosenKeys | None = None
    extra_chosen: ChosenKeys | None = None
    num_seqs: int = field(init=False, repr=False)
    table_width: int | None = field(init=False, repr=False)
    max_tokens: int | None = field(init=False, repr=False)
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
        max_tokens = self._check_intervals(table.device, num_seqs)
        if self.chosen is not None:
            max_tokens = self._check_chosen("chosen", self.chosen, table.device, num_seqs)
        if self.extra_chosen is not None:
            max_tokens = self._check_extra(self.extra_chosen, table.device, num_seqs)
        object.__setattr__(self, "max_tokens", max_tokens)
        object.__setattr__(self, "num_seqs", num_seqs)
        object.__setattr__(self, "table_width", table.shape[1] if self.cu_pages is None else None)
        object.__setattr__(self, "device", table.device)

    def _check_intervals(self, device: torch.device, num_seqs: int) -> int | None:
        """Return the entries of `key_begin`, `key_end` and `tree_bits`; None without them."""
        if (self.key_begin is None) != (self.key_end is None) and self.tree_bits is None:
            given, missing = ("key_end", "key_begin") if self.key_begin is None else ("key_begin", "key_end")
            raise ValueError(f"{missing} must be given with {given}, got None; an interval has two ends")
        if self.key_end is not None and self.tree_bits is not None:
            raise ValueError(
                f"key_end must be left out where tree_bits are given, got {describe(self.key_end)}; "
                "the bits say which drafts are seen"
            )
        max_tokens = None
        for name, dtype in (("key_begin", torch.int32), ("key_end", torch.int32), ("tree_bits", torch.int64)):
            value = getattr(self, name)
            if value is None:
                continue
            length = check_vector(name, value, dtype).shape[0]
            if max_tokens is not None and length != max_tokens:
                raise ValueError(f"{name} must have key_begin's {max_tokens} entries, got {length}; one for each token")
            if self.cu_seqlens_q is None and length < num_seqs:
                raise ValueError(
                    f"{name} must have an entry for each of {num_seqs} sequences, got {length}; "
                    "a batch without cu_seqlens_q has one query each"
                )
            if value.device != device:
                raise ValueError(f"{name} must be on page_table's device {device}, got {value.device}; move it")
            max_tokens = length
        return max_tokens

    def _check_extra(self, extra: ChosenKeys, device: torch.device, num_seqs: int) -> int:
        """Return the number of lists of both `chosen` and `extra_chosen`."""
        num_tokens = self._check_chosen("extra_chosen", extra, device, num_seqs)
        if self.chosen is None:
            raise ValueError("chosen must be given with extra_chosen, got None; pass the only lists as chosen")
        if not extra.are_slots:
            raise ValueError(
                "extra_chosen must have are_slots=True, got lists of positions; the second cache has no page table"
            )
        return min(num_tokens, self.chosen.num_tokens)

    def _check_chosen(self, argument: str, chosen: ChosenKeys, device: torch.device, num_seqs: int) -> int:
        """Return the number of lists of `chosen` or `extra_chosen`, as `argument` says."""
        if not isinstance(chosen, ChosenKeys):
            raise TypeError(f"{argument} must be ChosenKeys, got {describe(chosen)}; call quire.ChosenKeys(indices)")
        for name in ("key_begin", "key_end", "tree_bits"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} must be left out where chosen is given, got {describe(getattr(self, name))}; "
                    "leave keys that are not seen out of the lists"
                )
        if not self.paged:
            raise UnsupportedError(
                "chosen must be left out where paged=False, got some; give keys a page table: a tensor of tokens is "
                "pages of one token"
            )
        if chosen.indices.device != device:
            raise ValueError(
                f"{argument} must be on page_table's device {device}, got indices on {chosen.indices.device}; move them"
            )
        if self.cu_seqlens_q is None and chosen.num_tokens < num_seqs:
            raise ValueError(
                f"{argument} must have a row for each of {num_seqs} sequences, got {chosen.num_tokens}; "
                "a batch without cu_seqlens_q has one query each"
            )
        return chosen.num_tokens

    def __repr__(self) -> str:
        return shown(self, *(field.name for field in fields(self) if field.init))

    @property
    def per_token(self) -> str | None:
        """The argument that says which keys each token sees: "chosen", "tree_bits" or "key_begin"; None if none."""
        names = ("chosen", "tree_bits", "key_begin")
        return next((name for name in names if getattr(self, name) is not None), None)

    @property
    def query_starts(self) -> torch.Tensor:
        """`cu_seqlens_q`, also where it was left out."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q
        return torch.arange(self.num_seqs + 1, dtype=torch.int32, device=self.device)

    @classmethod
    def varlen(
        cls,
        cu_seqlens_q: torch.Tensor | None,
        cu_seqlens_k: torch.Tensor,
        *,
        key_begin: torch.Tensor | None = None,
        key_end: torch.Tensor | None = None,
        tree_bits: torch.Tensor | None = None,
    ) -> "Batch":
        """Describe sequences whose keys are concatenated, for `varlen_attention`.

        Each sequence is one page that begins at its first token, so the paged kernels serve it unchanged.

        `page_table` is a view of `cu_seqlens_k`, and `seq_lens` is a new tensor. If you change `cu_seqlens_k` in place,
        for example for a captured graph, call `torch.sub(cu_seqlens_k[1:], cu_seqlens_k[:-1], out=batch.seq_lens)` too.

        Args:
            cu_seqlens_q: [num_seqs + 1] int32, cumulative query counts; None where every sequence has one query.
            cu_seqlens_k: [num_seqs + 1] int32, cumulative key counts.
            key_begin: as for `Batch`.
            key_end: as for `Batch`.
            tree_bits: as for `Batch`.

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
        lengths = cu_seqlens_k[:-1, None], cu_seqlens_k.diff(), cu_seqlens_q
        return cls(*lengths, paged=False, key_begin=key_begin, key_end=key_end, tree_bits=tree_bits)


def check_vector(name: str, value: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return a tensor, or raise unless it is contiguous, of one dimension and of a dtype."""
    vector = check_tensor(name, value, "build it once per step")
    if vector.dtype != dtype:
        wanted = str(dtype).removeprefix("torch.")
        raise TypeError(f"{name} must be {wanted}, got {vector.dtype}; convert it once per step")
    if vector.dim() != 1 or not vector.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous with one dimension, got {describe(vector)} "
            f"with strides {vector.stride()}; flatten it"
        )
    return vector
