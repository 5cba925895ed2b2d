"""What consumers share whose products have (token, query head) rows as columns: queries, masks, and results.

The output is [512, COLUMNS], transposed. In the kernels for few rows, keys are the rows of products too. So scores are
[TILE, COLUMNS].
`first_row` is the row block's first row among the rows of its sequence.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.softmax import lse_of_rows
from quire.kernels.mla_hopper.memory import HALF, QUARTER, ROPE, TILE


@gluon.jit
def load_queries(program, known, wanted, FIRST: gl.constexpr, LAST: gl.constexpr, WITH_ROPE: gl.constexpr):
    """Load quarters FIRST to LAST of a `Sequence`'s queries, then the rope columns. Unless wanted, load nothing."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    NUM_HEADS: gl.constexpr = program.config.NUM_HEADS
    queries = program.queries
    rows = program.row_block * program.config.COLUMNS
    rows += gl.arange(0, program.config.COLUMNS, gl.SliceLayout(1, LAYOUT))
    token, head = rows // NUM_HEADS, rows % NUM_HEADS
    owned = (wanted & (token < known.q_len) & (known.q_start + token < queries.num_tokens))[:, None]
    token = (known.q_start + token).to(gl.int64)
    cols = gl.arange(0, QUARTER, gl.SliceLayout(0, LAYOUT))[None, :]
    rope_cols = gl.arange(0, ROPE, gl.SliceLayout(0, LAYOUT))[None, :]
    nope = queries.nope + token * queries.stride_nope_token + head.to(gl.int64) * queries.stride_nope_head
    rope = queries.rope + token * queries.stride_rope_token + head.to(gl.int64) * queries.stride_rope_head
    loaded = ()
    for i in gl.static_range(FIRST, LAST + 1):
        loaded = loaded + (gl.load(nope[:, None] + (i * QUARTER + cols), mask=owned, other=0.0),)
    if WITH_ROPE:
        loaded = loaded + (gl.load(rope[:, None] + rope_cols, mask=owned, other=0.0),)
    return loaded


@gluon.jit
def apply_mask(scores, pos, work, program):
    """Set scores of invisible keys to -inf, in a tile that begins at position `pos`. Scores are [TILE, COLUMNS]."""
    LAYOUT: gl.constexpr = scores.type.layout
    NUM_HEADS: gl.constexpr = program.config.NUM_HEADS
    causal, first_row = program.causal, program.row_block * program.config.COLUMNS
    low_pos = work.first_pos + first_row // NUM_HEADS
    if pos + TILE > gl.where(causal, gl.minimum(low_pos + 1, work.seq_len), work.seq_len):
        token = (first_row + gl.arange(0, scores.shape[1], gl.SliceLayout(0, LAYOUT))) // NUM_HEADS
        last = gl.minimum(gl.where(causal, work.first_pos + token, work.seq_len - 1), work.seq_len - 1) - pos
        keys = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
        scores = gl.where(keys[:, None] <= last[None, :], scores, float("-inf"))
    return scores


@gluon.jit
def probabilities(scores, scale, shift):
    """Return exponentials of the scores, relative to `shift`; `scale` is a number, or one for each column."""
    if len(scale.shape) > 0:
        return gl.exp2(scores * scale[None, :] - shift[None, :])
    else:
        return gl.exp2(scores * scale - shift[None, :])


@gluon.jit
def scale_columns(acc, factor):
    """Multiply each column of all accumulators by its factor."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (acc[i] * factor[None, :],)
    return scaled


@gluon.jit
def store_result(program, target, first_row, quarters, FIRST: gl.constexpr, m_i, l_i):
    """Write normalised results of a sequence that is not cut, from quarter FIRST on. The first brings the lse."""
    LAYOUT: gl.constexpr = quarters[0].type.layout
    COLUMNS: gl.constexpr = quarters[0].shape[1]
    NUM_HEADS: gl.constexpr = program.config.NUM_HEADS
    outputs = program.outputs
    element: gl.constexpr = outputs.out.dtype.element_ty
    rows = first_row + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    token, head = rows // NUM_HEADS, rows % NUM_HEADS
    offsets = (target.q_start + token).to(gl.int64) * outputs.stride_out_token
    offsets += head.to(gl.int64) * outputs.stride_out_head
    cols = gl.arange(0, QUARTER, gl.SliceLayout(1, LAYOUT))
    for i in gl.static_range(len(quarters)):
        into = outputs.out + offsets[None, :] + ((FIRST + i) * QUARTER + cols)[:, None]
        gl.store(into, quarters[i].to(element), mask=(token < target.q_len)[None, :])
    if FIRST == 0:
        if outputs.lse is not None:
            rows = first_row + gl.arange(0, COLUMNS, l_i.type.layout)
            token, head = rows // NUM_HEADS, rows % NUM_HEADS
            lse = lse_of_rows(m_i, l_i)
            offsets = (target.q_start + token).to(gl.int64) * outputs.stride_lse + head
            gl.store(outputs.lse + offsets, lse, mask=token < target.q_len)


@gluon.jit
def store_partial(program, slot, quarters, FIRST: gl.constexpr, m_i, l_i):
    """Write a partial, not normalised, from quarter FIRST on. The first brings the maximum and the sum."""
    LAYOUT: gl.constexpr = quarters[0].type.layout
    COLUMNS: gl.constexpr = quarters[0].shape[1]
    PARTIAL_ROWS: gl.constexpr = program.config.PARTIAL_ROWS
    outputs = program.outputs
    if outputs.acc is not None:
        rows = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        cols = gl.arange(0, QUARTER, gl.SliceLayout(1, LAYOUT))
        into = outputs.acc + slot * (PARTIAL_ROWS * 2 * HALF) + rows[None, :] * (2 * HALF) + cols[:, None]
        for i in gl.static_range(len(quarters)):
            gl.store(into + (FIRST + i) * QUARTER, quarters[i], mask=(rows < PARTIAL_ROWS)[None, :])
        if FIRST == 0:
            rows = gl.arange(0, COLUMNS, m_i.type.layout)
            gl.store(outputs.m_i + slot * PARTIAL_ROWS + rows, m_i, mask=rows < PARTIAL_ROWS)
            gl.store(outputs.l_i + slot * PARTIAL_ROWS + rows, l_i, mask=rows < PARTIAL_ROWS)
