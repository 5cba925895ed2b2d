"""Arguments that go into a kernel together: flat NamedTuples of tensors and strides.

They are flat, since a tuple inside a tuple fails to compile in loops if one of its ints is specialised to 1
(Triton 3.6.0).
"""

import math
from typing import Any, NamedTuple

import torch

from quire.batch import Batch, ChosenKeys
from quire.cache import PagedKVCache, Strides
from quire.cache_layout import RECORD_RANK
from quire.dispatch.config import padded
from quire.kernels.formats import as_bytes
from quire.norm_rope import QKNorm, Rope


class Rotation(NamedTuple):
    """Constexprs of kernels that normalise and rotate, or do not."""

    ROTARY_DIM: int | None = None  # 0 without a rotation; None without a norm too
    INTERLEAVED: bool = False


NO_NORM_ROPE = Rotation()


class CacheTensors(NamedTuple):
    """The tensors of a cache, which change from layer to layer.

    Element (page, slot, head, dim) of k is at `page * k_page + slot * k_slot + head * k_head + dim // vec * k_vec +
    dim % vec`, with the strides of `KVLayout`.
    """

    k: Any
    v: Any
    k_scale: Any  # element (page, slot, head) at strides scale_*; None if the cache is not quantised
    v_scale: Any


class BlockedCacheTensors(NamedTuple):
    """Those of a cache with block scales; these are bytes, with the strides block_* of `KVLayout`."""

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    k_block: Any
    v_block: Any


class BlockScales(NamedTuple):
    """The block scales of a cache that is written, as bytes, and their strides of pages, slots and heads."""

    k: Any
    v: Any
    page: int
    slot: int
    head: int


class NewTokens(NamedTuple):
    """The keys and values of a step's tokens, which are not in the cache yet, and where they go.

    A program that is going to read them from the cache writes them first. Several may write the same.
    """

    k: Any  # [num_tokens, num_kv_heads, HEAD_DIM]
    v: Any  # [num_tokens, num_kv_heads, HEAD_DIM_V]
    slot_mapping: Any  # [num_tokens] int64; a negative slot is not written
    k_token: int  # strides
    k_head: int
    v_token: int
    v_head: int


class NormRope(NamedTuple):
    """How the queries and the new keys of a step are rotated: `Rope` and `QKNorm`, as kernels read them."""

    cos: Any  # [max_positions, ROTARY_DIM / 2]; None, like the next two, without a rotation
    sin: Any
    positions: Any  # [num_tokens] int32 or int64
    q_weight: Any  # [HEAD_DIM]; None, like the next, without a norm
    k_weight: Any
    eps: float
    max_positions: int
    cos_row: int  # strides
    sin_row: int


ONE_EACH = 16  # a multiple of 16, as Triton's binder asks of numbers


def starts_of(batch: Batch) -> tuple[torch.Tensor, int]:
    """Return `cu_seqlens_q`, or a tensor in its place, and `one_each`, as `schedule.load_sequence` takes them."""
    if batch.cu_seqlens_q is None:
        return batch.seq_lens, ONE_EACH
    return batch.cu_seqlens_q, 0


class KVLayout(NamedTuple):
    """Strides of a cache, and the table through which sequences reach it. They are the same for all layers."""

    page_table: Any  # row of sequence s at s * stride_table, or at cu_pages[s]
    cu_pages: Any
    seq_lens: Any  # [num_seqs] int32
    query_offsets: Any  # [num_seqs] int32, or None for bottom-right alignment
    k_page: int
    k_slot: int
    k_head: int
    k_vec: int
    v_page: int | None  # None, like the next two, if v has the strides of k: its offsets are then those of k
    v_slot: int | None
    v_head: int | None
    v_vec: int
    scale_page: int
    scale_slot: int
    scale_head: int
    key_begin: Any = None  # [num_tokens] int32: intervals, or where rows of a tree begin
    key_end: Any = None  # [num_tokens] int32
    tree_bits: Any = None  # [num_tokens] int64
    block_page: int | None = None  # strides of block scales, if there are some
    block_slot: int | None = None
    block_head: int | None = None
    places: Any = None  # [128] int32, from `places_of_scales`

    @property
    def of_elements(self) -> tuple[int, ...]:
        """The strides of pages, slots and heads of k and v."""
        return *self[4:7], *(stride for stride in self[8:11] if stride is not None)


class Lists(NamedTuple):
    """The lists of a batch's `ChosenKeys`, and their strides, which are 0 along KV heads that share a list."""

    indices: Any  # [num_tokens, num_kv_heads, width] int32
    list_lens: Any  # [num_tokens, num_kv_heads] int32; None where all entries count
    width: int
    token: int
    head: int
    lens_token: int
    lens_head: int


