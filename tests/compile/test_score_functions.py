"""Kernels with users' functions: what is compiled for them, and that a warm-up has all of it."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

import quire
from quire import targets
from quire.kernels import user_mods
from quire.targets import TARGETS, compiling
from tests import score_functions as functions
from tests.compile import launches, loops
from tests.compile.launches import Features
from tests.extended import extended

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

SPEC = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.float16)
MLA = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.1, dtype=torch.float16)
BOUNDS = {"max_num_seqs": 3, "max_num_tokens": 200, "max_seq_len": 2000}


def capped(cap):
    @quire.score
    def soft(score):
        return cap * torch.tanh(score / cap)

    return soft


@pytest.mark.parametrize(
    ("target", "batch", "features"),
    [
        ("sm90", "decode, split", {"score": functions.relative, "mask": functions.dilated}),
        ("sm90", "prefill", {"score": functions.of_tokens}),
        ("gfx942", "decode", {"score": functions.t5, "mask": functions.same_document}),
        extended("sm80", "prefill", {"score": functions.hiding, "mask": functions.from_first}),
    ],
)
def test_functions_compile(target, batch, features):
    """T5's buckets have a logarithm, which tables of hidden keys and bounds have not."""
    wanted = Features(features)
    with compiling(TARGETS[target]) as compiled:
        plan = launches.plan_of(batch, launches.make_spec(64, wanted), wanted)
        quire.attention(**launches.make_inputs(plan, wanted), extras=extras_of(plan.spec), plan=plan)
    kernel = "hopper_kernel" if (target, batch) == ("sm90", "prefill") else "portable_kernel"
    assert kernel in {c.kernel for c in compiled}


def extras_of(spec, size=5, offset=0):
    made = []
    for extra in spec.extras:
        shape = extra.with_size(size)
        numbers = torch.zeros(offset + torch.Size(shape).numel(), dtype=extra.dtype)
        made.append(numbers[offset:].view(shape))
    return tuple(made)


@pytest.mark.extended
@pytest.mark.parametrize(("batch", "kernel"), [("decode", "portable_kernel"), ("prefill", "hopper_kernel")])
def test_far_keys_cost_few_instructions(batch, kernel, monkeypatch):
    """T5's last bucket, and what is beyond Inkling's distances, are read once for a row of a tile."""
    monkeypatch.setattr(targets, "inspect", lambda name, kernel, *others: (name, kernel.asm["cubin"]))
    lengths = {}
    for name, score in (("none", None), ("Inkling", functions.inkling), ("T5", functions.t5)):
        wanted = Features({"score": score})
        with compiling(TARGETS["sm90"]) as cubins:
            plan = launches.plan_of(batch, launches.make_spec(128, wanted), wanted)
            quire.attention(**launches.make_inputs(plan, wanted), extras=extras_of(plan.spec), plan=plan)
        lengths[name] = [len(loop) for loop in loops.attending({"cubin": dict(cubins)[kernel]})]
    assert max(lengths["Inkling"]) < 1.25 * max(lengths["none"]), lengths  # without what a branch skips: 0.1 for a row
    assert max(lengths["T5"]) < 1.45 * max(lengths["none"]), lengths


@pytest.fixture
def without_compiler(monkeypatch, request):
    """Return a target for which Triton binds arguments, then takes a stand-in; `test_warmup` says why."""

    def take_stand_in(self, key, signature, device, *others, **more):
        return self.device_caches[device][0].setdefault(key, SimpleNamespace())

    monkeypatch.setattr(JITFunction, "_do_compile", take_stand_in)
    monkeypatch.setattr(targets, "inspect", lambda name, *args: SimpleNamespace(kernel=name))
    return replace(TARGETS["sm90"], name=f"sm90, without a compiler: {request.node.name}")


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("spec", [SPEC, MLA], ids=["keys and values", "latents"])
@pytest.mark.parametrize("score", [functions.relative, functions.of_tokens], ids=repr)
def test_nothing_compiles_after_warmup(score, spec, append, without_compiler):
    """Tensors may be of any size and at any address. A function with another constant is another kernel."""
    spec = replace(spec, score=score, mask=functions.from_first if score is functions.relative else None)
    cache = quire.PagedKVCache.empty(spec, 2, 64)
    with compiling(without_compiler):
        quire.warmup(spec, cache, **BOUNDS, append=append)
        for size, offset in ((1, 0), (16, 1), (5, 4), (512, 3)):
            for lens in (((1, 5),), ((1, 1999), (1, 3)), ((3, 90), (1, 1)), ((200, 200),), ((130, 2000), (1, 2000))):
                with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")):
                    attend(spec, cache, lens, append, size, offset)
        other = replace(spec, score=capped(3.0), mask=None)
        with (
            mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")),
            pytest.raises(AssertionError, match="compiled in service"),
        ):
            attend(other, cache, ((1, 5),), append)


def attend(spec, cache, lens, append, size=5, offset=0):
    q_lens, seq_lens = zip(*lens, strict=True)
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    table = torch.zeros(len(lens), 32, dtype=torch.int32)
    batch = quire.Batch(table, torch.tensor(seq_lens, dtype=torch.int32), starts)
    num_tokens = sum(q_lens)
    bounds = {"max_query_len": max(q_lens), "max_seq_len": max(seq_lens), "num_tokens": num_tokens}
    plan = quire.plan(spec, batch, **bounds)
    new = {}
    if append:
        k = torch.empty(num_tokens, spec.num_kv_heads, spec.head_dim, dtype=torch.float16)
        new = {"k": k, "v": k, "slot_mapping": torch.zeros(num_tokens, dtype=torch.int64)}
        if spec.latent:
            new |= {"k": k[:, 0, : spec.kv_lora_rank], "v": k[:, 0, spec.kv_lora_rank :]}
    q = torch.empty(num_tokens, spec.num_q_heads, spec.head_dim, dtype=torch.float16)
    quire.attention(q, cache, plan, **new, extras=extras_of(spec, size, offset))


def test_a_changed_constant_is_another_kernel_and_the_same_text_is_the_same_one():
    spec = [replace(SPEC, score=capped(cap)) for cap in (2.0, 2.0, 3.0)]
    found = [user_mods.function_of(each) for each in spec]
    assert found[0] is found[1] is not found[2]
    user_mods.jit_functions.cache_clear()
    again = user_mods.function_of(spec[0])
    assert again is not found[0] and again.cache_key == found[0].cache_key != found[2].cache_key


def test_a_spec_without_functions_names_none():
    assert user_mods.function_of(SPEC) is None and user_mods.bounds_of(SPEC) is None
    bounded = replace(SPEC, mask=functions.dilated)
    assert user_mods.function_of(bounded) is not user_mods.function_of(bounded, with_bounds=True)
