"""`quire check`: compare every kernel with the float64 oracle on whatever this machine has.

On a GPU it runs the Triton kernels in float16, bfloat16 and float32; without one, the PyTorch path, or the Triton kernels in the interpreter when
TRITON_INTERPRET=1 is set.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch
import triton

from quire.api import attention, merge_states, write_kv
from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.device import device_properties
from quire.plan import plan
from quire.spec import QUERY_DTYPES, AttentionSpec
from quire.testing import Problem, Verdict, error_budget, make_problem

MIXED = ((1, 50), (3, 3), (7, 40), (0, 9), (1, 0), (2, 17), (33, 70))
HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 32}


@dataclass(frozen=True)
class Feature:
    """A named problem: what to add to the spec, the lengths, what to ask of the plan, and how the problem is laid out."""

    name: str
    spec: dict = field(default_factory=dict)
    lens: tuple = MIXED
    plan: dict = field(default_factory=dict)
    problem: dict = field(default_factory=dict)


FEATURES = (
    Feature("decode", lens=((1, 130), (1, 1), (1, 77))),
    Feature("decode, one query each", lens=((1, 130), (1, 1), (1, 0), (1, 77)), problem={"one_query": True}),
    Feature("drafted tokens", lens=((4, 130), (4, 20), (4, 77))),
    Feature("prefill", lens=((70, 70), (33, 33))),
    Feature("chunk on a context", lens=((33, 150), (20, 64))),
    Feature("mixed"),
    Feature("split keys", lens=((1, 300), (1, 5), (1, 0)), plan={"num_splits": 5}),
    Feature("split keys, drafted tokens", lens=((3, 300), (1, 40), (0, 9), (2, 170)), plan={"num_splits": 3}),
    Feature("split keys, several blocks", {"num_q_heads": 34}, lens=((9, 200), (1, 40)), plan={"num_splits": 2}),
    Feature(
        "split keys, sliding window", {"sliding_window": 90}, lens=((1, 300), (1, 5), (1, 200)), plan={"num_splits": 4}
    ),
    Feature("batch-invariant", lens=((1, 700), (1, 5), (1, 0), (3, 300)), plan={"batch_invariant": True}),
    Feature("bidirectional", {"causal": False}),
    Feature("sliding window", {"sliding_window": 9}),
    Feature("window on both sides", {"causal": False, "sliding_window": 9, "sliding_window_right": 4}),
    Feature("softcap", {"softcap": 3.0}),
    Feature("ALiBi", {"alibi": True}),
    Feature("sinks", {"sinks": True}),
    Feature("sinks, split keys", {"sinks": True}, lens=((1, 300), (1, 5), (1, 0)), plan={"num_splits": 5}),
    Feature("all at once", {"softcap": 5.0, "alibi": True, "sinks": True, "sliding_window": 20}),
    Feature("values of another width", {"head_dim": 40, "head_dim_v": 24}),
    Feature("head_dim 256, MQA", {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 256}, lens=((1, 40), (5, 30))),
    Feature("pages of 1, flat table", problem={"page_size": 1, "flat_table": True}),
    Feature("pages of 7, HND", problem={"page_size": 7, "layout": "HND"}),
    Feature("vLLM's original layout", {"head_dim": 32}, problem={"layout": "HDNX"}),
    Feature("fp8 e4m3 cache", {"kv_dtype": torch.float8_e4m3fn}),
    Feature("fp8 e5m2 cache, scales per token", {"kv_dtype": torch.float8_e5m2}, problem={"scales": "token"}),
    Feature("int8 cache, one scale", {"kv_dtype": torch.int8}, problem={"scales": "tensor"}),
)
ON_HOPPER = tuple(
    Feature(
        name,
        {"head_dim": 64} | extra,
        lens=((150, 150), (33, 300), (1, 0), (1, 70), (130, 131)),
        plan={"kernel": "hopper"},
        problem=problem,
    )
    for name, extra, problem in (
        ("prompts on Hopper", {}, {}),
        (
            "prompts on Hopper, all at once",
            {"head_dim": 128, "softcap": 5.0, "alibi": True, "sinks": True, "sliding_window": 90},
            {"layout": "HND"},
        ),
        (
            "prompts on Hopper, both sides",
            {"head_dim": 256, "causal": False, "sliding_window": 90, "sliding_window_right": 40},
            {"page_size": 24},
        ),
    )
)


def add_parser(subparsers) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "check", help="compare the kernels with the float64 oracle", description=__doc__,
        epilog="examples:\n  quire check\n  TRITON_INTERPRET=1 quire check\n  quire check --json > check.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--dtype",
        choices=[str(d).removeprefix("torch.") for d in QUERY_DTYPES],
        action="append",
        help="check only this; may be repeated",
    )
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first line that fails")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kernel: str
    dtype: str
    feature: str
    error: float
    over_budget: float
    passed: bool


def rows(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Iterator[Row]:
    """Check every feature in every dtype."""
    for dtype in dtypes:
        problem = make_problem(AttentionSpec(**HEADS, dtype=dtype), ((5, 60), (1, 33)), device=device)
        yield row("write_kv", dtype, "written, then read", error_budget(problem, written(problem)))
        yield row("merge_states", dtype, "two halves of the keys", error_budget(problem, in_halves(problem)))
        for feature in features(device, dtype):
            spec = AttentionSpec(**HEADS | {"dtype": dtype} | feature.spec)
            problem = make_problem(spec, feature.lens, device=device, **feature.problem)
            chosen = plan(spec, problem.batch, **problem.bounds, **feature.plan)
            verdict = error_budget(
                problem, attention(problem.q, problem.cache, chosen, **problem.tables, return_lse=True)
            )
            yield row(f"attention ({chosen.kernel})", dtype, feature.name, verdict)


def until_failure(lines: Iterator[Row]) -> Iterator[Row]:
    """Pass lines on, up to the first that failed."""
    for line in lines:
        yield line
        if not line.passed:
            return


def features(device: torch.device, dtype: torch.dtype) -> list[Feature]:
    """Return what is served on a device: PyTorch, which serves CPU tensors outside the interpreter, knows no batch-invariant plans."""
    in_torch = device.type == "cpu" and not triton.knobs.runtime.interpret
    served = [feature for feature in FEATURES if not (in_torch and feature.plan)]
    return served + list(ON_HOPPER) if device_properties(device).has_wgmma and dtype.itemsize == 2 else served


def row(kernel: str, dtype: torch.dtype, feature: str, verdict: Verdict) -> Row:
    """Turn a verdict into a line."""
    return Row(
        kernel,
        str(dtype).removeprefix("torch."),
        feature,
        verdict.error,
        max(verdict.out, verdict.lse or 0.0),
        verdict.passed,
    )


def written(problem: Problem) -> torch.Tensor:
    """Attend after writing the problem's keys and values into fresh pages, in reverse order, through `write_kv`."""
    cache, batch, size = problem.cache, problem.batch, problem.cache.page_size
    fresh = PagedKVCache(torch.full_like(cache.k, float("nan")), torch.full_like(cache.v, float("nan")))
    slots = [
        int(batch.page_table[s, p // size]) * size + p % size for s, n in enumerate(problem.seq_lens) for p in range(n)
    ]
    mapping = torch.tensor(slots[::-1], device=cache.device)
    write_kv(cache.k.flatten(0, 1)[mapping], cache.v.flatten(0, 1)[mapping], fresh, mapping)
    return attention(problem.q, fresh, plan(problem.spec, batch, **problem.bounds))


def in_halves(problem: Problem):
    """Attend to the first 20 keys and to the rest on their own, then merge."""
    spec, batch, cut = problem.spec, problem.batch, 20
    size = problem.cache.page_size
    spread = problem.cache.k.flatten(0, 1)[:, None], problem.cache.v.flatten(0, 1)[:, None]
    tokens = PagedKVCache(*spread)  # the same memory, as pages of one token
    offsets = torch.tensor(problem.seq_lens, dtype=torch.int32, device=batch.device) - batch.query_starts.diff()
    states = []
    for low, high in ((0, cut), (cut, max(problem.seq_lens))):
        runs = [
            [int(batch.page_table[s, p // size]) * size + p % size for p in range(low, min(high, n))]
            for s, n in enumerate(problem.seq_lens)
        ]
        lens = torch.tensor([len(r) for r in runs], dtype=torch.int32, device=batch.device)
        starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        flat = torch.tensor([slot for r in runs for slot in r], dtype=torch.int32, device=batch.device)
        part = Batch(flat, lens, batch.cu_seqlens_q, cu_pages=starts, query_offsets=offsets - low)
        states.append(attention(problem.q, tokens, plan(spec, part, **problem.bounds), return_lse=True))
    return merge_states(states)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 when a line failed."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    dtypes = tuple(
        getattr(torch, name)
        for name in args.dtype or ("float32", "float16") + (() if triton.knobs.runtime.interpret else ("bfloat16",))
    )
    begun, lines = time.perf_counter(), []
    checked = rows(device, dtypes)
    if args.fail_fast:
        checked = until_failure(checked)
    total = sum(len(features(device, dtype)) + 2 for dtype in dtypes)
    if args.json:
        lines = list(checked)
        json.dump([asdict(line) for line in lines], sys.stdout, indent=2)
        print()
        return 0 if all(line.passed for line in lines) else 1
    print(
        f"{torch.cuda.get_device_name() if gpu else 'CPU'}{', Triton interpreter' if triton.knobs.runtime.interpret else ''}"
    )
    print(f"{'kernel':20} {'dtype':9} {'feature':34} {'error':>9} {'of budget':>9}")
    for line in checked:
        lines.append(line)
        verdict = "pass" if line.passed else "FAIL"
        print(
            f"{line.kernel:20} {line.dtype:9} {line.feature:34} {line.error:9.1e} {line.over_budget:9.0%}  {verdict}",
            flush=True,
        )
        if sys.stderr.isatty():
            print(f"\r{len(lines)} of {total}", end="\r", file=sys.stderr, flush=True)
    failed = sum(not line.passed for line in lines)
    print(f"{len(lines) - failed} passed, {failed} failed in {time.perf_counter() - begun:.0f} s")
    return 1 if failed else 0
