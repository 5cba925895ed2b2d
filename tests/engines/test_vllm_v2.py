"""vLLM's newer model runner ("V2"), the default on GPUs in newer versions, end to end against eager attention.

Its own kernels are Triton's: without a GPU they run in Triton's interpreter, as Quire's do. vLLM takes Triton for
missing where it finds no driver, unless CUDA_VISIBLE_DEVICES is empty.
"""
# ruff: noqa: E402

import importlib
from importlib.util import find_spec

import pytest

import tests.engines.vllm_environment  # noqa: F401

vllm = pytest.importorskip("vllm", reason="vLLM is tested by `make test-vllm`")

import torch
import transformers
import triton
from safetensors.torch import save_file
from triton.runtime import interpreter
from vllm.triton_utils import HAS_TRITON

from quire.integrations.vllm.backend import QuireImpl, QuireMetadataBuilder
from quire.integrations.vllm.mla import QuireMLAMetadataBuilder
from tests.engines import test_vllm, test_vllm_mla
from tests.engines.test_vllm import (
    DEVICE,
    INTERPRETED,
    NAME,
    NEW_TOKENS,
    assert_begins_what_it_warms_up,
    greedy,
    make_model,
    prompts,
    serve,
)
from tests.extended import slow

if not HAS_TRITON or (DEVICE == "cpu" and not INTERPRETED):
    reason = "needs a GPU, or TRITON_INTERPRET=1 and an empty CUDA_VISIBLE_DEVICES"
    pytest.skip(reason, allow_module_level=True)
if DEVICE == "cpu" and find_spec("vllm.v1.worker.cpu") is None:
    pytest.skip("this vLLM has the runner for GPUs alone", allow_module_level=True)

one_process, drafts_on_cpu = test_vllm.one_process, test_vllm.drafts_on_cpu  # fixtures
by_quire = test_vllm_mla.by_quire


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """Choose the runner, and return a list of those that were made."""
    made, runner = [], importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    load = runner.load_model
    monkeypatch.setattr(
        runner, "load_model", lambda self, *args, **more: made.append(self) or load(self, *args, **more)
    )
    yield made
    assert len(made) == 1


@pytest.fixture
def steps(monkeypatch):
    """Return a list of the most queries and of the numbers of tokens of the steps that were built."""
    built = []
    for builder, method in ((QuireMetadataBuilder, "build"), (QuireMLAMetadataBuilder, "build")):
        original = getattr(builder, method)

        def build(self, common_prefix_len, common_attn_metadata, original=original, **options):
            built.append((common_attn_metadata.max_query_len, common_attn_metadata.num_reqs))
            return original(self, common_prefix_len, common_attn_metadata, **options)

        monkeypatch.setattr(builder, method, build)
    return built


def test_chunks_of_prefill_and_cached_prefixes_write_the_tokens_of_eager_attention(tmp_path, steps):
    model = make_model("llama", tmp_path)
    expected = [greedy(model, p) for p in prompts()]
    generated, cached = serve(tmp_path, rounds=2, max_num_batched_tokens=32, enable_prefix_caching=True)
    assert generated == [expected, expected] and cached >= 2 * 64
    lens = {queries for queries, _ in steps}
    assert 1 in lens and 16 < max(lens) <= 32  # chunks of prompts of up to 70 tokens


@pytest.mark.slow
def test_windows_and_pages_write_the_tokens_of_eager_attention(tmp_path):
    model = make_model("mistral", tmp_path)
    generated, _ = serve(tmp_path, max_num_batched_tokens=64, block_size=48)
    assert generated == [[greedy(model, p) for p in prompts()]]


@pytest.fixture
def masks_of_integers(monkeypatch):
    """Let Triton's interpreter take them, as its compiler does: vLLM's kernel for n-grams has one."""
    builder, load = interpreter.InterpreterBuilder, interpreter.InterpreterBuilder.create_masked_load

    def create_masked_load(self, ptrs, mask, *others):
        return load(self, ptrs, interpreter.TensorHandle(mask.data.astype(bool), triton.language.int1), *others)

    monkeypatch.setattr(builder, "create_masked_load", create_masked_load)


