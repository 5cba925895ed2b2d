"""A softmax of the Hopper kernel: that of `states.py`, written again in Gluon, where layouts are explicit.

Batch-invariant plans and products in fp8 take it. `lazy_max.py` has the other one.

The scores of a tile are a tuple of tensors next to each other: one, or pieces if a tile's keys are no power of two.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import aggregate
from quire.kernels.hopper.operands import keys_of
from quire.kernels.hopper.products import float32_each, halves
from quire.kernels.hopper.runs import begin_copies
from quire.kernels.hopper.softcap import is_softcap
from quire.kernels.states import LOG2E, log2

LOWEST = gl.constexpr(-3.4028234663852886e38)  # of finite float32 numbers


class Scoring(NamedTuple):
    """The run-time numbers that turn products into scores, and the window of keys that a query sees."""

    scale: Any
    k_scale_ptr: Any  # [num_kv_heads] of a quantised cache, or None
    softcap: Any
    window_left: Any
    window_right: Any
    slopes_ptr: Any  # [num_q_heads], or None
    key_begin: Any  # [num_tokens] int32, the intervals that take the place of the window; None, like the next
    key_end: Any
    extras: Any  # what FUNCTION reads, or None


class Sight(NamedTuple):
    """The intervals of keys that a warpgroup's rows see."""

    first: Any  # [ROWS] int32
    last: Any  # [ROWS] int32, less than the first of a row that sees nothing
    full_start: Any  # the keys that every row of the work tile sees
    full_stop: Any


@aggregate
class Products:
    """A work tile whose products a warpgroup computes, and what turns those with keys into masked scores."""

    q: Any  # the queries, in pieces, or the addresses of their panels
    work: Any  # WorkTile
    own: Any  # Rows
    scoring: Any  # Scoring
    scale: Any  # of scores: a number, or one for each row
    slopes: Any  # of each row's head, or None
    sight: Any  # Sight, or None where rows see a band
    seq: Any  # the sequence, where there is a FUNCTION
    of_rows: Any  # what FUNCTION reads for each row, whatever the key, or None
    run_rows: Any  # where rows have runs of numbers in shared memory, from `rows_of_runs`, or None
    work_i: Any  # which use of the pipeline of queries it is
    tile_i: Any  # which use of the pipelines of keys and values its first tile is


@gluon.jit
def with_scale(products, scale):
    """Return Products with another scale."""
    p = products
    return Products(
        p.q, p.work, p.own, p.scoring, scale, p.slopes, p.sight, p.seq, p.of_rows, p.run_rows, p.work_i, p.tile_i
    )


@gluon.jit
def masked_scores(scores, pos, products, config, IN_HALVES: gl.constexpr):
    """Return scores of the tile that begins at position `pos`, and what makes exponents in base 2 of them.

    That is a factor, and what is added to the product: a number of each row, in a tuple, or () for nothing. Scores are
    -inf where a row does not see a key. IN_HALVES: as in `apply_mask`, where nothing else changes scores.
    """
    scale, scoring = products.scale, products.scoring
    exponent_scale, offset = scale * LOG2E, ()
    if config.SCORE_MOD is not None:
        exponent_scale = scoring.softcap * (2 * LOG2E) if is_softcap(config.SCORE_MOD) else LOG2E
        own, work = products.own, products.work
        q_pos = work.first_pos + work.token + own.rows % own.TOKENS
        changed = ()
        for i in gl.static_range(len(scores)):
            if is_softcap(config.SCORE_MOD):
                score = config.SCORE_MOD(scores[i], by_row(scale), scoring.softcap)
            else:
                k_pos = pos + own.cols[i]
                score = config.SCORE_MOD(scores[i], by_row(scale), q_pos, k_pos, products.slopes, scoring.softcap)
            changed = changed + (score,)
        scores = changed
    if config.FUNCTION is not None:
        scores, exponent_scale, offset = by_function(
            scores, scale if config.SCORE_MOD is None else 1.0, pos, products, config
        )
    HALVES: gl.constexpr = IN_HALVES and config.SCORE_MOD is None and config.FUNCTION is None
    return apply_mask(scores, pos, products, HALVES), exponent_scale, offset


