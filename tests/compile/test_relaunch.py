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
CASES += [("sm90", features, "chunk, split", 128) for features in ("many, with lse", "e4m3", "pages of 1, flat")]


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


@pytest.mark.parametrize("features", ["bfloat16", "no rotary columns", "e4m3", "records"])
def test_a_relaunch_over_latents_passes_what_the_binder_passes(features, monkeypatch):
    passed = []

    def stand_in(kernel):
        kernel.function = 0
        kernel._run = lambda x, y, z, stream, function, packed, metadata, enter, leave, *args: passed.append(
            (kernel.name, (x, y, z), plain(args))
        )

    monkeypatch.setattr(triton.compiler.CompiledKernel, "_init_handles", stand_in)
    monkeypatch.setattr(driver, "_active", StubDriver(TARGETS["sm80"]))
    spec = launches.latent_spec(features)
    rank, layout = spec.kv_lora_rank, launches.LATENTS[features][2]
    starts = torch.zeros(3, dtype=torch.int32)
    batch = quire.Batch(torch.zeros(2, 8, dtype=torch.int32), starts[1:], starts)
    with compile_for(TARGETS["sm80"].properties, on_compile=None):
        plan = quire.plan(spec, batch, max_query_len=2, max_seq_len=500)
    wide = torch.empty(4, 16, spec.head_dim + 16, dtype=spec.dtype)
    layers = []
    for _ in range(2):
        cache = quire.PagedKVCache.empty(spec, 4, 64, layout=layout)
        q = torch.empty(4, 16, spec.head_dim, dtype=spec.dtype)
        q_pe = torch.empty(4, 16, spec.qk_rope_head_dim, dtype=spec.dtype)
        out = quire.State(torch.empty(4, 16, rank, dtype=spec.dtype), torch.empty(4, 16))
        layers.append((q, cache, out, (torch.empty(4, 16, rank, dtype=spec.dtype), q_pe)))
    (q, cache, out, _), (q_again, cache_again, out_again, halves) = layers
    quire.attention(q, cache, plan, out=out)
    first = len(passed)
    with mock.patch.object(JITFunction, "run", side_effect=InterruptedError("went through the binder")):
        quire.attention(q_again, cache_again, plan, out=out_again)
        others = {
            "strides of q": (wide[..., : spec.head_dim], cache, out),
            "no lse": (q, cache, out.out),
            "page size": (q, quire.PagedKVCache.empty(spec, 4, 128, layout=layout), out),
        }
        if spec.qk_rope_head_dim:
            others["strides of halves"] = (halves, cache, out)
        for what, (queries, pages, into) in others.items():
            with pytest.raises(InterruptedError):
                quire.attention(queries, pages, plan, out=into)
                pytest.fail(f"relaunched for other {what}")
    again = passed[first:]
    unbound = make_plan(spec, plan.batch, plan.launch, "a plan without compiled launches", plan.workspace)
    quire.attention(q_again, cache_again, unbound, out=out_again)
    assert again == passed[first + len(again) :] != passed[:first] and len(again) == 1
