"""Run texts of PTX: the inline assembly that a warp runs together, on all numbers that its threads hold.

Results of approximate instructions are the nearest float32. Those of a GPU may be another one close to it.
"""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

ROWS, WARPS, LANES = 64, 4, 32  # rows of the tiles, which belong to the four warps of a warpgroup
SMALLEST_NORMAL = np.float32(2.0**-126)
INSTRUCTION = re.compile(r"(?:@(?P<negated>!?)(?P<guard>\w+) )?(?P<opcode>[\w.]+)(?: (?P<operands>.+))?")
OPERANDS = re.compile(r"\{[^}]*\}|\[[^]]*\]|[^,\s][^,]*")
NUMBER = re.compile(r"0f([0-9A-F]{8})")

Registers = dict[str, Any]  # each an array [warps, LANES], or a number
Operation = Callable[..., Any]


def flushed(x: Any) -> Any:
    """Return zeros of the same sign for subnormal numbers."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(np.float32(0), x), x).astype(np.float32)


def multiply_add(a: Any, b: Any, c: Any) -> Any:
    """The product is not rounded."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def exponential(x: Any) -> Any:
    return flushed(np.exp2(flushed(x).astype(np.float64)).astype(np.float32))


def reciprocal(x: Any) -> Any:
    return flushed(np.float32(1) / flushed(x))


def vote_all(x: Any, lanes: Any) -> Any:
    """Whether a predicate is true in all threads of the warp."""
    assert lanes == 0xFFFFFFFF, lanes
    return np.broadcast_to(x.all(1, keepdims=True), x.shape)


def vote_any(x: Any, lanes: Any) -> Any:
    """Whether a predicate is true in any thread of the warp."""
    assert lanes == 0xFFFFFFFF, lanes
    return np.broadcast_to(x.any(1, keepdims=True), x.shape)


def butterfly(x: Any, distance: Any, clamp: Any, lanes: Any) -> Any:
    """The register of the thread whose number differs in the bits of a distance."""
    assert (clamp, lanes) == (LANES - 1, 0xFFFFFFFF), (clamp, lanes)
    return x[:, np.arange(LANES) ^ distance]


def from_lane(x: Any, lane: Any, clamp: Any, lanes: Any) -> Any:
    """The register of the thread with a number."""
    assert (clamp, lanes) == (LANES - 1, 0xFFFFFFFF), (clamp, lanes)
    assert ((lane >= 0) & (lane < LANES)).all(), lane
    return np.take_along_axis(x, lane, 1)


def bits_of(x: Any) -> Any:
    """A register as an integer. All NaN of a GPU have the same bits."""
    if np.asarray(x).dtype != np.float32:
        return x
    return np.where(np.isnan(x), np.int32(0x7FFFFFFF), np.ascontiguousarray(x).view(np.int32))


def float_of(x: Any) -> Any:
    """A register as a float32."""
    return np.ascontiguousarray(x).view(np.float32) if np.asarray(x).dtype == np.int32 else x


def both_rounded(high: Any, low: Any, to: torch.dtype) -> Any:
    """Two numbers, rounded to 16 bits, in one register."""
    halves = (torch.from_numpy(np.ascontiguousarray(x)).to(to).view(torch.int16).numpy() for x in (low, high))
    return np.stack(tuple(halves), -1).view(np.int32)[..., 0]


OPERATIONS: dict[str, Operation] = {
    "mov.f32": lambda x: x,
    "mov.b32": lambda x: x,
    "mov.u32": lambda x: x,
    "mov.b16": lambda x: x,
    "neg.f32": np.negative,
    "sub.f32": np.subtract,
    "mul.f32": np.multiply,
    "add.f32": np.add,
    "abs.f32": np.abs,
    "max.f32": np.fmax,  # of a number and NaN, the number
    "max.s32": lambda a, b: np.maximum(bits_of(a), bits_of(b)),
    "and.b32": np.bitwise_and,
    "fma.rn.f32": multiply_add,
    "rcp.approx.ftz.f32": reciprocal,
    "ex2.approx.ftz.f32": exponential,
    "selp.f32": lambda a, b, condition: np.where(condition, a, b),
    "setp.eq.f32": np.equal,
    "setp.le.f32": lambda a, b: float_of(a) <= float_of(b),
    "setp.le.s32": lambda a, b: bits_of(a) <= bits_of(b),
    "setp.ne.u32": np.not_equal,
    "setp.eq.and.f32": lambda a, b, condition: (a == b) & condition,
    "setp.le.and.s32": lambda a, b, condition: (bits_of(a) <= bits_of(b)) & condition,
    "setp.gt.f32": np.greater,
    "setp.gt.and.f32": lambda a, b, condition: (a > b) & condition,
    "vote.sync.all.pred": vote_all,
    "vote.sync.any.pred": vote_any,
    "shfl.sync.bfly.b32": butterfly,
    "shfl.sync.idx.b32": from_lane,
    "add.s32": lambda a, b: (a.astype(np.int64) + b).astype(np.int32),
    "sub.s32": lambda a, b: (a.astype(np.int64) - b).astype(np.int32),
    "sub.s64": np.subtract,
    "and.b64": np.bitwise_and,
    "shl.b32": lambda a, b: (a.astype(np.int64) << b).astype(np.int32),
    "cvt.u64.u32": lambda x: x.astype(np.int64) & 0xFFFFFFFF,
    "cvt.u32.u64": lambda x: x.astype(np.int32),
    "cvt.f32.f16": lambda x: x.astype(np.int16).view(np.float16).astype(np.float32),
    "setp.lt.u32": lambda a, b: a.astype(np.uint32) < b.astype(np.uint32),
    "setp.eq.and.u32": lambda a, b, condition: (a == b) & condition,
    "bar.warp.sync": lambda lanes: None,
    "pack": lambda low, high: (low & 0xFFFF) | (high << 16),
    "low": lambda x: x & 0xFFFF,
    "high": lambda x: x >> 16 & 0xFFFF,
    "cvt.rn.bf16x2.f32": partial(both_rounded, to=torch.bfloat16),
    "cvt.rn.f16x2.f32": partial(both_rounded, to=torch.float16),
}


