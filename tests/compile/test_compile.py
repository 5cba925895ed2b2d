"""Every kernel compiles for every target and fits its shared memory, and spills no registers on targets with a tree.

No GPU is needed. A kernel takes seconds, so each target compiles some launches, in rotation (`launches.selection`).
Each kernel, each feature and each target has launches, and tuned targets compile every feature. Features that do not
depend on the target are compiled together (`launches.COMBINED`). `python -m tests.compile TARGET` compiles all
combinations. `make test-extended` compiles launches that differ less from others.
"""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import quire
from quire import api
from quire.dispatch.config import KernelConfig
from quire.dispatch.constants import forget
from quire.dispatch.device import compile_for
from quire.kernels import primitives, schedule
from quire.kernels.hopper import consumer as hopper_consumer
from quire.kernels.hopper import convert as hopper_convert
from quire.kernels.hopper import kernel as hopper_kernel
from quire.kernels.hopper import runner as hopper_runner
from quire.kernels.hopper.partials import partials_at_once
from quire.kernels.hopper.softcap import capped_exponents
from quire.kernels.hopper.variants import fields_of
from quire.kernels.panels import power_of_two
from quire.kernels.portable import kernel as portable
from quire.kernels.portable.launch import PortableLaunch
from quire.targets import TARGETS, Compiled, Launch, compiling
from quire.triton_internals import hash_callees
from tests.compile import launches, loops, static
from tests.compile.launches import TUNED
from tests.extended import OLDEST, each_kind, extended, of_tritons_in_use

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

# These are served, but not fast. They are no defaults, and even the smallest configuration spills.
MAY_SPILL = ("vLLM's original", "float32, e4m3")
# ptxas may spill up to 16 bytes to fit one more program on an SM. It then uses fewer registers than there are.
BY_CHOICE, REGISTERS = 16, 255
# With 3.7.1 and 3.8.0, trees over heads of 256 take all registers and 8 or 16 bytes of the stack, outside of the loop.
BESIDES_ALL_REGISTERS = {"3.7.1": 8, "3.8.0": 16}.get(triton.__version__, 0)
# The functions of a warp-specialised kernel have separate registers but one stack, which holds values of the kernel.
ON_THE_STACK = {"hopper_kernel": 88, "mla_hopper_kernel": 96}
# Bytes that these Tritons put there besides, of what is read once for a work tile. No loop of a consumer reads them.
MORE_ON_THE_STACK = {"3.7.1": 56, "3.8.0": 56}.get(triton.__version__, 0)
# Most instructions that use it in a consumer's loop, in a tile that raises no maximum. GPUs were measured with 3.6.0.
IN_LOOPS = 0 if triton.__version__ == OLDEST else 2
ON_THE_STACK_OF_GATHERERS = 160  # four producer warps take registers from the others; 152 are heads of 256 on 3.9.0
ON_THE_STACK_OF_INTERVALS = 104  # e4m3 with Triton 3.9.0, outside of the loops of the consumers; 32 with 3.6.0
ON_THE_STACK_OF_E4M3_OUTPUTS = 136  # of head_dim 256 with Triton 3.9.0, outside of the loops of the consumers
ON_THE_STACK_OF_WIDE_HEADS = 248  # of head_dim 512, with Triton 3.9.0; 176 with 3.6.0

ON_THE_STACK_OF_PAIRS = 96  # e4m3 decode, outside of the loop over tiles: 88 with Triton 3.8.0, 16 with 3.6.0
ON_THE_STACK_OF_LATENTS = 32  # portable, for sm90: 3.7.1 and 3.9.0, outside of the loop over tiles; else 0
ON_THE_STACK_OF_CONVERTERS = 192  # fp8 latents: 176 with Triton 3.9.0, 48 with 3.6.0
ON_THE_STACK_OF_FEW_FP8_ROWS = 48  # with Triton 3.9.0, from before the roles; 0 with 3.6.0
ON_THE_STACK_OF_TURNS = 352  # fp8 latents, 32 rows: 352 with Triton 3.9.0, 216 with 3.6.0, mostly outside of the loop
ON_THE_STACK_OF_PRODUCTS = 576  # of latents in fp8: 576 with Triton 3.9.0, 344 with 3.6.0, mostly outside of its loops

# Of the loop for capped scores, by head_dim, with Triton 3.6.0 and with 3.9.0. GPUs were measured with 3.6.0.
ON_THE_STACK_OF_CAPPED = {64: (0, 32), 128: (32, 56), 256: (112, 144)}  # of 128 before and after the loops
# Most instructions of a loop that read or write the stack.
IN_CAPPED_LOOPS = {64: (0, 0), 128: (0, 1), 256: (8, 8)}

NO_SPILLS = ("sm80", *TUNED)  # targets whose default configurations must not spill
FP8_PRODUCTS = ("sm90",)  # targets that have them; elsewhere the plan is that of "e4m3", as a test below says
# Defaults that do spill, with the most bytes that any Triton spills: they must not grow.
# Of 256 columns, 128 rows are kept: 7 x 118 on 11,710 took 687 us, and 1,098 with 16 rows (NVIDIA H200, 2026-11-29).
KNOWN_SPILLS = {
    ("sm90", "e4m3", "chunk, split", 128): 88,
    ("sm90", "e4m3", "chunk, split", 256): 368,
    ("sm90", "int4", "prompt", 128): 152,  # 32 rows, which have not been timed
    ("sm90", "nvfp4", "prefill", 64): 48,  # with Triton 3.7.1
    ("gfx942", "int4", "decode, split", 64): 84,  # with Triton 3.9.0
    ("gfx942", "k8v4", "prompt", 256): 376,  # with Triton 3.9.0
}
LATENTS_KNOWN_SPILLS = {("gfx942", "e4m3", "drafts"): 44}  # with Triton 3.9.0; 36 with 3.8.0, none with 3.6.0
CHOSEN_BY_DEFAULT = (*(("sm90", "slots of records"), ("gfx942", "blocks")),)
CASES = [  # a kernel takes seconds, so each launch is a test, which two processes can share
    pytest.param(
        *(target, features, batch, dim),
        id=f"{target}-{features}-{batch}-{dim}",
        marks=[
            *([pytest.mark.extended] if launches.is_extended(target, features, batch, dim) else []),
            *({"sm90": [pytest.mark.each_kind], "gfx942": [pytest.mark.amd]}.get(target, [])),
        ],
    )
    for target in TARGETS
    for features in launches.COMPILED
    if features != "fp8 products" or target in FP8_PRODUCTS
    for batch, dim in launches.selection(target, features)
]
ROTATION = [case.values for case in CASES]
CASES += [
    pytest.param(*case, id="-".join(map(str, case)), marks=[pytest.mark.extended])
    for case in KNOWN_SPILLS
    if case not in ROTATION
]


