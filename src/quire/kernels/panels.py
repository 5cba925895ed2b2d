"""Panels: the columns of a head as tensors, whose widths are powers of two.

The sizes of Triton's tensors are powers of two, and the width of a head may be none. A head of 168 columns, padded to
256, would multiply 88 columns of zeros. Panels of 128 and 64 have 24.

mma.sync gives each warp rows of its own only if an accumulator has no more columns than rows. So values have panels of
at most as many columns there, where rows are enough for all warps. Else each warp would have some columns of all rows:
probabilities would go through shared memory, and warps would wait for each other's maxima (`docs/notes/attention.md`).

A stored element is EACH numbers: two where fp8 numbers are read in pairs, else one. Panels are of stored elements. A
pair's numbers are decoded into a panel of even columns and one of odd columns.

The left operand of mma.sync has 16 rows, the right one 8 columns. So of fewer rows than 16, products are turned: keys
and the columns of values are on the left, and the rows on the right, which halves products and accumulators. With one
warp, each has keys of its own, and waits for no other.
"""

import triton
import triton.language as tl

from quire.dispatch.config import ROWS_OF_PRODUCT

LEAST_WIDTH = 16  # of an operand of `tl.dot`
LEAST_REST = 32  # stored elements of a second panel; four warps share 8 columns each
FEW_ROWS, WIDE = 32, 256  # rows that multiply so little that only wide heads gain from a second panel


@triton.constexpr_function
def power_of_two(number):
    """Round up to a power of two.

    SGLang replaces `triton.next_power_of_2` by a plain function, and Triton hashes no kernel that names one.
    """
    return 1 << (number - 1).bit_length()


@triton.constexpr_function
def is_turned(ROWS):
    """Return whether row blocks of so many rows are right operands, with keys or columns of values on the left."""
    return ROWS < ROWS_OF_PRODUCT


@triton.constexpr_function
def panel_widths(DIM, EACH, ROWS, MOST=0):
    """Return the stored elements of each panel of a head, at most MOST if that is not 0.

    Else there are one panel, or two where these hold less padding.
    """
    elements = DIM // EACH
    if 0 < MOST < elements:
        rest = elements % MOST
        return (MOST,) * (elements // MOST) + ((max(LEAST_WIDTH, power_of_two(rest)),) if rest else ())
    whole = max(LEAST_WIDTH, power_of_two(elements))
    first = whole // 2
    rest = max(LEAST_REST, power_of_two(elements - first))
    pays = rest < first < elements and (ROWS > FEW_ROWS or whole * EACH >= WIDE)
    return (first, rest) if pays else (whole,)


@triton.constexpr_function
def num_panels(DIM, EACH, ROWS, MOST=0):
    """Return how many panels hold a head."""
    return len(panel_widths(DIM, EACH, ROWS, MOST))


@triton.constexpr_function
def panel_width(DIM, EACH, ROWS, MOST, i):
    """Return the stored elements of panel i."""
    return panel_widths(DIM, EACH, ROWS, MOST)[i]


@triton.constexpr_function
def panel_is_full(DIM, EACH, ROWS, MOST, i):
    """Return whether panel i has no padding."""
    return sum(panel_widths(DIM, EACH, ROWS, MOST)[: i + 1]) * EACH <= DIM


@triton.jit
def elements_of(DIM: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr, i: tl.constexpr):
    """Return the stored elements of panel i, numbered from the head's first on."""
    return i * panel_width(DIM, EACH, ROWS, MOST, 0) + tl.arange(0, panel_width(DIM, EACH, ROWS, MOST, i))


@triton.jit
def columns_of(DIM: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr = 0):
    """Return the columns of a head that panels of numbers hold; those of pairs are even, and odd."""
    columns = ()
    for i in tl.static_range(num_panels(DIM, EACH, ROWS, MOST) * EACH):
        columns = columns + (elements_of(DIM, EACH, ROWS, MOST, i // EACH) * EACH + i % EACH,)
    return columns


@triton.jit
def load_tile(ptrs, rows, columns, SOME_ROWS: tl.constexpr, SOME_COLUMNS: tl.constexpr):
    """Load a tile; of only some rows or columns, those of these masks."""
    if SOME_ROWS and SOME_COLUMNS:
        return tl.load(ptrs, mask=rows & columns, other=0.0)
    if SOME_ROWS:
        return tl.load(ptrs, mask=rows, other=0.0)
    if SOME_COLUMNS:
        return tl.load(ptrs, mask=columns, other=0.0)
    return tl.load(ptrs)


@triton.jit
def interleaved(a, b):
    """Return the columns of two panels in turn."""
    pairs = tl.join(a, b)
    return tl.reshape(pairs, [a.shape[0], 2 * a.shape[1]])


@triton.jit
def join_pairs(panels, DIM: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, MOST: tl.constexpr):
    """Return panels of numbers with their columns in order, and these columns."""
    joined, columns = (), ()
    for i in tl.static_range(num_panels(DIM, EACH, ROWS, MOST)):
        if EACH == 2:
            pairs = tl.join(panels[2 * i], panels[2 * i + 1])
            joined = joined + (tl.reshape(pairs, [ROWS, 2 * pairs.shape[1]]),)
        elif EACH == 4:
            even = interleaved(panels[4 * i], panels[4 * i + 2])
            joined = joined + (interleaved(even, interleaved(panels[4 * i + 1], panels[4 * i + 3])),)
        else:
            joined = joined + (panels[i],)
        columns = columns + (i * EACH * panel_width(DIM, EACH, ROWS, MOST, 0) + tl.arange(0, joined[i].shape[1]),)
    return joined, columns
