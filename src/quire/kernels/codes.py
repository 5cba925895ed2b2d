"""Formats below eight bits in kernels: a stored element is several numbers, and scales are not multiplied into each.

Keys and values are loaded as 16-bit elements, which are four numbers, or two in e4m3. So `ldmatrix` serves them. An
element becomes a column of as many panels in float16, as one of two fp8 numbers does. What is left of a number goes
into what there is one of for each row, key or panel:

* A decoder may return a number times a power of two (`unit`): four bits in place are a subnormal float16, whose unit is
  2^-24, or 2^-20 where they are the upper half of a byte. Tensor cores take subnormals. So eight numbers take a shift
  and four masks.
* The product of queries with numbers n, which stand for (n - z) * s, is s * (q . n - z * sum(q)).
* A probability is multiplied by the scale of its value. The running maximum is of these products, as far as the bits of
  a scale tell its logarithm. So they are in the range of float16 whatever the scales are. The sum of products times
  zero points is carried next to the accumulators, and is subtracted at the end.

Block scales (nvfp4) do go into each number: an e2m1 number times an e4m3 scale is exact in float16.
"""

import triton
import triton.language as tl

from quire.kernels import formats, mods
from quire.kernels.panels import load_tile, panel_is_full, panel_width
from quire.kernels.states import add_product, add_sums, total

LEAST_SCALE = tl.constexpr(2.0**-96)  # of a value: with those below, sums of probabilities could be infinite
BLOCK_COLUMNS = tl.constexpr(16)  # that share a block scale
SMALLEST_RANGE = tl.constexpr(formats.SMALLEST_RANGE)
LARGEST_E2M1 = tl.constexpr(formats.LARGEST_E2M1)
SMALLEST_BLOCK_SCALE = tl.constexpr(formats.SMALLEST_BLOCK_SCALE)


@triton.constexpr_function
def each_of(FORMAT, PACKED, OF_KEYS):
    """Return how many numbers a stored element is, of keys or of values."""
    if FORMAT is None or (FORMAT == "k8v4" and OF_KEYS):
        return 2 if PACKED else 1
    return 4


@triton.constexpr_function
def unit(FORMAT, IN_PTX, OF_KEYS, i):
    """Return what a 1 that decoders return stands for, in panel i: halves of bytes take turns."""
    if not IN_PTX or (FORMAT == "k8v4" and OF_KEYS):
        return 1.0
    return 2.0**14 if FORMAT == "nvfp4" else 2.0 ** (24 - 4 * (i % 2))


@triton.constexpr_function
def unit_ratio(FORMAT, IN_PTX, i):
    """Return the unit of panel i of keys over that of the first."""
    return unit(FORMAT, IN_PTX, True, i) / unit(FORMAT, IN_PTX, True, 0)


@triton.constexpr_function
def has_zero(FORMAT, OF_KEYS):
    """Return whether scales of keys, or of values, hold a zero point."""
    return FORMAT == "int4" or (FORMAT == "k8v4" and not OF_KEYS)


@triton.jit
def queries_for_codes(q, NUM: tl.constexpr, T: tl.constexpr):
    """Return NUM panels of queries for products with what decoders return; then a factor, and the sum of each row.

    q is the panels, and what `scale_to_float16` returns after them if they are float16.
    """
    up = tl.full([T.BLOCK_M], unit(T.FORMAT, T.IN_PTX, True, 0), tl.float32)
    sums = tl.zeros([T.BLOCK_M], tl.float32)
    panels = ()
    for i in tl.static_range(NUM):
        sums += tl.sum(q[i].to(tl.float32), 1)
        panels = panels + (q[i] * unit_ratio(T.FORMAT, T.IN_PTX, i),)
    if len(q) > NUM:
        up, sums = up * q[NUM], sums * q[NUM]
    return panels + (up, sums)


