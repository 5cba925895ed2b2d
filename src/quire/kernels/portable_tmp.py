"""Launch paged attention as a plan says: one program per block of rows (`blocks.py`), or each an equal share of the keys (`shares.py`).

Binding some fifty arguments costs Triton more time than many a launch takes on the GPU. So the first launch of a plan with tensors of given strides goes
through Triton's own binder, which compiles and returns the kernel; later ones call that with the arguments in order, the addresses replaced.
"""

from typing import NamedTuple

import torch
import triton
from triton.runtime.driver import driver

from quire.cache import PagedKVCache
from quire.kernels import mods, views
from quire.kernels.block.kernel import block_kernel
from quire.kernels.split_kv.kernel import split_kv_kernel
from quire.plan import Plan


class Prepared(NamedTuple):
    """A compiled kernel and what of its arguments does not change from layer to layer."""

    kernel: triton.compiler.CompiledKernel
    device: int
    kv: tuple  # of views.PagedKV, after the tensors of the cache
    rest: tuple


def launch(
    q: torch.Tensor,
    cache: PagedKVCache,
    plan: Plan,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> None:
    """Launch the kernel that `plan` chose; arguments were checked by `quire.attention`."""
    grid = (plan.num_programs(q.shape[0]), 1, 1)
    if grid[0] == 0:
        return
    lse_at, sinks_at, slopes_at = (None if t is None else t.data_ptr() for t in (lse, sinks, alibi_slopes))
    q_at, out_at, cache_at = q.data_ptr(), out.data_ptr(), cache.addresses
    per_head = None if sinks is None else sinks.dtype, None if alibi_slopes is None else alibi_slopes.dtype
    key = cache.kind, q.stride(), out.stride(), None if lse is None else lse.stride(0), per_head
    aligned = (q_at | out_at | (lse_at or 0) | (sinks_at or 0) | (slopes_at or 0) | cache_at[0] | cache_at[1]) % 16 == 0
    prepared = plan.prepared.get(key) if aligned else None
    if prepared is not None and prepared.device == driver.active.get_current_device():
        stream = driver.active.get_current_stream(prepared.device)
        prepared.kernel[grid](
            q_at, out_at, lse_at, sinks_at, slopes_at, cache_at + prepared.kv, *prepared.rest, stream=stream
        )
        return
    kernel, kv, rest, meta = arguments(q, cache, plan, out, lse)
    compiled = kernel[grid](q, out, lse, sinks, alibi_slopes, kv, *rest, **meta)
    if compiled is not None and aligned:  # None in the interpreter
        constants = tuple(meta.get(name) for name in kernel.arg_names[6 + len(rest) :])
        plan.prepared[key] = Prepared(
            compiled, driver.active.get_current_device(), address_of(kv[4:]), address_of(rest) + constants
        )


def address_of(value):
    """Return a tensor's address, a view's addresses, anything else as it is."""
    if isinstance(value, tuple):
        return tuple(address_of(v) for v in value)
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def arguments(q: torch.Tensor, cache: PagedKVCache, plan: Plan, out: torch.Tensor, lse: torch.Tensor | None) -> tuple:
    """Return the kernel that `plan` chose, the view of the cache, the positional arguments after it, and those given by name."""
    spec, batch, tile, properties = plan.spec, plan.batch, plan.tile, plan.properties
    quantised = cache.dtype is not q.dtype
    pairs = (
        cache.dtype in mods.FP8X2_DECODERS
        and q.dtype.itemsize == 2
        and cache.scale_kind != "token"
        and views.can_pack_fp8(cache)
    )
    pairs = pairs and min(tile.block_d, tile.block_dv) >= 32
    if pairs:
        element, decode = torch.int16, mods.fp8x2_decoder(cache.dtype, properties.native_fp8x2)
    else:
        as_bytes = not properties.native_fp8 and cache.dtype in mods.SOFTWARE_DECODERS
        element, decode = torch.uint8 if as_bytes else cache.dtype, mods.decoder(cache.dtype, properties.native_fp8)
    # Numbers that are converted one by one take registers: fewer keys at once.
    block_n = max(16, tile.block_n // 2) if quantised and not pairs else tile.block_n
    k_strides, v_strides = cache.strides
    strides = (
        batch.page_table.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        0 if lse is None else lse.stride(0),
    )
    numbers = (spec.softmax_scale, spec.softcap or 0.0, *spec.window, batch.num_seqs)
    meta = {
        "NUM_KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim, "HEAD_DIM_V": spec.head_dim_v,
        "BLOCK_D": tile.block_d, "BLOCK_DV": tile.block_dv, "K_VEC": k_strides.vec_size, "V_VEC": v_strides.vec_size, "PAGE_SIZE": cache.page_size,
        "SCORE_MOD": mods.score_mod(spec), "DECODE": decode, "PACKED_FP8": pairs, "TOKEN_SCALES": cache.scale_kind == "token",
        "INPUT_PRECISION": "tf32" if spec.allow_tf32 and properties.native_tf32 else "ieee",
        "BLOCK_M": tile.block_m, "BLOCK_N": block_n, "PER_ROW_MASK": plan.max_query_len > 1, "SEARCH": plan.search, "FULL_TILE_LOOP": plan.full_tile_loop,
        "PDL": properties.supports_pdl, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    } | tile.hints  # fmt: skip
    if properties.supports_pdl:
        meta["launch_pdl"] = True
    kv = views.paged_kv(cache, batch, element)
    if not plan.num_shares:
        return block_kernel, kv, (batch.cu_seqlens_q, *numbers, *strides), meta
    meta |= {
        "ROWS": plan.partial_rows,
        "SEQS": plan.seqs_at_once,
        "MORE_SEQS": batch.num_seqs > plan.seqs_at_once,
        "FEW": plan.few,
    }
    meta |= {"TWO_LEVEL": plan.two_level, "LONG": plan.long, "CHUNK": plan.chunk}
    return (
        split_kv_kernel,
        kv,
        (batch.cu_seqlens_q, plan.scratch, *numbers, plan.num_shares, plan.merge_cost, *strides),
        meta,
    )
