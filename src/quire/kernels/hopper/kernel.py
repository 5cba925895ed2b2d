"""The Hopper kernel: prompts on Hopper GPUs, persistent and warp-specialised.

Grid: [min(num_work_tiles * most splits of one, programs that the GPU holds at once)]. A program owns one work tile
after the other (`tile_scheduler.py`). Its producer warp loads queries, keys and values by TMA, page by page
(`producer.py`). It has two consumer warpgroups with 64 rows each (`consumer.py`). They take turns on the tensor cores:
one computes its softmax while the other computes products. For short contexts or few rows a program has one consumer
warpgroup, and an SM holds two programs. For a quantised cache a further warpgroup converts tiles between the producer
and the consumers (`convert.py`).

This is the structure of FlashAttention-3 (arXiv 2407.08608, sections 3.1 and 3.2).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.gluon.pipeline import make_all_ready
from quire.kernels.hopper.config import Config, releases_early, releases_of_warpgroup
from quire.kernels.hopper.consumer import consume
from quire.kernels.hopper.convert import convert
from quire.kernels.hopper.gather import WARPS as GATHER_WARPS
from quire.kernels.hopper.memory import allocate, allocate_stored
from quire.kernels.hopper.producer import Sources, produce
from quire.kernels.hopper.results import Outputs
from quire.kernels.hopper.softmax import Scoring
from quire.kernels.hopper.tile_scheduler import Batch, Division
from quire.kernels.primitives import in_units
from quire.kernels.schedule import Planned


@gluon.constexpr_function
def registers_of_one(gathers):
    """Return the registers of a thread of the producer, where one consumer warpgroup is the first partition."""
    return [72 if gathers else 56]


@gluon.constexpr_function
def registers_of_two(gathers, more, columns_v):
    """Return the registers of a thread of the second consumer warpgroup and of the producer.

    Consumers can spare more registers for the producer, unless they have two accumulators. One of intervals needs them.
    """
    if gathers:
        return [232, 48] if columns_v > 192 else [216, 72]
    return [224, 56] if more else [232, 40]


@gluon.constexpr_function
def registers_of_three(gathers, fp8_mma, intervals, cuts_narrow):
    """Return the registers of a thread of the second consumer warpgroup, of the converter and of the producer."""
    if gathers:
        return [192, 72, 56] if fp8_mma else [208, 40, 56]
    if fp8_mma:
        return [200, 72, 40]
    if intervals:
        return [216, 40, 40]
    return [208, 40, 56] if cuts_narrow else [208, 56, 40]


@gluon.jit(
    do_not_specialize_on_alignment=["num_splits"],
    do_not_specialize=[
        "last_part",
        "max_decode_queries",
        "num_seqs",
        "section",
        "stride_lse",
        "stride_table",
        "window_left",
        "window_right",
    ],
)
def hopper_kernel(
    out_ptr,  # [num_tokens, num_q_heads, columns of all parts], or scratch for the states of splits
    out_scale_ptr,  # [1] float32 where out is e4m3, or None
    lse_ptr,  # [num_tokens, num_q_heads] float32, or scratch for the states of splits, or None
    sinks_ptr,  # [num_q_heads], or None
    slopes_ptr,  # [num_q_heads], or None
    k_scale_ptr, v_scale_ptr,  # [num_kv_heads] of a quantised cache, or None
    extras,  # of FUNCTION, from `user_mods.passed`, or None
    k_source, v_source,  # TMA descriptors; where KV_BOX is 0, pointers to slot 0 of page 0
    q_desc,  # TMA descriptor of boxes of HEADS heads and their rows; its type says `runner.LEAST_ROWS`
    k_tile_desc, v_tile_desc,  # TMA descriptors of boxes of BLOCK_N rows, for tiles that lie in one page, or None
    kv,  # views.KVLayout
    places, summary,  # of `tile_scheduler.Batch`
    planned, seq_lens, cu_seqlens_q, query_offsets, num_seqs,  # `schedule.Planned`
    tile_counter,  # [1] int32 of `queue.py`, 0 between launches
    partials, arrivals,  # float32 scratch and int32 counters, which are 0 between launches; None without CUT_SLOTS
    scale, softcap, window_left, window_right,
    max_decode_queries,  # sequences with at most this many queries belong to the decode launch; 0 if there is none
    num_splits,
    last_part,  # the first column of the last of PARTS parts, where it begins in the one before it; else None
    section,  # blocks of heads of which all work tiles come before those of other heads; None: there is one section
    stride_table, stride_out_token, stride_out_head, stride_lse,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    PAGE_SIZE: gl.constexpr, SCORE_MOD: gl.constexpr, WARPGROUPS: gl.constexpr, BLOCK_T: gl.constexpr,
    HEADS: gl.constexpr,  # of a work tile, with BLOCK_T rows each
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    QUANTISED_STAGES: gl.constexpr, FP8_MMA: gl.constexpr,
    KV_BOX: gl.constexpr,  # slots of a page in one TMA load; 0: the rows of tiles are gathered (`gather.py`)
    FIXED_SPLIT: gl.constexpr,  # keys of a split of a batch-invariant plan, a multiple of BLOCK_N; else 0
    STRIDE_UNIT: gl.constexpr,  # of `views.stride_unit`, for the strides of out
    PARTS: gl.constexpr,  # parts of the values' columns; a work tile has one of them, of HEAD_DIM_V columns
    CUT_SLOTS: gl.constexpr,  # slots for partials of row blocks that are cut by keys; 0: none is cut
    MIXED: gl.constexpr,  # decoding sequences may be among the prompts
    SPLIT_BY_TOKENS: gl.constexpr,  # each of two warpgroups has half of a row block's tokens, else half of the rows
    PIECES: gl.constexpr,  # products with values are those of `products.py`, as all are if BLOCK_N is no power of two
    FUNCTION: gl.constexpr, RUNS: gl.constexpr,  # of Config
):  # fmt: skip
    gdc_wait()
    # The second launch may start when an SM has room for it: the decode launch, or the combine of splits, which waits.
    if (max_decode_queries > 0) | (num_splits > 1):
        gdc_launch_dependents()
    STORED: gl.constexpr = k_source.dtype.element_ty if KV_BOX == 0 else k_source.dtype
    NUMBER: gl.constexpr = STORED if QUANTISED_STAGES == 0 or FP8_MMA else gl.float16
    INTERVALS: gl.constexpr = kv.key_begin is not None
    config = Config(
        NUM_KV_HEADS, GROUP, HEAD_DIM, HEAD_DIM_V, PAGE_SIZE, SCORE_MOD, WARPGROUPS, BLOCK_T, HEADS, BLOCK_N,
        STAGES, Q_STAGES, QUANTISED_STAGES, FP8_MMA, KV_BOX, FIXED_SPLIT, PARTS, CUT_SLOTS, MIXED, SPLIT_BY_TOKENS,
        PIECES, INTERVALS, releases_of_warpgroup(SCORE_MOD, FP8_MMA),
        releases_early(Q_STAGES, FP8_MMA, FIXED_SPLIT, INTERVALS, out_scale_ptr is not None, HEAD_DIM), FUNCTION, RUNS,
    )  # fmt: skip
    memory = allocate(q_desc.dtype, NUMBER, config)
    pipelines = memory.q, memory.k, memory.v
    stored = memory
    if QUANTISED_STAGES > 0:
        stored = allocate_stored(memory, STORED, config)
        pipelines = pipelines + (stored.v,)
        if not FP8_MMA:
            pipelines = pipelines + (stored.k,)
    if KV_BOX == 0:
        make_all_ready(pipelines, memory.ready)
    scoring = Scoring(
        scale, k_scale_ptr, softcap, window_left, window_right, slopes_ptr, kv.key_begin, kv.key_end, extras
    )  # fmt: skip
    stride_out_token, stride_out_head = in_units(stride_out_token, STRIDE_UNIT), in_units(stride_out_head, STRIDE_UNIT)
    outputs = Outputs(
        out_ptr, out_scale_ptr, lse_ptr, sinks_ptr, v_scale_ptr, stride_out_token, stride_out_head, stride_lse,
        num_splits, last_part, partials, arrivals, kv.scale_head,
    )  # fmt: skip
    sources = Sources(q_desc, k_source, v_source, k_tile_desc, v_tile_desc)
    batch = Batch(kv, places, summary, window_left, window_right)
    planned = Planned(planned, seq_lens, cu_seqlens_q, query_offsets, num_seqs)
    division = Division(tile_counter, num_splits, section, stride_table, last_part, outputs.lse_ptr, stride_lse)
    fence_async_shared()  # after the marks of `addresses.py`
    # The lists after the functions: warps and registers of all but the first.
    PRODUCER_WARPS: gl.constexpr = GATHER_WARPS if KV_BOX == 0 else 1
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (consume, (0, memory, planned, scoring, outputs, config)),
                (produce, (memory, pipelines, sources, batch, division, config)),
            ],
            [PRODUCER_WARPS],
            registers_of_one(KV_BOX == 0),
        )
    elif QUANTISED_STAGES == 0:
        gl.warp_specialize(
            [
                (consume, (0, memory, planned, scoring, outputs, config)),
                (consume, (1, memory, planned, scoring, outputs, config)),
                (produce, (memory, pipelines, sources, batch, division, config)),
            ],
            [4, PRODUCER_WARPS],
            registers_of_two(KV_BOX == 0, INTERVALS or FIXED_SPLIT == 0, HEAD_DIM_V),
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, memory, planned, scoring, outputs, config)),
                (consume, (1, memory, planned, scoring, outputs, config)),
                (convert, (stored, memory, batch, config)),
                (produce, (stored, pipelines, sources, batch, division, config)),
            ],
            [4, 4, PRODUCER_WARPS],
            registers_of_three(KV_BOX == 0, FP8_MMA, INTERVALS, CUT_SLOTS > 0 and HEAD_DIM_V <= 192),
        )
