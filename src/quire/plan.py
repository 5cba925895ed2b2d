"""`Plan`: how a batch is launched, decided once per step (or once per captured graph) and shared by all layers.

A plan is made from host numbers only. Lengths and page tables stay on the device and may change under it, as long as they keep within the
bounds it was made for.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton

from quire.batch import Batch
from quire.dispatch.config import HopperConfig, KernelConfig
from quire.dispatch.device import DeviceProperties, device_properties
from quire.dispatch.tree import hopper_config, power_of_two, prefers_hopper, rounded, select
from quire.errors import UnsupportedError
from quire.kernels.split_kv.kernel import FEW_TILES
from quire.kernels.views import Scratch
from quire.spec import AttentionSpec

MERGE_COST = (
    0.29  # of one partial state, in tiles of keys (eight at once take 1.5 µs, a tile 0.65 µs; NVIDIA H200, 2026-11-20)
)
MANY_SHARES = 64  # of each KV head
NEVER = 1 << 30  # tiles
PROGRAMS_PER_SM = 16  # more programs than this are never planned for a multiprocessor
SHORT_CONTEXT = 1024  # keys, up to which the Hopper kernel has programs of one warpgroup (NVIDIA H200, 2026-11-21)
BLOCK_COUNTER = 128  # bytes, a line of the cache: what follows begins at one
CHUNK = 256  # keys between the borders of a batch-invariant sum
LEAST_TILES, MOST_PARTS = 2, 15  # of the keys of a block of the Hopper kernel, where they are cut
MAX_SPLITS = 128  # of one sequence's keys, where the caller chooses


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Carry every decision of a launch; `repr` tells them, and why.

    Attributes:
        spec: what is computed.
        batch: the sequences, read on the device at launch.
        kernel: "triton", "hopper" for prompts on such a GPU, or "torch" for CPU tensors outside Triton's interpreter.
        max_query_len: most queries of any sequence.
        max_seq_len: most keys of any sequence.
        num_tokens: most query tokens of the whole batch.
        properties: of the device.
        tile: the kernel's configuration; None for "torch".
        num_shares: equal shares into which the keys of the whole batch are cut, per KV head; 0 where a program owns a block of rows and all its keys.
        scratch: partial states of blocks that are cut; None where none is.
        why: the reasons, in words.
        merge_cost: what a partial state costs, in tiles of keys; 0 where the caller chose how many there are.
        chunk: keys of a state of its own, where results do not depend on the rest of the batch; else 0.
        workspace: the memory that `scratch` lies in.
        fast: configuration of the Hopper kernel; None for other kernels.
        num_parts: into how many parts the keys of each of its blocks are cut, to be merged by a second launch; 1 where they are not.
        instead: the plan for tensors that the Hopper kernel does not serve, where keys are cut; else `tile` serves these, block by block.
        beside: the plan of a second launch, which runs beside the Hopper kernel and serves the sequences of at most `few` queries; None where there is none.
        few: as said; 0 where one launch serves all sequences.
        prepared: launches made so far, each ready to be made again with other tensors of the same strides.
    """

    spec: AttentionSpec
    batch: Batch
    kernel: str
    max_query_len: int
    max_seq_len: int
    num_tokens: int
    properties: DeviceProperties
    tile: KernelConfig | None
    num_shares: int
    scratch: Scratch | None
    why: str
    merge_cost: float = MERGE_COST
    chunk: int = 0
    workspace: torch.Tensor | None = None
    fast: HopperConfig | None = None
    num_parts: int = 1
    instead: "Plan | None" = None
    beside: "Plan | None" = None
    few: int = 0
    prepared: dict[tuple, Any] = field(default_factory=dict)

    @property
    def search(self) -> bool:
        """Whether a sequence may have several blocks of rows, so that a program has to search for its own."""
        return self.tile is not None and self.max_query_len * self.spec.group_size > self.tile.block_m

    @property
    def full_tile_loop(self) -> bool:
        """Whether tiles that every row sees whole have a loop of their own; in shares only where a sequence is one block: short shares would pay for it."""
        return self.tile.full_tile_loop and not (self.num_shares and self.search)

    @property
    def partial_rows(self) -> int:
        """Rows of a partial state: as few as sequences have, rounded up, so that few lengths of steps decide what is compiled."""
        return min(self.tile.block_m, power_of_two(max(1, self.max_query_len) * self.spec.group_size))

    @property
    def two_level(self) -> bool:
        """Whether partial states that are many are merged in two steps: large ones, and those of single queries where they may be many."""
        if self.chunk:
            return False
        if self.max_query_len > 1:
            return self.partial_rows >= 16
        return triton.cdiv(self.max_seq_len, self.tile.block_n) > self._long

    @property
    def long(self) -> int:
        """Tiles of keys beyond which sequences are cut into more shares, since two steps merge their states."""
        return self._long if self.two_level else NEVER

    @property
    def _long(self) -> int:
        room = self.properties.num_sms * self.tile.programs_per_sm // self.spec.num_kv_heads
        return NEVER if room < MANY_SHARES else 48 if room >= 2 * MANY_SHARES and self.partial_rows < 16 else 96

    @property
    def has_scratch(self) -> bool:
        """Whether a launch needs partial states or a counter."""
        return self.num_shares > 0 or self.fast is not None

    @property
    def seqs_at_once(self) -> int:
        """Sequences that a program looks at in one step when it finds its share."""
        return 32 if self.batch.num_seqs <= 32 else 256

    def num_programs(self, num_tokens: int) -> int:
        """Return how many programs a launch for `num_tokens` query tokens has."""
        num_blocks = self.num_q_blocks(num_tokens)
        return (self.num_shares if self.num_shares and num_blocks else num_blocks) * self.spec.num_kv_heads

    def num_q_blocks(self, num_tokens: int) -> int:
        """Return how many blocks of rows `num_tokens` query tokens need at most, per KV head."""
        num_seqs = self.batch.num_seqs
        if not self.search:
            return num_seqs if num_tokens else 0
        if self.batch.cu_seqlens_q is None:
            return num_seqs * triton.cdiv(self.spec.group_size, self.tile.block_m)
        return num_tokens * self.spec.group_size // self.tile.block_m + num_seqs

    def num_items(self, num_tokens: int) -> int:
        """Return how many blocks of the Hopper kernel `num_tokens` query tokens need at most, over all heads."""
        num_seqs, block_t = self.batch.num_seqs, self.fast.block_t
        blocks = (
            min(num_tokens // block_t + num_seqs, num_seqs * triton.cdiv(self.max_query_len, block_t))
            if num_tokens
            else 0
        )
        return blocks * (self.spec.num_q_heads // self.fast.heads)

    def __repr__(self) -> str:
        shape = (
            f"{self.batch.num_seqs} sequences, at most {self.max_query_len} queries and {self.max_seq_len} keys each"
        )
        if self.tile is None:
            return f"Plan(kernel={self.kernel!r}: {shape}; {self.why})"
        t, heads = self.tile, self.spec.num_kv_heads
        if self.fast is not None:
            f = self.fast
            beside = (
                ""
                if self.beside is None
                else f"; sequences of at most {self.few} queries beside it, by {self.beside!r}"
            )
            parts = "" if self.num_parts == 1 else f", their keys in {self.num_parts} parts"
            return (
                f"Plan(kernel={self.kernel!r}: {shape}; blocks of {f.block_t} queries × {f.heads} heads, tiles of {f.block_n} keys, "
                f"{f.num_stages} stages{', products in fp8' * f.in_fp8}, {self.num_items(self.num_tokens)} blocks{parts}; {self.why}; "
                f"scales per token and tensors that the copy engine cannot address: kernel 'triton', tile {t.block_m} rows × {t.block_n} keys{beside})"
            )
        parts = f"{self.num_shares} shares" if self.num_shares else f"{self.num_q_blocks(self.num_tokens)} blocks"
        return (
            f"Plan(kernel={self.kernel!r}: {shape}; tile {t.block_m} rows × {t.block_n} keys, {t.num_warps} warps, {t.num_stages} stages, "
            f"{parts} × {heads} KV heads{', batch-invariant' if self.chunk else ''}; {self.why})"
        )


def plan(
    spec: AttentionSpec,
    batch: Batch,
    *,
    max_query_len: int,
    max_seq_len: int,
    num_tokens: int | None = None,
    num_splits: int | None = None,
    tile: KernelConfig | None = None,
    batch_invariant: bool = False,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> Plan:
    """Decide how `batch` is launched, from host numbers only.

    Make it once per step and share it between the layers that have this spec; or once per captured graph, with the largest lengths that the graph
    shall serve. A plan owns its scratch memory, so two plans may run at the same time on two streams, one plan may not.

    Args:
        spec: what is computed.
        batch: the sequences.
        max_query_len: an upper bound of any sequence's queries in this batch.
        max_seq_len: an upper bound of any sequence's keys.
        num_tokens: an upper bound of the batch's query tokens; `num_seqs * max_query_len` when not given.
        num_splits: into how many parts the keys of a sequence are cut, on average over the batch, from 1 to 128; chosen to fill the device when not given.
        tile: the kernel's configuration; chosen by the device's decision tree when not given.
        batch_invariant: make each token's result depend on its own sequence alone, bit for bit: not on the rest of the batch, nor on how a prompt is split
            into chunks, nor on the bounds given here. Decode pays some per cent, long prompts several times: they take the tile that decode takes.
        workspace: uint8 memory for the scratch, all 0 when it is first used, which plans that never run at the same time may share; of
            `quire.workspace_size` bytes, it serves every plan within those bounds. Allocated when not given.
        kernel: "triton" for the portable kernels, "hopper" for the one for prompts on a Hopper GPU; chosen when not given. Caches come later: one with
            pages, strides or scales that "hopper" does not serve is served by the portable tile that the plan names.

    Returns:
        The plan, with its scratch memory.

    Raises:
        ValueError: a bound is negative, num_splits out of range, or the workspace too small.
        UnsupportedError: bfloat16 under Triton's interpreter, batch_invariant for CPU tensors outside it, a tile with hints for another target, or a kernel
            that does not serve the request.
        RuntimeError: the batch is on a device that has no kernel.
    """
    for name, value in (
        ("max_query_len", max_query_len),
        ("max_seq_len", max_seq_len),
        ("num_tokens", num_tokens or 0),
    ):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}; pass an upper bound over the batch")
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be from 1 to {MAX_SPLITS}, got {num_splits}; leave it out to have it chosen")
    if batch.cu_seqlens_q is None and max_query_len != 1:
        raise ValueError(
            f"max_query_len must be 1 where the batch has no cu_seqlens_q, got {max_query_len}; say in the batch which queries are whose"
        )
    if num_tokens is None:
        num_tokens = batch.num_seqs * max_query_len
    properties = device_properties(batch.device)
    if tile is not None and (tile.waves_per_eu or tile.matrix_instr_nonkdim) and not properties.has_mfma:
        raise UnsupportedError(
            "tile must leave waves_per_eu and matrix_instr_nonkdim at 0 here, got hints for the compiler of AMD's GPUs; leave them out"
        )
    in_torch = batch.device.type == "cpu" and not triton.knobs.runtime.interpret
    if in_torch and batch_invariant:
        raise UnsupportedError(
            "batch_invariant must be left out for CPU tensors, which PyTorch serves with no such promise; plan for a GPU"
        )
    if in_torch:
        why = "CPU tensors: vectorised PyTorch; Triton has no CPU driver"
        return Plan(spec, batch, "torch", max_query_len, max_seq_len, num_tokens, properties, None, 0, None, why)
    if batch.device.type == "cpu" and spec.dtype is torch.bfloat16:
        raise UnsupportedError(
            "dtype must not be bfloat16 under Triton's interpreter, which computes it on raw bits and wrongly; use float32 or float16 there"
        )
    if batch.device.type not in ("cuda", "cpu"):
        raise RuntimeError(
            f"batch must be on a device that Triton serves (cuda, or cpu), got {batch.device}; move it there"
        )

    decided = decide(
        spec, batch, properties, max_query_len, max_seq_len, num_tokens, num_splits, tile, batch_invariant, kernel
    )
    return with_scratch(decided, workspace)


def decide(
    spec: AttentionSpec, batch: Batch, properties: DeviceProperties, max_query_len: int, max_seq_len: int, num_tokens: int,
    num_splits: int | None = None, tile: KernelConfig | None = None, batch_invariant: bool = False, kernel: str | None = None,
) -> Plan:  # fmt: skip
    """Decide all of a plan but its scratch, which it still lacks if it has shares."""
    seen = rounded(spec, properties, max_query_len, max_seq_len, num_tokens)
    why = "tile given by the caller"
    asked = tile is not None or num_splits is not None or batch_invariant
    if tile is None and batch_invariant:
        # By the generic tree: one tile serves all batches, and those that trees are fitted to have one each.
        tile, why = select(spec, properties, power_of_two(spec.group_size), 1, CHUNK, 1, fitted=False)
        if tile.block_dv > 128:  # two sums in registers, of the block and of the chunk
            tile = replace(tile, block_n=max(16, tile.block_n // 2), programs_per_sm=2)
    elif tile is None:
        tile, why = select(spec, properties, *seen)
    whole = Plan(spec, batch, "triton", max_query_len, max_seq_len, num_tokens, properties, tile, 0, None, why)
    num_blocks = whole.num_q_blocks(num_tokens)
    capacity = properties.num_sms * tile.programs_per_sm
    merge_cost = MERGE_COST if num_splits is None and not batch_invariant else 0.0
    if num_blocks == 0:
        num_shares = 0
    elif batch_invariant:
        num_shares = min(
            num_splits * num_blocks if num_splits else max(1, capacity // spec.num_kv_heads), max_units(whole)
        )
    elif num_splits is None:
        num_shares = choose_shares(whole, num_blocks, capacity)
    else:
        num_shares = num_splits * num_blocks if num_splits > 1 else 0
    if num_shares:
        why += f", {num_shares} shares for each of {spec.num_kv_heads} KV heads to fill {properties.num_sms} multiprocessors"
    decided = replace(
        whole, num_shares=num_shares, why=why, merge_cost=merge_cost, chunk=CHUNK if batch_invariant else 0, prepared={}
    )
    short = max_seq_len <= SHORT_CONTEXT
    fast = "a tile, num_splits or batch_invariant of the caller's" if asked else hopper_config(spec, properties, short)
    if isinstance(fast, str) or batch.cu_seqlens_q is None:
        if kernel == "hopper":
            raise UnsupportedError(
                f"kernel must be 'triton' or left out here, got 'hopper', which does not serve {fast}"
            )
        return decided
    prompts = replace(decided, kernel="hopper", num_shares=0, fast=fast)
    num_parts = choose_parts(prompts)
    if kernel == "hopper" or (
        kernel is None and (num_parts > 1 or (num_shares == 0 and prefers_hopper(spec, properties, *seen)))
    ):
        decided = replace(prompts, num_parts=num_parts, instead=decided if num_parts > 1 else None)
        # Decoding sequences between prompts are read as if they were alone. Where all lengths can be alike, there are none.
        few = max(1, 16 // spec.group_size)
        if batch.num_seqs > 1 and num_tokens < batch.num_seqs * max_query_len and max_query_len > few:
            beside = decide(
                spec, batch, properties, few, max_seq_len, min(num_tokens, batch.num_seqs * few), kernel="triton"
            )
            if beside.num_shares:
                short = max_query_len <= SHORT_CONTEXT and max_seq_len <= 4 * SHORT_CONTEXT  # they may have the longest
                return replace(
                    decided, fast=hopper_config(spec, properties, short), beside=replace(beside, few=few), few=few
                )
    return decided


def choose_parts(decided: Plan) -> int:
    """Return into how many parts the Hopper kernel cuts the keys of its blocks, which alone would leave half of the device idle; 1 to leave them whole."""
    num_items = decided.num_items(decided.num_tokens)
    unequal = (
        decided.num_tokens < decided.batch.num_seqs * decided.max_query_len
    )  # perhaps with sequences that are decoding
    if (
        unequal
        or decided.max_query_len < decided.fast.block_t
        or decided.max_seq_len <= SHORT_CONTEXT
        or num_items == 0
    ):
        return 1
    most = decided.max_seq_len // (LEAST_TILES * decided.fast.block_n)
    return max(1, min(decided.properties.num_sms // num_items, most, MOST_PARTS))


def max_units(decided: Plan) -> int:
    """Return how many chunks the batch has at most, once for each block of rows."""
    return decided.num_q_blocks(decided.num_tokens) * max(1, triton.cdiv(decided.max_seq_len, CHUNK))


def scratch_bytes(decided: Plan) -> tuple[int, int]:
    """Return the bytes of scratch that a plan needs in all, and those of its counters, which come first and are 0 between launches."""
    if decided.beside is not None:
        return scratch_bytes(decided.beside)
    spec = decided.spec
    if decided.fast is not None:
        counters = counter_bytes(decided.properties, 0)
        instead = 0 if decided.instead is None else scratch_bytes(decided.instead)[0]
        return max(counters + 4 * rows_of_parts(decided) * (spec.head_dim_v + 1), instead), counters
    num_slots = max_units(decided) if decided.chunk else 2 * decided.num_shares
    # One from which blocks are drawn, two for each program. All parts are whole lines, and no batch's size decides what is compiled.
    counters = counter_bytes(decided.properties, decided.num_shares * spec.num_kv_heads)
    rows = 32 * triton.cdiv(num_slots * spec.num_kv_heads * decided.partial_rows, 32)
    return counters + 4 * rows * (spec.head_dim_v + 2), counters


def rows_of_parts(decided: Plan) -> int:
    """Return the rows of the states of parts: those of as many blocks as run at once, whatever the bounds."""
    return 64 * decided.fast.num_warpgroups * decided.properties.num_sms if decided.num_parts > 1 else 0


def counter_bytes(properties: DeviceProperties, num_programs: int) -> int:
    """Return the bytes of counters for so many programs of shares, or for the most that are ever planned, if these are more."""
    return BLOCK_COUNTER + 128 * triton.cdiv(max(PROGRAMS_PER_SM * properties.num_sms, num_programs), 16)


def with_scratch(decided: Plan, workspace: torch.Tensor | None = None) -> Plan:
    """Return the plan with its scratch, from `workspace` or newly allocated; the plan as it is where it needs none."""
    if not decided.has_scratch:
        return decided
    spec, device = decided.spec, decided.batch.device
    num_bytes, counters = scratch_bytes(decided)
    if workspace is None:
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        workspace[:counters].zero_()
    elif (
        workspace.dtype is not torch.uint8
        or workspace.dim() != 1
        or workspace.device != device
        or workspace.numel() < num_bytes
    ):
        raise ValueError(
            f"workspace must be uint8 [at least {num_bytes}] on {device}, got {workspace.dtype} {tuple(workspace.shape)} on {workspace.device}; "
            "allocate torch.zeros of quire.workspace_size(...) bytes"
        )
    elif counters > counter_bytes(decided.properties, spec.num_kv_heads):
        raise ValueError(
            f"num_splits must leave at most {PROGRAMS_PER_SM} programs per multiprocessor with a workspace, got {decided.num_shares} shares"
        )
    if decided.fast is not None:
        states, split = workspace[counters:num_bytes].view(torch.float32), rows_of_parts(decided) * spec.head_dim_v
        shape = rows_of_parts(decided) // (spec.num_q_heads * decided.num_parts), spec.num_q_heads, decided.num_parts
        used = math.prod(shape)
        acc, lse = (
            states[: used * spec.head_dim_v].view(*shape, spec.head_dim_v),
            states[split : split + used].view(shape),
        )
        drawn = Scratch(acc, lse, None, workspace[:BLOCK_COUNTER].view(torch.int32))
        others = {
            name: other and with_scratch(other, workspace)
            for name, other in (("beside", decided.beside), ("instead", decided.instead))
        }
        return replace(decided, workspace=workspace, scratch=drawn, **others, prepared={})
    rows = (num_bytes - counters) // (4 * (spec.head_dim_v + 2))
    counter, states = (
        workspace[BLOCK_COUNTER:counters].view(torch.int32),
        workspace[counters:num_bytes].view(torch.float32),
    )
    return replace(
        decided,
        workspace=workspace,
        scratch=Scratch(states[2 * rows :], states[:rows], states[rows : 2 * rows], counter),
        prepared={},
    )


def choose_shares(whole: Plan, num_blocks: int, capacity: int) -> int:
    """Return into how many shares a batch is best cut, per KV head, on a device that holds `capacity` programs; 0 to leave blocks of rows whole.

    A sequence of several blocks is cut only where blocks alone would leave half of the device idle: uncut, each reads no more keys than it sees.
    """
    num_kv_heads, tiles = whole.spec.num_kv_heads, triton.cdiv(whole.max_seq_len, whole.tile.block_n)
    if tiles <= FEW_TILES.value or num_blocks == 0 or (whole.search and 2 * num_blocks * num_kv_heads > capacity):
        return 0
    # As the kernel finds it; programs that would find no share need not be launched.
    shortest = max(1, int(math.sqrt(tiles * (MERGE_COST / 10 if tiles > whole.long else MERGE_COST)) + 0.5))
    return min(max(1, capacity // num_kv_heads), num_blocks * triton.cdiv(tiles, shortest))
