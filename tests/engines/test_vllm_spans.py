"""Tokens of images in the plug-in, and causality by sequence: one layer in vLLM's metadata against the oracle."""
# ruff: noqa: E402 (vLLM's environment comes first)

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tests.engines.vllm_environment  # noqa: F401

vllm = pytest.importorskip("vllm", reason="vLLM is tested by `make test-vllm`")

from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

import quire
from quire.integrations.vllm.backend import QuireMetadataBuilder
from quire.testing import error_budget, make_problem
from tests.engines.test_vllm import DEVICE, SPEC, make_layer, one_process, step_of, vllm_cache  # noqa: F401

LENS = ((20, 20), (7, 40), (1, 30), (9, 50))
# Two images; one that goes on after this chunk; one that is past; one that began before this chunk, and two that do not
# count, since the first is one token and the second is after this chunk.
RANGES = {0: [(2, 6), (9, 15)], 1: [(36, 45)], 2: [(3, 9)], 3: [(38, 44), (46, 46), (60, 70)]}


def seen(window: int | None, clamp: bool) -> list[tuple[int, int]]:
    """Return first and last key, plus one, of what each token sees, by the definition."""
    found = []
    for seq, (num_queries, num_keys) in enumerate(LENS):
        for at in range(num_keys - num_queries, num_keys):
            keys = {
                key
                for key in range(num_keys)
                if (key <= at and (window is None or at - key < window))
                or (
                    any(first < last and first <= at <= last and first <= key <= last for first, last in RANGES[seq])
                    and not (clamp and window is not None and at - key >= window)
                )
            }
            assert keys == set(range(min(keys), max(keys) + 1))
            found.append((min(keys), max(keys) + 1))
    return found


def problem_of(window: int | None, clamp: bool):
    begin, end = (torch.tensor(x, dtype=torch.int32) for x in zip(*seen(window, clamp), strict=True))
    problem = make_problem(
        SPEC, LENS, per_token=lambda batch, _: replace(batch, key_begin=begin, key_end=end), device=DEVICE
    )
    return replace(problem, spec=replace(SPEC, sliding_window=window)), problem


def attend(problem, clamp: bool, **changes):
    layer, builder = make_layer(problem)
    layer.mm_prefix_clamp_sliding_window = clamp
    common, query, num_tokens = step_of(problem, pad=2, width=9)
    ranges = changes.pop("ranges", RANGES)
    if hasattr(CommonAttentionMetadata, "mm_req_doc_ranges"):
        step = builder.build(0, common.replace(mm_req_doc_ranges=ranges, **changes))
    else:  # before 0.33 the runner sets it after the metadata is made
        step = builder.build(0, common.replace(**changes))
        step.mm_prefix_range = ranges
    output = torch.full_like(query, 7.0)
    layer.impl.forward(layer, query, None, None, vllm_cache(problem.cache, "NHD"), step, output)
    return output[:num_tokens], step


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("window", [None, 5, 12])
@pytest.mark.parametrize("lens_on_host", [False, True])
def test_tokens_of_an_image_see_all_of_it(window, clamp, lens_on_host):
    """A window limits what an image's tokens see of it only with Gemma 4's `clamp`."""
    problem, exact = problem_of(window, clamp)
    lens = torch.tensor([n for _, n in LENS] + [0, 0], dtype=torch.int32) if lens_on_host else None
    out, _ = attend(problem, clamp, seq_lens_cpu_upper_bound=lens)
    assert error_budget(exact, out).passed


def test_steps_without_tokens_of_images_have_the_plans_of_other_models():
    lens = torch.tensor([n for _, n in LENS] + [0, 0], dtype=torch.int32)
    past = {0: [], 1: [(3, 9)], 2: [(0, 28)], 3: [(2, 40), (50, 60)]}
    problem = make_problem(SPEC, LENS, device=DEVICE)
    out, step = attend(problem, False, ranges=past, seq_lens_cpu_upper_bound=lens)
    assert error_budget(problem, out).passed
    assert [plan.batch.key_begin for plan in step.plans.values() if plan is not None] == [None]


@pytest.mark.parametrize("window", [None, 5])
def test_some_sequences_of_a_step_are_causal_and_some_are_not(window):
    """Newer vLLM has a number for each request, on the device. Where it is not causal, a window is symmetric."""
    causal = torch.tensor([1, 0, 1, 0, 1, 1], dtype=torch.int32, device=DEVICE)
    begin, end = [], []
    for seq, (num_queries, num_keys) in enumerate(LENS):
        for at in range(num_keys - num_queries, num_keys):
            begin.append(0 if window is None else max(0, at + 1 - window))
            end.append(at + 1 if causal[seq] else num_keys if window is None else min(num_keys, at + window))
    begin, end = (torch.tensor(x, dtype=torch.int32) for x in (begin, end))
    exact = make_problem(
        SPEC, LENS, per_token=lambda batch, _: replace(batch, key_begin=begin, key_end=end), device=DEVICE
    )
    out, _ = attend(replace(exact, spec=replace(SPEC, sliding_window=window)), False, ranges=None, causal=causal)
    assert error_budget(exact, out).passed


def test_models_with_images_capture_no_prompts_and_share_no_contexts(monkeypatch):
    config = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=True))
    assert QuireMetadataBuilder.get_cudagraph_support(config, None) is AttentionCGSupport.UNIFORM_BATCH
    problem = make_problem(SPEC, LENS, device=DEVICE)
    monkeypatch.setattr("quire.integrations.vllm.backend.has_spans", lambda config: True)
    layer, builder = make_layer(problem)
    assert builder.kinds(replace(SPEC, sliding_window=5))[1] == (SPEC, {"intervals": True})
    monkeypatch.setattr("quire.integrations.vllm.contract.context_group", lambda spec: object())
    with pytest.raises(quire.UnsupportedError, match="is_mm_prefix_lm must be False where ranks share contexts"):
        make_layer(problem)
