"""Measure contexts over several GPUs: decode with the keys spread over ranks, and prompts in a ring.

    python scripts/measure_ranks.py --out docs/results/ranks_h200      # two GPUs of one host, through NCCL
    python scripts/measure_ranks.py --cases decode-1x131072            # one of the cases
    python scripts/measure_ranks.py --ranks 4 --replays 30             # four GPUs
    python scripts/measure_ranks.py --no-graphs                        # launch by launch, as without an engine's graphs
    python scripts/measure_ranks.py --cpu --tiny                       # two processes on a CPU, through gloo: it works

Each case is first compared with the float64 oracle: all rows of a decode, and a sample of a prompt's. Then each rank
attends to the whole context alone, and all ranks attend to their shares. Decode is timed as replays of a CUDA graph
with its collectives in it, over several caches in turn, so that the L2 cache does not keep keys. The time of a call
over ranks is that of the slowest rank, as a median of replays. A rank's attention to its share and the collective are
measured by themselves too; what is left is the merge.
"""

import argparse
import faulthandler
import gc
import itertools
import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import quire
from quire.distributed import ContextShard, plan_ring, ring_attention, sharded_attention
from quire.distributed.sharded import ALL_GATHER, packed_bytes
from quire.testing import Oracle, Problem

PAGE_SIZE = 16
CACHES = 3  # that calls read in turn
SAMPLE = 6  # rows of a prompt that are compared with the oracle
SOFTWARE = {"driver": "driver", "torch": "torch", "Triton": "triton", "NCCL": "nccl", "Quire": "commit"}


@dataclass(frozen=True)
class Case:
    """What is measured: sequences that decode, or one prompt."""

    name: str
    num_seqs: int
    seq_len: int
    is_prompt: bool = False
    calls: int = 1  # timed at once; in a graph, unless it is a prompt
    goal: float | None = None  # times as fast as one GPU


FULL = (
    Case("decode-8x131072", 8, 131072, calls=30, goal=1.8),
    Case("decode-1x131072", 1, 131072, calls=60, goal=1.4),
    Case("prompt-65536", 1, 65536, is_prompt=True, calls=2, goal=1.8),
)
TINY = (Case("decode-2x300", 2, 300), Case("decode-1x300", 1, 300), Case("prompt-130", 1, 130, is_prompt=True))


@dataclass
class Result:
    """Times of a case in µs, medians; `of_budget` is the largest error over the error budget."""

    case: str
    world_size: int
    one: float  # a rank alone, over the whole context
    all: float  # all ranks
    share: float | None  # a rank's attention to its share alone; None for a prompt, whose steps overlap with sending
    collective: float  # the all-gather of a decode, or a step of the ring
    collective_bytes: int  # that a rank sends
    of_budget: float
    graphs: bool
    goal: float | None

    @property
    def speedup(self) -> float:
        """Times as fast as one device."""
        return self.one / self.all


class Timer:
    """Time calls on this rank: by events, over a captured graph if asked for, or by the clock on a CPU."""

    def __init__(self, device: torch.device, calls: int, replays: int, graphs: bool) -> None:
        self.device, self.calls, self.replays, self.graphs = device, calls, replays, graphs

    def __call__(self, call: Callable[[], Any], together: bool) -> float:
        """Return µs of a call; with `together`, all ranks begin at the same time, and the slowest counts."""
        for _ in range(CACHES):
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


