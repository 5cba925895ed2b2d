"""`Plan`: how a batch is launched, decided once per step (or once per captured graph) and shared by all layers.

A plan is made from host numbers only. Lengths and page tables stay on the device. They may change between launches,
within the bounds that the plan was made for. Some kernels find a schedule from the lengths, once for all layers. It is
found again after PyTorch wrote to the lengths, and in each replay of a captured graph.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from quire import log
from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.checks.batch import check_reads
from quire.checks.plan import check_plan_arguments
from quire.checks.prefix import check_shared_prefix
from quire.compile_ahead.corners import corners
from quire.dispatch.config import KernelConfig
from quire.dispatch.device import device_properties, interprets, is_served_by_torch
from quire.dispatch.request import Bounds, Options, Request
from quire.dispatch.tree import CHOICES, padded
from quire.errors import UnsupportedError
from quire.kernels import ranges, scratch, times
from quire.kernels.chosen import launch as chosen_keys
from quire.kernels.chosen_hopper import launch as chosen_hopper
from quire.kernels.cpu import launch as cpu
from quire.kernels.hopper import choice as hopper
from quire.kernels.launch import Launch, Runner, alike, kernels_of
from quire.kernels.mla import launch as mla
from quire.kernels.mla_hopper import launch as mla_hopper
from quire.kernels.portable import choice as portable
from quire.kernels.portable.runner import PortableRunner
from quire.kernels.shared_prefix import launch as shared
from quire.launch_codec import decode, decode_options, encode, encode_options
from quire.spec import AttentionSpec

Proposal = Callable[[Request, Options], tuple[Launch, str] | str]

# Kernel families by the name that `plan(kernel=...)` takes, the preferred one first. Each proposes a launch, or says
# what it does not serve.
FAMILIES: dict[str, Proposal] = {
    "mla_hopper": mla_hopper.propose,
    "mla": mla.propose,
    "hopper": hopper.propose,
    "portable": portable.propose,
    "chosen_hopper": chosen_hopper.propose,
    "chosen": chosen_keys.propose,
}


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

        It is "block", "split_kv", "hopper", "mla", "mla_hopper", "chosen", "chosen_hopper", "torch" or "shared_prefix".
        """
        return self.launch.name

    @property
    def saved_keys(self) -> int:
        """Keys that only a flat plan would read: of each run, its shared keys times its sequences after the first."""
        return self.launch.saved_keys if isinstance(self.launch, shared.SharedPrefixLaunch) else 0

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
        return f"Plan({words_of_batch(self.batch, self.bounds, self.launch)}; {self.launch}; {self.reason})"


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
        config: configuration of the portable kernels; chosen by the device's decision tree when not given.
        batch_invariant: make each token's result depend on its sequence alone, bit for bit. It then does not depend on
            the rest of the batch, on how a prompt is split into chunks, or on the bounds given here: decode, drafts,
            chunks and whole prompts have the same bits. Decode of batches takes a few per cent longer, of one sequence
            up to a third, and so do prompts on Hopper GPUs. With heads of 256, long prompts take up to 1.6 times as
            long; a chunk of 64 queries on 8,192 keys twice, and prompts on quantised caches several times as long.
        workspace: uint8 memory for the scratch, all 0 when it is first used. Plans that never run at the same time may
            use the same workspace. One of `quire.workspace_size` bytes serves every plan within those bounds.
            Allocated when not given.
        kernel: "portable" for the portable kernel, "hopper" for the kernel for prompts on a Hopper GPU; for
            latents, "mla" for the portable kernel, "mla_hopper" for that for Hopper GPUs; for chosen keys, "chosen" for
            the portable kernels, "chosen_hopper" for that for latents on Hopper GPUs; the fastest when not given. A
            plan is made before the cache is known. If a kernel for Hopper GPUs does not serve the cache's pages,
            strides or scales, the fallback that the plan names does; `launch_for` says which one it is.
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
        kernels=tuple(FAMILIES),
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
    wanted = bounds if by_torch else bounds.for_decision()
    request = Request(spec, batch.num_seqs, batch.cu_seqlens_q is not None, wanted, properties, *has, *lists)
    families = tuple(FAMILIES.items())
    choose = cpu.propose if by_torch else partial(decide_once, families=families)
    if levels:
        return shared.propose(request, levels, lambda part: choose(part, options))
    return choose(request, options)


