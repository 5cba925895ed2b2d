"""The tracer of tests/proof: it tells expressions apart, and what it doesn't know is an error."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.proof.arrays import Traced, leaves, traced
from tests.proof.tracer import Tracer

GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.one_triton,
    pytest.mark.triton,
    pytest.mark.skipif(GPU, reason="traces what Triton's interpreter computes"),
]
SIZE, NAN, INF = 16, float("nan"), float("inf")


@triton.jit
def kernel(x_ptr, y_ptr, out_ptr, BODY: tl.constexpr, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + rows, BODY(tl.load(x_ptr + rows), tl.load(y_ptr + rows), rows))


def trace(body, layout=None, known=("x", "y", "out")):
    """Return the values and the trees of a function of two tiles and of the numbers of their elements."""
    generator, tracer = torch.Generator().manual_seed(1), Tracer()
    x, y = torch.randn(2, SIZE, SIZE, generator=generator)
    out = torch.zeros(SIZE, SIZE)
    for name, tensor in {"x": x, "y": y}.items():
        if name in known:
            tracer.add(tensor, leaves(name, tuple(tensor.shape)))
    found = tracer.add(out) if "out" in known else None
    with tracer.tracing(layout):
        kernel[(1,)](x, y, out, body, SIZE)
    return out, found.read_all()


def same(one, other):
    return np.array_equal(trace(one)[1], trace(other)[1])


@triton.jit
def left(x, y, rows):
    return (x + y) + 3.0


@triton.jit
def right(x, y, rows):
    return x + (y + 3.0)


@triton.jit
def turned(x, y, rows):
    return 3.0 + (y + x)


@triton.jit
def exchanged(x, y, rows):
    return (y + x) + 3.0 * 1.0 + (x - x)


@triton.jit
def rounded(x, y, rows):
    return (x + y).to(tl.float16).to(tl.float32) + 3.0


def test_an_expression_is_equal_to_itself_and_to_no_other_order():
    assert same(left, left) and same(left, turned) and same(left, exchanged)
    for other in (right, rounded, product, fused, halves, whole_sum):
        assert not same(left, other), other


@triton.jit
def product(x, y, rows):
    return x * y + 3.0


@triton.jit
def fused(x, y, rows):
    return tl.fma(x, y, tl.zeros_like(x) + 3.0)


def test_a_fused_product_is_rounded_once():
    assert not same(product, fused)


@triton.jit
def halves(x, y, rows):
    for _ in tl.static_range(4):
        x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    return x + y * 0.0


@triton.jit
def whole_sum(x, y, rows):
    return tl.sum(x, 1)[:, None] + y * 0.0


@triton.jit
def sum_of_groups(x, y, rows):
    return tl.sum(tl.sum(tl.reshape(x, [x.shape[0], 4, x.shape[1] // 4]), 2), 1)[:, None] + y * 0.0


def test_sums_of_more_than_two_terms_depend_on_the_layout_and_others_do_not():
    assert not same(halves, whole_sum) and not same(whole_sum, sum_of_groups)
    for body, differ in ((halves, False), (whole_sum, True)):
        assert np.array_equal(trace(body, "one")[1], trace(body, "other")[1]) != differ


@triton.jit
def masked_softmax(x, y, rows):
    seen = tl.where(rows % 16 < 5, x, -float("inf"))
    m = tl.max(seen, 1)
    m = tl.where(m == -float("inf"), 0.0, m)
    return tl.exp2(seen - m[:, None]) * y


@triton.jit
def masked_softmax_of_others(x, y, rows):
    """Columns that are not seen hold other numbers, and a tile without a key was added."""
    seen = tl.where(rows % 16 < 5, x, -float("inf"))
    m = tl.max(seen, 1)
    hidden = tl.where(rows % 16 < 0, y, -float("inf"))
    after = tl.maximum(m, tl.max(hidden, 1))
    p = tl.exp2(seen - after[:, None]) * tl.exp2(m - after)[:, None]
    return p * y + tl.exp2(hidden - after[:, None]) * x


def test_what_is_masked_adds_nothing():
    assert same(masked_softmax, masked_softmax_of_others)


@triton.jit
def one_product(x, y, rows):
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def padded_product(x, y, rows):
    a = tl.where(rows % 16 < 12, x, 0.0)
    b = tl.where(rows % 16 >= 12, x, 0.0)
    return tl.dot(b, y, tl.dot(a, y, input_precision="ieee"), input_precision="ieee")


@triton.jit
def product_from_the_end(x, y, rows):
    a = tl.where(rows % 16 < 12, x, 0.0)
    b = tl.where(rows % 16 >= 12, x, 0.0)
    return tl.dot(a, y, tl.dot(b, y, input_precision="ieee"), input_precision="ieee")


@triton.jit
def in_float16(x, y, rows):
    return tl.dot(x.to(tl.float16), y.to(tl.float16))


@triton.jit
def in_halves_of_float16(x, y, rows):
    a = tl.where(rows % 16 < 8, x, 0.0)
    b = tl.where(rows % 16 >= 8, x, 0.0)
    return tl.dot(b.to(tl.float16), y.to(tl.float16), tl.dot(a.to(tl.float16), y.to(tl.float16)))


def test_a_product_adds_columns_in_order():
    assert same(one_product, padded_product)  # of float32, one column after the other
    assert not same(one_product, product_from_the_end)
    assert not same(in_float16, in_halves_of_float16)  # of float16, 16 columns are one step
    x, y = trace(one_product)[0], trace(in_float16)[0]
    assert torch.allclose(x, y, atol=0.1) and not torch.equal(x, y)  # and both were computed


@triton.jit
def branch(x, y, rows):
    if tl.sum(tl.sum(x, 1), 0) > 0:
        x = y
    return x


@triton.jit
def address(x, y, rows):
    return tl.load((rows + x.to(tl.int32)).to(tl.pointer_type(tl.float32)))


@triton.jit
def scan(x, y, rows):
    return tl.cumsum(x, 1)


@triton.jit
def sine(x, y, rows):
    return tl.sin(x) + tl.erf(y)


@pytest.mark.parametrize("body", [branch, address, scan, sine])
def test_what_is_not_traced_is_an_error(body):
    with pytest.raises((InterpreterError, TypeError)):
        trace(body)


@pytest.mark.parametrize("known", [("x", "out"), ("y", "out"), ("x", "y")])
def test_a_tensor_without_trees_is_an_error(known):
    with pytest.raises((InterpreterError, TypeError), match="no trees"):
        trace(left, known=known)


@triton.jit
def nothing(x, y, rows):
    return x


def test_memory_that_was_not_written_is_an_error():
    tracer = Tracer()
    x, y, out = torch.zeros(3, SIZE, SIZE).unbind()
    tracer.add(x)
    tracer.add(y, leaves("y", (SIZE, SIZE)))
    tracer.add(out)
    with pytest.raises((InterpreterError, TypeError), match="no trees"), tracer.tracing(None):
        kernel[(1,)](x, y, out, nothing, SIZE)


def test_values_are_those_of_the_interpreter_and_trees_do_not_depend_on_them():
    x, y = torch.randn(2, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    for body in (left, fused, halves, masked_softmax, one_product):
        out, trees = trace(body)
        expected = torch.zeros(SIZE, SIZE)
        kernel[(1,)](x, y, expected, body, SIZE)
        assert torch.allclose(out, expected, rtol=1e-6, atol=1e-6)
        assert np.array_equal(trees, trace(body)[1])


def test_an_array_never_loses_its_trees_silently():
    x = Traced(np.ones(4, np.float32), leaves("x", (4,)), np.zeros(4, bool))
    for lose in (
        np.asarray,
        np.cumsum,
        np.sin(x).__array__,
        lambda x: np.add.reduce(x),
        float,
        np.linalg.norm,
        np.ones(4).dot,
    ):
        with pytest.raises(TypeError):
            lose(x) if lose is not np.sin(x).__array__ else lose()
    with pytest.raises(TypeError):
        x.values[:] = traced(x)
    with pytest.raises(TypeError):
        Traced(np.ones(4), np.ones(3, np.uint64), np.ones(4, bool))
