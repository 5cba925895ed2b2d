"""What a compiled kernel knows: the constants of all warps, and the rows of a consumer warpgroup."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import aggregate
from quire.kernels.gluon.pipeline import THREADS
from quire.kernels.hopper.operands import columns_of_scores, depth_of, layout_of_scores
from quire.kernels.hopper.softcap import is_capped
from quire.kernels.hopper.work_tile import ROWS


@aggregate
class Config:
    """The constants of a compiled kernel. Those that `hopper_kernel` takes are explained there."""

    NUM_KV_HEADS: gl.constexpr
    GROUP: gl.constexpr
    HEAD_DIM: gl.constexpr
    HEAD_DIM_V: gl.constexpr
    PAGE_SIZE: gl.constexpr
    SCORE_MOD: gl.constexpr
    WARPGROUPS: gl.constexpr
    BLOCK_T: gl.constexpr
    HEADS: gl.constexpr
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    Q_STAGES: gl.constexpr
    QUANTISED_STAGES: gl.constexpr
    FP8_MMA: gl.constexpr
    KV_BOX: gl.constexpr
    FIXED_SPLIT: gl.constexpr
    PARTS: gl.constexpr
    CUT_SLOTS: gl.constexpr
    MIXED: gl.constexpr
    SPLIT_BY_TOKENS: gl.constexpr
    PIECES: gl.constexpr
    INTERVALS: gl.constexpr  # rows see intervals of keys, not a band
    RELEASES: gl.constexpr  # arrivals of a consumer warpgroup that release a tile
    EARLY: gl.constexpr  # queries are released after their last product, before results are written
    FUNCTION: gl.constexpr  # jit function of users' functions on scores and masks, or None
    RUNS: gl.constexpr  # jit function that says which runs of numbers FUNCTION reads, or None


@aggregate
class Rows:
    """The rows of a work tile that a consumer warpgroup has, and the columns of scores."""

    WG: gl.constexpr  # which warpgroup
    FIRST_ROW: gl.constexpr  # of the work tile
    FIRST_TOKEN: gl.constexpr  # of the row block
    TOKENS: gl.constexpr  # rows of a head
    OWNED: gl.constexpr  # rows that have queries; others are not written. None: all have
    OF_SCORES: gl.constexpr  # layout
    rows: Any  # [ROWS] int32
    cols: Any  # a tuple: for each tensor of a tile's scores, its columns

    @gluon.jit
    def tokens_of(self, work, rows):
        """Return the token of some rows, counted from the sequence's first. Rows from OWNED on have one beyond all."""
        tokens = work.token + rows % self.TOKENS
        if self.OWNED is not None:
            tokens += gl.where(rows < self.OWNED, 0, 1 << 30)
        return tokens

    @gluon.jit
    def load_of_heads(self, ptr):
        """Load a number for the head of each row, as float32; `ptr` is that of the work tile's first head."""
        if self.OWNED is None:
            return gl.load(ptr + self.rows // self.TOKENS).to(gl.float32)
        else:
            return gl.load(ptr + self.rows // self.TOKENS, mask=self.rows < self.OWNED, other=0.0).to(gl.float32)

    @gluon.jit
    def computed_here(self):
        """Return the same rows such that what is made of them is computed where it is used.

        Otherwise the compiler computes it before the loop over work tiles, and keeps it on the stack.
        """
        rows = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [self.rows], dtype=gl.int32, is_pure=False, pack=1
        )  # fmt: skip
        return Rows(self.WG, self.FIRST_ROW, self.FIRST_TOKEN, self.TOKENS, self.OWNED, self.OF_SCORES, rows, self.cols)


@gluon.jit
def rows_of_warpgroup(WG: gl.constexpr, memory, config):
    """Return the rows of a consumer warpgroup.

    With SPLIT_BY_TOKENS, each warpgroup has half of a row block's tokens, from FIRST_TOKEN on. Of a decoding sequence,
    the second one has none. Otherwise they share tokens, and each has the rows of the work tile from FIRST_ROW on.
    """
    OF_SCORES: gl.constexpr = layout_of_scores(config.BLOCK_N, depth_of(memory.k.tiles.dtype))
    FIRST_ROW: gl.constexpr = 0 if config.SPLIT_BY_TOKENS else WG * ROWS
    TOKENS: gl.constexpr = config.BLOCK_T // 2 if config.SPLIT_BY_TOKENS else config.BLOCK_T
    FIRST_TOKEN: gl.constexpr = WG * TOKENS if config.SPLIT_BY_TOKENS else 0
    ALL_OWNED: gl.constexpr = config.WARPGROUPS * ROWS == config.HEADS * config.BLOCK_T
    OWNED: gl.constexpr = None if ALL_OWNED else config.HEADS * TOKENS
    rows = FIRST_ROW + gl.arange(0, ROWS, gl.SliceLayout(1, OF_SCORES))
    return Rows(
        WG, FIRST_ROW, FIRST_TOKEN, TOKENS, OWNED, OF_SCORES, rows, columns_of_scores(config.BLOCK_N, OF_SCORES)
    )  # fmt: skip


@gluon.constexpr_function
def releases_early(q_stages, fp8_mma, fixed_split, intervals, quantises, head_dim):
    """Return whether queries are released after their last product: the next ones arrive while results are written.

    Otherwise results are staged there, or the work tile is read once more after the loop. With the widest heads, there
    is no other shared memory left, through which threads would exchange results.
    """
    return q_stages == 1 and not (fp8_mma or fixed_split or intervals or quantises) and head_dim <= 256


@gluon.constexpr_function
def releases_of_warpgroup(score_mod, fp8_mma):
    """Return how many arrivals of a consumer warpgroup release a tile: one, or one of each thread."""
    return 1 if is_capped(score_mod) or fp8_mma else THREADS.value
