"""flash-attn's functions against dense attention in float64; each translation has a test.

Valid with and without TRITON_INTERPRET=1.
"""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire.integrations import flash_attn
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


def turn(x, position, cos, sin, interleaved):
    """Rotate one token [heads, dim] pair by pair."""
    half, y = cos.shape[1], x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        y[..., a] = x[..., a] * cos[position, i] - x[..., b] * sin[position, i]
        y[..., b] = x[..., a] * sin[position, i] + x[..., b] * cos[position, i]
    return y


ATTEND = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
PARAMETERS = {
    flash_attn_func: f"q, k, v, {ATTEND}",
    flash_attn_varlen_func: (
        f"q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {ATTEND}, block_table=None"
    ),
    flash_attn_with_kvcache: (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False"
    ),
}


@pytest.mark.parametrize("function", PARAMETERS)
def test_parameter_lists(function):
    """Names, order and defaults are flash-attn 2's; Quire's own come after them, by keyword only."""
    parameters = inspect.signature(function).parameters.values()
    shown = [
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert ", ".join(shown) == PARAMETERS[function]
    assert [(p.name, p.default) for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD] == [("s_aux", None)]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_dense_batches(data):
    draw = data.draw
    n, m = draw(st.integers(1, 12)), draw(st.integers(1, 40))
    hkv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    dim, dim_v = draw(st.sampled_from([16, 4, 20])), draw(st.sampled_from([16, 24, 9]))
    options = dict(
        causal=draw(st.booleans()),
        window_size=(draw(st.integers(-1, 9)), draw(st.integers(-1, 9))),
        softcap=draw(st.sampled_from([0.0, 4.0])),
        softmax_scale=draw(st.none() | st.floats(0.1, 1.0)),
        alibi_slopes=randn(hkv * group).abs() if draw(st.booleans()) else None,
        s_aux=randn(hkv * group) if draw(st.booleans()) else None,
    )
    if draw(st.booleans()):
        q, k, v = randn(2, n, hkv * group, dim), randn(2, m, hkv, dim), randn(2, m, hkv, dim_v)
    else:
        q, k, v = (
            randn(2, h, t, d).transpose(1, 2) for h, t, d in ((hkv * group, n, dim), (hkv, m, dim), (hkv, m, dim_v))
        )
    out, lse, nothing = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert nothing is None and lse.shape == (2, hkv * group, n) and out.shape == (2, n, hkv * group, dim_v)
    names = ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "s_aux")
    for i in range(2):
        expected = dense(q[i], k[i], v[i], *(options[name] for name in names))
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
    out, lse, _ = flash_attn_varlen_func(
        *arguments, causal=True, window_size=(20, 5), block_table=table, return_attn_probs=True
    )
    assert lse.shape == (4, 10)
    for a, b, c, d in ((0, 3, 0, 40), (3, 10, 45, 52)):
        expected = dense(q[a:b], k[c:d], v[c:d], causal=True, window=(20, 5))
        close(out[a:b], expected[0])
        close(lse[:, a:b], expected[1])


