"""FlashMLA's functions against the oracle, with the arguments that engines pass.

Valid with and without TRITON_INTERPRET=1, and on a GPU.
"""

import ast
import inspect
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import quire
from quire.dispatch.device import interprets
from quire.integrations import flash_mla
from quire.testing import Oracle, Problem, make_problem, random_chosen

ROOT = Path(__file__).parents[2]
E4M3 = torch.float8_e4m3fn
FORMATS = {  # dtype of the cache, its layout, and rotary columns
    "16 bits": (None, "NHD", 64),
    "V32": (E4M3, "fp8_ds_mla", 64),
    "V4": (E4M3, "fp8_ds_mla_584", 0),
    "V41": (E4M3, "fp8_ds_mla_528", 0),
}


def problem_of(kind, device, lens=((2, 90), (2, 5), (2, 2)), *, sinks=True, width=40, lists=None, seed=0, heads=5):
    """Make a problem whose lists have two query tokens for each sequence, and slots."""
    kv_dtype, layout, rope = FORMATS[kind]
    spec = quire.AttentionSpec.mla(
        num_q_heads=heads, softmax_scale=0.06, qk_rope_head_dim=rope, dtype=torch.float16, kv_dtype=kv_dtype
    )
    spec = replace(spec, sinks=sinks, causal=False)
    per_token = partial(random_chosen, width=width, causal=False, slots_of=16, **(lists or {}))
    return make_problem(spec, lens, layout=layout, per_token=per_token, seed=seed, device=device)


def as_heads(cache):
    """Return a cache as FlashMLA takes it: with a dimension for its head."""
    return cache.latents[:, :, None]


def without_sinks(p: Problem) -> Problem:
    return replace(p, spec=replace(p.spec, sinks=False), sinks=None)


def assert_right(p, out, lse):
    """The lse is without the sinks, and out with them."""
    verdict = Oracle(p).judge(out.reshape(-1, p.spec.num_q_heads, 512))
    assert verdict.passed, verdict
    exact = Oracle(without_sinks(p)).exact.lse.to(lse.device)
    torch.testing.assert_close(lse.double(), exact, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("sinks", [True, False])
def test_lists_are_attended_to(device, kind, sinks):
    p = problem_of(kind, device, sinks=sinks)
    q, chosen = p.q.view(3, 2, 5, -1), p.batch.chosen.indices.view(3, 2, -1)
    meta, nothing = flash_mla.get_mla_metadata(p.batch.seq_lens, 10, 1, num_heads_q=5, is_fp8_kvcache=True, topk=40)
    assert nothing is None
    given = {"attn_sink": p.sinks, "is_fp8_kvcache": True, "softmax_scale": 0.06, "head_dim_v": 512}
    given |= {"block_table": None, "cache_seqlens": None, "indices": chosen, "tile_scheduler_metadata": meta}
    out, lse = flash_mla.flash_mla_with_kvcache(q, as_heads(p.cache), **given)
    assert out.shape == (3, 2, 5, 512) and lse.shape == (3, 5, 2)
    assert_right(p, out, lse.transpose(1, 2).reshape(6, 5))
    kept, own = meta.planned, torch.empty(3, 2, 5, 512, dtype=q.dtype, device=device)
    again, _ = flash_mla.flash_mla_with_kvcache(q, as_heads(p.cache), **given, out=own)
    assert again is own and torch.equal(own, out) and meta.planned is kept


@pytest.mark.parametrize("kind", ["16 bits", "V4", "V41"])
def test_two_lists_have_lengths_of_their_own(device, kind):
    lens = ((1, 90), (1, 30), (1, 1), (1, 0))
    p = problem_of(kind, device, lens, lists={"counted": True})
    more = problem_of(kind, device, lens, lists={"counted": True}, width=17, seed=1)
    first, second = p.batch.chosen, more.batch.chosen
    out, lse = flash_mla.flash_mla_with_kvcache(
        q=p.q[:, None],
        k_cache=as_heads(p.cache),
        block_table=None,
        head_dim_v=512,
        tile_scheduler_metadata=flash_mla.FlashMLASchedMeta(),
        cache_seqlens=None,
        is_fp8_kvcache=True,
        indices=first.indices[:, None],
        topk_length=first.lens,
        softmax_scale=0.06,
        attn_sink=p.sinks,
        extra_k_cache=as_heads(more.cache),
        extra_indices_in_kvcache=second.indices[:, None],
        extra_topk_length=second.lens,
    )
    both = replace(p, batch=replace(p.batch, extra_chosen=second), extra_cache=more.cache)
    assert_right(both, out, lse[..., 0])


@pytest.mark.parametrize("counted", [False, True])
def test_prompts_attend_to_rows(device, counted):
    p = problem_of("16 bits", device, ((7, 90), (3, 30)), lists={"counted": counted})
    kv = p.cache.latents.flatten(0, 1)[:, None]
    lists, lens = p.batch.chosen.indices.clone(), p.batch.chosen.lens
    nothing = lists < 0 if lens is None else torch.zeros_like(lists, dtype=torch.bool)
    lists[nothing] = len(kv) + 5  # as FlashMLA has it, rows past the last one are none
    given = {"d_v": 512, "attn_sink": p.sinks, "topk_length": lens}
    out, none, lse = flash_mla.flash_mla_sparse_fwd(p.q, kv, lists[:, None], 0.06, **given)
    assert_right(p, out, lse)
    own = torch.empty_like(out)
    found, largest, base_2 = flash_mla.flash_mla_sparse_fwd(
        p.q, kv, lists[:, None], 0.06, **given, out=own, return_log2_lse=True, return_max_logits=True
    )
    assert none is None and found is own and torch.equal(own, out)
    torch.testing.assert_close(base_2, lse * flash_mla.LOG2E)
    for token in range(10):
        named = lists[token, : None if lens is None else int(lens[token])]
        rows = kv[named[(named >= 0) & (named < len(kv))].long(), 0].double()
        products = p.q[token].double() @ rows.mT * 0.06 * flash_mla.LOG2E
        exact = products.amax(1) if len(rows) else torch.full((5,), float("-inf"), device=device, dtype=torch.float64)
        torch.testing.assert_close(largest[token].double(), exact, rtol=1e-5, atol=1e-5)
    neither = flash_mla.flash_mla_sparse_fwd(p.q, kv, lists[:, None], 0.06, **given, return_log2_lse=False)
    assert neither[1:] == (None, None) and torch.equal(neither[0], out)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("fp8", [False, True])
def test_pages_are_attended_to(device, causal, length, fp8):
    spec = quire.AttentionSpec.mla(
        num_q_heads=5, softmax_scale=0.06, dtype=torch.float16, kv_dtype=E4M3 if fp8 else None
    )
    lens = ((length, 90), (length, 17))
    p = make_problem(replace(spec, causal=causal), lens, scales="tensor", device=device)
    meta, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q=p.q.view(2, length, 5, 576),
        k_cache=as_heads(p.cache),
        block_table=p.batch.page_table,
        cache_seqlens=p.batch.seq_lens,
        head_dim_v=512,
        tile_scheduler_metadata=meta,
        softmax_scale=0.06,
        causal=causal,
        is_fp8_kvcache=False,
        **({"descale_k": p.cache.k_scale} if fp8 else {}),
    )
    assert_right(p, out, lse.transpose(1, 2).reshape(-1, 5))


