"""How a consumer of the Hopper kernel ends a work tile: it normalises the results and writes them."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from quire.kernels.gluon.compat import reinterpret
from quire.kernels.gluon.fp8 import permute_for_fp8_operand, undo_permute_for_fp8_operand
from quire.kernels.gluon.pipeline import SWIZZLE_BYTES, pieces_of
from quire.kernels.gluon.softmax import lse_of_rows
from quire.kernels.hopper.convert import quantize_results
from quire.kernels.hopper.operands import queries_of
from quire.kernels.hopper.products import pieces
from quire.kernels.hopper.softmax import scaled
from quire.kernels.hopper.work_tile import ROWS
from quire.kernels.states import LOG2E, as_stored


class Outputs(NamedTuple):
    """The tensors of results and their strides, the sinks, and the value scales.

    The states of splits go to scratch, as float32 [num_tokens, num_q_heads, num_splits, ...].
    """

    out_ptr: Any
    out_scale_ptr: Any  # [1] float32 where out is e4m3, or None
    lse_ptr: Any
    sinks_ptr: Any
    v_scale_ptr: Any  # [num_kv_heads] of a quantised cache, or None
    stride_out_token: Any
    stride_out_head: Any
    stride_lse: Any
    num_splits: Any
    last_part: Any  # the first column of the last part of the values, where it begins in the one before it; else None
    partials: Any  # float32 scratch for partials of row blocks that are cut, and counters of arrivals; None, or both
    arrivals: Any
    stride_scale: Any  # of the scales of keys and values, from head to head


@gluon.jit
def finish(state, own, memory, work, work_i, outputs, config):
    """Normalise a work tile's results and write them.

    A thread writes 16 adjacent bytes. For that, results are staged in the shared memory of the work tile's queries, if
    that is wide enough, and it is then released. With EARLY, it was released before, and four threads exchange columns.
    The states of splits are float32, and are written from registers as they are.
    """
    accs, m_i, l_i = state.accs, state.m_i, state.l_i
    PARTS: gl.constexpr = config.PARTS
    rows, q_pipe = own.rows, memory.q
    element: gl.constexpr = outputs.out_ptr.dtype.element_ty
    LIKE_Q: gl.constexpr = element == q_pipe.tiles.dtype
    E4M3: gl.constexpr = outputs.out_scale_ptr is not None
    # Numbers of e4m3 are staged where the first buffer of queries is, which has twice as many bytes in a row.
    WIDTH: gl.constexpr = 2 * q_pipe.tiles.shape[2] if E4M3 else q_pipe.COLUMNS
    STAGED: gl.constexpr = (LIKE_Q or E4M3) and WIDTH >= config.HEAD_DIM_V
    EXCHANGED: gl.constexpr = config.EARLY and LIKE_Q
    out_scale = None
    if E4M3:
        out_scale = gl.load(outputs.out_scale_ptr)
    split = work.split
    if PARTS > 1:
        split = work.split // PARTS
    if outputs.sinks_ptr is not None:
        if split == outputs.num_splits - 1:
            accs, m_i, l_i = with_sink(accs, m_i, l_i, own.load_of_heads(outputs.sinks_ptr + work.head))
    empty = l_i == 0.0
    safe = gl.where(empty, 1.0, l_i)
    if outputs.lse_ptr is not None:
        tokens = own.tokens_of(work, rows)
        lse = lse_of_rows(m_i, l_i)
        offsets = (work.q_start + tokens).to(gl.int64) * outputs.stride_lse
        offsets += (work.head + rows // own.TOKENS) * outputs.num_splits + split
        wanted = tokens < work.q_len
        if PARTS > 1:
            wanted = wanted & (work.split % PARTS == 0)
        gl.store(outputs.lse_ptr + offsets, lse, mask=wanted)
    inverse = 1.0 / safe
    if config.FIXED_SPLIT > 0:  # as `states.finish` does
        inverse = gl.fma(inverse, gl.fma(-safe, inverse, gl.zeros_like(safe) + 1.0), inverse)
    results = scaled(accs, inverse)
    if config.FIXED_SPLIT > 0:
        unsigned = ()
        for i in gl.static_range(len(accs)):
            unsigned = unsigned + (results[i] + 0.0,)
        results = unsigned
    COLUMNS: gl.constexpr = pieces_of(config.HEAD_DIM_V, 64)
    if EXCHANGED:
        exchanged = ()
        for i in gl.static_range(len(accs)):
            result = results[i].to(element)
            exchanged = exchanged + (gl.convert_layout(result, eight_columns_each(result.shape[1])),)
        results = exchanged
    elif STAGED:
        stage = work_i % q_pipe.STAGES
        loaded = ()
        for i in gl.static_range(len(accs)):
            staged = through_shared_memory(
                own.WG, results[i], q_pipe, stage, out_scale, element, COLUMNS[i][0], COLUMNS[i][1]
            )  # fmt: skip
            loaded = loaded + (staged,)
        results = loaded
        fence_async_shared()
    if not config.EARLY:
        q_pipe.release(work_i)
    for i in gl.static_range(len(accs)):
        write_out(results[i], own, work, outputs, config, COLUMNS[i][0], not (STAGED or EXCHANGED))


@gluon.jit
def with_sink(accs, m_i, l_i, sink):
    """Return a state with one more key for each row, of score `sink` and value 0."""
    sink *= LOG2E
    m_new = gl.maximum(m_i, sink)
    shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # no key and no sink: -inf - -inf is NaN
    alpha = gl.exp2(m_i - shift)
    return scaled(accs, alpha), m_new, l_i * alpha + gl.exp2(sink - shift)


@gluon.jit
def through_shared_memory(
    wg: gl.constexpr, result, q_pipe, stage, out_scale, element: gl.constexpr, FIRST: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Return results as the output holds them, a thread 16 adjacent bytes of a row. They are columns from FIRST on."""
    EACH: gl.constexpr = 128 // element.primitive_bitwidth
    LANES: gl.constexpr = min(8, COLUMNS // EACH)
    IN_ROWS: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // LANES, LANES], [4, 1], [1, 0])
    if out_scale is None:
        staged = queries_of(wg, q_pipe, stage, FIRST, COLUMNS)
        staged.store(result.to(element))
        return staged.load(IN_ROWS)
    else:
        staged = bytes_of_queries(wg, q_pipe, stage, element, FIRST, COLUMNS)
        staged.store(quantize_results(permute_for_fp8_operand(result), out_scale))
        return gl.convert_layout(undo_permute_for_fp8_operand(staged.load(IN_ROWS)), IN_ROWS)


@gluon.jit
def bytes_of_queries(
    wg: gl.constexpr, q_pipe, stage, element: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr
):
    """Return COLUMNS columns of 8 bits in the shared memory of a warpgroup's queries, from column FIRST on."""
    tile = q_pipe.tiles.index(stage)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE_BYTES, 8, 2)
    tile = reinterpret(tile, element, [tile.shape[0], 2 * tile.shape[1]], LAYOUT)
    if tile.shape[1] > COLUMNS:
        tile = tile.slice(FIRST, COLUMNS, dim=1)
    return tile.slice(wg * ROWS, ROWS)


