"""The variants of launches that decode: those of the Hopper kernel for a 16-bit cache.

Sequences of few queries are left to a decode launch, which reads them as they are stored. Of bounds that leave no room
for all others, these are sequences of more queries: as many as batches of so many tokens have room for are decoded.
"""

from dataclasses import replace

from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import Options, Request
from quire.kernels.decoded.launch import DecodedLaunch, spec_of_decoded
from quire.kernels.hopper import variants as hopper
from quire.kernels.portable.launch import PortableLaunch
from quire.kernels.portable.variants import config_of_decode, most_decode_queries
from quire.kernels.scratch import MOST_STATES
from quire.spec import AttentionSpec

FACTORS = 1, 8, 64, 512  # how many times as many queries few may be; each has a kernel


def variants(
    request: Request, options: Options, fallback: PortableLaunch, within: bool = False
) -> dict[str, DecodedLaunch] | str:
    """Return the launches by name; or, in words, what is not served. Arguments are those of `hopper.variants`."""
    if refusal := refusal_of(request, options):
        return refusal
    attending, found = hopper.variants(decoded(request), options, fallback, within), dict[str, DecodedLaunch]()
    assert not isinstance(attending, str)
    spec = request.spec
    config = config_of_decode(spec, request.device)
    few = most_decode_queries(spec, config.block_m)
    for name, attend in attending.items():
        for most in (few * factor for factor in FACTORS):
            both = hopper.with_decode_launch(attend, request, most, config)
            launch = DecodedLaunch(request, replace(both, has_scales=True), fallback)
            if within:
                found[f"decoded {name}, {most}"] = launch
            elif launch.most_keys >= request.bounds.max_seq_len:
                found[f"decoded {name}"] = launch
                break
    return found or f"bounds of keys that take more than {MOST_STATES:,} bytes when decoded"


def refusal_of(request: Request, options: Options) -> str | None:
    """Return in words what is not served; None if a request is, or would be with smaller bounds."""
    spec = request.spec
    if spec.kv_dtype is spec.dtype:
        return "caches that aren't quantised"
    if options.batch_invariant:
        return "a quantised cache with batch_invariant"
    return hopper.refusal_of(decoded(request), options)


def decoded(request: Request) -> Request:
    """Return the request of what was decoded, which has no pages."""
    return replace(request, spec=spec_of_decoded(request.spec), has_flat_table=False)


def key_steps(spec: AttentionSpec, device: DeviceProperties) -> set[int]:
    """Return numbers of keys after which other kernels may be launched: the Hopper kernel's, for decoded ones."""
    return hopper.key_steps(spec_of_decoded(spec), device)
