"""FlashInfer's newer names against the float64 oracle, and what each argument's table says.

Valid with and without TRITON_INTERPRET=1.
"""

import functools
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import quire
from quire import AttentionSpec, State
from quire.integrations import flashinfer
from quire.integrations.flashinfer import decode, mla, prefill, signatures
from quire.integrations.flashinfer.arguments import alibi_slopes
from quire.testing import Oracle, make_problem
from tests.engines import flashinfer_imports
from tests.integrations.test_flashinfer import (
    DECODES,
    LENS,
    LOG2E,
    SPEC,
    close,
    dense,
    find,
    heads,
    int32,
    natural,
    page_lists,
    planned_prefill,
    randn,
    workspace,
)

PARAMETERS = {  # read in FlashInfer 0.7.4
    "BatchAttention": "kv_layout device",
    "BatchAttention.plan": (
        "qo_indptr kv_indptr kv_indices kv_len_arr num_qo_heads num_kv_heads head_dim_qk head_dim_vo page_size causal "
        "sm_scale logits_soft_cap q_data_type kv_data_type use_profiler"
    ),
    "BatchAttention.run": "q kv_cache out lse k_scale v_scale logits_soft_cap profiler_buffer kv_cache_sf",
    "BatchAttentionWithAttentionSinkWrapper": (
        "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
        "paged_kv_last_page_len_buf custom_mask_buf mask_indptr_buf backend pos_encoding_mode use_fp16_qk_reduction "
        "q_data_type kv_data_type head_dim_qk head_dim_vo window_left"
    ),
    "BatchMLAPagedAttentionWrapper": (
        "float_workspace_buffer use_cuda_graph qo_indptr kv_indptr kv_indices kv_len_arr backend"
    ),
    "BatchMLAPagedAttentionWrapper.plan": (
        "qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe page_size causal sm_scale "
        "q_data_type kv_data_type use_profiler metadata cum_seq_lens_q block_tables seq_lens max_q_len query_layout "
        "kv_cache_layout lse_mode output_dtype output_scale scale_mode skip_softmax enable_pdl use_sinks"
    ),
    "BatchMLAPagedAttentionWrapper.run": (
        "q_nope q_pe ckv_cache kpe_cache out lse return_lse profiler_buffer kv_len page_table return_lse_base_on_e "
        "o_scale query kv_cache ckv_scale ckv_scale_arr kpe_scale sinks skip_softmax_threshold_scale_factor bmm1_scale "
        "bmm2_scale"
    ),
    "append_paged_mla_kv_cache": (
        "append_ckv append_kpe batch_indices positions ckv_cache kpe_cache kv_indices kv_indptr kv_last_page_len"
    ),
    "trtllm_batch_context_with_kv_cache": (
        "query kv_cache workspace_buffer block_tables seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale batch_size "
        "cum_seq_lens_q cum_seq_lens_kv window_left out out_dtype o_sf_scale o_sf_vec_size kv_layout enable_pdl sinks "
        "kv_cache_sf skip_softmax_threshold_scale_factor uses_shared_paged_kv_idx causal lse return_lse "
        "multi_ctas_kv_counter_buffer use_fp16_softmax uses_spcompress backend window_right "
        "variable_window_token_starts variable_window_token_ends"
    ),
    "trtllm_batch_decode_with_kv_cache": (
        "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale window_left out "
        "out_dtype o_sf_scale o_sf_vec_size sinks kv_layout enable_pdl backend q_len_per_req o_scale mask max_q_len "
        "cum_seq_lens_q skip_softmax_threshold_scale_factor kv_cache_sf uses_shared_paged_kv_idx lse return_lse "
        "bmm1_scale_log2 multi_ctas_kv_counter_buffer enable_block_sparse_attention cp_world cp_rank "
        "causal_seqlens_kv_global bf16q_fp8kv_transform_mode request_order request_order_plan sparse_top_k "
        "length_aware_schedule"
    ),
    "trtllm_batch_decode_with_kv_cache_mla": (
        "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables seq_lens "
        "max_seq_len sparse_mla_top_k out bmm1_scale bmm2_scale sinks skip_softmax_threshold_scale_factor enable_pdl "
        "backend is_var_seq uses_shared_paged_kv_idx lse return_lse cute_dsl_impl kv_scale_format cum_seq_lens_q "
        "max_q_len multi_ctas_kv_counter_buffer sparse_mla_top_k_lens enable_dcp cp_world cp_rank "
        "causal_seqlens_kv_global use_fp16_softmax return_lse_base"
    ),
    "trtllm_ragged_attention_deepseek": (
        "query key value workspace_buffer seq_lens max_q_len max_kv_len bmm1_scale bmm2_scale o_sf_scale batch_size "
        "window_left cum_seq_lens_q cum_seq_lens_kv enable_pdl is_causal return_lse attention_sinks "
        "skip_softmax_threshold_scale_factor out lse sage_attn_sfs num_elts_per_sage_attn_blk backend q_seq_lens_cpu "
        "kv_seq_lens_cpu use_fp16_softmax uses_spcompress skip_all_rows_active_check"
    ),
    "xqa_batch_decode_with_kv_cache": (
        "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale window_left out sinks "
        "kv_layout enable_pdl q_len_per_req o_scale mask kv_cache_sf q_cu_seq_lens"
    ),
    "xqa_batch_decode_with_kv_cache_mla": (
        "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables seq_lens "
        "max_seq_len out bmm1_scale bmm2_scale sinks enable_pdl"
    ),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_have_flashinfer_s_names_and_order_and_each_is_in_the_docstring(name):
    function = find(name)
    function = function.__init__ if inspect.isclass(function) else function
    names = [p for p in inspect.signature(function).parameters if p != "self"]
    assert names == PARAMETERS[name].split()
    text = inspect.getdoc(function)
    args = text[text.index("Args:") : text.index("Raises:")]
    for parameter in names:
        assert any(parameter in line.partition(":")[0].split(", ") for line in args.replace("    ", "").splitlines())


def test_each_argument_of_a_function_with_a_table_is_served_or_refused_by_name():
    """And a value other than the default of one that is refused raises before anything else is looked at."""
    checked = 0
    members = {f"{owner}.{name}": x for owner in flashinfer.__all__ for name, x in vars(find(owner)).items()}
    members |= {name: find(name) for name in flashinfer.__all__}
    for function in members.values():
        table = getattr(function, "table", None)
        if table is None:
            continue
        parameters = inspect.signature(function).parameters.values()
        needed = {p.name: None for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
        assert set(table) == {p.name for p in parameters} - ({"self"} - set(table))
        for name, argument in table.items():
            assert argument.words and argument.kind in ("served", "flag", "refused")
            if argument.kind == "refused" and name != "args":
                with pytest.raises(quire.UnsupportedError, match=f"^{name} must be left out, got 'hostile'; "):
                    function(**needed | {name: "hostile"})
                checked += 1
    assert checked > 90


def test_modules_have_flashinfer_s_paths():
    for module, names in (
        (decode, "fast_decode_plan single_decode_with_kv_cache trtllm_batch_decode_with_kv_cache"),
        (decode, "BatchDecodeWithPagedKVCacheWrapper trtllm_batch_decode_with_kv_cache_mla"),
        (prefill, "single_prefill_with_kv_cache BatchPrefillWithRaggedKVCacheWrapper"),
        (prefill, "BatchPrefillWithPagedKVCacheWrapper trtllm_batch_context_with_kv_cache"),
        (prefill, "trtllm_ragged_attention_deepseek"),
        (mla, "BatchMLAPagedAttentionWrapper trtllm_batch_decode_with_kv_cache_mla"),
    ):
        for name in names.split():
            assert getattr(module, name) is getattr(flashinfer, name)


def test_the_page_counts_the_names_that_engines_import():
    """`tests/engines` compare the names with what the engines' sources import."""
    names = {*flashinfer_imports.OF_VLLM.split(), *flashinfer_imports.OF_SGLANG.split()}
    page = (Path(__file__).parents[2] / "docs/flashinfer.md").read_text("utf-8")
    assert names <= set(flashinfer.__all__)
    assert len(names) == 13 and "vLLM 0.33 and SGLang 0.5.23 import thirteen of these names" in page


def test_an_lse_buffer_is_written_whether_or_not_the_lse_is_returned(device):
    wrapper, p, kv = planned_prefill(device)
    out, lse = wrapper.run(p.q, kv, return_lse=True)
    for layout, room in (("NH", torch.zeros_like(lse)), ("HN", torch.zeros_like(lse.t().contiguous()))):
        found = wrapper.run(p.q, kv, lse=room, lse_layout=layout)
        assert torch.equal(found, out) and torch.equal(room if layout == "NH" else room.t(), lse)
    one = make_problem(AttentionSpec(**SPEC), DECODES, page_size=4, flat_table=True, one_query=True, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*page_lists(one), *heads(one.spec), 4, q_data_type="float32")
    room = torch.zeros(4, 4, device=device)
    out = wrapper.run(one.q, (one.cache.k, one.cache.v), lse=room)
    assert Oracle(one).judge(natural((out, room))).passed
    packed = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device))
    packed.plan(int32(0, 2), int32(0, 7), 4, 2, 16, q_data_type="float32")
    q, k = randn(2, 4, 16, device=device), randn(7, 2, 16, device=device)
    room = torch.zeros(2, 4, device=device)
    expected = dense(q, k, k)
    for got, wanted in zip((packed.run(q, k, k, lse=room), room), expected, strict=True):
        close(got, wanted)


