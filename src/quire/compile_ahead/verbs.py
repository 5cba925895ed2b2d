"""The verbs of a server that starts: `workspace_size`, `warmup`, `begin_warmup` and `no_compilation`.

`workspace_size` returns the largest scratch of the launches that batches within limits can need (`launches.py`).
`warmup` compiles each of their kernels once. `no_compilation` raises if a launch was not covered.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from quire import log
from quire.batch import ChosenKeys
from quire.cache import PagedKVCache
from quire.checks.limits import check_extra, check_limits, check_what_launches
from quire.checks.norm_rope import check_norm_rope_alone
from quire.compile_ahead import exported, processes
from quire.compile_ahead.empty_launches import EmptyLaunches
from quire.compile_ahead.launches import distinct_launches, scratch_within
from quire.dispatch.device import HAS_TRITON, device_properties, interprets, is_served_by_torch
from quire.errors import check_device, check_served, describe
from quire.norm_rope import QKNorm, Rope
from quire.spec import AttentionSpec

WHERE = "leave it out for the current GPU, or the CPU where there is none"


def workspace_size(
    spec: AttentionSpec,
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    min_seq_len: int = 1,
    device: torch.device | str | None = None,
    batch_invariant: bool = False,
    intervals: bool = False,
    trees: bool = False,
    chosen: ChosenKeys | None = None,
    extra_chosen: ChosenKeys | None = None,
) -> int:
    """Return how many bytes of scratch are enough for every plan of every batch within the bounds.

    Args:
        spec: what is computed.
        max_num_seqs: most sequences of a batch.
        max_num_tokens: most query tokens of a batch.
        max_seq_len: most keys of a sequence.
        min_seq_len: least `max_seq_len` of a plan.
        device: where; the current GPU when not given, or the CPU where there is none.
        batch_invariant: whether the plans are.
        intervals: whether batches may have `key_begin`.
        trees: whether batches may have `tree_bits`.
        chosen: lists like those of the batches, if all have chosen keys.
        extra_chosen: the same of `extra_chosen`.

    Returns:
        Bytes, for `plan(..., workspace=torch.zeros(bytes, dtype=torch.uint8, device=device))` without num_splits,
        config and kernel. Without batch_invariant they depend on the device and the spec, hardly on the bounds. 0 where
        PyTorch serves the device.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a bound is out of range.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> quire.workspace_size(spec, max_num_seqs=64, max_num_tokens=8192, max_seq_len=16384, device="cpu")
        0
    """
    where = check_device("device", device, WHERE) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_served("device", where)
    numbers = max_num_seqs, max_num_tokens, max_seq_len, 1, min_seq_len
    limits = check_limits(spec, *numbers, batch_invariant, intervals, trees, chosen, extra_chosen)
    if is_served_by_torch(where):
        return 0
    return scratch_within(spec, device_properties(where), *limits)


def warmup(
    spec: AttentionSpec,
    cache: PagedKVCache,
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    min_query_len: int = 1,
    min_seq_len: int = 1,
    batch_invariant: bool = False,
    intervals: bool = False,
    trees: bool = False,
    chosen: ChosenKeys | None = None,
    extra_chosen: ChosenKeys | None = None,
    extra_cache: PagedKVCache | None = None,
    return_lse: bool = False,
    out_scale: bool = False,
    per_head_dtype: torch.dtype | None = None,
    append: bool = False,
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    kernels: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[str]:
    """Compile and load the write kernel and every attention kernel that batches within the bounds can need.

    Kernels are compiled several at a time, by threads and by further processes, and stay in Triton's cache.

    What is covered: plans to which no `num_splits`, `config`, `kernel` or `shared_prefix` is given, with a workspace or
    without; batches with and without `cu_seqlens_q`, with rectangular page tables and without `query_offsets`; queries,
    outputs, new keys and new values that are contiguous, or strided in multiples of 16 elements, as slices of a fused
    projection are, at addresses that 16 divides. Everything else that attention is given may be a slice at any address:
    `seq_lens`, `page_table`, `cu_seqlens_q`, `slot_mapping`, positions, sinks, slopes, scales and the lse, whose rows
    may be apart by any stride. Calls with and without the lse, an out_scale or new tokens, and tensors of another
    dtype, need a warm-up each.

    Args:
        spec: what is computed.
        cache: one layer's pages; its layout, strides and scales decide what is compiled. It is neither read nor
            written.
        max_num_seqs: most sequences of a batch.
        max_num_tokens: most query tokens of a batch.
        max_seq_len: most keys of a sequence.
        min_query_len: fewest queries of a batch's longest sequence. A server that runs decodes and prompts in batches
            of their own needs fewer kernels for the prompts.
        min_seq_len: least `max_seq_len` of a plan. A server that plans for more than 1,024 keys, however short its
            sequences are, may need fewer kernels.
        batch_invariant: whether the plans are.
        intervals: whether batches may have `key_begin`, and with `trees`, both.
        trees: whether batches may have `tree_bits`.
        chosen: lists like those of the batches, if all have chosen keys: `width`, `block_size`, `are_slots` and whether
            there are `lens` decide what is compiled. A server that also runs batches without them warms up for each.
        extra_chosen: the same of `extra_chosen`.
        extra_cache: one layer's second cache, with `extra_chosen`.
        return_lse: whether the lse is asked for.
        out_scale: whether `quire.attention` is given one. A launch that quantises its output is another kernel.
        per_head_dtype: dtype of `sinks` and `alibi_slopes`; when not given, sinks are of the spec's dtype, as weights
            of a model are, and slopes are float32.
        append: whether `quire.attention` is given the step's keys and values. A launch that writes them is another
            kernel than one that does not. A server that makes both kinds of calls warms up for each.
        rope: as `quire.attention` is given it, but for positions, which may be any number; only with `append`. The
            dtypes, the strides and the width of its tables decide what is compiled.
        qk_norm: as `quire.attention` is given it; only with `append`.
        kernels: a folder that `quire warmup --export` wrote; what it has is loaded and not compiled. Where it was made
            for another Triton, target or Quire, a warning says so, and all is compiled. When not given, the folder that
            the variable QUIRE_KERNELS names, if it is set.
        progress: called with the description of each launch before it is compiled, for instance `print`.

    Returns:
        The descriptions of what was compiled.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a bound is out of range.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> cache = quire.PagedKVCache.empty(spec, num_pages=64, page_size=16, device="cpu")
        >>> quire.warmup(spec, cache, max_num_seqs=64, max_num_tokens=8192, max_seq_len=16384)  # none on a CPU
        []
    """
    numbers = max_num_seqs, max_num_tokens, max_seq_len, min_query_len, min_seq_len
    limits = check_limits(spec, *numbers, batch_invariant, intervals, trees, chosen, extra_chosen)
    check_what_launches(spec, cache, return_lse, out_scale, append, per_head_dtype)
    check_extra(cache, extra_chosen, extra_cache)
    for name, value in (("rope", rope), ("qk_norm", qk_norm)):
        if value is not None and not append:
            raise ValueError(f"append must be True with {name}, got False; {name} is for new tokens")
    norm_rope: dict[str, Any] = check_norm_rope_alone(rope, qk_norm, cache)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function, got {describe(progress)}; pass print, for instance")
    device, folder = cache.device, exported.folder_of(kernels)
    if is_served_by_torch(device):
        return []
    from quire.kernels.launcher import compile_together

    bounds = spec, device_properties(device), *limits
    blank = EmptyLaunches(spec, cache, (), return_lse, append, norm_rope, out_scale, per_head_dtype, extra_cache)
    warm_up = blank.with_launches(distinct_launches(*bounds))
    names: list[str] = []
    began = time.perf_counter()

    def report(name: str) -> None:
        names.append(name)
        if progress:
            progress(name)

    with processes.finished(bounds):
        exported.load(folder, device)
        with contextlib.ExitStack() as helpers, compile_together(device) as num_missing:
            warm_up.run(report)
            missing = num_missing()
            helpers.enter_context(processes.helping(warm_up, processes.num_helpers(missing)))
        warm_up.run()  # which loads them
    if log.is_on(log.START):
        took = f"{time.perf_counter() - began:.1f} s"
        log.START.debug(
            "warm-up of %s: %d launches in %s, %d kernels were missing", log.words_of(spec), len(names), took, missing
        )
    return names


def begin_warmup(
    spec: AttentionSpec,
    cache: PagedKVCache,
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    min_query_len: int = 1,
    min_seq_len: int = 1,
    device: torch.device | str | None = None,
    batch_invariant: bool = False,
    intervals: bool = False,
    trees: bool = False,
    chosen: ChosenKeys | None = None,
    extra_chosen: ChosenKeys | None = None,
    extra_cache: PagedKVCache | None = None,
    return_lse: bool = False,
    out_scale: bool = False,
    per_head_dtype: torch.dtype | None = None,
    append: bool = False,
    kernels: str | os.PathLike[str] | None = None,
) -> None:
    """Start a process that compiles the kernels of a later `warmup`. The cache need not exist yet.

    A server calls this before it loads weights. It calls `warmup` with the same arguments when its cache exists.
    `warmup` waits for the process and compiles what is missing. The process ends with the server at the latest.

    Args:
        spec: what is computed.
        cache: like the one to come, but for its device and its number of pages; it is neither read nor written. On the
            device "meta" it takes no memory.
        max_num_seqs: most sequences of a batch. This and what follows are as for `warmup`.
        max_num_tokens: most query tokens of a batch.
        max_seq_len: most keys of a sequence.
        min_query_len: fewest queries of a batch's longest sequence.
        min_seq_len: least `max_seq_len` of a plan.
        device: of the cache to come; the current GPU when not given, or the CPU where there is none.
        batch_invariant: whether the plans are.
        intervals: whether batches may have `key_begin`.
        trees: whether batches may have `tree_bits`.
        chosen: lists like those of the batches, if all have chosen keys.
        extra_chosen: the same of `extra_chosen`.
        extra_cache: like the second cache to come, with `extra_chosen`.
        return_lse: whether the lse is asked for.
        out_scale: whether `quire.attention` is given one.
        per_head_dtype: dtype of `sinks` and `alibi_slopes`.
        append: whether `quire.attention` is given the step's keys and values.
        kernels: a folder that `quire warmup --export` wrote, which is loaded before the process starts.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a bound is out of range.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> cache = quire.PagedKVCache.empty(spec, num_pages=64, page_size=16, device="cpu")
        >>> limits = {"max_num_seqs": 64, "max_num_tokens": 8192, "max_seq_len": 16384}
        >>> quire.begin_warmup(spec, cache, device="cpu", **limits)  # nothing to compile on a CPU
    """
    where = check_device("device", device, WHERE) or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numbers = max_num_seqs, max_num_tokens, max_seq_len, min_query_len, min_seq_len
    limits = check_limits(spec, *numbers, batch_invariant, intervals, trees, chosen, extra_chosen)
    check_what_launches(spec, cache, return_lse, out_scale, append, per_head_dtype)
    check_extra(cache, extra_chosen, extra_cache)
    folder = exported.folder_of(kernels)
    if where.type in ("cpu", "cuda") and not interprets() and not is_served_by_torch(where):
        blank = EmptyLaunches(spec, cache, (), return_lse, append, {}, out_scale, per_head_dtype, extra_cache)
        exported.load(folder, where)
        if log.is_on(log.START):
            log.say_once(log.START, f"begin_warmup of {log.words_of(spec)}, in a process")
        processes.begin(blank, (spec, device_properties(where), *limits), where)


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    """Raise if a Quire kernel is compiled, or loaded from Triton's cache, in this context. Use it after `warmup`.

    Raises:
        RuntimeError: a kernel was compiled or loaded.

    Examples:
        >>> with quire.no_compilation():
        ...     pass  # serve
    """
    if not HAS_TRITON:
        yield
        return
    from quire.kernels.launcher import LAUNCHED
    from quire.triton_internals import before_loading

    def refuse(name: str) -> None:
        if name in LAUNCHED:
            raise RuntimeError(
                f"{name} must not be compiled in service, got a launch that warmup did not cover; widen its bounds"
            )

    with before_loading(refuse):
        yield
