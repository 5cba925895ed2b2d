"""A relaunch passes the arguments that Triton's binder passes. No GPU is needed: a stand-in records them.

Triton's own code encodes tensor descriptors, and calls a stand-in for the driver's function.
"""

import contextlib
import dataclasses
import gc
import logging
import re
import sys
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import quire
from quire import api, log
from quire.dispatch.device import compile_for
from quire.dispatch.request import cdiv
from quire.kernels import combine, launcher, norm_rope, ranges, times, write, write_latent
from quire.kernels.launcher import Arguments, Kernel, address_of, kinds_of, tensors_of
from quire.kernels.portable.runner import FOUND_NOW
from quire.kernels.scheduler import SCHEDULERS
from quire.kernels.scratch import Part
from quire.kernels.tensor_maps import KEPT, Format
from quire.kernels.views import Partials
from quire.plan import make_plan
from quire.targets import TARGETS
from quire.triton_internals import StubDriver
from tests.compile import launches
from tests.extended import OLDEST, each_kind, extended

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)


def plain(value):
    """Return tensors as their addresses, wherever they are, and lists as tuples."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return tuple(plain(v) for v in value) if isinstance(value, tuple | list) else value


class Launcher:
    """Stands for Triton's launcher of a compiled kernel. It expands descriptors as Triton's does.

    `passed` is what the kernels would get.
    """

    passed = []

    def __init__(self, src, metadata):
        self.types, self.name, self.formats = src.signature, metadata.name, metadata.tensordesc_meta or ()

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        expanded, formats = [], iter(self.formats)
        for argument in arguments:
            if hasattr(argument, "block_shape"):
                further = [None] * (nvidia.make_tensordesc_arg.__code__.co_argcount - 2)
                expanded += nvidia.make_tensordesc_arg(argument, next(formats), *further)
            else:
                expanded.append(argument)
        self.passed.append((self.name, (x, y, z), plain(expanded)))


class Driver(StubDriver):
    """A driver that launches nothing, and encodes tensor maps as the numbers that they are made of."""

    launcher_cls = Launcher

    def __init__(self, target):
        super().__init__(target.name, target.gpu)
        fill = mock.Mock(side_effect=lambda *facts: ("tensor map", *plain(facts)))
        self.utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)


@pytest.fixture
def passed(monkeypatch):
    """What Triton's launchers are called with."""

    def stand_in(kernel):
        kernel.function = 0
        kernel._run = Launcher(kernel.src, kernel.metadata)

    monkeypatch.setattr(triton.compiler.CompiledKernel, "_init_handles", stand_in)
    monkeypatch.setattr(Launcher, "passed", [])
    monkeypatch.setattr(launcher, "SHARED", {})
    return Launcher.passed


def attend(plan, **inputs):
    """Attend after a write to the lengths, so that the schedule is found first, also if another plan has found it."""
    plan.batch.seq_lens.add_(0)
    return quire.attention(**inputs, plan=plan)


def schedules_of(launch):
    """Return the kernels that find schedules before the first layer."""
    if launch.name == "hopper":
        return ["hopper_schedule_kernel"] if launch.decode is None else ["hopper_schedule_kernel", "schedule_kernel"]
    return ["schedule_kernel"] if launch.name == "split_kv" else []


def without_launches(plan):
    """Return the same plan when neither it nor another plan has compiled launches. Both share a schedule."""
    launcher.SHARED.clear()
    for schedule in SCHEDULERS.values():
        schedule.kernel = None
    return make_plan(plan.spec, plan.batch, plan.launch, "a plan without compiled launches", plan.workspace)


def with_other_tensors(plan):
    """Return a plan of the same launch for a batch of which all tensors are copies, as aligned as those."""
    copies = {}
    for name in (f.name for f in dataclasses.fields(plan.batch) if f.init):
        value = getattr(plan.batch, name)
        if isinstance(value, torch.Tensor):
            offset = value.data_ptr() % 16 // value.itemsize
            copy = torch.empty(value.numel() + offset, dtype=value.dtype)[offset:]
            copies[name] = copy.view(value.shape).copy_(value)
    workspace = None if plan.workspace is None else plan.workspace.clone()
    return make_plan(plan.spec, dataclasses.replace(plan.batch, **copies), plan.launch, "the next step's", workspace)


