"""`SharedPrefixLaunch`: a launch for each level of shared keys, and one for the keys of each sequence alone.

At a level, a run of sequences is launched as one sequence: its keys are the run's shared keys, and its queries are
those of all sequences in the run. All queries see all shared keys, so the level is bidirectional. Each launch gives a
state, and the states are combined.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.request import Bounds, Request
from quire.kernels.launch import Launch, Runner
from quire.kernels.scratch import ScratchSize
from quire.spec import AttentionSpec

Level = tuple[tuple[int, int], ...]  # (num_seqs, num_keys) of each run of sequences, in the order of the batch


@dataclass(frozen=True)
class SharedPrefixLaunch(Launch):
    """Attend to the keys that sequences share, then to their own, and combine.

    Attributes:
        request: the request that was decided about: that of the whole batch.
        levels: the runs of each level that share keys.
        launches: one for each level, and one for the keys of each sequence alone.
    """

    request: Request
    levels: tuple[Level, ...]
    launches: tuple[Launch, ...]

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "shared_prefix"

    @property
    def saved_keys(self) -> int:
        """Keys that are read once for a run, and that a flat plan would read once more for each further sequence."""
        return sum((num_seqs - 1) * num_keys for level in self.levels for num_seqs, num_keys in level)

    def check_page_size(self, page_size: int) -> None:
        """Raise ValueError unless runs of sequences share whole pages of this size."""
        uneven = [num_keys for level in self.levels for _, num_keys in level if num_keys % page_size]
        if uneven:
            raise ValueError(
                f"cache must have a page size that divides the {uneven[0]} keys that sequences share, got {page_size}; "
                "share whole pages"
            )

    def scratch_size(self) -> ScratchSize:
        """Return the largest scratch of the launches, which run one after the other."""
        sizes = [launch.scratch_size() for launch in self.launches]
        return ScratchSize(max(size.total for size in sizes), max(size.counters for size in sizes))

    def compile_keys(self) -> frozenset[Hashable]:
        """Return a key of each kernel that is launched, but for the one that combines levels."""
        return frozenset().union(*(launch.compile_keys() for launch in self.launches))

    def with_most_partitions(self) -> "SharedPrefixLaunch":
        """Return the launch with the most partitions that one with its kernels may have, which is for scratch alone."""
        return replace(self, launches=tuple(launch.with_most_partitions() for launch in self.launches))

    def for_cache(self, cache: PagedKVCache, q: Any = None) -> "SharedPrefixLaunch":
        """Return the launch whose parts serve a cache, and queries if they are given."""
        return replace(self, launches=tuple(launch.for_cache(cache, q) for launch in self.launches))

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return the runner for a batch, with scratch in a workspace of `scratch_size` bytes."""
        from quire.kernels.shared_prefix.runner import SharedPrefixRunner

        return SharedPrefixRunner(self, batch, workspace)

    def __str__(self) -> str:
        runs = [(max(keys for _, keys in level), max(seqs for seqs, _ in level)) for level in self.levels]
        groups = [f"up to {keys:,} keys of up to {seqs} sequences" for keys, seqs in runs]
        parts = "; ".join(f"{name}: {part}" for name, part in zip([*groups, "own keys"], self.launches, strict=True))
        return f"shared prefixes, {self.saved_keys:,} keys not read again; {parts}"


def flattened(levels: tuple[Level, ...]) -> tuple[int, ...]:
    """Return levels as numbers: of each, how many runs it has, and then these."""
    return tuple(number for level in levels for number in (len(level), *(n for run in level for n in run)))


def levels_of(numbers: Sequence[int]) -> tuple[Level, ...]:
    """Return the levels that `flattened` was given."""
    levels, rest = [], iter(numbers)
    for num_runs in rest:
        levels.append(tuple((next(rest), next(rest)) for _ in range(num_runs)))
    return tuple(levels)


def num_shared_keys(levels: tuple[Level, ...]) -> list[int]:
    """Return how many keys each sequence shares, over all levels."""
    by_level = [[num_keys for num_seqs, num_keys in level for _ in range(num_seqs)] for level in levels]
    return [sum(keys) for keys in zip(*by_level, strict=True)]


def first_seqs(level: Level) -> list[int]:
    """Return the first sequence of each run of a level, and the number of sequences."""
    return [0, *accumulate(num_seqs for num_seqs, _ in level)]


def is_rectangle(seqs: list[int], entries: list[int]) -> bool:
    """Return whether rows of a page table, each from one of its entries on, are a rectangular table again."""
    return len({b - a for a, b in pairwise(seqs)}) <= 1 and len(set(entries)) == 1


def propose(
    request: Request, levels: tuple[Level, ...], choose: Callable[[Request], tuple[Launch, str]]
) -> tuple[SharedPrefixLaunch, str]:
    """Return a launch for shared prefixes, and the reasons for its parts.

    Args:
        request: the whole batch.
        levels: the runs of each level.
        choose: returns a launch for the batch of one level, and the reason.
    """
    parts, before = [], [0] * request.num_seqs  # keys of the levels above
    for level in levels:
        firsts = first_seqs(level)[:-1]
        is_flat = not is_rectangle(firsts, [before[seq] for seq in firsts])
        parts.append(choose(replace(level_request(request, level), has_flat_table=is_flat)))
        before = [sum(keys) for keys in zip(before, num_shared_keys((level,)), strict=True)]
    bounds = request.bounds
    own, is_flat = replace(bounds, max_seq_len=bounds.max_seq_len - min(before)), len(set(before)) > 1
    parts.append(choose(replace(request, bounds=own, has_flat_table=is_flat)))
    launch = SharedPrefixLaunch(request, levels, tuple(part for part, _ in parts))
    return launch, "; ".join(dict.fromkeys(reason for _, reason in parts))


def level_request(request: Request, level: Level) -> Request:
    """Return the request of a level, where each run is one sequence, whose queries see all of its keys."""
    bounds = request.bounds
    longest = max(num_seqs for num_seqs, _ in level) * bounds.max_query_len
    of_level = Bounds(min(longest, bounds.num_tokens), max(num_keys for _, num_keys in level), bounds.num_tokens)
    spec = spec_of_shared_keys(request.spec)
    return replace(request, spec=spec, num_seqs=len(level), has_cu_seqlens=True, bounds=of_level)


@lru_cache
def spec_of_shared_keys(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of a level: every query sees every key, and sinks count with each sequence's own keys."""
    return replace(spec, causal=False, sinks=False)
