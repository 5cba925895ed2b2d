"""The algebra of states: laws of the reference in float64, and the verb and its kernel within rounding of it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire import State, reference
from quire.kernels.combine import combine_arguments, combine_kernel


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


@pytest.mark.parametrize("at", [0, 1])
def test_a_state_with_an_infinite_lse_is_empty(at):
    """flash-attn writes +inf where a row sees no key."""
    states = random_states(2, dtype=torch.float32)
    states[1 - at].lse[0, 0] = 0.5
    expected = quire.merge_states([states[1 - at]])
    states[at].lse.fill_(float("inf"))
    states[at].out.fill_(float("nan"))
    close(quire.merge_states(states), expected, 1e-6)
    empty = quire.merge_states([states[at]] * 2)
    assert (empty.out == 0).all() and (empty.lse == float("-inf")).all()


@pytest.mark.parametrize("at", [0, 1])
def test_a_state_with_lse_nan_makes_the_result_nan(at):
    states = random_states(2, dtype=torch.float32)
    states[at].lse[1, 0] = float("nan")
    merged, nan = quire.merge_states(states), torch.zeros(3, 2, dtype=torch.bool)
    nan[1, 0] = True
    assert torch.equal(merged.out.isnan(), nan[..., None].expand_as(merged.out))
    assert torch.equal(merged.lse.isnan(), nan)


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
    combine_kernel[7, 3](outs, lses, out, lse if with_lse else None, starts, 2, *rest, **meta)
    expected = reference.merge(*(State(s.out.double(), s.lse.double()) for s in states))
    torch.testing.assert_close(out[:5].cpu().double(), expected.out[:5], atol=1e-6, rtol=1e-6)
    assert (out[5:] == 9.0).all()
    assert (around[..., :10] == 9.0).all()
    assert (around[..., 42:] == 9.0).all()
    if with_lse:
        torch.testing.assert_close(lse[:5].cpu().double(), expected.lse[:5], atol=1e-6, rtol=1e-6)
    assert (lse[5 if with_lse else 0 :] == 9.0).all()
