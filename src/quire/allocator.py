"""`PageAllocator`: pages without an engine. Plain Python on the host; it never touches the cache's memory.

Sequences share pages by reference count. A forked sequence shares all of its parent's pages until it grows into one
that is partly filled and shared: that page is copied first (copy on write), and the allocator says which copy to make.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.cache_layout import MAX_PAGES
from quire.errors import OutOfPagesError, check_device, check_integer, describe
from quire.spec import UNBOUNDED


@dataclass(eq=False)
class PageSequence:
    """One sequence's pages, in order, and how many tokens they hold. Made and changed by its allocator."""

    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0


class PageAllocator:
    """Hand out pages of a pool of `num_pages`.

    Args:
        num_pages: pages in the cache, at least 1.
        page_size: tokens per page, at least 1.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is out of range.

    Examples:
        >>> pool = quire.PageAllocator(num_pages=8, page_size=4)
        >>> prompt = pool.allocate(6)
        >>> pool.page_table([prompt]).tolist(), pool.slot_mapping(prompt, num_tokens=6).tolist()
        ([[0, 1]], [0, 1, 2, 3, 4, 5])
        >>> twin = pool.fork(prompt)  # shares both pages
        >>> pool.grow(twin, 1)  # copy page 1 to page 2 before the new token is written
        [(1, 2)]
        >>> pool.free(prompt)
        >>> pool.num_free_pages
        6
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        num_pages = check_integer("num_pages", num_pages, "size the pool as the cache", 1, MAX_PAGES)
        self.page_size = check_integer("page_size", page_size, "size the pool as the cache", 1, UNBOUNDED - 1)
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self._held: set[PageSequence] = set()

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def allocate(self, num_tokens: int = 0) -> PageSequence:
        """Return a new sequence with room for `num_tokens` tokens.

        Raises:
            TypeError: num_tokens is not an integer.
            ValueError: num_tokens is negative.
            OutOfPagesError: there are too few free pages; nothing was changed.
        """
        sequence = PageSequence()
        self._extend(sequence, num_tokens)
        self._held.add(sequence)
        return sequence

    def grow(self, sequence: PageSequence, num_tokens: int) -> list[tuple[int, int]]:
        """Add `num_tokens` tokens to a sequence.

        Returns:
            (source page, destination page) copies to make with `quire.copy_pages` before the new tokens are written:
            at most one.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: num_tokens is negative, or the sequence was freed or is another allocator's.
            OutOfPagesError: there are too few free pages; nothing was changed.
        """
        self._check_held(sequence)
        return self._extend(sequence, num_tokens)

    def fork(self, sequence: PageSequence) -> PageSequence:
        """Return a new sequence with the same tokens that shares every page; no page is taken or copied.

        Raises:
            TypeError: the sequence is not a PageSequence.
            ValueError: the sequence was freed or is another allocator's.
        """
        self._check_held(sequence)
        for page in sequence.pages:
            self._owners[page] += 1
        twin = PageSequence(list(sequence.pages), sequence.num_tokens)
        self._held.add(twin)
        return twin

    def free(self, sequence: PageSequence) -> None:
        """Release a sequence's pages; those that other sequences hold stay allocated. The sequence becomes unusable.

        Raises:
            TypeError: the sequence is not a PageSequence.
            ValueError: the sequence was freed before or is another allocator's.
        """
        self._check_held(sequence)
        self._held.remove(sequence)
        for page in reversed(sequence.pages):
            self._owners[page] -= 1
            if self._owners[page] == 0:
                self._free.append(page)
        sequence.pages, sequence.num_tokens = [], 0

    def page_table(
        self, sequences: Iterable[PageSequence], width: int | None = None, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return the table of a batch, [num_seqs, width] int32, -1 past each sequence's pages.

        Args:
            sequences: of this allocator.
            width: columns; as many as the longest sequence needs, and one at least, when not given.
            device: where; torch's default device when not given.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: a sequence has more pages than `width`, was freed, or is another allocator's.
        """
        if isinstance(sequences, str | torch.Tensor) or not isinstance(sequences, Iterable):
            raise TypeError(f"sequences must be a list of sequences, got {describe(sequences)}; put one in a list")
        held = [self._check_held(sequence) for sequence in sequences]
        needed = max((len(s.pages) for s in held), default=0)
        if width is None:
            width = max(needed, 1)
        width = check_integer("width", width, "a sequence has no more pages than keys", 0, UNBOUNDED)
        if needed > width:
            raise ValueError(f"width must be at least {needed}, got {width}; a sequence has that many pages")
        device = check_device("device", device, "leave it out for the default device")
        table = torch.full((len(held), width), -1, dtype=torch.int32)
        for row, sequence in zip(table, held, strict=True):
            row[: len(sequence.pages)] = torch.tensor(sequence.pages, dtype=torch.int32)
        return table.to(device or torch.get_default_device())

    def slot_mapping(
        self, sequence: PageSequence, num_tokens: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return the slots of a sequence's last `num_tokens` tokens, [num_tokens] int64, for `quire.write_kv`.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: the sequence is shorter, was freed, or is another allocator's.
        """
        end = self._check_held(sequence).num_tokens
        num_tokens = check_integer("num_tokens", num_tokens, "grow the sequence first", 0, end)
        device = check_device("device", device, "leave it out for the default device")
        size = self.page_size
        slots = [sequence.pages[i // size] * size + i % size for i in range(end - num_tokens, end)]
        return torch.tensor(slots, dtype=torch.int64, device=device)

    def _extend(self, sequence: PageSequence, num_tokens: int) -> list[tuple[int, int]]:
        num_tokens = check_integer(
            "num_tokens", num_tokens, "to shrink a sequence, free it and allocate a shorter one", 0
        )
        total = sequence.num_tokens + num_tokens
        fresh = -(-total // self.page_size) - len(sequence.pages)
        shared_tail = (
            num_tokens > 0 and sequence.num_tokens % self.page_size > 0 and self._owners[sequence.pages[-1]] > 1
        )
        if fresh + shared_tail > len(self._free):
            raise OutOfPagesError(
                f"free pages must be at least {fresh + shared_tail} to grow to {total} tokens, got {len(self._free)}; "
                "free or preempt a sequence"
            )
        copies = []
        if shared_tail:
            copies = [(sequence.pages[-1], self._take())]
            self._owners[copies[0][0]] -= 1
            sequence.pages[-1] = copies[0][1]
        sequence.pages += [self._take() for _ in range(fresh)]
        sequence.num_tokens = total
        return copies

    def _take(self) -> int:
        page = self._free.pop()
        self._owners[page] = 1
        return page

    def _check_held(self, sequence: Any) -> PageSequence:
        if not isinstance(sequence, PageSequence):
            raise TypeError(
                f"sequence must be a PageSequence, got {describe(sequence)}; the allocator's `allocate` returns one"
            )
        if sequence not in self._held:
            raise ValueError(
                "sequence must be one that this allocator holds, got one that was freed or is another's; "
                "allocate or fork it here"
            )
        return sequence