@gluon.jit
def arguments_of_rows(own, work, config):
    """Return the position, the query head and the token of each row."""
    # Rows without queries have a head, too: a function may read what is of it.
    q_head = gl.minimum(work.head + own.rows // own.TOKENS, config.NUM_KV_HEADS * config.GROUP - 1)
    offset = work.token + own.rows % own.TOKENS
    return work.first_pos + offset, q_head, work.q_start + offset


@gluon.jit
def run_of_tile(pos, products, config):
    """Return the runs that FUNCTION reads for the tile that begins at position `pos`, as `begin_copies` takes them."""
    work = products.work
    q_pos, q_head, token = arguments_of_rows(products.own, work, config)
    kv_head, extras = work.head // config.GROUP, products.scoring.extras
    return config.RUNS(q_pos, pos, q_head, kv_head, products.seq, token, extras, products.of_rows)


@gluon.jit
def copy_runs(pos, products, config):
    """Begin to copy the numbers that FUNCTION reads for the tile of keys at position `pos`, while products run."""
    if config.RUNS is not None:
        begin_copies(run_of_tile(pos, products, config), products.run_rows, config.BLOCK_N)


@gluon.jit
def by_function(scores, scale, pos, products, config):
    """Return the scores of the tile that begins at position `pos`, times `scale`, as users' functions make them.

    They are what `masked_scores` returns. A tensor of scores in several pieces has no offset.
    """
    own, work = products.own, products.work
    q_pos, q_head, token = arguments_of_rows(own, work, config)
    low_pos = work.first_pos + work.token
    span = low_pos, low_pos + own.TOKENS - 1, pos + keys_of(own.cols) - 1
    kv_head, extras, changed = work.head // config.GROUP, products.scoring.extras, ()
    WHOLE: gl.constexpr = len(scores) == 1
    copied = ()
    if config.RUNS is not None:
        copied = run_of_tile(pos, products, config)[0], products.run_rows
    for i in gl.static_range(len(scores)):
        score, factor, offset = config.FUNCTION(
            scores[i], q_pos, span, pos, own.cols[i], q_head, kv_head, products.seq, token, extras, products.of_rows,
            scale, WHOLE, copied,
        )  # fmt: skip
        changed = changed + (score,)
    return changed, factor, offset


@gluon.jit
def softmax_step(scores, m_i, l_i, pos, products, config, LIFT: gl.constexpr):
    """Fold the scores of the tile that begins at position `pos` into the running maximum and sum.

    The scores are one tensor, since tiles of batch-invariant plans and of products in fp8 have a power of two of keys.

    Returns:
        p: the probabilities, times 2^LIFT.
        m_i, l_i: the new maximum and sum.
        alpha: the factor for acc.
    """
    scores, exponent_scale, offset = masked_scores(scores, pos, products, config, True)
    highest = gl.max(scores[0], 1) * exponent_scale
    if len(offset) > 0:
        highest += offset[0]
    m_new = gl.maximum(m_i, highest)
    shift = gl.maximum(m_new, LOWEST)  # a row that has seen no key: -inf - -inf is NaN
    alpha = gl.exp2(m_i - shift)
    away = shift - LIFT
    if len(offset) > 0:
        away -= offset[0]
    p = gl.exp2(scores[0] * by_row(exponent_scale) - away[:, None])
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
def apply_mask(scores, pos, products, IN_HALVES: gl.constexpr, BY_BITS: gl.constexpr = False):
    """Return the scores of the tile that begins at position `pos`, -inf where a row does not see a key.

    BY_BITS: as in `mask_by_bits`, else as in `mask_columns`.
    IN_HALVES: the halves of wide tiles are compared one after the other. So a thread has half of a tile's columns in
    registers, and computes a few more numbers. Loops that change scores have no registers for those.
    """
    own, work, sight, scoring = products.own, products.work, products.sight, products.scoring
    BLOCK_N: gl.constexpr = keys_of(own.cols)
    low_pos = work.first_pos + work.token
    high_pos = work.first_pos + gl.minimum(work.token + own.TOKENS, work.q_len) - 1
    q_pos = low_pos + own.rows % own.TOKENS
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
        if BY_BITS:
            scores = mask_by_bits(scores, own.cols, first_col, last_col)
        else:
            masked = ()
            for i in gl.static_range(len(scores)):
                before = i * scores[i].shape[1]
                masked = masked + (mask_columns(scores[i], first_col - before, last_col - before, IN_HALVES),)
            scores = masked
    return scores


@gluon.jit
def mask_columns(scores, first, last, IN_HALVES: gl.constexpr):
    """Return scores of which each row sees the columns from its `first` to its `last`; others are -inf."""
    COLUMNS: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = scores.type.layout
    if IN_HALVES and COLUMNS > 32:
        left, right = halves(scores)
        left = mask_columns(left, first, last, False)
        right = mask_columns(right, first - COLUMNS // 2, last - COLUMNS // 2, False)
        masked = gl.join(left, right).permute([0, 2, 1]).reshape([scores.shape[0], COLUMNS])
        return gl.convert_layout(masked, LAYOUT, assert_trivial=True)
    else:
        columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
        first = gl.convert_layout(first, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
        last = gl.convert_layout(last, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
        return gl.where((columns >= first) & (columns <= last), scores, float("-inf"))


@gluon.jit
def mask_by_bits(scores, cols, first, last):
    """Return a tuple of scores of which each row sees the columns from its `first` to its `last`; others are -inf.

    A thread has two neighbours of every eight columns. It makes a word for each of its rows, in which a bit says
    whether the row sees a column, and an instruction makes predicates of seven bits.
    """
    EACH: gl.constexpr = scores[0].shape[1] // 2  # of a thread, of one tensor
    LAYOUT: gl.constexpr = scores[0].type.layout
    first = gl.convert_layout(first, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
    last = gl.convert_layout(last, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
    of_thread = (cols[0] % 8 - cols[0] % 2)[None, :]  # its first column
    seen = lowest_bits(last + 1 - of_thread) & ~lowest_bits(first - of_thread)
    return gl.inline_asm_elementwise(
        mask_text(EACH * len(scores)), mask_constraints(EACH * len(scores), EACH), scores + (seen,),
        dtype=float32_each(len(scores)), is_pure=True, pack=EACH,
    )  # fmt: skip


@gluon.jit
def lowest_bits(columns):
    """Return a word with a bit for each column of a thread, two of every eight, among so many columns."""
    bits = gl.minimum(gl.maximum((columns >> 3) * 2 + gl.minimum(columns & 7, 2), 0), 32)
    half = bits // 2  # a word is not shifted by 32 at once
    return ((1 << half) << (bits - half)) - 1


@gluon.constexpr_function
def mask_text(numbers):
    """Return PTX that masks a thread's scores. A word of bits for each of its rows follows them.

    The rows are masked one after the other: else there is an instruction for each bit.
    """
    lines = [".reg .b32 bit; .reg .pred sees;"]
    for row in range(2):
        for i in [i for i in range(numbers) if i // 2 % 2 == row]:
            lines.append(
                f"and.b32 bit, ${2 * (numbers + row)}, {1 << (i // 4 * 2 + i % 2)}; setp.ne.u32 sees, bit, 0; "
                f"selp.f32 ${i}, ${i}, 0fFF800000, sees;"
            )
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def mask_constraints(numbers, each):
    """Return the constraints of that PTX."""
    return ",".join(["=f"] * numbers + [str(i) for i in range(numbers)] + ["r"] * each)


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
def by_row(factor):
    """Return a factor per row as a column; return a scalar factor unchanged."""
    if isinstance(factor, gl.tensor) and len(factor.shape) == 1:
        factor = factor[:, None]
    return factor
