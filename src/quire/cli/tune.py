"""`quire tune`: measure this GPU and fit a decision tree that plans then walk: once per kind of GPU, offline.

Every legal configuration is checked, then timed, on cases that span what is served; a small tree is fitted that loses least against the best of them; and it
is timed beside the default, on other cases too. The tree goes where plans look for it. A sweep that was stopped goes on where it was.
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import triton

from quire.bench.cases import Case
from quire.bench.results import commit_here
from quire.cli.bench import bar
from quire.dispatch import tree as select
from quire.dispatch.device import DeviceProperties, device_properties
from quire.dispatch.tree import GENERIC, load_tree, walk
from quire.tuning.fit import Measured, covered, explain, fit_tree, regrets, with_leaves, within_what_was_seen
from quire.tuning.sweep import (
    HOPPER,
    MOST_SPILLS,
    Config,
    Job,
    OnGpu,
    Records,
    Remembered,
    candidates,
    configurations,
    default,
    features,
    header,
    jobs,
    key_of,
    launches,
    read_lines,
    sweep,
    validate,
)

EXAMPLES = """examples:
  quire tune --quick                      # some minutes; the tree is used by every plan from then on
  quire tune                              # all cases and configurations; stop it with Ctrl-C, and the next call goes on
  quire tune --output mine.json           # a tree somewhere else, which no plan uses
  quire tune --explain                    # the tree that plans use here, as text
  quire tune --explain mine.json
  quire tune --fit mine.jsonl --output mine.json   # the tree again from what was measured, without a GPU
