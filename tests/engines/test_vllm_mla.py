"""The plug-in's backend of multi-head latent attention in the real vLLM, on either end of the supported range.

As in `test_vllm.py`: the classes, a layer against the oracle, and the engine end to end against the same model in
Transformers with eager attention, which expands the latents, token for token. The model is DeepSeek's without experts.
"""

# ruff: noqa: E402, F811 (vLLM's environment comes first, and fixtures are found by their names)

import inspect
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vLLM is tested by `make test-vllm`", allow_module_level=True)

from tests.engines.test_vllm import (  # noqa: F401
    DEVICE,
    INTERPRETED,
    NAME,
    NEW_TOKENS,
    asked,
    assert_as_close_as,
    drafts_on_cpu,
    greedy,
    make_model,
    one_process,
    prompts,
    serve,
    step_of,
    vllm,
)
from tests.extended import slow

VERSION = vllm.__version__  # from here on vLLM can be imported

from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonImpl, MLACommonMetadataBuilder
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import quire
from quire.integrations.vllm import contract
from quire.integrations.vllm.backend import QuireBackend
from quire.integrations.vllm.mla import QuireMLABackend, QuireMLAImpl, QuireMLAMetadataBuilder
from quire.integrations.vllm.prefill import QuirePrefill
from quire.integrations.vllm.prefill import attend as attend_to_expanded
from quire.testing import Problem, error_budget, make_problem

SPEC = quire.AttentionSpec.mla(
    num_q_heads=4, softmax_scale=0.2, kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.float32
)
BATCHES = {
    "decode": ((1, 9), (1, 40), (1, 1)),
    "drafts": ((4, 9), (4, 40), (4, 4)),
    "mixed": ((1, 9), (7, 40), (1, 1), (20, 20)),
}


def test_one_name_chooses_both_backends_and_the_model_says_which(monkeypatch):
    chosen = AttentionBackendEnum[NAME].get_class
    for use_mla, expected in ((True, QuireMLABackend), (False, QuireBackend)):
        config = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla))
        monkeypatch.setattr("vllm.config.vllm._current_vllm_config", config)
        assert chosen() is expected and chosen().get_name() == NAME
    monkeypatch.setattr("vllm.config.vllm._current_vllm_config", None)
    assert chosen() is QuireBackend


def test_the_classes_satisfy_vllm_s_abstract_ones():
    for made in (QuireMLABackend, QuireMLAImpl, QuireMLAMetadataBuilder, QuirePrefill):
        lacking = sorted(getattr(made, "__abstractmethods__", ()))
        assert not lacking, f"{made.__name__} lacks {lacking}"
    assert issubclass(QuireMLABackend, MLACommonBackend) and issubclass(QuireMLAImpl, MLACommonImpl)
    assert issubclass(QuireMLAMetadataBuilder, MLACommonMetadataBuilder)
    assert QuireMLABackend.get_impl_cls() is QuireMLAImpl
    assert QuireMLABackend.get_builder_cls() is QuireMLAMetadataBuilder
    assert QuireMLAMetadataBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    assert QuireMLABackend.is_mla() and QuireMLABackend.get_preferred_block_size(16) == 64
    shapes = [QuireMLABackend.get_kv_cache_shape(9, 64, 1, 576, name) for name in ("auto", "fp8", "fp8_ds_mla")]
    assert shapes == [(9, 64, 576), (9, 64, 576), (9, 64, 656)]
    assert all(QuireMLABackend.supports_block_size(size) for size in (None, 1, 16, 64, 128, 544))
    sizes = (24, 48, 320, 512, 576, 640, 656)
    assert [size for size in sizes if QuireMLABackend.supports_head_size(size)] == [48, 320, 512, 576, 640]


