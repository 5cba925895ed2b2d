"""What models compute before they choose keys: logits, scores of blocks, top columns, and DeepGEMM's names of these.

On a GPU and in the interpreter (TRITON_INTERPRET=1) Triton kernels run, elsewhere the PyTorch path for CPU tensors.
"""

from dataclasses import replace

import pytest
import torch

import quire
import quire.testing
from quire import indexer
from quire.dispatch.device import interprets
from quire.integrations import deep_gemm

E4M3 = torch.float8_e4m3fn


def int32(*entries):
    return torch.tensor(entries, dtype=torch.int32)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_logits(q, k, scale, weights, begin, end):
    """Return logits in float64, [tokens, keys]."""
    products = torch.einsum("thd,nd->thn", q.double(), k.double()).relu() * weights.double()[..., None]
    total = products.sum(1) * (1.0 if scale is None else scale.double())
    key = torch.arange(k.shape[0])
    return total.masked_fill((key < begin[:, None]) | (key >= end[:, None]), float("-inf"))


def assert_like(found, exact, tolerance=1e-5):
    found, finite = found.cpu().double(), exact.isfinite()
    assert torch.equal(finite, found.isfinite()) and torch.equal(exact[~finite], found[~finite])
    largest = exact[finite].abs().max() if finite.any() else 1.0
    torch.testing.assert_close(found[finite], exact[finite], rtol=0, atol=float(tolerance * largest))


