"""FlashInfer's names against the float64 oracle and against hand-written semantics; each translation has a test.

Valid with and without TRITON_INTERPRET=1.
"""

import inspect
import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire import AttentionSpec, PagedKVCache, State
from quire.errors import describe
from quire.integrations import flashinfer
from quire.testing import Oracle, make_problem

LOG2E = math.log2(math.e)
SPEC = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
LENS = [(1, 5), (4, 19), (1, 0), (3, 8)]  # of queries and keys; the third is a padding row
DECODES = [(1, 5), (1, 19), (1, 0), (1, 8)]


def randn(*shape, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def dense(q, k, v, causal=False, window_left=-1, cap=None, scale=None, mask=None):
    """One sequence, from FlashInfer's definitions: q [n, hq, d], k and v [m, hkv, d] -> out, lse in base 2 [n, hq]."""
    q, k, v = q.double(), k.double(), v.double()
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->qhk", q, k) * (scale or q.shape[-1] ** -0.5)
    if cap:
        scores = cap * (scores / cap).tanh()
    i, j = torch.arange(n, device=q.device)[:, None], torch.arange(m, device=q.device)
    seen = torch.ones(n, m, dtype=torch.bool, device=q.device)
    if causal:
        seen &= j + n <= m + i
    if window_left >= 0:
        seen &= j + n + window_left >= m + i
    if mask is not None:
        seen &= mask
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    weights = (2.0 ** (scores * LOG2E)).sum(-1)
    out = torch.einsum("qhk,khd->qhd", torch.softmax(scores, -1).nan_to_num(0.0), v)
    return out, torch.log2(weights)


def close(got, expected):
    torch.testing.assert_close(got.double(), expected.double(), atol=2e-5, rtol=2e-5)


def natural(state):
    """Return FlashInfer's (out, lse) as a State, whose lse is a natural logarithm."""
    return State(state[0], (state[1].double() / LOG2E).float())


def page_lists(problem):
    """Return a problem's flat page table as FlashInfer's three lists."""
    lens, size = problem.batch.seq_lens, problem.cache.page_size
    last = torch.where(lens > 0, (lens - 1) % size + 1, 0).int()
    return problem.batch.cu_pages, problem.batch.page_table, last


def heads(spec):
    return spec.num_q_heads, spec.num_kv_heads, spec.head_dim


def workspace(device):
    return torch.empty(16, dtype=torch.uint8, device=device)


SCORES = "pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None"
ROPE = "rope_scale=None, rope_theta=None"
MASKS = "custom_mask=None, packed_custom_mask=None, causal=False"
OLD = "window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
ITEMS = "prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None"
DTYPES = "q_data_type='float16', kv_data_type=None, o_data_type=None"
SPLITS = "fixed_split_size=None, disable_split_kv=False"
JIT = "custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None"
LSE = "out=None, lse=None, return_lse=False"
BUFFERS = "paged_kv_indptr{0}=None, paged_kv_indices{0}=None, paged_kv_last_page_len{0}=None"
PARAMETERS = {
    "single_decode_with_kv_cache": (
        "q, k, v, kv_layout='NHD', pos_encoding_mode='NONE', use_tensor_cores=False, q_scale=None, k_scale=None, "
        f"v_scale=None, {OLD}, return_lse=False"
    ),
    "single_prefill_with_kv_cache": (
        f"q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, {MASKS}, kv_layout='NHD', "
        "pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, "
        f"{ROPE}, backend='auto', return_lse=False, kv_cache_sf=None, k_scale=None, v_scale=None"
    ),
    "fast_decode_plan": (
        f"self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, {SCORES}, "
        f"q_data_type=None, kv_data_type=None, data_type=None, sm_scale=None, {ROPE}, non_blocking=True, {SPLITS}, "
        "q_len_per_req=1, global_override_indptr_cpu=None"
    ),
    "merge_state": "v_a, s_a, v_b, s_b",
    "merge_state_in_place": "v, s, v_other, s_other, mask=None",
    "merge_states": "v, s",
    "get_seq_lens": "kv_indptr, kv_last_page_len, page_size",
    "get_batch_indices_positions": "append_indptr, seq_lens, nnz, batch_indices=None, positions=None",
    "append_paged_kv_cache": (
        "append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, "
        "kv_last_page_len, kv_layout='NHD'"
    ),
    "BatchDecodeWithPagedKVCacheWrapper": (
        "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False, "
        f"{BUFFERS.format('_buffer')}, backend='auto', jit_args=None, jit_kwargs=None"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.plan": (
        f"indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, {SCORES}, {DTYPES}, "
        f"data_type=None, sm_scale=None, {ROPE}, non_blocking=True, block_tables=None, seq_lens=None, {SPLITS}, "
        "q_len_per_req=1, *, window_right=0, is_causal=None, use_token_head_sf=False"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.run": (
        f"q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, {LSE}, enable_pdl=None, "
        "window_left=None, sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.forward": (
        f"q, paged_kv_cache, pos_encoding_mode='NONE', q_scale=None, k_scale=None, v_scale=None, {OLD}"
    ),
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": (
        "workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout='NHD', use_tensor_cores=False"
    ),
    "BatchPrefillWithPagedKVCacheWrapper": (
        "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
        f"{BUFFERS.format('_buf')}, {JIT}, variant_owns_mask=False, max_total_num_rows=None"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.plan": (
        "qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, "
        f"head_dim_qk, page_size, head_dim_vo=None, {MASKS}, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, "
        f"sm_scale=None, window_left=-1, logits_soft_cap=None, {ROPE}, {DTYPES}, non_blocking=True, {ITEMS}, "
        "seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None, "
        f"{SPLITS}, uniform_q_len=None, use_token_head_sf=False"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.run": (
        f"q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, {LSE}, lse_base='log2', "
        "lse_layout='NH', enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, "
        "skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.forward": (
        "q, paged_kv_cache, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, k_scale=None, "
        f"v_scale=None, {OLD}"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper": (
        "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, kv_indptr_buf=None, "
        f"{JIT}, variant_owns_mask=False"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.plan": (
        f"qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, {MASKS}, "
        "pos_encoding_mode='NONE', use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None, "
        f"{ROPE}, {DTYPES}, non_blocking=True, {ITEMS}, {SPLITS}, seq_lens=None, seq_lens_q=None, "
        "max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None, "
        "qo_indptr_cpu=None, kv_indptr_cpu=None, uniform_q_len=None, use_token_head_sf=False"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.run": (
        f"q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, {LSE}, lse_base='log2', "
        "lse_layout='NH', enable_pdl=None, kv_cache_sf=None, sinks=None"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.forward": (
        f"q, k, v, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, {OLD}"
    ),
    "MultiLevelCascadeAttentionWrapper": (
        "num_levels, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf_arr=None, "
        f"{BUFFERS.format('_buf_arr')}"
    ),
    "MultiLevelCascadeAttentionWrapper.plan": (
        "qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads, num_kv_heads, "
        "head_dim, page_size, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, "
        f"window_left=-1, logits_soft_cap=None, {ROPE}, q_data_type='float16', kv_data_type=None"
    ),
    "MultiLevelCascadeAttentionWrapper.run": "q, paged_kv_cache",
}


def find(name):
    owner, _, method = name.partition(".")
    found = getattr(flashinfer, owner)
    return getattr(found, method) if method else found


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_lists(name):
    """Names, order and defaults are those of FlashInfer 0.7.4; of `plan` for decode, those that it takes by keyword.

    `sinks` of the wrapper for packed keys are Quire's own.
    """
    shown, keyword_only = [], "run" in name
    for p in inspect.signature(find(name)).parameters.values():
        if p.name == "self" and name != "fast_decode_plan":
            continue
        if p.kind is p.VAR_POSITIONAL:
            shown.append(f"*{p.name}")
            continue
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            shown, keyword_only = [*shown, "*"], True
        shown.append(p.name if p.default is p.empty else f"{p.name}={p.default!r}")
    assert ", ".join(shown) == PARAMETERS[name]


def test_everything_is_public_and_documented():
    assert {name.partition(".")[0] for name in PARAMETERS} <= set(flashinfer.__all__)
    for name in PARAMETERS:
        assert inspect.getdoc(find(name))
        wrapper = find(name.partition(".")[0])
        if name.endswith(".plan"):
            assert wrapper.begin_forward is wrapper.plan
        if name.endswith(".forward") and "Multi" not in name:
            assert list(inspect.signature(wrapper.forward_return_lse).parameters) == list(
                inspect.signature(wrapper.forward).parameters
            )
            assert callable(wrapper.run_return_lse)


FEATURES = {
    "causal": ({}, {}),
    "window": ({"sliding_window": 4}, {"window_left": 3}),
    "softcap": ({"softcap": 2.0}, {"logits_soft_cap": 2.0}),
    "scale": ({"softmax_scale": 0.4}, {"sm_scale": 0.4}),
    "sinks": ({"sinks": True}, {}),
}


@pytest.mark.parametrize("pages", ["one tensor", "a pair"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("feature", FEATURES)
def test_decode_attends_to_pages(feature, layout, pages, device):
    """Lists may be int32 on the device or int64 on the host. What no query sees is NaN."""
    fields, arguments = FEATURES[feature]
    spec = AttentionSpec(**SPEC, **fields)
    p = make_problem(spec, DECODES, page_size=4, layout=layout, flat_table=True, one_query=True, device=device)
    kv, lists = (p.cache.k, p.cache.v), page_lists(p)
    if pages == "one tensor":
        kv, lists = torch.stack(kv, 1), [x.cpu().long() for x in lists]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout)
    wrapper.plan(*lists, *heads(spec), 4, q_data_type=torch.float32, **arguments)
    oracle = Oracle(p)
    for _ in range(2):  # two layers
        state = wrapper.run(p.q, kv, return_lse=True, sinks=p.sinks)
        assert oracle.judge(natural(state)).passed
    assert oracle.judge(wrapper.run(p.q, kv, sinks=p.sinks)).passed


@pytest.mark.parametrize("pages", ["one tensor", "a pair"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("feature", [*FEATURES, "both directions"])
def test_prefill_attends_to_pages(feature, layout, pages, device):
    fields, arguments = FEATURES.get(feature, ({"causal": False, "sliding_window": 3}, {"window_left": 2}))
    if pages == "a pair":
        fields = fields | {"head_dim_v": 24}
    spec = AttentionSpec(**SPEC, **fields)
    p = make_problem(spec, LENS, page_size=4, layout=layout, flat_table=True, device=device)
    kv, lists = (p.cache.k, p.cache.v), (p.batch.cu_seqlens_q, *page_lists(p))
    if pages == "one tensor":
        kv, lists = torch.stack(kv, 1), [x.cpu().long() for x in lists]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout)
    arguments = arguments | {"head_dim_vo": spec.head_dim_v, "causal": spec.causal, "q_data_type": "float32"}
    wrapper.plan(*lists, *heads(spec), 4, **arguments)
    state = wrapper.run(p.q, kv, return_lse=True, sinks=p.sinks)
    assert Oracle(p).judge(natural(state)).passed


def test_a_padding_row_has_no_length_whatever_its_last_page_says(device):
    p = make_problem(AttentionSpec(**SPEC), DECODES, page_size=4, flat_table=True, one_query=True, device=device)
    starts, pages, last = page_lists(p)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(starts, pages, last.clamp(min=1), *heads(p.spec), 4, q_data_type="float32")
    out, lse = wrapper.run(p.q, (p.cache.k, p.cache.v), return_lse=True)
    assert not out[2].any() and (lse[2] == float("-inf")).all()
    assert Oracle(p).judge(natural((out, lse))).passed


@pytest.mark.parametrize("is_causal", [None, False])
def test_decode_of_several_queries(is_causal, device):
    lens = [(2, 5), (2, 19), (2, 8)]
    spec = AttentionSpec(**SPEC, causal=is_causal is None)
    p = make_problem(spec, lens, page_size=4, flat_table=True, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=True)
    assert wrapper.use_tensor_cores
    wrapper.plan(*page_lists(p), *heads(spec), 4, q_data_type="float32", q_len_per_req=2, is_causal=is_causal)
    state = wrapper.run(p.q, (p.cache.k, p.cache.v), return_lse=True, q_len_per_req=2)
    assert Oracle(p).judge(natural(state)).passed
    with pytest.raises(ValueError, match="q_len_per_req must be the planned 2, got 1"):
        wrapper.run(p.q, (p.cache.k, p.cache.v), q_len_per_req=1)


def test_given_lengths_and_bounds_take_the_place_of_those_that_are_read(device):
    p = make_problem(AttentionSpec(**SPEC), LENS, page_size=4, flat_table=True, device=device)
    starts, pages, last = page_lists(p)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(
        p.batch.cu_seqlens_q,
        starts,
        pages,
        torch.zeros_like(last),
        *heads(p.spec),
        4,
        causal=True,
        q_data_type="float32",
        seq_lens=p.batch.seq_lens,
        max_token_per_sequence=9,
        max_sequence_kv=40,
    )
    (plan,) = wrapper._plans.values()
    assert (plan.bounds.max_query_len, plan.bounds.max_seq_len, plan.bounds.num_tokens) == (9, 40, len(p.q))
    assert Oracle(p).judge(wrapper.run(p.q, (p.cache.k, p.cache.v))).passed


@pytest.mark.parametrize("asked", [{"fixed_split_size": 4}, {"disable_split_kv": True}, {"fixed_split_size": -1}])
def test_fixed_splits_ask_for_results_that_do_not_depend_on_the_batch(asked, device, options):
    p = make_problem(AttentionSpec(**SPEC), DECODES, page_size=4, flat_table=True, one_query=True, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*page_lists(p), *heads(p.spec), 4, q_data_type="float32", **asked)
    (plan,) = wrapper._plans.values()
    invariant = asked != {"fixed_split_size": -1} and bool(options(triton=True))
    assert ("batch-invariant" in str(plan)) == invariant
    assert Oracle(p).judge(wrapper.run(p.q, (p.cache.k, p.cache.v))).passed


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_ragged_prefill(layout, causal, device):
    queries, keys = int32(0, 3, 3, 10), int32(0, 12, 17, 24)
    q, k, v = (randn(*s, seed=s[0], device=device) for s in ((10, 4, 16), (24, 2, 16), (24, 2, 24)))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), layout)
    wrapper.plan(queries, keys, 4, 2, 16, 24, causal=causal, window_left=5, sm_scale=0.3, q_data_type="float32")
    packed = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    out, lse = wrapper.run(q, *packed, return_lse=True)
    for a, b, c, d in ((0, 3, 0, 12), (3, 10, 17, 24)):
        expected = dense(q[a:b], k[c:d], v[c:d], causal, 5, scale=0.3)
        close(out[a:b], expected[0])
        close(lse[a:b], expected[1])
    with pytest.raises(ValueError, match="k must have the 24 tokens that kv_indptr counts, got 23"):
        wrapper.run(q, k[:23], v[:23]) if layout == "NHD" else wrapper.run(q, packed[0][:, :23], packed[1][:, :23])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_one_sequence(data):
    draw = data.draw
    n, m, group = draw(st.integers(1, 6)), draw(st.integers(1, 20)), draw(st.integers(1, 3))
    layout, causal = draw(st.sampled_from(["NHD", "HND"])), draw(st.booleans())
    window, cap = draw(st.integers(-2, 9)), draw(st.sampled_from([None, 0.0, 3.0]))
    scale = draw(st.none() | st.floats(0.1, 1.0))
    q, k, v = randn(n, 2 * group, 16), randn(m, 2, 16, seed=1), randn(m, 2, 24, seed=2)
    tensors = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1).contiguous())
    scores = {"window_left": window, "logits_soft_cap": cap, "sm_scale": scale, "kv_layout": layout}
    found = flashinfer.single_prefill_with_kv_cache(q, *tensors, causal=causal, return_lse=True, **scores)
    for got, expected in zip(found, dense(q, k, v, causal, window, cap, scale), strict=True):
        close(got, expected)
    found = flashinfer.single_decode_with_kv_cache(q[-1], *tensors, return_lse=True, **scores)
    for got, expected in zip(found, dense(q[-1:], k, v, False, window, cap, scale), strict=True):
        close(got, expected[0])
    close(flashinfer.single_decode_with_kv_cache(q[-1], *tensors, **scores), found[0])


