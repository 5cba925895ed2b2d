"""Continuous batching through Quire against the same model with eager attention, token for token.

The tests run on both ends and in the middle of the supported range of Transformers. On a GPU the engine captures its
steps in CUDA graphs, where any wait for the device is an error, and decodes by page tables. On a CPU the tests make it
pad its inputs and pass page tables too.
"""

import functools
import gc
import logging

import pytest
import torch
import transformers
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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
SHARED_KEYS = dict(  # the last two layers attend to the keys of the first two
    num_hidden_layers=4,
    layer_types=HYBRID["layer_types"] * 2,
    sliding_window=12,
    num_kv_shared_layers=2,
    vocab_size_per_layer_input=97,
    hidden_size_per_layer_input=8,
    laurel_rank=8,
    altup_num_inputs=2,
    activation_sparsity_pattern=None,
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
    "deepseek-v3-wide-values": ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT | {"v_head_dim": 64}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"num_key_value_heads": 4}),
    "gemma3n": ("Gemma3nTextConfig", "Gemma3nForCausalLM", SHARED_KEYS),
}
# Of these, some compute attention by Transformers' interface from a version on, and some in none. Doge selects keys.
OF_THEIR_OWN = {
    "big-bird": ("BigBirdConfig", "BigBirdForCausalLM", {"is_decoder": True, "attention_type": "original_full"}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {}),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {"n_embd": 64, "n_head": 4, "rotary_dim": 8}),
    "cpm-ant": ("CpmAntConfig", "CpmAntForCausalLM", {"dim_head": 16, "dim_ff": 96, "prompt_length": 4}),
    "doge": ("DogeConfig", "DogeForCausalLM", {"keep_window_size": 4}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {}),
    "gpt-j": ("GPTJConfig", "GPTJForCausalLM", {"n_embd": 64, "n_head": 4, "rotary_dim": 8}),
    "gpt-neox-japanese": ("GPTNeoXJapaneseConfig", "GPTNeoXJapaneseForCausalLM", {"intermediate_multiple_size": 2}),
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": 64, "n_heads": 4}),
    "openai-gpt": ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", {"n_embd": 64, "n_head": 4}),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", {"attention_hidden_size": 64}),
    "xglm": ("XGLMConfig", "XGLMForCausalLM", {"d_model": 64, "attention_heads": 4, "ffn_dim": 96}),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = triton.knobs.runtime.interpret
PROMPT_LENS = (5, 40, 1, 70)
NEW_TOKENS = 4 if INTERPRETED else 12


def make_model(name: str, **sizes: int):
    config, model, extra = (MODELS | OF_THEIR_OWN)[name]
    own = ("head_dim", "num_key_value_heads") if name in OF_THEIR_OWN else ()
    small = {key: size for key, size in SMALL.items() if key not in own}
    torch.manual_seed(0)
    model = getattr(transformers, model)(getattr(transformers, config)(**small | extra | sizes)).eval()
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


class CopiesOfCache(TorchDispatchMode):
    """Counts the bytes that PyTorch's operators copy from the engine's cache or into it, in each pass of a model.

    Attributes:
        passes: of each, the tokens, whether there was a page table, and the bytes.
    """

    def __init__(self, model, monkeypatch):
        super().__init__()
        self.passes = []
        self.in_kernel = False
        for name in ("attention", "varlen_attention", "write_kv"):
            monkeypatch.setattr(batching.quire, name, self.uncounted(getattr(quire, name)))
        forward = model.forward

        @functools.wraps(forward)
        def watched(*args, **kwargs):
            cache = kwargs["cache"]
            self.storages = {x.untyped_storage().data_ptr() for x in tensors_of(cache)}
            assert self.storages
            self.count = 0
            with self:
                out = forward(*args, **kwargs)
            self.passes.append((kwargs["input_ids"].numel(), kwargs["block_table"] is not None, self.count))
            return out

        monkeypatch.setattr(model, "forward", watched)

    def uncounted(self, kernel):
        """Leave out what stands for a kernel on a CPU."""

        def call(*args, **kwargs):
            self.in_kernel = True
            try:
                return kernel(*args, **kwargs)
            finally:
                self.in_kernel = False

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if not self.in_kernel:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            others = [x for x in given if x.untyped_storage().data_ptr() not in self.storages]
            made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            if func._schema.is_mutable and len(others) < len(given):
                self.count += sum(x.nbytes for x in others if x.is_floating_point())
            elif len(others) < len(given):
                self.count += sum(x.nbytes for x in made if x.untyped_storage().data_ptr() not in self.storages)
        return out


def tensors_of(cache) -> list[torch.Tensor]:
    """The tensors that hold keys and values: one from 5.18 on."""
    return [cache.cache_tensor] if hasattr(cache, "cache_tensor") else [*cache.key_cache, *cache.value_cache]


def new_bytes(model) -> int:
    """The bytes of one token's keys and values, in all layers."""
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


OWN_UPDATE = PagedAttentionCache.update


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


