"""Bad input gets an error that names the argument, the contract and the value, before anything is written."""

import dataclasses
import pickle

import pytest
import torch
import triton

import quire
from quire import reference
from quire.dispatch.device import is_served_by_torch
from quire.testing import Oracle, check_batch, make_problem

SPEC = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_q_heads": 5}, ValueError, "num_q_heads must be a multiple of num_kv_heads, got 5 and 2"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be from 1 to 65535, got 0"),
        ({"head_dim": 20}, quire.UnsupportedError, "head_dim must be a multiple of 8 from 16 to 512, got 20"),
        ({"head_dim_v": 520}, quire.UnsupportedError, "head_dim_v must be"),
        (
            {"dtype": torch.float64},
            quire.UnsupportedError,
            "dtype must be one of float16, bfloat16, float32, got torch.float64",
        ),
        ({"kv_dtype": torch.uint8}, quire.UnsupportedError, "kv_dtype must be"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale must be positive"),
        ({"sliding_window": 0}, ValueError, "sliding_window must be at least 1"),
        ({"sliding_window_right": 3}, ValueError, "sliding_window_right must be left out where causal=True"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive"),
    ],
)
def test_spec(change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(SPEC, **change)


MLA = quire.AttentionSpec.mla(
    num_q_heads=4, softmax_scale=0.2, kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.float32
)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_kv_heads": 2}, ValueError, "num_kv_heads must be 1 where latent=True, got 2"),
        ({"head_dim_v": 64}, ValueError, "head_dim_v must be at most head_dim where latent=True, got 64 and 48"),
        ({"head_dim_v": 40}, quire.UnsupportedError, "head_dim_v must be a multiple of 16 from 16 to 512 where latent"),
        (
            {"head_dim": 56},
            quire.UnsupportedError,
            "head_dim - head_dim_v must be a multiple of 16 from 0 to 128 .* 24",
        ),
        ({"head_dim": 192}, quire.UnsupportedError, "head_dim - head_dim_v must be .* got 160"),
        ({"head_dim": 544, "head_dim_v": 528}, quire.UnsupportedError, "head_dim_v must be .* got 528"),
        ({"softmax_scale": None}, ValueError, "softmax_scale must be given where latent=True, got None"),
        ({"kv_dtype": torch.int8}, quire.UnsupportedError, "kv_dtype must be one of float32, float8_e4m3fn, got"),
        ({"kv_dtype": torch.float8_e5m2}, quire.UnsupportedError, "kv_dtype must be one of float32, float8_e4m3fn"),
        ({"latent": 1}, TypeError, "latent must be True or False, got 1"),
    ],
)
def test_spec_of_latents(change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(MLA, **change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv_lora_rank": 40}, quire.UnsupportedError, "kv_lora_rank must be a multiple of 16 from 16 to 512"),
        ({"kv_lora_rank": 0}, quire.UnsupportedError, "kv_lora_rank must be .* got 0"),
        ({"qk_rope_head_dim": 8}, quire.UnsupportedError, "qk_rope_head_dim must be a multiple of 16 from 0 to 128"),
        ({"qk_rope_head_dim": -16}, quire.UnsupportedError, "qk_rope_head_dim must be .* got -16"),
        ({"qk_rope_head_dim": 64.0}, TypeError, "qk_rope_head_dim must be an integer, got 64.0"),
        ({"softmax_scale": None}, ValueError, "softmax_scale must be given where latent=True, got None"),
        ({"num_kv_heads": 1}, TypeError, "num_kv_heads must be left out of mla, got 1; the widths say it"),
        ({"head_dim": 576}, TypeError, "head_dim must be left out of mla, got 576; the widths say it"),
    ],
)
def test_mla_names_the_widths_as_models_do(change, error, message):
    with pytest.raises(error, match=message):
        quire.AttentionSpec.mla(**{"num_q_heads": 4, "softmax_scale": 0.2} | change)


def test_mla_is_a_spec():
    spec = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.07, kv_dtype=torch.float8_e4m3fn, causal=False)
    same = quire.AttentionSpec(
        num_q_heads=16,
        num_kv_heads=1,
        head_dim=576,
        head_dim_v=512,
        softmax_scale=0.07,
        kv_dtype=torch.float8_e4m3fn,
        causal=False,
        latent=True,
    )
    assert spec == same == dataclasses.replace(spec) and hash(spec) == hash(same)
    assert (spec.kv_lora_rank, spec.qk_rope_head_dim, spec.group_size) == (512, 64, 16)
    with pytest.raises(quire.UnsupportedError, match="head_dim must be a multiple of 8 from 16 to 512, got 576"):
        dataclasses.replace(spec, latent=False)


