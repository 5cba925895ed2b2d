"""A simulated program: warps that run by turns, barriers, asynchronous copies, and products of tensor cores.

One thread of Python runs at a time. Where a GPU may interleave warps in any way, a random number chooses: at each
barrier it is either another warp's turn, or a copy arrives. So each seed is another order of events, and the same
seed gives the same one.
"""

import itertools
import queue
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from .memory import UNWRITTEN, AccessError, Allocation, GlobalMemory, Tile
from .tensor_core import COLUMNS, Matrix, Part
from .values import TORCH_DTYPES, Load, Value


class Deadlock(Exception):
    """Every warp waits for a barrier, and no copy is under way."""


class Stopped(BaseException):
    """Another warp has failed."""


class Barrier:
    """An mbarrier."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = 0  # that are still expected
        self.phase = 0

    def arrive(self, count: int = 1, expected_bytes: int = 0) -> None:
        self.bytes += expected_bytes
        self.pending -= count
        if self.pending < 0:
            raise AccessError(f"more than {self.count} arrivals at a barrier")
        self.complete()

    def receive(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        self.complete()

    def complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1

    def is_over(self, parity: int) -> bool:
        """Return whether the last phase of this parity is over."""
        return self.phase % 2 != parity


class Copy(NamedTuple):
    """A copy by TMA that is under way."""

    into: Tile
    numbers: torch.Tensor
    barrier: Barrier


class RowCopies(NamedTuple):
    """The copies of 16 bytes of a function's threads since they last let copies arrive at a barrier."""

    warps: "Warps"
    parts: list[tuple[Tile, torch.Tensor]]
    barrier: Barrier


class Product(NamedTuple):
    """A product that tensor cores compute, with what shared memory held when it began."""

    tiles: tuple[tuple[Any, torch.Tensor], ...]
    results: tuple["Pending", ...]


class Pending(Value):
    """The result of a product, which must not be read before a wait."""

    def __init__(self, data: torch.Tensor) -> None:
        self.finished = False
        self.unfinished_data = data
        self.dtype = tl.float32

    @property
    def data(self) -> torch.Tensor:
        if not self.finished:
            raise AccessError("the result of a product is read before it was waited for")
        return self.unfinished_data


NUMBERS = itertools.count(1)
COPIED = 255  # in place of the warps that stored: row copies wrote there, which a fence of any warps covers


class Warps:
    """Warps that run one function: a partition of `warp_specialize`."""

    def __init__(self, program: "Program", number: int, num_warps: int, function: Callable[[], None]) -> None:
        self.program, self.number, self.num_warps, self.function = program, number, num_warps, function
        self.products: list[Product] = []
        self.loads: list[Load] = []  # from places that TMA writes, not all complete
        self.runs: list[tuple[Allocation, int, np.ndarray]] = []  # copies of 16 bytes to lines, which none waited for
        self.row_copies: list[tuple[Tile, torch.Tensor]] = []  # of 16 bytes, which do not yet arrive at a barrier
        self.id = next(NUMBERS)
        self.stores: list[Any] = []  # to global memory, since their last barrier
        self.stores_before_barrier: list[Any] = []  # since their last release
        self.acquired = 0  # releases of which they see the stores
        self.ready: Callable[[], bool] = lambda: True
        self.turn = threading.Lock()  # is released when it is these warps' turn
        self.turn.acquire()
        self.over = False

    def check_loads(self) -> None:
        """Raise if a load is not complete. What these warps do next may let TMA overwrite the place before that."""
        self.loads = [load for load in self.loads if not load.complete]
        if self.loads:
            raise AccessError(
                f"nothing has waited for a load of a tile of {self.loads[0].shape}, and TMA may now overwrite it"
            )

    def start(self) -> None:
        """Begin to run, in a thread of Python that waits for its turn."""
        if IDLE:
            IDLE.pop().put(self)
        else:
            Worker(self).start()

    def run(self) -> None:
        machine = self.program.machine
        machine.local.warps = self
        self.turn.acquire()
        try:
            if machine.failure is None:
                self.function()
                if self.products:
                    raise AccessError("products are not waited for")
        except Stopped:
            pass
        except BaseException as failure:
            machine.failure = machine.failure or failure
        self.over = True
        machine.next_turn()