@pytest.mark.parametrize("from_begin", [False, True])
@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "scaled"),
    [(E4M3, 64, 128, True), (torch.float32, 5, 24, False), (torch.float16, 70, 64, True)],
)
def test_logits_are_sums_over_heads(device, dtype, heads, dim, scaled, from_begin):
    tokens, keys = 37, 150
    q, k = normal(tokens, heads, dim, dtype=dtype), normal(keys, dim, dtype=dtype, seed=1)
    scale = normal(keys, 1, seed=2).abs() if scaled else None
    weights = normal(tokens, heads, seed=3)
    begin = (torch.arange(tokens) // 10 * 40).int()
    end = begin + torch.arange(tokens).int() % 45
    end[7], end[8], begin[8] = 0, keys + 9, 3
    exact = exact_logits(q, k, None if scale is None else scale[:, 0], weights, begin, end)
    arguments = [None if x is None else x.to(device) for x in (q, k, scale, weights, begin, end)]
    if from_begin:
        found = indexer.mqa_logits(*arguments, num_columns=45)
        shifted = torch.full((tokens, keys + 45), float("-inf"), dtype=torch.float64)
        shifted[:, :keys] = exact
        exact = torch.stack([row[first : first + 45] for row, first in zip(shifted, begin.tolist(), strict=True)])
    else:
        found = indexer.mqa_logits(*arguments)
    assert_like(found, exact)


def pages_of(k, scale, table, page_size):
    """Return a cache in DeepGEMM's layout with sequences of keys, whose other bytes are NaN."""
    dim = k.shape[-1]
    cache = torch.full((1 + int(table.max()), page_size * (dim + 4)), 255, dtype=torch.uint8)
    for seq, row in enumerate(table.tolist()):
        for i, page in enumerate(row):
            part = slice(i * page_size, (i + 1) * page_size)
            if page >= 0:
                cache[page, : page_size * dim] = k[seq, part].reshape(-1).view(torch.uint8)
                cache[page, page_size * dim :] = scale[seq, part].reshape(-1).view(torch.uint8)
    return cache.view(-1, page_size, 1, dim + 4)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("page_size", [64, 16])
def test_logits_of_keys_in_pages(device, queries, each, page_size):
    heads, dim, most = 8, 32, 192
    table = torch.full((3, most // page_size), -1).int()
    lens = int32(70, 128, 5)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).int()
    for seq, length in enumerate(lens.tolist()):
        count = -(-length // page_size)
        table[seq, :count], order = order[:count], order[count:]
    k, scale = normal(3, most, dim, dtype=E4M3), normal(3, most, seed=1).abs()
    q, weights = normal(3, queries, heads, dim, dtype=E4M3, seed=2), normal(3 * queries, heads, seed=3)
    cache = pages_of(k, scale, table, page_size)
    ends = lens[:, None] - queries + 1 + torch.arange(queries)
    if each:  # not all in order
        ends[1] = torch.tensor([128, 3, 40])[:queries]
    given = ends.int() if each else lens
    exact = [
        exact_logits(q[s], k[s], scale[s], weights[s * queries : (s + 1) * queries], torch.zeros(queries), ends[s])
        for s in range(3)
    ]
    tensors = [x.to(device) for x in (q, cache, weights, given, table)]
    found = indexer.paged_mqa_logits(*tensors, 180)
    assert_like(found, torch.cat(exact)[:, :180])
    theirs = deep_gemm.fp8_paged_mqa_logits(*tensors, None, 180, clean_logits=True)
    assert torch.equal(theirs, found)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(given, page_size, 132)
    assert schedule.shape == (133, 2)
    unclean = deep_gemm.fp8_fp4_paged_mqa_logits((tensors[0], None), *tensors[1:], schedule, 180)
    seen = torch.arange(180) < ends.reshape(-1, 1)
    assert torch.equal(unclean.cpu()[seen], found.cpu()[seen])


def test_deep_gemm_s_names_are_served(device):
    q, k, scale = normal(4, 64, 128, dtype=E4M3), normal(20, 128, dtype=E4M3), normal(20).abs()
    weights, begin, end = normal(4, 64), int32(0, 0, 8, 8), int32(5, 8, 12, 20)
    q, k, scale, weights, begin, end = (x.to(device) for x in (q, k, scale, weights, begin, end))
    found = deep_gemm.fp8_mqa_logits(q, (k, scale), weights, begin, end, clean_logits=False)
    assert torch.equal(found, indexer.mqa_logits(q, k, scale, weights, begin, end))
    short = deep_gemm.fp8_fp4_mqa_logits((q, None), (k, scale), weights, begin, end, 12)
    assert torch.equal(short[3], found[3, 8:20]) and short.shape == (4, 12)
    cache = torch.zeros(3, 16, 1, 132, dtype=torch.uint8, device=device)
    table, lens = int32(0, 1).view(2, 1).to(device), int32(3, 9, 16).to(device)
    rows = int32(0, 1, 1).to(device)
    logits = deep_gemm.fp8_fp4_paged_mqa_logits((q[:3, None], None), cache, weights[:3], lens, table, None, 16, rows)
    assert logits.shape == (3, 16) and not logits[2].any()
    with pytest.raises(quire.UnsupportedError, match="q must have no scales of its own, got some"):
        deep_gemm.fp8_fp4_mqa_logits((q, scale), (k, scale), weights, begin, end, 12)


@pytest.mark.parametrize("one_query", [False, True])
@pytest.mark.parametrize(
    ("block_size", "page_size", "heads", "dim"), [(128, 128, 4, 128), (8, 16, 1, 24), (24, 7, 3, 64)]
)
def test_scores_of_blocks_are_largest_products(device, one_query, block_size, page_size, heads, dim):
    lens = ((1, 300), (1, 5), (1, 130)) if one_query else ((1, 290), (40, 140), (0, 9), (7, 7))
    q_lens, seq_lens = zip(*lens, strict=True)
    tokens, dtype = sum(q_lens), torch.float32 if interprets() or device == "cpu" else torch.bfloat16
    table, pages = torch.full((len(lens), -(-300 // page_size)), -1).int(), 0
    for seq, length in enumerate(seq_lens):
        count = -(-length // page_size)
        table[seq, :count] = torch.arange(pages, pages + count).flip(0).int()
        pages += count
    q, keys = normal(tokens, heads, dim, dtype=dtype), normal(pages, page_size, dim, dtype=dtype, seed=1)
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    batch = quire.Batch(table.to(device), int32(*seq_lens).to(device), None if one_query else starts.to(device))
    bounds = {"block_size": block_size, "max_query_len": max(q_lens), "max_seq_len": 300}
    found = indexer.block_scores(q.to(device), keys.to(device), batch, **bounds)
    exact = torch.full(found.shape, float("-inf"), dtype=torch.float64)
    for seq, (q_len, length) in enumerate(lens):
        k = keys[table[seq, : -(-length // page_size)].long()].flatten(0, 1)[:length].double()
        for i in range(q_len):
            token = int(starts[seq]) + i
            scores = q[token].double() @ k[: length - q_len + i + 1].T
            for block, part in enumerate(scores.split(block_size, 1)):
                exact[:, token, block] = part.amax(1)
    assert_like(found, exact)


def exact_top(scores, k, begin, end):
    """Return the columns of the k largest scores of a row, the first ones of equal scores, in order."""
    named = [(-float(x), i) for i, x in enumerate(scores.tolist()) if begin <= i < end and x > float("-inf")]
    return sorted(i for _, i in sorted(named)[:k])


@pytest.mark.parametrize("k", [1, 7, 512, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_top_is_exact_and_equal_scores_are_taken_from_the_front(device, k, dtype):
    columns = 5000 if k > 100 else 300
    scores = normal(9, columns, dtype=dtype)
    scores[1] = scores[1].round()  # many equal ones
    scores[2], scores[3, 5:] = 4.0, float("-inf")
    scores[4, ::3] = float("nan")
    scores[5, ::2], scores[5, 1::2] = 0.0, -0.0
    scores[6] = -scores[6].abs()
    begin, end = int32(0, 3, 0, 0, 1, 9, 0, 40, 17), int32(*[columns] * 7, 45, 12)
    arguments = [x.to(device) for x in (scores, begin, end)]
    found = indexer.top_k(arguments[0], k, begin=arguments[1], end=arguments[2])
    expected = torch.full_like(found, -1, device="cpu")
    for row in range(9):
        top = exact_top(scores[row], k, int(begin[row]), int(end[row]))
        expected[row, : len(top)] = torch.tensor(top, dtype=torch.int32)
    assert torch.equal(found.cpu(), expected)
    counted = indexer.top_k(arguments[0], k, begin=arguments[1], end=arguments[2], from_begin=True)
    assert torch.equal(counted.cpu(), torch.where(expected < 0, -1, expected - begin[:, None]))
    every = indexer.top_k(arguments[0][:1], k)
    assert every[0][every[0] >= 0].tolist() == exact_top(scores[0], k, 0, columns)


def test_an_indexer_and_attention_to_what_it_chooses(device):
    """The steps of DeepSeek V3.2's sparse attention: logits, the top of them, attention."""
    spec = quire.AttentionSpec.mla(
        num_q_heads=3, softmax_scale=0.2, kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.float32
    )
    p = quire.testing.make_problem(spec, ((5, 60),), page_size=16, device=device)
    q, k, weights = (
        normal(5, 4, 16).to(device),
        normal(60, 16, seed=1).to(device),
        normal(5, 4, seed=2).abs().to(device),
    )
    end = int32(*range(56, 61)).to(device)
    logits = indexer.mqa_logits(q, k, None, weights, torch.zeros_like(end), end)
    lists = quire.ChosenKeys(indexer.top_k(logits, 16))
    batch = quire.Batch(p.batch.page_table, p.batch.seq_lens, p.batch.cu_seqlens_q, chosen=lists)
    plan = quire.plan(spec, batch, **p.bounds)
    chosen = quire.attention(p.q, p.cache, plan, return_lse=True)
    assert quire.testing.error_budget(replace(p, batch=batch), chosen).passed


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mqa_logits", {"q": torch.zeros(2, 16)}, r"q must be \[num_tokens, num_heads, dim\]"),
        ("mqa_logits", {"k": torch.zeros(5, 8)}, "k must be of q's dtype torch.float32 and device"),
        ("mqa_logits", {"begin": int32(1)}, "begin must be 2 numbers of torch.int32"),
        ("mqa_logits", {"weights": torch.zeros(2, 3)}, r"weights must be \[2, 4\] in float32 or 16 bits"),
        (
            "paged_mqa_logits",
            {"cache": torch.zeros(3, 8, 16).byte()},
            r"cache must be uint8, \[num_pages, page_size, 20\]",
        ),
        ("paged_mqa_logits", {"seq_lens": int32(1, 2, 3)}, r"seq_lens must be int32, \[2\] or \[2, 1\]"),
        ("paged_mqa_logits", {"page_table": int32(1, 2)}, r"page_table must be int32, \[2, max_pages\]"),
        ("block_scores", {"keys": torch.zeros(2, 4, 8)}, "keys must be of q's dtype"),
        ("block_scores", {"block_size": 0}, "block_size must be from 1 to 1024"),
        ("top_k", {"scores": torch.zeros(4)}, r"scores must be \[rows, columns\]"),
        ("top_k", {"end": int32(1, 2)}, "end must be 1 numbers of torch.int32"),
        ("top_k", {"k": -1}, "k must be from 0 to"),
    ],
)
def test_wrong_arguments_are_refused(name, changes, message):
    batch = quire.Batch(torch.zeros(1, 2).int(), int32(6))
    sound = {
        "mqa_logits": dict(
            q=torch.zeros(2, 4, 16), k=torch.zeros(5, 16), k_scale=None, weights=torch.zeros(2, 4), begin=int32(0, 0),
            end=int32(1, 2),
        ),
        "paged_mqa_logits": dict(
            q=torch.zeros(2, 1, 4, 16).to(E4M3), cache=torch.zeros(3, 8, 20).byte(), weights=torch.zeros(2, 4),
            seq_lens=int32(3, 9), page_table=torch.zeros(2, 2).int(), num_columns=10,
        ),
        "block_scores": dict(
            q=torch.zeros(1, 2, 16), keys=torch.zeros(2, 4, 16), batch=batch, block_size=4, max_query_len=1,
            max_seq_len=8,
        ),
        "top_k": dict(scores=torch.zeros(1, 4), k=2),
    }[name]  # fmt: skip
    with pytest.raises(ValueError, match=message):
        getattr(indexer, name)(**sound | changes)
