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
    with pytest.raises(ValueError, match="at least 1"):
        quire.PageAllocator(0, 4)
    with pytest.raises(ValueError, match="at least 0"):
        quire.PageAllocator(1, 4).allocate(-1)


class AgainstAModel(RuleBasedStateMachine):
    """Every sequence's tokens, kept as plain lists and written into simulated pages, read back the same."""

    @initialize(page_size=st.integers(1, 5))
    def start(self, page_size):
        self.pool = quire.PageAllocator(12, page_size)
        self.memory = [[None] * page_size for _ in range(12)]
        self.tokens = {}
        self.counter = 0

    def write(self, sequence, count):
        for slot in self.pool.slot_mapping(sequence, count).tolist():
            self.counter += 1
            self.memory[slot // self.pool.page_size][slot % self.pool.page_size] = self.counter
            self.tokens[sequence].append(self.counter)

    @rule(count=st.integers(0, 12))
    def allocate(self, count):
        try:
            sequence = self.pool.allocate(count)
        except quire.OutOfPagesError:
            return
        self.tokens[sequence] = []
        self.write(sequence, count)

    @rule(data=st.data(), count=st.integers(0, 9))
    def grow(self, data, count):
        if not self.tokens:
            return
        sequence = data.draw(st.sampled_from(list(self.tokens)))
        try:
            copies = self.pool.grow(sequence, count)
        except quire.OutOfPagesError:
            return
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
            self.pool.free(sequence)  # already empty: nothing more to give back
            del self.tokens[sequence]

    @invariant()
    def contents_are_right_and_no_page_leaks(self):
        if not hasattr(self, "pool"):
            return
        size = self.pool.page_size
        for sequence, tokens in self.tokens.items():
            assert [self.memory[sequence.pages[i // size]][i % size] for i in range(sequence.num_tokens)] == tokens
        held = {page for sequence in self.tokens for page in sequence.pages}
        assert len(held) + self.pool.num_free_pages == 12


AgainstAModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
TestAgainstAModel = AgainstAModel.TestCase
