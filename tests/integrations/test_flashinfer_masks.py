"""FlashInfer's custom masks that are draft trees, against a dense reference in float64 with the same masks.

Valid with and without TRITON_INTERPRET=1.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire import AttentionSpec
from quire.integrations import flashinfer
from quire.testing import make_problem
from tests.integrations.test_flashinfer import (
    LENS,
    LOG2E,
    SPEC,
    buffers,
    close,
    dense,
    heads,
    int32,
    page_lists,
    randn,
    workspace,
)

PREFIXES = [(4, 19), (1, 5), (7, 7), (1, 0), (3, 11), (0, 6)]  # queries and keys; the fourth is a padding row


def tree_mask(queries, keys, seed):
    """[queries, keys] bool: all of the context, and of the drafts each its own path, where there is a key for each."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if keys < queries:
        return mask
    drafts = mask[:, keys - queries :]
    drafts.zero_()
    for i in range(queries):
        parent = int(torch.randint(-1, i, (), generator=generator)) if i else -1
        if parent >= 0:
            drafts[i] = drafts[parent]
        drafts[i, i] = True
    return mask


def flat(masks):
    return torch.cat([mask.flatten() for mask in masks])


def packed(masks):
    """Each sequence's bits in whole bytes, the lowest first, by NumPy."""
    return torch.from_numpy(np.concatenate([np.packbits(m.flatten().numpy(), bitorder="little") for m in masks]))


def reference(p, masks, cap=None):
    """Return out and lse in base 2 of all queries of a problem over pages, each sequence with its mask."""
    starts, pages, _ = (x.cpu() for x in page_lists(p))
    cache = [x if p.cache.layout == "NHD" else x.transpose(1, 2) for x in (p.cache.k, p.cache.v)]
    found, begin = [], 0
    for seq, (mask, queries, keys) in enumerate(zip(masks, p.query_lens, p.seq_lens, strict=True)):
        own = pages[starts[seq] : starts[seq + 1]].long().to(p.q.device)
        k, v = (x[own].flatten(0, 1)[:keys] for x in cache)
        found.append(dense(p.q[begin : begin + queries], k, v, cap=cap, mask=mask.to(p.q.device)))
        begin += queries
    out, lse = (torch.cat(x) for x in zip(*found, strict=True))
    if p.sinks is None:
        return out, lse
    with_sinks = torch.logaddexp2(lse, p.sinks.double() * LOG2E)
    weight = (2.0 ** (lse - with_sinks)).nan_to_num(0.0)  # of a row without keys, whose sink may be -inf
    return out * weight[..., None], with_sinks


def make(lens=LENS, page_size=4, layout="NHD", device="cpu", seed=0, **fields):
    spec = AttentionSpec(**SPEC, **fields)
    p = make_problem(spec, lens, page_size=page_size, layout=layout, flat_table=True, seed=seed, device=device)
    return p, [tree_mask(*both, seed + i) for i, both in enumerate(lens)]


def plan(wrapper, p, **arguments):
    lists = p.batch.cu_seqlens_q, *page_lists(p)
    wrapper.plan(*lists, *heads(p.spec), p.cache.page_size, q_data_type="float32", **arguments)
    return wrapper


def agree(found, expected):
    for got, wanted in zip(found, expected, strict=True):
        close(got, wanted)


