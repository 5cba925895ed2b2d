"""A cache of packed keys and values is that of its constructor, also where it is made of what an earlier one was."""

import gc
import weakref

import pytest
import torch

import quire
from quire import cache as cache_module
from quire.cache import MOST_PACKED, packed_cache


def packed(num_tokens, head_dim_v=128, dtype=torch.bfloat16, offset=0):
    k = torch.empty(offset + num_tokens * 2 * 128, dtype=dtype)[offset:].view(num_tokens, 2, 128)
    return k, torch.empty(num_tokens, 2, head_dim_v, dtype=dtype)


def facts(cache):
    _ = cache.kind, cache.extents  # which are computed when they are first asked for
    return {name: value for name, value in vars(cache).items() if name not in ("k", "v")}


@pytest.mark.parametrize(
    "change", [{}, {"head_dim_v": 64}, {"dtype": torch.float32}, {"offset": 1}, {"num_tokens": 9}], ids=str
)
def test_it_is_what_the_constructor_makes(change):
    k, v = packed(**{"num_tokens": 7} | change)
    expected = quire.PagedKVCache(k, v, "THD")
    for tensors in (packed(7), (k, v), (k, v.clone())):
        cache = packed_cache(*tensors)
    assert facts(cache) == facts(expected) and len(facts(cache)) > 10
    assert cache.k is k and cache.addresses != expected.addresses
    assert packed_cache(k, v).addresses == expected.addresses


def test_rows_that_are_apart_are_another_kind():
    k, v = torch.empty(2, 7, 2, 128, dtype=torch.bfloat16)
    between = torch.empty(7, 4, 128, dtype=torch.bfloat16)[:, :2]
    assert len({packed_cache(k, v).kind, packed_cache(between, v).kind, packed_cache(v, between).kind}) == 3


def test_it_keeps_no_memory_and_a_bounded_number(monkeypatch):
    monkeypatch.setattr(cache_module, "_packed", {})
    for num_tokens in range(1, 2 * MOST_PACKED):
        k, v = packed(num_tokens)
        packed_cache(k, v)
        assert len(cache_module._packed) <= MOST_PACKED
    gone = weakref.ref(k)
    del k, v
    gc.collect()
    assert gone() is None


K = torch.empty(7, 2, 128)


@pytest.mark.parametrize(
    "pair", [(None, K), (K, K[:6]), (K.to_sparse(), K.to_sparse())], ids=["no tensor", "other tokens", "sparse"]
)
def test_wrong_tensors_are_refused_as_by_the_constructor(pair):
    with pytest.raises((TypeError, ValueError)) as expected:
        quire.PagedKVCache(*pair, "THD")
    for _ in range(2):
        with pytest.raises(type(expected.value)) as found:
            packed_cache(*pair)
        assert str(found.value) == str(expected.value)
