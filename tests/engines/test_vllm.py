"""The plug-in in the real vLLM, on either end of the supported range.

Its classes against vLLM's abstract ones, its metadata and cache views against the oracle, and the engine end to end
against the same model in Transformers with eager attention, token for token. On a GPU the engine replays all its steps
from CUDA graphs. On a CPU it uses the platform in `vllm_cpu/`.
"""
# ruff: noqa: E402

import copy
import gc
import importlib
import inspect
import os
import pickle
import runpy
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

import tests.engines.vllm_environment  # noqa: F401

vllm = pytest.importorskip("vllm", reason="vLLM is tested by `make test-vllm`")

import cloudpickle
import transformers
import triton
from packaging.version import Version
from transformers import GenerationConfig
from vllm.config import PassConfig
from vllm.model_executor.layers.attention import attention
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backend import AttentionMetadataBuilder as base_builder
from vllm.v1.attention.backends import utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.sched.scheduler import Scheduler

import quire
from quire import reference
from quire.integrations.vllm import contract, register
from quire.testing import error_budget, make_problem, unwritten
from tests.engines import flashinfer_imports
from tests.extended import slow

register()

from quire.integrations.vllm import ahead
from quire.integrations.vllm import backend as quire_backend
from quire.integrations.vllm.backend import QuireBackend, QuireImpl, QuireMetadataBuilder
from quire.integrations.vllm.plans import one_query_each, rounded_up

NAME = contract.backend_name()
E4M3 = torch.float8_e4m3fn
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = triton.knobs.runtime.interpret


def test_vllm_finds_the_plug_in_and_takes_it_twice():
    assert [e.value for e in entry_points(group="vllm.general_plugins") if e.name == "quire"] == [
        "quire.integrations.vllm:register"
    ]
    register()
    assert AttentionBackendEnum[NAME].get_class() is QuireBackend and QuireBackend.get_name() == NAME
    assert (NAME == "QUIRE") == (Version(vllm.__version__) >= Version("0.32"))


def test_the_classes_satisfy_vllm_s_abstract_ones():
    for made in (QuireBackend, QuireImpl, QuireMetadataBuilder):
        assert not made.__abstractmethods__, f"{made.__name__} lacks {sorted(made.__abstractmethods__)}"
    assert issubclass(QuireBackend, AttentionBackend)
    assert QuireBackend.get_impl_cls() is QuireImpl and QuireBackend.get_builder_cls() is QuireMetadataBuilder
    assert QuireMetadataBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.ALWAYS
    assert all(QuireBackend.supports_block_size(size) for size in (None, 1, 8, 16, 32, 64, 128, 256, 544))
    sizes = (8, 16, 64, 72, 80, 96, 100, 128, 192, 256, 264, 512, 520)
    assert [size for size in sizes if QuireBackend.supports_head_size(size)] == [
        16, 64, 72, 80, 96, 128, 192, 256, 264, 512,
    ]  # fmt: skip


def asked(**changes) -> dict:
    """Return what vLLM asks `validate_configuration`."""
    return {
        "head_size": 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": SimpleNamespace(major=9, minor=0),
        "attn_type": AttentionType.DECODER,
        "use_non_causal": True,
        **changes,
    }


