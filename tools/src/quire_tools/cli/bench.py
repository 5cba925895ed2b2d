"""`quire bench`: time attention on named workloads, compared with other libraries, and report it."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.cli.arguments import CommandError, add_card, run_code_of
from quire.cli.exit_codes import BAD_ARGUMENTS
from quire_tools.bench.case import Case
from quire_tools.bench.roofline import DATA_SHEETS
from quire_tools.cli.arguments import check_file, check_folder, positive_seconds, require
from quire_tools.cli.bench_choice import QUIRE, add_cases, add_peers, choose_cases, choose_peers

if TYPE_CHECKING:  # imported when the command runs
    from quire.cli.console import CommandConsole
    from quire_tools.bench.guard import Guard
    from quire_tools.bench.results import Grid, Report, Row

    Run = Callable[[argparse.Namespace, CommandConsole], int]
    Parsers = argparse._SubParsersAction[argparse.ArgumentParser]

DEFAULT_FOLDER = Path("quire-bench")
A_RUN = "a results.json, or its folder"
EXAMPLES = """examples:
  quire bench run --quick               # a dozen cases with every library that is installed, a minute or two
  quire bench compare before/ after/    # the exit code is 1 if a case became slower
  quire bench guard results/ docs/results/h200_floors.json
  quire bench roofline --device MI300X --set decode   # needs no GPU
"""
RUN = """Time attention on this GPU, compared with other libraries, and report it.

The result of every library is compared with the float64 oracle on each case. Right results are timed round-robin, as
CUDA graphs over page tables that share no page. The exit code is 1 if a result of Quire's is wrong or missing, if an
error ended the run, or if a floor of --guard was not held.
"""
RUN_EXAMPLES = """  quire bench run --quick               # a dozen cases, a minute or two
  quire bench run --output results/     # all cases: results.json, plots, report.html
  quire bench run --set decode --only 32x --peers Quire,FlashInfer
  quire bench run --only "decode 1x4096" --peers Quire --config block_n=128 --config block_n=32,num_stages=4
  quire bench run --trace requests.csv  # rows of prompt tokens, output tokens
  quire bench run --grid 60 --seed 1    # cases drawn at random: how the ratios are distributed, and the worst
  quire bench run --grid 60 --latents   # the same, over latents
  quire bench run --grid 60 --models    # batches of models, as a server may have them
  quire bench run --guard docs/results/h200_floors.json
  quire bench run --as sm86 --output sm86/   # the code that an older card gets, on this GPU
"""
GRAPHS = """Measure on this GPU what graphs captured for a range of lengths lose, against graphs for each length.
"""
ROOFLINE = """Say what each case needs of a device that need not be here.

Nothing is measured. The data sheet of the device gives the floor of each case, and the limit that bounds it. The
compiler gives the registers, spills, shared memory and occupancy of Quire's kernels.
"""
LIST = """Print the cases.
"""
REPORT = """Write the plots and pages of a run again.
"""
COMPARE = """Compare two runs.

The exit code is 1 if a case of Quire's became slower or has no result any more.
"""
FLOORS = """Write the floors of a run: the times of the other libraries over Quire's.
"""
GUARD = """Hold a run against floors.

