"""Pages are handed out, shared, copied on write and given back, and a failure changes nothing."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import quire


def test_tables_and_slots():
    pool = quire.PageAllocator(8, 4)
    a, b = pool.allocate(6), pool.allocate(3)
    table = pool.page_table([a, b])
    assert table.shape == (2, 2) and table.dtype == torch.int32 and table[1, 1] == -1
    slots = pool.slot_mapping(a, 3)
    assert slots.tolist() == [a.pages[0] * 4 + 3, a.pages[1] * 4, a.pages[1] * 4 + 1] and slots.dtype == torch.int64
    assert pool.page_table([], 3).shape == (0, 3)
    with pytest.raises(ValueError, match="width must be at least 2"):
        pool.page_table([a], 1)
    with pytest.raises(ValueError, match="num_tokens must be from 0"):
        pool.slot_mapping(b, 4)


def test_copy_on_write_only_where_a_partly_filled_page_is_shared():
    pool = quire.PageAllocator(8, 4)
    a = pool.allocate(6)
    b = pool.fork(a)
    assert pool.num_free_pages == 6
    ((source, target),) = pool.grow(b, 1)
    assert source == a.pages[1] and target == b.pages[1] and a.pages[0] == b.pages[0]
    assert pool.grow(a, 1) == []  # alone on its page again
    c = pool.fork(pool.allocate(4))
    assert pool.grow(c, 1) == []  # the shared page is full: nothing to copy


def test_running_out_changes_nothing():
    pool = quire.PageAllocator(3, 4)
    a = pool.allocate(6)
    b = pool.fork(a)
    before = (list(a.pages), list(b.pages), b.num_tokens, pool.num_free_pages)
    with pytest.raises(quire.OutOfPagesError, match="got 1"):
        pool.grow(b, 6)  # a fresh page and a copy
    assert before == (a.pages, b.pages, b.num_tokens, pool.num_free_pages)
    with pytest.raises(quire.OutOfPagesError):
        pool.allocate(9)
    assert pool.num_free_pages == 1


def test_bad_sizes_are_refused():
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="must be from 1 to"):
            quire.PageAllocator(*sizes)
    pool = quire.PageAllocator(1, 4)
    with pytest.raises(ValueError, match="at least 0"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="at least 0"):
        pool.grow(pool.allocate(2), -1)


def test_sequences_that_are_not_held_are_refused():
    pool, other = quire.PageAllocator(8, 4), quire.PageAllocator(8, 4)
    freed, held = pool.allocate(6), pool.allocate(3)
    pool.free(freed)
    for sequence in (freed, other.allocate(5)):
        for use in (
            pool.free,
            pool.fork,
            lambda s: pool.grow(s, 1),
            lambda s: pool.slot_mapping(s, 0),
            lambda s: pool.page_table([held, s]),
        ):
            with pytest.raises(ValueError, match="sequence must be one that this allocator holds"):
                use(sequence)
    assert (held.num_tokens, pool.num_free_pages, other.num_free_pages) == (3, 7, 6)


def test_what_a_step_needs_goes_from_forks_to_tensors():
    """Two answers to one prompt: the copy that growing reports keeps the parent's tokens apart from the fork's."""
    pool = quire.PageAllocator(6, 4)
    cache = quire.PagedKVCache(torch.zeros(6, 4, 1, 16), torch.zeros(6, 4, 1, 16))
    parent = pool.allocate(6)
    prompt = torch.randn(6, 1, 16)
    quire.write_kv(prompt, prompt, cache, pool.slot_mapping(parent, 6))
    fork = pool.fork(parent)
    copies = pool.grow(parent, 1) + pool.grow(fork, 2)
    quire.copy_pages(cache, cache, torch.tensor(copies))
    new = torch.randn(3, 1, 16)
    quire.write_kv(new, new, cache, torch.cat([pool.slot_mapping(parent, 1), pool.slot_mapping(fork, 2)]))
    table = pool.page_table([parent, fork], width=3)
    assert table[0, 0] == table[1, 0] and table[0, 1] != table[1, 1] and (table[:, 2] == -1).all()
    for row, tokens in zip(table.tolist(), (torch.cat([prompt, new[:1]]), torch.cat([prompt, new[1:]])), strict=True):
        assert torch.equal(cache.k[row[:2]].flatten(0, 1)[: len(tokens)], tokens)


class AgainstAModel(RuleBasedStateMachine):
    """Tokens written into simulated pages are read back as the plain lists that the model keeps; no page leaks."""

    @initialize(page_size=st.integers(1, 5))
    def start(self, page_size):
        self.pool = quire.PageAllocator(12, page_size)
        self.memory = [[None] * page_size for _ in range(12)]
        self.tokens = {}
        self.counter = 0

    def write(self, sequence, count):
        for slot in self.pool.slot_mapping(sequence, count).tolist():
            page = slot // self.pool.page_size
            assert not any(page in other.pages for other in self.tokens if other is not sequence), (
                "a page is written that two hold"
            )
            self.counter += 1
            self.memory[page][slot % self.pool.page_size] = self.counter
            self.tokens[sequence].append(self.counter)

    def state(self):
        """What running out must leave as it was; the order in which pages will be handed out is the allocator's own."""
        return [(s, list(s.pages), s.num_tokens) for s in self.tokens], self.pool.num_free_pages

    def pages_for(self, num_tokens):
        return -(-num_tokens // self.pool.page_size)

    @rule(count=st.integers(0, 12))
    def allocate(self, count):
        before = self.state()
        try:
            sequence = self.pool.allocate(count)
        except quire.OutOfPagesError:
            assert self.state() == before and self.pages_for(count) > self.pool.num_free_pages
            return
        self.tokens[sequence] = []
        self.write(sequence, count)

    @rule(data=st.data(), count=st.integers(0, 9))
    def grow(self, data, count):
        if not self.tokens:
            return
        sequence = data.draw(st.sampled_from(list(self.tokens)))
        before, size = self.state(), self.pool.page_size
        in_last = sequence.num_tokens % size
        shared = (
            count > 0
            and in_last > 0
            and any(sequence.pages[-1] in other.pages for other in self.tokens if other is not sequence)
        )
        needed = self.pages_for(sequence.num_tokens + count) - self.pages_for(sequence.num_tokens) + shared
        try:
            copies = self.pool.grow(sequence, count)
        except quire.OutOfPagesError:
            assert self.state() == before and needed > self.pool.num_free_pages
            return
        assert len(copies) == shared and before[1] - self.pool.num_free_pages == needed
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        self.write(sequence, count)

    @rule(data=st.data())
    def fork(self, data):
        if self.tokens:
            parent = data.draw(st.sampled_from(list(self.tokens)))
            self.tokens[self.pool.fork(parent)] = list(self.tokens[parent])

    @rule(data=st.data())
    def free(self, data):
        if self.tokens:
            sequence = data.draw(st.sampled_from(list(self.tokens)))
            self.pool.free(sequence)
            del self.tokens[sequence]
            with pytest.raises(ValueError, match="must be one that this allocator holds"):
                self.pool.free(sequence)

    @invariant()
    def contents_are_right_and_no_page_leaks(self):
        if not hasattr(self, "pool"):
            return
        size = self.pool.page_size
        for sequence, tokens in self.tokens.items():
            assert len(sequence.pages) == len(set(sequence.pages)) == self.pages_for(sequence.num_tokens)
            assert [self.memory[sequence.pages[i // size]][i % size] for i in range(sequence.num_tokens)] == tokens
        held = {page for sequence in self.tokens for page in sequence.pages}
        assert len(held) + self.pool.num_free_pages == 12


AgainstAModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
TestAgainstAModel = AgainstAModel.TestCase