@pytest.mark.parametrize("lens", [LENS, PREFIXES])
@pytest.mark.parametrize(("page_size", "layout"), [(1, "NHD"), (4, "HND"), (16, "NHD")])
def test_trees_over_pages(lens, page_size, layout, device):
    """Masks are on the host or the device, and `causal` does not matter."""
    p, masks = make(lens, page_size, layout, device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout)
    kv, expected = (p.cache.k, p.cache.v), reference(p, masks)
    first = plan(wrapper, p, custom_mask=flat(masks)).run(p.q, kv, return_lse=True)
    agree(first, expected)
    bits, bools = packed(masks).to(device), flat(masks).to(device)
    for arguments in (
        {"packed_custom_mask": bits, "causal": True},
        {"packed_custom_mask": bits, "custom_mask": ~bools},  # which is then ignored
        {"custom_mask": torch.cat([bools, ~bools]), "max_token_per_sequence": 100},  # longer than is read
    ):
        found = plan(wrapper, p, **arguments).run(p.q, kv, return_lse=True)
        assert torch.equal(found[0], first[0]) and torch.equal(found[1], first[1])
    chains = [torch.ones_like(mask).tril(mask.shape[1] - mask.shape[0]) for mask in masks]
    agree(plan(wrapper, p, causal=True).run(p.q, kv, return_lse=True), reference(p, chains))


@pytest.mark.parametrize("fields", [{"softcap": 2.0}, {"sinks": True}])
def test_trees_with_soft_caps_and_sinks(fields, device):
    p, masks = make(device=device, **fields)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    plan(wrapper, p, custom_mask=flat(masks), logits_soft_cap=p.spec.softcap)
    found = wrapper.run(p.q, (p.cache.k, p.cache.v), return_lse=True, sinks=p.sinks)
    agree(found, reference(p, masks, p.spec.softcap))


def test_sixty_four_queries_of_any_mask_among_them(device):
    """A query need not see itself, and may see later ones."""
    p, _ = make([(64, 70), (3, 3)], device=device)
    masks = [torch.ones(64, 70, dtype=torch.bool), torch.zeros(3, 3, dtype=torch.bool)]
    masks[0][:, 6:] = torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) < 0.3
    masks[1][0, 2] = True
    wrapper = plan(
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device)), p, packed_custom_mask=packed(masks)
    )
    out, lse = wrapper.run(p.q, (p.cache.k, p.cache.v), return_lse=True)
    agree((out, lse), reference(p, masks))
    assert not out[65:].any() and (lse[65:] == -math.inf).all()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_one_sequence_with_a_tree(data):
    draw = data.draw
    n, prefix, layout = draw(st.integers(1, 9)), draw(st.integers(0, 12)), draw(st.sampled_from(["NHD", "HND"]))
    cap, causal = draw(st.sampled_from([None, 3.0])), draw(st.booleans())
    q, k, v = randn(n, 4, 16), randn(n + prefix, 2, 16, seed=1), randn(n + prefix, 2, 24, seed=2)
    mask = tree_mask(n, n + prefix, draw(st.integers(0, 99)))
    tensors = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    options = {"kv_layout": layout, "logits_soft_cap": cap, "causal": causal, "return_lse": True}
    first = flashinfer.single_prefill_with_kv_cache(q, *tensors, custom_mask=mask, **options)
    agree(first, dense(q, k, v, cap=cap, mask=mask))
    for arguments in ({"custom_mask": mask.flatten()}, {"packed_custom_mask": packed([mask])}):
        found = flashinfer.single_prefill_with_kv_cache(q, *tensors, **arguments, **options)
        assert torch.equal(found[0], first[0]) and torch.equal(found[1], first[1])


def graph_wrapper(device, batch, pages, masks=True):
    queries = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    room = torch.zeros(64, dtype=torch.uint8, device=device), torch.zeros_like(queries)
    more = dict(zip(("custom_mask_buf", "mask_indptr_buf"), room, strict=True)) if masks else {}
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(device), "NHD", True, queries, *buffers(device, batch, pages), **more
    )


