"""Combine the partials of a row block that is cut by keys. The last warpgroup to arrive does it.

A partial is the state of a consumer warpgroup's 64 rows over one split: m_i, l_i and the accumulators of `states.py`,
as float32 in the launch's scratch. Warpgroups do not share rows, so each one's arrivals are counted by themselves.
The last one reads the partials of all splits again, its own too, in the order of the keys. So results do not depend on
which one is last, and none waits for another.

Only threads of warpgroups with the same layouts read a partial. So a thread's numbers are stored next to each other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.hopper.attend import empty_acc, layout_of_out
from quire.kernels.hopper.pipeline import pieces_of
from quire.kernels.hopper.results import tokens_of_rows
from quire.kernels.hopper.work_tile import ROWS

# This was renamed after Triton 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
BY_THREAD = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.constexpr_function
def size_of_partial(head_dim_v):
    """Return the float32 numbers of a warpgroup's partial."""
    return ROWS.value * (2 + (head_dim_v + 63) // 64 * 64)


@gluon.constexpr_function
def columns_at_once(head_dim_v):
    """Return how many columns of an accumulator are combined at once: fewer where registers hold many results."""
    return 64 if head_dim_v <= 192 else 32


@gluon.jit
def store_and_arrive(
    partials, arrivals, cut, work, wg: gl.constexpr, accs, m_i, l_i, SIZE: gl.constexpr, WARPGROUPS: gl.constexpr,
    BLOCK_T: gl.constexpr, OWNED: gl.constexpr,
):  # fmt: skip
    """Store this warpgroup's partial and count its arrival; return whether all splits have arrived.

    The last one sees what all others stored. It resets the counter to 0.

    Args:
        partials: [slots, WARPGROUPS, SIZE] float32 scratch.
        arrivals: [slots, WARPGROUPS] int32, 0 between launches, of which those of first slots are used.
        cut: how the row block is cut.
        work: the work tile. Rows without a query are not stored.
        wg: which warpgroup.
        accs, m_i, l_i: the state.
    """
    rows = gl.arange(0, ROWS, m_i.type.layout)
    ptr = partials + ((cut.first_slot + cut.split) * WARPGROUPS + wg) * SIZE
    gl.store(ptr + rows, m_i)
    gl.store(ptr + ROWS + rows, l_i)
    ptr += 2 * ROWS
    for i in gl.static_range(len(accs)):
        numbers = by_thread(accs[i])
        owned = owned_by_thread(work, wg, numbers.shape[0], BLOCK_T, OWNED)
        gl.store(ptr + gl.arange(0, numbers.shape[0], numbers.type.layout), numbers, mask=owned)
        ptr += numbers.shape[0]
    barrier()  # the stores of all threads come before the arrival, which one thread makes
    counter = arrivals + (cut.first_slot * WARPGROUPS + wg)
    is_last = gl.atomic_add(counter, 1, sem="acq_rel") == (1 << cut.shift) - 1
    if is_last:
        gl.store(counter, 0)
    return is_last


@gluon.jit
def combine_partials(
    partials, cut, work, wg: gl.constexpr, OF_SCORES: gl.constexpr, DEPTH: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    SIZE: gl.constexpr, WARPGROUPS: gl.constexpr, BLOCK_T: gl.constexpr, OWNED: gl.constexpr,
):  # fmt: skip
    """Return the state over all splits of a row block, of this warpgroup's rows."""
    ptr = partials + (cut.first_slot * WARPGROUPS + wg) * SIZE
    PIECES: gl.constexpr = pieces_of(HEAD_DIM_V, 64)
    COLUMNS: gl.constexpr = columns_at_once(HEAD_DIM_V)
    owned = owned_by_thread(work, wg, ROWS * COLUMNS, BLOCK_T, OWNED)
    accs = ()
    for i in gl.static_range(len(PIECES)):
        pieces = ()
        for j in gl.static_range(PIECES[i][1] // COLUMNS):
            acc, m_i, l_i = combine_columns(
                ptr, 1 << cut.shift, owned, PIECES[i][0] + j * COLUMNS, COLUMNS, OF_SCORES, DEPTH, SIZE, WARPGROUPS
            )
            pieces = pieces + (acc,)
        accs = accs + (gl.convert_layout(joined(pieces), layout_of_out(PIECES[i][1], DEPTH)),)
    return accs, m_i, l_i


@gluon.jit
def combine_columns(
    ptr, num_splits, owned, FIRST: gl.constexpr, COLUMNS: gl.constexpr, OF_SCORES: gl.constexpr, DEPTH: gl.constexpr,
    SIZE: gl.constexpr, WARPGROUPS: gl.constexpr,
):  # fmt: skip
    """Return the combined state of COLUMNS columns from FIRST on; `ptr` is the warpgroup's first partial.

    Splits are taken two at a time, whose loads are in flight together. Their number is even.
    """
    acc = empty_acc(COLUMNS, DEPTH)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, OF_SCORES)
    OF_ACC: gl.constexpr = layout_of_out(COLUMNS, DEPTH)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OF_ACC)
    m_i = gl.full([ROWS], float("-inf"), gl.float32, OF_ROWS)
    l_i = gl.zeros([ROWS], gl.float32, OF_ROWS)
    for _ in range(0, num_splits, 2):
        m_0, l_0, acc_0 = load_columns(ptr, owned, FIRST, COLUMNS, OF_ROWS, OF_ACC)
        m_1, l_1, acc_1 = load_columns(ptr + WARPGROUPS * SIZE, owned, FIRST, COLUMNS, OF_ROWS, OF_ACC)
        m_new = gl.maximum(m_i, gl.maximum(m_0, m_1))
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, by_0, by_1 = gl.exp2(m_i - shift), gl.exp2(m_0 - shift), gl.exp2(m_1 - shift)
        l_i, m_i = l_i * alpha + l_0 * by_0 + l_1 * by_1, m_new
        acc = acc * gl.convert_layout(alpha, BY_ROW)[:, None]
        acc += acc_0 * gl.convert_layout(by_0, BY_ROW)[:, None]
        acc += acc_1 * gl.convert_layout(by_1, BY_ROW)[:, None]
        ptr += 2 * WARPGROUPS * SIZE
    return acc, m_i, l_i


