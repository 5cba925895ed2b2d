"""Intervals per row: rows see `key_begin <= key < key_end` of their sequence, and nothing outside of these is read.

On a GPU and in the interpreter (TRITON_INTERPRET=1) Triton kernels run, elsewhere the PyTorch path for CPU tensors.
"""

import dataclasses
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quire
from quire import intervals
from quire.dispatch.config import KernelConfig
from quire.testing import error_budget, make_problem
from tests.pairs import in_turn

TWO_KV_HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16}
HEADS = {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 16}
MIXED = ((1, 50), (3, 3), (0, 9), (1, 0), (12, 57))


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def anywhere(batch, num_tokens):
    """Intervals without order: some empty, some past the ends of the sequence, and no two alike."""
    generator = torch.Generator().manual_seed(num_tokens)
    begin = torch.randint(-8, 50, (num_tokens,), generator=generator, dtype=torch.int32)
    length = torch.randint(-4, 30, (num_tokens,), generator=generator, dtype=torch.int32)
    return dataclasses.replace(batch, key_begin=begin, key_end=begin + length)


def spans(batch, num_tokens):
    return intervals.bidirectional_spans(batch, num_tokens, int32(*([1, 0, 2], [4, 40, 52], [4, 0, 9], [-1, 0, 0])))