def test_what_is_served_and_what_is_refused_by_name():
    for served in (
        {},
        {"kv_cache_dtype": "fp8"},
        {"dtype": torch.float32},
        {"kv_cache_dtype": "bfloat16"},
    ):
        assert not QuireMLABackend.validate_configuration(**of_latents(**served)), served
    for refused, reason in (
        ({"use_mla": False}, "MLA"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_sparse": True}, "sparse"),
        ({"has_sink": True}, "sinks"),
        ({"head_size": 650}, "head_size"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype must be auto or fp8"),
        ({"device_capability": SimpleNamespace(major=7, minor=5)}, "compute capability"),
    ):
        reasons = QuireMLABackend.validate_configuration(**of_latents(**refused))
        assert any(reason in given for given in reasons), refused
    reasons = QuireMLABackend.validate_configuration(**of_latents(kv_cache_dtype="fp8_ds_mla"))
    assert bool(reasons) is not contract.has_prefill_backends()
    reasons = QuireMLABackend.validate_configuration(**of_latents(kv_cache_dtype="fp8_ds_mla", head_size=512))
    assert any("latents of 512 columns" in given for given in reasons)


def of_latents(**changes) -> dict:
    """Return what vLLM asks `validate_configuration` for DeepSeek-V3."""
    return asked(**{"head_size": 576, "use_mla": True, "has_sink": False, "use_non_causal": False, **changes})


# One layer: vLLM's metadata, its caches, results against the oracle.


class Layer(AttentionLayerBase):
    """The attributes of a vLLM layer that builders and backends read."""

    def __init__(self, **attributes) -> None:
        self.__dict__.update(attributes)

    def get_attn_backend(self):
        return QuireMLABackend

    def get_kv_cache_spec(self, vllm_config):
        raise NotImplementedError


@pytest.fixture
def make_layer(monkeypatch):
    """Return a function that makes a layer for a problem, and the builder of its metadata."""

    def make(
        problem: Problem, kv_cache_dtype: str = "auto", additional: dict | None = None
    ) -> tuple[Layer, QuireMLAMetadataBuilder]:
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
            hf_text_config=SimpleNamespace(**dims),
            get_num_attention_heads=lambda parallel: spec.num_q_heads,
            get_head_size=lambda: spec.head_dim,
        )
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={}),
            scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=64),
            cache_config=SimpleNamespace(block_size=cache.page_size, cache_dtype=kv_cache_dtype),
            model_config=model,
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
            ),
            attention_config=SimpleNamespace(
                use_prefill_query_quantization=False,
                disable_flashinfer_prefill=True,
                use_cudnn_prefill=False,
                use_trtllm_ragged_deepseek_prefill=False,
            ),
            speculative_config=None,
            additional_config=additional or {},
        )
        monkeypatch.setattr("vllm.config.vllm._current_vllm_config", config)
        before = torch.get_default_dtype()
        torch.set_default_dtype(spec.dtype)
        try:
            impl = QuireMLAImpl(
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
                **dims,
            )
        finally:
            torch.set_default_dtype(before)
        assert impl.spec == spec
        scale = torch.tensor(1.0, device=DEVICE) if cache.k_scale is None else cache.k_scale.reshape(())
        layer = Layer(impl=impl, _k_scale=scale, kv_cache=vllm_cache(cache), **dims)
        layer.prefill_backend = SimpleNamespace(clone=lambda: SimpleNamespace(get_name=lambda: "none"))
        config.compilation_config.static_forward_context["layer"] = layer
        spec_of_cache = SimpleNamespace(block_size=cache.page_size, num_kv_heads=1)
        return layer, QuireMLAMetadataBuilder(spec_of_cache, ["layer"], config, torch.device(DEVICE))

    return make


def vllm_cache(cache: quire.PagedKVCache, layers: str = "one tensor each") -> torch.Tensor:
    """Return the same latents as vLLM keeps them, fp8 as bytes; other layers' may lie between."""
    latents = cache.latents
    if latents.dtype.itemsize == 1:
        latents = latents.view(torch.uint8)
    if layers == "one tensor each":
        return latents.clone()
    other = torch.full_like(latents, 255 if latents.dtype is torch.uint8 else float("nan"))
    if layers == "side by side in a page":
        return torch.stack([other, latents], 1)[:, 1]
    return torch.stack([other, latents], 2)[:, :, 1]


def attend(layer: Layer, builder, problem: Problem, pad: int = 0, pair: bool = True) -> torch.Tensor | quire.State:
    """Return what the layer computes; with an lse if vLLM asks for it."""
    common, query, num_tokens = step_of(problem, pad, width=problem.batch.page_table.shape[1] + 2)
    step = builder.build(0, common)
    assert step.num_prefills == 0 and step.num_decode_tokens == num_tokens + pad
    rank = problem.spec.kv_lora_rank
    q = (query[..., :rank].transpose(0, 1).contiguous().transpose(0, 1), query[..., rank:]) if pair else query
    out, lse = layer.impl.forward_mqa(q, layer.kv_cache, step, layer)
    assert out.shape == (num_tokens + pad, problem.spec.num_q_heads, rank) and out.is_contiguous()
    return out[:num_tokens] if lse is None else quire.State(out[:num_tokens], lse[:num_tokens])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 544])
