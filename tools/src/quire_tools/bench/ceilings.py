"""Measure the ceilings of this GPU."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from quire_tools.bench.measure import capture, replay
from quire_tools.bench.roofline import Ceilings


@triton.jit
def read_kernel(x_ptr, out_ptr, PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr):
    """Sum PER_PROGRAM consecutive numbers in each program."""
    offs = tl.program_id(0).to(tl.int64) * PER_PROGRAM + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for i in range(0, PER_PROGRAM, BLOCK):
        acc += tl.load(x_ptr + offs + i)
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, 0))


def measure_ceilings() -> Ceilings:
    """Measure this GPU: reading 2 GiB, and a bf16 product of 8,192 cubed of random numbers, the best replay of each."""
    device = torch.device("cuda")
    per_program, num_programs = 1 << 16, 1 << 13
    x = torch.ones(per_program * num_programs, device=device)
    sums = torch.empty(num_programs, device=device)

    def read() -> None:
        options: dict[str, Any] = {"PER_PROGRAM": per_program, "BLOCK": 4096, "num_warps": 8}
        read_kernel[(num_programs,)](x, sums, enable_fp_fusion=True, **options)  # pyright: ignore[reportCallIssue]

    read_micros = shortest_replay(read)
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product_micros = shortest_replay(lambda: torch.mm(a, b))
    nbytes, flops = x.numel() * x.element_size(), 2 * 8192**3
    return Ceilings(torch.cuda.get_device_name(), nbytes / read_micros * 1e6, flops / product_micros * 1e6, "measured")


def shortest_replay(call: Callable[[], torch.Tensor | None], replays: int = 12) -> float:
    """Return the shortest time of some replays of a call in µs."""
    call()
    torch.cuda.synchronize()
    graph = capture([call])
    return min(replay(graph) for _ in range(replays))
