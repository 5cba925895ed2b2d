"""Continuous batching through Quire against the same model with eager attention, token for token.

The tests run on either end of the supported range of Transformers. On a GPU the engine captures its steps in CUDA
graphs, where any wait for the device is an error, and decodes by page tables. On a CPU the tests make it pad its inputs
and pass page tables too.
"""

import gc
import logging

import pytest
import torch
import transformers
import triton
from transformers import GenerationConfig
from transformers import modeling_flash_attention_utils as lazy
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import initialization
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.model_runner import ModelRunner

import quire
from quire.integrations import flash_attn
from quire.integrations import transformers as hook
from quire.integrations.transformers import batching
from tests.extended import extended

SMALL = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    first_k_dense_replace=2,  # no layer has experts
)
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 9}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**HYBRID, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**HYBRID, "query_pre_attn_scalar": 16}),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {**HYBRID, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "deepseek-v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", LATENT),
    "deepseek-v2-lite": ("DeepseekV2Config", "DeepseekV2ForCausalLM", LATENT | {"q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = triton.knobs.runtime.interpret
PROMPT_LENS = (5, 40, 1, 70)
NEW_TOKENS = 4 if INTERPRETED else 12


def make_model(name: str, **sizes: int):
    config, model, extra = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model)(getattr(transformers, config)(**SMALL | extra | sizes)).eval()
    for parameter in model.parameters():  # enough spread that rounding does not choose the next token
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    for n, parameter in model.named_parameters():
        if "sinks" in n:
            torch.nn.init.normal_(parameter)
    return model.to(DEVICE)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in PROMPT_LENS]


def greedy(model, prompt: list[int]) -> list[int]:
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return model.generate(torch.tensor([prompt], device=DEVICE), generation_config=config)[0, len(prompt) :].tolist()


def batched(model, inputs: list[list[int]], max_batch_tokens: int = 32, **options) -> list[list[int]]:
    # renamed in 5.18
    page = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
    if model.config.model_type == "gpt_oss" and DEVICE == "cuda":
        # float32 experts go through the CPU (torch.nn.functional.grouped_mm), which cannot be captured
        options["use_cuda_graph"] = False
    config = ContinuousBatchingConfig(**{page: 16}, num_blocks=64, max_batch_tokens=max_batch_tokens, **options)
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1)
    results = model.generate_batch(
        inputs, generation_config=generation, continuous_batching_config=config, warmup=False
    )
    by_id = {int(r.request_id.rsplit("_", 1)[1]): r.generated_tokens for r in results.values()}
    return [by_id[i] for i in sorted(by_id)]


def eager(name: str, inputs: list[list[int]], **sizes: int):
    """Return a model that uses Quire, and what it generated with eager attention."""
    model = make_model(name, **sizes)
    model.set_attn_implementation("eager")
    expected = [greedy(model, p) for p in inputs]
    hook.use(model)
    return model, expected


