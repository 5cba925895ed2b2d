"""What targets without wgmma get from the portable kernel: shared memory, layouts of tiles, and full-tile loops."""

from itertools import product

import pytest
import torch
import triton

import quire
from quire.dispatch.config import KernelConfig, padded
from quire.dispatch.request import Bounds, Options, Request
from quire.kernels.portable.launch import PortableLaunch
from quire.plan import decide
from quire.targets import TARGETS, Launch
from tests.compile import loops
from tests.extended import extended

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

MMA_SYNC = ("sm80", "sm86", "sm89", "sm120")
LLAMA, WIDE, NARROW = (
    {"num_q_heads": q, "num_kv_heads": kv, "head_dim": dim} for q, kv, dim in ((32, 8, 128), (16, 8, 256), (32, 8, 64))
)
PROMPT, CHUNK = (1, 4096, 4096, 4096), (1, 64, 16384, 64)  # sequences, queries and keys of each, tokens
DECODE, DRAFTS = (16, 1, 2048, 16), (32, 8, 4096, 256)
MIXED = (34, 512, 4096, 1056)


def launch_of(heads: dict, batch: tuple[int, int, int, int], **options) -> Launch:
    return Launch(quire.AttentionSpec(**heads), *batch, options=tuple(options.items()))


def decided(target: str, heads: dict, batch: tuple[int, int, int, int]) -> PortableLaunch:
    num_seqs, *bounds = batch
    request = Request(quire.AttentionSpec(**heads), num_seqs, True, Bounds(*bounds), TARGETS[target].properties)
    launch, _ = decide(request, Options(kernel="portable"))
    assert isinstance(launch, PortableLaunch)
    return launch


def test_targets_without_wgmma_and_tensor_memory_have_mma_sync_alone():
    assert [name for name, target in TARGETS.items() if target.properties.has_mma_sync] == list(MMA_SYNC)


@pytest.mark.parametrize(
    ("target", "heads", "batch", "tile"),
    [
        ("sm80", LLAMA, DECODE, (16, 64, 4, 3)),
        extended("sm89", LLAMA, DRAFTS, (32, 64, 4, 3)),
        extended("sm120", LLAMA, PROMPT, (64, 64, 4, 2)),
        extended("sm89", WIDE, PROMPT, (64, 32, 4, 3)),  # with a tile more it would exceed 99 KB
        extended("sm80", WIDE, PROMPT, (128, 64, 8, 2)),
        extended("sm86", NARROW, PROMPT, (64, 128, 4, 3)),
        extended("sm89", LLAMA | {"kv_dtype": torch.float8_e4m3fn}, DECODE, (16, 128, 4, 3)),
        extended("sm80", LLAMA | {"kv_dtype": torch.float8_e4m3fn}, PROMPT, (64, 32, 4, 3)),
        extended("sm80", LLAMA | {"kv_dtype": torch.int8}, PROMPT, (64, 32, 4, 3)),
    ],
)
def test_shared_memory_is_counted_as_the_compiler_allocates_it(target, heads, batch, tile):
    """One tile is in registers while it is multiplied."""
    wide = padded(heads["head_dim"])
    config = KernelConfig(*tile, True, 1, wide, wide)
    launch = launch_of(heads, batch, config=config)
    properties = TARGETS[target].properties
    counted = config.shared_memory(launch.spec, properties)
    assert counted <= properties.shared_memory
    kernel = next(k for k in launch.compile(TARGETS[target])[1] if k.kernel == "portable_kernel")
    room = 1024 if launch.spec.kv_dtype is launch.spec.dtype else counted  # conversions of int8 take fewer stages
    assert counted - room <= kernel.shared <= counted, (kernel, counted)


@pytest.mark.parametrize("heads", [LLAMA, WIDE], ids=["128", "256"])
def test_cards_with_99_kb_have_a_tile_in_flight_while_one_is_multiplied(heads):
    for target, batch in product(MMA_SYNC[1:], (DECODE, DRAFTS, CHUNK)):
        assert decided(target, heads, batch).config.num_stages >= 3


@pytest.mark.parametrize(
    ("target", "heads", "batch"),
    [
        ("sm80", LLAMA, CHUNK),
        extended("sm80", LLAMA, PROMPT),
        extended("sm89", WIDE, PROMPT),
        extended("sm80", WIDE, PROMPT),
        extended("sm120", WIDE, PROMPT),
    ],
)
def test_warps_have_rows_of_their_own(target, heads, batch, assembled):
    """Then no product is computed twice, and a tile's probabilities and maxima pass through no shared memory.

    One barrier follows the wait for a tile, and one comes before its buffer is written again. In the loop with masks,
    addresses of keys and of values may pass through shared memory, each after a barrier (Triton 3.9.0).
    """
    plan, kernels = launch_of(heads, batch).compile(TARGETS[target])
    code = next(code for code in assembled if "portable_kernel" in code["ptx"])
    config, dim = plan.launch.config, heads["head_dim"]
    products = config.block_m * config.block_n * 2 * dim // (16 * 8 * 16) // config.num_warps
    found = loops.attending(code)
    assert len(found) == 2 and plan.launch.full_tile_loop
    for loop, addresses in zip(found, (2, 0), strict=True):
        opcodes = [op.split(".")[0] for op in loop]
        print(loops.describe(loop))
        assert opcodes.count("HMMA") == products and opcodes.count("STS") <= addresses
        assert sum(op.startswith("BAR.SYNC") for op in loop) <= 3 + 2 * addresses
    masked, full = (loops.count_kinds(loop)["integers and branches"] for loop in found)
    assert full < 0.8 * masked


def test_a_second_launch_combines_tall_partials():
    chunk = decided("sm80", LLAMA, CHUNK)
    assert chunk.has_combine_launch and chunk.partial_rows >= 64
    assert not decided("sm80", LLAMA, (1, 4, 16384, 4)).has_combine_launch


def test_an_sm_holds_a_program_of_each_part_of_a_mixed_batch():
    plan, kernels = launch_of(LLAMA, MIXED).compile(TARGETS["sm80"])
    (attention,) = (kernel for kernel in kernels if kernel.kernel == "portable_kernel")
    assert plan.launch.decode.config.block_m == 16 < plan.launch.config.block_m
    assert attention.occupancy == 2, "both parts use the same shared memory"
