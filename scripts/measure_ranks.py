"""Measure contexts over several GPUs: decode with the keys spread over ranks, and prompts in a ring.

    python scripts/measure_ranks.py --output results.json          # two GPUs of one host, through NCCL
    python scripts/measure_ranks.py --cpu --tiny                   # two processes on a CPU, through gloo: it works

Each case is first compared with the float64 oracle, on a sample of its rows. Then rank 0 alone attends to the whole
context, and all ranks attend to their shares. On a GPU, calls are captured in one graph where NCCL allows it, so that
gaps between launches do not count. The time of a call over ranks is that of the slowest rank, as a median of replays.
The collective of each case is measured alone as well.
"""

import argparse
import json
import math
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import quire
from quire.distributed import ContextShard, merge_over_ranks, plan_ring, ring_attention, sharded_attention
from quire.testing import Oracle, Problem

PAGE_SIZE = 16
SAMPLE = 6  # rows of a prompt that are compared with the oracle


@dataclass(frozen=True)
class Case:
    """What is measured: sequences that decode, or one prompt."""

    name: str
    num_seqs: int
    seq_len: int
    is_prompt: bool = False
    goal: float = 0.0  # times as fast as one GPU


FULL = (
    Case("decode 8x131072", 8, 131072, goal=1.8),
    Case("decode 1x131072", 1, 131072, goal=1.4),
    Case("prompt 65536", 1, 65536, is_prompt=True, goal=1.8),
)
TINY = (Case("decode 2x300", 2, 300), Case("decode 1x300", 1, 300), Case("prompt 130", 1, 130, is_prompt=True))


@dataclass
class Result:
    """Times of a case in µs, medians; `of_budget` is the largest error over the error budget."""

    case: str
    world_size: int
    one: float
    all: float
    collective: float
    collective_bytes: int
    of_budget: float
    graphs: bool
    goal: float

    @property
    def speedup(self) -> float:
        """Times as fast as one device."""
        return self.one / self.all


class Timer:
    """Time calls on this rank: by events over a captured graph of several calls, or by the clock on a CPU."""

    def __init__(self, device: torch.device, calls: int, replays: int, graphs: bool) -> None:
        self.device, self.calls, self.replays, self.graphs = device, calls, replays, graphs

    def __call__(self, call: Callable[[], Any], together: bool) -> float:
        """Return µs of a call; with `together`, all ranks begin at the same time, and the slowest counts."""
        for _ in range(2):
            call()
        run, calls = self.repeated(call), self.calls
        times = []
        for _ in range(self.replays):
            self.synchronise(together)
            if self.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                end.synchronize()
                times.append(1000 * begin.elapsed_time(end) / calls)
            else:
                start = time.perf_counter()
                run()
                times.append(1e6 * (time.perf_counter() - start) / calls)
        micros = torch.tensor(times, device=self.device)
        if together:
            dist.all_reduce(micros, op=dist.ReduceOp.MAX)
        return statistics.median(micros.tolist())

    def repeated(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that makes several calls, as a graph if that was asked for."""

        def run() -> None:
            for _ in range(self.calls):
                call()

        if not self.graphs:
            return run
        self.synchronise(False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
            run()
        return graph.replay

    def synchronise(self, together: bool) -> None:
        """Wait for the device, and with `together` for all ranks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if together:
            dist.barrier()


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return normal random numbers, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)


