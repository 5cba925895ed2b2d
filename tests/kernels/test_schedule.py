"""The schedule of the split-KV kernel: how long partitions are, and that host and device say so by one formula."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

import quire
from quire.dispatch import tree
from quire.dispatch.device import device_properties
from quire.kernels.split_kv.choice import min_partition_tiles
from quire.kernels.split_kv.launch import NEVER
from quire.kernels.split_kv.schedule import Schedule, min_partition_units, partition_size

pytestmark = pytest.mark.one_triton

SPEC = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16)


@triton.jit
def shortest_kernel(
    out_ptr, means_ptr, combine_cost,
    MIN_SPLIT_TILES: tl.constexpr, TWO_LEVEL_DISCOUNT: tl.constexpr, TWO_LEVEL_MIN_TILES: tl.constexpr,
):  # fmt: skip
    S: tl.constexpr = Schedule(1, 16, 64, 32, False, 0, MIN_SPLIT_TILES, TWO_LEVEL_DISCOUNT, TWO_LEVEL_MIN_TILES)
    pid = tl.program_id(0)
    tl.store(out_ptr + pid, min_partition_units(tl.load(means_ptr + pid), combine_cost, S))


@pytest.mark.triton
@pytest.mark.parametrize("two_level_min_tiles", [30, 700, NEVER])
@pytest.mark.parametrize("combine_cost", [0.0, 0.29, 3.0])
def test_host_and_device_agree_on_the_shortest_partition(combine_cost, two_level_min_tiles, device):
    costs = tree.cost_model(SPEC, device_properties(torch.device(device)))
    costs = dataclasses.replace(costs, two_level_combine_discount=0.4)  # 1 in some trees, which tells nothing
    edges = {costs.min_split_tiles, two_level_min_tiles} - {NEVER}
    means = {0.37, 1.0, 1.37, 2.0, 3.0, 7.5, 33.3, 100.0, 1024.0, 5000.0, 65536.0}
    means |= {edge + more for edge in edges for more in (-1, -0.5, 0, 0.5, 1) if edge + more >= 1}
    found = torch.zeros(len(means), device=device)
    shortest_kernel[len(means),](
        found, torch.tensor(sorted(means), device=device), combine_cost, costs.min_split_tiles,
        costs.two_level_combine_discount, two_level_min_tiles,
    )  # fmt: skip
    # The kernel adds one half and truncates where it uses the number, and is never below one unit of the row.
    on_device = [max(1, int(shortest + 0.5)) for shortest in found.tolist()]
    on_host = [min_partition_tiles(mean, combine_cost, costs, two_level_min_tiles) for mean in sorted(means)]
    assert dict(zip(sorted(means), on_device, strict=True)) == dict(zip(sorted(means), on_host, strict=True))


@triton.jit
def size_kernel(out_ptr, units, num_seqs, num_partitions, combine_cost, MIN_SPLIT_TILES: tl.constexpr):
    S: tl.constexpr = Schedule(1, 16, 64, 32, False, 0, MIN_SPLIT_TILES, 1.0, 1 << 30)
    tl.store(out_ptr, partition_size(units * num_seqs, units, num_seqs, num_partitions, combine_cost, S))


@pytest.mark.triton
@pytest.mark.parametrize(
    ("units", "num_seqs", "num_partitions", "combine_cost", "min_split_tiles", "size"),
    [
        (128, 16, 33, 0.02, 0, 64),  # 63 units would fill 33 partitions, of which most would cross sequences
        (128, 16, 33, 0.0, 0, 63),  # the caller chose how many
        (120, 16, 33, 0.02, 0, 60),  # 59
        (116, 16, 33, 0.02, 0, 58),  # 57
        (60, 16, 33, 0.02, 0, 30),
        (56, 16, 33, 0.02, 0, 28),
        (56, 16, 34, 0.02, 0, 27),  # 28 is more than a thirty-second longer
        (56, 16, 34, 0.02, 4, 28),  # four units more are allowed
        (128, 16, 40, 0.02, 0, 52),  # 64 is too long
        (31, 64, 62, 0.02, 0, 32),  # 62 is too long
        (31, 64, 63, 0.02, 1, 32),
        (31, 64, 64, 0.02, 0, 31),
        (32, 256, 33, 0.02, 4, 249),  # 256 are whole sequences, and more than four units longer
        (512, 32, 33, 0.02, 4, 497),  # 512 are a whole one
        (32, 128, 33, 0.02, 4, 128),
    ],
)
def test_partitions_end_where_equal_sequences_do(
    units, num_seqs, num_partitions, combine_cost, min_split_tiles, size, device
):
    found = torch.zeros(1, dtype=torch.int32, device=device)
    size_kernel[1,](found, units, num_seqs, num_partitions, combine_cost, min_split_tiles)
    assert found.item() == size


@pytest.mark.triton
def test_a_plan_and_its_kernel_are_given_the_same_constants(device):
    """The host cuts by the fields of the launch; the kernel by its constexprs."""
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    batch = quire.Batch(torch.zeros(1, 8192, dtype=torch.int32, device=device), starts)
    launch = quire.plan(SPEC, batch, max_query_len=1, max_seq_len=1 << 17).launch
    constexprs, costs = launch.constexprs(), launch.costs
    assert launch.name == "split_kv"
    assert constexprs["MIN_SPLIT_TILES"] == launch.min_split_tiles
    assert constexprs["TWO_LEVEL_DISCOUNT"] == costs.two_level_combine_discount
    assert constexprs["TWO_LEVEL_MIN_TILES"] == launch.two_level_min_tiles
