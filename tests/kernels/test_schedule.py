"""Schedules: what each of three policies gives to programs, how long partitions are, and when they are found again."""

import dataclasses
import gc
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
from quire.dispatch.device import interprets
from quire.kernels import scheduler as scheduling
from quire.kernels.portable.launch import NEVER
from quire.kernels.schedule import Costs, partition_size
from quire.kernels.work import size_of_partition
from quire.testing import error_budget, make_problem
from tests.kernels.schedules import (
    BOTH,
    CAUSAL,
    FAR,
    Lens,
    equal_partitions,
    equal_partitions_of_row_blocks,
    ordered,
)

pytestmark = [pytest.mark.one_triton, pytest.mark.triton]

SPEC = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16)
SMALL = KernelConfig(16, 16, 4, 2, False, programs_per_sm=64, block_d=16, block_dv=16)
HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}


@triton.jit
def size_kernel(out_ptr, numbers_ptr, combine_cost, min_split_tiles, two_level_min_tiles):
    at = numbers_ptr + 4 * tl.program_id(0)
    costs = Costs(combine_cost, min_split_tiles, 0.4, two_level_min_tiles)
    size = partition_size(tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), costs)
    tl.store(out_ptr + tl.program_id(0), size)


def sizes_on_both(cases, combine_cost, min_split_tiles, two_level_min_tiles, device):
    """Return the sizes of partitions that the kernel computes, and those that the host does.

    A case is how many units sequences have, how many sequences have as many, and how many partitions there are.
    """
    numbers = [(sum(u * n for u, n in each), max(each)[0], sum(n for _, n in each), parts) for each, parts in cases]
    found = torch.zeros(len(cases), dtype=torch.int32, device=device)
    given = torch.tensor(numbers, dtype=torch.int32, device=device)
    size_kernel[len(cases),](found, given, combine_cost, min_split_tiles, two_level_min_tiles)
    costs = dataclasses.replace(COSTS, two_level_combine_discount=0.4, min_split_tiles=min_split_tiles)
    launch = SimpleNamespace(
        costs=costs, combine_cost=combine_cost, two_level_min_tiles=two_level_min_tiles, min_split_tiles=min_split_tiles
    )
    on_host = [
        size_of_partition(SimpleNamespace(**vars(launch), num_partitions=parts), [(u, 1, n) for u, n in each], total)
        for (each, parts), (total, *_) in zip(cases, numbers, strict=True)
    ]
    return found.tolist(), on_host


@pytest.mark.parametrize("two_level_min_tiles", [30, 700, NEVER])
@pytest.mark.parametrize("combine_cost", [0.0, 0.29, 3.0])
def test_host_and_device_agree_on_the_size_of_partitions(combine_cost, two_level_min_tiles, device):
    random, shortest = np.random.default_rng(0), COSTS.min_split_tiles
    edges = {shortest, two_level_min_tiles} - {NEVER}
    units = {1, 2, 3, 33, 100, 1024, 65536} | {edge + more for edge in edges for more in (-1, 0, 1) if edge + more > 0}
    cases = [([(u, n)], parts) for u in sorted(units) for n in (1, 2, 16) for parts in (1, 33, 1 << 20)]
    cases += [([(u, 1), (u + 1, 1)], 1 << 20) for u in sorted(units)]
    cases += [([(int(u), int(n)) for u, n in random.integers(1, 300, (3, 2))], int(random.integers(1, 200)))
              for _ in range(100)]  # fmt: skip
    on_device, on_host = sizes_on_both(cases, combine_cost, shortest, two_level_min_tiles, device)
    assert dict(zip(map(str, cases), on_device, strict=True)) == dict(zip(map(str, cases), on_host, strict=True))


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
    cases = [([(units, num_seqs)], num_partitions)]
    assert sizes_on_both(cases, combine_cost, min_split_tiles, NEVER, device) == ([size], [size])


