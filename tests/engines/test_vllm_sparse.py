"""The plug-in's backend of MLA whose indexer chooses keys, in vLLM's own classes: a layer and its metadata.

The indexer's tensor has random lists. Results are judged by the oracle.
"""

# ruff: noqa: F811, I001 (vLLM's environment comes first, and fixtures are found by their names)

import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vLLM is tested by `make test-vllm`", allow_module_level=True)

from tests.engines.test_vllm import DEVICE, INTERPRETED, NAME, NEW_TOKENS, greedy, make_model, prompts, serve, step_of
from tests.engines.test_vllm_mla import Layer, by_quire, of_latents, vllm_cache  # noqa: F401

import quire
from quire.integrations.vllm import contract

if not contract.has_sparse_mla():
    pytest.skip("vLLM before 0.33 has no base class for MLA whose indexer chooses keys", allow_module_level=True)

from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonImpl
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from quire.integrations.vllm.sparse import QuireSparseMLABackend, QuireSparseMLAImpl, QuireSparseMLAMetadataBuilder
from quire.testing import Problem, error_budget, make_problem, random_chosen

TOP_K = 24
SPEC = quire.AttentionSpec.mla(
    num_q_heads=4, softmax_scale=0.2, kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.float32
)
SPEC = replace(SPEC, causal=False)
BATCHES = {
    "decode": ((1, 9), (1, 40), (1, 1)),
    "drafts": ((4, 9), (4, 40), (4, 4)),
    "mixed": ((1, 9), (7, 40), (1, 1), (20, 20)),
}


def test_the_model_says_that_its_indexer_chooses_keys(monkeypatch):
    text = SimpleNamespace(index_topk=TOP_K)
    config = SimpleNamespace(model_config=SimpleNamespace(use_mla=True, hf_text_config=text))
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", config)
    assert AttentionBackendEnum[NAME].get_class() is QuireSparseMLABackend
    del text.index_topk
    assert not AttentionBackendEnum[NAME].get_class().is_sparse()


def test_what_vllm_asks_of_the_backend():
    for made in (QuireSparseMLABackend, QuireSparseMLAImpl, QuireSparseMLAMetadataBuilder):
        assert not getattr(made, "__abstractmethods__", ())
    for served in ({}, {"kv_cache_dtype": "fp8_ds_mla"}, {"kv_cache_dtype": "fp8"}, {"dtype": torch.float32}):
        assert not QuireSparseMLABackend.validate_configuration(**of_latents(use_sparse=True, **served))
    for refused in ({"use_sparse": False}, {"has_sink": True}, {"use_non_causal": True}):
        assert QuireSparseMLABackend.validate_configuration(**of_latents(**{"use_sparse": True, **refused}))


@pytest.fixture
def make_layer(monkeypatch):
    """Return a function that makes a layer for a problem, whose lists the indexer has written, and its builder."""
    monkeypatch.setattr("vllm.v1.attention.backends.mla.index_group._create_side_stream", lambda device: None)
    monkeypatch.setattr("vllm.v1.attention.backends.mla.index_group._create_event", lambda: None)

    def make(problem: Problem, kv_cache_dtype: str = "auto") -> tuple[Layer, QuireSparseMLAMetadataBuilder]:
        spec, cache = problem.spec, problem.cache
        dims = dict(
            q_lora_rank=None,
            kv_lora_rank=spec.kv_lora_rank,
            qk_nope_head_dim=32,
            qk_rope_head_dim=spec.qk_rope_head_dim,
            v_head_dim=32,
        )
        model = SimpleNamespace(
            max_model_len=128,
            dtype=spec.dtype,
            hf_text_config=SimpleNamespace(**dims, index_topk=TOP_K),
            model_arch_config=SimpleNamespace(total_num_attention_heads=spec.num_q_heads),
            get_num_attention_heads=lambda parallel: spec.num_q_heads,
        )
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={}),
            scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=64),
            cache_config=SimpleNamespace(block_size=cache.page_size, cache_dtype=kv_cache_dtype),
            model_config=model,
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
            ),
            attention_config=SimpleNamespace(hisparse_config=None, sparse_mla_force_mqa=False),
            speculative_config=None,
            additional_config={},
        )
        monkeypatch.setattr("vllm.config.vllm._current_vllm_config", config)
        name = "vllm.model_executor.layers.attention.sparse_mla_attention.get_tensor_model_parallel_world_size"
        monkeypatch.setattr(name, lambda: 1)
        buffer = torch.arange(TOP_K, dtype=torch.int32, device=DEVICE).repeat(64, 1)  # what earlier steps left
        lists = problem.batch.chosen.indices
        buffer[: len(lists)] = lists
        before = torch.get_default_dtype()
        torch.set_default_dtype(spec.dtype)
        try:
            impl = QuireSparseMLAImpl(
                spec.num_q_heads,
                spec.head_dim,
                spec.softmax_scale,
                1,
                None,
                None,
                kv_cache_dtype,
                None,
                AttentionType.DECODER,
                None,
                qk_head_dim=32 + spec.qk_rope_head_dim,
                kv_b_proj=None,
                topk_indices_buffer=buffer,
                **dims,
            )
        finally:
            torch.set_default_dtype(before)
        rounded = replace(spec, allow_fp8=spec.kv_dtype is torch.float8_e4m3fn)
        assert impl.spec == rounded and isinstance(impl, SparseMLACommonImpl)
        scale = torch.tensor(1.0, device=DEVICE) if cache.k_scale is None else cache.k_scale.reshape(())
        layer = Layer(impl=impl, _k_scale=scale, kv_cache=vllm_cache(cache), **dims)
        layer.prefill_backend = None
        config.compilation_config.static_forward_context["layer"] = layer
        spec_of_cache = SimpleNamespace(block_size=cache.page_size, num_kv_heads=1)
        return layer, QuireSparseMLAMetadataBuilder(spec_of_cache, ["layer"], config, torch.device(DEVICE))

    return make


