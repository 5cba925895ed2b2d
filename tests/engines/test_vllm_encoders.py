"""Encoders and cross-attention in the plug-in: one layer in vLLM's own classes against the oracle, and a small BERT.

The engine's embeddings are compared with those of the same model in Transformers with eager attention.
"""
# ruff: noqa: E402 (vLLM's environment comes first)

from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

import tests.engines.vllm_environment  # noqa: F401

vllm = pytest.importorskip("vllm", reason="vLLM is tested by `make test-vllm`")

import tokenizers
import transformers
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata

import quire
from quire.integrations.vllm.backend import QuireBackend, QuireMetadata
from quire.testing import Problem, error_budget, make_problem
from tests.engines.test_vllm import (  # noqa: F401
    DEVICE,
    SPEC,
    engine,
    make_layer,
    one_process,
    prompts,
    vllm_cache,
)

ENCODERS = {
    "encoder_only": create_encoder_only_attention_backend(QuireBackend),
    "encoder": create_encoder_only_attention_backend(QuireBackend),
}


def of_step(lens: tuple[int, ...], spec: quire.AttentionSpec) -> Problem:
    """Return a problem whose keys are not paged."""
    draw = torch.Generator().manual_seed(2)
    total, starts = sum(lens), torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=DEVICE)
    q, k, v = (
        torch.randn(total, n, spec.head_dim, generator=draw).to(spec.dtype).to(DEVICE)
        for n in (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    sinks = torch.randn(spec.num_q_heads, generator=draw).to(DEVICE) if spec.sinks else None
    slopes = torch.rand(spec.num_q_heads, generator=draw).to(DEVICE) if spec.alibi else None
    return Problem(
        spec, quire.Batch.varlen(starts, starts), quire.PagedKVCache(k, v, "THD"), q, lens, lens, sinks, slopes
    )


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize(
    "features", [{}, {"sliding_window": 5, "sliding_window_right": 4}, {"alibi": True}, {"sinks": True, "softcap": 3.0}]
)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_an_encoder_attends_to_the_step_s_own_tokens_in_both_directions(kind, pad, features, cache_dtype):
    """No cache holds them, so its dtype does not matter."""
    problem = of_step((20, 1, 7), replace(SPEC, causal=False, **features))
    layer, builder = make_layer(problem, cache_dtype, backend=ENCODERS[kind], attn_type=AttentionType(kind))
    assert layer.impl.spec == problem.spec
    starts = torch.nn.functional.pad(problem.batch.query_starts, (0, pad), value=28)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.cpu(),
        seq_lens=torch.nn.functional.pad(problem.batch.seq_lens, (0, pad)),
        num_reqs=3 + pad,
        num_actual_tokens=28 + pad,
        max_query_len=20,
        max_seq_len=20,
        block_table_tensor=torch.zeros(3 + pad, 1, dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.full((28 + pad,), -1, device=DEVICE),
    )
    step = builder.build(0, common)
    query, key, value = (
        torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad), value=float("nan"))
        for x in (problem.q, problem.cache.k, problem.cache.v)
    )
    output = torch.full_like(query, 7.0)
    empty = torch.empty(0, device=DEVICE)
    assert layer.impl.forward(layer, query, key, value, empty, step, output) is output
    assert error_budget(problem, output[:28]).passed
    assert len(builder.plans) == 1
    layer.kv_cache = empty
    builder.build_for_cudagraph_capture(common)


@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, AttentionType.ENCODER_DECODER])
def test_plans_stay_within_the_bounds_of_their_workspace(attn_type, monkeypatch):
    """Contexts of cross-attention are the encoder's. The decoder's page tables are as wide, and it sees less."""
    asked, planned = [], []
    monkeypatch.setattr(quire, "workspace_size", lambda spec, **bounds: asked.append(bounds["max_seq_len"]) or 64)
    monkeypatch.setattr(quire, "plan", lambda *batch, **bounds: planned.append(bounds))
    problem = make_problem(replace(SPEC, causal=False), ((1, 40), (3, 37)), device=DEVICE)
    encoder = SimpleNamespace(max_num_encoder_input_tokens=300), SimpleNamespace(max_source_positions=1500)
    _, builder = make_layer(problem, attn_type=attn_type, encoder=encoder)
    crosses, [spec] = attn_type == AttentionType.ENCODER_DECODER, builder.layers
    assert asked == [1500 if crosses else 128]
    assert builder.workspace is None  # vLLM may have a memory pool in use, which does not survive a sleep
    _, other = make_layer(problem, attn_type=attn_type, encoder=encoder)
    other.update_block_table(QuireMetadata(*[None] * 12), None, None)  # in place of `build`, if groups are alike
    assert other.workspace is not None
    builder.reserve_workspace()
    workspace = builder.workspace
    assert workspace.shape == (64,) and not workspace.any()
    builder.reserve_workspace()
    assert builder.workspace is workspace
    table, lens = (
        torch.zeros(2, 100, dtype=torch.int32, device=DEVICE),
        torch.zeros(2, dtype=torch.int32, device=DEVICE),
    )
    for longest, bound in ((60, 64), (70, 128), (100, 128), (1100, 1500 if crosses else 1100)):
        builder.plan_for(spec, table, lens, None, page_size=16, num_tokens=2, max_query_len=1, max_seq_len=longest)
        assert planned[-1]["max_seq_len"] == bound and planned[-1]["workspace"] is workspace