def planned_prefill(device, **arguments):
    p = make_problem(AttentionSpec(**SPEC), LENS, page_size=4, flat_table=True, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    lists = p.batch.cu_seqlens_q, *page_lists(p)
    wrapper.plan(*lists, *heads(p.spec), 4, causal=True, q_data_type="float32", **arguments)
    return wrapper, p, (p.cache.k, p.cache.v)


def test_bases_and_layouts_of_the_lse_and_buffers_of_the_caller(device):
    wrapper, p, kv = planned_prefill(device)
    out, lse = wrapper.run(p.q, kv, return_lse=True)
    assert Oracle(p).judge(natural((out, lse))).passed
    _, ln = wrapper.run(p.q, kv, return_lse=True, lse_base="ln")
    close(ln * LOG2E, lse)
    _, turned = wrapper.run(p.q, kv, return_lse=True, lse_layout="HN")
    assert turned.is_contiguous() and torch.equal(turned.t(), lse)
    into, room = torch.empty_like(out), torch.empty_like(lse)
    found = wrapper.run(p.q, kv, out=into, lse=room, return_lse=True)
    assert found[0] is into and found[1] is room and torch.equal(into, out) and torch.equal(room, lse)
    found = wrapper.run(p.q, kv, lse=room.zero_(), return_lse=True)
    assert found[1] is room and torch.equal(found[0], out) and torch.equal(room, lse)
    room = torch.empty_like(turned)
    _, found = wrapper.run(p.q, kv, lse=room, return_lse=True, lse_layout="HN", lse_base="ln")
    assert found is room and torch.equal(room.t(), ln)
    assert wrapper.run(p.q, kv, out=into.zero_()) is into and Oracle(p).judge(into).passed
    for got, expected in zip(wrapper.run_return_lse(p.q, kv), (out, lse), strict=True):
        assert torch.equal(got, expected)


def test_a_plan_that_fails_leaves_the_one_before(device, monkeypatch):
    """Its batch too. The plan may fail for want of memory."""
    wrapper, p, kv = planned_prefill(device)
    expected = wrapper.run(p.q, kv)
    one = (x.to(device) for x in (int32(0, 1), int32(0, 1), int32(0), int32(2)))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(quire, "plan", Mock(side_effect=MemoryError))
        wrapper.plan(*one, *heads(p.spec), 4, causal=True, q_data_type="float32")
    assert torch.equal(wrapper.run(p.q, kv), expected)


def test_the_old_forward_attends_by_its_own_scores(device):
    wrapper, p, kv = planned_prefill(device, window_left=2, logits_soft_cap=1.0)
    found = wrapper.forward_return_lse(p.q, kv, causal=True)
    assert Oracle(p).judge(natural(found)).passed
    close(wrapper.forward(p.q, kv, causal=True), found[0])
    p = make_problem(AttentionSpec(**SPEC), DECODES, page_size=4, flat_table=True, one_query=True, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.begin_forward(*page_lists(p), *heads(p.spec), 4, "NONE", 2, q_data_type="float32")
    found = wrapper.forward_return_lse(p.q, (p.cache.k, p.cache.v))
    assert Oracle(p).judge(natural(found)).passed
    close(wrapper.forward(p.q, (p.cache.k, p.cache.v)), found[0])


@pytest.mark.parametrize("scales", ["numbers", "tensors", "one", "none"])
def test_fp8_caches_with_scales(scales, device):
    spec = AttentionSpec(**SPEC, kv_dtype=torch.float8_e4m3fn)
    p = make_problem(spec, DECODES, page_size=4, scales="tensor", flat_table=True, one_query=True, device=device)
    k_scale, v_scale = 0.25, 0.5
    given = {"numbers": (k_scale, v_scale), "one": (k_scale, None), "none": (None, 1.0)}.get(scales)
    if scales == "tensors":
        given = torch.tensor([k_scale], device=device), torch.tensor([v_scale], device=device)
    cache = PagedKVCache(p.cache.k, p.cache.v, "NHD", *(1.0 if x is None else float(x) for x in given))
    object.__setattr__(p, "cache", cache)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*page_lists(p), *heads(spec), 4, q_data_type="float32", kv_data_type="float8_e4m3fn")
    state = wrapper.run(p.q, (cache.k, cache.v), k_scale=given[0], v_scale=given[1], return_lse=True)
    assert Oracle(p).judge(natural(state)).passed


def test_states_merge_in_base_2(device):
    q, k, v = randn(3, 4, 16, device=device), randn(20, 2, 16, device=device), randn(20, 2, 16, seed=1, device=device)
    parts = [
        flashinfer.single_prefill_with_kv_cache(q, k[a:b], v[a:b], return_lse=True)
        for a, b in ((0, 7), (7, 11), (11, 20))
    ]
    expected = dense(q, k, v)
    (va, sa), (vb, sb), (vc, sc) = parts
    found = flashinfer.merge_state(*flashinfer.merge_state(va, sa, vb, sb), vc, sc)
    stacked = flashinfer.merge_states(torch.stack([va, vb, vc], 1), torch.stack([sa, sb, sc], 1))
    for state in (found, stacked):
        close(state[0], expected[0])
        close(state[1], expected[1])
    both = dense(q, k[:11], v[:11])
    out, lse = va.clone(), sa.clone()
    flashinfer.merge_state_in_place(out, lse, vb, sb, torch.tensor([True, False, True], device=device))
    for i, (rows, sums) in enumerate((both, (va, sa), both)):
        close(out[i], rows[i])
        close(lse[i], sums[i])
    flashinfer.merge_state_in_place(va, sa, vb, sb)
    close(va, both[0])
    close(sa, both[1])


@pytest.mark.parametrize("causal", [False, True])
def test_a_cascade_is_attention_over_prefix_and_own_pages(causal, device):
    """Three sequences share two pages, and two of them a third: three levels."""
    own, queries = (3, 6, 5), (2, 1, 3)
    shared = randn(8, 2, 2, 16, device=device), randn(4, 2, 2, 16, seed=1, device=device)
    tails = [randn(n, 2, 2, 16, seed=n, device=device) for n in own]
    cache = torch.full((9, 2, 4, 2, 16), float("nan"), device=device)  # page 0 and last slots are not anyone's
    own_pages = [page for tail in tails for page in tail.split(4)]
    for page, tokens in enumerate([*shared[0].split(4), shared[1], *own_pages], start=1):
        cache[page, :, : len(tokens)] = tokens.transpose(0, 1)
    lists = (
        [int32(0, 6), int32(0, 3, 6), int32(0, 2, 3, 6)],
        [int32(0, 2), int32(0, 1, 1), int32(0, 1, 3, 5)],
        [int32(1, 2), int32(3), int32(4, 5, 6, 7, 8)],
        [int32(4), int32(4, 0), int32(3, 2, 1)],
    )
    q = randn(6, 4, 16, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, workspace(device))
    wrapper.plan(*lists, 4, 2, 16, 4, causal=causal, q_data_type="float32")
    out = wrapper.run(q, cache)
    begin = 0
    for i, (n, tail) in enumerate(zip(queries, tails, strict=True)):
        keys = torch.cat([shared[0], *([shared[1]] if i < 2 else []), tail])
        close(out[begin : begin + n], dense(q[begin : begin + n], keys[:, 0], keys[:, 1], causal)[0])
        begin += n
    single = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace(device))
    single.begin_forward(*([x[2]] for x in lists), 4, 2, 16, 4, causal=causal, q_data_type="float32")
    close(single.forward(q, cache)[:2], dense(q[:2], tails[0][:, 0], tails[0][:, 1], causal)[0])


