"""Measure this GPU for `quire tune`, or read earlier records; fit a tree, judge it, and write it."""

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console

from quire.cli.arguments import CommandError
from quire.cli.exit_codes import INTERRUPTED
from quire.dispatch.device import DeviceProperties, device_properties
from quire.dispatch.tree_file import user_folder
from quire.targets import Target, compile_all, current_target, title_here
from quire.version import commit as commit_here
from quire_tools.bench.case import Case
from quire_tools.cli.progress import progress_bar
from quire_tools.cli.tune_print import print_rows, to_markdown
from quire_tools.tuning.configs import Config, configs_of, launches
from quire_tools.tuning.jobs import Job, jobs
from quire_tools.tuning.judge import Comparison, RecordedSession, candidates, summarize, validate
from quire_tools.tuning.records import Records, header
from quire_tools.tuning.sweep import MAX_SPILLS, GpuSession, sweep
from quire_tools.tuning.train import as_json, train

JUDGE_REPLAYS = 25  # of the tree's choice, of the default's and of the best


def tune_here(tree_path: Path, records_path: Path, quick: bool, commit: str | None, console: Console) -> int:
    """Measure this GPU, fit a tree and write it; return the exit code."""
    name, chosen = title_here(), jobs(quick)
    properties = device_properties(torch.device("cuda", torch.cuda.current_device()))
    try:
        records = Records.open(records_path, header(name, properties, quick, chosen, provenance(commit)))
    except ValueError as error:
        raise CommandError(str(error)) from None
    words = f"{name}: {len(chosen)} cases; what is measured goes to {records_path}"
    console.print(words, style="dim", highlight=False, soft_wrap=True)
    continues = bool(records.done)
    try:
        measure(chosen, records, properties, quick, console)
        with console.status("fitting the tree"):
            tree = train(chosen, records, properties)
        if continues:  # the first cases were measured in another process, perhaps where other kernels were compiled
            wanted = [(job.case, list(candidates(job.case, records, tree, properties).values())) for job in chosen]
            compile_beforehand(wanted, properties, current_target(), console)
        rows = judge(chosen, records, tree, properties, console)
    except KeyboardInterrupt:
        print(f"stopped; the same command continues from {records_path}", file=sys.stderr)
        return INTERRUPTED
    save(tree, rows, tree_path, console)
    return 0


def provenance(commit: str | None) -> dict[str, str]:
    """Return the provenance of the times."""
    return {
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or commit_here(),
        "date": time.strftime("%Y-%m-%d"),
    }


def measure(
    chosen: Sequence[Job], records: Records, properties: DeviceProperties, quick: bool, console: Console
) -> None:
    """Compile and measure everything that the records lack."""
    remaining = [job.case for job in chosen if job.case.name not in records.done]
    wanted = [(case, configs_of(case, properties, quick)) for case in remaining]
    ruled_out = compile_beforehand(wanted, properties, current_target(), console)
    begun = time.perf_counter()
    with progress_bar(console) as progress:
        total = sum(len(configs_of(job.case, properties, quick)) for job in chosen)
        task = progress.add_task("measuring", total=total)

        def advance(case: str, count: int) -> None:
            progress.update(task, advance=count, description=case)

        sweep(chosen, records, properties, quick, GpuSession, ruled_out, advance)
    words = f"measured in {time.perf_counter() - begun:.0f} s: {len(records.wrong)} wrong or ruled out"
    console.print(words, style="dim", highlight=False)