def test_what_is_served_and_what_is_refused_by_name():
    for served in (
        {},
        {"kv_cache_dtype": "fp8_e5m2"},
        *({"kv_cache_dtype": some} for some in contract.TOKEN_SCALES),
        {"kv_cache_dtype": "nvfp4"},
        {"dtype": torch.float32},
        {"kv_cache_dtype": "bfloat16"},
        {"use_batch_invariant": True},
        {"use_mm_prefix": True},
        *({"attn_type": some} for some in AttentionType),
    ):
        assert not QuireBackend.validate_configuration(**asked(**served))
    for refused, reason in (
        ({"use_mla": True}, "MLA"),
        ({"head_size": 576}, "head_size"),
        ({"kv_cache_dtype": "nvfp4", "head_size": 40}, "head_size must be a multiple of 16 for nvfp4, got 40"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype must be auto or fp8"),
        ({"device_capability": SimpleNamespace(major=7, minor=5)}, "compute capability"),
    ):
        reasons = QuireBackend.validate_configuration(**asked(**refused))
        assert any(reason in given for given in reasons), refused
    for value in (2, torch.ones(4)):
        with pytest.raises(quire.UnsupportedError, match="chunk_lookback must be left out, got"):
            QuireImpl(4, 16, 0.25, chunk_lookback=value)
    assert QuireImpl(4, 16, 0.25, chunk_lookback=-1, use_alibi_sqrt=False, something=None).spec.num_kv_heads == 4


def test_the_page_has_what_the_backends_answer():
    """The questions are vLLM's own, so a version that asks more, or other answers, need `scripts/ask_vllm.py`."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts/ask_vllm.py"))
    on_page, answers = script["read"](script["PAGE"].read_text(encoding="utf-8")), script["answers"]()
    columns = {f"{vllm.__version__}, {kind}" for kind in script["KINDS"]}
    if not columns & set(on_page["`decoder` attention"]):
        pytest.skip("the page has the versions that `make test-vllm` runs")
    mine = {name: {c: row[c] for c in columns} for name, row in on_page.items()}
    assert {name: row for name, row in mine.items() if set(row.values()) != {script["NOT_ASKED"]}} == answers


@pytest.mark.slow
def test_the_choice_reaches_processes_that_have_loaded_no_plug_in():
    """One process for all picklers: it imports vLLM, which takes seconds."""
    picklers = (pickle.dumps, cloudpickle.dumps, ForkingPickler.dumps)
    pickled = [bytes(dumps(AttentionBackendEnum[NAME])) for dumps in picklers]
    program = (
        f"import pickle\nfor pickled in {pickled!r}:\n    member = pickle.loads(pickled)\n"
        "    print(member.name, member is pickle.loads(pickle.dumps(member)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert found.stdout.split("\n")[-4:-1] == [f"{NAME} True"] * 3, found.stderr


def test_nothing_of_vllm_is_patched():
    """Quire's name in vLLM's enum has no attributes that others lack, and the others are pickled as they were."""
    other = AttentionBackendEnum.FLASH_ATTN
    assert set(vars(AttentionBackendEnum[NAME])) <= set(vars(other))
    assert pickle.loads(pickle.dumps(other)) is other and copy.deepcopy(other) is other


def test_names_that_vllm_imports_from_flashinfer_are_served_or_known():
    found, served = flashinfer_imports.imported("vllm"), set(flashinfer_imports.flashinfer.__all__)
    assert found - served <= set(flashinfer_imports.WITHOUT)
    older = {"MultiLevelCascadeAttentionWrapper"}  # up to 0.28
    assert found & served <= {*flashinfer_imports.OF_VLLM.split(), *older}
    if contract.backend_name() == "QUIRE":  # from 0.32 on
        assert found & served == set(flashinfer_imports.OF_VLLM.split())


@pytest.mark.parametrize("version", ["0.19.1", "0.34.0"])
def test_versions_outside_the_range_are_refused(version, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(quire.UnsupportedError, match=r"0\.20 to before 0\.34, got " + version):
        contract.check_version()
    monkeypatch.delitem(sys.modules, "quire.integrations.vllm.backend")
    with pytest.raises(quire.UnsupportedError):
        AttentionBackendEnum[NAME].get_class()


def test_a_backend_of_another_plug_in_stays(monkeypatch, caplog):
    if contract.takes_names():
        pytest.skip("from vLLM 0.32 on each plug-in's backend has its own name")
    monkeypatch.setattr(AttentionBackendEnum, "is_overridden", lambda self: True)
    monkeypatch.setattr(AttentionBackendEnum, "get_path", lambda self: "other.Backend")
    monkeypatch.setattr(contract.logger, "propagate", True)
    register()
    assert "VLLM_PLUGINS=quire" in caplog.text


# One layer: vLLM's metadata, cache views of both contracts, results against the oracle.

SPEC = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
BATCHES = {
    "decode": ((1, 9), (1, 40), (1, 1)),
    "mixed": ((1, 9), (7, 40), (1, 1), (20, 20)),
    "drafts": ((4, 9), (4, 40), (4, 4)),
}


class Layer(SimpleNamespace):
    """The attributes of a vLLM layer that the backend reads."""


def vllm_cache(cache: quire.PagedKVCache, kind: str) -> torch.Tensor:
    """Return the same pages as a vLLM of this `kind` keeps them, fp8 as bytes."""
    k, v = cache.k, cache.v  # NHD
    if k.dtype.itemsize == 1:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    if cache.scale_kind == "token":  # in the bytes after each head
        scales = (x.contiguous()[..., None].view(torch.uint8) for x in (cache.k_scale, cache.v_scale))
        k, v = (torch.cat(pair, -1) for pair in zip((k, v), scales, strict=True))
    if kind == "NHD":
        return torch.stack([k, v], 1)
    if kind == "HND":
        return torch.stack([k, v], 1).transpose(2, 3).contiguous().transpose(2, 3)
    rows = torch.cat([k, v], -1).transpose(1, 2)  # as from 0.21 on, heads inside
    return rows if kind == "rows" else rows.contiguous()


def step_of(problem, pad: int, width: int) -> tuple[CommonAttentionMetadata, torch.Tensor, int]:
    """Return vLLM's metadata for a problem, its padded queries, and the number of its tokens.

    There are `pad` empty sequences and tokens after the problem's, and the table is wider than needed.
    """
    num_seqs, num_tokens = len(problem.seq_lens), problem.q.shape[0]
    table = torch.zeros(num_seqs + pad, width, dtype=torch.int32, device=DEVICE)
    table[:num_seqs, : problem.batch.page_table.shape[1]] = problem.batch.page_table.clamp(min=0)
    starts = torch.nn.functional.pad(problem.batch.query_starts, (0, pad), value=num_tokens)
    seq_lens = torch.nn.functional.pad(problem.batch.seq_lens, (0, pad))
    query = torch.nn.functional.pad(problem.q, (0, 0, 0, 0, 0, pad), value=float("nan"))
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        num_reqs=num_seqs + pad,
        num_actual_tokens=num_tokens + pad,
        max_query_len=max(problem.query_lens),
        max_seq_len=max(problem.seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.full((num_tokens + pad,), -1, device=DEVICE),
    )
    return common, query, num_tokens


def make_layer(
    problem,
    kv_cache_dtype: str = "auto",
    additional: dict | None = None,
    interleave: int = 1,
    backend=QuireBackend,
    attn_type=AttentionType.DECODER,
    encoder=None,  # what the configs of the scheduler and of the model say of it
) -> tuple[Layer, QuireMetadataBuilder]:
    spec = problem.spec
    before = torch.get_default_dtype()
    torch.set_default_dtype(spec.dtype)
    try:
        impl = backend.get_impl_cls()(
            spec.num_q_heads,
            spec.head_dim,
            spec.softmax_scale,
            spec.num_kv_heads,
            None if problem.alibi_slopes is None else problem.alibi_slopes.tolist(),
            spec.sliding_window,
            kv_cache_dtype,
            spec.softcap,
            attn_type,
            None,
            **({"sinks": problem.sinks} if spec.sinks else {}),
        )
    finally:
        torch.set_default_dtype(before)
    layer = Layer(impl=impl, _k_scale=torch.tensor(1.0, device=DEVICE), _v_scale=torch.tensor(1.0, device=DEVICE))
    if problem.cache.scale_kind == "head":
        layer._k_scale, layer._v_scale = problem.cache.k_scale[0].clone(), problem.cache.v_scale[0].clone()
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        scheduler_config=SimpleNamespace(
            max_num_seqs=16, max_num_batched_tokens=64, **(vars(encoder[0]) if encoder else {})
        ),
        model_config=SimpleNamespace(max_model_len=128, hf_config=encoder[1] if encoder else None),
        additional_config=additional or {},
        parallel_config=SimpleNamespace(dcp_comm_backend="ag_rs", cp_kv_cache_interleave_size=interleave),
    )
    kv_cache_spec = SimpleNamespace(block_size=problem.cache.page_size)
    return layer, backend.get_builder_cls()(kv_cache_spec, ["layer"], config, torch.device(DEVICE))


def attend(layer: Layer, builder, problem, kv_cache: torch.Tensor, pad: int = 0, width: int = 9) -> torch.Tensor:
    common, query, num_tokens = step_of(problem, pad, width)
    output = torch.full_like(query, 7.0)
    result = layer.impl.forward(layer, query, None, None, kv_cache, builder.build(0, common), output)
    assert result is output
    return output[:num_tokens]


@pytest.mark.parametrize("kind", ["NHD", "HND", "rows"])
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_step_writes_its_tokens_and_attends_to_them(batch, dtype, kind):
    """In full graphs, slots are padded like queries; elsewhere they are not. A layer may attend to another's keys."""
    spec = replace(SPEC, kv_dtype=torch.float8_e4m3fn if dtype == "fp8" else None)
    problem = make_problem(spec, BATCHES[batch], scales="tensor", device=DEVICE)
    cache, new = unwritten(problem)
    full, pad = vllm_cache(problem.cache, kind), 3
    for is_padded in (True, False):
        layer, builder = make_layer(problem, dtype)
        kv_cache = vllm_cache(cache, kind)
        common, query, num_tokens = step_of(problem, pad, width=9)
        slots = torch.nn.functional.pad(new["slot_mapping"], (0, pad * is_padded), value=-1)
        if not is_padded:
            common = common.replace(num_reqs=len(problem.seq_lens), num_actual_tokens=num_tokens)
            common = common.replace(
                query_start_loc=common.query_start_loc[:-pad],
                seq_lens=common.seq_lens[:-pad],
                block_table_tensor=common.block_table_tensor[:-pad],
            )
        step = builder.build(0, common.replace(slot_mapping=slots))
        key, value = (torch.nn.functional.pad(new[name], (0, 0, 0, 0, 0, pad), value=float("nan")) for name in "kv")
        output = torch.full_like(query, 7.0)
        layer.impl.forward(layer, query, key, value, kv_cache, step, output)
        assert error_budget(problem, output[:num_tokens]).passed
        assert torch.equal(kv_cache.view(torch.uint8), full.view(torch.uint8))
        layer.impl.kv_sharing_target_layer_name = "another"
        before = kv_cache.clone()
        layer.impl.forward(layer, query, key * 2, value, kv_cache, step, output)
        assert torch.equal(kv_cache.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("kind", ["NHD", "HND", "rows", "rows, heads outside"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("page_size", [16, 544])
def test_a_step_in_every_cache_contract(kind, batch, page_size):
    problem = make_problem(SPEC, BATCHES[batch], page_size=page_size, device=DEVICE)
    layer, builder = make_layer(problem)
    out = attend(layer, builder, problem, vllm_cache(problem.cache, kind), pad=3)
    assert error_budget(problem, out).passed


@pytest.mark.parametrize(
    "features", [{"sliding_window": 5}, {"softcap": 3.0}, {"alibi": True}, {"sinks": True}, {"softmax_scale": 0.1}]
)
@pytest.mark.parametrize("kind", ["NHD", "rows"])
def test_features_of_a_layer(features, kind):
    problem = make_problem(replace(SPEC, **features), BATCHES["mixed"], device=DEVICE)
    layer, builder = make_layer(problem)
    assert layer.impl.spec == problem.spec
    assert error_budget(problem, attend(layer, builder, problem, vllm_cache(problem.cache, kind))).passed


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("kind", ["NHD", "rows"])
def test_fp8_caches_with_the_layer_s_scales(dtype, kind):
    spec = replace(SPEC, kv_dtype=torch.float8_e5m2 if dtype == "fp8_e5m2" else torch.float8_e4m3fn)
    problem = make_problem(spec, BATCHES["mixed"], scales="tensor", device=DEVICE)
    layer, builder = make_layer(problem, dtype)
    kv_cache = vllm_cache(problem.cache, kind)
    assert kv_cache.dtype is torch.uint8
    assert error_budget(problem, attend(layer, builder, problem, kv_cache)).passed


@pytest.mark.parametrize("kind", ["NHD", "HND", "rows", "rows, heads outside"])
@pytest.mark.parametrize("dtype", contract.TOKEN_SCALES)
@pytest.mark.parametrize("batch", BATCHES)
def test_caches_with_scales_per_token_and_head(batch, dtype, kind):
    """The scales are in the cache, after each head. Those of new tokens are computed when these are written."""
    spec = replace(SPEC, kv_dtype=contract.TOKEN_SCALES[dtype])
    problem = make_problem(spec, BATCHES[batch], scales="token", device=DEVICE)
    layer, builder = make_layer(problem, dtype)
    kv_cache = vllm_cache(problem.cache, kind)
    assert error_budget(problem, attend(layer, builder, problem, kv_cache)).passed
    _, new = unwritten(problem)
    stored, found = problem.cache, layer.impl.pages
    for ours, theirs in ((found.k_scale, stored.k_scale), (found.v_scale, stored.v_scale)):
        assert torch.equal(ours.nan_to_num(9.0), theirs.nan_to_num(9.0))
    quire.write_kv(new["k"] * 3, new["v"] / 2, stored, new["slot_mapping"])
    common, query, num_tokens = step_of(problem, pad=0, width=9)
    step = builder.build(0, common.replace(slot_mapping=new["slot_mapping"]))
    out = layer.impl.forward(layer, query, new["k"] * 3, new["v"] / 2, kv_cache, step, torch.empty_like(query))
    assert torch.equal(kv_cache.view(torch.uint8), vllm_cache(stored, kind).view(torch.uint8))
    assert error_budget(problem, out).passed


def blocked_cache(cache: quire.PagedKVCache, kind: str) -> torch.Tensor:
    """Return the same pages of nvfp4 as a vLLM of this `kind` keeps them."""
    blocks = (x.view(torch.uint8) for x in (cache.k_block_scale, cache.v_block_scale))
    parts = [x for pair in zip((cache.k, cache.v), blocks, strict=True) for x in pair]  # NHD
    by_slots = kind in ("NHD", "rows, heads outside")
    memory = torch.cat([(x if by_slots else x.transpose(1, 2)).flatten(1) for x in parts], 1)
    slots, heads = cache.k.shape[1:3]
    if kind.startswith("rows"):  # as from 0.29 on
        dense = memory.view(len(memory), *((slots, 2 * heads) if by_slots else (2 * heads, slots)), -1)
        return dense.transpose(1, 2) if by_slots else dense
    dense = memory.view(len(memory), 2, *((slots, heads) if by_slots else (heads, slots)), -1)
    return dense if by_slots else dense.transpose(2, 3)


@pytest.mark.parametrize("kind", ["NHD", "HND", "rows", "rows, heads outside"])
@pytest.mark.parametrize("batch", BATCHES)
def test_caches_with_block_scales(batch, kind):
    """A page is the numbers of its keys, their block scales, the numbers of the values, and theirs."""
    spec = replace(SPEC, head_dim=32, head_dim_v=32, kv_dtype=None, kv_format="nvfp4")
    problem = make_problem(spec, BATCHES[batch], device=DEVICE)
    for scale in (problem.cache.k_scale, problem.cache.v_scale):
        scale.fill_(scale[0])  # vLLM has one of a layer
    layer, builder = make_layer(problem, "nvfp4")
    kv_cache = blocked_cache(problem.cache, kind)
    assert error_budget(problem, attend(layer, builder, problem, kv_cache)).passed
    _, new = unwritten(problem)
    quire.write_kv(new["k"] * 3, new["v"] / 2, problem.cache, new["slot_mapping"])
    common, query, _ = step_of(problem, pad=0, width=9)
    step = builder.build(0, common.replace(slot_mapping=new["slot_mapping"]))
    out = layer.impl.forward(layer, query, new["k"] * 3, new["v"] / 2, kv_cache, step, torch.empty_like(query))
    assert torch.equal(kv_cache, blocked_cache(problem.cache, kind))
    assert error_budget(problem, out).passed


def test_pages_of_four_bits_are_dense_unless_they_are_handed_over():
    """Results are the same bits in every layout of vLLM's caches, whatever order a page's bytes have."""
    problem = make_problem(replace(SPEC, head_dim=32, head_dim_v=32), ((7, 7), (20, 20)), device=DEVICE)
    _, new = unwritten(problem)
    outs = []
    for kind in ("NHD", "HND", "rows", "rows, heads outside"):
        pages, slots, heads, _ = problem.cache.k.shape
        rows = torch.zeros(pages, slots, heads, 20, dtype=torch.uint8, device=DEVICE)  # with their scales
        for hands_over in (False, True):
            stored = vllm_cache(SimpleNamespace(k=rows, v=rows, scale_kind="none"), kind)
            layer, builder = make_layer(problem, "int4_per_token_head")
            layer.impl.hands_over = hands_over
            common, query, _ = step_of(problem, pad=0, width=9)
            step = builder.build(0, common.replace(slot_mapping=new["slot_mapping"]))
            out = layer.impl.forward(layer, query, new["k"], new["v"], stored, step, torch.empty_like(query))
            outs.append(out)
            assert (layer.impl.pages.k.stride()[1] == 16) != hands_over, (kind, hands_over)
    assert all(torch.equal(out, outs[0]) for out in outs) and outs[0].count_nonzero() > 0


def test_pages_with_gaps_are_refused_for_block_scales():
    problem = make_problem(replace(SPEC, kv_dtype=None, kv_format="nvfp4"), BATCHES["decode"], device=DEVICE)
    layer, builder = make_layer(problem, "nvfp4")
    wide = blocked_cache(problem.cache, "rows").repeat(1, 1, 2, 1)[:, :, ::2]
    with pytest.raises(quire.UnsupportedError, match="kv_cache must have dense pages for nvfp4, got strides"):
        attend(layer, builder, problem, wide)


@pytest.mark.parametrize("kind", ["NHD", "HND", "rows"])
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_the_write_skips_padding(kind, dtype):
    spec = replace(SPEC, kv_dtype=torch.float8_e4m3fn if dtype == "fp8" else None)
    problem = make_problem(spec, BATCHES["decode"], scales="tensor", device=DEVICE)
    layer, builder = make_layer(problem, dtype)
    kv_cache = torch.zeros_like(vllm_cache(problem.cache, kind))
    common, query, _ = step_of(problem, pad=2, width=9)
    fused = torch.randn(5, 3, 2, 16, device=DEVICE)  # keys and values as strided views of one projection
    slots = torch.tensor([33, -1, 5, -1, -1], device=DEVICE)
    step = builder.build(0, common.replace(slot_mapping=slots))
    layer.impl.forward(layer, query, fused[:, 1], fused[:, 2], kv_cache, step, torch.empty_like(query))
    pages = layer.impl.pages
    at = (lambda t: t.float()) if pages.layout == "NHD" else (lambda t: t.float().transpose(1, 2))
    for stored, new, scale in ((pages.k, fused[:, 1], layer._k_scale), (pages.v, fused[:, 2], layer._v_scale)):
        flat = at(stored).flatten(0, 1)
        kept = (new / scale).to(stored.dtype).float() if dtype == "fp8" else new
        assert torch.equal(flat[slots[slots >= 0]], kept[slots >= 0])
        assert flat.count_nonzero() == kept[slots >= 0].count_nonzero()


def test_the_log_says_once_which_layers_have_quire(monkeypatch, caplog):
    """A model may bring its own attention, and never ask for a backend: then there is no such line."""
    monkeypatch.setattr(contract.logger, "propagate", True)
    problem = make_problem(replace(SPEC, softmax_scale=0.123), BATCHES["decode"], device=DEVICE)
    with caplog.at_level("INFO", contract.logger.name), caplog.at_level("DEBUG", "quire.start"):
        for _ in range(2):
            make_layer(problem)
    assert caplog.messages == [
        "Quire attends in 1 layer: 4/2 heads of 16, a cache in float32",
        "vLLM chose Quire for 1 layer: 4/2 heads of 16, a cache in float32",
    ]


def test_plans_are_made_once_for_all_layers_and_kept_over_steps(monkeypatch):
    problem = make_problem(SPEC, BATCHES["decode"], device=DEVICE)
    layer, builder = make_layer(problem)
    common, query, _ = step_of(problem, pad=0, width=9)
    bounds, plan = [], quire.plan
    monkeypatch.setattr(quire, "plan", lambda *nouns, **options: (bounds.append(options), plan(*nouns, **options))[1])

    def planned(**changes):
        return builder.build(0, common.replace(**changes)).plan(layer.impl.spec, query.shape[0], 16)

    first = planned()
    assert first.batch.cu_seqlens_q is None
    assert (bounds[0]["max_seq_len"], bounds[0]["max_query_len"]) == (64, 1)
    common.seq_lens += 1  # as between the replays of a graph: the same memory
    assert planned(max_seq_len=41) is first
    planned(max_seq_len=65)
    planned(max_seq_len=1000)
    assert [made["max_seq_len"] for made in bounds] == [64, 128, 9 * 16]  # at most the table's width
    other = builder.update_block_table(builder.build(0, common), common.block_table_tensor.clone(), common.slot_mapping)
    assert other.plan(layer.impl.spec, query.shape[0], 16).batch.page_table is other.block_table
    padded = builder.build(0, common.replace(num_actual_tokens=5)).plan(layer.impl.spec, 5, 16)
    assert padded.batch.cu_seqlens_q is not None  # more tokens than sequences: vLLM's cumulative counts are needed


def test_steps_with_chunks_of_prompts_have_plans_in_common(monkeypatch):
    problem = make_problem(SPEC, BATCHES["decode"], device=DEVICE)
    layer, builder = make_layer(problem)
    common, *_ = step_of(problem, pad=0, width=9)
    bounds, plan = [], quire.plan
    monkeypatch.setattr(quire, "plan", lambda *nouns, **options: (bounds.append(options), plan(*nouns, **options))[1])
    for num_tokens, most in ((37, 33), (40, 36), (41, 33), (63, 60)):
        step = common.replace(max_query_len=most, num_actual_tokens=num_tokens)
        builder.build(0, step).plan(layer.impl.spec, num_tokens, 16)
    assert [(made["num_tokens"], made["max_query_len"]) for made in bounds] == [(40, 40), (48, 40), (64, 64)]
    assert all(n <= rounded_up(n, 100) <= min(100, n + n // 4) for n in range(101))


@pytest.mark.parametrize(
    "change",
    [
        "none",
        "additional_config",
        "cudagraph_mode",
        "decode_context_parallel_size",
        "is_mm_prefix_lm",
        "attn_type",
        "kv_sharing_target_layer_name",
        "kv_cache_dtype",
        "fp8",
    ],
)
def test_a_warm_up_begins_when_a_layer_is_made(change, monkeypatch):
    problem = make_problem(SPEC, BATCHES["decode"], device=DEVICE)
    layer, builder = make_layer(problem, "fp8" if change == "fp8" else "auto")
    impl, graphs = layer.impl, SimpleNamespace(has_full_cudagraphs=lambda: change != "cudagraph_mode")
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16),
        compilation_config=SimpleNamespace(cudagraph_mode=graphs),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1 + (change == "decode_context_parallel_size")),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=64),
        model_config=SimpleNamespace(max_model_len=128, is_mm_prefix_lm=change == "is_mm_prefix_lm"),
        additional_config={"quire_warmup": change != "additional_config"},
    )
    changed = {
        "attn_type": {"spec": replace(SPEC, causal=False)},
        "kv_sharing_target_layer_name": {"kv_sharing_target_layer_name": "another"},
        "kv_cache_dtype": {"kv_cache_dtype": "int8_per_token_head"},
    }
    for name, value in changed.get(change, {}).items():
        setattr(impl, name, value)
    begun = []
    monkeypatch.setattr(contract, "current_config", lambda: config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        contract, "expected_cache", lambda *sizes: torch.empty(2, 2, 16, *sizes[2:4], dtype=sizes[4], device="meta")
    )
    monkeypatch.setattr(quire, "begin_warmup", lambda *args, **options: begun.append((args, options)))
    torch.set_default_dtype(torch.bfloat16)  # in which vLLM makes a model's layers
    try:
        ahead.begin(impl, impl.kv_dtype in (E4M3,))
    finally:
        torch.set_default_dtype(torch.float32)
    if change not in ("none", "fp8"):
        assert not begun
        return
    [((spec, pages), options)] = begun
    assert (spec, options) == (impl.spec, builder.bounds | {"append": True, "device": torch.device("cuda", 0)})
    assert pages.dtype is impl.kv_dtype and pages.scale_kind == ("head" if change == "fp8" else "none")


@pytest.mark.parametrize(
    ("additional", "quantises"), [({}, False), ({}, True), ({"quire_warmup": False}, False)], ids=str
)
def test_kernels_are_compiled_before_the_first_capture(additional, quantises, monkeypatch):
    problem = make_problem(SPEC, BATCHES["decode"], device=DEVICE)
    layer, builder = make_layer(problem, additional=additional)
    layer.impl.quantises = quantises
    layer.kv_cache = vllm_cache(problem.cache, "NHD")
    before, warmed, original = layer.kv_cache.clone(), [], quire.warmup

    def warmup(spec, pages, **bounds):
        warmed.append((spec, pages, bounds))
        return original(spec, pages, **bounds)

    monkeypatch.setattr(quire, "warmup", warmup)
    common, query, _ = step_of(problem, pad=0, width=9)
    for _ in range(2):
        metadata = builder.build_for_cudagraph_capture(common)
    if additional:
        assert not warmed
    else:
        options = {"append": True, "out_scale": quantises}
        assert warmed == [(layer.impl.spec, layer.impl.pages, builder.bounds | options)]
        assert torch.equal(layer.kv_cache.nan_to_num(9.0), before.nan_to_num(9.0))
    out = layer.impl.forward(layer, query, None, None, layer.kv_cache, metadata, torch.empty_like(query))
    assert error_budget(problem, out).passed


@pytest.mark.parametrize("window", [None, 1, 5])
def test_steps_that_are_not_causal(window):
    """A window reaches as far ahead as back, as FlashAttention has it."""
    ahead = None if window is None else window - 1
    spec = replace(SPEC, causal=False, sliding_window=window, sliding_window_right=ahead)
    problem = make_problem(spec, BATCHES["mixed"], device=DEVICE)
    layer, builder = make_layer(problem)
    assert layer.impl.spec.causal and layer.impl.spec.sliding_window == window
    common, query, _ = step_of(problem, pad=0, width=9)
    kv_cache, step = vllm_cache(problem.cache, "NHD"), builder.build(0, common.replace(causal=False))
    out = layer.impl.forward(layer, query, None, None, kv_cache, step, torch.empty_like(query))
    assert error_budget(problem, out).passed


def test_a_model_with_steps_that_are_not_causal_has_the_memory_and_the_kernels_of_both(monkeypatch):
    problem = make_problem(replace(SPEC, sliding_window=5), BATCHES["decode"], device=DEVICE)
    sized, warmed, size = [], [], quire.workspace_size
    monkeypatch.setattr(quire, "workspace_size", lambda spec, **more: sized.append(spec) or size(spec, **more))
    monkeypatch.setattr(quire, "warmup", lambda spec, pages, **more: warmed.append(spec) or [])
    layer, _ = make_layer(problem)
    assert sized == [layer.impl.spec]
    monkeypatch.setattr(contract, "has_bidirectional_steps", lambda config: True)
    layer, builder = make_layer(problem)
    both = [layer.impl.spec, replace(SPEC, causal=False, sliding_window=5, sliding_window_right=4)]
    layer.kv_cache = vllm_cache(problem.cache, "NHD")
    builder.build_for_cudagraph_capture(step_of(problem, pad=0, width=9)[0])
    assert sized[1:] == warmed == both


def test_which_models_have_steps_that_are_not_causal():
    """vLLM's own setting, and before there was one, the method of drafting."""
    config = vllm.config.AttentionConfig()
    for named in (False, True):
        found = SimpleNamespace(attention_config=config, speculative_config=SimpleNamespace(method="dflash"))
        if not hasattr(config, "use_non_causal"):
            found.speculative_config.method = "dflash" if named else "eagle"
        else:
            config.use_non_causal = named
        assert contract.has_bidirectional_steps(found) is named


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["NHD", "rows"])
def test_a_draft_of_a_block_attends_to_a_context_that_was_written_before(kind, window):
    """Drafters of whole blocks write the target's context by `do_kv_cache_update`, and their own tokens by `forward`.

    The context may come before anything else, while there is no cache, and with fewer slots than tokens.
    """
    ahead = None if window is None else window - 1
    spec = replace(SPEC, causal=False, sliding_window=window, sliding_window_right=ahead)
    problem = make_problem(spec, BATCHES["drafts"], device=DEVICE)
    _, block = unwritten(problem)
    layer, builder = make_layer(problem)
    common, query, _ = step_of(problem, pad=0, width=9)
    kv_cache = torch.zeros_like(vllm_cache(problem.cache, kind))
    table = problem.batch.page_table
    slots = torch.tensor(
        [
            int(table[seq, at // 16]) * 16 + at % 16
            for seq, (queries, keys) in enumerate(BATCHES["drafts"])
            for at in range(keys - queries)
        ],
        device=DEVICE,
    )
    key, value = (x.flatten(0, 1)[slots] for x in (problem.cache.k, problem.cache.v))
    padded = [torch.cat([x, torch.full_like(x[:2], float("nan"))]) for x in (key, value)]
    layer.impl.do_kv_cache_update(layer, *padded, torch.tensor([]), slots)
    assert layer.impl.bound is None
    layer.impl.do_kv_cache_update(layer, *padded, kv_cache, slots)
    step = builder.build(0, common.replace(slot_mapping=block["slot_mapping"], causal=False))
    out = layer.impl.forward(layer, query, block["k"], block["v"], kv_cache, step, torch.empty_like(query))
    assert error_budget(problem, out).passed


@pytest.mark.parametrize("batch", ["decode", "drafts"])
def test_drafts_in_one_graph_take_one_plan(batch):
    """vLLM advances the tensors of a step between drafts, and builds no metadata. Its bound is that of the last one."""
    last = make_problem(SPEC, BATCHES[batch], device=DEVICE)
    layer, builder = make_layer(last)
    common, query, _ = step_of(last, pad=1, width=9)
    assert builder.supports_draft_decode_metadata_update
    kv_cache, lens = vllm_cache(last.cache, "rows"), common.seq_lens.clone()
    common.seq_lens.sub_(1).clamp_(min=0)
    step = builder.build(0, common.replace(max_seq_len=128))
    output = torch.empty_like(query)
    layer.impl.forward(layer, query, None, None, kv_cache, step, output)
    common.seq_lens.copy_(lens)
    with mock.patch.object(quire.Plan, "update", autospec=True) as update:
        builder.update_draft_decode_metadata(step)
    assert [call.args[0] for call in update.call_args_list] == list(step.plans.values())
    layer.impl.forward(layer, query, None, None, kv_cache, step, output)
    assert error_budget(last, output[: len(last.q)]).passed and len(step.plans) == 1


def test_a_plan_of_an_earlier_step_is_told_of_other_lengths():
    """A kernel of vLLM's may write them, which PyTorch does not count."""
    problem = make_problem(SPEC, BATCHES["decode"], device=DEVICE)
    layer, builder = make_layer(problem)
    common, query, _ = step_of(problem, pad=1, width=9)
    kv_cache, plans = vllm_cache(problem.cache, "rows"), []
    with mock.patch.object(quire.Plan, "update", autospec=True) as update:
        for _ in range(2):
            step = builder.build(0, common)
            layer.impl.forward(layer, query, None, None, kv_cache, step, torch.empty_like(query))
            plans += step.plans.values()
    assert plans[0] is plans[1] and [call.args[0] for call in update.call_args_list] == [plans[0]]


@pytest.mark.parametrize(
    ("lens", "num_tokens", "each"),
    [
        ((1, 1, 1), 3, True),
        ((1, 1, 0), 3, True),  # padding
        ((0, 0, 0), 3, True),  # a capture counts tokens only
        ((1, 0, 1), 3, False),
        ((0, 1, 1), 3, False),
        ((1, 1, 0), 2, False),
        ((1, 2, 0), 3, False),
    ],
)
def test_token_i_is_the_only_query_of_sequence_i_only_if_padding_comes_last(lens, num_tokens, each):
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0)
    assert one_query_each(starts, max(1, *lens), num_tokens) is each


def test_a_sequence_without_a_query_may_lie_between_others_beside_padding():
    """As many tokens as sequences, at most one query each: but the last token is padding, and no sequence's."""
    problem = make_problem(SPEC, ((1, 9), (0, 12), (1, 40)), device=DEVICE)
    layer, builder = make_layer(problem)
    common, query, num_tokens = step_of(problem, pad=1, width=9)
    common = common.replace(
        num_reqs=3,
        query_start_loc=common.query_start_loc[:4],
        query_start_loc_cpu=common.query_start_loc_cpu[:4],
        seq_lens=common.seq_lens[:3],
        block_table_tensor=common.block_table_tensor[:3],
    )
    assert (common.max_query_len, common.num_actual_tokens, common.num_reqs) == (1, 3, 3)
    step, kv_cache = builder.build(0, common), vllm_cache(problem.cache, "NHD")
    out = layer.impl.forward(layer, query, None, None, kv_cache, step, torch.empty_like(query))
    assert error_budget(problem, out[:num_tokens]).passed


def test_memory_is_profiled_without_metadata():
    """With the dtypes of outputs that the layer will have, so that what quantises them is warmed up too."""
    problem = make_problem(SPEC, BATCHES["decode"], device=DEVICE)
    layer, _ = make_layer(problem)
    for dtype, scale in ((SPEC.dtype, None), (E4M3, torch.ones(1, device=DEVICE))):
        assert layer.impl.quantises is False
        output = torch.full_like(problem.q, 7.0).to(dtype)
        out = layer.impl.forward(layer, problem.q, None, None, torch.tensor([]), None, output, output_scale=scale)
        assert out is output and out.float().count_nonzero() == 0
    assert layer.impl.quantises


def test_which_outputs_are_quantised():
    """One static scale for a tensor of e4m3, and nothing else; nothing where ranks share contexts."""
    layer, _ = make_layer(make_problem(SPEC, BATCHES["decode"], device=DEVICE))
    keys = {name: key for name, key in vars(quant_utils).items() if isinstance(key, quant_utils.QuantKey)}
    assert {"kFp8StaticTensorSym", "kFp8StaticTokenSym", "kFp8Dynamic128Sym", "kNvfp4Dynamic"} <= set(keys)
    served = [name for name, key in keys.items() if layer.impl.fused_output_quant_supported(key)]
    assert served == ["kFp8StaticTensorSym"]
    other = replace(quant_utils.kFp8StaticTensorSym, dtype=torch.float8_e4m3fnuz)  # of some of AMD's GPUs
    assert not layer.impl.fused_output_quant_supported(other)
    layer.impl.dcp_world_size = 2
    assert not layer.impl.fused_output_quant_supported(quant_utils.kFp8StaticTensorSym)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("batch", BATCHES)
def test_an_output_is_quantised_as_it_is_written(batch, shape):
    """vLLM's operators multiply by 1 / scale, which is rounded. A step that writes its tokens gives the same bits."""
    problem = make_problem(SPEC, BATCHES[batch], device=DEVICE)
    problem = replace(problem, out_scale=torch.full(shape, 0.01, device=DEVICE))
    cache, new = unwritten(problem)
    layer, builder = make_layer(problem)
    common, query, num_tokens = step_of(problem, pad=3, width=9)
    slots = torch.nn.functional.pad(new["slot_mapping"], (0, 3), value=-1)
    step = builder.build(0, common.replace(slot_mapping=slots))
    key, value = (torch.nn.functional.pad(new[name], (0, 0, 0, 0, 0, 3), value=float("nan")) for name in "kv")
    stored = []
    for tokens, pages in (((key, value), cache), ((None, None), problem.cache)):
        output = torch.full_like(query, 7.0).to(E4M3)
        scale = problem.out_scale
        layer.impl.forward(layer, query, *tokens, vllm_cache(pages, "rows"), step, output, output_scale=scale)
        assert error_budget(problem, output[:num_tokens]).passed
        stored.append(output[:num_tokens].view(torch.uint8))
    assert torch.equal(*stored)
    plain = torch.empty_like(query)
    layer.impl.forward(layer, query, None, None, vllm_cache(problem.cache, "rows"), step, plain)
    theirs = (plain[:num_tokens] * problem.out_scale.reciprocal()).clamp(-448, 448).to(E4M3)
    assert (theirs.float() == stored[0].view(E4M3).float()).float().mean() > 0.999


def test_an_output_of_an_encoder_is_quantised():
    spec = replace(SPEC, causal=False)
    problem = make_problem(spec, ((9, 9), (20, 20)), device=DEVICE)
    layer, builder = make_layer(problem, attn_type=AttentionType.ENCODER_ONLY)
    common, query, _ = step_of(problem, pad=0, width=9)
    step = builder.build(0, common.replace(causal=False))
    key, value = torch.randn(2, len(query), spec.num_kv_heads, spec.head_dim, device=DEVICE)
    scale, none = torch.tensor(0.01, device=DEVICE), torch.tensor([])
    plain = layer.impl.forward(layer, query, key, value, none, step, torch.empty_like(query))
    output = torch.empty_like(query).to(E4M3)
    layer.impl.forward(layer, query, key, value, none, step, output, output_scale=scale)
    assert torch.equal(output.view(torch.uint8), reference.quantise(plain, scale).view(torch.uint8))


def test_scales_of_blocks_are_refused_by_name():
    problem = make_problem(SPEC, BATCHES["decode"], device=DEVICE)
    layer, _ = make_layer(problem)
    scales = {"output_scale": torch.ones(1), "output_block_scale": torch.ones(3, 1)}
    with pytest.raises(quire.UnsupportedError, match="output_block_scale must be None, got one"):
        layer.impl.forward(layer, problem.q, None, None, torch.tensor([]), None, problem.q, **scales)


def test_vllm_has_no_hook_for_rotary_embeddings_but_on_rocm():
    """So Quire has none. The pass that would call it is switched off."""
    assert not PassConfig(fuse_rope_kvcache=True).fuse_rope_kvcache


# The engine end to end.


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Make vLLM inspect a model's class in this process: another one takes 8 s to start."""
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda function: function())


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
    eos_token_id=2,
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
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**HYBRID, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 9}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_head": 4, "n_layer": 2}),
    "deepseek-v2-lite": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**LATENT, "q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
}
NEW_TOKENS = 6 if INTERPRETED else 40