@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize(("paged", "capacity"), [(False, 16), (False, 17), (True, 16)])
def test_append_then_attend(paged, capacity, rotary):
    """Lengths are those before the append; -1 is a padding row. Rows of 17 tokens are no pages."""
    lens, new = [5, 0, 11, -1], 3
    q, k, v = randn(4, 3, 4, 16), randn(4, new, 2, 16, seed=1), randn(4, new, 2, 16, seed=2)
    past_k, past_v = randn(4, capacity, 2, 16, seed=3), randn(4, capacity, 2, 16, seed=4)
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
        q,
        k_cache,
        v_cache,
        k,
        v,
        cos,
        sin,
        torch.tensor(lens, dtype=torch.int32),
        block_table=table,
        causal=True,
        rotary_interleaved=rotary == "interleaved",
        return_softmax_lse=True,
    )
    assert (out[3] == 0).all() and (lse[3] == float("-inf")).all()

    def at(x, position):
        return turn(x, position, cos, sin, rotary == "interleaved") if rotary else x

    for s in range(3):
        n = lens[s]
        rotated_k = torch.stack([at(k[s, i], n + i) for i in range(new)])
        rotated_q = torch.stack([at(q[s, i], n + i) for i in range(3)])
        keys, values = torch.cat([past_k[s, :n], rotated_k]), torch.cat([past_v[s, :n], v[s]])
        expected = dense(rotated_q, keys, values, causal=True)
        close(out[s], expected[0])
        close(lse[s], expected[1])
        for i in range(new):
            p = n + i
            got = k_cache[table[s, p // 4], p % 4] if paged else k_cache[s, p]
            torch.testing.assert_close(got, rotated_k[i])
    if not paged:  # nothing else was touched
        assert torch.equal(k_cache[3], before[3]) and torch.equal(k_cache[0, 8:], before[0, 8:])


@pytest.mark.parametrize(("causal", "length", "in_one"), [(True, 3, True), (False, 3, False), (False, 1, True)])
@pytest.mark.parametrize("paged", [False, True])
def test_attention_rotates_where_queries_and_keys_have_one_position(paged, causal, length, in_one, monkeypatch):
    found = []
    attention = quire.attention
    monkeypatch.setattr(quire, "attention", lambda *args, **more: found.append(more) or attention(*args, **more))
    q, k, v = randn(1, length, 4, 16), randn(1, length, 2, 16, seed=1), randn(1, length, 2, 16, seed=2)
    table, cache = None, randn(2, 3, 48, 2, 16, seed=3)
    if paged:
        table, cache = torch.tensor([[1, 2]], dtype=torch.int32), randn(2, 3, 4, 2, 16, seed=3)
    angles = torch.arange(48)[:, None] * torch.ones(4)
    flash_attn_with_kvcache(q, *cache, k, v, angles.cos(), angles.sin(), 2, block_table=table, causal=causal)
    assert [("k" in more, "rope" in more) for more in found] == [(True, in_one)]


@pytest.mark.parametrize(
    ("shape", "rows", "length", "page_size"),
    [
        ("contiguous", 3, 48, 16),
        ("contiguous", 3, 1024, 256),
        ("transposed", 3, 64, 64),
        ("parts of rows", 3, 64, 32),  # rows of 96
        ("parts of rows", 1, 64, 64),
        ("contiguous", 3, 24, 0),
        ("sliced", 3, 64, 0),  # rows of 67
    ],
)
def test_rows_of_a_whole_number_of_pages_are_pages(shape, rows, length, page_size, monkeypatch):
    """So one launch writes and attends. The same memory is used."""
    found, attention = [], quire.attention
    monkeypatch.setattr(
        quire, "attention", lambda q, cache, *args, **more: found.append(cache) or attention(q, cache, *args, **more)
    )
    k_cache = CACHES[shape](rows, length, 2, 16)
    q, k = randn(rows, 1, 4, 16), randn(rows, 1, 2, 16, seed=1)
    out = flash_attn_with_kvcache(q, k_cache, k_cache, k, k, cache_seqlens=length - 1)
    for s in range(rows):
        close(out[s], dense(q[s], k_cache[s], k_cache[s])[0])
    assert torch.equal(k_cache[:, -1], k[:, 0])
    (cache,) = found
    assert (cache.page_size if cache.layout == "NHD" else 0) == page_size
    assert cache.k.data_ptr() == k_cache.data_ptr()


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
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=9, cache_batch_idx=rows, cache_leftpad=pad, causal=True
    )
    for s in range(2):
        close(out[s], dense(q[s], k_cache[rows[s], pad[s] : 9], v_cache[rows[s], pad[s] : 9], causal=True)[0])
    out = flash_attn_with_kvcache(q, k_cache[:2], v_cache[:2], num_splits=3)
    close(out[1], dense(q[1], k_cache[1], v_cache[1])[0])


CACHES = {
    "contiguous": lambda rows, length, heads, dim: randn(rows, length, heads, dim, seed=rows),
    "transposed": lambda rows, length, heads, dim: randn(rows, heads, length, dim, seed=rows).transpose(1, 2),
    "parts of rows": lambda rows, length, heads, dim: randn(rows, length + 32, heads, dim, seed=rows)[:, :length],
    "sliced": lambda rows, length, heads, dim: randn(rows + 1, length + 3, 3, heads, dim, seed=rows)[1:, 2:-1, 1],
}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.data())
def test_contiguous_caches(data):
    """Each sequence attends to its part of its row, and exactly the new tokens were written.

    For any strides, rows, paddings, lengths and masks. Rows of 16, 32 and 48 tokens are pages, unless there is padding.
    """
    draw = data.draw
    batch, rows = draw(st.integers(1, 3)), draw(st.integers(3, 4))
    length = draw(st.integers(6, 20) | st.sampled_from([16, 32, 48]))
    n, new = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    shape = draw(st.sampled_from(sorted(CACHES)))
    k_cache, v_cache = CACHES[shape](rows, length, 2, 16), CACHES[shape](rows, length, 2, 24)
    lens = [draw(st.integers(-1, length - new)) for _ in range(batch)]
    is_padded = draw(st.booleans())
    pad = [draw(st.integers(0, max(x, 0))) if is_padded else 0 for x in lens]
    index = draw(st.permutations(range(rows)))[:batch]
    q, k, v = randn(batch, n, 4, 16), randn(batch, new, 2, 16, seed=1), randn(batch, new, 2, 24, seed=2)
    masks = {"causal": draw(st.booleans()), "window_size": (draw(st.integers(-1, 9)), draw(st.integers(-1, 9)))}
    cos = sin = None
    if new and draw(st.booleans()):
        angles = torch.arange(length)[:, None] * torch.tensor([1.0, 0.3])
        cos, sin = angles.cos(), angles.sin()
    interleaved = draw(st.booleans())
    local = masks["causal"] or any(0 <= side < length for side in masks["window_size"])
    expected_k, expected_v, expected = k_cache.clone(), v_cache.clone(), []
    for s, (have, row) in enumerate(zip(lens, index, strict=True)):
        if have < 0:
            expected.append((torch.zeros(n, 4, 24).double(), torch.full((4, n), float("-inf")).double()))
            continue
        for i in range(new):
            expected_k[row, have + i] = k[s, i] if cos is None else turn(k[s, i], have + i, cos, sin, interleaved)
            expected_v[row, have + i] = v[s, i]
        turned = (
            q[s]
            if cos is None
            else torch.stack(
                [turn(q[s, i], min(have + i * local, length - 1), cos, sin, interleaved) for i in range(n)]
            )
        )
        run = slice(pad[s], have + new)
        expected.append(
            dense(
                turned, expected_k[row, run], expected_v[row, run], causal=masks["causal"], window=masks["window_size"]
            )
        )
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *((k, v) if new else (None, None)),
        cos,
        sin,
        torch.tensor(lens, dtype=torch.int32),
        torch.tensor(index, dtype=torch.int32) if draw(st.booleans()) or index != list(range(batch)) else None,
        torch.tensor(pad, dtype=torch.int32) if is_padded else None,
        rotary_interleaved=interleaved,
        return_softmax_lse=True,
        **masks,
    )
    assert out.shape == (batch, n, 4, 24) and lse.shape == (batch, 4, n)
    torch.testing.assert_close(k_cache, expected_k)
    torch.testing.assert_close(v_cache, expected_v)
    for s in range(batch):
        close(out[s], expected[s][0])
        close(lse[s], expected[s][1])