def count(monkeypatch, owner, name: str) -> list:
    """Record the results of `owner.name`."""
    original, results = getattr(owner, name), []

    def counted(*args, **kwargs):
        results.append(original(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(owner, name, counted)
    return results


@pytest.fixture(autouse=True)
def no_copies(monkeypatch):
    """Make the engine's own write and gather fail."""

    def refuse(*args, **kwargs):
        raise AssertionError("keys and values were gathered into a copy")

    monkeypatch.setattr(PagedAttentionCache, "update", refuse)


@pytest.fixture
def pages_on_cpu(monkeypatch):
    """Make the engine pass page tables in steps that only decode, which it does on GPUs only."""
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)


@pytest.fixture
def padding_on_cpu(monkeypatch):
    """Make the engine pad as it does for CUDA graphs: empty sequences, tokens of no sequence, unused slots."""
    init = ModelRunner.__init__

    def padded(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(ModelRunner, "__init__", padded)


@pytest.mark.parametrize("name", [extended("llama"), extended("mistral"), "gpt-oss"] if INTERPRETED else MODELS)
def test_continuous_batching_writes_the_tokens_of_eager_attention(name):
    model, expected = eager(name, prompts())
    assert batched(model, prompts()) == expected  # 70 tokens in steps of at most 32: prefill in chunks on top of a past
    assert (hook.last_plan().kernel == "torch") == (DEVICE == "cpu" and not INTERPRETED)


@pytest.mark.parametrize(
    ("name", "head_dim"), [("llama", 72), extended("gemma3", 256), ("gemma2", 512), extended("llama", 512)]
)
def test_heads_of_any_width_write_the_tokens_of_eager_attention(name, head_dim):
    """Full and sliding layers; 72 is no power of two."""
    sizes = {"head_dim": head_dim} | ({"query_pre_attn_scalar": head_dim} if name != "llama" else {})
    model, expected = eager(name, prompts()[:2], **sizes)
    assert batched(model, prompts()[:2]) == expected


@pytest.mark.parametrize("name", ["llama"] if INTERPRETED else ["llama", "gemma2", "gpt-oss", "deepseek-v3"])
def test_padded_as_for_cuda_graphs(name, padding_on_cpu):
    model, expected = eager(name, prompts())
    padding = {"max_requests_per_batch": 8, "q_padding_interval_size": 16, "kv_padding_interval_size": 64}
    assert batched(model, prompts(), **padding) == expected


@pytest.mark.parametrize(("name", "padded"), [extended("llama", False), ("llama", True), ("deepseek-v3", False)])
def test_decode_by_page_table(name, padded, pages_on_cpu, monkeypatch, request):
    if padded:
        request.getfixturevalue("padding_on_cpu")
    model, expected = eager(name, prompts())
    calls = count(monkeypatch, batching, "attend_by_pages")
    assert batched(model, prompts(), max_blocks_per_request=8, max_requests_per_batch=8) == expected
    # two layers, and most steps only decode; a graph calls once
    assert len(calls) >= (2 * (NEW_TOKENS - 2) if DEVICE == "cpu" else 2)


def test_a_shared_prefix_is_read_where_it_is(monkeypatch):
    long = prompts()[3]
    inputs = [long, long[:50] + [9, 8, 7], long]
    model, expected = eager("llama", inputs)
    matches = count(monkeypatch, PagedAttentionCache, "search_prefix_match")
    assert batched(model, inputs) == expected
    # tokens that were not computed again; on a GPU the engine schedules a step ahead
    assert max(matches) >= (48 if DEVICE == "cpu" else 32)


def test_a_cache_as_wide_as_the_rope_columns_is_refused(caplog):
    model, _ = eager("deepseek-v3", [])
    model.config.head_dim = 16  # Transformers' own, before `use`
    caplog.set_level(logging.ERROR, logger="ContinuousBatchingLogger")  # `quire generate` silences it in this process
    assert batched(model, prompts()[:1]) == [[]]  # the engine logs an error, and goes on
    assert "config.head_dim must be the width of keys in the cache, 48, got 16" in caplog.text


@pytest.mark.parametrize(
    "name", [*map(extended, ["llama", "deepseek-v2"]), "mistral", "gemma2", "gpt-oss", "deepseek-v3"]
)
def test_plain_generate_serves_unpadded_batches(name):
    inputs = prompts()[3:]
    model, expected = eager(name, inputs)
    assert [greedy(model, p) for p in inputs] == expected


@pytest.mark.parametrize("what", ["padding", "static cache", "packed sequences", "a 4-D mask"])
def test_plain_forward_passes_refuse_masks_that_are_not_served(what):
    model, _ = eager("llama", [])
    ids = torch.tensor([[3, 4, 5, 6], [4, 5, 6, 7]], device=DEVICE)
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(quire.UnsupportedError, match="attention_mask must be"), torch.no_grad():
        if what == "padding":
            model.generate(ids, attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], device=DEVICE), **options)
        elif what == "static cache":
            model.generate(ids, cache_implementation="static", **options)
        elif what == "packed sequences":
            model(ids[:1], position_ids=torch.tensor([[0, 1, 0, 1]], device=DEVICE), use_cache=False)
        else:
            model(ids[:1], attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE))


