"""Lists of chosen keys: what they mean, what is checked, what the CPU path computes, and what refuses them."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import quire
import quire.debug
from quire import reference, targets
from quire.debug import replaying
from quire.dispatch.device import is_served_by_torch
from quire.dispatch.request import Bounds, Options, Request
from quire.plan import decide, passed_over
from quire.testing import check_batch, error_budget, make_problem, random_chosen
from tests import numpy_oracle

HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16}
LENS = ((1, 60), (9, 9), (4, 40), (0, 9), (1, 0), (20, 70))
MLA = {"num_q_heads": 3, "softmax_scale": 0.2}
SMALL = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
LISTS = {
    "one list": {"width": 12},
    "a list for each head": {"width": 12, "num_lists": 2},
    "counted": {"width": 12, "counted": True},
    "counted for each head": {"width": 12, "num_lists": 2, "counted": True},
    "regions of 8": {"width": 4, "block_size": 8},
    "blocks across pages": {"width": 3, "num_lists": 2, "block_size": 24},
    "slots": {"width": 12, "slots_of": 16},
    "blocks of slots": {"width": 5, "num_lists": 2, "block_size": 4, "slots_of": 16},
    "wide": {"width": 100},
    "no entries": {"width": 0},
}
by_torch = pytest.mark.skipif(
    not is_served_by_torch(torch.device("cpu")), reason="in Triton's interpreter the kernels serve CPU tensors"
)


def int32(*entries):
    return torch.tensor(entries, dtype=torch.int32)


def make_spec(**fields):
    return quire.AttentionSpec(**HEADS | {"dtype": torch.float32} | fields)


def make(spec, lens=LENS, *, width=12, **options):
    names = ("num_lists", "block_size", "counted", "slots_of")
    lists = {name: options.pop(name) for name in names if name in options}
    return make_problem(
        spec, lens, per_token=partial(random_chosen, width=width, causal=spec.causal, **lists), **options
    )


def attend(p, **options):
    return quire.attention(p.q, p.cache, quire.plan(p.spec, p.batch, **p.bounds), **p.tables | options)


def alone(p, token, head):
    """Return the numbers of a token's list for a head, as NumPy's oracle attends to them in a cache of their own."""
    batch, chosen, spec = p.batch, p.batch.chosen, p.spec
    kv_head = head // spec.group_size
    entries = chosen.indices[token] if chosen.indices.dim() == 2 else chosen.indices[token, kv_head % chosen.num_lists]
    if chosen.lens is not None:
        lens = chosen.lens[token]
        entries = entries[: int(lens if lens.dim() == 0 else lens[kv_head])]
    seq = max(s for s in range(batch.num_seqs) if int(batch.query_starts[s]) <= token and p.query_lens[s])
    position = p.seq_lens[seq] - int(batch.query_starts[seq + 1]) + token
    keys = [int(e) * chosen.block_size + j for e in entries if e >= 0 for j in range(chosen.block_size)]
    size = p.cache.page_size
    if chosen.are_slots:
        slots = keys
    else:
        keys = [key for key in keys if key < p.seq_lens[seq] and (key <= position or not spec.causal)]
        slots = [int(batch.page_table[seq, key // size]) * size + key % size for key in keys]
    table = torch.tensor([slots], dtype=torch.int32).view(1, -1)
    tokens = quire.PagedKVCache(p.cache.k.flatten(0, 1)[:, None], p.cache.v.flatten(0, 1)[:, None])
    named = quire.Batch(table, int32(len(slots)), int32(0, 1))
    query = p.q[token : token + 1]
    out, lse = numpy_oracle.attention(query, tokens, named, replace(spec, causal=False), p.sinks)
    return torch.from_numpy(out[0, head]), float(lse[0, head])


@pytest.mark.parametrize("lists", LISTS)
def test_the_oracle_attends_to_what_lists_name(lists):
    p = make(make_spec(sinks=True, softcap=4.0, causal="slots_of" not in LISTS[lists]), LENS[:4], **LISTS[lists])
    out, lse = reference.attention(p.q, p.cache, p.batch, p.spec, **p.tables)
    for token in range(p.q.shape[0]):
        for head in (0, 2, 3, 5):
            expected, expected_lse = alone(p, token, head)
            torch.testing.assert_close(out[token, head], expected, rtol=1e-9, atol=1e-9)
            assert float(lse[token, head]) == pytest.approx(expected_lse)


@by_torch
def test_large_lists_are_computed_in_steps(monkeypatch):
    p = make(make_spec(), num_lists=2)
    whole = attend(p, return_lse=True)
    monkeypatch.setattr("quire.kernels.cpu.attention.tokens_at_once", lambda numbers: 3)
    monkeypatch.setattr("quire.checks.batch.tokens_at_once", lambda numbers: 3)
    parts = attend(p, return_lse=True)
    torch.testing.assert_close(parts.out, whole.out)
    torch.testing.assert_close(parts.lse, whole.lse)


CHOSEN = torch.zeros(2, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[0, 1]],), TypeError, "indices must be a tensor with strides"),
        ((CHOSEN.long(),), TypeError, "indices must be int32, got torch.int64"),
        ((CHOSEN[0],), ValueError, r"indices must be \[num_tokens, width\]"),
        ((CHOSEN[:, :0, None],), ValueError, r"indices must be \[num_tokens, width\]"),
        ((CHOSEN.t(),), ValueError, "indices must have a contiguous last dimension"),
        ((CHOSEN, [4, 4]), TypeError, "lens must be a tensor with strides"),
        ((CHOSEN, torch.zeros(2)), TypeError, "lens must be int32, got torch.float32"),
        ((CHOSEN, int32(1, 2, 3)), ValueError, r"lens must be \[2\], as there are lists, got \[3\]"),
        ((CHOSEN, int32(1, 2)[:, None]), ValueError, r"lens must be \[2\], as there are lists"),
        ((CHOSEN[:, None], torch.zeros(2, 3).int()), ValueError, r"lens must be \[2\] or \[2, 1\]"),
        ((CHOSEN, None, 0), ValueError, "block_size must be from 1"),
        ((CHOSEN, None, 8.0), TypeError, "block_size must be an integer"),
        ((CHOSEN, None, 1, 1), TypeError, "are_slots must be True or False"),
        ((CHOSEN, torch.zeros(2, device="meta").int()), ValueError, "lens must be on indices' device cpu"),
    ],
)
def test_lists_are_checked(arguments, error, message):
    with pytest.raises(error, match=message):
        quire.ChosenKeys(*arguments)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"chosen": CHOSEN}, TypeError, "chosen must be ChosenKeys, got a int32 tensor"),
        ({"key_begin": int32(0, 0), "key_end": int32(1, 1)}, ValueError, "key_begin must be left out where chosen"),
        ({"tree_bits": torch.zeros(2).long()}, ValueError, "tree_bits must be left out where chosen is given"),
        (
            {"page_table": torch.zeros(2, 1).int(), "paged": False},
            quire.UnsupportedError,
            "where paged=False, got some",
        ),
        ({"chosen": quire.ChosenKeys(CHOSEN[:1])}, ValueError, "chosen must have a row for each of 2 sequences, got 1"),
        ({"chosen": quire.ChosenKeys(CHOSEN.to("meta"))}, ValueError, "chosen must be on page_table's device cpu"),
    ],
)
def test_a_batch_with_lists_is_checked(fields, error, message):
    sound = {"page_table": torch.zeros(2, 3).int(), "seq_lens": int32(9, 9), "chosen": quire.ChosenKeys(CHOSEN)}
    with pytest.raises(error, match=message):
        quire.Batch(**sound | fields)


def make_batch(indices=CHOSEN, *, lens=None, **options):
    chosen = quire.ChosenKeys(indices, lens, **options)
    return quire.Batch(torch.tensor([[1, 2], [3, -1]]).int(), int32(9, 5), chosen=chosen)


@pytest.mark.parametrize(
    ("spec", "batch", "error", "message"),
    [
        ({}, make_batch(CHOSEN[:, None].expand(2, 3, 4)), ValueError, "one for each of 2 KV heads, got 3"),
        ({}, make_batch(are_slots=True), ValueError, "causal must be False where chosen has slots"),
        ({"sliding_window": 4}, make_batch(), ValueError, "sliding_window must be left out where the batch has chosen"),
        ({"alibi": True}, make_batch(), quire.UnsupportedError, "alibi must be False where the batch has chosen"),
    ],
)
def test_lists_must_fit_the_spec(spec, batch, error, message):
    with pytest.raises(error, match=message):
        quire.plan(make_spec(**spec), batch, max_query_len=1, max_seq_len=9)


ROWS = torch.tensor([[0, 3, -1, 8], [4, 0, -1, -1]]).int()
TABLE = torch.tensor([[1, 2], [3, -1]]).int()


@by_torch
@pytest.mark.parametrize(
    ("lists", "table", "message"),
    [
        (
            {"indices": torch.tensor([[0, 3, 1, 8], [4, 2, -1, 4]]).int()},
            TABLE,
            "got 4 twice for token 1; a key counts",
        ),
        ({"lens": int32(4, 5)}, TABLE, "lens must be from 0 to the lists' 4 entries, got 5 for token 1"),
        ({"lens": int32(-1, 2)}, TABLE, "lens must be from 0 to the lists' 4 entries, got -1 for token 0"),
        ({"indices": ROWS * 8, "are_slots": True}, TABLE, "chosen must name slots below .* = 32, got 64 for token 0"),
        ({}, TABLE[:, :1], "page_table must cover sequence 0's chosen keys, got 1 entries of pages of 8 for key 8"),
        ({}, torch.tensor([[1, 7], [3, 1]]).int(), "page_table must hold pages 0 to 3, got 7 for sequence 0"),
        ({"indices": ROWS * 2}, TABLE, "chosen must name keys of the sequence's 9, got entry 16 of 1 for token 0"),
    ],
)
def test_contents_of_lists_are_checked(lists, table, message):
    cache = quire.PagedKVCache.empty(make_spec(), 4, 8)
    batch = quire.Batch(table, int32(9, 5), chosen=quire.ChosenKeys(**{"indices": ROWS} | lists))
    with pytest.raises(ValueError, match=message):
        check_batch(batch, cache, writes=False)


@by_torch
def test_attention_refuses_lists_before_it_writes():
    spec = make_spec()
    cache = quire.PagedKVCache.empty(spec, 4, 8)
    batch = quire.Batch(TABLE, int32(9, 5), chosen=quire.ChosenKeys(ROWS.clone().fill_(2)))
    plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=9)
    out = torch.full((2, 6, 16), 7.0)
    with pytest.raises(ValueError, match="chosen must name no entry twice in a list, got 2 twice for token 0"):
        quire.attention(torch.randn(2, 6, 16), cache, plan, out=out)
    assert bool((out == 7).all())
    with pytest.raises(ValueError, match="chosen must have an entry for each of q's 3 tokens, got 2"):
        quire.attention(torch.randn(3, 6, 16), cache, replace(plan, bounds=replace(plan.bounds, num_tokens=3)))


@by_torch
def test_keys_after_the_end_of_a_sequence_are_left_out():
    p = make(make_spec(), ((1, 20), (1, 11)), block_size=8, width=4)
    p.batch.chosen.indices.copy_(int32(0, 1, 2, -1))
    for stored in (p.cache.k, p.cache.v):
        stored.normal_()
    state = attend(p, return_lse=True)
    p.batch.chosen.indices.copy_(int32(2, 5, 0, 1))
    assert torch.isfinite(state.lse).all() and error_budget(p, attend(p, return_lse=True)).passed
    torch.testing.assert_close(attend(p), state.out)


def test_a_list_is_printed_without_a_look_at_it():
    chosen = quire.ChosenKeys(CHOSEN, block_size=8)
    assert repr(chosen) == ("ChosenKeys(indices=a int32 tensor of shape [2, 4], block_size=8, are_slots=False)")
    assert str(chosen) == "lists of at most 4 blocks of 8"
    assert "chosen=a value of type ChosenKeys" in repr(make_batch())


SECOND = quire.ChosenKeys(CHOSEN, are_slots=True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"extra_chosen": CHOSEN}, TypeError, "extra_chosen must be ChosenKeys, got a int32 tensor"),
        ({"chosen": None}, ValueError, "chosen must be given with extra_chosen, got None"),
        ({"extra_chosen": quire.ChosenKeys(CHOSEN)}, ValueError, "extra_chosen must have are_slots=True"),
        (
            {"extra_chosen": quire.ChosenKeys(CHOSEN[:1], are_slots=True)},
            ValueError,
            "extra_chosen must have a row for each of 2 sequences, got 1",
        ),
    ],
)
def test_wrong_lists_of_a_second_cache_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        replace(make_batch(), **{"extra_chosen": SECOND} | changes)


def test_keys_and_values_have_no_second_cache():
    with pytest.raises(quire.UnsupportedError, match="extra_chosen must be left out for keys and values that aren't"):
        quire.plan(make_spec(), replace(make_batch(), extra_chosen=SECOND), max_query_len=1, max_seq_len=9)


@by_torch
def test_a_second_cache_is_like_the_first():
    spec = quire.AttentionSpec.mla(**MLA | SMALL, dtype=torch.float32)
    cache = quire.PagedKVCache.empty(spec, 4, 8)
    cache.latents.normal_()
    scaled = replace(spec, kv_dtype=torch.float8_e4m3fn)
    batch = make_batch(indices=int32(0, 1, 2, 3).view(2, 2))
    both = replace(batch, extra_chosen=quire.ChosenKeys(int32(0, 40).view(2, 1), are_slots=True))
    q = torch.randn(2, 3, 48)
    plans = [quire.plan(spec, b, max_query_len=1, max_seq_len=9) for b in (batch, both)]
    wider = quire.PagedKVCache.empty(spec, 9, 5)
    wider.latents.normal_()
    for plan, extra, error, message in (
        (plans[0], cache, ValueError, "extra_cache must be left out where the batch has no extra_chosen"),
        (plans[1], None, TypeError, "extra_cache must be a PagedKVCache where the batch has extra_chosen, got None"),
        (
            plans[1],
            quire.PagedKVCache.empty(scaled, 4, 8),
            ValueError,
            "extra_cache must have the layout, widths and d",
        ),
        (
            plans[1],
            cache,
            ValueError,
            "extra_chosen must name slots below num_pages . page_size = 32, got 40 for token 1",
        ),
    ):
        with pytest.raises(error, match=message):
            quire.attention(q, cache, plan, extra_cache=extra)
    assert quire.attention(q, cache, plans[1], extra_cache=wider).isfinite().all()
    with (
        pytest.raises(quire.UnsupportedError, match="plan must be of a batch without extra_chosen while a call is"),
        quire.debug.record("call"),
    ):
        quire.attention(q, cache, plans[1], extra_cache=wider)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chosen": 4}, TypeError, "chosen must be ChosenKeys, got 4"),
        ({"chosen": SECOND, "trees": True}, ValueError, "trees must be False with chosen, got True"),
        ({"chosen": SECOND}, ValueError, "causal must be False where chosen has slots"),
    ],
)
def test_a_warm_up_refuses_lists_that_do_not_fit(options, error, message):
    limits = {"max_num_seqs": 1, "max_num_tokens": 4, "max_seq_len": 9}
    with pytest.raises(error, match=message):
        quire.workspace_size(make_spec(), **limits, **options)


def test_a_warm_up_has_a_second_cache_with_its_lists():
    spec = quire.AttentionSpec.mla(**MLA | SMALL, dtype=torch.float32)
    cache, limits = quire.PagedKVCache.empty(spec, 4, 8), {"max_num_seqs": 1, "max_num_tokens": 4, "max_seq_len": 9}
    with pytest.raises(ValueError, match="extra_cache must be given with extra_chosen, got None"):
        quire.warmup(spec, cache, **limits, chosen=quire.ChosenKeys(CHOSEN), extra_chosen=SECOND)
    with pytest.raises(ValueError, match="extra_chosen must be given with extra_cache, got None"):
        quire.warmup(spec, cache, **limits, chosen=quire.ChosenKeys(CHOSEN), extra_cache=cache)


# What does not serve lists refuses them by name.


def test_a_shared_prefix_refuses_lists():
    with pytest.raises(quire.UnsupportedError, match="batch must have no chosen keys with shared_prefix"):
        quire.plan(make_spec(), make_batch(), max_query_len=1, max_seq_len=9, shared_prefix=4)


@pytest.mark.parametrize("rule", ["interval", "tree"])
def test_intervals_and_trees_refuse_a_batch_with_lists(rule):
    with pytest.raises(ValueError, match="must be left out where chosen is given"):
        if rule == "interval":
            quire.intervals.causal(make_batch(), 2)
        else:
            quire.draft_trees.windowed(make_batch(), torch.ones(2, dtype=torch.int64), 4)


@by_torch
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_slots_of_a_recording_are_renumbered_with_their_pages(tmp_path, block_size):
    p = make_problem(make_spec(causal=False), ((1, 40), (2, 90)), spare_pages=40)
    slots = torch.arange(0, p.cache.num_pages * 16, 32)[torch.tensor([[3, 1, 9], [4, 2, 0], [7, 5, 9]])] // block_size
    lists = quire.ChosenKeys(slots.int(), int32(3, 2, 1), block_size, are_slots=True)
    for stored in (p.cache.k, p.cache.v):
        stored.normal_()
    plan = quire.plan(p.spec, replace(p.batch, chosen=lists), **p.bounds)
    with quire.debug.record(tmp_path / "call", contents=True):
        out = quire.attention(p.q, p.cache, plan)
    call = quire.debug.load(tmp_path / "call")
    assert quire.debug.replay(call).passed
    fewer = replaying.renumber(call, 200_000, notes := [])
    assert "pages are renumbered" in notes[0] and fewer.cache.num_pages < p.cache.num_pages
    rebuilt, *_ = replaying.rebuild(fewer, torch.device("cpu"))
    torch.testing.assert_close(
        quire.attention(rebuilt.q, rebuilt.cache, quire.plan(p.spec, rebuilt.batch, **p.bounds)), out
    )


@pytest.mark.parametrize("kernel", ["mla_hopper", "mla", "hopper", "portable"])
def test_kernels_of_other_families_refuse_lists(kernel):
    latent = quire.AttentionSpec.mla(**MLA | SMALL)
    spec = latent if kernel.startswith("mla") else make_spec(dtype=torch.float16)
    request = Request(spec, 2, True, Bounds(1, 9, 2), targets.TARGETS["sm90"].properties, chosen=(1, False, False, 4))
    with pytest.raises(quire.UnsupportedError, match=f"got '{kernel}', which does not serve chosen keys"):
        decide(request, Options(kernel=kernel))


def chosen_request(**fields):
    """Return a request for records with lists on a Hopper GPU."""
    spec = quire.AttentionSpec.mla(num_q_heads=128, softmax_scale=0.1, kv_dtype=torch.float8_e4m3fn, **fields)
    return Request(spec, 2, True, Bounds(1, 9, 2), targets.TARGETS["sm90"].properties, chosen=(1, False, False, 4))


def test_what_is_chosen_for_lists_has_its_reason():
    launch, reason = decide(chosen_request(), Options())
    assert launch.name == "chosen" and reason == "the only variant"
    (why,) = passed_over(launch, Options())
    assert why.startswith("chosen_hopper does not serve ") and "allow_fp8" in why
    assert passed_over(decide(chosen_request(allow_fp8=True), Options())[0], Options()) == []
    with pytest.raises(quire.UnsupportedError, match="kernel must be 'chosen' or left out here, got 'chosen_hopper'"):
        decide(chosen_request(), Options(kernel="chosen_hopper"))


def test_times_over_lists_are_not_predicted():
    with targets.compiling(targets.TARGETS["sm90"]):
        lists = quire.ChosenKeys(torch.zeros(2, 4, dtype=torch.int32))
        batch = quire.Batch(torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), chosen=lists)
        plan = quire.plan(chosen_request().spec, batch, max_query_len=1, max_seq_len=9)
        assert plan.kernel == "chosen" and plan.predicted_us is None and plan.predict([9, 5]) is None
