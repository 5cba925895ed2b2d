"""Operators under `torch.compile(fullgraph=True)` and `torch.library.opcheck` compute what the eager verbs compute."""

from dataclasses import replace

import pytest
import torch

import quire
from quire.integrations import flash_attn
from quire.testing import make_problem, random_norm_rope
from tests.extended import extended, slow

SPEC = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=24, dtype=torch.float32, sinks=True)
NO_LISTS = *[None] * 7, 1, False, None, None, 1, None  # what a batch may have besides its lengths


def step(q, k, v, slots, cache, plan, sinks):
    quire.write_kv(k, v, cache, slots)
    state = quire.attention(q, cache, plan, sinks=sinks, return_lse=True)
    return quire.merge_states([state, quire.State(state.out * 2, state.lse)]).out + 1


def asked_of(plan):
    """What crosses the operator of a plan, without its tensors."""
    return *plan.asked, plan.bounds.max_query_len, plan.bounds.max_seq_len, plan.bounds.num_tokens


def problem():
    p = make_problem(SPEC, ((1, 20), (2, 9)))
    plan = quire.plan(SPEC, p.batch, **p.bounds)
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 24)
    table = p.batch.page_table
    slots = torch.tensor([int(table[0, 1]) * 16 + 3, -1, int(table[1, 0]) * 16 + 8])
    return p, plan, k, v, slots


ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_gpu.py compiles for the GPU by inductor")


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, ON_CPU])])
def test_compiled_is_eager(backend):
    """The first use of inductor takes ten seconds: it compiles PyTorch's C++ headers, for every later use."""
    p, plan, k, v, slots = problem()
    twin = quire.PagedKVCache(p.cache.k.clone(), p.cache.v.clone())
    expected = step(p.q, k, v, slots, p.cache, plan, p.sinks)
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(p.q, k, v, slots, twin, plan, p.sinks), expected)
    assert torch.equal(twin.k.nan_to_num(), p.cache.k.nan_to_num())
    with torch.compiler.set_stance("fail_on_recompile"):  # contents may change, and a second layer may come
        p.batch.seq_lens.copy_(torch.tensor([19, 9]))
        other = quire.PagedKVCache(p.cache.k.clone(), p.cache.v.clone())
        torch.testing.assert_close(
            compiled(p.q, k, v, slots, other, plan, p.sinks), step(p.q, k, v, slots, p.cache, plan, p.sinks)
        )


def test_a_step_that_appends_under_compile():
    """Compiled code writes and then attends; the cache is declared as changed, so that neither is moved or dropped."""
    p, plan, k, v, slots = problem()

    def append(q, k, v, slots, cache, plan, sinks):
        out = quire.attention(q, cache, plan, k=k, v=v, slot_mapping=slots, sinks=sinks)
        return out, cache.k.sum(-1)

    caches = [quire.PagedKVCache(p.cache.k.nan_to_num(), p.cache.v.nan_to_num()) for _ in range(2)]
    expected = append(p.q, k, v, slots, caches[0], plan, p.sinks)
    torch._dynamo.reset()
    compiled = torch.compile(append, backend="aot_eager", fullgraph=True)
    found = compiled(p.q, k, v, slots, caches[1], plan, p.sinks)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert torch.equal(caches[1].k, caches[0].k) and torch.equal(caches[1].v, caches[0].v)


@pytest.mark.parametrize(
    "norm_rope", [{"rotary_dim": 12, "qk_norm": True}, {"rotary_dim": 16}, {"qk_norm": True}], ids=str
)
def test_a_step_that_rotates_under_compile(norm_rope):
    """Two operators: one rotates and writes, the other attends."""
    p, plan, k, v, slots = problem()
    how = random_norm_rope(p, **norm_rope)

    def attend(q, k, v, slots, cache, plan, sinks, how):
        out = quire.attention(q, cache, plan, k=k, v=v, slot_mapping=slots, sinks=sinks, **how)
        return out, cache.k.sum(-1)

    caches = [quire.PagedKVCache(p.cache.k.nan_to_num(), p.cache.v.nan_to_num()) for _ in range(2)]
    expected = attend(p.q, k, v, slots, caches[0], plan, p.sinks, how)
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found = compiled(p.q, k, v, slots, caches[1], plan, p.sinks, how)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert torch.equal(caches[1].k, caches[0].k) and torch.equal(caches[1].v, caches[0].v)
    rotation, norm = how.get("rope", (None, None, None, False)), how.get("qk_norm", (None, None, 1.0))
    stored = caches[0].k, caches[0].v, *[None] * 4, "NHD", None, None, None
    results = *rotation, *norm, torch.zeros_like(p.q)
    torch.library.opcheck(torch.ops.quire.norm_rope_and_write.default, (p.q, k, v, slots, *stored, *results))


