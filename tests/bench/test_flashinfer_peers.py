"""The adapters of XQA and `BatchAttention`, with stand-ins that compute on the CPU what they are handed."""

import sys
from types import ModuleType

import pytest
import torch
import triton

import quire
from quire_tools.bench import measure
from quire_tools.bench.case import Case
from quire_tools.bench.inputs import make_inputs
from quire_tools.bench.peers import PEERS
from quire_tools.bench.sample import Sample

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter has no bfloat16")
MODEL = "Llama-3-8B"
DECODE = Case("decode", "decode", ((1, 40), (1, 17), (1, 1)), MODEL, 16)
DRAFTS = Case("drafts", "drafts", ((4, 40), (4, 17)), MODEL, 16)
MIXED = Case("mixed", "mixed", ((1, 40), (9, 17), (20, 20)), MODEL, 16)
WINDOW = Case("window", "decode", ((1, 40), (1, 17)), "Mistral window", 16)
SMALL_PAGES = Case("small pages", "decode", ((1, 40),), MODEL, 8)
FP8 = Case("fp8", "decode", ((1, 40),), MODEL, 16, kv_dtype="float8_e4m3fn")


def solve(q, kv_cache, table, seq_lens, starts, scale, out, window=-1):
    k, v = kv_cache
    spec = quire.AttentionSpec(
        num_q_heads=q.shape[1], num_kv_heads=k.shape[2], head_dim=q.shape[2], softmax_scale=scale,
        sliding_window=None if window < 0 else window + 1,
    )  # fmt: skip
    batch = quire.Batch(table, seq_lens, starts)
    lens = starts.diff()
    plan = quire.plan(spec, batch, max_query_len=int(lens.max()), max_seq_len=int(seq_lens.max()), num_tokens=len(q))
    quire.attention(q, quire.PagedKVCache(k, v), plan, out=out)


def xqa(*, query, kv_cache, workspace_buffer, block_tables, seq_lens, q_len_per_req, mask, out, **rest):
    assert rest["backend"] == "xqa" and rest["kv_layout"] == "NHD" and rest["bmm2_scale"] == 1.0
    assert rest["max_seq_len"] == seq_lens.max() and not workspace_buffer.any()
    assert (mask is None) == (q_len_per_req == 1)
    if mask is not None:
        bits = mask.int()[..., None] >> torch.arange(16) & 1
        sees = bits.flatten(2)[..., :q_len_per_req]
        assert mask.shape[2] % 2 == 0 and torch.equal(sees, torch.ones_like(sees).tril())
    starts = torch.arange(0, len(query) + 1, q_len_per_req, dtype=torch.int32)
    solve(query, kv_cache, block_tables, seq_lens, starts, rest["bmm1_scale"], out, rest["window_left"])


class BatchAttention:
    def __init__(self, layout, device):
        assert (layout, device) == ("NHD", "cpu")
        self.float_workspace_buffer = torch.empty(1)

    def plan(self, starts, indptr, pages, lens, num_q_heads, num_kv_heads, dim, dim_v, page_size, **options):
        assert options["causal"] and options["q_data_type"] == options["kv_data_type"]
        counts = indptr.diff().tolist()
        self.table = torch.nn.utils.rnn.pad_sequence(list(pages.split(counts)), batch_first=True)
        self.starts, self.lens, self.scale = starts, lens, options["sm_scale"]

    def run(self, q, kv_cache, out, lse):
        assert lse.shape == q.shape[:2] and lse.dtype == torch.float32
        solve(q, kv_cache, self.table, self.lens, self.starts, self.scale, out)
        return out, lse


@pytest.fixture
def stand_ins(monkeypatch):
    package, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    package.BatchAttention, decode.trtllm_batch_decode_with_kv_cache = BatchAttention, xqa
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)


def peer_named(name):
    (peer,) = (peer for peer in PEERS if peer.name == name)
    return peer


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("name", "cases"),
    [("FlashInfer XQA", (DECODE, DRAFTS, WINDOW)), ("FlashInfer BatchAttention", (DECODE, DRAFTS, MIXED))],
)
def test_adapters_hand_over_what_gives_right_results(name, cases):
    peer = peer_named(name)
    for case in cases:
        inputs = make_inputs(case, "cpu", max_tables=2)
        out = inputs.empty_out()
        plan = peer.adapter(inputs, out)
        for call, table in [(plan(table), table) for table in inputs.tables]:  # all calls are kept, as in a graph
            out.zero_()
            assert call() is None
            assert Sample(inputs, table).judge(out).passed, case


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("FlashInfer XQA", MIXED),
        ("FlashInfer XQA", SMALL_PAGES),
        ("FlashInfer XQA", FP8),
        ("FlashInfer BatchAttention", WINDOW),
        ("FlashInfer BatchAttention", FP8),
    ],
)
def test_what_they_lack_is_refused(name, case):
    inputs = make_inputs(case, "cpu", max_tables=2)
    with pytest.raises(measure.NotServed):
        peer_named(name).adapter(inputs, inputs.empty_out())
