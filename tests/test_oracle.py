"""`quire.reference` computes what the definition says: a NumPy oracle that shares no code with it agrees."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import quire
from quire import reference
from tests import numpy_oracle

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KV_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
LAYOUTS = ("NHD", "HND", "HDNX", "THD")
DTYPE_OF = {"key_begin": torch.int32, "key_end": torch.int32, "tree_bits": torch.int64}
EPS32, EPS64 = np.finfo(np.float32).eps, np.finfo(np.float64).eps
MAKE_CASE = {"page_size", "layout", "scales", "flat_table", "offsets", "spare_rows", "per_token"}


def make_case(
    rng,
    spec,
    lens,
    *,
    page_size=4,
    layout="NHD",
    scales="head",
    flat_table=False,
    offsets=None,
    spare_rows=0,
    per_token=None,
):
    """Make the inputs of a case. All memory that no query sees is NaN (127 in an int8 cache).

    Args:
        rng: NumPy's generator.
        spec: what to compute.
        lens: (query length, sequence length) of each sequence.
        page_size: tokens per page.
        layout: of the cache; "THD" is not paged; of latents also those of records.
        scales: of a quantised cache: None, "tensor", "head" or "token".
        flat_table: make a one-dimensional page table.
        offsets: position of each sequence's first query, or None.
        spare_rows: rows of q that no sequence owns.
        per_token: `key_begin`, `key_end` and `tree_bits` of the batch by name, as lists.
    """
    seen = {name: torch.tensor(values, dtype=DTYPE_OF[name]) for name, values in (per_token or {}).items()}
    described = SimpleNamespace(**dict.fromkeys(DTYPE_OF) | seen)
    heads, quantised = spec.num_kv_heads, spec.kv_dtype in KV_DTYPES
    paged = layout != "THD"
    counts = [math.ceil(kv_len / page_size) if paged else kv_len for _, kv_len in lens]
    num_pages = sum(counts) + 2
    pages = (1 + rng.permutation(num_pages - 1) if paged else np.arange(num_pages)).tolist()
    rows = [[pages.pop(0) for _ in range(count)] for count in counts]
    slots = page_size if paged else 1
    nothing = 127.0 if spec.kv_dtype is torch.int8 else np.nan
    dims = (spec.head_dim,) if spec.latent else (spec.head_dim, spec.head_dim_v)
    stored = [np.full((num_pages, slots, heads, dim), nothing) for dim in dims]
    q_lens = [q_len for q_len, _ in lens]
    for seq, (q_len, kv_len) in enumerate(lens):
        first = kv_len - q_len if offsets is None else offsets[seq]
        for j in range(kv_len):
            token = sum(q_lens[:seq])
            if any(numpy_oracle.sees(spec, described, first + i, j, token + i, first, q_len) for i in range(q_len)):
                page, slot = (rows[seq][j // page_size], j % page_size) if paged else (rows[seq][j], 0)
                for tensor in stored:
                    numbers = rng.standard_normal(tensor[page, slot].shape)
                    tensor[page, slot] = np.round(40 * numbers).clip(-127, 127) if nothing == 127 else numbers
    if spec.latent:
        cache = latent_cache(rng, torch.tensor(stored[0][:, :, 0]), spec, layout, scales)
    else:
        k, v = (torch.tensor(tensor).to(spec.kv_dtype) for tensor in stored)
        k, v = in_layout(k, layout, 16 // k.dtype.itemsize), in_layout(v, layout)
        shape = {"tensor": (), "head": (heads,), "token": (num_pages, slots, heads)}
        scale = []
        if quantised and scales:
            scale = [torch.tensor(rng.uniform(0.01, 0.04, shape[scales])).float() for _ in "kv"]
        cache = quire.PagedKVCache(k, v, layout, *scale)

    cu_seqlens_q = int32(0, *itertools.accumulate(q_lens))
    if not paged:
        batch = quire.Batch.varlen(cu_seqlens_q, int32(0, *itertools.accumulate(counts)), **seen)
    else:
        one_query = rng.random() < 0.5 and all(q_len == 1 for q_len in q_lens)
        width = max([*counts, 0]) + 1
        table = int32(*itertools.chain(*(row if flat_table else row + [-1] * (width - len(row)) for row in rows)))
        batch = quire.Batch(
            table if flat_table else table.view(len(lens), width),
            int32(*[kv_len for _, kv_len in lens]),
            None if one_query else cu_seqlens_q,
            int32(0, *itertools.accumulate(counts)) if flat_table else None,
            None if offsets is None else int32(*offsets),
            **seen,
        )
    q = torch.tensor(rng.standard_normal((sum(q_lens) + spare_rows, spec.num_q_heads, spec.head_dim))).to(spec.dtype)
    sinks = torch.tensor(rng.standard_normal(spec.num_q_heads)).float() if spec.sinks else None
    slopes = torch.tensor(rng.uniform(0, 0.5, spec.num_q_heads)).float() if spec.alibi else None
    return q, cache, batch, spec, sinks, slopes


def latent_cache(rng, numbers, spec, layout, scales):
    """Return a cache of latents [num_pages, page_size, head_dim], with a random scale, or one for each 128 columns."""
    if layout == "NHD":
        scale = float(rng.uniform(0.5, 2)) if spec.kv_dtype in KV_DTYPES and scales else None
        return quire.PagedKVCache.from_latents(numbers.to(spec.kv_dtype), spec.kv_lora_rank, scale=scale)
    coded, groups = {"fp8_ds_mla": (512, 4), "fp8_ds_mla_584": (448, 8), "fp8_ds_mla_528": (512, 16)}[layout]
    values, rope = numbers[..., :coded].to(torch.float8_e4m3fn), numbers[..., coded:].to(torch.bfloat16)
    if layout == "fp8_ds_mla":
        factors = torch.tensor(rng.uniform(0.5, 2, (*numbers.shape[:2], groups))).float()
        factors[numbers[..., 0].isnan()] = np.nan
    else:
        factors = torch.tensor(rng.integers(126, 129, (*numbers.shape[:2], groups))).to(torch.uint8)
        factors[numbers[..., 0].isnan()] = 255
    parts = [part.view(torch.uint8) for part in (values, factors, rope)]
    if layout == "fp8_ds_mla_584":  # all columns of a page, and then all its scales
        rows = torch.cat(parts[::2], -1).flatten(1), parts[1].flatten(1)
        return quire.PagedKVCache.from_latents(torch.cat(rows, 1).view(*numbers.shape[:2], 584), 512)
    return quire.PagedKVCache.from_latents(torch.cat(parts, -1), 512)


def in_layout(stored, layout, x=None):
    """Turn [num_pages, page_size, num_kv_heads, head_dim] into a layout's shape; with `x`, into that of HDNX's keys."""
    if layout == "HND":
        return stored.transpose(1, 2).contiguous()
    if layout == "THD":
        return stored[:, 0]
    if layout == "HDNX":
        stored = stored.permute(0, 2, 3, 1)  # [num_pages, num_kv_heads, head_dim, page_size]
        return (stored if x is None else stored.unflatten(2, (-1, x)).transpose(3, 4)).contiguous()
    return stored


def int32(*entries):
    return torch.tensor(entries, dtype=torch.int32)


def random_case(seed):
    """Draw a case from the whole space."""
    rng = np.random.default_rng(seed)

    def maybe(value, chance=0.3):
        return value if rng.random() < chance else None

    heads, causal, dtype = int(rng.integers(1, 3)), rng.random() < 0.7, DTYPES[rng.integers(3)]
    spec = quire.AttentionSpec(
        num_q_heads=heads * int(rng.integers(1, 4)),
        num_kv_heads=heads,
        head_dim=16,
        head_dim_v=maybe(24),
        dtype=dtype,
        kv_dtype=maybe(KV_DTYPES[rng.integers(3)], 0.5),
        softmax_scale=maybe(float(rng.uniform(0.05, 1))),
        causal=causal,
        sliding_window=maybe(int(rng.integers(1, 9)), 0.4),
        sliding_window_right=None if causal else maybe(int(rng.integers(0, 5)), 0.5),
        softcap=maybe(float(rng.uniform(0.5, 5))),
        alibi=rng.random() < 0.3,
        sinks=rng.random() < 0.3,
    )
    layout = LAYOUTS[rng.integers(4)]
    lens = []
    for _ in range(rng.integers(1, 4)):
        q_len = 1 if rng.random() < 0.4 else int(rng.integers(0, 6))
        lens.append((q_len, int(rng.integers(0, 20))))
    offsets = None
    if layout != "THD" and rng.random() < 0.2:
        offsets = [int(rng.integers(-3, kv_len + 4)) for _, kv_len in lens]
    scales = maybe(("tensor", "head", "token")[rng.integers(3 if layout != "THD" else 2)], 0.9)
    flat_table = layout != "THD" and rng.random() < 0.3
    page_size, spare_rows = int(rng.integers(1, 8)), int(rng.integers(0, 2))
    return make_case(
        rng,
        spec,
        lens,
        page_size=page_size,
        layout=layout,
        scales=scales,
        flat_table=flat_table,
        offsets=offsets,
        spare_rows=spare_rows,
    )


def assert_reference_agrees(q, cache, batch, spec, sinks, slopes):
    """Compare both in float64. The budget is the oracle's error in float32 times the ratio of the two precisions."""
    out, lse = numpy_oracle.attention(q, cache, batch, spec, sinks, slopes)
    found = reference.attention(q, cache, batch, spec, sinks=sinks, alibi_slopes=slopes)
    single = numpy_oracle.attention(q, cache, batch, spec, sinks, slopes, dtype=np.float32)
    for name, exact, rough, result in (("out", out, single[0], found.out), ("lse", lse, single[1], found.lse)):
        result = result.numpy()
        assert not np.isnan(exact).any(), f"{name}: the oracle read memory that no query sees"
        finite = np.isfinite(exact)
        assert np.array_equal(exact[~finite], result[~finite]), name
        if finite.any():
            error = np.abs(rough[finite] - exact[finite]).max() + EPS32 * np.abs(exact[finite]).max()
            assert np.abs(result[finite] - exact[finite]).max() <= 2 * error * EPS64 / EPS32, name


