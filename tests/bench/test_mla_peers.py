"""What adapters hand to libraries that serve latents and expanded heads, with stand-ins for these libraries.

A stand-in has the signature that its library documents, and computes attention from what it is handed. So a call that
hands over the wrong half, table, length or scale gives a wrong result, and one with a wrong name raises.
"""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton

from quire.dispatch.device import compile_for
from quire.targets import TARGETS
from quire_tools.bench import measure
from quire_tools.bench.case import RECORDS, Case, Pool
from quire_tools.bench.cases import cases, over_latents
from quire_tools.bench.inputs import make_inputs
from quire_tools.bench.peers import PEERS
from quire_tools.bench.peers.call_quire import quire_with_fp8_products
from quire_tools.bench.sample import Sample
from quire_tools.cli.bench_measure import launch_of

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter has no bfloat16")
LATENTS = (
    Case("one query", "MLA decode", ((1, 130), (1, 64), (1, 5)), "MLA, 16 heads", 64),
    Case("drafts", "MLA decode", ((3, 130), (3, 64), (3, 5)), "MLA, 16 heads", 64),
)
FP8 = tuple(Case(c.name, c.kind, c.lens, c.model, c.page_size, kv_dtype="float8_e4m3fn") for c in LATENTS)
PACKED = (
    Case("prompts", "MLA prefill", ((40, 40), (13, 13)), "MLA, 16 heads, expanded", 1, packed=True),
    Case("a chunk", "MLA prefill", ((20, 70),), "MLA, 16 heads, expanded", 1, packed=True),
)
CHOSEN = (
    Case("lists", "chosen decode", ((1, 40),) * 5, "MLA, 16 heads", 64, pool=Pool(256)),
    Case("lists of a prompt", "chosen prefill", ((9, 40),), "MLA, 16 heads", 64, pool=Pool(256, shared=0.75)),
    Case("many heads", "chosen decode", ((1, 40),) * 3, "MLA, 128 heads", 64, pool=Pool(256)),
)
IN_RECORDS = tuple(replace(case, kv_dtype=RECORDS) for case in CHOSEN)


def attend(q, k, v, scale):
    """Causal attention of one sequence's last tokens: q [queries, heads, dim], k and v [keys, heads or 1, dim]."""
    q_len, kv_len = q.shape[0], k.shape[0]
    scores = scale * torch.einsum("qhd,khd->hqk", q.float(), k.float().expand(-1, q.shape[1], -1))
    unseen = torch.arange(kv_len) > torch.arange(kv_len - q_len, kv_len)[:, None]
    weights = scores.masked_fill(unseen, -float("inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.float().expand(-1, q.shape[1], -1)).to(q.dtype)


def paged(cache, row, length):
    """The first `length` slots of a sequence's pages, [length, ...]."""
    return cache[row.long()].flatten(0, 1)[:length]


def starts_of(cumulative):
    return list(zip(cumulative[:-1].tolist(), cumulative[1:].tolist(), strict=True))


def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, softmax_scale=None,
    causal=False, window_size=None, softcap=0.0, block_table=None, out=None, scheduler_metadata=None, num_splits=0,
    fa_version=2, s_aux=None,
):  # fmt: skip
    assert causal and fa_version == 3 and window_size == [-1, -1] and s_aux is None and softcap == 0
    for seq, (begin, end) in enumerate(starts_of(cu_seqlens_q)):
        if cu_seqlens_k is not None:
            first, last = starts_of(cu_seqlens_k)[seq]
            keys, values = k[first:last], v[first:last]
            assert last - first <= max_seqlen_k
        else:
            assert scheduler_metadata == (q.shape[-1], v.shape[-1])
            keys, values = (paged(x, block_table[seq], int(seqused_k[seq])) for x in (k, v))
        queries = q[begin:end]
        if q_v is not None:
            queries, keys = torch.cat([queries, q_v[begin:end]], -1), torch.cat([keys, values], -1)
        out[begin:end] = attend(queries, keys, values, softmax_scale)
    return out


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype, headdim_v,
    cu_seqlens_q, page_size, causal, window_size, has_softcap, num_splits,
):  # fmt: skip
    assert not has_softcap
    return headdim, headdim_v


class RaggedWrapper:
    def __init__(self, workspace, kv_layout, backend):
        assert (kv_layout, backend) == ("NHD", "fa3")

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False,
        sm_scale=None, q_data_type=None, kv_data_type=None,
    ):  # fmt: skip
        assert causal and (head_dim_qk, head_dim_vo) == (192, 128)
        self.ranges, self.scale = [starts_of(x) for x in (qo_indptr, kv_indptr)], sm_scale

    def run(self, q, k, v, out):
        for (begin, end), (first, last) in zip(*self.ranges, strict=True):
            out[begin:end] = attend(q[begin:end], k[first:last], v[first:last], self.scale)


