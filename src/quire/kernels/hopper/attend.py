"""The consumers' loops of the Hopper kernel: products and softmax of the KV tiles of a work tile.

Three are here: with one state over all tiles, with a state for each split of a batch-invariant plan, and with products
in fp8. `ahead.py` has the one for heads of 128, and `capped.py` the one for scores with a softcap. Softmax and states
are those of `states.py`, written again in Gluon, where layouts are explicit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from quire.kernels.hopper.convert import permute_for_fp8_operand, to_fp8
from quire.kernels.hopper.pipeline import (
    consumer_release,
    consumer_wait,
    consumer_wait_for_both,
    is_copied,
    piece_of,
    pieces_of,
    release_operand,
)
from quire.kernels.hopper.softcap import is_softcap, maximum_with_cap
from quire.kernels.hopper.products import (
    PIECE,
    add_product,
    begin_scores,
    float32_each,
    layout_of_piece,
    num_pieces,
    pieces,
    wide,
)
from quire.kernels.hopper.work_tile import ROWS
from quire.kernels.states import LN2, LOG2E, groups_of, log2

SLACK = gl.constexpr(8.0)  # base-2 exponent by which a score may exceed the maximum that it is relative to
LAZY_FROM = gl.constexpr(129)  # columns of values from which lazy rescaling is faster (NVIDIA H200, 2026-11-25)
# Columns of values up to which it is faster to wait for the next keys while products run (NVIDIA H100, 2026-11-25): in
# `attend_work_tile`, and with states of splits.
NEXT_KEYS_UP_TO = gl.constexpr(64)
NEXT_KEYS_OF_SPLITS_UP_TO = gl.constexpr(128)
LOWEST = gl.constexpr(-3.4028234663852886e38)  # of finite float32 numbers


@gluon.constexpr_function
def layout_of_out(columns, depth):
    """Return the layout of an accumulator of the second product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, depth])


@gluon.jit
def queries_of(wg: gl.constexpr, q_pipe, stage, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Return COLUMNS columns of a warpgroup's queries in shared memory, from column FIRST on."""
    return piece_of(q_pipe, stage, FIRST, COLUMNS).slice(wg * ROWS, ROWS)


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


@gluon.constexpr_function
def products_unless_all_are_one(numbers, each):
    """Return PTX that multiplies a thread's numbers by `each` factors, in turn, in place.

    A warp whose factors are all 1 skips this. Numbers and factors alternate between two rows by twos, as in the
    accumulator of a tensor-core instruction.
    """
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * numbers + i % each};" for i in range(numbers))
    return (
        f"{{ .reg .pred one; setp.eq.f32 one, ${2 * numbers}, 0f3F800000; "
        f"setp.eq.and.f32 one, ${2 * numbers + 2}, 0f3F800000, one; vote.sync.all.pred one, one, 0xffffffff; "
        f"@one bra.uni DONE; {products} DONE: }}"
    )


@gluon.constexpr_function
def in_place(numbers, each):
    """Return the constraints of PTX that changes float32 registers in place and reads `each` others."""
    return ",".join(["=f"] * numbers + [str(i) for i in range(numbers)] + ["f"] * each)


@gluon.jit
def rescaled(accs, factor):
    """Multiply accumulators by a factor per row. Nearly always, it is 1 for all rows of a warp: see `raised`."""
    if accs[0].shape[1] == PIECE:
        return rescaled_together(accs, factor)
    else:
        results = ()
        for i in gl.static_range(len(accs)):
            results = results + rescaled_together((accs[i],), factor)
        return results


