"""Products of tensor cores that kernels write as assembly: what a text of `products.py` multiplies."""

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
SCORES = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.(bf16|f16) "
    r"\{(.*?)\}, (queries\d), keys, (begins|adds), 1, 1, 0, 0;"
)
EDGES_OF_SCORES = (
    r"\{ \.reg \.b32 at; \.reg \.b64 keys, queries<4>; \.reg \.pred begins, adds; "
    r"setp\.ne\.u32 begins, 0, 0; setp\.eq\.u32 adds, 0, 0; (.*) "
    r"wgmma\.fence\.sync\.aligned; (.*) wgmma\.commit_group\.sync\.aligned; \}"
)
OPERAND = re.compile(r"bfe\.u32 at, \$(\d+), 4, 14; cvt\.u64\.u32 (\w+), at; or\.b64 (\w+), (\w+), (\d+);")
STEP = re.compile(r"add\.s64 (\w+), (\w+), (\d+);")
DTYPES = {"bf16": tl.bfloat16, "f16": tl.float16}
TORCH_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
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

    def moved(self, units: int) -> "Descriptor":
        """Return it so many units of 16 bytes further."""
        return self._replace(address=self.address + 16 * units)

    def places(self, rows: int, columns: int) -> np.ndarray:
        """Return the addresses of numbers, [rows, columns]."""
        row, column = np.arange(rows)[:, None], np.arange(columns)
        at = self.address + column // 64 * self.between_panels + column % 64 * 2
        at = at + row // 8 * self.between_eights + row % 8 * 128
        return at ^ (at >> 7 & 7) << 4


class Matrix(NamedTuple):
    """An operand in shared memory."""

    at: np.ndarray  # addresses of its numbers
    dtype: torch.dtype


Products = tuple[list[Any], list[tuple[Any, Matrix]]]


def only_address(tile: Value) -> int:
    """Return the address that all threads pass."""
    addresses = tile.take().flatten()
    assert bool((addresses == addresses[0]).all()), "one address"
    return int(addresses[0])


def read_scores(text: str, constraints: str, args: list[Value]) -> Products:
    """Return scores of 0, and of each instruction its operands: 64 rows of queries, and transposed keys.

    The operands of a thread are its scores, the addresses of panels of queries, and that of the keys.
    """
    names, each = constraints.split(","), COLUMNS // 2
    numbers = names.count("=f")
    assert names == ["=f"] * numbers + ["r"] * each * len(args), constraints
    edges = re.fullmatch(EDGES_OF_SCORES, " ".join(text.split()))
    assert edges is not None, text
    found, operands = OPERAND.findall(edges[1]), {}
    for i, (register, name, *same, constant) in enumerate(found):
        assert same == [name, name] and int(register) == numbers + each * i, text
        operands[name] = Descriptor.read(only_address(args[i]), int(constant), 0)
    assert len(found) == len(args) and edges[1].count(";") == 3 * len(args), text
    products = []
    for statement in re.findall(r"[^;]*;", edges[2]):
        statement = statement.strip()
        if step := STEP.fullmatch(statement):
            assert step[1] == step[2], statement
            operands[step[1]] = operands[step[1]].moved(int(step[3]))
            continue
        parts = SCORES.fullmatch(statement)
        assert parts is not None and parts[2] == parts[3], statement
        columns = int(parts[1])
        assert parts[4] == ", ".join(f"${at}" for at in range(columns // 2)) and columns == 2 * numbers, statement
        assert (parts[6] == "begins") == (not products), statement
        dtype = TORCH_DTYPES[parts[2]]
        queries, keys = operands[parts[5]].places(64, 16), operands["keys"].places(columns, 16)
        products.append((Matrix(queries, dtype), Matrix(keys.T, dtype)))
    count = numbers // each
    return [Value(torch.zeros(64, COLUMNS)) for _ in range(count)], products


def read_product(text: str, constraints: str, args: list[Value]) -> Products:
    """Return the accumulators, and of each instruction its operands: probabilities, and values.

    The operands of a thread are its numbers of `args`: accumulators, probabilities, and one address.
    """
    if "keys" in text:
        return read_scores(text, constraints, args)
    names = constraints.split(",")
    sums = names.count("=f")
    count = sums // (COLUMNS // 2)  # accumulators
    accs, numbers, address = args[:count], args[count:-1], only_address(args[-1])
    ties, registers = [str(i) for i in range(sums)], len(numbers) * COLUMNS // 4
    assert names == ["=f"] * sums + ties + ["r"] * (registers + COLUMNS // 2), constraints
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
        places = Descriptor.read(address, int(edges[2]), added).places(16, columns)
        products.append((left, Matrix(places, left.data.dtype)))
    assert len(products) == len(numbers), text
    return accs, products