def test_specs_are_values():
    same = quire.AttentionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=16, dtype=torch.float32, softmax_scale=0.25
    )
    assert same == SPEC and hash(same) == hash(SPEC)
    stored = pickle.dumps(SPEC)
    assert b"_hash" not in stored  # strings and dtypes have other hashes in another process
    assert pickle.loads(stored) == SPEC and hash(pickle.loads(stored)) == hash(SPEC)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (torch.zeros(2, 3), int32(1, 1), int32(0, 1, 2)),
            TypeError,
            "page_table must be int32 or int64, got torch.float32",
        ),
        (
            (torch.zeros(2, 3, dtype=torch.int32).t(), int32(1, 1, 1), int32(0, 1, 2, 3)),
            ValueError,
            "page_table must have 2 dimension",
        ),
        (
            (torch.zeros(1, 3, dtype=torch.int32), int32(1, 1), int32(0, 1, 2)),
            ValueError,
            "page_table must have one row per sequence, got 1 rows for 2",
        ),
        (
            (torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int64), int32(0, 1, 2)),
            TypeError,
            "seq_lens must be int32",
        ),
        (
            (torch.zeros(2, 3, dtype=torch.int32), int32(1), int32(0, 1, 2)),
            ValueError,
            "cu_seqlens_q must have 2 entries for 1 seq",
        ),
        (
            (torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, 1, dtype=torch.int32)),
            ValueError,
            "seq_lens must be contiguous with one dimension",
        ),
        (
            (torch.zeros(2, 3, dtype=torch.int32), int32(1)),
            ValueError,
            "page_table must have one row per sequence, got 2 rows for 1",
        ),
        ((torch.zeros(6, dtype=torch.int32), int32(1, 1), int32(0, 1, 2)), ValueError, "a flat table needs cu_pages"),
        (
            (torch.zeros(6, dtype=torch.int32), int32(1, 1), int32(0, 1, 2), int32(0)),
            ValueError,
            "cu_pages must have 2 or 3 entries for 2 seq",
        ),
    ],
)
def test_batch(arguments, error, message):
    with pytest.raises(error, match=message):
        quire.Batch(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (torch.zeros(4, 5, 2, 16), torch.zeros(4, 5, 2, 16), "NDH"),
            quire.UnsupportedError,
            "layout must be one of NHD, HND, HDNX, THD, got 'NDH'",
        ),
        (
            (torch.zeros(4, 5, 16), torch.zeros(4, 5, 16)),
            ValueError,
            "k and v must have 4 and 4 dimensions in layout NHD",
        ),
        (
            (torch.zeros(4, 5, 16, 2).transpose(2, 3), torch.zeros(4, 5, 2, 16)),
            ValueError,
            "k must be contiguous in its last dimension",
        ),
        ((torch.zeros(4, 5, 2, 16), torch.zeros(4, 5, 2, 16).half()), ValueError, "v must have k's dtype"),
        ((torch.zeros(4, 5, 2, 16), torch.zeros(4, 6, 2, 16)), ValueError, "v must have k's pages, slots and heads"),
        ((torch.zeros(4, 5, 2, 16), torch.zeros(4, 5, 2, 16), "NHD", 1.0, 1.0), ValueError, "k_scale must be left out"),
        (
            (torch.zeros(4, 5, 2, 16, dtype=torch.int8),) * 2 + ("NHD", 1.0),
            ValueError,
            "k_scale and v_scale must be given together",
        ),
        (
            (torch.zeros(4, 5, 2, 16, dtype=torch.int8),) * 2 + ("NHD", torch.ones(3), torch.ones(3)),
            ValueError,
            r"k_scale must be a number, \[num_kv_heads\]",
        ),
        (
            (torch.zeros(4, 5, 2, 16, dtype=torch.int8),) * 2
            + ("NHD", torch.ones(4, 5, 2), torch.ones(2, 5, 4).permute(2, 1, 0)),
            ValueError,
            "v_scale must have k_scale's shape .* and strides",
        ),
        (
            (torch.zeros(4, 5, 2, 16, dtype=torch.int8),) * 2
            + ("NHD", torch.ones(2, dtype=torch.float64), torch.ones(2)),
            ValueError,
            "k_scale must be float32 on cpu, got a float64 tensor",
        ),
        (
            (torch.zeros(4, 5, 2, 16, dtype=torch.int8),) * 2 + ("NHD", -1.0, 1.0),
            ValueError,
            "k_scale must be positive",
        ),
        ((torch.zeros(4, 5, 2, 16, dtype=torch.uint8),) * 2, quire.UnsupportedError, "view it as its real dtype"),
    ],
)
def test_cache(arguments, error, message):
    with pytest.raises(error, match=message):
        quire.PagedKVCache(*arguments)


