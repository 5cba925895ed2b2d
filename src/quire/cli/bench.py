"""`quire bench`: time attention on named workloads, compared with other libraries, and report it.

On a GPU, the result of every library is compared with the float64 oracle on each case. Right results are timed
round-robin, as CUDA graphs over page tables that share no page. Without a GPU, or with --device, it shows each case's
floor, the limit of the device that bounds it, and the resources of Quire's compiled kernels.
"""

import argparse
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.bench import cases as workloads
from quire.bench import grid
from quire.bench.case import DEFAULT_MODEL, KV_MODELS, Case
from quire.bench.measure import Peer
from quire.bench.peers import PEERS, quire_with_config
from quire.bench.roofline import DATA_SHEETS
from quire.cli.arguments import (
    CommandError,
    add_grid,
    check_file,
    check_folder,
    check_seed,
    positive_seconds,
    require_packages,
)
from quire.dispatch.config import KernelConfig

if TYPE_CHECKING:  # imported when the command runs
    from rich.console import Console

    from quire.bench.guard import Guard
    from quire.bench.results import Grid, Report, Row

EXAMPLES = """examples:
  quire bench --quick                   # a dozen cases with every library that is installed, a minute or two
  quire bench --output results/         # all cases: results.json, plots, report.html
  quire bench --set decode --only 32x --peers Quire,FlashInfer
  quire bench --only "decode 1x4096" --peers Quire --config block_n=128 --config block_n=32,num_stages=4
  quire bench --trace requests.csv      # rows of prompt tokens, output tokens
  quire bench --grid 60 --seed 1        # cases drawn at random: how the ratios are distributed, and the worst
  quire bench --graphs                  # what graphs captured for a range of lengths lose
  quire bench --compare before/ after/  # the exit code is 1 if a case became slower
  quire bench --guard docs/results/h200_floors.json   # the exit code is 1 if a ratio to the best other library fell
  quire bench --make-guard results/ floors.json       # the floors of a run, for --guard
  quire bench --report results/         # the plots and pages of a results.json again
  quire bench --device MI300X --set decode   # no GPU: roofline, registers, spills, shared memory, occupancy
"""
DEFAULT_FOLDER = Path("quire-bench")
QUIRE = PEERS[0].name
BY_SPEC = {"block_d": 16, "block_dv": 16}  # fields of a configuration that --config cannot set
CONFIG_FIELDS = tuple(field.name for field in fields(KernelConfig) if field.name not in BY_SPEC)
LEGAL_CONFIG = KernelConfig(16, 16, 4, 2, False, 1, **BY_SPEC)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "bench",
        help=summary,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument("--quick", action="store_true", help="a dozen cases, measured briefly")
    what.add_argument("--set", action="append", choices=workloads.SETS, help="only this set of cases; may be repeated")
    what.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    what.add_argument(
        "--trace", type=Path, metavar="FILE", help="cases from a CSV file of prompt and output tokens instead"
    )
    add_grid(what, "measure")
    what.add_argument(
        "--model",
        choices=KV_MODELS,
        default=DEFAULT_MODEL,
        metavar="NAME",
        help="the model whose heads the cases of --trace have (default: %(default)s)",
    )
    what.add_argument(
        "--peers", metavar="NAMES", help="only libraries whose name begins with one of these (comma-separated)"
    )
    what.add_argument(
        "--config",
        action="append",
        type=config_fields,
        metavar="FIELD=N,...",
        help="also time the portable kernels with this configuration; may be repeated",
    )
    what.add_argument(
        "--seconds",
        type=positive_seconds,
        help="time each case for so long (default: 0.4, with --quick and --grid 0.15)",
    )
    what.add_argument("--graphs", action="store_true", help="measure graphs captured for a range of lengths instead")
    what.add_argument("--device", choices=DATA_SHEETS, help="measure nothing: use its data sheet and compiled kernels")
    what.add_argument("--no-compile", action="store_true", help="with --device: the roofline alone")
    where = parser.add_argument_group("what to write, read and print")
    where.add_argument(
        "--output", type=Path, metavar="FOLDER", help=f"the report and its plots go there (default: {DEFAULT_FOLDER})"
    )
    where.add_argument(
        "--continue",
        dest="continued",
        action="store_true",
        help="go on with the run in the folder: its cases are not measured again. Otherwise a new run begins, and "
        "the earlier results.json becomes results.1.json",
    )
    where.add_argument("--commit", help="the commit that is measured; git is asked when not given")
    where.add_argument(
        "--report", type=Path, metavar="A", help="write the report of a results.json, or its folder, again"
    )
    where.add_argument(
        "--compare", type=Path, nargs=2, metavar=("A", "B"), help="compare two results.json, or their folders"
    )
    where.add_argument(
        "--guard",
        type=Path,
        metavar="FILE",
        help="hold the ratios to the best other library against these floors; with --report, those of that run",
    )
    where.add_argument(
        "--make-guard",
        type=Path,
        nargs=2,
        metavar=("A", "FILE"),
        help="write the floors of a results.json, or its folder, for --guard",
    )
    where.add_argument("--list", action="store_true", help="list the cases and leave")
    parser.set_defaults(run=run)


