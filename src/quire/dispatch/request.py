"""`Request`: a batch to be planned for, in host values; and `Options`: what the caller of `quire.plan` asks for."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from quire.dispatch.config import KernelConfig
from quire.dispatch.device import DeviceProperties
from quire.score_functions import softcap_of
from quire.spec import AttentionSpec

MOST_NEW_TOKENS = 16  # of a sequence, that a program of `append` writes before it reads them
MOST_SEQS_TO_APPEND = 64  # 32 gain 1.5 to 2.6 %, 128 lose 0.3 to 2.9 % (NVIDIA H200, 2026-11-23)
STEP_KEYS = 64  # rounding up to a multiple of it adds no tile where tiles have 64, 128 or 256 keys


@lru_cache(maxsize=256)
def spec_for_kernels(spec: AttentionSpec) -> AttentionSpec:
    """Return the same spec, with a softcap in place of a function that is one: kernels have loops for it."""
    if spec.score is None or spec.softcap is not None or spec.alibi:
        return spec
    cap = softcap_of(spec.score)
    return spec if cap is None else replace(spec, score=None, softcap=cap)


@dataclass(frozen=True)
class Bounds:
    """Upper bounds of a batch.

    Attributes:
        max_query_len: most queries of any sequence.
        max_seq_len: most keys of any sequence.
        num_tokens: most query tokens of the batch.
    """

    max_query_len: int
    max_seq_len: int
    num_tokens: int

    def for_decision(self) -> "Bounds":
        """Return the bounds that a launch is decided for.

        Those of decode have the keys rounded up to a multiple of STEP_KEYS. Decoding sequences
        grow by one key in each step. A server then decides once in STEP_KEYS steps.
        """
        if self.max_query_len != 1 or self.max_seq_len <= STEP_KEYS:
            return self
        return Bounds(1, STEP_KEYS * cdiv(self.max_seq_len, STEP_KEYS), self.num_tokens)


@dataclass(frozen=True)
class Request:
    """A batch to be planned for.

    Attributes:
        spec: what is computed.
        num_seqs: sequences of the batch.
        has_cu_seqlens: whether the batch has `cu_seqlens_q`; else every sequence has one query.
        bounds: of the batch.
        device: the device's properties.
        has_intervals: whether the batch has `key_begin`.
        has_tree: whether the batch has `tree_bits`.
        has_flat_table: whether the batch has `cu_pages`.
        chosen: `ChosenKeys.kind` of the batch's `chosen`; None without it.
        extra_chosen: the same of its `extra_chosen`.
    """

    spec: AttentionSpec
    num_seqs: int
    has_cu_seqlens: bool
    bounds: Bounds
    device: DeviceProperties
    has_intervals: bool = False
    has_tree: bool = False
    has_flat_table: bool = False
    chosen: tuple[int, bool, bool, int] | None = None
    extra_chosen: tuple[int, bool, bool, int] | None = None

    @property
    def is_ragged(self) -> bool:
        """Whether sequences must differ in their numbers of queries. Some may then have one query."""
        return self.bounds.num_tokens < self.num_seqs * self.bounds.max_query_len

    @property
    def rows_per_seq(self) -> int:
        """Most rows of any sequence. A row is a query token and a query head of one KV head."""
        return self.bounds.max_query_len * self.spec.group_size

    @cached_property
    def keys_seen(self) -> int:
        """Most keys that a query sees."""
        left, right = self.spec.window
        return self.bounds.max_seq_len if self.per_token else min(self.bounds.max_seq_len, left + right + 1)

    @property
    def has_few_new_tokens(self) -> bool:
        """Whether a launch that attends should write the step's keys and values too."""
        return self.bounds.max_query_len <= MOST_NEW_TOKENS and self.num_seqs <= MOST_SEQS_TO_APPEND

    @property
    def per_token(self) -> str | None:
        """What the batch says of each token instead of the spec's band, in words; None if nothing."""
        if self.chosen is not None:
            return "chosen keys"
        return "draft trees" if self.has_tree else "intervals of keys" if self.has_intervals else None


class Options(NamedTuple):
    """What the caller of `quire.plan` asks for.

    Attributes:
        num_splits: into how many splits the keys of a sequence are cut; chosen when None.
        config: of the portable kernels; chosen when None.
        batch_invariant: whether a result depends on its sequence alone.
        kernel: "portable", "hopper", "decoded", "mla", "mla_hopper", "chosen" or "chosen_hopper"; None for the fastest.
    """

    num_splits: int | None = None
    config: KernelConfig | None = None
    batch_invariant: bool = False
    kernel: str | None = None


def cdiv(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)