ROTATION = [  # `test_compile` compiles the same kernels, so one of the two finds them in Triton's cache
    (target, features, batch, head_dim)
    for target in ("sm80", "sm90")
    for features in ("plain", "e5m2 per token", "fp8 products", *launches.OUT_OF_TURN)
    for batch, head_dim in launches.selection(target, features)
    if (target, features) != ("sm90", "plain") or head_dim == 128
    if (target, features) != ("sm80", "fp8 products")
]
IS_OLDEST = triton.__version__ == OLDEST
# Kernels for prompts on Hopper GPUs take longest to compile.
OF_HOPPER = (*launches.OUT_OF_TURN, "fp8 products")
LONG = [case for case in ROTATION if case[0] == "sm90" and case[1] in OF_HOPPER]
CASES = [
    extended(*case)
    if launches.is_extended(*case) or case in LONG
    else (each_kind if case[:2] == ("sm90", "plain") else pytest.param)(*case)
    for case in ROTATION
]
of_hopper = pytest.param if IS_OLDEST else extended
CASES += [extended("sm90", "pages of 1, flat", "chunk, split", 128)]
E4M3_OUTPUT = "sinks, lse, e4m3 output"
CASES += [("sm80", E4M3_OUTPUT, "decode, split", 128)]
CASES += [extended("sm90", E4M3_OUTPUT, "chunk, split", 128)]
CASES += [extended("sm90", E4M3_OUTPUT, "prompt", 256), extended("sm90", E4M3_OUTPUT, "mixed", 128)]


@pytest.mark.parametrize(("target", "features", "batch", "head_dim"), CASES)
def test_a_relaunch_passes_what_the_binder_passes(target, features, batch, head_dim, passed):
    before = driver._active
    driver.set_active(Driver(TARGETS[target]))
    try:
        wanted = (launches.FEATURES | launches.COMBINED)[features]
        spec = launches.make_spec(head_dim, wanted)
        with compile_for(TARGETS[target].properties, on_compile=None):
            plan = launches.plan_of(batch, spec, wanted)
        inputs = [launches.make_inputs(plan, wanted) for _ in range(2)]
        for some in inputs:
            out = torch.empty_like(some["q"], dtype=torch.float8_e4m3fn if wanted.out_scale else None)
            some["out"] = quire.State(out, torch.empty(out.shape[:2])) if wanted.lse else out
        if wanted.out_scale:  # wherever it lies
            inputs[1]["out_scale"] = torch.ones(5)[1:2]
        quire.attention(**inputs[0], plan=plan)
        first = len(passed)
        with mock.patch.object(JITFunction, "run", side_effect=AssertionError("went through the binder")):
            attend(plan, **inputs[1])
        again = passed[first:]
        next_step, scale = with_other_tensors(plan), {"out_scale": inputs[0]["out_scale"]} if wanted.out_scale else {}
        with mock.patch.object(JITFunction, "run", side_effect=AssertionError("went through the binder")):
            attend(next_step, **inputs[1] | scale)
        after = len(passed)
        attend(without_launches(next_step), **inputs[1] | scale)
        bound_after = len(passed)
        attend(without_launches(plan), **inputs[1])
    finally:
        driver._active = before
    of_next_step = passed[first + len(again) : after]
    assert again == passed[bound_after:] != passed[:first]
    assert of_next_step == passed[after:bound_after] != again
    launch = plan.launch.for_cache(inputs[0]["cache"])
    if launch.name == "decoded":
        launch, decodes, *again = launch.attend, *again
        assert decodes[0] == "decode_kernel"
    if launch.name == "hopper":
        has_second = launch.decode is not None or launch.num_splits > 1
    else:
        has_second = launch.name == "split_kv" and launch.has_combine_launch
    schedules = schedules_of(launch)
    assert [name for name, *_ in again if name in launches.SCHEDULES] == schedules
    assert [name for name, *_ in again[: len(schedules)]] == schedules
    assert len(again) == len(schedules) + 1 + has_second
    assert (launch.name == "hopper" and launch.num_splits > 1) == (
        target == "sm90"
        and batch == "chunk, split"
        and (head_dim == 128 or plan.launch.name == "decoded")
        and spec.sliding_window is None
    )


@pytest.mark.parametrize("features", ["plain", extended("e4m3")])
def test_a_relaunch_that_writes_new_tokens_passes_what_the_binder_passes(features, passed, monkeypatch):
    """Tokens of other dtypes or strides go through the binder, and so does a call without any."""
    monkeypatch.setattr(driver, "_active", Driver(TARGETS["sm90"]))
    wanted = launches.FEATURES[features]
    spec = launches.make_spec(128, wanted)
    with compile_for(TARGETS["sm90"].properties, on_compile=None):
        plan = launches.plan_of("decode, 64", spec, wanted)
    layers = []
    for _ in range(2):
        some = launches.make_inputs(plan, wanted) | launches.new_tokens(plan)
        layers.append(some | {"out": torch.empty_like(some["q"])})
    quire.attention(**layers[0], plan=plan)
    with mock.patch.object(JITFunction, "run", side_effect=InterruptedError("went through the binder")):
        attend(plan, **layers[1])
        others = [{"k": layers[1]["k"].contiguous()}, {"v": layers[1]["v"].contiguous()}]
        others += [{"k": None, "v": None, "slot_mapping": None}]
        if features == "e4m3":
            others += [
                {name: torch.empty_strided(x.shape, x.stride(), dtype=torch.float16)}
                for name, x in layers[1].items()
                if name in ("k", "v")
            ]
        for other in others:
            with pytest.raises(InterruptedError):
                quire.attention(**layers[1] | other, plan=plan)
                pytest.fail(f"relaunched for other {', '.join(other)}")
    attend(without_launches(plan), **layers[1])
    each = len(schedules_of(plan.launch)) + 1 + plan.launch.has_combine_launch
    assert len(passed) == 3 * each and passed[each : 2 * each] == passed[2 * each :] != passed[:each]


