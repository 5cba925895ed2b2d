"""Checks of a server's limits, and of what else decides which kernels are compiled before its first request."""

import itertools
from typing import Any

import torch

from quire.batch import ChosenKeys
from quire.cache import PagedKVCache
from quire.checks.attention import PER_HEAD_DTYPES, check_like
from quire.checks.cache import check_cache
from quire.checks.plan import MAX_TOKENS, check_chosen, check_extra_chosen, check_per_token, check_spec
from quire.errors import UnsupportedError, check_flag, check_integer, describe
from quire.spec import UNBOUNDED, AttentionSpec, dtype_names


def check_limits(
    spec: AttentionSpec,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    min_query_len: int,
    min_seq_len: int,
    batch_invariant: bool,
    intervals: bool,
    trees: bool,
    chosen: ChosenKeys | None,
    extra_chosen: ChosenKeys | None = None,
) -> tuple[Any, ...]:
    """Check a server's limits; return the arguments of `distinct_launches` after the device's properties."""
    check_spec(spec)
    check_flag("batch_invariant", batch_invariant, "say whether the plans are")
    advice = "pass the server's limit"
    num_seqs = check_integer("max_num_seqs", max_num_seqs, advice, 1, UNBOUNDED)
    num_tokens = check_integer("max_num_tokens", max_num_tokens, advice, 1, MAX_TOKENS)
    seq_len = check_integer("max_seq_len", max_seq_len, advice, 1, UNBOUNDED)
    advice = "pass the fewest queries of a batch's longest sequence"
    least = check_integer("min_query_len", min_query_len, advice, 1, num_tokens)
    shortest = check_integer("min_seq_len", min_seq_len, "pass the least max_seq_len of a plan", 1, seq_len)
    kinds = kinds_of_batches(spec, intervals, trees, chosen, extra_chosen)
    return num_seqs, num_tokens, seq_len, batch_invariant, kinds, least, shortest


def kinds_of_batches(
    spec: AttentionSpec,
    intervals: bool,
    trees: bool,
    chosen: ChosenKeys | None,
    extra_chosen: ChosenKeys | None,
) -> tuple[tuple[Any, ...], ...]:
    """Return of each kind of batches what `launches.kinds` takes: all have chosen keys, or the first has nothing."""
    check_flag("intervals", intervals, "say whether batches may have them")
    check_flag("trees", trees, "say whether batches may have them")
    if chosen is not None:
        if not isinstance(chosen, ChosenKeys):
            raise TypeError(f"chosen must be ChosenKeys, got {describe(chosen)}; pass lists like those of batches")
        if intervals or trees:
            name = "intervals" if intervals else "trees"
            raise ValueError(f"{name} must be False with chosen, got True; warm up for each of them")
        check_per_token(spec, "chosen")
        check_chosen(spec, chosen)
        if extra_chosen is not None:
            check_extra_chosen(spec, extra_chosen)
        return ((False, False, False, chosen.kind, None if extra_chosen is None else extra_chosen.kind),)
    kinds = tuple(itertools.product((False, True)[: 1 + intervals], (False, True)[: 1 + trees]))
    for has_intervals, has_tree in kinds:
        if has_intervals or has_tree:
            check_per_token(spec, "tree_bits" if has_tree else "key_begin")
    return kinds


def check_what_launches(
    spec: AttentionSpec,
    cache: PagedKVCache,
    return_lse: bool,
    out_scale: bool,
    append: bool,
    per_head_dtype: torch.dtype | None,
) -> None:
    """Check what else decides which kernels a warm-up compiles."""
    is_dtype = isinstance(per_head_dtype, torch.dtype) and per_head_dtype in PER_HEAD_DTYPES
    if per_head_dtype is not None and not is_dtype:
        raise UnsupportedError(
            f"per_head_dtype must be {dtype_names(PER_HEAD_DTYPES)}, got {describe(per_head_dtype)}; "
            "pass the dtype of sinks or alibi_slopes"
        )
    check_cache(cache, spec)
    check_flag("return_lse", return_lse, "say whether the lse is asked for")
    check_flag("out_scale", out_scale, "say whether attention is given one")
    check_flag("append", append, "say whether attention is given the step's keys and values")


def check_extra(cache: PagedKVCache, extra_chosen: ChosenKeys | None, extra_cache: Any) -> None:
    """Check the second cache of a warm-up, which is there if batches have lists of its keys."""
    if (extra_chosen is None) != (extra_cache is None):
        given, missing = ("extra_cache", "extra_chosen")[:: 1 if extra_chosen is None else -1]
        raise ValueError(f"{missing} must be given with {given}, got None; pass lists and their cache")
    if extra_cache is not None:
        check_like(extra_cache, cache)