@pytest.mark.parametrize("first", ["a mask", "no mask"])
def test_captured_graphs_read_the_masks_of_later_plans(first, device, monkeypatch):
    """The plan that a graph has captured serves new masks, and plans without one, in both directions."""
    make_plan, made = quire.plan, []
    monkeypatch.setattr(quire, "plan", lambda *a, **k: made.append(make_plan(*a, **k)) or made[-1])
    wrapper = graph_wrapper(device, 3, 12)
    steps = [
        ([(2, 3), (4, 5), (2, 2)], "mask"),
        ([(1, 17), (7, 8), (0, 3)], "packed"),
        ([(3, 9), (1, 0), (4, 20)], "causal"),
        ([(3, 9), (1, 0), (4, 20)], "all"),
        ([(1, 2), (2, 30), (1, 1)], "mask"),
        ([(2, 3), (4, 1), (2, 2)], "causal"),  # more queries than keys
    ]
    if first == "no mask":
        steps.insert(0, ([(3, 4), (3, 3), (2, 9)], "causal"))
    for seed, (lens, kind) in enumerate(steps):
        p, masks = make(lens, device=device, seed=seed)
        arguments = {"causal": kind == "causal"}
        if kind == "mask":
            arguments["custom_mask"] = flat(masks).to(device)
        elif kind == "packed":
            arguments["packed_custom_mask"] = packed(masks)
        else:
            every = [torch.ones(n, m, dtype=torch.bool) for n, m in lens]
            masks = [x.tril(x.shape[1] - x.shape[0]) for x in every] if kind == "causal" else every
        plan(wrapper, p, **arguments)
        assert len(made) == 1
        expected = reference(p, masks)
        agree(wrapper.run(p.q, (p.cache.k, p.cache.v), return_lse=True), expected)
        close(quire.attention(p.q, p.cache, made[0]), expected[0])  # as the graph's replay does
    assert made[0].batch.tree_bits is not None and made[0].batch.tree_bits.shape == (8,)


def test_graphs_without_mask_buffers_have_no_masks_and_those_with_them_no_long_prompts(device):
    p, masks = make([(2, 3), (4, 5), (2, 2)], device=device)
    wrapper = graph_wrapper(device, 3, 12, masks=False)
    with pytest.raises(ValueError, match="custom_mask_buf must be a tensor where graphs read masks, got None"):
        plan(wrapper, p, custom_mask=flat(masks))
    plan(wrapper, p, causal=True)
    assert wrapper._batch.tree_bits is None
    wrapper = graph_wrapper(device, 3, 24)
    long, _ = make([(65, 65), (1, 3), (1, 2)], device=device)
    with pytest.raises(quire.UnsupportedError, match="qo_indptr must count at most 64 queries of a sequence"):
        plan(wrapper, long, causal=True)
    plan(wrapper, p, custom_mask=flat(masks))
    before = wrapper._batch.tree_bits.clone()
    for arguments, message in (
        ({"custom_mask": flat(masks)[:-1]}, "custom_mask must have 30 entries, got 29"),
        ({"causal": True, "window_left": 3}, "window_left must be -1 where queries have masks, got 3"),
        ({"custom_mask": flat(masks), "page_size": 0}, "page_size must be at least 1"),
    ):
        lists = p.batch.cu_seqlens_q, *page_lists(p)
        with pytest.raises((ValueError, quire.UnsupportedError), match=message):
            wrapper.plan(*lists, *heads(p.spec), **({"page_size": 4, "q_data_type": "float32"} | arguments))
        assert torch.equal(wrapper._batch.tree_bits, before)
    agree(wrapper.run(p.q, (p.cache.k, p.cache.v), return_lse=True), reference(p, masks))