LATENTS = torch.zeros(4, 5, 48)
FP8_LATENTS = LATENTS.to(torch.float8_e4m3fn)
RECORDS = torch.zeros(4, 5, 656, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (LATENTS.to(torch.int8), 32),
            quire.UnsupportedError,
            "latents must be of dtype .* or uint8 records, got torch.i",
        ),
        ((LATENTS[:, :, None], 32), ValueError, r"latents must be \[num_pages, page_size, head_dim\]"),
        ((LATENTS[:0], 32), ValueError, "latents must be .* without an empty dimension"),
        ((LATENTS.transpose(1, 2), 5), ValueError, "latents must be contiguous in their last dimension, got strides"),
        ((LATENTS, 49), ValueError, "kv_lora_rank must be at most the width of latents, 48, got 49"),
        ((LATENTS, 0), ValueError, "kv_lora_rank must be at least 1, got 0"),
        ((LATENTS, 32, 1.0), ValueError, "scale must be left out for latents of torch.float32"),
        ((FP8_LATENTS, 32, 0.0), ValueError, "scale must be positive"),
        ((FP8_LATENTS, 32, torch.ones(2)), ValueError, "scale must be a number or hold one element"),
        ((FP8_LATENTS, 32, torch.ones(1).double()), ValueError, "scale must be float32 on cpu"),
        ((FP8_LATENTS, 32, torch.ones(1, device="meta")), ValueError, "scale must be float32 on cpu"),
        ((FP8_LATENTS.view(torch.uint8), 32), ValueError, "latents must be records of 656 or 584 or 528 bytes"),
        ((RECORDS, 576), ValueError, "kv_lora_rank must be 512 for fp8_ds_mla records, got 576"),
        ((RECORDS, 512, 1.0), ValueError, "scale must be left out for latents of fp8_ds_mla records"),
        (
            (torch.zeros(4, 5, 664, dtype=torch.uint8)[..., :656], 512),
            ValueError,
            "latents must be records that begin at multiples of 16 bytes",
        ),
        (
            (torch.zeros(4, 6, 584, dtype=torch.uint8)[:, ::2], 512),
            ValueError,
            "latents must have nothing between the 584 bytes of tokens",
        ),
        (
            (torch.zeros(4, 5, 528, dtype=torch.uint8), 448),
            ValueError,
            "must be 512 for fp8_ds_mla_528 records, got 448",
        ),
    ],
)
def test_cache_of_latents(arguments, error, message):
    latents, rank, *scale = arguments
    with pytest.raises(error, match=message):
        quire.PagedKVCache.from_latents(latents, rank, scale=scale[0] if scale else None)


@pytest.mark.parametrize("memory", [torch.zeros(4, 5, 48), torch.zeros(4, 3, 5, 48)[:, 1], torch.zeros(5, 4, 48).mT.mT])
def test_keys_and_values_of_latents_are_the_same_bytes(memory):
    cache = quire.PagedKVCache.from_latents(memory, 32)
    memory.copy_(torch.randn(memory.shape))
    assert torch.equal(cache.k, memory[:, :, None]) and torch.equal(cache.v, memory[:, :, None, :32])
    assert cache.latents is memory and cache.k.data_ptr() == cache.v.data_ptr() == memory.data_ptr()
    assert (cache.is_latent, cache.layout, cache.scale_kind) == (True, "NHD", "none")
    assert cache.signature == MLA.cache_signature
    plain = quire.PagedKVCache(cache.k, cache.v)
    assert not plain.is_latent and plain.signature != cache.signature and plain.kind != cache.kind


