"""Nouns as Python's own functions meet them: printed without a look at their tensors, pickled and copied."""

import copy
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

import quire
from quire.checks.batch import check_slots
from quire.testing import error_budget, make_problem

SPEC = quire.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
LATENT = quire.AttentionSpec.mla(
    num_q_heads=2, softmax_scale=0.1, kv_lora_rank=16, qk_rope_head_dim=0, dtype=torch.float32
)


class Unread(torch.Tensor):
    """A tensor whose numbers may not be read; its facts may."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        assert name in ("__get__", "size", "dim"), f"{name} read a tensor"
        return super().__torch_function__(function, types, args, kwargs or {})


def unread(*shape, dtype=torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype).as_subclass(Unread)


def test_a_noun_is_printed_without_a_look_at_its_tensors():
    cache = quire.PagedKVCache.empty(quire.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=16), 2, 4)
    latents = quire.PagedKVCache.empty(LATENT, 2, 4)
    batch = quire.Batch(torch.zeros(1, 2).int(), torch.zeros(1).int())
    for noun, names in ((cache, ("k", "v")), (latents, ("latents", "v")), (batch, ("page_table", "seq_lens"))):
        for name in names:
            object.__setattr__(noun, name, unread(*getattr(noun, name).shape))
    state = quire.State(unread(1, 2, 16), unread(1, 2))
    rope = quire.Rope(unread(8, 4), unread(8, 4), unread(1))
    norm = quire.QKNorm(unread(16), unread(16))
    for noun in (cache, latents, batch, state, rope, norm):
        text = repr(noun)
        assert text.startswith(type(noun).__name__) and "tensor of shape" in text and len(text) < 500
    assert repr(state) == "State(out=a float32 tensor of shape [1, 2, 16], lse=a float32 tensor of shape [1, 2])"


@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_cache_of_latents_is_one_memory_after_a_copy(again):
    cache = quire.PagedKVCache.empty(LATENT, 2, 4)
    cache.latents.zero_()
    twin = again(cache)
    quire.write_latent(torch.ones(1, 16), None, twin, torch.tensor([0]))
    batch = quire.Batch(torch.zeros(1, 1).int(), torch.ones(1).int())
    plan = quire.plan(LATENT, batch, max_query_len=1, max_seq_len=4)
    assert (quire.attention(torch.ones(1, 2, 16), twin, plan) == 1).all() and not cache.latents.any()
    assert twin.k.data_ptr() == twin.v.data_ptr() == twin.latents.data_ptr()


@pytest.mark.parametrize("again", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_a_copied_plan_attends_as_the_first_one(again):
    p = make_problem(SPEC, ((1, 20), (2, 9)))
    plan = again(quire.plan(SPEC, p.batch, **p.bounds))
    assert error_budget(p, quire.attention(p.q, p.cache, plan)).passed and plan.bounds.max_seq_len == 20
    p = make_problem(SPEC, ((1, 40), (1, 40)))
    p.batch.page_table[:, 0] = p.batch.page_table[0, 0]
    plan = quire.plan(SPEC, p.batch, **p.bounds, shared_prefix=16)
    assert torch.equal(quire.attention(p.q, p.cache, again(plan)), quire.attention(p.q, p.cache, plan))


def test_a_plan_of_a_launch_that_was_not_chosen_is_not_pickled():
    p = make_problem(SPEC, ((1, 20),))
    plan = quire.plan.__globals__["make_plan"](SPEC, p.batch, quire.plan(SPEC, p.batch, **p.bounds).launch, "by hand")
    with pytest.raises(TypeError, match=r"plan must be from `quire.plan` to be copied, got one for PyTorch"):
        pickle.dumps(plan)


@pytest.mark.parametrize("eps", [1, np.float32(0.25), Fraction(1, 4), 10**30], ids=repr)
def test_eps_may_be_any_number(eps):
    cache = quire.PagedKVCache.empty(SPEC, 2, 4)
    batch = quire.Batch(torch.zeros(1, 1).int(), torch.ones(1).int())
    plan = quire.plan(SPEC, batch, max_query_len=1, max_seq_len=4)
    x, weight = torch.randn(1, 1, 16), torch.ones(16)
    q, slot = torch.randn(1, 2, 16), torch.zeros(1, dtype=torch.int64)
    quire.attention(q, cache, plan, k=x, v=x, slot_mapping=slot, qk_norm=quire.QKNorm(weight, weight, eps))
    expected = x / (x.square().mean(-1, keepdim=True) + float(eps)).sqrt()
    torch.testing.assert_close(cache.k[0, :1], expected)


def test_slots_that_are_not_where_tokens_are_read_are_named():
    """Replays of recorded calls ask for it. A call does not: engines have padding tokens that write to a spare slot."""
    cache = quire.PagedKVCache.empty(SPEC, 4, 4)
    flat = quire.Batch(torch.tensor([2, 3, 1]).int(), torch.tensor([5, 2]).int(), cu_pages=torch.tensor([0, 2]).int())
    table = quire.Batch(torch.tensor([[2, 3], [1, 0]]).int(), torch.tensor([5, 2]).int())
    for batch in (flat, table):
        for slots, message in (
            ((12, 6, -1), "slots of the page table, got 6 for token 1, whose sequence 1 has page 1 at position 1"),
            ((12, 5, 7), "negative for tokens of no sequence, got 7 for token 2"),
        ):
            with pytest.raises(ValueError, match=f"slot_mapping must (have|be) {message}"):
                check_slots(batch, cache, torch.tensor(slots))
        check_slots(batch, cache, torch.tensor([12, 5, -1]))
        plan = quire.plan(SPEC, batch, max_query_len=1, max_seq_len=5, num_tokens=3)
        cache.k.zero_()
        new = dict(k=torch.ones(3, 1, 16), v=torch.ones(3, 1, 16), slot_mapping=torch.tensor([12, 5, 1]))
        quire.attention(torch.ones(3, 2, 16), cache, plan, **new)
        assert cache.k.view(16, 16).any(1).nonzero().flatten().tolist() == [1, 5, 12]


def test_two_sequences_that_write_to_one_slot_are_named():
    cache = quire.PagedKVCache.empty(SPEC, 4, 4)
    batch = quire.Batch(torch.tensor([[2], [2]]).int(), torch.tensor([3, 3]).int())
    with pytest.raises(ValueError, match="slot_mapping must have each slot once, got 10 for tokens 0 and 1"):
        check_slots(batch, cache, torch.tensor([10, 10]))


def test_a_plan_has_a_workspace_if_its_launch_needs_one():
    batch = quire.Batch(torch.zeros(1, 1).int(), torch.ones(1).int())
    plan = quire.plan(SPEC, batch, max_query_len=1, max_seq_len=4)
    assert plan.workspace is None and plan.memory.dtype is torch.uint8  # PyTorch serves CPU tensors
    assert quire.plan(SPEC, batch, max_query_len=1, max_seq_len=4, workspace=plan.workspace).workspace is None


@pytest.mark.parametrize("window", [None, 4])
def test_a_flat_table_needs_no_page_for_keys_that_no_query_sees(window):
    """A query beyond its window sees none; a row without queries has none."""
    spec = quire.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32, sliding_window=window)
    cache = quire.PagedKVCache.empty(spec, 2, 4)
    cache.k.zero_(), cache.v.fill_(1)
    nothing = torch.zeros(0, dtype=torch.int32)
    if window:
        batch = quire.Batch(
            nothing, torch.tensor([4]).int(), cu_pages=torch.tensor([0]).int(), query_offsets=torch.tensor([40]).int()
        )
        plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=4)
        assert not quire.attention(torch.randn(1, 1, 16), cache, plan).any()
    starts, pages = torch.tensor([0, 0, 1]).int(), torch.tensor([9, 0]).int()
    batch = quire.Batch(torch.tensor([1]).int(), torch.tensor([4, 4]).int(), starts, cu_pages=pages)
    plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=4, num_tokens=1)
    assert (quire.attention(torch.randn(1, 1, 16), cache, plan) == 1).all()
