"""Measure, or analyse, the cases of `quire bench` with a progress bar."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from quire.targets import TARGETS, Launch, Target, card_here, compile_all, current_target
from quire_tools.bench import cases as workloads
from quire_tools.bench.case import Case
from quire_tools.bench.ceilings import measure_ceilings
from quire_tools.bench.measure import NoResult, Peer, Timing, compare, describe_error
from quire_tools.bench.peers import PEERS, quire_calls
from quire_tools.bench.results import FILE_NAME, QUIRE, Grid, RangeRow, Report, Row, make_row, provenance, save
from quire_tools.bench.roofline import DATA_SHEETS, Ceilings, from_data_sheet
from quire_tools.cli.bench_print import print_row
from quire_tools.cli.progress import progress_bar

GRAPH_RANGES = ((1, 131072), (8, 32768), (32, 16384), (128, 8192))  # sequences, and keys that a graph is captured for
GRAPH_LENGTHS = tuple(128 << i for i in range(0, 11, 2))  # keys at which it is replayed
RANGE_STEPS = tuple((n, bound, length) for n, bound in GRAPH_RANGES for length in GRAPH_LENGTHS if length <= bound)
READY_SECONDS = 15.0  # in which a library is ready to be timed, a kernel or two compiled
MAX_SPENT = 240.0  # seconds of longer compilations of a library, in all
SLOW = NoResult("compiles for seconds: measured on some cases only")


def measure(
    cases: Sequence[Case],
    peers: Sequence[Peer],
    seconds: float,
    commit: str | None,
    folder: Path,
    console: Console,
    grid: Grid | None = None,
    earlier: Sequence[Row] = (),
) -> Report:
    """Measure cases on this GPU, and print each when it is done.

    An interrupt keeps the cases that were measured, and so does an error after which no case can be measured.

    Args:
        cases: the batches.
        peers: the libraries; those that are absent are left out.
        seconds: how long each case is measured.
        commit: the commit that is measured, if the caller knows it.
        folder: `results.json` there is always what was measured so far.
        console: to print on.
        grid: which cases were drawn at random; None where they were not.
        earlier: the rows of a run that this one continues.
    """
    card = card_here()
    if card is not None:
        torch.backends.cuda.enable_cudnn_sdp(False)  # its engines are for Hopper GPUs; SDPA's other kernels are not
    absent = why_absent(peers, console, card)
    present = [peer for peer in peers if peer.name not in absent]
    with progress_bar(console) as progress:
        compile_kernels(cases, present, progress)
        ceilings = measure_ceilings()
        report = empty_report(ceilings, peers, absent, seconds, commit)
        report.grid, total = grid, len(earlier) + len(cases)
        report.rows.extend(earlier)
        patience = None if grid is None else Patience()
        task = progress.add_task("measuring", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            try:
                row = measure_case(case, present, seconds, ceilings, patience)
            except torch.cuda.OutOfMemoryError:
                words = f"left out: {case.name}, for which this GPU has too little memory"
                console.print(words, style="dim", highlight=False)
            except RuntimeError as error:
                why = describe_error(error)
                console.print(f"{case.name}: {why}", style="bold", highlight=False, markup=False, soft_wrap=True)
                if not is_usable():
                    report.stopped = f"{case.name}: {why}"
                    say_stopped(len(report.rows), total, folder, console)
                    break
                report.rows.append(make_row(case, ceilings, {peer.name: NoResult(why) for peer in present}))
            except KeyboardInterrupt:
                say_stopped(len(report.rows), total, folder, console)
                raise
            else:
                report.rows.append(row)
                save(report, folder)
                print_row(row, console)
            torch.cuda.empty_cache()
            progress.advance(task)
    return report


def is_usable() -> bool:
    """Whether this process can still use the GPU; after an illegal access it cannot."""
    try:
        torch.cuda.synchronize()
    except Exception:  # torch raises several kinds
        return False
    return True


def say_stopped(done: int, total: int, folder: Path, console: Console) -> None:
    """Print what an interrupted run has kept, and how to make a report of it."""
    words = f"stopped after {done} of {total}"
    if done:
        words += f"; they are in {folder / FILE_NAME}, and quire bench report {folder} makes the report"
    console.print(words, style="bold", highlight=False, markup=False, soft_wrap=True)


def why_absent(peers: Sequence[Peer], console: Console, card: str | None) -> dict[str, str]:
    """Return why some of the libraries cannot be used here, by name, and print it; `card` as for `Peer.why_absent`."""
    reasons = {peer.name: why for peer in peers if (why := peer.why_absent(card))}
    for name, why in reasons.items():
        console.print(f"absent: {name} ({why})", style="dim", highlight=False, markup=False)
    return reasons


def empty_report(
    ceilings: Ceilings, peers: Sequence[Peer], absent: dict[str, str], seconds: float, commit: str | None
) -> Report:
    """Return the report of a run that has measured no case yet."""
    states = {peer.name: f"absent, {absent[peer.name]}" if peer.name in absent else peer.version() for peer in peers}
    return Report(
        provenance=provenance(ceilings.device, commit, card_here()),
        ceilings=ceilings,
        seconds=seconds,
        peers=states,
        rows=[],
    )


def compile_kernels(cases: Sequence[Case], peers: Sequence[Peer], progress: Progress) -> None:
    """Fill Triton's cache for what Quire and its variants launch, with all cores."""
    launches = list(
        dict.fromkeys(
            replace(launch_of(case), options=tuple(options.items()))
            for peer in peers
            if (options := options_of(peer)) is not None
            for case in cases
            if case.layout in peer.serves
        )
    )
    if not launches:
        return
    task = progress.add_task("compiling", total=len(launches))
    for _ in compile_all(launches, current_target()):
        progress.advance(task)
    progress.remove_task(task)


