"""Parts of the softmax that several consumers of the MLA kernel use."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import reinterpret
from quire.kernels.mla_hopper.memory import QUARTER, ROWS, TILE


@gluon.jit
def apply_mask(scores, pos, work, program):
    """Set scores of invisible keys to -inf, in a tile that begins at position `pos`. Scores are [ROWS, TILE]."""
    NUM_HEADS: gl.constexpr = program.config.NUM_HEADS
    row_block, causal = program.row_block, program.causal
    LAYOUT: gl.constexpr = scores.type.layout
    low_token = row_block * ROWS // NUM_HEADS
    if pos + TILE > gl.where(causal, gl.minimum(work.first_pos + low_token + 1, work.seq_len), work.seq_len):
        rows = row_block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        last = gl.where(causal, work.first_pos + rows // NUM_HEADS, work.seq_len - 1)
        last = gl.minimum(last, work.seq_len - 1) - pos
        cols = gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(cols[None, :] <= last[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def zero_invisible_rows(quarter, pos, visible):
    """Zero the rows of a quarter of a tile that no query sees. They may hold NaN, and 0 * NaN is NaN.

    The quarter is taken as panels of 128 bytes, of 32-bit words. The swizzle of TMA moves words within a panel's row
    only.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = pos + gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    PANELS: gl.constexpr = QUARTER * quarter.dtype.primitive_bitwidth // 8 // 128
    words = reinterpret(quarter, gl.int32, [PANELS * TILE, 32], PLAIN)
    for panel in gl.static_range(PANELS):
        panel_words = words.slice(panel * TILE, TILE)
        panel_words.store(gl.where((rows < visible)[:, None], panel_words.load(LAYOUT), 0))


@gluon.jit
def finite(m_i):
    """Return a maximum; 0 for a row that has seen no key, since -inf - -inf is NaN."""
    return gl.where(m_i == float("-inf"), 0.0, m_i)
