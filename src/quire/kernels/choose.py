"""The choice among kernels: of all variants that serve a request, the one of least predicted time.

Each family lists its variants (`variants.py` in its folder), `work.py` counts what they do, and `dispatch/predict.py`
says how long that takes, by numbers of `dispatch/constants`. There is one other rule: of chosen keys no times are
predicted, and the kernel for Hopper GPUs is taken wherever it serves them.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from quire.dispatch.config import HopperConfig
from quire.dispatch.constants import CHOICES, constants_of
from quire.dispatch.predict import Numbers, micros, times
from quire.dispatch.request import Options, Request
from quire.errors import UnsupportedError
from quire.kernels.chosen import launch as chosen_keys
from quire.kernels.chosen_hopper import launch as chosen_hopper
from quire.kernels.decoded import variants as decoded
from quire.kernels.decoded.launch import DecodedLaunch
from quire.kernels.hopper import variants as hopper
from quire.kernels.hopper.launch import HopperLaunch
from quire.kernels.launch import Launch, once
from quire.kernels.mla import variants as mla
from quire.kernels.mla_hopper import variants as mla_hopper
from quire.kernels.mla_hopper.launch import MLAHopperLaunch
from quire.kernels.portable import variants as portable
from quire.kernels.portable.launch import PortableLaunch
from quire.kernels.work import Lens, columns_of_kind, decoded_bytes, guess, lens_of, scenarios, work_of
from quire.spec import AttentionSpec

# As `plan(kernel=...)` names them:
FAMILIES = "mla_hopper", "mla", "hopper", "decoded", "portable", "chosen_hopper", "chosen"
CHOSEN, NONE_CHOSEN = ("chosen_hopper", "chosen"), "batches without chosen keys"
# Those for Hopper GPUs, and the families of their fallbacks:
FAST = {"mla_hopper": "mla", "hopper": "portable", "decoded": "portable"}
# Of plans that share prefixes, as an H200 took them (docs/results/intervals_h200.md):
SMALL_LAUNCHES = 6.5  # µs of the launches that find the own keys of each sequence and that combine states
FROM_CACHE = 1.7  # keys that another sequence reads too come from L2, so many times as fast as from memory


def variants(request: Request, options: Options, within: bool = False) -> tuple[dict[str, Launch], dict[str, str]]:
    """Return the launches of all families that serve a request, by name; and by family, what the others do not serve.

    Args:
        request: the batch.
        options: what the caller of `plan` asks for.
        within: return all that any batch may have whose numbers are of the same kind, for a warm-up.
    """
    is_latent, kernel = request.spec.latent, options.kernel
    if request.chosen is not None:
        return variants_of_chosen(request, options, within)
    own = "mla" if is_latent else "portable"
    faster: dict[str, Any] = {"mla_hopper": mla_hopper} if is_latent else {"hopper": hopper, "decoded": decoded}
    of_others = "latents" if is_latent else "keys and values that aren't latents"
    refusals = {name: of_others for name in FAMILIES if name not in (own, *faster)} | dict.fromkeys(CHOSEN, NONE_CHOSEN)
    refused = {name: family.refusal_of(request, options) for name, family in faster.items()}
    if is_latent:
        base = mla.variants(request, options, within)
    else:
        is_alone = refused["hopper"] is not None or kernel == own
        base = portable.variants(request, options, within, alone=is_alone)
    if isinstance(base, str):
        of_fast = {name: refusal or f"{base}, which the fallback does not serve" for name, refusal in refused.items()}
        return {}, refusals | {own: base} | of_fast
    found: dict[str, Launch] = dict(base) if kernel in (None, own) else {}
    first: Any = next(iter(base.values()))
    for fast, family in faster.items():
        launches = refused[fast]
        if launches is None and kernel in (None, fast):
            launches = family.variants(request, options, first, within)
        if launches is None:
            continue
        if isinstance(launches, str):
            refusals[fast] = launches
            continue
        found |= launches
        if within:  # the fallback of a launch may be any variant without it
            launch, others = next(iter(launches.values())), variants(request, options._replace(kernel=own), within)[0]
            new = {name: other for name, other in others.items() if name not in base}
            found |= {f"{fast}, {name}": replace(launch, fallback=other) for name, other in new.items()}
    return found, refusals


def variants_of_chosen(request: Request, options: Options, within: bool) -> tuple[dict[str, Launch], dict[str, str]]:
    """Return what `variants` does, of chosen keys.

    Their times are not predicted. Where the kernel for Hopper GPUs serves them, it is the only variant.
    """
    refusals = {name: "chosen keys" for name in FAMILIES if name not in CHOSEN}
    found: dict[str, Launch] = {}
    for name, family in zip(CHOSEN, (chosen_hopper, chosen_keys), strict=True):
        own = family.variants(request, options, within)
        if isinstance(own, str):
            refusals[name] = own
        elif options.kernel in (None, name) and (within or not found):
            found |= own
    return found, refusals


def choose(request: Request, options: Options) -> tuple[Launch, str]:
    """Return the launch of least predicted time, and the reason.

    Raises:
        UnsupportedError: no kernel family serves the request, or the caller's does not.
    """
    found, refusals = variants(request, options)
    if not found:
        if options.kernel is not None:
            _, refused = variants(request, options._replace(kernel=None))
            serving = [repr(name) for name in FAMILIES if name not in refused]
            raise UnsupportedError(
                f"kernel must be {' or '.join([*serving, 'left out'])} here, got {options.kernel!r}, which does not "
                f"serve {refusals[options.kernel]}"
            )
        refused = ", ".join(f"{name} does not serve {refusals[name]}" for name in FAMILIES)
        raise UnsupportedError(f"spec must be one that a kernel serves, got {request.spec}: {refused}")
    known: list[dict[str, float]] = []
    launch, *others = least(found, known)
    if launch.name in FAST:
        of_fallback = options._replace(kernel=FAST[launch.name])
        launch = replace(launch, fallback=least(variants(request, of_fallback)[0], known)[0])
    if not others:
        return launch, "the only variant"
    numbers = constants_of(request.device).name
    reason = f"the least predicted time of {len(found)} variants by the numbers of {numbers}"
    return launch, f"{reason}, before {variant_of(others[0])}"


def key_steps(spec: AttentionSpec, device: Any) -> set[int]:
    """Return numbers of keys after which other kernels may be launched."""
    if spec.latent:
        return mla.key_steps(spec, device)
    return portable.key_steps(spec, device) | hopper.key_steps(spec, device) | decoded.key_steps(spec, device)


def least(found: Mapping[str, Launch], known: list[dict[str, float]] | None = None) -> list[Any]:
    """Return launches, the one of least predicted time first.

    The lengths of a batch are on the device. So what counts is the time over the least one, for some lengths that it
    may have (`work.scenarios`).

    Args:
        found: launches for one request, by name.
        known: predicted times by name, for each of these lengths. Times of further launches are added to it.
    """
    first, cost = next(iter(found.values())), dict.fromkeys(found, 0.0)
    if len(found) == 1:
        return [first]
    of_kind = numbers_of_kind(first.request.spec, first.request.device, is_invariant(first))
    may_be, known = scenarios(first.request), [] if known is None else known
    known += [{} for _ in may_be[len(known) :]]
    for (share, lens), taken in zip(may_be, known, strict=True):
        for name, launch in found.items():
            if name not in taken:
                taken[name] = predicted(launch, lens, name, of_kind)
        best = min(taken[name] for name in found)
        for name in found:
            cost[name] += share * taken[name] / best
    return [found[name] for name in sorted(found, key=cost.__getitem__)]


def predicted(
    launch: Any,
    lens: Lens,
    name: str | None = None,
    of_kind: Mapping[str, Numbers] | None = None,
    bytes_again: float = 0.0,
) -> float:
    """Return the µs that a launch is predicted to take for sequences of some lengths.

    Args:
        launch: a launch of a kernel family.
        lens: queries, keys, and how many sequences have them.
        name: of the variant, where it is known.
        of_kind: the numbers of the variants of its kind of spec, where they are known.
        bytes_again: of keys and values that sequences have in common, each time they are read but the first.
    """
    if isinstance(launch, DecodedLaunch):
        numbers = numbers_of(launch, "decoded")
        before = numbers.launch + decoded_bytes(launch, lens) * numbers.megabyte / 1048576
        return before + predicted(launch.attend, lens, bytes_again=bytes_again)
    work = work_of(launch, lens)
    if bytes_again:
        work = work._replace(nbytes=work.nbytes - bytes_again * (1 - 1 / FROM_CACHE))
    time = micros(work, numbers_of(launch, name, of_kind))
    decode = getattr(launch, "decode", None)
    if decode is not None:
        decoding = tuple(each for each in lens if each[0] <= decode.max_decode_queries)
        after = predicted(decode, decoding) if decoding else numbers_of(decode).launch
        # In one grid, one multiplies while the other loads. A second launch takes the SMs that this one leaves.
        alone = min(1.0, work.programs / work.slots) if isinstance(launch, HopperLaunch) else 0.0
        time = max(time, alone * time + after)
    return time


@once
def predicted_us(launch: Any) -> float | None:
    """Return the µs that a launch is predicted to take at its bounds; None for PyTorch and kernels for chosen keys."""
    if launch.name == "shared_prefix":
        parts = [predicted_us(part) for part in launch.launches]
        known = [part for part in parts if part is not None]
        return sum(known) + SMALL_LAUNCHES if len(known) == len(parts) else None
    if not isinstance(launch, PortableLaunch | HopperLaunch | DecodedLaunch | MLAHopperLaunch):
        return None
    return predicted(launch, lens_of(launch.request))


def pays_to_share(shared: Any, flat: Any) -> bool:
    """Return whether a launch for shared prefixes is predicted to take less than one that reads them again."""
    time = predicted_us(shared)
    if time is None:
        return False
    again = shared.saved_keys * flat.request.spec.bytes_per_token
    return time < predicted(flat, lens_of(flat.request), bytes_again=again)


def is_invariant(launch: Any) -> bool:
    """Return whether a launch is of a batch-invariant plan."""
    return getattr(launch, "fixed_split_size", 0) > 0


def numbers_of(launch: Any, name: str | None = None, of_kind: Mapping[str, Numbers] | None = None) -> Numbers:
    """Return the numbers of a launch's variant, or of one that is like it if it was not measured.

    Where nothing like it was, they are a guess times the factors of its family.
    """
    request = launch.request
    if of_kind is None:
        of_kind = numbers_of_kind(request.spec, request.device, is_invariant(launch))
    name = (name or variant_of(launch)).replace("mixed", "whole")
    if (known := of_kind.get(name) or like(name, of_kind)) is not None:
        return known
    factors = constants_of(request.device).factors.get(family_of(name))
    return guess(launch) if factors is None else times(guess(launch), factors)


def like(name: str, of_kind: Mapping[str, Numbers]) -> Numbers | None:
    """Return the numbers of a variant that has as large tiles and is used alike, if any has."""
    return next((own for other, own in of_kind.items() if tiles_and_use(other) == tiles_and_use(name)), None)


def tiles_and_use(name: str) -> tuple[object, ...]:
    """Return the words of a variant's name that say how large its tiles are and how it is used; for latents, all."""
    family, *words = name.split()
    sizes = {"portable": 1, "hopper": 2}.get(family, len(words))
    return family, *words[:sizes], "apart" in words, *words[-1:]