def without_schedules(compiled: list[Compiled]) -> list[Compiled]:
    """Return the kernels but those that find a schedule, which have one warp, no tiles and nothing on the stack.

    Those that find row blocks of prompts have four warps, which share sums.
    """
    schedules = [kernel for kernel in compiled if kernel.kernel in launches.SCHEDULES]
    for kernel in schedules:
        warps, shared = (4, 2048) if kernel.kernel == "hopper_schedule_kernel" else (1, 0)  # 512 with Triton 3.9.0
        assert kernel.num_warps == warps and kernel.shared <= shared and not kernel.spills, kernel
    return [kernel for kernel in compiled if kernel not in schedules]


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "max_seq_len", "featured"),
    [
        extended(192, 128, 4096, True),
        extended(128, 192, 1024, False),
        extended(24, 24, 4096, True),
        extended(72, 72, 1024, False),
        extended(96, 96, 4096, False),
        extended(112, 112, 1024, True),
        extended(160, 160, 4096, True),
        (160, 160, 4096, False),  # scores in pieces
        extended(224, 224, 1024, False),
    ],
)
def test_the_hopper_kernel_of_every_kind_of_width_compiles_and_fits(head_dim, head_dim_v, max_seq_len, featured):
    """Each width has one length and has features or none, in turn: a kernel takes some six seconds."""
    heads = {"num_q_heads": 16, "num_kv_heads": 16, "head_dim": head_dim, "head_dim_v": head_dim_v}
    every_feature = {"softcap": 30.0, "alibi": True, "sinks": True, "sliding_window": 1024}
    spec = quire.AttentionSpec(**heads, **every_feature if featured else {})
    launch = Launch(spec, 1, max_seq_len, max_seq_len, max_seq_len, options=(("kernel", "hopper"),))
    plan, compiled = launch.compile(TARGETS["sm90"])
    assert plan.kernel == "hopper", plan
    for kernel in without_schedules(compiled):
        assert kernel.spills <= ON_THE_STACK["hopper_kernel"], kernel
        assert kernel.shared <= TARGETS["sm90"].shared_memory, kernel
        assert kernel.occupancy == plan.launch.config.programs_per_sm, kernel


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize(("group_size", "queries", "heads"), [extended(5, 16, 5), extended(7, 64, 7)])
def test_the_hopper_kernel_of_odd_groups_compiles_and_fits(group_size, queries, heads, assembled):
    """A work tile has all heads of a group, and some rows without a query."""
    spec = quire.AttentionSpec(num_q_heads=2 * group_size, num_kv_heads=2, head_dim=120, sinks=True, alibi=True)
    launch = Launch(spec, 8, queries, 4096, 8 * queries, options=(("kernel", "hopper"),), return_lse=True)
    plan, compiled = launch.compile(TARGETS["sm90"])
    assert plan.launch.heads == heads and heads * plan.launch.config.block_t < 128
    kernel = without_schedules(compiled)[0]
    assert kernel.spills <= ON_THE_STACK["hopper_kernel"] + MORE_ON_THE_STACK, kernel
    for loop in loops.attending(assembled[0]):
        assert loops.count_kinds(loop)["local memory"] <= IN_LOOPS, loops.describe(loop)


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize(
    ("extra", "page_size", "max_seq_len"),
    [
        ({"head_dim": 40}, 1, 1024),
        extended({"head_dim": 64}, 4, 1024),
        extended({"head_dim": 24, "head_dim_v": 200}, 2, 4096),
        extended({"head_dim": 256}, 1, 4096),
        ({"head_dim": 256}, 131, 4096),
        extended({"head_dim": 128, "kv_dtype": torch.int8}, 1, 4096),
        extended({"head_dim": 128, "kv_dtype": torch.float8_e4m3fn, "allow_fp8": True}, 12, 4096),
    ],
    ids=str,
)
def test_the_hopper_kernel_that_gathers_rows_compiles_and_fits(extra, page_size, max_seq_len):
    """Heads begin at any multiple of 16 bytes. If the compiler does not know that, it cannot copy 16 bytes at once.

    Some tiles in pages of 131 are one box. With heads of 40 and 64, loops that are right crashed ptxas (12.8, 12.9).
    """
    spec = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, **extra)
    launch = Launch(spec, 1, max_seq_len, max_seq_len, max_seq_len, page_size, options=(("kernel", "hopper"),))
    plan, compiled = launch.compile(TARGETS["sm90"])
    assert [kernel.kernel for kernel in compiled] == ["hopper_schedule_kernel", "hopper_kernel"]
    box, box_of_a_tile = plan.launch.boxes(quire.PagedKVCache.empty(spec, 1, page_size))
    assert box == 0 and (box_of_a_tile > 0) == (page_size == 131)
    for kernel in without_schedules(compiled):
        assert kernel.spills <= ON_THE_STACK_OF_GATHERERS, kernel
        assert kernel.shared <= TARGETS["sm90"].shared_memory, kernel
        assert kernel.occupancy == plan.launch.config.programs_per_sm, kernel


