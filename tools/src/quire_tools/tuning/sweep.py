"""Measure every legal configuration on every case, fewer of them for longer in each round.

Each number is recorded at once. A case begins with all configurations that are legal for it. Those whose results are
wrong are left out before anything is timed. The rest are timed in rounds (successive halving): after each round those
that cannot win are dropped, and the next round measures longer. The generic tree's choice stays to the end, so that a
tree can be compared with it.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from quire.dispatch.device import DeviceProperties
from quire_tools.bench.case import Case
from quire_tools.bench.inputs import Inputs, make_inputs
from quire_tools.bench.measure import capture, describe_error, replay
from quire_tools.bench.peers import quire_calls
from quire_tools.bench.sample import Sample
from quire_tools.tuning.configs import HOPPER, Config, configs_of, key_of, leaf_of, options_of
from quire_tools.tuning.jobs import Job
from quire_tools.tuning.records import Records

ROUNDS = (3, 7, 15)  # replays of each configuration, by round
WITHIN = (1.5, 1.15)  # of the best time: what goes on to the second round, and to the third
AT_MOST = (24, 8)  # configurations that go on
MAX_SPILLS = 16  # bytes per thread, which ptxas spills by choice; a configuration that spills more is never timed
MAX_TABLES = 32  # page tables of a case


class Session(Protocol):
    """What measures the configurations of one case."""

    def check(self, config: Config) -> str | None:
        """Make a configuration ready to be timed; return what is wrong with its result, or None."""
        ...

    def time(self, configs: Sequence[Config], replays: int) -> list[float]:
        """Return the median time of each in µs, measured in turn."""
        ...


class GpuSession:
    """Measures on the current GPU, as the bench does."""

    def __init__(self, case: Case) -> None:
        self.inputs: Inputs = make_inputs(case, max_tables=MAX_TABLES)
        self.sample = Sample(self.inputs, self.inputs.tables[0])
        self.ready: dict[Config, tuple[torch.cuda.CUDAGraph, list]] = {}

    def check(self, config: Config) -> str | None:
        """Compare a sample of the result with the oracle, and capture the launches; return what is wrong, or None."""
        out = self.inputs.empty_out()
        try:
            plan = quire_calls(self.inputs, out, **options_of(config))
            calls = [plan(table) for table in self.inputs.tables]
            calls[0]()
            verdict = self.sample.judge(out)
            if not verdict.passed:
                return f"error {verdict.error:.2g}, {verdict.out:.1f} times its budget"
            self.ready[config] = capture(calls), calls
        except Exception as error:  # Triton's compiler raises many kinds
            torch.cuda.synchronize()  # raises if this process has lost the device
            return describe_error(error)
        return None

    def time(self, configs: Sequence[Config], replays: int) -> list[float]:
        """Return the median time of a launch of each in µs, over replays of their graphs in turn."""
        times: list[list[float]] = [[] for _ in configs]
        for _ in range(replays):
            for config, found in zip(configs, times, strict=True):
                found.append(replay(self.ready[config][0]) / len(self.inputs.tables))
        return [statistics.median(found) for found in times]


def sweep(
    chosen: Sequence[Job],
    records: Records,
    properties: DeviceProperties,
    quick: bool,
    session: Callable[[Case], Session],
    excluded: frozenset[tuple[str, str]] = frozenset(),
    advance: Callable[[str, int], None] = lambda case, count: None,
) -> None:
    """Measure everything that the records lack.

    Args:
        chosen: the cases.
        records: read and added to.
        properties: of the device.
        quick: measure the usual winners only.
        session: makes what measures a case.
        excluded: (case, configuration) names that compilation has ruled out.
        advance: is called with a case's name and how many of its configurations were finished.
    """
    for job in chosen:
        case = job.case
        configs = configs_of(case, properties, quick)
        if case.name in records.done:
            advance(case.name, len(configs))
            continue
        try:
            measured = session(case)
        except torch.cuda.OutOfMemoryError:  # the largest cases need more memory than some GPUs have
            records.add(done=case.name)
            advance(case.name, len(configs))
            continue
        default, alive = configs[0], []
        for config in configs:
            if find_fault(case, config, records, measured, excluded if config is not default else frozenset()) is None:
                alive.append(config)
            advance(case.name, 1)
        measure_rounds(case, alive, default, records, measured)
        records.add(done=case.name)
        del measured  # its memory, before the next case's


def find_fault(
    case: Case, config: Config, records: Records, measured: Session, excluded: frozenset[tuple[str, str]]
) -> str | None:
    """Return why a configuration is not timed, or None. Record it if it is new."""
    key = case.name, key_of(leaf_of(config))
    if key in records.wrong:
        return records.wrong[key]
    wrong = "ruled out by what it compiles to" if key in excluded else measured.check(config)
    if wrong is not None:
        records.add(case=case.name, config=leaf_of(config), wrong=wrong)
    return wrong


def measure_rounds(case: Case, alive: list[Config], default: Config, records: Records, measured: Session) -> None:
    """Time configurations in rounds, and record each time that is new."""
    for turn, replays in enumerate(ROUNDS):
        known = {config: records.times[case.name, key_of(leaf_of(config))] for config in alive}
        missing = [config for config in alive if turn not in known[config]]
        times = measured.time(missing, replays) if missing else []
        for config, micros in zip(missing, times, strict=True):
            records.add(case=case.name, config=leaf_of(config), round=turn, micros=micros)
        if turn + 1 < len(ROUNDS):
            times_now = {config: known[config][turn] for config in alive}
            alive = halve(alive, times_now, WITHIN[turn], AT_MOST[turn], default)


def halve(
    alive: list[Config], times: dict[Config, float], within: float, at_most: int, default: Config
) -> list[Config]:
    """Return the configurations that go on to the next round.

    They are the fastest `at_most` of those whose time is `within` a factor of the best. The default, the Hopper kernel
    and the fastest portable configuration always go on.
    """
    best = min(times.values(), default=0.0)
    near = [config for config in alive if times[config] <= within * best or config == HOPPER]
    fastest = sorted(near, key=lambda config: times[config])[:at_most]
    portable = min((config for config in alive if config != HOPPER), key=lambda config: times[config], default=None)
    return [config for config in alive if config in fastest or config in (default, HOPPER, portable)]