@pytest.mark.parametrize("paged", [False, True])
def test_features_of_a_cache(paged):
    """Softcap, scale, slopes and sinks apply to a cache too; the lse is returned only if asked for."""
    k_cache, v_cache, q = randn(2, 12, 2, 16), randn(2, 12, 2, 16, seed=1), randn(2, 2, 4, 16)
    slopes, sinks = randn(4).abs(), randn(4, seed=1)
    table, pages = None, (k_cache, v_cache)
    if paged:  # pages of 3, and a table wider than contiguous
        table = torch.tensor([[3, 0, 1, 0, 7, 0, 5, 0], [0, 0, 2, 0, 4, 0, 6, 0]], dtype=torch.int32)[:, ::2]
        pages = tuple(
            torch.zeros(8, 3, 2, 16).index_copy(0, table.flatten().long(), x.reshape(8, 3, 2, 16))
            for x in (k_cache, v_cache)
        )
    out = flash_attn_with_kvcache(
        q,
        *pages,
        cache_seqlens=torch.tensor([12, 7], dtype=torch.int32),
        block_table=table,
        softmax_scale=0.4,
        causal=True,
        softcap=3.0,
        alibi_slopes=slopes,
        s_aux=sinks,
        num_splits=2,
    )
    scores = {"scale": 0.4, "causal": True, "softcap": 3.0, "slopes": slopes, "sinks": sinks}
    for s, length in enumerate((12, 7)):
        close(out[s], dense(q[s], k_cache[s, :length], v_cache[s, :length], **scores)[0])


