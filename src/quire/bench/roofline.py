"""What a device could do at best: ceilings, measured where there is a GPU, from data sheets where there is none; and which of them bounds a case."""

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from quire.bench.cases import Case
from quire.bench.measure import replay


@dataclass(frozen=True)
class Ceilings:
    """What bounds a case.

    Attributes:
        device: whose they are.
        bytes_per_second: reading memory.
        flops_per_second: bf16 matrix products.
        source: "measured", or "data sheet".
    """

    device: str
    bytes_per_second: float
    flops_per_second: float
    source: str

    def floor(self, case: Case) -> float:
        """Return the least time of a case in µs: the larger of its bytes and its flops over the ceilings; float32 is held to the same."""
        return 1e6 * max(case.nbytes / self.bytes_per_second, case.flops / self.flops_per_second)

    def bound(self, case: Case) -> str:
        """Return which ceiling that is."""
        return "memory" if case.nbytes / self.bytes_per_second >= case.flops / self.flops_per_second else "compute"

    def of(self, case: Case) -> dict[str, float | str]:
        """Return what a case needs and what bounds it."""
        return {
            "nbytes": case.nbytes,
            "flops": case.flops,
            "intensity": case.intensity,
            "floor_micros": self.floor(case),
            "bound": self.bound(case),
        }

    def as_dict(self) -> dict:
        """For a report."""
        return asdict(self)


DATA_SHEETS = {  # by name: target of quire.targets, bytes per second, dense bf16 matrix operations per second, as their makers print them
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
    """Return the ceilings that a maker prints."""
    _, read, compute = DATA_SHEETS[name]
    return Ceilings(name, read, compute, "data sheet")


@triton.jit
def read_kernel(x_ptr, out_ptr, PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr):
    """Each program adds up PER_PROGRAM numbers of its own."""
    offs = tl.program_id(0).to(tl.int64) * PER_PROGRAM + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(0, PER_PROGRAM, BLOCK):
        acc += tl.load(x_ptr + offs + i)
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, 0))


def measure_ceilings() -> Ceilings:
    """Measure this GPU: reading 2 GiB, and a bf16 matrix product of 8,192 cubed on random numbers; the best of some replays each."""
    device = torch.device("cuda")
    per_program, num = 1 << 16, 1 << 13
    x, sums = torch.ones(per_program * num, device=device), torch.empty(num, device=device)
    read = best(lambda: read_kernel[(num,)](x, sums, PER_PROGRAM=per_program, BLOCK=4096, num_warps=8))
    nbytes = x.numel() * x.element_size()
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product = best(lambda: torch.mm(a, b))
    return Ceilings(torch.cuda.get_device_name(), nbytes / read * 1e6, 2 * 8192**3 / product * 1e6, "measured")


def best(call, times: int = 12) -> float:
    """Return the shortest of some replays in µs."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return min(replay(graph) for _ in range(times))