class MLAPlanMetadata:
    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        assert {x.dtype for x in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)} == {torch.int32}
        return starts_of(qo_indptr), starts_of(kv_indptr), kv_indices, kv_len_arr.tolist()


class MLAWrapper:
    def __init__(self, workspace, backend):
        self.backend = backend

    def plan(
        self, *, metadata, num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type
    ):
        assert causal and (head_dim_ckv, head_dim_kpe) == (512, 64)
        self.metadata, self.scale, self.page_size = metadata, sm_scale, page_size

    def run(self, *, query, kv_cache, out, **scales):
        assert bool(scales) == (kv_cache.dtype is torch.float8_e4m3fn) and kv_cache.shape[1] == self.page_size
        for (begin, end), (first, last), n in zip(*self.metadata[:2], self.metadata[3], strict=True):
            latents = paged(kv_cache.float(), self.metadata[2][first:last], n)[:, None]
            out[begin:end] = attend(query[begin:end], latents, latents[..., :512], self.scale)


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=None, use_legacy=False, descale_q=None, descale_k=None, out=None,
):  # fmt: skip
    assert causal and num_splits is None
    assert q.dtype == k_cache.dtype
    made = torch.empty(*q.shape[:3], head_dim_v, dtype=torch.bfloat16) if out is None else out
    for seq, row in enumerate(block_table):
        latents = paged(k_cache.float(), row, int(cache_seqlens[seq]))
        made[seq] = attend(q[seq].float(), latents, latents[..., :head_dim_v], softmax_scale)
    return made, None


def get_mla_decoding_metadata(seqlens_k, num_q_tokens_per_head_k, h_k, is_fp8_kvcache=False, use_legacy=False):
    assert use_legacy and h_k == 1 and num_q_tokens_per_head_k % 16 == 0
    return seqlens_k, seqlens_k


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, use_legacy=False, return_log2_lse=None):
    assert use_legacy and return_log2_lse is False and q.shape[1] in (64, 128)
    assert kv.dim() == indices.dim() == 3 and indices.dtype == torch.int32 and kv.dtype == q.dtype
    rows = [
        attend(q[i : i + 1], kv[lists[0].long()], kv[lists[0].long(), :, :d_v], sm_scale)
        for i, lists in enumerate(indices)
    ]
    return [torch.cat(rows), None, None]


def flash_mla_with_records(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=None, indices=None, use_legacy=False,
):  # fmt: skip
    assert use_legacy and is_fp8_kvcache and not causal and block_table is cache_seqlens is num_splits is None
    assert q.shape[1] == 1 and q.shape[2] in (64, 128) and k_cache.shape[1:] == (64, 1, 656)
    vars(tile_scheduler_metadata).setdefault("shape", q.shape)  # a schedule is for batches of one shape
    assert tile_scheduler_metadata.shape == q.shape
    numbers, scales, rope = k_cache.flatten(0, 2).split([512, 16, 128], 1)
    numbers = numbers.contiguous().view(torch.float8_e4m3fn).float()
    numbers *= scales.contiguous().view(torch.float32).repeat_interleave(128, 1)
    kv = torch.cat([numbers.to(torch.bfloat16), rope.contiguous().view(torch.bfloat16)], 1)[:, None]
    out, *_ = flash_mla_sparse_fwd(q[:, 0], kv, indices, softmax_scale, head_dim_v, True, False)
    return out[:, None], None


def decode_attention_fwd(
    q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale, page_size=1,
    logit_cap=0.0, k_scale=None, v_scale=None, is_mla=False,
):  # fmt: skip
    assert is_mla and attn_logits.shape == (*q.shape[:2], num_kv_splits, 513) and page_size == k_buffer.shape[1]
    for i, row in enumerate(req_to_token):
        keys, values = (paged(x.float(), row, int(b_seq_len[i])) for x in (k_buffer, v_buffer))
        o[i] = attend(q[i : i + 1], keys, values, sm_scale)[0]


MODULES = {
    "vllm.vllm_flash_attn": {
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "get_scheduler_metadata": get_scheduler_metadata,
    },
    "vllm.v1.attention.ops.triton_decode_attention": {"decode_attention_fwd": decode_attention_fwd},
    "vllm.third_party.flashmla.flash_mla_interface": {
        "flash_mla_with_kvcache": flash_mla_with_kvcache,
        "get_mla_metadata": lambda: (None, None),
    },
    "flash_mla": {
        "flash_mla_with_kvcache": flash_mla_with_kvcache,
        "get_mla_decoding_metadata": get_mla_decoding_metadata,
    },
    "flash_mla.flash_mla_interface": {
        "FlashMLASchedMeta": SimpleNamespace,
        "flash_mla_sparse_fwd": flash_mla_sparse_fwd,
        "flash_mla_with_kvcache": flash_mla_with_records,
    },
    "flashinfer": {"BatchPrefillWithRaggedKVCacheWrapper": RaggedWrapper},
    "flashinfer.mla": {"BatchMLAPagedAttentionWrapper": MLAWrapper, "MLAPlanMetadata": MLAPlanMetadata},
}