@pytest.mark.parametrize("batch", ["decode, 64", "prompt"])
def test_where_kernels_are_only_compiled_none_is_launched_that_another_plan_has_launched(batch, passed, monkeypatch):
    """It would read a schedule that was not found: the kernel that finds it may be still to compile."""
    monkeypatch.setattr(driver, "_active", Driver(TARGETS["sm90"]))
    wanted = launches.FEATURES["plain"]
    with compile_for(TARGETS["sm90"].properties, on_compile=None):
        plan = launches.plan_of(batch, launches.make_spec(128, wanted), wanted)
    some = launches.make_inputs(plan, wanted)
    quire.attention(**some, plan=plan)
    before = [*passed]
    with compile_for(TARGETS["sm90"].properties, on_compile=lambda *compiled: None):
        quire.attention(**some, plan=with_other_tensors(plan))
    assert passed == before != []


def test_a_relaunch_asks_no_logger_and_a_first_launch_is_logged(passed, monkeypatch, caplog):
    monkeypatch.setattr(driver, "_active", Driver(TARGETS["sm90"]))
    monkeypatch.setattr(log, "SAID", {})
    wanted = launches.FEATURES["plain"]
    with compile_for(TARGETS["sm90"].properties, on_compile=None):
        plan = launches.plan_of("decode, 64", launches.make_spec(128, wanted), wanted)
    some = launches.make_inputs(plan, wanted) | launches.new_tokens(plan)
    with caplog.at_level(logging.DEBUG, "quire.launch"):
        quire.attention(**some, plan=plan)
    assert [name for name, *_ in passed] == ["schedule_kernel", "portable_kernel", "combine_partials_kernel"]
    for (name, grid, _), line in zip(passed, caplog.messages, strict=True):
        how = "compiled in|from the cache in|loaded before"
        assert re.fullmatch(rf"{name}, grid {grid[0]} × 1 × 1, ({how}).*", line)
    called = set()
    sys.setprofile(lambda frame, event, value: called.add(frame.f_code.co_filename))
    try:
        quire.attention(**some, plan=plan)
    finally:
        sys.setprofile(None)
    assert launcher.__file__ in called
    assert not called & {log.__file__, ranges.__file__, times.__file__, logging.__file__, contextlib.__file__}


@pytest.mark.parametrize(("batch", "name"), [("decode, 64", "portable_kernel"), ("prompt", "norm_rope_kernel")])
def test_a_relaunch_that_rotates_passes_what_the_binder_passes(batch, name, passed, monkeypatch):
    """In the launch that attends, and before it. Another table or norm goes through the binder, another address not."""
    monkeypatch.setattr(driver, "_active", Driver(TARGETS["sm90"]))
    monkeypatch.setattr(norm_rope.NORM_ROPE, "compiled", {})
    monkeypatch.setattr(write, "device_properties", lambda device: TARGETS["sm90"].properties)
    monkeypatch.setattr(api, "is_served_by_torch", lambda device: False)
    wanted = launches.FEATURES["plain"]
    spec = launches.make_spec(128, wanted)
    with compile_for(TARGETS["sm90"].properties, on_compile=None):
        plan = launches.plan_of(batch, spec, wanted)
    layers = []
    for _ in range(2):
        some = launches.make_inputs(plan, wanted) | launches.new_tokens(plan) | launches.norm_rope_of(plan)
        layers.append(some | {"out": torch.empty_like(some["q"])})
    layers[1]["qk_norm"] = layers[1]["qk_norm"]._replace(eps=0.5)  # which a compiled kernel takes

    def passed_by(layer):
        before = len(passed)
        attend(plan, **layer)
        # The second tensor of `norm_rope_kernel` is new in each call: the rotated queries.
        return [
            (grid, facts if batch == "decode, 64" else (facts[0], *facts[2:]))
            for kernel, grid, facts in passed[before:]
            if kernel == name
        ]

    (first,) = passed_by(layers[0])
    rope, norm = layers[1]["rope"], layers[1]["qk_norm"]
    odd = torch.zeros(rope.positions.shape[0] + 1, dtype=torch.int64)[1:]
    with mock.patch.object(JITFunction, "run", side_effect=InterruptedError("went through the binder")):
        (again,) = passed_by(layers[1])
        assert len(passed_by(layers[1] | {"rope": rope._replace(positions=odd)})) == 1
        for other in (
            {"rope": rope._replace(interleaved=True)},
            {"rope": rope._replace(cos=rope.cos[:, :32], sin=rope.sin[:, :32])},
            {"rope": rope._replace(cos=rope.cos.contiguous())},
            {"rope": rope._replace(cos=rope.cos.float(), sin=rope.sin.float())},
            {"rope": rope._replace(positions=rope.positions.int())},
            {"rope": None},
            {"qk_norm": norm._replace(k_weight=norm.k_weight.float())},
            {"qk_norm": None},
        ):
            with pytest.raises(InterruptedError):
                quire.attention(**layers[1] | other, plan=plan)
                pytest.fail(f"relaunched for other {other}")
    monkeypatch.setattr(norm_rope.NORM_ROPE, "compiled", {})
    plan = without_launches(plan)
    (bound,) = passed_by(layers[1])
    assert again == bound != first


