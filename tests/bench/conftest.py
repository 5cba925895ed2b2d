"""Timings, rows and reports of which none was measured."""

from collections.abc import Callable, Sequence

import pytest

from quire_tools.bench.cases import cases
from quire_tools.bench.measure import NoResult, Timing
from quire_tools.bench.results import RangeRow, Report, Row, make_row, provenance
from quire_tools.bench.roofline import Ceilings

CEILINGS = Ceilings("a made-up device", 4e12, 800e12, "measured")
PEERS = ("Quire", "FlashAttention 3", "Quire, naive")


def timing_of(micros: float) -> Timing:
    """Make up a timing with a range of ±2 %."""
    return Timing(
        micros=micros,
        low=0.98 * micros,
        high=1.02 * micros,
        replays=9,
        error=1e-3,
        of_budget=0.4,
        scratch_bytes=4_000_000,
        host_micros=12.0,
        plan_micros=None,
        bytes_per_second=1e12,
        flops_per_second=1e13,
    )


def report_of(scale: float = 1.0, peers: Sequence[str] = PEERS) -> Report:
    """Make up a report. The time of peer number i is i + 1 times (floor + 3 µs), and Quire's is also times `scale`."""
    rows: list[Row] = []
    for i, case in enumerate(cases(["decode", "share", "batch", "prefill"])):
        results: dict[str, Timing | NoResult] = {}
        for j, name in enumerate(peers):
            micros = (CEILINGS.floor(case) + 3) * (1 + j)
            results[name] = timing_of(micros * scale if name == "Quire" else micros)
        if i == 3:
            results["FlashAttention 3"] = NoResult("does not serve <sinks>")
        rows.append(make_row(case, CEILINGS, results))
    return Report(
        provenance=provenance(CEILINGS.device, "abc1234"),
        ceilings=CEILINGS,
        peers=dict.fromkeys(peers, "1.0"),
        rows=rows,
        graph_range=[RangeRow(1, 4096, n, 10.0, 9.8) for n in (128, 512, 2048)],
    )


@pytest.fixture(scope="session")
def ceilings() -> Ceilings:
    """Ceilings of a device that does not exist."""
    return CEILINGS


@pytest.fixture(scope="session")
def make_timing() -> Callable[[float], Timing]:
    """A function from a time in µs to a timing."""
    return timing_of


@pytest.fixture(scope="session")
def make_report() -> Callable[..., Report]:
    """A function that makes up a report; see `report_of`."""
    return report_of


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the plots out of reports, since they take seconds."""
    from quire_tools.bench import html

    monkeypatch.setattr(html, "plots", lambda report: {})