@gluon.jit
def rescaled_together(accs, factor):
    """Multiply accumulators of one layout by a factor per row, if any is not 1."""
    EACH: gl.constexpr = min(64, accs[0].shape[1] // 2)  # of a thread, of one accumulator
    factor = gl.convert_layout(factor, gl.SliceLayout(1, accs[0].type.layout))[:, None]
    return gl.inline_asm_elementwise(
        products_unless_all_are_one(EACH * len(accs), EACH), in_place(EACH * len(accs), EACH), accs + (factor,),
        dtype=float32_each(len(accs)), is_pure=False, pack=EACH,
    )  # fmt: skip


@gluon.jit
def raised(m_i, highest):
    """Return what exponents are relative to: the running maximum, until a score exceeds it by more than SLACK.

    So probabilities are at most 2^SLACK, and the accumulators are rescaled for the first tiles of a row and rarely
    afterwards. This is the lazy rescaling of FlashAttention 4.
    """
    return gl.where(highest > m_i + SLACK, highest, m_i)


@gluon.jit
def empty_state(OF_SCORES: gl.constexpr, v_pipe, HEAD_DIM_V: gl.constexpr):
    """Return the state over no keys. There is an accumulator for each piece of the values' columns."""
    m_i = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, OF_SCORES))
    l_i = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, OF_SCORES))
    COLUMNS: gl.constexpr = columns_of_accs(HEAD_DIM_V, len(v_pipe.addresses) > 0)
    accs = ()
    for i in gl.static_range(len(COLUMNS)):
        accs = accs + (empty_acc(COLUMNS[i], 256 // v_pipe.tiles.dtype.primitive_bitwidth),)
    return accs, m_i, l_i


@gluon.constexpr_function
def columns_of_accs(columns, in_pieces):
    """Return the columns of each accumulator of products with values of so many columns."""
    if in_pieces:
        return (PIECE.value,) * num_pieces(columns)
    return tuple(piece[1] for piece in pieces_of(columns, 64))


@gluon.jit
def empty_acc(COLUMNS: gl.constexpr, DEPTH: gl.constexpr):
    """Return an accumulator of zeros."""
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout_of_out(COLUMNS, DEPTH))


@gluon.jit
def multiply_keys(q, k_pipe, stage, zeros, HEAD_DIM: gl.constexpr):
    """Begin the product of queries and a tile of keys. It is a tuple of tensors like `zeros`."""
    if len(k_pipe.addresses) > 0:
        return begin_scores(q, k_pipe, stage, k_pipe.tiles.dtype, len(zeros) * PIECE, HEAD_DIM)
    else:
        scores = zeros[0]
        for i in gl.static_range(len(q)):
            k = piece_of(k_pipe, stage, pieces_of(HEAD_DIM, 16)[i][0], pieces_of(HEAD_DIM, 16)[i][1])
            scores = warpgroup_mma(q[i], k.permute((1, 0)), scores, use_acc=i > 0, is_async=True)
        return (scores,)


@gluon.constexpr_function
def layout_of_scores(keys, depth):
    """Return the layout of the scores of tiles of so many keys, or of their pieces if that is no power of two."""
    if keys & (keys - 1):
        return layout_of_piece()
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, keys, depth])


@gluon.jit
def columns_of_scores(KEYS: gl.constexpr, OF_SCORES: gl.constexpr):
    """Return the columns of each tensor of a tile's scores."""
    COLUMNS: gl.constexpr = PIECE if KEYS & (KEYS - 1) else KEYS
    columns = ()
    for i in gl.static_range(KEYS // COLUMNS):
        columns = columns + (i * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, OF_SCORES)),)
    return columns


@gluon.jit
def no_scores(cols, OF_SCORES: gl.constexpr):
    """Return scores of 0 of a tile with columns `cols`."""
    scores = ()
    for i in gl.static_range(len(cols)):
        scores = scores + (gl.zeros([ROWS, cols[i].shape[0]], gl.float32, OF_SCORES),)
    return scores


@gluon.constexpr_function
def keys_of(cols):
    """Return how many keys the tiles with these columns have."""
    return len(cols) * cols[0].shape[0]


@gluon.jit
def after(IN_FLIGHT: gl.constexpr, tensors):
    """Wait until at most IN_FLIGHT products have not ended, and return tensors that are those of ended ones."""
    if len(tensors) > 1:
        return warpgroup_mma_wait(IN_FLIGHT, deps=tensors)
    else:
        return (warpgroup_mma_wait(IN_FLIGHT, deps=tensors),)


@gluon.jit
def multiply_values(p, v_pipe, stage, accs, HEAD_DIM_V: gl.constexpr):
    """Begin to add the product of probabilities and a tile of values to the accumulators."""
    if len(v_pipe.addresses) > 0:
        return add_product(p, v_pipe, stage, accs, HEAD_DIM_V)
    else:
        results = ()
        for i in gl.static_range(len(accs)):
            v = piece_of(v_pipe, stage, pieces_of(HEAD_DIM_V, 64)[i][0], pieces_of(HEAD_DIM_V, 64)[i][1])
            operand = p[0]
            if i > 0:  # the same registers
                operand = gl.convert_layout(p[0], gl.DotOperandLayout(0, accs[i].type.layout, 2))
            results = results + (warpgroup_mma(operand, v, accs[i], is_async=True),)
        return results


