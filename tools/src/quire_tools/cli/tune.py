"""`quire tune`: measure this GPU, and fit the numbers by which plans predict times and choose among variants.

`quire tune sweep` times every variant on cases drawn at random, and keeps the times; one that was stopped goes on from
there. `quire tune judge` says how good the choices of plans are by these times. `quire tune fit` fits numbers to the
records of sweeps, judges them on seeds that they were not fitted to, and writes them to the folder that plans read.
"""

import argparse
import signal
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire.cli.arguments import CommandError, add_card, run_code_of
from quire.dispatch.constants import USER_FILES, VARIABLE, constants_of, user_folder
from quire.dispatch.device import DeviceProperties, device_properties
from quire_tools.cli.arguments import check_file

EXAMPLES = """examples:
  quire tune sweep --seed 1 --output 1.jsonl --seconds 900   # Ctrl-C stops it, and the same command goes on
  quire tune sweep --seed 2 --output 2.jsonl --seconds 300
  quire tune sweep --seed 3 --output 3.jsonl --seconds 120 --only mixed --family hopper
  quire tune judge 1.jsonl 2.jsonl 3.jsonl                   # are the fastest variants chosen now?
  quire tune fit 1.jsonl 2.jsonl                             # every plan uses the numbers from then on
  quire tune fit 3.jsonl --around                            # near the numbers of now, where few cases were timed
  quire tune fit 1.jsonl 2.jsonl --output mine.json          # numbers somewhere else, which no plan uses
"""
MAX_SECONDS = 25  # of a variant, after which a kernel is taken never to end


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "tune",
        help=summary,
        description=__doc__,
        epilog=f"{EXAMPLES}\nplans look for numbers in {USER_FILES},\nand take those of a device like theirs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(metavar="sweep | judge | fit", required=True)
    add_sweep(verbs)
    add_judge(verbs)
    add_fit(verbs)


def add_sweep(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `quire tune sweep`."""
    parser = subparsers.add_parser("sweep", help="time every variant on cases drawn at random, and keep the times")
    parser.add_argument("--seed", type=int, default=0, help="of the cases; `fit` judges each seed by the others")
    parser.add_argument("--cases", type=int, default=10_000, metavar="N", help="how many, at most")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="lines of JSON are appended to it")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--millis", type=float, default=20.0, help="that each variant of a case is timed for")
    parser.add_argument("--compilers", type=int, metavar="N", help="processes that compile ahead; one less than cores")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose line contains this, such as mixed")
    parser.add_argument("--family", action="append", default=[], help="only variants of this kernel; may be repeated")
    parser.add_argument("--commit", help="the commit that is measured; git is asked when not given")
    add_card(parser)
    parser.set_defaults(run=run_sweep)


def add_judge(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `quire tune judge`."""
    parser = subparsers.add_parser("judge", help="say what plans choose now, over the fastest that was timed")
    add_records(parser)
    parser.set_defaults(run=run_judge)


def add_records(parser: argparse.ArgumentParser) -> None:
    """Add the records that are read, and how many cases are printed."""
    parser.add_argument("records", type=Path, nargs="+", help="files of `quire tune sweep`, compressed (.xz) or not")
    parser.add_argument("--worst", type=int, default=10, metavar="N", help="cases with the most regret to print")


def add_fit(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `quire tune fit`."""
    parser = subparsers.add_parser("fit", help="fit numbers to the records of sweeps, and judge them on other seeds")
    add_records(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="of the numbers (default: where plans look)")
    parser.add_argument(
        "--around",
        action="store_true",
        help="stay near the numbers that plans follow now, and keep those of specs that the records don't have",
    )
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
    from quire_tools.tuning.sweep import Compilations, cores, measure_here, sweep

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
        done = sweep(
            args.output,
            header,
            args.seed,
            args.cases,
            compilations,
            measure,
            args.seconds,
            only=args.only,
            families=tuple(args.family),
        )
    finally:
        compilations.stop()
    print(f"{done} cases in {args.output}", flush=True)
    return 0


def read(paths: list[Path]) -> tuple[dict[str, Any], list[Any]]:
    """Return the first header of some records, and the cases that were timed."""
    from quire_tools.tuning.records import read_records

    for path in paths:
        if not path.is_file():
            what = "a folder" if path.is_dir() else "not there"
            raise CommandError(f"records must be files of `quire tune sweep`, got {path}, which is {what}; name others")
    header, timed = read_records(paths)
    if not timed:
        raise CommandError("records must hold times, got none; sweep first")
    return header, timed


def say_judged(title: str, judged: list[Any], worst: int) -> None:
    """Print a summary of choices, one for each kind of spec, and the cases with the most regret."""
    from quire_tools.tuning.drawn import in_words
    from quire_tools.tuning.fit import summary

    print(f"{title}: {words(summary(judged))}")
    for kind in sorted({each.timed.kind for each in judged}):
        print(f"  {kind}: {words(summary([each for each in judged if each.timed.kind == kind]))}")
    for each in sorted(judged, key=lambda each: -each.regret)[:worst]:
        print(f"  {each.regret:.3f}  {each.variant} instead of {each.timed.best_variant}: {in_words(each.timed.case)}")


def run_judge(args: argparse.Namespace) -> int:
    """Run `quire tune judge`."""
    from quire_tools.tuning.fit import judge_now

    header, timed = read(args.records)
    say_judged("chosen now", judge_now(timed, DeviceProperties(**header["properties"])), args.worst)
    return 0


def run_fit(args: argparse.Namespace) -> int:
    """Run `quire tune fit`."""
    from quire_tools.tuning.fit import as_json, cross_judged, fit_all, fit_around, judge, summary

    header, timed = read(args.records)
    output = args.output or default_path(header["device"])
    check_file("--output", output)
    device = DeviceProperties(**header["properties"])
    fit = partial(fit_around, device=device) if args.around else fit_all
    fitted = fit(timed)
    own, others = judge(fitted, timed), cross_judged(timed, fit)
    print(f"fitted to {len(timed)} cases: {words(summary(own))}")
    say_judged("each seed by the others" if others else "fitted", others or own, args.worst)
    keep = "device", "torch", "triton", "commit", "date"
    facts = {name: header[name] for name in keep if name in header}
    facts |= {"seeds": sorted({each.seed for each in timed}), "cases": len(timed)}
    facts |= {"around": constants_of(device).name} if args.around else {}
    facts["judged_by_other_seeds"] = summary(others)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(as_json(fitted, facts, header["properties"]), encoding="utf-8")
    print(f"numbers are in {output}")
    return 0


def words(found: dict[str, float]) -> str:
    """Return a summary in a line."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items())


def default_path(device_name: str) -> Path:
    """Return the file of the user's numbers for a device."""
    folder = user_folder()
    if folder is None:
        raise CommandError(
            f"--output must name a file where the user has no home directory, got none; give one, or set {VARIABLE}"
        )
    return folder / f"{'_'.join(device_name.lower().split())}.json"