def test_a_vision_tower_attends_within_images_and_windows():
    """It packs images into one sequence, and windows of images, and says where each begins."""
    text = dict(SMALL, bos_token_id=None, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]})
    vision = dict(
        depth=4, hidden_size=64, intermediate_size=96, num_heads=4, out_hidden_size=64, window_size=56,
        fullatt_block_indexes=[1, 3],
    )  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval().to(DEVICE)
    for name, weights in model.named_parameters():
        weights.data *= 10 if "qkv" in name else 1  # so that it matters which patches are seen
    grid = torch.tensor([[1, 8, 12], [1, 4, 8]], device=DEVICE)
    patches = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 14 * 14, device=DEVICE)

    def see() -> torch.Tensor:
        with torch.no_grad():
            return model.model.visual(patches, grid_thw=grid).last_hidden_state

    model.set_attn_implementation("eager")
    expected = see()
    hook.use(model)
    torch.testing.assert_close(see(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert hook.last_plan().batch.num_seqs == 2


@pytest.mark.parametrize("name", ["position_bias", "indices", "block_indices", "sinks", "bits"])
def test_what_would_change_the_result_is_refused(name):
    x = torch.zeros(1, 4, 3, 16, device=DEVICE)
    given = {name: torch.zeros(1, device=DEVICE)}
    known = {"position_ids": torch.arange(3, device=DEVICE)[None], "output_attentions": False, "sinks": None}
    out, _ = hook.attention_forward(None, x, x, x, None, scaling=1.0, **known)
    assert out.shape == (1, 3, 4, 16)
    with pytest.raises(quire.UnsupportedError, match=f"{name} must be left out, got one"):
        hook.attention_forward(None, x, x, x, None, scaling=1.0, **known | given)


def test_keys_that_are_not_contiguous_are_copied():
    q, k = torch.randn(2, 1, 4, 3, 16, device=DEVICE)
    strided = k.transpose(2, 3).contiguous().transpose(2, 3)
    expected, _ = hook.attention_forward(None, q, k, k, None, scaling=1.0)
    assert torch.equal(hook.attention_forward(None, q, strided, strided, None, scaling=1.0)[0], expected)


def test_models_that_select_keys_are_refused(monkeypatch):
    model, _ = eager("llama", [])
    model.config.index_topk = 8  # as DeepSeek-V3.2 has it
    with pytest.raises(quire.UnsupportedError, match="got LlamaForCausalLM, which selects keys"):
        hook.use(model)
    del model.config.index_topk
    monkeypatch.setattr(type(model.model), "_compatible_flash_implementations", ["MiniMaxAI/msa"])  # as MiniMax-M3
    with pytest.raises(quire.UnsupportedError, match="got LlamaForCausalLM, which selects keys"):
        hook.use(model)
    monkeypatch.setattr(type(model.model), "_compatible_flash_implementations", ["flash_attention_4"])
    hook.use(model)
    assert model.model._compatible_flash_implementations == ["flash_attention_4", hook.NAME]


def test_a_bidirectional_model_is_refused_as_one():
    model, _ = eager("llama", [])
    model.config.is_causal = False
    with (
        pytest.raises(quire.UnsupportedError, match="must be causal, got the mask of a bidirectional"),
        torch.no_grad(),
    ):
        model(torch.tensor([[3, 4, 5, 6]], device=DEVICE), use_cache=False)


@pytest.mark.parametrize("version", ["5.16.1", "5.24.0"])
def test_install_refuses_versions_outside_its_range(version, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(quire.UnsupportedError, match=r"5\.17 to before 5\.24"):
        hook.install()


@pytest.mark.parametrize("model", [None, 3, "gpt2", torch.nn.Linear(2, 2), transformers.LlamaConfig()])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=r"model must be a transformers\.PreTrainedModel, got"):
        hook.use(model)


def test_installing_sets_what_the_import_of_a_flash_package_would_set():
    name = hook.install()
    seeded = {n: getattr(lazy, n) for n in vars(lazy) if n.startswith(("_flash_", "_process_")) and n.endswith("_fn")}
    assert len(seeded) >= 4 and all(callable(function) for function in seeded.values())
    functions = lazy.lazy_import_flash_attention(name)[0]  # would try to import or download it, and fail
    assert functions[:3] == (
        flash_attn.flash_attn_func,
        flash_attn.flash_attn_varlen_func,
        flash_attn.flash_attn_with_kvcache,
    )
    assert {n: getattr(lazy, n) for n in seeded} == seeded
    assert hook.install() == name == hook.use(make_model("gpt-oss"))


def test_layers_share_a_plan_and_steps_do_not():
    spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    empty = quire.PagedKVCache.empty(spec, 8, 1)
    engine, layer = batching.Engine(), batching.Layer(0, None, empty, empty)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    step = {
        "cu_seq_lens_q": cu,
        "cu_seq_lens_k": cu,
        "read_index": [torch.arange(8)],
        "write_index": [torch.arange(3)],
        "block_table": None,
        "max_length_q": 3,
        "max_length_k": {"full_attention": 8},
    }
    first = engine.part(batching.AllKeys, spec, layer, batching.Step.of(step, layer, 3))
    assert engine.part(batching.AllKeys, spec, layer, batching.Step.of(dict(step), layer, 3)) is first
    assert engine.part(batching.NewKeys, spec, layer, batching.Step.of(step, layer, 3)).plan is not first.plan
    other = {**step, "read_index": [torch.arange(8)]}
    assert engine.part(batching.AllKeys, spec, layer, batching.Step.of(other, layer, 3)) is not first


def test_plans_go_with_the_engine_s_cache():
    model, _ = eager("llama", [])
    batched(model, prompts()[:1])
    gc.collect()
    assert not batching._engines


def test_the_slot_of_a_new_token():
    table = torch.tensor([[4, 7, -1], [2, -1, -1], [-1, -1, -1]], dtype=torch.int32)
    slots = batching.new_slots(table, torch.tensor([9, 8, 0], dtype=torch.int32), 8)
    assert slots.tolist() == [7 * 8, 2 * 8 + 7, -1]
