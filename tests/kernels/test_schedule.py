"""The schedule of the portable kernel: what partitions have, how long they are, and when it is found again."""

import dataclasses
import gc
from collections.abc import Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import quire
from quire import debug
from quire.dispatch.config import COSTS, KernelConfig
from quire.dispatch.request import cdiv
from quire.kernels import scheduler as scheduling
from quire.kernels.portable.launch import NEVER, PortableLaunch
from quire.kernels.portable.schedule import (
    Costs,
    Units,
    load_part,
    load_sequence,
    min_partition_units,
    next_row_block,
    partition_size,
    skip_decoding,
    skip_prompts,
    span,
    units_here,
)
from quire.kernels.portable.variants import min_partition_tiles
from quire.kernels.scheduler import Lengths, Scheduler
from quire.testing import error_budget, make_problem

pytestmark = [pytest.mark.one_triton, pytest.mark.triton]

SPEC = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16)
SMALL = KernelConfig(16, 16, 4, 2, False, programs_per_sm=64, block_d=16, block_dv=16)
HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}


@triton.jit
def shortest_kernel(out_ptr, means_ptr, combine_cost, min_split_tiles, two_level_discount, two_level_min_tiles):
    costs = Costs(combine_cost, min_split_tiles, two_level_discount, two_level_min_tiles)
    pid = tl.program_id(0)
    tl.store(out_ptr + pid, min_partition_units(tl.load(means_ptr + pid), costs))


@pytest.mark.parametrize("two_level_min_tiles", [30, 700, NEVER])
@pytest.mark.parametrize("combine_cost", [0.0, 0.29, 3.0])
def test_host_and_device_agree_on_the_shortest_partition(combine_cost, two_level_min_tiles, device):
    costs = dataclasses.replace(COSTS, two_level_combine_discount=0.4)
    edges = {costs.min_split_tiles, two_level_min_tiles} - {NEVER}
    means = {0.37, 1.0, 1.37, 2.0, 3.0, 7.5, 33.3, 100.0, 1024.0, 5000.0, 65536.0}
    means |= {edge + more for edge in edges for more in (-1, -0.5, 0, 0.5, 1) if edge + more >= 1}
    found = torch.zeros(len(means), device=device)
    shortest_kernel[len(means),](
        found, torch.tensor(sorted(means), device=device), combine_cost, costs.min_split_tiles,
        costs.two_level_combine_discount, two_level_min_tiles,
    )  # fmt: skip
    # The kernel adds one half and truncates where it uses the number, and is never below one unit of the row.
    on_device = [max(1, int(shortest + 0.5)) for shortest in found.tolist()]
    on_host = [min_partition_tiles(mean, combine_cost, costs, two_level_min_tiles) for mean in sorted(means)]
    assert dict(zip(sorted(means), on_device, strict=True)) == dict(zip(sorted(means), on_host, strict=True))


@triton.jit
def size_kernel(out_ptr, units, num_seqs, num_partitions, combine_cost, min_split_tiles):
    costs = Costs(combine_cost, min_split_tiles, 1.0, 1 << 30)
    tl.store(out_ptr, partition_size(units * num_seqs, units, num_seqs, num_partitions, costs))


@pytest.mark.parametrize(
    ("units", "num_seqs", "num_partitions", "combine_cost", "min_split_tiles", "size"),
    [
        (128, 16, 33, 0.02, 0, 64),  # 63 units would fill 33 partitions, of which most would cross sequences
        (128, 16, 33, 0.0, 0, 63),  # the caller chose how many
        (120, 16, 33, 0.02, 0, 60),  # 59
        (116, 16, 33, 0.02, 0, 58),  # 57
        (60, 16, 33, 0.02, 0, 30),
        (56, 16, 33, 0.02, 0, 28),
        (56, 16, 34, 0.02, 0, 27),  # 28 is more than a thirty-second longer
        (56, 16, 34, 0.02, 4, 28),  # four units more are allowed
        (128, 16, 40, 0.02, 0, 52),  # 64 is too long
        (31, 64, 62, 0.02, 0, 32),  # 62 is too long
        (31, 64, 63, 0.02, 1, 32),
        (31, 64, 64, 0.02, 0, 31),
        (32, 256, 33, 0.02, 4, 249),  # 256 are whole sequences, and more than four units longer
        (512, 32, 33, 0.02, 4, 497),  # 512 are a whole one
        (32, 128, 33, 0.02, 4, 128),
    ],
)
def test_partitions_end_where_equal_sequences_do(
    units, num_seqs, num_partitions, combine_cost, min_split_tiles, size, device
):
    found = torch.zeros(1, dtype=torch.int32, device=device)
    size_kernel[1,](found, units, num_seqs, num_partitions, combine_cost, min_split_tiles)
    assert found.item() == size