def test_new_latents_under_compile():
    p, plan, q, new, slots = latent_problem("e4m3")
    caches = clone_of(p.cache), clone_of(p.cache)
    quire.write_latent(*new, caches[0], slots)
    torch._dynamo.reset()
    compiled = torch.compile(quire.attention, backend="aot_eager", fullgraph=True)
    found = compiled(q, caches[1], plan, k=new[0], v=new[1], slot_mapping=slots)
    torch.testing.assert_close(found, quire.attention(q, caches[0], plan))
    assert torch.equal(caches[1].latents.view(torch.uint8), caches[0].latents.view(torch.uint8))


@pytest.mark.parametrize("kind", ["intervals", "tree", "lists"])
def test_what_a_token_sees_crosses_the_operator(kind):
    p = make_problem(SPEC, ((1, 20), (2, 9)))
    if kind == "intervals":
        batch = quire.intervals.block_causal(p.batch, 3, 3)
        changed = batch.key_end
    elif kind == "tree":
        batch = replace(p.batch, tree_bits=torch.tensor([1, 1, 2]))
        changed = batch.tree_bits
    else:
        lists = torch.tensor([[0, 3, -1], [1, -1, 0], [1, 0, 9]], dtype=torch.int32)
        changed = torch.tensor([3, 2, 2], dtype=torch.int32)
        batch = replace(p.batch, chosen=quire.ChosenKeys(lists, changed, block_size=4))
    plan = quire.plan(SPEC, batch, **p.bounds)

    def attend(q, cache, plan, sinks):
        return quire.attention(q, cache, plan, sinks=sinks)

    expected = attend(p.q, p.cache, plan, p.sinks)
    assert not torch.equal(expected, attend(p.q, p.cache, quire.plan(SPEC, p.batch, **p.bounds), p.sinks))
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(p.q, p.cache, plan, p.sinks), expected)
    with torch.compiler.set_stance("fail_on_recompile"):
        changed.fill_(1)
        torch.testing.assert_close(compiled(p.q, p.cache, plan, p.sinks), attend(p.q, p.cache, plan, p.sinks))


def test_lists_of_keys_in_a_second_cache_cross_the_operator():
    spec = quire.AttentionSpec.mla(
        num_q_heads=3, softmax_scale=0.2, kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.float32, causal=False
    )
    p = make_problem(spec, ((1, 20), (2, 9)))
    caches = p.cache.latents.nan_to_num(), torch.randn(4, 8, 48)
    cache, extra_cache = (quire.PagedKVCache.from_latents(latents, 32) for latents in caches)
    lists = torch.tensor([[0, 3, -1], [1, -1, 0], [1, 0, 9]], dtype=torch.int32)
    extra = quire.ChosenKeys(lists.flip(0) + 4, torch.tensor([3, 2, 0], dtype=torch.int32), are_slots=True)
    batch = replace(p.batch, chosen=quire.ChosenKeys(lists), extra_chosen=extra)
    plan = quire.plan(spec, batch, **p.bounds)

    def attend(q, cache, extra_cache, plan):
        return quire.attention(q, cache, plan, extra_cache=extra_cache)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    expected = attend(p.q, cache, extra_cache, plan)
    torch.testing.assert_close(compiled(p.q, cache, extra_cache, plan), expected)
    flat = quire.plan(spec, replace(batch, extra_chosen=None), **p.bounds)
    assert not torch.equal(expected, quire.attention(p.q, cache, flat))