def test_lengths_beyond_the_cache_raise_on_a_cpu():
    cache, q, new = torch.zeros(2, 8, 2, 16), randn(2, 1, 2, 16), randn(2, 3, 2, 16)
    for lens in (6, torch.tensor([2, 6], dtype=torch.int32), torch.tensor([100, 1])):
        with pytest.raises(ValueError, match=r"cache_seqlens must leave room for 3 new of 8 tokens, got (6|100)"):
            flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=lens)
    with pytest.raises(ValueError, match="cache_seqlens must leave room for 0 new of 8 tokens, got 9"):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=torch.tensor([1, 9], dtype=torch.int32))
    table, cu_q = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="cache_seqlens must leave room for 3 new of 8 tokens, got 7"):
        flash_attn_with_kvcache(
            q, cache, cache, new, new, block_table=table, cache_seqlens=torch.tensor([7, 1], dtype=torch.int32)
        )
    with pytest.raises(ValueError, match=r"cu_seqlens_k must give a sequence at most 8 keys, .* got 9"):
        flash_attn_varlen_func(
            q[:, 0], cache, cache, cu_q, torch.tensor([0, 9, 10], dtype=torch.int32), 1, 9, block_table=table
        )
    assert not cache.any()


def test_rows_and_pages_outside_the_cache_raise_on_a_cpu():
    cache, q, new = torch.zeros(3, 8, 2, 16), randn(2, 1, 2, 16), randn(2, 1, 2, 16, seed=1)
    ints = {"dtype": torch.int32}
    lens = torch.tensor([1, 9], **ints)
    for arguments, message in (
        ({"cache_batch_idx": torch.tensor([0, 3], **ints)}, "cache_batch_idx must be from 0 to 2, got 3"),
        ({"cache_batch_idx": torch.tensor([-1, 0], **ints)}, "cache_batch_idx must be from 0 to 2, got -1"),
        ({"cache_leftpad": torch.tensor([0, -2], **ints)}, "cache_leftpad must be from 0 to 8, got -2"),
        ({"block_table": torch.tensor([[0, 7], [1, 3]], **ints)}, "block_table must be from 0 to 2, got 3"),
        ({"block_table": torch.tensor([[-1, 7], [1, 2]], **ints)}, "block_table must be from 0 to 2, got -1"),
    ):
        some = lens if "block_table" in arguments else lens.clamp(max=5)
        with pytest.raises(ValueError, match=message):
            flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=some, **arguments)
        assert not cache.any()
    # A padding row's row and pages, and pages past a sequence's end, are not used.
    padding = torch.tensor([1, -1], **ints)
    for where in (
        {"cache_batch_idx": torch.tensor([2, -1], **ints)},
        {"block_table": torch.tensor([[2, 9], [-1, -1]])},
    ):
        out = flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=padding, **where)
        torch.testing.assert_close(cache[2, 1], new[0, 0])
        assert not out[1].any()


@pytest.mark.parametrize(("length", "new"), [(8, 3), (16, 3), (16, 1), (8, 1)])
def test_a_cache_is_never_overrun_where_lengths_cannot_be_read(length, new, monkeypatch):
    """On a GPU lengths stay on the device: what does not fit into the cache is left out."""
    monkeypatch.setattr(flash_attn, "check_host_values", lambda *arguments: None)
    buffer = randn(3, length, 2, 16)
    before, (k_cache, v_cache) = buffer.clone(), (buffer[:2], randn(2, length, 2, 16, seed=1))
    q, k = randn(2, 1, 2, 16), randn(2, new, 2, 16, seed=2)
    lens = torch.tensor([length - 1, 100], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=lens)
    before[0, length - 1] = k[0, 0]
    assert torch.equal(buffer, before)
    for s in range(2):
        close(out[s], dense(q[s], k_cache[s], v_cache[s])[0])