class Partials(NamedTuple):
    """A schedule, and the scratch: partials of row blocks that are cut, and arrival counters.

    A partition has two slots: one for the row block that it enters midway, one for the row block that it leaves
    unfinished. With fixed splits, each split has one slot.
    """

    acc: Any  # [num_slots, num_kv_heads, rows, head_dim_v] float32, not normalised
    m_i: Any  # [num_slots, num_kv_heads, rows] float32, running maximum as a base-2 exponent
    l_i: Any  # same shape, sum of exponentials relative to m_i
    counter: Any  # [2 * num_partitions, num_kv_heads] int32, 0 between launches, by the slots of partials
    parts: Any = None  # [num_partitions, PART_FIELDS] int32, `schedule.Part`
    cuts: Any = None  # [num_row_blocks, CUT_FIELDS] int32, `schedule.Cut`; None without a second launch


class Matrix(NamedTuple):
    """A matrix with contiguous rows, each of which holds one or more heads, as a TMA descriptor says it.

    Its dimensions are rows and columns. If 64 columns do not divide a head, they are rows, heads of a row, and columns
    of a head: TMA then fills the rest of a head's last panel with zeros.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements


def cache_tensors(cache: PagedKVCache, element: torch.dtype) -> CacheTensors | BlockedCacheTensors:
    """Return a cache's tensors, viewed as `element`: the cache's dtype, uint8, or int16 for two or four numbers."""
    blocks = block_scales(cache)
    if blocks is not None:
        tensors = cache.k.view(element), cache.v.view(element), cache.k_scale, cache.v_scale
        return BlockedCacheTensors(*tensors, *blocks[:2])
    if element is cache.dtype:
        return CacheTensors(cache.k, cache.v, cache.k_scale, cache.v_scale)
    return CacheTensors(cache.k.view(element), cache.v.view(element), cache.k_scale, cache.v_scale)


def block_scales(cache: PagedKVCache) -> BlockScales | None:
    """Return the block scales of a cache; None if it has none."""
    k, v = cache.k_block_scale, cache.v_block_scale
    return None if k is None or v is None else BlockScales(as_bytes(k), as_bytes(v), *cache.block_strides)


def output_tensor(out: torch.Tensor, native_fp8: bool) -> torch.Tensor:
    """Return an output as kernels write it: one of e4m3 as bytes if the target lacks the type."""
    return out.view(torch.uint8) if out.dtype is torch.float8_e4m3fn and not native_fp8 else out


def norm_rope_of(rope: Rope | None, qk_norm: QKNorm | None) -> tuple[NormRope, Rotation]:
    """Return `Rope` and `QKNorm` as kernels read them, and the constexprs of kernels that depend on them."""
    q_weight, k_weight, eps = (None, None, 0.0) if qk_norm is None else qk_norm
    if rope is None:
        return NormRope(None, None, None, q_weight, k_weight, eps, 0, 0, 0), Rotation(0)
    cos, sin, positions, interleaved = rope
    rows, half = cos.shape
    norm_rope = NormRope(cos, sin, positions, q_weight, k_weight, eps, rows, cos.stride(0), sin.stride(0))
    return norm_rope, Rotation(2 * half, interleaved)


def kv_layout(cache: PagedKVCache, batch: Batch, element: torch.dtype, *, share_offsets: bool = True) -> KVLayout:
    """Return a cache's strides in elements of `element`; with `share_offsets`, without those of v that equal k's."""
    ks, vs = cache.strides
    if element.itemsize > cache.dtype.itemsize:
        ks, vs = (Strides(*(stride // 2 for stride in s)) for s in (ks, vs))
    v_strides = (None, None, None) if share_offsets and vs[:3] == ks[:3] else vs[:3]
    return KVLayout(
        batch.page_table,
        batch.cu_pages,
        batch.seq_lens,
        batch.query_offsets,
        ks.page,
        ks.slot,
        ks.head,
        ks.vec,
        *v_strides,
        vs.vec,
        *cache.scale_strides,
        batch.key_begin,
        batch.key_end,
        batch.tree_bits,
        *(() if cache.k_block_scale is None else cache.block_strides),
    )


def places_of_scales(device: torch.device) -> torch.Tensor:
    """Return where the block scale of each four columns is: the byte of a pair of words, plus 16 for each pair before.

    The numbers are written in a plan's life: those of a captured graph may be written by its replays alone.
    """
    group = torch.arange(128, dtype=torch.int32, device=device) // 4
    return group % 8 + 16 * (group // 8)


def lists_of(chosen: ChosenKeys) -> Lists:
    """Return lists of chosen keys as kernels read them."""
    indices, lens = chosen.indices, chosen.lens
    head = indices.stride(1) if chosen.num_lists > 1 else 0
    strides = (0, 0)
    if lens is not None:
        strides = lens.stride(0), lens.stride(1) if lens.dim() == 2 and chosen.num_lists > 1 else 0
    return Lists(indices, lens, chosen.width, indices.stride(0), head, *strides)


def stride_unit(*strides: int) -> int:
    """Return the power of two that divides all strides, if the compiler has to be told; else 1.

    Triton knows of an argument whether 16 divides it, and nothing else. Where 8 divides the width of heads and 16 does
    not, it would load one element at a time.
    """
    common = math.gcd(*strides)
    unit = common & -common
    return unit if 0 < unit < 16 else 1


def can_pack_fp8(cache: PagedKVCache) -> bool:
    """Whether every head is contiguous and begins at an even element, so that it can be read as int16."""
    return cache.layout != "HDNX" and all(
        tensor.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in tensor.stride()[:-1])
        for tensor in (cache.k, cache.v)
    )


class LatentTensors(NamedTuple):
    """The tensors of a cache of latents, which change from layer to layer.

    Column d of (page, slot) is at `page * c_page + slot * c_slot + d`, with the strides of `LatentLayout`.
    """

    c: Any  # the columns that are keys and values
    rope: Any  # the rotary columns; None if there are none
    scale: Any  # one float32, or those of records, in float32 or ue8m0; None if the cache is not quantised


class LatentLayout(NamedTuple):
    """Strides of a cache of latents, and the table through which sequences reach it, as in `KVLayout`.

    The strides of slots of c and rope are constexprs of the kernel.
    """

    page_table: Any
    cu_pages: Any
    seq_lens: Any
    query_offsets: Any
    c_page: int
    rope_page: int
    scale_page: int
    scale_slot: int


def latent_tensors(cache: PagedKVCache, element: torch.dtype) -> LatentTensors:
    """Return the tensors of a cache of latents.

    Args:
        cache: the cache.
        element: as what the columns that are keys and values are viewed: the cache's dtype, uint8, or int16 for two
            fp8 numbers. The rotary columns of an fp8 cache that is not viewed as its dtype are viewed as uint8.
    """
    if cache.scale_kind == "record":
        values, scales, rope = cache.records
        return LatentTensors(values.view(element), rope, scales)
    latents, rank = cache.latents, cache.head_dim_v
    rope = latents[..., rank:] if rank < cache.head_dim else None
    if element is cache.dtype:
        return LatentTensors(latents[..., :rank], rope, cache.k_scale)
    return LatentTensors(latents[..., :rank].view(element), rope, cache.k_scale)


FEWEST_COLUMNS = 64  # of a part of records: 16 parts of 32 columns spill 1,432 bytes where 8 of 64 spill 336


def latent_constexprs(cache: PagedKVCache, tensors: LatentTensors, parts: int) -> dict[str, Any]:
    """Return constexprs of the kernels for latents that a cache decides.

    Args:
        cache: the cache.
        tensors: of it, as they are passed.
        parts: in which the columns of latents that are no records are multiplied.
    """
    meta = {
        "PAGE_SIZE": cache.page_size, "C_SLOT": tensors.c.stride(1),
        "ROPE_SLOT": 0 if tensors.rope is None else tensors.rope.stride(1), "WIDE_OFFSETS": cache.has_wide_offsets,
        "PARTS": parts, "CODED": parts, "SCALED": False, "POWERS": 0,
    }  # fmt: skip
    if cache.scale_kind != "record":
        return meta
    record = cache.record
    width, are_powers = max(record.group, FEWEST_COLUMNS), record.scale_dtype is torch.uint8
    return meta | {
        "PARTS": RECORD_RANK // width, "CODED": record.coded // width, "SCALED": not are_powers,
        "POWERS": width // record.group if are_powers else 0, "ROPE": record.rope, "BLOCK_R": padded(record.rope),
    }  # fmt: skip


def latent_layout(cache: PagedKVCache, batch: Batch, tensors: LatentTensors) -> LatentLayout:
    """Return the strides of a cache of latents, in elements of its tensors."""
    scale_strides = tensors.scale.stride()[:2] if cache.scale_kind == "record" else (0, 0)
    return LatentLayout(
        batch.page_table,
        batch.cu_pages,
        batch.seq_lens,
        batch.query_offsets,
        tensors.c.stride(0),
        0 if tensors.rope is None else tensors.rope.stride(0),
        *scale_strides,
    )