def measure_decode(case: Case, spec: quire.AttentionSpec, device: torch.device, timer: Timer) -> Result:
    """Measure sequences of one length whose pages go to the ranks in turn."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pages = -(-case.seq_len // PAGE_SIZE)
    kv = random(device, spec.dtype, 2, case.num_seqs * pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
    whole = quire.PagedKVCache(kv[0], kv[1])
    table = torch.arange(case.num_seqs * pages, dtype=torch.int32, device=device).view(case.num_seqs, pages)
    seq_lens = torch.full((case.num_seqs,), case.seq_len, dtype=torch.int32, device=device)
    q = random(device, spec.dtype, case.num_seqs, spec.num_q_heads, spec.head_dim)
    batch = quire.Batch(table, seq_lens)
    plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=case.seq_len)

    shard = ContextShard(rank, size, PAGE_SIZE)
    mine = table[:, rank::size]
    own = quire.PagedKVCache(kv[0][mine.flatten()], kv[1][mine.flatten()])
    own_table = torch.arange(mine.numel(), dtype=torch.int32, device=device).view(mine.shape)
    most = -(-pages // size) * PAGE_SIZE
    own_table = torch.nn.functional.pad(own_table, (0, most // PAGE_SIZE - own_table.shape[1]))
    own_plan = quire.plan(spec, shard.batch(own_table, seq_lens), max_query_len=1, max_seq_len=most)

    state = sharded_attention(q, own, own_plan)
    lens = (1,) * case.num_seqs, (case.seq_len,) * case.num_seqs
    problem = Problem(spec, batch, whole, q, *lens, None, None)
    of_budget = judge(problem, state)
    micros = timer(lambda: sharded_attention(q, own, own_plan), together=True)
    collective = timer(lambda: merge_over_ranks(state), together=True)
    alone = timer(lambda: quire.attention(q, whole, plan), together=False)
    sent = state.out.numel() * state.out.itemsize + 4 * state.lse.numel()
    return Result(case.name, size, alone, micros, collective, sent, of_budget, timer.graphs, case.goal)


def measure_prompt(case: Case, spec: quire.AttentionSpec, device: torch.device, timer: Timer) -> Result:
    """Measure one prompt, in a ring."""
    size, total = dist.get_world_size(), case.seq_len
    q = random(device, spec.dtype, total, spec.num_q_heads, spec.head_dim)
    k, v = random(device, spec.dtype, 2, total, spec.num_kv_heads, spec.head_dim)
    starts = torch.tensor([0, total], dtype=torch.int32, device=device)
    plan = quire.plan(spec, quire.Batch.varlen(starts, starts), max_query_len=total, max_seq_len=total)
    ring = plan_ring(spec, [total], device=device)
    own = q[ring.tokens], k[ring.tokens], v[ring.tokens]

    state = ring_attention(*own, ring)
    chosen = torch.linspace(0, len(ring.tokens) - 1, SAMPLE, device=device).long()
    ends = (ring.tokens[chosen] + 1).int()
    rows = quire.Batch(torch.zeros(SAMPLE, 1, dtype=torch.int32, device=device), ends, paged=False)
    lens = tuple(ends.tolist())
    sample = Problem(spec, rows, quire.PagedKVCache(k, v, "THD"), own[0][chosen], (1,) * SAMPLE, lens, None, None)
    of_budget = judge(sample, quire.State(state.out[chosen], state.lse[chosen]))
    micros = timer(lambda: ring_attention(*own, ring), together=True)
    keys = torch.cat([own[1].flatten(), own[2].flatten()])
    collective = timer(lambda: pass_on(keys), together=True)
    alone = timer(lambda: quire.varlen_attention(q, k, v, plan), together=False)
    sent = keys.numel() * keys.itemsize
    return Result(case.name, size, alone, micros, collective, sent, of_budget, timer.graphs, case.goal)


def pass_on(keys: torch.Tensor) -> None:
    """Send a share of keys and values to the next rank and receive one, as a step of the ring does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(keys)
    ops = [dist.P2POp(dist.isend, keys, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def judge(problem: Problem, state: quire.State) -> float:
    """Return the largest error over the error budget, over all ranks; more than 1 fails."""
    verdict = Oracle(problem).judge(state)
    worst = torch.tensor([verdict.out, math.inf if verdict.lse is None else verdict.lse], device=problem.q.device)
    worst = torch.where(worst.isnan(), math.inf, worst)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    found = worst.max().item()
    if found > 1:
        raise SystemExit(f"the error must be within its budget, got {found:.2f} of it; nothing was timed")
    return found


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Measure all cases as one rank; rank 0 prints and writes."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    device = torch.device("cpu") if arguments.cpu else torch.device("cuda", rank)
    if not arguments.cpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "gloo" if arguments.cpu else "nccl",
        rank=rank,
        world_size=arguments.ranks,
        timeout=timedelta(minutes=5),
        device_id=None if arguments.cpu else device,
    )
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    small = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    spec = quire.AttentionSpec(**(small if arguments.tiny else heads))
    timer = Timer(device, arguments.calls, arguments.replays, not (arguments.cpu or arguments.no_graphs))
    results = []
    for case in TINY if arguments.tiny else FULL:
        result = (measure_prompt if case.is_prompt else measure_decode)(case, spec, device, timer)
        results.append(result)
        if rank == 0:
            goal = f" (goal {case.goal})" if case.goal else ""
            print(
                f"{case.name:18} one {result.one:10.1f} µs   {result.world_size} ranks {result.all:10.1f} µs   "
                f"{result.speedup:5.2f} times{goal}   collective alone {result.collective:8.1f} µs, "
                f"{result.collective_bytes:,} bytes a rank   error {result.of_budget:.2f} of its budget",
                flush=True,
            )
    if rank == 0 and arguments.output:
        where = "CPU" if arguments.cpu else torch.cuda.get_device_name()
        rows = [asdict(result) | {"speedup": result.speedup} for result in results]
        provenance = {"device": where, "torch": torch.__version__, "backend": dist.get_backend()}
        arguments.output.write_text(json.dumps({"provenance": provenance, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes, of which each has a GPU (2)")
    parser.add_argument("--cpu", action="store_true", help="on CPUs, through gloo: to see that it works")
    parser.add_argument("--tiny", action="store_true", help="a few hundred keys and small heads")
    parser.add_argument("--no-graphs", action="store_true", help="time calls that are launched one by one")
    parser.add_argument("--calls", type=int, default=8, metavar="N", help="calls in a graph (8)")
    parser.add_argument("--replays", type=int, default=15, metavar="N", help="measurements of a case (15)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results to this JSON file")
    arguments = parser.parse_args()
    devices = torch.cuda.device_count()
    if not arguments.cpu and devices < arguments.ranks:
        print(f"--ranks must be at most the GPUs of this machine, got {arguments.ranks} for {devices}", file=sys.stderr)
        return 2
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, (arguments, port), arguments.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