@pytest.mark.parametrize("pages", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek-v3"])
def test_no_step_copies_more_of_the_cache_than_its_new_tokens(name, pages, monkeypatch, request):
    if pages:
        request.getfixturevalue("pages_on_cpu")
    model, expected = eager(name, prompts())
    copies = CopiesOfCache(model, monkeypatch)
    assert batched(model, prompts(), use_cuda_graph=False) == expected
    assert all(copied <= tokens * new_bytes(model) for tokens, _, copied in copies.passes)
    if name != "gemma2":  # its rings have no page table
        assert sum(by_pages for _, by_pages, _ in copies.passes) >= (NEW_TOKENS - 2) * pages


def test_other_implementations_work_as_before(monkeypatch):
    """And they gather: what counts copies sees it."""
    monkeypatch.setattr(PagedAttentionCache, "update", OWN_UPDATE)
    model, expected = eager("llama", prompts())
    model.set_attn_implementation("paged|eager")
    copies = CopiesOfCache(model, monkeypatch)
    assert batched(model, prompts(), use_cuda_graph=False) == expected
    assert any(copied > 5 * tokens * new_bytes(model) for tokens, _, copied in copies.passes)
    hook.use(model)
    assert batched(model, prompts()) == expected


def test_in_inference_mode_and_then_without():
    model, expected = eager("gemma2", prompts())
    with torch.inference_mode():
        assert batched(model, prompts()) == expected
    assert batched(model, prompts()) == expected


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_a_model_is_refused_or_writes_the_tokens_of_eager_attention(name):
    try:
        model, expected = eager(name, prompts())
    except quire.UnsupportedError as refusal:
        selects = "which flash attention cannot serve" in str(refusal)
        assert selects or "which has attention of its own; generate by model.generate" in str(refusal)
        assert selects == (name == "doge")
    else:
        assert batched(model, prompts()) == expected
        assert name in ("codegen", "gpt-j")


def failure(model, caplog) -> str:
    """What the engine logs for a prompt that fails. It goes on."""
    caplog.set_level(logging.ERROR, logger="ContinuousBatchingLogger")  # `quire generate` silences it in this process
    assert batched(model, prompts()[:1]) == [[]]
    return caplog.text


def test_a_cache_as_wide_as_the_rope_columns_is_refused(caplog):
    model, _ = eager("deepseek-v3", [])
    model.config.head_dim = 16  # Transformers' own, before `use`
    assert "at least the width of keys, 48, and of values, 32, since" in failure(model, caplog)


def test_values_wider_than_the_cache_are_refused(caplog):
    model, _ = eager("deepseek-v3-wide-values", [])
    model.config.head_dim = 48
    assert "at least the width of keys, 48, and of values, 64, since" in failure(model, caplog)


def test_a_cache_of_fewer_heads_is_refused(caplog):
    model, _ = eager("llama", [])
    model.config.num_key_value_heads = 1
    assert "config.num_key_value_heads must be the number of heads of keys" in failure(model, caplog)


def test_a_layer_that_attends_twice_is_refused(caplog, monkeypatch):
    """As DiffLlama's, with one half of the values and then the other. The cache has one place for them."""
    model, _ = eager("llama", [])
    forward = hook.attention_forward

    def twice(*args, **kwargs):
        forward(*args, **kwargs)
        return forward(*args, **kwargs)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, hook.install(), twice)
    assert "a layer must attend once in a step, got layer 0 twice" in failure(model, caplog)


def test_a_mask_of_the_model_s_own_is_refused_in_continuous_batching_too():
    """Doge makes one of its values. Transformers makes none here."""
    x = torch.zeros(1, 4, 3, 16, device=DEVICE)
    with pytest.raises(quire.UnsupportedError, match="attention_mask must be None"):
        hook.attention_forward(None, x, x, x, torch.zeros(1, 4, 3, 3), cache=object(), read_index=[torch.arange(3)])


@pytest.mark.parametrize("given", [{"read_index": [torch.arange(3)]}, {"cache": object()}])
def test_a_step_without_its_cache_or_a_cache_without_its_step_is_refused(given):
    """As of layers that pass on less than they are given: Nemotron, StableLM."""
    x = torch.zeros(1, 4, 3, 16, device=DEVICE)
    with pytest.raises(quire.UnsupportedError, match="got one without the other in Linear"):
        hook.attention_forward(torch.nn.Linear(1, 1), x, x, x, None, **given)


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
    monkeypatch.setattr(type(model.model), "_supports_flash_attn", False)  # as DeepSeek-V3.2 and MiniMax-M3 have it
    with pytest.raises(quire.UnsupportedError, match="got LlamaForCausalLM, which flash attention cannot serve"):
        hook.use(model)
    monkeypatch.undo()
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


@pytest.mark.parametrize("version", ["5.16.1", "5.25.0"])
def test_install_refuses_versions_outside_its_range(version, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(quire.UnsupportedError, match=r"5\.17 to before 5\.25"):
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