@pytest.mark.skipif(
    find_spec("vllm.v1.worker.gpu.spec_decode.ngram") is None, reason="this vLLM's newer runner drafts no n-grams"
)
def test_drafted_tokens_are_verified_to_the_tokens_of_eager_attention(
    tmp_path, steps, drafts_on_cpu, masks_of_integers
):
    model = make_model("llama", tmp_path)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    generated, _ = serve(tmp_path, max_num_batched_tokens=64, speculative_config=drafts)
    assert generated == [[greedy(model, p) for p in prompts()]]
    assert 4 in {queries for queries, _ in steps}


@pytest.mark.slow
def test_latents_write_the_tokens_of_eager_attention(tmp_path, by_quire):
    model = make_model("deepseek-v3", tmp_path)
    generated, _ = serve(tmp_path, **by_quire)
    assert generated == [[greedy(model, p) for p in prompts()]]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("vllm.v1.worker.gpu.spec_decode.standalone_ar") is None,
    reason="this vLLM's newer runner takes no model that drafts by itself",
)
def test_a_model_that_drafts_for_itself_has_each_draft_accepted(tmp_path, steps, drafts_on_cpu):
    """A draft from a wrong key would not be: then each step would add one token."""
    model = make_model("llama", tmp_path)
    drafts = {
        "method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3, "attention_backend": NAME,
    }  # fmt: skip
    generated, _ = serve(tmp_path, max_num_batched_tokens=512, enable_prefix_caching=False, speculative_config=drafts)
    assert generated == [[greedy(model, p) for p in prompts()]]
    verified = [queries for queries, _ in steps].count(4)
    assert verified == -(-(NEW_TOKENS - 1) // 4)  # the prompts gave the first token


@pytest.mark.parametrize("layers", [*map(slow, ["full_attention", "sliding_attention"]), "mixed, not causal"])
def test_drafts_of_whole_blocks_are_verified_to_the_tokens_of_eager_attention(
    layers, tmp_path, monkeypatch, steps, drafts_on_cpu
):
    """DFlash: full layers see the whole block, windows are causal unless the model says otherwise."""
    written, write = [], QuireImpl.do_kv_cache_update
    monkeypatch.setattr(QuireImpl, "do_kv_cache_update", lambda *args: written.append(args[1]) or write(*args))
    model = make_model("qwen3", tmp_path / "target")
    mixed = layers == "mixed, not causal"
    kinds = ["sliding_attention", "full_attention"] if mixed else [layers] * 2
    own = {"mask_token_id": 96, "target_layer_ids": [0, 1]} | ({"causal": False} if mixed else {})
    config = transformers.Qwen3Config(
        **test_vllm.SMALL, layer_types=kinds, sliding_window=12, use_sliding_window=True, dflash_config=own
    )
    config.architectures = ["DFlashDraftModel"]
    draft = transformers.Qwen3Model(config)
    weights = {name: w for name, w in draft.state_dict().items() if "embed_tokens" not in name}
    hidden = config.hidden_size
    weights |= {"fc.weight": torch.randn(hidden, 2 * hidden) / 8, "hidden_norm.weight": torch.ones(hidden)}
    (tmp_path / "draft").mkdir()
    config.save_pretrained(tmp_path / "draft")
    save_file(weights, tmp_path / "draft" / "model.safetensors")
    drafts = {
        "method": "dflash", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3, "attention_backend": NAME,
    }  # fmt: skip
    generated, _ = serve(tmp_path / "target", max_num_batched_tokens=64, speculative_config=drafts)
    assert generated == [[greedy(model, p) for p in prompts()]]
    assert len(written) >= 2 and 4 in {queries for queries, _ in steps}


@pytest.mark.slow
def test_a_warm_up_begins_before_weights_are_loaded_for_what_is_compiled_later(tmp_path, monkeypatch):
    assert_begins_what_it_warms_up(tmp_path, monkeypatch)
