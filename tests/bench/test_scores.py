"""Cases with changed scores: what Quire and adapters of other libraries make of them, judged by the oracle."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import triton

from quire_tools.bench import measure
from quire_tools.bench.case import Case, Model
from quire_tools.bench.cases import SETS, with_scores
from quire_tools.bench.inputs import make_inputs
from quire_tools.bench.peers import PEERS
from quire_tools.bench.sample import Sample
from quire_tools.bench.scores import SCORES

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter has no bfloat16")
LAYER = Model(4, 2, 64)
LENS = (
    Case("decode", "decode", ((1, 130), (1, 64), (1, 64)), "4/2/64", layer=LAYER),
    Case("prompts", "prefill", ((40, 40), (40, 40)), "4/2/64", layer=LAYER),
    Case("mixed", "mixed", ((1, 50), (30, 70)), "4/2/64", layer=LAYER),
)
CASES = [case for plain in LENS for case in with_scores(plain)]


def peer(name):
    (found,) = [peer for peer in PEERS if peer.name == name]
    return found


def serves(name, case):
    return case.scores in peer(name).scores or (case.spec.score is None and not case.spec.alibi)


def judged(name, case):
    inputs = make_inputs(case, "cpu", max_tables=2)
    out = inputs.empty_out()
    plan = peer(name).adapter(inputs, out)
    for table in inputs.tables:
        result = plan(table)()
        verdict = Sample(inputs, table).judge(out if result is None else result.reshape(out.shape))
        assert verdict.passed, verdict
    return True


def test_every_change_of_scores_is_measured_next_to_the_plain_case():
    plain = [case for case in SETS["scores"] if case.scores is None]
    assert [case.scores for case in SETS["scores"]] == [None, *SCORES] * len(plain)
    assert {(case.kind, case.spec.head_dim) for case in plain} == {
        (kind, dim) for kind in ("decode", "prefill", "mixed") for dim in (64, 128)
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_quire_computes_them(case):
    assert judged("Quire", case)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", [c for c in CASES if serves("FlexAttention, not paged", c)], ids=lambda c: c.name)
def test_flex_attention_computes_them(case, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    if case.spec.softcap is not None:
        with pytest.raises(measure.NotServed, match="softcap"):
            judged("FlexAttention, not paged", case)
    else:
        assert judged("FlexAttention, not paged", case)


@pytest.mark.parametrize("case", [c for c in CASES if serves("SGLang Triton", c)], ids=lambda case: case.name)
def test_sglang_computes_them(case, monkeypatch):
    for name, functions in SGLANG.items():
        module = ModuleType(f"sglang.kernels.ops.attention.{name}")
        vars(module).update({function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"multi_processor_count": 4}))
    assert judged("SGLang Triton", case)


def test_libraries_that_lack_them_are_not_called():
    inputs = make_inputs(next(case for case in CASES if case.scores == "ALiBi"), "cpu", max_tables=2)
    for lacking in PEERS:
        if "ALiBi" not in lacking.scores:
            broken = replace(lacking, adapter=lambda inputs, out: pytest.fail("called"))
            with pytest.raises(measure.NotServed, match="does not serve ALiBi"):
                measure.check_and_capture(broken, inputs, Sample(inputs, inputs.tables[0]))


# Stand-ins for SGLang's kernels, with its signatures


class get_num_kv_splits_triton:
    def __class_getitem__(cls, grid):
        def launch(splits, seq_lens, num_seqs, num_groups, heads, kv_heads, most, num_sms, MAX_NUM_SEQ):
            assert (grid, num_groups, heads, kv_heads, num_sms) == ((1,), 1, 4, 2, 4) and num_seqs <= MAX_NUM_SEQ
            splits.copy_((seq_lens // 32).clamp(1, most))

        return launch


def relative_bias_score_mod(scores, q_pos, kv_pos, token, bias):
    distance = q_pos[:, None] - kv_pos
    found = bias[token].gather(-1, distance.clamp(0, bias.shape[-1] - 1)[:, None].expand(-1, bias.shape[1], -1))
    return scores + torch.where((distance >= 0) & (distance < bias.shape[-1]), found.transpose(0, 1), 0.0)


def attend(q, k, v, first, token, scale, logit_cap, score_mod, aux_tensors):
    heads = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(heads, 1) for x in (k, v))
    scores = scale * torch.einsum("qhd,khd->hqk", q.float(), k)
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    q_pos, kv_pos = first + torch.arange(len(q)), torch.arange(len(k))
    if score_mod is not None:
        scores = score_mod(scores, q_pos, kv_pos, token, *(x.float() for x in aux_tensors))
    weights = scores.masked_fill(kv_pos > q_pos[:, None], -float("inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


def decode_attention_fwd(
    q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits, sm_scale,
    k_scale, v_scale, logit_cap=0.0, sinks=None, page_size=1, score_mod=None, aux_tensors=None,
):  # fmt: skip
    assert sinks is None and page_size == k_scale == v_scale == 1 and 1 <= num_kv_splits.max() <= max_kv_splits
    assert attn_logits.shape == (*q.shape[:2], max_kv_splits, v_buffer.shape[-1])
    assert attn_lse.shape == attn_logits.shape[:3] and attn_lse.dtype == attn_logits.dtype == torch.float32
    for i in range(len(q)):
        slots, token = kv_indices[kv_indptr[i] : kv_indptr[i + 1]], torch.tensor([i])
        more = sm_scale, logit_cap, score_mod, aux_tensors
        o[i : i + 1] = attend(q[i : i + 1], k_buffer[slots], v_buffer[slots], len(slots) - 1, token, *more)


def extend_attention_fwd(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask,
    is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None, logit_cap=0.0, sinks=None, page_size=1,
    score_mod=None, aux_tensors=None,
):  # fmt: skip
    assert is_causal and custom_mask is mask_indptr is sinks is None and page_size == k_scale == v_scale == 1
    assert max_len_extend == qo_indptr.diff().max()
    for i in range(len(qo_indptr) - 1):
        slots, rows = kv_indices[kv_indptr[i] : kv_indptr[i + 1]], slice(qo_indptr[i], qo_indptr[i + 1])
        k, v = torch.cat([k_buffer[slots], k_extend[rows]]), torch.cat([v_buffer[slots], v_extend[rows]])
        token = torch.arange(rows.start, rows.stop)
        o_extend[rows] = attend(q_extend[rows], k, v, len(slots), token, sm_scale, logit_cap, score_mod, aux_tensors)


SGLANG = {
    "score_mod": [relative_bias_score_mod],
    "metadata": [get_num_kv_splits_triton],
    "decode_attention": [decode_attention_fwd],
    "extend_attention": [extend_attention_fwd],
}
