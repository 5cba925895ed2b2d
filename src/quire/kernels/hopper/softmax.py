"""A softmax of the Hopper kernel: that of `states.py`, written again in Gluon, where layouts are explicit.

Batch-invariant plans and products in fp8 take it. `steady.py` has the other one.

The scores of a tile are a tuple of tensors next to each other: one, or pieces if a tile's keys are no power of two.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.operands import keys_of
from quire.kernels.hopper.products import halves
from quire.kernels.hopper.softcap import is_softcap
from quire.kernels.states import LN2, LOG2E, log2

LOWEST = gl.constexpr(-3.4028234663852886e38)  # of finite float32 numbers


@gluon.jit
def shown_scores(
    scores, pos, rows, cols, work, sight, slopes, scale, scoring, TOKENS: gl.constexpr, SCORE_MOD: gl.constexpr,
    IN_HALVES: gl.constexpr,
):  # fmt: skip
    """Return scores of the tile that begins at position `pos`, and what makes exponents in base 2 of them.

    They are -inf where a row does not see a key. IN_HALVES: as in `hide_unseen`, where nothing else changes scores.
    """
    exponent_scale = scale * LOG2E
    if SCORE_MOD is not None:
        exponent_scale = scoring.softcap * (2 * LOG2E) if is_softcap(SCORE_MOD) else LOG2E
        q_pos = work.first_pos + work.token + rows % TOKENS
        changed = ()
        for i in gl.static_range(len(scores)):
            if is_softcap(SCORE_MOD):
                score = SCORE_MOD(scores[i], by_row(scale), scoring.softcap)
            else:
                score = SCORE_MOD(scores[i], by_row(scale), q_pos, pos + cols[i], slopes, scoring.softcap)
            changed = changed + (score,)
        scores = changed
    HALVES: gl.constexpr = IN_HALVES and SCORE_MOD is None
    return hide_unseen(scores, pos, rows, cols, work, sight, scoring, TOKENS, HALVES), exponent_scale


@gluon.jit
def softmax_step(
    scores, m_i, l_i, pos, rows, cols, work, sight, slopes, scale, scoring,
    LIFT: gl.constexpr, TOKENS: gl.constexpr, SCORE_MOD: gl.constexpr,
):  # fmt: skip
    """Fold the scores of the tile that begins at position `pos` into the running maximum and sum.

    The scores are one tensor, since tiles of batch-invariant plans and of products in fp8 have a power of two of keys.

    Returns:
        p: the probabilities, times 2^LIFT.
        m_i, l_i: the new maximum and sum.
        alpha: the factor for acc.
    """
    scores, exponent_scale = shown_scores(
        scores, pos, rows, cols, work, sight, slopes, scale, scoring, TOKENS, SCORE_MOD, True
    )
    m_new = gl.maximum(m_i, gl.max(scores[0], 1) * exponent_scale)
    shift = gl.maximum(m_new, LOWEST)  # a row that has seen no key: -inf - -inf is NaN
    alpha = gl.exp2(m_i - shift)
    p = gl.exp2(scores[0] * by_row(exponent_scale) - (shift - LIFT)[:, None])
    if len(l_i.shape) == 1:
        l_i = l_i * alpha + gl.sum(p, 1)
    else:
        by = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None]
        l_i = gl.fma(l_i, by + gl.zeros_like(l_i), sums_of_groups(p, l_i.shape[1]))
    return (p,), m_new, l_i, alpha


@gluon.jit
def scaled(accs, factor):
    """Multiply accumulators by a scalar, or by a factor per row."""
    results = ()
    for i in gl.static_range(len(accs)):
        by = factor
        if isinstance(factor, gl.tensor) and len(factor.shape) == 1:
            by = gl.convert_layout(factor, gl.SliceLayout(1, accs[i].type.layout))[:, None]
        results = results + (accs[i] * by,)
    return results


@gluon.jit
def hide_unseen(scores, pos, rows, cols, work, sight, scoring, TOKENS: gl.constexpr, IN_HALVES: gl.constexpr):
    """Return the scores of the tile that begins at position `pos`, -inf where a row does not see a key.

    IN_HALVES: the halves of wide tiles are compared one after the other. So a thread has half of a tile's columns in
    registers, and computes a few more numbers. Loops that change scores have no registers for those.
    """
    BLOCK_N: gl.constexpr = keys_of(cols)
    low_pos = work.first_pos + work.token
    high_pos = work.first_pos + gl.minimum(work.token + TOKENS, work.q_len) - 1
    q_pos = low_pos + rows % TOKENS
    if sight is None:
        is_past_right = pos + BLOCK_N > gl.minimum(low_pos + scoring.window_right + 1, work.seq_len)
        is_partial = is_past_right | (pos < high_pos - scoring.window_left)
    else:
        is_partial = (pos + BLOCK_N > sight.full_stop) | (pos < sight.full_start)
    if is_partial:  # else every row sees every key of the tile
        if sight is None:
            first_col = q_pos - scoring.window_left - pos
            last_col = gl.minimum(q_pos + scoring.window_right, work.seq_len - 1) - pos
        else:
            first_col, last_col = sight.first - pos, sight.last - pos
        shown = ()
        for i in gl.static_range(len(scores)):
            before = i * scores[i].shape[1]
            shown = shown + (show_columns(scores[i], first_col - before, last_col - before, IN_HALVES),)
        scores = shown
    return scores


@gluon.jit
def show_columns(scores, first, last, IN_HALVES: gl.constexpr):
    """Return scores of which each row shows the columns from its `first` to its `last`; others are -inf."""
    COLUMNS: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = scores.type.layout
    if IN_HALVES and COLUMNS > 32:
        left, right = halves(scores)
        left = show_columns(left, first, last, False)
        right = show_columns(right, first - COLUMNS // 2, last - COLUMNS // 2, False)
        shown = gl.join(left, right).permute([0, 2, 1]).reshape([scores.shape[0], COLUMNS])
        return gl.convert_layout(shown, LAYOUT, assert_trivial=True)
    else:
        columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
        first = gl.convert_layout(first, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
        last = gl.convert_layout(last, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
        return gl.where((columns >= first) & (columns <= last), scores, float("-inf"))


@gluon.jit
def sums_of_groups(p, SUMS: gl.constexpr):
    """Return sums over groups of the columns of p [M, N], as `states.sums_of_groups` does."""
    for _ in gl.static_range(log2(p.shape[1] // (8 * SUMS))):
        p = gl.sum(p.reshape([p.shape[0], 2, p.shape[1] // 2]), 1)
    for _ in gl.static_range(3):
        p = gl.sum(p.reshape([p.shape[0], p.shape[1] // 2, 2]), 2)
    return p


@gluon.jit
def total(sums):
    """Return the sum of each row's sums, as `states.total` does."""
    for _ in gl.static_range(log2(sums.shape[1])):
        sums = gl.sum(sums.reshape([sums.shape[0], sums.shape[1] // 2, 2]), 2)
    return sums.reshape([sums.shape[0]])


@gluon.jit
def lse_of_rows(m_i, l_i):
    """Return the natural-log lse of finished states, -inf where no key was seen.

    The fma is written out, as in `states.finish`. A compiler may fuse product and sum or not, as the code around them
    is, and the same rows would have other bits in another variant of a kernel.
    """
    empty = l_i == 0.0
    lse = gl.fma(m_i, gl.zeros_like(m_i) + LN2, gl.log(gl.where(empty, 1.0, l_i)))
    return gl.where(empty, float("-inf"), lse)


@gluon.jit
def by_row(factor):
    """Return a factor per row as a column; return a scalar factor unchanged."""
    if isinstance(factor, gl.tensor) and len(factor.shape) == 1:
        factor = factor[:, None]
    return factor