@triton.jit
def placed_scales(
    ptrs, places, keep, BEFORE: tl.constexpr, SHAPE: tl.constexpr, MASKED: tl.constexpr, WORDS: tl.constexpr,
    TURNED: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Return the block scales of the numbers of a panel, from the words of a head after the first BEFORE.

    Triton decodes numbers where `tl.dot` wants them if they follow from loads of the loop alone. Else they pass through
    shared memory, for which one warp waits. So which byte is the scale of a number comes from memory too: `places`,
    from `views.places_of_scales`.
    """
    place = places + tl.arange(0, SHAPE[0] if TURNED else SHAPE[1])
    place = tl.broadcast_to(tl.load(place[:, None] if TURNED else place[None, :]), SHAPE)
    scales = None
    for j in tl.static_range(((SHAPE[0] if TURNED else SHAPE[1]) + 31) // 32):  # a pair of words each
        low = load_word(ptrs, keep, BEFORE + 2 * j, MASKED, WORDS, TURNED)
        high = load_word(ptrs, keep, BEFORE + 2 * j + 1, MASKED, WORDS, TURNED)
        found = DECODE(tl.broadcast_to(low, SHAPE), tl.broadcast_to(high, SHAPE), place)
        scales = found if j == 0 else tl.where(place < 16 * j, scales, found)
    return scales


@triton.jit
def load_word(ptrs, keep, i: tl.constexpr, MASKED: tl.constexpr, WORDS: tl.constexpr, TURNED: tl.constexpr):
    """Load the i-th word of each key, or the last one, as a column, or as a row if TURNED."""
    at = ptrs + (i if i < WORDS else WORDS - 1)
    if TURNED:
        return load_tile(at[None, :], None, keep[None, :], False, MASKED)
    else:
        return load_tile(at[:, None], keep[:, None], None, MASKED, False)


@triton.jit
def times_block_scales(
    numbers, ptrs, places, keep, MASKED: tl.constexpr, DIM: tl.constexpr, T: tl.constexpr, TURNED: tl.constexpr
):
    """Multiply the panels of a tile's heads by their block scales, which are at `ptrs` [BLOCK_N].

    Four scales are loaded at once where heads have a multiple of four. Each thread takes those of its own numbers. If
    TURNED, rows of panels are columns of heads. If places is not None, `placed_scales` says what it is for.
    """
    AT_ONCE: tl.constexpr = 4 if DIM // BLOCK_COLUMNS % 4 == 0 else 1
    if AT_ONCE == 4:
        ptrs = ptrs.to(tl.pointer_type(tl.int32), bitcast=True)
    scaled = ()
    for i in tl.static_range(len(numbers) // 4):
        WIDTH: tl.constexpr = panel_width(DIM, 4, T.BLOCK_M, T.MOST, i)
        BEFORE: tl.constexpr = i * panel_width(DIM, 4, T.BLOCK_M, T.MOST, 0)
        SIZE: tl.constexpr = BLOCK_COLUMNS // 4  # of a group in a panel: its columns are 4 apart
        NUM: tl.constexpr = WIDTH // SIZE // AT_ONCE
        WORDS: tl.constexpr = DIM // BLOCK_COLUMNS // AT_ONCE
        if AT_ONCE == 4 and WORDS > 1 and places is not None:  # single words are copied one thread after the other
            scales = placed_scales(
                ptrs, places, keep, BEFORE // SIZE // AT_ONCE, numbers[4 * i].shape, MASKED, WORDS, TURNED,
                T.DECODE_PLACED,
            )  # fmt: skip
        else:
            SOME: tl.constexpr = not panel_is_full(DIM, 4, T.BLOCK_M, T.MOST, i)
            word = BEFORE // SIZE // AT_ONCE + tl.arange(0, NUM)
            is_one = word < DIM // BLOCK_COLUMNS // AT_ONCE
            shift = tl.arange(0, WIDTH) // SIZE % AT_ONCE * 8
            if TURNED:
                words = load_tile(ptrs[None, :] + word[:, None], is_one[:, None], keep[None, :], SOME, MASKED)
                words = tl.broadcast_to(words[:, None, :], [NUM, WIDTH // NUM, T.BLOCK_N])
                words, shift = tl.reshape(words, [WIDTH, T.BLOCK_N]), shift[:, None]
            else:
                words = load_tile(ptrs[:, None] + word[None, :], keep[:, None], is_one[None, :], MASKED, SOME)
                words = tl.broadcast_to(words[:, :, None], [T.BLOCK_N, NUM, WIDTH // NUM])
                words, shift = tl.reshape(words, [T.BLOCK_N, WIDTH]), shift[None, :]
            scales = T.DECODE_SCALES(words.to(tl.int32), tl.broadcast_to(shift, words.shape))
        scales = scales.to(numbers[0].dtype)
        for j in tl.static_range(4):
            scaled = scaled + (numbers[4 * i + j] * scales,)
    return scaled


@triton.jit
def scale_and_zero(stored):
    """Return scales and zero points, as float32, from scales that hold both."""
    bits = stored.to(tl.int32, bitcast=True)
    return (bits & -16).to(tl.float32, bitcast=True), (bits & 15).to(tl.float32)


@triton.jit
def scores_of_codes(products, sums, k_scale, T: tl.constexpr):
    """Return scores from the products of queries and numbers, the sums of the queries, and the scales of the keys."""
    if has_zero(T.FORMAT, True):
        scale, zero = scale_and_zero(k_scale)
        return (products - sums[:, None] * zero[None, :]) * scale[None, :]
    else:
        return products * k_scale[None, :]


@triton.jit
def empty_sums(acc, l_i, T: tl.constexpr):
    """Return an accumulator with the sums of probabilities times zero points after its panels, if there are some."""
    if has_zero(T.FORMAT, False):
        acc = acc + (tl.zeros_like(l_i),)
    return acc


@triton.jit
def weighted_step(acc, m_i, l_i, scores, v, v_scale, exponent_scale, INPUT_PRECISION: tl.constexpr):
    """Fold one tile into a running state as `softmax_step` does, with probabilities times scales of values.

    acc has the sums of `empty_sums`. m_i is the maximum of the exponents of these products.
    """
    HEADROOM: tl.constexpr = 12 if v[0].dtype == tl.float16 else 0  # as in `softmax_step`
    scale, zero = scale_and_zero(v_scale)
    scale = tl.maximum(scale, LEAST_SCALE, propagate_nan=tl.PropagateNan.ALL)
    log2_scale = scale.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-23 - 127.0  # less by at most 0.09
    exponents = scores * exponent_scale
    m_new = tl.maximum(m_i, tl.max(exponents + log2_scale[None, :], 1) - HEADROOM)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key
    p = tl.exp2(exponents - shift[:, None])
    alpha = tl.exp2(m_i - shift)
    l_i = add_sums(l_i, alpha, p)
    p = (p * scale[None, :]).to(v[0].dtype)
    new_acc = ()
    for i in tl.static_range(len(v)):
        new_acc = new_acc + (add_product(acc[i], alpha, p, v[i], INPUT_PRECISION),)
    return new_acc + (add_sums(acc[len(v)], alpha, p.to(tl.float32) * zero[None, :]),), m_new, l_i


@triton.jit
def finish_codes(acc, T: tl.constexpr):
    """Return accumulators over numbers from those over what decoders return, and from the sums of `empty_sums`."""
    ZERO: tl.constexpr = has_zero(T.FORMAT, False)
    if ZERO:
        sums = acc[len(acc) - 1]
        if len(sums.shape) == 2:
            sums = total(sums)
    numbers = ()
    for i in tl.static_range(len(acc) - ZERO):
        number = acc[i] * unit(T.FORMAT, T.IN_PTX, False, i)
        numbers = numbers + (number - sums[:, None] if ZERO else number,)
    return numbers


@triton.jit
def store_codes(
    x, target, scale_ptr, offs_scale, block_ptr, DIM: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr
):
    """Store the elements of one head two to a byte, and its scale or its block scales.

    Args:
        x: [BLOCK].
        target: the head's first byte.
        scale_ptr, offs_scale: where the scale is; with block scales, it is the one that these are relative to.
        block_ptr: the head's first block scale, or None.
        DIM: elements of the head.
        BLOCK: DIM, padded.
        CODES: "int4" or "e2m1".
    """
    x = x.to(tl.float32)
    finite = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    if CODES == "int4":
        low, high = tl.minimum(tl.min(finite, 0), 0.0), tl.maximum(tl.max(finite, 0), 0.0)
        scale = tl.where(high - low > SMALLEST_RANGE, tl.div_rn(high - low, 15.0), 1.0)
        bits = scale.to(tl.int32, bitcast=True) & -16
        scale = bits.to(tl.float32, bitcast=True)
        zero = tl.minimum(mods.round_even(tl.div_rn(-low, scale)), 15.0)
        tl.store(scale_ptr + offs_scale, (bits | zero.to(tl.int32)).to(tl.float32, bitcast=True))
        number = mods.round_even(tl.div_rn(tl.where(x == x, x, 0.0), scale)) + zero
        number = tl.minimum(tl.maximum(number, 0.0), 15.0).to(tl.int32)
    else:
        GROUPS: tl.constexpr = BLOCK // BLOCK_COLUMNS
        of_head = tl.load(scale_ptr + offs_scale)
        peak = tl.max(tl.reshape(tl.abs(finite), [GROUPS, BLOCK_COLUMNS]), 1)
        wanted = tl.div_rn(tl.div_rn(peak, LARGEST_E2M1), of_head)
        bits = mods.to_e4m3_in_software(tl.minimum(tl.maximum(wanted, SMALLEST_BLOCK_SCALE), 448.0))
        group = tl.arange(0, GROUPS)
        tl.store(block_ptr + group, bits, mask=group < DIM // BLOCK_COLUMNS)
        scale = mods.e4m3_in_software(bits, tl.float32) * of_head
        number = tl.div_rn(
            tl.reshape(x, [GROUPS, BLOCK_COLUMNS]), scale[:, None] + tl.zeros([1, BLOCK_COLUMNS], tl.float32)
        )
        number = tl.reshape(mods.to_e2m1(number), [BLOCK])
    even, odd = tl.split(tl.reshape(number, [BLOCK // 2, 2]))
    offs = tl.arange(0, BLOCK // 2)
    tl.store(target + offs, (even | (odd << 4)).to(tl.uint8), mask=offs < DIM // 2)