def test_one_scale_is_that_of_keys_and_values():
    scale = torch.tensor([0.25])
    cache = quire.PagedKVCache.from_latents(FP8_LATENTS, 32, scale=scale)
    assert cache.scale_kind == "head"
    assert cache.k_scale.data_ptr() == cache.v_scale.data_ptr() == scale.data_ptr()


def test_records_are_a_layout():
    records = torch.zeros(4, 7, 656, dtype=torch.uint8)[:, :5]
    cache = quire.PagedKVCache.from_latents(records, 512)
    spec = quire.AttentionSpec.mla(num_q_heads=4, softmax_scale=0.1, kv_dtype=torch.float8_e4m3fn)
    assert cache.signature == spec.cache_signature and cache.scale_kind == "record" and cache.layout == "fp8_ds_mla"
    assert (cache.page_size, cache.head_dim, cache.head_dim_v) == (5, 576, 512)
    assert [tuple(part.shape) for part in cache.records] == [(4, 5, 512), (4, 5, 4), (4, 5, 64)]
    assert {part.untyped_storage().data_ptr() for part in cache.records} == {records.untyped_storage().data_ptr()}
    assert cache.strides[0][:3] == (7 * 656, 656, 656)  # bytes


def test_records_of_a_page_may_have_their_scales_at_its_end():
    spec = quire.AttentionSpec.mla(
        num_q_heads=4, softmax_scale=0.1, qk_rope_head_dim=0, kv_dtype=torch.float8_e4m3fn, sinks=True
    )
    cache = quire.PagedKVCache.empty(spec, 4, 64, layout="fp8_ds_mla_584")
    assert cache.signature == spec.cache_signature and cache.latents.stride(0) == 65 * 576
    assert (cache.page_size, cache.head_dim, cache.head_dim_v) == (64, 512, 512)
    values, scales, rope = cache.records
    assert [tuple(part.shape) for part in cache.records] == [(4, 64, 448), (4, 64, 7), (4, 64, 64)]
    assert rope[1, 3].data_ptr() - values[1, 3].data_ptr() == 448
    assert scales[1, 3].data_ptr() - values[1, 0].data_ptr() == 64 * 576 + 3 * 8
    interleaved = quire.PagedKVCache.empty(spec, 4, 5, layout="fp8_ds_mla_528")
    assert interleaved.latents.is_contiguous() and interleaved.records.rope is None


def test_empty_allocates_what_the_spec_wants():
    fp8 = dataclasses.replace(MLA, kv_dtype=torch.float8_e4m3fn)
    for spec, scale_kind in ((MLA, "none"), (fp8, "head")):
        cache = quire.PagedKVCache.empty(spec, 4, 5)
        assert cache.latents.shape == (4, 5, 48) and cache.scale_kind == scale_kind
        assert cache.signature == spec.cache_signature
    with pytest.raises(quire.UnsupportedError, match=r"layout must be one of NHD, fp8_ds_mla, .*, got 'HND'"):
        quire.PagedKVCache.empty(MLA, 4, 5, layout="HND")
    with pytest.raises(quire.UnsupportedError, match="layout must be one of NHD, HND, HDNX, got 'fp8_ds_mla'"):
        quire.PagedKVCache.empty(SPEC, 4, 5, layout="fp8_ds_mla")
    for spec in (MLA, fp8):
        with pytest.raises(
            quire.UnsupportedError, match=r"layout must be NHD for latents of 32 \+ 16 in .*; its record"
        ):
            quire.PagedKVCache.empty(spec, 4, 5, layout="fp8_ds_mla")


