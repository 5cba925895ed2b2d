"""`PageAllocator`: pages for those who have no engine. Plain Python on the host; it never touches the cache's memory.

Sequences share pages by reference count. A forked sequence shares all of its parent's pages until it grows into one that is partly filled and
shared: that page is copied first (copy on write), and the allocator says which copy to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from quire.errors import OutOfPagesError


@dataclass(eq=False)
class PageSequence:
    """One sequence's pages, in order, and how many tokens they hold. Made and changed by its allocator."""

    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0


class PageAllocator:
    """Hand out pages of a pool of `num_pages`.

    Args:
        num_pages: pages in the cache.
        page_size: tokens per page.

    Raises:
        ValueError: a size is not positive.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}; size the pool as the cache"
            )
        self.page_size = page_size
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
            (source page, destination page) copies to make with `quire.copy_pages` before the new tokens are written: at most one.

        Raises:
            ValueError: num_tokens is negative, or the sequence was freed or is another allocator's.
            OutOfPagesError: there are too few free pages; nothing was changed.
        """
        self._check_held(sequence)
        return self._extend(sequence, num_tokens)

    def fork(self, sequence: PageSequence) -> PageSequence:
        """Return a new sequence with the same tokens that shares every page; no page is taken or copied.

        Raises:
            ValueError: the sequence was freed or is another allocator's.
        """
        self._check_held(sequence)
        for page in sequence.pages:
            self._owners[page] += 1
        twin = PageSequence(list(sequence.pages), sequence.num_tokens)
        self._held.add(twin)
        return twin

    def free(self, sequence: PageSequence) -> None:
        """Give a sequence's pages back; those that others share stay theirs. The sequence is of no more use.

        Raises:
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
        self, sequences: Sequence[PageSequence], width: int | None = None, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return the table of a batch, [num_seqs, width] int32, -1 past each sequence's pages; as wide as the longest needs when not given.

        Raises:
            ValueError: a sequence has more pages than `width`, was freed, or is another allocator's.
        """
        for sequence in sequences:
            self._check_held(sequence)
        needed = max((len(s.pages) for s in sequences), default=0)
        width = max(needed, 1) if width is None else width
        if needed > width:
            raise ValueError(f"width must be at least {needed}, got {width}; a sequence has that many pages")
        rows = [s.pages + [-1] * (width - len(s.pages)) for s in sequences]
        return torch.tensor(rows, dtype=torch.int32, device=device).reshape(len(rows), width)

    def slot_mapping(
        self, sequence: PageSequence, num_tokens: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return the slots of a sequence's last `num_tokens` tokens, [num_tokens] int64, for `quire.write_kv`.

        Raises:
            ValueError: the sequence is shorter, was freed, or is another allocator's.
        """
        self._check_held(sequence)
        if not 0 <= num_tokens <= sequence.num_tokens:
            raise ValueError(
                f"num_tokens must be from 0 to the sequence's {sequence.num_tokens}, got {num_tokens}; grow it first"
            )
        positions = range(sequence.num_tokens - num_tokens, sequence.num_tokens)
        size = self.page_size
        return torch.tensor(
            [sequence.pages[p // size] * size + p % size for p in positions], dtype=torch.int64, device=device
        )

    def _extend(self, sequence: PageSequence, num_tokens: int) -> list[tuple[int, int]]:
        if num_tokens < 0:
            raise ValueError(
                f"num_tokens must be at least 0, got {num_tokens}; free the sequence and allocate a shorter one"
            )
        total = sequence.num_tokens + num_tokens
        fresh = -(-total // self.page_size) - len(sequence.pages)
        shared_tail = (
            num_tokens > 0 and sequence.num_tokens % self.page_size > 0 and self._owners[sequence.pages[-1]] > 1
        )
        if fresh + shared_tail > len(self._free):
            raise OutOfPagesError(
                f"free pages must be at least {fresh + shared_tail} to grow to {total} tokens, got {len(self._free)}; free or preempt a sequence"
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

    def _check_held(self, sequence: PageSequence) -> None:
        if sequence not in self._held:
            raise ValueError(
                "sequence must be one that this allocator holds, got one that was freed or is another's; allocate or fork it here"
            )
