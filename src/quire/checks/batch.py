"""Check the contents of a batch's tensors: lengths, offsets and page numbers.

`quire.attention` runs `check_reads` on CPU tensors, where reading them is cheap. On a GPU it does not, since the check
copies to the host and waits: call `quire.testing.check_batch` there to debug.
"""

from collections.abc import Sequence

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.chosen import entries_of, keys_of, page_table_at
from quire.intervals import locate
from quire.spec import AttentionSpec


def check_batch(batch: Batch, cache: PagedKVCache, *, shared_pages: bool = True, writes: bool = True) -> None:
    """Check lengths, page numbers, intervals and chosen keys, and that no two sequences write to one page.

    Sequences are taken to write their last keys, as many as they have queries. A batch with `query_offsets`, or whose
    keys are not paged, is not taken to write.

    This copies to the host and waits: use it to debug, not in a serving loop.

    Args:
        batch: the sequences.
        cache: the pages that they index.
        shared_pages: allow sequences to share pages that none of them writes in this step (a common prefix).
        writes: whether the step writes the last keys. False where they are elsewhere, as on most ranks that share
            contexts.

    Raises:
        ValueError: a contract is broken; the message names the sequence and the value.
    """
    check_reads(batch, cache)
    if writes and batch.paged and batch.query_offsets is None:
        check_writers(batch, cache, shared_pages)
    check_intervals(batch)


def check_reads(
    batch: Batch,
    cache: PagedKVCache,
    spec: AttentionSpec | None = None,
    *,
    num_tokens: int | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
) -> None:
    """Check that every query and every key that attention reads exists.

    Args:
        batch: the sequences.
        cache: the pages that they index.
        spec: what is computed; only pages that hold a key which some query sees are checked. Without it, all pages of
            each sequence with queries are.
        num_tokens: rows of q.
        max_query_len: the plan's bound on queries per sequence.
        max_seq_len: the plan's bound on keys per sequence.

    Raises:
        ValueError: a contract is broken; the message names the sequence and the value.
    """
    query_starts, seq_lens = batch.query_starts.cpu().long(), batch.seq_lens.cpu().long()
    query_lens = query_starts.diff()
    if int(query_starts[0]) != 0 or bool((query_lens < 0).any()):
        raise ValueError(
            f"cu_seqlens_q must start at 0 and not decrease, got {query_starts.tolist()}; build it with cumsum"
        )
    if num_tokens is not None and int(query_starts[-1]) > num_tokens:
        raise ValueError(
            f"q must have the {int(query_starts[-1])} tokens that cu_seqlens_q counts, got {num_tokens}; "
            "pass all tokens of the step"
        )
    seq = first_true(seq_lens < 0)
    if seq is not None:
        length = int(seq_lens[seq])
        raise ValueError(f"seq_lens must be at least 0, got {length} for sequence {seq}; a padding row has 0")
    for name, lens, bound in (("max_query_len", query_lens, max_query_len), ("max_seq_len", seq_lens, max_seq_len)):
        seq = None if bound is None else first_true(lens > bound)
        if seq is not None:
            raise ValueError(
                f"{name} must bound every sequence, got {bound} for a batch whose sequence {seq} has {int(lens[seq])}; "
                "plan with the true bound"
            )
    if batch.chosen is not None:
        check_chosen(batch, cache, causal=spec is not None and spec.causal)
    else:
        check_pages(batch, cache, *visible_span(batch, spec, query_lens, seq_lens))