@gluon.jit
def as_operands(p, v_pipe, accs, PACKED: gl.constexpr = False):
    """Return probabilities as the operands of `multiply_values`, of the type of values. PACKED: as in `rounded`."""
    operands = ()
    for i in gl.static_range(len(p)):
        numbers = rounded(p[i], v_pipe.tiles.dtype, PACKED)
        if len(v_pipe.addresses) > 0:
            operands = operands + pieces(numbers)
        else:
            operands = operands + (gl.convert_layout(numbers, gl.DotOperandLayout(0, accs[0].type.layout, 2)),)
    return operands


@gluon.jit
def rounded(p, element: gl.constexpr, PACKED: gl.constexpr):
    """Round probabilities to the type of values.

    PACKED: by an instruction that rounds two neighbours into one register, in the order that tensor cores want. Left to
    itself, ptxas takes the other order in some kernels and swaps all halves before a product. In others it is faster.
    """
    if not PACKED:
        return p.to(element)
    elif element == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def first_scores(q, k_pipe, tile_i, zeros, work, q_pipe, work_i, HEAD_DIM: gl.constexpr, EARLY: gl.constexpr):
    """Return the product of queries and the first tile of keys, and release what no later product needs."""
    scores = multiply_keys(q, k_pipe, consumer_wait(k_pipe, tile_i), zeros, HEAD_DIM)
    scores = after(0, scores)
    release_operand(k_pipe, tile_i)
    if EARLY and work.num_tiles == 1:
        consumer_release(q_pipe, work_i)
    return scores