def test_positions_of_appended_tokens():
    starts, lens = int32(0, 1, 1, 4), int32(5, 3, 9)
    batch, positions = flashinfer.get_batch_indices_positions(starts, lens, 6)
    assert batch.tolist() == [0, 2, 2, 2, -1, -1] and positions.tolist() == [4, 6, 7, 8, 0, 0]
    assert batch.dtype == positions.dtype == torch.int32
    into = torch.full((6,), 7, dtype=torch.int32), torch.full((6,), 7, dtype=torch.int32)
    found = flashinfer.get_batch_indices_positions(starts, lens.long(), 6, *into)
    assert found[0] is into[0] and found[1] is into[1]
    assert torch.equal(into[0], batch) and torch.equal(into[1], positions)
    batch, positions = flashinfer.get_batch_indices_positions(int32(0), int32(), 2)
    assert batch.tolist() == [-1, -1] and positions.tolist() == [0, 0]
    assert flashinfer.get_seq_lens(int32(0, 2, 2, 5), int32(3, 0, 1), 4).tolist() == [7, 0, 9]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_appended_tokens_are_where_their_positions_say(dtype, layout, device):
    """And nothing else is written; -1 marks padding."""
    new, lens = int32(0, 2, 2, 5).to(device), int32(5, 3, 9).to(device)
    starts, pages, last = (x.to(device) for x in (int32(0, 2, 3, 6), int32(4, 1, 6, 2, 7, 3), int32(1, 3, 1)))
    k, v = (randn(6, 2, 16, seed=i, device=device).to(dtype) for i in (1, 2))
    shape = (9, 2, 4, 2, 16) if layout == "NHD" else (9, 2, 2, 4, 16)
    cache = torch.zeros(shape, device=device).to(dtype)
    batch, positions = flashinfer.get_batch_indices_positions(new, lens, 6)
    flashinfer.append_paged_kv_cache(k, v, batch, positions, cache, pages, starts, last, layout)
    expected = torch.zeros(9, 2, 4, 2, 16, device=device)
    for i, (page, slot) in enumerate(((4, 3), (1, 0), (7, 2), (7, 3), (3, 0))):  # the last tokens of each sequence
        expected[page, 0, slot], expected[page, 1, slot] = k[i].float(), v[i].float()
    found = cache.float() if layout == "NHD" else cache.float().transpose(2, 3)
    assert torch.equal(found, expected)