class Worker(threading.Thread):
    """A thread that runs one function after the other: to start one takes longer than many a function."""

    def __init__(self, warps: Warps) -> None:
        super().__init__(daemon=True)
        self.work: queue.SimpleQueue[Warps] = queue.SimpleQueue()
        self.work.put(warps)

    def run(self) -> None:
        while True:
            self.work.get().run()
            IDLE.append(self.work)


IDLE: list[queue.SimpleQueue[Warps]] = []  # of workers that wait for work


class Program:
    """A program of the grid."""

    def __init__(self, machine: "Machine", ids: tuple[int, ...]) -> None:
        self.machine, self.ids = machine, ids
        self.allocations: list[Allocation] = []
        self.free_address = 1024  # where the next allocation begins
        self.is_marked = False  # each KiB of an allocation begins with its address
        self.barriers: dict[tuple[int, int], Barrier] = {}

    def barrier(self, tile: Tile) -> Barrier:
        return self.barriers[id(tile.allocation), tile.base]

    def part(self, addresses: Any, dtype: torch.dtype) -> Part:
        """Return the numbers at some addresses, of one allocation."""
        for allocation in self.allocations:
            at = addresses - allocation.address
            if at.min() >= 0 and at.max() < len(allocation.bytes):
                return Part(allocation, at, dtype)
        raise AccessError(f"a product reads addresses {addresses.min()} to {addresses.max()}, of no allocation")