@pytest.mark.skipif(interprets(), reason="the interpreter has no bfloat16")
def test_queries_in_fp8_have_a_factor():
    torch.manual_seed(0)
    q, pages = torch.randn(2, 1, 4, 576).to(E4M3), torch.randn(4, 64, 1, 576).to(E4M3)
    table, lens = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32), torch.tensor([100, 7], dtype=torch.int32)
    factor = torch.tensor([0.5])
    tile_metadata, num_splits = flash_mla.get_mla_decoding_metadata(lens, 4, 1)
    assert num_splits.shape == (3,) and tile_metadata.dtype is torch.int32
    meta = tile_metadata, num_splits
    out, _ = flash_mla.flash_mla_with_kvcache(
        q, pages, table, lens, 512, *meta, 0.05, causal=True, descale_q=factor, descale_k=2 * factor
    )
    plain, _ = flash_mla.flash_mla_with_kvcache(
        (q.float() / 2).bfloat16(), pages.bfloat16(), table, lens, 512, *meta, 0.05, causal=True
    )
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, plain, rtol=0.02, atol=0.02)


def test_lists_that_have_to_be_copied_are_read_by_every_layer():
    """A plan that holds a copy would keep the first layer's lists."""
    p = problem_of("16 bits", "cpu", sinks=False)
    lists = p.batch.chosen.indices.view(3, 2, -1)
    strided = torch.full((3, 3, lists.shape[-1]), -1, dtype=torch.int32)[:, :2]
    meta, _ = flash_mla.get_mla_metadata()
    attend = partial(
        flash_mla.flash_mla_with_kvcache,
        p.q.view(3, 2, 5, -1),
        as_heads(p.cache),
        None,
        None,
        512,
        meta,
        indices=strided,
    )
    assert not attend()[0].any()
    strided.copy_(lists)
    assert attend()[0].any()