@pytest.mark.parametrize("kind", ["NHD", "rows"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_cross_attention_writes_the_encoder_s_keys_once_and_attends_to_all_of_them(kind, cache_dtype):
    """The first sequence has its encoder's keys in the cache. Those of the second are new in this step."""
    kv_dtype = torch.float8_e4m3fn if cache_dtype == "fp8" else None
    spec = replace(SPEC, causal=False, kv_dtype=kv_dtype)
    problem = make_problem(spec, ((1, 40), (3, 37)), scales="tensor", device=DEVICE)
    backend = create_cross_attention_backend(QuireBackend)
    layer, builder = make_layer(problem, cache_dtype, backend=backend, attn_type=AttentionType.ENCODER_DECODER)
    layer.kv_sharing_target_layer_name = None
    table, page_size = problem.batch.page_table, problem.cache.page_size
    at = torch.arange(37, device=DEVICE)
    slots = table[1, at // page_size].long() * page_size + at % page_size
    key, value = (x.flatten(0, 1)[slots].float() for x in (problem.cache.k, problem.cache.v))
    if kv_dtype is not None:
        key, value = key * layer._k_scale, value * layer._v_scale
    full = vllm_cache(problem.cache, kind)
    for x in (problem.cache.k, problem.cache.v):
        x.flatten(0, 1)[slots] = torch.full((), float("nan")).to(x.dtype)
    kv_cache = vllm_cache(problem.cache, kind)
    lens = torch.tensor([40, 37], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=problem.batch.query_starts,
        query_start_loc_cpu=problem.batch.query_starts.cpu(),
        seq_lens=torch.tensor([9, 3], dtype=torch.int32, device=DEVICE),  # of the decoder
        num_reqs=2,
        num_actual_tokens=4,
        max_query_len=3,
        max_seq_len=9,
        block_table_tensor=table.clamp(min=0),
        slot_mapping=torch.full((4,), -1, device=DEVICE),
        encoder_seq_lens=lens.to(DEVICE),
        encoder_seq_lens_cpu=lens.numpy(),
        seq_lens_cpu_upper_bound=torch.tensor([9, 3], dtype=torch.int32),
    )
    for _ in range(2):  # the second time as in a step without new encoder outputs
        output = torch.full_like(problem.q, 7.0)
        layer.impl.forward(layer, problem.q, key, value, kv_cache, builder.build(0, common), output)
        assert torch.equal(kv_cache.view(torch.uint8), full.view(torch.uint8))
        whole = make_problem(spec, ((1, 40), (3, 37)), scales="tensor", device=DEVICE)
        assert error_budget(whole, output).passed
        key = value = None


def test_a_small_bert_has_the_embeddings_of_eager_attention(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=128,
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(97)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(tmp_path)
    llm = engine(tmp_path, runner="pooling", skip_tokenizer_init=False)
    inputs = prompts()
    results = llm.embed([{"prompt_token_ids": tokens} for tokens in inputs], use_tqdm=False)
    found = torch.tensor([result.outputs.embedding for result in results], dtype=torch.float64)
    model.set_attn_implementation("eager")
    eager, exact = (
        torch.stack([embedding(model.to(dtype), x) for x in inputs]) for dtype in (torch.float32, torch.float64)
    )
    budget = 2 * ((eager - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max())
    assert (found - exact).abs().max() <= budget
    assert (exact[0] - exact[1]).abs().max() > 100 * budget


def embedding(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return the normalised state of the first token."""
    with torch.no_grad():
        return torch.nn.functional.normalize(model(torch.tensor([tokens])).last_hidden_state[0, 0], dim=0).double()
