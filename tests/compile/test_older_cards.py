"""The code of an older card on a newer GPU: what plans see, what Triton lowers, and what ptxas assembles."""

import contextlib
import os
import re
from dataclasses import replace

import pytest
import torch
import triton

import quire
from quire import triton_internals as internals
from quire.dispatch import device
from quire.dispatch.constants import constants_of
from quire.dispatch.request import Bounds, Options, Request
from quire.plan import decide_once
from quire.targets import TARGETS, Launch, card_here, compiling, title_of

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

HOST = TARGETS["sm90"]
CARDS = tuple(device.OLDER_CARDS)
SPEC = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)
PROMPT = Launch(SPEC, 2, 64, 128, 128)


@pytest.mark.parametrize("card", CARDS)
def test_plans_see_the_features_and_shared_memory_of_the_card_and_the_sms_and_speeds_of_the_gpu(card):
    host, own, seen = HOST.properties, TARGETS[card].properties, HOST.running(card).properties
    of_gpu = ("num_sms", "memory_gbps", "clock_mhz")
    assert all(getattr(seen, name) == getattr(host, name) for name in of_gpu)
    assert replace(seen, **{name: getattr(own, name) for name in of_gpu}) == own
    assert not (seen.has_wgmma or seen.supports_pdl) and seen.shared_memory < host.shared_memory
    assert seen.native_fp8 == (card == "sm89")


def test_cards_have_the_numbers_of_sm80_s_code():
    names = [constants_of(HOST.running(card).properties).name for card in CARDS]
    assert names == ["nvidia_h200_sm80"] + ["nvidia_h200_sm80, scaled"] * 2
    assert constants_of(HOST.properties).name == "nvidia_h200"


def test_a_decision_for_the_gpu_is_none_for_the_card():
    """Decisions are kept by all properties; all cards that run on a GPU differ in one."""
    seen = [HOST.properties, *(HOST.running(card).properties for card in CARDS)]
    assert len(set(seen)) == 4
    bounds = Bounds(4096, 4096, 4096)
    launches = [decide_once(Request(SPEC, 1, True, bounds, each), Options())[0] for each in seen]
    assert launches[0].name == "hopper" and not any(launch.name == "hopper" for launch in launches[1:])
    assert [launch.request.device for launch in launches] == seen


@pytest.mark.parametrize(
    ("gpu", "card", "words"),
    [
        ("sm90", "sm120", "card must be one of sm80, sm86, sm89 on a GPU of sm90, got sm120"),
        ("sm90", "sm100", "one of sm80, sm86, sm89"),
        ("sm90", "sm90", "without it, the GPU runs its own code"),
        ("sm90", "gfx942", "one of sm80, sm86, sm89"),
        ("sm89", "sm80", "one of sm86 on a GPU of sm89"),  # which has more shared memory
        ("sm120", "sm80", "one of sm86, sm89 on a GPU of sm120"),
        ("sm80", "sm86", "card must be left out on a GPU of sm80, got sm86"),
        ("gfx942", "sm80", "card must be left out on a GPU of gfx942, got sm80"),
    ],
)
def test_a_card_whose_code_a_gpu_does_not_run_is_refused_with_those_that_it_runs(gpu, card, words):
    with pytest.raises(ValueError, match=words):
        TARGETS[gpu].running(card)


def test_ptxas_gets_the_card_s_instructions_for_the_gpu_that_runs_them(assembled):
    """No wgmma and no TMA; and what it makes is no code of sm_86, which a Hopper GPU would not load."""
    before = os.environ.get(device.OVERRIDE)
    plan, (compiled,) = PROMPT.compile(HOST.running("sm86"))
    assert os.environ.get(device.OVERRIDE) == before
    (stages,) = assembled
    ptx = stages["ptx"]
    assert plan.kernel == "block" and compiled.shared <= 99 * 1024
    assert "mma.sync" in ptx and "cp.async.cg" in ptx
    assert not re.search(r"wgmma|cp\.async\.bulk|mbarrier|griddepcontrol", ptx)
    assert ".target sm_90a" in ptx and "cuda:86" in stages["ttgir"]


def test_a_target_is_compiled_for_itself_whatever_the_variable_says(monkeypatch):
    monkeypatch.setenv(device.OVERRIDE, "sm89")
    assert not TARGETS["sm80"].properties.native_fp8 and TARGETS["sm90"].properties.has_wgmma
    with compiling(TARGETS["sm86"]):
        assert internals.backend_options(HOST.gpu, {}).arch == "sm90"
        assert os.environ[device.OVERRIDE] == triton.knobs.runtime.override_arch == "sm86"
    assert os.environ[device.OVERRIDE] == triton.knobs.runtime.override_arch == "sm89"


@pytest.fixture
def gpu(monkeypatch):
    """Let a function say that there is a GPU of a target, of which the driver is asked."""

    def install(target):
        facts = {"multi_processor_count": target.num_sms, "shared_memory_per_block_optin": target.shared_memory}
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("Facts", (), facts))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(internals, "memory_gbps", lambda index: target.memory_gbps)
        monkeypatch.setattr(internals, "clock_mhz", lambda index: target.clock_mhz)
        return internals.driven_by(internals.StubDriver("gpu", target.gpu))

    return install


@pytest.mark.parametrize("card", ["sm80", "sm86", "sm89", "sm90", ""])
def test_the_variable_of_triton_decides_what_plans_see(card, gpu, monkeypatch):
    monkeypatch.setenv(device.OVERRIDE, card)
    with gpu(HOST):
        seen = device._read.__wrapped__(torch.device("cuda", 0))
        assert card_here() == (card if card in CARDS else None)
    assert seen == (HOST.running(card) if card in CARDS else HOST).properties


def test_a_variable_that_names_a_card_which_the_gpu_does_not_run_is_refused(gpu, monkeypatch):
    monkeypatch.setenv(device.OVERRIDE, "sm120")
    with gpu(HOST), pytest.raises(ValueError, match="TRITON_OVERRIDE_ARCH must be one of sm80, sm86, sm89"):
        device._read.__wrapped__(torch.device("cuda", 0))


@pytest.mark.parametrize(("arch", "named"), [(121, "sm120"), (103, "sm100"), (90, "sm90"), (86, "sm86")])
def test_a_gpu_that_gets_its_own_code_or_that_of_its_kin_has_plans_of_its_own(arch, named, monkeypatch):
    monkeypatch.setenv(device.OVERRIDE, named)
    assert device.card_in_place_of(replace(HOST.gpu, arch=arch)) is None


def test_amd_s_gpus_have_no_older_card(gpu, monkeypatch):
    """There the variable replaces the driver's target as well."""
    monkeypatch.setenv(device.OVERRIDE, "gfx950")
    with gpu(TARGETS["gfx942"]):
        assert card_here() is None
        assert device._read.__wrapped__(torch.device("cuda", 0)) == TARGETS["gfx942"].properties


def test_a_title_says_whose_code_ran_where():
    assert title_of("NVIDIA H200", None) == "NVIDIA H200"
    assert title_of("NVIDIA H200", "sm86") == "sm86 code on an NVIDIA H200"
    assert title_of("B200", "sm80") == "sm80 code on a B200"
