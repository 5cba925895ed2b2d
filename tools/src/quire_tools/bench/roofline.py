"""The ceilings of a device, from its data sheet or measured (`ceilings.py`), and which of them bounds a case."""

from dataclasses import dataclass
from typing import Literal

from quire_tools.bench.case import Case
from quire_tools.bench.schema import require_positive


@dataclass(frozen=True)
class Ceilings:
    """What bounds a case.

    Attributes:
        device: its name.
        bytes_per_second: of reading memory.
        flops_per_second: of bf16 matrix products.
        source: "measured" or "data sheet".
    """

    device: str
    bytes_per_second: float
    flops_per_second: float
    source: str

    def __post_init__(self) -> None:
        require_positive(bytes_per_second=self.bytes_per_second, flops_per_second=self.flops_per_second)

    @property
    def ridge(self) -> float:
        """Operations per byte at which both ceilings allow the same."""
        return self.flops_per_second / self.bytes_per_second

    def floor(self, case: Case) -> float:
        """Return the least time of a case in µs: the larger of its bytes and its operations over their ceilings.

        The ceiling of operations is that of bf16 for every dtype.
        """
        return 1e6 * max(case.nbytes / self.bytes_per_second, case.flops / self.flops_per_second)

    def bound(self, case: Case) -> Literal["memory", "compute"]:
        """Return which ceiling that is."""
        return "memory" if case.intensity <= self.ridge else "compute"


# By name: a target of quire.targets; bytes per second and dense bf16 operations per second, as the maker states them.
DATA_SHEETS = {
    "A100": ("sm80", 2.04e12, 312e12),
    "A40": ("sm86", 0.696e12, 149.7e12),
    "L40S": ("sm89", 0.864e12, 362e12),
    "H100": ("sm90", 3.35e12, 989e12),
    "H200": ("sm90", 4.8e12, 989e12),
    "B200": ("sm100", 8.0e12, 2250e12),
    "RTX PRO 6000": ("sm120", 1.79e12, 504e12),
    "MI250": ("gfx90a", 1.6e12, 181e12),  # one die
    "MI300X": ("gfx942", 5.3e12, 1307e12),
    "MI355X": ("gfx950", 8.0e12, 2516e12),
}


def from_data_sheet(name: str) -> Ceilings:
    """Return the ceilings that a maker states."""
    _, read, compute = DATA_SHEETS[name]
    return Ceilings(name, read, compute, "data sheet")