def config_fields(text: str) -> dict[str, int | bool]:
    """Read the fields of a configuration, for argparse."""
    found: dict[str, int | bool] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name not in CONFIG_FIELDS or not value.isdecimal():
            known = ", ".join(CONFIG_FIELDS)
            raise argparse.ArgumentTypeError(
                f"must be FIELD=N pairs separated by commas, got {text!r}; the fields are {known}"
            )
        found[name] = bool(int(value)) if name == "full_tile_loop" else int(value)
    try:
        replace(LEGAL_CONFIG, **found)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a legal configuration, got {text!r}: {error}") from None
    return found


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        1 if a comparison found something slower, a floor was not held, a result of Quire's is wrong or missing, or an
        error ended the run; else 0.
    """
    require_packages("bench", "bench", "rich", "matplotlib", "jinja2")

    from quire.cli import bench_print
    from quire.cli.bench_keep import earlier_run_kept, keep_earlier_run
    from quire.cli.console import CommandConsole

    console = CommandConsole()
    check_grid(args)
    check_continued(args)
    if args.compare:
        before, after = (load("--compare", path) for path in args.compare)
        return bench_print.print_changes(before, after, console)
    if args.make_guard:
        source, file = args.make_guard
        write_guard(source, file, console)
        return 0
    guard = load_guard(args) if args.guard else None
    if args.report:
        report = load("--report", args.report)
        if guard is not None:
            check_guarded_device(guard, report.provenance.device)
        folder = args.output or (args.report if args.report.is_dir() else args.report.parent)
        check_folder("--output", folder)
        keep_earlier_run(folder, console, report)
        write(report, folder, console)
        return 0 if guard is None else bench_print.print_guard(guard, report, console)
    cases = choose_cases(args)
    if guard is not None:
        cases = guarded_cases(guard, cases)
    peers = choose_peers(args.peers, args.config or [], args.grid is not None)
    if args.list:
        bench_print.print_cases(cases, console)
        return 0
    folder = args.output or DEFAULT_FOLDER
    if args.graphs and not is_measured(args):
        raise CommandError("--graphs must be measured on a GPU, got none; leave it out")
    check_folder("--output", folder)
    earlier, drawn = [], drawn_grid(args)
    if args.continued:
        earlier = rows_so_far(folder, drawn)
        cases = [case for case in cases if case.name not in {row.case for row in earlier}]
    with nullcontext() if args.continued else earlier_run_kept(folder, console):
        report = results_of(args, cases, peers, folder, console, drawn, earlier)
        write(report, folder, console)
    missing = [row for row in report.rows if QUIRE in row.reasons]
    for row in missing:
        console.print(f"Quire has no time for {row.case}: {row.reasons[QUIRE]}", highlight=False, markup=False)
    fell = guard is not None and bench_print.print_guard(guard, report, console) != 0
    return 1 if missing or fell or report.stopped else 0


def is_measured(args: argparse.Namespace) -> bool:
    """Return whether the cases are measured, on this machine's GPU."""
    return torch.cuda.is_available() and not args.device


