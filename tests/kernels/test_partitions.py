"""The host, which sizes the grid, and the kernel, which cuts, find the shortest partition by one formula."""

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from quire.dispatch.config import CostModel
from quire.dispatch.tree_file import GENERIC, constants, load_tree
from quire.kernels.split_kv.choice import min_partition_tiles
from quire.kernels.split_kv.launch import NEVER
from quire.kernels.split_kv.schedule import Schedule, min_partition_units


@triton.jit
def min_partition_kernel(
    mean_ptr, out_ptr, combine_cost,
    MIN_SPLIT_TILES: tl.constexpr, TWO_LEVEL_DISCOUNT: tl.constexpr, TWO_LEVEL_MIN_TILES: tl.constexpr,
):  # fmt: skip
    S: tl.constexpr = Schedule(1, 16, 16, 32, False, 0, MIN_SPLIT_TILES, TWO_LEVEL_DISCOUNT, TWO_LEVEL_MIN_TILES)
    i = tl.program_id(0)
    shortest = min_partition_units(tl.load(mean_ptr + i), combine_cost, S)
    tl.store(out_ptr + i, (shortest + 0.5).to(tl.int32))


@pytest.mark.triton
@pytest.mark.parametrize("two_level_min_tiles", [48, 96, NEVER])
@pytest.mark.parametrize("chosen_by_caller", [False, True])
def test_host_and_kernel_agree_on_the_shortest_partition(device, two_level_min_tiles, chosen_by_caller):
    costs = CostModel(**constants(load_tree(GENERIC)))
    combine_cost = 0.0 if chosen_by_caller else costs.combine_cost
    means = [whole + part for whole, part in product((*range(9), 47, 48, 49, 96, 97, 1000, 8192), (0.0, 0.37))]
    out = torch.empty(len(means), dtype=torch.int32, device=device)
    min_partition_kernel[(len(means),)](
        torch.tensor(means, device=device), out, combine_cost,
        costs.min_split_tiles, costs.two_level_combine_discount, two_level_min_tiles,
    )  # fmt: skip
    expected = [min_partition_tiles(mean, combine_cost, costs, two_level_min_tiles) for mean in means]
    assert out.clamp(min=1).tolist() == expected