@pytest.mark.pytorch
def test_queries_to_latents_are_checked_before_anything_is_written():
    p = make_problem(MLA, ((1, 20), (2, 9)))
    plan = quire.plan(MLA, p.batch, **p.bounds)
    q_nope, q_pe = p.halves
    keys = quire.PagedKVCache(p.cache.k, p.cache.v)
    wrong = [
        ((q_nope, q_pe[:, :2]), p.cache, ValueError, r"q_pe must be \[num_tokens, 4, 16\] as the spec says, got"),
        ((q_nope[..., :16], q_pe), p.cache, ValueError, r"q_nope must be \[num_tokens, 4, 32\]"),
        ((q_nope, q_pe[:2]), p.cache, ValueError, "q_pe must have q_nope's 3 tokens on cpu, got 2 on cpu"),
        ((q_nope, q_pe.half()), p.cache, ValueError, "q_pe must be torch.float32, got torch.float16"),
        ((q_nope, q_pe.to("meta")), p.cache, ValueError, "q_pe must have q_nope's 3 tokens on cpu, got 3 on meta"),
        ((q_nope, q_pe.repeat_interleave(2, -1)[..., ::2]), p.cache, ValueError, "q_pe must have a contiguous head"),
        ((q_nope, None), p.cache, TypeError, "q_pe must be a tensor with strides, got None"),
        ((q_nope,), p.cache, TypeError, r"q must be a tensor or the pair \(q_nope, q_pe\), got 1 of them"),
        ([q_nope, q_pe], p.cache, TypeError, "q must be a tensor"),
        (p.q[..., :32], p.cache, ValueError, r"q must be \[num_tokens, 4, 48\]"),
        ((q_nope, q_pe.clone().requires_grad_()), p.cache, quire.UnsupportedError, "q_pe must not require a gradient"),
        (p.q, keys, ValueError, "cache must hold latents as the spec says, got keys and values; make it with"),
    ]
    out = torch.full((3, 4, 32), 7.0)
    for q, cache, error, message in wrong:
        with pytest.raises(error, match=message):
            quire.attention(q, cache, plan, out=out)
    with pytest.raises(ValueError, match=r"out must be \[3, 4, 32\]"):
        quire.attention(p.q, p.cache, plan, out=torch.empty(3, 4, 48))
    assert (out == 7).all()


def test_keys_and_latents_are_not_mistaken_for_each_other():
    p = make_problem(SPEC, ((1, 20),))
    plan = quire.plan(SPEC, p.batch, **p.bounds)
    latents = quire.PagedKVCache.from_latents(p.cache.k[:, :, 0], 16)
    with pytest.raises(ValueError, match=r"cache must hold keys and values as the spec says, got latents; .*\.mla"):
        quire.attention(p.q, latents, plan)
    with pytest.raises(TypeError, match="q must be a tensor with strides, got a value of type tuple"):
        quire.attention((p.q, None), p.cache, plan)


def test_latents_are_always_paged():
    batch = quire.Batch.varlen(int32(0, 1), int32(0, 4))
    with pytest.raises(quire.UnsupportedError, match="batch must be paged for a spec with latents, got one without"):
        quire.plan(MLA, batch, max_query_len=1, max_seq_len=4)


@pytest.mark.pytorch
def test_a_plan_for_latents_is_refused_for_keys_that_are_not_paged():
    p = make_problem(MLA, ((1, 20),))
    plan = quire.plan(MLA, p.batch, **p.bounds)
    with pytest.raises(quire.UnsupportedError, match="plan must be for keys and values, got one for latents"):
        quire.varlen_attention(p.q, p.cache.k[0], p.cache.v[0], plan)


