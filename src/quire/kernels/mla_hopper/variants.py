"""The variants of the MLA kernel for Hopper GPUs: products in 16 bits, or in fp8 where that is allowed."""

from dataclasses import replace

import torch

from quire.dispatch.request import Options, Request
from quire.kernels.mla.launch import MLALaunch
from quire.kernels.mla_hopper.launch import WIDTHS, MLAHopperLaunch, can_multiply_in_fp8


def variants(
    request: Request, options: Options, fallback: MLALaunch, within: bool = False
) -> dict[str, MLAHopperLaunch] | str:
    """Return the launches of the kernel by name; or, in words, what it does not serve.

    Args:
        request: the batch.
        options: what the caller of `plan` asks for.
        fallback: the launch for what TMA cannot address.
        within: changes nothing here.
    """
    if refusal := refusal_of(request, options):
        return refusal
    import os

    launch = MLAHopperLaunch(request, fallback, narrow=os.environ.get('NARROW', '1') == '1')
    found = {"mla_hopper": launch}
    if can_multiply_in_fp8(request):
        found["mla_hopper fp8"] = replace(launch, fp8_mma=True, narrow=False)
    return found


def refusal_of(request: Request, options: Options) -> str | None:
    """Return in words what the kernel does not serve; None if it serves a request."""
    spec = request.spec
    if not spec.latent:
        return "keys and values that aren't latents"
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