def test_decodes_attend_to_latents(batch, pair, page_size, make_layer):
    problem = make_problem(SPEC, BATCHES[batch], page_size=page_size, device=DEVICE)
    layer, builder = make_layer(problem)
    assert error_budget(problem, attend(layer, builder, problem, pad=3, pair=pair)).passed


@pytest.mark.parametrize("layers", ["side by side in a page", "side by side in a slot"])
def test_other_layers_latents_may_lie_between(layers, make_layer):
    problem = make_problem(SPEC, BATCHES["mixed"], device=DEVICE)
    layer, builder = make_layer(problem)
    layer.kv_cache = vllm_cache(problem.cache, layers)
    assert not layer.kv_cache.is_contiguous()
    assert error_budget(problem, attend(layer, builder, problem)).passed


@pytest.mark.parametrize("batch", ["decode", "drafts"])
def test_the_lse_for_ranks_that_share_a_sequence(batch, make_layer):
    problem = make_problem(SPEC, (*BATCHES[batch], (BATCHES[batch][0][0], 0)), device=DEVICE)  # the last has no keys
    layer, builder = make_layer(problem)
    layer.impl.need_to_return_lse_for_decode = True
    state = attend(layer, builder, problem)
    assert isinstance(state, quire.State) and error_budget(problem, state).passed


def test_latents_of_deepseek_v3_in_fp8_and_in_records(make_layer):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    spec = quire.AttentionSpec.mla(num_q_heads=4, softmax_scale=0.05, dtype=dtype, kv_dtype=torch.float8_e4m3fn)
    for name, layout in (("fp8", "NHD"), ("fp8_e4m3", "NHD"), ("fp8_ds_mla", "fp8_ds_mla")):
        problem = make_problem(spec, BATCHES["drafts"], layout=layout, device=DEVICE)
        layer, builder = make_layer(problem, name)
        assert layer.kv_cache.dtype is torch.uint8 and not layer.impl.supports_quant_query_input
        assert error_budget(problem, attend(layer, builder, problem)).passed, name


def test_steps_that_are_not_causal(make_layer):
    problem = make_problem(SPEC, BATCHES["drafts"], device=DEVICE)
    layer, builder = make_layer(problem)
    common, query, _ = step_of(problem, 0, width=9)
    step = builder.build(0, common)
    step.causal = False
    out, _ = layer.impl.forward_mqa(query, layer.kv_cache, step, layer)
    assert not error_budget(problem, out).passed  # each query sees the drafts after it
    assert error_budget(make_problem(replace(SPEC, causal=False), BATCHES["drafts"], device=DEVICE), out).passed


def test_a_sequence_without_a_query_may_lie_between_others_beside_padding(make_layer):
    problem = make_problem(SPEC, ((1, 9), (0, 12), (1, 40)), device=DEVICE)
    layer, builder = make_layer(problem)
    common, query, num_tokens = step_of(problem, pad=1, width=9)
    starts, table = common.query_start_loc[:4], common.block_table_tensor[:3]
    step = builder._build_decode(table, common.seq_lens[:3], 40, starts.cpu(), starts, 3, None)
    assert (step.max_query_len, query.shape[0], table.shape[0]) == (1, 3, 3)
    out, _ = layer.impl.forward_mqa(query, layer.kv_cache, SimpleNamespace(decode=step), layer)
    assert error_budget(problem, out[:num_tokens]).passed


