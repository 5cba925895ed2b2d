"""MiniMax M3's layers that choose blocks of keys: the plug-in in vLLM's own classes, and a small model in its engine.

Results of a layer are judged by the oracle, and the engine's tokens by those of attention with a mask, written out in
PyTorch. On a CPU vLLM lacks three functions of this model, which are written in PyTorch too: its norm, what comes
between the projections and the caches, and the scores of blocks, which are `quire.indexer`'s. Images are left out.
"""

# ruff: noqa: E402, I001 (vLLM's environment comes first, and fixtures are found by their names)

import importlib
import json
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vLLM is tested by `make test-vllm`", allow_module_level=True)

from tests.engines.test_vllm import BATCHES, DEVICE, NEW_TOKENS, engine, make_layer, one_process, step_of, vllm_cache  # noqa: F401

import quire
from quire.integrations.vllm import contract

if not contract.has_sparse_mla():  # which is of 0.33 too
    pytest.skip("vLLM before 0.33 has no backend for each layer of MiniMax M3", allow_module_level=True)
MODEL, IMAGES = "vllm.models.minimax_m3", "vllm.transformers_utils.processors.minimax_m3"
if find_spec("torchvision") is None:  # no image is processed here
    classes = "MiniMaxM3VLImageProcessor", "MiniMaxM3VLVideoProcessor", "MiniMaxVLProcessor"
    sys.modules[IMAGES] = ModuleType(IMAGES)
    vars(sys.modules[IMAGES]).update({name: type(name, (), {}) for name in classes})
    vars(sys.modules[IMAGES]).update(MIN_SHORT_SIDE_PIXEL=0, smart_resize=None)

sparse = importlib.import_module(MODEL + ".common.sparse_attention")

import transformers
import vllm
from safetensors.torch import save_file
from vllm.forward_context import get_forward_context
from vllm.models.minimax_m3.common import indexer
from vllm.models.minimax_m3.nvidia import model as vllm_model
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig

from quire.integrations.vllm.minimax_m3 import QuireM3Backend, QuireM3Impl, QuireM3MetadataBuilder, attend_with_quire
from quire.testing import Problem, error_budget, make_problem, random_chosen

NAME = "MiniMaxM3SparseForCausalLM"
SPEC = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
BLOCK = 8  # keys; of a page, or several


def test_vllm_s_model_has_the_plug_in_s_class_and_stays_as_it_was():
    made = ModelRegistry.models[NAME].load_model_cls()
    assert made.__module__ == "quire.integrations.vllm.models" and made.__name__ == NAME
    assert issubclass(made, vllm_model.MiniMaxM3SparseForCausalLM)
    contract.register()
    assert ModelRegistry.models[NAME].load_model_cls() is made
    for quires in (QuireM3Backend, QuireM3Impl, QuireM3MetadataBuilder):
        assert not getattr(quires, "__abstractmethods__", ())


class Layer(torch.nn.Module):
    """What the plug-in reads of a layer of vLLM's model."""

    def __init__(self, spec: quire.AttentionSpec, kv_cache_dtype: str, blocks: torch.Tensor | None) -> None:
        super().__init__()
        self.attn_backend, self.layer_name = sparse.MiniMaxM3SparseBackend, "layer"
        self.kv_cache_dtype, self.topk_indices_buffer = kv_cache_dtype, blocks
        heads = spec.num_q_heads, spec.head_dim, spec.softmax_scale, spec.num_kv_heads
        options = {"kv_cache_dtype": kv_cache_dtype, "topk_blocks": 3, "sparse_block_size": BLOCK}
        self.impl = sparse.MiniMaxM3SparseTritonImpl(*heads, **options)
        self._k_scale = self._v_scale = torch.tensor(1.0, device=DEVICE)


