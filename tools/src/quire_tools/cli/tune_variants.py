"""`quire tune sweep` and `quire tune fit`: time all variants on drawn cases, and fit the numbers that predict times."""

import argparse
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quire.cli.arguments import CommandError, add_card, run_code_of
from quire.dispatch.device import device_properties
from quire_tools.cli.arguments import check_file

MAX_SECONDS = 25  # of a variant, after which a kernel is taken never to end


def add_sweep(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `quire tune sweep`."""
    parser = subparsers.add_parser("sweep", help="time every variant on cases drawn at random, and keep the times")
    parser.add_argument("--seed", type=int, default=0, help="of the cases; `fit` judges each seed by the others")
    parser.add_argument("--cases", type=int, default=10_000, metavar="N", help="how many, at most")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="lines of JSON are appended to it")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--millis", type=float, default=20.0, help="that each variant of a case is timed for")
    parser.add_argument("--compilers", type=int, metavar="N", help="processes that compile ahead; one less than cores")
    parser.add_argument("--commit", help="the commit that is measured; git is asked when not given")
    add_card(parser)
    parser.set_defaults(run=run_sweep)


def add_fit(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `quire tune fit`."""
    parser = subparsers.add_parser("fit", help="fit numbers to the records of sweeps, and judge them on other seeds")
    parser.add_argument("records", type=Path, nargs="+", help="files of `quire tune sweep`")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--worst", type=int, default=10, metavar="N", help="cases with the most regret to print")
    parser.set_defaults(run=run_fit)


def run_sweep(args: argparse.Namespace) -> int:
    """Run `quire tune sweep`."""
    run_code_of(args.card)
    if not torch.cuda.is_available():
        raise CommandError("quire tune sweep must have a GPU to measure, got none; run it where there is one")
    check_file("--output", args.output)
    import triton

    from quire.targets import current_target, title_here
    from quire.version import commit as commit_here
    from quire_tools.tuning.sweep_variants import Compilations, cores, measure_here, sweep_variants

    device = torch.device("cuda", torch.cuda.current_device())
    header = {
        "device": title_here(),
        "properties": asdict(device_properties(device)),
        "seed": args.seed,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit or commit_here(),
        "date": time.strftime("%Y-%m-%d"),
        "millis": args.millis,
    }
    processes = max(1, cores() - 1) if args.compilers is None else args.compilers
    compilations = Compilations(current_target(), processes)

    def measure(case: Any, names: list[str]) -> dict[str, dict[str, Any]]:
        # The alarm ends this process, also where it waits for a kernel that never ends.
        found = measure_here(case, names, args.millis, device, lambda: signal.alarm(MAX_SECONDS))
        signal.alarm(0)
        return found

    try:
        done = sweep_variants(args.output, header, args.seed, args.cases, compilations, measure, args.seconds)
    finally:
        compilations.stop()
    print(f"{done} cases in {args.output}", flush=True)
    return 0


def run_fit(args: argparse.Namespace) -> int:
    """Run `quire tune fit`."""
    from quire_tools.tuning.drawn import in_words
    from quire_tools.tuning.fit_variants import as_json, cross_judged, fit_all, judge, read_records, summary

    for path in args.records:
        if not path.exists():
            raise CommandError(
                f"records must be files of `quire tune sweep`, got {path}, which is not there; name others"
            )
    header, timed = read_records(args.records)
    if not timed:
        raise CommandError("records must hold times, got none; sweep first")
    fitted = fit_all(timed)
    own, others = judge(fitted, timed), cross_judged(timed)
    print(f"fitted to {len(timed)} cases: {summary(own)}")
    if len({each.seed for each in timed}) > 1:
        print(f"each seed by the others: {summary(others)}")
        for kind in sorted({each.timed.kind for each in others}):
            print(f"  {kind}: {summary([each for each in others if each.timed.kind == kind])}")
    for each in sorted(others or own, key=lambda each: -each.regret)[: args.worst]:
        best = min(each.timed.seen, key=lambda seen: seen.micros).variant
        print(f"  {each.regret:.3f}  {each.variant} instead of {best}: {in_words(each.timed.case)}")
    if args.output is not None:
        keep = "device", "torch", "triton", "commit", "date"
        facts = {name: header[name] for name in keep if name in header}
        facts |= {"cases": len(timed), "judged_by_other_seeds": summary(others)}
        args.output.write_text(as_json(fitted, facts), encoding="utf-8")
        print(f"numbers are in {args.output}")
    return 0
