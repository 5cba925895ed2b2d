"""Combine the partials of a row block that is cut by keys. The last warpgroup to arrive does it.

A partial is the state of a consumer warpgroup's 64 rows over one split: m_i, l_i and the accumulators of `states.py`,
as float32 in the launch's scratch. Wide values are in parts of columns; each part has separate partials.
Warpgroups do not share rows, so each one's arrivals are counted by themselves. The last one reads the partials of all
splits again, its own too, in the order of the keys. So results do not depend on which one is last, and none waits for
another.

A program runs this code once or never, so each of its instructions has to be fetched. Therefore there is one loop over
rows, with few instructions. With columns unrolled, combining took up to 15 us longer (NVIDIA H200, 2026-11-26).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import barrier
from quire.kernels.gluon.pipeline import THREADS, pieces_of
from quire.kernels.gluon.softmax import lse_of_rows
from quire.kernels.hopper.products import pieces
from quire.kernels.hopper.results import first_column_of, with_sink
from quire.kernels.hopper.work_tile import ROWS
from quire.kernels.panels import power_of_two
from quire.kernels.states import as_stored

IN_FLIGHT = gl.constexpr(1024)  # numbers of a row, of several partials, whose loads are in flight together


@gluon.constexpr_function
def columns_of_partial(head_dim_v):
    """Return the columns of a partial's accumulators."""
    return (head_dim_v + 63) // 64 * 64


@gluon.constexpr_function
def size_of_partial(head_dim_v):
    """Return the float32 numbers of a warpgroup's partial."""
    return ROWS.value * (2 + columns_of_partial(head_dim_v))


