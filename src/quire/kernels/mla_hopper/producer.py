"""Load the latents of each tile of a partition, for `many_rows.py`.

They are loaded by TMA. If they are fp8, a warpgroup converts them.

fp8 latents arrive in the stages that their float16 numbers will have: the raw quarter fills the first half of its
stage. The converting warpgroup reads it, and writes float16 over it. float16 represents every e4m3 number exactly.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quire.kernels.gluon.compat import reinterpret, tma_load
from quire.kernels.gluon.pipeline import wait, wait_ready
from quire.kernels.mla_hopper.memory import EVEN, HALF, ODD, ORDER, PANEL, QUARTER, ROPE, TILE
from quire.kernels.mla_hopper.program import first_sequence, next_sequence, work_of

# Tiles of a partition up to which L2 fetches ahead. In longer loops that was slower (NVIDIA H200, 2026-11-25; what it
# gains is in docs/notes/mla_hopper.md).
FETCHED_AHEAD = gl.constexpr(24)


@gluon.jit
def produce(s, source, program):
    """Load the latents of every tile of the partition. The producer warp runs this."""
    row_block, part = program.row_block, program.part
    PAGE_SIZE: gl.constexpr = program.config.PAGE_SIZE
    BOX: gl.constexpr = program.config.BOX
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    PAIR: gl.constexpr = 2 * TILE
    lane = gl.arange(0, 32, LANES)
    fetches_ahead = (gl.num_programs(0) > 1) & (part.size <= FETCHED_AHEAD)
    seq, known, first = first_sequence(program, row_block)
    pages = load_first_pages(source, program, seq, first, lane)
    uses, odd_uses = 0, 0
    while seq <= part.last_seq:
        row = row_of(source, seq)
        work = work_of(program, seq, known, first, row_block)
        pos = first * TILE
        end = pos + work.count * TILE
        stop = gl.minimum(end, work.visible)
        pages = gl.where(pos + lane * BOX < stop, pages, 0)
        while pos < end:
            rows = ()
            for i in gl.static_range(PAIR // BOX):
                page = gl.sum(gl.where(lane == i, pages, 0), 0)
                rows = rows + (page * source.page_rows + (pos + i * BOX) % PAGE_SIZE,)
            pages = load_pages(row, pos + PAIR + lane * BOX, stop, PAGE_SIZE)
            has_odd = pos + TILE < end
            for i in gl.static_range(4):
                load_quarter(s, source, rows, EVEN, ORDER[EVEN][i], uses, BOX)
            if fetches_ahead & (pos + PAIR < end):
                fetch_into_l2(source, program, pages, lane, pos + PAIR)
            if has_odd:
                for i in gl.static_range(4):
                    load_quarter(s, source, rows, ODD, ORDER[ODD][i], odd_uses, BOX)
                odd_uses += 1
            uses += 1
            pos += PAIR
        seq, known, first, pages = produce_next(source, program, seq, lane, row_block)


@gluon.jit
def row_of(source, seq):
    """Return the page table's row of a sequence."""
    return source.page_table + seq.to(gl.int64) * source.stride_table


@gluon.jit
def load_first_pages(source, program, seq, tile, lane):
    """Load the page numbers of the first boxes that a partition has of a sequence, from `tile` on.

    They are loaded before the length of the sequence is known, so only the table bounds them.
    """
    PAGE_SIZE: gl.constexpr = program.config.PAGE_SIZE
    row, pos = row_of(source, gl.minimum(seq, program.part.last_seq)), tile * TILE + lane * program.config.BOX
    return load_pages(row, pos, source.table_width * PAGE_SIZE, PAGE_SIZE)


@gluon.jit
def produce_next(source, program, seq, lane, row_block):
    """Return what `next_sequence` returns, and the first page numbers, which are loaded at the same time."""
    pages = load_first_pages(source, program, seq + 1, 0, lane)
    found, known, first = next_sequence(program, seq, row_block)
    if program.lengths.cu_seqlens_q is not None:
        if found > seq + 1:  # sequences without rows
            pages = load_first_pages(source, program, found, 0, lane)
    return found, known, first, pages