def make_model(
    name: str, folder: Path, sizes: dict | None = None, std: float = 0.2, dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    config, model, extra = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model)(getattr(transformers, config)(**SMALL | extra | (sizes or {}))).eval()
    for parameter in model.parameters():  # enough spread that rounding does not choose the next token
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    model.to(dtype).save_pretrained(folder)
    model.set_attn_implementation("eager")
    return model.to(DEVICE)


def prompts() -> list[list[int]]:
    """Return prompts of unequal lengths, two of which begin alike."""
    generator = torch.Generator().manual_seed(1)
    unequal = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (5, 40, 1, 70, 33, 64, 17)]
    return [*unequal, unequal[3][:50] + [9, 8, 7]]


def greedy(model, prompt: list[int]) -> list[int]:
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=-1)
    return model.generate(torch.tensor([prompt], device=DEVICE), generation_config=config)[0, len(prompt) :].tolist()


def engine(folder: Path, **options) -> "vllm.LLM":
    """Start vLLM with Quire, unless the options say otherwise."""
    gc.collect()  # the last engine
    graphs = {} if DEVICE == "cpu" else {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    defaults = dict(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        attention_backend=NAME,
        max_model_len=128,
        block_size=16,
        max_num_seqs=8,
        enforce_eager=DEVICE == "cpu",
        compilation_config={"mode": 0, "custom_ops": ["none"], **graphs},
        num_gpu_blocks_override=64,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.1,
    )
    return vllm.LLM(**defaults | options)


def prepare_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM start workers. On a CPU they are forked, and must not inherit the one rank of earlier engines."""
    gc.collect()  # the last engine
    vllm.distributed.destroy_model_parallel()
    vllm.distributed.destroy_distributed_environment()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # new processes need the platform in `vllm_cpu/`
    # 0.20 needs a core for each process; the variable was read at import
    monkeypatch.setattr("vllm.envs.VLLM_CPU_OMP_THREADS_BIND", "0|1")


def serve(folder: Path, rounds: int = 1, **options) -> tuple[list[list[list[int]]], int]:
    """Return what vLLM generates with Quire in each round, and how many prompt tokens the last round found cached."""
    llm = engine(folder, **options)
    sampling = vllm.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    generated = []
    for _ in range(rounds):
        results = llm.generate([{"prompt_token_ids": p} for p in prompts()], sampling, use_tqdm=False)
        generated.append([list(r.outputs[0].token_ids) for r in results])
    if "distributed_executor_backend" in options:
        llm.llm_engine.engine_core.shutdown()  # else 0.20's workers last until the tests end
    return generated, sum(r.num_cached_tokens or 0 for r in results)


def quantised(module, query, key, value, attention_mask, scaling, **others):
    """Transformers' eager attention to keys and values rounded to int8, with a scale for each token and head."""
    keys, values = (
        (x / scale).round().clamp(-127, 127) * scale
        for x in (key, value)
        for scale in [x.abs().amax(-1, keepdim=True) / 127]
    )
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = query @ keys.transpose(2, 3) * scaling
    out_of_sight = torch.ones_like(scores, dtype=torch.bool).triu(scores.shape[3] - scores.shape[2] + 1)
    return (scores.masked_fill(out_of_sight, float("-inf")).softmax(-1) @ values).transpose(1, 2), None


@pytest.mark.skipif(
    not hasattr(base_builder, "use_cascade_attention"), reason="this vLLM asks no backend about shared prefixes"
)
@pytest.mark.parametrize("pays", [True, False])
def test_requests_with_one_beginning_read_it_once_where_that_pays(pays, tmp_path, monkeypatch):
    """vLLM asks its older model runner's backend, on GPUs alone: here the runner for CPUs asks as well."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    if DEVICE == "cpu":
        runner = importlib.import_module("vllm.v1.worker.cpu_model_runner").CPUModelRunner
        monkeypatch.setattr(
            runner, "cascade_attn_enabled", property(lambda self: True, lambda self, value: None), False
        )
        monkeypatch.setattr(runner, "num_sms", 1, False)
        monkeypatch.setattr(contract, "asks_about_prefixes", lambda config: True)  # vLLM's platform switched it off
    asked, shared = [], []
    monkeypatch.setattr(quire_backend, "shares", lambda *step: asked.append(step[1:5]) or pays)
    plan_for = QuireMetadataBuilder.plan_for

    def planned(self, *args, num_shared, **bounds):
        plan = plan_for(self, *args, num_shared=num_shared, **bounds)
        shared.append((num_shared, plan.saved_keys))
        return plan

    monkeypatch.setattr(QuireMetadataBuilder, "plan_for", planned)
    model = make_model("llama", tmp_path)
    begin = prompts()[3][:48]
    alike = [begin + p for p in prompts()]
    room = {"max_model_len": 192, "num_gpu_blocks_override": 128}
    llm = engine(tmp_path, enable_prefix_caching=True, disable_cascade_attn=False, **room)
    sampling = vllm.SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    for _ in range(2):  # the second time, prompts have a past
        results = llm.generate([{"prompt_token_ids": p} for p in alike], sampling, use_tqdm=False)
        assert [list(r.outputs[0].token_ids) for r in results] == [greedy(model, p) for p in alike]
    assert (len(alike), len(alike), 1, 48) in asked and any(tokens > len(alike) for _, tokens, _, _ in asked)
    assert {num for num, _ in shared} == ({0, 48} if pays else {0})
    assert all(saved % 48 == 0 and bool(saved) == bool(num) for num, saved in shared)


@pytest.mark.slow
def test_int8_with_scales_per_token_writes_the_tokens_of_attention_to_rounded_keys(tmp_path):
    model = make_model("llama", tmp_path)
    exact = [greedy(model, p) for p in prompts()]
    transformers.AttentionInterface.register("quantised", quantised)
    model.set_attn_implementation("quantised")
    expected = [greedy(model, p) for p in prompts()]
    generated, _ = serve(tmp_path, max_num_batched_tokens=32, kv_cache_dtype="int8_per_token_head")
    assert generated == [expected] and expected != exact


@pytest.mark.slow
def test_nvfp4_writes_the_tokens_of_attention_to_keys_in_four_bits(tmp_path):
    model = make_model("llama", tmp_path)
    exact = [greedy(model, p) for p in prompts()]
    transformers.AttentionInterface.register("in_e2m1", in_e2m1)
    model.set_attn_implementation("in_e2m1")
    expected = [greedy(model, p) for p in prompts()]
    generated, _ = serve(tmp_path, max_num_batched_tokens=32, kv_cache_dtype="nvfp4")
    assert generated == [expected] and expected != exact


def in_e2m1(module, query, key, value, attention_mask, scaling, **others):
    """Transformers' eager attention to keys and values in e2m1, with a scale in e4m3 of 16 columns each."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    even = torch.arange(8) % 2 == 0  # of two numbers as near, the one whose last bit is 0

    def stored(x):
        groups = x.float().unflatten(-1, (-1, 16))
        scale = (groups.abs().amax(-1, keepdim=True) / 6).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float()
        away = ((groups / scale).abs().clamp(max=6)[..., None] - grid).abs()
        near = away == away.amin(-1, keepdim=True)
        nearest = (near * (1 + even)).argmax(-1)
        return (grid[nearest] * groups.sign() * scale).flatten(-2)

    groups = query.shape[1] // key.shape[1]
    keys, values = (stored(x).repeat_interleave(groups, 1) for x in (key, value))
    scores = query.float() @ keys.transpose(2, 3) * scaling
    out_of_sight = torch.ones_like(scores, dtype=torch.bool).triu(scores.shape[3] - scores.shape[2] + 1)
    out = scores.masked_fill(out_of_sight, float("-inf")).softmax(-1) @ values
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def in_four_bits(module, query, key, value, attention_mask, scaling, **others):
    """Transformers' eager attention to keys and values that vLLM's rotation turns, in four bits with a zero point."""
    turn = contract.rotation(query.shape[3], query)

    def stored(x):
        x = (x.float() @ turn.float()).to(x.dtype).float()
        low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        scale = (((high - low) / 15).view(torch.int32) & ~15).view(torch.float32)
        zero = (-low / scale).round()
        return (((x / scale).round() + zero).clamp(0, 15) - zero) * scale

    keys, values = stored(key), stored(value)
    norm = query.shape[3] & -query.shape[3]
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = (query @ (turn / norm)).float() @ keys.transpose(2, 3) * scaling
    out_of_sight = torch.ones_like(scores, dtype=torch.bool).triu(scores.shape[3] - scores.shape[2] + 1)
    out = scores.masked_fill(out_of_sight, float("-inf")).softmax(-1) @ values
    return (out.to(query.dtype) @ (turn.T / norm)).transpose(1, 2).contiguous(), None


@pytest.mark.slow
def test_int4_writes_the_tokens_of_attention_to_rotated_keys_in_four_bits(tmp_path):
    pytest.importorskip("vllm.v1.attention.ops.int4_per_token_head", reason="this vLLM has no such cache")
    model = make_model("llama", tmp_path)
    exact = [greedy(model, p) for p in prompts()]
    transformers.AttentionInterface.register("in_four_bits", in_four_bits)
    model.set_attn_implementation("in_four_bits")
    expected = [greedy(model, p) for p in prompts()]
    generated, _ = serve(tmp_path, max_num_batched_tokens=32, kv_cache_dtype="int4_per_token_head")
    assert generated == [expected] and expected != exact


@pytest.mark.parametrize("width", [64, 96])
def test_the_rotation_is_that_of_vllm(width):
    own = pytest.importorskip("vllm.v1.attention.ops.int4_per_token_head")
    x = torch.randn(3, width)
    if width & (width - 1) and not hasattr(own, "largest_power_of_2_divisor"):  # vLLM 0.26 rotates powers of two alone
        with pytest.raises(AssertionError, match="power-of-2"):
            own.single_rht(x)
        return
    assert torch.allclose(x @ contract.rotation(width, x), own.single_rht(x), atol=1e-5)
    norm = width & -width
    assert torch.allclose(x @ contract.rotation(width, x).T / norm, own.single_rht(x, inverse=True) / norm, atol=1e-5)


def test_chunks_of_prefill_and_cached_prefixes_write_the_tokens_of_eager_attention(tmp_path):
    model = make_model("llama", tmp_path)
    expected = [greedy(model, p) for p in prompts()]
    generated, cached = serve(tmp_path, rounds=2, max_num_batched_tokens=32, enable_prefix_caching=True)
    assert generated == [expected, expected]
    assert cached >= 2 * 64  # tokens that were not computed again


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head_dim"), [("llama", 72), ("gemma2", 256), ("llama", 512)])
def test_heads_of_any_width_write_the_tokens_of_eager_attention(name, head_dim, tmp_path):
    """Full and sliding layers; 72 is no power of two."""
    sizes = {"head_dim": head_dim} | ({"query_pre_attn_scalar": head_dim} if name != "llama" else {})
    model = make_model(name, tmp_path, sizes)
    generated, _ = serve(tmp_path, max_num_batched_tokens=64)
    assert generated == [[greedy(model, p) for p in prompts()]]


@pytest.mark.slow
def test_preempted_sequences_write_the_tokens_of_eager_attention(tmp_path, monkeypatch):
    if INTERPRETED:
        pytest.skip("outputs are too short in the interpreter for a sequence to be preempted")
    preempted, original = [], Scheduler._preempt_request

    def preempt(*args, **options):
        preempted.append(args[1])
        return original(*args, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    model = make_model("llama", tmp_path)
    # too few pages for eight sequences that need 3 to 7 each in the end
    generated, _ = serve(tmp_path, max_num_batched_tokens=32, num_gpu_blocks_override=10)
    assert generated == [[greedy(model, p) for p in prompts()]]
    assert preempted


def page_size_of(name: str, page_size: int) -> int:
    """Return the size of a model's pages: some versions choose that of windows, where a model has nothing else."""
    chosen = getattr(attention, "_largest_kernel_block_within", None)
    by_backend = chosen is not None and "kv_cache_spec" not in inspect.signature(chosen).parameters
    return 16 if by_backend and name == "mistral" else page_size


@pytest.mark.parametrize(
    ("name", "page_size", "layout"), [slow("mistral", 48, "NHD"), ("gemma2", 16, "HND"), slow("bloom", 544, "HND")]
)
def test_windows_softcap_alibi_pages_and_layouts_write_the_tokens_of_eager_attention(
    name, page_size, layout, tmp_path, monkeypatch
):
    if hasattr(utils, "set_kv_cache_layout"):  # up to 0.28
        utils.set_kv_cache_layout(layout)
    elif name == "gemma2":
        layout = "BHLNC"  # all layers' keys of a page and a head together
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    pages, bind = [], QuireImpl.bind
    monkeypatch.setattr(QuireImpl, "bind", lambda *args: (pages.append(bind(*args)), pages[-1])[1])
    expected = []

    def expect(impl, quantised):
        assert contract.current_config().cache_config.block_size == page_size
        expected.append(ahead.expected_pages(impl, page_size, quantised))

    monkeypatch.setattr(ahead, "begin", expect)
    model = make_model(name, tmp_path)
    generated, _ = serve(tmp_path, max_num_batched_tokens=64, block_size=page_size)
    assert generated == [[greedy(model, p) for p in prompts()]]
    assert pages and all(p.page_size == page_size_of(name, page_size) for p in pages)
    assert all((p.strides[0].slot < p.strides[0].head) == (layout != "NHD") for p in pages)
    found = {(p.layout, p.strides, p.page_size) for p in expected}
    as_expected = (layout == "NHD" or NAME == "CUSTOM") and page_size_of(name, page_size) == page_size
    assert (found == {(p.layout, p.strides, p.page_size) for p in pages}) == as_expected
    assert all(p.k.untyped_storage().nbytes() >= 1 << 31 for p in expected)


def assert_begins_what_it_warms_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start an engine as on a GPU that captures graphs, as far as what Quire compiles, and compare both warm-ups."""
    events, warmed, builders, build = [], [], [], QuireMetadataBuilder.build
    load = DefaultModelLoader.load_weights
    on_a_gpu = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0)
    monkeypatch.setattr(ahead, "torch", SimpleNamespace(cuda=on_a_gpu, device=torch.device))
    monkeypatch.setattr(ahead, "captures_steps", lambda config: True)
    monkeypatch.setattr(DefaultModelLoader, "load_weights", lambda *args: events.append("weights") or load(*args))
    monkeypatch.setattr(quire, "begin_warmup", lambda *nouns, **more: events.append((nouns, more)))
    monkeypatch.setattr(quire, "warmup", lambda *nouns, **more: warmed.append((nouns, more)) or [])
    monkeypatch.setattr(
        QuireMetadataBuilder, "build", lambda self, *args, **more: builders.append(self) or build(self, *args, **more)
    )
    make_model("mistral", folder)
    llm = engine(folder, max_num_batched_tokens=32, max_num_seqs=3)
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
    builders[0].compile_ahead(lambda layer: layer.impl.bind(layer, layer.kv_cache))

    def compiled(nouns, options):
        spec, pages = nouns
        known = {name: options.get(name, False) for name in (*builders[0].bounds, "append", "out_scale")}
        return spec, pages.layout, pages.strides, pages.page_size, pages.dtype, known

    *begun, last = events
    assert last == "weights" and begun and warmed
    assert all(more["device"] == torch.device("cuda", 0) for _, more in begun)
    assert [compiled(*call) for call in warmed] == [compiled(*begun[0])]
    assert {compiled(*call)[:3] for call in begun} == {compiled(*begun[0])[:3]}  # layers alike begin it once
    bounds = {"max_num_seqs": 3, "max_num_tokens": 32, "max_seq_len": 128}
    assert bounds.items() <= warmed[0][1].items() and warmed[0][0][0].sliding_window == 9


def test_a_warm_up_begins_before_weights_are_loaded_for_what_is_compiled_later(tmp_path, monkeypatch):
    assert_begins_what_it_warms_up(tmp_path, monkeypatch)


def test_which_engines_capture_whole_steps():
    """vLLM knows it when it makes the layers."""
    for mode, captures in (
        ("FULL_AND_PIECEWISE", True),
        ("FULL_DECODE_ONLY", True),
        ("PIECEWISE", False),
        ("NONE", False),
    ):
        config = vllm.config.CompilationConfig(cudagraph_mode=mode)
        assert ahead.captures_steps(SimpleNamespace(compilation_config=config)) is captures


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of vLLM's workers, which are forked and would inherit "error"
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_processes_that_share_heads_or_layers_write_the_tokens_of_eager_attention(split, tmp_path, monkeypatch):
    if DEVICE == "cpu" and NAME == "QUIRE" and split == "pipeline_parallel_size":
        pytest.skip("newer vLLM's workers without a GPU allocate no buffer for what the first rank sends on")
    prepare_two_processes(monkeypatch)
    model = make_model("llama", tmp_path)
    generated, _ = serve(tmp_path, max_num_batched_tokens=32, distributed_executor_backend="mp", **{split: 2})
    assert generated == [[greedy(model, p) for p in prompts()]]


@pytest.mark.slow
def test_many_requests_of_random_lengths_leave_nothing_behind(tmp_path):
    model = make_model("llama", tmp_path)
    llm = engine(tmp_path, max_num_seqs=32, max_num_batched_tokens=64, num_gpu_blocks_override=40)
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free, count = pool.get_num_free_blocks(), 10 if INTERPRETED else 100 if DEVICE == "cpu" else 1000
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 64, (count, 2), generator=draw).tolist()
    inputs = [torch.randint(3, 97, (n,), generator=draw).tolist() for n, _ in lengths]
    sampling = [
        vllm.SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False) for _, n in lengths
    ]
    results = llm.generate([{"prompt_token_ids": p} for p in inputs], sampling, use_tqdm=False)
    assert [len(r.outputs[0].token_ids) for r in results] == [n for _, n in lengths]
    assert pool.get_num_free_blocks() == free
    for i in range(0, count, count // 10):
        n = min(lengths[i][1], NEW_TOKENS)
        assert list(results[i].outputs[0].token_ids)[:n] == greedy(model, inputs[i])[:n]


def accept(
    draft_token_ids,
    num_draft_tokens,
    max_spec_len,
    cu_num_draft_tokens,
    draft_probs,
    target_logits,
    bonus_token_ids,
    *others,
    **options,
):
    """Keep drafts up to the first that the model would not choose, as vLLM's compiled greedy sampler does."""
    chosen, start = target_logits.argmax(-1), 0
    out = torch.full((len(num_draft_tokens), max_spec_len + 1), -1, dtype=torch.int32)
    for row, count in enumerate(num_draft_tokens):
        own = chosen[start : start + count]
        kept = 1 + int((draft_token_ids[start : start + count] == own).long().cumprod(0).sum())
        out[row, :kept] = torch.cat([own, bonus_token_ids[row]])[:kept]
        start += count
    return out


@pytest.fixture
def drafts_on_cpu(monkeypatch):
    """Make vLLM draft and verify without numba and its compiled operators, if there is no GPU."""
    if DEVICE == "cpu":
        numba = ModuleType("numba")
        numba.jit = numba.njit = lambda *args, **options: lambda function: function
        numba.prange, numba.get_num_threads, numba.set_num_threads = range, lambda: 1, lambda count: None
        monkeypatch.setitem(sys.modules, "numba", numba)
        monkeypatch.setattr("vllm.v1.sample.rejection_sampler.rejection_sample", accept)


@pytest.mark.slow
def test_drafted_tokens_are_verified_to_the_tokens_of_eager_attention(tmp_path, monkeypatch, drafts_on_cpu):
    lengths, original = [], QuireMetadataBuilder.build

    def build(self, common_prefix_len, common_attn_metadata, **options):
        lengths.append(common_attn_metadata.max_query_len)
        return original(self, common_prefix_len, common_attn_metadata, **options)

    monkeypatch.setattr(QuireMetadataBuilder, "build", build)
    model = make_model("llama", tmp_path)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    generated, _ = serve(tmp_path, max_num_batched_tokens=64, speculative_config=drafts)
    assert generated == [[greedy(model, p) for p in prompts()]]
    assert lengths.count(4) > (0 if INTERPRETED else 10)  # one token and three drafts


def error_in_bfloat16(
    folder: Path, model: transformers.PreTrainedModel, inputs: list[list[int]], **options
) -> tuple[float, list[list[int]]]:
    """Return the largest error of a log probability of prompts and outputs, and the outputs; the model is float32."""
    sizes = {"max_model_len": 512, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 300}
    llm = engine(folder, dtype="bfloat16", **sizes | options)
    logprobs = {"logprobs": 0, "prompt_logprobs": 0}
    sampling = vllm.SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False, **logprobs
    )
    results = llm.generate([{"prompt_token_ids": p} for p in inputs], sampling, use_tqdm=False)
    worst = 0.0
    for result in results:
        tokens = [*result.prompt_token_ids, *result.outputs[0].token_ids]
        entries = [*result.prompt_logprobs[1:], *result.outputs[0].logprobs]
        given = [entry[token].logprob for token, entry in zip(tokens[1:], entries, strict=True)]
        with torch.no_grad():
            exact = model(torch.tensor([tokens], device=DEVICE)).logits[0, :-1].log_softmax(-1)
        exact = exact[torch.arange(len(given)), torch.tensor(tokens[1:])]
        worst = max(worst, (torch.tensor(given, device=DEVICE) - exact).abs().max().item())
    return worst, [list(r.outputs[0].token_ids) for r in results]


def assert_as_close_as(backends: tuple[str, ...], folder: Path, what: str, quires: dict, **options) -> None:
    """Assert that Quire's largest error is at most twice that of each of vLLM's own backends."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).to(DEVICE)
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (5, 300, 1, 450, 130, 128, 257)]
    ours, written = error_in_bfloat16(folder, model, inputs, **options, **quires)
    for backend in backends:
        own, theirs = error_in_bfloat16(folder, model, inputs, attention_backend=backend, **options)
        alike = sum(a == b for x, y in zip(written, theirs, strict=True) for a, b in zip(x, y, strict=True))
        print(
            f"{what}: largest error of a log probability: {backend} {own:.4f}, Quire {ours:.4f}; "
            f"equal tokens {alike} of {NEW_TOKENS * len(inputs)}"
        )
        assert 0 < ours <= 2 * own


@pytest.mark.skipif(DEVICE == "cpu", reason="compares with vLLM's own backends, which need a GPU")
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_bfloat16_is_as_close_to_float32_as_vllm_s_own_backends(kv_dtype, tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 128}
    make_model("llama", tmp_path, sizes, std=0.05, dtype=torch.bfloat16)
    assert_as_close_as(("FLASH_ATTN", "TRITON_ATTN"), tmp_path, kv_dtype, {}, kv_cache_dtype=kv_dtype)
