"""`quire check`: compare every kernel that this machine can run with the float64 oracle.

On a GPU it runs the Triton kernels in float16, bfloat16 and float32. Without one it runs the PyTorch path, or, with
TRITON_INTERPRET=1, the Triton kernels in the interpreter, in float16 and float32.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from quire.api import attention, merge_states, write_kv, write_latent
from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.cache_formats import FORMATS as KV_FORMATS
from quire.cli import check_grid
from quire.cli.arguments import CommandError, add_card, add_grid, check_seed, run_code_of
from quire.cli.check_features import (
    FEATURES,
    HEADS,
    HOPPER_FEATURES,
    LATENT_FEATURES,
    LATENT_HOPPER_FEATURES,
    LATENTS,
    Feature,
)
from quire.cli.check_lines import FEATURE_WIDTH, Check, as_check, line_of, name_of, plan_for
from quire.cli.exit_codes import INTERRUPTED
from quire.cli.status_line import StatusLine
from quire.cli.threads import one_thread
from quire.dispatch.device import device_properties, interprets, is_served_by_torch
from quire.spec import QUERY_DTYPES, AttentionSpec
from quire.state import State
from quire.testing import Problem, error_budget, make_problem, random_norm_rope, unwritten

EXAMPLES = """examples:
  quire check
  quire check --dtype float16 --fail-fast
  quire check --json > check.json
  quire check --grid 200 --seed 1       # cases drawn at random
  quire check --grid 60 --latents       # over latents
  quire check --grid 60 --kv-format int4
  quire check --as sm86                 # the kernels that an older card gets, on this GPU
  TRITON_INTERPRET=1 quire check        # the Triton kernels on a CPU; takes about a minute
"""
OTHER_CHECKS = 3  # that come before those of the features, for each dtype


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "check",
        help=summary,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--dtype",
        choices=[name_of(dtype) for dtype in QUERY_DTYPES],
        action="append",
        help="check only this; may be repeated",
    )
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first check that fails")
    add_grid(parser, "check")
    parser.add_argument("--kv-format", choices=KV_FORMATS, help="with --grid: caches below eight bits, in this format")
    add_card(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 when a check failed. An interrupt prints what was checked so far."""
    run_code_of(args.card)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_seed(args)
    if args.kv_format and (args.grid is None or args.latents):
        raise CommandError("--kv-format must be given with --grid, and without --latents; add --grid N")
    dtypes = [getattr(torch, name) for name in args.dtype] if args.dtype else default_dtypes()
    if torch.bfloat16 in dtypes and interprets():
        raise CommandError("--dtype must not be bfloat16 under Triton's interpreter, which has none; leave it out")
    drawn, width = None, FEATURE_WIDTH
    if args.grid:
        some = dtypes if args.dtype else dtypes[-2:]
        drawn = check_grid.draw_problems(args.grid, args.seed or 0, device, some, args.latents, args.kv_format)
        width = max(len(case.name) for case in drawn)
        total, checked = len(drawn), check_grid.check_all(drawn, device)
    else:
        total, checked = sum(OTHER_CHECKS + len(features(device, dtype)) for dtype in dtypes), check_all(device, dtypes)
    if args.fail_fast:
        checked = until_failure(checked)
    begun, checks, is_stopped = time.perf_counter(), list[Check](), False
    with one_thread(device.type == "cpu"), StatusLine() as status:
        if not args.json:
            status.say(heading(device, width))
        try:
            if drawn is not None and device.type == "cuda":
                for done in check_grid.compile_all(drawn):
                    status(f"compiling, {done} kernels done", restart=done == 0)
            status(f"checking, 0 of {total} done")
            for check in checked:
                checks.append(check)
                if not args.json:
                    status.say(line_of(check, width))
                status(f"checking, {len(checks)} of {total} done", restart=False)
        except KeyboardInterrupt:
            is_stopped = True
    failed = sum(not check.passed for check in checks)
    if args.json:
        print(json.dumps([as_numbers(asdict(check)) for check in checks], indent=2, allow_nan=False))
    else:
        print(f"{len(checks) - failed} passed, {failed} failed in {time.perf_counter() - begun:.0f} s")
    if is_stopped:
        print(f"interrupted after {len(checks)} of {total} checks", file=sys.stderr)
        return INTERRUPTED
    return 1 if failed else 0


