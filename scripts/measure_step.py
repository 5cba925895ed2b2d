"""Measure one step of a layer: new tokens, batch-invariant plans, and outputs in e4m3, against what they replace.

    python scripts/measure_step.py                                        # all tables, on a GPU
    python scripts/measure_step.py --tables new-tokens --only 8x2048      # some cases of one
    python scripts/measure_step.py --tiny                                 # small cases, on a CPU: to see that it works
    TRITON_INTERPRET=1 python scripts/measure_step.py --tiny              # and batch-invariant plans

Numbers are µs of a call: the median over replays of CUDA graphs. The columns of a row are replayed in turns. A graph
has a call for each of several page tables, and no two of these share a page, so keys do not stay in the L2 cache. On a
CPU, calls are timed as they are. Results are compared with the float64 oracle first, where it has the same inputs: not
those that are rotated, and not those in e4m3. `docs/results/step_h200.md` has the first two tables, and
`docs/notes/hopper.md` the third.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import quire
from quire.dispatch.device import is_served_by_torch
from quire_tools.bench.case import Case, Model
from quire_tools.bench.cases import FP8, decode, prompts, several
from quire_tools.bench.inputs import Inputs, make_inputs
from quire_tools.bench.measure import Call, capture, replay, round_robin
from quire_tools.bench.peers import quire_calls
from quire_tools.bench.results import provenance
from quire_tools.bench.sample import Sample

Columns = dict[str, list[Call]]  # by name, a call for each page table


@dataclass(frozen=True)
class Table:
    """Cases, and what is compared.

    Attributes:
        columns: makes the calls.
        judged: how many of the columns, from the first on, the oracle judges.
        cases: of which each is a row.
        tiny: the cases of `--tiny`.
    """

    columns: Callable[[Inputs], Columns]
    judged: int
    cases: tuple[Case, ...]
    tiny: tuple[Case, ...]


def new_tokens(inputs: Inputs) -> Columns:
    """Write the last token of each sequence and attend, in two calls and in one, which may rotate and normalise too."""
    spec, page_size, device = inputs.case.spec, inputs.case.page_size, inputs.q.device
    shape = inputs.case.num_tokens, spec.num_kv_heads, spec.head_dim
    k, v = torch.randn(2, *shape, generator=torch.Generator(device).manual_seed(1), device=device).to(spec.dtype)
    positions = inputs.seq_lens.long() - 1
    powers = 10000 ** -torch.linspace(0, 1, spec.head_dim // 2 + 1, device=device)[:-1]
    angles = torch.arange(max(inputs.case.seq_lens), device=device)[:, None] * powers
    rope = quire.Rope(angles.cos(), angles.sin(), positions)
    norm = quire.QKNorm(torch.ones_like(k[0, 0]), torch.ones_like(k[0, 0]))
    plan: Any = quire_calls(inputs, inputs.empty_out())
    columns: Columns = {"`write_kv`, then `attention`": [], "one call": [], "with rope": [], "with rope and norms": []}
    for table in inputs.tables:
        pages = table.gather(1, (positions // page_size)[:, None]).squeeze(1).long()
        slots, attend = pages * page_size + positions % page_size, plan(table)
        write = partial(quire.write_kv, k, v, inputs.cache, slots)
        one = partial(attend, k=k, v=v, slot_mapping=slots)
        calls = partial(both, write, attend), one, partial(one, rope=rope), partial(one, rope=rope, qk_norm=norm)
        for column, call in zip(columns.values(), calls, strict=True):
            column.append(call)
    return columns


def both(first: Callable[[], object], second: Call) -> torch.Tensor | None:
    """Make two calls, and return what the second one does."""
    first()
    return second()


def plans(inputs: Inputs) -> Columns:
    """Attend by plans that are not batch-invariant, and by plans that are."""
    out = inputs.empty_out()
    planners = quire_calls(inputs, out), quire_calls(inputs, out, batch_invariant=True)
    names = "other plans", "batch-invariant"
    return {name: [plan(table) for table in inputs.tables] for name, plan in zip(names, planners, strict=True)}


def outputs(inputs: Inputs) -> Columns:
    """Attend with an output of the queries' dtype, with a copy of that in e4m3, and with an output in e4m3."""
    out, scale, name = inputs.empty_out(), torch.ones(1, device=inputs.q.device), inputs.case.dtype
    narrow = torch.empty_like(out, dtype=torch.float8_e4m3fn)
    plan: Any = quire_calls(inputs, out)
    calls = [plan(table) for table in inputs.tables]
    copied = [partial(both, call, partial(narrow.copy_, out)) for call in calls]
    return {
        name: calls,
        f"{name}, then `copy_`": copied,
        "e4m3": [partial(c, out=narrow, out_scale=scale) for c in calls],
    }


def small(*cases: Case) -> tuple[Case, ...]:
    """Return cases with small heads, in a dtype that the interpreter has."""
    return tuple(replace(case, layer=Model(4, 2, 16), dtype="float32") for case in cases)