def test_queries_in_fp8_are_refused_by_name(make_layer):
    """Some models make them for an fp8 cache, whatever a backend says that it takes."""
    problem = make_problem(SPEC, BATCHES["decode"], device=DEVICE)
    layer, builder = make_layer(problem)
    common, query, _ = step_of(problem, 0, width=9)
    step, queries = builder.build(0, common), query.to(torch.float8_e4m3fn)
    with pytest.raises(quire.UnsupportedError, match=r"queries must be torch\.float32, got torch\.float8_e4m3fn"):
        layer.impl.forward_mqa(queries, layer.kv_cache, step, layer)
    plans, starts = {}, torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    bounds = {"max_query_len": 3, "max_seq_len": 3, "causal": True, "return_lse": False}
    with pytest.raises(quire.UnsupportedError, match=r"queries must be in the dtype of the model, got torch\.float8"):
        attend_to_expanded(plans, "new tokens", *[queries] * 3, starts, starts, scale=1.0, **bounds)


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_the_write_skips_padding(name, make_layer):
    problem = make_problem(SPEC if name == "auto" else replace(SPEC, kv_dtype=torch.float8_e4m3fn), BATCHES["decode"])
    layer, _ = make_layer(problem, name)
    layer.kv_cache = torch.zeros_like(layer.kv_cache)
    fused = torch.randn(6, 48, device=DEVICE)  # latents and rope columns as strided views of one projection
    slots = torch.tensor([33, -1, 5, -1, 70], device=DEVICE)  # the sixth token is padding
    c_kv, k_pe = fused[:, :32], fused[:, None, 32:]
    layer.impl.do_kv_cache_update(c_kv, k_pe, layer.kv_cache, slots, name, layer._k_scale, *[False] * (NAME == "QUIRE"))
    stored = layer.impl.pages.latents.float().flatten(0, 1)
    kept = fused[:5] if name == "auto" else (fused[:5] / layer._k_scale).to(torch.float8_e4m3fn).float()
    assert torch.equal(stored[slots[slots >= 0]], kept[slots >= 0])
    assert stored.count_nonzero() == kept[slots >= 0].count_nonzero()
    layer.impl.do_kv_cache_update(c_kv, k_pe, torch.tensor([]), slots, name, layer._k_scale)  # memory is measured


def test_plans_are_made_once_for_all_layers_and_kept_over_steps(monkeypatch, make_layer):
    problem = make_problem(SPEC, BATCHES["decode"], device=DEVICE)
    layer, builder = make_layer(problem)
    common, _, num_tokens = step_of(problem, pad=0, width=9)
    bounds, plan = [], quire.plan
    monkeypatch.setattr(quire, "plan", lambda *nouns, **options: (bounds.append(options), plan(*nouns, **options))[1])

    def planned(**changes):
        step = builder.build(0, common.replace(**changes))
        plans = {id(step.decode.plan(layer.impl.spec, num_tokens, 16)) for _ in range(2)}
        assert len(plans) == 1
        return step.decode.plan(layer.impl.spec, num_tokens, 16)

    first = planned()
    assert first.batch.cu_seqlens_q is None
    assert (bounds[0]["max_seq_len"], bounds[0]["max_query_len"]) == (64, 1)
    common.seq_lens += 1  # as between the replays of a graph: the same memory
    assert planned(max_seq_len=41) is first
    planned(max_seq_len=65)
    assert [made["max_seq_len"] for made in bounds] == [64, 128]


@pytest.mark.parametrize("additional", [{}, {"quire_warmup": False}])
def test_kernels_are_compiled_before_the_first_capture(additional, monkeypatch, make_layer):
    problem = make_problem(SPEC, BATCHES["decode"], device=DEVICE)
    layer, builder = make_layer(problem, additional=additional)
    warmed, original = [], quire.warmup

    def warmup(spec, pages, **bounds):
        warmed.append(spec)
        return original(spec, pages, **bounds)

    monkeypatch.setattr(quire, "warmup", warmup)
    common, query, _ = step_of(problem, pad=0, width=9)
    for _ in range(2):
        step = builder.build_for_cudagraph_capture(common)
    # before 0.33 also prefill: new tokens with and without an lse, and their past
    assert len(warmed) == (0 if additional else 1 if contract.has_prefill_backends() else 4)
    out, _ = layer.impl.forward_mqa(query, layer.kv_cache, step, layer)
    assert error_budget(problem, out).passed


def test_what_a_layer_refuses(make_layer):
    for name, value in (("sliding_window", 9), ("logits_soft_cap", 3.0), ("alibi_slopes", [1.0])):
        options = {"sliding_window": None, "logits_soft_cap": None, "alibi_slopes": None, name: value}
        with pytest.raises(quire.UnsupportedError, match=f"{name} must be left out in MLA"):
            QuireMLAImpl(
                4, 48, 0.2, 1, kv_cache_dtype="auto", attn_type="decoder", kv_sharing_target_layer_name=None, **options
            )


# Prefill: expanded keys and values.


