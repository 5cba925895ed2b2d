"""What the assembly in kernels computes.

A text that a warp runs together, with a vote, is run (`ptx.py`). Of the others, each is known by its instructions;
another one is refused.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl

from .memory import AccessError
from .program import Machine
from .ptx import WarpMemory, of_threads, of_tile, run_on_tiles
from .tensor_core import read_product
from .values import Value, computed, value


def bytes_of(pairs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the low and the high byte of 16-bit numbers."""
    both = pairs.contiguous().view(torch.uint8).reshape(*pairs.shape, 2)
    return both[..., 0].contiguous(), both[..., 1].contiguous()


def unzip(pairs: Value) -> tuple[Value, ...]:
    low, high = bytes_of(pairs.data)
    return Value(low.view(torch.int8)), Value(high.view(torch.int8))


def to_fp8(x: Value) -> Value:
    return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)


def quotient(x: Value, divisor: Value, inverse: Value) -> Value:
    """The product with the inverse, within bounds, and corrected by its error."""
    product = Value((x.data * inverse.data).clamp(-512, 512))  # NaN stays NaN
    excess = multiply_add(product, divisor, -x)
    return multiply_add(-excess, inverse, product)


def fp8_to_float16(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.float8_e4m3fn).to(torch.float16)


def keys_to_float16(pairs: Value) -> tuple[Value, ...]:
    """A register has two adjacent pairs of numbers. The first result has both numbers of the first pair."""
    low, high = (fp8_to_float16(x) for x in bytes_of(pairs.data))
    return tuple(Value(torch.stack((low[:, i::2], high[:, i::2]), -1).reshape(low.shape)) for i in range(2))


def values_to_float16(pairs: Value) -> tuple[Value, ...]:
    """A register has pairs of two adjacent keys. The first result has the first number of each."""
    return tuple(Value(fp8_to_float16(x)) for x in bytes_of(pairs.data))


def multiply_add(a: Value, b: Value, c: Value) -> Value:
    product = a.data.to(torch.float64) * b.data.to(torch.float64)
    return Value((product + c.data.to(torch.float64)).to(torch.float32))


def reciprocal(number: Value) -> Value:
    return Value(1 / number.data)


def pairs_of_registers(registers: Value, to: torch.dtype) -> tuple[Value, ...]:
    """The 16-bit numbers of a thread's eight registers. The first result has those of the first four."""
    held = of_threads(registers.data.numpy())
    numbers = (
        np.stack([(held >> shift) & 0xFFFF for shift in (0, 16)], 1).astype(np.uint16).reshape(16, *held.shape[1:])
    )
    return tuple(Value(torch.from_numpy(of_tile(half).view(np.int16)).view(to)) for half in (numbers[:8], numbers[8:]))


def prefetch(address: Value) -> Value:
    """Nothing that a program could see."""
    return Value(torch.zeros(address.data.shape, dtype=torch.int32))


MEANINGS: dict[str, Callable[..., Any]] = {
    "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;": unzip,
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
    "mov.b32 $0, {low, high}; }": to_fp8,
    "{ .reg .f32 product, excess; mul.rn.f32 product, $1, $3; min.NaN.xorsign.abs.f32 product, product, 0f44000000; "
    "neg.f32 excess, $1; fma.rn.f32 excess, product, $2, excess; neg.f32 excess, excess; "
    "fma.rn.f32 $0, excess, $3, product; }": quotient,
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; "
    "}": keys_to_float16,
    "{ .reg .b16 even, odd; .reg .b32 both; prmt.b32 both, $2, 0, 0x3120; mov.b32 {even, odd}, both; "
    "cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd; }": values_to_float16,
    "fma.rn.f32 $0, $1, $2, $3;": multiply_add,
    "rcp.approx.ftz.f32 $0, $1;": reciprocal,
    "lg2.approx.f32 $0, $1;": lambda x: Value(torch.log2(x.data)),
    "cvt.rn.bf16x2.f32 $0, $2, $1;": lambda x: x.to(tl.bfloat16),
    "cvt.rn.f16x2.f32 $0, $2, $1;": lambda x: x.to(tl.float16),
    "prefetch.global.L2 [$1]; mov.u32 $0, 0;": prefetch,
    "mov.b32 $0, $1;": lambda x: Value(x.data.clone()),
}