@pytest.mark.parametrize(
    ("target", "batch", "head_dim", "kernel"),
    [("sm80", "decode, split", 64, "split_kv"), ("sm90", "prompt", 128, "hopper")],
)
def test_tensors_of_another_kind_go_through_the_binder(target, batch, head_dim, kernel, passed, monkeypatch):
    """What was compiled for some strides, dtypes and layouts is launched again for the same only.

    The Hopper kernel is not compiled for strides of queries, which TMA reads.
    """
    monkeypatch.setattr(driver, "_active", Driver(TARGETS[target]))
    wanted = launches.FEATURES["plain"]
    spec = launches.make_spec(head_dim, wanted)
    with compile_for(TARGETS[target].properties, on_compile=None):
        plan = launches.plan_of(batch, spec, wanted)
    assert plan.kernel == kernel
    inputs = launches.make_inputs(plan, wanted)
    q, tokens = inputs["q"], inputs["q"].shape[0]
    inputs["out"] = torch.empty_like(q)

    def rows_of(columns: int) -> torch.Tensor:
        return torch.empty(tokens, spec.num_q_heads, columns, dtype=q.dtype)[..., :head_dim]

    others = {
        "q": {"q": rows_of(head_dim + 16)},
        "out": {"out": rows_of(head_dim + 16)},
        "lse": {"out": quire.State(inputs["out"], torch.empty(q.shape[:2]))},
        "cache": {"cache": quire.PagedKVCache.empty(spec, 4, wanted.page_size, layout="HND")},
        "page size": {"cache": quire.PagedKVCache.empty(spec, 4, 2 * wanted.page_size)},
    }
    quire.attention(**inputs, plan=plan)
    with mock.patch.object(JITFunction, "run", side_effect=InterruptedError("went through the binder")):
        quire.attention(**inputs, plan=plan)
        if kernel == "hopper":
            before, queries = len(passed), others.pop("q")
            attend(plan, **inputs | queries)
            again = passed[before:]
        for what, other in others.items():
            with pytest.raises(InterruptedError):
                quire.attention(**inputs | other, plan=plan)
                pytest.fail(f"relaunched for another {what}")
    if kernel == "hopper":
        before = len(passed)
        attend(without_launches(plan), **inputs | queries)
        assert again == passed[before:] != passed[:2]
        assert [name for name, *_ in again] == ["hopper_schedule_kernel", "hopper_kernel"]


def test_queries_at_an_odd_address_have_a_kernel_of_their_own_and_are_relaunched(passed, monkeypatch):
    monkeypatch.setattr(driver, "_active", Driver(TARGETS["sm80"]))
    wanted = launches.FEATURES["plain"]
    with compile_for(TARGETS["sm80"].properties, on_compile=None):
        plan = launches.plan_of("decode, split", launches.make_spec(64, wanted), wanted)
    inputs = launches.make_inputs(plan, wanted)
    inputs["out"] = torch.empty_like(inputs["q"])
    odd = torch.empty(inputs["q"].numel() + 1, dtype=inputs["q"].dtype)[1:].view(inputs["q"].shape)
    quire.attention(**inputs, plan=plan)
    with mock.patch.object(JITFunction, "run", side_effect=InterruptedError), pytest.raises(InterruptedError):
        quire.attention(**inputs | {"q": odd}, plan=plan)
    attend(plan, **inputs | {"q": odd})
    with mock.patch.object(JITFunction, "run", side_effect=AssertionError("went through the binder")):
        attend(plan, **inputs | {"q": odd})
        attend(plan, **inputs)
    aligned, bound, again, aligned_again = [call for call in passed if call[0] == "portable_kernel"]
    assert again == bound != aligned == aligned_again


