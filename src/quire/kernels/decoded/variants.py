"""The variants of launches that decode: those of the Hopper kernel for a 16-bit cache.

Sequences of few queries are left to a decode launch, which reads them as they are stored.
"""

from dataclasses import replace

from quire.dispatch.request import Options, Request
from quire.kernels.decoded.launch import DecodedLaunch, spec_of_decoded
from quire.kernels.hopper import variants as hopper
from quire.kernels.portable.launch import PortableLaunch
from quire.kernels.portable.variants import config_of_decode
from quire.kernels.scratch import MOST_STATES


def variants(
    request: Request, options: Options, fallback: PortableLaunch, within: bool = False
) -> dict[str, DecodedLaunch] | str:
    """Return the launches by name; or, in words, what is not served. Arguments are those of `hopper.variants`."""
    if refusal := refusal_of(request, options):
        return refusal
    attending, found = hopper.variants(decoded(request), options, fallback, within), dict[str, DecodedLaunch]()
    assert not isinstance(attending, str)
    config = config_of_decode(request.spec, request.device)
    for name, attend in attending.items():
        attend = replace(hopper.with_decode_launch(attend, request, config), has_scales=True)
        found[f"decoded {name}"] = launch = DecodedLaunch(request, attend, fallback)
        if launch.most_keys < request.bounds.max_seq_len and not within:
            return f"bounds of keys that take more than {MOST_STATES:,} bytes when decoded"
    return found


def refusal_of(request: Request, options: Options) -> str | None:
    """Return in words what is not served; None if a request is, or would be with smaller bounds."""
    spec = request.spec
    if spec.latent:
        return "latents"
    if spec.kv_dtype is spec.dtype:
        return "caches that aren't quantised"
    if options.batch_invariant:
        return "a quantised cache with batch_invariant"
    return hopper.refusal_of(decoded(request), options)


def decoded(request: Request) -> Request:
    """Return the request of what was decoded, which has no pages."""
    return replace(request, spec=spec_of_decoded(request.spec), has_flat_table=False)
