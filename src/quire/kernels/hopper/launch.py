"""`HopperLaunch`: a launch of the Hopper kernel, and when a plan has one."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch import tree
from quire.dispatch.config import CostModel, HopperConfig
from quire.dispatch.request import Bounds, Options, Request, cdiv
from quire.kernels.hopper.tma import matrices_of_cache
from quire.kernels.launch import Runner
from quire.kernels.portable import PortableLaunch
from quire.kernels.scratch import ScratchSize, counter_bytes
from quire.kernels.split_kv.launch import SplitKVLaunch, rounded
from quire.kernels.split_kv.launch import propose as propose_portable

MAX_DECODE_ROWS = 16  # sequences of no more rows than this go to the decode launch of a mixed batch


@dataclass(frozen=True)
class HopperLaunch:
    """A persistent, warp-specialised kernel for prompts; a second launch for decoding sequences, or for combining splits.

    Attributes:
        request: what it serves.
        config: of the kernel.
        fallback: the launch for tensors that TMA cannot address, and for scales per token: caches come later than plans.
        num_splits: into how many splits the keys of each work tile are cut, to be combined by a second launch; 1 where they are not.
        decode: the launch for sequences of few queries, concurrent with this one; None where there is none.
    """

    request: Request
    config: HopperConfig
    fallback: PortableLaunch
    num_splits: int = 1
    decode: SplitKVLaunch | None = None

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "hopper"

    @property
    def max_decode_queries(self) -> int:
        """Sequences of at most this many queries are the decode launch's; 0 where there is none."""
        return 0 if self.decode is None else self.decode.max_decode_queries

    @property
    def split_rows(self) -> int:
        """Rows of the states of splits: those of as many work tiles as run at once, whatever the bounds."""
        return 64 * self.config.num_warpgroups * self.request.device.num_sms if self.num_splits > 1 else 0

    def num_work_tiles(self, num_tokens: int) -> int:
        """Return the most work tiles, before they are split, that `num_tokens` query tokens need over all heads."""
        if num_tokens == 0:
            return 0
        request, block_t = self.request, self.config.block_t
        blocks = min(
            num_tokens // block_t + request.num_seqs, request.num_seqs * cdiv(request.bounds.max_query_len, block_t)
        )
        return blocks * (request.spec.num_q_heads // self.config.heads)

    def num_programs(self, num_tokens: int) -> int:
        """Return the programs of the grid: as many as run at once, or fewer if there are fewer work tiles."""
        resident = self.request.device.num_sms * self.config.programs_per_sm
        return min(self.num_work_tiles(num_tokens) * self.num_splits, resident)

    def scratch_size(self) -> ScratchSize:
        """Return the scratch for the tile counter, and for the states of splits or the decode launch."""
        if self.decode is not None:
            size, states = self.decode.scratch_size(), 0
        else:
            size, states = ScratchSize(), 4 * self.split_rows * (self.request.spec.head_dim_v + 1)
        fallback = self.fallback.scratch_size()
        counters = max(counter_bytes(self.request.device, 0), size.counters, fallback.counters)
        return ScratchSize(max(counters + states, size.total, fallback.total), counters)

    def constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs, but those that a cache decides."""
        from quire.kernels import mods

        spec, config = self.request.spec, self.config
        return {
            "NUM_KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim,
            "SCORE_MOD": mods.score_mod(spec), "WARPGROUPS": config.num_warpgroups, "BLOCK_T": config.block_t,
            "BLOCK_N": config.block_n, "STAGES": config.num_stages, "Q_STAGES": config.num_q_stages,
            "QUANTISED_STAGES": config.num_quantised_stages, "FP8_MMA": config.fp8_mma,
        }  # fmt: skip

    def compile_key(self) -> Hashable:
        """Return what tells the compiled kernels from others, for caches of one kind."""
        decode = None if self.decode is None else self.decode.compile_key()
        return self.name, self.num_splits > 1, decode, *sorted(self.constexprs().items(), key=lambda item: item[0])

    def for_cache(self, cache: PagedKVCache) -> "HopperLaunch | PortableLaunch":
        """Return this launch, or its fallback where TMA cannot address the cache."""
        return self.fallback if matrices_of_cache(cache) is None else self

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return what launches it for a batch, with scratch in a workspace of `scratch_size` bytes."""
        from quire.kernels.hopper.runner import HopperRunner

        assert workspace is not None
        return HopperRunner(self, batch, workspace)

    def __str__(self) -> str:
        config = self.config
        details = f"{config.num_stages} stages, {self.num_work_tiles(self.request.bounds.num_tokens)} work tiles"
        if config.fp8_mma:
            details += ", products in fp8"
        if self.num_splits > 1:
            details += f", num_splits {self.num_splits}"
        if self.decode is not None:
            details += f"; decode launch: {self.decode}"
        return (
            f"Hopper kernel: {config.block_t} queries × {config.heads} heads × {config.block_n} keys, {details}; "
            f"fallback for scales per token and tensors that TMA cannot address: {self.fallback}"
        )


def propose(request: Request, options: Options) -> tuple[HopperLaunch, str] | str:
    """Return a launch of the Hopper kernel and the reason; or why it does not serve, or is not the faster one."""
    spec, bounds = request.spec, request.bounds
    if options.config is not None or options.num_splits is not None or options.batch_invariant:
        return "a config, num_splits or batch_invariant of the caller's"
    costs = tree.cost_model(spec, request.device)
    config = tree.hopper_config(spec, request.device, bounds.max_seq_len <= costs.short_context)
    if isinstance(config, str):
        return config
    if not request.has_cu_seqlens:
        return "a batch without cu_seqlens_q"
    fallback, reason = propose_portable(request, options)
    launch = HopperLaunch(request, config, fallback)
    launch = replace(launch, num_splits=choose_num_splits(launch, costs))
    if options.kernel is None and launch.num_splits == 1:
        if fallback.name != "block" or not tree.prefers_hopper(spec, request.device, *rounded(request)):
            return "batches like this, where the portable kernels are faster"
    return with_decode_launch(launch, costs), reason


def choose_num_splits(launch: HopperLaunch, costs: CostModel) -> int:
    """Return into how many splits the keys of each work tile are cut: 1, unless work tiles alone leave half of the device idle."""
    bounds, device = launch.request.bounds, launch.request.device
    num_work_tiles = launch.num_work_tiles(bounds.num_tokens)
    may_decode = bounds.num_tokens < launch.request.num_seqs * bounds.max_query_len
    short = bounds.max_query_len < launch.config.block_t or bounds.max_seq_len <= costs.short_context
    if may_decode or short or num_work_tiles == 0:
        return 1
    most = bounds.max_seq_len // (costs.hopper_min_tiles_per_split * launch.config.block_n)
    return max(1, min(device.num_sms // num_work_tiles, most, costs.hopper_max_splits))


def with_decode_launch(launch: HopperLaunch, costs: CostModel) -> HopperLaunch:
    """Return the launch with a decode launch, where the batch may mix decoding sequences with prompts.

    The host knows the number of tokens, not the length of each sequence: lengths differ if there are fewer tokens than equal lengths would make.
    """
    request, bounds = launch.request, launch.request.bounds
    max_queries = max(1, MAX_DECODE_ROWS // request.spec.group_size)
    may_decode = request.num_seqs > 1 and bounds.num_tokens < request.num_seqs * bounds.max_query_len
    if not may_decode or bounds.max_query_len <= max_queries:
        return launch
    num_tokens = min(bounds.num_tokens, request.num_seqs * max_queries)
    decoding = replace(request, bounds=Bounds(max_queries, bounds.max_seq_len, num_tokens))
    decode, _ = propose_portable(decoding, Options())
    if not isinstance(decode, SplitKVLaunch):
        return launch
    # The decoding sequences may have the longest contexts: prompts are then of short ones.
    short = bounds.max_query_len <= costs.short_context and bounds.max_seq_len <= 4 * costs.short_context
    config = tree.hopper_config(request.spec, request.device, short)
    assert isinstance(config, HopperConfig)
    return replace(launch, config=config, decode=replace(decode, max_decode_queries=max_queries))