def test_the_old_forward_keeps_the_mask(device):
    p, masks = make(device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    lists, kv = (p.batch.cu_seqlens_q, *page_lists(p)), (p.cache.k, p.cache.v)
    wrapper.begin_forward(*lists, *heads(p.spec), 4, custom_mask=flat(masks), q_data_type="float32")
    for causal in (False, True):
        agree(wrapper.forward_return_lse(p.q, kv, causal=causal), reference(p, masks))
    agree(wrapper.forward_return_lse(p.q, kv, logits_soft_cap=2.0), reference(p, masks, 2.0))
    with pytest.raises(quire.UnsupportedError, match="window_left must be -1 where queries have masks, got 2"):
        wrapper.forward(p.q, kv, window_left=2)
    close(wrapper.forward(p.q, kv), reference(p, masks)[0])
    wrapper = plan(graph_wrapper(device, len(LENS), 16), p, causal=True)
    chains = [torch.ones_like(mask).tril(mask.shape[1] - mask.shape[0]) for mask in masks]
    close(wrapper.forward(p.q, kv, causal=True), reference(p, chains)[0])
    with pytest.raises(ValueError, match="causal must be the planned True, got False; graphs read what was planned"):
        wrapper.forward(p.q, kv)


@pytest.mark.parametrize("lens", [LENS, PREFIXES, [(65, 70), (4, 3)]], ids=str)
def test_masks_of_any_shape(lens, device):
    """A mask of neither trees nor intervals is read by the kernels, and `causal` does not matter."""
    p, _ = make(lens, device=device)
    masks = [torch.rand(q, s, generator=torch.Generator().manual_seed(q)) < 0.4 for q, s in lens]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    kv, expected = (p.cache.k, p.cache.v), reference(p, masks)
    for arguments in (
        {"custom_mask": flat(masks)},
        {"packed_custom_mask": packed(masks), "causal": True},
        {"custom_mask": torch.cat([flat(masks), flat(masks)]).to(device)},
    ):
        agree(plan(wrapper, p, **arguments).run(p.q, kv, return_lse=True), expected)
    agree(wrapper.forward_return_lse(p.q, kv, causal=True), expected)
    agree(wrapper.forward_return_lse(p.q, kv, logits_soft_cap=2.0), reference(p, masks, 2.0))
    with pytest.raises(quire.UnsupportedError, match="window_left must be -1 where queries have masks, got 2"):
        wrapper.forward(p.q, kv, window_left=2)
    chains = [torch.ones_like(mask).tril(mask.shape[1] - mask.shape[0]) for mask in masks]
    agree(plan(wrapper, p, causal=True).run(p.q, kv, return_lse=True), reference(p, chains))


@pytest.mark.parametrize("kind", ["trees", "intervals", "any"])
def test_masks_over_packed_keys(kind, device):
    """`run`, and `forward` after it, see what the mask says, also in bits and after a plan without a mask."""
    masks = [tree_mask(*both, seed) for seed, both in enumerate(PREFIXES)]
    if kind != "trees":
        masks = [torch.rand(q, s, generator=torch.Generator().manual_seed(q)) < 0.4 for q, s in PREFIXES]
    if kind == "intervals":
        masks = [torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True) for mask in masks]
    q_lens, kv_lens = zip(*PREFIXES, strict=True)
    starts = [int32(0, *lens).cumsum(0).int() for lens in (q_lens, kv_lens)]
    q, k, v = (randn(n, heads, 16).to(device) for n, heads in ((sum(q_lens), 4), (sum(kv_lens), 2), (sum(kv_lens), 2)))
    parts = (x.split(lens) for x, lens in ((q, q_lens), (k, kv_lens), (v, kv_lens)))
    expected = [dense(*each, mask=mask.to(device)) for *each, mask in zip(*parts, masks, strict=True)]
    expected = [torch.cat(x) for x in zip(*expected, strict=True)]
    for graph in [False, True][: 1 + (kind == "trees")]:
        room = [torch.zeros_like(x, device=device) for x in starts] if graph else [None] * 2
        bits = [torch.zeros(64, dtype=torch.uint8, device=device), torch.zeros_like(room[0])] if graph else [None] * 2
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", graph, *room, *bits)
        for arguments in ({"custom_mask": flat(masks)}, {"causal": True}, {"packed_custom_mask": packed(masks)}):
            wrapper.plan(*starts, 4, 2, 16, q_data_type="float32", **arguments)
            if "causal" not in arguments:
                agree(wrapper.run(q, k, v, return_lse=True), expected)
        agree(wrapper.forward_return_lse(q, k, v, causal=True), expected)
        with pytest.raises(quire.UnsupportedError, match="window_left must be -1 where queries have masks, got 2"):
            wrapper.forward(q, k, v, window_left=2)