def test_a_plan_that_was_used_without_lse_passes_it_to_both_of_its_launches(passed, monkeypatch):
    """The launch that combines has a key of its own."""
    monkeypatch.setattr(driver, "_active", Driver(TARGETS["sm90"]))
    wanted = launches.FEATURES["plain"]
    with compile_for(TARGETS["sm90"].properties, on_compile=None):
        plan = launches.plan_of("decode, split", launches.make_spec(128, wanted), wanted)
    inputs = launches.make_inputs(plan, wanted)
    with_lse = quire.State(torch.empty_like(inputs["q"]), torch.empty(inputs["q"].shape[:2]))
    quire.attention(**inputs | {"out": with_lse.out}, plan=plan)
    assert [name for name, *_ in passed] == ["schedule_kernel", "portable_kernel", "combine_partials_kernel"]
    attend(plan, **inputs | {"out": with_lse})
    attend(without_launches(plan), **inputs | {"out": with_lse})
    assert passed[3:6] == passed[6:] != passed[:3]


def test_the_schedule_is_found_before_the_first_layer_alone(passed, monkeypatch):
    """The launches of other layers are told that it is known, and what they are told is no reason to compile."""
    monkeypatch.setattr(driver, "_active", Driver(TARGETS["sm80"]))
    wanted = launches.COMBINED["sinks, lse, e4m3 output"]
    with compile_for(TARGETS["sm80"].properties, on_compile=None):
        plan = launches.plan_of("decode, split", launches.make_spec(128, wanted), wanted)
    inputs = launches.make_inputs(plan, wanted)
    out = torch.empty_like(inputs["q"], dtype=torch.float8_e4m3fn)
    inputs["out"] = quire.State(out, torch.empty(out.shape[:2]))

    def call(**others):
        before = len(passed)
        quire.attention(**inputs | others, plan=plan)
        return passed[before:]

    schedule, (_, first, of_first) = call()
    assert schedule[0] == "schedule_kernel"
    with mock.patch.object(JITFunction, "run", side_effect=AssertionError("went through the binder")):
        ((_, grid, of_second),) = call()
        call(out_scale=torch.ones(5)[1:2])  # elsewhere, for which the kernel is not another one
    assert grid == first
    assert [pair for pair in zip(of_first, of_second, strict=True) if pair[0] != pair[1]] == [(FOUND_NOW, 0)]


@pytest.mark.parametrize("batch", ["decode, 64", "prompt"])
def test_a_step_whose_tensors_are_of_another_kind_goes_through_the_binder(batch, passed, monkeypatch):
    """Triton compiles for numbers that are 1 or divisible by 16. Tables and lengths may be at any address."""
    monkeypatch.setattr(driver, "_active", Driver(TARGETS["sm90"]))
    wanted = launches.FEATURES["plain"]
    with compile_for(TARGETS["sm90"].properties, on_compile=None):
        plan = launches.plan_of(batch, launches.make_spec(128, wanted), wanted)
    inputs = launches.make_inputs(plan, wanted)
    inputs["out"] = torch.empty_like(inputs["q"])
    quire.attention(**inputs, plan=plan)
    table, lens = plan.batch.page_table, plan.batch.seq_lens
    assert table.data_ptr() % 16 == 0 != lens.data_ptr() % 16
    moved = {
        "page_table": torch.zeros(table.numel() + 1, dtype=torch.int32)[1:].view(table.shape),
        "seq_lens": torch.zeros(len(lens), dtype=torch.int32),
    }
    others = {"width of the table": {"page_table": torch.zeros(len(table), table.shape[1] + 1, dtype=torch.int32)}}
    with mock.patch.object(JITFunction, "run", side_effect=InterruptedError("went through the binder")):
        quire.attention(**inputs, plan=with_other_tensors(plan))
        step = make_plan(plan.spec, dataclasses.replace(plan.batch, **moved), plan.launch, "", plan.workspace)
        quire.attention(**inputs, plan=step)
        for what, other in others.items():
            step = make_plan(plan.spec, dataclasses.replace(plan.batch, **other), plan.launch, "", plan.workspace)
            with pytest.raises(InterruptedError):
                quire.attention(**inputs, plan=step)
                pytest.fail(f"relaunched for another {what}")


@pytest.fixture
def prompts(passed, monkeypatch):
    """A plan of the Hopper kernel for prompts, what `attention` takes, and a function that calls a plan.

    The function returns what the kernel that attends would get, and how many tensor maps were encoded.
    """
    stub = Driver(TARGETS["sm90"])
    monkeypatch.setattr(driver, "_active", stub)
    wanted = launches.FEATURES["plain"]
    with compile_for(TARGETS["sm90"].properties, on_compile=None):
        plan = launches.plan_of("prompt", launches.make_spec(128, wanted), wanted)
    inputs = launches.make_inputs(plan, wanted)
    inputs["out"] = torch.empty_like(inputs["q"])
    fill = stub.utils.fill_tma_descriptor

    def call(plan, inputs):
        before, encoded = len(passed), fill.call_count
        quire.attention(**inputs, plan=plan)
        attends = [call for call in passed[before:] if call[0] == "hopper_kernel"]
        return attends, fill.call_count - encoded

    call(plan, inputs)
    Format.tensor_map.cache_clear()
    return plan, inputs, call