INTERVALS = ("key_begin", "key_end")


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize(
    ("batch", "head_dim", "extra", "page_size"),
    [
        ("prefill", 128, {}, 16),
        extended("prefill", 64, {}, 1),
        extended("prompt", 128, {"softcap": 30.0, "sinks": True}, 16),
        extended("chunk, split", 64, {"kv_dtype": torch.int8}, 16),
        extended("prefill", 128, {"kv_dtype": torch.float8_e4m3fn}, 16),
        extended("prefill", 128, {"kv_dtype": torch.float8_e4m3fn, "allow_fp8": True}, 16),
    ],
    ids=str,
)
def test_the_hopper_kernel_of_intervals_compiles_fits_and_does_not_spill(batch, head_dim, extra, page_size, assembled):
    """Not in its loops: the stack that is left holds what lives around them."""
    wanted = launches.Features(extra, page_size=page_size, lse=True, per_token=INTERVALS)
    with compiling(TARGETS["sm90"]) as compiled:
        plan = launches.plan_of(batch, launches.make_spec(head_dim, wanted), wanted, kernel="hopper")
        quire.attention(**launches.make_inputs(plan, wanted), plan=plan)
    kernel = without_schedules(compiled)[0]
    assert plan.kernel == kernel.kernel.removesuffix("_kernel") == "hopper"
    print(kernel)
    assert kernel.spills <= ON_THE_STACK_OF_INTERVALS, kernel
    assert kernel.shared <= TARGETS["sm90"].shared_memory, kernel
    assert kernel.occupancy == plan.launch.config.programs_per_sm, kernel
    attends = loops.attending(assembled[0])
    assert len(attends) == plan.launch.config.num_warpgroups
    for loop in attends:
        print(loops.describe(loop))
        assert sum(op.startswith("WARPGROUP.DEPBAR") for op in loop) == 2
        assert not loops.count_kinds(loop)["local memory"]


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize(
    ("extra", "page_size", "max_seq_len", "num_tokens", "on_the_stack"),
    [
        extended({}, 16, 32768, 1600, 24),
        extended({}, 16, 32768, 1000, 24),
        extended({"head_dim": 64, "alibi": True}, 16, 4096, 1600, 40),
        extended({"head_dim": 64}, 16, 4096, 1600, 32),
        extended({"num_q_heads": 7, "num_kv_heads": 1, "head_dim": 248, "sinks": True}, 64, 32768, 1600, 96),
        extended({"head_dim": 128, "head_dim_v": 192}, 16, 32768, 1600, 16),
        extended({"head_dim": 128, "head_dim_v": 192}, 16, 32768, 1000, 24),
        ({"kv_dtype": torch.float8_e4m3fn}, 16, 32768, 1600, 72),
        extended({"kv_dtype": torch.float8_e4m3fn, "allow_fp8": True}, 16, 32768, 1600, 168),
        extended({}, 1, 32768, 1600, 0),
        extended({"head_dim": 232}, 1, 32768, 1600, 64),
    ],
    ids=str,
)
def test_the_hopper_kernel_that_cuts_ragged_batches_compiles_and_fits(
    extra, page_size, max_seq_len, num_tokens, on_the_stack, assembled, monkeypatch
):
    """The loops of consumers do not spill where a tile is seen whole, but for one register with ALiBi and Triton 3.9.0.

    Partials are loaded 16 bytes at a time, past L1.

    The stack is the larger one of Triton 3.6.0 and 3.9.0. Results that wait while others are combined are on it.
    """
    spec = quire.AttentionSpec(**{"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128} | extra)
    # The launch for decoding sequences is another kernel, which other tests compile.
    monkeypatch.setattr(PortableLaunch, "bind", mock.Mock())
    launch = Launch(spec, 8, 512, max_seq_len, num_tokens, page_size, options=(("kernel", "hopper"),))
    plan, compiled = launch.compile(TARGETS["sm90"])
    kernel = without_schedules(compiled)[0]
    assert plan.launch.cut_slots > 0 and kernel.kernel == "hopper_kernel"
    print(kernel)
    assert kernel.spills <= on_the_stack + MORE_ON_THE_STACK, kernel
    assert kernel.shared <= TARGETS["sm90"].shared_memory, kernel
    assert kernel.occupancy == plan.launch.config.programs_per_sm, kernel
    warpgroups = plan.launch.config.num_warpgroups
    assert assembled[0]["ptx"].count("atom.global.gpu.acq_rel.add") == warpgroups
    columns = power_of_two(spec.head_dim_v)
    lanes = min(8, columns // 4)  # of a row, which each load four numbers of a partial at a time
    loads = partials_at_once(columns) * columns // (4 * lanes)
    assert assembled[0]["ptx"].count("ld.global.cg.v4.b32") == warpgroups * loads
    attends = loops.attending(assembled[0])
    assert len(attends) == warpgroups
    is_quantised = spec.kv_dtype is not spec.dtype
    assert plan.launch.config.apart == (len(fields_of(spec)) == 1)
    for loop in attends:
        print(loops.describe(loop))
        assert sum(op.startswith("WARPGROUP.DEPBAR") for op in loop) == 2
        assert loops.count_kinds(loop)["local memory"] <= int(spec.alibi)
        if not is_quantised and not spec.alibi:  # two probabilities at a time, whose order is that of the product
            assert loops.count_kinds(loop)["conversions"] == plan.launch.config.block_n // 4


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize("head_dim", [extended(64), 128, extended(256)], ids="sm90-{}".format)
def test_the_hopper_kernel_of_capped_scores_compiles_and_fits(head_dim, assembled):
    """Its softmax overlaps its product with values. Its loop waits for products twice."""
    wanted = launches.Features({"softcap": 30.0}, lse=True)
    with compiling(TARGETS["sm90"]) as compiled:
        plan = launches.plan_of("prefill", launches.make_spec(head_dim, wanted), wanted)
        quire.attention(**launches.make_inputs(plan, wanted), plan=plan)
    assert plan.kernel == "hopper" and plan.launch.constexprs()["SCORE_MOD"] is capped_exponents
    kernel = without_schedules(compiled)[0]
    print(kernel)
    is_newer = triton.__version__ != OLDEST
    assert kernel.spills <= ON_THE_STACK_OF_CAPPED[head_dim][is_newer] + MORE_ON_THE_STACK, kernel
    assert kernel.shared <= TARGETS["sm90"].shared_memory, kernel
    assert kernel.occupancy == plan.launch.config.programs_per_sm, kernel
    attends = loops.attending(assembled[0])
    assert len(attends) == plan.launch.config.num_warpgroups
    for loop in attends:
        print(loops.describe(loop))
        assert sum(op.startswith("WARPGROUP.DEPBAR") for op in loop) == 2
        assert loops.count_kinds(loop)["local memory"] <= IN_CAPPED_LOOPS[head_dim][is_newer]


@triton.jit
def finds_no_keys(lengths, token, q_start, q_len, seq_len, block_t, TOKENS: tl.constexpr):
    tl.static_assert(False, "intervals")


@gluon.jit
def sees_no_keys(published, stage, work, own, scoring):
    gl.static_assert(False, "intervals")


@gluon.jit
def reads_no_range(published, stage):
    gl.static_assert(False, "intervals")


@pytest.mark.hopper
def test_the_hopper_kernel_without_intervals_has_none_of_their_code(monkeypatch, first_stages, take):
    """The first stage, which reads its source, does not meet their functions, where it converts tiles either.

    Nor does the schedule of such a batch.
    """
    take("fp8")  # not what decodes first
    kernel, finder = hopper_kernel.hopper_kernel, schedule.hopper_schedule_kernel
    keys_of_intervals = schedule.keys_of_intervals
    for function in (kernel, finder):  # before what they call is replaced: Triton keeps the hashes of callees for good
        hash_callees(function)
    again = gluon.jit(
        kernel.fn,
        do_not_specialize=kernel.do_not_specialize,
        do_not_specialize_on_alignment=kernel.do_not_specialize_on_alignment,
    )
    finder_again = triton.jit(finder.fn, do_not_specialize=finder.do_not_specialize)
    replaced = (
        (hopper_consumer, "sight_of_rows", sees_no_keys),
        (hopper_convert, "read_range", reads_no_range),
        (hopper_runner, "hopper_kernel", again),
        (schedule, "keys_of_intervals", finds_no_keys),
        (schedule, "hopper_schedule_kernel", finder_again),
    )
    for module, name, function in replaced:
        monkeypatch.setattr(module, name, function)
    with compiling(TARGETS["sm90"]):
        launches.attend("prompt", 128, "plain")
        launches.attend("prefill", 128, "fp8 products")
        assert [name for name, _, _ in first_stages] == ["hopper_schedule_kernel", "hopper_kernel"] * 2
        for batch, features in (("prompt", launches.FEATURES["plain"]), ("prefill", launches.FEATURES["fp8 products"])):
            wanted = replace(features, per_token=INTERVALS)
            plan = launches.plan_of(batch, launches.make_spec(128, wanted), wanted)
            with pytest.raises(triton.CompilationError, match=r"keys_of_intervals\("):
                quire.attention(**launches.make_inputs(plan, wanted), plan=plan)
            with monkeypatch.context() as patch, pytest.raises(triton.CompilationError, match=r"warp_specialize\("):
                patch.setattr(schedule, "keys_of_intervals", keys_of_intervals)
                patch.setattr(schedule, "hopper_schedule_kernel", finder)
                quire.attention(**launches.make_inputs(plan, wanted), plan=plan)


def test_every_target_and_every_feature_has_its_turn():
    """The rotation leaves none out. By default, targets that have no record are compiled for, and tuned ones.

    Of two tuned targets, one compiles a feature with the oldest Triton and the other one with the newest, or both do.
    """
    others = [target for target in TARGETS if target not in TUNED]
    by_default = {case.values[:3] for case in CASES if pytest.mark.extended not in case.marks}
    every = {case[:2] for case in ROTATION}
    assert by_default == set(launches.OLDEST_BY_DEFAULT if triton.__version__ == OLDEST else launches.BY_DEFAULT)
    assert {target for target, _, _ in launches.BY_DEFAULT} | {*static.CARDS} == set(TARGETS)
    assert {target for target, features in every if features == "plain"} == set(TARGETS)
    for turn, features in enumerate(launches.COMPILED):
        if features in ("plain", "fp8 products"):
            continue
        of_tuned, of_others = (
            [target for target in targets if (target, features) in every] for targets in (TUNED, others)
        )
        assert of_tuned == ([TUNED[turn % 2]] if triton.__version__ == OLDEST else [*TUNED]), features
        assert len(of_others) == 1, features


# Of which other tests run this stage, or all of them.
PASSED_ELSEWHERE = {
    *("plain", "fp8 products", "many, with lse", "float32", "e4m3", "int8 per token", "vLLM's original", "trees"),
    *("sinks, lse, e4m3 output", "int4", "k8v4"),
}


@pytest.mark.parametrize(
    "features", [extended(name) if name in PASSED_ELSEWHERE else name for name in launches.COMPILED]
)
def test_every_feature_passes_the_first_stage(features, first_stages):
    """Of portable kernels. What is not Triton's language, which the interpreter does not notice, ends there."""
    for batch, head_dim in launches.selection("gfx942", features):
        with compiling(TARGETS["gfx942"]):
            launches.attend(batch, head_dim, features)
    assert "portable_kernel" in [name for name, *_ in first_stages]


@pytest.mark.parametrize("features", [name for name in launches.LATENTS if "e4m3" in name or "records" in name])
def test_latents_of_every_kind_pass_the_first_stage(features, first_stages):
    with compiling(TARGETS["sm80"]):
        launches.attend_to_latents("decode", features)
    assert "mla_kernel" in [name for name, *_ in first_stages]


def test_prompts_in_pages_of_528_have_boxes_of_two_kinds():
    features = "pages of 528, MQA"
    wanted, (batch, head_dim) = launches.COMBINED[features], launches.OUT_OF_TURN[features]
    with compile_for(TARGETS["sm90"].properties, on_compile=None):
        plan = launches.plan_of(batch, launches.make_spec(head_dim, wanted), wanted)
        boxes = plan.launch.boxes(launches.make_cache(plan.spec, wanted))
    assert boxes == (16, plan.launch.config.block_n)


@pytest.mark.parametrize(("target", "features", "batch", "head_dim"), CASES)
def test_attention_compiles_fits_and_does_not_spill(target, features, batch, head_dim, assembled):
    limits, wrong, on_the_stack = TARGETS[target], [], dict(ON_THE_STACK)
    if (launches.FEATURES | launches.COMBINED)[features].page_size == 1:
        on_the_stack["hopper_kernel"] = ON_THE_STACK_OF_GATHERERS
    if (launches.FEATURES | launches.COMBINED)[features].out_scale:
        on_the_stack["hopper_kernel"] = ON_THE_STACK_OF_E4M3_OUTPUTS
    on_the_stack["hopper_kernel"] += MORE_ON_THE_STACK
    with compiling(limits) as compiled:
        plan = launches.attend(batch, head_dim, features)
    for kernel, code in zip(without_schedules(compiled), assembled, strict=True):
        needs = f"{kernel.registers} registers, {kernel.spills} bytes spilled, {kernel.shared} bytes shared"
        found = f"{batch}, head_dim {head_dim}: {needs}, {kernel.config}"
        print(f"{target:7} {features:18} {kernel.kernel:15} {found}")
        allowed = on_the_stack.get(kernel.kernel, BY_CHOICE if kernel.registers < REGISTERS else BESIDES_ALL_REGISTERS)
        allowed = max(allowed, KNOWN_SPILLS.get((target, features, batch, head_dim), 0))
        held = target in TUNED and features not in MAY_SPILL
        # Without partitions, tiles of sm80 were not chosen by what spills: they take 16 to 304 bytes of the stack.
        held = held or (target == "sm80" and (features, plan.kernel) == ("plain", "split_kv"))
        if (held and kernel.spills > allowed) or kernel.shared > limits.shared_memory or kernel.occupancy < 1:
            wrong.append(found)
        if kernel.kernel == "hopper_kernel":
            for loop in loops.attending(code):
                assert loops.count_kinds(loop)["local memory"] <= IN_LOOPS, loops.describe(loop)
    assert compiled and not wrong, f"{len(wrong)} kernels spill or do not fit {target}:\n" + "\n".join(wrong)


E4M3_OUTPUT = "sinks, lse, e4m3 output"


@pytest.mark.parametrize("target", [x if x in ("sm80", "gfx950") else extended(x) for x in TARGETS])
def test_the_compiler_rounds_outputs_to_e4m3_where_it_can(target, first_stages):
    """Elsewhere bits are stored. The functions that round are those of the write kernel, which is compiled whole."""
    texts = {}
    for features, batch in itertools.product((E4M3_OUTPUT, "plain"), ("decode, split", "prefill")):
        with compiling(TARGETS[target]):
            launches.attend(batch, 128, features)
        texts[features, batch] = [text for name, _, text in first_stages if name not in launches.SCHEDULES]
        first_stages.clear()
    native = TARGETS[target].properties.native_fp8
    for (features, _), kernels in texts.items():
        assert kernels
        for text in kernels:
            assert ("f8E4M3FN" in text) == (features == E4M3_OUTPUT and native)
            assert ("!tt.ptr<i8>" in text) == (features == E4M3_OUTPUT and not native)


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize(
    ("batch", "head_dim", "extra"),
    [
        ("prefill", 128, {}),
        extended("prefill", 256, {}),
        extended("prefill", 128, {"kv_dtype": torch.float8_e4m3fn}),
        extended("prefill", 128, {"kv_dtype": torch.float8_e4m3fn, "allow_fp8": True}),
    ],
    ids=str,
)
def test_the_hopper_kernel_of_outputs_in_e4m3_fits_and_does_not_spill(batch, head_dim, extra, assembled):
    """Not in its loops."""
    wanted = launches.Features(extra, out_scale=True)
    with compiling(TARGETS["sm90"]) as compiled:
        plan = launches.plan_of(batch, launches.make_spec(head_dim, wanted), wanted, kernel="hopper")
        quire.attention(**launches.make_inputs(plan, wanted), plan=plan)
    kernel = without_schedules(compiled)[0]
    assert plan.kernel == kernel.kernel.removesuffix("_kernel") == "hopper"
    print(kernel)
    assert kernel.spills <= ON_THE_STACK_OF_E4M3_OUTPUTS + MORE_ON_THE_STACK, kernel
    assert kernel.shared <= TARGETS["sm90"].shared_memory, kernel
    assert kernel.occupancy == plan.launch.config.programs_per_sm, kernel
    attends = loops.loops_with(assembled[0], "exponentials")
    assert attends and not any(loops.count_kinds(loop)["local memory"] for loop in attends)


@pytest.mark.hopper
@pytest.mark.each_kind
def test_an_output_in_e4m3_of_the_hopper_kernel_for_latents_is_refused_before_a_launch(first_stages):
    spec = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.1)
    cache = quire.PagedKVCache.empty(spec, 4, 64)
    batch = quire.Batch(torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    q, scale = torch.empty(2, 16, 576, dtype=spec.dtype), torch.ones(1)
    new = {"k": torch.ones(2, 512).to(spec.dtype), "v": torch.ones(2, 64).to(spec.dtype)}
    with compiling(TARGETS["sm90"]):
        plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=256)
        assert plan.kernel == "mla_hopper"
        with pytest.raises(quire.UnsupportedError, match="out_scale must be left out for the kernel mla_hopper"):
            quire.attention(q, cache, plan, **new, slot_mapping=torch.arange(2), out_scale=scale)
        assert first_stages == []  # the write of the new tokens neither
        plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=256, kernel="mla")  # as the message says
        quire.attention(q, cache, plan, out_scale=scale)
    assert [name for name, _, _ in first_stages] == ["schedule_kernel", "mla_kernel"]


@pytest.mark.parametrize("target", [x if x == "gfx942" else extended(x) for x in TARGETS])
def test_heads_wider_than_256_compile_fit_and_do_not_spill(target, assembled):
    """A block of 64 rows would spill: 64 x 512 accumulators take half of the registers that eight warps have.

    In the Hopper kernel, a work tile has half of the columns. Of some 300 instructions of a loop, at most 4 use the
    stack with Triton 3.6.0, and 6 with 3.9.0.
    """
    turn = list(TARGETS).index(target)
    everywhere = launches.WIDE["every target"][turn % 2 :][: 2 if target in NO_SPILLS else 1]
    with_a_tree = launches.WIDE["with a tree"][TUNED.index(target) :: 2] if target in TUNED else ()
    for batch, head_dim, features in everywhere + with_a_tree:
        with compiling(TARGETS[target]) as compiled:
            plan = launches.attend(batch, head_dim, features)
        on_hopper = target == "sm90" and head_dim in (320, 512) and batch in ("prefill", "drafts")
        assert plan.kernel in (("hopper",) if on_hopper else ("split_kv", "block")), plan
        for kernel in without_schedules(compiled):
            allowed = BY_CHOICE if kernel.registers < REGISTERS else 0
            if kernel.kernel == "hopper_kernel":
                allowed = ON_THE_STACK_OF_WIDE_HEADS
                most = 4 if triton.__version__ == OLDEST else 6
                for loop in loops.attending(assembled[-1]):
                    assert loops.count_kinds(loop)["local memory"] <= most, loops.describe(loop)
            assert kernel.spills <= allowed, kernel
            assert kernel.shared <= TARGETS[target].shared_memory and kernel.occupancy >= 1, kernel


@pytest.mark.parametrize("target", [target for target in TARGETS if target not in FP8_PRODUCTS])
def test_products_in_fp8_change_nothing_on_targets_without_them(target):
    """So their kernels are those of "e4m3"."""
    with compile_for(TARGETS[target].properties, on_compile=None):
        plans = [
            launches.plan_of(batch, launches.make_spec(128, launches.FEATURES[features]), launches.FEATURES[features])
            for batch in launches.BATCHES
            for features in ("e4m3", "fp8 products")
        ]
    assert [p.launch.compile_keys() for p in plans[::2]] == [p.launch.compile_keys() for p in plans[1::2]]


@pytest.mark.parametrize(
    ("target", "features", "head_dim", "batch_invariant"),
    [
        extended("sm90", "plain", 64, False),
        pytest.param("sm90", "plain", 128, False, marks=pytest.mark.each_kind),
        extended("sm90", "plain", 256, False),
        extended("sm90", "plain", 128, True),
        pytest.param("sm90", "e4m3", 128, False, marks=pytest.mark.each_kind),
        extended("sm90", "e4m3", 256, True),
        ("sm90", "plain", 256, True),
        extended("sm80", "plain", 256, True),
        extended("gfx942", "plain", 64, True),
        extended("gfx942", "plain", 256, True),
        extended("gfx942", "e4m3", 128, True),
        extended("gfx942", "e4m3", 256, False),
    ],
)
def test_decode_keeps_its_loads_in_flight_and_does_not_spill(target, features, head_dim, batch_invariant, assembled):
    """Triton may drop its software pipeline without a warning. The kernel then has too little shared memory.

    An SM of sm90 has room for as many programs as are planned.
    """
    with compiling(TARGETS[target]) as compiled:
        plan = launches.attend("decode", head_dim, features, batch_invariant)
    assert plan.kernel in ("split_kv", "block")
    kernel = without_schedules(compiled)[0]
    # Registers of e4m3 decode are bounded; what is spilled is outside of the loop over tiles.
    around = ON_THE_STACK_OF_PAIRS if (target, features) == ("sm90", "e4m3") else BY_CHOICE
    assert kernel.spills <= (around if kernel.registers < REGISTERS else 0), kernel
    if target == "sm90":  # K and V of at least two tiles
        tile_bytes = 2 * plan.launch.config.block_n * head_dim * plan.spec.kv_dtype.itemsize
        assert kernel.shared >= 2 * tile_bytes, kernel
        assert kernel.occupancy >= plan.launch.config.programs_per_sm, kernel
        assert not any(loops.count_kinds(loop)["local memory"] for loop in loops.attending(assembled[0]))


@pytest.mark.parametrize(
    ("target", "batch"),
    [extended("sm90", "prefill"), extended("sm90", "drafts"), ("gfx942", "prefill"), extended("sm80", "prefill")],
)
def test_batch_invariant_prompts_and_drafts_fit_with_two_accumulators(target, batch):
    with compiling(TARGETS[target]) as compiled:
        plan = launches.attend(batch, 128, "plain", batch_invariant=True)
    kernel = without_schedules(compiled)[0]
    print(f"{target:7} {batch:9} {plan.kernel} {kernel}")
    assert kernel.shared <= TARGETS[target].shared_memory and kernel.occupancy >= 1, kernel
    assert kernel.spills <= (0 if target == "gfx942" else 128), kernel  # bytes of a thread


@of_tritons_in_use
@pytest.mark.parametrize(
    ("target", "lens", "heads", "rows", "on_the_stack"),
    [
        ("sm90", (1, 4096, 4096), (32, 8, 128), 64, (48, 112)),
        extended("sm90", (32, 8, 4096), (32, 8, 128), 32, (0, 0)),
        extended("sm90", (32, 8, 4096), (64, 8, 64), 64, (120, 160)),
        extended("sm90", (1, 2048, 2048), (16, 8, 256), 64, (712, 728)),
        extended("sm80", (1, 4096, 4096), (32, 8, 128), 32, (0, 40)),
    ],
)
def test_batch_invariant_prompts_on_fp8_numbers_in_pairs_fit(target, lens, heads, rows, on_the_stack):
    """Two accumulators of 64 rows and 256 columns are all registers. On the stack, they are faster than 16 rows.

    The bytes on the stack are those of Triton 3.6.0 and of 3.9.0.
    """
    num_seqs, queries, keys = lens
    num_q_heads, num_kv_heads, head_dim = heads
    spec = quire.AttentionSpec(
        num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, kv_dtype=torch.float8_e4m3fn
    )
    launch = Launch(spec, num_seqs, queries, keys, num_seqs * queries, options=(("batch_invariant", True),))
    plan, compiled = launch.compile(TARGETS[target])
    kernel = without_schedules(compiled)[0]
    print(kernel)
    assert plan.launch.config.block_m == rows and plan.launch.fallback.config.block_m == 16
    assert kernel.shared <= TARGETS[target].shared_memory and kernel.occupancy == 2, kernel
    assert kernel.spills <= on_the_stack[triton.__version__ != OLDEST] + MORE_ON_THE_STACK, kernel


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize(
    ("head_dim", "on_the_stack", "in_loop"),
    [extended(256, (40, 80), (0, 0)), extended(384, (64, 136), (0, 7)), (512, (232, 288), (2, 6))],
)
def test_the_hopper_kernel_of_batch_invariant_plans_fits_with_wide_heads(head_dim, on_the_stack, in_loop, assembled):
    """Its work tiles have 128 columns of values, and as many stages as shared memory has room for.

    The bytes on the stack, and the instructions of a loop that use it, are those of Triton 3.6.0 and of 3.9.0.
    """
    spec = quire.AttentionSpec(num_q_heads=16, num_kv_heads=8, head_dim=head_dim)
    launch = Launch(spec, 2, 2000, 2000, 3900, options=(("batch_invariant", True),))
    plan, compiled = launch.compile(TARGETS["sm90"])
    kernel = without_schedules(compiled)[0]
    print(kernel)
    assert kernel.kernel == "hopper_kernel" and plan.launch.column_parts == head_dim // 128
    assert kernel.shared <= TARGETS["sm90"].shared_memory and kernel.occupancy == 1, kernel
    is_newer = triton.__version__ != OLDEST
    assert kernel.spills <= on_the_stack[is_newer] + MORE_ON_THE_STACK, kernel
    for loop in loops.attending(assembled[0]):
        assert loops.count_kinds(loop)["local memory"] <= in_loop[is_newer], loops.describe(loop)


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize(
    ("queries", "num_q_heads", "head_dim"),
    [extended(64, 16, 256), extended(64, 32, 128), extended(4096, 16, 256), (4096, 32, 128)],
)
def test_wgmma_of_batch_invariant_portable_kernels_do_not_wait_for_one_another(
    queries, num_q_heads, head_dim, assembled
):
    """A loop waits once for scores and once for products with values."""
    spec = quire.AttentionSpec(num_q_heads=num_q_heads, num_kv_heads=8, head_dim=head_dim, dtype=torch.bfloat16)
    options = (("batch_invariant", True), ("kernel", "portable"))
    plan, compiled = Launch(spec, 1, queries, 8192, queries, options=options).compile(TARGETS["sm90"])
    kernel = without_schedules(compiled)[0]
    print(plan.kernel, kernel)
    assert plan.kernel == {64: "split_kv", 4096: "block"}[queries] and plan.launch.config.block_m >= 64
    assert kernel.shared <= TARGETS["sm90"].shared_memory and kernel.occupancy >= 1, kernel
    # Of heads of 256, accumulators take 128 registers of a thread.
    assert kernel.spills <= (128 if head_dim == 128 else 280), kernel
    attends = loops.loops_with(assembled[0], "tensor cores")
    assert attends
    for loop in attends:
        assert sum(op.startswith("WARPGROUP.DEPBAR") for op in loop) == 2, loops.describe(loop)


@pytest.mark.parametrize(
    ("target", "queries", "seq_len"),
    [
        ("sm90", 32, 8192), extended("gfx942", 1, 131072), extended("sm80", 1, 131072),
        extended("sm90", 1, 131072), extended("gfx942", 64, 8192), extended("sm80", 64, 8192),
    ],
)  # fmt: skip
def test_states_of_splits_are_folded_without_spills(target, queries, seq_len):
    launch = Launch(
        launches.make_spec(128, launches.FEATURES["plain"]),
        *(1, queries, seq_len, queries),
        options=(("batch_invariant", True),),
    )
    plan, compiled = launch.compile(TARGETS[target])
    assert [c.kernel for c in compiled] == ["schedule_kernel", "portable_kernel", "combine_partials_kernel"], plan
    assert compiled[2].spills == 0 and compiled[2].num_warps == 1, compiled[2]


@pytest.mark.hopper
@pytest.mark.extended
def test_batch_invariant_prompts_with_wide_values_fit():
    spec = quire.AttentionSpec(num_q_heads=16, num_kv_heads=8, head_dim=256, dtype=torch.bfloat16)
    launch = Launch(spec, 1, 4096, 4096, 4096, options=(("batch_invariant", True),))
    plan, compiled = launch.compile(TARGETS["sm90"])
    (kernel,) = without_schedules(compiled)
    assert (plan.kernel, plan.launch.column_parts) == ("hopper", 2)
    assert kernel.shared <= TARGETS["sm90"].shared_memory and kernel.spills <= 96, kernel


APPENDS = [  # a tuned target has every kind of cache and of batch, others one
    ("sm90", "decode, 64", 128, "plain"), extended("sm90", "decode, 64", 128, "e4m3"),
    ("sm90", "drafts", 128, "trees"), extended("sm90", "decode, split", 256, "MQA"),
    extended("sm90", "decode, short", 64, "plain"), extended("sm90", "drafts", 128, "e4m3"),
    extended("gfx942", "decode, 64", 128, "e4m3"), extended("gfx942", "drafts", 64, "plain"),
    extended("gfx942", "decode, split", 256, "MQA"),
    extended("sm80", "decode, 64", 128, "e4m3"), extended("sm80", "decode, split", 64, "plain"),
    extended("sm86", "decode, 64", 64, "vLLM's original"), extended("sm89", "drafts", 128, "e4m3"),
    extended("sm100", "decode, 64", 128, "plain"), extended("sm120", "decode, split", 128, "float32"),
    extended("gfx90a", "decode, 64", 64, "groups of 5"), extended("gfx950", "decode, split", 128, "e4m3"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "batch", "head_dim", "features"), APPENDS)
def test_a_launch_that_writes_new_tokens_compiles_fits_and_does_not_spill(target, batch, head_dim, features):
    """Decode on an SM of sm90 has room for the programs that are planned, as without new tokens."""
    with compiling(TARGETS[target]) as compiled:
        plan = launches.append(batch, head_dim, features)
    kernel, *others = without_schedules(compiled)
    assert [other.kernel for other in others] in ([], ["combine_partials_kernel"])
    print(f"{target:7} {features:18} {batch} {kernel}")
    assert kernel.kernel == "portable_kernel"
    assert kernel.shared <= TARGETS[target].shared_memory and kernel.occupancy >= 1, kernel
    if target in NO_SPILLS:
        # Registers of e4m3 decode are bounded; what is spilled is outside of the loop over tiles.
        around = ON_THE_STACK_OF_PAIRS if features == "e4m3" else BY_CHOICE
        assert kernel.spills <= (around if kernel.registers < REGISTERS else 0), kernel
    if (target, batch, head_dim) == ("sm90", "decode, 64", 128):
        assert kernel.occupancy >= plan.launch.config.programs_per_sm, kernel


ROTATIONS = [  # batch, width, features, and what is rotated: by default, all of a head, NeoX's pairs, with a norm
    extended("sm90", "decode, 64", 128, "plain", {}), ("sm90", "decode, 64", 128, "e4m3", {}),
    extended("sm90", "decode, 64", 128, "plain", {"rotary_dim": 96, "interleaved": True, "qk_norm": False}),
    extended("sm90", "drafts", 128, "e4m3", {"rotary_dim": 64}),
    extended("sm90", "decode, split", 256, "MQA", {"rope": False}),
    extended("gfx942", "decode, 64", 128, "e4m3", {}), extended("gfx942", "drafts", 64, "plain", {"interleaved": True}),
    extended("sm80", "decode, 64", 128, "plain", {}),
    extended("sm80", "decode, split", 64, "plain", {"qk_norm": False}),
    extended("sm89", "drafts", 128, "e4m3", {"interleaved": True}), extended("sm100", "decode, 64", 128, "plain", {}),
]  # fmt: skip


@pytest.mark.parametrize(("target", "batch", "head_dim", "features", "how"), ROTATIONS)
def test_a_launch_that_rotates_new_tokens_compiles_fits_and_does_not_spill(
    target, batch, head_dim, features, how, assembled
):
    """Decode on an SM of sm90 has room for the programs that are planned."""
    with compiling(TARGETS[target]) as compiled:
        plan = launches.rotate(batch, head_dim, features, **how)
    kernel, *others = without_schedules(compiled)
    assert [other.kernel for other in others] in ([], ["combine_partials_kernel"])
    print(f"{target:7} {features:18} {batch} {how} {kernel}")
    assert kernel.kernel == "portable_kernel"
    assert kernel.shared <= TARGETS[target].shared_memory and kernel.occupancy >= 1, kernel
    if target in NO_SPILLS:
        around = ON_THE_STACK_OF_PAIRS if features == "e4m3" else BY_CHOICE  # as for `append`
        # With Triton 3.6.0 and 3.7.1, a norm over 256 columns takes all registers and 32 bytes, before that loop.
        # With 3.9.0, drafts over e4m3 take as many, outside of it.
        older = triton.__version__ in ("3.6.0", "3.7.1")
        full = 32 if older and head_dim == 256 else 24 if not older and (batch, features) == ("drafts", "e4m3") else 0
        assert kernel.spills <= (around if kernel.registers < REGISTERS else full), kernel
        if kernel.spills and target == "sm90":
            assert not any(loops.count_kinds(loop)["local memory"] for loop in loops.attending(assembled[0]))
    if (target, batch, head_dim) == ("sm90", "decode, 64", 128):
        assert kernel.occupancy >= plan.launch.config.programs_per_sm, kernel


@pytest.mark.parametrize(
    ("target", "features"), [each_kind("sm90", "plain"), extended("sm80", "e4m3"), ("gfx942", "int8 per token")]
)
def test_the_kernel_that_rotates_before_attention_compiles_and_does_not_spill(target, features):
    wanted = launches.FEATURES[features]
    with compiling(TARGETS[target]) as compiled:
        for heads, how in (((32, 8), {}), ((64, 1), {"interleaved": True})):
            plan = launches.plan_of("prompt", launches.make_spec(128, replace(wanted, heads=heads)), wanted)
            inputs = launches.make_inputs(plan, wanted) | launches.new_tokens(plan)
            api.norm_rope_and_write(
                inputs["q"],
                torch.empty_like(inputs["q"]),
                *(inputs[name] for name in ("cache", "k", "v", "slot_mapping")),
                *launches.norm_rope_of(plan, **how).values(),
            )
    assert [kernel.kernel for kernel in compiled] == ["norm_rope_kernel"] * 2
    assert not [kernel for kernel in compiled if kernel.spills or kernel.occupancy * kernel.num_warps < 8], compiled


@triton.jit
def does_not_compile(
    new, norm_rope, cache, kv, first, count, kv_head, NEW_TOKENS: tl.constexpr, ENCODE: tl.constexpr,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    tl.static_assert(False, "new tokens")


COMPILE_GLUON = """
import threading

import quire
from quire.targets import TARGETS, Launch, compile_all

launch = Launch(quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=64), 8, 512, 512, 4096)
((_, words, compiled),) = compile_all([launch], TARGETS["sm90"])
assert "Hopper kernel" in words and compiled, words
assert threading.active_count() == 1, "one that still ends would write to a closed pipe when the process ends"
"""


@of_tritons_in_use
def test_processes_that_compiled_gluon_end_without_a_word(tmp_path):
    """In a process of its own, since Triton's bindings print nothing at the end of one that imports pytest."""
    here = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}  # empty: from a full one, nothing would be compiled
    done = subprocess.run([sys.executable, "-c", COMPILE_GLUON], env=here, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@triton.jit
def does_not_rotate(
    ptrs, inside, token, weight, norm_rope, offs_d,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    tl.static_assert(False, "rotated")


def launch_anew(monkeypatch, launch) -> None:
    """Launch the portable kernel, compiled from what its module holds now."""
    for name in ("attend", "portable_kernel"):
        kernel = getattr(portable, name)
        monkeypatch.setattr(portable, name, triton.jit(kernel.fn, do_not_specialize=kernel.do_not_specialize))
    with compiling(TARGETS["sm90"]):
        launch()


@pytest.mark.parametrize("part", ["new tokens", "rotated"])
@pytest.mark.parametrize(("batch", "features"), [("decode, 64", "e4m3"), ("decode, short", "plain")])
def test_a_launch_without_a_part_has_none_of_its_code(part, batch, features, monkeypatch, first_stages):
    """Its IR, and so its machine code, is that of a kernel whose part for new tokens, or rotation, does not compile."""
    without, with_it = (
        (launches.attend, launches.append) if part == "new tokens" else (launches.append, launches.rotate)
    )
    launch_anew(monkeypatch, lambda: without(batch, 64, features))
    if part == "rotated":
        monkeypatch.setattr(primitives, "load_rotated", does_not_rotate)
        for name in ("load_queries", "write_new"):
            monkeypatch.setattr(portable, name, triton.jit(getattr(primitives, name).fn))
    else:
        monkeypatch.setattr(portable, "write_new", does_not_compile)
    launch_anew(monkeypatch, lambda: without(batch, 64, features))
    whole, cut = (stage for stage in first_stages if stage[0] == "portable_kernel")
    with compiling(TARGETS["sm90"]), pytest.raises(triton.CompilationError) as raised:
        with_it(batch, 64, features)
    call = "load_queries(" if part == "rotated" else "write_new("
    error, calls = raised.value, list[str]()  # the kernel's own error is at a call, whose error is the cause
    while error is not None:
        calls.append(str(error))
        error = error.__cause__
    assert any(call in each for each in calls)
    assert whole == cut


@pytest.mark.hopper
@pytest.mark.parametrize(("num_q_heads", "allow_fp8"), [(16, False), extended(128, False), (128, True)])
def test_the_mla_kernel_for_hopper_gpus_takes_fp8_latents_without_a_scale(num_q_heads, allow_fp8, first_stages):
    """The first stage puts 1 for it. A test below compiles the kernel with a scale to the end."""
    spec = quire.AttentionSpec.mla(
        num_q_heads=num_q_heads, softmax_scale=0.1, kv_dtype=torch.float8_e4m3fn, allow_fp8=allow_fp8
    )
    cache = quire.PagedKVCache.from_latents(torch.empty(4, 64, 576, dtype=torch.float8_e4m3fn), 512)
    batch = quire.Batch(torch.zeros(8, 64, dtype=torch.int32), torch.zeros(8, dtype=torch.int32))
    with compiling(TARGETS["sm90"]):
        plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=4096)
        quire.attention(torch.empty(8, num_q_heads, 576, dtype=torch.bfloat16), cache, plan)
    assert [name for name, _, _ in first_stages] == ["mla_schedule_kernel", "mla_hopper_kernel", "mla_combine_kernel"]


@pytest.mark.parametrize(
    ("target", "share"),
    [
        case
        for x in TARGETS
        for case in ({"sm90": each_kind, "gfx950": pytest.param}.get(x, extended)(x, 9), extended(x, 3))
    ],
)
def test_writes_copies_and_merges_compile_and_do_not_spill(target, share):
    """Each target compiles a share of the features, one of the widths and two of the kinds of latents, in turn."""
    turn = list(TARGETS).index(target)
    assert share <= len(TARGETS)
    records = [name for name, latents in launches.LATENTS.items() if latents[2] != "NHD"]
    others = [name for name in launches.LATENTS if name not in records]
    turn_of_latents = turn + share  # others than those of the other share
    with compiling(TARGETS[target]) as compiled:
        for features in list(launches.FEATURES)[turn % share :: share]:
            launches.write(64, features)
            launches.merge(80, features)
        width = (192, 256, 512)[turn_of_latents % 3]
        launches.write(width, "plain")
        launches.merge(width, "plain")
        for kinds in (records, others):
            launches.write_latents(kinds[turn_of_latents % len(kinds)])
    written = {"write_kernel", "write_latent_kernel", "write_record_kernel"}
    assert {c.kernel for c in compiled} == {*written, "copy_kernel", "combine_kernel"}
    assert not [c for c in compiled if c.spills or c.shared > TARGETS[target].shared_memory]


@pytest.mark.parametrize("target", ["gfx942", extended("gfx950")])
def test_amd_s_hints_reach_its_compiler(target):
    """The hint for waves raises the occupancy; the hint for smaller matrix instructions lowers the registers."""
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    config = KernelConfig(64, 32, 4, 1, False, 1, 128, 128)
    found = {}
    for hints in ({}, {"waves_per_eu": 1}, {"matrix_instr_nonkdim": 16}):
        hinted_config = replace(config, **hints)
        launch = Launch(spec, 4, 64, 4096, 256, options=(("config", hinted_config),))
        (compiled,) = without_schedules(launch.compile(TARGETS[target])[1])
        assert not compiled.spills and compiled.shared <= TARGETS[target].shared_memory
        found[tuple(hinted_config.hints)] = compiled
    assert len(found) == 3 and found["waves_per_eu",].occupancy == 1 < found[()].occupancy
    assert found["matrix_instr_nonkdim",].registers < found[()].registers


@pytest.mark.parametrize(("target", "block_m", "block_n"), [("sm90", 64, 16), extended("gfx942", 128, 32)])
def test_the_suite_sees_a_spill(target, block_m, block_n, monkeypatch):
    """A configuration that the registers cannot hold is reported as spilling: the tests above can fail."""
    too_large = KernelConfig(
        block_m=block_m,
        block_n=block_n,
        num_warps=1,
        num_stages=1,
        full_tile_loop=False,
        programs_per_sm=1,
        block_d=128,
        block_dv=128,
    )
    forget()  # and with them the choices of other tests
    with monkeypatch.context() as patch, compiling(TARGETS[target]) as compiled:
        patch.setattr("quire.kernels.portable.variants.configs_of", lambda *args: {"too large": too_large})
        patch.setattr("quire.kernels.portable.variants.uses_listed", lambda *args: {})  # all
        launches.attend("decode", 128, "plain")
    forget()
    assert without_schedules(compiled)[0].spills > 0


# Records are served, but not fast. The loop over tiles of float32 has products without tensor cores.
LATENTS_MAY_SPILL = ("odd widths", *(name for name in launches.LATENTS if "records" in name))
LATENTS_BY_DEFAULT = {
    ("sm90", "bfloat16", "decode"): each_kind,
    ("sm80", "no rotary columns", "drafts"): pytest.param,
    ("gfx942", "odd widths", "decode"): pytest.param,
}


@pytest.mark.parametrize(
    ("target", "features", "batch"),
    [
        LATENTS_BY_DEFAULT.get((target, *launch), extended)(target, *launch)
        for target in TARGETS
        for launch in launches.LATENT_LAUNCHES[target]
    ],
)
def test_attention_over_latents_compiles_fits_and_does_not_spill(target, features, batch, assembled):
    """The portable MLA kernel."""
    with compiling(TARGETS[target]) as compiled:
        launches.attend_to_latents(batch, features)
    (kernel,) = without_schedules(compiled)
    print(f"{target:7} {features:18} {batch} {kernel}")
    assert kernel.shared <= TARGETS[target].shared_memory and kernel.occupancy >= 1, kernel
    if target in NO_SPILLS and features not in LATENTS_MAY_SPILL:
        known = LATENTS_KNOWN_SPILLS.get((target, features, batch), 0)
        assert kernel.spills <= (ON_THE_STACK_OF_LATENTS if kernel.registers < REGISTERS else known), kernel
        if kernel.spills > max(BY_CHOICE, known):
            assert not any(loops.count_kinds(loop)["local memory"] for loop in loops.attending(assembled[0]))


@pytest.mark.parametrize(
    ("target", "features"),
    [
        (target, features) if (target, features) in CHOSEN_BY_DEFAULT else extended(target, features)
        for target in TARGETS
        for features in launches.CHOSEN
    ],
)
def test_attention_to_chosen_keys_compiles_and_fits(target, features):
    with compiling(TARGETS[target]) as compiled:
        plan = launches.attend_to_chosen(features, kernel="chosen")
    kernel, *combine = compiled  # of a few tokens, lists are cut
    assert plan.kernel == "chosen" and kernel.kernel.startswith("chosen_")
    assert [each.kernel for each in combine] == (["combine_chosen_kernel"] if plan.launch.num_splits > 1 else [])
    for each in compiled:
        assert each.shared <= TARGETS[target].shared_memory and each.occupancy >= 1, each
        if target in NO_SPILLS:
            # Blocks of 64 heads leave few registers for what is carried, with Triton 3.9.0 none.
            few, many = (88, 608) if triton.__version__ == "3.9.0" else (BY_CHOICE, 96)
            if "584" in features or "528" in features:  # eight parts have addresses, in each of two loops of two lists
                few, many = max(few, 24), 608
            assert each.spills <= (many if plan.launch.config.block_m == 64 else few), each


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize("are_slots", [True, extended(False)])
@pytest.mark.parametrize(
    ("num_q_heads", "layout"),
    [
        (16, "NHD"),
        extended(16, "fp8_ds_mla"),
        extended(32, "NHD"),
        extended(32, "fp8_ds_mla"),
        extended(128, "NHD"),
        (128, "fp8_ds_mla"),
    ],
)
def test_the_kernel_of_chosen_keys_for_hopper_gpus_does_not_spill(num_q_heads, layout, are_slots):
    """Row blocks of 64 and of 32 rows hold 128 registers of the output in each consumer."""
    records = {} if layout == "NHD" else {"kv_dtype": torch.float8_e4m3fn, "allow_fp8": num_q_heads > 32}
    spec = quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=0.1, causal=not are_slots, **records)
    lens, table = torch.zeros(8, dtype=torch.int32), torch.zeros(8, 64, dtype=torch.int32)
    lists = quire.ChosenKeys(torch.zeros(8, 2048, dtype=torch.int32), lens, are_slots=are_slots)
    with compiling(TARGETS["sm90"]) as compiled:
        plan = quire.plan(spec, quire.Batch(table, lens, chosen=lists), max_query_len=1, max_seq_len=4096)
        cache = quire.PagedKVCache.empty(spec, 4, 64, layout=layout)
        quire.attention(torch.empty(8, num_q_heads, 576, dtype=torch.bfloat16), cache, plan, return_lse=True)
    assert plan.kernel == "chosen_hopper"
    kernel, combine = compiled
    assert (kernel.kernel, combine.kernel) == ("chosen_hopper_kernel", "combine_lists_kernel")
    assert kernel.shared <= TARGETS["sm90"].shared_memory, kernel
    assert kernel.spills <= {16: 0, 32: 300}.get(num_q_heads, ON_THE_STACK["mla_hopper_kernel"]), kernel
    assert combine.spills == 0, combine


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize("are_slots", [extended(True), False])
@pytest.mark.parametrize(
    ("num_q_heads", "layout"), [(16, "NHD"), extended(16, "fp8_ds_mla"), extended(8, "NHD"), extended(32, "NHD")]
)
def test_the_kernels_of_unions_do_not_spill(num_q_heads, layout, are_slots):
    with compiling(TARGETS["sm90"]) as compiled:
        plan = launches.attend_to_unions(num_q_heads, layout, are_slots)
    assert plan.launch.union > 1
    unite, united, left_out = compiled
    assert unite.kernel == "unite_lists_kernel" and unite.spills == 0, unite
    for kernel in united, left_out:
        assert kernel.kernel == "chosen_hopper_kernel" and kernel.shared <= TARGETS["sm90"].shared_memory, kernel
        assert kernel.spills <= {32: 300}.get(num_q_heads, ON_THE_STACK["mla_hopper_kernel"]), kernel


@pytest.mark.parametrize("target", [target if target == "sm90" else extended(target) for target in TARGETS])
def test_what_comes_before_chosen_keys_compiles_and_fits(target):
    with compiling(TARGETS[target]) as compiled:
        launches.choose_keys()
    assert {each.kernel for each in compiled} == {"mqa_logits_kernel", "block_scores_kernel", "top_k_kernel"}
    for each in compiled:
        assert each.shared <= TARGETS[target].shared_memory and each.occupancy >= 1, each
        assert each.spills <= BY_CHOICE or target not in NO_SPILLS, each


@pytest.mark.parametrize(
    ("target", "features"),
    [
        extended("sm80", "bfloat16"),
        extended("sm89", "e4m3"),
        extended("sm90", "bfloat16"),
        extended("gfx942", "bfloat16"),
    ],
)
def test_batch_invariant_attention_over_latents_fits(target, features):
    """The loop stores the states of splits through shared memory, which must fit next to the tiles."""
    with compiling(TARGETS[target]) as compiled:
        launches.attend_to_latents("decode", features, batch_invariant=True)
    attends, folds = without_schedules(compiled)
    assert folds.kernel == "combine_partials_kernel"
    for each in (attends, folds):
        assert each.shared <= TARGETS[target].shared_memory and each.occupancy >= 1, each
        if target in NO_SPILLS:
            assert each.spills <= (BY_CHOICE if each.registers < REGISTERS else 0), each


@pytest.mark.parametrize(
    ("target", "batch"), [extended("sm80", "decode"), each_kind("sm90", "decode"), extended("sm90", "many heads")]
)
def test_a_tile_of_latents_is_loaded_once_and_ahead(target, batch):
    """Shared memory holds queries, and a tile for each stage but one: keys and values are no two copies of a tile."""
    with compiling(TARGETS[target]) as compiled:
        plan = launches.attend_to_latents(batch, "bfloat16")
    config = plan.launch.config
    row, (kernel,) = 2 * (512 + 64), without_schedules(compiled)
    tiles = (kernel.shared - config.block_m * row) / (config.block_n * row)
    assert config.num_stages > 1 and config.num_stages - 1 <= tiles < config.num_stages - 0.8, kernel


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize(
    ("num_q_heads", "kv_dtype", "blocks"),
    [
        *((16, None, "narrow"), extended(16, torch.float8_e4m3fn, "narrow")),
        *((128, None, "narrow"), extended(128, torch.float8_e4m3fn, "narrow")),
        *((128, None, "wide"), extended(128, torch.float8_e4m3fn, "wide")),
    ],
)
def test_the_mla_kernel_for_hopper_gpus_does_not_spill(num_q_heads, kv_dtype, blocks, take):
    """Consumers hold 64 registers of the output for 16 heads, otherwise 128: of 255, or of 208 for wide fp8 blocks."""
    take(blocks, "cut")
    spec = quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=0.1, kv_dtype=kv_dtype)
    launch = Launch(spec, 8, 1, 4096, 8)
    plan, compiled = launch.compile(TARGETS["sm90"])
    assert plan.kernel == "mla_hopper"
    assert [c.kernel for c in compiled] == ["mla_schedule_kernel", "mla_hopper_kernel", "mla_combine_kernel"]
    assert plan.launch.columns == (16 if num_q_heads == 16 else 32 if blocks == "narrow" else 64)
    many = ON_THE_STACK_OF_CONVERTERS if kv_dtype else ON_THE_STACK["mla_hopper_kernel"]
    few = ON_THE_STACK_OF_FEW_FP8_ROWS if kv_dtype else 0
    limit = {16: few, 32: ON_THE_STACK_OF_TURNS if kv_dtype else 80}.get(plan.launch.columns, many)
    on_the_stack = {"mla_hopper_kernel": limit}
    assert all(c.spills <= on_the_stack.get(c.kernel, 0) for c in compiled), compiled


@pytest.mark.hopper
@of_tritons_in_use
@pytest.mark.parametrize("num_q_heads", [16, 128])
def test_fp8_products_of_latents_compile_for_more_than_32_rows(num_q_heads):
    """Fewer rows have the launch without them."""
    spec = quire.AttentionSpec.mla(
        num_q_heads=num_q_heads, softmax_scale=0.1, kv_dtype=torch.float8_e4m3fn, allow_fp8=True
    )
    launch = Launch(spec, 32, 1, 8192, 32) if num_q_heads == 128 else Launch(spec, 8, 1, 4096, 8)
    plan, compiled = launch.compile(TARGETS["sm90"])
    assert plan.kernel == "mla_hopper" and plan.launch.fp8_mma == (num_q_heads == 128)
    assert [c.kernel for c in compiled] == ["mla_schedule_kernel", "mla_hopper_kernel", "mla_combine_kernel"]
    kernel = compiled[1]
    assert kernel.spills <= (ON_THE_STACK_OF_PRODUCTS if num_q_heads == 128 else ON_THE_STACK_OF_FEW_FP8_ROWS), kernel
    assert kernel.shared <= TARGETS["sm90"].shared_memory, kernel