def drawn_grid(args: argparse.Namespace) -> "Grid | None":
    """Return which cases are drawn at random; None where they are not."""
    from quire.bench.results import Grid

    return Grid(args.grid, args.seed or 0) if args.grid else None


def results_of(
    args: argparse.Namespace,
    cases: list[Case],
    peers: list[Peer],
    folder: Path,
    console: "Console",
    drawn: "Grid | None",
    earlier: "list[Row]",
) -> "Report":
    """Measure, or analyse where there is no GPU or another one was named."""
    from quire.cli import bench_measure

    if not is_measured(args):
        if not args.device:
            console.print("no GPU here: what each case needs of an H200 (--device names another)", style="dim")
        device = args.device or "H200"
        return bench_measure.analyse(cases, device, not args.no_compile, args.commit, folder, console)
    seconds = args.seconds or (0.15 if args.quick or args.grid else 0.4)
    if args.graphs:
        return bench_measure.measure_ranges(peers, seconds, args.commit, folder, console)
    return bench_measure.measure(cases, peers, seconds, args.commit, folder, console, drawn, earlier)


def rows_so_far(folder: Path, drawn: "Grid | None") -> "list[Row]":
    """Return the rows of the run in a folder; raise CommandError unless it was on this device, of the same cases."""
    from quire.bench.results import FILE_NAME

    if not (folder / FILE_NAME).exists():
        return []
    before, device = load("--continue", folder), torch.cuda.get_device_name()
    if before.provenance.device != device:
        raise CommandError(
            f"--continue must go on with a run on {device}, got one on {before.provenance.device}; name another folder"
        )
    seeds = [grid and grid.seed for grid in (before.grid, drawn)]
    if seeds[0] != seeds[1]:
        raise CommandError(
            f"--continue must go on with a run of the same seed, got {seeds[0]} there and {seeds[1]} here; "
            "name another folder"
        )
    return before.rows


def check_grid(args: argparse.Namespace) -> None:
    """Raise CommandError if drawn cases are asked for together with others."""
    check_seed(args)
    others = {"--quick": args.quick, "--set": args.set, "--trace": args.trace, "--graphs": args.graphs}
    for option, value in (others | {"--guard": args.guard}).items():
        if args.grid and value:
            raise CommandError(f"--grid must be given without {option}, got both; leave one out")


def check_continued(args: argparse.Namespace) -> None:
    """Raise CommandError if --continue has no run of cases on this GPU to go on with."""
    others = {
        "--report": args.report,
        "--compare": args.compare,
        "--make-guard": args.make_guard,
        "--graphs": args.graphs,
        "--device": args.device,
    }
    for option, value in others.items():
        if args.continued and value:
            raise CommandError(f"--continue must be given without {option}, got both; leave one out")
    if args.continued and not torch.cuda.is_available():
        raise CommandError("--continue must go on with a run on a GPU, got none; leave it out")


def load_guard(args: argparse.Namespace) -> "Guard":
    """Read the floors of --guard; raise CommandError where no times will be held against them."""
    from quire.bench import guard

    others = {"--graphs": args.graphs, "--compare": args.compare, "--device": args.device, "--trace": args.trace}
    for option, value in others.items():
        if value:
            raise CommandError(f"--guard must be given without {option}, got both; leave one out")
    if not args.report and not torch.cuda.is_available():
        raise CommandError("--guard must be judged by times on a GPU, got none; name a run with --report")
    try:
        found = guard.load(args.guard)
    except ValueError as error:
        raise CommandError(f"--guard {error}") from None
    if not args.report:
        check_guarded_device(found, torch.cuda.get_device_name())
    return found


def check_guarded_device(guard: "Guard", device: str) -> None:
    """Raise CommandError if the floors are another device's."""
    if guard.provenance.device != device:
        raise CommandError(
            f"--guard must hold floors of {device}, got those of {guard.provenance.device}; measure this device, and "
            "make them with quire bench --make-guard"
        )