@pytest.fixture
def stand_ins(monkeypatch):
    """Put the stand-ins in the place of their libraries."""
    for name, content in MODULES.items():
        parts = name.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
    for name, content in MODULES.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("FlashAttention 3", LATENTS + PACKED + CHOSEN),
        ("FlashMLA", LATENTS + FP8 + CHOSEN + IN_RECORDS),
        ("FlashMLA in vLLM", LATENTS),
        ("FlashInfer fa2", LATENTS),
        ("FlashInfer fa3", LATENTS + FP8 + PACKED + CHOSEN),
        ("vLLM Triton MLA", LATENTS + FP8),
    ],
)
def test_adapters_hand_over_what_gives_right_results(name, cases):
    (peer,) = (peer for peer in PEERS if peer.name == name)
    for case in cases:
        assert case.layout in peer.serves
        inputs = make_inputs(case, "cpu", max_tables=2)
        for table in inputs.tables:
            out = inputs.empty_out()
            result = peer.adapter(inputs, out)(table)()
            sample = Sample(inputs, table)
            judged = out if result is None else result.reshape(out.shape)
            assert sample.judge(judged, peer.in_fp8 and case in FP8).passed, case
            assert case in FP8 or not sample.judge(judged * 1.1).passed, case


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("FlashAttention 3", FP8[0]),
        ("FlashMLA in vLLM", FP8[0]),
        ("Quire, fp8 products", FP8[0]),
        ("FlashInfer fa2", FP8[0]),
        ("FlashAttention 3", IN_RECORDS[0]),
        ("FlashInfer fa3", IN_RECORDS[0]),
        ("FlashMLA", Case("unequal", "MLA decode", ((1, 5), (2, 7)), "MLA, 16 heads", 64)),
        ("vLLM Triton MLA", Case("unequal", "MLA decode", ((1, 5), (2, 7)), "MLA, 16 heads", 64)),
    ],
)
def test_what_a_library_lacks_is_refused(name, case):
    (peer,) = (peer for peer in PEERS if peer.name == name)
    inputs = make_inputs(case, "cpu", max_tables=2)
    with pytest.raises(measure.NotServed):
        peer.adapter(inputs, inputs.empty_out())


def test_products_in_fp8_are_measured_where_plans_choose_them():
    inputs = make_inputs(over_latents(128, [8192] * 32, "32x8192", kv_dtype="float8_e4m3fn"), "cpu", max_tables=1)
    with compile_for(TARGETS["sm90"].properties, on_compile=lambda *facts: None):
        call = quire_with_fp8_products(inputs, inputs.empty_out())(inputs.tables[0])
    plan = call.args[2]
    assert plan.launch.fp8_mma and not inputs.case.spec.allow_fp8


@pytest.mark.parametrize("case", cases(["chosen"]), ids=lambda case: case.name)
def test_lists_are_planned_and_compiled_for_the_kernel_of_lists(case):
    """In records of more than 32 heads this takes `allow_fp8`. A pool of a few slots is enough to plan."""
    launch = launch_of(case)
    assert (launch.width, launch.layout) == (2048, "fp8_ds_mla" if case.kv_dtype else "NHD")
    inputs = make_inputs(replace(case, lens=((1, 40),) * 3, pool=Pool(128)), "cpu", max_tables=1)
    with compile_for(TARGETS["sm90"].properties, on_compile=lambda *facts: None):
        plan = inputs.plan(inputs.tables[0])
    assert plan.kernel == "chosen_hopper" and plan.launch_for(inputs.pools[0]) is plan.launch


def test_libraries_take_part_in_the_layouts_that_they_serve():
    by_layout = {
        layout: [peer.name for peer in PEERS if layout in peer.serves]
        for layout in ("pages", "latents", "packed", "chosen keys")
    }
    assert by_layout["latents"] == [
        "Quire",
        "Quire, batch-invariant",
        "Quire, portable",
        "Quire, fp8 products",
        "FlashMLA",
        "FlashMLA in vLLM",
        "FlashAttention 3",
        "FlashInfer fa2",
        "FlashInfer fa3",
        "vLLM Triton MLA",
    ]
    assert by_layout["chosen keys"] == ["Quire", "FlashMLA", "FlashAttention 3", "FlashInfer fa3"]
    assert by_layout["packed"] == ["Quire", "FlashAttention 3", "FlashInfer fa2", "FlashInfer fa3"]
    assert not {"FlashMLA", "vLLM Triton MLA", "Quire, portable"} & set(by_layout["pages"])
