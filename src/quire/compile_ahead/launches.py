"""Which launches have all kernels of batches within bounds, and the most scratch.

A plan takes no kernel, and no more scratch, than the points of a grid around its batch need (`corners.py`). So the
launches at these points can be enumerated.
"""

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from quire.compile_ahead import processes
from quire.compile_ahead.corners import points
from quire.dispatch import tree
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import Bounds, Options
from quire.draft_trees import MAX_DRAFTS
from quire.kernels.launch import Launch, alike, kernels_of
from quire.plan import decide
from quire.spec import AttentionSpec


@lru_cache(maxsize=16)
def distinct_launches(*bounds: Any) -> tuple[Launch, ...]:
    """Return the launches of `launches_within`, once for each set of kernels and size of scratch.

    They are kept: a server asks for its workspace, and later warms up.
    """
    if early := processes.found(bounds):
        return early
    found: dict[Hashable, Launch] = {}
    for launch in launches_within(*bounds):
        found.setdefault((kernels_of(launch), launch.with_most_partitions().scratch_size().total), launch)
    return tuple(found.values())


tree.CHOICES.append(distinct_launches)


def launches_within(
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
    """Enumerate launches that have all kernels of batches within the bounds: those at `corners.points`.

    `per_token` is that of `points`.
    """
    options, limits = Options(batch_invariant=batch_invariant), Bounds(max_num_tokens, max_seq_len, max_num_tokens)
    for request in points(spec, device, limits, max_num_seqs, per_token, min_query_len, min_seq_len):
        if not (request.has_tree and request.bounds.max_query_len > MAX_DRAFTS):
            yield from alike(decide(request, options)[0])