"""
PROOF = 25  # replays
PORTABLE = "portable"
KERNEL_LEVELS = 3
SELDOM = 0.1  # of the weight of others


def add_parser(subparsers) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "tune", help="measure this GPU and fit a decision tree for plans", description=__doc__,
        epilog=f"{EXAMPLES}\nplans look for trees in {select.USER_TREES}, by what a device holds and can do, not by its name",
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
    place = args.output or select.USER_TREES / f"{'_'.join(name.lower().split())}.json"
    path = args.records or place.with_suffix(".quick.jsonl" if args.quick else ".jsonl")
    facts = {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": args.commit or commit_here(),
        "date": time.strftime("%Y-%m-%d"),
    }
    try:
        records = Records(path, header(name, properties, args.quick, chosen, facts))
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
            [(case, configurations(case, properties, args.quick)) for case in left],
            properties,
            current_target(),
            console,
        )
        begun = time.perf_counter()
        with bar(console) as progress:
            task = progress.add_task(
                "measuring", total=sum(len(configurations(job.case, properties, args.quick)) for job in chosen)
            )
            sweep(
                chosen,
                records,
                properties,
                args.quick,
                OnGpu,
                out,
                lambda case, n: progress.update(task, advance=n, description=case),
            )
        console.print(
            f"measured in {time.perf_counter() - begun:.0f} s: {len(records.wrong)} wrong or ruled out",
            style="dim",
            highlight=False,
        )
        tree = fitted(chosen, records, properties)
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
                OnGpu,
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
    lines = read_lines(path) if path.exists() else []
    if not lines or not {"properties", "jobs", "quick"} <= lines[0].keys():
        print(
            f"--fit must name the records of a sweep, got {path}; they lie beside the tree that quire tune wrote, in .jsonl",
            file=sys.stderr,
        )
        return 2
    try:
        records, properties = Records.reread(lines), DeviceProperties(**lines[0]["properties"])
    except TypeError as error:
        print(f"--fit must have records that this version knows, got {path}: {error}; sweep again", file=sys.stderr)
        return 2
    chosen = [job for job in jobs(lines[0]["quick"]) if job.case.name in lines[0]["jobs"]]
    if gone := set(lines[0]["jobs"]) - {job.case.name for job in chosen}:
        console.print(
            f"left out, since the sweep has no such cases any more: {', '.join(sorted(gone))}", highlight=False
        )
    tree = fitted(chosen, records, properties)
    tree["fitted_on"] |= {"judged": "by the sweep's own times"}
    judged = [
        job
        for job in chosen
        if (found := candidates(job.case, records, tree, properties))
        and not Remembered(records, job.case).check(found["tuned"])
    ]
    if len(judged) < len(chosen):
        console.print(
            f"not judged, since the records lack the tree's choice: {len(chosen) - len(judged)} cases", highlight=False
        )
    keep(tree, validate(judged, records, tree, properties, partial(Remembered, records), 0), place, console)
    return 0


def keep(tree: dict, rows: list[dict], place: Path, console) -> None:
    """Write a tree with its regret, and a table beside it, and tell both."""
    tree["fitted_on"] |= {"regret": summed_up(rows)}
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(written(tree))
    place.with_suffix(".md").write_text(markdown(rows, tree["fitted_on"]))
    tell_rows(rows, console)
    used = "plans use it from now on" if place.parent == select.USER_TREES else "a tree that no plan uses yet"
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
            if not compiled or (not hopper and max(kernel.spills for kernel in compiled) > MOST_SPILLS):
                out |= set(stands_for[launch])
            progress.advance(task)
    words = f"{len(stands_for)} kernels compiled in {time.perf_counter() - begun:.0f} s; {len(out)} configurations of cases ruled out by what they compile to"
    console.print(words, style="dim", highlight=False)
    return frozenset(out)


def tile_rows(
    chosen: list[Job], records: Records, properties: DeviceProperties, kernels: list | str = GENERIC
) -> list[Measured]:
    """Return what was measured of tiles, as `fit_tree` takes it. Where `kernels` (a tree) has the Hopper kernel, a tile serves only caches that the copy
    engine cannot address, and its regret counts less.
    """
    rows = []
    for job in chosen:
        times = records.last(job.case.name)
        fast = times.pop(HOPPER, None)
        seen, generic = features(job.case, properties), key_of(default(job.case, properties).leaf)
        if generic in times:
            times[GENERIC] = times[generic]
        rows.append(Measured(seen, times, SELDOM if fast and kernel_of(kernels, seen) == HOPPER else 1.0))
    return rows


def kernel_rows(
    chosen: list[Job], records: Records, properties: DeviceProperties, tiles: list | str | None = None
) -> list[Measured]:
    """Return what was measured of the Hopper kernel, against the best tile, or against that which `tiles` (a tree) chooses."""
    rows = []
    for job, row in zip(chosen, tile_rows(chosen, records, properties), strict=True):
        fast = records.last(job.case.name).get(HOPPER)
        if fast is not None:
            best = min(row.times.values())
            times = {PORTABLE: best if tiles is None else row.times.get(walk(tiles, row.features), best), HOPPER: fast}
            rows.append(Measured(row.features, times | {GENERIC: times[kernel_of(GENERIC, row.features)]}))
    return rows


def kernel_of(tree: list | str, seen: dict[str, float]) -> str:
    """Return the kernel that a tree of kernels chooses, or the generic one where it leaves it to that."""
    leaf = walk(tree, seen)
    return leaf if leaf != GENERIC else HOPPER if walk(load_tree(GENERIC)["hopper"], seen) else PORTABLE


def fitted(chosen: list[Job], records: Records, properties: DeviceProperties) -> dict:
    """Return the tree that fits the records, with its provenance, as plans read it."""
    measured = [job for job in chosen if records.last(job.case.name).keys() - {HOPPER}]
    train = [job for job in measured if not job.held_out]
    choices = kernel_rows(train, records, properties)
    rows = tile_rows(train, records, properties, fit_tree(choices, KERNEL_LEVELS) if choices else GENERIC)
    tiles = within_what_was_seen(fit_tree(rows), rows)
    choices = choices and kernel_rows(train, records, properties, tiles)
    kernels = within_what_was_seen(fit_tree(choices, KERNEL_LEVELS), choices, KERNEL_LEVELS) if choices else GENERIC
    kept = {
        key: records.header[key]
        for key in ("device", "torch", "triton", "commit", "date", "quick")
        if key in records.header
    }
    facts = kept | {"cases": len(train), "held_out": len(measured) - len(train), "tiles_alone": regrets(rows, tiles)}
    return {
        "fitted_on": facts, "properties": records.header["properties"], "covers": covered(rows), "attention": with_leaves(tiles, records.leaves | {GENERIC: GENERIC}),
        "hopper": with_leaves(kernels, {HOPPER: True, PORTABLE: False, GENERIC: GENERIC}),
    }  # fmt: skip


def summed_up(rows: list[dict]) -> dict:
    """Return geometric means and worst cases: of the tree's regret on the cases it was fitted to and on others, and of its time over the default's."""
    found = {}
    for name, some in (
        ("training", [r for r in rows if not r["held_out"]]),
        ("held_out", [r for r in rows if r["held_out"]]),
    ):
        if some:
            over = [r["tuned"] / r["default"] for r in some if r["default"]]
            each = [r["regret"] for r in some]
            found[name] = {"mean": round(statistics.geometric_mean(each), 4), "worst": round(max(each), 4)}
            found[name] |= {
                "over_default": round(statistics.geometric_mean(over), 4),
                "default_mean": round(default_regret(some), 4),
            }
    return found


def default_regret(rows: list[dict]) -> float:
    """Return the regret of the default, in geometric mean."""
    return statistics.geometric_mean(
        r["default"] / min(r["default"], r["tuned"], r["best"] or r["tuned"]) for r in rows if r["default"]
    )


def written(tree: dict) -> str:
    """Return a tree as JSON with a line for each part and node."""

    def node(part, indent: str) -> str:
        if not isinstance(part, list):
            return json.dumps(part)
        inner = indent + "  "
        return f"[{json.dumps(part[0])}, {part[1]},\n{inner}{node(part[2], inner)},\n{inner}{node(part[3], inner)}]"

    lines = [
        f'  "{name}": {node(part, "  ") if name in ("attention", "hopper") else json.dumps(part)}'
        for name, part in tree.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def markdown(rows: list[dict], facts: dict) -> str:
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
            f"| {r['case']} | {'yes' if r['held_out'] else ''} | {r['tile']} | {numbers} | {r['regret']:.3f} |"
        )
    return "\n".join([*lines, "", *sentences(rows)]) + "\n"


def sentences(rows: list[dict]) -> list[str]:
    """Return what a tree is worth, in words."""
    return [
        f"{name.replace('_', ' ')}: regret {some['mean']:.3f} in geometric mean, {some['worst']:.2f} at worst; {some['over_default']:.3f} of the "
        f"default's time, whose regret is {some['default_mean']:.3f}"
        for name, some in summed_up(rows).items()
    ]


def tell_rows(rows: list[dict], console) -> None:
    """Print tuned against default and best, case by case."""
    from rich.table import Table

    wide = console.width >= 120
    made = Table(header_style="bold")
    made.add_column("case", overflow="fold")
    for head in (*["tile"] * wide, "default µs", "tuned µs", "best µs", *["tuned / default"] * wide, "regret"):
        made.add_column(head, justify="right", no_wrap=True)
    for r in sorted(rows, key=lambda r: r["held_out"]):
        numbers = [f"{r[name]:.1f}" if r[name] else "–" for name in ("default", "tuned", "best")]
        ratio = f"{r['tuned'] / r['default']:.3f}" if r["default"] else "–"
        made.add_row(
            f"{'held out: ' * r['held_out']}{r['case']}",
            *[r["tile"]] * wide,
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
            name, tree = file, json.loads(Path(file).read_text())
            tree["attention"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(
                f"--explain must name a tree that `quire tune` wrote, got {file!r}: {type(error).__name__} {error}",
                file=sys.stderr,
            )
            return 2
    elif torch.cuda.is_available():
        found = select.fitted_trees(device_properties(torch.device("cuda", torch.cuda.current_device())))
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
