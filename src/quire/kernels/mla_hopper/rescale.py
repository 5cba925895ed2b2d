"""Rescale accumulators where the maximum of a row grows: in its first tiles, and rarely afterwards."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SLACK = gl.constexpr(8.0)  # base-2 exponent by which a score may exceed the maximum that it is relative to


@gluon.constexpr_function
def products_unless_all_are_one(numbers):
    """Return PTX that multiplies a thread's numbers by as many factors, in place.

    A warp whose factors are all 1 skips this. Numbers and factors alternate between two rows by twos, as in the
    accumulator of a tensor-core instruction.
    """
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * numbers + i};" for i in range(numbers))
    return (
        f"{{ .reg .pred one; setp.eq.f32 one, ${2 * numbers}, 0f3F800000; "
        f"setp.eq.and.f32 one, ${2 * numbers + 2}, 0f3F800000, one; vote.sync.all.pred one, one, 0xffffffff; "
        f"@one bra.uni DONE; {products} DONE: }}"
    )


@gluon.constexpr_function
def in_place(numbers):
    """Return the constraints of PTX that changes float32 registers in place and reads as many others."""
    return ",".join(["=f"] * numbers + [str(i) for i in range(numbers)] + ["f"] * numbers)


@gluon.jit
def rescaled(accs, factor):
    """Multiply accumulators by a factor per row. Nearly always, it is 1 for all rows of a warp: see `raised`."""
    results = ()
    for i in gl.static_range(len(accs)):
        results = results + (rescaled_acc(accs[i], factor),)
    return results


@gluon.jit
def rescaled_acc(acc, factor):
    """Multiply an accumulator by a factor per row, if any is not 1."""
    EACH: gl.constexpr = min(64, acc.shape[1] // 2)  # of a thread
    factor = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.inline_asm_elementwise(
        products_unless_all_are_one(EACH), in_place(EACH), [acc, factor], dtype=gl.float32, is_pure=False, pack=EACH
    )


@gluon.jit
def raised(m_i, highest):
    """Return what exponents are relative to: the running maximum, until a score exceeds it by more than SLACK.

    So probabilities are at most 2^SLACK, and the accumulators are rescaled for the first tiles of a row and rarely
    afterwards. This is the lazy rescaling of FlashAttention 4.
    """
    return gl.where(highest > m_i + SLACK, highest, m_i)
