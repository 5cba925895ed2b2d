"""Checks of `plan(shared_prefix=...)`: levels of runs of sequences, each run with leading keys in common."""

from itertools import accumulate
from typing import Any

from quire.batch import Batch
from quire.dispatch.request import Bounds
from quire.errors import UnsupportedError, check_integer, describe
from quire.kernels.shared_prefix.launch import Level, num_shared_keys
from quire.spec import UNBOUNDED, AttentionSpec

ADVICE = "a level is a list of (num_seqs, num_keys), one pair for each run of neighbouring sequences"


def check_shared_prefix(
    shared_prefix: Any, spec: AttentionSpec, batch: Batch, bounds: Bounds, **options: Any
) -> tuple[Level, ...]:
    """Raise unless the batch can be planned with these shared prefixes; return the levels that hold keys.

    Args:
        shared_prefix: as for `quire.plan`.
        spec: what is computed.
        batch: the sequences.
        bounds: of the batch.
        **options: further arguments of `quire.plan`, which must be None with shared prefixes.
    """
    if isinstance(shared_prefix, list | tuple):
        levels = tuple(_check_level(f"shared_prefix[{i}]", level, batch) for i, level in enumerate(shared_prefix))
    else:
        if isinstance(shared_prefix, str) or not hasattr(shared_prefix, "__index__"):
            raise TypeError(
                f"shared_prefix must be a number or a list of levels, got {describe(shared_prefix)}; {ADVICE}"
            )
        num_keys = check_integer("shared_prefix", shared_prefix, "it is a number of keys", 0, UNBOUNDED)
        levels = (((batch.num_seqs, num_keys),),)
    _check_nesting(levels)
    levels = tuple(level for level in levels if batch.num_seqs and any(num_keys for _, num_keys in level))
    if not levels:
        return ()
    most = max(num_shared_keys(levels))
    if most >= bounds.max_seq_len:
        raise ValueError(
            f"shared_prefix must leave each sequence a key of its own within max_seq_len = {bounds.max_seq_len}, "
            f"got {most} shared keys; a query's own key is not shared"
        )
    for name, value in options.items():
        if value is not None:
            raise UnsupportedError(f"{name} must be left out with shared_prefix, got {describe(value)}; choose one")
    for name, field in (("sliding_window", 0), ("sliding_window_right", 1)):
        if getattr(spec, name) is not None:
            raise UnsupportedError(
                f"shared_prefix must be left out for a spec with {name}, got {spec.window[field]} visible keys; "
                "queries of one group then see different keys"
            )
    if spec.alibi:
        raise UnsupportedError(
            "shared_prefix must be left out for a spec with ALiBi, got one; queries of a group have different positions"
        )
    for name in ("score", "mask"):
        if getattr(spec, name) is not None:
            raise UnsupportedError(
                f"shared_prefix must be left out for a spec with a {name}, got {getattr(spec, name)}; queries of a "
                "group have different positions"
            )
    found = "keys without pages" if not batch.paged else "a flat one" if batch.cu_pages is not None else None
    found = "query_offsets" if found is None and batch.query_offsets is not None else found
    if found is not None:
        raise UnsupportedError(
            f"batch must have a rectangular page_table and no query_offsets with shared_prefix, got {found}; "
            "leave out shared_prefix"
        )
    if batch.chosen is not None:
        raise UnsupportedError(
            "batch must have no chosen keys with shared_prefix, got some, of which few are in common; "
            "leave out shared_prefix"
        )
    if batch.max_tokens is not None:
        raise UnsupportedError(
            "batch must have no intervals and no tree_bits with shared_prefix, got some; leave out shared_prefix"
        )
    return levels


def _check_level(name: str, level: Any, batch: Batch) -> Level:
    if not isinstance(level, list | tuple):
        raise TypeError(f"{name} must be a list of runs, got {describe(level)}; {ADVICE}")
    runs = []
    for i, run in enumerate(level):
        if not isinstance(run, list | tuple) or len(run) != 2:
            raise TypeError(f"{name}[{i}] must be a pair (num_seqs, num_keys), got {describe(run)}; {ADVICE}")
        num_seqs = check_integer(f"{name}[{i}][0]", run[0], "it is a number of sequences", 1, UNBOUNDED)
        runs.append((num_seqs, check_integer(f"{name}[{i}][1]", run[1], "it is a number of keys", 0, UNBOUNDED)))
    total = sum(num_seqs for num_seqs, _ in runs)
    if total != batch.num_seqs:
        raise ValueError(
            f"{name} must have runs of {batch.num_seqs} sequences together, got {total}; "
            "a run of sequences that share nothing has 0 keys"
        )
    return tuple(runs)


def _check_nesting(levels: tuple[Level, ...]) -> None:
    """Raise unless each run of a level is part of one run of the level above it."""
    ends: set[int] = set()
    for i, level in enumerate(levels):
        found = set(accumulate(num_seqs for num_seqs, _ in level))
        if not ends <= found:
            raise ValueError(
                f"shared_prefix[{i}] must cut the runs of the level above it, got a run across the end of "
                f"{min(ends - found)} sequences; sequences that share keys share those before them too"
            )
        ends = found
