"""What the Hopper kernel computes from lengths and strides, without a GPU.

The scheduler's functions of plain numbers are run as Python, with numbers in place of Gluon's scalars.
"""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

import quire

if sys.platform == "linux":
    from quire.kernels.hopper import pipeline, tile_scheduler, tma

PLAIN = SimpleNamespace(maximum=max, minimum=min, where=lambda condition, a, b: a if condition else b)


@pytest.fixture
def scheduler(monkeypatch):
    """The module of the scheduler, with arithmetic of Python's in place of Gluon's."""
    monkeypatch.setattr(tile_scheduler, "gl", PLAIN)
    return tile_scheduler


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8])
@pytest.mark.parametrize("window", [(1 << 30, 0), (50, 0), (50, 20), (1 << 30, 1 << 30)])
def test_splits_cover_each_visible_tile_once(window, num_splits, scheduler):
    block_t, block_n = 8, 16
    for q_len, seq_len in ((8, 8), (20, 300), (5, 3), (1, 0), (70, 70), *((9, n) for n in range(240, 257))):
        first_pos = seq_len - q_len
        for token in range(0, q_len, block_t):
            splits = [
                scheduler.split_of_keys.fn(
                    token, q_len, first_pos, seq_len, *window, split, num_splits, block_t, block_n
                )
                for split in range(num_splits)
            ]
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


def test_the_visible_keys_of_a_sequence_are_those_of_any_query(scheduler):
    for q_len, seq_len, (left, right) in itertools.product((1, 9), (5, 40), ((7, 0), (3, 2), (100, 100))):
        first_pos = seq_len - q_len
        low, high = scheduler.visible_keys.fn(
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
        pytest.param((4, 4, 2, 16), (128, 32, 16, 1), 0, id="pages of fewer rows than a TMA box"),
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