def test_the_oracle_knows_a_sum_by_heart():
    """Scores log 1 and log 3, so probabilities 1/4 and 3/4; with a sink of log 4, 1/8 and 3/8."""
    q, k, v = (torch.zeros(n, 1, 16, dtype=torch.float32) for n in (1, 2, 2))
    q[0, 0, 0], k[1, 0, 0] = 1, math.log(3)
    v[0, 0, 0], v[1, 0, 1] = 8, 8
    batch = quire.Batch.varlen(int32(0, 1), int32(0, 2))
    for sinks, expected, total in ((None, (2, 6), 4), (torch.tensor([math.log(4)]), (1, 3), 8)):
        spec = quire.AttentionSpec(
            num_q_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32, softmax_scale=1.0, sinks=sinks is not None
        )
        out, lse = numpy_oracle.attention(q, quire.PagedKVCache(k, v, "THD"), batch, spec, sinks)
        np.testing.assert_allclose(out[0, 0, :2], expected, rtol=4 * EPS32)
        np.testing.assert_allclose(lse, [[math.log(total)]], rtol=4 * EPS32)


def test_the_oracle_decodes_8_bit_floats():
    assert [numpy_oracle.E4M3[code] for code in (0x01, 0x08, 0x38, 0x7E, 0xB8)] == [2**-9, 2**-6, 1, 448, -1]
    assert [numpy_oracle.E5M2[code] for code in (0x01, 0x04, 0x3C, 0x7B, 0x7C)] == [2**-16, 2**-14, 1, 57344, np.inf]
    assert np.isnan(numpy_oracle.E4M3[[0x7F, 0xFF]]).all() and np.isnan(numpy_oracle.E5M2[[0x7D, 0xFF]]).all()