def test_a_token_without_a_page_raises_on_a_cpu_and_is_left_out_elsewhere(monkeypatch):
    cache, k = torch.zeros(4, 2, 4, 2, 16), randn(2, 2, 16)
    lists = int32(1, 2), int32(0, 1, 2), int32(4, 4)
    for batch, position, pages in ((0, 4, lists[0]), (2, 0, lists[0]), (1, -1, lists[0]), (0, 1, int32(9, 2))):
        with pytest.raises(ValueError, match=f"positions must have pages .* got {position} of sequence {batch}"):
            flashinfer.append_paged_kv_cache(k, k, int32(1, batch), int32(0, position), cache, pages, *lists[1:])
    assert not cache.any()
    written = []
    monkeypatch.setattr(quire, "write_kv", lambda k, v, cache, slots: written.append(slots))
    elsewhere = [x.to("meta") for x in (k, k, int32(0, 1), int32(4, 0), cache, *lists)]
    flashinfer.append_paged_kv_cache(*elsewhere)  # and nothing was read
    assert written[0].device.type == "meta" and written[0].shape == (2,)
    monkeypatch.setattr(torch.Tensor, "all", lambda *a: torch.tensor(True))  # the check of CPU tensors
    flashinfer.append_paged_kv_cache(k, k, int32(0, 1), int32(4, 2), cache, *lists)
    assert written[1].tolist() == [-1, 10]


