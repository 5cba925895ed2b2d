"""A table of traced row blocks, and random compositions of which each row block is looked up in it.

A program attends with one row block after the other. What it adds up for one depends on the chunk, on which of the
chunk's row blocks it is, and on where partitions cut the row block's splits. So each such row block is traced once. The
cuts of a random batch are computed by the functions that the schedule's kernel calls, for many batches at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from quire.dispatch.request import cdiv
from quire.kernels.schedule import Costs, Units, partition_size, span
from quire.kernels.schedule import Sequence as Lengths
from tests.proof.arrays import node, tag, weights
from tests.proof.compositions import Composition, Piece, World

LANES = 1 << 16  # batches that a program of a kernel below looks at
WHOLE = 1 << 40  # splits of a partition in launches that have none
OTHERS = 4  # most other sequences of a random batch


@triton.jit
def span_kernel(q_len, seq_len, units, blocks, UNITS: tl.constexpr, LANES: tl.constexpr):
    """Write the splits of each row block of sequences, and the number of row blocks."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    queries, keys = tl.load(q_len + at), tl.load(seq_len + at)
    lengths = Lengths(keys, queries * 0, queries, keys - queries)
    _, _, _, num_units, num_blocks = span(lengths, None, 1 << 30, 0, UNITS)
    tl.store(units + at, num_units)
    tl.store(blocks + at, num_blocks)