class Machine:
    """A GPU that runs some programs at a time."""

    def __init__(self, seed: int, grid: tuple[int, ...], memory: GlobalMemory) -> None:
        self.random = random.Random(seed)
        self.grid, self.memory = grid, memory
        self.warps: list[Warps] = []
        self.copies: list[Copy | RowCopies] = []
        self.failure: BaseException | None = None
        self.local = threading.local()
        self.all_over = threading.Semaphore(0)
        self.hurry = self.random.random()  # how soon copies arrive
        memory.running_warps = lambda: getattr(self.local, "warps", None)

    def run(self, programs: list[tuple[Program, Callable[[], None]]]) -> None:
        """Run programs, each from a function for its first warps, until all their warps are over."""
        self.warps = [Warps(program, 0, 4, function) for program, function in programs]
        for warps in self.warps:
            warps.start()
        self.next_turn()
        self.all_over.acquire()
        if self.failure is not None:
            raise self.failure

    def next_turn(self) -> None:
        """Give a turn to some warps that can go on; before that, let some copies arrive."""
        while True:
            left = [warps for warps in self.warps if not warps.over]
            if not left:
                self.all_over.release()
                return
            able = left if self.failure is not None else [warps for warps in left if warps.ready()]
            if self.copies and (not able or self.random.random() < self.hurry):
                self.arrive(self.take_copy())
            elif able:
                self.random.choice(able).turn.release()
                return
            else:
                self.failure = Deadlock(f"{len(left)} functions wait for barriers")

    def take_copy(self) -> Copy | RowCopies:
        """Choose a copy that arrives next. Copies of the same threads arrive in order."""
        chosen = self.random.choice(self.copies)
        if isinstance(chosen, RowCopies):
            chosen = next(c for c in self.copies if isinstance(c, RowCopies) and c.warps is chosen.warps)
        self.copies = [copy for copy in self.copies if copy is not chosen]
        return chosen

    def arrive(self, copy: Copy | RowCopies) -> None:
        if isinstance(copy, RowCopies):
            for into, numbers in copy.parts:
                into.allocation.arriving.set(into.place().lines, 0)
                into.write(numbers)
                into.allocation.unfenced.set(into.place().lines, COPIED)
            copy.barrier.arrive(32 * copy.warps.num_warps)
            return
        copy.into.allocation.arriving.set(copy.into.place().lines, 0)
        copy.into.write(copy.numbers)
        copy.barrier.receive(copy.numbers.numel() * copy.into.itemsize)

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let other warps run, until these are chosen again and `ready`."""
        own = self.local.warps
        own.ready = ready
        self.next_turn()
        own.turn.acquire()
        if self.failure is not None:
            raise Stopped

    # What follows are the instructions of a program.

    def program_id(self, axis: int) -> Value:
        return Value(torch.tensor(self.local.warps.program.ids[int(axis)], dtype=torch.int32))

    def num_programs(self, axis: int) -> Value:
        return Value(torch.tensor(self.grid[int(axis)], dtype=torch.int32))

    def num_warps(self) -> int:
        return self.local.warps.num_warps

    def warp_specialize(self, functions: Any, num_warps: Any, registers: Any) -> None:
        """Run functions at the same time, the first by the warps that call."""
        own = self.local.warps
        added = [
            Warps(own.program, i + 1, warps, lambda f=f, arguments=arguments: f(*arguments))
            for i, ((f, arguments), warps) in enumerate(zip(functions[1:], num_warps, strict=True))
        ]
        self.warps += added
        for warps in added:
            warps.start()
        first, arguments = functions[0]
        first(*arguments)
        self.pause(lambda: all(warps.over for warps in added))

    def barrier(self) -> None:
        """Let all threads of these warps wait for each other."""
        own = self.local.warps
        own.stores_before_barrier += own.stores
        own.stores = []

    def atomic_add(self, pointer: Value, added: Any, mask: Any = None, sem: str = "") -> Value:
        if sem != "relaxed":  # it is the order of such operations that matters
            self.pause()
        return self.memory.atomic_add(pointer, added, mask, sem)

    def allocate_shared_memory(self, dtype: tl.dtype, shape: Any, layout: Any) -> Tile:
        shape = [int(size) for size in shape]
        size = dtype.primitive_bitwidth // 8
        for extent in shape:
            size *= extent
        program = self.local.warps.program
        allocation = Allocation(size, lambda: self.local.warps, program.free_address)
        program.free_address += -(-size // 1024) * 1024
        if program.is_marked:
            allocation.mark()
        program.allocations.append(allocation)
        return Tile(allocation, dtype, shape, layout)

    def mark_shared_memory(self) -> None:
        """Let each KiB of what is allocated from now on begin with its address."""
        self.local.warps.program.is_marked = True

    def fence_async_shared(self) -> None:
        own = self.local.warps
        own.loads.clear()
        for allocation in own.program.allocations:
            allocation.unfenced.clear(own.number + 1)
            allocation.unfenced.clear(COPIED)

    # mbarrier

    def init(self, tile: Tile, count: int) -> None:
        self.local.warps.program.barriers[id(tile.allocation), tile.base] = Barrier(int(count))

    def expect(self, tile: Tile, num_bytes: int) -> None:
        self.local.warps.check_loads()
        self.local.warps.program.barrier(tile).arrive(expected_bytes=int(num_bytes))

    def arrive_at(self, tile: Tile, count: int = 1) -> None:
        self.local.warps.check_loads()
        self.local.warps.program.barrier(tile).arrive(int(count))
        if self.random.random() < 0.5:
            self.pause()

    def wait(self, tile: Tile, phase: Any, pred: Any = True) -> None:
        if not pred:
            return
        barrier, parity = self.local.warps.program.barrier(tile), int(phase)
        self.pause(lambda: barrier.is_over(parity))

    # TMA

    def tma_load(self, desc: Any, coordinates: Any, barrier: Tile, into: Tile) -> None:
        if (
            list(desc.block_shape) != list(into.shape)
            or desc.layout.swizzle_byte_width != into.layout.swizzle_byte_width
        ):
            raise AccessError(f"a box of {desc.block_shape} is loaded into a tile of {into.shape}")
        if desc.extents != desc.block_shape:  # TMA writes rows of [1, columns], however many it loads
            rows, columns = desc.extents[0] * desc.extents[1], desc.extents[2]
            if into.first[0] + rows > into.extent[0]:
                raise AccessError(f"{rows} rows are loaded into a tile of {into.extent}")
            into = into.part(shape=[rows, 1, columns])
        into.check_fenced()
        self.local.warps.check_loads()
        into.allocation.written_by_tma.set(into.place().lines, 1)
        numbers = desc.box([int(c) for c in coordinates]).reshape(into.shape)
        begin_copy(into)
        self.copies.append(Copy(into, numbers, self.local.warps.program.barrier(barrier)))

    # Copies of 16 bytes

    def copy_async(self, into: Tile, pointer: Value, mask: Any) -> None:
        numbers = self.memory.load(pointer, mask, 0).data
        begin_copy(into)
        self.local.warps.row_copies.append((into, numbers))

    def arrive_after_copies(self, barrier: Tile, increment_count: bool) -> None:
        """Let every thread arrive at a barrier when all its copies are complete: at once if there are none."""
        assert not increment_count
        own = self.local.warps
        if not own.row_copies:
            own.program.barrier(barrier).arrive(32 * own.num_warps)
            if self.random.random() < 0.5:
                self.pause()
            return
        self.copies.append(RowCopies(own, own.row_copies, own.program.barrier(barrier)))
        own.row_copies = []

    # Tensor cores

    def warpgroup_mma(self, a: Any, b: Tile, acc: Value, use_acc: Any = True, is_async: bool = False) -> Value:
        for tile in (a, b):
            if isinstance(tile, Tile):
                tile.check_fenced()
            else:
                tile.take()
        left, right = (x.read() if isinstance(x, Tile) else x.data for x in (a, b))
        held = tuple((x, data) for x, data in ((a, left), (b, right)) if isinstance(x, Tile))
        if left.dtype != right.dtype:
            raise AccessError(f"a product of {left.dtype} and {right.dtype}")
        product = left.to(torch.float32) @ right.to(torch.float32)
        if bool(use_acc):
            product = product + (acc.unfinished_data if isinstance(acc, Pending) else acc.take())
        result = Pending(product)
        self.local.warps.products.append(Product(held, (result,)))
        if not is_async:
            self.warpgroup_mma_wait(0, [result])
        return result

    def multiply(self, accs: list[Any], products: list[tuple[Any, Matrix]]) -> tuple[Pending, ...]:
        """Add products to accumulators, which are next to each other, as one group.

        Args:
            accs: accumulators.
            products: left operands, and right ones.
        """
        total = torch.cat([acc.unfinished_data if isinstance(acc, Pending) else acc.take() for acc in accs], 1).clone()
        held = []
        for operands in products:
            numbers = []
            for operand in operands:
                if isinstance(operand, Matrix):
                    part = self.local.warps.program.part(operand.at, operand.dtype)
                    part.check_fenced()
                    numbers.append(part.read())
                    held.append((part, numbers[-1]))
                else:
                    numbers.append(operand.take())
            left, right = (number.to(torch.float32) for number in numbers)
            total[:, : right.shape[1]] += left @ right
        results = tuple(Pending(part) for part in total.split(COLUMNS, 1))
        self.local.warps.products.append(Product(tuple(held), results))
        return results

    def warpgroup_mma_wait(self, number: Any, deps: Any) -> Any:
        """Finish all products but the last few. Their operands must not have changed since they began."""
        self.pause()
        own = self.local.warps
        while len(own.products) > int(number):
            product = own.products.pop(0)
            for tile, held in product.tiles:
                if not same_bits(tile.read(), held):
                    raise AccessError(f"a tile of {tile.shape} changed while tensor cores read it")
            for result in product.results:
                result.finished = True
        return deps[0] if len(deps) == 1 else tuple(deps)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def begin_copy(into: Tile) -> None:
    """Mark a tile as one that a copy will write. Until then its contents are undefined."""
    if into.allocation.arriving.any(into.place().lines):
        raise AccessError("two copies to the same place are under way")
    into.write(
        torch.full((*into.shape, into.itemsize), UNWRITTEN, dtype=torch.uint8)
        .view(TORCH_DTYPES[into.dtype])
        .squeeze(-1)
    )
    into.allocation.arriving.set(into.place().lines, 1)
