"""The variants of the MLA kernel for Hopper GPUs: row blocks of 32 or 64 rows, products in fp8 if allowed, and whether
sequences are cut.
"""

from dataclasses import replace

import torch

from quire.dispatch.request import Options, Request
from quire.kernels.mla.launch import MLALaunch
from quire.kernels.mla_hopper.launch import MAX_COLUMN_ROWS, ROWS, TILE, WIDTHS, MLAHopperLaunch, can_multiply_in_fp8


def variants(
    request: Request, options: Options, fallback: MLALaunch, within: bool = False
) -> dict[str, MLAHopperLaunch] | str:
    """Return the launches of the kernel by name; or, in words, what it does not serve.

    Args:
        request: the batch.
        options: what the caller of `plan` asks for.
        fallback: the launch for what TMA cannot address.
        within: return all that any batch may have, for a warm-up: those that cut sequences have all kernels.
    """
    if refusal := refusal_of(request, options):
        return refusal
    launch = MLAHopperLaunch(request, fallback)
    found = [launch]
    if request.rows_per_seq > MAX_COLUMN_ROWS:
        found.append(replace(launch, most_rows=ROWS))
    if can_multiply_in_fp8(request):
        found.append(replace(launch, fp8_mma=True))
    whole = [replace(each, whole=True) for each in found]
    if within:
        whole = []
    elif request.bounds.max_seq_len <= TILE:  # nothing can be cut
        found = []
    return {each.variant: each for each in (*found, *whole)}


def refusal_of(request: Request, options: Options) -> str | None:
    """Return in words what the kernel does not serve; None if it serves a request."""
    spec = request.spec
    if request.per_token is not None:
        return request.per_token
    if spec.score is not None or spec.mask is not None:
        return "a function on scores or masks"
    if request.has_flat_table:
        return "flat page tables, which shared prefixes of unequal lengths have too"
    if not request.device.has_wgmma:
        return "GPUs other than Hopper's"
    if options.config is not None or options.num_splits is not None or options.batch_invariant:
        return "config, num_splits or batch_invariant"
    if (spec.kv_lora_rank, spec.qk_rope_head_dim) != WIDTHS:
        return "latents that are not 512 + 64 wide"
    if spec.dtype is torch.float32:
        return "float32"
    if spec.sliding_window is not None or spec.sliding_window_right is not None:
        return "sliding windows"
    if spec.softcap or spec.alibi or spec.sinks:
        return "softcap, ALiBi or sinks"
    return None