def drawn(seed: int) -> tuple[Lens, int]:
    """Draw a batch, of one query each or of any number, and how many intervals a program reads at once.

    Rows see a window, intervals, or a tree. Some sequences have no keys or no queries. There may be more than one step
    of sequences.
    """
    random = np.random.default_rng(seed)
    kind = ("one query", "window", "intervals", "window", "tree", "offsets")[seed % 6]
    num_seqs, most = (int(random.integers(257, 290)), 2) if seed % 4 == 1 else (int(random.integers(1, 30)), 8)
    queries = np.ones(num_seqs, int) if kind == "one query" else random.integers(0, most + 1, num_seqs)
    keys = queries + random.integers(0, 300, num_seqs) * (random.random(num_seqs) < 0.8)
    lens = Lens(queries, keys, one_query=kind == "one query")
    if kind in ("one query", "window"):
        lens.window = (int(random.choice([FAR, 40])), int(random.choice([0, 7, FAR])))
    if kind == "offsets":
        lens.offsets = (random.random(num_seqs) * (keys - queries)).astype(int)
    if kind in ("intervals", "tree"):
        lens.begin = random.integers(-20, 300, queries.sum())
        lens.end = lens.begin + random.integers(-9, 90, queries.sum()) if kind == "intervals" else None
    return lens, int(random.choice([4, 8])) if lens.begin is not None else 0


@pytest.mark.parametrize("seed", range(18))
def test_equal_partitions_of_a_batch_have_each_visible_tile_once(seed, device):
    random, (lens, at_once) = np.random.default_rng([seed, 1]), drawn(seed)
    rows, unit, fixed = (4, 16) if lens.one_query else (3, 4), int(random.choice([1, 16, 64])), seed % 4 == 2
    ours = {7: range(6), 13: range(2)}.get(seed, range(FAR))
    cost = 0.0 if fixed or seed % 3 == 0 else float(random.choice([0.29, 3.0]))
    parts = int(random.integers(1, 9 if seed % 4 == 1 else 40))
    equal_partitions(lens, parts, rows, unit, device, fixed=fixed, ours=ours, combine_cost=cost, at_once=at_once)


@pytest.mark.skipif(not interprets(), reason="the functions of Gluon kernels run in the simulator")
@pytest.mark.parametrize(
    ("seed", "whole"), [*((seed, False) for seed in range(12)), *((seed, True) for seed in range(8))]
)
def test_equal_partitions_of_each_row_block_have_each_visible_tile_once(seed, whole):
    """Without a cost of cuts, there are partitions of one place, and some hold the beginning of a sequence alone."""
    random, causal = np.random.default_rng(seed), bool(seed % 2)
    ragged, equal = seed % 3 != 0, seed % 4 == 2
    num_heads = int(random.choice([16, 40, 128])) if ragged else 128
    num_seqs, parts = int(random.choice([1, 7, 30, 140, 270])), int(random.choice([1, 2, 33, 66]))
    queries = random.integers(0, 4, num_seqs) if ragged else np.ones(num_seqs, int)
    keys = np.full(num_seqs, 700) if equal else random.integers(0, 1500, num_seqs) * (random.random(num_seqs) < 0.9)
    lens = Lens(queries, np.maximum(keys, queries), CAUSAL if causal else BOTH, one_query=not ragged)
    equal_partitions_of_row_blocks(
        lens, num_heads, parts, 0.0 if whole else float(random.choice([0.0, 0.03, 0.1])), int(random.choice([1, 4])),
        seed, whole,
    )  # fmt: skip


@pytest.mark.skipif(not interprets(), reason="other tests run this kernel on a GPU")
@pytest.mark.parametrize("seed", range(18))
def test_an_order_of_row_blocks_has_each_visible_tile_once(seed):
    """Some sequences are long. Of row blocks that are not cut, no slot is named."""
    random, (lens, _) = np.random.default_rng([seed, 1]), drawn(seed)
    if lens.begin is None:
        few = slice(0, 6 if seed % 4 in (0, 3) else None)  # of which some are cut
        lens.one_query, lens.queries, lens.keys = False, lens.queries[few], lens.keys[few]
        long = np.where(random.random(len(lens.keys)) < 0.3, random.integers(1, 150, len(lens.keys)), 1)
        before, lens.queries = (lens.keys - lens.queries) * long, lens.queries * np.minimum(long, 20)
        lens.keys, lens.offsets = lens.queries + before, None if lens.offsets is None else before // 2
    elif lens.end is None:
        lens.begin = None
    ordered(
        lens, int(random.choice([6, 132, 132])), int(random.choice([1, 2, 6])),
        cut_slots=int(random.choice([0, 300, 900, 900])) if lens.begin is None else 0,
        max_decode_queries=int(random.choice([0, 3])), mixed=bool(seed % 2), block_t=int(random.choice([16, 48])),
        block_n=int(random.choice([16, 64])),
    )  # fmt: skip


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
