"""`Plan`: how a batch is launched, decided once per step (or once per captured graph) and shared by all layers.

A plan is made from host numbers only. Lengths and page tables stay on the device. They may change between launches,
within the bounds that the plan was made for. Some kernels find a schedule from the lengths, once for all layers. It is
found again after PyTorch wrote to the lengths, and in each replay of a captured graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from quire import log
from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.checks.batch import check_reads
from quire.checks.plan import check_plan_arguments
from quire.checks.prefix import check_shared_prefix
from quire.dispatch.config import KernelConfig, padded
from quire.dispatch.constants import CHOICES
from quire.dispatch.device import device_properties, interprets, is_served_by_torch
from quire.dispatch.request import Bounds, Options, Request, spec_for_kernels
from quire.errors import UnsupportedError
from quire.kernels import ranges, scratch, times
from quire.kernels.choose import CHOSEN, FAMILIES, choose, pays_to_share, predicted, predicted_us, variants
from quire.kernels.cpu import launch as cpu
from quire.kernels.launch import Launch, Runner
from quire.kernels.portable.runner import PortableRunner
from quire.kernels.shared_prefix import launch as shared
from quire.launch_codec import decode, decode_options, encode, encode_options
from quire.spec import AttentionSpec


class Asked(NamedTuple):
    """What `plan` was asked for, without bounds, as operators take it: numbers and strings.

    The strings are equal in all steps of a server. `torch.compile` compiles once for each string that it sees.

    Attributes:
        spec: encoded.
        options: encoded.
        shared_prefix: `shared.flattened` levels of shared keys.
    """

    spec: str
    options: str
    shared_prefix: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """How a batch is launched. `print(plan)` shows the decision and the reason.

    Attributes:
        spec: what is computed.
        batch: the sequences, read on the device at launch.
        bounds: the upper bounds that the plan was made for: `max_query_len`, `max_seq_len`, `num_tokens`.
        launch: which kernel, and how: a launch class of `quire.kernels`, such as `PortableLaunch`.
        reason: why this launch was chosen, in words.
        memory: the workspace, or memory that no launch reads: for `torch.compile`, whose code is the same for both.
        runner: runs the launch; `quire.attention` calls it.
        asked: for `torch.compile`, from which its operator decides the launch again; None if `plan` did not make it.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> batch = quire.Batch(torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, dtype=torch.int32))
        >>> print(quire.plan(spec, batch, max_query_len=1, max_seq_len=128))  # on a machine without a GPU
        Plan(4 sequences, at most 1 query and 128 keys each; PyTorch; CPU tensors; Triton has no driver for CPUs)
    """

    spec: AttentionSpec
    batch: Batch
    bounds: Bounds
    launch: Launch
    reason: str
    memory: torch.Tensor
    runner: Runner
    asked: Asked | None

    @property
    def workspace(self) -> torch.Tensor | None:
        """Memory for the launch's scratch; None if it needs none."""
        return self.memory if self.launch.scratch_size().total else None

    @property
    def kernel(self) -> str:
        """Name of the kernel family.

        It is "block", "split_kv", "hopper", "decoded", "mla", "mla_hopper", "chosen", "chosen_hopper", "torch" or
        "shared_prefix".
        """
        return self.launch.name

    @property
    def saved_keys(self) -> int:
        """Keys that only a flat plan would read: of each run, its shared keys times its sequences after the first."""
        return self.launch.saved_keys if isinstance(self.launch, shared.SharedPrefixLaunch) else 0

    @property
    def predicted_us(self) -> float | None:
        """The µs that the launch is predicted to take on the GPU, at the bounds.

        None where PyTorch serves the batch, and for chosen keys. It is an estimate for sequences that are all as long
        as the bounds say, without the launch that finds a schedule once for all layers. Of a plan for several lengths,
        `predict` tells what shorter ones take.
        """
        return predicted_us(self.launch)

    def predict(self, seq_lens: Sequence[int], query_lens: Sequence[int] | None = None) -> float | None:
        """Return the µs that the launch is predicted to take for sequences of other lengths within the bounds.

        A scheduler may ask this before it decides what is in a step. It reads nothing from the device.

        Args:
            seq_lens: keys of each sequence.
            query_lens: queries of each sequence; one of each when not given.

        Returns:
            µs; None where PyTorch serves the batch, for shared prefixes and for chosen keys.

        Raises:
            ValueError: there are not as many lengths of queries as of keys.

        Examples:
            >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
            >>> batch = quire.Batch(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
            >>> plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=8)
            >>> plan.predict([8]) is None  # on a machine without a GPU
            True
        """
        queries = [1] * len(seq_lens) if query_lens is None else query_lens
        if len(queries) != len(seq_lens):
            raise ValueError(
                f"query_lens must have a number for each of {len(seq_lens)} sequences, got {len(queries)}; "
                "leave it out for one query each"
            )
        if self.launch.name == "shared_prefix" or self.predicted_us is None:
            return None
        lens = tuple((int(q), int(s), 1) for q, s in zip(queries, seq_lens, strict=True))
        return predicted(self.launch, lens)

    def launch_for(self, cache: PagedKVCache, q: Any = None) -> Launch:
        """Return what `attention` launches for a cache, and for queries if they are given.

        A plan is made before both are known. Where a kernel for Hopper GPUs does not serve them, the fallback that
        `print(plan)` names takes its place: pages, strides or addresses that TMA cannot address, or scales per token.

        Args:
            cache: as `attention` gets it.
            q: as `attention` gets it.

        Returns:
            `launch` itself, or its fallback. Its `name` is a kernel family, and `print` describes it.

        Examples:
            >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
            >>> batch = quire.Batch(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
            >>> plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=8)
            >>> plan.launch_for(quire.PagedKVCache.empty(spec, 4, 4)).name  # on a machine without a GPU
            'torch'
        """
        return self.launch.for_cache(cache, q)

    def update(self) -> None:
        """Say that lengths have changed: the next launch reads them again.

        Nothing has to be said where PyTorch wrote them, to a captured graph, or to a new plan. A kernel of another
        library is not noticed. If it writes lengths within a graph, call this in the capture, after that kernel.

        Examples:
            >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
            >>> batch = quire.Batch(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
            >>> quire.plan(spec, batch, max_query_len=1, max_seq_len=8).update()
        """
        if not is_served_by_torch(self.batch.device):
            from quire.kernels.scheduler import schedulers_for  # which imports Triton

            for scheduler in schedulers_for(self.batch):  # each is found before the next launch that reads it
                scheduler.forget()

    def appender(self, cache: PagedKVCache) -> PortableRunner | None:
        """Return what writes a step's keys and values in the launch that attends, or None where no launch does both."""
        runner = self.runner
        return runner if isinstance(runner, PortableRunner) and runner.can_append(cache) else None

    def check_before_write(self, cache: PagedKVCache, slot_mapping: torch.Tensor) -> None:
        """Raise ValueError where the runner would, so that nothing is written by then."""
        if isinstance(self.launch, shared.SharedPrefixLaunch):
            self.launch.check_page_size(cache.page_size)
        if is_served_by_torch(self.batch.device):
            lens = {"max_query_len": self.bounds.max_query_len, "max_seq_len": self.bounds.max_seq_len}
            check_reads(self.batch, cache, self.spec, num_tokens=slot_mapping.shape[0], **lens)

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep what the plan was made from. A copy, also in another process, is a new plan with memory of its own."""
        if self.asked is None:
            raise TypeError(f"plan must be from `quire.plan` to be copied, got one for {self.launch}; make another one")
        return plan_again, (self.batch, self.bounds, self.asked)

    def __repr__(self) -> str:
        time = "" if self.predicted_us is None else f"; predicted {self.predicted_us:.3g} µs"
        return f"Plan({words_of_batch(self.batch, self.bounds, self.launch)}; {self.launch}{time}; {self.reason})"


def words_of_batch(batch: Batch, bounds: Bounds, launch: Launch) -> str:
    """Describe what a plan was made for."""
    queries, keys = count(bounds.max_query_len, "query", "queries"), count(bounds.max_seq_len, "key", "keys")
    seen = "" if launch.request.per_token is None else f", {launch.request.per_token}"
    return f"{count(batch.num_seqs, 'sequence', 'sequences')}, at most {queries} and {keys} each{seen}"


def count(number: int, one: str, many: str) -> str:
    """Return a number of things, in words."""
    return f"{number} {one if number == 1 else many}"


def plan(
    spec: AttentionSpec,
    batch: Batch,
    *,
    max_query_len: int,
    max_seq_len: int,
    num_tokens: int | None = None,
    num_splits: int | None = None,
    config: KernelConfig | None = None,
    batch_invariant: bool = False,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
    shared_prefix: int | Sequence[Sequence[tuple[int, int]]] | None = None,
) -> Plan:
    """Decide how `batch` is launched, from host numbers only.

    Make a plan once per step and pass it to every layer with this spec. For a captured graph, make it once, with the
    largest lengths that the graph has to serve, before the capture begins. A plan holds scratch memory: two plans may
    run at the same time, each on the stream that it was made on; one plan may not.

    Lengths may change within the bounds. A plan notices what PyTorch writes to them, and a captured graph reads them in
    each replay. After a kernel of another library wrote to them, make a new plan or call `plan.update()`: else results
    may be NaN, but never those of other lengths. The same holds for intervals, but without one, results may be wrong.

    Args:
        spec: what is computed.
        batch: the sequences.
        max_query_len: an upper bound of any sequence's queries in this batch.
        max_seq_len: an upper bound of any sequence's keys.
        num_tokens: an upper bound of the batch's query tokens; `num_seqs * max_query_len` when not given.
        num_splits: into how many splits the keys of a sequence are cut, on average over the batch, from 1 to 128.
            Chosen to fill the device when not given.
        config: configuration of the portable kernels; the one of least predicted time when not given.
        batch_invariant: make each token's result depend on its sequence alone, bit for bit. It then does not depend on
            the rest of the batch, on how a prompt is split into chunks, or on the bounds given here: decode, drafts,
            chunks and whole prompts have the same bits. On an H200, decode takes 1.08 times as long in the mean and
            prompts 1.5 times; with heads of 256 some 1.9 times, with heads of 512 2.4 times. Decode over latents takes
            2.4 times as long, and up to 5.5 times.
        workspace: uint8 memory for the scratch, all 0 when it is first used. Plans that never run at the same time may
            use the same workspace. One of `quire.workspace_size` bytes serves every plan within those bounds to which
            no num_splits, config or kernel is given. Allocated when not given.
        kernel: "portable" for the portable kernel, "hopper" for the kernel for prompts on a Hopper GPU, "decoded" for
            the same after a launch that decodes a quantised cache; for latents, "mla" for the portable kernel,
            "mla_hopper" for that for Hopper GPUs; for chosen keys, "chosen" for the portable kernels, "chosen_hopper"
            for that for latents on Hopper GPUs; the fastest when not given. A plan is made before the cache is known.
            If a kernel for Hopper GPUs does not serve the cache's pages, strides or scales, the fallback that the plan
            names does; `launch_for` says which one it is.
        shared_prefix: leading keys that sequences have in common, in the same pages. They are read once for all queries
            of a group, and each query attends to them and to its own keys; the result is that of a flat plan. A number
            says how many keys all sequences share, a multiple of the page size. A list has levels, and a level is a
            list of (num_seqs, num_keys): runs of neighbouring sequences, and how many keys each run shares after those
            of the level before. `[[(64, 512)], [(8, 1024), (56, 0)]]`: all of 64 sequences share 512 keys, and the
            first 8 of them share 1,024 more. A sequence with queries holds its shared keys and after them its queries'
            own; a row without queries shares none, or has its run's pages.

    Returns:
        The plan, with its scratch memory.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a bound is negative, num_splits is out of range, config does not fit the spec, the workspace is too
            small, or both the spec and the batch say which keys a token sees.
        UnsupportedError: bfloat16 under Triton's interpreter, options that PyTorch does not serve for CPU tensors, a
            config with hints for another target, a kernel that does not serve the request, or a device that has none;
            shared_prefix with a window, ALiBi, a flat page table, query_offsets, or options that fix the order of sums.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> table, seq_lens = torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
        >>> plan = quire.plan(spec, quire.Batch(table, seq_lens), max_query_len=1, max_seq_len=128)
        >>> plan.bounds.num_tokens  # at most one query token of each of 4 sequences
        4
        >>> samples = quire.plan(spec, quire.Batch(table, seq_lens), max_query_len=1, max_seq_len=128, shared_prefix=96)
        >>> samples.saved_keys  # 3 of 4 sequences do not read the 96 shared keys again
        288
    """
    bounds, num_splits = check_plan_arguments(
        spec,
        batch,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_tokens=num_tokens,
        num_splits=num_splits,
        config=config,
        batch_invariant=batch_invariant,
        workspace=workspace,
        kernel=kernel,
    )
    levels = ()
    if shared_prefix is not None:
        fixed = {"num_splits": num_splits, "config": config, "batch_invariant": batch_invariant or None}
        levels = check_shared_prefix(shared_prefix, spec, batch, bounds, **fixed)
    options = Options(num_splits, config, batch_invariant, kernel)
    launch, reason = decide_launch(spec, batch, bounds, options, levels)
    if workspace is not None:
        check_counters(launch)
    asked = Asked(encode(spec), encode_options(options), shared.flattened(levels))
    made = make_plan(spec, batch, launch, reason, workspace, bounds, asked)
    if log.PLAN.isEnabledFor(log.DEBUG):
        log_decision(made, options)
    return made


def is_worth_sharing(
    spec: AttentionSpec,
    batch: Batch,
    *,
    shared_prefix: int,
    max_query_len: int,
    max_seq_len: int,
    num_tokens: int | None = None,
) -> bool:
    """Return whether a plan is predicted to take less with this `shared_prefix` than without it.

    It is not for PyTorch, of which nothing is predicted, nor where shared prefixes are not served. Nothing is launched.
    Source: the predicted times of `Plan.predicted_us`. Keys that are read again come from a cache, and are cheaper.

    Args:
        spec: what is computed.
        batch: the sequences; [num_seqs] lengths and [num_seqs, max_pages] page table, of which nothing is read.
        shared_prefix: leading keys that all sequences have in common, in whole pages.
        max_query_len: most queries of a sequence, as for `quire.plan`.
        max_seq_len: most keys of a sequence, shared ones included.
        num_tokens: most query tokens of the batch; by default as many as sequences of these lengths may have.

    Returns:
        True if sharing is predicted to pay.

    Raises:
        ValueError: for bounds that `quire.plan` refuses.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
        >>> table, seq_lens = torch.zeros(4, 8, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
        >>> batch = quire.Batch(table, seq_lens)
        >>> quire.is_worth_sharing(spec, batch, shared_prefix=96, max_query_len=1, max_seq_len=128)  # PyTorch serves it
        False
    """
    bounds, _ = check_plan_arguments(
        spec, batch, max_query_len=max_query_len, max_seq_len=max_seq_len, num_tokens=num_tokens
    )
    try:
        levels = check_shared_prefix(shared_prefix, spec, batch, bounds)
    except UnsupportedError:
        return False
    options = Options(None, None, False, None)
    flat, shared_launch = (decide_launch(spec, batch, bounds, options, each)[0] for each in ((), levels))
    return bool(levels) and pays_to_share(shared_launch, flat)


def plan_again(batch: Batch, bounds: Bounds, asked: Asked, workspace: torch.Tensor | None = None) -> Plan:
    """Return the plan that `plan` returned for a batch, or for one like it, as `Plan.asked` says."""
    spec, levels = decode(asked.spec), shared.levels_of(asked.shared_prefix)
    launch, reason = decide_launch(spec, batch, bounds, decode_options(asked.options), levels)
    return make_plan(spec, batch, launch, reason, workspace, bounds=bounds, asked=asked)


def decide_launch(
    spec: AttentionSpec, batch: Batch, bounds: Bounds, options: Options, levels: tuple[shared.Level, ...]
) -> tuple[Launch, str]:
    """Return the launch for what `plan` was asked, whose arguments were checked, and the reason."""
    device = batch.device
    properties = device_properties(device)
    has = batch.key_begin is not None, batch.tree_bits is not None, batch.cu_pages is not None
    lists = tuple(None if one is None else one.kind for one in (batch.chosen, batch.extra_chosen))
    by_torch = is_served_by_torch(device)
    spec = spec if by_torch else spec_for_kernels(spec)
    wanted = bounds if by_torch else bounds.for_decision()
    request = Request(spec, batch.num_seqs, batch.cu_seqlens_q is not None, wanted, properties, *has, *lists)
    decided = cpu.propose if by_torch else decide_once
    if levels:
        return shared.propose(request, levels, lambda part: decided(part, options))
    return decided(request, options)


@lru_cache(maxsize=1024)
def decide_once(request: Request, options: Options) -> tuple[Launch, str]:
    """Return what `decide` returns, and keep it: a server asks for the same in most steps.

    A launch keeps what follows from it in turn, such as its encoding.

    Raises:
        ValueError, UnsupportedError: as `check_device` and `decide`.
    """
    check_device(request, options)
    return decide(request, options)


CHOICES.append(decide_once)


def log_decision(made: Plan, options: Options) -> None:
    """Say what was asked, which launch was chosen and why, if it was not chosen for this spec and reason before."""
    asked = [words_of_batch(made.batch, made.bounds, made.launch), log.words_of(made.spec)]
    asked += [f"{name}={value}" for name, value in options._asdict().items() if value not in (None, False)]
    chosen = "; ".join([f"{made.launch}", made.reason, *passed_over(made.launch, options)])
    time = made.predicted_us
    predicted = "" if time is None else f"; {log.micros(time)} µs predicted"
    log.say_once(log.PLAN, f"{', '.join(asked)} -> {chosen}{predicted}", (made.spec, options, chosen))


def passed_over(launch: Launch, options: Options) -> list[str]:
    """Return in words why each other family for this kind of cache and batch does not serve a launch's request."""
    if options.kernel is not None or launch.name in ("torch", "shared_prefix"):  # of which none was asked
        return []
    request = launch.request
    asked = CHOSEN
    if request.chosen is None:
        asked = [name for name in FAMILIES if name not in CHOSEN and name.startswith("mla") == request.spec.latent]
    _, refusals = variants(request, options)
    return [f"{name} does not serve {refusals[name]}" for name in asked if name in refusals]


def check_device(request: Request, options: Options) -> None:
    """Raise unless Triton serves the request on its device, and the options fit it."""
    if interprets() and request.spec.dtype is torch.bfloat16:
        raise UnsupportedError(
            "dtype must not be bfloat16 under Triton's interpreter, got bfloat16, which it computes wrongly; "
            "use float32 or float16 there"
        )
    config, spec = options.config, request.spec
    if config is None:
        return
    if config.hints and not request.device.has_mfma:
        raise UnsupportedError(
            f"config must leave {' and '.join(config.hints)} at 0 here, got hints for the compiler of AMD's GPUs; "
            "leave them out"
        )
    wanted = padded(spec.head_dim), padded(spec.head_dim_v)
    if (config.block_d, config.block_dv) != wanted:
        raise ValueError(
            f"config must have block_d and block_dv {wanted}, the head dims padded to powers of two, "
            f"got {(config.block_d, config.block_dv)}; make it for this spec"
        )


def decide(request: Request, options: Options) -> tuple[Launch, str]:
    """Return the launch of least predicted time for a request, and the reason.

    Raises:
        UnsupportedError: no kernel family serves the request, or the caller's does not.
    """
    bounds = request.bounds
    tokens = min(bounds.num_tokens, request.num_seqs * bounds.max_query_len)
    queries = min(bounds.max_query_len, max(1, tokens))  # no sequence has more queries than the batch has tokens
    if (tokens, queries) != (bounds.num_tokens, bounds.max_query_len):
        request = replace(request, bounds=replace(bounds, num_tokens=tokens, max_query_len=queries))
    return choose(request, options)


def make_plan(
    spec: AttentionSpec,
    batch: Batch,
    launch: Launch,
    reason: str,
    workspace: torch.Tensor | None = None,
    bounds: Bounds | None = None,
    asked: Asked | None = None,
) -> Plan:
    """Return a plan for a launch, with its scratch from `workspace`, or newly allocated.

    Its bounds are those that the launch was decided for, if none are given.

    Raises:
        ValueError: the workspace does not fit.
    """
    size = launch.scratch_size()
    if workspace is None:
        workspace = scratch.allocate(size, batch.device)
    elif workspace.numel() < size.total:
        raise ValueError(
            f"workspace must be uint8 with at least {size.total} bytes, got {workspace.numel()}; "
            "allocate torch.zeros of quire.workspace_size(...) bytes"
        )
    runner, bounds = launch.bind(batch, workspace), bounds or launch.request.bounds
    made = Plan(spec, batch, bounds, launch, reason, workspace, runner, asked)
    return watched(made) if log.LAUNCH.isEnabledFor(log.DEBUG) or ranges.are_on() else made


def watched(made: Plan) -> Plan:
    """Return a plan whose calls are timed if `quire.launch` speaks, and have ranges while a profiler is on."""
    runner, words = made.runner, words_of_batch(made.batch, made.bounds, made.launch)
    if log.is_on(log.LAUNCH) and made.asked is not None:  # a warm-up's plans have no keys
        runner = times.timed(runner, made.launch, words, made.predicted_us, made.batch.device)
    if ranges.are_on():
        runner = ranges.in_range(runner, f"quire {made.launch.name}: {words}")
    return replace(made, runner=runner)


def check_counters(launch: Launch) -> None:
    """Raise unless the launch has its counters where all plans of a workspace have theirs."""
    request = launch.request
    if launch.scratch_size().counters > scratch.counter_bytes(request.device, request.spec.num_kv_heads):
        raise ValueError(
            f"num_splits must leave at most {scratch.MAX_PROGRAMS_PER_SM} programs per SM with a workspace, "
            f"got {launch}; pass fewer splits, or leave out the workspace"
        )