def test_a_tensor_map_is_encoded_once_for_each_address_shape_and_strides(prompts):
    plan, inputs, call = prompts
    q, cache, out = inputs["q"], inputs["cache"], inputs["out"]
    pages, heads = torch.empty(8, *cache.k.shape[1:], dtype=q.dtype), cache.num_kv_heads
    wide = torch.empty(4, 16, heads, 256, dtype=q.dtype)
    others = [  # what differs, and how many maps are new: of queries, of keys, of values
        ("nothing, at first", {}, 3),
        ("nothing", {}, 0),
        ("keys and values", {"cache": quire.PagedKVCache(pages[:4], pages[4:])}, 2),
        ("values only", {"cache": quire.PagedKVCache(pages[:4], pages[:4])}, 0),
        ("fewer pages at the same address", {"cache": quire.PagedKVCache(pages[:2], pages[4:6])}, 2),
        ("fewer queries at the same address", {"q": q[:100], "out": out[:100]}, 1),
        ("what was there before", {}, 0),
        ("keys and values in one tensor", {"cache": quire.PagedKVCache(wide[..., :128], wide[..., 128:])}, None),
        (
            "other strides at the same address",
            {"q": q.as_strided((100, 32, 128), (4224, 128, 1)), "out": out[:100]},
            None,
        ),
    ]
    for what, other, new in others:
        wanted, _ = call(without_launches(plan), inputs | other)
        with (
            contextlib.nullcontext()
            if new is None
            else mock.patch.object(JITFunction, "run", side_effect=AssertionError("binder"))
        ):
            got, encoded = call(plan, inputs | other)
        assert got == wanted, what
        assert new is None or encoded == new, what


def test_kept_tensor_maps_are_bounded_and_keep_no_memory(prompts):
    plan, inputs, call = prompts
    q, out = torch.empty_like(inputs["q"]), torch.empty_like(inputs["out"])
    _, encoded = call(plan, inputs | {"q": q, "out": out})
    assert encoded == 3
    freed = weakref.ref(q)
    del q
    gc.collect()
    assert freed() is None
    assert Format.tensor_map.cache_info().maxsize == KEPT


def test_the_launcher_of_tensor_maps_is_that_of_descriptors(prompts):
    """Triton expands the types of descriptors to those of tensor maps, shapes and strides, and so does Quire."""
    plan, _, _ = prompts
    (kept,) = plan.runner.attend.compiled.values()
    types, metadata = kept.kernel.src.signature, kept.kernel.metadata.tensordesc_meta
    if hasattr(nvidia, "make_launcher"):  # Triton 3.6.0 writes a launcher in C
        assert nvidia.make_launcher({}, kept.run.types, None) == nvidia.make_launcher({}, types, metadata)
    else:
        expanded = nvidia.expand_signature(types.values(), metadata, "nvTmaDesc")
        assert nvidia.expand_signature(kept.run.types.values(), None, "nvTmaDesc") == expanded


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_told_of_every_launch(prompts, hook):
    """Triton's binder tells it. Without one, launches do not go through the binder."""
    plan, inputs, call = prompts

    def listen(metadata):
        """Triton's launcher would call it."""

    hooks = getattr(triton.knobs.runtime, hook)
    hooks.add(listen)
    try:
        with mock.patch.object(JITFunction, "run", side_effect=InterruptedError), pytest.raises(InterruptedError):
            call(plan, inputs)
    finally:
        hooks.remove(listen)
    with mock.patch.object(JITFunction, "run", side_effect=AssertionError("went through the binder")):
        call(plan, inputs)


LATENT_CASES = [  # launches of `test_compile`: sequences, queries and keys of each, query heads, page size
    ("sm80", "no rotary columns", (*launches.LATENT_BATCHES["drafts"], 64)),
    extended("sm80", "records, float16", (*launches.LATENT_BATCHES["one long"], 64)),
    of_hopper("sm90", "e4m3", (8, 1, 4096, 16, 16)),
]