GEMMA = "Gemma-3-12B"  # heads 16/8/256
NEW_TOKENS = (
    *(decode(*sizes) for sizes in ((1, 1024), (1, 6900), (8, 2048), (32, 512), (32, 2048))),
    decode(8, 2048, " fp8", **FP8),
)
BATCH_INVARIANT = (
    *(decode(1, n) for n in (1024, 8192, 131072)),
    *(decode(*sizes) for sizes in ((8, 4096), (16, 8192), (32, 2048), (64, 1024), (128, 512))),
    *(several("drafts", *sizes) for sizes in ((16, 4, 2048), (32, 8, 4096))),
    *(several("chunk", *sizes) for sizes in ((1, 16, 8192), (1, 64, 1024), (1, 64, 8192), (4, 16, 4096))),
    *(prompts(f"prefill {n}", [n]) for n in (128, 256, 512, 2048, 8192)),
    *(prompts(f"prefill {n}x{length}", [length] * n) for n, length in ((16, 128), (8, 2048))),
    prompts("prefill 4096 32/8/64", [4096], model="Llama-3.2-1B"),
    prompts("prefill 4x1024 16/16/192, values of 128", [1024] * 4, model="MLA, 16 heads, expanded"),
    prompts("prefill 4096, window 1024", [4096], model="Mistral window"),
    several("chunk", 1, 2048, 14336 + 2048),
    Case("32 decoding on 2048 + 2 prompts of 512", "mixed", ((1, 2048),) * 32 + ((512, 512),) * 2),
    *(prompts(f"prefill {n} 16/8/256", [n], model=GEMMA) for n in (512, 4096)),
    several("chunk", 1, 64, 8192, " 16/8/256", model=GEMMA),
    decode(16, 4096, " 16/8/256", model=GEMMA),
)
OUTPUTS = (
    *(prompts(f"prefill {n}", [n]) for n in (2048, 8192)),
    prompts("prefill 8x512", [512] * 8),
    prompts("prefill 4096 16/8/256", [4096], model=GEMMA),
)
SMALL_PROMPT = prompts("prefill 12", [12])
TABLES = {
    "new-tokens": Table(new_tokens, 2, NEW_TOKENS, small(decode(2, 20), decode(3, 7))),
    "batch-invariant": Table(plans, 2, BATCH_INVARIANT, small(decode(2, 20), SMALL_PROMPT)),
    "e4m3-output": Table(outputs, 1, OUTPUTS, small(SMALL_PROMPT)),
}


def measure(table: Table, case: Case, device: str, seconds: float) -> dict[str, float]:
    """Return the µs of a call of each column."""
    inputs = make_inputs(case, device)
    columns = table.columns(inputs)
    for name in list(columns)[: table.judged]:
        result = columns[name][0]()  # may write what the oracle then reads
        assert result is not None
        verdict = Sample(inputs, inputs.tables[0]).judge(result)
        if not verdict.passed:
            raise SystemExit(f"{case.name}, {name}: wrong, {verdict.out:.1f} times the error budget; nothing was timed")
    timers = {name: timer_of(calls, device) for name, calls in columns.items()}
    return {name: statistics.median(times) for name, times in round_robin(timers, seconds).items()}


def timer_of(calls: list[Call], device: str) -> Callable[[], float]:
    """Return a function that makes the calls, on a GPU as one graph, and returns the µs of one."""
    for call in calls[:2]:
        call()
    if device == "cuda":
        graph = capture(calls)
        return lambda: replay(graph) / len(calls)

    def run() -> float:
        began = time.perf_counter()
        for call in calls:
            call()
        return 1e6 * (time.perf_counter() - began) / len(calls)

    return run


def print_table(name: str, cases: list[Case], device: str, seconds: float) -> None:
    """Measure cases, and print each row when it is measured; of two columns, print their ratio too."""
    print(f"\n## {name}\n")
    for i, case in enumerate(cases):
        micros = measure(TABLES[name], case, device, seconds)
        base, *others = micros.values()
        ratios = {"ratio": f"{others[0] / base:.2f}"} if len(others) == 1 else {}
        if i == 0:
            print(f"| case | {' | '.join([*micros, *ratios])} |\n| --- |{' --- |' * len([*micros, *ratios])}")
        cells = [f"{time:,.1f}" for time in micros.values()] + list(ratios.values())
        print(f"| {case.name} | {' | '.join(cells)} |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="default: all")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.4, help="replay each case for so long (default: 0.4)")
    parser.add_argument("--tiny", action="store_true", help="small cases in float32, on a CPU if there is no GPU")
    parser.add_argument("--commit", help="the commit that is measured; git is asked when not given")
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.tiny:
        sys.exit("no GPU here; pass --tiny")
    about = provenance(torch.cuda.get_device_name() if device == "cuda" else "a CPU", args.commit)
    print(f"{about.device}, {about.date}: torch {about.torch}, Triton {about.triton}, Quire {about.commit}.")
    print("Times are µs, medians; the columns of a row were measured in turns.")
    for name in args.tables:
        cases = [c for c in (TABLES[name].tiny if args.tiny else TABLES[name].cases) if args.only in c.name]
        if name == "batch-invariant" and is_served_by_torch(torch.device(device)):
            print(f"\n{name}: PyTorch has no such plans on a CPU; set TRITON_INTERPRET=1")
        elif cases:
            print_table(name, cases, device, args.seconds)


if __name__ == "__main__":
    main()
