"""Which launches have all kernels of batches within bounds, and the most scratch.

A plan takes one of the variants that serve its request. Which kernels these have depends on few numbers of a batch, and
on each of them only by where it lies between steps: powers of two of queries and rows, and what families name
(`key_steps`). So batches are of some kinds, one for each place between steps. A warm-up has all variants of a batch of
each kind, whatever is predicted of their times, and all that differ from these in numbers alone (`alike`).
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

from quire.compile_ahead import processes
from quire.dispatch.constants import CHOICES
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import MOST_NEW_TOKENS, MOST_SEQS_TO_APPEND, Bounds, Options, Request, spec_for_kernels
from quire.draft_trees import MAX_DRAFTS
from quire.kernels.choose import key_steps, variants
from quire.kernels.chosen_hopper.launch import least_united
from quire.kernels.launch import Launch, kernels_of
from quire.kernels.portable.launch import PortableLaunch
from quire.kernels.scratch import MOST_STATES
from quire.spec import AttentionSpec

POWERS = [1 << i for i in range(32)]


@lru_cache(maxsize=16)
def distinct_launches(*bounds: Any) -> tuple[Launch, ...]:
    """Return the launches of `launches_within`, once for each set of kernels.

    They are kept: a server counts its kernels, and later warms up.
    """
    if early := processes.found(bounds):
        return early
    found: dict[Hashable, Launch] = {}
    for launch in launches_within(*bounds):
        found.setdefault(kernels_of(launch), launch)
    return tuple(found.values())


CHOICES.append(distinct_launches)


def launches_within(*bounds: Any) -> Iterator[Launch]:
    """Enumerate launches that have all kernels of batches within the bounds, which `variants_within` takes."""
    for launch in variants_within(True, *bounds):
        yield from launch.alike()


def scratch_within(*bounds: Any) -> int:
    """Return the most bytes of scratch of any batch within the bounds, which `variants_within` takes.

    Of batches of a kind, those with the largest numbers have the most. Those with the fewest queries count too: where
    the most make row blocks that are full, some variants are left out.
    """
    return max(map(scratch_of, variants_within(False, *bounds)), default=0)


def variants_within(
    least: bool,
    spec: AttentionSpec,
    device: DeviceProperties,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    batch_invariant: bool,
    per_token: Sequence[tuple[Any, ...]] = ((False, False),),
    min_query_len: int = 1,
    min_seq_len: int = 1,
) -> Iterator[Launch]:
    """Enumerate the variants of a batch of each kind; `least` and `per_token` are those of `kinds`."""
    limits = max_num_seqs, max_num_tokens, max_seq_len, min_query_len, min_seq_len
    for request in kinds(spec, device, limits, per_token, least):
        found, _ = variants(request, Options(batch_invariant=batch_invariant), within=True)
        yield from found.values()


def scratch_of(launch: Any) -> int:
    """Return the most bytes of scratch that a launch has, or one with fewer keys that is of the same kind."""
    size = launch.with_most_partitions().scratch_size().total
    has_states = isinstance(launch, PortableLaunch) and launch.kernel == "portable" and launch.fixed_split_size
    return min(size, MOST_STATES) if has_states and launch.num_partitions else size


def kinds(
    spec: AttentionSpec,
    device: DeviceProperties,
    limits: tuple[int, int, int, int, int],
    per_token: Sequence[tuple[Any, ...]],
    least: bool,
) -> Iterator[Request]:
    """Enumerate a batch of each kind within limits: that with the least numbers, or with the largest ones.

    Args:
        spec: what is computed.
        device: the device's properties.
        limits: most sequences, tokens and keys of a sequence; fewest queries and keys of a batch's longest sequence.
        per_token: of each kind of batches, whether it has intervals and trees; or also a flat table, and the kinds of
            its chosen keys.
        least: whether numbers are the least; else queries are the least and the largest.
    """
    max_num_seqs, max_num_tokens, max_seq_len, min_query_len, min_seq_len = limits
    end = 0 if least else -1
    of_queries = places(query_steps(spec, device), min_query_len, max_num_tokens)
    queries = [number for place in of_queries for number in (place[:1] if least else dict.fromkeys(place))]
    most_keys = Bounds(1, max_seq_len, 1).for_decision().max_seq_len  # which decode is decided for
    keys = [place[end] for place in places(key_steps(spec, device), min_seq_len, most_keys)]
    of_seqs = POWERS if spec.latent else (1, MOST_SEQS_TO_APPEND)
    seqs = [place[end] for place in places(of_seqs, 1, max_num_seqs)]
    for num_seqs, num_queries, num_keys, of_token in product(seqs, queries, keys, per_token):
        if of_token[1] and num_queries > MAX_DRAFTS:
            continue
        most = num_seqs * num_queries
        if least:
            totals = (most, num_queries) if num_seqs > 1 else (most,)
        else:
            totals = dict.fromkeys((min(most, max_num_tokens), min(most - 1, max_num_tokens)))
        for tokens in totals:
            if not num_queries <= tokens <= max_num_tokens:
                continue
            one_each = num_queries == 1 and tokens == num_seqs
            for has_cu_seqlens in (False, True) if one_each else (True,):
                bounds = Bounds(num_queries, num_keys, tokens)
                yield Request(spec_for_kernels(spec), num_seqs, has_cu_seqlens, bounds, device, *of_token)


def places(steps: Iterable[int], least: int, most: int) -> Iterator[tuple[int, int]]:
    """Enumerate the places of numbers between steps, as their first and last number from `least` to `most`."""
    ends = [0, *sorted({step for step in steps if 0 < step < most}), max(most, 1)]
    for before, last in pairwise(ends):
        if last >= least:
            yield max(before + 1, least), last


@lru_cache
def query_steps(spec: AttentionSpec, device: DeviceProperties) -> list[int]:
    """Return numbers of queries after which other kernels may be launched.

    Between two of them, neither queries nor rows pass a power of two, nor queries of latents three times one
    (`mla.launch.rounded_queries`), nor the row blocks of latents the programs that a device holds, nor a prompt the
    tokens from which on lists of chosen keys are united.
    """
    rows = {power // spec.group_size for power in POWERS if power >= spec.group_size}
    found = {*POWERS, MOST_NEW_TOKENS, *rows}
    if spec.latent:
        found |= {3 * power for power in POWERS[:-2]} | {64 * (device.num_sms // 2) // spec.num_q_heads}
        found.add(least_united(spec, device) - 1)
    return sorted(found)