@pytest.mark.parametrize(("target", "features", "batch"), LATENT_CASES, ids=str)
def test_a_relaunch_over_latents_passes_what_the_binder_passes(target, features, batch, passed, monkeypatch):
    monkeypatch.setattr(driver, "_active", Driver(TARGETS[target]))
    num_seqs, q_len, kv_len, heads, page_size = batch
    spec = launches.latent_spec(features, heads)
    if target == "sm90":
        spec = dataclasses.replace(spec, head_dim=576, head_dim_v=512)
    rank, layout, tokens = spec.kv_lora_rank, launches.LATENTS[features][2], num_seqs * q_len
    starts = torch.zeros(num_seqs + 1, dtype=torch.int32)
    table = torch.zeros(num_seqs, cdiv(kv_len, page_size), dtype=torch.int32)
    lens = starts[:-1] if target == "sm90" else starts[1:]  # aligned as there, for which Triton specialises
    described = quire.Batch(table, lens, None if q_len == 1 else starts)
    with compile_for(TARGETS[target].properties, on_compile=None):
        plan = quire.plan(spec, described, max_query_len=q_len, max_seq_len=kv_len)
    assert plan.kernel == ("mla_hopper" if target == "sm90" else "mla")
    wide = torch.empty(tokens, heads, spec.head_dim + 16, dtype=spec.dtype)
    layers = []
    for _ in range(2):
        cache = quire.PagedKVCache.empty(spec, 4, page_size, layout=layout)
        q = torch.empty(tokens, heads, spec.head_dim, dtype=spec.dtype)
        q_pe = torch.empty(tokens, heads, spec.qk_rope_head_dim, dtype=spec.dtype)
        out = torch.empty(tokens, heads, rank, dtype=spec.dtype)
        layers.append((q, cache, out, (torch.empty(tokens, heads, rank, dtype=spec.dtype), q_pe)))
    (q, cache, out, _), (q_again, cache_again, out_again, halves) = layers
    quire.attention(q, cache, plan, out=out)
    first = len(passed)
    with mock.patch.object(JITFunction, "run", side_effect=InterruptedError("went through the binder")):
        attend(plan, q=q_again, cache=cache_again, out=out_again)
        others = {
            "strides of q": (wide[..., : spec.head_dim], cache, out),
            "lse": (q, cache, quire.State(out, torch.empty(tokens, heads))),
            "page size": (q, quire.PagedKVCache.empty(spec, 4, 2 * page_size, layout=layout), out),
        }
        if spec.qk_rope_head_dim:
            others["strides of halves"] = (halves, cache, out)
        for what, (queries, pages, into) in others.items():
            with pytest.raises(InterruptedError):
                quire.attention(queries, pages, plan, out=into)
                pytest.fail(f"relaunched for other {what}")
    again = passed[first:]
    attend(without_launches(plan), q=q_again, cache=cache_again, out=out_again)
    assert again == passed[first + len(again) :] != passed[:first]
    by_hopper = ["mla_schedule_kernel", "mla_hopper_kernel", "mla_combine_kernel"]
    assert [name for name, *_ in again] == (by_hopper if target == "sm90" else ["schedule_kernel", "mla_kernel"])


def states_to_merge(count=2, num_tokens=3, num_heads=4, dim=64, dtype=torch.bfloat16, pad=0):
    """Return states in rows of one memory, as a collective receives them."""
    outs, lses = torch.zeros(count, num_tokens * num_heads * dim + pad), torch.zeros(count, 16 * num_tokens * num_heads)
    shape = num_tokens, num_heads, dim
    return [
        quire.State(out.to(dtype).view(shape), lse.view(num_tokens, -1)[:, :num_heads])
        for out, lse in zip(outs.to(dtype)[:, pad:], lses, strict=True)
    ]


def test_a_second_merge_passes_what_the_binder_passes(passed, monkeypatch):
    """States of another number, shape, dtype, distance or alignment go through the binder."""
    monkeypatch.setattr(driver, "_active", Driver(TARGETS["sm90"]))
    monkeypatch.setattr(combine.MERGE, "compiled", {})
    first, again = states_to_merge(), states_to_merge()
    results = [combine.merge_states(first)]
    others = {"count": 3}, {"num_tokens": 5}, {"num_heads": 2}, {"dim": 32}, {"dtype": torch.float16}, {"pad": 32}
    with mock.patch.object(JITFunction, "run", side_effect=InterruptedError("went through the binder")):
        results.append(combine.merge_states(again))
        for other in (*others, {"pad": 1}):
            with pytest.raises(InterruptedError):
                combine.merge_states(states_to_merge(**other))
                pytest.fail(f"relaunched for other {other}")
    monkeypatch.setattr(combine.MERGE, "compiled", {})
    results.append(combine.merge_states(again))
    new = [{result.out.data_ptr(), result.lse.data_ptr()} for result in results]
    found = [(grid, [x for x in facts if x not in mine]) for (_, grid, facts), mine in zip(passed, new, strict=True)]
    assert found[1] == found[2] != found[0]


def new_tokens(kind, dtype, other, width=16):
    """Return the write, the new rows of two dtypes and the cache that it takes."""
    slots = torch.zeros(4, dtype=torch.int64)
    if kind == "keys and values":
        spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=16, kv_dtype=torch.int8)
        rows = torch.empty(4, 2, width, dtype=dtype)[..., :16], torch.empty(4, 2, 16, dtype=other)
        return write.write_kv, (*rows, quire.PagedKVCache.empty(spec, 4, 16), slots)
    spec = launches.latent_spec(kind)
    rank, rope, layout = spec.kv_lora_rank, spec.qk_rope_head_dim, launches.LATENTS[kind][2]
    rows = torch.empty(4, rank + width, dtype=dtype)[:, :rank], torch.empty(4, rope, dtype=other)
    return write_latent.write_latent, (*rows, quire.PagedKVCache.empty(spec, 4, 64, layout=layout), slots)