def problem_of(spec, lens, **options) -> Problem:
    """Make a problem whose lists have no more positions than a token may see."""
    chosen = partial(random_chosen, width=TOP_K)  # causal: an indexer chooses no key after the token
    return make_problem(spec, lens, per_token=chosen, device=DEVICE, **options)


def attend(layer: Layer, builder, problem: Problem, pad: int = 0, pair: bool = True) -> torch.Tensor | quire.State:
    """Return what the layer computes; with an lse if vLLM asks for it."""
    common, query, num_tokens = step_of(problem, pad, width=problem.batch.page_table.shape[1] + 2)
    step = builder.build(0, common)
    rank = problem.spec.kv_lora_rank
    q = (query[..., :rank].transpose(0, 1).contiguous().transpose(0, 1), query[..., rank:]) if pair else query
    out, lse = layer.impl.forward_mqa(q, layer.kv_cache, step, layer)
    assert out.shape == (num_tokens + pad, problem.spec.num_q_heads, rank) and out.is_contiguous()
    return out[:num_tokens] if lse is None else quire.State(out[:num_tokens], lse[:num_tokens])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("page_size", [1, 64])
def test_tokens_attend_to_what_the_indexer_chose(batch, pair, page_size, make_layer):
    problem = problem_of(SPEC, BATCHES[batch], page_size=page_size)
    layer, builder = make_layer(problem)
    assert error_budget(problem, attend(layer, builder, problem, pad=3, pair=pair)).passed


