"""Predict how long a launch takes, from its bytes, its matrix products, the rounds of its programs, and the combine.

A program attends to items one after the other: row blocks, or parts of their keys. An item takes some time to begin,
and some for each tile of keys. There are as many programs at once as the device holds. They take no less than tensor
cores take to multiply, nor than TMA takes to bring tiles. Memory is read meanwhile: of both times, the longer counts
most. Partials are combined later.

The numbers of a variant are fitted by `quire tune fit` to what `quire tune sweep` measured.
"""

import math
from typing import NamedTuple

POWER, POWER_ALONE = 2.0, 1.5  # of the norm by which the longer of two times counts most; of one program an SM


class Work(NamedTuple):
    """What a launch does, as far as its time depends on it."""

    slots: int  # programs that the device holds at once
    sms: int
    programs: float
    items: float  # that all programs begin
    tiles: float  # of all items
    longest: float  # tiles of the program that has the most
    nbytes: float  # visible keys and values once, queries and outputs
    partials: float = 0.0  # of the row block that has the most
    partial_bytes: float = 0.0  # written, and read again
    loads: float = 0.0  # µs that an SM takes for the loads of a tile at least
    width: float = 1.0  # of a tile, over that for which the numbers are


class Numbers(NamedTuple):
    """Times of a variant in µs."""

    launch: float  # of a launch that does nothing
    item: float  # to begin an item
    tile: float  # from one tile to the next of a program, if nothing else is a limit
    sm_tile: float  # of an SM for each tile, if its programs keep tensor cores busy
    megabyte: float  # to load 2^20 bytes from memory
    combine: float  # of a launch that has partials, beyond one without
    partial: float  # to combine one more partial of a row block
    partial_megabyte: float  # to write and read 2^20 bytes of partials


def times(numbers: Numbers, factors: Numbers) -> Numbers:
    """Return each number times its factor."""
    return Numbers(*(number * factor for number, factor in zip(numbers, factors, strict=True)))


def micros(work: Work, numbers: Numbers) -> float:
    """Return the µs that a launch is predicted to take."""
    launch, item, tile, sm_tile, megabyte, combine, partial, partial_megabyte = numbers
    slots, sms, programs, items, tiles, longest, nbytes, partials, partial_bytes, loads, width = work
    if programs <= 0:
        return launch
    rounds, share, mean = programs / slots, programs / sms, tiles / programs
    # Equal programs end together, so the last round takes as long as the others, and the SM that has the most programs
    # counts. Of unequal ones, others fill the gaps.
    equal = min(1.0, mean / longest) if longest else 0.0
    rounds, share = (number + (math.ceil(number) - number) * equal for number in (rounds, share))
    path = max(longest, rounds * mean) * width * tile + max(1.0, rounds) * items / programs * item
    products, memory = share * mean * max(width * sm_tile, loads), nbytes * megabyte / 1048576
    power = POWER if slots > sms else POWER_ALONE  # one program waits for bytes before it multiplies
    time = launch + (max(path, products) ** power + memory**power) ** (1 / power)
    if partials:
        time += combine + partials * partial + partial_bytes * partial_megabyte / 1048576
    return time
