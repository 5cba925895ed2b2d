"""What kernels that find schedules must write, from NumPy's reading of a batch; and what they do write.

Each policy of `kernels/schedule.py` has a function here that runs its kernel for a batch, walks through the records as
the kernels that attend do, and compares: each (row, visible tile) is in one item, partials have slots of their own,
which those that combine find, and nothing is written beyond the lists.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.dispatch.config import COSTS
from quire.dispatch.request import cdiv
from quire.kernels.mla_hopper.memory import ROWS, TILE
from quire.kernels.mla_hopper.program import Config, Program, first_sequence, next_sequence, slot_of, work_of
from quire.kernels.portable.launch import NEVER, PortableLaunch
from quire.kernels.portable.reduce import slot_of_partial
from quire.kernels.schedule import (
    CUT_FIELDS,
    FIELDS,
    PLACES,
    Lengths,
    RowBlock,
    Units,
    hopper_schedule_kernel,
    load_fields,
    load_latent_part,
    load_part,
    load_sequence,
    mla_schedule_kernel,
    next_row_block,
    skip_prompts,
    span,
    split_of_cut,
    units_here,
)
from quire.kernels.scheduler import Scheduler, Search
from quire.kernels.work import size_of_partition
from tests.hopper_simulator.launch import simulate

FAR = 1 << 30
CAUSAL, BOTH = (FAR, 0), (FAR, FAR)  # windows
MOST, ITEM = tl.constexpr(512), tl.constexpr(8)  # items of a program in these tests, and numbers of one
Key = tuple[int, int]  # a sequence and one of its row blocks


@dataclass
class Lens:
    """The sequences of a batch, and which keys their queries see: those of a window, or those of intervals."""

    queries: np.ndarray
    keys: np.ndarray
    window: tuple[int, int] = CAUSAL
    offsets: np.ndarray | None = None  # positions of first queries; None: the last query sees the last key
    begin: np.ndarray | None = None  # of each query token
    end: np.ndarray | None = None  # None with `begin`: a tree, of which a row may see all drafts
    one_query: bool = False  # each sequence has one, and the batch doesn't say so

    @property
    def starts(self) -> np.ndarray:
        """First query tokens, and the number of all."""
        return np.cumsum([0, *self.queries])

    @property
    def first_pos(self) -> np.ndarray:
        """Positions of first queries."""
        return self.keys - self.queries if self.offsets is None else self.offsets

    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first key that each query token sees, and the one after the last; both 0 if it sees none."""
        seq = np.repeat(np.arange(len(self.queries)), self.queries)
        first_pos, keys = self.first_pos[seq], self.keys[seq]
        pos = first_pos + np.arange(len(seq)) - self.starts[seq]
        if self.begin is None:
            low, high = pos - self.window[0], pos + self.window[1] + 1
        elif self.end is None:
            low, high = np.minimum(self.begin, first_pos), first_pos + self.queries[seq]
        else:
            low, high = self.begin, self.end
        low, high = np.maximum(low, 0), np.minimum(high, keys)
        return np.where(low < high, low, 0), np.where(low < high, high, 0)

    def spans(self, row_blocks: dict[Key, tuple[int, int]], unit: int) -> dict[Key, tuple[int, int] | None]:
        """Return the first tile of `unit` keys that any of a row block's query tokens sees, and the one after the last.

        It is None if they see none. `row_blocks` have a first token of the sequence, and the one after the last.
        """
        (low, high), starts, found = self.seen(), self.starts, {}
        for (seq, block), (first, stop) in row_blocks.items():
            here = slice(starts[seq] + first, starts[seq] + stop)
            sees = low[here] < high[here]
            first_key, last_key = low[here][sees].min(initial=FAR), high[here][sees].max(initial=0)
            found[seq, block] = (int(first_key // unit), cdiv(int(last_key), unit)) if sees.any() else None
        return found

    def lengths(self, device: Any = "cpu") -> Lengths:
        """Return what kernels read."""
        starts = None if self.one_query else self.starts
        numbers = self.keys, starts, self.offsets, self.begin, self.end
        return Lengths(*(None if n is None else torch.tensor(n.astype(np.int32), device=device) for n in numbers))


class Item(NamedTuple):
    """What a program attends to of a row block."""

    key: Key
    low: int  # its first tile
    high: int  # its last one and one
    slots: tuple[int, ...] = ()  # of its partials, if other programs attend to other tiles


def assert_each_tile_once(
    items: Sequence[Item], spans: dict[Key, tuple[int, int] | None], combined: dict[Key, Sequence[int]], num_slots: int
) -> None:
    """Judge the items of all programs.

    Args:
        items: of all programs.
        spans: as `Lens.spans` returns them. Of a row block that sees no key there is one tile, for its zeros.
        combined: the slots that are combined of each row block, in the order of its keys.
        num_slots: slots that there are.
    """
    own: dict[Key, list[Item]] = {key: [] for key in spans}
    for item in items:
        own[item.key].append(item)
    for key, found in own.items():
        found.sort(key=lambda item: item.low)
        low, high = spans[key] or (found[0].low, found[0].low + 1)
        edges = [(item.low, item.high) for item in found]
        assert [low, *(stop for _, stop in edges)] == [*(start for start, _ in edges), high], (key, edges)
        assert all(start < stop for start, stop in edges)
        slots = [slot for item in found for slot in item.slots]
        if len(found) > 1:
            assert all(item.slots for item in found)
            assert [*combined[key]] == slots, key
        else:
            assert not slots and len(combined.get(key, ())) < 2, key
    taken = [slot for item in items for slot in item.slots]
    assert len(set(taken)) == len(taken) and all(0 <= slot < num_slots for slot in taken)


def assert_equal_parts(programs: Sequence[Sequence[Item]], tiles: dict[Key, int], size: int, before: int = 0) -> None:
    """Judge the items of equal partitions: those of the list of all row blocks, of which each has `size` places.

    Args:
        programs: items of each partition.
        tiles: of each row block, in the order of the list.
        size: of a partition.
        before: places before the tiles of each row block.
    """
    ends = itertools.accumulate(before + number for number in tiles.values())
    first = {key: end - number for (key, number), end in zip(tiles.items(), ends, strict=True)}
    begins = {item.key: item.low for items in programs[::-1] for item in items[::-1]}  # of the first item of each
    for p, items in enumerate(programs):
        for key, low, high, _ in items:
            at = first[key] - begins[key]
            assert p * size <= at + low < at + high <= (p + 1) * size, (p, key)


def assert_whole_parts(programs: Sequence[Sequence[Item]], tiles: dict[Key, int], size: int, before: int) -> None:
    """Judge the items of partitions of whole sequences: each is of the partition in which its places begin.

    Args:
        programs: as for `assert_equal_parts`, like the others.
        tiles: see `programs`.
        size: see `programs`.
        before: see `programs`.
    """
    ends = [0, *itertools.accumulate(before + number for number in tiles.values())]
    expected: list[list[Item]] = [[] for _ in programs]
    for (key, number), begins in zip(tiles.items(), ends, strict=False):
        expected[begins // size].append(Item(key, 0, number))
    assert [[*items] for items in programs] == expected


@triton.jit
def walk_kernel(
    out_ptr, parts_ptr, lengths, window_left, window_right,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, MAX_DECODE_QUERIES: tl.constexpr,
    INTERVALS: tl.constexpr, MORE_INTERVALS: tl.constexpr, MULTI_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store of each row block of a partition its sequence and number, its first unit here and the one after the last,
    whether it is cut, the slot, the first unit in the batch if it is cut, and its units when the schedule was found.
    """
    U: tl.constexpr = Units(GROUP, BLOCK_M, UNIT, MAX_DECODE_QUERIES, INTERVALS, MORE_INTERVALS)
    part = load_part(parts_ptr, tl.program_id(0))
    seq, block, more = part.seq, part.block, part.low < part.high
    at = out_ptr + tl.program_id(0) * MOST * ITEM
    while more:
        sequence = load_sequence(lengths, lengths.cu_seqlens_q, seq)
        _, _, first, num_units, num_blocks = span(sequence, lengths, window_left, window_right, U)
        start, stop, block_unit, planned, is_cut = units_here(part, seq, block, num_units)
        slot = slot_of_partial(tl.program_id(0), start)
        item = (seq, block, first + start, first + stop, is_cut.to(tl.int32), slot, block_unit - first, planned)
        for i in tl.static_range(len(item)):
            tl.store(at + i, item[i])
        at += ITEM
        seq, block, more = next_row_block(part, seq, block, num_blocks, MULTI_BLOCK)
        if MAX_DECODE_QUERIES > 0:
            seq = skip_prompts(lengths.cu_seqlens_q, seq, part.last_seq, MAX_DECODE_QUERIES)


def equal_partitions(
    lens: Lens, num_partitions: int, rows: tuple[int, int], unit: int, device: Any, *, fixed: bool = False,
    ours: range = range(FAR), combine_cost: float = 0.0, at_once: int = 0,
) -> list[list[Item]]:  # fmt: skip
    """Cut a batch by `schedule_kernel`, judge what is found, and return the items of each partition.

    Args:
        lens: of the batch.
        num_partitions: at most.
        rows: of a query token, and of a row block.
        unit: keys of a tile, or of a split.
        device: to run on.
        fixed: whether units are splits of a batch-invariant plan.
        ours: queries of the sequences that no other launch serves.
        combine_cost: of a partial, in units.
        at_once: intervals that a program loads in one step.
    """
    (group, block_m), most = rows, 0 if ours.stop == FAR else ours.stop - 1
    combines = ours == range(FAR)
    row_blocks = {
        (seq, block): (0, queries)
        for seq, queries in enumerate(lens.queries.tolist())
        if queries in ours
        for block in range(max(cdiv(queries * group, block_m), 1))
    }
    spans = lens.spans(row_blocks, unit)
    tiles = {key: 1 if of is None else of[1] - of[0] for key, of in spans.items()}
    options = {
        "INTERVALS": at_once, "MORE_INTERVALS": at_once > 0 and int(lens.queries.max()) > at_once,
        "MAX_DECODE_QUERIES": most,
    }  # fmt: skip
    num_cuts = len(row_blocks) + 3 if combines else 0
    launch = SimpleNamespace(
        num_partitions=num_partitions, num_cuts=num_cuts, window=lens.window, costs=COSTS, combine_cost=combine_cost,
        two_level_min_tiles=NEVER, min_split_tiles=COSTS.min_split_tiles,
        partition_costs=(combine_cost, COSTS.min_split_tiles, 1.0, NEVER),
        request=SimpleNamespace(num_seqs=len(lens.queries)),
        schedule_constexprs=lambda: options | {"GROUP": group, "BLOCK_M": block_m, "FIXED_SPLIT": fixed, "PDL": False},
    )  # fmt: skip
    launch.search = lambda asked: PortableLaunch.search(launch, asked)
    lengths = lens.lengths(device)
    finder = Scheduler(launch, SimpleNamespace(**lengths._asdict(), device=lengths.seq_lens.device))
    assert finder.find(unit) and not finder.find(unit)
    parts, cuts = finder.tensors
    found = torch.full((num_partitions, MOST.value, ITEM.value), -1, dtype=torch.int32, device=device)
    walk_kernel[num_partitions,](
        found, parts, lengths, *lens.window, GROUP=group, BLOCK_M=block_m, UNIT=unit, MULTI_BLOCK=not lens.one_query,
        **options,
    )  # fmt: skip
    programs = []
    for numbers in found.tolist():
        items = []
        for seq, block, low, high, is_cut, slot, at, planned in (n for n in numbers if n[0] >= 0):
            assert planned == tiles[seq, block] and is_cut == (high - low < planned)
            slots = (slot,) if is_cut else ()
            if fixed and is_cut:  # whoever begins a row block leaves one state, others one of each split
                slots = (at + high - 1,) if slot % 2 else (*range(at + low, at + high),)
            items.append(Item((seq, block), low, high, slots))
        programs.append(items)
    size = int(parts[2])
    assert_equal_parts(programs, tiles, size)
    combined: dict[Key, Sequence[int]] = {}
    if combines:
        each = [(next(iter(of)), len(of), 1) for of in map(list, by_sequence(tiles))]
        assert size == size_of_partition(launch, each, sum(tiles.values()))
        for number, first, seq, block in cuts.view(-1, CUT_FIELDS.value)[: len(row_blocks)].tolist():
            later = range(first + 1, first + number) if fixed else range(first + 1, first + 2 * number - 1, 2)
            combined[seq, block] = [first, *later]
            if number < 2:
                combined[seq, block] = []
        assert [*combined] == [*row_blocks]
        assert not cuts.view(-1, CUT_FIELDS.value)[len(row_blocks) :].any()
    else:
        assert cuts is None
        for key in row_blocks:
            combined[key] = [slot for items in programs for item in items if item.key == key for slot in item.slots]
    num_slots = sum(tiles.values()) if fixed else 2 * num_partitions
    assert_each_tile_once([item for items in programs for item in items], spans, combined, num_slots)
    return programs


def by_sequence(tiles: dict[Key, int]) -> list[list[int]]:
    """Return the tiles of the row blocks of each sequence."""
    return [[tiles[key] for key in keys] for _, keys in itertools.groupby(tiles, key=lambda key: key[0])]


@gluon.jit(do_not_specialize=["num_partitions"])
def walk_latents_kernel(out_ptr, parts_ptr, seq_lens, cu_seqlens_q, num_partitions, causal, NUM_HEADS: gl.constexpr):
    """Store of each sequence of a partition its number, its first tile here and the one after the last, whether it is
    cut, and the slot.
    """
    row_block, index = gl.program_id(0), gl.program_id(1)
    number = row_block * num_partitions + index
    part, lengths = load_latent_part(parts_ptr, number), Lengths(seq_lens, cu_seqlens_q, None, None, None)
    config = Config(NUM_HEADS, ROWS, ROWS, 64, 64, False, 1)
    program = Program(None, None, lengths, part, index, num_partitions, row_block, causal > 0, 1.0, None, config)
    at = out_ptr + number * MOST * ITEM
    seq, known, tile = first_sequence(program, row_block)
    while seq <= part.last_seq:
        work = work_of(program, seq, known, tile, row_block)
        is_cut = gl.where(work.starts & work.ends, 0, 1)
        item = (seq, tile, tile + work.count, is_cut, slot_of(program, seq, work, row_block))
        for i in gl.static_range(5):
            gl.store(at + i, item[i])
        at += ITEM
        seq, known, tile = next_sequence(program, seq, row_block)


def equal_partitions_of_row_blocks(
    lens: Lens,
    num_heads: int,
    num_partitions: int,
    combine_cost: float,
    sequence_cost: int,
    seed: int,
    whole: bool = False,
) -> None:
    """Cut each row block of a batch of latents by `mla_schedule_kernel`, and judge what is found.

    Args:
        lens: of the batch.
        num_heads: rows of a query token.
        num_partitions: of each row block, at most.
        combine_cost: of a partial, in tiles.
        sequence_cost: of beginning a sequence, in tiles.
        seed: of the simulator.
        whole: whether no sequence is cut; then the combine cost is 0.
    """
    rows, num_seqs = ROWS.value, len(lens.queries)
    number = cdiv(int(lens.queries.max(initial=1)) * num_heads, rows) or 1
    by_sequence, causal = num_seqs <= 32, int(lens.window == CAUSAL)
    num_cuts = num_seqs if by_sequence else max(1, num_partitions - 1)
    fixed = combine_cost, sequence_cost, causal, int(by_sequence), int(whole), num_seqs, num_partitions, num_cuts
    sizes = number * num_partitions * FIELDS.value, number * num_cuts * CUT_FIELDS.value
    meta = {"GROUP": num_heads, "BLOCK_M": rows, "UNIT": TILE.value, "PDL": False}
    search = Search(mla_schedule_kernel, number * max(num_partitions, num_cuts), sizes, fixed, meta)
    lengths = lens.lengths()
    batch = SimpleNamespace(**lengths._asdict(), device=lengths.seq_lens.device)
    finder = Scheduler(SimpleNamespace(search=lambda asked: search), batch)
    assert finder.find(None) and not finder.find(None)
    parts, cuts = finder.tensors[0].view(number, num_partitions, -1), finder.tensors[1].view(number, num_cuts, -1)
    found = torch.full((number, num_partitions, MOST.value, ITEM.value), -1, dtype=torch.int32)
    tensors = found, finder.tensors[0], lengths.seq_lens, lengths.cu_seqlens_q
    grid, options = (number, num_partitions), {"NUM_HEADS": num_heads}
    simulate(walk_latents_kernel, grid, (*tensors, num_partitions, causal), options, (), seed)
    for block in range(number):
        row_blocks = {
            (seq, block): (block * rows // num_heads, min((block * rows + rows - 1) // num_heads + 1, queries))
            for seq, queries in enumerate(lens.queries.tolist())
            if queries * num_heads > block * rows
        }
        spans = lens.spans(row_blocks, TILE.value)
        tiles = {key: 1 if of is None else of[1] for key, of in spans.items()}
        programs = []
        for numbers in found[block].tolist():
            items = []
            for seq, low, high, is_cut, slot, *_ in (n for n in numbers if n[0] >= 0):
                assert is_cut == (high - low < tiles[seq, block])
                items.append(Item((seq, block), low, high, (slot,) if is_cut else ()))
            programs.append(items)
        are_equal = len({*tiles.values()}) <= 1
        cost = 0 if are_equal else sequence_cost
        if whole:
            assert_whole_parts(programs, tiles, int(parts[block, 0, 9]), cost)
            continue
        assert_equal_parts(programs, tiles, int(parts[block, 0, 9]), cost)
        combined: dict[Key, Sequence[int]] = {}
        for many, first, seq, of in cuts[block].tolist():
            at = 2 * (block * num_partitions + first)
            if many > 1:
                combined[seq, of] = [at + 1, *range(at + 2, at + 2 * many, 2)]
        if by_sequence:
            assert cuts[block, :, 2].tolist() == [*range(num_seqs)]
        assert_each_tile_once(
            [item for items in programs for item in items], spans, combined, 2 * number * num_partitions
        )


@triton.jit
def split_kernel(out_ptr, places_ptr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr):
    """Store the first tile of each place of an order, and the one after the last."""
    i = tl.arange(0, SIZE)
    place = RowBlock(*load_fields(places_ptr + i * FIELDS, 15))
    last, number = split_of_cut(place.kv_start, place.kv_stop, place, BLOCK_N)
    tl.store(out_ptr + 2 * i, last - number + 1)
    tl.store(out_ptr + 2 * i + 1, last + 1)


def ordered(
    lens: Lens, num_programs: int, head_blocks: int, *, cut_slots: int = 0, max_decode_queries: int = 0,
    mixed: bool = True, block_t: int = 16, block_n: int = 64,
) -> tuple[list[RowBlock], int, int]:  # fmt: skip
    """Order a batch by `hopper_schedule_kernel`, judge what is found, and return it.

    Returns:
        The row blocks in the order of places, how many are of single ones, and the back's programs.
    """
    row_blocks = {
        (seq, block): (block * block_t, min(block * block_t + block_t, queries))
        for seq, queries in enumerate(lens.queries.tolist())
        if queries > max_decode_queries
        for block in range(cdiv(queries, block_t))
    }
    lengths, most = lens.lengths(), len(row_blocks) + cut_slots // head_blocks + 1
    places = torch.full((triton.next_power_of_2(most), FIELDS.value), -1, dtype=torch.int32)
    summary, planned = torch.tensor([-1] * 3, dtype=torch.int32), torch.zeros(len(lens.queries), 3, dtype=torch.int32)
    hopper_schedule_kernel[cdiv(most, PLACES.value),](
        places, summary, planned, lengths, *lens.window, len(lens.queries), max_decode_queries, num_programs,
        head_blocks, cut_slots, most, int(mixed), block_t, block_n,
        TOKENS=0 if lens.begin is None else triton.next_power_of_2(block_t), PDL=False,
    )  # fmt: skip
    count, num_singles, from_back = summary.tolist()
    assert (places[count:] == -1).all()
    offsets = 0 * lens.keys if lens.offsets is None else lens.offsets
    assert np.array_equal(planned, np.stack([lens.keys, lens.starts[1:], offsets], 1))
    tiles = torch.zeros(len(places), 2, dtype=torch.int32)
    split_kernel[1,](tiles, places, BLOCK_N=block_n, SIZE=len(places))
    found, items, combined = [], [], {}
    for numbers, (low, high) in zip(places[:count].tolist(), tiles.tolist(), strict=False):
        place = RowBlock(*numbers[: len(RowBlock._fields)])
        seq, key = place.seq, (place.seq, place.token // block_t)
        assert place[2:6] == (lens.starts[seq], lens.queries[seq], lens.first_pos[seq], lens.keys[seq])
        slots = [place.first_slot + (i << place.shift) + place.split for i in range(head_blocks)] if place.shift else []
        combined[key] = range(place.first_slot, place.first_slot + (head_blocks << place.shift)) if place.shift else ()
        found.append(place)
        items.append(Item(key, low, high, (*slots,)))
    for key, own in combined.items():  # of a row block, the splits of one head block lie next to each other
        each = len(own) // head_blocks
        combined[key] = [own[i] for j in range(each) for i in range(j, len(own), each)]
    assert_each_tile_once(items, lens.spans(row_blocks, block_n), combined, cut_slots)
    return found, num_singles, from_back


def row_blocks_of(
    lens: Sequence[tuple[int, int]], num_programs: int, head_blocks: int, *, offsets: Sequence[int] | None = None,
    window: tuple[int, int] = CAUSAL, **options: Any,
) -> tuple[list[RowBlock], int, int]:  # fmt: skip
    """Do the same for pairs of queries and keys."""
    queries, keys = np.array(lens, np.int64).reshape(-1, 2).T
    described = Lens(queries, keys, window, None if offsets is None else np.array(offsets))
    return ordered(described, num_programs, head_blocks, **options)