def buffers(device, batch, pages):
    return tuple(torch.zeros(n, dtype=torch.int32, device=device) for n in (batch + 1, pages, batch))


@pytest.mark.parametrize("q_len", [1, 2])
def test_a_decode_wrapper_for_graphs_keeps_its_tensors_and_its_plan(q_len, device, monkeypatch):
    held = buffers(device, 3, 12)
    make, made = quire.plan, []
    monkeypatch.setattr(quire, "plan", lambda *a, **k: made.append(make(*a, **k)) or made[-1])
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *held)
    assert wrapper.is_cuda_graph_enabled
    for lens in ((3, 5, 2), (17, 4, 8), (2, 30, 9)):
        p = make_problem(
            AttentionSpec(**SPEC), [(q_len, n) for n in lens], page_size=4, flat_table=True, seed=lens[0], device=device
        )
        lists = page_lists(p)
        wrapper.plan(*(x.cpu() for x in lists), *heads(p.spec), 4, q_data_type="float32", q_len_per_req=q_len)
        for buffer, x in zip(held, lists, strict=True):
            assert torch.equal(buffer[: len(x)], x)
        assert len(made) == 1  # what a graph has captured
        state = quire.attention(p.q, p.cache, made[0], return_lse=True)  # as its replay does
        assert Oracle(p).judge(state).passed
        assert Oracle(p).judge(natural(wrapper.run(p.q, (p.cache.k, p.cache.v), return_lse=True))).passed
    assert made[0].batch.page_table is held[1] and made[0].batch.cu_pages is held[0]
    assert made[0].bounds.max_seq_len == 48
    before = [x.clone() for x in (*held, made[0].batch.seq_lens)]
    for arguments, message in (
        ((int32(0, 1), int32(1), int32(1)), "last_page_len must have the 3 entries of its buffer, got 1"),
        ((lists[0], torch.zeros(13, dtype=torch.int32), lists[2]), "indices must have at most the 12 entries"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.plan(*arguments, *heads(p.spec), 4, q_data_type="float32", q_len_per_req=q_len)
    with pytest.raises(ValueError, match=f"q_len_per_req must be {q_len} as at the first plan, got 3"):
        wrapper.plan(*lists, *heads(p.spec), 4, q_data_type="float32", q_len_per_req=3)
    for x, old in zip((*held, made[0].batch.seq_lens), before, strict=True):
        assert torch.equal(x, old)


def test_a_decode_wrapper_for_graphs_reads_nothing_from_the_device(monkeypatch):
    monkeypatch.setattr(quire, "plan", lambda *a, **k: SimpleNamespace(kernel="portable"))
    held, lists = buffers("meta", 3, 12), buffers("meta", 3, 5)
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("meta"), *held)
    wrapper.plan(*lists, 4, 2, 16, 4, disable_split_kv=True)  # reading from "meta" raises
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("meta"))
    with pytest.raises(quire.UnsupportedError, match="got meta"):
        wrapper.plan(*lists, 4, 2, 16, 4)
    wrapper.plan(int32(0, 1, 2, 3), int32(4, 5, 6), int32(1, 2, 3), 4, 2, 16, 4)


def test_prefill_wrappers_for_graphs_keep_their_tensors_and_their_plans(device, monkeypatch):
    make, made = quire.plan, []
    monkeypatch.setattr(quire, "plan", lambda *a, **k: made.append(make(*a, **k)) or made[-1])
    queries, held = torch.zeros(4, dtype=torch.int32, device=device), buffers(device, 3, 12)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, queries, *held)
    for lens in ([(2, 3), (4, 5), (2, 2)], [(1, 17), (7, 8), (0, 3)], [(1, 9), (1, 30), (1, 2)]):
        p = make_problem(AttentionSpec(**SPEC), lens, page_size=4, flat_table=True, seed=lens[0][1], device=device)
        lists = p.batch.cu_seqlens_q, *page_lists(p)
        wrapper.plan(*lists, *heads(p.spec), 4, causal=True, q_data_type="float32")
        assert len(made) == 1 and torch.equal(queries, p.batch.cu_seqlens_q)
        assert Oracle(p).judge(quire.attention(p.q, p.cache, made[0])).passed
        assert Oracle(p).judge(natural(wrapper.run(p.q, (p.cache.k, p.cache.v), return_lse=True))).passed
    with pytest.raises(ValueError, match="qo_indptr must count at most the 8 queries of the first plan, got 9"):
        wrapper.plan(int32(0, 3, 6, 9), *lists[1:], *heads(p.spec), 4, causal=True, q_data_type="float32")
    made.clear()
    keys = torch.zeros(3, dtype=torch.int32, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), "NHD", True, torch.zeros_like(keys), keys
    )
    q, k, v = (randn(*s, seed=s[0], device=device) for s in ((6, 4, 16), (20, 2, 16), (20, 2, 16)))
    for n, m in ((4, 7), (1, 15)):
        wrapper.plan(int32(0, n, 6), int32(0, m, 20), 4, 2, 16, causal=True, q_data_type="float32")
        assert len(made) == 1 and keys.tolist() == [0, m, 20]
        out = wrapper.run(q, k, v)
        close(out[:n], dense(q[:n], k[:m], v[:m], True)[0])
        close(out[n:], dense(q[n:], k[m:], v[m:], True)[0])