LATENTS = {  # dtype of the cache, layout, rank and rotary columns
    "float32": (None, "NHD", 32, 16),
    "float32, no rotary columns": (None, "NHD", 32, 0),
    "e4m3": (torch.float8_e4m3fn, "NHD", 32, 16),
    "records": (torch.float8_e4m3fn, "fp8_ds_mla", 512, 64),
    "records of 584 bytes": (torch.float8_e4m3fn, "fp8_ds_mla_584", 512, 0),
}


def latent_problem(kind):
    """A problem, its plan, queries as engines hold them, latents to write and their slots."""
    kv_dtype, layout, rank, rope = LATENTS[kind]
    spec = quire.AttentionSpec.mla(
        num_q_heads=4,
        softmax_scale=0.1,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        dtype=torch.float32,
        kv_dtype=kv_dtype,
    )
    p = make_problem(spec, ((1, 20), (2, 9)), layout=layout)
    plan = quire.plan(spec, p.batch, **p.bounds)
    q = tuple(half.clone() for half in p.halves) if rope else (p.q, None)
    new = torch.randn(3, rank), torch.randn(3, 1, rope) if rope else None
    table = p.batch.page_table
    return p, plan, q, new, torch.tensor([int(table[0, 1]) * 16 + 3, -1, int(table[1, 0]) * 16 + 8])


def clone_of(cache):
    return quire.PagedKVCache.from_latents(cache.latents.clone(), cache.head_dim_v, scale=cache.k_scale)


def latent_step(q, new, slots, cache, plan):
    quire.write_latent(*new, cache, slots)
    state = quire.attention(q, cache, plan, return_lse=True)
    return quire.merge_states([state, quire.State(state.out * 2, state.lse)]).out + 1


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *(("aot_eager", kind) for kind in LATENTS),
        *(slow("inductor", kind) if kind == "e4m3" else extended("inductor", kind) for kind in LATENTS),
    ],
)
def test_compiled_is_eager_for_latents(backend, kind):
    p, plan, q, new, slots = latent_problem(kind)
    twin, third = clone_of(p.cache), clone_of(p.cache)
    expected = latent_step(q, new, slots, p.cache, plan)
    torch._dynamo.reset()
    compiled = torch.compile(latent_step, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(q, new, slots, twin, plan), expected)
    assert torch.equal(twin.latents.view(torch.uint8), p.cache.latents.view(torch.uint8))
    with torch.compiler.set_stance("fail_on_recompile"):  # a second layer
        torch.testing.assert_close(compiled(q, new, slots, third, plan), expected)


def test_one_tensor_of_queries_to_latents_under_compile():
    p, plan, *_ = latent_problem("float32")
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: quire.attention(q, p.cache, plan), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(p.q), quire.attention(p.q, p.cache, plan))


@pytest.mark.slow
def test_opcheck_of_latents():
    p, plan, q, new, slots = latent_problem("float32")
    clean, b = p.cache.latents.nan_to_num(), p.batch
    tables = b.page_table, b.seq_lens, b.cu_seqlens_q, *NO_LISTS
    results = torch.zeros(3, 4, 32), torch.zeros(3, 4), plan.workspace
    torch.library.opcheck(
        torch.ops.quire.attention.default,
        (*q, clean, *[None] * 5, "NHD", *tables, None, None, [], None, *results, *asked_of(plan)),
    )
    torch.library.opcheck(torch.ops.quire.write_latent.default, (*new, clean, 32, None, slots))


def test_out_and_lse_under_compile():
    p, plan, *_ = problem()
    expected = quire.attention(p.q, p.cache, plan, sinks=p.sinks, return_lse=True)

    def into(q, out, lse):
        return quire.attention(q, p.cache, plan, sinks=p.sinks, out=quire.State(out, lse))

    out, lse = torch.empty(3, 4, 24), torch.empty(3, 4)
    torch._dynamo.reset()
    torch.compile(into, backend="aot_eager", fullgraph=True)(p.q, out, lse)
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse)


