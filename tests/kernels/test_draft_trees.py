"""Draft trees: rows see the keys before the drafts, and of the drafts those in their words.

On a GPU and in the interpreter (TRITON_INTERPRET=1) Triton kernels run, elsewhere the PyTorch path for CPU tensors.
"""

import dataclasses
from functools import partial

import pytest
import torch
import triton
import triton.language as tl

import quire
from quire import draft_trees
from quire.dispatch.config import KernelConfig
from quire.kernels.primitives import trailing_ones
from quire.testing import make_problem

HEADS = {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": 16}
LENS = ((5, 60), (1, 17), (7, 7), (0, 9), (1, 0), (3, 131))


@triton.jit
def ones_kernel(out_ptr, words_ptr, NUM: tl.constexpr):
    offs = tl.arange(0, NUM)
    tl.store(out_ptr + offs, trailing_ones(tl.load(words_ptr + offs)))


@pytest.mark.triton
def test_the_lowest_ones_of_a_word_are_counted(device):
    expected = [0, 1, 2, 0, 1, 31, 32, 33, 62, 63, 64, 0, 5, 40, 16, 48]
    words = [0, 1, 3, 4, 5, *((1 << n) - 1 for n in (31, 32, 33, 62, 63)), -1, -2, 31 | 1 << 40]
    words += [(1 << n) - 1 | -(1 << 63) for n in (40, 16, 48)]
    out = torch.zeros(16, dtype=torch.int32, device=device)
    ones_kernel[1,](out, torch.tensor(words, device=device), 16)
    assert out.tolist() == expected


def random_trees(batch, num_tokens, window=None):
    """A random tree for each sequence, as SpecInfer's (arXiv 2305.09781); parents come before their children."""
    generator = torch.Generator().manual_seed(num_tokens)
    words = []
    for count in batch.query_starts.diff().tolist():
        parents = [int(torch.randint(-1, max(i, 1), (), generator=generator)) if i else -1 for i in range(count)]
        words.append(draft_trees.from_parents(torch.tensor([parents])).flatten() if count else torch.zeros(0).long())
    bits = torch.cat(words).to(batch.device)
    if window is not None:
        return draft_trees.windowed(batch, bits, window)
    return dataclasses.replace(batch, tree_bits=bits)


def any_words(batch, num_tokens):
    """Words with any bits: of later drafts, of drafts that are not there, and without the row's own."""
    generator = torch.Generator().manual_seed(7)
    bits = torch.randint(-(1 << 63), (1 << 63) - 1, (num_tokens,), generator=generator)
    bits[::3] = 0
    return dataclasses.replace(batch, tree_bits=bits)


def chains(batch, num_tokens):
    query = torch.cat([torch.arange(n) for n in batch.query_starts.diff().tolist()]).to(batch.device)
    one = torch.ones((), dtype=torch.int64, device=batch.device)
    return dataclasses.replace(batch, tree_bits=torch.where(query == 63, -1, (one << (query + 1)) - 1))


TREES = {
    "trees": random_trees,
    "trees with a window": partial(random_trees, window=4),
    "trees with a long window": partial(random_trees, window=50),
    "any words": any_words,
}


def splits(*numbers):
    """Parametrise `num_splits`. PyTorch has no splits and runs the first alone."""
    first, *others = numbers
    return pytest.mark.parametrize("num_splits", [first, *(pytest.param(n, marks=pytest.mark.triton) for n in others)])


@splits(1, 3)
@pytest.mark.parametrize("tree", TREES)
def test_every_kind_of_tree(tree, num_splits, solve, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32, causal=tree == "trees")
    assert_within_budget(*solve(spec, LENS, num_splits, page_size=5, per_token=TREES[tree]))


FEATURES = {
    "softcap, sinks": {"softcap": 3.0, "sinks": True},
    "e4m3": {"dtype": torch.float16, "kv_dtype": torch.float8_e4m3fn, "head_dim": 32},
    "int8": {"kv_dtype": torch.int8},
}


@splits(1, 3)
@pytest.mark.parametrize("feature", FEATURES)
def test_features_with_trees(feature, num_splits, solve, assert_within_budget):
    spec = quire.AttentionSpec(**{"dtype": torch.float32} | HEADS | FEATURES[feature])
    scales = "token" if feature == "int8" else "head"
    assert_within_budget(*solve(spec, LENS, num_splits, per_token=random_trees, scales=scales))


@splits(1, 4)
def test_64_drafts(num_splits, solve, assert_within_budget):
    """The 64th bit is the sign of a word."""
    spec = quire.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    assert_within_budget(*solve(spec, ((64, 90), (2, 3)), num_splits, per_token=random_trees))


@splits(1, 2)
def test_one_draft_each(num_splits, device, options, assert_within_budget):
    """Without cu_seqlens_q; a draft that does not see itself is hidden."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)

    def per_token(batch, num_tokens):
        return dataclasses.replace(batch, tree_bits=torch.tensor([1, 0, 2, 1]))

    p = make_problem(spec, ((1, 80), (1, 33), (1, 5), (1, 0)), one_query=True, device=device, per_token=per_token)
    plan = quire.plan(spec, p.batch, **p.bounds, **options(num_splits=num_splits))
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.parametrize("offset", [-2, 0, 20, 60])
def test_drafts_among_the_keys(offset, device, assert_within_budget):
    """Keys after the last draft are not seen, and drafts may lie past the keys."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)
    p = make_problem(dataclasses.replace(spec, causal=False), ((5, 62), (5, 40)), device=device)
    offsets = torch.tensor([offset, 31], dtype=torch.int32, device=device)
    words = torch.tensor([1, 3, 5, -1, 17], device=device).repeat(2)
    batch = dataclasses.replace(p.batch, query_offsets=offsets, tree_bits=words)
    p = dataclasses.replace(p, spec=spec, batch=batch)
    plan = quire.plan(spec, batch, **p.bounds)
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@splits(1, 3)
def test_drafts_before_the_first_key_of_a_row_are_seen(num_splits, device, options, assert_within_budget):
    """`key_begin` hides keys before the drafts. Here it is after all drafts, which are in several tiles."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)

    def per_token(batch, num_tokens):
        begin = torch.full((num_tokens,), 1000, dtype=torch.int32)
        return dataclasses.replace(any_words(batch, num_tokens), key_begin=begin)

    p = make_problem(spec, ((40, 90), (1, 17), (3, 33)), page_size=5, device=device, per_token=per_token)
    config = KernelConfig(16, 16, 4, 2, False, programs_per_sm=4, block_d=16, block_dv=16)
    plan = quire.plan(spec, p.batch, **p.bounds, **options(num_splits=num_splits, config=config))
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.parametrize("offsets", [None, (-3, 2, 40, 90)])
@pytest.mark.parametrize("size", [1, 3, 60])
def test_windows_of_drafts_are_as_a_plain_program_says(size, offsets, device):
    """They are counted by depth, from each sequence's own drafts, and begin within the sequence."""
    lens = ((5, 60), (0, 9), (7, 7), (3, 41))
    batch = make_problem(quire.AttentionSpec(**HEADS), lens, device=device).batch
    offsets = None if offsets is None else torch.tensor(offsets, dtype=torch.int32, device=device)
    batch = dataclasses.replace(batch, query_offsets=offsets)
    words = random_trees(batch, 15).tree_bits
    found, starts = draft_trees.windowed(batch, words, size), batch.query_starts.tolist()
    for seq, (q_len, kv_len) in enumerate(lens):
        first = kv_len - q_len if offsets is None else int(offsets[seq])
        own = words[starts[seq] : starts[seq + 1]].tolist()
        depth = [word.bit_count() - 1 for word in own]
        for draft, word in enumerate(own):
            token = starts[seq] + draft
            begin = min(max(first + depth[draft] + 1 - size, 0), kv_len)
            near = [j for j in range(q_len) if word >> j & 1 and depth[draft] - depth[j] < size]
            assert int(found.key_begin[token]) == begin
            assert int(found.tree_bits[token]) == sum(1 << j for j in near)


def test_words_of_every_dtype_are_unsigned():
    for dtype in draft_trees.WORDS:
        bits = 8 * dtype.itemsize
        words = torch.tensor([1, 5, -1 if dtype.is_signed else 2**bits - 1], dtype=dtype)
        expected = [1, 5, -1 if bits == 64 else 2**bits - 1]
        assert draft_trees.from_words(words).tolist() == expected


PLANS = {
    "block": {"num_splits": 1},
    "splits": {"num_splits": 3},
    "chosen": {},
    "batch-invariant": {"batch_invariant": True},
    "full-tile loop": {"num_splits": 2, "config": KernelConfig(16, 16, 4, 2, True, 1, 16, 16)},
    "full-tile loop, block": {"num_splits": 1, "config": KernelConfig(16, 16, 4, 2, True, 1, 16, 16)},
}


@pytest.mark.parametrize(
    "plan", ["chosen", *(pytest.param(n, marks=pytest.mark.triton) for n in PLANS if n != "chosen")]
)
def test_a_chain_as_a_tree_has_causal_s_bits(plan, device):
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32, sinks=True)
    p = make_problem(spec, ((5, 300), (1, 127), (7, 7), (1, 0), (4, 402)), device=device)
    tree = dataclasses.replace(p, batch=chains(p.batch, p.q.shape[0]))
    found = []
    for problem in (p, tree):
        chosen = quire.plan(spec, problem.batch, **p.bounds, **PLANS[plan])
        found.append(quire.attention(p.q, p.cache, chosen, **p.tables, return_lse=True))
    assert torch.equal(found[0].out, found[1].out) and torch.equal(found[0].lse, found[1].lse)