def test_a_cascade_for_graphs_takes_buffers_by_level(device):
    held = [buffers(device, n, 8) for n in (1, 2)]
    queries = [torch.zeros(n + 1, dtype=torch.int32, device=device) for n in (1, 2)]
    arrays = queries, *(list(x) for x in zip(*held, strict=True))
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(device), "NHD", True, *arrays)
    cache, q = randn(6, 2, 4, 2, 16, device=device), randn(2, 4, 16, device=device)
    wrapper.plan(
        [int32(0, 2), int32(0, 1, 2)],
        [int32(0, 1), int32(0, 1, 2)],
        [int32(3), int32(1, 2)],
        [int32(4), int32(2, 3)],
        *(4, 2, 16, 4),
        q_data_type="float32",
    )
    assert wrapper.is_cuda_graph_enabled and held[1][1].tolist()[:2] == [1, 2]
    out = wrapper.run(q, cache)
    for i, n in enumerate((2, 3)):
        keys = torch.cat([cache[3], cache[i + 1, :, :n]], 1)
        close(out[i : i + 1], dense(q[i : i + 1], keys[0], keys[1])[0])
    with pytest.raises(ValueError, match="paged_kv_indptr_buf_arr must have 2 tensors, got 1"):
        flashinfer.MultiLevelCascadeAttentionWrapper(
            2, workspace(device), "NHD", True, queries, [held[0][0]], *arrays[2:]
        )


def test_a_step_makes_one_plan_for_all_layers(device, monkeypatch):
    make, made = quire.plan, []
    monkeypatch.setattr(quire, "plan", lambda *a, **k: made.append(make(*a, **k)) or made[-1])
    wrapper, p, kv = planned_prefill(device)
    for _ in range(3):
        wrapper.run(p.q, kv)
    assert len(made) == 1
    sinks = randn(4, device=device)
    for _ in range(3):
        wrapper.run(p.q, kv, sinks=sinks)
    assert len(made) == 2 and made[1].spec.sinks
    lists = p.batch.cu_seqlens_q, *page_lists(p)
    wrapper.plan(*lists, *heads(p.spec), 4, causal=True, q_data_type="float32")
    wrapper.run(p.q, kv, sinks=sinks)
    assert len(made) == 3 and made[2].spec.sinks  # as at the last step


MASK = torch.ones(4, dtype=torch.bool)


