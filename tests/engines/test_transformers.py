"""Continuous batching through Quire against the same model with eager attention, token for token, on either end of the supported range."""

import pytest
import torch
import transformers
import triton
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import quire
from quire.integrations import transformers as hook

SMALL = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 9}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**HYBRID, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**HYBRID, "query_pre_attn_scalar": 16}),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {**HYBRID, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
INTERPRETED = triton.knobs.runtime.interpret
PROMPT_LENS = (5, 40, 1, 70)
NEW_TOKENS = 4 if INTERPRETED else 12


def make_model(name: str):
    config, model, extra = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model)(getattr(transformers, config)(**SMALL | extra)).eval()
    for parameter in model.parameters():  # enough spread that the next token is no coin toss
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    for n, parameter in model.named_parameters():
        if "sinks" in n:
            torch.nn.init.normal_(parameter)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in PROMPT_LENS]


def greedy(model, prompt: list[int]) -> list[int]:
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()


def batched(model, inputs: list[list[int]], max_batch_tokens: int = 32) -> list[list[int]]:
    page = "block_size" if "block_size" in ContinuousBatchingConfig.__dataclass_fields__ else "page_size"
    config = ContinuousBatchingConfig(**{page: 16}, num_blocks=64, max_batch_tokens=max_batch_tokens)
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1)
    results = model.generate_batch(inputs, generation_config=generation, continuous_batching_config=config, warmup=False)
    by_id = {int(r.request_id.rsplit("_", 1)[1]): r.generated_tokens for r in results.values()}
    return [by_id[i] for i in sorted(by_id)]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"] if INTERPRETED else MODELS)
def test_continuous_batching_writes_the_tokens_of_eager_attention(name, monkeypatch):
    model = make_model(name)
    model.set_attn_implementation("eager")
    expected = [greedy(model, p) for p in prompts()]
    hook.use(model)

    def refuse(*args, **kwargs):
        raise AssertionError("keys and values were gathered into a copy")

    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    monkeypatch.setattr(PagedAttentionCache, "update", refuse)
    assert batched(model, prompts()) == expected  # 70 tokens in steps of at most 32: prefill in chunks on top of a past
    assert hook.last_plan().kernel == ("triton" if INTERPRETED else "torch")


def test_plain_generate_serves_unpadded_batches_and_refuses_padding():
    model = make_model("llama")
    model.set_attn_implementation("eager")
    expected = greedy(model, prompts()[1])
    hook.use(model)
    assert greedy(model, prompts()[1]) == expected
    ids = torch.tensor([[0, 0, 5, 6], [4, 5, 6, 7]])
    with pytest.raises(quire.UnsupportedError, match="padded"):
        model.generate(ids, attention_mask=(ids > 0).long(), max_new_tokens=2, do_sample=False, pad_token_id=0)


def test_install_refuses_versions_outside_its_range(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.16.1")
    with pytest.raises(quire.UnsupportedError, match=r"5\.17 to before 5\.24"):
        hook.install()


def test_seeding_stops_the_import_of_a_package_by_the_implementation_s_name():
    from transformers import modeling_flash_attention_utils as lazy

    hook.seed_lazy_import("some_flash_name")
    assert lazy._loaded_implementation == "some_flash_name"
    if hasattr(lazy, "lazy_import_flash_attention") and hook.Version(transformers.__version__) >= hook.FLASH_NAMES:
        lazy.lazy_import_flash_attention("some_flash_name")  # would try to import or download it
    hook.install()


def test_plans_are_shared_by_layers_and_renewed_by_steps():
    spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    read, cu = torch.arange(8), torch.tensor([0, 3], dtype=torch.int32)
    longest = {"max_query_len": 3, "max_seq_len": 8, "num_tokens": 3}
    first = hook.step_plan("all", spec, longest, read, cu, cu)
    assert hook.step_plan("all", spec, longest, read, cu, cu) is first
    assert hook.step_plan("all", spec, longest, read.clone(), cu, cu) is not first