@pytest.mark.parametrize("seed", range(300))
def test_random_cases(seed, monkeypatch):
    """However many heads are computed at once."""
    monkeypatch.setattr(reference, "MOST_SCORES", 4 ** (seed % 8))
    assert_reference_agrees(*random_case(seed))


def random_case_with_intervals_or_a_tree(seed):
    """Draw intervals that may be empty or pass the sequence's ends, or words with any bits; some have a begin too."""
    rng = np.random.default_rng(seed)
    spec = quire.AttentionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=DTYPES[seed % 3], causal=rng.random() < 0.7,
        alibi=seed % 2 == 0 and rng.random() < 0.3, sinks=rng.random() < 0.3,
    )  # fmt: skip
    layout = LAYOUTS[rng.integers(4)]
    lens = [(int(rng.integers(0, 9)), int(rng.integers(0, 20))) for _ in range(rng.integers(1, 4))]
    offsets = None
    if layout != "THD" and rng.random() < 0.3:
        offsets = [int(rng.integers(-3, kv_len + 4)) for _, kv_len in lens]
    num_tokens, spare = sum(q_len for q_len, _ in lens), int(rng.integers(0, 2))
    begin = rng.integers(-4, 22, num_tokens + spare).tolist()
    per_token = {"key_begin": begin, "key_end": [b + int(rng.integers(-3, 20)) for b in begin]}
    if seed % 2:
        bits = rng.integers(-(1 << 63), (1 << 63) - 1, num_tokens + spare).tolist()
        per_token = {"tree_bits": bits} | ({"key_begin": begin} if rng.random() < 0.5 else {})
    return make_case(
        rng,
        spec,
        lens,
        page_size=int(rng.integers(1, 8)),
        layout=layout,
        flat_table=layout != "THD" and rng.random() < 0.3,
        offsets=offsets,
        spare_rows=spare,
        per_token=per_token,
    )