def refused_plans():
    yield {"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode must be 'NONE' or 'ALIBI', got 'ROPE_LLAMA'; rotate q"
    yield {"o_data_type": "float64"}, r"o_data_type must be one of .*, got torch\.float64"
    yield {"use_token_head_sf": True}, "use_token_head_sf must be left out, got True"
    yield {"q_data_type": torch.float8_e4m3fn}, "dtype must be"


def refused_prefills():
    yield from refused_plans()
    for name in ("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr"):
        yield {name: MASK}, f"{name} must be left out, got a tensor"
    yield {"token_pos_in_items_len": 3}, "token_pos_in_items_len must be left out, got 3"
    yield {"seq_lens_q": MASK}, "seq_lens_q must be left out"


def test_what_is_not_served_is_refused_by_name():
    space, lists = workspace("cpu"), (int32(0, 1), int32(0), int32(2))
    q, kv = torch.zeros(1, 4, 16), torch.zeros(2, 2, 4, 2, 16)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space)
    starts = int32(0, 1)
    shape = {"q_data_type": "float32"}
    unserved = [
        (decode.plan, (*lists, 4, 2, 16, 4), arguments, message)
        for arguments, message in (
            *refused_plans(),
            ({"block_tables": MASK}, "block_tables must be left out"),
            ({"window_right": 2}, "window_right must be left out, got 2"),
        )
    ]
    for arguments, message in (*refused_prefills(), ({"block_tables": MASK}, "block_tables must be left out")):
        unserved.append((prefill.plan, (starts, *lists, 4, 2, 16, 4), arguments, message))
    for arguments, message in (*refused_prefills(), ({"v_indptr": MASK}, "v_indptr must be left out, got")):
        unserved.append((ragged.plan, (starts, starts, 4, 2, 16), arguments, message))
    for function, positional, arguments, message in unserved:
        with pytest.raises(quire.UnsupportedError, match=message):
            function(*positional, **(shape | arguments))
    decode.plan(*lists, 4, 2, 16, 4, **shape)
    prefill.plan(starts, *lists, 4, 2, 16, 4, **shape)
    ragged.plan(starts, int32(0, 2), 4, 2, 16, **shape)
    keys = torch.zeros(2, 2, 16)
    common = [
        ({"k_scale": 0.5}, r"k_scale must be None or 1 for a cache of torch.float32, got 0.5"),
        ({"v_scale": torch.ones(1)}, r"v_scale must be None or 1 for a cache of torch.float32"),
        ({"kv_cache_sf": MASK}, "kv_cache_sf must be left out"),
    ]
    skip = {"skip_softmax_threshold_scale_factor": 1.0}
    for run, tensors, more in (
        (decode.run, (q, kv), [(skip, "skip_softmax_threshold_scale_factor must be left out, got 1.0")]),
        (prefill.run, (q, kv), [({"use_fp16_softmax": True}, "use_fp16_softmax must be left out, got True")]),
        (ragged.run, (q, keys, keys), [({"o_scale": 2.0}, "o_scale must be None or 1, got 2.0")]),
    ):
        for arguments, message in (*common, *more):
            with pytest.raises(quire.UnsupportedError, match=message):
                run(*tensors, **arguments)
        with pytest.raises(quire.UnsupportedError, match="args must be left out, got 1; they belong to custom kernels"):
            run(*tensors, 1.0)
        run(*tensors, q_scale=1.0, k_scale=1, v_scale=1.0, enable_pdl=True)
    for make in (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
    ):
        with pytest.raises(quire.UnsupportedError, match=r"jit_kwargs must be left out, got \{'x': 1\}"):
            make(space, jit_kwargs={"x": 1})
        with pytest.raises(quire.UnsupportedError, match=r"jit_args must be left out, got \['x'\]"):
            make(space, jit_args=["x"])
    one = keys[:1].repeat(1, 2, 1)
    for arguments, message in (
        ({"scale_q": MASK}, "scale_q must be left out"),
        ({"o_dtype": torch.float64}, "o_data_type must be one of"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode must be 'NONE'"),
        ({"pos_encoding_mode": "ALIBI"}, "causal must be True with ALiBi, got False"),
        ({"kv_cache_sf": MASK}, "kv_cache_sf must be left out"),
    ):
        with pytest.raises(quire.UnsupportedError, match=message):
            flashinfer.single_prefill_with_kv_cache(one, one, one, **arguments)
    with pytest.raises(quire.UnsupportedError, match="pos_encoding_mode must be 'NONE'"):
        flashinfer.single_decode_with_kv_cache(one[0], one, one, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(ValueError, match="q_scale must be positive and finite, got -2"):
        flashinfer.single_decode_with_kv_cache(one[0], one, one, q_scale=-2.0)
    with pytest.raises(ValueError, match=r"backend must be one of auto, .*, got 'fa9'; 'auto' is usual"):
        flashinfer.single_prefill_with_kv_cache(one, one, one, backend="fa9")
    with pytest.raises(quire.UnsupportedError, match="q must not require a gradient"):
        flashinfer.single_decode_with_kv_cache(one[0].clone().requires_grad_(), one, one)


def test_what_does_not_fit_the_plan_is_refused_before_anything_is_written():
    space, q, kv = workspace("cpu"), torch.zeros(1, 4, 16), torch.zeros(2, 2, 4, 2, 16)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space)
    with pytest.raises(ValueError, match="plan must be called before run, got no call"):
        wrapper.run(q, kv)
    wrapper.plan(int32(0, 1), int32(0, 1), int32(0), int32(2), 4, 2, 16, 4, q_data_type="float32", window_left=3)
    out = torch.full((1, 4, 16), 7.0)
    for tensors, arguments, message in (
        ((q.half(), kv), {}, "q must be of the planned q_data_type torch.float32, got torch.float16"),
        ((q, kv.half()), {}, "k must be of the planned kv_data_type torch.float32, got torch.float16"),
        ((torch.zeros(2, 4, 16), kv), {}, r"q must be \[num_tokens = 1, num_qo_heads = 4, head_dim = 16\]"),
        ((q, torch.zeros(2, 2, 8, 2, 16)), {}, "paged_kv_cache must have pages of the planned 4 tokens, got 8"),
        ((q, torch.zeros(2, 3, 4, 2, 16)), {}, r"paged_kv_cache must be \[num_pages, 2 = 2, page_size"),
        ((q, (kv[:, 0], kv[:1, 0])), {}, r"paged_kv_cache\[1\] must be \[num_pages = 2"),
        ((q, kv), {"window_left": 2}, "window_left must be the planned 3, got 2"),
        ((q, kv), {"lse_base": "log10", "return_lse": True}, "lse_base must be 'log2' or 'ln', got 'log10'"),
        ((q, kv), {"lse_layout": "H", "return_lse": True}, "lse_layout must be 'NH' or 'HN', got 'H'"),
        ((q, kv), {"lse": torch.zeros(4, 1), "return_lse": True}, r"lse must be \[num_tokens = 1, num_qo_heads = 4\]"),
        ((q, kv), {"k_scale": -1.0}, "k_scale must be positive and finite, got -1.0"),
        ((q, kv), {"sinks": torch.zeros(3)}, "sinks must be"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(*tensors, out=out, **arguments)
        assert (out == 7).all()
    wrapper.run(q, kv, window_left=3)
    for arguments, message in (
        ({"kv_layout": "DHN"}, "kv_layout must be 'NHD' or 'HND', got 'DHN'"),
        ({"use_cuda_graph": True}, "paged_kv_last_page_len_buf must be a tensor where use_cuda_graph=True, got None"),
    ):
        with pytest.raises(ValueError, match=message):
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, **arguments)
    with pytest.raises(TypeError, match="float_workspace_buffer must be a tensor, got 128"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(128)
    with pytest.raises(ValueError, match=r"s_b must be \[seq_len = 1, num_heads = 4\], got \[4\]"):
        flashinfer.merge_state(q, q[..., 0], q, q[0, :, 0])
    with pytest.raises(ValueError, match="v must hold at least one state, got none"):
        flashinfer.merge_states(torch.zeros(1, 0, 4, 16), torch.zeros(1, 0, 4))


def good_calls():
    """Return functions, and arguments that they accept."""
    cache = randn(3, 2, 4, 2, 16)
    heads_of = {"num_qo_heads": 4, "num_kv_heads": 2, "page_size": 4, "q_data_type": "float32"}
    scores = {"window_left": 3, "logits_soft_cap": 2.0, "sm_scale": 0.5, "pos_encoding_mode": "NONE"}
    shared = heads_of | scores | {"kv_data_type": torch.float32, "disable_split_kv": False, "non_blocking": True}
    lists = {"indptr": int32(0, 1, 2), "indices": int32(1, 2), "last_page_len": int32(2, 3)}
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    yield decode.plan, lists | shared | {"head_dim": 16, "q_len_per_req": 1, "seq_lens": int32(2, 3)}
    paged = {f"paged_kv_{name}": x for name, x in lists.items()} | {"qo_indptr": int32(0, 1, 3), "causal": True}
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    bounds = {"max_token_per_sequence": 2, "max_sequence_kv": 3, "head_dim_qk": 16, "head_dim_vo": 16}
    yield prefill.plan, paged | shared | bounds | {"use_fp16_qk_reduction": True}
    masks = {"custom_mask": torch.ones(8, dtype=torch.bool), "packed_custom_mask": torch.tensor([3, 63]).byte()}
    for name, mask in masks.items():
        yield prefill.plan, paged | heads_of | bounds | {name: mask}
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu"))
    starts = {"qo_indptr": int32(0, 1, 3), "kv_indptr": int32(0, 2, 5), "causal": True}
    yield ragged.plan, starts | {n: x for n, x in (shared | bounds).items() if n != "page_size"}
    planned = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    planned.plan(**(paged | heads_of), head_dim_qk=16)
    room = {"out": torch.zeros(3, 4, 16), "lse": torch.zeros(3, 4), "return_lse": True, "sinks": randn(4)}
    yield planned.run, {"q": randn(3, 4, 16), "paged_kv_cache": cache, "lse_base": "ln", "lse_layout": "NH"} | room
    one = {"k": randn(5, 2, 16), "v": randn(5, 2, 16, seed=1), "kv_layout": "NHD", "return_lse": True} | scores
    yield flashinfer.single_decode_with_kv_cache, one | {"q": randn(4, 16), "use_tensor_cores": True}
    yield flashinfer.single_prefill_with_kv_cache, one | {"q": randn(3, 4, 16), "causal": True, "backend": "auto"}
    a, b = {"v_a": randn(3, 4, 16), "s_a": randn(3, 4)}, {"v_b": randn(3, 4, 16, seed=1), "s_b": randn(3, 4, seed=1)}
    yield flashinfer.merge_state, a | b
    in_place = {"v": a["v_a"], "s": a["s_a"], "v_other": b["v_b"], "s_other": b["s_b"]}
    yield flashinfer.merge_state_in_place, in_place | {"mask": torch.tensor([True, False, True])}
    yield flashinfer.merge_states, {"v": randn(3, 2, 4, 16), "s": randn(3, 2, 4)}
    yield flashinfer.get_seq_lens, {"kv_indptr": int32(0, 1), "kv_last_page_len": int32(3), "page_size": 4}
    append = {"append_indptr": int32(0, 1, 3), "seq_lens": int32(2, 3), "nnz": 3}
    yield (
        flashinfer.get_batch_indices_positions,
        append | {"batch_indices": int32(0, 0, 0), "positions": int32(0, 0, 0)},
    )
    tokens = {"append_key": randn(3, 2, 16), "append_value": randn(3, 2, 16, seed=1), "paged_kv_cache": cache}
    where = {"batch_indices": int32(0, 1, 1), "positions": int32(1, 1, 2), "kv_layout": "NHD"}
    yield flashinfer.append_paged_kv_cache, tokens | where | {f"kv_{name}": x for name, x in lists.items()}
    yield (
        flashinfer.fast_decode_plan,
        {"self": decode, "head_dim": 16, "q_len_per_req": 1} | (lists | shared),
    )
    latents = randn(3, 4, 48)
    latent_lists = {"kv_indices": int32(1, 2), "kv_indptr": int32(0, 1, 2)}
    widths = {"num_heads": 4, "head_dim_ckv": 32, "head_dim_kpe": 16, "page_size": 4, "sm_scale": 0.5}
    starts = {"qo_indptr": int32(0, 1, 3), "kv_len_arr": int32(2, 3), "causal": True}
    of_latents = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu"))
    good = latent_lists | widths | starts | {"q_data_type": "float32", "kv_data_type": torch.float32}
    yield of_latents.plan, good | {"use_sinks": False}
    planned = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu"))
    planned.plan(**good)
    queries = {"query": randn(3, 4, 48), "kv_cache": latents, "return_lse_base_on_e": True}
    caches = {"ckv_cache": latents[..., :32], "kpe_cache": latents[..., 32:]}
    room = {"out": torch.zeros(3, 4, 32), "lse": torch.zeros(3, 4), "return_lse": True, "sinks": randn(4)}
    yield planned.run, queries | room
    new = {"append_ckv": randn(3, 32), "append_kpe": randn(3, 16), "kv_last_page_len": int32(2, 3)}
    del where["kv_layout"]
    yield flashinfer.append_paged_mla_kv_cache, new | where | caches | latent_lists
    whole = flashinfer.BatchAttention(device="cpu")
    dtypes = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 16, "head_dim_vo": 16, "page_size": 4}
    good = latent_lists | starts | sizes | dtypes | {"sm_scale": 0.5, "logits_soft_cap": 2.0}
    yield whole.plan, good
    planned = flashinfer.BatchAttention(device="cpu")
    planned.plan(**good)
    room = {"out": torch.zeros(3, 4, 16), "lse": torch.zeros(3, 4)}
    yield planned.run, {"q": randn(3, 4, 16), "kv_cache": cache, "logits_soft_cap": 2.0} | room
    blocks = {"block_tables": int32(1, 2)[:, None], "seq_lens": int32(2, 3), "bmm1_scale": 0.5, "bmm2_scale": 1.0}
    heads_first = {"kv_cache": cache.transpose(2, 3), "kv_layout": "HND", "workspace_buffer": None}
    room |= {"return_lse": True, "sinks": randn(4), "window_left": 3, "out_dtype": torch.float32}
    of_decode = {"cum_seq_lens_q": int32(0, 1, 3), "max_q_len": 2, "max_seq_len": 3, "backend": "xqa"}
    query = {"query": randn(3, 4, 16)}
    yield flashinfer.trtllm_batch_decode_with_kv_cache, blocks | heads_first | room | query | of_decode
    of_prompts = {"cum_seq_lens_q": int32(0, 1, 3), "cum_seq_lens_kv": None, "max_q_len": 2, "max_kv_len": 3}
    causal = {"causal": True, "batch_size": 2}
    yield flashinfer.trtllm_batch_context_with_kv_cache, blocks | heads_first | room | query | of_prompts | causal
    packed = {"key": randn(5, 2, 16), "value": randn(5, 2, 16, seed=1), "cum_seq_lens_kv": int32(0, 2, 5)}
    room["attention_sinks"] = room.pop("sinks")
    del room["out_dtype"], blocks["block_tables"]
    ragged = query | of_prompts | packed | room | blocks | {"is_causal": True, "batch_size": 2, "enable_pdl": None}
    yield flashinfer.trtllm_ragged_attention_deepseek, ragged | {"workspace_buffer": None, "o_sf_scale": None}
    of_latents = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": None, "workspace_buffer": None}
    room = {"out": torch.zeros(2, 2, 4, 32), "lse": torch.zeros(4, 4), "return_lse": True}
    query = {"query": randn(2, 2, 4, 48), "kv_cache": latents, "max_seq_len": 3}
    blocks["block_tables"] = int32(1, 2)[:, None]
    yield flashinfer.trtllm_batch_decode_with_kv_cache_mla, blocks | of_latents | room | query


def bad_values(name, good, whole_cache=False):
    """Return what may not stand in the place of a good argument, by its type."""
    may_be_left_out = ("seq_lens", "max_token_per_sequence", "max_sequence_kv", "head_dim_vo", "kv_data_type", "out")
    may_be_left_out += (
        "custom_mask",
        "packed_custom_mask",
        "lse",
        "sinks",
        "mask",
        "batch_indices",
        "positions",
        "logits_soft_cap",
        "sm_scale",
    )
    may_be_left_out += ("data_type", "return_lse_base", "cum_seq_lens_q", "attention_sinks", "out_dtype")
    may_be_left_out += ("ckv_cache", "kpe_cache") if whole_cache else ()
    nothing = [] if name in may_be_left_out else [None]
    if good is None or not isinstance(good, torch.Tensor | torch.dtype | str | int | float):
        return []
    if isinstance(good, torch.dtype) or name == "q_data_type":
        return [*nothing, 4, "float1", "Tensor", float, torch.int32]
    if isinstance(good, str):
        return [None, 4, "x", good.lower() + "_", torch.ones(2)]
    if isinstance(good, bool):
        return [None, "no", 1, 0.0, torch.ones(2)]
    if isinstance(good, int):
        return [*nothing, "1", 2.5, float("nan"), True, [1], torch.tensor(1.0), torch.ones(2)]
    if isinstance(good, float):
        return ["1", [1.0], float("nan"), True, torch.ones(2), float("inf")]
    other = [] if good.dtype is torch.bool else [good > 0, good.to(torch.complex64)]
    if good.dtype is torch.int32:
        other.append(good.float())
    return [*nothing, *other, good[None], good[..., None], good.tolist(), good.numpy(), "x"]


@pytest.mark.parametrize("i", range(24))
def test_no_bad_argument_is_accepted_and_none_ends_inside_python(i):
    """Each error has the house grammar; nothing was written."""
    function, good = list(good_calls())[i]
    for name, value in good.items():
        for bad in bad_values(name, value, function.__name__ == "append_paged_mla_kv_cache"):
            arguments = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in good.items()} | {name: bad}
            tensors = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}
            before = {n: x.clone() for n, x in tensors.items()}
            try:
                with pytest.raises((ValueError, TypeError, quire.UnsupportedError), match=r" must .*, got .*; "):
                    function(**arguments)
            except BaseException as error:
                raise AssertionError(f"{function.__name__} took {describe(bad)} for {name}") from error
            assert all(torch.equal(x, before[n]) for n, x in tensors.items()), (name, bad)
    function(**good)