@gluon.jit
def attend_work_tile(
    q, k_pipe, v_pipe, tile_i, rows, cols, work, sight, slopes, scale, scoring, q_pipe, work_i,
    OF_SCORES: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_T: gl.constexpr,
    SCORE_MOD: gl.constexpr, EARLY: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Return the state of a work tile's rows over its KV tiles, from the last tile to the first.

    The first tile that is used is the tile_i-th of the pipelines. EARLY: the queries are released after their last
    product. PACKED: as in `as_operand`.
    """
    LAZY: gl.constexpr = HEAD_DIM_V >= LAZY_FROM
    # The next keys are waited for while products run. Otherwise keys and values are waited for together, if they are
    # copied, and else values after the product of keys has begun.
    NEXT_KEYS: gl.constexpr = HEAD_DIM_V <= NEXT_KEYS_UP_TO
    TOGETHER: gl.constexpr = is_copied(v_pipe.full, v_pipe.empty) and not NEXT_KEYS
    BLOCK_N: gl.constexpr = keys_of(cols)
    zeros = no_scores(cols, OF_SCORES)
    accs, m_i, l_i = empty_state(OF_SCORES, v_pipe, HEAD_DIM_V)
    NUM_ACCS: gl.constexpr = len(accs)
    IN_FLIGHT: gl.constexpr = 1 if len(v_pipe.addresses) > 0 else NUM_ACCS  # products with values
    pos = work.tile * BLOCK_N
    scores = first_scores(q, k_pipe, tile_i, zeros, work, q_pipe, work_i, HEAD_DIM, EARLY)
    p, m_i, l_i, _ = softmax_step(
        scores, m_i, l_i, pos, rows, cols, work, sight, slopes, scale, scoring, 0.0, BLOCK_T, SCORE_MOD, LAZY
    )
    p = as_operands(p, v_pipe, accs, PACKED)
    stop = tile_i + work.num_tiles
    k_stage, v_stage = tile_i, tile_i
    if NEXT_KEYS:
        k_stage = consumer_wait(k_pipe, tile_i + 1, work.num_tiles > 1)
    for i in range(tile_i + 1, stop):
        pos -= BLOCK_N
        if TOGETHER:
            k_stage, v_stage = consumer_wait_for_both(k_pipe, i, v_pipe, i - 1)
        elif not NEXT_KEYS:
            k_stage = consumer_wait(k_pipe, i)
        scores = multiply_keys(q, k_pipe, k_stage, zeros, HEAD_DIM)
        if not TOGETHER:
            v_stage = consumer_wait(v_pipe, i - 1)
        accs = multiply_values(p, v_pipe, v_stage, accs, HEAD_DIM_V)
        if NEXT_KEYS:
            k_stage = consumer_wait(k_pipe, i + 1, i + 1 < stop)
        scores = after(IN_FLIGHT, scores)
        release_operand(k_pipe, i)
        if EARLY and i == stop - 1:
            consumer_release(q_pipe, work_i)
        # The other warpgroup's softmax overlaps these two products. Overlapping the second product with the softmax of
        # this warpgroup was slower (NVIDIA H200).
        done = warpgroup_mma_wait(0, deps=accs + p)
        accs, p = done[:NUM_ACCS], done[NUM_ACCS:]
        release_operand(v_pipe, i - 1)
        p, m_i, l_i, alpha = softmax_step(
            scores, m_i, l_i, pos, rows, cols, work, sight, slopes, scale, scoring, 0.0, BLOCK_T, SCORE_MOD, LAZY
        )
        accs = rescaled(accs, alpha) if LAZY else scaled(accs, alpha)
        p = as_operands(p, v_pipe, accs, PACKED)
    accs = multiply_values(p, v_pipe, consumer_wait(v_pipe, stop - 1), accs, HEAD_DIM_V)
    done = warpgroup_mma_wait(0, deps=accs + p)
    release_operand(v_pipe, stop - 1)
    if is_softcap(SCORE_MOD):
        m_i = maximum_with_cap(m_i, scoring.softcap)
    return wide(done[:NUM_ACCS], HEAD_DIM_V), m_i, l_i


@gluon.jit
def attend_work_tile_in_splits(
    q, k_pipe, v_pipe, tile_i, rows, cols, work, slopes, scale, scoring,
    OF_SCORES: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_T: gl.constexpr,
    SCORE_MOD: gl.constexpr, FIXED_SPLIT: gl.constexpr,
):  # fmt: skip
    """Return the same as `attend_work_tile`, from the first tile to the last, rounded as batch-invariant plans do.

    Each split of FIXED_SPLIT keys has a state, and the result is the left fold of these, as in the portable kernels.
    """
    BLOCK_N: gl.constexpr = keys_of(cols)
    NEXT_KEYS: gl.constexpr = HEAD_DIM_V <= NEXT_KEYS_OF_SPLITS_UP_TO
    zeros = no_scores(cols, OF_SCORES)
    accs, m_i, l_i = empty_state(OF_SCORES, v_pipe, HEAD_DIM_V)
    NUM_ACCS: gl.constexpr = len(accs)
    IN_FLIGHT: gl.constexpr = 1 if len(v_pipe.addresses) > 0 else NUM_ACCS  # products with values
    split_accs, split_m, no_sums = accs, m_i, sums_of_groups(zeros[0], groups_of(BLOCK_N))
    pos = work.tile * BLOCK_N
    scores = multiply_keys(q, k_pipe, consumer_wait(k_pipe, tile_i), zeros, HEAD_DIM)
    scores = after(0, scores)
    release_operand(k_pipe, tile_i)
    p, split_m, split_l, _ = softmax_step(
        scores, split_m, no_sums, pos, rows, cols, work, None, slopes, scale, scoring, 0.0, BLOCK_T, SCORE_MOD
    )
    p = as_operands(p, v_pipe, accs)
    stop = tile_i + work.num_tiles
    k_stage = tile_i
    if NEXT_KEYS:
        k_stage = consumer_wait(k_pipe, tile_i + 1, work.num_tiles > 1)
    for i in range(tile_i + 1, stop):
        pos += BLOCK_N
        if not NEXT_KEYS:
            k_stage = consumer_wait(k_pipe, i)
        scores = multiply_keys(q, k_pipe, k_stage, zeros, HEAD_DIM)
        split_accs = multiply_values(p, v_pipe, consumer_wait(v_pipe, i - 1), split_accs, HEAD_DIM_V)
        if NEXT_KEYS:
            k_stage = consumer_wait(k_pipe, i + 1, i + 1 < stop)
        scores = after(IN_FLIGHT, scores)
        release_operand(k_pipe, i)
        done = warpgroup_mma_wait(0, deps=split_accs + p)
        split_accs, p = done[:NUM_ACCS], done[NUM_ACCS:]
        release_operand(v_pipe, i - 1)
        if pos % FIXED_SPLIT == 0:
            accs, m_i, l_i = fold_split(accs, m_i, l_i, split_accs, split_m, split_l)
            split_accs, split_m, _ = empty_state(OF_SCORES, v_pipe, HEAD_DIM_V)
            split_l = no_sums
        p, split_m, split_l, alpha = softmax_step(
            scores, split_m, split_l, pos, rows, cols, work, None, slopes, scale, scoring, 0.0, BLOCK_T, SCORE_MOD
        )
        split_accs = scaled(split_accs, alpha)
        p = as_operands(p, v_pipe, accs)
    split_accs = multiply_values(p, v_pipe, consumer_wait(v_pipe, stop - 1), split_accs, HEAD_DIM_V)
    done = warpgroup_mma_wait(0, deps=split_accs + p)
    release_operand(v_pipe, stop - 1)
    accs, m_i, l_i = fold_split(accs, m_i, l_i, done[:NUM_ACCS], split_m, split_l)
    return wide(accs, HEAD_DIM_V), m_i, l_i


@gluon.jit
def fold_split(accs, m_i, l_i, split_accs, split_m, split_l):
    """Add the state of a split to the state of those before it, as `states.fold_split` does."""
    m_new = gl.maximum(m_i, split_m)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = gl.exp2(m_i - shift), gl.exp2(split_m - shift)
    results = ()
    for i in gl.static_range(len(accs)):
        results = results + (fold_acc(accs[i], alpha, split_accs[i], beta),)
    split_total = gl.convert_layout(total(split_l), l_i.type.layout)
    return results, m_new, gl.fma(l_i, alpha, split_total * beta)


@gluon.jit
def fold_acc(acc, alpha, split_acc, beta):
    """Return one accumulator of `fold_split`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    by, other_by = gl.convert_layout(alpha, LAYOUT)[:, None], gl.convert_layout(beta, LAYOUT)[:, None]
    return gl.fma(acc, by + gl.zeros_like(acc), split_acc * other_by)


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
def attend_work_tile_in_fp8(
    q, k_pipe, v_pipe, tile_i, rows, cols, work, sight, slopes, scale, scoring,
    OF_SCORES: gl.constexpr, OF_OUT: gl.constexpr, BLOCK_T: gl.constexpr, SCORE_MOD: gl.constexpr,
):  # fmt: skip
    """Return the same as `attend_work_tile`, with fp8 products of the stored keys and the transposed values.

    Tensor cores accumulate fp8 products with about 14 bits, so the products of each tile are added to acc in float32.
    Products take little time compared with the softmax, and registers cannot hold three accumulators. So the two
    products of a warpgroup run one after the other, and overlap the other warpgroup's softmax.
    """
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[1]
    OF_P: gl.constexpr = gl.DotOperandLayout(0, OF_OUT, 4)
    LIFT: gl.constexpr = 8.0  # probabilities are scaled by 2^8, so that small ones keep their bits
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, OF_SCORES)
    empty, m_i, l_i = empty_state(OF_SCORES, v_pipe, k_pipe.tiles.shape[2])
    no_out = empty[0]
    acc = no_out
    pos = work.tile * BLOCK_N
    for i in range(tile_i, tile_i + work.num_tiles):
        k = k_pipe.tiles.index(consumer_wait(k_pipe, i))
        scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        consumer_release(k_pipe, i)
        p, m_i, l_i, alpha = softmax_step(
            (scores,), m_i, l_i, pos, rows, cols, work, sight, slopes, scale, scoring, LIFT, BLOCK_T, SCORE_MOD
        )
        p = gl.convert_layout(to_fp8(permute_for_fp8_operand(p[0])), OF_P)
        v = v_pipe.tiles.index(consumer_wait(v_pipe, i))
        product = warpgroup_mma(p, v.permute((1, 0)), no_out, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        consumer_release(v_pipe, i)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OF_OUT))[:, None] + product
        pos -= BLOCK_N
    m_i -= LIFT
    if is_softcap(SCORE_MOD):
        m_i = maximum_with_cap(m_i, scoring.softcap)
    return acc, m_i, l_i