@pytest.mark.parametrize("which", ["topk_length", "extra_topk_length"])
def test_lengths_that_are_repeated_for_each_query_are_read_by_every_layer(which):
    """Of several queries, a plan holds copies of the lengths, and nothing keeps hold of those that were given."""
    p = problem_of("16 bits", "cpu", sinks=False)
    lists, lens = p.batch.chosen.indices.view(3, 2, -1), {which: torch.zeros(3, dtype=torch.int32)}
    extra = dict(extra_k_cache=as_heads(p.cache), extra_indices_in_kvcache=lists) if "extra" in which else {}
    lists = torch.full_like(lists, -1) if extra else lists
    meta, _ = flash_mla.get_mla_metadata()
    given = p.q.view(3, 2, 5, -1), as_heads(p.cache), None, None, 512
    attend = partial(flash_mla.flash_mla_with_kvcache, *given, meta, indices=lists, **extra, **lens)
    assert not attend()[0].any()
    lens[which].fill_(p.batch.chosen.width)
    assert attend()[0].any()


def test_sinks_weigh_a_row_without_keys():
    q, kv = torch.randn(2, 3, 512), torch.randn(5, 1, 512)
    lists = torch.tensor([[[-1, -1]], [[1, 2]]], dtype=torch.int32)
    out, _, lse = flash_mla.flash_mla_sparse_fwd(q, kv, lists, 0.1, attn_sink=torch.zeros(3))
    assert not out[0].any() and (lse[0] == float("-inf")).all() and lse[1].isfinite().all()


CALLS = {  # of which engine, the files that call FlashMLA's functions
    "vllm-0.33.0": (
        "vllm/v1/attention/backends/mla/flashmla.py",
        "vllm/v1/attention/backends/mla/flashmla_sparse.py",
        "vllm/v1/attention/backends/mla/sparse_swa.py",
        "vllm/models/deepseek_v4/nvidia/flashmla.py",
        "vllm/models/deepseek_v41/nvidia/flashmla.py",
        "vllm/models/hy_v4/nvidia/flashmla_sparse.py",
    ),
    "sglang-0.5.23": ("sglang/kernels/ops/attention/flash_mla_interface.py",),
}


def calls_in(path):
    """Return the name, the number of arguments by place and the keywords of each call of a function of FlashMLA."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            of_module = re.fullmatch(r"(?:flash_mla\.)?(\w+)", ast.unparse(node.func))
            name = of_module[1] if of_module else ""
            if name in flash_mla.__all__:
                found.append((name, len(node.args), [keyword.arg for keyword in node.keywords if keyword.arg]))
    return found


@pytest.mark.parametrize(("engine", "path"), [(engine, path) for engine, paths in CALLS.items() for path in paths])
def test_arguments_of_engines_are_accepted(engine, path):
    file = ROOT / ".overlays" / engine / path
    if not file.exists():
        pytest.skip(f"{engine} is not installed in .overlays")
    calls = calls_in(file)
    assert calls
    for name, num_args, keywords in calls:
        function = getattr(flash_mla, name)
        if inspect.isclass(function):
            assert set(keywords) <= set(inspect.signature(function).parameters)
        else:
            inspect.signature(function).bind(*range(num_args), **dict.fromkeys(keywords))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv_format": "V32_NO_ROPE"}, quire.UnsupportedError, "kv_format must be one of V32, .* got 'V32_NO_ROPE'"),
        ({"use_legacy": True}, quire.UnsupportedError, "k_cache must have the scales of 528-byte records after"),
        ({"causal": True}, ValueError, "causal must be False where there are indices"),
        ({"indices": None}, ValueError, "attn_sink must be left out where there are no indices"),
        ({"indices": None, "attn_sink": None}, TypeError, "block_table must be a tensor where there are no indices"),
        ({"topk_length": torch.zeros(4, dtype=torch.int32)}, ValueError, r"topk_length must be \[batch = 3\]"),
        ({"k_cache": torch.zeros(3, 64, 1, 288, dtype=torch.uint8)}, ValueError, "latents must be records of 656 or"),
    ],
)
def test_what_is_not_served_is_refused(change, error, message):
    p = problem_of("V41", "cpu")
    given = {"q": p.q.view(3, 2, 5, -1), "k_cache": as_heads(p.cache), "block_table": None, "cache_seqlens": None}
    given |= {"head_dim_v": 512, "indices": p.batch.chosen.indices.view(3, 2, -1), "attn_sink": p.sinks}
    with pytest.raises(error, match=message):
        flash_mla.flash_mla_with_kvcache(**given | change)