def forget(monkeypatch):
    """Let no write have compiled launches."""
    for kernel in (write.WRITE, write_latent.WRITE, write_latent.WRITE_RECORDS):
        monkeypatch.setattr(kernel, "compiled", {})
    launcher.SHARED.clear()


@pytest.mark.parametrize("kind", ["keys and values", "e4m3", "records"])
def test_a_second_write_passes_what_the_binder_passes(kind, passed, monkeypatch):
    """Rows of other dtypes or strides go through the binder."""
    monkeypatch.setattr(driver, "_active", Driver(TARGETS["sm90"]))
    module = write if kind == "keys and values" else write_latent
    monkeypatch.setattr(module, "device_properties", lambda device: TARGETS["sm90"].properties)
    forget(monkeypatch)
    half, brain = torch.float16, torch.bfloat16
    call, arguments = new_tokens(kind, brain, brain)
    call(*arguments)
    _, arguments = new_tokens(kind, brain, brain)
    with mock.patch.object(JITFunction, "run", side_effect=InterruptedError("went through the binder")):
        call(*arguments)
        for others in ((half, brain), (brain, half), (brain, brain, 32)):
            with pytest.raises(InterruptedError):
                call(*new_tokens(kind, *others)[1])
                pytest.fail(f"relaunched for other rows: {others}")
    forget(monkeypatch)
    call(*arguments)
    assert len(passed) == 3 and passed[1] == passed[2] != passed[0]


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    """Whichever device is the current one: Triton asks for that, and knows no other."""
    current, launched = [0], []

    @contextlib.contextmanager
    def use_device(device):
        before, current[0] = current[0], device.index if isinstance(device, torch.device) else device
        yield
        current[0] = before

    class Function:
        __name__, arg_names = "kernel", ["x", "BLOCK"]

        def warmup(self, x, grid, **meta):
            return self

        def __getitem__(self, grid):
            return lambda *arguments: launched.append(current[0])

        function, packed_metadata = None, None

        @property
        def run(self):
            return run_again

    def run_again(*arguments):
        launched.append(current[0])

    active = SimpleNamespace(get_current_device=lambda: current[0], get_current_stream=lambda device: device)
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(torch.cuda, "device", use_device)
    monkeypatch.setattr("quire.kernels.launcher.hash_callees", lambda function: None)
    monkeypatch.setattr("quire.kernels.launcher.kinds_of", lambda value: object())  # fake tensors have no address
    with FakeTensorMode():
        tensors = [torch.empty(3, device=f"cuda:{i}") for i in (1, 0, 1)]
    kernel = Kernel(Function())
    for x in tensors:
        if not kernel.relaunch(x.device, (1, 1, 1), [0]):
            kernel.launch(x.device, (1, 1, 1), Arguments((x,), (), {"BLOCK": 16}))
    current[0] = 2
    assert kernel.relaunch(tensors[0].device, (1, 1, 1), [0]) and current[0] == 2
    assert launched == [1, 0, 1, 1]
    current[0] = "sm90"  # of a driver that only compiles
    assert not kernel.relaunch(tensors[0].device, (1, 1, 1), [0])


def test_kinds_differ_where_triton_compiles_another_kernel():
    workspace = torch.zeros(256, dtype=torch.uint8)
    kinds = [kinds_of((value,)) for value in (1, True, 1.0, "1", None, (1,), workspace, workspace.view(torch.int32))]
    parts = [
        Part(workspace, dtype, first, 4) for dtype, first in ((torch.int32, 0), (torch.int32, 8), (torch.float32, 0))
    ]
    kinds += [kinds_of((part,)) for part in parts]
    assert len(set(kinds)) == len(kinds)
    assert kinds_of((Part(workspace.clone(), torch.int32, 128, 8),)) == kinds_of((parts[0],))


def test_the_binder_gets_tensors_for_parts_of_a_workspace():
    workspace = torch.arange(64, dtype=torch.uint8)
    part = Part(workspace, torch.int32, 16, 3)
    found, number, (scratch,) = tensors_of((part, 7, (Partials(part, None, part, workspace),)))
    assert found.dtype is torch.int32 and found.tolist() == workspace.view(torch.int32)[4:7].tolist()
    assert address_of((part, number)) == (found.data_ptr(), 7)
    assert isinstance(scratch, Partials) and scratch.m_i is None and scratch.counter is workspace
    assert address_of(scratch) == (found.data_ptr(), None, found.data_ptr(), workspace.data_ptr(), None, None)
