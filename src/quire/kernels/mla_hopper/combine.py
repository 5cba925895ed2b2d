"""Combine the partials of sequences that partitions cut.

Grid: [partitions - 1, row blocks, PARTIAL_ROWS * column groups]. The programs of a boundary between two partitions do
nothing unless it is the first boundary that cuts its sequence. Then each combines the partials of one row, of some
columns, over all partitions of the sequence. The schedule is computed from the lengths again, while the attention kernel
still runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.kernels.mla_hopper.schedule import ROWS, Lengths, find_partition, keys_of, num_tiles, queries_of
from quire.kernels.primitives import LN2

WIDTH = gl.constexpr(512)  # columns of the values
NUM_WARPS = gl.constexpr(4)


@gluon.jit(do_not_specialize=["num_seqs", "num_partitions", "min_size"])
def mla_combine_kernel(
    out_ptr, lse_ptr,
    seq_lens, cu_seqlens_q, query_offsets, acc_ptr, m_ptr, l_ptr,
    causal, num_seqs, num_partitions, min_size, stride_out_token, stride_out_head, stride_lse,
    NUM_HEADS: gl.constexpr, PARTIAL_ROWS: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    OF_PARTIALS: gl.constexpr = gl.BlockedLayout(
        [1, 4], [128 // COLUMNS if COLUMNS < 128 else 1, COLUMNS // 4 if COLUMNS < 128 else 32], [NUM_WARPS, 1], [1, 0]
    )
    gdc_launch_dependents()
    boundary, row_block, index = gl.program_id(0) + 1, gl.program_id(1), gl.program_id(2)
    lengths = Lengths(seq_lens, cu_seqlens_q, query_offsets, num_seqs)
    partition = find_partition(lengths, boundary, num_partitions, min_size, row_block, causal > 0, NUM_HEADS, NUM_WARPS)
    first = partition.first // partition.size
    if (partition.low < partition.high) & (partition.first < partition.low) & (first == boundary - 1):
        q_start, q_len = queries_of(lengths, partition.seq)
        _, _, visible = keys_of(lengths, partition.seq, q_len, row_block, causal > 0, NUM_HEADS)
        tiles = num_tiles(q_len, visible, row_block, NUM_HEADS)
        row, column = index % PARTIAL_ROWS, index // PARTIAL_ROWS * COLUMNS
        token, head = (row_block * ROWS + row) // NUM_HEADS, (row_block * ROWS + row) % NUM_HEADS
        if token < q_len:
            count = (partition.first + tiles - 1) // partition.size - first + 1
            parts = gl.arange(0, PARTS, gl.SliceLayout(1, OF_PARTIALS))
            cols = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, OF_PARTIALS))
            gdc_wait()
            # The sequence's first partial is in the second place of its partition, the others are in the first.
            base = (row_block * num_partitions + first) * 2 * PARTIAL_ROWS + row
            m_i = gl.full([PARTS], float("-inf"), gl.float32, gl.SliceLayout(1, OF_PARTIALS))
            for i in range(0, count, PARTS):
                part = i + parts
                rows = base + (part * 2 + (part == 0).to(gl.int32)) * PARTIAL_ROWS
                m_i = gl.maximum(m_i, gl.load(m_ptr + rows, mask=part < count, other=float("-inf")))
            m = gl.max(m_i, 0)
            shift = gl.where(m == float("-inf"), 0.0, m)
            acc = gl.zeros([PARTS, COLUMNS], gl.float32, OF_PARTIALS)
            total = gl.zeros([PARTS], gl.float32, gl.SliceLayout(1, OF_PARTIALS))
            for i in range(0, count, PARTS):
                part = i + parts
                inside = part < count
                rows = base + (part * 2 + (part == 0).to(gl.int32)) * PARTIAL_ROWS
                weight = gl.exp2(gl.load(m_ptr + rows, mask=inside, other=float("-inf")) - shift)
                total += weight * gl.load(l_ptr + rows, mask=inside, other=0.0)
                ptrs = acc_ptr + rows.to(gl.int64)[:, None] * WIDTH + cols[None, :]
                acc += weight[:, None] * gl.load(ptrs, mask=inside[:, None], other=0.0)
            l = gl.sum(total, 0)
            safe = gl.where(l == 0.0, 1.0, l)
            out = gl.sum(acc, 0) / safe
            token64 = (q_start + token).to(gl.int64)
            ptrs = out_ptr + token64 * stride_out_token + head.to(gl.int64) * stride_out_head + cols
            gl.store(ptrs, out.to(out_ptr.dtype.element_ty))
            if lse_ptr is not None:
                if column == 0:
                    lse = gl.where(l == 0.0, float("-inf"), m * LN2 + gl.log(safe))
                    gl.store(lse_ptr + token64 * stride_lse + head, lse)
