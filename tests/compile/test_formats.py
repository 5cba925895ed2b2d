"""Kernels over caches below eight bits compile for every target, fit, and do not spill where default ones must not."""

from unittest import mock

import pytest
import triton

from quire import targets
from quire.targets import TARGETS, compiling
from tests.compile import launches, loops
from tests.extended import extended

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

FORMATS = ("int4", "nvfp4", "k8v4")
NO_SPILLS = "sm80", "sm90"
# Bytes that ptxas spills to fit one more program on an SM. 3.7.1 reads them once in a tile of k8v4.
BY_CHOICE = {"3.7.1": 48}.get(triton.__version__, 16)
BY_DEFAULT = {("int4", "sm90")}
# With Triton 3.9.0; less with others. Of k8v4, 24 bytes (sm80: 16) are new since batches with and without
# `cu_seqlens_q` have one kernel (2026-11-30). On sm90 they are before and after the loop over tiles.
SPILLS = {("nvfp4", "sm90"): 80, ("k8v4", "sm90"): 136, ("k8v4", "sm80"): 240}
IN_LOOP = 31  # accesses of the stack in k8v4's loop over tiles
CASES = [
    (kv_format, target) if (kv_format, target) in BY_DEFAULT else extended(kv_format, target)
    for kv_format in FORMATS
    for target in TARGETS
]


@pytest.mark.parametrize(("kv_format", "target"), CASES)
def test_decode_compiles_fits_and_does_not_spill(kv_format, target):
    with compiling(TARGETS[target]) as compiled:
        plan = launches.attend("decode, split", 128, kv_format)
    assert plan.kernel == "split_kv"
    for kernel in compiled:
        assert kernel.shared <= TARGETS[target].shared_memory
        assert target not in NO_SPILLS or kernel.spills <= SPILLS.get((kv_format, target), BY_CHOICE), kernel


def decode_loop(features):
    """Return the plan of a decode batch for sm90, and the instructions of its loop over tiles."""
    cubins: list[bytes] = []
    inspect = targets.inspect

    def read(name, kernel, *others):
        cubins.extend([kernel.asm["cubin"]] if name == "portable_kernel" else [])
        return inspect(name, kernel, *others)

    with mock.patch.object(targets, "inspect", read), compiling(TARGETS["sm90"]):
        plan = launches.attend("decode, split", 128, features)
    (loop,) = loops.attending({"cubin": cubins[0]})
    return plan, loop


def test_decode_in_four_bits_takes_fewer_instructions_than_in_eight():
    taken = {}
    for features in ("int4", "e4m3"):
        plan, loop = decode_loop(features)
        config = plan.launch.config
        taken[features] = len(loop) * config.num_warps / config.block_n
        if features == "int4":
            assert (config.block_m, config.num_warps) == (8, 1)
            assert not loops.count_kinds(loop)["local memory"]
    assert taken["int4"] < 0.9 * taken["e4m3"], taken


@pytest.mark.extended
def test_the_loop_of_a_decode_of_k8v4_reaches_the_stack_no_more_than_before():
    assert loops.count_kinds(decode_loop("k8v4")[1])["local memory"] <= IN_LOOP


@pytest.mark.parametrize(("kv_format", "target"), CASES)
def test_writes_and_copies_compile_and_do_not_spill(kv_format, target):
    with compiling(TARGETS[target]) as compiled:
        launches.write(96, kv_format)
    assert [kernel.kernel for kernel in compiled] == ["write_kernel", "copy_kernel"]
    assert not any(kernel.spills for kernel in compiled)


@pytest.mark.hopper
@pytest.mark.parametrize("kv_format", FORMATS)
def test_prompts_are_decoded_for_the_hopper_kernel(kv_format, first_stages):
    with compiling(TARGETS["sm90"]):
        plan = launches.attend("prefill", 128, kv_format)
    assert plan.kernel == "decoded"
    assert [name for name, _, _ in first_stages] == ["decode_kernel", "hopper_schedule_kernel", "hopper_kernel"]


@pytest.mark.parametrize(
    ("features", "head_dim"),
    [("int4", 128), ("nvfp4", 128), extended("k8v4", 128), ("e4m3", 64), extended("int8 per token", 256)],
)
def test_the_kernel_that_decodes_does_not_spill_and_moves_16_bytes_at_a_time(features, head_dim, assembled):
    wanted = (launches.FEATURES | launches.COMBINED)[features]
    with compiling(TARGETS["sm90"]) as compiled:
        runner = launches.plan_of("prefill", launches.make_spec(head_dim, wanted), wanted, kernel="decoded").runner
        cache = launches.make_cache(runner.decided.request.spec, wanted)
        runner.decode((1, 1, 1), (cache,), None, runner.arguments)
    (kernel,) = compiled
    assert kernel.kernel == "decode_kernel" and kernel.spills <= 8 and kernel.occupancy >= 12, kernel  # 8 with 3.8.0
    code = assembled[0]["ptx"]
    assert "st.global.v4" in code and "ld.global.v4" in code
    assert code.count("st.global") == code.count("st.global.v4") + 4  # and where 128 sequences begin