The exit code is 1 if a ratio to the best other library fell below its floor by more than the noise.
`quire bench run --guard FLOORS` measures the cases that have a floor, and then does the same.
"""


def add_parser(subparsers: "Parsers", summary: str) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "bench",
        help=summary,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=partial(print_help, parser))
    commands = parser.add_subparsers(title="commands, each with --help", metavar="COMMAND")
    add_run(add_command(commands, "run", measure_cases, RUN, RUN_EXAMPLES))
    add_measured(add_command(commands, "graphs", measure_graphs, GRAPHS, "  quire bench graphs"), "0.4")
    example = "  quire bench roofline --device MI300X --set decode\n"
    example += (
        "  quire bench roofline --device H200 --as sm86 --quick   # an older card's code, as an H200 would run it"
    )
    add_roofline(add_command(commands, "roofline", analyse, ROOFLINE, example))
    add_cases(add_command(commands, "list", print_list, LIST, "  quire bench list --set mla"), "list")
    command = add_command(commands, "report", write_again, REPORT, "  quire bench report results/")
    command.add_argument("result", type=Path, metavar="RUN", help=A_RUN)
    command.add_argument("--output", type=Path, metavar="FOLDER", help="where they go (default: the folder of RUN)")
    command = add_command(commands, "compare", compare, COMPARE, "  quire bench compare before/ after/")
    command.add_argument("before", type=Path, metavar="BEFORE", help=A_RUN)
    command.add_argument("after", type=Path, metavar="AFTER", help="likewise")
    command = add_command(commands, "floors", write_floors, FLOORS, "  quire bench floors results/ floors.json")
    command.add_argument("result", type=Path, metavar="RUN", help=A_RUN)
    command.add_argument("file", type=Path, metavar="FILE", help="where they go")
    command = add_command(commands, "guard", judge, GUARD, "  quire bench guard results/ floors.json")
    command.add_argument("result", type=Path, metavar="RUN", help=A_RUN)
    command.add_argument("floors", type=Path, metavar="FLOORS", help="a file of `quire bench floors`")


def print_help(parser: argparse.ArgumentParser, _: argparse.Namespace) -> int:
    """Print what the commands are, where none was given."""
    parser.print_help()
    return BAD_ARGUMENTS


def add_command(commands: "Parsers", name: str, run: "Run", words: str, examples: str) -> argparse.ArgumentParser:
    """Add a command, described by words whose first line stands for them in a list."""
    parser = commands.add_parser(
        name,
        help=words.splitlines()[0],
        description=words,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=partial(start, run))
    return parser


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `quire bench run`."""
    add_cases(parser, "measure")
    add_peers(parser)
    group = add_measured(parser, "0.4, with --quick and --grid 0.15")
    group.add_argument(
        "--continue",
        dest="continued",
        action="store_true",
        help="go on with the run in the folder: its cases are not measured again. Otherwise a new run begins, and "
        "the earlier results.json becomes results.1.json",
    )
    group.add_argument(
        "--guard",
        type=Path,
        metavar="FLOORS",
        help="measure the cases that have a floor, and hold the ratios to the best other library against these",
    )


def add_measured(parser: argparse.ArgumentParser, default: str) -> "argparse._ArgumentGroup":
    """Add the arguments of a measurement, and return their group."""
    group = parser.add_argument_group("how to measure, and what to write")
    group.add_argument("--seconds", type=positive_seconds, help=f"time each case for so long (default: {default})")
    add_card(group)
    add_output(group)
    return group