@triton.jit
def size_kernel(total, longest, seqs, partitions, size, cost, least, discount, two_level, LANES: tl.constexpr):
    """Write the splits of a partition of each batch."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    costs = Costs(cost, least, discount, two_level)
    found = partition_size(
        tl.load(total + at), tl.load(longest + at), tl.load(seqs + at), tl.load(partitions + at), costs
    )
    tl.store(size + at, found)


def on_lanes(kernel: Any, inputs: Sequence[np.ndarray], outputs: int, *numbers: Any) -> list[np.ndarray]:
    """Run a kernel on vectors of numbers; return what it writes."""
    count = inputs[0].size
    room = cdiv(count, LANES) * LANES
    given = [
        torch.from_numpy(np.pad(x.reshape(-1).astype(np.int32), (0, room - count), constant_values=1)) for x in inputs
    ]
    found = [torch.zeros(room, dtype=torch.int32) for _ in range(outputs)]
    kernel[(room // LANES,)](*given, *found, *numbers, LANES)
    return [x[:count].numpy().reshape(inputs[0].shape).astype(np.int64) for x in found]


def cuts_of(begin: np.ndarray, units: np.ndarray, size: np.ndarray, most: int) -> np.ndarray:
    """Return where partitions of `size` splits cut row blocks of `units` splits, the first of which is number `begin`.

    Bit i is set for a cut after split i. No row block has more than `most` splits.
    """
    bits = np.zeros(np.broadcast_shapes(begin.shape, units.shape, size.shape), np.int64)
    for i in range(1, most):
        bits |= np.where(((begin + i) % size == 0) & (i < units), 1 << (i - 1), 0)
    return bits


class Table:
    """The trees of all row blocks of some chunks of one context, in some launches, which may have partitions.

    Args:
        world: the context is its first sequence. Others are at least a split long.
        borders: where chunks begin and end.
        names: of the launches.
        split: keys of a split.
        expected: the trees of each token of the context, by position.
    """

    def __init__(
        self, world: World, borders: Sequence[int], names: Sequence[str], split: int, expected: Mapping[int, np.ndarray]
    ) -> None:
        self.world, self.borders, self.split = world, np.array(borders), split
        self.group = world.problem.spec.group_size
        self.most = cdiv(borders[-1], split)
        self.chunks = [Piece(0, start, stop) for i, start in enumerate(borders) for stop in borders[i + 1 :]]
        self.launches: dict[str, Any] = {}
        self.traced: dict[str, np.ndarray] = {}  # of [start, stop, row block, cuts], one word for all trees; 0 for none
        self.expected: dict[str, np.ndarray] = {}  # of [start, stop, row block, 1]
        for name in names:
            sizes = (WHOLE,) if name.endswith("whole") else range(1, self.most + 1)
            for size in sizes:
                for before in range(1 if size == WHOLE else size):
                    self.trace(name, size, before, expected)

    def trace(self, name: str, size: int, before: int, expected: Mapping[int, np.ndarray]) -> None:
        """Trace all chunks in partitions of `size` splits, after `before` sequences of one split."""
        one = Piece(1, 3, 4)
        for after in range(size + 1):
            composition = Composition(self.world, [one] * before + self.chunks + [one] * after)
            launch = composition.launches()[name]
            tokens = launch.config.block_m // self.group  # of a row block
            units = [cdiv(p.stop, self.split) for p in composition.pieces]
            blocks = [cdiv(p.stop - p.start, tokens) for p in composition.pieces]
            total = int(np.dot(units, blocks))
            if size == WHOLE or cdiv(total, cdiv(total, size)) == size:
                break
        else:
            raise AssertionError(f"no batch has partitions of {size} splits")
        if size != WHOLE:
            launch = replace(launch, num_partitions=cdiv(total, size))
        self.launches[name] = launch
        if name not in self.traced:
            shape = len(self.borders), len(self.borders), cdiv(int(self.borders[-1]), tokens)
            self.traced[name] = np.zeros((*shape, 1 << (self.most - 1)), np.uint64)
            self.expected[name] = np.zeros((*shape, 1), np.uint64)
        trees, row, begin = composition.trees(launch), 0, 0
        for piece, unit, count in zip(composition.pieces, units, blocks, strict=True):
            for block in range(count):
                if piece.seq == 0:
                    start, stop = np.searchsorted(self.borders, (piece.start, piece.stop))
                    cuts = cuts_of(np.array(begin), np.array(unit), np.array(size), self.most)
                    part = slice(block * tokens, min((block + 1) * tokens, piece.stop - piece.start))
                    own = trees[row : row + piece.stop - piece.start][part]
                    self.traced[name][start, stop, block, cuts] = word_of(own)
                    alike = np.stack([expected[at] for at in range(piece.start, piece.stop)])[part]
                    self.expected[name][start, stop, block] = word_of(alike)
                begin += unit
            row += piece.stop - piece.start

    def differing(self) -> int:
        """Return how many traced row blocks have other trees than are expected."""
        return sum(int(((x != 0) & (x != self.expected[name])).sum()) for name, x in self.traced.items())

    @property
    def size(self) -> int:
        """How many row blocks were traced."""
        return sum(int((x != 0).sum()) for x in self.traced.values())

    def judge(self, count: int, seed: int) -> tuple[int, int, int]:
        """Draw random compositions of the context; return how many there were, of how many row blocks, and failures.

        A composition cuts the context into chunks at random borders. Each chunk is in a batch of its own, with up to
        OTHERS other sequences before and after it, in a random launch with a random number of partitions. It fails if
        a row block has other trees than are expected, or was not traced.
        """
        random = np.random.default_rng(seed)
        inner = random.random((count, len(self.borders) - 2)) < random.random((count, 1))
        is_border = np.pad(inner, ((0, 0), (1, 1)), constant_values=True)
        composition, border = np.nonzero(is_border)
        begins = composition[:-1] == composition[1:]  # the next border ends a chunk of the same composition
        composition, start, stop = composition[:-1][begins], border[:-1][begins], border[1:][begins]
        kinds = random.integers(0, len(self.traced), len(start))
        failed, row_blocks = np.zeros(count, bool), 0
        for i, name in enumerate(self.traced):
            ours = kinds == i
            wrong, looked_up = self.judge_chunks(name, start[ours], stop[ours], random)
            np.logical_or.at(failed, composition[ours], wrong)
            row_blocks += looked_up
        return count, row_blocks, int(failed.sum())

    def judge_chunks(self, name: str, start: Any, stop: Any, random: Any) -> tuple[np.ndarray, int]:
        """Return which chunks have a row block with other trees, each in a random batch, and how many row blocks."""
        launch, count = self.launches[name], len(start)
        queries = np.where(random.random((count, OTHERS + 1)) < 0.5, 1, random.integers(1, 400, (count, OTHERS + 1)))
        keys = queries + random.integers(0, 2000, queries.shape)
        present = random.random(queries.shape) < 0.7
        place = random.integers(0, OTHERS + 1, count)
        each = np.arange(count)
        present[each, place] = True
        queries[each, place], keys[each, place] = self.borders[stop] - self.borders[start], self.borders[stop]
        of_rows = Units(self.group, launch.config.block_m, self.split, 0)
        units, blocks = on_lanes(span_kernel, (queries, keys), 2, of_rows)
        of_each = np.where(present, units * blocks, 0)
        total, seqs = of_each.sum(1), present.sum(1)
        partitions = np.minimum(total, np.exp(random.uniform(0, np.log(2000), count)).astype(np.int64))
        (size,) = on_lanes(size_kernel, (total, of_each.max(1), seqs, partitions), 1, *launch.partition_costs)
        if not launch.num_partitions:
            size = np.full(count, WHOLE)
        begin = np.where(np.arange(OTHERS + 1) < place[:, None], of_each, 0).sum(1)
        unit, wrong, looked_up = units[each, place], np.zeros(count, bool), 0
        for block in range(int(blocks[each, place].max())):
            has = blocks[each, place] > block
            cuts = cuts_of(begin + block * unit, unit, size, self.most)
            at = start[has], stop[has], block
            wrong[has] |= self.traced[name][(*at, cuts[has])] != self.expected[name][(*at, 0)]
            looked_up += int(has.sum())
        return wrong, looked_up


def word_of(trees: np.ndarray) -> int:
    """Return one word for the trees of some tokens."""
    flat = trees.reshape(-1)
    return int(node(tag("tokens"), (flat * weights(flat.size)).sum(keepdims=True))[0])
