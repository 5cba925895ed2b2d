"""Floors of speed: ratios to the best other library in the same run, which later runs must hold.

The clocks and drivers of a machine change the times of all libraries in a run alike, but not their ratios. So a floor
is a ratio: the other library's time over Quire's. A case fails if its ratio is below its floor by more than the noise
of both runs (`report.noise`).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire_tools.bench.peers import BASELINES
from quire_tools.bench.report import noise
from quire_tools.bench.results import QUIRE, Provenance, Report, Result, Row, is_ours
from quire_tools.bench.schema import from_json, require_positive, to_json
from quire_tools.bench.tables import Column, Table

Verdict = Literal["held", "fell", "lost"]


@dataclass(frozen=True)
class Floor:
    """How fast Quire was on a case, compared with one library.

    Attributes:
        ratio: the library's time over Quire's.
        noise: by which share the ratio of another run of the same code may differ, as far as this run says.
    """

    ratio: float
    noise: float

    def __post_init__(self) -> None:
        require_positive(ratio=self.ratio)


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The floors of one run.

    Attributes:
        provenance: of the run.
        peers: the version of each library.
        cases: the floors, by case and library.
    """

    provenance: Provenance
    peers: dict[str, str]
    cases: dict[str, dict[str, Floor]]


@dataclass(frozen=True)
class Held:
    """A case compared with its floor.

    Attributes:
        case: its name.
        peer: the best other library of this run, among those that have a floor.
        ratio: that library's time over Quire's; None where Quire has no time.
        floor: the ratio to the best of the same libraries in the run of the floors.
        margin: by which share the ratio may be below the floor.
    """

    case: str
    peer: str
    ratio: float | None
    floor: float
    margin: float

    @property
    def verdict(self) -> Verdict:
        """Whether the floor is held; "lost" if Quire has no time."""
        if self.ratio is None:
            return "lost"
        return "fell" if self.ratio < self.floor * (1 - self.margin) else "held"


def floors_of(row: Row) -> dict[str, Floor]:
    """Return the ratios of a case to all libraries that read the same pages and are not Quire's, by name."""
    ours = row.timed.get(QUIRE)
    if ours is None:
        return {}
    others = {name: r for name, r in row.timed.items() if not is_ours(name) and name not in BASELINES}
    return {name: Floor(other.micros / ours.micros, share(other) + share(ours)) for name, other in others.items()}


def share(result: Result) -> float:
    """Return the noise of a time as a share of it."""
    return noise(result) / result.micros


def make_guard(report: Report) -> Guard:
    """Return the floors of a run.

    Raises:
        ValueError: no case has a time of Quire's and of another library's.
    """
    cases = {row.case: floors for row in report.rows if (floors := floors_of(row))}
    if not cases:
        raise ValueError("the run must have times of Quire and of other libraries, got none; measure it on a GPU")
    names = {name for floors in cases.values() for name in floors}
    peers = {name: version for name, version in report.peers.items() if name in names}
    return Guard(provenance=report.provenance, peers=peers, cases=cases)


def compare(guard: Guard, rows: Iterable[Row]) -> list[Held]:
    """Compare the cases of a run with their floors; those that share no library with them are left out."""
    found = []
    for row in rows:
        floors = guard.cases.get(row.case, {})
        if floors and QUIRE not in row.times:
            best = min(floors, key=lambda name: floors[name].ratio)
            found.append(Held(row.case, best, None, floors[best].ratio, floors[best].noise))
            continue
        now = {name: floor for name, floor in floors_of(row).items() if name in floors}
        if not now:
            continue
        peer = min(now, key=lambda name: now[name].ratio)
        before = min((floors[name] for name in now), key=lambda floor: floor.ratio)
        found.append(Held(row.case, peer, now[peer].ratio, before.ratio, before.noise + now[peer].noise))
    return found


def fallen_table(found: Iterable[Held]) -> Table[Held]:
    """Return the cases that do not hold their floor, the worst first."""
    fallen = [held for held in found if held.verdict != "held"]
    columns: tuple[Column[Held], ...] = (
        Column("case", lambda held: held.case),
        Column("best other", lambda held: held.peer),
        Column("its time / Quire's", lambda held: held.ratio, ".3f", is_essential=True),
        Column("floor", lambda held: held.floor, ".3f", is_essential=True),
        Column("margin", lambda held: held.margin, ".1%", is_essential=True),
        Column("", lambda held: held.verdict, is_essential=True),
    )
    return Table(columns, sorted(fallen, key=lambda held: (held.ratio or 0) / held.floor))


def save(guard: Guard, path: Path) -> None:
    """Write the floors as JSON, in one step; ratios and noise to four decimals."""
    data = to_json(guard)
    for floors in data["cases"].values():
        for floor in floors.values():
            floor |= {name: round(value, 4) for name, value in floor.items()}
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def load(path: Path) -> Guard:
    """Read the floors in a file.

    Raises:
        ValueError: it cannot be read, or holds something else.
    """
    contract = f"{path} must hold the floors that `quire bench floors` writes"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{contract}, got {type(error).__name__}: {error}; make them again") from None
    try:
        guard: Guard = from_json(Guard, data, "guard")
    except ValueError as error:
        raise ValueError(f"{contract}, but {error}; make them again") from None
    if not any(guard.cases.values()):
        raise ValueError(f"{contract}, got no case; make them again")
    return guard