@pytest.mark.slow
def test_opcheck():
    p, plan, k, v, slots = problem()
    clean = quire.PagedKVCache(
        p.cache.k.nan_to_num(), p.cache.v.nan_to_num()
    )  # opcheck compares, and NaN equals nothing
    b = p.batch
    torch.library.opcheck(
        torch.ops.quire.attention.default,
        (p.q, None, clean.k, clean.v, *[None] * 4, "NHD", b.page_table, b.seq_lens, b.cu_seqlens_q,
         *NO_LISTS, p.sinks, None, [], None, torch.zeros(3, 4, 24), torch.zeros(3, 4), plan.workspace, *asked_of(plan)),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.quire.write_kv.default, (k, v, clean.k, clean.v, *[None] * 4, "NHD", None, None, None, slots)
    )
    torch.library.opcheck(torch.ops.quire.merge_states.default, ([p.q, p.q * 2], [torch.zeros(3, 4), torch.ones(3, 4)]))


@pytest.mark.parametrize("given", [False, True])
def test_an_output_in_e4m3_under_compile(given):
    p, plan, *_ = problem()
    scale, out = torch.tensor([0.02]), torch.zeros(3, 4, 24).to(torch.float8_e4m3fn) if given else None

    def attend(q, scale, out):
        return quire.attention(q, p.cache, plan, sinks=p.sinks, out=out, out_scale=scale)

    expected = attend(p.q, scale, None)
    torch._dynamo.reset()
    found = torch.compile(attend, backend="aot_eager", fullgraph=True)(p.q, scale, out)
    assert found.dtype is torch.float8_e4m3fn and torch.equal(found.float(), expected.float())
    assert out is None or torch.equal(out.float(), expected.float())


def test_rows_of_no_sequence_are_left_under_compile():
    p, *_ = problem()
    plan = quire.plan(SPEC, p.batch, **p.bounds | {"num_tokens": 5})

    def into(q, out):
        return quire.attention(q, p.cache, plan, sinks=p.sinks, out=out)

    out = torch.full((5, 4, 24), 7.0)
    torch._dynamo.reset()
    torch.compile(into, backend="aot_eager", fullgraph=True)(torch.cat([p.q, p.q[:2]]), out)
    torch.testing.assert_close(out[:3], quire.attention(p.q, p.cache, plan, sinks=p.sinks))
    assert (out[3:] == 7).all()


