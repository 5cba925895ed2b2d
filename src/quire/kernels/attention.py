"""Launch paged attention as a plan says: one program per block of rows (`blocks.py`), or each an equal share of the keys (`shares.py`)."""

import torch

from quire.cache import PagedKVCache
from quire.kernels import mods, views
from quire.kernels.blocks import blocks_kernel
from quire.kernels.shares import shares_kernel
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
    """Launch the kernel that `plan` chose; arguments were checked by `quire.attention`."""
    spec, batch, tile, traits = plan.spec, plan.batch, plan.tile, plan.traits
    num_blocks = plan.num_q_blocks(q.shape[0])
    if num_blocks == 0:
        return
    k_strides, v_strides = cache.strides
    pairs = cache.dtype in mods.PAIR_DECODERS and q.dtype.itemsize == 2 and cache.scale_kind != "token" and views.in_pairs(cache)
    pairs = pairs and min(tile.block_d, tile.block_dv) >= 32
    if pairs:
        element, decode = torch.int16, mods.pair_decoder(cache.dtype, traits.native_pairs)
    else:
        as_bytes = not traits.native_fp8 and cache.dtype in mods.SOFTWARE_DECODERS
        element, decode = torch.uint8 if as_bytes else cache.dtype, mods.decoder(cache.dtype, traits.native_fp8)
    kv = views.paged_kv(cache, batch, element)
    per_layer = (batch.cu_seqlens_q, sinks, alibi_slopes, spec.softmax_scale, spec.softcap or 0.0, *spec.window, batch.num_seqs)
    strides = (batch.page_table.stride(0), q.stride(0), q.stride(1), out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0))
    meta = {
        "NUM_KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim, "HEAD_DIM_V": spec.head_dim_v,
        "BLOCK_D": tile.block_d, "BLOCK_DV": tile.block_dv, "K_RUN": k_strides.run_length, "V_RUN": v_strides.run_length, "PAGE_SIZE": cache.page_size,
        "SCORE_MOD": mods.score_mod(spec), "DECODE": decode, "PAIRS": pairs, "TOKEN_SCALES": cache.scale_kind == "token",
        "INPUT_PRECISION": "tf32" if spec.allow_tf32 and traits.native_tf32 else "ieee",
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BAND": plan.max_query_len > 1, "DEPENDENT_LAUNCH": traits.dependent_launch,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
    if traits.dependent_launch:
        meta["launch_pdl"] = True
    if plan.num_shares:
        grid = (plan.num_shares * spec.num_kv_heads,)
        shares_kernel[grid](
            q, out, lse, kv, plan.scratch, *per_layer, plan.num_shares, plan.merge_cost, *strides,
            ROWS=plan.partial_rows, SEQS=plan.seqs_at_once, MORE_SEQS=batch.num_seqs > plan.seqs_at_once, SEARCH=plan.search, **meta,
        )  # fmt: skip
    else:
        grid = (num_blocks * spec.num_kv_heads,)
        blocks_kernel[grid](q, out, lse, kv, *per_layer, *strides, UNMASKED_LOOP=tile.unmasked_loop, SEARCH=plan.search, **meta)