def test_latents_of_deepseek_v3_2_in_fp8_and_in_records(make_layer):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    spec = quire.AttentionSpec.mla(num_q_heads=4, softmax_scale=0.05, dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    for name, layout in (("fp8", "NHD"), ("fp8_ds_mla", "fp8_ds_mla")):
        problem = problem_of(replace(spec, causal=False), BATCHES["drafts"], layout=layout, page_size=64)
        layer, builder = make_layer(problem, name)
        assert error_budget(problem, attend(layer, builder, problem)).passed, name


def test_decodes_may_be_called_without_the_prompts_of_their_step(make_layer):
    """Short prompts expand their latents."""
    problem = problem_of(SPEC, ((1, 9), (3, 40), (50, 50)))
    layer, builder = make_layer(problem)
    builder.reorder_batch_threshold = 4
    common, query, _ = step_of(problem, 0, width=9)
    step = builder.build(0, common)
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (2, 4, 1)
    out, _ = layer.impl.forward_mqa(query[:4], layer.kv_cache, step, layer)
    decodes = problem_of(SPEC, ((1, 9), (3, 40), (50, 50)))
    whole, _ = layer.impl.forward_mqa(query, layer.kv_cache, step, layer)
    assert error_budget(decodes, whole).passed and torch.equal(out, whole[:4])


@pytest.mark.parametrize("lse", [False, True])
def test_slots_that_vllm_found_are_attended_to(lse, make_layer):
    """Where ranks share a sequence, or a part of the cache is in host memory; other layers' pages lie between."""
    slots = partial(random_chosen, width=TOP_K, causal=False, slots_of=16, counted=True)
    problem = make_problem(SPEC, BATCHES["mixed"], per_token=slots, device=DEVICE)
    layer, _ = make_layer(problem)
    layer.impl.need_to_return_lse_for_decode = lse
    layer.kv_cache = vllm_cache(problem.cache, "side by side in a page")
    chosen = problem.batch.chosen
    rows = torch.where(chosen.indices < 0, -1, chosen.indices // 16 * 32 + chosen.indices % 16)
    out, found = layer.impl._forward_mqa_kernel(
        problem.halves, layer.kv_cache, rows, chosen.lens, layer=layer, block_size=16, is_decode=False
    )
    assert (found is not None) is lse
    assert error_budget(problem, quire.State(out, found) if lse else out).passed


def test_all_layers_of_a_step_share_a_plan(make_layer):
    problem = problem_of(SPEC, BATCHES["decode"])
    layer, builder = make_layer(problem)
    common, query, _ = step_of(problem, 0, width=9)
    for _ in range(2):
        step = builder.build(0, common)
        for _ in range(2):
            layer.impl.forward_mqa(query, layer.kv_cache, step, layer)
    assert len(builder.plans) == 1


def test_what_a_layer_refuses(make_layer):
    problem = problem_of(SPEC, BATCHES["decode"])
    layer, builder = make_layer(problem)
    common, query, _ = step_of(problem, 0, width=9)
    step = builder.build(0, common)
    with pytest.raises(quire.UnsupportedError, match=r"queries must be torch\.float32"):
        layer.impl.forward_mqa(query.to(torch.float8_e4m3fn), layer.kv_cache, step, layer)
    with pytest.raises(quire.UnsupportedError, match="logits_soft_cap must be left out in MLA"):
        QuireSparseMLAImpl(4, 48, 0.1, 1, None, None, "auto", 30.0, AttentionType.DECODER, None)


# The engine end to end. A rule takes the place of the indexer, whose own kernels vLLM has for GPUs alone.


def is_chosen(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return whether a token sees a key, both by position: itself, and some three of seven keys before it."""
    return (key <= query) & (((3 * query + 5 * key) % 7 < 3) | (key == query))


def choose(step, buffer: torch.Tensor, num_tokens: int) -> None:
    """Write the lists of a step's tokens where the indexer of a layer would."""
    starts, lens = step.query_start_loc.long(), step.seq_lens.long()
    seq = torch.searchsorted(starts[1:], torch.arange(num_tokens, device=starts.device), right=True)
    position = (lens[seq] - starts[seq + 1] + torch.arange(num_tokens, device=starts.device))[:, None]
    keys = torch.arange(128, device=starts.device)
    found = torch.where(is_chosen(position, keys), keys, -1).sort(descending=True).values
    buffer[:num_tokens] = found[:, : buffer.shape[1]].int()


def masked_greedy(model, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that the model writes if each sees only what the rule chooses."""
    tokens = list(prompt)
    for _ in range(count):
        at = torch.arange(len(tokens), device=DEVICE)
        mask = torch.where(is_chosen(at[:, None], at), 0.0, torch.finfo(torch.float32).min)[None, None]
        with torch.no_grad():
            logits = model(torch.tensor([tokens], device=DEVICE), attention_mask=mask, use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def as_sparse(folder) -> None:
    """Turn a model's configuration into that of one whose layers share lists, which none of them computes."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 64}
    config |= {"index_topk_pattern": "S" * config["num_hidden_layers"], "index_n_heads": 2, "index_head_dim": 32}
    path.write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 32, "block_size": 64}], ids=str)
def test_chosen_keys_write_the_tokens_of_attention_with_a_mask(options, tmp_path, monkeypatch, by_quire):
    original, calls = QuireSparseMLAImpl.forward_mqa, []

    def forward(self, q, cache, step, layer):
        num_tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        calls.append(num_tokens)
        choose(step, self.topk_indices_buffer, num_tokens)
        return original(self, q, cache, step, layer)

    monkeypatch.setattr(QuireSparseMLAImpl, "forward_mqa", forward)
    model = make_model("deepseek-v3", tmp_path)
    as_sparse(tmp_path)
    by_quire["attention_config"] |= {"sparse_mla_force_mqa": True}  # else short prompts see all keys
    generated, _ = serve(tmp_path, **by_quire, **options)
    expected = [masked_greedy(model, p, NEW_TOKENS) for p in prompts()]
    assert generated == [expected] and expected[1] != greedy(model, prompts()[1])
    assert max(calls) > 16 and min(calls) <= 8
