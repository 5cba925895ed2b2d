"""Products of tensor cores that kernels write as assembly: what a text of `value_columns.py` multiplies."""

import re
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from .memory import AccessError, Allocation
from .values import Value

INSTRUCTION = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.(bf16|f16) "
    r"\{(.*?)\}, \{(.*?)\}, values, adds, 1, 1, 1;"
)
EDGES = (
    r"\{ \.reg \.b32 at; \.reg \.b64 values; \.reg \.pred adds; setp\.eq\.u32 adds, 0, 0; "
    r"bfe\.u32 at, \$(\d+), 4, 14; cvt\.u64\.u32 values, at; or\.b64 values, values, (\d+); "
    r"wgmma\.fence\.sync\.aligned; (.*) wgmma\.commit_group\.sync\.aligned; \}"
)
DTYPES = {"bf16": tl.bfloat16, "f16": tl.float16}
COLUMNS = 16  # of a tile of accumulators or probabilities: eight numbers of a thread


class Part(NamedTuple):
    """A part of a tile that tensor cores read, at any places of an allocation."""

    allocation: Allocation
    at: np.ndarray  # bytes where its numbers begin
    dtype: torch.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.at.shape)

    def read(self) -> torch.Tensor:
        if self.allocation.arriving.any(self.at.ravel() // 16):
            raise AccessError(f"a tile of {self.shape} is read while it is copied")
        return self.allocation.bytes.view(self.dtype)[torch.from_numpy(self.at // 2)]

    def check_fenced(self) -> None:
        if self.allocation.unfenced.any(self.at.ravel() // 16):
            raise AccessError(f"a tile of {self.shape} was stored, and no fence came before tensor cores read it")


class Descriptor(NamedTuple):
    """A matrix descriptor of PTX: rows of 128 swizzled bytes, eight of them together, and panels of these."""

    address: int
    between_panels: int  # bytes
    between_eights: int

    @classmethod
    def read(cls, address: int, constant: int, added: int) -> "Descriptor":
        assert constant >> 62 == 1, "rows of 128 swizzled bytes"
        parts = (constant >> 16 & 0x3FFF, constant >> 32 & 0x3FFF)
        assert parts[0] << 16 | parts[1] << 32 | 1 << 62 == constant, constant
        return cls(address + 16 * added, 16 * parts[0], 16 * parts[1])

    def places(self, columns: int) -> np.ndarray:
        """Return the addresses of the numbers of 16 rows, [16, columns]."""
        row, column = np.arange(16)[:, None], np.arange(columns)
        at = self.address + column // 64 * self.between_panels + column % 64 * 2
        at = at + row // 8 * self.between_eights + row % 8 * 128
        return at ^ (at >> 7 & 7) << 4


def read_product(text: str, constraints: str, args: list[Value]) -> tuple[list[Any], list[tuple[Value, Any, Any]]]:
    """Return the accumulators, and of each instruction its left operand, its matrix's addresses and its dtype.

    The operands of a thread are its numbers of `args`: accumulators, probabilities, and one address.
    """
    names = constraints.split(",")
    sums = names.count("=f")
    count = sums // (COLUMNS // 2)  # accumulators
    accs, numbers, address = args[:count], args[count:-1], args[-1].take()
    ties, registers = [str(i) for i in range(sums)], len(numbers) * COLUMNS // 4
    assert names == ["=f"] * sums + ties + ["r"] * (registers + COLUMNS // 2), constraints
    assert bool((address == address.flatten()[0]).all()), "one address"
    edges = re.fullmatch(EDGES, " ".join(text.split()))
    assert edges is not None and int(edges[1]) == 2 * sums + registers, text
    products, added = [], 0
    steps = re.split(r" ?add\.s64 values, values, (\d+); ?", edges[3])
    for i, step in enumerate(steps):
        if i % 2:
            added += int(step)
            continue
        parts = INSTRUCTION.fullmatch(step.strip())
        assert parts is not None and parts[2] == parts[3], step
        columns, first = int(parts[1]), 2 * sums + 4 * (i // 2)
        assert parts[4] == ", ".join(f"${at}" for at in range(columns // 2)), step
        assert parts[5] == ", ".join(f"${first + at}" for at in range(4)), step
        left = numbers[i // 2]
        assert left.dtype == DTYPES[parts[2]], f"a product of {left.dtype} by an instruction for {parts[2]}"
        places = Descriptor.read(int(address.flatten()[0]), int(edges[2]), added).places(columns)
        products.append((left, places, left.data.dtype))
    assert len(products) == len(numbers), text
    return accs, products