def test_packed_keys_have_sinks(device):
    q, k, v = randn(5, 4, 16, device=device), randn(9, 2, 16, device=device), randn(9, 2, 16, seed=1, device=device)
    sinks = randn(4, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), backend="fa2")
    on_host = {"qo_indptr_cpu": int32(0, 5), "kv_indptr_cpu": int32(0, 9), "uniform_q_len": 5}
    wrapper.plan(int32(0, 5), int32(0, 9), 4, 2, 16, causal=True, q_data_type="float32", **on_host)
    out, lse = wrapper.run(q, k, v, sinks=sinks, return_lse=True)
    plain, sums = dense(q, k, v, True)
    with_sinks = torch.logaddexp2(sums, sinks.double() * LOG2E)
    close(lse, with_sinks)
    close(out, plain * (2.0 ** (sums - with_sinks))[..., None])
    with pytest.raises(ValueError, match=r"kv_indptr_cpu must be \[batch_size \+ 1 = 2\], got \[3\]"):
        wrapper.plan(int32(0, 5), int32(0, 9), 4, 2, 16, kv_indptr_cpu=int32(0, 1, 2))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_one_token_need_no_dimension_for_it(layout, device):
    p = make_problem(AttentionSpec(**SPEC), DECODES, page_size=1, flat_table=True, one_query=True, device=device)
    k, v = p.cache.k[:, 0], p.cache.v[:, 0]  # [num_pages, num_kv_heads, head_dim]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout, backend="fa3")
    wrapper.plan(*page_lists(p), *heads(p.spec), 1, q_data_type="float32")
    for pages in ((k, v), torch.stack([k, v], 1)):
        assert Oracle(p).judge(wrapper.run(p.q, pages)).passed