@gluon.jit
def hide_unseen(scores, pos, rows, cols, work, sight, scoring, BLOCK_T: gl.constexpr):
    """Return the scores of the tile that begins at position `pos`, -inf where a row does not see a key."""
    BLOCK_N: gl.constexpr = keys_of(cols)
    low_pos = work.first_pos + work.token
    high_pos = work.first_pos + gl.minimum(work.token + BLOCK_T, work.q_len) - 1
    q_pos = low_pos + rows % BLOCK_T
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
            visible = (cols[i][None, :] >= first_col[:, None]) & (cols[i][None, :] <= last_col[:, None])
            shown = shown + (gl.where(visible, scores[i], float("-inf")),)
        scores = shown
    return scores


@gluon.jit
def softmax_step(
    scores, m_i, l_i, pos, rows, cols, work, sight, slopes, scale, scoring,
    LIFT: gl.constexpr, BLOCK_T: gl.constexpr, SCORE_MOD: gl.constexpr, LAZY: gl.constexpr = False,
):  # fmt: skip
    """Fold the scores of the tile that begins at position `pos` into the running maximum and sum.

    Returns:
        p: the probabilities, times 2^LIFT.
        m_i, l_i: the new maximum and sum.
        alpha: the factor for acc.
    """
    scores, exponent_scale, m_new, shift, alpha = new_maximum(
        scores, m_i, pos, rows, cols, work, sight, slopes, scale, scoring, BLOCK_T, SCORE_MOD, LAZY
    )
    p, l_i = probabilities(scores, l_i, exponent_scale, shift, alpha, LIFT)
    return p, m_new, l_i, alpha