MOST = tl.constexpr(512)  # row blocks of a partition, in these tests
ITEM = tl.constexpr(6)


@triton.jit
def walk_kernel(
    out_ptr, parts_ptr, lengths, cu_seqlens_q, window_left, window_right,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, MAX_DECODE_QUERIES: tl.constexpr,
    MIN_QUERIES: tl.constexpr, MULTI_BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the sequence, the row block, its first unit, its last one and one, planned units, and whether it is cut."""
    U: tl.constexpr = Units(GROUP, BLOCK_M, UNIT, MAX_DECODE_QUERIES, MIN_QUERIES=MIN_QUERIES)
    part = load_part(parts_ptr, tl.program_id(0))
    seq, block, more = part.seq, part.block, part.low < part.high
    at = out_ptr + tl.program_id(0) * MOST * ITEM
    while more:
        sequence = load_sequence(lengths, cu_seqlens_q, seq)
        _, _, _, num_units, num_blocks = span(sequence, lengths, window_left, window_right, U)
        start, stop, _, planned, is_cut = units_here(part, seq, block, num_units)
        item = (seq, block, start, stop, planned, is_cut.to(tl.int32))
        for i in tl.static_range(len(item)):
            tl.store(at + i, item[i])
        at += ITEM
        seq, block, more = next_row_block(part, seq, block, num_blocks, MULTI_BLOCK)
        if MAX_DECODE_QUERIES > 0:
            seq = skip_prompts(cu_seqlens_q, seq, part.last_seq, MAX_DECODE_QUERIES)
        if MIN_QUERIES > 0:
            seq = skip_decoding(cu_seqlens_q, seq, part.last_seq, MIN_QUERIES)


def launch_for(num_seqs: int, num_partitions: int, rows: tuple[int, int], costs: tuple, **more: Any) -> Any:
    """Return what `Scheduler` reads of a launch."""
    group, block_m = rows
    split, window, most_queries = more.get("split", 0), more.get("window", (1 << 30, 0)), more.get("most_queries", 0)
    constexprs = {
        "GROUP": group, "BLOCK_M": block_m, "MAX_DECODE_QUERIES": most_queries, "INTERVALS": 0,
        "MORE_INTERVALS": False, "MIN_QUERIES": more.get("least_queries", 0), "FIXED_SPLIT": split > 0, "PDL": False,
    }  # fmt: skip
    launch = SimpleNamespace(
        num_partitions=num_partitions, num_cuts=more.get("num_cuts", 0), window=window, partition_costs=costs,
        request=SimpleNamespace(num_seqs=num_seqs), schedule_constexprs=lambda: constexprs,
    )  # fmt: skip
    launch.search = lambda asked: PortableLaunch.search(launch, asked)
    return launch


def units_of(q_len: int, seq_len: int, rows: tuple[int, int], unit: int, window: int) -> tuple[int, int]:
    """Return the row blocks of a sequence, and the units of each."""
    first = max(seq_len - q_len - window, 0) // unit if q_len else 0
    keys = seq_len if q_len else 0
    return max(cdiv(q_len * rows[0], rows[1]), 1), max(cdiv(keys, unit) - first, 1)


def expected_items(
    lens: Sequence[tuple[int, int]], rows: tuple[int, int], unit: int, window: int, ours: range, num_partitions: int,
    size: int,
) -> list[list[tuple[int, ...]]]:  # fmt: skip
    """Return the items of each partition, from a list of all units in their order."""
    every = [
        (seq, block, i, of)
        for seq, (q_len, seq_len) in enumerate(lens)
        if q_len in ours
        for blocks, of in [units_of(q_len, seq_len, rows, unit, window)]
        for block in range(blocks)
        for i in range(of)
    ]
    items = []
    for p in range(num_partitions):
        here = [list(g) for _, g in groupby(every[p * size : (p + 1) * size], key=lambda u: u[:2])]
        items.append([(*g[0][:2], g[0][2], g[-1][2] + 1, g[0][3], int(len(g) < g[0][3])) for g in here])
    return items


@pytest.mark.parametrize("seed", range(12))
def test_each_unit_is_in_one_partition_and_cut_row_blocks_name_their_slots(seed, device):
    """Against a list of all units. The lengths have sequences without keys or queries, and many more than one step."""
    random = np.random.default_rng(seed)
    ragged, many = seed % 3 != 0, seed % 4 == 1
    rows, unit = ((3, 4) if ragged else (4, 16)), int(random.choice([1, 16, 64]))
    window, most, least = int(random.choice([1 << 30, 40])), 5 if seed % 3 == 2 else 0, 3 if seed % 6 == 4 else 0
    ours = range(least, most + 1 if most else 1 << 30)  # queries of sequences that no other launch serves
    num_seqs, num_partitions = (
        int(random.integers(260, 600) if many else random.integers(1, 30)),
        int(random.integers(1, 40)),
    )
    queries = random.integers(0, 9, num_seqs) if ragged else np.ones(num_seqs, int)
    keys = random.integers(0, 300, num_seqs)
    lens = [(int(q), int(q + n * (random.random() < 0.8))) for q, n in zip(queries, keys, strict=True)]
    starts = torch.tensor(np.cumsum([0, *(q for q, _ in lens)]), dtype=torch.int32, device=device) if ragged else None
    seq_lens = torch.tensor([n for _, n in lens], dtype=torch.int32, device=device)
    blocks = [units_of(*n, rows, unit, window)[0] for n in lens]
    combines = most == least == 0
    launch = launch_for(
        num_seqs, num_partitions, rows, (0.0, 0, 1.0, NEVER), window=(window, 0), most_queries=most,
        least_queries=least, num_cuts=sum(blocks) + 3 if combines else 0,
    )  # fmt: skip
    finder = Scheduler(launch, SimpleNamespace(
        seq_lens=seq_lens, query_offsets=None, key_begin=None, key_end=None, cu_seqlens_q=starts,
        device=seq_lens.device,
    ))  # fmt: skip
    assert finder.find(unit) and not finder.find(unit)
    parts, cuts = finder.tensors
    found = torch.full((num_partitions, MOST.value, ITEM.value), -1, dtype=torch.int32, device=device)
    walk_kernel[num_partitions,](
        found, parts, Lengths(seq_lens, starts, None, None, None), starts, window, 0, *rows, unit, most, least, ragged
    )
    items = [[tuple(item) for item in of.tolist() if item[0] >= 0] for of in found]
    total = sum(b * u for n in lens if n[0] in ours for b, u in [units_of(*n, rows, unit, window)])
    size = max(cdiv(total, num_partitions), 1)
    expected = expected_items(lens, rows, unit, window, ours, num_partitions, size)
    # With longer or shorter sequences left out, those of other kernels may stand between a partition's own.
    assert items == expected
    if not combines:
        assert cuts is None
        return
    at = [(seq, block) for seq, count in enumerate(blocks) for block in range(count)]
    holders = {key: [p for p, own in enumerate(items) if any(item[:2] == key for item in own)] for key in at}
    wanted = [(len(holders[key]), 2 * holders[key][0] + 1, *key) for key in at] + 3 * [(0, 0, 0, 0)]
    assert [tuple(cut) for cut in cuts.view(-1, 4)[: len(wanted)].tolist()] == wanted


WAYS = {
    "the last program combines": ({}, False),
    "a second launch combines": ({}, True),
    "batch-invariant": ({"batch_invariant": True}, False),
    "batch-invariant, a second launch folds": ({"batch_invariant": True}, True),
}


def set_unseen(tensor: torch.Tensor, values: Any) -> None:
    """Write to a tensor as kernels do: its version stays."""
    version = tensor._version
    tensor.data.copy_(torch.as_tensor(values))
    assert tensor._version == version


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("queries", [1, 5])
def test_a_stale_schedule_gives_the_right_result_or_nan(way, queries, device, combine_apart):
    """Lengths change, and the plan does not learn of it. The next launch that does is right: no counter is left behind.

    There are sequences of one partition, and of several; they grow, shrink, become empty, and take turns.
    """
    options, apart = WAYS[way]
    combine_apart(apart)
    longest = 1800 if options else 400
    kinds = np.array([longest, 37, longest // 2, 18, 9, longest // 4])
    spec = quire.AttentionSpec(**HEADS)
    p = make_problem(spec, ((queries, longest),) * len(kinds), device=device, one_query=queries == 1)
    plan = quire.plan(spec, p.batch, **p.bounds, **options or {"num_splits": 3, "config": SMALL})
    assert plan.kernel == "split_kv" and plan.launch.has_combine_launch == apart
    random, nan_rows, right_rows = np.random.default_rng(queries), 0, 0

    def lengths() -> torch.Tensor:
        found = random.permutation(kinds) * random.choice([0, 1, 1.4], len(kinds))
        return torch.tensor(np.clip(found, queries, longest).astype(np.int32))

    for _ in range(4):
        p.batch.seq_lens.copy_(lengths())
        quire.attention(p.q, p.cache, plan)
        set_unseen(p.batch.seq_lens, lengths())
        state = quire.attention(p.q, p.cache, plan, return_lse=True)
        is_nan = state.lse.isnan().any(1)
        assert torch.equal(state.out.isnan().any(2).any(1), is_nan)
        p.batch.seq_lens.add_(0)  # which PyTorch counts
        right = quire.attention(p.q, p.cache, plan, return_lse=True)
        assert error_budget(p, right).passed
        torch.testing.assert_close(state.out[~is_nan], right.out[~is_nan], rtol=1e-4, atol=1e-5)
        nan_rows, right_rows = nan_rows + int(is_nan.sum()), right_rows + int((~is_nan).sum())
    assert nan_rows and right_rows


def test_queries_may_move_between_sequences_under_a_schedule(device):
    """A partition that ends with a sequence serves the row blocks that the sequence has now, whichever they are."""
    spec = quire.AttentionSpec(**HEADS | {"num_q_heads": 18})
    p = make_problem(spec, ((8, 40), (1, 20), (1, 16), (5, 30)), device=device)
    plan = quire.plan(spec, p.batch, **p.bounds | {"max_query_len": 8}, num_splits=2, config=SMALL)
    assert plan.kernel == "split_kv"
    quire.attention(p.q, p.cache, plan)
    for ends in ((2, 8, 8, 15), (0, 6, 13, 15), (8, 9, 9, 15), (3, 11, 14, 15)):
        set_unseen(p.batch.cu_seqlens_q, (0, *ends))
        unwritten = quire.State(torch.full_like(p.q, 9.0), torch.full(p.q.shape[:2], 9.0, device=device))
        state = quire.attention(p.q, p.cache, plan, out=unwritten)
        p.batch.cu_seqlens_q.add_(0)
        right = quire.attention(p.q, p.cache, plan, return_lse=True)
        is_nan = state.lse.isnan().any(1)
        torch.testing.assert_close(state.out[~is_nan], right.out[~is_nan], rtol=1e-4, atol=1e-5)
        assert error_budget(p, right).passed


def test_a_schedule_is_found_once_and_again_after_a_write_or_in_a_capture(device, monkeypatch):
    spec = quire.AttentionSpec(**HEADS)
    p = make_problem(spec, ((1, 300), (1, 40)), device=device, one_query=True)
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=4, config=SMALL)
    launches, kernel = [], scheduling.Kernel

    def counted(function: Any) -> Any:
        launch = kernel(function)
        return lambda grid, tensors, *more: (launches.append(tensors[0].data_ptr()), launch(grid, tensors, *more))

    monkeypatch.setattr(scheduling, "Kernel", counted)
    capture = 0
    monkeypatch.setattr(scheduling, "capture_id", lambda device: capture)

    def found() -> int:
        before = len(launches)
        assert error_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True)).passed
        return len(launches) - before

    assert [found(), found()] == [1, 0]
    p.batch.seq_lens.copy_(torch.tensor([250, 10]))
    assert [found(), found()] == [1, 0]
    assert launches[0] == launches[1]
    capture = 7
    assert [found(), found()] == [1, 0]
    assert launches[2] != launches[1]
    capture = 8
    assert [found(), found()] == [1, 0]
    capture = 0
    assert [found(), found()] == [1, 0]
    with torch.inference_mode():  # where tensors do not count what is written to them
        batch = dataclasses.replace(p.batch, seq_lens=p.batch.seq_lens.clone())
    plan = quire.plan(spec, batch, **p.bounds, num_splits=4, config=SMALL)
    assert [found(), found()] == [1, 1]


def test_plans_for_the_same_lengths_share_a_schedule_and_others_do_not(device):
    spec = quire.AttentionSpec(**HEADS)
    p = make_problem(spec, ((1, 300), (1, 40)), device=device, one_query=True)

    def plan(**changed: Any) -> Any:
        return quire.plan(spec, dataclasses.replace(p.batch, **changed), **p.bounds, num_splits=4, config=SMALL)

    first, second = plan(), plan(page_table=p.batch.page_table.clone())
    other = plan(seq_lens=p.batch.seq_lens.clone())
    assert first.runner.scheduler is second.runner.scheduler is not other.runner.scheduler
    for made in (first, second, other):
        assert error_budget(p, quire.attention(p.q, p.cache, made, return_lse=True)).passed
    p.batch.seq_lens.copy_(torch.tensor([200, 30]))
    for made in (second, first):
        assert error_budget(p, quire.attention(p.q, p.cache, made, return_lse=True)).passed
    set_unseen(p.batch.seq_lens, (170, 20))
    stale = quire.attention(p.q, p.cache, first, return_lse=True)
    assert stale.lse.isnan().any()
    for made in (plan(), first, second):  # a new plan reads the lengths, for all that share its schedule
        assert error_budget(p, quire.attention(p.q, p.cache, made, return_lse=True)).passed
    set_unseen(p.batch.seq_lens, (290, 5))
    second.update()
    for made in (first, second):
        assert error_budget(p, quire.attention(p.q, p.cache, made, return_lse=True)).passed
    number = len(scheduling.SCHEDULERS)
    del first, second, other, made
    gc.collect()
    assert len(scheduling.SCHEDULERS) <= number - 2


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # in the interpreter of Triton 3.6
def test_a_recorded_call_with_a_stale_schedule_warns_and_is_right(device, tmp_path):
    spec = quire.AttentionSpec(**HEADS)
    p = make_problem(spec, ((1, 300), (1, 40)), device=device, one_query=True)
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=4, config=SMALL)

    def recorded() -> Any:
        with debug.record(tmp_path / "call.quire"):
            return quire.attention(p.q, p.cache, plan, return_lse=True)

    recorded()
    recorded()
    p.batch.seq_lens.copy_(torch.tensor([290, 5]))
    recorded()
    set_unseen(p.batch.seq_lens, (170, 20))
    with pytest.warns(UserWarning, match=r"call plan.update\(\) after that kernel") as warned:
        state = recorded()
    assert [w.filename for w in warned if w.category is UserWarning] == [__file__]
    assert error_budget(p, state).passed
    recorded()