WRONG = {  # the spec's and the cache's fields, the call's arguments, and what the error names
    "no sinks": ({"sinks": True}, {}, {}, "sinks must be given exactly when the spec has it, got none"),
    "sinks": ({}, {}, {"sinks": torch.zeros(4)}, "sinks must be given exactly when the spec has it, got one"),
    "no slopes": ({"alibi": True}, {}, {}, "alibi_slopes must be given exactly when the spec has it, got none"),
    "slopes": ({}, {}, {"alibi_slopes": torch.zeros(4)}, "alibi_slopes must be given exactly when the spec has it"),
    "8 heads": ({}, {}, {"q": torch.zeros(2, 8, 16)}, "q must be .*4, 16"),
    "2 heads": ({}, {}, {"q": torch.zeros(2, 2, 16)}, "q must be .*4, 16"),
    "one KV head": ({}, {"num_kv_heads": 1}, {}, "cache must have 2 heads of 16"),
    "dtypes": ({}, {"dtype": torch.float16}, {"q": torch.zeros(2, 4, 16).half()}, "q must be torch.float32"),
    "the cache's dtype": ({}, {"dtype": torch.float16}, {}, "cache must be of the spec's kv_dtype torch.float32"),
    "out's dtype": ({}, {}, {"out": torch.zeros(2, 4, 16).half()}, "out must be .* torch.float32"),
    "out's shape": ({}, {}, {"out": torch.zeros(4, 4, 16)}, r"out must be \[2, 4, 16\]"),
    "an e4m3 out without a scale": (
        {},
        {},
        {"out": torch.zeros(2, 4, 16).to(torch.float8_e4m3fn)},
        "out must be .* torch.float32 .* pass out_scale to have it quantised",
    ),
    "a scale for an out of another dtype": (
        {},
        {},
        {"out": torch.zeros(2, 4, 16), "out_scale": torch.ones(1)},
        "out must be .* torch.float8_e4m3fn",
    ),
    "two scales": ({}, {}, {"out_scale": torch.ones(2)}, "out_scale must be one float32 number on cpu, got a float32"),
    "a scale's dtype": ({}, {}, {"out_scale": torch.ones(1).half()}, "out_scale must be one float32 number on cpu"),
    "no values": ({}, {}, {"k": torch.zeros(2, 2, 16), "slot_mapping": torch.zeros(2).long()}, "v must be a tensor"),
    "one slot": (
        {},
        {},
        {"k": torch.zeros(2, 2, 16), "v": torch.zeros(2, 2, 16), "slot_mapping": torch.zeros(1).long()},
        "k and slot_mapping must have q's 2 tokens, got 2 and 1",
    ),
    "a rope without tokens": (
        {},
        {},
        {"rope": quire.Rope(torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(2).long())},
        "rope must be given with k, v and slot_mapping",
    ),
    "lse's dtype": ({}, {}, {"out": quire.State(torch.zeros(2, 4, 16), torch.zeros(2, 4).double())}, "out.lse must be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_compiled_calls_are_checked_as_eager_ones(case):
    fields, other, wrong, message = WRONG[case]
    spec = quire.AttentionSpec(**{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32} | fields)
    cache = quire.PagedKVCache.empty(replace(spec, kv_dtype=None, **other), 8, 4)
    batch = quire.Batch(torch.tensor([[0], [1]]).int(), torch.tensor([4, 3]).int())
    plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=4)
    arguments = {"q": torch.zeros(2, 4, 16)} | wrong

    def attend(arguments):
        return quire.attention(cache=cache, plan=plan, **arguments)

    with pytest.raises((TypeError, ValueError), match=message):
        attend(arguments)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(attend, backend="eager", fullgraph=True)(arguments)


def test_compiled_writes_and_merges_are_checked_as_eager_ones():
    cache, latents = quire.PagedKVCache(*torch.zeros(2, 8, 4, 2, 16)), torch.zeros(8, 4, 48)
    latent_cache, slots = quire.PagedKVCache.from_latents(latents, 32), torch.tensor([3, 4])
    k, three, c_kv, k_pe = torch.ones(2, 2, 16), torch.ones(2, 3, 16), torch.ones(2, 32), torch.ones(2, 16)
    state = quire.State(k, torch.zeros(2, 2))
    for call, message in (
        (lambda: quire.write_kv(k, three, cache, slots), r"v must be \[num_tokens, 2, 16\]"),
        (lambda: quire.write_kv(k.half(), k.half(), cache, slots), "k must be of .*torch.float32"),
        (lambda: quire.write_kv(k, k, cache, slots.int()), "slot_mapping must be .*int64"),
        (lambda: quire.write_latent(c_kv[:, :16], k_pe, latent_cache, slots), "c_kv must be .*32"),
        (lambda: quire.write_latent(c_kv, None, latent_cache, slots), "k_pe must be"),
        (lambda: quire.merge_states([state, quire.State(three, torch.zeros(2, 3))]), r"states\[1\].out must be"),
        (lambda: quire.merge_states([state, quire.State(k.half(), state.lse)]), r"states\[1\].out must be"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            torch.compile(call, backend="eager", fullgraph=True)()
    assert not cache.k.any() and not cache.v.any() and not latents.any()


def test_what_is_no_operator_breaks_the_graph():
    cache, pairs = quire.PagedKVCache(*torch.randn(2, 8, 4, 2, 16)), torch.tensor([[0, 1]])
    spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    starts, (q, k, v) = torch.tensor([0, 5]).int(), torch.randn(3, 5, 2, 16)

    def plan_and_attend():
        plan = quire.plan(spec, quire.Batch.varlen(starts, starts), max_query_len=5, max_seq_len=5)
        return quire.varlen_attention(q, k, v, plan)

    for call in (
        lambda: quire.copy_pages(cache, cache, pairs),
        lambda: flash_attn.flash_attn_func(q[None], k[None], v[None]),
        plan_and_attend,
    ):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(call, backend="eager", fullgraph=True)()


def test_what_a_wrong_argument_raises_under_compile():
    """PyTorch turns every exception into its own if graph breaks are forbidden, and quotes it."""
    p, plan, *_ = problem()
    message = "sinks must be given exactly when the spec has it, got none"

    def without_sinks(q):
        return quire.attention(q, p.cache, plan)

    torch._dynamo.reset()
    with pytest.raises(ValueError, match=message):
        torch.compile(without_sinks, backend="eager")(p.q)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(without_sinks, backend="eager", fullgraph=True)(p.q)
