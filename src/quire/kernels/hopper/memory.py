"""The shared memory of a program."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.addresses import mark_shared_memory
from quire.kernels.gluon.pipeline import allocate_ready, make_pipeline
from quire.kernels.hopper.runs import allocate_runs
from quire.kernels.hopper.work_tile import ROWS, WORDS


class Memory(NamedTuple):
    """Pipelines, and the work tiles that the producer publishes."""

    q: Any  # SmemPipeline
    k: Any
    v: Any
    runs: Any  # shared memory for runs, from `allocate_runs`, or ()
    ready: Any  # the barrier that says that those of the pipelines are ready
    published: Any  # [Q_STAGES * WORDS + WARPGROUPS, 1] int32: `work_tile.py` says what the last ones are


@gluon.constexpr_function
def whole_panels(columns):
    """Return the columns of a tile: those of a head, in whole panels of 64."""
    return (columns + 63) // 64 * 64


@gluon.jit
def allocate(queries: gl.constexpr, element: gl.constexpr, config):
    """Allocate the pipelines of queries, and of keys and values of type `element`, from which consumers read."""
    BLOCK_N: gl.constexpr = config.BLOCK_N
    COLUMNS: gl.constexpr = whole_panels(config.HEAD_DIM)
    COLUMNS_V: gl.constexpr = whole_panels(config.HEAD_DIM_V)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    IN_PIECES: gl.constexpr = BLOCK_N & (BLOCK_N - 1) != 0  # scores
    V_IN_PIECES: gl.constexpr = config.PIECES or IN_PIECES
    if V_IN_PIECES or config.RUNS is not None:
        mark_shared_memory()
    q = make_pipeline(
        queries, config.WARPGROUPS * ROWS, COLUMNS, config.Q_STAGES, config.WARPGROUPS, False, IN_PIECES
    )  # fmt: skip
    # Rows of tiles that are converted are copied to the pipelines of `allocate_stored`.
    V_COPIED: gl.constexpr = config.KV_BOX == 0 and config.QUANTISED_STAGES == 0
    K_COPIED: gl.constexpr = V_COPIED or (config.KV_BOX == 0 and config.FP8_MMA)
    RELEASES: gl.constexpr = config.WARPGROUPS * config.RELEASES
    k = make_pipeline(element, BLOCK_N, COLUMNS, config.STAGES, RELEASES, K_COPIED, IN_PIECES, IN_PIECES)
    if config.FP8_MMA:  # values are transposed
        v = make_pipeline(element, COLUMNS_V, BLOCK_N, config.STAGES, RELEASES)
    else:
        v = make_pipeline(element, BLOCK_N, COLUMNS_V, config.STAGES, RELEASES, V_COPIED, V_IN_PIECES, V_IN_PIECES)
    published = gl.allocate_shared_memory(gl.int32, [config.Q_STAGES * WORDS + config.WARPGROUPS, 1], FLAT)
    runs = ()
    if config.RUNS is not None:
        runs = allocate_runs(config.WARPGROUPS, BLOCK_N)
    return Memory(q, k, v, runs, allocate_ready(), published)


@gluon.jit
def allocate_stored(memory, element: gl.constexpr, config):
    """Allocate the pipelines of tiles that are converted, of type `element`; return the Memory that is loaded to."""
    COPIED: gl.constexpr = config.KV_BOX == 0
    STAGES: gl.constexpr = config.QUANTISED_STAGES
    k = memory.k
    if not config.FP8_MMA:
        k = make_pipeline(element, config.BLOCK_N, whole_panels(config.HEAD_DIM), STAGES, 1, COPIED)
    v = make_pipeline(element, config.BLOCK_N, whole_panels(config.HEAD_DIM_V), STAGES, 1, COPIED)
    return Memory(memory.q, k, v, memory.runs, memory.ready, memory.published)
