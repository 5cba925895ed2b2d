"""Attention to chosen keys in SGLang's own backend of it, whose decode and prefill call Quire. The oracle judges it."""

# ruff: noqa: E402

import importlib.util
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import tests.engines.sglang_environment  # noqa: F401

if importlib.util.find_spec("sglang.srt.layers.attention.dsa_backend") is None:
    pytest.skip("SGLang 0.5.12 has no backend of this name", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")

import quire
from quire.dispatch.device import interprets
from quire.integrations.sglang import plugin
from quire.testing import Problem, error_budget, make_problem, random_chosen

TOP_K, PAGE_SIZE = 64, 64


def make_backend(records: bool):
    """Return a backend with what its functions of attention read, without the device that SGLang asks for."""
    from quire.integrations.sglang.dsa import QuireDsaBackend

    backend = object.__new__(QuireDsaBackend)
    backend.__dict__ |= {
        "dsa_kv_cache_store_fp8": records,
        "physical_page_size": PAGE_SIZE,
        "kv_cache_dim": 656 if records else 576,
        "flashmla_kv_format": "V32",
        "dsa_index_topk": TOP_K,
        "flashmla_kv_num_q_heads": 64,
    }
    return backend


def problem_of(records: bool, sinks: bool = False) -> Problem:
    dtype = torch.float16 if interprets() else torch.bfloat16
    spec = quire.AttentionSpec.mla(
        num_q_heads=6, softmax_scale=0.06, dtype=dtype, kv_dtype=torch.float8_e4m3fn if records else None
    )
    chosen = partial(random_chosen, width=TOP_K, causal=False, slots_of=PAGE_SIZE)
    layout = "fp8_ds_mla" if records else "NHD"
    spec = replace(spec, causal=False, sinks=sinks)
    return make_problem(spec, ((1, 200), (3, 90), (1, 1)), page_size=PAGE_SIZE, layout=layout, per_token=chosen)


@pytest.mark.parametrize("name", ["flashmla_sparse", "triton_sparse_mla", "tilelang", "flashmla_kv"])
def test_slots_of_a_pool_in_16_bits_are_attended_to(name):
    p, backend = problem_of(records=False), make_backend(records=False)
    pool, lists = p.cache.latents.view(-1, 1, 576), p.batch.chosen.indices
    given = {"q_all": p.q, "kv_cache": pool, "v_head_dim": 512, "page_table_1": lists, "sm_scale": 0.06}
    if name == "flashmla_kv":
        given |= {"layer": SimpleNamespace(tp_q_head_num=6, head_dim=576), "metadata": None}
    out = getattr(backend, f"_forward_{name}")(**given)
    assert error_budget(p, out.view(-1, 6, 512)).passed


def test_sinks_are_served_and_a_length_for_each_request_is_ignored():
    p, backend = problem_of(records=False, sinks=True), make_backend(records=False)
    pool, lists = p.cache.latents.view(-1, 1, 576), p.batch.chosen.indices
    lens = torch.tensor([7, 9, 1], dtype=torch.int32)  # of requests, not of tokens
    out = backend._forward_flashmla_sparse(p.q, pool, 512, lists, 0.06, topk_length=lens, attn_sink=p.sinks)
    assert error_budget(p, out).passed


def test_slots_of_a_pool_of_records_are_attended_to():
    p, backend = problem_of(records=True), make_backend(records=True)
    pool = p.cache.latents.view(-1, 1, 656)
    layer = SimpleNamespace(tp_q_head_num=6, head_dim=576)
    out = backend._forward_flashmla_kv(p.q, pool, 512, 0.06, layer, None, p.batch.chosen.indices)
    assert out.shape == (5, 1, 6, 512) and error_budget(p, out[:, 0]).passed
    schedule = backend._compute_flashmla_metadata(torch.ones(4, dtype=torch.int32), 1)
    assert schedule.num_splits.shape == (5,)


def test_decode_of_sglang_calls_it():
    """SGLang's own `forward_decode`, with slots that its indexer has found."""
    p, backend = problem_of(records=False), make_backend(records=False)
    lists = p.batch.chosen.indices
    backend.__dict__ |= {
        "forward_metadata": SimpleNamespace(dsa_cache_seqlens_int32=torch.full((5,), TOP_K, dtype=torch.int32)),
        "dsa_decode_impl": "flashmla_kv",
        "dsa_index_kpool": 1,
        "token_to_kv_pool": SimpleNamespace(get_key_buffer=lambda layer: p.cache.latents.view(-1, 1, 576)),
        "hisparse_coordinator": None,
        "use_fused_topk": True,
        "_get_fused_topk_page_table": lambda topk: topk,
    }
    layer = SimpleNamespace(
        is_cross_attention=False, layer_id=0, tp_q_head_num=6, head_dim=576, v_head_dim=512, scaling=0.06
    )
    q_nope, q_rope = (half.clone() for half in p.halves)
    concatenate = "sglang.srt.layers.attention.dsa_backend.concat_mla_absorb_q_general"
    with pytest.MonkeyPatch.context() as patch:  # a kernel for GPUs
        patch.setattr(concatenate, lambda nope, rope: torch.cat([nope, rope], -1))
        out = backend.forward_decode(q_nope, None, None, layer, None, q_rope=q_rope, topk_indices=lists)
    assert error_budget(p, out.view(-1, 6, 512)).passed


def test_the_plug_in_takes_the_name_only_if_it_is_asked_to(monkeypatch):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    monkeypatch.setitem(ATTENTION_BACKENDS, "dsa", original := ATTENTION_BACKENDS["dsa"])
    plugin.register()
    assert ATTENTION_BACKENDS["dsa"] is original
    monkeypatch.setenv("QUIRE_SGLANG_DSA", "1")
    plugin.register()
    assert ATTENTION_BACKENDS["dsa"] is plugin.create_dsa
