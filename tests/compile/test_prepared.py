"""A prepared launch hands the GPU what Triton's own binder would: seen without a GPU, by recording what reaches the launcher."""

import sys
from unittest import mock

import pytest
import torch
import triton
from tests.compile import launches
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import quire
from quire.targets import TARGETS, StubDriver

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


@pytest.mark.parametrize(
    ("target", "batch"),
    [
        *((target, batch) for target in ("sm80", "sm90") for batch in ("decode", "drafts", "prompt", "mixed")),
        ("sm90", "chunk, split"),
    ],
)
@pytest.mark.parametrize("features", ["plain", "many, with lse", "e4m3", "fp8 products"])
def test_prepared_launches_pass_what_the_binder_passes(target, batch, features, monkeypatch):
    passed = []

    def stand_in(kernel):
        kernel.function = 0
        kernel._run = lambda x, y, z, stream, function, packed, metadata, enter, leave, *args: passed.append(
            (kernel.name, (x, y, z), plain(args))
        )

    monkeypatch.setattr(triton.compiler.CompiledKernel, "_init_handles", stand_in)
    monkeypatch.setattr(sys.modules["quire.plan"], "device_properties", lambda device: TARGETS[target].properties)
    before = driver._active
    driver.set_active(StubDriver(TARGETS[target]))
    try:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = (
                True  # only after all kernels were made: plans for CPU tensors then choose Triton
            )
            wanted = launches.FEATURES[features]
            plan = launches.plan_of(batch, launches.make_spec(128, wanted), wanted)
            inputs = [launches.make_inputs(plan, wanted) for _ in range(2)]
            for some in inputs:
                out = torch.empty_like(some["q"])
                some["out"] = quire.State(out, torch.empty(out.shape[:2])) if wanted.lse else out
            quire.attention(**inputs[0], plan=plan)
            first = len(passed)
            with mock.patch.object(
                JITFunction, "run", side_effect=AssertionError("a prepared launch went through the binder")
            ):
                quire.attention(**inputs[1], plan=plan)
            prepared = passed[first:]
            plan.prepared.clear()
            if plan.beside is not None:
                plan.beside.prepared.clear()
            quire.attention(**inputs[1], plan=plan)
    finally:
        driver._active = before
    assert prepared == passed[first + len(prepared) :] != passed[:first]
    assert len(prepared) == (2 if plan.beside or plan.num_parts > 1 else 1)
    assert (plan.num_parts > 1) == (batch == "chunk, split")