MARK = (
    "{ .reg .b32 size; .reg .pred inside; mov.u32 size, %dynamic_smem_size; shl.b32 $0, $1, 10; "
    "setp.lt.u32 inside, $0, size; mov.u32 size, global_smem; add.u32 $0, $0, size; "
    "@inside st.shared.u32 [$0], $0; }"
)  # an address at each KiB


REGISTERS = " ".join(f"mov.b32 ${i}, ${8 + i};" for i in range(8))


def in_warps(*args: Value, text: str, constraints: str, pack: int, dtype: Any, memory: WarpMemory | None = None) -> Any:
    """What a text writes that a warp runs together, one tile or several. Its arguments are tiles."""
    numbers = [x.data.contiguous().numpy() for x in args]
    made = [torch.from_numpy(x) for x in run_on_tiles(text, constraints, numbers, pack, memory)]
    if not isinstance(dtype, tuple):
        (number,) = made
        return Value(number)
    return tuple(
        Value(x.view(torch.float32) if to is tl.float32 and x.dtype is torch.int32 else x)
        for x, to in zip(made, dtype, strict=True)
    )


class RunMemory:
    """What copies of 16 bytes to shared memory do, which warps wait for and read, without a barrier in memory."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def copy(self, into: Any, address: Any, guard: Any) -> None:
        for to, at in zip(into[guard], address[guard], strict=True):
            assert to % 16 == 0 and at % 16 == 0, (to, at)
            part = self.machine.local.warps.program.part(np.array([to, to + 15]), torch.uint8)
            line = (int(to) - part.allocation.address) // 16
            if part.allocation.arriving.any(np.array([line])):
                raise AccessError("two copies to the same place are under way")
            part.allocation.arriving.set(np.array([line]), 1)
            self.machine.local.warps.runs.append((part.allocation, line, self.machine.memory.bytes_at(int(at))))

    def wait(self) -> None:
        for allocation, line, numbers in self.machine.local.warps.runs:
            allocation.arriving.set(np.array([line]), 0)
            allocation.lines[line] = torch.from_numpy(numbers)
        self.machine.local.warps.runs = []

    def load(self, address: Any) -> Any:
        part = self.machine.local.warps.program.part(address, torch.int16)
        at = address - part.allocation.address
        if part.allocation.arriving.any(np.unique(at // 16)):
            raise AccessError("shared memory is read while it is copied to")
        return part.allocation.bytes.view(torch.int16).numpy()[at // 2].astype(np.int32)


def inline_asm_elementwise(
    machine: Machine, text: str, constraints: str, args: Any, *, dtype: Any, is_pure: bool, pack: int
) -> Any:
    """Compute what the text of some assembly says. A compiler may move it if it is pure."""
    args = [value(x) for x in args]
    if "wgmma" in text:
        return machine.multiply(*read_product(text, constraints, args))
    if "st.shared" in text:
        assert " ".join(text.split()) == MARK, text
        machine.mark_shared_memory()
        return args[0]
    if text == REGISTERS:
        to = {tl.bfloat16: torch.bfloat16, tl.float16: torch.float16}[dtype[0]]
        meaning = partial(pairs_of_registers, to=to)
    elif (known := MEANINGS.get(" ".join(text.split()))) is not None:
        meaning = known
    else:
        meaning = partial(
            in_warps, text=text, constraints=constraints, pack=pack, dtype=dtype, memory=RunMemory(machine)
        )
    if is_pure:
        return computed(meaning)(*args)
    for x in args:
        x.take()
    return meaning(*args)