@gluon.jit
def new_maximum(
    scores, m_i, pos, rows, cols, work, sight, slopes, scale, scoring,
    BLOCK_T: gl.constexpr, SCORE_MOD: gl.constexpr, LAZY: gl.constexpr = False,
):  # fmt: skip
    """Fold the scores of a tile into the running maximum: the first half of `softmax_step`.

    Returns:
        scores: with -inf where a row does not see a key.
        exponent_scale: what makes exponents in base 2 of scores.
        m_new: the new maximum, in base 2.
        shift: what exponents are relative to.
        alpha: the factor for acc and l_i.
    """
    exponent_scale = scale * LOG2E
    if SCORE_MOD is not None:
        exponent_scale = scoring.softcap * (2 * LOG2E) if is_softcap(SCORE_MOD) else LOG2E
        q_pos = work.first_pos + work.token + rows % BLOCK_T
        changed = ()
        for i in gl.static_range(len(scores)):
            if is_softcap(SCORE_MOD):
                score = SCORE_MOD(scores[i], by_row(scale), scoring.softcap)
            else:
                score = SCORE_MOD(scores[i], by_row(scale), q_pos, pos + cols[i], slopes, scoring.softcap)
            changed = changed + (score,)
        scores = changed
    scores = hide_unseen(scores, pos, rows, cols, work, sight, scoring, BLOCK_T)
    largest = scores[0]
    for i in gl.static_range(1, len(scores)):
        largest = gl.maximum(largest, scores[i])
    highest = gl.max(largest, 1) * exponent_scale
    m_new = raised(m_i, highest) if LAZY else gl.maximum(m_i, highest)
    shift = gl.maximum(m_new, LOWEST)  # a row that has seen no key: -inf - -inf is NaN
    return scores, exponent_scale, m_new, shift, gl.exp2(m_i - shift)


@gluon.jit
def probabilities(scores, l_i, exponent_scale, shift, alpha, LIFT: gl.constexpr):
    """Return a tile's probabilities times 2^LIFT, and the new sum: the second half of `softmax_step`."""
    p = ()
    for i in gl.static_range(len(scores)):
        p = p + (gl.exp2(scores[i] * by_row(exponent_scale) - (shift - LIFT)[:, None]),)
    if len(l_i.shape) == 1:
        l_i = l_i * alpha + gl.sum(sum_of_pieces(p), 1)
    else:
        by = gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None]
        l_i = gl.fma(l_i, by + gl.zeros_like(l_i), sums_of_groups(p[0], l_i.shape[1]))
    return p, l_i


@gluon.jit
def sum_of_pieces(p):
    """Return the sum of a tile's pieces, number by number."""
    numbers = p[0]
    for i in gl.static_range(1, len(p)):
        numbers += p[i]
    return numbers


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