@lru_cache(maxsize=1024)
def numbers_of_kind(spec: AttentionSpec, device: Any, batch_invariant: bool) -> dict[str, Numbers]:
    """Return the numbers of a spec's variants on a device; none if nothing like it was measured.

    Some variants take longer to convert numbers of one dtype than of another that is as wide, and have numbers for it.
    """
    kinds, kind = constants_of(device).kinds, kind_of(spec, batch_invariant)
    of_dtype = f"{kind} {str(spec.kv_dtype).removeprefix('torch.')}"
    return kinds.get(kind, {}) | kinds.get(of_dtype, {})


CHOICES.append(numbers_of_kind)


def kind_of(spec: AttentionSpec, batch_invariant: bool = False) -> str:
    """Return which numbers a spec's variants have: columns of heads, how caches store, and whose bits are fixed."""
    columns = "latents" if spec.latent else str(columns_of_kind(spec))
    stored = spec.kv_format or spec.kv_dtype.itemsize
    return f"{columns} {spec.dtype.itemsize}/{stored}{' invariant' * batch_invariant}"


def family_of(name: str) -> str:
    """Return what variants that are used alike have in common: their kernel, and the use where it is named."""
    first, *_, last = name.split() * 2
    return f"{first} {last}" if last in ("whole", "cut", "joined", "split") else first


def variant_of(launch: Any) -> str:
    """Return the name of a launch among the variants."""
    if isinstance(launch, MLAHopperLaunch):
        return launch.variant
    if isinstance(launch, DecodedLaunch):
        return f"decoded {variant_of(launch.attend)}"
    if isinstance(launch, HopperLaunch):
        config: HopperConfig = launch.config
        if launch.fixed_split_size:
            return f"hopper wg{config.num_warpgroups} n{config.block_n}"
        use = "split" if launch.num_splits > 1 else "cut" if launch.cuts else "whole"
        size = f"wg{config.num_warpgroups} n{config.block_n} s{config.num_stages} q{config.num_q_stages}"
        return f"hopper {size}{' fp8' * config.fp8_mma}{' apart' * config.apart} {use}"
    assert isinstance(launch, PortableLaunch), launch
    if launch.kernel == "mla":
        return f"mla {portable.name_of(launch.config)}"
    use = "joined" if launch.has_combine_launch else "cut" if launch.num_partitions else "whole"
    use = "mixed" if launch.decode is not None else use
    return f"portable {portable.name_of(launch.config)} {use}"
