"""Launch the Hopper kernel with TMA descriptors of q, k and v; then the decode launch, or the combine of splits."""

import math
from collections.abc import Hashable
from functools import cache, partial
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.kernels import views
from quire.kernels.combine import combine_arguments, combine_kernel
from quire.kernels.gluon.pipeline import SWIZZLE_BYTES
from quire.kernels.hopper.kernel import hopper_kernel
from quire.kernels.hopper.launch import HopperLaunch
from quire.kernels.launch import bind_fallback, constexprs_of
from quire.kernels.launcher import Arguments, Kernel
from quire.kernels.portable.runner import numbers_in
from quire.kernels.scheduler import scheduler_of
from quire.kernels.scratch import TILE_COUNTER_BYTES, Part
from quire.kernels.tma import matrices_of_cache, matrix_of_queries
from quire.kernels.user_mods import passed
from quire.kernels.views import Matrix

LEAST_ROWS = 8  # of a box of queries, as the kernel's type has it; the box itself may be no power of two (`set_boxes`)


class HopperRunner:
    """Run a launch of the Hopper kernel for one batch.

    Args:
        launch: the decision.
        batch: the sequences.
        workspace: of `launch.scratch_size()` bytes.
        stored: the same sequences, for the decode launch, if `batch` is of keys and values that were decoded.
    """

    def __init__(
        self, launch: HopperLaunch, batch: Batch, workspace: torch.Tensor, stored: Batch | None = None
    ) -> None:
        self.decided, self.batch, self.workspace = launch, batch, workspace
        self.attend, self.combine = Kernel(hopper_kernel), Kernel(combine_kernel)
        self.known: Hashable = None  # of the last call, with what follows from it
        self.grid, self.matrices, self.boxes = (0, 1, 1), None, (0, 0)
        spec = launch.request.spec
        tokens = launch.config.block_t // (2 if launch.config.apart else 1)
        self.query_box = launch.heads, tokens, columns_of_box(spec.head_dim, spec.dtype.itemsize)
        self.tile_counter = Part(workspace, torch.int32, 0, TILE_COUNTER_BYTES // 4)
        self.fallback: Any = None  # bound when it is first needed
        self.scheduler = scheduler_of(launch, batch)
        self.placed: Any = None  # the schedule that the kernel's arguments name
        self.decode: Any = None if launch.decode is None else launch.decode.bind(stored or batch, workspace)
        self.split_out, self.split_lse = None, None
        self.partials, self.arrivals = None, None
        if launch.cut_slots:
            self.partials = Part(workspace, torch.float32, launch.states_at, launch.cut_bytes // 4)
            arrivals = (launch.counters - launch.arrivals_at) // 4
            self.arrivals = Part(workspace, torch.int32, launch.arrivals_at, arrivals)
        if launch.num_splits > 1:
            tokens = launch.split_rows // (spec.num_q_heads * launch.num_splits)
            shape = tokens, spec.num_q_heads, launch.num_splits
            states = workspace[launch.states_at : launch.own_bytes].view(torch.float32)
            after_out = launch.split_rows * spec.head_dim_v
            self.split_out = states[: math.prod(shape) * spec.head_dim_v].view(*shape, spec.head_dim_v)
            self.split_lse = states[after_out : after_out + math.prod(shape)].view(shape)

    def __call__(
        self,
        q: torch.Tensor,
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        out_scale: torch.Tensor | None = None,
        extras: tuple[torch.Tensor, ...] | None = None,
        stored: PagedKVCache | None = None,
    ) -> None:
        stored = stored or cache  # what the decode launch reads, where this one reads what was decoded
        q_at, k_at, v_at = q.data_ptr(), cache.k.data_ptr(), cache.v.data_ptr()
        known = q.shape[0], q.stride(), cache.kind, cache.num_pages, (q_at | k_at | v_at) % 16
        if known != self.known:
            self.grid, self.matrices = (self.decided.num_programs(q.shape[0]), 1, 1), matrices_of(q, cache)
            self.boxes = self.decided.boxes(cache)
            self.known = known
        grid, matrices, (kv_box, second_box) = self.grid, self.matrices, self.boxes
        if matrices is None:
            self.fallback = self.fallback or bind_fallback(self, cache, q)
            self.fallback(q, cache, out, lse, sinks, alibi_slopes, out_scale, extras=extras)
            return
        if grid[0] == 0:
            return
        into, into_scale, into_lse = out, out_scale, lse
        if self.split_out is not None:
            into, into_scale, into_lse = self.split_out, None, self.split_lse
        read = None if extras is None else passed(self.decided.request.spec.extras, extras)
        tensors = into, into_scale, into_lse, sinks, alibi_slopes, cache.k_scale, cache.v_scale, read
        loaded, pages = ((q_at, matrices[0]),), ((k_at, matrices[1]), (v_at, matrices[2]))
        if kv_box:
            loaded = *pages, *loaded
        else:  # keys and values are gathered: their addresses are arguments
            tensors = *tensors, cache.k, cache.v
        if second_box:
            loaded = *loaded, *pages
        facts = cache.kind, q.stride()
        self.scheduler.find((self.decided.config_of(cache).block_n, grid[0]))
        if self.scheduler.tensors is not self.placed:
            self.placed = self.scheduler.tensors
            self.attend.compiled.clear()  # whose arguments have the former place
        if self.decode is not None:  # which runs at the same time as this launch, and so finds no schedule between both
            self.decode.prepare(stored)
        self.attend(grid, tensors, facts, partial(self.arguments, q, cache, matrices), loaded)
        if self.split_out is not None:
            tensors = self.split_out, self.split_lse, out, out_scale, lse
            self.combine((out.shape[0], out.shape[1], 1), tensors, None, self.combine_arguments)
        if self.decode is not None:
            self.decode(q, stored, out, lse, sinks, alibi_slopes, out_scale, extras=extras)

    def combine_arguments(
        self, split_out: torch.Tensor, split_lse: torch.Tensor, out: torch.Tensor, out_scale: Any, lse: Any
    ) -> Arguments:
        """Return the arguments of the kernel that combines the states of all splits."""
        states = split_out.permute(2, 0, 1, 3), split_lse.permute(2, 0, 1)
        fixed, meta = combine_arguments(*states, out.stride(), lse)
        meta |= {"PDL": True, "launch_pdl": True}
        tensors = split_out, split_lse, out, out_scale, lse
        return Arguments(tensors, (self.batch.cu_seqlens_q, self.batch.num_seqs, *fixed), meta)

    def arguments(
        self, q: torch.Tensor, cache: PagedKVCache, matrices: tuple[Matrix, Matrix, Matrix], *tensors: Any
    ) -> Arguments:
        """Return the arguments of the kernel that attends, of which `tensors` are the first."""
        decided, batch, spec = self.decided, self.batch, self.decided.request.spec
        out, _, lse, *scales, read = tensors[:8]
        tensors = out, tensors[1], lse, *scales, numbers_in(read), *tensors[8:]
        kv_box, second_box = self.boxes

        def of_pages(box: int) -> tuple[TensorDescriptor, ...]:
            parts = zip((cache.k, cache.v), matrices[1:], (spec.head_dim, spec.head_dim_v), strict=True)
            return tuple(describe(tensor, matrix, box, width) for tensor, matrix, width in parts) if box else ()

        first, second = of_pages(kv_box), of_pages(second_box)
        descriptors = *first, describe(q, matrices[0], LEAST_ROWS, spec.head_dim), *second
        boxes = *(None for _ in first), self.query_box, *(None for _ in second)
        kv = views.kv_layout(cache, batch, cache.dtype, share_offsets=False)
        stride_lse = 0 if lse is None else lse.stride(0)
        strides = batch.page_table.stride(0), out.stride(0), out.stride(1), stride_lse
        numbers = (
            spec.softmax_scale,
            spec.softcap or 0.0,
            *spec.window,
            decided.max_decode_queries,
            decided.num_splits,
            decided.last_part,
            decided.section,
        )
        tiles, unit = decided.config_of(cache), views.stride_unit(*out.stride()[:2])
        meta = constexprs_of(decided) | {
            "PAGE_SIZE": cache.page_size, "STRIDE_UNIT": unit, "num_warps": 4, "launch_pdl": True,
            "KV_BOX": kv_box, "BLOCK_N": tiles.block_n, "STAGES": tiles.num_stages,
        }  # fmt: skip
        if decided.config.num_warpgroups == 1:
            meta["maxnreg"] = 128  # so that two programs fit an SM
        absent = () if second else (None, None)
        scratch = self.tile_counter, self.partials, self.arrivals
        assert self.placed is not None
        fixed = *absent, kv, *self.placed, *self.scheduler.lengths[:3], batch.num_seqs, *scratch, *numbers, *strides
        return Arguments(tensors, fixed, meta, descriptors, boxes)


def matrices_of(q: torch.Tensor, cache: PagedKVCache) -> tuple[Matrix, Matrix, Matrix] | None:
    """Return queries, keys and values as matrices; None if TMA cannot address one of them."""
    q_matrix, kv_matrices = matrix_of_queries(q), matrices_of_cache(cache)
    return None if q_matrix is None or kv_matrices is None else (q_matrix, *kv_matrices)


def describe(tensor: torch.Tensor, matrix: Matrix, box_rows: int, head_dim: int) -> TensorDescriptor:
    """Return the TMA descriptor of a matrix, for boxes of `box_rows` rows and one panel's columns."""
    columns = columns_of_box(head_dim, tensor.itemsize)
    box = [box_rows, 1, columns] if len(matrix.shape) == 3 else [box_rows, columns]
    layout = swizzled(columns * tensor.itemsize, 8 * tensor.itemsize, len(box))
    return TensorDescriptor(tensor, [*matrix.shape], [*matrix.strides], box, layout)


def columns_of_box(head_dim: int, itemsize: int) -> int:
    """Return the columns of a panel: as many as TMA can swizzle, or as a head if that is less."""
    return min((head_dim + 63) // 64 * 64, SWIZZLE_BYTES.value // itemsize)


@cache
def swizzled(num_bytes: int, num_bits: int, rank: int) -> gl.NVMMASharedLayout:
    """Return the layout of shared-memory tiles with rows of `num_bytes` bytes and elements of `num_bits` bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=num_bytes, element_bitwidth=num_bits, rank=rank)