@gluon.jit
def fetch_into_l2(source, program, pages, lane, pos):
    """Let the L2 cache fetch two tiles from position `pos` on. The programs of all row blocks share this work.

    The fetches are plain instructions, since TMA takes as long for a fetch as for a load.
    """
    PAGE_SIZE: gl.constexpr = program.config.PAGE_SIZE
    BOX: gl.constexpr = program.config.BOX
    BITS: gl.constexpr = source.kv_desc.dtype.primitive_bitwidth
    LINE: gl.constexpr = 1024 // BITS  # elements of 128 bytes
    for group in gl.static_range(2 * TILE // 32):  # of 32 latents, one for each lane
        if group % gl.num_programs(0) == program.row_block:
            page = lane * 0
            for box in gl.static_range(max(1, 32 // BOX)):
                number = gl.sum(gl.where(lane == group * 32 // BOX + box, pages, 0), 0)
                page = gl.where(lane // BOX == box, number, page)
            row = page * source.page_rows + (pos + group * 32 + lane) % PAGE_SIZE
            latents = source.kv_ptr + row.to(gl.int64) * source.stride_row
            for first in gl.static_range(0, 2 * HALF + ROPE, LINE):
                gl.inline_asm_elementwise(
                    "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [latents + first], dtype=gl.int32,
                    is_pure=False, pack=1,
                )  # fmt: skip


@gluon.jit
def load_pages(row, pos, stop, PAGE_SIZE: gl.constexpr):
    """Load the page numbers of boxes at positions `pos`. Boxes that begin at `stop` or later come from page 0."""
    return gl.load(row + pos // PAGE_SIZE, mask=pos < stop, other=0).to(gl.int32)


@gluon.jit
def load_quarter(s, source, rows, PARITY: gl.constexpr, QUARTER_I: gl.constexpr, use, BOX: gl.constexpr):
    """Load a quarter of a tile when its stage is free. The quarter that is multiplied last brings the rope columns."""
    kv_desc, rope_desc = source.kv_desc, source.rope_desc
    STAGE: gl.constexpr = PARITY * 4 + QUARTER_I
    WITH_ROPE: gl.constexpr = brings_rope(PARITY, QUARTER_I)
    COLUMNS: gl.constexpr = QUARTER + ROPE if WITH_ROPE else QUARTER
    full = s.full[STAGE] if rope_desc is None else s.raw_full[STAGE]
    wait(s.empty[STAGE], use + 1)
    mbarrier.expect(full, TILE * COLUMNS * kv_desc.dtype.primitive_bitwidth // 8)
    for box in gl.static_range(TILE // BOX):
        row = rows[PARITY * (TILE // BOX) + box]
        if rope_desc is None:
            for panel in gl.static_range(QUARTER // PANEL):
                into = s.kv.index(STAGE).slice(panel * PANEL, PANEL, 1).slice(box * BOX, BOX)
                tma_load(kv_desc, [row, QUARTER_I * QUARTER + panel * PANEL], full, into)
            if WITH_ROPE:
                tma_load(kv_desc, [row, 2 * HALF], full, s.kv_rope.index(PARITY).slice(box * BOX, BOX))
        else:
            into = raw_tile(s.kv.index(STAGE), kv_desc.dtype).slice(box * BOX, BOX)
            tma_load(kv_desc, [row, QUARTER_I * QUARTER], full, into)
            if WITH_ROPE:
                into = raw_tile(s.kv_rope.index(PARITY), kv_desc.dtype).slice(box * BOX, BOX)
                tma_load(rope_desc, [row, 2 * HALF], full, into)


@gluon.constexpr_function
def brings_rope(parity, quarter):
    """Return whether the rope columns of a tile are loaded with this quarter."""
    return ORDER.value[parity][3] == quarter


@gluon.jit
def raw_tile(stage, element: gl.constexpr):
    """Return a stage of 16-bit numbers as one of twice as many rows of 8-bit numbers, of type `element`."""
    COLUMNS: gl.constexpr = stage.shape[1]
    return reinterpret(stage, element, [2 * stage.shape[0], COLUMNS], gl.NVMMASharedLayout(COLUMNS, 8, 2))


@gluon.jit
def convert(s, source, program):
    """Convert the latents of every tile of the partition. One warpgroup runs this."""
    wait_ready(s.ready)
    row_block = program.row_block
    seq, known, first = first_sequence(program, row_block)
    uses, odd_uses = 0, 0
    while seq <= program.part.last_seq:
        left = work_of(program, seq, known, first, row_block).count
        while left > 0:
            for i in gl.static_range(4):
                convert_quarter(s, source, EVEN, ORDER[EVEN][i], uses)
            if left > 1:
                for i in gl.static_range(4):
                    convert_quarter(s, source, ODD, ORDER[ODD][i], odd_uses)
                odd_uses += 1
            uses += 1
            left -= 2
        seq, known, first = next_sequence(program, seq, row_block)


@gluon.jit
def convert_quarter(s, source, PARITY: gl.constexpr, QUARTER_I: gl.constexpr, use):
    """Convert a quarter of a tile in its stage when it has arrived."""
    STAGE: gl.constexpr = PARITY * 4 + QUARTER_I
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    STORED: gl.constexpr = source.kv_ptr.dtype.element_ty
    wait(s.raw_full[STAGE], use)
    raw = raw_tile(s.kv.index(STAGE), STORED).slice(0, TILE).load(WIDE)
    s.kv.index(STAGE).store(raw.to(s.kv.dtype))
    if brings_rope(PARITY, QUARTER_I):
        rope = raw_tile(s.kv_rope.index(PARITY), STORED).slice(0, TILE).load(NARROW)
        s.kv_rope.index(PARITY).store(rope.to(s.kv.dtype))
    fence_async_shared()  # tensor cores read shared memory by the async proxy, stores write by the generic one
    mbarrier.arrive(s.full[STAGE], count=1)
