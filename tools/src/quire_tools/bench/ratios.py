"""Quire's time over that of other libraries: for one case, and its distribution over many."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from quire_tools.bench.peers import BASELINES
from quire_tools.bench.results import QUIRE, Row, is_ours
from quire_tools.bench.tables import Column, Table

BEST = "best other"
NUM_WORST = 20  # cases that a report of a grid lists
QUANTILES = {"least": 0.0, "5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "worst": 1.0}


def best_other(row: Row) -> tuple[str, float] | None:
    """Return the fastest library, and its time, of those that read the same pages and are not Quire's."""
    others = {name: t for name, t in row.times.items() if not is_ours(name) and name not in BASELINES}
    return min(others.items(), key=lambda item: item[1]) if others else None


def ratio_to_best(row: Row) -> float | None:
    """Return Quire's time over the best other's; None where one is missing."""
    best = best_other(row)
    return row.times[QUIRE] / best[1] if best and QUIRE in row.times else None


@dataclass(frozen=True)
class Distribution:
    """Quire's time over another library's, on the cases that both serve.

    Attributes:
        name: of the library, or BEST for the fastest of each case.
        ratios: one for each case, the least first.
    """

    name: str
    ratios: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return statistics.geometric_mean(self.ratios)

    @property
    def at_most_1(self) -> float:
        """The share of the cases where Quire takes as long or less."""
        return sum(ratio <= 1 for ratio in self.ratios) / len(self.ratios)

    def quantile(self, share: float) -> float:
        """Return the ratio that this share of the cases does not exceed, between two cases by a straight line."""
        at = share * (len(self.ratios) - 1)
        low = int(at)
        high = min(low + 1, len(self.ratios) - 1)
        return self.ratios[low] + (at - low) * (self.ratios[high] - self.ratios[low])


def distributions(rows: Iterable[Row]) -> list[Distribution]:
    """Return the distribution over the best other library of each case, and over every other library."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        best = ratio_to_best(row)
        if best is not None:
            ratios[BEST].append(best)
        for name, micros in row.times.items():
            if name != QUIRE and QUIRE in row.times:
                ratios[name].append(row.times[QUIRE] / micros)
    return [Distribution(name, tuple(sorted(some))) for name, some in ratios.items()]


def distribution_table(rows: Iterable[Row]) -> Table[Distribution]:
    """Return the geometric mean and the quantiles of Quire's time over that of each other library."""

    def quantile(head: str, share: float) -> Column[Distribution]:
        return Column(head, lambda d: d.quantile(share), ".2f", is_essential=head in ("median", "worst"))

    columns: tuple[Column[Distribution], ...] = (
        Column("Quire's time over", lambda d: d.name),
        Column("cases", lambda d: len(d.ratios), is_essential=True),
        Column("geometric mean", lambda d: d.mean, ".3f", is_essential=True),
        *(quantile(head, share) for head, share in QUANTILES.items()),
        Column("at most 1", lambda d: d.at_most_1, ".0%"),
    )
    return Table(columns, distributions(rows))


def worst_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the cases where Quire loses most to the best other library, the worst first."""
    ratios = [(ratio, row) for row in rows if (ratio := ratio_to_best(row)) is not None]
    return [row for _, row in sorted(ratios, key=lambda pair: pair[0], reverse=True)[:NUM_WORST]]