def take(layer: Layer, problem: Problem) -> QuireM3MetadataBuilder:
    """Give a layer the plug-in's attention, and return its builder."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(problem.spec.dtype)
    try:
        attend_with_quire(torch.nn.ModuleList([layer]))
    finally:
        torch.set_default_dtype(before)
    assert layer.attn_backend is QuireM3Backend and layer.impl.spec == problem.spec
    _, builder = make_layer(problem)  # of another layer, for what a builder is made of
    layers = {"layer": layer}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=64),
        model_config=SimpleNamespace(max_model_len=128, hf_config=None),
        additional_config={},
    )
    return QuireM3MetadataBuilder(builder.kv_cache_spec, ["layer"], config, torch.device(DEVICE))


def problem_of(spec: quire.AttentionSpec, lens, **options) -> Problem:
    chosen = partial(random_chosen, width=3, num_lists=spec.num_kv_heads, block_size=BLOCK)
    return make_problem(spec, lens, per_token=chosen, device=DEVICE, **options)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("kv_cache_dtype", "page_size"), [("auto", 8), ("auto", 16), ("fp8", 8)])
def test_tokens_attend_to_the_blocks_that_the_indexer_chose(batch, kv_cache_dtype, page_size, monkeypatch):
    spec = replace(SPEC, kv_dtype=torch.float8_e4m3fn) if kv_cache_dtype == "fp8" else SPEC
    problem = problem_of(
        spec, BATCHES[batch], page_size=page_size, **({"scales": "tensor"} if spec is not SPEC else {})
    )
    buffer = torch.arange(3, dtype=torch.int32, device=DEVICE).repeat(64, 2, 1)  # what earlier steps left
    buffer[: problem.q.shape[0]] = problem.batch.chosen.indices
    layer = Layer(spec, kv_cache_dtype, buffer)
    if spec is not SPEC:
        layer._k_scale, layer._v_scale = problem.cache.k_scale[0].clone(), problem.cache.v_scale[0].clone()
    builder = take(layer, problem)
    common, query, num_tokens = step_of(problem, 3, problem.batch.page_table.shape[1] + 2)
    for layout in ("rows", "rows, heads outside"):
        output = torch.full_like(query, 7.0).flatten(1)
        for _ in range(2):  # layers of a step
            step = {"layer": builder.build(0, common)}
            monkeypatch.setattr(
                "vllm.forward_context._forward_context", SimpleNamespace(attn_metadata=step), raising=False
            )
            kv_cache = vllm_cache(problem.cache, layout)
            assert layer.impl.forward(layer, query.flatten(1), kv_cache, output) is output
        assert error_budget(problem, output.view_as(query)[:num_tokens]).passed
    assert len(builder.plans) == 1
    ((planned, _, options),) = builder.launches(spec, layer.impl, layer.impl.pages)  # of a warm-up
    assert planned == problem.spec and options["chosen"].kind == problem.batch.chosen.kind


def test_nothing_is_attended_to_while_memory_is_measured(monkeypatch):
    problem = problem_of(SPEC, BATCHES["decode"])
    layer = Layer(SPEC, "auto", torch.zeros(64, 2, 3, dtype=torch.int32, device=DEVICE))
    take(layer, problem)
    monkeypatch.setattr("vllm.forward_context._forward_context", SimpleNamespace(attn_metadata=None), raising=False)
    output = torch.full_like(problem.q, 7.0)
    layer.impl.forward(layer, problem.q, torch.tensor([]), output)
    assert bool((output == 7).all()) and not layer.impl.should_use_msa_decode("layer")


def test_what_a_layer_refuses():
    layer = Layer(SPEC, "int8_per_token_head", torch.zeros(64, 2, 3, dtype=torch.int32))
    with pytest.raises(quire.UnsupportedError, match=r"kv_cache_dtype must be one of .* for MiniMax M3, got int8_per"):
        attend_with_quire(torch.nn.ModuleList([layer]))


def test_layers_stay_vllm_s_where_quire_does_not_serve_them(monkeypatch, caplog):
    layer = Layer(SPEC, "auto", None)
    theirs = layer.impl
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_rocm=lambda: True))
    monkeypatch.setattr(contract.logger, "propagate", True)
    attend_with_quire(torch.nn.ModuleList([layer]))
    assert layer.impl is theirs and "not on ROCm" in caplog.text


# The engine end to end. Blocks are pages of 128 keys, as in MiniMax M3.

HEADS, KV_HEADS, DIM, ROTARY, HIDDEN, WIDE, VOCABULARY = 4, 2, 32, 16, 64, 96, 97
PAGE, TOP_K, EPS = 128, 2, 1e-6
IS_SPARSE = (False, True, True)
SIZES = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "index_q": KV_HEADS, "index_k": 1}  # heads


def weights_of_model() -> dict[str, torch.Tensor]:
    """Return random weights by the names that a checkpoint has."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, std: float = 0.2) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    weights = {f"{name}.weight": draw(VOCABULARY, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    weights["model.norm.weight"] = draw(HIDDEN)
    for i, is_sparse in enumerate(IS_SPARSE):
        at = f"model.layers.{i}"
        for name, heads in SIZES.items():
            if is_sparse or "index" not in name:
                weights[f"{at}.self_attn.{name}_proj.weight"] = draw(heads * DIM, HIDDEN)
                if name != "v":
                    weights[f"{at}.self_attn.{name}_norm.weight"] = draw(DIM)
        weights[f"{at}.self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * DIM)
        weights |= {f"{at}.mlp.{name}_proj.weight": draw(WIDE, HIDDEN) for name in ("gate", "up")}
        weights[f"{at}.mlp.down_proj.weight"] = draw(HIDDEN, WIDE)
        weights |= {f"{at}.{name}_layernorm.weight": draw(HIDDEN) for name in ("input", "post_attention")}
    return weights


def write_model(folder) -> dict[str, torch.Tensor]:
    """Write a model's configuration and its weights; return the weights."""
    weights = weights_of_model()
    save_file(weights, folder / "model.safetensors")
    flags = [int(is_sparse) for is_sparse in IS_SPARSE]
    chooses = dict(
        use_sparse_attention=True,
        sparse_index_dim=DIM,
        sparse_num_index_heads=KV_HEADS,
        sparse_topk_blocks=TOP_K,
        sparse_block_size=PAGE,
        sparse_init_block=0,
        sparse_local_block=1,
        sparse_attention_freq=flags,
    )
    config = MiniMaxM3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        dense_intermediate_size=WIDE,
        num_hidden_layers=len(flags),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        rotary_dim=ROTARY,
        max_position_embeddings=1024,
        rope_theta=10000,
        moe_layer_freq=[0] * len(flags),
        sparse_attention_config=chooses,
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [NAME]}), encoding="utf-8")
    return weights


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x over its root mean square, times 1 and a weight."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1 + weight)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return heads [tokens, heads, DIM] whose first columns are rotated, by the two halves of these."""
    first, second, rest = x.split([ROTARY // 2, ROTARY // 2, DIM - ROTARY], -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def blocks_seen(index_q: torch.Tensor, index_k: torch.Tensor) -> torch.Tensor:
    """Return whether tokens of a sequence see its keys, [heads, tokens, keys]: the own block, and the best others."""
    tokens = len(index_q)
    scores = torch.einsum("thd,kd->htk", index_q.bfloat16().float(), index_k[:, 0].bfloat16().float())
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    scores = scores.masked_fill(~causal, -torch.inf)
    padded = torch.nn.functional.pad(scores, (0, -tokens % PAGE), value=-torch.inf).unflatten(-1, (-1, PAGE))
    best = padded.amax(-1)  # [heads, tokens, blocks]
    own = torch.arange(tokens) // PAGE
    best[:, torch.arange(tokens), own] = torch.inf
    kept = best.topk(min(TOP_K, best.shape[-1]), -1).indices
    seen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, kept, True) & (best > -torch.inf)
    return seen.repeat_interleave(PAGE, -1)[..., :tokens] & causal


def logits_of(weights: dict[str, torch.Tensor], tokens: list[int], chooses: bool = True) -> torch.Tensor:
    """Return the logits after the last token; the model sees all keys if it does not choose."""
    x = weights["model.embed_tokens.weight"][tokens]
    angles = torch.arange(len(tokens))[:, None] * 10000.0 ** -(torch.arange(0, ROTARY, 2) / ROTARY)
    cos, sin = angles.cos(), angles.sin()
    for i, is_sparse in enumerate(IS_SPARSE):
        at = f"model.layers.{i}."
        attn = at + "self_attn."
        h = norm(x, weights[at + "input_layernorm.weight"])
        heads = {}
        for name, count in SIZES.items():
            if attn + f"{name}_proj.weight" in weights:
                heads[name] = (h @ weights[attn + f"{name}_proj.weight"].T).unflatten(-1, (count, DIM))
                if name != "v":
                    heads[name] = rotate(norm(heads[name], weights[attn + f"{name}_norm.weight"]), cos, sin)
        seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril().expand(KV_HEADS, -1, -1)
        if is_sparse and chooses:
            seen = blocks_seen(heads["index_q"], heads["index_k"])
        k, v, seen = (
            t.repeat_interleave(HEADS // KV_HEADS, d) for t, d in ((heads["k"], 1), (heads["v"], 1), (seen, 0))
        )
        scores = torch.einsum("thd,khd->htk", heads["q"], k) * DIM**-0.5
        out = torch.einsum("htk,khd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1)
        x = x + out @ weights[attn + "o_proj.weight"].T
        h = norm(x, weights[at + "post_attention_layernorm.weight"])
        gate, up = (h @ weights[at + f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        x = x + (gate * (1.702 * gate).sigmoid() * (up + 1)) @ weights[at + "mlp.down_proj.weight"].T
    return norm(x[-1], weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def written(weights: dict[str, torch.Tensor], prompt: list[int], count: int, chooses: bool = True) -> list[int]:
    """Return the tokens that the model writes."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(weights, tokens, chooses).argmax()))
    return tokens[len(prompt) :]


def norm_in_place(self, x: torch.Tensor, residual: torch.Tensor | None = None):
    """vLLM's norm of this model, which is FlashInfer's."""
    if residual is None:
        return norm(x, self.weight)
    total = x + residual
    return norm(total, self.weight), total


def norm_rotate_and_write(
    qkv, q_norm, k_norm, table, positions, num_heads, num_kv_heads, rotary_dim, eps, index_q_norm=None,
    index_k_norm=None, num_index_heads=0, slots=None, index_slots=None, kv_cache=None, index_cache=None, block_size=0,
    q_out=None, index_q_out=None, *rest, **others,
):  # fmt: skip
    """vLLM's operator between the projections of this model and the caches: norms, rotations and writes."""
    counts = [num_heads, num_kv_heads, num_kv_heads, *([num_index_heads, 1] if num_index_heads else [])]
    parts = qkv.unflatten(1, (-1, DIM)).split(counts, 1)
    cos, sin = table[positions].chunk(2, -1)
    for part, weight in zip(parts, (q_norm, k_norm, None, index_q_norm, index_k_norm), strict=False):
        if weight is not None:
            part.copy_(rotate(norm(part, weight), cos, sin))
    if kv_cache is None:
        return
    q_out.copy_(parts[0].flatten(1))
    index_q_out.copy_(parts[3].flatten(1))
    for cache, at, rows in (
        (kv_cache.transpose(1, 2), slots, torch.cat(parts[1:3], -1)),
        (index_cache, index_slots, parts[4][:, 0]),
    ):
        owned = at >= 0
        cache[at[owned] // block_size, at[owned] % block_size] = rows[: len(at)][owned].to(cache.dtype)


def choose_blocks(self, index_query: torch.Tensor) -> None:
    """Write the blocks that tokens see, as vLLM's indexer does with kernels of its own."""
    steps = get_forward_context().attn_metadata
    step = steps[self.index_cache.prefix]
    decodes, prefills, done = step.decode, step.prefill, step.num_decode_tokens
    parts = []
    if decodes is not None:
        each = decodes.decode_query_len
        starts = torch.arange(step.num_decodes + 1, dtype=torch.int32) * each
        parts.append((slice(0, done), each, decodes, starts))
    if prefills is not None:
        parts.append((slice(done, step.num_actual_tokens), prefills.max_query_len, prefills, prefills.cu_seqlens_q))
    for rows, most, part, starts in parts:
        batch = quire.Batch(part.block_table, part.seq_lens, starts)
        q = index_query[rows].unflatten(1, (KV_HEADS, DIM))
        bounds = {"max_query_len": most, "max_seq_len": part.max_seq_len}
        scores = quire.indexer.block_scores(q, self.index_cache.kv_cache, batch, block_size=PAGE, **bounds)
        seq = torch.arange(len(starts) - 1).repeat_interleave(starts.diff().long())
        position = part.seq_lens[seq] - starts[seq + 1] + torch.arange(len(seq))
        scores[:, torch.arange(len(seq)), (position // PAGE).long()] = torch.inf
        lists = quire.indexer.top_k(scores.flatten(0, 1), self.topk_blocks).unflatten(0, scores.shape[:2])
        self.topk_indices_buffer[rows] = lists.transpose(0, 1)


@pytest.fixture
def functions_of_a_gpu(monkeypatch):
    """Let vLLM's model run on a CPU, and know the kind of its configuration."""
    monkeypatch.setattr(vllm_model.MiniMAXGemmaRMSNorm, "forward", norm_in_place)
    monkeypatch.setattr(vllm_model.ops, "fused_minimax_m3_qknorm_rope_kv_insert", norm_rotate_and_write)
    monkeypatch.setattr(indexer.MiniMaxM3IndexerTritonImpl, "forward", choose_blocks)
    transformers.AutoConfig.register(MiniMaxM3TextConfig.model_type, MiniMaxM3TextConfig, exist_ok=True)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU vLLM has these functions, for heads of 128 in 16 bits")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 160, "enable_prefix_caching": True}], ids=str)
def test_blocks_that_an_indexer_chooses_write_the_tokens_of_attention_with_a_mask(
    options, tmp_path, monkeypatch, functions_of_a_gpu
):
    original, steps = QuireM3Impl.forward, []

    def forward(self, layer, query, *args, **others):
        steps.append(len(query))
        return original(self, layer, query, *args, **others)

    monkeypatch.setattr(QuireM3Impl, "forward", forward)
    weights = write_model(tmp_path)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (5, 390, 130, 255, 600)]
    prompts.append(prompts[1][:300] + [9, 8, 7])
    llm = engine(tmp_path, max_model_len=768, block_size=PAGE, **{"max_num_batched_tokens": 1024} | options)
    sampling = vllm.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    results = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    generated = [list(r.outputs[0].token_ids) for r in results]
    expected = [written(weights, p, NEW_TOKENS) for p in prompts]
    assert generated == expected
    assert written(weights, prompts[4], NEW_TOKENS, chooses=False) != expected[4]
    assert max(steps) > 100 and min(steps) <= len(prompts)