@gluon.jit
def load_columns(ptr, owned, FIRST: gl.constexpr, COLUMNS: gl.constexpr, OF_ROWS: gl.constexpr, OF_ACC: gl.constexpr):
    """Return m_i, l_i and COLUMNS columns of the accumulator of the partial at `ptr`, whose other rows are 0.

    Loads bypass L1, since other warpgroups stored the partial.
    """
    rows = gl.arange(0, ROWS, OF_ROWS)
    m_i = gl.load(ptr + rows, cache_modifier=".cg")
    l_i = gl.load(ptr + ROWS + rows, cache_modifier=".cg")
    NUMBERS: gl.constexpr = ROWS * COLUMNS
    offs = (2 + FIRST) * ROWS + gl.arange(0, NUMBERS, BY_THREAD)
    numbers = gl.load(ptr + offs, mask=owned, other=0.0, cache_modifier=".cg")
    acc = numbers.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5)).reshape([ROWS, COLUMNS])
    return m_i, l_i, gl.convert_layout(acc, OF_ACC)


@gluon.jit
def by_thread(acc):
    """Return the numbers of an accumulator in an order in which each thread has four adjacent ones."""
    GROUPS: gl.constexpr = acc.shape[1] // 8
    # Rows are (warp, half, lane // 4), columns are (group, lane % 4, which of two).
    numbers = acc.reshape([4, 2, 8, GROUPS, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([ROWS * acc.shape[1]])
    return gl.convert_layout(numbers, BY_THREAD)


@gluon.jit
def owned_by_thread(work, wg: gl.constexpr, NUMBERS: gl.constexpr, BLOCK_T: gl.constexpr, OWNED: gl.constexpr):
    """Return, in the order of `by_thread`, which numbers are loaded and stored: four adjacent ones are, or none.

    They are of two rows, of which one has a query.
    """
    fours = gl.arange(0, NUMBERS, BY_THREAD) // 4
    row = wg * ROWS + fours // 32 % 4 * 16 + fours // 4 % 8
    first, second = tokens_of_rows(work, row, BLOCK_T, OWNED), tokens_of_rows(work, row + 8, BLOCK_T, OWNED)
    return (first < work.q_len) | (second < work.q_len)


@gluon.jit
def joined(pieces):
    """Return accumulators of the same width as one, the first one on the left."""
    if len(pieces) == 1:
        return pieces[0]
    elif len(pieces) == 2:
        return side_by_side(pieces[0], pieces[1])
    else:
        HALF: gl.constexpr = len(pieces) // 2
        return side_by_side(joined(pieces[:HALF]), joined(pieces[HALF:]))


@gluon.jit
def side_by_side(left, right):
    """Return two accumulators as one."""
    WIDTH: gl.constexpr = 2 * left.shape[1]
    return gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, WIDTH])