def test_a_window_past_the_cache_is_none():
    """flash-attn drops it before it asks whether queries have positions of their own."""
    q, k, angles = randn(1, 2, 2, 16), randn(1, 2, 2, 16, seed=1), torch.arange(8)[:, None] * torch.ones(8) * 0.3
    outs = []
    for window in ((-1, -1), (8, 9), (7, 7)):
        cache = torch.zeros(2, 1, 8, 2, 16)
        outs.append(flash_attn_with_kvcache(q, *cache, k, k, angles.cos(), angles.sin(), 4, window_size=window))
    torch.testing.assert_close(outs[0], outs[1])
    assert not torch.allclose(outs[0], outs[2])


def test_a_window_may_be_a_tensor(monkeypatch):
    """flash-attn's own tests pass one; what reaches the kernels is two integers."""
    specs, plan = [], quire.plan
    monkeypatch.setattr(
        quire, "plan", lambda spec, *rest, **bounds: (specs.append(spec), plan(spec, *rest, **bounds))[1]
    )
    q, k = randn(1, 8, 2, 16), randn(1, 9, 2, 16, seed=1)
    expected = flash_attn_func(q, k, k, window_size=(3, 2))
    for window in (torch.tensor([3, 2]), [3, 2], (torch.tensor(3), torch.tensor(2, dtype=torch.int32))):
        assert torch.equal(flash_attn_func(q, k, k, window_size=window), expected)
    sides = [side for spec in specs for side in (spec.sliding_window, spec.sliding_window_right)]
    assert sides == [4, 2] * 4 and all(type(side) is int for side in sides)


def test_empty_batches():
    """No sequence, no query or no key: shapes hold, rows without a key are 0 with lse -inf."""
    out, lse, _ = flash_attn_func(randn(0, 3, 4, 16), randn(0, 5, 2, 16), randn(0, 5, 2, 24), return_attn_probs=True)
    assert out.shape == (0, 3, 4, 24) and lse.shape == (0, 4, 3)
    assert flash_attn_func(randn(2, 0, 4, 16), randn(2, 5, 2, 16), randn(2, 5, 2, 16)).shape == (2, 0, 4, 16)
    out, lse, _ = flash_attn_func(randn(2, 3, 4, 16), randn(2, 0, 2, 16), randn(2, 0, 2, 16), return_attn_probs=True)
    assert (out == 0).all() and (lse == float("-inf")).all()
    cache, none = randn(2, 2, 8, 2, 16), randn(0, 1, 2, 16)
    out = flash_attn_with_kvcache(none, *cache, none, none, cache_seqlens=3)
    assert out.shape == (0, 1, 2, 16)


def test_bounds_may_be_loose_and_tensors():
    """max_seqlen_k may be more than the pages hold, and Transformers passes bounds as tensors at times."""
    cu_q, cu_k = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([0, 8, 13], dtype=torch.int32)
    q, k = randn(3, 2, 16), randn(13, 2, 16, seed=1)
    expected = flash_attn_varlen_func(q, k, k, cu_q, cu_k, 2, 8, causal=True)
    torch.testing.assert_close(
        flash_attn_varlen_func(q, k, k, cu_q, cu_k, torch.tensor(2), torch.tensor(8), causal=True), expected
    )
    pages, table = torch.cat([k, k.new_zeros(3, 2, 16)]).view(2, 8, 2, 16), torch.tensor([[0], [1]], dtype=torch.int32)
    torch.testing.assert_close(
        flash_attn_varlen_func(q, pages, pages, cu_q, cu_k, 64, 4096, causal=True, block_table=table), expected
    )


def test_varlen_pads_heads():
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    q, k, v = randn(5, 4, 20), randn(5, 2, 20, seed=1), randn(5, 2, 6, seed=2)
    out = flash_attn_varlen_func(q, k, v, cu, cu, 3, 3, causal=True)
    for a, b in ((0, 3), (3, 5)):
        close(out[a:b], dense(q[a:b], k[a:b], v[a:b], causal=True)[0])


