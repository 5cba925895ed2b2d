"""The producer that gathers rows: the latents of small pages, and those that lists of chosen keys name.

TMA of Hopper GPUs loads no rows from anywhere. So four warps copy them in pieces of 16 bytes (`cp.async`) to where TMA
would put them. Eight threads copy 128 bytes of a row, and each thread has the same rows in all pieces of a tile: it
finds them once. Entries of lists are read two tiles ahead of the rows, and page numbers one tile ahead. Without lists,
the entries are the positions of a sequence's keys.

The producer waits for no copy. Copies let a barrier complete when they are (`pipeline.SmemPipeline.commit_copies`).

Records of `fp8_ds_mla` arrive in the stages that their numbers in bfloat16 will have: a raw quarter fills the first
half of its stage. A warpgroup reads it and writes bfloat16 over it, once for all rows of queries. It multiplies the
numbers by their scales where a row block has more than 32 rows, which rounds them. Otherwise that is exact, and
consumers multiply products and probabilities by the scales.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quire.kernels.chosen.kernel import find_sequence
from quire.kernels.gluon.compat import copy_async
from quire.kernels.gluon.pipeline import wait, wait_at, wait_ready
from quire.kernels.mla_hopper.lists import hand_over_flags, key_of
from quire.kernels.mla_hopper.memory import EVEN, HALF, ODD, ORDER, QUARTER, SCALES, TILE, scales_of
from quire.kernels.mla_hopper.producer import raw_tile
from quire.kernels.mla_hopper.program import first_sequence, next_sequence, work_of

WARPS = gl.constexpr(4)  # of the producer
# Of a tile's rows: sixteen at once, each by eight threads.
OF_ROWS = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))


class Rows(NamedTuple):
    """Where the latents are, in units of 16 bytes: slot s of page p is at `p * stride_page + s * stride_slot`."""

    latents: Any  # pointer to slot 0 of page 0
    rope: Any  # records: pointers to its rope columns and scales; None otherwise
    scales: Any
    page_table: Any  # None where entries are slots, like the next
    stride_table: Any
    stride_page: Any
    stride_slot: Any
    num_seqs: Any = None  # of lists of positions


class Place(NamedTuple):
    """The list of one query token, or the keys of a sequence, and what of them counts."""

    entries: Any  # pointer to the token's list
    count: Any  # entries of it, or keys
    table: Any  # pointer to the first page number of the sequence; not for slots
    end: Any  # keys of the sequence from here on are not seen


@gluon.jit
def place_of(rows, program, item, known, work):
    """Return the `Place` of an item's list, or of a sequence."""
    if program.config.LISTS:
        lists, token = program.lists, known.q_start
        entries = lists.entries + (token // program.config.UNION).to(gl.int64) * lists.stride
        if rows.page_table is None:
            return Place(entries, known.seq_len, entries, known.seq_len)
        else:
            lengths = program.lengths
            seq, end, _ = find_sequence(lengths, lengths.cu_seqlens_q, token, rows.num_seqs, True)
            end = gl.where(program.causal, end, gl.load(lengths.seq_lens + seq))
            return Place(entries, known.seq_len, rows.page_table + seq.to(gl.int64) * rows.stride_table, end)
    else:
        table = rows.page_table + item.to(gl.int64) * rows.stride_table
        return Place(table, work.visible, table, work.visible)


@gluon.jit
def load_entries(program, place, tile):
    """Load the entries of a tile, -1 after the list's end; or return the positions of its keys."""
    i = tile * TILE + gl.arange(0, TILE, OF_ROWS)
    if program.config.LISTS:
        i = gl.load(place.entries + i, mask=i < place.count, other=-1)
    return i


@gluon.jit
def find_keys(rows, place, entries, PAGE_SIZE: gl.constexpr):
    """Return where the keys of a tile are, `page * PAGE_SIZE + slot`, negative if they are not seen.

    Of unions, entries stay as they are: slots with a bit for each token (`lists.key_of`).
    """
    if rows.page_table is None:
        return entries
    else:
        seen = (entries >= 0) & (entries < place.end)
        pages = gl.load(place.table + entries // PAGE_SIZE, mask=seen, other=0).to(gl.int32)
        return gl.where(seen, pages * PAGE_SIZE + entries % PAGE_SIZE, -1)


@gluon.jit
def find_rows(rows, keys, PAGE_SIZE: gl.constexpr):
    """Return the offsets of keys' rows, in units of 16 bytes."""
    keys = gl.maximum(keys, 0)
    return (keys // PAGE_SIZE).to(gl.int64) * rows.stride_page + (keys % PAGE_SIZE) * rows.stride_slot


@gluon.jit
def copy_columns(buffer, source, offsets, seen, FIRST: gl.constexpr):
    """Begin to copy columns of a tile's rows, from column FIRST on. Rows of keys that are not seen become zeros."""
    VEC: gl.constexpr = 128 // buffer.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VEC], [4, 8], [4, 1], [1, 0])
    columns = FIRST + gl.arange(0, buffer.shape[1], gl.SliceLayout(0, LAYOUT))
    offsets = gl.convert_layout(offsets, gl.SliceLayout(1, LAYOUT)) * VEC
    seen = gl.convert_layout(seen, gl.SliceLayout(1, LAYOUT))
    copy_async(buffer, (source + columns)[None, :] + offsets[:, None], mask=seen[:, None])


@gluon.jit
def copy_scales(buffer, source, offsets, seen):
    """Begin to copy the scales of a tile's records, of which each thread has one."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    columns = gl.arange(0, SCALES, gl.SliceLayout(0, LAYOUT))
    offsets = gl.convert_layout(offsets, gl.SliceLayout(1, LAYOUT)) * 4
    seen = gl.convert_layout(seen, gl.SliceLayout(1, LAYOUT))[:, None] & (columns < 4)[None, :]
    copy_async(buffer.permute((1, 0)), (source + columns)[None, :] + offsets[:, None], mask=seen)


@gluon.jit
def copy_quarter(rows, stage, rope, offsets, seen, QUARTER_I: gl.constexpr, WITH_ROPE: gl.constexpr):
    """Begin to copy a quarter of a tile to its stage, and the rope columns if they come with it."""
    copy_columns(as_copied(stage, rows.latents), rows.latents, offsets, seen, QUARTER_I * QUARTER)
    if WITH_ROPE:
        if rows.rope is None:
            copy_columns(as_copied(rope, rows.latents), rows.latents, offsets, seen, 2 * HALF)
        else:
            copy_columns(rope, rows.rope, offsets, seen, 0)


@gluon.jit
def as_copied(stage, source):
    """Return a stage as what numbers of `source` are copied to: its first half, if they are converted later."""
    if stage.dtype == source.dtype.element_ty:
        return stage
    else:
        return raw_tile(stage, source.dtype.element_ty).slice(0, TILE)


# Of more than 32 rows: two tiles, whose quarters have stages of their own (`memory.Shared`).


@gluon.jit
def gather_many(s, rows, program):
    """Gather the latents of every tile of the program's items. The producer's warps run this."""
    item, known, first = first_sequence(program, program.row_block)
    uses, odd_uses = 0, 0
    while item <= program.part.last_seq:
        work = work_of(program, item, known, first, program.row_block)
        place = place_of(rows, program, item, known, work)
        tile, end = first, first + work.count
        keys = find_keys(rows, place, load_entries(program, place, tile), program.config.PAGE_SIZE)
        entries = load_entries(program, place, tile + 1)
        while tile < end:
            keys, entries = gather_tile(EVEN, s, rows, program, place, keys, entries, tile, uses)
            if tile + 1 < end:
                keys, entries = gather_tile(ODD, s, rows, program, place, keys, entries, tile + 1, odd_uses)
                odd_uses += 1
            uses += 1
            tile += 2
        item, known, first = next_sequence(program, item, program.row_block)


@gluon.jit
def gather_tile(PARITY: gl.constexpr, s, rows, program, place, keys, entries, tile, use):
    """Begin to copy a tile, each quarter when its stage is free. Return the next tile's keys and the entries after."""
    PAGE_SIZE: gl.constexpr = program.config.PAGE_SIZE
    full = s.raw_full if len(s.raw_full) > 0 else s.full
    following = find_keys(rows, place, entries, PAGE_SIZE)
    entries = load_entries(program, place, tile + 2)
    offsets, seen = find_rows(rows, key_of(keys, program.config.UNION), PAGE_SIZE), keys >= 0
    for i in gl.static_range(4):
        wait(s.empty[PARITY * 4 + ORDER[PARITY][i]], use + 1)
        if i == 0 and len(s.scales) > 0:
            copy_scales(s.scales[0].index(PARITY), rows.scales, offsets, seen)
        stage, rope = s.kv.index(PARITY * 4 + ORDER[PARITY][i]), s.kv_rope.index(PARITY)
        copy_quarter(rows, stage, rope, offsets, seen, ORDER[PARITY][i], i == 3)
        async_copy.mbarrier_arrive(full[PARITY * 4 + ORDER[PARITY][i]], increment_count=False)
    if len(s.seen) > 0:
        hand_over_flags(s.seen[0], PARITY, keys, program.config.UNION)  # last, as its threads wait for each other
    return following, entries


# Of at most 32 rows, and for products in fp8: one pipeline of quarters (`latents.Latents`).


@gluon.jit
def gather_latents(s, rows, program):
    """Gather the latents of every tile of the program's items. The producer's warps run this."""
    PAGE_SIZE: gl.constexpr = program.config.PAGE_SIZE
    latents, quarters = s.latents, s.latents.quarters
    item, known, first = first_sequence(program, program.row_block)
    n = 0
    while item <= program.part.last_seq:
        work = work_of(program, item, known, first, program.row_block)
        place = place_of(rows, program, item, known, work)
        keys = find_keys(rows, place, load_entries(program, place, first), PAGE_SIZE)
        entries = load_entries(program, place, first + 1)
        for tile in range(first, first + work.count):
            offsets, seen = find_rows(rows, key_of(keys, program.config.UNION), PAGE_SIZE), keys >= 0
            following = find_keys(rows, place, entries, PAGE_SIZE)
            entries = load_entries(program, place, tile + 2)
            for i in gl.static_range(4):
                stage = quarters.acquire(n + i)
                full = quarters.full.index((n + i) % quarters.FULLS)
                if len(latents.raw_full) > 0:
                    full = latents.raw_full[0].index(stage)
                if i == 0 and len(latents.scales) > 0:
                    copy_scales(latents.scales[0].index(latents.place_of(n)), rows.scales, offsets, seen)
                copy_quarter(rows, quarters.tiles.index(stage), latents.rope_of(n), offsets, seen, i, i == 3)
                async_copy.mbarrier_arrive(full, increment_count=False)
            if len(latents.seen) > 0:
                # Last, as its threads wait for each other.
                hand_over_flags(latents.seen[0], latents.place_of(n), keys, program.config.UNION)
            keys = following
            n += 4
        item, known, first = next_sequence(program, item, program.row_block)


# Records.


@gluon.jit
def convert_many(s, element: gl.constexpr, program):
    """Convert the records of every tile of the program's items. One warpgroup runs this."""
    wait_ready(s.ready)
    item, known, first = first_sequence(program, program.row_block)
    uses, odd_uses = 0, 0
    while item <= program.part.last_seq:
        left = work_of(program, item, known, first, program.row_block).count
        while left > 0:
            convert_tile(EVEN, s, element, uses)
            if left > 1:
                convert_tile(ODD, s, element, odd_uses)
                odd_uses += 1
            uses += 1
            left -= 2
        item, known, first = next_sequence(program, item, program.row_block)


@gluon.jit
def convert_tile(PARITY: gl.constexpr, s, element: gl.constexpr, use):
    """Convert a tile, each quarter when it has arrived."""
    for i in gl.static_range(4):
        wait(s.raw_full[PARITY * 4 + ORDER[PARITY][i]], use)
        stage = s.kv.index(PARITY * 4 + ORDER[PARITY][i])
        raw = load_raw(stage, element)
        scale = scales_of(s.scales[0].index(PARITY), ORDER[PARITY][i]).load(gl.SliceLayout(1, raw.type.layout))
        store_converted(stage, raw.to(gl.float32) * scale[:, None])
        mbarrier.arrive(s.full[PARITY * 4 + ORDER[PARITY][i]], count=1)


@gluon.jit
def convert_latents(PART: gl.constexpr, s, element: gl.constexpr, program):
    """Convert every other quarter of every tile of the program's items. Two warpgroups run this."""
    wait_ready(s.ready)
    latents, quarters = s.latents, s.latents.quarters
    item, known, first = first_sequence(program, 0)
    n = 0
    while item <= program.part.last_seq:
        for _ in range(work_of(program, item, known, first, 0).count):
            for i in gl.static_range(PART, 4, 2):
                stage = quarters.stage_of(n + i)
                wait_at(latents.raw_full[0], stage, (n + i) // quarters.STAGES)
                # Through float32: the instruction from float16 to bfloat16 is slow.
                numbers = load_raw(quarters.tiles.index(stage), element).to(gl.float32)
                store_converted(quarters.tiles.index(stage), numbers)
                mbarrier.arrive(quarters.full.index(stage), count=1)
            n += 4
        item, known, first = next_sequence(program, item, 0)


@gluon.jit
def load_raw(stage, element: gl.constexpr):
    """Load a quarter of a tile as it arrived in its stage."""
    return raw_tile(stage, element).slice(0, TILE).load(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def store_converted(stage, numbers):
    """Store a quarter of a tile, which has been loaded from there, in 16 bits."""
    stage.store(numbers.to(stage.dtype))
    fence_async_shared()  # tensor cores read shared memory by the async proxy, stores write by the generic one
