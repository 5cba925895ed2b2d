"""flash-attn's functions against dense attention in float64; each translation has a test. Valid with and without TRITON_INTERPRET=1."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


def dense(q, k, v, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, sinks=None):
    """One sequence: q [n, hq, d], k and v [m, hkv, d] -> out, lse [hq, n]."""
    q, k, v = q.double(), k.double(), v.double()
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    i, j = torch.arange(n)[:, None] + m - n, torch.arange(m)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (i - j).abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    lse = torch.logsumexp(scores, -1)
    return torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp().nan_to_num(0.0), v), lse


def close(got, expected):
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def test_parameter_lists():
    first = ["q", "k", "v"]
    common = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs"]
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    cached = ["q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table",
              "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved", "alibi_slopes", "num_splits", "return_softmax_lse"]  # fmt: skip
    for function, names in (
        (flash_attn_func, first + common),
        (flash_attn_varlen_func, first + lengths + common + ["block_table"]),
        (flash_attn_with_kvcache, cached),
    ):
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names
    defaults = {p.name: p.default for p in inspect.signature(flash_attn_with_kvcache).parameters.values()}
    assert defaults["rotary_interleaved"] is True and defaults["num_splits"] == 0 and defaults["window_size"] == (-1, -1) and defaults["causal"] is False


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_dense_batches(data):
    draw = data.draw
    n, m, hkv, group, dim_v = draw(st.integers(1, 12)), draw(st.integers(1, 40)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([16, 24]))
    options = dict(
        causal=draw(st.booleans()), window_size=(draw(st.integers(-1, 9)), draw(st.integers(-1, 9))), softcap=draw(st.sampled_from([0.0, 4.0])),
        softmax_scale=draw(st.none() | st.floats(0.1, 1.0)), alibi_slopes=randn(hkv * group).abs() if draw(st.booleans()) else None,
        s_aux=randn(hkv * group) if draw(st.booleans()) else None,
    )  # fmt: skip
    q, k, v = randn(2, n, hkv * group, 16), randn(2, m, hkv, 16), randn(2, m, hkv, dim_v)
    out, lse, nothing = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert nothing is None and lse.shape == (2, hkv * group, n)
    for i in range(2):
        expected = dense(q[i], k[i], v[i], options["softmax_scale"], options["causal"], options["window_size"], options["softcap"], options["alibi_slopes"], options["s_aux"])
        close(out[i], expected[0])
        close(lse[i], expected[1])


@pytest.mark.parametrize("paged", [False, True])
def test_varlen(paged):
    cu_q, cu_k = torch.tensor([0, 3, 3, 10], dtype=torch.int32), torch.tensor([0, 40, 45, 52], dtype=torch.int32)
    q, k, v = randn(10, 4, 16), randn(52, 2, 16, seed=1), randn(52, 2, 16, seed=2)
    if paged:
        table = torch.randperm(30).to(torch.int32)[:30].view(3, 10)
        k_pages, v_pages = torch.full((30, 4, 2, 16), float("nan")), torch.full((30, 4, 2, 16), float("nan"))
        for s in range(3):
            for p in range(cu_k[s + 1] - cu_k[s]):
                k_pages[table[s, p // 4], p % 4], v_pages[table[s, p // 4], p % 4] = k[cu_k[s] + p], v[cu_k[s] + p]
        arguments = (q, k_pages, v_pages, cu_q, cu_k, 7, 40)
    else:
        table, arguments = None, (q, k, v, cu_q, cu_k, 7, 40)
    out, lse, _ = flash_attn_varlen_func(*arguments, causal=True, window_size=(20, 5), block_table=table, return_attn_probs=True)
    assert lse.shape == (4, 10)
    for a, b, c, d in ((0, 3, 0, 40), (3, 10, 45, 52)):
        expected = dense(q[a:b], k[c:d], v[c:d], causal=True, window=(20, 5))
        close(out[a:b], expected[0])
        close(lse[:, a:b], expected[1])


@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("paged", [False, True])
def test_append_then_attend(paged, rotary):
    """Lengths are those before the append; -1 is a padding row."""
    lens, new = [5, 0, 11, -1], 3
    q, k, v = randn(4, 3, 4, 16), randn(4, new, 2, 16, seed=1), randn(4, new, 2, 16, seed=2)
    past_k, past_v = randn(4, 16, 2, 16, seed=3), randn(4, 16, 2, 16, seed=4)
    table = None
    if paged:
        table = torch.randperm(16).to(torch.int32).view(4, 4)
        k_cache, v_cache = torch.full((17, 4, 2, 16), float("nan")), torch.full((17, 4, 2, 16), float("nan"))
        for s in range(4):
            for p in range(max(lens[s], 0)):
                k_cache[table[s, p // 4], p % 4], v_cache[table[s, p // 4], p % 4] = past_k[s, p], past_v[s, p]
    else:
        k_cache, v_cache = past_k.clone(), past_v.clone()
    cos = sin = None
    if rotary:
        angles = torch.arange(32)[:, None] * 10.0 ** -torch.arange(4)  # rotary_dim 8 of 16
        cos, sin = angles.cos(), angles.sin()
    before = k_cache.clone()
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, torch.tensor(lens, dtype=torch.int32), block_table=table, causal=True,
        rotary_interleaved=rotary == "interleaved", return_softmax_lse=True,
    )  # fmt: skip
    assert (out[3] == 0).all() and (lse[3] == float("-inf")).all()

    def turn(x, position):
        if not rotary:
            return x
        pairs = [(2 * i, 2 * i + 1) if rotary == "interleaved" else (i, i + 4) for i in range(4)]
        y = x.clone()
        for i, (a, b) in enumerate(pairs):
            y[..., a] = x[..., a] * cos[position, i] - x[..., b] * sin[position, i]
            y[..., b] = x[..., a] * sin[position, i] + x[..., b] * cos[position, i]
        return y

    for s in range(3):
        n = lens[s]
        turned_k = torch.stack([turn(k[s, i], n + i) for i in range(new)])
        turned_q = torch.stack([turn(q[s, i], n + i) for i in range(3)])
        keys, values = torch.cat([past_k[s, :n], turned_k]), torch.cat([past_v[s, :n], v[s]])
        expected = dense(turned_q, keys, values, causal=True)
        close(out[s], expected[0])
        close(lse[s], expected[1])
        for i in range(new):
            p = n + i
            got = k_cache[table[s, p // 4], p % 4] if paged else k_cache[s, p]
            torch.testing.assert_close(got, turned_k[i])
    if not paged:  # nothing else was touched
        assert torch.equal(k_cache[3], before[3]) and torch.equal(k_cache[0, 8:], before[0, 8:])


def test_rotary_without_a_mask_turns_all_queries_alike():
    q, k, v = randn(1, 2, 2, 16), randn(1, 2, 2, 16, seed=1), randn(1, 2, 2, 16, seed=2)
    angles = torch.arange(32)[:, None] * torch.ones(8) * 0.3
    caches = [torch.zeros(1, 8, 2, 16) for _ in range(4)]
    both = flash_attn_with_kvcache(q, *caches[:2], k, v, angles.cos(), angles.sin(), 4)
    second = flash_attn_with_kvcache(q[:, 1:], *caches[2:], k, v, angles.cos(), angles.sin(), 4)
    torch.testing.assert_close(both[:, 1:], second)


def test_batch_index_left_padding_and_default_length():
    k_cache, v_cache, q = randn(5, 12, 2, 16), randn(5, 12, 2, 16, seed=1), randn(2, 2, 4, 16)
    rows, pad = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9, cache_batch_idx=rows, cache_leftpad=pad, causal=True)
    for s in range(2):
        close(out[s], dense(q[s], k_cache[rows[s], pad[s] : 9], v_cache[rows[s], pad[s] : 9], causal=True)[0])
    out = flash_attn_with_kvcache(q, k_cache[:2], v_cache[:2], num_splits=3)
    close(out[1], dense(q[1], k_cache[1], v_cache[1])[0])


def test_what_is_not_served_is_refused_by_name():
    q = randn(1, 2, 2, 16)
    for arguments, message in (
        ({"dropout_p": 0.1}, "dropout_p must be 0, got 0.1"),
        ({"alibi_slopes": torch.zeros(1, 2)}, "slopes per sequence are not served"),
    ):
        with pytest.raises(quire.UnsupportedError, match=message):
            flash_attn_func(q, q, q, **arguments)
    table = torch.zeros(1, 1, dtype=torch.int32)
    for arguments, message in (
        ({"k": q}, "k and v must be given together"),
        ({"rotary_cos": torch.zeros(4, 4)}, "rotary_cos and rotary_sin must be given together"),
        ({"block_table": table, "cache_leftpad": table[0]}, "must be left out with a block_table"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn_with_kvcache(q, q, q, **arguments)
    with pytest.raises(TypeError, match="q_descale"):
        flash_attn_func(q, q, q, q_descale=1.0)