@pytest.mark.triton
@pytest.mark.parametrize("kernel", ["hopper", "portable"])
def test_kernels_for_keys_refuse_latents(kernel):
    p = make_problem(MLA, ((1, 20),), device="cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(quire.UnsupportedError, match=f"got '{kernel}', which does not serve latents"):
        quire.plan(MLA, p.batch, **p.bounds, kernel=kernel)


def test_attention_checks_before_it_writes():
    p = make_problem(SPEC, ((1, 20), (2, 9)))
    plan = quire.plan(SPEC, p.batch, **p.bounds)
    out = torch.full((3, 4, 16), 7.0)
    wrong = [
        (dict(q=p.q[:, :2]), "q must be"),
        (dict(q=p.q[..., :8].clone()), "q must be"),
        (dict(q=p.q.half()), "q must be torch.float32"),
        (dict(q=p.q.to("meta")), "q, cache and batch must be on one device, got meta, cpu and cpu"),
        (dict(cache=quire.PagedKVCache(p.cache.k.to("meta"), p.cache.v.to("meta"))), "got cpu, meta and cpu"),
        (dict(q=torch.cat([p.q, p.q])), "q must have at most the 3 tokens planned for, got 6"),
        (dict(cache=quire.PagedKVCache(p.cache.k.half(), p.cache.v.half())), "cache must be of the spec's kv_dtype"),
        (dict(cache=quire.PagedKVCache(p.cache.k[..., :8], p.cache.v[..., :8])), "cache must have 2 heads of 16"),
        (
            dict(cache=quire.PagedKVCache(p.cache.k[:, :4], p.cache.v[:, :4])),
            "page_table must cover max_seq_len = 20 keys, got 2 pages of 4",
        ),
        (dict(sinks=torch.zeros(4)), "sinks must be given exactly when the spec has it"),
        (dict(out=out[:2]), "out must be"),
        (dict(out=quire.State(out, torch.zeros(3, 4).double())), "out.lse must be"),
    ]
    for change, message in wrong:
        arguments = dict(q=p.q, cache=p.cache, plan=plan, out=out) | change
        with pytest.raises(ValueError, match=message):
            quire.attention(**arguments)
    assert (out == 7).all()
    with pytest.raises(quire.UnsupportedError, match="gradient"):
        quire.attention(p.q.clone().requires_grad_(), p.cache, plan)
    with pytest.raises(quire.UnsupportedError, match="out must not require a gradient"):
        quire.attention(p.q, p.cache, plan, out=out.clone().requires_grad_())
    needs = dataclasses.replace(SPEC, sinks=True)
    with pytest.raises(ValueError, match="got none"):
        quire.attention(p.q, p.cache, quire.plan(needs, p.batch, **p.bounds))


def test_batches_without_query_counts_have_one_query_each():
    p = make_problem(SPEC, ((1, 20), (1, 9)), one_query=True)
    with pytest.raises(ValueError, match="max_query_len must be 1 where the batch has no cu_seqlens_q, got 2"):
        quire.plan(SPEC, p.batch, max_query_len=2, max_seq_len=20)
    with pytest.raises(ValueError, match="q must have a token for each of 2 sequences, got 1"):
        quire.attention(p.q[:1], p.cache, quire.plan(SPEC, p.batch, **p.bounds))


def test_allow_fp8_is_a_permission():
    """Kernels without fp8 products ignore it. The budget widens by what they would round, for an e4m3 cache alone."""
    for dtype, widens in ((torch.float8_e4m3fn, True), (torch.int8, False)):
        strict = make_problem(dataclasses.replace(SPEC, kv_dtype=dtype), ((5, 60), (1, 9)))
        allowed = dataclasses.replace(strict, spec=dataclasses.replace(strict.spec, allow_fp8=True))
        budgets = [Oracle(p).budget for p in (strict, allowed)]
        outs = [quire.attention(p.q, p.cache, quire.plan(p.spec, p.batch, **p.bounds)) for p in (strict, allowed)]
        assert torch.equal(*outs) and (budgets[1] > 100 * budgets[0] if widens else budgets[1] == budgets[0])


def test_rounding_to_fp8_keeps_three_bits_of_any_magnitude():
    x = (
        torch.randn(64, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        * torch.logspace(-8, 8, 64, dtype=torch.float64)[:, None]
    )
    x[7] = 0
    peaks = x.abs().amax(1, keepdim=True)
    assert (
        (reference.to_fp8(x) - x).abs() <= x.abs() / 16 + peaks * 2.0**-17
    ).all()  # half of the last of four bits; of small ones, half of the smallest step


def test_plan_bounds():
    p = make_problem(SPEC, ((1, 20),))
    for bounds, message in (
        ({"max_query_len": -1, "max_seq_len": 4}, "max_query_len must be from 0 to"),
        ({"max_query_len": 1, "max_seq_len": 4, "num_splits": 0}, "num_splits must be from 1 to 128, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            quire.plan(SPEC, p.batch, **bounds)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="only the interpreter is wrong for bfloat16")
def test_the_interpreter_refuses_bfloat16():
    p = make_problem(quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16), ((1, 20),))
    with pytest.raises(quire.UnsupportedError, match="use float32 or float16"):
        quire.plan(p.spec, p.batch, **p.bounds)


def test_a_plan_prints_its_launch_and_the_reason():
    p = make_problem(SPEC, ((1, 20), (2, 9)))
    plan = quire.plan(SPEC, p.batch, **p.bounds)
    assert "2 sequences, at most 2 queries and 20 keys each" in repr(plan)
    assert str(plan.launch) in repr(plan) and plan.reason in repr(plan)


def test_check_batch_reads_the_device():
    p = make_problem(SPEC, ((1, 20), (2, 9)))
    check_batch(p.batch, p.cache)

    def broken(**change):
        return dataclasses.replace(p.batch, **change)

    table = p.batch.page_table
    shared = table.clone()
    shared[1, 0] = shared[0, 1]
    outside = table.clone()
    outside[0, 0] = 99
    for batch, message in (
        (broken(page_table=outside), "page_table must hold pages 0 to .*, got 99 for sequence 0"),
        (broken(page_table=shared), "page_table must give a page that is written to one sequence"),
        (broken(seq_lens=int32(20, 900)), "page_table must cover sequence 1's 900 keys"),
        (broken(seq_lens=int32(20, 1)), "seq_lens must include the new tokens"),
        (broken(seq_lens=int32(-1, 9)), "seq_lens must be at least 0, got -1"),
        (broken(cu_seqlens_q=int32(0, 2, 1)), "cu_seqlens_q must start at 0 and not decrease"),
    ):
        with pytest.raises(ValueError, match=message):
            check_batch(batch, p.cache)
    words = torch.tensor([1, 1, 2])
    for fields, message in (
        (dict(key_begin=int32(0, 0, 0), key_end=int32(20, 9, 10)), "key_end must be .* 9 keys, got 10 for token 2 of"),
        (dict(key_begin=int32(-1, 0, 0), key_end=int32(20, 9, 9)), "key_begin must be .* 20 keys, got -1 for token 0"),
        (dict(tree_bits=torch.tensor([1, 5, 2])), "tree_bits must name the sequence's 2 drafts, got 0x5 for token 1"),
        (dict(tree_bits=words, key_begin=int32(0, 0, 30)), "key_begin must be .* 9 keys, got 30 for token 2 of seq"),
    ):
        with pytest.raises(ValueError, match=message):
            check_batch(broken(**fields), p.cache)
        quire.attention(p.q, p.cache, quire.plan(SPEC, broken(**fields), **p.bounds))  # which leaves it out
    check_batch(broken(tree_bits=words), p.cache)
    prefix = table.clone()
    prefix[1, 0] = prefix[0, 0]  # a full page of sequence 0's past, which sequence 1 only reads
    shared_prefix = quire.Batch(
        torch.cat([prefix, torch.full((2, 1), 2, dtype=torch.int32)], 1)[:, :2].contiguous(),
        int32(20, 20),
        p.batch.cu_seqlens_q,
    )
    shared_prefix.page_table[1, 1] = next(x for x in range(1, p.cache.num_pages) if x not in table.flatten().tolist())
    check_batch(shared_prefix, p.cache)
    with pytest.raises(ValueError, match="one sequence"):
        check_batch(shared_prefix, p.cache, shared_pages=False)


def test_tensors_on_two_devices_are_refused():
    p = make_problem(SPEC, ((1, 20), (2, 9)))
    plan = quire.plan(SPEC, p.batch, **p.bounds)
    elsewhere = quire.PagedKVCache(p.cache.k.to("meta"), p.cache.v.to("meta"))
    for change in (dict(q=p.q.to("meta")), dict(cache=elsewhere), dict(q=p.q.to("meta"), cache=elsewhere)):
        with pytest.raises(ValueError, match="q, cache and batch must be on one device"):
            quire.attention(**dict(q=p.q, cache=p.cache, plan=plan) | change)


def test_scales_of_keys_and_values_have_the_same_strides():
    """Kernels read both at one offset."""
    k, v = torch.zeros(2, 3, 4, 2, 16, dtype=torch.int8)
    scale, other = torch.ones(3, 4, 2), torch.ones(2, 3, 4).permute(1, 2, 0)
    quire.PagedKVCache(k, v, "NHD", scale, scale.clone())
    for scales in ((scale, other), (other, scale), (torch.ones(2), torch.ones(2, 2)[:, 0])):
        with pytest.raises(ValueError, match="v_scale must have k_scale's shape"):
            quire.PagedKVCache(k, v, "NHD", *scales)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_scales_given_as_numbers_do_not_depend_on_the_default_dtype(default):
    spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, kv_dtype=torch.float8_e4m3fn)
    latent = quire.AttentionSpec.mla(num_q_heads=4, softmax_scale=0.2, kv_dtype=torch.float8_e4m3fn)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)  # which loaders of models do
    try:
        caches = [quire.PagedKVCache.empty(s, num_pages=2, page_size=4) for s in (spec, latent)]
        caches.append(quire.PagedKVCache(caches[0].k, caches[0].v, "NHD", 0.1, 3))
    finally:
        torch.set_default_dtype(before)
    for cache, (k_scale, v_scale) in zip(caches, ((1, 1), (1, 1), (0.1, 3)), strict=True):
        assert cache.k_scale.dtype is cache.v_scale.dtype is torch.float32
        assert torch.equal(cache.k_scale[:1], torch.tensor([k_scale])) and torch.equal(
            cache.v_scale[:1], torch.tensor([v_scale])
        )


def test_a_cache_is_pickled_without_what_it_has_computed():
    """The number of its kind is one of this process. In another one, it may be that of other strides."""
    cache = quire.PagedKVCache.empty(SPEC, num_pages=2, page_size=4)
    assert (cache.kind, cache.strides, cache.extents) and "kind" in cache.__dict__
    again = pickle.loads(pickle.dumps(cache))
    assert not {"kind", "strides", "extents"} & set(again.__dict__)
    assert again.kind == cache.kind and again.k.shape == cache.k.shape and again.signature == cache.signature


def test_caches_of_more_than_2_gib_are_another_kind():
    """Triton compiles addresses of 32 bits for less, for AMD's GPUs."""
    small, large = (torch.empty(size, dtype=torch.float32)[:512].view(4, 4, 2, 16) for size in (512, (1 << 29) + 512))
    kinds = [quire.PagedKVCache(k, v).kind for k, v in ((small, small), (large, small), (small, large))]
    assert len(set(kinds)) == 3 and quire.PagedKVCache(small.clone(), small).kind == kinds[0]


def test_nothing_is_written_for_a_plan_that_does_not_fit(device):
    p = make_problem(SPEC, ((1, 16), (1, 16)), page_size=4, device=device)
    p.batch.page_table[1, :3] = p.batch.page_table[0, :3]
    k, v = torch.ones(2, 2, 2, 16, device=device)
    slots = p.batch.page_table[:, 3].long() * 4 + 3
    uneven = quire.plan(SPEC, p.batch, **p.bounds, shared_prefix=6)
    refused = [(uneven, "cache must have a page size that divides the 6 keys")]
    if is_served_by_torch(torch.device(device)):  # where contents are read
        short = quire.plan(SPEC, p.batch, max_query_len=1, max_seq_len=15)
        refused.append((short, "max_seq_len must bound every sequence, got 15"))
    before = p.cache.k.nan_to_num()
    for plan, message in refused:
        with pytest.raises(ValueError, match=message):
            quire.attention(p.q, p.cache, plan, k=k, v=v, slot_mapping=slots)
        assert torch.equal(p.cache.k.nan_to_num(), before)


def test_check_batch_knows_which_batches_write():
    """Queries with offsets are not the last keys, keys that are not paged have no slots, and shares are incomplete."""
    cache = quire.PagedKVCache.empty(SPEC, num_pages=4, page_size=4)
    table = int32(0, 1).expand(2, 2).contiguous()
    with pytest.raises(ValueError, match="one sequence"):
        check_batch(quire.Batch(table, int32(7, 8), int32(0, 2, 4)), cache)
    check_batch(quire.Batch(table, int32(7, 8), int32(0, 2, 4)), cache, writes=False)
    check_batch(quire.Batch(table, int32(7, 8), int32(0, 2, 4), query_offsets=int32(9, 9)), cache)
    packed = quire.PagedKVCache(torch.zeros(8, 2, 16), torch.zeros(8, 2, 16), "THD")
    check_batch(quire.Batch(int32(0, 0)[:, None], int32(4, 8), int32(0, 2, 4), paged=False), packed)


def test_packed_keys_that_change_in_place(device):
    """As `Batch.varlen` says: the lengths are a tensor of their own."""
    starts = torch.tensor([0, 5, 9], dtype=torch.int32, device=device)
    batch = quire.Batch.varlen(starts, starts)
    plan = quire.plan(SPEC, batch, max_query_len=9, max_seq_len=9, num_tokens=9)
    q, (k, v) = torch.randn(9, 4, 16, device=device), torch.randn(2, 9, 2, 16, device=device)
    starts.copy_(int32(0, 2, 9))
    torch.sub(starts[1:], starts[:-1], out=batch.seq_lens)
    out = quire.varlen_attention(q, k, v, plan)
    again = quire.Batch.varlen(starts.clone(), starts.clone())
    expected = quire.varlen_attention(q, k, v, quire.plan(SPEC, again, max_query_len=9, max_seq_len=9, num_tokens=9))
    assert torch.equal(out, expected)
