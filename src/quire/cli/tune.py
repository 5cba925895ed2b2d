"""`quire tune`: measure this GPU and fit a decision tree that plans then walk: once per kind of GPU, offline.

Every legal configuration is checked, then timed, on cases that span what is served; a small tree is fitted that loses least against the best of them; and it
is timed beside the default, on other cases too. The tree goes where plans look for it. A sweep that was stopped goes on where it was.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
import triton

from quire.bench.cases import Case
from quire.bench.results import commit_here
from quire.cli.bench import bar
from quire.dispatch.device import DeviceProperties, device_properties
from quire.dispatch.tree import fitted_trees
from quire.dispatch.tree_file import GENERIC, USER_TREES, load_tree, read_tree, user_folder
from quire.tuning.configs import Config, configs_of, launches
from quire.tuning.fit import explain
from quire.tuning.jobs import jobs
from quire.tuning.judge import Comparison, RecordedSession, candidates, summarize, validate
from quire.tuning.records import Records, header
from quire.tuning.sweep import MAX_SPILLS, GpuSession, sweep
from quire.tuning.train import as_json, train

EXAMPLES = """examples:
  quire tune --quick                      # some minutes; the tree is used by every plan from then on
  quire tune                              # all cases and configurations; stop it with Ctrl-C, and the next call goes on
  quire tune --output mine.json           # a tree somewhere else, which no plan uses
  quire tune --explain                    # the tree that plans use here, as text
  quire tune --explain mine.json
  quire tune --fit mine.jsonl --output mine.json   # the tree again from what was measured, without a GPU
"""
PROOF = 25  # replays


def add_parser(subparsers) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "tune", help="measure this GPU and fit a decision tree for plans", description=__doc__,
        epilog=f"{EXAMPLES}\nplans look for trees in {USER_TREES}, by what a device holds and can do, not by its name",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer cases and the usual winners only")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the tree there; a file of its own where plans look when not given",
    )
    parser.add_argument(
        "--records",
        type=Path,
        metavar="FILE",
        help="what was measured, line by line (default: beside the tree, in .jsonl)",
    )
    parser.add_argument("--commit", help="say that this commit was measured; asked of git when not given")
    parser.add_argument(
        "--fit",
        type=Path,
        metavar="RECORDS",
        help="measure nothing: fit a tree to these records and judge it by their times",
    )
    parser.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="FILE",
        help="print a tree as text and leave: that in use here, when no file is given",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.explain is not None:
        return tell_tree(args.explain)
    if args.fit and not args.output:
        print("--output must name the tree that --fit writes, got none; give a file", file=sys.stderr)
        return 2
    try:
        from rich.console import Console
    except ImportError as error:
        print(f"quire tune needs {error.name}, which is not installed; pip install 'quire[bench]'", file=sys.stderr)
        return 2
    if args.fit:
        return refit(args.fit, args.output, Console())
    if not torch.cuda.is_available():
        print(
            "quire tune must have a GPU to measure, got none; trees that were fitted elsewhere can be told with --explain",
            file=sys.stderr,
        )
        return 2
    from quire.targets import current_target

    console = Console()
    device, name = torch.device("cuda", torch.cuda.current_device()), torch.cuda.get_device_name()
    properties, chosen = device_properties(device), jobs(args.quick)
    place, folder = args.output, user_folder()
    if place is None:
        if folder is None:
            print("--output must name a file where the user has no home directory, got none; give one", file=sys.stderr)
            return 2
        place = folder / f"{'_'.join(name.lower().split())}.json"
    path = args.records or place.with_suffix(".quick.jsonl" if args.quick else ".jsonl")
    facts = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit or commit_here(),
        "date": time.strftime("%Y-%m-%d"),
    }
    try:
        records = Records.open(path, header(name, properties, args.quick, chosen, facts))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    console.print(
        f"{name}: {len(chosen)} cases; what is measured goes to {path}", style="dim", highlight=False, soft_wrap=True
    )
    try:
        begun_before = bool(records.done)
        left = [job.case for job in chosen if job.case.name not in records.done]
        out = compile_beforehand(
            [(case, configs_of(case, properties, args.quick)) for case in left],
            properties,
            current_target(),
            console,
        )
        begun = time.perf_counter()
        with bar(console) as progress:
            task = progress.add_task(
                "measuring", total=sum(len(configs_of(job.case, properties, args.quick)) for job in chosen)
            )
            sweep(
                chosen,
                records,
                properties,
                args.quick,
                GpuSession,
                out,
                lambda case, n: progress.update(task, advance=n, description=case),
            )
        console.print(
            f"measured in {time.perf_counter() - begun:.0f} s: {len(records.wrong)} wrong or ruled out",
            style="dim",
            highlight=False,
        )
        tree = train(chosen, records, properties)
        if begun_before:  # in another process, and perhaps on a machine that had compiled what this one has not
            compile_beforehand(
                [(job.case, list(candidates(job.case, records, tree, properties).values())) for job in chosen],
                properties,
                current_target(),
                console,
            )
        with bar(console) as progress:
            task = progress.add_task("proving", total=len(chosen))
            rows = validate(
                chosen,
                records,
                tree,
                properties,
                GpuSession,
                PROOF,
                lambda case, n: progress.update(task, advance=n, description=case),
            )
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on from {path}", file=sys.stderr)
        return 130
    keep(tree, rows, place, console)
    return 0


def refit(path: Path, place: Path, console) -> int:
    """Fit a tree to records alone, with no GPU."""
    try:
        records = Records.read(path)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    properties, names = records.properties, records.header["jobs"]
    chosen = [job for job in jobs(records.header["quick"]) if job.case.name in names]
    if gone := set(names) - {job.case.name for job in chosen}:
        console.print(
            f"left out, since the sweep has no such cases any more: {', '.join(sorted(gone))}", highlight=False
        )
    tree = train(chosen, records, properties)
    tree["fitted_on"] |= {"judged": "by the sweep's own times"}
    judged = [
        job
        for job in chosen
        if (found := candidates(job.case, records, tree, properties))
        and not RecordedSession(records, job.case).check(found["tuned"])
    ]
    if len(judged) < len(chosen):
        console.print(
            f"not judged, since the records lack the tree's choice: {len(chosen) - len(judged)} cases", highlight=False
        )
    keep(tree, validate(judged, records, tree, properties, partial(RecordedSession, records), 0), place, console)
    return 0


def keep(tree: dict, rows: list[Comparison], place: Path, console) -> None:
    """Write a tree with its regret, and a table beside it, and tell both."""
    tree["fitted_on"] |= {"regret": summarize(rows)}
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(as_json(tree))
    place.with_suffix(".md").write_text(markdown(rows, tree["fitted_on"]))
    tell_rows(rows, console)
    used = "plans use it from now on" if place.parent == user_folder() else "a tree that no plan uses yet"
    console.print(f"{place}: {used}", highlight=False, soft_wrap=True)


def compile_beforehand(
    wanted: list[tuple[Case, list[Config]]], properties: DeviceProperties, target, console
) -> frozenset[tuple[str, str]]:
    """Fill Triton's cache with all cores; return the (case, configuration) names that spill too much, or do not compile."""
    from quire.targets import compile_all

    begun, stands_for, out = time.perf_counter(), launches(wanted, properties), set()
    if not stands_for:
        return frozenset()
    with bar(console) as progress:
        task = progress.add_task("compiling", total=len(stands_for))
        for launch, _, compiled in compile_all(list(stands_for), target):
            hopper = any(
                kernel.kernel == "hopper_kernel" for kernel in compiled
            )  # its parts keep some numbers on the stack
            if not compiled or (not hopper and max(kernel.spills for kernel in compiled) > MAX_SPILLS):
                out |= set(stands_for[launch])
            progress.advance(task)
    words = f"{len(stands_for)} kernels compiled in {time.perf_counter() - begun:.0f} s; {len(out)} configurations of cases ruled out by what they compile to"
    console.print(words, style="dim", highlight=False)
    return frozenset(out)