def options_of(peer: Peer) -> dict[str, Any] | None:
    """Return the options of `quire.plan` that a variant of Quire has; None for other peers."""
    if peer.adapter is quire_calls:
        return {}
    adapter = peer.adapter
    return adapter.keywords if isinstance(adapter, partial) and adapter.func is quire_calls else None


def launch_of(case: Case) -> Launch:
    """Return the launch that Quire's plan for a case leads to."""
    return Launch(
        case.spec,
        len(case.lens),
        **case.bounds,
        page_size=case.page_size,
        packed=case.packed,
        width=0 if case.pool is None else case.bounds["max_seq_len"],
        layout=case.cache_layout,
    )


def measure_case(
    case: Case, peers: Sequence[Peer], seconds: float, ceilings: Ceilings, patience: "Patience | None" = None
) -> Row:
    """Measure a case with the libraries; those that compile for long only where the case is one of --quick."""
    serving = [peer for peer in peers if case.layout in peer.serves]
    chosen = [peer for peer in serving if not peer.slow or case.name in workloads.QUICK]
    left_out = {peer.name: SLOW for peer in serving if peer not in chosen}
    if patience is None:
        return make_row(case, ceilings, compare(case, chosen, seconds) | left_out)
    left_out |= {peer.name: NoResult(why) for peer in chosen if (why := patience.exhausted(peer, case))}
    chosen = [peer for peer in chosen if peer.name not in left_out]
    taken: dict[str, float] = {}
    results = compare(case, chosen, seconds, taken=taken)
    patience.count(case, taken)
    return make_row(case, ceilings, results | left_out)


