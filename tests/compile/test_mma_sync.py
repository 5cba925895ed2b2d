"""What targets without wgmma get from the portable kernel: shared memory, layouts of tiles, and full-tile loops."""

import pytest
import triton

import quire
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
    ("target", "heads", "batch"),
    [
        extended("sm80", LLAMA, PROMPT),
        extended("sm89", WIDE, PROMPT),
        ("sm80", WIDE, PROMPT),
        extended("sm120", WIDE, PROMPT),
    ],
)
def test_warps_have_rows_of_their_own(target, heads, batch, assembled):
    """Then no product is computed twice, and a tile's probabilities and maxima pass through no shared memory.

    One barrier follows the wait for a tile, and one comes before its buffer is written again.
    """
    plan, kernels = launch_of(heads, batch).compile(TARGETS[target])
    code = next(code for code in assembled if "portable_kernel" in code["ptx"])
    config, dim = plan.launch.config, heads["head_dim"]
    products = config.block_m * config.block_n * 2 * dim // (16 * 8 * 16) // config.num_warps
    found = loops.attending(code)
    assert len(found) == 2 and plan.launch.full_tile_loop
    for loop in found:
        opcodes = [op.split(".")[0] for op in loop]
        print(loops.describe(loop))
        assert opcodes.count("HMMA") == products and opcodes.count("STS") == 0
        assert sum(op.startswith("BAR.SYNC") for op in loop) <= 3
    masked, full = (loops.count_kinds(loop)["integers and branches"] for loop in found)
    assert full < 0.8 * masked
