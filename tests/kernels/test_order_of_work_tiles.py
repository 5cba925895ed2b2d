"""In which order the Hopper kernel takes work tiles, in the simulator: its scheduler's functions and whole launches."""

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
import torch

import quire
from quire.dispatch.device import interprets
from quire.plan import make_plan
from quire.testing import error_budget, make_problem

if not interprets():
    pytest.skip("the other kernels of these plans run in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

import triton.language as tl

from quire.kernels import schedule
from quire.kernels.hopper import queue
from tests.extended import extended
from tests.hopper_simulator.launch import Functions, argument, simulated_hopper
from tests.hopper_simulator.memory import GlobalMemory
from tests.hopper_simulator.program import Machine, Program
from tests.hopper_simulator.values import Value, value
from tests.kernels.schedules import CAUSAL, row_blocks_of

pytestmark = [pytest.mark.slow, pytest.mark.one_triton]

BLOCK_T, BLOCK_N, WORK_TILES_EACH = 16, 64, 2
SEQS = schedule.SEQS.value


def row_blocks(queries, max_decode_queries=0, block_t=BLOCK_T):
    return -(-queries // block_t) if queries > max_decode_queries else 0


def tiles_of_last(queries, first_pos, keys, window, block_t=BLOCK_T, block_n=BLOCK_N):
    """Return how many tiles of keys the last row block of a sequence sees."""
    token = (queries - 1) // block_t * block_t
    start = max(first_pos + token - window[0], 0)
    stop = min(first_pos + queries + window[1], keys)
    return -(-max(stop - start, 0) // block_n)


def longest_first(lens, offsets=None, window=CAUSAL, max_decode_queries=0, num_programs=1 << 16):
    """Return (sequence, row block) in the order in which they should come: longest first, of the first SEQS ones.

    Of a mixed batch, those of sequences of one row block come last, the longest one at the very end.
    """
    first_pos = [keys - queries for queries, keys in lens] if offsets is None else offsets
    sizes = [tiles_of_last(queries, at, keys, window) for (queries, keys), at in zip(lens, first_pos, strict=True)]
    blocks = [row_blocks(queries, max_decode_queries) for queries, _ in lens]
    mixed = 1 in blocks[:SEQS] and (max(blocks[:SEQS]) > 1 or len(lens) > SEQS)

    def place(seq):
        singles = mixed and blocks[seq] == 1
        return (0, -sizes[seq], -seq) if singles else (1, sizes[seq], seq)

    order = sorted(range(min(len(lens), SEQS)), key=place)
    return [
        (seq, block)
        for seq in reversed([*order, *range(SEQS, len(lens))])
        for block in reversed(range(row_blocks(lens[seq][0], max_decode_queries)))
    ]


def taken(lens, offsets=None, window=CAUSAL, max_decode_queries=0, num_programs=None):
    """Return (sequence, row block) in the order in which programs take them.

    There are fewer programs than work tiles. The last ones of a mixed batch are checked to be those of sequences of one
    row block.
    """
    all_blocks = sum(row_blocks(queries, max_decode_queries) for queries, _ in lens)
    places, num_singles, _ = row_blocks_of(
        lens, num_programs or max(1, all_blocks * WORK_TILES_EACH - 1), WORK_TILES_EACH, offsets=offsets, window=window,
        max_decode_queries=max_decode_queries,
    )  # fmt: skip
    found = [(place.seq, place.token // BLOCK_T) for place in reversed(places)]
    of_one = [seq for seq, _ in found if row_blocks(lens[seq][0], max_decode_queries) == 1 and seq < SEQS]
    assert num_singles in (0, len(of_one))
    assert num_singles == 0 or [seq for seq, _ in found[-num_singles:]] == of_one
    return found


def drawn(count, seed):
    """Draw the lengths of sequences, of which some have no queries, some no keys, and many as many tiles as others."""
    draw = random.Random(seed)
    lens = []
    for _ in range(count):
        queries = draw.choice((0, 1, 3, draw.randint(4, 90)))
        lens.append(
            (queries, draw.choice((0, queries, queries + draw.randint(0, 100), queries + draw.randint(0, 3000))))
        )
    return lens


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 100, 127, 128, 129, 300])
@pytest.mark.parametrize(
    "options", [{}, {"max_decode_queries": 3}, {"window": (200, 0)}, {"window": (1 << 30, 1 << 30)}], ids=str
)
def test_each_row_block_is_found_once_and_the_longest_sequence_first(count, options):
    lens = drawn(count, seed=count)
    assert taken(lens, **options) == longest_first(lens, **options)


def test_positions_of_queries_that_the_batch_gives_count():
    """The longest sequence is that whose queries see the most keys, not that which has the most."""
    lens, offsets = [(20, 1000), (20, 900), (20, 500)], [100, 300, 480]
    assert [seq for seq, _ in taken(lens, offsets)] == [2, 2, 1, 1, 0, 0]
    assert taken(lens, offsets) == longest_first(lens, offsets)


def test_sequences_of_as_many_tiles_stay_in_the_batch_s_order():
    blocks = [(seq, block) for seq in (3, 2, 1, 0) for block in (1, 0)]
    assert taken([(20, 300), (20, 290), (20, 257), (20, 320)]) == blocks
    assert taken([(20, 20)] * 4) == blocks
    ties = taken([(20, 300), (20, 700), (20, 290), (0, 5000), (20, 701), (20, 30)])
    assert [seq for seq, block in ties if block == 0] == [4, 1, 2, 0, 5]


def test_sequences_stay_in_the_batch_s_order_where_the_longest_work_tile_is_a_small_part_of_all_work():
    lens = [(20, 640), (20, 64), (20, 60), (20, 300)]  # 17 tiles for four work tiles each, and 10 for one
    assert [seq for seq, _ in taken(lens, num_programs=4)] == [0, 0, 3, 3, 2, 2, 1, 1]
    assert [seq for seq, _ in taken(lens, num_programs=3)] == [3, 3, 2, 2, 1, 1, 0, 0]
    assert [seq for seq, _ in taken(lens * 3, num_programs=4)] == [seq for seq in reversed(range(12)) for _ in "01"]
    assert [seq for seq, _ in taken(lens * 3, num_programs=11)][:6] == [8, 8, 4, 4, 0, 0]


@pytest.fixture
def small_parts_count(monkeypatch):
    """The order counts in launches of few programs too, and no sequence is cut by keys."""
    monkeypatch.setattr(schedule, "SHARE", tl.constexpr(16))
    monkeypatch.setattr(schedule, "LEAST_KEYS", tl.constexpr(1 << 20))


@pytest.mark.usefixtures("small_parts_count")
def test_no_length_is_too_long_for_the_order():
    lens = [(9, 2**30 - 1), (9, 2**30 + 5), (9, 40), (0, 2**30), (9, 2**30)]
    found = taken(lens, num_programs=1)
    assert sorted(found) == sorted(taken(lens)) == [(0, 0), (1, 0), (2, 0), (4, 0)]
    assert found[-1] == (2, 0)


LLAMA = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
WIDE = LLAMA | {"head_dim": 256}  # of which an SM has one program
LONG = 5000
FOR_ALL = 4000  # keys; up to this bound, such programs serve decoding sequences too
RAGGED = ((20, 90), (33, 640), (1, 2000), (0, 50), (70, 300), (9, 0), (140, 660), (3, 900))  # two have row blocks


def attended(monkeypatch, spec, lens, num_sms=1, section_heads=None, bound=LONG, **problem):
    """Attend; return the plan, the state, and (sequence, head, program) of queries in the order of work tiles."""
    p = make_problem(spec, lens, **problem)
    bounds, pages = p.bounds | {"max_seq_len": bound}, bound // p.cache.page_size + 1
    batch = replace(p.batch, page_table=torch.nn.functional.pad(p.batch.page_table, (0, pages)))
    with simulated_hopper(num_sms=num_sms):
        plan = quire.plan(spec, batch, **bounds, kernel="hopper")
        if section_heads:
            plan = make_plan(spec, batch, replace(plan.launch, section_heads=section_heads), "sections")
    loads, load = [], Machine.tma_load

    def load_and_note(machine, desc, coordinates, barrier, into):
        if desc.numbers.data_ptr() == p.q.data_ptr() and into.first[0] == 0:  # the first box of a work tile
            loads.append([*(int(c) for c in coordinates[:2]), int(machine.program_id(0))])
        load(machine, desc, coordinates, barrier, into)

    with monkeypatch.context() as patch, simulated_hopper():
        patch.setattr(Machine, "tma_load", load_and_note)
        state = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)
    starts = [0, *itertools.accumulate(queries for queries, _ in lens)]
    found = []
    for head, row, program in loads:
        seq = max(seq for seq, (queries, _) in enumerate(lens) if queries and starts[seq] <= row)
        found.append((seq, head, program))
    return plan, state, found


@cache
def attended_in_order(page_size):
    """Attend to RAGGED by one program, with `small_parts_count`; return as `attended` does."""
    return attended(pytest.MonkeyPatch(), quire.AttentionSpec(**WIDE), RAGGED, bound=FOR_ALL, page_size=page_size)


def each_once(items):
    """Return items without those that are equal to the one before."""
    return [item for item, _ in itertools.groupby(items)]


@pytest.mark.usefixtures("small_parts_count")
@pytest.mark.parametrize("page_size", [extended(16), 1])
def test_the_longest_sequence_of_a_launch_comes_first(page_size, monkeypatch):
    """Sequences of one row block come last. Pages of 1 have a producer of four warps."""
    plan, state, loads = attended_in_order(page_size)
    assert plan.launch.config.block_t == 64
    assert each_once(seq for seq, _, _ in loads) == [6, 4, 5, 0, 1, 7, 2]
    # Where all work tiles run at once, nothing is ordered. The bits are the same.
    num_tokens = sum(queries for queries, _ in RAGGED)
    num_sms = plan.launch.num_work_tiles(num_tokens)
    plan, other, _ = attended(monkeypatch, plan.spec, RAGGED, num_sms=num_sms, bound=FOR_ALL, page_size=page_size)
    assert plan.launch.num_programs(num_tokens) >= plan.launch.num_work_tiles(num_tokens)
    assert torch.equal(state.out, other.out) and torch.equal(state.lse, other.lse)


@pytest.mark.usefixtures("small_parts_count")
@pytest.mark.parametrize(("num_sms", "page_size"), [extended(2, 16), extended(3, 16), (4, 1)])
def test_half_of_the_programs_begin_with_sequences_of_one_row_block(num_sms, page_size, monkeypatch):
    spec = quire.AttentionSpec(**WIDE)
    _, state, loads = attended(monkeypatch, spec, RAGGED, num_sms=num_sms, bound=FOR_ALL, page_size=page_size)
    by_program = {program: [seq for seq, _, one in loads if one == program] for program in range(num_sms)}
    from_front = num_sms - num_sms // 2
    assert all(by_program[program][0] == 6 for program in range(from_front))
    assert [by_program[program][0] for program in range(from_front, num_sms)] == [2] * (num_sms // 2)
    # Each of their programs takes one work tile of another kind from the back, at most.
    for program in range(from_front, num_sms):
        kinds = [kind for kind, _ in itertools.groupby(by_program[program], lambda seq: seq in (4, 6))]
        assert kinds[0] is False and len(kinds) <= 3
    # Each work tile is taken once: those of sequence 6 are three row blocks, those of 4 are two.
    assert sorted(seq for seq, _, _ in loads) == sorted(2 * [6, 6, 6, 4, 4, 5, 0, 1, 7, 2])
    _, other, _ = attended_in_order(page_size)
    assert torch.equal(state.out, other.out) and torch.equal(state.lse, other.lse)


@pytest.mark.parametrize("seed", [*range(5), *map(extended, range(5, 20))])
def test_programs_empty_the_queue_from_both_ends(seed):
    """Each work tile is taken once, in any order of programs, and one program finds last that there is no more."""
    draw = random.Random(seed)
    num_work_tiles, num_programs = draw.randint(2, 60), draw.randint(1, 7)
    num_singles = draw.randint(0, num_work_tiles)
    from_back = draw.randint(0, min(num_singles, num_programs)) if num_work_tiles > num_programs else 0
    memory = GlobalMemory()
    machine = Machine(seed, (num_programs,), memory)
    functions = Functions(machine)
    names = "make_queue", "first_work_tile", "take", "taken_work_tile", "last_number"
    call = {name: functions.function(getattr(queue, name).fn) for name in names}
    counter = torch.zeros(1, dtype=torch.int32)
    at, lane = argument(counter, memory), Value(torch.arange(4, dtype=torch.int32))
    found, last = {program: [] for program in range(num_programs)}, []

    def take_all():
        made = call["make_queue"](value(num_work_tiles), value(num_singles), value(from_back))
        index, backwards = call["first_work_tile"](made, True)
        own, end = found[int(machine.program_id(0))], bool(backwards)
        while int(index) < num_work_tiles:
            own.append((int(index), end))
            took, end = call["take"](at, lane, lane == 0, backwards, True), bool(backwards)
            index, backwards = call["taken_work_tile"](made, lane, took, backwards, True)
        if int(index) == int(call["last_number"](made)):
            last.append(index)

    machine.run([(Program(machine, (i,)), take_all) for i in range(num_programs)])
    assert sorted(index for own in found.values() for index, _ in own) == list(range(num_work_tiles))
    assert len(last) == 1
    for program, own in found.items():
        at_back = [index for index, is_back in own if is_back]
        assert bool(at_back) == (program >= num_programs - from_back)
        assert at_back == sorted(at_back, reverse=True)
        # One work tile at most that is of several row blocks: then the program takes from the front.
        assert sum(index < num_work_tiles - num_singles for index in at_back) <= 1
        at_front = [index for index, is_back in own if not is_back]
        assert at_front == sorted(at_front)


@pytest.mark.usefixtures("small_parts_count")
@pytest.mark.extended
@pytest.mark.parametrize(("decodes", "seqs"), [(0, [0, 0, 0, 0, 4]), (4, [16, 16, 16, 15, 15])])
def test_no_program_has_two_of_the_longest_work_tiles(decodes, seqs, monkeypatch):
    """Four work tiles of a chunk of 1,500 keys take as long as five of decoding sequences each."""
    chunk, decoding = ((80, 1500),), ((1, 300), (1, 290), (1, 310), (1, 300))
    lens = decoding * decodes + chunk if decodes else chunk + decoding
    _, _, loads = attended(monkeypatch, quire.AttentionSpec(**WIDE), lens, num_sms=5, bound=FOR_ALL)
    first = {program: seq for seq, _, program in reversed(loads)}
    assert [first[program] for program in range(5)] == seqs


@pytest.mark.usefixtures("small_parts_count")
def test_more_work_tiles_than_are_counted_are_taken_from_the_front(monkeypatch):
    monkeypatch.setattr(queue, "MOST", tl.constexpr(15))
    monkeypatch.setattr(queue, "FRONT_BITS", tl.constexpr(4))
    spec = quire.AttentionSpec(**WIDE)
    _, _, loads = attended(monkeypatch, spec, RAGGED[:2] + RAGGED[3:7], num_sms=2, bound=FOR_ALL)
    assert len(loads) == 16 and {seq for seq, _, program in loads[:2]} == {5}
    _, _, loads = attended(monkeypatch, spec, RAGGED[:2] + RAGGED[3:5], num_sms=2, bound=FOR_ALL)
    assert len(loads) == 8 and {seq for seq, _, program in loads if program == 1} != {3}


@pytest.mark.usefixtures("small_parts_count")
@pytest.mark.extended
@pytest.mark.parametrize("bound", [pytest.param(LONG, id="long"), pytest.param(1024, id="short")])
def test_chunks_of_as_many_queries_come_in_the_order_of_their_contexts(bound, monkeypatch, take):
    """Nothing that the host knows tells them apart. Launches of short contexts, which cut none, find it elsewhere."""
    take("cut")
    lens = ((32, 300), (32, 1000), (32, 32), (32, 600))
    spec = quire.AttentionSpec(**WIDE)
    plan, _, loads = attended(monkeypatch, spec, lens, bound=bound)
    assert plan.launch.decode is None and (plan.launch.cut_slots > 0) == (bound == LONG)
    assert each_once(seq for seq, _, _ in loads) == [1, 3, 0, 2]


@pytest.mark.usefixtures("small_parts_count")
def test_of_more_sequences_than_are_ordered_the_first_ones_end_a_launch(monkeypatch):
    """They are ordered, so that short work tiles come last. Most sequences here have no queries."""
    spec = quire.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float16)
    lens = tuple((0 if i % 22 else 130, 130 + 37 * i % 1500) for i in range(SEQS + 17))
    plan, _, loads = attended(monkeypatch, spec, lens)
    sizes = [-(-keys // plan.launch.config.block_n) for _, keys in lens]
    wanted = sorted(range(0, SEQS, 22), key=lambda i: (sizes[i], i), reverse=True)
    assert wanted != sorted(wanted, reverse=True)
    assert plan.launch.config.block_t < 130
    assert each_once(seq for seq, _, _ in loads) == [SEQS + 4, *wanted]


@pytest.mark.usefixtures("small_parts_count")
@pytest.mark.extended
def test_the_longest_sequence_comes_first_in_each_section_of_heads(monkeypatch):
    spec = replace(quire.AttentionSpec(**LLAMA), num_q_heads=4, num_kv_heads=4)
    lens = ((70, 90), (66, 1100), (70, 300))
    _, _, loads = attended(monkeypatch, spec, lens, section_heads=2)
    halves = each_once((head // 2, seq) for seq, head, _ in loads)
    assert halves == [(half, seq) for half in (0, 1) for seq in (1, 2, 0)]