@pytest.mark.parametrize("paged", [False, True])
def test_nothing_is_read_back_from_a_device(paged, monkeypatch):
    """Tensors on the meta device raise when their values are asked for; contiguous caches are used in place."""
    calls = []

    def attention(q, cache, plan, *, return_lse=False, **tensors):
        calls.append(cache)
        out = q.new_empty(*q.shape[:2], cache.head_dim_v)
        return quire.State(out, q.new_empty(q.shape[:2])) if return_lse else out

    monkeypatch.setattr(quire, "plan", lambda spec, batch, **bounds: None)
    monkeypatch.setattr(quire, "attention", attention)
    monkeypatch.setattr(quire, "write_kv", lambda k, v, cache, slots: calls.append(cache))
    with torch.device("meta"):
        q, new, cos = torch.empty(3, 2, 4, 16), torch.empty(3, 2, 2, 16), torch.empty(64, 4)
        cache = [torch.empty(4, 2, 16, 16).transpose(1, 2) for _ in range(2)]
        ints = torch.empty(3, dtype=torch.int32)
        where = {"cache_batch_idx": ints, "cache_leftpad": ints}
        if paged:
            where = {"block_table": torch.empty(3, 4, dtype=torch.int32)}
        out, lse = flash_attn_with_kvcache(
            q, *cache, new, new, cos, cos, ints, causal=True, return_softmax_lse=True, **where
        )
        assert out.shape == (3, 2, 4, 16) and lse.shape == (3, 4, 2)
        assert len(calls) == (1 if paged else 2)  # attention writes into pages itself
        assert all(used.k is cache[0] or used.k._base is cache[0]._base for used in calls)
        flash_attn_func(q, *(x[:3] for x in cache))
        assert calls[-1].k._base is cache[0]._base
        cu, keys = torch.empty(4, dtype=torch.int32), (torch.empty(9, 2, 16),) * 2
        flash_attn_varlen_func(
            torch.empty(6, 4, 16), *(cache if paged else keys), cu, cu, 4, 8, block_table=where.get("block_table")
        )


def test_what_is_not_served_is_refused_by_name():
    q = randn(1, 2, 2, 16)
    cu = torch.tensor([0, 2], dtype=torch.int32)
    for arguments, message in (
        ({"dropout_p": 0.1}, "dropout_p must be 0, got 0.1"),
        ({"alibi_slopes": torch.zeros(1, 2)}, "slopes per sequence are not served"),
    ):
        with pytest.raises(quire.UnsupportedError, match=message):
            flash_attn_func(q, q, q, **arguments)
        with pytest.raises(quire.UnsupportedError, match=message):
            flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 2, 2, **arguments)
    refused = (ValueError, quire.UnsupportedError)
    with pytest.raises(refused, match="head_dim_v must be a multiple of 8 from 16 to 512, got 520"):
        flash_attn_func(q, q, randn(1, 2, 2, 520))
    with pytest.raises(refused, match="head_dim must be a multiple of 8 from 16 to 512, got 12"):
        flash_attn_with_kvcache(q[..., :12], q[..., :12], q)
    with pytest.raises(quire.UnsupportedError, match=r"must be .*bfloat16.*got torch.float64"):
        flash_attn_func(q.double(), q.double(), q.double())
    for i, name in enumerate("qkv"):
        tensors = [q, q, q]
        tensors[i] = q.clone().requires_grad_()
        with pytest.raises(quire.UnsupportedError, match=f"{name} must not require a gradient"):
            flash_attn_func(*tensors)
        with torch.no_grad():
            flash_attn_func(*tensors)
    with pytest.raises(quire.UnsupportedError, match="whole number of tokens apart"):
        flash_attn_with_kvcache(randn(2, 1, 2, 16), randn(2, 8, 2, 16), randn(2, 9, 2, 16)[:, :8])
    for function, arguments in ((flash_attn_func, (q, q, q)), (flash_attn_with_kvcache, (q, q, q))):
        with pytest.raises(TypeError, match="q_descale"):
            function(*arguments, q_descale=1.0)