class WarpMemory(Protocol):
    """What instructions that access memory do, of addresses [warps, LANES]."""

    def copy(self, into: Any, address: Any, guard: Any) -> None:
        """Begin to copy 16 bytes to each address of shared memory where `guard` is true."""
        ...

    def wait(self) -> None:
        """Wait for these copies."""
        ...

    def load(self, address: Any) -> Any:
        """Return the 16-bit number at each address of shared memory."""
        ...


IN_MEMORY = {"cp.async.cg.shared.global": "copy", "cp.async.wait_all": "wait", "ld.shared.u16": "load"}


class Instruction(NamedTuple):
    """An instruction. A branch has no operation, and names its label as the result."""

    operation: Operation | str | None  # a name of IN_MEMORY
    result: str
    sources: tuple[str, ...] = ()
    guard: str | None = None  # a predicate, on which a branch depends
    negated: bool = False


class Text(NamedTuple):
    """A text that has been read: its instructions, where its labels are, and the numbers in it."""

    instructions: list[Instruction]
    labels: dict[str, int]
    numbers: Registers


@cache
def read(text: str) -> Text:
    """Read a block of PTX.

    Raises:
        KeyError: an instruction is none of OPERATIONS.
    """
    found = Text([], {}, {name: int(name, 0) for name in ("0xffffffff", "0x1f", "0xffff0000")})
    found.numbers["0xffff0000"] = np.int32(-(1 << 16))
    found.numbers["%laneid"] = np.broadcast_to(np.arange(LANES, dtype=np.int32), (WARPS, LANES))
    body = re.fullmatch(r"\{(.*)\}", text.strip(), re.DOTALL)
    assert body is not None, text
    for number in NUMBER.finditer(text):
        found.numbers[number[0]] = np.uint32(int(number[1], 16)).view(np.float32)
    for number in re.findall(r"(?<=, )-?\d+(?=[,;])", text):
        found.numbers[number] = np.int64(number).astype(np.int32)
    for line in re.sub(r"(\w+):", r"\1:;", body[1]).split(";"):
        line = line.strip()
        if line.endswith(":"):
            found.labels[line[:-1]] = len(found.instructions)
        elif line and not line.startswith(".reg"):
            found.instructions.extend(read_instructions(line))
    return found


def read_instructions(line: str) -> list[Instruction]:
    parts = INSTRUCTION.fullmatch(line)
    assert parts is not None, line
    operands = OPERANDS.findall(parts["operands"] or "")
    opcode, guard = parts["opcode"], (parts["guard"], bool(parts["negated"]))
    if opcode in IN_MEMORY:
        assert not guard[1], line
        return [Instruction(IN_MEMORY[opcode], operands[0] if operands else "", tuple(operands[1:]), *guard)]
    result, *sources = operands if opcode != "bar.warp.sync" else ["", *operands]
    if opcode == "bra.uni":
        return [Instruction(None, result, (), *guard)]
    assert parts["guard"] is None, line
    if sources[0].startswith("{"):  # two numbers become one, or one becomes two
        return [Instruction(OPERATIONS["pack"], result, tuple(sources[0].strip("{}").split(", ")))]
    if result.startswith("{"):
        names = result.strip("{}").split(", ")
        return [
            Instruction(OPERATIONS[half], name, tuple(sources))
            for half, name in zip(("low", "high"), names, strict=True)
        ]
    return [Instruction(OPERATIONS[opcode], result, tuple(sources))]