class Progress:
    """What rank 0 says on stderr, with the seconds since it began."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def __call__(self, text: str) -> None:
        """Say it."""
        if dist.get_rank() == 0:
            print(f"[{time.perf_counter() - self.began:5.1f} s] {text}", file=sys.stderr, flush=True)


def random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return normal random numbers, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)


def measure_decode(case: Case, spec: quire.AttentionSpec, timer: Timer, say: Progress) -> Result:
    """Measure sequences of one length whose pages go to the ranks in turn."""
    rank, size, device = dist.get_rank(), dist.get_world_size(), timer.device
    pages = -(-case.seq_len // PAGE_SIZE)
    num_pages = CACHES * case.num_seqs * pages
    kv = random(device, spec.dtype, 2, num_pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
    whole = quire.PagedKVCache(kv[0], kv[1])
    tables = torch.arange(num_pages, dtype=torch.int32, device=device).view(CACHES, case.num_seqs, pages)
    seq_lens = torch.full((case.num_seqs,), case.seq_len, dtype=torch.int32, device=device)
    q = random(device, spec.dtype, case.num_seqs, spec.num_q_heads, spec.head_dim)
    batches = [quire.Batch(table, seq_lens) for table in tables]
    plans = [quire.plan(spec, batch, max_query_len=1, max_seq_len=case.seq_len) for batch in batches]

    shard = ContextShard(rank, size, PAGE_SIZE)
    mine = tables[:, :, rank::size]
    own = quire.PagedKVCache(kv[0][mine.flatten()], kv[1][mine.flatten()])
    own_tables = torch.arange(mine.numel(), dtype=torch.int32, device=device).view(mine.shape)
    most = -(-pages // size)
    own_tables = torch.nn.functional.pad(own_tables, (0, most - own_tables.shape[2]))
    own_plans = [
        quire.plan(spec, shard.batch(table, seq_lens), max_query_len=1, max_seq_len=most * PAGE_SIZE)
        for table in own_tables
    ]
    say(f"{case.name}: made {2 * kv[0].numel() * kv.itemsize / 1e9:.1f} GB of keys and values")

    state = sharded_attention(q, own, own_plans[0])
    lens = (1,) * case.num_seqs, (case.seq_len,) * case.num_seqs
    of_budget = judge(Problem(spec, batches[0], whole, q, *lens, None, None), state)
    say(f"{case.name}: the error is {of_budget:.2f} of its budget")

    turn, own_turn = itertools.cycle(plans), itertools.cycle(own_plans)
    alone = timer(lambda: quire.attention(q, whole, next(turn)), together=False)
    share = timer(lambda: quire.attention(q, own, next(own_turn), return_lse=True), together=True)
    sent = torch.zeros(packed_bytes(state.out.shape, state.out.dtype), dtype=torch.uint8, device=device)
    received = sent.new_empty(size * sent.numel())
    collective = timer(lambda: ALL_GATHER(received, sent), together=True)
    micros = timer(lambda: sharded_attention(q, own, next(own_turn)), together=True)
    return Result(case.name, size, alone, micros, share, collective, sent.numel(), of_budget, timer.graphs, case.goal)


def measure_prompt(case: Case, spec: quire.AttentionSpec, timer: Timer, say: Progress) -> Result:
    """Measure one prompt, in a ring."""
    size, total, device = dist.get_world_size(), case.seq_len, timer.device
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
    say(f"{case.name}: the error is {of_budget:.2f} of its budget")

    alone = timer(lambda: quire.varlen_attention(q, k, v, plan), together=False)
    collective = timer(lambda: pass_on(own[1:]), together=True)
    micros = timer(lambda: ring_attention(*own, ring), together=True)
    sent = sum(x.numel() * x.itemsize for x in own[1:])
    return Result(case.name, size, alone, micros, None, collective, sent, of_budget, timer.graphs, case.goal)


def pass_on(keys: tuple[torch.Tensor, ...]) -> None:
    """Send a share of keys and values to the next rank and receive one, as a step of the ring does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % size) for x in keys]
    ops += [dist.P2POp(dist.irecv, torch.empty_like(x), (rank - 1) % size) for x in keys]
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


def line(result: Result) -> str:
    """Return a result as a line of text."""
    share = "" if result.share is None else f"a share alone {result.share:.1f} µs, "
    goal = "" if result.goal is None else f" (goal {result.goal})"
    return (
        f"{result.case:16} one {result.one:.1f} µs, {result.world_size} ranks {result.all:.1f} µs: "
        f"{result.speedup:.2f} times{goal}; {share}the collective alone {result.collective:.1f} µs "
        f"of {result.collective_bytes:,} bytes a rank; error {result.of_budget:.2f} of its budget"
    )


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Measure all cases as one rank; rank 0 prints and writes."""
    faulthandler.dump_traceback_later(arguments.limit, exit=True)  # a collective may wait for ever
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
        timeout=timedelta(seconds=arguments.limit),
        device_id=None if arguments.cpu else device,
    )
    say = Progress()
    say(f"{arguments.ranks} ranks, {dist.get_backend()}")
    heads = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    small = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
    spec = quire.AttentionSpec(**(small if arguments.tiny else heads))
    results = []
    for case in cases_of(arguments):
        graphs = not (arguments.cpu or arguments.no_graphs or case.is_prompt)
        timer = Timer(device, case.calls, arguments.replays, graphs)
        result = (measure_prompt if case.is_prompt else measure_decode)(case, spec, timer, say)
        say(f"{case.name}: measured")
        results.append(result)
        if rank == 0:
            print(line(result), flush=True)
            write(arguments, results)  # after each case, so that a later one that fails loses nothing
    gc.collect()  # a communicator waits for the graphs that hold its collectives
    dist.destroy_process_group()


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that were asked for."""
    return [c for c in (TINY if arguments.tiny else FULL) if not arguments.cases or c.name in arguments.cases]