class Patience:
    """Leaves a library out of further widths once it has compiled for too long.

    Some libraries compile for minutes where heads have a width that they do not ship. Quire's kernels are compiled
    beforehand, with all cores.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)  # seconds, by library
        self.known: set[tuple[str, int, int]] = set()  # library, head_dim, head_dim_v

    def exhausted(self, peer: Peer, case: Case) -> str | None:
        """Return why a library is left out of a case; None where it is not."""
        if peer.name == QUIRE or self.spent[peer.name] < MAX_SPENT or self.key(peer.name, case) in self.known:
            return None
        return f"took {MAX_SPENT:.0f} s or more to be ready, in all: left out of further widths"

    def count(self, case: Case, taken: Mapping[str, float]) -> None:
        """Note how many seconds libraries took until they could be timed on a case."""
        for name, seconds in taken.items():
            if seconds > READY_SECONDS:
                self.spent[name] += seconds
            self.known.add(self.key(name, case))

    @staticmethod
    def key(name: str, case: Case) -> tuple[str, int, int]:
        """Return the widths for which a library compiles at least once."""
        return name, case.spec.head_dim, case.spec.head_dim_v


def measure_ranges(seconds: float, commit: str | None, folder: Path, console: Console) -> Report:
    """Measure what graphs captured for a range of lengths lose on this GPU, against graphs for each length.

    An interrupt keeps the lengths that were measured.
    """
    with progress_bar(console) as progress:
        report = empty_report(measure_ceilings(), PEERS[:1], {}, seconds, commit)
        try:
            for row in capture_ranges(seconds, progress, console):
                report.graph_range.append(row)
                save(report, folder)
        except KeyboardInterrupt:
            say_stopped(len(report.graph_range), len(RANGE_STEPS), folder, console)
            raise
    return report


def capture_ranges(seconds: float, progress: Progress, console: Console) -> Iterator[RangeRow]:
    """Measure graphs captured for a range of lengths at lengths within it, and print each."""
    task = progress.add_task("graphs", total=len(RANGE_STEPS))
    for num_seqs, bound, length in RANGE_STEPS:
        case = workloads.decode(num_seqs, length)
        own = Peer("own", "quire", quire_calls)
        ranged = Peer("range", "quire", partial(quire_calls, max_seq_len=bound))
        results = compare(case, [own, ranged], seconds, table_len=bound)
        own_result, range_result = results["own"], results["range"]
        if not (isinstance(own_result, Timing) and isinstance(range_result, Timing)):
            raise RuntimeError(f"{case.name} must be right to be timed, got {results}; run quire check")
        row = RangeRow(num_seqs, bound, length, range_result.micros, own_result.micros)
        words = f"captured for {bound:,} keys {row.micros:.1f} µs, for these {row.own_micros:.1f}"
        console.print(f"{case.name}: {words}", highlight=False)
        progress.advance(task)
        torch.cuda.empty_cache()
        yield row


def analyse(
    cases: Sequence[Case],
    device: str,
    card: str | None,
    is_compiled: bool,
    commit: str | None,
    folder: Path,
    console: Console,
) -> Report:
    """Return what each case needs of a device that is not here, and what Quire's kernels compile to for it.

    An interrupt keeps what was compiled.

    Args:
        cases: the batches.
        device: a key of DATA_SHEETS.
        card: an older card whose code the device runs; None where it runs its own.
        is_compiled: whether kernels are compiled.
        commit: the commit that is compiled, if the caller knows it.
        folder: where `results.json` goes if the run is interrupted.
        console: for the progress bar.

    Raises:
        ValueError: the device does not run that card's code.
    """
    ceilings, target = from_data_sheet(device), target_of(device, card)
    report = Report(
        provenance=provenance(device, commit, card),
        ceilings=ceilings,
        peers={QUIRE: "not measured: compiled"},
        rows=[make_row(case, ceilings, {}) for case in cases],
    )
    if is_compiled:
        try:
            add_kernels(report.rows, cases, target, console)
        except KeyboardInterrupt:
            done = sum(row.plan is not None or row.why is not None for row in report.rows)
            if done:
                save(report, folder)
            say_stopped(done, len(cases), folder, console)
            raise
    return report


def target_of(device: str, card: str | None) -> Target:
    """Return the target of a key of DATA_SHEETS; as it runs an older card's code, where one is named.

    Raises:
        ValueError: the device does not run that card's code.
    """
    name, bytes_per_second, _ = DATA_SHEETS[device]
    target = replace(TARGETS[name], memory_gbps=round(bytes_per_second / 1e9))
    return target if card is None else target.running(card, "--as")


def add_kernels(rows: list[Row], cases: Sequence[Case], target: Target, console: Console) -> None:
    """Compile the cases for a target, and put the resources of the compiled kernels into their rows."""
    rows_of: dict[Launch, list[int]] = {}
    for i, case in enumerate(cases):
        rows_of.setdefault(launch_of(case), []).append(i)
    with progress_bar(console) as progress:
        task = progress.add_task(f"compiling for {target.name}", total=len(rows_of))
        for launch, words, kernels in compile_all(list(rows_of), target):
            plan, why = (words, None) if kernels else (None, words)
            for i in rows_of[launch]:
                rows[i] = replace(rows[i], compiled=kernels, plan=plan, why=why)
            progress.advance(task)
