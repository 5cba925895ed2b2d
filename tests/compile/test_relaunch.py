"""A relaunch passes the arguments that Triton's binder passes. No GPU is needed: a stand-in records them."""

from unittest import mock

import pytest
import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import quire
from quire.dispatch.device import compile_for
from quire.plan import make_plan
from quire.targets import TARGETS, StubDriver
from tests.compile import launches

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)


def plain(value):
    """Return tensors as their addresses, wherever they are."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, tuple):
        return tuple(plain(v) for v in value)
    if hasattr(value, "base"):  # a tensor descriptor
        return plain((value.base, tuple(value.shape), tuple(value.strides), tuple(value.block_shape)))
    return value


CASES = [  # `test_compile` compiles the same kernels, so one of the two finds them in Triton's cache
    (target, features, batch, head_dim)
    for target in ("sm80", "sm90")
    for features in ("plain", "many, with lse", "e4m3", "fp8 products")
    for batch, head_dim in launches.selection(target, features)
    if (target, features) != ("sm90", "plain") or head_dim == 128
]
CASES += [("sm90", features, "chunk, split", 128) for features in ("many, with lse", "e4m3")]


@pytest.mark.parametrize(("target", "features", "batch", "head_dim"), CASES)
def test_a_relaunch_passes_what_the_binder_passes(target, features, batch, head_dim, monkeypatch):
    passed = []

    def stand_in(kernel):
        kernel.function = 0
        kernel._run = lambda x, y, z, stream, function, packed, metadata, enter, leave, *args: passed.append(
            (kernel.name, (x, y, z), plain(args))
        )

    monkeypatch.setattr(triton.compiler.CompiledKernel, "_init_handles", stand_in)
    before = driver._active
    driver.set_active(StubDriver(TARGETS[target]))
    try:
        wanted = launches.FEATURES[features]
        spec = launches.make_spec(head_dim, wanted)
        with compile_for(TARGETS[target].properties, on_compile=None):
            plan = launches.plan_of(batch, spec, wanted)
        inputs = [launches.make_inputs(plan, wanted) for _ in range(2)]
        for some in inputs:
            out = torch.empty_like(some["q"])
            some["out"] = quire.State(out, torch.empty(out.shape[:2])) if wanted.lse else out
        quire.attention(**inputs[0], plan=plan)
        first = len(passed)
        with mock.patch.object(JITFunction, "run", side_effect=AssertionError("went through the binder")):
            quire.attention(**inputs[1], plan=plan)
        again = passed[first:]
        unbound = make_plan(spec, plan.batch, plan.launch, "a plan without compiled launches", plan.workspace)
        quire.attention(**inputs[1], plan=unbound)
    finally:
        driver._active = before
    assert again == passed[first + len(again) :] != passed[:first]
    launch = plan.launch
    has_second = launch.name == "hopper" and (launch.decode is not None or launch.num_splits > 1)
    assert len(again) == (2 if has_second else 1)
    assert (launch.name == "hopper" and launch.num_splits > 1) == (
        target == "sm90" and batch == "chunk, split" and head_dim == 128
    )


@pytest.mark.parametrize(("target", "batch", "kernel"), [("sm80", "decode", "split_kv"), ("sm90", "prefill", "hopper")])
def test_tensors_of_another_kind_go_through_the_binder(target, batch, kernel, monkeypatch):
    """What was compiled for some strides, dtypes and layouts is launched again for the same only."""

    def stand_in(kernel):
        kernel.function = 0
        kernel._run = lambda *args: None

    monkeypatch.setattr(triton.compiler.CompiledKernel, "_init_handles", stand_in)
    monkeypatch.setattr(driver, "_active", StubDriver(TARGETS[target]))
    wanted = launches.FEATURES["plain"]
    spec = launches.make_spec(64, wanted)
    with compile_for(TARGETS[target].properties, on_compile=None):
        plan = launches.plan_of(batch, spec, wanted)
    assert plan.kernel == kernel
    inputs = launches.make_inputs(plan, wanted)
    q, tokens = inputs["q"], inputs["q"].shape[0]
    inputs["out"] = torch.empty_like(q)

    def rows_of(columns: int) -> torch.Tensor:
        return torch.empty(tokens, spec.num_q_heads, columns, dtype=q.dtype)[..., :64]

    others = {
        "q": {"q": rows_of(80)},
        "out": {"out": rows_of(80)},
        "lse": {"out": quire.State(inputs["out"], torch.empty(q.shape[:2]))},
        "cache": {"cache": quire.PagedKVCache.empty(spec, 4, wanted.page_size, layout="HND")},
        "page size": {"cache": quire.PagedKVCache.empty(spec, 4, 2 * wanted.page_size)},
    }
    quire.attention(**inputs, plan=plan)
    with mock.patch.object(JITFunction, "run", side_effect=InterruptedError("went through the binder")):
        quire.attention(**inputs, plan=plan)
        for what, other in others.items():
            with pytest.raises(InterruptedError):
                quire.attention(**inputs | other, plan=plan)
                pytest.fail(f"relaunched for another {what}")