@pytest.mark.parametrize("seed", range(120))
def test_random_cases_with_intervals_or_trees(seed):
    assert_reference_agrees(*random_case_with_intervals_or_a_tree(seed))


def random_latent_case(seed):
    """Draw a case of latents from the whole space; one in four has records."""
    rng = np.random.default_rng(seed)

    def maybe(value, chance=0.3):
        return value if rng.random() < chance else None

    layout = "NHD" if seed % 4 else ("fp8_ds_mla", "fp8_ds_mla_584", "fp8_ds_mla_528")[seed // 4 % 3]
    widths = {"kv_lora_rank": 16 * int(rng.integers(1, 4)), "qk_rope_head_dim": 16 * int(rng.integers(0, 3))}
    of_records = {} if layout == "fp8_ds_mla" else {"qk_rope_head_dim": 0}
    spec = quire.AttentionSpec.mla(
        num_q_heads=int(rng.integers(1, 4)),
        softmax_scale=float(rng.uniform(0.02, 0.2)),
        **(widths if layout == "NHD" else of_records),
        dtype=DTYPES[rng.integers(3)],
        kv_dtype=torch.float8_e4m3fn if layout != "NHD" else maybe(torch.float8_e4m3fn, 0.5),
        causal=rng.random() < 0.7,
        sliding_window=maybe(int(rng.integers(1, 9))),
        softcap=maybe(float(rng.uniform(0.5, 5))),
        sinks=rng.random() < 0.3,
    )
    lens = [(int(rng.integers(0, 5)), int(rng.integers(0, 20))) for _ in range(rng.integers(1, 4))]
    return make_case(
        rng,
        spec,
        lens,
        page_size=int(rng.integers(1, 8)),
        layout=layout,
        scales=maybe("tensor", 0.8),
        flat_table=rng.random() < 0.3,
        spare_rows=int(rng.integers(0, 2)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_random_cases_of_latents(seed):
    assert_reference_agrees(*random_latent_case(seed))


HEADS = dict(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
CORNERS = {
    "no sequence": dict(lens=()),
    "empty sequences": dict(lens=((0, 0), (1, 0), (0, 9), (2, 3))),
    "rows of no sequence": dict(lens=((1, 3),), spare_rows=3),
    "more queries than keys": dict(lens=((5, 2),)),
    "more queries than keys, not causal": dict(lens=((5, 2),), causal=False),
    "a window of the own key": dict(lens=((3, 9),), sliding_window=1),
    "a window before all keys": dict(lens=((2, 5),), sliding_window=3, offsets=[20]),
    "a window after all keys": dict(lens=((2, 5),), causal=False, sliding_window_right=1, offsets=[-9]),
    "a window to the right alone": dict(lens=((3, 9),), causal=False, sliding_window_right=0),
    "a window on both sides": dict(lens=((6, 12),), causal=False, sliding_window=3, sliding_window_right=2),
    "a window that is left behind": dict(lens=((1, 40),), sliding_window=5, page_size=3),
    "queries before their keys": dict(lens=((4, 9),), offsets=[-2]),
    "queries among their keys": dict(lens=((4, 9),), offsets=[2]),
    "intervals against the causal order": dict(
        lens=((3, 9), (1, 2)), per_token={"key_begin": [7, 0, 5, 0], "key_end": [9, 3, 6, 1]}
    ),
    "intervals that see nothing": dict(lens=((3, 9),), per_token={"key_begin": [4, 9, 7], "key_end": [4, 12, 2]}),
    "a tree with two branches": dict(lens=((4, 9),), per_token={"tree_bits": [0b1, 0b11, 0b101, 0b1011]}),
    "a tree of 64 drafts": dict(lens=((64, 70),), per_token={"tree_bits": [1 | -(1 << 63), *[-1] * 63]}),
    "a tree with a window": dict(lens=((2, 9),), per_token={"tree_bits": [0b1, 0b10], "key_begin": [5, 6]}),
    "a sink alone": dict(lens=((1, 0), (2, 1)), sinks=True),
    "a sink and a window that sees nothing": dict(lens=((2, 5),), sinks=True, sliding_window=2, offsets=[9]),
    "ALiBi to both sides": dict(lens=((5, 9),), alibi=True, causal=False),
    "softcap before ALiBi": dict(lens=((3, 9),), alibi=True, softcap=0.5),
    "one query head for each KV head": dict(lens=((2, 9),), num_kv_heads=4),
    "one KV head": dict(lens=((2, 9),), num_kv_heads=1),
    "wide values": dict(lens=((2, 9),), head_dim_v=40),
    "narrow values": dict(lens=((2, 9),), head_dim=40, head_dim_v=16),
    "large scores": dict(lens=((2, 9),), softmax_scale=300.0),
    "a page for each key": dict(lens=((2, 9), (1, 4)), page_size=1),
    "one page": dict(lens=((2, 9),), page_size=16),
    "a flat table with an empty run": dict(lens=((1, 9), (1, 0), (2, 6)), flat_table=True),
    "fp8 without scales": dict(lens=((2, 9),), kv_dtype=torch.float8_e4m3fn, scales=None),
    "fp8 in vLLM's layout": dict(lens=((2, 9),), kv_dtype=torch.float8_e5m2, layout="HDNX"),
    "int8 with scales per token": dict(lens=((2, 9), (1, 7)), kv_dtype=torch.int8, scales="token", flat_table=True),
    "keys that are not paged": dict(lens=((2, 9), (0, 0), (3, 3)), layout="THD", sliding_window=4),
}  # fmt: skip


@pytest.mark.parametrize("name", CORNERS)
def test_corners(name):
    options = dict(CORNERS[name])
    placing = {key: options.pop(key) for key in MAKE_CASE & options.keys()}
    lens = options.pop("lens")
    spec = quire.AttentionSpec(**{**HEADS, **options})
    assert_reference_agrees(*make_case(np.random.default_rng(7), spec, lens, **placing))


def test_a_latent_is_the_key_and_its_first_columns_are_the_value():
    """The keys and values that a latent stands for, in a cache of their own, give the same bits."""
    rng = np.random.default_rng(2)
    spec = quire.AttentionSpec.mla(
        num_q_heads=3, softmax_scale=0.2, kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.float32
    )
    q, cache, batch, *_ = make_case(rng, spec, ((2, 9), (1, 5)))
    plain = quire.AttentionSpec(
        num_q_heads=3, num_kv_heads=1, head_dim=48, head_dim_v=32, softmax_scale=0.2, dtype=torch.float32
    )
    k = cache.latents[:, :, None]
    keys = quire.PagedKVCache(k.clone(), k[..., :32].clone())
    for found, expected in zip(
        reference.attention(q, cache, batch, spec), reference.attention(q, keys, batch, plain), strict=True
    ):
        assert torch.equal(found, expected)


def test_a_spec_fills_in_the_scale_of_its_keys():
    """The oracle takes the scale from the spec, and so must not judge it."""
    spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=64, head_dim_v=16)
    assert spec.softmax_scale == 1 / 8 and spec.kv_dtype is spec.dtype


@pytest.mark.parametrize("features", [{}, {"sinks": True}, {"softcap": 3.0}, {"sliding_window": 2}], ids=str)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_queries_that_are_not_finite(features):
    """NaN and infinity in one query make it NaN, and no other."""
    spec = quire.AttentionSpec(**HEADS, **features)
    q, cache, batch, _, sinks, _ = make_case(np.random.default_rng(5), spec, ((4, 9), (2, 1)))
    q[1, 0], q[2, 1, 3], q[5, 2, 0], q[4] = np.nan, np.inf, -np.inf, np.nan  # the query at 4 sees no key
    out, lse = numpy_oracle.attention(q, cache, batch, spec, sinks)
    found = reference.attention(q, cache, batch, spec, sinks=sinks)
    np.testing.assert_allclose(found.out.numpy(), out, rtol=EPS32)
    np.testing.assert_allclose(found.lse.numpy(), lse, rtol=EPS32)
    assert np.isnan(out[1, 0]).all() and np.isnan(lse[1, 0])
    assert (out[4] == 0).all() and np.isnan(out).any(-1).sum() <= 3


def test_merged_halves_are_the_whole():
    """The oracle's merge against the oracle's attention: keys 0 to 5, and 6 to 10, are keys 0 to 10."""
    rng = np.random.default_rng(3)
    spec = quire.AttentionSpec(**HEADS, causal=False)
    q, cache, batch, *_ = make_case(rng, spec, ((3, 11),), layout="THD")
    parts = [
        numpy_oracle.attention(q, quire.PagedKVCache(cache.k[part], cache.v[part], "THD"), one_sequence(3, n), spec)
        for part, n in ((slice(0, 6), 6), (slice(6, 11), 5))
    ]
    for merged, whole in zip(
        numpy_oracle.merge(*zip(*parts, strict=True)), numpy_oracle.attention(q, cache, batch, spec), strict=True
    ):
        np.testing.assert_allclose(merged, whole, rtol=EPS32)


def one_sequence(num_queries, num_keys):
    return quire.Batch.varlen(int32(0, num_queries), int32(0, num_keys))


@pytest.mark.parametrize("seed", range(20))
def test_merged_states(seed):
    """Some states are empty (lse -inf, or +inf as in FlashAttention) and hold NaN; a row may be empty in all states."""
    rng = np.random.default_rng(seed)
    shape = (5, 2)
    outs = [rng.standard_normal((*shape, 8)) for _ in range(1 + seed % 4)]
    lses = [10 * rng.standard_normal(shape) for _ in outs]
    for out, lse in zip(outs, lses, strict=True):
        empty = rng.random(shape) < 0.3
        lse[empty] = rng.choice([-np.inf, np.inf], int(empty.sum()))
        lse[0], out[~np.isfinite(lse)] = -np.inf, np.nan
    lses[0][1, 0] = np.nan
    expected = numpy_oracle.merge(outs, lses)
    found = reference.merge(*(quire.State(torch.tensor(o), torch.tensor(s)) for o, s in zip(outs, lses, strict=True)))
    for exact, result in zip(expected, found, strict=True):
        np.testing.assert_allclose(result.numpy(), exact, rtol=EPS32)
    assert np.isnan(expected[0][1, 0]).all() and np.isnan(expected[1][1, 0])
    assert (expected[0][0] == 0).all() and (expected[1][0] == -np.inf).all()


def test_an_output_in_e4m3_is_the_nearest_number_and_of_two_the_even_one():
    """e4m3 has 4 bits of exponent, whose bias is 7, and 3 of mantissa; 448 is its largest number."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    numbers = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    middles = (numbers[1:] + numbers[:-1]) / 2
    rng = np.random.default_rng(0)
    random = rng.normal(size=1000) * 2.0 ** rng.uniform(-10, 9, 1000)
    x = np.concatenate([numbers, middles, middles * (1 + 2.0**-20), middles * (1 - 2.0**-20), random, [1e4, 1e30]])
    distances = np.abs(np.minimum(np.abs(x), 448)[:, None] - numbers)
    nearest = distances == distances.min(1, keepdims=True)
    even = nearest & (code % 2 == 0)
    chosen = np.where(even.any(1), even.argmax(1), nearest.argmax(1))
    for scale in (1.0, 0.25):
        found = reference.quantise(torch.from_numpy(x * scale), torch.tensor([scale])).double().numpy()
        assert np.array_equal(np.abs(found), numbers[chosen]) and np.array_equal(found < 0, (x < 0) & (chosen > 0))
    assert reference.quantise(torch.tensor([float("nan")]), torch.ones(1)).isnan().all()
