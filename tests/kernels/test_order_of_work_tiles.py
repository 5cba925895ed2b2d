"""In which order the Hopper kernel takes work tiles, in the simulator: its scheduler's functions and whole launches."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

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

from quire.kernels.hopper import cuts, tile_scheduler
from tests.hopper_simulator.launch import Functions, argument, simulated_hopper
from tests.hopper_simulator.memory import GlobalMemory
from tests.hopper_simulator.program import Machine, Program
from tests.hopper_simulator.values import value

BLOCK_T, BLOCK_N, WORK_TILES_EACH = 16, 64, 2
SEQS = tile_scheduler.SEQS.value
CAUSAL = (1 << 30, 0)


def row_blocks(queries, max_decode_queries=0, block_t=BLOCK_T):
    return -(-queries // block_t) if queries > max_decode_queries else 0


def tiles_of_last(queries, first_pos, keys, window, block_t=BLOCK_T, block_n=BLOCK_N):
    """Return how many tiles of keys the last row block of a sequence sees."""
    token = (queries - 1) // block_t * block_t
    start = max(first_pos + token - window[0], 0)
    stop = min(first_pos + queries + window[1], keys)
    return -(-max(stop - start, 0) // block_n)


def longest_first(lens, offsets=None, window=CAUSAL, max_decode_queries=0):
    """Return (sequence, row block) in the order in which they should come: longest first, of the first SEQS ones."""
    first_pos = [keys - queries for queries, keys in lens] if offsets is None else offsets
    sizes = [tiles_of_last(queries, at, keys, window) for (queries, keys), at in zip(lens, first_pos, strict=True)]
    order = sorted(range(min(len(lens), SEQS)), key=lambda seq: (sizes[seq], seq))
    return [
        (seq, block)
        for seq in reversed([*order, *range(SEQS, len(lens))])
        for block in reversed(range(row_blocks(lens[seq][0], max_decode_queries)))
    ]


def taken(lens, offsets=None, window=CAUSAL, max_decode_queries=0, num_programs=1 << 16):
    """Return (sequence, row block) in the order in which the scheduler's functions find them."""
    memory, found = GlobalMemory(), []
    machine = Machine(0, (num_programs,), memory)
    functions = Functions(machine)
    starts = torch.tensor([0, *itertools.accumulate(queries for queries, _ in lens)], dtype=torch.int32)
    keys = torch.tensor([keys for _, keys in lens], dtype=torch.int32)
    offsets = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    kv = SimpleNamespace(
        seq_lens=argument(keys, memory), query_offsets=argument(offsets, memory) if offsets is not None else None
    )
    batch = argument(starts, memory), value(len(lens)), value(max_decode_queries)

    def schedule():
        call = {name: functions.function(getattr(tile_scheduler, name).fn) for name in NAMES}
        ends = call["row_block_ends"](batch[0], 0, *batch[1:], BLOCK_T)
        count = call["count_row_blocks"](ends, *batch, BLOCK_T)
        places = machine.allocate_shared_memory(tl.int32, [2, SEQS], None)
        ends = call["order_by_keys"](ends, places, kv, *batch, *window, WORK_TILES_EACH, BLOCK_T, BLOCK_N)
        for row_block in reversed(range(int(count))):
            seq, first = call["find_row_block"](ends, value(row_block), *batch, BLOCK_T, True)
            found.append((int(seq), row_block - int(first)))

    machine.run([(Program(machine, (0,)), schedule)])
    return found


NAMES = ("row_block_ends", "count_row_blocks", "order_by_keys", "find_row_block")


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
    monkeypatch.setattr(tile_scheduler, "SHARE", tl.constexpr(16))
    monkeypatch.setattr(cuts, "LEAST_KEYS", tl.constexpr(1 << 20))


@pytest.mark.usefixtures("small_parts_count")
def test_no_length_is_too_long_for_the_order():
    lens = [(9, 2**30 - 1), (9, 2**30 + 5), (9, 40), (0, 2**30), (9, 2**30)]
    found = taken(lens, num_programs=1)
    assert sorted(found) == sorted(taken(lens)) == [(0, 0), (1, 0), (2, 0), (4, 0)]
    assert found[-1] == (2, 0)


LLAMA = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
LONG = 5000
RAGGED = ((20, 90), (33, 640), (1, 2000), (0, 50), (70, 300), (9, 0), (40, 660), (3, 900))  # 8 queries: a decode launch


