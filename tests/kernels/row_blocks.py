"""Run the kernel that finds the order of prompts' row blocks, and their cuts, in Triton's interpreter."""

import itertools
from collections.abc import Sequence

import torch

from quire.kernels.hopper.schedule import FIELDS, NO_END, PLACES, RowBlock, hopper_schedule_kernel
from quire.kernels.scheduler import Lengths

CAUSAL = (NO_END.value // 2 + 1, 0)


def row_blocks_of(
    lens: Sequence[tuple[int, int]],
    num_programs: int,
    head_blocks: int,
    *,
    cut_slots: int = 0,
    window: tuple[int, int] = CAUSAL,
    max_decode_queries: int = 0,
    offsets: Sequence[int] | None = None,
    mixed: bool = True,
    block_t: int = 16,
    block_n: int = 64,
) -> tuple[list[RowBlock], int, int]:
    """Return the row blocks of a batch in the order of places, how many are of single ones, and the back's programs."""

    def int32(numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    starts = int32([0, *itertools.accumulate(queries for queries, _ in lens)])
    most = sum(-(-queries // block_t) for queries, _ in lens) + cut_slots // head_blocks + 1
    places, summary = torch.full((most, FIELDS.value), -1, dtype=torch.int32), int32([-1] * 3)
    planned = torch.zeros(len(lens), 3, dtype=torch.int32)
    lengths = Lengths(int32([n for _, n in lens]), starts, None if offsets is None else int32(offsets), None, None)
    hopper_schedule_kernel[-(-most // PLACES.value),](
        places, summary, planned, lengths, *window, len(lens), max_decode_queries, num_programs, head_blocks, cut_slots,
        most, int(mixed), block_t, block_n, TOKENS=0, PDL=False,
    )  # fmt: skip
    count, num_singles, from_back = summary.tolist()
    assert (places[count:] == -1).all()
    ends = (*(n for _, n in lens),), (*starts.tolist()[1:],), tuple(offsets or (0,) * len(lens))
    assert (*map(tuple, planned.T.tolist()),) == ends
    return [RowBlock(*place[: len(RowBlock._fields)]) for place in places[:count].tolist()], num_singles, from_back
