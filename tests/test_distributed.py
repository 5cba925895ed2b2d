"""Contexts over two processes on the CPU, against the oracle: decode with shares of the keys, and prompts in a ring.

All cases run in one pair of processes, since each takes seconds to import torch. Run as a program, this file is a rank.
"""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import quire
from quire.dispatch.device import interprets
from quire.distributed import ContextShard, merge_over_ranks, plan_ring, ring_attention, sharded_attention
from quire.distributed.ring import chunk_pair, plan_step
from quire.testing import Oracle, Problem, make_problem

WORLD = 2
SECONDS = 60
PAGE = 4
HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
LENS = ((1, 37), (1, 1), (1, 8), (1, 0), (1, 50))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(interprets(), reason="two processes run the CPU path; kernels are tested elsewhere"),
]


# Each case runs on both ranks.


def share(problem: Problem, shard: ContextShard) -> tuple[quire.PagedKVCache, torch.Tensor]:
    """Return a rank's pages and page table: it writes the tokens that it holds, and its other slots are NaN."""
    local = [int(shard.num_keys(torch.tensor(n))) for n in problem.seq_lens]
    pool = quire.PageAllocator(64, PAGE)
    held = [pool.allocate(n) for n in local]
    table = pool.page_table(held, width=16)
    mine = problem.cache
    cache = quire.PagedKVCache(*(torch.full((64, PAGE, *x.shape[2:]), float("nan")) for x in (mine.k, mine.v)))
    for seq, n in enumerate(problem.seq_lens):
        positions = torch.arange(n)
        pages = problem.batch.page_table[seq][positions // mine.page_size].long()
        k, v = (x[pages, positions % mine.page_size] for x in (mine.k, mine.v))
        slots = shard.slot_mapping(positions, table[seq].expand(n, -1), PAGE)
        assert int((slots >= 0).sum()) == local[seq]
        quire.write_kv(k, v, cache, slots)
    return cache, table


def decode(rank: int, interleave: int, num_queries: int = 1, scatter_heads: bool = False, **features) -> None:
    spec = quire.AttentionSpec(**HEADS, **features)
    lens = [(num_queries, n) for _, n in LENS if num_queries == 1 or n >= num_queries]
    problem = make_problem(spec, lens, page_size=8)
    shard = ContextShard(rank, WORLD, interleave)
    cache, table = share(problem, shard)
    batch = shard.batch(table, problem.batch.seq_lens, num_queries)
    local_spec = quire.AttentionSpec(**HEADS, **features | {"sinks": False})
    plan = quire.plan(local_spec, batch, max_query_len=1, max_seq_len=50)
    state = sharded_attention(problem.q, cache, plan, sinks=problem.sinks, scatter_heads=scatter_heads)
    if scatter_heads:
        assert state.out.shape[1] == spec.num_q_heads // WORLD
        state = quire.State(*(torch.cat(gathered(x), 1) for x in state))
    verdict = Oracle(problem).judge(state)
    assert verdict.passed, verdict


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    found = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(found, x.contiguous())
    return found


def ring(rank: int, seq_lens: tuple[int, ...], **features) -> None:
    features = {**HEADS, **features}
    spec = quire.AttentionSpec(**features)
    generator = torch.Generator().manual_seed(3)
    total = sum(seq_lens)
    q = torch.randn(total, spec.num_q_heads, spec.head_dim, generator=generator).to(spec.dtype)
    k = torch.randn(total, spec.num_kv_heads, spec.head_dim, generator=generator).to(spec.dtype)
    v = torch.randn(total, spec.num_kv_heads, spec.head_dim_v, generator=generator).to(spec.dtype)
    sinks = torch.randn(spec.num_q_heads, generator=generator) if spec.sinks else None
    plan = plan_ring(quire.AttentionSpec(**features | {"sinks": False}), seq_lens, device="cpu")
    assert abs(plan.num_tokens[0] - plan.num_tokens[1]) <= 2 * len(seq_lens)
    mine = plan.tokens
    state = ring_attention(q[mine], k[mine], v[mine], plan, sinks=sinks)
    whole = quire.State(
        torch.full((total, spec.num_q_heads, spec.head_dim_v), 0.0).to(spec.dtype), torch.zeros(q.shape[:2])
    )
    sizes = plan.num_tokens
    for name in ("out", "lse", "tokens"):
        x = mine if name == "tokens" else getattr(state, name)
        padded = x.new_zeros(max(sizes), *x.shape[1:])
        padded[: len(x)] = x
        parts = [part[:n] for part, n in zip(gathered(padded), sizes, strict=True)]
        if name == "tokens":
            tokens = torch.cat(parts)
        elif name == "out":
            outs = torch.cat(parts)
        else:
            lses = torch.cat(parts)
    assert sorted(tokens.tolist()) == list(range(total))
    whole.out[tokens], whole.lse[tokens] = outs, lses
    starts = torch.tensor([0, *accumulate(seq_lens)], dtype=torch.int32)
    batch = quire.Batch.varlen(starts, starts)
    problem = Problem(spec, batch, quire.PagedKVCache(k, v, "THD"), q, seq_lens, seq_lens, sinks, None)
    verdict = Oracle(problem).judge(whole)
    assert verdict.passed, verdict


def empty_shards(rank: int) -> None:
    """A rank without keys gives out 0 and lse -inf, and what its out holds does not matter."""
    spec = quire.AttentionSpec(**HEADS)
    table = torch.zeros(2, 1, dtype=torch.int32)
    cache = quire.PagedKVCache(torch.full((1, PAGE, 2, 16), float("nan")), torch.full((1, PAGE, 2, 16), float("nan")))
    batch = ContextShard(rank, WORLD).batch(table, torch.zeros(2, dtype=torch.int32))
    state = sharded_attention(torch.randn(2, 4, 16), cache, quire.plan(spec, batch, max_query_len=1, max_seq_len=4))
    assert (state.out == 0).all() and (state.lse == float("-inf")).all()
    mine = quire.State(torch.full((2, 4, 16), 3.0 if rank else float("nan")), torch.zeros(2, 4))
    if rank == 0:
        mine.lse.fill_(float("-inf"))
    merged = merge_over_ranks(mine)
    assert (merged.out == 3).all() and (merged.lse == 0).all()
    with_sinks = merge_over_ranks(mine, sinks=torch.zeros(4))
    assert torch.allclose(with_sinks.out, torch.tensor(1.5)) and torch.allclose(with_sinks.lse, torch.tensor(2.0).log())


def tokens_of_no_sequence(rank: int) -> None:
    """As a captured graph has them: a batch of fewer sequences than tokens, with `cu_seqlens_q` and without."""
    problem = make_problem(quire.AttentionSpec(**HEADS), LENS, page_size=8)
    cache, table = share(problem, ContextShard(rank, WORLD))
    batch = ContextShard(rank, WORLD).batch(table, problem.batch.seq_lens)
    q = torch.cat([problem.q, torch.full((3, *problem.q.shape[1:]), 7.0)])
    for starts in (None, problem.batch.cu_seqlens_q):
        some = quire.Batch(batch.page_table, batch.seq_lens, starts)
        plan = quire.plan(problem.spec, some, max_query_len=1, max_seq_len=50, num_tokens=len(q))
        state = sharded_attention(q, cache, plan)
        assert Oracle(problem).judge(quire.State(*(x[: len(LENS)] for x in state))).passed
        assert (state.out[len(LENS) :] == 0).all() and (state.lse[len(LENS) :] == float("-inf")).all()


def device_mesh(rank: int) -> None:
    """A mesh of one dimension is a group; one of two is refused."""
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    state = quire.State(torch.full((1, 4, 16), float(rank)), torch.zeros(1, 4))
    assert (merge_over_ranks(state, group=mesh).out == 0.5).all()
    with pytest.raises(ValueError, match="group must be a mesh of one dimension, got 2"):
        merge_over_ranks(state, group=dist.init_device_mesh("cpu", (1, WORLD)))


CASES: dict[str, Callable[[int], None]] = {
    **{f"decode, {i} tokens a turn": (lambda rank, i=i: decode(rank, i)) for i in (1, 3, PAGE, 16, 64)},
    "decode, heads scattered": lambda rank: decode(rank, PAGE, scatter_heads=True),
    "decode, sinks": lambda rank: decode(rank, 1, sinks=True),
    "decode, sinks and heads scattered": lambda rank: decode(rank, 1, sinks=True, scatter_heads=True),
    "decode, softcap": lambda rank: decode(rank, 2, softcap=5.0),
    "drafts, 1 token a turn": lambda rank: decode(rank, 1, num_queries=3),
    "drafts, pages in turn": lambda rank: decode(rank, PAGE, num_queries=5),
    "a prompt": lambda rank: ring(rank, (40,)),
    "prompts of any lengths": lambda rank: ring(rank, (37, 1, 6, 0, 64)),
    "a prompt, every key visible": lambda rank: ring(rank, (19, 8), causal=False),
    "a prompt, sinks and softcap": lambda rank: ring(rank, (33, 5), sinks=True, softcap=5.0),
    "a prompt in float16, values of another width": lambda rank: ring(
        rank, (50, 21), dtype=torch.float16, head_dim_v=24
    ),
    "empty shards": empty_shards,
    "tokens of no sequence": tokens_of_no_sequence,
    "a device mesh": device_mesh,
}


def main(rank: int, store: str) -> None:
    """Run all cases as one rank; print what came of each, and stop at the first that fails."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=SECONDS)
    )
    for name, case in CASES.items():
        try:
            case(rank)
        except BaseException:
            print(json.dumps([name, traceback.format_exc()]), flush=True)
            raise
        print(json.dumps([name, ""]), flush=True)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, str]]:
    """Return what came of each case on each rank."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    command = [sys.executable, "-W", "error", __file__]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen([*command, str(rank), str(store)], stdout=subprocess.PIPE, env=environment)
        for rank in range(WORLD)
    ]
    try:
        outputs = [rank.communicate(timeout=2 * SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [dict(json.loads(line) for line in output.splitlines()) for output in outputs]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_agree_with_the_oracle(name, results):
    for rank, found in enumerate(results):
        assert found.get(name, "not run, since a case before it failed") == "", f"rank {rank}: {found.get(name)}"


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("interleave", [1, 3, PAGE, 7])
def test_every_token_is_on_one_rank_at_the_end_of_its_pages(size, interleave):
    positions, table = torch.arange(100), torch.arange(100, dtype=torch.int32).expand(100, -1)
    shards = [ContextShard(rank, size, interleave) for rank in range(size)]
    slots = torch.stack([shard.slot_mapping(positions, table, PAGE) for shard in shards])
    assert ((slots >= 0).sum(0) == 1).all()
    for shard, found in zip(shards, slots, strict=True):
        held = found >= 0
        assert torch.equal(held, torch.tensor([p // interleave % size == shard.rank for p in range(100)]))
        assert found[held].tolist() == list(range(int(held.sum())))  # dense, in the order of positions
        assert torch.equal(shard.num_keys(positions), held.long().cumsum(0) - held.long())
        assert shard.num_keys(torch.tensor(-3)) == 0


def test_turns_may_be_longer_than_int32_counts():
    lens = torch.tensor([5, 7], dtype=torch.int32)
    found = [ContextShard(rank, 4, 1 << 30).num_keys(lens) for rank in range(4)]
    assert [n.tolist() for n in found] == [[5, 7], [0, 0], [0, 0], [0, 0]]
    assert {n.dtype for n in found} == {torch.int32}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_steps_of_a_ring_see_each_visible_key_once(size):
    spec, lens = quire.AttentionSpec(**HEADS), [37, 3, 0, 20]
    shares = [[chunk_pair(n, rank, size) for n in lens] for rank in range(size)]
    seen = torch.zeros(len(lens), max(lens), max(lens), dtype=torch.int64)
    for rank in range(size):
        for source in range(size):
            batch = plan_step(spec, rank, source, shares, torch.device("cpu")).batch
            for seq, (num_queries, num_keys) in enumerate(zip(batch.query_starts.diff(), batch.seq_lens, strict=True)):
                queries, keys = ([t for c in shares[r][seq] for t in range(*c)] for r in (rank, source))
                for q in queries[len(queries) - int(num_queries) :]:
                    for k in keys[: int(num_keys)]:
                        seen[seq, q, k] += source != rank or k <= q
    for seq, n in enumerate(lens):
        assert torch.equal(seen[seq, :n, :n], torch.ones(n, n, dtype=torch.int64).tril())


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def decode_call(**spec) -> tuple[torch.Tensor, quire.PagedKVCache, quire.Plan]:
    problem = make_problem(quire.AttentionSpec(**HEADS | spec), LENS, page_size=PAGE, one_query=True)
    return problem.q, problem.cache, quire.plan(problem.spec, problem.batch, **problem.bounds)


def test_one_rank_alone_gives_what_attention_gives(alone):
    q, cache, plan = decode_call()
    expected = quire.attention(q, cache, plan, return_lse=True)
    for scatter_heads in (False, True):
        state = sharded_attention(q, cache, plan, scatter_heads=scatter_heads)
        assert torch.equal(state.out, expected.out) and torch.equal(state.lse, expected.lse)


def test_states_of_any_width_and_of_no_tokens_are_merged(alone):
    q, cache, plan = decode_call()
    empty = quire.Batch(torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    none = quire.plan(plan.spec, empty, max_query_len=1, max_seq_len=16)
    for scatter_heads in (False, True):
        state = sharded_attention(q[:0], cache, none, scatter_heads=scatter_heads)
        assert state.out.shape == (0, 4, 16) and state.lse.shape == (0, 4)
    for shape in ((1, 1, 7), (3, 1, 9), (5, 4, 16), (0, 4, 16)):
        given = quire.State(torch.randn(shape).to(torch.bfloat16), torch.randn(shape[:2]))
        merged = merge_over_ranks(given)
        assert torch.equal(merged.out, given.out)
        torch.testing.assert_close(merged.lse, given.lse)


def test_a_spec_that_shares_of_keys_cannot_serve_is_refused(alone):
    for fields, name in (
        ({"sliding_window": 9}, "plan.spec must have no sliding_window over ranks, got 9"),
        ({"causal": False, "sliding_window_right": 3}, "plan.spec must have no sliding_window_right over ranks, got 3"),
        ({"alibi": True}, "plan.spec must have no ALiBi over ranks"),
        ({"sinks": True}, "plan.spec must have sinks=False over ranks, got True"),
    ):
        call = decode_call(**fields)
        with pytest.raises(quire.UnsupportedError, match=name):
            sharded_attention(*call)
        with pytest.raises(quire.UnsupportedError, match=name.removeprefix("plan.")):
            plan_ring(quire.AttentionSpec(**HEADS | fields), [8], device="cpu")
    latents = quire.AttentionSpec.mla(num_q_heads=4, softmax_scale=0.2)
    with pytest.raises(quire.UnsupportedError, match="spec must be of keys and values in a ring, got one of latents"):
        plan_ring(latents, [8], device="cpu")


def test_bad_arguments_are_refused(alone):
    q, cache, plan = decode_call()
    state = quire.State(torch.zeros(2, 3, 16), torch.zeros(2, 3))
    causal = make_problem(quire.AttentionSpec(**HEADS), ((3, 9),), page_size=PAGE)
    several = quire.plan(causal.spec, causal.batch, **causal.bounds)
    ring = plan_ring(plan.spec, [8], device="cpu")
    k = v = torch.zeros(8, 2, 16)
    for error, message, call in (
        (TypeError, "plan must be a Plan, got None", lambda: sharded_attention(q, cache, None)),
        (ValueError, "q must be .* got 'junk'", lambda: sharded_attention("junk", cache, plan)),
        (ValueError, "plan must have max_query_len 1 .* got 3", lambda: sharded_attention(causal.q, cache, several)),
        (ValueError, "sinks must be .* got a", lambda: sharded_attention(q, cache, plan, sinks=torch.zeros(3))),
        (TypeError, "sinks must be a tensor with strides, got 1", lambda: sharded_attention(q, cache, plan, sinks=1)),
        (
            quire.UnsupportedError,
            "sinks must not require a gradient, got a tensor that does",
            lambda: sharded_attention(q, cache, plan, sinks=torch.zeros(4, requires_grad=True)),
        ),
        (TypeError, "group must be .* got 3", lambda: sharded_attention(q, cache, plan, group=3)),
        (TypeError, "scatter_heads must be .* got 1", lambda: merge_over_ranks(state, scatter_heads=1)),
        (TypeError, "state must be a State, got", lambda: merge_over_ranks(tuple(state))),
        (
            TypeError,
            "state must hold two tensors with strides, got .* and None",
            lambda: merge_over_ranks(quire.State(state.out, None)),
        ),
        (ValueError, "lse must be .* got", lambda: merge_over_ranks(quire.State(state.out, state.lse.t()))),
        (TypeError, "spec must be an AttentionSpec, got None", lambda: plan_ring(None, [8])),
        (TypeError, "seq_lens must be a list of integers, got 8", lambda: plan_ring(plan.spec, 8)),
        (TypeError, "seq_lens must be a list of integers, got", lambda: plan_ring(plan.spec, [])),
        (TypeError, r"seq_lens\[1\] must be an integer, got 2.5", lambda: plan_ring(plan.spec, [8, 2.5])),
        (ValueError, r"seq_lens\[0\] must be from 0", lambda: plan_ring(plan.spec, [-1])),
        (TypeError, "plan must be a RingPlan, got", lambda: ring_attention(torch.zeros(8, 4, 16), k, v, plan)),
        (TypeError, "q must be a tensor with strides, got None", lambda: ring_attention(None, k, v, ring)),
        (ValueError, "k must be .* got", lambda: ring_attention(torch.zeros(8, 4, 16), k[:7], v, ring)),
        (TypeError, "world_size must be an integer, got 2.0", lambda: ContextShard(0, 2.0)),
        (ValueError, "rank must be from 0 to 1, got 2", lambda: ContextShard(2, 2)),
        (ValueError, "interleave must be from 1", lambda: ContextShard(0, 2, 0)),
        (TypeError, "seq_lens must be a tensor of integers, got 5", lambda: ContextShard(0, 2).num_keys(5)),
        (TypeError, "seq_lens must be int32 or int64, got", lambda: ContextShard(0, 2).num_keys(torch.ones(2))),
        (
            ValueError,
            "page_table must be .* got",
            lambda: ContextShard(0, 2).slot_mapping(k[:, 0, 0].int(), k[0].int(), 4),
        ),
    ):
        with pytest.raises(error, match=message):
            call()


def test_a_process_without_a_group_is_refused():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"group must be one of torch\.distributed, got a process"):
        sharded_attention(*decode_call())


def test_the_script_that_measures_runs_on_two_processes(tmp_path):
    """Small, on the CPU: what it prints is no measurement."""
    script, out = Path(__file__).parent.parent / "scripts/measure_ranks.py", tmp_path / "ranks"
    command = [sys.executable, script, "--cpu", "--tiny", "--replays", "1", "--limit", str(SECONDS), "--out", out]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS, env=environment)
    assert done.returncode == 0, done.stderr
    written = json.loads(out.with_suffix(".json").read_text())
    names = [row["case"] for row in written["results"]]
    assert written["about"]["backend"] == "gloo" and len(names) == 3
    table = out.with_suffix(".md").read_text().splitlines()
    for name in names:
        assert sum(line.startswith(name) and "2 ranks" in line for line in done.stdout.splitlines()) == 1
        assert sum(line.startswith(f"| {name} |") for line in table) == 1
        assert f"{name}: the error is" in done.stderr and f"{name}: measured" in done.stderr
    assert all(0 < row["of_budget"] <= 1 and row["all"] > 0 and row["one"] > 0 for row in written["results"])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