def check_chosen(batch: Batch, cache: PagedKVCache, *, causal: bool, argument: str = "chosen") -> None:
    """Check lists of chosen keys: their lengths, that no entry repeats, and that each key that is seen has a slot.

    Args:
        batch: the sequences, with `chosen`.
        cache: the pages.
        causal: whether a token sees no key after itself.
        argument: what the lists are called.
    """
    chosen, num_tokens = batch.chosen, int(batch.query_starts[-1])
    assert chosen is not None
    if num_tokens > chosen.num_tokens:
        raise ValueError(
            f"{argument} must have a row for each of {num_tokens} tokens, got {chosen.num_tokens}; add rows"
        )
    if chosen.lens is not None:
        lens = chosen.lens[:num_tokens].cpu()
        token = first_true(((lens < 0) | (lens > chosen.width)).view(num_tokens, -1).any(1)) if num_tokens else None
        if token is not None:
            raise ValueError(
                f"lens must be from 0 to the lists' {chosen.width} entries, got {lens[token].tolist()} for token "
                f"{token}; count entries, not keys"
            )
    tokens, num_slots = locate(batch, num_tokens), cache.num_pages * cache.page_size
    size, table = cache.page_size, batch.page_table
    for first in range(0, num_tokens, step := tokens_at_once(chosen.num_lists * chosen.width * chosen.block_size)):
        rows = slice(first, min(first + step, num_tokens))
        entries = entries_of(chosen, rows).sort(-1).values
        twice = (entries.diff() == 0) & (entries[..., 1:] >= 0)
        if bool(twice.any()):
            token, which, at = twice.nonzero()[0].tolist()
            raise ValueError(
                f"{argument} must name no entry twice in a list, got {int(entries[token, which, at])} twice for token "
                f"{first + token}; a key counts once"
            )
        key, seen = keys_of(chosen, tokens, rows, causal=causal)
        if chosen.are_slots:
            wrong, what = seen & (key >= num_slots), f"slots below num_pages * page_size = {num_slots}"
            token = first_true(wrong.flatten(1).any(1))
            if token is not None:
                raise ValueError(
                    f"{argument} must name {what}, got {int(key[token][wrong[token]][0])} for token {first + token}; "
                    "pass -1 for no slot"
                )
            continue
        entry, seq = key // size, tokens.seq[rows, None, None]
        begin, width = torch.zeros_like(seq), table.shape[-1]
        if batch.cu_pages is not None:
            begin = batch.cu_pages[seq].long()
        outside = seen & ((begin < 0) | (begin + entry >= width))
        token = first_true(outside.flatten(1).any(1))
        if token is not None:
            where = int(seq[token, 0, 0])
            raise ValueError(
                f"page_table must cover sequence {where}'s chosen keys, got {width} entries of pages of {size} for key "
                f"{int(key[token][outside[token]][0])} of token {first + token}; widen it"
            )
        page = page_table_at(batch, seq, entry, seen)
        wrong = seen & ((page < 0) | (page >= cache.num_pages))
        token = first_true(wrong.flatten(1).any(1))
        if token is not None:
            raise ValueError(
                f"page_table must hold pages 0 to {cache.num_pages - 1}, got {int(page[token][wrong[token]][0])} for "
                f"sequence {int(seq[token, 0, 0])}; allocate the page first"
            )