def test_bad_input_is_refused_before_anything_is_written():
    q, new, cache = randn(2, 1, 2, 16), randn(2, 2, 2, 16, seed=1), torch.zeros(2, 8, 2, 16)
    table, lens, wide = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(16, 8)
    appended = {"k": new, "v": new, "cache_seqlens": lens}
    together = "rotary_cos and rotary_sin must be given together and with k"
    for arguments, message in (
        ({"k": new, "cache_seqlens": lens}, "k and v must be given together"),
        ({"k": new, "v": new}, "cache_seqlens must be given with k"),
        ({"rotary_cos": wide}, together),
        ({"rotary_cos": wide, "rotary_sin": wide, "cache_seqlens": lens}, together),
        (appended | {"rotary_cos": wide[:7], "rotary_sin": wide[:7]}, "each of the cache's 8 positions, got 7"),
        (
            appended | {"rotary_cos": wide, "rotary_sin": wide[:, :4]},
            r"rotary_sin must be \[seqlen_ro = 16, rotary_dim / 2 = 8\], got \[16, 4\]",
        ),
        (
            appended | {"rotary_cos": torch.zeros(8, 9), "rotary_sin": torch.zeros(8, 9)},
            "at most head_dim = 16 elements, got 18",
        ),
        (appended | {"block_table": table, "cache_leftpad": lens}, "must be left out with a block_table"),
        (appended | {"block_table": table, "cache_batch_idx": lens}, "must be left out with a block_table"),
        (appended | {"block_table": table[:1]}, r"block_table must be \[batch = 2, max_blocks_per_seq\], got \[1, 2\]"),
        (appended | {"block_table": table[:, :0]}, "block_table must have a column to append k"),
        (
            appended | {"k": new[:1]},
            r"k must be \[batch = 2, seqlen_new, num_kv_heads = 2, head_dim = 16\], got \[1, 2, 2, 16\]",
        ),
        (appended | {"v": new[..., :8]}, "v must be .* head_dim_v = 16"),
        (appended | {"k": new.half()}, "k must be of .*got torch.float16"),
        (appended | {"cache_seqlens": lens[:1]}, r"cache_seqlens must be \[batch = 2\], got \[1\]"),
        (appended | {"cache_batch_idx": lens[:1]}, "cache_batch_idx must be"),
        (appended | {"cache_leftpad": lens[:1]}, "cache_leftpad must be"),
        (appended | {"s_aux": torch.zeros(3)}, r"s_aux must be \[num_q_heads = 2\], got \[3\]"),
        (appended | {"alibi_slopes": torch.zeros(3)}, r"alibi_slopes must be \[num_q_heads = 2\], got \[3\]"),
        (appended | {"num_splits": 1000}, "num_splits must be at most 128, got 1000"),
        (appended | {"num_splits": -3}, "num_splits must be at least 0, got -3"),
        (appended | {"softmax_scale": -1.0}, "softmax_scale must be positive"),
        (appended | {"softcap": -1.0}, "softcap must be at least 0, got -1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn_with_kvcache(q, cache, cache, **arguments)
        assert not cache.any()
    with pytest.raises(ValueError, match="k_cache must have a row for each of 2 sequences, got 1"):
        flash_attn_with_kvcache(q, cache[:1], cache[:1], **appended)
    with pytest.raises(
        ValueError, match=r"k must be \[batch = 2, seqlen_k, num_kv_heads, head_dim = 16\], got \[1, 8, 2, 16\]"
    ):
        flash_attn_func(q, cache[:1], cache)
    with pytest.raises(ValueError, match="q must have a head_dim of at least 1, got 0"):
        flash_attn_func(q[..., :0], cache[..., :0], cache)
    cu = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens_k must be \[batch \+ 1 = 3\], got \[2\]"):
        flash_attn_varlen_func(q[:, 0], cache[0], cache[0], cu, cu[:2], 1, 1)
    with pytest.raises(ValueError, match="cu_seqlens_q must have batch"):
        flash_attn_varlen_func(q[:, 0], cache[0], cache[0], cu[:0], cu[:0], 1, 1)
    with pytest.raises(ValueError, match=r"k must be \[total_k, num_kv_heads, head_dim = 16\], got \[2, 8, 2, 16\]"):
        flash_attn_varlen_func(q[:, 0], cache, cache, cu, cu, 1, 1)


def good_calls():
    """Return each function, twice the one with a cache, and arguments that it accepts, every optional one included."""
    q, new, pages = randn(2, 3, 2, 16), randn(2, 2, 2, 16, seed=1), randn(4, 8, 2, 16)
    ints, floats = torch.tensor([0, 3], dtype=torch.int32), randn(2).abs()
    starts = torch.tensor([0, 3, 6], dtype=torch.int32)
    scores = {"softmax_scale": 0.3, "causal": True, "window_size": (3, 2), "softcap": 2.0, "alibi_slopes": floats}
    scores["s_aux"] = floats.clone()
    probs = scores | {"dropout_p": 0.0, "return_attn_probs": True}
    cached = {"q": q, "k_cache": pages, "v_cache": pages.clone(), "k": new, "v": new.clone(), "cache_seqlens": ints}
    angles = torch.arange(32)[:, None] * torch.ones(4)
    cached |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": False, "num_splits": 2}
    cached |= scores | {"return_softmax_lse": True}
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    varlen = {
        "q": q.flatten(0, 1),
        "k": pages,
        "v": pages.clone(),
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts.clone(),
    }
    yield flash_attn_func, {"q": q, "k": new, "v": new.clone()} | probs
    yield flash_attn_varlen_func, varlen | {"max_seqlen_q": 3, "max_seqlen_k": 3, "block_table": table} | probs
    yield flash_attn_with_kvcache, cached | {"cache_batch_idx": ints.clone(), "cache_leftpad": torch.zeros_like(ints)}
    yield flash_attn_with_kvcache, cached | {"block_table": table}


def bad_values(name: str, good) -> list:
    """Return what may not stand in the place of a good argument, by its type."""
    nothing = (
        []
        if name in ("softmax_scale", "block_table", "cache_batch_idx", "cache_leftpad", "alibi_slopes", "s_aux")
        else [None]
    )
    if name == "window_size":
        return [
            None,
            4,
            "ab",
            (1, 2, 3),
            (None, None),
            (1.0, 2.0),
            (True, 1),
            torch.tensor([1.5, 2.0]),
            torch.zeros(2, 2),
        ]
    if isinstance(good, bool):
        return [None, "no", 1, 0.0, torch.ones(2)]
    if isinstance(good, int):
        return [None, "1", 2.5, float("nan"), True, [1], torch.tensor(1.0), torch.ones(2), -1]
    if isinstance(good, float):
        return [*nothing, "1", [1.0], float("nan"), True, torch.ones(2), -1.0]
    other = [good.float(), good > 0, good.to(torch.complex64)] if good.dtype == torch.int32 else [good.int(), good > 0]
    if name == "cache_seqlens":
        nothing += [2.5, True, float("nan"), "2", 100]
    return [*nothing, *other, good[None], good[..., None], good.to("meta"), good.tolist(), good.numpy(), "x"]


@pytest.mark.parametrize("i", range(4))
def test_no_bad_argument_is_accepted_and_none_ends_inside_python(i):
    """Each error has the house grammar and names the argument; nothing was written."""
    function, good = list(good_calls())[i]
    function(**good)
    for name, value in good.items():
        if name == "block_table" and function is flash_attn_with_kvcache:
            continue  # the same check as in `flash_attn_varlen_func`
        for bad in bad_values(name, value):
            arguments = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in good.items()} | {name: bad}
            tensors = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor) and x.device.type == "cpu"}
            before = {n: x.clone() for n, x in tensors.items()}
            with pytest.raises((ValueError, TypeError, quire.UnsupportedError), match=r" must .*, got .*; ") as raised:
                function(**arguments)
            culprit = {"q": "", "k_cache": "", "v_cache": "", "v": ""}.get(name, name)  # another tensor may not fit it
            assert culprit in str(raised.value), (name, bad)
            assert all(torch.equal(x, before[n]) for n, x in tensors.items()), (name, bad)
