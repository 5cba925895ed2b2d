"""The schedule of the MLA kernel for Hopper GPUs: what partitions have, and what becomes of one that is stale.

Its kernel runs in Triton's interpreter. Those that read it run in the simulator, which raises if all warps wait.
"""

import dataclasses
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import quire
from quire.dispatch.device import interprets
from quire.dispatch.request import cdiv
from quire.testing import error_budget, make_problem

if not interprets():
    pytest.skip("the kernel of the schedule runs in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels import scheduler as scheduling
from quire.kernels.mla_hopper.program import Config, Program, first_sequence, next_sequence, work_of
from quire.kernels.mla_hopper.schedule import ROWS, TILE, load_mla_part, mla_schedule_kernel
from quire.kernels.scheduler import Lengths, Scheduler, Search
from tests.hopper_simulator.launch import simulate, simulated_hopper

pytestmark = [pytest.mark.one_triton, pytest.mark.triton]

MOST = gl.constexpr(300)  # sequences of a partition, in these tests
ITEM = gl.constexpr(4)
UNWRITTEN = 77.0


@gluon.jit(do_not_specialize=["num_partitions"])
def walk_kernel(
    out_ptr, parts_ptr, seq_lens, cu_seqlens_q, num_partitions, causal, NUM_HEADS: gl.constexpr,
):  # fmt: skip
    """Store each sequence of a partition: its number, its first tile, its tiles, and whether others are elsewhere."""
    row_block, index = gl.program_id(0), gl.program_id(1)
    number = row_block * num_partitions + index
    part = load_mla_part(parts_ptr, number)
    lengths, config = Lengths(seq_lens, cu_seqlens_q, None, None, None), Config(NUM_HEADS, ROWS, ROWS, 64, 64, False)
    program = Program(None, None, lengths, part, index, num_partitions, row_block, causal > 0, 1.0, None, config)
    at = out_ptr + number * MOST * ITEM
    seq, known, tile = first_sequence(program, row_block)
    while seq <= part.last_seq:
        work = work_of(program, seq, known, tile, row_block)
        gl.store(at, seq)
        gl.store(at + 1, tile)
        gl.store(at + 2, work.count)
        gl.store(at + 3, gl.where(work.starts & work.ends, 0, 1))
        at += ITEM
        seq, known, tile = next_sequence(program, seq, row_block)


def tiles_of(q_len: int, seq_len: int, row_block: int, num_heads: int, causal: bool) -> int:
    """Return the tiles of a row block of a sequence."""
    if q_len * num_heads <= row_block * ROWS.value:
        return 0
    last = min((row_block * ROWS.value + ROWS.value - 1) // num_heads, q_len - 1)
    visible = min(seq_len - q_len + last + 1, seq_len) if causal else seq_len
    return max(cdiv(max(visible, 0), TILE.value), 1)


def size_of(tiles: list[int], num_partitions: int, combine_cost: float, sequence_cost: int) -> tuple[int, int]:
    """Return the places of a partition, and those before each sequence."""
    total, longest, count = sum(tiles), max(tiles), sum(n > 0 for n in tiles)
    equal = longest * count == total
    overhead = 0 if equal else sequence_cost
    size = max(cdiv(total + overhead * count, num_partitions), int((total * combine_cost) ** 0.5 + 0.5), 1)
    longest = max(longest, 1)
    even = cdiv(longest, max(longest // size, 1)) if size < longest else cdiv(size, longest) * longest
    return (even if equal and even <= size + 1 else size), overhead


@pytest.mark.parametrize("seed", range(12))
def test_each_tile_is_in_one_partition_and_cuts_name_their_partials(seed):
    """Against a list of all places. There are sequences without keys, queries or rows, and more than one step of them.

    The least cost of a cut makes partitions of a place, of which some have nothing but the beginning of a sequence.
    """
    random = np.random.default_rng(seed)
    ragged, equal, causal = seed % 3 != 0, seed % 4 == 2, bool(seed % 2)
    num_heads = int(random.choice([16, 40, 128])) if ragged else 128
    num_seqs, parts = int(random.choice([1, 7, 30, 140, 270])), int(random.choice([1, 2, 33, 66]))
    costs = float(random.choice([0.0, 0.03, 0.1])), int(random.choice([1, 4]))
    queries = random.integers(0, 4, num_seqs) if ragged else np.ones(num_seqs, int)
    keys = np.full(num_seqs, 700) if equal else random.integers(0, 1500, num_seqs) * (random.random(num_seqs) < 0.9)
    keys = np.maximum(keys, queries)
    starts = torch.tensor(np.cumsum([0, *queries]), dtype=torch.int32) if ragged else None
    seq_lens = torch.tensor(keys, dtype=torch.int32)
    row_blocks, by_sequence = cdiv(int(queries.max(initial=1)) * num_heads, ROWS.value) or 1, num_seqs <= 32
    num_cuts = num_seqs if by_sequence else max(1, parts - 1)
    numbers = *costs, int(causal), int(by_sequence), num_seqs, parts, num_cuts
    sizes, meta = (row_blocks * parts * 16, row_blocks * num_cuts * 4), {"NUM_HEADS": num_heads, "PDL": False}
    search = Search(mla_schedule_kernel, row_blocks * max(parts, num_cuts), sizes, numbers, meta)
    batch = SimpleNamespace(
        seq_lens=seq_lens, query_offsets=None, key_begin=None, key_end=None, cu_seqlens_q=starts, device=seq_lens.device
    )  # fmt: skip
    finder = Scheduler(SimpleNamespace(search=lambda asked: search), batch)
    assert finder.find(None) and not finder.find(None)
    found = torch.full((row_blocks, parts, MOST.value, ITEM.value), -1, dtype=torch.int32)
    tensors = found, finder.tensors[0], seq_lens, starts
    simulate(walk_kernel, (row_blocks, parts), (*tensors, parts, int(causal)), {"NUM_HEADS": num_heads}, (), seed)
    cuts = finder.tensors[1].view(row_blocks, num_cuts, 4).tolist()
    for block in range(row_blocks):
        tiles = [tiles_of(int(q), int(n), block, num_heads, causal) for q, n in zip(queries, keys, strict=True)]
        size, overhead = size_of(tiles, parts, *costs)
        places = [(seq, i) for seq, n in enumerate(tiles) for i in range(-overhead, n) if n]
        expected = []
        for p in range(parts):
            here = [place for place in places[p * size : (p + 1) * size] if place[1] >= 0]
            groups = [(seq, [i for _, i in group]) for seq, group in groupby(here, key=lambda place: place[0])]
            expected.append([(seq, own[0], len(own), int(len(own) < tiles[seq])) for seq, own in groups])
        assert [[tuple(item) for item in of.tolist() if item[0] >= 0] for of in found[block]] == expected
        holders = [[p for p, own in enumerate(expected) if any(i[0] == seq for i in own)] for seq in range(num_seqs)]
        cut = {seq: (len(held), held[0]) for seq, held in enumerate(holders) if len(held) > 1}
        assert {seq: (number, first) for number, first, seq, _ in cuts[block] if number > 1} == cut
        if by_sequence:
            assert [seq for _, _, seq, _ in cuts[block]] == [*range(num_seqs)]


E4M3 = {"kv_dtype": torch.float8_e4m3fn}
KINDS = {
    "16 rows": (8, {}),
    "32 fp8 rows": (16, E4M3),
    "64 rows": (40, {}),
    "64 fp8 rows": (40, E4M3),
    "products in fp8": (40, E4M3 | {"allow_fp8": True}),
}


def set_unseen(tensor: torch.Tensor, values: Any) -> None:
    """Write to a tensor as kernels do: its version stays."""
    version = tensor._version
    tensor.data.copy_(torch.as_tensor(values))
    assert tensor._version == version


def assert_right_or_nan(p: Any, plan: Any, seed: int) -> tuple[int, int]:
    """Attend with a stale schedule and with a new one. Return how many rows of the first are NaN, and how many right.

    Rows that are not written keep what memory had, which is not right.
    """
    held = quire.State(torch.full((len(p.q), p.spec.num_q_heads, 512), UNWRITTEN, dtype=p.spec.dtype),
                       torch.full((len(p.q), p.spec.num_q_heads), UNWRITTEN))  # fmt: skip
    with simulated_hopper(seed):
        state = quire.attention(p.q, p.cache, plan, out=held)
        for lengths in (p.batch.seq_lens, p.batch.cu_seqlens_q):
            if lengths is not None:
                lengths.add_(0)  # which PyTorch counts
        right = quire.attention(p.q, p.cache, plan, return_lse=True)
    assert error_budget(p, right).passed
    is_nan = state.lse.isnan()
    assert torch.equal(state.out.isnan().any(2), is_nan) and torch.equal(state.out.isnan().all(2), is_nan)
    tolerance = 0.05 if p.spec.allow_fp8 else 4e-3
    for found, expected in ((state.out, right.out), (state.lse, right.lse)):
        torch.testing.assert_close(found[~is_nan], expected[~is_nan], rtol=tolerance, atol=tolerance)
    return int(is_nan.sum()), int((~is_nan).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [1, 2])
def test_a_stale_schedule_over_latents_gives_the_right_result_or_nan(kind, queries, take):
    """Sequences grow, shrink, become empty, and take turns; producers and consumers walk the same tiles."""
    take("fp8")
    num_heads, fields = KINDS[kind]
    spec = quire.AttentionSpec.mla(num_q_heads=num_heads, softmax_scale=0.07, dtype=torch.float16, **fields)
    lens = np.array([400, 20, 180, 64, 130])
    p = make_problem(spec, ((queries, 400),) * len(lens), page_size=64, one_query=queries == 1)
    bounds = p.bounds | {"max_seq_len": 20000 if spec.allow_fp8 else 400}
    batch = dataclasses.replace(p.batch, page_table=torch.nn.functional.pad(p.batch.page_table, (0, 400)))
    p = dataclasses.replace(p, batch=batch)
    with simulated_hopper(num_sms=3 * cdiv(num_heads * queries, 64)):
        plan = quire.plan(spec, batch, **bounds, kernel="mla_hopper")
    assert plan.launch.num_partitions == 3 and plan.launch.fp8_mma == spec.allow_fp8
    random, rows = np.random.default_rng(queries), np.zeros(2, int)
    for i in range(2):
        p.batch.seq_lens.copy_(torch.tensor(random.permutation(lens)))
        with simulated_hopper(i):
            quire.attention(p.q, p.cache, plan)
        changed = random.permutation(lens) * (random.random(len(lens)) < 0.8)
        set_unseen(p.batch.seq_lens, np.maximum(changed, queries).astype(np.int32))
        rows += assert_right_or_nan(p, plan, i)
    assert rows.all()


@pytest.mark.parametrize("kind", ["16 rows", "64 rows", "products in fp8"])
def test_queries_over_latents_may_move_between_sequences_under_a_schedule(kind, take):
    """Into row blocks that sequences did not have, at the beginning of the batch, in its middle, and at its end."""
    take("fp8")
    num_heads, fields = KINDS[kind]
    spec = quire.AttentionSpec.mla(num_q_heads=num_heads, softmax_scale=0.07, dtype=torch.float16, **fields)
    p = make_problem(spec, ((1, 90), (3, 150), (1, 70), (1, 40), (2, 100)), page_size=64)
    p.batch.cu_seqlens_q.copy_(torch.tensor((0, 1, 5, 5, 6, 8)))
    if spec.allow_fp8:
        batch = dataclasses.replace(p.batch, page_table=torch.nn.functional.pad(p.batch.page_table, (0, 400)))
        p = dataclasses.replace(p, batch=batch)
    bounds = p.bounds | {"max_query_len": 5, "max_seq_len": 20000 if spec.allow_fp8 else 150}
    with simulated_hopper(num_sms=3 * cdiv(num_heads * 5, 64)):
        plan = quire.plan(spec, p.batch, **bounds, kernel="mla_hopper")
    assert plan.launch.fp8_mma == spec.allow_fp8
    with simulated_hopper():
        quire.attention(p.q, p.cache, plan)
    rows = np.zeros(2, int)
    for ends in ((4, 5, 6, 7, 8), (1, 1, 4, 4, 8), (0, 2, 2, 7, 8), (1, 5, 5, 6, 8)):
        set_unseen(p.batch.cu_seqlens_q, (0, *ends))
        rows += assert_right_or_nan(p, plan, ends[0])
    assert rows.all()


def test_a_schedule_of_more_queries_reads_none_beyond_those_of_now():
    spec = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.07, dtype=torch.float16)
    p = make_problem(spec, ((2, 150), (2, 150)), page_size=64)
    with simulated_hopper(num_sms=2):
        plan = quire.plan(spec, p.batch, **p.bounds, kernel="mla_hopper")
        quire.attention(p.q, p.cache, plan)
    set_unseen(p.batch.cu_seqlens_q, (0, 1, 2))
    memory = torch.empty(2 * 16 * 576, dtype=torch.float16)  # the simulator knows where its storage ends
    fewer = dataclasses.replace(p, q=memory.view(2, 16, 576).copy_(p.q[:2]))
    with simulated_hopper():
        state = quire.attention(fewer.q, p.cache, plan, return_lse=True)
    assert state.lse.isnan().all()


def test_the_schedule_of_latents_is_found_once_and_again_after_a_write(monkeypatch):
    spec = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.07, dtype=torch.float16)
    p = make_problem(spec, ((1, 300), (1, 40)), page_size=64, one_query=True)
    with simulated_hopper(num_sms=3):
        plan = quire.plan(spec, p.batch, **p.bounds, kernel="mla_hopper")
    launches, kernel = [], scheduling.Kernel

    def counted(function: Any) -> Any:
        launch = kernel(function)
        return lambda *arguments: (launches.append(arguments), launch(*arguments))

    monkeypatch.setattr(scheduling, "Kernel", counted)
    for writes, expected in ((False, 1), (False, 1), (True, 2), (False, 2)):
        if writes:
            p.batch.seq_lens.copy_(torch.tensor([250, 10]))
        with simulated_hopper():
            assert error_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True)).passed
        assert len(launches) == expected
