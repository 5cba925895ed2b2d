"""What the Hopper kernel computes from lengths, intervals and strides, without a GPU.

Functions are run as Python, with numbers in place of Gluon's scalars and NumPy's arrays in place of Triton's tensors.
"""

import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import quire

pytestmark = pytest.mark.one_triton

if sys.platform == "linux":
    from quire.kernels import schedule, tma
    from quire.kernels.gluon import pipeline
    from quire.kernels.hopper import work_tile

PLAIN = SimpleNamespace(maximum=max, minimum=min, where=lambda condition, a, b: a if condition else b)


class Pointer:
    """Into memory of which each element may be read, or only some: others are far outside of an interval."""

    def __init__(self, memory, at=0):
        self.memory, self.at = memory, at

    def __add__(self, offset):
        return Pointer(self.memory, self.at + offset)

    def load(self, mask, other):
        at, mask = np.broadcast_arrays(self.at, mask)
        assert ((at >= 0) & (at < len(self.memory)))[mask].all(), "a token outside of the batch is read"
        return np.where(mask, self.memory[np.where(mask, at, 0)], other)


VECTORS = SimpleNamespace(
    maximum=np.maximum,
    minimum=np.minimum,
    where=np.where,
    max=np.max,
    min=np.min,
    arange=np.arange,
    static_range=range,
    load=lambda pointer, mask, other: pointer.load(mask, other),
)


@pytest.fixture
def finder(monkeypatch):
    """The module of schedules, with NumPy's arithmetic in place of Triton's."""
    monkeypatch.setattr(schedule, "tl", VECTORS)
    monkeypatch.setattr(schedule, "NO_END", schedule.NO_END.value)
    for name in ("load_intervals", "tiles_of_keys", "last_and_count"):
        monkeypatch.setattr(schedule, name, getattr(schedule, name).fn)
    return schedule


def row_blocks_of_intervals(finder, begin, end, q_start, q_len, seq_len, block_t):
    """Return the first tokens of a sequence's row blocks, and the keys of each one, as a RowBlock names them.

    All are found at once, as by the kernel.
    """
    lengths = SimpleNamespace(key_begin=Pointer(begin), key_end=Pointer(end))
    tokens = np.arange(0, q_len, block_t)
    of_each = (np.full(len(tokens), number) for number in (q_start, q_len, seq_len))
    found = finder.keys_of_intervals.fn(lengths, tokens, *of_each, block_t, 1 << (block_t - 1).bit_length())
    names = "kv_start", "kv_stop", "full_start", "full_stop", "kv_low", "kv_high"
    keys = [SimpleNamespace(**dict(zip(names, of_one, strict=True))) for of_one in np.transpose(found).tolist()]
    return list(zip(tokens.tolist(), keys, strict=True))


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8])
@pytest.mark.parametrize("window", [(1 << 30, 0), (50, 0), (50, 20), (1 << 30, 1 << 30)])
def test_splits_cover_each_visible_tile_once(window, num_splits, finder):
    block_t, block_n = 8, 16
    for q_len, seq_len in ((8, 8), (20, 300), (5, 3), (1, 0), (70, 70), *((9, n) for n in range(240, 257))):
        first_pos = seq_len - q_len
        tokens = np.arange(0, q_len, block_t)
        keys = np.transpose(finder.keys_of_band.fn((seq_len, 0, q_len, first_pos), tokens, block_t, *window))
        for token, seen in zip(tokens.tolist(), keys.tolist(), strict=True):
            splits = [finder.split_of_keys.fn(*seen, split, num_splits, block_n) for split in range(num_splits)]
            if num_splits != 3:  # the programs cut into a power of two
                cuts = [SimpleNamespace(shift=num_splits.bit_length() - 1, split=split) for split in range(num_splits)]
                assert splits == [finder.split_of_cut.fn(*seen, cut, block_n) for cut in cuts]
            q_pos = range(first_pos + token, first_pos + min(token + block_t, q_len))
            wanted = {
                key // block_n for q in q_pos for key in range(max(0, q - window[0]), min(seq_len, q + window[1] + 1))
            }
            taken = [tile for last, count in splits for tile in range(last, last - count, -1)]
            assert wanted <= set(taken)
            assert all(count >= 1 for _, count in splits)
            if wanted:  # only empty splits have a tile that no query sees: all the same one
                assert len(set(taken) - wanted) <= 1
            assert all(taken.count(tile) == 1 for tile in wanted)


