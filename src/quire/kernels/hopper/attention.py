"""Launch attention on a Hopper GPU as a plan says: queries, keys and values as rows that the copy engine addresses."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.cache import PagedKVCache
from quire.kernels import attention as portable
from quire.kernels import mods, views
from quire.kernels.hopper.pipeline import PANEL
from quire.kernels.hopper.prefill import ROWS, prefill_kernel
from quire.plan import Plan
from quire.tuning.space import SMALLEST_BOX


def launch(
    q: torch.Tensor,
    cache: PagedKVCache,
    plan: Plan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> None:
    """Launch `prefill_kernel`, and beside it the one for sequences of few queries, if the plan says so; or what the plan has for tensors that are no such rows. Arguments were checked by `quire.attention`."""
    spec, batch, fast = plan.spec, plan.batch, plan.fast
    box = min(fast.block_n, cache.page_size & -cache.page_size)
    k_strides, v_strides = cache.strides
    q_rows = rows(q, (1, *q.shape[:2], spec.head_dim), (0, *q.stride()[:2]))
    k_rows = rows(cache.k, cache.extents[0], k_strides[:3]) if k_strides.run_length == spec.head_dim else None
    v_rows = rows(cache.v, cache.extents[1], v_strides[:3]) if v_strides.run_length == spec.head_dim else None
    if box < SMALLEST_BOX or None in (q_rows, k_rows, v_rows):
        portable.launch(q, cache, plan, out, lse, sinks, alibi_slopes)
        return
    num_items = plan.num_items(q.shape[0])
    if num_items == 0:
        return
    swizzled = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_box = min(fast.block_t, ROWS.value)
    descriptors = [
        TensorDescriptor(tensor, *described, [height, PANEL.value], swizzled)
        for tensor, described, height in ((q, q_rows, q_box), (cache.k, k_rows, box), (cache.v, v_rows, box))
    ]
    kv = views.paged_kv(cache, batch, cache.dtype)
    prefill_kernel[(min(num_items, plan.traits.num_sms), 1, 1)](
        out, lse, sinks, alibi_slopes, *descriptors, kv._replace(k=None, v=None, v_page=v_strides.page, v_slot=v_strides.slot, v_head=v_strides.head),
        batch.cu_seqlens_q, plan.scratch.counter, spec.softmax_scale, spec.softcap or 0.0, *spec.window, plan.few, batch.num_seqs,
        batch.page_table.stride(0), q.stride(1), out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0),
        NUM_KV_HEADS=spec.num_kv_heads, GROUP=spec.group_size, HEAD_DIM=spec.head_dim, PAGE_SIZE=cache.page_size, SCORE_MOD=mods.score_mod(spec),
        BLOCK_T=fast.block_t, BLOCK_N=fast.block_n, STAGES=fast.num_stages, BLOCKS=fast.num_blocks, BOX=box, Q_BOX=q_box, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    if plan.beside is not None:
        portable.launch(q, cache, plan.beside, out, lse, sinks, alibi_slopes)


def rows(tensor: torch.Tensor, extents: tuple[int, int, int, int], strides: tuple[int, int, int]) -> tuple[list[int], list[int]] | None:
    """Return the shape and strides of a matrix in which element (page, slot, head, dim) lies at row and column
    `divmod(page * page_stride + slot * slot_stride + head * head_stride, slot_stride)`, dim further on; None where the copy engine cannot have it so.
    """
    (num_pages, page_size, num_heads, dim), (page, slot, head) = extents, strides
    if tensor.data_ptr() % 16 or slot * tensor.itemsize % 16 or page % slot or (head > slot and head % slot) or head * num_heads == 0:
        return None
    last = (num_pages - 1) * page + (page_size - 1) * slot + (num_heads - 1) * head
    columns = dim if head >= slot else (num_heads - 1) * head + dim
    return [last // slot + 1, columns], [slot, 1]