def address_of(operand: str, registers: Registers) -> Any:
    """Return the address that `[register+number]` is."""
    name, _, offset = operand.strip("[]").partition("+")
    return registers[name].astype(np.int64) + int(offset or 0)


def run(text: str, registers: Registers, memory: WarpMemory | None = None) -> Registers:
    """Run a block of PTX in some warps. Return the registers afterwards.

    Args:
        text: the block.
        registers: those with an initial value, $0 and so on: arrays [warps, LANES].
        memory: that instructions access.
    """
    block = read(text)
    with np.errstate(all="ignore"):
        return run_from(0, block, block.numbers | registers, memory)


def run_from(at: int, block: Text, registers: Registers, memory: WarpMemory | None) -> Registers:
    """Run the instructions from the at-th on. Warps that branch differently part."""
    while at < len(block.instructions):
        operation, result, sources, guard, negated = block.instructions[at]
        at += 1
        if isinstance(operation, str):
            assert memory is not None, "memory is accessed"
            if operation == "copy":
                true = np.ones((WARPS, LANES), bool) if guard is None else registers[guard]
                memory.copy(address_of(result, registers), address_of(sources[0], registers), true)
            elif operation == "load":
                registers[result] = memory.load(address_of(sources[0], registers))
            else:
                memory.wait()
            continue
        if operation is not None:
            registers[result] = operation(*[registers[name] for name in sources])
            continue
        target = block.labels[result]
        if guard is None:
            at = target
            continue
        goes = registers[guard] ^ negated
        assert (goes == goes[:, :1]).all(), "threads of a warp branch differently, and the text says that they do not"
        if goes.all():
            at = target
        elif goes.any():
            there, here = (
                run_from(to, block, {name: of_warps(x, chosen) for name, x in registers.items()}, memory)
                for to, chosen in ((target, goes[:, 0]), (at, ~goes[:, 0]))
            )
            return {name: put_together(there[name], here[name], goes[:, 0]) for name in there.keys() & here.keys()}
    return registers


def of_warps(x: Any, chosen: Any) -> Any:
    return x[chosen] if np.ndim(x) else x


def put_together(there: Any, here: Any, goes: Any) -> Any:
    """Return a register of all warps, from those that went to a label and those that did not."""
    if not np.ndim(there) and not np.ndim(here):
        return there
    made = np.empty((len(goes), LANES), np.asarray(there).dtype)
    made[goes], made[~goes] = there, here
    return made


def of_threads(tile: Any) -> Any:
    """Return the numbers of a tile as its threads hold them, [numbers of a thread, WARPS, LANES].

    The tile is in the layout of an accumulator of a tensor-core instruction. A warp has 16 rows, of which a thread has
    the r-th and the r+8-th. Of these, it has two adjacent columns of each 8.
    """
    columns = tile.shape[1]
    parts = tile.reshape(WARPS, 2, 8, columns // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
    return parts.reshape(columns // 2, WARPS, LANES)


def of_tile(numbers: Any) -> Any:
    """Return the tile whose numbers threads hold, [ROWS, columns]."""
    parts = numbers.reshape(len(numbers) // 4, 2, 2, WARPS, 8, 4).transpose(3, 1, 4, 0, 5, 2)
    return parts.reshape(ROWS, len(numbers) * 2)


def run_on_tiles(
    text: str, constraints: str, args: list[Any], pack: int, memory: WarpMemory | None = None
) -> list[Any]:
    """Run a block of PTX on tiles, and return those that it writes.

    Args:
        text: the block, for `pack` numbers of a thread from each tile.
        constraints: of the block's registers. An input has the number of the output in whose register it is.
        args: a first tile [ROWS, columns], and what is as large when it is broadcast.
        pack: numbers of a thread that the block takes at a time.
        memory: that the block accesses.
    """
    names = constraints.split(",")
    is_written = [name.startswith("=") for name in names]
    places = [i if name in "frl" else int(name) for i, name in enumerate(names) if not is_written[i]]
    written = sum(is_written) // pack
    assert all(is_written[: written * pack]) and len(places) == pack * len(args), constraints
    shape = args[0].shape
    held = [of_threads(np.broadcast_to(x, shape)) for x in args]
    made: list[list[Any]] = [[] for _ in range(written)]
    for first in range(0, len(held[0]), pack):
        inputs = [number for tile in held for number in tile[first : first + pack]]
        registers = run(text, {f"${place}": number for place, number in zip(places, inputs, strict=True)}, memory)
        for i, numbers in enumerate(made):
            of_result = range(i * pack, (i + 1) * pack)
            numbers += [np.broadcast_to(registers[f"${at}"], (WARPS, LANES)) for at in of_result]
    return [of_tile(np.stack(numbers)) for numbers in made]
