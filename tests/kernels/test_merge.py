"""The algebra of states: laws of the reference in float64, and the verb and its kernel within rounding of it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire import State, reference
from quire.kernels.combine import combine_arguments, combine_kernel, stack


def random_states(count, tokens=3, heads=2, dim=24, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    states = []
    for i in range(count):
        lse = 3 * torch.randn(tokens, heads, generator=generator, dtype=torch.float64)
        out = torch.randn(tokens, heads, dim, generator=generator, dtype=torch.float64)
        empty = torch.rand(tokens, heads, generator=generator) < 0.3
        lse[empty], out[empty] = float("-inf"), 0.0
        states.append(State(out.to(dtype), lse.to(torch.float64 if dtype is torch.float64 else torch.float32)))
    return states


def close(a: State, b: State, tolerance=1e-12):
    torch.testing.assert_close(a.out, b.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(a.lse, b.lse, atol=tolerance, rtol=tolerance)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10_000))
def test_laws_hold_on_the_oracle(seed):
    a, b, c = random_states(3, seed=seed)
    merge = reference.merge
    close(merge(a, b), merge(b, a))
    close(merge(merge(a, b), c), merge(a, merge(b, c)))
    close(merge(a, b, c), merge(merge(c, a), b))
    nothing = State(torch.zeros_like(a.out), torch.full_like(a.lse, float("-inf")))
    close(merge(a, nothing), a)


def test_states_over_parts_of_the_keys_merge_into_the_whole():
    torch.manual_seed(0)
    scores, values = torch.randn(5, 40, dtype=torch.float64), torch.randn(40, 8, dtype=torch.float64)

    def state(keys):
        s = scores[:, keys]
        return State((s.softmax(-1) @ values[keys])[:, None], torch.logsumexp(s, -1)[:, None])

    close(reference.merge(*(state(slice(i, i + 7)) for i in range(0, 40, 7))), state(slice(0, 40)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_merge_states_in_any_order(count, dtype):
    states = random_states(count, dtype=dtype)
    expected = reference.merge(*states)
    eps = torch.finfo(dtype).eps
    for order in itertools.islice(itertools.permutations(states), 0, 720, 71):
        got = quire.merge_states(order)
        assert got.out.dtype is dtype
        torch.testing.assert_close(got.out.double(), expected.out, atol=4 * eps, rtol=4 * eps)
        torch.testing.assert_close(got.lse.double(), expected.lse, atol=1e-5, rtol=1e-5)


def test_any_tree_shape():
    a, b, c, d, e = random_states(5, dtype=torch.float32)
    m = quire.merge_states
    tree = m([m([a, m([b, c])]), m([d, e])])
    close(tree, m([e, d, c, b, a]), 1e-5)


def test_what_an_empty_state_holds_does_not_matter():
    a, b = random_states(2, dtype=torch.float32)
    b.lse.fill_(float("-inf"))
    b.out.fill_(float("nan"))
    close(quire.merge_states([a, b]), a, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_state_with_an_infinite_lse_is_empty(dtype, device):
    """FlashAttention writes +inf where a row sees no key."""
    one, empty = (State(s.out.to(device), s.lse.to(device)) for s in random_states(2, dtype=dtype))
    empty.lse[:2], empty.out[0] = float("inf"), float("nan")
    empty.lse[2] = -float("inf")
    for states in ([one, empty], [empty, one], [empty, one, empty]):
        merged = quire.merge_states(states)
        torch.testing.assert_close(merged.out, one.out)
        torch.testing.assert_close(merged.lse, one.lse)
    merged = quire.merge_states([empty, empty])
    assert (merged.out == 0).all()
    assert (merged.lse == -float("inf")).all()


def test_a_state_with_lse_nan_makes_the_result_nan(device):
    one, other = (State(s.out.to(device), s.lse.to(device)) for s in random_states(2, dtype=torch.float32))
    expected = quire.merge_states([one, other])
    other.lse[1, 0] = float("nan")
    merged = quire.merge_states([one, other])
    assert merged.out[1, 0].isnan().all()
    assert merged.lse[1, 0].isnan()
    rest = torch.ones(merged.lse.shape, dtype=torch.bool)
    rest[1, 0] = False
    assert torch.equal(merged.out[rest], expected.out[rest])
    assert torch.equal(merged.lse[rest], expected.lse[rest])


def test_weights_add_up_to_one_at_a_large_lse(device):
    """At -46,341 an lse is rounded to 1/256. All outs are 1, and so is every mean of them."""
    out, lse = torch.ones(2, 1, 16, device=device), torch.full((2, 1), -46341.0, device=device)
    states = [State(out, lse + i / 256) for i in range(5)]
    torch.testing.assert_close(quire.merge_states(states).out, out)


def test_bad_input_is_refused():
    a, b = random_states(2, dtype=torch.float32)
    with pytest.raises(ValueError, match="at least one"):
        quire.merge_states([])
    with pytest.raises(ValueError, match=r"states\[1\].out must be like"):
        quire.merge_states([a, State(b.out[:2], b.lse)])
    with pytest.raises(ValueError, match=r"states\[1\].lse must be .* torch.float32"):
        quire.merge_states([a, State(b.out, b.lse.double())])


@pytest.mark.triton
@pytest.mark.parametrize("with_lse", [False, True])
def test_states_side_by_side_merge_into_tensors_of_any_stride(with_lse, device):
    """The splits of a prompt, [token, head, split], merge into a slice of a tensor; tokens of no sequence stay."""
    states = random_states(5, tokens=7, heads=3, dim=32, dtype=torch.float32)
    outs = torch.stack([s.out for s in states], 2).to(device)
    lses = torch.stack([s.lse for s in states], 2).to(device)
    around = torch.full((7, 3, 50), 9.0, device=device)
    out, lse = around[..., 10:42], torch.full((7, 4), 9.0, device=device)[:, :3]
    starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    rest, meta = combine_arguments(
        outs.permute(2, 0, 1, 3), lses.permute(2, 0, 1), out.stride(), lse if with_lse else None
    )
    combine_kernel[7, 3](outs, lses, out, None, lse if with_lse else None, starts, 2, *rest, **meta)
    expected = reference.merge(*(State(s.out.double(), s.lse.double()) for s in states))
    torch.testing.assert_close(out[:5].cpu().double(), expected.out[:5], atol=1e-6, rtol=1e-6)
    assert (out[5:] == 9.0).all()
    assert (around[..., :10] == 9.0).all()
    assert (around[..., 42:] == 9.0).all()
    if with_lse:
        torch.testing.assert_close(lse[:5].cpu().double(), expected.lse[:5], atol=1e-6, rtol=1e-6)
    assert (lse[5 if with_lse else 0 :] == 9.0).all()


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_at_equal_distances_in_one_memory_are_not_copied(dtype, device, monkeypatch):
    """As a collective receives them: of each rank its out, its lse, and padding."""
    apart = [State(s.out.to(device), s.lse.to(device)) for s in random_states(3, dtype=dtype)]
    expected = quire.merge_states(apart)
    (num_tokens, num_heads, dim), outs = apart[0].out.shape, apart[0].out.numel()
    memory = torch.empty(4, outs * dtype.itemsize + 4 * num_tokens * num_heads + 40, dtype=torch.uint8, device=device)
    together = []
    for row, (out, lse) in zip(memory[1:], apart, strict=True):
        end = outs * dtype.itemsize
        views = row[:end].view(dtype).view(num_tokens, num_heads, dim), row[end:-40].view(torch.float32).view_as(lse)
        together.append(State(views[0].copy_(out), views[1].copy_(lse)))
    for tensors in zip(*together, strict=True):
        a, b, c = tensors
        assert stack([a, b, c]).data_ptr() == a.data_ptr()
        for others in ([a, c, b], [c, b, a], [a, b, b], [a, b.clone(), c], [a[:, :1], b[:, 1:], c[:, :1]]):
            found = stack(others)
            assert found.untyped_storage().data_ptr() != memory.data_ptr()
            assert all(torch.equal(x, y) for x, y in zip(found, others, strict=True))
    monkeypatch.setattr(torch, "stack", None)
    found = quire.merge_states(together)
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)
    with pytest.raises(TypeError):
        quire.merge_states(apart)
