"""`quire bench`: time attention on named workloads beside other libraries, correctness first, and report it.

On a GPU every case is laid out once, every library's result is held against the float64 oracle, and those that pass are timed in turn as CUDA graphs over
rotating pages. Without a GPU, or with --device, it tells what each case needs of a named device, what bounds it, and what Quire's kernels compile to there.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from quire.bench import cases as workloads
from quire.bench.cases import Case
from quire.bench.measure import NoResult, Timing, compare
from quire.bench.peers import PEERS, Peer, quire_calls, quire_with_config
from quire.bench.results import QUIRE, RangeRow, Report, Row, is_ours, load, make_row, provenance, save
from quire.bench.roofline import DATA_SHEETS, from_data_sheet, measure_ceilings
from quire.targets import TARGETS, Launch, compile_all, current_target

EXAMPLES = """examples:
  quire bench --quick                                    # a dozen cases beside every library that is installed, a minute or two
  quire bench --output results/                          # all cases: results.json, plots, report.html
  quire bench --set decode --only 32x --peers Quire,FlashInfer
  quire bench --only "decode 1x4096" --peers Quire --config block_n=128 --config block_n=32,num_stages=4
  quire bench --trace requests.csv                       # rows of prompt tokens, output tokens
  quire bench --graphs                                   # what graphs captured for a range of lengths lose
  quire bench --compare before/ after/                   # exits with 1 if anything became slower
  quire bench --report results/                          # the plots and pages of a results.json again
  quire bench --device MI300X --set decode               # no GPU: roofline, registers, spills, shared memory, occupancy
"""
TILE = (
    "block_m",
    "block_n",
    "num_warps",
    "num_stages",
    "full_tile_loop",
    "programs_per_sm",
    "waves_per_eu",
    "matrix_instr_nonkdim",
)
RANGES = ((1, 131072), (8, 32768), (32, 16384), (128, 8192))  # sequences, and the keys that a graph is captured for


def add_parser(subparsers) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "bench", help="time attention beside other libraries, and report it", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a dozen cases, measured briefly")
    parser.add_argument(
        "--set", action="append", choices=workloads.SETS, help="only this set of cases; may be repeated"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="cases from a CSV file of prompt and output tokens, instead of the named ones",
    )
    parser.add_argument(
        "--model",
        choices=workloads.MODELS,
        default="Llama-3-8B",
        metavar="NAME",
        help="whose heads --trace has (default: %(default)s)",
    )
    parser.add_argument(
        "--peers", metavar="NAMES", help="only libraries whose name begins with one of these, separated by commas"
    )
    parser.add_argument(
        "--config",
        action="append",
        type=fields,
        metavar="FIELD=N,...",
        help="also time the portable kernels with this tile; may be repeated",
    )
    parser.add_argument("--seconds", type=float, help="time each case for so long (default: 0.4, with --quick 0.15)")
    parser.add_argument(
        "--graphs", action="store_true", help="measure graphs captured for a range of lengths, instead of cases"
    )
    parser.add_argument(
        "--device", choices=DATA_SHEETS, help="measure nothing: from its data sheet and compiled kernels"
    )
    parser.add_argument("--no-compile", action="store_true", help="with --device: the roofline alone")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="where the report and its plots go (default: quire-bench)"
    )
    parser.add_argument("--commit", help="say that this commit was measured; asked of git when not given")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="A",
        help="write the report of a results.json, or its folder, again; measure nothing",
    )
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("A", "B"), help="compare two results.json, or their folders"
    )
    parser.add_argument("--list", action="store_true", help="list the cases and leave")
    parser.set_defaults(run=run)


def fields(text: str) -> dict[str, int]:
    """Read what --config is given."""
    pairs = dict(pair.split("=") for pair in text.split(","))
    if unknown := set(pairs) - set(TILE):
        raise argparse.ArgumentTypeError(f"fields must be among {', '.join(TILE)}, got {', '.join(sorted(unknown))}")
    return {name: bool(int(value)) if name == "full_tile_loop" else int(value) for name, value in pairs.items()}


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 when a comparison found something slower, or a result of Quire's was wrong or missing."""
    try:
        import matplotlib  # noqa: F401
        from rich.console import Console
    except ImportError as error:
        print(f"quire bench needs {error.name}, which is not installed; pip install 'quire[bench]'", file=sys.stderr)
        return 2
    from quire.bench import html

    console = Console()
    try:
        if args.compare:
            before, after = (load(path) for path in args.compare)
            return tell_changes(before, after, console)
        if args.report:
            found = load(args.report)
            written = html.write(found, args.output or (args.report if args.report.is_dir() else args.report.parent))
            tell(found, console)
            return tell_files(written, console)
        chosen = (
            workloads.cases_from_trace(args.trace, model=args.model)
            if args.trace
            else workloads.cases(["quick"] if args.quick else args.set, args.only)
        )
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if not chosen:
        print(f"--only must be part of a case's name, got {args.only!r}; see quire bench --list", file=sys.stderr)
        return 2
    if args.list:
        return tell_cases(chosen, console)
    if args.device or not torch.cuda.is_available():
        if args.graphs:
            print("--graphs must be measured, which needs a GPU; leave it out", file=sys.stderr)
            return 2
        if not args.device:
            console.print("no GPU here: what each case needs of an H200 (--device names another)", style="dim")
        found = analyse(chosen, args.device or "H200", not args.no_compile, args.commit, console)
    else:
        peers = list(PEERS)
        if args.peers:
            names = tuple(name.strip() for name in args.peers.split(","))
            peers = [replace(peer, slow=False) for peer in PEERS if peer.name.startswith(names)]
        own = [
            Peer(f"Quire {told_fields(some)}", "quire", partial(quire_with_config, **some), plans=True)
            for some in args.config or ()
        ]
        peers = peers[:1] + own + peers[1:]
        if not peers:
            print(
                f"--peers must begin the names of some of {', '.join(p.name for p in PEERS)}, got {args.peers!r}",
                file=sys.stderr,
            )
            return 2
        seconds = args.seconds or (0.15 if args.quick else 0.4)
        found = measure(
            [] if args.graphs else chosen,
            peers,
            seconds,
            args.graphs,
            args.commit,
            args.output or Path("quire-bench"),
            console,
        )
    written = html.write(found, args.output or Path("quire-bench"))
    tell(found, console)
    tell_files(written, console)
    wrong = [row for row in found.rows if QUIRE in row.reasons]
    for row in wrong:
        console.print(f"Quire has no time for {row.case}: {row.reasons[QUIRE]}", highlight=False)
    return 1 if wrong else 0


