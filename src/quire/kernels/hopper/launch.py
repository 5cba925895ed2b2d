"""Launch attention on a Hopper GPU as a plan says: queries, keys and values as rows that the copy engine addresses."""

from functools import cache, lru_cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

from quire.cache import PagedKVCache
from quire.dispatch.config import MIN_TMA_BOX
from quire.kernels import mods, views
from quire.kernels import portable_tmp as portable
from quire.kernels.combine import arguments as merge_arguments
from quire.kernels.combine import combine_kernel
from quire.kernels.hopper.kernel import hopper_kernel
from quire.kernels.hopper.pipeline import LINE
from quire.kernels.hopper.tile_scheduler import ROWS
from quire.plan import Plan


def launch(
    q: torch.Tensor,
    cache: PagedKVCache,
    plan: Plan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> None:
    """Launch `hopper_kernel`, and behind it the merge of its parts or the kernel for sequences of few queries, if the plan has one; or what the plan has
    for tensors that are no such rows. Arguments were checked by `quire.attention`.
    """
    fast, spec = plan.fast, plan.spec
    q_rows = (
        rows(q, (1, *q.shape[:2], spec.head_dim), (0, *q.stride()[:2]))
        if q.stride(1) < q.stride(0) or q.shape[1] == 1
        else None
    )
    kv_rows = rows_of_cache(cache)
    if q_rows is None or kv_rows is None:
        portable.launch(q, cache, plan.instead or plan, out, lse, sinks, alibi_slopes)
        return
    num_items = plan.num_items(q.shape[0]) * plan.num_parts
    if num_items == 0:
        return
    into, into_lse = (out, lse) if plan.num_parts == 1 else (plan.scratch.acc, plan.scratch.m_i)
    grid = (min(num_items, plan.properties.num_sms * fast.programs_per_sm), 1, 1)
    box, q_box = min(fast.block_n, page_box(cache)), min(fast.block_t, ROWS.value)
    descriptors = tuple(
        boxes(t, *m_i, [n, spec.head_dim])
        for t, m_i, n in ((q, q_rows, q_box), (cache.k, kv_rows[0], box), (cache.v, kv_rows[1], box))
    )
    addresses = tuple(None if t is None else t.data_ptr() for t in (into, into_lse, sinks, alibi_slopes))
    aligned = not any((at or 0) % 16 for at in addresses)
    per_head = None if sinks is None else sinks.dtype, None if alibi_slopes is None else alibi_slopes.dtype
    key = "hopper", cache.kind, q.stride(), into.stride(), None if into_lse is None else into_lse.stride(0), per_head
    prepared = plan.prepared.get(key) if aligned else None
    if prepared is not None and prepared.device == driver.active.get_current_device():
        stream = driver.active.get_current_stream(prepared.device)
        prepared.kernel[grid](*addresses, *cache.addresses[2:], *descriptors, *prepared.rest, stream=stream)
    else:
        rest, meta = arguments(q, cache, plan, into, into_lse)
        meta |= {"BOX": box, "Q_BOX": q_box}
        options = {"num_warps": 4, "launch_pdl": True} | (
            {"maxnreg": 128} if fast.num_warpgroups == 1 else {}
        )  # two programs fit a multiprocessor
        compiled = hopper_kernel[grid](
            into, into_lse, sinks, alibi_slopes, cache.k_scale, cache.v_scale, *descriptors, *rest, **meta, **options
        )
        if aligned:
            constants = tuple(meta[name] for name in hopper_kernel.arg_names[9 + len(rest) :])
            plan.prepared[key] = portable.Prepared(
                compiled, driver.active.get_current_device(), (), portable.address_of(rest) + constants
            )
    if plan.num_parts > 1:
        merge_parts(plan, out, lse)
    if plan.beside is not None:
        portable.launch(q, cache, plan.beside, out, lse, sinks, alibi_slopes)


def merge_parts(plan: Plan, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Launch the merge of the states of all parts, which lie in the plan's scratch."""
    batch, outs, lses, grid = plan.batch, plan.scratch.acc, plan.scratch.m_i, (*out.shape[:2], 1)
    lse_at = None if lse is None else lse.data_ptr()
    key = "merge", out.stride(), None if lse is None else lse.stride(0)
    aligned = (out.data_ptr() | (lse_at or 0)) % 16 == 0
    prepared = plan.prepared.get(key) if aligned else None
    if prepared is not None and prepared.device == driver.active.get_current_device():
        addresses = (outs.data_ptr(), lses.data_ptr(), out.data_ptr(), lse_at)
        prepared.kernel[grid](*addresses, *prepared.rest, stream=driver.active.get_current_stream(prepared.device))
        return
    rest, meta = merge_arguments(outs.permute(2, 0, 1, 3), lses.permute(2, 0, 1), out.stride(), lse)
    rest, meta = (batch.cu_seqlens_q, batch.num_seqs, *rest), meta | {"PDL": True}
    compiled = combine_kernel[grid](outs, lses, out, lse, *rest, **meta, launch_pdl=True)
    if aligned:
        constants = tuple(meta[name] for name in combine_kernel.arg_names[4 + len(rest) :])
        plan.prepared[key] = portable.Prepared(
            compiled, driver.active.get_current_device(), (), portable.address_of(rest) + constants
        )


def arguments(q: torch.Tensor, cache: PagedKVCache, plan: Plan, out: torch.Tensor, lse: torch.Tensor | None) -> tuple:
    """Return the positional arguments after the descriptors, and those given by name."""
    spec, batch, fast, v = plan.spec, plan.batch, plan.fast, cache.strides[1]
    kv = views.paged_kv(cache, batch, cache.dtype)._replace(
        k=None, v=None, k_scale=None, v_scale=None, v_page=v.page, v_slot=v.slot, v_head=v.head
    )
    strides = (
        batch.page_table.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        0 if lse is None else lse.stride(0),
    )
    numbers = (spec.softmax_scale, spec.softcap or 0.0, *spec.window, plan.few, batch.num_seqs, plan.num_parts)
    return (kv, batch.cu_seqlens_q, plan.scratch.counter, *numbers, *strides), {
        "NUM_KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim, "PAGE_SIZE": cache.page_size,
        "SCORE_MOD": mods.score_mod(spec), "WARPGROUPS": fast.num_warpgroups, "BLOCK_T": fast.block_t, "BLOCK_N": fast.block_n,
        "STAGES": fast.num_stages, "BLOCKS": fast.num_blocks, "BYTE_STAGES": fast.num_byte_stages, "IN_FP8": bool(fast.in_fp8),
    }  # fmt: skip


def boxes(tensor: torch.Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    """Describe a matrix of `rows` to the copy engine: boxes of so many rows, as wide as a head or as a line, which it swizzles for the matrix unit."""
    columns = min(box[1], LINE.value // tensor.itemsize)
    return TensorDescriptor(
        tensor, shape, strides, [box[0], columns], swizzled(columns * tensor.itemsize, 8 * tensor.itemsize)
    )


@cache
def swizzled(num_bytes: int, num_bits: int) -> gl.NVMMASharedLayout:
    """Return the layout of tiles whose lines are so long."""
    return gl.NVMMASharedLayout(swizzle_byte_width=num_bytes, element_bitwidth=num_bits, rank=2)


def rows_of_cache(cache: PagedKVCache) -> tuple | None:
    """Return a cache's keys and values as `rows`; None where the kernel cannot have them so: scales per token, pages or strides that do not divide."""
    found = tuple(
        rows(tensor, extents, strides[:3]) if strides.vec_size == extents[3] else None
        for tensor, extents, strides in zip((cache.k, cache.v), cache.extents, cache.strides, strict=True)
    )
    return None if cache.scale_kind == "token" or page_box(cache) < MIN_TMA_BOX or None in found else found


def page_box(cache: PagedKVCache) -> int:
    """Return the largest power of two that divides the page size."""
    return cache.page_size & -cache.page_size


def rows(
    tensor: torch.Tensor, extents: tuple[int, int, int, int], strides: tuple[int, int, int]
) -> tuple[list[int], list[int]] | None:
    """Return the shape and strides of a matrix in which element (page, slot, head, dim) lies at row and column
    `divmod(page * page_stride + slot * slot_stride + head * head_stride, slot_stride)`, dim further on; None where the copy engine cannot have it so.
    """
    return None if tensor.data_ptr() % 16 else rows_of(tensor.itemsize, extents, strides)


@lru_cache(maxsize=4096)
def rows_of(
    itemsize: int, extents: tuple[int, int, int, int], strides: tuple[int, int, int]
) -> tuple[list[int], list[int]] | None:
    (num_pages, page_size, num_heads, dim), (page, slot, head) = extents, strides
    if num_heads == 1:
        head = 0
    if slot == 0 or slot * itemsize % 16 or num_pages * page_size * num_heads == 0:
        return None
    if page % slot or (head > slot and head % slot) or (head < slot and (num_heads - 1) * head + dim > slot):
        return None
    last = (num_pages - 1) * page + (page_size - 1) * slot + (num_heads - 1) * head
    return [last // slot + 1, dim if head >= slot else (num_heads - 1) * head + dim], [slot, 1]