def intervals_of_some_sequences():
    """Sequences of intervals, each with its keys: of every kind that has edges, and some of no kind."""
    far, least = 2**31 - 1, -(2**31)
    for q_len, seq_len in ((1, 40), (8, 8), (21, 90), (30, 300)):
        position = np.arange(q_len) + seq_len - q_len
        yield seq_len, np.zeros(q_len, int), position + 1  # causal
        yield seq_len, position // 12 * 12, position + 1  # chunks
        yield seq_len, np.full(q_len, least), np.full(q_len, far)  # all keys
        yield seq_len, position, position  # none
        yield seq_len, np.full(q_len, far), np.full(q_len, least)
        alone = position == position[0]  # whose row sees some keys; the others have their ends at that of the sequence
        yield seq_len, np.where(alone, 0, seq_len), np.where(alone, 5, seq_len)
        for seed in range(20):
            draw = np.random.default_rng(seed)
            begin = draw.integers(-20, seq_len + 20, q_len)
            yield seq_len, begin, begin + draw.integers(-9, 60, q_len)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_intervals_have_the_tiles_that_their_rows_see_and_masks_where_a_row_does_not(num_splits, finder):
    """Among rows of other sequences. A tile without a mask is one that all rows see, and no other tile is taken."""
    block_t, block_n, q_start = 8, 16, 3
    for seq_len, begin, end in intervals_of_some_sequences():
        q_len = len(begin)
        others = np.arange(q_start) - 1000, np.arange(q_start) + 1000  # of the sequences before and after
        begins, ends = np.concatenate([others[0], begin, others[0]]), np.concatenate([others[1], end, others[1]])
        sees = [set(range(max(b, 0), min(e, seq_len))) for b, e in zip(begin.tolist(), end.tolist(), strict=True)]
        of_sequence = set().union(*sees)
        for token, keys in row_blocks_of_intervals(finder, begins, ends, q_start, q_len, seq_len, block_t):
            span = keys.kv_start, keys.kv_stop
            rows = sees[token : token + block_t]
            seen = set().union(*rows)
            assert 0 <= span[0] <= span[1] <= seq_len and keys.kv_high <= seq_len
            assert set(range(*span)) == (set(range(min(seen), max(seen) + 1)) if seen else set())
            # What may be read holds all keys that a row sees, and lies between keys that rows of the sequence see.
            assert seen <= set(range(keys.kv_low, keys.kv_high))
            if keys.kv_low < keys.kv_high:
                assert min(of_sequence) <= keys.kv_low and keys.kv_high <= max(of_sequence) + 1
            splits = [finder.split_of_keys.fn(*span, split, num_splits, block_n) for split in range(num_splits)]
            taken = [tile for last, count in splits for tile in range(last, last - count, -1)]
            for tile in taken:
                pos = tile * block_n
                full = pos >= keys.full_start and pos + block_n <= keys.full_stop
                assert full == all(set(range(pos, pos + block_n)) <= row for row in rows)
            wanted = {key // block_n for key in range(*span)}
            assert all(count >= 1 for _, count in splits)
            assert wanted <= set(taken) and all(taken.count(tile) == 1 for tile in wanted)
            if wanted:  # all empty splits have the tile after the last one
                assert set(taken) - wanted <= {max(wanted) + 1}


def test_the_last_row_block_of_a_causal_prompt_alone_has_keys_that_may_not_be_read(finder):
    """Tiles at the diagonal hold keys that other rows of the sequence see, so their values need no zeros."""
    position = np.arange(40) + 60
    for begin in (0 * position, position // 12 * 12, position - 9):
        for _, keys in row_blocks_of_intervals(finder, begin, position + 1, 0, 40, 100, 8):
            assert (keys.kv_low, keys.kv_high) == (begin[0], 100)


def test_the_visible_keys_of_a_sequence_are_those_of_any_query(monkeypatch):
    monkeypatch.setattr(work_tile, "gl", PLAIN)
    for q_len, seq_len, (left, right) in itertools.product((1, 9), (5, 40), ((7, 0), (3, 2), (100, 100))):
        first_pos = seq_len - q_len
        low, high = work_tile.visible_keys.fn(
            SimpleNamespace(first_pos=first_pos, q_len=q_len, seq_len=seq_len), left, right
        )
        seen = {key for q in range(first_pos, seq_len) for key in range(q - left, q + right + 1) if 0 <= key < seq_len}
        assert set(range(max(low, 0), high)) == {
            key for key in range(seq_len) if seen and min(seen) <= key <= max(seen)
        }


@pytest.mark.parametrize("dim", [16, 64], ids=["heads are a dimension", "heads are columns"])
@pytest.mark.parametrize("kind", ["NHD", "HND", "one row", "one tensor", "layers", "one head"])
def test_a_matrix_row_and_column_is_where_the_element_is(kind, dim):
    """What TMA reads at (row, column) of the matrix is the element of (page, slot, head, dim)."""
    pages, size, heads = 3, 8, 1 if kind == "one head" else 2
    memory = torch.arange(16 * pages * size * heads * dim, dtype=torch.float32).half()
    if kind == "HND":
        x, layout = memory[: pages * size * heads * dim].view(pages, heads, size, dim), "HND"
    elif kind == "one row":  # keys and values side by side
        x, layout = memory[: 2 * pages * size * heads * dim].view(pages, size, heads, 2 * dim)[..., :dim], "NHD"
    elif kind == "layers":
        x, layout = memory[: 3 * pages * size * heads * dim].view(pages, 3, size, heads, dim)[:, 1], "NHD"
    elif kind == "one tensor":
        x, layout = memory[: 2 * pages * size * heads * dim].view(2, pages, size, heads, dim)[1], "NHD"
    else:
        x, layout = memory[: pages * size * heads * dim].view(pages, size, heads, dim), "NHD"
    cache = quire.PagedKVCache(x, x, layout)
    matrix, _ = tma.matrices_of_cache(cache)
    page_stride, slot_stride, head_stride = cache.strides[0][:3]
    start = x.storage_offset()
    (num_rows, *columns), (stride, *steps) = matrix.shape, matrix.strides
    assert stride == slot_stride and len(columns) == (1 if dim == 64 else 2) and steps[-1] == 1
    for page, slot, head in itertools.product(range(pages), range(size), range(heads)):
        row, column = divmod(page * page_stride + slot * slot_stride + head * head_stride, slot_stride)
        element = x[page, head, slot] if layout == "HND" else x[page, slot, head]
        assert row < num_rows and element.storage_offset() == start + row * stride + column
        if dim == 64:
            assert column + dim <= columns[0]
        else:  # head `in_row` of the row
            in_row, rest = divmod(column, steps[0])
            assert rest == 0 and in_row < columns[0] and columns[1] == dim
    last = sum((size - 1) * step for size, step in zip(matrix.shape, matrix.strides, strict=True))
    assert start + last < memory.numel()


def test_heads_of_any_width_must_begin_at_a_multiple_of_16_bytes():
    memory = torch.zeros(4096, dtype=torch.float16)
    for dim, served in ((64, True), (24, False)):
        x = memory.as_strided((2, 8, 2, dim), (8 * 160, 160, 68, 1))
        assert (tma.matrices_of_cache(quire.PagedKVCache(x, x)) is not None) == served


@pytest.mark.parametrize("least", [16, 64])
def test_the_pieces_of_a_width_cover_it_and_fit_panels(least):
    for width in range(16, 257, 8):
        pieces = pipeline.pieces_of(width, least)
        ends = [first + columns for first, columns in pieces]
        assert [first for first, _ in pieces] == [0, *ends[:-1]]
        assert width <= ends[-1] <= (width + 63) // 64 * 64
        for first, columns in pieces:
            assert columns >= least and columns & (columns - 1) == 0
            assert first % 64 + columns <= 64 or (first % 64 == 0 and columns % 64 == 0)
            assert (
                first // 128 == (first + columns - 1) // 128 or columns == 256
            )  # 192 columns are in buffers of 128, 64


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        pytest.param((3, 4, 2, 64), (544, 136, 68, 1), 0, id="small pages, heads at no multiple of 16 bytes"),
        pytest.param((2, 8, 1, 16), (160, 20, 16, 1), 0, id="slots that are no multiple of 16 bytes apart"),
        pytest.param((2, 8, 2, 16), (272, 32, 16, 1), 0, id="pages that no whole number of slots are apart"),
        pytest.param((2, 8, 2, 16), (512, 32, 48, 1), 0, id="heads that no whole number of slots are apart"),
        pytest.param((1, 8, 3, 16), (512, 32, 16, 1), 0, id="heads that overlap the next slot"),
        pytest.param((2, 8, 2, 16), (256, 32, 16, 1), 1, id="an unaligned start"),
    ],
)
def test_what_tma_cannot_address_has_no_matrix(shape, strides, offset):
    memory = torch.zeros(2048, dtype=torch.float16)
    wanted = quire.PagedKVCache(*(memory[:512].view(2, 8, 2, 16) for _ in "kv"))
    x = memory.as_strided(shape, strides, offset)
    assert tma.matrices_of_cache(wanted) is not None
    assert tma.matrices_of_cache(quire.PagedKVCache(x, x)) is None


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 7, 12])
def test_pages_of_fewer_rows_than_a_tma_box_are_gathered(page_size):
    x = torch.zeros(4, page_size, 2, 24, dtype=torch.float16)
    cache = quire.PagedKVCache(x, x)
    assert not tma.has_boxes(cache)
    assert [m.shape[0] for m in tma.matrices_of_cache(cache)] == 2 * [4 * page_size]
    assert tma.has_boxes(quire.PagedKVCache(*(torch.zeros(4, 16 * page_size, 2, 24) for _ in "kv")))


def test_boxes_of_eight_rows_are_for_8_bit_caches_and_for_rows_that_cannot_be_gathered():
    def has_boxes(head_stride, dtype=torch.float16):
        x = torch.zeros(4096, dtype=dtype).as_strided((2, 8, 2, 64), (8 * 160, 160, head_stride, 1))
        return tma.has_boxes(quire.PagedKVCache(x, x))

    assert [has_boxes(72), has_boxes(68), has_boxes(80, torch.int8)] == [False, True, True]


def test_a_cache_is_gathered_if_int32_counts_its_pieces_of_16_bytes():
    for pages, served in ((1 << 24, False), ((1 << 24) - 1, True)):
        x = torch.empty(pages, 4, 2, 128, dtype=torch.bfloat16, device="meta")  # 2 KiB for each page
        assert (tma.matrices_of_cache(quire.PagedKVCache(x, x)) is not None) == served