def test_a_single_prompt_with_a_mask_of_any_shape(device):
    q, k, v = (randn(n, heads, 16).to(device) for n, heads in ((70, 4), (80, 2), (80, 2)))
    mask = torch.rand(70, 80, generator=torch.Generator().manual_seed(0)) < 0.5
    expected = dense(q, k, v, mask=mask.to(device))
    for arguments in ({"custom_mask": mask.to(device)}, {"packed_custom_mask": packed([mask]).to(device)}):
        agree(flashinfer.single_prefill_with_kv_cache(q, k, v, **arguments, return_lse=True), expected)


def test_masks_that_do_not_fit_are_refused():
    p, masks = make([(2, 6), (3, 5)])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    hidden = [masks[0], masks[1].clone()]
    hidden[1][2, 1] = False
    no_tree = "packed_custom_mask must be 1 before the drafts, got 0 for key 1 and draft 2 of sequence 1; a general"
    with pytest.raises(quire.UnsupportedError, match=no_tree):
        plan(graph_wrapper("cpu", 2, 12), p, custom_mask=flat(hidden))
    bools = flat(masks)
    for problem, arguments, error, message in (
        (p, {"custom_mask": bools, "window_left": 4}, quire.UnsupportedError, "window_left must be -1 where queries"),
        (p, {"custom_mask": bools.to("meta")}, quire.UnsupportedError, "custom_mask must be on a GPU or the CPU, got"),
        (p, {"custom_mask": bools.byte()}, TypeError, "custom_mask must be torch.bool, got torch.uint8"),
        (p, {"packed_custom_mask": bools}, TypeError, "packed_custom_mask must be torch.uint8, got torch.bool"),
        (p, {"custom_mask": bools.tolist()}, TypeError, "custom_mask must be a tensor with strides, got list"),
        (p, {"custom_mask": masks[0]}, ValueError, r"custom_mask must be \[num_entries\], got \[2, 6\]"),
        (p, {"custom_mask": bools[:-1]}, ValueError, "custom_mask must have 27 entries, got 26; a sequence has qo_len"),
        (p, {"packed_custom_mask": packed(masks)[:-1]}, ValueError, "packed_custom_mask must have 4 bytes for the"),
    ):
        with pytest.raises(error, match=message):
            plan(wrapper, problem, **arguments)
    q, k = randn(2, 4, 16), randn(5, 2, 16)
    for arguments, message in (
        ({"custom_mask": torch.ones(5, 2, dtype=torch.bool)}, r"custom_mask must be \[qo_len = 2, kv_len = 5\]"),
        ({"custom_mask": torch.ones(9, dtype=torch.bool)}, "custom_mask must have 10 entries, got 9"),
        ({"packed_custom_mask": torch.ones(2).byte() * 255, "window_left": 1}, "window_left must be -1 where queries"),
    ):
        with pytest.raises((ValueError, quire.UnsupportedError), match=message):
            flashinfer.single_prefill_with_kv_cache(q, k, k, **arguments)
    starts = page_lists(p)
    with pytest.raises(ValueError, match=r"qo_indptr must begin with 0 and not decrease .*, got \[1, 2, 5\]"):
        wrapper.plan(int32(1, 2, 5), *starts, 4, 2, 16, 4, custom_mask=bools, q_data_type="float32")
    for passed, missing in (("custom_mask_buf", "mask_indptr_buf"), ("mask_indptr_buf", "custom_mask_buf")):
        with pytest.raises(ValueError, match=f"{missing} must be a tensor where {passed} is one, got None; pass both"):
            flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                workspace("cpu"), "NHD", True, torch.zeros(3).int(), *buffers("cpu", 2, 4), **{passed: workspace("cpu")}
            )