def write(arguments: argparse.Namespace, results: list[Result]) -> None:
    """Write the results as JSON and as a table, if that was asked for."""
    if not arguments.out:
        return
    about = provenance(arguments)
    rows = [asdict(result) | {"speedup": result.speedup} for result in results]
    Path(f"{arguments.out}.json").write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")
    Path(f"{arguments.out}.md").write_text(markdown(about, results))


def provenance(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what a reader needs to run the same again."""
    nccl = None if arguments.cpu else ".".join(map(str, torch.cuda.nccl.version()))
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": arguments.commit or output_of("git", "rev-parse", "--short", "HEAD"),
        "device": "CPU" if arguments.cpu else torch.cuda.get_device_name(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "backend": dist.get_backend(),
        "nccl": nccl,
        "replays": arguments.replays,
    }


def output_of(*command: str) -> str:
    """Return what a command prints, or nothing if there is no such command."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    except OSError:
        return ""


def markdown(about: dict[str, Any], results: list[Result]) -> str:
    """Return the results as a table."""
    size = results[0].world_size
    software = [f"{name} {about[key]}" for name, key in SOFTWARE.items() if about[key]]
    lines = [
        "# Contexts over several GPUs",
        "",
        ", ".join([f"{size} × {about['device']}", *software, about["date"]]) + ".",
        f"Medians of {about['replays']} measurements in µs, of the slowest rank.",
        *(["Decode is timed in CUDA graphs that hold the collectives."] if any(r.graphs for r in results) else []),
        "",
        f"| case | one rank | {size} ranks | speed | goal | a share | collective | bytes a rank sends | error |",
        "| --- |" + " --- |" * 8,
    ]
    for r in results:
        share, goal = "–" if r.share is None else f"{r.share:,.1f}", "–" if r.goal is None else f"{r.goal}"
        lines.append(
            f"| {r.case} | {r.one:,.1f} | {r.all:,.1f} | {r.speedup:.2f} | {goal} | {share} | {r.collective:,.1f} "
            f"| {r.collective_bytes:,} | {r.of_budget:.2f} |"
        )
    lines += [
        "",
        "One rank attends to the whole context. A share is a rank's attention to its own keys, without merging.",
    ]
    lines += ["The collective is the all-gather of a decode, or what a step of the ring sends and receives."]
    return "\n".join([*lines, "The error is the largest one, as a part of the error budget.", ""])


def main() -> int:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes, of which each has a GPU (2)")
    parser.add_argument("--cpu", action="store_true", help="on CPUs, through gloo: to see that it works")
    parser.add_argument("--tiny", action="store_true", help="a few hundred keys and small heads")
    names = [case.name for case in (*FULL, *TINY)]
    parser.add_argument("--cases", nargs="+", choices=names, metavar="CASE", help=f"some of: {', '.join(names)}")
    parser.add_argument("--no-graphs", action="store_true", help="time decode launch by launch")
    parser.add_argument("--replays", type=int, default=15, metavar="N", help="measurements of a case (15)")
    parser.add_argument(
        "--limit", type=int, default=300, metavar="SECONDS", help="a rank that runs longer says where and ends (300)"
    )
    parser.add_argument("--out", help="path of the results without its ending; .json and .md are written")
    parser.add_argument("--commit", help="Quire's commit, where there is no repository to ask")
    arguments = parser.parse_args()
    if not cases_of(arguments):
        parser.error("--cases must name a case of those that are measured; the tiny ones need --tiny")
    devices = torch.cuda.device_count()
    if not arguments.cpu and devices < arguments.ranks:
        print(f"--ranks must be at most the GPUs of this machine, got {arguments.ranks} for {devices}", file=sys.stderr)
        return 2
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    try:
        torch.multiprocessing.spawn(run_rank, (arguments, port), arguments.ranks)
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