@gluon.constexpr_function
def lanes_of_row(columns):
    """Return how many lanes share a row. Each loads four adjacent columns at a time."""
    return min(8, columns // 4)


@gluon.constexpr_function
def partials_at_once(columns):
    """Return how many partials are loaded together."""
    return min(16, IN_FLIGHT.value // columns)


@gluon.jit
def store_and_arrive(state, own, work, cut, outputs, config):
    """Store this warpgroup's partial and count its arrival; return whether all splits have arrived.

    The partials are [slots, WARPGROUPS, `size_of_partial`], and the arrivals, 0 between launches, are
    [slots, WARPGROUPS], of which those of first slots are used. Rows without a query are not stored.
    The last warpgroup sees what all others stored. It resets the counter to 0.
    """
    accs, m_i = state.accs, state.m_i
    SIZE: gl.constexpr = size_of_partial(config.HEAD_DIM_V)
    PIECES: gl.constexpr = pieces_of(config.HEAD_DIM_V, 64)
    rows = gl.arange(0, ROWS, m_i.type.layout)
    ptr = outputs.partials + ((cut.first_slot + cut.split) * config.WARPGROUPS + own.WG) * SIZE
    gl.store(ptr + rows, m_i)
    gl.store(ptr + ROWS + rows, state.l_i)
    for i in gl.static_range(len(accs)):
        store_columns(ptr + 2 * ROWS, accs[i], own, work, PIECES[i][0], columns_of_partial(config.HEAD_DIM_V))
    barrier()  # the stores of all threads come before the arrival, which one thread makes
    counter = outputs.arrivals + (cut.first_slot * config.WARPGROUPS + own.WG)
    is_last = gl.atomic_add(counter, 1, sem="acq_rel") == (1 << cut.shift) - 1
    if is_last:
        gl.store(counter, 0)
    return is_last


@gluon.jit
def store_columns(ptr, acc, own, work, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Store an accumulator as the columns from FIRST on of [ROWS, COLUMNS] at `ptr`.

    A piece is a fixed number of bytes from the one before it, which is part of the instruction. Of an accumulator of
    256 columns, pieces put one more instruction on the stack into a loop (Triton 3.9.0).
    """
    parts = (acc,)
    if acc.shape[1] <= 128:
        parts = pieces(acc)
    LAYOUT: gl.constexpr = parts[0].type.layout
    EACH: gl.constexpr = parts[0].shape[1]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, EACH, gl.SliceLayout(0, LAYOUT))
    owned = own.tokens_of(work, own.FIRST_ROW + rows) < work.q_len
    ptrs = (ptr + rows * COLUMNS)[:, None] + columns[None, :]
    for i in gl.static_range(len(parts)):
        gl.store(ptrs + (FIRST + i * EACH), parts[i], mask=owned[:, None])


@gluon.jit
def combine_and_write(own, work, cut, outputs, config):
    """Combine the partials of this warpgroup's rows, and write the results.

    Only rows with a query are combined. Each head has `num_tokens` of them, and TOKENS rows.
    """
    HEAD_DIM_V: gl.constexpr = config.HEAD_DIM_V
    WARPGROUPS: gl.constexpr = config.WARPGROUPS
    PARTS: gl.constexpr = config.PARTS
    TOKENS: gl.constexpr = own.TOKENS
    PADDED: gl.constexpr = power_of_two(HEAD_DIM_V)
    LANES: gl.constexpr = lanes_of_row(PADDED)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [4, 1], [1, 0])
    STEP: gl.constexpr = THREADS // LANES  # rows
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    num_tokens = gl.minimum(work.q_len - work.token, TOKENS)
    # So many of the first ROWS rows have a query. Others are of the second of two warpgroups that share tokens.
    of_first = ROWS // TOKENS * num_tokens + gl.minimum(ROWS % TOKENS, num_tokens)
    begin, end = 0, gl.minimum(of_first, config.HEADS * num_tokens)
    if own.FIRST_ROW > 0:
        begin, end = end, config.HEADS * num_tokens
    columns = gl.arange(0, PADDED, gl.SliceLayout(0, LAYOUT))
    first = outputs.partials + (cut.first_slot * WARPGROUPS + own.WG) * size_of_partial(HEAD_DIM_V)
    for step in range(begin, end, STEP):
        index = step + gl.arange(0, STEP, OF_ROWS)
        owned = index < end
        head = index // num_tokens
        token = index - head * num_tokens
        row = gl.where(owned, head * TOKENS + token - own.FIRST_ROW, 0)
        acc, m_i, l_i = combine_rows(first, 1 << cut.shift, row, owned, columns, HEAD_DIM_V, WARPGROUPS)
        if outputs.sinks_ptr is not None:
            sink = gl.load(outputs.sinks_ptr + work.head + head, mask=owned, other=0.0).to(gl.float32)
            accs, m_i, l_i = with_sink((acc,), m_i, l_i, sink)
            acc = accs[0]
        position = (work.q_start + work.token + token).to(gl.int64)
        if outputs.lse_ptr is not None:
            wanted = owned
            if PARTS > 1:
                wanted = owned & (work.split == 0)
            gl.store(
                outputs.lse_ptr + position * outputs.stride_lse + work.head + head, lse_of_rows(m_i, l_i), mask=wanted
            )
        result = acc * (1.0 / gl.where(l_i == 0.0, 1.0, l_i))[:, None]
        offsets = position * outputs.stride_out_token + (work.head + head).to(gl.int64) * outputs.stride_out_head
        if PARTS > 1:
            offsets += first_column_of(work, outputs, HEAD_DIM_V, PARTS)
        gl.store(
            outputs.out_ptr + offsets[:, None] + columns[None, :],
            as_stored(result, outputs.out_scale_ptr, outputs.out_ptr.dtype.element_ty),
            mask=owned[:, None] & (columns < HEAD_DIM_V)[None, :],
        )


@gluon.jit
def combine_rows(first, num_splits, row, owned, columns, HEAD_DIM_V: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Return the combined state of some rows of the partials from `first` on.

    Loads bypass L1, since other warpgroups stored the partials.
    """
    COLUMNS: gl.constexpr = columns_of_partial(HEAD_DIM_V)
    SIZE: gl.constexpr = size_of_partial(HEAD_DIM_V)
    AT_ONCE: gl.constexpr = partials_at_once(columns.shape[0])
    inside = owned[:, None] & (columns < COLUMNS)[None, :]
    LAYOUT: gl.constexpr = inside.type.layout
    m_i = gl.full([inside.shape[0]], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    l_i = gl.zeros([inside.shape[0]], gl.float32, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([inside.shape[0], inside.shape[1]], gl.float32, LAYOUT)
    of_row = first + row
    of_acc = (first + 2 * ROWS + row * COLUMNS)[:, None] + columns[None, :]
    for split in range(0, num_splits, AT_ONCE):
        ms, ls, accs = (), (), ()
        for i in gl.static_range(AT_ONCE):
            at = i * WARPGROUPS * SIZE
            present = split + i < num_splits
            ms = ms + (gl.load(of_row + at, mask=owned & present, other=float("-inf"), cache_modifier=".cg"),)
            ls = ls + (gl.load(of_row + ROWS + at, mask=owned & present, other=0.0, cache_modifier=".cg"),)
            accs = accs + (gl.load(of_acc + at, mask=inside & present, other=0.0, cache_modifier=".cg"),)
        m_new = m_i
        for i in gl.static_range(AT_ONCE):
            m_new = gl.maximum(m_new, ms[i])
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = gl.exp2(m_i - shift)
        l_i, m_i = l_i * alpha, m_new
        acc = acc * alpha[:, None]
        for i in gl.static_range(AT_ONCE):
            weight = gl.exp2(ms[i] - shift)
            l_i += ls[i] * weight
            acc += accs[i] * weight[:, None]
        of_row += AT_ONCE * WARPGROUPS * SIZE
        of_acc += AT_ONCE * WARPGROUPS * SIZE
    return acc, m_i, l_i