def tell_files(written: list[Path], console) -> int:
    """Print what was written."""
    console.print(
        f"{written[0]} and beside it {', '.join(path.name for path in written[1:])}", style="dim", soft_wrap=True
    )
    return 0


def told_fields(some: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in some.items())


def bar(console):
    """Return a progress bar that tells the time left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def launch_of(case: Case, **options) -> Launch:
    """Return the launch that Quire's plan for a case leads to."""
    return Launch(case.spec, len(case.lens), **case.bounds, page_size=case.page_size, options=tuple(options.items()))


def measure(
    cases: list[Case], peers: list[Peer], seconds: float, graphs: bool, commit: str | None, folder: Path, console
) -> Report:
    """Measure, telling each case as it is done; what there is so far is always in `results.json`."""
    absent = {peer.name: peer.why_absent() for peer in peers}
    present = [peer for peer in peers if absent[peer.name] is None]
    for name, why in absent.items():
        if why:
            console.print(f"absent: {name} ({why})", style="dim", highlight=False)
    with bar(console) as progress:
        launches = (
            {} if graphs else {launch_of(case): case for case in cases if any(p.name == "Quire" for p in present)}
        )
        task = progress.add_task("compiling", total=len(launches))
        for _ in compile_all(list(launches), current_target()) if launches else ():
            progress.advance(task)
        progress.remove_task(task)
        ceilings = measure_ceilings()
        found = Report(
            provenance=provenance(ceilings.device, commit),
            ceilings=ceilings,
            seconds=seconds,
            peers={peer.name: f"absent, {why}" if (why := absent[peer.name]) else peer.version() for peer in peers},
            rows=[],
        )
        if graphs:
            found.graph_range = list(capture_ranges(seconds, progress, console))
            return found
        task = progress.add_task("measuring", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            some = [peer for peer in present if not peer.slow or case.name in workloads.QUICK]
            why = NoResult("compiles for seconds: measured on some cases only")
            late = {peer.name: why for peer in present if peer not in some}
            try:
                found.rows.append(make_row(case, ceilings, compare(case, some, seconds) | late))
            except torch.cuda.OutOfMemoryError:
                console.print(
                    f"left out: {case.name}, for which this GPU has too little memory", style="dim", highlight=False
                )
            except KeyboardInterrupt:
                console.print(
                    f"stopped: this is the report of {len(found.rows)} of {len(cases)} cases",
                    style="bold",
                    highlight=False,
                )
                break
            else:
                save(found, folder)
                tell_row(found.rows[-1], console)
            torch.cuda.empty_cache()
            progress.advance(task)
    return found


def capture_ranges(seconds: float, progress, console) -> Iterator[RangeRow]:
    """Measure graphs captured for a range of lengths, at lengths in it, beside graphs for these lengths alone."""
    steps = [
        (n, bound, length) for n, bound in RANGES for length in (128 << i for i in range(0, 11, 2)) if length <= bound
    ]
    task = progress.add_task("graphs", total=len(steps))
    for num_seqs, bound, length in steps:
        case = workloads.decode(num_seqs, length)

        def for_the_range(inputs, out, bound=bound):
            return quire_calls(inputs, out, max_seq_len=bound)

        results = compare(
            case, [Peer("own", "quire", quire_calls), Peer("range", "quire", for_the_range)], seconds, table_len=bound
        )
        own, ranged = results["own"], results["range"]
        if not (isinstance(own, Timing) and isinstance(ranged, Timing)):
            raise RuntimeError(f"{case.name} must be right to be timed, got {results}; run quire check")
        row = RangeRow(num_seqs, bound, length, ranged.micros, own.micros)
        console.print(
            f"{case.name}: captured for {bound:,} keys {row.micros:.1f} µs, for these {row.own_micros:.1f}",
            highlight=False,
        )
        progress.advance(task)
        torch.cuda.empty_cache()
        yield row


def analyse(cases: list[Case], device: str, compiled: bool, commit: str | None, console) -> Report:
    """Tell what each case needs of a device that is not here, and what Quire's kernels compile to for it."""
    ceilings, target = from_data_sheet(device), TARGETS[DATA_SHEETS[device][0]]
    rows = [make_row(case, ceilings, {}) for case in cases]
    peers = {QUIRE: "not measured: compiled"}
    found = Report(provenance=provenance(device, commit), ceilings=ceilings, peers=peers, rows=rows)
    if not compiled:
        return found
    launches: dict[Launch, list[int]] = {}
    for i, case in enumerate(cases):
        launches.setdefault(launch_of(case), []).append(i)
    with bar(console) as progress:
        task = progress.add_task(f"compiling for {target.name}", total=len(launches))
        for launch, words, kernels in compile_all(list(launches), target):
            for i in launches[launch]:
                plan, why = (words, None) if kernels else (None, words)
                rows[i] = replace(rows[i], compiled=kernels, plan=plan, why=why)
            progress.advance(task)
    return found


def tell_cases(cases: list[Case], console) -> int:
    """Print the cases."""
    for case in cases:
        spec = case.spec
        heads = f"{spec.num_q_heads}/{spec.num_kv_heads}/{spec.head_dim}"
        words = f"{len(case.lens)} sequences, {case.num_tokens} queries, {heads}, {case.nbytes / 1e6:.1f} MB, {case.flops / 1e9:.1f} GFLOP"
        console.print(f"{case.name:44} {words}", highlight=False, markup=False, soft_wrap=True)
    return 0


def tell_row(row: Row, console) -> None:
    """Print a case as one line: the times of all that have one."""
    times = "  ".join(f"{name} {row.times[name]:.1f}" if name in row.times else f"{name} –" for name in row.results)
    console.print(f"{row.case:34} floor {row.floor_micros:.1f}  {times}", highlight=False, markup=False, soft_wrap=True)


def tell(found: Report, console) -> None:
    """Print the tables and the summary."""
    from quire.bench import report
    from quire.bench.tables import to_rich

    rows = found.rows
    if report.was_compiled(found):
        title = f"{found.provenance.device}, from its data sheet and compiled kernels"
        console.print(to_rich(report.compiled_table(rows), title, console))
    elif report.peers_in(rows):
        console.print(to_rich(report.times_table(rows), "µs", console))
        console.print(to_rich(report.detail_table(rows), "Quire in detail", console))
    elif rows:
        console.print(to_rich(report.detail_table(rows), "needs", console))
    if found.graph_range:
        table = report.range_table(found.graph_range)
        console.print(to_rich(table, "graphs captured for a range of lengths", console))
        console.print(report.describe_ranges(found.graph_range), highlight=False)
    summary = report.summary_table(rows)
    if summary.rows:
        console.print(to_rich(summary, "geometric means, over how many cases", console))
    console.print(report.describe_run(found), highlight=False, style="dim")


def tell_changes(before: Report, after: Report, console) -> int:
    """Print what changed between two runs by more than their noise; the exit code is 1 if something of Quire's became slower or was lost."""
    import statistics

    from quire.bench import report
    from quire.bench.tables import to_rich

    found = report.changes(before, after)
    for name in ("device", "driver", "torch", "triton"):
        a, b = getattr(before.provenance, name), getattr(after.provenance, name)
        if a != b:
            console.print(f"the runs differ in {name}: {a} and {b}", style="bold")
    ours = [change for change in found if is_ours(change.peer)]
    table = report.changes_table(ours)
    if table.rows:
        console.print(to_rich(table, "changes", console))
    counts = Counter(change.verdict for change in ours)
    words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("slower", "lost", "faster", "same"))
    console.print(f"{words} (beyond the noise of both runs)")
    others = [change.ratio for change in found if change.ratio is not None and not is_ours(change.peer)]
    if others:
        mean = statistics.geometric_mean(others)
        console.print(
            f"other libraries on the same cases: {mean:.3f} of their time before, which is what the machine did"
        )
    if not ours:
        print("A and B must share cases that Quire was timed on, got none; run the same sets", file=sys.stderr)
        return 2
    return 1 if counts["slower"] or counts["lost"] else 0