def add_roofline(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `quire bench roofline`."""
    add_cases(parser, "analyse")
    group = parser.add_argument_group("the device, and what to write")
    group.add_argument("--device", choices=DATA_SHEETS, default="H200", help="default: %(default)s")
    add_card(group)
    group.add_argument("--no-compile", action="store_true", help="use the data sheet alone")
    add_output(group)


def add_output(group: "argparse._ArgumentGroup") -> None:
    """Add the arguments of a new report."""
    group.add_argument(
        "--output",
        type=Path,
        default=DEFAULT_FOLDER,
        metavar="FOLDER",
        help="the report and its plots go there (default: %(default)s)",
    )
    group.add_argument("--commit", help="the commit of Quire; git is asked when not given")


def start(run: "Run", args: argparse.Namespace) -> int:
    """Run a command, if the packages that it needs are there; return the exit code."""
    require("bench", "rich", "matplotlib", "jinja2")

    from quire.cli.console import CommandConsole

    return run(args, CommandConsole())


def measure_cases(args: argparse.Namespace, console: "CommandConsole") -> int:
    """Measure cases on this GPU; return 1 where RUN says so."""
    from quire_tools.bench.results import Grid
    from quire_tools.cli import bench_measure, bench_print
    from quire_tools.cli.bench_keep import earlier_run_kept

    guard = None if args.guard is None else load_floors(args.guard)
    cases = choose_cases(args)
    peers = choose_peers(args.peers, args.config, args.grid is not None)
    check_gpu("run")
    run_code_of(args.card)
    if guard is not None:
        cases = guarded_cases(guard, cases)
    folder = args.output
    check_folder("--output", folder)
    seconds = args.seconds or (0.15 if args.quick or args.grid else 0.4)
    drawn = Grid(args.grid, args.seed or 0, args.latents, args.models) if args.grid else None
    earlier: list[Row] = []
    if args.continued:
        earlier = rows_so_far(folder, drawn)
        cases = [case for case in cases if case.name not in {row.case for row in earlier}]
    advice = " --continue would go on with it."
    with nullcontext() if args.continued else earlier_run_kept(folder, console, advice):
        report = bench_measure.measure(cases, peers, seconds, args.commit, folder, console, drawn, earlier)
        write(report, folder, console)
    missing = [row for row in report.rows if QUIRE in row.reasons]
    for row in missing:
        console.print(f"Quire has no time for {row.case}: {row.reasons[QUIRE]}", highlight=False, markup=False)
    fell = guard is not None and bench_print.print_guard(guard, report, console) != 0
    return 1 if missing or fell or report.stopped else 0


def measure_graphs(args: argparse.Namespace, console: "CommandConsole") -> int:
    """Measure graphs captured for a range of lengths."""
    from quire_tools.cli import bench_measure
    from quire_tools.cli.bench_keep import earlier_run_kept

    check_gpu("graphs")
    run_code_of(args.card)
    check_folder("--output", args.output)
    with earlier_run_kept(args.output, console):
        report = bench_measure.measure_ranges(args.seconds or 0.4, args.commit, args.output, console)
        write(report, args.output, console)
    return 0


def analyse(args: argparse.Namespace, console: "CommandConsole") -> int:
    """Say what the cases need of a device, and compile Quire's kernels for it."""
    from quire_tools.cli import bench_measure
    from quire_tools.cli.bench_keep import earlier_run_kept

    cases = choose_cases(args)
    check_folder("--output", args.output)
    with earlier_run_kept(args.output, console):
        is_compiled = not args.no_compile
        try:
            report = bench_measure.analyse(
                cases, args.device, args.card, is_compiled, args.commit, args.output, console
            )
        except ValueError as error:
            raise CommandError(str(error)) from None
        write(report, args.output, console)
    return 0


def print_list(args: argparse.Namespace, console: "CommandConsole") -> int:
    """Print the cases."""
    from quire_tools.cli import bench_print

    bench_print.print_cases(choose_cases(args), console)
    return 0


def write_again(args: argparse.Namespace, console: "CommandConsole") -> int:
    """Write the plots and pages of a run."""
    from quire_tools.cli.bench_keep import keep_earlier_run

    report = load("RUN", args.result)
    folder = args.output or (args.result if args.result.is_dir() else args.result.parent)
    check_folder("--output", folder)
    keep_earlier_run(folder, console, new=report)
    write(report, folder, console)
    return 0


def compare(args: argparse.Namespace, console: "CommandConsole") -> int:
    """Print what changed between two runs; return 1 where COMPARE says so."""
    from quire_tools.cli import bench_print

    return bench_print.print_changes(load("BEFORE", args.before), load("AFTER", args.after), console)


def write_floors(args: argparse.Namespace, console: "CommandConsole") -> int:
    """Write the floors of a run."""
    from quire_tools.bench import guard, results

    source, file = args.result, args.file
    report = load("RUN", source)
    if file.resolve() in (source.resolve(), (source / results.FILE_NAME).resolve()):
        raise CommandError(f"FILE must be another file than the run's, got {file} for both; name another")
    check_file("FILE", file)
    try:
        made = guard.make_guard(report)
    except ValueError as error:
        raise CommandError(f"RUN {source}: {error}") from None
    guard.save(made, file)
    console.print(f"{file}: floors of {len(made.cases)} cases", highlight=False, markup=False, soft_wrap=True)
    return 0


def judge(args: argparse.Namespace, console: "CommandConsole") -> int:
    """Hold a run against floors; return 1 where GUARD says so."""
    from quire_tools.cli import bench_print

    report, guard = load("RUN", args.result), load_floors(args.floors)
    check_guarded_device(guard, report.provenance.title)
    return bench_print.print_guard(guard, report, console)


def check_gpu(command: str) -> None:
    """Raise CommandError unless there is a GPU."""
    if not torch.cuda.is_available():
        raise CommandError(
            f"quire bench {command} must have a GPU to measure, got none; quire bench roofline says what the cases "
            "need of one that is not here"
        )


def rows_so_far(folder: Path, drawn: "Grid | None") -> "list[Row]":
    """Return the rows of the run in a folder; raise CommandError unless it was on this device, of the same cases."""
    from quire.targets import title_here
    from quire_tools.bench.results import FILE_NAME

    if not (folder / FILE_NAME).exists():
        return []
    before, device = load("--continue", folder), title_here()
    if before.provenance.title != device:
        raise CommandError(
            f"--continue must go on with a run on {device}, got one on {before.provenance.title}; name another folder"
        )
    seeds = [grid and f"{grid.space} {grid.seed}".strip() for grid in (before.grid, drawn)]
    if seeds[0] != seeds[1]:
        raise CommandError(
            f"--continue must go on with a run of the same seed, got {seeds[0]} there and {seeds[1]} here; "
            "name another folder"
        )
    return before.rows


def load_floors(file: Path) -> "Guard":
    """Read floors."""
    from quire_tools.bench import guard

    try:
        return guard.load(file)
    except ValueError as error:
        raise CommandError(str(error)) from None


def check_guarded_device(guard: "Guard", device: str) -> None:
    """Raise CommandError if the floors are another device's."""
    if guard.provenance.title != device:
        raise CommandError(
            f"FLOORS must be those of {device}, got those of {guard.provenance.title}; measure this device, and "
            "make them with quire bench floors"
        )


def guarded_cases(guard: "Guard", cases: list[Case]) -> list[Case]:
    """Return the cases that have a floor of this device."""
    from quire.targets import title_here

    check_guarded_device(guard, title_here())
    found = [case for case in cases if case.name in guard.cases]
    if not found:
        raise CommandError("--guard must have floors of the cases that are asked for, got none; ask for others")
    return found


def load(name: str, path: Path) -> "Report":
    """Read the report of a run, which an argument names."""
    from quire_tools.bench import results

    lacks = "is not there" if not path.exists() else f"has no {results.FILE_NAME}"
    if not (path / results.FILE_NAME if path.is_dir() else path).exists():
        raise CommandError(
            f"{name} must be a results.json of `quire bench`, or its folder, got {path}, which {lacks}; name another"
        )
    try:
        return results.load(path)
    except ValueError as error:
        raise CommandError(str(error)) from None


def write(report: "Report", folder: Path, console: "CommandConsole") -> None:
    """Write a report with its plots and pages, and print it."""
    from quire_tools.bench import html
    from quire_tools.cli import bench_print
    from quire_tools.cli.progress import print_step

    if not console.is_terminal:
        print_step("drawing the report")
    with console.status("drawing the report"):
        written = html.write(report, folder)
    bench_print.print_report(report, console)
    others = ", ".join(path.name for path in written[1:])
    console.print(f"{written[0]}, and in the same folder {others}", style="dim", soft_wrap=True)