def test_siblings_have_equal_windows(device, assert_within_budget):
    """The same path through a tree, as a chain of its own, sees the same keys and gives the same result."""
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)
    parents = torch.tensor([-1, 0, 0, 2, 1])  # the path to draft 3 is 0, 2, 3
    p = make_problem(spec, ((5, 45),), device=device)
    batch = draft_trees.windowed(p.batch, draft_trees.from_parents(parents).to(device), 6)
    tree = quire.attention(p.q, p.cache, quire.plan(spec, batch, **p.bounds))
    path = [0, 2, 3]
    k, v = p.cache.k.clone(), p.cache.v.clone()
    table = p.batch.page_table[0].tolist()
    for depth, draft in enumerate(path):  # the path's keys in the slots of a chain
        page, slot, source = table[(40 + depth) // 16], (40 + depth) % 16, (40 + draft) % 16
        k[page, slot], v[page, slot] = p.cache.k[table[2], source], p.cache.v[table[2], source]
    chain_spec = dataclasses.replace(spec, sliding_window=6)
    starts = torch.tensor([0, 3], dtype=torch.int32, device=device)
    chain_batch = quire.Batch(p.batch.page_table, p.batch.seq_lens - 2, starts)
    plan = quire.plan(chain_spec, chain_batch, max_query_len=3, max_seq_len=45)
    chain = quire.attention(p.q[path], quire.PagedKVCache(k, v), plan)
    torch.testing.assert_close(tree[path], chain)
