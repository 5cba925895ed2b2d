"""Every kernel compiles for every target, fits its shared memory, and spills no registers where the defaults were tuned: no GPU needed.

All features meet every target; each meets a part of the batches and head dims, rotating, so that the ring takes minutes. `python -m tests.compile TARGET`
goes through all of them.
"""

import pytest
import triton

import quire
from quire.dispatch.config import KernelConfig
from quire.targets import TARGETS, Launch, compiling
from quire.tuning.space import hinted
from tests.compile import launches

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

TUNED = ("sm90", "gfx942")  # default configurations must not spill here
# Served so that nothing is refused, not so that it is fast: nobody's default, and no tile of the smallest size would be free of spills.
MAY_SPILL = ("vLLM's original", "float32, e4m3")
# Bytes that ptxas parks in places by its own choice, for one more program per multiprocessor: only where it used fewer registers than there are.
BY_CHOICE, REGISTERS = 16, 255
# The three parts of a warp-specialised kernel have registers of their own, but one stack, where they keep a few numbers of the whole block.
ON_THE_STACK = {"hopper_kernel": 64}


def selection(target: str, features: str) -> list[tuple[str, int]]:
    """Return which (batch, head dim) to launch: for `plain` the most, for tuned targets more."""
    batches, dims = list(launches.BATCHES), launches.HEAD_DIMS
    turn, column = list(launches.FEATURES).index(features), list(TARGETS).index(target)
    if features == "plain":
        odd = [(batches[i % len(batches)], dim) for i, dim in enumerate(launches.ODD_HEAD_DIMS, start=1)]
        if target in TUNED:
            return [(batch, dim) for batch in batches for dim in dims] + odd
        return [("decode, split", dims[column % 3]), ("prefill", 128), ("prefill", 256), odd[column % len(odd)]]
    if target in TUNED:
        some = [batches[turn % 4], ("prompt", "prefill", "chunk, split")[turn % 3]]
        return [(batch, dims[(turn + turn // 3 + i) % 3]) for i, batch in enumerate(some)]
    at = turn + 2 * column  # mostly what compiles quickly
    return [(("decode", "decode, split", "decode", "decode, split", "prefill")[at % 5], dims[at % 3])]


@pytest.mark.parametrize("features", launches.FEATURES)
@pytest.mark.parametrize("target", TARGETS)
def test_attention_compiles_fits_and_does_not_spill(target, features):
    limits, wrong = TARGETS[target], []
    for batch, head_dim in selection(target, features):
        with compiling(limits) as compiled:
            launches.attend(batch, head_dim, features)
        for kernel in compiled:
            told = f"{batch}, head_dim {head_dim}: {kernel.registers} registers, {kernel.spills} bytes spilled, {kernel.shared} bytes shared, {kernel.tile}"
            print(f"{target:7} {features:18} {kernel.kernel:15} {told}")
            allowed = ON_THE_STACK.get(kernel.kernel, BY_CHOICE if kernel.registers < REGISTERS else 0)
            spilled = kernel.spills > allowed and target in TUNED and features not in MAY_SPILL
            if spilled or kernel.shared > limits.shared_memory or kernel.occupancy < 1:
                wrong.append(told)
    assert not wrong, f"{len(wrong)} launches spill or do not fit {target}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("features", ["plain", "e4m3"])
@pytest.mark.parametrize("target", TUNED)
def test_decode_keeps_its_loads_in_flight_and_does_not_spill(target, features, batch_invariant):
    """Triton gives up its software pipeline for small reasons, and says nothing; the memory that it then lacks tells."""
    for head_dim in launches.HEAD_DIMS:
        with compiling(TARGETS[target]) as compiled:
            plan = launches.attend("decode", head_dim, features, batch_invariant)
        assert plan.kernel == "split_kv"
        assert compiled[0].spills <= (BY_CHOICE if compiled[0].registers < REGISTERS else 0), compiled[0]
        if target == "sm90":  # the keys and values of two tiles at least
            assert compiled[0].shared >= 2 * plan.launch.config.block_n * 2 * head_dim * plan.spec.kv_dtype.itemsize, (
                compiled[0]
            )


@pytest.mark.parametrize("target", TARGETS)
def test_writes_copies_and_merges_compile_and_do_not_spill(target):
    with compiling(TARGETS[target]) as compiled:
        for features in launches.FEATURES:
            launches.write(64, features)
            launches.merge(80, features)
        launches.write(192, "plain")
        launches.merge(256, "plain")
    assert {c.kernel for c in compiled} == {"write_kernel", "copy_kernel", "combine_kernel"}
    assert not [c for c in compiled if c.spills or c.shared > TARGETS[target].shared_memory]


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_amd_s_hints_reach_its_compiler(target):
    """What the space asks for is what comes out: as many waves on a SIMD, and fewer registers for smaller matrix instructions."""
    spec, tile = (
        quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128),
        KernelConfig(64, 32, 4, 1, False, 1, 128, 128),
    )
    found = {}
    for each in hinted(tile, TARGETS[target].properties):
        _, (compiled,) = Launch(spec, 4, 64, 4096, 256, options=(("config", each),)).compile(TARGETS[target])
        assert not compiled.spills and compiled.shared <= TARGETS[target].shared_memory
        found[tuple(each.hints)] = compiled
    assert len(found) == 3 and found["waves_per_eu",].occupancy == 1 < found[()].occupancy
    assert found["matrix_instr_nonkdim",].registers < found[()].registers


@pytest.mark.parametrize("target", TUNED)
def test_the_ring_sees_a_spill(target, monkeypatch):
    """A tile that the registers cannot hold is reported as spilling, or the tests above would validate nothing."""
    too_large = KernelConfig(
        block_m=128,
        block_n=32,
        num_warps=1,
        num_stages=1,
        full_tile_loop=False,
        programs_per_sm=1,
        block_d=128,
        block_dv=128,
    )
    monkeypatch.setattr("quire.dispatch.tree.select", lambda *args: (too_large, "a test"))
    with compiling(TARGETS[target]) as compiled:
        launches.attend("decode", 128, "plain")
    assert compiled[0].spills > 0