def tokens_at_once(numbers_per_token: int) -> int:
    """Return for how many tokens a step is computed at once, so that its tensors have at most 2^24 numbers."""
    return max(1, (1 << 24) // max(1, numbers_per_token))


def visible_span(
    batch: Batch, spec: AttentionSpec | None, query_lens: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each sequence's first key that some query sees and the first key after the last one, both [num_seqs].

    Both are 0 where no query sees a key.
    """
    if spec is None:
        return torch.zeros_like(seq_lens), torch.where(query_lens > 0, seq_lens, 0)
    if batch.max_tokens is not None:
        return interval_span(batch, query_lens, seq_lens)
    first = seq_lens - query_lens if batch.query_offsets is None else batch.query_offsets.cpu().long()
    window_left, window_right = spec.window
    start = (first - window_left).clamp(min=0)
    stop = torch.minimum(seq_lens, first + query_lens + window_right)
    sees = (query_lens > 0) & (start < stop)
    return torch.where(sees, start, 0), torch.where(sees, stop, 0)


def interval_span(batch: Batch, query_lens: torch.Tensor, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `visible_span` does, for a batch with intervals or trees."""
    owner = torch.repeat_interleave(query_lens)  # sequence of each token
    num_tokens = owner.shape[0]
    first = seq_lens - query_lens if batch.query_offsets is None else batch.query_offsets.cpu().long()
    begin = torch.zeros(num_tokens, dtype=torch.int64, device="cpu")
    if batch.key_begin is not None:
        begin = batch.key_begin[:num_tokens].cpu().long().clamp(min=0)
    if batch.key_end is not None:
        end = torch.minimum(batch.key_end[:num_tokens].cpu().long(), seq_lens[owner])
        begin, end, owner = begin[begin < end], end[begin < end], owner[begin < end]
    else:  # of a tree: all its drafts
        begin = torch.minimum(begin, first[owner]).clamp(min=0)
        end = torch.minimum(first + query_lens, seq_lens)[owner]
    stop = torch.zeros_like(seq_lens).scatter_reduce(0, owner, end, "amax")
    return torch.minimum(seq_lens.scatter_reduce(0, owner, begin, "amin"), stop), stop


def check_intervals(batch: Batch) -> None:
    """Check that intervals and lists are within their sequences, and that trees name drafts only.

    Call it after `check_reads`.
    """
    starts, seq_lens = batch.query_starts.tolist(), batch.seq_lens.tolist()
    if batch.chosen is not None and not batch.chosen.are_slots:
        for seq, kv_len in enumerate(seq_lens):
            entries = entries_of(batch.chosen, slice(starts[seq], starts[seq + 1])).flatten(1)
            token = first_true((entries.long() * batch.chosen.block_size >= kv_len).any(1) & (kv_len > 0))
            if token is not None:
                raise ValueError(
                    f"chosen must name keys of the sequence's {kv_len}, got entry {int(entries[token].max())} of "
                    f"{batch.chosen.block_size} for token {starts[seq] + token} of sequence {seq}; "
                    "what is outside is not seen"
                )
    for seq, kv_len in enumerate(seq_lens):
        rows = slice(starts[seq], starts[seq + 1])
        for name, ends in (("key_begin", batch.key_begin), ("key_end", batch.key_end)):
            token = None if ends is None else first_true((ends[rows] < 0) | (ends[rows] > kv_len))
            if ends is not None and token is not None:
                raise ValueError(
                    f"{name} must be from 0 to the sequence's {kv_len} keys, got {int(ends[rows][token])} for token "
                    f"{rows.start + token} of sequence {seq}; what is outside is not seen"
                )
        q_len = rows.stop - rows.start
        if batch.tree_bits is not None and q_len < 64:
            token = first_true((batch.tree_bits[rows] >> q_len) != 0)
            if token is not None:
                raise ValueError(
                    f"tree_bits must name the sequence's {q_len} drafts, got {int(batch.tree_bits[rows][token]):#x} "
                    f"for token {rows.start + token} of sequence {seq}; bit j is its j-th query"
                )


def check_pages(batch: Batch, cache: PagedKVCache, start: torch.Tensor, stop: torch.Tensor) -> None:
    """Check the page table's entries for the keys from `start` to `stop` of each sequence, both [num_seqs] int64."""
    table, size = batch.page_table.cpu().long(), cache.page_size
    if batch.cu_pages is None:
        seq = first_true(-(-batch.seq_lens.cpu().long() // size) > table.shape[1])
        if seq is not None:
            raise ValueError(
                f"page_table must cover sequence {seq}'s {int(batch.seq_lens[seq])} keys, "
                f"got {table.shape[1]} pages of {size}; widen it"
            )
        run_starts = torch.arange(batch.num_seqs, device="cpu") * table.shape[1]
        table = table.flatten()
    else:
        run_starts = batch.cu_pages[: batch.num_seqs].cpu().long()
        seq = first_true((stop > 0) & ((run_starts < 0) | (run_starts + -(-stop // size) > table.shape[0])))
        if seq is not None:
            raise ValueError(
                f"cu_pages must give sequence {seq} a run for {int(stop[seq])} keys in page_table's {table.shape[0]} "
                f"entries, got one from {int(run_starts[seq])} with pages of {size}; append its pages to the table"
            )
    # The entries in use, one row of indices after the other.
    first_entry = start // size
    num_entries = torch.where(stop > start, -(-stop // size) - first_entry, 0)
    owner = torch.repeat_interleave(num_entries)
    row_begin = num_entries.cumsum(0) - num_entries
    entries = (run_starts + first_entry - row_begin)[owner] + torch.arange(owner.shape[0], device="cpu")
    pages = table[entries]
    if cache.layout == "THD":  # a sequence is one page that begins at its first token
        bad = first_true((pages < 0) | (pages + stop[owner] > cache.num_pages))
        if bad is not None:
            begin, end = int(pages[bad]), int(pages[bad] + stop[owner[bad]])
            raise ValueError(
                f"cu_seqlens_k must be within k's {cache.num_pages} tokens, got keys {begin} to {end} for sequence "
                f"{int(owner[bad])}; pass all tokens of k"
            )
        return
    bad = first_true((pages < 0) | (pages >= cache.num_pages))
    if bad is not None:
        raise ValueError(
            f"page_table must hold pages 0 to {cache.num_pages - 1}, got {int(pages[bad])} for sequence "
            f"{int(owner[bad])}; allocate the page first"
        )


def check_writers(batch: Batch, cache: PagedKVCache, shared_pages: bool) -> None:
    """Check that seq_lens include each sequence's new tokens, and that their pages are in no other sequence.

    Call it after `check_reads`.
    """
    starts, table = batch.query_starts.tolist(), batch.page_table.cpu()
    run_starts = None if batch.cu_pages is None else batch.cu_pages.tolist()
    writers: dict[int, int] = {}
    readers: dict[int, int] = {}
    for seq, kv_len in enumerate(batch.seq_lens.tolist()):
        q_len = starts[seq + 1] - starts[seq]
        if 0 < kv_len < q_len:
            raise ValueError(
                f"seq_lens must include the new tokens, got {kv_len} keys for {q_len} queries of sequence {seq}; "
                "add the step's tokens"
            )
        row = table[seq] if run_starts is None else table[run_starts[seq] :]
        pages = row[: -(-kv_len // cache.page_size) if q_len else 0].tolist()
        first_written = max(kv_len - q_len, 0) // cache.page_size
        for i, page in enumerate(pages):
            writes = i >= first_written and q_len > 0
            other = writers.get(page, readers.get(page, seq) if writes or not shared_pages else seq)
            if other != seq:
                raise ValueError(
                    f"page_table must give a page that is written to one sequence, got page {page} in sequences "
                    f"{other} and {seq}; copy it first (`quire.copy_pages`)"
                )
            (writers if writes else readers)[page] = seq


def check_slots(batch: Batch, cache: PagedKVCache, slot_mapping: torch.Tensor) -> None:
    """Check that new tokens are written where the page table has their positions. Call it after `check_reads`.

    Args:
        batch: the sequences.
        cache: the pages.
        slot_mapping: [num_tokens] int64, the slot of each token; negative ones are left out.

    Raises:
        ValueError: a slot is elsewhere, or two tokens have it; the message names the token and the value.
    """
    tokens, size = locate(batch, slot_mapping.shape[0]), cache.page_size
    written = slot_mapping >= 0
    token = first_true(written & ~tokens.owned)
    if token is not None:
        raise ValueError(
            f"slot_mapping must be negative for tokens of no sequence, got {int(slot_mapping[token])} for token "
            f"{token}; pass -1"
        )
    written &= (tokens.position >= 0) & (tokens.position < tokens.seq_len)  # others are never read
    seq, position = tokens.seq[written], tokens.position[written]
    if batch.cu_pages is None:
        page = batch.page_table[seq, position // size]
    else:
        page = batch.page_table[batch.cu_pages[seq].long() + position // size]
    slots, token = slot_mapping[written], written.nonzero()[:, 0]
    wrong = first_true(slots != page * size + position % size)
    if wrong is not None and batch.query_offsets is None:  # which say what queries see, not where they are
        raise ValueError(
            f"slot_mapping must have slots of the page table, got {int(slots[wrong])} for token {int(token[wrong])}, "
            f"whose sequence {int(seq[wrong])} has page {int(page[wrong])} at position {int(position[wrong])}; "
            "write the token where it is read"
        )
    slots, order = slots.sort(stable=True)
    twice = first_true(slots.diff() == 0)
    if twice is not None:
        raise ValueError(
            f"slot_mapping must have each slot once, got {int(slots[twice])} for tokens {int(token[order[twice]])} and "
            f"{int(token[order[twice + 1]])}; copy a page before two sequences write to it"
        )


def check_shared_pages(batch: Batch, page_size: int, levels: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Check that sequences have the pages in common that a plan says they share, and queries after these.

    Call it after `check_reads`.

    Args:
        batch: the sequences, with a rectangular page table.
        page_size: tokens per page.
        levels: the runs of each level, (num_seqs, num_keys); the numbers of keys are multiples of `page_size`.

    Raises:
        ValueError: a contract is broken; the message names the sequence and the value.
    """
    table, ends = batch.page_table.cpu(), torch.zeros(batch.num_seqs, dtype=torch.int64, device="cpu")
    for level in levels:
        first = 0
        for num_seqs, num_keys in level:
            begin = int(ends[first]) // page_size
            pages = table[first : first + num_seqs, begin : begin + num_keys // page_size]
            seq = first_true((pages != pages[:1]).any(1))
            if seq is not None:
                entry = first_true(pages[seq] != pages[0]) or 0
                raise ValueError(
                    f"page_table must give sequences {first} and {first + seq} the same pages for the keys that they "
                    f"share, got {int(pages[0, entry])} and {int(pages[seq, entry])} in column {begin + entry}; "
                    "share fewer keys"
                )
            ends[first : first + num_seqs] += num_keys
            first += num_seqs
    query_lens = batch.query_starts.cpu().diff()
    seq = first_true((query_lens > 0) & (ends > 0) & (batch.seq_lens.cpu() < ends + query_lens))
    if seq is not None:
        raise ValueError(
            f"seq_lens must hold the {int(ends[seq])} shared keys and then the {int(query_lens[seq])} queries of "
            f"sequence {seq}, got {int(batch.seq_lens[seq])}; share fewer keys"
        )


def first_true(mask: torch.Tensor) -> int | None:
    """Return the index of the first True of [n] bool, or None."""
    return int(mask.int().argmax()) if bool(mask.any()) else None
