"""Bits of log probabilities in the real vLLM, with Quire's kernels.

Batch-invariant plans: whether a token was generated, drafted or given changes no bit. One launch that writes new tokens
and attends gives the bits of two launches. Without a GPU, Triton's interpreter runs the kernels.
"""
# ruff: noqa: E402

import pytest
import torch

import tests.engines.vllm_environment  # noqa: F401

vllm = pytest.importorskip("vllm", reason="vLLM is tested by `make test-vllm`")

import triton
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

import quire
from quire.dispatch.constants import forget
from quire.integrations.vllm.backend import QuireMetadataBuilder
from quire.kernels import choose
from tests.engines import test_vllm
from tests.engines.test_vllm import DEVICE, NAME, engine, make_model
from tests.extended import extended, slow

if DEVICE == "cpu" and not triton.knobs.runtime.interpret:
    pytest.skip("PyTorch serves CPU tensors; TRITON_INTERPRET=1 runs the kernels", allow_module_level=True)

torch.set_num_threads(1)  # where threads cut a tensor, PyTorch rounds otherwise
NEW_TOKENS = 8
FOLDER = "determinism" if NAME == "QUIRE" else "layers"  # of vLLM's own invariant layers
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


one_process, drafts_on_cpu = test_vllm.one_process, test_vllm.drafts_on_cpu  # fixtures


@pytest.fixture
def invariant_layers(monkeypatch, rows_by_themselves):
    """Compute each row of a layer by itself. On a GPU, vLLM's own layers do so with `VLLM_BATCH_INVARIANT=1`."""
    if DEVICE == "cuda":
        return

    def product(self, layer, x, bias=None):
        out = torch.stack([layer.weight @ row for row in x])
        return out if bias is None else out + bias

    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        monkeypatch.setattr(method, "apply", product)
    monkeypatch.setattr(f"vllm.model_executor.{FOLDER}.batch_invariant.init_batch_invariance", lambda *args: None)


def generate(folder, prompts: list[list[int]], max_num_batched_tokens: int, options: dict, **asked) -> list:
    """Return vLLM's results for prompts, with the greedy tokens' log probabilities that are asked for."""
    sizes = {"max_model_len": 310, "num_gpu_blocks_override": 200, "max_num_batched_tokens": max_num_batched_tokens}
    llm = engine(folder, **{"enable_prefix_caching": False} | sizes | options)
    sampling = vllm.SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **asked)
    return llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)


def last_log_probabilities(tokens: list[int], entries: list) -> list[float]:
    """Return those of the last tokens of a text, from entries that end with it."""
    return [entry[token].logprob for token, entry in zip(tokens[-NEW_TOKENS:], entries[-NEW_TOKENS:], strict=True)]


@pytest.mark.parametrize(
    ("name", "drafts", "invariant"),
    [
        extended("llama", False, True),
        ("llama", True, True),
        slow("gemma2", False, True),
        slow("llama", False, False),
    ],
)
def test_generated_tokens_have_the_log_probabilities_of_one_prefill(
    name, drafts, invariant, tmp_path, monkeypatch, invariant_layers, drafts_on_cpu
):
    """They are generated with another request, after chunks of their prompt; then they are the end of one prompt.

    Without `VLLM_BATCH_INVARIANT=1` some of them differ where keys are cut, which shows that the test notices it.
    """
    if not invariant:
        monkeypatch.setattr(
            choose, "least", lambda found, *_: sorted(found.values(), key=lambda one: not one.num_partitions)
        )
    forget()  # what tests before chose
    lengths, build = [], QuireMetadataBuilder.build

    def note(self, common_prefix_len, common_attn_metadata, **options):
        lengths.append(common_attn_metadata.max_query_len)
        return build(self, common_prefix_len, common_attn_metadata, **options)

    monkeypatch.setattr(QuireMetadataBuilder, "build", note)
    vllm.envs.disable_envs_cache()  # of the last engine
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    make_model(name, tmp_path, {"max_position_embeddings": 1024})
    draw = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 97, (n,), generator=draw).tolist() for n in (290, 5)]
    options = {"speculative_config": DRAFTS} if drafts else {}
    written = generate(tmp_path, prompts, 110, options, max_tokens=NEW_TOKENS, logprobs=0)
    assert max(lengths) <= 110 and (4 if drafts else 1) in lengths  # one token and three drafts
    whole = [[*r.prompt_token_ids, *r.outputs[0].token_ids] for r in written]
    read = generate(tmp_path, whole, 310, {}, max_tokens=1, prompt_logprobs=0)
    assert max(lengths) == 290 + NEW_TOKENS
    ours = [last_log_probabilities(w, r.outputs[0].logprobs) for w, r in zip(whole, written, strict=True)]
    exact = [last_log_probabilities(w, r.prompt_logprobs) for w, r in zip(whole, read, strict=True)]
    forget()
    assert (ours == exact) == invariant


@pytest.mark.slow
def test_one_launch_and_two_give_the_same_log_probabilities(tmp_path, monkeypatch):
    """Attention writes new tokens itself, or a launch before it does. Sequences share pages of a cached prefix."""
    appenders, appender = [], quire.Plan.appender

    def note(self, cache):
        appenders.append(appender(self, cache))
        return appenders[-1]

    make_model("llama", tmp_path)
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, 97, (90,), generator=draw).tolist()
    prompts = [tokens[:64] + tokens[64 : 64 + n] for n in (3, 26, 9, 17)]
    found = []
    for function in (note, lambda self, cache: None):
        monkeypatch.setattr(quire.Plan, "appender", function)
        results = generate(tmp_path, prompts, 70, {"enable_prefix_caching": True}, max_tokens=NEW_TOKENS, logprobs=0)
        assert sum(r.num_cached_tokens for r in results) >= 64
        found.append([last_log_probabilities(r.outputs[0].token_ids, r.outputs[0].logprobs) for r in results])
    assert any(appenders) and found[0] == found[1]