def prefixes(batch, num_tokens):
    return intervals.prefix_lm(batch, num_tokens, int32(*(n // 2 for n in batch.seq_lens.tolist())))


def packed(batch, num_tokens):
    ends = batch.seq_lens.cumsum(0).tolist()
    return intervals.documents(batch, num_tokens, int32(*sorted({0, 11, 44, 70, *ends, ends[-1] - 12})))


SIGHTS = {
    "causal": intervals.causal,
    "window": lambda batch, n: intervals.sliding_window(batch, n, 9, 3),
    "chunks": lambda batch, n: intervals.chunked_local(batch, n, 12),
    "blocks": lambda batch, n: intervals.block_causal(batch, n, 8),
    "spans": spans,
    "prefixes": prefixes,
    "documents": packed,
    "anywhere": anywhere,
}


def splits(*numbers):
    """Parametrise `num_splits`. PyTorch has no splits and runs the first alone."""
    first, *others = numbers
    return pytest.mark.parametrize("num_splits", [first, *(pytest.param(n, marks=pytest.mark.triton) for n in others)])


SPANS = ((0, 3, 9), (2, 0, 2), (2, 5, 12), (-1, 0, 0), (3, 40, 50))
LENGTHS = (0, 4, 40, 60)  # of prefixes
DOCUMENTS = (0, 11, 20, 29, 44, 57, 59, 80, 109)
RULES = {  # the batches of a rule, and for each whether the query at one position of a sequence sees another position
    "causal": (intervals.causal, lambda seq, pos, key: key <= pos),
    "window": (lambda b, n: intervals.sliding_window(b, n, 9, 3), lambda seq, pos, key: pos - 9 < key <= pos + 3),
    "prefix": (
        lambda b, n: intervals.prefix_and_window(b, n, 5, 9)[0],
        lambda seq, pos, key: key <= pos and key < 5,
    ),
    "window after a prefix": (
        lambda b, n: intervals.prefix_and_window(b, n, 5, 9)[1],
        lambda seq, pos, key: pos - 9 < key <= pos and key >= 5,
    ),
    "chunks": (
        lambda b, n: intervals.chunked_local(b, n, 12),
        lambda seq, pos, key: key <= pos and key // 12 == pos // 12,
    ),
    "blocks": (lambda b, n: intervals.block_causal(b, n, 8), lambda seq, pos, key: key // 8 <= pos // 8),
    "prefixes": (
        lambda b, n: intervals.prefix_lm(b, n, int32(*LENGTHS).to(b.device)),
        lambda seq, pos, key: key <= pos or key < LENGTHS[seq],
    ),
    "spans": (
        lambda b, n: intervals.bidirectional_spans(b, n, int32(*SPANS).to(b.device)),
        lambda seq, pos, key: key <= pos or in_one_span(seq, pos, key),
    ),
    "spans and a window": (
        lambda b, n: intervals.bidirectional_spans(b, n, int32(*SPANS).to(b.device), sliding_window=4),
        lambda seq, pos, key: pos - 4 < key <= pos or in_one_span(seq, pos, key),
    ),
    "documents": (
        lambda b, n: intervals.documents(b, n, int32(*DOCUMENTS).to(b.device)),
        lambda seq, pos, key: key <= pos and in_one_document(seq, pos, key),
    ),
    "documents in both directions": (
        lambda b, n: intervals.documents(b, n, int32(*DOCUMENTS).to(b.device), causal=False),
        lambda seq, pos, key: in_one_document(seq, pos, key),
    ),
}
OF_RULES = ((6, 20), (0, 9), (12, 30), (7, 50))


def in_one_span(seq, pos, key):
    return any(owner == seq and first <= pos < stop and first <= key < stop for owner, first, stop in SPANS)


def in_one_document(seq, pos, key):
    before = sum(kv_len for _, kv_len in OF_RULES[:seq])
    return any(first <= before + pos < stop and first <= before + key < stop for first, stop in pairwise(DOCUMENTS))


@pytest.mark.parametrize("offsets", [None, (0, 0, 0, 0), (7, 3, -4, 48)])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_as_a_plain_program_says(rule, offsets, device):
    """At offsets too, some of them before or after the keys. Tokens of no sequence, here the last two, see nothing."""
    make, sees = RULES[rule]
    batch = make_problem(quire.AttentionSpec(**HEADS), OF_RULES, device=device).batch
    if offsets is not None:
        batch = dataclasses.replace(batch, query_offsets=int32(*offsets).to(device))
    starts, num_tokens = batch.query_starts.tolist(), 27
    made = make(batch, num_tokens)
    found = list(zip(made.key_begin.tolist(), made.key_end.tolist(), strict=True))
    for seq, (q_len, kv_len) in enumerate(OF_RULES):
        first = kv_len - q_len if offsets is None else offsets[seq]
        for query in range(q_len):
            begin, end = found[starts[seq] + query]
            seen = [key for key in range(kv_len) if sees(seq, first + query, key)]
            assert list(range(begin, end)) == seen, (seq, query)
            assert 0 <= begin <= kv_len and 0 <= end <= kv_len
    assert len(found) == num_tokens and all(begin >= end for begin, end in found[starts[-1] :])


@pytest.mark.parametrize(*in_turn(sight=[*SIGHTS], num_splits=[1, 3]))
def test_every_kind_of_interval(sight, num_splits, solve, assert_within_budget):
    spec = quire.AttentionSpec(**TWO_KV_HEADS if sight == "anywhere" else HEADS, dtype=torch.float32)
    assert_within_budget(*solve(spec, MIXED, num_splits, page_size=5, per_token=SIGHTS[sight]))


@splits(1, 3)
@pytest.mark.parametrize("causal", [False, True])
def test_the_band_of_the_spec_counts_for_nothing(causal, num_splits, device, options):
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32, causal=causal)
    p = make_problem(spec, MIXED, per_token=SIGHTS["blocks"], device=device)
    found = quire.attention(p.q, p.cache, quire.plan(spec, p.batch, **p.bounds, **options(num_splits=num_splits)))
    verdict = error_budget(dataclasses.replace(p, spec=dataclasses.replace(spec, causal=not causal)), found)
    assert verdict.passed, verdict


FEATURES = {
    "softcap, sinks": {"softcap": 3.0, "sinks": True},
    "ALiBi": {"alibi": True},
    "float16": {"dtype": torch.float16},
    "e4m3": {"dtype": torch.float16, "kv_dtype": torch.float8_e4m3fn, "head_dim": 32},
    "int8": {"kv_dtype": torch.int8},
}


@pytest.mark.parametrize(*in_turn(feature=[*FEATURES], num_splits=[1, 3]))
def test_features_with_intervals(feature, num_splits, solve, assert_within_budget):
    spec = quire.AttentionSpec(**{"dtype": torch.float32} | HEADS | FEATURES[feature])
    scales = "token" if feature == "int8" else "head"
    assert_within_budget(*solve(spec, MIXED, num_splits, per_token=spans, scales=scales, flat_table=feature == "ALiBi"))


@splits(1, 4)
@pytest.mark.parametrize("one_query", [False, True])
def test_decode_with_intervals(one_query, num_splits, solve, assert_within_budget):
    """A row that sees the middle of its sequence, one that sees nothing, and one whose interval passes both ends."""

    def per_token(batch, num_tokens):
        return dataclasses.replace(batch, key_begin=int32(70, 9, -5, 0), key_end=int32(200, 9, 400, 1))

    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32, sinks=True)
    lens = ((1, 300), (1, 40), (1, 129), (1, 0))
    assert_within_budget(*solve(spec, lens, num_splits, one_query=one_query, per_token=per_token))


def full_tile_config(block_m: int = 16, block_n: int = 16) -> KernelConfig:
    return KernelConfig(
        block_m, block_n, num_warps=4, num_stages=2, full_tile_loop=True, programs_per_sm=1, block_d=16, block_dv=16
    )


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("sight", ["causal", "chunks", "blocks", "spans", "anywhere"])
def test_full_tiles_are_those_that_every_row_sees(sight, device, assert_within_budget):
    chunks = SIGHTS | {"chunks": lambda batch, n: intervals.chunked_local(batch, n, 68)}
    spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    p = make_problem(
        spec, ((60, 106), (30, 170), (18, 18), (1, 90)), page_size=8, device=device, per_token=chunks[sight]
    )
    plan = quire.plan(spec, p.batch, **p.bounds, config=full_tile_config(32), num_splits=1)
    assert plan.kernel == "block" and plan.launch.full_tile_loop
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize(*in_turn(begins=[(0, 0, 0), (37, 300, 5)], num_splits=[2, 40]))
def test_full_tiles_of_drafts_are_those_that_every_row_sees(begins, num_splits, device, assert_within_budget):
    """The rows of the first sequence end at 797 to 801 of 800 keys, those of the second around a tile's edge."""

    def per_token(batch, num_tokens):
        begin = torch.tensor(begins, dtype=torch.int32).repeat_interleave(int32(5, 5, 4).long())
        return dataclasses.replace(
            batch, key_begin=begin, key_end=int32(797, 798, 799, 800, 801, 400, 399, 401, 416, 402, 0, 9, 700, 5)
        )

    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)
    p = make_problem(spec, ((5, 800), (5, 416), (4, 700)), device=device, per_token=per_token)
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=num_splits, config=full_tile_config())
    assert plan.launch.full_tile_loop and plan.kernel == "split_kv"
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.triton
@pytest.mark.parametrize("sight", ["chunks", "anywhere"])
def test_several_row_blocks_of_a_cut_sequence(sight, device, assert_within_budget):
    """More queries than a program loads intervals of at once, over row blocks that see different keys."""
    spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    p = make_problem(spec, ((21, 90), (3, 3), (0, 7)), device=device, per_token=SIGHTS[sight])
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=3, config=full_tile_config())
    assert plan.kernel == "split_kv" and plan.launch.multi_block
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.triton
def test_batch_invariant_plans_with_intervals(device, assert_within_budget, rows_by_themselves):
    """A prompt's tokens have the same bits alone and in chunks, in other batches."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)

    def per_token(batch, num_tokens):
        found = intervals.bidirectional_spans(batch, num_tokens, int32([0, 520, 530]), sliding_window=290)
        found.key_begin[:6], found.key_end[:6] = 40, 100  # a row block that ends in the first of three splits
        return found

    p = make_problem(spec, ((20, 530), (1, 40)), device=device, per_token=per_token)
    plan = quire.plan(spec, p.batch, **p.bounds, batch_invariant=True)
    whole = quire.attention(p.q, p.cache, plan, return_lse=True)
    assert_within_budget(p, whole)
    for rows in (slice(0, 9), slice(9, 20)):
        n = rows.stop - rows.start
        batch = quire.Batch(
            p.batch.page_table[:1],
            p.batch.seq_lens[:1],
            int32(0, n).to(device),
            key_begin=p.batch.key_begin[rows].clone(),
            key_end=p.batch.key_end[rows].clone(),
        )
        bounds = {"max_query_len": n, "max_seq_len": 530, "batch_invariant": True}
        cut = {"num_splits": 3, "config": dataclasses.replace(plan.launch.config, block_m=16)}
        for options in ({}, cut):
            chunk = quire.attention(p.q[rows], p.cache, quire.plan(spec, batch, **bounds, **options), return_lse=True)
            assert torch.equal(chunk.out, whole.out[rows]) and torch.equal(chunk.lse, whole.lse[rows])


@splits(1, 3)
def test_intervals_are_read_at_launch(num_splits, device, options, assert_within_budget):
    """A plan serves other intervals in the same tensors, as a captured graph does."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)
    p = make_problem(spec, ((4, 60), (1, 90)), device=device, per_token=intervals.causal)
    plan = quire.plan(spec, p.batch, **p.bounds, **options(num_splits=num_splits))
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))
    p.batch.key_begin.copy_(int32(3, 59, 7, 20, 1))
    p.batch.key_end.copy_(int32(50, 60, 7, 30, 2))
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@splits(1, 3)
def test_pages_that_no_row_sees_may_be_junk(num_splits, device, options, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)

    def per_token(batch, num_tokens):
        return dataclasses.replace(batch, key_begin=int32(120, 125, 200, 64), key_end=int32(130, 140, 200, 65))

    p = make_problem(spec, ((3, 300), (1, 150)), page_size=4, device=device, per_token=per_token)
    plan = quire.plan(spec, p.batch, **p.bounds, **options(num_splits=num_splits))
    expected = quire.attention(p.q, p.cache, plan, return_lse=True)
    table = p.batch.page_table
    for row, begin, end in zip(table, (120, 64), (140, 65), strict=True):
        row[: begin // 4] = -(1 << 30)
        row[-(-end // 4) :] = 1 << 30
    found = quire.attention(p.q, p.cache, plan, return_lse=True)
    assert_within_budget(p, found)
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)


def test_packed_documents_that_are_not_paged(device):
    """Two sequences of documents, in one call of `varlen_attention`, are the documents one by one."""
    spec = quire.AttentionSpec(**TWO_KV_HEADS, dtype=torch.float32)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(30, 6, 16, device=device), torch.randn(2, 30, 2, 16, device=device)
    starts, documents = (int32(*cut).to(device) for cut in ((0, 18, 30), (0, 5, 18, 19, 30)))
    batch = intervals.documents(quire.Batch.varlen(starts, starts), 30, documents)
    plan = quire.plan(spec, batch, max_query_len=18, max_seq_len=18, num_tokens=30)
    apart = quire.plan(spec, quire.Batch.varlen(documents, documents), max_query_len=13, max_seq_len=13, num_tokens=30)
    torch.testing.assert_close(quire.varlen_attention(q, k, v, plan), quire.varlen_attention(q, k, v, apart))


@splits(1, 3)
def test_a_prefix_and_a_window_are_one_call(num_splits, device, options):
    """Each key counts once, and sinks count once: the oracle is the definition, key by key."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32, sinks=True)
    p = make_problem(spec, ((1, 50), (3, 3), (12, 57)), device=device)
    n, prefix, size = p.q.shape[0], 4, 9
    first, window = intervals.prefix_and_window(p.batch, n, prefix, size)
    specs = spec, dataclasses.replace(spec, sinks=False)
    plans = [
        quire.plan(s, batch, **p.bounds, **options(num_splits=num_splits))
        for s, batch in zip(specs, (first, window), strict=True)
    ]
    state = quire.union_attention(p.q, p.cache, plans, sinks=p.sinks, return_lse=True)
    assert torch.equal(quire.union_attention(p.q, p.cache, plans, sinks=p.sinks), state.out)
    starts, row = p.batch.query_starts.tolist(), 0
    for seq, length in enumerate(p.batch.seq_lens.tolist()):
        pages = p.batch.page_table[seq].long()
        k, v = (x[pages].flatten(0, 1)[:length, 0].double() for x in (p.cache.k, p.cache.v))
        queries = starts[seq + 1] - starts[seq]
        for i in range(queries):
            position = length - queries + i
            keys = sorted({*range(min(prefix, position + 1)), *range(max(0, position + 1 - size), position + 1)})
            scores = p.q[row].double() @ k[keys].T * spec.softmax_scale
            scores = torch.cat([scores, p.sinks.double()[:, None]], 1)
            expected = scores.softmax(1)[:, :-1] @ v[keys]
            torch.testing.assert_close(state.out[row].double(), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(state.lse[row].double(), scores.logsumexp(1), atol=1e-5, rtol=1e-5)
            row += 1


def test_plans_of_a_union_have_one_spec(device):
    p = make_problem(quire.AttentionSpec(**HEADS, dtype=torch.float32, sinks=True), ((3, 20),), device=device)
    both = intervals.prefix_and_window(p.batch, 3, 4, 9)
    plans = [quire.plan(p.spec, batch, **p.bounds) for batch in both]
    with pytest.raises(ValueError, match=r"plans\[1\] must have a spec without sinks"):
        quire.union_attention(p.q, p.cache, plans, sinks=p.sinks)
    other = quire.plan(dataclasses.replace(p.spec, sinks=False, softcap=9.0), both[1], **p.bounds)
    with pytest.raises(ValueError, match=r"plans\[1\] must have the spec of plans\[0\]"):
        quire.union_attention(p.q, p.cache, [plans[0], other], sinks=p.sinks)
    with pytest.raises(ValueError, match="at least one plan, got none"):
        quire.union_attention(p.q, p.cache, [])
    with pytest.raises(TypeError, match="plans must be a list of plans"):
        quire.union_attention(p.q, p.cache, plans[0])


@pytest.mark.parametrize("within_window", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_a_span_is_found_among_many(window, within_window):
    """By the definition, for spans in any order, with padding and spans of no token."""
    generator = torch.Generator().manual_seed(0)
    batch = quire.Batch(torch.zeros(3, 1).int(), int32(400, 90, 300), int32(0, 400, 430, 430))
    cuts = [[seq, *torch.randperm(450, generator=generator)[:60].sort().values.tolist()] for seq in (1, 0, 2)]
    rows = [[seq, *pair] for seq, *ends in cuts for pair in zip(ends[::2], ends[1::2], strict=True)]
    rows += [[-1, 0, 0], [0, 7, 7], [7, 0, 400]]
    spans = int32(*rows)[torch.randperm(len(rows), generator=generator)]
    options = {"sliding_window": window, "within_window": within_window}
    found = intervals.bidirectional_spans(batch, 432, spans, **options)
    expected = []
    for seq, at in [*((0, n) for n in range(400)), *((1, n) for n in range(60, 90))]:
        begin = 0 if window is None else max(0, at + 1 - window)
        end = at + 1
        for _, first, stop in (row for row in rows if row[0] == seq and row[1] <= at < row[2]):
            end = stop
            begin = begin if window and within_window else min(begin, first)
        expected.append((begin, min(end, (400, 90)[seq])))
    assert list(zip(found.key_begin.tolist(), found.key_end.tolist(), strict=True)) == [*expected, (0, 0), (0, 0)]


class LargestTensor(TorchDispatchMode):
    """Keeps the number of elements of the largest tensor that operations return."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return result


def test_no_tensor_has_an_element_for_each_token_and_span():
    """10,000 tokens and 10,000 spans took 4 to 8 s of a CPU and 0.9 GB when all pairs were compared."""
    n = 10_000
    batch = quire.Batch(torch.zeros(1, 1).int(), int32(n), int32(0, n))
    first = torch.arange(n).int()
    spans = torch.stack([first * 0, first, first + 1], 1)
    with LargestTensor() as seen:
        assert intervals.bidirectional_spans(batch, n, spans).key_end.equal(first + 1)
    assert n <= seen.largest <= 10 * n