@lru_cache(maxsize=1024)
def decide_once(request: Request, options: Options, families: tuple[tuple[str, Proposal], ...]) -> tuple[Launch, str]:
    """Return what `decide` returns, and keep it: a server asks for the same in most steps.

    A launch keeps what follows from it in turn, such as its encoding. `families` are those of FAMILIES: for
    others, it is decided again.

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
    time = time_said(made)
    predicted = "" if time is None else f"; {log.micros(time)} µs predicted"
    log.say_once(log.PLAN, f"{', '.join(asked)} -> {chosen}{predicted}", (made.spec, options, chosen))


def time_said(made: Plan) -> float | None:
    """Return the µs that a plan predicts; None where it predicts none."""
    return getattr(made, "predicted_us", None)


def passed_over(launch: Launch, options: Options) -> list[str]:
    """Return what the families for such caches do not serve that were asked before the one of a launch."""
    said: list[str] = []
    if options.kernel is not None or launch.name in ("torch", "shared_prefix"):  # of which none was asked
        return said
    for name, propose in FAMILIES.items():
        proposal = propose(launch.request, options)
        if not isinstance(proposal, str):
            break
        if name.startswith("mla") == launch.request.spec.latent:
            said.append(f"{name} does not serve {proposal}")
    return said


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
    """Return the launch for a request, and the reason.

    It is the launch of the first kernel family that proposes one, if the corners of the request need the same kernels
    and as much scratch. Else it is that of the upper corner. What the caller of `plan` chose is kept.

    Raises:
        UnsupportedError: no kernel family serves the request, or the caller's does not.
    """
    bounds = request.bounds
    most_tokens = request.num_seqs * bounds.max_query_len
    if bounds.num_tokens > most_tokens:
        bounds = replace(bounds, num_tokens=most_tokens)
        request = replace(request, bounds=bounds)
    launch, reason = first_proposal(request, options)
    # No sequence has more queries than the batch has tokens.
    tight = replace(bounds, max_query_len=min(bounds.max_query_len, bounds.num_tokens))
    around = corners(replace(request, bounds=tight))
    if options._replace(batch_invariant=False) != Options() or around == [request]:
        return launch, reason
    missing, most = kernels_of(launch), 0
    for corner in around:
        kernels, scratch = needs_at(corner, options, tuple(FAMILIES.items()))
        missing, most = missing - kernels, max(most, scratch)
        if not missing and launch.with_most_partitions().scratch_size().total <= most:
            return launch, reason
    upper, reason = first_proposal(around[0], options)
    return with_sequences(upper, request.num_seqs), f"{reason}, for bounds rounded up"


@lru_cache(maxsize=4096)
def needs_at(
    request: Request, options: Options, families: tuple[tuple[str, Proposal], ...]
) -> tuple[frozenset[Hashable], int]:
    """Return which kernels and how many bytes of scratch a point of the grid needs; `families` as for `decide_once`."""
    launch, _ = first_proposal(request, options)
    return frozenset().union(*map(kernels_of, alike(launch))), launch.with_most_partitions().scratch_size().total


CHOICES.append(needs_at)


def with_sequences(launch: Any, num_seqs: int) -> Any:
    """Return a launch of an upper corner for as many sequences as a batch has, of which no grid may have more.

    Its tokens stay as many as they can be of as many. That changes no kernel.
    """
    request = launch.request
    tokens = min(request.bounds.num_tokens, num_seqs * request.bounds.max_query_len - request.is_ragged)
    request = replace(request, num_seqs=num_seqs, bounds=replace(request.bounds, num_tokens=tokens))
    parts = {part: getattr(launch, part, None) for part in ("fallback", "decode")}
    made = {name: with_sequences(part, num_seqs) for name, part in parts.items() if part is not None}
    return replace(launch, request=request, **made)


def first_proposal(request: Request, options: Options) -> tuple[Launch, str]:
    """Return the launch of the first kernel family that proposes one, and the reason; raise as `decide`."""
    refusals = []
    for name, propose in FAMILIES.items():
        if options.kernel not in (None, name):
            continue
        proposal = propose(request, options)
        if not isinstance(proposal, str):
            return proposal
        if options.kernel == name:
            others = " or ".join(repr(other) for other in FAMILIES if other != name)
            raise UnsupportedError(
                f"kernel must be {others} or left out here, got {name!r}, which does not serve {proposal}"
            )
        refusals.append(f"{name} does not serve {proposal}")
    raise UnsupportedError(f"spec must be one that a kernel serves, got {request.spec}: {', '.join(refusals)}")


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
        runner = times.timed(runner, made.launch, words, time_said(made), made.batch.device)
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