def markdown(rows: list[Comparison], facts: dict) -> str:
    """Return tuned against default and best, case by case, as a Markdown table."""

    def micros(value: float | None) -> str:
        return f"{value:.1f}" if value else "–"

    lines = [
        f"# `quire tune` on {facts['device']}",
        "",
        ", ".join(f"{k} {v}" for k, v in facts.items() if not isinstance(v, dict)) + "; µs.",
        "",
    ]
    lines += ["| case | held out | choice | default | tuned | best | regret |", "| --- |" + " --- |" * 6]
    for r in rows:
        numbers = " | ".join(micros(r[name]) for name in ("default", "tuned", "best"))
        lines.append(
            f"| {r['case']} | {'yes' if r['held_out'] else ''} | {r['config']} | {numbers} | {r['regret']:.3f} |"
        )
    return "\n".join([*lines, "", *sentences(rows)]) + "\n"


def sentences(rows: list[Comparison]) -> list[str]:
    """Return what a tree is worth, in words."""
    return [
        f"{name.replace('_', ' ')}: regret {some['mean']:.3f} in geometric mean, {some['worst']:.2f} at worst; {some['over_default']:.3f} of the "
        f"default's time, whose regret is {some['default_mean']:.3f}"
        for name, some in summarize(rows).items()
    ]


def tell_rows(rows: list[Comparison], console) -> None:
    """Print tuned against default and best, case by case."""
    from rich.table import Table

    wide = console.width >= 120
    made = Table(header_style="bold")
    made.add_column("case", overflow="fold")
    for head in (*["config"] * wide, "default µs", "tuned µs", "best µs", *["tuned / default"] * wide, "regret"):
        made.add_column(head, justify="right", no_wrap=True)
    for r in sorted(rows, key=lambda r: r["held_out"]):
        numbers = [f"{r[name]:.1f}" if r[name] else "–" for name in ("default", "tuned", "best")]
        ratio = f"{r['tuned'] / r['default']:.3f}" if r["default"] else "–"
        made.add_row(
            f"{'held out: ' * r['held_out']}{r['case']}",
            *[r["config"]] * wide,
            *numbers,
            *[ratio] * wide,
            f"{r['regret']:.3f}",
        )
    console.print(made)
    for line in sentences(rows):
        console.print(line, highlight=False)


def tell_tree(file: str) -> int:
    """Print a tree as text."""
    name, tree = "generic", load_tree("generic")
    if file:
        try:
            name, tree = file, read_tree(Path(file))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    elif torch.cuda.is_available():
        found = fitted_trees(device_properties(torch.device("cuda", torch.cuda.current_device())))
        name, tree = found[0] if found else (name, tree)
    facts = ", ".join(f"{key} {value}" for key, value in tree["fitted_on"].items() if not isinstance(value, dict))
    print(f"{name}: {facts}")
    for part, some in tree["fitted_on"].get("regret", {}).items():
        print(f"regret, {part.replace('_', ' ')}: {some['mean']:.3f} in geometric mean, {some['worst']:.3f} at worst")
    if "covers" in tree:
        print(
            "serves "
            + "; ".join(", ".join(f"{k} {v}" for k, v in kind.items()) for kind in tree["covers"])
            + "; the generic tree serves the rest"
        )
    print(
        f"\nkernel of prompts, where the Hopper one serves:\n{explain(tree.get('hopper', GENERIC), '  ')}\ntile:\n{explain(tree['attention'], '  ')}",
        end="",
    )
    return 0