def compile_beforehand(
    wanted: Sequence[tuple[Case, Sequence[Config]]], properties: DeviceProperties, target: Target, console: Console
) -> frozenset[tuple[str, str]]:
    """Fill Triton's cache with all cores.

    Returns:
        The (case, configuration) names that spill too much, or do not compile.
    """
    begun, stands_for = time.perf_counter(), launches(wanted, properties)
    ruled_out: set[tuple[str, str]] = set()
    if not stands_for:
        return frozenset()
    with progress_bar(console) as progress:
        task = progress.add_task("compiling", total=len(stands_for))
        for launch, _, compiled in compile_all(list(stands_for), target):
            is_hopper = any(kernel.kernel == "hopper_kernel" for kernel in compiled)  # its warps keep some on the stack
            if not compiled or (not is_hopper and max(kernel.spills for kernel in compiled) > MAX_SPILLS):
                ruled_out |= set(stands_for[launch])
            progress.advance(task)
    words = f"{len(stands_for)} kernels compiled in {time.perf_counter() - begun:.0f} s"
    words += f"; {len(ruled_out)} configurations of cases ruled out by what they compile to"
    console.print(words, style="dim", highlight=False)
    return frozenset(ruled_out)


def judge(
    chosen: Sequence[Job], records: Records, tree: dict[str, Any], properties: DeviceProperties, console: Console
) -> list[Comparison]:
    """Time the choices of a tree, of the default and of the best, case by case."""
    with progress_bar(console) as progress:
        task = progress.add_task("judging", total=len(chosen))

        def advance(case: str, count: int) -> None:
            progress.update(task, advance=count, description=case)

        return validate(chosen, records, tree, properties, GpuSession, JUDGE_REPLAYS, advance)


def fit_again(records_path: Path, tree_path: Path, console: Console) -> None:
    """Fit a tree to the records of a sweep, without a GPU, and judge it by the sweep's own times."""
    if not records_path.exists():
        raise CommandError(
            f"--fit must be a .jsonl file that `quire tune` wrote, got {records_path}, which is not there"
        )
    try:
        records = Records.read(records_path)
    except ValueError as error:
        raise CommandError(f"--fit {error}") from None
    chosen = jobs_of(records, console)
    try:
        with console.status("fitting the tree"):
            tree = train(chosen, records, records.properties)
    except ValueError as error:
        raise CommandError(f"--fit {records_path} must hold enough times to fit a tree: {error}") from None
    tree["fitted_on"] |= {"judged": "by the sweep's own times"}
    judged = [job for job in chosen if is_recorded(job, records, tree)]
    if len(judged) < len(chosen):
        count = len(chosen) - len(judged)
        console.print(f"not judged, since the records lack the tree's choice: {count} cases", highlight=False)
    rows = validate(judged, records, tree, records.properties, partial(RecordedSession, records), 0)
    save(tree, rows, tree_path, console)


def jobs_of(records: Records, console: Console) -> list[Job]:
    """Return the cases of some records, and print those that no sweep has any more."""
    names = set(records.header["jobs"])
    chosen = [job for job in jobs(records.header["quick"]) if job.case.name in names]
    if gone := names - {job.case.name for job in chosen}:
        console.print(f"left out, since no sweep has these cases any more: {', '.join(sorted(gone))}", highlight=False)
    return chosen


def is_recorded(job: Job, records: Records, tree: dict[str, Any]) -> bool:
    """Whether records have a time of a tree's choice for a case."""
    found = candidates(job.case, records, tree, records.properties)
    return bool(found) and RecordedSession(records, job.case).check(found["tuned"]) is None


def save(tree: dict[str, Any], rows: Sequence[Comparison], path: Path, console: Console) -> None:
    """Write a tree with its regret, and a Markdown table next to it; print the table."""
    tree["fitted_on"] |= {"regret": summarize(rows)}
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(as_json(tree), encoding="utf-8")
    partial.replace(path)
    path.with_suffix(".md").write_text(to_markdown(rows, tree["fitted_on"]), encoding="utf-8")
    print_rows(rows, console)
    folder = user_folder()
    is_used = folder is not None and path.resolve().parent == folder.resolve() and path.suffix == ".json"
    words = "plans use it from now on" if is_used else "a tree that no plan uses yet"
    console.print(f"{path}: {words}", highlight=False, soft_wrap=True)