def as_numbers(check: dict[str, Any]) -> dict[str, Any]:
    """Return a check for JSON, which has no NaN and no infinity: null stands for them."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in check.items()
    }


def heading(device: torch.device, width: int) -> str:
    """Return the device and the titles of the columns."""
    name = "CPU"
    if device.type == "cuda":
        from quire.targets import title_here  # here, since it needs Triton

        name = title_here()
    columns = f"{'kernel':20} {'dtype':9} {'feature':{width}} {'error':>9} {'of budget':>9}"
    return f"{name}, Triton interpreter\n{columns}" if interprets() else f"{name}\n{columns}"


def default_dtypes() -> list[torch.dtype]:
    """Return the dtypes that are checked unless some are named; the interpreter has no bfloat16."""
    return [torch.float32, torch.float16] + [torch.bfloat16] * (not interprets())


def check_all(device: torch.device, dtypes: Iterable[torch.dtype]) -> Iterator[Check]:
    """Check every feature in every dtype."""
    for dtype in dtypes:
        problem = make_problem(AttentionSpec(**HEADS, dtype=dtype), ((5, 60), (1, 33)), device=device)
        yield as_check("write_kv", dtype, "written, then read", error_budget(problem, write_and_attend(problem)))
        yield as_check("merge_states", dtype, "two halves of the keys", error_budget(problem, merge_halves(problem)))
        latents = make_problem(AttentionSpec(**HEADS | LATENTS, dtype=dtype), ((5, 60), (1, 33)), device=device)
        verdict = error_budget(latents, write_latents_and_attend(latents))
        yield as_check("write_latent", dtype, "written, then read by halves", verdict)
        for feature in features(device, dtype):
            yield check_feature(feature, device, dtype)


def until_failure(checks: Iterable[Check]) -> Iterator[Check]:
    """Pass checks on, up to the first that failed."""
    for check in checks:
        yield check
        if not check.passed:
            return


def features(device: torch.device, dtype: torch.dtype) -> list[Feature]:
    """Return the features that a device serves in a dtype; PyTorch takes no options of a plan."""
    served = [feature for feature in FEATURES + LATENT_FEATURES if not (feature.plan and is_served_by_torch(device))]
    if device.type != "cuda":
        served = [feature for feature in served if not feature.captured]
    if device_properties(device).has_wgmma and dtype.itemsize == 2:
        served += HOPPER_FEATURES + LATENT_HOPPER_FEATURES
    return served


def check_feature(feature: Feature, device: torch.device, dtype: torch.dtype) -> Check:
    """Compare the result of one feature with the oracle."""
    problem = make_problem(feature.spec(dtype), feature.lens, device=device, **feature.problem)
    chosen = plan_for(problem, **feature.plan)

    cache, step = unwritten(problem) if feature.append else (problem.cache, {})
    if feature.norm_rope:
        step |= random_norm_rope(problem, **feature.norm_rope)
        problem = replace(problem, cache=cache, step=step)

    scale = None if feature.out_scale is None else torch.tensor([feature.out_scale], device=device)
    problem = replace(problem, out_scale=scale)

    def attend() -> State:
        state: Any = attention(problem.q, cache, chosen, **step, **problem.tables, out_scale=scale, return_lse=True)
        return state

    state = from_graph(attend, problem.batch.seq_lens) if feature.captured else attend()
    return as_check(f"attention ({chosen.kernel})", dtype, feature.name, error_budget(problem, state))


def from_graph(attend: Callable[[], State], seq_lens: torch.Tensor) -> State:
    """Capture a launch in a CUDA graph while sequences are shorter, and return what a replay at their lengths gives."""
    lengths = seq_lens.clone()
    seq_lens //= 2
    attend()  # which compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state = attend()
    seq_lens.copy_(lengths)
    graph.replay()
    return state


def write_and_attend(problem: Problem) -> torch.Tensor:
    """Write the problem's keys and values into fresh pages with `write_kv`, in reverse order, and attend to these."""
    cache = problem.cache
    fresh = PagedKVCache(torch.full_like(cache.k, float("nan")), torch.full_like(cache.v, float("nan")))
    slot_mapping = all_slots(problem)
    write_kv(cache.k.flatten(0, 1)[slot_mapping], cache.v.flatten(0, 1)[slot_mapping], fresh, slot_mapping)
    return attention(problem.q, fresh, plan_for(problem))


def write_latents_and_attend(problem: Problem) -> torch.Tensor:
    """The same with `write_latent`, and with queries as the pair that engines hold."""
    spec, latents = problem.spec, problem.cache.latents
    fresh = PagedKVCache.from_latents(torch.full_like(latents, float("nan")), spec.kv_lora_rank)
    slot_mapping = all_slots(problem)
    c_kv, k_pe = latents.flatten(0, 1)[slot_mapping].split([spec.kv_lora_rank, spec.qk_rope_head_dim], -1)
    write_latent(c_kv, k_pe, fresh, slot_mapping)
    return attention(problem.halves, fresh, plan_for(problem))


def all_slots(problem: Problem) -> torch.Tensor:
    """Return the slots of all keys of a problem, the last key first."""
    slots = [slot for seq, n in enumerate(problem.seq_lens) for slot in slots_of(problem, seq, range(n))]
    return torch.tensor(slots[::-1], device=problem.cache.device)


def merge_halves(problem: Problem) -> State:
    """Attend to the first 20 keys and to the others separately, then merge the two states."""
    k, v = problem.cache.k.flatten(0, 1)[:, None], problem.cache.v.flatten(0, 1)[:, None]
    tokens = PagedKVCache(k, v)  # the same memory, as pages of one token
    cut = 20
    return merge_states(
        [
            attention(problem.q, tokens, plan_for(problem, batch_of_keys(problem, low, high)), return_lse=True)
            for low, high in ((0, cut), (cut, max(problem.seq_lens)))
        ]
    )


def batch_of_keys(problem: Problem, low: int, high: int) -> Batch:
    """Return a problem's batch, cut to the keys from `low` to `high`, with a flat table of pages of one token."""
    batch, device = problem.batch, problem.batch.device
    slots = [slots_of(problem, seq, range(low, min(high, n))) for seq, n in enumerate(problem.seq_lens)]
    page_table = torch.tensor([slot for some in slots for slot in some], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([len(some) for some in slots], dtype=torch.int32, device=device)
    cu_pages = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    first_queries = torch.tensor(problem.seq_lens, dtype=torch.int32, device=device) - batch.query_starts.diff()
    return Batch(page_table, seq_lens, batch.cu_seqlens_q, cu_pages=cu_pages, query_offsets=first_queries - low)


def slots_of(problem: Problem, seq: int, positions: Iterable[int]) -> list[int]:
    """Return the slots of some positions of a sequence."""
    page_size, pages = problem.cache.page_size, problem.batch.page_table[seq].tolist()
    return [pages[position // page_size] * page_size + position % page_size for position in positions]