@gluon.jit
def write_out(result, own, work, outputs, config, FIRST: gl.constexpr, IN_PIECES: gl.constexpr):
    """Write a work tile's results for the columns from FIRST on.

    IN_PIECES: they are as tensor cores leave them, and are written a piece at a time. A piece is a fixed number of
    bytes from the one before, which is part of the instruction, so threads compute and keep few addresses.
    """
    parts = (result,)
    if IN_PIECES:
        parts = pieces(result)
    LAYOUT: gl.constexpr = parts[0].type.layout
    COLUMNS: gl.constexpr = parts[0].shape[1]
    rows = own.FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    tokens = own.tokens_of(work, rows)
    offsets = (work.q_start + tokens).to(gl.int64) * outputs.stride_out_token
    offsets += (work.head + rows // own.TOKENS).to(gl.int64) * outputs.stride_out_head
    offsets += first_column_of(work, outputs, config.HEAD_DIM_V, config.PARTS)
    offs_d = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    ptrs = (outputs.out_ptr + offsets)[:, None] + offs_d[None, :]
    for i in gl.static_range(len(parts)):
        inside = (tokens < work.q_len)[:, None] & (offs_d < config.HEAD_DIM_V - FIRST - i * COLUMNS)[None, :]
        part = parts[i]
        if part.dtype != outputs.out_ptr.dtype.element_ty:
            part = as_stored(part, outputs.out_scale_ptr, outputs.out_ptr.dtype.element_ty)
        gl.store(ptrs + (FIRST + i * COLUMNS), part, mask=inside)


@gluon.jit
def first_column_of(work, outputs, HEAD_DIM_V: gl.constexpr, PARTS: gl.constexpr):
    """Return where a work tile's columns begin among those of all splits of a row, each of all parts."""
    if outputs.last_part is None:
        return work.split * HEAD_DIM_V
    else:
        split, part = work.split // PARTS, work.split % PARTS
        return split * (outputs.last_part + HEAD_DIM_V) + gl.minimum(part * HEAD_DIM_V, outputs.last_part)


@gluon.constexpr_function
def eight_columns_each(columns):
    """Return the layout of results in which a thread has eight adjacent columns of a row.

    The same four threads have these columns in an accumulator. So converting exchanges nothing between warps.
    """
    more = [[0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *more], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [ROWS.value, columns],
    )  # fmt: skip