def guarded_cases(guard: "Guard", cases: list[Case]) -> list[Case]:
    """Return the cases that have a floor."""
    found = [case for case in cases if case.name in guard.cases]
    if not found:
        raise CommandError("--guard must have floors of the cases that are asked for, got none; ask for others")
    return found


def write_guard(source: Path, file: Path, console: "Console") -> None:
    """Write the floors of a run."""
    from quire.bench import guard, results

    report = load("--make-guard", source)
    if file.resolve() in (source.resolve(), (source / results.FILE_NAME).resolve()):
        raise CommandError(f"--make-guard must write to another file than the run's, got {file} for both; name another")
    check_file("--make-guard", file)
    try:
        made = guard.make_guard(report)
    except ValueError as error:
        raise CommandError(f"--make-guard {source}: {error}") from None
    guard.save(made, file)
    console.print(f"{file}: floors of {len(made.cases)} cases", highlight=False, markup=False, soft_wrap=True)


def load(option: str, path: Path) -> "Report":
    """Read the report of a run, which an option names."""
    from quire.bench import results

    lacks = "is not there" if not path.exists() else f"has no {results.FILE_NAME}"
    if not (path / results.FILE_NAME if path.is_dir() else path).exists():
        raise CommandError(
            f"{option} must be a results.json of `quire bench`, or its folder, got {path}, which {lacks}; name another"
        )
    try:
        return results.load(path)
    except ValueError as error:
        raise CommandError(str(error)) from None


def write(report: "Report", folder: Path, console: "Console") -> None:
    """Write a report with its plots and pages, and print it."""
    from quire.bench import html
    from quire.cli import bench_print
    from quire.cli.console import print_step

    if not console.is_terminal:
        print_step("drawing the report")
    with console.status("drawing the report"):
        written = html.write(report, folder)
    bench_print.print_report(report, console)
    others = ", ".join(path.name for path in written[1:])
    console.print(f"{written[0]}, and in the same folder {others}", style="dim", soft_wrap=True)


def choose_cases(args: argparse.Namespace) -> list[Case]:
    """Return the cases that the arguments ask for."""
    if args.trace:
        for option, value in {"--set": args.set, "--quick": args.quick}.items():
            if value:
                raise CommandError(f"--trace must be given without {option}, got both; leave one out")
        try:
            cases = [
                case for case in workloads.cases_from_trace(args.trace, model=args.model) if args.only in case.name
            ]
        except OSError as error:
            raise CommandError(
                f"--trace must be a file that can be read, got {args.trace} ({error.strerror})"
            ) from None
        except ValueError as error:
            raise CommandError(f"--trace {error}") from None
    elif args.grid:
        cases = [case for case in grid.draw(args.grid, args.seed or 0) if args.only in case.name]
    else:
        cases = workloads.cases(["quick"] if args.quick else args.set, args.only)
    if not cases:
        advice = "see quire bench --list"
        if args.only.startswith("grid ") and not args.grid:
            advice = "pass --grid N and --seed S too"
        raise CommandError(f"--only must be part of the name of a case, got {args.only!r}; {advice}")
    return cases


def choose_peers(names: str | None, configs: list[dict[str, int | bool]], is_grid: bool = False) -> list[Peer]:
    """Return the libraries whose name begins with one of the comma-separated `names`, and Quire with each config.

    Without names these are all, and for a grid all but Quire's variants.
    """
    peers = [peer for peer in PEERS if not is_grid or peer.name == QUIRE or not peer.name.startswith(QUIRE)]
    if names is not None:
        prefixes = tuple(name.strip() for name in names.split(",") if name.strip())
        peers = [replace(peer, slow=False) for peer in PEERS if peer.name.startswith(prefixes)]
    variants = [
        Peer(
            f"Quire {' '.join(f'{name}={value}' for name, value in config.items())}",
            "quire",
            partial(quire_with_config, **config),
            plans=True,
        )
        for config in configs
    ]
    if not peers and not variants:
        known = "; ".join(peer.name for peer in PEERS)
        raise CommandError(f"--peers must begin the names of some of {known}, got {names!r}; see the list")
    return peers[:1] + variants + peers[1:]