def test_a_factor_on_the_queries_is_one_on_the_scores(device):
    p = make_problem(AttentionSpec(**SPEC, softmax_scale=0.4), LENS, page_size=4, flat_table=True, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    lists = p.batch.cu_seqlens_q, *page_lists(p)
    wrapper.plan(*lists, *heads(p.spec), 4, causal=True, q_data_type="float32", sm_scale=0.2)
    assert Oracle(p).judge(wrapper.run(p.q, (p.cache.k, p.cache.v), q_scale=2.0)).passed
    q, k = randn(4, 16, device=device), randn(7, 2, 16, device=device)
    close(flashinfer.single_decode_with_kv_cache(q, k, k, q_scale=3.0), dense(q[None], k, k, scale=0.75)[0][0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_outputs_of_another_dtype(dtype, device):
    wrapper, p, kv = planned_prefill(device, o_data_type=dtype)
    expected, _ = wrapper.run(p.q, kv, return_lse=True)
    assert expected.dtype is dtype
    exact = planned_prefill(device)[0].run(p.q, kv)
    assert torch.equal(expected.float(), exact.to(dtype).float())
    room, lse = torch.empty_like(expected), torch.zeros(expected.shape[:2], device=device)
    assert wrapper.run(p.q, kv, out=room, lse=lse) is room and torch.equal(room.float(), expected.float())
    with pytest.raises(ValueError, match="out must be of the planned o_data_type"):
        wrapper.run(p.q, kv, out=exact)


def test_alibi_has_the_slopes_of_its_paper(device):
    assert alibi_slopes(8, torch.device("cpu")).tolist() == [2.0**-i for i in range(1, 9)]
    twelve = alibi_slopes(12, torch.device("cpu")).tolist()
    assert twelve == pytest.approx([2.0**-i for i in range(1, 9)] + [2.0 ** -(i + 0.5) for i in range(4)])
    spec = AttentionSpec(**SPEC, alibi=True)
    p = make_problem(spec, LENS, page_size=4, flat_table=True, device=device)
    p = replace(p, alibi_slopes=alibi_slopes(4, p.q.device))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    lists = p.batch.cu_seqlens_q, *page_lists(p)
    wrapper.plan(*lists, *heads(spec), 4, causal=True, q_data_type="float32", pos_encoding_mode="ALIBI")
    assert Oracle(p).judge(wrapper.run(p.q, (p.cache.k, p.cache.v))).passed
    with pytest.raises(quire.UnsupportedError, match="return_lse must be False with ALiBi, got True"):
        wrapper.run(p.q, (p.cache.k, p.cache.v), return_lse=True)
    with pytest.raises(quire.UnsupportedError, match="logits_soft_cap must be None with ALiBi"):
        wrapper.plan(*lists, *heads(spec), 4, causal=True, pos_encoding_mode="ALIBI", logits_soft_cap=2.0)
    one = make_problem(spec, DECODES, page_size=4, flat_table=True, one_query=True, device=device)
    one = replace(one, alibi_slopes=alibi_slopes(4, one.q.device))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*page_lists(one), *heads(spec), 4, "ALIBI", q_data_type="float32")
    assert Oracle(one).judge(wrapper.run(one.q, (one.cache.k, one.cache.v))).passed


@pytest.mark.parametrize("is_packed", [False, True])
def test_masks_of_intervals_have_any_number_of_queries(is_packed, device):
    """Among them rows that see nothing, a window, and later keys."""
    lens = [(70, 83), (3, 2), (2, 9)]
    p = make_problem(AttentionSpec(**SPEC, causal=False), lens, page_size=4, flat_table=True, device=device)
    masks = []
    for n, m in lens:
        i, j = torch.arange(n)[:, None], torch.arange(m)
        masks.append((j >= i // 2) & (j < i // 2 + 1 + i % 5) & (i != 1))
    flat = torch.cat([mask.flatten() for mask in masks])
    given = {"custom_mask": flat}
    if is_packed:
        parts = [torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 8)).view(-1, 8) for x in masks]
        places = 2 ** torch.arange(8)
        given = {"packed_custom_mask": torch.cat([(x * places).sum(1) for x in parts]).to(torch.uint8)}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(p.batch.cu_seqlens_q, *page_lists(p), *heads(p.spec), 4, q_data_type="float32", **given)
    out, lse = wrapper.run(p.q, (p.cache.k, p.cache.v), return_lse=True)
    starts, pages, _ = (x.cpu() for x in page_lists(p))
    begin = 0
    for seq, (mask, (n, m)) in enumerate(zip(masks, lens, strict=True)):
        own = pages[starts[seq] : starts[seq + 1]].long().to(p.q.device)
        k, v = (x[own].flatten(0, 1)[:m] for x in (p.cache.k, p.cache.v))
        expected = dense(p.q[begin : begin + n], k, v, mask=mask.to(p.q.device))
        close(out[begin : begin + n], expected[0])
        close(lse[begin : begin + n], expected[1])
        begin += n


def test_an_engine_may_put_fast_decode_plan_in_the_place_of_plan(device):
    p = make_problem(AttentionSpec(**SPEC), DECODES, page_size=4, flat_table=True, one_query=True, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    starts, pages, last = page_lists(p)
    wrapper.begin_forward = functools.partial(flashinfer.fast_decode_plan, wrapper)
    for override in (None, starts.cpu()):
        given = starts if override is None else torch.zeros_like(starts)
        wrapper.begin_forward(
            given, pages, last, *heads(p.spec), 4, data_type="float32", global_override_indptr_cpu=override
        )
        assert Oracle(p).judge(wrapper.run(p.q, (p.cache.k, p.cache.v))).passed
    with pytest.raises(TypeError, match="self must be a wrapper for decode, got 3; bind it"):
        flashinfer.fast_decode_plan(3, starts, pages, last, *heads(p.spec), 4)


def test_the_first_plan_for_graphs_need_not_be_the_largest_where_the_rows_are_said(device):
    p = make_problem(AttentionSpec(**SPEC), [(2, 5), (3, 9)], page_size=4, flat_table=True, device=device)
    held = [torch.zeros(n, dtype=torch.int32, device=device) for n in (3, 3, 8, 2)]
    make = functools.partial(flashinfer.BatchPrefillWithPagedKVCacheWrapper, workspace(device), "NHD", True, *held)
    one = int32(0, 1, 2), int32(0, 1, 2), int32(0, 1), int32(1, 1)
    for wrapper, is_served in ((make(), False), (make(max_total_num_rows=5), True)):
        wrapper.plan(*one, *heads(p.spec), 4, causal=True, q_data_type="float32")
        lists = p.batch.cu_seqlens_q, *page_lists(p)
        plan = functools.partial(wrapper.plan, *lists, *heads(p.spec), 4, causal=True, q_data_type="float32")
        if not is_served:
            with pytest.raises(
                ValueError, match=r"at most the 2 queries of the first plan, got 5; .* max_total_num_rows"
            ):
                plan()
            continue
        plan()
        assert Oracle(p).judge(wrapper.run(p.q, (p.cache.k, p.cache.v))).passed
    with pytest.raises(ValueError, match="max_total_num_rows must be None without use_cuda_graph, got 4"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), max_total_num_rows=4)


def test_batch_attention_and_the_wrapper_with_sinks(device):
    p = make_problem(AttentionSpec(**SPEC, sinks=True), LENS, page_size=4, flat_table=True, device=device)
    lists = p.batch.cu_seqlens_q, *page_lists(p)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(device), head_dim_qk=16, head_dim_vo=16)
    wrapper.plan(*lists, *heads(p.spec), 4, causal=True, q_data_type="float32")
    kv = p.cache.k, p.cache.v
    assert Oracle(p).judge(natural(wrapper.run(p.q, kv, p.sinks, 0.25, return_lse=True))).passed
    assert Oracle(p).judge(natural(wrapper.run_return_lse(p.q, kv, p.sinks, 0.125, q_scale=2.0))).passed
    with pytest.raises(TypeError, match="args must be the sinks and sm_scale, got 1 of them"):
        wrapper.run(p.q, kv, p.sinks)
    p = make_problem(AttentionSpec(**SPEC, softcap=3.0), LENS, page_size=4, flat_table=True, device=device)
    lists = p.batch.cu_seqlens_q, *page_lists(p)[:2], p.batch.seq_lens
    whole = flashinfer.BatchAttention(device=device)
    dtypes = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    whole.plan(*lists, 4, 2, 16, 16, 4, causal=True, logits_soft_cap=3.0, **dtypes)
    assert Oracle(p).judge(natural(whole.run(p.q, (p.cache.k, p.cache.v), logits_soft_cap=3.0))).passed
    with pytest.raises(ValueError, match=r"logits_soft_cap must be 0 or the planned 3\.0, got 2\.0"):
        whole.run(p.q, (p.cache.k, p.cache.v), logits_soft_cap=2.0)


MLA = {"num_q_heads": 4, "softmax_scale": 0.1, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "dtype": torch.float32}


@pytest.mark.parametrize("graphs", [False, True])
def test_the_wrapper_for_latents(graphs, device):
    spec = AttentionSpec.mla(**MLA)
    p = make_problem(spec, LENS, page_size=4, flat_table=True, device=device)
    pages = p.cache.latents
    parts = {"ckv_cache": pages[..., :32], "kpe_cache": pages[..., 32:]}
    lists = p.batch.cu_seqlens_q, p.batch.cu_pages, p.batch.page_table, p.batch.seq_lens
    held = [torch.zeros_like(x) for x in lists] if graphs else []
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device), graphs, *held, backend="fa3")
    plan = functools.partial(wrapper.plan, *lists, 4, 32, 16, 4, True, 0.1, torch.float32, torch.float32)
    plan()
    q = {"q_nope": p.q[..., :32], "q_pe": p.q[..., 32:]}
    lse = torch.zeros(p.q.shape[:2], device=device)
    assert Oracle(p).judge(natural(wrapper.run(**q, **parts, return_lse=True))).passed
    out = wrapper.run(query=p.q, kv_cache=pages, lse=lse, return_lse_base_on_e=True)
    assert Oracle(p).judge(State(out, lse)).passed
    for given, message in (
        (
            q | {"ckv_cache": parts["ckv_cache"], "kpe_cache": parts["kpe_cache"].clone()},
            "kpe_cache must be the columns",
        ),
        (q | parts | {"query": p.q}, "q_nope must be left out where query is given"),
        (q | {"ckv_cache": pages[..., :32]}, "kpe_cache must be a tensor, got None; or pass kv_cache"),
        ({"query": p.q[1:], "kv_cache": pages}, "q_nope must be"),
        ({"query": p.q, "kv_cache": pages[:, :2]}, "ckv_cache must be"),
        ({"query": p.q, "kv_cache": pages.half()}, "ckv_cache must be of the planned dtype torch.float32, got"),
        (q | parts | {"kpe_scale": 2.0}, "kpe_scale must be ckv_scale, got 2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(**given)
    with pytest.raises(TypeError, match="sm_scale must be a number, got None"):
        wrapper.plan(*lists, 4, 32, 16, 4, True, None, torch.float32)
    if graphs:
        with pytest.raises(ValueError, match="kv_len_arr must have the 4 entries of its buffer, got 1"):
            wrapper.plan(int32(0, 1), int32(0, 1), int32(0), int32(1), 4, 32, 16, 4, True, 0.1, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("together", [False, True])
def test_appended_latents_are_where_their_positions_say(dtype, together, device):
    new, lens = int32(0, 2, 2, 5).to(device), int32(5, 3, 9).to(device)
    starts, pages, last = (x.to(device) for x in (int32(0, 2, 3, 6), int32(4, 1, 6, 2, 7, 3), int32(1, 3, 1)))
    whole = torch.zeros(9, 4, 48, device=device).to(dtype)
    ckv, kpe = (whole[..., :32], whole[..., 32:]) if together else (whole[..., :32].clone(), whole[..., 32:].clone())
    a, b = (randn(6, n, device=device).to(dtype) for n in (32, 16))
    batch, positions = flashinfer.get_batch_indices_positions(new, lens, 6)
    flashinfer.append_paged_mla_kv_cache(a, b, batch, positions, ckv, kpe, pages, starts, last)
    expected = torch.zeros(9, 4, 48, device=device)
    for i, (page, slot) in enumerate(((4, 3), (1, 0), (7, 2), (7, 3), (3, 0))):
        expected[page, slot] = torch.cat([a[i], b[i]]).float()
    assert torch.equal(torch.cat([ckv, kpe], -1).float(), expected)
    flashinfer.append_paged_mla_kv_cache(2 * a.float(), b, batch, positions, ckv, None, pages, starts, last)
    assert torch.equal(kpe.float(), expected[..., 32:]) and not torch.equal(ckv.float(), expected[..., :32])
    for changed, error, message in (
        ({"kpe_cache": kpe[:, :2]}, ValueError, "kpe_cache must have ckv_cache's pages"),
        ({"append_kpe": a}, ValueError, "append_kpe must be"),
        ({"append_ckv": a.to(torch.int32)}, TypeError, "append_ckv must be of the cache's dtype"),
        ({"ckv_cache": ckv.to(torch.uint8)}, quire.UnsupportedError, "ckv_cache must be of the latents' dtype"),
    ):
        given = {"append_ckv": a, "append_kpe": b, "ckv_cache": ckv, "kpe_cache": kpe, "batch_indices": batch}
        lists = {"positions": positions, "kv_indices": pages, "kv_indptr": starts, "kv_last_page_len": last}
        with pytest.raises(error, match=message):
            flashinfer.append_paged_mla_kv_cache(**given | lists | changed)


def block_problem(lens, layout="HND", device="cpu", **fields):
    spec = AttentionSpec(**SPEC | fields)
    return make_problem(spec, lens, page_size=4, layout=layout, one_query=all(n == 1 for n, _ in lens), device=device)


@pytest.mark.parametrize("fields", [{}, {"sinks": True}, {"sliding_window": 4}])
def test_decode_by_block_tables(fields, device):
    scale, window = 0.3, 3 if "sliding_window" in fields else -1
    p = block_problem(DECODES, softmax_scale=scale, device=device, **fields)
    kv, given = (p.cache.k, p.cache.v), {"bmm1_scale": scale, "window_left": window, "sinks": p.sinks}
    lists = workspace(device), p.batch.page_table, p.batch.seq_lens, 19
    lse = torch.zeros(4, 4, device=device)
    out = flashinfer.trtllm_batch_decode_with_kv_cache(p.q, kv, *lists, lse=lse, backend="xqa", **given)
    assert Oracle(p).judge(natural((out, lse))).passed
    found = flashinfer.trtllm_batch_decode_with_kv_cache(p.q, torch.stack(kv, 1), *lists, return_lse=True, **given)
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    given["sinks"] = None if p.sinks is None else [p.sinks]
    out = flashinfer.xqa_batch_decode_with_kv_cache(p.q, kv, *lists, kv_layout="HND", **given)
    assert Oracle(p).judge(out).passed


def test_several_queries_by_block_tables(device):
    p = block_problem([(2, 5), (2, 19), (2, 8)], softmax_scale=0.3, device=device)
    kv, lists = (p.cache.k, p.cache.v), (workspace(device), p.batch.page_table, p.batch.seq_lens)
    decode = functools.partial(flashinfer.trtllm_batch_decode_with_kv_cache, p.q, kv, *lists, 19, bmm1_scale=0.3)
    out = decode(q_len_per_req=2)
    assert Oracle(p).judge(out).passed
    assert torch.equal(decode(cum_seq_lens_q=p.batch.cu_seqlens_q, max_q_len=2), out)
    for given, error, message in (
        ({}, ValueError, "query must have q_len_per_req = 1 rows for each of 3 sequences, got 6"),
        ({"q_len_per_req": 2, "bmm2_scale": 0.5}, quire.UnsupportedError, "bmm2_scale must be None or 1, got 0.5"),
        ({"q_len_per_req": 2, "bmm1_scale": torch.ones(1)}, TypeError, "bmm1_scale must be a number"),
        ({"q_len_per_req": 2, "uses_shared_paged_kv_idx": False}, quire.UnsupportedError, "uses_shared_paged_kv_idx"),
        ({"q_len_per_req": 2, "cp_world": 2}, quire.UnsupportedError, "cp_world must be left out, got 2"),
        ({"q_len_per_req": 2, "out_dtype": "nvfp4"}, TypeError, "out_dtype must be a torch.dtype"),
        ({"q_len_per_req": 2, "out_dtype": torch.float64}, quire.UnsupportedError, "o_data_type must be one of"),
    ):
        with pytest.raises(error, match=message):
            decode(**{"bmm1_scale": 0.3} | given)
    coarse = decode(
        q_len_per_req=2, out=torch.zeros(6, 4, 16, dtype=torch.float8_e4m3fn, device=device), bmm2_scale=4.0
    )
    assert torch.equal(coarse.float(), (out / 0.25).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("causal", [False, True])
def test_prompts_by_block_tables_and_packed(causal, device):
    p = block_problem(LENS, softmax_scale=0.3, causal=causal, device=device)
    starts, kv = p.batch.cu_seqlens_q, (p.cache.k, p.cache.v)
    keys = torch.nn.functional.pad(p.batch.seq_lens.cumsum(0), (1, 0)).int()
    state = flashinfer.trtllm_batch_context_with_kv_cache(
        *(p.q, kv, workspace(device), p.batch.page_table, p.batch.seq_lens, 4, 19, 0.3, 1.0, 4, starts, keys),
        causal=causal,
        return_lse=True,
    )
    assert Oracle(p).judge(natural(state)).passed
    rows = [p.batch.page_table[s, : -(-n // 4)].long() for s, n in enumerate(p.seq_lens)]
    packed = [
        torch.cat([x[row].transpose(1, 2).flatten(0, 1)[:n] for row, n in zip(rows, p.seq_lens, strict=True)])
        for x in kv
    ]
    out = flashinfer.trtllm_ragged_attention_deepseek(
        *(p.q, *packed, workspace(device), p.batch.seq_lens, 4, 19, 0.3, 1.0, 1.0, 4, -1, starts, keys, None),
        causal,
        False,
    )
    assert Oracle(p).judge(out).passed


def test_fp8_caches_by_block_tables(device):
    p = block_problem(DECODES, kv_dtype=torch.float8_e4m3fn, softmax_scale=0.3, device=device)
    k_scale, v_scale = (float(x.flatten()[0]) for x in (p.cache.k_scale, p.cache.v_scale))
    cache = quire.PagedKVCache(p.cache.k, p.cache.v, "HND", k_scale, v_scale)
    p = replace(p, cache=cache)
    lists = workspace(device), p.batch.page_table, p.batch.seq_lens, 19
    scales = {"bmm1_scale": 0.3 * k_scale, "bmm2_scale": v_scale}
    out = flashinfer.trtllm_batch_decode_with_kv_cache(p.q, (cache.k, cache.v), *lists, **scales)
    assert Oracle(p).judge(out).passed


@pytest.mark.parametrize("lens", [DECODES, [(2, 5), (2, 19), (2, 8)]])
def test_latents_by_block_tables(lens, device):
    p = make_problem(AttentionSpec.mla(**MLA), lens, page_size=4, device=device)
    n = lens[0][0]
    q = p.q.unflatten(0, (-1, n))
    lists = workspace(device), 16, 32, 16, p.batch.page_table, p.batch.seq_lens, 19
    given = {"bmm1_scale": 0.1, "return_lse": True}
    decode = flashinfer.trtllm_batch_decode_with_kv_cache_mla
    out, lse = decode(q, p.cache.latents, *lists, return_lse_base="basee", **given)
    assert out.shape == (len(lens), n, 4, 32) and Oracle(p).judge(State(out.flatten(0, 1), lse)).passed
    assert Oracle(p).judge(natural((out.flatten(0, 1), decode(q, p.cache.latents[:, None], *lists, **given)[1]))).passed
    room = torch.zeros_like(out)
    starts = torch.arange(0, len(p.q) + 1, n, dtype=torch.int32, device=device)
    found, _ = decode(p.q, p.cache.latents, *lists, cum_seq_lens_q=starts, max_q_len=n, **given)
    assert torch.equal(found, out.flatten(0, 1))
    assert flashinfer.xqa_batch_decode_with_kv_cache_mla(q, p.cache.latents, *lists, out=room, bmm1_scale=0.1) is room
    assert torch.equal(room, out)
    with pytest.raises(ValueError, match="return_lse_base must be 'basee', 'base2' or None, got 'ln'"):
        decode(q, p.cache.latents, *lists, return_lse_base="ln")
    with pytest.raises(quire.UnsupportedError, match="sparse_mla_top_k must be left out, got 8; lists of keys"):
        decode(q, p.cache.latents, *lists, sparse_mla_top_k=8)


def test_a_table_without_a_name_is_noticed_when_the_module_is_read():
    with pytest.raises(KeyError, match="unknown"):
        signatures.Table("q: queries.").accepts("q, unknown=None")