def expanded(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a problem's keys and values without pages, and where each sequence's begin; values are a strided view."""
    rows = [
        [
            int(table[i // problem.cache.page_size]) * problem.cache.page_size + i % problem.cache.page_size
            for i in range(n)
        ]
        for table, n in zip(problem.batch.page_table, problem.seq_lens, strict=True)
    ]
    at = torch.tensor([slot for row in rows for slot in row], device=DEVICE)
    starts = torch.tensor([0, *problem.seq_lens], device=DEVICE).cumsum(0).int()
    k, v = (x.flatten(0, 1)[at] for x in (problem.cache.k, problem.cache.v))
    return k, torch.cat([k, v], -1)[..., k.shape[-1] :], starts


@pytest.mark.parametrize("widths", [(48, 32), (192, 128)])
@pytest.mark.parametrize("part", ["new tokens", "past"])
def test_prefill_attends_to_expanded_latents(widths, part, make_layer):
    spec = quire.AttentionSpec(
        num_q_heads=4, num_kv_heads=4, head_dim=widths[0], head_dim_v=widths[1], dtype=torch.float32, softmax_scale=0.1,
        causal=part == "new tokens",
    )  # fmt: skip
    lens = ((7, 7), (1, 1), (20, 20)) if part == "new tokens" else ((7, 30), (1, 0), (20, 5))
    problem = make_problem(spec, lens, device=DEVICE)
    k, v, key_starts = expanded(problem)
    starts = problem.batch.query_starts
    past = SimpleNamespace(
        index=0, query_start_loc=starts, cu_seq_lens=key_starts, max_query_len=20, max_seq_len=max(problem.seq_lens)
    )
    step = SimpleNamespace(query_start_loc=starts, max_query_len=20, plans={})
    if contract.has_prefill_backends():
        prefill = QuirePrefill(4, 0.1, 32, 32, 16, widths[1], None)
        prefill.prepare_metadata(step)
        run_new, run_past = (
            prefill.run_prefill_new_tokens,
            lambda: prefill.run_prefill_context_chunk(past, problem.q, k, v),
        )
    else:
        layer, _ = make_layer(make_problem(SPEC, BATCHES["decode"], device=DEVICE))
        layer.impl.scale = 0.1
        step.chunked_context = SimpleNamespace(cu_seq_lens=[key_starts], max_seq_lens=[max(problem.seq_lens)])
        run_new = lambda **options: layer.impl.prefill_new_tokens(step, **options)  # noqa: E731
        run_past = lambda: layer.impl.prefill_context_chunk(step, 0, problem.q, k, v)  # noqa: E731
    if part == "past":
        out, lse = run_past()
    else:
        assert error_budget(problem, run_new(q=problem.q, k=k, v=v, return_softmax_lse=False)).passed
        out, lse = run_new(q=problem.q, k=k, v=v, return_softmax_lse=True)
    assert lse.shape == (4, problem.q.shape[0]) and lse.is_contiguous()
    assert error_budget(problem, quire.State(out, lse.T.contiguous())).passed


@pytest.mark.skipif(not contract.has_prefill_backends(), reason="this vLLM has no backends for prefill")
def test_vllm_finds_the_backend_for_prefill():
    from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

    assert MLAPrefillBackendEnum.CUSTOM.get_class() is QuirePrefill
    for widths, dtype, served in (
        ((128, 64, 128), torch.bfloat16, True),
        ((192, 64, 256), torch.bfloat16, True),
        ((256, 64, 256), torch.bfloat16, True),
        ((512, 64, 512), torch.bfloat16, False),
        ((128, 64, 128), torch.float8_e4m3fn, False),
    ):
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        config = MLAPrefillSelectorConfig(dtype, MLADimensions(**dict(zip(names, widths, strict=True))))
        assert bool(QuirePrefill.validate_configuration(SimpleNamespace(major=8, minor=0), config)) is not served
    with pytest.raises(quire.UnsupportedError, match="output_scale must be None"):
        QuirePrefill(4, 0.1, 32, 32, 16, 32, None).run_prefill_new_tokens(*[torch.ones(1, 4, 48)] * 3, False, None, 1.0)


# The engine end to end.


@pytest.fixture
def by_quire():
    """Make vLLM prefill with Quire too, where that is chosen apart, and return the options of `engine` for it."""
    if not contract.has_prefill_backends():
        yield {}
        return
    from vllm.v1.attention.backends.mla.prefill import selector

    selector._auto_select_mla_prefill_backend.cache_clear()  # without a GPU it would keep an earlier test's choice
    yield {"attention_config": {"mla_prefill_backend": "CUSTOM"}}
    selector._auto_select_mla_prefill_backend.cache_clear()


def count(monkeypatch, owner, name: str) -> list:
    """Record the calls of `owner.name`."""
    original, calls = getattr(owner, name), []

    def counted(*args, **options):
        calls.append((args, options))
        return original(*args, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("name", [slow("deepseek-v2-lite"), "deepseek-v3"])
def test_latent_attention_writes_the_tokens_of_eager_attention(name, tmp_path, monkeypatch, by_quire):
    monkeypatch.setattr(QuireMLAMetadataBuilder, "reorder_batch_threshold", 16)  # prompts of more tokens are expanded
    decodes, prefills = count(monkeypatch, QuireMLAImpl, "forward_mqa"), count(monkeypatch, quire, "varlen_attention")
    model = make_model(name, tmp_path)
    generated, _ = serve(tmp_path, **by_quire)
    assert generated == [[greedy(model, p) for p in prompts()]]
    assert len(decodes) >= 2 * (NEW_TOKENS - 1) and len(prefills) >= 2


PINS = "pin_memory=True" in inspect.getsource(inspect.getmodule(MLACommonMetadataBuilder))


@pytest.mark.slow
@pytest.mark.skipif(
    DEVICE == "cpu" and (PINS or not contract.has_prefill_backends()),
    reason="older vLLM splits prefills of MLA only on a GPU",
)
def test_chunks_of_prefill_and_cached_prefixes_write_the_tokens_of_eager_attention(tmp_path, monkeypatch, by_quire):
    monkeypatch.setattr(QuireMLAMetadataBuilder, "reorder_batch_threshold", 8)  # chunks of more tokens are expanded
    pasts = count(monkeypatch, QuirePrefill, "run_prefill_context_chunk")
    model = make_model("deepseek-v3", tmp_path)
    expected = [greedy(model, p) for p in prompts()]
    options = {"max_num_batched_tokens": 32, "enable_prefix_caching": True, **by_quire}
    generated, cached = serve(tmp_path, rounds=2, **options)
    assert generated == [expected, expected]
    assert cached >= 2 * 64  # tokens that were not computed again
    assert pasts or not contract.has_prefill_backends()


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [64, 80])
def test_prompts_up_to_a_threshold_attend_to_latents(page_size, tmp_path, monkeypatch):
    decodes = count(monkeypatch, QuireMLAImpl, "forward_mqa")
    model = make_model("deepseek-v2-lite", tmp_path)
    generated, _ = serve(tmp_path, block_size=page_size)
    assert generated == [[greedy(model, p) for p in prompts()]]
    lens = [int(args[3].decode.max_query_len) for args, _ in decodes]
    assert max(lens) > 64 and 1 in lens  # a prompt of 70 tokens, and its outputs


@pytest.mark.slow
def test_drafted_tokens_are_verified_to_the_tokens_of_eager_attention(tmp_path, monkeypatch, drafts_on_cpu, by_quire):
    steps, original = [], QuireMLAMetadataBuilder._build_decode

    def build(self, **options):
        steps.append(original(self, **options))
        return steps[-1]

    monkeypatch.setattr(QuireMLAMetadataBuilder, "_build_decode", build)
    monkeypatch.setattr(QuireMLAMetadataBuilder, "reorder_batch_threshold", 1)  # vLLM raises it to 1 + drafts
    model = make_model("deepseek-v3", tmp_path)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    generated, _ = serve(tmp_path, speculative_config=drafts, enable_prefix_caching=False, **by_quire)
    assert generated == [[greedy(model, p) for p in prompts()]]
    assert [step.max_query_len for step in steps].count(4) > 10  # one token and three drafts
    assert max(step.max_query_len for step in steps) == 4


@pytest.mark.skipif(DEVICE == "cpu", reason="compares with vLLM's own backends, which need a GPU")
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_bfloat16_is_as_close_to_float32_as_vllm_s_own_backends(kv_dtype, tmp_path, by_quire):
    widths = {
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16}
    make_model("deepseek-v3", tmp_path, sizes | widths, std=0.05, dtype=torch.bfloat16)
    backends = ("FLASH_ATTN_MLA", "TRITON_MLA") if kv_dtype == "auto" else ("TRITON_MLA",)
    assert_as_close_as(backends, tmp_path, kv_dtype, by_quire, kv_cache_dtype=kv_dtype, block_size=64)