def attended(monkeypatch, spec, lens, num_sms=1, section_heads=None, bound=LONG, **problem):
    """Attend; return the plan, the state and the (sequence, head) of queries in the order of work tiles."""
    p = make_problem(spec, lens, **problem)
    # With this bound, an SM has one program, so that a GPU of one SM loads queries in the order of work tiles.
    bounds, pages = p.bounds | {"max_seq_len": bound}, bound // p.cache.page_size + 1
    batch = replace(p.batch, page_table=torch.nn.functional.pad(p.batch.page_table, (0, pages)))
    with simulated_hopper(num_sms=num_sms):
        plan = quire.plan(spec, batch, **bounds, kernel="hopper")
        if section_heads:
            plan = make_plan(spec, batch, replace(plan.launch, section_heads=section_heads), "sections")
    loads, load = [], Machine.tma_load

    def load_and_note(machine, desc, coordinates, barrier, into):
        if desc.numbers.data_ptr() == p.q.data_ptr() and into.first[0] == 0:  # the first box of a work tile
            loads.append([int(c) for c in coordinates[:2]])
        load(machine, desc, coordinates, barrier, into)

    with monkeypatch.context() as patch, simulated_hopper():
        patch.setattr(Machine, "tma_load", load_and_note)
        state = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)
    starts = [0, *itertools.accumulate(queries for queries, _ in lens)]
    found = []
    for row, column in loads:
        seq = max(seq for seq, (queries, _) in enumerate(lens) if queries and starts[seq] <= row)
        found.append((seq, column // spec.head_dim))
    return plan, state, found


def each_once(items):
    """Return items without those that are equal to the one before."""
    return [item for item, _ in itertools.groupby(items)]


@pytest.mark.usefixtures("small_parts_count")
@pytest.mark.parametrize("page_size", [16, 1])
def test_the_longest_sequence_of_a_launch_comes_first(page_size, monkeypatch):
    """Those of few queries belong to the decode launch. Pages of 1 have a producer of four warps."""
    plan, state, loads = attended(monkeypatch, quire.AttentionSpec(**LLAMA), RAGGED, page_size=page_size)
    assert plan.launch.max_decode_queries == 8
    assert each_once(seq for seq, _ in loads) == [6, 1, 4, 0, 5]
    # Where all work tiles run at once, nothing is ordered. The bits of prompts are the same.
    queries = torch.tensor([queries for queries, _ in RAGGED])
    num_tokens = int(queries.sum())
    num_sms = plan.launch.num_work_tiles(num_tokens)
    plan, other, _ = attended(monkeypatch, plan.spec, RAGGED, num_sms=num_sms, page_size=page_size)
    assert plan.launch.num_programs(num_tokens) >= plan.launch.num_work_tiles(num_tokens)
    of_prompts = (queries > 8).repeat_interleave(queries)
    assert torch.equal(state.out[of_prompts], other.out[of_prompts])
    assert torch.equal(state.lse[of_prompts], other.lse[of_prompts])


@pytest.mark.usefixtures("small_parts_count")
@pytest.mark.parametrize("bound", [pytest.param(LONG, id="long"), pytest.param(1024, id="short")])
def test_chunks_of_as_many_queries_come_in_the_order_of_their_contexts(bound, monkeypatch):
    """Nothing that the host knows tells them apart. Launches of short contexts, which cut none, find it elsewhere."""
    lens = ((32, 300), (32, 1000), (32, 32), (32, 600))
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": 256})  # an SM has one program
    plan, _, loads = attended(monkeypatch, spec, lens, bound=bound)
    assert plan.launch.decode is None and (plan.launch.cut_slots > 0) == (bound == LONG)
    assert each_once(seq for seq, _ in loads) == [1, 3, 0, 2]


@pytest.mark.usefixtures("small_parts_count")
def test_of_more_sequences_than_are_ordered_the_first_ones_end_a_launch(monkeypatch):
    """They are ordered, so that short work tiles come last. Most sequences here have no queries."""
    spec = quire.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float16)
    lens = tuple((0 if i % 9 else 17, 17 + 37 * i % 1500) for i in range(SEQS + 17))
    plan, _, loads = attended(monkeypatch, spec, lens)
    sizes = [-(-keys // plan.launch.config.block_n) for _, keys in lens]
    wanted = sorted(range(0, SEQS, 9), key=lambda i: (sizes[i], i), reverse=True)
    assert wanted != sorted(wanted, reverse=True)
    assert [seq for seq, _ in loads] == [SEQS + 16, SEQS + 7, *wanted]


@pytest.mark.usefixtures("small_parts_count")
def test_the_longest_sequence_comes_first_in_each_section_of_heads(monkeypatch):
    spec = replace(quire.AttentionSpec(**LLAMA), num_q_heads=4, num_kv_heads=4)
    lens = ((20, 90), (33, 640), (40, 300))
    _, _, loads = attended(monkeypatch, spec, lens, section_heads=2)
    halves = each_once((head // 2, seq) for seq, head in loads)
    assert halves == [(half, seq) for half in (0, 1) for seq in (1, 2, 0)]
