"""Judge a tree: compare its choices with the generic tree's and with the best of a sweep."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from quire.dispatch.device import DeviceProperties
from quire.dispatch.tree import decision
from quire.dispatch.tree_file import load_tree
from quire.kernels.hopper.launch import HopperLaunch
from quire_tools.bench.case import Case
from quire_tools.tuning.configs import (
    HOPPER,
    Config,
    chosen_config,
    config_of,
    features,
    key_of,
    launch_of,
    leaf_of,
    serves_hopper,
)
from quire_tools.tuning.jobs import Job
from quire_tools.tuning.records import Records
from quire_tools.tuning.sweep import Session


class Comparison(TypedDict):
    """The times of a case in µs, and the loss of a tree on it.

    Attributes:
        case: its name.
        held_out: whether the tree was not fitted to it.
        config: name of the tree's choice.
        default: time of the generic tree's choice; None if its result was wrong.
        tuned: time of the tree's choice.
        best: time of the best that the sweep has found; None if its result was wrong.
        regret: `tuned` over the smallest of the three.
    """

    case: str
    held_out: bool
    config: str
    default: float | None
    tuned: float
    best: float | None
    regret: float


class Summary(TypedDict):
    """Geometric means over some cases, and the worst of them.

    Attributes:
        mean: of the tree's regret.
        worst: the tree's largest regret.
        over_default: of the tree's time over the generic tree's.
        default_mean: of the generic tree's regret.
    """

    mean: float
    worst: float
    over_default: float
    default_mean: float


class RecordedSession:
    """Measures nothing: returns what records hold, of the last round that each configuration reached."""

    def __init__(self, records: Records, case: Case) -> None:
        self.times = records.last(case.name)

    def check(self, config: Config) -> str | None:
        """Return None if the records have a time of a configuration."""
        return None if key_of(leaf_of(config)) in self.times else "no time in the records"

    def time(self, configs: Sequence[Config], replays: int) -> list[float]:
        """Return the recorded times of some configurations."""
        return [self.times[key_of(leaf_of(config))] for config in configs]


def choice(case: Case, tree: dict[str, Any], properties: DeviceProperties) -> Config:
    """Return the configuration that plans have for a case with a tree."""
    planned = launch_of(case, properties)
    if isinstance(planned, HopperLaunch) and planned.num_splits > 1:  # no tree is asked
        return HOPPER
    config = chosen_config(tree, case, properties)
    if not serves_hopper(case, properties) or not decision(tree["hopper"], features(case, properties), "hopper"):
        return config
    return HOPPER if launch_of(case, properties, config).name == "block" else config


def candidates(case: Case, records: Records, tree: dict[str, Any], properties: DeviceProperties) -> dict[str, Config]:
    """Return the choices of the generic tree and of a tree, and the best of the sweep, if there is one."""
    times = records.last(case.name)
    if not times:
        return {}
    leaf = records.leaves[min(times, key=lambda key: times[key])]
    best = leaf if isinstance(leaf, str) else config_of(leaf, case, properties)
    default = choice(case, load_tree("generic"), properties)
    return {"default": default, "tuned": choice(case, tree, properties), "best": best}


def validate(
    chosen: Sequence[Job],
    records: Records,
    tree: dict[str, Any],
    properties: DeviceProperties,
    session: Callable[[Case], Session],
    replays: int,
    advance: Callable[[str, int], None] = lambda case, count: None,
) -> list[Comparison]:
    """Time a tree's choice, the generic tree's and the best of the sweep, round-robin.

    Args:
        chosen: the cases.
        records: of the sweep.
        tree: the tree to judge.
        properties: of the device.
        session: makes what measures a case.
        replays: of each configuration.
        advance: is called with a case's name and 1 when it is finished.

    Returns:
        The times of each case that the records have times of.

    Raises:
        RuntimeError: the result of a tree's choice is wrong.
    """
    found: list[Comparison] = []
    for job in chosen:
        configs = candidates(job.case, records, tree, properties)
        if not configs:
            advance(job.case.name, 1)
            continue
        measured, distinct = session(job.case), list(dict.fromkeys(configs.values()))
        wrong = {config: fault for config in distinct if (fault := measured.check(config))}
        tuned = configs["tuned"]
        if tuned in wrong:
            raise RuntimeError(
                f"{job.case.name}: what the tree chooses must be right, got {wrong[tuned]}; "
                "add a case like it to `jobs` and tune again"
            )
        right = [config for config in distinct if config not in wrong]
        micros = dict(zip(right, measured.time(right, replays), strict=True))
        found.append(
            Comparison(
                case=job.case.name,
                held_out=job.held_out,
                config=key_of(leaf_of(tuned)),
                default=micros.get(configs["default"]),
                tuned=micros[tuned],
                best=micros.get(configs["best"]),
                regret=micros[tuned] / min(micros.values()),
            )
        )
        advance(job.case.name, 1)
        del measured  # its memory, before the next case's
    return found


def summarize(rows: Sequence[Comparison]) -> dict[str, Summary]:
    """Return a tree's regret on the cases that it was fitted to ("training"), and on the others ("held_out")."""
    sets = {
        "training": [row for row in rows if not row["held_out"]],
        "held_out": [row for row in rows if row["held_out"]],
    }
    return {name: summary_of(some) for name, some in sets.items() if some}


def summary_of(rows: Sequence[Comparison]) -> Summary:
    """Return a tree's regret on some cases."""
    regrets = [row["regret"] for row in rows]
    with_default = [(row["default"], row) for row in rows if row["default"]]
    over_default = [row["tuned"] / default for default, row in with_default]
    default_regrets = [
        default / min(default, row["tuned"], row["best"] or row["tuned"]) for default, row in with_default
    ]
    return Summary(
        mean=round(statistics.geometric_mean(regrets), 4),
        worst=round(max(regrets), 4),
        over_default=round(statistics.geometric_mean(over_default), 4),
        default_mean=round(statistics.geometric_mean(default_regrets), 4),
    )
